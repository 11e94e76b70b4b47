//! The id of a request.

use http::HeaderName;

use crate::units::RequestId;
use crate::units::decimal::put_hex;

/// Where a request and its answer have it.
pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Where a refusal says why.
pub(super) const X_GOODPUT_REASON: HeaderName = HeaderName::from_static("x-goodput-reason");

/// A new id: 128 bits by chance.
#[must_use]
pub fn made_id() -> RequestId {
    let mut id = *b"req-00000000000000000000000000000000";
    put_hex(&mut id[4..], &rand::random::<u128>().to_ne_bytes());
    RequestId::from(std::str::from_utf8(&id).expect("hexadecimal digits"))
}
