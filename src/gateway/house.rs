//! What the gateway is made of, and how settings are exchanged while it serves.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;

use super::promise::Live;
use crate::clock::Clock;
use crate::config::Settings;
use crate::dial::Dial;
use crate::forward::lines::Lines;
use crate::inspect::Ratios;
use crate::judge::Objectives;
use crate::record::Recorder;
use crate::route::{Fleet, Promised};
use crate::units::PoolId;

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
    draining: AtomicBool,
}

impl Gateway {
    /// A gateway with these settings. Nothing runs yet: whoever owns it runs the probes
    /// (`route::probe`) and serves it.
    #[must_use]
    pub fn new(settings: Settings, materials: Materials) -> Self {
        let Materials { clock, dial, recorder, seed } = materials;
        let gateway = Gateway(Arc::new(House {
            clock,
            fleet: Arc::new(Fleet::new(seed)),
            lines: Arc::new(Lines::new(dial, clock)),
            ratios: Ratios::new(),
            draining: AtomicBool::new(false),
            live: ArcSwap::from_pointee(Live::new(settings, &recorder)),
            recorder,
        }));
        gateway.tell_the_fleet(&gateway.live.load().settings);
        gateway
    }

    /// Exchanges the settings. Requests in flight keep the ones they arrived with; engines,
    /// connections, ratios and counters stay.
    pub fn adopt(&self, settings: Settings) {
        self.tell_the_fleet(&settings);
        self.live.store(Arc::new(Live::new(settings, &self.recorder)));
    }

    fn tell_the_fleet(&self, settings: &Settings) {
        self.fleet.share_among(NonZeroU32::new(settings.replicas).unwrap_or(NonZeroU32::MIN));
        self.fleet.follow(&settings.pools, self.clock.now());
        for (pool, promised) in promised_in(settings) {
            self.fleet.hold_to(&pool, promised);
        }
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

/// What the strictest of the classes that a pool serves is promised.
fn promised_in(settings: &Settings) -> BTreeMap<PoolId, Promised> {
    let mut all: BTreeMap<PoolId, Promised> = BTreeMap::new();
    for class in &settings.classes {
        let pools: BTreeSet<_> = settings.routes.reach(&class.id).into_iter().map(|(pool, _)| pool).collect();
        for pool in pools {
            let promised = all.entry(pool).or_default();
            let Objectives { ttft, tpot, .. } = &class.objectives;
            promised.ttft = promised.ttft.into_iter().chain(ttft.map(|ttft| ttft.threshold)).min();
            promised.tpot = promised.tpot.into_iter().chain(tpot.map(|tpot| tpot.threshold)).min();
            let attainments = ttft.iter().chain(tpot).map(|objective| objective.attainment);
            promised.attainment = attainments.fold(promised.attainment, f64::max);
        }
    }
    all
}

impl Deref for Gateway {
    type Target = House;
    fn deref(&self) -> &House {
        &self.0
    }
}
