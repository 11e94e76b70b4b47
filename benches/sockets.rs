//! The mix of the simulated fleet on real sockets and in real time: two `goodput engine`
//! processes, a `goodput serve` in front of them, clients in this one.
//!
//! `cargo bench --bench sockets` offers 1.2 times the capacity of the engines, once with every
//! request dispatched at once and once through the queue, and prints the clients' results as a
//! table for `docs/scheduling.md`. It takes three minutes and needs idle cores, because its times
//! are real. The lateness of timers during the run is printed below the table.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use goodput::clock::Clock;
use goodput::sim::fleet::{Mix, RunSpan, capacity};
use goodput::sim::traffic::{FlowStats, Traffic, to};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const ENGINES: usize = 2;
const LOAD: f64 = 1.2;
const LASTS: Duration = Duration::from_secs(60);
/// Time for open responses after the last request was sent. Longer ones are not met.
const ENDS: Duration = Duration::from_secs(30);
/// Time limit for a process to listen.
const STARTS: Duration = Duration::from_secs(20);

const POOLS: [(&str, &str); 2] =
    [("round robin", "    balance: round_robin\n"), ("goodput", "    max_concurrency_per_engine: 32\n")];

fn main() -> Result<(), Failure> {
    // `cargo test --all-targets` runs benches, too, without this.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let mix = Mix { engines: ENGINES, ..Mix::published() };
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let rate = LOAD * capacity(&mix, &RunSpan { warm_up: minutes(1), measured: minutes(10), after: minutes(1) });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let flows: Vec<&str> = mix.flows.iter().map(|flow| flow.flow.as_str()).collect();
    println!("| policy | met/s | {} |\n| --- | ---: |{}", flows.join(" | "), " ---: |".repeat(flows.len()));
    let mut late = Vec::new();
    for (name, pool) in POOLS {
        let (flow_stats, lateness) = runtime.block_on(ask(&mix, rate, pool))?;
        let met = flow_stats.iter().map(|stats| stats.met).sum::<u64>() as f64 / LASTS.as_secs_f64();
        let cells: String = flow_stats.iter().map(|stats| format!(" {:.1} % |", 100.0 * attainment(stats))).collect();
        println!("| {name} | {met:.1} |{cells}");
        late.push(format!("{:.1} ms", lateness.as_secs_f64() * 1000.0));
    }
    println!(
        "\n{rate:.1} requests/s for {} s each; 99 of 100 timers late by at most {}",
        LASTS.as_secs(),
        late.join(", ")
    );
    Ok(())
}

fn attainment(stats: &FlowStats) -> f64 {
    stats.met as f64 / (stats.met + stats.missed + stats.unanswered + stats.in_flight).max(1) as f64
}

/// Results of the clients, and lateness of the timers of this process.
async fn ask(mix: &Mix, rate: f64, pool: &str) -> Result<(Vec<FlowStats>, Duration), Failure> {
    let engines = (0..ENGINES).map(|number| engine(mix, number)).collect::<Result<Vec<_>, _>>()?;
    let mut gateway = serve(mix, &engines, pool)?;
    gateway.listens().await?;
    let clock = Clock::start();
    let traffic = Traffic::start(clock, to(gateway.at), mix.plan(rate, "sim"));
    let (end, step) = (clock.now() + LASTS, Duration::from_millis(10));
    let mut late = Vec::new();
    while clock.now() < end {
        let due = clock.now() + step;
        clock.sleep_until(Some(due)).await;
        late.push(clock.now().since(due));
    }
    late.sort_unstable();
    Ok((traffic.stop(ENDS).await, late[late.len() * 99 / 100]))
}

/// A process that is killed when dropped.
struct Process {
    child: Child,
    at: SocketAddr,
    settings: Option<std::path::PathBuf>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(path) = &self.settings {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Process {
    /// Waits until it accepts connections; fails if it exits.
    async fn listens(&mut self) -> Result<(), Failure> {
        let clock = Clock::start();
        let until = clock.now() + STARTS;
        while tokio::net::TcpStream::connect(self.at).await.is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("the gateway ended: {status}").into());
            }
            if clock.now() > until {
                return Err("the gateway does not listen".into());
            }
            clock.sleep_until(Some(clock.now() + Duration::from_millis(50))).await;
        }
        Ok(())
    }
}

fn engine(mix: &Mix, number: usize) -> Result<Process, Failure> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.args(["engine", "--listen", "127.0.0.1:0", "--json", "--no-prefix-caching"]);
    let shape = [
        ("--seed", number as u64),
        ("--step-tokens", mix.engine.step_tokens),
        ("--max-running", mix.engine.max_running as u64),
        ("--kv-tokens", mix.engine.kv_tokens),
        ("--max-model-len", mix.engine.max_model_len),
    ];
    command.args(shape.iter().flat_map(|(option, value)| [(*option).to_owned(), value.to_string()]));
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut said = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut said)?;
    let at = said.split(['"', '/', ' ']).find_map(|word| word.parse().ok()).ok_or("no address was said")?;
    Ok(Process { child, at, settings: None })
}

fn serve(mix: &Mix, engines: &[Process], pool: &str) -> Result<Process, Failure> {
    let at = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let path = std::env::temp_dir().join(format!("goodput-sockets-{}.yaml", at.port()));
    std::fs::write(&path, settings(mix, at, engines, pool)?)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.args(["serve", "-c"]).arg(&path).stdout(Stdio::null()).env("RUST_LOG", "error");
    Ok(Process { child: command.spawn()?, at, settings: Some(path) })
}

fn settings(mix: &Mix, at: SocketAddr, engines: &[Process], pool: &str) -> Result<String, Failure> {
    let mut yaml = format!("listen: {{address: \"{at}\"}}\nadmin: off\nslo_classes:\n");
    for class in &mix.classes {
        let objectives = class.objectives();
        write!(yaml, "  - slo_class: {}\n    priority: {}\n", class.class, class.priority().as_str())?;
        writeln!(yaml, "    joint_attainment_target: {}\n    window: 1h\n    objectives:", class.target)?;
        let named = [("ttft", objectives.ttft), ("tpot", objectives.tpot), ("e2e", objectives.e2e)];
        for (name, objective) in named.iter().filter_map(|(name, objective)| Some((name, (*objective)?))) {
            let seconds = objective.threshold.as_secs_f64();
            writeln!(yaml, "      {name}_seconds: {{threshold: {seconds:?}, attainment: {}}}", class.target)?;
        }
        writeln!(yaml, "    timeouts: {{first_token: {}s}}", class.patience(true).as_secs())?;
    }
    writeln!(yaml, "default_class: chat_interactive\nclassify:")?;
    for class in &mix.classes {
        writeln!(yaml, "  - {{class: {0}, when: {{header: {{x-slo-class: {0}}}}}}}", class.class)?;
    }
    writeln!(yaml, "tenants:")?;
    let mut tenants: Vec<&String> = mix.flows.iter().filter_map(|flow| flow.tenants.keys().next()).collect();
    tenants.sort();
    tenants.dedup();
    for tenant in tenants {
        let hash = blake3::hash(format!("sk-{tenant}").as_bytes());
        writeln!(yaml, "  - {{tenant: {tenant}, keys: [{{label: a, blake3: \"{}\"}}]}}", hash.to_hex())?;
    }
    let urls: Vec<String> = engines.iter().map(|engine| format!("{{url: \"http://{}\"}}", engine.at)).collect();
    writeln!(yaml, "pools:\n  - pool: main\n    engines: [{}]\n    engine: {{kind: vllm}}", urls.join(", "))?;
    writeln!(yaml, "{pool}routes:\n  - {{model: [sim], pools: [main]}}")?;
    Ok(yaml)
}
