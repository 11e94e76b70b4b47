//! Settings for tests, as the YAML that an operator would write.

/// A settings file with one class, `chat`, and what a test adds to it.
#[derive(Clone, Debug)]
pub struct Yaml {
    objectives: Vec<(String, f64)>,
    class: Vec<String>,
    classes: String,
    pools: Vec<Pool>,
    routes: Option<String>,
    top: String,
}

#[derive(Clone, Debug)]
struct Pool {
    name: String,
    engines: Vec<String>,
    dns: Option<String>,
    kind: String,
    engine: Vec<String>,
    lines: Vec<String>,
}

impl Default for Yaml {
    /// TTFT 500 ms, TPOT 50 ms, joint; pool `a` of one vLLM engine `e1`; every model.
    fn default() -> Self {
        let objectives = vec![("ttft_seconds".to_owned(), 0.5), ("tpot_seconds".to_owned(), 0.05)];
        let yaml = Yaml {
            objectives,
            class: Vec::new(),
            classes: String::new(),
            pools: Vec::new(),
            routes: None,
            top: String::new(),
        };
        yaml.pool("a", &["e1"])
    }
}

impl Yaml {
    /// The class `chat` with these objectives instead.
    pub fn promise(mut self, objectives: &[(&str, f64)]) -> Self {
        self.objectives = objectives.iter().map(|(name, threshold)| ((*name).to_owned(), *threshold)).collect();
        self
    }

    /// A line of the class `chat`.
    pub fn class(mut self, line: &str) -> Self {
        self.class.push(line.to_owned());
        self
    }

    /// Another class, as an item of the list.
    pub fn and_class(mut self, item: &str) -> Self {
        self.classes.push_str(item);
        self.classes.push('\n');
        self
    }

    /// Only pools that are named from here on.
    pub fn no_pools(mut self) -> Self {
        self.pools.clear();
        self
    }

    /// A pool of these engines, `host` or a whole URL each. Replaces one of the same name.
    pub fn pool(mut self, name: &str, engines: &[&str]) -> Self {
        self.pools.retain(|pool| pool.name != name);
        self.pools.push(Pool {
            name: name.to_owned(),
            engines: engines.iter().map(|engine| url(engine)).collect(),
            dns: None,
            kind: "vllm".to_owned(),
            engine: Vec::new(),
            lines: Vec::new(),
        });
        self
    }

    /// Engines of the first pool; all else about it stays.
    pub fn engines_of_first(mut self, engines: &[&str]) -> Self {
        self.pools[0].engines = engines.iter().map(|engine| url(engine)).collect();
        self
    }

    /// The engines of the last pool by a DNS name.
    pub fn dns(mut self, block: &str) -> Self {
        self.last().dns = Some(block.to_owned());
        self
    }

    /// The kind of the last pool's engines.
    pub fn kind(mut self, kind: &str) -> Self {
        self.last().kind = kind.to_owned();
        self
    }

    /// A key of the last pool's `engine`.
    pub fn engine(mut self, entry: &str) -> Self {
        self.last().engine.push(entry.to_owned());
        self
    }

    /// A line of the last pool.
    pub fn with(mut self, line: &str) -> Self {
        self.last().lines.push(line.to_owned());
        self
    }

    /// Routes instead of the one that takes everything to all pools in order.
    pub fn routes(mut self, items: &str) -> Self {
        self.routes = Some(items.to_owned());
        self
    }

    /// Lines at the top level.
    pub fn top(mut self, lines: &str) -> Self {
        self.top.push_str(lines);
        self.top.push('\n');
        self
    }

    fn last(&mut self) -> &mut Pool {
        self.pools.last_mut().expect("a pool was named")
    }

    /// The file.
    pub fn text(&self) -> String {
        let mut text = String::from("slo_classes:\n  - slo_class: chat\n    objectives:\n");
        for (name, threshold) in &self.objectives {
            text.push_str(&format!("      {name}: {{threshold: {threshold}, attainment: 0.95}}\n"));
        }
        text.push_str("    joint_attainment_target: 0.92\n    window: 28d\n");
        for line in &self.class {
            text.push_str(&format!("    {line}\n"));
        }
        text.push_str(&self.classes);
        text.push_str("default_class: chat\npools:\n");
        for pool in &self.pools {
            let engines: Vec<String> = pool.engines.iter().map(|url| format!("{{url: \"{url}\"}}")).collect();
            let engine: String = pool.engine.iter().map(|entry| format!(", {entry}")).collect();
            let source = match &pool.dns {
                Some(block) => format!("dns: {block}"),
                None => format!("engines: [{}]", engines.join(", ")),
            };
            text.push_str(&format!("  - pool: {}\n    {source}\n", pool.name));
            text.push_str(&format!("    engine: {{kind: {}{engine}}}\n", pool.kind));
            for line in &pool.lines {
                text.push_str(&format!("    {line}\n"));
            }
        }
        let all: Vec<&str> = self.pools.iter().map(|pool| pool.name.as_str()).collect();
        let everything = format!("  - {{model: [m1, \"*\"], pools: [{}]}}", all.join(", "));
        text.push_str(&format!("routes:\n{}\n", self.routes.as_deref().unwrap_or(&everything)));
        text.push_str(&self.top);
        text
    }
}

fn url(engine: &str) -> String {
    if engine.contains("://") { engine.to_owned() } else { format!("http://{engine}:8000") }
}
