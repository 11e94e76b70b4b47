//! Request rules: what a parsable head must not contain.
//!
//! Malformed lines and lengths are rejected by the HTTP/1.1 parser before. A head that can be parsed, but that two parsers could read differently, is rejected here for both versions: `gateway`
//! calls the check ([`ParsedHead::check`](super::ParsedHead::check)) and responds with
//! `connection: close`. Such a head never becomes a request, and is counted as an [`InvalidHead`]
//! only.

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use http::{Method, Version};

use super::framing_headers::FramingHeaders;
use crate::types::InvalidHead;

/// Checks the size of a head.
pub(super) fn check_size(parts: &Parts, max_head: usize, max_header_lines: usize) -> Result<(), InvalidHead> {
    if parts.headers.len() > max_header_lines {
        return Err(InvalidHead::TooManyLines);
    }
    if parts.version == Version::HTTP_2 && length(parts) > max_head {
        return Err(InvalidHead::TooLarge);
    }
    Ok(())
}

/// Checks all rules that do not depend on limits. `said`: by the headers of `parts`.
pub(super) fn check(parts: &Parts, said: &FramingHeaders) -> Result<(), InvalidHead> {
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        return Err(InvalidHead::Method);
    }
    if !said.has_plain_coding() {
        return Err(InvalidHead::TransferCoding);
    }
    target(parts)?;
    host(parts, said)?;
    if said.expects_otherwise { Err(InvalidHead::Expectation) } else { Ok(()) }
}

/// Approximate length on the wire: each header has four bytes of colon, space and line end.
fn length(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    parts.headers.iter().fold(target, |length, (name, value)| length + name.as_str().len() + value.len() + 4)
}

fn target(parts: &Parts) -> Result<(), InvalidHead> {
    let uri = &parts.uri;
    let web = uri.scheme_str().is_none_or(|scheme| scheme == "http" || scheme == "https");
    // An authority without a scheme is the authority form, used by CONNECT only.
    let whole = uri.authority().is_none() || uri.scheme().is_some() || parts.version == Version::HTTP_2;
    let path = uri.path().starts_with('/') || (uri.path() == "*" && parts.method == Method::OPTIONS);
    if web && whole && path { Ok(()) } else { Err(InvalidHead::Target) }
}

/// Exactly one host. If the target also names one (absolute form, `:authority`), it must be the same,
/// because two names are two readings of one request.
fn host(parts: &Parts, said: &FramingHeaders) -> Result<(), InvalidHead> {
    if said.hosts > 1 {
        return Err(InvalidHead::Host);
    }
    let named = parts.uri.authority().map(Authority::as_str);
    match (parts.headers.get(HOST), named) {
        // HTTP/1.0 has no Host; HTTP/2 has `:authority`.
        (None, None) if parts.version == Version::HTTP_10 => Ok(()),
        (None, Some(named)) if parts.version != Version::HTTP_11 => valid(named),
        (None, _) => Err(InvalidHead::Host),
        (Some(host), None) if is_plain(host.as_bytes()) => Ok(()),
        (Some(host), named) => {
            let host = host.to_str().map_err(|_| InvalidHead::Host)?;
            if named.is_some_and(|named| !named.eq_ignore_ascii_case(host)) {
                return Err(InvalidHead::Host);
            }
            valid(host)
        }
    }
}

/// A name or address with an optional port, without user info.
fn valid(host: &str) -> Result<(), InvalidHead> {
    if is_plain(host.as_bytes()) {
        return Ok(());
    }
    let authority: Authority = host.parse().map_err(|_| InvalidHead::Host)?;
    let after = authority.as_str().strip_prefix(authority.host()).ok_or(InvalidHead::Host)?;
    let port = match after.strip_prefix(':') {
        Some(port) => port.is_empty() || authority.port_u16().is_some(),
        None => after.is_empty(),
    };
    if port && !authority.host().is_empty() { Ok(()) } else { Err(InvalidHead::Host) }
}

/// Bytes of plain names.
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = 0;
    while byte < 128 {
        plain[byte] = (byte as u8).is_ascii_alphanumeric() || matches!(byte as u8, b'-' | b'.');
        byte += 1;
    }
    plain
};

/// Whether it is a name of letters, digits, hyphens and dots with an optional port, as nearly all are.
/// Others are parsed in full.
fn is_plain(host: &[u8]) -> bool {
    let name = host.iter().position(|byte| !PLAIN[usize::from(*byte)]).unwrap_or(host.len());
    let is_port = |port: &[u8]| {
        port.iter().all(u8::is_ascii_digit) && (port.len() <= 4 || port.len() == 5 && port <= b"65535".as_slice())
    };
    name > 0 && host[name..].strip_prefix(b":").map_or(name == host.len(), is_port)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::http1::ParsedHead;

    fn head(method: &str, target: &str, version: Version, lines: &[(&str, &str)]) -> ParsedHead {
        let mut request = Request::builder().method(method).uri(target).version(version);
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        ParsedHead::new(request.body(()).unwrap().into_parts().0)
    }

    fn checked(method: &str, target: &str, lines: &[(&str, &str)]) -> Result<(), InvalidHead> {
        head(method, target, Version::HTTP_11, lines).check(64 << 10, 100)
    }

    const PATH: &str = "/v1/chat/completions";

    #[test]
    fn a_plain_request_passes() {
        for host in ["gateway", "gateway:8080", "127.0.0.1:8080", "[::1]:8080", "Gateway.Example."] {
            assert_eq!(checked("POST", PATH, &[("host", host)]), Ok(()), "{host}");
        }
        assert_eq!(checked("POST", PATH, &[("host", "g"), ("expect", "100-Continue")]), Ok(()));
        assert_eq!(checked("POST", PATH, &[("host", "g"), ("transfer-encoding", "CHUNKED")]), Ok(()));
        assert_eq!(checked("OPTIONS", "*", &[("host", "g")]), Ok(()), "left to the routes: 404");
    }

    #[test]
    fn one_valid_host_is_needed() {
        assert_eq!(checked("POST", PATH, &[]), Err(InvalidHead::Host));
        assert_eq!(checked("POST", PATH, &[("host", "a"), ("host", "a")]), Err(InvalidHead::Host));
        for bad in ["a b/@c?d", "", "user@host", "a:b", "a:99999", "a/b", "[::1", "a:80:80"] {
            assert_eq!(checked("POST", PATH, &[("host", bad)]), Err(InvalidHead::Host), "{bad:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_short_way_to_a_host_takes_nothing_that_the_long_way_refuses(host in "[a-zA-Z0-9.:@-]{0,12}") {
            let Ok(authority) = host.parse::<Authority>() else {
                proptest::prop_assert!(!is_plain(host.as_bytes()));
                return Ok(());
            };
            let port = host.strip_prefix(authority.host()).is_some_and(|rest| rest.len() < 2 || authority.port().is_some());
            proptest::prop_assert!(!is_plain(host.as_bytes()) || port && !authority.host().is_empty());
        }
    }

    #[test]
    fn other_versions_name_their_host_elsewhere_or_not_at_all() {
        assert_eq!(head("POST", PATH, Version::HTTP_10, &[]).check(64 << 10, 100), Ok(()));
        let h2 = |lines| head("POST", "http://g:1/v1/models", Version::HTTP_2, lines).check(64 << 10, 100);
        assert_eq!(h2(&[]), Ok(()));
        assert_eq!(h2(&[("host", "G:1")]), Ok(()));
        assert_eq!(h2(&[("host", "other")]), Err(InvalidHead::Host));
        assert_eq!(head("POST", PATH, Version::HTTP_2, &[]).check(64 << 10, 100), Err(InvalidHead::Host));
    }

    #[test]
    fn an_absolute_target_must_agree_with_the_host() {
        let absolute = "http://evil.invalid/v1/chat/completions";
        assert_eq!(checked("POST", absolute, &[("host", "gateway")]), Err(InvalidHead::Host));
        assert_eq!(checked("POST", absolute, &[("host", "evil.invalid")]), Ok(()));
        assert_eq!(checked("POST", "ftp://gateway/v1/models", &[("host", "gateway")]), Err(InvalidHead::Target));
        assert_eq!(checked("GET", "*", &[("host", "g")]), Err(InvalidHead::Target));
        assert_eq!(checked("GET", "gateway:80", &[("host", "gateway:80")]), Err(InvalidHead::Target));
    }

    #[test]
    fn tunnels_and_echoes_are_refused() {
        assert_eq!(checked("CONNECT", "127.0.0.1:22", &[("host", "g")]), Err(InvalidHead::Method));
        assert_eq!(checked("TRACE", PATH, &[("host", "g")]), Err(InvalidHead::Method));
    }

    #[test]
    fn chunked_stands_alone() {
        for odd in ["gzip, chunked", "chunked, chunked", "chunked;q=1", "identity, chunked", "\"chunked\"", ""] {
            let lines = [("host", "g"), ("transfer-encoding", odd)];
            assert_eq!(checked("POST", PATH, &lines), Err(InvalidHead::TransferCoding), "{odd:?}");
        }
        let twice = [("host", "g"), ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")];
        assert_eq!(checked("POST", PATH, &twice), Err(InvalidHead::TransferCoding));
    }

    #[test]
    fn odd_expectations_and_too_many_lines_are_refused() {
        assert_eq!(checked("POST", PATH, &[("host", "g"), ("expect", "200-ok")]), Err(InvalidHead::Expectation));
        let lines: Vec<(&str, &str)> =
            std::iter::once(("host", "g")).chain(std::iter::repeat_n(("x", "y"), 3)).collect();
        assert_eq!(head("POST", PATH, Version::HTTP_11, &lines).check(64 << 10, 4), Ok(()));
        assert_eq!(head("POST", PATH, Version::HTTP_11, &lines).check(64 << 10, 3), Err(InvalidHead::TooManyLines));
    }

    #[test]
    fn a_head_of_http2_is_measured() {
        let long = "x".repeat(900);
        let head = head("POST", PATH, Version::HTTP_2, &[("host", "g"), ("x-long", &long)]);
        let exact = PATH.len() + "host".len() + 1 + 4 + "x-long".len() + long.len() + 4;
        assert_eq!(head.check(exact, 100), Ok(()));
        assert_eq!(head.check(exact - 1, 100), Err(InvalidHead::TooLarge));
    }
}
