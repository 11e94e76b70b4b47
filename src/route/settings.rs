//! Settings of pools and routes, complete and checked.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;
use secrecy::SecretString;

use crate::admit::queue;
use crate::types::{ClassId, EngineId, Glob, PoolId};

/// A pool of interchangeable engines.
#[derive(Clone, Debug)]
pub struct PoolSettings {
    /// Its name.
    pub id: PoolId,
    /// Its engines.
    pub engines: EngineSource,
    /// Their kind.
    pub kind: EngineKind,
    /// Bearer token for the engines, from `engine.api_key_file`.
    pub api_key: Option<SecretString>,
    /// Headers set on every request to the engines; their values are marked sensitive.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Roots that replace the system's for `https` engines, from `engine.ca_file`.
    pub roots: Option<Arc<[CertificateDer<'static>]>>,
    /// Whether the client's own credential is forwarded.
    pub forward_authorization: bool,
    /// Whether the engines schedule by priority, so that requests carry one.
    pub engine_priority: bool,
    /// How an engine is chosen.
    pub balance: Balance,
    /// Concurrent requests per engine.
    pub concurrency: Concurrency,
    /// Bounds of `auto`.
    pub seat_bounds: SeatBounds,
    /// Queue settings.
    pub queue: queue::QueueSettings,
    /// Health checks; `None`: `health: off`.
    pub health: Option<HealthCheck>,
    /// Scraping of the engines' metrics; `None`: `metrics: off`, and by default for kind
    /// `generic`.
    pub metrics: Option<MetricsScrape>,
    /// Time limit of connecting, TLS included.
    pub connect_timeout: Duration,
    /// Retry settings.
    pub retries: Retries,
    /// The circuit breaker of each engine; `None`: `breaker: off`.
    pub breaker: Option<BreakerLimits>,
    /// Cool-down after push-back.
    pub cool_down: CoolDown,
    /// What may be injected into requests.
    pub inject: Inject,
}

/// The engines of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineSource {
    /// A fixed list, at least one.
    Static(Vec<EngineAddress>),
    /// The addresses of one DNS name, resolved periodically.
    Dns(DnsName),
}

/// A DNS name whose addresses are the engines of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsName {
    /// The name to resolve; also the name of TLS certificates.
    pub name: Arc<str>,
    /// Port of every engine.
    pub port: u16,
    /// Plain or TLS.
    pub scheme: Scheme,
    /// Interval of resolution.
    pub refresh: Duration,
    /// Which addresses are engines.
    pub family: AddressFamily,
}

/// Which addresses of a DNS name are engines, because an engine with an IPv4 and an IPv6 address is one
/// engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressFamily {
    /// One family: the one that answers.
    #[default]
    Auto,
    /// IPv4 only.
    Ipv4,
    /// IPv6 only.
    Ipv6,
    /// Both families: each address is an engine.
    Both,
}

impl AddressFamily {
    /// Names in the settings, in the order of the documentation.
    pub const ALL: &'static [(&'static str, AddressFamily)] = &[
        ("auto", AddressFamily::Auto),
        ("ipv4", AddressFamily::Ipv4),
        ("ipv6", AddressFamily::Ipv6),
        ("both", AddressFamily::Both),
    ];
}

impl DnsName {
    /// The engine at an address of this name.
    #[must_use]
    pub fn engine_at(&self, address: std::net::IpAddr) -> EngineAddress {
        let host = match address {
            std::net::IpAddr::V4(v4) => v4.to_string(),
            std::net::IpAddr::V6(v6) => format!("[{v6}]"),
        };
        EngineAddress {
            scheme: self.scheme,
            host: host.into(),
            port: self.port,
            base: Arc::from(""),
            name: Some(self.name.clone()),
        }
    }
}

/// HTTP or HTTP over TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `http`
    Http,
    /// `https`
    Https,
}

impl Scheme {
    /// As written in a URL.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// Default port.
    #[must_use]
    pub const fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

/// Address of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EngineAddress {
    /// Plain or TLS.
    pub scheme: Scheme,
    /// Host name or address; an IPv6 address in brackets.
    pub host: Arc<str>,
    /// Port.
    pub port: u16,
    /// Prefix of the engine's paths before `/v1/...`: empty, or `/like/this`. A trailing slash and a trailing
    /// `/v1` of the configured URL are not part of it.
    pub base: Arc<str>,
    /// Name for `Host` and TLS, if other than `host` (engines found by DNS).
    pub name: Option<Arc<str>>,
}

impl EngineAddress {
    /// The engine's id: `host:port`.
    #[must_use]
    pub fn id(&self) -> EngineId {
        EngineId::from(format!("{}:{}", self.host, self.port))
    }

    /// The value of `Host`: the name, and the port unless it is the scheme's default.
    #[must_use]
    pub fn authority(&self) -> String {
        let name = self.name.as_deref().unwrap_or(&self.host);
        if self.port == self.scheme.default_port() { name.to_owned() } else { format!("{name}:{}", self.port) }
    }

    /// The name that a TLS certificate must have, without brackets.
    #[must_use]
    pub fn server_name(&self) -> &str {
        let name = self.name.as_deref().unwrap_or(&self.host);
        name.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}{}", self.scheme.as_str(), self.host, self.port, self.base)
    }
}

/// Kind of a pool's engines: decides what may be injected, and the names of their
/// metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// The llama.cpp server.
    LlamaCpp,
    /// NVIDIA Dynamo's frontend.
    Dynamo,
    /// Any other engine with the same HTTP API.
    Generic,
}

impl EngineKind {
    /// Names in the settings, in the order of the documentation.
    pub const ALL: &'static [(&'static str, EngineKind)] = &[
        ("vllm", EngineKind::Vllm),
        ("sglang", EngineKind::Sglang),
        ("llama_cpp", EngineKind::LlamaCpp),
        ("dynamo", EngineKind::Dynamo),
        ("generic", EngineKind::Generic),
    ];

    /// Its name in the settings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// Whether engines of this kind can schedule by `priority` in the request body, lower
    /// first.
    #[must_use]
    pub const fn knows_priority(self) -> bool {
        matches!(self, EngineKind::Vllm)
    }
}

/// Load balancing policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Least outstanding work.
    LeastWork,
    /// Round robin.
    RoundRobin,
    /// The engine with the prompt's prefix cached, while its load allows.
    PrefixAffinity,
    /// The engine that had the session before, while its load allows.
    SessionAffinity {
        /// The request header that names the session.
        header: HeaderName,
    },
}

/// Concurrency limit per engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Concurrency {
    /// Unlimited: nothing waits in the gateway.
    #[default]
    Unlimited,
    /// Fixed, over all gateways that share the engine.
    Fixed(NonZeroU32),
    /// Adaptive: as many as keep the classes' objectives.
    Auto,
}

/// Bounds of `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeatBounds {
    /// Fewest seats per engine.
    pub min: NonZeroU32,
    /// Most seats per engine.
    pub max: NonZeroU32,
}

impl Default for SeatBounds {
    /// 1 to 1024
    fn default() -> Self {
        SeatBounds { min: NonZeroU32::MIN, max: NonZeroU32::MIN.saturating_add(1023) }
    }
}

/// A health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// Path of the GET; 2xx and 3xx are healthy.
    pub path: Arc<str>,
    /// Interval.
    pub every: Duration,
    /// Time limit.
    pub timeout: Duration,
}

impl Default for HealthCheck {
    /// `{path: /health, every: 2s, timeout: 2s}`
    fn default() -> Self {
        HealthCheck { path: Arc::from("/health"), every: Duration::from_secs(2), timeout: Duration::from_secs(2) }
    }
}

/// Scraping of an engine's metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsScrape {
    /// Path of the GET.
    pub path: Arc<str>,
    /// Interval.
    pub every: Duration,
    /// Time limit.
    pub timeout: Duration,
}

impl Default for MetricsScrape {
    /// `{path: /metrics, every: 2s, timeout: 2s}`
    fn default() -> Self {
        MetricsScrape { path: Arc::from("/metrics"), every: Duration::from_secs(2), timeout: Duration::from_secs(2) }
    }
}

/// Retries before the first forwarded byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retries {
    /// Retries after a fault (5xx, reset, truncation).
    pub after_fault: u32,
    /// Retries after push-back (429, 503, 529).
    pub after_push_back: u32,
    /// Retry budget as a share of recent requests.
    pub share: f64,
    /// Retries per 10 s that are always allowed.
    pub floor_per_10s: u32,
}

impl Default for Retries {
    /// `{after_fault: 1, after_push_back: 3, share: 0.2, floor_per_10s: 10}`
    fn default() -> Self {
        Retries { after_fault: 1, after_push_back: 3, share: 0.2, floor_per_10s: 10 }
    }
}

/// Settings of a circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerLimits {
    /// This many faults ...
    pub faults: u32,
    /// ... within this time open it ...
    pub within: Duration,
    /// ... for this long, then one trial is admitted.
    pub open: Duration,
}

impl Default for BreakerLimits {
    /// `{faults: 5, within: 10s, open: 5s}`
    fn default() -> Self {
        BreakerLimits { faults: 5, within: Duration::from_secs(10), open: Duration::from_secs(5) }
    }
}

/// Cool-down after push-back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoolDown {
    /// If the engine names no time.
    pub default: Duration,
    /// Longest, whatever the engine's `Retry-After`.
    pub max: Duration,
}

impl Default for CoolDown {
    /// `{default: 1s, max: 60s}`
    fn default() -> Self {
        CoolDown { default: Duration::from_secs(1), max: Duration::from_secs(60) }
    }
}

/// What may be injected into requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inject {
    /// `stream_options.include_usage` on streaming requests.
    pub usage: bool,
    /// vLLM's `continuous_usage_stats`.
    pub continuous_usage: bool,
}

impl Inject {
    /// `{usage: true, continuous_usage: false}`; `usage` is false for kind `generic`.
    #[must_use]
    pub const fn default_of(kind: EngineKind) -> Self {
        Inject { usage: !matches!(kind, EngineKind::Generic), continuous_usage: false }
    }
}

impl PoolSettings {
    /// Whether it may have several engines.
    #[must_use]
    pub fn has_several_engines(&self) -> bool {
        match &self.engines {
            EngineSource::Static(all) => all.len() > 1,
            EngineSource::Dns(_) => true,
        }
    }

    /// A pool of kind `vllm` with these engines and all defaults.
    #[must_use]
    pub fn with_defaults(id: PoolId, engines: EngineSource) -> Self {
        PoolSettings {
            id,
            engines,
            kind: EngineKind::Vllm,
            api_key: None,
            headers: Vec::new(),
            roots: None,
            forward_authorization: false,
            engine_priority: false,
            balance: Balance::LeastWork,
            concurrency: Concurrency::default(),
            seat_bounds: SeatBounds::default(),
            queue: queue::QueueSettings::default(),
            health: Some(HealthCheck::default()),
            metrics: Some(MetricsScrape::default()),
            connect_timeout: PoolSettings::CONNECT_TIMEOUT,
            retries: Retries::default(),
            breaker: Some(BreakerLimits::default()),
            cool_down: CoolDown::default(),
            inject: Inject::default_of(EngineKind::Vllm),
        }
    }

    /// Default of `connect_timeout`.
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

    /// Default of `session_header`.
    pub const SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");

    /// Default of `dns.refresh`.
    pub const DNS_REFRESH: Duration = Duration::from_secs(5);
}

/// One item of `routes`; the first whose model and class match applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Patterns of model names (after aliasing), at least one.
    pub models: Vec<Glob>,
    /// Classes it serves; `None` means all.
    pub classes: Option<Vec<ClassId>>,
    /// Pools in order of preference, at least one.
    pub pools: Vec<PoolId>,
}

impl Route {
    /// Whether it serves this class.
    #[must_use]
    pub fn serves(&self, class: &ClassId) -> bool {
        self.classes.as_ref().is_none_or(|classes| classes.contains(class))
    }
}
