//! Heads, bodies and framing in both directions (`docs/cases.md`).

use crate::support::scripted_engine::{Script, event, fixtures::*};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::StreamBody;
use serde_json::{Value, json};

use crate::support::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn good() -> Script {
    Script::stream().at(10).say(r()).say(t("a")).say(f("stop")).say(u(5, 1)).say(d()).end()
}

fn whole_answer() -> Script {
    Script::json(200, whole("x", 5, 1))
}

/// A request body in frames, each after a pause.
pub fn slow_body(
    house: &House,
    frames: Vec<(u64, Bytes)>,
) -> StreamBody<impl futures_util::Stream<Item = Result<http_body::Frame<Bytes>, std::io::Error>> + use<>> {
    let clock = house.clock;
    let frames = futures_util::stream::unfold(frames.into_iter(), move |mut left| async move {
        let (pause, bytes) = left.next()?;
        clock.sleep_until(Some(clock.now() + ms(pause))).await;
        Some((Ok(http_body::Frame::data(bytes)), left))
    });
    StreamBody::new(frames)
}

// --- sizes and uploads ---

#[tokio::test(start_paused = true)]
async fn c56_a_large_body_passes_whole_and_one_above_the_limit_does_not() {
    let image = "A".repeat(3 << 20);
    let body = |url: &str| json!({"model": "m1", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]});
    let (house, engine) = House::playing(whole_answer());
    let sent = body(&image);
    assert_eq!(house.chat(sent.clone()).await.whole().await.status, 200);
    assert_eq!(engine.log().requests()[0].body, sent.to_string());
    assert_eq!(house.line().await.text("length"), "short", "images are no prompt");
    house.end().await;

    let yaml = Yaml::default().top("listen: {max_body: 1KiB}");
    for (length, status) in [(1024, 200), (1025, 413)] {
        let (house, engine) = House::playing_with(&yaml, whole_answer());
        let text = format!("{{\"model\":\"m1\",\"user\":\"{}\"}}", "u".repeat(length - 24));
        assert_eq!(text.len(), length);
        let answer = house.send(Ask::raw(CHAT, text)).await.whole().await;
        assert_eq!(answer.status.as_u16(), status);
        let line = house.line().await;
        if status == 413 {
            assert_eq!(answer.json()["error"]["code"], "body_too_large");
            assert_eq!((line.verdict(), line.text("class")), ("excluded(invalid_request)".into(), "-"));
            assert!(engine.log().requests().is_empty());
        }
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c56_a_stated_length_above_the_limit_is_refused_before_it_is_read() {
    let (house, _engine) = House::playing(whole_answer());
    let mut client = house.connect(4096);
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 999999999999\r\n\r\n{").await;
    let (answer, when) = client.read_until("body_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("connection: close"));
    assert_eq!(when, at(0));
    assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c56_an_unstated_length_is_refused_where_the_limit_is_passed() {
    let (house, engine) = House::playing_with(&Yaml::default().top("listen: {max_body: 1KiB}"), whole_answer());
    let frames = (0..100).map(|_| (10, Bytes::from(" ".repeat(100)))).collect();
    let request = Request::post(CHAT).header("host", "g").body(slow_body(&house, frames)).unwrap();
    let answer = house.send_body(request).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at), (413, at(110)));
    assert!(engine.log().requests().is_empty());
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn upload_time_is_exported_and_part_of_ttft_only_if_the_class_counts_it() {
    let (house, engine) = House::playing_with(&Yaml::default().class("upload: counted"), good());
    let text = stream().to_string();
    let halves = text.split_at(20);
    let frames = vec![(100, Bytes::from(halves.0.to_owned())), (200, Bytes::from(halves.1.to_owned()))];
    let request = Request::post(CHAT).header("host", "g").body(slow_body(&house, frames)).unwrap();
    house.send_body(request).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.number("upload_ms"), line.number("queue_ms"), line.ttft()), (Some(300.0), Some(0.0), Some(310.0)));
    let sent = &engine.log().requests()[0];
    assert_eq!(sent.header("content-length"), Some(sent.body.len().to_string().as_str()), "framed anew");
    assert_eq!(sent.header("transfer-encoding"), None);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_takes_too_long_is_a_408() {
    let yaml = Yaml::default().top("listen: {body_timeout: 2s}");
    let (house, engine) = House::playing_with(&yaml, good());
    let frames = (0..100).map(|_| (300, Bytes::from_static(b" "))).collect();
    let request = Request::post(CHAT).header("host", "g").body(slow_body(&house, frames)).unwrap();
    let answer = house.send_body(request).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at), (408, at(2000)));
    assert_eq!(answer.header("x-goodput-reason"), Some("body_timeout"));
    assert_eq!(house.line().await.verdict(), "excluded(slow_upload)");
    assert!(engine.log().requests().is_empty());
    house.end().await;
}

// --- codings ---

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test(start_paused = true)]
async fn c58_an_unrequested_content_coding_passes_unchanged_and_is_unparseable() {
    let coded = gzip(event(&t("a")).as_bytes());
    let headers = [("content-type", "text/event-stream"), ("content-encoding", "gzip")];
    let script = Script::new().open_with(200, &headers).at(100).put(coded.clone()).at(200).put(coded.clone()).end();
    let (house, engine) = House::playing(script);
    let ask = Ask::post(CHAT, stream()).header("accept-encoding", "gzip, br");
    let answer = house.send(ask).await.whole().await;
    assert_eq!(engine.log().requests()[0].header("accept-encoding"), Some("identity"));
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(answer.bytes(), [coded.clone(), coded].concat());
    assert_eq!(house.line().await.verdict(), "missed(unparseable)");
    // Injection is switched off for that engine.
    house.chat(stream()).await.whole().await;
    let sent: Vec<Value> = engine.log().requests().iter().map(|request| request.json()).collect();
    assert!(!sent[0]["stream_options"].is_null() && sent[1]["stream_options"].is_null());
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_compressed_request_is_decoded_and_forwarded_as_identity() {
    let text = stream().to_string();
    let zstd = zstd::encode_all(text.as_bytes(), 3).unwrap();
    for (coding, body) in [
        ("gzip", gzip(text.as_bytes())),
        ("x-gzip", gzip(text.as_bytes())),
        ("zstd", zstd),
        ("identity", text.clone().into_bytes()),
    ] {
        let yaml = Yaml::default().with("inject: {usage: false}");
        let (house, engine) = House::playing_with(&yaml, good());
        let answer = house.send(Ask::raw(CHAT, body).header("content-encoding", coding)).await.whole().await;
        assert_eq!(answer.status, 200, "{coding}");
        let sent = &engine.log().requests()[0];
        assert_eq!(sent.body, text);
        assert_eq!(sent.header("content-length"), Some(text.len().to_string().as_str()));
        assert!(sent.header("content-encoding").is_none_or(|coding| coding == "identity"));
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_compressed_request_that_cannot_be_decoded_is_refused() {
    let text = stream().to_string();
    let bomb = gzip(&vec![b' '; 4 << 20]);
    let broken = gzip(text.as_bytes())[..20].to_vec();
    for (coding, body, status, code) in [
        ("br", text.clone().into_bytes(), 415, "unsupported_coding"),
        ("gzip, gzip", gzip(&gzip(text.as_bytes())), 415, "unsupported_coding"),
        ("gzip", text.into_bytes(), 400, "undecodable_body"),
        ("gzip", broken, 400, "undecodable_body"),
        ("gzip", bomb, 413, "decoded_too_large"),
    ] {
        let (house, engine) = House::playing_with(&Yaml::default().top("listen: {max_body: 1MiB}"), good());
        let answer = house.send(Ask::raw(CHAT, body).header("content-encoding", coding)).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (status, Some(code)));
        assert!(engine.log().requests().is_empty());
        assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_closes_in_time_after_any_number_of_requests() {
    let ask = "GET /health HTTP/1.1\r\nhost: g\r\n\r\n";
    for (rest, limit) in [("GET /health HTTP/1.1\r\nho", 10), ("", 63)] {
        // Somewhere among these the task has just used up its share of a turn.
        for count in 100..140 {
            let house = House::new(&Yaml::default().top("listen: {idle_timeout: 60s}"));
            let mut client = house.connect(64 << 10);
            client.send(ask.repeat(count) + rest).await;
            let given_up = tokio::time::timeout(ms(100_000), client.read_to_end()).await;
            let (answers, when) = given_up.unwrap_or_else(|_| panic!("{count} requests and {rest:?}: it stays open"));
            assert_eq!(answers.windows(9).filter(|part| part == b"HTTP/1.1 ").count(), count);
            assert!(when <= at(1000 * limit), "{count} requests and {rest:?}: {when:?}");
            house.lines(count).await;
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn bodies_stay_within_their_memory_limit_and_small_ones_continue() {
    let yaml = Yaml::default().top("listen: {max_body: 1MiB, max_bodies: 1MiB}");
    let (house, engine) = House::playing_with(&yaml, Script::new().at(300).reply(200, JSON, whole("x", 1, 1)));
    let of = |length: usize| {
        let text = format!("{{\"model\":\"m1\",\"user\":\"{}\"}}", "u".repeat(length));
        house.send(Ask::raw(CHAT, text))
    };
    let status = |answer: &Whole| (answer.status.as_u16(), answer.header("x-goodput-reason").map(str::to_owned));
    let first = async { status(&of(700 << 10).await.whole().await) };
    let others = async {
        house.sleep(ms(100)).await;
        (status(&of(500 << 10).await.whole().await), status(&of(60 << 10).await.whole().await))
    };
    let (first, (large, small)) = tokio::join!(first, others);
    assert_eq!((first.0, large, small.0), (200, (503, Some("bodies_full".into())), 200));
    assert_eq!(status(&of(1000 << 10).await.whole().await).0, 200, "what was held is given back");
    assert_eq!(engine.log().requests().len(), 3);
    let mut verdicts: Vec<String> = house.lines(4).await.iter().map(Line::verdict).collect();
    verdicts.sort();
    assert_eq!(verdicts, ["met", "met", "met", "missed(shed)"]);
    house.end().await;
}

// --- header fields ---

#[tokio::test(start_paused = true)]
async fn c60_an_event_stream_is_marked_against_buffering() {
    let cases: [(Fields, &str, &str); 2] = [
        (&[("content-type", "Text/Event-Stream; Charset=UTF-8")], "no", "no-cache, no-transform"),
        (
            &[("content-type", "text/event-stream"), ("x-accel-buffering", "yes"), ("cache-control", "private")],
            "yes",
            "private",
        ),
    ];
    for (headers, buffering, cache) in cases {
        let script = Script::new().open_with(200, headers).at(300).say(t("a")).say(f("stop")).say(d()).end();
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.header("x-accel-buffering"), Some(buffering));
        assert_eq!(answer.header("cache-control"), Some(cache));
        assert_eq!(answer.header("content-type"), Some(headers[0].1), "as the engine wrote it");
        assert_eq!(answer.moments(), [300]);
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(300.0)));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c61_hop_by_hop_headers_are_removed_in_both_directions() {
    let headers = [
        ("content-type", "application/json"),
        ("connection", "x-hop, keep-alive"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("x-other", "stays"),
    ];
    let (house, engine) = House::playing(Script::answer(200, &headers, whole("x", 1, 1)));
    let ask = Ask::post(CHAT, unary())
        .header("connection", "X-Secret-Hop, close")
        .header("x-secret-hop", "1")
        .header("te", "trailers")
        .header("trailer", "x-end")
        .header("proxy-authorization", "Basic x")
        .header("keep-alive", "timeout=5")
        .header("authorization", "Bearer sk-client")
        .header("x-api-key", "sk-client")
        .header("cookie", "a=b")
        .header("x-vllm-priority", "-100")
        .header("x-custom", "stays");
    let answer = house.send(ask).await.whole().await;
    let sent = &engine.log().requests()[0];
    let mut names: Vec<String> = sent.headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    names.sort();
    assert_eq!(names, ["accept-encoding", "content-length", "content-type", "host", "via", "x-custom", "x-request-id"]);
    assert_eq!(sent.header("host"), Some("e1:8000"));
    for gone in ["connection", "x-hop", "keep-alive", "proxy-authenticate", "te", "upgrade"] {
        assert_eq!(answer.header(gone), None, "{gone}");
    }
    assert_eq!(answer.header("x-other"), Some("stays"));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c61_two_lengths_or_a_length_beside_chunks_have_one_reading() {
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n";
    let body = unary().to_string();
    let (house, engine) = House::playing(whole_answer());
    let mut client = house.connect(64 * 1024);
    client.send(format!("{post}content-length: {}\r\ncontent-length: 5\r\n\r\n{body}", body.len())).await;
    let (answer, _) = client.read_to_end().await;
    assert!(answer.starts_with(b"HTTP/1.1 400 "));

    let mut client = house.connect(64 * 1024);
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    client.send(format!("{post}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n{chunked}")).await;
    let (answer, _) = client.read_to_end().await;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("connection: close"), "{answer}");
    assert_eq!(engine.log().requests().len(), 0);

    let mut client = house.connect(64 * 1024);
    client.send(format!("{post}transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n")).await;
    let (answer, _) = client.read_to_end().await;
    assert!(answer.starts_with(b"HTTP/1.1 501 "));
    drop(client);
    house.end().await;
}

/// A client's claims about its origin do not reach an engine; the address seen by the gateway does.
#[tokio::test(start_paused = true)]
async fn c100_an_engine_gets_the_address_that_the_gateway_saw() {
    let (house, engine) = House::playing(whole_answer());
    for (address, shown) in
        [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.8", "192.0.2.8"), ("2001:db8::1", "2001:db8::1")]
    {
        let mut client = house.connect_from(address, 64 * 1024);
        let body = unary().to_string();
        let claims = "x-forwarded-for: 10.9.9.9\r\nX_Forwarded_For: 10.9.9.9\r\nforwarded: for=10.9.9.9\r\nvia: 1.1 evil\r\nx-real-ip: 10.9.9.9\r\nx-slo-ttft-ms: 1\r\n";
        client
            .send(format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\n{claims}content-length: {}\r\n\r\n{body}", body.len()))
            .await;
        client.read_until("200 OK").await;
        let seen = engine.log().requests().last().cloned().unwrap();
        assert_eq!((seen.header("x-forwarded-for"), seen.header("via")), (Some(shown), Some("1.1 goodput")));
        for name in ["x_forwarded_for", "forwarded", "x-real-ip", "x-slo-ttft-ms"] {
            assert_eq!(seen.header(name), None, "{name}");
        }
    }
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c103_only_valid_trailers_may_follow_the_last_chunk() {
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n";
    let body = unary().to_string();
    let (house, engine) = House::playing(whole_answer());
    for trailers in ["POST /evil HTTP/1.1\r\nHost: x\r\n", "a: \0\r\n", "a: b\r\n c\r\n", "no colon\r\n"] {
        let mut client = house.connect(64 * 1024);
        client
            .send(format!("{post}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n{trailers}\r\n", body.len()))
            .await;
        let answer = String::from_utf8(client.read_to_end().await.0).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("connection: close"), "{trailers:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
    assert_eq!(engine.log().requests().len(), 0);
    house.end().await;
}

/// One rule for both versions: what never became a request counts as a bad head, and nowhere else.
#[tokio::test(start_paused = true)]
async fn c111_a_refused_head_counts_once_over_http1_and_http2() {
    let (house, engine) = House::playing(whole_answer());
    let bad_heads = |reason: &str| house.page().sum("goodput_bad_heads_total", &[("reason", reason)]);
    let request_line = "POST /v1/chat/completions HTTP/1.1\r\n";
    let many = format!("host: g\r\n{}", "x-a: b\r\n".repeat(101));
    let long = format!("host: g\r\nx-a: {}\r\n", "b".repeat(70_000));
    for (lines, status, reason) in [
        (many.as_str(), 431, "too_many_lines"),
        (&long, 431, "too_large"),
        ("host: g\r\nno colon\r\n", 400, "malformed"),
        ("host: g\r\ncontent-length: x\r\n", 400, "content_length"),
        ("host: g\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n", 400, "two_framings"),
        ("host: g\r\ntransfer-encoding: gzip\r\n", 501, "transfer_coding"),
        ("x-a: b\r\n", 400, "host"),
        ("host: g\r\nexpect: 200-ok\r\n", 400, "expectation"),
    ] {
        let mut client = house.connect(256 * 1024);
        client.send(format!("{request_line}{lines}\r\n")).await;
        let answer = String::from_utf8(client.read_to_end().await.0).unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains("x-goodput-reason: bad_head"),
            "{answer}"
        );
        assert_eq!(bad_heads(reason), 1.0, "{reason}");
    }
    let mut client = house.connect(256 * 1024);
    client.send(format!("POST {CHAT}#x HTTP/1.1\r\nhost: g\r\n\r\n")).await;
    assert!(client.read_to_end().await.0.starts_with(b"HTTP/1.1 400 "));
    assert_eq!(bad_heads("target"), 1.0);
    let mut sender = house.connect_h2().await;
    let lines = |count: usize, length: usize| {
        let mut request = h2_post(CHAT, &unary());
        for _ in 0..count {
            request.headers_mut().append("x-a", "b".repeat(length).parse().unwrap());
        }
        request
    };
    for (request, reason) in
        [(lines(101, 1), "too_many_lines"), (lines(1, 70_000), "too_large"), (lines(60, 1100), "too_large")]
    {
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["x-goodput-reason"]),
            (431, &"bad_head".parse().unwrap())
        );
        assert!(bad_heads(reason) >= 2.0, "{reason}");
    }
    let page = house.page();
    assert_eq!(page.sum("goodput_bad_heads_total", &[]), 12.0);
    for name in ["goodput_requests_finished_total", "goodput_slo_excluded_total", "goodput_refused_total"] {
        assert_eq!(page.sum(name, &[]), 0.0, "{name}");
    }
    assert_eq!(engine.log().requests().len(), 0);
    drop(sender);
    house.end().await;
}

/// Of HTTP/2 what ends the whole connection is heard of: heads that cannot be decoded, frames that are none.
#[tokio::test(start_paused = true)]
async fn c111_a_connection_of_http2_that_breaks_the_protocol_counts_once() {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    let headers = |stream: u8, block: &[u8]| [&[0, 0, block.len() as u8, 1, 5, 0, 0, 0, stream], block].concat();
    let breaks: [(&str, Vec<u8>); 4] = [
        ("a block that cannot be decoded", headers(1, &[0x80])),
        ("a stream that a client may not begin", headers(2, &[0x82])),
        ("a frame too long", [&[0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 1][..], &[0; 64]].concat()),
        ("HTTP/1 behind the preface", b"GET / HTTP/1.1\r\nhost: g\r\n\r\n".to_vec()),
    ];
    let (house, engine) = House::playing(whole_answer());
    for (count, (what, bytes)) in (1..).zip(breaks) {
        let mut client = house.connect(64 * 1024);
        client.send([PREFACE, SETTINGS, &bytes].concat()).await;
        client.read_to_end().await;
        drop(client);
        house.sleep(ms(100)).await;
        let page = house.page();
        assert_eq!(page.sum("goodput_bad_heads_total", &[("reason", "malformed")]), f64::from(count), "{what}");
        assert_eq!(page.sum("goodput_requests_finished_total", &[]), 0.0, "{what}");
    }
    // A client that leaves, or says goodbye, violates nothing.
    for bytes in [[PREFACE, SETTINGS].concat(), [PREFACE, SETTINGS, &[0, 0, 8, 7, 0, 0, 0, 0, 0], &[0; 8]].concat()] {
        let mut client = house.connect(64 * 1024);
        client.send(bytes).await;
        drop(client);
        house.sleep(ms(100)).await;
    }
    assert_eq!(house.page().sum("goodput_bad_heads_total", &[]), 4.0);
    assert_eq!(engine.log().requests().len(), 0);
    house.end().await;
}

/// What the library resets of its own accord, or answers with a bare 431, never reaches the service.
#[tokio::test(start_paused = true)]
async fn c111_a_stream_refused_by_the_http2_library_counts_once_and_its_neighbours_are_served() {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    const POST: &[u8] = b"\x83\x86\x41\x01g\x04\x14/v1/chat/completions";
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = &(payload.len() as u32).to_be_bytes()[1..];
        [length, &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let field = |name: &str, value: &str| {
        assert!(name.len() < 127 && value.len() < 127);
        [&[0, name.len() as u8][..], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    let (house, engine) = House::playing(whole_answer());
    let bad_heads = |reason: &str| house.page().sum("goodput_bad_heads_total", &[("reason", reason)]);
    let mut client = house.connect(1024 * 1024);
    client.send([PREFACE, SETTINGS].concat()).await;
    // Two refused heads, a request that is served, two more, in one write.
    let mut burst = Vec::new();
    for (stream, extra) in [
        (1, field("connection", "close")),
        (3, field("te", "gzip")),
        (5, Vec::new()),
        (7, b"\x82".to_vec()),
        (9, field("transfer-encoding", "chunked")),
    ] {
        burst.extend(frame(1, 4, stream, &[POST, &extra].concat()));
        if extra.is_empty() {
            burst.extend(frame(0, 1, stream, unary().to_string().as_bytes()));
        }
    }
    client.send(burst).await;
    assert_eq!(house.line().await.verdict(), "met");
    assert_eq!(bad_heads("malformed"), 4.0);
    // A list beyond what the library takes, among others that are served.
    let huge = (0..3000).flat_map(|at| field(&format!("x-{at}"), &"b".repeat(100))).collect::<Vec<u8>>();
    let mut parts = huge.chunks(16_000).peekable();
    let mut burst = frame(1, 1, 11, POST);
    while let Some(part) = parts.next() {
        burst.extend(frame(9, if parts.peek().is_none() { 4 } else { 0 }, 11, part));
    }
    burst.extend(frame(1, 4, 13, POST));
    burst.extend(frame(0, 1, 13, unary().to_string().as_bytes()));
    client.send(burst).await;
    assert_eq!(house.lines(2).await[1].verdict(), "met");
    // A reset that a stream earned by its body is no refused head, whether the service knew of the stream or not.
    let body_of_one_byte = [POST, &field("content-length", "1")].concat();
    client.send([frame(1, 4, 15, &body_of_one_byte), frame(0, 1, 15, b"{}")].concat()).await;
    client.send(frame(1, 4, 17, &body_of_one_byte)).await;
    house.sleep(ms(100)).await;
    client.send(frame(0, 1, 17, b"{}")).await;
    house.sleep(ms(100)).await;
    drop(client);
    let verdicts: Vec<String> = house.lines(4).await.iter().map(Line::verdict).collect();
    assert_eq!(verdicts, ["met", "met", "excluded(client_cancel)", "excluded(client_cancel)"]);
    assert_eq!((bad_heads("malformed"), bad_heads("too_large")), (4.0, 1.0));
    assert_eq!(engine.log().requests().len(), 2);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_body_framed_by_its_close_or_in_chunks_reaches_the_client() {
    let body = whole("x", 1, 1);
    let by_close = Script::new().open_until_close(200, JSON).put(body.clone()).close();
    let chunked = Script::new().open_with(200, JSON).put(body[..20].to_owned()).put(body[20..].to_owned()).end();
    let old = Script::new().write(format!("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{body}")).close();
    for script in [by_close, chunked, old] {
        let (house, _engine) = House::playing(script);
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!((answer.text(), answer.is_cut), (body.clone(), false));
        assert_eq!(house.line().await.verdict(), "met");
        house.end().await;
    }
}

// --- edits ---

#[tokio::test(start_paused = true)]
async fn c62_the_length_fits_the_body_after_an_edit() {
    let text = r#"{"model":"m1","stream":true}"#;
    for chunked in [false, true] {
        let (house, engine) = House::playing(good());
        if chunked {
            let mut client = house.connect(64 * 1024);
            let chunks = format!("5\r\n{}\r\n{:x}\r\n{}\r\n0\r\n\r\n", &text[..5], text.len() - 5, &text[5..]);
            client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n").await;
            client.send(chunks).await;
            client.read_until("[DONE]").await;
        } else {
            house.send(Ask::raw(CHAT, text)).await.whole().await;
        }
        let sent = &engine.log().requests()[0];
        assert_eq!(sent.header("content-length"), Some(sent.body.len().to_string().as_str()));
        assert_eq!(sent.json(), json!({"model": "m1", "stream": true, "stream_options": {"include_usage": true}}));
        assert_eq!(sent.raw_body, sent.body);
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c63_everything_but_the_insertion_is_unchanged() {
    let text = concat!(
        r#"{ "seed":123456789012345678901234567890, "temperature":1e2,"top_p" : 1.10, "x":-0,"#,
        r#""zeta":1,"zeta":2,"alpha":{"b":1,"a":2},"text":"\u00e9\/","stream":true,"model":"m1","#,
        r#""stream_options":{"continuous_usage_stats":true} ,"messages":[] }"#
    );
    let (house, engine) = House::playing(good());
    house.send(Ask::raw(CHAT, text)).await.whole().await;
    let sent = String::from_utf8(engine.log().requests()[0].body.to_vec()).unwrap();
    let insertions = [r#""include_usage":true,"#, r#","include_usage":true"#];
    let without: Vec<String> = insertions.iter().map(|piece| sent.replacen(piece, "", 1)).collect();
    assert!(without.iter().any(|bare| bare == text), "{sent}");
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c63_valid_json_beyond_usual_ranges_is_relayed() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for odd in [r#""\ud83d""#, "1e400", deep.as_str()] {
        let text = format!(r#"{{"model":"m1","stream":true,"messages":[{{"role":"user","content":{odd}}}]}}"#);
        let (house, engine) = House::playing(good());
        let answer = house.send(Ask::raw(CHAT, text.clone())).await.whole().await;
        assert_eq!(answer.status, 200, "{odd}");
        let sent = String::from_utf8(engine.log().requests()[0].body.to_vec()).unwrap();
        assert!(sent.contains(odd));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.text("class")), ("met".into(), "chat"));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c63_a_lone_surrogate_in_a_token_does_not_stop_the_stream() {
    let odd = t("x").replace(r#""x""#, r#""\ud83d""#);
    let script = Script::stream().at(100).say(odd.clone()).at(120).say(t("b")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.text().starts_with(&event(&odd)));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens().1), ("met".into(), Some(100.0), Some(2)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c64_an_engines_url_with_or_without_slash_or_v1() {
    for (url, target) in [
        ("http://e1:8000", "/v1/chat/completions"),
        ("http://e1:8000/", "/v1/chat/completions"),
        ("http://e1:8000/v1", "/v1/chat/completions"),
        ("http://e1:8000/v1/", "/v1/chat/completions"),
        ("http://e1:8000/base", "/base/v1/chat/completions"),
    ] {
        let (house, engine) = House::playing_with(&Yaml::default().engines_of_first(&[url]), whole_answer());
        house.chat(unary()).await.whole().await;
        assert_eq!(engine.log().requests()[0].target, target, "{url}");
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c64_a_final_slash_is_nothing_and_the_query_stays_as_it_is() {
    for (sent, seen) in [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions?a=%2F&b=%20+&c=d%2Fe", "/v1/chat/completions?a=%2F&b=%20+&c=d%2Fe"),
        ("/v1/chat/completions/?q", "/v1/chat/completions?q"),
        ("/v1/chat/completions?", "/v1/chat/completions?"),
    ] {
        let (house, engine) = House::playing(whole_answer());
        assert_eq!(house.post(sent, unary()).await.whole().await.status, 200);
        assert_eq!(engine.log().requests()[0].target, seen);
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c64_no_spelling_of_a_path_reaches_another_one() {
    let (house, engine) = House::playing(whole_answer());
    for path in [
        "/v1/models/../chat/completions",
        "/v1/%2e%2e/v1/chat/completions",
        "/v1/chat%2Fcompletions",
        "//v1/chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions//",
        "/metrics",
    ] {
        let answer = house.post(path, unary()).await.whole().await;
        assert!([404, 405].contains(&answer.status.as_u16()), "{path}: {}", answer.status);
    }
    assert!(engine.log().requests().is_empty());
    house.end().await;
}

// --- injected usage ---

/// The client's request for usage.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asks {
    Nothing,
    False,
    True,
}

#[tokio::test(start_paused = true)]
async fn c66_injected_usage_is_invisible() {
    for asks in [Asks::Nothing, Asks::False, Asks::True] {
        for alone in [true, false] {
            for injects in [true, false] {
                let finish = if alone { f("stop") } else { with_usage(&f("stop"), 5, 2) };
                let script = Script::stream().say_all([(10, r()), (100, t("a")), (120, t("b")), (120, finish.clone())]);
                let script = if alone { script.say(u(5, 2)) } else { script };
                let yaml = Yaml::default().with(&format!("inject: {{usage: {injects}}}"));
                let (house, engine) = House::playing_with(&yaml, script.say(d()).end());
                let mut body = stream();
                match asks {
                    Asks::Nothing => {}
                    Asks::False => body["stream_options"] = json!({"include_usage": false}),
                    Asks::True => body["stream_options"] = json!({"include_usage": true}),
                }
                let answer = house.chat(body.clone()).await.whole().await;
                let sent = engine.log().requests()[0].json();
                if injects {
                    assert_eq!(sent["stream_options"]["include_usage"], true, "{asks:?}");
                } else {
                    assert_eq!(sent, body);
                }
                let hides = alone && injects && asks != Asks::True;
                let usage = if alone && !hides { event(&u(5, 2)) } else { String::new() };
                let events = [event(&r()), event(&t("a")), event(&t("b")), event(&finish), usage, event(&d())];
                assert_eq!(answer.text(), events.concat(), "{asks:?} alone {alone} injects {injects}");
                let line = house.line().await;
                assert_eq!((line.verdict(), line.text("token_source")), ("met".into(), "usage"));
                house.end().await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c66_nothing_is_injected_where_it_does_not_belong() {
    let cases = [
        (CHAT, unary(), "vllm"),
        (CHAT, stream(), "generic"),
        ("/v1/responses", json!({"model": "m1", "stream": true, "input": "hi"}), "vllm"),
        ("/v1/messages", json!({"model": "m1", "stream": true, "max_tokens": 5, "messages": []}), "vllm"),
        ("/v1/embeddings", json!({"model": "m1", "input": "hi"}), "vllm"),
    ];
    for (path, body, kind) in cases {
        let (house, engine) = House::playing_with(&Yaml::default().kind(kind), whole_answer());
        house.post(path, body.clone()).await.whole().await;
        assert_eq!(engine.log().requests()[0].body, body.to_string(), "{path}");
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c66_injected_usage_is_removed_from_every_event() {
    let yaml = Yaml::default().with("inject: {usage: true, continuous_usage: true}");
    let script = Script::stream()
        .say_all([(10, with_usage(&r(), 5, 0)), (100, with_usage(&t("a"), 5, 1)), (120, with_usage(&t("b"), 5, 2))])
        .say(with_usage(&f("stop"), 5, 2))
        .say(u(5, 2))
        .say(d());
    let (house, engine) = House::playing_with(&yaml, script.end());
    let answer = house.chat(stream()).await.whole().await;
    let options = engine.log().requests()[0].json()["stream_options"].clone();
    assert_eq!(options, json!({"include_usage": true, "continuous_usage_stats": true}));
    let events = [event(&r()), event(&t("a")), event(&t("b")), event(&f("stop")), event(&d())];
    assert_eq!(answer.text(), events.concat());
    assert_eq!(house.line().await.tokens(), (Some(5), Some(2)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_alias_goes_to_the_engine_as_its_name_and_the_answer_keeps_the_engines() {
    let yaml = Yaml::default().top("models: {aliases: {gpt-4o: m1}}");
    let (house, engine) = House::playing_with(&yaml, whole_answer());
    let text = r#"{"messages":[],"mod\u0065l" : "gpt-4o" ,"seed":1.0}"#;
    let answer = house.send(Ask::raw(CHAT, text)).await.whole().await;
    let sent = String::from_utf8(engine.log().requests()[0].body.to_vec()).unwrap();
    assert_eq!(sent, text.replace("\"gpt-4o\"", "\"m1\""));
    assert_eq!(answer.json()["model"], "m1");
    let line = house.line().await;
    assert_eq!((line.text("model"), line.verdict()), ("m1", "met".into()));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_clients_own_priority_is_removed() {
    let (house, engine) = House::playing(whole_answer());
    house.send(Ask::raw(CHAT, r#"{"model":"m1","priority":-5,"messages":[]}"#)).await.whole().await;
    assert_eq!(engine.log().requests()[0].body, r#"{"model":"m1","messages":[]}"#);
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn two_readings_of_a_decisive_field_are_refused() {
    for text in [
        r#"{"model":"m1","model":"m2"}"#,
        r#"{"model":"m1","mod\u0065l":"m2"}"#,
        r#"{"model":"m1","stream":"true"}"#,
        r#"{"model":"m1","stream":1}"#,
        r#"{"model":["m1"]}"#,
        r#"{"model":"m1","max_tokens":-2}"#,
        r#"{"model":"m1","n":1.5}"#,
        r#"{"model":"m1","stream_options":[]}"#,
        r#"{"model":"m1","stream":true,"stream_options":{"include_usage":true,"include_usage":false}}"#,
        r#"{"model":"m1","priority":"high"}"#,
        r#"{"model":"m1","x":NaN}"#,
        r#"{"model":"m1"} {}"#,
        r#"{'model':'m1'}"#,
        "{\"model\":\"m1\",\"x\":\"\n\"}",
        "\u{feff}{\"model\":\"m1\"}",
        r#"{"model":"m1","x":01}"#,
        r#"[{"model":"m1"}]"#,
        r#""m1""#,
        "",
        "{",
    ] {
        let (house, engine) = House::playing(whole_answer());
        let answer = house.send(Ask::raw(CHAT, text)).await.whole().await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("x-goodput-reason")),
            (400, Some("unreadable_body")),
            "{text}"
        );
        assert!(engine.log().requests().is_empty());
        assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn repeats_of_other_fields_travel_untouched() {
    let text = r#"{"model":"m1","top_k":1,"top_k":2,"messages":[]}"#;
    let (house, engine) = House::playing(whole_answer());
    house.send(Ask::raw(CHAT, text)).await.whole().await;
    assert_eq!(engine.log().requests()[0].body, text);
    house.line().await;
    house.end().await;
}

// --- forms ---

fn form(fields: &[(&str, &str)]) -> String {
    let part = |(name, value): &(&str, &str)| {
        format!("--bound\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let parts: String = fields.iter().map(part).collect();
    format!(
        "{parts}--bound\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\u{1}\u{2}RIFF\r\n--bound--\r\n"
    )
}

fn send_form(path: &str, body: String) -> Ask {
    let length = body.len().to_string();
    let ask = Ask::of(Method::POST, path).header("content-type", "multipart/form-data; boundary=bound");
    ask.header("content-length", &length).with_body(body)
}

#[tokio::test(start_paused = true)]
async fn a_form_is_unchanged_and_only_its_model_is_read() {
    let (house, engine) = House::playing(Script::json(200, r#"{"text":"hello"}"#));
    let body = form(&[("temperature", "0"), ("model", "m1")]);
    let answer = house.send(send_form("/v1/audio/transcriptions", body.clone())).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.text()), (200, r#"{"text":"hello"}"#.into()));
    let sent = &engine.log().requests()[0];
    assert_eq!(sent.body, body);
    assert_eq!(sent.header("content-type"), Some("multipart/form-data; boundary=bound"));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("model")), ("excluded(unjudged)".into(), "m1"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn forms_that_cannot_be_served_are_refused() {
    let yaml = Yaml::default().top("models: {aliases: {nick: m1}}").routes("  - {model: [m1], pools: [a]}");
    for (body, status, code) in [
        (form(&[("model", "nick")]), 400, "alias_in_form"),
        (form(&[("model", "m1"), ("model", "m2")]), 400, "unreadable_form"),
        (form(&[]), 404, "model_missing"),
        (form(&[("model", "other")]), 404, "model_not_found"),
        ("no form".to_owned(), 400, "unreadable_form"),
    ] {
        let (house, engine) = House::playing_with(&yaml, whole_answer());
        let answer = house.send(send_form("/v1/audio/transcriptions", body)).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (status, Some(code)));
        assert!(engine.log().requests().is_empty());
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_form_on_a_json_path_is_rejected() {
    let (house, engine) = House::playing(whole_answer());
    let answer = house.send(send_form(CHAT, form(&[("model", "m1")]))).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (400, Some("unreadable_body")));
    assert!(engine.log().requests().is_empty());
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_query_that_fits_no_uri_behind_an_engines_prefix_is_refused_and_no_panic() {
    let base = "/a".repeat(2048);
    let yaml = Yaml::default().engines_of_first(&[&format!("http://e1:8000{base}")]);
    let longest = format!("{CHAT}?{}", "q".repeat(32 * 1024));
    for (target, status) in [(longest.clone(), 200), (longest + "q", 414)] {
        let house = House::new(&yaml);
        let _engine = house.engine("e1", vec![whole_answer()]);
        let answer = house.post(&target, unary()).await.whole().await;
        assert_eq!(answer.status.as_u16(), status);
        let refused = house.page().sum("goodput_bad_heads_total", &[("reason", "target_too_long")]);
        assert_eq!(refused, f64::from(u8::from(status == 414)), "no request yet");
        house.lines(usize::from(status == 200)).await;
        house.end().await;
    }
}
