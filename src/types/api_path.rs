//! The API paths of the gateway, and the dialect of each (`docs/semantics.md`, section 3).

/// Wire format of a request and its response.
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
    /// Any other path: JSON or multipart in, any body out, no tokens observed.
    Plain,
}

impl Dialect {
    /// Whether responses in this dialect carry generated tokens.
    #[must_use]
    pub const fn generates(self) -> bool {
        !matches!(self, Dialect::Plain)
    }
}

/// One API path of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ApiPath {
    path: &'static str,
    dialect: Dialect,
    serves: Serves,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Serves {
    /// A POST relayed to an engine.
    Relay,
    /// A GET relayed to an engine, only where the settings list it.
    Engine,
    /// A GET or HEAD that the gateway answers itself: the list of models.
    Models,
    /// One model of that list.
    Model,
    /// Liveness of the gateway.
    Health,
}

/// Why no API path serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathError {
    /// The path is unknown.
    Path,
    /// The path is known, but not with this method.
    Method {
        /// Value of the response's `Allow` header.
        allow: &'static str,
    },
}

const fn relay(path: &'static str, dialect: Dialect) -> ApiPath {
    ApiPath { path, dialect, serves: Serves::Relay }
}

const fn own(path: &'static str, serves: Serves) -> ApiPath {
    ApiPath { path, dialect: Dialect::Plain, serves }
}

use Dialect::{Chat, Completions, Messages, Plain, Responses};

const fn engine(path: &'static str) -> ApiPath {
    ApiPath { path, dialect: Dialect::Plain, serves: Serves::Engine }
}

const BATCH: &str = "/v1/chat/completions/batch";

// Paths that steer an engine (adapters, sleep, caches, weights, profiles) are never listed here.
const ENDPOINTS: [ApiPath; 27] = [
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

const ONE_MODEL: ApiPath = own("/v1/models/{id}", Serves::Model);

impl ApiPath {
    /// Finds the API path for `method` and `path`. Paths match exactly, with or without one trailing
    /// slash; nothing is decoded, so `%2e%2e` is an unknown path.
    ///
    /// # Errors
    /// [`PathError`], which becomes a 404 or a 405.
    pub fn find(method: &str, path: &str) -> Result<ApiPath, PathError> {
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
    pub fn relayed(path: &str) -> Option<ApiPath> {
        Self::all_relayed().find(|endpoint| endpoint.path == path)
    }

    /// Every API path that relays bodies to engines.
    pub fn all_relayed() -> impl Iterator<Item = ApiPath> {
        ENDPOINTS.iter().copied().filter(|endpoint| endpoint.serves == Serves::Relay)
    }

    /// Every API path that is relayed only where the settings list it.
    pub fn all_of_engines() -> impl Iterator<Item = ApiPath> {
        ENDPOINTS.iter().copied().filter(|endpoint| endpoint.is_of_engine())
    }

    /// The listed-only API path at `path`, with or without one trailing slash.
    #[must_use]
    pub fn of_engines_at(path: &str) -> Option<ApiPath> {
        let bare = path.strip_suffix('/').unwrap_or(path);
        Self::all_of_engines().find(|endpoint| endpoint.path == bare)
    }

    /// The model id in `/v1/models/{id}`. Ids may contain slashes (`org/name`).
    #[must_use]
    pub fn model_in(path: &str) -> Option<&str> {
        path.strip_prefix("/v1/models/").filter(|id| !id.is_empty())
    }

    /// The canonical path, without a trailing slash.
    #[must_use]
    pub const fn path(self) -> &'static str {
        self.path
    }

    /// Wire format of requests and responses.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        self.dialect
    }

    /// Whether clients of this path speak the Messages dialect: `/v1/messages` and the paths below it.
    #[must_use]
    pub fn is_of_messages(self) -> bool {
        self.path.starts_with("/v1/messages")
    }

    /// Whether a successful response that is not an event stream is a JSON object. The audio paths also
    /// return text and sound.
    #[must_use]
    pub fn answers_json(self) -> bool {
        !self.path.starts_with("/v1/audio/")
    }

    /// Whether a request may be a multipart form.
    #[must_use]
    pub fn takes_forms(self) -> bool {
        matches!(self.path, "/v1/audio/transcriptions" | "/v1/audio/translations")
    }

    /// Whether requests are charged to the tenant. False for paths that only count, tokenize or
    /// detokenize.
    #[must_use]
    pub fn costs_tokens(self) -> bool {
        let only_counts = matches!(self.path, "/v1/messages/count_tokens" | "/tokenize" | "/detokenize");
        self.is_relayed() && !only_counts && !self.path.ends_with("/render")
    }

    /// Whether engines generate tokens here, also where only the response's usage is read.
    #[must_use]
    pub fn generates(self) -> bool {
        self.dialect.generates() || self.is_batch()
    }

    /// Whether one request carries several conversations.
    #[must_use]
    pub fn is_batch(self) -> bool {
        self.path == BATCH
    }

    /// Wire format of the request where the response has no dialect.
    #[must_use]
    pub fn asks_in(self) -> Dialect {
        if self.is_batch() { Chat } else { self.dialect }
    }

    /// Whether an engine answers this path rather than the gateway.
    #[must_use]
    pub const fn is_relayed(self) -> bool {
        matches!(self.serves, Serves::Relay | Serves::Engine)
    }

    /// Whether this is a GET without a body that any engine can answer, relayed where the settings list it.
    #[must_use]
    pub const fn is_of_engine(self) -> bool {
        matches!(self.serves, Serves::Engine)
    }

    /// Whether this path returns one model.
    #[must_use]
    pub const fn is_one_model(self) -> bool {
        matches!(self.serves, Serves::Model)
    }

    /// Error format for an unknown path: Messages below `/v1/messages`, OpenAI elsewhere.
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
        let found = ApiPath::find("POST", "/v1/chat/completions/").unwrap();
        assert_eq!(found.path(), "/v1/chat/completions");
        assert_eq!(ApiPath::find("POST", "/v1/chat/completions//"), Err(PathError::Path));
        assert_eq!(ApiPath::find("GET", "/"), Err(PathError::Path));
    }

    #[test]
    fn a_wrong_method_is_distinguished_from_an_unknown_path() {
        assert_eq!(ApiPath::find("GET", "/v1/messages"), Err(PathError::Method { allow: "POST" }));
        assert_eq!(ApiPath::find("POST", "/health"), Err(PathError::Method { allow: "GET, HEAD" }));
        assert_eq!(ApiPath::find("POST", "/v1/realtime"), Err(PathError::Path));
    }

    #[test]
    fn control_paths_of_engines_are_unknown() {
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
                assert_eq!(ApiPath::find(method, path), Err(PathError::Path), "{method} {path}");
            }
        }
    }

    #[test]
    fn dots_reach_no_other_route() {
        for path in ["/v1/../health", "/v1/models/../../health", "/%2e%2e/health", "/v1/chat%2Fcompletions"] {
            let found = ApiPath::find("POST", path);
            assert!(found.is_err(), "{path} reached {found:?}");
        }
    }

    #[test]
    fn a_model_id_may_contain_slashes() {
        assert!(ApiPath::find("GET", "/v1/models/meta/llama").unwrap().is_one_model());
        assert_eq!(ApiPath::model_in("/v1/models/meta/llama"), Some("meta/llama"));
    }
}
