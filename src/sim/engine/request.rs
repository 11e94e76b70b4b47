//! A request parsed by the simulated engine, and its validation errors.
//!
//! Reads bodies like vLLM's server: unknown fields are accepted, the last of duplicate keys wins, and errors
//! have vLLM's texts where clients depend on them.

use serde_json::{Map, Value};

use super::prefix::BLOCK;
use super::seed::mix;
use super::tool_call::ToolCall;
use crate::types::Dialect;

/// Bytes of text per token of the simulated tokenizer.
pub(super) const BYTES_PER_TOKEN: u64 = 4;

/// Tokens added by the chat template per message.
const TEMPLATE_TOKENS: u64 = 4;

/// Why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestError {
    pub status: u16,
    pub kind: &'static str,
    pub message: String,
    pub param: Option<String>,
}

impl RequestError {
    fn bad(message: impl Into<String>, param: Option<&str>) -> Self {
        RequestError { status: 400, kind: "BadRequestError", message: message.into(), param: param.map(str::to_owned) }
    }

    /// An invalid value of a parameter.
    fn value(message: &str, param: &str, value: impl std::fmt::Display) -> Self {
        RequestError::bad(format!("{message} (parameter={param}, value={value})"), Some(param))
    }

    /// An error of the server's schema validation.
    fn schema(kind: &str, place: &str, message: &str, input: &str) -> Self {
        let message = format!(
            "1 validation error:\n  {{'type': '{kind}', 'loc': 'body.{place}', 'msg': '{message}', 'input': '{input}'}}"
        );
        RequestError { status: 400, kind: "Bad Request", message, param: Some(format!("body.{place}")) }
    }

    pub fn busy() -> Self {
        let message = "The engine is currently busy and cannot accept new requests. Please try again later.";
        RequestError { status: 503, kind: "Service Unavailable", message: message.to_owned(), param: None }
    }

    /// The body in the dialect's format.
    pub fn body(&self, dialect: Dialect) -> String {
        let (kind, message) = (Value::from(self.kind), Value::from(self.message.as_str()));
        if dialect == Dialect::Messages {
            return format!(r#"{{"type":"error","error":{{"type":{kind},"message":{message}}}}}"#);
        }
        let param = Value::from(self.param.clone());
        format!(r#"{{"error":{{"message":{message},"type":{kind},"param":{param},"code":{}}}}}"#, self.status)
    }
}

/// One prompt; `completions` may have several.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Prompt {
    pub tokens: u64,
    pub blocks: Vec<u64>,
    /// The text, for echo.
    pub text: String,
}

/// A valid request.
#[derive(Clone, Debug)]
pub(super) struct ParsedRequest {
    pub model: String,
    pub prompts: Vec<Prompt>,
    pub n: u64,
    pub cap: Option<u64>,
    pub at_least: u64,
    pub ignores_eos: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub echo: bool,
    pub priority: i64,
    pub effort: ReasoningEffort,
    pub tool: Option<ToolCall>,
    /// Seed of the output: equal requests get equal responses.
    pub seed: u64,
    /// The whole body, for parts repeated in the response.
    pub body: Map<String, Value>,
}

/// Requested reasoning effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ReasoningEffort {
    None,
    Low,
    #[default]
    Medium,
    High,
}

/// What the engine serves, as needed for parsing.
pub(super) struct ModelSpec<'a> {
    pub models: &'a [String],
    pub max_model_len: u64,
    pub seed: u64,
}

pub(super) fn read_object(body: &[u8]) -> Result<Map<String, Value>, RequestError> {
    match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(RequestError::schema("model_attributes_type", "", "Input should be a valid dictionary", "body")),
        Err(error) => {
            let place = error.column().saturating_sub(1);
            let message = format!(
                "1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{place}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
            );
            Err(RequestError { status: 400, kind: "Bad Request", message, param: Some(format!("body.{place}")) })
        }
    }
}

impl ParsedRequest {
    /// Parses a body of a generating dialect.
    pub fn read(dialect: Dialect, bytes: &[u8], model_spec: &ModelSpec<'_>) -> Result<ParsedRequest, RequestError> {
        let body = read_object(bytes)?;
        let fields = JsonFields(&body);
        let stream = fields.flag("stream")?;
        let options = fields.object("stream_options");
        if options.is_some() && !stream && dialect != Dialect::Responses {
            let message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
            return Err(RequestError::bad(message, Some("stream_options")));
        }
        let option = |name: &str| options.and_then(|o| o.get(name)).and_then(Value::as_bool).unwrap_or(false);
        let (include_usage, continuous_usage) = (option("include_usage"), option("continuous_usage_stats"));
        let n = fields.count("n")?.unwrap_or(1);
        if n < 1 {
            return Err(RequestError::bad("n must be at least 1, got 0.", None));
        }
        if let Some(temperature) = body.get("temperature").and_then(Value::as_f64).filter(|value| *value < 0.0) {
            let message = format!("temperature must be non-negative, got {temperature:?}.");
            return Err(RequestError::value(&message, "temperature", format!("{temperature:?}")));
        }
        let model = model_of(&body, model_spec)?;
        let prompts = prompts_of(dialect, &body, &model)?;
        let cap = cap_of(dialect, &fields, model_spec.max_model_len)?;
        fits(&prompts, cap, model_spec.max_model_len)?;
        let text_seed = body.get("seed").and_then(Value::as_u64).unwrap_or(0);
        let seed = prompts.iter().fold(mix(model_spec.seed ^ text_seed), |seed, prompt| mix(seed ^ hash(&prompt.text)));
        Ok(ParsedRequest {
            model,
            n,
            cap,
            at_least: fields.count("min_tokens")?.unwrap_or(0),
            ignores_eos: fields.flag("ignore_eos")?,
            stream,
            include_usage,
            continuous_usage: continuous_usage && include_usage,
            echo: fields.flag("echo")?,
            priority: body.get("priority").and_then(Value::as_i64).unwrap_or(0),
            effort: effort_of(&body),
            tool: ToolCall::wanted(&body),
            seed,
            prompts,
            body,
        })
    }

    /// Prompt tokens of the request: summed over prompts, not over choices.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.tokens).sum()
    }
}

/// The served model that a body names.
pub(super) fn model_of(body: &Map<String, Value>, model_spec: &ModelSpec<'_>) -> Result<String, RequestError> {
    let first = model_spec.models.first().cloned().unwrap_or_default();
    match body.get("model") {
        None | Some(Value::Null) => Ok(first),
        Some(Value::String(name)) if model_spec.models.contains(name) => Ok(name.clone()),
        Some(Value::String(name)) => Err(RequestError {
            status: 404,
            kind: "NotFoundError",
            message: format!("The model `{name}` does not exist."),
            param: Some("model".to_owned()),
        }),
        Some(other) => {
            Err(RequestError::schema("string_type", "model", "Input should be a valid string", &other.to_string()))
        }
    }
}

/// The prompts of a request, with only their format checked.
pub(super) fn prompts_of(
    dialect: Dialect,
    body: &Map<String, Value>,
    model: &str,
) -> Result<Vec<Prompt>, RequestError> {
    let missing = |field: &str| {
        let input = format!("<dict of {} items>", body.len());
        RequestError::schema("missing", field, "Field required", &input)
    };
    let mut text = ConversationText { model, pieces: String::new(), turns: 0 };
    match dialect {
        Dialect::Chat | Dialect::Messages => {
            let messages = body.get("messages").and_then(Value::as_array).ok_or_else(|| missing("messages"))?;
            if messages.is_empty() {
                let message = "Cannot apply chat template to an empty conversation. Provide at least one message.";
                return Err(RequestError::bad(message, None));
            }
            text.turn(body.get("system"))?;
            for message in messages {
                text.turn(message.get("content"))?;
            }
        }
        Dialect::Responses => {
            text.turn(body.get("instructions"))?;
            match body.get("input") {
                Some(Value::Array(items)) => {
                    for item in items {
                        text.turn(item.get("content").or_else(|| item.get("output")))?;
                    }
                }
                Some(input) => text.turn(Some(input))?,
                None => return Err(missing("input")),
            }
        }
        Dialect::Completions => return plain_prompts(body.get("prompt").ok_or_else(|| missing("prompt"))?),
        Dialect::Plain => {
            let input = body.get("input").or_else(|| body.get("prompt")).or_else(|| body.get("messages"));
            return plain_prompts(input.ok_or_else(|| missing("input"))?);
        }
    }
    if let Some(tools) = body.get("tools").filter(|tools| !tools.is_null()) {
        text.pieces.push_str(&tools.to_string());
    }
    let template = text.turns * TEMPLATE_TOKENS;
    Ok(vec![Prompt::of_text(text.pieces, template)])
}

impl Prompt {
    fn of_text(text: String, template: u64) -> Prompt {
        let tokens = (text.len() as u64).div_ceil(BYTES_PER_TOKEN).max(1) + template;
        let block = (BLOCK * BYTES_PER_TOKEN) as usize;
        let blocks = text.as_bytes().chunks_exact(block).scan(0, |before, piece| {
            *before = mix(*before ^ piece.iter().fold(0, |sum: u64, byte| mix(sum ^ u64::from(*byte))));
            Some(*before)
        });
        Prompt { tokens, blocks: blocks.collect(), text }
    }
}

fn plain_prompts(value: &Value) -> Result<Vec<Prompt>, RequestError> {
    let ids = |items: &[Value]| -> Prompt {
        let words: Vec<String> = items.iter().map(|id| format!(" {id}")).collect();
        Prompt { tokens: (items.len() as u64).max(1), ..Prompt::of_text(words.concat(), 0) }
    };
    match value {
        Value::String(text) => Ok(vec![Prompt::of_text(text.clone(), 0)]),
        Value::Array(items) if items.first().is_some_and(Value::is_number) => Ok(vec![ids(items)]),
        Value::Array(items) if !items.is_empty() => {
            let one = |item: &Value| match item {
                Value::String(text) => Ok(Prompt::of_text(text.clone(), 0)),
                Value::Array(tokens) => Ok(ids(tokens)),
                Value::Object(message) => {
                    let content = message.get("content").map(ToString::to_string).unwrap_or_default();
                    Ok(Prompt::of_text(content, TEMPLATE_TOKENS))
                }
                _ => Err(RequestError::schema(
                    "string_type",
                    "prompt.0",
                    "Input should be a valid string",
                    &item.to_string(),
                )),
            };
            items.iter().map(one).collect()
        }
        _ => Err(RequestError::bad("Either prompt or prompt_embeds must be provided and non-empty.", Some("prompt"))),
    }
}

/// Accumulates the text of a conversation.
struct ConversationText<'a> {
    model: &'a str,
    pieces: String,
    turns: u64,
}

impl ConversationText<'_> {
    fn turn(&mut self, content: Option<&Value>) -> Result<(), RequestError> {
        let Some(content) = content.filter(|content| !content.is_null()) else { return Ok(()) };
        self.turns += 1;
        self.part(content)
    }

    fn part(&mut self, content: &Value) -> Result<(), RequestError> {
        match content {
            Value::String(text) => self.pieces.push_str(text),
            Value::Array(parts) => {
                for part in parts {
                    self.part(part)?;
                }
            }
            Value::Object(part) => {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                if matches!(kind, "image_url" | "image" | "input_image" | "input_audio" | "file" | "video_url") {
                    return Err(RequestError::bad(format!("{} is not a multimodal model", self.model), None));
                }
                for name in ["text", "content", "output"] {
                    if let Some(inner) = part.get(name) {
                        self.part(inner)?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn cap_of(dialect: Dialect, fields: &JsonFields<'_>, longest: u64) -> Result<Option<u64>, RequestError> {
    let names: &[&str] = match dialect {
        Dialect::Responses => &["max_output_tokens"],
        _ => &["max_completion_tokens", "max_tokens"],
    };
    for name in names {
        let Some(cap) = fields.count(name)? else { continue };
        if cap == 0 {
            return Err(RequestError::value(&format!("{name} must be at least 1, got 0."), name, 0));
        }
        if cap > longest {
            let message = format!(
                "{name}={cap} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
            );
            return Err(RequestError::value(&message, name, cap));
        }
        return Ok(Some(cap));
    }
    // The API's own default.
    Ok((dialect == Dialect::Completions).then_some(16))
}

fn fits(prompts: &[Prompt], cap: Option<u64>, longest: u64) -> Result<(), RequestError> {
    let prompt = prompts.iter().map(|prompt| prompt.tokens).max().unwrap_or(0);
    let advice = "Please reduce the length of the input prompt or the number of requested output tokens.";
    let limit = format!("This model's maximum context length is {longest} tokens.");
    if prompt >= longest {
        let message = format!("{limit} However, your prompt contains at least {prompt} input tokens. {advice}");
        return Err(RequestError::value(&message, "input_tokens", prompt));
    }
    match cap {
        Some(cap) if prompt + cap > longest => {
            let message = format!(
                "{limit} However, you requested {cap} output tokens and your prompt contains at least {prompt} input tokens. {advice}"
            );
            Err(RequestError::value(&message, "max_tokens", cap))
        }
        _ => Ok(()),
    }
}

fn effort_of(body: &Map<String, Value>) -> ReasoningEffort {
    let nested = |outer: &str, inner: &str| body.get(outer).and_then(|value| value.get(inner));
    let word = body.get("reasoning_effort").or_else(|| nested("reasoning", "effort")).and_then(Value::as_str);
    let switch = nested("chat_template_kwargs", "enable_thinking").and_then(Value::as_bool);
    let thinking = nested("thinking", "type").and_then(Value::as_str);
    match (word, switch, thinking) {
        (_, Some(false), _) | (_, _, Some("disabled")) | (Some("none"), _, _) => ReasoningEffort::None,
        (Some("minimal" | "low"), _, _) => ReasoningEffort::Low,
        (Some("high" | "xhigh" | "max"), _, _) => ReasoningEffort::High,
        _ => ReasoningEffort::Medium,
    }
}

/// Typed access to a body.
struct JsonFields<'a>(&'a Map<String, Value>);

impl<'a> JsonFields<'a> {
    fn flag(&self, name: &str) -> Result<bool, RequestError> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            // The server's schema library accepts these words as well.
            Some(Value::String(word)) if matches!(word.as_str(), "true" | "false") => Ok(word == "true"),
            Some(other) => {
                let message = "Input should be a valid boolean, unable to interpret input";
                Err(RequestError::schema("bool_parsing", name, message, &plain(other)))
            }
        }
    }

    fn count(&self, name: &str) -> Result<Option<u64>, RequestError> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) if value.as_u64().is_some() => Ok(value.as_u64()),
            Some(Value::Number(number)) if number.as_i64().is_some() => {
                Err(RequestError::value(&format!("{name} must be at least 1, got {number}."), name, number))
            }
            Some(other) => {
                let message = "Input should be a valid integer, unable to parse string as an integer";
                Err(RequestError::schema("int_parsing", name, message, &plain(other)))
            }
        }
    }

    fn object(&self, name: &str) -> Option<&'a Map<String, Value>> {
        self.0.get(name).and_then(Value::as_object)
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(text.len() as u64, |sum, byte| mix(sum ^ u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = r#""messages":[{"role":"user","content":"12345678"}]"#;

    fn read(dialect: Dialect, body: &str) -> Result<ParsedRequest, RequestError> {
        let models = ["tiny".to_owned()];
        ParsedRequest::read(dialect, body.as_bytes(), &ModelSpec { models: &models, max_model_len: 100, seed: 1 })
    }

    #[test]
    fn a_prompt_counts_its_text_its_turns_and_its_tools() {
        let ask = read(Dialect::Chat, &format!("{{{CHAT}}}")).unwrap();
        assert_eq!(ask.prompt_tokens(), 2 + 4);
        let ask = read(Dialect::Completions, r#"{"prompt":["12345678",[1,2,3]],"n":2}"#).unwrap();
        assert_eq!((ask.prompt_tokens(), ask.prompts.len(), ask.cap), (2 + 3, 2, Some(16)));
        let ask = read(Dialect::Messages, r#"{"system":[{"type":"text","text":"1234"}],"messages":[{"role":"user","content":"12345678"}],"max_tokens":5}"#).unwrap();
        assert_eq!((ask.prompt_tokens(), ask.cap), (3 + 8, Some(5)));
        let ask =
            read(Dialect::Responses, r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"1234"}]}]}"#)
                .unwrap();
        assert_eq!(ask.prompt_tokens(), 1 + 4);
    }

    #[test]
    fn what_vllm_refuses_is_refused_in_its_words() {
        let cases = [
            ("not json", 400, "JSON decode error"),
            (r#"{"stream":true}"#, 400, "'loc': 'body.messages'"),
            (r#"{"messages":[]}"#, 400, "empty conversation"),
            (&format!(r#"{{{CHAT},"model":"x"}}"#), 404, "The model `x` does not exist."),
            (&format!(r#"{{{CHAT},"n":0}}"#), 400, "n must be at least 1"),
            (&format!(r#"{{{CHAT},"temperature":-3}}"#), 400, "got -3.0. (parameter=temperature, value=-3.0)"),
            (&format!(r#"{{{CHAT},"max_tokens":"many"}}"#), 400, "'input': 'many'"),
            (&format!(r#"{{{CHAT},"max_tokens":0}}"#), 400, "max_tokens must be at least 1, got 0."),
            (&format!(r#"{{{CHAT},"max_tokens":101}}"#), 400, "cannot be greater than max_model_len=100"),
            (&format!(r#"{{{CHAT},"max_tokens":95}}"#), 400, "maximum context length is 100 tokens"),
            (&format!(r#"{{{CHAT},"stream_options":{{"include_usage":true}}}}"#), 400, "Stream options can only"),
            (r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#, 400, "not a multimodal model"),
        ];
        for (body, status, words) in cases {
            let fault = read(Dialect::Chat, body).unwrap_err();
            assert_eq!(fault.status, status, "{body}");
            assert!(fault.message.contains(words), "{body}: {}", fault.message);
            let shown: Value = serde_json::from_str(&fault.body(Dialect::Chat)).unwrap();
            assert_eq!(shown["error"]["code"], status);
            let shown: Value = serde_json::from_str(&fault.body(Dialect::Messages)).unwrap();
            assert_eq!(shown["type"], "error");
        }
    }

    #[test]
    fn of_two_equal_keys_the_last_counts() {
        assert!(read(Dialect::Chat, &format!(r#"{{{CHAT},"stream":false,"stream":true}}"#)).unwrap().stream);
    }

    #[test]
    fn equal_beginnings_share_their_blocks() {
        let one = Prompt::of_text("a".repeat(200), 0);
        let two = Prompt::of_text("a".repeat(130) + &"b".repeat(70), 0);
        assert_eq!(one.blocks.len(), 3);
        assert_eq!(one.blocks[..2], two.blocks[..2]);
        assert_ne!(one.blocks[2], two.blocks[2]);
    }
}
