//! `goodput check --probe`: the state of all engines, with the messages that the gateway logs at its start.

use std::sync::Arc;

use anyhow::Context;
use serde_json::{Value, json};

use crate::cli::service::sentence_of;
use crate::clock::Clock;
use crate::config::Settings;
use crate::dial::Sockets;
use crate::route::UnlistedModel;
use crate::route::probe::{KeyState, Survey, survey};
use crate::types::PoolId;

/// The state of all engines of the settings.
pub(super) struct Probed {
    engines: Vec<Survey>,
    /// Models of the settings that no engine lists.
    pub unlisted: Vec<UnlistedModel>,
}

impl Probed {
    /// Probes the engines.
    ///
    /// # Errors The runtime cannot start.
    pub fn of(settings: &Settings) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("no engine can be asked")?;
        let engines = runtime.block_on(survey(&settings.pools, Arc::new(Sockets::new()), Clock::start()));
        Ok(Self::said(settings, engines))
    }

    fn said(settings: &Settings, engines: Vec<Survey>) -> Self {
        let listed = |pool: &PoolId| {
            let of_pool = engines.iter().filter(|survey| survey.pool == *pool);
            Some(of_pool.flat_map(|survey| survey.models.iter().flatten().cloned()).collect())
        };
        let mut unlisted = settings.routes.unlisted(listed);
        unlisted.sort();
        unlisted.dedup();
        Probed { engines, unlisted }
    }

    /// Whether no engine needs attention.
    pub fn is_good(&self) -> bool {
        self.unlisted.is_empty() && self.engines.iter().all(Survey::is_well)
    }

    /// A line per engine, and per model that no engine lists.
    pub fn to_lines(&self) -> Vec<String> {
        let engines = self.engines.iter().map(line_of);
        engines.chain(self.unlisted.iter().map(sentence_of)).collect()
    }

    pub fn to_json(&self) -> Value {
        let engine = |survey: &Survey| {
            json!({
                "pool": survey.pool.as_str(),
                "engine": survey.engine.as_str(),
                "kind": survey.kind,
                "good": survey.is_well(),
                "trouble": survey.trouble,
                "version": survey.version,
                "models": survey.models.as_ref().map(|models| models.iter().map(|model| &**model).collect::<Vec<_>>()),
                "key": survey.key.as_str(),
                "priority_scheduling": survey.priority_scheduling,
            })
        };
        self.engines.iter().map(engine).collect()
    }
}

fn line_of(survey: &Survey) -> String {
    let Survey { pool, engine, kind, version, key, .. } = survey;
    let version = version.as_deref().map_or_else(String::new, |version| format!(" {version}"));
    let priority = if survey.priority_scheduling { ", schedules by priority" } else { "" };
    let place = format!("{pool} {engine} ({kind}{version}{priority})");
    match &survey.trouble {
        Some(trouble) => format!("{place}: cannot be used: {trouble}"),
        None if *key == KeyState::Refused => {
            format!("{place}: refuses the pool's key: set `engine.api_key_file` to a file with the key that it wants")
        }
        None => format!("{place}: is there; key {}, models: {}", key.as_str(), survey.models_shown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, Environment};

    struct Nothing;

    impl Environment for Nothing {
        fn variable(&self, _: &str) -> Option<String> {
            None
        }

        fn file(&self, _: &std::path::Path) -> std::io::Result<Vec<u8>> {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }

    fn settings() -> Settings {
        let text = "slo_classes: [{slo_class: chat, joint_attainment_target: 0.9}]\n\
                    default_class: chat\n\
                    pools: [{pool: fast, engines: [{url: http://e:1}, {url: http://f:1}]}]\n\
                    routes: [{model: [llama-3, mixtral], pools: fast}]\n";
        config::load(text, &Nothing).unwrap_or_else(|problems| panic!("{problems:#?}"))
    }

    fn survey(engine: &str, models: &[&str]) -> Survey {
        Survey {
            pool: "fast".into(),
            engine: engine.into(),
            kind: "vllm",
            trouble: None,
            version: Some("0.9.1".to_owned()),
            models: Some(models.iter().map(|model| Arc::from(*model)).collect()),
            key: KeyState::NotNeeded,
            priority_scheduling: false,
        }
    }

    #[test]
    fn healthy_engines_have_one_line_each() {
        let probed = Probed::said(&settings(), vec![survey("e:1", &["llama-3"]), survey("f:1", &["mixtral"])]);
        assert!(probed.is_good());
        assert_eq!(probed.to_lines()[0], "fast e:1 (vllm 0.9.1): is there; key none needed, models: llama-3");
        assert_eq!(probed.to_lines().len(), 2);
        assert_eq!(probed.to_json()[1]["models"], json!(["mixtral"]));
    }

    #[test]
    fn problems_are_reported_with_their_correction() {
        let down =
            Survey { trouble: Some("the port refuses connections".to_owned()), models: None, ..survey("e:1", &[]) };
        let refused = Survey { key: KeyState::Refused, version: None, models: None, ..survey("f:1", &[]) };
        let probed = Probed::said(&settings(), vec![down, refused]);
        assert!(!probed.is_good() && probed.unlisted.is_empty(), "no lists, no misspelt names");
        let lines = probed.to_lines();
        assert_eq!(lines[0], "fast e:1 (vllm 0.9.1): cannot be used: the port refuses connections");
        assert!(
            lines[1].starts_with("fast f:1 (vllm): refuses the pool's key: set `engine.api_key_file`"),
            "{lines:?}"
        );
        let probed = Probed::said(&settings(), vec![survey("e:1", &["llama-3"]), survey("f:1", &["llama-3"])]);
        assert!(!probed.is_good());
        assert_eq!(
            probed.to_lines()[2],
            "no engine lists the model \"mixtral\", which a route leads to fast: correct its name in `routes` or `models`, or load it"
        );
    }
}
