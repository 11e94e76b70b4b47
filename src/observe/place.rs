//! Where in an answer's JSON the things stand that decide, per dialect.

use crate::json::Scalar;
use crate::units::Dialect;

use super::mould::Slot;
use super::sight::Channel;

/// Where in an object something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    Root,
    Choices,
    Choice,
    Delta,
    /// A whole message in a streamed choice: it counts where there is no delta beside it.
    Whole,
    /// Text: a string, or an array of parts.
    Text(Channel),
    Part(Channel),
    /// A top-level member by which proxies and frameworks say what went wrong, with no `error` around it.
    Flat,
    /// The same where only text does.
    FlatText,
    /// Something that counts if it is not empty.
    Any(Channel),
    Tools,
    Tool,
    Call,
    Audio,
    Logprobs,
    LogprobTokens,
    LogprobToken,
    /// The token of one, and how likely it was.
    TokenText,
    TokenValue,
    /// A finish reason that is an object.
    Reason,
    Usage,
    Details,
    /// Cohere's `meta`, and the two lists of counts in it.
    Meta,
    Counted,
    Billed,
    Error,
    /// An error that is a list.
    Errors,
    /// Responses: an item as it is added; the response; its output and what is in it.
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
    Word(Word),
    Number(Number),
}

/// Strings that decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
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
    /// What a part of a text is.
    PartType,
    ItemName,
    Status,
    Incomplete,
}

/// Numbers that decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Index,
    Sequence,
    Input,
    Output,
    Cached,
    Reasoning,
    CacheRead,
    CacheWritten,
    /// Of a path that does not generate: `total_tokens`, and Cohere's counts.
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

/// What stands behind `key` in an object that stands at `around`.
pub(super) fn member(dialect: Dialect, is_body: bool, around: Place, key: &[u8]) -> Place {
    use Channel::{Hidden, Sound, Visible};
    use Place::*;
    match (around, key) {
        (Root, b"usage") => Usage,
        (Root, b"error") => Error,
        (Root, b"type") => Word(self::Word::Kind),
        (Root, b"code") => Word(self::Word::TopCode),
        (Root, b"object") => Word(self::Word::Object),
        (Root, b"http_status_code" | b"status_code") => Word(self::Word::TopStatus),
        // Of a whole response it is another thing.
        (Root, b"status") if !is_body || dialect != Dialect::Responses => Word(self::Word::TopStatus),
        (Root, b"error_code") if dialect.generates() => Word(self::Word::FlatCode),
        (Root, b"detail") if dialect.generates() => Flat,
        (Root, b"message") if dialect.generates() && dialect != Dialect::Messages => FlatText,
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
        (Counted, b"input_tokens") => Number(self::Number::Counted(Side::Input)),
        (Counted, b"output_tokens") => Number(self::Number::Counted(Side::Output)),
        (Billed, b"input_tokens") => Number(self::Number::Billed(Side::Input)),
        (Billed, b"output_tokens") => Number(self::Number::Billed(Side::Output)),
        (Usage, b"total_tokens") if dialect == Dialect::Plain => Number(self::Number::Total),
        (Choice, b"index") => Number(self::Number::Index),
        (Choice, b"delta") => Delta,
        (Choice, b"message") if is_body => Delta,
        (Choice, b"message") => Whole,
        (Choice, b"error") => Error,
        (Choice, b"usage") if !is_body => Usage,
        (Choice, b"text") => Text(Visible),
        (Choice, b"finish_reason") => Word(self::Word::Finish),
        (Reason, b"type") => Word(self::Word::Finish),
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
        (Part(_), b"type") => Word(self::Word::PartType),
        (Part(channel), b"text" | b"refusal" | b"content") => Text(channel),
        (Part(_), b"thinking" | b"reasoning" | b"reasoning_content" | b"summary") => Text(Hidden),
        (Usage, b"prompt_tokens" | b"input_tokens") => Number(self::Number::Input),
        (Usage, b"completion_tokens" | b"output_tokens") => Number(self::Number::Output),
        (Usage, b"cache_read_input_tokens") => Number(self::Number::CacheRead),
        (Usage, b"cache_creation_input_tokens") => Number(self::Number::CacheWritten),
        (
            Usage,
            b"prompt_tokens_details"
            | b"input_tokens_details"
            | b"completion_tokens_details"
            | b"output_tokens_details",
        ) => Details,
        (Usage | Details, b"reasoning_tokens") => Number(self::Number::Reasoning),
        (Details, b"cached_tokens") => Number(self::Number::Cached),
        (Error, b"code") => Word(self::Word::Code),
        (Error, b"type") => Word(self::Word::ErrorType),
        (Error, b"http_status_code" | b"status_code" | b"status") => Word(self::Word::ErrorStatus),
        (Item | OutputItem | Block, b"type") => Word(self::Word::ItemType),
        (Item | Block, b"name") => Word(self::Word::ItemName),
        (Response, b"usage") => Usage,
        (Response, b"error") => Error,
        (Response, b"status") => Word(self::Word::Status),
        (Response, b"incomplete_details") => IncompleteDetails,
        (IncompleteDetails, b"reason") => Word(self::Word::Incomplete),
        (OutputItem, b"content" | b"summary" | b"name" | b"arguments") => Text(Visible),
        (Message, b"usage") => Usage,
        (BlockDelta, b"text" | b"partial_json") | (ContentBlock, b"text" | b"name") => Text(Visible),
        (BlockDelta | ContentBlock, b"thinking") => Text(Hidden),
        (ContentBlock, b"input") => Text(Visible),
        (BlockDelta | Message, b"stop_reason") => Word(self::Word::StopReason),
        _ => Nowhere,
    }
}

fn responses_root(is_body: bool, key: &[u8]) -> Place {
    match key {
        b"sequence_number" => Place::Number(Number::Sequence),
        b"delta" => Place::Text(Channel::Visible),
        b"item" => Place::Item,
        b"response" => Place::Response,
        b"output" if is_body => Place::Output,
        b"status" if is_body => Place::Word(Word::Status),
        b"incomplete_details" if is_body => Place::IncompleteDetails,
        _ => Place::Nowhere,
    }
}

fn messages_root(is_body: bool, key: &[u8]) -> Place {
    match key {
        b"message" => Place::Message,
        b"delta" => Place::BlockDelta,
        b"content_block" => Place::Block,
        b"content" if is_body => Place::Content,
        b"stop_reason" if is_body => Place::Word(Word::StopReason),
        _ => Place::Nowhere,
    }
}

/// What a string or number at this place is to a mould of an event or of a whole body; `None`
/// where it must stay as it is.
pub(super) fn slot_of(what: Scalar, place: Place, is_body: bool) -> Option<Slot> {
    match (what, place) {
        (Scalar::String, Place::Text(Channel::Hidden | Channel::Sound)) if is_body => Some(Slot::Hidden),
        (Scalar::String, Place::Text(_)) => Some(Slot::Text),
        (Scalar::String, Place::Word(Word::Finish | Word::StopReason)) => Some(Slot::Finish),
        (Scalar::String, Place::Word(_) | Place::Error) => None,
        // An empty one says nothing.
        (Scalar::String, Place::Flat | Place::FlatText | Place::Message) => None,
        (Scalar::String, _) => Some(Slot::Label),
        (Scalar::Number, Place::Nowhere) => Some(Slot::Ignored),
        (Scalar::Number, Place::Number(number)) => Some(match number {
            Number::Index => Slot::Index,
            Number::Sequence => Slot::Sequence,
            Number::Input => Slot::Input,
            Number::Output => Slot::Output,
            Number::Cached => Slot::Cached,
            Number::Reasoning => Slot::Reasoning,
            Number::CacheRead => Slot::CacheRead,
            Number::CacheWritten => Slot::CacheWritten,
            // Answers that do not generate have no moulds.
            Number::Total | Number::Counted(_) | Number::Billed(_) => return None,
        }),
        _ => None,
    }
}
