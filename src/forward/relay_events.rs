//! The events of a relay, for the code that owns the request.

use crate::observe::Timeline;
use crate::reject::Rejection;
use crate::types::Tick;

/// The end of a relay.
pub struct RelayEnd {
    /// The observed response.
    pub timeline: Timeline,
    /// The rejection, if an engine awaited behind an early head gave no
    /// stream.
    pub refusal: Option<Rejection>,
    /// Whether the request was still waiting for a connection to the engine.
    pub never_sent: bool,
}

/// Receives the events of a relay, and owns the resources of the request: its record and its share of an
/// engine's work.
pub trait RelayEvents: Send {
    /// The first token came.
    fn first_token(&mut self, at: Tick);
    /// The rejection to send instead of this code, if the engine rejected a key that is not the client's.
    fn refused_key(&self, code: u16) -> Option<Rejection>;
    /// The relay has ended: called exactly once.
    fn end(self: Box<Self>, ended: RelayEnd);
}
