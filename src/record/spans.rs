//! From a finished request to OpenTelemetry spans (`docs/tracing.md`).
//!
//! One span for the request and one for each attempt below it, with names of the semantic
//! conventions for HTTP and for generative AI where they have one, and `goodput.` where they have
//! none. No content: lengths, times and names only.

use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::{Event, Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};

use super::request_record::{AttemptRecord, RequestRecord};
use super::trace::{RequestTrace, SpanId};
use crate::judge::{Missed, Outcome};
use crate::observe::Timeline;
use crate::types::{ApiPath, Dialect, EngineId, Tick};

/// The span is kept.
const SAMPLED: u32 = 1;
/// It is known whether the parent is in another process.
const HAS_IS_REMOTE: u32 = 1 << 8;
/// It is.
const IS_REMOTE: u32 = 1 << 9;

/// The spans of a request, its own first.
pub(super) fn spans_of(record: &RequestRecord, trace: &RequestTrace) -> Vec<Span> {
    let attempts = record.attempts.iter().enumerate();
    let attempts =
        attempts.filter_map(|(index, attempt)| Some(attempt_span(record, trace, attempt, attempt.span?, index)));
    [request_span(record, trace)].into_iter().chain(attempts).collect()
}

fn request_span(record: &RequestRecord, trace: &RequestTrace) -> Span {
    let context = &trace.context;
    let moment = |at: Tick| unix_nanos(trace, record, at);
    let remote = if context.parent.is_some() { IS_REMOTE } else { 0 };
    let link = context.link.map(|link| Link {
        trace_id: link.trace.0.to_vec(),
        span_id: link.span.0.to_vec(),
        flags: if link.sampled { SAMPLED } else { 0 } | HAS_IS_REMOTE | IS_REMOTE,
        ..Link::default()
    });
    Span {
        trace_id: context.trace.0.to_vec(),
        span_id: context.span.0.to_vec(),
        trace_state: context.state.as_deref().unwrap_or_default().to_owned(),
        parent_span_id: context.parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
        flags: SAMPLED | HAS_IS_REMOTE | remote,
        name: name_of(record, trace),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: moment(record.arrival),
        end_time_unix_nano: moment(record.end),
        attributes: request_attributes(record, trace),
        events: events(record, moment),
        links: link.into_iter().collect(),
        status: Some(status_of(record)),
        ..Span::default()
    }
}

/// `chat llama-3-70b` by the conventions for generative AI, else method and route.
fn name_of(record: &RequestRecord, trace: &RequestTrace) -> String {
    let Some(endpoint) = record.endpoint else { return "HTTP".to_owned() };
    match (operation(endpoint), trace.model.as_deref()) {
        (Some(operation), Some(model)) => format!("{operation} {model}"),
        (Some(operation), None) => operation.to_owned(),
        (None, _) => format!("{} {}", method(endpoint), endpoint.path()),
    }
}

/// Name of the operation in the conventions, if they have one.
fn operation(endpoint: ApiPath) -> Option<&'static str> {
    match (endpoint.dialect(), endpoint.path()) {
        (Dialect::Completions, _) => Some("text_completion"),
        (Dialect::Chat | Dialect::Messages | Dialect::Responses, _) => Some("chat"),
        (_, "/v1/embeddings" | "/v2/embed") => Some("embeddings"),
        _ => None,
    }
}

fn method(endpoint: ApiPath) -> &'static str {
    if endpoint.is_relayed() && !endpoint.is_of_engine() { "POST" } else { "GET" }
}

fn request_attributes(record: &RequestRecord, trace: &RequestTrace) -> Vec<KeyValue> {
    let mut all = Attributes::default();
    if let Some(endpoint) = record.endpoint {
        all.text("http.request.method", method(endpoint));
        all.text("http.route", endpoint.path());
        if let Some(operation) = operation(endpoint) {
            all.text("gen_ai.operation.name", operation);
            gen_ai(record, trace, &mut all);
        }
    }
    all.number("http.response.status_code", u64::from(record.status));
    if let Some(error) = error_of(record) {
        all.text("error.type", error);
    }
    all.text("goodput.request_id", record.request_id.as_str());
    all.maybe("goodput.tenant", record.tenant.as_ref().map(|tenant| tenant.as_str()));
    all.maybe("goodput.class", record.class.as_ref().map(|class| class.as_str()));
    all.maybe("goodput.rule", record.rule.as_deref());
    all.maybe("goodput.pool", record.pool.as_ref().map(|pool| pool.as_str()));
    all.maybe("goodput.engine", record.engine.as_ref().map(EngineId::as_str));
    all.number("goodput.attempts", u64::from(record.attempt_count()));
    all.text("goodput.length", record.length.as_str());
    all.text("goodput.outcome", record.verdict.outcome.as_str());
    let reason = record.verdict.outcome.reason();
    all.maybe("goodput.reason", Some(reason).filter(|reason| !reason.is_empty()));
    all.maybe("goodput.refusal", record.refusal);
    all.seconds("goodput.upload_seconds", record.upload());
    all.seconds("goodput.queue_seconds", record.queue());
    let (answer, whole) = (record.answer(), record.whole_answer());
    all.seconds("goodput.ttft_seconds", answer.and_then(Timeline::ttft));
    all.seconds("goodput.tpot_seconds", whole.and_then(Timeline::tpot));
    all.seconds("goodput.e2e_seconds", whole.and_then(Timeline::e2e));
    all.seconds("goodput.largest_gap_seconds", answer.and_then(|answer| answer.gaps.largest));
    let actions = record.degraded.kinds.iter().map(|kind| kind.as_str());
    all.texts("goodput.degraded", actions.collect());
    all.0
}

/// Attributes of the conventions for generative AI: `max_tokens` and usage as stated. Estimated tokens have names of
/// our own, so that they are not taken for reported ones.
fn gen_ai(record: &RequestRecord, trace: &RequestTrace, all: &mut Attributes) {
    all.maybe("gen_ai.provider.name", trace.provider);
    all.maybe("gen_ai.request.model", trace.model.as_deref());
    if record.streamed {
        all.flag("gen_ai.request.stream");
    }
    if record.choices != 1 {
        all.number("gen_ai.request.choice.count", record.choices);
    }
    if let Some(cap) = record.stated_cap {
        all.number("gen_ai.request.max_tokens", cap.0);
    }
    let Some(answer) = record.answer() else { return };
    let usage = [
        ("gen_ai.usage.input_tokens", answer.usage.input),
        ("gen_ai.usage.output_tokens", answer.usage.output),
        ("gen_ai.usage.cache_read.input_tokens", answer.usage.cached),
        ("gen_ai.usage.reasoning.output_tokens", answer.usage.reasoning),
    ];
    usage.into_iter().for_each(|(key, tokens)| tokens.iter().for_each(|tokens| all.number(key, tokens.0)));
    if let Some((_, output)) = record.tokens() {
        all.number("goodput.output_tokens", output.0);
        all.text("goodput.token_source", answer.source.as_str());
    }
    if answer.streamed {
        all.seconds("gen_ai.response.time_to_first_chunk", answer.ttft());
    }
    if answer.cut_by_length && answer.choices.len() <= 1 {
        all.texts("gen_ai.response.finish_reasons", vec!["length"]);
    }
}

/// Moments on the way: when the request left the queue, its first token, its first visible token if
/// that is another one, its finish.
fn events(record: &RequestRecord, moment: impl Fn(Tick) -> u64) -> Vec<Event> {
    let answer = record.answer();
    let first = answer.and_then(|answer| answer.first_token);
    let visible = answer.and_then(|answer| answer.first_visible).filter(|visible| Some(*visible) != first);
    let finish = record.whole_answer().and_then(|answer| answer.finish);
    let moments =
        [("admitted", record.admitted), ("first_token", first), ("first_visible_token", visible), ("finish", finish)];
    let at = |(name, at): (&str, Option<Tick>)| {
        Some(Event { time_unix_nano: moment(at?), name: name.to_owned(), ..Event::default() })
    };
    moments.into_iter().filter_map(at).collect()
}

/// The reason of a miss that is a failure, and not only late.
fn error_of(record: &RequestRecord) -> Option<&'static str> {
    match record.verdict.outcome {
        Outcome::Missed(Missed::Ttft | Missed::Tpot | Missed::Itl | Missed::E2e | Missed::CanceledLate) => None,
        Outcome::Missed(reason) => Some(reason.as_str()),
        Outcome::Met | Outcome::Excluded(_) => None,
    }
}

fn status_of(record: &RequestRecord) -> Status {
    let code = if error_of(record).is_some() { StatusCode::Error } else { StatusCode::Unset };
    Status { message: record.refusal.unwrap_or_default().to_owned(), code: code.into() }
}

fn attempt_span(
    record: &RequestRecord,
    trace: &RequestTrace,
    attempt: &AttemptRecord,
    span: SpanId,
    index: usize,
) -> Span {
    let context = &trace.context;
    let moment = |at: Tick| unix_nanos(trace, record, at);
    let route = record.endpoint.map_or("HTTP", ApiPath::path);
    let method = record.endpoint.map_or("_OTHER", method);
    let is_last = index + 1 == record.attempts.len();
    let mut all = Attributes::default();
    all.text("http.request.method", method);
    let (host, port) = attempt.engine.as_str().rsplit_once(':').unwrap_or((attempt.engine.as_str(), ""));
    all.text("server.address", host.trim_start_matches('[').trim_end_matches(']'));
    if let Ok(port) = port.parse() {
        all.number("server.port", port);
    }
    if index > 0 {
        all.number("http.request.resend_count", index as u64);
    }
    all.text("goodput.pool", attempt.pool.as_str());
    let relayed = record.timeline.as_ref().filter(|_| is_last).map(|answer| answer.status);
    let status = attempt.failure.and_then(|failure| failure.status).or(relayed);
    if let Some(status) = status {
        all.number("http.response.status_code", u64::from(status));
    }
    let error = match attempt.failure {
        Some(failure) => Some(failure.what),
        None => error_of(record).filter(|_| is_last),
    };
    if let Some(error) = error {
        all.text("error.type", error);
    }
    let code = if error.is_some() { StatusCode::Error } else { StatusCode::Unset };
    Span {
        trace_id: context.trace.0.to_vec(),
        span_id: span.0.to_vec(),
        trace_state: context.state.as_deref().unwrap_or_default().to_owned(),
        parent_span_id: context.span.0.to_vec(),
        flags: SAMPLED | HAS_IS_REMOTE,
        name: format!("{method} {route}"),
        kind: SpanKind::Client.into(),
        start_time_unix_nano: moment(attempt.begin),
        end_time_unix_nano: moment(attempt.failure.map_or(record.end, |failure| failure.at)),
        attributes: all.0,
        status: Some(Status { message: String::new(), code: code.into() }),
        ..Span::default()
    }
}

/// The time of day at a moment of a request: from that of its arrival by the monotonic clock.
fn unix_nanos(trace: &RequestTrace, record: &RequestRecord, at: Tick) -> u64 {
    let later = trace.arrival + at.since(record.arrival);
    u64::try_from(later.as_nanos()).unwrap_or(u64::MAX)
}

/// Attributes in the making.
#[derive(Default)]
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn put(&mut self, key: &str, value: Value) {
        let value = Some(AnyValue { value: Some(value) });
        self.0.push(KeyValue { key: key.to_owned(), value, ..KeyValue::default() });
    }

    fn text(&mut self, key: &str, value: &str) {
        self.put(key, Value::StringValue(value.to_owned()));
    }

    fn maybe(&mut self, key: &str, value: Option<&str>) {
        value.into_iter().for_each(|value| self.text(key, value));
    }

    fn texts(&mut self, key: &str, values: Vec<&str>) {
        if !values.is_empty() {
            let text = |value: &str| AnyValue { value: Some(Value::StringValue(value.to_owned())) };
            self.put(key, Value::ArrayValue(ArrayValue { values: values.into_iter().map(text).collect() }));
        }
    }

    fn number(&mut self, key: &str, value: u64) {
        self.put(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    fn seconds(&mut self, key: &str, value: Option<Duration>) {
        value.into_iter().for_each(|value| self.put(key, Value::DoubleValue(value.as_secs_f64())));
    }

    fn flag(&mut self, key: &str) {
        self.put(key, Value::BoolValue(true));
    }
}
