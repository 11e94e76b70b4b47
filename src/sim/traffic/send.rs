//! Sends one request, and observes its response with the gateway's own observer and judge.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HOST};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::plan::{TrafficFlow, TrafficRequest};
use super::stats::RequestResult;
use crate::clock::Clock;
use crate::judge::{JudgeContext, Progress, judge, judge_left};
use crate::observe::{Ending, Observer, ObserverOptions, ResponseExpectation, ResponseFormat, Timeline};
use crate::types::{Tick, Tokens};

/// A byte stream to the service.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Connects to the service under load.
pub type Connector = Arc<dyn Fn() -> ConnectFuture + Send + Sync>;

/// A pending connection.
pub type ConnectFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// TCP connections to this address.
#[must_use]
pub fn to(address: SocketAddr) -> Connector {
    Arc::new(move || {
        Box::pin(async move {
            let socket = TcpStream::connect(address).await?;
            socket.set_nodelay(true)?;
            Ok(Box::new(socket) as Box<dyn ByteStream>)
        })
    })
}

type RequestSender = SendRequest<Full<Bytes>>;

/// The header with a gateway's rejection reason.
const REASON: &str = "x-goodput-reason";

/// A client of the service with kept connections.
pub(super) struct TrafficClient {
    clock: Clock,
    open: Connector,
    idle: Mutex<Vec<RequestSender>>,
    lines: Mutex<JoinSet<()>>,
}

impl TrafficClient {
    pub fn new(clock: Clock, open: Connector) -> Self {
        TrafficClient { clock, open, idle: Mutex::default(), lines: Mutex::default() }
    }

    /// Sends a request and observes its response to the end, or until the client disconnects.
    pub async fn ask(&self, flow: &TrafficFlow, shot: &TrafficRequest) -> RequestResult {
        let arrival = self.clock.now();
        let leaves = shot.leaves_after.map(|length| arrival + length);
        let mut case = JudgeContext::of(flow.style.dialect());
        case.stated_cap = Some(Tokens(shot.cap));
        let answered = tokio::select! {
            answered = self.response(flow, shot) => answered,
            () = self.clock.sleep_until(leaves) => {
                let waited = Progress::waiting(arrival, true, flow.style.streams());
                let verdict = judge_left(&waited, &flow.objectives, &case, self.clock.now());
                return RequestResult { status: None, outcome: Some(verdict.outcome), timeline: None };
            }
        };
        let Ok((response, sender)) = answered else {
            return RequestResult { status: None, outcome: None, timeline: None };
        };
        let status = Some(response.status().as_u16());
        // The client's own limit, unlike an engine's 429.
        case.over_limit = response.headers().get(REASON).is_some_and(|reason| reason == "rate_limit_exceeded");
        let timeline = self.watch(flow, arrival, leaves, response, sender).await;
        let outcome = Some(judge(&timeline, &flow.objectives, &case).outcome);
        RequestResult { status, outcome, timeline: Some(timeline) }
    }

    async fn response(
        &self,
        flow: &TrafficFlow,
        shot: &TrafficRequest,
    ) -> Result<(Response<Incoming>, RequestSender), SendFailure> {
        if let Some(mut sender) = self.take_idle() {
            // A kept connection may have been closed meanwhile; then a new one is opened.
            if sender.ready().await.is_ok() {
                match sender.send_request(request(flow, shot)).await {
                    Ok(response) => return Ok((response, sender)),
                    Err(error) if error.is_canceled() || error.is_incomplete_message() => {}
                    Err(_) => return Err(SendFailure),
                }
            }
        }
        let stream = (self.open)().await.map_err(|_| SendFailure)?;
        let (mut sender, line) = handshake(TokioIo::new(stream)).await.map_err(|_| SendFailure)?;
        {
            let mut lines = self.lines.lock();
            while lines.try_join_next().is_some() {}
            lines.spawn(async move { line.await.unwrap_or(()) });
        }
        let response = sender.send_request(request(flow, shot)).await.map_err(|_| SendFailure)?;
        Ok((response, sender))
    }

    fn take_idle(&self) -> Option<RequestSender> {
        let mut idle = self.idle.lock();
        idle.retain(|sender| !sender.is_closed());
        idle.pop()
    }

    async fn watch(
        &self,
        flow: &TrafficFlow,
        arrival: Tick,
        leaves: Option<Tick>,
        response: Response<Incoming>,
        sender: RequestSender,
    ) -> Timeline {
        let (head, mut body) = response.into_parts();
        let mut expect = ResponseExpectation::stream(flow.style.dialect(), arrival);
        expect.stream_asked = flow.style.streams();
        let itl = flow.objectives.itl.map(|objective| objective.threshold);
        let watch = ObserverOptions { itl, stall: flow.objectives.stall, ..ObserverOptions::default() };
        let mut seen = Observer::new(expect, reader(&head.headers), head.status.as_u16(), watch);
        let ending = loop {
            let frame = tokio::select! {
                biased;
                () = self.clock.sleep_until(leaves) => break Ending::Left,
                frame = body.frame() => frame,
            };
            match frame {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        seen.frame(data, self.clock.now(), &mut |_, _| {});
                    }
                }
                Some(Err(_)) => break Ending::Broken,
                None => {
                    seen.clean_end(self.clock.now(), &mut |_, _| {});
                    break Ending::Clean;
                }
            }
        };
        if ending == Ending::Clean {
            self.idle.lock().push(sender);
        }
        seen.end(ending, self.clock.now())
    }
}

/// No response.
struct SendFailure;

fn request(flow: &TrafficFlow, shot: &TrafficRequest) -> Request<Full<Bytes>> {
    let mut request = Request::post(flow.style.path()).header(HOST, "service").header(CONTENT_TYPE, "application/json");
    for (name, value) in &flow.headers {
        request = request.header(name, value);
    }
    let body = Full::new(shot.body.clone());
    request.body(body).unwrap_or_else(|_| Request::new(Full::new(shot.body.clone())))
}

fn reader(headers: &HeaderMap) -> ResponseFormat {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let starts = |prefix: &str| kind.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    if headers.contains_key(CONTENT_ENCODING) {
        ResponseFormat::Coded
    } else if starts("text/event-stream") {
        ResponseFormat::Events
    } else if starts("application/json") {
        ResponseFormat::Json
    } else {
        ResponseFormat::Opaque
    }
}
