//! Text output of a replay.

use std::fmt::Write;

use crate::load::replay::{ClassReplay, FleetPoolSummary, ReplayResult, ReplayTarget};

/// The whole result.
pub fn page(result: &ReplayResult) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}", headline(result));
    let _ = writeln!(text, "{}\n", against(&result.target));
    text.push_str(
        "class            requests  attainment   target  verdict       TTFT p95       TPOT p95        E2E p95\n",
    );
    result.classes.iter().for_each(|class| text.push_str(&class_line(class)));
    for class in &result.classes {
        let reasons = |counts: &std::collections::BTreeMap<String, u64>| {
            counts.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
        };
        if !class.missed.is_empty() {
            let _ = writeln!(text, "{}, missed: {}", class.class, reasons(&class.missed));
        }
        if !class.excluded.is_empty() {
            let _ = writeln!(text, "{}, not counted: {}", class.class, reasons(&class.excluded));
        }
    }
    if !result.losses.is_empty() {
        text.push_str(&losses(result));
    }
    remarks(result).into_iter().for_each(|remark| {
        let _ = writeln!(text, "{remark}");
    });
    let _ = writeln!(text, "\n{}", verdict(result));
    text
}

fn headline(result: &ReplayResult) -> String {
    let trace = &result.trace;
    let requests: u64 = result.classes.iter().map(|class| class.requests).sum();
    let rate = requests as f64 / result.seconds.max(1e-9);
    let mut text = format!(
        "{} ({}): {requests} requests in {:.0} s, {rate:.2} per second",
        trace.file, trace.format, result.seconds
    );
    if trace.speed != 1.0 {
        let _ = write!(text, ", {} times as fast", trace.speed);
    }
    if trace.rate != 1.0 {
        let _ = write!(text, ", {} times as many", trace.rate);
    }
    text
}

fn against(target: &ReplayTarget) -> String {
    match target {
        ReplayTarget::Service { url, model, send_lag_p99_seconds, .. } => {
            format!(
                "against {url}, model {model}; p99 of the client's own lateness {:.1} ms",
                send_lag_p99_seconds * 1e3
            )
        }
        ReplayTarget::Simulated { pools, engine, took_seconds, .. } => {
            let pools: Vec<String> = pools.iter().map(pool_text).collect();
            let engine = engine.as_deref().unwrap_or("the defaults: an 8B model on one large GPU");
            format!("simulated in {took_seconds:.1} s: {}; engines by {engine}", pools.join("; "))
        }
    }
}

fn pool_text(pool: &FleetPoolSummary) -> String {
    let mut text = format!("pool {} of {} engines, {} requests", pool.pool, pool.engines, pool.requests);
    if pool.from_earlier_pools > 0 {
        let _ = write!(text, " ({} that came on from an earlier pool)", pool.from_earlier_pools);
    }
    let _ = write!(
        text,
        ", caches held {:.0} % of prompt tokens, {} preemptions",
        pool.hit_share * 100.0,
        pool.preemptions
    );
    text
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "none judged".to_owned(), |share| format!("{:.2} %", share * 100.0))
}

fn class_line(class: &ClassReplay) -> String {
    format!(
        "{:<16} {:>8} {:>11} {:>8}  {:<7} {:>14} {:>14} {:>14}\n",
        class.class,
        class.requests,
        percent(class.attainment),
        percent(Some(class.target)),
        if class.passes { "passes" } else { "FAILS" },
        class.ttft_seconds.p95.to_string(),
        class.tpot_seconds.p95.to_string(),
        class.e2e_seconds.p95.to_string(),
    )
}

fn losses(result: &ReplayResult) -> String {
    let mut text = format!("\n{}\n", result.losses.join(", "));
    text.push_str("class                 before       during        after   lowest window recovered after\n");
    for class in &result.classes {
        let phase = |name: &str| {
            let found = class.phases.iter().find(|phase| phase.phase == name);
            found.and_then(|phase| phase.attainment).map_or_else(|| "-".to_owned(), |share| percent(Some(share)))
        };
        let recovery = class.recovery.as_ref();
        let lowest = recovery.and_then(|recovery| recovery.lowest_attainment);
        let recovered = match recovery.map(|recovery| (recovery.lowest_attainment, recovery.seconds)) {
            Some((Some(_), Some(seconds))) if seconds > 0.0 => format!("{seconds:.0} s"),
            Some((Some(_), Some(_))) => "never below".to_owned(),
            Some((Some(_), None)) => "not recovered".to_owned(),
            _ => "-".to_owned(),
        };
        let _ = writeln!(
            text,
            "{:<16} {:>11} {:>12} {:>12} {:>15} {recovered:>16}",
            class.class,
            phase("before"),
            phase("during"),
            phase("after"),
            lowest.map_or_else(|| "-".to_owned(), |share| percent(Some(share))),
        );
    }
    text
}

fn remarks(result: &ReplayResult) -> Vec<String> {
    let (trace, passed) = (&result.trace, &result.trace.passed_over);
    let counted = [
        (passed.failed, "requests failed in the original and were left out"),
        (passed.not_generating, "requests of the journal are no work for an engine and were left out"),
        (passed.unreadable, "lines of the journal are unreadable"),
        (passed.guessed_output, "requests have no output length; the mean of their class stands in"),
        (trace.too_long, "requests are longer than a context and were left out"),
        (
            trace.unknown_model,
            "requests are of a model that no route of their class serves; they took the class's first route",
        ),
        (trace.unknown_class, "requests name a class that is not in the settings; they count as the default class"),
    ];
    let counted = counted.into_iter().filter(|(count, _)| *count > 0);
    let mut found: Vec<String> = counted.map(|(count, what)| format!("{count} {what}")).collect();
    if let ReplayTarget::Service { problems, tenants_without_key, .. } = &result.target {
        if *tenants_without_key > 0 {
            found.push(format!("{tenants_without_key} requests are of tenants that have no key in --tenant-keys"));
        }
        found.extend(problems.iter().map(|problem| format!("INVALID: {problem}")));
    }
    found
}

fn verdict(result: &ReplayResult) -> String {
    match (&result.ended_by, result.passes) {
        (Some(why), _) => format!("PARTIAL: {why}"),
        (None, true) => "PASSES: every class reaches its target".to_owned(),
        (None, false) => "FAILS: not every class reaches its target, or the run cannot be believed".to_owned(),
    }
}
