//! How far a request had come, and when its objectives break if nothing more happens.
//!
//! A leaving client, a failing stream and the gauge of overdue requests ask the same question:
//! was an objective already broken at that moment? [`breaks_at`] answers it for all three with the
//! earliest such moment.

use std::time::Duration;

use crate::observe::{Choice, ClientLimited, Timeline};
use crate::types::{Tick, Tokens};

use super::context::JudgeContext;
use super::objectives::{Objectives, TtftCounts};

/// The state of a request at some moment.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Start of the objectives' clock.
    pub start: Tick,
    /// The body was read completely. A leave before is always a plain cancel.
    pub is_uploaded: bool,
    /// Token moments are judged.
    pub streamed: bool,
    /// First token event on any channel.
    pub first_token: Option<Tick>,
    /// First token event on a visible channel.
    pub first_visible: Option<Tick>,
    /// Last token event of any choice.
    pub last_token: Option<Tick>,
    /// The choices so far, with their known tokens.
    pub choices: &'a [Choice],
    /// When a gap between token events first exceeded the ITL threshold.
    pub itl_broke: Option<Tick>,
}

impl<'a> Progress<'a> {
    /// A request without a token yet.
    #[must_use]
    pub fn waiting(start: Tick, is_uploaded: bool, streamed: bool) -> Self {
        Progress {
            start,
            is_uploaded,
            streamed,
            first_token: None,
            first_visible: None,
            last_token: None,
            choices: &[],
            itl_broke: None,
        }
    }

    /// A relayed response at its end.
    #[must_use]
    pub fn of(timeline: &'a Timeline) -> Self {
        Progress {
            start: timeline.start,
            is_uploaded: true,
            streamed: timeline.streamed,
            first_token: timeline.first_token,
            first_visible: timeline.first_visible,
            last_token: timeline.last_token,
            choices: &timeline.choices,
            itl_broke: timeline.gaps.broke,
        }
    }

    /// A relayed response when its client stopped reading.
    #[must_use]
    pub(super) fn when_limited(timeline: &Timeline, limited: &'a ClientLimited) -> Self {
        let before = |moment: Option<Tick>| moment.filter(|moment| *moment <= limited.at);
        Progress {
            start: timeline.start,
            is_uploaded: true,
            streamed: timeline.streamed,
            first_token: before(timeline.first_token),
            first_visible: before(timeline.first_visible),
            last_token: limited.choices.iter().filter_map(|choice| choice.last_token).max(),
            choices: &limited.choices,
            itl_broke: timeline.gaps.broke,
        }
    }

    /// The token moment that the class's TTFT counts.
    pub(super) fn counted(&self, counts: TtftCounts) -> Option<Tick> {
        match counts {
            TtftCounts::FirstToken => self.first_token,
            TtftCounts::FirstVisibleToken => self.first_visible,
        }
    }

    /// The last token event after which more is expected: of the unfinished choice that has been silent
    /// longest, else of the whole response.
    fn silent_since(&self) -> Option<Tick> {
        let open = self.choices.iter().filter(|choice| !choice.finished);
        open.filter_map(|choice| choice.last_token).min().or(self.last_token)
    }
}

/// The earliest moment after which an objective is broken if nothing more happens than `progress`
/// shows; `None` if none ever is.
#[must_use]
pub fn breaks_at(progress: &Progress<'_>, objectives: &Objectives, case: &JudgeContext) -> Option<Tick> {
    if !progress.is_uploaded {
        return None;
    }
    if !progress.streamed || !case.dialect.generates() {
        return whole_deadline(progress, objectives, case);
    }
    let stalled = progress.silent_since().map(|since| since + objectives.stall);
    let moments = [
        ttft_breaks(progress, objectives),
        tpot_breaks(progress, objectives),
        itl_breaks(progress, objectives),
        objectives.e2e.map(|e2e| progress.start + e2e.threshold),
        stalled,
    ];
    moments.into_iter().flatten().min()
}

/// Whether an objective is broken at `at`: the test of `canceled_late` and of `overdue`.
#[must_use]
pub fn is_broken_at(progress: &Progress<'_>, objectives: &Objectives, case: &JudgeContext, at: Tick) -> bool {
    breaks_at(progress, objectives, case).is_some_and(|moment| at > moment)
}

/// TTFT breaks at its threshold unless its point was reached in time.
pub(super) fn ttft_breaks(progress: &Progress<'_>, objectives: &Objectives) -> Option<Tick> {
    let deadline = progress.start + objectives.ttft?.threshold;
    match progress.counted(objectives.ttft_counts) {
        Some(reached) if reached <= deadline => None,
        _ => Some(deadline),
    }
}

/// ITL breaks at the first gap that exceeded it, or with the current silence.
pub(super) fn itl_breaks(progress: &Progress<'_>, objectives: &Objectives) -> Option<Tick> {
    let threshold = objectives.itl?.threshold;
    let silence = progress.silent_since().map(|since| since + threshold);
    [progress.itl_broke, silence].into_iter().flatten().min()
}

/// TPOT breaks when some choice has fewer tokens than its age requires. A finished choice keeps its
/// state.
pub(super) fn tpot_breaks(progress: &Progress<'_>, objectives: &Objectives) -> Option<Tick> {
    let threshold = objectives.tpot?.threshold;
    let of_choice = |choice: &Choice| -> Option<Tick> {
        if choice.finished {
            return choice.last_token.filter(|_| choice.tpot().is_some_and(|tpot| tpot > threshold));
        }
        if choice.events < 2 {
            return None;
        }
        Some(choice.first_token? + times(threshold, choice.tokens))
    };
    progress.choices.iter().filter_map(of_choice).min()
}

/// A non-streaming response can break only E2E, or the budget derived from its expected number of
/// tokens.
pub(super) fn whole_deadline(progress: &Progress<'_>, objectives: &Objectives, case: &JudgeContext) -> Option<Tick> {
    let n = if case.dialect.generates() { expected_output(objectives, case) } else { Tokens(1) };
    objectives.whole_budget(n.0).map(|budget| progress.start + budget)
}

/// Expected output tokens of a response that has not come: the smaller of the stated cap and
/// the class's assumed p95, else the class's default.
fn expected_output(objectives: &Objectives, case: &JudgeContext) -> Tokens {
    match (case.stated_cap, objectives.assumed_output_p95()) {
        (Some(cap), Some(p95)) => cap.min(p95),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => objectives.default_output(),
    }
}

/// `length` x `factor`, saturating.
fn times(length: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(length.as_secs_f64() * factor.max(0.0)).unwrap_or(Duration::MAX)
}
