//! The access line: one JSON object per request, with lengths and times, without content.
//!
//! Lines go through a bounded channel to one task that owns the output. A full channel (the
//! output is slower than the traffic) drops the line and counts it; no request ever waits. So
//! does an output that fails, for as long as it does: a full disk has room again some day.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::finished::Finished;

/// Lines that may wait for the output: a few seconds of heavy traffic.
const WAITING: usize = 8192;

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
    pub async fn run(mut self, mut output: impl AsyncWrite + Unpin) -> io::Result<()> {
        let mut lines = Vec::with_capacity(256);
        let mut block = Vec::new();
        let mut fails = false;
        while self.lines.recv_many(&mut lines, 256).await > 0 {
            block.clear();
            if fails {
                // Half a line may have got out.
                block.push(b'\n');
            }
            let count = lines.len() as u64;
            lines.drain(..).for_each(|line| block.extend_from_slice(line.as_bytes()));
            let written = write(&mut output, &block).await;
            match written {
                Ok(()) => fails = false,
                Err(error) => {
                    self.lost.fetch_add(count, Ordering::Relaxed);
                    if error.kind() == io::ErrorKind::BrokenPipe {
                        return Err(self.give_up(error));
                    }
                    if !std::mem::replace(&mut fails, true) {
                        tracing::error!(%error, "access lines cannot be written; they are lost until they can");
                    }
                }
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

/// The fields, in the order in which they are written.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    request_id: &'a str,
    tenant: Option<&'a str>,
    class: Option<&'a str>,
    rule: Option<&'a str>,
    model: Option<&'a str>,
    pool: Option<&'a str>,
    engine: Option<&'a str>,
    attempts: u32,
    status: u16,
    outcome: &'static str,
    reason: Option<&'static str>,
    length: &'static str,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    token_source: Option<&'static str>,
    upload_ms: Option<f64>,
    queue_ms: Option<f64>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    e2e_ms: Option<f64>,
}

/// The line of a request that was noted at `wall` (time since the Unix epoch), newline included.
pub(super) fn line(finished: &Finished, wall: Duration) -> String {
    let answer = finished.answer();
    let whole = finished.whole_answer();
    let tokens = finished.tokens();
    let outcome = finished.verdict.outcome;
    let line = Line {
        time: time_of_day(wall),
        request_id: finished.request_id.as_str(),
        tenant: finished.tenant.as_ref().map(|tenant| tenant.as_str()),
        class: finished.class.as_ref().map(|class| class.as_str()),
        rule: finished.rule.as_deref(),
        model: finished.model.as_deref(),
        pool: finished.pool.as_ref().map(|pool| pool.as_str()),
        engine: finished.engine.as_ref().map(|engine| engine.as_str()),
        attempts: finished.attempts,
        status: finished.status,
        outcome: outcome.as_str(),
        reason: Some(outcome.reason()).filter(|reason| !reason.is_empty()),
        length: finished.length.as_str(),
        input_tokens: tokens.map(|(input, _)| input.0),
        output_tokens: tokens.map(|(_, output)| output.0),
        token_source: tokens.and(answer).map(|answer| answer.source.as_str()),
        upload_ms: finished.upload().map(millis),
        queue_ms: finished.queue().map(millis),
        ttft_ms: answer.and_then(|answer| answer.ttft()).map(millis),
        tpot_ms: whole.and_then(|answer| answer.tpot()).map(millis),
        e2e_ms: whole.and_then(|answer| answer.e2e()).map(millis),
    };
    let mut text = serde_json::to_string(&line).expect("strings and numbers always serialize");
    text.push('\n');
    text
}

/// RFC 3339 in UTC, to the millisecond.
fn time_of_day(wall: Duration) -> String {
    let millis = i64::try_from(wall.as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millisecond(millis).map_or_else(|_| String::new(), |at| format!("{at:.3}"))
}

/// Milliseconds to the microsecond.
fn millis(length: Duration) -> f64 {
    length.as_micros() as f64 / 1000.0
}
