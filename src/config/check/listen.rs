//! Listeners, client limits, shutdown, and inspection of responses.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;

use super::{Checker, in_seconds, is_not_a};
use crate::accept::settings::pem::{PemError, certified};
use crate::accept::settings::{Admin, Listen, Shutdown, Tls};
use crate::config::ClassSettings;
use crate::config::problem::{Location, nearest};
use crate::config::scalar::SizeScalar;
use crate::config::schema::{self, Root};
use crate::config::url;
use crate::config::walk::{ConfigBlock, Located, OrOff};
use crate::types::ApiPath;

/// Time of a process to end after the drain limit: cut responses, last lines and spans.
const AFTER_DRAIN: Duration = Duration::from_secs(5);

impl Checker<'_> {
    pub(super) fn listen(&mut self, raw: Option<&schema::Listen>) -> Listen {
        let d = Listen::default();
        let Some(raw) = raw else { return d };
        let max_head = self.size(raw.max_head.as_ref(), d.max_head as u64, 8 << 10, 16 << 20);
        let max_body = self.size(raw.max_body.as_ref(), d.max_body, 1 << 10, 16 << 30);
        Listen {
            address: self.address(raw.address.as_ref(), d.address, "0.0.0.0:8080"),
            tls: raw.tls.as_ref().and_then(|raw| self.tls(raw)),
            max_body,
            max_bodies: self.size(raw.max_bodies.as_ref(), d.max_bodies.max(max_body), max_body, 1 << 40),
            max_head: max_head as usize,
            max_header_lines: self.count(raw.max_header_lines.as_ref(), d.max_header_lines as u64, 8..=10_000) as usize,
            header_timeout: self.time(raw.header_timeout.as_ref(), d.header_timeout),
            body_timeout: self.time(raw.body_timeout.as_ref(), d.body_timeout),
            idle_timeout: self.time(raw.idle_timeout.as_ref(), d.idle_timeout),
            write_stall: self.time(raw.write_stall.as_ref(), d.write_stall),
            max_connections: self.count(raw.max_connections.as_ref(), d.max_connections as u64, 1..=10_000_000)
                as usize,
            max_connections_per_address: raw
                .max_connections_per_address
                .as_ref()
                .map(|at| self.count(Some(at), 1, 1..=10_000_000) as usize),
            http2_max_streams: self.count(raw.http2_max_streams.as_ref(), d.http2_max_streams.into(), 1..=100_000)
                as u32,
        }
    }

    fn tls(&mut self, raw: &schema::Tls) -> Option<Tls> {
        let (certificate, key) = (raw.certificate_file.as_ref()?, raw.private_key_file.as_ref()?);
        if let (Some(chain), Some(secret)) = (self.paper(certificate), self.paper(key))
            && let Err(bad) = certified(&chain, &secret)
        {
            self.bad_papers(certificate, key, &bad);
        }
        let place = |at: &Located<String>| self.surroundings.place(Path::new(&at.value));
        Some(Tls { certificate_file: place(certificate), private_key_file: place(key) })
    }

    fn bad_papers(&mut self, certificate: &Located<String>, key: &Located<String>, bad: &PemError) {
        let (at, message, way_out) = match bad {
            PemError::NoCertificate => (
                certificate,
                format!("the file {} holds no certificate in PEM", certificate.shown()),
                "write the certificate, then the chain behind it, into it",
            ),
            PemError::NoKey => (
                key,
                format!("the file {} holds no private key in PEM", key.shown()),
                "write the certificate's key into it, without a passphrase",
            ),
            PemError::NotAPair => (
                key,
                format!("the key in {} is not that of the certificate in {}", key.shown(), certificate.shown()),
                "name the two files that were made together",
            ),
            PemError::Unfit(why) => (
                certificate,
                format!("the certificate in {} cannot be used with its key ({why})", certificate.shown()),
                "name an X.509 certificate and its RSA, ECDSA or Ed25519 key",
            ),
        };
        self.problem(&at.place, message, way_out);
    }

    pub(super) fn shutdown(&mut self, raw: Option<&schema::Shutdown>) -> Shutdown {
        let d = Shutdown::default();
        let Some(raw) = raw else { return d };
        // Zero is allowed, for example on a test bench.
        Shutdown {
            delay: raw.delay.as_ref().map_or(d.delay, |at| at.value),
            drain: raw.drain.as_ref().map_or(d.drain, |at| at.value),
        }
    }

    /// Whether a shutdown can complete: within the platform's grace period, and without cutting responses
    /// that may still meet their objectives.
    pub(super) fn leaves_in_order(&mut self, root: &Root, shutdown: &Shutdown, classes: &[Arc<ClassSettings>]) {
        let raw = root.shutdown.as_ref();
        let pre_stop = raw.and_then(|raw| raw.pre_stop.as_ref()).map_or(Duration::ZERO, |at| at.value);
        let needed = pre_stop + shutdown.delay + shutdown.drain + AFTER_DRAIN;
        match raw.and_then(|raw| raw.grace_period.as_ref()) {
            Some(grace) if grace.value < needed => {
                let parts = [pre_stop, shutdown.delay, shutdown.drain, AFTER_DRAIN].map(in_seconds).join(" + ");
                let message = format!(
                    "the shutdown takes {}: pre_stop + delay + drain and the last writes, {parts}",
                    in_seconds(needed)
                );
                self.problem(&grace.place, message, format!("give it {}, or shorten `drain`", in_seconds(needed)));
            }
            Some(_) => {}
            None => {
                if let Some(at) = raw.and_then(|raw| raw.pre_stop.as_ref()) {
                    self.note(&at.place, "is compared with nothing", "add `grace_period`");
                }
            }
        }
        let is_stated = |class: &&Arc<ClassSettings>| {
            let objectives = &class.objectives;
            objectives.e2e.is_some()
                || objectives.default_output_tokens.is_some()
                || objectives.assumed_output_p95().is_some()
        };
        let longest = classes.iter().filter(is_stated);
        let longest = longest.filter_map(|class| Some((class.objectives.longest()?, &class.id))).max();
        if let Some((longest, class)) = longest.filter(|(longest, _)| *longest > shutdown.drain) {
            let message = format!(
                "`drain` ({}) cuts responses of the class {class} that may take {} and meet their objectives",
                in_seconds(shutdown.drain),
                in_seconds(longest)
            );
            let place = root.shutdown.as_ref().map(|raw| raw.drain.as_ref().map_or(raw.place(), |at| &at.place));
            let place = place.cloned().unwrap_or_else(|| Location { path: "shutdown".into(), line: 1, column: 1 });
            self.note(&place, message, format!("give it {} or more", in_seconds(longest)));
        }
    }

    pub(super) fn admin(
        &mut self,
        raw: Option<&OrOff<schema::Admin>>,
        listen: &Listen,
        raw_listen: Option<&schema::Listen>,
    ) -> Option<Admin> {
        let mut admin = Admin::default();
        match raw {
            Some(OrOff::Off) => return None,
            Some(OrOff::On(raw)) => {
                admin.address = self.address(raw.address.as_ref(), admin.address, "127.0.0.1:9090");
                let token = raw.token_file.as_ref().and_then(|at| self.secret_file(at));
                admin.token = token.map(SecretString::from);
                for at in raw.hosts.iter().flatten() {
                    let is_name = |name: &str| {
                        !name.is_empty()
                            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
                    };
                    match is_name(&at.value) {
                        true => admin.hosts.push(at.value.clone()),
                        false => {
                            let way_out =
                                "write the name alone, without scheme and port, such as goodput.monitoring.svc";
                            self.problem(&at.place, is_not_a(at, "a host name"), way_out);
                        }
                    }
                }
                let place = raw.address.as_ref().map_or(raw.place(), |at| &at.place);
                if collide(admin.address, listen.address) {
                    self.problem(place, "clients and operators would share one address", "give `admin` another port");
                }
            }
            None => {
                let place = raw_listen.and_then(|raw| raw.address.as_ref()).map(|at| &at.place);
                if let Some(place) = place.filter(|_| collide(admin.address, listen.address)) {
                    let message =
                        format!("the admin port listens there ({}) unless `admin` says otherwise", admin.address);
                    self.problem(place, message, "give `listen` or `admin` another port, or write `admin: off`");
                }
            }
        }
        Some(admin)
    }

    /// An engine address that is the gateway itself would loop. Only certain cases are reported, because other
    /// names and addresses may or may not be this machine's.
    pub(super) fn no_engine_is_here(&mut self, root: &schema::Root, listen: &Listen, admin: Option<&Admin>) {
        let pools = || root.pools.iter().flat_map(|all| all.iter());
        let urls = pools()
            .flat_map(|pool| pool.engines.iter().flat_map(|all| all.iter()))
            .filter_map(|engine| engine.url.as_ref());
        let listed = urls.filter_map(|at| {
            let engine = url::engine_address(&at.value).ok()?;
            Some((at, engine.host.to_string(), engine.port))
        });
        let looked_up = pools().filter_map(|pool| {
            let dns = pool.dns.as_ref()?;
            let (name, port) = (dns.name.as_ref()?, dns.port.as_ref()?);
            Some((name, name.value.to_ascii_lowercase(), u16::try_from(port.value).ok()?))
        });
        let here = [Some(("the gateway itself", listen.address)), admin.map(|at| ("its admin port", at.address))];
        for (at, host, port) in listed.chain(looked_up) {
            let found = here.into_iter().flatten().find(|(_, address)| leads_to(&host, port, *address));
            if let Some((what, address)) = found {
                let message = format!("the engine is {what} ({address})");
                self.problem(&at.place, message, "give the engine's own host and port");
            }
        }
    }

    pub(super) fn inspect(&mut self, raw: Option<&schema::Inspect>) -> (usize, Vec<ApiPath>) {
        let default = 16 << 20;
        let Some(raw) = raw else { return (default, Vec::new()) };
        let max_event = self.size(raw.max_event.as_ref(), default as u64, 1 << 10, 1 << 30) as usize;
        let mut paths = Vec::new();
        for at in raw.judged_paths.iter().flatten() {
            match self.endpoint(at, |endpoint| !endpoint.dialect().generates() && !paths.contains(endpoint)) {
                Some(endpoint) if endpoint.dialect().generates() => {
                    self.problem(&at.place, format!("{} is judged anyway", at.shown()), "remove it");
                }
                Some(endpoint) if paths.contains(&endpoint) => {
                    self.problem(&at.place, format!("{} is repeated", at.shown()), "remove one of the two");
                }
                Some(endpoint) => paths.push(endpoint),
                None => {}
            }
        }
        (max_event, paths)
    }

    /// GET paths that engines answer.
    pub(super) fn engine_paths(&mut self, raw: Option<&Vec<Located<String>>>) -> Vec<ApiPath> {
        let mut paths = Vec::new();
        for at in raw.into_iter().flatten() {
            match ApiPath::all_of_engines().find(|endpoint| endpoint.path() == at.value) {
                Some(endpoint) if paths.contains(&endpoint) => {
                    self.problem(&at.place, format!("{} is repeated", at.shown()), "remove one of the two");
                }
                Some(endpoint) => paths.push(endpoint),
                None => {
                    let known = ApiPath::all_of_engines().map(ApiPath::path).collect::<Vec<_>>().join(", ");
                    let message = is_not_a(at, "an engine path that clients may request");
                    self.problem(&at.place, message, format!("name any of: {known}"));
                }
            }
        }
        paths
    }

    /// An API path relayed to engines; `fits` selects those suggested for an unknown one.
    pub(super) fn endpoint(&mut self, at: &Located<String>, fits: impl Fn(&ApiPath) -> bool) -> Option<ApiPath> {
        let found = ApiPath::relayed(&at.value);
        if found.is_none() {
            let known = || ApiPath::all_relayed().filter(&fits).map(|endpoint| endpoint.path());
            let way_out = match nearest(&at.value, known()).filter(|_| !at.hidden) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("name one of: {}", known().collect::<Vec<_>>().join(", ")),
            };
            self.problem(&at.place, is_not_a(at, "a path relayed to engines"), way_out);
        }
        found
    }

    fn address(&mut self, at: Option<&Located<String>>, default: SocketAddr, example: &str) -> SocketAddr {
        let Some(at) = at else { return default };
        at.value.parse().unwrap_or_else(|_| {
            let local = at.value.strip_prefix("localhost:").filter(|port| !at.hidden && port.parse::<u16>().is_ok());
            let way_out = match local {
                Some(port) => format!("did you mean 127.0.0.1:{port}?"),
                None => format!("write an IP address and a port, such as {example}"),
            };
            self.problem(&at.place, is_not_a(at, "an address"), way_out);
            default
        })
    }

    pub(super) fn size(&mut self, at: Option<&Located<SizeScalar>>, default: u64, least: u64, most: u64) -> u64 {
        let Some(at) = at else { return default };
        if (least..=most).contains(&at.value.0) {
            return at.value.0;
        }
        let (least, most) = (bytesize::ByteSize(least), bytesize::ByteSize(most));
        self.problem(&at.place, "the size is out of range", format!("write a size from {least} to {most}"));
        default
    }
}

/// Whether two listeners need the same port of the same interface. `::` includes IPv4.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let (one, other) = (a.ip().to_canonical(), b.ip().to_canonical());
    let takes = |all: IpAddr, one: IpAddr| all.is_unspecified() && (all.is_ipv6() || one.is_ipv4());
    let same_interface = one == other || takes(one, other) || takes(other, one);
    a.port() != 0 && a.port() == b.port() && same_interface
}

/// Whether a connection to this host and port certainly reaches the listener at `address`.
fn leads_to(host: &str, port: u16, address: SocketAddr) -> bool {
    let to = address.ip().to_canonical();
    let is_local = to.is_loopback() || to.is_unspecified();
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let comes = match (bare.strip_suffix('.').unwrap_or(bare), bare.parse::<IpAddr>().map(|ip| ip.to_canonical())) {
        ("localhost", _) => is_local,
        // A connection to the unspecified address reaches this machine.
        (_, Ok(ip)) if ip.is_unspecified() => is_local,
        (_, Ok(ip)) => ip == to || to.is_unspecified() && ip.is_loopback() && (to.is_ipv6() || ip.is_ipv4()),
        (_, Err(_)) => false,
    };
    comes && port == address.port()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_counts_as_the_gateway_only_if_certain() {
        for (host, address, expected) in [
            ("127.0.0.1", "127.0.0.1:80", true),
            ("localhost", "127.0.0.1:80", true),
            ("localhost", "0.0.0.0:80", true),
            ("localhost.", "[::]:80", true),
            ("127.0.0.1", "0.0.0.0:80", true),
            ("127.0.0.2", "0.0.0.0:80", true),
            ("[::1]", "[::]:80", true),
            ("127.0.0.1", "[::]:80", true),
            ("[::ffff:127.0.0.1]", "127.0.0.1:80", true),
            ("10.0.0.7", "10.0.0.7:80", true),
            ("0.0.0.0", "127.0.0.1:80", true),
            ("127.0.0.1", "127.0.0.1:81", false),
            ("127.0.0.2", "127.0.0.1:80", false),
            ("[::1]", "0.0.0.0:80", false),
            ("10.0.0.7", "0.0.0.0:80", false),
            ("10.0.0.8", "10.0.0.7:80", false),
            ("localhost", "10.0.0.7:80", false),
            ("gateway", "0.0.0.0:80", false),
        ] {
            assert_eq!(leads_to(host, 80, address.parse().unwrap()), expected, "{host} {address}");
        }
    }

    #[test]
    fn two_listeners_want_the_same_port_of_the_same_interface_or_do_not() {
        for (a, b, expected) in [
            ("127.0.0.1:9090", "127.0.0.1:9090", true),
            ("0.0.0.0:9090", "127.0.0.1:9090", true),
            ("127.0.0.1:9090", "[::]:9090", true),
            ("[::]:9090", "[::1]:9090", true),
            ("[::]:9090", "0.0.0.0:9090", true),
            ("[::ffff:127.0.0.1]:9090", "127.0.0.1:9090", true),
            ("0.0.0.0:9090", "[::1]:9090", false),
            ("127.0.0.1:9090", "127.0.0.2:9090", false),
            ("127.0.0.1:9090", "127.0.0.1:9091", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            let (a, b) = (a.parse().unwrap(), b.parse().unwrap());
            assert_eq!((collide(a, b), collide(b, a)), (expected, expected), "{a} {b}");
        }
    }
}
