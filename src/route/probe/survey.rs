//! Survey of an engine before its first request: reachability, kind, version, models, acceptance of the
//! pool's key. Logged in one line when the gateway begins to use it, and shown by `goodput check --probe`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::Deserialize;

use super::client::{ProbeClient, ProbeFailure};
use crate::clock::Clock;
use crate::dial::Dial;
use crate::route::ModelCard;
use crate::route::settings::{EngineAddress, EngineKind, EngineSource, PoolSettings};
use crate::types::{EngineId, PoolId};

/// Time limit per question.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest list of models, bytes.
const LONGEST_LIST: usize = 1024 * 1024;
/// Most models kept per engine.
const MOST_MODELS: usize = 1000;
/// Longest name of a model or version.
const LONGEST_NAME: usize = 256;
/// Models named in the line; the others are counted.
const SHOWN: usize = 5;

/// The survey of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Its pool.
    pub pool: PoolId,
    /// The engine.
    pub engine: EngineId,
    /// Its kind in the settings.
    pub kind: &'static str,
    /// Why it cannot be used; `None` if reachable and healthy.
    pub trouble: Option<String>,
    /// Its reported version.
    pub version: Option<String>,
    /// Its models; `None` if it gives no list.
    pub models: Option<Vec<Arc<str>>>,
    /// Whether it accepts the pool's key.
    pub key: KeyState,
    /// Whether the settings say that it schedules by priority.
    pub priority_scheduling: bool,
}

/// An engine's response to the pool's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// It accepts the pool's key.
    Accepted,
    /// It responds although the pool has no key.
    NotNeeded,
    /// It rejects the key, or requires one.
    Refused,
    /// Unknown.
    Unknown,
}

impl KeyState {
    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            KeyState::Accepted => "accepted",
            KeyState::NotNeeded => "none needed",
            KeyState::Refused => "refused",
            KeyState::Unknown => "unknown",
        }
    }
}

/// Surveys every engine of these pools concurrently.
pub async fn survey(pools: &[Arc<PoolSettings>], dial: Arc<dyn Dial>, clock: Clock) -> Vec<Survey> {
    let client = ProbeClient { dial, clock };
    let of_pool = async |pool: &Arc<PoolSettings>| {
        let addresses = match &pool.engines {
            EngineSource::Static(addresses) => addresses.clone(),
            EngineSource::Dns(dns) => {
                let found = client.within(TIMEOUT, client.dial.look_up(&dns.name, dns.port)).await;
                let found = found.and_then(Result::ok).unwrap_or_default();
                let found = super::ChosenFamily::default().of(found, pool, dns, false, &client).await;
                if found.is_empty() {
                    let trouble = format!("the name {} has no address that could be an engine", dns.name);
                    let nobody = Survey::blank(pool, format!("{}:{}", dns.name, dns.port).as_str().into());
                    return vec![Survey { trouble: Some(trouble), ..nobody }];
                }
                found.into_iter().map(|address| dns.engine_at(address)).collect()
            }
        };
        let of_engine = async |address: &EngineAddress| {
            let listed = models(&client, pool, address).await.map(super::names);
            Survey::of(&client, pool, address, listed).await
        };
        join_all(addresses.iter().map(of_engine)).await
    };
    join_all(pools.iter().map(of_pool)).await.into_iter().flatten().collect()
}

impl Survey {
    /// Asks one engine for the rest, with the list of models at hand.
    pub(super) async fn of(
        client: &ProbeClient,
        pool: &PoolSettings,
        address: &EngineAddress,
        listed: Result<Vec<Arc<str>>, ProbeFailure>,
    ) -> Self {
        let (trouble, version) = tokio::join!(trouble(client, pool, address), version(client, pool, address));
        let key = match &listed {
            Err(ProbeFailure::Status(status)) if matches!(status.as_u16(), 401 | 403) => KeyState::Refused,
            Ok(_) if pool.api_key.is_some() => KeyState::Accepted,
            Ok(_) => KeyState::NotNeeded,
            Err(_) => KeyState::Unknown,
        };
        Survey { trouble, version, models: listed.ok(), key, ..Survey::blank(pool, address.id()) }
    }

    fn blank(pool: &PoolSettings, engine: EngineId) -> Self {
        let named = EngineKind::ALL.iter().find(|(_, kind)| *kind == pool.kind);
        Survey {
            pool: pool.id.clone(),
            engine,
            kind: named.map_or("generic", |(name, _)| name),
            trouble: None,
            version: None,
            models: None,
            key: KeyState::Unknown,
            priority_scheduling: pool.engine_priority,
        }
    }

    /// Whether it can serve requests.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.trouble.is_none() && self.key != KeyState::Refused
    }

    /// Its models, abbreviated.
    #[must_use]
    pub fn models_shown(&self) -> String {
        let Some(models) = &self.models else { return "not told".to_owned() };
        let shown = models.iter().take(SHOWN).map(|model| &**model).collect::<Vec<_>>().join(", ");
        match models.len() {
            0 => "none".to_owned(),
            all if all > SHOWN => format!("{shown} and {} more", all - SHOWN),
            _ => shown,
        }
    }

    /// Logs the line.
    pub(super) fn tell(&self) {
        let Survey { pool, engine, kind, version, priority_scheduling, .. } = self;
        let (models, key) = (self.models_shown(), self.key.as_str());
        let version = version.as_deref().unwrap_or("not told");
        match &self.trouble {
            Some(cause) => {
                tracing::warn!(%pool, %engine, kind, version, models, key, priority_scheduling, cause, "engine not usable");
            }
            None if self.key == KeyState::Refused => tracing::warn!(
                %pool, %engine, kind, version, models, key, priority_scheduling,
                "an engine rejects the pool's key: set `engine.api_key_file` to a file with its key"
            ),
            None => {
                tracing::info!(%pool, %engine, kind, version, models, key, priority_scheduling, "engine available")
            }
        }
    }
}

/// Why engine not usable; without a health check, whether it is reachable.
async fn trouble(client: &ProbeClient, pool: &PoolSettings, address: &EngineAddress) -> Option<String> {
    let (path, timeout) = match &pool.health {
        Some(health) => (&*health.path, health.timeout),
        None => ("/v1/models", TIMEOUT),
    };
    match client.within(timeout, client.ask(pool, address, path)).await {
        None => Some(format!("{path} was not answered within {timeout:?}")),
        Some(Err(failed)) => Some(failed.cause(address)),
        Some(Ok(answer)) => {
            let is_well = pool.health.is_none() || answer.status.is_success() || answer.status.is_redirection();
            (!is_well).then(|| format!("{path} answers {}", answer.status.as_u16()))
        }
    }
}

/// The models listed by an engine.
pub(super) async fn models(
    client: &ProbeClient,
    pool: &PoolSettings,
    address: &EngineAddress,
) -> Result<Vec<(Arc<str>, ModelCard)>, ProbeFailure> {
    let list: ModelList = client.document((pool, address), "/v1/models", (LONGEST_LIST, TIMEOUT)).await?;
    let models = list.data.into_iter().map(|model| (model.id, model.card));
    let models = models.filter(|(name, _)| !name.is_empty() && name.len() <= LONGEST_NAME);
    Ok(models.take(MOST_MODELS).map(|(name, card)| (Arc::from(name), card)).collect())
}

/// Path of the version report, by kind of engine.
async fn version(client: &ProbeClient, pool: &PoolSettings, address: &EngineAddress) -> Option<String> {
    let path = match pool.kind {
        EngineKind::Vllm => "/version",
        EngineKind::Sglang => "/get_server_info",
        EngineKind::LlamaCpp => "/props",
        EngineKind::Dynamo | EngineKind::Generic => return None,
    };
    let told: Version = client.document((pool, address), path, (LONGEST_LIST, TIMEOUT)).await.ok()?;
    told.version.or(told.build_info).filter(|version| version.len() <= LONGEST_NAME)
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    #[serde(flatten)]
    card: ModelCard,
}

#[derive(Deserialize)]
struct Version {
    version: Option<String>,
    build_info: Option<String>,
}
