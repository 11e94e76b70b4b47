//! The tenants' limits: token rates, request rates, concurrent requests.
//!
//! Pure: moments are arguments, and nothing waits. A request reserves before it is dispatched, of all
//! limits together or of none, and settles with its actual usage when it ends
//! (`docs/semantics.md` section 8).
//!
//! Rules:
//! - Each rate limit is a token bucket with a burst and a constant refill. A reservation counts as spent
//!   at once, so that the retry time of a rejection ([`Exhausted::ForNow`]) does not depend on when other
//!   requests end.
//! - Usage beyond the reservation is debt, paid back by waiting and reported as 0 remaining. A running
//!   request is never cut for it.
//! - A request rate counts every settled request, with or without tokens; a request that ends by a drop is
//!   refunded.
//! - Refunds raise a balance at most to full. A refund may come when the bucket has refilled already, and
//!   can then pay for something else, so a burst can be larger by the unused part of running reservations.
//!   All charges together stay within one burst plus the refill since start (plus debt). Assigning refunds
//!   to their original minute would need the bucket's history.
//! - A request served beyond its limits (`when_over_limit: demote`) holds no reservation: it takes what is
//!   left, and owes nothing.
//!
//! Each operation is O(1) in the number of tenants, models and running requests; a tenant's requests share
//! one lock, held briefly, plus one per limited model.

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

/// The need of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Estimated prompt tokens.
    pub input: Tokens,
    /// Output tokens over all choices and prompts.
    pub output: Output,
}

impl Wanted {
    /// One request without tokens.
    pub const A_REQUEST: Wanted = Wanted { input: Tokens::ZERO, output: Output::Assumed(Tokens::ZERO) };
}

/// The output to reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stated by the request. More than a bucket holds can never run.
    Stated(Tokens),
    /// Assumed. Clipped, with the prompt, to what a bucket holds.
    Assumed(Tokens),
}

impl Output {
    /// The number of tokens.
    #[must_use]
    pub const fn tokens(self) -> Tokens {
        match self {
            Output::Stated(tokens) | Output::Assumed(tokens) => tokens,
        }
    }
}

/// The actual usage of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Prompt tokens.
    pub input: Tokens,
    /// Output tokens of all choices.
    pub output: Tokens,
}

/// The limits of all tenants. Outlives reloads.
#[derive(Debug, Default)]
pub struct Ledger {
    accounts: DashMap<TenantId, Account, RandomState>,
}

/// The buckets of one tenant. Lock order: the tenant's own first, then its model's.
#[derive(Debug)]
struct Account {
    whole: Arc<Mutex<Book>>,
    models: HashMap<Arc<str>, Arc<Mutex<Book>>, RandomState>,
}

impl Ledger {
    /// Without tenants, nothing is limited.
    #[must_use]
    pub fn new() -> Self {
        Ledger::default()
    }

    /// Sets the limits. Spent amounts are kept and count against the new limit at once; tenants and models that
    /// are no longer named are removed. Name every tenant, also those without limits, so that a later limit
    /// knows the running requests.
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, at: Tick) {
        self.accounts.retain(|tenant, _| tenants.contains_key(tenant));
        for (tenant, limits) in tenants {
            match self.accounts.get_mut(tenant) {
                Some(mut account) => account.change(limits, at),
                None => drop(self.accounts.insert(tenant.clone(), Account::new(limits, at))),
            }
        }
    }

    /// Reserves what the request needs of every applicable limit, or nothing. Unknown tenants are not
    /// limited.
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

    /// Records a request admitted elsewhere: takes what is left without owing more, and counts it as
    /// running.
    pub fn note(&self, tenant: &TenantId, model: &str, wanted: &Wanted, at: Tick) -> Reservation {
        let books = self.books(tenant, model).unwrap_or_default();
        let slip = |book: Arc<Mutex<Book>>| {
            let held = book.lock().take_what_is_left(wanted, at);
            Slip { book, held }
        };
        Reservation::of_guest(books.map(|book| book.map(slip)), wanted.input)
    }

    /// The state of the limits that apply to a tenant's requests for this model.
    #[must_use]
    pub fn standings(&self, tenant: &TenantId, model: &str, at: Tick) -> Vec<Standing> {
        let books = self.books(tenant, model).into_iter().flatten().flatten();
        books.flat_map(|book| book.lock().standings(at).collect::<Vec<_>>()).collect()
    }

    /// Number of a tenant's requests with a reservation.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        self.accounts.get(tenant).map_or(0, |account| account.whole.lock().running())
    }

    /// The tenant's buckets, and those for the model if any.
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

/// Checks the need against all buckets. "Never" takes precedence over "not now", and the longest wait is
/// reported.
fn weigh<'a>(books: impl Iterator<Item = &'a Book> + Clone, wanted: &Wanted, at: Tick) -> Result<(), Exhausted> {
    books.clone().try_for_each(|book| book.can_ever_hold(wanted))?;
    books.clone().try_for_each(Book::has_a_place)?;
    Exhausted::for_the_longest(books.filter_map(|book| book.longest_wait(wanted, at))).map_or(Ok(()), Err)
}
