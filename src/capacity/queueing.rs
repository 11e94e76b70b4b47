//! Waiting-line formulas: how long requests wait in front of a stage that is busy part of the time.
//!
//! Times are seconds, rates are requests per second. Every function names the source of its formula.
//! All of them describe a queue in its steady state; a rate at or above the capacity has none and is
//! [`QueueError::Saturated`].

/// Reason why a formula has no value for its arguments.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum QueueError {
    /// A rate that is not a positive, finite number.
    #[error("the arrival rate is {0}; give a positive number of requests per second")]
    Rate(f64),
    /// A service time that is not a positive, finite number.
    #[error("the service time is {0} s; give a positive number of seconds")]
    ServiceTime(f64),
    /// A squared coefficient of variation that is negative or not a number.
    #[error("the squared coefficient of variation is {0}; give 0 (no variation) or more")]
    Variation(f64),
    /// A quantile outside (0, 1).
    #[error("the quantile is {0}; give a number between 0 and 1")]
    Quantile(f64),
    /// A degree of parallelism that is not at least 1.
    #[error("the degree of parallelism or its speed-up is {0}; give 1 or more")]
    Parallelism(f64),
    /// No servers, or more than the recursion supports.
    #[error("there are {0} servers; give 1 to 10 million")]
    Servers(u32),
    /// Percentiles that no lognormal law has.
    #[error("percentiles p50 {p50} and p95 {p95} fit no lognormal law; give 0 < p50 <= p95")]
    Percentiles {
        /// The median.
        p50: f64,
        /// The 95th percentile.
        p95: f64,
    },
    /// More work arrives than can be done.
    #[error(
        "utilisation is {utilisation:.3}, not below 1: the queue grows without end; lower the rate or add capacity"
    )]
    Saturated {
        /// Offered work by capacity.
        utilisation: f64,
    },
}

fn positive(value: f64, error: fn(f64) -> QueueError) -> Result<f64, QueueError> {
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err(error(value)) }
}

fn unsaturated(utilisation: f64) -> Result<f64, QueueError> {
    if utilisation < 1.0 { Ok(utilisation) } else { Err(QueueError::Saturated { utilisation }) }
}

/// Poisson arrivals at one server that works on one request at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SingleServer {
    rate: f64,
    service: f64,
    utilisation: f64,
}

impl SingleServer {
    /// A server with this arrival rate and mean service time.
    ///
    /// # Errors
    /// A number that is not positive and finite, or a utilisation of 1 or more.
    pub fn new(rate: f64, service: f64) -> Result<Self, QueueError> {
        let (rate, service) = (positive(rate, QueueError::Rate)?, positive(service, QueueError::ServiceTime)?);
        Ok(SingleServer { rate, service, utilisation: unsaturated(rate * service)? })
    }

    /// Share of the time in which the server is busy.
    #[must_use]
    pub const fn utilisation(&self) -> f64 {
        self.utilisation
    }

    /// Mean service time in seconds.
    #[must_use]
    pub const fn service(&self) -> f64 {
        self.service
    }

    /// Mean wait in the queue when every service takes equally long (M/D/1): `R D^2 / (2 (1 - R D))`.
    ///
    /// Source: DistServe (Zhong et al., OSDI 2024), equation 1, second term; Kleinrock, Queueing Systems
    /// vol. 1 (1975), section 5.6.
    #[must_use]
    pub fn md1_wait(&self) -> f64 {
        self.rate * self.service * self.service / (2.0 * (1.0 - self.utilisation))
    }

    /// Mean wait in the queue when service times vary (M/G/1): the M/D/1 wait times `1 + c^2`, where `c^2`
    /// is the squared coefficient of variation of the service time.
    ///
    /// Source: Pollaczek-Khinchine mean value formula; Kleinrock, Queueing Systems vol. 1 (1975), section 5.6.
    ///
    /// # Errors
    /// A variation that is negative or no number.
    pub fn mg1_wait(&self, variation: f64) -> Result<f64, QueueError> {
        if variation.is_finite() && variation >= 0.0 {
            Ok(self.md1_wait() * (1.0 + variation))
        } else {
            Err(QueueError::Variation(variation))
        }
    }

    /// The wait that a share `quantile` of the requests does not exceed, for equal services (M/D/1).
    ///
    /// `W = ln(A / (1 - q)) / s` with `s > 0` the root of `R (e^(s D) - 1) = s` and
    /// `A = (1 - rho) / (rho e^(s D) - 1)`, the tail of the law. Below one service time, where that is off by
    /// up to a tenth of `D`, the law itself: `P(W <= t) = (1 - rho) e^(R t)`; a share `1 - rho` does not wait at all.
    ///
    /// Source: the Pollaczek-Khinchine transform, whose pole nearest to zero gives the tail (Tijms, A First Course
    /// in Stochastic Models, 2003, section 9.6); Erlang (1909) for the law below one service time.
    ///
    /// # Errors
    /// A quantile outside (0, 1).
    pub fn md1_wait_quantile(&self, quantile: f64) -> Result<f64, QueueError> {
        if !(quantile > 0.0 && quantile < 1.0) {
            return Err(QueueError::Quantile(quantile));
        }
        let idle = 1.0 - self.utilisation;
        if quantile <= idle * self.utilisation.exp() {
            return Ok((quantile / idle).ln().max(0.0) / self.rate);
        }
        let exponent = decay(self.utilisation);
        // At the root, rho e^x = x + rho.
        let amplitude = idle / (exponent - idle);
        Ok((amplitude / (1.0 - quantile)).ln() * self.service / exponent)
    }
}

/// The positive root `x` of `rho (e^x - 1) = x`.
fn decay(utilisation: f64) -> f64 {
    let excess = |x: f64| utilisation * x.exp_m1() - x;
    let mut root = 1.0;
    while excess(root) <= 0.0 {
        root *= 2.0;
    }
    // The function is convex and positive here: Newton's steps come down to the root and never pass it.
    for _ in 0..200 {
        let next = root - excess(root) / (utilisation * root.exp() - 1.0);
        if next >= root || (root - next) < root * 1e-14 {
            break;
        }
        root = next;
    }
    root
}

/// How the devices of a prefill instance share one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Parallelism {
    /// One device.
    Single,
    /// A pipeline: each of `ways` devices has a part of the layers. One request takes as long as before,
    /// and the next one may follow when the first stage is free.
    InterOperator {
        /// Number of stages.
        ways: u32,
    },
    /// Each layer is split (tensor parallelism): a request is `speed_up` times as fast.
    IntraOperator {
        /// Between 1 and the number of devices.
        speed_up: f64,
    },
}

/// Mean time to first token of a prefill instance, by its two terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillDelay {
    /// Time to compute one prompt, in seconds.
    pub service: f64,
    /// Mean time in the queue before it, in seconds.
    pub wait: f64,
    /// Busy share of the slowest stage.
    pub utilisation: f64,
}

impl PrefillDelay {
    /// Mean time to first token in seconds: both terms.
    #[must_use]
    pub fn ttft(&self) -> f64 {
        self.service + self.wait
    }
}

/// Mean TTFT of a prefill instance for prompts of equal length (M/D/1).
///
/// With `D` the time of one device for a prompt and `R` the rate: single `D + R D^2 / (2 (1 - R D))`;
/// inter-operator over `p` stages `D + R D^2 / (2 p (p - R D))`, which is `D + R D^2 / (4 (2 - R D))` for two;
/// intra-operator with speed-up `K` `D / K + R D^2 / (2 K (K - R D))`. All three are whole
/// means; a text that quotes only the second term for one of them and both for another compares unlike things,
/// which is why [`PrefillDelay`] keeps the terms apart.
///
/// Source: DistServe (Zhong et al., OSDI 2024), section 3.1, equations 1 to 3.
///
/// # Errors
/// A number that is not positive and finite, parallelism below 1, or a utilisation of 1 or more.
pub fn prefill_delay(rate: f64, seconds: f64, parallelism: Parallelism) -> Result<PrefillDelay, QueueError> {
    let seconds = positive(seconds, QueueError::ServiceTime)?;
    let at_least_one = |value: f64| {
        if value.is_finite() && value >= 1.0 { Ok(value) } else { Err(QueueError::Parallelism(value)) }
    };
    let (service, stage) = match parallelism {
        Parallelism::Single => (seconds, seconds),
        Parallelism::InterOperator { ways } => (seconds, seconds / at_least_one(f64::from(ways))?),
        Parallelism::IntraOperator { speed_up } => {
            let faster = seconds / at_least_one(speed_up)?;
            (faster, faster)
        }
    };
    let queue = SingleServer::new(rate, stage)?;
    Ok(PrefillDelay { service, wait: queue.md1_wait(), utilisation: queue.utilisation() })
}

/// Probability that a request finds all servers busy and has to wait (M/M/c), for `load` = rate x service.
///
/// Computed from Erlang's B by its recursion, which neither overflows nor cancels:
/// `B(0) = 1`, `B(n) = a B(n-1) / (n + a B(n-1))`, `C = B / (1 - rho (1 - B))`.
///
/// Source: Erlang (1917); Cooper, Introduction to Queueing Theory (1981), sections 3.3 and 3.4.
///
/// # Errors
/// No servers, a load that is not positive and finite, or one at or above the number of servers.
pub fn erlang_c(servers: u32, load: f64) -> Result<f64, QueueError> {
    if !(1..=10_000_000).contains(&servers) {
        return Err(QueueError::Servers(servers));
    }
    let load = positive(load, QueueError::Rate)?;
    let utilisation = unsaturated(load / f64::from(servers))?;
    let blocked = (1..=servers).fold(1.0, |blocked, count| {
        let offered = load * blocked;
        offered / (f64::from(count) + offered)
    });
    Ok(blocked / (1.0 - utilisation * (1.0 - blocked)))
}

/// Requests that share a number of slots, each for the time that it is served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotPool {
    /// Slots of all replicas together.
    pub slots: u32,
    /// Mean time for which a request holds one, in seconds.
    pub service: f64,
    /// Squared coefficient of variation of the gaps between arrivals: 1 for Poisson, more for bursts
    /// (the inverse of the `burstiness` of vLLM's load generator).
    pub burst: f64,
}

/// Wait for a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotWait {
    /// Share of the requests that have to wait, for Poisson arrivals.
    pub probability: f64,
    /// Mean wait over all requests in seconds, the burst factor included.
    pub mean: f64,
}

impl SlotPool {
    /// Wait at this rate, first come, first served.
    ///
    /// The M/M/c wait `C / (c mu - lambda)` times `(c_a^2 + c_s^2) / 2`, with service times taken as exponential
    /// (`c_s^2 = 1`).
    ///
    /// Source: Erlang C for the first factor; Allen-Cunneen approximation (Allen, Probability, Statistics, and
    /// Queueing Theory, 2nd ed. 1990, section 6.2) for the burst factor.
    ///
    /// # Errors
    /// As [`erlang_c`], and a burst factor that is negative or no number.
    pub fn wait(&self, rate: f64) -> Result<SlotWait, QueueError> {
        let waits = self.waits_by_priority(&[rate])?;
        Ok(waits[0])
    }

    /// Waits of several classes that share the slots, the first before all others: a running request keeps
    /// its slot, and whoever is first in rank gets the next one that is free.
    ///
    /// `W_k = (C / (c mu)) / ((1 - sigma_(k-1)) (1 - sigma_k))`, `sigma_k` the utilisation by classes 1 to k, times
    /// the burst factor as in [`SlotPool::wait`]. All classes are taken to hold a slot equally long.
    ///
    /// Source: Cobham (1954), Priority Assignment in Waiting Line Problems, for many servers with exponential
    /// service; Kella and Yechiali (1985).
    ///
    /// # Errors
    /// As [`SlotPool::wait`]; all classes together must leave some capacity free.
    pub fn waits_by_priority(&self, rates: &[f64]) -> Result<Vec<SlotWait>, QueueError> {
        let service = positive(self.service, QueueError::ServiceTime)?;
        if !(self.burst.is_finite() && self.burst >= 0.0) {
            return Err(QueueError::Variation(self.burst));
        }
        for rate in rates {
            positive(*rate, QueueError::Rate)?;
        }
        let slots = f64::from(self.slots);
        let probability = erlang_c(self.slots, rates.iter().sum::<f64>() * service)?;
        let alone = probability * service / slots * f64::midpoint(self.burst, 1.0);
        let mut before = 0.0;
        let wait = |rate: &f64| {
            let upto = before + rate * service / slots;
            let mean = alone / ((1.0 - before) * (1.0 - upto));
            before = upto;
            SlotWait { probability, mean }
        };
        Ok(rates.iter().map(wait).collect())
    }
}

/// 95th percentile of the standard normal law.
const NORMAL_P95: f64 = 1.644_853_626_951_472_2;

/// A lognormal law of lengths, by the two percentiles that an SLO states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LognormalLength {
    median: f64,
    sigma: f64,
}

impl LognormalLength {
    /// The law with these percentiles.
    ///
    /// # Errors
    /// Percentiles that are not positive, finite and in order.
    pub fn from_percentiles(p50: f64, p95: f64) -> Result<Self, QueueError> {
        if p50.is_finite() && p95.is_finite() && p50 > 0.0 && p95 >= p50 {
            Ok(LognormalLength { median: p50, sigma: (p95 / p50).ln() / NORMAL_P95 })
        } else {
            Err(QueueError::Percentiles { p50, p95 })
        }
    }

    /// Mean length: `median e^(sigma^2 / 2)`.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.median * (self.sigma * self.sigma / 2.0).exp()
    }

    /// Squared coefficient of variation: `e^(sigma^2) - 1`.
    #[must_use]
    pub fn variation(&self) -> f64 {
        (self.sigma * self.sigma).exp_m1()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use rand_distr::Exp1;

    use super::*;

    fn close(found: f64, expected: f64, within: f64) {
        assert!((found / expected - 1.0).abs() <= within, "{found} is not {expected} within {within}");
    }

    #[test]
    fn the_checks_of_the_slo_note_for_a_prompt_of_400_ms() {
        for (rate, ttft) in [(2.0, 1.2), (2.25, 2.2)] {
            let delay = prefill_delay(rate, 0.4, Parallelism::Single).unwrap();
            close(delay.ttft(), ttft, 1e-12);
            assert_eq!(delay.service, 0.4);
        }
    }

    #[test]
    fn mixed_prompt_lengths_wait_3_8_times_as_long_as_equal_ones() {
        let law = LognormalLength::from_percentiles(900.0, 6000.0).unwrap();
        let queue = SingleServer::new(2.0, 0.4).unwrap();
        let ratio = queue.mg1_wait(law.variation()).unwrap() / queue.md1_wait();
        assert_eq!((ratio * 10.0).round(), 38.0, "{ratio}");
        close(law.mean(), 1750.2, 1e-3);
        assert_eq!(queue.mg1_wait(0.0), Ok(queue.md1_wait()));
    }

    #[test]
    fn both_kinds_of_parallelism_are_whole_means_and_agree_with_the_paper_for_two_ways() {
        let (rate, d, k) = (2.0, 0.4, 1.6);
        let inter = prefill_delay(rate, d, Parallelism::InterOperator { ways: 2 }).unwrap();
        close(inter.ttft(), d + rate * d * d / (4.0 * (2.0 - rate * d)), 1e-12);
        let intra = prefill_delay(rate, d, Parallelism::IntraOperator { speed_up: k }).unwrap();
        close(intra.ttft(), d / k + rate * d * d / (2.0 * k * (k - rate * d)), 1e-12);
        // One way of either kind is the plain queue.
        let single = prefill_delay(rate, d, Parallelism::Single).unwrap();
        assert_eq!(prefill_delay(rate, d, Parallelism::InterOperator { ways: 1 }).unwrap(), single);
        assert_eq!(prefill_delay(rate, d, Parallelism::IntraOperator { speed_up: 1.0 }).unwrap(), single);
    }

    #[test]
    fn splitting_layers_helps_at_low_rates_and_a_pipeline_near_saturation() {
        let mean = |rate, parallelism| prefill_delay(rate, 0.4, parallelism).unwrap().ttft();
        let (inter, intra) = (Parallelism::InterOperator { ways: 2 }, Parallelism::IntraOperator { speed_up: 1.6 });
        assert!(mean(0.1, intra) < mean(0.1, inter));
        assert!(mean(3.9, intra) > mean(3.9, inter));
    }

    #[test]
    fn waits_of_erlang_c_are_those_of_closed_forms_and_tables() {
        // One server: the probability to wait is the utilisation. Two: 2 rho^2 / (1 + rho).
        close(erlang_c(1, 0.3).unwrap(), 0.3, 1e-12);
        close(erlang_c(2, 1.0).unwrap(), 1.0 / 3.0, 1e-12);
        // Lookup sheet "Multiple Server Queueing Model" (Cengage Learning), 10 arrivals and 12 services per hour:
        // probability to wait and mean number that waits, to the three digits printed there.
        let sheet = [(2, 0.245, 0.175), (3, 0.058, 0.022), (4, 0.011, 0.003), (5, 0.002, 0.000)];
        for (servers, waits, queue) in sheet {
            let (load, found) = (10.0 / 12.0, erlang_c(servers, 10.0 / 12.0).unwrap());
            assert!((found - waits).abs() < 6e-4, "C({servers}, {load}) = {found}");
            let length = found * load / (f64::from(servers) - load);
            assert!((length - queue).abs() < 6e-4, "{servers}: {length}");
        }
        // Bronson (1982), problem 24.6: three servers, 300 arrivals a year, two days each; 0.352 wait on average.
        let load = 300.0 / 182.5;
        close(erlang_c(3, load).unwrap() * load / (3.0 - load), 0.352, 2e-3);
        close(erlang_c(10, 6.0).unwrap(), 0.1013, 1e-3);
        // Sums of e^-a a^k / k! as a whole would overflow here.
        close(erlang_c(100_000, 99_900.0).unwrap(), 0.657_993_511_8, 1e-9);
    }

    #[test]
    fn bursts_and_ranks_change_the_wait_as_the_formulas_say() {
        let pool = SlotPool { slots: 10, service: 2.0, burst: 1.0 };
        let even = pool.wait(4.0).unwrap();
        close(even.mean, even.probability / (10.0 / 2.0 - 4.0), 1e-12);
        close(SlotPool { burst: 3.0, ..pool }.wait(4.0).unwrap().mean, 2.0 * even.mean, 1e-12);
        let ranked = pool.waits_by_priority(&[1.0, 3.0]).unwrap();
        assert!(ranked[0].mean < even.mean && even.mean < ranked[1].mean);
        // Priorities only redistribute the waits: the mean over all requests stays (conservation law).
        close((ranked[0].mean + 3.0 * ranked[1].mean) / 4.0, even.mean, 1e-12);
    }

    #[test]
    fn arguments_without_a_steady_state_or_sense_are_refused() {
        assert_eq!(SingleServer::new(2.5, 0.4), Err(QueueError::Saturated { utilisation: 1.0 }));
        assert!(matches!(SingleServer::new(9.0, 0.4), Err(QueueError::Saturated { .. })));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(SingleServer::new(bad, 0.4), Err(QueueError::Rate(_))), "{bad}");
            assert!(matches!(SingleServer::new(2.0, bad), Err(QueueError::ServiceTime(_))), "{bad}");
            assert!(matches!(erlang_c(3, bad), Err(QueueError::Rate(_))), "{bad}");
            let pool = SlotPool { slots: 3, service: bad, burst: 1.0 };
            assert!(matches!(pool.wait(1.0), Err(QueueError::ServiceTime(_))), "{bad}");
        }
        let queue = SingleServer::new(2.0, 0.4).unwrap();
        for bad in [0.0, 1.0, -0.1, f64::NAN] {
            assert!(matches!(queue.md1_wait_quantile(bad), Err(QueueError::Quantile(_))), "{bad}");
        }
        for bad in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(matches!(queue.mg1_wait(bad), Err(QueueError::Variation(_))), "{bad}");
            let pool = SlotPool { slots: 3, service: 1.0, burst: bad };
            assert!(matches!(pool.wait(1.0), Err(QueueError::Variation(_))), "{bad}");
        }
        for bad in [0.9, f64::NAN] {
            let split = Parallelism::IntraOperator { speed_up: bad };
            assert!(matches!(prefill_delay(1.0, 0.4, split), Err(QueueError::Parallelism(_))), "{bad}");
        }
        let none = prefill_delay(1.0, 0.4, Parallelism::InterOperator { ways: 0 });
        assert_eq!(none, Err(QueueError::Parallelism(0.0)));
        assert_eq!(erlang_c(0, 1.0), Err(QueueError::Servers(0)));
        assert_eq!(erlang_c(u32::MAX, 1.0), Err(QueueError::Servers(u32::MAX)));
        assert!(matches!(erlang_c(3, 3.0), Err(QueueError::Saturated { .. })));
        for (p50, p95) in [(0.0, 1.0), (2.0, 1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert!(LognormalLength::from_percentiles(p50, p95).is_err(), "{p50} {p95}");
        }
        assert!(QueueError::Saturated { utilisation: 1.2 }.to_string().contains("1.200, not below 1"));
    }

    #[test]
    fn the_95th_percentile_of_the_wait_is_that_of_the_exact_law() {
        // Crommelin's sum for D = 1, computed apart, and nearly nothing at all for a queue that is nearly empty.
        for (rate, exact) in [(0.04, 0.0), (0.1, 0.5407), (0.25, 0.9456), (0.5, 2.0506), (0.6, 2.8295)] {
            let told = SingleServer::new(rate, 1.0).unwrap().md1_wait_quantile(0.95).unwrap();
            assert!((told - exact).abs() < 5e-3, "{rate}: {told} is not {exact}");
        }
        assert!(SingleServer::new(0.999, 1.0).unwrap().md1_wait_quantile(0.95).unwrap() > 1000.0);
        // ln(A / 0.05) / s, from s and A of the definition.
        let (rate, d) = (2.0, 0.4);
        let told = SingleServer::new(rate, d).unwrap().md1_wait_quantile(0.95).unwrap();
        let s = decay(rate * d) / d;
        close(rate * (s * d).exp_m1(), s, 1e-12);
        let a = (1.0 - rate * d) / (rate * d * (s * d).exp() - 1.0);
        close(told, (a / 0.05).ln() / s, 1e-12);
    }

    /// Waits of so many requests, one after the other (Lindley's recursion).
    fn simulated(rate: f64, services: impl Fn(&mut StdRng) -> f64, count: usize, seed: u64) -> Vec<f64> {
        let mut chance = StdRng::seed_from_u64(seed);
        let mut wait: f64 = 0.0;
        (0..count)
            .map(|_| {
                let now = wait;
                let gap = chance.sample::<f64, _>(Exp1) / rate;
                wait = (wait + services(&mut chance) - gap).max(0.0);
                now
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        #[test]
        fn simulated_queues_have_the_waits_of_the_formulas(
            utilisation in 0.3..0.7_f64, service in 0.01..3.0_f64, seed in 0..1000_u64
        ) {
            let queue = SingleServer::new(utilisation / service, service).unwrap();
            let mut waits = simulated(utilisation / service, |_| service, 200_000, seed);
            let mean = waits.iter().sum::<f64>() / waits.len() as f64;
            prop_assert!((mean / queue.md1_wait() - 1.0).abs() < 0.08, "mean {mean} {}", queue.md1_wait());
            waits.sort_by(f64::total_cmp);
            for quantile in [0.95, 0.99] {
                let seen = waits[(waits.len() as f64 * quantile) as usize];
                let told = queue.md1_wait_quantile(quantile).unwrap();
                prop_assert!((seen - told).abs() < 0.08 * told.max(service), "p{quantile}: {seen} {told}");
            }
        }

        #[test]
        fn simulated_queues_of_varied_prompts_wait_as_pollaczek_and_khinchine_say(
            utilisation in 0.2..0.6_f64, spread in 1.1..3.0_f64, seed in 0..1000_u64
        ) {
            let law = LognormalLength::from_percentiles(1.0, spread).unwrap();
            let draw = rand_distr::LogNormal::new(0.0, law.sigma).unwrap();
            let rate = utilisation / law.mean();
            let waits = simulated(rate, |chance| chance.sample(draw), 200_000, seed);
            let mean = waits.iter().sum::<f64>() / waits.len() as f64;
            let told = SingleServer::new(rate, law.mean()).unwrap().mg1_wait(law.variation()).unwrap();
            prop_assert!((mean / told - 1.0).abs() < 0.1, "{mean} {told}");
        }
    }
}
