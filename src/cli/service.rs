//! A gateway that runs: listeners, probes, reload, and the way out. `serve` runs one from a
//! file, `demo` one over simulated engines.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use secrecy::SecretString;
use tokio::task::{JoinHandle, JoinSet};
use tower::ServiceExt;

use crate::accept::settings::{Listen, Shutdown};
use crate::accept::{CannotListen, Door, Drain, Listener, Phase};
use crate::admin::{self, AdminView, BurnRate, ClassStanding, Degradation};
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::watch::{NotLoaded, Reload, Reloader, Source, Waiting, watch};
use crate::dial::{Dial, Sockets};
use crate::gateway::{Gateway, LevelView, Materials, NotForced};
use crate::record::settings::AccessLog;
use crate::record::{AccessLines, EngineReport, Format, Recorder, access};
use crate::route::probe::Probes;
use crate::route::{EngineState, Fleet};

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum CannotStart {
    /// The listener for clients.
    #[error(transparent)]
    Listen(#[from] CannotListen),
    /// The listener for operators.
    #[error("the admin port")]
    Admin(#[source] CannotListen),
}

/// Operators and their scrapers at one time.
const ADMIN_CONNECTIONS: usize = 256;

/// A gateway whose sockets are bound. [`Service::run`] serves.
pub struct Service {
    clock: Clock,
    drain: Drain,
    gateway: Gateway,
    probes: Arc<Probes>,
    listener: Listener,
    admin: Option<(Listener, Option<SecretString>)>,
    shutdown: Shutdown,
    source: Option<Source>,
    lines: Option<JoinHandle<()>>,
}

impl Service {
    /// Binds everything that the settings ask for. `source` is where they came from, to read
    /// them again; without one they stay.
    ///
    /// # Errors
    /// [`CannotStart`]: a port is taken, or a certificate has been spoilt since the settings were read.
    pub async fn bind(settings: Settings, source: Option<Source>, clock: Clock) -> Result<Self, CannotStart> {
        let drain = Drain::new();
        let listener = Listener::bind(&settings.listen, drain.clone(), clock).await?;
        let admin = match &settings.admin {
            Some(admin) => {
                // Its own departure, which never comes: metrics are worth most while we leave.
                let listen = Listen { address: admin.address, max_connections: ADMIN_CONNECTIONS, ..Listen::default() };
                let listener = Listener::bind(&listen, Drain::new(), clock).await;
                Some((listener.map_err(CannotStart::Admin)?, admin.token.clone()))
            }
            None => None,
        };
        let (access, lines) = access_lines(settings.access_log, clock);
        let dial: Arc<dyn Dial> = Arc::new(Sockets::new());
        let recorder = Recorder::new(clock, access);
        let (shutdown, pools) = (settings.shutdown, settings.pools.clone());
        let materials = Materials { clock, dial: Arc::clone(&dial), recorder, seed: rand::random() };
        let gateway = Gateway::new(settings, materials);
        gateway.recorder.reloaded(true);
        let probes = Arc::new(Probes::new(Arc::clone(&gateway.fleet), dial, clock, rand::random()));
        probes.follow(&pools);
        Ok(Service { clock, drain, gateway, probes, listener, admin, shutdown, source, lines })
    }

    /// Where clients are served: with the port that the system chose, if it was asked to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// The same as a URL.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.listener.is_tls() { "https" } else { "http" };
        format!("{scheme}://{}", self.address())
    }

    /// Where operators are served.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(|(listener, _)| listener.address())
    }

    /// The gateway.
    #[must_use]
    pub fn gateway(&self) -> Gateway {
        self.gateway.clone()
    }

    /// Serves until it is `told` to end, then drains: readiness fails first, open streams run to
    /// their end within the drain limit. Told once more, it does not wait for that: what is open
    /// is ended in band.
    pub async fn run(self, told: impl AsyncFnMut()) {
        let Service { clock, drain, gateway, probes, listener, admin, shutdown, source, lines } = self;
        let mut tasks = JoinSet::new();
        tasks.spawn(gateway.clone().keep_seats());
        tasks.spawn(gateway.clone().keep_books());
        let sweeping = Arc::clone(&gateway.lines);
        tasks.spawn(async move { sweeping.keep_swept().await });
        let reloader = source.map(|source| follow(source, &gateway, &probes, &listener, &mut tasks));
        if let Some((listener, token)) = admin {
            let view = View { gateway: gateway.clone(), drain: drain.clone(), reloader };
            let router = admin::router(Arc::new(view), token);
            tasks.spawn(listener.serve(router.map_request(Request::from)));
        }
        serve_and_leave(clock, &gateway, listener, &drain, &shutdown, told).await;
        last_words(clock, gateway, tasks, lines).await;
    }
}

async fn serve_and_leave(
    clock: Clock,
    gateway: &Gateway,
    listener: Listener,
    drain: &Drain,
    shutdown: &Shutdown,
    mut told: impl AsyncFnMut(),
) {
    let leaving = async {
        told().await;
        tracing::info!("leaving: readiness fails, then no new work, then open streams end");
        let hurried = async {
            tokio::select! {
                () = drain.leave(clock, shutdown) => {}
                () = told() => {
                    tracing::warn!("told once more: what is open ends now");
                    drain.hurry(clock).await;
                }
            }
        };
        tokio::join!(hurried, async {
            drain.reached(Phase::Draining).await;
            gateway.begin_drain();
        });
        std::future::pending::<()>().await;
    };
    // On a thread that works: the one that waits here would be woken for every connection.
    let mut serving = JoinSet::new();
    serving.spawn(listener.serve(gateway.clone()));
    tokio::select! {
        ended = serving.join_next() => {
            if let Some(Err(error)) = ended
                && let Ok(panic) = error.try_into_panic()
            {
                std::panic::resume_unwind(panic);
            }
        }
        () = leaving => {}
    }
}

/// Every visit has ended before the process does, and every line is out.
async fn last_words(clock: Clock, gateway: Gateway, mut tasks: JoinSet<()>, lines: Option<JoinHandle<()>>) {
    tokio::select! {
        () = gateway.recorder.emptied() => {}
        () = clock.sleep_until(Some(clock.now() + Duration::from_secs(2))) => {
            tracing::warn!(open = gateway.recorder.open_visits(), "requests were still open at the end");
        }
    }
    gateway.leave_books().await;
    tasks.shutdown().await;
    // With the last recorder goes the last sender of lines.
    drop(gateway);
    if let Some(lines) = lines {
        // The writer ends once the lines handed over are out; a blocked stdout must not hold us.
        tokio::select! {
            _ = lines => {}
            () = clock.sleep_until(Some(clock.now() + Duration::from_secs(2))) => {}
        }
    }
}

fn access_lines(log: AccessLog, clock: Clock) -> (Option<AccessLines>, Option<JoinHandle<()>>) {
    match log {
        AccessLog::Off => (None, None),
        AccessLog::Stdout => {
            let (lines, writer) = access::lines();
            let task = tokio::spawn(async move {
                if let Err(error) = writer.run(access::Stdout, clock).await {
                    tracing::error!(%error, "access lines can no longer be written");
                }
            });
            (Some(lines), Some(task))
        }
    }
}

/// Follows the settings' source: new ones are exchanged everywhere, bad ones change nothing.
fn follow(
    source: Source,
    gateway: &Gateway,
    probes: &Arc<Probes>,
    listener: &Listener,
    tasks: &mut JoinSet<()>,
) -> Reloader {
    let file = source.path().to_path_buf();
    let (watcher, reloader) = watch(source, &gateway.live.load().settings, crate::config::watch::EVERY);
    let (gateway, probes, door) = (gateway.clone(), Arc::clone(probes), listener.door());
    // What runs of the keys that change only with a restart.
    let began = gateway.live.load_full();
    tasks.spawn(watcher.run(move |Reload { why, result }| {
        let came = result.and_then(|settings| adopt(settings, &began.settings, &gateway, &probes, &door));
        gateway.recorder.reloaded(came.is_ok());
        match &came {
            Ok(_) => tracing::info!(?why, "settings exchanged"),
            Err(not) => {
                let problem = not.lines(&file).join("; ");
                tracing::error!(?why, %problem, "the settings stay as they were");
            }
        }
        came
    }));
    reloader
}

/// Exchanges the settings everywhere, or nowhere; says which keys wait for a restart.
fn adopt(
    settings: Settings,
    began: &Settings,
    gateway: &Gateway,
    probes: &Probes,
    door: &Door,
) -> Result<Waiting, NotLoaded> {
    // First what can fail.
    let unusable = |problem| NotLoaded::Unusable(format!("{:#}", anyhow::Error::from(problem)));
    door.set_limits(&settings.listen).map_err(unusable)?;
    let waiting = began.fixed_differences(&settings);
    for key in &waiting {
        tracing::warn!(key, "this key changes only with a restart");
    }
    probes.follow(&settings.pools);
    gateway.adopt(settings);
    Ok(waiting)
}

/// What the operators' port shows.
struct View {
    gateway: Gateway,
    drain: Drain,
    reloader: Option<Reloader>,
}

impl AdminView for View {
    fn metrics(&self, openmetrics: bool) -> String {
        let at = self.gateway.clock.now();
        report_engines(&self.gateway.fleet, &self.gateway.recorder, at);
        self.gateway.report_seats();
        self.gateway.report_levels();
        self.gateway.report_store();
        self.gateway.recorder.page(if openmetrics { Format::OpenMetrics } else { Format::Text })
    }

    fn is_ready(&self) -> bool {
        !self.drain.is_leaving()
    }

    fn slo(&self) -> Vec<ClassStanding> {
        standings(&self.gateway)
    }

    fn force_level(
        &self,
        class: &str,
        level: Option<usize>,
        length: Option<Duration>,
    ) -> Result<Degradation, admin::NotForced> {
        self.gateway.force_level(class, level, length).map(|view| degradation(&view)).map_err(|not| match not {
            NotForced::UnknownClass => admin::NotForced::UnknownClass,
            NotForced::TooHigh(most) => admin::NotForced::TooHigh(most),
        })
    }

    fn reload(&self) -> Pin<Box<dyn Future<Output = Result<Vec<&'static str>, Vec<String>>> + Send + '_>> {
        Box::pin(async move {
            let Some(reloader) = &self.reloader else {
                return Err(vec!["these settings have no file that could be read again".to_owned()]);
            };
            reloader.reload().await.map_err(|why| why.lines(reloader.file()))
        })
    }
}

/// How each class stands, as the operators' port writes it.
pub(super) fn standings(gateway: &Gateway) -> Vec<ClassStanding> {
    let levels = gateway.level_views();
    let standing = |standing: crate::record::Standing| ClassStanding {
        class: standing.class.to_string(),
        window_seconds: standing.own.window.as_secs(),
        covered_seconds: standing.own.covered.as_secs(),
        target: standing.target,
        met: standing.own.count.met,
        total: standing.own.count.judged,
        attainment: standing.own.count.attainment(),
        budget_remaining: standing.budget_left,
        burn_rate: standing
            .burn
            .iter()
            .map(|(span, rate)| BurnRate {
                window_seconds: span.window.as_secs(),
                covered_seconds: span.covered.as_secs(),
                rate: *rate,
            })
            .collect(),
        in_flight: standing.in_flight,
        waiting: standing.waiting,
        overdue: standing.overdue,
        degradation: levels.iter().find(|view| view.class == standing.class).map(degradation),
    };
    gateway.recorder.standings().into_iter().map(standing).collect()
}

fn degradation(view: &LevelView) -> Degradation {
    Degradation {
        level: view.level,
        levels: view.levels,
        actions: view.actions.iter().map(|kind| kind.as_str()).collect(),
        forced: view.is_forced,
        // Rounded up: it stands as long as it is told.
        forced_for_seconds: view.forced_for.map(|left| left.as_secs() + u64::from(left.subsec_nanos() > 0)),
        burn_rate: view.measured.burn_rate,
        queue_wait_seconds: view.measured.queue_wait.map(|wait| wait.as_secs_f64()),
        queue_depth: view.measured.queue_depth,
    }
}

/// The gauges of engines are told at each scrape, from what the fleet knows then.
fn report_engines(fleet: &Fleet, recorder: &Recorder, at: crate::units::Tick) {
    for pool in fleet.view(at) {
        for engine in pool.engines {
            if engine.left.is_some() {
                recorder.engine_left(&pool.pool, &engine.engine);
                continue;
            }
            let report = EngineReport {
                up: matches!(engine.state, EngineState::Up | EngineState::Cooling),
                waiting: engine.waiting,
                running: engine.running,
                kv_usage: engine.kv_usage,
                seats: engine.seats.map(f64::from),
                ttft_error: engine.errors.ttft,
                tpot_error: engine.errors.tpot,
            };
            recorder.engine(&pool.pool, &engine.engine, report);
        }
    }
}
