//! The response for the client: the engine's head, and a body that owns what the request holds until its
//! end.

use http::Response;

use super::attempt::{EngineCredential, HeldResponse};
use super::completion::{Completion, RequestGuard};
use super::overload;
use super::relay_context::RelayContext;
use super::retries::SelectedResponse;
use crate::forward::{GatewayHeaders, ReplyBody};

impl RelayContext {
    /// The response for the client: the engine's head with the gateway's own headers, and a body that
    /// ends in [`Completion`].
    #[must_use]
    pub fn relay(mut self: Box<Self>, spoken: SelectedResponse, mut active: RequestGuard) -> Response<ReplyBody> {
        let request = &mut self.request;
        let SelectedResponse { answer, attempts, at, unproven, has_failed } = spoken;
        let HeldResponse { head, mut relay, work, mut place, dispatched, injection, degraded } = *answer;
        degraded.iter().for_each(|kind| active.degraded(kind));
        let own = GatewayHeaders {
            class: request.class.take(),
            is_messages: request.endpoint.is_of_messages(),
            pool: place.shown.take(),
            degraded: overload::degradation_header(active.degradation()),
            times: Some([request.queued, at.since(dispatched)]),
            ..GatewayHeaders::of(active.request_id())
        };
        let (mut shown, ()) = Response::new(()).into_parts();
        shown.status = head.parts.status;
        if !head.parts.extensions.is_empty() {
            shown.extensions.clone_from(&head.parts.extensions);
        }
        relay.begins_with(head, own);
        if let Some(case) = active.case_mut() {
            case.credential_forwarded = place.credential == EngineCredential::Client;
            case.served_by_fallback_pool = place.is_away;
        }
        let unproven = unproven.then_some(injection);
        let completion = Completion { context: self, active, place, attempts, work, unproven, has_failed };
        relay.subscribe(Box::new(completion), at);
        Response::from_parts(shown, ReplyBody::Relay(relay))
    }
}
