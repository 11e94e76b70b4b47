//! A model of one engine, learned online from what the gateway sees anyway: how long a step of the
//! engine takes, and how long the first token of a request will take.
//!
//! Pure. An engine with continuous batching works in steps. A step gives every running sequence one
//! token and spends the rest of its token budget on prefill (Yu et al., *Orca*, OSDI 2022; Agrawal
//! et al., *Sarathi-Serve*, OSDI 2024). Its length is close to linear in the sequences and in the
//! prompt tokens of the step, and the time per output token of an answer is the mean length of the
//! steps that it ran through:
//!
//! `TPOT = base + per_sequence * mean batch + per_prompt_token * prompt tokens per step`
//!
//! The gateway knows these without looking at single tokens: from two counters of the engine (the
//! integral of running sequences over time, and the prompt tokens whose first token has come), read
//! at the first and at the last token of an answer, and from the length of the answer. Prompt tokens
//! are counted as estimated, so that `per_prompt_token` already contains what the prefix cache saves.
//!
//! The time to the first token is fitted to the request's own prompt, the prompt tokens ahead of it,
//! and the sequences that run.
//!
//! Both are non-negative linear models, fitted as answers end by recursive least squares
//! with forgetting (Ljung and Söderström, *Theory and Practice of Recursive Identification*,
//! 1983), with four changes that latencies ask for:
//!
//! - What is fitted is the *logarithm*: an answer twice as late as expected weighs the same at
//!   50 ms and at 5 s. The step is Gauss-Newton's: the regressor is the model's gradient.
//! - An answer weighs by its length, because one prefill step decides the pace of three tokens and
//!   the mean step that of a hundred.
//! - Residuals are cut at a multiple of their usual size (Huber's M-estimator; in recursive
//!   form Kovačević, Banjac and Kovačević, *EURASIP J. Adv. Signal Process.* 2016:37), so that
//!   one answer that hung for a minute changes nothing.
//! - Forgetting is directional: an answer replaces what was known about situations like its own
//!   and nothing else (Cao and Schwartz, *Automatica* 36, 2000). With plain forgetting a night
//!   of short prompts would forget what long ones take.
//!
//! Coefficients never become negative: they are put back to the nearest point that is not.
//!
//! If nearly all recent residuals lie on one side, the engine has changed: then everything is
//! forgotten quickly until they no longer do (a variable forgetting factor, as Fortescue, Kershenbaum and Ydstie,
//! *Automatica* 17, 1981, with a plainer trigger).
//!
//! Until [`ENOUGH`] answers were seen there is no prediction, and the caller does without.

use std::time::Duration;

use crate::units::Tokens;

/// Answers from which an engine's figures are used.
pub const ENOUGH: u32 = 32;

/// What an engine has to do when a request is dispatched to it, the request included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Situation {
    /// The request's own prompt.
    pub prompt: Tokens,
    /// Prompt tokens of earlier requests that have no first token yet.
    pub prefill: Tokens,
    /// Output tokens that earlier requests are expected to bring still.
    pub decode: Tokens,
    /// Requests, this one included.
    pub batch: u32,
}

/// What a request would see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// From dispatch to the first token.
    pub ttft: Duration,
    /// Per further token.
    pub tpot: Duration,
}

/// What must hold for a request to keep its promise at an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aims {
    /// Time from dispatch to the first token.
    pub ttft: Option<Duration>,
    /// Time per further token.
    pub tpot: Option<Duration>,
    /// Time from dispatch to the end.
    pub e2e: Option<Duration>,
}

impl Aims {
    /// Nothing is asked.
    pub const NONE: Aims = Aims { ttft: None, tpot: None, e2e: None };

    /// What is left to aim at when this much time has passed.
    #[must_use]
    pub fn after(self, spent: Duration) -> Aims {
        let left = |limit: Option<Duration>| limit.map(|limit| limit.saturating_sub(spent));
        Aims { ttft: left(self.ttft), tpot: self.tpot, e2e: left(self.e2e) }
    }
}

/// What the end of an answer taught, from dispatch on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lesson {
    /// To the first token.
    pub ttft: Option<Duration>,
    /// Per further token.
    pub tpot: Option<Duration>,
    /// To the end.
    pub e2e: Option<Duration>,
    /// Tokens after the first.
    pub further: u64,
    /// Prompt tokens that the engine had cached, if it told.
    pub cached: Option<Tokens>,
}

/// How far predictions were off lately, as a share of what was seen; `None` before there was
/// any prediction to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// Of the time to the first token.
    pub ttft: Option<f64>,
    /// Of the time per further token.
    pub tpot: Option<f64>,
}

/// The steps that an answer ran through, from its first token to its last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Steps {
    /// Tokens after the first.
    pub further: u64,
    /// Mean number of sequences that ran meanwhile, this one included.
    pub batch: f64,
    /// Prompt tokens of other requests that were computed meanwhile, as estimated.
    pub prompt: f64,
}

impl Steps {
    /// Thousands of prompt tokens in a step.
    fn prompt_per_step(&self) -> f64 {
        self.prompt / self.further.max(1) as f64 / 1000.0
    }

    fn weight(&self) -> f64 {
        answer_weight(self.further)
    }
}

/// How much an answer of so many tokens after the first says about the mean step: full weight from
/// [`LONG_ANSWER`] tokens on.
#[must_use]
pub fn answer_weight(further: u64) -> f64 {
    (further as f64 / LONG_ANSWER).min(1.0)
}

/// The length of a step, in seconds, as far as it depends on what is in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Of a step with nothing in it.
    pub base: f64,
    /// Added by each running sequence.
    pub per_sequence: f64,
    /// Added by each prompt token, as estimated.
    pub per_prompt_token: f64,
}

impl StepTime {
    /// A step without prefill, in a batch of this size.
    #[must_use]
    pub fn decode(&self, batch: f64) -> f64 {
        self.base + self.per_sequence * batch
    }
}

/// What one engine's answers taught.
#[derive(Clone, Debug)]
pub struct Latency {
    ttft: Model<4>,
    step: Model<3>,
    /// Thousands of prompt tokens in a step, lately.
    prompt_per_step: f64,
}

/// Coefficients before anything was learned, roughly an 8B model on one large GPU: seconds, per
/// thousand tokens of prompt, of prompts ahead, per running sequence.
const TTFT_AT_FIRST: [f64; 4] = [0.03, 0.08, 0.08, 0.0005];
/// Seconds, per sequence in the step, per thousand prompt tokens in the step.
const STEP_AT_FIRST: [f64; 3] = [0.01, 0.0002, 0.08];
/// Tokens from which an answer says all that one answer can say about the mean step.
const LONG_ANSWER: f64 = 30.0;
/// Weight of a new answer in [`Latency::prompt_per_step`], for an answer of full weight.
const MIX_WEIGHT: f64 = 0.05;
/// No step is shorter: tokens that came together in one read say nothing about a step.
const SHORTEST_STEP: Duration = Duration::from_micros(100);

impl Default for Latency {
    fn default() -> Self {
        Latency { ttft: Model::new(TTFT_AT_FIRST), step: Model::new(STEP_AT_FIRST), prompt_per_step: 0.0 }
    }
}

impl Latency {
    /// An answer's first token came `took` after it was dispatched into `situation`.
    pub fn first_token(&mut self, situation: &Situation, took: Duration) {
        self.ttft.learn(&situation.before_the_first_token(), took.as_secs_f64(), 1.0);
    }

    /// An answer's further tokens took `each`.
    pub fn further_tokens(&mut self, steps: &Steps, each: Duration) {
        if each < SHORTEST_STEP || steps.further == 0 || !steps.batch.is_finite() || !steps.prompt.is_finite() {
            return;
        }
        let (prompt, weight) = (steps.prompt_per_step(), steps.weight());
        self.step.learn(&[1.0, steps.batch, prompt], each.as_secs_f64(), weight);
        self.prompt_per_step += MIX_WEIGHT * weight * (prompt - self.prompt_per_step);
    }

    /// Whether enough was seen for figures of its own.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.step.seen >= ENOUGH
    }

    /// Another process may have taken the engine's place: what is known holds until answers say
    /// otherwise, and they are believed sooner.
    pub fn doubt(&mut self) {
        self.ttft.doubt();
        self.step.doubt();
    }

    /// The time to the first token; before enough was seen, by the first guess.
    #[must_use]
    pub fn time_to_read(&self, situation: &Situation) -> Duration {
        seconds(self.ttft.value(&situation.before_the_first_token()))
    }

    /// What a request would see; `None` while too little was seen.
    #[must_use]
    pub fn predict(&self, situation: &Situation) -> Option<Prediction> {
        let ttft = self.ttft.estimate(&situation.before_the_first_token())?;
        let tpot = self.step.estimate(&self.step_of(situation.batch))?;
        Some(Prediction { ttft: seconds(ttft), tpot: seconds(tpot) })
    }

    /// What a request would see from an engine in which no other prompt is ahead of its own: how long
    /// its own service takes, whatever happens to be in the way now.
    #[must_use]
    pub fn predict_unhindered(&self, situation: &Situation) -> Option<Prediction> {
        self.predict(&Situation { prefill: Tokens::ZERO, ..*situation })
    }

    /// The learned length of a step; `None` while too little was seen.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        let [base, per_sequence, per_thousand] = self.step.known_coefficients()?;
        Some(StepTime { base, per_sequence, per_prompt_token: per_thousand / 1000.0 })
    }

    /// Prompt tokens per second by which what is ahead of a request shrinks; `None` while too little was
    /// seen.
    #[must_use]
    pub fn prefill_speed(&self) -> Option<f64> {
        let [_, _, per_thousand, _] = self.ttft.known_coefficients()?;
        Some(1000.0 / per_thousand.max(1e-3))
    }

    /// A step as they are lately, in a batch of this size.
    fn step_of(&self, batch: u32) -> [f64; 3] {
        [1.0, f64::from(batch), self.prompt_per_step]
    }

    /// The time to the end of an answer with so many tokens after the first, from an engine that
    /// does nothing else.
    #[must_use]
    pub fn alone(&self, prompt: Tokens, further: u64) -> Option<Duration> {
        let situation = Situation { prompt, batch: 1, ..Situation::default() };
        let ttft = self.ttft.estimate(&situation.before_the_first_token())?;
        let pace = self.step.estimate(&[1.0, 1.0, 0.0])?;
        Some(seconds(ttft + pace * further as f64))
    }

    /// How far predictions were off lately.
    #[must_use]
    pub fn errors(&self) -> Errors {
        let error = |off: f64, seen: u32| (seen > ENOUGH).then(|| off.exp_m1());
        Errors { ttft: error(self.ttft.off, self.ttft.seen), tpot: error(self.step.off, self.step.seen) }
    }
}

impl Situation {
    fn before_the_first_token(&self) -> [f64; 4] {
        let thousands = |tokens: Tokens| tokens.0 as f64 / 1000.0;
        [1.0, thousands(self.prompt), thousands(self.prefill), f64::from(self.batch)]
    }
}

/// A length of time from a model's seconds, which are finite and positive.
fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, LONGEST))
}

/// Nothing is predicted to take longer: a day.
const LONGEST: f64 = 86_400.0;
/// Nothing takes less: a microsecond.
const SHORTEST: f64 = 1e-6;
/// What was learned a hundred answers ago counts `FORGETTING^100`: six tenths.
const FORGETTING: f64 = 0.995;
/// The share of all that was known that is left by an answer of an engine that has changed.
const FORGETTING_QUICKLY: f64 = 0.7;
/// Weight of a new residual's side, and the mean side beyond which the engine has changed: by
/// chance alone that happens once in some thousand answers, and costs little.
const LEAN: (f64, f64) = (0.1, 0.8);
/// Residuals are cut at this many times their mean size: Huber's 1.345 standard deviations of a
/// normal distribution, whose mean size is 0.798 of them.
const CUT: f64 = 1.345 / 0.798;
/// Weight of a new residual in the mean size of residuals.
const SPREAD_WEIGHT: f64 = 0.02;
/// The mean size before anything was seen, and the least that is believed: steps of an engine
/// alone make 2 %.
const SPREAD: (f64, f64) = (1.0, 0.02);
/// The median error before there was any, and its bounds.
const OFF_AT_FIRST: f64 = 0.2;
const OFF: (f64, f64) = (0.001, 3.0);
/// One answer moves the median error by this factor, either way.
const OFF_STEP: f64 = 1.04;
/// The mean size of residuals that is expected after a restart, at least.
const DOUBT: f64 = 0.2;
/// How well each coefficient is known before anything was seen: a standard deviation of twice
/// its first value.
const KNOWN_AT_FIRST: f64 = 0.25;
/// Rounding never makes anything less known than this.
const LEAST_KNOWN: f64 = 1e-6;

/// A linear model with coefficients at or above zero.
#[derive(Clone, Debug)]
struct Model<const N: usize> {
    /// What coefficients are measured in: their first values.
    unit: [f64; N],
    coefficients: [f64; N],
    /// The information matrix: the inverse of the coefficients' covariance.
    known: [[f64; N]; N],
    seen: u32,
    /// Mean size of log residuals.
    spread: f64,
    /// Mean side of log residuals: 1 where all were above, -1 where all were below.
    lean: f64,
    /// Median size of log residuals lately.
    off: f64,
}

impl<const N: usize> Model<N> {
    fn new(unit: [f64; N]) -> Self {
        let mut known = [[0.0; N]; N];
        (0..N).for_each(|i| known[i][i] = KNOWN_AT_FIRST);
        Model { unit, coefficients: [1.0; N], known, seen: 0, spread: SPREAD.0, lean: 0.0, off: OFF_AT_FIRST }
    }

    fn value(&self, given: &[f64; N]) -> f64 {
        let sum: f64 = (0..N).map(|i| self.coefficients[i] * self.unit[i] * given[i]).sum();
        sum.clamp(SHORTEST, LONGEST)
    }

    fn estimate(&self, given: &[f64; N]) -> Option<f64> {
        (self.seen >= ENOUGH).then(|| self.value(given))
    }

    fn known_coefficients(&self) -> Option<[f64; N]> {
        (self.seen >= ENOUGH).then(|| std::array::from_fn(|i| self.coefficients[i] * self.unit[i]))
    }

    /// `weight`: how much this says, at most 1.
    fn learn(&mut self, given: &[f64; N], seen: f64, weight: f64) {
        if !seen.is_finite() || given.iter().any(|value| !value.is_finite()) {
            return;
        }
        let seen = seen.clamp(SHORTEST, LONGEST);
        let value = self.value(given);
        let residual = (seen / value).ln();
        if self.seen >= ENOUGH {
            self.note_error(residual.abs());
        }
        self.lean += LEAN.0 * (residual.signum() - self.lean);
        let has_changed = self.lean.abs() > LEAN.1;
        self.widen(residual.abs(), has_changed);
        let most = CUT * self.spread;
        if has_changed {
            self.forget();
        }
        self.step(given, value, residual.clamp(-most, most), weight * (most / residual.abs()).min(1.0), weight);
        self.seen = self.seen.saturating_add(1);
    }

    /// The median of the sizes of log residuals, by steps of a fixed ratio (stochastic approximation):
    /// bounded, and no single answer moves it by more than a step.
    fn note_error(&mut self, size: f64) {
        let step = if size > self.off { OFF_STEP } else { 1.0 / OFF_STEP };
        self.off = (self.off * step).clamp(OFF.0, OFF.1);
    }

    /// One step of the filter: `residual` is cut already, `weight` is what the cut left of the answer's
    /// `own` weight.
    fn step(&mut self, given: &[f64; N], value: f64, residual: f64, weight: f64, own: f64) {
        let gradient: [f64; N] = std::array::from_fn(|i| self.unit[i] * given[i] / value);
        let precision = 1.0 / (self.spread * self.spread);
        let along: [f64; N] = std::array::from_fn(|i| (0..N).map(|j| self.known[i][j] * gradient[j]).sum());
        let length: f64 = (0..N).map(|i| gradient[i] * along[i]).sum();
        let fading = (1.0 - FORGETTING) / length.max(f64::MIN_POSITIVE);
        for i in 0..N {
            for j in 0..N {
                self.known[i][j] += weight * precision * gradient[i] * gradient[j] - fading * along[i] * along[j];
            }
        }
        let direction = solve(&self.known, &gradient);
        for (coefficient, direction) in self.coefficients.iter_mut().zip(direction) {
            *coefficient = (*coefficient + direction * own * precision * residual).max(0.0);
        }
    }

    fn doubt(&mut self) {
        (0..8).for_each(|_| self.forget());
        self.spread = self.spread.max(DOUBT);
    }

    /// Everything that was known counts less, but nothing less than at first.
    fn forget(&mut self) {
        for i in 0..N {
            self.known[i].iter_mut().for_each(|entry| *entry *= FORGETTING_QUICKLY);
            self.known[i][i] += (1.0 - FORGETTING_QUICKLY) * KNOWN_AT_FIRST;
        }
    }

    fn widen(&mut self, size: f64, has_changed: bool) {
        // The first residuals say how wrong the first coefficients were; they fade quicker.
        let early = 1.0 / (f64::from(self.seen) + 4.0);
        let (weight, most) = if has_changed { (LEAN.0, f64::INFINITY) } else { (SPREAD_WEIGHT.max(early), 4.0) };
        let size = size.min(most * self.spread);
        self.spread = (self.spread + weight * (size - self.spread)).max(SPREAD.1);
    }
}

/// Solves `matrix x = right` for a positive definite matrix, by Cholesky's decomposition.
fn solve<const N: usize>(matrix: &[[f64; N]; N], right: &[f64; N]) -> [f64; N] {
    let mut lower = [[0.0; N]; N];
    for i in 0..N {
        for j in 0..=i {
            let rest: f64 = matrix[i][j] - (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
            lower[i][j] = if i == j { rest.max(LEAST_KNOWN).sqrt() } else { rest / lower[j][j] };
        }
    }
    let mut found = *right;
    for i in 0..N {
        found[i] = (found[i] - (0..i).map(|k| lower[i][k] * found[k]).sum::<f64>()) / lower[i][i];
    }
    for i in (0..N).rev() {
        found[i] = (found[i] - (i + 1..N).map(|k| lower[k][i] * found[k]).sum::<f64>()) / lower[i][i];
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// An engine that follows the model, with even noise.
    struct Truth {
        chance: StdRng,
        noise: f64,
        slower: f64,
    }

    impl Truth {
        fn new(seed: u64) -> Self {
            Truth { chance: StdRng::seed_from_u64(seed), noise: 0.1, slower: 1.0 }
        }

        fn situation(&mut self) -> Situation {
            let mut tokens = |most| Tokens(self.chance.random_range(0..most));
            let (prompt, prefill, decode) = (tokens(4_000), tokens(20_000), tokens(30_000));
            Situation { prompt, prefill, decode, batch: self.chance.random_range(1..100) }
        }

        fn noisy(&mut self, seconds: f64) -> Duration {
            let factor = self.chance.random_range(1.0 - self.noise..1.0 + self.noise);
            Duration::from_secs_f64(seconds * self.slower * factor)
        }

        fn ttft(situation: &Situation) -> f64 {
            let [_, prompt, prefill, decode] = situation.before_the_first_token();
            0.05 + 0.25 * prompt + 0.2 * prefill + 0.004 * decode
        }

        fn tpot(batch: f64) -> f64 {
            0.02 + 0.0006 * batch
        }

        fn teach(&mut self, latency: &mut Latency, answers: u32) {
            for _ in 0..answers {
                let situation = self.situation();
                let ttft = self.noisy(Truth::ttft(&situation));
                let tpot = self.noisy(Truth::tpot(f64::from(situation.batch)));
                latency.first_token(&situation, ttft);
                latency.further_tokens(f64::from(situation.batch), tpot);
            }
        }

        /// The largest relative error over some situations.
        fn worst(&mut self, latency: &Latency) -> f64 {
            self.off(latency).into_iter().fold(0.0, f64::max)
        }

        /// Relative errors in some situations.
        fn off(&mut self, latency: &Latency) -> Vec<f64> {
            let off = |is: Duration, ought: f64| (is.as_secs_f64() / ought).ln().abs();
            let one = |_| {
                let situation = self.situation();
                let predicted = latency.predict(&situation).unwrap();
                let tpot = self.slower * Truth::tpot(f64::from(situation.batch));
                off(predicted.ttft, self.slower * Truth::ttft(&situation)).max(off(predicted.tpot, tpot))
            };
            (0..100).map(one).collect()
        }
    }

    #[test]
    fn with_little_data_there_is_no_prediction() {
        let (mut latency, mut truth) = (Latency::default(), Truth::new(1));
        let asked = Aims { ttft: Some(Duration::from_secs(1)), ..Aims::NONE };
        truth.teach(&mut latency, ENOUGH - 1);
        assert_eq!(latency.predict(&Situation::default()), None);
        assert_eq!(latency.chance(&Situation::default(), Tokens(1), &asked), None);
        assert_eq!(latency.errors(), Errors::default());
        truth.teach(&mut latency, 2);
        assert!(latency.predict(&Situation::default()).is_some());
        assert!(latency.errors().ttft.is_some());
    }

    #[test]
    fn an_engine_is_learned_within_a_few_hundred_answers() {
        for seed in 0..20 {
            let (mut latency, mut truth) = (Latency::default(), Truth::new(seed));
            truth.teach(&mut latency, ENOUGH);
            let early = truth.worst(&latency);
            truth.teach(&mut latency, 300);
            let late = truth.worst(&latency);
            assert!(early < 1.0 && late < 0.12, "seed {seed}: {early} {late}");
            let errors = latency.errors();
            assert!(errors.ttft.unwrap() < 0.1 && errors.tpot.unwrap() < 0.1, "{errors:?}");
        }
    }

    #[test]
    fn an_engine_that_became_slow_is_noticed_within_a_hundred_answers() {
        for seed in 0..20 {
            let (mut latency, mut truth) = (Latency::default(), Truth::new(seed));
            truth.teach(&mut latency, 2_000);
            truth.slower = 3.0;
            truth.teach(&mut latency, 100);
            let mean = truth.off(&latency).iter().sum::<f64>() / 100.0;
            assert!(mean < 0.1, "seed {seed}: {mean}");
        }
    }

    #[test]
    fn one_answer_in_twenty_that_hangs_changes_little() {
        for seed in 0..20 {
            let (mut latency, mut truth) = (Latency::default(), Truth::new(seed));
            for _ in 0..40 {
                truth.teach(&mut latency, 19);
                let situation = truth.situation();
                latency.first_token(&situation, Duration::from_secs(300));
                latency.further_tokens(f64::from(situation.batch), Duration::from_secs(30));
            }
            let worst = truth.worst(&latency);
            assert!(worst < 0.25, "seed {seed}: {worst}");
        }
    }

    #[test]
    fn a_long_time_of_the_same_forgets_nothing_else() {
        let (mut latency, mut truth) = (Latency::default(), Truth::new(5));
        truth.teach(&mut latency, 500);
        let night = Situation { prompt: Tokens(100), batch: 1, ..Situation::default() };
        for _ in 0..20_000 {
            let ttft = truth.noisy(Truth::ttft(&night));
            latency.first_token(&night, ttft);
            let tpot = truth.noisy(Truth::tpot(1.0));
            latency.further_tokens(1.0, tpot);
        }
        let worst = truth.worst(&latency);
        assert!(worst < 0.5, "{worst}");
        truth.teach(&mut latency, 50);
        let worst = truth.worst(&latency);
        assert!(worst < 0.3, "{worst}");
    }

    #[test]
    fn the_chance_falls_with_load_and_rises_with_patience() {
        let (mut latency, mut truth) = (Latency::default(), Truth::new(9));
        truth.teach(&mut latency, 1_000);
        let at = |prefill, millis| {
            let situation = Situation { prompt: Tokens(500), prefill: Tokens(prefill), ..Situation::default() };
            let aims = Aims { ttft: Some(Duration::from_millis(millis)), ..Aims::NONE };
            latency.chance(&situation, Tokens(1), &aims).unwrap()
        };
        // Expected at 0: 175 ms.
        assert!(at(0, 350) > 0.99 && at(0, 175) > 0.2 && at(0, 175) < 0.8 && at(0, 90) < 0.01);
        assert!(at(0, 350) > at(1_000, 350) && at(1_000, 350) > at(4_000, 350));
        let both = Aims { tpot: Some(Duration::from_micros(20_600)), ..Aims::NONE };
        let situation = Situation { batch: 1, ..Situation::default() };
        let even = latency.chance(&situation, Tokens(1), &both).unwrap();
        assert!((0.2..0.8).contains(&even), "{even}");
        let whole = |seconds| Aims { e2e: Some(Duration::from_secs(seconds)), ..Aims::NONE };
        let chance = |seconds| latency.chance(&situation, Tokens(100), &whole(seconds)).unwrap();
        assert!(chance(4) > 0.99 && chance(1) < 0.01, "100 tokens take about 2.1 s");
        assert!((latency.chance(&situation, Tokens(100), &Aims::NONE).unwrap() - 1.0).abs() < f64::EPSILON);
    }

    proptest! {
        #[test]
        fn whatever_is_seen_predictions_stay_finite_and_grow_with_work(
            answers in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), any::<u16>(), any::<u64>()), 32..200),
        ) {
            let mut latency = Latency::default();
            for (prompt, prefill, decode, batch, nanos) in answers {
                let tokens = |count: u32| Tokens(u64::from(count) % (1 << 20));
                let situation = Situation {
                    prompt: tokens(prompt), prefill: tokens(prefill), decode: tokens(decode), batch: batch.into(),
                };
                latency.first_token(&situation, Duration::from_nanos(nanos));
                latency.further_tokens(batch.into(), Duration::from_nanos(nanos));
            }
            let less = Situation { prompt: Tokens(100), batch: 3, ..Situation::default() };
            let more = Situation { prompt: Tokens(200), prefill: Tokens(1), decode: Tokens(1), batch: 4 };
            let (less, more) = (latency.predict(&less).unwrap(), latency.predict(&more).unwrap());
            prop_assert!(less.ttft <= more.ttft && less.tpot <= more.tpot);
            prop_assert!(more.ttft <= Duration::from_secs(86_400));
            let chance = latency.chance(&Situation::default(), Tokens(5), &Aims {
                ttft: Some(Duration::ZERO), tpot: Some(Duration::MAX), e2e: Some(Duration::from_secs(1)),
            }).unwrap();
            prop_assert!((0.0..=1.0).contains(&chance));
        }
    }
}
