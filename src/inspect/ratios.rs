//! Bytes per token and tokens per event, learned from reported usage.

/// Ratios learned from answers that reported usage. Shared, kept over reloads.
#[derive(Debug, Default)]
pub struct Ratios;
