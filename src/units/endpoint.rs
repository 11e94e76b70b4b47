//! The paths the gateway serves, and the dialect each of them speaks (`docs/semantics.md`, section 3).

/// How a request and its answer are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /v1/messages` (the Anthropic shape).
    Messages,
    /// Everything else: JSON or multipart in, any body out, no tokens observed.
    Plain,
}

impl Dialect {
    /// Whether answers in this dialect carry generated tokens.
    #[must_use]
    pub const fn generates(self) -> bool {
        !matches!(self, Dialect::Plain)
    }
}

/// One of the paths that the gateway serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    path: &'static str,
    dialect: Dialect,
    serves: Serves,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Serves {
    /// A POST that goes to an engine.
    Relay,
    /// A GET that goes to an engine, where the settings name it.
    Engine,
    /// A GET or HEAD that the gateway answers itself.
    Models,
    /// One model of `Models`.
    Model,
    /// Liveness of the gateway.
    Health,
}

/// Why no endpoint serves a request's method and path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathError {
    /// The path is none of ours.
    Path,
    /// The path is ours, with another method.
    Method {
        /// Value of the `Allow` header of the answer.
        allow: &'static str,
    },
}

const fn relay(path: &'static str, dialect: Dialect) -> Endpoint {
    Endpoint { path, dialect, serves: Serves::Relay }
}

const fn own(path: &'static str, serves: Serves) -> Endpoint {
    Endpoint { path, dialect: Dialect::Plain, serves }
}

use Dialect::{Chat, Completions, Messages, Plain, Responses};

const fn engine(path: &'static str) -> Endpoint {
    Endpoint { path, dialect: Dialect::Plain, serves: Serves::Engine }
}

const BATCH: &str = "/v1/chat/completions/batch";

// No path that steers an engine (adapters, sleep, caches, weights, profiles) will ever be here.
const ENDPOINTS: [Endpoint; 27] = [
    relay("/v1/chat/completions", Chat),
    relay("/v1/completions", Completions),
    relay("/v1/responses", Responses),
    relay("/v1/messages", Messages),
    relay("/v1/messages/count_tokens", Plain),
    relay("/v1/embeddings", Plain),
    relay("/v1/rerank", Plain),
    relay("/v1/score", Plain),
    relay("/v1/audio/transcriptions", Plain),
    relay("/v1/audio/translations", Plain),
    relay("/v1/audio/speech", Plain),
    relay("/rerank", Plain),
    relay("/score", Plain),
    relay("/tokenize", Plain),
    relay("/detokenize", Plain),
    relay("/v2/rerank", Plain),
    relay(BATCH, Plain),
    relay("/v1/chat/completions/render", Plain),
    relay("/v1/completions/render", Plain),
    relay("/pooling", Plain),
    relay("/classify", Plain),
    relay("/v2/embed", Plain),
    engine("/version"),
    engine("/ping"),
    engine("/load"),
    own("/v1/models", Serves::Models),
    own("/health", Serves::Health),
];

const ONE_MODEL: Endpoint = own("/v1/models/{id}", Serves::Model);

impl Endpoint {
    /// Which endpoint serves `method` on `path`. Paths are matched exactly, with or without
    /// one final slash; nothing is decoded, so `%2e%2e` is an unknown path.
    ///
    /// # Errors
    /// [`PathError`], which becomes a 404 or a 405.
    pub fn find(method: &str, path: &str) -> Result<Endpoint, PathError> {
        let bare = match path.strip_suffix('/') {
            Some(rest) if !rest.is_empty() => rest,
            _ => path,
        };
        let found = ENDPOINTS.iter().copied().find(|endpoint| endpoint.path == bare);
        let found = found.or_else(|| Self::model_in(bare).map(|_| ONE_MODEL));
        let endpoint = found.ok_or(PathError::Path)?;
        let (fits, allow) = match endpoint.serves {
            Serves::Relay => (method == "POST", "POST"),
            Serves::Engine => (method == "GET", "GET"),
            _ => (method == "GET" || method == "HEAD", "GET, HEAD"),
        };
        if fits { Ok(endpoint) } else { Err(PathError::Method { allow }) }
    }

    /// The endpoint with this canonical path, if it relays to engines.
    #[must_use]
    pub fn relayed(path: &str) -> Option<Endpoint> {
        Self::all_relayed().find(|endpoint| endpoint.path == path)
    }

    /// Every endpoint that relays bodies to engines.
    pub fn all_relayed() -> impl Iterator<Item = Endpoint> {
        ENDPOINTS.iter().copied().filter(|endpoint| endpoint.serves == Serves::Relay)
    }

    /// Every endpoint that goes to an engine only where the settings name it.
    pub fn all_of_engines() -> impl Iterator<Item = Endpoint> {
        ENDPOINTS.iter().copied().filter(|endpoint| endpoint.is_of_engine())
    }

    /// That at this path, with or without one final slash.
    #[must_use]
    pub fn of_engines_at(path: &str) -> Option<Endpoint> {
        let bare = path.strip_suffix('/').unwrap_or(path);
        Self::all_of_engines().find(|endpoint| endpoint.path == bare)
    }

    /// The model id in `/v1/models/{id}`. Ids may contain slashes (`org/name`).
    #[must_use]
    pub fn model_in(path: &str) -> Option<&str> {
        path.strip_prefix("/v1/models/").filter(|id| !id.is_empty())
    }

    /// The path as the documentation writes it, without a final slash.
    #[must_use]
    pub const fn path(self) -> &'static str {
        self.path
    }

    /// How requests and answers are written.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        self.dialect
    }

    /// Whether its clients speak the Messages dialect: on its path, and on those below it.
    #[must_use]
    pub fn is_of_messages(self) -> bool {
        self.path.starts_with("/v1/messages")
    }

    /// Whether a good answer that is no event stream is a JSON object: everywhere but on the
    /// audio paths, which also answer text and sound.
    #[must_use]
    pub fn answers_json(self) -> bool {
        !self.path.starts_with("/v1/audio/")
    }

    /// Whether a request may be a multipart form.
    #[must_use]
    pub fn takes_forms(self) -> bool {
        matches!(self.path, "/v1/audio/transcriptions" | "/v1/audio/translations")
    }

    /// Whether its requests cost a tenant tokens: not where tokens are only counted, or made of text
    /// and back.
    #[must_use]
    pub fn costs_tokens(self) -> bool {
        let only_counts = matches!(self.path, "/v1/messages/count_tokens" | "/tokenize" | "/detokenize");
        self.is_relayed() && !only_counts && !self.path.ends_with("/render")
    }

    /// Whether engines generate tokens for it, also where its answers are read for their usage alone.
    #[must_use]
    pub fn generates(self) -> bool {
        self.dialect.generates() || self.is_batch()
    }

    /// Whether one request holds several conversations.
    #[must_use]
    pub fn is_batch(self) -> bool {
        self.path == BATCH
    }

    /// How requests are written, where the answers are none of a dialect.
    #[must_use]
    pub fn asks_in(self) -> Dialect {
        if self.is_batch() { Chat } else { self.dialect }
    }

    /// Whether an engine answers this, rather than the gateway.
    #[must_use]
    pub const fn is_relayed(self) -> bool {
        matches!(self.serves, Serves::Relay | Serves::Engine)
    }

    /// Whether this is a GET that any engine answers, without a body, where the settings name it.
    #[must_use]
    pub const fn is_of_engine(self) -> bool {
        matches!(self.serves, Serves::Engine)
    }

    /// Whether this asks for one model.
    #[must_use]
    pub const fn is_one_model(self) -> bool {
        matches!(self.serves, Serves::Model)
    }

    /// The error shape of a path that no endpoint serves: Messages below `/v1/messages`,
    /// OpenAI's elsewhere.
    #[must_use]
    pub fn shape_of_unknown(path: &str) -> Dialect {
        if path.starts_with("/v1/messages") { Messages } else { Chat }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_final_slash_changes_nothing_and_two_do() {
        let found = Endpoint::find("POST", "/v1/chat/completions/").unwrap();
        assert_eq!(found.path(), "/v1/chat/completions");
        assert_eq!(Endpoint::find("POST", "/v1/chat/completions//"), Err(PathError::Path));
        assert_eq!(Endpoint::find("GET", "/"), Err(PathError::Path));
    }

    #[test]
    fn another_method_on_a_known_path_is_told_apart_from_an_unknown_path() {
        assert_eq!(Endpoint::find("GET", "/v1/messages"), Err(PathError::Method { allow: "POST" }));
        assert_eq!(Endpoint::find("POST", "/health"), Err(PathError::Method { allow: "GET, HEAD" }));
        assert_eq!(Endpoint::find("POST", "/v1/realtime"), Err(PathError::Path));
    }

    #[test]
    fn what_steers_an_engine_is_no_path_of_ours() {
        for path in [
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/collective_rpc",
            "/update_weights",
            "/init_weights_update_group",
            "/start_profile",
            "/pause",
            "/abort_requests",
            "/scale_elastic_ep",
            "/server_info",
            "/flush_cache",
            "/slots/0",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/invocations",
        ] {
            for method in ["GET", "POST", "DELETE"] {
                assert_eq!(Endpoint::find(method, path), Err(PathError::Path), "{method} {path}");
            }
        }
    }

    #[test]
    fn dots_reach_no_other_route() {
        for path in ["/v1/../health", "/v1/models/../../health", "/%2e%2e/health", "/v1/chat%2Fcompletions"] {
            let found = Endpoint::find("POST", path);
            assert!(found.is_err(), "{path} reached {found:?}");
        }
    }

    #[test]
    fn a_model_id_may_contain_slashes() {
        assert!(Endpoint::find("GET", "/v1/models/meta/llama").unwrap().is_one_model());
        assert_eq!(Endpoint::model_in("/v1/models/meta/llama"), Some("meta/llama"));
    }
}
