//! The access line: one JSON object per request, with lengths and times, without content.
//!
//! Lines go through a bounded channel to one task that owns the output. A full channel (the
//! output is slower than the traffic) drops the line and counts it; no request ever waits. So
//! does an output that fails, for as long as it does: a full disk has room again some day.
//! Lines are made and leave in blocks: one write for all that came in ten milliseconds. What
//! makes them is then in the processor's caches, which no single request would find it in.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::finished::Finished;
use crate::admit::levels::{Degraded, Kind};
use crate::clock::Clock;
use crate::observe::Timeline;
use crate::units::decimal::{push_number, push_thousandths, put_digits};
use crate::units::{ClassId, Endpoint, EngineId, PoolId, TenantId};

/// Lines that may wait for the output: a few seconds of heavy traffic.
const WAITING: usize = 8192;

/// How long a line may wait for others to leave with.
const TOGETHER: Duration = Duration::from_millis(10);

/// The recorder's end of the channel.
#[derive(Clone, Debug)]
pub struct AccessLines {
    sender: mpsc::Sender<Noted>,
    lost: Lost,
}

/// A request whose line is to be written, and when it was noted (time since the Unix epoch).
#[derive(Debug)]
struct Noted {
    finished: Box<Finished>,
    wall: Duration,
}

/// The output's end of the channel; see [`Writer::run`].
#[derive(Debug)]
pub struct Writer {
    lines: mpsc::Receiver<Noted>,
    lost: Lost,
}

/// Lines that were taken and did not get out, not yet told.
type Lost = Arc<AtomicU64>;

/// A channel for access lines.
#[must_use]
pub fn lines() -> (AccessLines, Writer) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let lost = Lost::default();
    (AccessLines { sender, lost: Arc::clone(&lost) }, Writer { lines: receiver, lost })
}

impl AccessLines {
    /// Hands a request over, noted at `wall`; `false` if its line was dropped.
    pub(super) fn write(&self, finished: Box<Finished>, wall: Duration) -> bool {
        self.sender.try_send(Noted { finished, wall }).is_ok()
    }

    /// Lines that did not get out since this was last asked.
    pub(super) fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }
}

impl Writer {
    /// Writes lines until the last [`AccessLines`] is gone and all of them are out. What an
    /// output refuses is lost and counted.
    ///
    /// # Errors
    /// When nobody reads the output any more; lines are dropped and counted from then on.
    pub async fn run(mut self, mut output: impl AsyncWrite + Unpin, clock: Clock) -> io::Result<()> {
        let mut block = Vec::new();
        let mut names = Names::default();
        let mut fails = false;
        while let Some(noted) = self.lines.recv().await {
            let mut count = 1;
            noted.write(&mut names, &mut block);
            if !self.lines.is_closed() {
                clock.sleep_until(Some(clock.now() + TOGETHER)).await;
            }
            while let Ok(noted) = self.lines.try_recv() {
                count += 1;
                noted.write(&mut names, &mut block);
            }
            let written = write(&mut output, &block).await;
            block.clear();
            let Err(error) = written else {
                fails = false;
                continue;
            };
            self.lost.fetch_add(count, Ordering::Relaxed);
            if error.kind() == io::ErrorKind::BrokenPipe {
                return Err(self.give_up(error));
            }
            // Half a line may have got out.
            block.push(b'\n');
            if !std::mem::replace(&mut fails, true) {
                tracing::error!(%error, "access lines cannot be written; they are lost until they can");
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

async fn write(output: &mut (impl AsyncWrite + Unpin), block: &[u8]) -> io::Result<()> {
    output.write_all(block).await?;
    output.flush().await
}

impl Noted {
    /// Its line, newline included.
    fn write(&self, names: &mut Names, block: &mut Vec<u8>) {
        let Noted { finished, wall } = self;
        let answer = finished.answer();
        let whole = finished.whole_answer();
        let tokens = finished.tokens();
        let outcome = finished.verdict.outcome;
        let mut line = Line::begin(block, *wall);
        line.text(b",\"request_id\":", Some(finished.request_id.as_str()));
        // As we write it, never as it was sent: that may hold anything.
        line.word(b",\"endpoint\":", finished.endpoint.map(Endpoint::path));
        line.0.extend_from_slice(names.text(finished));
        line.number(b",\"attempts\":", Some(u64::from(finished.attempts)));
        line.number(b",\"status\":", Some(u64::from(finished.status)));
        line.word(b",\"outcome\":", Some(outcome.as_str()));
        line.word(b",\"reason\":", Some(outcome.reason()).filter(|reason| !reason.is_empty()));
        line.word(b",\"refusal\":", finished.refusal);
        line.word(b",\"length\":", Some(finished.length.as_str()));
        line.number(b",\"input_tokens\":", tokens.map(|(input, _)| input.0));
        line.number(b",\"output_tokens\":", tokens.map(|(_, output)| output.0));
        line.word(b",\"token_source\":", tokens.and(answer).map(|answer| answer.source.as_str()));
        line.millis(b",\"upload_ms\":", finished.upload());
        line.millis(b",\"queue_ms\":", finished.queue());
        line.millis(b",\"ttft_ms\":", answer.and_then(Timeline::ttft));
        line.millis(b",\"tpot_ms\":", whole.and_then(Timeline::tpot));
        line.millis(b",\"e2e_ms\":", whole.and_then(Timeline::e2e));
        line.degraded(&finished.degraded);
        line.end();
    }
}

/// The names in lines, as text. The same few come again and again, and they are shared: what lies
/// at the same places is the same names, as long as they are kept here.
struct Names(Vec<Option<Named>>);

struct Named {
    at: [usize; 6],
    text: Vec<u8>,
    /// Keeps the places taken.
    _ids: (Option<TenantId>, Option<ClassId>, Option<PoolId>, Option<EngineId>),
    _words: [Option<Arc<str>>; 2],
}

impl Default for Names {
    fn default() -> Self {
        Names(std::iter::repeat_with(|| None).take(Self::KEPT).collect())
    }
}

impl Names {
    /// So many combinations are kept, each at the place that its addresses give it.
    const KEPT: usize = 64;

    fn text(&mut self, finished: &Finished) -> &[u8] {
        let Finished { tenant, class, rule, model, pool, engine, .. } = finished;
        let names = [
            tenant.as_ref().map(TenantId::as_str),
            class.as_ref().map(ClassId::as_str),
            rule.as_deref(),
            model.as_deref(),
            pool.as_ref().map(PoolId::as_str),
            engine.as_ref().map(EngineId::as_str),
        ];
        let at = names.map(|name| name.map_or(0, |name| name.as_ptr() as usize));
        let place = at.iter().fold(0, |place, at| (place ^ (at >> 4)).rotate_left(1)) % Self::KEPT;
        if self.0[place].as_ref().is_none_or(|kept| kept.at != at) {
            let keys: [&[u8]; 6] =
                [b",\"tenant\":", b",\"class\":", b",\"rule\":", b",\"model\":", b",\"pool\":", b",\"engine\":"];
            let mut text = Vec::new();
            keys.into_iter().zip(names).for_each(|(key, name)| Line(&mut text).text(key, name));
            let _ids = (tenant.clone(), class.clone(), pool.clone(), engine.clone());
            let _words = [rule.clone(), model.clone()];
            self.0[place] = Some(Named { at, text, _ids, _words });
        }
        self.0[place].as_ref().map_or(&[], |kept| &kept.text)
    }
}

/// One JSON object in the making. Written by hand, because every request writes one: it costs
/// a fraction of what a general serializer takes for it. A key comes with the comma in front
/// of it and the colon behind.
struct Line<'a>(&'a mut Vec<u8>);

impl<'a> Line<'a> {
    fn begin(block: &'a mut Vec<u8>, wall: Duration) -> Self {
        let line = Line(block);
        line.0.extend_from_slice(b"{\"time\":\"");
        line.0.extend_from_slice(&time_of_day(wall));
        line.0.push(b'"');
        line
    }

    fn text(&mut self, key: &[u8], value: Option<&str>) {
        match value {
            Some(value) if !is_plain(value) => {
                self.0.extend_from_slice(key);
                self.0.extend_from_slice(serde_json::Value::from(value).to_string().as_bytes());
            }
            _ => self.word(key, value),
        }
    }

    /// A text that needs no escape.
    fn word(&mut self, key: &[u8], value: Option<&str>) {
        self.0.extend_from_slice(key);
        let Some(value) = value else { return self.null() };
        self.0.push(b'"');
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(b'"');
    }

    fn null(&mut self) {
        self.0.extend_from_slice(b"null");
    }

    fn number(&mut self, key: &'static [u8], value: Option<u64>) {
        self.0.extend_from_slice(key);
        match value {
            None => self.null(),
            Some(value) => push_number(self.0, value),
        }
    }

    /// Milliseconds to the microsecond.
    fn millis(&mut self, key: &'static [u8], length: Option<Duration>) {
        self.0.extend_from_slice(key);
        match length {
            None => self.null(),
            Some(length) => push_thousandths(
                self.0,
                length.as_secs().saturating_mul(1_000_000).saturating_add(u64::from(length.subsec_micros())),
            ),
        }
    }

    /// What overload levels did, none where they did nothing. The cap only where it was set.
    fn degraded(&mut self, degraded: &Degraded) {
        self.0.extend_from_slice(b",\"degraded\":");
        if degraded.kinds.is_empty() {
            return self.null();
        }
        let cap = degraded.cap.filter(|_| degraded.kinds.has(Kind::CapOutput));
        self.number(b"{\"level\":", Some(degraded.level as u64));
        self.number(b",\"cap\":", cap.map(|cap| cap.0));
        let mut before: &'static [u8] = b",\"actions\":[";
        for kind in degraded.kinds.iter() {
            self.0.extend_from_slice(before);
            self.word(b"", Some(kind.as_str()));
            before = b",";
        }
        self.0.extend_from_slice(b"]}");
    }

    fn end(self) {
        self.0.extend_from_slice(b"}\n");
    }
}

/// Whether a text needs no escape. Looks at every byte, and does not stop at one that does: a
/// loop without a way out is done many bytes at a time.
fn is_plain(text: &str) -> bool {
    !text.bytes().fold(false, |escape, byte| escape | (byte < b' ') | (byte == b'"') | (byte == b'\\'))
}

/// RFC 3339 in UTC, to the millisecond.
fn time_of_day(wall: Duration) -> [u8; 24] {
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

/// Year, month and day of a day since 1970-01-01. Years are counted from the first of March,
/// so that the leap day is a year's last, and in eras of 400 years, which are all alike.
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

    fn alone(write: impl FnOnce(&mut Line<'_>)) -> Value {
        let mut block = Vec::new();
        let mut line = Line::begin(&mut block, Duration::ZERO);
        write(&mut line);
        line.end();
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
