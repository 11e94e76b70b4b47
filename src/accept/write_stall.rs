//! Write-stall timer: measures one stretch in which a client accepts no bytes.
//!
//! Used by the socket (HTTP/1) and by each stream (HTTP/2). A stretch counts only if a *retry* failed
//! too: a retry that comes late because this process was slow, and then succeeds, is the gateway's delay
//! and not the client's. Two retries are made, because the news that a client has room again (an HTTP/2
//! window update) may still be queued in another task.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

use crate::clock::Clock;
use crate::types::{ClientState, DisconnectReason, Tick};

/// The current stretch, if any. Costs one branch if there is none.
pub(super) struct Stall {
    since: Option<Tick>,
    asked_again: bool,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Stall {
    pub(super) fn none() -> Self {
        Stall { since: None, asked_again: false, alarm: None }
    }

    pub(super) fn is_running(&self) -> bool {
        self.since.is_some()
    }

    /// The client accepted bytes.
    pub(super) fn end(&mut self, side: &ClientState, clock: &Clock) {
        if self.since.take().is_some() {
            self.asked_again = false;
            side.accepts(clock.now());
        }
    }

    /// A write was not accepted. Ready when a limit ends the wait; until then the task is woken to retry after
    /// [`ClientState::PATIENCE`] and at the limit.
    pub(super) fn refused(
        &mut self,
        side: &ClientState,
        clock: &Clock,
        write_stall: Duration,
        cx: &mut Context<'_>,
    ) -> Poll<DisconnectReason> {
        loop {
            let now = clock.now();
            let since = *self.since.get_or_insert(now);
            let lasting = since + ClientState::PATIENCE;
            if now >= lasting {
                if !self.asked_again {
                    self.asked_again = true;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                side.refuses(since);
            }
            let (limit, why) = match side.total_deadline() {
                Some(total) if total < since + write_stall => (total, DisconnectReason::Total),
                _ => (since + write_stall, DisconnectReason::WriteStall),
            };
            if now >= limit {
                side.sever(why);
                return Poll::Ready(why);
            }
            let next = if now < lasting { lasting.min(limit) } else { limit };
            let until = clock.instant(next);
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            if alarm.deadline() != until {
                alarm.as_mut().reset(until);
            }
            if alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}
