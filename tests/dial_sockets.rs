//! Connections to engines over real sockets on the loopback: TLS and refusals.

use std::sync::Arc;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use goodput::dial::{Dial, EngineAddress, Roots, Scheme, Sockets, is_refusal};

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
async fn nobody_listening_is_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let refused = Sockets::new().dial(&address(Scheme::Http, "127.0.0.1", port, None), None).await;
    assert!(is_refusal(&refused.err().unwrap()));
}
