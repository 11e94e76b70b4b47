//! Output of the demo: a table redrawn each second on a terminal, plain lines elsewhere, JSON on
//! request.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::{self, Write};
use std::pin::pin;
use std::time::Duration;

use serde_json::{Value, json};

use crate::clock::Clock;
use crate::sim::traffic::FlowStats;
use crate::types::Tick;

/// The state at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DemoSnapshot {
    /// One row per class.
    pub rows: Vec<ClassRow>,
    /// One row per engine.
    pub engines: Vec<EngineRow>,
}

/// The state of a class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassRow {
    /// The class.
    pub class: String,
    /// Target share of met requests.
    pub target: f64,
    /// Met requests, as counted by the gateway.
    pub met: u64,
    /// Judged requests, as counted by the gateway.
    pub judged: u64,
    /// Met and judged requests, as counted by the clients.
    pub seen: Option<(u64, u64)>,
    /// Requests sent by the clients.
    pub sent: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Of these, those waiting in the gateway for a seat.
    pub waiting: u64,
    /// Requests rejected because of a tenant limit (429).
    pub limited: u64,
    /// Requests shed for lack of a seat or an engine (503).
    pub shed: u64,
    /// Quantiles measured by the clients: TTFT.
    pub ttft_p50: Option<Duration>,
    /// TTFT.
    pub ttft_p95: Option<Duration>,
    /// TPOT.
    pub tpot_p50: Option<Duration>,
    /// TPOT.
    pub tpot_p95: Option<Duration>,
    /// E2E.
    pub e2e_p95: Option<Duration>,
}

impl ClassRow {
    /// A row from the clients' view of a class. The gateway's own counts, if asked for, replace `met` and
    /// `judged`.
    #[must_use]
    pub fn of(stats: &FlowStats, target: f64) -> ClassRow {
        let judged = stats.met + stats.missed + stats.unanswered;
        ClassRow {
            class: stats.name.clone(),
            target,
            met: stats.met,
            judged,
            seen: Some((stats.met, judged)),
            sent: stats.sent,
            in_flight: stats.in_flight,
            waiting: 0,
            limited: stats.statuses.get(&429).copied().unwrap_or_default(),
            shed: stats.statuses.get(&503).copied().unwrap_or_default(),
            ttft_p50: stats.ttft.quantile(0.5),
            ttft_p95: stats.ttft.quantile(0.95),
            tpot_p50: stats.tpot.quantile(0.5),
            tpot_p95: stats.tpot.quantile(0.95),
            e2e_p95: stats.e2e.quantile(0.95),
        }
    }

    /// `met / judged`; `None` if nothing was judged.
    #[must_use]
    pub fn attainment(&self) -> Option<f64> {
        (self.judged > 0).then(|| self.met as f64 / self.judged as f64)
    }
}

/// The state of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineRow {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub engine: String,
    /// Running requests.
    pub running: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Used share of its KV cache.
    pub kv_usage: f64,
}

impl super::DemoFleet {
    /// One row per engine.
    #[must_use]
    pub fn rows(&self) -> Vec<EngineRow> {
        let row = |engine: &super::DemoEngine| {
            let gauges = engine.engine.gauges();
            EngineRow {
                pool: engine.pool.to_owned(),
                engine: engine.address.to_string(),
                running: gauges.running,
                waiting: gauges.waiting,
                kv_usage: gauges.kv_usage,
            }
        };
        self.engines.iter().map(row).collect()
    }
}

/// Source of the figures.
pub trait SnapshotSource {
    /// The current state.
    fn look(&mut self) -> DemoSnapshot;
}

impl<F: FnMut() -> DemoSnapshot> SnapshotSource for F {
    fn look(&mut self) -> DemoSnapshot {
        self()
    }
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoFormat {
    /// A table redrawn each second, for a terminal.
    Table,
    /// A line every five seconds, and the table at the end.
    Lines,
    /// One JSON object at the end.
    Json,
}

impl DemoFormat {
    const fn pause(self) -> Option<Duration> {
        match self {
            DemoFormat::Table => Some(Duration::from_secs(1)),
            DemoFormat::Lines => Some(Duration::from_secs(5)),
            DemoFormat::Json => None,
        }
    }
}

/// Shows the state until `until` is done, then once more, and returns the last state.
///
/// # Errors
/// Output errors.
pub async fn show<W: Write>(
    clock: Clock,
    source: &mut dyn SnapshotSource,
    out: &mut W,
    how: DemoFormat,
    until: impl Future<Output = ()>,
) -> io::Result<DemoSnapshot> {
    let start = clock.now();
    let mut until = pin!(until);
    let mut screen = Screen { table: RedrawnTable::default(), before: (start, 0), refused: VecDeque::new() };
    let mut next = how.pause().map(|pause| start + pause);
    loop {
        let is_over = tokio::select! {
            () = until.as_mut() => true,
            () = clock.sleep_until(next) => false,
        };
        let (now, snapshot) = (clock.now(), source.look());
        if is_over {
            screen.last(out, how, &snapshot, now, start)?;
            return Ok(snapshot);
        }
        screen.draw(out, how, &snapshot, now, start)?;
        next = how.pause().map(|pause| now + pause);
    }
}

/// The screen content, and previous states.
struct Screen {
    table: RedrawnTable,
    before: (Tick, u64),
    /// Rejections at the states of the last [`LATELY`], oldest first.
    refused: VecDeque<(Tick, RejectionCounts)>,
}

/// Rejections per class: by limits, and shed.
type RejectionCounts = HashMap<String, (u64, u64)>;

/// Interval whose rejections are shown separately, as current.
const LATELY: Duration = Duration::from_secs(10);

impl Screen {
    fn draw<W: Write>(
        &mut self,
        out: &mut W,
        how: DemoFormat,
        now: &DemoSnapshot,
        at: Tick,
        start: Tick,
    ) -> io::Result<()> {
        let sent = now.rows.iter().map(|row| row.sent).sum::<u64>();
        let seconds = at.since(self.before.0).as_secs_f64();
        let rate = (sent - self.before.1.min(sent)) as f64 / seconds.max(1e-3);
        self.before = (at, sent);
        let title = format!("{:>5.0} s   {rate:>6.1} requests/s", at.since(start).as_secs_f64());
        let before = self.until_lately(now, at);
        if how == DemoFormat::Lines {
            writeln!(out, "{}", line(&title, now))?;
        } else {
            let refused = refused(now, &before);
            let text = format!("{title}\n\n{}{refused}\n{}", classes(now), engines(now));
            self.table.draw(out, &text)?;
        }
        out.flush()
    }

    fn last<W: Write>(
        &mut self,
        out: &mut W,
        how: DemoFormat,
        now: &DemoSnapshot,
        at: Tick,
        start: Tick,
    ) -> io::Result<()> {
        let ran = at.since(start);
        let sent = now.rows.iter().map(|row| row.sent).sum::<u64>();
        match how {
            DemoFormat::Json => writeln!(out, "{}", summary(now, ran))?,
            DemoFormat::Table | DemoFormat::Lines => {
                self.table.erase(out)?;
                let refused = refused(now, &self.until_lately(now, at));
                write!(out, "{:.0} s, {sent} requests\n\n{}{refused}", ran.as_secs_f64(), classes(now))?;
            }
        }
        out.flush()
    }

    /// Rejections before the last [`LATELY`].
    fn until_lately(&mut self, now: &DemoSnapshot, at: Tick) -> RejectionCounts {
        let counts = now.rows.iter().map(|row| (row.class.clone(), (row.limited, row.shed))).collect();
        self.refused.push_back((at, counts));
        while self.refused.get(1).is_some_and(|(next, _)| at.since(*next) >= LATELY) {
            self.refused.pop_front();
        }
        let whole = self.refused.front().filter(|(first, _)| at.since(*first) >= LATELY);
        whole.map(|(_, counts)| counts.clone()).unwrap_or_default()
    }
}

/// Text on a terminal that is drawn over again and again.
#[derive(Debug, Default)]
pub struct RedrawnTable {
    lines: usize,
}

impl RedrawnTable {
    /// Draws a text in the place of the last one. No line of it may be wider than the terminal, and it may
    /// not be higher.
    ///
    /// # Errors
    /// Whatever writing gives.
    pub fn draw<W: Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        self.erase(out)?;
        self.lines = text.lines().count();
        out.write_all(text.as_bytes())
    }

    /// Erases the previous output: moves to its first line and clears from there.
    ///
    /// # Errors
    /// Whatever writing gives.
    pub fn erase<W: Write>(&mut self, out: &mut W) -> io::Result<()> {
        match std::mem::take(&mut self.lines) {
            0 => Ok(()),
            lines => write!(out, "\u{1b}[{lines}F\u{1b}[J"),
        }
    }
}

/// Widest line: the narrowest common terminal.
#[cfg(test)]
pub(super) const WIDTH: usize = 80;

/// One row per class, compared with the clients' own counts. At most 80 columns, because a wrapped table
/// cannot be redrawn.
fn classes(now: &DemoSnapshot) -> String {
    let mut rows =
        vec![["class", "kept", "target", "met/judged", "open", "TTFT p95", "TPOT p95", "E2E p95"].map(String::from)];
    for row in &now.rows {
        rows.push([
            row.class.clone(),
            percent(row.attainment()) + if is_kept(row) { " " } else { "!" },
            format!("{:.0} %", row.target * 100.0),
            format!("{}/{}", row.met, row.judged),
            row.in_flight.to_string(),
            length(row.ttft_p95),
            length(row.tpot_p95),
            length(row.e2e_p95),
        ]);
    }
    let mut text = aligned(&rows, [17, 9, 6, 11, 5, 8, 8, 8]);
    if now.rows.iter().any(|row| !is_kept(row)) {
        text.push_str("!: below its target\n");
    }
    let both = now.rows.iter().filter_map(|row| Some((row.seen?, row.met, row.judged)));
    let (seen, counted) = both.fold(((0, 0), (0, 0)), |(seen, counted), ((met, judged), ours, of)| {
        ((seen.0 + met, seen.1 + judged), (counted.0 + ours, counted.1 + of))
    });
    if seen.1 > 0 {
        let (met, judged) = counted;
        text.push_str(&format!("all: the gateway counts {met}/{judged}, its clients {}/{}\n", seen.0, seen.1));
    }
    text
}

/// Classes whose requests wait or were rejected to protect others.
fn refused(now: &DemoSnapshot, before: &RejectionCounts) -> String {
    let mut rows = vec![["held up", "waiting", "over limit", "last 10 s", "shed", "last 10 s"].map(String::from)];
    for row in now.rows.iter().filter(|row| row.waiting + row.limited + row.shed > 0) {
        let (limited, shed) = before.get(&row.class).copied().unwrap_or_default();
        let (limited_lately, shed_lately) = (row.limited.saturating_sub(limited), row.shed.saturating_sub(shed));
        let [waiting, limited, limited_lately, shed, shed_lately] =
            [row.waiting, row.limited, limited_lately, row.shed, shed_lately].map(|count| count.to_string());
        rows.push([row.class.clone(), waiting, limited, limited_lately, shed, shed_lately]);
    }
    if rows.len() > 1 { format!("\n{}", aligned(&rows, [17, 8, 11, 10, 7, 10])) } else { String::new() }
}

fn engines(now: &DemoSnapshot) -> String {
    let mut rows = vec![["engine", "pool", "running", "waiting", "KV cache"].map(String::from)];
    for row in &now.engines {
        let (running, waiting) = (row.running.to_string(), row.waiting.to_string());
        rows.push([row.engine.clone(), row.pool.clone(), running, waiting, percent(Some(row.kv_usage))]);
    }
    aligned(&rows, [21, 11, 7, 7, 8])
}

/// Columns of at least these widths, the first left-aligned, the others right-aligned.
#[must_use]
pub fn aligned<const N: usize>(rows: &[[String; N]], widths: [usize; N]) -> String {
    let mut text = String::new();
    for row in rows {
        let mut line = format!("{:<width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            line.push_str(&format!(" {cell:>width$}"));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// One line with each class's attainment, and rejections.
fn line(title: &str, now: &DemoSnapshot) -> String {
    let class = |row: &ClassRow| {
        let mark = if is_kept(row) { "" } else { "!" };
        let refused = [(row.limited, "over limit"), (row.shed, "shed")];
        let refused: Vec<String> =
            refused.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}")).collect();
        let refused = if refused.is_empty() { String::new() } else { format!(" ({})", refused.join(", ")) };
        format!("{} {}{mark}{refused}", row.class, percent(row.attainment()))
    };
    let classes: Vec<String> = now.rows.iter().map(class).collect();
    format!("{title}   {}", classes.join("   "))
}

fn summary(now: &DemoSnapshot, ran: Duration) -> Value {
    let millis = |length: Option<Duration>| length.map(|length| length.as_secs_f64() * 1000.0);
    let class = |row: &ClassRow| {
        json!({
            "class": row.class, "target": row.target, "attainment": row.attainment(), "met": row.met, "judged": row.judged,
            "seen_met": row.seen.map(|seen| seen.0), "seen_judged": row.seen.map(|seen| seen.1), "sent": row.sent, "limited": row.limited, "shed": row.shed,
            "ttft_p50_ms": millis(row.ttft_p50), "ttft_p95_ms": millis(row.ttft_p95),
            "tpot_p50_ms": millis(row.tpot_p50), "tpot_p95_ms": millis(row.tpot_p95), "e2e_p95_ms": millis(row.e2e_p95),
        })
    };
    json!({"seconds": ran.as_secs_f64(), "classes": now.rows.iter().map(class).collect::<Vec<_>>()})
}

/// Also true if nothing was judged.
fn is_kept(row: &ClassRow) -> bool {
    row.attainment().is_none_or(|attained| attained >= row.target)
}

/// A share, or a dash.
#[must_use]
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

/// A length of time, or a dash.
#[must_use]
pub fn length(length: Option<Duration>) -> String {
    match length.map(|length| length.as_secs_f64()) {
        None => "-".to_owned(),
        Some(seconds) if seconds < 1.0 => format!("{:.0} ms", seconds * 1000.0),
        Some(seconds) => format!("{seconds:.2} s"),
    }
}
