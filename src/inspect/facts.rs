//! What a request body said, as far as the gateway decides on it.

use std::ops::Range;
use std::sync::Arc;

use crate::units::Tokens;

/// A decisive field: its value, and where the value's literal stands in the body
/// (for a string, quotes included).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field<T> {
    /// The decoded value.
    pub value: T,
    /// Byte range of the literal, counted from the first byte of the (decoded) body.
    pub at: Range<usize>,
}

/// The facts of one request body. Byte offsets count from the start of the decoded body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// `model`, absent also where it was `null`.
    pub model: Option<Field<Arc<str>>>,
    /// `stream`; `null` reads as absent.
    pub stream: Option<Field<bool>>,
    /// `stream_options`, where it is an object or `null`.
    pub stream_options: Option<StreamOptions>,
    /// The output caps that the request states.
    pub caps: Caps,
    /// The fewest output tokens that will do: engines refuse a smaller cap. `min_tokens`, and one
    /// more than `thinking.budget_tokens`; 0 where neither stands.
    pub least_output: u64,
    /// `n`, the number of choices per prompt (1 where absent; beyond the number range, the
    /// largest there is).
    pub n: u64,
    /// Prompts of one request: 1, but for `completions` with an array of prompts, and for the
    /// conversations of a batch.
    pub prompts: u64,
    /// `priority`: the range of the whole member, so that cutting it out leaves valid JSON
    /// (one neighbouring comma included).
    pub priority: Option<Range<usize>>,
    /// Whether `tools` (or legacy `functions`) is a non-empty array.
    pub has_tools: bool,
    /// `reasoning_effort`, `reasoning.effort`, `thinking.type`, as one word.
    pub reasoning: Option<Reasoning>,
    /// Where the body switches reasoning on or off.
    pub switches: Switches,
    /// String members of `metadata`, in order of appearance.
    pub metadata: Vec<(String, String)>,
    /// `echo` is `true`.
    pub echo: bool,
    /// The decoded prompts, only where `echo` is true (`completions`, text prompts). Shared with
    /// the observers of the answer.
    pub echo_prompts: Arc<[String]>,
    /// `background` is `true` (Responses).
    pub background: bool,
    /// It names something that an engine stored: `previous_response_id`, `conversation`, `prompt.id`, an item
    /// by reference (Responses), or a file by its id.
    pub names_stored: bool,
    /// Something that steers stands in the body with a value other than `null`: it moves caches
    /// between engines, or says which of them takes the request.
    pub steers: bool,
    /// What the prompt estimate is made of.
    pub prompt: PromptSize,
    /// A hash of the prompt's head, for affinity; 0 where there is no prompt, or nobody asks for
    /// it.
    pub prefix_hash: u64,
    /// See [`prefix_blocks`](Facts::prefix_blocks).
    pub prefix_blocks: Vec<u64>,
    /// Offset just behind the `{` of the top-level object: where members are inserted.
    pub members_at: usize,
    /// How many members the top-level object has.
    pub members: usize,
    /// Whether the top-level object has no member at all (an inserted member takes no comma).
    pub is_empty: bool,
    /// Length of the body in bytes.
    pub length: usize,
    /// Every decisive field could be read. Where not (a `model` with a lone surrogate, a cap
    /// or an `n` beyond the number range), the request goes to the default class.
    pub readable: bool,
}

/// `stream_options` as the client wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Range of the whole value (`{...}` or `null`).
    pub at: Range<usize>,
    /// The value was `null`.
    pub is_null: bool,
    /// The object has no member.
    pub is_empty: bool,
    /// `include_usage`; value `None` for `null`.
    pub include_usage: Option<Field<Option<bool>>>,
    /// `continuous_usage_stats`; value `None` for `null`.
    pub continuous_usage_stats: Option<Field<Option<bool>>>,
}

/// The output caps that a request states, each `None` where absent or `null`. One beyond the
/// number range is the largest there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// `max_tokens`.
    pub max_tokens: Option<Field<u64>>,
    /// `max_completion_tokens`.
    pub max_completion_tokens: Option<Field<u64>>,
    /// `max_output_tokens`.
    pub max_output_tokens: Option<Field<u64>>,
    /// Caps by the names that other engines have for them (`n_predict`, ...).
    pub others: Vec<(&'static str, Field<u64>)>,
    /// Caps that stand in the body and limit nothing (`null`, -1): name and literal.
    pub open: Vec<(&'static str, Range<usize>)>,
}

impl Caps {
    /// The largest cap stated, per choice.
    #[must_use]
    pub fn largest(&self) -> Option<Tokens> {
        let fields = [&self.max_tokens, &self.max_completion_tokens, &self.max_output_tokens];
        let others = self.others.iter().map(|(_, field)| field);
        fields.into_iter().flatten().chain(others).map(|field| Tokens(field.value)).max()
    }
}

/// Where a body switches reasoning on or off, as far as it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// `reasoning_effort`, where it is a string.
    pub effort: Option<Field<Reasoning>>,
    /// `reasoning`, and each `effort` in it.
    pub reasoning: Option<SwitchGroup<Reasoning>>,
    /// `thinking`, where it is an object, and what its `type` says.
    pub thinking: Option<Field<Option<Reasoning>>>,
    /// `chat_template_kwargs`, and each `enable_thinking` and `thinking` in it.
    pub template: Option<SwitchGroup<bool>>,
}

/// A value whose members are switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchGroup<T> {
    /// Range of the whole value.
    pub at: Range<usize>,
    /// It is `null`.
    pub is_null: bool,
    /// It is neither an object nor `null`, or a switch in it is no scalar: not ours to touch.
    pub is_other: bool,
    /// The object has no member.
    pub is_empty: bool,
    /// The switches: name, and the value where it is of the right type.
    pub members: Vec<(&'static str, Field<Option<T>>)>,
}

impl<T> Default for SwitchGroup<T> {
    fn default() -> Self {
        SwitchGroup { at: 0..0, is_null: false, is_other: false, is_empty: false, members: Vec::new() }
    }
}

/// How much a request asks the model to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reasoning {
    /// `none`, `minimal`'s absence, `disabled`.
    None,
    /// `low` (and `minimal`).
    Low,
    /// `medium`.
    Medium,
    /// `high` (and `xhigh`, `max`).
    High,
    /// Switched on without a level (`thinking.type: enabled` or `adaptive`, unknown words).
    On,
}

/// The parts of the prompt estimate (docs/semantics.md 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSize {
    /// UTF-8 bytes of the decoded strings under `messages`, `prompt`, `input` and the like, but for
    /// images, audio and files, plus the raw bytes of `tools` and of a schema of the answer.
    pub bytes: u64,
    /// Tokens given as token ids: counted exactly.
    pub token_ids: u64,
    /// Whether the body had any of these fields at all.
    pub is_known: bool,
    /// Images, audio, files or an earlier response stand in the prompt: tokens that no byte
    /// here stands for, so that the answer's usage says nothing about bytes per token.
    pub has_media: bool,
    /// Bytes of a multipart form, most of them sound: they stand for tokens that the estimate leaves
    /// out, and that are charged where the engine tells none.
    pub form_bytes: u64,
}

impl PromptSize {
    /// The estimated prompt tokens at this model's bytes per token, rounded up.
    #[must_use]
    pub fn tokens(&self, bytes_per_token: f64) -> Tokens {
        let from_text = (self.bytes as f64 / bytes_per_token.max(0.1)).ceil() as u64;
        Tokens(from_text.saturating_add(self.token_ids))
    }
}

impl Facts {
    /// Whether the request asks for a stream.
    #[must_use]
    pub fn streams(&self) -> bool {
        self.stream.as_ref().is_some_and(|field| field.value)
    }

    /// A hash for each block of 512 bytes with which the prompt begins, each of them covering all
    /// in front of it too, so that prompts share as many of them as they begin alike: what a
    /// prefix cache need not compute again. At most 128; none of a prompt below one block.
    #[must_use]
    pub fn prefix_blocks(&self) -> &[u64] {
        &self.prefix_blocks
    }

    /// Choices the answer should have: `n` x prompts, at least one.
    #[must_use]
    pub fn choices(&self) -> u64 {
        self.n.max(1).saturating_mul(self.prompts.max(1))
    }

    /// Heap that grows with the body: what `metadata` says, switches, and the prompts that are kept.
    #[must_use]
    pub fn held(&self) -> usize {
        let text = |text: &String| text.capacity() + size_of::<String>();
        let metadata: usize = self.metadata.iter().map(|(name, value)| text(name) + text(value)).sum();
        let switches = &self.switches;
        let efforts = switches.reasoning.as_ref().map_or(0, |nest| size_of_val(&nest.members[..]));
        let thinks = switches.template.as_ref().map_or(0, |nest| size_of_val(&nest.members[..]));
        metadata + efforts + thinks + self.held_for_answer()
    }

    /// The part of it that is needed until the answer has ended.
    #[must_use]
    pub fn held_for_answer(&self) -> usize {
        self.echo_prompts.iter().map(|prompt| prompt.capacity() + size_of::<String>()).sum()
    }

    /// Whether the client itself asked for the usage event.
    #[must_use]
    pub fn asks_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.include_usage.as_ref()).is_some_and(|f| f.value == Some(true))
    }

    /// Whether the client itself asked for usage on every event.
    #[must_use]
    pub fn asks_continuous_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.continuous_usage_stats.as_ref()).is_some_and(|f| f.value == Some(true))
    }
}

/// Why a body cannot be taken. Texts never quote the body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The body breaks the grammar of RFC 8259 at this offset.
    #[error("the body is not JSON: {what} at byte {at}")]
    Grammar {
        /// Offset of the offending byte.
        at: usize,
        /// What was wrong there.
        what: &'static str,
    },
    /// The top level is not an object.
    #[error("the body must be a JSON object")]
    NotAnObject,
    /// A decisive field stands twice.
    #[error("the field \"{field}\" stands twice; send it once")]
    Repeated {
        /// The field's name.
        field: &'static str,
    },
    /// A field differs from a decisive one only in the case of its letters.
    #[error(
        "the field \"{field}\" must be written so, in small letters; another spelling is another field to some engines and the same to others"
    )]
    Miscased {
        /// The field's name, as it should be.
        field: String,
    },
    /// A multipart form cannot be read as one.
    #[error("the form cannot be read: {what}")]
    Form {
        /// What was wrong.
        what: &'static str,
    },
    /// More of something than is taken.
    #[error("it has more than {most} {what}; send at most so many")]
    TooMany {
        /// What there is too much of, in the plural.
        what: &'static str,
        /// How many are taken.
        most: u64,
    },
    /// A decisive field has another JSON type than its dialect gives it.
    #[error("the field \"{field}\" must be {expected}")]
    WrongType {
        /// The field's name.
        field: &'static str,
        /// What it must be, with article: `a string`.
        expected: &'static str,
    },
}
