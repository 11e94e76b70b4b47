//! Shutdown signals of the operating system.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT in order of arrival, from construction on rather than from the first wait.
pub struct ShutdownSignals(Option<(Signal, Signal)>);

impl ShutdownSignals {
    /// Installs the handlers. Must be called inside the runtime.
    #[must_use]
    pub fn listen() -> Self {
        let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
        let (Ok(terminate), Ok(interrupt)) = signals else {
            tracing::error!("cannot handle signals; only SIGKILL ends this process");
            return ShutdownSignals(None);
        };
        ShutdownSignals(Some((terminate, interrupt)))
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) {
        let Some((terminate, interrupt)) = &mut self.0 else { return std::future::pending().await };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}
