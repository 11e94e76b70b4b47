//! Asks the admin port of a running gateway: what `drill`, `health` and `top` have in common.

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

/// Longer answers are not the gateway's.
const LONGEST: usize = 64 << 20;

/// A port that is asked in cleartext.
#[derive(Clone, Debug)]
pub(super) struct AdminPort {
    authority: Authority,
    token: Option<SecretString>,
}

impl AdminPort {
    /// The port that a URL names.
    ///
    /// # Errors
    /// It is not `http`, or names no host.
    pub(super) fn of(url: &Uri, token: Option<SecretString>) -> anyhow::Result<Self> {
        if url.scheme_str().is_some_and(|scheme| scheme != "http") {
            bail!("{url}: only http is asked; use the admin port");
        }
        let authority = url.authority().with_context(|| format!("{url} names no host; write http://HOST:PORT"))?;
        Ok(AdminPort { authority: authority.clone(), token })
    }

    /// What it answers to a path, within this time.
    ///
    /// # Errors
    /// Whatever kept it from an answer.
    pub(super) async fn get(&self, path: &str, limit: Duration) -> anyhow::Result<(StatusCode, Bytes)> {
        self.ask(Request::get(path), Bytes::new(), limit).await
    }

    /// What it answers to JSON that is posted to a path, within this time.
    ///
    /// # Errors
    /// Whatever kept it from an answer.
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
        answer.with_context(|| format!("no answer from {} within {limit:?}", self.authority))?
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
            let mut bearer = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret()))
                .map_err(|_| anyhow!("the token cannot stand in a header: it must be one line of plain characters"))?;
            bearer.set_sensitive(true);
            request = request.header(AUTHORIZATION, bearer);
        }
        let request: Request<Full<Bytes>> = request.body(Full::from(body))?;
        let answer = sender.send_request(request);
        let exchange = async {
            let answer: Response<Incoming> =
                answer.await.with_context(|| format!("{authority} closed the connection without an answer"))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), LONGEST).collect().await;
            let body = body.map_err(|error| anyhow!("the answer of {authority} broke off: {error}"))?;
            Ok::<_, anyhow::Error>((status, body.to_bytes()))
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            answered = &mut exchange => return answered,
            ended = connection => ended?,
        }
        // The connection can end with the answer, or without one.
        exchange.await
    }
}

/// A token, as the settings read it from a file.
///
/// # Errors
/// The file cannot be read, or is empty.
pub(super) fn token_of(file: &Path) -> anyhow::Result<SecretString> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let token = text.trim();
    if token.is_empty() {
        bail!("{} is empty: it must hold the token of admin.token_file", file.display());
    }
    Ok(SecretString::from(token))
}

/// The settings of a file.
///
/// # Errors
/// It cannot be read, or has problems.
pub(super) fn settings_of(file: &Path) -> anyhow::Result<Settings> {
    let source = SettingsFile::file(file);
    source.read().map_err(|why| anyhow!("{}", why.lines(source.path()).join("; ")))
}

/// Where one asks a port that listens there: an address of all addresses is asked on this machine.
///
/// # Errors
/// The system chooses its port.
pub(super) fn address_to_ask(listens: SocketAddr) -> anyhow::Result<SocketAddr> {
    if listens.port() == 0 {
        bail!("the settings leave the port to the system (0): give the URL instead");
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
    fn all_addresses_are_asked_on_this_machine() {
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
