//! One request of a run: sent, watched to its end or to a limit, and judged as the gateway judges.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderMap, HeaderValue, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use tokio::sync::{mpsc, watch};
use tokio::time::Sleep;

use super::connections::{FullRequest, LoadConnection, LoadConnections, NoResponse};
use super::plan::{LoadClass, LoadTarget, PlannedRequest};
use super::record::LoadRecord;
use super::run_events::{Halt, LoadEvent};
use crate::clock::Clock;
use crate::inspect::Ratios;
use crate::judge::{JudgeContext, Missed, Outcome, Progress, judge, judge_left, judge_refused};
use crate::observe::{
    Ending, Observer, ObserverOptions, ResponseExpectation, ResponseFormat, TemplateCache, TimeoutKind,
};
use crate::types::{ApiPath, EngineId, Tick};

/// Time after `finish` in which the service may end its body (`docs/semantics.md`, section 3).
const AFTER_FINISH: Duration = Duration::from_secs(1);

/// Header in which a goodput gateway says why it refuses.
const REASON: &str = "x-goodput-reason";

/// Value of [`REASON`] where the tenant's own limit refuses.
const OVER_LIMIT: &str = "rate_limit_exceeded";

/// State shared by the requests of a run.
pub(super) struct LoadShared {
    pub clock: Clock,
    pub connections: Arc<LoadConnections>,
    pub classes: Vec<ClassHeads>,
    pub halt: watch::Receiver<Halt>,
    pub events: mpsc::Sender<LoadEvent>,
    /// Start of the run.
    pub origin: Tick,
    /// Name of the service, under which `ratios` are kept.
    pub engine: EngineId,
    /// Tokens per event, learned from responses with usage for those without.
    pub ratios: Ratios,
    /// Shapes of events that came before.
    pub templates: Arc<TemplateCache>,
}

/// A class with the header map that its requests carry.
pub(super) struct ClassHeads {
    class: Arc<LoadClass>,
    headers: HeaderMap,
}

impl ClassHeads {
    pub fn new(class: &LoadClass, target: &LoadTarget) -> Self {
        ClassHeads { class: Arc::new(class.clone()), headers: Self::of(class, target) }
    }

    /// The headers of a request of a class.
    pub fn of(class: &LoadClass, target: &LoadTarget) -> HeaderMap {
        let mut headers = Self::bare(target);
        headers.extend(class.headers.clone());
        headers
    }

    /// The headers of any request to a service.
    pub fn bare(target: &LoadTarget) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let host = HeaderValue::from_str(&target.address.authority());
        headers.insert(HOST, host.unwrap_or_else(|_| HeaderValue::from_static("service")));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("goodput/", env!("CARGO_PKG_VERSION"))));
        headers.extend(target.headers.clone());
        headers
    }
}

/// Ends of a wait for the service.
enum GiveUp {
    /// A limit of the class, or of the run's drain.
    Limit(TimeoutKind),
    /// The client disconnects: planned, or the run was aborted.
    Leave,
    /// The response is finished, but its body did not end.
    Over,
}

/// Moments at which a wait ends.
struct ExchangeLimits {
    first_token: Option<Tick>,
    idle: Option<Tick>,
    total: Tick,
    leave: Option<Tick>,
    over: Option<Tick>,
    /// An objective breaks that has not been reported as broken.
    overdue: Option<Tick>,
}

impl ExchangeLimits {
    fn next(&self) -> Tick {
        let all = [self.first_token, self.idle, self.leave, self.over, self.overdue];
        all.into_iter().flatten().fold(self.total, Tick::min)
    }

    /// The earliest limit due at `now`.
    fn due(&self, now: Tick) -> Option<GiveUp> {
        let limits = [
            (self.over, GiveUp::Over),
            (self.leave, GiveUp::Leave),
            (self.first_token, GiveUp::Limit(TimeoutKind::FirstToken)),
            (self.idle, GiveUp::Limit(TimeoutKind::Idle)),
            (Some(self.total), GiveUp::Limit(TimeoutKind::Total)),
        ];
        let passed = limits.into_iter().filter_map(|(at, due)| Some((at.filter(|at| *at <= now)?, due)));
        passed.min_by_key(|(at, _)| *at).map(|(_, due)| due)
    }
}

/// One request on its way.
pub(super) struct LoadExchange {
    shared: Arc<LoadShared>,
    planned: PlannedRequest,
    number: u64,
    /// Scheduled send time.
    start: Tick,
    case: JudgeContext,
    limits: ExchangeLimits,
    timer: Pin<Box<Sleep>>,
    halt: watch::Receiver<Halt>,
}

impl LoadExchange {
    pub fn new(shared: &Arc<LoadShared>, planned: PlannedRequest, number: u64) -> Self {
        let start = shared.origin + planned.at;
        let ClassHeads { class, .. } = &shared.classes[planned.class];
        let (timeouts, objectives) = (&class.timeouts, &class.objectives);
        let dialect = planned.endpoint.dialect();
        let mut case = JudgeContext::of(dialect);
        case.judged_path = true;
        case.stated_cap = planned.output_cap;
        case.credential_forwarded = true;
        let streams = planned.stream && dialect.generates();
        let first = if streams { timeouts.first_token } else { timeouts.response_head };
        let waiting = Progress::waiting(start, true, streams);
        let limits = ExchangeLimits {
            first_token: Some(start + first),
            idle: None,
            total: start + timeouts.total,
            leave: planned.leaves_after.map(|length| start + length),
            over: None,
            overdue: crate::judge::breaks_at(&waiting, objectives, &case),
        };
        let timer = Box::pin(tokio::time::sleep_until(shared.clock.instant(limits.next())));
        let halt = shared.halt.clone();
        LoadExchange { planned, number, start, case, limits, timer, halt, shared: Arc::clone(shared) }
    }

    /// Sends, watches, judges, and reports the record.
    pub async fn run(mut self) {
        let mut record = self.blank();
        match self.response().await {
            Ok((response, connection)) => self.watch(response, connection, &mut record).await,
            Err(ended) => self.without_response(ended, &mut record),
        }
        record.end_seconds = self.seconds_of(self.shared.clock.now());
        let _ = self.shared.events.send(LoadEvent::Ended(Box::new(record))).await;
    }

    fn class(&self) -> &Arc<LoadClass> {
        &self.shared.classes[self.planned.class].class
    }

    fn seconds_of(&self, at: Tick) -> f64 {
        at.since(self.shared.origin).as_secs_f64()
    }

    fn blank(&self) -> LoadRecord {
        LoadRecord {
            number: self.number,
            tag: self.planned.tag,
            class: self.class().id.to_string(),
            class_index: self.planned.class,
            scheduled_seconds: self.seconds_of(self.start),
            send_lag_seconds: self.shared.clock.now().since(self.start).as_secs_f64(),
            planned_input_tokens: self.planned.input_tokens,
            output_cap: self.planned.output_cap.map(|tokens| tokens.0),
            ..LoadRecord::default()
        }
    }

    /// The head of the response, or why there is none.
    async fn response(&mut self) -> Result<(Response<Incoming>, LoadConnection), WithoutResponse> {
        let shared = Arc::clone(&self.shared);
        let (planned, class) = (self.planned.clone(), self.planned.class);
        let target = shared.connections.target();
        let path = format!("{}{}", target.address.base, planned.endpoint.path());
        let uri: Uri = path.parse().unwrap_or_else(|_| Uri::from_static("/"));
        let request = move || {
            let mut request = FullRequest::new(Full::new(planned.body.clone()));
            *request.method_mut() = http::Method::POST;
            *request.uri_mut() = uri.clone();
            request.headers_mut().clone_from(&shared.classes[class].headers);
            request
        };
        let connections = Arc::clone(&self.shared.connections);
        let mut sending = Box::pin(connections.send(request));
        loop {
            tokio::select! {
                sent = &mut sending => return sent.map_err(WithoutResponse::Failed),
                due = self.wait() => match due {
                    Some(due) => return Err(WithoutResponse::GivenUp(due)),
                    None => self.report_overdue().await,
                },
            }
        }
    }

    /// Waits for the next limit; `None`: an objective broke that was not reported yet.
    async fn wait(&mut self) -> Option<GiveUp> {
        loop {
            let clock = self.shared.clock;
            let next = clock.instant(self.limits.next());
            if self.timer.deadline() != next {
                self.timer.as_mut().reset(next);
            }
            tokio::select! {
                () = self.timer.as_mut() => {}
                halt = self.halt.wait_for(|halt| *halt >= Halt::TimeOut) => {
                    let is_abort = halt.is_err() || halt.is_ok_and(|halt| *halt == Halt::Abort);
                    let kind = if self.limits.first_token.is_some() { TimeoutKind::FirstToken } else { TimeoutKind::Total };
                    return Some(if is_abort { GiveUp::Leave } else { GiveUp::Limit(kind) });
                }
            }
            let now = clock.now();
            if let Some(due) = self.limits.due(now) {
                return Some(due);
            }
            if self.limits.overdue.is_some_and(|at| at <= now) {
                return None;
            }
        }
    }

    async fn report_overdue(&mut self) {
        self.limits.overdue = None;
        let _ = self.shared.events.send(LoadEvent::Overdue { number: self.number }).await;
    }

    /// Judges a request that got no response.
    fn without_response(&self, ended: WithoutResponse, record: &mut LoadRecord) {
        let now = self.shared.clock.now();
        let class = self.class();
        let streams = self.planned.stream && self.planned.endpoint.dialect().generates();
        let waiting = Progress::waiting(self.start, true, streams);
        let missed = |reason| judge_refused(Outcome::Missed(reason), &waiting, &class.objectives, &self.case, now);
        let verdict = match ended {
            WithoutResponse::Failed(NoResponse { error, is_client_fault }) => {
                record.error = Some(error);
                record.client_fault = is_client_fault;
                missed(if is_client_fault { Missed::Internal } else { Missed::UpstreamUnavailable })
            }
            WithoutResponse::GivenUp(GiveUp::Limit(TimeoutKind::FirstToken)) => missed(Missed::TimeoutFirstToken),
            WithoutResponse::GivenUp(GiveUp::Limit(_) | GiveUp::Over) => missed(Missed::TimeoutTotal),
            WithoutResponse::GivenUp(GiveUp::Leave) => judge_left(&waiting, &class.objectives, &self.case, now),
        };
        record.judged(&verdict);
    }

    /// Observes the response to its end, and judges it.
    async fn watch(&mut self, response: Response<Incoming>, connection: LoadConnection, record: &mut LoadRecord) {
        let (head, mut body) = response.into_parts();
        let reason = head.headers.get(REASON).and_then(|reason| reason.to_str().ok());
        record.gateway_reason = reason.map(str::to_owned);
        self.case.over_limit = reason == Some(OVER_LIMIT);
        let reader = reader(head.status, &head.headers, self.planned.endpoint);
        let mut seen = self.observer(head.status.as_u16(), reader);
        let idle = self.class().timeouts.idle;
        if reader != ResponseFormat::Events {
            // No token event will come, so the idle limit runs from the head.
            self.limits.first_token = None;
            self.limits.idle = Some(self.shared.clock.now() + idle);
        }
        let ending = loop {
            let frame = tokio::select! {
                biased;
                frame = body.frame() => frame,
                due = self.wait() => match due {
                    Some(GiveUp::Limit(kind)) => break Ending::TimedOut(kind),
                    Some(GiveUp::Leave) => break Ending::Left,
                    Some(GiveUp::Over) => break Ending::Clean,
                    None => {
                        self.report_overdue().await;
                        continue;
                    }
                },
            };
            let now = self.shared.clock.now();
            match frame {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        seen.frame(data, now, &mut |_, _| {});
                    }
                    self.heard(&seen, idle);
                }
                Some(Err(error)) => {
                    record.error = Some(error.to_string());
                    break Ending::Broken;
                }
                None => {
                    self.shared.connections.put_back(connection);
                    return self.judged(seen, Ending::Clean, record);
                }
            }
        };
        self.judged(seen, ending, record);
    }

    fn observer(&self, status: u16, reader: ResponseFormat) -> Observer {
        let objectives = &self.class().objectives;
        let mut expect = ResponseExpectation::stream(self.case.dialect, self.start);
        expect.stream_asked = self.planned.stream;
        if reader == ResponseFormat::Events {
            expect.tokens_per_event = self.shared.ratios.of(None).tokens_per_event(&self.shared.engine);
        }
        let watch = ObserverOptions {
            itl: objectives.itl.map(|objective| objective.threshold),
            stall: objectives.stall,
            ..ObserverOptions::default()
        };
        let mut seen = Observer::new(expect, reader, status, watch);
        seen.knows(&self.shared.templates);
        seen
    }

    /// Bytes came: some limits end, others begin anew.
    fn heard(&mut self, seen: &Observer, idle: Duration) {
        if seen.has_token() {
            self.limits.first_token = None;
            self.limits.overdue = self.class().objectives.e2e.map(|e2e| self.start + e2e.threshold);
        }
        if self.limits.first_token.is_none() {
            self.limits.idle = seen.last_activity().map(|at| at + idle);
        }
        self.limits.over = seen.finished_at().map(|at| at + AFTER_FINISH);
    }

    fn judged(&self, seen: Observer, ending: Ending, record: &mut LoadRecord) {
        let timeline = seen.end(ending, self.shared.clock.now());
        if let Some((events, output)) = timeline.plain_events() {
            let known = self.shared.ratios.of(None);
            if let Some(learned) = self.shared.ratios.of_answer(&known, None, true) {
                learned.events(&self.shared.engine, events, output);
            }
        }
        record.observed(&timeline);
        record.judged(&judge(&timeline, &self.class().objectives, &self.case));
    }
}

/// Why there is no response.
enum WithoutResponse {
    Failed(NoResponse),
    GivenUp(GiveUp),
}

/// How a body is read, by the head of its response: the same choice as the gateway makes.
fn reader(status: StatusCode, headers: &HeaderMap, endpoint: ApiPath) -> ResponseFormat {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let is_events = kind.eq_ignore_ascii_case(b"text/event-stream");
    let is_json = kind.eq_ignore_ascii_case(b"application/json") || kind.to_ascii_lowercase().ends_with(b"+json");
    let coding = headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes);
    if !status.is_success() {
        ResponseFormat::Opaque
    } else if coding.is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity")) {
        ResponseFormat::Coded
    } else if is_events && endpoint.dialect().generates() {
        ResponseFormat::Events
    } else if is_events {
        ResponseFormat::Aside
    } else if endpoint.answers_json() || is_json {
        ResponseFormat::Json
    } else {
        ResponseFormat::Opaque
    }
}
