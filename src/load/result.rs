//! Results of runs and points, as written to the summary. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::interval::{Outcomes, ShareInterval};
use super::monitor::{ClassGoal, RunConclusion, RunVerdict, latency_of};
use super::quantiles::MeasureQuantiles;
use super::record::LoadRecord;
use super::run::RunEnd;
use super::steady::Trend;

/// Send lag beyond this share of the TTFT threshold makes a run invalid.
pub const MOST_LAG: f64 = 0.05;

/// Excluded requests beyond this share make a run invalid: it measured another workload.
const MOST_EXCLUDED: f64 = 0.01;

/// Requests of one class, counted and judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassResult {
    /// Class.
    pub class: String,
    /// Requests that count: met and missed.
    pub judged: u64,
    /// Requests that kept every objective.
    pub met: u64,
    /// Misses by reason.
    pub missed: BTreeMap<String, u64>,
    /// Exclusions by reason.
    pub excluded: BTreeMap<String, u64>,
    /// Share that must be met.
    pub target: f64,
    /// Joint attainment: met / judged. Absent if the run was not steady.
    pub attainment: Option<f64>,
    /// Its interval.
    pub interval: Option<ShareInterval>,
    /// Independent requests that the judged ones are worth.
    pub effective_samples: f64,
    /// Attainment of each objective alone, over the requests on which it was evaluated.
    pub objectives: BTreeMap<String, f64>,
    /// Time to first token.
    pub ttft_seconds: MeasureQuantiles,
    /// Time per output token.
    pub tpot_seconds: MeasureQuantiles,
    /// Largest gap of a response.
    pub itl_max_seconds: MeasureQuantiles,
    /// Time to the end.
    pub e2e_seconds: MeasureQuantiles,
    /// Planned prompt tokens, mean.
    pub planned_input_tokens: f64,
    /// Prompt tokens that the engine reported, mean; absent where it reports none.
    pub reported_input_tokens: Option<f64>,
    /// Share of these that came from the prefix cache, where the engine says so.
    pub reported_hit_share: Option<f64>,
    /// Output cap, mean.
    pub planned_output_tokens: f64,
    /// Mean output tokens of finished responses.
    pub output_tokens: f64,
    /// Answers by the source of their token count.
    pub token_sources: BTreeMap<String, u64>,
    /// Responses that reached the output cap: all, if engines must continue to the planned length.
    pub cut_by_length: u64,
    /// Gaps longer than the class's `stall_seconds`.
    pub stalls: u64,
}

/// Throughput during the counted period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Answers that finished, per second, whether they kept their objectives or not.
    pub requests_per_second: f64,
    /// Requests that were met, per second.
    pub met_per_second: f64,
    /// Output tokens of finished responses, per second.
    pub output_tokens_per_second: f64,
    /// Prompt tokens of finished responses, per second.
    pub input_tokens_per_second: f64,
}

/// One run: one rate, one repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Number of the repetition, from 1.
    pub repetition: u32,
    /// Verdict.
    pub verdict: RunVerdict,
    /// Whether an interval cleared the target before the run's length was up; else the estimate decided.
    pub decided: bool,
    /// Why the run cannot be believed, or how it was cut short.
    pub problems: Vec<String>,
    /// Requests sent, warm-up and cool-down included.
    pub sent: u64,
    /// Length of the warm-up, in seconds.
    pub warm_up_seconds: f64,
    /// Length of the counted stretch, in seconds.
    pub counted_seconds: f64,
    /// Length of the run, drain included, in seconds.
    pub seconds: f64,
    /// 99th percentile of the client's own lateness, over all requests of the run, in seconds.
    pub send_lag_p99_seconds: f64,
    /// The largest of it.
    pub send_lag_max_seconds: f64,
    /// Requests in flight.
    pub in_flight: Option<Trend>,
    /// Latency (TTFT, else E2E) as a share of its threshold.
    pub latency: Option<Trend>,
    /// Throughput.
    pub throughput: Throughput,
    /// Classes, in the order of the workload.
    pub classes: Vec<ClassResult>,
    /// Outcomes by class, for pooling; not written.
    #[serde(skip)]
    pub(super) outcomes: Vec<Outcomes>,
    /// Counted records, for pooling; not written.
    #[serde(skip)]
    pub(super) counted: Vec<LoadRecord>,
}

/// The stretch of its run that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stretch {
    /// Before the counted ones.
    WarmUp,
    /// It counts.
    Counted,
    /// Behind the counted ones: load for them to live under.
    CoolDown,
}

impl Stretch {
    /// As it is written.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Stretch::WarmUp => "warm_up",
            Stretch::Counted => "counted",
            Stretch::CoolDown => "cool_down",
        }
    }

    /// Of the request with this number.
    #[must_use]
    pub const fn of(number: u64, conclusion: &RunConclusion) -> Self {
        if number < conclusion.from as u64 {
            Stretch::WarmUp
        } else if number < conclusion.to as u64 {
            Stretch::Counted
        } else {
            Stretch::CoolDown
        }
    }
}

/// Name and target of a class in results.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedGoal {
    /// Class.
    pub class: String,
    /// Goal.
    pub goal: ClassGoal,
}

impl RunResult {
    /// The result of a run, by its conclusion and all its records, in any order.
    #[must_use]
    pub fn of(
        repetition: u32,
        conclusion: &RunConclusion,
        end: &RunEnd,
        records: &[LoadRecord],
        goals: &[NamedGoal],
        confidence: f64,
    ) -> Self {
        let mut lags: Vec<f64> = records.iter().map(|record| record.send_lag_seconds).collect();
        lags.sort_by(f64::total_cmp);
        let lag_p99 = lags.get((lags.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
        let is_counted = |record: &&LoadRecord| Stretch::of(record.number, conclusion) == Stretch::Counted;
        let mut counted: Vec<LoadRecord> = records.iter().filter(is_counted).cloned().collect();
        counted.sort_by_key(|record| record.number);
        let problems = problems(lag_p99, end, records, &counted, goals);
        let verdict = match conclusion.verdict {
            RunVerdict::Partial => RunVerdict::Partial,
            _ if !problems.is_empty() => RunVerdict::Invalid,
            verdict => verdict,
        };
        let outcomes: Vec<Outcomes> = (0..goals.len()).map(|class| outcomes_of(&counted, class, goals)).collect();
        let has_number = matches!(verdict, RunVerdict::Clears | RunVerdict::Fails);
        let result = |class: usize| {
            let of_class: Vec<&LoadRecord> = counted.iter().filter(|record| record.class_index == class).collect();
            ClassResult::of(&goals[class], &of_class, &outcomes[class], has_number, confidence)
        };
        RunResult {
            repetition,
            verdict,
            decided: conclusion.is_decided,
            problems,
            sent: end.sent,
            warm_up_seconds: conclusion.from_seconds,
            counted_seconds: conclusion.to_seconds - conclusion.from_seconds,
            seconds: end.length.as_secs_f64(),
            send_lag_p99_seconds: lag_p99,
            send_lag_max_seconds: lags.last().copied().unwrap_or_default(),
            in_flight: conclusion.in_flight,
            latency: conclusion.latency,
            throughput: Throughput::of(records, conclusion.from_seconds, conclusion.to_seconds),
            classes: (0..goals.len()).map(result).collect(),
            outcomes,
            counted,
        }
    }
}

/// Why the run cannot be believed.
fn problems(
    lag_p99: f64,
    end: &RunEnd,
    records: &[LoadRecord],
    counted: &[LoadRecord],
    goals: &[NamedGoal],
) -> Vec<String> {
    let mut found = Vec::new();
    let tightest = goals.iter().map(|named| named.goal.threshold.as_secs_f64()).fold(f64::INFINITY, f64::min);
    if lag_p99 > MOST_LAG * tightest {
        found.push(format!(
            "the load generator itself was late: its p99 send lag of {:.1} ms exceeds 5 % of the threshold ({:.0} ms); give it more of a machine",
            lag_p99 * 1e3,
            tightest * 1e3
        ));
    }
    let without_socket = records.iter().filter(|record| record.client_fault).count();
    if without_socket > 0 {
        found.push(format!("{without_socket} requests found no socket on this machine; raise its limit of open files"));
    }
    if end.unsent > 0 {
        found.push(format!(
            "{} requests were not sent, because too many were open: the loop was no longer open",
            end.unsent
        ));
    }
    // An interrupted run leaves its open requests itself.
    let is_own_doing =
        |record: &LoadRecord| end.aborted && record.reason == crate::judge::Excluded::ClientCancel.as_str();
    let is_excluded = |record: &&LoadRecord| !record.is_judged() && !is_own_doing(record);
    let excluded: Vec<&LoadRecord> = counted.iter().filter(is_excluded).collect();
    if excluded.len() as f64 > MOST_EXCLUDED * counted.len() as f64 {
        let reasons = counts(excluded.iter().map(|record| record.reason.as_str()));
        let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{reason}: {count}")).collect();
        let status = excluded.iter().find_map(|record| record.status);
        let status = status.map_or_else(String::new, |status| format!(", the first with status {status}"));
        found.push(format!(
            "{} of {} requests were refused as not the service's fault ({}{status}); what is left is another workload",
            excluded.len(),
            counted.len(),
            reasons.join(", ")
        ));
    }
    found
}

fn outcomes_of(counted: &[LoadRecord], class: usize, goals: &[NamedGoal]) -> Outcomes {
    let mut outcomes = Outcomes::default();
    for record in counted.iter().filter(|record| record.class_index == class && record.is_judged()) {
        outcomes.push(record.is_met(), latency_of(record, &goals[class].goal));
    }
    outcomes
}

fn counts<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    words.for_each(|word| *counts.entry(word.to_owned()).or_default() += 1);
    counts
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

impl ClassResult {
    fn of(named: &NamedGoal, counted: &[&LoadRecord], outcomes: &Outcomes, has_number: bool, confidence: f64) -> Self {
        let judged: Vec<&LoadRecord> = counted.iter().copied().filter(|record| record.is_judged()).collect();
        let missed = judged.iter().filter(|record| !record.is_met());
        let excluded = counted.iter().filter(|record| !record.is_judged());
        let has_number = has_number && !outcomes.is_empty();
        // Failed requests that never reached a point count as the slowest; responses on which a measure is
        // undefined (one token has no TPOT) are left out.
        let measure = |of: fn(&LoadRecord) -> Option<f64>| {
            let values: Vec<f64> = judged.iter().filter_map(|record| of(record)).collect();
            let unreached = judged.iter().filter(|record| of(record).is_none() && record.e2e_seconds.is_none()).count();
            MeasureQuantiles::of(values, unreached)
        };
        let finished = || judged.iter().filter(|record| record.e2e_seconds.is_some());
        let reported = || judged.iter().filter_map(|record| record.input_tokens);
        let cached = || judged.iter().filter_map(|record| Some((record.cached_tokens?, record.input_tokens?)));
        let share = |held: fn(&LoadRecord) -> Option<bool>| {
            let held: Vec<bool> = judged.iter().filter_map(|record| held(record)).collect();
            (!held.is_empty()).then(|| held.iter().filter(|held| **held).count() as f64 / held.len() as f64)
        };
        let objectives = [
            ("ttft", share(|record| record.ttft_held)),
            ("tpot", share(|record| record.tpot_held)),
            ("itl", share(|record| record.itl_held)),
            ("e2e", share(|record| record.e2e_held)),
        ];
        let objectives = objectives.into_iter().filter_map(|(name, share)| Some((name.to_owned(), share?)));
        ClassResult {
            class: named.class.clone(),
            judged: judged.len() as u64,
            met: outcomes.met() as u64,
            missed: counts(missed.map(|record| record.reason.as_str())),
            excluded: counts(excluded.map(|record| record.reason.as_str())),
            target: named.goal.target,
            attainment: has_number.then(|| outcomes.attainment()),
            interval: has_number.then(|| outcomes.interval(confidence)),
            effective_samples: outcomes.effective(),
            objectives: if has_number { objectives.collect() } else { BTreeMap::new() },
            ttft_seconds: measure(|record| record.ttft_seconds),
            tpot_seconds: measure(|record| record.tpot_seconds),
            itl_max_seconds: measure(|record| record.itl_max_seconds),
            e2e_seconds: measure(|record| record.e2e_seconds),
            planned_input_tokens: mean(
                judged.iter().filter_map(|record| record.planned_input_tokens).map(|n| n as f64),
            ),
            reported_input_tokens: reported().next().map(|_| mean(reported().map(|tokens| tokens as f64))),
            reported_hit_share: cached().next().map(|_| {
                let (hits, all) = cached().fold((0, 0), |(hits, all), (hit, of)| (hits + hit, all + of));
                hits as f64 / f64::max(all as f64, 1.0)
            }),
            planned_output_tokens: mean(judged.iter().filter_map(|record| record.output_cap).map(|cap| cap as f64)),
            output_tokens: mean(finished().map(|record| record.output_tokens as f64)),
            token_sources: counts(finished().map(|record| record.token_source.as_str())),
            cut_by_length: finished().filter(|record| record.cut_by_length).count() as u64,
            stalls: judged.iter().map(|record| u64::from(record.stalls)).sum(),
        }
    }
}

impl Throughput {
    fn of(records: &[LoadRecord], from: f64, to: f64) -> Self {
        let length = to - from;
        if length <= 0.0 {
            return Throughput::default();
        }
        let ended = || records.iter().filter(|record| (from..to).contains(&record.end_seconds));
        let finished = || ended().filter(|record| record.e2e_seconds.is_some());
        let per_second = |sum: f64| sum / length;
        let input = |record: &LoadRecord| record.input_tokens.or(record.planned_input_tokens).unwrap_or(0) as f64;
        Throughput {
            requests_per_second: per_second(finished().count() as f64),
            met_per_second: per_second(ended().filter(|record| record.is_met()).count() as f64),
            output_tokens_per_second: per_second(finished().map(|record| record.output_tokens as f64).sum()),
            input_tokens_per_second: per_second(finished().map(input).sum()),
        }
    }

    fn mean(all: &[Throughput]) -> Self {
        Throughput {
            requests_per_second: mean(all.iter().map(|one| one.requests_per_second)),
            met_per_second: mean(all.iter().map(|one| one.met_per_second)),
            output_tokens_per_second: mean(all.iter().map(|one| one.output_tokens_per_second)),
            input_tokens_per_second: mean(all.iter().map(|one| one.input_tokens_per_second)),
        }
    }
}

/// All runs at one rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PointResult {
    /// Offered rate, in requests per second.
    pub rate: f64,
    /// Verdict on all runs together.
    pub verdict: RunVerdict,
    /// Mean over the runs.
    pub throughput: Throughput,
    /// Classes over all runs.
    pub classes: Vec<ClassResult>,
    /// The runs.
    pub runs: Vec<RunResult>,
}

impl PointResult {
    /// Pools the runs at a rate. One run that cannot be believed, was cut short or did not settle decides for all;
    /// else the pooled attainment does.
    #[must_use]
    pub fn of(rate: f64, runs: Vec<RunResult>, goals: &[NamedGoal], confidence: f64) -> Self {
        let has = |verdict| runs.iter().any(|run| run.verdict == verdict);
        let outcomes: Vec<Outcomes> = (0..goals.len())
            .map(|class| {
                let mut all = Outcomes::default();
                runs.iter().for_each(|run| all.append(&run.outcomes[class]));
                all
            })
            .collect();
        let reaches =
            |(seen, named): (&Outcomes, &NamedGoal)| !seen.is_empty() && seen.attainment() >= named.goal.target;
        let verdict = match () {
            () if has(RunVerdict::Invalid) => RunVerdict::Invalid,
            () if has(RunVerdict::Partial) || runs.is_empty() => RunVerdict::Partial,
            () if has(RunVerdict::Unsteady) => RunVerdict::Unsteady,
            () if outcomes.iter().zip(goals).all(reaches) => RunVerdict::Clears,
            () => RunVerdict::Fails,
        };
        let has_number = matches!(verdict, RunVerdict::Clears | RunVerdict::Fails);
        let result = |class: usize| {
            let counted = runs.iter().flat_map(|run| &run.counted).filter(|record| record.class_index == class);
            let counted: Vec<&LoadRecord> = counted.collect();
            ClassResult::of(&goals[class], &counted, &outcomes[class], has_number, confidence)
        };
        let classes = (0..goals.len()).map(result).collect();
        let flows: Vec<Throughput> = runs.iter().map(|run| run.throughput).collect();
        // Pooled, the records are not needed any more, and there are many.
        let bare = |run| RunResult { counted: Vec::new(), outcomes: Vec::new(), ..run };
        let runs = runs.into_iter().map(bare).collect();
        PointResult { rate, verdict, throughput: Throughput::mean(&flows), classes, runs }
    }

    /// Margin of a repetition's attainment over its target, in the class with the smallest; `None` if a run
    /// was not steady.
    #[must_use]
    pub fn margin(&self, repetition: usize) -> Option<f64> {
        let run = self.runs.get(repetition)?;
        let margins = run.classes.iter().map(|class| class.attainment.map(|attainment| attainment - class.target));
        margins.collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)
    }
}
