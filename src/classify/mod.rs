//! Finds the SLO class of a request.
//!
//! Rules are evaluated in order; the first whose conditions all hold and whose class the tenant may use
//! decides. If none does, the default class applies; if the tenant may not use that either, the request
//! is refused. A body whose decisive fields could not be read gets the default class without
//! evaluating rules. The result names the rule by its index in the settings, so that no client
//! input becomes a label.

mod targets;
mod when;

pub use targets::{TargetHeaders, Targets};
pub use when::{CapTest, HeaderTest, TokenRange, When};

use std::sync::Arc;

use http::HeaderMap;

use crate::identify::Identity;
use crate::inspect::Facts;
use crate::types::{ClassId, Tokens};

/// The inputs of classification.
#[derive(Clone, Copy, Debug)]
pub struct ClassifyInput<'a> {
    /// The caller.
    pub who: &'a Identity,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The canonical path (`ApiPath::path`).
    pub path: &'a str,
    /// The facts of the body; `None` if it is not JSON (multipart).
    pub facts: Option<&'a Facts>,
    /// The model after aliasing; a rule may match it or the name in the body.
    pub model: Option<&'a str>,
    /// Estimated prompt tokens.
    pub prompt_tokens: Tokens,
}

/// The class of a request, and the rule that chose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classified {
    /// The class.
    pub class: ClassId,
    /// `rule 3` (the third item of `classify`) or `default`.
    pub rule: Arc<str>,
}

/// The tenant may use neither the class of a matching rule nor the default class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no class that this tenant may use fits the request")]
pub struct NotAllowed;

/// The compiled rules.
#[derive(Clone, Debug)]
pub struct Rules {
    rules: Arc<[Rule]>,
    default: ClassId,
    default_name: Arc<str>,
}

#[derive(Clone, Debug)]
struct Rule {
    name: Arc<str>,
    class: ClassId,
    when: When,
}

/// The result of one rule for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleExplanation {
    /// `rule 3`.
    pub rule: Arc<str>,
    /// The rule's class.
    pub class: ClassId,
    /// Whether it decided, or why not.
    pub said: ConditionResult,
}

/// Why a rule decided or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionResult {
    /// It matched and decided.
    Matched,
    /// It matched, but the tenant may not use its class.
    ClassNotAllowed,
    /// These conditions do not hold.
    Differs(Vec<String>),
    /// An earlier rule decided.
    NotReached,
    /// The body's decisive fields cannot be read, so no rule is evaluated.
    BodyUnreadable,
}

impl Rules {
    /// Compiles rules in order, with the class for requests that match none.
    #[must_use]
    pub fn new(rules: impl IntoIterator<Item = (ClassId, When)>, default: ClassId) -> Self {
        let numbered = rules.into_iter().zip(1..).map(|((class, when), number)| Rule {
            name: Arc::from(format!("rule {number}")),
            class,
            when,
        });
        Rules { rules: numbered.collect(), default, default_name: Arc::from("default") }
    }

    /// The class of requests that match no rule.
    #[must_use]
    pub fn default_class(&self) -> &ClassId {
        &self.default
    }

    /// Finds the class of a request.
    ///
    /// # Errors
    /// [`NotAllowed`], which becomes a 403.
    pub fn class_of(
        &self,
        ask: &ClassifyInput<'_>,
        may_use: impl Fn(&ClassId) -> bool,
    ) -> Result<Classified, NotAllowed> {
        let rules: &[Rule] = if is_readable(ask) { &self.rules } else { &[] };
        let found = rules.iter().find(|rule| rule.when.holds(ask) && may_use(&rule.class));
        match found {
            Some(rule) => Ok(Classified { class: rule.class.clone(), rule: rule.name.clone() }),
            None if may_use(&self.default) => {
                Ok(Classified { class: self.default.clone(), rule: self.default_name.clone() })
            }
            None => Err(NotAllowed),
        }
    }

    /// The result of each rule, in order: the explained form of [`Rules::class_of`].
    #[must_use]
    pub fn explain(&self, ask: &ClassifyInput<'_>, may_use: impl Fn(&ClassId) -> bool) -> Vec<RuleExplanation> {
        let mut decided = false;
        let mut said = |rule: &Rule| {
            if !is_readable(ask) {
                return ConditionResult::BodyUnreadable;
            }
            if decided {
                return ConditionResult::NotReached;
            }
            let differs = rule.when.differs(ask);
            if !differs.is_empty() {
                ConditionResult::Differs(differs)
            } else if !may_use(&rule.class) {
                ConditionResult::ClassNotAllowed
            } else {
                decided = true;
                ConditionResult::Matched
            }
        };
        let each = self.rules.iter();
        each.map(|rule| RuleExplanation { rule: rule.name.clone(), class: rule.class.clone(), said: said(rule) })
            .collect()
    }
}

fn is_readable(ask: &ClassifyInput<'_>) -> bool {
    ask.facts.is_none_or(|facts| facts.readable)
}

#[cfg(test)]
mod tests;
