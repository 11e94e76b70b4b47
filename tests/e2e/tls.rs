//! TLS on both sides: clients that verify the gateway, and a gateway that verifies engines.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::gateway::{Gateway, Setup, sum, sum_where};
use crate::processes::{CHAT, stream_of};
use crate::running::{Running, post};

const TLS: &str = "tls: {certificate_file: server.crt, private_key_file: server.key}";

/// A certificate for `localhost` and 127.0.0.1, and the authority that signed it.
pub struct Papers {
    pub root: String,
    pub certificate: String,
    pub key: String,
}

impl Papers {
    pub fn new() -> Papers {
        let mut authority = CertificateParams::new(Vec::new()).expect("no names");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_key = KeyPair::generate().expect("a key");
        let root = authority.self_signed(&root_key).expect("a certificate");
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let key = KeyPair::generate().expect("a key");
        let server = CertificateParams::new(names).expect("good names");
        let server = server.signed_by(&key, &Issuer::new(authority, root_key)).expect("a certificate");
        Papers { root: root.pem(), certificate: server.pem(), key: key.serialize_pem() }
    }

    /// The files that [`TLS`] names.
    fn files(&self) -> [(&str, &str); 2] {
        [("server.crt", &self.certificate), ("server.key", &self.key)]
    }
}

/// The response of a stream for a client that trusts this root and offers these protocols.
fn stream(url: &str, root: &str, offered: &[&[u8]]) -> io::Result<(Version, StatusCode, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let url = url.to_owned();
    runtime.block_on(async {
        let asked = tokio::time::timeout(Duration::from_secs(120), ask(&url, root, offered)).await;
        asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    })
}

async fn ask(url: &str, root: &str, offered: &[&[u8]]) -> io::Result<(Version, StatusCode, String)> {
    let address = url.strip_prefix("https://").expect("it says that it speaks TLS");
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(root.as_bytes()).expect("a certificate")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = config.expect("known versions").with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = offered.iter().map(|name| name.to_vec()).collect();
    let name = ServerName::try_from("localhost").expect("a name");
    let socket = TcpStream::connect(address).await?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let body = Full::new(Bytes::from(stream_of(4)));
    let request = Request::post(format!("https://localhost{CHAT}")).header("content-type", "application/json");
    let stream = TokioIo::new(stream);
    let answer = if is_http2 {
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), stream).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        sender.send_request(request.body(body).expect("a request")).await
    } else {
        let (mut sender, connection) = http1::handshake(stream).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        let request = request.header("host", "localhost").uri(CHAT).body(body);
        sender.send_request(request.expect("a request")).await
    };
    told(answer.map_err(io::Error::other)?).await
}

async fn told(answer: Response<Incoming>) -> io::Result<(Version, StatusCode, String)> {
    let (version, status) = (answer.version(), answer.status());
    let body = answer.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
    Ok((version, status, String::from_utf8_lossy(&body).into_owned()))
}

#[test]
fn a_verified_client_gets_its_stream_in_the_protocol_that_it_offers() {
    let papers = Papers::new();
    let engine = Running::engine(&["--speed", "4"]);
    let gateway =
        Gateway::start(&Setup { engines: &[&engine], listen: TLS, files: &papers.files(), ..Setup::default() });
    let url = &gateway.running.url;
    for (offered, expected) in [
        (&[&b"h2"[..], b"http/1.1"][..], Version::HTTP_2),
        (&[&b"http/1.1"[..]][..], Version::HTTP_11),
        (&[][..], Version::HTTP_11),
    ] {
        let (version, status, body) = stream(url, &papers.root, offered).unwrap();
        assert_eq!((version, status), (expected, StatusCode::OK), "{body}");
        assert!(body.contains("[DONE]"), "{body}");
    }
    let stranger = stream(url, &Papers::new().root, &[b"h2"]);
    assert!(stranger.is_err(), "another authority is not trusted: {stranger:?}");
    let page = gateway.adds_up();
    assert_eq!((sum(&page, "slo_met_total"), sum(&page, "goodput_requests_finished_total")), (3.0, 3.0), "{page}");
}

/// The engine behind TLS is a gateway with its own simulated engine.
#[test]
fn an_engine_behind_tls_is_verified_with_the_roots_of_its_pool() {
    let papers = Papers::new();
    let engine = Running::engine(&["--speed", "4"]);
    let inner = Gateway::start(&Setup { engines: &[&engine], listen: TLS, files: &papers.files(), ..Setup::default() });
    let before = |root: &str| {
        Gateway::start(&Setup {
            engines: &[&inner.running],
            engine: "kind: vllm, ca_file: roots.pem",
            files: &[("roots.pem", root)],
            ..Setup::default()
        })
    };
    let trusting = before(&papers.root);
    let answer = post(&trusting.running.url, CHAT, "", &stream_of(4));
    assert!(answer.as_ref().is_ok_and(|answer| answer.contains("[DONE]")), "{answer:?}");
    let page = trusting.adds_up();
    assert_eq!(sum(&page, "slo_met_total"), 1.0, "{page}");

    let wary = before(&Papers::new().root);
    let refused = post(&wary.running.url, CHAT, "", &stream_of(4)).unwrap_err();
    assert!(refused.starts_with("HTTP/1.1 50"), "{refused}");
    let page = wary.adds_up();
    assert_eq!(sum_where(&page, "goodput_slo_missed_total", "reason=\"upstream_unavailable\""), 1.0, "{page}");
    // Probes aside, it heard of one request.
    assert_eq!(sum(&inner.adds_up(), "slo_total"), 1.0);
}
