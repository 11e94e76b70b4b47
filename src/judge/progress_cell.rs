//! Progress of a running stream, for the gauge of overdue requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::observe::Choice;
use crate::types::{ClientState, Tick};

use super::context::JudgeContext;
use super::fault::not_judged;
use super::objectives::Objectives;
use super::progress::{Progress, is_broken_at, ttft_breaks};

/// A cell shared by a response's relay (its only writer; a few plain stores per token event) and the
/// gauge of overdue requests. It counts events at their learned token ratio, ignores usage, and assumes
/// equally long choices; the final verdict is exact.
#[derive(Clone, Debug)]
pub struct ProgressCell(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    first_token: AtomicU64,
    first_visible: AtomicU64,
    last_token: AtomicU64,
    events: AtomicU64,
    /// Tokens per event, learned from the engine: the bits of a float.
    ratio: AtomicU64,
    itl_broke: AtomicU64,
    client: ClientState,
    is_finished: AtomicBool,
}

const NEVER: u64 = u64::MAX;

impl Default for ProgressCell {
    /// Without a token.
    fn default() -> Self {
        ProgressCell::set_client(ClientState::default())
    }
}

impl ProgressCell {
    /// A response without a token yet. Objectives still unbroken when the client stops reading are not the
    /// service's fault, except for a missing first token. The client state is asked directly, because a relay
    /// whose client does not read is not polled.
    #[must_use]
    pub fn set_client(client: ClientState) -> Self {
        ProgressCell(Arc::new(Inner {
            first_token: AtomicU64::new(NEVER),
            first_visible: AtomicU64::new(NEVER),
            last_token: AtomicU64::new(NEVER),
            events: AtomicU64::new(0),
            ratio: AtomicU64::new(1.0_f64.to_bits()),
            itl_broke: AtomicU64::new(NEVER),
            client,
            is_finished: AtomicBool::new(false),
        }))
    }

    /// Sets the expected tokens per event.
    pub fn set_tokens_per_event(&self, tokens_per_event: f64) {
        self.0.ratio.store(tokens_per_event.to_bits(), Ordering::Relaxed);
    }

    /// Records when a gap between token events exceeded the ITL threshold.
    pub fn itl_broke(&self, at: Tick) {
        self.0.itl_broke.store(at.as_nanos(), Ordering::Relaxed);
    }

    /// Records a token event.
    pub fn token(&self, at: Tick, visible: bool) {
        let cell = &*self.0;
        let first = |moment: &AtomicU64| {
            if moment.load(Ordering::Relaxed) == NEVER {
                moment.store(at.as_nanos(), Ordering::Relaxed);
            }
        };
        first(&cell.first_token);
        if visible {
            first(&cell.first_visible);
        }
        cell.last_token.store(at.as_nanos(), Ordering::Relaxed);
        cell.events.store(cell.events.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Records whether the response has finished so far; a further token undoes it.
    pub fn finished(&self, is_finished: bool) {
        self.0.is_finished.store(is_finished, Ordering::Relaxed);
    }

    /// Whether a leave at `at` is a late cancel (`canceled_late`), for a request in the state `waiting`
    /// except for its tokens, with `choices` choices.
    #[must_use]
    pub fn is_overdue(
        &self,
        waiting: &Progress<'_>,
        objectives: &Objectives,
        case: &JudgeContext,
        choices: u64,
        at: Tick,
    ) -> bool {
        let streamed = waiting.streamed && case.dialect.generates();
        if self.0.is_finished.load(Ordering::Relaxed) || not_judged(streamed, objectives, case).is_some() {
            return false;
        }
        let moment =
            |cell: &AtomicU64| Some(cell.load(Ordering::Relaxed)).filter(|&n| n != NEVER).map(Tick::from_nanos);
        let (first_token, last_token) = (moment(&self.0.first_token), moment(&self.0.last_token));
        let first_visible = moment(&self.0.first_visible);
        let events = self.0.events.load(Ordering::Relaxed);
        let ratio = f64::from_bits(self.0.ratio.load(Ordering::Relaxed));
        let choices = choices.max(1);
        let tokens = events as f64 * ratio / choices as f64;
        let events = events.div_ceil(choices);
        let choice = Choice { index: 0, first_token, first_visible, last_token, events, tokens, finished: false };
        let seen = [choice];
        let progress = Progress {
            first_token,
            first_visible,
            last_token,
            choices: if first_token.is_some() { &seen } else { &[] },
            itl_broke: moment(&self.0.itl_broke),
            ..*waiting
        };
        match self.0.client.limited_since(at) {
            None => is_broken_at(&progress, objectives, case, at),
            Some(since) => {
                let waits = ttft_breaks(&progress, objectives).filter(|_| streamed).is_some_and(|breaks| at > breaks);
                waits || is_broken_at(&progress, objectives, case, since)
            }
        }
    }
}
