//! Which members of a request body mean something to the gateway, and what they must be.

use super::facts::Reasoning;
use crate::units::Dialect;

/// A member of the top-level object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TopLevelField {
    Model,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    /// Another engine's name of the cap: its place in [`OTHER_CAPS`].
    OtherCap(usize),
    MinTokens,
    N,
    BestOf,
    Priority,
    User,
    Background,
    Echo,
    Effort,
    Reasoning,
    Thinking,
    /// What an engine's chat template is told.
    Template,
    Metadata,
    Tools,
    Functions,
    /// Where the keys and values of the prompt's cache come from, or which engine of a fleet
    /// takes the request: only the operator's to say.
    Transfer,
    /// Dynamo's own; some of its members do the same.
    Extension,
    /// What engines hand on to their connectors, at whatever depth.
    Passed,
    /// A schema of the answer; or an object in which one may stand.
    Schema,
    Format,
    /// What the model reads; may also be token ids. Of a response it may be the name of a stored one.
    Prompt,
    Input,
    /// What the model reads.
    Words,
    /// Names what the engine remembers of earlier turns.
    Earlier,
    /// Parts what engines keep of prompts: a prompt only shares with those of the same salt.
    Salt,
    Other,
}

/// The JSON type that a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonType {
    Null,
    Flag,
    Number,
    Text,
    Object,
    Array,
}

/// The type that a member must have. `null` is always allowed and reads as absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldType {
    Flag,
    /// A whole number, zero or more.
    Count,
    /// The same, or -1 for none.
    Cap,
    /// A whole number.
    Integer,
    Text,
    Object,
    Any,
}

impl FieldType {
    /// How a refusal says it.
    pub(super) const fn expected(self) -> &'static str {
        match self {
            FieldType::Flag => "true or false",
            FieldType::Count => "a whole number, zero or more",
            FieldType::Cap => "a whole number, zero or more, or -1 for no cap",
            FieldType::Integer => "a whole number",
            FieldType::Text => "a string",
            FieldType::Object => "an object",
            FieldType::Any => "any value",
        }
    }

    /// Whether a value of this type will do, as far as its first byte tells (whether a
    /// number is a whole one shows at its end).
    pub(super) const fn takes(self, kind: JsonType) -> bool {
        match kind {
            JsonType::Null => true,
            JsonType::Flag => matches!(self, FieldType::Flag | FieldType::Any),
            JsonType::Number => matches!(self, FieldType::Count | FieldType::Cap | FieldType::Integer | FieldType::Any),
            JsonType::Text => matches!(self, FieldType::Text | FieldType::Any),
            JsonType::Object => matches!(self, FieldType::Object | FieldType::Any),
            JsonType::Array => matches!(self, FieldType::Any),
        }
    }
}

/// What is demanded of a member that may stand only once.
#[derive(Debug)]
pub(super) struct FieldRule {
    /// One bit per such member.
    pub(super) bit: u32,
    pub(super) field: &'static str,
    pub(super) wanted: FieldType,
}

impl TopLevelField {
    /// What the member called `name` is in this dialect. A field that a dialect does not have
    /// decides nothing there and travels as it is.
    pub(super) fn called(name: &[u8], dialect: Dialect) -> TopLevelField {
        let has_choices = matches!(dialect, Dialect::Chat | Dialect::Completions);
        let completes = dialect == Dialect::Completions;
        match name {
            b"model" => TopLevelField::Model,
            b"stream" => TopLevelField::Stream,
            b"stream_options" => TopLevelField::StreamOptions,
            b"max_tokens" => TopLevelField::MaxTokens,
            b"max_completion_tokens" => TopLevelField::MaxCompletionTokens,
            b"max_output_tokens" => TopLevelField::MaxOutputTokens,
            b"min_tokens" => TopLevelField::MinTokens,
            b"n" if has_choices => TopLevelField::N,
            b"best_of" if completes => TopLevelField::BestOf,
            b"echo" if completes => TopLevelField::Echo,
            b"priority" => TopLevelField::Priority,
            b"user" => TopLevelField::User,
            b"background" => TopLevelField::Background,
            b"reasoning_effort" => TopLevelField::Effort,
            b"reasoning" => TopLevelField::Reasoning,
            b"thinking" => TopLevelField::Thinking,
            b"chat_template_kwargs" => TopLevelField::Template,
            b"metadata" => TopLevelField::Metadata,
            b"tools" => TopLevelField::Tools,
            b"functions" => TopLevelField::Functions,
            b"kv_transfer_params" | b"ec_transfer_params" | b"disaggregated_params" => TopLevelField::Transfer,
            b"nvext" => TopLevelField::Extension,
            b"vllm_xargs" | b"extra_args" | b"extra_body" | b"sampling_params" => TopLevelField::Passed,
            b"response_format" | b"output_format" | b"output_config" | b"structured_outputs" => TopLevelField::Format,
            b"text" if dialect == Dialect::Responses => TopLevelField::Format,
            b"json_schema" | b"grammar" | b"ebnf" | b"regex" => TopLevelField::Schema,
            b"guided_json" | b"guided_regex" | b"guided_grammar" | b"guided_choice" => TopLevelField::Schema,
            b"prompt" => TopLevelField::Prompt,
            b"input" => TopLevelField::Input,
            b"messages" | b"content" | b"system" | b"instructions" => TopLevelField::Words,
            b"query" | b"queries" | b"documents" | b"passages" | b"text_1" | b"text_2" => TopLevelField::Words,
            b"suffix" if completes => TopLevelField::Words,
            b"data_1" | b"data_2" | b"items" | b"texts" | b"inputs" if dialect == Dialect::Plain => {
                TopLevelField::Words
            }
            b"previous_response_id" | b"conversation" => TopLevelField::Earlier,
            b"cache_salt" => TopLevelField::Salt,
            _ if is_place(name) => TopLevelField::Transfer,
            _ => match OTHER_CAPS.iter().position(|cap| cap.as_bytes() == name) {
                Some(cap) => TopLevelField::OtherCap(cap),
                None => TopLevelField::Other,
            },
        }
    }

    /// The name that decides, where `name` differs from one only in the case of its letters: there
    /// are engines whose parsers do not tell them apart.
    pub(super) fn miscased(name: &[u8], dialect: Dialect) -> Option<String> {
        let name = folded(name)?;
        (TopLevelField::called(name.as_bytes(), dialect) != TopLevelField::Other).then_some(name)
    }

    /// What is demanded of the member; nothing of those that may be repeated.
    pub(super) const fn rule(self, dialect: Dialect) -> Option<&'static FieldRule> {
        /// A rule, made once.
        macro_rules! rule {
            ($place:literal, $field:literal, $wanted:ident) => {
                &FieldRule { bit: 1 << $place, field: $field, wanted: FieldType::$wanted }
            };
        }
        Some(match self {
            TopLevelField::Model => rule!(0, "model", Text),
            TopLevelField::Stream => rule!(1, "stream", Flag),
            TopLevelField::StreamOptions => rule!(2, "stream_options", Object),
            TopLevelField::MaxTokens => rule!(3, "max_tokens", Cap),
            TopLevelField::MaxCompletionTokens => rule!(4, "max_completion_tokens", Cap),
            TopLevelField::MaxOutputTokens => rule!(5, "max_output_tokens", Cap),
            TopLevelField::OtherCap(0) => rule!(20, "n_predict", Cap),
            TopLevelField::OtherCap(1) => rule!(21, "num_predict", Cap),
            TopLevelField::OtherCap(2) => rule!(22, "max_new_tokens", Cap),
            TopLevelField::OtherCap(_) => rule!(23, "max_tokens_to_sample", Cap),
            TopLevelField::N => rule!(6, "n", Count),
            TopLevelField::BestOf => rule!(7, "best_of", Count),
            TopLevelField::Priority => rule!(8, "priority", Integer),
            TopLevelField::User => rule!(9, "user", Text),
            TopLevelField::Background => rule!(10, "background", Flag),
            TopLevelField::Echo => rule!(11, "echo", Flag),
            // Classes may depend on these, so there may not be two of them to choose from.
            // Engines disagree about their types, which are therefore not ours to judge.
            TopLevelField::Effort => rule!(12, "reasoning_effort", Any),
            TopLevelField::Reasoning => rule!(13, "reasoning", Any),
            TopLevelField::Thinking => rule!(14, "thinking", Any),
            TopLevelField::Metadata => rule!(15, "metadata", Any),
            TopLevelField::Tools => rule!(16, "tools", Any),
            TopLevelField::Functions => rule!(17, "functions", Any),
            // The number of prompts decides how many choices must finish.
            TopLevelField::Prompt if matches!(dialect, Dialect::Completions) => rule!(18, "prompt", Any),
            TopLevelField::Template => rule!(19, "chat_template_kwargs", Any),
            TopLevelField::Prompt | TopLevelField::Input | TopLevelField::Words => return None,
            TopLevelField::MinTokens
            | TopLevelField::Transfer
            | TopLevelField::Extension
            | TopLevelField::Passed
            | TopLevelField::Schema
            | TopLevelField::Format
            | TopLevelField::Earlier
            | TopLevelField::Salt
            | TopLevelField::Other => return None,
        })
    }

    /// Whether text below this member is read by the model.
    pub(super) const fn is_prompt(self) -> bool {
        matches!(self, TopLevelField::Prompt | TopLevelField::Input | TopLevelField::Words)
    }

    /// Whether the member says which functions the model may call.
    pub(super) const fn is_tools(self) -> bool {
        matches!(self, TopLevelField::Tools | TopLevelField::Functions)
    }

    /// Whether numbers in arrays below this member are token ids.
    pub(super) const fn takes_token_ids(self) -> bool {
        matches!(self, TopLevelField::Prompt | TopLevelField::Input)
    }
}

/// Names of the output cap that engines know beside those of their dialects.
pub(super) const OTHER_CAPS: [&str; 4] = ["n_predict", "num_predict", "max_new_tokens", "max_tokens_to_sample"];

/// The name in small letters, if it has others: also those that some folding takes for a `k` or an `s`.
pub(super) fn folded(name: &[u8]) -> Option<String> {
    if !name.iter().any(|byte| byte.is_ascii_uppercase() || !byte.is_ascii()) {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    let fold = |letter: char| match letter {
        '\u{212A}' => 'k',
        '\u{17F}' => 's',
        _ => letter.to_ascii_lowercase(),
    };
    Some(name.chars().map(fold).collect())
}

/// Whether a name says where in a fleet a request goes: `bootstrap_host`, `data_parallel_rank`,
/// `routed_dp_rank`.
fn is_place(name: &[u8]) -> bool {
    match name.first() {
        Some(b'b') => name.starts_with(b"bootstrap_"),
        Some(b'd') => name.starts_with(b"data_parallel_rank") || name.ends_with(b"dp_rank"),
        _ => name.ends_with(b"dp_rank"),
    }
}

/// Whether a name inside one of these members steers, in whatever letters it is written.
pub(super) fn steers_inside(member: TopLevelField, name: &[u8]) -> bool {
    let steers: fn(&[u8]) -> bool = match member {
        TopLevelField::Extension => |name| steers_in_extension(name) || steers_when_passed(name),
        TopLevelField::Passed => steers_when_passed,
        _ => return false,
    };
    steers(name) || folded(name).is_some_and(|name| steers(name.as_bytes()))
}

/// The same for a name inside `nvext`, at any depth. A priority there is as much the operator's
/// to say as one at the top, and prompts in token ids stand in place of the one that was read.
fn steers_in_extension(name: &[u8]) -> bool {
    is_place(name)
        || [&b"worker_id"[..], b"worker_ids", b"instance_id"].into_iter().any(|own| name.ends_with(own))
        || matches!(name, b"routing_constraints" | b"router" | b"token_data" | b"priority" | b"latency_sensitivity")
}

/// The same for a name at any depth in what engines hand on to their connectors.
fn steers_when_passed(name: &[u8]) -> bool {
    is_place(name) || matches!(name, b"kv_transfer_params" | b"ec_transfer_params" | b"disaggregated_params")
}

/// Whether what stands under this key of an object in a prompt makes it like another one: roles, types
/// and ids do not.
pub(super) fn leads_to_text(key: &[u8]) -> bool {
    matches!(key, b"content" | b"text" | b"output")
}

/// Whether a schema stands under this key of an object that says how an answer is written.
pub(super) fn leads_to_schema(key: &[u8]) -> bool {
    matches!(key, b"schema" | b"json_schema" | b"json" | b"grammar" | b"regex" | b"choice" | b"structural_tag")
}

/// Whether what stands under this key of an object in a prompt is a call's arguments: there no name
/// says what the value is.
pub(super) fn leads_to_arguments(key: &[u8]) -> bool {
    matches!(key, b"input" | b"arguments")
}

/// Whether something other than text stands under this key of an object in a prompt, for
/// which the model still sees tokens.
pub(super) fn leads_to_media(key: &[u8]) -> bool {
    let is_media = |kind: &[u8]| key.strip_suffix(b"_url").unwrap_or(key).ends_with(kind);
    key.starts_with(b"file") || [&b"image"[..], b"audio", b"video"].into_iter().any(is_media)
}

/// Whether the name of a file that was stored before stands under this key of an object in a prompt.
pub(super) fn leads_to_stored(key: &[u8]) -> bool {
    key == b"file_id"
}

/// Whether the bytes of such a thing may stand under this key: the object's type tells.
pub(super) fn leads_to_data(key: &[u8]) -> bool {
    matches!(key, b"data" | b"result")
}

/// Whether this is a role or type of the protocols themselves: that is no text.
pub(super) fn is_word(text: &[u8]) -> bool {
    text.iter().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
}

/// Whether an object of this type is or has something other than text.
pub(super) fn is_media(kind: &str) -> bool {
    matches!(kind, "base64" | "url") || ["image", "audio", "video", "file"].iter().any(|media| kind.contains(media))
}

/// What a word for the amount of reasoning means.
pub(super) fn reasoning(word: &str) -> Reasoning {
    match word {
        "none" | "disabled" => Reasoning::None,
        "minimal" | "low" => Reasoning::Low,
        "medium" => Reasoning::Medium,
        "high" | "xhigh" | "max" => Reasoning::High,
        _ => Reasoning::On,
    }
}
