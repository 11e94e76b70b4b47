//! The runtime of commands that make load, and the errors that keep them from starting.

use std::io;
use std::process::ExitCode;

use tokio::runtime::{Builder, Runtime};

/// One thread per core. On a single core it is one thread in total, because the sending loop would otherwise
/// wait for the scheduler to preempt the reading thread: 10 ms when 2,000 streams get a token at once.
///
/// # Errors The runtime cannot start.
pub(super) fn load_runtime() -> io::Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let mut builder = if cores == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    builder.enable_all().build()
}

/// Why a command that makes load did not start.
pub(super) enum NotStarted {
    /// Invalid command line or file: exit code 2.
    Usage(anyhow::Error),
    /// The service or the system failed: exit code 3.
    Start(anyhow::Error),
}

impl NotStarted {
    /// Reports the error of this command on standard error.
    pub(super) fn report(self, command: &str) -> ExitCode {
        let (error, code) = match self {
            NotStarted::Usage(error) => (error, 2),
            NotStarted::Start(error) => (error, 3),
        };
        eprintln!("goodput {command}: {error:#}");
        ExitCode::from(code)
    }
}
