//! Priority levels of classes.

/// Priority of a class in the queue. Earlier variants are served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Before all others.
    Critical,
    /// Before `normal`.
    High,
    /// The default.
    #[default]
    Normal,
    /// Behind `normal`.
    Low,
    /// Behind all others.
    Batch,
}

impl Priority {
    /// Every priority, highest first.
    pub const ALL: [Priority; 5] =
        [Priority::Critical, Priority::High, Priority::Normal, Priority::Low, Priority::Batch];

    /// The word used in the settings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Priority::Critical => "critical",
            Priority::High => "high",
            Priority::Normal => "normal",
            Priority::Low => "low",
            Priority::Batch => "batch",
        }
    }
}
