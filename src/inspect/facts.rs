//! The fields of a request body on which the gateway decides.

use std::ops::Range;
use std::sync::Arc;

use crate::types::Tokens;

/// A decisive field: its value, and the byte range of its literal in the body
/// (quotes included).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field<T> {
    /// The decoded value.
    pub value: T,
    /// Byte range of the literal in the decoded body.
    pub at: Range<usize>,
}

/// The facts of one request body. Byte offsets refer to the decoded body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// `model`; also absent if `null`.
    pub model: Option<Field<Arc<str>>>,
    /// `stream`; `null` counts as absent.
    pub stream: Option<Field<bool>>,
    /// `stream_options`, if an object or `null`.
    pub stream_options: Option<StreamOptions>,
    /// The stated output caps.
    pub caps: Caps,
    /// Smallest usable output cap, because engines refuse lower ones: `min_tokens`, or one more than
    /// `thinking.budget_tokens`; 0 if neither is stated.
    pub least_output: u64,
    /// `n`, the number of choices per prompt: 1 if absent, the largest representable number if
    /// beyond range.
    pub n: u64,
    /// Prompts of the request: 1, except for `completions` with an array of prompts and for batches
    /// of conversations.
    pub prompts: u64,
    /// `priority`: range of the whole member including one adjacent comma, so that cutting it leaves valid
    /// JSON.
    pub priority: Option<Range<usize>>,
    /// Whether `tools` (or legacy `functions`) is a non-empty array.
    pub has_tools: bool,
    /// `reasoning_effort`, `reasoning.effort`, `thinking.type`, as one word.
    pub reasoning: Option<Reasoning>,
    /// Positions of the reasoning switches.
    pub switches: Switches,
    /// String members of `metadata`, in order of appearance.
    pub metadata: Vec<(String, String)>,
    /// Whether `echo` is `true`.
    pub echo: bool,
    /// The decoded prompts, only if `echo` is true (`completions`, text prompts). Shared with
    /// the response's observers.
    pub echo_prompts: Arc<[String]>,
    /// Whether `background` is `true` (Responses).
    pub background: bool,
    /// Whether it names something stored on an engine: `previous_response_id`, `conversation`, `prompt.id`, an item
    /// reference (Responses), or a file id.
    pub names_stored: bool,
    /// Whether it has a non-null member that steers: moves caches between engines, or selects the engine
    /// of a fleet.
    pub steers: bool,
    /// The inputs of the prompt estimate.
    pub prompt: PromptSize,
    /// Hash of the prompt's head, for affinity; 0 if there is no prompt or the hash is not
    /// needed.
    pub prefix_hash: u64,
    /// See [`prefix_blocks`](Facts::prefix_blocks).
    pub prefix_blocks: Vec<u64>,
    /// Offset behind the `{` of the top-level object, where members are inserted.
    pub members_at: usize,
    /// Number of members of the top-level object.
    pub members: usize,
    /// Whether the top-level object is empty, so that an inserted member needs no comma.
    pub is_empty: bool,
    /// Length of the body, bytes.
    pub length: usize,
    /// Whether every decisive field could be read. If not (a `model` with a lone surrogate, a cap or an
    /// `n` beyond the number range), the request gets the default class.
    pub readable: bool,
}

/// `stream_options` as the client wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Range of the whole value (`{...}` or `null`).
    pub at: Range<usize>,
    /// Whether it is `null`.
    pub is_null: bool,
    /// Whether the object is empty.
    pub is_empty: bool,
    /// `include_usage`; value `None` for `null`.
    pub include_usage: Option<Field<Option<bool>>>,
    /// `continuous_usage_stats`; value `None` for `null`.
    pub continuous_usage_stats: Option<Field<Option<bool>>>,
}

/// The stated output caps, each `None` if absent or `null`. A cap beyond the number range is the largest
/// representable one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// `max_tokens`.
    pub max_tokens: Option<Field<u64>>,
    /// `max_completion_tokens`.
    pub max_completion_tokens: Option<Field<u64>>,
    /// `max_output_tokens`.
    pub max_output_tokens: Option<Field<u64>>,
    /// Caps under other engines' names (`n_predict`, ...).
    pub others: Vec<(&'static str, Field<u64>)>,
    /// Caps that limit nothing (`null`, -1): name and literal.
    pub open: Vec<(&'static str, Range<usize>)>,
}

impl Caps {
    /// The largest stated cap, per choice.
    #[must_use]
    pub fn largest(&self) -> Option<Tokens> {
        let fields = [&self.max_tokens, &self.max_completion_tokens, &self.max_output_tokens];
        let others = self.others.iter().map(|(_, field)| field);
        fields.into_iter().flatten().chain(others).map(|field| Tokens(field.value)).max()
    }
}

/// The reasoning switches of a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// `reasoning_effort`, if a string.
    pub effort: Option<Field<Reasoning>>,
    /// `reasoning`, and each `effort` in it.
    pub reasoning: Option<SwitchGroup<Reasoning>>,
    /// `thinking`, if an object, and the meaning of its `type`.
    pub thinking: Option<Field<Option<Reasoning>>>,
    /// `chat_template_kwargs`, and each `enable_thinking` and `thinking` in it.
    pub template: Option<SwitchGroup<bool>>,
}

/// An object whose members are switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchGroup<T> {
    /// Range of the whole value.
    pub at: Range<usize>,
    /// Whether it is `null`.
    pub is_null: bool,
    /// Whether it is neither an object nor `null`, or one of its switches is not a scalar; never edited.
    pub is_other: bool,
    /// Whether the object is empty.
    pub is_empty: bool,
    /// The switches: name, and the value if of the right type.
    pub members: Vec<(&'static str, Field<Option<T>>)>,
}

impl<T> Default for SwitchGroup<T> {
    fn default() -> Self {
        SwitchGroup { at: 0..0, is_null: false, is_other: false, is_empty: false, members: Vec::new() }
    }
}

/// The requested amount of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reasoning {
    /// `none`, `disabled`.
    None,
    /// `low` (and `minimal`).
    Low,
    /// `medium`.
    Medium,
    /// `high` (and `xhigh`, `max`).
    High,
    /// On without a level (`thinking.type: enabled` or `adaptive`, unknown words).
    On,
}

/// The inputs of the prompt estimate (docs/semantics.md 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSize {
    /// UTF-8 bytes of the decoded strings under `messages`, `prompt`, `input` and the like, without images,
    /// audio and files, plus the raw bytes of `tools` and of a response schema.
    pub bytes: u64,
    /// Tokens given as token ids, counted exactly.
    pub token_ids: u64,
    /// Whether the body has any of these fields.
    pub is_known: bool,
    /// Whether the prompt has images, audio, files or an earlier response: tokens without bytes here, so that
    /// the response's usage says nothing about bytes per token.
    pub has_media: bool,
    /// Bytes of a multipart form, mostly audio: the estimate omits their tokens, and they are charged if the
    /// engine reports no usage.
    pub form_bytes: u64,
}

impl PromptSize {
    /// Estimated prompt tokens at this model's bytes per token, rounded up.
    #[must_use]
    pub fn tokens(&self, bytes_per_token: f64) -> Tokens {
        let from_text = (self.bytes as f64 / bytes_per_token.max(0.1)).ceil() as u64;
        Tokens(from_text.saturating_add(self.token_ids))
    }
}

impl Facts {
    /// Whether the request streams.
    #[must_use]
    pub fn streams(&self) -> bool {
        self.stream.as_ref().is_some_and(|field| field.value)
    }

    /// One hash per block of 512 bytes from the prompt's start, each covering everything before it, so that
    /// prompts share as many hashes as a prefix cache could reuse. At most 128; none for a
    /// prompt shorter than a block.
    #[must_use]
    pub fn prefix_blocks(&self) -> &[u64] {
        &self.prefix_blocks
    }

    /// Expected choices of the response: `n` x prompts, at least one.
    #[must_use]
    pub fn choices(&self) -> u64 {
        self.n.max(1).saturating_mul(self.prompts.max(1))
    }

    /// Heap memory that grows with the body: `metadata`, switches, and kept prompts. Bytes.
    #[must_use]
    pub fn held(&self) -> usize {
        let text = |text: &String| text.capacity() + size_of::<String>();
        let metadata: usize = self.metadata.iter().map(|(name, value)| text(name) + text(value)).sum();
        let switches = &self.switches;
        let efforts = switches.reasoning.as_ref().map_or(0, |nest| size_of_val(&nest.members[..]));
        let thinks = switches.template.as_ref().map_or(0, |nest| size_of_val(&nest.members[..]));
        metadata + efforts + thinks + self.held_for_answer()
    }

    /// The part of it needed until the response has ended.
    #[must_use]
    pub fn held_for_answer(&self) -> usize {
        self.echo_prompts.iter().map(|prompt| prompt.capacity() + size_of::<String>()).sum()
    }

    /// Whether the client asked for the usage event.
    #[must_use]
    pub fn asks_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.include_usage.as_ref()).is_some_and(|f| f.value == Some(true))
    }

    /// Whether the client asked for usage on every event.
    #[must_use]
    pub fn asks_continuous_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.continuous_usage_stats.as_ref()).is_some_and(|f| f.value == Some(true))
    }
}

/// Why a body is refused. Texts never quote the body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The body violates RFC 8259 at this offset.
    #[error("the body is not JSON: {what} at byte {at}")]
    Grammar {
        /// Offset of the offending byte.
        at: usize,
        /// The syntax error.
        what: &'static str,
    },
    /// The top level is not an object.
    #[error("the body must be a JSON object")]
    NotAnObject,
    /// A decisive field is repeated.
    #[error("the field \"{field}\" stands twice; send it once")]
    Repeated {
        /// The field's name.
        field: &'static str,
    },
    /// A field differs from a decisive one only in letter case.
    #[error(
        "the field \"{field}\" must be written so, in small letters; another spelling is another field to some engines and the same to others"
    )]
    Miscased {
        /// The field's correct name.
        field: String,
    },
    /// A malformed multipart form.
    #[error("the form cannot be read: {what}")]
    Form {
        /// The error.
        what: &'static str,
    },
    /// Too many of something.
    #[error("it has more than {most} {what}; send at most so many")]
    TooMany {
        /// Of what, in the plural.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// A decisive field has the wrong JSON type for its dialect.
    #[error("the field \"{field}\" must be {expected}")]
    WrongType {
        /// The field's name.
        field: &'static str,
        /// The right type, with article: `a string`.
        expected: &'static str,
    },
}
