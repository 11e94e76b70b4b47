//! Losses and returns of engines during a replay.

use std::time::Duration;

/// Engines that a loss names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineSet {
    /// Numbers from 1, first to last, of a named pool if there is one.
    Numbers {
        /// Pool.
        pool: Option<String>,
        /// First.
        from: usize,
        /// Last.
        to: usize,
    },
    /// An engine by its name.
    Name(String),
}

/// Engines that are lost or return at a moment of the replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineChange {
    /// Which.
    pub engines: EngineSet,
    /// When, from the start of the replay.
    pub at: Duration,
}

impl std::str::FromStr for EngineChange {
    type Err = String;

    /// `ENGINE@TIME`: `3@10m`, `1-20@90s`, `gpu/2@1h`, `left@30`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (engines, at) = text.rsplit_once('@').ok_or("write ENGINE@TIME, such as 3@10m")?;
        Ok(EngineChange { engines: engines.parse()?, at: duration(at)? })
    }
}

impl std::fmt::Display for EngineChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}s", self.engines, self.at.as_secs_f64())
    }
}

impl std::fmt::Display for EngineSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EngineSet::Name(name) => f.write_str(name),
            EngineSet::Numbers { pool, from, to } => {
                pool.iter().try_for_each(|pool| write!(f, "{pool}/"))?;
                if from == to { write!(f, "{from}") } else { write!(f, "{from}-{to}") }
            }
        }
    }
}

impl std::str::FromStr for EngineSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (pool, range) = text.rsplit_once('/').map_or((None, text), |(pool, range)| (Some(pool), range));
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let numbers = from.parse::<usize>().ok().zip(to.parse::<usize>().ok());
        match numbers {
            Some((from, to)) if from >= 1 && to >= from => {
                Ok(EngineSet::Numbers { pool: pool.map(str::to_owned), from, to })
            }
            Some(_) => Err(format!("{range:?} names no engine; the first one is 1")),
            None if text.is_empty() => Err("which engine? write ENGINE@TIME".to_owned()),
            None => Ok(EngineSet::Name(text.to_owned())),
        }
    }
}

/// A length of time: `90`, `90s`, `10m`, `1h30m`, `250ms`.
///
/// # Errors
/// What to write instead.
pub fn duration(text: &str) -> Result<Duration, String> {
    let way_out = || format!("{text:?} is no time; write seconds, or 90s, 10m, 1h30m, 2d");
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).map_err(|_| way_out());
    }
    let (mut whole, mut rest) = (Duration::ZERO, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(way_out)?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| digits + at);
        let number: f64 = rest[..digits].parse().map_err(|_| way_out())?;
        let seconds = match &rest[digits..unit] {
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(way_out()),
        };
        whole += Duration::try_from_secs_f64(number * seconds).map_err(|_| way_out())?;
        rest = &rest[unit..];
    }
    if text.is_empty() { Err(way_out()) } else { Ok(whole) }
}

/// The stretch of a replay in which engines are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossSpan {
    /// The first loss.
    pub from: Duration,
    /// The last return; `None` if an engine does not return.
    pub to: Option<Duration>,
}

/// From the first loss to the last return, if there is a loss. Without a return after a loss the end is open.
#[must_use]
pub fn span_of(lost: &[EngineChange], returned: &[EngineChange]) -> Option<LossSpan> {
    let from = lost.iter().map(|change| change.at).min()?;
    let back = |loss: &EngineChange| {
        returned.iter().filter(|back| back.engines == loss.engines && back.at > loss.at).map(|back| back.at).min()
    };
    let to = lost.iter().map(back).collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
    Some(LossSpan { from, to })
}
