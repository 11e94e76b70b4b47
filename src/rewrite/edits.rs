//! The splices that a request needs for one engine.
//!
//! The list in `docs/semantics.md` is closed: the alias of `model`, removal of the client's
//! `priority`, usage on streams, `priority` for engines that schedule by it, a lowered output cap, and
//! reduced reasoning. Everything else is forwarded as sent.

use bytes::Bytes;

use super::Splice;
use crate::inspect::{Facts, Field, Reasoning, StreamOptions, SwitchGroup};
use crate::types::Dialect;

/// How far a request's extended reasoning is reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningEdit {
    /// Unchanged.
    #[default]
    AsAsked,
    /// Reduce the requested reasoning.
    Less,
    /// Also add a switch where the body has none, for engines whose chat templates support
    /// it.
    LessByTemplate,
}

/// The changes wanted for one request on one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EditPlan<'a> {
    /// The engine's model name, if the client used an alias.
    pub model: Option<&'a str>,
    /// Request usage at the end of a stream.
    pub inject_usage: bool,
    /// Also request usage on every event, if usage is requested at all.
    pub continuous_usage: bool,
    /// The engine honours a request for usage on every event without one for usage (SGLang).
    pub heeds_continuous_alone: bool,
    /// `priority`, for engines that schedule by it.
    pub engine_priority: Option<i64>,
    /// Largest output cap per choice at the current overload level.
    pub lowered_cap: Option<u64>,
    /// Reasoning at the current overload level.
    pub thinking: ReasoningEdit,
}

/// The splices of one request, and what to hide from the client afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edits {
    /// Sorted, without overlap.
    pub splices: Vec<Splice>,
    /// The splices without injected members, for an engine that refuses unknown members; `None` if nothing
    /// was injected.
    pub without_injection: Option<Vec<Splice>>,
    /// Whether a usage event will come that the client did not request.
    pub usage_injected: bool,
    /// Whether usage on every event is caused by the gateway: the client did not request it, or its request
    /// would have had no effect without the injected one.
    pub continuous_injected: bool,
    /// Whether a cap was lowered or inserted.
    pub cap_lowered: bool,
    /// Whether reasoning was reduced.
    pub reasoning_off: bool,
}

/// The splices of `plan` for this body. The client's own `priority` is always removed.
#[must_use]
pub fn edits(facts: &Facts, dialect: Dialect, plan: &EditPlan<'_>) -> Edits {
    if *plan == EditPlan::default() && facts.priority.is_none() {
        return Edits::default();
    }
    let mut draft = EditDraft::default();
    draft.rename(facts, plan);
    draft.lower_cap(facts, dialect, plan);
    let mut bare = draft.clone();
    draft.ask_for_usage(facts, dialect, plan);
    if let Some(priority) = plan.engine_priority {
        draft.members.push(format!("\"priority\":{priority}"));
        draft.is_injected = true;
    }
    draft.think_less(facts, dialect, plan.thinking);
    let is_idle = facts.asks_continuous_usage() && !plan.heeds_continuous_alone;
    let wakes_continuous = draft.usage_injected && is_idle;
    bare.drop_priority(facts);
    draft.drop_priority(facts);
    Edits {
        usage_injected: draft.usage_injected,
        continuous_injected: draft.continuous_injected || wakes_continuous,
        cap_lowered: draft.cap_lowered,
        reasoning_off: draft.reasoning_off,
        without_injection: draft.is_injected.then(|| bare.splices(facts)),
        splices: draft.splices(facts),
    }
}

#[derive(Clone, Debug, Default)]
struct EditDraft {
    splices: Vec<Splice>,
    /// Inserted top-level members.
    members: Vec<String>,
    is_injected: bool,
    usage_injected: bool,
    continuous_injected: bool,
    cap_lowered: bool,
    reasoning_off: bool,
}

impl EditDraft {
    fn replace(&mut self, at: &std::ops::Range<usize>, with: impl Into<Bytes>) {
        self.splices.push(Splice { at: at.clone(), with: with.into() });
    }

    fn rename(&mut self, facts: &Facts, plan: &EditPlan<'_>) {
        if let (Some(field), Some(name)) = (&facts.model, plan.model) {
            self.replace(&field.at, serde_json::Value::from(name).to_string());
        }
    }

    /// Cuts the range found by the scanner, which includes one comma.
    fn drop_priority(&mut self, facts: &Facts) {
        if let Some(member) = &facts.priority {
            self.replace(member, Bytes::new());
        }
    }

    /// Lowers every cap above the new one, as far as the request's minimum allows; inserts the dialect's own
    /// cap if missing.
    fn lower_cap(&mut self, facts: &Facts, dialect: Dialect, plan: &EditPlan<'_>) {
        let (Some(cap), Some(own)) = (plan.lowered_cap, cap_names(dialect)) else { return };
        // Engines refuse a cap below the request's own minimum.
        let cap = cap.max(facts.least_output);
        let caps = &facts.caps;
        let stated = [
            ("max_tokens", &caps.max_tokens),
            ("max_completion_tokens", &caps.max_completion_tokens),
            ("max_output_tokens", &caps.max_output_tokens),
        ];
        let mut has_own = false;
        for (name, field) in stated {
            let Some(field) = field else { continue };
            has_own |= own.contains(&name);
            if field.value > cap {
                self.cap_lowered = true;
                self.replace(&field.at, cap.to_string());
            }
        }
        for (_, field) in caps.others.iter().filter(|(_, field)| field.value > cap) {
            self.cap_lowered = true;
            self.replace(&field.at, cap.to_string());
        }
        for (name, literal) in &caps.open {
            has_own |= own.contains(name);
            self.cap_lowered = true;
            self.replace(literal, cap.to_string());
        }
        if !has_own {
            self.cap_lowered = true;
            self.members.push(format!("\"{}\":{cap}", own[0]));
        }
    }

    /// Requests usage on streams, only in dialects with such an option; the others report it
    /// anyway.
    fn ask_for_usage(&mut self, facts: &Facts, dialect: Dialect, plan: &EditPlan<'_>) {
        let knows_how = matches!(dialect, Dialect::Chat | Dialect::Completions);
        if !knows_how || !facts.streams() {
            return;
        }
        self.usage_injected = plan.inject_usage && !facts.asks_usage();
        let has_usage = plan.inject_usage || facts.asks_usage();
        self.continuous_injected = plan.continuous_usage && has_usage && !facts.asks_continuous_usage();
        self.is_injected = self.usage_injected || self.continuous_injected;
        if self.is_injected {
            self.set_options(facts.stream_options.as_ref());
        }
    }

    fn set_options(&mut self, options: Option<&StreamOptions>) {
        let mut missing = Vec::new();
        let wanted: [(bool, &str, Flag); 2] = [
            (self.usage_injected, "\"include_usage\":true", |options| options.include_usage.as_ref()),
            (self.continuous_injected, "\"continuous_usage_stats\":true", |options| {
                options.continuous_usage_stats.as_ref()
            }),
        ];
        for (is_wanted, member, flag) in wanted {
            match options.and_then(flag) {
                _ if !is_wanted => {}
                // Replaces false or null; the member stays.
                Some(field) => self.replace(&field.at, "true"),
                None => missing.push(member),
            }
        }
        let missing = missing.join(",");
        match options {
            None => self.members.push(format!("\"stream_options\":{{{missing}}}")),
            Some(options) if options.is_null => self.replace(&options.at, format!("{{{missing}}}")),
            Some(_) if missing.is_empty() => {}
            Some(options) => {
                let comma = if options.is_empty { "" } else { "," };
                let inside = options.at.start + 1;
                self.replace(&(inside..inside), format!("{missing}{comma}"));
            }
        }
    }

    /// Reduces each switch that asks for reasoning, whatever the others say. A body that already asks for
    /// none, and nowhere for more, is unchanged. Engines may refuse unknown switches, so these count as
    /// injected.
    fn think_less(&mut self, facts: &Facts, dialect: Dialect, thinking: ReasoningEdit) {
        let has_switch = matches!(dialect, Dialect::Chat | Dialect::Responses | Dialect::Messages);
        if thinking == ReasoningEdit::AsAsked || !has_switch {
            return;
        }
        let switches = &facts.switches;
        let before = (self.splices.len(), self.members.len());
        if let Some(effort) = switches.effort.as_ref().filter(|effort| asks_for_more(Some(effort.value))) {
            self.replace(&effort.at, LOW);
        }
        if let Some(thinking) = switches.thinking.as_ref().filter(|field| field.value != Some(Reasoning::None)) {
            self.replace(&thinking.at, r#"{"type":"disabled"}"#);
        }
        for (_, effort) in switches.reasoning.iter().flat_map(|nest| &nest.members) {
            if asks_for_more(effort.value) {
                self.replace(&effort.at, LOW);
            }
        }
        if thinking == ReasoningEdit::LessByTemplate {
            let is_off = self.splices.len() == before.0 && says_none(facts);
            match dialect {
                Dialect::Chat => {
                    self.switch(switches.template.as_ref(), TEMPLATE, &[ENABLE_THINKING, THINKING], is_off)
                }
                Dialect::Responses => self.switch(switches.reasoning.as_ref(), REASONING, &[EFFORT], is_off),
                Dialect::Completions | Dialect::Messages | Dialect::Plain => {}
            }
        }
        self.reasoning_off = (self.splices.len(), self.members.len()) != before;
        self.is_injected |= self.reasoning_off;
    }

    /// Sets switches in an object, inserting missing ones; `wanted` are names and values. If all other
    /// switches are off (`is_off`), acts only if one present here is
    /// not.
    fn switch<T: IsUnset>(&mut self, nest: Option<&SwitchGroup<T>>, name: &str, wanted: &[(&str, &str)], is_off: bool) {
        let is_low = |field: &Field<Option<T>>| T::is_low(field.value.as_ref());
        if is_off && nest.is_none_or(|nest| nest.members.iter().all(|(_, field)| is_low(field))) {
            return;
        }
        let stands = |name: &str| nest.is_some_and(|nest| nest.members.iter().any(|(member, _)| *member == name));
        let missing = wanted.iter().filter(|(name, _)| !stands(name));
        let missing: Vec<String> = missing.map(|(name, value)| format!("\"{name}\":{value}")).collect();
        let missing = missing.join(",");
        match nest {
            None => self.members.push(format!("\"{name}\":{{{missing}}}")),
            Some(nest) if nest.is_other => {}
            Some(nest) if nest.is_null => self.replace(&nest.at, format!("{{{missing}}}")),
            Some(nest) => {
                for (member, field) in nest.members.iter().filter(|(_, field)| !is_low(field)) {
                    if let Some((_, value)) = wanted.iter().find(|(name, _)| name == member) {
                        self.replace(&field.at, (*value).to_owned());
                    }
                }
                if !missing.is_empty() {
                    let comma = if nest.is_empty { "" } else { "," };
                    let inside = nest.at.start + 1;
                    self.replace(&(inside..inside), format!("{missing}{comma}"));
                }
            }
        }
    }

    /// All splices in order. New members are inserted together, before the others.
    fn splices(mut self, facts: &Facts) -> Vec<Splice> {
        if !self.members.is_empty() {
            let left = facts.members - usize::from(facts.priority.is_some());
            let comma = if left == 0 { "" } else { "," };
            let with = Bytes::from(self.members.join(",") + comma);
            self.splices.insert(0, Splice { at: facts.members_at..facts.members_at, with });
        }
        self.splices.sort_by_key(|splice| splice.at.start);
        self.splices
    }
}

const LOW: &str = "\"low\"";
const TEMPLATE: &str = "chat_template_kwargs";
const REASONING: &str = "reasoning";
const ENABLE_THINKING: (&str, &str) = ("enable_thinking", "false");
const THINKING: (&str, &str) = ("thinking", "false");
const EFFORT: (&str, &str) = ("effort", LOW);

/// Whether any switch of the body turns reasoning off.
fn says_none(facts: &Facts) -> bool {
    let switches = &facts.switches;
    let mut flags = switches.template.iter().flat_map(|nest| &nest.members);
    let mut efforts = switches.reasoning.iter().flat_map(|nest| &nest.members);
    facts.reasoning == Some(Reasoning::None)
        || switches.effort.as_ref().is_some_and(|effort| effort.value == Reasoning::None)
        || switches.thinking.as_ref().is_some_and(|thinking| thinking.value == Some(Reasoning::None))
        || efforts.any(|(_, effort)| effort.value == Some(Reasoning::None))
        || flags.any(|(_, flag)| flag.value == Some(false))
}

/// Whether a stated effort exceeds the lowest one that every model supports.
fn asks_for_more(effort: Option<Reasoning>) -> bool {
    matches!(effort, Some(Reasoning::Medium | Reasoning::High | Reasoning::On))
}

/// A switch that already has its value, or was just set.
trait IsUnset: Sized {
    fn is_low(value: Option<&Self>) -> bool;
}

impl IsUnset for bool {
    fn is_low(value: Option<&Self>) -> bool {
        value == Some(&false)
    }
}

impl IsUnset for Reasoning {
    fn is_low(value: Option<&Self>) -> bool {
        value.is_some()
    }
}

type Flag = fn(&StreamOptions) -> Option<&Field<Option<bool>>>;

/// The dialect's names of the output cap, preferred one first.
const fn cap_names(dialect: Dialect) -> Option<&'static [&'static str]> {
    match dialect {
        Dialect::Chat => Some(&["max_tokens", "max_completion_tokens"]),
        Dialect::Completions | Dialect::Messages => Some(&["max_tokens"]),
        Dialect::Responses => Some(&["max_output_tokens"]),
        Dialect::Plain => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;
    use crate::inspect::{Scanner, Unreadable, tests::request};
    use crate::rewrite::{apply, length_after};
    use crate::types::ApiPath;

    const USAGE: EditPlan<'_> = EditPlan {
        model: None,
        inject_usage: true,
        continuous_usage: false,
        heeds_continuous_alone: false,
        engine_priority: None,
        lowered_cap: None,
        thinking: ReasoningEdit::AsAsked,
    };

    fn facts(body: &str, path: &str) -> Facts {
        let mut scanner = Scanner::new(ApiPath::relayed(path).unwrap());
        scanner.push(body.as_bytes()).unwrap();
        *scanner.finish().unwrap()
    }

    fn chat(body: &str) -> Facts {
        facts(body, "/v1/chat/completions")
    }

    fn spliced(body: &str, splices: &[Splice]) -> String {
        let out = apply(&[Bytes::copy_from_slice(body.as_bytes())], splices).concat();
        assert_eq!(out.len(), length_after(body.len(), splices));
        String::from_utf8(out).unwrap()
    }

    fn sent(body: &str, plan: &EditPlan<'_>) -> String {
        spliced(body, &edits(&chat(body), Dialect::Chat, plan).splices)
    }

    #[test]
    fn c62_the_new_length_is_the_length_of_the_new_body() {
        let body = r#"{"model":"m1","stream":true}"#;
        let edits = edits(&chat(body), Dialect::Chat, &USAGE);
        let out = spliced(body, &edits.splices);
        assert_eq!(out, r#"{"stream_options":{"include_usage":true},"model":"m1","stream":true}"#);
        assert_eq!(out.len(), length_after(body.len(), &edits.splices));
        let frames: Vec<Bytes> = body.as_bytes().chunks(3).map(Bytes::copy_from_slice).collect();
        assert_eq!(apply(&frames, &edits.splices).concat(), out.as_bytes());
    }

    #[test]
    fn c63_everything_else_stays_byte_for_byte() {
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let tail = format!(
            r#","seed":123456789012345678901234567890,"a":1e2,"b":1.10,"c":-0,"a":2,"d":"\u00e9\/ \ud83d","e":1e400,"f":{deep} , "messages":[{{"content":"\ud83d"}}]}}"#
        );
        let plan = EditPlan { model: Some("m-2"), engine_priority: Some(-3), ..USAGE };
        let body =
            format!(r#"{{ "model" : "m1","stream":true,"stream_options":{{"continuous_usage_stats":true}}{tail}"#);
        let out = sent(&body, &plan);
        assert_eq!(
            out,
            format!(
                r#"{{"priority":-3, "model" : "m-2","stream":true,"stream_options":{{"include_usage":true,"continuous_usage_stats":true}}{tail}"#
            )
        );
    }

    #[test]
    fn c66_usage_is_asked_for_in_every_shape_of_stream_options() {
        for (options, becomes) in [
            ("null", r#"{"include_usage":true}"#),
            ("{}", r#"{"include_usage":true}"#),
            ("{ }", r#"{"include_usage":true }"#),
            (r#"{"include_usage":false}"#, r#"{"include_usage":true}"#),
            (r#"{"include_usage": null ,"x":1}"#, r#"{"include_usage": true ,"x":1}"#),
            (r#"{ "x":{"include_usage":false}}"#, r#"{"include_usage":true, "x":{"include_usage":false}}"#),
            (r#"{"includ\u0065_usage":false}"#, r#"{"includ\u0065_usage":true}"#),
        ] {
            let body = format!(r#"{{"stream":true,"stream_options":{options},"model":"m"}}"#);
            let edits = edits(&chat(&body), Dialect::Chat, &USAGE);
            assert!(edits.usage_injected && !edits.continuous_injected, "{options}");
            assert_eq!(
                spliced(&body, &edits.splices),
                format!(r#"{{"stream":true,"stream_options":{becomes},"model":"m"}}"#)
            );
            assert_eq!(edits.without_injection, Some(Vec::new()));
        }
    }

    #[test]
    fn c66_no_injection_if_already_requested_or_inapplicable() {
        for body in [
            r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
            r#"{"stream":false}"#,
            r#"{"stream":null,"stream_options":null}"#,
            r#"{"model":"m"}"#,
            "{}",
        ] {
            assert_eq!(edits(&chat(body), Dialect::Chat, &USAGE), Edits::default(), "{body}");
        }
        let streaming = r#"{"stream":true}"#;
        assert_eq!(edits(&chat(streaming), Dialect::Chat, &EditPlan::default()), Edits::default());
        for (path, dialect) in [("/v1/responses", Dialect::Responses), ("/v1/messages", Dialect::Messages)] {
            assert_eq!(edits(&facts(streaming, path), dialect, &USAGE), Edits::default());
        }
    }

    #[test]
    fn c104_a_wish_that_our_injection_wakes_is_put_to_sleep_again() {
        let bodies = |include: Option<&str>, continuous: Option<&str>| {
            let member = |name: &str, value: Option<&str>| value.map(|value| format!("\"{name}\":{value}"));
            let members = [member("include_usage", include), member("continuous_usage_stats", continuous)];
            let members: Vec<String> = members.into_iter().flatten().collect();
            format!("{{\"stream\":true,\"stream_options\":{{{}}}}}", members.join(","))
        };
        let values = [None, Some("null"), Some("false"), Some("true")];
        for include in values {
            for continuous in values {
                let body = bodies(include, continuous);
                let (asks, wishes) = (include == Some("true"), continuous == Some("true"));
                let plain = edits(&chat(&body), Dialect::Chat, &USAGE);
                // Requesting usage on each event implies requesting usage.
                assert_eq!((plain.usage_injected, plain.continuous_injected), (!asks, !asks && wishes), "{body}");
                let heeding = EditPlan { heeds_continuous_alone: true, ..USAGE };
                assert!(!edits(&chat(&body), Dialect::Chat, &heeding).continuous_injected, "{body}");
                let pool = EditPlan { continuous_usage: true, ..USAGE };
                let pool = edits(&chat(&body), Dialect::Chat, &pool);
                assert_eq!((pool.usage_injected, pool.continuous_injected), (!asks, !(asks && wishes)), "{body}");
                let none = EditPlan { inject_usage: false, ..USAGE };
                assert_eq!(edits(&chat(&body), Dialect::Chat, &none), Edits::default(), "{body}");
            }
        }
    }

    #[test]
    fn c100_a_level_lowers_the_cap_by_whatever_name() {
        let plan = EditPlan { lowered_cap: Some(50), ..EditPlan::default() };
        assert_eq!(
            sent(r#"{"n_predict":500,"max_tokens":40,"max_new_tokens":-1}"#, &plan),
            r#"{"n_predict":50,"max_tokens":40,"max_new_tokens":50}"#
        );
    }

    #[test]
    fn usage_on_every_event_comes_only_with_usage_at_the_end() {
        let plan = EditPlan { continuous_usage: true, ..USAGE };
        assert_eq!(
            sent(r#"{"stream":true}"#, &plan),
            r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true},"stream":true}"#
        );
        let body = r#"{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false}}"#;
        let asked = edits(&chat(body), Dialect::Chat, &plan);
        assert!(!asked.usage_injected && asked.continuous_injected);
        assert_eq!(
            spliced(body, &asked.splices),
            r#"{"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#
        );
        let alone = EditPlan { inject_usage: false, ..plan };
        assert_eq!(edits(&chat(r#"{"stream":true}"#), Dialect::Chat, &alone), Edits::default());
    }

    #[test]
    fn the_clients_priority_is_replaced_by_the_gateways() {
        let plan = EditPlan { engine_priority: Some(2), ..EditPlan::default() };
        for (body, bare, with) in [
            (r#"{"priority":-100}"#, "{}", r#"{"priority":2}"#),
            (r#"{"priority":-100,"a":1}"#, r#"{"a":1}"#, r#"{"priority":2,"a":1}"#),
            (r#"{"a":1,"priority":-100}"#, r#"{"a":1}"#, r#"{"priority":2,"a":1}"#),
            ("{}", "{}", r#"{"priority":2}"#),
        ] {
            assert_eq!(sent(body, &EditPlan::default()), bare);
            let edits = edits(&chat(body), Dialect::Chat, &plan);
            assert_eq!(spliced(body, &edits.splices), with);
            assert_eq!(spliced(body, &edits.without_injection.unwrap()), bare);
        }
    }

    #[test]
    fn a_retry_without_injection_keeps_alias_and_cap() {
        let plan = EditPlan { model: Some("big"), lowered_cap: Some(9), engine_priority: Some(1), ..USAGE };
        let body = r#"{"model":"m","stream":true,"max_tokens":100}"#;
        let edits = edits(&chat(body), Dialect::Chat, &plan);
        let bare = spliced(body, &edits.without_injection.unwrap());
        assert_eq!(bare, r#"{"model":"big","stream":true,"max_tokens":9}"#);
    }

    #[test]
    fn a_stated_cap_is_lowered_and_a_missing_one_is_set() {
        let lowered = |body: &str, path: &str| {
            let dialect = ApiPath::relayed(path).unwrap().dialect();
            let plan = EditPlan { lowered_cap: Some(50), ..EditPlan::default() };
            let edits = edits(&facts(body, path), dialect, &plan);
            assert_eq!(edits.without_injection, None);
            assert_eq!(edits.cap_lowered, !edits.splices.is_empty());
            spliced(body, &edits.splices)
        };
        let huge = "9".repeat(30);
        for (body, becomes) in [
            (r#"{"max_tokens":51,"max_completion_tokens":7}"#, r#"{"max_tokens":50,"max_completion_tokens":7}"#),
            (r#"{"max_tokens":50}"#, r#"{"max_tokens":50}"#),
            (r#"{"max_tokens":null}"#, r#"{"max_tokens":50}"#),
            (&format!(r#"{{"max_completion_tokens":{huge}}}"#), r#"{"max_completion_tokens":50}"#),
            (r#"{"a":1}"#, r#"{"max_tokens":50,"a":1}"#),
            ("{}", r#"{"max_tokens":50}"#),
        ] {
            assert_eq!(lowered(body, "/v1/chat/completions"), becomes);
        }
        for (body, becomes) in [
            (r#"{"min_tokens":70,"max_tokens":90}"#, r#"{"min_tokens":70,"max_tokens":70}"#),
            (r#"{"min_tokens":70}"#, r#"{"max_tokens":70,"min_tokens":70}"#),
            (r#"{"min_tokens":40,"max_tokens":90}"#, r#"{"min_tokens":40,"max_tokens":50}"#),
            (r#"{"min_tokens":70,"max_tokens":60}"#, r#"{"min_tokens":70,"max_tokens":60}"#),
        ] {
            assert_eq!(lowered(body, "/v1/completions"), becomes);
        }
        let thinks =
            |cap: u64| format!(r#"{{"max_tokens":{cap},"thinking":{{"type":"enabled","budget_tokens":2000}}}}"#);
        assert_eq!(lowered(&thinks(4000), "/v1/messages"), thinks(2001));
        assert_eq!(lowered(r#"{"max_tokens":9}"#, "/v1/responses"), r#"{"max_output_tokens":50,"max_tokens":9}"#);
        assert_eq!(lowered(r#"{"max_tokens":99}"#, "/v1/embeddings"), r#"{"max_tokens":99}"#);
    }

    /// The body sent when reasoning is reduced.
    fn less(body: &str, path: &str, thinking: ReasoningEdit) -> String {
        let dialect = ApiPath::relayed(path).unwrap().dialect();
        let plan = EditPlan { thinking, ..EditPlan::default() };
        let edits = edits(&facts(body, path), dialect, &plan);
        let changed = spliced(body, &edits.splices);
        assert_eq!(edits.reasoning_off, changed != body, "{body}");
        assert_eq!(edits.without_injection.map(|bare| spliced(body, &bare)), edits.reasoning_off.then(|| body.into()));
        changed
    }

    #[test]
    fn reasoning_is_reduced_if_requested_and_disabled_in_the_template() {
        let template = r#""chat_template_kwargs":{"enable_thinking":false,"thinking":false}"#;
        let chat = [
            // Reduces the body's own switches under any name.
            (r#"{"reasoning_effort": "high"}"#, r#"{"reasoning_effort": "low"}"#),
            (
                r#"{"reasoning":{"max_tokens":9, "effort":"xhigh"}}"#,
                r#"{"reasoning":{"max_tokens":9, "effort":"low"}}"#,
            ),
            (
                r#"{"thinking":{"type":"enabled","budget_tokens":4096},"a":1}"#,
                r#"{"thinking":{"type":"disabled"},"a":1}"#,
            ),
            (r#"{"reasoning_effort":"low"}"#, r#"{"reasoning_effort":"low"}"#),
            (r#"{"reasoning_effort":null}"#, r#"{"reasoning_effort":null}"#),
            ("{}", "{}"),
        ];
        for (body, becomes) in chat {
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::Less), becomes);
            let comma = if becomes == "{}" { "" } else { "," };
            let told = format!("{{{template}{comma}{}", &becomes[1..]);
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::LessByTemplate), told);
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::AsAsked), body);
            assert_eq!(less(body, "/v1/completions", ReasoningEdit::LessByTemplate), body, "there is no switch");
        }
        // The chat template's own switches keep their place.
        for (body, becomes) in [
            (
                r#"{"chat_template_kwargs":{"enable_thinking": true ,"x":[1]}}"#,
                r#"{"chat_template_kwargs":{"thinking":false,"enable_thinking": false ,"x":[1]}}"#,
            ),
            (
                r#"{"chat_template_kwargs":{"thinking":"yes","enable_thinking":1}}"#,
                r#"{"chat_template_kwargs":{"thinking":false,"enable_thinking":false}}"#,
            ),
            (r#"{"chat_template_kwargs":null}"#, &format!("{{{template}}}")),
            (r#"{"chat_template_kwargs":{}}"#, &format!("{{{template}}}")),
            (r#"{"chat_template_kwargs":[]}"#, r#"{"chat_template_kwargs":[]}"#),
            (r#"{"chat_template_kwargs":"x"}"#, r#"{"chat_template_kwargs":"x"}"#),
        ] {
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::LessByTemplate), becomes);
        }
    }

    #[test]
    fn contradicting_switches_are_edited_separately() {
        for (body, becomes) in [
            (
                r#"{"chat_template_kwargs":{"thinking":false},"reasoning_effort":"high"}"#,
                r#"{"chat_template_kwargs":{"enable_thinking":false,"thinking":false},"reasoning_effort":"low"}"#,
            ),
            (
                r#"{"chat_template_kwargs":{"enable_thinking":true,"thinking":false}}"#,
                r#"{"chat_template_kwargs":{"enable_thinking":false,"thinking":false}}"#,
            ),
            (
                r#"{"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true,"thinking":true}}"#,
                r#"{"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":false,"thinking":false}}"#,
            ),
            (
                r#"{"reasoning_effort":"none","thinking":{"type":"enabled"}}"#,
                r#"{"chat_template_kwargs":{"enable_thinking":false,"thinking":false},"reasoning_effort":"none","thinking":{"type":"disabled"}}"#,
            ),
        ] {
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::LessByTemplate), becomes);
        }
        let body = r#"{"thinking":{"type":"disabled"},"reasoning_effort":"high"}"#;
        let becomes = r#"{"thinking":{"type":"disabled"},"reasoning_effort":"low"}"#;
        assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::Less), becomes);
        let body = r#"{"reasoning_effort":"none","reasoning":{"effort":"high"}}"#;
        let becomes = r#"{"reasoning_effort":"none","reasoning":{"effort":"low"}}"#;
        assert_eq!(less(body, "/v1/responses", ReasoningEdit::LessByTemplate), becomes);
    }

    #[test]
    fn requests_without_reasoning_are_unchanged_and_each_dialect_has_its_switches() {
        // A body that asks for no reasoning is unchanged.
        for body in [
            r#"{"reasoning_effort":"none"}"#,
            r#"{"thinking":{"type":"disabled"}}"#,
            r#"{"chat_template_kwargs":{"enable_thinking":false}}"#,
        ] {
            assert_eq!(less(body, "/v1/chat/completions", ReasoningEdit::LessByTemplate), body);
        }
        for (body, becomes) in [
            ("{}", r#"{"reasoning":{"effort":"low"}}"#),
            (r#"{"reasoning":null,"a":1}"#, r#"{"reasoning":{"effort":"low"},"a":1}"#),
            (r#"{"reasoning":{"summary":"auto"}}"#, r#"{"reasoning":{"effort":"low","summary":"auto"}}"#),
            (r#"{"reasoning":{"effort":null}}"#, r#"{"reasoning":{"effort":"low"}}"#),
            (r#"{"reasoning":{"effort":"high"}}"#, r#"{"reasoning":{"effort":"low"}}"#),
            (r#"{"reasoning":{"effort":"minimal"}}"#, r#"{"reasoning":{"effort":"minimal"}}"#),
            (r#"{"reasoning":7}"#, r#"{"reasoning":7}"#),
        ] {
            assert_eq!(less(body, "/v1/responses", ReasoningEdit::LessByTemplate), becomes);
        }
        let body = r#"{"thinking":{"budget_tokens":9,"type":"enabled"},"system":"x"}"#;
        let becomes = r#"{"thinking":{"type":"disabled"},"system":"x"}"#;
        assert_eq!(less(body, "/v1/messages", ReasoningEdit::LessByTemplate), becomes);
        assert_eq!(less("{}", "/v1/messages", ReasoningEdit::LessByTemplate), "{}");
    }

    #[test]
    fn an_alias_is_written_as_json() {
        let plan = EditPlan { model: Some("a\"b\\é"), ..EditPlan::default() };
        assert_eq!(sent(r#"{"mod\u0065l":"m\u0031"}"#, &plan), r#"{"mod\u0065l":"a\"b\\é"}"#);
        assert_eq!(sent(r#"{"model":null}"#, &plan), r#"{"model":null}"#);
    }

    /// The same changes applied to a parsed body.
    fn by_serde(mut body: Map<String, Value>, plan: &EditPlan<'_>) -> Map<String, Value> {
        if let (Some(Value::String(model)), Some(name)) = (body.get_mut("model"), plan.model) {
            *model = name.to_owned();
        }
        body.remove("priority");
        if let Some(priority) = plan.engine_priority {
            body.insert("priority".to_owned(), priority.into());
        }
        if let Some(cap) = plan.lowered_cap {
            for name in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
                match body.get_mut(name) {
                    Some(value) if value.as_f64().is_none_or(|stated| stated < 0.0 || stated > cap as f64) => {
                        *value = cap.into()
                    }
                    _ => {}
                }
            }
            if !["max_tokens", "max_completion_tokens"].iter().any(|name| body.contains_key(*name)) {
                body.insert("max_tokens".to_owned(), cap.into());
            }
        }
        let asked = body.get("stream_options").is_some_and(|options| options["include_usage"] == true);
        if body.get("stream") == Some(&Value::Bool(true)) && (plan.inject_usage || plan.continuous_usage && asked) {
            let options = body.entry("stream_options").or_insert(Value::Null);
            if options.is_null() {
                *options = Value::Object(Map::new());
            }
            options["include_usage"] = true.into();
            if plan.continuous_usage {
                options["continuous_usage_stats"] = true.into();
            }
        }
        body
    }

    /// None if the body is refused: a wrong type, or too many choices.
    fn accepted(body: &str, endpoint: ApiPath) -> Option<Box<Facts>> {
        let mut scanner = Scanner::new(endpoint);
        scanner.push(body.as_bytes()).ok()?;
        match scanner.finish() {
            Err(Unreadable::TooMany { .. }) => None,
            read => Some(read.unwrap()),
        }
    }

    proptest! {
        /// For any body the result is JSON, differs only in the switches, and asks for no more reasoning than
        /// before.
        #[test]
        fn turning_reasoning_down_changes_nothing_else(
            body in request(),
            path in proptest::sample::select(&["/v1/chat/completions", "/v1/responses", "/v1/messages"][..]),
            pretty in any::<bool>(),
            by_template in any::<bool>(),
        ) {
            let value = Value::Object(body.clone());
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let endpoint = ApiPath::relayed(path).unwrap();
            let Some(facts) = accepted(&text, endpoint) else { return Ok(()) };
            let thinking = if by_template { ReasoningEdit::LessByTemplate } else { ReasoningEdit::Less };
            let edits = edits(&facts, endpoint.dialect(), &EditPlan { thinking, ..EditPlan::default() });
            let sent: Map<String, Value> = serde_json::from_str(&spliced(&text, &edits.splices)).unwrap();
            let mut bare = body.clone();
            bare.remove("priority");
            prop_assert_eq!(edits.reasoning_off, sent != bare);
            for (name, value) in &bare {
                let is_switch = ["reasoning_effort", "reasoning", "thinking", "chat_template_kwargs"].contains(&name.as_str());
                prop_assert!(is_switch || sent.get(name) == Some(value), "{}", name);
            }
            prop_assert!(!matches!(sent.get("reasoning_effort"), Some(Value::String(word)) if word == "high"));
            prop_assert!(sent.get("thinking").is_none_or(|thinking| !thinking.is_object() || thinking["type"] == "disabled" || thinking["type"] == "none"));
            let template = sent.get("chat_template_kwargs");
            if by_template && path.contains("chat") {
                let is_on = |name: &str| template.and_then(|template| template.get(name)).is_some_and(|flag| *flag == true);
                prop_assert!(!is_on("enable_thinking") && !is_on("thinking"));
            }
            let is_told = edits.reasoning_off && by_template && path.contains("chat");
            if let Some(template) = template.filter(|template| is_told && template.is_object()) {
                prop_assert_eq!(&template["enable_thinking"], &Value::Bool(false));
            }
        }

        #[test]
        fn spliced_bodies_are_json_and_match_the_plan(
            body in request(),
            model in proptest::option::of("[a-z\"\\\\é]{0,6}"),
            usage in any::<(bool, bool)>(),
            engine_priority in any::<Option<i64>>(),
            lowered_cap in any::<Option<u32>>(),
            pretty in any::<bool>(),
        ) {
            let value = Value::Object(body.clone());
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let Some(facts) = accepted(&text, ApiPath::relayed("/v1/chat/completions").unwrap()) else { return Ok(()) };
            let lowered_cap = lowered_cap.map(u64::from);
            let plan = EditPlan {
                model: model.as_deref(), inject_usage: usage.0, continuous_usage: usage.1, heeds_continuous_alone: false, engine_priority, lowered_cap,
                thinking: ReasoningEdit::AsAsked,
            };
            let edits = edits(&facts, Dialect::Chat, &plan);
            for (splices, plan) in [
                (Some(&edits.splices), plan),
                (edits.without_injection.as_ref(), EditPlan { inject_usage: false, continuous_usage: false, engine_priority: None, ..plan }),
            ] {
                let Some(splices) = splices else { continue };
                let sent: Value = serde_json::from_str(&spliced(&text, splices)).unwrap();
                prop_assert_eq!(sent, Value::Object(by_serde(body.clone(), &plan)));
            }
        }
    }
}
