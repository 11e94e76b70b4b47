//! What a command has to say, on its standard output.

use std::io::{self, Write};
use std::process::ExitCode;

/// Writes `text` and a line's end. Who closes the pipe has read enough (`| head`), and that is no
/// failure.
///
/// # Errors
/// Whatever else the system says, a full disk for one.
pub(super) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    or_enough(out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush()))
}

/// The same as a command's end: with the code that it earned, or the one for what cannot be written.
pub(super) fn last(text: &str, code: ExitCode) -> ExitCode {
    match line(text) {
        Ok(()) => code,
        Err(error) => {
            eprintln!("goodput: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A closed pipe is no error.
pub(super) fn or_enough(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}
