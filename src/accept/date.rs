//! The `date` header of responses.

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use parking_lot::Mutex;

use crate::clock::Clock;

/// Length of a date as in RFC 9110 section 5.6.7.
const LENGTH: usize = "Mon, 30 Nov 2026 00:00:00 GMT".len();

/// The `date` value, formatted once a second for all connections.
pub(super) struct Dates {
    clock: Clock,
    last: Mutex<(u64, [u8; LENGTH])>,
}

impl Dates {
    pub(super) fn new(clock: Clock) -> Self {
        Dates { clock, last: Mutex::new((u64::MAX, [b' '; LENGTH])) }
    }

    pub(super) fn now(&self) -> [u8; LENGTH] {
        let seconds = self.clock.wall().as_secs();
        let mut last = self.last.lock();
        if last.0 != seconds {
            *last = (seconds, written(seconds));
        }
        last.1
    }
}

/// Out-of-range times become the first representable one.
fn written(seconds: u64) -> [u8; LENGTH] {
    let moment = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    let text = DateTimePrinter::new().timestamp_to_rfc9110_string(&moment.unwrap_or_default());
    text.ok().and_then(|text| text.as_bytes().try_into().ok()).unwrap_or(*b"Thu, 01 Jan 1970 00:00:00 GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_written_as_the_standard_shows_it() {
        assert_eq!(&written(784_111_777), b"Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(&written(0), b"Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(&written(u64::MAX), b"Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
