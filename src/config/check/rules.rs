//! Classification rules.

use http::{HeaderName, HeaderValue};

use super::{Checker, Names, is_not_a};
use crate::classify::{CapTest, HeaderTest, TokenRange, When};
use crate::config::schema::{self, Root};
use crate::config::walk::{ConfigBlock, Located, OneOrMany, OrBlock};
use crate::types::{ClassId, Glob, TenantId, Tokens};

impl Checker<'_> {
    pub(super) fn rules(&mut self, root: &Root, classes: &Names<'_>) -> Vec<(ClassId, When)> {
        let mut rules: Vec<(ClassId, When)> = Vec::new();
        for raw in root.classify.iter().flatten() {
            let class = self.known(raw.class.as_ref(), classes);
            let when = raw.when.as_ref().map(|when| self.when(root, when));
            let (Some(class), Some(when)) = (class, when) else { continue };
            let hidden_by = rules.iter().position(|(earlier, w)| {
                // A rule is skipped for tenants that may not use its class, so with tenants only an earlier rule for the
                // same class hides this one for everybody.
                let for_all = root.tenants.is_none() || earlier.as_str() == class;
                for_all && (*w == When::default() || *w == when)
            });
            if let Some(earlier) = hidden_by {
                let message = format!("this rule is never reached: rule {} always fits before it", earlier + 1);
                self.problem(raw.place(), message, "put it before that rule, or remove it");
            }
            rules.push((ClassId::from(class), when));
        }
        rules
    }

    fn when(&mut self, root: &Root, raw: &schema::When) -> When {
        let paths = raw.path.as_ref().map(|list| {
            let found = list.0.iter().filter_map(|at| self.endpoint(at, |_| true));
            found.map(|endpoint| endpoint.path()).collect()
        });
        When {
            tenants: raw.tenant.as_ref().map(|list| self.tenant_names(root, &list.0)),
            keys: raw.key.as_ref().map(|list| list.0.iter().map(|at| at.value.clone()).collect()),
            headers: raw.header.iter().flat_map(|all| &all.0).filter_map(|(n, t)| self.header(n, t)).collect(),
            paths,
            models: raw.model.as_ref().map(|list| list.0.iter().map(|at| Glob::new(&at.value)).collect()),
            stream: raw.stream.as_ref().map(|at| at.value),
            has_tools: raw.has_tools.as_ref().map(|at| at.value),
            reasoning: raw.reasoning.as_ref().map(|list| list.0.iter().map(|at| at.value.0).collect()),
            max_tokens: raw.max_tokens.as_ref().and_then(|raw| self.cap(raw)),
            prompt_tokens: raw.prompt_tokens.as_ref().and_then(|raw| self.range(raw, &raw.at_least, &raw.at_most)),
            metadata: raw
                .metadata
                .iter()
                .flat_map(|all| &all.0)
                .map(|(key, values)| (key.value.clone(), values.0.iter().map(|at| at.value.clone()).collect()))
                .collect(),
        }
    }

    fn tenant_names(&mut self, root: &Root, list: &[Located<String>]) -> Vec<TenantId> {
        let anonymous = TenantId::anonymous();
        let names = match &root.tenants {
            Some(tenants) => Names::of("tenant", tenants.iter().map(|tenant| tenant.tenant.as_ref())),
            None => Names { what: "tenant", all: vec![anonymous.as_str()], told: false },
        };
        list.iter().filter_map(|at| self.known(Some(at), &names)).map(TenantId::from).collect()
    }

    fn header(
        &mut self,
        name: &Located<String>,
        test: &OrBlock<OneOrMany<Located<String>>, schema::HeaderCondition>,
    ) -> Option<(HeaderName, HeaderTest)> {
        let Ok(header) = HeaderName::try_from(name.value.as_str()) else {
            self.problem(&name.place, is_not_a(name, "a header name"), "use letters, digits and -");
            return None;
        };
        const KEYS: [&str; 5] = ["api-key", "authorization", "cookie", "proxy-authorization", "x-api-key"];
        if KEYS.contains(&header.as_str()) {
            self.problem(&name.place, "a key may not stand in a rule", "use `tenant` or `key`");
            return None;
        }
        let texts: Vec<&Located<String>> = match test {
            OrBlock::Short(values) => values.0.iter().collect(),
            OrBlock::Block(shape) => shape.prefix.iter().collect(),
        };
        for at in texts.into_iter().filter(|at| HeaderValue::from_bytes(at.value.as_bytes()).is_err()) {
            self.problem(&at.place, "not a valid header value", "remove its control characters");
        }
        let test = match test {
            OrBlock::Short(values) => HeaderTest::Is(values.0.iter().map(|at| at.value.clone()).collect()),
            OrBlock::Block(shape) => match (&shape.prefix, &shape.present) {
                (Some(prefix), None) => HeaderTest::Prefix(prefix.value.clone()),
                (None, Some(present)) => HeaderTest::Present(present.value),
                (None, None) | (Some(_), Some(_)) => {
                    if !shape.is_whole() {
                        return None;
                    }
                    self.problem(shape.place(), "needs either `prefix` or `present`", "write one of the two");
                    return None;
                }
            },
        };
        Some((header, test))
    }

    fn cap(&mut self, raw: &schema::Cap) -> Option<CapTest> {
        let has_range = raw.written().iter().any(|key| *key != "stated");
        match &raw.stated {
            Some(at) if !at.value => {
                if has_range {
                    self.problem(
                        raw.place(),
                        "a cap that is not stated lies in no range",
                        "remove `stated` or the range",
                    );
                }
                Some(CapTest::NotStated)
            }
            Some(_) if !has_range => Some(CapTest::Within(TokenRange::ANY)),
            _ => self.range(raw, &raw.at_least, &raw.at_most).map(CapTest::Within),
        }
    }

    fn range(
        &mut self,
        raw: &impl ConfigBlock,
        at_least: &Option<Located<u64>>,
        at_most: &Option<Located<u64>>,
    ) -> Option<TokenRange> {
        if at_least.is_none() && at_most.is_none() {
            if raw.is_whole() {
                self.problem(raw.place(), "the range has no end", "write `at_least`, `at_most`, or both");
            }
            return None;
        }
        let range = TokenRange {
            at_least: at_least.as_ref().map_or(TokenRange::ANY.at_least, |at| Tokens(at.value)),
            at_most: at_most.as_ref().map_or(TokenRange::ANY.at_most, |at| Tokens(at.value)),
        };
        if range.at_least > range.at_most {
            self.problem(raw.place(), "nothing lies in this range", "make `at_least` the smaller one");
        }
        Some(range)
    }
}
