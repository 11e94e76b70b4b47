//! Fits the step times of a simulated engine to what a real one did under measured load.
//!
//! The same arrivals with the same lengths are played against the simulation, and its times, per request and per step,
//! and its batch are searched (Nelder and Mead, on logarithms) until percentiles of TTFT, TPOT and E2E agree. Every
//! other rate is held out: its error says what the model is worth at rates that it was not fitted to.

use std::time::Duration;

use serde::Serialize;

use super::mix::{Arrival, Machine, Mix, PromptLength, RecordedClass, SharedPrefix, StepTimes};
use super::policy::Policy;
use super::simulation::{Scenario, replay};
use crate::judge::Objectives;
use crate::sim::engine::EngineSpec;
use crate::trace::PromptBlocks;
use crate::types::{Priority, TenantId, Tick};

/// One request of a measured run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredRequest {
    /// Its scheduled time, from the start of the run.
    pub at: Duration,
    /// Prompt tokens that had to be computed.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// TTFT in seconds; `None` where it was not reached.
    pub ttft: Option<f64>,
    /// TPOT, likewise.
    pub tpot: Option<f64>,
    /// E2E, likewise.
    pub e2e: Option<f64>,
}

/// A run of a sweep at one rate, its requests in order of time.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredRun {
    /// Requests per second.
    pub rate: f64,
    /// Its requests.
    pub requests: Vec<MeasuredRequest>,
}

/// A percentile as it was measured and as it is simulated, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FittedPercentile {
    /// Its name: `ttft_p50`.
    pub name: &'static str,
    /// Measured.
    pub measured: f64,
    /// Simulated.
    pub simulated: f64,
}

/// How the simulation compares with a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunFit {
    /// Requests per second.
    pub rate: f64,
    /// Requests.
    pub requests: usize,
    /// Whether the fit has seen the run.
    pub is_fitted: bool,
    /// Percentiles that were measured.
    pub percentiles: Vec<FittedPercentile>,
    /// Mean of |ln(simulated / measured)| as a factor minus 1: 0.1 is off by 10 % on average.
    pub error: f64,
}

/// An engine's model, and how far off it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineFit {
    /// Properties.
    pub machine: Machine,
    /// The runs, by rate.
    pub runs: Vec<RunFit>,
    /// Mean error of the runs that were fitted.
    pub fitted_error: f64,
    /// Mean error of the runs that were held out.
    pub held_out_error: f64,
}

/// Measurements that no model can be fitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotFit {
    /// Too few rates.
    #[error(
        "there are {0} rates with at least {LEAST} finished requests; a fit needs 2, and 3 or more to be worth something"
    )]
    TooFewRates(usize),
}

/// Finished requests of a run, at the least.
pub const LEAST: usize = 20;

/// Requests of a run that are played, at most: the first ones.
const MOST: usize = 500;

/// Times that the search asks the simulation.
const EVALUATIONS: usize = 500;

/// Loss of a percentile that the simulation does not reach.
const NOT_REACHED: f64 = 5.0;

/// Fits an engine of which `replicas` ran behind one address. `base` has the sizes that are not fitted.
///
/// # Errors
/// Too few runs.
pub fn fit_engine(runs: &[MeasuredRun], replicas: usize, base: &Machine) -> Result<EngineFit, CannotFit> {
    let finished = |run: &MeasuredRun| run.requests.iter().filter(|request| request.e2e.is_some()).count();
    let mut runs: Vec<MeasuredRun> = runs.iter().filter(|run| finished(run) >= LEAST).cloned().collect();
    if runs.len() < 2 {
        return Err(CannotFit::TooFewRates(runs.len()));
    }
    runs.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    runs.iter_mut().for_each(|run| run.requests.truncate(MOST));
    let arrivals: Vec<Vec<Arrival>> = runs.iter().map(arrivals_of).collect();
    let is_fitted = |number: usize| number.is_multiple_of(2);
    let longest = runs.iter().flat_map(|run| &run.requests).map(|request| request.input + request.output).max();
    let base = Machine {
        max_model_len: base.max_model_len.max(longest.unwrap_or(1) + 1),
        kv_tokens: base.kv_tokens.max(4 * longest.unwrap_or(1)),
        ..*base
    };
    let loss = |place: &[f64]| {
        let machine = machine_at(&base, place);
        let fitted = (0..runs.len()).filter(|number| is_fitted(*number));
        let squares = fitted.map(|number| squares_of(&compare(&runs[number], &arrivals[number], replicas, &machine)));
        squares.sum::<f64>()
    };
    // Begun again from where it ended, a simplex gets out of a place where it has become flat.
    let found = minimum(loss, &first_guess(&runs, replicas), 0.7, EVALUATIONS / 2);
    let found = minimum(loss, &found, -0.4, EVALUATIONS / 2);
    let machine = machine_at(&base, &found);
    let all: Vec<RunFit> = (0..runs.len())
        .map(|number| {
            let percentiles = compare(&runs[number], &arrivals[number], replicas, &machine);
            let error = loss_of(&percentiles).exp() - 1.0;
            RunFit {
                rate: runs[number].rate,
                requests: runs[number].requests.len(),
                is_fitted: is_fitted(number),
                percentiles,
                error,
            }
        })
        .collect();
    let mean = |fitted: bool| {
        let errors: Vec<f64> = all.iter().filter(|run| run.is_fitted == fitted).map(|run| run.error).collect();
        errors.iter().sum::<f64>() / errors.len().max(1) as f64
    };
    Ok(EngineFit { machine, fitted_error: mean(true), held_out_error: mean(false), runs: all })
}

fn arrivals_of(run: &MeasuredRun) -> Vec<Arrival> {
    let tenant = TenantId::anonymous();
    let arrival = |request: &MeasuredRequest| Arrival {
        at: Tick::ZERO + request.at,
        flow: 0,
        tenant: tenant.clone(),
        prompt: request.input.max(1),
        shown: PromptLength::Tokens(request.input),
        cap: None,
        output: request.output.max(1),
        likeness: SharedPrefix::default(),
        recorded: PromptBlocks::default(),
        line: 0,
        model: None,
        route: None,
    };
    run.requests.iter().map(arrival).collect()
}

/// Parameters are logarithms: of times in milliseconds, and of the batch.
const PARAMETERS: usize = 5;

fn machine_at(base: &Machine, place: &[f64]) -> Machine {
    let value = |number: usize| place[number].exp();
    let step = StepTimes {
        base_ms: value(0),
        per_request_ms: value(1),
        per_prefill_token_ms: value(2),
        per_context_token_ms: value(3),
        attention_doubles_at: base.step.map_or(1_000_000_000, |step| step.attention_doubles_at),
    };
    Machine { max_running: (value(4).round() as usize).clamp(1, 4096), step: Some(step), ..*base }
}

/// From the slowest run: a request that is nearly alone shows the times of a step; from the fastest: most at one time.
fn first_guess(runs: &[MeasuredRun], replicas: usize) -> [f64; PARAMETERS] {
    let calm = &runs[0].requests;
    let middle = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let tpot = middle(calm.iter().filter_map(|request| request.tpot).collect());
    let per_output = calm.iter().filter_map(|request| Some(request.e2e? / request.output.max(1) as f64));
    let tpot_ms = tpot.or_else(|| middle(per_output.collect())).unwrap_or(0.02) * 1e3;
    let per_input = calm.iter().filter_map(|request| Some(request.ttft? / request.input.max(1) as f64));
    let prefill_ms = middle(per_input.collect()).unwrap_or(tpot_ms / 1e4) * 1e3;
    let context = middle(calm.iter().map(|request| (request.input + request.output) as f64).collect());
    let ends = |request: &MeasuredRequest| request.at.as_secs_f64() + request.e2e.unwrap_or(0.0);
    let most = runs.iter().map(|run| {
        let open =
            |at: f64| run.requests.iter().filter(|other| other.at.as_secs_f64() <= at && ends(other) > at).count();
        run.requests.iter().map(|request| open(request.at.as_secs_f64())).max().unwrap_or(1)
    });
    let batch = (most.max().unwrap_or(1) as f64 / replicas as f64).clamp(2.0, 128.0);
    let logs = [0.8 * tpot_ms, 0.02 * tpot_ms, 0.7 * prefill_ms, 0.05 * tpot_ms / context.unwrap_or(500.0), batch];
    logs.map(|value| value.max(1e-9).ln())
}

/// Plays a run against a machine; percentiles that were measured.
fn compare(run: &MeasuredRun, arrivals: &[Arrival], replicas: usize, machine: &Machine) -> Vec<FittedPercentile> {
    let patience = Duration::from_secs(1_000_000);
    let class = RecordedClass {
        name: "all".to_owned(),
        priority: Priority::Normal,
        objectives: Objectives::default(),
        patience,
        whole_patience: patience,
    };
    let mix = Mix::recorded(replicas, &[class], 1);
    let spec = EngineSpec { jitter: 0.0, ..machine.spec() };
    let patient = Scenario { patient: true, ..Scenario::default() };
    let mut seen: [Vec<f64>; 3] = Default::default();
    let seconds = |length: Option<Duration>| length.map(|length| length.as_secs_f64());
    replay(&mix, &Policy::LeastConnections, arrivals.iter().cloned(), &spec, 16, &patient, |told| {
        seen[0].extend(seconds(told.ttft));
        seen[1].extend(seconds(told.tpot));
        seen[2].extend(seconds(told.e2e));
    });
    let measured = |of: fn(&MeasuredRequest) -> Option<f64>| run.requests.iter().filter_map(of).collect::<Vec<f64>>();
    let measured = [measured(|one| one.ttft), measured(|one| one.tpot), measured(|one| one.e2e)];
    let names = [["ttft_p50", "ttft_p90"], ["tpot_p50", "tpot_p90"], ["e2e_p50", "e2e_p90"]];
    let mut found = Vec::new();
    for ((measured, simulated), names) in measured.into_iter().zip(seen).zip(names) {
        for (name, share) in names.into_iter().zip([0.5, 0.9]) {
            let Some(measured) = at_share(measured.clone(), share).filter(|value| *value > 0.0) else { continue };
            let simulated = at_share(simulated.clone(), share).unwrap_or(f64::INFINITY);
            found.push(FittedPercentile { name, measured, simulated });
        }
    }
    found
}

fn at_share(mut values: Vec<f64>, share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1))).copied()
}

/// Distance of logarithms.
fn distance(one: &FittedPercentile) -> f64 {
    (one.simulated.max(1e-9) / one.measured).ln().abs().min(NOT_REACHED)
}

/// Mean distance.
fn loss_of(percentiles: &[FittedPercentile]) -> f64 {
    percentiles.iter().map(distance).sum::<f64>() / percentiles.len().max(1) as f64
}

/// Mean square of distances, which has a slope wherever it is not 0.
fn squares_of(percentiles: &[FittedPercentile]) -> f64 {
    percentiles.iter().map(|one| distance(one).powi(2)).sum::<f64>() / percentiles.len().max(1) as f64
}

/// The place of the least loss that Nelder and Mead's simplex finds.
fn minimum(loss: impl Fn(&[f64]) -> f64, from: &[f64], step: f64, evaluations: usize) -> Vec<f64> {
    let mut left = evaluations;
    let mut ask = |place: Vec<f64>| {
        left = left.saturating_sub(1);
        (loss(&place), place, left)
    };
    let mut simplex: Vec<(f64, Vec<f64>)> = Vec::new();
    for number in 0..=PARAMETERS {
        let mut place = from.to_vec();
        if number > 0 {
            place[number - 1] += step;
        }
        let (value, place, _) = ask(place);
        simplex.push((value, place));
    }
    loop {
        simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
        let worst = simplex[PARAMETERS].clone();
        let middle: Vec<f64> = (0..PARAMETERS)
            .map(|at| simplex[..PARAMETERS].iter().map(|(_, place)| place[at]).sum::<f64>() / PARAMETERS as f64)
            .collect();
        let along = |by: f64| -> Vec<f64> {
            middle.iter().zip(&worst.1).map(|(middle, worst)| middle + by * (middle - worst)).collect()
        };
        let (reflected, place, left) = ask(along(1.0));
        if left == 0 {
            return simplex.swap_remove(0).1;
        }
        let better = if reflected < simplex[0].0 {
            let (expanded, further, _) = ask(along(2.0));
            if expanded < reflected { (expanded, further) } else { (reflected, place) }
        } else if reflected < simplex[PARAMETERS - 1].0 {
            (reflected, place)
        } else {
            let (contracted, nearer, _) = ask(along(if reflected < worst.0 { 0.5 } else { -0.5 }));
            (contracted, nearer)
        };
        if better.0 < worst.0 {
            simplex[PARAMETERS] = better;
            continue;
        }
        let best = simplex[0].1.clone();
        for vertex in &mut simplex[1..] {
            let place = vertex.1.iter().zip(&best).map(|(own, best)| best + 0.5 * (own - best)).collect();
            let (value, place, _) = ask(place);
            *vertex = (value, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// An engine that the fit does not know.
    const TRUTH: Machine = Machine {
        max_running: 8,
        step_tokens: 512,
        kv_tokens: 100_000,
        max_model_len: 8192,
        step: Some(StepTimes {
            base_ms: 12.0,
            per_request_ms: 0.8,
            per_prefill_token_ms: 0.11,
            per_context_token_ms: 0.0004,
            attention_doubles_at: 1_000_000_000,
        }),
    };

    fn measured(rate: f64, count: usize) -> MeasuredRun {
        let mut chance = StdRng::seed_from_u64(rate.to_bits());
        let mut at = 0.0;
        let mut requests: Vec<MeasuredRequest> = (0..count)
            .map(|_| {
                at -= (1.0 - chance.random::<f64>()).ln() / rate;
                let (input, output) = (chance.random_range(50..900), chance.random_range(10..80));
                let at = Duration::from_secs_f64(at);
                MeasuredRequest { at, input, output, ttft: None, tpot: None, e2e: None }
            })
            .collect();
        let run = MeasuredRun { rate, requests: requests.clone() };
        let mut arrivals = arrivals_of(&run);
        arrivals.iter_mut().enumerate().for_each(|(number, arrival)| arrival.line = number as u64);
        let class = RecordedClass {
            name: "all".to_owned(),
            priority: Priority::Normal,
            objectives: Objectives::default(),
            patience: Duration::from_secs(10_000),
            whole_patience: Duration::from_secs(10_000),
        };
        let mix = Mix::recorded(1, &[class], 1);
        let spec = EngineSpec { jitter: 0.0, ..TRUTH.spec() };
        let patient = Scenario { patient: true, ..Scenario::default() };
        replay(&mix, &Policy::LeastConnections, arrivals.into_iter(), &spec, 16, &patient, |told| {
            let request = &mut requests[told.line as usize];
            request.ttft = told.ttft.map(|length| length.as_secs_f64());
            request.tpot = told.tpot.map(|length| length.as_secs_f64());
            request.e2e = told.e2e.map(|length| length.as_secs_f64());
        });
        MeasuredRun { rate, requests }
    }

    #[test]
    fn an_engine_of_the_model_is_found_again_and_predicted_at_rates_that_were_held_out() {
        let runs: Vec<MeasuredRun> = [0.5, 2.0, 3.5, 5.0, 6.5].map(|rate| measured(rate, 120)).to_vec();
        let base = Machine { max_running: 1, step: None, ..TRUTH };
        let found = fit_engine(&runs, 1, &base).unwrap();
        assert_eq!(found.runs.iter().map(|run| run.is_fitted).collect::<Vec<_>>(), [true, false, true, false, true]);
        assert!(found.fitted_error < 0.05, "{found:?}");
        assert!(found.held_out_error < 0.08, "{found:?}");
        let other = Machine { step: found.machine.step.map(|step| StepTimes { base_ms: 24.0, ..step }), ..TRUTH };
        let off = loss_of(&compare(&runs[1], &arrivals_of(&runs[1]), 1, &other));
        assert!(off > 0.3, "an engine that is half as fast would have shown: {off}");
    }

    #[test]
    fn measurements_at_one_rate_or_of_requests_that_failed_say_too_little() {
        let one = measured(2.0, 60);
        let base = Machine { step: None, ..TRUTH };
        assert_eq!(fit_engine(std::slice::from_ref(&one), 1, &base), Err(CannotFit::TooFewRates(1)));
        let mut failed = measured(4.0, 60);
        failed.requests.iter_mut().for_each(|request| request.e2e = None);
        assert_eq!(fit_engine(&[one, failed], 1, &base), Err(CannotFit::TooFewRates(1)));
    }
}
