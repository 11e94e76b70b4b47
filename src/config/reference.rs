//! Key tables of the settings in Markdown, generated from the JSON Schema.
//!
//! A page marks the place of a table by `<!-- keys: pools[].queue -->` and `<!-- end -->`; [`fill`] writes the
//! table between them.

use serde_json::Value;

use super::walk::KEY_ORDER;

const END: &str = "<!-- end -->";
/// Path of the outermost block in a marker.
const ROOT: &str = "(root)";

/// Why a page cannot be filled.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// A marker names no block of the settings.
    #[error("line {line}: the settings have no block `{path}`")]
    UnknownBlock {
        /// Line of the marker.
        line: usize,
        /// The path in it.
        path: String,
    },
    /// A marker without its end.
    #[error("line {line}: no {END} ends this table")]
    NoEnd {
        /// Line of the marker.
        line: usize,
    },
    /// Blocks without a table.
    #[error("the page has no table for: {}", .0.join(", "))]
    Missing(Vec<String>),
}

/// Returns `page` with its key tables replaced. Every block of the settings needs a table.
pub fn fill(page: &str) -> Result<String, FillError> {
    let schema = super::schema_with_links();
    let mut missing = blocks(&schema);
    let all = missing.clone();
    let mut out = String::with_capacity(page.len());
    let mut lines = page.split_inclusive('\n').zip(1..);
    while let Some((text, line)) = lines.next() {
        out.push_str(text);
        let Some(path) = text.trim_end().strip_prefix("<!-- keys: ").and_then(|rest| rest.strip_suffix(" -->")) else {
            continue;
        };
        let Some(block) = all.iter().find(|block| block.paths.iter().any(|known| known == path)) else {
            return Err(FillError::UnknownBlock { line, path: path.to_owned() });
        };
        missing.retain(|other| other.paths != block.paths);
        if !lines.any(|(text, _)| text.trim_end() == END) {
            return Err(FillError::NoEnd { line });
        }
        out.push_str(&format!("{}{END}\n", table(block.schema)));
    }
    if !missing.is_empty() {
        return Err(FillError::Missing(missing.into_iter().map(|block| block.paths[0].clone()).collect()));
    }
    Ok(out)
}

/// Returns the key tables of all blocks, each below its path.
#[must_use]
pub fn tables() -> String {
    let schema = super::schema_with_links();
    let sections =
        blocks(&schema).into_iter().map(|block| format!("## `{}`\n\n{}", block.paths[0], table(block.schema)));
    sections.collect::<Vec<_>>().join("\n")
}

/// A block of the settings.
#[derive(Clone)]
struct BlockEntry<'s> {
    /// Name in the schema; the outermost block has none.
    name: Option<&'s str>,
    /// Paths of the keys that hold it.
    paths: Vec<String>,
    schema: &'s Value,
}

/// All blocks, in the order of the file.
fn blocks(root: &Value) -> Vec<BlockEntry<'_>> {
    let mut found = vec![BlockEntry { name: None, paths: vec![ROOT.to_owned()], schema: root }];
    collect_members(root, root, "", &mut found);
    found
}

fn collect_members<'s>(root: &'s Value, block: &'s Value, path: &str, found: &mut Vec<BlockEntry<'s>>) {
    let dot = if path.is_empty() { "" } else { "." };
    for key in keys(block) {
        collect(root, &block["properties"][key], format!("{path}{dot}{key}"), found);
    }
}

fn collect<'s>(root: &'s Value, value: &'s Value, path: String, found: &mut Vec<BlockEntry<'s>>) {
    if let Some(name) = value["$ref"].as_str().and_then(|to| to.strip_prefix("#/$defs/")) {
        match found.iter_mut().find(|known| known.name == Some(name)) {
            Some(known) => known.paths.push(path),
            None => {
                let schema = &root["$defs"][name];
                found.push(BlockEntry { name: Some(name), paths: vec![path.clone()], schema });
                collect_members(root, schema, &path, found);
            }
        }
        return;
    }
    for option in value["anyOf"].as_array().into_iter().flatten() {
        collect(root, option, path.clone(), found);
    }
    if value["items"].is_object() {
        collect(root, &value["items"], format!("{path}[]"), found);
    }
    if value["additionalProperties"].is_object() {
        collect(root, &value["additionalProperties"], format!("{path}.NAME"), found);
    }
}

/// The keys of a block, in the order of the file.
fn keys(block: &Value) -> impl Iterator<Item = &str> {
    block[KEY_ORDER].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn table(block: &Value) -> String {
    let mut out = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n".to_owned();
    for key in keys(block) {
        let value = &block["properties"][key];
        let description = value["description"].as_str().unwrap_or_default();
        let (meaning, default) = description.split_once("Default: ").unwrap_or((description, ""));
        let required = block["required"].as_array().is_some_and(|all| all.iter().any(|name| name == key));
        let default = if required { "required" } else { default.trim_end_matches('.') };
        let cells = [format!("`{key}`"), type_name(value), default.to_owned(), meaning.trim_end().to_owned()];
        let cells = cells.map(|cell| if cell.is_empty() { cell } else { format!("{cell} ") });
        out.push_str(&format!("| {}|\n", cells.join("| ")));
    }
    out
}

/// The type of a value in words: `list of text`, `block or off`.
fn type_name(value: &Value) -> String {
    if let Some(title) = value["title"].as_str() {
        return title.to_owned();
    }
    let mut names = alternatives(value);
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} or {last}", names.join(", ")) }
}

fn alternatives(value: &Value) -> Vec<String> {
    if let Some(options) = value["anyOf"].as_array() {
        // Lists accept a single item, and every value accepts a variable; the page says so once.
        let is_variable = |option: &Value| option["pattern"].as_str().is_some_and(|pattern| pattern.starts_with(r"\$"));
        let is_item = |option: &Value| options.iter().any(|list| list["items"] == *option);
        return options.iter().filter(|option| !is_variable(option) && !is_item(option)).flat_map(named).collect();
    }
    named(value)
}

fn named(value: &Value) -> Vec<String> {
    if value["title"].is_string() || value["anyOf"].is_array() {
        return if value["title"].is_string() { vec![type_name(value)] } else { alternatives(value) };
    }
    let word = |word: &Value| word.as_str().map(|word| format!("`{word}`"));
    if let Some(words) = value["enum"].as_array() {
        return words.iter().filter_map(word).collect();
    }
    vec![match value["type"].as_str() {
        _ if value["const"].is_string() => word(&value["const"]).unwrap_or_default(),
        Some("array") => format!("list of {}", type_name(&value["items"]).replace("block", "blocks")),
        Some("object") => format!("map of name to {}", type_name(&value["additionalProperties"])),
        Some("boolean") => "true or false".to_owned(),
        Some("string") => "text".to_owned(),
        Some(other) => other.to_owned(),
        None => "block".to_owned(),
    }]
}

/// Replaces Markdown links in descriptions by their text, because editors resolve no relative links.
pub(super) fn remove_links(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::String(text)) = map.get_mut("description") {
                *text = without_links(text);
            }
            map.values_mut().for_each(remove_links);
        }
        Value::Array(all) => all.iter_mut().for_each(remove_links),
        _ => {}
    }
}

fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(open) = out.rfind('[') {
            out.remove(open);
        }
        out.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_without_a_table_of_every_block_is_refused() {
        let one = "text\n<!-- keys: listen.tls -->\nold\n<!-- end -->\nmore\n";
        let Err(FillError::Missing(missing)) = fill(one) else { panic!("the page has one table") };
        assert!(missing.contains(&"pools[].queue".to_owned()) && !missing.contains(&"listen.tls".to_owned()));
        let unknown = fill("\n<!-- keys: listen.tsl -->\n<!-- end -->\n");
        assert_eq!(unknown, Err(FillError::UnknownBlock { line: 2, path: "listen.tsl".to_owned() }));
        assert_eq!(fill("<!-- keys: listen -->\n"), Err(FillError::NoEnd { line: 1 }));
    }

    #[test]
    fn tables_have_every_key_with_its_type_and_default() {
        let all = tables();
        for line in [
            "## `classify[].when.header.NAME`",
            "| `max_body` | size | 64MiB | Largest request body, as sent and as decoded, 1KiB to 16GiB.",
            "| `breaker` | block or `off` | | The circuit breaker of each engine, or `off`. |",
            "| `slo_class` | text | required | Its name",
            "| `pools` | list of blocks | required | Pools of engines. |",
            "| `tenant` | list of text | | The tenant. |",
            "| `max_concurrency_per_engine` | integer, `auto` or block | no limit | ",
            "| `target_headers` | `off`, `tighten` or `may_loosen` | off | ",
        ] {
            assert!(all.contains(line), "{line}\n{all}");
        }
    }

    #[test]
    fn descriptions_for_editors_have_no_links() {
        assert_eq!(without_links("A [page](page.md#part), and `[b]` ([two](2.md))."), "A page, and `[b]` (two).");
    }
}
