//! One HTTP request to a running gateway, without TLS: what the commands ask its ports.

use anyhow::{Context, bail};
use http::header::HOST;
use http::uri::Authority;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// The longest answer that is read.
const LONGEST_ANSWER: usize = 16 << 20;

/// Host and port of a URL.
///
/// # Errors
/// It has none, or is none of `http`.
pub(super) fn authority(url: &Uri) -> anyhow::Result<&Authority> {
    if url.scheme_str().is_some_and(|scheme| scheme != "http") {
        bail!("{url}: only http is asked; use the admin port");
    }
    url.authority().with_context(|| format!("{url} names no host; write http://HOST:PORT{}", url.path()))
}

/// Sends a request to the host of `url`, and reads the whole answer.
///
/// # Errors
/// Whatever kept it from an answer.
pub(super) async fn send(
    url: &Uri,
    request: http::request::Builder,
    body: String,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let authority = authority(url)?;
    let place = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
    let stream = TcpStream::connect(place)
        .await
        .with_context(|| format!("cannot connect to {authority}; --url names the admin port of another gateway"))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request: Request<Full<Bytes>> = request.header(HOST, authority.as_str()).body(Full::from(body))?;
    let asked = async move {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        let body =
            Limited::new(answer.into_body(), LONGEST_ANSWER).collect().await.map_err(|error| anyhow::anyhow!(error))?;
        Ok::<_, anyhow::Error>((status, body.to_bytes()))
    };
    // The connection may end before the answer is read to its end, which is then in memory.
    let (answer, _) = tokio::join!(asked, connection);
    answer.with_context(|| format!("{authority} closed the connection without an answer"))
}
