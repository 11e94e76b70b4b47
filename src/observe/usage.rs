//! Counts of tokens as engines tell them (`docs/semantics.md`, section 2): nothing is summed
//! that is cumulative, and arithmetic saturates.

use crate::units::{Dialect, Tokens};

use super::timeline::Usage;

/// No answer has more tokens than this, and no prompt: ten times the longest context that any
/// engine offers. What an engine reports beyond it (a counter below zero, mostly) is no count.
const LARGEST: u64 = 100_000_000;

/// The token counts of one `usage` object, each where it was a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UsageCounts {
    pub(super) input: Option<u64>,
    pub(super) output: Option<u64>,
    pub(super) cached: Option<u64>,
    pub(super) reasoning: Option<u64>,
    /// Messages: tokens read from and written to the cache, beside `input`.
    pub(super) cache_read: Option<u64>,
    pub(super) cache_written: Option<u64>,
}

/// Counts of an answer that does not generate, as embedders and rerankers tell them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plain {
    /// `total_tokens`.
    pub(super) total: Option<u64>,
    /// Cohere's `meta.tokens`, and what `meta.billed_units` makes of them.
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
    /// The counts that `usage` does not tell: all that is not output is input. A prompt of 0 tokens beside
    /// a total is none that was told.
    pub(super) fn complete(&self, usage: UsageCounts) -> UsageCounts {
        let output = usage.output.or(self.counted.output).or(self.billed.output);
        let rest = self.total.map(|total| total.saturating_sub(usage.output.unwrap_or(0)));
        let told = usage.input.filter(|input| *input > 0 || rest.is_none_or(|rest| rest == 0));
        let input = told.or(rest).or(self.counted.input).or(self.billed.input);
        UsageCounts { input, output, ..usage }
    }
}

/// What usage said of the whole answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsageTotals {
    /// Per field the last value; and the sum of those behind which further ones came.
    last: UsageCounts,
    earlier: UsageCounts,
    /// Usage-only events came, and one of them did not follow a further finish.
    came_alone: bool,
    last_is_all: bool,
    /// When the last of them came: choices finished by then; the prompt of the choice that
    /// had finished.
    finishes: usize,
    prompt: u64,
}

impl UsageTotals {
    /// Usage in a place where the last word counts.
    pub(super) fn take(&mut self, counts: UsageCounts) {
        self.last.take(counts);
    }

    /// A usage-only event, with `finishes` choices finished, the last one of `prompt`. Such
    /// events add up only where each follows a further choice's finish (llama.cpp); a prompt
    /// counts once for all its choices. Where one does not, the last of them has the whole.
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
    /// A count that cannot be is none: it is as if the engine had not said it.
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

    /// Input of the Messages dialect leaves out what came from and went to the cache.
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
