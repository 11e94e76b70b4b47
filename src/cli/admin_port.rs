//! Client of a gateway's admin port, shared by `drill`, `health` and `top`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::uri::Authority;
use http::{HeaderValue, Request, Response, StatusCode, Uri, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use secrecy::{ExposeSecret, SecretString};
use tokio::net::TcpStream;

use crate::config::Settings;
use crate::config::watch::SettingsFile;

/// Longest response; a longer one is not from a gateway.
const LONGEST: usize = 64 << 20;

/// An admin port, in cleartext.
#[derive(Clone, Debug)]
pub(super) struct AdminPort {
    authority: Authority,
    token: Option<SecretString>,
}

impl AdminPort {
    /// Returns the port that a URL names.
    ///
    /// # Errors The URL is not `http`, or names no host.
    pub(super) fn of(url: &Uri, token: Option<SecretString>) -> anyhow::Result<Self> {
        if url.scheme_str().is_some_and(|scheme| scheme != "http") {
            bail!("{url}: only http is supported; use the admin port");
        }
        let authority = url.authority().with_context(|| format!("{url} names no host; write http://HOST:PORT"))?;
        Ok(AdminPort { authority: authority.clone(), token })
    }

    /// Sends a GET and returns the response.
    ///
    /// # Errors No complete response arrived within the limit.
    pub(super) async fn get(&self, path: &str, limit: Duration) -> anyhow::Result<(StatusCode, Bytes)> {
        self.ask(Request::get(path), Bytes::new(), limit).await
    }

    /// Posts JSON to a path and returns the response.
    ///
    /// # Errors No complete response arrived within the limit.
    pub(super) async fn post(
        &self,
        path: &str,
        json: &serde_json::Value,
        limit: Duration,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let request = Request::post(path).header(CONTENT_TYPE, "application/json");
        self.ask(request, Bytes::from(json.to_string()), limit).await
    }

    async fn ask(
        &self,
        request: request::Builder,
        body: Bytes,
        limit: Duration,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let answer = tokio::time::timeout(limit, self.send(request, body)).await;
        answer.with_context(|| format!("no response from {} within {limit:?}", self.authority))?
    }

    async fn send(&self, request: request::Builder, body: Bytes) -> anyhow::Result<(StatusCode, Bytes)> {
        let authority = &self.authority;
        let place = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
        let stream = TcpStream::connect(place)
            .await
            .with_context(|| format!("cannot connect to {authority}; name the admin port of another gateway"))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut request = request.header(HOST, authority.as_str());
        if let Some(token) = &self.token {
            let mut bearer = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret())).map_err(|_| {
                anyhow!("the token is not a valid header value: it must be one line of printable ASCII")
            })?;
            bearer.set_sensitive(true);
            request = request.header(AUTHORIZATION, bearer);
        }
        let request: Request<Full<Bytes>> = request.body(Full::from(body))?;
        let answer = sender.send_request(request);
        let exchange = async {
            let answer: Response<Incoming> =
                answer.await.with_context(|| format!("{authority} closed the connection without a response"))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), LONGEST).collect().await;
            let body = body.map_err(|error| anyhow!("the response of {authority} was truncated: {error}"))?;
            Ok::<_, anyhow::Error>((status, body.to_bytes()))
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            answered = &mut exchange => return answered,
            ended = connection => ended?,
        }
        // The connection ends with the response, or before it.
        exchange.await
    }
}

/// Reads a token from a file, by the rules of the settings.
///
/// # Errors The file cannot be read, or is empty.
pub(super) fn token_of(file: &Path) -> anyhow::Result<SecretString> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let token = text.trim();
    if token.is_empty() {
        bail!("{} is empty: it must hold the token of admin.token_file", file.display());
    }
    Ok(SecretString::from(token))
}

/// Loads a settings file.
///
/// # Errors The file cannot be read, or has problems.
pub(super) fn settings_of(file: &Path) -> anyhow::Result<Settings> {
    let source = SettingsFile::file(file);
    source.read().map_err(|why| anyhow!("{}", why.lines(source.path()).join("; ")))
}

/// Returns the address for a client on this machine: loopback for a listener on all addresses.
///
/// # Errors The port is 0, so the system chose it.
pub(super) fn address_to_ask(listens: SocketAddr) -> anyhow::Result<SocketAddr> {
    if listens.port() == 0 {
        bail!("the port of the settings is 0, so the system chose it; give the URL instead");
    }
    let ip = match listens.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok(SocketAddr::new(ip, listens.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_reached_by_loopback() {
        let ask = |listens: &str| address_to_ask(listens.parse().unwrap()).map(|address| address.to_string());
        assert_eq!(ask("0.0.0.0:9090").unwrap(), "127.0.0.1:9090");
        assert_eq!(ask("[::]:9090").unwrap(), "[::1]:9090");
        assert_eq!(ask("10.0.0.5:9090").unwrap(), "10.0.0.5:9090");
        assert!(ask("127.0.0.1:0").unwrap_err().to_string().contains("give the URL"));
    }

    #[test]
    fn a_port_without_http_or_host_is_an_error() {
        for url in ["https://127.0.0.1:1/", "/readyz"] {
            assert!(AdminPort::of(&url.parse().unwrap(), None).is_err(), "{url}");
        }
    }
}
