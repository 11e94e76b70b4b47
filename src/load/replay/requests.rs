//! Requests for a service, from those of a trace.

use crate::load::plan::PlannedRequest;
use crate::load::prompts::PromptMaker;
use crate::load::workload::Workload;
use crate::trace::TraceRequest;
use crate::types::Tokens;

/// Creates bodies of a workload's kind with a trace's lengths, and prompts that share prefixes as in the
/// trace.
pub struct ReplayRequests<'a> {
    workload: &'a Workload,
    prompts: PromptMaker,
}

impl<'a> ReplayRequests<'a> {
    /// For a service that takes this workload's bodies. The seed makes the text of this replay unlike any other's.
    #[must_use]
    pub fn new(workload: &'a Workload, seed: u64) -> Self {
        ReplayRequests { workload, prompts: PromptMaker::new(workload.calibration, 0.0, 1, seed) }
    }

    /// The request, in the class with this index.
    pub fn request(&mut self, request: &TraceRequest, class: usize) -> PlannedRequest {
        let workload = self.workload;
        let (input, output) = workload.bounded((request.input, request.output));
        let prompt = self.prompts.recorded(input, &request.blocks);
        let generates = workload.endpoint.dialect().generates();
        let stream = generates && workload.stream && request.stream != Some(false);
        PlannedRequest {
            at: request.at,
            class,
            endpoint: workload.endpoint,
            stream,
            body: workload.body(&prompt, output, stream),
            input_tokens: Some(input),
            output_cap: generates.then_some(Tokens(output)),
            leaves_after: None,
            authorization: None,
            tag: request.line,
        }
    }
}
