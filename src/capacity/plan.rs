//! The plan: all of the room's maths for one set of inputs.

use serde::Serialize;

use super::baseline::{self, BaselineCondition};
use super::cost::{CostBasis, CostPlan};
use super::fleet::{FleetSize, concurrency, e2e, mean_context, utilisation};
use super::inputs::{CapacityInputs, ClassForecast, InputCheck, InputProblem, KvRoom, PrefillFacts};
use super::pooling::{self, PoolingPlan};
use super::queueing::{Parallelism, QueueError, SingleServer, SlotPool, prefill_delay};
use super::sensitivity::{self, WhatIf};

/// Result of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CapacityPlan {
    /// Share of its goodput that a replica is planned for.
    pub headroom: f64,
    /// Replicas that may be away at the peak.
    pub spare: u32,
    /// Squared coefficient of variation of the gaps between arrivals.
    pub burst: f64,
    /// GPUs of one replica.
    pub gpus_per_replica: u32,
    /// Each class with a fleet of its own.
    pub classes: Vec<ClassPlan>,
    /// One fleet for all of them; only with two classes or more.
    pub pooling: Option<PoolingPlan>,
    /// Replicas that the whole forecast needs: the shared pool's, or the only class's.
    pub size: FleetSize,
    /// GPUs of those.
    pub gpus: u64,
    /// Whether the fleet of today is enough.
    pub verdict: FleetVerdict,
}

/// Today's fleet against the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum FleetVerdict {
    /// The current size is not given.
    Unknown,
    /// It carries the peak, with the spares.
    Enough {
        /// Replicas beyond the plan.
        beyond: u32,
    },
    /// It carries the peak as long as nothing fails.
    NoRedundancy {
        /// Replicas that are missing.
        missing: u32,
    },
    /// It does not carry the peak.
    Short {
        /// Replicas that are missing, spares included.
        missing: u32,
    },
}

impl FleetVerdict {
    fn of(current: Option<u32>, size: FleetSize) -> Self {
        match current {
            None => FleetVerdict::Unknown,
            Some(current) if current >= size.total => FleetVerdict::Enough { beyond: current - size.total },
            Some(current) if current >= size.for_peak => FleetVerdict::NoRedundancy { missing: size.total - current },
            Some(current) => FleetVerdict::Short { missing: size.total - current },
        }
    }

    /// Whether replicas are missing.
    #[must_use]
    pub const fn is_short(self) -> bool {
        matches!(self, FleetVerdict::NoRedundancy { .. } | FleetVerdict::Short { .. })
    }
}

/// Needs of one class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassPlan {
    /// Name.
    pub class: String,
    /// Requests per second in the busiest five minutes.
    pub peak_rate: f64,
    /// Mean prompt tokens.
    pub input_tokens: f64,
    /// Mean output tokens.
    pub output_tokens: f64,
    /// Mean time to first token in seconds.
    pub ttft: f64,
    /// Mean time per output token in seconds.
    pub tpot: f64,
    /// Mean time from start to finish in seconds.
    pub e2e: f64,
    /// Promised joint attainment.
    pub target: f64,
    /// Highest rate of one replica that keeps it.
    pub goodput: f64,
    /// The same for one GPU.
    pub goodput_per_gpu: f64,
    /// Rate that one replica is planned for.
    pub planned_rate: f64,
    /// Replicas.
    pub size: FleetSize,
    /// Peak by the goodput of all of them.
    pub utilisation: f64,
    /// The same after the loss of one; absent if that was the last.
    pub utilisation_after_loss: Option<f64>,
    /// Requests in the fleet at the peak.
    pub concurrency: f64,
    /// Tokens of context that they hold.
    pub live_kv_tokens: f64,
    /// Their memory.
    pub kv: KvPlan,
    /// Wait for one of the slots that replicas have.
    pub slots: SlotPlan,
    /// The prefill stage, if something is known of it.
    pub prefill: Option<PrefillPlan>,
    /// Prices, if one is known.
    pub cost: Option<CostPlan>,
    /// What-if cases.
    pub sensitivity: Vec<WhatIf>,
    /// When to measure anew.
    pub baseline: Vec<BaselineCondition>,
    /// Whether the class's own fleet of today is enough.
    pub verdict: FleetVerdict,
}

/// Memory of the live context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KvPlan {
    /// Bytes of one token on one copy of the model.
    pub bytes_per_token: Option<f64>,
    /// Bytes of all live context, with the copies that the split over GPUs makes.
    pub live_bytes: Option<f64>,
    /// Tokens that the replicas for the peak have room for.
    pub room_tokens: Option<f64>,
    /// Live context by that room.
    pub usage: Option<f64>,
    /// Whether it fits.
    pub fits: Option<bool>,
}

/// Slots of a fleet, and the wait for one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SlotPlan {
    /// Requests that one replica runs at one time.
    pub per_replica: f64,
    /// Slots of the replicas for the peak, without spares.
    pub slots: u32,
    /// Share of requests that find all slots taken; absent if the queue grows without bound.
    pub wait_probability: Option<f64>,
    /// Mean wait in seconds.
    pub mean_wait: Option<f64>,
}

/// The prefill stage as a queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillPlan {
    /// Requests per second at one instance.
    pub rate: f64,
    /// Seconds of one device for the mean prompt.
    pub seconds: f64,
    /// Devices of a split instance.
    pub ways: u32,
    /// How many times as fast they are with layers split.
    pub speed_up: f64,
    /// Squared coefficient of variation of the prompts' lengths.
    pub variation: Option<f64>,
    /// One device, prompts of equal length (M/D/1).
    pub equal_lengths: PrefillQueue,
    /// 95th percentile of the wait there.
    pub wait_p95: Option<f64>,
    /// One device, prompts as varied as measured (M/G/1).
    pub varied_lengths: Option<PrefillQueue>,
    /// A pipeline of `ways` stages.
    pub inter_operator: PrefillQueue,
    /// Layers split over `ways` devices.
    pub intra_operator: PrefillQueue,
}

/// Mean time to first token, by its two terms, in seconds; absent if the queue grows without bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PrefillQueue {
    /// Busy share of the stage; 1 or more means that it cannot keep up.
    pub utilisation: f64,
    /// Time to compute the prompt.
    pub service: Option<f64>,
    /// Time in the queue.
    pub wait: Option<f64>,
    /// Both.
    pub ttft: Option<f64>,
}

/// Makes a plan.
///
/// # Errors
/// Everything that is wrong with the inputs.
pub fn plan(inputs: &CapacityInputs) -> Result<CapacityPlan, Vec<InputProblem>> {
    let mut check = InputCheck::default();
    check.all(inputs);
    if !check.problems.is_empty() {
        return Err(check.problems);
    }
    let classes: Vec<ClassPlan> = inputs.classes.iter().map(|class| class_plan(inputs, class)).collect();
    let sizes: Vec<FleetSize> = classes.iter().map(|class| class.size).collect();
    let pooling = pooling::compare(inputs, &sizes);
    let size = pooling.as_ref().map_or(sizes[0], |pooling| pooling.shared);
    let gpus = u64::from(size.total) * u64::from(inputs.replica.gpus);
    Ok(CapacityPlan {
        headroom: inputs.headroom,
        spare: inputs.spare,
        burst: inputs.burst,
        gpus_per_replica: inputs.replica.gpus,
        classes,
        pooling,
        size,
        gpus,
        verdict: FleetVerdict::of(inputs.current_replicas, size),
    })
}

impl CapacityPlan {
    /// Whether a fleet of today lacks replicas, be it the shared one or that of a class.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.verdict.is_short() || self.classes.iter().any(|class| class.verdict.is_short())
    }
}

fn class_plan(inputs: &CapacityInputs, class: &ClassForecast) -> ClassPlan {
    let ClassForecast { peak_rate, input_tokens, output_tokens, ttft, tpot, target, goodput, .. } = *class;
    let size = FleetSize::of(peak_rate, goodput, inputs.headroom, inputs.spare);
    let planned_rate = goodput * inputs.headroom;
    let time = e2e(ttft, tpot, output_tokens);
    let running = concurrency(peak_rate, time);
    let context = mean_context(input_tokens, output_tokens);
    let cost = inputs.price.as_ref().map(|price| {
        CostBasis {
            currency: &price.currency,
            gpu_hour: price.hour,
            gpus: inputs.replica.gpus,
            replicas: size.total,
            planned_rate,
            target,
            peak_rate,
            mean_rate: class.mean_rate,
            tokens: (input_tokens, output_tokens),
        }
        .prices()
    });
    ClassPlan {
        class: class.name.clone(),
        peak_rate,
        input_tokens,
        output_tokens,
        ttft,
        tpot,
        e2e: time,
        target,
        goodput,
        goodput_per_gpu: goodput / f64::from(inputs.replica.gpus),
        planned_rate,
        size,
        utilisation: peak_rate / (goodput * f64::from(size.total)),
        utilisation_after_loss: utilisation(peak_rate, goodput, size.total - 1),
        concurrency: running,
        live_kv_tokens: running * context,
        kv: kv_plan(inputs, running, context, size),
        slots: slot_plan(inputs, class, size, time),
        prefill: class.prefill.as_ref().map(|facts| prefill_plan(class, facts, planned_rate)),
        cost,
        sensitivity: sensitivity::scenarios(inputs, class, size),
        baseline: baseline::conditions(class, planned_rate, size.for_peak),
        verdict: FleetVerdict::of(class.current_replicas, size),
    }
}

fn kv_plan(inputs: &CapacityInputs, running: f64, context: f64, size: FleetSize) -> KvPlan {
    let replica = &inputs.replica;
    let replicas = f64::from(size.for_peak);
    let copies = replica.kv_cache.map_or(1.0, |cache| cache.copies(replica.tensor_parallel));
    let bytes_per_token = replica.kv_cache.map(|cache| cache.bytes_per_token()).or(replica.kv_bytes_per_token);
    let sequence = replica.kv_cache.map(|cache| cache.bytes_of(context));
    let sequence = sequence.or(bytes_per_token.map(|bytes| bytes * context));
    let live_bytes = sequence.map(|bytes| running * bytes * copies);
    let (room_tokens, usage) = match replica.kv_room {
        Some(KvRoom::Tokens(tokens)) => (Some(tokens * replicas), Some(running * context / (tokens * replicas))),
        Some(KvRoom::Bytes(bytes)) => {
            let usage = live_bytes.map(|live| live / (bytes * replicas));
            (usage.map(|usage| running * context / usage), usage)
        }
        None => (None, None),
    };
    KvPlan { bytes_per_token, live_bytes, room_tokens, usage, fits: usage.map(|usage| usage <= 1.0) }
}

fn slot_plan(inputs: &CapacityInputs, class: &ClassForecast, size: FleetSize, time: f64) -> SlotPlan {
    let per_replica = pooling::slots_of(inputs, std::slice::from_ref(class));
    let slots = (per_replica * f64::from(size.for_peak)).floor() as u32;
    let wait = SlotPool { slots, service: time, burst: inputs.burst }.wait(class.peak_rate).ok();
    SlotPlan {
        per_replica,
        slots,
        wait_probability: wait.map(|wait| wait.probability),
        mean_wait: wait.map(|wait| wait.mean),
    }
}

fn prefill_plan(class: &ClassForecast, facts: &PrefillFacts, planned_rate: f64) -> PrefillPlan {
    let rate = facts.rate.unwrap_or(planned_rate);
    let PrefillFacts { seconds, ways, speed_up, .. } = *facts;
    let of = |parallelism| match prefill_delay(rate, seconds, parallelism) {
        Ok(delay) => PrefillQueue {
            utilisation: delay.utilisation,
            service: Some(delay.service),
            wait: Some(delay.wait),
            ttft: Some(delay.ttft()),
        },
        Err(QueueError::Saturated { utilisation }) => PrefillQueue { utilisation, ..PrefillQueue::default() },
        Err(other) => unreachable!("the inputs were checked: {other}"),
    };
    let equal_lengths = of(Parallelism::Single);
    let server = SingleServer::new(rate, seconds).ok();
    let varied_lengths = class.input_variation.map(|variation| {
        let wait = server.and_then(|server| server.mg1_wait(variation).ok());
        PrefillQueue { wait, ttft: wait.map(|wait| seconds + wait), ..equal_lengths }
    });
    PrefillPlan {
        rate,
        seconds,
        ways,
        speed_up,
        variation: class.input_variation,
        equal_lengths,
        wait_p95: server.and_then(|server| server.md1_wait_quantile(0.95).ok()),
        varied_lengths,
        inter_operator: of(Parallelism::InterOperator { ways }),
        intra_operator: of(Parallelism::IntraOperator { speed_up }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::inputs::{GpuPrice, PrefixCacheFacts, ReplicaFacts};
    use super::super::kv::KvCache;
    use super::*;
    use crate::types::Priority;

    /// The worked example of the SLO note.
    fn chat() -> ClassForecast {
        ClassForecast {
            peak_rate: 30.0,
            input_tokens: 1200.0,
            output_tokens: 400.0,
            ttft: 0.5,
            tpot: 0.035,
            goodput: 8.0,
            target: 0.92,
            ..ClassForecast::named("chat")
        }
    }

    fn of(class: ClassForecast) -> CapacityInputs {
        CapacityInputs::of(vec![class])
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{found} is not {expected}");
    }

    #[test]
    fn the_worked_example_of_the_slo_note() {
        let plan = plan(&of(chat())).unwrap();
        let chat = &plan.classes[0];
        close(chat.e2e, 14.5);
        close(chat.concurrency, 435.0);
        close(chat.live_kv_tokens, 609_000.0);
        close(chat.planned_rate, 5.6);
        close(chat.size.exact, 30.0 / 5.6);
        assert_eq!((chat.size.for_peak, chat.size.total), (6, 7));
        assert_eq!((plan.size, plan.gpus, plan.verdict), (chat.size, 7, FleetVerdict::Unknown));
        close(chat.utilisation, 30.0 / 56.0);
        close(chat.utilisation_after_loss.unwrap(), 30.0 / 48.0);
        close(chat.slots.per_replica, 116.0);
        assert!(!plan.is_short() && plan.pooling.is_none() && chat.cost.is_none());
    }

    #[test]
    fn the_fleet_of_today_is_weighed_with_its_spares() {
        let verdict = |current| plan(&CapacityInputs { current_replicas: Some(current), ..of(chat()) }).unwrap();
        assert_eq!(verdict(9).verdict, FleetVerdict::Enough { beyond: 2 });
        assert_eq!(verdict(7).verdict, FleetVerdict::Enough { beyond: 0 });
        assert_eq!(verdict(6).verdict, FleetVerdict::NoRedundancy { missing: 1 });
        assert_eq!(verdict(2).verdict, FleetVerdict::Short { missing: 5 });
        assert_eq!([9, 7, 6, 2].map(|current| verdict(current).is_short()), [false, false, true, true]);
        let own = plan(&of(ClassForecast { current_replicas: Some(6), ..chat() })).unwrap();
        assert!(own.is_short() && own.verdict == FleetVerdict::Unknown);
    }

    #[test]
    fn live_context_is_weighed_against_the_room_that_there_is() {
        let llama =
            r#"{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}"#;
        let cache = KvCache::from_config(llama, None).unwrap();
        let with = |replica| plan(&CapacityInputs { replica, ..of(chat()) }).unwrap().classes[0].kv;
        let tokens = with(ReplicaFacts { kv_room: Some(KvRoom::Tokens(100_000.0)), ..ReplicaFacts::default() });
        assert_eq!((tokens.room_tokens, tokens.fits), (Some(600_000.0), Some(false)));
        close(tokens.usage.unwrap(), 1.015);
        let two = ReplicaFacts { gpus: 16, tensor_parallel: 16, kv_cache: Some(cache), ..ReplicaFacts::default() };
        let split = with(ReplicaFacts { kv_room: Some(KvRoom::Bytes(200e9)), ..two.clone() });
        assert_eq!(split.bytes_per_token, Some(327_680.0));
        close(split.live_bytes.unwrap(), 609_000.0 * 327_680.0 * 2.0);
        assert_eq!(split.fits, Some(true));
        assert_eq!(with(two).fits, None, "nobody said how much room there is");
    }

    #[test]
    fn what_if_cases_are_compared_with_the_planned_fleet() {
        let cache = PrefixCacheFacts { hit_rate: 0.5, hit_rate_p10: 0.25, prefill_share: None };
        let plan = plan(&of(ClassForecast { prefix_cache: Some(cache), ..chat() })).unwrap();
        let all = &plan.classes[0].sensitivity;
        let of = |part: &str| all.iter().find(|scenario| scenario.name.contains(part)).unwrap();
        assert_eq!(of("as planned").size, plan.size);
        let longer = of("25 % longer");
        close(longer.goodput, 6.4);
        assert_eq!((longer.size.for_peak, longer.size.total, longer.holds), (7, 8, true));
        close(longer.concurrency, 435.0 * 1.25);
        close(longer.live_kv_tokens, 609_000.0 * 1.5625);
        let lost = of("lost");
        assert_eq!((lost.size, lost.holds), (plan.size, true));
        close(lost.utilisation.unwrap(), 0.625);
        assert_eq!(of("30 % higher").size.for_peak, 7);
        assert_eq!(of("10 % lower").size.for_peak, 6);
        close(of("10th percentile").goodput, 8.0 / 1.5);
        assert_eq!(of("10th percentile").size.for_peak, 9);
    }

    #[test]
    fn the_prefill_stage_has_both_terms_or_is_saturated() {
        let facts = PrefillFacts { seconds: 0.4, rate: Some(2.0), ways: 2, speed_up: 1.6 };
        let variation = Some(2.78);
        let class = ClassForecast { prefill: Some(facts), input_variation: variation, ..chat() };
        let prefill = plan(&of(class.clone())).unwrap().classes[0].prefill.clone().unwrap();
        close(prefill.equal_lengths.ttft.unwrap(), 1.2);
        close(prefill.varied_lengths.unwrap().wait.unwrap(), 0.8 * 3.78);
        close(prefill.inter_operator.ttft.unwrap(), 0.4 + 2.0 * 0.16 / (4.0 * 1.2));
        close(prefill.intra_operator.service.unwrap(), 0.25);
        assert!(prefill.wait_p95.unwrap() > 2.0);
        let planned = PrefillFacts { rate: None, ..facts };
        let class = ClassForecast { prefill: Some(planned), ..class };
        let prefill = plan(&of(class)).unwrap().classes[0].prefill.clone().unwrap();
        close(prefill.rate, 5.6);
        close(prefill.equal_lengths.utilisation, 2.24);
        assert_eq!((prefill.equal_lengths.ttft, prefill.wait_p95), (None, None));
        assert_eq!(prefill.varied_lengths.unwrap().wait, None);
    }

    #[test]
    fn classes_that_share_a_pool_share_its_spares_and_the_first_in_rank_waits_least() {
        let voice = ClassForecast {
            priority: Priority::Critical,
            peak_rate: 4.0,
            output_tokens: 60.0,
            goodput: 10.0,
            ..chat()
        };
        let voice = ClassForecast { name: "voice".to_owned(), ..voice };
        let plan = plan(&CapacityInputs::of(vec![chat(), voice])).unwrap();
        let pooling = plan.pooling.unwrap();
        // 5.36 and 0.57 replicas are 5.93 together; apart they are 6 + 1 and 1 + 1.
        assert_eq!((pooling.separate, pooling.shared.for_peak, pooling.shared.total, pooling.saves), (9, 6, 7, 2));
        assert_eq!(plan.size, pooling.shared);
        let classes: Vec<&str> = pooling.waits.iter().map(|wait| wait.class.as_str()).collect();
        assert_eq!(classes, ["voice", "chat"]);
        assert!(pooling.waits[0].shared.unwrap() < pooling.waits[1].shared.unwrap());
        assert!(pooling.waits.iter().all(|wait| wait.shared_after_loss > wait.shared));
    }

    #[test]
    fn invalid_numbers_are_all_reported_with_their_path() {
        let bad = ClassForecast {
            peak_rate: f64::NAN,
            mean_rate: Some(-1.0),
            input_tokens: 0.0,
            ttft: -0.1,
            goodput: f64::INFINITY,
            target: 1.2,
            prefill: Some(PrefillFacts { seconds: 0.0, rate: None, ways: 2, speed_up: 3.0 }),
            prefix_cache: Some(PrefixCacheFacts { hit_rate: 1.0, hit_rate_p10: 0.1, prefill_share: Some(0.0) }),
            ..chat()
        };
        let inputs = CapacityInputs {
            headroom: 0.0,
            burst: -1.0,
            price: Some(GpuPrice { hour: 0.0, currency: "USD".to_owned() }),
            replica: ReplicaFacts { gpus: 0, kv_room: Some(KvRoom::Bytes(-1.0)), ..ReplicaFacts::default() },
            ..CapacityInputs::of(vec![bad, chat()])
        };
        let problems = plan(&inputs).unwrap_err();
        let places: Vec<&str> = problems.iter().map(|problem| problem.place.as_str()).collect();
        for place in [
            "headroom",
            "burst",
            "gpu_hour",
            "gpus_per_replica",
            "gpu_memory_gib",
            "classes[0].peak_rate",
            "classes[0].mean_rate",
            "classes[0].input_tokens",
            "classes[0].ttft_seconds",
            "classes[0].goodput",
            "classes[0].target",
            "classes[0].prefill.seconds",
            "classes[0].prefill.speed_up",
            "classes[0].cache.hit_rate",
            "classes[0].cache.prefill_share",
            "classes[1].class",
        ] {
            assert!(places.contains(&place), "{place} in {problems:?}");
        }
        assert!(plan(&CapacityInputs::of(Vec::new())).unwrap_err()[0].to_string().contains("no class"));
    }
}
