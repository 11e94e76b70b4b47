//! Generated output: reasoning, words and tool calls, token by token.

use rand_distr::{Distribution, LogNormal};

use super::request::{ParsedRequest, ReasoningEffort};
use super::seed::mix;
use super::tool_call::ToolCall;

const WORDS: [&str; 32] = [
    " the", " gateway", " streams", " tokens", " under", " load", " and", " every", " answer", " keeps", " its",
    " promise", " when", " queues", " stay", " short", ",", " so", " a", " waiting", " user", " sees", " the",
    " first", " word", " soon", ".", " Übung", " 漢字", " of", " batch", " work",
];

/// A log-normal distribution of lengths with this median and 95th percentile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthDistribution {
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
}

impl LengthDistribution {
    /// The distribution; a constant if the percentiles do not increase.
    #[must_use]
    pub fn law(&self) -> LogNormal<f64> {
        let median = self.p50.max(1.0);
        // 1.6449 is the 95th percentile of the standard normal distribution.
        let sigma = (self.p95.max(median) / median).ln() / 1.6449;
        LogNormal::new(median.ln(), sigma).expect("a finite mean and a deviation of at least zero")
    }

    /// Draws a length, at least 1.
    pub fn draw(&self, chance: &mut impl rand::Rng) -> u64 {
        (self.law().sample(chance).round() as u64).max(1)
    }
}

/// One token of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    Reasoning(String),
    Text(String),
    /// The start of a tool call: its name.
    Call(String),
    Arguments(String),
    /// The end-of-sequence token, or the end of a call, without text.
    End,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinishReason {
    Stop,
    Length,
    Calls,
}

/// The complete output of one choice, token by token.
#[derive(Clone, Debug)]
pub(super) struct TextGenerator {
    seed: u64,
    reasoning: u64,
    tool: Option<ToolCall>,
    /// Tokens to its natural end, end token included.
    natural: u64,
    output: u64,
}

impl TextGenerator {
    /// The output of choice `index` of a request; `longest` is the room after its prompt.
    pub fn of(
        ask: &ParsedRequest,
        index: u64,
        output: LengthDistribution,
        reasoning: u64,
        longest: u64,
    ) -> TextGenerator {
        let seed = mix(ask.seed ^ index.wrapping_mul(0x5851_f42d_4c95_7f2d));
        let mut chance = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed);
        let thinks = match ask.effort {
            ReasoningEffort::None => 0,
            ReasoningEffort::Low => reasoning.div_ceil(4),
            ReasoningEffort::Medium => reasoning,
            ReasoningEffort::High => reasoning * 3,
        };
        let body = match &ask.tool {
            Some(tool) => 1 + tool.pieces.len() as u64,
            None => output.draw(&mut chance),
        };
        let natural = if ask.ignores_eos { u64::MAX } else { (thinks + body + 1).max(ask.at_least) };
        let output = natural.min(ask.cap.unwrap_or(u64::MAX)).min(longest).max(1);
        TextGenerator { seed, reasoning: thinks, tool: ask.tool.clone(), natural, output }
    }

    /// Number of tokens.
    pub const fn output(&self) -> u64 {
        self.output
    }

    /// Reasoning tokens among the first `tokens`.
    pub fn reasoning(&self, tokens: u64) -> u64 {
        tokens.min(self.reasoning)
    }

    /// Token `index`, counted from 0.
    pub fn piece(&self, index: u64) -> Fragment {
        let word = WORDS[(mix(self.seed ^ index) % WORDS.len() as u64) as usize];
        if index < self.reasoning {
            return Fragment::Reasoning(word.to_owned());
        }
        if index + 1 == self.natural {
            return Fragment::End;
        }
        let Some(tool) = &self.tool else { return Fragment::Text(word.to_owned()) };
        match index - self.reasoning {
            0 => Fragment::Call(tool.name.clone()),
            behind => {
                tool.pieces.get(behind as usize - 1).map_or(Fragment::End, |text| Fragment::Arguments(text.clone()))
            }
        }
    }

    /// Its finish reason.
    pub fn finish(&self) -> FinishReason {
        match &self.tool {
            _ if self.output < self.natural => FinishReason::Length,
            Some(_) => FinishReason::Calls,
            None => FinishReason::Stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn lengths_have_the_percentiles_they_were_given() {
        let lengths = LengthDistribution { p50: 200.0, p95: 800.0 };
        let mut chance = rand::rngs::StdRng::seed_from_u64(7);
        let mut drawn: Vec<u64> = (0..20_000).map(|_| lengths.draw(&mut chance)).collect();
        drawn.sort_unstable();
        assert!((190..=210).contains(&drawn[10_000]), "{}", drawn[10_000]);
        assert!((750..=850).contains(&drawn[19_000]), "{}", drawn[19_000]);
        assert_eq!(LengthDistribution { p50: 9.0, p95: 9.0 }.draw(&mut chance), 9);
    }
}
