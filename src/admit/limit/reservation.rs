//! The reservation of a running request, and how it ends.

use std::sync::Arc;

use super::Used;
use super::buckets::{BucketSet, HeldAmounts};
use crate::sync::Mutex;
use crate::types::{Tick, Tokens};

/// Amounts reserved for a running request. Released by exactly one ending: [`settle`](LocalReservation::settle)
/// (charges a request and the tokens used), [`cancel`](LocalReservation::cancel) (likewise), or the drop, which
/// charges nothing because the request was never dispatched or the service failed it.
///
/// Refers to the buckets from which it took. If a reload has removed them, it ends in buckets that are no
/// longer read.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub struct LocalReservation {
    holds: [Option<BucketHold>; 2],
    input: Tokens,
    /// Admitted elsewhere, so that it must not leave debt here.
    externally_admitted: bool,
}

/// The amounts held in one scope.
#[derive(Debug)]
pub(super) struct BucketHold {
    pub bucket_set: Arc<Mutex<BucketSet>>,
    pub held: HeldAmounts,
}

impl LocalReservation {
    pub(super) fn new(holds: [Option<BucketHold>; 2], input: Tokens) -> Self {
        LocalReservation { holds, input, externally_admitted: false }
    }

    pub(super) fn externally_admitted(holds: [Option<BucketHold>; 2], input: Tokens) -> Self {
        LocalReservation { holds, input, externally_admitted: true }
    }

    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
    pub fn settle(mut self, used: Used, at: Tick) {
        let externally_admitted = self.externally_admitted;
        for BucketHold { bucket_set, held } in self.holds.iter_mut().filter_map(Option::take) {
            bucket_set.lock().settle(&held, &used, externally_admitted, at);
        }
    }

    /// Charges the estimated prompt and the output `seen` so far, after a disconnect or a broken response. With
    /// known usage call [`settle`](Self::settle).
    pub fn cancel(self, seen: Tokens, at: Tick) {
        let used = Used { input: self.input, output: seen };
        self.settle(used, at);
    }
}

impl Drop for LocalReservation {
    fn drop(&mut self) {
        for BucketHold { bucket_set, held } in self.holds.iter_mut().filter_map(Option::take) {
            bucket_set.lock().give_back(&held);
        }
    }
}
