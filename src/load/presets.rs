//! Limits of the scenarios Server and Interactive of MLPerf Inference, as classes. Pure.
//!
//! MLPerf requires the 99th percentiles of TTFT and of TPOT separately. Here both must hold on the same
//! request for 99 of 100 requests, which is stricter.

use std::time::Duration;

use crate::judge::{Objective, Objectives};

/// A benchmark's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// TTFT limit in milliseconds, at p99.
    pub ttft_millis: u64,
    /// TPOT limit in milliseconds, at p99.
    pub tpot_millis: u64,
}

const fn preset(name: &'static str, ttft_millis: u64, tpot_millis: u64) -> Preset {
    Preset { name, ttft_millis, tpot_millis }
}

/// All presets: the limits of the submission checker of MLPerf Inference v6.0.
pub const PRESETS: [Preset; 11] = [
    preset("mlperf/llama2-70b", 2000, 200),
    preset("mlperf/llama2-70b-interactive", 450, 40),
    preset("mlperf/llama3.1-405b", 6000, 175),
    preset("mlperf/llama3.1-405b-interactive", 4500, 80),
    preset("mlperf/llama3.1-8b", 2000, 100),
    preset("mlperf/llama3.1-8b-interactive", 500, 30),
    preset("mlperf/deepseek-r1", 2000, 80),
    preset("mlperf/deepseek-r1-interactive", 1500, 15),
    preset("mlperf/mixtral-8x7b", 2000, 200),
    preset("mlperf/gpt-oss-120b", 3000, 80),
    preset("mlperf/gpt-oss-120b-interactive", 2000, 15),
];

/// Share of requests within each limit.
const P99: f64 = 0.99;

impl Preset {
    /// The preset of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Preset> {
        PRESETS.into_iter().find(|preset| preset.name == name)
    }

    /// Its limits as objectives that must hold together.
    #[must_use]
    pub fn objectives(self) -> Objectives {
        let at_p99 = |millis| Some(Objective { threshold: Duration::from_millis(millis), attainment: P99 });
        Objectives {
            ttft: at_p99(self.ttft_millis),
            tpot: at_p99(self.tpot_millis),
            joint_target: P99,
            ..Objectives::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_found_by_its_name_and_holds_jointly() {
        let found = Preset::find("mlperf/llama3.1-8b-interactive").unwrap().objectives();
        assert_eq!(found.ttft.unwrap().threshold, Duration::from_millis(500));
        assert_eq!((found.tpot.unwrap().threshold, found.joint_target), (Duration::from_millis(30), 0.99));
        assert_eq!(Preset::find("mlperf/llama3.1-8b-INTERACTIVE"), None);
    }

    #[test]
    fn every_preset_has_the_limits_of_its_benchmark() {
        let found =
            PRESETS.map(|preset| (preset.name.trim_start_matches("mlperf/"), preset.ttft_millis, preset.tpot_millis));
        let published = [
            ("llama2-70b", 2000, 200),
            ("llama2-70b-interactive", 450, 40),
            ("llama3.1-405b", 6000, 175),
            ("llama3.1-405b-interactive", 4500, 80),
            ("llama3.1-8b", 2000, 100),
            ("llama3.1-8b-interactive", 500, 30),
            ("deepseek-r1", 2000, 80),
            ("deepseek-r1-interactive", 1500, 15),
            ("mixtral-8x7b", 2000, 200),
            ("gpt-oss-120b", 3000, 80),
            ("gpt-oss-120b-interactive", 2000, 15),
        ];
        assert_eq!(found, published);
    }
}
