//! The mix of the simulated fleet on real sockets and in real time: two `goodput engine`
//! processes, a `goodput serve` in front of them, clients in this one.
//!
//! `cargo bench --bench sockets` asks 1.2 times what the engines can serve, once with every
//! request sent on at once and once through the queue, and prints what each flow's clients saw.
//! It takes two minutes, and needs cores that have nothing else to do: times are real here.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use goodput::clock::Clock;
use goodput::lab::fleet::Mix;
use goodput::lab::traffic::{Tally, Traffic, to};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const ENGINES: usize = 2;
/// Requests per second that one engine finishes at most: an eighth of the capacity that
/// `docs/scheduling.md` tells.
const CAPACITY: f64 = 35.6 / 8.0;
const LOAD: f64 = 1.2;
const LASTS: Duration = Duration::from_secs(50);

const SENT_ON: &str = "    balance: round_robin\n";
const QUEUED: &str = "    max_concurrency_per_engine: 32\n    queue: {prefill_tokens_per_engine: 1024}\n";

fn main() -> Result<(), Failure> {
    // `cargo test --all-targets` runs benches, too, without this.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    for (name, pool) in [("sent on at once, round robin", SENT_ON), ("through the queue", QUEUED)] {
        let tallies = runtime.block_on(ask(pool))?;
        println!("{name}");
        for tally in &tallies {
            let judged = tally.met + tally.missed + tally.unanswered;
            let attainment = 100.0 * tally.met as f64 / judged.max(1) as f64;
            println!("{:>18} {:>5} of {:>5} met  {attainment:>5.1} %", tally.name, tally.met, judged);
        }
        let met: u64 = tallies.iter().map(|tally| tally.met).sum();
        println!("{:>18} {:.1} per second\n", "all", met as f64 / LASTS.as_secs_f64());
    }
    Ok(())
}

async fn ask(pool: &str) -> Result<Vec<Tally>, Failure> {
    let mix = Mix::published();
    let engines = (0..ENGINES).map(|number| engine(&mix, number)).collect::<Result<Vec<_>, _>>()?;
    let gateway = serve(&mix, &engines, pool)?;
    while tokio::net::TcpStream::connect(gateway.at).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let plan = mix.plan(LOAD * CAPACITY * ENGINES as f64, "sim");
    let traffic = Traffic::start(Clock::start(), to(gateway.at), plan);
    tokio::time::sleep(LASTS).await;
    Ok(traffic.stop(Duration::from_secs(20)).await)
}

/// A process that ends with its value.
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

fn engine(mix: &Mix, number: usize) -> Result<Process, Failure> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.args(["engine", "--listen", "127.0.0.1:0", "--json", "--no-prefix-caching"]);
    command.args(["--seed", &number.to_string(), "--step-tokens", &mix.engine.step_tokens.to_string()]);
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
        writeln!(yaml, "    timeouts: {{first_token: {}s}}", class.patience().as_secs())?;
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
