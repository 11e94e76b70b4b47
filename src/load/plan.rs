//! A request that a load run is to send, and the service that it goes to.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};

use crate::dial::{Dial, EngineAddress, Roots};
use crate::forward::settings::Timeouts;
use crate::judge::Objectives;
use crate::types::{ApiPath, ClassId, Tokens};

/// One request of a load run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRequest {
    /// Scheduled send time, from the start of the run. No response moves it.
    pub at: Duration,
    /// Index into the run's classes.
    pub class: usize,
    /// Path of the request.
    pub endpoint: ApiPath,
    /// Whether the body asks for a stream.
    pub stream: bool,
    /// JSON body.
    pub body: Bytes,
    /// Prompt tokens that were planned; copied into the record.
    pub input_tokens: Option<u64>,
    /// Output cap that the body states.
    pub output_cap: Option<Tokens>,
    /// The client disconnects this long after `at`, unless the response has ended.
    pub leaves_after: Option<Duration>,
    /// `authorization` of this request, in place of the service's.
    pub authorization: Option<HeaderValue>,
    /// Number of the planner's own, such as the line of a trace; copied into the record.
    pub tag: u64,
}

/// One class of a load run: how its requests are judged, and when they are given up.
#[derive(Clone, Debug)]
pub struct LoadClass {
    /// Name.
    pub id: ClassId,
    /// Objectives, from the scheduled send time.
    pub objectives: Objectives,
    /// Time limits, from the scheduled send time. `hold_head` and `keepalive` have no meaning here.
    pub timeouts: Timeouts,
    /// Headers of every request of the class.
    pub headers: HeaderMap,
}

/// The service under load: a gateway, an engine, any server with the OpenAI API.
#[derive(Clone)]
pub struct LoadTarget {
    /// Opens connections; in-memory pipes in tests.
    pub dial: Arc<dyn Dial>,
    /// Address.
    pub address: EngineAddress,
    /// Roots that replace the system's, for `https`.
    pub roots: Option<Roots>,
    /// Headers of every request: credentials, mostly.
    pub headers: HeaderMap,
}
