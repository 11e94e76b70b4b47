//! Reloads the settings: when the file or anything it refers to changes, on SIGHUP, and on
//! request.
//!
//! All or nothing: either new settings are applied, or the old ones stay and the problems are reported. A
//! change is detected by content, so a switched link (as in Kubernetes) counts and a touched file does
//! not. A change is applied only if two consecutive checks find the same content, so that a half-written
//! file is not taken for a complete one; SIGHUP and an explicit request apply at
//! once.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use super::{Environment, Problem, ProcessEnvironment, Settings, fingerprint, load, load_with_files};

/// A settings file and its environment.
#[derive(Clone)]
pub struct SettingsFile {
    /// The path as given, for messages.
    path: PathBuf,
    /// The path in its environment.
    name: PathBuf,
    surroundings: Arc<dyn Environment>,
    /// Whether it was read before, and is watched.
    is_watched: bool,
}

/// Why a file has no valid settings. Printed with the file's name: [`LoadError::lines`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The file cannot be read: why, and how to fix it.
    Unreadable(&'static str),
    /// Its problems.
    Problems(Vec<Problem>),
    /// The settings are valid, but something they name cannot be used.
    Unusable(String),
}

impl LoadError {
    /// One line per problem, each with the name of the file.
    #[must_use]
    pub fn lines(&self, file: &Path) -> Vec<String> {
        let file = file.display();
        match self {
            LoadError::Unreadable(why) => vec![format!("{file}: {why}")],
            LoadError::Problems(problems) => problems.iter().map(|problem| format!("{file}:{problem}")).collect(),
            LoadError::Unusable(why) => vec![format!("{file}: {why}")],
        }
    }
}

/// Why a settings file cannot be read, and how to fix it.
fn unreadable(kind: io::ErrorKind) -> LoadError {
    LoadError::Unreadable(match kind {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            "there is no such file; give the path of a settings file"
        }
        io::ErrorKind::IsADirectory => "this is a directory; give the path of the settings file in it",
        io::ErrorKind::PermissionDenied => {
            "this user may not read it; give the file and the directories above it read permission"
        }
        io::ErrorKind::NotSeekable => {
            "this is a pipe or a device, which can be read once and not again; put the settings into a regular file"
        }
        _ => "the system cannot read it; look at the disk or mount it lies on, and try again",
    })
}

impl SettingsFile {
    /// A file of this machine with the process's environment.
    #[must_use]
    pub fn file(path: &Path) -> Self {
        let name = path.file_name().map(PathBuf::from).unwrap_or_default();
        SettingsFile {
            path: path.to_path_buf(),
            name,
            surroundings: Arc::new(ProcessEnvironment::of(path)),
            is_watched: false,
        }
    }

    /// A file of another environment.
    #[must_use]
    pub fn of(name: &str, surroundings: Arc<dyn Environment>) -> Self {
        SettingsFile { path: PathBuf::from(name), name: PathBuf::from(name), surroundings, is_watched: false }
    }

    /// The path as given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the current settings.
    ///
    /// # Errors
    /// [`LoadError`] with all problems.
    pub fn read(&self) -> Result<Settings, LoadError> {
        load(&self.text()?, &*self.surroundings).map_err(LoadError::Problems)
    }

    /// Hash of the file and the files it refers to, and the resulting settings. Missing files are watched as
    /// well.
    fn look(&self, companions: &mut Vec<PathBuf>) -> ([u8; 32], Result<Settings, LoadError>) {
        loop {
            let content = self.content(companions);
            let unsound = match self.text().map(|text| load_with_files(&text, &*self.surroundings)) {
                Ok(Ok(settings)) => return (content, Ok(settings)),
                Ok(Err(unsound)) => unsound,
                Err(unreadable) => return (content, Err(unreadable)),
            };
            let known = companions.len();
            for file in unsound.files {
                if !companions.contains(&file) {
                    companions.push(file);
                }
            }
            if companions.len() == known {
                return (content, Err(LoadError::Problems(unsound.problems)));
            }
        }
    }

    fn text(&self) -> Result<String, LoadError> {
        let bytes = match self.is_watched {
            false => self.surroundings.settings(&self.name),
            true => self.surroundings.settings_again(&self.name),
        };
        let bytes = bytes.map_err(|error| unreadable(error.kind()))?;
        String::from_utf8(bytes).map_err(|_| LoadError::Unreadable("this is not UTF-8; save it as UTF-8 text"))
    }

    /// Current hash of the file and the files it refers to.
    fn content(&self, companions: &[PathBuf]) -> [u8; 32] {
        let text = self.text().map_or_else(|_| blake3::hash(b"unreadable"), |text| blake3::hash(text.as_bytes()));
        fingerprint(text, companions, &*self.surroundings)
    }
}

impl fmt::Debug for SettingsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Source").field(&self.path).finish()
    }
}

/// Keys whose new values need a restart.
pub type RestartKeys = Vec<&'static str>;

/// Cause of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadCause {
    /// Changed content.
    Changed,
    /// SIGHUP.
    Signal,
    /// An explicit request.
    Asked,
}

/// One reload: its cause and result.
#[derive(Debug)]
pub struct Reload {
    /// The cause.
    pub why: ReloadCause,
    /// The new settings, or why the old ones stay.
    pub result: Result<Settings, LoadError>,
}

/// Default interval of checks.
pub const EVERY: Duration = Duration::from_secs(5);

/// Requests reloads. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reloader {
    file: Arc<Path>,
    asks: mpsc::Sender<oneshot::Sender<Result<RestartKeys, LoadError>>>,
}

impl Reloader {
    /// The path of the file as given.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reloads the settings; returns when they are applied.
    ///
    /// # Errors
    /// Why the old ones stay.
    pub async fn reload(&self) -> Result<RestartKeys, LoadError> {
        let gone = || LoadError::Unusable("the gateway is leaving and takes no new settings".to_owned());
        let (answer, told) = oneshot::channel();
        self.asks.send(answer).await.map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }
}

/// Watches a settings file until the last [`Reloader`] is dropped.
#[derive(Debug)]
pub struct Watcher {
    source: SettingsFile,
    seen: SeenContent,
    companions: Vec<PathBuf>,
    every: Duration,
    asks: mpsc::Receiver<oneshot::Sender<Result<RestartKeys, LoadError>>>,
    hangups: SighupStream,
}

/// A watcher of the file that `current` came from. Must be called within the runtime; SIGHUP no longer ends
/// the process afterwards.
#[must_use]
pub fn watch(source: SettingsFile, current: &Settings, every: Duration) -> (Watcher, Reloader) {
    // One queued request suffices: further callers wait to send.
    let (sender, asks) = mpsc::channel(1);
    let seen = SeenContent { tried: Some(current.hash), different: None };
    let (companions, file) = (current.files.clone(), Arc::from(source.path()));
    let source = SettingsFile { is_watched: true, ..source };
    let watcher = Watcher { source, seen, companions, every, asks, hangups: SighupStream::listen() };
    (watcher, Reloader { file, asks: sender })
}

impl Watcher {
    /// Watches and reports every reload; `told` applies it. Ends when the last [`Reloader`] is dropped.
    pub async fn run<F>(mut self, mut told: impl FnMut(Reload) -> F)
    where
        F: Future<Output = Result<RestartKeys, LoadError>>,
    {
        let mut looks = tokio::time::interval(self.every);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = looks.tick() => {
                    if self.has_changed().await {
                        let _ = self.reload(ReloadCause::Changed, &mut told).await;
                    }
                }
                () = self.hangups.next() => {
                    let _ = self.reload(ReloadCause::Signal, &mut told).await;
                }
                ask = self.asks.recv() => {
                    let Some(answer) = ask else { return };
                    let came = self.reload(ReloadCause::Asked, &mut told).await;
                    // The caller may have gone.
                    let _ = answer.send(came);
                }
            }
        }
    }

    async fn reload<F>(
        &mut self,
        why: ReloadCause,
        told: &mut impl FnMut(Reload) -> F,
    ) -> Result<RestartKeys, LoadError>
    where
        F: Future<Output = Result<RestartKeys, LoadError>>,
    {
        let came = told(Reload { why, result: self.read().await }).await;
        if let Err(LoadError::Unusable(_)) = came {
            // The obstacle is not part of the settings' content, so it is retried.
            self.seen = SeenContent::default();
        }
        came
    }

    async fn has_changed(&mut self) -> bool {
        let (source, companions) = (self.source.clone(), self.companions.clone());
        let content = tokio::task::spawn_blocking(move || source.content(&companions)).await;
        content.is_ok_and(|content| self.seen.look(content))
    }

    async fn read(&mut self) -> Result<Settings, LoadError> {
        let (source, mut companions) = (self.source.clone(), self.companions.clone());
        let all = tokio::task::spawn_blocking(move || {
            let (content, result) = source.look(&mut companions);
            (content, result, companions)
        });
        let Ok((content, result, companions)) = all.await else {
            return Err(LoadError::Unreadable("the reading of it broke off; try again"));
        };
        match &result {
            Ok(settings) => {
                self.companions.clone_from(&settings.files);
                self.seen.took(settings.hash);
            }
            Err(_) => {
                self.companions = companions;
                self.seen.took(content);
            }
        }
        result
    }
}

/// The content tried last, and the content seen once since.
#[derive(Debug, Default)]
struct SeenContent {
    tried: Option<[u8; 32]>,
    different: Option<[u8; 32]>,
}

impl SeenContent {
    /// Whether this content is new and equal to that of the last check.
    fn look(&mut self, content: [u8; 32]) -> bool {
        let settled = self.different == Some(content);
        self.different = (Some(content) != self.tried).then_some(content);
        settled && self.different.is_some()
    }

    fn took(&mut self, content: [u8; 32]) {
        *self = SeenContent { tried: Some(content), different: None };
    }
}

/// SIGHUP, on systems that have it.
#[derive(Debug)]
struct SighupStream {
    #[cfg(unix)]
    signal: Option<tokio::signal::unix::Signal>,
}

impl SighupStream {
    #[cfg(unix)]
    fn listen() -> Self {
        use tokio::signal::unix::{SignalKind, signal};
        let signal = signal(SignalKind::hangup());
        if let Err(error) = &signal {
            tracing::warn!(%error, "cannot receive SIGHUP; the file is still watched for changes");
        }
        SighupStream { signal: signal.ok() }
    }

    #[cfg(not(unix))]
    fn listen() -> Self {
        SighupStream {}
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        if let Some(signal) = &mut self.signal {
            if signal.recv().await.is_some() {
                return;
            }
            self.signal = None;
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::io;
    use std::sync::Mutex;

    use crate::types::ClassId;

    /// In-memory files that a test can change.
    #[derive(Clone, Default)]
    struct FakeFiles(Arc<Mutex<HashMap<PathBuf, String>>>);

    impl FakeFiles {
        fn write(&self, name: &str, text: impl Into<String>) {
            self.0.lock().unwrap().insert(PathBuf::from(name), text.into());
        }
        fn remove(&self, name: &str) {
            self.0.lock().unwrap().remove(Path::new(name));
        }
    }

    impl Environment for FakeFiles {
        fn variable(&self, _: &str) -> Option<String> {
            None
        }
        fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
            let files = self.0.lock().unwrap();
            files.get(path).map(|text| text.clone().into_bytes()).ok_or_else(|| io::ErrorKind::NotFound.into())
        }
    }

    fn settings(class: &str) -> String {
        format!(
            "slo_classes: [{{slo_class: {class}, joint_attainment_target: 0.9}}]\n\
             default_class: {class}\n\
             pools: [{{pool: p, engines: [{{url: http://e:1}}]}}]\n\
             tenants: [{{tenant: t, keys_file: keys}}]\n"
        )
    }

    struct ReloadBench {
        desk: FakeFiles,
        reloader: Reloader,
        heard: mpsc::UnboundedReceiver<(ReloadCause, Result<ClassId, LoadError>)>,
    }

    fn bench() -> ReloadBench {
        let desk = FakeFiles::default();
        desk.write("keys", format!("{} prod\n", blake3::hash(b"k").to_hex()));
        desk.write("g.yaml", settings("a"));
        let source = SettingsFile::of("g.yaml", Arc::new(desk.clone()));
        let current = source.read().unwrap();
        let (watcher, reloader) = watch(source, &current, EVERY);
        let (sender, heard) = mpsc::unbounded_channel();
        tokio::spawn(watcher.run(move |reload| {
            let class = reload.result.map(|settings| settings.default_class);
            // A class with this name cannot be applied.
            let class = class.and_then(|class| match class.as_str() {
                "unusable" => Err(LoadError::Unusable("no such certificate".to_owned())),
                _ => Ok(class),
            });
            let came = class.as_ref().map(|_| vec![]).map_err(Clone::clone);
            let _ = sender.send((reload.why, class));
            std::future::ready(came)
        }));
        ReloadBench { desk, reloader, heard }
    }

    #[tokio::test(start_paused = true)]
    async fn settings_that_could_not_be_put_to_use_are_tried_again_by_and_by() {
        let mut bench = bench();
        bench.desk.write("g.yaml", settings("unusable"));
        assert!(matches!(bench.reloader.reload().await, Err(LoadError::Unusable(_))), "whoever asked is told");
        assert!(bench.heard.try_recv().unwrap().1.is_err());
        looks(2).await;
        assert_eq!(bench.heard.try_recv().unwrap().0, ReloadCause::Changed);
        bench.desk.write("g.yaml", settings("b"));
        looks(3).await;
        assert_eq!(std::iter::from_fn(|| bench.heard.try_recv().ok()).last().unwrap().1, Ok("b".into()));
        looks(5).await;
        assert!(bench.heard.try_recv().is_err());
    }

    async fn looks(n: u32) {
        tokio::time::sleep(EVERY * n + Duration::from_millis(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_taken_once_and_only_when_two_looks_agree() {
        let mut bench = bench();
        looks(1).await;
        bench.desk.write("g.yaml", settings("b"));
        looks(1).await;
        assert!(bench.heard.try_recv().is_err(), "one look is not enough");
        looks(1).await;
        assert_eq!(bench.heard.try_recv().unwrap(), (ReloadCause::Changed, Ok("b".into())));
        looks(5).await;
        assert!(bench.heard.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_keeps_changing_waits_until_it_rests() {
        let mut bench = bench();
        looks(1).await;
        for n in 0..5 {
            bench.desk.write("g.yaml", format!("{}# {n}\n", settings("b")));
            looks(1).await;
        }
        assert!(bench.heard.try_recv().is_err());
        looks(2).await;
        assert_eq!(bench.heard.try_recv().unwrap().1, Ok("b".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn an_invalid_file_is_reported_once_and_a_valid_one_after_it_is_applied() {
        let mut bench = bench();
        bench.desk.write("g.yaml", "slo_classes: [\n");
        looks(4).await;
        let (why, result) = bench.heard.try_recv().unwrap();
        assert_eq!(why, ReloadCause::Changed);
        assert!(matches!(result, Err(LoadError::Problems(problems)) if problems.len() == 1));
        assert!(bench.heard.try_recv().is_err(), "told once");
        bench.desk.write("g.yaml", settings("c"));
        looks(3).await;
        assert_eq!(bench.heard.try_recv().unwrap().1, Ok("c".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_files_it_refers_to_are_watched_too() {
        let mut bench = bench();
        bench.desk.write("keys", format!("{} prod\n", blake3::hash(b"other").to_hex()));
        looks(3).await;
        assert_eq!(bench.heard.try_recv().unwrap().0, ReloadCause::Changed);
        bench.desk.remove("keys");
        looks(3).await;
        assert!(matches!(bench.heard.try_recv().unwrap().1, Err(LoadError::Problems(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn settings_that_need_a_missing_file_load_when_it_appears() {
        let made = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        let mut bench = bench();
        let named = settings("b").replace("keys_file: keys", "keys_file: new.keys");
        let tls = "listen: {tls: {certificate_file: a.crt, private_key_file: a.key}}\n";
        bench.desk.write("g.yaml", named + tls);
        looks(6).await;
        assert!(matches!(bench.heard.try_recv().unwrap().1, Err(LoadError::Problems(all)) if all.len() == 3));
        assert!(bench.heard.try_recv().is_err(), "told once");
        bench.desk.write("new.keys", format!("{} prod\n", blake3::hash(b"new").to_hex()));
        bench.desk.write("a.crt", made.cert.pem());
        looks(3).await;
        assert!(matches!(bench.heard.try_recv().unwrap().1, Err(LoadError::Problems(all)) if all.len() == 1));
        bench.desk.write("a.key", made.signing_key.serialize_pem());
        looks(3).await;
        assert_eq!(bench.heard.try_recv().unwrap(), (ReloadCause::Changed, Ok("b".into())));
        bench.desk.remove("a.key");
        looks(5).await;
        assert!(bench.heard.try_recv().is_err(), "a certificate is renewed by its listener, not by a reload");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_request_is_answered_after_the_settings_were_applied() {
        let mut bench = bench();
        bench.desk.write("g.yaml", settings("b"));
        assert_eq!(bench.reloader.reload().await, Ok(vec![]));
        assert_eq!(bench.heard.try_recv().unwrap(), (ReloadCause::Asked, Ok("b".into())));
        bench.desk.remove("g.yaml");
        let answer = bench.reloader.reload().await;
        assert!(matches!(answer, Err(LoadError::Unreadable(_))), "{answer:?}");
        assert!(bench.heard.try_recv().unwrap().1.is_err());
        looks(3).await;
        assert!(bench.heard.try_recv().is_err(), "what was tried when asked is not tried again");
    }

    #[test]
    fn load_errors_name_the_file() {
        let desk = FakeFiles::default();
        desk.write("g.yaml", "slo_classes: []\ndefault_class: x\n");
        let source = SettingsFile::of("g.yaml", Arc::new(desk.clone()));
        let told = || source.read().unwrap_err().lines(Path::new("/etc/goodput/g.yaml"));
        let problems = [
            "/etc/goodput/g.yaml:1:1: `pools` is missing; add `pools`",
            "/etc/goodput/g.yaml:1:14: slo_classes: is an empty list; add at least one",
        ];
        assert_eq!(told(), problems);
        desk.remove("g.yaml");
        assert_eq!(told(), ["/etc/goodput/g.yaml: there is no such file; give the path of a settings file"]);
        let unusable = LoadError::Unusable("no such certificate".to_owned());
        assert_eq!(unusable.lines(Path::new("g.yaml")), ["g.yaml: no such certificate"]);
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_pipe_or_a_device_in_the_place_of_the_file_is_told_and_keeps_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("g.yaml");
        std::fs::write(dir.path().join("keys"), format!("{} prod\n", blake3::hash(b"k").to_hex())).unwrap();
        std::fs::write(&path, settings("a")).unwrap();
        let source = SettingsFile::file(&path);
        let (watcher, reloader) = watch(source.clone(), &source.read().unwrap(), EVERY);
        tokio::spawn(watcher.run(|reload| std::future::ready(reload.result.map(|_| vec![]))));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let told = reloader.reload().await.unwrap_err().lines(Path::new("g.yaml"));
        assert!(told[0].starts_with("g.yaml: this is a pipe or a device"), "{told:?}");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, settings("b")).unwrap();
        assert_eq!(reloader.reload().await, Ok(vec![]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_watcher_ends_with_its_last_reloader() {
        let ReloadBench { reloader, mut heard, .. } = bench();
        drop(reloader);
        assert_eq!(heard.recv().await, None);
    }
}
