//! The gateway's shared state, and the exchange of settings while it serves.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::mark::LoopGuard;
use super::overload::OverloadBoard;
use super::promise::SettingsSnapshot;
use super::request_body::BodyMemory;
use super::strangers::Strangers;
use crate::admit::Books;
use crate::admit::desk::{Desk, Desks};
use crate::admit::queue;
use crate::admit::shared::{By, EDGES, Ended, Keeper};
use crate::clock::{Alarms, Clock};
use crate::config::Settings;
use crate::dial::Dial;
use crate::forward::lines::ConnPool;
use crate::inspect::{BlockKey, Ratios};
use crate::judge::Objectives;
use crate::record::journal::HashKey;
use crate::record::{EngineReport, Recorder, SeatReport, StoreReport};
use crate::route::settings::{Concurrency, Pool};
use crate::route::{EngineView, Fleet, PoolView, Promised};
use crate::units::{PoolId, Tick};

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
    /// Seeds the choice between engines that are equal, and what others must not know beforehand.
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
    pub books: Books,
    /// Their background task until it is started.
    keeper: Mutex<Option<Keeper>>,
    /// Memory held by request bodies.
    pub bodies: Arc<BodyMemory>,
    /// The key of the hashes of prompts' blocks: of this process alone, or of the journal.
    pub(super) block_key: BlockKey,
    /// Where requests wait for a seat.
    pub desks: Desks,
    /// Overload levels.
    pub levels: OverloadBoard,
    /// Ids of requests that engines have.
    pub(super) loops: LoopGuard,
    /// Logs unknown paths and models.
    pub(super) strangers: Strangers,
    draining: AtomicBool,
}

impl Gateway {
    /// A gateway with these settings. Starts no task: the owner runs the probes (`route::probe`),
    /// [`Gateway::keep_seats`] and [`Gateway::keep_books`], and serves
    /// it.
    #[must_use]
    pub fn new(settings: Settings, materials: GatewayDeps) -> Self {
        let GatewayDeps { clock, dial, recorder, seed } = materials;
        let desks = Desks::new(clock);
        let (books, keeper) = Books::new(&settings.limits_store, clock, seed);
        follow(&books, &desks, &settings, clock.now());
        let fleet = Fleet::new(seed);
        tell(&fleet, &settings, clock.now());
        // A journal whose hashes are to be compared with others' says by which key.
        let journal_key = settings.journal.as_ref().and_then(|journal| journal.hash_key.as_ref());
        let block_key = BlockKey::of(journal_key.map_or(seed, HashKey::block_seed));
        let gateway = Gateway(Arc::new(GatewayState {
            clock,
            lines: Arc::new(ConnPool::new(dial, clock)),
            alarms: Alarms::new(clock),
            ratios: Ratios::new(),
            loops: LoopGuard::default(),
            strangers: Strangers::default(),
            draining: AtomicBool::new(false),
            live: ArcSwap::from_pointee(SettingsSnapshot::new(settings, &recorder, &desks, &fleet)),
            fleet: Arc::new(fleet),
            recorder,
            books,
            keeper: Mutex::new(keeper),
            bodies: Arc::default(),
            block_key,
            desks,
            levels: OverloadBoard::default(),
        }));
        gateway.follow_levels(&gateway.live.load().settings);
        gateway.count_seats();
        gateway
    }

    /// Exchanges the settings. Requests in flight keep theirs; engines, connections, ratios, balances, seats
    /// and counters stay.
    pub fn adopt(&self, settings: Settings) {
        tell(&self.fleet, &settings, self.clock.now());
        follow(&self.books, &self.desks, &settings, self.clock.now());
        self.count_seats();
        let live = Arc::new(SettingsSnapshot::new(settings, &self.recorder, &self.desks, &self.fleet));
        self.live.store(Arc::clone(&live));
        self.follow_levels(&live.settings);
    }

    /// Updates seats to the engines, and overload levels to the measurements, also without requests; drops
    /// learned state of removed engines. Never
    /// ends.
    pub async fn keep_seats(self) {
        let mut forgets = self.clock.now() + FORGET_EVERY;
        loop {
            let now = self.clock.now();
            if now >= forgets {
                forgets = now + FORGET_EVERY;
                self.forget_engines(now);
            }
            let counts = now + COUNT_EVERY;
            while self.desks.any_waits() && self.clock.now() + PACE_EVERY < counts {
                self.clock.sleep_until(Some(self.clock.now() + PACE_EVERY)).await;
                self.desks.all().iter().for_each(|(_, desk)| desk.expire());
            }
            self.clock.sleep_until(Some(counts)).await;
            self.count_seats();
            self.weigh_levels();
        }
    }

    /// Runs the exchange with the limits store, if limits are shared. Ends only with
    /// [`Gateway::leave_books`].
    pub async fn keep_books(self) {
        let keeper = self.keeper.lock().take();
        match keeper {
            Some(keeper) => keeper.run().await,
            None => std::future::pending().await,
        }
    }

    /// Returns this gateway's leases of shared limits. Called when no request runs any more.
    pub async fn leave_books(&self) {
        if let Books::Shared(store) = &self.books {
            store.leave().await;
        }
    }

    /// Reports statistics of the limits store to the recorder, if limits are shared. Called before a metrics
    /// page is written.
    pub fn report_store(&self) {
        let Books::Shared(store) = &self.books else { return };
        let numbers = store.numbers();
        let [lengths @ .., longer] = numbers.lengths;
        self.recorder.limits_store(StoreReport {
            up: numbers.up,
            calls: Ended::ALL.iter().map(|ended| (ended.as_str(), numbers.calls(*ended))).collect(),
            lengths: (EDGES.into_iter().zip(lengths).collect(), longer),
            length: numbers.length,
            given_up: numbers.given_up,
            requests: By::ALL.iter().map(|by| (by.as_str(), numbers.requests(*by))).collect(),
            unspent: numbers.unspent,
        });
    }

    /// Reports all engines to the recorder, including those removed within ten minutes. Called before a metrics
    /// page is written.
    pub fn report_engines(&self) {
        let of_pool = |PoolView { pool, engines, .. }| {
            engines
                .into_iter()
                .map(move |engine: EngineView| (PoolId::clone(&pool), engine.engine.clone(), told(&engine)))
        };
        self.recorder.engines(self.fleet.view(self.clock.now()).into_iter().flat_map(of_pool).collect());
    }

    /// Reports seats to the recorder. Called before a metrics page is
    /// written.
    pub fn report_seats(&self) {
        self.desks.forget_left();
        let report = |(pool, desk): (PoolId, Arc<Desk>)| {
            let numbers = desk.numbers();
            let report = SeatReport { seats: numbers.seats, taken: numbers.taken, prefill: numbers.reading };
            (numbers.seats < usize::MAX).then_some((pool, report))
        };
        let mut seats: Vec<_> = self.desks.all().into_iter().filter_map(report).collect();
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
    pub fn engines_of(&self, pool: &PoolId, desk: Option<&Desk>) -> usize {
        let at = self.clock.now();
        let available = self.fleet.available(pool, at);
        if let Some((desk, seats)) = desk.zip(self.fleet.seats(pool, at)) {
            desk.set_readers(available.max(1));
            desk.set_seats(seats);
        }
        available
    }

    fn forget_engines(&self, at: Tick) {
        let engines = self.fleet.view(at).into_iter().flat_map(|pool| pool.engines);
        self.ratios.keep_engines(&engines.map(|engine| engine.engine).collect());
    }

    /// Updates the seats of every pool to its engines.
    pub(super) fn count_seats(&self) {
        self.desks.forget_left();
        self.fleet.compare_engines(self.clock.now());
        for (pool, desk) in self.desks.all() {
            desk.set_pace(self.fleet.keep_pace(&pool, self.clock.now()));
            self.engines_of(&pool, Some(&desk));
        }
    }
}

/// The report of one engine for the metrics page. A removed engine counts as down, without other
/// values.
fn told(engine: &EngineView) -> EngineReport {
    if engine.left.is_some() {
        return EngineReport::default();
    }
    EngineReport {
        up: engine.takes_requests(),
        drained: engine.is_drained,
        waiting: engine.waiting,
        running: engine.running,
        kv_usage: engine.kv_usage,
        seats: engine.seats.map(f64::from),
        ttft_error: engine.errors.ttft,
        tpot_error: engine.errors.tpot,
    }
}

/// Applies settings to the fleet.
fn tell(fleet: &Fleet, settings: &Settings, at: Tick) {
    fleet.share_among(NonZeroU32::new(settings.replicas).unwrap_or(NonZeroU32::MIN));
    fleet.follow(&settings.pools, at);
    for (pool, promised) in promised_in(settings) {
        fleet.hold_to(&pool, promised);
    }
}

/// Applies settings to limits and queues.
fn follow(books: &Books, desks: &Desks, settings: &Settings, at: Tick) {
    let limits = settings.tenants.iter().map(|tenant| (tenant.id.clone(), tenant.limits.clone()));
    books.reload(&limits.collect(), settings.replicas, at);
    let gateways = NonZeroU32::new(settings.replicas).unwrap_or(NonZeroU32::MIN);
    let queue = |pool: &Arc<Pool>| {
        let reading = pool.queue.reading.shared_among(gateways);
        (pool.concurrency != Concurrency::Unlimited).then(|| queue::Settings { reading, ..pool.queue.clone() })
    };
    let queues: Vec<_> = settings.pools.iter().map(|pool| (&pool.id, queue(pool))).collect();
    desks.follow(queues.iter().map(|(pool, queue)| (*pool, queue.as_ref())));
}

/// The strictest objectives of the classes that each pool serves.
fn promised_in(settings: &Settings) -> BTreeMap<PoolId, Promised> {
    let mut all: BTreeMap<PoolId, Promised> = BTreeMap::new();
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
