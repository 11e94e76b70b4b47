//! Reader of sweep summaries: those of `goodput sweep`, or of another tool.
//!
//! The latter are read by the names of figures, whatever their place: `goodput` (per replica), `target`,
//! `workload`, mean `ttft` and `tpot` at the knee. Several classes stand under `classes`, by name.

use serde_json::Value;

use super::input::{RawClass, RawLaw, RawLength};
use crate::load::summary::{FORMAT, SweepSummary};
use crate::load::sweep::CacheResult;
use crate::load::workload::CacheState;

/// Fills in values of a class that were not given explicitly.
///
/// # Errors The summary is not a JSON object, or states that there is no goodput.
pub(super) fn fill(class: &mut RawClass, summary: &str) -> Result<(), String> {
    let whole: Value = serde_json::from_str(summary).map_err(|error| format!("it is not JSON: {error}"))?;
    if !whole.is_object() {
        return Err("it is not a JSON object".to_owned());
    }
    if whole.get("format").and_then(Value::as_str) == Some(FORMAT) {
        let sweep =
            serde_json::from_value(whole).map_err(|error| format!("it is not the summary of a sweep: {error}"))?;
        return fill_from_sweep(class, &sweep);
    }
    let part = part_of(&whole, class.class.as_deref())?;
    let found = |names: &[&str]| names.iter().find_map(|name| part.get(name).or_else(|| whole.get(name)));
    if class.goodput.is_none() {
        class.goodput = found(&["goodput_per_replica", "goodput"]).and_then(|value| figure(value, "per_replica"));
        if class.goodput.is_none() {
            let reason = found(&["reason", "verdict"]).and_then(Value::as_str).unwrap_or("it gives no number for it");
            return Err(format!("the sweep found no goodput to plan with: {reason}"));
        }
    }
    let target = found(&["target", "joint_target", "joint_attainment_target"]).and_then(Value::as_f64);
    class.target = class.target.or(target);
    if class.class.is_none() {
        class.class = part.get("class").and_then(Value::as_str).map(str::to_owned);
    }
    let workload = found(&["workload"]).unwrap_or(&Value::Null);
    let length = |name: &str| workload.get(name).and_then(length);
    class.input_tokens = class.input_tokens.or_else(|| length("input_tokens"));
    class.output_tokens = class.output_tokens.or_else(|| length("output_tokens"));
    let mean = |names: &[&str]| found(names).and_then(|value| figure(value, "mean"));
    class.ttft_seconds = class.ttft_seconds.or_else(|| mean(&["ttft_seconds", "ttft"]));
    class.tpot_seconds = class.tpot_seconds.or_else(|| mean(&["tpot_seconds", "tpot"]));
    Ok(())
}

/// Fills in the result of `goodput sweep`: lengths and mean times at the highest clearing rate. The means do not
/// include requests that never reached a point.
fn fill_from_sweep(class: &mut RawClass, sweep: &SweepSummary) -> Result<(), String> {
    let [swept] = &sweep.workload.classes[..] else {
        let names: Vec<&str> = sweep.workload.classes.iter().map(|class| class.class.as_str()).collect();
        return Err(format!("it is of a mix of classes ({}); plan with a sweep of one class", names.join(", ")));
    };
    match class.class.as_deref() {
        Some(name) if name != swept.class => return Err(format!("it has no class {name}; it has {}", swept.class)),
        Some(_) => {}
        None => class.class = Some(swept.class.clone()),
    }
    let result = planned_result(&sweep.results).ok_or("it has no result")?;
    let goodput = class.goodput.or(result.goodput.per_replica);
    class.goodput = Some(
        goodput.ok_or_else(|| format!("the sweep found no goodput to plan with: {}", result.goodput.explanation))?,
    );
    class.target = class.target.or(Some(swept.joint_attainment_target));
    let knee = result.points.iter().rfind(|point| Some(point.rate) == result.goodput.highest_clearing);
    if let Some(measured) = knee.and_then(|point| point.classes.first()) {
        let (input, output) = (measured.planned_input_tokens, measured.output_tokens);
        class.input_tokens = class.input_tokens.or(Some(RawLength::Mean(input)));
        class.output_tokens = class.output_tokens.or(Some(RawLength::Mean(output)));
        class.ttft_seconds = class.ttft_seconds.or(measured.ttft_seconds.mean);
        class.tpot_seconds = class.tpot_seconds.or(measured.tpot_seconds.mean);
    }
    Ok(())
}

/// Of several cache states the cold one, because its goodput does not depend on the cache.
fn planned_result(results: &[CacheResult]) -> Option<&CacheResult> {
    results.iter().find(|result| result.cache == CacheState::Cold).or(results.first())
}

/// The part of the summary for this class; the whole summary if it has no classes.
fn part_of<'a>(whole: &'a Value, class: Option<&str>) -> Result<&'a Value, String> {
    let Some(classes) = whole.get("classes") else { return Ok(whole) };
    let name = |part: &Value| part.get("class").or_else(|| part.get("name")).and_then(Value::as_str).map(str::to_owned);
    let parts: Vec<(Option<String>, &Value)> = match classes {
        Value::Array(parts) => parts.iter().map(|part| (name(part), part)).collect(),
        Value::Object(parts) => parts.iter().map(|(name, part)| (Some(name.clone()), part)).collect(),
        _ => return Ok(whole),
    };
    match (class, &parts[..]) {
        (Some(class), parts) => {
            let part = parts.iter().find(|(name, _)| name.as_deref() == Some(class)).map(|(_, part)| *part);
            let names: Vec<&str> = parts.iter().filter_map(|(name, _)| name.as_deref()).collect();
            part.ok_or_else(|| format!("it has no class {class}; it has {}", names.join(", ")))
        }
        (None, [(_, part)]) => Ok(part),
        (None, _) => Err("it has several classes; say which one is planned (--class)".to_owned()),
    }
}

/// A number, or the member of this name in an object.
fn figure(value: &Value, name: &str) -> Option<f64> {
    value.as_f64().or_else(|| value.get(name).or_else(|| value.get("value")).and_then(Value::as_f64))
}

fn length(value: &Value) -> Option<RawLength> {
    if let Some(mean) = value.as_f64() {
        return Some(RawLength::Mean(mean));
    }
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    let law = RawLaw { mean: number("mean"), p50: number("p50"), p95: number("p95") };
    (law != RawLaw::default()).then_some(RawLength::Law(law))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_name_and_explicit_values_are_kept() {
        let summary = r#"{"goodput": {"per_replica": 8, "low": 7.5}, "target": 0.92, "tpot": {"mean": 0.035}, "ttft": 0.5,
            "workload": {"input_tokens": {"p50": 900, "p95": 6000}, "output_tokens": 400}}"#;
        let mut class = RawClass { target: Some(0.9), ..RawClass::default() };
        fill(&mut class, summary).unwrap();
        assert_eq!((class.goodput, class.target), (Some(8.0), Some(0.9)));
        assert_eq!((class.ttft_seconds, class.tpot_seconds), (Some(0.5), Some(0.035)));
        assert_eq!(class.output_tokens, Some(RawLength::Mean(400.0)));
        let law = RawLaw { mean: None, p50: Some(900.0), p95: Some(6000.0) };
        assert_eq!(class.input_tokens, Some(RawLength::Law(law)));
    }

    /// A summary of `goodput sweep`, without single runs and with one rate only.
    #[test]
    fn the_summary_of_our_own_sweep_is_read() {
        let summary = include_str!("sweep_summary.json");
        let mut class = RawClass::default();
        fill(&mut class, summary).unwrap();
        assert_eq!((class.class.as_deref(), class.goodput, class.target), (Some("default"), Some(360.0), Some(0.9)));
        assert_eq!(class.input_tokens, Some(RawLength::Mean(123.5)));
        assert_eq!(class.output_tokens, Some(RawLength::Mean(22.0)));
        assert_eq!(
            (class.ttft_seconds, class.tpot_seconds),
            (None, None),
            "an older sweep has medians, which are no means"
        );
        let mut sweep: SweepSummary = serde_json::from_str(summary).unwrap();
        let knee = sweep.results[0].points[0].classes.first_mut().unwrap();
        (knee.ttft_seconds.mean, knee.tpot_seconds.mean) = (Some(0.011), Some(0.0004));
        let with_means = serde_json::to_string(&sweep).unwrap();
        let mut class = RawClass { tpot_seconds: Some(0.5), ..RawClass::default() };
        fill(&mut class, &with_means).unwrap();
        assert_eq!((class.ttft_seconds, class.tpot_seconds), (Some(0.011), Some(0.5)), "by hand goes first");
        let mut other = RawClass { class: Some("voice".to_owned()), ..RawClass::default() };
        assert_eq!(fill(&mut other, summary).unwrap_err(), "it has no class voice; it has default");
        let mut sweep: SweepSummary = serde_json::from_str(summary).unwrap();
        sweep.workload.classes.push(sweep.workload.classes[0].clone());
        let mix = serde_json::to_string(&sweep).unwrap();
        assert!(fill(&mut RawClass::default(), &mix).unwrap_err().contains("mix of classes"));
        sweep.workload.classes.pop();
        sweep.results[0].goodput.per_replica = None;
        let none = serde_json::to_string(&sweep).unwrap();
        assert!(fill(&mut RawClass::default(), &none).unwrap_err().contains("360.0 requests/s clear"));
    }

    #[test]
    fn a_class_is_found_by_its_name() {
        let summary =
            r#"{"target": 0.9, "classes": [{"class": "chat", "goodput": 8}, {"class": "voice", "goodput": 3}]}"#;
        let of = |name: Option<&str>| {
            let mut class = RawClass { class: name.map(str::to_owned), ..RawClass::default() };
            fill(&mut class, summary).map(|()| (class.goodput, class.target))
        };
        assert_eq!(of(Some("voice")), Ok((Some(3.0), Some(0.9))));
        assert!(of(Some("batch")).unwrap_err().contains("it has chat, voice"));
        assert!(of(None).unwrap_err().contains("--class"));
        let mut only = RawClass::default();
        fill(&mut only, r#"{"classes": {"chat": {"goodput_per_replica": 8}}}"#).unwrap();
        assert_eq!(only.goodput, Some(8.0));
    }

    #[test]
    fn a_sweep_without_a_figure_is_no_basis() {
        let told = |summary: &str| fill(&mut RawClass::default(), summary).unwrap_err();
        assert!(told("{").contains("not JSON"));
        assert!(told("[]").contains("not a JSON object"));
        assert!(told(r#"{"goodput": null, "reason": "noise: 6.1 to 8.0 over three repetitions"}"#).contains("noise"));
        assert!(told("{}").contains("no number"));
    }
}
