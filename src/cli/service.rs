//! A running gateway: listeners, probes, reload and shutdown. `serve` runs one from a file, `demo` one over
//! simulated engines.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use parking_lot::Mutex;
use tokio::task::{Id, JoinHandle, JoinSet};
use tower::ServiceExt;

use super::class_status::{degradation, standings};
use crate::accept::settings::{Listen, Shutdown};
use crate::accept::{ConnectionServer, Drain, DrainPhase, ListenError, Listener};
use crate::admin::status::{EngineStatus, GatewayStatus};
use crate::admin::{self, Access, AdminView, Degradation, DrainOrder, Hosts, SloBody};
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::watch::{LoadError, Reload, Reloader, RestartKeys, SettingsFile, watch};
use crate::dial::{Dial, Sockets};
use crate::gateway::{Gateway, GatewayDeps, OverrideError};
use crate::record::settings::{AccessLog, SloStateSettings};
use crate::record::{
    self, Format, HistorySpan, PrometheusReader, RecordSinks, Recorder, StateFile, StateLoad, StateSave, StateStamp,
    access,
};
use crate::route::probe::Probes;
use crate::route::{DrainError, UnlistedModel};

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum CannotStart {
    /// The client listener.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The admin listener.
    #[error("the admin port")]
    Admin(#[source] ListenError),
}

/// Most concurrent connections of operators and their scrapers.
const ADMIN_CONNECTIONS: usize = 256;

/// A gateway with bound sockets. [`Service::run`] serves.
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
    reader: Option<PrometheusReader>,
}

impl Service {
    /// Binds all sockets. `source` is the settings file for reloads; without one the settings never change.
    ///
    /// # Errors [`CannotStart`]: a port is taken, or a certificate has become invalid since the settings were
    /// read.
    pub async fn bind(settings: Settings, source: Option<SettingsFile>, clock: Clock) -> Result<Self, CannotStart> {
        let drain = Drain::new();
        let listener = Listener::bind(&settings.listen, drain.clone(), clock).await?;
        let admin = match &settings.admin {
            Some(admin) => {
                // The admin listener never drains, because metrics matter most during shutdown.
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
        let reader = settings.prometheus.clone().map(|prometheus| {
            recorder.expect_prometheus();
            PrometheusReader::new(prometheus, Arc::clone(&dial), recorder.clone(), clock)
        });
        let listener = listener.counting(recorder.listener_stats().clone());
        let (shutdown, pools) = (settings.shutdown, settings.pools.clone());
        let materials = GatewayDeps { clock, dial: Arc::clone(&dial), recorder, seed: rand::random() };
        let gateway = Gateway::new(settings, materials);
        gateway.recorder.reloaded(true);
        let probes = Arc::new(Probes::new(Arc::clone(&gateway.fleet), dial, clock, rand::random()));
        probes.apply_settings(&pools);
        Ok(Service { clock, drain, gateway, probes, listener, admin, shutdown, source, writers, state, reader })
    }

    /// Address of the client listener, with the port that the system chose.
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

    /// Address of the admin listener.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(|(listener, _)| listener.address())
    }

    /// Exposure of each port.
    #[must_use]
    pub fn openings(&self) -> Vec<PortExposure> {
        let clients = PortExposure {
            port: "clients",
            address: self.address(),
            is_tls: self.listener.is_tls(),
            asks: self.gateway.live.load().settings.keyring.requires_key(),
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

    /// Serves until `told` resolves, then drains: readiness fails first, and open streams run to their end
    /// within the drain limit. When `told` resolves again, open responses get an error event and end at once.
    pub async fn run(self, told: impl AsyncFnMut()) {
        let Service { clock, drain, gateway, probes, listener, admin, shutdown, source, writers, state, reader } = self;
        let mut tasks = BackgroundTasks::default();
        tasks.spawn("seats and levels", gateway.clone().run_seat_sync());
        tasks.spawn("history", gateway.recorder.clone().keep_history());
        tasks.spawn("lists of models", tell_of_models(clock, gateway.clone()));
        tasks.spawn("books", gateway.clone().run_limit_sync());
        tasks.spawn("exchange", gateway.clone().run_exchange());
        if let Some(state) = state.clone() {
            tasks.spawn("slo state", state.keep_saved(gateway.recorder.clone(), clock));
        }
        if let Some(reader) = reader {
            tasks.spawn("prometheus", reader.run());
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

/// Exposure of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortExposure {
    /// `clients` or `admin`.
    pub port: &'static str,
    /// Address of the listener.
    pub address: SocketAddr,
    /// Whether it speaks TLS.
    pub is_tls: bool,
    /// Whether it requires a key or a token.
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

    /// What it requires.
    #[must_use]
    pub fn asks_for(&self) -> &'static str {
        match (self.port, self.asks) {
            ("admin", true) => "a token",
            (_, true) => "an API key",
            (_, false) => "nothing",
        }
    }

    /// Whether anyone may use the operators' endpoints without credentials.
    #[must_use]
    pub fn is_careless(&self) -> bool {
        self.port == "admin" && !self.asks && !self.address.ip().to_canonical().is_loopback()
    }
}

/// Interval of the comparison of routed models with the engines' lists.
const MODELS_EVERY: Duration = Duration::from_secs(1);

/// Warns about routed models that no engine lists: once all engines were probed, and after changes. Never
/// ends.
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

/// A warning about a model that no engine lists.
pub(super) fn sentence_of(UnlistedModel { model, pools }: &UnlistedModel) -> String {
    let pools = pools.iter().map(|pool| pool.as_str()).collect::<Vec<_>>().join(", ");
    format!(
        "no engine lists the model {model:?}, which a route leads to {pools}: correct its name in `routes` or `models`, or load it"
    )
}

/// Background tasks, by name, until shutdown.
#[derive(Default)]
struct BackgroundTasks {
    set: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

/// A task that ended although it should not.
struct LostTask {
    name: &'static str,
    panic: Option<Box<dyn Any + Send>>,
}

impl BackgroundTasks {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.set.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Waits for the first task that ends.
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
            // Without this task the gateway would continue on stale data unnoticed; a supervisor can restart
            // the process.
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
    // Spawned, because the main thread would be woken for every connection.
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

/// Saves the counts of classes, if the settings name a file.
#[derive(Clone, Debug)]
struct StateSaver {
    file: StateFile,
    every: Duration,
    /// False for a file of another kind, which stays as it is.
    may_save: bool,
    /// The file as this gateway read or saved it last.
    stamp: Arc<Mutex<Option<StateStamp>>>,
}

/// Restores the counts of the previous process. May block: the gateway does not serve yet.
fn restore(settings: &SloStateSettings, recorder: &Recorder) -> StateSaver {
    let file = StateFile::at(settings.path.clone());
    let load = file.load();
    let (result, may_save) = (load.as_str(), load.may_be_replaced());
    let path = file.path().display();
    match &load {
        StateLoad::Restored(_) | StateLoad::Absent => {
            tracing::info!(%path, result, "restoring and saving the counts of classes")
        }
        StateLoad::Torn => tracing::warn!(%path, result, "the file of counts is damaged; windows start empty"),
        StateLoad::OtherVersion | StateLoad::Foreign => tracing::error!(
            %path, result,
            "the file has another format or version; it is left as it is, and nothing is saved: choose another path (telemetry.slo_state.path)"
        ),
        StateLoad::Unreadable(error) => tracing::error!(
            %path, result, %error,
            "the file of counts cannot be read; it is left as it is, and nothing is saved"
        ),
    }
    recorder.keep_counts(load);
    let stamp = Arc::new(Mutex::new(file.stamp()));
    StateSaver { file, every: settings.every, may_save, stamp }
}

impl StateSaver {
    /// Saves at an interval. Never ends.
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
        // Blocking file I/O would stall threads that relay.
        let saved = tokio::task::spawn_blocking(move || (file.stamp(), file.save(&state))).await;
        let (found, saved) = saved.unwrap_or_else(|error| (None, Err(std::io::Error::other(error))));
        let path = self.file.path().display();
        let result = match saved {
            Ok(stamp) => {
                let last = self.stamp.lock().replace(stamp);
                if found == last { StateSave::Success } else { StateSave::Conflict }
            }
            Err(error) => {
                tracing::warn!(%path, %error, "cannot save the counts of classes");
                StateSave::Failure
            }
        };
        if result == StateSave::Conflict {
            tracing::warn!(%path, "another process saved its counts in this file; give each gateway a file of its own (telemetry.slo_state.path)");
        }
        recorder.state_saved(result);
    }
}

/// Waits for open requests to be recorded, and for all records to be written.
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
            tracing::warn!(open = gateway.recorder.open_visits(), "requests still open at exit");
        }
    }
    gateway.release_leases().await;
    tasks.set.shutdown().await;
    if let Some(state) = state {
        state.save(&gateway.recorder).await;
    }
    // The recorder holds the last sender of records.
    drop(gateway);
    // Writers end once all records are written; a blocked output must not delay the exit.
    tokio::select! {
        _ = futures_util::future::join_all(writers) => {}
        () = clock.sleep_until(Some(clock.now() + Duration::from_secs(2))) => {}
    }
}

/// Destinations of finished requests, and the tasks that write them.
fn sinks(settings: &Settings, dial: &Arc<dyn Dial>, clock: Clock) -> (RecordSinks, Vec<JoinHandle<()>>) {
    let (mut sinks, mut writers) = (RecordSinks::default(), Vec::new());
    if settings.access_log == AccessLog::Stdout {
        let (lines, writer) = access::lines();
        sinks.access = Some(lines);
        writers.push(tokio::spawn(async move {
            if let Err(error) = writer.run(access::Stdout, clock).await {
                tracing::error!(%error, "the access log cannot be written any more");
            }
        }));
    }
    if let Some(settings) = &settings.journal {
        if settings.hash_key.is_none() {
            tracing::warn!("no journal.hash_key_file: hashes of tenants and prompts differ between processes");
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

/// Reloads the settings when their source changes; an invalid file changes nothing.
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
    // The values of keys that need a restart.
    let began = gateway.live.load_full();
    tasks.spawn(
        "settings",
        watcher.run(move |Reload { why, result }| {
            let (gateway, probes, door) = (gateway.clone(), Arc::clone(&probes), door.clone());
            let (began, file) = (Arc::clone(&began), file.clone());
            async move {
                let came = match result {
                    Ok(settings) => reload(settings, &began.settings, &gateway, &probes, &door).await,
                    Err(not) => Err(not),
                };
                gateway.recorder.reloaded(came.is_ok());
                match &came {
                    Ok(_) => tracing::info!(?why, "settings reloaded"),
                    Err(not) => {
                        let problem = not.lines(&file).join("; ");
                        tracing::error!(?why, %problem, "keeping the old settings");
                    }
                }
                came
            }
        }),
    );
    reloader
}

/// Applies new settings everywhere or nowhere; logs keys that need a restart.
async fn reload(
    settings: Settings,
    began: &Settings,
    gateway: &Gateway,
    probes: &Probes,
    door: &ConnectionServer,
) -> Result<RestartKeys, LoadError> {
    // Fallible steps come first.
    let unusable = |problem| LoadError::Unusable(format!("{:#}", anyhow::Error::from(problem)));
    door.set_limits(&settings.listen).await.map_err(unusable)?;
    let waiting = began.fixed_differences(&settings);
    for key in &waiting {
        tracing::warn!(key, "a change of this key takes effect after a restart");
    }
    let pools = settings.pools.clone();
    gateway.reload(settings);
    probes.apply_settings(&pools);
    Ok(waiting)
}

/// Data of the admin port.
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

    fn slo(&self) -> SloBody {
        SloBody { note: self.gateway.recorder.budgets_in_words(), classes: standings(&self.gateway) }
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
        tracing::info!(misses, "drill: counting misses in the class drill");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, ProcessEnvironment};

    #[test]
    fn a_port_states_its_exposure_and_credentials() {
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

    #[tokio::test]
    async fn clients_need_an_api_key_if_the_settings_name_tenants() {
        let minimal = include_str!("../../config/minimal.yaml");
        let pool = format!("{minimal}listen: {{address: \"127.0.0.1:0\"}}\nadmin: off\n");
        let keys = format!("tenants: [{{tenant: acme, keys: [{{blake3: \"{}\"}}]}}]\n", "0a".repeat(32));
        for (tenants, asks_for) in [("", "nothing"), (keys.as_str(), "an API key")] {
            let settings = config::load(&format!("{pool}{tenants}"), &ProcessEnvironment::default());
            let service = Service::bind(settings.unwrap(), None, Clock::start()).await.unwrap();
            assert_eq!(service.openings()[0].asks_for(), asks_for, "{tenants}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_ended_or_panicked_task_is_reported_by_name() {
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
