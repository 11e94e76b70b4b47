//! The conditions of a rule.

use http::{HeaderMap, HeaderName};

use super::ClassifyInput;
use crate::inspect::{Facts, Reasoning};
use crate::types::{Glob, TenantId, Tokens};

/// The conditions of a rule: all present ones must hold. A list means any of its items.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct When {
    /// The tenant is one of these.
    pub tenants: Option<Vec<TenantId>>,
    /// The label of the key is one of these.
    pub keys: Option<Vec<String>>,
    /// Each of these headers passes its test.
    pub headers: Vec<(HeaderName, HeaderTest)>,
    /// The path is one of these.
    pub paths: Option<Vec<&'static str>>,
    /// The model, as sent or after aliasing, matches one of these.
    pub models: Option<Vec<Glob>>,
    /// Whether the request streams.
    pub stream: Option<bool>,
    /// Whether the request offers tools.
    pub has_tools: Option<bool>,
    /// The stated reasoning setting is one of these. A request without one matches none.
    pub reasoning: Option<Vec<Reasoning>>,
    /// The largest stated output cap.
    pub max_tokens: Option<CapTest>,
    /// Estimated prompt tokens. A prompt that cannot be estimated matches no range.
    pub prompt_tokens: Option<TokenRange>,
    /// Each of these members of `metadata` has one of its values.
    pub metadata: Vec<(String, Vec<String>)>,
}

/// A test of one header. Any line of a repeated header may pass it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderTest {
    /// The value is one of these.
    Is(Vec<String>),
    /// The value starts with this.
    Prefix(String),
    /// Whether the header is present.
    Present(bool),
}

/// A test of the stated output cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapTest {
    /// A cap is stated and lies in this range.
    Within(TokenRange),
    /// No cap is stated.
    NotStated,
}

/// A range of tokens, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    /// Lower bound.
    pub at_least: Tokens,
    /// Upper bound.
    pub at_most: Tokens,
}

impl TokenRange {
    /// Every count.
    pub const ANY: TokenRange = TokenRange { at_least: Tokens::ZERO, at_most: Tokens(u64::MAX) };

    fn holds(&self, tokens: Tokens) -> bool {
        self.at_least <= tokens && tokens <= self.at_most
    }
}

impl HeaderTest {
    fn holds(&self, name: &HeaderName, headers: &HeaderMap) -> bool {
        let mut lines = headers.get_all(name).iter().map(|value| value.as_bytes());
        match self {
            HeaderTest::Is(values) => lines.any(|line| values.iter().any(|value| value.as_bytes() == line)),
            HeaderTest::Prefix(prefix) => lines.any(|line| line.starts_with(prefix.as_bytes())),
            HeaderTest::Present(wanted) => lines.next().is_some() == *wanted,
        }
    }
}

/// A condition's name and value in the settings; never client input.
type Named = (&'static str, Option<String>);

impl When {
    /// Whether all conditions hold.
    pub(super) fn holds(&self, ask: &ClassifyInput<'_>) -> bool {
        self.first_that_differs(ask, &mut |_| true)
    }

    /// The conditions that do not hold, as named in the settings.
    pub(super) fn differs(&self, ask: &ClassifyInput<'_>) -> Vec<String> {
        let mut found = Vec::new();
        self.first_that_differs(ask, &mut |(name, member)| {
            found.push(match member {
                Some(member) => format!("{name}.{member}"),
                None => name.to_owned(),
            });
            false
        });
        found
    }

    /// Evaluates the conditions, cheap ones first, and reports each that does not hold to `stop`, which
    /// returns whether to stop. True if all hold.
    fn first_that_differs(&self, ask: &ClassifyInput<'_>, stop: &mut dyn FnMut(Named) -> bool) -> bool {
        let mut all_hold = true;
        macro_rules! need {
            ($holds:expr, $named:expr) => {
                if !$holds {
                    all_hold = false;
                    if stop($named) {
                        return false;
                    }
                }
            };
        }
        let facts = ask.facts;
        need!(any(&self.tenants, |tenant| *tenant == ask.who.tenant), ("tenant", None));
        need!(any(&self.keys, |label| ask.who.key_label.as_deref() == Some(label)), ("key", None));
        need!(any(&self.paths, |path| *path == ask.path), ("path", None));
        need!(any(&self.models, |glob| fits_model(glob, ask)), ("model", None));
        need!(fact(self.stream, facts, |facts, wanted| facts.streams() == wanted), ("stream", None));
        need!(fact(self.has_tools, facts, |facts, wanted| facts.has_tools == wanted), ("has_tools", None));
        need!(any(&self.reasoning, |level| facts.and_then(|f| f.reasoning) == Some(*level)), ("reasoning", None));
        need!(fact(self.max_tokens, facts, fits_cap), ("max_tokens", None));
        need!(
            fact(self.prompt_tokens, facts, |f, range| f.prompt.is_known && range.holds(ask.prompt_tokens)),
            ("prompt_tokens", None)
        );
        for (name, test) in &self.headers {
            need!(test.holds(name, ask.headers), ("header", Some(name.to_string())));
        }
        for (key, values) in &self.metadata {
            need!(facts.is_some_and(|f| has_metadata(f, key, values)), ("metadata", Some(key.clone())));
        }
        all_hold
    }
}

/// True if the list is absent or any item matches.
fn any<T>(list: &Option<Vec<T>>, fits: impl FnMut(&T) -> bool) -> bool {
    list.as_ref().is_none_or(|list| list.iter().any(fits))
}

/// True if the condition is absent, or the body was read and matches it.
fn fact<T>(wanted: Option<T>, facts: Option<&Facts>, fits: impl FnOnce(&Facts, T) -> bool) -> bool {
    wanted.is_none_or(|wanted| facts.is_some_and(|facts| fits(facts, wanted)))
}

fn fits_model(glob: &Glob, ask: &ClassifyInput<'_>) -> bool {
    let sent = ask.facts.and_then(|facts| facts.model.as_ref()).map(|field| &*field.value);
    [sent, ask.model].into_iter().flatten().any(|name| glob.matches(name))
}

fn fits_cap(facts: &Facts, test: CapTest) -> bool {
    match (facts.caps.largest(), test) {
        (Some(cap), CapTest::Within(range)) => range.holds(cap),
        (None, CapTest::NotStated) => true,
        (Some(_), CapTest::NotStated) | (None, CapTest::Within(_)) => false,
    }
}

fn has_metadata(facts: &Facts, key: &str, values: &[String]) -> bool {
    facts.metadata.iter().any(|(k, v)| k == key && values.contains(v))
}
