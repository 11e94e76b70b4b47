//! Logs of a serving process: to stderr, never blocking.
//!
//! A log call hands its line to one thread, which owns stderr. If nothing reads stderr, or it is closed,
//! lines are dropped and counted, because no request, probe or reload may wait for a log reader or end with
//! it.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Most lines waiting for stderr.
const WAITING: usize = 4096;

/// Log filter without `RUST_LOG`. h2 warns about what any client can cause (repeated resets), so its warnings
/// would let an attacker write the log.
const UNASKED: &str = "info,h2=error";

/// Longest wait for unwritten lines at exit.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Sender of log lines. Cheap to clone.
#[derive(Clone)]
pub struct Logs {
    pieces: SyncSender<LogPiece>,
    lost: Arc<AtomicU64>,
}

enum LogPiece {
    Line(Vec<u8>),
    /// Acknowledged once everything before it was written.
    Mark(SyncSender<()>),
}

/// Sends logs to stderr, filtered by `RUST_LOG` or [`UNASKED`].
pub(super) fn to_stderr() -> Logs {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(UNASKED));
    let logs = Logs::to(io::stderr());
    let colours = io::stderr().is_terminal();
    let subscriber = tracing_subscriber::fmt().with_ansi(colours).with_writer(logs.clone()).with_env_filter(filter);
    // On a second call a subscriber is already installed.
    let _ = subscriber.try_init();
    logs
}

impl Logs {
    fn to(output: impl Write + Send + 'static) -> Self {
        let (pieces, waiting) = sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let logs = Logs { pieces, lost: Arc::clone(&lost) };
        // Without the thread every line is lost, which is better than no gateway.
        let _ = std::thread::Builder::new().name("logs".to_owned()).spawn(move || write(&waiting, &lost, output));
        logs
    }

    /// Waits briefly until all lines were written.
    pub(super) fn last_lines(&self) {
        let (mark, written) = sync_channel(1);
        if self.pieces.try_send(LogPiece::Mark(mark)).is_ok() {
            let _ = written.recv_timeout(LAST_LINES);
        }
    }
}

fn write(waiting: &Receiver<LogPiece>, lost: &AtomicU64, mut output: impl Write) {
    while let Ok(piece) = waiting.recv() {
        match piece {
            LogPiece::Line(line) => {
                // A failed write cannot be reported anywhere.
                let _ = output.write_all(&line);
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    let _ = writeln!(output, "{lost} log lines were lost: nobody read them in time");
                }
            }
            LogPiece::Mark(mark) => {
                let _ = output.flush();
                let _ = mark.try_send(());
            }
        }
    }
}

/// The subscriber writes each line with one call.
impl Write for &Logs {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(TrySendError::Full(_)) = self.pieces.try_send(LogPiece::Line(line.to_vec())) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Logs {
    type Writer = &'a Logs;

    fn make_writer(&'a self) -> &'a Logs {
        self
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::{Condvar, Mutex};

    use super::*;

    /// An output that blocks until it is opened.
    #[derive(Clone, Default)]
    struct Gate(Arc<Door>);

    #[derive(Default)]
    struct Door {
        state: Mutex<(bool, Vec<u8>)>,
        opened: Condvar,
    }

    impl Gate {
        fn open(&self) {
            self.0.state.lock().0 = true;
            self.0.opened.notify_all();
        }
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.0.state.lock();
            while !state.0 {
                self.0.opened.wait(&mut state);
            }
            state.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn unread_logs_block_nothing_and_are_counted() {
        let gate = Gate::default();
        let logs = Logs::to(gate.clone());
        for _ in 0..2 * WAITING {
            (&logs).write_all(b"line\n").unwrap();
        }
        let lost = logs.lost.load(Ordering::Relaxed);
        assert!(lost >= WAITING as u64 - 1, "{lost}");
        gate.open();
        // The mark fits as soon as the thread has taken a line.
        while logs.lost.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut written = 0;
        while written < 2 * WAITING as u64 - lost {
            logs.last_lines();
            written = memchr::memmem::find_iter(&gate.0.state.lock().1, b"line\n").count() as u64;
        }
        let text = String::from_utf8(gate.0.state.lock().1.clone()).unwrap();
        assert!(text.contains(&format!("{lost} log lines were lost")), "{}", &text[text.len() - 200..]);
    }

    #[test]
    fn a_closed_stderr_does_not_end_the_process() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let logs = Logs::to(Closed);
        for _ in 0..10 {
            (&logs).write_all(b"line\n").unwrap();
        }
        logs.last_lines();
    }
}
