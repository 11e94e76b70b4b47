//! Three gateways, in processes of their own, that share a tenant's limits over TLS.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::gateway::{Gateway, Setup, sum, sum_where};
use crate::parts::with_parts;
use crate::processes::{CHAT, stream_of};
use crate::prometheus::free_address;
use crate::redis_server::{Kind, RedisServer, on_each};
use crate::running::{Running, get, post, until};
use crate::tls::Papers;

const KEY: &str = "authorization: Bearer sk-acme\r\n";
/// One a second: a machine that is busy with other things asks for more than that, too.
const PER_MINUTE: u64 = 60;
/// A minute of inflow, so that a lease may serve all clients for that long and nothing is lost.
const BURST: u64 = 60;

/// Asks all gateways again and again, from several clients each.
struct Clients {
    stop: AtomicBool,
    let_in: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Clients {
    /// Asks while `what` happens. A client that was refused comes again at once.
    fn asking<T>(&self, gateways: &[Gateway], what: impl FnOnce() -> T) -> T {
        let body = stream_of(1);
        std::thread::scope(|scope| {
            for gateway in gateways.iter().chain(gateways) {
                scope.spawn(|| {
                    while !self.stop.load(Ordering::Relaxed) {
                        let count = match post(&gateway.running.url, CHAT, KEY, &body) {
                            Ok(_) => &self.let_in,
                            Err(answer) if answer.starts_with("HTTP/1.1 429") => &self.refused,
                            Err(_) => &self.failed,
                        };
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let came = std::panic::catch_unwind(std::panic::AssertUnwindSafe(what));
            self.stop.store(true, Ordering::Relaxed);
            came.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

fn three_processes_keep_one_limit_over_tls_and_serve_on_while_the_store_is_away(kind: Kind) {
    with_parts(kind.name(), || {
        let papers = Papers::new();
        let folder = tempfile::tempdir().expect("a folder for certificates");
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("the folder is ours");
            path.to_string_lossy().into_owned()
        };
        let (root, certificate, key) =
            (file("root.pem", &papers.root), file("server.crt", &papers.certificate), file("server.key", &papers.key));
        let port = free_address().port().to_string();
        let tls = format!("--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key} --tls-auth-clients no");
        let user = "--user gateway on >s3cret ~goodput:* +eval +evalsha +time +hmget +hset +pexpire";
        let words: Vec<&str> = tls.split(' ').chain(user.split(' ')).collect();
        let mut server = RedisServer::with(kind, &words)?;
        let engine = Running::engine(&["--speed", "100"]);
        let hash = blake3::hash(b"sk-acme").to_hex();
        let more = format!(
            r#"
replicas: 3
tenants:
  - {{tenant: acme, keys: [{{blake3: "{hash}"}}], limits: {{requests_per_minute: {PER_MINUTE}, requests_burst: {BURST}}}}}
limits_store: {{redis: {{url: "rediss://gateway@localhost:{port}", password_file: redis.password, timeout: 1s}}}}
"#
        );
        let setup = Setup {
            engines: &[&engine],
            more: &more,
            files: &[("redis.password", "s3cret\n")],
            environment: &[("SSL_CERT_FILE", &root)],
            ..Setup::default()
        };
        let gateways = [Gateway::start(&setup), Gateway::start(&setup), Gateway::start(&setup)];
        let pages = || gateways.each_ref().map(|gateway| get(&gateway.admin, "/metrics").expect("the page"));
        let all = |up: f64| pages().iter().all(|page| sum(page, "goodput_limits_store_up") == up);
        until("the store answers all three", || all(1.0).then_some(()));

        let clients = Clients {
            stop: AtomicBool::new(false),
            let_in: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        clients.asking(&gateways, || {
            let start = server.time();
            let by_share = |page: &String| sum_where(page, "goodput_limits_store_requests_total", "by=\"share\"");
            let loaded = |count: &AtomicU64| count.load(Ordering::Relaxed);
            until("much more was asked for, and all that the limit allows has passed", || {
                let count = loaded(&clients.let_in) as f64;
                let unheard: f64 = pages().iter().map(by_share).sum();
                // Read after the count, because requests in between must be within the bound.
                let passed = server.time() - start;
                let allowed = BURST as f64 + passed.as_secs_f64() * PER_MINUTE as f64 / 60.0;
                assert!(count <= allowed + 1.0 + unheard, "{count} of {allowed}, and {unheard} by shares");
                let is_tried = passed > Duration::from_secs(5) && loaded(&clients.refused) > loaded(&clients.let_in);
                (is_tried && count >= 0.9 * allowed).then_some(())
            });

            server.kill();
            until("all notice", || all(0.0).then_some(()));
            let before = clients.let_in.load(Ordering::Relaxed);
            until("they serve on", || (clients.let_in.load(Ordering::Relaxed) > before + 5).then_some(()));
            assert!(pages().iter().map(by_share).sum::<f64>() > 0.0);
            server.restart();
            until("all use it again", || all(1.0).then_some(()));
            let by_store = |page: &String| sum_where(page, "goodput_limits_store_requests_total", "by=\"store\"");
            let before = pages().iter().map(by_store).sum::<f64>();
            until("it lets requests in", || (pages().iter().map(by_store).sum::<f64>() > before).then_some(()));
        });
        assert_eq!(clients.failed.load(Ordering::Relaxed), 0, "nobody got anything but an answer or a 429");
        for gateway in &gateways {
            let page = gateway.adds_up();
            assert!(sum_where(&page, "goodput_rate_limited_total", "tenant=\"acme\"") > 0.0, "{page}");
            let output = gateway.running.output();
            assert!(output.contains("limits store unavailable"), "{output}");
            assert!(!output.contains("s3cret"), "{output}");
        }
        // At shutdown, they return their leases.
        for mut gateway in gateways {
            gateway.running.signal("TERM");
            assert_eq!(gateway.running.exit_code(), Some(0));
        }
        Ok(())
    });
}

on_each! {
    three_processes_keep_one_limit_over_tls_and_serve_on_while_the_store_is_away,
}
