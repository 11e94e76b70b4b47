//! What the settings say about pools and routes: complete values, no defaults left open.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;
use secrecy::SecretString;

use crate::admit::queue;
use crate::units::{ClassId, EngineId, Glob, PoolId};

/// A pool: engines that are interchangeable for a request.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Its name.
    pub id: PoolId,
    /// Where its engines are.
    pub engines: Engines,
    /// What kind of engine they are.
    pub kind: EngineKind,
    /// The bearer token that goes to the engines, from `engine.api_key_file`.
    pub api_key: Option<SecretString>,
    /// Headers set on every request to the engines; their values are marked sensitive.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Roots that replace the system's for `https` engines, from `engine.ca_file`.
    pub roots: Option<Arc<[CertificateDer<'static>]>>,
    /// Forward the client's own credential instead of removing it.
    pub forward_authorization: bool,
    /// The engines run with priority scheduling: they are told each request's rank.
    pub engine_priority: bool,
    /// How an engine is picked.
    pub balance: Balance,
    /// How many requests an engine works on at one time.
    pub concurrency: Concurrency,
    /// What `auto` stays within.
    pub seat_bounds: SeatBounds,
    /// How requests wait where all seats are taken.
    pub queue: queue::Settings,
    /// Health checks; `None`: `health: off`.
    pub health: Option<Health>,
    /// Reading of the engines' own metrics; `None`: `metrics: off`, and for kind `generic`
    /// unless it is written.
    pub metrics: Option<Scrape>,
    /// Limit on opening a connection, TLS included.
    pub connect_timeout: Duration,
    /// What may be tried again.
    pub retries: Retries,
    /// The circuit breaker of each engine; `None`: `breaker: off`.
    pub breaker: Option<BreakerLimits>,
    /// How long an engine that pushed back stands behind the others.
    pub cool_down: CoolDown,
    /// What may be injected into requests.
    pub inject: Inject,
}

/// Where the engines of a pool are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engines {
    /// A fixed list, at least one.
    Static(Vec<EngineAddress>),
    /// The addresses of one DNS name, looked up again and again.
    Dns(DnsName),
}

/// A DNS name whose addresses are the engines of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsName {
    /// The name to look up; also the name of TLS certificates.
    pub name: Arc<str>,
    /// Port of every engine.
    pub port: u16,
    /// Plain or TLS.
    pub scheme: Scheme,
    /// Time between two look-ups.
    pub refresh: Duration,
    /// Which of its addresses are engines.
    pub family: Family,
}

/// Which addresses of a DNS name are engines: one that has an IPv4 and an IPv6 address is one
/// engine, not two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Family {
    /// Those of one family: the one that answers.
    #[default]
    Auto,
    /// IPv4 only.
    Ipv4,
    /// IPv6 only.
    Ipv6,
    /// All: each address is an engine of its own.
    Both,
}

impl Family {
    /// The names in the settings, in the order of the documentation.
    pub const ALL: &'static [(&'static str, Family)] =
        &[("auto", Family::Auto), ("ipv4", Family::Ipv4), ("ipv6", Family::Ipv6), ("both", Family::Both)];
}

impl DnsName {
    /// The engine at one address of this name.
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

/// Plain HTTP or HTTP over TLS.
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

    /// The port where a URL names none.
    #[must_use]
    pub const fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

/// Where one engine is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EngineAddress {
    /// Plain or TLS.
    pub scheme: Scheme,
    /// Host name or address; an IPv6 address in brackets.
    pub host: Arc<str>,
    /// Port.
    pub port: u16,
    /// What stands before `/v1/...` in the engine's paths: empty, or `/like/this`. A final
    /// slash and a final `/v1` of the URL in the settings are not part of it.
    pub base: Arc<str>,
    /// The name for `Host` and for TLS where it is not `host` (engines found by DNS).
    pub name: Option<Arc<str>>,
}

impl EngineAddress {
    /// The engine's name: `host:port`.
    #[must_use]
    pub fn id(&self) -> EngineId {
        EngineId::from(format!("{}:{}", self.host, self.port))
    }

    /// What `Host` says: the name, and the port where it is not the scheme's own.
    #[must_use]
    pub fn authority(&self) -> String {
        let name = self.name.as_deref().unwrap_or(&self.host);
        if self.port == self.scheme.default_port() { name.to_owned() } else { format!("{name}:{}", self.port) }
    }

    /// The name a TLS certificate must carry, without brackets.
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

/// What kind of engine stands behind a pool: decides what may be injected, and the names of
/// the engine's own metrics.
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
    /// Anything else that speaks the same HTTP.
    Generic,
}

impl EngineKind {
    /// The names in the settings, in the order of the documentation.
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

    /// Whether an engine of this kind schedules by the `priority` in a request's body, where it
    /// was started so: the lower goes first.
    #[must_use]
    pub const fn knows_priority(self) -> bool {
        matches!(self, EngineKind::Vllm)
    }
}

/// How an engine is picked among those that can take a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Balance {
    /// The one with the least outstanding work.
    LeastWork,
    /// One after the other.
    RoundRobin,
    /// The one that knows the beginning of the prompt, while its load allows.
    PrefixAffinity,
    /// The one that had the session before, while its load allows.
    SessionAffinity {
        /// The request header that names the session.
        header: HeaderName,
    },
}

/// How many requests an engine works on at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Concurrency {
    /// As many as come: nothing waits in the gateway.
    #[default]
    Unlimited,
    /// So many, over all gateways that share the engine.
    Fixed(NonZeroU32),
    /// As many as keep the promises of the classes, found out while it runs.
    Auto,
}

/// What `auto` stays within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeatBounds {
    /// At least so many seats for an engine.
    pub min: NonZeroU32,
    /// At most so many.
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
pub struct Health {
    /// Path asked with GET; 2xx and 3xx are healthy.
    pub path: Arc<str>,
    /// Time from one check to the next.
    pub every: Duration,
    /// Time after which a check has failed.
    pub timeout: Duration,
}

impl Default for Health {
    /// `{path: /health, every: 2s, timeout: 2s}`
    fn default() -> Self {
        Health { path: Arc::from("/health"), every: Duration::from_secs(2), timeout: Duration::from_secs(2) }
    }
}

/// Reading of an engine's own metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrape {
    /// Path asked with GET.
    pub path: Arc<str>,
    /// Time from one reading to the next.
    pub every: Duration,
    /// Time after which a reading has failed.
    pub timeout: Duration,
}

impl Default for Scrape {
    /// `{path: /metrics, every: 2s, timeout: 2s}`
    fn default() -> Self {
        Scrape { path: Arc::from("/metrics"), every: Duration::from_secs(2), timeout: Duration::from_secs(2) }
    }
}

/// What may be tried again before the first forwarded byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retries {
    /// Further tries after a fault (5xx, reset, truncation).
    pub after_fault: u32,
    /// Further tries after push-back (429, 503, 529).
    pub after_push_back: u32,
    /// The retry budget as a share of recent requests.
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

/// When an engine's breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerLimits {
    /// This many faults ...
    pub faults: u32,
    /// ... within this time open it ...
    pub within: Duration,
    /// ... for this long; then one request tries.
    pub open: Duration,
}

impl Default for BreakerLimits {
    /// `{faults: 5, within: 10s, open: 5s}`
    fn default() -> Self {
        BreakerLimits { faults: 5, within: Duration::from_secs(10), open: Duration::from_secs(5) }
    }
}

/// How long an engine that pushed back stands behind the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoolDown {
    /// Where the engine named no time.
    pub default: Duration,
    /// The longest, whatever the engine's `Retry-After` says.
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

impl Pool {
    /// Whether it may have more than one engine.
    #[must_use]
    pub fn has_several_engines(&self) -> bool {
        match &self.engines {
            Engines::Static(all) => all.len() > 1,
            Engines::Dns(_) => true,
        }
    }

    /// A pool of kind `vllm` with these engines and every default.
    #[must_use]
    pub fn with_defaults(id: PoolId, engines: Engines) -> Self {
        Pool {
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
            queue: queue::Settings::default(),
            health: Some(Health::default()),
            metrics: Some(Scrape::default()),
            connect_timeout: Pool::CONNECT_TIMEOUT,
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

/// One line of `routes`: the first whose model and class fit is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Patterns of model names (after aliasing), at least one.
    pub models: Vec<Glob>,
    /// Classes it serves; `None`: all.
    pub classes: Option<Vec<ClassId>>,
    /// Pools, in the order of preference, at least one.
    pub pools: Vec<PoolId>,
}

impl Route {
    /// Whether it serves this class.
    #[must_use]
    pub fn serves(&self, class: &ClassId) -> bool {
        self.classes.as_ref().is_none_or(|classes| classes.contains(class))
    }
}
