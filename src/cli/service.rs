//! A gateway that runs: listeners, probes, reload, and the way out. `serve` runs one from a
//! file, `demo` one over simulated engines.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::task::{Id, JoinHandle, JoinSet};
use tower::ServiceExt;

use crate::accept::settings::{Listen, Shutdown};
use crate::accept::{ConnectionServer, Drain, DrainPhase, ListenError, Listener};
use crate::admin::status::{EngineStatus, GatewayStatus};
use crate::admin::{
    self, Access, AdminView, BurnRate, ClassStanding, Degradation, DrainOrder, DriftStanding, Hosts, LengthStanding,
};
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::watch::{LoadError, Reload, Reloader, RestartKeys, SettingsFile, watch};
use crate::dial::{Dial, Sockets};
use crate::gateway::{Gateway, GatewayDeps, LevelView, OverrideError};
use crate::record::burn::WindowCount;
use crate::record::settings::{AccessLog, SloStateSettings};
use crate::record::{
    self, Format, HistorySpan, LengthStatus, RecordSinks, Recorder, SloStatus, StateFile, StateLoad, WorkloadDrift,
    access,
};
use crate::route::probe::Probes;
use crate::route::{DrainError, UnlistedModel};
use crate::types::seconds_up;

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum CannotStart {
    /// The listener for clients.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The listener for operators.
    #[error("the admin port")]
    Admin(#[source] ListenError),
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
    admin: Option<(Listener, Access)>,
    shutdown: Shutdown,
    source: Option<SettingsFile>,
    writers: Vec<JoinHandle<()>>,
    state: Option<StateSaver>,
}

impl Service {
    /// Binds everything that the settings ask for. `source` is where they came from, to read
    /// them again; without one they stay.
    ///
    /// # Errors
    /// [`CannotStart`]: a port is taken, or a certificate has been spoilt since the settings were read.
    pub async fn bind(settings: Settings, source: Option<SettingsFile>, clock: Clock) -> Result<Self, CannotStart> {
        let drain = Drain::new();
        let listener = Listener::bind(&settings.listen, drain.clone(), clock).await?;
        let admin = match &settings.admin {
            Some(admin) => {
                // Its own departure, which never comes: metrics are worth most while we leave.
                let listen = Listen { address: admin.address, max_connections: ADMIN_CONNECTIONS, ..Listen::default() };
                let listener = Listener::bind(&listen, Drain::new(), clock).await;
                let access = Access { token: admin.token.clone(), hosts: Hosts::of(admin.address, &admin.hosts) };
                Some((listener.map_err(CannotStart::Admin)?, access))
            }
            None => None,
        };
        let dial: Arc<dyn Dial> = Arc::new(Sockets::new());
        let (sinks, writers) = sinks(&settings, &dial, clock);
        let recorder = Recorder::with_sinks(clock, sinks);
        let state = settings.slo_state.as_ref().map(|state| restore(state, &recorder));
        let listener = listener.counting(recorder.listener_stats().clone());
        let (shutdown, pools) = (settings.shutdown, settings.pools.clone());
        let materials = GatewayDeps { clock, dial: Arc::clone(&dial), recorder, seed: rand::random() };
        let gateway = Gateway::new(settings, materials);
        gateway.recorder.reloaded(true);
        let probes = Arc::new(Probes::new(Arc::clone(&gateway.fleet), dial, clock, rand::random()));
        probes.apply_settings(&pools);
        Ok(Service { clock, drain, gateway, probes, listener, admin, shutdown, source, writers, state })
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

    /// Which of its ports is open to whom.
    #[must_use]
    pub fn openings(&self) -> Vec<PortExposure> {
        let has_tenants = self.gateway.live.load().settings.tenants.iter().next().is_some();
        let clients = PortExposure {
            port: "clients",
            address: self.address(),
            is_tls: self.listener.is_tls(),
            asks: has_tenants,
        };
        let admin = self.admin.as_ref().map(|(listener, access)| PortExposure {
            port: "admin",
            address: listener.address(),
            is_tls: listener.is_tls(),
            asks: access.token.is_some(),
        });
        [clients].into_iter().chain(admin).collect()
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
        let Service { clock, drain, gateway, probes, listener, admin, shutdown, source, writers, state } = self;
        let mut tasks = BackgroundTasks::default();
        tasks.spawn("seats and levels", gateway.clone().run_seat_sync());
        tasks.spawn("history", gateway.recorder.clone().keep_history());
        tasks.spawn("lists of models", tell_of_models(clock, gateway.clone()));
        tasks.spawn("books", gateway.clone().run_limit_sync());
        tasks.spawn("exchange", gateway.clone().run_exchange());
        if let Some(state) = state.clone() {
            tasks.spawn("slo state", state.keep_saved(gateway.recorder.clone(), clock));
        }
        let sweeping = Arc::clone(&gateway.lines);
        tasks.spawn("sweeper", async move { sweeping.run_sweeper().await });
        let reloader = source.map(|source| follow(source, &gateway, &probes, &listener, &mut tasks));
        if let Some((listener, access)) = admin {
            let view = ServiceView { gateway: gateway.clone(), drain: drain.clone(), reloader };
            let router = admin::router(Arc::new(view), access, clock);
            tasks.spawn("admin port", listener.serve(router.map_request(Request::from)));
        }
        let lost = serve_and_leave(clock, &gateway, listener, &drain, &shutdown, &mut tasks, told).await;
        last_words(clock, gateway, tasks, writers, state).await;
        if let Some(panic) = lost.and_then(|lost| lost.panic) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// A port, as far as it matters who can use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortExposure {
    /// `clients` or `admin`.
    pub port: &'static str,
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether it speaks TLS.
    pub is_tls: bool,
    /// Whether it asks for a key or a token.
    pub asks: bool,
}

impl PortExposure {
    /// Who can reach it.
    #[must_use]
    pub fn open_to(&self) -> &'static str {
        match self.address.ip().to_canonical() {
            address if address.is_loopback() => "programs on this machine",
            address if address.is_unspecified() => "whoever reaches any address of this machine",
            _ => "whoever reaches this address",
        }
    }

    /// What it asks of them.
    #[must_use]
    pub fn asks_for(&self) -> &'static str {
        match (self.port, self.asks) {
            ("admin", true) => "a token",
            (_, true) => "an API key",
            (_, false) => "nothing",
        }
    }

    /// Anybody may see and change what operators do.
    #[must_use]
    pub fn is_careless(&self) -> bool {
        self.port == "admin" && !self.asks && !self.address.ip().to_canonical().is_loopback()
    }
}

/// How often the settings' models are looked for in the engines' lists.
const MODELS_EVERY: Duration = Duration::from_secs(1);

/// Says which models of the settings no engine lists: once all engines have been asked, and again
/// when that changes. Never ends.
async fn tell_of_models(clock: Clock, gateway: Gateway) {
    let mut told = BTreeSet::new();
    loop {
        clock.sleep_until(Some(clock.now() + MODELS_EVERY)).await;
        let live = gateway.live.load_full();
        let unlisted = live.settings.routes.unlisted(|pool| gateway.fleet.all_models(pool));
        let unlisted: BTreeSet<_> = unlisted.into_iter().collect();
        for missing in unlisted.difference(&told) {
            tracing::warn!("{}", sentence_of(missing));
        }
        told = unlisted;
    }
}

/// A model that no engine lists, in a sentence for an operator.
pub(super) fn sentence_of(UnlistedModel { model, pools }: &UnlistedModel) -> String {
    let pools = pools.iter().map(|pool| pool.as_str()).collect::<Vec<_>>().join(", ");
    format!(
        "no engine lists the model {model:?}, which a route leads to {pools}: correct its name in `routes` or `models`, or load it"
    )
}

/// What runs beside the listener for clients, until the process leaves: each by its name.
#[derive(Default)]
struct BackgroundTasks {
    set: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

/// A task that ended though it never should.
struct LostTask {
    name: &'static str,
    panic: Option<Box<dyn Any + Send>>,
}

impl BackgroundTasks {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.set.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Waits for the first one that ends.
    async fn lost(&mut self) -> LostTask {
        let (id, panic) = match self.set.join_next_with_id().await {
            Some(Ok((id, ()))) => (id, None),
            Some(Err(error)) => (error.id(), error.try_into_panic().ok()),
            None => std::future::pending().await,
        };
        LostTask { name: self.names.get(&id).copied().unwrap_or_default(), panic }
    }
}

async fn serve_and_leave(
    clock: Clock,
    gateway: &Gateway,
    listener: Listener,
    drain: &Drain,
    shutdown: &Shutdown,
    tasks: &mut BackgroundTasks,
    mut told: impl AsyncFnMut(),
) -> Option<LostTask> {
    let mut lost = None;
    let leaving = async {
        tokio::select! {
            () = told() => {}
            // Without it the gateway would go on by what it once knew, and nobody would see: whoever
            // started it can start it again.
            ended = tasks.lost() => {
                tracing::error!(task = ended.name, panicked = ended.panic.is_some(), "a gateway task ended unexpectedly");
                lost = Some(ended);
            }
        }
        tracing::info!("shutting down: failing readiness, then refusing new requests, then ending open streams");
        let hurried = async {
            tokio::select! {
                () = drain.leave(clock, shutdown) => {}
                () = told() => {
                    tracing::warn!("second shutdown signal: closing open connections");
                    drain.cut_now(clock).await;
                }
            }
        };
        tokio::join!(hurried, async {
            drain.reached(DrainPhase::Draining).await;
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
    lost
}

/// Saves the counts of classes, where the settings name a file for them.
#[derive(Clone, Debug)]
struct StateSaver {
    file: StateFile,
    every: Duration,
    /// A file of somebody else's stays as it is.
    may_save: bool,
}

/// Takes in the counts of the process before. Blocks: nothing is served yet.
fn restore(settings: &SloStateSettings, recorder: &Recorder) -> StateSaver {
    let file = StateFile::at(settings.path.clone());
    let load = file.load();
    let (result, may_save) = (load.as_str(), load.may_be_replaced());
    let path = file.path().display();
    match &load {
        StateLoad::Restored(_) | StateLoad::Absent => {
            tracing::info!(%path, result, "counts of classes outlive the process")
        }
        StateLoad::Torn => tracing::warn!(%path, result, "the file of counts is not whole: windows begin anew"),
        StateLoad::OtherVersion | StateLoad::Foreign => tracing::error!(
            %path, result,
            "this is no file of counts that this version reads; it stays as it is and nothing is saved: name another path (telemetry.slo_state.path)"
        ),
        StateLoad::Unreadable(error) => tracing::error!(
            %path, result, %error,
            "the file of counts cannot be read; it stays as it is and nothing is saved"
        ),
    }
    recorder.keep_counts(load);
    StateSaver { file, every: settings.every, may_save }
}

impl StateSaver {
    /// Saves again and again. Never ends.
    async fn keep_saved(self, recorder: Recorder, clock: Clock) {
        loop {
            clock.sleep_until(Some(clock.now() + self.every)).await;
            self.save(&recorder).await;
        }
    }

    async fn save(&self, recorder: &Recorder) {
        if !self.may_save {
            return;
        }
        let (file, state) = (self.file.clone(), recorder.slo_state());
        // A disk may take its time, and threads that relay have none.
        let saved = tokio::task::spawn_blocking(move || file.save(&state)).await;
        let saved = saved.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        recorder.state_saved(saved.is_ok());
        if let Err(error) = saved {
            let path = self.file.path().display();
            tracing::warn!(%path, %error, "the counts of classes could not be saved");
        }
    }
}

/// Every visit has ended before the process does, and every line is out.
async fn last_words(
    clock: Clock,
    gateway: Gateway,
    mut tasks: BackgroundTasks,
    writers: Vec<JoinHandle<()>>,
    state: Option<StateSaver>,
) {
    tokio::select! {
        () = gateway.recorder.emptied() => {}
        () = clock.sleep_until(Some(clock.now() + Duration::from_secs(2))) => {
            tracing::warn!(open = gateway.recorder.open_visits(), "requests were still open at exit");
        }
    }
    gateway.release_leases().await;
    tasks.set.shutdown().await;
    if let Some(state) = state {
        state.save(&gateway.recorder).await;
    }
    // With the last recorder goes the last sender of records.
    drop(gateway);
    // Writers end once what was handed over is out; a blocked output must not hold us.
    tokio::select! {
        _ = futures_util::future::join_all(writers) => {}
        () = clock.sleep_until(Some(clock.now() + Duration::from_secs(2))) => {}
    }
}

/// Where finished requests go, and the tasks that write them.
fn sinks(settings: &Settings, dial: &Arc<dyn Dial>, clock: Clock) -> (RecordSinks, Vec<JoinHandle<()>>) {
    let (mut sinks, mut writers) = (RecordSinks::default(), Vec::new());
    if settings.access_log == AccessLog::Stdout {
        let (lines, writer) = access::lines();
        sinks.access = Some(lines);
        writers.push(tokio::spawn(async move {
            if let Err(error) = writer.run(access::Stdout, clock).await {
                tracing::error!(%error, "access lines can no longer be written");
            }
        }));
    }
    if let Some(settings) = &settings.journal {
        if settings.hash_key.is_none() {
            tracing::warn!("the journal hashes tenants and prompts with a key of this process alone");
        }
        let (sender, writer) = record::journal(settings.clone(), rand::random());
        sinks.journal = Some(sender);
        writers.push(tokio::spawn(writer.run(clock)));
    }
    if let Some(settings) = &settings.otlp {
        let (sender, exporter) = record::spans(settings.clone(), rand::random());
        sinks.spans = Some(sender);
        writers.push(tokio::spawn(exporter.run(Arc::clone(dial), clock)));
    }
    (sinks, writers)
}

/// Follows the settings' source: new ones are exchanged everywhere, bad ones change nothing.
fn follow(
    source: SettingsFile,
    gateway: &Gateway,
    probes: &Arc<Probes>,
    listener: &Listener,
    tasks: &mut BackgroundTasks,
) -> Reloader {
    let file = source.path().to_path_buf();
    let (watcher, reloader) = watch(source, &gateway.live.load().settings, crate::config::watch::EVERY);
    let (gateway, probes, door) = (gateway.clone(), Arc::clone(probes), listener.door());
    // What runs of the keys that change only with a restart.
    let began = gateway.live.load_full();
    tasks.spawn(
        "settings",
        watcher.run(move |Reload { why, result }| {
            let came = result.and_then(|settings| reload(settings, &began.settings, &gateway, &probes, &door));
            gateway.recorder.reloaded(came.is_ok());
            match &came {
                Ok(_) => tracing::info!(?why, "settings reloaded"),
                Err(not) => {
                    let problem = not.lines(&file).join("; ");
                    tracing::error!(?why, %problem, "keeping the old settings");
                }
            }
            came
        }),
    );
    reloader
}

/// Exchanges the settings everywhere, or nowhere; says which keys wait for a restart.
fn reload(
    settings: Settings,
    began: &Settings,
    gateway: &Gateway,
    probes: &Probes,
    door: &ConnectionServer,
) -> Result<RestartKeys, LoadError> {
    // First what can fail.
    let unusable = |problem| LoadError::Unusable(format!("{:#}", anyhow::Error::from(problem)));
    door.set_limits(&settings.listen).map_err(unusable)?;
    let waiting = began.fixed_differences(&settings);
    for key in &waiting {
        tracing::warn!(key, "this key needs a restart");
    }
    let pools = settings.pools.clone();
    gateway.reload(settings);
    probes.apply_settings(&pools);
    Ok(waiting)
}

/// What the operators' port shows.
struct ServiceView {
    gateway: Gateway,
    drain: Drain,
    reloader: Option<Reloader>,
}

impl AdminView for ServiceView {
    fn metrics(&self, openmetrics: bool) -> String {
        self.gateway.report_engines();
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

    fn status(&self, span: HistorySpan) -> GatewayStatus {
        super::status::status(&self.gateway, span, self.is_ready())
    }

    fn drain(&self, order: &DrainOrder) -> Result<EngineStatus, DrainError> {
        let DrainOrder { pool, engine, drain, length, may_empty_pool } = order;
        let view = match drain {
            true => self.gateway.drain_engine(pool, engine, *length, *may_empty_pool)?,
            false => self.gateway.put_back_engine(pool, engine)?,
        };
        Ok(super::status::of_engine(&self.gateway, pool, &view))
    }

    fn force_level(
        &self,
        class: &str,
        level: Option<usize>,
        length: Option<Duration>,
    ) -> Result<Degradation, admin::LevelError> {
        self.gateway.force_level(class, level, length).map(|view| degradation(&view)).map_err(|not| match not {
            OverrideError::UnknownClass => admin::LevelError::UnknownClass,
            OverrideError::TooHigh(most) => admin::LevelError::TooHigh(most),
        })
    }

    fn drill(&self, misses: u64) {
        tracing::info!(misses, "a drill: misses are counted in the class drill");
        self.gateway.recorder.drill(misses);
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
    let burn_rate = |(span, rate): &(WindowCount, f64)| BurnRate {
        window_seconds: span.window.as_secs(),
        covered_seconds: span.covered.as_secs(),
        rate: *rate,
    };
    let length = |length: &LengthStatus| LengthStanding {
        length: length.length.as_str().into(),
        met: length.own.count.met,
        total: length.own.count.judged,
        attainment: length.own.count.attainment(),
        budget_remaining: length.budget_left,
        burn_rate: length.burn.iter().map(burn_rate).collect(),
    };
    let drift = |drift: &WorkloadDrift| DriftStanding {
        direction: drift.direction.into(),
        percentile: drift.percentile.into(),
        ratio: drift.ratio,
        advice: drift.advice(),
    };
    let standing = |standing: SloStatus| ClassStanding {
        class: standing.class.to_string(),
        window_seconds: standing.own.window.as_secs(),
        covered_seconds: standing.own.covered.as_secs(),
        target: standing.target,
        met: standing.own.count.met,
        total: standing.own.count.judged,
        attainment: standing.own.count.attainment(),
        budget_remaining: standing.budget_left,
        since_unix_seconds: standing.since,
        burn_rate: standing.burn.iter().map(burn_rate).collect(),
        lengths: standing.lengths.iter().map(length).collect(),
        workload_drift: standing.drifts.iter().map(drift).collect(),
        in_flight: standing.in_flight,
        waiting: standing.waiting,
        overdue: standing.overdue,
        degradation: levels.iter().find(|view| view.class == standing.class).map(degradation),
    };
    gateway.recorder.statuses().into_iter().map(standing).collect()
}

fn degradation(view: &LevelView) -> Degradation {
    Degradation {
        level: view.level,
        levels: view.levels,
        actions: view.actions.iter().map(|kind| kind.as_str().to_owned()).collect(),
        forced: view.is_forced,
        // Rounded up: it stands as long as it is told.
        forced_for_seconds: view.forced_for.map(seconds_up),
        burn_rate: view.measured.burn_rate,
        queue_wait_seconds: view.measured.queue_wait.map(|wait| wait.as_secs_f64()),
        queue_depth: view.measured.queue_depth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_says_who_can_reach_it_and_what_it_asks_of_them() {
        for (port, address, asks, open_to, asks_for, is_careless) in [
            ("clients", "0.0.0.0:8080", false, "whoever reaches any address of this machine", "nothing", false),
            ("clients", "10.0.0.5:8080", true, "whoever reaches this address", "an API key", false),
            ("admin", "127.0.0.1:9090", false, "programs on this machine", "nothing", false),
            ("admin", "[::1]:9090", true, "programs on this machine", "a token", false),
            ("admin", "[::]:9090", true, "whoever reaches any address of this machine", "a token", false),
            ("admin", "0.0.0.0:9090", false, "whoever reaches any address of this machine", "nothing", true),
        ] {
            let opening = PortExposure { port, address: address.parse().unwrap(), is_tls: false, asks };
            let said = (opening.open_to(), opening.asks_for(), opening.is_careless());
            assert_eq!(said, (open_to, asks_for, is_careless), "{port} {address}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_or_panics_is_told_by_its_name() {
        let mut tasks = BackgroundTasks::default();
        tasks.spawn("steady", std::future::pending());
        tasks.spawn("spent", async {});
        let lost = tasks.lost().await;
        assert_eq!((lost.name, lost.panic.is_some()), ("spent", false));
        tasks.spawn("broken", async { panic!("on purpose") });
        let lost = tasks.lost().await;
        assert_eq!((lost.name, lost.panic.is_some()), ("broken", true));
    }
}
