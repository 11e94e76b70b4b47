//! What the gateway is made of, and how settings are exchanged while it serves.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;

use super::promise::Live;
use crate::admit::desk::{Desk, Desks};
use crate::admit::limit::Ledger;
use crate::clock::Clock;
use crate::config::Settings;
use crate::dial::Dial;
use crate::forward::lines::Lines;
use crate::inspect::Ratios;
use crate::record::{Recorder, SeatReport};
use crate::route::Fleet;
use crate::route::settings::{Concurrency, Pool};
use crate::units::{PoolId, Tick};

/// How often seats follow the engines where no request comes.
const STOCK_EVERY: Duration = Duration::from_millis(100);

/// The gateway. Cheap to clone: all clones are one.
#[derive(Clone)]
pub struct Gateway(Arc<House>);

/// What a gateway is built from.
pub struct Materials {
    /// The clock.
    pub clock: Clock,
    /// Opens connections to engines.
    pub dial: Arc<dyn Dial>,
    /// Writes down what ends.
    pub recorder: Recorder,
    /// Seeds the choice between engines that are equal.
    pub seed: u64,
}

/// All that lives over reloads. Reached through [`Gateway`].
pub struct House {
    /// The clock.
    pub clock: Clock,
    /// The settings of this moment.
    pub live: ArcSwap<Live>,
    /// All engines.
    pub fleet: Arc<Fleet>,
    /// Connections to them.
    pub lines: Arc<Lines>,
    /// Writes down what ends.
    pub recorder: Recorder,
    /// What was learned from usage.
    pub ratios: Ratios,
    /// The books of the tenants' limits.
    pub ledger: Ledger,
    /// Where requests wait for a seat.
    pub desks: Desks,
    draining: AtomicBool,
}

impl Gateway {
    /// A gateway with these settings. Nothing runs yet: whoever owns it runs the probes
    /// (`route::probe`), keeps the seats ([`Gateway::keep_seats`]) and serves it.
    #[must_use]
    pub fn new(settings: Settings, materials: Materials) -> Self {
        let Materials { clock, dial, recorder, seed } = materials;
        let (fleet, ledger, desks) = (Arc::new(Fleet::new(seed)), Ledger::new(), Desks::new(clock));
        follow(&fleet, &ledger, &desks, &settings, clock.now());
        let gateway = Gateway(Arc::new(House {
            clock,
            lines: Arc::new(Lines::new(dial, clock)),
            ratios: Ratios::new(),
            draining: AtomicBool::new(false),
            live: ArcSwap::from_pointee(Live::new(settings, &recorder, &desks)),
            fleet,
            recorder,
            ledger,
            desks,
        }));
        gateway.take_all_stock();
        gateway
    }

    /// Exchanges the settings. Requests in flight keep the ones they arrived with; engines,
    /// connections, ratios, balances, seats and counters stay.
    pub fn adopt(&self, settings: Settings) {
        follow(&self.fleet, &self.ledger, &self.desks, &settings, self.clock.now());
        self.live.store(Arc::new(Live::new(settings, &self.recorder, &self.desks)));
        self.take_all_stock();
    }

    /// Keeps the number of seats in step with the engines, while nobody comes who would look.
    /// Never ends.
    pub async fn keep_seats(self) {
        loop {
            self.clock.sleep_until(Some(self.clock.now() + STOCK_EVERY)).await;
            self.take_all_stock();
        }
    }

    /// Tells the recorder how many seats there are and how many are taken: to be called before
    /// a page of metrics is written.
    pub fn report_seats(&self) {
        let report = |(pool, desk): (PoolId, Arc<Desk>)| {
            let numbers = desk.numbers();
            (numbers.seats < usize::MAX).then_some((pool, SeatReport { seats: numbers.seats, taken: numbers.taken }))
        };
        let mut seats: Vec<_> = self.desks.all().into_iter().filter_map(report).collect();
        seats.sort_by(|a, b| a.0.cmp(&b.0));
        self.recorder.seats(seats);
    }

    /// From now on new requests are refused; open ones go on.
    pub fn begin_drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether new requests are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

impl House {
    /// How many engines of a pool are available; its seats follow, unless no settings name it
    /// any more.
    pub fn take_stock(&self, pool: &PoolId, at: Tick) -> usize {
        let available = self.fleet.available(pool, at);
        if let Some(pool) = self.live.load().pool(pool) {
            pool.has_engines(available);
        }
        available
    }

    fn take_all_stock(&self) {
        let live = self.live.load();
        let now = self.clock.now();
        for pool in live.settings.pools.iter().filter_map(|pool| live.pool(&pool.id)).filter(|pool| pool.is_limited()) {
            pool.has_engines(self.fleet.available(&pool.settings.id, now));
        }
    }
}

/// Everything that lives over reloads follows the settings.
fn follow(fleet: &Fleet, ledger: &Ledger, desks: &Desks, settings: &Settings, at: Tick) {
    fleet.follow(&settings.pools, at);
    let limits = settings.tenants.iter().map(|tenant| (tenant.id.clone(), tenant.limits.clone()));
    ledger.reload(&limits.collect(), at);
    let limited = |pool: &Pool| matches!(pool.concurrency, Concurrency::Fixed(_));
    desks.follow(settings.pools.iter().map(|pool| (&pool.id, limited(pool).then_some(&pool.queue))));
}

impl Deref for Gateway {
    type Target = House;
    fn deref(&self) -> &House {
        &self.0
    }
}
