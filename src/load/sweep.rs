//! The order of a sweep: which rate is measured next, and what goodput follows. Pure.
//!
//! At every rate the run is repeated; the runs together say whether the rate clears, and so where the search goes. The
//! goodput is the highest rate that was measured to clear. How sure it is shows in two ways: by the interval of the
//! attainment at the rates around it, and by where each repetition by itself would have put it.

use serde::{Deserialize, Serialize};

use super::interval::ShareInterval;
use super::monitor::RunVerdict;
use super::result::{NamedGoal, PointResult, RunResult};
use super::search::{KneeSearch, SearchSettings, crossing};
use super::workload::CacheState;

/// GoodputResult that differs by more than this share between repetitions is noise.
const NOISE: f64 = 0.1;

/// Repetitions below which nothing is said of noise, and so nothing published.
const FEWEST_REPETITIONS: u32 = 3;

/// Which rates are measured.
#[derive(Clone, Debug, PartialEq)]
pub enum RatePlan {
    /// Those that the search for the knee asks for.
    Search(SearchSettings),
    /// These, ascending.
    Fixed(Vec<f64>),
}

/// A sweep before it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepPlan {
    /// Rates.
    pub rates: RatePlan,
    /// Runs at each rate.
    pub repetitions: u32,
    /// Cache states, one search each.
    pub caches: Vec<CacheState>,
    /// Classes with their targets.
    pub goals: Vec<NamedGoal>,
    /// Confidence of intervals.
    pub confidence: f64,
    /// Replicas behind the address.
    pub replicas: u32,
    /// GPUs of a replica.
    pub gpus_per_replica: f64,
}

/// A run that is to be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NextRun {
    /// State of caches.
    pub cache: CacheState,
    /// Requests per second.
    pub rate: f64,
    /// Number of the repetition, from 1.
    pub repetition: u32,
    /// Number of the run in the sweep, from 0: its seeds follow from it.
    pub number: u64,
}

/// A sweep on its way.
#[derive(Debug)]
pub struct SweepProgress {
    plan: SweepPlan,
    /// Index of the cache state.
    cache: usize,
    search: KneeSearch,
    /// Runs at the present rate.
    runs: Vec<RunResult>,
    rate: Option<f64>,
    points: Vec<PointResult>,
    results: Vec<CacheResult>,
    /// Runs made.
    number: u64,
    is_over: bool,
}

impl SweepProgress {
    /// A sweep of which nothing has been measured.
    #[must_use]
    pub fn new(plan: SweepPlan) -> Self {
        let search = new_search(&plan);
        SweepProgress {
            plan,
            cache: 0,
            search,
            runs: Vec::new(),
            rate: None,
            points: Vec::new(),
            results: Vec::new(),
            number: 0,
            is_over: false,
        }
    }

    /// The run to make next; `None`: the sweep is done.
    #[must_use]
    pub fn next_run(&mut self) -> Option<NextRun> {
        loop {
            let cache = *self.plan.caches.get(self.cache).filter(|_| !self.is_over)?;
            let Some(rate) = self.rate.or_else(|| self.next_rate()) else {
                self.end_cache();
                continue;
            };
            self.rate = Some(rate);
            let repetition = self.runs.len() as u32 + 1;
            return Some(NextRun { cache, rate, repetition, number: self.number });
        }
    }

    fn next_rate(&self) -> Option<f64> {
        match &self.plan.rates {
            RatePlan::Search(_) => self.search.next_rate(),
            RatePlan::Fixed(rates) => rates.get(self.points.len()).copied(),
        }
    }

    /// Takes the result of the requested run. An invalid run ends the search in its cache state, an aborted
    /// one ends the sweep.
    pub fn note(&mut self, result: RunResult) {
        self.number += 1;
        let verdict = result.verdict;
        self.runs.push(result);
        let is_hopeless = matches!(verdict, RunVerdict::Invalid | RunVerdict::Partial);
        if self.runs.len() as u32 >= self.plan.repetitions || is_hopeless {
            let (runs, rate) = (std::mem::take(&mut self.runs), self.rate.take().unwrap_or_default());
            let point = PointResult::of(rate, runs, &self.plan.goals, self.plan.confidence);
            self.search.note(rate, point.verdict == RunVerdict::Clears);
            self.points.push(point);
        }
        if verdict == RunVerdict::Partial {
            self.stop();
        } else if verdict == RunVerdict::Invalid {
            self.end_cache();
        }
    }

    /// Ends the sweep now.
    pub fn stop(&mut self) {
        if !self.runs.is_empty() {
            let (runs, rate) = (std::mem::take(&mut self.runs), self.rate.take().unwrap_or_default());
            self.points.push(PointResult::of(rate, runs, &self.plan.goals, self.plan.confidence));
        }
        if self.is_over {
            return;
        }
        self.is_over = true;
        if self.cache < self.plan.caches.len() {
            self.end_cache();
        }
    }

    fn end_cache(&mut self) {
        let Some(cache) = self.plan.caches.get(self.cache).copied() else { return };
        self.cache += 1;
        let mut points = std::mem::take(&mut self.points);
        points.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        let is_whole = !self.is_over && self.runs.is_empty();
        let goodput = GoodputResult::of(&points, &self.plan, is_whole);
        self.results.push(CacheResult { cache, goodput, points });
        self.search = new_search(&self.plan);
    }

    /// The points measured so far in the present cache state.
    #[must_use]
    pub fn points(&self) -> &[PointResult] {
        &self.points
    }

    /// The results so far: those of finished cache states, and the points of the current one.
    #[must_use]
    pub fn so_far(&self) -> Vec<CacheResult> {
        let mut results = self.results.clone();
        if let Some(cache) = self.plan.caches.get(self.cache).filter(|_| !self.points.is_empty()) {
            let mut points = self.points.clone();
            points.sort_by(|a, b| a.rate.total_cmp(&b.rate));
            results.push(CacheResult { cache: *cache, goodput: GoodputResult::of(&points, &self.plan, false), points });
        }
        results
    }

    /// The results of all cache states that were begun. The sweep must be over.
    #[must_use]
    pub fn results(mut self) -> Vec<CacheResult> {
        if !self.points.is_empty() || !self.runs.is_empty() {
            self.stop();
        }
        self.results
    }
}

fn new_search(plan: &SweepPlan) -> KneeSearch {
    let unused = SearchSettings { start: 1.0, growth: 2.0, tolerance: 0.03, lowest: 1.0, highest: 1.0 };
    match &plan.rates {
        RatePlan::Search(settings) => KneeSearch::new(*settings),
        RatePlan::Fixed(_) => KneeSearch::new(unused),
    }
}

/// One cache state: its points and its goodput.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheResult {
    /// State.
    pub cache: CacheState,
    /// GoodputResult.
    pub goodput: GoodputResult,
    /// Points, by rate.
    pub points: Vec<PointResult>,
}

/// Verdict on goodput.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoodputStatus {
    /// It is a number.
    Published,
    /// Repetitions disagree.
    Noise,
    /// Too few repetitions to separate noise from a number.
    NotRepeated,
    /// The highest rate that was tried still clears.
    AboveRange,
    /// The lowest rate that was tried does not clear.
    BelowRange,
    /// A run cannot be believed.
    Invalid,
    /// The sweep was cut short.
    Partial,
}

/// The highest rate that clears the target, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoodputResult {
    /// Status. Only `published` comes with a number.
    pub status: GoodputStatus,
    /// Why, in words.
    pub explanation: String,
    /// Requests per second.
    pub requests_per_second: Option<f64>,
    /// Requests per second and replica.
    pub per_replica: Option<f64>,
    /// Requests per second and GPU.
    pub per_gpu: Option<f64>,
    /// From the highest rate whose interval lies above the target to the lowest rate whose interval lies below it.
    pub rate_interval: Option<ShareInterval>,
    /// Highest rate up to which every measured one clears.
    pub highest_clearing: Option<f64>,
    /// Lowest measured rate that does not.
    pub lowest_failing: Option<f64>,
    /// Rates at which single repetitions cross the target.
    pub repetitions: Vec<f64>,
    /// Largest difference of these, as a share of their median.
    pub spread: Option<f64>,
}

impl GoodputResult {
    /// Goodput by these points, sorted by rate.
    #[must_use]
    pub fn of(points: &[PointResult], plan: &SweepPlan, is_whole: bool) -> Self {
        let judged = |verdict| points.iter().find(|point| point.verdict == verdict);
        let highest_clearing = points.iter().take_while(|point| point.verdict == RunVerdict::Clears).last();
        let highest_clearing = highest_clearing.map(|point| point.rate);
        let fails = |point: &&PointResult| matches!(point.verdict, RunVerdict::Fails | RunVerdict::Unsteady);
        let lowest_failing = points.iter().find(fails).map(|point| point.rate);
        let repetitions = crossings(points, plan.repetitions);
        let spread = spread(&repetitions);
        let (status, explanation) = match (highest_clearing, lowest_failing) {
            _ if !is_whole || judged(RunVerdict::Partial).is_some() => {
                (GoodputStatus::Partial, "the sweep was cut short; what was measured until then is below".to_owned())
            }
            _ if judged(RunVerdict::Invalid).is_some() => {
                let problems = judged(RunVerdict::Invalid).and_then(|point| point.runs.last());
                let problems = problems.map(|run| run.problems.join("; ")).unwrap_or_default();
                (GoodputStatus::Invalid, problems)
            }
            (None, None) => (GoodputStatus::Partial, "nothing was measured".to_owned()),
            (None, Some(lowest)) => {
                let text =
                    format!("the lowest rate tried, {} requests/s, does not clear; try lower ones", short(lowest));
                (GoodputStatus::BelowRange, text)
            }
            (Some(highest), None) => {
                let text =
                    format!("the highest rate tried, {} requests/s, still clears; try higher ones", short(highest));
                (GoodputStatus::AboveRange, text)
            }
            (Some(_), Some(_)) if plan.repetitions < FEWEST_REPETITIONS => {
                let text = format!(
                    "{} repetitions do not tell noise from a number; run {FEWEST_REPETITIONS}",
                    plan.repetitions
                );
                (GoodputStatus::NotRepeated, text)
            }
            (Some(_), Some(_)) if spread.is_none_or(|spread| spread > NOISE) => {
                let text = match spread {
                    Some(spread) => format!(
                        "goodput varies by {:.0} % between repetitions, more than {:.0} %: that is noise, no number",
                        spread * 100.0,
                        NOISE * 100.0
                    ),
                    None => "no repetition by itself crosses the target".to_owned(),
                };
                (GoodputStatus::Noise, text)
            }
            (Some(clears), Some(fails)) => {
                let text = format!("{} requests/s clear, {} do not", short(clears), short(fails));
                (GoodputStatus::Published, text)
            }
        };
        let number = highest_clearing.filter(|_| status == GoodputStatus::Published);
        let per_replica = number.map(|rate| rate / f64::from(plan.replicas.max(1)));
        GoodputResult {
            status,
            explanation,
            requests_per_second: number,
            per_replica,
            per_gpu: per_replica.map(|rate| rate / plan.gpus_per_replica),
            rate_interval: rate_interval(points),
            highest_clearing,
            lowest_failing,
            repetitions,
            spread,
        }
    }
}

/// A rate as it is read.
fn short(rate: f64) -> String {
    let digits = if rate < 10.0 { 2 } else { 1 };
    format!("{rate:.digits$}")
}

/// Rates at which single repetitions cross: the last rate if a repetition never failed, the first if it never
/// cleared.
fn crossings(points: &[PointResult], repetitions: u32) -> Vec<f64> {
    let of = |repetition: usize| {
        let mut seen = Vec::new();
        for point in points {
            let Some(run) = point.runs.get(repetition) else { continue };
            match run.verdict {
                RunVerdict::Clears | RunVerdict::Fails => seen.push((point.rate, point.margin(repetition))),
                RunVerdict::Unsteady => seen.push((point.rate, None)),
                RunVerdict::Invalid | RunVerdict::Partial => {}
            }
        }
        crossing(&seen)
    };
    (0..repetitions as usize).filter_map(of).collect()
}

/// Largest difference, as a share of the median; `None` of fewer than two.
fn spread(rates: &[f64]) -> Option<f64> {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (first, last) = (sorted.first()?, sorted.last()?);
    (sorted.len() > 1).then(|| (last - first) / sorted[sorted.len() / 2])
}

/// The rates between which the true knee lies, by the intervals: up to the first every rate is surely above
/// its target, from the second on one is surely below.
fn rate_interval(points: &[PointResult]) -> Option<ShareInterval> {
    let is_above = |point: &&PointResult| {
        let mut all = point.classes.iter().map(|class| class.interval.is_some_and(|at| at.low > class.target));
        point.verdict == RunVerdict::Clears && all.all(|is_above| is_above)
    };
    let is_below = |point: &&PointResult| {
        let mut all = point.classes.iter().map(|class| class.interval.is_some_and(|at| at.high < class.target));
        point.verdict == RunVerdict::Unsteady || (point.verdict == RunVerdict::Fails && all.any(|is_below| is_below))
    };
    let low = points.iter().take_while(is_above).last()?.rate;
    let high = points.iter().find(|point| point.rate > low && is_below(point))?.rate;
    Some(ShareInterval { low, high })
}
