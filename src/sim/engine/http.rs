//! The engine's HTTP API: the paths that vLLM serves.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::{Map, Value};

use super::SimSettings;
use super::core::{EngineCore, Job};
use super::protocol::{ResponseMeta, protocol_of};
use super::request::{BYTES_PER_TOKEN, ModelSpec, ParsedRequest, RequestError, model_of, prompts_of, read_object};
use super::response::{ResponseBody, ResponseWriter};
use super::runner::Runner;
use super::seed::mix;
use super::text::TextGenerator;
use crate::clock::Clock;
use crate::types::Dialect;

/// Longest request body.
const MOST_BODY: usize = 64 << 20;

/// A response of the engine.
type EngineResponse = Response<ResponseBody>;

/// State of a connection.
pub(super) struct EngineService {
    clock: Clock,
    settings: SimSettings,
    answered: AtomicU64,
    pub runner: Arc<Runner>,
}

impl EngineService {
    pub fn new(clock: Clock, settings: SimSettings) -> Self {
        let runner = Runner::new(clock, EngineCore::new(settings.shape.clone(), settings.seed));
        EngineService { clock, settings, answered: AtomicU64::new(0), runner }
    }

    pub async fn serve<B>(self: Arc<Self>, request: Request<B>) -> Result<EngineResponse, Infallible>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let path = request.uri().path().to_owned();
        let mut answered = match (request.method(), self.place(&path)) {
            (_, None) => json(404, r#"{"detail":"Not Found"}"#),
            (method, Some(Handler::Look(page))) if is_read_only(method) => self.look(page),
            (&Method::POST, Some(Handler::Ask(dialect))) => {
                let (head, body) = request.into_parts();
                match Limited::new(body, MOST_BODY).collect().await {
                    Ok(whole) => self.ask(dialect, &path, &head.headers, &whole.to_bytes()).await,
                    Err(_) => json(413, r#"{"detail":"Request Entity Too Large"}"#),
                }
            }
            (_, Some(place)) => {
                let mut refused = json(405, r#"{"detail":"Method Not Allowed"}"#);
                let allow = if matches!(place, Handler::Ask(_)) { "POST" } else { "GET" };
                refused.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(allow));
                refused
            }
        };
        let headers = answered.headers_mut();
        headers.insert(header::SERVER, header::HeaderValue::from_static("goodput-engine"));
        headers.insert(header::VARY, header::HeaderValue::from_static("Origin"));
        Ok(answered)
    }

    fn place(&self, path: &str) -> Option<Handler> {
        Some(match path {
            "/v1/chat/completions" => Handler::Ask(Dialect::Chat),
            "/v1/completions" => Handler::Ask(Dialect::Completions),
            "/v1/responses" => Handler::Ask(Dialect::Responses),
            "/v1/messages" | "/v1/messages/count_tokens" => Handler::Ask(Dialect::Messages),
            "/v1/embeddings" | "/tokenize" | "/detokenize" => Handler::Ask(Dialect::Plain),
            "/v1/models" => Handler::Look(ReadOnlyPage::Models),
            "/health" | "/ping" => Handler::Look(ReadOnlyPage::Health),
            "/version" => Handler::Look(ReadOnlyPage::Version),
            "/metrics" => Handler::Look(ReadOnlyPage::Metrics),
            _ => return None,
        })
    }

    fn look(&self, page: ReadOnlyPage) -> EngineResponse {
        let model = self.settings.models.first().map_or("", String::as_str);
        match page {
            ReadOnlyPage::Health => whole(200, "text/plain; charset=utf-8", Bytes::new()),
            ReadOnlyPage::Version => json(200, r#"{"version":"0.32.0"}"#),
            ReadOnlyPage::Models => json(200, self.models()),
            ReadOnlyPage::Metrics => {
                let text = self.runner.look(|gauges, counts| counts.page(gauges, model));
                whole(200, "text/plain; version=0.0.4; charset=utf-8", Bytes::from(text))
            }
        }
    }

    fn models(&self) -> String {
        let (created, longest) = (self.clock.wall().as_secs(), self.settings.shape.max_model_len);
        let card = |name: &String| {
            let name = Value::from(name.as_str());
            format!(
                r#"{{"id":{name},"object":"model","created":{created},"owned_by":"vllm","root":{name},"parent":null,"max_model_len":{longest},"permission":[]}}"#
            )
        };
        let cards: Vec<String> = self.settings.models.iter().map(card).collect();
        format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(","))
    }

    async fn ask(&self, dialect: Dialect, path: &str, headers: &HeaderMap, body: &[u8]) -> EngineResponse {
        let done = match path {
            "/v1/embeddings" => self.embed(body).await,
            "/tokenize" | "/detokenize" | "/v1/messages/count_tokens" => self.count(dialect, path, body),
            _ => self.generate(dialect, headers, body).await,
        };
        done.unwrap_or_else(|fault| json(fault.status, fault.body(dialect)))
    }

    async fn generate(
        &self,
        dialect: Dialect,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<EngineResponse, RequestError> {
        let ask = ParsedRequest::read(dialect, body, &self.model_spec())?;
        let (mut generators, mut jobs) = (Vec::new(), Vec::new());
        let places = ask.prompts.iter().flat_map(|prompt| (0..ask.n).map(move |_| prompt));
        for (index, prompt) in (0..).zip(places) {
            let longest = self.settings.shape.max_model_len.saturating_sub(prompt.tokens);
            let generator =
                TextGenerator::of(&ask, index, self.settings.output, self.settings.reasoning_tokens, longest);
            let job = Job {
                prompt: prompt.tokens,
                output: generator.output(),
                priority: ask.priority,
                blocks: prompt.blocks.clone(),
            };
            jobs.push(job);
            generators.push(generator);
        }
        let run = self.runner.submit(jobs).map_err(|_| RequestError::busy())?;
        let streams = ask.stream;
        let meta = self.meta(ask, headers);
        let answer = ResponseWriter::new(Arc::clone(&self.runner), meta, protocol_of(dialect), generators, run);
        if streams {
            let body = ResponseBody::Events(answer.stream());
            return Ok(respond(200, "text/event-stream; charset=utf-8", body));
        }
        Ok(json(200, answer.whole().await))
    }

    fn meta(&self, ask: ParsedRequest, headers: &HeaderMap) -> ResponseMeta {
        let number = self.answered.fetch_add(1, Ordering::Relaxed);
        let given = headers.get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| is_plain(id));
        let id = given.map_or_else(|| format!("{:016x}", mix(self.settings.seed ^ mix(number))), str::to_owned);
        let fingerprint = format!("sim-{:08x}", self.settings.seed);
        let details = self.settings.reasoning_tokens > 0;
        ResponseMeta { id, created: self.clock.wall().as_secs(), details, fingerprint, ask }
    }

    /// Embeddings: computes the prompt, generates nothing.
    async fn embed(&self, body: &[u8]) -> Result<EngineResponse, RequestError> {
        let body = read_object(body)?;
        let model = model_of(&body, &self.model_spec())?;
        let prompts = prompts_of(Dialect::Plain, &body, &model)?;
        let tokens: u64 = prompts.iter().map(|prompt| prompt.tokens).sum();
        let jobs = prompts.iter().map(|prompt| Job { prompt: prompt.tokens, output: 1, ..Job::default() }).collect();
        let mut run = self.runner.submit(jobs).map_err(|_| RequestError::busy())?;
        for _ in &prompts {
            run.next().await;
        }
        let dimensions = body.get("dimensions").and_then(Value::as_u64).unwrap_or(8).min(4096);
        let in_base64 = body.get("encoding_format").and_then(Value::as_str) == Some("base64");
        let item = |(index, prompt): (usize, &super::request::Prompt)| {
            let vector = embedding(&prompt.text, dimensions);
            let shown = if in_base64 { base64(&vector) } else { format!("{vector:?}") };
            format!(r#"{{"index":{index},"object":"embedding","embedding":{shown}}}"#)
        };
        let items: Vec<String> = prompts.iter().enumerate().map(item).collect();
        let id = self.answered.fetch_add(1, Ordering::Relaxed);
        Ok(json(
            200,
            format!(
                r#"{{"id":"embd-{id:016x}","object":"list","created":{},"model":{},"data":[{}],"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens},"completion_tokens":0,"prompt_tokens_details":null}}}}"#,
                self.clock.wall().as_secs(),
                Value::from(model),
                items.join(",")
            ),
        ))
    }

    /// Paths that only count tokens and do not enter the batch.
    fn count(&self, dialect: Dialect, path: &str, body: &[u8]) -> Result<EngineResponse, RequestError> {
        let body = read_object(body)?;
        let model = model_of(&body, &self.model_spec())?;
        if path == "/detokenize" {
            return Ok(json(200, detokenized(&body)));
        }
        let prompts = prompts_of(dialect, &body, &model)?;
        let tokens: u64 = prompts.iter().map(|prompt| prompt.tokens).sum();
        if dialect == Dialect::Messages {
            let counted =
                format!(r#"{{"input_tokens":{tokens},"context_management":{{"original_input_tokens":{tokens}}}}}"#);
            return Ok(json(200, counted));
        }
        let ids: Vec<u64> = (0..tokens).map(|index| mix(index) % 1000).collect();
        let longest = self.settings.shape.max_model_len;
        let ids = Value::from(ids);
        Ok(json(200, format!(r#"{{"count":{tokens},"max_model_len":{longest},"tokens":{ids},"token_strs":null}}"#)))
    }

    fn model_spec(&self) -> ModelSpec<'_> {
        let settings = &self.settings;
        ModelSpec { models: &settings.models, max_model_len: settings.shape.max_model_len, seed: settings.seed }
    }
}

enum Handler {
    Ask(Dialect),
    Look(ReadOnlyPage),
}

#[derive(Clone, Copy)]
enum ReadOnlyPage {
    Health,
    Version,
    Models,
    Metrics,
}

fn is_read_only(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}

/// Whether an id needs no JSON escaping.
fn is_plain(id: &str) -> bool {
    !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn detokenized(body: &Map<String, Value>) -> String {
    let count = body.get("tokens").and_then(Value::as_array).map_or(0, Vec::len);
    let text = "word".repeat(count.min(1 << 20));
    debug_assert_eq!(text.len() as u64, count.min(1 << 20) as u64 * BYTES_PER_TOKEN);
    format!(r#"{{"prompt":{}}}"#, Value::from(text))
}

/// A vector of length about 1 derived from the text.
fn embedding(text: &str, dimensions: u64) -> Vec<f32> {
    let seed = text.bytes().fold(0, |sum, byte| mix(sum ^ u64::from(byte)));
    let scale = (dimensions as f32).sqrt();
    (0..dimensions).map(|index| ((mix(seed ^ index) % 2001) as f32 / 1000.0 - 1.0) / scale).collect()
}

/// Little-endian floats in quoted base64, as `encoding_format` says.
fn base64(vector: &[f32]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut text = String::from("\"");
    for piece in bytes.chunks(3) {
        let word = piece.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - piece.len()));
        for place in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * place)) as usize & 63] as char;
            text.push(if place > piece.len() { '=' } else { letter });
        }
    }
    text.push('"');
    text
}

fn json(status: u16, body: impl Into<Bytes>) -> EngineResponse {
    whole(status, "application/json", body.into())
}

fn whole(status: u16, kind: &'static str, body: Bytes) -> EngineResponse {
    respond(status, kind, ResponseBody::Whole(Some(body)))
}

fn respond(status: u16, kind: &'static str, body: ResponseBody) -> EngineResponse {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_what_clients_decode() {
        assert_eq!(base64(&[1.0]), "\"AACAPw==\"");
        assert_eq!(base64(&[1.0, -0.5]), "\"AACAPwAAAL8=\"");
        assert_eq!(base64(&[1.0, -0.5, 0.25]), "\"AACAPwAAAL8AAIA+\"");
    }
}
