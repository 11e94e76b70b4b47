//! Walks the YAML tree into typed blocks, collecting all problems.
//!
//! [`Read`] is implemented by every type of the settings; it parses a value and (as [`JsonSchema`]) describes
//! it. `block!` generates both from one list of keys, so that walk and schema cannot diverge.

use std::collections::HashMap;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::environment::Environment;
use super::problem::{Location, Problem, nearest};
use super::spanned_yaml::{Value, YamlNode};

/// A value and its position.
#[derive(Clone, Debug)]
pub(super) struct Located<T> {
    pub value: T,
    pub place: Location,
    /// Whether the value came from the environment, so that no problem may show it.
    pub hidden: bool,
}

impl<T: std::fmt::Display> Located<T> {
    /// The value for a message.
    pub(super) fn shown(&self) -> String {
        if self.hidden { "the value of the variable".to_owned() } else { quoted(&self.value.to_string()) }
    }
}

/// A type of the settings.
pub(super) trait Read: Sized + JsonSchema {
    /// Reads a node, reporting problems. `None` if nothing usable was there, which was reported.
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self>;
}

/// State of the walk.
pub(super) struct ConfigWalker<'a> {
    pub surroundings: &'a dyn Environment,
    pub problems: Vec<Problem>,
    path: String,
}

impl<'a> ConfigWalker<'a> {
    pub(super) fn new(surroundings: &'a dyn Environment) -> Self {
        ConfigWalker { surroundings, problems: Vec::new(), path: String::new() }
    }

    pub(super) fn place(&self, node: &YamlNode) -> Location {
        let at = &node.referenced;
        Location { path: Arc::from(self.path.as_str()), line: at.line(), column: at.column() }
    }

    pub(super) fn fail(&mut self, node: &YamlNode, message: impl Into<String>, way_out: impl Into<String>) {
        let place = self.place(node);
        self.problems.push(Problem::new(&place, message, way_out));
    }

    fn fail_type(&mut self, node: &YamlNode, expected: &str) {
        match &node.value {
            Value::Null => self.fail(node, "is empty", format!("write {expected}, or remove the key")),
            other => self.fail(node, format!("is {}", other.kind()), format!("write {expected}")),
        }
    }

    /// Reads a child node.
    fn below<T: Read>(&mut self, step: &str, node: &YamlNode) -> Option<T> {
        let length = self.path.len();
        if !step.starts_with('[') && length > 0 {
            self.path.push('.');
        }
        self.path.push_str(step);
        let found = T::read(node, self);
        self.path.truncate(length);
        found
    }

    /// The members of a mapping with these keys. Unknown, duplicate and non-text keys are reported and left
    /// out.
    pub(super) fn members<'n>(&mut self, node: &'n YamlNode, keys: &[&'static str]) -> Option<BlockMembers<'n>> {
        let entries = self.entries(node, "a mapping with the keys of this block")?;
        let written: Vec<&str> = entries.iter().map(|(_, name, _)| *name).collect();
        let mut known = HashMap::new();
        for (key, name, value) in entries {
            if keys.contains(&name) {
                known.insert(name, value);
            } else {
                let free = keys.iter().copied().filter(|key| !written.contains(key));
                let way_out = match nearest(name, free) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("valid keys are: {}", keys.join(", ")),
                };
                self.fail(key, format!("unknown key `{}`", clipped(name)), way_out);
            }
        }
        Some(BlockMembers { node, known })
    }

    /// The entries of a mapping without duplicate and non-text keys.
    fn entries<'n>(
        &mut self,
        node: &'n YamlNode,
        expected: &str,
    ) -> Option<Vec<(&'n YamlNode, &'n str, &'n YamlNode)>> {
        let Value::Map(entries) = &node.value else {
            self.fail_type(node, expected);
            return None;
        };
        let mut first: HashMap<&str, u64> = HashMap::new();
        let mut found = Vec::new();
        for (key, value) in entries {
            let Value::Text(name) = &key.value else {
                self.fail(key, format!("a key is {}", key.value.kind()), "write the key as text, in quotes if need be");
                continue;
            };
            if let Some(line) = first.get(name.as_str()) {
                let message = format!("the key `{}` is repeated, first on line {line}", clipped(name));
                self.fail(key, message, "keep one of the two");
                continue;
            }
            first.insert(name, key.referenced.line());
            found.push((key, name.as_str(), value));
        }
        Some(found)
    }

    /// Replaces `${NAME}` by environment variables.
    fn expanded<'t>(&mut self, node: &YamlNode, text: &'t str) -> Option<Expanded<'t>> {
        let (mut out, mut rest, mut any, mut empty) = (String::with_capacity(text.len()), text, false, None);
        while let Some(at) = rest.find("${") {
            if rest[..at].ends_with('$') {
                out.push_str(&rest[..at]);
                out.push('{');
                rest = &rest[at + 2..];
                continue;
            }
            out.push_str(&rest[..at]);
            let inner = &rest[at + 2..];
            let name = inner.split_once('}').map(|(name, _)| name).filter(|name| is_variable(name));
            let Some(name) = name else {
                self.fail(node, "holds a `${` that names no variable", "write ${NAME}, or $${ for the two characters");
                return None;
            };
            let Some(value) = self.surroundings.variable(name) else {
                self.fail(node, format!("the variable {name} is not set"), "set it in the environment of the process");
                return None;
            };
            if value.is_empty() {
                empty = empty.or(Some(name));
            }
            out.push_str(&value);
            any = true;
            rest = &inner[name.len() + 1..];
        }
        out.push_str(rest);
        Some(Expanded { text: out, any, empty })
    }
}

/// A text with its variables replaced.
struct Expanded<'t> {
    text: String,
    /// Whether a variable was replaced.
    any: bool,
    /// The first empty one.
    empty: Option<&'t str>,
}

fn is_variable(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// A quoted value, shortened to fit a line.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", clipped(text).escape_debug())
}

fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

/// The members of a block.
pub(super) struct BlockMembers<'n> {
    node: &'n YamlNode,
    known: HashMap<&'n str, &'n YamlNode>,
}

impl BlockMembers<'_> {
    pub(super) fn written(&self, keys: &[&'static str]) -> Vec<&'static str> {
        keys.iter().copied().filter(|key| self.known.contains_key(key)).collect()
    }

    pub(super) fn may<T: Read>(&self, key: &'static str, reader: &mut ConfigWalker<'_>) -> Option<T> {
        self.known.get(key).and_then(|node| reader.below(key, node))
    }

    pub(super) fn must<T: Read>(&self, key: &'static str, reader: &mut ConfigWalker<'_>) -> Option<T> {
        if !self.known.contains_key(key) {
            reader.fail(self.node, format!("`{key}` is missing"), format!("add `{key}`"));
        }
        self.may(key, reader)
    }
}

/// A mapping with a closed set of keys.
pub(super) trait ConfigBlock: Read {
    /// Its position.
    fn place(&self) -> &Location;
    /// The keys present, including those with unreadable values.
    fn written(&self) -> &[&'static str];
    /// Whether everything present could be read, so that missing keys may be reported.
    fn is_whole(&self) -> bool;
}

/// Defines a block: a mapping with a closed set of keys. Every field is optional, so that checking continues
/// despite a missing key.
macro_rules! block {
    ($($(#[doc = $about:literal])* $name:ident { $($(#[doc = $doc:literal])* $need:ident $key:ident: $type:ty,)* })*) => {$(
        $(#[doc = $about])*
        #[derive(Debug)]
        pub(super) struct $name {
            place: $crate::config::problem::Location,
            written: Vec<&'static str>,
            $($(#[doc = $doc])* pub $key: Option<$type>,)*
        }

        impl $crate::config::walk::Read for $name {
            fn read(
                node: &$crate::config::spanned_yaml::YamlNode,
                reader: &mut $crate::config::walk::ConfigWalker<'_>,
            ) -> Option<Self> {
                let members = reader.members(node, &[$(stringify!($key),)*])?;
                Some($name {
                    place: reader.place(node),
                    written: members.written(&[$(stringify!($key),)*]),
                    $($key: members.$need(stringify!($key), reader),)*
                })
            }
        }

        impl $crate::config::walk::ConfigBlock for $name {
            fn place(&self) -> &$crate::config::problem::Location {
                &self.place
            }
            fn written(&self) -> &[&'static str] {
                &self.written
            }
            fn is_whole(&self) -> bool {
                let read = [$(self.$key.is_some(),)*];
                read.into_iter().filter(|read| *read).count() == self.written.len()
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let about = concat!($($about,)*);
                let members = [$((
                    stringify!($key),
                    stringify!($need) == "must",
                    concat!($($doc,)*),
                    generator.subschema_for::<$type>(),
                ),)*];
                $crate::config::walk::block_schema(about, members)
            }
        }
    )*};
}
pub(super) use block;

/// Extension of the JSON Schema: the keys of a block in the order of this file, which JSON objects do not keep.
pub(super) const KEY_ORDER: &str = "x-key-order";

/// The schema of a block.
pub(super) fn block_schema(
    about: &str,
    members: impl IntoIterator<Item = (&'static str, bool, &'static str, Schema)>,
) -> Schema {
    let mut properties = serde_json::Map::new();
    let (mut order, mut required) = (Vec::new(), Vec::new());
    for (key, must, doc, mut schema) in members {
        schema.insert("description".to_owned(), doc.trim().into());
        properties.insert(key.to_owned(), schema.to_value());
        order.push(key);
        if must {
            required.push(key);
        }
    }
    json_schema!({
        "type": "object",
        "description": about.trim(),
        "properties": properties,
        KEY_ORDER: order,
        "required": required,
        "additionalProperties": false,
    })
}

/// A value that is one scalar.
pub(super) trait FromScalar: Sized {
    /// With article, for a message: `a duration such as 10s`.
    const EXPECTED: &'static str;
    /// Whether problems may never show it.
    const HIDDEN: bool = false;

    /// Converts the value. `loose`: it came from a variable, where every value is text.
    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError>;

    /// Its description for editors.
    fn schema() -> Schema;
}

/// Why a scalar is invalid.
#[derive(Debug)]
pub(super) enum ScalarError {
    /// Wrong type.
    Type,
    /// Right type, wrong value, with a suggestion.
    Value { wrong: String, way_out: String },
}

impl ScalarError {
    pub(super) fn value(wrong: impl Into<String>, way_out: impl Into<String>) -> Self {
        ScalarError::Value { wrong: wrong.into(), way_out: way_out.into() }
    }

    /// Adds alternative words to the expectation.
    pub(super) fn or(self, words: &str) -> Self {
        match self {
            ScalarError::Type => ScalarError::Type,
            ScalarError::Value { wrong, way_out } => {
                ScalarError::Value { wrong, way_out: format!("{way_out}, {words}") }
            }
        }
    }
}

impl<T: FromScalar> Read for Located<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        let expanded;
        let (value, from_variable) = match &node.value {
            Value::Text(text) => {
                let Expanded { text, any, empty } = reader.expanded(node, text)?;
                // A secret with an empty variable is invalid, whatever surrounds it.
                if let Some(name) = empty.filter(|_| T::HIDDEN || text.is_empty()) {
                    let way_out = "give it a value in the environment of the process, or remove the key";
                    reader.fail(node, format!("the variable {name} is empty"), way_out);
                    return None;
                }
                expanded = Value::Text(text);
                (&expanded, any)
            }
            other => (other, false),
        };
        let hidden = T::HIDDEN || from_variable;
        match T::take(value, from_variable) {
            Ok(value) => Some(Located { value, place: reader.place(node), hidden }),
            Err(ScalarError::Value { wrong, way_out }) => {
                let (wrong, way_out) = if hidden {
                    ("the value does not fit".into(), format!("write {}", T::EXPECTED))
                } else {
                    (wrong, way_out)
                };
                reader.fail(node, wrong, way_out);
                None
            }
            Err(ScalarError::Type) => {
                let number = matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_));
                if number && T::take(&Value::Text("x".into()), false).is_ok() {
                    reader.fail(node, format!("is {}", value.kind()), "write it in quotes to make it a text");
                } else {
                    reader.fail_type(node, T::EXPECTED);
                }
                None
            }
        }
    }
}

impl<T: FromScalar> JsonSchema for Located<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "scalar".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let written = T::schema();
        let is_text = written.get("type").is_some_and(|kind| kind == "string") && written.get("pattern").is_none();
        if is_text {
            return written;
        }
        // Editors see the text, not the variable's value.
        json_schema!({"anyOf": [written, {"type": "string", "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"}]})
    }
}

impl<T: Read> Read for Vec<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        let Value::List(items) = &node.value else {
            reader.fail_type(node, "a list");
            return None;
        };
        let items = items.iter().enumerate();
        Some(items.filter_map(|(index, item)| reader.below(&format!("[{index}]"), item)).collect())
    }
}

/// A non-empty list.
#[derive(Clone, Debug)]
pub(super) struct NonEmpty<T>(pub Vec<T>);

impl<T> std::ops::Deref for NonEmpty<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Read> Read for NonEmpty<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            Value::List(items) if items.is_empty() => {
                reader.fail(node, "is an empty list", "add at least one");
                None
            }
            _ => Vec::read(node, reader).map(NonEmpty),
        }
    }
}

impl<T: Read> JsonSchema for NonEmpty<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("list_of_{}", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let each = generator.subschema_for::<T>();
        json_schema!({"type": "array", "items": each, "minItems": 1})
    }
}

/// A list, or one item in place of a list of one.
#[derive(Clone, Debug)]
pub(super) struct OneOrMany<T>(pub Vec<T>);

impl<T: Read> Read for OneOrMany<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            Value::List(items) if items.is_empty() => {
                reader.fail(node, "is an empty list", "name at least one, or remove the key");
                None
            }
            Value::List(_) => Vec::read(node, reader).map(OneOrMany),
            _ => T::read(node, reader).map(|item| OneOrMany(vec![item])),
        }
    }
}

impl<T: Read> JsonSchema for OneOrMany<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("{}_or_list", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        json_schema!({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]})
    }
}

/// A mapping with user-defined keys.
#[derive(Debug)]
pub(super) struct Entries<T>(pub Vec<(Located<String>, T)>);

impl<T: Read> Read for Entries<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        let entries = reader.entries(node, "a mapping")?;
        let mut all = Vec::new();
        for (key, name, value) in entries {
            if let Some(found) = reader.below::<T>(name, value) {
                let mut place = reader.place(key);
                place.path = format!("{}.{name}", place.path).into();
                all.push((Located { value: name.to_owned(), place, hidden: false }, found));
            }
        }
        Some(Entries(all))
    }
}

impl<T: Read> JsonSchema for Entries<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("entries_of_{}", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let each = generator.subschema_for::<T>();
        json_schema!({"type": "object", "additionalProperties": each})
    }
}

/// Whether this is the word `off`, or the boolean false, which YAML 1.1 tools write for
/// `off`.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Text(text) => text == "off",
        Value::Bool(value) => !value,
        _ => false,
    }
}

/// A block, or `off`: see [`is_off`].
#[derive(Debug)]
pub(super) enum OrOff<T> {
    /// Disabled.
    Off,
    /// The block.
    On(T),
}

impl<T: Read> Read for OrOff<T> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            value if is_off(value) => Some(OrOff::Off),
            Value::Map(_) => T::read(node, reader).map(OrOff::On),
            Value::Bool(_) => {
                reader.fail(node, "is true", "write a mapping, or `off`; without the key the defaults hold");
                None
            }
            _ => {
                reader.fail_type(node, "a mapping, or `off`");
                None
            }
        }
    }
}

impl<T: Read> JsonSchema for OrOff<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("{}_or_off", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let block = generator.subschema_for::<T>();
        json_schema!({"anyOf": [block, {"enum": ["off", false]}]})
    }
}

/// A value in short form, or a block.
#[derive(Debug)]
pub(super) enum OrBlock<T, B> {
    /// The short form.
    Short(T),
    /// The block.
    Block(B),
}

impl<T, B: ConfigBlock> OrBlock<Located<T>, B> {
    /// Its position.
    pub(super) fn place(&self) -> &Location {
        match self {
            OrBlock::Short(at) => &at.place,
            OrBlock::Block(block) => block.place(),
        }
    }
}

impl<T: Read, B: Read> Read for OrBlock<T, B> {
    fn read(node: &YamlNode, reader: &mut ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            Value::Map(_) => B::read(node, reader).map(OrBlock::Block),
            _ => T::read(node, reader).map(OrBlock::Short),
        }
    }
}

impl<T: Read, B: Read> JsonSchema for OrBlock<T, B> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("{}_or_{}", T::schema_name(), B::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (short, block) = (generator.subschema_for::<T>(), generator.subschema_for::<B>());
        json_schema!({"anyOf": [short, block]})
    }
}
