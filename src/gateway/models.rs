//! `GET /v1/models`: the models that the tenant may use, over all pools.

use bytes::Bytes;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::local_reply;
use super::snapshot::SettingsSnapshot;
use super::state::Gateway;
use crate::forward::ReplyBody;
use crate::http1::ParsedHead;
use crate::identify::Identity;
use crate::route::{AvailableModel, ModelCard};
use crate::types::{ApiPath, ClassId};

impl Gateway {
    /// The list of models, or one of them.
    ///
    /// # Errors
    /// The name of a model that does not exist or that the tenant may not use.
    pub(super) fn models(
        &self,
        live: &SettingsSnapshot,
        who: &Identity,
        endpoint: ApiPath,
        head: &ParsedHead,
    ) -> Result<Response<ReplyBody>, String> {
        let classes = live.classes_of(&who.tenant);
        let models = live.settings.routes.models_for(&classes, &self.fleet);
        let body = if endpoint.is_one_model() {
            let path = head.uri.path();
            // Some clients encode the slash: `org%2Fname`.
            let asked = ApiPath::model_in(path.strip_suffix('/').unwrap_or(path));
            let asked = percent_decode_str(asked.unwrap_or_default()).decode_utf8_lossy();
            match models.iter().find(|model| *asked == *model.id) {
                Some(found) => entry(&found.id, &self.card(live, &classes, &found.id)),
                None => return Err(asked.into_owned()),
            }
        } else {
            let entry = |model: &AvailableModel| entry(&model.id, &self.card(live, &classes, &model.id));
            let data: Vec<Value> = models.iter().map(entry).collect();
            json!({"object": "list", "data": data, "has_more": false})
        };
        Ok(local_reply::json(StatusCode::OK, Bytes::from(body.to_string())))
    }
}

impl Gateway {
    /// What engines within reach of these classes report of a model, aliases included.
    fn card(&self, live: &SettingsSnapshot, classes: &[ClassId], id: &str) -> ModelCard {
        let routes = &live.settings.routes;
        let name = routes.alias(id).unwrap_or(id);
        let pools = classes.iter().filter_map(|class| routes.find(Some(name), class)).flat_map(|routed| {
            let pools: Vec<_> = routed.pools.to_vec();
            pools
        });
        pools.into_iter().find_map(|pool| self.fleet.model_card(&pool, name)).unwrap_or_default()
    }
}

/// One model in a format for both OpenAI and Anthropic clients, with what engines report.
fn entry(id: &str, card: &ModelCard) -> Value {
    let mut entry = json!({
        "id": id,
        "object": "model",
        "created": card.created.unwrap_or(0),
        "owned_by": "goodput",
        "type": "model",
        "display_name": id,
    });
    let said = [
        ("max_model_len", card.max_model_len.map(Value::from)),
        ("root", card.root.as_deref().map(Value::from)),
        ("parent", card.parent.as_deref().map(Value::from)),
    ];
    for (key, value) in said {
        if let Some(value) = value {
            entry[key] = value;
        }
    }
    entry
}
