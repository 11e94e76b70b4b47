//! A YAML document as a tree with the line and column of every node.
//!
//! Typed parsing stops at the first error; a tree can be walked completely. Duplicate keys are kept, so that
//! the walk can report both positions.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess};
use serde_yaml::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Spanned};

use super::problem::{Location, Problem};

/// One node with its position (of an alias, where it is used).
pub(super) type YamlNode = Spanned<Value>;

/// Kind of node.
#[derive(Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<YamlNode>),
    Map(Vec<(YamlNode, YamlNode)>),
}

impl Value {
    /// With article, for a message.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Null => "nothing",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Text(_) => "text",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
        }
    }
}

/// Parses one YAML document.
pub(super) fn parse(text: &str) -> Result<YamlNode, Problem> {
    let options = serde_yaml::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
    };
    serde_yaml::from_str_with_options(text, options).map_err(|error| {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        let place = Location { path: "".into(), line, column };
        if matches!(error.without_snippet(), serde_yaml::Error::MultipleDocuments { .. }) {
            let way_out = "keep one of them: settings are one document, with no line `---` inside";
            return Problem::new(&place, "a second YAML document begins here", way_out);
        }
        Problem::new(&place, format!("not readable as YAML ({})", cause(&error)), "correct the YAML at this place")
    })
}

/// The error's text without its position, which is reported separately, and without any content of the
/// document.
fn cause(error: &serde_yaml::Error) -> String {
    let text = error.without_snippet().to_string();
    let end = text.find(" at line ").unwrap_or(text.len());
    text[..end].to_owned()
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> de::Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any YAML node")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_none<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Int(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Int(value.into()))
            }
            fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
                Ok(Value::Int(value))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }
            fn visit_string<E>(self, value: String) -> Result<Value, E> {
                Ok(Value::Text(value))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = items.next_element()? {
                    all.push(item);
                }
                Ok(Value::List(all))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(entry) = entries.next_entry()? {
                    all.push(entry);
                }
                Ok(Value::Map(all))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> (u64, u64) {
        let problem = parse(text).unwrap_err();
        (problem.line, problem.column)
    }

    #[test]
    fn invalid_yaml_is_reported_with_its_position() {
        assert_eq!(problem("a: [1, 2\nb: 3\n"), (2, 2));
        assert_eq!(problem("a:\n\tb: 2\n"), (2, 2));
        assert_eq!(problem("a: *nobody\n"), (1, 4));
        assert_eq!(problem("a: 1\n---\nb: 2\n").0, 3);
    }

    #[test]
    fn a_second_document_is_reported_in_our_words() {
        let told = parse("a: 1\n---\nb: 2\n").unwrap_err().to_string();
        let expected = "a second YAML document begins here; keep one of them: settings are one document, with no line `---` inside";
        assert!(told.ends_with(expected), "{told}");
        assert!(parse("---\na: 1\n").is_ok());
    }

    #[test]
    fn neither_depth_nor_aliases_exhaust_anything() {
        assert!(parse(&"[".repeat(100_000)).is_err());
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let below = format!("*a{}", level - 1);
            bomb += &format!("a{level}: &a{level} [{}]\n", [below.as_str(); 10].join(", "));
        }
        assert!(parse(&bomb).is_err());
    }

    #[test]
    fn only_true_and_false_are_booleans() {
        let Value::List(items) = parse("[true, yes, on, off, \"true\"]").unwrap().value else { panic!() };
        let kinds: Vec<_> = items.iter().map(|item| item.value.kind()).collect();
        assert_eq!(kinds, ["a boolean", "text", "text", "text", "text"]);
    }

    #[test]
    fn both_of_two_equal_keys_are_kept() {
        let Value::Map(entries) = parse("a: 1\nb: 2\na: 3\n").unwrap().value else { panic!() };
        let lines: Vec<_> = entries.iter().map(|(key, _)| key.referenced.line()).collect();
        assert_eq!(lines, [1, 2, 3]);
    }
}
