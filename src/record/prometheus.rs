//! Budgets of all gateways together, read from the Prometheus that scrapes them (`telemetry.prometheus`).
//!
//! One task asks at an interval and hands the counts to the classes' windows, where they stand in place of this
//! process' own until they are too old. Nothing on the data path waits for it. While Prometheus cannot be read,
//! the process' own counts are shown, and the page, the log and a counter say so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::Recorder;
use super::burn::{JudgedCount, WindowCount};
use super::http_client::{HttpClient, HttpError, HttpServer};
use super::settings::PrometheusSettings;
use crate::alerts;
use crate::clock::Clock;
use crate::dial::Dial;
use crate::types::{LengthBucket, Tick};

/// Longest response that is read: about 100,000 series.
const LONGEST_ANSWER: usize = 16 << 20;

/// Number of intervals for which counts are used.
const STALE_AFTER: u32 = 3;

/// Interval at which a lasting error is logged again.
const TELLS: Duration = Duration::from_secs(60);

/// Why the counts could not be read.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("its answer is not what its API promises: {0}")]
    Answer(#[from] serde_json::Error),
    #[error("it answers with an error: {0}")]
    Query(String),
    #[error("it has no counts of these classes: does it scrape the gateways, and does `select` name its labels?")]
    Nothing,
}

/// A response of the query API.
#[derive(Debug, Deserialize)]
struct QueryAnswer {
    data: Option<QueryData>,
    #[serde(default)]
    error: String,
    /// Parts of the data are missing.
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct QueryData {
    result: Vec<QuerySample>,
}

#[derive(Debug, Deserialize)]
struct QuerySample {
    metric: BTreeMap<String, String>,
    value: (f64, String),
}

impl QuerySample {
    fn label(&self, name: &str) -> &str {
        self.metric.get(name).map_or("", String::as_str)
    }

    /// A finite value that is not negative.
    fn value(&self) -> Option<f64> {
        self.value.1.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
    }
}

/// Windows of one class, or of one of its prompt lengths, with their counts.
type CountsByWindow = BTreeMap<Duration, JudgedCount>;

/// Counts of one class in Prometheus, over every requested window.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SummedClass {
    /// All of it.
    pub(super) all: Vec<WindowCount>,
    /// By prompt length, in the order of [`LengthBucket::ALL`].
    pub(super) lengths: [Vec<WindowCount>; LengthBucket::ALL.len()],
}

/// How the last reading went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrometheusStatus {
    /// When counts were last read.
    pub(super) read_at: Option<Tick>,
    /// Until when they are used.
    pub(super) until: Tick,
    /// Why they could not be read, if the last reading failed.
    pub(super) problem: Option<String>,
}

impl PrometheusStatus {
    /// Source of the figures of classes, in a sentence.
    #[must_use]
    pub fn in_words(&self, now: Tick) -> String {
        let age = |read: Tick| format!("{} s ago", now.since(read).as_secs());
        match (&self.problem, self.read_at) {
            (None, Some(read)) => {
                format!("Budgets and burn rates are sums over all gateways, read from Prometheus {}.", age(read))
            }
            (Some(problem), Some(read)) if now < self.until => format!(
                "Prometheus cannot be read ({problem}): budgets and burn rates are sums over all gateways, of {}.",
                age(read)
            ),
            (Some(problem), _) => format!(
                "Prometheus cannot be read ({problem}): budgets and burn rates are those of this process alone."
            ),
            (None, None) => {
                "Prometheus was not read yet: budgets and burn rates are those of this process alone.".to_owned()
            }
        }
    }
}

/// Reads counts again and again; see the module.
pub struct PrometheusReader {
    client: HttpClient,
    settings: PrometheusSettings,
    recorder: Recorder,
}

impl PrometheusReader {
    /// Reads from this Prometheus for this recorder.
    #[must_use]
    pub fn new(settings: PrometheusSettings, dial: Arc<dyn Dial>, recorder: Recorder, clock: Clock) -> Self {
        let PrometheusSettings { address, headers, roots, timeout, .. } = settings.clone();
        let server = HttpServer { address, headers, roots, timeout, longest: LONGEST_ANSWER };
        PrometheusReader { client: HttpClient::new(dial, clock, server), settings, recorder }
    }

    /// Reads at the interval. Never ends.
    pub async fn run(mut self) {
        let clock = self.client.clock();
        let server = self.settings.address.authority().to_string();
        let mut told: Option<Tick> = None;
        loop {
            let read = self.read().await;
            let now = clock.now();
            let problem = read.as_ref().err().map(ToString::to_string);
            match (&problem, told) {
                (None, Some(_)) => {
                    tracing::info!(%server, "Prometheus is read again: budgets are those of all gateways");
                    told = None;
                }
                (Some(error), before) if before.is_none_or(|before| now >= before + TELLS) => {
                    tracing::warn!(%server, error, "Prometheus cannot be read: budgets will be those of this process alone");
                    told = Some(now);
                }
                (None, None) | (Some(_), _) => {}
            }
            let until = now + self.settings.every * STALE_AFTER;
            self.recorder.prometheus_read(read.map_err(|error| error.to_string()), until);
            clock.sleep_until(Some(now + self.settings.every)).await;
        }
    }

    /// The counts of all classes over all of their windows.
    async fn read(&mut self) -> Result<BTreeMap<String, SummedClass>, ReadError> {
        let windows = self.recorder.burn_windows();
        let longest = windows.last().copied().unwrap_or_default();
        let mut counts = CountsByClass::default();
        let mut is_recorded = false;
        for &window in &windows {
            is_recorded = false;
            if !alerts::is_counted_directly(window) {
                let recorded = self.ask(&alerts::recorded_counts(window, &self.settings.select)).await?;
                is_recorded = !recorded.is_empty();
                counts.add_recorded(window, &recorded);
            }
            if !is_recorded {
                let counted = self.ask(&alerts::counted(window, &self.settings.select)).await?;
                counts.add_counted(window, &counted);
            }
        }
        if !self.recorder.names_any(counts.0.keys()) {
            return Err(ReadError::Nothing);
        }
        let since = self.ask(&alerts::first_seen(is_recorded, longest, &self.settings.select)).await?;
        Ok(counts.with_ages(&windows, &since))
    }

    /// One query, at this moment.
    async fn ask(&mut self, query: &str) -> Result<Vec<QuerySample>, ReadError> {
        let timeout = self.settings.timeout.as_secs_f64();
        let body = format!("query={}&timeout={timeout}s", utf8_percent_encode(query, NON_ALPHANUMERIC));
        let answer = self.client.post("/api/v1/query", "application/x-www-form-urlencoded", &Bytes::from(body)).await?;
        let QueryAnswer { data, error, warnings } = serde_json::from_slice(&answer)?;
        match (data, warnings.is_empty()) {
            (Some(data), true) => Ok(data.result),
            (Some(_), false) => Err(ReadError::Query(warnings.join("; "))),
            (None, _) => Err(ReadError::Query(error)),
        }
    }
}

/// Counts as they come in, by class and length; the empty length is all of a class.
#[derive(Debug, Default)]
struct CountsByClass(BTreeMap<String, BTreeMap<String, CountsByWindow>>);

impl CountsByClass {
    fn at(&mut self, sample: &QuerySample, length: &str, window: Duration) -> &mut JudgedCount {
        let class = self.0.entry(sample.label("class").to_owned()).or_default();
        class.entry(length.to_owned()).or_default().entry(window).or_default()
    }

    /// Judged and missed requests, of the class and of its lengths.
    fn add_recorded(&mut self, window: Duration, samples: &[QuerySample]) {
        let mut missed = Vec::new();
        for sample in samples {
            let Some(value) = sample.value() else { continue };
            match sample.label("__name__").contains("slo_judged") {
                true => self.at(sample, sample.label("length"), window).judged += value.round() as u64,
                false => missed.push((sample, value.round() as u64)),
            }
        }
        for (sample, missed) in missed {
            let count = self.at(sample, sample.label("length"), window);
            count.met = count.judged.saturating_sub(missed);
        }
    }

    /// Judged and met requests by length, whose sum is the class.
    fn add_counted(&mut self, window: Duration, samples: &[QuerySample]) {
        for sample in samples {
            let Some(value) = sample.value() else { continue };
            let (value, is_met) = (value.round() as u64, sample.label("counted") == "met");
            let length = sample.label("length");
            for length in [Some(""), Some(length).filter(|length| !length.is_empty())].into_iter().flatten() {
                let count = self.at(sample, length, window);
                *if is_met { &mut count.met } else { &mut count.judged } += value;
            }
        }
    }

    /// The counts over all windows, with the part of each that Prometheus has seen.
    fn with_ages(self, windows: &[Duration], first_seen: &[QuerySample]) -> BTreeMap<String, SummedClass> {
        let age_of = |class: &str| {
            let sample = first_seen.iter().find(|sample| sample.label("class") == class)?;
            Duration::try_from_secs_f64(sample.value.0 - sample.value()?).ok()
        };
        let summed = |(class, lengths): (String, BTreeMap<String, CountsByWindow>)| {
            let age = age_of(&class).unwrap_or_default();
            let of = |length: &str| -> Vec<WindowCount> {
                let counts = lengths.get(length);
                let one = |window: &Duration| {
                    let known = counts.and_then(|counts| counts.get(window)).copied();
                    let JudgedCount { met, judged } = known.unwrap_or_default();
                    // Extrapolation may round the two apart.
                    let count = JudgedCount { met: met.min(judged), judged };
                    WindowCount { window: *window, covered: age.min(*window), count }
                };
                windows.iter().map(one).collect()
            };
            (class, SummedClass { all: of(""), lengths: LengthBucket::ALL.map(|length| of(length.as_str())) })
        };
        self.0.into_iter().map(summed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(86_400);

    fn samples(text: &str) -> Vec<QuerySample> {
        let answer: QueryAnswer = serde_json::from_str(text).unwrap();
        answer.data.unwrap().result
    }

    #[test]
    fn counters_add_up_to_classes_and_recorded_series_are_taken_as_they_are() {
        let mut counts = CountsByClass::default();
        counts.add_counted(
            HOUR,
            &samples(
                r#"{"status": "success", "data": {"resultType": "vector", "result": [
                    {"metric": {"class": "chat", "counted": "judged", "length": "short"}, "value": [100.5, "10.2"]},
                    {"metric": {"class": "chat", "counted": "judged", "length": "long"}, "value": [100.5, "5"]},
                    {"metric": {"class": "chat", "counted": "met", "length": "short"}, "value": [100.5, "10.9"]},
                    {"metric": {"class": "chat", "counted": "met", "length": "long"}, "value": [100.5, "NaN"]}]}}"#,
            ),
        );
        counts.add_recorded(
            DAY,
            &samples(
                r#"{"status": "success", "data": {"resultType": "vector", "result": [
                    {"metric": {"__name__": "class:slo_missed:increase1d", "class": "chat"}, "value": [100.5, "3"]},
                    {"metric": {"__name__": "class:slo_judged:increase1d", "class": "chat"}, "value": [100.5, "40"]},
                    {"metric": {"__name__": "class_length:slo_judged:increase1d", "class": "chat", "length": "long"}, "value": [100.5, "9"]},
                    {"metric": {"__name__": "class_length:slo_missed:increase1d", "class": "chat", "length": "long"}, "value": [100.5, "0"]}]}}"#,
            ),
        );
        let first_seen = samples(r#"{"data": {"result": [{"metric": {"class": "chat"}, "value": [8000, "800"]}]}}"#);
        let read = counts.with_ages(&[HOUR, DAY], &first_seen);
        let class = &read["chat"];
        let told = |windows: &[WindowCount]| {
            windows.iter().map(|one| (one.covered.as_secs(), one.count.met, one.count.judged)).collect::<Vec<_>>()
        };
        assert_eq!(told(&class.all), [(3600, 11, 15), (7200, 37, 40)]);
        let [short, medium, long, _] = &class.lengths;
        assert_eq!(told(short), [(3600, 10, 10), (7200, 0, 0)], "rounded apart by extrapolation");
        assert_eq!(told(medium), [(3600, 0, 0), (7200, 0, 0)]);
        assert_eq!(told(long), [(3600, 0, 5), (7200, 9, 9)]);
    }

    #[test]
    fn what_the_figures_are_is_said_in_words() {
        let at = |seconds: u64| Tick::from_millis(seconds * 1000);
        let mut status = PrometheusStatus::default();
        assert!(status.in_words(at(1)).contains("not read yet"));
        status = PrometheusStatus { read_at: Some(at(5)), until: at(185), problem: None };
        assert!(status.in_words(at(17)).ends_with("sums over all gateways, read from Prometheus 12 s ago."));
        status.problem = Some("it answers 503".to_owned());
        assert!(
            status.in_words(at(184)).contains("(it answers 503)") && status.in_words(at(184)).contains("of 179 s ago")
        );
        assert!(status.in_words(at(185)).contains("of this process alone"));
    }
}
