//! Token counts reported by engines (`docs/semantics.md`, section 2): cumulative counts are not summed,
//! and arithmetic saturates.

use crate::types::{Dialect, Tokens};

use super::timeline::Usage;

/// Largest plausible token count: ten times the longest context of any engine. A larger report (mostly a
/// negative counter) is ignored.
const LARGEST: u64 = 100_000_000;

/// Counts of one `usage` object, each if it is a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UsageCounts {
    pub(super) input: Option<u64>,
    pub(super) output: Option<u64>,
    pub(super) cached: Option<u64>,
    pub(super) reasoning: Option<u64>,
    /// Messages: tokens read from and written to the cache, not included in `input`.
    pub(super) cache_read: Option<u64>,
    pub(super) cache_written: Option<u64>,
}

/// Counts of a response that does not generate, as embedders and rerankers report them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plain {
    /// `total_tokens`.
    pub(super) total: Option<u64>,
    /// Cohere's `meta.tokens` and `meta.billed_units`.
    pub(super) counted: InputOutput,
    pub(super) billed: InputOutput,
}

/// Input and output.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InputOutput {
    pub(super) input: Option<u64>,
    pub(super) output: Option<u64>,
}

impl Plain {
    /// Completes `usage`: all tokens that are not output are input. A prompt of 0 tokens beside a total
    /// counts as not reported.
    pub(super) fn complete(&self, usage: UsageCounts) -> UsageCounts {
        let output = usage.output.or(self.counted.output).or(self.billed.output);
        let rest = self.total.map(|total| total.saturating_sub(usage.output.unwrap_or(0)));
        let told = usage.input.filter(|input| *input > 0 || rest.is_none_or(|rest| rest == 0));
        let input = told.or(rest).or(self.counted.input).or(self.billed.input);
        UsageCounts { input, output, ..usage }
    }
}

/// Usage of the whole response.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsageTotals {
    /// Per field the last value, and the sum of the values followed by further ones.
    last: UsageCounts,
    earlier: UsageCounts,
    /// Whether usage-only events came, and whether one did not follow a further finish.
    came_alone: bool,
    last_is_all: bool,
    /// At the last usage-only event: number of finished choices, and the prompt of the choice that finished
    /// last.
    finishes: usize,
    prompt: u64,
}

impl UsageTotals {
    /// Takes usage at a position where the last report counts.
    pub(super) fn take(&mut self, counts: UsageCounts) {
        self.last.take(counts);
    }

    /// Takes a usage-only event after `finishes` finished choices, the last of them of `prompt`. Such events
    /// are summed only if each follows another choice's finish (llama.cpp), counting a prompt once for
    /// all its choices; otherwise the last one is the total.
    pub(super) fn behind(&mut self, counts: UsageCounts, finishes: usize, prompt: u64) {
        self.last_is_all |= finishes <= self.finishes;
        if self.last_is_all {
            self.earlier = UsageCounts::default();
        } else if self.came_alone {
            let earlier = std::mem::take(&mut self.last);
            self.earlier.add_output(earlier);
            if prompt != self.prompt {
                self.earlier.add_input(earlier);
            }
        }
        (self.came_alone, self.finishes, self.prompt) = (true, finishes, prompt);
        self.take(counts);
    }

    pub(super) fn sum(&self) -> UsageCounts {
        let mut sum = self.earlier;
        sum.add_output(self.last);
        sum.add_input(self.last);
        sum
    }
}

impl UsageCounts {
    /// Without impossible counts, which are treated as not reported.
    pub(super) fn possible(self) -> UsageCounts {
        let possible = |count: Option<u64>| count.filter(|count| *count <= LARGEST);
        UsageCounts {
            input: possible(self.input),
            output: possible(self.output),
            cached: possible(self.cached),
            reasoning: possible(self.reasoning),
            cache_read: possible(self.cache_read),
            cache_written: possible(self.cache_written),
        }
    }

    /// Per field the last explicit value wins.
    pub(super) fn take(&mut self, later: UsageCounts) {
        self.input = later.input.or(self.input);
        self.output = later.output.or(self.output);
        self.cached = later.cached.or(self.cached);
        self.reasoning = later.reasoning.or(self.reasoning);
        self.cache_read = later.cache_read.or(self.cache_read);
        self.cache_written = later.cache_written.or(self.cache_written);
    }

    pub(super) fn add_output(&mut self, other: UsageCounts) {
        self.output = plus(self.output, other.output);
        self.reasoning = plus(self.reasoning, other.reasoning);
    }

    pub(super) fn add_input(&mut self, other: UsageCounts) {
        self.input = plus(self.input, other.input);
        self.cached = plus(self.cached, other.cached);
        self.cache_read = plus(self.cache_read, other.cache_read);
        self.cache_written = plus(self.cache_written, other.cache_written);
    }

    /// In the Messages dialect input excludes cache reads and writes, which are added here.
    pub(super) fn usage(self, dialect: Dialect) -> Usage {
        let (input, cached) = match dialect {
            Dialect::Messages => (plus(plus(self.input, self.cache_read), self.cache_written), self.cache_read),
            _ => (self.input, self.cached),
        };
        Usage {
            input: input.map(Tokens),
            output: self.output.map(Tokens),
            reasoning: self.reasoning.map(Tokens),
            cached: cached.map(Tokens),
        }
    }
}

fn plus(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    }
}
