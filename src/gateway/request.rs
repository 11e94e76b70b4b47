//! What is known of one request: from its head ([`ArrivedRequest`]), and once its body has been read
//! ([`RequestContext`]). The context is built once, before admission, and borrowed from there on.

use std::sync::Arc;

use http::uri::PathAndQuery;

use super::early::EarlyHeadSlot;
use super::house::GatewayState;
use super::overload::ActiveOverload;
use super::promise::{ClassPolicy, SettingsSnapshot};
use super::request_body::{BodyLimits, BufferedBody};
use crate::accept::ParsedHead;
use crate::classify::{Classified, ClassifyInput, TargetHeaders};
use crate::config::Settings;
use crate::identify::{AuthError, Identity};
use crate::inspect::{Facts, ModelRatios};
use crate::judge::{Case, Objectives, UploadRule};
use crate::record::{ActiveRequest, PromptShape, RequestPolicy};
use crate::refuse::Rejection;
use crate::route::{self, Routed, Size, TenantKey};
use crate::units::{
    ClassId, ClientState, Dialect, Endpoint, InvalidHead, LengthBucket, PathError, RequestId, TenantId, Tick, Tokens,
};

/// The longest query. Behind an engine's path prefix it must still be a URI, which is at most 65,534
/// bytes long.
const LONGEST_QUERY: usize = 32 * 1024;

/// Output of a choice that counts as work for an engine: more than any model's context holds. An
/// engine rejects more, but until then it would have outweighed all other work on that engine.
const MOST_OUTPUT: Tokens = Tokens(1 << 20);

/// Choices of a prompt that count as work, in queues and on engines: the most that OpenAI takes. An
/// engine rejects an absurd number, but until then it would have weighed on all others.
const MOST_CHOICES: u64 = 128;

/// What is known of a request from its head alone.
pub(super) struct ArrivedRequest {
    pub(super) head: Arc<ParsedHead>,
    /// The clock of every objective starts here.
    pub(super) arrival: Tick,
    /// The moment at which its head had been read: later than `arrival` if it waited for that.
    pub(super) read: Tick,
    pub(super) id: RequestId,
    /// The id is our own, and unique.
    pub(super) id_is_made: bool,
    pub(super) client: ClientState,
    /// Where an early head goes out, if one may.
    pub(super) early_head: Option<EarlyHeadSlot>,
}

/// One request before admission: everything that the rest of its life depends on.
pub(super) struct RequestContext<'a> {
    /// Its head, id, client and arrival.
    pub(super) arrived: &'a ArrivedRequest,
    /// Its path.
    pub(super) endpoint: Endpoint,
    /// Responses on its path are judged.
    pub(super) is_judged: bool,
    /// Who asks.
    pub(super) tenant: &'a TenantId,
    /// Its body, decoded, with the facts that were read from it.
    pub(super) body: &'a BufferedBody,
    /// The model's name behind an alias.
    pub(super) alias: Option<&'a str>,
    /// The model's name as engines know it.
    pub(super) model: Option<&'a str>,
    /// What is learned of that model.
    pub(super) learned: ModelRatios,
    /// The prompt estimate.
    pub(super) prompt: Tokens,
    /// Prompt tokens that no engine's cache should hold.
    pub(super) uncached: Tokens,
    /// Its class.
    pub(super) policy: &'a ClassPolicy,
    /// The objectives that are judged: the class's, with the request's own targets.
    pub(super) objectives: Arc<Objectives>,
    /// The moment from which its objectives run.
    pub(super) start: Tick,
    /// Where it may go.
    pub(super) routed: Routed,
    /// What is given up for it under load.
    pub(super) overload: ActiveOverload,
    /// The work that it brings, estimated.
    pub(super) size: Size,
}

impl RequestContext<'_> {
    /// What its body said.
    pub(super) fn facts(&self) -> &Facts {
        &self.body.facts
    }

    /// It asks for a stream.
    pub(super) fn streams(&self) -> bool {
        self.facts().streams()
    }

    /// It gets a stream of tokens.
    pub(super) fn streams_tokens(&self) -> bool {
        self.streams() && self.dialect().generates()
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.endpoint.dialect()
    }

    /// The pool of its route where it belongs: what another one finds wrong with it says nothing
    /// about the client.
    pub(super) fn home(&self) -> usize {
        self.overload.home(&self.routed.pools)
    }

    /// Its tenant, as far as breakers tell tenants apart.
    pub(super) fn tenant_key(&self) -> TenantKey {
        TenantKey(route::key_of(self.tenant.as_str().as_bytes()))
    }

    /// No byte of its body may be changed: multipart, or a path of the engine's own.
    pub(super) fn is_fixed(&self) -> bool {
        self.body.is_form || self.endpoint.is_of_engine()
    }

    /// Path and query for the engine: the path as the documentation writes it, the query as it came.
    pub(super) fn target(&self) -> PathAndQuery {
        let path = self.endpoint.path();
        match self.arrived.head.uri.path_and_query() {
            Some(target) if target.path() == path => target.clone(),
            Some(target) => {
                let query = target.query().map_or_else(String::new, |query| format!("?{query}"));
                PathAndQuery::try_from([path, &query].concat()).expect("a path of ours, a query that was parsed")
            }
            None => PathAndQuery::from_static(path),
        }
    }
}

impl GatewayState {
    /// The path of a request, if the gateway serves it.
    pub(super) fn endpoint(
        &self,
        live: &SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &ArrivedRequest,
    ) -> Result<Endpoint, Rejection> {
        let endpoint = endpoint_of(&live.settings, &arrived.head).inspect_err(|rejection| {
            if *rejection == Rejection::UnknownPath {
                active.asks_for_unknown(&self.strangers.path(arrived.head.uri.path(), arrived.read));
            }
        })?;
        active.comes_to(endpoint, live.settings.judges(endpoint));
        Ok(endpoint)
    }

    /// Finds the tenant by the request's key.
    pub(super) fn identify(
        &self,
        live: &SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &ArrivedRequest,
    ) -> Result<Identity, Rejection> {
        let who = live.settings.keyring.find(&arrived.head.headers).map_err(|error| match error {
            AuthError::Missing => Rejection::MissingKey,
            AuthError::Unknown => Rejection::UnknownKey,
            AuthError::TwoKeys => Rejection::TwoKeys,
        })?;
        active.belongs_to(who.tenant.clone());
        Ok(who)
    }

    /// The limits within which its body is read.
    pub(super) fn body_limits<'a>(&'a self, live: &SettingsSnapshot, arrived: &ArrivedRequest) -> BodyLimits<'a> {
        let listen = &live.settings.listen;
        BodyLimits {
            bodies: &self.bodies,
            max_bodies: listen.max_bodies,
            max_body: listen.max_body,
            timeout: listen.body_timeout,
            arrival: arrived.arrival,
            read: arrived.read,
            with_prefix: live.asks_for_prefixes,
            is_coded: arrived.head.has_coding(),
        }
    }

    /// Classifies a request, finds its route, and applies the overload levels in force.
    pub(super) fn context<'a>(
        &self,
        live: &'a SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &'a ArrivedRequest,
        who: &'a Identity,
        endpoint: Endpoint,
        body: &'a BufferedBody,
    ) -> Result<RequestContext<'a>, Rejection> {
        let facts = &*body.facts;
        let named = facts.model.as_ref().map(|field| &*field.value);
        let alias = named.and_then(|name| live.settings.routes.alias(name));
        if alias.is_some() && body.is_form {
            return Err(Rejection::AliasInForm);
        }
        let model = alias.or(named);
        let learned = self.ratios.of(model);
        let prompt = facts.prompt.tokens(learned.bytes_per_token());
        let classified = classify(live, who, &arrived.head, endpoint, body, model, prompt)?;
        let policy = live.promise(&classified.class);
        let objectives = objectives_of(policy, &arrived.head);
        let start = match objectives.upload {
            UploadRule::Excluded => arrived.arrival + body.client_wait,
            UploadRule::Counted => arrived.arrival,
        };
        active.prompt_is(|| PromptShape { bytes: facts.prompt.bytes, blocks: facts.prefix_blocks().to_vec() });
        active.promised(RequestPolicy {
            class: classified.class,
            rule: classified.rule,
            start,
            objectives: Arc::clone(&objectives),
            length: bucket_of(live, facts, prompt),
            prompt,
            streamed: facts.streams(),
            choices: facts.choices(),
            gap_edges: Arc::clone(&policy.watch.gap_edges),
            case: Case {
                judged_path: live.settings.judges(endpoint),
                stated_cap: facts.caps.largest(),
                names_stored: facts.names_stored,
                ..Case::of(endpoint.dialect())
            },
        });
        let routed = match endpoint.is_of_engine() {
            true => live.settings.routes.any(&policy.class.id).ok_or(Rejection::ModelNotFound)?,
            false => route(&live.settings, model, &policy.class.id).inspect_err(|_| {
                if let Some(model) = model {
                    active.asks_for_unknown(&self.strangers.model(model, body.complete));
                }
            })?,
        };
        active.routed(routed.model_label.clone(), routed.pools[0].clone());
        active.traced_to(|| (model, policy.pool(&routed.pools[0]).settings.kind.as_str()));
        let overload = self.relief(&policy.class.id);
        overload.is_told(active);
        let routed = overload.rerouted(routed, policy.class.priority, active, body.complete)?;
        Ok(RequestContext {
            arrived,
            endpoint,
            is_judged: live.settings.judges(endpoint),
            tenant: &who.tenant,
            body,
            alias,
            model,
            prompt,
            uncached: self.fleet.uncached(&routed.pools[0], prompt, facts.prefix_blocks()),
            policy,
            size: size_of(facts, endpoint, prompt, &objectives, overload.cap()),
            objectives,
            start,
            routed,
            overload,
            learned,
        })
    }
}

/// Whether a head may become a request.
pub(super) fn check_head(live: &SettingsSnapshot, head: &ParsedHead) -> Result<(), InvalidHead> {
    if head.uri.query().is_some_and(|query| query.len() > LONGEST_QUERY) {
        return Err(InvalidHead::TargetTooLong);
    }
    head.check(live.settings.listen.max_head, live.settings.listen.max_header_lines)
}

fn endpoint_of(settings: &Settings, head: &ParsedHead) -> Result<Endpoint, Rejection> {
    match head.endpoint() {
        Ok(endpoint) if endpoint.is_of_engine() && !settings.engine_paths.contains(&endpoint) => {
            Err(Rejection::UnknownPath)
        }
        Ok(endpoint) => Ok(endpoint),
        Err(PathError::Method { allow }) => match Endpoint::of_engines_at(head.uri.path()) {
            Some(endpoint) if !settings.engine_paths.contains(&endpoint) => Err(Rejection::UnknownPath),
            _ => Err(Rejection::MethodNotAllowed { allow }),
        },
        Err(PathError::Path) => Err(Rejection::UnknownPath),
    }
}

/// Rejects bodies that ask for what the gateway does not serve.
pub(super) fn check_facts(facts: &Facts) -> Result<(), Rejection> {
    match facts {
        facts if facts.background => Err(Rejection::BackgroundRefused),
        facts if facts.steers => Err(Rejection::TransferRefused),
        _ => Ok(()),
    }
}

fn classify(
    live: &SettingsSnapshot,
    who: &Identity,
    head: &ParsedHead,
    endpoint: Endpoint,
    body: &BufferedBody,
    model: Option<&str>,
    prompt: Tokens,
) -> Result<Classified, Rejection> {
    let input = ClassifyInput {
        who,
        headers: &head.headers,
        path: endpoint.path(),
        facts: Some(&body.facts),
        model,
        prompt_tokens: prompt,
    };
    let may_use = |class: &ClassId| live.settings.tenants.may_use(&who.tenant, class);
    let not_allowed = |_| Rejection::ClassNotAllowed { class: live.settings.default_class.clone() };
    live.settings.rules.class_of(&input, may_use).map_err(not_allowed)
}

fn bucket_of(live: &SettingsSnapshot, facts: &Facts, prompt: Tokens) -> LengthBucket {
    if facts.prompt.is_known { live.settings.buckets.of(prompt) } else { LengthBucket::Unknown }
}

/// The pools that serve a model to a class.
///
/// # Errors
/// No route does.
pub fn route(settings: &Settings, model: Option<&str>, class: &ClassId) -> Result<Routed, Rejection> {
    let missing = || if model.is_none() { Rejection::ModelMissing } else { Rejection::ModelNotFound };
    settings.routes.find(model, class).ok_or_else(missing)
}

/// The class's objectives, with the targets that the request sets for itself.
fn objectives_of(policy: &ClassPolicy, head: &ParsedHead) -> Arc<Objectives> {
    let targets = policy.class.target_headers.read(&head.headers);
    if targets.ttft.is_none() && targets.tpot.is_none() {
        return Arc::clone(&policy.objectives);
    }
    let may_loosen = policy.class.target_headers == TargetHeaders::MayLoosen;
    Arc::new(policy.objectives.with_targets(targets.ttft, targets.tpot, may_loosen))
}

/// Choices that count as work.
pub(super) fn plausible_choices(facts: &Facts) -> u64 {
    facts.n.clamp(1, MOST_CHOICES).saturating_mul(facts.prompts.max(1))
}

/// The work that a request brings: its prompt, and the output that is expected of it.
fn size_of(facts: &Facts, endpoint: Endpoint, prompt: Tokens, objectives: &Objectives, cap: Option<Tokens>) -> Size {
    if !endpoint.generates() {
        return Size { prefill: prompt, decode: Tokens::ZERO };
    }
    let each = facts.caps.largest().unwrap_or_else(|| objectives.default_output());
    let each = cap.map_or(each, |cap| each.min(cap)).min(MOST_OUTPUT);
    Size { prefill: prompt, decode: each.times(plausible_choices(facts)) }
}
