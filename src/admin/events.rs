//! Live updates of the status page: server-sent events with the changed parts.
//!
//! Parts are rendered at most once a second, whatever the number of viewers, on a blocking thread. At most
//! [`VIEWERS`] are served; further ones are told to reload. An open page asks anew after [`VIEWED_FOR`], so that one
//! that nobody reads holds its place no longer: until its connection's buffers are full nothing else shows that.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use super::page::{self, PageParts};
use super::{AdminView, assets, plain};
use crate::clock::Clock;
use crate::record::HistorySpan;
use crate::types::Tick;

/// Open pages that are kept up to date at one time.
const VIEWERS: usize = 32;

/// Interval of updates of an open page.
const EVERY: Duration = Duration::from_secs(2);

/// Time after which an open page must ask anew.
const VIEWED_FOR: Duration = Duration::from_secs(600);

/// Time for which a rendered page is reused.
const FRESH: Duration = Duration::from_secs(1);

/// Content of this port only: no inline script, no inline style, no frame, no other site.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The last rendered page, and its time.
type RenderedPage = Mutex<Option<(Tick, Arc<PageParts>)>>;

/// The page of one view, rendered on demand.
pub(super) struct LivePage {
    view: Arc<dyn AdminView>,
    clock: Clock,
    has_token: bool,
    /// By span of time.
    rendered: [RenderedPage; HistorySpan::ALL.len()],
    viewers: Arc<Semaphore>,
}

/// The parts last sent to a viewer.
struct Viewer {
    live: Arc<LivePage>,
    span: HistorySpan,
    last: Option<Arc<PageParts>>,
    until: Tick,
    /// Whether it was told to ask anew.
    is_over: bool,
    _permit: OwnedSemaphorePermit,
}

impl LivePage {
    pub(super) fn new(view: Arc<dyn AdminView>, clock: Clock, has_token: bool) -> Self {
        let viewers = Arc::new(Semaphore::new(VIEWERS));
        LivePage { view, clock, has_token, rendered: Default::default(), viewers }
    }

    /// `GET /`.
    pub(super) async fn page(self: Arc<Self>, request: Request) -> Response {
        let Some(span) = span_of(&request) else { return unknown_span() };
        let Some(parts) = self.parts(span).await else { return unmade() };
        let mut response = ([(CONTENT_TYPE, "text/html; charset=utf-8")], page::document(&parts, span)).into_response();
        for (name, value) in [
            (CACHE_CONTROL, "no-store"),
            (HeaderName::from_static("content-security-policy"), POLICY),
            (HeaderName::from_static("x-content-type-options"), "nosniff"),
            (HeaderName::from_static("referrer-policy"), "same-origin"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    /// `GET /events`.
    pub(super) async fn events(self: Arc<Self>, request: Request) -> Response {
        let Some(span) = span_of(&request) else { return unknown_span() };
        let Ok(permit) = Arc::clone(&self.viewers).try_acquire_owned() else {
            let text = "too many pages are open: close one, or reload this one now and then\n";
            let mut response = plain(StatusCode::SERVICE_UNAVAILABLE, text);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
            return response;
        };
        let until = self.clock.now() + VIEWED_FOR;
        let viewer = Viewer { live: self, span, last: None, until, is_over: false, _permit: permit };
        let events = stream::unfold(viewer, |mut viewer| async move {
            let events = viewer.next().await?;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(events)), viewer))
        });
        let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
        (headers, Body::from_stream(events)).into_response()
    }

    /// The parts of the page; `None` if rendering failed.
    async fn parts(&self, span: HistorySpan) -> Option<Arc<PageParts>> {
        let mut rendered = self.rendered[span as usize].lock().await;
        let now = self.clock.now();
        if let Some((_, parts)) = rendered.as_ref().filter(|(at, _)| now.since(*at) < FRESH) {
            return Some(Arc::clone(parts));
        }
        let (view, has_token) = (Arc::clone(&self.view), self.has_token);
        // The threads that relay have better things to do.
        let made = tokio::task::spawn_blocking(move || page::parts(&view.status(span), has_token));
        let parts = Arc::new(made.await.ok()?);
        *rendered = Some((now, Arc::clone(&parts)));
        Some(parts)
    }
}

impl Viewer {
    /// The next events: all parts at first, then the changed ones, in the end the word to ask anew.
    async fn next(&mut self) -> Option<String> {
        if self.is_over {
            return None;
        }
        let mut text = String::new();
        if self.last.is_some() {
            let clock = self.live.clock;
            clock.sleep_until(Some(clock.now() + EVERY)).await;
        } else {
            text.push_str("retry: 2000\n");
            push_event(&mut text, "build", &assets::BUILD);
        }
        let parts = self.live.parts(self.span).await?;
        for (name, html) in parts.iter() {
            let was = self.last.as_ref().and_then(|last| last.part(name));
            if was != Some(html) {
                push_event(&mut text, name, html);
            }
        }
        if text.is_empty() {
            // Detects whether the viewer is still connected.
            text.push_str(":\n\n");
        }
        self.last = Some(parts);
        self.is_over = self.live.clock.now() >= self.until;
        if self.is_over {
            push_event(&mut text, "renew", "-");
        }
        Some(text)
    }
}

fn push_event(text: &mut String, name: &str, data: &str) {
    text.push_str("event: ");
    text.push_str(name);
    for line in data.lines() {
        text.push_str("\ndata: ");
        text.push_str(line);
    }
    text.push_str("\n\n");
}

/// The history span of a request's query (`span=day`). The last hour without one; `None` for an unknown word.
pub(super) fn span_of(request: &Request) -> Option<HistorySpan> {
    let pairs = request.uri().query().unwrap_or_default().split('&');
    let named = pairs.filter_map(|pair| pair.strip_prefix("span=")).next();
    named.map_or(Some(HistorySpan::default()), |named| HistorySpan::ALL.into_iter().find(|span| span.as_str() == named))
}

pub(super) fn unknown_span() -> Response {
    plain(StatusCode::BAD_REQUEST, "span is one of: hour, day, window\n")
}

fn unmade() -> Response {
    plain(StatusCode::INTERNAL_SERVER_ERROR, "the page could not be made; the log says why\n")
}
