//! The `goodput` command.

fn main() {}
