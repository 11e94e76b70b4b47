//! Assets of the status page: one style sheet, one script, one icon. They are part of the binary, so the page
//! works without internet access.

use std::sync::LazyLock;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};

const STYLE: &str = include_str!("page/status.css");
const SCRIPT: &str = include_str!("page/status.js");
const ICON: &str = include_str!("page/icon.svg");

/// Changes whenever any of them does. Pages name it, so that a browser that has them keeps them, and one
/// whose page is of another build of the program loads it anew.
pub(super) static BUILD: LazyLock<String> = LazyLock::new(|| {
    let all = [STYLE, SCRIPT, ICON, env!("CARGO_PKG_VERSION")].join("\0");
    blake3::hash(all.as_bytes()).to_hex()[..12].to_owned()
});

/// The file of this path below `/assets/`.
pub(super) async fn file(request: Request) -> Response {
    let (kind, text) = match request.uri().path() {
        "/assets/status.css" => ("text/css; charset=utf-8", STYLE),
        "/assets/status.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "/assets/icon.svg" => ("image/svg+xml", ICON),
        _ => return super::plain(StatusCode::NOT_FOUND, "no such asset\n"),
    };
    let is_this_build = request.uri().query() == Some(BUILD.as_str());
    let keep = if is_this_build { "private, max-age=31536000, immutable" } else { "no-store" };
    ([(CONTENT_TYPE, kind), (CACHE_CONTROL, keep)], text).into_response()
}
