//! Explains how a request would be classified and routed, with the steps of the gateway.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::HeaderMap;
use serde_json::{Value, json};

use crate::admit::limit::settings::{Allowance, OverLimit, Rate};
use crate::admit::limit::{LimitExceeded, LimitScope, LimitStatus, LocalLimiter, Output, Wanted};
use crate::admit::overload_control::Action;
use crate::admit::queue::WhenHopeless;
use crate::classify::{ClassifyInput, ConditionResult, RuleExplanation, TargetHeaders, Targets};
use crate::config::{ClassSettings, Settings};
use crate::gateway::{BufferedBody, read_whole, route, wanted};
use crate::identify::{AuthError, Identity};
use crate::inspect::ModelRatios;
use crate::judge::Objectives;
use crate::reject::Rejection;
use crate::route::settings::Concurrency;
use crate::types::{ApiPath, ClassId, PathError, PoolId, Tick, Tokens};

/// A request to explain.
pub struct Sample {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

/// Findings about the request, up to the step that rejects it.
#[derive(Default)]
pub struct Explanation {
    path: String,
    bytes: usize,
    stream: bool,
    who: Option<Identity>,
    /// The model in the body, and the name that it is an alias of.
    model: Option<(String, String)>,
    /// Its metric label.
    model_label: Option<String>,
    prompt: Option<(Tokens, &'static str)>,
    rules: Vec<RuleExplanation>,
    class: Option<(ClassId, String)>,
    promise: Option<String>,
    /// Its priority, and how it waits.
    priority: Option<&'static str>,
    queue: Option<String>,
    /// Overload levels of its class, in order.
    degrade: Vec<String>,
    /// Limits that count it, and the treatment beyond them.
    limits: Vec<String>,
    /// Tokens reserved from them.
    reserved: Option<Reserved>,
    pools: Vec<PoolId>,
    /// The rejection, if no engine would get the request.
    pub refused: Option<Rejection>,
}

/// The reservation of a request.
struct Reserved {
    wanted: Wanted,
    /// Status of each limit afterwards, starting from full buckets.
    of: Vec<LimitStatus>,
}

/// Explains a request.
pub fn explain(settings: &Settings, sample: &Sample) -> Explanation {
    let mut told = Explanation { path: sample.path.clone(), bytes: sample.body.len(), ..Explanation::default() };
    told.refused = walk(settings, sample, &mut told).err();
    told
}

/// The gateway's steps up to the choice of an engine.
fn walk(settings: &Settings, sample: &Sample, told: &mut Explanation) -> Result<(), Rejection> {
    let endpoint = ApiPath::find("POST", &sample.path).map_err(|why| match why {
        PathError::Path => Rejection::UnknownPath,
        PathError::Method { allow } => Rejection::MethodNotAllowed { allow },
    })?;
    told.path = endpoint.path().to_owned();
    let who = settings.keyring.find(&sample.headers).map_err(|why| match why {
        AuthError::Missing => Rejection::MissingKey,
        AuthError::Unknown => Rejection::UnknownKey,
        AuthError::TwoKeys => Rejection::TwoKeys,
    })?;
    told.who = Some(who.clone());
    let body = Bytes::from(sample.body.clone());
    let BufferedBody { facts, is_form, .. } = read_whole(body, &sample.headers, endpoint, settings.listen.max_body)?;
    told.stream = facts.streams();
    if facts.background {
        return Err(Rejection::BackgroundRefused);
    }
    if facts.steers {
        return Err(Rejection::TransferRefused);
    }

    let sent = facts.model.as_ref().map(|field| &*field.value);
    let routes = &settings.routes;
    let model = sent.map(|sent| routes.alias(sent).unwrap_or(sent));
    told.model = sent.zip(model).map(|(sent, model)| (sent.to_owned(), model.to_owned()));
    if is_form && sent != model {
        return Err(Rejection::AliasInForm);
    }
    let prompt = facts.prompt.tokens(ModelRatios::default().bytes_per_token());
    told.prompt = facts.prompt.is_known.then(|| (prompt, settings.buckets.of(prompt).as_str()));

    let ask = ClassifyInput {
        who: &who,
        headers: &sample.headers,
        path: endpoint.path(),
        facts: Some(&facts),
        model,
        prompt_tokens: prompt,
    };
    let may_use = |class: &ClassId| settings.tenants.may_use(&who.tenant, class);
    told.rules = settings.rules.explain(&ask, may_use);
    let refused = || Rejection::ClassNotAllowed { class: settings.default_class.clone() };
    let found = settings.rules.class_of(&ask, may_use).map_err(|_| refused())?;
    told.class = Some((found.class.clone(), found.rule.to_string()));
    if let Some(class) = settings.class(&found.class) {
        told.priority = Some(class.priority.as_str());
        told.degrade = class.degrade.iter().map(|level| given_up(level.action)).collect();
    }
    told.limits = limits(settings, &who, model);
    told.promise = settings.class(&found.class).map(|class| promise(class, endpoint, settings, &sample.headers));

    let routed = route(settings, model, &found.class)?;
    told.model_label = Some(routed.model_label.to_string());
    told.pools = routed.pools.to_vec();
    told.queue = waiting(settings, &found.class, &routed.pools[0]);
    if let Some(class) = settings.class(&found.class) {
        let wanted = wanted(&facts, endpoint, &class.objectives, prompt);
        told.reserved = reserved(settings, &who, model.unwrap_or_default(), wanted)?;
    }
    Ok(())
}

/// Reserves from the gateway's own limiter with full buckets. `None` if no limit counts the request.
fn reserved(settings: &Settings, who: &Identity, model: &str, wanted: Wanted) -> Result<Option<Reserved>, Rejection> {
    let Some(tenant) = settings.tenants.get(&who.tenant) else { return Ok(None) };
    let limiter = LocalLimiter::new();
    limiter.reload(&BTreeMap::from([(who.tenant.clone(), tenant.limits.clone())]), Tick::ZERO);
    match limiter.reserve(&who.tenant, model, &wanted, Tick::ZERO) {
        Err(LimitExceeded::NeverFits { limit, scope, need, most }) => {
            Err(Rejection::RequestExceedsLimit { limit, scope, need, most })
        }
        Err(LimitExceeded::Retryable { limit_status, retry_after }) => {
            Err(Rejection::RateLimitExceeded { limit_status, retry_after })
        }
        Ok(_held) => {
            let of = limiter.statuses(&who.tenant, model, Tick::ZERO);
            Ok(Some(Reserved { wanted, of }).filter(|reserved| !reserved.of.is_empty()))
        }
    }
}

/// The applicable objectives in words.
fn promise(class: &ClassSettings, endpoint: ApiPath, settings: &Settings, headers: &HeaderMap) -> String {
    if !settings.judges(endpoint) {
        return "none: this path is not judged".to_owned();
    }
    let Targets { ttft, tpot } = class.target_headers.read(headers);
    let may_loosen = class.target_headers == TargetHeaders::MayLoosen;
    let objectives = class.objectives.with_targets(ttft, tpot, may_loosen);
    let Objectives { ttft, tpot, itl, e2e, .. } = &objectives;
    let named = [("TTFT", ttft), ("TPOT", tpot), ("ITL", itl), ("E2E", e2e)];
    let each = named.into_iter().filter_map(|(name, objective)| {
        let threshold = objective.as_ref()?.threshold;
        Some(format!("{name} at most {}s", threshold.as_secs_f64()))
    });
    let mut parts: Vec<String> = each.collect();
    if parts.is_empty() {
        parts.push("to finish".to_owned());
    }
    let share = (objectives.joint_target * 1e6).round() / 1e4;
    let hours = objectives.window.as_secs() / 3600;
    let window = if hours.is_multiple_of(24) { format!("{}d", hours / 24) } else { format!("{hours}h") };
    parts.push(format!("{share}% all together within {window}"));
    parts.join(", ")
}

/// Queueing of a class in a pool, in words.
fn waiting(settings: &Settings, class: &ClassId, pool: &PoolId) -> Option<String> {
    let (class, pool) = (settings.class(class)?, settings.pool(pool)?);
    if pool.concurrency == Concurrency::Unlimited {
        return Some(format!("none: {} has no concurrency limit", pool.id));
    }
    let then = match class.queue.when_hopeless {
        WhenHopeless::Demote => "behind the others of its priority",
        WhenHopeless::Shed => "refused",
        WhenHopeless::Serve => "keeps its position",
    };
    let longest = class.queue.max_wait.as_secs_f64();
    Some(format!("at most {longest}s; once its promise cannot be kept: {then}"))
}

fn given_up(action: Action) -> String {
    match action {
        Action::CapOutput(cap) => format!("{}: {}", action.kind().as_str(), cap.0),
        Action::Defer | Action::ShedLower | Action::ReasoningOff | Action::Spill => action.kind().as_str().to_owned(),
    }
}

/// Limits of a tenant on requests for a model, in words.
fn limits(settings: &Settings, who: &Identity, model: Option<&str>) -> Vec<String> {
    let Some(tenant) = settings.tenants.get(&who.tenant) else { return Vec::new() };
    let mut found = allowed("", &tenant.limits.whole);
    if let Some((model, allowance)) = model.and_then(|model| tenant.limits.models.get_key_value(model)) {
        found.extend(allowed(&format!(" for {model}"), allowance));
    }
    if !found.is_empty() {
        found.push(match tenant.when_over_limit {
            OverLimit::Reject => "beyond that: rejected".to_owned(),
            OverLimit::Demote => "beyond that: behind all others".to_owned(),
        });
    }
    found
}

fn allowed(of: &str, allowance: &Allowance) -> Vec<String> {
    let rates = [
        ("tokens", allowance.tokens),
        ("input tokens", allowance.input_tokens),
        ("output tokens", allowance.output_tokens),
        ("requests", allowance.requests),
    ];
    let rate = |(name, rate): (&str, Option<Rate>)| {
        let rate = rate?;
        let name = if rate.per_minute() == 1 { name.trim_end_matches('s') } else { name };
        Some(format!("{} {name}{of} a minute, {} at once", rate.per_minute(), rate.burst()))
    };
    let concurrent = allowance.concurrent_requests.map(|most| {
        let requests = if most.get() == 1 { "request" } else { "requests" };
        format!("{most} {requests}{of} at one time")
    });
    rates.into_iter().filter_map(rate).chain(concurrent).collect()
}

impl Explanation {
    /// For people: a name and a text per line.
    pub fn to_lines(&self) -> Vec<String> {
        let mut all: Vec<(&str, String)> = Vec::new();
        let kind = if self.stream { ", a stream" } else { "" };
        all.push(("request", format!("POST {}, {} bytes{kind}", self.path, self.bytes)));
        if let Some(who) = &self.who {
            let label = who.key_label.as_ref().map(|label| format!(" (key {label})"));
            all.push(("tenant", format!("{}{}", who.tenant, label.unwrap_or_default())));
        }
        if let Some((sent, model)) = &self.model {
            let alias = if sent == model { String::new() } else { format!(", an alias of {model}") };
            let label = self.model_label.as_ref().map(|label| format!("; in metrics: {label}"));
            all.push(("model", format!("{sent}{alias}{}", label.unwrap_or_default())));
        }
        if let Some((tokens, bucket)) = &self.prompt {
            all.push(("prompt", format!("about {} tokens: {bucket}", tokens.0)));
        }
        all.extend(self.rules.iter().map(|rule| (&*rule.rule, format!("{}: {}", rule.class, in_words(&rule.said)))));
        if let Some((class, rule)) = &self.class {
            all.push(("class", format!("{class} ({rule})")));
        }
        if let Some(promise) = &self.promise {
            all.push(("promise", promise.clone()));
        }
        all.extend(self.priority.iter().map(|priority| ("priority", (*priority).to_owned())));
        if !self.limits.is_empty() {
            all.push(("limits", self.limits.join("; ")));
        }
        all.extend(self.reserved.iter().map(|reserved| ("reserves", reserved.in_words())));
        if !self.pools.is_empty() {
            let names: Vec<&str> = self.pools.iter().map(PoolId::as_str).collect();
            all.push(("pools", names.join(", then ")));
        }
        all.extend(self.queue.iter().map(|queue| ("queue", queue.clone())));
        if !self.degrade.is_empty() {
            all.push(("overload", self.degrade.join(", then ")));
        }
        if let Some(refused) = &self.refused {
            let text = format!("{} {}: {}", refused.status().as_u16(), refused.code(), refused.message());
            all.push(("refused", text));
        }
        all.into_iter().map(|(name, text)| format!("{name:<10} {text}")).collect()
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let rules = self.rules.iter().map(|rule| {
            let (said, differs) = match &rule.said {
                ConditionResult::Matched => ("matched", None),
                ConditionResult::ClassNotAllowed => ("class_not_allowed", None),
                ConditionResult::Differs(differs) => ("differs", Some(differs)),
                ConditionResult::NotReached => ("not_reached", None),
                ConditionResult::BodyUnreadable => ("body_unreadable", None),
            };
            json!({"rule": &*rule.rule, "class": rule.class.as_str(), "said": said, "differs": differs})
        });
        json!({
            "path": self.path,
            "bytes": self.bytes,
            "stream": self.stream,
            "tenant": self.who.as_ref().map(|who| who.tenant.as_str()),
            "key": self.who.as_ref().and_then(|who| who.key_label.as_deref()),
            "model": self.model.as_ref().map(|(sent, _)| sent),
            "model_behind": self.model.as_ref().map(|(_, model)| model),
            "model_label": self.model_label,
            "prompt_tokens": self.prompt.as_ref().map(|(tokens, _)| tokens.0),
            "length": self.prompt.as_ref().map(|(_, bucket)| bucket),
            "rules": rules.collect::<Vec<_>>(),
            "class": self.class.as_ref().map(|(class, _)| class.as_str()),
            "rule": self.class.as_ref().map(|(_, rule)| rule),
            "promise": self.promise,
            "priority": self.priority,
            "queue": self.queue,
            "degrade": self.degrade,
            "limits": self.limits,
            "reserves": self.reserved.as_ref().map(Reserved::to_json),
            "pools": self.pools.iter().map(PoolId::as_str).collect::<Vec<_>>(),
            "refused": self.refused.as_ref().map(|refused| json!({
                "status": refused.status().as_u16(),
                "code": refused.code(),
                "message": refused.message(),
            })),
        })
    }
}

impl Reserved {
    fn is_stated(&self) -> bool {
        matches!(self.wanted.output, Output::Stated(_))
    }

    fn in_words(&self) -> String {
        let whence = if self.is_stated() { "its own cap" } else { "assumed: no cap is stated" };
        let of = self.of.iter().map(|limit_status| {
            let whose = match limit_status.scope {
                LimitScope::Tenant => "",
                LimitScope::Model => " of the model",
            };
            format!(
                "{} of {} {}{whose}",
                limit_status.most - limit_status.remaining,
                limit_status.most,
                limit_status.limit
            )
        });
        let of: Vec<String> = of.collect();
        let Wanted { input, output } = self.wanted;
        format!("about {} tokens of prompt, {} of output ({whence}): {}", input.0, output.tokens().0, of.join(", "))
    }

    fn to_json(&self) -> Value {
        let of = self.of.iter().map(|limit_status| {
            json!({
                "limit": limit_status.limit.as_str(),
                "scope": limit_status.scope.as_str(),
                "takes": limit_status.most - limit_status.remaining,
                "most": limit_status.most,
            })
        });
        json!({
            "input_tokens": self.wanted.input.0,
            "output_tokens": self.wanted.output.tokens().0,
            "output_is_stated": self.is_stated(),
            "of": of.collect::<Vec<_>>(),
        })
    }
}

fn in_words(said: &ConditionResult) -> String {
    match said {
        ConditionResult::Matched => "yes".to_owned(),
        ConditionResult::ClassNotAllowed => "no, its conditions hold but the tenant may not use the class".to_owned(),
        ConditionResult::Differs(differs) if differs.len() == 1 => format!("no, {} differs", differs[0]),
        ConditionResult::Differs(differs) => format!("no, {} differ", differs.join(" and ")),
        ConditionResult::NotReached => "not evaluated".to_owned(),
        ConditionResult::BodyUnreadable => "not evaluated, a deciding field of the body cannot be read".to_owned(),
    }
}
