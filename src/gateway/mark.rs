//! The ids that engines see, and by which a request that comes back is known.

use std::borrow::Cow;

use crate::units::RequestId;
use crate::units::decimal::put_hex;

/// What this gateway, and no other one, writes into the ids that it gives to engines. Clients
/// never see it. It costs no header field: an engine's address that leads back here, round
/// corners too, is found out at the second or third pass, and two gateways in a row are none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark([u8; 8]);

/// A hyphen, the mark, and as many digits by chance.
const LONG: usize = 17;

impl Mark {
    pub(super) fn new() -> Self {
        let mut mark = [0; 8];
        put_hex(&mut mark, &rand::random::<u32>().to_ne_bytes());
        Mark(mark)
    }

    /// What engines see: the id that the client knows, so that an engine's log can be matched to
    /// the access line, made unique where a client chose it.
    pub(super) fn put_on(self, known: &RequestId, is_made: bool) -> Cow<'_, [u8]> {
        let known = known.as_str().as_bytes();
        if is_made {
            return Cow::Borrowed(known);
        }
        let mut id = Vec::with_capacity(known.len() + LONG);
        id.extend_from_slice(known);
        id.push(b'-');
        id.extend_from_slice(&self.0);
        id.extend_from_slice(b"00000000");
        put_hex(&mut id[known.len() + 9..], &rand::random::<u32>().to_ne_bytes());
        Cow::Owned(id)
    }

    /// Whether an id is one that this gateway has given to an engine.
    pub(super) fn is_on(self, id: &RequestId) -> bool {
        let end = id.as_str().as_bytes().last_chunk::<LONG>();
        end.is_some_and(|end| end[0] == b'-' && end[1..9] == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_id_that_was_marked_here_is_known_again() {
        let (here, elsewhere) = (Mark(*b"0123abcd"), Mark(*b"89abcdef"));
        let passed = |mark: Mark, id: &str| {
            RequestId::from(std::str::from_utf8(&mark.put_on(&RequestId::from(id), false)).unwrap())
        };
        for id in ["a", "req-00000000000000000000000000000000", "mine-0123abcd00000000"] {
            let once = passed(here, id);
            assert!(once.as_str().starts_with(id) && once.as_str().len() == id.len() + LONG);
            assert!(here.is_on(&once) && !elsewhere.is_on(&once));
            // Two gateways in a row, and back to the first.
            let twice = passed(elsewhere, once.as_str());
            assert!(elsewhere.is_on(&twice) && !here.is_on(&twice));
        }
        for id in ["", "a", "0123abcd00000000", "-0123abcd0000000", "x_0123abcd00000000", "-0123abce00000000"] {
            assert!(!here.is_on(&RequestId::from(id)), "{id}");
        }
        assert_eq!(*here.put_on(&RequestId::from("req-1"), true), *b"req-1");
    }
}
