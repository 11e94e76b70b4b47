//! The `goodput` command.

use std::process::ExitCode;

// The system's allocator takes 5,500 instructions more for a small request, and 4 kB more for
// an idle stream; but this one is C that takes a while to build.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    goodput::cli::run()
}
