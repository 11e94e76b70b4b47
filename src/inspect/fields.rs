//! The known members of a request body, and their types.

use super::facts::Reasoning;
use crate::types::Dialect;

/// A member of the top-level object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TopLevelField {
    Model,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    /// Another engine's name of the cap: its index in [`OTHER_CAPS`].
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
    /// Arguments of an engine's chat template.
    Template,
    Metadata,
    Tools,
    Functions,
    /// Source of the prompt's KV cache, or choice of an engine in a fleet; reserved for the
    /// operator.
    Transfer,
    /// Dynamo's `nvext`, some of whose members do the same.
    Extension,
    /// Passed on by engines to their connectors, at any depth.
    Passed,
    /// A response schema, or an object that may contain one.
    Schema,
    Format,
    /// Read by the model; may be token ids. In Responses it may name a stored prompt.
    Prompt,
    Input,
    /// Read by the model.
    Words,
    /// Names earlier turns stored on the engine.
    Earlier,
    /// Names a container kept by the engine (Messages).
    Container,
    /// Cache salt: a prompt shares its cache only with prompts of the same salt.
    Salt,
    Other,
}

/// JSON type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonType {
    Null,
    Flag,
    Number,
    Text,
    Object,
    Array,
}

/// Required type of a member. `null` is always allowed and counts as absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldType {
    Flag,
    /// A non-negative integer.
    Count,
    /// A non-negative integer, or -1 for no limit.
    Cap,
    /// An integer.
    Integer,
    Text,
    Object,
    Any,
}

impl FieldType {
    /// The type's name in rejections.
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

    /// Whether a value of this type is acceptable as far as its first byte shows (whether a number is an
    /// integer shows at its end).
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

/// The rule of a member that may occur only once.
#[derive(Debug)]
pub(super) struct FieldRule {
    /// One bit per such member.
    pub(super) bit: u32,
    pub(super) field: &'static str,
    pub(super) wanted: FieldType,
}

impl TopLevelField {
    /// The member named `name` in this dialect. Fields that a dialect lacks decide nothing and are
    /// forwarded untouched.
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
            b"chat_template" => TopLevelField::Words,
            b"data" | b"data_1" | b"data_2" | b"items" | b"texts" | b"inputs" if dialect == Dialect::Plain => {
                TopLevelField::Words
            }
            b"previous_response_id" | b"conversation" => TopLevelField::Earlier,
            b"container" if dialect == Dialect::Messages => TopLevelField::Container,
            b"cache_salt" => TopLevelField::Salt,
            _ if is_place(name) => TopLevelField::Transfer,
            _ => match OTHER_CAPS.iter().position(|cap| cap.as_bytes() == name) {
                Some(cap) => TopLevelField::OtherCap(cap),
                None => TopLevelField::Other,
            },
        }
    }

    /// The decisive name from which `name` differs only in letter case, because some engines' parsers
    /// ignore case.
    pub(super) fn miscased(name: &[u8], dialect: Dialect) -> Option<String> {
        let name = folded(name)?;
        (TopLevelField::called(name.as_bytes(), dialect) != TopLevelField::Other).then_some(name)
    }

    /// The member's rule; none for members that may be repeated.
    pub(super) const fn rule(self, dialect: Dialect) -> Option<&'static FieldRule> {
        /// Makes a static rule.
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
            // Classification may depend on these, so they must not be repeated.
            // Engines disagree about their types, which are therefore not checked.
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
            | TopLevelField::Container
            | TopLevelField::Salt
            | TopLevelField::Other => return None,
        })
    }

    /// Whether the model reads text below this member.
    pub(super) const fn is_prompt(self) -> bool {
        matches!(self, TopLevelField::Prompt | TopLevelField::Input | TopLevelField::Words)
    }

    /// Whether the member defines tools.
    pub(super) const fn is_tools(self) -> bool {
        matches!(self, TopLevelField::Tools | TopLevelField::Functions)
    }

    /// Whether numbers in arrays below this member are token ids.
    pub(super) const fn takes_token_ids(self) -> bool {
        matches!(self, TopLevelField::Prompt | TopLevelField::Input)
    }
}

/// Names of the output cap in engines' own dialects.
pub(super) const OTHER_CAPS: [&str; 4] = ["n_predict", "num_predict", "max_new_tokens", "max_tokens_to_sample"];

/// The name folded to lower case if that changes it, including letters that fold to `k` or `s`.
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

/// Whether a name selects an engine of a fleet: `bootstrap_host`, `data_parallel_rank`,
/// `routed_dp_rank`.
fn is_place(name: &[u8]) -> bool {
    match name.first() {
        Some(b'b') => name.starts_with(b"bootstrap_"),
        Some(b'd') => name.starts_with(b"data_parallel_rank") || name.ends_with(b"dp_rank"),
        _ => name.ends_with(b"dp_rank"),
    }
}

/// Whether a name inside one of these members steers, ignoring case.
pub(super) fn steers_inside(member: TopLevelField, name: &[u8]) -> bool {
    let steers: fn(&[u8]) -> bool = match member {
        TopLevelField::Extension => |name| steers_in_extension(name) || steers_when_passed(name),
        TopLevelField::Passed => steers_when_passed,
        _ => return false,
    };
    steers(name) || folded(name).is_some_and(|name| steers(name.as_bytes()))
}

/// The same for a name inside `nvext`, at any depth. Includes priorities, which are the operator's, and
/// token ids, which replace the prompt that was read.
fn steers_in_extension(name: &[u8]) -> bool {
    is_place(name)
        || [&b"worker_id"[..], b"worker_ids", b"instance_id"].into_iter().any(|own| name.ends_with(own))
        || matches!(name, b"routing_constraints" | b"router" | b"token_data" | b"priority" | b"latency_sensitivity")
}

/// The same for names at any depth of objects that engines pass to their connectors.
fn steers_when_passed(name: &[u8]) -> bool {
    is_place(name) || matches!(name, b"kv_transfer_params" | b"ec_transfer_params" | b"disaggregated_params")
}

/// Whether the value under this key of an object in a prompt is text of the prompt; roles, types and ids
/// are not.
pub(super) fn leads_to_text(key: &[u8]) -> bool {
    matches!(key, b"content" | b"text" | b"output")
}

/// Whether the value under this key of a response format is a schema.
pub(super) fn leads_to_schema(key: &[u8]) -> bool {
    matches!(key, b"schema" | b"json_schema" | b"json" | b"grammar" | b"regex" | b"choice" | b"structural_tag")
}

/// Whether the value under this key of an object in a prompt is a tool call's arguments. Names inside have no
/// meaning.
pub(super) fn leads_to_arguments(key: &[u8]) -> bool {
    matches!(key, b"input" | b"arguments")
}

/// Whether the value under this key of an object in a prompt is not text, although the model reads it as
/// tokens.
pub(super) fn leads_to_media(key: &[u8]) -> bool {
    let is_media = |kind: &[u8]| key.strip_suffix(b"_url").unwrap_or(key).ends_with(kind);
    key.starts_with(b"file") || [&b"image"[..], b"audio", b"video"].into_iter().any(is_media)
}

/// Whether the value under this key of an object in a prompt is a stored file's id.
pub(super) fn leads_to_stored(key: &[u8]) -> bool {
    key == b"file_id"
}

/// The key of the id inside an object that refers to a stored one.
pub(super) fn reference_in(key: &[u8], dialect: Dialect) -> Option<&'static [u8]> {
    match key {
        b"file" | b"image_file" => Some(b"file_id"),
        // Audio of an earlier turn.
        b"audio" if dialect == Dialect::Chat => Some(b"id"),
        _ => None,
    }
}

/// How a tool (Responses) names something stored on the engine under this key, of the tool itself or of an
/// object in it. Definitions of functions have other keys at these depths.
pub(super) fn stored_in_tool(key: &[u8], is_of_tool: bool) -> Option<StoredIn> {
    match key {
        b"container" | b"connector_id" | b"input_image_mask" if is_of_tool => Some(StoredIn::IdOrObject),
        b"vector_store_ids" if is_of_tool => Some(StoredIn::List),
        b"file_id" if !is_of_tool => Some(StoredIn::IdOrObject),
        b"file_ids" if !is_of_tool => Some(StoredIn::List),
        _ => None,
    }
}

/// What names something stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredIn {
    /// A string is its id; an object may have one inside.
    IdOrObject,
    /// Strings in a list.
    List,
}

/// Whether a member of an object in a prompt says that the bytes under its `data` are no text.
pub(super) fn says_coding(key: &[u8]) -> bool {
    matches!(key, b"data_format" | b"image_format")
}

/// Whether this key may hold such bytes, depending on the object's type.
pub(super) fn leads_to_data(key: &[u8]) -> bool {
    matches!(key, b"data" | b"result")
}

/// Whether this is a role or type defined by the protocols, rather than text.
pub(super) fn is_word(text: &[u8]) -> bool {
    text.iter().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-'))
}

/// Whether an object of this type contains something other than text.
pub(super) fn is_media(kind: &str) -> bool {
    matches!(kind, "base64" | "url") || ["image", "audio", "video", "file"].iter().any(|media| kind.contains(media))
}

/// The amount of reasoning meant by a word.
pub(super) fn reasoning(word: &str) -> Reasoning {
    match word {
        "none" | "disabled" => Reasoning::None,
        "minimal" | "low" => Reasoning::Low,
        "medium" => Reasoning::Medium,
        "high" | "xhigh" | "max" => Reasoning::High,
        _ => Reasoning::On,
    }
}
