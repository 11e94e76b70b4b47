//! Learns how long an engine takes: the time from dispatch to the first token, from the prompt
//! and the work that the engine had; the time per further token, from the size of its batch.
//!
//! Pure. Both are non-negative linear models, fitted as answers end by recursive least squares
//! with forgetting (Ljung and Söderström, *Theory and Practice of Recursive Identification*,
//! 1983), with three changes that latencies ask for:
//!
//! - What is fitted is the *logarithm*: an answer twice as late as expected weighs the same at
//!   50 ms and at 5 s. The step is Gauss-Newton's: the regressor is the model's gradient.
//! - Residuals are cut at a multiple of their usual size (Huber's M-estimator; in recursive
//!   form Kovačević, Banjac and Kovačević, *EURASIP J. Adv. Signal Process.* 2016:37), so that
//!   one answer that hung for a minute changes nothing.
//! - Forgetting is directional: an answer replaces what was known about situations like its own
//!   and nothing else (Cao and Schwartz, *Automatica* 36, 2000). With plain forgetting a night
//!   of short prompts would forget what long ones take.
//!
//! Coefficients never become negative: they are put back to the nearest point that is not.
//!
//! Where nearly all residuals lately lie on one side the engine has changed: then everything is
//! forgotten quickly until they no longer do (a variable forgetting factor, as Fortescue, Kershenbaum and Ydstie,
//! *Automatica* 17, 1981, with a plainer trigger).
//!
//! Until [`ENOUGH`] answers were seen there is no prediction, and whoever asks does without.

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

/// What one engine's answers taught.
#[derive(Clone, Debug)]
pub struct Latency {
    ttft: Model<4>,
    tpot: Model<2>,
}

/// Coefficients before anything was learned, roughly an 8B model on one large GPU: seconds, per
/// thousand tokens of prompt, of earlier prompts, of outstanding output.
const TTFT_AT_FIRST: [f64; 4] = [0.03, 0.08, 0.08, 0.001];
/// Seconds, and per request in the batch.
const TPOT_AT_FIRST: [f64; 2] = [0.01, 0.0002];

impl Default for Latency {
    fn default() -> Self {
        Latency { ttft: Model::new(TTFT_AT_FIRST), tpot: Model::new(TPOT_AT_FIRST) }
    }
}

impl Latency {
    /// An answer's first token came `took` after it was dispatched into `situation`.
    pub fn first_token(&mut self, situation: &Situation, took: Duration) {
        self.ttft.learn(&situation.before_the_first_token(), took.as_secs_f64());
    }

    /// An answer's further tokens took `each`, in a batch of this mean size.
    pub fn further_tokens(&mut self, batch: f64, each: Duration) {
        self.tpot.learn(&[1.0, batch], each.as_secs_f64());
    }

    /// Another process may have taken the engine's place: what is known holds until answers say
    /// otherwise, and they are believed sooner.
    pub fn doubt(&mut self) {
        self.ttft.doubt();
        self.tpot.doubt();
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
        let tpot = self.tpot.estimate(&[1.0, f64::from(situation.batch)])?;
        Some(Prediction { ttft: seconds(ttft), tpot: seconds(tpot) })
    }

    /// The part of the time to the first token that is the prompt's own, whatever else the
    /// engine has to do.
    #[must_use]
    pub fn reading(&self, prompt: Tokens) -> Option<Duration> {
        let [_, per_thousand, ..] = self.ttft.coefficients;
        let own = per_thousand * TTFT_AT_FIRST[1] * prompt.0 as f64 / 1000.0;
        (self.ttft.seen >= ENOUGH).then(|| seconds(own))
    }

    /// The time to the end of an answer with so many tokens after the first, from an engine that
    /// does nothing else.
    #[must_use]
    pub fn alone(&self, prompt: Tokens, further: u64) -> Option<Duration> {
        let pace = self.tpot.estimate(&[1.0, 1.0])?;
        Some(self.reading(prompt)? + seconds(pace * further as f64))
    }

    /// Prompt tokens that the engine reads in a second; before enough was seen, by the first
    /// guess.
    #[must_use]
    pub fn reads_per_second(&self) -> f64 {
        let [_, per_thousand, ..] = self.ttft.coefficients;
        let share = if self.ttft.seen >= ENOUGH { per_thousand } else { 1.0 };
        1000.0 / (share * TTFT_AT_FIRST[1]).max(LEAST_PER_THOUSAND)
    }

    /// The chance that a request keeps all that is asked; `None` while too little was seen.
    ///
    /// The logarithm of what is seen over what was predicted is taken to be logistic, with the
    /// mean size that it had lately, and the objectives to fail independently of each other.
    /// Both are simplifications: engines are compared with it, nothing is promised by it.
    #[must_use]
    pub fn chance(&self, situation: &Situation, output: Tokens, aims: &Aims) -> Option<f64> {
        let (before, batch) = (situation.before_the_first_token(), [1.0, f64::from(situation.batch)]);
        let mut chance = 1.0;
        if let Some(limit) = aims.ttft {
            chance *= self.ttft.chance(self.ttft.estimate(&before)?, limit);
        }
        if let Some(limit) = aims.tpot {
            chance *= self.tpot.chance(self.tpot.estimate(&batch)?, limit);
        }
        if let Some(limit) = aims.e2e {
            let further = output.0.saturating_sub(1) as f64 * self.tpot.estimate(&batch)?;
            let whole = self.ttft.estimate(&before)? + further;
            chance *= self.ttft.chance(whole, limit);
        }
        Some(chance)
    }

    /// How far predictions were off lately.
    #[must_use]
    pub fn errors(&self) -> Errors {
        let error = |off: f64, seen: u32| (seen > ENOUGH).then_some(off);
        Errors { ttft: error(self.ttft.off, self.ttft.seen), tpot: error(self.tpot.off, self.tpot.seen) }
    }
}

impl Situation {
    fn before_the_first_token(&self) -> [f64; 4] {
        let thousands = |tokens: Tokens| tokens.0 as f64 / 1000.0;
        [1.0, thousands(self.prompt), thousands(self.prefill), thousands(self.decode)]
    }
}

/// A length of time from a model's seconds, which are finite and positive.
fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, LONGEST))
}

/// Nothing is predicted to take longer: a day.
const LONGEST: f64 = 86_400.0;
/// No engine reads a thousand tokens in less than this, in seconds.
const LEAST_PER_THOUSAND: f64 = 1e-3;
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
    /// Mean relative error.
    off: f64,
}

impl<const N: usize> Model<N> {
    fn new(unit: [f64; N]) -> Self {
        let mut known = [[0.0; N]; N];
        (0..N).for_each(|i| known[i][i] = KNOWN_AT_FIRST);
        Model { unit, coefficients: [1.0; N], known, seen: 0, spread: SPREAD.0, lean: 0.0, off: 0.0 }
    }

    fn value(&self, given: &[f64; N]) -> f64 {
        let sum: f64 = (0..N).map(|i| self.coefficients[i] * self.unit[i] * given[i]).sum();
        sum.clamp(SHORTEST, LONGEST)
    }

    fn estimate(&self, given: &[f64; N]) -> Option<f64> {
        (self.seen >= ENOUGH).then(|| self.value(given))
    }

    /// The chance that what is estimated as `value` stays within `limit`.
    fn chance(&self, value: f64, limit: Duration) -> f64 {
        // The mean size of a logistic variable is 2 ln 2 of its scale.
        let scale = self.spread / (2.0 * std::f64::consts::LN_2);
        let distance = (limit.as_secs_f64().max(SHORTEST) / value).ln();
        1.0 / (1.0 + (-distance / scale).exp())
    }

    fn learn(&mut self, given: &[f64; N], seen: f64) {
        if !seen.is_finite() || given.iter().any(|value| !value.is_finite()) {
            return;
        }
        let seen = seen.clamp(SHORTEST, LONGEST);
        let value = self.value(given);
        let residual = (seen / value).ln();
        if self.seen == ENOUGH {
            self.off = (seen - value).abs() / seen;
        } else if self.seen > ENOUGH {
            self.off += SPREAD_WEIGHT * ((seen - value).abs() / seen - self.off);
        }
        self.lean += LEAN.0 * (residual.signum() - self.lean);
        let has_changed = self.lean.abs() > LEAN.1;
        self.widen(residual.abs(), has_changed);
        let most = CUT * self.spread;
        if has_changed {
            self.forget();
        }
        self.step(given, value, residual.clamp(-most, most), (most / residual.abs()).min(1.0));
        self.seen = self.seen.saturating_add(1);
    }

    /// One step of the filter: `residual` is cut already, and `weight` is what the cut left.
    fn step(&mut self, given: &[f64; N], value: f64, residual: f64, weight: f64) {
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
            *coefficient = (*coefficient + direction * precision * residual).max(0.0);
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
