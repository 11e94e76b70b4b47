//! Which exposition format a scraper prefers, and whether it takes it compressed.

use http::HeaderMap;
use http::header::{ACCEPT, ACCEPT_ENCODING};

/// Prometheus text, version 0.0.4: the default format.
pub(super) const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// OpenMetrics text, version 1.0.0.
pub(super) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Whether OpenMetrics has a higher quality than plain text. Equal ones (a browser's `*/*`,
/// no header at all) mean text.
pub(super) fn prefers_openmetrics(headers: &HeaderMap) -> bool {
    let (mut open, mut text) = (Quality::default(), Quality::default());
    let lines = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok());
    for range in lines.flat_map(|line| line.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
        let quality = weight(&parameters);
        match kind.as_str() {
            "application/openmetrics-text" if version_fits(&parameters, "1.0.0") => open.exact(quality),
            "text/plain" if version_fits(&parameters, "0.0.4") => text.exact(quality),
            "application/*" => open.loose(quality),
            "text/*" => text.loose(quality),
            "*/*" => {
                open.any(quality);
                text.any(quality);
            }
            _ => {}
        }
    }
    open.value() > text.value()
}

/// Whether gzip is among the accepted codings.
pub(super) fn takes_gzip(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|line| line.to_str().ok());
    let mut quality = Quality::default();
    for coding in lines.flat_map(|line| line.split(',')) {
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default().to_ascii_lowercase();
        let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
        match name.as_str() {
            "gzip" | "x-gzip" => quality.exact(weight(&parameters)),
            "*" => quality.any(weight(&parameters)),
            _ => {}
        }
    }
    quality.value() > 0.0
}

fn weight(parameters: &[(&str, &str)]) -> f32 {
    let stated = parameters.iter().find(|(name, _)| name.trim().eq_ignore_ascii_case("q"));
    stated.map_or(1.0, |(_, value)| value.trim().parse::<f32>().unwrap_or(0.0)).clamp(0.0, 1.0)
}

/// A range without a version takes ours. Another version is not what we would send.
fn version_fits(parameters: &[(&str, &str)], ours: &str) -> bool {
    let stated = parameters.iter().find(|(name, _)| name.trim().eq_ignore_ascii_case("version"));
    stated.is_none_or(|(_, version)| version.trim().trim_matches('"') == ours)
}

/// The quality of a format: the best of the most specific ranges that fit it.
#[derive(Default)]
struct Quality {
    exact: Option<f32>,
    loose: Option<f32>,
    any: Option<f32>,
}

impl Quality {
    fn exact(&mut self, quality: f32) {
        self.exact = Some(self.exact.map_or(quality, |best| best.max(quality)));
    }

    fn loose(&mut self, quality: f32) {
        self.loose = Some(quality);
    }

    fn any(&mut self, quality: f32) {
        self.any = Some(quality);
    }

    fn value(&self) -> f32 {
        self.exact.or(self.loose).or(self.any).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefers(accept: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, accept.parse().unwrap());
        prefers_openmetrics(&headers)
    }

    #[test]
    fn gzip_is_sent_only_where_it_is_taken() {
        let takes = |line: &str| takes_gzip(&HeaderMap::from_iter([(ACCEPT_ENCODING, line.parse().unwrap())]));
        for line in ["gzip", "GZIP", "zstd, gzip;q=0.1", "*", "br;q=1.0, *;q=0.5", "x-gzip"] {
            assert!(takes(line), "{line}");
        }
        for line in ["", "identity", "br", "gzip;q=0", "gzip;q=0, *", "*;q=0", "gzipped"] {
            assert!(!takes(line), "{line}");
        }
        assert!(!takes_gzip(&HeaderMap::new()));
    }

    #[test]
    fn prometheus_gets_openmetrics_as_it_asks() {
        assert!(prefers(
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,\
             text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
        ));
        assert!(prefers("application/openmetrics-text; version=\"1.0.0\"; q=0.9, text/plain; q=0.8"));
    }

    #[test]
    fn text_wins_where_it_is_preferred_equal_or_nothing_is_said() {
        assert!(!prefers_openmetrics(&HeaderMap::new()));
        assert!(!prefers("*/*"));
        assert!(!prefers("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.5"));
        assert!(!prefers("text/plain, application/openmetrics-text"));
        assert!(!prefers("text/html,application/xhtml+xml,*/*;q=0.8"));
    }

    #[test]
    fn a_refused_or_unknown_format_is_not_chosen() {
        assert!(!prefers("application/openmetrics-text;q=0"));
        assert!(!prefers("application/openmetrics-text;version=0.0.1"));
        assert!(!prefers("application/openmetrics-text;q=high"));
        assert!(prefers("application/openmetrics-text"), "alone, it is the only one asked for");
        assert!(prefers("application/openmetrics-text;q=0.2, text/plain;q=0, */*;q=0.9"));
    }
}
