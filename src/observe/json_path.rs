//! Positions of the decisive values in a response's JSON, per dialect.

use crate::json::Scalar;
use crate::types::Dialect;

use super::parsed_event::Channel;
use super::template::Placeholder;

/// A position in a response object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonPath {
    Nowhere,
    Root,
    Choices,
    Choice,
    Delta,
    /// A whole message in a streamed choice; counts if there is no delta beside it.
    Whole,
    /// Text: a string, or an array of parts.
    Text(Channel),
    Part(Channel),
    /// A top-level member by which proxies and frameworks report an error without an `error` object.
    Flat,
    /// The same, only if it is text.
    FlatText,
    /// A value that counts if it is not empty.
    Any(Channel),
    Tools,
    Tool,
    Call,
    Audio,
    Logprobs,
    LogprobTokens,
    LogprobToken,
    /// A token of a logprobs list, and its probability.
    TokenText,
    TokenValue,
    /// A finish reason given as an object.
    Reason,
    Usage,
    Details,
    /// Cohere's `meta`, and the two objects of counts in it.
    Meta,
    Counted,
    Billed,
    Error,
    /// An error given as a list.
    Errors,
    /// Responses: an added item; the response; its output and the items in it.
    Item,
    Response,
    IncompleteDetails,
    Output,
    OutputItem,
    /// Messages: the message, a block, a block's delta, a whole message's content.
    Message,
    Block,
    BlockDelta,
    Content,
    ContentBlock,
    Word(StringField),
    Number(NumberField),
}

/// Decisive strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StringField {
    Kind,
    Object,
    Code,
    TopCode,
    /// `error_code` at the top level.
    FlatCode,
    ErrorStatus,
    TopStatus,
    ErrorType,
    Finish,
    StopReason,
    ItemType,
    /// The type of a text part.
    PartType,
    ItemName,
    Status,
    Incomplete,
}

/// Decisive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberField {
    Index,
    Sequence,
    Input,
    Output,
    Cached,
    Reasoning,
    CacheRead,
    CacheWritten,
    /// On paths that do not generate: `total_tokens`, and Cohere's counts.
    Total,
    Counted(Side),
    Billed(Side),
}

/// Which tokens a count is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Input,
    Output,
}

/// The position of the value under `key` in an object at position `around`.
pub(super) fn member(dialect: Dialect, is_body: bool, around: JsonPath, key: &[u8]) -> JsonPath {
    use Channel::{Hidden, Sound, Visible};
    use JsonPath::*;
    match (around, key) {
        (Root, b"usage") => Usage,
        (Root, b"error") => Error,
        (Root, b"type") => Word(self::StringField::Kind),
        (Root, b"code") => Word(self::StringField::TopCode),
        (Root, b"object") => Word(self::StringField::Object),
        (Root, b"http_status_code" | b"status_code") => Word(self::StringField::TopStatus),
        // In a whole response body it has another meaning.
        (Root, b"status") if !is_body || dialect != Dialect::Responses => Word(self::StringField::TopStatus),
        (Root, b"error_code") if dialect.generates() => Word(self::StringField::FlatCode),
        (Root, b"detail" | b"errors" | b"exception") if dialect.generates() => Flat,
        (Root, b"message") if dialect.generates() && dialect != Dialect::Messages => FlatText,
        (Root, b"error_message" | b"error_msg") if dialect.generates() => FlatText,
        (Root, _) => match dialect {
            Dialect::Chat | Dialect::Completions => {
                if key == b"choices" {
                    Choices
                } else {
                    Nowhere
                }
            }
            Dialect::Responses => responses_root(is_body, key),
            Dialect::Messages => messages_root(is_body, key),
            Dialect::Plain if key == b"meta" => Meta,
            Dialect::Plain => Nowhere,
        },
        (Meta, b"tokens") => Counted,
        (Meta, b"billed_units") => Billed,
        (Counted, b"input_tokens") => Number(self::NumberField::Counted(Side::Input)),
        (Counted, b"output_tokens") => Number(self::NumberField::Counted(Side::Output)),
        (Billed, b"input_tokens") => Number(self::NumberField::Billed(Side::Input)),
        (Billed, b"output_tokens") => Number(self::NumberField::Billed(Side::Output)),
        (Usage, b"total_tokens") if dialect == Dialect::Plain => Number(self::NumberField::Total),
        (Choice, b"index") => Number(self::NumberField::Index),
        (Choice, b"delta") => Delta,
        (Choice, b"message") if is_body => Delta,
        (Choice, b"message") => Whole,
        (Choice, b"error") => Error,
        (Choice, b"usage") if !is_body => Usage,
        (Choice, b"text") => Text(Visible),
        (Choice, b"finish_reason") => Word(self::StringField::Finish),
        (Reason, b"type") => Word(self::StringField::Finish),
        (Choice, b"logprobs") => Logprobs,
        (Logprobs, b"content" | b"refusal" | b"tokens" | b"token_logprobs") => LogprobTokens,
        (LogprobToken, b"token") => TokenText,
        (LogprobToken, b"logprob") => TokenValue,
        (Delta, b"content" | b"refusal") => Text(Visible),
        (Delta, b"reasoning" | b"reasoning_content") => Text(Hidden),
        (Delta, b"audio") => Audio,
        (Delta, b"tool_calls") => Tools,
        (Delta, b"function_call") | (Tool, b"function" | b"custom") => Call,
        (Call, b"name" | b"arguments" | b"input") => Text(Visible),
        (Audio, b"transcript") => Text(Visible),
        (Audio, b"data") => Text(Sound),
        (Part(_), b"type") => Word(self::StringField::PartType),
        (Part(channel), b"text" | b"refusal" | b"content") => Text(channel),
        (Part(_), b"thinking" | b"reasoning" | b"reasoning_content" | b"summary") => Text(Hidden),
        (Usage, b"prompt_tokens" | b"input_tokens") => Number(self::NumberField::Input),
        (Usage, b"completion_tokens" | b"output_tokens") => Number(self::NumberField::Output),
        (Usage, b"cache_read_input_tokens") => Number(self::NumberField::CacheRead),
        (Usage, b"cache_creation_input_tokens") => Number(self::NumberField::CacheWritten),
        (
            Usage,
            b"prompt_tokens_details"
            | b"input_tokens_details"
            | b"completion_tokens_details"
            | b"output_tokens_details",
        ) => Details,
        (Usage | Details, b"reasoning_tokens") => Number(self::NumberField::Reasoning),
        (Details, b"cached_tokens") => Number(self::NumberField::Cached),
        (Error, b"code") => Word(self::StringField::Code),
        (Error, b"type") => Word(self::StringField::ErrorType),
        (Error, b"http_status_code" | b"status_code" | b"status") => Word(self::StringField::ErrorStatus),
        (Item | OutputItem | Block, b"type") => Word(self::StringField::ItemType),
        (Item | Block, b"name") => Word(self::StringField::ItemName),
        (Response, b"usage") => Usage,
        (Response, b"error") => Error,
        (Response, b"status") => Word(self::StringField::Status),
        (Response, b"incomplete_details") => IncompleteDetails,
        (IncompleteDetails, b"reason") => Word(self::StringField::Incomplete),
        (OutputItem, b"content" | b"summary" | b"name" | b"arguments") => Text(Visible),
        (Message, b"usage") => Usage,
        (BlockDelta, b"text" | b"partial_json") | (ContentBlock, b"text" | b"name") => Text(Visible),
        (BlockDelta | ContentBlock, b"thinking") => Text(Hidden),
        (ContentBlock, b"input") => Text(Visible),
        (BlockDelta | Message, b"stop_reason") => Word(self::StringField::StopReason),
        _ => Nowhere,
    }
}

fn responses_root(is_body: bool, key: &[u8]) -> JsonPath {
    match key {
        b"sequence_number" => JsonPath::Number(NumberField::Sequence),
        b"delta" => JsonPath::Text(Channel::Visible),
        b"item" => JsonPath::Item,
        b"response" => JsonPath::Response,
        b"output" if is_body => JsonPath::Output,
        b"status" if is_body => JsonPath::Word(StringField::Status),
        b"incomplete_details" if is_body => JsonPath::IncompleteDetails,
        _ => JsonPath::Nowhere,
    }
}

fn messages_root(is_body: bool, key: &[u8]) -> JsonPath {
    match key {
        b"message" => JsonPath::Message,
        b"delta" => JsonPath::BlockDelta,
        b"content_block" => JsonPath::Block,
        b"content" if is_body => JsonPath::Content,
        b"stop_reason" if is_body => JsonPath::Word(StringField::StopReason),
        _ => JsonPath::Nowhere,
    }
}

/// The placeholder for a string or number at this position in an event or body; `None` if it must not
/// vary.
pub(super) fn slot_of(what: Scalar, place: JsonPath, is_body: bool) -> Option<Placeholder> {
    match (what, place) {
        (Scalar::String, JsonPath::Text(Channel::Hidden | Channel::Sound)) if is_body => Some(Placeholder::Hidden),
        (Scalar::String, JsonPath::Text(_)) => Some(Placeholder::Text),
        (Scalar::String, JsonPath::Word(StringField::Finish | StringField::StopReason)) => Some(Placeholder::Finish),
        (Scalar::String, JsonPath::Word(_) | JsonPath::Error) => None,
        // An empty one has no meaning.
        (Scalar::String, JsonPath::Flat | JsonPath::FlatText | JsonPath::Message) => None,
        (Scalar::String, _) => Some(Placeholder::Label),
        (Scalar::Number, JsonPath::Nowhere) => Some(Placeholder::Ignored),
        (Scalar::Number, JsonPath::Number(number)) => Some(match number {
            NumberField::Index => Placeholder::Index,
            NumberField::Sequence => Placeholder::Sequence,
            NumberField::Input => Placeholder::Input,
            NumberField::Output => Placeholder::Output,
            NumberField::Cached => Placeholder::Cached,
            NumberField::Reasoning => Placeholder::Reasoning,
            NumberField::CacheRead => Placeholder::CacheRead,
            NumberField::CacheWritten => Placeholder::CacheWritten,
            // Responses that do not generate have no templates.
            NumberField::Total | NumberField::Counted(_) | NumberField::Billed(_) => return None,
        }),
        _ => None,
    }
}
