//! Rules of the source, as tests: layers, time, docs, and names that others depend on.
//!
//! Each test reads the sources and lists the violating lines. Test code (`tests.rs`, a `mod tests` at the end
//! of a file) may use every module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use goodput::clock::Clock;
use goodput::record::{EngineReport, Format, Recorder};
use goodput::types::{EngineId, PoolId};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below these paths whose name ends so, in order. A path may be a file.
fn files(paths: &[&str], end: &str) -> Vec<PathBuf> {
    fn walk(path: &Path, end: &str, found: &mut Vec<PathBuf>) {
        if path.is_dir() {
            let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
            entries.for_each(|entry| walk(&entry, end, found));
        } else if path.to_string_lossy().ends_with(end) && path.exists() {
            found.push(path.to_owned());
        }
    }
    let mut found = Vec::new();
    paths.iter().for_each(|path| walk(&root().join(path), end, &mut found));
    found.sort();
    found
}

/// The path as it is written in messages.
fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_string_lossy().into_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", short(path)))
}

/// Lines of code with their numbers, without comments and the text of strings.
fn code_lines(text: &str) -> Vec<(usize, String)> {
    let bare = |line: &str| {
        let mut out = String::new();
        let mut in_string = false;
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\\' if in_string => drop(chars.next()),
                '"' => {
                    in_string = !in_string;
                    out.push('"');
                }
                _ if in_string => {}
                '\'' if chars.peek() == Some(&'"') => drop(chars.next()),
                '/' if chars.peek() == Some(&'/') => break,
                c => out.push(c),
            }
        }
        out
    };
    text.lines().enumerate().map(|(at, line)| (at + 1, bare(line))).collect()
}

/// The code that ships: without a `mod tests` at the end.
fn shipped(path: &Path, text: &str) -> Vec<(usize, String)> {
    let is_test = path.file_name().is_some_and(|name| name == "tests.rs")
        || path.components().any(|part| part.as_os_str() == "tests");
    if is_test {
        return Vec::new();
    }
    let lines = code_lines(text);
    let tests = lines
        .windows(2)
        .position(|pair| pair[0].1.trim() == "#[cfg(test)]" && pair[1].1.trim_start().starts_with("mod tests {"));
    lines[..tests.unwrap_or(lines.len())].to_vec()
}

fn report(rule: &str, strays: Vec<String>) {
    assert!(strays.is_empty(), "{rule}\n  {}\n", strays.join("\n  "));
}

// ---- layers ---------------------------------------------------------------------------------

/// Rooms within a folder, with the names of their modules.
const ROOMS_IN_FOLDERS: &[(&str, &str)] = &[
    ("accept", "settings"),
    ("admit", "pool_queue"),
    ("admit", "overload_control"),
    ("admit", "limit"),
    ("admit", "overload"),
    ("admit", "queue"),
    ("admit", "redis"),
    ("admit", "spill"),
    ("admit::redis", "settings"),
    ("forward", "settings"),
    ("record", "burn"),
    ("record", "journal"),
    ("record", "length_drift"),
    ("record", "settings"),
    ("record", "trace"),
    ("route", "probe"),
];

/// The room of a module path, as deep as folders contain rooms.
fn room<'a>(path: impl IntoIterator<Item = &'a str>) -> String {
    let mut path = path.into_iter();
    let mut room = path.next().unwrap_or_default().to_owned();
    while let Some(module) = path.next().filter(|module| ROOMS_IN_FOLDERS.contains(&(room.as_str(), module))) {
        room = format!("{room}::{module}");
    }
    room
}

fn layer(room: &str) -> Option<u8> {
    Some(match room {
        "types" | "clock" | "json" | "http1" | "sync" => 0,
        "identify" | "inspect" | "classify" | "route" | "observe" | "rewrite" | "judge" | "reject" => 1,
        "alerts" | "capacity" | "trace" => 1,
        "admit::overload_control" | "admit::limit" | "admit::overload" | "admit::queue" | "admit::spill" => 1,
        "record::burn" | "record::length_drift" | "record::journal" | "record::trace" => 1,
        "accept::settings" | "admit::redis::settings" | "forward::settings" | "record::settings" => 1,
        "config" | "dial" => 2,
        "accept" | "admit" | "admit::pool_queue" | "admit::redis" | "route::probe" | "forward" | "record" => 3,
        "gateway" | "admin" => 4,
        "sim" | "load" | "cli" => 5,
        _ => return None,
    })
}

/// Allowed uses within the pure layer: types of another room, never its functions.
const PURE_ACQUAINTANCES: &[(&str, &str, &str)] = &[
    ("classify", "identify", "who asks"),
    ("classify", "inspect", "a request's facts"),
    ("rewrite", "inspect", "a request's facts"),
    ("observe", "inspect", "a request's facts"),
    ("rewrite", "observe", "events and what was seen in them"),
    ("judge", "observe", "the timeline"),
    ("alerts", "record::length_drift", "the factor beyond which a drift matters"),
    ("reject", "judge", "outcomes"),
    ("reject", "inspect", "why a body could not be read"),
    ("reject", "admit::limit", "limits, and where they stand"),
    ("record::settings", "route", "where a collector is"),
    ("route", "admit::queue", "how the requests of a pool wait, in its settings"),
];

fn may_know(from: &str, to: &str) -> bool {
    let family = |room: &str| room.split("::").next().unwrap_or(room).to_owned();
    let (Some(ours), Some(theirs)) = (layer(from), layer(to)) else { return false };
    if from == to || (family(from) == family(to) && theirs <= ours) {
        return true;
    }
    match ours {
        0 => (from == "clock" || from == "http1") && to == "types",
        1 => {
            let words =
                to == "types" || to == "sync" || (to == "json" && ["inspect", "observe", "rewrite"].contains(&from));
            words || PURE_ACQUAINTANCES.iter().any(|(a, b, _)| (*a, *b) == (from, to))
        }
        2 => theirs <= 1,
        3 => theirs <= 1 || to == "dial",
        4 => theirs <= 3,
        _ => from == "cli" || theirs <= 1 || (from == "load" && to == "dial"),
    }
}

/// The room that a source file belongs to.
fn room_of(path: &Path) -> Option<String> {
    let inside = path.strip_prefix(root().join("src")).ok()?.with_extension("");
    let parts: Vec<&str> = inside.iter().filter_map(|part| part.to_str()).filter(|part| *part != "mod").collect();
    match parts[..] {
        ["lib" | "main"] => None,
        [] => None,
        _ => Some(room(parts)),
    }
}

/// The rooms named after `crate::`, in a whole file: `crate::a::b::C`, `crate::{a::b, c}`.
fn named_rooms(lines: &[(usize, String)]) -> Vec<(usize, String)> {
    let mut text = String::new();
    let mut starts = Vec::new();
    for (number, line) in lines {
        starts.push((text.len(), *number));
        text.push_str(line);
        text.push('\n');
    }
    let number_at = |at: usize| starts.iter().rev().find(|(start, _)| *start <= at).map_or(0, |(_, number)| *number);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let paths = match rest.strip_prefix('{') {
            Some(group) => members(group),
            None => vec![rest],
        };
        for path in paths {
            found.push((number_at(at), room(path.trim_start().splitn(4, "::").map(word))));
        }
    }
    found
}

/// The members of a group that has just been opened, cut at its own commas.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(&group[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.retain(|member| !member.trim().is_empty());
    found
}

/// The identifier at the start.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

#[test]
fn rooms_use_only_lower_layers() {
    let mut strays = Vec::new();
    let mut unused: Vec<_> = PURE_ACQUAINTANCES.iter().map(|(from, to, _)| (*from, *to)).collect();
    for path in files(&["src"], ".rs") {
        let Some(from) = room_of(&path) else { continue };
        if layer(&from).is_none() {
            strays.push(format!("{}: a room that no layer has: {from}", short(&path)));
            continue;
        }
        let lines = shipped(&path, &read(&path));
        for (number, to) in named_rooms(&lines) {
            unused.retain(|(a, b)| (*a, *b) != (from.as_str(), to.as_str()));
            if !may_know(&from, &to) {
                strays.push(format!("{}:{number}: {from} knows {to}", short(&path)));
            }
        }
        // `super` that climbs to the crate's root is a way around.
        let depth = path.strip_prefix(root().join("src")).unwrap().components().count();
        let depth = if path.file_name().is_some_and(|name| name == "mod.rs") { depth - 1 } else { depth };
        let climb = "super::".repeat(depth);
        let climbs = lines.iter().filter(|(_, line)| line.contains(&climb));
        strays.extend(climbs.map(|(number, _)| format!("{}:{number}: write crate:: instead", short(&path))));
    }
    report("a room knows another one that it must not (CONTRIBUTING.md, tests/architecture.rs):", strays);
    assert!(unused.is_empty(), "permissions that nobody needs: {unused:?}");
}

#[test]
fn the_rules_of_the_layers_are_distinguished() {
    assert!(may_know("gateway", "accept") && !may_know("gateway", "admin") && !may_know("admin", "gateway"));
    assert!(may_know("forward", "dial") && !may_know("forward", "accept") && !may_know("record", "forward"));
    assert!(may_know("route::probe", "route") && !may_know("route", "route::probe") && !may_know("route", "clock"));
    assert!(may_know("config", "accept::settings") && !may_know("config", "accept") && !may_know("accept", "config"));
    assert!(may_know("config", "admit::redis::settings") && !may_know("config", "admit::redis"));
    assert!(may_know("sim", "judge") && !may_know("sim", "gateway") && may_know("cli", "gateway"));
    let group =
        code_lines("use crate::{judge::{Outcome, evaluate}, record::burn::Burn};\nlet x = crate::types::Tick::ZERO;");
    let found: Vec<(usize, String)> = named_rooms(&group);
    let expected = [(1, "judge"), (1, "record::burn"), (2, "types")];
    assert_eq!(found, expected.map(|(number, room)| (number, room.to_owned())));
}

// ---- one meaning per name ----------------------------------------------------------------------

/// Private to a file by habit: each of them is read beside its owner.
const NAMES_OF_ANYBODY: &[&str] = &["Inner", "State", "Settings", "Error"];

/// The name of the type that this line defines. Associated types and types of tests have names of
/// their own accord.
fn defined_type(line: &str) -> Option<&str> {
    let bare = line.trim_start();
    let bare = match bare.strip_prefix("pub") {
        Some(rest) => rest.strip_prefix('(').map_or(rest, |rest| rest.split_once(')').map_or(rest, |(_, rest)| rest)),
        None => bare,
    };
    let (kind, name) = bare.trim_start().split_once(' ')?;
    let defines = match kind {
        "struct" | "enum" | "trait" | "union" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    Some(word(name)).filter(|name| defines && !name.is_empty())
}

#[test]
fn no_two_types_share_a_name() {
    let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in files(&["src"], ".rs") {
        for (number, line) in shipped(&path, &read(&path)) {
            if let Some(name) = defined_type(&line).filter(|name| !NAMES_OF_ANYBODY.contains(name)) {
                defined.entry(name.to_owned()).or_default().push(format!("{}:{number}", short(&path)));
            }
        }
    }
    let pairs = defined.iter().filter(|(_, places)| places.len() > 1);
    report("one name, one meaning:", pairs.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect());
}

#[test]
fn type_definitions_are_distinguished_from_uses() {
    let found = |line| defined_type(line);
    assert_eq!(found("pub(super) struct Seat<'a> {"), Some("Seat"));
    assert_eq!(found("    pub(in super::super) enum Fed {"), Some("Fed"));
    assert_eq!(found("type Homes = Vec<u8>;"), Some("Homes"));
    assert_eq!(found("    type Error = BoxError;"), None);
    assert_eq!(found("        pub struct $name {"), None);
    assert_eq!(found("use crate::structure;"), None);
}

// ---- time, docs, exceptions ------------------------------------------------------------------

#[test]
fn only_the_clock_reads_the_time() {
    let reads = ["Instant::now", "SystemTime::now", "Timestamp::now", "Zoned::now", ".elapsed()"];
    let mut strays = Vec::new();
    for path in files(&["src"], ".rs") {
        if path.ends_with("src/clock.rs") {
            continue;
        }
        for (number, line) in code_lines(&read(&path)) {
            if reads.iter().any(|read| line.contains(read)) {
                strays.push(format!("{}:{number}: {}", short(&path), line.trim()));
            }
        }
    }
    report("the time is read outside clock.rs:", strays);
}

/// A room's `tests.rs` needs no module documentation.
#[test]
fn every_module_says_what_it_is_for() {
    let all = files(&["src", "tests", "benches"], ".rs");
    let own_words = |path: &&PathBuf| path.file_name().is_some_and(|name| name != "tests.rs");
    let silent = all.iter().filter(own_words).filter(|path| !read(path).starts_with("//! "));
    report("no `//!` in the first line:", silent.map(|path| short(path)).collect());
}

/// Kept in pieces, so that this file does not find itself.
fn forbidden() -> Vec<(String, &'static str)> {
    let join = |parts: [&str; 2]| parts.concat();
    vec![
        (join(["todo", "!("]), "unfinished"),
        (join(["unimplemented", "!("]), "unfinished"),
        (join(["#[igno", "re"]), "an ignored test"),
        (join(["thread::sl", "eep"]), "a sleep"),
        (join(["#[al", "low("]), "use #[expect(.., reason = ..)]"),
        (join(["#![al", "low("]), "use #![expect(.., reason = ..)]"),
    ]
}

#[test]
fn nothing_is_unfinished_switched_off_or_slept_through() {
    let mut strays = Vec::new();
    for path in files(&["src", "tests", "benches"], ".rs") {
        for (number, line) in code_lines(&read(&path)) {
            let found = forbidden().into_iter().filter(|(word, _)| line.contains(word.as_str()));
            strays.extend(found.map(|(_, why)| format!("{}:{number}: {why}: {}", short(&path), line.trim())));
        }
    }
    report("not in this house:", strays);
}

#[test]
fn tests_do_not_sleep() {
    let nap = ["time::sl", "eep("].concat();
    let mut strays = Vec::new();
    for path in files(&["tests"], ".rs") {
        let found = code_lines(&read(&path)).into_iter().filter(|(_, line)| line.contains(&nap));
        strays.extend(found.map(|(number, _)| format!("{}:{number}", short(&path))));
    }
    report("a test that sleeps instead of waiting for a condition:", strays);
}

#[test]
fn every_exception_to_a_lint_has_its_reason() {
    let mut strays = Vec::new();
    for path in files(&["src", "tests", "benches"], ".rs") {
        let text = read(&path);
        for (at, start) in text.match_indices("#[expect(").chain(text.match_indices("#![expect(")) {
            let whole = text[at..].split(")]").next().unwrap_or_default();
            let in_comment =
                text[..at].rsplit('\n').next().is_some_and(|line| line.contains("//") || line.contains('"'));
            if !in_comment && !whole.contains("reason = ") {
                strays.push(format!("{}: {start}..", short(&path)));
            }
        }
    }
    report("no reason given:", strays);
}

#[test]
fn no_paths_or_places_of_a_machine() {
    let places = ["/work/", "/home/", "/root/", "/Users/"];
    let mut strays = Vec::new();
    let texts = [".rs", ".md", ".yaml", ".yml", ".toml", ".py", ".mjs", ".json", "Dockerfile", "run"];
    let paths =
        ["src", "tests", "benches", "docs", "config", "deploy", ".ci", "README.md", "CONTRIBUTING.md", "SECURITY.md"];
    for end in texts {
        for path in files(&paths, end) {
            if path.ends_with("tests/architecture.rs") || path.components().any(|part| part.as_os_str() == "wire") {
                continue;
            }
            for (number, line) in read(&path).lines().enumerate() {
                if places.iter().any(|place| line.contains(place)) {
                    strays.push(format!("{}:{}: {}", short(&path), number + 1, line.trim()));
                }
            }
        }
    }
    report("a path that only one machine has:", strays);
}

// ---- names that others build on --------------------------------------------------------------

/// Documents and deploy files whose names must exist.
fn documents() -> Vec<PathBuf> {
    let paths = ["README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "docs", "deploy", "config"];
    [".md", ".yaml", ".yml", ".json"].iter().flat_map(|end| files(&paths, end)).collect()
}

/// Words of these letters in a text, with their line.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let cut = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    text.lines().enumerate().flat_map(move |(at, line)| line.split(cut).map(move |word| (at + 1, word)))
}

/// Names of the golden page, which its module's own test compares with the code, and of a page with an engine
/// that reports everything.
fn metric_names() -> BTreeSet<String> {
    let golden = read(&root().join("src/record/golden.prom"));
    let recorder = Recorder::new(Clock::start(), None);
    let report = EngineReport { up: true, ..EngineReport::default() };
    recorder.engines(vec![(PoolId::from("pool"), EngineId::from("engine:8000"), report)]);
    [golden, recorder.page(Format::Text)]
        .iter()
        .flat_map(|page| goodput::record::names(page))
        .map(str::to_owned)
        .collect()
}

/// The family that a sample's name belongs to.
fn family(name: &str) -> &str {
    let ends = ["_bucket", "_sum", "_count", "_created"];
    ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
}

#[tokio::test]
async fn metrics_named_in_documents_exist() {
    let known = metric_names();
    assert!(known.contains("slo_total") && known.contains("slo_met_total"), "{known:?}");
    let keys = config_keys();
    let mut strays = Vec::new();
    for path in documents() {
        for (number, word) in words(&read(&path)).collect::<Vec<_>>() {
            let looks_like_one = word.starts_with("goodput_") || (word.starts_with("slo_") && word.ends_with("_total"));
            let exists = known.contains(word) || known.contains(family(word)) || keys.contains(word);
            if looks_like_one && !exists {
                strays.push(format!("{}:{number}: {word}", short(&path)));
            }
        }
    }
    report("a metric that is not exported:", strays);
}

/// Every key of the settings, at any depth.
fn config_keys() -> BTreeSet<String> {
    fn collect(schema: &serde_json::Value, keys: &mut BTreeSet<String>) {
        match schema {
            serde_json::Value::Object(map) => {
                if let Some(serde_json::Value::Object(properties)) = map.get("properties") {
                    keys.extend(properties.keys().cloned());
                }
                map.values().for_each(|value| collect(value, keys));
            }
            serde_json::Value::Array(all) => all.iter().for_each(|value| collect(value, keys)),
            _ => {}
        }
    }
    let mut keys = BTreeSet::new();
    collect(&goodput::config::schema(), &mut keys);
    keys
}

/// Dotted paths in code quotes whose first word is a block of the settings: `listen.max_body`.
fn quoted_keys(text: &str) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for quoted in line.split('`').skip(1).step_by(2) {
            let path: Vec<String> = quoted.split('.').map(str::to_owned).collect();
            let is_path = path.len() > 1
                && path.iter().all(|word| {
                    !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c))
                });
            if is_path {
                found.push((at + 1, path));
            }
        }
    }
    found
}

#[test]
fn settings_named_in_documents_exist() {
    let schema = goodput::config::schema();
    let top: BTreeSet<String> =
        schema["properties"].as_object().expect("the schema is an object's").keys().cloned().collect();
    let keys = config_keys();
    let files_not_keys = ["md", "rs", "yaml", "yml", "toml", "json", "txt", "py"];
    let mut strays = Vec::new();
    for path in documents() {
        for (number, named) in quoted_keys(&read(&path)) {
            let is_file = named.last().is_some_and(|last| files_not_keys.contains(&last.as_str()));
            if is_file || !top.contains(&named[0]) {
                continue;
            }
            for key in named.iter().filter(|key| !keys.contains(*key)) {
                strays.push(format!("{}:{number}: `{}`: no key {key}", short(&path), named.join(".")));
            }
        }
    }
    report("a setting that does not exist:", strays);
}

/// YAML blocks of documents must load if they are complete files (with `slo_classes` and `pools`).
#[test]
fn whole_settings_in_deploy_files_and_documents_load() {
    let mut tried = 0;
    for path in files(&["deploy", "config"], ".yaml") {
        let text = read(&path);
        if text.contains("\nslo_classes:") && text.contains("\npools:") {
            load(&short(&path), &text);
            tried += 1;
        }
    }
    for path in files(&["README.md", "docs"], ".md") {
        for (at, block) in read(&path).split("```yaml\n").skip(1).enumerate() {
            let block = block.split("```").next().unwrap_or_default();
            if block.contains("slo_classes:") && block.contains("pools:") {
                load(&format!("{} (YAML block {})", short(&path), at + 1), block);
                tried += 1;
            }
        }
    }
    assert!(tried > 0);
}

/// Files that settings refer to exist for this purpose, empty ones aside.
struct Imagined;

impl goodput::config::Environment for Imagined {
    fn variable(&self, _: &str) -> Option<String> {
        Some("value".to_owned())
    }

    fn file(&self, _: &Path) -> std::io::Result<Vec<u8>> {
        Ok(b"secret-from-a-file".to_vec())
    }
}

fn load(name: &str, text: &str) {
    if let Err(problems) = goodput::config::load(text, &Imagined) {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        panic!("{name}:\n  {}", all.join("\n  "));
    }
}

/// The names of all tests, with their files.
fn test_names() -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for path in files(&["src", "tests"], ".rs") {
        let lines = code_lines(&read(&path));
        let marked = lines.windows(3).filter(|three| {
            let line = three[0].1.trim();
            line == "#[test]" || line.starts_with("#[tokio::test")
        });
        for three in marked {
            let name = three[1..].iter().find_map(|(_, line)| line.split_once("fn ").map(|(_, rest)| word(rest)));
            names.extend(name.map(|name| (name.to_owned(), short(&path))));
        }
    }
    names
}

/// The cases in the name of a test: `c104_c105_the_client_gets` has two.
fn cases_of(test: &str) -> impl Iterator<Item = u32> {
    test.split('_').map_while(|part| part.strip_prefix('c')?.parse().ok())
}

#[test]
fn every_case_has_its_row_and_its_test() {
    let tests = test_names();
    let mut rows = BTreeSet::new();
    let mut strays = Vec::new();
    for line in read(&root().join("docs/cases.md")).lines().filter(|line| line.starts_with("| C")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let case: u32 = cells[0][1..].parse().unwrap_or_else(|_| panic!("docs/cases.md: {line}"));
        assert_eq!(cells.len(), 4, "docs/cases.md: C{case} has an id, an input, an answer and a test");
        assert!(rows.insert(case), "docs/cases.md: C{case} stands there twice");
        let named: Vec<&str> = cells[3].split('`').skip(1).step_by(2).collect();
        let has_none = named.is_empty() && !cells[3].starts_with("no test: ");
        strays.extend(has_none.then(|| format!("C{case}: name a test, or write \"no test: \" and why")));
        for test in named {
            let numbered = tests.keys().any(|test| cases_of(test).any(|other| other == case));
            if !tests.contains_key(test) {
                strays.push(format!("C{case}: no test is called {test}"));
            } else if numbered && cases_of(test).all(|other| other != case) {
                strays.push(format!("C{case}: {test} is of another case"));
            }
        }
    }
    for (test, file) in &tests {
        let missing = cases_of(test).filter(|case| !rows.contains(case));
        strays.extend(missing.map(|case| format!("{file}: {test}: C{case} has no row")));
    }
    report("docs/cases.md and the tests differ:", strays);
}

// ---- packaging -------------------------------------------------------------------------------

#[test]
fn the_image_is_built_from_everything_the_binary_needs() {
    let dockerfile = read(&root().join("Dockerfile"));
    let copies =
        dockerfile.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|line| !line.contains("--from"));
    let mut copied = BTreeSet::new();
    for copy in copies {
        let mut sources: Vec<&str> = copy.split_whitespace().collect();
        sources.pop();
        copied.extend(sources.into_iter().map(str::to_owned));
    }
    for source in &copied {
        assert!(root().join(source).exists(), "Dockerfile copies {source}, which is not there");
        let allowed = read(&root().join(".dockerignore"));
        assert!(allowed.lines().any(|line| line == format!("!{source}")), ".dockerignore leaves out {source}");
    }
    let mut strays = Vec::new();
    for path in files(&["src"], ".rs") {
        let text = read(&path);
        let shipped = shipped(&path, &text).len();
        for (number, line) in text.lines().take(shipped).enumerate() {
            let included = line.split_once("include_str!(\"").or_else(|| line.split_once("include_bytes!(\""));
            let Some((_, rest)) = included else { continue };
            let file = rest.split('"').next().unwrap_or_default();
            let whole = path.parent().unwrap().join(file);
            let whole = whole.canonicalize().unwrap_or_else(|error| panic!("{}: {file}: {error}", short(&path)));
            let top = short(&whole).split('/').next().unwrap_or_default().to_owned();
            if !copied.contains(&top) && !copied.contains(&short(&whole)) {
                strays.push(format!("{}:{}: includes {file}", short(&path), number + 1));
            }
        }
    }
    report("the Dockerfile does not copy what the binary includes:", strays);
}

#[test]
fn the_image_runs_as_a_number_and_checks_itself() {
    let dockerfile = read(&root().join("Dockerfile"));
    let user = dockerfile.lines().rev().find_map(|line| line.strip_prefix("USER ")).expect("a user");
    assert!(user.split(':').all(|id| id.parse::<u32>().is_ok_and(|id| id > 0)), "USER {user}");
    assert!(dockerfile.contains("\"/usr/local/bin/goodput\", \"health\""));
}

#[test]
fn the_readmes_test_command_is_the_one_that_is_run() {
    let readme = read(&root().join("README.md"));
    let after = readme.split_once("<!-- test -->").expect("README.md marks its test command").1;
    let mut lines = after.lines().skip_while(|line| !line.starts_with("```")).skip(1);
    assert_eq!(lines.next(), Some("cargo test"));
    assert!(read(&root().join(".ci/run")).contains("<!-- test -->"), ".ci/run reads it from the README");
}

/// The compose file starts commands that exist.
#[test]
fn compose_starts_commands_that_exist() {
    let compose: serde_json::Value = serde_yaml::from_str(&read(&root().join("deploy/compose/compose.yaml"))).unwrap();
    let services = compose["services"].as_object().expect("services");
    let mut ours = BTreeMap::new();
    for (name, service) in services {
        for mount in service["volumes"].as_array().into_iter().flatten().filter_map(|mount| mount.as_str()) {
            if let Some(file) = mount.split(':').next().and_then(|file| file.strip_prefix("./")) {
                assert!(root().join("deploy/compose").join(file).exists(), "{name} mounts {file}");
            }
        }
        if service["image"] == "goodput:local" || service.get("<<").is_some() {
            let command: Vec<&str> =
                service["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
            ours.insert(name.as_str(), command.join(" "));
        }
    }
    assert_eq!(ours.len(), 3, "{ours:?}");
    for (name, command) in ours {
        let known = ["serve -c /etc/goodput/goodput.yaml", "engine --listen 0.0.0.0:8000 --model sim --seed "];
        assert!(known.iter().any(|known| command.starts_with(known)), "{name}: {command}");
    }
}
