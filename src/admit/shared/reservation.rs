//! What a running request holds, and how it ends.

use std::sync::Arc;

use super::account::HeldOfBoth;
use super::{Inner, Tenant, Word};
use crate::admit::limit::{self, Used};
use crate::units::Tick;

/// As [`limit::Reservation`], of limits that are shared: exactly one ending takes it out of the
/// books, [`settle`](Self::settle) or the drop. Neither of them waits:
/// what must go to the store lies here until the keeper takes it along.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub struct Reservation {
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    inner: Arc<Inner>,
    tenant: Arc<Tenant>,
    model: Box<str>,
    /// What the store granted; `None`: the store was not asked.
    held: Option<HeldOfBoth>,
    /// The same in this gateway's own books.
    share: limit::Reservation,
}

impl Reservation {
    pub(super) fn new(
        inner: &Arc<Inner>,
        tenant: &Arc<Tenant>,
        model: &str,
        held: Option<HeldOfBoth>,
        share: limit::Reservation,
    ) -> Self {
        let (inner, tenant) = (Arc::clone(inner), Arc::clone(tenant));
        Reservation { open: Some(Open { inner, tenant, model: model.into(), held, share }) }
    }

    pub(super) fn unlimited() -> Self {
        Reservation { open: None }
    }

    /// Charges what was really used in the place of what was held: less is given back, more
    /// becomes debt.
    pub fn settle(mut self, used: Used, at: Tick) {
        if let Some(open) = self.open.take() {
            open.end(Some((used, at)));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open.end(None);
        }
    }
}

impl Open {
    fn end(self, used: Option<(Used, Tick)>) {
        let Open { inner, tenant, model, held, share } = self;
        let of_use = used.as_ref().map(|(used, _)| used);
        let is_urgent = tenant.desk.lock().account.ended(&model, held.as_ref(), of_use, inner.counters.is_up());
        match used {
            Some((used, at)) => share.settle(used, at),
            None => drop(share),
        }
        if is_urgent {
            // Where the channel is full the next look finds it.
            let _ = inner.words.try_send(Word::Look(tenant));
        }
    }
}
