//! `goodput demo`: a gateway, simulated engines and traffic in one process.

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::Notify;

use super::class_status::standings;
use super::service::Service;
use super::signals::ShutdownSignals;
use super::{numbers, print};
use crate::clock::Clock;
use crate::config::{self, ProcessEnvironment};
use crate::gateway::Gateway;
use crate::sim::demo::view::{ClassRow, DemoFormat, DemoSnapshot, show};
use crate::sim::demo::{CLASS_HEADER, DemoFleet, KEY, MODEL, RATE, fleet, settings, traffic};
use crate::sim::traffic::{FlowStats, Traffic, to};

/// Runs a gateway with simulated engines and traffic; needs no files and no GPU.
#[derive(Clone, Debug, clap::Args)]
pub struct Demo {
    /// Address of the gateway; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Address of the admin port; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:9090")]
    admin: SocketAddr,
    /// End after this time; without it, at Ctrl-C.
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Mean requests per second, 0.1 to 1000.
    #[arg(long, default_value_t = RATE, value_parser = numbers::within::<100, 1_000_000>)]
    rate: f64,
    /// Seed of arrivals, lengths, texts and jitter.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the counts at the end as one JSON object.
    #[arg(long)]
    json: bool,
}

impl Demo {
    /// Runs the demo until Ctrl-C, or for `--seconds`.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        super::descriptors::raise_limit();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let shown = runtime.context("no runtime").and_then(|runtime| runtime.block_on(self.show()));
        match shown {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("goodput demo: {error:#}");
                eprintln!("if a port is taken, try --listen 127.0.0.1:0 --admin 127.0.0.1:0");
                ExitCode::from(3)
            }
        }
    }

    async fn show(&self) -> anyhow::Result<()> {
        let clock = Clock::start();
        let fleet = fleet(clock, self.seed).await.context("cannot start the simulated engines")?;
        let yaml = settings(&fleet, self.listen, self.admin);
        let settings = config::load(&yaml, &ProcessEnvironment::of(Path::new("demo.yaml")));
        let settings = settings.map_err(|problems| {
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            anyhow::anyhow!("the demo's own settings have problems: {}", lines.join("; "))
        })?;
        let service = Service::bind(settings, None, clock).await?;
        let (address, admin) = (service.address(), service.admin_address().context("the demo has an admin port")?);
        let gateway = service.gateway();
        if !self.json {
            print::line(&invitation(address, admin))?;
        }
        let over = Arc::new(Notify::new());
        let leave = Arc::clone(&over);
        let running = tokio::spawn(service.run(async move || leave.notified().await));

        let traffic = Traffic::start(clock, to(address), traffic(self.seed, self.rate));
        let how = match (self.json, io::stdout().is_terminal()) {
            (true, _) => DemoFormat::Json,
            (false, true) => DemoFormat::Table,
            (false, false) => DemoFormat::Lines,
        };
        let mut look = || snapshot(&traffic.flow_stats(), &gateway, &fleet);
        let shown = show(clock, &mut look, &mut io::stdout(), how, self.until_over(clock)).await;
        print::or_enough(shown.map(drop))?;
        drop(traffic);
        drop(gateway);
        over.notify_one();
        running.await.context("the gateway's task ended abnormally")?;
        Ok(())
    }

    async fn until_over(&self, clock: Clock) {
        let mut signals = ShutdownSignals::listen();
        let end = self.seconds.map(|seconds| clock.now() + Duration::from_secs(seconds));
        tokio::select! {
            () = clock.sleep_until(end) => {}
            () = signals.next() => {}
        }
    }
}

/// Combines the gateway's verdicts with the observations of its clients.
fn snapshot(flow_stats: &[FlowStats], gateway: &Gateway, fleet: &DemoFleet) -> DemoSnapshot {
    let standings = standings(gateway);
    let row = |stats: &FlowStats| {
        let standing = standings.iter().find(|standing| standing.class == stats.name);
        let mut row = ClassRow::of(stats, standing.map_or(0.0, |standing| standing.target));
        if let Some(standing) = standing {
            (row.met, row.judged, row.waiting) = (standing.met, standing.total, standing.waiting);
        }
        row
    };
    DemoSnapshot { rows: flow_stats.iter().map(row).collect(), engines: fleet.rows() }
}

fn invitation(address: SocketAddr, admin: SocketAddr) -> String {
    format!(
        "A gateway on http://{address}, before four simulated engines.
Ctrl-C ends it. While traffic runs, try in another terminal:

  curl -N http://{address}/v1/chat/completions \\
    -H 'authorization: Bearer {KEY}' -H 'content-type: application/json' \\
    -d '{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":40,
         \"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'
  curl -si http://{address}/v1/completions \\
    -H 'authorization: Bearer {KEY}' -H 'content-type: application/json' \\
    -H '{CLASS_HEADER}: voice' \\
    -d '{{\"model\":\"{MODEL}\",\"prompt\":\"Hello\",\"max_tokens\":8}}'
  curl -s http://{address}/v1/models -H 'authorization: Bearer {KEY}'

What it counts (http://{admin}/ is a page for browsers):

  curl -s http://{admin}/metrics | grep '^slo_'
  curl -s http://{admin}/slo
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;

    #[test]
    fn a_rate_beyond_one_machine_is_rejected() {
        let rate = |rate: &str| parse::<Demo>(["demo", &format!("--rate={rate}")]);
        for good in ["0.1", "22", "1000"] {
            assert!(rate(good).is_ok(), "{good}");
        }
        for bad in ["0", "-1", "nan", "inf", "1001", "1e6", "1e9", "many"] {
            let told = rate(bad).unwrap_err().to_string();
            assert!(told.contains("from 0.1 to 1000") && told.contains("--rate"), "{told}");
        }
    }
}
