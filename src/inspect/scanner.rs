//! The scanner: turns JSON tokens into [`Facts`].

use std::ops::Range;

use super::blocks::{BlockKey, PromptSlot};
use super::bounded_value::{BoundedValue, IntegerValue, ScalarValue};
use super::facts::{Facts, Field, Reasoning, StreamOptions, SwitchGroup as Switched, Unreadable};
use super::fields::{self, FieldRule, FieldType, JsonType, StoredIn, TopLevelField};
use super::prefix::{PromptHashes, PromptPrefix};
use crate::json::{Interest, Literal, Nest, Scalar, Sink, SyntaxError, Tokenizer};
use crate::types::{ApiPath, Dialect};

/// Longest name compared; all known names are shorter.
const LONGEST_NAME: usize = 32;
/// Longest `model` read; a longer one matches no configured model.
const LONGEST_MODEL: usize = 1024;
/// Most members of `metadata` kept, and longest name or value among them.
const MOST_METADATA: usize = 64;
const LONGEST_METADATA: usize = 1024;
/// Most prompts of a completion, and most choices (`n` x prompts), because each takes memory until
/// its response has ended.
const MOST_PROMPTS: usize = 2048;
const MOST_CHOICES: u64 = 2048;
/// Most switches of one kind in `reasoning` or `chat_template_kwargs`, repeats included.
const MOST_SWITCHES: usize = 64;
/// Depth of the members of a tool, and of an object in it.
const IN_A_TOOL: usize = 3;
const IN_AN_OBJECT_OF_A_TOOL: usize = 4;

/// Reads a request body as it arrives, in frames cut anywhere.
#[derive(Debug)]
pub struct Scanner {
    tokenizer: Tokenizer,
    reader: FactsSink,
}

impl Scanner {
    /// A scanner at the first byte of a body sent to `endpoint`. Boxed, because it is large and would be
    /// copied by moves.
    #[must_use]
    pub fn new(endpoint: ApiPath) -> Box<Self> {
        let scanner = Box::new_uninit();
        Box::write(scanner, Scanner { tokenizer: Tokenizer::new(), reader: FactsSink::new(endpoint) })
    }

    /// Sets the key of the block hashes; the default is a fixed key.
    pub fn has_key(&mut self, key: BlockKey) {
        self.reader.prefix.chain.has_key(key);
    }

    /// Makes these hashes of the prompt and no others; without this, all of them.
    pub fn hash_only(&mut self, hashes: PromptHashes) {
        let prefix = &mut self.reader.prefix;
        if !hashes.head {
            prefix.leave_head();
        }
        if !hashes.blocks {
            prefix.chain.leave();
        }
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// [`Unreadable`] for bodies that the gateway refuses; the rest of the body need not be
    /// read then.
    pub fn push(&mut self, frame: &[u8]) -> Result<(), Unreadable> {
        let pushed = self.tokenizer.push(frame, &mut self.reader);
        self.first_fault(pushed)
    }

    /// Heap memory held, bytes. Grows with the body.
    #[must_use]
    pub fn held(&self) -> usize {
        let FactsSink { prompts, prompt_ends, facts, .. } = &self.reader;
        self.tokenizer.held() + prompts.capacity() + prompt_ends.capacity() * size_of::<usize>() + facts.held()
    }

    /// Ends the body.
    ///
    /// # Errors
    /// [`Unreadable`], also if the body ends too early.
    pub fn finish(mut self: Box<Self>) -> Result<Box<Facts>, Unreadable> {
        let finished = self.tokenizer.finish(&mut self.reader);
        self.first_fault(finished)?;
        self.reader.complete(self.tokenizer.offset());
        match self.reader.fault {
            Some(fault) => Err(fault),
            None => Ok(self.reader.facts),
        }
    }

    /// The sink's error precedes the tokenizer's, which stopped later.
    fn first_fault(&self, read: Result<(), SyntaxError>) -> Result<(), Unreadable> {
        match (&self.reader.fault, read) {
            (Some(fault), _) => Err(fault.clone()),
            (None, Err(SyntaxError { at, what })) => Err(Unreadable::Grammar { at, what }),
            (None, Ok(())) => Ok(()),
        }
    }
}

/// Receives the tokens of one body. Its position is the top-level member and, inside that, the key
/// before the current value; subtrees of no interest are skipped, so no stack
/// is needed.
#[derive(Debug)]
struct FactsSink {
    dialect: Dialect,
    /// `messages` is a list of conversations.
    is_batch: bool,
    facts: Box<Facts>,
    fault: Option<Unreadable>,
    /// Members seen that may occur only once ([`fields::FieldRule::bit`]).
    seen: u32,
    /// The current top-level member, and the offset of its value.
    member: TopLevelField,
    rule: Option<&'static FieldRule>,
    value_at: usize,
    /// The key before the next value inside the member.
    inner: Inner,
    /// Depth of the outermost object in a prompt, and of a call's arguments inside it.
    object_at: Option<usize>,
    arguments_at: Option<usize>,
    /// Depth of an object that is not text, and the key under which it may name a stored object.
    reference: Option<(usize, &'static [u8])>,
    /// State of the current object in a prompt.
    object: Described,
    /// Offset of a schema that is counted by its raw bytes.
    schema_at: Option<usize>,
    /// Name of the `metadata` member whose value comes next.
    metadata_name: String,
    /// Offset behind the last top-level value; 0 before the first.
    behind_last: usize,
    /// `priority` is the first member, and no other key has come yet.
    priority_leads: bool,
    purpose: Purpose,
    scalar_at: usize,
    kept: BoundedValue,
    prefix: PromptPrefix,
    /// Decoded prompts of a completion, and their ends. Kept until the body is complete, because `echo` may
    /// follow `prompt`.
    prompts: Vec<u8>,
    prompt_ends: Vec<usize>,
    /// The current text is one of those prompts.
    is_kept_prompt: bool,
    /// `reasoning_effort`, `reasoning.effort`, `thinking.type`: the first one stated wins.
    efforts: [Option<Reasoning>; 3],
}

/// State of an object in a prompt. The bytes under its `data` may be text or not, depending on its `type`,
/// which may come later.
#[derive(Clone, Copy, Debug, Default)]
struct Described {
    /// Depth of its members.
    depth: usize,
    is_media: bool,
    /// Bytes of its `data` counted so far.
    data: u64,
}

/// The key before a value inside a top-level member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inner {
    /// No key: an array element.
    Element,
    IncludeUsage,
    ContinuousUsage,
    /// `reasoning.effort` or `thinking.type`.
    Effort,
    /// `thinking.budget_tokens`.
    Budget,
    /// A switch of `chat_template_kwargs`.
    Thinks(&'static str),
    Metadata,
    /// A member of `nvext` that steers routing, unless `null`.
    Steers,
    /// Something other than text, unless `null`.
    Media,
    /// The name of a stored file, unless `null`.
    Stored,
    /// Such names in a tool.
    StoredInTool(StoredIn),
    /// An object in which under this key such a name may stand.
    Reference(&'static [u8]),
    /// Text read by the model, or counted like it.
    Text,
    Said,
    /// Arguments of a tool call, also read by the model.
    Arguments,
    /// The role, the type of an object in a prompt, or its possible bytes.
    Role,
    Type,
    Data,
    /// `prompt.id` of a response.
    Id,
    /// A JSON schema of the response.
    Schema,
    Other,
}

/// Use of the current scalar's pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Nothing,
    Name,
    /// A decisive string or number.
    String,
    Number,
    /// Text read by the model.
    Prompt,
    /// A token id, for the prefix hash.
    TokenId,
    /// Other input of the prefix hash: tools, the cache salt.
    Hashed,
}

impl FactsSink {
    fn new(endpoint: ApiPath) -> Self {
        FactsSink {
            dialect: endpoint.asks_in(),
            is_batch: endpoint.is_batch(),
            facts: Box::write(Box::new_uninit(), Facts { n: 1, prompts: 1, readable: true, ..Facts::default() }),
            fault: None,
            seen: 0,
            member: TopLevelField::Other,
            rule: None,
            value_at: 0,
            inner: Inner::Element,
            object_at: None,
            arguments_at: None,
            reference: None,
            object: Described::default(),
            schema_at: None,
            metadata_name: String::new(),
            behind_last: 0,
            priority_leads: false,
            purpose: Purpose::Nothing,
            scalar_at: 0,
            kept: BoundedValue::default(),
            prefix: PromptPrefix::new(endpoint.dialect()),
            prompts: Vec::new(),
            prompt_ends: Vec::new(),
            is_kept_prompt: false,
            efforts: [None; 3],
        }
    }

    fn complete(&mut self, length: usize) {
        let facts = &mut self.facts;
        facts.length = length;
        facts.is_empty = facts.members == 0;
        facts.prompts = (self.prompt_ends.len() as u64).max(1);
        if facts.choices() > MOST_CHOICES {
            self.fault = Some(Unreadable::TooMany { what: "choices (n times prompts)", most: MOST_CHOICES });
            return;
        }
        facts.prefix_hash = self.prefix.hash();
        let model = facts.model.as_ref().map_or("", |field| &field.value);
        facts.prefix_blocks = self.prefix.chain.finish(self.dialect, model);
        facts.reasoning = self.efforts.into_iter().flatten().next();
        if facts.echo {
            let starts = std::iter::once(0).chain(self.prompt_ends.iter().copied());
            let prompts = starts.zip(&self.prompt_ends).map(|(from, &to)| &self.prompts[from..to]);
            facts.echo_prompts = prompts.map(|text| String::from_utf8_lossy(text).into_owned()).collect();
        }
    }

    /// Ends a prompt of a completion.
    fn prompt_ends(&mut self) {
        if self.prompt_ends.len() == MOST_PROMPTS {
            return self.refuse(Unreadable::TooMany { what: "prompts", most: MOST_PROMPTS as u64 });
        }
        self.prompt_ends.push(self.prompts.len());
    }

    /// Keeps the first error.
    fn refuse(&mut self, why: Unreadable) {
        self.fault.get_or_insert(why);
    }

    fn refuse_type(&mut self, field: &'static str, wanted: FieldType) {
        self.refuse(Unreadable::WrongType { field, expected: wanted.expected() });
    }

    // Top-level members, from key to end of value.

    fn member_named(&mut self, name: &[u8]) {
        self.member = TopLevelField::called(name, self.dialect);
        self.rule = self.member.rule(self.dialect);
        self.prefix.member_begins(PromptSlot::of(self.member, name));
        self.facts.members += 1;
        if self.member == TopLevelField::Other
            && let Some(field) = TopLevelField::miscased(name, self.dialect)
        {
            self.refuse(Unreadable::Miscased { field });
        }
        if std::mem::take(&mut self.priority_leads)
            && let Some(range) = &mut self.facts.priority
        {
            range.end = self.scalar_at;
        }
        let Some(rule) = self.rule else { return };
        if self.seen & rule.bit != 0 {
            self.refuse(Unreadable::Repeated { field: rule.field });
        }
        self.seen |= rule.bit;
        if self.member == TopLevelField::Priority {
            // Cut from behind the preceding value, comma included. If it is the first member, cut up to the
            // next key instead.
            self.priority_leads = self.facts.members == 1;
            let from = if self.priority_leads { self.scalar_at } else { self.behind_last };
            self.facts.priority = Some(from..from);
        }
    }

    fn value_begins(&mut self, kind: JsonType, at: usize) {
        self.value_at = at;
        self.inner = Inner::Element;
        if let Some(rule) = self.rule
            && !rule.wanted.takes(kind)
        {
            self.refuse_type(rule.field, rule.wanted);
        }
        if kind == JsonType::Null {
            return;
        }
        match self.member {
            TopLevelField::Prompt | TopLevelField::Input | TopLevelField::Words => self.facts.prompt.is_known = true,
            TopLevelField::Earlier => {
                self.facts.prompt.has_media = true;
                self.prefix.chain.leave();
                self.facts.names_stored |= self.dialect == Dialect::Responses;
            }
            TopLevelField::Container => self.facts.names_stored = true,
            TopLevelField::Schema => self.schema_at = Some(at),
            TopLevelField::Transfer => self.facts.steers = true,
            TopLevelField::Reasoning if kind != JsonType::Object => {
                self.facts.switches.reasoning = Some(Switched { is_other: true, ..Switched::default() });
            }
            TopLevelField::Template if kind != JsonType::Object => {
                self.facts.switches.template = Some(Switched { is_other: true, ..Switched::default() });
            }
            _ => {}
        }
    }

    /// A key ended at `past`.
    fn named(&mut self, name: &[u8], past: usize, depth: usize) {
        if depth == 1 {
            self.member_named(name);
        } else {
            self.inner = self.inner_named(name, depth);
            self.is_called_with(past - self.scalar_at - 2);
        }
    }

    fn scalar_ends(&mut self, past: usize, depth: usize) {
        self.schema_ends(past, depth);
        self.inner = Inner::Element;
        if depth == 1 {
            self.value_ends(past);
        }
    }

    fn value_ends(&mut self, past: usize) {
        self.behind_last = past;
        if self.member == TopLevelField::Priority
            && let Some(range) = &mut self.facts.priority
        {
            range.end = past;
        }
    }

    /// A schema ended; it is counted by its raw bytes, because nothing decodes its text.
    fn schema_ends(&mut self, past: usize, depth: usize) {
        let is_whole = self.inner == Inner::Schema || self.member == TopLevelField::Schema && depth == 1;
        if is_whole && let Some(at) = self.schema_at.take() {
            self.facts.prompt.bytes += (past - at) as u64;
        }
    }

    // Inside members.

    /// Bytes of a key that are examined.
    fn longest_name(&self, depth: usize) -> usize {
        let is_long = depth > 1 && (self.member == TopLevelField::Metadata || self.member.is_tools());
        if is_long { LONGEST_METADATA } else { LONGEST_NAME }
    }

    fn inner_named(&mut self, name: &[u8], depth: usize) -> Inner {
        match self.member {
            TopLevelField::Template => {
                self.facts.switches.template.iter_mut().for_each(|nest| nest.is_empty = false);
                match name {
                    b"enable_thinking" => Inner::Thinks("enable_thinking"),
                    b"thinking" => Inner::Thinks("thinking"),
                    // Arguments of a chat template may appear in its output.
                    _ => Inner::Schema,
                }
            }
            TopLevelField::StreamOptions => {
                let inner = option(name);
                self.option_named(inner);
                if inner == Inner::Other
                    && let Some(folded) = fields::folded(name)
                    && let Some(field) = option(folded.as_bytes()).option_field()
                {
                    self.refuse(Unreadable::Miscased { field: field.to_owned() });
                }
                inner
            }
            TopLevelField::Reasoning => {
                self.facts.switches.reasoning.iter_mut().for_each(|nest| nest.is_empty = false);
                if name == b"effort" { Inner::Effort } else { Inner::Other }
            }
            TopLevelField::Thinking if name == b"type" => Inner::Effort,
            TopLevelField::Thinking if name == b"budget_tokens" => Inner::Budget,
            member if fields::steers_inside(member, name) => Inner::Steers,
            TopLevelField::Format if fields::leads_to_schema(name) => Inner::Schema,
            TopLevelField::Metadata => match std::str::from_utf8(name) {
                Ok(name) if name.len() <= LONGEST_METADATA => {
                    name.clone_into(&mut self.metadata_name);
                    Inner::Metadata
                }
                _ => Inner::Other,
            },
            member if member.is_tools() => {
                self.prefix.chain.name(if name.len() > LONGEST_METADATA { b"\xFF" } else { name });
                let stored = fields::stored_in_tool(name, depth == IN_A_TOOL);
                let is_near = self.dialect == Dialect::Responses && matches!(depth, IN_A_TOOL | IN_AN_OBJECT_OF_A_TOOL);
                stored.filter(|_| is_near).map_or(Inner::Other, Inner::StoredInTool)
            }
            member if member.is_prompt() => self.prompt_named(name, depth),
            _ => Inner::Other,
        }
    }

    /// The role of the value under a key of an object in a prompt.
    fn prompt_named(&mut self, name: &[u8], depth: usize) -> Inner {
        if self.arguments_at.is_some() {
            return Inner::Text;
        }
        if let Some((_, stored)) = self.reference {
            return if name == stored { Inner::Stored } else { Inner::Media };
        }
        if self.object.depth != depth {
            self.object = Described { depth, ..Described::default() };
        }
        match name {
            b"type" => Inner::Type,
            b"role" => Inner::Role,
            b"id" if self.member == TopLevelField::Prompt && depth == 2 => Inner::Id,
            b"approval_request_id" if self.dialect == Dialect::Responses => Inner::Stored,
            _ if fields::leads_to_text(name) => Inner::Text,
            _ if fields::leads_to_arguments(name) => Inner::Arguments,
            _ if fields::leads_to_data(name) => Inner::Data,
            _ if fields::leads_to_media(name) => {
                self.facts.prompt.has_media = true;
                match fields::reference_in(name, self.dialect) {
                    Some(stored) => Inner::Reference(stored),
                    None if fields::leads_to_stored(name) => Inner::Stored,
                    None => Inner::Media,
                }
            }
            _ if fields::says_coding(name) => {
                self.object.is_media = true;
                Inner::Media
            }
            _ => Inner::Said,
        }
    }

    /// Whether the current text belongs to the prompt's head, for affinity.
    fn is_prefix(&self) -> bool {
        self.prefix.wants() && self.inner != Inner::Said
    }

    /// Ends an object in a prompt; bytes that turn out not to be text are not counted.
    fn described(&mut self, depth: usize) {
        if self.object.depth != depth {
            return;
        }
        let Described { is_media, data, .. } = std::mem::take(&mut self.object);
        if is_media {
            self.facts.prompt.bytes = self.facts.prompt.bytes.saturating_sub(data);
            self.facts.prompt.has_media = true;
        }
    }

    /// Counts bytes of text read by the model.
    fn counts(&mut self, bytes: usize) {
        self.facts.prompt.bytes += bytes as u64;
        if self.inner == Inner::Data {
            self.object.data += bytes as u64;
        }
    }

    /// Counts a tool call's arguments by their raw bytes, because the model reads them as written, including
    /// names, numbers and brackets.
    fn is_called_with(&mut self, bytes: usize) {
        if self.arguments_at.is_some() {
            self.facts.prompt.bytes += bytes as u64;
        }
    }

    /// The prompt refers to a stored one.
    fn names_prompt(&mut self) {
        let is_stored = self.dialect == Dialect::Responses;
        self.facts.names_stored |= is_stored;
        self.facts.prompt.has_media |= is_stored;
    }

    fn option_named(&mut self, inner: Inner) {
        let Some(options) = &mut self.facts.stream_options else { return };
        options.is_empty = false;
        let repeated = match inner {
            Inner::IncludeUsage if options.include_usage.is_some() => INCLUDE_USAGE,
            Inner::ContinuousUsage if options.continuous_usage_stats.is_some() => CONTINUOUS_USAGE,
            _ => return,
        };
        self.refuse(Unreadable::Repeated { field: repeated });
    }

    /// A known member of `stream_options` is not a boolean.
    fn option_is_no_flag(&mut self) {
        match self.inner {
            Inner::IncludeUsage => self.refuse_type(INCLUDE_USAGE, FieldType::Flag),
            Inner::ContinuousUsage => self.refuse_type(CONTINUOUS_USAGE, FieldType::Flag),
            _ => {}
        }
    }

    /// Whether the model reads a string at this position.
    fn is_text(&self) -> bool {
        let is_none = matches!(self.inner, Inner::Other | Inner::Media | Inner::Stored | Inner::Reference(_));
        self.member.is_prompt() && !is_none && self.reference.is_none()
    }

    /// Whether this string is a prompt or an item of a list of prompts. Strings inside objects are not.
    fn is_completion_prompt(&self, depth: usize) -> bool {
        let is_prompt = self.member == TopLevelField::Prompt && self.dialect == Dialect::Completions;
        is_prompt && (depth < 2 || depth == 2 && matches!(self.inner, Inner::Element))
    }

    /// Use of a string or number, and the number of bytes needed of it.
    fn purpose_of(&self, what: Scalar, depth: usize) -> (Purpose, usize) {
        let is_string = what == Scalar::String;
        match self.member {
            TopLevelField::Model if is_string => (Purpose::String, LONGEST_MODEL),
            TopLevelField::User if is_string => (Purpose::String, 0),
            TopLevelField::Effort if is_string && depth == 1 => (Purpose::String, LONGEST_NAME),
            TopLevelField::Reasoning | TopLevelField::Thinking if is_string && matches!(self.inner, Inner::Effort) => {
                (Purpose::String, LONGEST_NAME)
            }
            TopLevelField::Metadata if is_string && matches!(self.inner, Inner::Metadata) => {
                (Purpose::String, LONGEST_METADATA)
            }
            TopLevelField::MaxTokens
            | TopLevelField::MaxCompletionTokens
            | TopLevelField::MaxOutputTokens
            | TopLevelField::OtherCap(_)
            | TopLevelField::MinTokens
            | TopLevelField::N
            | TopLevelField::BestOf
            | TopLevelField::Priority
                if !is_string =>
            {
                (Purpose::Number, LONGEST_NAME)
            }
            TopLevelField::Thinking if !is_string && matches!(self.inner, Inner::Budget) => {
                (Purpose::Number, LONGEST_NAME)
            }
            TopLevelField::Tools | TopLevelField::Functions if depth > 1 => (Purpose::Hashed, 0),
            TopLevelField::Salt if is_string && depth == 1 => (Purpose::Hashed, 0),
            _ if is_string && matches!(self.inner, Inner::Type | Inner::Role) => (Purpose::String, LONGEST_NAME),
            _ if is_string && self.is_text() => (Purpose::Prompt, 0),
            member if !is_string && member.takes_token_ids() && depth > 1 && self.object_at.is_none() => {
                (Purpose::TokenId, 0)
            }
            _ => (Purpose::Nothing, 0),
        }
    }

    /// Begins a string or number that is not a key. Returns the number of bytes needed of it.
    fn scalar_begins(&mut self, what: Scalar, at: usize, depth: usize) -> usize {
        self.scalar_at = at;
        match depth {
            0 => self.refuse(Unreadable::NotAnObject),
            1 => self.value_begins(if what == Scalar::String { JsonType::Text } else { JsonType::Number }, at),
            _ => {
                self.option_is_no_flag();
                self.media_stands();
                self.facts.has_tools |= matches!(self.member, TopLevelField::Tools | TopLevelField::Functions);
                match self.inner {
                    Inner::Schema => self.schema_at = Some(at),
                    Inner::Stored | Inner::StoredInTool(StoredIn::IdOrObject) => {
                        self.facts.names_stored |= what == Scalar::String;
                    }
                    _ => {}
                }
            }
        }
        let most;
        (self.purpose, most) = self.purpose_of(what, depth);
        match self.purpose {
            Purpose::TokenId => self.facts.prompt.token_ids += 1,
            Purpose::Prompt => self.is_kept_prompt = self.is_completion_prompt(depth),
            _ => {}
        }
        most
    }

    fn take_string(&mut self, said: ScalarValue<'_>, past: usize) {
        let at = self.scalar_at..past;
        match (self.member, self.inner) {
            (TopLevelField::Model, _) => match said.text() {
                Some(text) => self.facts.model = Some(Field { value: text.into(), at }),
                None => self.facts.readable = false,
            },
            (TopLevelField::User, _) => self.facts.readable &= !said.has_lone_surrogate(),
            (TopLevelField::Effort, _) => {
                self.efforts[0] = self.reasoning(said);
                self.facts.switches.effort = self.efforts[0].map(|value| Field { value, at });
            }
            (TopLevelField::Reasoning, _) => {
                self.efforts[1] = self.reasoning(said);
                self.effort_stands(self.efforts[1], at);
            }
            (TopLevelField::Thinking, _) => self.efforts[2] = self.reasoning(said),
            (_, Inner::Type | Inner::Role) => {
                if self.inner == Inner::Role && self.prefix.chain.is_on() {
                    self.prefix.chain.role(said.text().unwrap_or_default());
                }
                if !fields::is_word(said.name()) {
                    self.facts.prompt.bytes += (at.end - at.start - 2) as u64;
                } else if self.inner == Inner::Type {
                    let kind = said.text().unwrap_or_default();
                    self.object.is_media |= fields::is_media(kind);
                    self.facts.names_stored |= self.dialect == Dialect::Responses && kind == "item_reference";
                }
            }
            (TopLevelField::Metadata, Inner::Metadata) => {
                let Some(value) = said.text() else { return };
                if self.facts.metadata.len() == MOST_METADATA {
                    return self
                        .refuse(Unreadable::TooMany { what: "strings in \"metadata\"", most: MOST_METADATA as u64 });
                }
                self.facts.metadata.push((std::mem::take(&mut self.metadata_name), value.to_owned()));
            }
            _ => {}
        }
    }

    fn effort_stands(&mut self, value: Option<Reasoning>, at: Range<usize>) {
        let Some(nest) = &mut self.facts.switches.reasoning else { return };
        if nest.members.len() == MOST_SWITCHES {
            return self
                .refuse(Unreadable::TooMany { what: "\"effort\" in \"reasoning\"", most: MOST_SWITCHES as u64 });
        }
        nest.members.push(("effort", Field { value, at }));
    }

    fn reasoning(&mut self, said: ScalarValue<'_>) -> Option<Reasoning> {
        self.facts.readable &= !said.has_lone_surrogate();
        said.text().map(fields::reasoning)
    }

    fn take_number(&mut self, said: ScalarValue<'_>, past: usize) {
        let whole = said.whole();
        let least = match (self.member, whole) {
            (TopLevelField::MinTokens, IntegerValue::Count(least)) => Some(least),
            (TopLevelField::Thinking, IntegerValue::Count(budget)) => Some(budget.saturating_add(1)),
            // Their value is the engine's to judge.
            (TopLevelField::MinTokens | TopLevelField::Thinking, _) => return,
            _ => None,
        };
        if let Some(least) = least {
            self.facts.least_output = self.facts.least_output.max(least);
            return;
        }
        if let Some(rule) = self.rule {
            let is_wrong = match rule.wanted {
                FieldType::Count => {
                    matches!(whole, IntegerValue::MinusOne | IntegerValue::Negative | IntegerValue::Fraction)
                }
                FieldType::Cap => matches!(whole, IntegerValue::Negative | IntegerValue::Fraction),
                _ => whole == IntegerValue::Fraction,
            };
            if is_wrong {
                return self.refuse_type(rule.field, rule.wanted);
            }
        }
        let (at, member) = (self.scalar_at..past, self.member);
        match (self.cap_name(), whole) {
            (Some(name), IntegerValue::MinusOne) => self.facts.caps.open.push((name, at)),
            (_, IntegerValue::MinusOne | IntegerValue::Negative | IntegerValue::Fraction) => {}
            (Some(name), IntegerValue::Count(value)) => self.set_cap(name, Field { value, at }),
            (Some(name), IntegerValue::Beyond) => {
                self.set_cap(name, Field { value: u64::MAX, at });
                self.facts.readable = false;
            }
            (None, IntegerValue::Count(value)) if member == TopLevelField::N => self.facts.n = value,
            (None, IntegerValue::Beyond) if member != TopLevelField::Priority => {
                if member == TopLevelField::N {
                    self.facts.n = u64::MAX;
                }
                self.facts.readable = false;
            }
            (None, _) => {}
        }
    }

    /// The output cap stated by the current member, if it is one.
    fn cap_name(&self) -> Option<&'static str> {
        Some(match self.member {
            TopLevelField::MaxTokens => "max_tokens",
            TopLevelField::MaxCompletionTokens => "max_completion_tokens",
            TopLevelField::MaxOutputTokens => "max_output_tokens",
            TopLevelField::OtherCap(cap) => fields::OTHER_CAPS[cap],
            _ => return None,
        })
    }

    fn set_cap(&mut self, name: &'static str, cap: Field<u64>) {
        let caps = &mut self.facts.caps;
        match self.member {
            TopLevelField::MaxTokens => caps.max_tokens = Some(cap),
            TopLevelField::MaxCompletionTokens => caps.max_completion_tokens = Some(cap),
            TopLevelField::MaxOutputTokens => caps.max_output_tokens = Some(cap),
            _ => caps.others.push((name, cap)),
        }
    }

    fn take_literal(&mut self, what: Literal, at: Range<usize>) {
        let flag = what.as_bool();
        match self.member {
            TopLevelField::Stream => self.facts.stream = flag.map(|value| Field { value, at }),
            TopLevelField::Background => self.facts.background = flag == Some(true),
            TopLevelField::Echo => self.facts.echo = flag == Some(true),
            TopLevelField::Reasoning if flag.is_none() => {
                self.facts.switches.reasoning = Some(Switched { at, is_null: true, ..Switched::default() });
            }
            TopLevelField::Template if flag.is_none() => {
                self.facts.switches.template = Some(Switched { at, is_null: true, ..Switched::default() });
            }
            TopLevelField::StreamOptions if flag.is_none() => {
                self.facts.stream_options = Some(StreamOptions { at, is_null: true, ..StreamOptions::default() });
            }
            _ => {
                if let Some(name) = self.cap_name() {
                    self.facts.caps.open.push((name, at));
                }
            }
        }
    }

    fn take_inner_literal(&mut self, what: Literal, at: Range<usize>) {
        self.is_called_with(at.len());
        let inner = std::mem::replace(&mut self.inner, Inner::Element);
        match (self.member, &mut self.facts.stream_options) {
            (TopLevelField::Tools | TopLevelField::Functions, _) => {
                self.facts.has_tools = true;
                self.prefix.chain.word(what);
            }
            (TopLevelField::Reasoning, _) if inner == Inner::Effort => self.effort_stands(None, at),
            (TopLevelField::Template, _) => self.thinks(inner, what.as_bool(), at),
            (TopLevelField::Extension | TopLevelField::Passed, _) => {
                self.facts.steers |= inner == Inner::Steers && what != Literal::Null;
            }
            (TopLevelField::StreamOptions, Some(options)) => {
                let field = Some(Field { value: what.as_bool(), at });
                match inner {
                    Inner::IncludeUsage => options.include_usage = field,
                    Inner::ContinuousUsage => options.continuous_usage_stats = field,
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// Stops the block hashes, because no cache identifies media by text.
    fn media_stands(&mut self) {
        if matches!(self.inner, Inner::Media | Inner::Stored | Inner::Reference(_)) {
            self.prefix.chain.stop();
        }
    }

    /// A switch of the chat template, of any type.
    fn thinks(&mut self, inner: Inner, value: Option<bool>, at: Range<usize>) {
        if let (Inner::Thinks(name), Some(nest)) = (inner, &mut self.facts.switches.template) {
            if nest.members.len() == MOST_SWITCHES {
                let what = "\"enable_thinking\" and \"thinking\" in \"chat_template_kwargs\"";
                return self.refuse(Unreadable::TooMany { what, most: MOST_SWITCHES as u64 });
            }
            nest.members.push((name, Field { value, at }));
        }
    }

    /// An object or a list in the place of a switch or of a steering member.
    fn switch_is_none(&mut self) {
        let switches = &mut self.facts.switches;
        match (self.member, self.inner) {
            (TopLevelField::Reasoning, Inner::Effort) => {
                switches.reasoning.iter_mut().for_each(|nest| nest.is_other = true)
            }
            (TopLevelField::Template, Inner::Thinks(_)) => {
                switches.template.iter_mut().for_each(|nest| nest.is_other = true)
            }
            (TopLevelField::Extension | TopLevelField::Passed, Inner::Steers) => self.facts.steers = true,
            _ => {}
        }
    }

    fn opens_value(&mut self, nest: Nest, at: usize) -> Interest {
        let kind = if nest == Nest::Object { JsonType::Object } else { JsonType::Array };
        self.value_begins(kind, at);
        match (self.member, nest) {
            (TopLevelField::StreamOptions, Nest::Object) => {
                self.facts.stream_options = Some(StreamOptions { is_empty: true, ..StreamOptions::default() });
                Interest::Read
            }
            (TopLevelField::Reasoning, Nest::Object) => {
                self.facts.switches.reasoning = Some(Switched { is_empty: true, ..Switched::default() });
                Interest::Read
            }
            (TopLevelField::Template, Nest::Object) => {
                self.facts.switches.template = Some(Switched { is_empty: true, ..Switched::default() });
                Interest::Read
            }
            (TopLevelField::Thinking | TopLevelField::Metadata | TopLevelField::Format, Nest::Object) => Interest::Read,
            (TopLevelField::Extension | TopLevelField::Passed, _) => Interest::Read,
            (TopLevelField::Tools | TopLevelField::Functions, Nest::Array) => Interest::Read,
            (member, _) if member.is_prompt() => {
                self.object_at = (nest == Nest::Object).then_some(1);
                (self.arguments_at, self.reference, self.object) = (None, None, Described::default());
                Interest::Read
            }
            _ => Interest::Skip,
        }
    }

    /// An object or a list in tools: whether it is read.
    fn opens_in_tools(&mut self, inner: Inner, nest: Nest, depth: usize) -> bool {
        let may_name = match (inner, nest) {
            (Inner::StoredInTool(StoredIn::List), Nest::Array) => {
                self.inner = Inner::StoredInTool(StoredIn::IdOrObject);
                true
            }
            (Inner::StoredInTool(StoredIn::IdOrObject), Nest::Object) => true,
            _ => self.dialect == Dialect::Responses && depth + 1 == IN_A_TOOL,
        };
        may_name || self.prefix.chain.wants()
    }

    fn opens_inside(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        self.option_is_no_flag();
        self.switch_is_none();
        self.media_stands();
        self.is_called_with("[]".len());
        let is_text = self.is_text();
        let is_prompt = self.is_completion_prompt(depth);
        let inner = std::mem::replace(&mut self.inner, Inner::Element);
        match inner {
            Inner::Schema => {
                // Counted when it ends.
                (self.schema_at, self.inner) = (Some(at), Inner::Schema);
                return Interest::Skip;
            }
            Inner::Arguments if is_text => self.arguments_at = Some(depth),
            Inner::Id => self.names_prompt(),
            Inner::Reference(stored) if nest == Nest::Object => {
                self.reference = Some((depth, stored));
                return Interest::Read;
            }
            _ => {}
        }
        if is_text && nest == Nest::Object {
            self.object_at.get_or_insert(depth);
        }
        if self.member.is_tools() {
            self.facts.has_tools = true;
            self.prefix.chain.opens(nest);
            return if self.opens_in_tools(inner, nest, depth) { Interest::Read } else { Interest::Skip };
        }
        if nest == Nest::Array && self.member.takes_token_ids() {
            self.prefix.chain.part();
        }
        // A nested array among prompts is one prompt of token ids, whose text is unknown. In a batch it is a
        // conversation, which gets its own response.
        let is_conversation = self.is_batch && self.member == TopLevelField::Words && depth == 2;
        if nest == Nest::Array && (is_prompt || is_conversation) {
            self.prompt_ends();
        }
        let is_read =
            is_text || matches!(self.member, TopLevelField::Extension | TopLevelField::Passed | TopLevelField::Format);
        if is_read { Interest::Read } else { Interest::Skip }
    }
}

/// The meaning of a member of `stream_options`.
fn option(name: &[u8]) -> Inner {
    match name {
        b"include_usage" => Inner::IncludeUsage,
        b"continuous_usage_stats" => Inner::ContinuousUsage,
        _ => Inner::Other,
    }
}

impl Inner {
    /// The name of a member of `stream_options` in rejections.
    const fn option_field(self) -> Option<&'static str> {
        match self {
            Inner::IncludeUsage => Some(INCLUDE_USAGE),
            Inner::ContinuousUsage => Some(CONTINUOUS_USAGE),
            _ => None,
        }
    }
}

const INCLUDE_USAGE: &str = "stream_options.include_usage";
const CONTINUOUS_USAGE: &str = "stream_options.continuous_usage_stats";

impl Sink for FactsSink {
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        match (depth, nest) {
            (0, Nest::Object) => {
                self.facts.members_at = at + 1;
                Interest::Read
            }
            (0, Nest::Array) => {
                self.refuse(Unreadable::NotAnObject);
                Interest::Skip
            }
            (1, _) => self.opens_value(nest, at),
            _ => self.opens_inside(nest, at, depth),
        }
    }

    fn close(&mut self, nest: Nest, past: usize, depth: usize) {
        self.schema_ends(past, depth);
        self.inner = Inner::Element;
        if nest == Nest::Object {
            self.described(depth + 1);
        }
        self.object_at.take_if(|at| *at == depth);
        self.arguments_at.take_if(|at| *at == depth);
        self.reference.take_if(|(at, _)| *at == depth);
        if depth != 1 {
            if depth > 1 && self.member.is_tools() {
                self.prefix.chain.closes(nest);
            } else if depth == 2 && nest == Nest::Object && self.member.is_prompt() {
                self.prefix.chain.message_ends();
            }
            return;
        }
        match (self.member, &mut self.facts.stream_options) {
            (TopLevelField::Tools | TopLevelField::Functions, _) => {
                self.facts.prompt.bytes += (past - self.value_at) as u64;
                self.facts.prompt.is_known = true;
            }
            (TopLevelField::StreamOptions, Some(options)) => options.at = self.value_at..past,
            _ => {}
        }
        let (at, switches) = (self.value_at..past, &mut self.facts.switches);
        match self.member {
            TopLevelField::Reasoning => switches.reasoning.iter_mut().for_each(|nest| nest.at = at.clone()),
            TopLevelField::Template => switches.template.iter_mut().for_each(|nest| nest.at = at.clone()),
            TopLevelField::Thinking if nest == Nest::Object => {
                switches.thinking = Some(Field { value: self.efforts[2], at });
            }
            _ => {}
        }
        self.value_ends(past);
    }

    fn begin(&mut self, what: Scalar, at: usize, depth: usize) -> Interest {
        let most = if what == Scalar::Key {
            (self.scalar_at, self.purpose) = (at, Purpose::Name);
            self.longest_name(depth)
        } else {
            self.scalar_begins(what, at, depth)
        };
        match self.purpose {
            Purpose::Nothing => Interest::Skip,
            Purpose::TokenId | Purpose::Hashed if !self.prefix.wants() => Interest::Skip,
            Purpose::TokenId | Purpose::Hashed | Purpose::Prompt => Interest::Read,
            Purpose::Name | Purpose::String | Purpose::Number => {
                self.kept.begin(most);
                Interest::Read
            }
        }
    }

    fn piece(&mut self, decoded: &[u8]) {
        match self.purpose {
            Purpose::Nothing => {}
            Purpose::Name | Purpose::String => self.kept.push(decoded),
            Purpose::Number => self.kept.push_number(decoded),
            Purpose::TokenId => self.prefix.push_id(decoded),
            Purpose::Hashed => self.prefix.chain.push(decoded),
            Purpose::Prompt => {
                self.counts(decoded.len());
                if self.is_prefix() {
                    self.prefix.push(decoded);
                } else {
                    self.prefix.chain.push(decoded);
                }
                if self.is_kept_prompt {
                    self.prompts.extend_from_slice(decoded);
                }
            }
        }
    }

    /// Of a long prompt only the length is needed, and its blocks, which decode escapes
    /// themselves.
    fn looks(&self) -> bool {
        let is_head = self.prefix.head_wants() && self.inner != Inner::Said;
        self.purpose != Purpose::Prompt || is_head || self.is_kept_prompt
    }

    fn unseen(&mut self, raw: &[u8], decoded: usize) {
        self.counts(decoded);
        self.prefix.chain.push_escaped(raw);
    }

    fn lone_surrogate(&mut self) {
        match self.purpose {
            Purpose::Prompt | Purpose::Hashed => self.piece("\u{FFFD}".as_bytes()),
            _ => self.kept.push_lone_surrogate(),
        }
    }

    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        debug_assert!((what == Scalar::Key) == (self.purpose == Purpose::Name), "a key has a purpose of its own");
        match self.purpose {
            Purpose::Name | Purpose::Number | Purpose::String => {
                let kept = std::mem::take(&mut self.kept);
                match self.purpose {
                    Purpose::Name => self.named(kept.said().name(), past, depth),
                    Purpose::Number => self.take_number(kept.said(), past),
                    _ => self.take_string(kept.said(), past),
                }
                self.kept = kept;
                if self.purpose == Purpose::Name {
                    return;
                }
            }
            Purpose::TokenId => self.prefix.id_ends(),
            Purpose::Hashed => self.prefix.chain.scalar_ends(what),
            Purpose::Prompt => {
                if self.is_prefix() {
                    self.prefix.part();
                } else {
                    self.prefix.chain.scalar_ends(what);
                }
                if self.inner == Inner::Id {
                    self.names_prompt();
                }
                if self.is_completion_prompt(depth) {
                    self.prompt_ends();
                }
            }
            Purpose::Nothing => {
                self.schema_ends(past, depth);
                self.is_called_with(past - self.scalar_at);
                let inner = std::mem::replace(&mut self.inner, Inner::Element);
                match inner {
                    Inner::Thinks(_) => self.thinks(inner, None, self.scalar_at..past),
                    Inner::Effort if self.member == TopLevelField::Reasoning => {
                        self.effort_stands(None, self.scalar_at..past)
                    }
                    Inner::Steers => self.facts.steers = true,
                    _ => {}
                }
            }
        }
        self.scalar_ends(past, depth);
    }

    /// Most scalars arrive whole and are examined in place. Inlined because the caller knows which are keys,
    /// and most are.
    #[inline(always)]
    fn scalar(&mut self, what: Scalar, decoded: &[u8], place: Range<usize>, depth: usize) {
        if what == Scalar::Key {
            self.scalar_at = place.start;
            return self.named(decoded, place.end, depth);
        }
        let most = self.scalar_begins(what, place.start, depth);
        match self.purpose {
            Purpose::String => self.take_string(ScalarValue::at_once(decoded, most), place.end),
            Purpose::Number => self.take_number(ScalarValue::at_once(decoded, most), place.end),
            Purpose::TokenId | Purpose::Hashed if !self.prefix.wants() => {}
            Purpose::Prompt | Purpose::TokenId | Purpose::Hashed => {
                self.piece(decoded);
                return self.end(what, place.end, depth);
            }
            Purpose::Name | Purpose::Nothing => return self.end(what, place.end, depth),
        }
        self.scalar_ends(place.end, depth);
    }

    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        let range = at..at + what.word().len();
        match depth {
            0 => self.refuse(Unreadable::NotAnObject),
            1 => {
                let kind = if what == Literal::Null { JsonType::Null } else { JsonType::Flag };
                self.value_begins(kind, at);
                self.take_literal(what, range.clone());
                self.value_ends(range.end);
            }
            _ => self.take_inner_literal(what, range),
        }
    }
}
