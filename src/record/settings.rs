//! Settings of the access log and of metric labels.

/// Destination of the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// One JSON object per line on stdout.
    #[default]
    Stdout,
    /// No access log.
    Off,
}

/// Labels of request metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels {
    /// Omitted labels; series that differ only in these are counted together.
    pub dropped: Vec<RequestLabel>,
    /// Whether histograms have the label `model` too.
    pub histograms_by_model: bool,
}

/// A label that can be omitted.
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
    /// The label's name.
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
