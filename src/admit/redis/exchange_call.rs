//! One call of the exchange between gateways, and its result.

use std::sync::Arc;
use std::time::Duration;

/// Longest record that is sent or taken.
pub const LONGEST_RECORD: usize = 256 * 1024;

/// The script of a call.
pub(super) const EXCHANGE_SCRIPT: &str = include_str!("exchange.lua");

/// One call.
#[derive(Clone, Debug)]
pub(super) struct ExchangeCall {
    /// The hash.
    pub key: Arc<str>,
    /// This gateway.
    pub gateway: Arc<str>,
    /// What it tells.
    pub record: String,
    /// Microseconds after which records are removed.
    pub life: u64,
    /// The common random number, if there is none yet.
    pub random: u64,
}

/// Its result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// A random number that all gateways of the store share.
    pub common: u64,
    /// What the others told.
    pub records: Vec<HeardRecord>,
}

/// What another gateway told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeardRecord {
    /// Its number.
    pub gateway: u64,
    /// How long ago, by the store's clock.
    pub age: Duration,
    /// What.
    pub record: String,
}
