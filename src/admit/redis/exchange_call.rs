//! One call of the exchange between gateways, and its result.

use std::sync::Arc;
use std::time::Duration;

/// Longest record that is sent or accepted.
pub const LONGEST_RECORD: usize = 256 * 1024;

/// The script of a call.
pub(super) const EXCHANGE_SCRIPT: &str = include_str!("exchange.lua");

/// One call.
#[derive(Clone, Debug)]
pub(super) struct ExchangeCall {
    /// Key of the hash in the store.
    pub key: Arc<str>,
    /// Name of this gateway.
    pub gateway: Arc<str>,
    /// Its report.
    pub record: String,
    /// Microseconds after which records are removed.
    pub life: u64,
    /// The common random number, unless the store has one.
    pub random: u64,
}

/// Its result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// A random number that all gateways of the store share.
    pub common: u64,
    /// Reports of the other gateways.
    pub records: Vec<HeardRecord>,
}

/// Report of another gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeardRecord {
    /// Its number.
    pub gateway: u64,
    /// Its age by the store's clock.
    pub age: Duration,
    /// Its content.
    pub record: String,
}
