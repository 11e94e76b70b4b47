//! Where the access line goes, what outlives the process, and by which labels requests are counted.

use std::path::PathBuf;
use std::time::Duration;

/// The access line of each finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// One JSON object per line on stdout.
    #[default]
    Stdout,
    /// None.
    Off,
}

/// The file in which the counts of classes outlive the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SloStateSettings {
    /// Where it is.
    pub path: PathBuf,
    /// How often it is saved.
    pub every: Duration,
}

impl SloStateSettings {
    /// How often, where nothing is said.
    pub const EVERY: Duration = Duration::from_secs(60);
}

/// By which labels the metrics of requests are told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels {
    /// Labels that are left out: what differs in them only is counted together.
    pub dropped: Vec<RequestLabel>,
    /// Histograms have the label `model` too.
    pub histograms_by_model: bool,
}

/// A label that may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestLabel {
    /// `length`.
    Length,
    /// `pool`.
    Pool,
    /// `model`.
    Model,
    /// `tenant`.
    Tenant,
}

impl RequestLabel {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            RequestLabel::Length => "length",
            RequestLabel::Pool => "pool",
            RequestLabel::Model => "model",
            RequestLabel::Tenant => "tenant",
        }
    }
}
