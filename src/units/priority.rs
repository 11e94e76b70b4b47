//! The rank of a class where requests wait.

/// The rank of a class: the earlier variant goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Before all others.
    Critical,
    /// Before `normal`.
    High,
    /// What a class has that names none.
    #[default]
    Normal,
    /// Behind `normal`.
    Low,
    /// Behind all others.
    Batch,
}

impl Priority {
    /// All ranks, the first first.
    pub const ALL: [Priority; 5] =
        [Priority::Critical, Priority::High, Priority::Normal, Priority::Low, Priority::Batch];

    /// The word in the settings.
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
