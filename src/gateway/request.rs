//! A request from its head ([`ArrivedRequest`]) to its context once its body was read
//! ([`RequestContext`]), which is built once, before admission, and borrowed from there on.

use std::borrow::Cow;
use std::sync::Arc;

use super::early_head::EarlyHeadSlot;
use super::overload::ActiveOverload;
use super::request_body::{BodyLimits, BufferedBody};
use super::snapshot::{ClassPolicy, SettingsSnapshot};
use super::state::GatewayState;
use crate::classify::{Classified, ClassifyInput, TargetHeaders};
use crate::config::Settings;
use crate::http1::ParsedHead;
use crate::identify::{AuthError, Identity};
use crate::inspect::{Facts, ModelRatios};
use crate::judge::{JudgeContext, Objectives, UploadRule};
use crate::record::{ActiveRequest, PromptShape, RequestPolicy};
use crate::reject::Rejection;
use crate::route::{self, RouteMatch, TenantKey, WorkEstimate};
use crate::types::{
    ApiPath, ClassId, ClientState, Dialect, InvalidHead, LengthBucket, PathError, RequestId, TenantId, Tick, Tokens,
};

/// Longest query, because with an engine's path prefix it must still fit into a URI of at most 65,534
/// bytes.
const LONGEST_QUERY: usize = 32 * 1024;

/// Largest output per choice counted as work: beyond any model's context. Engines reject more, but until
/// then it would outweigh all other work on that engine.
const MOST_OUTPUT: Tokens = Tokens(1 << 20);

/// Most choices per prompt counted as work: OpenAI's maximum. Engines reject more, but until then it would
/// weigh on all others.
const MOST_CHOICES: u64 = 128;

/// A request before its body was read.
pub(super) struct ArrivedRequest {
    pub(super) head: Arc<ParsedHead>,
    /// Start of the clock of every objective.
    pub(super) arrival: Tick,
    /// When its head was read: later than `arrival` if it had to wait.
    pub(super) read: Tick,
    pub(super) id: RequestId,
    /// Whether the gateway made the id, so that it is unique.
    pub(super) id_is_made: bool,
    pub(super) client: ClientState,
    /// The slot for an early head, if allowed.
    pub(super) early_head: Option<EarlyHeadSlot>,
}

/// A request before admission, with everything that the rest of its life depends on.
pub(super) struct RequestContext<'a> {
    /// Its head, id, client and arrival.
    pub(super) arrived: &'a ArrivedRequest,
    /// Its API path.
    pub(super) endpoint: ApiPath,
    /// Whether its responses are judged.
    pub(super) is_judged: bool,
    /// Its tenant.
    pub(super) tenant: &'a TenantId,
    /// Its decoded body with its facts.
    pub(super) body: &'a BufferedBody,
    /// The model's name if the client used an alias.
    pub(super) alias: Option<&'a str>,
    /// The model's name at engines.
    pub(super) model: Option<&'a str>,
    /// Ratios learned of that model.
    pub(super) learned: ModelRatios,
    /// Estimated prompt tokens.
    pub(super) prompt: Tokens,
    /// Prompt tokens that no engine's cache should hold.
    pub(super) uncached: Tokens,
    /// Its class's policy.
    pub(super) policy: &'a ClassPolicy,
    /// The objectives: the class's, with the request's own targets.
    pub(super) objectives: Arc<Objectives>,
    /// Start of its objectives.
    pub(super) start: Tick,
    /// Its pools.
    pub(super) routed: RouteMatch,
    /// Overload actions in force for it.
    pub(super) overload: ActiveOverload,
    /// Its estimated work.
    pub(super) size: WorkEstimate,
}

impl RequestContext<'_> {
    /// The facts of its body.
    pub(super) fn facts(&self) -> &Facts {
        &self.body.facts
    }

    /// Whether it asks for a stream.
    pub(super) fn streams(&self) -> bool {
        self.facts().streams()
    }

    /// Whether it gets a stream of tokens.
    pub(super) fn streams_tokens(&self) -> bool {
        self.streams() && self.dialect().generates()
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.endpoint.dialect()
    }

    /// The input tokens that it is charged where the engine tells none.
    pub(super) fn charged_prompt(&self) -> Tokens {
        let form_tokens = || self.learned.form_tokens(self.facts().prompt.form_bytes);
        if self.body.is_form { form_tokens() } else { self.prompt }
    }

    /// The pool of its route where it belongs: what another one finds wrong with it says nothing
    /// about the client.
    pub(super) fn home(&self) -> usize {
        self.overload.home(&self.routed.pools)
    }

    /// Its tenant, as breakers distinguish tenants.
    pub(super) fn tenant_key(&self) -> TenantKey {
        TenantKey(route::key_of(self.tenant.as_str().as_bytes()))
    }

    /// Whether its body must not be edited: multipart, or an engine's own path.
    pub(super) fn is_fixed(&self) -> bool {
        self.body.is_form || self.endpoint.is_of_engine()
    }

    /// Path and query for the engine: the canonical path and the original query.
    pub(super) fn target(&self) -> Cow<'_, str> {
        let path = self.endpoint.path();
        match self.arrived.head.uri.path_and_query() {
            Some(target) if target.path() == path => Cow::Borrowed(target.as_str()),
            Some(target) => match target.query() {
                Some(query) => Cow::Owned([path, "?", query].concat()),
                None => Cow::Borrowed(path),
            },
            None => Cow::Borrowed(path),
        }
    }
}

impl GatewayState {
    /// The API path of a request, if served.
    pub(super) fn endpoint(
        &self,
        live: &SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &ArrivedRequest,
    ) -> Result<ApiPath, Rejection> {
        let endpoint = endpoint_of(&live.settings, &arrived.head).inspect_err(|rejection| {
            if *rejection == Rejection::UnknownPath {
                active.asks_for_unknown(&self.unknown_names.path(arrived.head.uri.path(), arrived.read));
            }
        })?;
        active.set_endpoint(endpoint, live.settings.judges(endpoint));
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
        active.set_tenant(who.tenant.clone());
        Ok(who)
    }

    /// The limits for reading its body.
    pub(super) fn body_limits<'a>(&'a self, live: &SettingsSnapshot, arrived: &ArrivedRequest) -> BodyLimits<'a> {
        let listen = &live.settings.listen;
        BodyLimits {
            bodies: &self.bodies,
            max_bodies: listen.max_bodies,
            max_body: listen.max_body,
            timeout: listen.body_timeout,
            arrival: arrived.arrival,
            read: arrived.read,
            prompt_hashes: live.prompt_hashes,
            block_key: live.prompt_hashes.blocks.then(|| **self.block_key.load()),
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
        endpoint: ApiPath,
        body: &'a BufferedBody,
    ) -> Result<RequestContext<'a>, Rejection> {
        let facts = &*body.facts;
        let named = facts.model.as_ref().map(|field| &*field.value);
        let alias = named.and_then(|name| live.settings.routes.alias(name));
        if alias.is_some() && body.is_form {
            return Err(Rejection::AliasInForm);
        }
        let model = alias.or(named);
        let learned = self.ratios.of(model, who.tenant.as_str());
        let prompt = facts.prompt.tokens(learned.bytes_per_token());
        let classified = classify(live, who, &arrived.head, endpoint, body, model, prompt)?;
        let policy = live.promise(&classified.class);
        let objectives = objectives_of(policy, &arrived.head);
        let start = match objectives.upload {
            UploadRule::Excluded => arrived.arrival + body.client_wait,
            UploadRule::Counted => arrived.arrival,
        };
        active.prompt_is(|| PromptShape { bytes: facts.prompt.bytes, blocks: facts.prefix_blocks().to_vec() });
        active.set_policy(RequestPolicy {
            class: classified.class,
            rule: classified.rule,
            start,
            objectives: Arc::clone(&objectives),
            length: bucket_of(live, facts, prompt),
            prompt,
            streamed: facts.streams(),
            choices: facts.choices(),
            gap_edges: Arc::clone(&policy.watch.gap_edges),
            case: JudgeContext {
                judged_path: live.settings.judges(endpoint),
                stated_cap: facts.caps.largest(),
                names_stored: facts.names_stored,
                ..JudgeContext::of(endpoint.dialect())
            },
        });
        let routed = match endpoint.is_of_engine() {
            true => live.settings.routes.any(&policy.class.id).ok_or(Rejection::ModelNotFound)?,
            false => route(&live.settings, model, &policy.class.id).inspect_err(|_| {
                if let Some(model) = model {
                    active.asks_for_unknown(&self.unknown_names.model(model, body.complete));
                }
            })?,
        };
        active.routed(routed.model_label.clone(), routed.pools[0].clone());
        active.traced_to(|| (model, policy.pool(&routed.pools[0]).settings.kind.as_str()));
        let overload = self.active_overload(&policy.class.id);
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

/// Checks a head against limits and request rules.
pub(super) fn check_head(live: &SettingsSnapshot, head: &ParsedHead) -> Result<(), InvalidHead> {
    if head.uri.query().is_some_and(|query| query.len() > LONGEST_QUERY) {
        return Err(InvalidHead::TargetTooLong);
    }
    head.check(live.settings.listen.max_head, live.settings.listen.max_header_lines)
}

fn endpoint_of(settings: &Settings, head: &ParsedHead) -> Result<ApiPath, Rejection> {
    match head.endpoint() {
        Ok(endpoint) if endpoint.is_of_engine() && !settings.engine_paths.contains(&endpoint) => {
            Err(Rejection::UnknownPath)
        }
        Ok(endpoint) => Ok(endpoint),
        Err(PathError::Method { allow }) => match ApiPath::of_engines_at(head.uri.path()) {
            Some(endpoint) if !settings.engine_paths.contains(&endpoint) => Err(Rejection::UnknownPath),
            _ => Err(Rejection::MethodNotAllowed { allow }),
        },
        Err(PathError::Path) => Err(Rejection::UnknownPath),
    }
}

/// Rejects bodies that ask for something the gateway does not support.
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
    endpoint: ApiPath,
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
pub fn route(settings: &Settings, model: Option<&str>, class: &ClassId) -> Result<RouteMatch, Rejection> {
    let missing = || if model.is_none() { Rejection::ModelMissing } else { Rejection::ModelNotFound };
    settings.routes.find(model, class).ok_or_else(missing)
}

/// The class's objectives with the request's own targets.
fn objectives_of(policy: &ClassPolicy, head: &ParsedHead) -> Arc<Objectives> {
    let targets = policy.class.target_headers.read(&head.headers);
    if targets.ttft.is_none() && targets.tpot.is_none() {
        return Arc::clone(&policy.objectives);
    }
    let may_loosen = policy.class.target_headers == TargetHeaders::MayLoosen;
    Arc::new(policy.objectives.with_targets(targets.ttft, targets.tpot, may_loosen))
}

/// Number of choices counted as work.
pub(super) fn plausible_choices(facts: &Facts) -> u64 {
    facts.n.clamp(1, MOST_CHOICES).saturating_mul(facts.prompts.max(1))
}

/// The estimated work of a request: its prompt, and its expected output.
fn size_of(
    facts: &Facts,
    endpoint: ApiPath,
    prompt: Tokens,
    objectives: &Objectives,
    cap: Option<Tokens>,
) -> WorkEstimate {
    if !endpoint.generates() {
        return WorkEstimate { prefill: prompt, decode: Tokens::ZERO };
    }
    let each = facts.caps.largest().unwrap_or_else(|| objectives.default_output());
    let each = cap.map_or(each, |cap| each.min(cap)).min(MOST_OUTPUT);
    WorkEstimate { prefill: prompt, decode: each.times(plausible_choices(facts)) }
}
