//! `GET /v1/models`: what the tenant may use, over all pools.

use bytes::Bytes;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::house::Gateway;
use super::promise::Live;
use super::reply;
use crate::accept::Head;
use crate::forward::ReplyBody;
use crate::identify::Who;
use crate::refuse::Refusal;
use crate::units::Endpoint;

impl Gateway {
    /// The list of models, or one of them.
    ///
    /// # Errors
    /// A model that the tenant may not use, or that nobody serves, is not found.
    pub(super) fn models(
        &self,
        live: &Live,
        who: &Who,
        endpoint: Endpoint,
        head: &Head,
    ) -> Result<Response<ReplyBody>, Refusal> {
        let classes = live.classes_of(&who.tenant);
        let models = live.settings.routes.models_for(&classes, &self.fleet);
        let body = if endpoint.is_one_model() {
            let path = head.uri.path();
            // Clients write `org%2Fname`.
            let asked = Endpoint::model_in(path.strip_suffix('/').unwrap_or(path));
            let asked = asked.and_then(|id| percent_decode_str(id).decode_utf8().ok());
            let found = models.iter().find(|model| asked.as_deref() == Some(&*model.id));
            entry(&found.ok_or(Refusal::ModelNotFound)?.id)
        } else {
            let data: Vec<Value> = models.iter().map(|model| entry(&model.id)).collect();
            json!({"object": "list", "data": data, "has_more": false})
        };
        Ok(reply::json(StatusCode::OK, Bytes::from(body.to_string())))
    }
}

/// One model, in a shape that the OpenAI and Anthropic clients both read.
fn entry(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "goodput", "type": "model", "display_name": id})
}
