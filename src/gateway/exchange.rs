//! Exchange of reports between gateways before the same engines, through the store of shared limits.
//!
//! Off the data path: one task sends and receives several times a second. The scheduler ([`queue::QueueReport`]) and
//! the fleet ([`EngineShare`]) decide what follows from a report; this module has its format in the store.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::state::Gateway;
use crate::admit::RateLimiter;
use crate::admit::queue::{QueueReport, WaitingWork};
use crate::admit::redis::exchange::{HeardRecord, LONGEST_RECORD};
use crate::inspect::BlockKey;
use crate::route::{ComputedPrompt, DecodeSteps, EngineShare, LoadSnapshot, SeenAnswer};
use crate::types::{EngineId, PoolId, PrefillPace, Tick, Tokens};

/// Interval of exchanges.
const EVERY: Duration = Duration::from_millis(50);
/// Validity of a record from its creation.
const COUNTS: Duration = Duration::from_millis(150);

/// The report of one gateway.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct GatewayRecord {
    /// Increases with each record, because a record may be read from the store twice.
    number: u64,
    /// Fingerprint of the key of prompt hashes, if gateways share one.
    hashes: Option<u64>,
    pools: Vec<PoolRecord>,
}

/// The part of one pool.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct PoolRecord {
    pool: String,
    prefill: u64,
    dispatched: f64,
    admitted: u64,
    /// Rate, spare rate, burst, debt, most and least ahead, level; a rate without a limit is `None`.
    pace: Option<[Option<f64>; 7]>,
    /// Band, late, with a deadline, key, prompt.
    waiting: Vec<(u8, bool, bool, i64, u64)>,
    #[serde(default)]
    depth: u64,
    engines: Vec<EngineRecord>,
}

/// The part of one engine.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct EngineRecord {
    engine: String,
    requests: u32,
    decoding: u32,
    prefill: f64,
    prompts: f64,
    /// Hashes of blocks, and tokens beyond them.
    computed: Vec<(Vec<u64>, u64)>,
    answers: Vec<AnswerRecord>,
}

/// A response as a latency sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct AnswerRecord {
    /// Prompt, prompt tokens ahead, expected output of others, requests.
    met: (u64, u64, u64, u32),
    /// Time to the first token, microseconds.
    ttft: Option<u64>,
    /// Tokens after the first, mean batch, prompt tokens computed meanwhile, microseconds of each.
    further: Option<(u64, f64, f64, u64)>,
}

impl AnswerRecord {
    fn of(answer: &SeenAnswer) -> AnswerRecord {
        let LoadSnapshot { prompt, prefill, decode, batch } = answer.snapshot;
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        AnswerRecord {
            met: (prompt.0, prefill.0, decode.0, batch),
            ttft: answer.ttft.map(micros),
            further: answer.further.map(|(steps, each)| (steps.further, steps.batch, steps.prompt, micros(each))),
        }
    }

    /// The sample, without impossible numbers.
    fn answer(self) -> SeenAnswer {
        let (prompt, prefill, decode, batch) = self.met;
        let (prompt, prefill, decode) = (Tokens(prompt), Tokens(prefill), Tokens(decode));
        let is_sound =
            |batch: f64, prompt: f64| batch.is_finite() && prompt.is_finite() && batch >= 0.0 && prompt >= 0.0;
        let further = self.further.filter(|(_, batch, prompt, _)| is_sound(*batch, *prompt));
        SeenAnswer {
            snapshot: LoadSnapshot { prompt, prefill, decode, batch },
            ttft: self.ttft.map(Duration::from_micros),
            further: further.map(|(further, batch, prompt, each)| {
                (DecodeSteps { further, batch, prompt }, Duration::from_micros(each))
            }),
        }
    }
}

impl GatewayRecord {
    /// Its text. Prompts and responses are omitted if they make it too long, because loads and queues matter more.
    fn text(mut self) -> String {
        let text = serde_json::to_string(&self).unwrap_or_default();
        if text.len() <= LONGEST_RECORD {
            return text;
        }
        for engine in self.pools.iter_mut().flat_map(|pool| &mut pool.engines) {
            (engine.computed, engine.answers) = (Vec::new(), Vec::new());
        }
        serde_json::to_string(&self).unwrap_or_default()
    }
}

impl PoolRecord {
    fn of(pool: &PoolId, queue: &QueueReport, engines: Vec<EngineShare>, with_prompts: bool) -> PoolRecord {
        let finite = |value: f64| value.is_finite().then_some(value);
        let engine = |share: EngineShare| EngineRecord {
            engine: share.engine.to_string(),
            requests: share.requests,
            decoding: share.decoding,
            prefill: share.prefill,
            prompts: share.prompts,
            answers: share.answers.iter().map(AnswerRecord::of).collect(),
            computed: match with_prompts {
                true => share.computed.into_iter().map(|prompt| (prompt.blocks.into_vec(), prompt.rest.0)).collect(),
                false => Vec::new(),
            },
        };
        PoolRecord {
            pool: pool.to_string(),
            prefill: queue.prefill,
            dispatched: queue.dispatched,
            admitted: queue.admitted,
            pace: queue.pace.map(|(pace, level)| {
                [pace.per_second, pace.spare, pace.burst, pace.behind, pace.most, pace.least, level].map(finite)
            }),
            waiting: queue
                .waiting
                .iter()
                .map(|work| (work.band, work.is_late, work.has_deadline, work.due, work.prompt))
                .collect(),
            depth: queue.depth,
            engines: engines.into_iter().map(engine).collect(),
        }
    }

    fn queue(&self) -> QueueReport {
        let pace = self.pace.map(|[per_second, spare, burst, behind, most, least, level]| {
            let size = |value: Option<f64>| value.unwrap_or(f64::NAN);
            let rate = |value: Option<f64>| value.unwrap_or(f64::INFINITY);
            let pace = PrefillPace {
                per_second: rate(per_second),
                spare: rate(spare),
                burst: size(burst),
                behind: size(behind),
                most: size(most),
                least: size(least),
            };
            (pace, size(level))
        });
        let waiting = |&(band, is_late, has_deadline, due, prompt): &(u8, bool, bool, i64, u64)| WaitingWork {
            band,
            is_late,
            has_deadline,
            due,
            prompt,
        };
        QueueReport {
            prefill: self.prefill,
            dispatched: self.dispatched,
            admitted: self.admitted,
            pace,
            waiting: self.waiting.iter().map(waiting).collect(),
            depth: self.depth,
        }
    }

    /// Its requests at the engines; prompts only if their hashes have the common key.
    fn shares(self, with_prompts: bool) -> Vec<EngineShare> {
        let share = |engine: EngineRecord| EngineShare {
            engine: EngineId::from(engine.engine),
            requests: engine.requests,
            decoding: engine.decoding,
            prefill: engine.prefill,
            prompts: engine.prompts,
            answers: engine.answers.into_iter().map(AnswerRecord::answer).collect(),
            computed: engine
                .computed
                .into_iter()
                .filter(|_| with_prompts)
                .map(|(blocks, rest)| ComputedPrompt { blocks: blocks.into(), rest: Tokens(rest) })
                .collect(),
        };
        self.engines.into_iter().map(share).collect()
    }
}

/// The state of the exchange.
#[derive(Debug, Default)]
struct Exchanged {
    number: u64,
    /// Fingerprint of the key of prompt hashes, once it is the common one.
    hashes: Option<u64>,
    /// The store's common number, as last applied.
    common: Option<u64>,
    /// Number of the last record of each gateway.
    heard: HashMap<u64, u64>,
}

impl Gateway {
    /// Reports this gateway's requests at engines and in queues to the others, and applies their reports. Does
    /// nothing without a store, or if the settings disable it. Never ends.
    pub async fn run_exchange(self) {
        let exchange = if let RateLimiter::Shared(store) = &self.limiter { store.exchange() } else { None };
        let Some(mut exchange) = exchange else { return std::future::pending().await };
        let mut state = Exchanged::default();
        loop {
            let next = self.clock.now() + EVERY;
            if let Some(heard) = exchange.exchange(|| self.record_for_others(&mut state).text()).await {
                self.share_hashes(&mut state, heard.common);
                let at = self.clock.now();
                state.heard.retain(|gateway, _| heard.records.iter().any(|record| record.gateway == *gateway));
                heard.records.into_iter().for_each(|record| self.hear(&mut state, record, at));
            }
            self.clock.sleep_until(Some(next.max(self.clock.now()))).await;
        }
    }

    /// The record of this moment.
    fn record_for_others(&self, state: &mut Exchanged) -> GatewayRecord {
        state.number += 1;
        let at = self.clock.now();
        let pools = self.live.load().settings.pools.clone();
        let pool = |pool: &PoolId| {
            let queue = self.pool_queues.pool_queue(pool).map(|queue| queue.report()).unwrap_or_default();
            PoolRecord::of(pool, &queue, self.fleet.shares(pool, at), state.hashes.is_some())
        };
        GatewayRecord {
            number: state.number,
            hashes: state.hashes,
            pools: pools.iter().map(|settings| pool(&settings.id)).collect(),
        }
    }

    /// Hashes prompts with the common key from now on, so that gateways can report cached prompts to each other. A
    /// journal's key takes precedence.
    fn share_hashes(&self, state: &mut Exchanged, common: u64) {
        let live = self.live.load();
        let journal = live.settings.journal.as_ref().and_then(|journal| journal.hash_key.as_ref());
        let seed = journal.map_or(common, crate::record::journal::HashKey::block_seed);
        if journal.is_none() && state.common != Some(common) {
            self.block_key.store(std::sync::Arc::new(BlockKey::of(common)));
        }
        state.common = Some(common);
        let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(&seed.to_le_bytes()).as_bytes();
        state.hashes = Some(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
    }

    /// Applies the report of another gateway.
    fn hear(&self, state: &mut Exchanged, heard: HeardRecord, at: Tick) {
        let Ok(record) = serde_json::from_str::<GatewayRecord>(&heard.record) else { return };
        let last = state.heard.insert(heard.gateway, record.number);
        let age = u64::try_from(heard.age.as_nanos()).unwrap_or(u64::MAX);
        let made = Tick::from_nanos(at.as_nanos().saturating_sub(age));
        let until = made + COUNTS;
        if last == Some(record.number) || until <= at {
            return;
        }
        let with_prompts = record.hashes.is_some() && record.hashes == state.hashes;
        for told in record.pools {
            let pool = PoolId::from(told.pool.as_str());
            let own: HashSet<EngineId> = self.fleet.engines(&pool).into_iter().map(|(engine, _)| engine).collect();
            let common = told.engines.iter().filter(|told| own.contains(&EngineId::from(told.engine.as_str()))).count();
            // Another gateway's pool may have the same name and other engines.
            if common == 0 || 2 * common < own.len() {
                continue;
            }
            let queue = told.queue();
            self.fleet.heard(&pool, heard.gateway, &told.shares(with_prompts), until, at);
            if let Some(pool_queue) = self.pool_queues.pool_queue(&pool) {
                pool_queue.heard(heard.gateway, &queue, made, until);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine with an answer, and a prompt of so many blocks.
    fn share(engine: &str, blocks: usize) -> EngineShare {
        EngineShare {
            engine: EngineId::from(engine),
            requests: 5,
            decoding: 4,
            prefill: 100.0,
            prompts: 200.0,
            answers: vec![SeenAnswer {
                snapshot: LoadSnapshot { prompt: Tokens(1), prefill: Tokens(2), decode: Tokens(3), batch: 4 },
                ttft: Some(Duration::from_micros(1500)),
                further: Some((DecodeSteps { further: 9, batch: 2.5, prompt: 7.0 }, Duration::from_micros(40))),
            }],
            computed: vec![ComputedPrompt { blocks: vec![u64::MAX; blocks].into(), rest: Tokens(9) }],
        }
    }

    #[test]
    fn a_record_that_is_too_long_tells_loads_without_prompts_and_answers() {
        let shares: Vec<EngineShare> = (0..100).map(|engine| share(&format!("vllm-{engine}:8000"), 1000)).collect();
        let pool = PoolRecord::of(&PoolId::from("main"), &QueueReport::default(), shares.clone(), true);
        let text = GatewayRecord { number: 1, hashes: Some(2), pools: vec![pool] }.text();
        assert!(text.len() <= LONGEST_RECORD);
        let mut read: GatewayRecord = serde_json::from_str(&text).expect("it is ours");
        let told = read.pools.remove(0).shares(true);
        let bare = |share: EngineShare| EngineShare { computed: Vec::new(), answers: Vec::new(), ..share };
        assert_eq!(told, shares.into_iter().map(bare).collect::<Vec<_>>());
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let pace =
            PrefillPace { per_second: f64::INFINITY, spare: 0.5, burst: 1.0, behind: 2.0, most: 3.0, least: 4.0 };
        let work = WaitingWork { band: 3, is_late: true, has_deadline: false, due: -5, prompt: 700 };
        let queue = QueueReport {
            prefill: 10,
            dispatched: 20.5,
            admitted: 30,
            pace: Some((pace, -7.0)),
            waiting: vec![work],
            depth: 40,
        };
        let share = share("vllm-0:8000", 2);
        let pool = PoolRecord::of(&PoolId::from("main"), &queue, vec![share.clone()], true);
        let record = GatewayRecord { number: 1, hashes: Some(u64::MAX), pools: vec![pool] };
        let mut read: GatewayRecord = serde_json::from_str(&record.text()).expect("it is ours");
        assert_eq!((read.number, read.hashes), (1, Some(u64::MAX)));
        let pool = read.pools.remove(0);
        assert_eq!(pool.queue(), queue);
        assert_eq!(pool.shares(true), [share]);
    }
}
