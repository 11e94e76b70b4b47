//! The access line: one JSON object per request, with lengths and times, without content.
//!
//! Lines go through a bounded channel to one task that owns the output. A full channel (the
//! output is slower than the traffic) drops the line and counts it; no request ever waits. So
//! does an output that fails, for as long as it does: a full disk has room again some day.
//! Lines leave in blocks: one write for all that came in ten milliseconds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::finished::Finished;
use crate::clock::Clock;
use crate::observe::Timeline;
use crate::units::decimal::{push_digits, push_number};
use crate::units::{ClassId, EngineId, PoolId, TenantId};

/// Lines that may wait for the output: a few seconds of heavy traffic.
const WAITING: usize = 8192;

/// How long a line may wait for others to leave with.
const TOGETHER: Duration = Duration::from_millis(10);

/// The recorder's end of the channel.
#[derive(Clone, Debug)]
pub struct AccessLines {
    sender: mpsc::Sender<String>,
    lost: Lost,
}

/// The output's end of the channel; see [`Writer::run`].
#[derive(Debug)]
pub struct Writer {
    lines: mpsc::Receiver<String>,
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
    /// Hands a line over; `false` if it was dropped.
    pub(super) fn write(&self, line: String) -> bool {
        self.sender.try_send(line).is_ok()
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
        let mut fails = false;
        while let Some(line) = self.lines.recv().await {
            let mut count = 1;
            block.extend_from_slice(line.as_bytes());
            if !self.lines.is_closed() {
                clock.sleep_until(Some(clock.now() + TOGETHER)).await;
            }
            while let Ok(line) = self.lines.try_recv() {
                count += 1;
                block.extend_from_slice(line.as_bytes());
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

/// The line of a request that was noted at `wall` (time since the Unix epoch), newline included.
pub(super) fn line(finished: &Finished, wall: Duration) -> String {
    let answer = finished.answer();
    let whole = finished.whole_answer();
    let tokens = finished.tokens();
    let outcome = finished.verdict.outcome;
    let mut line = Line::begin(wall);
    line.text("request_id", Some(finished.request_id.as_str()));
    line.text("tenant", finished.tenant.as_ref().map(TenantId::as_str));
    line.text("class", finished.class.as_ref().map(ClassId::as_str));
    line.text("rule", finished.rule.as_deref());
    line.text("model", finished.model.as_deref());
    line.text("pool", finished.pool.as_ref().map(PoolId::as_str));
    line.text("engine", finished.engine.as_ref().map(EngineId::as_str));
    line.number("attempts", Some(u64::from(finished.attempts)));
    line.number("status", Some(u64::from(finished.status)));
    line.text("outcome", Some(outcome.as_str()));
    line.text("reason", Some(outcome.reason()).filter(|reason| !reason.is_empty()));
    line.text("length", Some(finished.length.as_str()));
    line.number("input_tokens", tokens.map(|(input, _)| input.0));
    line.number("output_tokens", tokens.map(|(_, output)| output.0));
    line.text("token_source", tokens.and(answer).map(|answer| answer.source.as_str()));
    line.millis("upload_ms", finished.upload());
    line.millis("queue_ms", finished.queue());
    line.millis("ttft_ms", answer.and_then(Timeline::ttft));
    line.millis("tpot_ms", whole.and_then(Timeline::tpot));
    line.millis("e2e_ms", whole.and_then(Timeline::e2e));
    line.end()
}

/// One JSON object in the making. Written by hand, because every request writes one: it costs
/// a tenth of what a general serializer takes for it.
struct Line(String);

impl Line {
    fn begin(wall: Duration) -> Self {
        let mut line = String::with_capacity(512);
        line.push_str("{\"time\":\"");
        push_time_of_day(&mut line, wall);
        line.push('"');
        Line(line)
    }

    fn key(&mut self, name: &'static str) {
        self.0.push_str(",\"");
        self.0.push_str(name);
        self.0.push_str("\":");
    }

    fn null(&mut self) {
        self.0.push_str("null");
    }

    fn text(&mut self, name: &'static str, value: Option<&str>) {
        self.key(name);
        match value {
            None => self.null(),
            Some(value) if value.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') => {
                self.0.push('"');
                self.0.push_str(value);
                self.0.push('"');
            }
            Some(value) => self.0.push_str(&serde_json::Value::from(value).to_string()),
        }
    }

    fn number(&mut self, name: &'static str, value: Option<u64>) {
        self.key(name);
        match value {
            None => self.null(),
            Some(value) => push_number(&mut self.0, value),
        }
    }

    /// Milliseconds to the microsecond.
    fn millis(&mut self, name: &'static str, length: Option<Duration>) {
        self.key(name);
        let Some(length) = length else { return self.null() };
        let micros = u64::try_from(length.as_micros()).unwrap_or(u64::MAX);
        push_number(&mut self.0, micros / 1000);
        self.0.push('.');
        match micros % 1000 {
            tenths if tenths.is_multiple_of(100) => push_digits(&mut self.0, tenths / 100, 1),
            hundredths if hundredths.is_multiple_of(10) => push_digits(&mut self.0, hundredths / 10, 2),
            thousandths => push_digits(&mut self.0, thousandths, 3),
        }
    }

    fn end(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }
}

/// RFC 3339 in UTC, to the millisecond.
fn push_time_of_day(text: &mut String, wall: Duration) {
    let seconds = wall.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let parts = [(year, 4, '-'), (month, 2, '-'), (day, 2, 'T'), (hour, 2, ':'), (minute, 2, ':'), (second, 2, '.')];
    for (value, digits, behind) in parts {
        push_digits(text, value, digits);
        text.push(behind);
    }
    push_digits(text, u64::from(wall.subsec_millis()), 3);
    text.push('Z');
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

    fn alone(write: impl FnOnce(&mut Line)) -> Value {
        let mut line = Line::begin(Duration::ZERO);
        write(&mut line);
        serde_json::from_str(&line.end()).unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_what_was_meant(text in any::<String>(), number in any::<u64>(), micros in 0u64..1 << 50) {
            let line = alone(|line| {
                line.text("text", Some(&text));
                line.number("number", Some(number));
                line.millis("length", Some(Duration::from_micros(micros)));
                line.text("nothing", None);
            });
            prop_assert_eq!(line["text"].as_str(), Some(text.as_str()));
            prop_assert_eq!(line["number"].as_u64(), Some(number));
            prop_assert_eq!(line["length"].as_f64(), Some(micros as f64 / 1000.0));
            prop_assert!(line["nothing"].is_null());
        }

        #[test]
        fn the_time_of_day_is_that_of_the_calendar(millis in 0i64..253_402_300_799_999) {
            let mut written = String::new();
            push_time_of_day(&mut written, Duration::from_millis(millis as u64));
            let calendar = jiff::Timestamp::from_millisecond(millis).unwrap();
            prop_assert_eq!(written, format!("{calendar:.3}"));
        }
    }
}
