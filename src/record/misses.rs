//! The last misses, each with its timeline.
//!
//! A miss is kept without content and without keys: names, moments and counts. Bounded: the last
//! [`PER_REASON`] of each class and reason, so that a flood of one reason hides no other. Requests that are
//! met or excluded cost nothing here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::request_record::{AttemptRecord, RequestRecord};
use super::series::Map;
use crate::judge::{Missed, ObjectiveState, Outcome};
use crate::observe::Timeline;
use crate::types::{ClassId, EngineId, LengthBucket, PoolId, RequestId, TenantId, Tick, Tokens};

/// Misses of one class and reason that are kept.
const PER_REASON: usize = 10;

/// One request that missed.
#[derive(Clone, Debug, PartialEq)]
pub struct MissRecord {
    /// The class in whose books it went.
    pub class: ClassId,
    /// Why it missed.
    pub reason: Missed,
    /// Objectives that were broken, by their names in the settings.
    pub broken: Vec<&'static str>,
    /// The id that correlates it.
    pub request_id: RequestId,
    /// The tenant.
    pub tenant: Option<TenantId>,
    /// The model as the routes name it.
    pub model: Option<Arc<str>>,
    /// The pool of the last attempt, else the first of the route.
    pub pool: Option<PoolId>,
    /// The engine of the last attempt.
    pub engine: Option<EngineId>,
    /// The engines that were asked, in order.
    pub attempts: Vec<AttemptRecord>,
    /// The status that the client received.
    pub status: u16,
    /// The code of the gateway's own error, if it sent one.
    pub code: Option<&'static str>,
    /// Overload levels in force for it.
    pub level: usize,
    /// How long the prompt is.
    pub length: LengthBucket,
    /// The prompt estimate.
    pub prompt: Tokens,
    /// Output tokens.
    pub output: Option<Tokens>,
    /// The head of the request was read.
    pub arrival: Tick,
    /// Start of the objectives' clock, if a response was relayed.
    pub start: Option<Tick>,
    /// The last byte of the body was read.
    pub body_complete: Option<Tick>,
    /// How long the client had sent nothing of it.
    pub client_wait: Option<Duration>,
    /// The request left the queue.
    pub admitted: Option<Tick>,
    /// First token event on any channel.
    pub first_token: Option<Tick>,
    /// Last token event.
    pub last_token: Option<Tick>,
    /// The request ended.
    pub end: Tick,
}

/// Misses of one class and reason, the oldest first.
type MissesOfReason = VecDeque<Arc<MissRecord>>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct RecentMisses(Mutex<Map<(ClassId, Missed), MissesOfReason>>);

impl RecentMisses {
    /// Keeps a request if it missed. `default` is the class of what missed before it had one.
    pub(super) fn note(&self, finished: &RequestRecord, default: &ClassId) {
        let Outcome::Missed(reason) = finished.verdict.outcome else { return };
        let class = finished.class.as_ref().unwrap_or(default).clone();
        let miss = Arc::new(MissRecord::of(finished, class.clone(), reason));
        let mut misses = self.0.lock();
        let of_reason = misses.entry((class, reason)).or_default();
        if of_reason.len() == PER_REASON {
            of_reason.pop_front();
        }
        of_reason.push_back(miss);
    }

    /// Forgets the classes that are not among these.
    pub(super) fn keep_classes(&self, classes: &[ClassId]) {
        self.0.lock().retain(|(class, _), _| classes.contains(class));
    }

    /// All that are kept, the newest first.
    pub(super) fn all(&self) -> Vec<Arc<MissRecord>> {
        let mut all: Vec<_> = self.0.lock().values().flatten().cloned().collect();
        all.sort_by(|a, b| b.end.cmp(&a.end).then_with(|| a.request_id.as_str().cmp(b.request_id.as_str())));
        all
    }
}

impl MissRecord {
    fn of(finished: &RequestRecord, class: ClassId, reason: Missed) -> Self {
        let timeline = finished.timeline.as_ref();
        let verdict = &finished.verdict;
        let states = [("ttft", verdict.ttft), ("tpot", verdict.tpot), ("itl", verdict.itl), ("e2e", verdict.e2e)];
        let broken = states.into_iter().filter(|(_, state)| *state == Some(ObjectiveState::Broken));
        MissRecord {
            class,
            reason,
            broken: broken.map(|(name, _)| name).collect(),
            request_id: finished.request_id.clone(),
            tenant: finished.tenant.clone(),
            model: finished.model.clone(),
            pool: finished.pool.clone(),
            engine: finished.engine.clone(),
            attempts: finished.attempts.clone(),
            status: finished.status,
            code: finished.refusal,
            level: finished.degraded.level,
            length: finished.length,
            prompt: finished.prompt,
            output: timeline.map(|timeline| timeline.output),
            arrival: finished.arrival,
            start: timeline.map(|timeline| timeline.start),
            body_complete: finished.body_complete,
            client_wait: finished.client_wait,
            admitted: finished.admitted,
            first_token: timeline.and_then(|timeline| timeline.first_token),
            last_token: timeline.and_then(last_token_of),
            end: finished.end,
        }
    }
}

/// The last token of any choice; the finish, if usage reports tokens that no event carried.
fn last_token_of(timeline: &Timeline) -> Option<Tick> {
    timeline.choices.iter().filter_map(|choice| choice.last_token).chain(timeline.last_token).max()
}
