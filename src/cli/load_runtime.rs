//! The runtime of commands that make load.

use std::io;

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
