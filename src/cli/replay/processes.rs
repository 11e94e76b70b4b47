//! Real engines of a replay: started here, killed when they are lost, started again when they return.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};

use super::options::ReplayArgs;
use crate::clock::Clock;
use crate::load::replay::EngineSet;
use crate::types::Tick;

/// Engines that end with the replay.
pub struct EngineProcesses {
    engines: Vec<EngineProcess>,
    /// Losses and returns, in order of time.
    changes: Vec<ProcessChange>,
}

struct EngineProcess {
    name: String,
    command: String,
    child: Option<Child>,
}

#[derive(Clone, Copy)]
struct ProcessChange {
    at: Duration,
    engine: usize,
    starts: bool,
}

impl EngineProcesses {
    /// Starts the engines of `--run`.
    ///
    /// # Errors A line is not NAME=COMMAND, a loss names none of them, or a process cannot be started.
    pub fn start(args: &ReplayArgs) -> anyhow::Result<Self> {
        let mut engines: Vec<EngineProcess> = Vec::new();
        for text in &args.run {
            let (name, command) = text.split_once('=').with_context(|| format!("--run {text}: write NAME=COMMAND"))?;
            if name.is_empty() || command.trim().is_empty() || engines.iter().any(|known| known.name == name) {
                bail!("--run {text}: give each engine a name of its own, and a command");
            }
            engines.push(EngineProcess { name: name.to_owned(), command: command.to_owned(), child: None });
        }
        let changes = args.lose.iter().map(|change| (change, false));
        let changes = changes.chain(args.returned.iter().map(|change| (change, true)));
        let mut changes: Vec<ProcessChange> = changes
            .map(|(change, starts)| {
                let named = |engine: &EngineProcess| {
                    matches!(&change.engines, EngineSet::Name(name) if *name == engine.name)
                        || change.engines.to_string() == engine.name
                };
                let engine = engines.iter().position(named);
                let engine = engine.with_context(|| format!("{change}: no --run has this name"))?;
                Ok(ProcessChange { at: change.at, engine, starts })
            })
            .collect::<anyhow::Result<_>>()?;
        changes.sort_by_key(|change| change.at);
        let mut processes = EngineProcesses { engines, changes };
        processes.engines.iter_mut().try_for_each(EngineProcess::start)?;
        Ok(processes)
    }

    /// Whether there are no processes.
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// Applies each change at its time after `origin`; never ends.
    pub async fn follow(&mut self, clock: Clock, origin: Tick, mut say: impl FnMut(String)) {
        for ProcessChange { at, engine, starts } in std::mem::take(&mut self.changes) {
            clock.sleep_until(Some(origin + at)).await;
            let engine = &mut self.engines[engine];
            let done = if starts { engine.start() } else { engine.kill() };
            let verb = if starts { "started again" } else { "killed" };
            match done {
                Ok(()) => say(format!("{:.0} s: {} was {verb}", at.as_secs_f64(), engine.name)),
                Err(error) => say(format!("{:.0} s: {error:#}", at.as_secs_f64())),
            }
        }
        std::future::pending().await
    }
}

impl EngineProcess {
    /// Its command replaces the shell, so that it is the process that is killed.
    fn start(&mut self) -> anyhow::Result<()> {
        self.kill()?;
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("exec {}", self.command)).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().with_context(|| format!("--run {}: cannot be started", self.name))?;
        self.child = Some(child);
        Ok(())
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let killed = child.kill().and_then(|()| child.wait());
        killed.map(drop).with_context(|| format!("--run {}: cannot be killed", self.name))
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        // A process that is already gone needs no report.
        let _ = self.kill();
    }
}
