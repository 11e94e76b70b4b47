//! What the file said: every key there is, optional and unchecked.
//!
//! This list is the only source of keys: the walk and the JSON Schema are made from it. A
//! default stands in the settings type that the key ends up in, and is named here for readers.

use std::time::Duration;

use super::read::{Entries, Located, NonEmpty, OneOrMany, OrOff, block};
use super::scalar::{ConcurrencyScalar, EnumScalar, EnumWord, PromptTokens, RedactedText, SizeScalar};
use crate::admit::levels::Kind;
use crate::admit::limit::settings::OverLimit;
use crate::admit::queue::WhenHopeless;
use crate::admit::shared::settings::OnFailure;
use crate::classify::TargetHeaders;
use crate::inspect::Reasoning;
use crate::judge::{NonStreaming, TtftCounts, UploadRule};
use crate::record::settings::{AccessLog, RequestLabel};
use crate::route::settings::{EngineKind, Family, Scheme};
use crate::units::Priority;

block! {
    /// The settings of goodput.
    Root {
        /// The listener for clients, and the limits on what they may send.
        may listen: Listen,
        /// How the gateway leaves after SIGTERM.
        may shutdown: Shutdown,
        /// What is read of answers.
        may inspect: Inspect,
        /// The listener for operators, or `off`.
        may admin: OrOff<Admin>,
        /// GET paths that any engine answers and clients may ask: `/version`, `/ping`, `/load`. Default: none.
        may engine_paths: Vec<Located<String>>,
        /// The SLO classes, each as in its SLO document.
        must slo_classes: NonEmpty<Class>,
        /// Upper edges of the prompt lengths `short` and `medium`, in tokens.
        may length_buckets: Buckets,
        /// Rules that give a request its class. The first that fits decides.
        may classify: Vec<Rule>,
        /// The class of requests that no rule fits.
        must default_class: Located<String>,
        /// Pools of engines.
        must pools: NonEmpty<Pool>,
        /// Which pools serve which models and classes; the first that fits is taken. Default: every model and class, by all pools in order.
        may routes: NonEmpty<Route>,
        /// Names of models.
        may models: Models,
        /// Who may ask. Without this key everybody is the tenant `anonymous`.
        may tenants: NonEmpty<Tenant>,
        /// Gateways that share the engines. Default: 1.
        may replicas: Located<u64>,
        /// Where the balances of limits live: `memory`, or a store that gateways share. Default: memory.
        may limits_store: LimitsStoreKind,
        /// What is written down where.
        may telemetry: Telemetry,
    }

    /// The listener for clients, and the limits on what they may send.
    Listen {
        /// Address and port. Default: `0.0.0.0:8080`.
        may address: Located<String>,
        /// Certificate and key. Default: cleartext.
        may tls: Tls,
        /// Largest request body, decoded. Default: 64MiB.
        may max_body: Located<SizeScalar>,
        /// What request bodies may hold in memory together, with what is made of them. Default: 1GiB, or
        /// `max_body` where that is more.
        may max_bodies: Located<SizeScalar>,
        /// Largest request head. Default: 64KiB.
        may max_head: Located<SizeScalar>,
        /// Most header lines of a request. Default: 100.
        may max_header_lines: Located<u64>,
        /// For a request head: from the accepted connection, then from its first byte. Default: 10s.
        may header_timeout: Located<Duration>,
        /// From a request head to the end of its body. Default: 60s.
        may body_timeout: Located<Duration>,
        /// How long a connection without a request stays open. Default: 620s.
        may idle_timeout: Located<Duration>,
        /// How long a client may refuse our bytes in one stretch. Default: 30s.
        may write_stall: Located<Duration>,
        /// Most connections at one time. Default: 20000.
        may max_connections: Located<u64>,
        /// Most connections of one address at one time. Default: nine tenths of what may be open.
        may max_connections_per_address: Located<u64>,
        /// Most streams at one time on an HTTP/2 connection. Default: 250.
        may http2_max_streams: Located<u64>,
    }

    /// The files of a TLS listener, in PEM. They are read again when they change.
    Tls {
        /// The certificate and the chain behind it.
        must certificate_file: Located<String>,
        /// Its private key.
        must private_key_file: Located<String>,
    }

    /// How the gateway leaves after SIGTERM.
    Shutdown {
        /// From the failing readiness to the closed listener. Default: 5s.
        may delay: Located<Duration>,
        /// How long open requests may go on after that. Default: 60s.
        may drain: Located<Duration>,
        /// How long the platform waits before it sends SIGTERM, inside the time in `grace_period`: a `preStop` hook of Kubernetes. Only checked. Default: 0s.
        may pre_stop: Located<Duration>,
        /// From the platform's decision to end the process to the moment at which it kills it: `terminationGracePeriodSeconds` of Kubernetes, `TimeoutStopSec` of systemd. Only checked. Default: not checked.
        may grace_period: Located<Duration>,
    }

    /// What is read of answers.
    Inspect {
        /// Largest event of a stream that is still read; longer ones pass unread. Default: 16MiB.
        may max_event: Located<SizeScalar>,
        /// Paths other than the generating ones whose answers are judged. Default: none.
        may judged_paths: Vec<Located<String>>,
    }

    /// The listener for operators.
    Admin {
        /// Address and port. Default: `127.0.0.1:9090`.
        may address: Located<String>,
        /// File with the token that everything but `/livez` and `/readyz` asks for: as a bearer, or in a browser as a password. Default: none is needed.
        may token_file: Located<String>,
        /// Names under which the port is asked for where there is no token, beside `localhost`. Default: none.
        may hosts: Vec<Located<String>>,
    }

    /// An SLO class, as in its SLO document.
    Class {
        /// Its name.
        must slo_class: Located<String>,
        /// Its rank where requests wait. Default: normal.
        may priority: Located<EnumWord<Priority>>,
        /// What it promises. Default: nothing; a request is met by finishing.
        may objectives: Objectives,
        /// The share of requests on which all objectives should hold together.
        must joint_attainment_target: Located<f64>,
        /// The window over which the target is promised. Default: 28d.
        may window: Located<Duration>,
        /// The workload that the objectives were written for.
        may workload_assumption: Workload,
        /// Which token ends the wait that TTFT measures. Default: first_token.
        may ttft_counts: Located<EnumWord<TtftCounts>>,
        /// What the request headers `x-slo-ttft-ms` and `x-slo-tpot-ms` may do. Default: off.
        may target_headers: Located<EnumWord<TargetHeaders>>,
        /// Output tokens to expect where a request states no cap. Default: the assumed p95, else 1024.
        may default_output_tokens: Located<u64>,
        /// Gaps above this are stalls. Default: 1.
        may stall_seconds: Located<f64>,
        /// Whether answers that do not stream are judged. Default: judged.
        may non_streaming: Located<EnumWord<NonStreaming>>,
        /// Whether the time in which a client lets the gateway wait for its body counts. Default: excluded.
        may upload: Located<EnumWord<UploadRule>>,
        /// How long an answer's head may be held back for a retry. Default: 10s.
        may hold_head: Located<Duration>,
        /// Distance of keepalive comments once the head is out. Default: never.
        may keepalive_seconds: Located<f64>,
        /// Time limits.
        may timeouts: Timeouts,
        /// How requests of this class wait.
        may queue: ClassQueue,
        /// What is given up first under load.
        may degrade: NonEmpty<Level>,
    }

    /// One overload level of a class. All up to the present one are in force together.
    Level {
        /// What it does: defer, shed_lower, reasoning_off, spill, or `{cap_output: N}`.
        must action: LevelAction,
        /// It is entered when one of these is exceeded.
        must enter_when: Above,
        /// It is left when all of these hold. Default: half of what enters it.
        may leave_when: Below,
        /// How long nothing changes after it was entered. Default: 10s.
        may hold: Located<Duration>,
    }

    /// Output tokens are capped.
    CapOutput {
        /// The most output tokens of each answer.
        must cap_output: Located<u64>,
    }

    /// What enters a level.
    Above {
        /// How many times too fast the class used its budget of misses in the last minute.
        may burn_rate_above: Located<f64>,
        /// How long a request of the class would wait for a seat.
        may queue_wait_above: Located<Duration>,
        /// Requests of all classes that wait in front of its first pool; of several, the longest queue.
        may queue_depth_above: Located<u64>,
    }

    /// What a level is left by.
    Below {
        /// Default: half of burn_rate_above.
        may burn_rate_below: Located<f64>,
        /// Default: half of queue_wait_above.
        may queue_wait_below: Located<Duration>,
        /// Default: half of queue_depth_above, at least 1.
        may queue_depth_below: Located<u64>,
    }

    /// `max_concurrency_per_engine: auto`, within bounds.
    SeatRange {
        /// Fewest seats of an engine. Default: 1.
        may min: Located<u64>,
        /// Most seats of an engine. Default: 1024.
        may max: Located<u64>,
    }

    /// How the requests of a class wait for a seat.
    ClassQueue {
        /// How long a request may wait. 0s: it gets a free seat or none. Default: 30s, or the longest of the
        /// class's objectives (at most timeouts.total).
        may max_wait: Located<Duration>,
        /// What becomes of a request that can no longer keep its promise: demote, shed or serve. Default: demote.
        may when_hopeless: Located<EnumWord<WhenHopeless>>,
    }

    /// What a class promises.
    Objectives {
        /// Time to first token.
        may ttft_seconds: Objective,
        /// Time per output token.
        may tpot_seconds: Objective,
        /// The largest gap between token events.
        may itl_seconds: Objective,
        /// From arrival to finish.
        may e2e_seconds: Objective,
    }

    /// One objective.
    Objective {
        /// The largest value that still holds, in seconds.
        must threshold: Located<f64>,
        /// The share of requests on which it should hold.
        must attainment: Located<f64>,
    }

    /// The workload that objectives were written for.
    Workload {
        /// Prompt tokens.
        may input_tokens: Quantiles,
        /// Output tokens.
        may output_tokens: Quantiles,
    }

    /// Quantiles of a length, in tokens.
    Quantiles {
        /// Half of the requests are at or below this.
        must p50: Located<u64>,
        /// 95 of 100 are.
        must p95: Located<u64>,
    }

    /// Time limits of a class. All but `idle` run from the arrival of the request, over all attempts.
    Timeouts {
        /// To the first token of a stream. Default: 120s.
        may first_token: Located<Duration>,
        /// Longest silence of an engine from the first token on. Default: 120s.
        may idle: Located<Duration>,
        /// To the end of the answer. Default: 30m.
        may total: Located<Duration>,
        /// To the head of an answer that does not stream. Default: as `total`.
        may response_head: Located<Duration>,
    }

    /// Upper edges of the prompt lengths, in tokens.
    Buckets {
        /// The longest `short` prompt. Default: 1000.
        may short: Located<u64>,
        /// The longest `medium` prompt. Default: 8000.
        may medium: Located<u64>,
    }

    /// One rule of `classify`.
    Rule {
        /// The class of requests that fit.
        must class: Located<String>,
        /// Conditions; all must hold.
        must when: When,
    }

    /// Conditions on a request: all that are present must hold; a list means any of it.
    When {
        /// The tenant.
        may tenant: OneOrMany<Located<String>>,
        /// The label of the key.
        may key: OneOrMany<Located<String>>,
        /// Headers by name: a value, a list of values, `{prefix: ...}` or `{present: true}`.
        may header: Entries<HeaderCondition>,
        /// The exact path.
        may path: OneOrMany<Located<String>>,
        /// The model, as sent or after aliasing; `*` stands for any text.
        may model: OneOrMany<Located<String>>,
        /// Whether the request asks for a stream.
        may stream: Located<bool>,
        /// Whether the request offers tools.
        may has_tools: Located<bool>,
        /// What the request states about reasoning; `on` is switched on without a level.
        may reasoning: OneOrMany<Located<EnumWord<Reasoning>>>,
        /// The largest output cap that the request states.
        may max_tokens: Cap,
        /// The estimated prompt.
        may prompt_tokens: Range,
        /// Members of the body's `metadata`: a value or a list of values.
        may metadata: Entries<OneOrMany<Located<String>>>,
    }

    /// A test of the stated output cap.
    Cap {
        /// The smallest that fits.
        may at_least: Located<u64>,
        /// The largest that fits.
        may at_most: Located<u64>,
        /// Whether a cap is stated at all.
        may stated: Located<bool>,
    }

    /// A range of tokens, both ends included.
    Range {
        /// The smallest that fits.
        may at_least: Located<u64>,
        /// The largest that fits.
        may at_most: Located<u64>,
    }

    /// A test of a header other than for a value.
    HeaderShape {
        /// The value begins with this.
        may prefix: Located<String>,
        /// Whether the header is there.
        may present: Located<bool>,
    }

    /// A pool of engines that are interchangeable for a request.
    Pool {
        /// Its name.
        must pool: Located<String>,
        /// Its engines, where they are known by name.
        may engines: NonEmpty<Engine>,
        /// A DNS name whose addresses are the engines.
        may dns: Dns,
        /// What kind of engine they are, and what is sent to them.
        may engine: EngineSort,
        /// How an engine is picked. Default: least_work.
        may balance: Located<EnumWord<BalanceBy>>,
        /// The request header that names a session, for session_affinity. Default: x-session-id.
        may session_header: Located<String>,
        /// Requests that an engine works on at one time, `auto`, or the bounds of `auto`; further ones wait.
        /// Default: no limit.
        may max_concurrency_per_engine: SeatsOrRange,
        /// How requests wait while all engines have as many as they may.
        may queue: Queue,
        /// Health checks, or `off`.
        may health: OrOff<Health>,
        /// Reading of the engines' own metrics, or `off`. Default: on, but for kind generic.
        may metrics: OrOff<Metrics>,
        /// Limit on opening a connection, TLS included. Default: 2s.
        may connect_timeout: Located<Duration>,
        /// What may be tried again.
        may retries: Retries,
        /// The circuit breaker of each engine, or `off`.
        may breaker: OrOff<Breaker>,
        /// How long an engine that pushed back stands behind the others.
        may cool_down: CoolDown,
        /// What may be injected into requests.
        may inject: Inject,
    }

    /// How requests wait in front of a pool.
    Queue {
        /// Requests that may wait. 0: a request runs at once or is refused. Default: 1000.
        may max_waiting: Located<u64>,
        /// Tokens that a tenant may be ahead of the one that had least before others of its rank go first. Default: 65536.
        may quantum: Located<u64>,
        /// Prompt tokens of requests without a first token that one engine may have. Default: auto.
        may prefill_tokens_per_engine: Located<PromptTokens>,
        /// What each rank is guaranteed: shares of the tokens admitted, and of the places in a full queue.
        may shares: Shares,
    }

    /// Guaranteed shares of the ranks, together 1 at most.
    Shares {
        /// Default: 0.5.
        may critical: Located<f64>,
        /// Default: 0.2.
        may high: Located<f64>,
        /// Default: 0.1.
        may normal: Located<f64>,
        /// Default: 0.05.
        may low: Located<f64>,
        /// Default: 0.02.
        may batch: Located<f64>,
    }

    /// One engine.
    Engine {
        /// Where it is: `http://host:port`, or `https`. A final `/v1` means the same as none.
        must url: Located<String>,
    }

    /// A DNS name whose addresses are the engines of a pool.
    Dns {
        /// The name.
        must name: Located<String>,
        /// The port of every engine.
        must port: Located<u64>,
        /// Plain or TLS. Default: http.
        may scheme: Located<EnumWord<Scheme>>,
        /// Time between two look-ups. Default: 5s.
        may refresh: Located<Duration>,
        /// Which addresses are engines: those of one family, the one that answers (`auto`), `ipv4`, `ipv6`, or `both`. Default: auto.
        may family: Located<EnumWord<Family>>,
    }

    /// What kind of engine a pool has, and what is sent to it.
    EngineSort {
        /// What kind. Default: vllm.
        may kind: Located<EnumWord<EngineKind>>,
        /// The engines run with priority scheduling: each request tells its rank. Kind vllm only. Default: false.
        may priority_scheduling: Located<bool>,
        /// File with the bearer token for the engines. Default: none.
        may api_key_file: Located<String>,
        /// Headers to set on every request.
        may headers: Entries<Located<RedactedText>>,
        /// File with the roots, in PEM, that replace the system's for `https`.
        may ca_file: Located<String>,
        /// Forward the client's own credential. Default: false.
        may forward_authorization: Located<bool>,
    }

    /// A health check.
    Health {
        /// Path asked with GET. Default: /health.
        may path: Located<String>,
        /// Time from one check to the next. Default: 2s.
        may every: Located<Duration>,
        /// Time after which a check has failed. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// Reading of the engines' own metrics.
    Metrics {
        /// Path asked with GET. Default: /metrics.
        may path: Located<String>,
        /// Time from one reading to the next. Default: 2s.
        may every: Located<Duration>,
        /// Time after which a reading has failed. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// What may be tried again before the first byte of an answer.
    Retries {
        /// Further tries after a fault. Default: 1.
        may after_fault: Located<u64>,
        /// Further tries after push-back (429, 503, 529). Default: 3.
        may after_push_back: Located<u64>,
        /// The retry budget as a share of recent requests. Default: 0.2.
        may share: Located<f64>,
        /// Retries per 10 s that are always allowed. Default: 10.
        may floor_per_10s: Located<u64>,
    }

    /// When the breaker of an engine opens, and for how long.
    Breaker {
        /// This many faults ... Default: 5.
        may faults: Located<u64>,
        /// ... within this time open it ... Default: 10s.
        may within: Located<Duration>,
        /// ... for this long. Default: 5s.
        may open: Located<Duration>,
    }

    /// How long an engine that pushed back stands behind the others.
    CoolDown {
        /// Where the engine named no time. Default: 1s.
        may default: Located<Duration>,
        /// The longest, whatever the engine says. Default: 60s.
        may max: Located<Duration>,
    }

    /// What may be injected into requests.
    Inject {
        /// `stream_options.include_usage`; the client does not see it. Default: true, but for kind generic.
        may usage: Located<bool>,
        /// vLLM's `continuous_usage_stats`. Default: false.
        may continuous_usage: Located<bool>,
    }

    /// One line of `routes`.
    Route {
        /// Models, after aliasing; `*` stands for any text.
        must model: OneOrMany<Located<String>>,
        /// Classes. Default: all.
        may class: OneOrMany<Located<String>>,
        /// Pools, in the order of preference.
        must pools: OneOrMany<Located<String>>,
    }

    /// Names of models.
    Models {
        /// Other names of models: the name that clients send, and the one that engines know.
        may aliases: Entries<Located<String>>,
    }

    /// A tenant.
    Tenant {
        /// Its name.
        must tenant: Located<String>,
        /// Its keys, as hashes; `goodput key new` makes one.
        may keys: NonEmpty<Key>,
        /// File with one hash per line, and a label behind it where it has one.
        may keys_file: Located<String>,
        /// Classes it may use. Default: all.
        may classes: OneOrMany<Located<String>>,
        /// Its limits. Default: none.
        may limits: Limits,
        /// What becomes of requests beyond the limits: reject or demote. Default: reject.
        may when_over_limit: Located<EnumWord<OverLimit>>,
    }

    /// A store that gateways share.
    SharedStore {
        /// Redis or Valkey.
        must redis: Redis,
    }

    /// A store in Redis or Valkey.
    Redis {
        /// Where it is: `redis://HOST:PORT`, with TLS `rediss://HOST:PORT`. A password belongs into a variable or a file.
        must url: Located<String>,
        /// File with the password.
        may password_file: Located<String>,
        /// What requests meet while it cannot be asked: open (this gateway's share of each limit) or closed (a refusal). Default: open.
        may on_failure: Located<EnumWord<OnFailure>>,
        /// How long a request waits for it at most. Default: 50ms.
        may timeout: Located<Duration>,
        /// The first part of every key in it. Default: goodput.
        may key_prefix: Located<String>,
    }

    /// Limits of a tenant: on all its requests, and on those for single models.
    Limits {
        /// Prompt and output tokens together.
        may tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may tokens_burst: Located<u64>,
        /// Prompt tokens.
        may input_tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may input_tokens_burst: Located<u64>,
        /// Output tokens.
        may output_tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may output_tokens_burst: Located<u64>,
        /// Requests.
        may requests_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may requests_burst: Located<u64>,
        /// Requests that run at one time.
        may concurrent_requests: Located<u64>,
        /// Limits on requests for one model, besides: by its name after aliasing.
        may models: Entries<Allowance>,
    }

    /// Limits on requests for one model.
    Allowance {
        /// Prompt and output tokens together.
        may tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may tokens_burst: Located<u64>,
        /// Prompt tokens.
        may input_tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may input_tokens_burst: Located<u64>,
        /// Output tokens.
        may output_tokens_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may output_tokens_burst: Located<u64>,
        /// Requests.
        may requests_per_minute: Located<u64>,
        /// How many of them may come at once. Default: one minute's worth.
        may requests_burst: Located<u64>,
        /// Requests that run at one time.
        may concurrent_requests: Located<u64>,
    }

    /// An API key.
    Key {
        /// A name for it, for rules.
        may label: Located<String>,
        /// The BLAKE3 hash of the key, in 64 hexadecimal digits.
        must blake3: Located<RedactedText>,
    }

    /// What is written down where.
    Telemetry {
        /// The access line: stdout or off. Default: stdout.
        may access_log: Located<EnumWord<AccessLog>>,
        /// Labels that the metrics of requests do without: length, pool, model, tenant. Default: none.
        may drop_labels: OneOrMany<Located<EnumWord<RequestLabel>>>,
        /// Whether histograms have the label `model` too. Default: false.
        may histograms_by_model: Located<bool>,
        /// Export of traces to a collector, over OTLP in HTTP and protobuf. Default: none.
        may otlp: Otlp,
        /// The journal: one line in a file for each finished request, with lengths and times, without content.
        may journal: Journal,
    }

    /// Export of traces.
    Otlp {
        /// The collector: `http://HOST:4318`. Spans go to `/v1/traces` below it.
        must endpoint: Located<String>,
        /// File with headers for the collector, `name: value` on each line. Read at start.
        may headers_file: Located<String>,
        /// File with the roots of the collector's certificate, in PEM. Default: the system's.
        may ca_file: Located<String>,
        /// The share of traces that are kept, of those that begin here. Misses are always kept. Default: 0.01.
        may ratio: Located<f64>,
        /// Whether a request with a `traceparent` goes on in that trace, and by its decision. Default: true.
        may follow_parent: Located<bool>,
        /// Attributes of the resource, beside `service.name` and what else tells who sends.
        may resource: Entries<Located<String>>,
    }

    /// The journal.
    Journal {
        /// The file that is written. Rotated ones stand beside it.
        must path: Located<String>,
        /// File with the secret by which tenants and prompt prefixes are hashed, one line. Default: a key by chance for each process.
        may hash_key_file: Located<String>,
        /// The file is rotated when it is so large. Default: 256MiB.
        may max_size: Located<SizeScalar>,
        /// The file is rotated when it is so old. Default: 1d.
        may max_age: Located<Duration>,
        /// Rotated files that are kept. Default: 14.
        may keep: Located<u64>,
        /// Whether rotated files are compressed. Default: true.
        may gzip: Located<bool>,
        /// How long a line waits at most before it is written. Default: 1s.
        may flush: Located<Duration>,
    }
}

/// What `when.header` says about one header.
#[derive(Debug)]
pub(super) enum HeaderCondition {
    /// One of these values.
    Is(OneOrMany<Located<String>>),
    /// Another test.
    Shape(HeaderShape),
}

impl super::read::Read for HeaderCondition {
    fn read(node: &super::tree::YamlNode, reader: &mut super::read::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::tree::Value::Map(_) => HeaderShape::read(node, reader).map(HeaderCondition::Shape),
            _ => OneOrMany::read(node, reader).map(HeaderCondition::Is),
        }
    }
}

impl schemars::JsonSchema for HeaderCondition {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "header_test".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let values = generator.subschema_for::<OneOrMany<Located<String>>>();
        let shape = generator.subschema_for::<HeaderShape>();
        schemars::json_schema!({"anyOf": [values, shape]})
    }
}

/// What `max_concurrency_per_engine` says.
#[derive(Debug)]
pub(super) enum SeatsOrRange {
    /// A number, or `auto`.
    Seats(Located<ConcurrencyScalar>),
    /// `auto`, within bounds.
    Range(SeatRange),
}

impl SeatsOrRange {
    /// Where it stands.
    pub fn place(&self) -> &super::problem::Location {
        match self {
            SeatsOrRange::Seats(at) => &at.place,
            SeatsOrRange::Range(range) => super::read::ConfigBlock::place(range),
        }
    }
}

impl super::read::Read for SeatsOrRange {
    fn read(node: &super::tree::YamlNode, reader: &mut super::read::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::tree::Value::Map(_) => SeatRange::read(node, reader).map(SeatsOrRange::Range),
            _ => Located::read(node, reader).map(SeatsOrRange::Seats),
        }
    }
}

impl schemars::JsonSchema for SeatsOrRange {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "seats_or_range".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let (seats, range) =
            (generator.subschema_for::<Located<ConcurrencyScalar>>(), generator.subschema_for::<SeatRange>());
        schemars::json_schema!({"anyOf": [seats, range]})
    }
}

/// What `limits_store` says.
#[derive(Debug)]
pub(super) enum LimitsStoreKind {
    /// In the process.
    Memory,
    /// Elsewhere.
    Shared(Box<SharedStore>),
}

impl super::read::Read for LimitsStoreKind {
    fn read(node: &super::tree::YamlNode, reader: &mut super::read::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::tree::Value::Text(word) if word == "memory" => Some(LimitsStoreKind::Memory),
            super::tree::Value::Map(_) => SharedStore::read(node, reader).map(Box::new).map(LimitsStoreKind::Shared),
            _ => {
                reader.fail(node, "is no store", "write `memory`, or {redis: {url: redis://HOST:PORT}}");
                None
            }
        }
    }
}

impl schemars::JsonSchema for LimitsStoreKind {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "limits_store".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let shared = generator.subschema_for::<SharedStore>();
        schemars::json_schema!({"anyOf": [{"const": "memory"}, shared]})
    }
}

impl EnumScalar for OnFailure {
    const NAME: &'static str = "on_failure";
    const WORDS: &'static [(&'static str, Self)] = &[("open", OnFailure::Open), ("closed", OnFailure::Closed)];
}

/// What `degrade[].action` says.
#[derive(Debug)]
pub(super) enum LevelAction {
    /// A word.
    Word(Located<EnumWord<ActionWord>>),
    /// An action with a number.
    Cap(CapOutput),
}

/// The actions that need no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActionWord {
    Defer,
    ShedLower,
    ReasoningOff,
    Spill,
}

impl super::read::Read for LevelAction {
    fn read(node: &super::tree::YamlNode, reader: &mut super::read::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::tree::Value::Map(_) => CapOutput::read(node, reader).map(LevelAction::Cap),
            super::tree::Value::Text(word) if word == Kind::CapOutput.as_str() => {
                reader.fail(node, "says not how many tokens", "write {cap_output: 256}");
                None
            }
            _ => Located::read(node, reader).map(LevelAction::Word),
        }
    }
}

impl schemars::JsonSchema for LevelAction {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "level_action".into()
    }
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let word = generator.subschema_for::<Located<EnumWord<ActionWord>>>();
        let cap = generator.subschema_for::<CapOutput>();
        schemars::json_schema!({"anyOf": [word, cap]})
    }
}

impl EnumScalar for ActionWord {
    const NAME: &'static str = "level_action";
    const WORDS: &'static [(&'static str, Self)] = &[
        (Kind::Defer.as_str(), ActionWord::Defer),
        (Kind::ShedLower.as_str(), ActionWord::ShedLower),
        (Kind::ReasoningOff.as_str(), ActionWord::ReasoningOff),
        (Kind::Spill.as_str(), ActionWord::Spill),
    ];
    const BESIDES: &'static [&'static str] = &["{cap_output: N}"];
}

impl EnumScalar for Priority {
    const NAME: &'static str = "priority";
    const WORDS: &'static [(&'static str, Self)] = &[
        (Priority::Critical.as_str(), Priority::Critical),
        (Priority::High.as_str(), Priority::High),
        (Priority::Normal.as_str(), Priority::Normal),
        (Priority::Low.as_str(), Priority::Low),
        (Priority::Batch.as_str(), Priority::Batch),
    ];
}

impl EnumScalar for TtftCounts {
    const NAME: &'static str = "ttft_counts";
    const WORDS: &'static [(&'static str, Self)] =
        &[("first_token", TtftCounts::FirstToken), ("first_visible_token", TtftCounts::FirstVisibleToken)];
}

impl EnumScalar for TargetHeaders {
    const NAME: &'static str = "target_headers";
    const WORDS: &'static [(&'static str, Self)] =
        &[("off", TargetHeaders::Off), ("tighten", TargetHeaders::Tighten), ("may_loosen", TargetHeaders::MayLoosen)];
}

impl EnumScalar for NonStreaming {
    const NAME: &'static str = "non_streaming";
    const WORDS: &'static [(&'static str, Self)] =
        &[("judged", NonStreaming::Judged), ("excluded", NonStreaming::Excluded)];
}

impl EnumScalar for UploadRule {
    const NAME: &'static str = "upload";
    const WORDS: &'static [(&'static str, Self)] =
        &[("excluded", UploadRule::Excluded), ("counted", UploadRule::Counted)];
}

impl EnumScalar for Reasoning {
    const NAME: &'static str = "reasoning";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("none", Reasoning::None),
        ("low", Reasoning::Low),
        ("medium", Reasoning::Medium),
        ("high", Reasoning::High),
        ("on", Reasoning::On),
    ];
}

/// The word of `balance`; what else it needs stands in keys of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BalanceBy {
    LeastWork,
    RoundRobin,
    PrefixAffinity,
    SessionAffinity,
}

impl EnumScalar for BalanceBy {
    const NAME: &'static str = "balance";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("least_work", BalanceBy::LeastWork),
        ("round_robin", BalanceBy::RoundRobin),
        ("prefix_affinity", BalanceBy::PrefixAffinity),
        ("session_affinity", BalanceBy::SessionAffinity),
    ];
}

impl EnumScalar for WhenHopeless {
    const NAME: &'static str = "when_hopeless";
    const WORDS: &'static [(&'static str, Self)] =
        &[("demote", WhenHopeless::Demote), ("shed", WhenHopeless::Shed), ("serve", WhenHopeless::Serve)];
}

impl EnumScalar for OverLimit {
    const NAME: &'static str = "when_over_limit";
    const WORDS: &'static [(&'static str, Self)] = &[("reject", OverLimit::Reject), ("demote", OverLimit::Demote)];
}

impl EnumScalar for EngineKind {
    const NAME: &'static str = "engine_kind";
    const WORDS: &'static [(&'static str, Self)] = EngineKind::ALL;
}

impl EnumScalar for Scheme {
    const NAME: &'static str = "scheme";
    const WORDS: &'static [(&'static str, Self)] = &[("http", Scheme::Http), ("https", Scheme::Https)];
}

impl EnumScalar for Family {
    const NAME: &'static str = "address_family";
    const WORDS: &'static [(&'static str, Self)] = Family::ALL;
}

impl EnumScalar for RequestLabel {
    const NAME: &'static str = "request_label";
    const WORDS: &'static [(&'static str, Self)] = &[
        (RequestLabel::Length.as_str(), RequestLabel::Length),
        (RequestLabel::Pool.as_str(), RequestLabel::Pool),
        (RequestLabel::Model.as_str(), RequestLabel::Model),
        (RequestLabel::Tenant.as_str(), RequestLabel::Tenant),
    ];
}

impl EnumScalar for AccessLog {
    const NAME: &'static str = "access_log";
    const WORDS: &'static [(&'static str, Self)] = &[("stdout", AccessLog::Stdout), ("off", AccessLog::Off)];
}
