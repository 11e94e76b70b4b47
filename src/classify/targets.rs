//! Latency targets that a request sets for itself.

use std::time::Duration;

use http::HeaderMap;

/// How a class treats `x-slo-ttft-ms` and `x-slo-tpot-ms`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TargetHeaders {
    /// Ignored.
    #[default]
    Off,
    /// The stricter of class and header applies.
    Tighten,
    /// The header applies, even where it is looser than the class.
    MayLoosen,
}

/// The targets of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// From `x-slo-ttft-ms`.
    pub ttft: Option<Duration>,
    /// From `x-slo-tpot-ms`.
    pub tpot: Option<Duration>,
}

impl TargetHeaders {
    /// Reads the headers as far as the class allows.
    ///
    /// A value is a positive number of milliseconds, decimals allowed, up to a day. An invalid value, or two
    /// different ones, are ignored: the class's own objective then applies, because a wrong header should
    /// not cost a client its response.
    #[must_use]
    pub fn read(self, headers: &HeaderMap) -> Targets {
        match self {
            TargetHeaders::Off => Targets::default(),
            TargetHeaders::Tighten | TargetHeaders::MayLoosen => {
                Targets { ttft: millis(headers, "x-slo-ttft-ms"), tpot: millis(headers, "x-slo-tpot-ms") }
            }
        }
    }
}

fn millis(headers: &HeaderMap, name: &str) -> Option<Duration> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    if values.any(|other| other != first) {
        return None;
    }
    let text = first.to_str().ok()?.trim();
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = is_plain.then(|| text.parse().ok())??;
    let day = 24.0 * 3600.0 * 1000.0;
    (number > 0.0 && number <= day).then(|| Duration::from_secs_f64(number / 1000.0)).filter(|d| !d.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn read(values: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-slo-ttft-ms", HeaderValue::try_from(*value).unwrap());
        }
        TargetHeaders::Tighten.read(&headers).ttft
    }

    #[test]
    fn a_positive_number_of_milliseconds_is_read() {
        assert_eq!(read(&["250"]), Some(Duration::from_millis(250)));
        assert_eq!(read(&["33.5"]), Some(Duration::from_micros(33_500)));
        assert_eq!(read(&["250", "250"]), Some(Duration::from_millis(250)));
    }

    #[test]
    fn anything_else_is_as_if_absent() {
        for value in ["", "0", "-5", "1e3", "inf", "NaN", "250ms", "1.2.3", ".", "+5", "0.0000000001", "999999999999"] {
            assert_eq!(read(&[value]), None, "{value}");
        }
        assert_eq!(read(&["250", "300"]), None);
        assert_eq!(read(&[]), None);
    }

    #[test]
    fn a_class_that_does_not_want_them_does_not_read_them() {
        let mut headers = HeaderMap::new();
        headers.insert("x-slo-tpot-ms", HeaderValue::from_static("40"));
        assert_eq!(TargetHeaders::Off.read(&headers), Targets::default());
        assert_eq!(TargetHeaders::MayLoosen.read(&headers).tpot, Some(Duration::from_millis(40)));
    }
}
