//! Benefit of scheduling, of its parts and of the overload levels, on the simulated fleet that the
//! scheduler was tuned on.
//!
//! `cargo run --release --example fleet` prints the tables, in some minutes; with `-- --write` it
//! also draws the curves into `docs/img`.

mod common;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::{self, Write as _};
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use common::each;
use goodput::admit::limit::settings::{Allowance, Limits, Rate};
use goodput::admit::overload_control::{Action, LoadBounds, OverloadLevel};
use goodput::admit::queue::PrefillBudget;
use goodput::route::settings::Concurrency;
use goodput::sim::fleet::{GatewayScheduling, Mix, Policy, RunReport, RunSpan, capacity, run};
use goodput::types::{TenantId, Tokens};
use plotters::prelude::*;

/// Loads of the curves, and those of the table.
const LOADS: [f64; 11] = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
const TOLD: [f64; 4] = [0.5, 0.8, 1.2, 1.5];
/// Load of all other comparisons.
const OVERLOAD: f64 = 1.2;
/// Load at which the overload levels act.
const BEYOND: f64 = 1.5;
/// Further seeds, for the variance between runs.
const SEEDS: [u64; 4] = [1, 2, 3, 4];
/// Seeds of averaged losses, where their variance is large and where it is small.
const MANY: u64 = 64;
const FEW: u64 = 16;

const SPAN: RunSpan =
    RunSpan { warm_up: Duration::from_secs(60), measured: Duration::from_secs(600), after: Duration::from_secs(60) };

fn main() -> Result<(), Box<dyn Error>> {
    let mix = Mix::published();
    let capacity = capacity(&mix, &SPAN);
    let policies = [
        ("round robin", Policy::RoundRobin),
        ("least connections", Policy::LeastConnections),
        ("goodput", Policy::Scheduled(GatewayScheduling::published())),
        ("goodput, seats `auto`", Policy::Scheduled(auto())),
    ];
    let curves: Vec<(&str, Vec<RunReport>)> = policies
        .iter()
        .map(|(name, policy)| (*name, each(&LOADS, |load| run(&mix, policy, load * capacity, &SPAN))))
        .collect();
    let tables = [
        ("capacity", format!("{capacity:.1} requests per second")),
        ("headline", headline(&mix, &curves)),
        ("flood", flood(&mix, capacity)),
        ("meetable", meetable(&mix, capacity)),
        ("seats", seats(&mix, capacity)),
        ("parts", parts(&mix, capacity)),
        ("steps", steps(&mix)),
        ("levers", levers(capacity)),
        ("seeds", seeds()),
    ];
    for (name, table) in &tables {
        println!("{name}\n\n{table}\n");
    }
    if std::env::args().any(|argument| argument == "--write") {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        draw_goodput(&docs.join("img/fleet-goodput.svg"), &curves)?;
        draw_classes(&docs.join("img/fleet-classes.svg"), &mix, &curves)?;
    }
    Ok(())
}

fn auto() -> GatewayScheduling {
    GatewayScheduling { seats: Concurrency::Auto, ..GatewayScheduling::published() }
}

/// Met requests per second, and attainment by flow.
fn headline(mix: &Mix, curves: &[(&str, Vec<RunReport>)]) -> String {
    let mut table = head(mix, &["load", "policy", "met/s"]);
    for load in TOLD {
        let at = LOADS.iter().position(|candidate| *candidate == load).expect("it is one of them");
        for (name, reports) in curves {
            row(&mut table, mix, &[&format!("{load:.1}"), name], &reports[at]);
        }
    }
    table
}

/// A mean over seeds, and its standard error.
#[derive(Clone, Copy)]
struct Mean {
    mean: f64,
    error: f64,
}

impl Mean {
    fn of(values: &[f64]) -> Mean {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Mean { mean, error: (variance / count).sqrt() }
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} ± {:.1}", self.mean, self.error)
    }
}

/// Attainment that tenants lose to additional arrivals, averaged over seeds.
struct Losses {
    by_tenant: BTreeMap<(String, TenantId), Vec<f64>>,
    /// Share of the flood's requests that were dispatched, in percent.
    dispatched: f64,
}

impl Losses {
    /// `pair` runs one seed without and with the additional arrivals.
    fn of(seeds: u64, pair: impl Fn(u64) -> (RunReport, RunReport) + Sync) -> Losses {
        let mut by_tenant: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        let mut flood = (0, 0);
        for (without, with) in each(&(0..seeds).collect::<Vec<_>>(), |seed| pair(100 + seed)) {
            for ((flow, tenant), points) in without.losses(&with) {
                by_tenant.entry((flow.to_owned(), tenant)).or_default().push(points);
            }
            let score = with.flow("flood");
            flood = (flood.0 + score.dispatched, flood.1 + score.judged() + score.excluded);
        }
        Losses { by_tenant, dispatched: 100.0 * flood.0 as f64 / flood.1.max(1) as f64 }
    }

    /// Largest loss of a tenant, of batch or of the other classes.
    fn worst(&self, batch: bool) -> String {
        let flows = self.by_tenant.iter().filter(|((flow, _), _)| (flow == "batch") == batch);
        let means = flows.map(|((flow, tenant), points)| (Mean::of(points), format!("{flow} of {tenant}")));
        let worst = means.max_by(|a, b| a.0.mean.total_cmp(&b.0.mean));
        worst.map_or_else(String::new, |(mean, whose)| format!("{mean} | {whose}"))
    }

    fn row(&self, table: &mut String, load: f64, name: &str) {
        let (strict, batch, dispatched) = (self.worst(false), self.worst(true), self.dispatched);
        writeln!(table, "| {load:.1} | {name} | {strict} | {batch} | {dispatched:.1} % |").expect(TAKES);
    }
}

const LOSSES: &str = "| load | policy | most that a tenant of a strict class loses, in points | whose | most of batch | whose | of the flood, dispatched |\n\
                      | ---: | --- | ---: | --- | ---: | --- | ---: |\n";

/// Losses of other tenants to a flood, and to a negligible one.
fn flood(mix: &Mix, capacity: f64) -> String {
    let ours = Policy::Scheduled(GatewayScheduling::published());
    let mut table = String::from(LOSSES);
    for load in [0.5, 0.8, 1.0, OVERLOAD] {
        for (name, policy, seeds) in [("least connections", &Policy::LeastConnections, FEW), ("goodput", &ours, MANY)] {
            let losses = Losses::of(seeds, |seed| {
                let mix = Mix { seed, ..mix.clone() };
                let with = run(&mix, policy, load * capacity, &SPAN);
                (run(&mix.without("flood"), policy, load * capacity, &SPAN), with)
            });
            losses.row(&mut table, load, name);
        }
    }
    let nothing = Losses::of(MANY, |seed| {
        let mix = Mix { seed, ..mix.clone() }.without("flood");
        let rate = OVERLOAD * capacity;
        (run(&mix, &ours, rate, &SPAN), run(&mix, &ours, rate * (1.0 + 1e-6), &SPAN))
    });
    nothing.row(&mut table, OVERLOAD, "goodput, no flood, a millionth more");
    let deluge = Losses::of(FEW, |seed| {
        let calm = Mix { seed, ..mix.clone() };
        let flooded = calm.clone().with_prompts("flood", 30_000, 100.0);
        let with = run(&flooded, &ours, OVERLOAD * capacity * shares(&flooded) / shares(&calm), &SPAN);
        (run(&calm.without("flood"), &ours, OVERLOAD * capacity, &SPAN), with)
    });
    deluge.row(&mut table, OVERLOAD, "goodput, a hundred times the flood");
    table
}

/// Sum of the flows' shares, by which a rate is divided.
fn shares(mix: &Mix) -> f64 {
    mix.flows.iter().map(|flow| flow.share).sum()
}

/// The same for a flood that an engine could answer in time: equal tokens in shorter prompts.
fn meetable(mix: &Mix, capacity: f64) -> String {
    const TOKENS: u64 = 2000;
    let whole = Allowance { tokens: Rate::new(300_000, None).ok(), ..Allowance::default() };
    let limits = BTreeMap::from([(TenantId::from("flood"), Limits { whole, ..Limits::default() })]);
    let limited = Policy::Scheduled(GatewayScheduling { limits, ..GatewayScheduling::published() });
    let policies = [
        ("least connections", Policy::LeastConnections),
        ("goodput", Policy::Scheduled(GatewayScheduling::published())),
        ("goodput, limits", limited),
    ];
    let mut table = String::from(LOSSES);
    for load in [0.8, OVERLOAD] {
        for (name, policy) in &policies {
            let losses = Losses::of(FEW, |seed| {
                let calm = Mix { seed, ..mix.clone() };
                let flooded = calm.clone().with_prompts("flood", TOKENS, 30_000.0 / TOKENS as f64);
                let rate = load * capacity;
                let with = run(&flooded, policy, rate * shares(&flooded) / shares(&calm), &SPAN);
                (run(&calm.without("flood"), policy, rate, &SPAN), with)
            });
            losses.row(&mut table, load, name);
        }
    }
    table
}

/// Static concurrency limits from small to large, and `auto`.
fn seats(mix: &Mix, capacity: f64) -> String {
    let mut table = head(mix, &["seats per engine", "met/s"]);
    for seats in [8, 16, 24, 32, 48, 64] {
        let fixed = Concurrency::Fixed(NonZeroU32::new(seats).expect("not zero"));
        let policy = Policy::Scheduled(GatewayScheduling { seats: fixed, ..GatewayScheduling::published() });
        row(&mut table, mix, &[&seats.to_string()], &run(mix, &policy, OVERLOAD * capacity, &SPAN));
    }
    row(&mut table, mix, &["`auto`"], &run(mix, &Policy::Scheduled(auto()), OVERLOAD * capacity, &SPAN));
    table
}

/// Benefit of the queue alone, and of the prefill budget.
fn parts(mix: &Mix, capacity: f64) -> String {
    let mut table = head(mix, &["`prefill_tokens_per_engine`", "seats", "met/s"]);
    for (told, reading) in readings() {
        for (name, seats) in [("32", GatewayScheduling::published().seats), ("`auto`", Concurrency::Auto)] {
            let policy =
                Policy::Scheduled(reads(reading, GatewayScheduling { seats, ..GatewayScheduling::published() }));
            row(&mut table, mix, &[&told, name], &run(mix, &policy, OVERLOAD * capacity, &SPAN));
        }
    }
    table
}

fn readings() -> Vec<(String, PrefillBudget)> {
    let fixed = [512, 1024, 2048, 4096].map(|tokens| (tokens.to_string(), PrefillBudget::Tokens(Tokens(tokens))));
    let words = [("`off`".to_owned(), PrefillBudget::NoLimit), ("`auto`".to_owned(), PrefillBudget::Auto)];
    words.into_iter().chain(fixed).collect()
}

fn reads(reading: PrefillBudget, mut settings: GatewayScheduling) -> GatewayScheduling {
    settings.queue.reading = reading;
    settings
}

/// The learned prefill budget, on engines with larger and smaller steps.
fn steps(mix: &Mix) -> String {
    let readings = readings();
    let names: Vec<&str> = readings.iter().map(|(name, _)| name.as_str()).collect();
    let mut table = format!(
        "| tokens in a step | capacity, requests/s | {} |\n| ---: | ---: |{}\n",
        names.join(" | "),
        " ---: |".repeat(names.len())
    );
    for step_tokens in [256, 512, 1024, 2048, 8192] {
        let mut mix = mix.clone();
        mix.engine.step_tokens = step_tokens;
        let capacity = capacity(&mix, &SPAN);
        write!(table, "| {step_tokens} | {capacity:.1} |").expect(TAKES);
        for met in each(&readings, |(_, reading)| {
            let policy = Policy::Scheduled(reads(*reading, GatewayScheduling::published()));
            run(&mix, &policy, OVERLOAD * capacity, &SPAN).goodput()
        }) {
            write!(table, " {met:.1} |").expect(TAKES);
        }
        table.push('\n');
    }
    table
}

/// Benefit of each overload level at a load where the queue alone does not suffice.
fn levers(capacity: f64) -> String {
    let mut mix = Mix::published();
    mix.flows.iter_mut().filter(|flow| flow.flow == "chat").for_each(|chat| chat.reasoning = 0.5);
    let level = |class: &str, action| {
        let bounds = |millis| LoadBounds { queue_wait: Some(Duration::from_millis(millis)), ..LoadBounds::default() };
        let levels = vec![OverloadLevel { action, enter: bounds(200), leave: bounds(100), hold: OverloadLevel::HOLD }];
        vec![(class.to_owned(), levels)]
    };
    let (chat, agent) = ("chat_interactive", "agent");
    let levers = [
        ("none", vec![], 0),
        ("`defer` of agent", level(agent, Action::Defer), 0),
        ("`shed_lower` by chat", level(chat, Action::ShedLower), 0),
        ("`cap_output: 128` of chat", level(chat, Action::CapOutput(Tokens(128))), 0),
        ("`reasoning_off` of chat", level(chat, Action::ReasoningOff), 0),
        ("`spill` of chat", level(chat, Action::Spill), 2),
    ];
    let mut table = head(&mix, &["level", "answers made shorter", "met/s"]);
    for (name, degrade, overflow) in levers {
        let levels = GatewayScheduling { degrade, ..GatewayScheduling::published() };
        let policy = Policy::Scheduled(if overflow > 0 { levels.with_overflow(overflow) } else { levels });
        let report = run(&mix, &policy, BEYOND * capacity, &SPAN);
        row(&mut table, &mix, &[name, &report.shortened.to_string()], &report);
    }
    table
}

/// The same at other seeds.
fn seeds() -> String {
    let mut table =
        String::from("| seed | least connections, met/s | goodput, met/s | times |\n| ---: | ---: | ---: | ---: |\n");
    for (seed, theirs, ours) in each(&SEEDS, |seed| {
        let mix = Mix { seed: *seed, ..Mix::published() };
        let rate = OVERLOAD * capacity(&mix, &SPAN);
        let theirs = run(&mix, &Policy::LeastConnections, rate, &SPAN).goodput();
        (*seed, theirs, run(&mix, &Policy::Scheduled(GatewayScheduling::published()), rate, &SPAN).goodput())
    }) {
        writeln!(table, "| {seed} | {theirs:.1} | {ours:.1} | {:.1} |", ours / theirs).expect(TAKES);
    }
    table
}

fn head(mix: &Mix, columns: &[&str]) -> String {
    let flows: Vec<&str> = columns.iter().copied().chain(mix.flows.iter().map(|flow| flow.flow.as_str())).collect();
    format!("| {} |\n|{}\n", flows.join(" | "), " ---: |".repeat(flows.len()))
}

fn row(table: &mut String, mix: &Mix, first: &[&str], report: &RunReport) {
    write!(table, "| {} | {:.1} |", first.join(" | "), report.goodput()).expect(TAKES);
    for flow in &mix.flows {
        write!(table, " {:.1} % |", 100.0 * report.flow(&flow.flow).attainment()).expect(TAKES);
    }
    table.push('\n');
}

const TAKES: &str = "a String takes everything";

const COLOURS: [RGBColor; 6] = [
    RGBColor(120, 120, 120),
    RGBColor(214, 120, 40),
    RGBColor(30, 110, 180),
    RGBColor(40, 150, 90),
    RGBColor(150, 80, 160),
    RGBColor(180, 40, 60),
];

fn draw_goodput(path: &Path, curves: &[(&str, Vec<RunReport>)]) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (760, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0.5..1.5, 0.0..50.0)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("load, in capacities of the fleet")
        .y_desc("requests per second that kept their promise")
        .draw()?;
    for ((name, reports), colour) in curves.iter().zip(COLOURS) {
        let line = LOADS.iter().zip(reports).map(|(load, report)| (*load, report.goodput()));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(name.replace('`', ""))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).border_style(BLACK.mix(0.3)).draw()?;
    Ok(root.present()?)
}

fn draw_classes(path: &Path, mix: &Mix, curves: &[(&str, Vec<RunReport>)]) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (760, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (name, reports)) in root.split_evenly((1, 2)).iter().zip([&curves[1], &curves[2]]) {
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .caption(name, ("sans-serif", 16))
            .x_label_area_size(40)
            .y_label_area_size(50)
            .build_cartesian_2d(0.5..1.5, 0.0..100.0)?;
        chart.configure_mesh().light_line_style(WHITE).x_desc("load").y_desc("attainment, %").draw()?;
        for (flow, colour) in mix.flows.iter().zip(COLOURS) {
            let line =
                LOADS.iter().zip(reports).map(|(load, report)| (*load, 100.0 * report.flow(&flow.flow).attainment()));
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
                .label(flow.flow.clone())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().position(SeriesLabelPosition::LowerLeft).border_style(BLACK.mix(0.3)).draw()?;
    }
    Ok(root.present()?)
}
