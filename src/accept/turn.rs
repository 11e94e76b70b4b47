//! experiment

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static PUMP: Cell<bool> = const { Cell::new(false) };
    static WAITING: RefCell<VecDeque<Waker>> = const { RefCell::new(VecDeque::new()) };
    static K: usize = std::env::var("TURN_K").ok().and_then(|s| s.parse().ok()).unwrap_or(usize::MAX);
}

/// may read
pub(super) fn poll_enter(cx: &mut Context<'_>) -> Poll<()> {
    let k = K.with(|k| *k);
    if TAKEN.get() < k {
        TAKEN.set(TAKEN.get() + 1);
        return Poll::Ready(());
    }
    WAITING.with_borrow_mut(|waiting| waiting.push_back(cx.waker().clone()));
    if !PUMP.replace(true) {
        tokio::spawn(async move {
            loop {
                tokio::task::yield_now().await;
                TAKEN.set(0);
                let none = WAITING.with_borrow_mut(|waiting| {
                    let n = waiting.len().min(k);
                    waiting.drain(..n).for_each(Waker::wake);
                    waiting.is_empty()
                });
                if none {
                    PUMP.set(false);
                    return;
                }
            }
        });
    }
    Poll::Pending
}
