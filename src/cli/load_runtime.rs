//! The runtime of commands that make load.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// A thread for each core. On a single core that is one thread in all: the loop that sends would otherwise wait for the
/// system to take the core away from the thread that reads answers, 10 ms where 2,000 streams get a token at once.
///
/// # Errors
/// Whatever the system says.
pub(super) fn load_runtime() -> io::Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let mut builder = if cores == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    builder.enable_all().build()
}
