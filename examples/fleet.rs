//! What scheduling is worth on the simulated fleet: makes the tables and curves of
//! `docs/scheduling.md`.
//!
//! `cargo run --release --example fleet` prints the tables; with `-- --write` it also puts them,
//! and the curves, into `docs/`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use goodput::admit::levels::{Action, Bounds, Level};
use goodput::admit::limit::settings::{Allowance, Limits, Rate};
use goodput::admit::queue::Reading;
use goodput::lab::fleet::{Mix, Policy, Report, Scheduled, Span, capacity, run};
use goodput::route::settings::Concurrency;
use goodput::units::{TenantId, Tokens};
use plotters::prelude::*;

/// Loads of the curves, and those of the table.
const LOADS: [f64; 11] = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
const TOLD: [f64; 4] = [0.5, 0.8, 1.2, 1.5];
/// The load at which everything else is compared.
const OVERLOAD: f64 = 1.2;
/// The load at which something has to be given up.
const BEYOND: f64 = 1.5;
/// Further seeds, to see how much is chance.
const SEEDS: [u64; 4] = [1, 2, 3, 4];

const SPAN: Span =
    Span { warm_up: Duration::from_secs(60), measured: Duration::from_secs(600), after: Duration::from_secs(60) };

fn main() -> Result<(), Box<dyn Error>> {
    let mix = Mix::published();
    let capacity = capacity(&mix, &SPAN);
    let policies = [
        ("round robin", Policy::RoundRobin),
        ("least connections", Policy::LeastConnections),
        ("goodput", Policy::Scheduled(Scheduled::published())),
        ("goodput, seats `auto`", Policy::Scheduled(auto())),
    ];
    let curves: Vec<(&str, Vec<Report>)> = policies
        .iter()
        .map(|(name, policy)| (*name, LOADS.iter().map(|load| run(&mix, policy, load * capacity, &SPAN)).collect()))
        .collect();
    let tables = [
        ("capacity", format!("{capacity:.1} requests per second")),
        ("headline", headline(&mix, &curves)),
        ("flood", flood(&mix, capacity)),
        ("seats", seats(&mix, capacity)),
        ("parts", parts(&mix, capacity)),
        ("levers", levers(capacity)),
        ("seeds", seeds()),
    ];
    for (name, table) in &tables {
        println!("{name}\n\n{table}\n");
    }
    if std::env::args().any(|argument| argument == "--write") {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        write_tables(&docs.join("scheduling.md"), &tables)?;
        draw_goodput(&docs.join("img/fleet-goodput.svg"), &curves)?;
        draw_classes(&docs.join("img/fleet-classes.svg"), &mix, &curves)?;
    }
    Ok(())
}

fn auto() -> Scheduled {
    Scheduled { seats: Concurrency::Auto, ..Scheduled::published() }
}

/// Requests per second that kept their promise, and attainment by flow.
fn headline(mix: &Mix, curves: &[(&str, Vec<Report>)]) -> String {
    let mut table = head(mix, &["load", "policy", "met/s"]);
    for load in TOLD {
        let at = LOADS.iter().position(|candidate| *candidate == load).expect("it is one of them");
        for (name, reports) in curves {
            row(&mut table, mix, &[&format!("{load:.1}"), name], &reports[at]);
        }
    }
    table
}

/// What the flooding tenant does to the others.
fn flood(mix: &Mix, capacity: f64) -> String {
    let calm = mix.clone().without("flood");
    let mut table = String::from(
        "| load | policy | most that a tenant of a strict class loses, in points | whose | of batch | whose |\n\
         | ---: | --- | ---: | --- | ---: | --- |\n",
    );
    let whole = Allowance { tokens: Rate::new(300_000, None).ok(), ..Allowance::default() };
    let limits = BTreeMap::from([(TenantId::from("flood"), Limits { whole, ..Limits::default() })]);
    let policies = [
        ("least connections", Policy::LeastConnections),
        ("goodput", Policy::Scheduled(Scheduled::published())),
        ("goodput, limits", Policy::Scheduled(Scheduled { limits, ..Scheduled::published() })),
    ];
    for load in [0.5, 0.8, 1.0, OVERLOAD] {
        for (name, policy) in &policies {
            let without = run(&calm, policy, load * capacity, &SPAN);
            let with = run(mix, policy, load * capacity, &SPAN);
            let strict = without.worst_move(&with, |flow| flow != "batch").expect("other tenants ask, too");
            let batch = without.worst_move(&with, |flow| flow == "batch").expect("other tenants ask, too");
            let (points, whose, of_batch, batchs) = (strict.0, strict.1, batch.0, batch.1);
            writeln!(table, "| {load:.1} | {name} | {points:.1} | {whose} | {of_batch:.1} | {batchs} |").expect(TAKES);
        }
    }
    table
}

/// Static seats from few to many, and those that the controller finds.
fn seats(mix: &Mix, capacity: f64) -> String {
    let mut table = head(mix, &["seats per engine", "met/s"]);
    for seats in [8, 16, 24, 32, 48, 64] {
        let fixed = Concurrency::Fixed(NonZeroU32::new(seats).expect("not zero"));
        let policy = Policy::Scheduled(Scheduled { seats: fixed, ..Scheduled::published() });
        row(&mut table, mix, &[&seats.to_string()], &run(mix, &policy, OVERLOAD * capacity, &SPAN));
    }
    row(&mut table, mix, &["`auto`"], &run(mix, &Policy::Scheduled(auto()), OVERLOAD * capacity, &SPAN));
    table
}

/// What the queue alone does, and what the limit on reading adds.
fn parts(mix: &Mix, capacity: f64) -> String {
    let mut table = head(mix, &["prefill tokens per engine", "seats", "met/s"]);
    for reading in [None, Some(512), Some(1024), Some(2048), Some(4096)] {
        for (name, seats) in [("32", Scheduled::published().seats), ("`auto`", Concurrency::Auto)] {
            let mut settings = Scheduled { seats, ..Scheduled::published() };
            settings.queue.reading = reading.map_or(Reading::NoLimit, |tokens| Reading::Tokens(Tokens(tokens)));
            let told = reading.map_or_else(|| "no limit".to_owned(), |tokens| tokens.to_string());
            let report = run(mix, &Policy::Scheduled(settings), OVERLOAD * capacity, &SPAN);
            row(&mut table, mix, &[&told, name], &report);
        }
    }
    table
}

/// What each overload level buys, at a load where the queue alone is not enough.
fn levers(capacity: f64) -> String {
    let mut mix = Mix::published();
    mix.flows.iter_mut().filter(|flow| flow.flow == "chat").for_each(|chat| chat.reasoning = 0.5);
    let level = |class: &str, action| {
        let bounds = |millis| Bounds { queue_wait: Some(Duration::from_millis(millis)), ..Bounds::default() };
        let levels = vec![Level { action, enter: bounds(200), leave: bounds(100), hold: Level::HOLD }];
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
        let policy = Policy::Scheduled(Scheduled { degrade, overflow, ..Scheduled::published() });
        let report = run(&mix, &policy, BEYOND * capacity, &SPAN);
        row(&mut table, &mix, &[name, &report.shortened.to_string()], &report);
    }
    table
}

/// The same at other seeds.
fn seeds() -> String {
    let mut table = String::from(
        "| seed | least connections, met/s | goodput, met/s | times | lost by the flood, strict classes | batch |\n\
         | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for seed in SEEDS {
        let mix = Mix { seed, ..Mix::published() };
        let rate = OVERLOAD * capacity(&mix, &SPAN);
        let theirs = run(&mix, &Policy::LeastConnections, rate, &SPAN).goodput();
        let policy = Policy::Scheduled(Scheduled::published());
        let report = run(&mix, &policy, rate, &SPAN);
        let calm = run(&mix.without("flood"), &policy, rate, &SPAN);
        let lost =
            |batch: bool| calm.worst_move(&report, |flow| (flow == "batch") == batch).map_or(0.0, |(lost, _)| lost);
        let (ours, strict, batch) = (report.goodput(), lost(false), lost(true));
        writeln!(table, "| {seed} | {theirs:.1} | {ours:.1} | {:.1} | {strict:.1} | {batch:.1} |", ours / theirs)
            .expect(TAKES);
    }
    table
}

fn head(mix: &Mix, columns: &[&str]) -> String {
    let flows: Vec<&str> = columns.iter().copied().chain(mix.flows.iter().map(|flow| flow.flow.as_str())).collect();
    format!("| {} |\n|{}\n", flows.join(" | "), " ---: |".repeat(flows.len()))
}

fn row(table: &mut String, mix: &Mix, first: &[&str], report: &Report) {
    write!(table, "| {} | {:.1} |", first.join(" | "), report.goodput()).expect(TAKES);
    for flow in &mix.flows {
        write!(table, " {:.1} % |", 100.0 * report.flow(&flow.flow).attainment()).expect(TAKES);
    }
    table.push('\n');
}

const TAKES: &str = "a String takes everything";

/// Puts each table between its marks.
fn write_tables(path: &PathBuf, tables: &[(&str, String)]) -> Result<(), Box<dyn Error>> {
    let mut text = std::fs::read_to_string(path)?;
    for (name, table) in tables {
        let (begin, end) = (format!("<!-- fleet: {name} -->\n"), "<!-- end -->");
        let from = text.find(&begin).ok_or(format!("no place for {name}"))? + begin.len();
        let to = from + text[from..].find(end).ok_or(format!("no end of {name}"))?;
        text.replace_range(from..to, &format!("{}\n", table.trim_end()));
    }
    Ok(std::fs::write(path, text)?)
}

const COLOURS: [RGBColor; 6] = [
    RGBColor(120, 120, 120),
    RGBColor(214, 120, 40),
    RGBColor(30, 110, 180),
    RGBColor(40, 150, 90),
    RGBColor(150, 80, 160),
    RGBColor(180, 40, 60),
];

fn draw_goodput(path: &Path, curves: &[(&str, Vec<Report>)]) -> Result<(), Box<dyn Error>> {
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

fn draw_classes(path: &Path, mix: &Mix, curves: &[(&str, Vec<Report>)]) -> Result<(), Box<dyn Error>> {
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
