//! The gateway's shared state, and the exchange of settings while it serves.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::loop_guard::LoopGuard;
use super::overload_board::OverloadBoard;
use super::request_body::BodyMemory;
use super::snapshot::SettingsSnapshot;
use super::unknown_names::UnknownNames;
use crate::admit::RateLimiter;
use crate::admit::pool_queue::{PoolQueue, PoolQueues};
use crate::admit::queue;
use crate::admit::redis::{CallResult, EDGES, GrantSource, SyncTask};
use crate::clock::{Alarms, Clock};
use crate::config::Settings;
use crate::dial::Dial;
use crate::forward::conn_pool::ConnPool;
use crate::inspect::{BlockKey, Ratios};
use crate::judge::Objectives;
use crate::record::journal::HashKey;
use crate::record::{EngineReport, Recorder, SeatReport, StoreReport};
use crate::route::settings::{Concurrency, PoolSettings};
use crate::route::{EngineView, Fleet, PoolTargets, PoolView};
use crate::types::{PoolId, Tick};

/// Interval at which seats follow the engines without requests.
const COUNT_EVERY: Duration = Duration::from_millis(100);
/// Interval at which a queue that waits for prefill pace is checked.
const PACE_EVERY: Duration = Duration::from_millis(20);
/// Interval at which learned state of removed engines is dropped.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// The gateway. Clones share one state.
#[derive(Clone)]
pub struct Gateway(Arc<GatewayState>);

/// Constructor arguments of a gateway.
pub struct GatewayDeps {
    /// The clock.
    pub clock: Clock,
    /// Opens connections to engines.
    pub dial: Arc<dyn Dial>,
    /// Records requests.
    pub recorder: Recorder,
    /// Seed of random choices: ties between engines, and values that must not be predictable.
    pub seed: u64,
}

/// The state that outlives reloads. Accessed through [`Gateway`].
pub struct GatewayState {
    /// The clock.
    pub clock: Clock,
    /// The current settings.
    pub live: ArcSwap<SettingsSnapshot>,
    /// All engines.
    pub fleet: Arc<Fleet>,
    /// Connections to engines.
    pub lines: Arc<ConnPool>,
    /// Records requests.
    pub recorder: Recorder,
    /// Timers.
    pub alarms: Arc<Alarms>,
    /// Ratios learned from usage.
    pub ratios: Ratios,
    /// The tenants' limits.
    pub limiter: RateLimiter,
    /// Their background task until it is started.
    sync_task: Mutex<Option<SyncTask>>,
    /// Memory held by request bodies.
    pub bodies: Arc<BodyMemory>,
    /// The key of the hashes of prompts' blocks: of this process alone, or of the journal.
    pub(super) block_key: ArcSwap<BlockKey>,
    /// Where requests wait for a seat.
    pub pool_queues: PoolQueues,
    /// Overload levels.
    pub levels: OverloadBoard,
    /// Ids of requests that engines have.
    pub(super) loops: LoopGuard,
    /// Logs unknown paths and models.
    pub(super) unknown_names: UnknownNames,
    draining: AtomicBool,
}

impl Gateway {
    /// A gateway with these settings. Starts no task: the owner runs the probes (`route::probe`),
    /// [`Gateway::run_seat_sync`] and [`Gateway::run_limit_sync`], and serves
    /// it.
    #[must_use]
    pub fn new(settings: Settings, deps: GatewayDeps) -> Self {
        let GatewayDeps { clock, dial, recorder, seed } = deps;
        let pool_queues = PoolQueues::new(clock);
        let (limiter, sync_task) = RateLimiter::new(&settings.limits_store, clock, seed);
        apply_to_admission(&limiter, &pool_queues, &settings, clock.now());
        let fleet = Fleet::new(seed);
        apply_to_fleet(&fleet, &settings, clock.now());
        // A journal whose hashes are to be compared with others' says by which key.
        let journal_key = settings.journal.as_ref().and_then(|journal| journal.hash_key.as_ref());
        let block_key = BlockKey::of(journal_key.map_or(seed, HashKey::block_seed));
        let gateway = Gateway(Arc::new(GatewayState {
            clock,
            lines: Arc::new(ConnPool::new(dial, clock)),
            alarms: Alarms::new(clock),
            ratios: Ratios::new(),
            loops: LoopGuard::default(),
            unknown_names: UnknownNames::default(),
            draining: AtomicBool::new(false),
            live: ArcSwap::from_pointee(SettingsSnapshot::new(settings, &recorder, &pool_queues, &fleet)),
            fleet: Arc::new(fleet),
            recorder,
            limiter,
            sync_task: Mutex::new(sync_task),
            bodies: Arc::default(),
            block_key: ArcSwap::from_pointee(block_key),
            pool_queues,
            levels: OverloadBoard::default(),
        }));
        gateway.apply_overload_settings(&gateway.live.load().settings);
        gateway.count_seats();
        gateway
    }

    /// Exchanges the settings. Requests in flight keep theirs; engines, connections, ratios, balances, seats
    /// and counters stay.
    pub fn reload(&self, settings: Settings) {
        apply_to_fleet(&self.fleet, &settings, self.clock.now());
        apply_to_admission(&self.limiter, &self.pool_queues, &settings, self.clock.now());
        self.count_seats();
        let live = Arc::new(SettingsSnapshot::new(settings, &self.recorder, &self.pool_queues, &self.fleet));
        self.live.store(Arc::clone(&live));
        self.apply_overload_settings(&live.settings);
    }

    /// Updates seats to the engines, and overload levels to the measurements, also without requests; drops
    /// learned state of removed engines. Never
    /// ends.
    pub async fn run_seat_sync(self) {
        let mut forgets = self.clock.now() + FORGET_EVERY;
        loop {
            let now = self.clock.now();
            if now >= forgets {
                forgets = now + FORGET_EVERY;
                self.forget_engines(now);
            }
            let counts = now + COUNT_EVERY;
            while self.pool_queues.any_waits() && self.clock.now() + PACE_EVERY < counts {
                self.clock.sleep_until(Some(self.clock.now() + PACE_EVERY)).await;
                self.pool_queues.all().iter().for_each(|(_, pool_queue)| pool_queue.expire());
            }
            self.clock.sleep_until(Some(counts)).await;
            self.count_seats();
            self.evaluate_overload();
        }
    }

    /// Runs the exchange with the limits store, if limits are shared. Ends only with
    /// [`Gateway::release_leases`].
    pub async fn run_limit_sync(self) {
        let sync_task = self.sync_task.lock().take();
        match sync_task {
            Some(sync_task) => sync_task.run().await,
            None => std::future::pending().await,
        }
    }

    /// Returns this gateway's leases of shared limits. Called when no request runs any more.
    pub async fn release_leases(&self) {
        if let RateLimiter::Shared(store) = &self.limiter {
            store.leave().await;
        }
    }

    /// Reports statistics of the limits store to the recorder, if limits are shared. Called before a metrics
    /// page is written.
    pub fn report_store(&self) {
        let RateLimiter::Shared(store) = &self.limiter else { return };
        let numbers = store.numbers();
        let (told, failed, gateways) = store.exchanged();
        let [lengths @ .., longer] = numbers.lengths;
        self.recorder.limits_store(StoreReport {
            up: numbers.up,
            calls: CallResult::ALL.iter().map(|ended| (ended.as_str(), numbers.calls(*ended))).collect(),
            lengths: (EDGES.into_iter().zip(lengths).collect(), longer),
            length: numbers.length,
            given_up: numbers.given_up,
            requests: GrantSource::ALL.iter().map(|by| (by.as_str(), numbers.requests(*by))).collect(),
            unspent: numbers.unspent,
            exchanges: vec![("told", told), ("failed", failed)],
            gateways,
        });
    }

    /// Reports all engines to the recorder, including those removed within ten minutes. Called before a metrics
    /// page is written.
    pub fn report_engines(&self) {
        let of_pool = |PoolView { pool, engines, .. }| {
            engines
                .into_iter()
                .map(move |engine: EngineView| (PoolId::clone(&pool), engine.engine.clone(), engine_report(&engine)))
        };
        self.recorder.engines(self.fleet.view(self.clock.now()).into_iter().flat_map(of_pool).collect());
    }

    /// Reports seats to the recorder. Called before a metrics page is
    /// written.
    pub fn report_seats(&self) {
        self.pool_queues.forget_left();
        let report = |(pool, pool_queue): (PoolId, Arc<PoolQueue>)| {
            let numbers = pool_queue.numbers();
            let report = SeatReport {
                seats: numbers.seats,
                taken: numbers.taken,
                prefill: numbers.reading,
                elsewhere: numbers.elsewhere,
            };
            (numbers.seats < usize::MAX).then_some((pool, report))
        };
        let mut seats: Vec<_> = self.pool_queues.all().into_iter().filter_map(report).collect();
        seats.sort_by(|a, b| a.0.cmp(&b.0));
        self.recorder.seats(seats);
    }

    /// Rejects new requests from now on; open ones continue.
    pub fn begin_drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether new requests are rejected.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

impl GatewayState {
    /// Number of available engines of a pool; updates its seats.
    pub fn engines_of(&self, pool: &PoolId, pool_queue: Option<&PoolQueue>) -> usize {
        let at = self.clock.now();
        let available = self.fleet.available(pool, at);
        if let Some((pool_queue, seats)) = pool_queue.zip(self.fleet.seats(pool, at)) {
            pool_queue.set_prefilling_engines(available.max(1));
            pool_queue.set_seats(seats);
        }
        available
    }

    fn forget_engines(&self, at: Tick) {
        let engines = self.fleet.view(at).into_iter().flat_map(|pool| pool.engines);
        self.ratios.keep_engines(&engines.map(|engine| engine.engine).collect());
    }

    /// Updates the seats of every pool to its engines.
    pub(super) fn count_seats(&self) {
        self.pool_queues.forget_left();
        self.fleet.compare_engines(self.clock.now());
        for (pool, pool_queue) in self.pool_queues.all() {
            pool_queue.set_pace(self.fleet.update_pace(&pool, self.clock.now()));
            self.engines_of(&pool, Some(&pool_queue));
        }
    }
}

/// The report of one engine for the metrics page. A removed engine counts as down, without other
/// values.
fn engine_report(engine: &EngineView) -> EngineReport {
    if engine.left.is_some() {
        return EngineReport::default();
    }
    EngineReport {
        up: engine.takes_requests(),
        drained: engine.is_drained,
        waiting: engine.waiting,
        running: engine.running,
        elsewhere: engine.elsewhere,
        kv_usage: engine.kv_usage,
        seats: engine.seats.map(f64::from),
        ttft_error: engine.errors.ttft,
        tpot_error: engine.errors.tpot,
    }
}

/// Applies settings to the fleet.
fn apply_to_fleet(fleet: &Fleet, settings: &Settings, at: Tick) {
    fleet.share_among(NonZeroU32::new(settings.replicas).unwrap_or(NonZeroU32::MIN));
    fleet.apply_settings(&settings.pools, at);
    for (pool, promised) in pool_targets(settings) {
        fleet.set_targets(&pool, promised);
    }
}

/// Applies settings to limits and queues.
fn apply_to_admission(limiter: &RateLimiter, pool_queues: &PoolQueues, settings: &Settings, at: Tick) {
    let limits = settings.tenants.iter().map(|tenant| (tenant.id.clone(), tenant.limits.clone()));
    limiter.reload(&limits.collect(), settings.replicas, at);
    let gateways = NonZeroU32::new(settings.replicas).unwrap_or(NonZeroU32::MIN);
    let queue = |pool: &Arc<PoolSettings>| {
        let reading = pool.queue.reading.shared_among(gateways);
        (pool.concurrency != Concurrency::Unlimited).then(|| queue::QueueSettings { reading, ..pool.queue.clone() })
    };
    let queues: Vec<_> = settings.pools.iter().map(|pool| (&pool.id, queue(pool))).collect();
    pool_queues.apply_settings(queues.iter().map(|(pool, queue)| (*pool, queue.as_ref())));
}

/// The strictest objectives of the classes that each pool serves.
fn pool_targets(settings: &Settings) -> BTreeMap<PoolId, PoolTargets> {
    let mut all: BTreeMap<PoolId, PoolTargets> = BTreeMap::new();
    for class in &settings.classes {
        let pools: BTreeSet<_> = settings.routes.reach(&class.id).into_iter().map(|(pool, _)| pool).collect();
        for pool in pools {
            let promised = all.entry(pool).or_default();
            let Objectives { ttft, tpot, e2e, .. } = &class.objectives;
            promised.ttft = promised.ttft.into_iter().chain(ttft.map(|ttft| ttft.threshold)).min();
            promised.tpot = promised.tpot.into_iter().chain(tpot.map(|tpot| tpot.threshold)).min();
            promised.e2e |= e2e.is_some();
            let attainments = ttft.iter().chain(tpot).chain(e2e).map(|objective| objective.attainment);
            promised.attainment = attainments.fold(promised.attainment, f64::max);
        }
    }
    all
}

impl Deref for Gateway {
    type Target = GatewayState;
    fn deref(&self) -> &GatewayState {
        &self.0
    }
}
