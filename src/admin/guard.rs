//! Protection of the admin port when no token identifies the caller.
//!
//! A page of another site can make a browser on the operator's machine send requests here: by a name of its
//! own that resolves to this address (DNS rebinding), or by a form. Without a token, only names that no other
//! site can have are accepted, and a browser's writes count only from pages of this port.

use std::net::{IpAddr, SocketAddr};

use http::header::{HOST, ORIGIN, REFERER};
use http::uri::{Authority, Uri};
use http::{HeaderMap, Method};

/// Names under which the port is reached.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    /// Further ones than those of this machine, in lower case.
    pub names: Vec<String>,
    /// The port listens beyond this machine, so any IP address is accepted: a site cannot have an address as
    /// its name without being there.
    pub any_address: bool,
}

impl Hosts {
    /// For a port at this address, with these names.
    #[must_use]
    pub fn of(address: SocketAddr, names: &[String]) -> Self {
        let names = names.iter().map(|name| name.to_ascii_lowercase()).collect();
        Hosts { names, any_address: !address.ip().to_canonical().is_loopback() }
    }

    /// Whether a request names one of them, in its target and in each `Host` field. A browser
    /// always names one.
    pub(super) fn are_named(&self, target: &Uri, headers: &HeaderMap) -> bool {
        let in_target = target.authority().is_none_or(|authority| self.has(authority));
        let named = headers.get_all(HOST).iter().map(|value| value.to_str().ok()?.parse().ok());
        in_target && named.into_iter().all(|named: Option<Authority>| named.is_some_and(|named| self.has(&named)))
    }

    fn has(&self, authority: &Authority) -> bool {
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        match bare.parse::<IpAddr>() {
            Ok(address) => self.any_address || address.to_canonical().is_loopback(),
            Err(_) => {
                let name = bare.strip_suffix('.').unwrap_or(bare);
                name.eq_ignore_ascii_case("localhost") || self.names.iter().any(|own| name.eq_ignore_ascii_case(own))
            }
        }
    }
}

/// Whether a browser sends this for a page of another site, to change something.
pub(super) fn is_cross_site_write(method: &Method, headers: &HeaderMap) -> bool {
    if method.is_safe() {
        return false;
    }
    let site = headers.get("sec-fetch-site").map(|value| value.as_bytes());
    if site.is_some_and(|site| site != b"same-origin" && site != b"none") {
        return true;
    }
    let from = headers.get(ORIGIN).or_else(|| headers.get(REFERER));
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    from.is_some_and(|from| {
        let from = from.to_str().ok().and_then(|from| from.parse::<Uri>().ok());
        let from = from.as_ref().and_then(Uri::authority).map(Authority::as_str);
        from.is_none() || host.is_none_or(|host| !from.is_some_and(|from| from.eq_ignore_ascii_case(host)))
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::HeaderName;

    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn c101_only_names_that_no_other_site_can_have_are_answered() {
        let local = Hosts::of("127.0.0.1:9090".parse().unwrap(), &["Goodput".to_owned()]);
        let open = Hosts::of("0.0.0.0:9090".parse().unwrap(), &[]);
        for (host, by_local, by_open) in [
            ("localhost:9090", true, true),
            ("LOCALHOST", true, true),
            ("localhost.:1", true, true),
            ("127.0.0.1:9090", true, true),
            ("127.9.9.9", true, true),
            ("[::1]:9090", true, true),
            ("goodput:9090", true, false),
            ("10.0.0.5:9090", false, true),
            ("[2001:db8::1]", false, true),
            ("evil.example:9090", false, false),
            ("localhost.evil.example", false, false),
            ("127.0.0.1.evil.example", false, false),
            ("xgoodput", false, false),
            ("evil@localhost", true, true),
            ("local host", false, false),
            ("", false, false),
        ] {
            let map = headers(&[("host", host)]);
            let target = Uri::from_static("/slo");
            assert_eq!((local.are_named(&target, &map), open.are_named(&target, &map)), (by_local, by_open), "{host}");
        }
        let none = headers(&[]);
        assert!(local.are_named(&Uri::from_static("/slo"), &none), "no browser leaves it out");
        assert!(!local.are_named(&Uri::from_static("http://evil.example/slo"), &headers(&[("host", "localhost")])));
        let two: HeaderMap =
            ["localhost", "evil.example"].map(|host| (HOST, HeaderValue::from_static(host))).into_iter().collect();
        assert!(two.len() == 1 || !local.are_named(&Uri::from_static("/"), &two));
    }

    #[test]
    fn c101_a_browser_changes_nothing_for_a_page_of_another_site() {
        for (fields, expected) in [
            (&[][..], false),
            (&[("host", "localhost:9090"), ("origin", "http://localhost:9090")], false),
            (&[("host", "localhost:9090"), ("sec-fetch-site", "same-origin")], false),
            (&[("host", "localhost:9090"), ("sec-fetch-site", "none")], false),
            (&[("host", "localhost:9090"), ("origin", "http://evil.example")], true),
            (&[("host", "localhost:9090"), ("origin", "http://localhost:3000")], true),
            (&[("host", "localhost:9090"), ("origin", "null")], true),
            (&[("host", "localhost:9090"), ("referer", "http://evil.example/x")], true),
            (&[("host", "localhost:9090"), ("referer", "http://localhost:9090/")], false),
            (&[("host", "localhost:9090"), ("sec-fetch-site", "cross-site")], true),
            (&[("host", "localhost:9090"), ("sec-fetch-site", "same-site")], true),
            (
                &[("host", "localhost:9090"), ("origin", "http://localhost:9090"), ("sec-fetch-site", "cross-site")],
                true,
            ),
        ] {
            assert_eq!(is_cross_site_write(&Method::POST, &headers(fields)), expected, "{fields:?}");
            assert!(!is_cross_site_write(&Method::GET, &headers(fields)), "{fields:?}");
        }
    }
}
