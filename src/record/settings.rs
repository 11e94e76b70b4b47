//! Where the access line goes.

/// The access line of each finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// One JSON object per line on stdout.
    #[default]
    Stdout,
    /// None.
    Off,
}
