//! The scripted engine's own behaviour, in virtual time.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::fixtures::*;
use super::*;
use goodput::clock::Clock;
use goodput::types::Tick;

const ASK: &[u8] = b"POST /v1/chat/completions HTTP/1.1\r\nX-A: 1\r\ncontent-length: 2\r\n\r\n{}";

async fn read_for(pipe: &mut PipeEnd, text: &str) -> String {
    let mut seen = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&seen).ends_with(text) {
        pipe.read_exact(&mut byte).await.unwrap();
        seen.push(byte[0]);
    }
    String::from_utf8(seen).unwrap()
}

#[tokio::test(start_paused = true)]
async fn events_leave_at_their_moments_counted_from_the_end_of_the_body() {
    let clock = Clock::start();
    let engine = ScriptedEngine::always(clock, Script::stream().at(10).say(r()).at(700).say(t("Hi")).say(d()).end());
    let mut pipe = engine.connect();
    pipe.write_all(&ASK[..20]).await.unwrap();
    clock.sleep_until(Some(Tick::from_millis(50))).await;
    pipe.write_all(&ASK[20..]).await.unwrap();
    read_for(&mut pipe, "\r\n\r\n").await;
    assert_eq!(clock.now(), Tick::from_millis(50));
    read_for(&mut pipe, "\n\n\r\n").await;
    assert_eq!(clock.now(), Tick::from_millis(60));
    let text = read_for(&mut pipe, "\n\n\r\n").await;
    assert_eq!(clock.now(), Tick::from_millis(750));
    assert!(text.contains("\"Hi\""), "{text}");
    read_for(&mut pipe, "0\r\n\r\n").await;
    let request = engine.log().requests().remove(0);
    assert_eq!((request.header("x-a"), &request.body[..]), (Some("1"), &b"{}"[..]));
    assert_eq!((request.body_at, request.on_connection), (Tick::from_millis(50), 0));
}

#[tokio::test(start_paused = true)]
async fn one_connection_takes_several_requests_and_each_its_script() {
    let first = Script::json(200, "{}");
    let second = Script::json(503, "[]").close();
    let engine = ScriptedEngine::in_turn(Clock::start(), vec![first, second]);
    let mut pipe = engine.connect();
    pipe.write_all(&[ASK, ASK].concat()).await.unwrap();
    let mut all = String::new();
    pipe.read_to_string(&mut all).await.unwrap();
    assert!(all.starts_with("HTTP/1.1 200 OK\r\n") && all.contains("HTTP/1.1 503 Service Unavailable\r\n"), "{all}");
    let connection = engine.log().connections().remove(0);
    assert_eq!((connection.requests, connection.closed, connection.ended), (2, None, Some(Tick::ZERO)));
}

#[tokio::test(start_paused = true)]
async fn the_moment_of_a_leave_is_seen_in_silence_in_a_wait_and_in_a_blocked_write() {
    let flood = Script::new().write(vec![b'x'; 1 << 20]);
    for script in [Script::stream().silence(), Script::stream().wait(Duration::from_secs(9)), flood] {
        let clock = Clock::start();
        let engine = ScriptedEngine::always(clock, script);
        let mut pipe = engine.connect();
        pipe.write_all(ASK).await.unwrap();
        engine.log().received(1).await;
        clock.sleep_until(Some(Tick::from_millis(200))).await;
        assert_eq!(engine.log().open_connections(), 1);
        drop(pipe);
        assert_eq!(engine.log().closed(0).await, Tick::from_millis(200));
        engine.log().quiet().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_on_a_pipe_comes_after_what_was_written() {
    let engine = ScriptedEngine::always(Clock::start(), Script::stream().say(t("A")).reset());
    let mut pipe = engine.connect();
    pipe.write_all(ASK).await.unwrap();
    let mut all = Vec::new();
    let error = pipe.read_to_end(&mut all).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(String::from_utf8(all).unwrap().contains("\"A\""));
}

#[tokio::test(start_paused = true)]
async fn an_unmet_expectation_is_a_complaint() {
    let engine = ScriptedEngine::always(Clock::start(), Script::new().expect("x-a: 1").reply(200, &[], ""));
    let mut pipe = engine.connect();
    pipe.write_all(ASK).await.unwrap();
    assert!(pipe.read_u8().await.is_err());
    assert_eq!(engine.log().complaints().len(), 1, "headers are compared as they were spelt");
}

#[tokio::test(start_paused = true)]
async fn a_script_may_depend_on_the_request() {
    let by_path = |request: &Received| Script::json(if request.target == "/health" { 200 } else { 404 }, "");
    let engine = ScriptedEngine::new(Clock::start(), by_path);
    let mut pipe = engine.connect();
    pipe.write_all(b"GET /health HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(read_for(&mut pipe, "\r\n\r\n").await.contains("200 OK"));
    pipe.write_all(b"GET /nothing HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(read_for(&mut pipe, "\r\n\r\n").await.contains("404 Not Found"));
}

/// Real time, real sockets: asserts only the order and the kind of end.
#[tokio::test]
async fn on_a_socket_a_reset_is_a_reset_and_a_close_is_none() {
    let clock = Clock::start();
    let scripts = vec![Script::new().close(), Script::new().reset()];
    let engine = ScriptedEngine::in_turn(clock, scripts);
    let address = engine.listen().await.unwrap();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
        socket.write_all(ASK).await.unwrap();
        ends.push(socket.read_u8().await.unwrap_err().kind());
    }
    assert_eq!(ends, [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset]);
}
