//! `POST /-/drill`: invented misses, to see whether a page arrives.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};

use super::{SharedView, plain};

/// Misses of one drill: more would only look like an attack on the counters.
const MOST: u64 = 10_000;

/// The longest body.
const LONGEST_BODY: usize = 256;

pub(super) async fn drill(State(view): SharedView, request: Request) -> Response {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct DrillRequest {
        misses: u64,
    }
    #[derive(Serialize)]
    struct DrillResponse {
        class: &'static str,
        misses: u64,
    }
    let body = axum::body::to_bytes(request.into_body(), LONGEST_BODY).await.unwrap_or_default();
    let wanted: Option<DrillRequest> = serde_json::from_slice(&body).ok();
    let Some(DrillRequest { misses }) = wanted.filter(|wanted| (1..=MOST).contains(&wanted.misses)) else {
        return plain(StatusCode::BAD_REQUEST, "send {\"misses\": 1 to 10000}\n");
    };
    view.drill(misses);
    let body =
        serde_json::to_vec(&DrillResponse { class: "drill", misses }).expect("names and numbers are always JSON");
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}
