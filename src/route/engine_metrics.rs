//! Reads the needed values from an engine's metrics page.
//!
//! Text exposition format, line by line as it arrives: only the current line is held, and overlong lines are
//! skipped. Knows names of vLLM, llama.cpp, SGLang and Dynamo, including older ones. Series of several
//! engine cores or models are summed (for usage the largest
//! counts).

use super::EngineMetrics;

/// Longest line that can have a needed value.
const LONGEST_LINE: usize = 4096;

/// A page being read.
#[derive(Debug, Default)]
pub struct MetricsParser {
    report: EngineMetrics,
    line: Vec<u8>,
    skips: bool,
    found: bool,
}

#[derive(Clone, Copy)]
enum MetricMeaning {
    Waiting,
    Running,
    KvUsage,
    Sleep,
}

/// Family names with `:` written as `_`, as some exporters do.
const NAMES: &[(&str, MetricMeaning)] = &[
    ("vllm_num_requests_waiting", MetricMeaning::Waiting),
    ("vllm_num_requests_running", MetricMeaning::Running),
    ("vllm_kv_cache_usage_perc", MetricMeaning::KvUsage),
    ("vllm_gpu_cache_usage_perc", MetricMeaning::KvUsage),
    ("vllm_engine_sleep_state", MetricMeaning::Sleep),
    ("llamacpp_requests_deferred", MetricMeaning::Waiting),
    ("llamacpp_requests_processing", MetricMeaning::Running),
    ("llamacpp_kv_cache_usage_ratio", MetricMeaning::KvUsage),
    ("sglang_num_queue_reqs", MetricMeaning::Waiting),
    ("sglang_num_running_reqs", MetricMeaning::Running),
    ("sglang_token_usage", MetricMeaning::KvUsage),
    ("dynamo_frontend_queued_requests", MetricMeaning::Waiting),
    ("dynamo_frontend_inflight_requests", MetricMeaning::Running),
];

impl MetricsParser {
    /// Takes a piece of the page.
    pub fn push(&mut self, mut bytes: &[u8]) {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            let (head, rest) = bytes.split_at(end);
            if self.line.is_empty() && !self.skips {
                self.read(head);
            } else {
                self.keep(head);
                let line = std::mem::take(&mut self.line);
                if !std::mem::take(&mut self.skips) {
                    self.read(&line);
                }
            }
            bytes = &rest[1..];
        }
        self.keep(bytes);
    }

    /// Ends the page. `None` if it had no needed value.
    #[must_use]
    pub fn end(mut self) -> Option<EngineMetrics> {
        if !self.skips {
            let line = std::mem::take(&mut self.line);
            self.read(&line);
        }
        self.found.then_some(self.report)
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.skips |= self.line.len() + bytes.len() > LONGEST_LINE;
        match self.skips {
            true => self.line.clear(),
            false => self.line.extend_from_slice(bytes),
        }
    }

    fn read(&mut self, line: &[u8]) {
        // Most lines are of other families, which the first letter shows.
        if !matches!(line.first(), Some(b'v' | b'l' | b's' | b'd')) || line.len() > LONGEST_LINE {
            return;
        }
        let Ok(line) = std::str::from_utf8(line) else { return };
        let name_end = line.find(['{', ' ', '\t']).unwrap_or(line.len());
        let (name, rest) = line.split_at(name_end);
        let Some(meaning) = meaning_of(name) else { return };
        let (labels, rest) = split_labels(rest);
        let value = rest.split_ascii_whitespace().next().and_then(|text| text.parse::<f64>().ok());
        let Some(value) = value.filter(|value| value.is_finite() && *value >= 0.0) else { return };
        self.note(meaning, labels, value);
    }

    fn note(&mut self, meaning: MetricMeaning, labels: &str, value: f64) {
        self.found = true;
        let report = &mut self.report;
        match meaning {
            MetricMeaning::Waiting => report.waiting = Some(report.waiting.unwrap_or(0.0) + value),
            MetricMeaning::Running => report.running = Some(report.running.unwrap_or(0.0) + value),
            MetricMeaning::KvUsage => report.kv_usage = Some(report.kv_usage.unwrap_or(0.0).max(value.min(1.0))),
            MetricMeaning::Sleep => {
                let awake = labels.contains("sleep_state=\"awake\"");
                report.asleep |= if awake { value == 0.0 } else { value > 0.0 };
            }
        }
    }
}

fn meaning_of(name: &str) -> Option<MetricMeaning> {
    let same = |ours: &str| {
        ours.len() == name.len() && ours.bytes().zip(name.bytes()).all(|(a, b)| a == b || (a == b'_' && b == b':'))
    };
    NAMES.iter().find(|(ours, _)| same(ours)).map(|(_, meaning)| *meaning)
}

/// Splits `{...}` from what follows; a `}` may occur in a quoted label value.
fn split_labels(rest: &str) -> (&str, &str) {
    let Some(inside) = rest.strip_prefix('{') else { return ("", rest) };
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in inside.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return (&inside[..at], &inside[at + 1..]),
            _ => {}
        }
    }
    ("", "")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(page: &str) -> Option<EngineMetrics> {
        let mut reader = MetricsParser::default();
        reader.push(page.as_bytes());
        reader.end()
    }

    #[test]
    fn two_engine_cores_are_added_up() {
        let page = "# HELP vllm:num_requests_waiting x\n# TYPE vllm:num_requests_waiting gauge\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 3.0\n\
            vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 4.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a } b\\\" }\"} 2.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n";
        let expected = EngineMetrics { waiting: Some(7.0), running: Some(2.0), kv_usage: Some(0.5), asleep: false };
        assert_eq!(read(page), Some(expected));
    }

    #[test]
    fn names_of_other_engines_and_older_versions_are_known() {
        let llama = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:kv_cache_usage_ratio 0.5\n";
        let sglang =
            "sglang:num_running_reqs{model_name=\"m\"} 1.0\nsglang:num_queue_reqs{} 2\nsglang:token_usage{} 0.5";
        let old = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:gpu_cache_usage_perc 0.5\r\n";
        let renamed =
            "vllm_num_requests_running 1\nvllm_num_requests_waiting 2\nvllm_kv_cache_usage_perc 0.5 1700000000\n";
        let expected = EngineMetrics { waiting: Some(2.0), running: Some(1.0), kv_usage: Some(0.5), asleep: false };
        for page in [llama, sglang, old, renamed] {
            assert_eq!(read(page), Some(expected), "{page}");
        }
        let dynamo =
            "dynamo_frontend_queued_requests{model=\"a\"} 2\ndynamo_frontend_inflight_requests{model=\"a\"} 1\n";
        assert_eq!(read(dynamo), Some(EngineMetrics { kv_usage: None, ..expected }));
    }

    #[test]
    fn pages_of_real_engines_are_read() {
        let idle = EngineMetrics { waiting: Some(0.0), running: Some(0.0), kv_usage: Some(0.0), asleep: false };
        assert_eq!(read(include_str!("../../tests/wire/vllm-0.32.0/metrics-trimmed.txt")), Some(idle));
        let dynamo = read(include_str!("../../tests/wire/dynamo-1.6.1/metrics-trimmed.txt"));
        assert_eq!(dynamo, Some(EngineMetrics { kv_usage: None, ..idle }));
    }

    #[test]
    fn a_sleeping_engine_says_so() {
        let page = |awake, level1| {
            format!(
                "vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"awake\"}} {awake}\n\
                 vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"weights_offloaded\"}} {level1}\n\
                 vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"discard_all\"}} 0.0\n"
            )
        };
        assert!(!read(&page("1.0", "0.0")).unwrap().asleep);
        assert!(read(&page("0.0", "1.0")).unwrap().asleep);
    }

    #[test]
    fn nonsense_is_no_report() {
        assert_eq!(read("<html>404</html>"), None);
        assert_eq!(read("vllm:num_requests_running NaN\nvllm:num_requests_waiting{x=\"y 1\n"), None);
        assert_eq!(read(&format!("vllm:num_requests_running{{a=\"{}\"}} 1\n", "x".repeat(5000))), None);
    }

    proptest! {
        #[test]
        fn any_cut_of_a_page_reads_the_same(cuts in proptest::collection::vec(1usize..40, 0..30), long in 0usize..6000) {
            let page = format!("x{}\nvllm:num_requests_running{{e=\"0\"}} 2\nvllm:num_requests_waiting 5", "y".repeat(long));
            let mut reader = MetricsParser::default();
            let mut rest = page.as_bytes();
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                reader.push(head);
                rest = tail;
            }
            reader.push(rest);
            prop_assert_eq!(reader.end(), read(&page));
        }

        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = MetricsParser::default();
            reader.push(&bytes);
            let _ = reader.end();
        }
    }
}
