//! Step 1 of a request's end: what its response says about the engine.
//!
//! Reports success or fault to the breaker, times of a complete response to the latency model, and usage
//! to the token ratios. [`fault_of`], pure, decides which endings are the engine's fault.

use std::time::Duration;

use super::completion::Completion;
use super::relay_context::RequestSummary;
use crate::observe::{Ending, ResponseFormat, Timeline, TimeoutKind};
use crate::reject::Rejection;
use crate::route::retry::{AttemptOutcome, Injection};
use crate::route::{LatencySample, WorkGuard};
use crate::types::Tick;

impl Completion {
    /// Checks whether a failure means that the pool lacks the model, which is the client's fault.
    pub(super) fn check_model(&mut self, timeline: &Timeline, rejection: Option<&Rejection>) {
        if rejection.is_none() && timeline.error.is_none() && timeline.is_success() {
            return;
        }
        let RequestSummary { endpoint, model, is_named, .. } = &self.context.request;
        let has_served = |model| self.context.gateway.fleet.has_served(&self.place.pool, *endpoint, model);
        let is_unknown = !is_named && !has_served(model.as_deref().unwrap_or_default());
        if let Some(case) = self.active.case_mut() {
            case.model_unknown_to_pool = is_unknown;
        }
    }

    /// Releases the engine's share of work, and reports success or a fault to its breaker.
    pub(super) fn report_to_engine(&mut self, timeline: &Timeline, refusal: Option<&Rejection>) {
        let is_alive = self.work.as_ref().is_some_and(|work| was_alive(timeline, work.signals().last_alive()));
        let fault = fault_of(timeline, refusal, is_alive);
        if let Some(work) = self.work.take() {
            if fault.is_none() && timeline.ending == Ending::Clean && timeline.is_success() {
                work.note_served(
                    self.context.request.endpoint,
                    self.context.request.model.as_deref().unwrap_or_default(),
                );
            }
            give_back(work, timeline);
        }
        if self.has_failed {
            return;
        }
        let (fleet, pool) = (&self.context.gateway.fleet, &self.place.pool);
        if refusal == Some(&Rejection::EngineCoded) {
            fleet.mark_compressed(pool, &self.place.engine);
        }
        if let Some(happened) = fault {
            let _ = fleet.failed(pool, &mut self.attempts, happened, timeline.end);
        }
        fleet.settle(pool, &mut self.attempts, timeline.end);
    }

    /// Learns bytes per token and tokens per event from reported usage.
    pub(super) fn learn_ratios(&self, timeline: &Timeline) {
        let (input, events) = (timeline.usage.input, timeline.plain_events());
        if input.is_none() && events.is_none() {
            return;
        }
        let RequestSummary { learned, model, is_named, prompt, tenant, .. } = &self.context.request;
        let Some(learned) = self.context.gateway.ratios.of_answer(learned, model.as_deref(), *is_named) else { return };
        if let Some(input) = input {
            learned.prompt(tenant.as_str(), *prompt, input);
        }
        if let Some((events, output)) = events {
            learned.events(&self.place.engine, events, output);
        }
    }
}

/// Releases the work. A complete response at the engine's own pace is a latency sample; one slowed down by
/// its client is not.
fn give_back(work: Box<WorkGuard>, timeline: &Timeline) {
    let is_whole = timeline.finish.is_some() && timeline.error.is_none() && timeline.is_success();
    if !is_whole || timeline.limited.is_some() {
        return;
    }
    let streamed = timeline.reader == ResponseFormat::Events;
    let dispatched = work.dispatched();
    let after = |moment: Option<Tick>| moment.map(|moment| moment.since(dispatched));
    let sample = LatencySample {
        ttft: after(timeline.first_token).filter(|_| streamed),
        tpot: timeline.tpot(),
        e2e: after(timeline.finish),
        further: timeline.output.0.saturating_sub(1),
        cached: timeline.usage.cached,
    };
    work.learned(&sample, timeline.end);
}

/// Whether tokens were flowing when a response ended: its own, or later ones of another response of the
/// engine. The class's total limit is then not the engine's fault.
fn was_alive(timeline: &Timeline, last_alive: Option<Tick>) -> bool {
    timeline.last_token.is_some_and(|last| {
        let pause = timeline.gaps.largest.unwrap_or_default().max(FLOWS);
        timeline.end.since(last) <= pause || last_alive.is_some_and(|alive| alive > last + FLOWS)
    })
}

/// Largest gap of flowing tokens; a larger one counts if the whole response was as slow.
const FLOWS: Duration = Duration::from_secs(1);

/// The engine's fault in a response's end, if any. `is_alive`: tokens were flowing.
fn fault_of(timeline: &Timeline, refusal: Option<&Rejection>, is_alive: bool) -> Option<AttemptOutcome> {
    if let Some(error) = timeline.error {
        return Some(AttemptOutcome::answer(error.code, None, Injection::None));
    }
    match refusal {
        Some(Rejection::EngineAnswered { status } | Rejection::EngineKeyRefused { status, .. }) => {
            return Some(AttemptOutcome::answer(*status, None, Injection::None));
        }
        Some(Rejection::ConnectFailed { .. }) => return Some(AttemptOutcome::ConnectFailed),
        // The engine works but its response cannot be read, which is no fault for the breaker.
        Some(Rejection::EngineCoded) => return None,
        _ => {}
    }
    if timeline.finish.is_some() {
        return None;
    }
    match timeline.ending {
        Ending::Broken => Some(AttemptOutcome::Broken),
        Ending::Clean if timeline.reader == ResponseFormat::Events => Some(AttemptOutcome::Broken),
        // While the client does not read, the total limit is the client's fault.
        Ending::TimedOut(TimeoutKind::Total) if timeline.limited.is_some() || is_alive => None,
        Ending::TimedOut(_) => Some(AttemptOutcome::TimedOut),
        Ending::Clean | Ending::Left | Ending::WriteStalled | Ending::Drained | Ending::Panicked => None,
    }
}
