//! Which promise applies: finds the SLO class of a request.
//!
//! Rules are read from the top; the first whose conditions all hold, and whose class the
//! tenant may use, decides. If none does, the default class applies, and if the tenant may
//! not use that either the request is refused. A body whose decisive fields could not be read
//! goes to the default class unseen. The result names the rule by its place in the settings,
//! so nothing that a client invents becomes a label.

mod targets;
mod when;

pub use targets::{TargetHeaders, Targets};
pub use when::{CapTest, HeaderTest, TokenRange, When};

use std::sync::Arc;

use http::HeaderMap;

use crate::identify::Identity;
use crate::inspect::Facts;
use crate::units::{ClassId, Tokens};

/// What is known of a request when its class is sought.
#[derive(Clone, Copy, Debug)]
pub struct ClassifyInput<'a> {
    /// Who asks.
    pub who: &'a Identity,
    /// The head's header lines.
    pub headers: &'a HeaderMap,
    /// The path as the documentation writes it (`Endpoint::path`).
    pub path: &'a str,
    /// What stands in the body; `None` where it is not JSON (multipart).
    pub facts: Option<&'a Facts>,
    /// The model after aliasing; a rule may match this or the name in the body.
    pub model: Option<&'a str>,
    /// The estimated prompt.
    pub prompt_tokens: Tokens,
}

/// The class of a request, and the rule that gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classified {
    /// The class.
    pub class: ClassId,
    /// `rule 3` (the third of `classify`) or `default`.
    pub rule: Arc<str>,
}

/// The tenant may use neither the class of a rule that fits nor the default class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no class that this tenant may use fits the request")]
pub struct NotAllowed;

/// The rules of the settings, compiled.
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

/// What one rule said about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleExplanation {
    /// `rule 3`.
    pub rule: Arc<str>,
    /// The class that it would give.
    pub class: ClassId,
    /// Whether it decided, and why not.
    pub said: ConditionResult,
}

/// Why a rule decided or did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionResult {
    /// It decided.
    Matched,
    /// Its conditions hold, but the tenant may not use its class.
    ClassNotAllowed,
    /// These conditions do not hold.
    Differs(Vec<String>),
    /// A rule before it had decided.
    NotReached,
    /// The body's decisive fields cannot be read: no rule is asked.
    BodyUnreadable,
}

impl Rules {
    /// Rules in the order of the settings, and the class where none of them fits.
    #[must_use]
    pub fn new(rules: impl IntoIterator<Item = (ClassId, When)>, default: ClassId) -> Self {
        let numbered = rules.into_iter().zip(1..).map(|((class, when), number)| Rule {
            name: Arc::from(format!("rule {number}")),
            class,
            when,
        });
        Rules { rules: numbered.collect(), default, default_name: Arc::from("default") }
    }

    /// The class where no rule fits.
    #[must_use]
    pub fn default_class(&self) -> &ClassId {
        &self.default
    }

    /// Finds the class of a request.
    ///
    /// # Errors
    /// [`NotAllowed`], which is a 403.
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

    /// What each rule says about a request, in order: the long form of [`Rules::class_of`].
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
