//! Parsing of one command's arguments, for tests.

use std::ffi::OsString;

use clap::{Args, CommandFactory, Parser};

#[derive(Parser)]
struct CommandLine<A: Args> {
    #[command(flatten)]
    args: A,
}

/// Parses a command line, whose first word is the command's name.
///
/// # Errors
/// The arguments are invalid.
pub(super) fn parse<A: Args>(words: impl IntoIterator<Item: Into<OsString> + Clone>) -> Result<A, clap::Error> {
    CommandLine::try_parse_from(words).map(|line| line.args)
}

/// The long help of a command.
pub(super) fn long_help<A: Args>() -> String {
    CommandLine::<A>::command().render_long_help().to_string()
}
