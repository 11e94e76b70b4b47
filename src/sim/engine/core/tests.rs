//! The scheduler's laws, and its exact arithmetic.

use proptest::prelude::*;

use super::*;

/// 10 ms per step, 1 ms per decoding request, 0.1 ms per token of prefill, no randomness.
fn plain() -> EngineSpec {
    EngineSpec {
        max_running: 4,
        step_tokens: 100,
        kv_tokens: 1600,
        max_model_len: 1000,
        step_base: Duration::from_millis(10),
        per_decode: Duration::from_millis(1),
        per_prefill_token: Duration::from_micros(100),
        per_context_token: Duration::ZERO,
        jitter: 0.0,
        prefix_caching: false,
        ..EngineSpec::default()
    }
}

fn job(prompt: u64, output: u64) -> Job {
    Job { prompt, output, ..Job::default() }
}

/// Runs an engine until it is idle; returns (job, milliseconds, tokens) of every gain.
fn run(engine: &mut EngineCore) -> Vec<(u64, f64, u64)> {
    let mut gains = Vec::new();
    while let Some(at) = engine.next_moment() {
        engine.advance(at, &mut gains);
    }
    gains.iter().map(|gain| (gain.job.0, gain.at.as_nanos() as f64 / 1e6, gain.tokens)).collect()
}

#[test]
fn a_prompt_is_prefilled_in_chunks_and_then_one_token_a_step() {
    let mut engine = EngineCore::new(plain(), 1);
    engine.submit(job(150, 3), Tick::ZERO).unwrap();
    // 100 tokens: 20 ms; 50 tokens: 15 ms; then 11 ms per token.
    assert_eq!(run(&mut engine), [(1, 35.0, 1), (1, 46.0, 1), (1, 57.0, 1)]);
    assert_eq!(engine.gauges().running + engine.gauges().waiting, 0);
    assert_eq!(engine.gauges().kv_usage, 0.0);
}

#[test]
fn a_prefill_slows_those_who_decode_beside_it() {
    let mut engine = EngineCore::new(plain(), 1);
    engine.submit(job(10, 3), Tick::ZERO).unwrap();
    engine.submit(job(300, 1), Tick::from_millis(5)).unwrap();
    let gains = run(&mut engine);
    // 11 ms alone, then a step with one decode and 99 tokens of prefill: 20.9 ms.
    assert_eq!(gains[0], (1, 11.0, 1));
    assert_eq!(gains[1], (1, 31.9, 1));
    // Three more steps, of 99, 99 and the rest.
    assert_eq!(gains[2], (1, 52.8, 1));
    assert_eq!(gains[3].0, 2);
}

#[test]
fn seats_are_given_by_arrival_or_by_priority_with_the_lower_value_first() {
    for (order, expected) in [(AdmissionOrder::Arrival, [1, 2, 3]), (AdmissionOrder::Priority, [1, 3, 2])] {
        let mut engine = EngineCore::new(EngineSpec { max_running: 1, order, ..plain() }, 1);
        for priority in [0, 9, -9] {
            engine.submit(Job { priority, ..job(10, 1) }, Tick::ZERO).unwrap();
        }
        let ended: Vec<u64> = run(&mut engine).iter().map(|gain| gain.0).collect();
        assert_eq!(ended, expected, "{order:?}");
    }
}

#[test]
fn a_full_cache_blocks_admission_and_preempts_the_last_when_it_grows() {
    let shape = EngineSpec { kv_tokens: 64, ..plain() };
    let mut engine = EngineCore::new(shape, 1);
    engine.submit(job(30, 20), Tick::ZERO).unwrap();
    engine.submit(job(30, 4), Tick::ZERO).unwrap();
    engine.submit(job(30, 1), Tick::ZERO).unwrap();
    let gains = run(&mut engine);
    assert_eq!(engine.gauges().preemptions, 1);
    let tokens = |id| gains.iter().filter(|gain| gain.0 == id).map(|gain| gain.2).sum::<u64>();
    assert_eq!((tokens(1), tokens(2), tokens(3)), (20, 4, 1));
}

#[test]
fn a_cancelled_job_frees_its_seat_for_the_next_step() {
    let mut engine = EngineCore::new(EngineSpec { max_running: 1, ..plain() }, 1);
    let first = engine.submit(job(10, 500), Tick::ZERO).unwrap();
    engine.submit(job(10, 1), Tick::ZERO).unwrap();
    engine.advance(Tick::from_millis(11), &mut Vec::new());
    engine.cancel(first);
    assert_eq!(engine.gauges().running, 0);
    assert_eq!(run(&mut engine), [(2, 33.0, 1)]);
}

#[test]
fn a_full_queue_turns_away() {
    let mut engine = EngineCore::new(EngineSpec { max_running: 1, max_waiting: Some(1), ..plain() }, 1);
    assert!(engine.submit(job(1, 1), Tick::ZERO).is_ok());
    assert!(engine.submit(job(1, 1), Tick::ZERO).is_ok());
    assert_eq!(engine.submit(job(1, 1), Tick::ZERO), Err(QueueFull));
}

#[test]
fn a_known_prefix_needs_no_prefill() {
    let mut engine = EngineCore::new(EngineSpec { prefix_caching: true, ..plain() }, 1);
    let known = Job { blocks: vec![7, 8], ..job(40, 1) };
    engine.submit(known.clone(), Tick::ZERO).unwrap();
    assert_eq!(run(&mut engine)[0].1, 14.0);
    engine.submit(known, Tick::from_millis(14)).unwrap();
    assert_eq!(run(&mut engine)[0].1, 24.8, "8 of 40 tokens are left");
    assert_eq!((engine.gauges().prefix_queries, engine.gauges().prefix_hits), (80, 32));
}

#[test]
fn requests_that_begin_alike_hold_their_common_blocks_once() {
    let mut engine = EngineCore::new(EngineSpec { prefix_caching: true, kv_tokens: 160, ..plain() }, 1);
    let like = |own: u64| Job { blocks: vec![1, 2, 3, 4, own], ..job(81, 40) };
    let first = engine.submit(like(5), Tick::ZERO).unwrap();
    let mut gains = Vec::new();
    engine.advance(engine.next_moment().unwrap(), &mut gains);
    let at = gains[0].at;
    assert_eq!(engine.gauges().kv_usage, 0.6, "six of ten blocks");
    let second = engine.submit(like(6), at).unwrap();
    engine.advance(engine.next_moment().unwrap(), &mut gains);
    assert_eq!((engine.gauges().running, engine.gauges().kv_usage), (2, 0.8), "four of the other's, two of its own");
    engine.cancel(first);
    assert_eq!(engine.gauges().kv_usage, 0.6);
    engine.cancel(second);
    assert_eq!(engine.gauges().kv_usage, 0.0);
    let third = engine.submit(like(5), at).unwrap();
    engine.advance(engine.next_moment().unwrap(), &mut gains);
    engine.advance(engine.next_moment().unwrap(), &mut gains);
    assert_eq!(engine.gauges().prefix_hits, 64 + 80, "all of the first's are still there");
    engine.cancel(third);
}

#[test]
fn a_token_of_prefill_takes_longer_behind_context_and_each_prompt_costs_something_of_its_own() {
    let shape = EngineSpec { attention_doubles_at: Some(100), per_prefill: Duration::from_millis(2), ..plain() };
    let mut engine = EngineCore::new(shape, 1);
    engine.submit(job(150, 2), Tick::ZERO).unwrap();
    // 100 tokens at 1.5 times: 10 + 2 + 15 ms; 50 tokens at 2.25 times: 10 + 2 + 11.25 ms.
    assert_eq!(run(&mut engine), [(1, 50.25, 1), (1, 61.25, 1)]);
}

#[test]
fn an_answer_is_found_again_by_the_turn_that_goes_on_with_it() {
    let mut engine = EngineCore::new(EngineSpec { prefix_caching: true, ..plain() }, 1);
    let first = Job { blocks: vec![1, 2, 3, 4], ..job(32, 17) };
    engine.submit(first, Tick::ZERO).unwrap();
    let at = Tick::ZERO + Duration::from_secs_f64(run(&mut engine).last().unwrap().1 / 1e3);
    engine.submit(Job { blocks: vec![1, 2, 3, 9], ..job(64, 1) }, at).unwrap();
    run(&mut engine);
    assert_eq!(engine.gauges().prefix_hits, 48, "32 of the prompt, 16 of the answer; its last token was not computed");
}

#[test]
fn what_was_read_of_a_prompt_is_known_though_its_request_left() {
    let mut engine = EngineCore::new(EngineSpec { prefix_caching: true, ..plain() }, 1);
    let long = Job { blocks: (1..=18).collect(), ..job(300, 1) };
    let left = engine.submit(long.clone(), Tick::ZERO).unwrap();
    let at = engine.next_moment().unwrap();
    engine.advance(at, &mut Vec::new());
    engine.cancel(left);
    engine.submit(long, at).unwrap();
    run(&mut engine);
    assert_eq!(engine.gauges().prefix_hits, 96, "six blocks of the first hundred tokens");
}

#[test]
fn speed_divides_every_length() {
    let mut engine = EngineCore::new(EngineSpec { speed: 10.0, ..plain() }, 1);
    engine.submit(job(150, 1), Tick::ZERO).unwrap();
    assert_eq!(run(&mut engine), [(1, 3.5, 1)]);
}

proptest! {
    /// For any submissions and cancellations: the cache and the batch never exceed their limits, every remaining
    /// job gets exactly its tokens, everything is released at the end, and equal seeds give equal
    /// traces.
    #[test]
    fn everybody_gets_exactly_their_tokens(
        jobs in prop::collection::vec((0u64..300, 1u64..200, 1u64..60, -2i64..3, any::<bool>()), 1..40),
        kv in 16u64..1600, seats in 1usize..6, speculative in 1u64..4, by_priority: bool, seed: u64,
    ) {
        let order = if by_priority { AdmissionOrder::Priority } else { AdmissionOrder::Arrival };
        let shape = EngineSpec { kv_tokens: kv, max_running: seats, order, speculative, jitter: 0.3, prefix_caching: true, ..plain() };
        let play = || {
            let mut engine = EngineCore::new(shape.clone(), seed);
            let mut gains = Vec::new();
            let mut wanted = BTreeMap::new();
            let mut now = Tick::ZERO;
            for (gap, prompt, output, priority, leaves) in &jobs {
                now = now + Duration::from_millis(*gap);
                engine.advance(now, &mut gains);
                let blocks = (0..prompt / BLOCK).collect();
                let id = engine.submit(Job { prompt: *prompt, output: *output, priority: *priority, blocks }, now).unwrap();
                let longest = shape.max_model_len.min((kv / BLOCK).max(1) * BLOCK);
                let held = (*prompt).min(longest - 1);
                if *leaves { engine.cancel(id) } else { wanted.insert(id, (*output).min(longest - held)); }
                prop_assert!(engine.gauges().kv_usage <= 1.0);
                prop_assert!(engine.gauges().running <= seats);
            }
            while let Some(at) = engine.next_moment() {
                engine.advance(at, &mut gains);
                prop_assert!(engine.gauges().kv_usage <= 1.0);
                prop_assert!(gains.len() < 100_000, "no end");
            }
            let mut got: BTreeMap<JobId, u64> = BTreeMap::new();
            for gain in &gains {
                *got.entry(gain.job).or_default() += gain.tokens;
                if let Some(life) = &gain.done {
                    prop_assert!(life.arrived <= life.started && life.started < life.first_token && life.first_token <= life.ended);
                }
            }
            prop_assert_eq!(&got, &wanted);
            prop_assert_eq!((engine.gauges().running, engine.gauges().waiting, engine.gauges().kv_usage), (0, 0, 0.0));
            Ok(gains)
        };
        prop_assert_eq!(play()?, play()?);
    }
}
