//! One snapshot of everything that a request needs: the settings, and the state bound to them.

use std::sync::Arc;

use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use secrecy::ExposeSecret;

use crate::admit::limit::settings::OverLimit;
use crate::admit::limit::{LimitKind, LimitScope};
use crate::admit::pool_queue::{PoolQueue, PoolQueues};
use crate::classify::TargetHeaders;
use crate::config::{ClassSettings, Settings, TenantSettings};
use crate::forward::settings::Timeouts;
use crate::inspect::PromptHashes;
use crate::judge::Objectives;
use crate::observe::{ObserverOptions, TemplateCache};
use crate::record::{ClassShape, Recorder, SeriesShape, TenantShape};
use crate::route::settings::{Balance, Concurrency, PoolSettings};
use crate::route::{Fleet, Pool};
use crate::types::{ClassId, PoolId, TenantId};

/// Bound settings. A request keeps those of its arrival.
pub struct SettingsSnapshot {
    /// The checked settings.
    pub settings: Settings,
    /// The hashes of prompts that something depends on.
    pub prompt_hashes: PromptHashes,
    /// Requests are counted against the limits of their tenants: the settings name any.
    pub is_metered: bool,
    /// Whether a pool has seats and a queue.
    pub has_seats: bool,
    /// Whether waiting requests may get an early head.
    pub heads_go_ahead: bool,
    pools: Arc<[PoolHandle]>,
    /// One per class. Few, as are the pools.
    promises: Vec<ClassPolicy>,
}

/// The policy of one class, bound.
pub struct ClassPolicy {
    /// The class.
    pub class: Arc<ClassSettings>,
    /// Its name as a header value.
    pub shown: Option<HeaderValue>,
    /// Its time limits.
    pub timeouts: Arc<Timeouts>,
    /// Its objectives.
    pub objectives: Arc<Objectives>,
    /// Options of its observers.
    pub watch: ObserverOptions,
    pools: Arc<[PoolHandle]>,
}

/// A pool, bound.
pub struct PoolHandle {
    /// The checked settings.
    pub settings: Arc<PoolSettings>,
    /// Its name as a header value.
    pub shown: Option<HeaderValue>,
    /// Headers sent with every request to its engines.
    pub fixed_headers: Vec<(HeaderName, HeaderValue)>,
    /// Its queue; `None` without a limit.
    pub pool_queue: Option<Arc<PoolQueue>>,
    /// Its engines.
    pub live_pool: Arc<Pool>,
    /// Templates of its engines' responses.
    pub templates: Arc<TemplateCache>,
}

impl SettingsSnapshot {
    /// Binds settings that the fleet already follows; creates every metric series they can
    /// reach.
    #[must_use]
    pub fn new(settings: Settings, recorder: &Recorder, pool_queues: &PoolQueues, fleet: &Fleet) -> Self {
        recorder.bind(&shape(&settings));
        let bind = |pool| PoolHandle::new(pool, pool_queues, fleet);
        let pools: Arc<[PoolHandle]> = settings.pools.iter().map(bind).collect();
        let promise = |class: &Arc<ClassSettings>| ClassPolicy {
            watch: ObserverOptions {
                gap_edges: recorder.gap_edges(&class.id).unwrap_or_default(),
                itl: class.objectives.itl.map(|itl| itl.threshold),
                stall: class.objectives.stall,
                max_event: settings.max_event,
            },
            objectives: Arc::new(class.objectives.clone()),
            shown: HeaderValue::from_str(class.id.as_str()).ok(),
            timeouts: Arc::new(class.timeouts),
            class: Arc::clone(class),
            pools: Arc::clone(&pools),
        };
        let promises = settings.classes.iter().map(promise).collect();
        // Also before any limit is set, because one set by a reload must know the running requests.
        let is_named = |tenant: &TenantSettings| tenant.id != TenantId::anonymous() || !tenant.limits.is_empty();
        let is_metered = settings.tenants.iter().any(is_named);
        let prompt_hashes = PromptHashes {
            head: settings.pools.iter().any(|pool| pool.balance == Balance::PrefixAffinity),
            // Charges for unobserved output follow predictions, which use cached blocks; the journal records
            // the blocks of every prompt.
            blocks: is_metered || recorder.has_journal() || settings.pools.iter().any(|pool| weighs_blocks(pool)),
        };
        let has_seats = pools.iter().any(PoolHandle::is_limited);
        let heads_go_ahead = has_seats && settings.classes.iter().any(|class| class.timeouts.keepalive.is_some());
        SettingsSnapshot { promises, prompt_hashes, is_metered, has_seats, heads_go_ahead, pools, settings }
    }

    /// A pool of these settings.
    #[must_use]
    pub fn pool(&self, pool: &PoolId) -> Option<&PoolHandle> {
        find(&self.pools, pool)
    }

    /// Treatment of a tenant's requests beyond its limits.
    #[must_use]
    pub fn when_over_limit(&self, tenant: &TenantId) -> OverLimit {
        self.settings.tenants.get(tenant).map(|tenant| tenant.when_over_limit).unwrap_or_default()
    }

    /// The policy of a class.
    ///
    /// # Panics
    /// If the settings lack the class, which their check excludes.
    #[must_use]
    pub fn promise(&self, class: &ClassId) -> &ClassPolicy {
        let promise = self.promises.iter().find(|promise| promise.class.id == *class);
        promise.expect("the check of the settings knows every class that a rule names")
    }

    /// The classes that a tenant may use.
    #[must_use]
    pub fn classes_of(&self, tenant: &TenantId) -> Vec<ClassId> {
        let all = self.settings.classes.iter().map(|class| class.id.clone());
        all.filter(|class| self.settings.tenants.may_use(tenant, class)).collect()
    }
}

/// Whether it matters what the caches of a pool's engines hold: to its queue, or to which engine is asked.
fn weighs_blocks(pool: &PoolSettings) -> bool {
    pool.concurrency != Concurrency::Unlimited || pool.has_several_engines() && pool.balance != Balance::RoundRobin
}

fn find<'a>(pools: &'a [PoolHandle], pool: &PoolId) -> Option<&'a PoolHandle> {
    pools.iter().find(|bound| bound.settings.id == *pool)
}

fn tenant_shape(tenant: &TenantSettings) -> TenantShape {
    let both = |limit| LimitScope::ALL.map(|scope| (limit, scope));
    let limits = LimitKind::ALL.into_iter().flat_map(both).filter(|(limit, scope)| tenant.limits.has(*limit, *scope));
    let limits = limits.collect();
    TenantShape { id: tenant.id.clone(), classes: tenant.classes.clone(), limits }
}

/// The settings that determine metric series.
fn shape(settings: &Settings) -> SeriesShape {
    let class_shape = |class: &Arc<ClassSettings>| ClassShape {
        id: class.id.clone(),
        objectives: Arc::new(class.objectives.clone()),
        takes_targets: class.target_headers != TargetHeaders::Off,
    };
    let reach = |class: &Arc<ClassSettings>| {
        let id = class.id.clone();
        settings.routes.reach(&class.id).into_iter().map(move |(pool, model)| (id.clone(), pool, model))
    };
    SeriesShape {
        classes: settings.classes.iter().map(class_shape).collect(),
        default_class: settings.default_class.clone(),
        routes: settings.classes.iter().flat_map(reach).collect(),
        tenants: settings.tenants.iter().map(tenant_shape).collect(),
        labels: settings.labels.clone(),
    }
}

impl ClassPolicy {
    /// A pool of the settings.
    ///
    /// # Panics
    /// If the settings lack the pool, which their check excludes.
    #[must_use]
    pub fn pool(&self, pool: &PoolId) -> &PoolHandle {
        find(&self.pools, pool).expect("the check of the settings knows every pool that a route names")
    }
}

impl PoolHandle {
    fn new(pool: &Arc<PoolSettings>, pool_queues: &PoolQueues, fleet: &Fleet) -> Self {
        let mut fixed_headers = pool.headers.clone();
        let bearer = pool.api_key.as_ref().and_then(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose_secret())).ok()?;
            value.set_sensitive(true);
            Some((AUTHORIZATION, value))
        });
        fixed_headers.extend(bearer);
        let shown = HeaderValue::from_str(pool.id.as_str()).ok();
        let pool_queue = pool_queues.pool_queue(&pool.id).filter(|_| pool.concurrency != Concurrency::Unlimited);
        let live_pool = fleet.live_pool(&pool.id).expect("a fleet knows the pools that it follows");
        let templates = Arc::new(TemplateCache::new());
        PoolHandle { settings: Arc::clone(pool), shown, fixed_headers, pool_queue, live_pool, templates }
    }

    /// Whether its concurrency is limited.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.pool_queue.is_some()
    }
}
