//! What a request keeps from its first token to the end of its response body.

use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderValue;

use super::admission::AdmissionGuard;
use super::loop_guard::Tagged;
use super::request::RequestContext;
use super::request_body::{BodyMemoryGuard, BufferedBody};
use super::state::Gateway;
use crate::inspect::{ModelRatios, PromptSize};
use crate::types::{ApiPath, TenantId, Tick};

/// The parts of the request needed at the end of its response.
pub struct RequestSummary {
    /// The path.
    pub endpoint: ApiPath,
    /// The model's name at engines.
    pub model: Option<Arc<str>>,
    /// The class's name as a header value.
    pub class: Option<HeaderValue>,
    /// Whether the settings name its model literally.
    pub is_named: bool,
    /// Its tenant.
    pub tenant: TenantId,
    /// Inputs of the prompt estimate.
    pub prompt: PromptSize,
    /// Time in the gateway's queue.
    pub queued: Duration,
    /// Ratios known of its model at admission.
    pub learned: ModelRatios,
    /// Its upstream id, if it needs loop detection.
    pub _tagged: Option<Tagged>,
}

impl RequestSummary {
    /// The summary of a request that left the queue at `admitted`.
    pub(super) fn of(request: RequestContext<'_>, admitted: Tick, tagged: Option<Tagged>) -> Self {
        let named = request.facts().model.as_ref().map(|field| &field.value);
        RequestSummary {
            endpoint: request.endpoint,
            model: request.alias.map(Arc::from).or_else(|| named.cloned()),
            class: request.policy.shown.clone(),
            is_named: request.routed.literal,
            tenant: request.tenant.clone(),
            prompt: request.facts().prompt,
            queued: admitted.since(request.body.complete),
            learned: request.learned,
            _tagged: tagged,
        }
    }
}

/// Everything that a request holds until its response body ends. Boxed from the first token on, because it
/// is large.
pub struct RelayContext {
    /// The gateway.
    pub gateway: Gateway,
    /// The request.
    pub request: RequestSummary,
    /// Its reservation and seat.
    pub held: AdmissionGuard,
    /// Its share of the memory for bodies, if part of the body is kept.
    pub _body: Option<BodyMemoryGuard>,
}

impl RelayContext {
    /// Takes over what the request holds: its guard, and its share of the memory for kept parts of the
    /// body.
    pub(super) fn new(
        gateway: &Gateway,
        request: RequestSummary,
        held: AdmissionGuard,
        body: BufferedBody,
    ) -> Box<Self> {
        let kept = body.facts.held_for_answer();
        let body = (kept > 0).then(|| body.share.reduced_to(kept));
        Box::new(RelayContext { gateway: gateway.clone(), request, held, _body: body })
    }
}
