//! The tenants' limits: token budgets, requests, requests at the same time.
//!
//! Pure: moments are arguments, and nothing waits. A request reserves before it is dispatched,
//! of all limits together or of none, and settles with its real usage when it ends
//! (`docs/semantics.md` section 8).
//!
//! How it counts:
//! - Every limit by rate is a bucket that holds its burst and fills evenly. A reservation counts
//!   as spent from its first moment, so that a refusal can name a moment that does not depend
//!   on when others end: [`Exhausted::ForNow`]'s `retry_after`.
//! - Usage beyond the reservation is debt: it is paid back by waiting, and reported as 0 left.
//!   A running request is never cut for it.
//! - A limit by rate on requests counts what was settled, with tokens or without; what ends by a
//!   drop gives that back too.
//! - What is given back raises the balance to full at most. It may come long after it was
//!   taken, when its place has already filled again; then it can pay for something else. So a
//!   burst can be larger by what running requests hold and do not use, but all that was ever
//!   charged stays within one burst and the flow since the start (and debt on top of it).
//!   Counting every return back into its own minute would need the history of the bucket.
//! - A request served beyond its limits (`when_over_limit: demote`) holds no reservation: it
//!   takes only what is left over, and pays nothing.
//!
//! Each operation costs the same whatever the number of tenants, models and running requests;
//! a tenant's requests share one lock, held for a few lines, and one more per limited model.

pub(super) mod book;
mod exhausted;
pub(super) mod meter;
#[cfg(test)]
mod orders;
mod reservation;
pub mod settings;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ahash::RandomState;
use dashmap::DashMap;

pub use exhausted::{Exhausted, Limit, Scope, Standing};
pub use reservation::Reservation;

use crate::locks::Mutex;
use crate::units::{TenantId, Tick, Tokens};
use book::Book;
use reservation::Slip;
use settings::Limits;

/// What a request asks for before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The prompt, as estimated.
    pub input: Tokens,
    /// The answer, over all its choices and prompts.
    pub output: Output,
}

impl Wanted {
    /// A request that costs no tokens.
    pub const A_REQUEST: Wanted = Wanted { input: Tokens::ZERO, output: Output::Assumed(Tokens::ZERO) };
}

/// How long the answer may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The request says so. More than a bucket holds can never run.
    Stated(Tokens),
    /// We assume so. With the prompt it is clipped to what a bucket holds.
    Assumed(Tokens),
}

impl Output {
    /// The number alone.
    #[must_use]
    pub const fn tokens(self) -> Tokens {
        match self {
            Output::Stated(tokens) | Output::Assumed(tokens) => tokens,
        }
    }
}

/// What a request really used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Prompt tokens.
    pub input: Tokens,
    /// Output tokens, of all choices.
    pub output: Tokens,
}

/// The books of all tenants. Lives over reloads.
#[derive(Debug, Default)]
pub struct Ledger {
    accounts: DashMap<TenantId, Account, RandomState>,
}

/// A tenant's books. Where two are locked, the tenant's own comes first.
#[derive(Debug)]
struct Account {
    whole: Arc<Mutex<Book>>,
    models: HashMap<Arc<str>, Arc<Mutex<Book>>, RandomState>,
}

impl Ledger {
    /// No tenants: nobody is limited.
    #[must_use]
    pub fn new() -> Self {
        Ledger::default()
    }

    /// The limits as they are from now on. What was spent is carried over, under the new limit
    /// at once; tenants and models that are not named are gone with all they spent. Name every
    /// tenant, also one without limits, so that a limit that it gets later knows who runs.
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, at: Tick) {
        self.accounts.retain(|tenant, _| tenants.contains_key(tenant));
        for (tenant, limits) in tenants {
            match self.accounts.get_mut(tenant) {
                Some(mut account) => account.change(limits, at),
                None => drop(self.accounts.insert(tenant.clone(), Account::new(limits, at))),
            }
        }
    }

    /// Sets aside what the request wants, of every limit that applies to it, or nothing at all.
    /// A tenant that the settings do not name is not limited.
    pub fn reserve(&self, tenant: &TenantId, model: &str, wanted: &Wanted, at: Tick) -> Result<Reservation, Exhausted> {
        let Some([whole, model]) = self.books(tenant, model) else {
            return Ok(Reservation::new([None, None], wanted.input));
        };
        let slips = {
            let mut locked = [whole.as_ref().map(|book| book.lock()), model.as_ref().map(|book| book.lock())];
            weigh(locked.iter().flatten().map(|book| &**book), wanted, at)?;
            locked.each_mut().map(|book| book.as_mut().map(|book| book.take(wanted, at)))
        };
        let [of_whole, of_model] = slips;
        let slip = |(book, held)| Slip { book, held };
        Ok(Reservation::new([whole.zip(of_whole).map(slip), model.zip(of_model).map(slip)], wanted.input))
    }

    /// Notes a request that was let in by somebody else: it takes what is left, owes nothing
    /// beyond, and counts among the running.
    pub fn note(&self, tenant: &TenantId, model: &str, wanted: &Wanted, at: Tick) -> Reservation {
        let books = self.books(tenant, model).unwrap_or_default();
        let slip = |book: Arc<Mutex<Book>>| {
            let held = book.lock().take_what_is_left(wanted, at);
            Slip { book, held }
        };
        Reservation::of_guest(books.map(|book| book.map(slip)), wanted.input)
    }

    /// Where the limits that apply to a tenant's requests for this model stand.
    #[must_use]
    pub fn standings(&self, tenant: &TenantId, model: &str, at: Tick) -> Vec<Standing> {
        let books = self.books(tenant, model).into_iter().flatten().flatten();
        books.flat_map(|book| book.lock().standings(at).collect::<Vec<_>>()).collect()
    }

    /// Requests of a tenant that hold a reservation.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        self.accounts.get(tenant).map_or(0, |account| account.whole.lock().running())
    }

    /// The tenant's book, and the one for the model if there is one.
    fn books(&self, tenant: &TenantId, model: &str) -> Option<[Option<Arc<Mutex<Book>>>; 2]> {
        let account = self.accounts.get(tenant)?;
        Some([Some(Arc::clone(&account.whole)), account.models.get(model).map(Arc::clone)])
    }
}

impl Account {
    fn new(limits: &Limits, at: Tick) -> Self {
        let whole = Arc::new(Mutex::new(Book::new(Scope::Tenant, &limits.whole, at)));
        let mut account = Account { whole, models: HashMap::default() };
        account.change(limits, at);
        account
    }

    fn change(&mut self, limits: &Limits, at: Tick) {
        self.whole.lock().change(&limits.whole, at);
        self.models.retain(|model, _| limits.models.contains_key(model));
        for (model, allowance) in &limits.models {
            match self.models.get(model) {
                Some(book) => book.lock().change(allowance, at),
                None => {
                    let book = Book::new(Scope::Model, allowance, at);
                    self.models.insert(Arc::clone(model), Arc::new(Mutex::new(book)));
                }
            }
        }
    }
}

/// Does the request fit into all books? What can never be comes before what must wait, and the
/// longest wait is the true one.
fn weigh<'a>(books: impl Iterator<Item = &'a Book> + Clone, wanted: &Wanted, at: Tick) -> Result<(), Exhausted> {
    books.clone().try_for_each(|book| book.can_ever_hold(wanted))?;
    books.clone().try_for_each(Book::has_a_place)?;
    Exhausted::for_the_longest(books.filter_map(|book| book.longest_wait(wanted, at))).map_or(Ok(()), Err)
}
