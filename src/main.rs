//! The `goodput` command.

use std::process::ExitCode;

// Its `malloc` stands in for the system's, which is what Rust allocates with.
#[cfg(target_os = "linux")]
use mimalloc as _;

fn main() -> ExitCode {
    goodput::cli::run()
}
