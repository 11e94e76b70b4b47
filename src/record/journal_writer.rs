//! Writes the journal: from finished requests to lines in a file.
//!
//! A bounded channel, one task, and threads that may block. Lines are handed to the system once
//! in each flush interval. A full channel, or a disk that fails, loses lines and counts them;
//! no request waits or ends for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::journal::{HashKey, JournalHeader, JournalLine};
use super::journal_files::{JournalFile, JournalTurn, tidy};
use super::request_record::{RequestRecord, SharedRecord};
use super::settings::JournalSettings;
use crate::clock::Clock;
use crate::judge::Outcome;
use crate::observe::{Timeline, TokenSource};
use crate::types::{ApiPath, Tick};

/// Requests that may wait to become lines: a second of heavy traffic.
const WAITING: usize = 8192;

/// How often the channel is emptied while requests end: far less than it takes to fill it.
const COLLECTS: Duration = Duration::from_millis(50);

/// Size of a block that is written before the interval ends.
const LARGE_BLOCK: usize = 1 << 20;

/// Interval at which a lasting error is logged again.
const TELLS: Duration = Duration::from_secs(60);

/// The recorder's end of the channel.
#[derive(Clone, Debug)]
pub struct JournalSender {
    sender: mpsc::Sender<SharedRecord>,
    lines: Arc<JournalCounts>,
}

/// Lines by result, since the last read.
#[derive(Debug, Default)]
pub(super) struct JournalCounts {
    pub(super) written: AtomicU64,
    pub(super) queue_full: AtomicU64,
    pub(super) write_failed: AtomicU64,
}

/// The file's end of the channel; see [`JournalWriter::run`].
#[derive(Debug)]
pub struct JournalWriter {
    records: mpsc::Receiver<SharedRecord>,
    lines: Arc<JournalCounts>,
    settings: JournalSettings,
    key: HashKey,
}

/// A channel for a journal with these settings. `chance` is the key of its hashes if the settings name none.
#[must_use]
pub fn journal(settings: JournalSettings, chance: [u8; 32]) -> (JournalSender, JournalWriter) {
    let (sender, records) = mpsc::channel(WAITING);
    let lines = Arc::<JournalCounts>::default();
    let key = settings.hash_key.clone().unwrap_or_else(|| HashKey::from_chance(chance));
    (JournalSender { sender, lines: Arc::clone(&lines) }, JournalWriter { records, lines, settings, key })
}

impl JournalSender {
    /// Hands a request over, or counts its line as dropped.
    pub(super) fn write(&self, record: SharedRecord) {
        if self.sender.try_send(record).is_err() {
            self.lines.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn lines(&self) -> &JournalCounts {
        &self.lines
    }
}

impl JournalWriter {
    /// Writes lines until the last [`JournalSender`] is dropped and all lines are written. Retries forever,
    /// because a full disk may have space again.
    pub async fn run(mut self, clock: Clock) {
        let mut disk = JournalDisk::new(self.settings.clone(), self.key.clone(), clock);
        disk.prepare().await;
        let (mut block, mut count, mut records) = (Vec::new(), 0, Vec::new());
        let mut flushes = None;
        loop {
            let is_open = self.collect(&mut records, flushes, disk.rotates(), clock).await;
            if !records.is_empty() && flushes.is_none() {
                flushes = Some(clock.now() + self.settings.flush);
            }
            count += records.len() as u64;
            for record in records.drain(..) {
                let arrival = disk.anchor.wall_at(record.arrival);
                let line = line_of(&record, arrival, &self.key);
                serde_json::to_writer(&mut block, &line).expect("texts and numbers into memory");
                block.push(b'\n');
            }
            let now = clock.now();
            if !is_open || block.len() >= LARGE_BLOCK || flushes.is_some_and(|flushes| flushes <= now) {
                let counter = match disk.write(&mut block).await {
                    true => &self.lines.written,
                    false => &self.lines.write_failed,
                };
                counter.fetch_add(std::mem::take(&mut count), Ordering::Relaxed);
                flushes = None;
            } else if disk.rotates().is_some_and(|rotates| rotates <= now) {
                disk.rotate().await;
            }
            if !is_open {
                return disk.close().await;
            }
        }
    }

    /// Collects finished requests; waits for the first one unless lines wait to be flushed or rotated. False
    /// if the channel is closed and empty.
    async fn collect(
        &mut self,
        records: &mut Vec<SharedRecord>,
        flushes: Option<Tick>,
        rotates: Option<Tick>,
        clock: Clock,
    ) -> bool {
        let until = flushes.map(|flushes| flushes.min(clock.now() + COLLECTS));
        if until.is_none() {
            tokio::select! {
                taken = self.records.recv_many(records, WAITING) => return taken > 0,
                () = clock.sleep_until(rotates) => return true,
            }
        }
        if !self.records.is_closed() {
            clock.sleep_until(until).await;
        }
        match self.records.is_empty() {
            true => !self.records.is_closed(),
            false => self.records.recv_many(records, WAITING).await > 0,
        }
    }
}

/// One moment by both clocks.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    tick: Tick,
    wall: Duration,
}

impl Anchor {
    fn of(clock: &Clock) -> Self {
        Anchor { tick: clock.now(), wall: clock.wall() }
    }

    /// Follows a clock that was set forward. A clock set back is not followed, so that arrivals and the names
    /// of rotated files stay in order.
    fn or_later(self, other: Anchor) -> Anchor {
        if other.wall > self.wall_at(other.tick) { other } else { self }
    }

    fn wall_at(&self, at: Tick) -> Duration {
        let later = self.wall + at.since(self.tick);
        later.saturating_sub(self.tick.since(at))
    }
}

/// The journal's files, as the task uses them: every call that may block runs on another thread.
struct JournalDisk {
    settings: JournalSettings,
    key: HashKey,
    clock: Clock,
    /// Time anchor of arrivals, from the opening of the file.
    anchor: Anchor,
    /// `None` only while a thread has it.
    file: Option<JournalFile>,
    opened: Option<Duration>,
    /// Compresses and removes rotated files.
    tidying: Option<JoinHandle<()>>,
    /// When an error was logged last.
    told: Option<Tick>,
}

impl JournalDisk {
    fn new(settings: JournalSettings, key: HashKey, clock: Clock) -> Self {
        let file = Some(JournalFile::new(settings.path.clone()));
        JournalDisk { settings, key, clock, anchor: Anchor::of(&clock), file, opened: None, tidying: None, told: None }
    }

    /// Opens the file before the first line, so that an unusable path is reported at once, and tidies the
    /// files of an earlier process.
    async fn prepare(&mut self) {
        self.write(&mut Vec::new()).await;
        self.tidy();
    }

    /// When the open file is old enough to be rotated.
    fn rotates(&self) -> Option<Tick> {
        let due = self.opened? + self.settings.max_age;
        Some(self.anchor.tick + due.saturating_sub(self.anchor.wall))
    }

    /// Writes a block of lines, and rotates the file by age and size. False if none of the lines was written.
    async fn write(&mut self, block: &mut Vec<u8>) -> bool {
        let now = self.clock.now();
        let wall = self.anchor.wall_at(now);
        let turn = JournalTurn {
            wall,
            header: JournalHeader::new(&self.key, nanos(wall)),
            max_size: self.settings.max_size,
            is_old: self.rotates().is_some_and(|rotates| rotates <= now),
        };
        let lines = std::mem::take(block);
        let done = self.with_file(move |file| (file.write(&lines, &turn), file.opened(), lines)).await;
        let (done, opened, lines) = match done {
            Ok(done) => done,
            Err(error) => {
                self.tell(&error);
                return false;
            }
        };
        (*block, self.opened) = (lines, opened);
        block.clear();
        if done.is_new {
            self.anchor = self.anchor.or_later(Anchor::of(&self.clock));
        }
        if done.has_rotated {
            self.tidy();
        }
        done.failed.iter().for_each(|error| self.tell(error));
        done.is_written
    }

    /// Rotates a file by age without new lines.
    async fn rotate(&mut self) {
        self.write(&mut Vec::new()).await;
        if self.rotates().is_some_and(|rotates| rotates <= self.clock.now()) {
            // It cannot be rotated: tried once more when it is as old again.
            self.opened = Some(self.anchor.wall_at(self.clock.now()));
        }
    }

    /// The last lines are on the disk, and rotated files as they are to be.
    async fn close(mut self) {
        if let Ok(Err(error)) | Err(error) = self.with_file(|file| file.sync()).await {
            self.tell(&error);
        }
        if let Some(tidying) = self.tidying {
            let _ = tidying.await;
        }
    }

    /// Does something with the file on a thread that may block.
    async fn with_file<T: Send + 'static>(
        &mut self,
        act: impl FnOnce(&mut JournalFile) -> T + Send + 'static,
    ) -> io::Result<T> {
        let mut file = self.file.take().unwrap_or_else(|| JournalFile::new(self.settings.path.clone()));
        let acted = tokio::task::spawn_blocking(move || {
            let result = act(&mut file);
            (file, result)
        });
        let (file, result) = acted.await?;
        self.file = Some(file);
        Ok(result)
    }

    fn tell(&mut self, error: &io::Error) {
        let now = self.clock.now();
        if self.told.is_none_or(|told| now >= told + TELLS) {
            self.told = Some(now);
            let path = self.settings.path.display();
            tracing::error!(%path, %error, "the journal cannot be written; its lines are lost until it can");
        }
    }

    /// Compresses and removes rotated files beside everything else; one such run at a time.
    fn tidy(&mut self) {
        if self.tidying.as_ref().is_some_and(|tidying| !tidying.is_finished()) {
            return;
        }
        let JournalSettings { path, keep, gzip, .. } = self.settings.clone();
        self.tidying = Some(tokio::task::spawn_blocking(move || {
            if let Err(error) = tidy(&path, keep, gzip) {
                tracing::warn!(path = %path.display(), %error, "rotated files of the journal could not be tidied");
            }
        }));
    }
}

fn nanos(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

/// Milliseconds with three decimals.
fn millis(length: Duration) -> f64 {
    length.as_micros() as f64 / 1000.0
}

/// A request's line.
pub(super) fn line_of(record: &RequestRecord, arrival: Duration, key: &HashKey) -> JournalLine {
    let text = |text: Option<&str>| text.map(str::to_owned);
    let (answer, whole) = (record.answer(), record.whole_answer());
    let computed = record.tokens();
    let usage = answer.map(|answer| answer.usage).unwrap_or_default();
    let is_read = record.class.is_some();
    let prompt_source = match usage.input {
        Some(_) => TokenSource::Usage,
        None => TokenSource::Estimate,
    };
    let outcome = record.verdict.outcome;
    let prompt = record.prompt_shape.as_deref();
    JournalLine {
        arrival_unix_ns: nanos(arrival),
        endpoint: text(record.endpoint.map(ApiPath::path)),
        tenant: record.tenant.as_ref().map(|tenant| key.tenant(tenant)),
        class: text(record.class.as_ref().map(|class| class.as_str())),
        model: text(record.model.as_deref()),
        pool: text(record.pool.as_ref().map(|pool| pool.as_str())),
        engine: text(record.engine.as_ref().map(|engine| engine.as_str())),
        stream: record.streamed,
        choices: is_read.then_some(record.choices),
        max_output_tokens: record.stated_cap.map(|cap| cap.0),
        prompt_bytes: prompt.map(|prompt| prompt.bytes),
        prompt_tokens: is_read.then(|| usage.input.unwrap_or(record.prompt).0),
        prompt_tokens_source: is_read.then(|| prompt_source.as_str().to_owned()),
        cached_tokens: usage.cached.map(|tokens| tokens.0),
        output_tokens: computed.map(|(_, output)| output.0),
        output_tokens_source: computed.and(answer).map(|answer| answer.source.as_str().to_owned()),
        reasoning_tokens: usage.reasoning.map(|tokens| tokens.0),
        prefix: prompt.iter().flat_map(|prompt| &prompt.blocks).map(|block| key.block(*block)).collect(),
        attempts: record.attempt_count(),
        status: record.status,
        upload_ms: record.upload().map(millis),
        client_wait_ms: record.client_wait.map(millis),
        queue_ms: record.queue().map(millis),
        ttft_ms: answer.and_then(Timeline::ttft).map(millis),
        tpot_ms: whole.and_then(Timeline::tpot).map(millis),
        largest_gap_ms: answer.and_then(|answer| answer.gaps.largest).map(millis),
        e2e_ms: whole.and_then(Timeline::e2e).map(millis),
        total_ms: millis(record.end.since(record.arrival)),
        outcome: outcome.as_str().to_owned(),
        reason: (outcome != Outcome::Met).then(|| outcome.reason().to_owned()),
        refusal: text(record.refusal),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use flate2::read::GzDecoder;
    use parking_lot::Mutex;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;
    use crate::judge::{Excluded, Verdict};
    use crate::record::tests::{answer, finished, ms, samples, shape};
    use crate::record::{PromptShape, RecordSinks, Recorder};
    use crate::types::Tokens;

    fn met() -> Verdict {
        Verdict::bare(Outcome::Met)
    }

    fn recorder(settings: &JournalSettings) -> (Recorder, JournalWriter, Clock) {
        let (sender, writer) = journal(settings.clone(), [7; 32]);
        let clock = Clock::start();
        let recorder = Recorder::with_sinks(clock, RecordSinks { journal: Some(sender), ..RecordSinks::default() });
        recorder.bind(&shape());
        (recorder, writer, clock)
    }

    fn lines(recorder: &Recorder, result: &str) -> f64 {
        samples(recorder)[&format!("goodput_journal_lines_total{{result=\"{result}\"}}")]
    }

    /// The requests in a file.
    fn requests(path: &Path) -> Vec<Value> {
        let bytes = fs::read(path).unwrap();
        let text = match path.extension().is_some_and(|end| end == "gz") {
            true => io::read_to_string(GzDecoder::new(&bytes[..])).unwrap(),
            false => String::from_utf8(bytes).unwrap(),
        };
        assert!(text.starts_with("{\"journal\":\"goodput\",\"version\":1,"), "{text}");
        let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        all.filter(|line| line.get("journal").is_none()).collect()
    }

    async fn sleep(clock: Clock, length: Duration) {
        clock.sleep_until(Some(clock.now() + length)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_has_lengths_and_times_and_hashes_in_place_of_names_and_prompts() {
        let key = HashKey::from_secret(b"a secret");
        let shape = PromptShape { bytes: 1100, blocks: vec![7, 8] };
        let record = RequestRecord {
            timeline: Some(answer()),
            prompt_shape: Some(Box::new(shape)),
            ..finished(Verdict::bare(Outcome::Missed(crate::judge::Missed::Ttft)))
        };
        let line = serde_json::to_value(line_of(&record, Duration::from_nanos(1_790_000_000_000_000_001), &key));
        let expected = json!({
            "arrival_unix_ns": 1_790_000_000_000_000_001_u64,
            "endpoint": "/v1/chat/completions",
            "tenant": "a15d4cf3700f7791",
            "class": "chat", "model": "llama-*", "pool": "main", "engine": "vllm-0:8000",
            "stream": true, "choices": 1, "max_output_tokens": 64,
            "prompt_bytes": 1100, "prompt_tokens": 11, "prompt_tokens_source": "usage",
            "output_tokens": 4, "output_tokens_source": "usage",
            "prefix": ["f9ea477f5e44", key.block(8)],
            "attempts": 1, "status": 200,
            "upload_ms": 20.0, "client_wait_ms": 0.0, "queue_ms": 0.0,
            "ttft_ms": 300.0, "tpot_ms": 40.0, "largest_gap_ms": 40.0, "e2e_ms": 430.0, "total_ms": 440.0,
            "outcome": "missed", "reason": "ttft",
        });
        assert_eq!(line.unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_of_which_little_is_known_says_no_more() {
        let record = RequestRecord {
            endpoint: None,
            tenant: None,
            class: None,
            model: None,
            pool: None,
            engine: None,
            body_complete: None,
            client_wait: None,
            admitted: None,
            stated_cap: None,
            attempts: Vec::new(),
            status: 401,
            refusal: Some("unknown_key"),
            streamed: false,
            ..finished(Verdict::bare(Outcome::Excluded(Excluded::Unauthorized)))
        };
        let line = serde_json::to_value(line_of(&record, Duration::from_secs(1), &HashKey::from_chance([7; 32])));
        let expected = json!({
            "arrival_unix_ns": 1_000_000_000, "stream": false, "attempts": 0, "status": 401, "total_ms": 440.0,
            "outcome": "excluded", "reason": "unauthorized", "refusal": "unknown_key",
        });
        assert_eq!(line.unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_written_together_once_in_each_flush_interval_and_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let settings = JournalSettings { flush: ms(2000), ..JournalSettings::at(folder.path().join("j")) };
        let (recorder, writer, clock) = recorder(&settings);
        let running = tokio::spawn(writer.run(clock));
        sleep(clock, ms(10)).await;
        assert_eq!(requests(&settings.path).len(), 0, "it is opened at once");
        recorder.note(finished(met()));
        sleep(clock, ms(1500)).await;
        recorder.note(finished(met()));
        sleep(clock, ms(490)).await;
        assert_eq!(requests(&settings.path).len(), 0);
        sleep(clock, ms(20)).await;
        assert_eq!(requests(&settings.path).len(), 2);
        assert_eq!(lines(&recorder, "written"), 2.0);
        recorder.note(RequestRecord { prompt: Tokens(77), ..finished(met()) });
        drop(recorder);
        running.await.unwrap();
        let written = requests(&settings.path);
        assert_eq!((written.len(), &written[2]["prompt_tokens"]), (3, &json!(77)));
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_queue_has_no_room_for_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (recorder, writer, clock) = recorder(&JournalSettings::at(folder.path().join("j")));
        (0..WAITING + 7).for_each(|_| recorder.note(finished(met())));
        assert_eq!(lines(&recorder, "queue_full"), 7.0);
        let running = tokio::spawn(writer.run(clock));
        sleep(clock, ms(1100)).await;
        assert_eq!(lines(&recorder, "written"), WAITING as f64);
        drop(recorder);
        running.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_is_emptied_more_often_than_it_is_flushed() {
        let folder = tempfile::tempdir().unwrap();
        let settings = JournalSettings { flush: ms(10_000), ..JournalSettings::at(folder.path().join("j")) };
        let (recorder, writer, clock) = recorder(&settings);
        let running = tokio::spawn(writer.run(clock));
        for _ in 0..4 {
            (0..WAITING / 2).for_each(|_| recorder.note(finished(met())));
            sleep(clock, ms(60)).await;
        }
        assert_eq!(lines(&recorder, "queue_full"), 0.0);
        drop(recorder);
        running.await.unwrap();
        assert_eq!(requests(&settings.path).len(), 2 * WAITING);
    }

    /// Captured log lines.
    #[derive(Clone, Default)]
    struct Logged(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Logged {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Logged {
        type Writer = Logged;
        fn make_writer(&'a self) -> Logged {
            self.clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_fails_loses_lines_is_told_once_a_minute_and_gets_lines_again() {
        let log = Logged::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let told = || String::from_utf8(log.0.lock().clone()).unwrap().matches("cannot be written").count();
        let folder = tempfile::tempdir().unwrap();
        let settings = JournalSettings::at(folder.path().join("later/j"));
        let (recorder, writer, clock) = recorder(&settings);
        let running = tokio::spawn(writer.run(clock));
        sleep(clock, ms(10)).await;
        assert_eq!(told(), 1, "before any line");
        for _ in 0..20 {
            recorder.note(finished(met()));
            sleep(clock, ms(1500)).await;
        }
        assert_eq!((told(), lines(&recorder, "write_failed")), (1, 20.0));
        sleep(clock, ms(60_000)).await;
        recorder.note(finished(met()));
        sleep(clock, ms(1500)).await;
        assert_eq!((told(), lines(&recorder, "write_failed")), (2, 21.0));
        fs::create_dir(folder.path().join("later")).unwrap();
        recorder.note(finished(met()));
        sleep(clock, ms(1500)).await;
        assert_eq!((told(), lines(&recorder, "write_failed"), lines(&recorder, "written")), (2, 21.0, 1.0));
        drop(recorder);
        running.await.unwrap();
        assert_eq!(requests(&settings.path).len(), 1);
    }

    fn rotated(folder: &Path) -> Vec<std::path::PathBuf> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<_> = entries.filter(|path| path.file_name().unwrap() != "j").collect();
        found.sort();
        found
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_file_is_rotated_compressed_and_in_the_end_removed() {
        let folder = tempfile::tempdir().unwrap();
        let settings = JournalSettings { max_size: 3000, keep: 2, ..JournalSettings::at(folder.path().join("j")) };
        let (recorder, writer, clock) = recorder(&settings);
        let running = tokio::spawn(writer.run(clock));
        for tokens in 0..60 {
            recorder.note(RequestRecord { prompt: Tokens(tokens), ..finished(met()) });
            sleep(clock, ms(1100)).await;
        }
        drop(recorder);
        running.await.unwrap();
        let rotated = rotated(folder.path());
        assert!(rotated.len() == 2 && rotated.iter().all(|path| path.extension().unwrap() == "gz"), "{rotated:?}");
        let kept: Vec<_> = rotated.iter().chain([&settings.path]).flat_map(|path| requests(path)).collect();
        let tokens: Vec<_> = kept.iter().map(|line| line["prompt_tokens"].as_u64().unwrap()).collect();
        let first = 60 - tokens.len() as u64;
        assert_eq!(tokens, (first..60).collect::<Vec<_>>(), "nothing is lost between files");
        assert!(first > 0 && tokens.len() > 8);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_file_is_rotated_though_nobody_comes() {
        let folder = tempfile::tempdir().unwrap();
        let hour = ms(3_600_000);
        let settings = JournalSettings { max_age: hour, gzip: false, ..JournalSettings::at(folder.path().join("j")) };
        let (recorder, writer, clock) = recorder(&settings);
        let running = tokio::spawn(writer.run(clock));
        sleep(clock, 3 * hour).await;
        assert_eq!(rotated(folder.path()).len(), 0, "there is nothing in it");
        recorder.note(finished(met()));
        sleep(clock, hour + ms(2000)).await;
        let old = rotated(folder.path());
        assert_eq!((old.len(), requests(&old[0]).len(), requests(&settings.path).len()), (1, 1, 0));
        drop(recorder);
        running.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn arrivals_are_told_by_the_time_of_day() {
        let folder = tempfile::tempdir().unwrap();
        let settings = JournalSettings::at(folder.path().join("j"));
        let (recorder, writer, clock) = recorder(&settings);
        let before = clock.wall();
        let running = tokio::spawn(writer.run(clock));
        sleep(clock, ms(10)).await;
        recorder.note(finished(met()));
        recorder.note(RequestRecord { arrival: Tick::from_millis(250), ..finished(met()) });
        drop(recorder);
        running.await.unwrap();
        let at: Vec<_> =
            requests(&settings.path).iter().map(|line| line["arrival_unix_ns"].as_u64().unwrap()).collect();
        assert_eq!(at[1] - at[0], 250_000_000);
        assert!(u128::from(at[0]).abs_diff(before.as_nanos()) < 60_000_000_000, "{at:?}");
    }

    #[test]
    fn a_clock_that_is_put_right_is_followed_forward_only() {
        let second = |number| Duration::from_secs(number);
        let anchor = Anchor { tick: Tick::ZERO, wall: second(1000) };
        let later = |wall| anchor.or_later(Anchor { tick: Tick::ZERO + second(10), wall: second(wall) });
        assert_eq!(later(1010).wall_at(Tick::ZERO + second(20)), second(1020));
        assert_eq!(later(5000).wall_at(Tick::ZERO + second(20)), second(5010));
        assert_eq!(later(900).wall_at(Tick::ZERO + second(20)), second(1020));
    }

    proptest! {
        #[test]
        fn a_moment_by_both_clocks_is_the_same_before_and_after(tick in 0u64..1 << 50, other in 0u64..1 << 50) {
            let anchor = Anchor { tick: Tick::from_nanos(tick), wall: Duration::from_nanos(1 << 60) };
            let told = anchor.wall_at(Tick::from_nanos(other)).as_nanos() as i128;
            prop_assert_eq!(told - (1i128 << 60), i128::from(other) - i128::from(tick));
        }
    }
}
