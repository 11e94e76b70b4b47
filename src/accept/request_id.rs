//! Request ids.

use http::HeaderName;

use crate::types::RequestId;
use crate::types::decimal::put_hex;

/// The header with a rejection's reason.
pub(super) const X_GOODPUT_REASON: HeaderName = HeaderName::from_static("x-goodput-reason");

/// A new random id of 128 bits.
#[must_use]
pub fn new_request_id() -> RequestId {
    let mut id = *b"req-00000000000000000000000000000000";
    put_hex(&mut id[4..], &rand::random::<u128>().to_ne_bytes());
    RequestId::from(std::str::from_utf8(&id).expect("hexadecimal digits"))
}
