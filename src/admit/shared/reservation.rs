//! The reservation of a running request with shared limits.

use std::sync::Arc;

use super::account::HeldOfBoth;
use super::{Inner, Tenant, Word};
use crate::admit::limit::{self, Used};
use crate::units::Tick;

/// Like [`limit::Reservation`], of shared limits: released by exactly one ending,
/// [`settle`](Self::settle) or the drop. Neither waits: what the store must know is kept here until the
/// task reports it.
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
    /// What the store granted; `None` if it was not called.
    held: Option<HeldOfBoth>,
    /// The same in this gateway's own limiter.
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

    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
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
            // If the channel is full the next check finds it.
            let _ = inner.words.try_send(Word::Look(tenant));
        }
    }
}
