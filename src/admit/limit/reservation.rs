//! What a running request holds, and how it ends.

use std::sync::Arc;

use super::Used;
use super::book::{Book, Held};
use crate::locks::Mutex;
use crate::units::{Tick, Tokens};

/// What is set aside for a request that runs. Exactly one ending takes it out of the books:
/// [`settle`](Reservation::settle) (it counts as a request, and as the tokens that it used),
/// [`cancel`](Reservation::cancel) (likewise) or the drop, which charges nothing: the request was
/// never dispatched, or the service failed it.
///
/// It stays with the books from which it took. Where a reload has removed them meanwhile, it
/// ends in books that nobody reads any more.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub struct Reservation {
    slips: [Option<Slip>; 2],
    input: Tokens,
    /// Somebody else let the request in: it may not leave debt here.
    guest: bool,
}

/// A share in one book.
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

    /// Charges what was really used in the place of what was held: less is given back, more
    /// becomes debt.
    pub fn settle(mut self, used: Used, at: Tick) {
        let guest = self.guest;
        for Slip { book, held } in self.slips.iter_mut().filter_map(Option::take) {
            book.lock().settle(&held, &used, guest, at);
        }
    }

    /// Charges the prompt, as it was estimated, and the output `seen` so far: the client left, or
    /// the answer broke off after a token. Where usage is known, [`settle`](Self::settle).
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
