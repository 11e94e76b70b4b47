//! TLS and the imaginary network. Real sockets here only on the loopback, waiting for conditions.

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

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
    assert_eq!(sockets.configs.lock().len(), 1, "the configuration is made once");

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

#[tokio::test]
async fn an_imaginary_address_listens_fails_or_refuses() {
    let network = PipeDial::new();
    let to = address(Scheme::Http, "e", 1, None);
    assert!(is_refusal(&network.dial(&to, None).await.err().unwrap()));
    let mut listener = network.listen("e:1");
    let mut ours = network.dial(&to, None).await.unwrap();
    ours.write_all(b"hi").await.unwrap();
    let mut theirs = listener.accept().await;
    let mut bytes = [0; 2];
    theirs.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"hi");
    network.fail("e:1", io::ErrorKind::HostUnreachable);
    assert!(!is_refusal(&network.dial(&to, None).await.err().unwrap()));
    assert_eq!(network.dials("e:1"), 3);
    assert!(network.look_up("svc", 1).await.is_err());
    network.name("svc", &[IpAddr::from([10, 0, 0, 1])]);
    assert_eq!(network.look_up("svc", 1).await.unwrap(), [IpAddr::from([10, 0, 0, 1])]);
}
