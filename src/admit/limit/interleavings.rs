//! The limiter under many interleavings ([`crate::sync`]).

use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;

use super::settings::{Allowance, Rate};
use super::*;
use crate::sync::shuttle_locks::{all_end, others, task, tried};

/// Two limits of a tenant, and two of one of its models.
fn limiter() -> Rc<LocalLimiter> {
    let allowance = |most| Allowance {
        tokens: Rate::new(1, Some(1000)).ok(),
        concurrent_requests: NonZeroU64::new(most),
        ..Allowance::default()
    };
    let limits = Limits { whole: allowance(2), models: BTreeMap::from([("m".into(), allowance(1))]) };
    let limiter = LocalLimiter::new();
    limiter.reload(&BTreeMap::from([(TenantId::from("acme"), limits)]), Tick::ZERO);
    Rc::new(limiter)
}

#[test]
fn whoever_ends_while_others_reserve_the_books_are_right() {
    tried(|_| {
        let (limiter, acme) = (limiter(), TenantId::from("acme"));
        let (running, spent) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(0_u64)));
        let externally_admitted = |model: &'static str, used: Option<u64>| {
            let (limiter, acme, running, spent) = (limiter.clone(), acme.clone(), running.clone(), spent.clone());
            async move {
                let wanted = Wanted { input: Tokens(10), output: Output::Assumed(Tokens(40)) };
                let Ok(reservation) = limiter.reserve(&acme, model, &wanted, Tick::ZERO) else { return };
                running.set(running.get() + 1);
                assert!(running.get() <= 2, "more at one time than there may be");
                others().await;
                running.set(running.get() - 1);
                match used {
                    Some(output) => {
                        spent.set(spent.get() + 10 + output);
                        reservation.settle(Used { input: Tokens(10), output: Tokens(output) }, Tick::ZERO);
                    }
                    None => drop(reservation),
                }
            }
        };
        let guests = [("m", Some(5)), ("m", None), ("n", Some(100)), ("n", None), ("m", Some(60))];
        all_end(guests.map(|(model, used)| task(externally_admitted(model, used))));
        assert_eq!(limiter.running(&acme), 0);
        let left = limiter.statuses(&acme, "n", Tick::ZERO);
        let left = left
            .iter()
            .find(|limit_status| limit_status.limit == LimitKind::Tokens)
            .map(|limit_status| limit_status.remaining);
        assert_eq!(left, Some(1000 - spent.get()), "what was used is spent, and nothing else");
    });
}
