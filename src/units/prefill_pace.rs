//! The pace of prompts.

/// How fast prompts may go to the engines, in prompt tokens: a token bucket, and how much may be
/// outstanding.
///
/// The bucket fills at the rate at which the engines can compute prompts without breaking the time per
/// output token of what runs there. While it holds something, prompts go as they come, up to `most` for
/// an engine; while it is empty, up to `least`, so that the next one is there when an engine has
/// computed the last; and none while it is `behind` tokens below zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillPace {
    /// Tokens per second: the share of the engines' time that the classes leave for prefill. Infinite where no
    /// class has a time per output token that prompts could break.
    pub per_second: f64,
    /// Tokens per second up to which there is room for requests beyond what their tenants usually ask
    /// for: engines that are kept busy by those alone still answer the others quickly.
    pub spare: f64,
    /// What the bucket holds.
    pub burst: f64,
    /// How far below zero it may go.
    pub behind: f64,
    /// Tokens that one engine may have ahead of it.
    pub most: f64,
    /// The same while the bucket is empty.
    pub least: f64,
}
