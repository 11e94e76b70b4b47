//! `goodput serve`: runs the gateway from a settings file.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::service::Service;
use super::signals::ShutdownSignals;
use crate::clock::Clock;
use crate::config::watch::SettingsFile;

/// Runs the gateway until SIGTERM or SIGINT.
#[derive(Debug, clap::Args)]
pub struct Serve {
    /// Settings file.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Print the listeners as one JSON line of URLs.
    #[arg(long)]
    json: bool,
}

impl Serve {
    /// Serves; 0 after a drain, 2 for invalid settings, 3 for a failed start.
    #[must_use]
    pub fn run(self) -> ExitCode {
        let logs = super::logs::to_stderr();
        super::descriptors::raise_limit();
        let code = self.serve();
        logs.last_lines();
        code
    }

    fn serve(&self) -> ExitCode {
        let runtime = match runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("goodput serve: no runtime: {error}");
                return ExitCode::from(3);
            }
        };
        // Installed first, because SIGHUP would otherwise end a process that still reads its settings.
        let _hangup = runtime.block_on(async { signal(SignalKind::hangup()) });
        let source = SettingsFile::file(&self.config);
        let settings = match source.read() {
            Ok(settings) => settings,
            Err(why) => {
                let lines = why.lines(source.path());
                lines.iter().for_each(|line| eprintln!("{line}"));
                eprintln!("goodput serve: {} problem(s); nothing was started", lines.len());
                return ExitCode::from(2);
            }
        };
        for note in &settings.notes {
            let _ = writeln!(std::io::stderr(), "{}:{note} (a note)", self.config.display());
        }
        let code = runtime.block_on(async {
            let service = match Service::bind(settings, Some(source), Clock::of_system()).await {
                Ok(service) => service,
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    eprintln!("goodput serve: {error:#}");
                    return ExitCode::from(3);
                }
            };
            let mut signals = ShutdownSignals::listen();
            self.announce(&service);
            service.run(async || signals.next().await).await;
            ExitCode::SUCCESS
        });
        // Tasks blocked by an unread stdout must not delay the exit.
        runtime.shutdown_background();
        code
    }

    fn announce(&self, service: &Service) {
        let admin = service.admin_address();
        if self.json {
            let admin = admin.map(|address| format!("http://{address}"));
            let line = serde_json::json!({"listening": service.url(), "admin": admin});
            // A closed stdout is no reason to exit.
            let _ = writeln!(std::io::stdout(), "{line}");
        }
        for opening in service.openings() {
            let (port, address, tls) = (opening.port, opening.address, opening.is_tls);
            let (open_to, asks_for) = (opening.open_to(), opening.asks_for());
            match opening.is_careless() {
                false => tracing::info!(port, %address, tls, open_to, asks_for, "listening"),
                true => tracing::warn!(
                    port, %address, tls, open_to, asks_for,
                    "the admin port is reachable from other machines without a token; set admin.token_file, or keep admin.address on loopback"
                ),
            }
        }
        let admin = admin.map(tracing::field::display);
        tracing::info!(address = %service.address(), admin, "serving");
    }
}

/// One thread per core; on one core the current thread only, because work stealing needs several.
fn runtime() -> std::io::Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = if cores == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    builder.enable_all().build()
}
