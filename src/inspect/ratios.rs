//! Bytes per token and tokens per event, learned from reported usage.
//!
//! Each ratio is the quotient of two sums that forget slowly, so that long answers weigh
//! more than short ones and last week weighs nothing. No single answer weighs more than
//! [`HEAVIEST`] tokens, and whatever engines report, a ratio stays within sane bounds.

use dashmap::DashMap;

use super::PromptSize;
use crate::units::{EngineId, Tokens};

/// Bytes of prompt per token, as long as nothing was learned.
const BYTES_PER_TOKEN: f64 = 3.8;
/// Between these bounds bytes per token stay.
const BYTES_BOUNDS: (f64, f64) = (0.5, 64.0);
/// An event carries at least one token; more than this many is no event but an answer.
const EVENT_BOUNDS: (f64, f64) = (1.0, 64.0);
/// What one answer keeps of the sums before it.
const KEPT: f64 = 1.0 - 1.0 / 200.0;
/// The most tokens by which one answer counts.
const HEAVIEST: f64 = 10_000.0;
/// How many tokens the first guess of bytes per token weighs: a few short prompts, mostly
/// chat template, do not overturn it.
const GUESS: f64 = 200.0;

/// Ratios learned from answers that reported usage. Shared, and kept over reloads. Keys are
/// names from the settings, never from requests.
#[derive(Debug, Default)]
pub struct Ratios {
    prompts: DashMap<String, Quotient, ahash::RandomState>,
    events: DashMap<EngineId, Vec<(String, Quotient)>, ahash::RandomState>,
}

impl Ratios {
    /// Nothing learned yet.
    #[must_use]
    pub fn new() -> Self {
        Ratios::default()
    }

    /// Prompt bytes per token of this model: 3.8 until learned.
    #[must_use]
    pub fn bytes_per_token(&self, model: &str) -> f64 {
        self.prompts.get(model).map_or(BYTES_PER_TOKEN, |learned| learned.within(BYTES_BOUNDS))
    }

    /// An answer reported `input` tokens for a prompt of this size. Prompts with media, and
    /// those of token ids only, teach nothing about text.
    pub fn learn_prompt(&self, model: &str, size: PromptSize, input: Tokens) {
        let tokens = input.less(Tokens(size.token_ids)).0;
        if size.bytes == 0 || tokens == 0 || size.has_media {
            return;
        }
        let guess = Quotient { over: BYTES_PER_TOKEN * GUESS, under: GUESS };
        if let Some(mut known) = self.prompts.get_mut(model) {
            return known.learn(size.bytes, tokens, BYTES_BOUNDS);
        }
        self.prompts.entry(model.to_owned()).or_insert(guess).learn(size.bytes, tokens, BYTES_BOUNDS);
    }

    /// Output tokens per token event of this engine and model: 1 until learned.
    #[must_use]
    pub fn tokens_per_event(&self, engine: &EngineId, model: &str) -> f64 {
        let models = self.events.get(engine.as_str());
        let learned = models.as_ref().and_then(|models| models.iter().find(|(name, _)| name == model));
        learned.map_or(EVENT_BOUNDS.0, |(_, learned)| learned.within(EVENT_BOUNDS))
    }

    /// An answer came in `events` token events and reported `output` tokens.
    pub fn learn_events(&self, engine: &EngineId, model: &str, events: u64, output: Tokens) {
        if events == 0 || output.0 == 0 {
            return;
        }
        let mut models = self.events.entry(engine.clone()).or_default();
        match models.iter_mut().find(|(name, _)| name == model) {
            Some((_, known)) => known.learn(output.0, events, EVENT_BOUNDS),
            None => {
                let mut new = Quotient::default();
                new.learn(output.0, events, EVENT_BOUNDS);
                models.push((model.to_owned(), new));
            }
        }
    }
}

/// Two sums that forget.
#[derive(Clone, Copy, Debug, Default)]
struct Quotient {
    over: f64,
    under: f64,
}

impl Quotient {
    /// A report beyond the bounds counts as one at the bound, or one lie would be believed
    /// for thousands of answers.
    fn learn(&mut self, over: u64, under: u64, (least, most): (f64, f64)) {
        let (over, under) = (over as f64, under as f64);
        let over = over.clamp(least * under, most * under);
        let weight = (HEAVIEST / under).min(1.0);
        self.over = self.over * KEPT + over * weight;
        self.under = self.under * KEPT + under * weight;
    }

    fn within(&self, (least, most): (f64, f64)) -> f64 {
        (self.over / self.under).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(bytes: u64) -> PromptSize {
        PromptSize { bytes, is_known: true, ..PromptSize::default() }
    }

    #[test]
    fn nothing_is_learned_from_nothing() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        ratios.learn_prompt("m", text(0), Tokens(10));
        ratios.learn_prompt("m", text(10), Tokens(0));
        ratios.learn_prompt("m", PromptSize { token_ids: 10, ..text(4) }, Tokens(10));
        ratios.learn_prompt("m", PromptSize { has_media: true, ..text(4) }, Tokens(1000));
        ratios.learn_events(&engine, "m", 0, Tokens(5));
        ratios.learn_events(&engine, "m", 5, Tokens(0));
        assert_eq!((ratios.bytes_per_token("m"), ratios.tokens_per_event(&engine, "m")), (3.8, 1.0));
    }

    #[test]
    fn what_engines_report_becomes_the_ratio_of_that_model_only() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        for _ in 0..100 {
            ratios.learn_prompt("m", text(2000), Tokens(1000));
            ratios.learn_events(&engine, "m", 10, Tokens(30));
        }
        assert!((ratios.bytes_per_token("m") - 2.0).abs() < 0.05);
        assert!((ratios.tokens_per_event(&engine, "m") - 3.0).abs() < 1e-9);
        assert_eq!((ratios.bytes_per_token("n"), ratios.tokens_per_event(&EngineId::from("e:2"), "m")), (3.8, 1.0));
    }

    #[test]
    fn a_changed_engine_is_followed() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        (0..1000).for_each(|_| ratios.learn_events(&engine, "m", 100, Tokens(400)));
        (0..1000).for_each(|_| ratios.learn_events(&engine, "m", 100, Tokens(100)));
        assert!(ratios.tokens_per_event(&engine, "m") < 1.05);
    }

    #[test]
    fn one_lie_is_soon_forgotten() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        ratios.learn_events(&engine, "m", 1, Tokens(u64::MAX));
        ratios.learn_prompt("m", text(u64::MAX), Tokens(1));
        for _ in 0..100 {
            ratios.learn_events(&engine, "m", 100, Tokens(100));
            ratios.learn_prompt("m", text(4000), Tokens(1000));
        }
        assert!(ratios.tokens_per_event(&engine, "m") < 1.1);
        assert!((ratios.bytes_per_token("m") - 4.0).abs() < 0.1);
    }

    proptest! {
        #[test]
        fn whatever_is_reported_the_ratios_stay_sane(reports in proptest::collection::vec(any::<(u64, u64, u64)>(), 0..50)) {
            let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
            for (bytes, token_ids, tokens) in reports {
                ratios.learn_prompt("m", PromptSize { token_ids, ..text(bytes) }, Tokens(tokens));
                ratios.learn_events(&engine, "m", bytes, Tokens(tokens));
                prop_assert!((0.5..=64.0).contains(&ratios.bytes_per_token("m")));
                prop_assert!((1.0..=64.0).contains(&ratios.tokens_per_event(&engine, "m")));
            }
        }

        #[test]
        fn true_reports_lead_to_the_truth(per_token in 2u64..8, sizes in proptest::collection::vec(1u64..50_000, 200)) {
            let ratios = Ratios::new();
            for tokens in sizes {
                ratios.learn_prompt("m", text(tokens * per_token), Tokens(tokens));
            }
            prop_assert!((ratios.bytes_per_token("m") / per_token as f64 - 1.0).abs() < 0.02);
        }
    }
}
