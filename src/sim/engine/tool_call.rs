//! Tool calls, derived from a request's schemas.

use serde_json::{Map, Value, json};

/// A tool call demanded by the request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToolCall {
    pub name: String,
    /// The arguments' JSON in pieces of one token.
    pub pieces: Vec<String>,
}

impl ToolCall {
    /// The call demanded by `tool_choice`: the first tool for any. `auto` demands none.
    pub fn wanted(body: &Map<String, Value>) -> Option<ToolCall> {
        let tools = body.get("tools")?.as_array()?;
        let choice = body.get("tool_choice")?;
        let kind = choice.as_str().or_else(|| choice.get("type").and_then(Value::as_str))?;
        let named = choice.get("name").or_else(|| choice.get("function").and_then(|f| f.get("name")));
        let tool = match (kind, named.and_then(Value::as_str)) {
            ("function" | "tool", Some(name)) => tools.iter().map(inner).find(|tool| tool["name"] == name)?,
            ("required" | "any", _) => inner(tools.first()?),
            _ => return None,
        };
        let schema = tool.get("parameters").or_else(|| tool.get("input_schema")).unwrap_or(&Value::Null);
        let arguments = example(schema, 0).to_string();
        let letters: Vec<char> = arguments.chars().collect();
        let pieces = letters.chunks(4).map(|piece| piece.iter().collect()).collect();
        Some(ToolCall { name: tool["name"].as_str().unwrap_or_default().to_owned(), pieces })
    }
}

/// The function inside a tool, which only OpenAI's chat format nests.
fn inner(tool: &Value) -> &Value {
    tool.get("function").filter(|function| function.is_object()).unwrap_or(tool)
}

/// A value valid for a schema.
fn example(schema: &Value, depth: u8) -> Value {
    if let Some(first) = schema.get("enum").and_then(Value::as_array).and_then(|all| all.first()) {
        return first.clone();
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("string") => json!("word"),
        Some("integer") => json!(1),
        Some("number") => json!(0.5),
        Some("boolean") => json!(true),
        Some("array") => json!([]),
        Some("null") => Value::Null,
        _ if depth > 8 => json!({}),
        _ => {
            let properties = schema.get("properties").and_then(Value::as_object);
            let members = properties.into_iter().flatten();
            members.map(|(name, inner)| (name.clone(), example(inner, depth + 1))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_demanded_tool_is_called_with_what_its_schema_allows() {
        let body = json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "lookup",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}, "days": {"type": "integer"}}}}}]});
        let tool = ToolCall::wanted(body.as_object().unwrap()).unwrap();
        assert_eq!((tool.name.as_str(), tool.pieces.concat().as_str()), ("lookup", r#"{"city":"Oslo","days":1}"#));
        let auto = json!({"tool_choice": "auto", "tools": body["tools"]});
        assert_eq!(ToolCall::wanted(auto.as_object().unwrap()), None);
    }
}
