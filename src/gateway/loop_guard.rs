//! Loop detection: recognises requests that come back under an id sent to an engine.
//!
//! An engine address that leads back to this gateway, also through other gateways, makes a request arrive
//! again while it is still being served, under its upstream id. A tag therefore proves a loop only for its
//! own request and only while that request runs; a client that copies an id from a response and sends it
//! later has proved nothing.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::types::RequestId;
use crate::types::decimal::put_hex;

/// A hyphen and 16 random hexadecimal digits.
const TAG: usize = 17;

/// Hashes of the tagged ids of requests at engines.
#[derive(Clone, Debug, Default)]
pub(super) struct LoopGuard(Arc<InFlight>);

#[derive(Debug, Default)]
struct InFlight {
    hasher: ahash::RandomState,
    ids: Mutex<HashSet<u64, ahash::RandomState>>,
}

/// Holds the id of one request until it ends.
#[derive(Debug)]
pub struct Tagged {
    in_flight: Arc<InFlight>,
    hash: u64,
}

impl LoopGuard {
    /// The id for engines: the client's own id, so that an engine's log can be matched to the access log, made
    /// unique by a tag. An id made by the gateway is unique already; if it comes back, a client chose it, and
    /// it gets a tag then.
    pub(super) fn tag<'a>(&self, known: &'a RequestId, is_made: bool) -> (Cow<'a, [u8]>, Option<Tagged>) {
        let known = known.as_str().as_bytes();
        if is_made {
            return (Cow::Borrowed(known), None);
        }
        let mut id = Vec::with_capacity(known.len() + TAG);
        id.extend_from_slice(known);
        id.extend_from_slice(b"-0000000000000000");
        put_hex(&mut id[known.len() + 1..], &rand::random::<u64>().to_ne_bytes());
        let hash = self.0.hasher.hash_one(&*id);
        self.0.ids.lock().insert(hash);
        (Cow::Owned(id), Some(Tagged { in_flight: Arc::clone(&self.0), hash }))
    }

    /// Whether a request still being served was sent on with this id, possibly followed by tags of other
    /// gateways.
    pub(super) fn has_sent(&self, id: &RequestId) -> bool {
        let mut id = id.as_str().as_bytes();
        while ends_in_a_tag(id) {
            if self.0.ids.lock().contains(&self.0.hasher.hash_one(id)) {
                return true;
            }
            id = &id[..id.len() - TAG];
        }
        false
    }
}

impl Drop for Tagged {
    fn drop(&mut self) {
        self.in_flight.ids.lock().remove(&self.hash);
    }
}

fn ends_in_a_tag(id: &[u8]) -> bool {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    id.last_chunk::<TAG>().is_some_and(|[hyphen, digits @ ..]| *hyphen == b'-' && digits.iter().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(guard: &LoopGuard, id: &RequestId) -> (RequestId, Option<Tagged>) {
        let (id, tagged) = guard.tag(id, false);
        (RequestId::from(std::str::from_utf8(&id).unwrap()), tagged)
    }

    #[test]
    fn c95_an_id_is_known_again_only_while_its_request_runs() {
        let (here, elsewhere) = (LoopGuard::default(), LoopGuard::default());
        for id in ["a", "req-00000000000000000000000000000000", "mine-0123456789abcdef"].map(RequestId::from) {
            let (once, tagged) = sent(&here, &id);
            assert!(once.as_str().starts_with(id.as_str()) && once.as_str().len() == id.as_str().len() + TAG);
            assert!(here.has_sent(&once) && !elsewhere.has_sent(&once) && !here.has_sent(&id));
            // The tag of one request on another one's id.
            let stolen = RequestId::from(format!("b{}", &once.as_str()[id.as_str().len()..]));
            assert!(!here.has_sent(&stolen), "{stolen}");
            drop(tagged);
            assert!(!here.has_sent(&once), "its request has ended");
        }
        assert!(here.0.ids.lock().is_empty());
    }

    #[test]
    fn a_loop_through_other_gateways_is_found_too() {
        let [here, second, third] = [(); 3].map(|()| LoopGuard::default());
        let (once, _first) = sent(&here, &RequestId::from("a"));
        assert!(!second.has_sent(&once), "two gateways in a row are no loop");
        let (twice, _second) = sent(&second, &once);
        let (thrice, _third) = sent(&third, &twice);
        assert!(here.has_sent(&twice) && here.has_sent(&thrice) && second.has_sent(&thrice));
    }

    #[test]
    fn an_id_of_our_own_goes_as_it_is() {
        let guard = LoopGuard::default();
        let id = RequestId::from("req-1");
        let (sent, tagged) = guard.tag(&id, true);
        assert_eq!((&*sent, tagged.is_none()), (&b"req-1"[..], true));
        for id in ["", "a", "0123abcd00000000", "-0123abcd0000000", "x_0123abcd00000000", "-0123ABCD00000000"] {
            assert!(!guard.has_sent(&RequestId::from(id)), "{id}");
        }
    }
}
