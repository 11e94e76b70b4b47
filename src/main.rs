//! The `goodput` command.

use std::process::ExitCode;

use mimalloc as _;

fn main() -> ExitCode {
    goodput::cli::run()
}
