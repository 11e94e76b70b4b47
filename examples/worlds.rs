//! Policies on engines and traffic that no scheduler was tuned on, in virtual time.
//!
//! `cargo run --release --example worlds -- --mix office --loads 0.8,1.2 --seeds 1,2,3` prints
//! a row for each load and policy: means over the seeds. With `--all` it prints every table of
//! `docs/scheduling.md` that it measures, which takes a while; with `--write` it replaces them
//! there.

mod common;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use clap::Parser;
use common::each;
use goodput::judge::Outcome;
use goodput::route::settings::Concurrency;
use goodput::sim::fleet::{
    Flood, GatewayLink, GatewayScheduling, Incident, Mix, Peer, Policy, RunReport, RunSpan, Scenario, capacity, run_in,
};

#[derive(Clone, Parser)]
#[command(about = "The second world: policies in virtual time, as tables")]
struct Options {
    /// `office`, `mono`, `published`, `drawn:SEED`, or a file.
    #[arg(long, default_value = "office")]
    mix: String,
    /// Loads, as multiples of the fleet's capacity.
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.8,1.0,1.2,1.5")]
    loads: Vec<f64>,
    /// Seeds; every figure is a mean over them.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// `leastconn`, `roundrobin`, `cacheaware`, `haproxy:SEATS:SECONDS`, `smg:SEATS`,
    /// `smg:SEATS:tuned`, `auto`, or a number of seats.
    #[arg(long, value_delimiter = ',', default_value = "leastconn,16,32,48,64,auto")]
    policies: Vec<String>,
    /// Tokens that engines compute in one step.
    #[arg(long)]
    budget: Option<u64>,
    /// Tokens that an engine's cache holds.
    #[arg(long)]
    kv: Option<u64>,
    /// Slowness of each engine in turn; 1 is normal.
    #[arg(long, value_delimiter = ',')]
    speeds: Vec<f64>,
    /// Number of engines.
    #[arg(long)]
    engines: Option<usize>,
    /// Number of gateways that share the engines; several numbers give a row each.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    gateways: Vec<NonZeroU32>,
    /// Interval and delay of the exchange between gateways, in milliseconds; an interval of 0 switches it off.
    #[arg(long, value_delimiter = ':', default_value = "0")]
    exchange: Vec<f64>,
    /// `SECONDS:restart:ENGINE:DOWN`, `SECONDS:slow:ENGINE:TIMES` or `SECONDS:gateway:NUMBER`.
    #[arg(long = "event")]
    events: Vec<String>,
    /// `TENANT:TIMES:SECONDS`: multiplies a tenant's arrivals from that moment on.
    #[arg(long = "flood")]
    floods: Vec<String>,
    /// Warm-up in seconds, whose arrivals are not counted.
    #[arg(long, default_value_t = 60.0)]
    warm: f64,
    /// Length of the counted period in seconds.
    #[arg(long, default_value_t = 240.0)]
    measure: f64,
    /// Seconds of arrivals after the counted period.
    #[arg(long, default_value_t = 20.0)]
    after: f64,
    /// Flows without requests; the arrivals of the others stay the same.
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Clients have no time limit.
    #[arg(long)]
    patient: bool,
    /// Print seats, waiting and running requests over time, of the first seed.
    #[arg(long)]
    seats: bool,
    /// Print the reasons of misses, by flow.
    #[arg(long)]
    misses: bool,
    /// Print times in the queue, to the first token and per further token, by flow.
    #[arg(long)]
    times: bool,
    /// Print attainment over time, in steps of so many seconds.
    #[arg(long)]
    bins: Option<u64>,
    /// Print all tables of the document.
    #[arg(long)]
    all: bool,
    /// Write the tables into the document as well.
    #[arg(long)]
    write: bool,
}

/// One row of a table: a policy, a load and a number of gateways.
struct Row {
    load: f64,
    gateways: NonZeroU32,
    policy: String,
    /// By seed.
    reports: Vec<RunReport>,
    /// The same without the floods, where there are any.
    calm: Vec<RunReport>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    if options.all || options.write {
        return all(&options);
    }
    let world = World::of(&options)?;
    let rows = world.rows()?;
    print!("{}", table(&world.mix, &options, &rows));
    if !options.floods.is_empty() {
        print!("\n{}", losses(&world.mix, &options, &rows)?);
    }
    for row in &rows {
        let name = format!("{:.1} {} x {}", row.load, row.policy, row.gateways);
        if options.misses {
            println!("{name}: missed {}", misses(&world.mix, &row.reports));
        }
        if options.times {
            println!("{name}: {}", times(&world.mix, &row.reports));
        }
        if let Some(width) = options.bins {
            println!("{name}: {}", over_time(&row.reports, width));
            for (number, flow) in world.mix.flows.iter().enumerate() {
                let mut reports = row.reports.clone();
                reports.iter_mut().for_each(|report| report.told.retain(|told| told.flow == number));
                println!("  {}: {}", flow.flow, over_time(&reports, width));
            }
        }
        if options.seats {
            println!("{name}: seats/queued/running/waiting {}", seats_over_time(&row.reports[0]));
        }
    }
    Ok(())
}

/// The world that the options describe.
struct World<'a> {
    options: &'a Options,
    mix: Mix,
    span: RunSpan,
    /// Requests per second at a load of 1.
    one: f64,
}

impl World<'_> {
    fn of(options: &Options) -> Result<World<'_>, Box<dyn Error>> {
        let mut mix = match options.mix.split_once(':') {
            Some(("drawn", seed)) => Mix::drawn(seed.parse()?),
            _ => match options.mix.as_str() {
                "office" => Mix::office(),
                "mono" => Mix::mono(),
                "published" => Mix::published(),
                file => Mix::read(&std::fs::read_to_string(file)?)?,
            },
        };
        mix.engine.step_tokens = options.budget.unwrap_or(mix.engine.step_tokens);
        mix.engine.kv_tokens = options.kv.unwrap_or(mix.engine.kv_tokens);
        mix.engines = options.engines.unwrap_or(mix.engines);
        if !options.speeds.is_empty() {
            mix.slowness.clone_from(&options.speeds);
        }
        mix = options.without.iter().fold(mix, |mix, flow| mix.without(flow));
        let seconds = Duration::from_secs_f64;
        let span = RunSpan {
            warm_up: seconds(options.warm),
            measured: seconds(options.measure),
            after: seconds(options.after),
        };
        let one = mix.load_of_one.unwrap_or_else(|| capacity(&mix, &RunSpan { after: Duration::ZERO, ..span }));
        Ok(World { options, mix, span, one })
    }

    fn rows(&self) -> Result<Vec<Row>, Box<dyn Error>> {
        let Options { loads, gateways, policies, seeds, .. } = self.options;
        let events = self.options.events.iter().map(|event| event_of(event)).collect::<Result<Vec<_>, _>>()?;
        let floods = self.options.floods.iter().map(|flood| flood_of(flood)).collect::<Result<Vec<_>, _>>()?;
        let policies = policies.iter().map(|name| policy_of(name)).collect::<Result<Vec<_>, _>>()?;
        let mut trials = Vec::new();
        for load in loads {
            for gateways in gateways {
                for policy in 0..policies.len() {
                    let calm = [false, true].into_iter().filter(|calm| !*calm || !floods.is_empty());
                    trials.extend(
                        calm.flat_map(|calm| seeds.iter().map(move |seed| (*load, *gateways, policy, calm, *seed))),
                    );
                }
            }
        }
        let mut reports = each(&trials, |(load, gateways, policy, calm, seed)| {
            let mix = Mix { seed: *seed, ..self.mix.clone() };
            let scenario = Scenario {
                gateways: *gateways,
                exchange: exchange_of(&self.options.exchange),
                patient: self.options.patient,
                floods: if *calm { Vec::new() } else { floods.clone() },
                events: events.clone(),
            };
            run_in(&mix, &policies[*policy], load * self.one, &self.span, &scenario)
        })
        .into_iter();
        let mut rows = Vec::new();
        let mut take = || reports.by_ref().take(seeds.len()).collect::<Vec<_>>();
        for load in loads {
            for gateways in gateways {
                for policy in &self.options.policies {
                    let flooded = take();
                    let calm = if floods.is_empty() { Vec::new() } else { take() };
                    let (load, gateways, policy) = (*load, *gateways, policy.clone());
                    rows.push(Row { load, gateways, policy, reports: flooded, calm });
                }
            }
        }
        Ok(rows)
    }
}

fn policy_of(name: &str) -> Result<Policy, Box<dyn Error>> {
    let scheduled = |seats| Policy::Scheduled(GatewayScheduling { seats, ..GatewayScheduling::published() });
    let parts: Vec<&str> = name.split(':').collect();
    let seconds = |all: [u64; 4]| all.map(Duration::from_secs);
    Ok(match parts[..] {
        ["leastconn"] => Policy::LeastConnections,
        ["roundrobin"] => Policy::RoundRobin,
        ["cacheaware"] => Policy::Peer(Peer::cache_aware()),
        ["auto"] => scheduled(Concurrency::Auto),
        ["haproxy", seats, wait] => Policy::Peer(Peer::haproxy(seats.parse()?, Duration::from_secs_f64(wait.parse()?))),
        ["smg", seats] => Policy::Peer(Peer::smg(seats.parse()?, seconds([5, 15, 40, 60]))),
        ["smg", seats, "tuned"] => Policy::Peer(Peer::smg(seats.parse()?, seconds([1, 2, 25, 40]))),
        [seats] => scheduled(Concurrency::Fixed(seats.parse().map_err(|_| format!("there is no policy {name}"))?)),
        _ => return Err(format!("there is no policy {name}").into()),
    })
}

fn event_of(text: &str) -> Result<(Duration, Incident), Box<dyn Error>> {
    let parts: Vec<&str> = text.split(':').collect();
    let seconds = |text: &str| Ok::<_, Box<dyn Error>>(Duration::from_secs_f64(text.parse()?));
    Ok(match parts[..] {
        [at, "restart", engine, down] => {
            (seconds(at)?, Incident::EngineRestarts { engine: engine.parse()?, down: seconds(down)? })
        }
        [at, "slow", engine, times] => {
            (seconds(at)?, Incident::EngineSlows { engine: engine.parse()?, times: times.parse()? })
        }
        [at, "gateway", gateway] => (seconds(at)?, Incident::GatewayRestarts { gateway: gateway.parse()? }),
        _ => return Err(format!("there is no event {text}").into()),
    })
}

fn exchange_of(millis: &[f64]) -> Option<GatewayLink> {
    let duration = |millis: f64| Duration::from_secs_f64(millis / 1000.0);
    let every = *millis.first().filter(|every| **every > 0.0)?;
    Some(GatewayLink { every: duration(every), delay: duration(millis.get(1).copied().unwrap_or(every / 2.0)) })
}

fn flood_of(text: &str) -> Result<Flood, Box<dyn Error>> {
    let parts: Vec<&str> = text.split(':').collect();
    let [tenant, times, from] = parts[..] else { return Err(format!("{text} is no flood").into()) };
    let from = Duration::from_secs_f64(from.parse()?);
    Ok(Flood { tenant: tenant.to_owned(), times: times.parse()?, from })
}

fn flows_of(mix: &Mix) -> Vec<&str> {
    mix.flows.iter().map(|flow| flow.flow.as_str()).collect()
}

fn table(mix: &Mix, options: &Options, rows: &[Row]) -> String {
    let flows = flows_of(mix);
    let shared = options.gateways.len() > 1;
    let gateways = if shared { " gateways | x one |" } else { "" };
    let mut table = format!("| load | policy |{gateways} met/s | x leastconn | {} |", flows.join(" | "));
    table.push_str(" seats | running | TTFT off | hits | preempted | misses |\n| ---: | --- |");
    writeln!(table, "{}", " ---: |".repeat(flows.len() + 8 + if shared { 2 } else { 0 })).expect(TAKES);
    let other = |row: &Row, policy: &str, gateways: NonZeroU32| {
        let is_it = |other: &&Row| {
            other.load.total_cmp(&row.load).is_eq() && other.policy == policy && other.gateways == gateways
        };
        let found = rows.iter().find(is_it);
        found.map_or_else(|| "-".to_owned(), |other| format!("{:.2}", ratio(&row.reports, &other.reports)))
    };
    for row in rows {
        let reports = &row.reports;
        write!(table, "| {:.1} | {} |", row.load, row.policy).expect(TAKES);
        if shared {
            write!(table, " {} | {} |", row.gateways, other(row, &row.policy, NonZeroU32::MIN)).expect(TAKES);
        }
        let (met, least) = (mean_of(reports, RunReport::goodput), other(row, "leastconn", row.gateways));
        write!(table, " {met:.2} | {least} |").expect(TAKES);
        for flow in &flows {
            let attainment = mean_of(reports, |report| 100.0 * report.flow(flow).attainment());
            write!(table, " {attainment:.1} |").expect(TAKES);
        }
        let off: Vec<f64> = reports.iter().filter_map(RunReport::prediction_error).map(|off| 100.0 * off).collect();
        let off = if off.is_empty() { "-".to_owned() } else { format!("{:.0} %", mean(&off)) };
        let (seats, running) = standing(reports, options);
        let hits = mean_of(reports, |report| report.engines.hit_rate());
        let preempted = mean_of(reports, |report| report.engines.preemptions as f64);
        let missed = counted(reports.iter().map(RunReport::all).flat_map(|score| score.missed));
        writeln!(table, " {seats} | {running:.0} | {off} | {hits:.3} | {preempted:.0} | {missed} |").expect(TAKES);
    }
    table
}

/// Ratio of met requests per second to another policy, seed by seed.
fn ratio(own: &[RunReport], others: &[RunReport]) -> f64 {
    let pairs = own.iter().zip(others);
    mean(&pairs.map(|(own, other)| own.goodput() / other.goodput().max(1e-9)).collect::<Vec<_>>())
}

/// Attainment that tenants lose to the floods, in percentage points: the largest loss without a
/// flood of one's own, and that of the flooding tenants.
fn losses(mix: &Mix, options: &Options, rows: &[Row]) -> Result<String, Box<dyn Error>> {
    let floods = options.floods.iter().map(|flood| flood_of(flood)).collect::<Result<Vec<_>, _>>()?;
    let mut table =
        String::from("| load | policy | tenant that loses most | points | mean of others | flooding tenants |\n");
    table.push_str("| ---: | --- | --- | ---: | ---: | --- |\n");
    for row in rows {
        let mut by_tenant: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for (calm, flooded) in row.calm.iter().zip(&row.reports) {
            for (key, points) in lost(calm, flooded) {
                by_tenant.entry(key).or_default().push(points);
            }
        }
        let (theirs, others): (Vec<_>, Vec<_>) = by_tenant
            .iter()
            .map(|((flow, tenant), points)| (format!("{} of {tenant}", mix.flows[*flow].flow), tenant, mean(points)))
            .partition(|(_, tenant, _)| floods.iter().any(|flood| flood.tenant == **tenant));
        let worst = others.iter().max_by(|a, b| a.2.total_cmp(&b.2));
        let (whose, most) = worst.map_or(("-", 0.0), |(name, _, points)| (name, *points));
        let all = mean(&others.iter().map(|(.., points)| *points).collect::<Vec<_>>());
        let theirs: Vec<String> = theirs.iter().map(|(name, _, points)| format!("{name} {points:.1}")).collect();
        let (load, policy) = (row.load, &row.policy);
        writeln!(table, "| {load:.1} | {policy} | {whose} | {most:.1} | {all:.1} | {} |", theirs.join(", "))
            .expect(TAKES);
    }
    Ok(table)
}

/// Percentage points that each tenant loses in each flow with at least 20 of its requests.
fn lost(calm: &RunReport, flooded: &RunReport) -> BTreeMap<(usize, String), f64> {
    let both = calm.tenants.iter().filter_map(|(key, calm)| Some((key, calm, flooded.tenants.get(key)?)));
    let told = both.filter(|(_, calm, flooded)| calm.judged() >= 20 && flooded.judged() >= 20);
    told.map(|((flow, tenant), calm, flooded)| {
        ((*flow, tenant.to_string()), 100.0 * (calm.attainment() - flooded.attainment()))
    })
    .collect()
}

/// The mean number of seats per engine, with its least and most, and of requests in a batch,
/// while arrivals count.
fn standing(reports: &[RunReport], options: &Options) -> (String, f64) {
    let (mut seats, mut running) = (Vec::new(), Vec::new());
    for look in reports.iter().flat_map(|report| &report.looks) {
        let at = look.at.as_nanos() as f64 / 1e9;
        if (options.warm..options.warm + options.measure).contains(&at) {
            let engines = look.engines.len() as f64;
            seats.extend(look.seats.map(|seats| seats as f64 / engines));
            running.push(look.engines.iter().map(|(running, _)| *running as f64).sum::<f64>() / engines);
        }
    }
    let least = seats.iter().copied().fold(f64::INFINITY, f64::min);
    let most = seats.iter().copied().fold(0.0, f64::max);
    let told = if seats.is_empty() { "-".to_owned() } else { format!("{:.0} ({least:.0}-{most:.0})", mean(&seats)) };
    (told, mean(&running))
}

/// A line every five seconds, per engine.
fn seats_over_time(report: &RunReport) -> String {
    let looks = report.looks.iter().step_by(5).map(|look| {
        let engines = look.engines.len();
        let (running, waiting) = look.engines.iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let seats = look.seats.map_or_else(|| "-".to_owned(), |seats| (seats / engines).to_string());
        format!("{seats}/{}/{}/{}", look.queued, running / engines, waiting / engines)
    });
    looks.collect::<Vec<_>>().join(" ")
}

/// Attainment of all requests that arrived in each step of time.
fn over_time(reports: &[RunReport], width: u64) -> String {
    let mut steps: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for told in reports.iter().flat_map(|report| &report.told) {
        let step = steps.entry(told.arrived.as_nanos() / 1_000_000_000 / width.max(1)).or_default();
        match told.outcome {
            Outcome::Met => *step = (step.0 + 1, step.1 + 1),
            Outcome::Missed(_) => step.1 += 1,
            Outcome::Excluded(_) => {}
        }
    }
    let told = steps.values().map(|(met, of)| format!("{:.0}", 100.0 * *met as f64 / (*of).max(1) as f64));
    told.collect::<Vec<_>>().join(" ")
}

fn misses(mix: &Mix, reports: &[RunReport]) -> String {
    let flows = flows_of(mix).into_iter().map(|flow| {
        let missed = reports.iter().flat_map(|report| report.flow(flow).missed);
        format!("{flow}: {}", counted(missed))
    });
    flows.collect::<Vec<_>>().join("; ")
}

/// Medians and 95th percentiles, in seconds; the last in milliseconds.
fn times(mix: &Mix, reports: &[RunReport]) -> String {
    let flows = flows_of(mix).into_iter().enumerate().map(|(number, flow)| {
        let told = reports.iter().flat_map(|report| &report.told).filter(|told| told.flow == number);
        let two = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            let at = |share: f64| all.get((all.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
            format!("{:.2}/{:.2}", at(0.5), at(0.95))
        };
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let waited = two(told.clone().filter_map(|told| seconds(told.waited)).collect());
        let ttft = two(told.clone().filter_map(|told| seconds(told.ttft)).collect());
        let tpot = two(told.filter_map(|told| seconds(told.tpot).map(|each| 1000.0 * each)).collect());
        format!("{flow}: waited {waited} ttft {ttft} tpot {tpot}")
    });
    flows.collect::<Vec<_>>().join("; ")
}

fn counted(missed: impl Iterator<Item = (&'static str, u64)>) -> String {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    missed.for_each(|(reason, count)| *sums.entry(reason).or_default() += count);
    let told: Vec<String> = sums.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    if told.is_empty() { "none".to_owned() } else { told.join(", ") }
}

fn mean_of(reports: &[RunReport], figure: impl Fn(&RunReport) -> f64) -> f64 {
    mean(&reports.iter().map(figure).collect::<Vec<_>>())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Seeds of the flood tables, in which single tenants have few requests.
const FLOOD_SEEDS: u64 = 8;

/// Every table of the document, loads below capacity first.
fn all(options: &Options) -> Result<(), Box<dyn Error>> {
    let peers = "leastconn,roundrobin,cacheaware,haproxy:32:2,haproxy:48:2,smg:32,smg:32:tuned,16,32,48,64,auto";
    let strings = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
    let with = |mix: &str, loads: &[f64], policies: &str| Options {
        mix: mix.to_owned(),
        loads: loads.to_vec(),
        policies: strings(policies),
        ..options.clone()
    };
    let (few, some) = ("leastconn,32,auto", [0.5, 0.8, 1.2]);
    let loads = [0.5, 0.8, 1.0, 1.2, 1.5];
    let mut wanted: Vec<(String, Options)> = Vec::new();
    for mix in ["office", "mono"] {
        wanted.push((mix.to_owned(), with(mix, &loads, peers)));
        for budget in [512, 8192] {
            let options = Options { budget: Some(budget), ..with(mix, &some, "leastconn,16,32,48,64,96,auto") };
            wanted.push((format!("{mix}-budget-{budget}"), options));
        }
        let slow = Options { speeds: vec![1.0, 1.0, 1.0, 3.0], ..with(mix, &[0.5, 0.8], few) };
        wanted.push((format!("{mix}-unequal"), slow));
        let event = |event: &str| Options { events: vec![event.to_owned()], ..with(mix, &[0.5, 0.8], few) };
        wanted.push((format!("{mix}-engine-restart"), event("120:restart:0:8")));
        wanted.push((format!("{mix}-engine-slows"), event("120:slow:2:3")));
        wanted.push((format!("{mix}-gateway-restart"), event("120:gateway:0")));
        let gateways: Vec<_> = [1, 2, 4].into_iter().filter_map(NonZeroU32::new).collect();
        let several = Options { gateways, ..with(mix, &some, "32,auto") };
        wanted.push((format!("{mix}-gateways"), several.clone()));
        // As through a store: every 50 ms, and 25.5 ms under way.
        let exchange = Options {
            gateways: several.gateways,
            exchange: vec![50.0, 25.5],
            ..with(mix, &[0.5, 0.8, 1.0, 1.2], "auto")
        };
        wanted.push((format!("{mix}-exchange"), exchange));
    }
    let mut tables = Vec::new();
    for (name, options) in &wanted {
        let world = World::of(options)?;
        tables.push((name.clone(), table(&world.mix, options, &world.rows()?)));
        print_last(&tables);
    }
    // Upper bound of the strict classes: the same arrivals without the lowest priority.
    let strict = Options { without: vec!["batch".to_owned()], ..with("office", &[0.8, 1.0, 1.2, 1.5], "auto") };
    let world = World::of(&strict)?;
    tables.push(("office-strict".to_owned(), table(&world.mix, &strict, &world.rows()?)));
    print_last(&tables);
    // A negligible flood, for the variance of tenants by chance alone.
    for (tenant, times) in [("web", "1.02"), ("web", "3"), ("web", "30"), ("desk", "3"), ("desk", "30")] {
        let options = Options {
            floods: vec![format!("{tenant}:{times}:60")],
            seeds: (1..=FLOOD_SEEDS).collect(),
            ..with("office", &[0.8, 1.0], "leastconn,smg:32:tuned,auto")
        };
        let world = World::of(&options)?;
        tables.push((format!("flood-{tenant}-{times}"), losses(&world.mix, &options, &world.rows()?)?));
        print_last(&tables);
    }
    if options.write {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scheduling.md");
        let mut text = std::fs::read_to_string(&path)?;
        for (name, table) in &tables {
            let (begin, end) = (format!("<!-- worlds: {name} -->\n"), "<!-- end -->");
            let from = text.find(&begin).ok_or(format!("no place for {name}"))? + begin.len();
            let to = from + text[from..].find(end).ok_or(format!("no end of {name}"))?;
            text.replace_range(from..to, &format!("{}\n", table.trim_end()));
        }
        std::fs::write(path, text)?;
    }
    Ok(())
}

fn print_last(tables: &[(String, String)]) {
    if let Some((name, table)) = tables.last() {
        println!("{name}\n\n{table}");
    }
}

const TAKES: &str = "a String takes everything";
