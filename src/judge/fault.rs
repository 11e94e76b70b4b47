//! Whose fault an ending is, before any objective is evaluated.

use crate::observe::{Ending, ResponseFormat, Timeline, TimeoutKind};

use super::context::JudgeContext;
use super::objectives::Objectives;
use super::outcome::{Excluded, Missed, Outcome};

/// Why this kind of request is not judged, whatever its ending.
pub(super) fn not_judged(streamed: bool, objectives: &Objectives, case: &JudgeContext) -> Option<Excluded> {
    if case.over_limit {
        return Some(Excluded::RateLimited);
    }
    if !case.judged_path {
        return Some(Excluded::Unjudged);
    }
    if !streamed && !objectives.judges_non_streaming() {
        return Some(Excluded::NonStreaming);
    }
    None
}

/// The outcome of a failed request regardless of its objectives; `None` if the objectives (or the
/// rules for clients that left or did not read) decide.
pub(super) fn fault(timeline: &Timeline, case: &JudgeContext) -> Option<Outcome> {
    if let Some(error) = timeline.error {
        let late = error.after_first_token;
        return Some(if late { Outcome::Missed(Missed::UpstreamError) } else { of_code(error.code, case) });
    }
    if !timeline.is_success() {
        return Some(of_code(timeline.status, case));
    }
    let missed = |reason| Some(Outcome::Missed(reason));
    // A JSON body is parsed at its end, so a truncated one is no evidence.
    if timeline.unparseable && (timeline.reader != ResponseFormat::Json || timeline.ending == Ending::Clean) {
        return missed(Missed::Unparseable);
    }
    if timeline.finish.is_some() {
        return if is_empty(timeline, case) { missed(Missed::Empty) } else { None };
    }
    match timeline.ending {
        Ending::Clean | Ending::Broken => missed(Missed::Truncated),
        Ending::TimedOut(TimeoutKind::FirstToken) => missed(Missed::TimeoutFirstToken),
        Ending::TimedOut(TimeoutKind::Idle) => missed(Missed::TimeoutIdle),
        // The total limit is the client's doing while the client does not read.
        Ending::TimedOut(TimeoutKind::Total) if timeline.limited.is_some() => None,
        Ending::TimedOut(TimeoutKind::Total) => missed(Missed::TimeoutTotal),
        Ending::Drained | Ending::Panicked => missed(Missed::Internal),
        Ending::Left | Ending::WriteStalled => None,
    }
}

/// Whose fault an engine's status code is, or an in-band error in a 200 before the first token. Every
/// code has a row; codes without an explanation are the engine's fault.
#[must_use]
pub const fn of_code(code: u16, case: &JudgeContext) -> Outcome {
    match code {
        429 | 503 | 529 => Outcome::Missed(Missed::UpstreamOverload),
        400 | 401 | 403 | 404 | 409 | 411 | 413 | 414 | 415 | 422 | 431 | 501 if case.served_by_fallback_pool => {
            Outcome::Missed(Missed::UpstreamOverload)
        }
        // The client's own body would have had another cap.
        400 | 422 if case.cap_lowered => Outcome::Missed(Missed::UpstreamError),
        400 | 409 | 411 | 413 | 414 | 415 | 422 | 431 | 501 => Outcome::Excluded(Excluded::InvalidRequest),
        404 if case.model_unknown_to_pool || case.names_stored => Outcome::Excluded(Excluded::InvalidRequest),
        401 | 403 if case.credential_forwarded => Outcome::Excluded(Excluded::Unauthorized),
        _ => Outcome::Missed(Missed::UpstreamError),
    }
}

/// Finished without output and without a finish reason, or without visible output where the gateway
/// had lowered the cap.
fn is_empty(timeline: &Timeline, case: &JudgeContext) -> bool {
    if !case.dialect.generates() {
        return false;
    }
    let nothing = !timeline.has_output && !timeline.has_finish_reason;
    nothing || (case.cap_lowered && !timeline.has_visible)
}
