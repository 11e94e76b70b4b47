//! Addresses of one name, over sockets and TLS.

use std::net::Ipv4Addr;

use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

/// Behaviour of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// A TLS server with the engine's certificate.
    Engine,
    /// A TLS server with a certificate of another issuer.
    Stranger,
    /// Accepts, and says nothing.
    Silent,
    /// Accepts, and closes.
    Closes,
    /// Answers without TLS.
    Plain,
}

/// A server's TLS, and its certificate as a root.
fn identity() -> (TlsAcceptor, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["engine.test".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![certificate.clone()], key).unwrap();
    (TlsAcceptor::from(Arc::new(config)), certificate)
}

/// Serves every connection of an address this way; the engine says hello.
async fn serve(listener: TcpListener, peer: Peer, tls: TlsAcceptor) {
    let mut open = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        match peer {
            Peer::Engine | Peer::Stranger => {
                if let Ok(mut stream) = tls.accept(stream).await {
                    stream.write_all(b"hello").await.unwrap();
                    stream.flush().await.unwrap();
                    open.push(stream);
                }
            }
            Peer::Silent => std::future::pending::<()>().await,
            Peer::Closes => drop(stream),
            Peer::Plain => stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap_or_default(),
        }
    }
}

/// Listeners of the two addresses of one name, on one port; of both families if the machine has both.
async fn two_addresses() -> [TcpListener; 2] {
    let second = [IpAddr::from(std::net::Ipv6Addr::LOCALHOST), IpAddr::from(Ipv4Addr::new(127, 0, 0, 2))];
    loop {
        let first = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = first.local_addr().unwrap().port();
        for address in second {
            if let Ok(second) = TcpListener::bind((address, port)).await {
                return [first, second];
            }
        }
    }
}

/// C83: an address that accepts connections without TLS does not keep requests from the one with TLS, in
/// either order.
#[tokio::test(start_paused = true)]
async fn c83_an_address_without_working_tls_gives_way_to_the_other_one() {
    let ((engine, root), (stranger, _)) = (identity(), identity());
    let roots: Roots = Arc::from(vec![root]);
    for bad in [Peer::Silent, Peer::Closes, Peer::Plain, Peer::Stranger] {
        for peers in [[bad, Peer::Engine], [Peer::Engine, bad]] {
            let listeners = two_addresses().await;
            let at = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
            let servers: Vec<_> = listeners
                .into_iter()
                .zip(peers)
                .map(|(listener, peer)| {
                    let tls = if peer == Peer::Stranger { stranger.clone() } else { engine.clone() };
                    tokio::spawn(serve(listener, peer, tls))
                })
                .collect();
            let (host, port) = ("engine.test".into(), at[0].port());
            let to = EngineAddress { scheme: Scheme::Https, host, port, base: "".into(), name: None };
            let sockets = Sockets::new();
            for _ in 0..2 {
                let mut stream = sockets.connect_to(&to, &at.map(|at| at.ip()), Some(&roots)).await.unwrap();
                let mut said = [0; 5];
                stream.read_exact(&mut said).await.unwrap();
                assert_eq!(&said, b"hello", "{peers:?}");
                let good = at[usize::from(peers[1] == Peer::Engine)].ip();
                let answered = sockets.answered.lock().values().copied().collect::<Vec<_>>();
                assert_eq!(answered, [good], "it is tried first the next time: {peers:?}");
            }
            servers.iter().for_each(|server| server.abort());
        }
    }
}

/// Without an address with working TLS, the attempt fails.
#[tokio::test(start_paused = true)]
async fn c83_no_address_with_working_tls_is_an_error_and_nothing_is_remembered() {
    let ((engine, root), (stranger, _)) = (identity(), identity());
    let listeners = two_addresses().await;
    let at = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let [first, second] = listeners;
    let servers =
        [tokio::spawn(serve(first, Peer::Plain, engine)), tokio::spawn(serve(second, Peer::Stranger, stranger))];
    let (host, port) = ("engine.test".into(), at[0].port());
    let to = EngineAddress { scheme: Scheme::Https, host, port, base: "".into(), name: None };
    let sockets = Sockets::new();
    let error = sockets.connect_to(&to, &at.map(|at| at.ip()), Some(&Arc::from(vec![root]))).await.err().unwrap();
    assert!(!is_refusal(&error), "both took the connection: {error}");
    assert!(sockets.answered.lock().is_empty());
    servers.iter().for_each(tokio::task::JoinHandle::abort);
}
