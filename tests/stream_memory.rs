//! What an open stream takes of the heap, counted by the allocator. Alone in its binary, because the
//! count is that of the whole process; client and engine are plain sockets and take none.

use std::alloc::System;
use std::future::pending;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{channel, sync_channel};
use std::thread;

use goodput::cli::service::Service;
use goodput::clock::Clock;
use goodput::config;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::runtime::{Builder, Handle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Streams that are open before it is counted: pools, caches and lists have their size then.
const BEFORE: usize = 64;
const STREAMS: usize = 256;

/// Most bytes of a stream that waits for its engine. docs/performance.md allows 9 kB of resident memory,
/// of which the allocator's own share is a part.
const MOST: usize = 7_000;

const REQUEST: &[u8] = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n\
    user-agent: client/1.0\r\naccept: */*\r\ncontent-length: 88\r\n\r\n\
    {\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello there\"}],\"stream\":true,\"n\":1  }";
const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENT: &[u8] =
    b"data: {\"id\":\"c-1\",\"object\":\"chat.completion.chunk\",\"created\":1764432000,\"model\":\"m\",\
    \"choices\":[{\"index\":0,\"delta\":{\"content\":\"tok\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";

/// A gateway in front of this engine, on one thread.
fn gateway(engine: SocketAddr) -> (SocketAddr, Handle) {
    let settings = format!(
        "listen: {{address: \"127.0.0.1:0\"}}\nadmin: off\n\
         slo_classes: [{{slo_class: chat, objectives: {{ttft_seconds: {{threshold: 1, attainment: 0.95}}}}, \
         joint_attainment_target: 0.9}}]\n\
         default_class: chat\npools: [{{pool: main, engines: [{{url: \"http://{engine}\"}}], health: off}}]\n\
         routes: [{{model: [m], pools: [main]}}]\n"
    );
    let (started, address) = sync_channel(1);
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let settings = config::load(&settings, &config::ProcessEnvironment::default()).expect("they are right");
            let service = Service::bind(settings, None, Clock::start()).await.expect("a port is free");
            started.send((service.address(), Handle::current())).expect("the test waits");
            service.run(async || pending().await).await;
        });
    });
    address.recv().expect("it starts")
}

/// The connection on which the next request comes. Questions of the gateway's own are answered.
fn accept(engine: &TcpListener) -> TcpStream {
    loop {
        let (mut upstream, _) = engine.accept().expect("it connects");
        let mut seen = [0; 4096];
        let mut read = upstream.read(&mut seen).expect("it writes");
        if !seen.starts_with(b"POST") {
            upstream
                .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .expect("it reads");
            continue;
        }
        while !seen[..read].ends_with(b"}") {
            read += upstream.read(&mut seen[read..]).expect("it writes");
        }
        return upstream;
    }
}

/// Opens a stream, of which three events have come; both ends of it.
fn open(gateway: SocketAddr, engine: &TcpListener) -> [TcpStream; 2] {
    let mut client = TcpStream::connect(gateway).expect("it listens");
    client.write_all(REQUEST).expect("it reads");
    let mut upstream = accept(engine);
    upstream.write_all(HEAD).expect("it reads");
    let mut passed = [0; 4096];
    let mut read = 0;
    for event in 1..=3 {
        write!(upstream, "{:x}\r\n", EVENT.len()).expect("it reads");
        upstream.write_all(EVENT).expect("it reads");
        upstream.write_all(b"\r\n").expect("it reads");
        while passed[..read].windows(5).filter(|five| five == b"data:").count() < event
            || !passed[..read].ends_with(b"\n\r\n")
        {
            let more = client.read(&mut passed[read..]).expect("it writes");
            assert!(more > 0, "{}", passed[..read].escape_ascii());
            read += more;
        }
    }
    [client, upstream]
}

/// Bytes in use once every task of the gateway waits.
fn in_use(gateway: &Handle) -> usize {
    let (done, quiet) = channel();
    gateway.spawn(async move {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let _ = done.send(());
    });
    quiet.recv().expect("it runs");
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

#[test]
fn a_stream_that_waits_takes_few_kilobytes() {
    let engine = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let (address, runtime) = gateway(engine.local_addr().expect("it is bound"));
    let mut streams = Vec::with_capacity(BEFORE + STREAMS);
    streams.extend((0..BEFORE).map(|_| open(address, &engine)));
    let before = in_use(&runtime);
    streams.extend((0..STREAMS).map(|_| open(address, &engine)));
    let each = (in_use(&runtime) - before) / STREAMS;
    assert!((1_000..=MOST).contains(&each), "{each} bytes a stream");
}
