//! Cost of compliant requests.

use serde::Serialize;

/// Prices of a class at its plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostPlan {
    /// Unit of every amount.
    pub currency: String,
    /// Fleet with its spares, for one hour.
    pub fleet_per_hour: f64,
    /// The same for a month of 730 hours.
    pub fleet_per_month: f64,
    /// One replica's hour by the requests that it is planned for, spares left out.
    pub per_request: f64,
    /// The same divided by the promised share of compliant requests.
    pub per_compliant_request: f64,
    /// A million prompt and output tokens of compliant requests, at the planned rate.
    pub per_million_compliant_tokens: f64,
    /// A million output tokens of them.
    pub per_million_compliant_output_tokens: f64,
    /// Compliant request while the peak lasts, with the spares.
    pub per_compliant_request_at_peak: f64,
    /// Compliant request over the whole day, with the spares; needs the mean rate.
    pub per_compliant_request_at_mean: Option<f64>,
}

/// Hours of a month: a year's 8,760 by twelve.
const HOURS_OF_MONTH: f64 = 730.0;

const SECONDS_OF_HOUR: f64 = 3600.0;

/// Inputs of the prices.
#[derive(Clone, Copy, Debug)]
pub struct CostBasis<'a> {
    /// Unit of every amount.
    pub currency: &'a str,
    /// One GPU for one hour.
    pub gpu_hour: f64,
    /// GPUs of one replica.
    pub gpus: u32,
    /// Replicas with spares.
    pub replicas: u32,
    /// Requests per second that one replica is planned for.
    pub planned_rate: f64,
    /// Promised share of requests that meet all objectives.
    pub target: f64,
    /// Requests per second at the peak.
    pub peak_rate: f64,
    /// Requests per second over the day.
    pub mean_rate: Option<f64>,
    /// Mean prompt and output tokens.
    pub tokens: (f64, f64),
}

impl CostBasis<'_> {
    /// The prices.
    ///
    /// Source: hourly price of a replica's GPUs by the requests of an hour, with goodput for the rate (DistServe,
    /// OSDI 2024, section 1, cost per query); dividing by the target counts only what is promised to comply.
    #[must_use]
    pub fn prices(&self) -> CostPlan {
        let replica_hour = self.gpu_hour * f64::from(self.gpus);
        let fleet_per_hour = replica_hour * f64::from(self.replicas);
        let per_request = replica_hour / (self.planned_rate * SECONDS_OF_HOUR);
        let per_compliant_request = per_request / self.target;
        let (input, output) = self.tokens;
        let at_rate = |rate: f64| fleet_per_hour / (rate * self.target * SECONDS_OF_HOUR);
        CostPlan {
            currency: self.currency.to_owned(),
            fleet_per_hour,
            fleet_per_month: fleet_per_hour * HOURS_OF_MONTH,
            per_request,
            per_compliant_request,
            per_million_compliant_tokens: per_compliant_request / (input + output) * 1e6,
            per_million_compliant_output_tokens: per_compliant_request / output * 1e6,
            per_compliant_request_at_peak: at_rate(self.peak_rate),
            per_compliant_request_at_mean: self.mean_rate.map(at_rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_costs_its_part_of_an_hour_and_a_compliant_one_a_little_more() {
        let basis = CostBasis {
            currency: "USD",
            gpu_hour: 2.5,
            gpus: 2,
            replicas: 7,
            planned_rate: 5.6,
            target: 0.92,
            peak_rate: 30.0,
            mean_rate: Some(12.0),
            tokens: (1200.0, 400.0),
        };
        let prices = basis.prices();
        assert_eq!((prices.fleet_per_hour, prices.fleet_per_month), (35.0, 25_550.0));
        assert!((prices.per_request - 5.0 / (5.6 * 3600.0)).abs() < 1e-15);
        assert!((prices.per_compliant_request * 0.92 - prices.per_request).abs() < 1e-15);
        assert!((prices.per_million_compliant_tokens - 1e6 * prices.per_compliant_request / 1600.0).abs() < 1e-12);
        assert!((prices.per_million_compliant_output_tokens / prices.per_million_compliant_tokens - 4.0).abs() < 1e-12);
        assert!((prices.per_compliant_request_at_peak - 35.0 / (30.0 * 0.92 * 3600.0)).abs() < 1e-15);
        assert!(prices.per_compliant_request_at_mean.unwrap() > prices.per_compliant_request_at_peak);
    }
}
