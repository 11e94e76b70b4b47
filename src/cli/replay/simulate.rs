//! The trace against a simulated fleet: the pools of the settings, with the gateway's scheduler, router and limiter.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};

use super::classes::ReplayedClasses;
use super::options::ReplayArgs;
use super::records::RecordLines;
use super::source::{FeedState, TraceFeed, TraceSource};
use crate::admit::limit::settings::{Limits, OverLimit};
use crate::cli::signals::ShutdownSignals;
use crate::clock::Clock;
use crate::config::Settings;
use crate::load::LoadRecord;
use crate::load::replay::{EngineSet, FleetPoolSummary, ReplayScore};
use crate::route::settings::{EngineSource, PoolSettings};
use crate::sim::engine::EngineSpec;
use crate::sim::fleet::{
    Arrival, ClassPools, EngineTotals, FurtherPool, GatewayScheduling, Incident, Machine, Mix, Policy, RecordedClass,
    RequestReport, Scenario, replay,
};
use crate::trace::{TraceRequest, journal_tenant};
use crate::types::{PoolId, TenantId};

/// Seed of the choice among equal engines.
const SEED: u64 = 1;

/// Downtime of an engine that does not return: longer than any trace.
const FOR_GOOD: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A pool of the fleet.
struct SimulatedPool {
    settings: PoolSettings,
    engines: usize,
}

/// A fleet that is ready to be simulated.
pub struct SimulatedFleet {
    pools: Vec<SimulatedPool>,
    spec: EngineSpec,
    gateways: NonZeroU32,
    tenants: TenantNames,
}

/// Results of a simulation, beside the scores.
pub struct SimulationEnd {
    /// Pools.
    pub pools: Vec<FleetPoolSummary>,
    /// Most requests at one time, waiting ones included.
    pub most_open: usize,
    /// The trace, as far as it was read.
    pub feed: FeedState,
    /// It was interrupted.
    pub interrupted: bool,
    /// Time that it took.
    pub took: Duration,
}

/// Limits by the tenants of the settings, and their names by the hashes of a journal.
#[derive(Default)]
struct TenantNames {
    by_hash: HashMap<u64, TenantId>,
    limits: BTreeMap<TenantId, Limits>,
    rejected: BTreeSet<TenantId>,
}

impl SimulatedFleet {
    /// The pools of the settings that a class's routes reach.
    ///
    /// # Errors Engines are missing or named wrongly, or their properties cannot be read.
    pub fn of(args: &ReplayArgs, classes: &ReplayedClasses, machine: Option<&Machine>) -> anyhow::Result<Self> {
        let mut pools = pools_of(classes);
        set_engines(&mut pools, &args.engines)?;
        let machine = match (machine, &args.engine) {
            (Some(machine), _) => Some(*machine),
            (None, Some(file)) => Some(read_machine(file)?),
            (None, None) => None,
        };
        let spec = EngineSpec { jitter: 0.0, ..machine.map_or_else(EngineSpec::default, |machine| machine.spec()) };
        let gateways = classes.settings.as_ref().and_then(|settings| NonZeroU32::new(settings.replicas));
        let fleet = SimulatedFleet {
            pools,
            spec,
            gateways: gateways.unwrap_or(NonZeroU32::MIN),
            tenants: TenantNames::of(classes),
        };
        for change in args.lose.iter().chain(&args.returned) {
            let is_there = |pool: &SimulatedPool| numbers(&fleet, pool, &change.engines).is_some();
            if !fleet.pools.iter().any(is_there) {
                let names: Vec<String> =
                    fleet.pools.iter().map(|pool| format!("{}/1 to {}", pool.settings.id, pool.engines)).collect();
                bail!("{change}: there is no such engine; there are {}", names.join(", "));
            }
        }
        Ok(fleet)
    }

    /// Longest prompt plus output.
    pub fn longest(&self) -> u64 {
        self.spec.max_model_len.min(self.spec.kv_tokens)
    }

    /// Replays the trace.
    ///
    /// # Errors
    /// The file cannot be opened again.
    pub fn replay(
        &self,
        args: &ReplayArgs,
        source: &TraceSource,
        classes: &ReplayedClasses,
        score: &mut ReplayScore,
        lines: &mut RecordLines,
    ) -> anyhow::Result<SimulationEnd> {
        let clock = Clock::start();
        let interrupted = interrupt_flag();
        let feed = source.feed(classes, Some(self.longest()))?;
        let state = feed.state();
        let routes = ClassRoutes { classes, known: HashMap::new(), unknown: 0 };
        let unknown_model = Cell::new(0);
        let arrivals =
            FleetArrivals { feed, fleet: self, routes, unknown_model: &unknown_model, interrupted: &interrupted };
        let mix = Mix::recorded(self.pools[0].engines, &recorded(classes), SEED);
        let policy = Policy::Scheduled(self.scheduling(classes));
        let scenario = Scenario { gateways: self.gateways, events: self.events(args), ..Scenario::default() };
        let block = source.format.block_tokens().unwrap_or(16);
        let mut served = vec![(0, 0); self.pools.len()];
        let mut number = 0;
        let ended = replay(&mix, &policy, arrivals, &self.spec, block, &scenario, |told| {
            if let Some(pool) = told.engine.and_then(|engine| self.pool_of(engine)) {
                served[pool].0 += 1;
                served[pool].1 += u64::from(told.went_on);
            }
            let record = record_of(told, number, classes);
            number += 1;
            score.push(&record);
            lines.push(&record);
        });
        let pools =
            self.ranges().zip(&self.pools).zip(served).map(|((range, pool), (requests, from_earlier_pools))| {
                let mut totals = EngineTotals::default();
                ended.engines[range].iter().for_each(|engine| totals.add(engine));
                FleetPoolSummary {
                    pool: pool.settings.id.to_string(),
                    engines: pool.engines,
                    requests,
                    from_earlier_pools,
                    hit_share: totals.hit_rate(),
                    preemptions: totals.preemptions,
                }
            });
        let feed = FeedState { unknown_model: unknown_model.get(), ..state.take() };
        Ok(SimulationEnd {
            pools: pools.collect(),
            most_open: ended.most_open,
            feed,
            interrupted: interrupted.load(Ordering::Relaxed),
            took: clock.now().since(crate::types::Tick::ZERO),
        })
    }

    /// Indices of the engines of each pool.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.pools.iter().scan(0, |from, pool| {
            let range = *from..*from + pool.engines;
            *from = range.end;
            Some(range)
        })
    }

    fn pool_of(&self, engine: usize) -> Option<usize> {
        self.ranges().position(|range| range.contains(&engine))
    }

    fn scheduling(&self, classes: &ReplayedClasses) -> GatewayScheduling {
        let of_classes = classes.settings.iter().flat_map(|settings| &settings.classes);
        let (first, further) = self.pools.split_first().expect("a fleet has a pool");
        let further = further.iter().map(|pool| FurtherPool { settings: pool.settings.clone(), engines: pool.engines });
        GatewayScheduling {
            seats: first.settings.concurrency,
            queue: first.settings.queue.clone(),
            classes: of_classes.clone().map(|class| (class.id.to_string(), class.queue)).collect(),
            limits: self.tenants.limits.clone(),
            rejected: self.tenants.rejected.clone(),
            pool: Some(Box::new(first.settings.clone())),
            degrade: of_classes.map(|class| (class.id.to_string(), class.degrade.clone())).collect(),
            further: further.collect(),
            reach: classes.settings.iter().flat_map(reach).collect(),
        }
    }

    /// Losses of engines.
    fn events(&self, args: &ReplayArgs) -> Vec<(Duration, Incident)> {
        let mut events = Vec::new();
        for (range, pool) in self.ranges().zip(&self.pools) {
            for loss in &args.lose {
                let Some((from, to)) = numbers(self, pool, &loss.engines) else { continue };
                let back = args.returned.iter().filter(|back| back.engines == loss.engines && back.at > loss.at);
                let down = back.map(|back| back.at - loss.at).min().unwrap_or(FOR_GOOD);
                let engines = range.start + from..range.start + to;
                events.extend(engines.map(|engine| (loss.at, Incident::EngineRestarts { engine, down })));
            }
        }
        events
    }
}

/// The pools of each class's routes.
fn reach(settings: &Settings) -> impl Iterator<Item = (String, ClassPools)> {
    settings.classes.iter().map(|class| {
        let all = settings.routes.reach(&class.id).into_iter().map(|(pool, _)| pool).collect();
        (class.id.to_string(), ClassPools { first: settings.routes.first_pools(&class.id), all })
    })
}

/// Indices of engines of this pool, if it is meant and has them.
fn numbers(fleet: &SimulatedFleet, pool: &SimulatedPool, engines: &EngineSet) -> Option<(usize, usize)> {
    let EngineSet::Numbers { pool: named, from, to } = engines else { return None };
    let is_meant = match named {
        Some(name) => *name == pool.settings.id.as_str(),
        None => fleet.pools.len() == 1,
    };
    (is_meant && *to <= pool.engines).then_some((from - 1, *to))
}

/// The pools that a route of a class reaches; without settings there is one.
fn pools_of(classes: &ReplayedClasses) -> Vec<SimulatedPool> {
    let Some(settings) = &classes.settings else {
        let nobody = EngineSource::Static(Vec::new());
        let settings = PoolSettings::with_defaults(PoolId::from("fleet"), nobody);
        return vec![SimulatedPool { settings, engines: 0 }];
    };
    let reached: BTreeSet<PoolId> = reach(settings).flat_map(|(_, pools)| pools.all).collect();
    let pools = settings.pools.iter().filter(|pool| reached.contains(&pool.id)).map(|pool| SimulatedPool {
        settings: (**pool).clone(),
        engines: match &pool.engines {
            EngineSource::Static(engines) => engines.len(),
            EngineSource::Dns(_) => 0,
        },
    });
    pools.collect()
}

/// Reads `N` and `POOL=N`.
fn set_engines(pools: &mut [SimulatedPool], told: &[String]) -> anyhow::Result<()> {
    let names: Vec<String> = pools.iter().map(|pool| pool.settings.id.to_string()).collect();
    for text in told {
        let (name, count) = text.rsplit_once('=').map_or((None, text.as_str()), |(name, count)| (Some(name), count));
        let count: usize = count
            .parse()
            .ok()
            .filter(|count| (1..=100_000).contains(count))
            .with_context(|| format!("--engines {text}: write N or POOL=N, with a number from 1 to 100,000"))?;
        let pool = match name {
            Some(name) => pools.iter_mut().find(|pool| pool.settings.id.as_str() == name),
            None if pools.len() == 1 => pools.first_mut(),
            None => bail!("--engines {text}: of which pool? write POOL=N; there are {}", names.join(", ")),
        };
        pool.with_context(|| {
            format!("--engines {text}: classes go to no such pool; there are {}", names.join(", "))
        })?
        .engines = count;
    }
    match pools.iter().find(|pool| pool.engines == 0) {
        Some(pool) => bail!("how many engines has pool {}? give --engines", pool.settings.id),
        None => Ok(()),
    }
}

/// Properties of an engine.
///
/// # Errors
/// The file cannot be read, or has something else in it.
pub fn read_machine(file: &Path) -> anyhow::Result<Machine> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("--engine: cannot read {shown}"))?;
    let machine: Machine =
        serde_yaml::from_str(&text).with_context(|| format!("--engine: {shown} describes no engine"))?;
    let steps = machine.step.map_or([1.0; 4], |step| {
        [step.base_ms, step.per_request_ms, step.per_prefill_token_ms, step.per_context_token_ms]
    });
    let is_sound = steps.iter().all(|time| time.is_finite() && *time >= 0.0) && steps[0] > 0.0;
    if !is_sound || machine.max_running == 0 || machine.step_tokens == 0 || machine.max_model_len < 2 {
        bail!("--engine: {shown}: times must be 0 or more, base_ms and the sizes above 0");
    }
    Ok(machine)
}

fn recorded(classes: &ReplayedClasses) -> Vec<RecordedClass> {
    let recorded = classes.all.iter().map(|class| RecordedClass {
        name: class.id.to_string(),
        priority: class.priority,
        objectives: class.objectives.clone(),
        patience: class.timeouts.first_token,
        whole_patience: class.timeouts.total,
    });
    recorded.collect()
}

impl TenantNames {
    fn of(classes: &ReplayedClasses) -> Self {
        let Some(settings) = &classes.settings else { return TenantNames::default() };
        let mut names = TenantNames::default();
        let key = settings.journal.as_ref().and_then(|journal| journal.hash_key.as_ref());
        for tenant in settings.tenants.iter() {
            if let Some(key) = key {
                names.by_hash.insert(journal_tenant(&key.tenant(&tenant.id), &key.id()), tenant.id.clone());
            }
            names.limits.insert(tenant.id.clone(), tenant.limits.clone());
            if tenant.when_over_limit == OverLimit::Reject {
                names.rejected.insert(tenant.id.clone());
            }
        }
        names
    }

    fn name_of(&self, hash: Option<u64>) -> TenantId {
        let Some(hash) = hash else { return TenantId::anonymous() };
        self.by_hash.get(&hash).cloned().unwrap_or_else(|| TenantId::from(format!("{hash:016x}").as_str()))
    }
}

/// The requests, with the pools of their routes.
struct FleetArrivals<'a> {
    feed: TraceFeed<'a>,
    fleet: &'a SimulatedFleet,
    routes: ClassRoutes<'a>,
    unknown_model: &'a Cell<u64>,
    interrupted: &'a AtomicBool,
}

impl Iterator for FleetArrivals<'_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        if self.interrupted.load(Ordering::Relaxed) {
            return None;
        }
        let (request, class) = self.feed.next()?;
        let tenant = self.fleet.tenants.name_of(request.tenant);
        let route = self.routes.of(class, request.model.as_ref());
        self.unknown_model.set(self.routes.unknown);
        Some(Arrival { route, ..Arrival::recorded(&request, flow_of(&request, class), tenant) })
    }
}

/// Routes by class and model, each looked up once.
struct ClassRoutes<'a> {
    classes: &'a ReplayedClasses,
    known: HashMap<(usize, Option<Arc<str>>), KnownRoute>,
    /// Requests whose model no route of their class serves.
    unknown: u64,
}

/// The pools of a class and a model.
struct KnownRoute {
    pools: Option<Arc<[PoolId]>>,
    /// Whether no route of the class serves the model.
    is_unknown: bool,
}

impl ClassRoutes<'_> {
    /// The pools of the route that serves the model, else of the class's first one.
    fn of(&mut self, class: usize, model: Option<&Arc<str>>) -> Option<Arc<[PoolId]>> {
        let settings = self.classes.settings.as_ref()?;
        let found = self.known.entry((class, model.cloned())).or_insert_with(|| {
            let id = &self.classes.all[class].id;
            let exact = model.and_then(|model| settings.routes.find(Some(model), id));
            let is_unknown = model.is_some() && exact.is_none();
            let pools = exact.or_else(|| settings.routes.any(id)).map(|route| route.pools);
            KnownRoute { pools, is_unknown }
        });
        self.unknown += u64::from(found.is_unknown);
        found.pools.clone()
    }
}

/// [`Mix::recorded`] has two flows for each class: with streams, and without.
fn flow_of(request: &TraceRequest, class: usize) -> usize {
    2 * class + usize::from(request.stream == Some(false))
}

fn record_of(told: &RequestReport, number: u64, classes: &ReplayedClasses) -> LoadRecord {
    let class = told.flow / 2;
    let seconds = |length: Option<Duration>| length.map(|length| length.as_secs_f64());
    LoadRecord {
        number,
        tag: told.line,
        class: classes.all[class].id.to_string(),
        class_index: class,
        scheduled_seconds: told.arrived.since(crate::types::Tick::ZERO).as_secs_f64(),
        end_seconds: told.ended.since(crate::types::Tick::ZERO).as_secs_f64(),
        outcome: told.outcome.as_str().to_owned(),
        reason: told.outcome.reason().to_owned(),
        ttft_seconds: seconds(told.ttft),
        tpot_seconds: seconds(told.tpot),
        e2e_seconds: seconds(told.e2e),
        input_tokens: Some(told.input),
        output_tokens: told.output,
        ..LoadRecord::default()
    }
}

/// A flag set by SIGINT or SIGTERM, because the simulation has no runtime for signals.
fn interrupt_flag() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async { ShutdownSignals::listen().next().await });
        raised.store(true, Ordering::Relaxed);
    });
    flag
}
