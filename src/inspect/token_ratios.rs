//! Bytes per token and tokens per event, learned from reported usage.
//!
//! Bytes per token is the quotient of two decaying sums, so that long prompts weigh more than short
//! ones and old reports fade. One prompt weighs at most [`HEAVIEST`] tokens.
//!
//! For multipart forms (audio) the bytes per input token are learned in the same way, and charged if the engine
//! reports no usage.
//!
//! Tokens per event enters verdicts, so it errs against the service: four of five of the last responses reached
//! it. It is not their mean, and one odd response does not move it.
//!
//! Reports beyond plausible bounds are ignored.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::Mutex;

use super::PromptSize;
use crate::types::{EngineId, Tokens};

/// Prompt bytes per token before anything was learned.
const BYTES_PER_TOKEN: f64 = 3.8;
/// Bounds of bytes per token.
const BYTES_BOUNDS: (f64, f64) = (0.5, 64.0);
/// The same of a form: text in it is shorter, and plain sound longer.
const FORM_BOUNDS: (f64, f64) = (1.0, 100_000.0);
/// Most tokens per event; a larger value is a whole response in one event.
const MOST_PER_EVENT: f64 = 64.0;
/// Shorter responses are ignored, because their first and last events carry buffered tokens.
const FEWEST_EVENTS: u64 = 8;
/// Responses needed before tokens per event is known, and most responses remembered.
const FEWEST_ANSWERS: usize = 3;
const LAST_ANSWERS: usize = 32;
/// Share of the sums kept at each response.
const KEPT: f64 = 1.0 - 1.0 / 200.0;
/// Largest weight of one response, tokens.
const HEAVIEST: f64 = 10_000.0;
/// Weight of the initial guess of bytes per token, in tokens: a few short prompts, mostly chat
/// template, do not overturn it.
const GUESS: f64 = 200.0;

/// Most learned model names that only patterns of the settings match, because clients choose
/// them.
const NAMES: usize = 4096;
/// Longer names are ignored.
const LONGEST_NAME: usize = 256;

/// Ratios learned from usage reports, by model. Shared, and kept across reloads.
#[derive(Debug, Default)]
pub struct Ratios {
    models: DashMap<Box<str>, Arc<Learned>, ahash::RandomState>,
}

/// The ratios of one model, looked up once per request.
#[derive(Clone, Debug, Default)]
pub struct ModelRatios(Option<Arc<Learned>>);

/// The learned ratios of one model.
#[derive(Debug, Default)]
pub struct Learned {
    tenants: Mutex<HashMap<Box<str>, TenantRatios, ahash::RandomState>>,
    /// Forms of all tenants.
    forms: Mutex<DecayedRatio>,
    events: Mutex<HashMap<EngineId, PerEvent, ahash::RandomState>>,
}

/// Bytes per token of one tenant's prompts and forms.
#[derive(Clone, Copy, Debug)]
struct TenantRatios {
    prompts: DecayedRatio,
    forms: DecayedRatio,
}

impl Default for TenantRatios {
    fn default() -> Self {
        let prompts = DecayedRatio { over: BYTES_PER_TOKEN * GUESS, under: GUESS };
        TenantRatios { prompts, forms: DecayedRatio::default() }
    }
}

impl Ratios {
    /// Nothing learned.
    #[must_use]
    pub fn new() -> Self {
        Ratios::default()
    }

    /// The ratios of the model that engines serve under this name.
    #[must_use]
    pub fn of(&self, model: Option<&str>) -> ModelRatios {
        let name = model.unwrap_or_default();
        if name.len() > LONGEST_NAME {
            return ModelRatios(None);
        }
        ModelRatios(self.models.get(name).map(|learned| Arc::clone(&learned)))
    }

    /// The ratios to update from a response of this model. `is_named` means that the settings name the model
    /// literally. `None` if too many other names are known.
    #[must_use]
    pub fn of_answer(&self, known: &ModelRatios, model: Option<&str>, is_named: bool) -> Option<Arc<Learned>> {
        if known.0.is_some() {
            return known.0.clone();
        }
        let name = model.unwrap_or_default();
        let has_place = is_named || self.models.len() < NAMES || self.models.contains_key(name);
        let may = name.len() <= LONGEST_NAME && has_place;
        may.then(|| Arc::clone(&self.models.entry(name.into()).or_default()))
    }

    /// Forgets all engines except these.
    pub fn keep_engines(&self, there: &HashSet<EngineId>) {
        for model in &self.models {
            model.events.lock().retain(|engine, _| there.contains(engine));
        }
    }
}

impl ModelRatios {
    /// Bytes per token of this tenant's prompts: 3.8 until learned.
    #[must_use]
    pub fn bytes_per_token(&self, tenant: &str) -> f64 {
        self.of_tenant(tenant).map_or(BYTES_PER_TOKEN, |known| known.prompts.within(BYTES_BOUNDS))
    }

    /// Expected input tokens of a form of this size: 0 until learned.
    #[must_use]
    pub fn form_tokens(&self, tenant: &str, bytes: u64) -> Tokens {
        let Some(learned) = self.0.as_ref().filter(|_| bytes > 0) else { return Tokens::ZERO };
        let own = self.of_tenant(tenant).map(|known| known.forms).filter(|forms| forms.under > 0.0);
        let forms = own.unwrap_or_else(|| *learned.forms.lock());
        if forms.under > 0.0 { Tokens((bytes as f64 / forms.within(FORM_BOUNDS)).ceil() as u64) } else { Tokens::ZERO }
    }

    fn of_tenant(&self, tenant: &str) -> Option<TenantRatios> {
        self.0.as_ref()?.tenants.lock().get(tenant).copied()
    }

    /// Output tokens per token event of this engine: 1 until learned.
    #[must_use]
    pub fn tokens_per_event(&self, engine: &EngineId) -> f64 {
        let reached = |learned: &Arc<Learned>| learned.events.lock().get(engine)?.reached;
        self.0.as_ref().and_then(reached).unwrap_or(1.0)
    }
}

impl Learned {
    /// Records that a response reported `input` tokens for a prompt of this size. Prompts with media, or of
    /// token ids only, are ignored because they say nothing about text.
    pub fn prompt(&self, tenant: &str, size: PromptSize, input: Tokens) {
        let tokens = input.less(Tokens(size.token_ids)).0;
        let (is_form, is_text) = (size.form_bytes > 0, size.bytes > 0 && !size.has_media);
        if tokens == 0 || !is_form && !is_text {
            return;
        }
        if is_form {
            self.forms.lock().learn(size.form_bytes, tokens, FORM_BOUNDS);
        }
        let mut tenants = self.tenants.lock();
        let own = match tenants.get_mut(tenant) {
            Some(own) => own,
            None => tenants.entry(tenant.into()).or_default(),
        };
        if is_form {
            own.forms.learn(size.form_bytes, tokens, FORM_BOUNDS);
        }
        if is_text {
            own.prompts.learn(size.bytes, tokens, BYTES_BOUNDS);
        }
    }

    /// Records that a plain response of this engine had `events` token events and `output` tokens.
    pub fn events(&self, engine: &EngineId, events: u64, output: Tokens) {
        let reported = output.0 as f64 / events as f64;
        if events < FEWEST_EVENTS || output.0 == 0 || reported > MOST_PER_EVENT {
            return;
        }
        let mut engines = self.events.lock();
        if let Some(known) = engines.get_mut(engine) {
            return known.learn(reported);
        }
        engines.entry(engine.clone()).or_default().learn(reported);
    }
}

/// Tokens per event that four of five responses reach.
#[derive(Debug, Default)]
struct PerEvent {
    /// Reports of the last responses, oldest first.
    last: VecDeque<f64>,
    reached: Option<f64>,
}

impl PerEvent {
    fn learn(&mut self, reported: f64) {
        if self.last.len() == LAST_ANSWERS {
            self.last.pop_front();
        }
        // An event carries at least one token.
        self.last.push_back(reported.max(1.0));
        if self.last.len() >= FEWEST_ANSWERS {
            let mut ranked: Vec<f64> = self.last.iter().copied().collect();
            let one_in_five = ranked.len() / 5;
            self.reached = Some(*ranked.select_nth_unstable_by(one_in_five, f64::total_cmp).1);
        }
    }
}

/// Quotient of two decaying sums.
#[derive(Clone, Copy, Debug, Default)]
struct DecayedRatio {
    over: f64,
    under: f64,
}

impl DecayedRatio {
    fn learn(&mut self, over: u64, under: u64, (least, most): (f64, f64)) {
        let (over, under) = (over as f64, under as f64);
        if !(least..=most).contains(&(over / under)) {
            return;
        }
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

    const TENANT: &str = "acme";

    impl Ratios {
        fn learn_prompt(&self, model: &str, size: PromptSize, input: Tokens) {
            self.of_answer(&ModelRatios(None), Some(model), false).unwrap().prompt(TENANT, size, input);
        }

        fn learn_events(&self, engine: &EngineId, model: &str, events: u64, output: Tokens) {
            self.of_answer(&ModelRatios(None), Some(model), false).unwrap().events(engine, events, output);
        }

        fn bytes_per_token(&self, model: &str) -> f64 {
            self.of(Some(model)).bytes_per_token(TENANT)
        }

        fn tokens_per_event(&self, engine: &EngineId, model: &str) -> f64 {
            self.of(Some(model)).tokens_per_event(engine)
        }
    }

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
    fn reported_usage_changes_the_ratio_of_that_model_only() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        for _ in 0..150 {
            ratios.learn_prompt("m", text(2000), Tokens(1000));
        }
        for answers in 1..=3 {
            assert_eq!(ratios.tokens_per_event(&engine, "m"), 1.0, "after {answers}");
            ratios.learn_events(&engine, "m", 20, Tokens(60));
        }
        assert!((ratios.bytes_per_token("m") - 2.0).abs() < 0.05);
        assert!((ratios.tokens_per_event(&engine, "m") - 3.0).abs() < 1e-9);
        assert_eq!((ratios.bytes_per_token("n"), ratios.tokens_per_event(&EngineId::from("e:2"), "m")), (3.8, 1.0));
    }

    #[test]
    fn the_cost_of_a_form_is_learned_from_forms() {
        let ratios = Ratios::new();
        let form = |form_bytes| PromptSize { form_bytes, ..PromptSize::default() };
        let tokens = |bytes| ratios.of(Some("m")).form_tokens(TENANT, bytes).0;
        ratios.learn_prompt("m", text(2000), Tokens(1000));
        ratios.learn_prompt("m", form(0), Tokens(1000));
        ratios.learn_prompt("m", form(10), Tokens(1000));
        assert_eq!(tokens(1_000_000), 0);
        ratios.learn_prompt("m", form(300_000), Tokens(1500));
        assert_eq!((tokens(0), tokens(1), tokens(600_000)), (0, 1, 3000));
        assert!((ratios.bytes_per_token("m") - 3.8).abs() < 2.0, "text is another thing");
    }

    #[test]
    fn what_one_tenant_teaches_changes_nothing_for_others() {
        let ratios = Ratios::new();
        let learned = ratios.of_answer(&ModelRatios(None), Some("m"), true).unwrap();
        (0..1000).for_each(|_| learned.prompt("acme", text(600), Tokens(1000)));
        (0..1000).for_each(|_| learned.prompt("globex", text(60_000), Tokens(1000)));
        let known = ratios.of(Some("m"));
        assert!(known.bytes_per_token("acme") < 0.7 && known.bytes_per_token("globex") > 59.0);
        assert_eq!(known.bytes_per_token("initech"), 3.8);
        let form = |form_bytes| PromptSize { form_bytes, ..PromptSize::default() };
        learned.prompt("acme", form(200_000), Tokens(1000));
        assert_eq!(known.form_tokens("initech", 200_000), Tokens(1000), "better than nothing");
        learned.prompt("initech", form(100_000), Tokens(1000));
        (0..1000).for_each(|_| learned.prompt("acme", form(2000), Tokens(1000)));
        assert_eq!(known.form_tokens("initech", 200_000), Tokens(2000));
    }

    #[test]
    fn a_changed_engine_is_followed() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        (0..1000).for_each(|_| ratios.learn_events(&engine, "m", 100, Tokens(400)));
        assert!((ratios.tokens_per_event(&engine, "m") - 4.0).abs() < 1e-9);
        (0..7).for_each(|_| ratios.learn_events(&engine, "m", 100, Tokens(100)));
        assert!((ratios.tokens_per_event(&engine, "m") - 1.0).abs() < 1e-9);
        (0..32).for_each(|_| ratios.learn_events(&engine, "m", 100, Tokens(200)));
        assert!((ratios.tokens_per_event(&engine, "m") - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_report_that_cannot_be_teaches_nothing() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        for lie in [Tokens(u64::MAX), Tokens(100_000_000), Tokens(6500), Tokens(0)] {
            ratios.learn_events(&engine, "m", 100, lie);
        }
        ratios.learn_prompt("m", text(u64::MAX), Tokens(1));
        ratios.learn_prompt("m", text(10), Tokens(100_000_000));
        assert_eq!((ratios.bytes_per_token("m"), ratios.tokens_per_event(&engine, "m")), (3.8, 1.0));
    }

    #[test]
    fn a_response_in_a_few_batches_is_not_learned_from() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        (0..1000).for_each(|_| ratios.learn_events(&engine, "m", 7, Tokens(120)));
        assert_eq!(ratios.tokens_per_event(&engine, "m"), 1.0);
    }

    /// One response in four of an odd kind does not count for the others.
    #[test]
    fn tokens_per_event_are_reached_by_most_responses() {
        let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
        for round in 0..1000 {
            ratios.learn_events(&engine, "m", 20, Tokens(if round % 4 == 0 { 20 } else { 1000 }));
        }
        assert!(ratios.tokens_per_event(&engine, "m") < 1.04);
    }

    #[test]
    fn names_that_clients_make_up_have_an_end_and_those_of_the_settings_have_their_place() {
        let ratios = Ratios::new();
        let learns = |name: &str, is_named| {
            ratios.of_answer(&ratios.of(Some(name)), Some(name), is_named).map(|learned| {
                learned.prompt(TENANT, text(2000), Tokens(1000));
            })
        };
        (0..NAMES).for_each(|number| learns(&format!("made-up-{number}"), false).unwrap());
        assert_eq!(learns("one-more", false), None);
        assert_eq!(learns("made-up-7", false), Some(()));
        assert_eq!(learns("of-the-settings", true), Some(()));
        assert_eq!(learns(&"x".repeat(LONGEST_NAME + 1), true), None);
        assert_eq!((ratios.bytes_per_token("one-more"), ratios.bytes_per_token("of-the-settings") < 3.0), (3.8, true));
    }

    #[test]
    fn engines_that_went_are_forgotten() {
        let (ratios, stays, goes) = (Ratios::new(), EngineId::from("e:1"), EngineId::from("e:2"));
        for engine in [&stays, &goes] {
            (0..3).for_each(|_| ratios.learn_events(engine, "m", 20, Tokens(60)));
        }
        ratios.keep_engines(&HashSet::from([stays.clone()]));
        assert_eq!((ratios.tokens_per_event(&stays, "m"), ratios.tokens_per_event(&goes, "m")), (3.0, 1.0));
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

        /// One response makes a later stream look at most as long as two or more of the last five
        /// justify.
        #[test]
        fn no_single_response_improves_the_ratio(
            reports in proptest::collection::vec((8u64..200, 1u64..2_000), 0..100),
        ) {
            let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
            let mut known: Vec<f64> = Vec::new();
            for (events, output) in reports {
                if output > events * 64 {
                    continue;
                }
                ratios.learn_events(&engine, "m", events, Tokens(output));
                known.push((output as f64 / events as f64).max(1.0));
                let last = &known[known.len().saturating_sub(32)..];
                let learned = ratios.tokens_per_event(&engine, "m");
                let reach = last.iter().filter(|reported| **reported >= learned).count();
                prop_assert!(learned == 1.0 || (reach >= 3 && reach * 5 >= last.len() * 4));
            }
        }

        /// One false report among any number of plain ones moves nothing.
        #[test]
        fn a_single_lie_moves_nothing(before in 0usize..40, lie in 9u64..500) {
            let (ratios, engine) = (Ratios::new(), EngineId::from("e:1"));
            (0..before).for_each(|_| ratios.learn_events(&engine, "m", 10, Tokens(20)));
            let known = ratios.tokens_per_event(&engine, "m");
            ratios.learn_events(&engine, "m", 8, Tokens(lie));
            prop_assert!(ratios.tokens_per_event(&engine, "m") <= known.max(2.0));
            prop_assert!(before >= 2 || ratios.tokens_per_event(&engine, "m") == 1.0);
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
