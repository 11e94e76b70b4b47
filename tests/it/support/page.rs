//! A page of metrics, read as Prometheus reads it.

use std::collections::BTreeMap;

/// All samples of a page.
#[derive(Clone, Debug)]
pub struct Page {
    pub text: String,
    samples: Vec<Sample>,
}

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Page {
    pub fn read(text: String) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let samples = lines.map(sample).collect();
        Page { text, samples }
    }

    /// The sum of all samples of this name that carry these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).map(|sample| sample.value).sum()
    }

    /// How many samples of this name carry these labels.
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> usize {
        self.find(name, labels).count()
    }

    /// Series on the page.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    fn find<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        let fits = move |sample: &&Sample| {
            sample.name == name && labels.iter().all(|(k, v)| sample.labels.get(*k).is_some_and(|held| held == v))
        };
        self.samples.iter().filter(fits)
    }
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.trim_end_matches('}').split("\",").filter_map(|pair| {
        let (key, value) = pair.split_once("=\"")?;
        Some((key.to_owned(), value.trim_end_matches('"').to_owned()))
    });
    Sample { name: name.to_owned(), labels: labels.collect(), value: value.parse().expect("a number") }
}
