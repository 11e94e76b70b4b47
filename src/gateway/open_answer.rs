//! An answer that speaks: from the head that goes to the client to the verdict at its end.

use std::sync::Arc;
use std::time::Duration;

use http::Response;
use http::header::HeaderValue;

use super::admission::AdmissionGuard;
use super::attempts::{AttemptTarget, HeldResponse, SelectedResponse};
use super::degrade;
use super::house::Gateway;
use super::mark::Tagged;
use super::upload::BodyMemoryGuard;
use crate::forward::{GatewayHeaders, RelayEnd, RelayEvents, ReplyBody};
use crate::inspect::{ModelRatios, PromptSize};
use crate::judge::Case;
use crate::observe::{Ending, Reader, Timeline, TimeoutKind};
use crate::record::ActiveRequest;
use crate::refuse::Rejection;
use crate::route::retry::{Attempts, Happened, Injection};
use crate::route::{Lesson, Work};
use crate::units::{Endpoint, Tick};

/// What was asked, as far as the end of the answer needs it.
pub struct RequestSummary {
    /// The path.
    pub endpoint: Endpoint,
    /// The model's name as the engine knows it.
    pub model: Option<Arc<str>>,
    /// The class's name, as responses show it.
    pub class: Option<HeaderValue>,
    /// The settings name its model, rather than a pattern that fits it.
    pub is_named: bool,
    /// What the prompt estimate was made of.
    pub prompt: PromptSize,
    /// Time in the gateway's queue.
    pub queued: Duration,
    /// What was known of its model.
    pub learned: ModelRatios,
    /// The id under which the engine has it, where it could come back under it.
    pub _tagged: Option<Tagged>,
}

/// What waits for the end of an answer. It stays in its box from where the answer begins.
pub struct Opened {
    /// The gateway.
    pub gateway: Gateway,
    /// What was asked.
    pub asked: RequestSummary,
    /// What the request holds.
    pub held: AdmissionGuard,
    /// Memory for what is kept of the body until the answer has ended, if anything is.
    pub _body: Option<BodyMemoryGuard>,
}

impl Opened {
    /// The response for the client. The visit ends where the answer's body does.
    #[must_use]
    pub fn relay(mut self: Box<Self>, spoken: SelectedResponse, mut visit: ActiveRequest) -> Response<ReplyBody> {
        let asked = &mut self.asked;
        let SelectedResponse { answer, attempts, at, unproven, has_failed } = spoken;
        let HeldResponse { head, mut relay, work, mut place, dispatched, injection, degraded } = *answer;
        degraded.iter().for_each(|kind| visit.degraded(kind));
        let own = GatewayHeaders {
            class: asked.class.take(),
            is_messages: asked.endpoint.is_of_messages(),
            pool: place.shown.take(),
            degraded: degrade::shown(visit.degradation()),
            times: Some([asked.queued, at.since(dispatched)]),
            ..GatewayHeaders::of(visit.request_id())
        };
        let (mut shown, ()) = Response::new(()).into_parts();
        shown.status = head.parts.status;
        if !head.parts.extensions.is_empty() {
            shown.extensions.clone_from(&head.parts.extensions);
        }
        relay.begins_with(head, own);
        if let Some(case) = visit.case_mut() {
            case.credential_forwarded = place.credential_forwarded;
            case.is_away = place.is_away;
        }
        let unproven = unproven.then_some(injection);
        relay.keep(Box::new(Completion { of: self, visit, place, attempts, work, unproven, has_failed }));
        Response::from_parts(shown, ReplyBody::Relay(relay))
    }
}

/// A request whose answer is on its way.
struct Completion {
    of: Box<Opened>,
    visit: ActiveRequest,
    place: AttemptTarget,
    attempts: Box<Attempts>,
    work: Option<Box<Work>>,
    /// Where the head went out by time: what was injected, until a token shows that the engine
    /// took it.
    unproven: Option<Injection>,
    /// The answer is a failure that the attempts have dealt with.
    has_failed: bool,
}

impl RelayEvents for Completion {
    fn first_token(&mut self, at: Tick) {
        if let Some(work) = self.work.as_mut() {
            work.first_token(at);
        }
        if let Some(injection) = self.unproven.take() {
            let gateway = &self.of.gateway;
            let now = gateway.clock.now();
            gateway.fleet.succeeded(&self.place.pool, &mut self.attempts, injection, now);
        }
        self.attempts.first_token();
        self.of.held.first_token();
    }

    fn end(mut self: Box<Self>, ended: RelayEnd) {
        let RelayEnd { timeline, refusal, never_sent } = ended;
        if refusal.is_some() || timeline.error.is_some() || !timeline.is_success() {
            self.look_for_the_model();
        }
        self.tell_the_engine(&timeline, refusal.as_ref());
        self.learn(&timeline);
        let Completion { of, visit, .. } = *self;
        let case = visit.promise().map_or(Case::of(of.asked.endpoint.dialect()), |promise| promise.case);
        of.held.settle(&timeline, &case, refusal.as_ref(), never_sent);
        match refusal {
            Some(refusal) => visit.end_refused(timeline, &refusal),
            None => visit.end(timeline),
        }
    }
}

impl Completion {
    /// A failure may mean that there is no such model.
    fn look_for_the_model(&mut self) {
        let RequestSummary { endpoint, model, is_named, .. } = &self.of.asked;
        let has_served = |model| self.of.gateway.fleet.has_served(&self.place.pool, *endpoint, model);
        let is_unknown = !is_named && !has_served(model.as_deref().unwrap_or_default());
        if let Some(case) = self.visit.case_mut() {
            case.model_unknown_to_pool = is_unknown;
        }
    }

    /// What the end of an answer says about its engine.
    fn tell_the_engine(&mut self, timeline: &Timeline, refusal: Option<&Rejection>) {
        let is_alive = self.work.as_ref().is_some_and(|work| was_alive(timeline, work.signals().last_alive()));
        let fault = fault_of(timeline, refusal, is_alive);
        if let Some(work) = self.work.take() {
            if fault.is_none() && timeline.ending == Ending::Clean && timeline.is_success() {
                work.note_served(self.of.asked.endpoint, self.of.asked.model.as_deref().unwrap_or_default());
            }
            give_back(work, timeline);
        }
        if self.has_failed {
            return;
        }
        let (fleet, pool) = (&self.of.gateway.fleet, &self.place.pool);
        if refusal == Some(&Rejection::EngineCoded) {
            fleet.answers_coded(pool, &self.place.engine);
        }
        if let Some(happened) = fault {
            let _ = fleet.failed(pool, &mut self.attempts, happened, timeline.end);
        }
        fleet.settle(pool, &mut self.attempts, timeline.end);
    }

    /// Reported usage teaches bytes per token and tokens per event.
    fn learn(&self, timeline: &Timeline) {
        let (input, events) = (timeline.usage.input, timeline.plain_events());
        if input.is_none() && events.is_none() {
            return;
        }
        let RequestSummary { learned, model, is_named, prompt, .. } = &self.of.asked;
        let Some(learned) = self.of.gateway.ratios.of_answer(learned, model.as_deref(), *is_named) else { return };
        if let Some(input) = input {
            learned.prompt(*prompt, input);
        }
        if let Some((events, output)) = events {
            learned.events(&self.place.engine, events, output);
        }
    }
}

/// The work is done. What it took is a lesson where the answer came whole, at the engine's own
/// pace.
fn give_back(work: Box<Work>, timeline: &Timeline) {
    let is_whole = timeline.finish.is_some() && timeline.error.is_none() && timeline.is_success();
    if !is_whole || timeline.limited.is_some() {
        return;
    }
    let streamed = timeline.reader == Reader::Events;
    let dispatched = work.dispatched();
    let after = |moment: Option<Tick>| moment.map(|moment| moment.since(dispatched));
    let lesson = Lesson {
        ttft: after(timeline.first_token).filter(|_| streamed),
        tpot: timeline.tpot(),
        e2e: after(timeline.finish),
        further: timeline.output.0.saturating_sub(1),
        cached: timeline.usage.cached,
    };
    work.learned(&lesson, timeline.end);
}

/// Whether tokens were flowing when an answer ended: its own, or of another answer of the engine
/// since its own last one. A limit that the class puts on the whole is then no word about the engine.
fn was_alive(timeline: &Timeline, last_alive: Option<Tick>) -> bool {
    timeline.last_token.is_some_and(|last| {
        let pause = timeline.gaps.largest.unwrap_or_default().max(FLOWS);
        timeline.end.since(last) <= pause || last_alive.is_some_and(|alive| alive > last + FLOWS)
    })
}

/// Tokens no further apart flow, and so do those that came no slower than the others of the answer.
const FLOWS: Duration = Duration::from_secs(1);

/// The engine's fault in how an answer ended, if there is one. `is_alive`: its tokens were flowing.
fn fault_of(timeline: &Timeline, refusal: Option<&Rejection>, is_alive: bool) -> Option<Happened> {
    if let Some(error) = timeline.error {
        return Some(Happened::answer(error.code, None, Injection::None));
    }
    match refusal {
        Some(Rejection::EngineAnswered { status }) => return Some(Happened::answer(*status, None, Injection::None)),
        Some(Rejection::ConnectFailed { .. }) => return Some(Happened::ConnectFailed),
        // It works, and cannot be read: no fault for a breaker, as on the way with the engine's own head.
        Some(Rejection::EngineCoded) => return None,
        _ => {}
    }
    if timeline.finish.is_some() {
        return None;
    }
    match timeline.ending {
        Ending::Broken => Some(Happened::Broken),
        Ending::Clean if timeline.reader == Reader::Events => Some(Happened::Broken),
        // While the client does not read, the total limit is its doing.
        Ending::TimedOut(TimeoutKind::Total) if timeline.limited.is_some() || is_alive => None,
        Ending::TimedOut(_) => Some(Happened::TimedOut),
        Ending::Clean | Ending::Left | Ending::WriteStalled | Ending::Drained | Ending::Panicked => None,
    }
}
