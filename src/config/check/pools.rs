//! Pools and their engines.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use secrecy::SecretString;

use super::{Checker, is_not_a, shown};
use crate::admit::queue::{self, InvalidShares, PrefillBudget, Shares};
use crate::config::ClassSettings;
use crate::config::problem::Location;
use crate::config::scalar::{ConcurrencyScalar, PromptTokens, RedactedText};
use crate::config::schema::{self, BalanceBy, Root};
use crate::config::url;
use crate::config::walk::{ConfigBlock, Entries, Located, OrBlock, OrOff};
use crate::route::settings::{
    AddressFamily, Balance, BreakerLimits, Concurrency, CoolDown, DnsName, EngineAddress, EngineKind, EngineSource,
    HealthCheck, Inject, MetricsScrape, PoolSettings, Retries, Route, Scheme, SeatBounds,
};
use crate::types::{EngineId, PoolId, Priority, Tokens};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

impl Checker<'_> {
    pub(super) fn pools(&mut self, root: &Root) -> Vec<Arc<PoolSettings>> {
        let Some(all) = &root.pools else { return Vec::new() };
        self.unique("pool", all.iter().filter_map(|pool| pool.pool.as_ref()));
        all.iter().filter_map(|raw| self.pool(raw)).map(Arc::new).collect()
    }

    fn pool(&mut self, raw: &schema::Pool) -> Option<PoolSettings> {
        if let Some(name) = &raw.pool {
            self.name(name, &["none"]);
        }
        let engines = self.engines(raw);
        let mut pool = PoolSettings::with_defaults(PoolId::from(""), EngineSource::Static(Vec::new()));
        if let Some(sort) = &raw.engine {
            self.engine_sort(sort, &mut pool);
        }
        pool.balance = self.balance(raw);
        (pool.concurrency, pool.seat_bounds) = self.concurrency(raw.max_concurrency_per_engine.as_ref());
        pool.queue = self.queue(raw);
        pool.health = self.health(raw.health.as_ref());
        pool.metrics = self.metrics(raw.metrics.as_ref(), pool.kind);
        pool.connect_timeout = self.time(raw.connect_timeout.as_ref(), PoolSettings::CONNECT_TIMEOUT);
        pool.retries = self.retries(raw.retries.as_ref());
        pool.breaker = self.breaker(raw.breaker.as_ref());
        pool.cool_down = self.cool_down(raw.cool_down.as_ref());
        pool.inject = self.inject(raw.inject.as_ref(), pool.kind);
        pool.engines = engines?;
        pool.id = PoolId::from(raw.pool.as_ref()?.value.as_str());
        Some(pool)
    }

    fn balance(&mut self, raw: &schema::Pool) -> Balance {
        let by = raw.balance.as_ref().map_or(BalanceBy::LeastWork, |word| word.value.0);
        if let Some(at) = raw.session_header.as_ref().filter(|_| by != BalanceBy::SessionAffinity) {
            self.problem(&at.place, "only session_affinity reads it", "remove the key");
        }
        match by {
            BalanceBy::LeastWork => Balance::LeastWork,
            BalanceBy::RoundRobin => Balance::RoundRobin,
            BalanceBy::PrefixAffinity => Balance::PrefixAffinity,
            BalanceBy::SessionAffinity => Balance::SessionAffinity { header: self.session_header(raw) },
        }
    }

    fn session_header(&mut self, raw: &schema::Pool) -> HeaderName {
        let Some(at) = &raw.session_header else { return PoolSettings::SESSION_HEADER };
        HeaderName::try_from(at.value.as_str()).unwrap_or_else(|_| {
            self.problem(&at.place, is_not_a(at, "a header name"), "use letters, digits and -");
            PoolSettings::SESSION_HEADER
        })
    }

    fn concurrency(
        &mut self,
        written: Option<&OrBlock<Located<ConcurrencyScalar>, schema::SeatRange>>,
    ) -> (Concurrency, SeatBounds) {
        let d = SeatBounds::default();
        let at = match written {
            None => return (Concurrency::Unlimited, d),
            Some(OrBlock::Block(range)) => return (Concurrency::Auto, self.seat_bounds(range)),
            Some(OrBlock::Short(at)) => at,
        };
        match at.value {
            ConcurrencyScalar::Auto => (Concurrency::Auto, d),
            ConcurrencyScalar::Number(number) => {
                let number = Located { value: number, place: at.place.clone(), hidden: at.hidden };
                let number = self.count(Some(&number), 1, 1..=1_000_000) as u32;
                (NonZeroU32::new(number).map_or(Concurrency::Unlimited, Concurrency::Fixed), d)
            }
        }
    }

    fn seat_bounds(&mut self, range: &schema::SeatRange) -> SeatBounds {
        let d = SeatBounds::default();
        let mut count = |at: Option<&Located<u64>>, default: NonZeroU32| {
            NonZeroU32::new(self.count(at, u64::from(default.get()), 1..=1_000_000) as u32).unwrap_or(default)
        };
        let (min, max) = (count(range.min.as_ref(), d.min), count(range.max.as_ref(), d.max));
        if min > max {
            self.problem(range.place(), format!("min ({min}) is above max ({max})"), "exchange the two, or raise max");
            return d;
        }
        SeatBounds { min, max }
    }

    /// Notes `auto` without objectives: it would only grow.
    pub(super) fn seats_have_a_promise(
        &mut self,
        root: &Root,
        classes: &[Arc<ClassSettings>],
        pools: &[Arc<PoolSettings>],
        routes: &[Route],
    ) {
        for raw in root.pools.iter().flat_map(|all| all.iter()) {
            let named = |pool: &&Arc<PoolSettings>| raw.pool.as_ref().is_some_and(|at| at.value == pool.id.as_str());
            let Some(pool) = pools.iter().find(named).filter(|pool| pool.concurrency == Concurrency::Auto) else {
                continue;
            };
            let leads = |class: &ClassSettings| {
                routes.iter().any(|route| route.serves(&class.id) && route.pools.contains(&pool.id))
            };
            let keeps = |class: &ClassSettings| {
                let own = &class.objectives;
                own.ttft.is_some() || own.tpot.is_some() || own.e2e.is_some()
            };
            if let Some(at) = &raw.max_concurrency_per_engine
                && !classes.iter().any(|class| leads(class) && keeps(class))
            {
                let message = "no class of this pool has a TTFT, TPOT or E2E objective, so the seats only grow";
                self.note(at.place(), message, "write a number, or give a class such an objective");
            }
        }
    }

    fn queue(&mut self, raw: &schema::Pool) -> queue::QueueSettings {
        let d = queue::QueueSettings::default();
        let Some(queue) = &raw.queue else { return d };
        if !raw.written().contains(&"max_concurrency_per_engine") {
            let message = "no request waits here, because the pool has no concurrency limit";
            self.note(queue.place(), message, "set `max_concurrency_per_engine`, or remove the key");
        }
        queue::QueueSettings {
            max_waiting: self.count(queue.max_waiting.as_ref(), d.max_waiting as u64, 0..=10_000_000) as usize,
            quantum: Tokens(self.count(queue.quantum.as_ref(), d.quantum.0, 1..=1 << 53)),
            shares: queue.shares.as_ref().map_or(d.shares, |raw| self.shares(raw)),
            reading: self.reading(queue.prefill_tokens_per_engine.as_ref()),
        }
    }

    fn reading(&mut self, at: Option<&Located<PromptTokens>>) -> PrefillBudget {
        let Some(at) = at else { return PrefillBudget::default() };
        match at.value {
            PromptTokens::Auto => PrefillBudget::Auto,
            PromptTokens::Off => PrefillBudget::NoLimit,
            PromptTokens::Number(number) => {
                let number = Located { value: number, place: at.place.clone(), hidden: at.hidden };
                PrefillBudget::Tokens(Tokens(self.count(Some(&number), 1, 1..=1 << 53)))
            }
        }
    }

    fn shares(&mut self, raw: &schema::Shares) -> Shares {
        let d = Shares::default();
        let written = [&raw.critical, &raw.high, &raw.normal, &raw.low, &raw.batch];
        let mut thousandths = Priority::ALL.map(|rank| d.of(rank));
        for (share, at) in thousandths.iter_mut().zip(written) {
            if let Some(found) = at.as_ref().and_then(|at| self.thousandths(at)) {
                *share = found;
            }
        }
        Shares::new(thousandths).unwrap_or_else(|bad| {
            // A share of zero was already reported at its own position.
            if let InvalidShares::TooMuch { sum } = bad {
                let message = format!("the shares add up to {}, more than 1", f64::from(sum) / 1000.0);
                self.problem(raw.place(), message, "lower some; priorities without a share have their default");
            }
            d
        })
    }

    fn thousandths(&mut self, at: &Located<f64>) -> Option<u16> {
        let is_whole = |share: f64| share >= 0.001 && (share * 1000.0 - (share * 1000.0).round()).abs() <= 1e-6;
        let share = self.share_that(at, is_whole)?;
        let whole = (share * 1000.0).round();
        if !is_whole(share) {
            let message = format!("{} is not a whole number of thousandths", shown(at));
            self.problem(&at.place, message, "write a share such as 0.05, in steps of 0.001");
            return None;
        }
        Some(whole as u16)
    }

    fn engines(&mut self, raw: &schema::Pool) -> Option<EngineSource> {
        match (&raw.engines, &raw.dns) {
            (Some(_), Some(dns)) => {
                self.problem(dns.place(), "a pool has either `engines` or `dns`", "remove one, or make two pools");
                None
            }
            (Some(list), None) => self.engine_list(list),
            (None, Some(dns)) => self.dns(dns).map(EngineSource::Dns),
            (None, None) => {
                if raw.is_whole() {
                    self.problem(raw.place(), "the pool has no engines", "add `engines` with a url each, or `dns`");
                }
                None
            }
        }
    }

    fn engine_list(&mut self, list: &[schema::Engine]) -> Option<EngineSource> {
        let mut first: HashMap<EngineId, u64> = HashMap::new();
        let mut found = Vec::new();
        for at in list.iter().filter_map(|engine| engine.url.as_ref()) {
            let Some(engine) = self.engine(at) else { continue };
            if let Some(line) = first.get(&engine.id()) {
                let message = format!("{} is the same engine as on line {line}", at.shown());
                self.problem(&at.place, message, "name each host and port once in a pool");
                continue;
            }
            first.insert(engine.id(), at.place.line);
            found.push(engine);
        }
        Some(EngineSource::Static(found))
    }

    fn engine(&mut self, at: &Located<String>) -> Option<EngineAddress> {
        match url::engine_address(&at.value) {
            Ok(engine) => Some(engine),
            Err(bad) => {
                // Credentials in a URL are not repeated.
                let show = !at.hidden && !at.value.contains(['@', '?']);
                let subject = if show || at.hidden { at.shown() } else { "the URL".to_owned() };
                let message = format!("{subject} {}", bad.wrong);
                let way_out = match bad.meant.filter(|_| show) {
                    Some(meant) => format!("did you mean \"{meant}\"?"),
                    None => "write http://host:port, or https".to_owned(),
                };
                self.problem(&at.place, message, way_out);
                None
            }
        }
    }

    fn dns(&mut self, raw: &schema::Dns) -> Option<DnsName> {
        let refresh = self.time(raw.refresh.as_ref(), PoolSettings::DNS_REFRESH);
        let port = self.count(raw.port.as_ref(), 1, 1..=65535) as u16;
        let name = raw.name.as_ref()?;
        if !url::is_host(&name.value) || name.value.starts_with('[') {
            self.problem(&name.place, is_not_a(name, "a host name"), "write a name without scheme and port");
        } else if name.value.parse::<std::net::IpAddr>().is_ok() {
            self.problem(&name.place, format!("{} needs no DNS lookup", name.shown()), "name it in `engines`");
        }
        let scheme = raw.scheme.as_ref().map_or(Scheme::Http, |word| word.value.0);
        let family = raw.family.as_ref().map_or_else(AddressFamily::default, |word| word.value.0);
        Some(DnsName { name: Arc::from(name.value.as_str()), port, scheme, refresh, family })
    }

    fn engine_sort(&mut self, raw: &schema::EngineSort, pool: &mut PoolSettings) {
        pool.kind = raw.kind.as_ref().map_or(pool.kind, |word| word.value.0);
        pool.engine_priority = raw.priority_scheduling.as_ref().is_some_and(|at| at.value);
        if let Some(at) = raw.priority_scheduling.as_ref().filter(|at| at.value && !pool.kind.knows_priority()) {
            let message = "only engines of kind vllm accept a priority";
            self.problem(&at.place, message, "remove the key, or set `kind: vllm`");
        }
        pool.forward_authorization = raw.forward_authorization.as_ref().is_some_and(|at| at.value);
        pool.headers = raw.headers.as_ref().map(|headers| self.engine_headers(headers)).unwrap_or_default();
        pool.roots = raw.ca_file.as_ref().and_then(|at| self.roots(at));
        pool.api_key = raw.api_key_file.as_ref().and_then(|at| self.secret_file(at)).map(SecretString::from);
        let has_header = pool.headers.iter().any(|(name, _)| name == AUTHORIZATION);
        let forwards = raw.forward_authorization.as_ref().filter(|at| at.value).map(|at| &at.place);
        let second = match raw.api_key_file.as_ref().map(|at| &at.place) {
            Some(place) => Some(place).filter(|_| forwards.is_some() || has_header),
            None => forwards.filter(|_| has_header),
        };
        if let Some(place) = second {
            let message = "two credentials would go to the engine";
            let way_out = "keep one of `api_key_file`, `forward_authorization` and an `authorization` header";
            self.problem(place, message, way_out);
        }
    }

    fn engine_headers(&mut self, raw: &Entries<Located<RedactedText>>) -> Vec<(HeaderName, HeaderValue)> {
        const OURS: [HeaderName; 11] = [
            ACCEPT_ENCODING,
            CONNECTION,
            CONTENT_ENCODING,
            CONTENT_LENGTH,
            EXPECT,
            HOST,
            TE,
            TRAILER,
            TRANSFER_ENCODING,
            UPGRADE,
            X_REQUEST_ID,
        ];
        let mut found: Vec<(HeaderName, HeaderValue)> = Vec::new();
        for (name, value) in &raw.0 {
            let Ok(header) = HeaderName::try_from(name.value.as_str()) else {
                self.problem(&name.place, is_not_a(name, "a header name"), "use letters, digits and -");
                continue;
            };
            if OURS.contains(&header) || found.iter().any(|(other, _)| *other == header) {
                let message = format!("the header {} cannot be set here", name.shown());
                self.problem(&name.place, message, "remove it: the gateway sets it, or it is repeated");
                continue;
            }
            match HeaderValue::try_from(value.value.0.as_str()) {
                Ok(mut value) => {
                    value.set_sensitive(true);
                    found.push((header, value));
                }
                Err(_) => self.problem(&value.place, "the value cannot be sent in a header", "use visible characters"),
            }
        }
        found
    }

    pub(super) fn roots(&mut self, at: &Located<String>) -> Option<Arc<[CertificateDer<'static>]>> {
        let pem = self.file(at)?;
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        match all {
            Ok(roots) if !roots.is_empty() => Some(roots.into()),
            _ => {
                let message = format!("the file {} holds no certificates in PEM", at.shown());
                self.problem(&at.place, message, "write the roots' certificates into it");
                None
            }
        }
    }

    fn health(&mut self, raw: Option<&OrOff<schema::Health>>) -> Option<HealthCheck> {
        let d = HealthCheck::default();
        match raw {
            None => Some(d),
            Some(OrOff::Off) => None,
            Some(OrOff::On(raw)) => Some(HealthCheck {
                path: self.path(raw.path.as_ref(), d.path),
                every: self.time(raw.every.as_ref(), d.every),
                timeout: self.time(raw.timeout.as_ref(), d.timeout),
            }),
        }
    }

    fn metrics(&mut self, raw: Option<&OrOff<schema::Metrics>>, kind: EngineKind) -> Option<MetricsScrape> {
        let d = MetricsScrape::default();
        match raw {
            None => (kind != EngineKind::Generic).then_some(d),
            Some(OrOff::Off) => None,
            Some(OrOff::On(raw)) => Some(MetricsScrape {
                path: self.path(raw.path.as_ref(), d.path),
                every: self.time(raw.every.as_ref(), d.every),
                timeout: self.time(raw.timeout.as_ref(), d.timeout),
            }),
        }
    }

    fn path(&mut self, at: Option<&Located<String>>, default: Arc<str>) -> Arc<str> {
        let Some(at) = at else { return default };
        let readable = at.value.parse::<http::uri::PathAndQuery>().is_ok();
        if !at.value.starts_with('/') || !readable {
            self.problem(&at.place, is_not_a(at, "a path"), "write a path that starts with /");
            return default;
        }
        Arc::from(at.value.as_str())
    }

    fn retries(&mut self, raw: Option<&schema::Retries>) -> Retries {
        let d = Retries::default();
        let Some(raw) = raw else { return d };
        let share = raw.share.as_ref().filter(|at| at.value != 0.0);
        let none = raw.share.as_ref().is_some_and(|at| at.value == 0.0);
        Retries {
            after_fault: self.count(raw.after_fault.as_ref(), d.after_fault.into(), 0..=100) as u32,
            after_push_back: self.count(raw.after_push_back.as_ref(), d.after_push_back.into(), 0..=100) as u32,
            share: if none { 0.0 } else { share.and_then(|at| self.share(at)).unwrap_or(d.share) },
            floor_per_10s: self.count(raw.floor_per_10s.as_ref(), d.floor_per_10s.into(), 0..=1_000_000) as u32,
        }
    }

    fn breaker(&mut self, raw: Option<&OrOff<schema::Breaker>>) -> Option<BreakerLimits> {
        let d = BreakerLimits::default();
        match raw {
            None => Some(d),
            Some(OrOff::Off) => None,
            Some(OrOff::On(raw)) => Some(BreakerLimits {
                faults: self.count(raw.faults.as_ref(), d.faults.into(), 1..=10_000) as u32,
                within: self.time(raw.within.as_ref(), d.within),
                open: self.time(raw.open.as_ref(), d.open),
            }),
        }
    }

    fn cool_down(&mut self, raw: Option<&schema::CoolDown>) -> CoolDown {
        let d = CoolDown::default();
        let Some(raw) = raw else { return d };
        let found =
            CoolDown { default: self.time(raw.default.as_ref(), d.default), max: self.time(raw.max.as_ref(), d.max) };
        if found.default > found.max {
            self.problem(raw.place(), "default is longer than max", "make `max` the longer one");
        }
        found
    }

    fn inject(&mut self, raw: Option<&schema::Inject>, kind: EngineKind) -> Inject {
        let d = Inject::default_of(kind);
        let Some(raw) = raw else { return d };
        let usage = raw.usage.as_ref().map_or(d.usage, |at| at.value);
        let continuous_usage = raw.continuous_usage.as_ref().map_or(d.continuous_usage, |at| at.value);
        if let Some(at) = raw.continuous_usage.as_ref().filter(|at| at.value) {
            self.continuous_is_possible(&at.place, usage, kind);
        }
        Inject { usage, continuous_usage }
    }

    fn continuous_is_possible(&mut self, place: &Location, usage: bool, kind: EngineKind) {
        if kind != EngineKind::Vllm {
            self.problem(place, "only engines of kind vllm support it", "remove the key, or set `engine.kind: vllm`");
        } else if !usage {
            self.problem(place, "it needs `usage`", "set `usage: true`");
        }
    }
}
