//! What the operating system asks of a process that runs until it is told to end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, one after the other as they come. They are heard from here on, not from
/// the first wait on.
pub struct ShutdownSignals(Option<(Signal, Signal)>);

impl ShutdownSignals {
    /// Hears them. To be called inside the runtime.
    #[must_use]
    pub fn listen() -> Self {
        let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
        let (Ok(terminate), Ok(interrupt)) = signals else {
            tracing::error!("cannot receive signals; only SIGKILL ends this process");
            return ShutdownSignals(None);
        };
        ShutdownSignals(Some((terminate, interrupt)))
    }

    /// The next one.
    pub async fn next(&mut self) {
        let Some((terminate, interrupt)) = &mut self.0 else { return std::future::pending().await };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}
