//! `goodput replay`: recorded traffic against a service or a simulated fleet.
//!
//! Exit codes: 0 every class reaches its target; 1 one does not, or the replay is partial or cannot be believed; 2 the
//! command line or the trace cannot be used; 3 the service cannot be reached.

mod calibration;
mod classes;
mod live;
mod options;
mod processes;
mod records;
mod show;
mod simulate;
mod source;
mod tenant_keys;
#[cfg(test)]
mod tests;

pub use options::ReplayArgs;

use std::path::Path;
use std::process::ExitCode;

use self::classes::ReplayedClasses;
use self::records::RecordLines;
use self::simulate::SimulatedFleet;
use self::source::{FeedState, TraceSource};
use super::load_runtime::{NotStarted, load_runtime};
use super::print;
use crate::load::replay::{REPLAY_FORMAT, ReplayResult, ReplayScore, ReplayTarget, ReplayTraceSummary};
use crate::sim::fleet::Machine;

/// Result of a replay, for every kind of target.
struct Replayed {
    target: ReplayTarget,
    feed: FeedState,
    ended_by: Option<String>,
}

impl ReplayArgs {
    /// Replays, or calibrates, or both.
    #[must_use]
    pub fn run(self) -> ExitCode {
        super::descriptors::raise_limit();
        match self.replay() {
            Ok((text, code)) => print::last(text.trim_end(), ExitCode::from(code)),
            Err(error) => error.report("replay"),
        }
    }

    /// Returns the output and the exit code.
    fn replay(&self) -> Result<(String, u8), NotStarted> {
        let usage = NotStarted::Usage;
        self.check().map_err(usage)?;
        let fitted = match &self.calibrate {
            Some(sweep) => Some(calibration::calibrate(sweep, self.engine_out.as_deref()).map_err(usage)?),
            None => None,
        };
        let Some(trace) = &self.trace else {
            let Some(fitted) = fitted else { return Err(usage(anyhow::anyhow!("there is no trace"))) };
            let text = if self.json { fitted.json() } else { fitted.text() };
            return Ok((text, 0));
        };
        let result = self.replayed(trace, fitted.as_ref().map(|fitted| &fitted.machine))?;
        let code = match (&result.ended_by, result.passes) {
            (Some(why), _) if why.starts_with(UNREADABLE) => 2,
            (_, true) => 0,
            (_, false) => 1,
        };
        if let Some(why) = &result.ended_by {
            eprintln!("goodput replay: {why}: what was seen until then is kept, and marked partial");
        }
        let text = if self.json {
            serde_json::to_string_pretty(&result).unwrap_or_default()
        } else {
            let fit = fitted.map_or_else(String::new, |fitted| format!("{}\n", fitted.text()));
            format!("{fit}{}", show::page(&result))
        };
        Ok((text, code))
    }

    fn replayed(&self, trace: &Path, machine: Option<&Machine>) -> Result<ReplayResult, NotStarted> {
        let usage = NotStarted::Usage;
        let source = TraceSource::find(self, trace).map_err(usage)?;
        let classes = ReplayedClasses::of(self).map_err(usage)?;
        let mut score = ReplayScore::new(classes.scored(), self.loss(), self.recovery_window);
        let fleet = match self.simulate {
            true => Some(SimulatedFleet::of(self, &classes, machine).map_err(usage)?),
            false => None,
        };
        self.first_request(&source, &classes).map_err(usage)?;
        let mut lines = RecordLines::create(self.records.as_deref()).map_err(usage)?;
        let replayed = match (&fleet, &self.url) {
            (Some(fleet), _) => self.simulated(fleet, &source, &classes, &mut score, &mut lines).map_err(usage)?,
            (None, Some(url)) => self.live(url, &source, &classes, &mut score, &mut lines)?,
            (None, None) => return Err(usage(anyhow::anyhow!("against what? give --url URL, or --simulate"))),
        };
        lines.finish().map_err(usage)?;
        let too_long = replayed.feed.too_long;
        if replayed.feed.given == 0 && replayed.ended_by.is_none() && replayed.feed.error.is_none() {
            return Err(usage(anyhow::anyhow!("no request lies in the window ({too_long} are too long)")));
        }
        Ok(self.result(&source, replayed, &score))
    }

    /// An unusable trace is reported before the service is probed.
    fn first_request(&self, source: &TraceSource, classes: &ReplayedClasses) -> anyhow::Result<()> {
        let mut feed = source.feed(classes, None)?;
        let is_there = feed.next().is_some();
        match feed.state().take().error {
            Some(error) => Err(anyhow::anyhow!("{}: {error}", source.name())),
            None if is_there => Ok(()),
            None => Err(anyhow::anyhow!("{}: no request lies in the window", source.name())),
        }
    }

    fn simulated(
        &self,
        fleet: &SimulatedFleet,
        source: &TraceSource,
        classes: &ReplayedClasses,
        score: &mut ReplayScore,
        lines: &mut RecordLines,
    ) -> anyhow::Result<Replayed> {
        let end = fleet.replay(self, source, classes, score, lines)?;
        let engine = self.engine.as_ref().or(self.calibrate.as_ref()).map(|file| file.display().to_string());
        let (pools, most_open, took_seconds) = (end.pools, end.most_open, end.took.as_secs_f64());
        let target = ReplayTarget::Simulated { pools, most_open, engine, took_seconds };
        let ended_by = end.interrupted.then(|| "interrupted".to_owned());
        Ok(Replayed { target, feed: end.feed, ended_by })
    }

    fn live(
        &self,
        url: &str,
        source: &TraceSource,
        classes: &ReplayedClasses,
        score: &mut ReplayScore,
        lines: &mut RecordLines,
    ) -> Result<Replayed, NotStarted> {
        let runtime = load_runtime().map_err(|error| NotStarted::Start(anyhow::anyhow!("no runtime: {error}")))?;
        let end = runtime.block_on(live::replay_live(self, url, source, classes, score, lines))?;
        Ok(Replayed { target: end.target, feed: end.feed, ended_by: end.ended_by })
    }

    fn result(&self, source: &TraceSource, replayed: Replayed, score: &ReplayScore) -> ReplayResult {
        let Replayed { target, feed, ended_by } = replayed;
        let unreadable = feed.error.map(|error| format!("{UNREADABLE} {}: {error}", source.name()));
        let ended_by = ended_by.or(unreadable);
        let classes = score.results();
        let is_sound = match &target {
            ReplayTarget::Service { problems, .. } => problems.is_empty(),
            ReplayTarget::Simulated { .. } => true,
        };
        let complete = ended_by.is_none();
        let reshape = source.reshape();
        ReplayResult {
            format: REPLAY_FORMAT,
            version: env!("CARGO_PKG_VERSION"),
            trace: ReplayTraceSummary {
                file: source.name(),
                format: source.format.as_str().to_owned(),
                from_seconds: reshape.from.as_secs_f64(),
                to_seconds: reshape.to.map(|to| to.as_secs_f64()),
                speed: reshape.speed,
                rate: reshape.rate,
                slice_seconds: reshape.slice.as_secs_f64(),
                passed_over: feed.notes,
                too_long: feed.too_long,
                unknown_class: feed.unknown_class,
                unknown_model: feed.unknown_model,
            },
            target,
            complete,
            ended_by,
            passes: complete && is_sound && !classes.is_empty() && classes.iter().all(|class| class.passes),
            seconds: score.last_arrival(),
            losses: self.losses(),
            classes,
        }
    }
}

/// Beginning of the reason if the trace could not be read to its end.
const UNREADABLE: &str = "the trace cannot be read on:";
