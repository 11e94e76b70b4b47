//! The access log: one JSON object per request, with lengths and times, without content.
//!
//! Records go through a bounded channel to one task that owns the output. If the channel is full
//! (the output is slower than the traffic) or the output fails (a full disk), lines are dropped and
//! counted; no request ever waits. The output is retried, because a disk may have room again later.
//! Lines are formatted and written in blocks of ten milliseconds, so that the formatting code
//! is in the processor's caches.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::request_record::{RequestRecord, SharedRecord};
use crate::admit::overload_control::{ActionKind, AppliedActions};
use crate::clock::Clock;
use crate::judge::Outcome;
use crate::observe::Timeline;
use crate::types::decimal::{push_number, push_thousandths, put_digits};
use crate::types::{ApiPath, ClassId, EngineId, LengthBucket, PoolId, TenantId, Tick};

/// Capacity of the channel, lines: a few seconds of heavy traffic.
const WAITING: usize = 8192;

/// How long a line waits for others to be written with.
const TOGETHER: Duration = Duration::from_millis(10);

/// The sending end of the channel.
#[derive(Clone, Debug)]
pub struct AccessLines {
    sender: mpsc::Sender<SharedRecord>,
    lost: LostLines,
}

/// The receiving end of the channel; see [`Writer::run`].
#[derive(Debug)]
pub struct Writer {
    lines: mpsc::Receiver<SharedRecord>,
    lost: LostLines,
}

/// Lines that could not be written and were not reported yet.
type LostLines = Arc<AtomicU64>;

/// Creates the channel.
#[must_use]
pub fn lines() -> (AccessLines, Writer) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let lost = LostLines::default();
    (AccessLines { sender, lost: Arc::clone(&lost) }, Writer { lines: receiver, lost })
}

impl AccessLines {
    /// Hands a request over; `false` if its line was dropped.
    pub(super) fn write(&self, finished: SharedRecord) -> bool {
        self.sender.try_send(finished).is_ok()
    }

    /// Returns and resets the number of lines that could not be written.
    pub(super) fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }
}

impl Writer {
    /// Writes lines until the last [`AccessLines`] is dropped and all lines are out. Lines that the output
    /// refuses are counted as lost.
    ///
    /// # Errors
    /// When nothing reads the output any more; lines are dropped and counted from then on.
    pub async fn run(mut self, mut output: impl LineOutput, clock: Clock) -> io::Result<()> {
        let mut block = Vec::new();
        let mut known = LineCache::default();
        let mut fails = false;
        let mut finished = Vec::new();
        while let Some(first) = self.lines.recv().await {
            finished.push(first);
            if !self.lines.is_closed() {
                clock.sleep_until(Some(clock.now() + TOGETHER)).await;
            }
            if !self.lines.is_empty() {
                // Receives all waiting records at once.
                self.lines.recv_many(&mut finished, WAITING).await;
            }
            let count = finished.len() as u64;
            let present = BothClocks::of(&clock);
            finished
                .drain(..)
                .for_each(|finished| write(&finished, present.wall_at(finished.end), &mut known, &mut block));
            let written = output.write(&mut block).await;
            block.clear();
            let Err(error) = written else {
                fails = false;
                continue;
            };
            self.lost.fetch_add(count, Ordering::Relaxed);
            if error.kind() == io::ErrorKind::BrokenPipe {
                return Err(self.give_up(error));
            }
            // A partial line may have been written.
            block.push(b'\n');
            if !std::mem::replace(&mut fails, true) {
                tracing::error!(%error, "cannot write the access log; lines are dropped until it works again");
            }
        }
        Ok(())
    }

    fn give_up(&mut self, error: io::Error) -> io::Error {
        self.lines.close();
        while self.lines.try_recv().is_ok() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        error
    }
}

/// Destination of lines.
pub trait LineOutput: Send {
    /// Writes a block and clears it for reuse.
    fn write(&mut self, block: &mut Vec<u8>) -> impl Future<Output = io::Result<()>> + Send;
}

impl<W: AsyncWrite + Unpin + Send> LineOutput for W {
    async fn write(&mut self, block: &mut Vec<u8>) -> io::Result<()> {
        self.write_all(block).await?;
        self.flush().await
    }
}

/// The process's standard output. A blocking thread takes each block without copying it; tokio's stdout
/// would copy it and need another step to flush.
pub struct Stdout;

impl LineOutput for Stdout {
    async fn write(&mut self, block: &mut Vec<u8>) -> io::Result<()> {
        let lines = std::mem::take(block);
        let written = tokio::task::spawn_blocking(move || {
            let mut output = io::stdout().lock();
            let written = output.write_all(&lines).and_then(|()| output.flush());
            (lines, written)
        });
        let (lines, written) = written.await?;
        *block = lines;
        written
    }
}

/// One moment on both clocks, from which a block's lines derive the time of day.
struct BothClocks {
    tick: Tick,
    wall: Duration,
}

impl BothClocks {
    fn of(clock: &Clock) -> Self {
        BothClocks { tick: clock.now(), wall: clock.wall() }
    }

    /// Time of day at an earlier moment.
    fn wall_at(&self, at: Tick) -> Duration {
        self.wall.saturating_sub(self.tick.since(at))
    }
}

/// Appends a request's line, newline included.
fn write(finished: &RequestRecord, wall: Duration, known: &mut LineCache, block: &mut Vec<u8>) {
    let answer = finished.answer();
    let whole = finished.whole_answer();
    let mut line = JsonLine(block);
    line.put(known.beginning.at(wall));
    line.value(finished.request_id.as_str());
    line.0.extend_from_slice(known.commons.of(finished));
    match finished.tokens().zip(answer) {
        None => line.put(b",\"input_tokens\":null,\"output_tokens\":null,\"token_source\":null"),
        Some(((input, output), answer)) => {
            line.number(b",\"input_tokens\":", Some(input.0));
            line.number(b",\"output_tokens\":", Some(output.0));
            line.word(b",\"token_source\":", Some(answer.source.as_str()));
        }
    }
    line.millis(b",\"upload_ms\":", finished.upload());
    line.millis(b",\"client_wait_ms\":", finished.client_wait);
    line.millis(b",\"queue_ms\":", finished.queue());
    line.millis(b",\"ttft_ms\":", answer.and_then(Timeline::ttft));
    line.millis(b",\"tpot_ms\":", whole.and_then(Timeline::tpot));
    line.millis(b",\"e2e_ms\":", whole.and_then(Timeline::e2e));
    if finished.degraded.kinds.is_empty() && finished.asked.is_none() {
        line.put(b",\"degraded\":null,\"asked\":null}\n");
        return;
    }
    match finished.degraded.kinds.is_empty() {
        true => line.put(b",\"degraded\":null"),
        false => line.degraded(&finished.degraded),
    }
    line.text(b",\"asked\":", finished.asked.as_deref());
    line.put(b"}\n");
}

/// Reusable parts of earlier lines.
#[derive(Default)]
struct LineCache {
    beginning: LineStart,
    commons: LinePrefixCache,
}

/// A line up to the request id. Within a second only the milliseconds differ.
struct LineStart {
    second: Option<u64>,
    text: [u8; 48],
}

impl Default for LineStart {
    fn default() -> Self {
        LineStart { second: None, text: *b"{\"time\":\"0000-00-00T00:00:00.000Z\",\"request_id\":" }
    }
}

impl LineStart {
    fn at(&mut self, wall: Duration) -> &[u8; 48] {
        if self.second.replace(wall.as_secs()) != Some(wall.as_secs()) {
            self.text[9..33].copy_from_slice(&time_of_day(wall));
        }
        put_digits(&mut self.text[29..32], u64::from(wall.subsec_millis()));
        &self.text
    }
}

/// Cached text from the endpoint to the length, because the same few names recur with the same few
/// outcomes. Entries are compared by the addresses of their shared names, which stay valid while they
/// are kept here.
struct LinePrefixCache(Vec<Option<Common>>);

struct Common {
    key: LinePrefixKey,
    text: Vec<u8>,
    /// Keeps the addresses valid.
    _ids: (Option<TenantId>, Option<ClassId>, Option<PoolId>, Option<EngineId>),
    _words: [Option<Arc<str>>; 2],
}

/// The key of a cached text: addresses of the names, and the other values in it.
#[derive(PartialEq)]
struct LinePrefixKey {
    names: [usize; 6],
    endpoint: Option<ApiPath>,
    attempts: u32,
    status: u16,
    outcome: Outcome,
    refusal: Option<&'static str>,
    length: LengthBucket,
}

impl Default for LinePrefixCache {
    fn default() -> Self {
        LinePrefixCache(std::iter::repeat_with(|| None).take(Self::KEPT).collect())
    }
}

impl LinePrefixCache {
    /// Number of entries; each key has one slot.
    const KEPT: usize = 64;

    fn of(&mut self, finished: &RequestRecord) -> &[u8] {
        let &RequestRecord { endpoint, status, refusal, length, ref verdict, .. } = finished;
        let attempts = finished.attempt_count();
        let names = names(finished).map(|name| name.map_or(0, |name| name.as_ptr() as usize));
        let key = LinePrefixKey { names, endpoint, attempts, status, outcome: verdict.outcome, refusal, length };
        let place = &mut self.0[key.place()];
        if place.as_ref().is_none_or(|kept| kept.key != key) {
            let RequestRecord { tenant, class, rule, model, pool, engine, .. } = finished;
            let _ids = (tenant.clone(), class.clone(), pool.clone(), engine.clone());
            let _words = [rule.clone(), model.clone()];
            *place = Some(Common { key, text: common(finished), _ids, _words });
        }
        place.as_ref().map_or(&[], |kept| &kept.text)
    }
}

impl LinePrefixKey {
    fn place(&self) -> usize {
        let told = usize::from(self.status) ^ self.length as usize;
        self.names.iter().fold(told, |place, at| (place ^ (at >> 4)).rotate_left(1)) % LinePrefixCache::KEPT
    }
}

fn names(finished: &RequestRecord) -> [Option<&str>; 6] {
    let RequestRecord { tenant, class, rule, model, pool, engine, .. } = finished;
    [
        tenant.as_ref().map(TenantId::as_str),
        class.as_ref().map(ClassId::as_str),
        rule.as_deref(),
        model.as_deref(),
        pool.as_ref().map(PoolId::as_str),
        engine.as_ref().map(EngineId::as_str),
    ]
}

/// Formats the text cached by [`LinePrefixCache`].
fn common(finished: &RequestRecord) -> Vec<u8> {
    let outcome = finished.verdict.outcome;
    let mut text = Vec::new();
    let mut line = JsonLine(&mut text);
    // The canonical path, never the one sent, which may contain anything.
    line.word(b",\"endpoint\":", finished.endpoint.map(ApiPath::path));
    let keys: [&[u8]; 6] =
        [b",\"tenant\":", b",\"class\":", b",\"rule\":", b",\"model\":", b",\"pool\":", b",\"engine\":"];
    keys.into_iter().zip(names(finished)).for_each(|(key, name)| line.text(key, name));
    line.number(b",\"attempts\":", Some(u64::from(finished.attempt_count())));
    line.number(b",\"status\":", Some(u64::from(finished.status)));
    line.word(b",\"outcome\":", Some(outcome.as_str()));
    line.word(b",\"reason\":", Some(outcome.reason()).filter(|reason| !reason.is_empty()));
    line.word(b",\"refusal\":", finished.refusal);
    line.word(b",\"length\":", Some(finished.length.as_str()));
    text
}

/// Writes one JSON object. Written by hand because a general serializer costs several times as much per
/// request. A key includes the comma before it and the colon
/// after it.
struct JsonLine<'a>(&'a mut Vec<u8>);

impl JsonLine<'_> {
    /// A constant-length text, which is copied inline.
    fn put<const N: usize>(&mut self, text: &[u8; N]) {
        self.0.extend_from_slice(text);
    }

    fn text(&mut self, key: &[u8], value: Option<&str>) {
        self.0.extend_from_slice(key);
        match value {
            None => self.put(b"null"),
            Some(value) => self.value(value),
        }
    }

    fn value(&mut self, value: &str) {
        if is_plain(value) {
            self.quoted(value);
        } else {
            self.0.extend_from_slice(serde_json::Value::from(value).to_string().as_bytes());
        }
    }

    /// A text that needs no escaping.
    fn word<const N: usize>(&mut self, key: &[u8; N], value: Option<&str>) {
        self.put(key);
        match value {
            None => self.put(b"null"),
            Some(value) => self.quoted(value),
        }
    }

    fn quoted(&mut self, word: &str) {
        self.put(b"\"");
        self.0.extend_from_slice(word.as_bytes());
        self.put(b"\"");
    }

    fn number<const N: usize>(&mut self, key: &[u8; N], value: Option<u64>) {
        self.put(key);
        match value {
            None => self.put(b"null"),
            Some(value) => push_number(self.0, value),
        }
    }

    /// Milliseconds with three decimals.
    fn millis<const N: usize>(&mut self, key: &[u8; N], length: Option<Duration>) {
        self.put(key);
        match length {
            None => self.put(b"null"),
            Some(length) => push_thousandths(
                self.0,
                length.as_secs().saturating_mul(1_000_000).saturating_add(u64::from(length.subsec_micros())),
            ),
        }
    }

    /// Overload actions. The cap only if one was set.
    fn degraded(&mut self, degraded: &AppliedActions) {
        let cap = degraded.cap.filter(|_| degraded.kinds.has(ActionKind::CapOutput));
        self.number(b",\"degraded\":{\"level\":", Some(degraded.level as u64));
        self.number(b",\"cap\":", cap.map(|cap| cap.0));
        self.put(b",\"actions\":[");
        for (index, kind) in degraded.kinds.iter().enumerate() {
            if index > 0 {
                self.put(b",");
            }
            self.quoted(kind.as_str());
        }
        self.put(b"]}");
    }
}

/// Whether a text needs no escaping. Examines every byte without early exit, so that the loop
/// vectorises.
fn is_plain(text: &str) -> bool {
    !text.bytes().fold(false, |escape, byte| escape | (byte < b' ') | (byte == b'"') | (byte == b'\\'))
}

/// RFC 3339 in UTC, to the millisecond.
pub(super) fn time_of_day(wall: Duration) -> [u8; 24] {
    let seconds = wall.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let mut text = *b"0000-00-00T00:00:00.000Z";
    put_digits(&mut text[0..4], year);
    put_digits(&mut text[5..7], month);
    put_digits(&mut text[8..10], day);
    put_digits(&mut text[11..13], seconds / 3600 % 24);
    put_digits(&mut text[14..16], seconds / 60 % 60);
    put_digits(&mut text[17..19], seconds % 60);
    put_digits(&mut text[20..23], u64::from(wall.subsec_millis()));
    text
}

/// Year, month and day from days since 1970-01-01. Years begin on 1 March, so that the leap day comes
/// last, and are grouped in eras of 400 equal years.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn alone(write: impl FnOnce(&mut JsonLine<'_>)) -> Value {
        let mut block = Vec::new();
        let mut line = JsonLine(&mut block);
        line.put(b"{\"first\":0");
        write(&mut line);
        line.put(b"}\n");
        serde_json::from_slice(&block).unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_what_was_meant(text in any::<String>(), number in any::<u64>(), micros in 0u64..1 << 50) {
            let line = alone(|line| {
                line.text(b",\"text\":", Some(&text));
                line.number(b",\"number\":", Some(number));
                line.millis(b",\"length\":", Some(Duration::from_micros(micros)));
                line.text(b",\"nothing\":", None);
            });
            prop_assert_eq!(line["text"].as_str(), Some(text.as_str()));
            prop_assert_eq!(line["number"].as_u64(), Some(number));
            prop_assert_eq!(line["length"].as_f64(), Some(micros as f64 / 1000.0));
            prop_assert!(line["nothing"].is_null());
        }

        #[test]
        fn the_time_of_day_is_that_of_the_calendar(millis in 0i64..253_402_300_799_999) {
            let written = time_of_day(Duration::from_millis(millis as u64)).to_vec();
            let calendar = jiff::Timestamp::from_millisecond(millis).unwrap();
            prop_assert_eq!(String::from_utf8(written).unwrap(), format!("{calendar:.3}"));
        }
    }
}
