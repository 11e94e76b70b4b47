//! The `goodput` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    goodput::cli::run()
}
