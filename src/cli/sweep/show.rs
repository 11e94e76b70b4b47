//! Terminal output of a sweep: a progress line, a line per run, a table at the end.

use std::io::{IsTerminal, Write};

use crate::load::measure::RunStanding;
use crate::load::monitor::RunVerdict;
use crate::load::result::{PointResult, RunResult};
use crate::load::summary::SweepSummary;
use crate::load::sweep::{CacheResult, NextRun};

/// Progress on standard error.
pub struct SweepProgressLine {
    is_terminal: bool,
    shown_at: f64,
    repetitions: u32,
}

/// Interval of the progress line, in seconds.
const REFRESH: f64 = 0.2;

impl SweepProgressLine {
    /// Nothing shown yet.
    pub fn new(repetitions: u32) -> Self {
        SweepProgressLine { is_terminal: std::io::stderr().is_terminal(), shown_at: 0.0, repetitions }
    }

    /// Prints a line once.
    pub fn say(&self, text: &str) {
        self.clear();
        let _ = writeln!(std::io::stderr(), "{text}");
    }

    /// Updates the progress line.
    pub fn standing(&mut self, next: NextRun, standing: &RunStanding) {
        if !self.is_terminal || (standing.seconds - self.shown_at).abs() < REFRESH {
            return;
        }
        self.shown_at = standing.seconds;
        let open = standing.sent - standing.ended;
        let _ = write!(
            std::io::stderr(),
            "\r\x1b[2K{} {} {:>4.0} s: {} sent, {open} open, {} met, {} missed",
            self.head(next),
            next.cache.as_str(),
            standing.seconds,
            standing.sent,
            standing.met,
            standing.missed
        );
        let _ = std::io::stderr().flush();
    }

    /// Prints the result of a run.
    pub fn ended(&mut self, next: NextRun, result: &RunResult) {
        self.shown_at = 0.0;
        let attained: Vec<String> = result.classes.iter().map(|class| attainment(class.attainment)).collect();
        let problems =
            if result.problems.is_empty() { String::new() } else { format!(": {}", result.problems.join("; ")) };
        self.say(&format!(
            "{} {}: {} ({}), {:.0} s, {} counted{problems}",
            self.head(next),
            next.cache.as_str(),
            verdict(result.verdict),
            attained.join(", "),
            result.seconds,
            result.classes.iter().map(|class| class.judged).sum::<u64>(),
        ));
    }

    fn head(&self, next: NextRun) -> String {
        format!("{:>8.2} requests/s, run {} of {},", next.rate, next.repetition, self.repetitions)
    }

    fn clear(&self) {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}

const fn verdict(verdict: RunVerdict) -> &'static str {
    match verdict {
        RunVerdict::Clears => "clears",
        RunVerdict::Fails => "fails",
        RunVerdict::Unsteady => "unsteady",
        RunVerdict::Invalid => "INVALID",
        RunVerdict::Partial => "partial",
    }
}

fn attainment(share: Option<f64>) -> String {
    share.map_or_else(|| "no number".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

/// The results as text.
pub fn table(summary: &SweepSummary) -> String {
    let mut text = String::new();
    for result in &summary.results {
        text.push_str(&cache_table(result));
    }
    text
}

fn cache_table(result: &CacheResult) -> String {
    let mut text = format!("\n{} caches\n", result.cache.as_str());
    text.push_str(
        "   rate  verdict   attainment [interval]          TTFT p95       TPOT p95        E2E p95   met/s  tokens/s\n",
    );
    for point in &result.points {
        text.push_str(&point_lines(point));
    }
    let goodput = &result.goodput;
    let number = |number: Option<f64>| number.map_or_else(|| "none".to_owned(), |number| format!("{number:.2}"));
    text.push_str(&format!("goodput: {} requests/s ({})\n", number(goodput.requests_per_second), goodput.explanation));
    if goodput.requests_per_second.is_some() {
        text.push_str(&format!(
            "         {} per replica, {} per GPU; repetitions differ by {:.1} %\n",
            number(goodput.per_replica),
            number(goodput.per_gpu),
            goodput.spread.unwrap_or_default() * 100.0
        ));
    }
    text
}

fn point_lines(point: &PointResult) -> String {
    let mut text = String::new();
    for (number, class) in point.classes.iter().enumerate() {
        let (rate, said, flows) = if number == 0 {
            let flows =
                format!("{:>8.2} {:>9.0}", point.throughput.met_per_second, point.throughput.output_tokens_per_second);
            (format!("{:>7.2}", point.rate), verdict(point.verdict), flows)
        } else {
            (" ".repeat(7), "", String::new())
        };
        let interval =
            class.interval.map_or_else(String::new, |at| format!(" [{:.1}, {:.1}]", at.low * 100.0, at.high * 100.0));
        let attained = format!("{}{interval}", attainment(class.attainment));
        text.push_str(&format!(
            "{rate}  {said:<9} {attained:<26} {:>13}  {:>13}  {:>13}{flows}",
            class.ttft_seconds.p95.to_string(),
            class.tpot_seconds.p95.to_string(),
            class.e2e_seconds.p95.to_string(),
        ));
        if point.classes.len() > 1 {
            text.push_str(&format!("  {}", class.class));
        }
        text.push('\n');
    }
    text
}
