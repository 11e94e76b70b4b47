//! Settings of the access log, persistent counts and metric labels.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;

use super::journal::HashKey;
use super::trace::Sampling;
use crate::route::settings::EngineAddress;

/// Destination of the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// One JSON object per line on stdout.
    #[default]
    Stdout,
    /// Disabled.
    Off,
}

/// The journal: a line in a file for each finished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalSettings {
    /// The current file. Rotated ones stand beside it.
    pub path: PathBuf,
    /// The key of its hashes; none: one by chance for each process.
    pub hash_key: Option<HashKey>,
    /// Size at which a file is rotated, bytes.
    pub max_size: u64,
    /// A file as old as this is rotated.
    pub max_age: Duration,
    /// Rotated files that are kept.
    pub keep: usize,
    /// Rotated files are compressed.
    pub gzip: bool,
    /// How long a line waits at most before it is handed to the system.
    pub flush: Duration,
}

impl JournalSettings {
    /// A journal at this path, with the defaults.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        let max_age = Duration::from_secs(24 * 60 * 60);
        JournalSettings {
            path,
            hash_key: None,
            max_size: 256 << 20,
            max_age,
            keep: 14,
            gzip: true,
            flush: Duration::from_secs(1),
        }
    }
}

/// The file in which the counts of classes outlive the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SloStateSettings {
    /// Its path.
    pub path: PathBuf,
    /// How often it is saved.
    pub every: Duration,
}

impl SloStateSettings {
    /// The default interval.
    pub const EVERY: Duration = Duration::from_secs(60);
}

/// The Prometheus that budgets are read from.
#[derive(Clone, Debug, PartialEq)]
pub struct PrometheusSettings {
    /// Its address; its base is the path before `/api/v1/query`.
    pub address: EngineAddress,
    /// Sent with every query.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Roots in place of the system's.
    pub roots: Option<Arc<[CertificateDer<'static>]>>,
    /// How often it is read.
    pub every: Duration,
    /// Limit on one query.
    pub timeout: Duration,
    /// Labels that distinguish these gateways from others that it scrapes.
    pub select: Vec<(String, String)>,
}

impl PrometheusSettings {
    /// How often, by default.
    pub const EVERY: Duration = Duration::from_secs(60);
    /// Limit on one query, by default.
    pub const TIMEOUT: Duration = Duration::from_secs(10);
}

/// Export of spans.
#[derive(Clone, Debug, PartialEq)]
pub struct OtlpSettings {
    /// The collector; its base is the path before `/v1/traces`.
    pub address: EngineAddress,
    /// Sent with every batch.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Roots in place of the system's.
    pub roots: Option<Arc<[CertificateDer<'static>]>>,
    /// Which traces are kept.
    pub sampling: Sampling,
    /// Attributes of the resource, beside or in place of the gateway's own.
    pub resource: Vec<(String, String)>,
}

/// Labels of the request metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricLabels {
    /// Omitted labels; series that differ only in these are counted together.
    pub dropped: Vec<RequestLabel>,
    /// Whether histograms have the label `model` too.
    pub histograms_by_model: bool,
    /// Whether each engine has series of its own.
    pub series_by_engine: bool,
}

/// A label that can be omitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestLabel {
    /// `length`.
    Length,
    /// `pool`.
    Pool,
    /// `model`.
    Model,
    /// `tenant`.
    Tenant,
}

impl RequestLabel {
    /// The label's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            RequestLabel::Length => "length",
            RequestLabel::Pool => "pool",
            RequestLabel::Model => "model",
            RequestLabel::Tenant => "tenant",
        }
    }
}
