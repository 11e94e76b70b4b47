//! Traces through the whole gateway: headers for engines, and the protobuf that a collector decodes.

use std::collections::BTreeMap;

use crate::support::scripted_engine::{Script, ScriptedEngine, fixtures::*};
use http::Method;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use serde_json::{Value, json};

use crate::support::*;

const PROTOBUF: &[(&str, &str)] = &[("content-type", "application/x-protobuf")];
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// One token at 100 ms, finished at 140 ms.
fn good() -> Script {
    Script::stream()
        .at(10)
        .say(r())
        .at(100)
        .say(t("a"))
        .at(120)
        .say(t("b"))
        .at(140)
        .say(f("stop"))
        .say(u(9, 2))
        .say(d())
        .end()
}

fn taken() -> Script {
    Script::answer(200, PROTOBUF, ExportTraceServiceResponse::default().encode_to_vec())
}

fn traced(keys: &str) -> Yaml {
    Yaml::default().top(&format!("telemetry: {{otlp: {{endpoint: \"http://collector:4318\"{keys}}}}}"))
}

/// A gateway that exports to this collector, and an engine `e1`.
fn house(yaml: &Yaml, answers: Vec<Script>, collector: Vec<Script>) -> (House, ScriptedEngine, ScriptedEngine) {
    let house = House::new(yaml);
    let engine = house.engine("e1", answers);
    let collector = house.engine("collector", collector);
    (house, engine, collector)
}

fn batches(collector: &ScriptedEngine) -> Vec<ExportTraceServiceRequest> {
    let decode = |body: &[u8]| ExportTraceServiceRequest::decode(body).expect("protobuf");
    collector.log().requests().iter().map(|request| decode(&request.body)).collect()
}

fn spans(collector: &ScriptedEngine) -> Vec<Span> {
    let resources = batches(collector).into_iter().flat_map(|batch| batch.resource_spans);
    resources.flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans).collect()
}

/// As JSON, for comparing.
fn plain(attributes: &[KeyValue]) -> BTreeMap<String, Value> {
    fn in_json(value: AnyValue) -> Value {
        match value {
            AnyValue::StringValue(text) => json!(text),
            AnyValue::IntValue(number) => json!(number),
            AnyValue::DoubleValue(number) => json!(number),
            AnyValue::BoolValue(flag) => json!(flag),
            AnyValue::ArrayValue(all) => all.values.into_iter().filter_map(|one| one.value).map(in_json).collect(),
            other => panic!("{other:?}"),
        }
    }
    let pair = |attribute: &KeyValue| {
        (attribute.key.clone(), in_json(attribute.value.clone().and_then(|any| any.value).expect("a value")))
    };
    attributes.iter().map(pair).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn count(house: &House, result: &str) -> f64 {
    house.page().sum("goodput_spans_total", &[("result", result)])
}

#[tokio::test(start_paused = true)]
async fn a_request_is_a_span_by_the_conventions_with_its_attempt_below_it() {
    let (house, engine, collector) = house(&traced(", ratio: 1"), vec![good()], vec![taken()]);
    let mut body = stream_with_usage();
    body["max_tokens"] = json!(64);
    house.chat(body).await.whole().await;
    house.sleep(ms(1100)).await;
    let spans = spans(&collector);
    let [request, attempt] = &spans[..] else { panic!("{spans:#?}") };

    assert_eq!((request.name.as_str(), request.kind()), ("chat m1", SpanKind::Server));
    assert!(request.parent_span_id.is_empty() && request.trace_id.len() == 16 && request.span_id.len() == 8);
    assert_eq!(request.end_time_unix_nano - request.start_time_unix_nano, 140_000_000);
    let attributes = plain(&request.attributes);
    let id = attributes["goodput.request_id"].as_str().unwrap().to_owned();
    let expected = json!({
        "http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m1",
        "gen_ai.request.stream": true, "gen_ai.request.max_tokens": 64,
        "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.time_to_first_chunk": 0.1,
        "goodput.request_id": id, "goodput.tenant": "anonymous", "goodput.class": "chat", "goodput.rule": "default",
        "goodput.pool": "a", "goodput.engine": "e1:8000", "goodput.attempts": 1, "goodput.length": "short",
        "goodput.outcome": "met", "goodput.output_tokens": 2, "goodput.token_source": "usage",
        "goodput.upload_seconds": 0.0, "goodput.queue_seconds": 0.0, "goodput.ttft_seconds": 0.1,
        "goodput.tpot_seconds": 0.02, "goodput.e2e_seconds": 0.14, "goodput.largest_gap_seconds": 0.02,
    });
    assert_eq!(json!(attributes), expected);
    assert!(id.starts_with("req-"));
    let events: Vec<_> = request
        .events
        .iter()
        .map(|event| (event.name.as_str(), event.time_unix_nano - request.start_time_unix_nano))
        .collect();
    assert_eq!(events, [("admitted", 0), ("first_token", 100_000_000), ("finish", 140_000_000)]);
    assert_eq!(request.status.as_ref().unwrap().code(), StatusCode::Unset);

    assert_eq!((attempt.name.as_str(), attempt.kind()), ("POST /v1/chat/completions", SpanKind::Client));
    assert_eq!((&attempt.trace_id, &attempt.parent_span_id), (&request.trace_id, &request.span_id));
    let expected = json!({
        "http.request.method": "POST", "server.address": "e1", "server.port": 8000, "goodput.pool": "a",
        "http.response.status_code": 200,
    });
    assert_eq!(json!(plain(&attempt.attributes)), expected);
    let told = engine.log().requests()[0].header("traceparent").map(str::to_owned);
    assert_eq!(told, Some(format!("00-{}-{}-01", hex(&request.trace_id), hex(&attempt.span_id))));

    let batch = &batches(&collector)[0].resource_spans[0];
    let resource = plain(&batch.resource.as_ref().unwrap().attributes);
    assert_eq!(
        (&resource["service.name"], &resource["service.version"]),
        (&json!("goodput"), &json!(env!("CARGO_PKG_VERSION")))
    );
    assert_eq!(batch.scope_spans[0].scope.as_ref().unwrap().name, "goodput");
    let sent = &collector.log().requests()[0];
    assert_eq!((sent.method.as_str(), sent.target.as_str()), ("POST", "/v1/traces"));
    assert_eq!(sent.header("content-type"), Some("application/x-protobuf"));
    assert_eq!(count(&house, "exported"), 2.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_attempt_is_a_span_and_each_engine_gets_its_own_context() {
    let yaml = traced(", ratio: 1");
    let fault = Script::new().at(50).reply(500, &[("content-type", "application/json")], "{}");
    let (house, engines) = House::many(&yaml, 2, vec![fault, good()]);
    let collector = house.engine("collector", vec![taken()]);
    let ask = Ask::post(CHAT, stream()).header("traceparent", PARENT).header("tracestate", "a=1,b=2");
    house.send(ask).await.whole().await;
    house.sleep(ms(1100)).await;
    let spans = spans(&collector);
    let [request, first, second] = &spans[..] else { panic!("{spans:#?}") };
    assert_eq!(hex(&request.trace_id), PARENT[3..35]);
    assert_eq!(hex(&request.parent_span_id), PARENT[36..52]);
    assert!(spans.iter().all(|span| span.trace_state == "a=1,b=2" && span.trace_id == request.trace_id));
    let since = |at: u64| (at - request.start_time_unix_nano) / 1_000_000;
    let times = |span: &Span| (since(span.start_time_unix_nano), since(span.end_time_unix_nano));
    assert_eq!((times(first), times(second)), ((0, 50), (50, 190)));
    let (failed, served) = (plain(&first.attributes), plain(&second.attributes));
    assert_eq!((&failed["error.type"], &failed["http.response.status_code"]), (&json!("fault"), &json!(500)));
    assert_eq!(first.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!((served.get("error.type"), &served["http.request.resend_count"]), (None, &json!(1)));
    assert_eq!(plain(&request.attributes)["goodput.attempts"], json!(2));
    let told = |engine: &ScriptedEngine| {
        let request = engine.log().requests().remove(0);
        assert_eq!(request.headers.iter().filter(|(name, _)| name == "traceparent").count(), 1);
        (request.header("traceparent").unwrap().to_owned(), request.header("tracestate").unwrap().to_owned())
    };
    let mut both = [told(&engines[0]), told(&engines[1])];
    both.sort();
    let mut expected =
        [first, second].map(|span| (format!("00-{}-{}-01", &PARENT[3..35], hex(&span.span_id)), "a=1,b=2".to_owned()));
    expected.sort();
    assert_eq!(both, expected);
    house.end().await;
}

/// Regression: the first try's failure stayed on the span although the same engine then answered.
#[tokio::test(start_paused = true)]
async fn an_engine_asked_again_without_injection_is_one_span_that_succeeded() {
    let refuses = Script::new().at(50).reply(400, &[("content-type", "application/json")], "{}");
    let (house, _engine, collector) = house(&traced(", ratio: 1"), vec![refuses, good()], vec![taken()]);
    assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    house.sleep(ms(1100)).await;
    let spans = spans(&collector);
    let [request, attempt] = &spans[..] else { panic!("{spans:#?}") };
    let told = plain(&attempt.attributes);
    assert_eq!((told.get("error.type"), &told["http.response.status_code"]), (None, &json!(200)));
    assert_eq!(attempt.end_time_unix_nano, request.end_time_unix_nano);
    assert_eq!(attempt.end_time_unix_nano - attempt.start_time_unix_nano, 190_000_000);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_miss_is_kept_despite_head_sampling_and_a_met_request_is_not() {
    let slow = Script::stream().at(900).say(r()).say(t("a")).say(f("stop")).say(d()).end();
    let (house, engine, collector) = house(&traced(", ratio: 0"), vec![good(), slow.clone(), slow], vec![taken()]);
    let unsampled = PARENT.replace("-01", "-00");
    house.chat(stream()).await.whole().await;
    house.chat(stream()).await.whole().await;
    house.send(Ask::post(CHAT, stream()).header("traceparent", &unsampled)).await.whole().await;
    house.sleep(ms(1100)).await;
    let spans = spans(&collector);
    let outcomes: Vec<_> =
        spans.iter().filter_map(|span| plain(&span.attributes).get("goodput.reason").cloned()).collect();
    assert_eq!(outcomes, [json!("ttft"), json!("ttft")]);
    assert_eq!(spans.len(), 4);
    assert_eq!(hex(&spans[2].trace_id), PARENT[3..35]);
    assert!(spans.iter().all(|span| span.status.as_ref().unwrap().code() == StatusCode::Unset), "late is no error");
    let told: Vec<_> = engine.log().requests();
    assert!(told.iter().all(|request| request.header("traceparent").unwrap().ends_with("-00")), "decided at the head");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_a_span_with_its_code_and_no_attempt() {
    let yaml = traced(", ratio: 0").with("health: {every: 100ms}");
    let (house, _engine, collector) = house(&yaml, vec![good()], vec![taken()]);
    house.network.refuse("e1");
    house.chat(stream()).await.whole().await;
    house.sleep(ms(1100)).await;
    let spans = spans(&collector);
    let request = plain(&spans[0].attributes);
    assert_eq!(
        (&request["error.type"], &request["goodput.refusal"]),
        (&json!("upstream_unavailable"), &json!("connect_failed"))
    );
    assert_eq!(spans[0].status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(spans[0].status.as_ref().unwrap().message, "connect_failed");
    assert!(spans[1..].iter().all(|attempt| plain(&attempt.attributes)["error.type"] == json!("connect_failed")));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_not_followed_gets_a_new_trace_with_a_link() {
    let (house, engine, collector) = house(&traced(", ratio: 1, follow_parent: false"), vec![good()], vec![taken()]);
    let ask = Ask::post(CHAT, stream()).header("traceparent", PARENT).header("tracestate", "a=1");
    house.send(ask).await.whole().await;
    house.sleep(ms(1100)).await;
    let request = &spans(&collector)[0];
    assert_ne!(hex(&request.trace_id), PARENT[3..35]);
    assert!(request.parent_span_id.is_empty() && request.trace_state.is_empty());
    assert_eq!(hex(&request.links[0].trace_id), PARENT[3..35]);
    assert_eq!(engine.log().requests()[0].header("tracestate"), None);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn two_traceparents_are_ignored() {
    let (house, engine, _collector) = house(&traced(""), vec![good()], vec![taken()]);
    let ask = Ask::post(CHAT, stream()).header("traceparent", PARENT).header("traceparent", PARENT);
    house.send(ask).await.whole().await;
    let told = engine.log().requests()[0].header("traceparent").unwrap().to_owned();
    assert_ne!(told[3..35], PARENT[3..35]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_collector_the_trace_context_of_a_client_passes_as_it_came() {
    let (house, engine) = House::playing(good());
    let ask = Ask::post(CHAT, stream()).header("traceparent", "not one at all").header("tracestate", "a=1");
    house.send(ask).await.whole().await;
    house.chat(stream()).await.whole().await;
    let told: Vec<_> = engine
        .log()
        .requests()
        .iter()
        .map(|request| ["traceparent", "tracestate"].map(|name| request.header(name).map(str::to_owned)))
        .collect();
    assert_eq!(told, [[Some("not one at all".to_owned()), Some("a=1".to_owned())], [None, None]]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn local_replies_have_no_span() {
    let (house, _engine, collector) = house(&traced(", ratio: 1"), vec![good()], vec![taken()]);
    for path in ["/health", "/v1/models"] {
        house.send(Ask::of(Method::GET, path).header("traceparent", PARENT)).await.whole().await;
    }
    house.sleep(ms(5000)).await;
    assert!(collector.log().requests().is_empty());
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_is_down_costs_spans_and_nothing_else_and_is_used_again() {
    let (house, _engine, _) = house(&traced(", ratio: 1"), vec![good()], vec![taken()]);
    house.network.refuse("collector");
    house.chat(stream()).await.whole().await;
    // Five tries, with pauses of 1, 2, 4 and 8 seconds, plus or minus a fifth.
    house.sleep(ms(10_000)).await;
    assert_eq!(count(&house, "export_failed"), 0.0);
    house.sleep(ms(10_000)).await;
    assert_eq!((count(&house, "export_failed"), house.network.dials("collector")), (2.0, 5));
    let collector = house.engine("collector", vec![taken()]);
    for _ in 0..2 {
        house.chat(stream()).await.whole().await;
        house.sleep(ms(1100)).await;
    }
    assert_eq!((count(&house, "exported"), spans(&collector).len()), (4.0, 4));
    assert_eq!(collector.log().connections().len(), 1, "one connection is enough");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_asks_for_a_pause_gets_it_and_one_that_refuses_is_not_asked_again() {
    let busy = Script::answer(503, &[("retry-after", "20")], "");
    let scripts = vec![busy, taken(), Script::answer(400, &[], ""), taken()];
    let (house, _engine, collector) = house(&traced(", ratio: 1"), vec![good()], scripts);
    house.chat(stream()).await.whole().await;
    house.sleep(ms(40_000)).await;
    let at: Vec<_> = collector.log().requests().iter().map(|request| request.head_at).collect();
    let pause = at[1].since(at[0]);
    assert!(pause >= ms(16_000) && pause <= ms(24_100), "{pause:?}");
    assert_eq!((count(&house, "exported"), count(&house, "export_failed")), (2.0, 0.0));
    house.chat(stream()).await.whole().await;
    house.sleep(ms(40_000)).await;
    assert_eq!((collector.log().requests().len(), count(&house, "export_failed")), (3, 2.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_collector_is_given_up_on_after_ten_seconds() {
    let (house, _engine, collector) =
        house(&traced(", ratio: 1"), vec![good()], vec![Script::new().silence(), taken()]);
    house.chat(stream()).await.whole().await;
    house.sleep(ms(11_000)).await;
    assert_eq!(count(&house, "exported"), 0.0);
    house.sleep(ms(3_000)).await;
    assert_eq!((count(&house, "exported"), collector.log().requests().len()), (2.0, 2));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_the_collector_closed_meanwhile_costs_nothing() {
    let answer = |body: Vec<u8>| Script::answer(200, &[("connection", "close")], body);
    let taken = || answer(ExportTraceServiceResponse::default().encode_to_vec());
    let (house, _engine, collector) = house(&traced(", ratio: 1"), vec![good()], vec![taken(), taken()]);
    for _ in 0..2 {
        house.chat(stream()).await.whole().await;
        house.sleep(ms(1100)).await;
    }
    assert_eq!((count(&house, "exported"), collector.log().connections().len()), (4.0, 2));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn spans_that_a_collector_rejects_are_counted() {
    let partial = ExportTracePartialSuccess { rejected_spans: 1, error_message: "too old".to_owned() };
    let answer = ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec();
    let (house, _engine, _collector) =
        house(&traced(", ratio: 1"), vec![good()], vec![Script::answer(200, PROTOBUF, answer)]);
    house.chat(stream()).await.whole().await;
    house.sleep(ms(1100)).await;
    assert_eq!((count(&house, "exported"), count(&house, "rejected")), (1.0, 1.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_that_end_together_are_one_batch() {
    let (house, _engine, collector) = house(&traced(", ratio: 1"), vec![good()], vec![taken()]);
    for _ in 0..5 {
        house.chat(stream()).await.whole().await;
    }
    house.sleep(ms(1100)).await;
    assert_eq!((batches(&collector).len(), spans(&collector).len()), (1, 10));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_bucket_of_ttft_leads_to_a_trace_in_openmetrics_only() {
    let slow = Script::stream().at(900).say(r()).say(t("a")).say(f("stop")).say(d()).end();
    let (house, _engine, collector) = house(&traced(", ratio: 0"), vec![good(), slow], vec![taken()]);
    house.chat(stream()).await.whole().await;
    house.chat(stream()).await.whole().await;
    house.sleep(ms(1100)).await;
    let request = &spans(&collector)[0];
    let labels = format!("# {{trace_id=\"{}\",span_id=\"{}\"}} 0.9 ", hex(&request.trace_id), hex(&request.span_id));
    let open = house.open_page();
    let led: Vec<_> = open.lines().filter(|line| line.contains(" # {")).collect();
    assert_eq!(led.len(), 2, "{led:#?}");
    for (line, name) in led.iter().zip(["goodput_time_to_first_token_seconds_bucket", "goodput_e2e_seconds_bucket"]) {
        assert!(line.starts_with(name) && line.contains(&labels) && line.contains("le=\"1"), "{line}");
    }
    let page = house.page();
    assert!(!page.text.contains("trace_id"));
    assert_eq!(page.sum("goodput_time_to_first_token_seconds_count", &[]), 2.0);
    assert_eq!(page.sum("goodput_time_to_first_token_seconds_bucket", &[("le", "0.5")]), 1.0);
    house.end().await;
}
