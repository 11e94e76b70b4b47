//! What classification decided on a request.

use std::sync::Arc;
use std::time::Duration;

use crate::judge::{JudgeContext, Objectives};
use crate::types::{ClassId, LengthBucket, Tick, Tokens};

/// Policy of a request from classification on.
#[derive(Clone, Debug)]
pub struct RequestPolicy {
    /// The class.
    pub class: ClassId,
    /// The rule that chose it.
    pub rule: Arc<str>,
    /// Start of the objectives' clock.
    pub start: Tick,
    /// The objectives, including the request's own targets.
    pub objectives: Arc<Objectives>,
    /// Prompt length bucket.
    pub length: LengthBucket,
    /// Estimated prompt tokens.
    pub prompt: Tokens,
    /// Whether it asks for a stream.
    pub streamed: bool,
    /// Expected choices of the response.
    pub choices: u64,
    /// Edges of the gap histogram.
    pub gap_edges: Arc<[Duration]>,
    /// Further inputs of the judgement.
    pub case: JudgeContext,
}
