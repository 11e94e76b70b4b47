//! The open loop: requests go out when they are due, whatever became of the ones before.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connections::LoadConnections;
use super::exchange::{ClassHeads, LoadExchange, LoadShared};
use super::plan::{LoadClass, LoadTarget, PlannedRequest};
use super::run_events::{Halt, LoadEvent};
use crate::clock::Clock;
use crate::inspect::Ratios;
use crate::observe::TemplateCache;
use crate::types::Tick;

/// Events that wait for the run's loop. A request whose record does not fit waits with it: it has
/// been measured by then.
const EVENTS: usize = 4096;

/// Stops a run from outside, or from its own events. Clones stop the same run.
#[derive(Clone, Debug)]
pub struct RunControl(Arc<watch::Sender<Halt>>);

impl Default for RunControl {
    fn default() -> Self {
        RunControl(Arc::new(watch::Sender::new(Halt::Run)))
    }
}

impl RunControl {
    /// A run that was not stopped.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends nothing more; open requests run to their end.
    pub fn stop_sending(&self) {
        self.raise(Halt::StopSending);
    }

    /// Sends nothing more and leaves open requests: the client disconnects.
    pub fn abort(&self) {
        self.raise(Halt::Abort);
    }

    /// Whether [`abort`](Self::abort) was called.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        *self.0.borrow() == Halt::Abort
    }

    /// Waits until [`abort`](Self::abort) is called.
    pub async fn aborted(&self) {
        // The sender is part of this value, so the wait does not end without an abort.
        let _ = self.0.subscribe().wait_for(|halt| *halt == Halt::Abort).await;
    }

    fn raise(&self, to: Halt) {
        self.0.send_if_modified(|halt| {
            let is_news = *halt < to;
            *halt = to.max(*halt);
            is_news
        });
    }
}

/// Bounds of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLimits {
    /// Longest drain after the last request was sent; open requests are then judged like requests whose
    /// time limit fired. `None`: the classes' own limits end them.
    pub drain: Option<Duration>,
    /// Most concurrent requests. Beyond it nothing is sent, and the run is not open-loop any more:
    /// [`RunEnd::unsent`] counts.
    pub max_in_flight: usize,
}

impl Default for RunLimits {
    /// The classes' limits, 32,768 requests at one time.
    fn default() -> Self {
        RunLimits { drain: None, max_in_flight: 32_768 }
    }
}

/// How a run went, beside its records.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunEnd {
    /// Requests sent.
    pub sent: u64,
    /// Requests that were due and not sent, because `max_in_flight` were open.
    pub unsent: u64,
    /// Moment of the last scheduled request that was sent, from the start.
    pub sending: Duration,
    /// Length of the run, drain included.
    pub length: Duration,
    /// The run was aborted: its records are not the whole.
    pub aborted: bool,
}

/// Sends what is planned, each request at its time, and reports every request as it ends. The plan is
/// drawn one request ahead, and ends the sending where it ends; its times do not decrease.
///
/// Returns when every request has ended. Every request that was sent has exactly one
/// [`LoadEvent::Ended`].
///
/// # Panics
/// If a planned request names a class that is not there.
pub async fn run(
    clock: Clock,
    target: &LoadTarget,
    classes: &[LoadClass],
    plan: impl IntoIterator<Item = PlannedRequest>,
    limits: RunLimits,
    control: &RunControl,
    mut on_event: impl FnMut(LoadEvent),
) -> RunEnd {
    let (sender, mut events) = mpsc::channel(EVENTS);
    let mut halt = control.0.subscribe();
    let shared = Arc::new(LoadShared {
        clock,
        connections: Arc::new(LoadConnections::new(clock, target.clone())),
        classes: classes.iter().map(|class| ClassHeads::new(class, target)).collect(),
        halt: halt.clone(),
        events: sender,
        origin: clock.now(),
        engine: target.address.id(),
        ratios: Ratios::new(),
        templates: Arc::new(TemplateCache::new()),
    });
    let mut open = JoinSet::new();
    let mut end = RunEnd::default();
    let mut plan = plan.into_iter();
    let mut next = plan.next();
    let mut drain_until: Option<Tick> = None;
    loop {
        let is_sending = *halt.borrow_and_update() == Halt::Run;
        let due = next.as_ref().filter(|_| is_sending).map(|planned| shared.origin + planned.at);
        if due.is_none() {
            if open.is_empty() && events.is_empty() {
                break;
            }
            drain_until = drain_until.or_else(|| limits.drain.map(|drain| clock.now() + drain));
        }
        let wakes = due.or(drain_until.filter(|_| *control.0.borrow() < Halt::TimeOut));
        tokio::select! {
            biased;
            () = clock.sleep_until(wakes), if wakes.is_some() => {
                let Some(planned) = next.take_if(|_| due.is_some()) else {
                    control.raise(Halt::TimeOut);
                    continue;
                };
                next = plan.next();
                if open.len() >= limits.max_in_flight {
                    end.unsent += 1;
                    continue;
                }
                let number = end.sent;
                end.sent += 1;
                end.sending = planned.at;
                on_event(LoadEvent::Sent { number, class: planned.class, at: planned.at });
                open.spawn(LoadExchange::new(&shared, planned, number).run());
            }
            Some(event) = events.recv() => on_event(event),
            Some(_) = open.join_next() => {}
            Ok(()) = halt.changed() => {}
        }
    }
    RunEnd { length: clock.now().since(shared.origin), aborted: control.is_aborted(), ..end }
}
