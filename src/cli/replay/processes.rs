//! Real engines of a replay. Those of `--run` are started here, killed when they are lost, and started again when they
//! return; those that run elsewhere are lost and brought back by commands (`--lose-by`, `--return-by`).

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};

use super::options::ReplayArgs;
use crate::clock::Clock;
use crate::load::replay::{EngineChange, EngineSet};
use crate::types::Tick;

/// Time in which commands must have ended after the replay.
const COMMANDS_END_WITHIN: Duration = Duration::from_secs(60);

/// Interval at which the end of a command is looked for.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Engines that are lost and return.
pub struct EngineProcesses {
    engines: Vec<RealEngine>,
    /// Losses and returns, in order of time.
    changes: Vec<ProcessChange>,
    /// Commands that were started, and what they do.
    commands: Vec<(String, Child)>,
    problems: Vec<String>,
}

struct RealEngine {
    name: String,
    control: EngineControl,
}

enum EngineControl {
    /// A process of ours.
    Process(EngineProcess),
    /// An engine that runs elsewhere.
    Elsewhere { lose: String, bring_back: Option<String>, is_lost: bool },
}

struct EngineProcess {
    command: String,
    child: Option<Child>,
}

#[derive(Clone, Copy)]
struct ProcessChange {
    at: Duration,
    engine: usize,
    returns: bool,
}

impl EngineProcesses {
    /// Starts the engines of `--run`.
    ///
    /// # Errors A line is not NAME=COMMAND, a change names none of them, or a process cannot be started.
    pub fn start(args: &ReplayArgs) -> anyhow::Result<Self> {
        let mut engines: Vec<RealEngine> = Vec::new();
        for (option, text) in
            args.run.iter().map(|text| ("--run", text)).chain(args.lose_by.iter().map(|text| ("--lose-by", text)))
        {
            let (name, command) = named(option, text)?;
            if engines.iter().any(|known| known.name == name) {
                bail!("{option} {text}: there is another engine of this name");
            }
            let control = match option {
                "--run" => EngineControl::Process(EngineProcess { command, child: None }),
                _ => EngineControl::Elsewhere { lose: command, bring_back: None, is_lost: false },
            };
            engines.push(RealEngine { name, control });
        }
        for text in &args.return_by {
            let (name, command) = named("--return-by", text)?;
            match engines.iter_mut().find(|engine| engine.name == name).map(|engine| &mut engine.control) {
                Some(EngineControl::Elsewhere { bring_back, .. }) => *bring_back = Some(command),
                _ => bail!("--return-by {text}: no --lose-by has this name"),
            }
        }
        let lost = args.lose.iter().map(|change| change_of(&engines, change, false));
        let returned = args.returned.iter().map(|change| change_of(&engines, change, true));
        let mut changes = lost.chain(returned).collect::<anyhow::Result<Vec<_>>>()?;
        changes.sort_by_key(|change| change.at);
        for engine in &mut engines {
            if let EngineControl::Process(process) = &mut engine.control {
                process.start().with_context(|| format!("--run {}", engine.name))?;
            }
        }
        Ok(EngineProcesses { engines, changes, commands: Vec::new(), problems: Vec::new() })
    }

    /// Whether engines were just started.
    pub fn are_started(&self) -> bool {
        self.engines.iter().any(|engine| matches!(engine.control, EngineControl::Process(_)))
    }

    /// Applies each change at its time after `origin`; never ends.
    pub async fn follow(&mut self, clock: Clock, origin: Tick, mut say: impl FnMut(String)) {
        for ProcessChange { at, engine, returns } in std::mem::take(&mut self.changes) {
            clock.sleep_until(Some(origin + at)).await;
            let said = self.change(engine, returns);
            say(format!("{:.0} s: {said}", at.as_secs_f64()));
        }
        std::future::pending().await
    }

    /// Brings back the engines that are still lost, and waits for all commands. Returns why a loss or a return did not
    /// happen.
    pub async fn finish(&mut self, clock: Clock) -> Vec<String> {
        for engine in 0..self.engines.len() {
            let is_lost = |engine: &RealEngine| {
                matches!(engine.control, EngineControl::Elsewhere { is_lost: true, bring_back: Some(_), .. })
            };
            if is_lost(&self.engines[engine]) {
                self.change(engine, true);
            }
        }
        let give_up = clock.now() + COMMANDS_END_WITHIN;
        for (what, mut child) in std::mem::take(&mut self.commands) {
            loop {
                match child.try_wait() {
                    Ok(Some(status)) if status.success() => break,
                    Ok(Some(status)) => break self.problems.push(format!("{what} ended with {status}")),
                    Err(error) => break self.problems.push(format!("{what} is lost sight of: {error}")),
                    Ok(None) if clock.now() >= give_up => {
                        // It may end at this moment by itself.
                        let _ = child.kill();
                        let _ = child.wait();
                        break self.problems.push(format!("{what} did not end and was killed"));
                    }
                    Ok(None) => clock.sleep_until(Some(clock.now() + ASK_EVERY)).await,
                }
            }
        }
        std::mem::take(&mut self.problems)
    }

    /// Loses an engine, or brings it back. Returns what was done.
    fn change(&mut self, engine: usize, returns: bool) -> String {
        let RealEngine { name, control } = &mut self.engines[engine];
        let done = match control {
            EngineControl::Process(process) if returns => process.start().map(|()| format!("{name} was started again")),
            EngineControl::Process(process) => process.kill().map(|()| format!("{name} was killed")),
            EngineControl::Elsewhere { lose, bring_back, is_lost } => {
                *is_lost = !returns;
                let (verb, command) = if returns { ("returns", bring_back.as_ref()) } else { ("loses", Some(&*lose)) };
                let what = format!("the command that {verb} {name}");
                let spawned = command.context("there is none").and_then(|command| Ok(shell(command).spawn()?));
                spawned.map(|child| {
                    self.commands.push((what.clone(), child));
                    format!("{what} was started")
                })
            }
        };
        done.unwrap_or_else(|error| {
            let said = format!("{name}: {error:#}");
            self.problems.push(said.clone());
            said
        })
    }
}

/// Reads NAME=COMMAND.
fn named(option: &str, text: &str) -> anyhow::Result<(String, String)> {
    let (name, command) = text.split_once('=').with_context(|| format!("{option} {text}: write NAME=COMMAND"))?;
    if name.is_empty() || command.trim().is_empty() {
        bail!("{option} {text}: give the engine a name, and a command");
    }
    Ok((name.to_owned(), command.to_owned()))
}

fn change_of(engines: &[RealEngine], change: &EngineChange, returns: bool) -> anyhow::Result<ProcessChange> {
    let is_meant = |engine: &RealEngine| {
        matches!(&change.engines, EngineSet::Name(name) if *name == engine.name)
            || change.engines.to_string() == engine.name
    };
    let engine = engines.iter().position(is_meant);
    let engine = engine.with_context(|| format!("{change}: no --run and no --lose-by has this name"))?;
    if returns && matches!(engines[engine].control, EngineControl::Elsewhere { bring_back: None, .. }) {
        bail!("--return {change}: no --return-by brings it back");
    }
    Ok(ProcessChange { at: change.at, engine, returns })
}

fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::null());
    shell
}

impl EngineProcess {
    /// Its command replaces the shell, so that it is the process that is killed.
    fn start(&mut self) -> anyhow::Result<()> {
        self.kill()?;
        let child = shell(&format!("exec {}", self.command)).spawn().context("it cannot be started")?;
        self.child = Some(child);
        Ok(())
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        child.kill().and_then(|()| child.wait()).map(drop).context("it cannot be killed")
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        // A process that is already gone needs no report.
        let _ = self.kill();
    }
}
