//! Prompts of a wanted length in tokens, with a wanted share in common. Pure.
//!
//! Text is plain English words. How many tokens a word is, and how many a chat template adds, is learned from what the
//! engine reports for a few probes ([`PromptCalibration`]); without it 1 token a word is assumed.
//!
//! A prompt begins with what it shares with others (the prefix, which a prefix cache may hold) and goes
//! on with words drawn for it alone: no two prompts have more in common than they are meant to. A run has a seed of
//! its own, so nothing that an earlier run left in a cache helps it.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::trace::PromptBlocks;

/// How words become tokens at the service under load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptCalibration {
    /// Tokens of a request without any words: the chat template's.
    pub base_tokens: f64,
    /// Tokens of a word.
    pub tokens_per_word: f64,
    /// Whether it was learned from the engine's usage.
    pub is_measured: bool,
}

impl Default for PromptCalibration {
    /// One token a word.
    fn default() -> Self {
        PromptCalibration { base_tokens: 0.0, tokens_per_word: 1.0, is_measured: false }
    }
}

impl PromptCalibration {
    /// The least-squares line through probes of so many words that were reported to be so many tokens.
    /// `None` where they do not say: fewer than two sizes, or tokens that do not grow with words.
    #[must_use]
    pub fn of_probes(probes: &[(u64, u64)]) -> Option<Self> {
        let n = probes.len() as f64;
        let mean_words = probes.iter().map(|(words, _)| *words as f64).sum::<f64>() / n;
        let mean_tokens = probes.iter().map(|(_, tokens)| *tokens as f64).sum::<f64>() / n;
        let spread: f64 = probes.iter().map(|(words, _)| (*words as f64 - mean_words).powi(2)).sum();
        let product = |(words, tokens): &(u64, u64)| (*words as f64 - mean_words) * (*tokens as f64 - mean_tokens);
        let slope = probes.iter().map(product).sum::<f64>() / spread;
        (slope.is_finite() && slope > 0.05).then(|| PromptCalibration {
            base_tokens: (mean_tokens - slope * mean_words).max(0.0),
            tokens_per_word: slope,
            is_measured: true,
        })
    }

    /// Words of a prompt of so many tokens; at least one.
    #[must_use]
    pub fn words_for(&self, tokens: u64) -> usize {
        ((tokens as f64 - self.base_tokens) / self.tokens_per_word).round().max(1.0) as usize
    }
}

/// The text of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptText {
    /// What it shares with others of its group; may be empty.
    pub shared: String,
    /// What it shares with nobody.
    pub own: String,
}

/// Words drawn afresh at the beginning of what is a prompt's own. After so many the text may repeat another
/// prompt's: a cache holds a prefix or nothing.
const FRESH: usize = 12;

/// Words of a recorded block that its hash names one by one.
const NAMED: usize = 9;

/// Words of the text that prompts are cut from.
const POOL: usize = 1 << 16;

/// Makes the prompts of one run.
pub struct PromptMaker {
    chance: StdRng,
    calibration: PromptCalibration,
    /// Share of a prompt's words that it has in common with its group.
    shared: f64,
    /// Beginnings in the pool, one for each group.
    groups: Vec<usize>,
    /// Words drawn for this run, and where each begins in the text.
    text: String,
    starts: Vec<usize>,
}

impl PromptMaker {
    /// Prompts whose first `shared` (0 to 1) is common to one of `groups` groups. The seed is the run's.
    #[must_use]
    pub fn new(calibration: PromptCalibration, shared: f64, groups: usize, seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let mut text = String::with_capacity(POOL * 6);
        let starts = (0..POOL)
            .map(|_| {
                let start = text.len();
                push_word(&mut text, &mut chance);
                start
            })
            .collect();
        let groups = (0..groups.max(1)).map(|_| chance.random_range(0..POOL)).collect();
        PromptMaker { chance, calibration, shared: shared.clamp(0.0, 1.0), groups, text, starts }
    }

    /// The next prompt, of about so many tokens.
    pub fn prompt(&mut self, tokens: u64) -> PromptText {
        let words = self.calibration.words_for(tokens);
        let shared = ((words as f64 * self.shared) as usize).min(words - 1);
        let group = self.groups[self.chance.random_range(0..self.groups.len())];
        let mut common = String::new();
        self.cut(group, shared, &mut common);
        let mut own = String::new();
        let fresh = (words - shared).min(FRESH);
        (0..fresh).for_each(|_| push_word(&mut own, &mut self.chance));
        let from = self.chance.random_range(0..POOL);
        self.cut(from, words - shared - fresh, &mut own);
        PromptText { shared: common, own }
    }

    /// A prompt of about so many tokens that begins as the blocks tell: the same words where the hashes are the same,
    /// and then words of its own.
    pub fn recorded(&mut self, tokens: u64, blocks: &PromptBlocks) -> PromptText {
        let words = self.calibration.words_for(tokens);
        let per_block = (blocks.tokens as f64 / self.calibration.tokens_per_word).round().max(1.0) as usize;
        let mut own = String::new();
        let mut written = 0;
        for hash in &blocks.hashes {
            let length = per_block.min(words.saturating_sub(written));
            // Seven bits of the hash choose a word; what follows is cut from the text at a place that it names, too.
            let named = length.min(NAMED);
            for place in 0..named {
                own.push_str(WORDS[(hash >> (7 * place)) as usize % WORDS.len()]);
                own.push(' ');
            }
            self.cut((hash >> 48) as usize % POOL, length - named, &mut own);
            written += length;
        }
        let left = words.saturating_sub(written);
        let fresh = left.min(FRESH);
        (0..fresh).for_each(|_| push_word(&mut own, &mut self.chance));
        let from = self.chance.random_range(0..POOL);
        self.cut(from, left - fresh, &mut own);
        PromptText { shared: String::new(), own }
    }

    /// Adds so many words of the text from a place on; at its end it begins again.
    fn cut(&self, mut from: usize, mut words: usize, to: &mut String) {
        while words > 0 {
            let upto = (from + words).min(POOL);
            let end = self.starts.get(upto).copied().unwrap_or(self.text.len());
            to.push_str(&self.text[self.starts[from]..end]);
            words -= upto - from;
            from = 0;
        }
    }
}

fn push_word(text: &mut String, chance: &mut StdRng) {
    text.push_str(WORDS[chance.random_range(0..WORDS.len())]);
    text.push(' ');
}

/// Words that most tokenizers know as one token with the blank in front of them.
const WORDS: [&str; 128] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
    "foot",
    "boy",
    "age",
    "policy",
    "process",
    "music",
    "market",
    "sense",
    "nation",
    "plan",
    "college",
    "interest",
    "death",
    "experience",
    "effect",
    "use",
    "class",
    "control",
    "care",
    "field",
    "rock",
    "deal",
    "light",
    "voice",
    "town",
    "road",
    "arm",
    "record",
    "action",
    "paper",
    "space",
    "ground",
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn words(prompt: &PromptText) -> Vec<String> {
        format!("{}{}", prompt.shared, prompt.own).split_whitespace().map(str::to_owned).collect()
    }

    /// Words in front that two prompts have in common.
    fn common(a: &[String], b: &[String]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn a_line_through_the_probes_is_found_and_nonsense_is_not_believed() {
        let found = PromptCalibration::of_probes(&[(10, 31), (110, 161), (210, 291)]).unwrap();
        assert!((found.tokens_per_word - 1.3).abs() < 1e-9 && (found.base_tokens - 18.0).abs() < 1e-9);
        assert_eq!((found.words_for(148), found.words_for(1)), (100, 1));
        for probes in [&[][..], &[(10, 12)], &[(10, 12), (10, 14)], &[(10, 50), (100, 50)]] {
            assert_eq!(PromptCalibration::of_probes(probes), None, "{probes:?}");
        }
    }

    #[test]
    fn prompts_share_what_they_are_meant_to_share_and_nothing_more() {
        for (shared, groups) in [(0.0, 1), (0.5, 1), (0.9, 4)] {
            let mut maker = PromptMaker::new(PromptCalibration::default(), shared, groups, 1);
            let prompts: Vec<PromptText> = (0..60).map(|_| maker.prompt(400)).collect();
            let beginnings: HashSet<&str> = prompts.iter().map(|prompt| prompt.shared.as_str()).collect();
            assert_eq!(beginnings.len(), if shared > 0.0 { groups } else { 1 });
            let words: Vec<Vec<String>> = prompts.iter().map(words).collect();
            let pairs = (0..60).flat_map(|a| (0..a).map(move |b| (a, b)));
            let most = pairs.map(|(a, b)| common(&words[a], &words[b])).max().unwrap();
            let expected = (400.0 * shared) as usize;
            assert!((expected..expected + 6).contains(&most), "{shared}: {most}");
        }
    }

    #[test]
    fn another_seed_shares_nothing_and_the_same_one_everything() {
        let first = |seed| PromptMaker::new(PromptCalibration::default(), 0.5, 1, seed).prompt(1000);
        assert_eq!(first(1), first(1));
        assert!(common(&words(&first(1)), &words(&first(2))) < 4);
    }

    #[test]
    fn words_are_different_and_plain() {
        assert_eq!(WORDS.iter().collect::<HashSet<_>>().len(), WORDS.len());
        assert!(WORDS.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase())));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_prompt_has_the_words_that_its_tokens_ask_for(tokens in 1..3_000_u64, shared in 0.0..=1.0_f64) {
            let mut maker = PromptMaker::new(PromptCalibration::default(), shared, 2, 7);
            let prompt = maker.prompt(tokens);
            prop_assert_eq!(words(&prompt).len() as u64, tokens);
            prop_assert!(!prompt.own.is_empty(), "something is always its own");
        }
    }
}
