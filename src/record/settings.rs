//! Where the access line goes, and by which labels requests are counted.

/// The access line of each finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// One JSON object per line on stdout.
    #[default]
    Stdout,
    /// None.
    Off,
}

/// By which labels the metrics of requests are told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels {
    /// Labels that are left out: what differs in them only is counted together.
    pub dropped: Vec<RequestLabel>,
    /// Histograms have the label `model` too.
    pub histograms_by_model: bool,
    /// Each engine has series of its own.
    pub series_by_engine: bool,
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
