//! The reservation of a running request, and how it ends.

use std::sync::Arc;

use super::Used;
use super::book::{Book, Held};
use crate::locks::Mutex;
use crate::units::{Tick, Tokens};

/// Amounts reserved for a running request. Released by exactly one ending: [`settle`](Reservation::settle)
/// (charges a request and the tokens used), [`cancel`](Reservation::cancel) (likewise), or the drop, which
/// charges nothing because the request was never dispatched or the service failed it.
///
/// Refers to the buckets from which it took. If a reload has removed them, it ends in buckets that are no
/// longer read.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub struct Reservation {
    slips: [Option<Slip>; 2],
    input: Tokens,
    /// Admitted elsewhere, so that it must not leave debt here.
    guest: bool,
}

/// The amounts held in one scope.
#[derive(Debug)]
pub(super) struct Slip {
    pub book: Arc<Mutex<Book>>,
    pub held: Held,
}

impl Reservation {
    pub(super) fn new(slips: [Option<Slip>; 2], input: Tokens) -> Self {
        Reservation { slips, input, guest: false }
    }

    pub(super) fn of_guest(slips: [Option<Slip>; 2], input: Tokens) -> Self {
        Reservation { slips, input, guest: true }
    }

    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
    pub fn settle(mut self, used: Used, at: Tick) {
        let guest = self.guest;
        for Slip { book, held } in self.slips.iter_mut().filter_map(Option::take) {
            book.lock().settle(&held, &used, guest, at);
        }
    }

    /// Charges the estimated prompt and the output `seen` so far, after a disconnect or a broken response. With
    /// known usage call [`settle`](Self::settle).
    pub fn cancel(self, seen: Tokens, at: Tick) {
        let used = Used { input: self.input, output: seen };
        self.settle(used, at);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        for Slip { book, held } in self.slips.iter_mut().filter_map(Option::take) {
            book.lock().give_back(&held);
        }
    }
}
