//! Connections to engines over real loopback sockets: TLS, refused connections, early and late responses.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http_body_util::BodyExt;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use goodput::clock::Clock;
use goodput::dial::{Dial, EngineAddress, Roots, Scheme, Sockets, is_refusal};
use goodput::forward::conn_pool::{ConnPool, RequestWriter};
use goodput::forward::{AttemptRequest, start};
use goodput::route::settings::{EngineSource, PoolSettings};

fn address(scheme: Scheme, host: &str, port: u16, name: Option<&str>) -> EngineAddress {
    EngineAddress { scheme, host: host.into(), port, base: "".into(), name: name.map(Arc::from) }
}

/// A TLS server for `name` that echoes one byte per connection; its port and its certificate.
async fn tls_engine(name: &str) -> (u16, Roots) {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    let certificate = cert.der().clone();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(mut stream) = acceptor.accept(stream).await {
                let byte = stream.read_u8().await.unwrap();
                stream.write_u8(byte).await.unwrap();
                stream.flush().await.unwrap();
            }
        }
    });
    (port, Arc::from([certificate]))
}

#[tokio::test]
async fn an_engine_behind_tls_is_verified_against_the_pools_own_roots() {
    let (port, roots) = tls_engine("engine.internal").await;
    let sockets = Sockets::new();
    let named = address(Scheme::Https, "127.0.0.1", port, Some("engine.internal"));
    for _ in 0..2 {
        let mut stream = sockets.dial(&named, Some(&roots)).await.unwrap();
        stream.write_all(b"x").await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
    }

    let other = address(Scheme::Https, "127.0.0.1", port, Some("elsewhere.internal"));
    assert!(sockets.dial(&other, Some(&roots)).await.is_err(), "another name");
    let (_, strange) = tls_engine("engine.internal").await;
    assert!(sockets.dial(&named, Some(&strange)).await.is_err(), "another root");
}

#[tokio::test]
async fn a_refused_connection_is_distinguished() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let refused = Sockets::new().dial(&address(Scheme::Http, "127.0.0.1", port, None), None).await;
    assert!(is_refusal(&refused.err().unwrap()));
}

/// An engine that responds to some requests after the last byte, and to others before it has read anything.
async fn hasty_engine() -> u16 {
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            tokio::spawn(async move {
                let mut requests = 0_u32;
                loop {
                    requests += 1;
                    let is_early = requests.is_multiple_of(3);
                    if is_early {
                        // About when the next request is on its way.
                        (0..requests % 40).for_each(|_| std::thread::yield_now());
                        let _ = stream.write_all(ANSWER).await;
                    }
                    let mut request = Vec::new();
                    while !request.ends_with(b"{}") {
                        let Ok(byte) = stream.read_u8().await else { return };
                        request.push(byte);
                    }
                    if !is_early && stream.write_all(ANSWER).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_early_response_on_a_reused_connection_is_read() {
    let to = Arc::new(address(Scheme::Http, "127.0.0.1", hasty_engine().await, None));
    let clock = Clock::start();
    let lines = Arc::new(ConnPool::new(Arc::new(Sockets::new()), clock));
    let pool = Arc::new(PoolSettings::with_defaults("p".into(), EngineSource::Static(vec![(*to).clone()])));
    let mut kept = 0;
    for _ in 0..1000 {
        let fields = [("host", &b"e"[..])].into_iter();
        let request = RequestWriter::post("", "/v1/chat/completions", fields, vec![b"{}".to_vec().into()].into());
        let (lines, pool, address) = (Arc::clone(&lines), Arc::clone(&pool), Arc::clone(&to));
        let call = AttemptRequest { lines, pool, engine: to.id(), address, request, fresh: false, at: clock.now() };
        let asked = tokio::spawn(async move {
            let mut call = Some(call);
            let mut opening = poll_fn(|cx| Poll::Ready(start(call.take().unwrap(), cx))).await;
            let begins_kept = opening.waits();
            let mut waits = begins_kept;
            let answer = poll_fn(|cx| match std::mem::take(&mut waits) {
                true => Poll::Pending,
                false => Pin::new(&mut opening).poll(cx),
            });
            let body = answer.await.unwrap().body.collect().await.unwrap().to_bytes();
            (begins_kept, body)
        });
        let answered = tokio::time::timeout(Duration::from_secs(120), asked).await;
        let (begins_kept, body) = answered.expect("it is heard").unwrap();
        assert_eq!(&body[..], b"ok");
        kept += u32::from(begins_kept);
    }
    assert!(kept > 300, "{kept}");
}
