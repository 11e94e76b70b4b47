//! Options of the commands that send requests: the service and its objectives.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Map, Value};

use super::numbers;
use crate::config::{self, Environment, ProcessEnvironment, Settings, engine_address};
use crate::dial::{Roots, Sockets};
use crate::forward::settings::Timeouts;
use crate::judge::{Objective, Objectives};
use crate::load::LoadTarget;
use crate::load::presets::{PRESETS, Preset};
use crate::types::ApiPath;

/// A class of the command line that is the only one.
pub(super) const ONLY_CLASS: &str = "default";

/// Objectives of a service.
#[derive(Clone, Debug, clap::Args)]
pub struct PromiseArgs {
    /// Settings file of a gateway, for its classes.
    #[arg(short, long, value_name = "FILE", help_heading = "What is promised")]
    pub config: Option<PathBuf>,
    /// Limits of MLPerf Inference: mlperf/llama3.1-8b-interactive and others.
    #[arg(long, value_name = "NAME", help_heading = "What is promised", conflicts_with = "config")]
    pub preset: Option<String>,
    /// TTFT threshold.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::within::<1, 3_600_000>, help_heading = "What is promised", conflicts_with_all = ["config", "preset"])]
    pub ttft: Option<f64>,
    /// TPOT threshold.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::within::<1, 3_600_000>, help_heading = "What is promised", conflicts_with_all = ["config", "preset"])]
    pub tpot: Option<f64>,
    /// Threshold of the largest gap between tokens.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::within::<1, 3_600_000>, help_heading = "What is promised", conflicts_with_all = ["config", "preset"])]
    pub itl: Option<f64>,
    /// Threshold of the time to the end.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::within::<1, 3_600_000>, help_heading = "What is promised", conflicts_with_all = ["config", "preset"])]
    pub e2e: Option<f64>,
    /// Share of requests that must keep all thresholds together.
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = numbers::within::<1, 1_000>, help_heading = "What is promised")]
    pub target: f64,
    /// Time limit of a request, without one in the settings file.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, value_parser = numbers::within::<100, 86_400_000>, help_heading = "What is promised")]
    pub time_limit: f64,
}

/// Requests to a service, and access to it.
#[derive(Clone, Debug, clap::Args)]
pub struct EndpointArgs {
    /// Model [default: the only one that the service lists].
    #[arg(long, help_heading = "What is asked")]
    pub model: Option<String>,
    /// Longest prompt plus output; longer ones are clipped.
    #[arg(long, value_name = "TOKENS", value_parser = numbers::count, help_heading = "What is asked")]
    pub max_context: Option<usize>,
    /// Path of the requests.
    #[arg(long, default_value = "/v1/chat/completions", help_heading = "What is asked")]
    pub path: String,
    /// Request non-streaming responses.
    #[arg(long, help_heading = "What is asked")]
    pub no_stream: bool,
    /// Let responses end where the model ends them, not at the planned length.
    #[arg(long, help_heading = "What is asked")]
    pub respect_eos: bool,
    /// JSON object whose fields go into every body.
    #[arg(long, value_name = "JSON", help_heading = "What is asked")]
    pub extra_body: Option<String>,
    /// Header of every request, as NAME: VALUE; may be repeated.
    #[arg(long = "header", value_name = "HEADER", help_heading = "What is asked")]
    pub headers: Vec<String>,
    /// File with the API key that is sent as a bearer.
    #[arg(long, value_name = "FILE", help_heading = "What stands behind it")]
    pub api_key_file: Option<PathBuf>,
    /// Root certificates (PEM) in place of the system's.
    #[arg(long, value_name = "FILE", help_heading = "What stands behind it")]
    pub ca_file: Option<PathBuf>,
}

impl PromiseArgs {
    /// Objectives of the flags, or of the preset.
    ///
    /// # Errors
    /// There are none.
    pub fn objectives(&self) -> anyhow::Result<Objectives> {
        match &self.preset {
            Some(name) => {
                let names = PRESETS.map(|preset| preset.name).join(", ");
                let preset = Preset::find(name);
                Ok(preset.with_context(|| format!("--preset {name} does not exist; presets are {names}"))?.objectives())
            }
            None => self.thresholds(),
        }
    }

    /// Time limits of the flags.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        let total = Duration::from_secs_f64(self.time_limit);
        let d = Timeouts::default();
        let (first_token, idle) = (d.first_token.min(total), d.idle.min(total));
        Timeouts { first_token, idle, total, response_head: total, ..d }
    }

    /// The settings of the file, if one is given.
    ///
    /// # Errors The file cannot be read, or has problems.
    pub fn settings(&self) -> anyhow::Result<Option<Settings>> {
        let Some(file) = &self.config else { return Ok(None) };
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let settings = config::load(&text, &WithoutSecrets(ProcessEnvironment::of(file)));
        settings.map(Some).map_err(|problems| {
            let lines: Vec<String> = problems.iter().map(|problem| format!("{}:{problem}", file.display())).collect();
            anyhow::anyhow!("{}", lines.join("\n"))
        })
    }

    fn thresholds(&self) -> anyhow::Result<Objectives> {
        let objective = |seconds: Option<f64>| {
            seconds.map(|seconds| Objective { threshold: Duration::from_secs_f64(seconds), attainment: self.target })
        };
        let objectives = Objectives {
            ttft: objective(self.ttft),
            tpot: objective(self.tpot),
            itl: objective(self.itl),
            e2e: objective(self.e2e),
            joint_target: self.target,
            ..Objectives::default()
        };
        if objectives.is_empty() {
            bail!("no objectives: give --ttft, --tpot, --itl or --e2e, a --preset, or -c FILE --class NAME");
        }
        Ok(objectives)
    }
}

impl EndpointArgs {
    /// The service.
    ///
    /// # Errors
    /// The URL, a header, the key or the certificates cannot be used.
    pub fn target(&self, url: &str) -> anyhow::Result<LoadTarget> {
        let address = engine_address(url).map_err(|bad| match bad.meant {
            Some(meant) => anyhow::anyhow!("{url} {}; did you mean {meant}?", bad.wrong),
            None => anyhow::anyhow!("{url} {}", bad.wrong),
        })?;
        let mut headers = HeaderMap::new();
        for header in &self.headers {
            let (name, value) = header.split_once(':').with_context(|| "--header: write NAME: VALUE".to_owned())?;
            let name: HeaderName = name.trim().parse().context("--header: invalid name")?;
            let mut value: HeaderValue =
                value.trim().parse().with_context(|| format!("--header: the value of {name} cannot be sent"))?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        if let Some(file) = &self.api_key_file {
            let key = std::fs::read_to_string(file)
                .with_context(|| format!("--api-key-file: cannot read {}", file.display()))?;
            let value = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
            let mut value =
                value.with_context(|| format!("--api-key-file: {} contains no valid key", file.display()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let roots = self.ca_file.as_deref().map(roots_of).transpose()?;
        Ok(LoadTarget { dial: Arc::new(Sockets::new()), address, roots, headers })
    }

    /// The path of the requests.
    ///
    /// # Errors The path is not supported.
    pub fn endpoint(&self) -> anyhow::Result<ApiPath> {
        let endpoint = ApiPath::relayed(self.path.trim_end_matches('/'))
            .filter(|endpoint| endpoint.dialect().generates() || endpoint.path() == "/v1/embeddings");
        endpoint.with_context(|| {
            format!("--path {}: unsupported path; use /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages or /v1/embeddings", self.path)
        })
    }

    /// Fields of every body.
    ///
    /// # Errors The text is not a JSON object.
    pub fn extra(&self) -> anyhow::Result<Map<String, Value>> {
        let Some(text) = &self.extra_body else { return Ok(Map::new()) };
        match serde_json::from_str(text).context("--extra-body is not JSON")? {
            Value::Object(map) => Ok(map),
            _ => bail!("--extra-body is not a JSON object such as {{\"temperature\": 0}}"),
        }
    }
}

/// Content of a secret's file that is not on this machine; long enough for a key of hashes.
pub(super) const ABSENT_SECRET: &[u8] = b"absent-on-this-machine";

/// The surroundings of a settings file on a machine that makes load: it needs the classes, and has neither the gateway's keys
/// nor its certificates.
pub(super) struct WithoutSecrets(pub ProcessEnvironment);

impl Environment for WithoutSecrets {
    fn variable(&self, name: &str) -> Option<String> {
        self.0.variable(name).or_else(|| Some("unset".to_owned()))
    }

    fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0.file(path).or_else(|_| Ok(ABSENT_SECRET.to_vec()))
    }
}

fn roots_of(file: &Path) -> anyhow::Result<Roots> {
    let shown = file.display();
    let all = CertificateDer::pem_file_iter(file).with_context(|| format!("--ca-file: cannot read {shown}"))?;
    let all: Result<Vec<_>, _> = all.collect();
    let all = all.with_context(|| format!("--ca-file: {shown} is not a PEM file"))?;
    if all.is_empty() {
        bail!("--ca-file: {shown} contains no certificate");
    }
    Ok(all.into())
}
