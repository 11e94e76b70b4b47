//! `GET /v1/models`: what the tenant may use, over all pools.

use bytes::Bytes;
use http::request::Parts as Head;
use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::house::Gateway;
use super::promise::Live;
use super::reply;
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
            let asked = Endpoint::model_in(path.strip_suffix('/').unwrap_or(path)).and_then(decoded);
            let found = models.iter().find(|model| asked.as_deref() == Some(&*model.id));
            entry(&found.ok_or(Refusal::ModelNotFound)?.id)
        } else {
            let data: Vec<Value> = models.iter().map(|model| entry(&model.id)).collect();
            json!({"object": "list", "data": data, "has_more": false})
        };
        Ok(reply::json(StatusCode::OK, Bytes::from(body.to_string())))
    }
}

/// A model's id as it is, from how it stands in a path: clients write `org%2Fname`. Nothing where
/// an escape is none.
fn decoded(id: &str) -> Option<String> {
    let mut parts = id.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        let is_escape = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| is_escape)?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// One model, in a shape that the OpenAI and Anthropic clients both read.
fn entry(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "goodput", "type": "model", "display_name": id})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_decoded_once_and_a_bad_escape_is_none() {
        for (id, expected) in [
            ("m", Some("m")),
            ("org/name", Some("org/name")),
            ("org%2Fname", Some("org/name")),
            ("org%2fname", Some("org/name")),
            ("%C3%BC%20x", Some("\u{fc} x")),
            ("a%252Fb", Some("a%2Fb")),
            ("%", None),
            ("a%2", None),
            ("a%+2b", None),
            ("a%g0", None),
            ("a%2\u{fc}", None),
            ("a%FF", None),
        ] {
            assert_eq!(decoded(id).as_deref(), expected, "{id}");
        }
    }
}
