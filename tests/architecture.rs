//! Rules of the source that a compiler does not see, as tests: layers, circles, names, time, documents.
//!
//! Each test reads the sources and lists the violating lines. Code that only tests compile may use every module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use goodput::clock::Clock;
use goodput::record::{EngineReport, Format, Recorder};
use goodput::types::{EngineId, PoolId};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree, token_stream};

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

fn report(rule: &str, strays: Vec<String>) {
    assert!(strays.is_empty(), "{rule}\n  {}\n", strays.join("\n  "));
}

// ---- tokens of a file -----------------------------------------------------------------------

/// A module or item, from the crate's root.
type ModulePath = Vec<String>;

type Tokens = Peekable<token_stream::IntoIter>;

/// Names and definitions of one file, by its tokens: comments and strings have none.
#[derive(Default)]
struct Source {
    file: String,
    module: ModulePath,
    /// Paths of two words and more, and those of `use`, with their lines.
    named: Vec<(usize, ModulePath)>,
    /// Names that `use` brings in.
    imports: BTreeMap<String, ModulePath>,
    types: Vec<(usize, String)>,
    tests: Vec<String>,
    ignored: Vec<usize>,
    /// Files that are compiled in.
    included: Vec<(usize, String)>,
}

/// The library as it ships.
static LIBRARY: LazyLock<Vec<Source>> = LazyLock::new(|| {
    let of_tests = ["main.rs", "tests.rs", "tests", "interleavings.rs"];
    let ships = |path: &&PathBuf| !path.iter().any(|part| of_tests.iter().any(|name| part == *name));
    files(&["src"], ".rs").iter().filter(ships).map(|path| Source::of(path, false)).collect()
});

/// Everything, with tests.
static ALL: LazyLock<Vec<Source>> =
    LazyLock::new(|| files(&["src", "tests", "benches"], ".rs").iter().map(|path| Source::of(path, true)).collect());

impl Source {
    /// Reads a file, or what ships of it.
    fn of(path: &Path, with_tests: bool) -> Source {
        let inside = path.strip_prefix(root().join("src")).unwrap_or(path).with_extension("");
        let words = inside.iter().map(|word| word.to_string_lossy().into_owned());
        let module = words.filter(|word| !["mod", "lib"].contains(&word.as_str())).collect();
        let mut source = Source { file: short(path), module, ..Source::default() };
        let tokens: TokenStream = read(path).parse().unwrap_or_else(|error| panic!("{}: {error}", short(path)));
        source.scan(tokens, with_tests, 0);
        source
    }

    fn scan(&mut self, tokens: TokenStream, with_tests: bool, depth: usize) {
        let next = |tokens: &mut Tokens| tokens.peek().map(ToString::to_string).unwrap_or_default();
        let mut tokens = tokens.into_iter().peekable();
        let (mut is_use, mut is_test) = (false, false);
        while let Some(token) = tokens.next() {
            let line = token.span().start().line;
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    let attribute = tokens.next_if(|next| matches!(next, TokenTree::Group(_)));
                    let attribute = attribute.map(|group| group.to_string().replace(' ', "")).unwrap_or_default();
                    is_test |= attribute == "[test]" || attribute.starts_with("[tokio::test");
                    self.ignored.extend(attribute.starts_with("[ignore").then_some(line));
                    if !with_tests && attribute == "[cfg(test)]" {
                        tokens.find(ends_item);
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => is_use = false,
                TokenTree::Group(group) => {
                    is_use = false;
                    self.scan(group.stream(), with_tests, depth + 1);
                }
                TokenTree::Ident(ident) => match ident.to_string().as_str() {
                    "use" => is_use = true,
                    "pub" => drop(tokens.next_if(|next| next.to_string().starts_with("(in "))),
                    "fn" if std::mem::take(&mut is_test) => self.tests.push(next(&mut tokens)),
                    "type" if depth > 0 => {}
                    "struct" | "enum" | "trait" | "type" => {
                        let name = next(&mut tokens);
                        self.types.extend(name.starts_with(char::is_alphabetic).then_some((line, name)));
                    }
                    "include_str" | "include_bytes" => {
                        let file = tokens.nth(1).map(|file| file.to_string()).unwrap_or_default();
                        self.included.push((line, file.trim_matches(['(', ')', '"']).to_owned()));
                    }
                    _ => self.path(Vec::new(), &token, &mut tokens, is_use),
                },
                _ => {}
            }
        }
    }

    /// A path from this word on. A group of a `use` continues it with each of its members.
    fn path(&mut self, mut words: ModulePath, first: &TokenTree, tokens: &mut Tokens, is_use: bool) {
        words.push(first.to_string());
        while tokens.next_if(is_path_separator).is_some() {
            tokens.next();
            match tokens.next_if(|next| matches!(next, TokenTree::Ident(_) | TokenTree::Group(_))) {
                Some(TokenTree::Group(group)) => {
                    let mut members = group.stream().into_iter().peekable();
                    while let Some(member) = members.next() {
                        if matches!(member, TokenTree::Ident(_)) {
                            self.path(words.clone(), &member, &mut members, is_use);
                        }
                    }
                    return;
                }
                Some(word) => words.push(word.to_string()),
                None => break,
            }
        }
        if words.len() > 1 && words.last().is_some_and(|word| word == "self") {
            words.pop();
        }
        let path = self.absolute(&words);
        if is_use {
            let renamed = tokens.next_if(|next| next.to_string() == "as").and_then(|_| tokens.next());
            let name = renamed.map(|name| name.to_string()).or(words.last().cloned());
            self.imports.extend(name.map(|name| (name, path.clone())));
        }
        if is_use || words.len() > 1 {
            self.named.push((first.span().start().line, path));
        }
    }

    fn absolute(&self, words: &[String]) -> ModulePath {
        let mut path = if words[0] == "crate" { Vec::new() } else { self.module.clone() };
        for word in words {
            match word.as_str() {
                "crate" | "self" => {}
                "super" => drop(path.pop()),
                word => path.push(word.to_owned()),
            }
        }
        path
    }
}

/// The last token of an item, or of an item's member.
fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => [';', ','].contains(&punct.as_char()),
        _ => false,
    }
}

/// The first half of `::`.
fn is_path_separator(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Punct(colon) if colon.as_char() == ':' && colon.spacing() == Spacing::Joint)
}

#[test]
fn tokens_of_tests_strings_and_comments_are_left_out() {
    let text = r#"
        use super::{self, b::{C, d as e}, f::*};
        // crate::comment::X
        pub(super) struct Seat<'a> { text: &'a str }
        pin_project! { pub enum Fed<B> { One { #[pin] body: crate::judge::B } } }
        impl Seat<'_> { type Error = X; #[cfg(test)] fn f(a: u8) { crate::cli::run() } const A: &str = "crate::text::X"; }
        type Homes = Vec<u8>;
        #[tokio::test(start_paused = true)] async fn holds() {}
        #[cfg(test)] mod tests { struct Held; #[test] #[ignore] fn c1_x() {} }
        const TEXT: &str = include_str!("a.txt");
    "#;
    let tokens: TokenStream = text.parse().unwrap();
    let module = vec!["a".to_owned(), "own".to_owned()];
    let mut shipped = Source { module: module.clone(), ..Source::default() };
    shipped.scan(tokens.clone(), false, 0);
    let named: BTreeSet<String> = shipped.named.iter().map(|(_, path)| path.join("::")).collect();
    let expected = ["a", "a::b::C", "a::b::d", "a::f", "judge::B"];
    assert_eq!(named, expected.map(str::to_owned).into());
    assert_eq!(shipped.imports["e"].join("::"), "a::b::d");
    let types: Vec<&str> = shipped.types.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!((types, &shipped.tests[..]), (vec!["Seat", "Fed", "Homes"], &["holds".to_owned()][..]));
    assert_eq!(shipped.included, [(10, "a.txt".to_owned())]);
    let mut whole = Source { module, ..Source::default() };
    whole.scan(tokens, true, 0);
    assert_eq!((&whole.tests[..], &whole.ignored[..]), (&["holds".to_owned(), "c1_x".to_owned()][..], &[9][..]));
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

#[test]
fn rooms_use_only_lower_layers() {
    let mut strays = Vec::new();
    let mut unused: Vec<_> = PURE_ACQUAINTANCES.iter().map(|(from, to, _)| (*from, *to)).collect();
    for source in LIBRARY.iter().filter(|source| !source.module.is_empty()) {
        let from = room(source.module.iter().map(String::as_str));
        if layer(&from).is_none() {
            strays.push(format!("{}: a room that no layer has: {from}", source.file));
            continue;
        }
        for (line, path) in &source.named {
            let to = room(path.iter().map(String::as_str));
            unused.retain(|(a, b)| (*a, *b) != (from.as_str(), to.as_str()));
            if !may_know(&from, &to) {
                strays.push(format!("{}:{line}: {from} knows {to}", source.file));
            }
        }
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
    let path = |text: &'static str| room(text.split("::"));
    assert_eq!(path("record::burn::Burn"), "record::burn");
    assert_eq!(path("admit::redis::settings::Redis"), "admit::redis::settings");
    assert_eq!(path("judge::Outcome"), "judge");
}

// ---- circles within a room ---------------------------------------------------------------------

/// The module of a path: re-exports and other imports of modules on the way are followed.
fn defining_module(path: &[String], sources: &BTreeMap<ModulePath, &Source>) -> Option<ModulePath> {
    let mut path = path.to_vec();
    // More steps than any chain of re-exports has.
    for _ in 0..8 {
        let depth = (0..=path.len()).rev().find(|depth| sources.contains_key(&path[..*depth]))?;
        let imported = path.get(depth).and_then(|name| sources[&path[..depth]].imports.get(name));
        match imported.filter(|to| **to != path[..=depth]) {
            Some(to) => path.splice(..=depth, to.iter().cloned()),
            None => return Some(path[..depth].to_vec()),
        };
    }
    None
}

/// Uses of each file of a room by each other one, with a line. A module and the modules in it are one, because each
/// of them extends the other.
fn uses(sources: &[Source]) -> BTreeMap<ModulePath, BTreeMap<ModulePath, usize>> {
    let by_module: BTreeMap<ModulePath, &Source> =
        sources.iter().map(|source| (source.module.clone(), source)).collect();
    let mut uses: BTreeMap<ModulePath, BTreeMap<ModulePath, usize>> = BTreeMap::new();
    for Source { module, named, .. } in sources {
        for (line, path) in named {
            let Some(used) = defining_module(path, &by_module) else { continue };
            let is_family = used.starts_with(module) || module.starts_with(&used);
            if !is_family && used.first() == module.first() {
                uses.entry(module.clone()).or_default().entry(used).or_insert(*line);
            }
        }
    }
    uses
}

/// Everything that a module uses, directly or through others.
fn reached<'a>(
    from: &'a ModulePath,
    uses: &'a BTreeMap<ModulePath, BTreeMap<ModulePath, usize>>,
) -> BTreeSet<&'a ModulePath> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        let direct = uses.get(module).into_iter().flat_map(BTreeMap::keys);
        open.extend(direct.filter(|used| reached.insert(*used)));
    }
    reached
}

/// Each use that is part of a circle.
fn circles(sources: &[Source]) -> Vec<String> {
    let uses = uses(sources);
    let mut found = Vec::new();
    for (from, direct) in &uses {
        for (to, line) in direct {
            if reached(to, &uses).contains(from) {
                found.push(format!("{} uses {} (line {line})", from.join("::"), to.join("::")));
            }
        }
    }
    found
}

#[test]
fn files_of_a_room_do_not_use_each_other_in_a_circle() {
    report("move what both need to a file of its own:", circles(&LIBRARY));
}

#[test]
fn circles_are_found_through_re_exports_and_a_parent_is_none() {
    let source = |module: &str, text: &str| {
        let mut source = Source { module: module.split("::").map(str::to_owned).collect(), ..Source::default() };
        source.scan(text.parse().unwrap(), false, 0);
        source
    };
    let room = source("a", "pub use b::B; use c::C;");
    let open = [room, source("a::b", "use super::c::C;"), source("a::c", "use super::d::D;"), source("a::d", "")];
    assert_eq!(circles(&open), [""; 0]);
    let [room, b, c, _] = open;
    let closed = [room, b, c, source("a::d", "fn f() -> super::B {}")];
    let expected = ["a::b uses a::c (line 1)", "a::c uses a::d (line 1)", "a::d uses a::b (line 1)"];
    assert_eq!(circles(&closed), expected);
}

// ---- one meaning per name ----------------------------------------------------------------------

/// Private to a file by habit: each of them is read beside its owner.
const NAMES_OF_ANYBODY: &[&str] = &["Inner", "State", "Settings", "Error"];

#[test]
fn no_two_types_share_a_name() {
    let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in LIBRARY.iter() {
        for (line, name) in &source.types {
            defined.entry(name.clone()).or_default().push(format!("{}:{line}", source.file));
        }
    }
    defined.retain(|name, places| places.len() > 1 && !NAMES_OF_ANYBODY.contains(&name.as_str()));
    report(
        "one name, one meaning:",
        defined.iter().map(|(name, places)| format!("{name}: {}", places.join(", "))).collect(),
    );
}

// ---- time, docs ------------------------------------------------------------------------------

#[test]
fn only_the_clock_reads_the_time() {
    let clocks = ["Instant", "SystemTime", "Timestamp", "Zoned"];
    let mut strays = Vec::new();
    let reading = |source: &&Source| source.file.starts_with("src") && source.file != "src/clock.rs";
    for source in ALL.iter().filter(reading) {
        let reads = |path: &[String]| matches!(path, [.., of, name] if name == "now" && clocks.contains(&of.as_str()));
        let lines = source.named.iter().filter(|(_, path)| reads(path));
        strays.extend(lines.map(|(line, path)| format!("{}:{line}: {}", source.file, path.join("::"))));
    }
    report("the time is read outside clock.rs:", strays);
}

#[test]
fn no_test_is_ignored_or_sleeps() {
    let mut strays = Vec::new();
    for source in ALL.iter() {
        strays.extend(source.ignored.iter().map(|line| format!("{}:{line}: ignored", source.file)));
        let may_sleep = !source.file.starts_with("tests");
        let sleeps = |path: &[String]| match path {
            [.., of, name] => name == "sleep" && (of == "thread" || of == "time" && !may_sleep),
            _ => false,
        };
        let lines = source.named.iter().filter(|(_, path)| sleeps(path));
        strays.extend(lines.map(|(line, _)| format!("{}:{line}: sleeps", source.file)));
    }
    report("a test waits for a condition, and runs:", strays);
}

/// A room's `tests.rs` needs no module documentation.
#[test]
fn every_module_says_what_it_is_for() {
    let all = files(&["src", "tests", "benches"], ".rs");
    let own_words = |path: &&PathBuf| path.file_name().is_some_and(|name| name != "tests.rs");
    let silent = all.iter().filter(own_words).filter(|path| !read(path).starts_with("//! "));
    report("no `//!` in the first line:", silent.map(|path| short(path)).collect());
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
fn test_names() -> BTreeMap<&'static str, &'static str> {
    ALL.iter().flat_map(|source| source.tests.iter().map(|name| (name.as_str(), source.file.as_str()))).collect()
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
    for Source { file, included, .. } in LIBRARY.iter() {
        for (line, name) in included {
            let path = root().join(file).parent().unwrap().join(name);
            let path = path.canonicalize().unwrap_or_else(|error| panic!("{file}: {name}: {error}"));
            let top = short(&path).split('/').next().unwrap_or_default().to_owned();
            if !copied.contains(&top) && !copied.contains(&short(&path)) {
                strays.push(format!("{file}:{line}: includes {name}"));
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
