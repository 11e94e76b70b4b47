//! Exchange of reports between gateways through the store: one call, several times a second, off the data path.
//!
//! The content of a report is the caller's. A failing store is not called for a while, as with the limits; reports
//! received before expire.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::breaker::StoreBreaker;
use super::connection::{CallError, RedisConnection};
use super::exchange_call::ExchangeCall;
pub use super::exchange_call::{Heard, HeardRecord, LONGEST_RECORD};
use super::settings::Redis;
use crate::clock::Clock;

/// Version of the key and of the records in it.
const LAYOUT: &str = "1";
/// Records that are older are removed.
const LIFE: Duration = Duration::from_secs(2);

/// Counts of calls.
#[derive(Debug, Default)]
pub struct ExchangeCounters {
    told: AtomicU64,
    failed: AtomicU64,
    gateways: AtomicU64,
}

impl ExchangeCounters {
    /// Successful calls, failed calls, and the number of other gateways in the last result.
    #[must_use]
    pub fn read(&self) -> (u64, u64, u64) {
        let [told, failed, gateways] =
            [&self.told, &self.failed, &self.gateways].map(|count| count.load(Ordering::Relaxed));
        (told, failed, gateways)
    }
}

/// The exchange of this gateway.
#[derive(Debug)]
pub struct GatewayExchange {
    clock: Clock,
    settings: Redis,
    gateway: Arc<str>,
    key: Arc<str>,
    random: u64,
    connection: Option<RedisConnection>,
    breaker: StoreBreaker,
    counters: Arc<ExchangeCounters>,
    /// Last logged failure.
    logged: Option<String>,
}

impl GatewayExchange {
    pub(super) fn new(
        settings: Redis,
        clock: Clock,
        gateway: Arc<str>,
        random: u64,
        counters: Arc<ExchangeCounters>,
    ) -> Self {
        GatewayExchange {
            key: format!("{}:gateways:{LAYOUT}", settings.key_prefix).into(),
            breaker: StoreBreaker::new(clock.now()),
            clock,
            settings,
            gateway,
            random,
            connection: None,
            counters,
            logged: None,
        }
    }

    /// Tells the others, and hears them. `None` while the store is away; no record is made then.
    pub async fn exchange(&mut self, record: impl FnOnce() -> String) -> Option<Heard> {
        let began = self.clock.now();
        if let Some(trial) = self.breaker.trial_at() {
            if trial > began {
                return None;
            }
            self.breaker.trial_begins();
        }
        let record = Some(record()).filter(|record| record.len() <= LONGEST_RECORD).unwrap_or_default();
        let result = self.call(record).await;
        let at = self.clock.now();
        if self.breaker.is_closed() {
            let _opened = self.breaker.call_ended(result.is_ok(), at);
        } else {
            self.breaker.trial_ended(result.is_ok(), at);
        }
        match result {
            Ok(heard) => {
                self.counters.told.fetch_add(1, Ordering::Relaxed);
                self.counters.gateways.store(heard.records.len() as u64, Ordering::Relaxed);
                self.logged = None;
                Some(heard)
            }
            Err(failure) => {
                self.failed(&failure);
                None
            }
        }
    }

    async fn call(&mut self, record: String) -> Result<Heard, CallError> {
        let connection = match &self.connection {
            Some(connection) => connection.clone(),
            None => self.connection.insert(RedisConnection::open(&self.settings).await?).clone(),
        };
        let call = ExchangeCall {
            key: Arc::clone(&self.key),
            gateway: Arc::clone(&self.gateway),
            record,
            life: LIFE.as_micros() as u64,
            random: self.random,
        };
        let until = self.clock.now() + self.settings.timeout;
        tokio::select! {
            biased;
            result = connection.exchange(&call) => result,
            () = self.clock.sleep_until(Some(until)) => Err(CallError::Timeout),
        }
    }

    fn failed(&mut self, failure: &CallError) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.counters.gateways.store(0, Ordering::Relaxed);
        // The connection is still usable after a rejected command.
        if !matches!(failure, CallError::Error(_) | CallError::Nonsense(_)) {
            self.connection = None;
        }
        let why = failure.to_string();
        if self.logged.as_ref() != Some(&why) {
            tracing::warn!(store = %self.settings.address, why, "gateways do not hear of each other");
            self.logged = Some(why);
        }
    }
}
