//! Evaluation: first whose fault the ending is, then the objectives.

use std::time::Duration;

use crate::observe::{ClientLimited, Ending, Timeline};
use crate::types::Tick;

use super::context::JudgeContext;
use super::fault::{fault, not_judged};
use super::objectives::{Objective, Objectives};
use super::outcome::{Excluded, Missed, Outcome};
use super::progress::{Progress, is_broken_at, itl_breaks, tpot_breaks, ttft_breaks, whole_deadline};

/// State of one objective on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObjectiveState {
    /// Its point was reached in time.
    Held,
    /// Its deadline passed before its point was reached.
    Broken,
    /// Undecidable, or not judged.
    NotEvaluated,
}

/// A request's outcome, and the state of each objective of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// How the request ended.
    pub outcome: Outcome,
    /// The same against the class's own objectives, which differs only where the request has set targets of
    /// its own. Overload levels go by it, because a request's targets must not cost other requests theirs.
    pub by_class: Outcome,
    /// TTFT; `None` if the class has no such objective.
    pub ttft: Option<ObjectiveState>,
    /// State of TPOT.
    pub tpot: Option<ObjectiveState>,
    /// State of ITL.
    pub itl: Option<ObjectiveState>,
    /// State of E2E, or of the derived budget if it applies.
    pub e2e: Option<ObjectiveState>,
}

impl Verdict {
    /// An outcome without objectives.
    #[must_use]
    pub const fn bare(outcome: Outcome) -> Self {
        Verdict { outcome, by_class: outcome, ttft: None, tpot: None, itl: None, e2e: None }
    }

    /// The verdict against these objectives, and the outcome against those of the class.
    fn against(objectives: &Objectives, judge: impl Fn(&Objectives) -> Verdict) -> Self {
        let verdict = judge(objectives);
        let of_class = objectives.of_class.as_deref();
        Verdict { by_class: of_class.map_or(verdict.outcome, |class| judge(class).outcome), ..verdict }
    }

    fn excluded(reason: Excluded, objectives: &Objectives) -> Self {
        let blank = |objective: Option<Objective>| objective.map(|_| ObjectiveState::NotEvaluated);
        Verdict {
            outcome: Outcome::Excluded(reason),
            by_class: Outcome::Excluded(reason),
            ttft: blank(objectives.ttft),
            tpot: blank(objectives.tpot),
            itl: blank(objectives.itl),
            e2e: blank(objectives.e2e),
        }
    }
}

/// Judges a relayed response.
#[must_use]
pub fn judge(timeline: &Timeline, objectives: &Objectives, case: &JudgeContext) -> Verdict {
    Verdict::against(objectives, |objectives| judge_response(timeline, objectives, case))
}

fn judge_response(timeline: &Timeline, objectives: &Objectives, case: &JudgeContext) -> Verdict {
    let streamed = timeline.streamed && case.dialect.generates();
    if let Some(reason) = not_judged(streamed, objectives, case) {
        return Verdict::excluded(reason, objectives);
    }
    let progress = Progress::of(timeline);
    let scene = Evaluation { progress, objectives, case, streamed };
    match fault(timeline, case) {
        Some(Outcome::Missed(reason)) => scene.failed(timeline, reason),
        Some(Outcome::Excluded(reason)) => Verdict::excluded(reason, objectives),
        Some(Outcome::Met) | None => scene.evaluate(timeline),
    }
}

/// Judges a request that the gateway rejected with `outcome` at `at`, after `progress`.
#[must_use]
pub fn judge_refused(
    outcome: Outcome,
    progress: &Progress<'_>,
    objectives: &Objectives,
    case: &JudgeContext,
    at: Tick,
) -> Verdict {
    let streamed = progress.streamed && case.dialect.generates();
    match outcome {
        // Beyond its limit every ending is the tenant's own.
        Outcome::Excluded(_) if case.over_limit => Verdict::excluded(Excluded::RateLimited, objectives),
        Outcome::Excluded(reason) => Verdict::excluded(reason, objectives),
        Outcome::Missed(reason) => match not_judged(streamed, objectives, case) {
            Some(excluded) => Verdict::excluded(excluded, objectives),
            None => {
                let scene = Evaluation { progress: *progress, objectives, case, streamed };
                scene.states_at(at).verdict(Outcome::Missed(reason))
            }
        },
        Outcome::Met => Verdict::bare(Outcome::Met),
    }
}

/// Judges a request whose client left at `at` before a response was relayed.
#[must_use]
pub fn judge_left(progress: &Progress<'_>, objectives: &Objectives, case: &JudgeContext, at: Tick) -> Verdict {
    let streamed = progress.streamed && case.dialect.generates();
    Verdict::against(objectives, |objectives| match not_judged(streamed, objectives, case) {
        Some(reason) if progress.is_uploaded => Verdict::excluded(reason, objectives),
        _ => Evaluation { progress: *progress, objectives, case, streamed }.left(at),
    })
}

/// The inputs of one evaluation.
struct Evaluation<'a> {
    progress: Progress<'a>,
    objectives: &'a Objectives,
    case: &'a JudgeContext,
    streamed: bool,
}

/// An objective's state and, if broken, since when.
#[derive(Clone, Copy)]
struct ObjectiveResult {
    held: ObjectiveState,
    broke: Option<Tick>,
}

impl ObjectiveResult {
    /// The point was reached at `reached`; its deadline was `deadline`.
    fn reached(reached: Tick, deadline: Tick) -> Self {
        if reached <= deadline {
            ObjectiveResult { held: ObjectiveState::Held, broke: None }
        } else {
            ObjectiveResult::broken(deadline)
        }
    }

    fn broken(at: Tick) -> Self {
        ObjectiveResult { held: ObjectiveState::Broken, broke: Some(at) }
    }

    fn open() -> Self {
        ObjectiveResult { held: ObjectiveState::NotEvaluated, broke: None }
    }

    /// The point was not reached by `at`; the objective breaks at `moment`.
    fn unreached(moment: Option<Tick>, at: Tick) -> Self {
        moment.filter(|moment| at > *moment).map_or(ObjectiveResult::open(), ObjectiveResult::broken)
    }
}

/// All four objectives, in the order in which ties are reported: TTFT, TPOT, ITL, E2E.
#[derive(Clone, Copy)]
struct ObjectiveResults {
    ttft: Option<ObjectiveResult>,
    tpot: Option<ObjectiveResult>,
    itl: Option<ObjectiveResult>,
    e2e: Option<ObjectiveResult>,
}

impl ObjectiveResults {
    /// The objective that broke first.
    fn first_broken(&self) -> Option<Missed> {
        let named =
            [(self.ttft, Missed::Ttft), (self.tpot, Missed::Tpot), (self.itl, Missed::Itl), (self.e2e, Missed::E2e)];
        let broken = named.into_iter().filter_map(|(state, reason)| Some((state?.broke?, reason)));
        // `min_by_key` returns the first of equal elements.
        broken.min_by_key(|(moment, _)| *moment).map(|(_, reason)| reason)
    }

    fn verdict(self, outcome: Outcome) -> Verdict {
        let held = |state: Option<ObjectiveResult>| state.map(|weighed| weighed.held);
        let (ttft, tpot) = (held(self.ttft), held(self.tpot));
        Verdict { outcome, by_class: outcome, ttft, tpot, itl: held(self.itl), e2e: held(self.e2e) }
    }
}

impl Evaluation<'_> {
    /// A response without a fault: finished, or ended by its client.
    fn evaluate(&self, timeline: &Timeline) -> Verdict {
        if let Some(limited) = limited_before_finish(timeline) {
            return self.limited(timeline, limited);
        }
        match timeline.finish {
            Some(finish) => {
                let states = self.finished_states(timeline, finish);
                states.verdict(states.first_broken().map_or(Outcome::Met, Outcome::Missed))
            }
            None if timeline.ending == Ending::Left => self.left(timeline.end),
            None => Verdict::excluded(Excluded::ClientLimited, self.objectives),
        }
    }

    /// The client left at `at`.
    fn left(&self, at: Tick) -> Verdict {
        if is_broken_at(&self.progress, self.objectives, self.case, at) {
            self.states_at(at).verdict(Outcome::Missed(Missed::CanceledLate))
        } else {
            Verdict::excluded(Excluded::ClientCancel, self.objectives)
        }
    }

    /// Missed for a reason other than an objective. Deadlines passed by the end count as broken, points
    /// reached keep their state, the rest is not evaluated.
    fn failed(&self, timeline: &Timeline, reason: Missed) -> Verdict {
        let states = if let Some(limited) = limited_before_finish(timeline) {
            self.limited_states(timeline, limited)
        } else {
            let ended = self.states_at(timeline.end);
            match timeline.finish {
                // Finished with an error after the tokens, or empty.
                Some(finish) if timeline.error.is_none_or(|error| error.after_first_token) => {
                    ObjectiveResults { ttft: ended.ttft, ..self.finished_states(timeline, finish) }
                }
                _ => ended,
            }
        };
        states.verdict(Outcome::Missed(reason))
    }

    /// The client stopped reading at some moment. TTFT is judged, objectives broken by then stay broken,
    /// everything after is the client's doing.
    fn limited(&self, timeline: &Timeline, limited: &ClientLimited) -> Verdict {
        let states = self.limited_states(timeline, limited);
        let left = timeline.finish.is_none() && timeline.ending == Ending::Left;
        // A stall is not an objective, but makes leaving a late cancel.
        let then = Progress::when_limited(timeline, limited);
        let impatient = left && is_broken_at(&then, self.objectives, self.case, limited.at);
        match states.first_broken() {
            Some(_) if left => states.verdict(Outcome::Missed(Missed::CanceledLate)),
            Some(reason) => states.verdict(Outcome::Missed(reason)),
            None if impatient => states.verdict(Outcome::Missed(Missed::CanceledLate)),
            None => Verdict::excluded(Excluded::ClientLimited, self.objectives),
        }
    }

    /// The objectives at the moment the client stopped reading; TTFT is judged by its point even if
    /// later, else by the finish, else by the end.
    fn limited_states(&self, timeline: &Timeline, limited: &ClientLimited) -> ObjectiveResults {
        let progress = Progress::when_limited(timeline, limited);
        let then = Evaluation { progress, ..*self }.states_at(limited.at);
        if !self.streamed {
            return then;
        }
        let ttft = self.objectives.ttft.map(|ttft| {
            let deadline = self.progress.start + ttft.threshold;
            let counted = self.progress.counted(self.objectives.ttft_counts).or(timeline.finish);
            match counted {
                Some(reached) => ObjectiveResult::reached(reached, deadline),
                None => ObjectiveResult::unreached(Some(deadline), timeline.end),
            }
        });
        ObjectiveResults { ttft, ..then }
    }

    fn finished_states(&self, timeline: &Timeline, finish: Tick) -> ObjectiveResults {
        if self.streamed { self.stream_states(timeline, finish) } else { self.whole_states(timeline, finish) }
    }

    fn stream_states(&self, timeline: &Timeline, finish: Tick) -> ObjectiveResults {
        let start = self.progress.start;
        let counted = self.progress.counted(self.objectives.ttft_counts).unwrap_or(finish);
        let tpot = timeline.tpot();
        let own = self.objectives.e2e.map(|e2e| start + e2e.threshold);
        let derived = self.objectives.derived_budget(tokens_of(timeline)).map(|budget| start + budget);
        let budget = [own, derived.filter(|_| tpot.is_none())].into_iter().flatten().min();
        ObjectiveResults {
            ttft: self.objectives.ttft.map(|ttft| ObjectiveResult::reached(counted, start + ttft.threshold)),
            tpot: self.objectives.tpot.map(|objective| evaluate_tpot(timeline, tpot, objective.threshold)),
            itl: self.objectives.itl.map(|itl| evaluate_itl(timeline, itl.threshold)),
            e2e: budget.map(|deadline| ObjectiveResult::reached(finish, deadline)),
        }
    }

    /// A non-streaming response has no TTFT, TPOT or ITL.
    fn whole_states(&self, timeline: &Timeline, finish: Tick) -> ObjectiveResults {
        let n = if self.case.dialect.generates() { tokens_of(timeline) } else { 1 };
        let deadline = self.objectives.whole_budget(n).map(|budget| self.progress.start + budget);
        ObjectiveResults {
            e2e: deadline.map(|deadline| ObjectiveResult::reached(finish, deadline)),
            ..self.unstreamed()
        }
    }

    /// The objectives of an unfinished response at `at`.
    fn states_at(&self, at: Tick) -> ObjectiveResults {
        let (progress, objectives) = (&self.progress, self.objectives);
        if !progress.is_uploaded {
            return ObjectiveResults { e2e: objectives.e2e.map(|_| ObjectiveResult::open()), ..self.unstreamed() };
        }
        if !self.streamed {
            let deadline = whole_deadline(progress, objectives, self.case);
            let e2e = deadline.map(|deadline| ObjectiveResult::unreached(Some(deadline), at));
            return ObjectiveResults { e2e, ..self.unstreamed() };
        }
        let ttft = objectives.ttft.map(|ttft| match progress.counted(objectives.ttft_counts) {
            Some(counted) => ObjectiveResult::reached(counted, progress.start + ttft.threshold),
            None => ObjectiveResult::unreached(ttft_breaks(progress, objectives), at),
        });
        ObjectiveResults {
            ttft,
            tpot: objectives.tpot.map(|_| ObjectiveResult::unreached(tpot_breaks(progress, objectives), at)),
            itl: objectives.itl.map(|_| ObjectiveResult::unreached(itl_breaks(progress, objectives), at)),
            e2e: objectives.e2e.map(|e2e| ObjectiveResult::unreached(Some(progress.start + e2e.threshold), at)),
        }
    }

    fn unstreamed(&self) -> ObjectiveResults {
        let blank = |objective: Option<Objective>| objective.map(|_| ObjectiveResult::open());
        ObjectiveResults {
            ttft: blank(self.objectives.ttft),
            tpot: blank(self.objectives.tpot),
            itl: blank(self.objectives.itl),
            e2e: None,
        }
    }
}

/// When the client stopped reading, unless the response had finished before; nothing that a client
/// does after `finish` counts.
fn limited_before_finish(timeline: &Timeline) -> Option<&ClientLimited> {
    let limited = timeline.limited.as_ref()?;
    timeline.finish.is_none_or(|finish| limited.at < finish).then_some(limited)
}

/// TPOT breaks with the last token of a choice that was too slow.
fn evaluate_tpot(timeline: &Timeline, worst: Option<Duration>, threshold: Duration) -> ObjectiveResult {
    match worst {
        None => ObjectiveResult::open(),
        Some(worst) if worst <= threshold => ObjectiveResult { held: ObjectiveState::Held, broke: None },
        Some(_) => {
            let slow = timeline.choices.iter().filter(|choice| choice.tpot().is_some_and(|tpot| tpot > threshold));
            let moment = slow.filter_map(|choice| choice.last_token).min();
            ObjectiveResult::broken(moment.or(timeline.last_token).unwrap_or(timeline.end))
        }
    }
}

/// ITL holds if the largest gap does; without a gap it is not evaluated.
fn evaluate_itl(timeline: &Timeline, threshold: Duration) -> ObjectiveResult {
    match timeline.gaps.largest {
        None => ObjectiveResult::open(),
        Some(largest) if largest <= threshold => ObjectiveResult { held: ObjectiveState::Held, broke: None },
        Some(_) => ObjectiveResult::broken(timeline.gaps.broke.or(timeline.last_token).unwrap_or(timeline.end)),
    }
}

/// Output tokens of the longest choice; fractions are rounded against the service.
fn tokens_of(timeline: &Timeline) -> u64 {
    let longest = timeline.choices.iter().map(|choice| choice.tokens).fold(0.0, f64::max);
    if longest > 0.0 { (longest + 1e-6) as u64 } else { timeline.output.0 }
}
