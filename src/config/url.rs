//! The URL of an engine.

use std::sync::Arc;

use crate::route::settings::{EngineAddress, Scheme};

/// An invalid URL.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadUrl {
    /// The problem, without the URL.
    pub wrong: &'static str,
    /// A probable correction.
    pub meant: Option<String>,
}

/// Longest path prefix, because a request's URI must remain valid.
const LONGEST_BASE: usize = 4096;

/// Parses the URL of an engine.
pub(crate) fn engine_address(text: &str) -> Result<EngineAddress, BadUrl> {
    let bad = |wrong| BadUrl { wrong, meant: None };
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(BadUrl { wrong: "is not a URL", meant: with_scheme(text) });
    };
    let scheme = match scheme {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        other => {
            let lower = other.to_ascii_lowercase();
            let meant = matches!(lower.as_str(), "http" | "https").then(|| format!("{lower}://{rest}"));
            let meant = meant.filter(|meant| engine_address(meant).is_ok());
            return Err(BadUrl { wrong: "has neither http nor https as its scheme", meant });
        }
    };
    if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(bad("holds a blank"));
    }
    if rest.contains(['?', '#']) {
        return Err(bad("has a query or a fragment"));
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if authority.contains('@') {
        return Err(bad("carries credentials; they belong into `engine.api_key_file` or `engine.headers`"));
    }
    let authority: http::uri::Authority = authority.parse().map_err(|_| bad("has no readable host and port"))?;
    let host = authority.host();
    let port = match authority.as_str()[host.len()..].strip_prefix(':') {
        None => scheme.default_port(),
        Some(digits) => {
            digits.parse().ok().filter(|port| *port > 0).ok_or_else(|| bad("has no port from 1 to 65535"))?
        }
    };
    if !is_host(host) {
        return Err(bad("has no readable host"));
    }
    let base = path.trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base).trim_end_matches('/');
    let is_plain = format!("{base}/").parse::<http::uri::PathAndQuery>().is_ok() && !base.contains("//");
    if base.len() > LONGEST_BASE {
        return Err(bad("has a path of more than 4096 bytes"));
    }
    if !is_plain || base.split('/').any(|step| step == "." || step == "..") {
        return Err(bad("has a path that cannot be sent"));
    }
    Ok(EngineAddress { scheme, host: host.to_ascii_lowercase().into(), port, base: Arc::from(base), name: None })
}

/// Whether it is a host name, an IPv4 address, or an IPv6 address in brackets.
pub(super) fn is_host(host: &str) -> bool {
    match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let in_label = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let labels = || host.strip_suffix('.').unwrap_or(host).split('.');
            host.len() <= 253
                && labels().all(|label| !label.is_empty() && label.len() <= 63 && label.chars().all(in_label))
        }
    }
}

/// Corrects `http//host`, `http:/host`, `//host` and `host:8000`.
fn with_scheme(text: &str) -> Option<String> {
    let text = text.trim();
    let begins = |scheme: &str| {
        let (head, rest) = text.split_at_checked(scheme.len())?;
        (head.eq_ignore_ascii_case(scheme) && rest.starts_with([':', '/'])).then_some(rest)
    };
    let (scheme, rest) = match (begins("https"), begins("http")) {
        (Some(rest), _) => ("https", rest),
        (None, Some(rest)) => ("http", rest),
        (None, None) => ("http", text),
    };
    let meant = format!("{scheme}://{}", rest.trim_start_matches([':', '/']));
    engine_address(&meant).is_ok().then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_url_with_and_without_its_end_is_one_engine() {
        let table = [
            ("http://vllm-0:8000", "http://vllm-0:8000"),
            ("http://vllm-0:8000/", "http://vllm-0:8000"),
            ("http://vllm-0:8000/v1", "http://vllm-0:8000"),
            ("http://vllm-0:8000/v1/", "http://vllm-0:8000"),
            ("https://engines.example", "https://engines.example:443"),
            ("http://engines.example/team/a/v1", "http://engines.example:80/team/a"),
            ("http://[::1]:8000", "http://[::1]:8000"),
            ("http://10.0.0.7:9", "http://10.0.0.7:9"),
            ("http://VLLM-0:8000", "http://vllm-0:8000"),
        ];
        for (text, expected) in table {
            assert_eq!(engine_address(text).map(|url| url.to_string()), Ok(expected.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_slip_is_seen_through() {
        let table = [
            ("http//gpu-3:8000", Some("http://gpu-3:8000")),
            ("http:/gpu-3:8000", Some("http://gpu-3:8000")),
            ("https:gpu-3:8000", Some("https://gpu-3:8000")),
            ("gpu-3:8000", Some("http://gpu-3:8000")),
            ("//gpu-3:8000/v1", Some("http://gpu-3:8000/v1")),
            ("HTTP://gpu-3", Some("http://gpu-3")),
            ("HTTP://gpu-3:0", None),
            ("ftp://gpu-3", None),
            ("http://", None),
            ("http://gpu-3:0", None),
            ("http://gpu-3:99999", None),
            ("http://gpu-3:8000?x=1", None),
            ("http://user:secret@gpu-3:8000", None),
            ("http://gpu 3:8000", None),
            ("http://gpu-3:8000/a/../b", None),
            ("http://gpu..3", None),
        ];
        for (text, meant) in table {
            assert_eq!(engine_address(text).unwrap_err().meant.as_deref(), meant, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_breaks_the_reading(text in "(https?:/{0,2})?[\\PC]{0,20}") {
            let _ = engine_address(&text);
        }
    }
}
