//! How urgent an alert is.

/// Whom an alert reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Somebody, now.
    Page,
    /// Somebody, this week.
    Ticket,
    /// Whoever looks.
    Info,
}

impl Severity {
    /// The value of the label `severity`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Severity::Page => "page",
            Severity::Ticket => "ticket",
            Severity::Info => "info",
        }
    }
}
