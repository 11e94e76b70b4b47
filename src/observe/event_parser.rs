//! Parses one JSON object of a response: the data of an event, or a whole body.
//!
//! [`EventParser`] is a sink of the tokenizer. It knows the decisive positions of each dialect, skips
//! everything else, and fills a [`ParsedEvent`]. `timeline_builder` interprets it.

use std::ops::Range;

use crate::json::{Interest, Literal, Nest, Scalar, Sink};
use crate::types::Dialect;

use super::json_path::{JsonPath, NumberField, Side, StringField, member, slot_of};
use super::parsed_event::{Channel, EventKind, ParsedChoice, ParsedEvent, Reason, Status};
use super::template::{Placeholder, Placeholders};

/// Deepest container that is examined.
const DEPTH: usize = 10;

/// So many choices of one object are read: more than any request may ask for.
const MOST_CHOICES: usize = 4096;

/// Longest word kept in a shared template.
const LONGEST_WORD: usize = 48;

/// A short text; a longer one is none of the known words.
#[derive(Clone, Debug)]
struct ShortText {
    bytes: [u8; 64],
    len: usize,
}

impl ShortText {
    const EMPTY: ShortText = ShortText { bytes: [0; 64], len: 0 };

    fn push(&mut self, piece: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + piece.len()) {
            room.copy_from_slice(piece);
        }
        self.len += piece.len();
    }

    /// Makes it unequal to all known words.
    fn spoil(&mut self) {
        self.len = usize::MAX / 2;
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(b"?")
    }
}

/// Parses one JSON object.
#[derive(Clone, Debug)]
pub(super) struct EventParser {
    dialect: Dialect,
    /// A whole body rather than the data of an event.
    is_body: bool,
    /// Position of the top-level object.
    top: JsonPath,
    /// Bytes of a completion's text to keep, because it may be an echo.
    keep_text: usize,
    /// Positions of the open containers, by depth.
    places: [JsonPath; DEPTH],
    /// Position of the current key's value.
    next: JsonPath,
    /// Position of the current scalar, and its offset.
    leaf: JsonPath,
    leaf_at: usize,
    leaf_is_empty: bool,
    /// Placeholder of the current scalar.
    slot: Option<Placeholder>,
    /// Offset of a skipped container.
    skipped_at: Option<usize>,
    in_key: bool,
    /// Offset of an object in the place of a text (a tool's arguments, for example).
    object_at: usize,
    short: ShortText,
    /// Responses: content of an output item until its type is known.
    item_type: ItemType,
    item_is_named: bool,
    item: ParsedChoice,
    /// First placeholder of that item.
    item_slots: usize,
    /// Whether the current top-level member belongs to a dialect.
    is_of_dialect: bool,
    /// The text part in progress.
    part: Option<Box<PartRead>>,
    /// Whether the current choice has a delta; and its state before a whole message.
    has_delta: bool,
    before_whole: Option<Box<ParsedChoice>>,
    /// Whether the top level is an object.
    is_object: bool,
    parsed: ParsedEvent,
    /// Parts that may differ between otherwise equal events or bodies.
    slots: Placeholders,
}

/// A typed part in progress, because its type may follow its text.
#[derive(Clone, Debug)]
struct PartRead {
    depth: usize,
    is_reasoning: bool,
    /// State of its choice before it.
    visible: bool,
    bytes: u64,
    /// Index of its first placeholder.
    slots: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemType {
    Other,
    Reasoning,
    Call,
}

impl EventParser {
    /// A parser of an event's data (`is_body` false) or of a whole body.
    pub(super) fn new(dialect: Dialect, is_body: bool, keep_text: usize) -> Self {
        EventParser {
            dialect,
            is_body,
            top: JsonPath::Root,
            keep_text,
            places: [JsonPath::Nowhere; DEPTH],
            next: JsonPath::Nowhere,
            leaf: JsonPath::Nowhere,
            leaf_at: 0,
            leaf_is_empty: true,
            slot: None,
            skipped_at: None,
            in_key: false,
            object_at: 0,
            short: ShortText::EMPTY,
            item_type: ItemType::Other,
            item_is_named: false,
            item: ParsedChoice::default(),
            item_slots: 0,
            is_of_dialect: false,
            part: None,
            has_delta: false,
            before_whole: None,
            is_object: false,
            parsed: ParsedEvent::default(),
            slots: Placeholders::default(),
        }
    }

    /// A parser of a bare error object.
    pub(super) fn of_error(dialect: Dialect) -> Self {
        EventParser { top: JsonPath::Error, ..EventParser::new(dialect, false, 0) }
    }

    /// A fresh parser of the same kind.
    pub(super) fn anew(&self) -> Self {
        EventParser { top: self.top, ..EventParser::new(self.dialect, self.is_body, self.keep_text) }
    }

    /// The result, if it was an object. Only meaningful if the tokenizer found no error.
    pub(super) fn parsed(self) -> Option<ParsedEvent> {
        self.is_object.then_some(self.parsed)
    }

    /// The result in place, and the placeholders.
    pub(super) fn found(&mut self) -> Option<(&mut ParsedEvent, &Placeholders)> {
        self.is_object.then_some((&mut self.parsed, &self.slots))
    }

    /// Discards positions because the text was repaired, so no template can be made.
    pub(super) fn forget_slots(&mut self) {
        self.slots.forget();
    }

    /// Position of a value that begins at `depth`.
    fn place(&self, depth: usize) -> JsonPath {
        if depth == 0 {
            return self.top;
        }
        let around = self.places.get(depth - 1).copied().unwrap_or(JsonPath::Nowhere);
        match around {
            JsonPath::Choices => JsonPath::Choice,
            JsonPath::Text(channel) => JsonPath::Part(channel),
            JsonPath::Tools => JsonPath::Tool,
            JsonPath::Output => JsonPath::OutputItem,
            JsonPath::Content => JsonPath::ContentBlock,
            JsonPath::LogprobTokens => JsonPath::LogprobToken,
            JsonPath::Any(_) | JsonPath::Errors => around,
            _ => self.next,
        }
    }

    /// Records a value whose presence alone matters.
    fn met(&mut self, place: JsonPath, around_depth: usize) {
        let around = around_depth.checked_sub(1).and_then(|depth| self.places.get(depth));
        match (place, around) {
            (JsonPath::Errors, Some(JsonPath::Errors)) => self.parsed.has_error = true,
            (JsonPath::Error, Some(JsonPath::Root)) => self.parsed.has_error_member = true,
            _ => {}
        }
    }

    fn choice(&mut self) -> &mut ParsedChoice {
        if self.places[2] == JsonPath::OutputItem {
            return &mut self.item;
        }
        self.parsed.choice()
    }

    fn word_ended(&mut self, word: StringField, depth: usize) {
        if !self.stays_in_template(word) {
            self.slots.keep_private();
        }
        let text = self.short.text();
        match word {
            StringField::Kind => {
                self.parsed.kind = EventKind::of(text);
                self.parsed.top.type_is(text);
                self.parsed.has_error_type = self.parsed.kind == EventKind::Other && names_error(text);
            }
            StringField::Object => self.parsed.is_error_object = text == b"error",
            StringField::Code => self.parsed.error.code_is(text),
            StringField::TopCode => self.parsed.top.code_is(text),
            StringField::FlatCode => {
                self.parsed.top.code_is(text);
                self.parsed.says_flatly |= !matches!(text, b"" | b"0");
            }
            StringField::ErrorStatus => self.parsed.error.status_is(text),
            StringField::TopStatus => self.parsed.top.status_is(text),
            StringField::ErrorType => self.parsed.error.type_is(text),
            StringField::Finish => {
                let reason = Reason::of(text);
                self.choice().finish = reason;
            }
            StringField::StopReason => {
                if let Some(reason) = Reason::of(text) {
                    self.parsed.only.finish = Some(reason);
                }
            }
            StringField::ItemType => {
                self.item_type = match text {
                    b"reasoning" => ItemType::Reasoning,
                    b"function_call" | b"tool_use" => ItemType::Call,
                    _ => ItemType::Other,
                };
            }
            StringField::PartType => {
                let is_reasoning = names_reasoning(text);
                if let Some(part) = self.part.as_mut().filter(|part| part.depth + 1 == depth) {
                    part.is_reasoning = is_reasoning;
                }
            }
            StringField::ItemName => self.item_is_named = self.short.len > 0,
            StringField::Status => {
                self.parsed.status = Some(match text {
                    b"completed" => Status::Completed,
                    b"incomplete" => Status::Incomplete,
                    b"failed" => Status::Failed,
                    _ => Status::Other,
                });
            }
            StringField::Incomplete => self.parsed.incomplete = Reason::of(text),
        }
    }

    /// Whether a shared template may contain this word or a placeholder for it. Words of errors, and names,
    /// are never kept.
    fn stays_in_template(&self, word: StringField) -> bool {
        match word {
            StringField::Finish | StringField::StopReason => true,
            StringField::Kind
            | StringField::Object
            | StringField::TopStatus
            | StringField::ItemType
            | StringField::PartType
            | StringField::Status
            | StringField::Incomplete => self.short.len <= LONGEST_WORD,
            StringField::Code
            | StringField::TopCode
            | StringField::FlatCode
            | StringField::ErrorStatus
            | StringField::ErrorType
            | StringField::ItemName => false,
        }
    }

    /// A string without meaning.
    #[inline(never)]
    fn label(&mut self, place: Range<usize>) {
        self.slots.add(Placeholder::Label, place.start + 1..place.end - 1);
    }

    fn number_ended(&mut self, number: NumberField) {
        let value = whole_number(self.short.text());
        let usage = &mut self.parsed.usage;
        let count = match number {
            NumberField::Index => {
                self.choice().index = value.unwrap_or(0);
                return;
            }
            NumberField::Sequence => {
                self.parsed.sequence_number = value;
                return;
            }
            NumberField::Input => &mut usage.input,
            NumberField::Output => &mut usage.output,
            NumberField::Cached => &mut usage.cached,
            NumberField::Reasoning => &mut usage.reasoning,
            NumberField::CacheRead => &mut usage.cache_read,
            NumberField::CacheWritten => &mut usage.cache_written,
            NumberField::Total | NumberField::Counted(_) | NumberField::Billed(_) => {
                let plain = self.parsed.plain.get_or_insert_default();
                match number {
                    NumberField::Counted(Side::Input) => &mut plain.counted.input,
                    NumberField::Counted(Side::Output) => &mut plain.counted.output,
                    NumberField::Billed(Side::Input) => &mut plain.billed.input,
                    NumberField::Billed(Side::Output) => &mut plain.billed.output,
                    _ => &mut plain.total,
                }
            }
        };
        *count = value.or(*count);
    }

    fn key_ended(&mut self, key: &[u8], depth: usize) {
        let around = self.places.get(depth - 1).copied().unwrap_or(JsonPath::Nowhere);
        // For an object of which only emptiness matters, this is enough.
        match around {
            JsonPath::Any(channel) => self.choice().mark(channel),
            JsonPath::Reason => {
                self.choice().finish.get_or_insert(Reason::Other);
            }
            JsonPath::Error => self.parsed.has_error = true,
            JsonPath::Root => {
                self.is_of_dialect = matches!(key, b"choices" | b"usage" | b"delta");
                self.parsed.of_dialect = self.parsed.of_dialect.saturating_add(u8::from(self.is_of_dialect));
            }
            _ => {}
        }
        self.next = member(self.dialect, self.is_body, around, key);
    }

    fn text_ended(&mut self, channel: Channel) {
        if !self.leaf_is_empty {
            self.choice().mark(channel);
        }
    }

    /// A delta begins: discards what a whole message before it contributed.
    fn delta_begins(&mut self) {
        self.has_delta = !self.is_body;
        if let Some(before) = self.before_whole.take() {
            let ParsedChoice { visible, hidden, lump, bytes, text, .. } = *before;
            let choice = self.choice();
            (choice.visible, choice.hidden, choice.lump) = (visible, hidden, lump);
            (choice.bytes, choice.text) = (bytes, text);
            self.slots.forget();
        }
    }

    /// A typed part begins; its type decides whether its text is visible.
    fn part_begins(&mut self, depth: usize) {
        let slots = self.slots.len();
        let choice = self.choice();
        let (visible, bytes) = (std::mem::take(&mut choice.visible), choice.bytes);
        self.part = Some(Box::new(PartRead { depth, is_reasoning: false, visible, bytes, slots }));
    }

    fn part_ended(&mut self, part: &PartRead) {
        let choice = self.choice();
        let has_text = std::mem::replace(&mut choice.visible, part.visible);
        if !part.is_reasoning {
            choice.visible |= has_text;
            return;
        }
        choice.hidden |= has_text;
        choice.bytes = part.bytes;
        if self.is_body {
            self.slots.hide(part.slots);
        }
    }

    /// An output item of a whole response ended, so its type is known.
    fn item_ended(&mut self) {
        let item = std::mem::take(&mut self.item);
        let only = &mut self.parsed.only;
        if self.item_type == ItemType::Reasoning {
            only.hidden |= item.has_text();
            self.slots.hide(self.item_slots);
        } else {
            only.visible |= item.visible;
            only.hidden |= item.hidden;
            only.bytes += item.bytes;
        }
    }
}

impl Sink for EventParser {
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        self.is_object |= depth == 0 && nest == Nest::Object;
        let mut place = self.place(depth);
        self.met(place, depth);
        if depth >= DEPTH {
            self.skipped_at = Some(at);
            return Interest::Skip;
        }
        match (place, nest) {
            (JsonPath::Choice, Nest::Object) if self.parsed.choices.len() >= MOST_CHOICES => place = JsonPath::Nowhere,
            (JsonPath::Choice, Nest::Object) => {
                let index = self.parsed.choices.len() as u64;
                self.parsed.choices.push(ParsedChoice { index, ..ParsedChoice::default() });
                (self.has_delta, self.before_whole) = (false, None);
            }
            (JsonPath::Delta, Nest::Object) => self.delta_begins(),
            // It repeats the deltas.
            (JsonPath::Whole, Nest::Object) if self.has_delta => place = JsonPath::Nowhere,
            (JsonPath::Whole, Nest::Object) => {
                place = JsonPath::Delta;
                let choice = self.choice().clone();
                self.before_whole.get_or_insert_with(|| Box::new(choice));
            }
            (JsonPath::Error, Nest::Array) => place = JsonPath::Errors,
            (JsonPath::Usage, Nest::Object) => {
                self.parsed.has_usage = true;
                self.parsed.usage_is_of_a_choice |= depth > 1 && self.places[depth - 1] == JsonPath::Choice;
            }
            (JsonPath::OutputItem | JsonPath::Item | JsonPath::Block, Nest::Object) => {
                (self.item_type, self.item_is_named) = (ItemType::Other, false);
                self.item_slots = self.slots.len();
            }
            (JsonPath::Text(channel), Nest::Object) => {
                place = JsonPath::Any(channel);
                self.object_at = at;
            }
            (JsonPath::Part(_), Nest::Object) if self.part.is_none() => self.part_begins(depth),
            (JsonPath::Flat, _) => self.object_at = at,
            (JsonPath::LogprobToken, Nest::Array) => self.choice().logprobs = true,
            (JsonPath::Word(StringField::Finish), Nest::Object) => place = JsonPath::Reason,
            (JsonPath::Tools | JsonPath::Tool | JsonPath::Call, Nest::Object) => {
                // Some engines send one tool call instead of a list.
                place = if place == JsonPath::Tools { JsonPath::Tool } else { place };
                self.choice().lump = true;
            }
            _ => {}
        }
        self.places[depth] = place;
        if matches!(place, JsonPath::Any(_) | JsonPath::LogprobTokens | JsonPath::Reason) {
            // Its keys may be the response's own words.
            self.slots.keep_private();
        }
        let is_read = match nest {
            Nest::Array => matches!(
                place,
                JsonPath::Choices
                    | JsonPath::Text(_)
                    | JsonPath::Tools
                    | JsonPath::Output
                    | JsonPath::Content
                    | JsonPath::LogprobTokens
                    | JsonPath::Any(_)
                    | JsonPath::Errors
            ),
            Nest::Object => !matches!(
                place,
                JsonPath::Nowhere | JsonPath::Word(_) | JsonPath::Number(_) | JsonPath::Flat | JsonPath::FlatText
            ),
        };
        let is_inside =
            depth > 0 && self.places[depth - 1] == place && matches!(place, JsonPath::Any(_) | JsonPath::Errors);
        if is_read && !is_inside {
            return Interest::Read;
        }
        self.skipped_at = Some(at);
        Interest::Skip
    }

    fn close(&mut self, _: Nest, past: usize, depth: usize) {
        if let Some(at) = self.skipped_at.take()
            && past - at > "{}".len()
        {
            // Its content was not examined.
            self.slots.keep_private();
        }
        let Some(place) = self.places.get_mut(depth) else { return };
        match std::mem::replace(place, JsonPath::Nowhere) {
            JsonPath::Any(Channel::Visible) if depth > 0 && !matches!(self.places[depth - 1], JsonPath::Any(_)) => {
                let length = past - self.object_at;
                self.choice().bytes += if length > "{}".len() { length as u64 } else { 0 };
            }
            JsonPath::OutputItem => self.item_ended(),
            JsonPath::Part(_) => {
                if let Some(part) = self.part.take_if(|part| part.depth == depth) {
                    self.part_ended(&part);
                }
            }
            JsonPath::Flat => self.parsed.says_flatly |= past - self.object_at > "{}".len(),
            JsonPath::Item | JsonPath::Block => {
                self.parsed.names_tool |= self.item_type == ItemType::Call && self.item_is_named;
            }
            _ => {}
        }
    }

    /// Looks up a key that arrived whole, without copying it.
    #[inline]
    fn scalar(&mut self, what: Scalar, decoded: &[u8], place: Range<usize>, depth: usize) {
        if what == Scalar::Key {
            return self.key_ended(decoded, depth);
        }
        // Most values are of no interest.
        if what == Scalar::String && self.place(depth) == JsonPath::Nowhere {
            return self.label(place);
        }
        if self.begin(what, place.start, depth) == Interest::Read && !decoded.is_empty() {
            self.piece(decoded);
        }
        self.end(what, place.end, depth);
    }

    fn begin(&mut self, what: Scalar, at: usize, depth: usize) -> Interest {
        self.in_key = what == Scalar::Key;
        self.short.len = 0;
        if self.in_key {
            return Interest::Read;
        }
        let mut place = self.place(depth);
        self.met(place, depth);
        if let JsonPath::Part(channel) = place {
            place = JsonPath::Text(channel);
        }
        (self.leaf, self.leaf_at, self.leaf_is_empty) = (place, at, true);
        let is_read = match (place, what) {
            (JsonPath::Text(_) | JsonPath::Word(_) | JsonPath::LogprobToken | JsonPath::TokenText, Scalar::String) => {
                true
            }
            (JsonPath::Word(word), Scalar::Number) => {
                matches!(
                    word,
                    StringField::Code
                        | StringField::TopCode
                        | StringField::FlatCode
                        | StringField::ErrorStatus
                        | StringField::TopStatus
                )
            }
            (JsonPath::Number(_) | JsonPath::Error, Scalar::Number) => true,
            _ => false,
        };
        self.slot = slot_of(what, place, self.is_body);
        let is_flat = matches!(place, JsonPath::Flat | JsonPath::FlatText | JsonPath::Message);
        if self.slot.is_none() && (what == Scalar::Number || is_flat) {
            self.slots.keep_private();
        }
        if what == Scalar::Number && matches!(place, JsonPath::LogprobToken | JsonPath::TokenValue) {
            self.choice().logprobs = true;
        }
        if !is_read && place != JsonPath::Error && !is_flat {
            self.leaf = JsonPath::Nowhere;
        }
        if is_read { Interest::Read } else { Interest::Skip }
    }

    fn piece(&mut self, decoded: &[u8]) {
        let JsonPath::Text(channel) = self.leaf else { return self.short.push(decoded) };
        if self.in_key {
            return self.short.push(decoded);
        }
        self.leaf_is_empty = false;
        let keep = if self.dialect == Dialect::Completions { self.keep_text } else { 0 };
        let choice = self.choice();
        if channel == Channel::Visible {
            choice.bytes += decoded.len() as u64;
        }
        let room = keep.saturating_sub(choice.text.len()).min(decoded.len());
        choice.text.extend_from_slice(&decoded[..room]);
    }

    fn lone_surrogate(&mut self) {
        match self.leaf {
            // Clients read it as the replacement character.
            JsonPath::Text(_) if !self.in_key => self.piece("\u{FFFD}".as_bytes()),
            _ => self.short.spoil(),
        }
    }

    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        if what == Scalar::Key {
            let key = self.short.clone();
            self.in_key = false;
            return self.key_ended(key.text(), depth);
        }
        let leaf = std::mem::replace(&mut self.leaf, JsonPath::Nowhere);
        if let Some(slot) = self.slot.take()
            && !(matches!(leaf, JsonPath::Text(_)) && self.leaf_is_empty)
        {
            let quote = usize::from(what == Scalar::String);
            self.slots.add(slot, self.leaf_at + quote..past - quote);
        }
        match leaf {
            JsonPath::Text(channel) => self.text_ended(channel),
            JsonPath::Word(word) => self.word_ended(word, depth),
            JsonPath::Number(number) => self.number_ended(number),
            JsonPath::LogprobToken | JsonPath::TokenText if self.short.len > 0 => self.choice().logprobs = true,
            JsonPath::Flat => self.parsed.says_flatly |= what == Scalar::Number || past - self.leaf_at > "\"\"".len(),
            JsonPath::FlatText | JsonPath::Message => {
                self.parsed.says_flatly |= what == Scalar::String && past - self.leaf_at > "\"\"".len();
            }
            JsonPath::Error => {
                self.parsed.has_error |= match what {
                    Scalar::Number => whole_number(self.short.text()) != Some(0),
                    _ => past - self.leaf_at > "\"\"".len(),
                };
            }
            _ => {}
        }
    }

    fn literal(&mut self, what: Literal, _: usize, depth: usize) {
        if what != Literal::Null {
            let place = self.place(depth);
            self.met(place, depth);
            self.parsed.has_error |= what == Literal::True && place == JsonPath::Error;
        } else if depth == 1 && self.is_of_dialect {
            self.parsed.of_dialect = self.parsed.of_dialect.saturating_sub(1);
        }
    }
}

/// Whether an object's type names an error (`InternalServerError`, `timeout_error`).
fn names_error(kind: &[u8]) -> bool {
    let has = |word: &[u8]| kind.windows(word.len()).any(|part| part.eq_ignore_ascii_case(word));
    has(b"error") || has(b"exception") || has(b"failure")
}

/// Whether parts of this type are reasoning.
fn names_reasoning(kind: &[u8]) -> bool {
    let has = |word: &[u8]| memchr::memmem::find(kind, word).is_some();
    has(b"reasoning") || has(b"thinking") || has(b"thought") || kind == b"summary_text"
}

/// A count: an integer, or a float with an integer value. Clamped to the largest possible
/// count.
fn whole_number(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let number: f64 = text.parse().ok()?;
    (number >= 0.0).then_some(number as u64)
}
