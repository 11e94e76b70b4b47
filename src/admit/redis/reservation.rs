//! The reservation of a running request with shared limits.

use std::sync::Arc;

use super::tenant_leases::HeldByScope;
use super::{Inner, SharedTenant, SyncCommand};
use crate::admit::limit::{self, Used};
use crate::types::Tick;

/// Like [`limit::LocalReservation`], of shared limits: released by exactly one ending,
/// [`settle`](Self::settle) or the drop. Neither waits: what the store must know is kept here until the
/// task reports it.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub struct RedisReservation {
    open: Option<OpenReservation>,
}

#[derive(Debug)]
struct OpenReservation {
    inner: Arc<Inner>,
    tenant: Arc<SharedTenant>,
    model: Box<str>,
    /// The grant of the store; `None` if it was not called.
    held: Option<HeldByScope>,
    /// The same in this gateway's own limiter.
    share: limit::LocalReservation,
}

impl RedisReservation {
    pub(super) fn new(
        inner: &Arc<Inner>,
        tenant: &Arc<SharedTenant>,
        model: &str,
        held: Option<HeldByScope>,
        share: limit::LocalReservation,
    ) -> Self {
        let (inner, tenant) = (Arc::clone(inner), Arc::clone(tenant));
        RedisReservation { open: Some(OpenReservation { inner, tenant, model: model.into(), held, share }) }
    }

    pub(super) fn unlimited() -> Self {
        RedisReservation { open: None }
    }

    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
    pub fn settle(mut self, used: Used, at: Tick) {
        if let Some(open) = self.open.take() {
            open.end(Some((used, at)));
        }
    }
}

impl Drop for RedisReservation {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open.end(None);
        }
    }
}

impl OpenReservation {
    fn end(self, used: Option<(Used, Tick)>) {
        let OpenReservation { inner, tenant, model, held, share } = self;
        let of_use = used.as_ref().map(|(used, _)| used);
        let is_urgent = tenant.state.lock().tenant_leases.ended(&model, held.as_ref(), of_use, inner.counters.is_up());
        match used {
            Some((used, at)) => share.settle(used, at),
            None => drop(share),
        }
        if is_urgent {
            // If the channel is full the next check finds it.
            let _ = inner.commands.try_send(SyncCommand::Check(tenant));
        }
    }
}
