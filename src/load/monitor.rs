//! Watches one run at one rate, and says when it has shown enough. Pure: moments are seconds from the start of the
//! run.
//!
//! A run goes through three stretches. In the *warm-up* the service fills up; its requests are not counted. Then come the
//! *counted* requests. Requests that arrive behind the last counted one are the *cool-down*: they go on until every counted
//! request is decided, so that all counted ones have lived under the full load. What is counted is fixed by the
//! order of arrival, never by what has ended: slow requests are not left out.
//!
//! A request is decided when it has ended, or when one of its objectives is broken while it is still open. The run is looked
//! at where so many requests in the order of arrival are decided as were fixed before it began ([`Looks`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::interval::{Decision, Looks, Outcomes, grows};
use super::record::LoadRecord;
use super::run_events::LoadEvent;
use super::steady::{Trend, in_flight};

/// When a run has shown enough.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRule {
    /// Confidence of intervals, and of all looks at a run together.
    pub confidence: f64,
    /// Standard error of the attainment that a run should reach, if no look decides before.
    pub standard_error: f64,
    /// Counted requests at the first look.
    pub first_look: u64,
    /// Shortest warm-up, in seconds. It continues until 1.5 times the median duration of a request has
    /// passed.
    pub warm_up_seconds: f64,
    /// Shortest counted stretch, in seconds.
    pub min_seconds: f64,
    /// Length of warm-up and counted period together at which the run is ended, in seconds.
    pub max_seconds: f64,
}

impl Default for RunRule {
    /// 95 %, a standard error of 1.73 points (1 point over three repetitions), 100 requests, 10 s, 20 s, 600 s.
    fn default() -> Self {
        RunRule {
            confidence: 0.95,
            standard_error: 0.01 * 3.0_f64.sqrt(),
            first_look: 100,
            warm_up_seconds: 10.0,
            min_seconds: 20.0,
            max_seconds: 600.0,
        }
    }
}

/// Targets of a run, for each class.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassGoal {
    /// Share of requests that must keep all objectives.
    pub target: f64,
    /// Threshold of TTFT, else of E2E: the scale on which a change of latency matters.
    pub threshold: Duration,
    /// Whether latency is TTFT; else it is E2E.
    pub is_ttft: bool,
    /// Share of the requests that belong to the class.
    pub weight: f64,
}

/// Most samples per effective one to plan for: samples of long bursts may be worth very little.
const MOST_PER_EFFECTIVE: u64 = 16;

/// Warm-up, in multiples of the median duration of a request.
const DURATIONS_OF_WARM_UP: f64 = 1.5;

/// Requests that must have ended before a warm-up can end by itself.
const ENDED_IN_WARM_UP: usize = 5;

/// The warm-up ends after this multiple of its shortest length, if hardly any request ends.
const LONGEST_WARM_UP: f64 = 6.0;

/// Requests in a row that no connection could be had for, after which the service counts as gone.
const GONE_AFTER: usize = 20;

/// Change of requests in flight that does not make a run unsteady.
const FEW_IN_FLIGHT: f64 = 2.0;

/// Change of latency, as a share of its threshold, that does not make a run unsteady.
const LITTLE_LATENCY: f64 = 0.1;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunVerdict {
    /// It is steady, and every class reaches its target.
    Clears,
    /// It is steady, and some class does not.
    Fails,
    /// It did not settle: it fails, and has no attainment.
    Unsteady,
    /// It cannot be believed: the load generator was late or lacked sockets, or too many requests were
    /// excluded.
    Invalid,
    /// The service went away, or the run was interrupted.
    Partial,
}

/// Next step of the run's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStep {
    /// Go on.
    GoOn,
    /// Enough has been seen: send no more.
    Enough,
    /// The service is gone: send no more.
    Gone,
}

/// The counted period of a run, and its result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunConclusion {
    /// Verdict.
    pub verdict: RunVerdict,
    /// Whether an interval cleared the target; else the estimate decided.
    pub is_decided: bool,
    /// Number of the first counted request.
    pub from: usize,
    /// Number behind the last counted request.
    pub to: usize,
    /// Beginning of the counted stretch, in seconds.
    pub from_seconds: f64,
    /// End of the counted stretch, in seconds.
    pub to_seconds: f64,
    /// Trend of requests in flight.
    pub in_flight: Option<Trend>,
    /// Trend of latency, as a share of its threshold.
    pub latency: Option<Trend>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Open,
    Overdue,
    Met,
    Missed,
    Excluded,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    at: f64,
    class: usize,
    fate: Fate,
    latency: f64,
    end: f64,
}

impl Watched {
    const fn is_decided(&self) -> bool {
        !matches!(self.fate, Fate::Open)
    }

    const fn is_judged(&self) -> bool {
        !matches!(self.fate, Fate::Open | Fate::Excluded)
    }
}

/// See the module.
#[derive(Debug)]
pub struct RunMonitor {
    rule: RunRule,
    goals: Vec<ClassGoal>,
    looks: Looks,
    /// The next look.
    look: usize,
    requests: Vec<Watched>,
    /// All requests before this number are decided.
    decided: usize,
    /// Of these, counted and judged ones.
    judged: u64,
    /// The counted stretch: the number of its first request, and its moment.
    counted: Option<(usize, f64)>,
    durations: Vec<f64>,
    /// Requests in a row, the last ones that ended, without a connection.
    unreachable: usize,
    /// The time is up: requests that arrived by then count.
    last: Option<(usize, f64)>,
    conclusion: Option<RunConclusion>,
}

impl RunMonitor {
    /// A run at this rate that has not begun.
    #[must_use]
    pub fn new(rule: RunRule, goals: Vec<ClassGoal>, rate: f64) -> Self {
        let rarest = goals.iter().map(|goal| goal.weight).fold(1.0, f64::min).max(1e-3);
        let needed = goals.iter().map(|goal| needed(&rule, goal)).fold(1.0, f64::max);
        let first = rule.first_look as f64 / rarest;
        let longest = needed / rarest * MOST_PER_EFFECTIVE as f64;
        let in_time = rate * (rule.max_seconds - rule.warm_up_seconds).max(rule.min_seconds);
        let last = longest.max(rate * rule.min_seconds * 2.0).min(in_time).max(first);
        RunMonitor {
            looks: Looks::doubling(first as u64, last as u64, rule.confidence),
            rule,
            goals,
            look: 0,
            requests: Vec::new(),
            decided: 0,
            judged: 0,
            counted: None,
            durations: Vec::new(),
            unreachable: 0,
            last: None,
            conclusion: None,
        }
    }

    /// Takes an event of the run at `now`, and returns the next step.
    pub fn note(&mut self, event: &LoadEvent, now: f64) -> RunStep {
        match event {
            LoadEvent::Sent { number, class, at } => {
                debug_assert_eq!(*number, self.requests.len() as u64);
                let at = at.as_secs_f64();
                let watched =
                    Watched { at, class: *class, fate: Fate::Open, latency: f64::INFINITY, end: f64::INFINITY };
                self.requests.push(watched);
            }
            LoadEvent::Overdue { number } => {
                if let Some(watched) = self.requests.get_mut(*number as usize).filter(|seen| seen.fate == Fate::Open) {
                    watched.fate = Fate::Overdue;
                }
            }
            LoadEvent::Ended(record) => self.ended(record),
        }
        if self.conclusion.is_some() {
            return RunStep::Enough;
        }
        if self.unreachable >= GONE_AFTER {
            return RunStep::Gone;
        }
        self.advance();
        self.step(now)
    }

    fn ended(&mut self, record: &LoadRecord) {
        self.unreachable = if record.reason == "upstream_unavailable" { self.unreachable + 1 } else { 0 };
        let Some(watched) = self.requests.get_mut(record.number as usize) else { return };
        watched.fate = match (record.is_judged(), record.is_met()) {
            (false, _) => Fate::Excluded,
            (true, true) => Fate::Met,
            (true, false) => Fate::Missed,
        };
        watched.end = record.end_seconds;
        watched.latency = latency_of(record, &self.goals[watched.class]);
        self.durations.push(watched.end - watched.at);
    }

    /// Moves on over requests that are decided.
    fn advance(&mut self) {
        while let Some(watched) = self.requests.get(self.decided).filter(|watched| watched.is_decided()) {
            if self.counted.is_some_and(|(from, _)| self.decided >= from) && watched.is_judged() {
                self.judged += 1;
            }
            self.decided += 1;
        }
    }

    fn step(&mut self, now: f64) -> RunStep {
        let Some((_, from_seconds)) = self.counted else {
            if self.is_warm(now) {
                self.count_from(self.requests.len(), now);
            }
            return RunStep::GoOn;
        };
        if let Some((to, since)) = self.last {
            // The cool-down has an end, too: it may last as long as the warm-up did.
            if self.decided >= to || now > since + from_seconds {
                self.conclusion = Some(self.so_far(to, since));
                return RunStep::Enough;
            }
            return RunStep::GoOn;
        }
        while let Some(size) = self.looks.sizes().get(self.look).copied().filter(|size| *size <= self.judged) {
            let is_long_enough = now - from_seconds >= self.rule.min_seconds;
            self.look += 1;
            if is_long_enough && self.look_at(size, now) {
                return RunStep::Enough;
            }
        }
        let is_up = now >= self.rule.max_seconds || self.look >= self.looks.sizes().len();
        if is_up && now - from_seconds >= self.rule.min_seconds {
            self.last = Some((self.requests.len(), now));
        }
        RunStep::GoOn
    }

    fn is_warm(&self, now: f64) -> bool {
        let shortest = self.rule.warm_up_seconds;
        if now < shortest {
            return false;
        }
        let mut durations = self.durations.clone();
        durations.sort_by(f64::total_cmp);
        let median = durations.get(durations.len() / 2).copied().unwrap_or_default();
        let has_filled = durations.len() >= ENDED_IN_WARM_UP && now >= DURATIONS_OF_WARM_UP * median;
        has_filled || now >= shortest * LONGEST_WARM_UP
    }

    /// Counts from the request with this number on.
    fn count_from(&mut self, number: usize, at: f64) {
        self.counted = Some((number, at));
        let decided = self.requests.get(number..self.decided.max(number)).unwrap_or_default();
        self.judged = decided.iter().filter(|watched| watched.is_judged()).count() as u64;
    }

    /// Looks at the first `size` judged requests. Whether the run is over.
    fn look_at(&mut self, size: u64, now: f64) -> bool {
        let Some((from, from_seconds)) = self.counted else { return false };
        let judged = self.requests[from..].iter().enumerate().filter(|(_, watched)| watched.is_judged());
        let Some((last, _)) = judged.take(size as usize).last() else { return false };
        let to = from + last + 1;
        let all = self.outcomes(from, to);
        let is_overrun = self.is_overrun(from, to);
        let decide = |(seen, goal): (&Outcomes, &ClassGoal)| match self.looks.decide(seen, goal.target) {
            Decision::Open if is_overrun && seen.attainment() < goal.target => Decision::Below,
            decision => decision,
        };
        let decisions: Vec<Decision> = all.iter().zip(&self.goals).map(decide).collect();
        let fails = decisions.contains(&Decision::Below);
        let clears = decisions.iter().all(|decision| *decision == Decision::Above);
        let is_precise = all.iter().zip(&self.goals).all(|(seen, goal)| seen.effective() >= needed(&self.rule, goal));
        if !fails && !clears && !is_precise {
            return false;
        }
        let (open, latency) = self.trends(from, to, from_seconds);
        let moves = self.moves(open, latency);
        if moves && !fails && now < self.rule.max_seconds {
            // The run may not have settled yet: the first half of the counted period becomes warm-up.
            let middle = from_seconds.midpoint(now);
            let number = self.requests.partition_point(|watched| watched.at < middle);
            self.count_from(number, middle);
            return false;
        }
        let is_decided = fails || clears;
        let reaches = all.iter().zip(&self.goals).all(|(seen, goal)| seen.attainment() >= goal.target);
        let verdict = match (moves, fails, clears || reaches) {
            (true, _, _) => RunVerdict::Unsteady,
            (false, false, true) => RunVerdict::Clears,
            (false, _, _) => RunVerdict::Fails,
        };
        let to_seconds = self.requests[to - 1].at.max(from_seconds);
        self.conclusion =
            Some(RunConclusion { verdict, is_decided, from, to, from_seconds, to_seconds, in_flight: open, latency });
        true
    }

    /// The result of the run so far, up to a request.
    fn so_far(&self, to: usize, to_seconds: f64) -> RunConclusion {
        let (from, from_seconds) = self.counted.unwrap_or((0, 0.0));
        let (in_flight, latency) = self.trends(from, to, from_seconds);
        let (verdict, is_decided) = (RunVerdict::Partial, false);
        RunConclusion { verdict, is_decided, from, to, from_seconds, to_seconds, in_flight, latency }
    }

    /// The result of the run after its drain; `is_whole`: it was not interrupted, and the service did not
    /// fail.
    #[must_use]
    pub fn finish(self, end: f64, is_whole: bool) -> RunConclusion {
        let found = self.conclusion.unwrap_or_else(|| self.so_far(self.requests.len(), end));
        if found.verdict != RunVerdict::Partial || !is_whole {
            return found;
        }
        let all = self.outcomes(found.from, found.to);
        let reaches = |(seen, goal): (&Outcomes, &ClassGoal)| !seen.is_empty() && seen.attainment() >= goal.target;
        let verdict = if self.moves(found.in_flight, found.latency) {
            RunVerdict::Unsteady
        } else if all.iter().zip(&self.goals).all(reaches) {
            RunVerdict::Clears
        } else {
            RunVerdict::Fails
        };
        RunConclusion { verdict, ..found }
    }

    /// Judged requests between two numbers, by class.
    fn outcomes(&self, from: usize, to: usize) -> Vec<Outcomes> {
        let mut all = vec![Outcomes::default(); self.goals.len()];
        for watched in self.requests.get(from..to).unwrap_or_default() {
            if watched.is_judged() {
                all[watched.class].push(watched.fate == Fate::Met, watched.latency);
            }
        }
        all
    }

    fn trends(&self, from: usize, to: usize, from_seconds: f64) -> (Option<Trend>, Option<Trend>) {
        let Some(last) = self.requests.get(from..to).and_then(<[Watched]>::last) else { return (None, None) };
        let to_seconds = last.at;
        let spans: Vec<(f64, f64)> = self.requests.iter().map(|watched| (watched.at, watched.end)).collect();
        let open = Trend::of(in_flight(&spans, from_seconds, to_seconds), from_seconds, to_seconds);
        let counted = &self.requests[from..to];
        let worst = counted.iter().map(|watched| self.scaled(watched)).filter(|latency| latency.is_finite());
        let worst = worst.fold(1.0, f64::max);
        let latencies = counted.iter().map(|watched| (watched.at, self.scaled(watched).min(worst)));
        (open, Trend::of(latencies, from_seconds, to_seconds))
    }

    /// Latency as a share of the class's threshold.
    fn scaled(&self, watched: &Watched) -> f64 {
        watched.latency / self.goals[watched.class].threshold.as_secs_f64().max(1e-9)
    }

    /// Whether more came than went in a stretch of the run, beyond chance.
    fn is_overrun(&self, from: usize, to: usize) -> bool {
        let (Some(first), Some(last)) = (self.requests.get(from), self.requests.get(to.wrapping_sub(1))) else {
            return false;
        };
        let open = |upto: usize, at: f64| self.requests[..upto].iter().filter(|other| other.end > at).count() as f64;
        let growth = open(to, last.at) - open(from, first.at);
        let gaps: Vec<f64> = self.requests[from..to].windows(2).map(|pair| pair[1].at - pair[0].at).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len().max(1) as f64;
        let variation = if mean > 0.0 { variance / (mean * mean) } else { 1.0 };
        grows(growth, (to - from) as f64, variation, self.looks.confidence())
    }

    fn moves(&self, open: Option<Trend>, latency: Option<Trend>) -> bool {
        open.is_some_and(|trend| trend.is_moving(FEW_IN_FLIGHT))
            || latency.is_some_and(|trend| trend.is_moving(LITTLE_LATENCY))
    }
}

/// Independent requests that a class's attainment should rest on.
fn needed(rule: &RunRule, goal: &ClassGoal) -> f64 {
    super::interval::samples_for(goal.target, rule.standard_error) as f64
}

/// TTFT if the class has such an objective, else E2E; infinite if it was not reached.
#[must_use]
pub fn latency_of(record: &LoadRecord, goal: &ClassGoal) -> f64 {
    let latency = if goal.is_ttft { record.ttft_seconds.or(record.e2e_seconds) } else { record.e2e_seconds };
    latency.unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests;
