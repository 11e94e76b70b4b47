//! Questions to a service before it is put under load: which models it has, whether it takes what the workload sends, and how
//! long its tokens are.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::Full;
use serde_json::Value;

use super::connections::{FullRequest, LoadConnections};
use super::exchange::ClassHeads;
use super::plan::LoadTarget;
use super::prompts::{PromptCalibration, PromptMaker};
use super::workload::Workload;
use crate::clock::Clock;

/// Longest wait for the response to a probe.
const PATIENCE: Duration = Duration::from_secs(120);

/// Words of the probes.
const PROBES: [u64; 6] = [16, 16, 64, 64, 256, 256];

/// Longest part of a service's error that is repeated.
const LONGEST_ERROR: usize = 300;

/// Why a service cannot be measured.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// No response.
    #[error("{0}")]
    Unreachable(String),
    /// It answered with an error.
    #[error("{path} answered {status}: {error}")]
    Refused {
        /// Path of the probe.
        path: String,
        /// Status.
        status: StatusCode,
        /// The service's own words, shortened.
        error: String,
    },
    /// The response is not a JSON object, or lacks a required member.
    #[error("{path} answered something else than the OpenAI API does: {what}")]
    Strange {
        /// Path of the probe.
        path: String,
        /// The problem.
        what: &'static str,
    },
}

impl ProbeError {
    /// The status that was answered.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            ProbeError::Refused { status, .. } => Some(*status),
            ProbeError::Unreachable(_) | ProbeError::Strange { .. } => None,
        }
    }
}

/// Results of the probes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProbeAnswer {
    /// How words become tokens.
    pub calibration: PromptCalibration,
    /// Whether it takes `ignore_eos`.
    pub takes_ignore_eos: bool,
}

/// A service that is asked.
pub struct ServiceProbe {
    clock: Clock,
    connections: Arc<LoadConnections>,
}

impl ServiceProbe {
    /// A probe of this service.
    #[must_use]
    pub fn new(clock: Clock, target: &LoadTarget) -> Self {
        ServiceProbe { clock, connections: Arc::new(LoadConnections::new(clock, target.clone())) }
    }

    /// The models that the service lists.
    ///
    /// # Errors No response, or no list.
    pub async fn models(&self) -> Result<Vec<String>, ProbeError> {
        let path = "/v1/models";
        let target = self.connections.target();
        let mut request = FullRequest::new(Full::default());
        *request.headers_mut() = ClassHeads::bare(target);
        let answer = self.ask(path, request, Method::GET).await?;
        let models = answer["data"].as_array().ok_or(ProbeError::Strange { path: path.into(), what: "no list" })?;
        Ok(models.iter().filter_map(|model| model["id"].as_str()).map(str::to_owned).collect())
    }

    /// Sends a few prompts of known lengths, and calibrates by the reported usage. `ignore_eos` is disabled
    /// if the service rejects it.
    ///
    /// # Errors No response, or a rejection.
    pub async fn calibrate(&self, workload: &Workload, seed: u64) -> Result<ProbeAnswer, ProbeError> {
        let plain = Workload { ignore_eos: false, ..workload.clone() };
        let first = self.probe(workload, PROBES[0], seed).await;
        let (asks, first) =
            match first {
                Err(ProbeError::Refused {
                    status: StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY, ..
                }) if workload.ignore_eos => (&plain, self.probe(&plain, PROBES[0], seed).await?),
                first => (workload, first?),
            };
        let mut probes: Vec<(u64, u64)> = first.map(|tokens| (PROBES[0], tokens)).into_iter().collect();
        for (number, words) in (1..).zip(&PROBES[1..]) {
            let tokens = self.probe(asks, *words, seed.wrapping_add(number)).await?;
            probes.extend(tokens.map(|tokens| (*words, tokens)));
        }
        let calibration = PromptCalibration::of_probes(&probes).unwrap_or_default();
        Ok(ProbeAnswer { calibration, takes_ignore_eos: asks.ignore_eos })
    }

    /// Prompt tokens that the service reports for a prompt of this many words.
    async fn probe(&self, workload: &Workload, words: u64, seed: u64) -> Result<Option<u64>, ProbeError> {
        let prompt = PromptMaker::new(PromptCalibration::default(), 0.0, 1, seed).prompt(words);
        let mut request = FullRequest::new(Full::new(workload.body(&prompt, 1, false)));
        // The headers of the first class: a gateway may ask for them.
        let first = workload.classes.first().map(|class| &class.load);
        let target = self.connections.target();
        *request.headers_mut() = first.map_or_else(|| ClassHeads::bare(target), |class| ClassHeads::of(class, target));
        let answer = self.ask(workload.endpoint.path(), request, Method::POST).await?;
        let usage = &answer["usage"];
        Ok(usage["prompt_tokens"].as_u64().or_else(|| usage["input_tokens"].as_u64()).filter(|tokens| *tokens > 0))
    }

    /// Sends a request, and reads the JSON object of the response.
    async fn ask(&self, path: &str, mut request: FullRequest, method: Method) -> Result<Value, ProbeError> {
        let strange = |what| ProbeError::Strange { path: path.to_owned(), what };
        let uri = format!("{}{path}", self.connections.target().address.base);
        *request.uri_mut() = uri.parse().map_err(|_| strange("its path cannot be written"))?;
        *request.method_mut() = method;
        let limit = self.clock.now() + PATIENCE;
        let (status, body) = tokio::select! {
            answer = self.connections.ask(request) => answer.map_err(|failed| ProbeError::Unreachable(failed.error))?,
            () = self.clock.sleep_until(Some(limit)) => {
                let text = format!("{} gave no answer within {} s", self.connections.target().address, PATIENCE.as_secs());
                return Err(ProbeError::Unreachable(text));
            }
        };
        if !status.is_success() {
            return Err(ProbeError::Refused { path: path.to_owned(), status, error: words_of(&body) });
        }
        let value: Value = serde_json::from_slice(&body).map_err(|_| strange("it is no JSON"))?;
        if value.is_object() { Ok(value) } else { Err(strange("it is no JSON object")) }
    }
}

/// The text of an error, shortened, on one line.
fn words_of(body: &Bytes) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let places = [&value["error"]["message"], &value["error"], &value["message"], &value["detail"]];
    let said = places.into_iter().find_map(Value::as_str).map(str::to_owned);
    let said = said.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let line: String = said.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST_ERROR).collect();
    if line.trim().is_empty() { "no reason given".to_owned() } else { line }
}
