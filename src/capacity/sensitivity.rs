//! What-if cases of a plan.

use serde::Serialize;

use super::fleet::{FleetSize, concurrency, e2e, mean_context, utilisation};
use super::inputs::{CapacityInputs, ClassForecast, PrefixCacheFacts};

/// One thing that could be otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The change.
    pub name: String,
    /// Assumption that links the change to capacity.
    pub assumes: &'static str,
    /// Goodput of one replica then.
    pub goodput: f64,
    /// Replicas that would be needed.
    pub size: FleetSize,
    /// Requests in the fleet at the peak.
    pub concurrency: f64,
    /// Tokens of context that they hold.
    pub live_kv_tokens: f64,
    /// Peak divided by the goodput of the *planned* fleet after the loss; absent without a replica.
    pub utilisation: Option<f64>,
    /// Whether the planned fleet would still meet the target.
    pub holds: bool,
}

/// Factor by which a request's work grows when fewer prompt tokens come from the prefix cache.
///
/// Prefill work is proportional to the computed tokens; other work is constant. Without a known share of
/// prefill all work counts as prefill, which is an upper bound.
#[must_use]
pub fn work_at_p10(cache: &PrefixCacheFacts) -> f64 {
    let share = cache.prefill_share.unwrap_or(1.0);
    share * (1.0 - cache.hit_rate_p10) / (1.0 - cache.hit_rate) + 1.0 - share
}

/// Changes to a class's figures, as factors.
#[derive(Clone, Copy)]
struct WhatIfFactors {
    peak: f64,
    lengths: f64,
    goodput: f64,
    lost: u32,
}

const NONE: WhatIfFactors = WhatIfFactors { peak: 1.0, lengths: 1.0, goodput: 1.0, lost: 0 };

/// Lengths that grow by a quarter.
const LONGER: f64 = 1.25;

/// Peak of the usual replay above forecast.
const HIGHER_PEAK: f64 = 1.3;

/// The largest difference between sweeps that is not called noise.
const NOISE: f64 = 0.9;

/// The scenarios of a class whose fleet is planned with this size.
pub(super) fn scenarios(inputs: &CapacityInputs, class: &ClassForecast, planned: FleetSize) -> Vec<WhatIf> {
    let of = |name: &str, assumes: &'static str, change: WhatIfFactors| {
        let goodput = class.goodput * change.goodput;
        let peak = class.peak_rate * change.peak;
        let output = class.output_tokens * change.lengths;
        let time = e2e(class.ttft * change.lengths, class.tpot, output);
        let running = concurrency(peak, time);
        let left = planned.total.saturating_sub(change.lost);
        let utilisation = utilisation(peak, goodput, left);
        WhatIf {
            name: name.to_owned(),
            assumes,
            goodput,
            size: FleetSize::of(peak, goodput, inputs.headroom, inputs.spare),
            concurrency: running,
            live_kv_tokens: running * mean_context(class.input_tokens * change.lengths, output),
            utilisation,
            holds: utilisation.is_some_and(|share| share <= 1.0),
        }
    };
    let mut all = vec![
        of("as planned", "nothing differs", NONE),
        of(
            "prompts and answers 25 % longer",
            "the work of a request is proportional to its tokens",
            WhatIfFactors { lengths: LONGER, goodput: 1.0 / LONGER, ..NONE },
        ),
        of("one replica lost at the peak", "the others share its traffic at once", WhatIfFactors { lost: 1, ..NONE }),
        of("peak 30 % higher", "lengths stay as they are", WhatIfFactors { peak: HIGHER_PEAK, ..NONE }),
        of("goodput 10 % lower", "the most that repeated sweeps may differ", WhatIfFactors { goodput: NOISE, ..NONE }),
    ];
    if let Some(cache) = &class.prefix_cache {
        let assumes = match cache.prefill_share {
            Some(_) => "prefill work is proportional to the tokens that are not cached",
            None => "the engine does nothing but prefill: a bound; give the share of prefill for a better one",
        };
        let goodput = 1.0 / work_at_p10(cache);
        all.push(of("cache hit rate at its 10th percentile", assumes, WhatIfFactors { goodput, ..NONE }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_hits_make_more_work_of_the_share_that_is_prefill() {
        let cache = PrefixCacheFacts { hit_rate: 0.6, hit_rate_p10: 0.2, prefill_share: None };
        assert_eq!(work_at_p10(&cache), 2.0, "twice as many tokens are computed");
        assert_eq!(work_at_p10(&PrefixCacheFacts { prefill_share: Some(0.25), ..cache }), 1.25);
        let steady = PrefixCacheFacts { hit_rate_p10: 0.6, ..cache };
        assert_eq!(work_at_p10(&steady), 1.0);
    }
}
