//! What the file says: every key, optional and unchecked.
//!
//! The only list of keys: the walk and the JSON Schema are generated from it. Defaults are defined in the
//! settings types, and repeated here for readers.

use std::time::Duration;

use super::scalar::{ConcurrencyScalar, EnumScalar, EnumWord, PromptTokens, RedactedText, SizeScalar};
use super::walk::{Entries, Located, NonEmpty, OneOrMany, OrOff, block};
use crate::admit::limit::settings::OverLimit;
use crate::admit::overload_control::ActionKind;
use crate::admit::queue::WhenHopeless;
use crate::admit::redis::settings::OnFailure;
use crate::classify::TargetHeaders;
use crate::inspect::Reasoning;
use crate::judge::{NonStreaming, TtftCounts, UploadRule};
use crate::record::settings::{AccessLog, RequestLabel};
use crate::route::settings::{AddressFamily, EngineKind, Scheme};
use crate::types::Priority;

block! {
    /// The settings of goodput.
    Root {
        /// The client listener, and limits on what clients may send.
        may listen: Listen,
        /// Graceful shutdown after SIGTERM.
        may shutdown: Shutdown,
        /// What is inspected of responses.
        may inspect: Inspect,
        /// The admin listener, or `off`.
        may admin: OrOff<Admin>,
        /// GET paths relayed to any engine: `/version`, `/ping`, `/load`. Default: none.
        may engine_paths: Vec<Located<String>>,
        /// The SLO classes, each as in its SLO document.
        must slo_classes: NonEmpty<Class>,
        /// Upper edges of the prompt length buckets `short` and `medium`, in tokens.
        may length_buckets: Buckets,
        /// Classification rules. The first match decides.
        may classify: Vec<Rule>,
        /// The class of requests that match no rule.
        must default_class: Located<String>,
        /// Pools of engines.
        must pools: NonEmpty<Pool>,
        /// Which pools serve which models and classes; the first match applies. Default: every model and class, by all pools in order.
        may routes: NonEmpty<Route>,
        /// Model names.
        may models: Models,
        /// Tenants. Without this key every client is the tenant `anonymous`.
        may tenants: NonEmpty<Tenant>,
        /// Number of gateways that share the engines. Default: 1.
        may replicas: Located<u64>,
        /// Where the balances of limits are kept: `memory`, or a store shared by several gateways. Default: memory.
        may limits_store: LimitsStoreKind,
        /// Logs and metrics.
        may telemetry: Telemetry,
    }

    /// The client listener, and limits on what clients may send.
    Listen {
        /// Address and port. Default: `0.0.0.0:8080`.
        may address: Located<String>,
        /// Certificate and key. Default: cleartext.
        may tls: Tls,
        /// Largest request body, decoded. Default: 64MiB.
        may max_body: Located<SizeScalar>,
        /// Memory for all request bodies together, including what is derived from them. Default: 1GiB, or
        /// `max_body` if larger.
        may max_bodies: Located<SizeScalar>,
        /// Largest request head. Default: 64KiB.
        may max_head: Located<SizeScalar>,
        /// Most header lines of a request. Default: 100.
        may max_header_lines: Located<u64>,
        /// Time for a request head: from the accepted connection, later from its first byte. Default: 10s.
        may header_timeout: Located<Duration>,
        /// Time from a request head to the end of its body. Default: 60s.
        may body_timeout: Located<Duration>,
        /// How long a connection without a request stays open. Default: 620s.
        may idle_timeout: Located<Duration>,
        /// Longest stretch in which a client may accept no bytes. Default: 30s.
        may write_stall: Located<Duration>,
        /// Most concurrent connections. Default: 20000.
        may max_connections: Located<u64>,
        /// Most concurrent connections per client address. Default: what others leave.
        may max_connections_per_address: Located<u64>,
        /// Most concurrent streams per HTTP/2 connection. Default: 250.
        may http2_max_streams: Located<u64>,
    }

    /// PEM files of a TLS listener. They are read again when they change.
    Tls {
        /// The certificate and its chain.
        must certificate_file: Located<String>,
        /// Its private key.
        must private_key_file: Located<String>,
    }

    /// Graceful shutdown after SIGTERM.
    Shutdown {
        /// From failing readiness to closing the listener. Default: 5s.
        may delay: Located<Duration>,
        /// Time for open requests after that. Default: 60s.
        may drain: Located<Duration>,
        /// How long the platform waits before it sends SIGTERM, inside the time in `grace_period`: a `preStop` hook of Kubernetes. Only checked. Default: 0s.
        may pre_stop: Located<Duration>,
        /// From the platform's decision to end the process to the moment at which it kills it: `terminationGracePeriodSeconds` of Kubernetes, `TimeoutStopSec` of systemd. Only checked. Default: not checked.
        may grace_period: Located<Duration>,
    }

    /// What is inspected of responses.
    Inspect {
        /// Largest event of a stream that is inspected; longer ones are only relayed. Default: 16MiB.
        may max_event: Located<SizeScalar>,
        /// Paths judged beside the generating ones. Default: none.
        may judged_paths: Vec<Located<String>>,
    }

    /// The admin listener.
    Admin {
        /// Address and port. Default: `127.0.0.1:9090`.
        may address: Located<String>,
        /// File with the token required for everything but `/livez` and `/readyz`: as a bearer token, or in a browser as a password. Default: none is needed.
        may token_file: Located<String>,
        /// Host names allowed without a token, beside `localhost`. Default: none.
        may hosts: Vec<Located<String>>,
    }

    /// An SLO class, as in its SLO document.
    Class {
        /// Its name.
        must slo_class: Located<String>,
        /// Priority of its requests in queues. Default: normal.
        may priority: Located<EnumWord<Priority>>,
        /// Its objectives. Default: nothing; a request is met by finishing.
        may objectives: Objectives,
        /// Target share of requests on which all objectives hold together.
        must joint_attainment_target: Located<f64>,
        /// Window of the target. Default: 28d.
        may window: Located<Duration>,
        /// The workload that the objectives were written for.
        may workload_assumption: Workload,
        /// Which token ends TTFT. Default: first_token.
        may ttft_counts: Located<EnumWord<TtftCounts>>,
        /// How the request headers `x-slo-ttft-ms` and `x-slo-tpot-ms` are treated. Default: off.
        may target_headers: Located<EnumWord<TargetHeaders>>,
        /// Expected output tokens of a request without a cap. Default: the assumed p95, else 1024.
        may default_output_tokens: Located<u64>,
        /// Gaps above this are stalls. Default: 1.
        may stall_seconds: Located<f64>,
        /// Whether non-streaming responses are judged. Default: judged.
        may non_streaming: Located<EnumWord<NonStreaming>>,
        /// Whether the time a client takes to send its body counts. Default: excluded.
        may upload: Located<EnumWord<UploadRule>>,
        /// How long a response head may be held for a retry. Default: 10s.
        may hold_head: Located<Duration>,
        /// Interval of keepalive comments once the head was sent. Default: never.
        may keepalive_seconds: Located<f64>,
        /// Time limits.
        may timeouts: Timeouts,
        /// Queue settings of its requests.
        may queue: ClassQueue,
        /// Overload levels, first to last.
        may degrade: NonEmpty<Level>,
    }

    /// One overload level of a class. All up to the current one are in force together.
    Level {
        /// Its action: defer, shed_lower, reasoning_off, spill, or `{cap_output: N}`.
        must action: LevelAction,
        /// Entered when one of these is exceeded.
        must enter_when: Above,
        /// Left when all of these hold. Default: half of what enters it.
        may leave_when: Below,
        /// Shortest time after entering it before the next change. Default: 10s.
        may hold: Located<Duration>,
    }

    /// Caps output tokens.
    CapOutput {
        /// Most output tokens per response.
        must cap_output: Located<u64>,
    }

    /// Conditions that enter a level.
    Above {
        /// Burn rate of the class in the last minute.
        may burn_rate_above: Located<f64>,
        /// Expected wait for a seat of a request of the class.
        may queue_wait_above: Located<Duration>,
        /// Requests of all classes waiting for the class's first pool; of several first pools, the longest queue.
        may queue_depth_above: Located<u64>,
    }

    /// Conditions that leave a level.
    Below {
        /// Default: half of burn_rate_above.
        may burn_rate_below: Located<f64>,
        /// Default: half of queue_wait_above.
        may queue_wait_below: Located<Duration>,
        /// Default: half of queue_depth_above, at least 1.
        may queue_depth_below: Located<u64>,
    }

    /// Bounds of `max_concurrency_per_engine: auto`.
    SeatRange {
        /// Fewest seats per engine. Default: 1.
        may min: Located<u64>,
        /// Most seats per engine. Default: 1024.
        may max: Located<u64>,
    }

    /// How requests of a class wait for a seat.
    ClassQueue {
        /// Longest wait. 0s: a free seat or none. Default: 30s, or the longest of the
        /// class's objectives (at most timeouts.total).
        may max_wait: Located<Duration>,
        /// What happens to a request that can no longer meet its objectives: demote, shed or serve. Default: demote.
        may when_hopeless: Located<EnumWord<WhenHopeless>>,
    }

    /// Objectives of a class.
    Objectives {
        /// Time to first token.
        may ttft_seconds: Objective,
        /// Time per output token.
        may tpot_seconds: Objective,
        /// The largest gap between token events.
        may itl_seconds: Objective,
        /// End-to-end time, from arrival to finish.
        may e2e_seconds: Objective,
    }

    /// One objective.
    Objective {
        /// Largest value that holds, in seconds.
        must threshold: Located<f64>,
        /// Share of requests on which it should hold.
        must attainment: Located<f64>,
    }

    /// The workload that the objectives were written for.
    Workload {
        /// Prompt tokens.
        may input_tokens: Quantiles,
        /// Output tokens.
        may output_tokens: Quantiles,
    }

    /// Quantiles of a length, in tokens.
    Quantiles {
        /// Median.
        must p50: Located<u64>,
        /// 95th percentile.
        must p95: Located<u64>,
    }

    /// Time limits of a class. All but `idle` run from the arrival of the request, over all attempts.
    Timeouts {
        /// To the first token of a stream. Default: 120s.
        may first_token: Located<Duration>,
        /// Longest silence of an engine after the first token. Default: 120s.
        may idle: Located<Duration>,
        /// To the end of the response. Default: 30m.
        may total: Located<Duration>,
        /// To the head of a non-streaming response. Default: as `total`.
        may response_head: Located<Duration>,
    }

    /// Upper edges of the prompt length buckets, in tokens.
    Buckets {
        /// The longest `short` prompt. Default: 1000.
        may short: Located<u64>,
        /// The longest `medium` prompt. Default: 8000.
        may medium: Located<u64>,
    }

    /// One classification rule.
    Rule {
        /// The class of matching requests.
        must class: Located<String>,
        /// Conditions; all must hold.
        must when: When,
    }

    /// Conditions on a request: all present ones must hold; a list means any of its items.
    When {
        /// The tenant.
        may tenant: OneOrMany<Located<String>>,
        /// The label of the key.
        may key: OneOrMany<Located<String>>,
        /// Headers by name: a value, a list of values, `{prefix: ...}` or `{present: true}`.
        may header: Entries<HeaderCondition>,
        /// The exact path.
        may path: OneOrMany<Located<String>>,
        /// The model, as sent or after aliasing; `*` matches any text.
        may model: OneOrMany<Located<String>>,
        /// Whether the request streams.
        may stream: Located<bool>,
        /// Whether the request offers tools.
        may has_tools: Located<bool>,
        /// The stated reasoning setting; `on` means enabled without a level.
        may reasoning: OneOrMany<Located<EnumWord<Reasoning>>>,
        /// The largest stated output cap.
        may max_tokens: Cap,
        /// Estimated prompt tokens.
        may prompt_tokens: Range,
        /// Members of the body's `metadata`: a value or a list of values.
        may metadata: Entries<OneOrMany<Located<String>>>,
    }

    /// A test of the stated output cap.
    Cap {
        /// Lower bound.
        may at_least: Located<u64>,
        /// Upper bound.
        may at_most: Located<u64>,
        /// Whether a cap is stated at all.
        may stated: Located<bool>,
    }

    /// A range of tokens, both ends included.
    Range {
        /// Lower bound.
        may at_least: Located<u64>,
        /// Upper bound.
        may at_most: Located<u64>,
    }

    /// A test of a header other than equality.
    HeaderShape {
        /// The value starts with this.
        may prefix: Located<String>,
        /// Whether the header is present.
        may present: Located<bool>,
    }

    /// A pool of interchangeable engines.
    Pool {
        /// Its name.
        must pool: Located<String>,
        /// Its engines, listed.
        may engines: NonEmpty<Engine>,
        /// A DNS name whose addresses are the engines.
        may dns: Dns,
        /// Kind of its engines, and what is sent to them.
        may engine: EngineSort,
        /// Load balancing policy. Default: least_work.
        may balance: Located<EnumWord<BalanceBy>>,
        /// The request header that names a session, for session_affinity. Default: x-session-id.
        may session_header: Located<String>,
        /// Concurrent requests per engine, `auto`, or the bounds of `auto`; further ones queue.
        /// Default: no limit.
        may max_concurrency_per_engine: SeatsOrRange,
        /// Queue settings.
        may queue: Queue,
        /// Health checks, or `off`.
        may health: OrOff<Health>,
        /// Scraping of the engines' metrics, or `off`. Default: on, but for kind generic.
        may metrics: OrOff<Metrics>,
        /// Time limit of connecting, TLS included. Default: 2s.
        may connect_timeout: Located<Duration>,
        /// Retry settings.
        may retries: Retries,
        /// The circuit breaker of each engine, or `off`.
        may breaker: OrOff<Breaker>,
        /// Cool-down of an engine after push-back.
        may cool_down: CoolDown,
        /// What may be injected into requests.
        may inject: Inject,
    }

    /// How requests queue for a pool.
    Queue {
        /// Most waiting requests. 0: a request runs at once or is rejected. Default: 1000.
        may max_waiting: Located<u64>,
        /// Served tokens by which a tenant may exceed the least-served one before others of the same priority go first. Default: 65536.
        may quantum: Located<u64>,
        /// Outstanding prompt tokens per engine, of requests without a first token. Default: auto.
        may prefill_tokens_per_engine: Located<PromptTokens>,
        /// Guaranteed shares of the priorities, of admitted tokens and of the places in a full queue.
        may shares: Shares,
    }

    /// Guaranteed shares of the priorities; at most 1 together.
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
        /// Its URL: `http://host:port`, or `https`. A trailing `/v1` is ignored.
        must url: Located<String>,
    }

    /// A DNS name whose addresses are the engines of a pool.
    Dns {
        /// The name.
        must name: Located<String>,
        /// The port of every engine.
        must port: Located<u64>,
        /// `http` or `https`. Default: http.
        may scheme: Located<EnumWord<Scheme>>,
        /// Interval of resolution. Default: 5s.
        may refresh: Located<Duration>,
        /// Which addresses are engines: those of one family, the one that answers (`auto`), `ipv4`, `ipv6`, or `both`. Default: auto.
        may family: Located<EnumWord<AddressFamily>>,
    }

    /// Kind of a pool's engines, and what is sent to them.
    EngineSort {
        /// The kind. Default: vllm.
        may kind: Located<EnumWord<EngineKind>>,
        /// Whether the engines run with priority scheduling, so that requests carry their priority. Kind vllm only. Default: false.
        may priority_scheduling: Located<bool>,
        /// File with a bearer token for the engines. Default: none.
        may api_key_file: Located<String>,
        /// Headers to set on every request.
        may headers: Entries<Located<RedactedText>>,
        /// File with PEM root certificates that replace the system's for `https`.
        may ca_file: Located<String>,
        /// Whether to forward the client's own credential. Default: false.
        may forward_authorization: Located<bool>,
    }

    /// A health check.
    Health {
        /// Path of the GET. Default: /health.
        may path: Located<String>,
        /// Interval. Default: 2s.
        may every: Located<Duration>,
        /// Time limit. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// Scraping of the engines' metrics.
    Metrics {
        /// Path of the GET. Default: /metrics.
        may path: Located<String>,
        /// Interval. Default: 2s.
        may every: Located<Duration>,
        /// Time limit. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// Retries before the first byte of a response.
    Retries {
        /// Retries after a fault. Default: 1.
        may after_fault: Located<u64>,
        /// Retries after push-back (429, 503, 529). Default: 3.
        may after_push_back: Located<u64>,
        /// Retry budget as a share of recent requests. Default: 0.2.
        may share: Located<f64>,
        /// Retries per 10 s that are always allowed. Default: 10.
        may floor_per_10s: Located<u64>,
    }

    /// The circuit breaker of an engine.
    Breaker {
        /// This many faults ... Default: 5.
        may faults: Located<u64>,
        /// ... within this time open it ... Default: 10s.
        may within: Located<Duration>,
        /// ... for this long. Default: 5s.
        may open: Located<Duration>,
    }

    /// Cool-down of an engine after push-back.
    CoolDown {
        /// If the engine names no time. Default: 1s.
        may default: Located<Duration>,
        /// Longest, whatever the engine says. Default: 60s.
        may max: Located<Duration>,
    }

    /// What may be injected into requests.
    Inject {
        /// `stream_options.include_usage`; the client does not see it. Default: true, but for kind generic.
        may usage: Located<bool>,
        /// vLLM's `continuous_usage_stats`. Default: false.
        may continuous_usage: Located<bool>,
    }

    /// One item of `routes`.
    Route {
        /// Models, after aliasing; `*` matches any text.
        must model: OneOrMany<Located<String>>,
        /// Classes. Default: all.
        may class: OneOrMany<Located<String>>,
        /// Pools, in order of preference.
        must pools: OneOrMany<Located<String>>,
    }

    /// Model names.
    Models {
        /// Aliases: clients' names to engines' names.
        may aliases: Entries<Located<String>>,
    }

    /// A tenant.
    Tenant {
        /// Its name.
        must tenant: Located<String>,
        /// Its keys as hashes; `goodput key new` creates one.
        may keys: NonEmpty<Key>,
        /// File with one hash per line, followed by an optional label.
        may keys_file: Located<String>,
        /// Classes it may use. Default: all.
        may classes: OneOrMany<Located<String>>,
        /// Its limits. Default: none.
        may limits: Limits,
        /// What happens to requests beyond the limits: reject or demote. Default: reject.
        may when_over_limit: Located<EnumWord<OverLimit>>,
    }

    /// A store shared by several gateways.
    SharedStore {
        /// Redis or Valkey.
        must redis: Redis,
    }

    /// Redis or Valkey.
    Redis {
        /// Its URL: `redis://HOST:PORT`, or `rediss://HOST:PORT` for TLS. Put a password into a variable or a file.
        must url: Located<String>,
        /// File with the password.
        may password_file: Located<String>,
        /// What happens while it is unavailable: open (this gateway's share of each limit applies) or closed (requests are rejected). Default: open.
        may on_failure: Located<EnumWord<OnFailure>>,
        /// Longest wait of a request for it. Default: 50ms.
        may timeout: Located<Duration>,
        /// Prefix of its keys. Default: goodput.
        may key_prefix: Located<String>,
        /// Whether gateways tell each other through it what they have at the engines and in their queues. Default: true.
        may share_queues: Located<bool>,
    }

    /// An API key.
    Key {
        /// Its label, for rules.
        may label: Located<String>,
        /// BLAKE3 hash of the key, 64 hexadecimal digits.
        must blake3: Located<RedactedText>,
    }

    /// Logs and metrics.
    Telemetry {
        /// Access log: stdout or off. Default: stdout.
        may access_log: Located<EnumWord<AccessLog>>,
        /// Labels omitted from request metrics: length, pool, model, tenant. Default: none.
        may drop_labels: OneOrMany<Located<EnumWord<RequestLabel>>>,
        /// Whether histograms have the label `model` too. Default: false.
        may histograms_by_model: Located<bool>,
        /// Whether each engine has series of its own: met, judged, TTFT and TPOT. Default: false.
        may series_by_engine: Located<bool>,
        /// The file in which the counts of classes outlive the process. Default: none; windows begin with the process.
        may slo_state: SloState,
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

    /// The file in which the counts of classes outlive the process.
    SloState {
        /// The file; its folder must be there. Each gateway needs one of its own.
        must path: Located<String>,
        /// How often it is saved. Default: 1m.
        may every: Located<Duration>,
    }
}

/// Blocks with the keys that limit requests, beside keys of their own.
macro_rules! limit_blocks {
    ($($(#[doc = $about:literal])* $name:ident { $($own:tt)* })*) => {
        block! {$(
            $(#[doc = $about])*
            $name {
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
                $($own)*
            }
        )*}

        $(impl $name {
            /// What limits requests.
            pub(super) fn limit_keys(&self) -> LimitKeys<'_> {
                LimitKeys {
                    tokens: [&self.tokens_per_minute, &self.tokens_burst],
                    input_tokens: [&self.input_tokens_per_minute, &self.input_tokens_burst],
                    output_tokens: [&self.output_tokens_per_minute, &self.output_tokens_burst],
                    requests: [&self.requests_per_minute, &self.requests_burst],
                    concurrent: &self.concurrent_requests,
                }
            }
        })*
    };
}

limit_blocks! {
    /// Limits of a tenant: on all its requests, and on those for single models.
    Limits {
        /// Limits on requests for one model, besides: by its name after aliasing.
        may models: Entries<Allowance>,
    }

    /// Limits on requests for one model.
    Allowance {}
}

/// The keys that limit requests: of rates per minute, and burst.
pub(super) struct LimitKeys<'r> {
    pub tokens: [&'r Option<Located<u64>>; 2],
    pub input_tokens: [&'r Option<Located<u64>>; 2],
    pub output_tokens: [&'r Option<Located<u64>>; 2],
    pub requests: [&'r Option<Located<u64>>; 2],
    pub concurrent: &'r Option<Located<u64>>,
}

/// What `when.header` says about one header.
#[derive(Debug)]
pub(super) enum HeaderCondition {
    /// One of these values.
    Is(OneOrMany<Located<String>>),
    /// Another test.
    Shape(HeaderShape),
}

impl super::walk::Read for HeaderCondition {
    fn read(node: &super::spanned_yaml::YamlNode, reader: &mut super::walk::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::spanned_yaml::Value::Map(_) => HeaderShape::read(node, reader).map(HeaderCondition::Shape),
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

/// The value of `max_concurrency_per_engine`.
#[derive(Debug)]
pub(super) enum SeatsOrRange {
    /// A number, or `auto`.
    Seats(Located<ConcurrencyScalar>),
    /// Bounds of `auto`.
    Range(SeatRange),
}

impl SeatsOrRange {
    /// Its position.
    pub fn place(&self) -> &super::problem::Location {
        match self {
            SeatsOrRange::Seats(at) => &at.place,
            SeatsOrRange::Range(range) => super::walk::ConfigBlock::place(range),
        }
    }
}

impl super::walk::Read for SeatsOrRange {
    fn read(node: &super::spanned_yaml::YamlNode, reader: &mut super::walk::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::spanned_yaml::Value::Map(_) => SeatRange::read(node, reader).map(SeatsOrRange::Range),
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

/// The value of `limits_store`.
#[derive(Debug)]
pub(super) enum LimitsStoreKind {
    /// In this process.
    Memory,
    /// Shared.
    Shared(Box<SharedStore>),
}

impl super::walk::Read for LimitsStoreKind {
    fn read(node: &super::spanned_yaml::YamlNode, reader: &mut super::walk::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::spanned_yaml::Value::Text(word) if word == "memory" => Some(LimitsStoreKind::Memory),
            super::spanned_yaml::Value::Map(_) => {
                SharedStore::read(node, reader).map(Box::new).map(LimitsStoreKind::Shared)
            }
            _ => {
                reader.fail(node, "is not a store", "write `memory`, or {redis: {url: redis://HOST:PORT}}");
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

/// The value of `degrade[].action`.
#[derive(Debug)]
pub(super) enum LevelAction {
    /// A word.
    Word(Located<EnumWord<ActionWord>>),
    /// An action with a number.
    Cap(CapOutput),
}

/// Actions without a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActionWord {
    Defer,
    ShedLower,
    ReasoningOff,
    Spill,
}

impl super::walk::Read for LevelAction {
    fn read(node: &super::spanned_yaml::YamlNode, reader: &mut super::walk::ConfigWalker<'_>) -> Option<Self> {
        match &node.value {
            super::spanned_yaml::Value::Map(_) => CapOutput::read(node, reader).map(LevelAction::Cap),
            super::spanned_yaml::Value::Text(word) if word == ActionKind::CapOutput.as_str() => {
                reader.fail(node, "lacks the number of tokens", "write {cap_output: 256}");
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
        (ActionKind::Defer.as_str(), ActionWord::Defer),
        (ActionKind::ShedLower.as_str(), ActionWord::ShedLower),
        (ActionKind::ReasoningOff.as_str(), ActionWord::ReasoningOff),
        (ActionKind::Spill.as_str(), ActionWord::Spill),
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

/// The word of `balance`; further parameters have keys of their own.
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

impl EnumScalar for AddressFamily {
    const NAME: &'static str = "address_family";
    const WORDS: &'static [(&'static str, Self)] = AddressFamily::ALL;
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
