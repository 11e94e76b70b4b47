//! Drives a connection, phase by phase, within its time limits and to its end in a drain.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::unconstrained;
use tokio::time::Sleep;

use super::conn_state::{ConnDeadline, ConnState};
use super::connection_limits::Connections;
use super::drain::{DrainPhase, DrainWatch};
use super::settings::Listen;
use crate::types::{DisconnectReason, Tick};

/// A phase of a connection: polled until it ends or is asked to finish.
pub(super) trait ConnDriver {
    /// Result of the phase.
    type End;
    /// Makes progress.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Self::End>;
    /// Closes the connection once everything begun is done.
    fn finish(&mut self);
}

/// Drives a phase together with the deadlines. `None`: the connection is cut.
pub(super) async fn drive<T: ConnDriver>(
    phase: &mut T,
    deadlines: &mut DeadlineWatch,
    mut alarm: Pin<&mut Sleep>,
) -> Option<T::End> {
    std::future::poll_fn(|cx| {
        deadlines.peer.driven_by(cx.waker());
        let mut command = deadlines.drain_command(cx);
        loop {
            match command {
                ConnCommand::GoOn => {}
                ConnCommand::Finish => phase.finish(),
                ConnCommand::Cut => return Poll::Ready(None),
            }
            if let Poll::Ready(end) = phase.poll(cx) {
                return Poll::Ready(Some(end));
            }
            command = deadlines.deadline_command(alarm.as_mut(), cx);
            if command == ConnCommand::GoOn {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnCommand {
    GoOn,
    /// Close it after its open requests.
    Finish,
    /// Close it at once.
    Cut,
}

/// Watches a connection's time limits and the drain.
pub(super) struct DeadlineWatch {
    peer: Arc<ConnState>,
    connections: Arc<Connections>,
    header_timeout: Duration,
    idle_timeout: Duration,
    drain_watch: DrainWatch,
    /// When the timer is set to fire. It may fire early (the limit moved meanwhile), never late, so that
    /// keep-alive traffic does not reset it each time.
    armed: Option<Tick>,
    /// Deadline of an idle connection that was asked to finish.
    finish_by: Option<Tick>,
}

impl DeadlineWatch {
    /// Time for an idle connection to finish.
    const FINISH_TIMEOUT: Duration = Duration::from_secs(3);
    /// The same if a new connection waits for its slot.
    const SHORT_FINISH_TIMEOUT: Duration = Duration::from_millis(250);

    pub(super) fn new(
        peer: Arc<ConnState>,
        limits: &Listen,
        connections: Arc<Connections>,
        drain_watch: DrainWatch,
    ) -> Self {
        let (header_timeout, idle_timeout) = (limits.header_timeout, limits.idle_timeout);
        DeadlineWatch { peer, connections, header_timeout, idle_timeout, drain_watch, armed: None, finish_by: None }
    }

    pub(super) fn alarm(&self) -> Sleep {
        tokio::time::sleep_until(self.peer.clock.instant(self.peer.accepted_at() + self.header_timeout))
    }

    /// Effect of the drain phase on this connection.
    fn drain_command(&mut self, cx: &mut Context<'_>) -> ConnCommand {
        let mut command = ConnCommand::GoOn;
        while let Some(phase) = self.drain_watch.poll_phase(cx) {
            if phase >= DrainPhase::Over {
                self.peer.side.end_drain();
            }
            if phase >= DrainPhase::Cut {
                self.peer.side.sever(DisconnectReason::Drain);
                return ConnCommand::Cut;
            }
            if phase >= DrainPhase::Draining {
                command = ConnCommand::Finish;
            }
        }
        command
    }

    /// Checks the time limits.
    fn deadline_command(&mut self, mut alarm: Pin<&mut Sleep>, cx: &mut Context<'_>) -> ConnCommand {
        loop {
            let due = self.peer.due(self.header_timeout, self.idle_timeout);
            match due {
                ConnDeadline::Idle(_) if self.finish_by.is_none() && self.connections.wants_to_end(&self.peer) => {
                    self.finish_by = Some(self.peer.clock.now() + Self::SHORT_FINISH_TIMEOUT);
                    return ConnCommand::Finish;
                }
                ConnDeadline::Idle(_) => {}
                ConnDeadline::Never | ConnDeadline::Head(_) => self.connections.cannot_end(&self.peer),
            }
            let deadline = match (due, self.finish_by) {
                // The timer is not touched during a response, which must not pay for it.
                (ConnDeadline::Never, _) => return ConnCommand::GoOn,
                (_, Some(by)) => by,
                (ConnDeadline::Head(at) | ConnDeadline::Idle(at), None) => at,
            };
            let mut has_fired = alarm.is_elapsed();
            if self.armed.is_none_or(|armed| armed > deadline) {
                alarm.as_mut().reset(self.peer.clock.instant(deadline));
                self.armed = Some(deadline);
                // Registers the waker: a connection is driven by one task. Unconstrained, because a task that has used
                // up its cooperative budget would get `Pending` from a timer that
                // fired.
                has_fired = Pin::new(&mut unconstrained(alarm.as_mut())).poll(cx).is_ready();
            }
            if !has_fired {
                return ConnCommand::GoOn;
            }
            self.armed = None;
            let now = self.peer.clock.now();
            match due {
                _ if deadline > now => {}
                ConnDeadline::Idle(_) if self.finish_by.is_none() => {
                    self.finish_by = Some(now + Self::FINISH_TIMEOUT);
                    return ConnCommand::Finish;
                }
                _ => return ConnCommand::Cut,
            }
        }
    }
}
