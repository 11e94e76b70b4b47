//! The plan as a page for decision makers.

use crate::capacity::baseline::{self, UNSEEN_CHANGES};
use crate::capacity::cost::CostPlan;
use crate::capacity::pooling::PoolingPlan;
use crate::capacity::sensitivity::WhatIf;
use crate::capacity::{CapacityPlan, ClassPlan, FleetVerdict, PrefillPlan, PrefillQueue};
use crate::cli::document::{Document, number, percent, short};

/// Writes the page.
pub(super) fn page(plan: &CapacityPlan) -> Document {
    let mut page = Document::default();
    page.heading(1, "Capacity plan");
    page.text(summary(plan));
    page.text(verdict(plan.verdict, "The fleet of today"));
    for class in &plan.classes {
        class_page(&mut page, plan, class);
    }
    if let Some(pooling) = &plan.pooling {
        pooling_page(&mut page, pooling);
    }
    page.heading(2, "When to measure anew");
    page.text(
        "The plan is as good as its sweep. These conditions say that the sweep is out of date (--rules writes them as \
         alerting rules for Prometheus):",
    );
    let conditions = plan.classes.iter().flat_map(|class| &class.baseline);
    page.points(conditions.map(|condition| {
        format!("{} {}, for {}: `{}`", condition.meaning, condition.alert, condition.hold, condition.expression)
    }));
    page.text("No metric shows these, and each of them moves the knee:");
    page.points(UNSEEN_CHANGES.map(str::to_owned));
    page.heading(2, "How far to trust this");
    page.text(
        "Goodput is measured: it is what a sweep found, for its own lengths and cache state. Everything else here is \
         arithmetic and queueing formulas, which are a sanity bound: the measured sweep decides where they differ. \
         Confirm the result by a replay of recorded traffic at 1.0 and 1.3 times its rate, with one replica lost on the \
         way, before money is spent.",
    );
    sources(&mut page, plan);
    page
}

/// Alerting rules of all classes.
pub(super) fn rules(plan: &CapacityPlan) -> String {
    let conditions: Vec<_> = plan.classes.iter().flat_map(|class| class.baseline.clone()).collect();
    baseline::rules(&conditions)
}

fn summary(plan: &CapacityPlan) -> String {
    let peak: f64 = plan.classes.iter().map(|class| class.peak_rate).sum();
    let classes = match &plan.classes[..] {
        [class] => format!("of class {}", class.class),
        classes => format!("of {} classes in one fleet", classes.len()),
    };
    format!(
        "A peak of {} requests per second {classes} (the busiest five minutes, not an instant) needs {}, and {} with {} \
         that may fail or drain: {} GPUs.",
        short(peak),
        replicas(plan.size.for_peak),
        plan.size.total,
        plan.spare,
        number(plan.gpus as f64, 0)
    )
}

fn replicas(count: u32) -> String {
    if count == 1 { "1 replica".to_owned() } else { format!("{count} replicas") }
}

fn verdict(verdict: FleetVerdict, whose: &str) -> String {
    match verdict {
        FleetVerdict::Unknown => format!("{whose} was not given (--current-replicas), so nothing is said of it."),
        FleetVerdict::Enough { beyond: 0 } => format!("{whose} is enough, with nothing to spare."),
        FleetVerdict::Enough { beyond } => format!("{whose} is enough, and {} more than needed.", replicas(beyond)),
        FleetVerdict::NoRedundancy { missing } => format!(
            "SHORT: {} carries the peak only as long as nothing fails; {} missing.",
            whose.to_lowercase(),
            replicas(missing)
        ),
        FleetVerdict::Short { missing } => {
            format!("SHORT: {} does not carry the peak; {} missing.", whose.to_lowercase(), replicas(missing))
        }
    }
}

fn row<const N: usize>(cells: [&str; N]) -> [String; N] {
    cells.map(str::to_owned)
}

fn class_page(page: &mut Document, plan: &CapacityPlan, class: &ClassPlan) {
    page.heading(2, format!("Class {}", class.class));
    if class.verdict != FleetVerdict::Unknown {
        page.text(verdict(class.verdict, &format!("The fleet of class {}", class.class)));
    }
    page.listing(
        ["what", "figure", "where it comes from"],
        vec![
            row(["peak", &format!("{} requests/s", short(class.peak_rate)), "forecast"]),
            row([
                "mean lengths",
                &format!("{} in, {} out", number(class.input_tokens, 0), number(class.output_tokens, 0)),
                "forecast",
            ]),
            row(["joint target", &percent(class.target), "promise"]),
            row([
                "goodput",
                &format!("{} requests/s per replica, {} per GPU", short(class.goodput), short(class.goodput_per_gpu)),
                "sweep",
            ]),
            row([
                "planned rate",
                &format!("{} requests/s per replica", short(class.planned_rate)),
                &format!("goodput x {}", short(plan.headroom)),
            ]),
            row([
                "replicas",
                &format!(
                    "{} (exactly {}), {} with spares",
                    class.size.for_peak,
                    short(class.size.exact),
                    class.size.total
                ),
                &format!("peak / planned rate, rounded up, + {}", plan.spare),
            ]),
            row(["utilisation", &percent(class.utilisation), "peak / goodput of all replicas"]),
            row([
                "after losing one",
                &class.utilisation_after_loss.map_or_else(|| "nothing is left".to_owned(), percent),
                "the same with one replica fewer",
            ]),
            row([
                "time of a request",
                &format!("{} s", short(class.e2e)),
                &format!("{} s + {} s x output tokens", short(class.ttft), short(class.tpot)),
            ]),
            row(["concurrency", &format!("{} requests", number(class.concurrency, 0)), "peak x time (Little's law)"]),
            row([
                "live context",
                &format!("{} tokens", number(class.live_kv_tokens, 0)),
                "concurrency x (input + output / 2)",
            ]),
        ],
    );
    memory(page, class);
    if let Some(cost) = &class.cost {
        cost_page(page, cost);
    }
    page.heading(3, "What if");
    page.table(
        ["if", "goodput", "replicas", "with spares", "concurrency", "live context", "planned fleet at", "holds"],
        class.sensitivity.iter().map(scenario).collect(),
    );
    page.points(class.sensitivity.iter().skip(1).map(|scenario| format!("{}: {}.", scenario.name, scenario.assumes)));
    waits(page, plan, class);
}

fn scenario(scenario: &WhatIf) -> [String; 8] {
    [
        scenario.name.clone(),
        short(scenario.goodput),
        scenario.size.for_peak.to_string(),
        scenario.size.total.to_string(),
        number(scenario.concurrency, 0),
        number(scenario.live_kv_tokens, 0),
        scenario.utilisation.map_or_else(|| "-".to_owned(), percent),
        if scenario.holds { "yes" } else { "NO" }.to_owned(),
    ]
}

/// Bytes in GiB.
fn gib(bytes: f64) -> String {
    format!("{} GiB", short(bytes / (1024.0 * 1024.0 * 1024.0)))
}

fn memory(page: &mut Document, class: &ClassPlan) {
    let kv = &class.kv;
    let mut told = Vec::new();
    if let Some(bytes) = kv.bytes_per_token {
        told.push(format!("A token of context takes {} bytes of the key-value cache.", number(bytes, 0)));
    }
    if let Some(bytes) = kv.live_bytes {
        told.push(format!("The live context takes {} over the fleet.", gib(bytes)));
    }
    match (kv.fits, kv.usage, kv.room_tokens) {
        (Some(fits), Some(usage), Some(room)) => told.push(format!(
            "The replicas for the peak have room for {} tokens: {} of it is used{}",
            number(room, 0),
            percent(usage),
            if fits { "." } else { ". IT DOES NOT FIT: requests would be preempted, and the goodput above cannot hold." }
        )),
        _ => told.push(
            "Whether it fits is not told: give the room of a replica (--kv-tokens-per-replica, as the engine logs it, or \
             --gpu-memory-gib and --weights-gib with --model)."
                .to_owned(),
        ),
    }
    page.text(told.join(" "));
}

fn cost_page(page: &mut Document, cost: &CostPlan) {
    let money = |amount: f64| format!("{} {}", short(amount), cost.currency);
    page.heading(3, "Cost");
    let mut rows = vec![
        row(["fleet with spares, per hour", &money(cost.fleet_per_hour), "replicas x GPUs x price"]),
        row(["fleet with spares, per month", &money(cost.fleet_per_month), "730 hours"]),
        row([
            "request at the planned rate",
            &money(cost.per_request),
            "hour of one replica / requests planned for it; no spares",
        ]),
        row(["compliant request", &money(cost.per_compliant_request), "the same / joint target"]),
        row([
            "million compliant tokens",
            &money(cost.per_million_compliant_tokens),
            "the same / (input + output), x 1,000,000",
        ]),
        row([
            "million compliant output tokens",
            &money(cost.per_million_compliant_output_tokens),
            "the same / output, x 1,000,000",
        ]),
        row(["compliant request at the peak", &money(cost.per_compliant_request_at_peak), "fleet with spares / peak"]),
    ];
    if let Some(amount) = cost.per_compliant_request_at_mean {
        rows.push(row(["compliant request over the day", &money(amount), "fleet with spares / mean rate"]));
    }
    page.listing(["what", "amount", "how"], rows);
}

/// Seconds, or the word for a queue that grows without bound.
fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "grows without end".to_owned(), |value| format!("{} s", short(value)))
}

fn waits(page: &mut Document, plan: &CapacityPlan, class: &ClassPlan) {
    page.heading(3, "Waits, by formula");
    let slots = &class.slots;
    let waiting = match slots.wait_probability {
        None => "All".to_owned(),
        Some(share) if share < 1e-4 => "Fewer than 0.01 %".to_owned(),
        Some(share) => percent(share),
    };
    let mean = match slots.mean_wait {
        Some(mean) if mean < 1e-3 => "below 1 ms".to_owned(),
        mean => seconds(mean),
    };
    page.text(format!(
        "Slots: a replica runs {} requests at its knee, the replicas for the peak {}. {waiting} of the requests find all of \
         them taken (Erlang C); the mean wait is {mean}, with a burst factor of {} (1 is Poisson).",
        short(slots.per_replica),
        number(f64::from(slots.slots), 0),
        short(plan.burst)
    ));
    let Some(prefill) = &class.prefill else { return };
    prefill_page(page, prefill);
}

fn prefill_page(page: &mut Document, prefill: &PrefillPlan) {
    page.text(format!(
        "Prefill as a queue of its own: {} requests/s at one instance, {} s for the mean prompt on one device. Both terms of \
         the mean are shown; compare means with means.",
        short(prefill.rate),
        short(prefill.seconds)
    ));
    let line = |name: String, queue: &PrefillQueue| {
        [name, percent(queue.utilisation), seconds(queue.service), seconds(queue.wait), seconds(queue.ttft)]
    };
    let mut rows = vec![line("one device, equal prompts (M/D/1)".to_owned(), &prefill.equal_lengths)];
    if let (Some(varied), Some(variation)) = (&prefill.varied_lengths, prefill.variation) {
        let name = format!("one device, prompts as varied as they are (M/G/1, c^2 = {})", short(variation));
        rows.push(line(name, varied));
    }
    let PrefillPlan { ways, speed_up, .. } = prefill;
    rows.push(line(format!("pipeline of {ways} stages (inter-operator)"), &prefill.inter_operator));
    let split = format!("layers split over {ways}, {} times as fast (intra-operator)", short(*speed_up));
    rows.push(line(split, &prefill.intra_operator));
    page.table(["prefill", "busy", "compute", "wait", "mean TTFT"], rows);
    let p95 = seconds(prefill.wait_p95);
    let mut told = format!("For equal prompts 95 % wait no longer than {p95}.");
    if let Some(variation) = prefill.variation {
        let times = short(1.0 + variation);
        told.push_str(&format!(
            " With lengths as varied as these the mean wait of M/D/1 is too low by a factor of {times}."
        ));
    }
    page.text(told);
}

fn pooling_page(page: &mut Document, pooling: &PoolingPlan) {
    page.heading(2, "Separate pools or one");
    page.text(format!(
        "Pools of their own take {} in all, one pool that is shared by priority {}: {} fewer. The sum takes the peaks of \
         all classes to fall together and their work to add up; a sweep of the mix confirms it or does not.",
        replicas(pooling.separate),
        pooling.shared.total,
        pooling.saves
    ));
    let rows = pooling.waits.iter().map(|wait| {
        let of = |value: Option<f64>| seconds(value);
        [wait.class.clone(), of(wait.separate), of(wait.shared), of(wait.shared_after_loss)]
    });
    page.table(["mean wait for a slot", "own pool", "shared pool", "shared, one replica lost"], rows.collect());
}

fn sources(page: &mut Document, plan: &CapacityPlan) {
    page.heading(2, "Sources of the formulas");
    let mut sources = vec![
        "Concurrency: Little (1961), L = lambda W.".to_owned(),
        "Goodput per GPU, time of a request, cost per query: Zhong et al., DistServe (OSDI 2024).".to_owned(),
        "Wait for a slot: Erlang C (Cooper 1981); bursts by the approximation of Allen and Cunneen (Allen 1990)."
            .to_owned(),
    ];
    if plan.classes.iter().any(|class| class.prefill.is_some()) {
        sources.push(
            "Prefill: M/D/1 and its inter- and intra-operator variants as in DistServe, section 3.1; M/G/1 by Pollaczek and \
             Khinchine (Kleinrock 1975); 95th percentile of the wait by the transform's nearest pole (Tijms 2003)."
                .to_owned(),
        );
    }
    if plan.pooling.is_some() {
        sources.push("Priorities in a shared pool: Cobham (1954), Kella and Yechiali (1985).".to_owned());
    }
    page.points(sources);
}
