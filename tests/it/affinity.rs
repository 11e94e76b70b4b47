//! Effect of affinity on simulated engines with a prefix cache, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use goodput::route::retry::Attempts;
use goodput::route::settings::{Balance, EngineAddress, EngineSource, PoolSettings, Scheme};
use goodput::route::{Fleet, PickRequest, WorkEstimate, WorkGuard, key_of};
use goodput::sim::engine::EngineSpec;
use goodput::sim::engine::core::{EngineCore, Job, JobId};
use goodput::types::{PoolId, Tick, Tokens};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp};

/// Tokens per block of the engines' caches.
const BLOCK: u64 = 16;

/// Results of a run.
struct Seen {
    /// Share of prompt tokens that were in the cache.
    hits: f64,
    /// Mean time to the first token.
    ttft: Duration,
    /// The most requests that one engine had, by the mean then.
    peak: f64,
}

struct Running {
    engine: usize,
    job: JobId,
    work: Box<WorkGuard>,
    dispatched: Tick,
    has_token: bool,
}

/// Size of a cache for about twenty prompts of 2,000 tokens, running ones included.
const SMALL: u64 = 40_000;

/// Runs 60 s of requests at `rate` per second over four engines; `next` makes their jobs and keys.
fn run(balance: Balance, kv_tokens: u64, rate: f64, mut next: impl FnMut(&mut StdRng) -> (Job, u64)) -> Seen {
    let names = ["a", "b", "c", "d"];
    let address = |name: &&str| EngineAddress {
        scheme: Scheme::Http,
        host: (*name).into(),
        port: 1,
        base: "".into(),
        name: None,
    };
    let engines = EngineSource::Static(names.iter().map(address).collect());
    let pool = PoolSettings { balance, ..PoolSettings::with_defaults(PoolId::from("p"), engines) };
    let fleet = Fleet::new(1);
    fleet.apply_settings(&[Arc::new(pool.clone())], Tick::ZERO);
    let shape = EngineSpec { kv_tokens, ..EngineSpec::default() };
    let mut engines: Vec<_> = (0..4).map(|seed| EngineCore::new(shape.clone(), seed)).collect();
    let (mut chance, gap) = (StdRng::seed_from_u64(1), Exp::new(rate).unwrap());
    let (mut running, mut firsts, mut gains): (Vec<Running>, Vec<Duration>, _) = (Vec::new(), Vec::new(), Vec::new());
    let (mut arrival, mut peak) = (Tick::ZERO, 0.0f64);
    while arrival < Tick::from_millis(60_000) {
        let at = engines.iter().filter_map(EngineCore::next_moment).chain([arrival]).min().unwrap();
        for (number, engine) in engines.iter_mut().enumerate() {
            engine.advance(at, &mut gains);
            for gain in gains.drain(..) {
                let place = running.iter().position(|r| (r.engine, r.job) == (number, gain.job)).unwrap();
                if !std::mem::replace(&mut running[place].has_token, true) {
                    firsts.push(gain.at - running[place].dispatched);
                    running[place].work.first_token(gain.at);
                }
                if gain.done.is_some() {
                    drop(running.swap_remove(place).work);
                }
            }
        }
        if at < arrival {
            continue;
        }
        let (job, key) = next(&mut chance);
        let size = WorkEstimate { prefill: Tokens(job.prompt), decode: Tokens(job.output) };
        let mut attempts = Attempts::new(&pool, Tick::from_millis(1 << 40));
        let choice = fleet.choose(&pool.id, &mut attempts, PickRequest { key, ..size.into() }, at).unwrap();
        let engine = names.iter().position(|name| choice.engine.as_str().starts_with(name)).unwrap();
        let job = engines[engine].submit(job, at).unwrap();
        running.push(Running { engine, job, work: choice.work, dispatched: at, has_token: false });
        let count = |engine| running.iter().filter(|running| running.engine == engine).count();
        if running.len() >= 16 {
            peak = peak.max((0..4).map(count).max().unwrap() as f64 / (running.len() as f64 / 4.0));
        }
        arrival = arrival + Duration::from_secs_f64(gap.sample(&mut chance));
    }
    let gauges = engines.iter().map(EngineCore::gauges);
    let (hits, asked) = gauges.fold((0, 0), |(hits, asked), g| (hits + g.prefix_hits, asked + g.prefix_queries));
    let ttft = firsts.iter().sum::<Duration>() / firsts.len() as u32;
    Seen { hits: hits as f64 / asked as f64, ttft, peak }
}

/// Blocks of a prompt: `shared` tokens that belong to `owner`, and the rest its own.
fn prompt(owner: u64, shared: u64, own: u64, chance: &mut StdRng) -> Job {
    let block = |n: u64| owner << 32 | n;
    let mut blocks: Vec<u64> = (0..shared / BLOCK).map(block).collect();
    blocks.extend((0..own / BLOCK).map(|_| chance.random::<u64>()));
    Job { prompt: shared + own, output: chance.random_range(20..150), blocks, ..Job::default() }
}

#[test]
fn like_prompts_meet_the_cache_that_knows_them() {
    // Forty system prompts of 2,000 tokens: too many for one engine, room for all in four.
    let next = |chance: &mut StdRng| {
        let system = chance.random_range(0..40);
        (prompt(system, 2_000, 160, chance), key_of(&system.to_le_bytes()))
    };
    let apart = run(Balance::LeastWork, SMALL, 16.0, |chance| (next(chance).0, 0));
    let together = run(Balance::PrefixAffinity, SMALL, 16.0, next);
    assert!(together.hits > 0.75 && apart.hits < 0.5, "{} {}", together.hits, apart.hits);
    assert!(together.ttft < apart.ttft / 2, "{:?} {:?}", together.ttft, apart.ttft);
}

#[test]
fn the_turns_of_a_session_meet_the_cache_that_knows_them() {
    // Thirty conversations that grow by 300 tokens a turn, and begin anew at 3,000.
    let mut lengths = vec![0u64; 30];
    let mut next = |chance: &mut StdRng| {
        let session = chance.random_range(0..30usize);
        lengths[session] = if lengths[session] >= 3_000 { 300 } else { lengths[session] + 300 };
        (prompt(session as u64, lengths[session], 0, chance), key_of(&session.to_le_bytes()))
    };
    let header = http::HeaderName::from_static("x-session-id");
    let together = run(Balance::SessionAffinity { header }, SMALL, 16.0, &mut next);
    let apart = run(Balance::LeastWork, SMALL, 16.0, |chance| (next(chance).0, 0));
    assert!(together.hits > apart.hits + 0.2, "{} {}", together.hits, apart.hits);
    assert!(together.ttft < apart.ttft, "{:?} {:?}", together.ttft, apart.ttft);
}

#[test]
fn a_prompt_common_to_all_tenants_does_not_overload_its_engine() {
    let next = |chance: &mut StdRng| (prompt(1, 1_600, 160, chance), 7);
    let seen = run(Balance::PrefixAffinity, SMALL, 60.0, next);
    assert!(seen.peak <= 1.6, "{}", seen.peak);
    assert!(seen.hits > 0.8, "{}", seen.hits);
}
