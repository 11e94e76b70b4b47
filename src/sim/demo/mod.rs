//! The parts of `goodput demo`: a small fleet of simulated engines, traffic, gateway settings, and a
//! terminal view.
//!
//! [`fleet`] starts the engines, [`settings`] writes the gateway's YAML, [`traffic`] is the load, [`view`]
//! shows the progress. All are derived from one table of classes, so that clients and gateway judge by the
//! same objectives.

pub mod view;

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::engine::{EngineSpec, LengthDistribution, SimEngine, SimSettings};
use super::traffic::{RequestStyle, TrafficFlow, TrafficPlan};
use crate::clock::Clock;
use crate::judge::{Objective, Objectives};

/// The model served by the demo's engines.
pub const MODEL: &str = "sim-8b";

/// The header by which the demo's voice and batch clients select their class.
pub const CLASS_HEADER: &str = "x-slo-class";

/// One class of the demo: its objectives and its traffic.
struct DemoClass {
    name: &'static str,
    priority: &'static str,
    style: RequestStyle,
    /// Milliseconds; `None` means no such objective.
    ttft: Option<u64>,
    tpot: Option<u64>,
    /// The largest gap.
    itl: Option<u64>,
    e2e: Option<u64>,
    target: f64,
    share: f64,
    input: (f64, f64),
    output: (f64, f64),
    leaves: f64,
    /// Selected by [`CLASS_HEADER`].
    by_header: bool,
    /// API key of its requests.
    key: &'static str,
    /// Queue settings other than the defaults.
    queue: Option<&'static str>,
}

/// API key of the tenant `people`, for manual requests.
pub const KEY: &str = "demo";

/// API key of the tenant `nightly`, which sends the batches and hits its limit at the peak.
const NIGHTLY_KEY: &str = "demo-nightly";

/// The objectives are about twice what an unloaded engine of the demo needs. At the peak there are not
/// enough seats for all: chats, which have low priority and the longest responses, are shed to protect voice
/// and completions.
const CLASSES: [DemoClass; 5] = [
    DemoClass {
        name: "voice",
        priority: "critical",
        style: RequestStyle::Chat,
        ttft: Some(400),
        tpot: Some(50),
        itl: Some(500),
        e2e: None,
        target: 0.95,
        share: 0.15,
        input: (250.0, 900.0),
        output: (60.0, 150.0),
        leaves: 0.02,
        by_header: true,
        key: KEY,
        queue: None,
    },
    DemoClass {
        name: "inline_completion",
        priority: "high",
        style: RequestStyle::Completion,
        ttft: Some(400),
        tpot: Some(50),
        itl: None,
        e2e: None,
        target: 0.95,
        share: 0.3,
        input: (400.0, 1200.0),
        output: (24.0, 64.0),
        leaves: 0.15,
        by_header: false,
        key: KEY,
        queue: None,
    },
    DemoClass {
        name: "chat_interactive",
        priority: "low",
        style: RequestStyle::Chat,
        ttft: Some(1000),
        tpot: Some(60),
        itl: None,
        e2e: None,
        target: 0.95,
        share: 0.35,
        input: (600.0, 3000.0),
        output: (180.0, 600.0),
        leaves: 0.03,
        by_header: false,
        key: KEY,
        queue: Some("{when_hopeless: shed}"),
    },
    DemoClass {
        name: "agent",
        priority: "normal",
        style: RequestStyle::Agent,
        ttft: None,
        tpot: None,
        itl: None,
        e2e: Some(20_000),
        target: 0.95,
        share: 0.12,
        input: (1000.0, 3000.0),
        output: (120.0, 400.0),
        leaves: 0.0,
        by_header: false,
        key: KEY,
        queue: None,
    },
    DemoClass {
        name: "batch",
        priority: "batch",
        style: RequestStyle::Batch,
        ttft: None,
        tpot: None,
        itl: None,
        e2e: Some(60_000),
        target: 0.9,
        share: 0.08,
        input: (1500.0, 6000.0),
        output: (300.0, 900.0),
        leaves: 0.0,
        by_header: true,
        key: NIGHTLY_KEY,
        queue: None,
    },
];

impl DemoClass {
    fn objectives(&self) -> Objectives {
        let objective = |millis: Option<u64>| {
            millis.map(|millis| Objective { threshold: Duration::from_millis(millis), attainment: self.target })
        };
        Objectives {
            ttft: objective(self.ttft),
            tpot: objective(self.tpot),
            itl: objective(self.itl),
            e2e: objective(self.e2e),
            joint_target: self.target,
            ..Objectives::default()
        }
    }
}

/// Engines listening on their own ports.
pub struct DemoFleet {
    /// The engines and where they listen.
    pub engines: Vec<DemoEngine>,
}

/// One engine of the fleet.
pub struct DemoEngine {
    /// Its pool: `interactive` or `batch`.
    pub pool: &'static str,
    /// Its address.
    pub address: SocketAddr,
    /// Its handle.
    pub engine: SimEngine,
}

/// Starts three engines for the pool `interactive` and one for `batch` on free loopback
/// ports.
///
/// # Errors
/// No free port.
pub async fn fleet(clock: Clock, seed: u64) -> io::Result<DemoFleet> {
    let mut engines = Vec::new();
    for (number, pool) in (0..).zip(["interactive", "interactive", "interactive", "batch"]) {
        let settings = SimSettings {
            models: vec![MODEL.to_owned()],
            seed: seed.wrapping_add(number),
            shape: shape(),
            ..SimSettings::default()
        };
        let engine = SimEngine::start(clock, settings);
        let address = engine.listen(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        engines.push(DemoEngine { pool, address, engine });
    }
    Ok(DemoFleet { engines })
}

/// A smaller GPU with short steps, for a low TPOT.
fn shape() -> EngineSpec {
    EngineSpec { max_running: 96, step_tokens: 1024, speed: 0.6, ..EngineSpec::default() }
}

/// Settings of a gateway in front of the fleet that listens at these addresses (port 0: a free
/// one).
#[must_use]
pub fn settings(fleet: &DemoFleet, listen: SocketAddr, admin: SocketAddr) -> String {
    let places = fleet.engines.iter().map(|engine| (engine.pool, engine.address));
    settings_for(&places.collect::<Vec<_>>(), listen, admin)
}

fn settings_for(engines: &[(&str, SocketAddr)], listen: SocketAddr, admin: SocketAddr) -> String {
    let mut yaml = format!("listen: {{address: \"{listen}\"}}\nadmin: {{address: \"{admin}\"}}\n");
    yaml.push_str(
        "shutdown: {delay: 0s, drain: 5s}\ntelemetry: {access_log: off, series_by_engine: true}\nslo_classes:\n",
    );
    for class in &CLASSES {
        write!(yaml, "  - slo_class: {}\n    priority: {}\n    objectives:\n", class.name, class.priority)
            .expect(TAKES);
        for (name, millis) in [
            ("ttft_seconds", class.ttft),
            ("tpot_seconds", class.tpot),
            ("itl_seconds", class.itl),
            ("e2e_seconds", class.e2e),
        ] {
            let Some(millis) = millis else { continue };
            let seconds = millis as f64 / 1000.0;
            writeln!(yaml, "      {name}: {{threshold: {seconds:?}, attainment: {}}}", class.target).expect(TAKES);
        }
        writeln!(yaml, "    joint_attainment_target: {}\n    window: 1h", class.target).expect(TAKES);
        // Not of the limited tenant, whose reservation would change.
        if class.key == KEY {
            let quantiles = |(p50, p95): (f64, f64)| format!("{{p50: {p50:.0}, p95: {p95:.0}}}");
            let (input, output) = (quantiles(class.input), quantiles(class.output));
            writeln!(yaml, "    workload_assumption: {{input_tokens: {input}, output_tokens: {output}}}").expect(TAKES);
        }
        if let Some(queue) = class.queue {
            writeln!(yaml, "    queue: {queue}").expect(TAKES);
        }
    }
    yaml.push_str("classify:\n");
    for class in CLASSES.iter().filter(|class| class.by_header) {
        writeln!(yaml, "  - {{class: {0}, when: {{header: {{{CLASS_HEADER}: {0}}}}}}}", class.name).expect(TAKES);
    }
    yaml.push_str("  - {class: inline_completion, when: {path: /v1/completions}}\n");
    yaml.push_str("  - {class: agent, when: {has_tools: true}}\ndefault_class: chat_interactive\npools:\n");
    for pool in ["interactive", "batch"] {
        let urls =
            engines.iter().filter(|(of, _)| *of == pool).map(|(_, address)| format!("{{url: \"http://{address}\"}}"));
        let urls: Vec<String> = urls.collect();
        writeln!(yaml, "  - pool: {pool}\n    engines: [{}]\n    engine: {{kind: vllm}}", urls.join(", "))
            .expect(TAKES);
        writeln!(yaml, "    max_concurrency_per_engine: {SEATS}").expect(TAKES);
    }
    yaml.push_str("routes:\n");
    writeln!(yaml, "  - {{model: [{MODEL}], class: [batch], pools: [batch, interactive]}}").expect(TAKES);
    writeln!(yaml, "  - {{model: [{MODEL}], pools: [interactive, batch]}}").expect(TAKES);
    let hash = |key: &str| blake3::hash(key.as_bytes()).to_hex();
    writeln!(yaml, "tenants:\n  - {{tenant: people, keys: [{{blake3: \"{}\"}}]}}", hash(KEY)).expect(TAKES);
    writeln!(yaml, "  - tenant: nightly\n    keys: [{{blake3: \"{}\"}}]", hash(NIGHTLY_KEY)).expect(TAKES);
    writeln!(yaml, "    limits: {{tokens_per_minute: {NIGHTLY_TOKENS}, tokens_burst: {}}}", NIGHTLY_TOKENS / 6)
        .expect(TAKES);
    yaml
}

/// Concurrent requests per engine of the demo: a batch size that still keeps
/// TPOT.
const SEATS: usize = 24;

/// Tokens per minute of the nightly batches: more than they need in the trough, less than at the
/// peak.
const NIGHTLY_TOKENS: u64 = 240_000;

const TAKES: &str = "a String takes everything";

/// The demo's load: about `rate` requests per second in waves of a minute, so that objectives are kept in
/// the trough and tested at the peak.
#[must_use]
pub fn traffic(seed: u64, rate: f64) -> TrafficPlan {
    let flow = |class: &DemoClass| TrafficFlow {
        name: class.name.to_owned(),
        share: class.share,
        style: class.style,
        input: LengthDistribution { p50: class.input.0, p95: class.input.1 },
        output: LengthDistribution { p50: class.output.0, p95: class.output.1 },
        headers: {
            let of_class = class.by_header.then(|| (CLASS_HEADER.to_owned(), class.name.to_owned()));
            let key = ("authorization".to_owned(), format!("Bearer {}", class.key));
            of_class.into_iter().chain([key]).collect()
        },
        leaves: class.leaves,
        objectives: class.objectives(),
    };
    TrafficPlan {
        seed,
        rate,
        swing: 0.6,
        period: Duration::from_secs(60),
        model: MODEL.to_owned(),
        flows: CLASSES.iter().map(flow).collect(),
    }
}

/// The rate at which the fleet keeps its objectives in the trough and is overloaded at the peak, where some
/// chats are shed because more concurrent requests would cost `inline_completion`
/// its TPOT.
pub const RATE: f64 = 22.0;

#[cfg(test)]
mod tests;
