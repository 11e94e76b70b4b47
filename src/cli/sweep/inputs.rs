//! Values and input files of the sweep's command line: lengths and arrivals.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, bail};

use crate::load::arrivals::ArrivalProcess;
use crate::load::lengths::{LengthModel, TokenLengths};

/// Longest line of an input file, in bytes.
const LONGEST_LINE: usize = 64 << 10;

/// Most lines of an input file.
const MOST_LINES: usize = 20_000_000;

/// Parses lengths: `512`, `P50:P95`, or `@FILE` with one length per line.
///
/// # Errors The text or the file is invalid.
pub fn lengths(flag: &str, text: &str) -> anyhow::Result<TokenLengths> {
    let way_out =
        || format!("{flag}: {text:?} is not a length; write 512, P50:P95 such as 900:6000, or @FILE with one a line");
    if let Some(file) = text.strip_prefix('@') {
        let all = numbers(Path::new(file)).with_context(|| format!("{flag}: cannot use {file}"))?;
        let all = all.into_iter().map(|columns| whole(columns[0])).collect::<anyhow::Result<Vec<u64>>>();
        let all = all.with_context(|| format!("{flag}: {file}"))?;
        return TokenLengths::recorded(file, all).with_context(|| format!("{flag}: {file}"));
    }
    if let Some((p50, p95)) = text.split_once(':') {
        let number = |part: &str| part.trim().parse::<f64>().with_context(way_out);
        return TokenLengths::lognormal(number(p50)?, number(p95)?).with_context(|| flag.to_owned());
    }
    let tokens: u64 = text.parse().ok().filter(|tokens| *tokens > 0).with_context(way_out)?;
    Ok(TokenLengths::Fixed { tokens })
}

/// Reads pairs of prompt and output tokens, one pair per line.
///
/// # Errors The file cannot be read, or a line is not a pair.
pub fn length_pairs(file: &Path) -> anyhow::Result<LengthModel> {
    let shown = file.display();
    let all = numbers(file).with_context(|| format!("--lengths: cannot use {shown}"))?;
    let pair = |columns: Vec<f64>| match columns[..] {
        [input, output] => Ok((whole(input)?, whole(output)?)),
        _ => bail!("a line has {} columns; write INPUT,OUTPUT", columns.len()),
    };
    let pairs: anyhow::Result<Vec<(u64, u64)>> = all.into_iter().map(pair).collect();
    let pairs = pairs.with_context(|| format!("--lengths: {shown}"))?;
    LengthModel::pairs(&shown.to_string(), pairs).with_context(|| format!("--lengths: {shown}"))
}

/// Parses arrivals: `poisson`, `constant`, `gamma:BURSTINESS`, or `trace:FILE` with one timestamp in seconds
/// per line.
///
/// # Errors The text or the file is invalid.
pub fn arrivals(text: &str) -> anyhow::Result<ArrivalProcess> {
    match text.split_once(':') {
        None if text == "poisson" => Ok(ArrivalProcess::Poisson),
        None if text == "constant" => Ok(ArrivalProcess::Constant),
        Some(("gamma", burstiness)) => {
            let burstiness =
                burstiness.parse().with_context(|| format!("--arrivals: {burstiness:?} is not a number"))?;
            ArrivalProcess::gamma(burstiness).context("--arrivals")
        }
        Some(("trace", file)) => {
            let times = numbers(Path::new(file)).with_context(|| format!("--arrivals: cannot use {file}"))?;
            let times: Vec<f64> = times.into_iter().map(|columns| columns[0]).collect();
            ArrivalProcess::trace(file, &times).with_context(|| format!("--arrivals: {file}"))
        }
        _ => bail!("--arrivals: {text:?} is not valid; write poisson, constant, gamma:BURSTINESS or trace:FILE"),
    }
}

/// Parses a class and its weight: `NAME` or `NAME=WEIGHT`.
///
/// # Errors The weight is not a positive number.
pub fn class_weight(text: &str) -> anyhow::Result<(&str, f64)> {
    let Some((name, weight)) = text.rsplit_once('=') else { return Ok((text, 1.0)) };
    let weight = weight.parse::<f64>().ok().filter(|weight| weight.is_finite() && *weight > 0.0);
    let weight = weight.with_context(|| format!("--class {text}: the weight must be a number above 0"))?;
    Ok((name, weight))
}

fn whole(number: f64) -> anyhow::Result<u64> {
    if number < 1.0 || number.fract() != 0.0 || number > 1e12 {
        bail!("{number} is not a length; write positive integers");
    }
    Ok(number as u64)
}

/// Reads the numbers of each line, separated by commas or blanks. A first line of words is a heading; empty
/// lines and lines that begin with `#` are ignored.
fn numbers(file: &Path) -> anyhow::Result<Vec<Vec<f64>>> {
    let opened = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let mut found: Vec<Vec<f64>> = Vec::new();
    let mut reader = BufReader::new(opened);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let length = std::io::Read::take(&mut reader, LONGEST_LINE as u64).read_until(b'\n', &mut line)?;
        if length == 0 {
            break;
        }
        if length == LONGEST_LINE {
            bail!("line {number} is longer than {LONGEST_LINE} bytes");
        }
        let text = std::str::from_utf8(&line).with_context(|| format!("line {number} is not UTF-8"))?.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let parts = text.split([',', ' ', '\t', ';']).map(str::trim).filter(|part| !part.is_empty());
        let parsed: Result<Vec<f64>, _> = parts.map(str::parse::<f64>).collect();
        match parsed {
            Ok(columns) if !columns.is_empty() => found.push(columns),
            _ if found.is_empty() && number == 1 => {}
            _ => bail!("line {number} is not made of numbers: {:?}", text.chars().take(40).collect::<String>()),
        }
        if found.len() > MOST_LINES {
            bail!("it has more than {MOST_LINES} lines; a sample is enough");
        }
    }
    if found.is_empty() {
        bail!("it contains no number");
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn told<T>(found: anyhow::Result<T>) -> String {
        found.err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    #[test]
    fn lengths_are_a_number_two_quantiles_or_a_file() {
        assert_eq!(lengths("--input", "512").unwrap(), TokenLengths::Fixed { tokens: 512 });
        assert_eq!(lengths("--input", "900:6000").unwrap(), TokenLengths::Lognormal { p50: 900.0, p95: 6000.0 });
        let recorded = file("tokens\n# a remark\n\n10\n30\n");
        let found = lengths("--input", &format!("@{}", recorded.path().display())).unwrap();
        assert!((found.mean() - 20.0).abs() < 1e-9);
        for bad in ["", "0", "-1", "1.5", "many", "10:", "10:x", "6000:900", "nan:nan", "@/nowhere"] {
            assert!(told(lengths("--input", bad)).contains("--input"), "{bad}: {}", told(lengths("--input", bad)));
        }
    }

    #[test]
    fn a_file_of_numbers_reports_the_invalid_line() {
        for (text, expected) in [
            ("", "it contains no number"),
            ("input,output\n", "it contains no number"),
            ("1,2\n3,x\n", "line 2 is not made of numbers: \"3,x\""),
            ("1,2\n3\n", "a line has 1 columns; write INPUT,OUTPUT"),
            ("1,2,3\n", "a line has 3 columns"),
            ("1,-2\n", "-2 is not a length"),
            ("1,nan\n", "NaN is not a length"),
            ("1,0\n", "0 is not a length"),
        ] {
            let file = file(text);
            assert!(
                told(length_pairs(file.path())).contains(expected),
                "{text:?}: {}",
                told(length_pairs(file.path()))
            );
        }
        let long = file(&"7".repeat(LONGEST_LINE * 2));
        assert!(told(length_pairs(long.path())).contains("longer than"));
        let binary = file("");
        std::fs::write(binary.path(), [0xff, 0xfe, b'\n']).unwrap();
        assert!(told(length_pairs(binary.path())).contains("line 1 is not UTF-8"));
        assert!(length_pairs(file("input output\n5 6\n7,8\n").path()).is_ok());
    }

    #[test]
    fn arrivals_have_names_and_report_missing_values() {
        assert_eq!(arrivals("poisson").unwrap(), ArrivalProcess::Poisson);
        assert_eq!(arrivals("gamma:0.5").unwrap(), ArrivalProcess::gamma(0.5).unwrap());
        let sorted = file("0.5\n1.5\n1.75\n");
        assert!(arrivals(&format!("trace:{}", sorted.path().display())).is_ok());
        let unsorted = file("1\n0.5\n");
        assert!(told(arrivals(&format!("trace:{}", unsorted.path().display()))).contains("sort the trace"));
        for bad in ["", "uniform", "gamma", "gamma:0", "gamma:x", "trace:/nowhere"] {
            assert!(told(arrivals(bad)).contains("--arrivals"), "{bad}");
        }
    }

    #[test]
    fn classes_may_carry_a_weight() {
        assert_eq!(class_weight("chat").unwrap(), ("chat", 1.0));
        assert_eq!(class_weight("chat=2.5").unwrap(), ("chat", 2.5));
        for bad in ["chat=", "chat=0", "chat=-1", "chat=nan", "chat=inf"] {
            assert!(class_weight(bad).is_err(), "{bad}");
        }
    }
}
