//! The trace against a simulated fleet: the pools of the settings, with the gateway's scheduler, router and limiter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
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
use crate::load::LoadRecord;
use crate::load::replay::{EngineSet, FleetPoolSummary, ReplayScore};
use crate::route::settings::{EngineSource, PoolSettings};
use crate::sim::engine::EngineSpec;
use crate::sim::fleet::{
    Arrival, GatewayScheduling, Incident, Machine, Mix, Policy, RecordedClass, RequestReport, Scenario, replay,
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
    /// Indices of the classes whose first pool it is.
    classes: BTreeSet<usize>,
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
    /// The pools of the settings, each with the classes that use it first.
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

    /// Replays the trace against one pool after the other.
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
        let mut end =
            SimulationEnd { pools: Vec::new(), feed: FeedState::default(), interrupted: false, took: Duration::ZERO };
        let mut number = 0;
        for pool in &self.pools {
            let feed = source.feed(classes, Some(self.longest()))?;
            let state = feed.state();
            let arrivals = PoolArrivals { feed, fleet: self, pool, interrupted: &interrupted };
            let mix = Mix::recorded(pool.engines, &recorded(classes), SEED);
            let policy = Policy::Scheduled(self.scheduling(pool, classes));
            let scenario = Scenario { gateways: self.gateways, events: self.events(pool, args), ..Scenario::default() };
            let block = source.format.block_tokens().unwrap_or(16);
            let ended = replay(&mix, &policy, arrivals, &self.spec, block, &scenario, |told| {
                let record = record_of(told, number, classes);
                number += 1;
                score.push(&record);
                lines.push(&record);
            });
            end.pools.push(FleetPoolSummary {
                pool: pool.settings.id.to_string(),
                engines: pool.engines,
                hit_share: ended.engines.hit_rate(),
                preemptions: ended.engines.preemptions,
                most_open: ended.most_open,
            });
            end.feed = state.take();
            if end.feed.error.is_some() || interrupted.load(Ordering::Relaxed) {
                break;
            }
        }
        end.interrupted = interrupted.load(Ordering::Relaxed);
        end.took = clock.now().since(crate::types::Tick::ZERO);
        Ok(end)
    }

    fn scheduling(&self, pool: &SimulatedPool, classes: &ReplayedClasses) -> GatewayScheduling {
        let of_classes = classes.settings.iter().flat_map(|settings| &settings.classes);
        GatewayScheduling {
            seats: pool.settings.concurrency,
            queue: pool.settings.queue.clone(),
            classes: of_classes.clone().map(|class| (class.id.to_string(), class.queue)).collect(),
            limits: self.tenants.limits.clone(),
            rejected: self.tenants.rejected.clone(),
            pool: Some(Box::new(pool.settings.clone())),
            degrade: of_classes.map(|class| (class.id.to_string(), class.degrade.clone())).collect(),
            overflow: 0,
        }
    }

    /// Losses of a pool's engines.
    fn events(&self, pool: &SimulatedPool, args: &ReplayArgs) -> Vec<(Duration, Incident)> {
        let mut events = Vec::new();
        for loss in &args.lose {
            let Some((from, to)) = numbers(self, pool, &loss.engines) else { continue };
            let back = args.returned.iter().filter(|back| back.engines == loss.engines && back.at > loss.at);
            let down = back.map(|back| back.at - loss.at).min().unwrap_or(FOR_GOOD);
            events.extend((from..to).map(|engine| (loss.at, Incident::EngineRestarts { engine, down })));
        }
        events
    }
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

/// Each class uses the first pool of its first route; without settings there is one pool.
fn pools_of(classes: &ReplayedClasses) -> Vec<SimulatedPool> {
    let all: BTreeSet<usize> = (0..classes.all.len()).collect();
    let Some(settings) = &classes.settings else {
        let nobody = EngineSource::Static(Vec::new());
        let settings = PoolSettings::with_defaults(PoolId::from("fleet"), nobody);
        return vec![SimulatedPool { settings, engines: 0, classes: all }];
    };
    let first = |class: usize| settings.routes.any(&classes.all[class].id)?.pools.first().cloned();
    let pools = settings.pools.iter().map(|pool| SimulatedPool {
        settings: (**pool).clone(),
        engines: match &pool.engines {
            EngineSource::Static(engines) => engines.len(),
            EngineSource::Dns(_) => 0,
        },
        classes: all.iter().copied().filter(|class| first(*class).as_ref() == Some(&pool.id)).collect(),
    });
    pools.filter(|pool| !pool.classes.is_empty()).collect()
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

/// The requests of one pool.
struct PoolArrivals<'a> {
    feed: TraceFeed<'a>,
    fleet: &'a SimulatedFleet,
    pool: &'a SimulatedPool,
    interrupted: &'a AtomicBool,
}

impl Iterator for PoolArrivals<'_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        loop {
            if self.interrupted.load(Ordering::Relaxed) {
                return None;
            }
            let (request, class) = self.feed.next()?;
            if self.pool.classes.contains(&class) {
                let tenant = self.fleet.tenants.name_of(request.tenant);
                return Some(Arrival::recorded(&request, flow_of(&request, class), tenant));
            }
        }
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
