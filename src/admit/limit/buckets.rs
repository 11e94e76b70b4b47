//! The limits of one scope (a tenant, or its use of one model) and the amounts taken.

use super::settings::Allowance;
use super::token_bucket::TokenBucket;
use super::{LimitExceeded, LimitKind, LimitScope, LimitStatus, Output, Used, Wanted};
use crate::types::Tick;

/// The rate limits, in the order of a [`BucketSet`]'s buckets and of [`HeldAmounts`].
pub(in super::super) const BY_RATE: [LimitKind; 4] =
    [LimitKind::Tokens, LimitKind::InputTokens, LimitKind::OutputTokens, LimitKind::Requests];

/// Amounts held of each rate limit; 0 of absent ones.
pub(in super::super) type HeldAmounts = [u64; BY_RATE.len()];

#[derive(Debug)]
pub(super) struct BucketSet {
    scope: LimitScope,
    buckets: [Option<TokenBucket>; BY_RATE.len()],
    /// Counted even without a limit, so that a limit set by a reload knows the running requests.
    running: u64,
    concurrent: Option<u64>,
}

impl BucketSet {
    pub fn new(scope: LimitScope, allowance: &Allowance, at: Tick) -> Self {
        let mut bucket_set = BucketSet { scope, buckets: Default::default(), running: 0, concurrent: None };
        bucket_set.change(allowance, at);
        bucket_set
    }

    /// Sets the limits; amounts taken are kept.
    pub fn change(&mut self, allowance: &Allowance, at: Tick) {
        for (bucket, limit) in self.buckets.iter_mut().zip(BY_RATE) {
            match (bucket, allowance.rate(limit)) {
                (Some(bucket), rate) => bucket.change(rate, at),
                (empty, rate) => *empty = rate.map(|rate| TokenBucket::new(rate, at)),
            }
        }
        self.concurrent = allowance.concurrent_requests.map(Into::into);
    }

    /// Whether the request can ever fit.
    pub fn can_ever_hold(&self, wanted: &Wanted) -> Result<(), LimitExceeded> {
        for (limit, bucket) in self.with_kinds() {
            let (need, most) = (wanted.of(limit), bucket.enforced().map_or(u64::MAX, |rate| rate.burst()));
            if need > most && wanted.is_stated(limit) {
                return Err(LimitExceeded::NeverFits { limit, scope: self.scope, need, most });
            }
        }
        Ok(())
    }

    /// Whether a concurrent request is left.
    pub fn has_a_place(&self) -> Result<(), LimitExceeded> {
        match self.places() {
            Some(limit_status) if limit_status.remaining == 0 => {
                Err(LimitExceeded::Retryable { limit_status, retry_after: None })
            }
            _ => Ok(()),
        }
    }

    /// The limit with the longest wait, and the wait in whole seconds.
    pub fn longest_wait(&self, wanted: &Wanted, at: Tick) -> Option<(u64, LimitStatus)> {
        let mut longest: Option<(u64, LimitStatus)> = None;
        for (limit, bucket) in self.with_kinds() {
            let wait = bucket.wait(clipped(wanted.of(limit), bucket), at);
            if let Some(wait) = wait.filter(|wait| longest.is_none_or(|(longest, _)| *wait > longest)) {
                longest = self.limit_status(limit, bucket, at).map(|limit_status| (wait, limit_status));
            }
        }
        longest
    }

    /// Takes from every limit without a check, which the caller has made for all buckets.
    pub fn take(&mut self, wanted: &Wanted, at: Tick) -> HeldAmounts {
        self.take_each(wanted, at, |clipped, _| clipped)
    }

    /// Takes from every limit as much as is left, without debt. For a request that was admitted
    /// elsewhere.
    pub fn take_what_is_left(&mut self, wanted: &Wanted, at: Tick) -> HeldAmounts {
        self.take_each(wanted, at, |clipped, bucket| clipped.min(bucket.remaining(at)))
    }

    /// Takes from every limit the amount that `much` derives from the need clipped to the bucket.
    fn take_each(&mut self, wanted: &Wanted, at: Tick, much: impl Fn(u64, &TokenBucket) -> u64) -> HeldAmounts {
        self.running = self.running.saturating_add(1);
        let mut held = HeldAmounts::default();
        for ((held, bucket), limit) in held.iter_mut().zip(&mut self.buckets).zip(BY_RATE) {
            if let Some(bucket) = bucket {
                *held = much(clipped(wanted.of(limit), bucket), bucket);
                bucket.take(*held, at);
            }
        }
        held
    }

    /// Replaces what was held by the actual usage. An excess becomes debt, or for a `guest` takes what is
    /// left.
    pub fn settle(&mut self, held: &HeldAmounts, used: &Used, externally_admitted: bool, at: Tick) {
        self.running = self.running.saturating_sub(1);
        for ((held, bucket), limit) in held.iter().zip(&mut self.buckets).zip(BY_RATE) {
            if let Some(bucket) = bucket {
                let most = if externally_admitted { held.saturating_add(bucket.remaining(at)) } else { u64::MAX };
                bucket.settle(*held, used.of(limit).min(most), at);
            }
        }
    }

    /// Refunds completely.
    pub fn give_back(&mut self, held: &HeldAmounts) {
        self.running = self.running.saturating_sub(1);
        for (held, bucket) in held.iter().zip(&mut self.buckets) {
            if let Some(bucket) = bucket {
                bucket.give_back(*held);
            }
        }
    }

    pub fn running(&self) -> u64 {
        self.running
    }

    /// The state of every enforced limit, in the order of [`LimitKind::ALL`].
    pub fn statuses(&self, at: Tick) -> impl Iterator<Item = LimitStatus> {
        self.with_kinds().filter_map(move |(limit, bucket)| self.limit_status(limit, bucket, at)).chain(self.places())
    }

    fn with_kinds(&self) -> impl Iterator<Item = (LimitKind, &TokenBucket)> {
        BY_RATE.into_iter().zip(&self.buckets).filter_map(|(limit, bucket)| Some((limit, bucket.as_ref()?)))
    }

    fn limit_status(&self, limit: LimitKind, bucket: &TokenBucket, at: Tick) -> Option<LimitStatus> {
        let rate = bucket.enforced()?;
        let (most, per_minute) = (rate.burst(), Some(rate.per_minute()));
        let (remaining, reset) = (bucket.remaining(at), Some(bucket.until_full(at)));
        Some(LimitStatus { limit, scope: self.scope, most, per_minute, remaining, reset })
    }

    fn places(&self) -> Option<LimitStatus> {
        let most = self.concurrent?;
        let (limit, remaining) = (LimitKind::ConcurrentRequests, most.saturating_sub(self.running));
        Some(LimitStatus { limit, scope: self.scope, most, per_minute: None, remaining, reset: None })
    }
}

/// The amount taken: an estimate beyond the bucket takes all of it.
fn clipped(need: u64, bucket: &TokenBucket) -> u64 {
    bucket.enforced().map_or(need, |rate| need.min(rate.burst()))
}

impl Wanted {
    pub(in super::super) fn of(&self, limit: LimitKind) -> u64 {
        let used = Used { input: self.input, output: self.output.tokens() };
        used.of(limit)
    }

    /// Whether the request states its need of this limit. A prompt is an estimate.
    pub(in super::super) fn is_stated(&self, limit: LimitKind) -> bool {
        let counts_output = matches!(limit, LimitKind::Tokens | LimitKind::OutputTokens);
        counts_output && matches!(self.output, Output::Stated(_))
    }
}

impl Used {
    pub(in super::super) fn of(&self, limit: LimitKind) -> u64 {
        match limit {
            LimitKind::Tokens => (self.input + self.output).0,
            LimitKind::InputTokens => self.input.0,
            LimitKind::OutputTokens => self.output.0,
            LimitKind::Requests | LimitKind::ConcurrentRequests => 1,
        }
    }
}
