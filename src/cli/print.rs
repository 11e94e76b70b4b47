//! Output of a command on stdout.

use std::io::{self, Write};
use std::process::ExitCode;

/// Writes `text` and a newline. A closed pipe (`| head`) is not an error.
///
/// # Errors Any other failure of the write, such as a full disk.
pub(super) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    or_enough(out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush()))
}

/// Writes the last output of a command. Returns `code`, or failure if the write failed.
pub(super) fn last(text: &str, code: ExitCode) -> ExitCode {
    match line(text) {
        Ok(()) => code,
        Err(error) => {
            eprintln!("goodput: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ignores a closed pipe.
pub(super) fn or_enough(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}
