//! The second world: policies before engines and traffic that no scheduler was tuned on, in
//! virtual time, as one table.
//!
//! `cargo run --release --example worlds -- --mix office --loads 0.8,1.2 --seeds 1,2,3` prints
//! a row for each load and policy: means over the seeds.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Parser;
use goodput::lab::fleet::{Mix, Policy, Report, Scheduled, Span, capacity, run, run_patiently};
use goodput::route::settings::Concurrency;

#[derive(Parser)]
#[command(about = "The second world: policies in virtual time, as one table")]
struct Options {
    /// `office`, `mono`, `published`, or a file.
    #[arg(long, default_value = "office")]
    mix: String,
    /// Loads, in capacities of the fleet.
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.8,1.0,1.2,1.5")]
    loads: Vec<f64>,
    /// Seeds; every figure is a mean over them.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// `leastconn`, `roundrobin`, `auto`, or a number of seats.
    #[arg(long, value_delimiter = ',', default_value = "leastconn,16,32,48,64,auto")]
    policies: Vec<String>,
    /// Tokens that engines compute in one step.
    #[arg(long)]
    budget: Option<u64>,
    /// How many times slower engines are, one after the other.
    #[arg(long, value_delimiter = ',')]
    speeds: Vec<f64>,
    /// How many engines there are.
    #[arg(long)]
    engines: Option<usize>,
    /// Seconds before arrivals count.
    #[arg(long, default_value_t = 60.0)]
    warm: f64,
    /// Seconds in which arrivals count.
    #[arg(long, default_value_t = 240.0)]
    measure: f64,
    /// Seconds behind in which arrivals go on.
    #[arg(long, default_value_t = 20.0)]
    after: f64,
    /// Clients wait as long as it takes.
    #[arg(long)]
    patient: bool,
    /// Print seats, waiting and running requests over time, of the first seed.
    #[arg(long)]
    seats: bool,
    /// Print why promises were missed, by flow.
    #[arg(long)]
    misses: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mix = mix_of(&options)?;
    let policies: Vec<(String, Policy)> = options
        .policies
        .iter()
        .map(|name| Ok((name.clone(), policy_of(name)?)))
        .collect::<Result<_, Box<dyn Error>>>()?;
    let seconds = Duration::from_secs_f64;
    let span =
        Span { warm_up: seconds(options.warm), measured: seconds(options.measure), after: seconds(options.after) };
    let one = mix.load_of_one.unwrap_or_else(|| capacity(&mix, &Span { after: Duration::ZERO, ..span }));
    let mut trials = Vec::new();
    for load in &options.loads {
        for (name, policy) in &policies {
            trials.extend(options.seeds.iter().map(|seed| (*load, name, policy, *seed)));
        }
    }
    let reports = each(&trials, |(load, _, policy, seed)| {
        let mix = Mix { seed: *seed, ..mix.clone() };
        let run = if options.patient { run_patiently } else { run };
        run(&mix, policy, load * one, &span)
    });
    print!("{}", table(&mix, &options, &policies, &reports));
    let groups = trials.chunks(options.seeds.len()).zip(reports.chunks(options.seeds.len()));
    for ((load, name, ..), reports) in groups.filter_map(|(trials, reports)| Some((trials.first()?, reports))) {
        if options.misses {
            println!("{load:.1} {name}: missed {}", misses(&mix, reports));
        }
        if options.seats {
            println!("{load:.1} {name}: seats/queued/running/waiting {}", over_time(&reports[0]));
        }
    }
    Ok(())
}

fn mix_of(options: &Options) -> Result<Mix, Box<dyn Error>> {
    let mut mix = match options.mix.as_str() {
        "office" => Mix::office(),
        "mono" => Mix::mono(),
        "published" => Mix::published(),
        file => Mix::read(&std::fs::read_to_string(file)?)?,
    };
    mix.engine.step_tokens = options.budget.unwrap_or(mix.engine.step_tokens);
    mix.engines = options.engines.unwrap_or(mix.engines);
    if !options.speeds.is_empty() {
        mix.slowness.clone_from(&options.speeds);
    }
    Ok(mix)
}

fn policy_of(name: &str) -> Result<Policy, Box<dyn Error>> {
    let scheduled = |seats| Policy::Scheduled(Scheduled { seats, ..Scheduled::published() });
    Ok(match name {
        "leastconn" => Policy::LeastConnections,
        "roundrobin" => Policy::RoundRobin,
        "auto" => scheduled(Concurrency::Auto),
        seats => scheduled(Concurrency::Fixed(seats.parse::<NonZeroU32>().map_err(|_| format!("no policy {seats}"))?)),
    })
}

fn table(mix: &Mix, options: &Options, policies: &[(String, Policy)], reports: &[Report]) -> String {
    let flows: Vec<&str> = mix.flows.iter().map(|flow| flow.flow.as_str()).collect();
    let mut table = format!("| load | policy | met/s | x leastconn | {} |", flows.join(" | "));
    table.push_str(" seats | running | TTFT off | hits | preempted | misses |\n");
    let columns = flows.len() + 10;
    writeln!(table, "| ---: | --- |{}", " ---: |".repeat(columns - 2)).expect(TAKES);
    let seeds = options.seeds.len();
    for (load, reports) in options.loads.iter().zip(reports.chunks(seeds * policies.len())) {
        let by_policy: Vec<&[Report]> = reports.chunks(seeds).collect();
        let base = policies.iter().position(|(_, policy)| matches!(policy, Policy::LeastConnections));
        for ((name, _), reports) in policies.iter().zip(&by_policy) {
            let ratio = base.map_or_else(
                || "-".to_owned(),
                |base| {
                    let pairs = reports.iter().zip(by_policy[base]);
                    let ratios: Vec<f64> =
                        pairs.map(|(own, theirs)| own.goodput() / theirs.goodput().max(1e-9)).collect();
                    format!("{:.2}", mean(ratios))
                },
            );
            write!(table, "| {load:.1} | {name} | {:.2} | {ratio} |", mean_of(reports, Report::goodput)).expect(TAKES);
            for flow in &flows {
                let attainment = mean_of(reports, |report| 100.0 * report.flow(flow).attainment());
                write!(table, " {attainment:.1} |").expect(TAKES);
            }
            let off = reports.iter().filter_map(Report::prediction_error).map(|off| 100.0 * off).collect::<Vec<_>>();
            let off = if off.is_empty() { "-".to_owned() } else { format!("{:.0} %", mean(off)) };
            let (seats, running) = standing(reports, options);
            let hits = mean_of(reports, |report| report.engines.hit_rate());
            let preempted = mean_of(reports, |report| report.engines.preemptions as f64);
            writeln!(
                table,
                " {seats} | {running:.0} | {off} | {hits:.3} | {preempted:.0} | {} |",
                counted(reports.iter().map(Report::all).flat_map(|score| score.missed))
            )
            .expect(TAKES);
        }
    }
    table
}

/// The mean number of seats per engine, with its least and most, and of requests in a batch,
/// while arrivals count.
fn standing(reports: &[Report], options: &Options) -> (String, f64) {
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
    let told = if seats.is_empty() { "-".to_owned() } else { format!("{:.0} ({least:.0}-{most:.0})", mean(seats)) };
    (told, mean(running))
}

/// Every five seconds, per engine.
fn over_time(report: &Report) -> String {
    let looks = report.looks.iter().step_by(5).map(|look| {
        let engines = look.engines.len();
        let (running, waiting) = look.engines.iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let seats = look.seats.map_or_else(|| "-".to_owned(), |seats| (seats / engines).to_string());
        format!("{seats}/{}/{}/{}", look.queued, running / engines, waiting / engines)
    });
    looks.collect::<Vec<_>>().join(" ")
}

fn misses(mix: &Mix, reports: &[Report]) -> String {
    let flows = mix.flows.iter().map(|flow| {
        let missed = reports.iter().flat_map(|report| report.flow(&flow.flow).missed);
        format!("{}: {}", flow.flow, counted(missed))
    });
    flows.collect::<Vec<_>>().join("; ")
}

fn counted(missed: impl Iterator<Item = (&'static str, u64)>) -> String {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    missed.for_each(|(reason, count)| *sums.entry(reason).or_default() += count);
    let told: Vec<String> = sums.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    if told.is_empty() { "none".to_owned() } else { told.join(", ") }
}

fn mean_of(reports: &[Report], figure: impl Fn(&Report) -> f64) -> f64 {
    mean(reports.iter().map(figure).collect())
}

fn mean(values: Vec<f64>) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Runs them all, on as many threads as there are cores.
fn each<T: Sync, R: Send>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mine = std::iter::from_fn(|| {
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).map(|item| (at, run(item)))
        });
        mine.collect::<Vec<_>>()
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no run panics")).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

const TAKES: &str = "a String takes everything";
