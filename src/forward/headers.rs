//! Header fields that cross the gateway, in both directions.
//!
//! End-to-end fields pass, known or not. Hop-by-hop fields, credentials, fields that steer engines or
//! routers, and fields that say where a request came from do not, and neither do such names written with
//! `_` for `-`, because some servers treat both as equal. Framing fields
//! are set by the gateway.

use http::Version;
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONNECTION, HeaderMap, HeaderName, HeaderValue};

use super::gateway_headers::is_ours;
use super::header_names as names;
use crate::http1::{self, Content, Media};

/// A pool's settings of engine headers.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineHeaders<'a> {
    /// Sent with every request: `engine.headers` and the bearer token of `engine.api_key_file`.
    pub fixed: &'a [(HeaderName, HeaderValue)],
    /// Whether the client's own credential is forwarded.
    pub forward_authorization: bool,
}

/// Properties of a request beside its headers and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestMeta {
    /// Its response will be inspected, so it must not be coded.
    pub inspected: bool,
    /// Its content coding was removed.
    pub decoded: bool,
    /// It has a `connection` field, which may name others.
    pub names_hop_fields: bool,
    /// The gateway has spans, so that its `traceparent` and `tracestate` go in place of the client's.
    pub traced: bool,
}

/// Facts about the request's path that an engine is told.
#[derive(Clone, Copy, Debug)]
pub struct Hop<'a> {
    /// The address of the client's connection, if one is known.
    pub address: Option<&'a str>,
    /// The client's HTTP version.
    pub version: Version,
}

/// The gateway's span as the parent of the next one (W3C Trace Context).
#[derive(Clone, Copy, Debug)]
pub struct TraceFields<'a> {
    /// `traceparent`.
    pub parent: &'a [u8],
    /// `tracestate`, if there is any.
    pub state: Option<&'a str>,
}

impl Hop<'_> {
    /// The value of `via` (RFC 9110 section 7.6.3).
    fn via(&self) -> &'static [u8] {
        match self.version {
            Version::HTTP_2 => b"2.0 goodput",
            Version::HTTP_10 => b"1.0 goodput",
            _ => b"1.1 goodput",
        }
    }
}

/// The lines of a request's head that are the same in every request of a client's connection whose
/// fields are the same: those of the client that cross to the engines of a pool, and the pool's own.
pub struct RequestLines {
    text: Vec<u8>,
    /// Position of the id.
    id_at: usize,
    /// The pool's settings replace it.
    fixes_host: bool,
    fixes_id: bool,
    fixes_parent: bool,
    fixes_state: bool,
}

impl RequestLines {
    /// Those of a client with these fields.
    #[must_use]
    pub fn of(client: &HeaderMap, engine: &EngineHeaders<'_>, sent: RequestMeta, hop: Hop<'_>) -> Self {
        let EngineHeaders { fixed, .. } = *engine;
        let named = if sent.names_hop_fields { named_by_connection(client) } else { Vec::new() };
        // Headers that the pool's settings replace.
        let is_fixed = |name: &str| fixed.iter().any(|(own, _)| own.as_str() == name);
        let mut text = Vec::with_capacity(USUAL_LINES);
        let mut put = |name: &str, value: &[u8]| {
            if !is_fixed(name) {
                http1::put_line(&mut text, name, value);
            }
        };
        for (name, value) in client {
            if crosses(name, engine, sent, &named) {
                put(name.as_str(), value.as_bytes());
            }
        }
        if sent.inspected {
            put("accept-encoding", b"identity");
        }
        if let Some(address) = hop.address {
            put(names::X_FORWARDED_FOR, address.as_bytes());
        }
        let id_at = text.len();
        let mut put = |name: &str, value: &[u8]| http1::put_line(&mut text, name, value);
        if !is_fixed(names::VIA) {
            put(names::VIA, hop.via());
        }
        fixed.iter().for_each(|(name, value)| put(name.as_str(), value.as_bytes()));
        RequestLines {
            text,
            id_at,
            fixes_host: is_fixed("host"),
            fixes_id: is_fixed(names::REQUEST_ID),
            fixes_parent: is_fixed(names::TRACEPARENT),
            fixes_state: is_fixed(names::TRACESTATE),
        }
    }

    /// Writes them into a head, with the parts that differ per attempt: the engine's authority, the request
    /// id, and the span of this attempt.
    pub fn put(&self, head: &mut Vec<u8>, host: Option<&HeaderValue>, id: &[u8], trace: Option<TraceFields<'_>>) {
        if let Some(host) = host.filter(|_| !self.fixes_host) {
            http1::put_line(head, "host", host.as_bytes());
        }
        let (before_id, behind_id) = self.text.split_at(self.id_at);
        head.extend_from_slice(before_id);
        if !self.fixes_id {
            http1::put_line(head, names::REQUEST_ID, id);
        }
        if let Some(TraceFields { parent, state }) = trace {
            if !self.fixes_parent {
                http1::put_line(head, names::TRACEPARENT, parent);
            }
            if let Some(state) = state.filter(|_| !self.fixes_state) {
                http1::put_line(head, names::TRACESTATE, state.as_bytes());
            }
        }
        head.extend_from_slice(behind_id);
    }
}

/// Room for the lines of most clients.
const USUAL_LINES: usize = 512;

/// Whether a field of the client crosses to an engine. `named`: those that `Connection` names.
fn crosses(name: &HeaderName, engine: &EngineHeaders<'_>, sent: RequestMeta, named: &[HeaderName]) -> bool {
    let known = name.as_str();
    let stays_here = match fate(known) {
        HeaderAction::Passes => false,
        HeaderAction::Underscored => {
            let meant = known.replace('_', "-");
            fate(&meant) != HeaderAction::Passes
                || engine.fixed.iter().any(|(own, _)| own.as_str() == meant)
                || named.iter().any(|name| name.as_str() == meant)
        }
        HeaderAction::StaysHere => true,
        HeaderAction::Credential => !engine.forward_authorization,
        HeaderAction::Coding => sent.decoded,
        HeaderAction::Accepts => sent.inspected,
        HeaderAction::Trace => sent.traced,
    };
    !stays_here && !named.contains(name)
}

/// Whether the client's own credential is forwarded: it is not empty, and the pool does not replace
/// it.
#[must_use]
pub fn forwards_credential(client: &HeaderMap, engine: &EngineHeaders<'_>) -> bool {
    let crosses = |name: &HeaderName| {
        let is_fixed = engine.fixed.iter().any(|(own, _)| own == name);
        !is_fixed && client.get_all(name).iter().any(says_who) && !named_by_connection(client).contains(name)
    };
    engine.forward_authorization && [AUTHORIZATION, names::X_API_KEY, names::API_KEY].iter().any(crosses)
}

/// A scheme alone is not a credential.
fn says_who(value: &HeaderValue) -> bool {
    let value = value.as_bytes().trim_ascii();
    !value.is_empty() && !value.eq_ignore_ascii_case(b"bearer") && !value.eq_ignore_ascii_case(b"basic")
}

/// Treatment of a client's header.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeaderAction {
    Passes,
    /// Passes if the name with `-` for `_` does.
    Underscored,
    /// Dropped: hop-by-hop, set by the gateway, or steering.
    StaysHere,
    /// Passes if the pool forwards credentials.
    Credential,
    /// The body's content coding.
    Coding,
    /// The accepted content codings.
    Accepts,
    /// Says in which trace the request is.
    Trace,
}

fn fate(name: &str) -> HeaderAction {
    match name {
        "content-type" | "user-agent" | "accept" => HeaderAction::Passes,
        "expect" | "content-length" | "host" | names::REQUEST_ID => HeaderAction::StaysHere,
        "authorization" | "x-api-key" | "cookie" | "api-key" => HeaderAction::Credential,
        "content-encoding" => HeaderAction::Coding,
        "accept-encoding" => HeaderAction::Accepts,
        names::TRACEPARENT | names::TRACESTATE => HeaderAction::Trace,
        _ if is_of_one_hop(name) || steers(name) => HeaderAction::StaysHere,
        _ if name.contains('_') => HeaderAction::Underscored,
        _ => HeaderAction::Passes,
    }
}

/// Hop-by-hop headers (RFC 9110 section 7.6.1), and those that ask for an upgrade.
fn is_of_one_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "http2-settings"
    )
}

/// Headers by which a client could steer an engine or router past the gateway's decisions, or claim where
/// the request comes from.
fn steers(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("x-") else {
        return name.starts_with("kv-transfer")
            || matches!(
                name,
                "routing-strategy" | "target-pod" | "forwarded" | "via" | "true-client-ip" | "cf-connecting-ip"
            );
    };
    let [first, .., last] = rest.as_bytes() else { return false };
    begins_as_steering(*first, rest) || ends_as_steering(*last, rest)
}

/// Prefixes of such headers: router families, parts of a fleet, the gateway's own names, and claims of
/// origin. Dispatches on the first byte, so that an ordinary header costs one or two
/// comparisons.
fn begins_as_steering(first: u8, rest: &str) -> bool {
    match first {
        b'c' => rest == "client-ip" || rest == "cluster-client-ip",
        b'd' => rest.starts_with("dynamo-"),
        b'e' => rest == "enable-local-updates",
        b'f' => rest.starts_with("forwarded"),
        b'g' => {
            let families = ["gateway-destination", "gateway-inference", "gateway-model", "goodput-"];
            families.iter().any(|own| rest.starts_with(own))
        }
        b'k' => rest.starts_with("kv-"),
        b'l' => rest.starts_with("llm-d-"),
        b'o' => rest == "original-forwarded-for",
        b'p' => rest.starts_with("prefill"),
        b'r' => rest == "real-ip",
        b's' => ["smg-", "sgl-", "slo-"].iter().any(|own| rest.starts_with(own)),
        b'v' => rest == "vllm-priority",
        b'w' => rest.starts_with("worker-"),
        _ => false,
    }
}

/// Suffixes of such headers: a place, a rank, an instance, a share of the fleet.
fn ends_as_steering(last: u8, rest: &str) -> bool {
    match last {
        b'd' => ["-instance-id", "-worker-id", "-fairness-id"].iter().any(|own| rest.ends_with(own)),
        b'e' => rest.ends_with("-objective"),
        b'k' => rest.ends_with("-rank"),
        b'r' => rest.ends_with("-worker"),
        b's' => rest.ends_with("-hosts-ports"),
        b't' => rest.ends_with("-host-port") || rest.ends_with("-destination-endpoint"),
        _ => false,
    }
}

/// The headers for the client, from an engine's: without the gateway's own names, hop-by-hop fields and
/// those named by `Connection`, and references to inner addresses. `Content-Length` passes only if it is
/// the body's `length`: not beside a transfer coding (RFC 9112 section 6.3), not on a 204. An event
/// stream loses it (events may be added or removed) and gets headers against buffering. An iterator
/// consumed while the head is written, so that no map is built.
pub fn for_client(
    engine: &HeaderMap,
    content: Content,
    length: Option<u64>,
) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    let is_event_stream = content.media == Media::Events;
    let length = length.filter(|_| !is_event_stream);
    let named = if content.has_connection { named_by_connection(engine) } else { Vec::new() };
    let crosses = move |(name, value): &(&HeaderName, &HeaderValue)| match name.as_str() {
        "content-length" => length.is_some() && http1::stated_length(value.as_bytes()) == length,
        known if is_of_one_hop(known) || is_ours(known) || named.contains(name) => false,
        known => !leads_inside(known, value.as_bytes()),
    };
    let gained = UNBUFFERED.iter().filter(move |(name, _)| is_event_stream && !engine.contains_key(name));
    engine.iter().filter(crosses).chain(gained.map(|(name, value)| (name, value)))
}

/// Whether an engine's header reveals inner addresses: a reference with an authority, or alternative
/// services of the engine's origin. A reference without an authority is a path of the
/// gateway.
fn leads_inside(name: &str, value: &[u8]) -> bool {
    match name {
        "alt-svc" | "alt-used" | "via" => true,
        "location" | "content-location" | "link" | "refresh" => has_authority(value),
        _ => false,
    }
}

/// Whether a reference in this value may name a host: it has a scheme, or two slashes. Browsers read a
/// backslash as a slash, and `http:host` and `http:/host` as `http://host`.
fn has_authority(value: &[u8]) -> bool {
    let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
    let ends_scheme = |colon: usize| {
        let is_of_scheme = |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let from = colon - value[..colon].iter().rev().take_while(is_of_scheme).count();
        let begins = from == 0 || matches!(value[from - 1], b' ' | b'\t' | b'<' | b'=' | b'"' | b'\'' | b';' | b',');
        begins && value[from].is_ascii_alphabetic()
    };
    value.windows(2).any(|pair| pair.iter().all(is_slash)) || memchr::memchr_iter(b':', value).any(ends_scheme)
}

/// Headers that keep proxies from buffering an event stream.
pub static UNBUFFERED: [(HeaderName, HeaderValue); 2] = [
    (names::X_ACCEL_BUFFERING, HeaderValue::from_static("no")),
    (CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform")),
];

/// The headers named by `Connection`.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    if !headers.contains_key(CONNECTION) {
        return Vec::new();
    }
    let values = headers.get_all(CONNECTION).iter();
    let tokens = values.flat_map(|value| http1::elements(value.as_bytes()));
    tokens.filter_map(|token| HeaderName::from_bytes(token).ok()).collect()
}

/// Whether a client's `x-request-id` is kept: 1 to 128 visible ASCII characters of the usual id
/// alphabet.
#[must_use]
pub fn is_fit_id(value: &HeaderValue) -> bool {
    let bytes = value.as_bytes();
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    (1..=128).contains(&bytes.len()) && bytes.iter().all(fits)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::names::*;
    use super::*;
    use crate::forward::GatewayHeaders;
    use crate::types::RequestId;
    use http::header::{ACCEPT_ENCODING, HOST};

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        let field = |(name, value): &(&str, &str)| {
            (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
        };
        fields.iter().map(field).collect()
    }

    const INSPECTED: RequestMeta =
        RequestMeta { inspected: true, decoded: false, names_hop_fields: true, traced: false };

    fn to_engine(fields: &[(&str, &str)]) -> HeaderMap {
        sent_to(&EngineHeaders::default(), INSPECTED, fields)
    }

    fn sent_to(engine: &EngineHeaders<'_>, sent: RequestMeta, fields: &[(&str, &str)]) -> HeaderMap {
        let hop = Hop { address: Some("192.0.2.7"), version: Version::HTTP_11 };
        put(&RequestLines::of(&map(fields), engine, sent, hop), None)
    }

    fn put(lines: &RequestLines, host: Option<&'static str>) -> HeaderMap {
        let mut head = Vec::new();
        lines.put(&mut head, host.map(HeaderValue::from_static).as_ref(), b"up-1", None);
        let lines = std::str::from_utf8(&head).unwrap().split_terminator("\r\n");
        map(&lines.map(|line| line.split_once(": ").unwrap()).collect::<Vec<_>>())
    }

    fn to_client(engine: &HeaderMap, length: Option<u64>) -> HeaderMap {
        let mut client = HeaderMap::new();
        for (name, value) in for_client(engine, Content::of(engine), length) {
            client.append(name, value.clone());
        }
        client
    }

    #[test]
    fn c61_hop_by_hop_and_connection_named_fields_stay_here() {
        let sent = to_engine(&[
            ("connection", "x-secret-hop, close"),
            ("x-secret-hop", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAMA"),
            ("proxy-authorization", "Basic eA=="),
            ("transfer-encoding", "chunked"),
            ("x-unknown", "stays"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ]);
        let names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        assert_eq!(sent.len(), 6, "{names:?}");
        assert_eq!(sent["x-unknown"], "stays");
        assert!(sent.contains_key("traceparent"));
        assert_eq!(sent["accept-encoding"], "identity");
        assert_eq!(sent["x-request-id"], "up-1");
    }

    #[test]
    fn credentials_and_steering_fields_never_reach_an_engine() {
        let sent = to_engine(&[
            ("authorization", "Bearer k"),
            ("x-api-key", "k"),
            ("cookie", "s=1"),
            ("x-vllm-priority", "-5"),
            ("x-data-parallel-rank", "1"),
            ("kv-transfer-mode", "x"),
            ("x-gateway-inference-fairness-id", "x"),
            ("x-gateway-inference-objective", "x"),
            ("x-gateway-destination-endpoint", "10.0.0.1:1"),
        ]);
        assert_eq!(sent.len(), 4, "{sent:?}");
    }

    #[test]
    fn c100_an_engine_hears_from_us_where_a_request_comes_from() {
        for (name, value) in [
            ("x-forwarded-for", "10.9.9.9"),
            ("x-forwarded-for", "10.9.9.9, 10.8.8.8"),
            ("x_forwarded_for", "10.9.9.9"),
            ("x-forwarded-host", "evil"),
            ("x-forwarded-proto", "https"),
            ("forwarded", "for=10.9.9.9"),
            ("via", "1.1 evil"),
            ("x-real-ip", "10.9.9.9"),
            ("x_real-ip", "10.9.9.9"),
            ("x-client-ip", "10.9.9.9"),
            ("x-slo-class", "evil"),
            ("x-slo-ttft-ms", "1"),
            ("x_slo_ttft_ms", "1"),
            ("x-goodput-pool", "evil"),
        ] {
            let sent = to_engine(&[(name, value)]);
            let said: Vec<_> = sent.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
            let expected = [
                ("accept-encoding", "identity"),
                ("x-forwarded-for", "192.0.2.7"),
                ("x-request-id", "up-1"),
                ("via", "1.1 goodput"),
            ];
            assert_eq!(said, expected, "{name}");
        }
        for (version, via) in [(Version::HTTP_10, "1.0 goodput"), (Version::HTTP_2, "2.0 goodput")] {
            let hop = Hop { address: None, version };
            let sent = put(&RequestLines::of(&HeaderMap::new(), &EngineHeaders::default(), INSPECTED, hop), None);
            let said: Vec<_> =
                sent.iter().skip(1).map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
            assert_eq!(said, [("x-request-id", "up-1"), ("via", via)]);
        }
    }

    #[test]
    fn c100_an_underscore_does_not_smuggle_a_name_that_is_removed() {
        let sent = to_engine(&[
            ("x_data_parallel_rank", "1"),
            ("x-data_parallel-rank", "1"),
            ("kv_transfer_params", "{}"),
            ("proxy_authorization", "Basic eA=="),
            ("x_api_key", "k"),
            ("content_length", "9"),
            ("transfer_encoding", "chunked"),
            ("content_encoding", "gzip"),
            ("accept_encoding", "gzip"),
            ("x_request_id", "mine"),
            ("connection", "x-secret-hop"),
            ("x_secret_hop", "1"),
            ("x_trace_id", "t"),
            ("_", "u"),
        ]);
        let names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x_trace_id", "_", "accept-encoding", "x-forwarded-for", "x-request-id", "via"]);
        let engine = EngineHeaders {
            fixed: &[(HeaderName::from_static("x-team"), HeaderValue::from_static("ours"))],
            forward_authorization: true,
        };
        let sent = sent_to(&engine, INSPECTED, &[("x_team", "theirs"), ("x_api_key", "k")]);
        assert_eq!((sent.get("x_team"), &sent["x-team"]), (None, &HeaderValue::from_static("ours")));
        assert!(!sent.contains_key("x_api_key"));
    }

    #[test]
    fn what_steers_is_known_by_its_family_or_shape() {
        for name in [
            "kv-transfer-params",
            "routing-strategy",
            "target-pod",
            "x-data-parallel-host-port",
            "x-data-parallel-rank",
            "x-dp-rank",
            "x-dynamo-routing-mode",
            "x-dynamo-worker-instance-id",
            "x-enable-local-updates",
            "x-encoder-hosts-ports",
            "x-gateway-model-name",
            "x-kv-cache-source-host-port",
            "x-llm-d-reserved-host-port",
            "x-prefill-dp-rank",
            "x-prefill-instance-id",
            "x-prefiller-host-port",
            "x-prefiller-url",
            "x-sgl-routing-key",
            "x-smg-routing-key",
            "x-smg-target-worker",
            "x-target-worker",
            "x-tenant-fairness-id",
            "x-vsr-destination-endpoint",
            "x-worker-instance-id",
        ] {
            let sent = to_engine(&[(name, "10.0.0.1:1")]);
            assert!(!sent.contains_key(name), "{name}");
        }
    }

    #[test]
    fn ordinary_fields_do_not_look_like_steering() {
        for name in [
            "anthropic-version",
            "baggage",
            "openai-organization",
            "traceparent",
            "tracestate",
            "x",
            "x-",
            "x-a",
            "x-amzn-trace-id",
            "x-b3-spanid",
            "x-client-request-id",
            "x-correlation-id",
            "x-instance-id",
            "x-rank",
            "x-session-id",
            "x-stainless-arch",
            "x-stainless-async",
            "x-stainless-lang",
            "x-stainless-os",
            "x-stainless-package-version",
            "x-stainless-read-timeout",
            "x-stainless-retry-count",
            "x-stainless-runtime",
            "x-stainless-runtime-version",
            "x-user-id",
        ] {
            let sent = to_engine(&[(name, "1")]);
            assert!(sent.contains_key(name), "{name}");
        }
    }

    #[test]
    fn a_pool_puts_its_own_credential_in_place_of_the_clients() {
        let engine = EngineHeaders {
            fixed: &[(AUTHORIZATION, HeaderValue::from_static("Bearer engine"))],
            forward_authorization: true,
        };
        let sent = RequestMeta { inspected: false, ..INSPECTED };
        let headers = sent_to(&engine, sent, &[("authorization", "Bearer client"), ("host", "us")]);
        assert_eq!(headers.get_all("authorization").iter().count(), 1);
        assert_eq!(headers["authorization"], "Bearer engine");
        assert!(!headers.contains_key(ACCEPT_ENCODING));
    }

    #[test]
    fn an_engine_is_called_by_its_own_name_or_by_what_its_pool_says() {
        let fixed = [
            (HOST, HeaderValue::from_static("pool")),
            (HeaderName::from_static(REQUEST_ID), HeaderValue::from_static("all")),
            (HeaderName::from_static(VIA), HeaderValue::from_static("1.1 pool")),
        ];
        for (fixed, host, id, via) in
            [(&[][..], "vllm-0:8000", "up-1", "1.1 goodput"), (&fixed, "pool", "all", "1.1 pool")]
        {
            let (engine, hop) =
                (EngineHeaders { fixed, ..EngineHeaders::default() }, Hop { address: None, version: Version::HTTP_11 });
            let sent = put(&RequestLines::of(&map(&[("host", "us")]), &engine, INSPECTED, hop), Some("vllm-0:8000"));
            for (name, value) in [("host", host), (REQUEST_ID, id), ("via", via)] {
                assert_eq!(sent.get_all(name).iter().collect::<Vec<_>>(), [value]);
            }
        }
    }

    #[test]
    fn a_credential_counts_as_forwarded_only_where_it_was() {
        let pools = [(AUTHORIZATION, HeaderValue::from_static("Bearer engine"))];
        let forwards = |fixed, fields: &[(&str, &str)]| {
            let engine = EngineHeaders { fixed, forward_authorization: true };
            forwards_credential(&map(fields), &engine)
        };
        for (fields, expected) in [
            (&[("authorization", "Bearer client")][..], true),
            (&[("authorization", "Basic eA==")], true),
            (&[("x-api-key", "k")], true),
            (&[("api-key", "k")], true),
            (&[], false),
            (&[("x-api-key", "")], false),
            (&[("authorization", "Bearer ")], false),
            (&[("authorization", "Bearer client"), ("connection", "Authorization")], false),
        ] {
            assert_eq!(forwards(&[], fields), expected, "{fields:?}");
            assert!(!forwards_credential(&map(fields), &EngineHeaders::default()), "{fields:?}");
        }
        assert!(!forwards(&pools, &[("authorization", "Bearer client")]));
        assert!(forwards(&pools, &[("authorization", "Bearer client"), ("x-api-key", "k")]));
    }

    #[test]
    fn c60_an_event_stream_is_marked_against_buffering_unless_the_engine_said_otherwise() {
        let headers = map(&[("content-type", "Text/Event-Stream; charset=utf-8"), ("content-length", "9")]);
        assert_eq!(Content::of(&headers).media, Media::Events);
        let headers = to_client(&headers, None);
        assert_eq!(headers["x-accel-buffering"], "no");
        assert_eq!(headers["cache-control"], "no-cache, no-transform");
        assert!(!headers.contains_key("content-length"));
        let headers =
            map(&[("content-type", "text/event-stream"), ("cache-control", "private"), ("x-accel-buffering", "yes")]);
        let headers = to_client(&headers, None);
        assert_eq!(
            (&headers["cache-control"], &headers["x-accel-buffering"]),
            (&"private".parse().unwrap(), &"yes".parse().unwrap())
        );
    }

    const OURS: [&str; 6] =
        [REQUEST_ID, X_SLO_CLASS, X_GOODPUT_POOL, X_GOODPUT_DEGRADED, GOODPUT_REASON, SERVER_TIMING];

    #[test]
    fn no_field_of_an_engine_wears_one_of_our_names_but_its_times() {
        let ours = HeaderValue::from_static("ours");
        let of_engine = OURS.map(|name| (name, "the engine's"));
        for known in [Some(ours), None] {
            let (class, pool, degraded) = (known.clone(), known.clone(), known.clone());
            let times = known.map(|_| [Duration::from_micros(1_500), Duration::from_secs(2)]);
            let own = GatewayHeaders { class, pool, degraded, times, ..GatewayHeaders::of(&RequestId::from("ours")) };
            let mut headers = to_client(&map(&of_engine), None);
            own.add_to(&mut headers);
            let shown = |name: &&str| headers.get_all(*name).iter().map(|value| value.to_str().unwrap()).collect();
            let shown: Vec<Vec<&str>> = OURS.iter().map(shown).collect();
            let expected: [&[&str]; 6] = match own.times {
                Some(_) => [
                    &["ours"],
                    &["ours"],
                    &["ours"],
                    &["ours"],
                    &[],
                    &["the engine's", "queue;dur=1.500, upstream;dur=2000.000"],
                ],
                None => [&["ours"], &[], &[], &[], &[], &["the engine's"]],
            };
            assert_eq!(shown, expected);
        }
    }

    #[test]
    fn a_length_goes_out_only_where_it_is_that_of_the_body() {
        for (kind, stated, length, goes) in [
            ("application/json", "9", Some(9), true),
            ("application/json", "9", Some(8), false),
            ("application/json", "9", None, false),
            ("application/json", "9, 9", Some(9), false),
            ("text/event-stream", "9", Some(9), false),
        ] {
            let headers = to_client(&map(&[("content-type", kind), ("content-length", stated)]), length);
            assert_eq!(headers.contains_key("content-length"), goes, "{kind} {stated} {length:?}");
        }
    }

    #[test]
    fn only_identity_is_no_coding() {
        assert!(!Content::of(&map(&[])).is_coded);
        assert!(!Content::of(&map(&[("content-encoding", "Identity")])).is_coded);
        assert!(Content::of(&map(&[("content-encoding", "gzip")])).is_coded);
        assert!(Content::of(&map(&[("content-encoding", "identity"), ("content-encoding", "br")])).is_coded);
    }

    #[test]
    fn ids_with_spaces_or_of_great_length_are_not_kept() {
        assert!(is_fit_id(&HeaderValue::from_static("req-42_a.b")));
        assert!(!is_fit_id(&HeaderValue::from_static("a b")));
        assert!(!is_fit_id(&HeaderValue::from_str(&"x".repeat(129)).unwrap()));
        assert!(!is_fit_id(&HeaderValue::from_static("")));
    }
}
