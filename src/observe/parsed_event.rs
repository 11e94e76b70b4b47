//! The content of one JSON object of a response: the data of an event, or a whole body.

use crate::types::Dialect;

use super::error_code::ErrorCodes;
use super::usage::{Plain, UsageCounts};

/// The clock that a text moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// Content, refusal, tool and function call.
    Visible,
    /// Audio data: visible, but without text bytes.
    Sound,
    /// Reasoning.
    Hidden,
}

/// Kind of event, by its `type` or its `event:` line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum EventKind {
    /// No kind given.
    #[default]
    Unnamed,
    /// A kind of no interest.
    Other,
    /// `error`.
    Error,
    /// Responses: `*.delta`, of a visible channel or of reasoning.
    Delta(Channel),
    /// Responses: `*.delta` of a tool call's arguments, or of audio.
    LumpDelta,
    /// Responses: `response.output_item.added`.
    ItemAdded,
    /// Responses: `response.completed`.
    Completed,
    /// Responses: `response.incomplete`.
    Incomplete,
    /// Responses: `response.failed`.
    Failed,
    /// Messages: `content_block_start`.
    BlockStart,
    /// Messages: `content_block_delta`.
    BlockDelta,
    /// Messages: `message_stop`.
    Stop,
}

impl EventKind {
    pub(super) fn of(name: &[u8]) -> EventKind {
        match name {
            b"" => EventKind::Unnamed,
            b"error" => EventKind::Error,
            b"response.output_item.added" => EventKind::ItemAdded,
            b"response.completed" => EventKind::Completed,
            b"response.incomplete" => EventKind::Incomplete,
            b"response.failed" => EventKind::Failed,
            b"content_block_start" => EventKind::BlockStart,
            b"content_block_delta" => EventKind::BlockDelta,
            b"message_stop" => EventKind::Stop,
            _ if name.ends_with(b".delta") => {
                let is_of = |what: &[u8]| memchr::memmem::find(name, what).is_some();
                match () {
                    () if is_of(b"reasoning") => EventKind::Delta(Channel::Hidden),
                    () if is_of(b"call") || is_of(b"audio") => EventKind::LumpDelta,
                    () => EventKind::Delta(Channel::Visible),
                }
            }
            _ => EventKind::Other,
        }
    }
}

/// A finish or stop reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The output cap was reached.
    Length,
    /// The engine gave up; the equivalent error code.
    Failed(u16),
    /// Any other.
    Other,
}

impl Reason {
    pub(super) fn of(word: &[u8]) -> Option<Reason> {
        match word {
            b"" => None,
            b"length" | b"max_tokens" | b"max_output_tokens" | b"model_context_window_exceeded" => Some(Reason::Length),
            b"abort" | b"error" => Some(Reason::Failed(500)),
            b"insufficient_system_resource" => Some(Reason::Failed(503)),
            _ => Some(Reason::Other),
        }
    }

    /// The code of the error that the reason stands for.
    pub(super) fn failure(self) -> Option<u16> {
        match self {
            Reason::Failed(code) => Some(code),
            Reason::Length | Reason::Other => None,
        }
    }
}

/// The content of one choice. Other dialects have one unnamed choice.
#[derive(Clone, Debug, Default)]
pub(super) struct ParsedChoice {
    pub(super) index: u64,
    /// Whether it has non-empty text on a visible channel, and on a hidden one.
    pub(super) visible: bool,
    pub(super) hidden: bool,
    /// Whether it has a non-empty list of logprobs.
    pub(super) logprobs: bool,
    /// Whether it has a tool or function call, or audio.
    pub(super) lump: bool,
    pub(super) finish: Option<Reason>,
    /// Bytes of visible text.
    pub(super) bytes: u64,
    /// Start of a completion's text, which may be an echo.
    pub(super) text: Vec<u8>,
}

impl ParsedChoice {
    pub(super) fn has_text(&self) -> bool {
        self.visible || self.hidden
    }

    pub(super) fn mark(&mut self, channel: Channel) {
        match channel {
            Channel::Visible => self.visible = true,
            Channel::Sound => (self.visible, self.lump) = (true, true),
            Channel::Hidden => self.hidden = true,
        }
    }
}

/// The content of one JSON object.
#[derive(Clone, Debug, Default)]
pub(super) struct ParsedEvent {
    pub(super) kind: EventKind,
    /// `choices` in order, in dialects that have them.
    pub(super) choices: Vec<ParsedChoice>,
    /// The unnamed choice of other dialects.
    pub(super) only: ParsedChoice,
    /// Whether `usage` is an object.
    pub(super) has_usage: bool,
    /// Whether that usage is inside a choice.
    pub(super) usage_is_of_a_choice: bool,
    pub(super) usage: UsageCounts,
    /// Token counts of a response that does not generate.
    pub(super) plain: Option<Box<Plain>>,
    /// Whether it has a non-empty `error`, at the top level or in a choice.
    pub(super) has_error: bool,
    pub(super) error: ErrorCodes,
    /// Whether `object` is `error`: the older format, with codes at the top level.
    pub(super) is_error_object: bool,
    /// `code` and `type` at the top level.
    pub(super) top: ErrorCodes,
    /// The top level describes an error (`detail`, `message`, `error_code` and the like).
    pub(super) says_flatly: bool,
    /// It has an `error` other than `null`, which may be empty.
    pub(super) has_error_member: bool,
    /// How many members it has that only objects of a dialect have (`choices`, `usage`, `delta`).
    pub(super) of_dialect: u8,
    /// Whether its `type` names an error.
    pub(super) has_error_type: bool,
    /// Whether an item (Responses) or block (Messages) is a named tool call.
    pub(super) names_tool: bool,
    /// Responses: `status`.
    pub(super) status: Option<Status>,
    /// Responses: why it is incomplete.
    pub(super) incomplete: Option<Reason>,
    /// Responses: sequence number of the event.
    pub(super) sequence_number: Option<u64>,
}

impl ParsedEvent {
    /// The choices in this dialect.
    pub(super) fn all_choices(&self, dialect: Dialect) -> &[ParsedChoice] {
        let has_choices = matches!(dialect, Dialect::Chat | Dialect::Completions);
        if has_choices { &self.choices } else { std::slice::from_ref(&self.only) }
    }

    /// The choice continued by an event like this one, if only its text makes it a token
    /// event.
    pub(super) fn goes_on(&self, dialect: Dialect) -> Option<&ParsedChoice> {
        let [choice] = self.all_choices(dialect) else { return None };
        let ends = matches!(self.kind, EventKind::Completed | EventKind::Incomplete | EventKind::Stop);
        (!ends && choice.finish.is_none() && !choice.logprobs).then_some(choice)
    }

    /// Whether engines deliver this kind in lumps rather than token by token.
    pub(super) fn comes_in_lumps(&self, choices: &[ParsedChoice]) -> bool {
        self.names_tool || self.kind == EventKind::LumpDelta || choices.iter().any(|choice| choice.lump)
    }

    /// An error without an `error` object, as frameworks and proxies write them, or with an empty one. If
    /// there is a `type`, it or a code must be an error's.
    pub(super) fn is_flat_error(&self) -> bool {
        let is_typed = !matches!(self.kind, EventKind::Unnamed);
        let is_told = self.says_flatly || self.has_error_member;
        is_told && self.of_dialect == 0 && (!is_typed || self.has_error_type || self.top.has_number())
    }

    /// Token counts of a response that does not generate, if any.
    pub(super) fn plain_usage(&self) -> Option<UsageCounts> {
        match &self.plain {
            Some(plain) => Some(plain.complete(self.usage)),
            None => self.has_usage.then_some(self.usage),
        }
    }

    /// The last choice begun.
    pub(super) fn choice(&mut self) -> &mut ParsedChoice {
        self.choices.last_mut().unwrap_or(&mut self.only)
    }

    /// Applies the `event:` line, which is the fallback for an absent `type`. The name `error` also applies
    /// if the `type` is that of the error itself.
    pub(super) fn is_called(&mut self, named: EventKind) {
        let is_error = named == EventKind::Error && self.kind == EventKind::Other;
        if self.kind == EventKind::Unnamed || is_error {
            self.kind = named;
        }
    }
}

/// `status` of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Completed,
    Incomplete,
    Failed,
    Other,
}
