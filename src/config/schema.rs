//! The settings file as written: every key, optional and unchecked.
//!
//! The only list of keys. The walk, the JSON Schema and the key tables of `docs/configuration.md` are generated
//! from it, descriptions included. Defaults are defined in the settings types, and repeated here for readers.

use std::time::Duration;

use super::scalar::{ConcurrencyScalar, EnumScalar, EnumWord, PromptTokens, RedactedText, SizeScalar};
use super::walk::{Entries, Located, NonEmpty, OneOrMany, OrBlock, OrOff, block};
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
        /// Inspection of responses.
        may inspect: Inspect,
        /// The admin listener, or `off`.
        may admin: OrOff<Admin>,
        /// GET paths that are relayed to an engine of the first route of the request's class: `/version`, `/ping`,
        /// `/load`. Default: none.
        may engine_paths: Vec<Located<String>>,
        /// The SLO classes, each as in its SLO document.
        must slo_classes: NonEmpty<Class>,
        /// Upper edges of the prompt length buckets `short` and `medium`.
        may length_buckets: Buckets,
        /// Classification rules. The first match decides.
        may classify: Vec<Rule>,
        /// The class of requests that match no rule.
        must default_class: Located<String>,
        /// Pools of engines.
        must pools: NonEmpty<Pool>,
        /// Which pools serve which models and classes. The first match applies. Default: every model and class, by all
        /// pools in order.
        may routes: NonEmpty<Route>,
        /// Model names.
        may models: Models,
        /// Tenants and their keys. Without this key no request needs an API key, and every client is the tenant
        /// `anonymous`.
        may tenants: NonEmpty<Tenant>,
        /// Number of gateways that share the engines, 1 to 1000. Each takes its share of `max_concurrency_per_engine`
        /// and `queue.prefill_tokens_per_engine` where these are numbers, and of shared limits while their store is
        /// unavailable. Default: 1.
        may replicas: Located<u64>,
        /// Where the balances of tenant limits are kept: in this process, or in a store shared by several gateways.
        /// Default: memory.
        may limits_store: OrBlock<Located<EnumWord<InProcess>>, SharedStore>,
        /// Logs, metrics, traces and the journal.
        may telemetry: Telemetry,
    }

    /// The client listener, and limits on what clients may send.
    Listen {
        /// IP address and port. Port 0 takes a free one. Changes take effect after a restart. Default: `0.0.0.0:8080`.
        may address: Located<String>,
        /// Certificate and key. Default: cleartext.
        may tls: Tls,
        /// Largest request body, as sent and as decoded, 1KiB to 16GiB. A larger one gets a 413. Default: 64MiB.
        may max_body: Located<SizeScalar>,
        /// Memory for all request bodies together, including what is derived from them; `max_body` to 1TiB. A request
        /// above it gets a 503 (`bodies_full`). The last quarter is reserved for the first 64 KiB of each body, so that
        /// ordinary requests continue beside long ones; the only long body is never rejected for lack of it. A body is
        /// held until its response begins ([memory](operations.md#how-much-memory-does-it-need)). Default: 1GiB, or
        /// `max_body` if larger.
        may max_bodies: Located<SizeScalar>,
        /// Largest request head, 8KiB to 16MiB. Default: 64KiB.
        may max_head: Located<SizeScalar>,
        /// Most header lines of a request, 8 to 10000. More get a 431. Default: 100.
        may max_header_lines: Located<u64>,
        /// Time limit of a request head: from the accepted connection (including the TLS handshake), for later requests
        /// of the connection from the first byte of the head. Default: 10s.
        may header_timeout: Located<Duration>,
        /// Time from a request head to the end of its body. A later end gets a 408. Default: 60s.
        may body_timeout: Located<Duration>,
        /// How long a connection without a request stays open. Choose it longer than clients and load balancers keep
        /// theirs, so that they never send a request on a connection that is being closed. Default: 620s.
        may idle_timeout: Located<Duration>,
        /// Longest stretch in which a client may accept no bytes before its response is cut. Default: 30s.
        may write_stall: Located<Duration>,
        /// Most concurrent connections. For a further one the longest idle connection is closed; if no connection is
        /// idle, it waits in the system's backlog. The limit of open files bounds this number too: `serve` raises its
        /// soft limit to the hard one (`ulimit -Hn`, `LimitNOFILE`), reserves at most 512 descriptors for itself, and
        /// counts two for each client (its own and an engine's). It warns at the start if fewer remain. Default: 20000.
        may max_connections: Located<u64>,
        /// Most concurrent connections per client address (of IPv6: per /64). For a further one an idle connection of
        /// that address is closed; if no connection of the address is idle, the new one is closed and counted in
        /// `goodput_connections_refused_total`. By default an address may use all connections except those that others
        /// have and as many again, which stay free for them (at least a hundredth, at most a tenth of all): a load
        /// balancer in front, which is one address, reaches the limit only when nearly all are used.
        /// Default: what others leave.
        may max_connections_per_address: Located<u64>,
        /// Most concurrent streams per HTTP/2 connection. Default: 250.
        may http2_max_streams: Located<u64>,
    }

    /// PEM files of a TLS listener. They are read again when they change.
    Tls {
        /// The certificate and its chain, in PEM.
        must certificate_file: Located<String>,
        /// Its private key, in PEM.
        must private_key_file: Located<String>,
    }

    /// Graceful shutdown after SIGTERM.
    Shutdown {
        /// From SIGTERM, when readiness fails, to closing the listener. May be 0s. Default: 5s.
        may delay: Located<Duration>,
        /// Time for open requests after that. May be 0s. Default: 60s.
        may drain: Located<Duration>,
        /// How long the platform waits before it sends SIGTERM, inside `grace_period`: the `preStop` hook of Kubernetes.
        /// Only checked. Default: 0s.
        may pre_stop: Located<Duration>,
        /// From the platform's decision to end the process to its SIGKILL: `terminationGracePeriodSeconds` of
        /// Kubernetes, `TimeoutStopSec` of systemd. Only checked: `pre_stop` + `delay` + `drain` + 5 seconds must fit.
        /// Default: not checked.
        may grace_period: Located<Duration>,
    }

    /// Inspection of responses.
    Inspect {
        /// Largest event of a stream that is inspected, 1KiB to 1GiB. A longer one is relayed without inspection, and
        /// its request is missed(`unparseable`). Default: 16MiB.
        may max_event: Located<SizeScalar>,
        /// Paths judged beside the generating ones, like non-streaming responses: `/v1/embeddings`, `/v1/rerank`.
        /// Default: none.
        may judged_paths: Vec<Located<String>>,
    }

    /// The admin listener.
    Admin {
        /// IP address and port for operators and Prometheus. Changes take effect after a restart.
        /// Default: `127.0.0.1:9090`.
        may address: Located<String>,
        /// File with the token required for everything but `/livez` and `/readyz`: as a bearer token, or in a browser
        /// as the password of any user. Changes take effect after a restart. Default: no token is required.
        may token_file: Located<String>,
        /// Host names accepted without a token, beside `localhost` and, if `address` is not on loopback, any IP
        /// address. Example: the service name that Prometheus uses. Changes take effect after a restart. Default: none.
        may hosts: Vec<Located<String>>,
    }

    /// An SLO class, as in its SLO document.
    Class {
        /// Its name: a metric label, and the response header `x-slo-class`.
        must slo_class: Located<String>,
        /// Priority of its requests in the queues of pools, and in engines with `priority_scheduling`. Default: normal.
        may priority: Located<EnumWord<Priority>>,
        /// Its objectives. Default: none; a request is met by finishing.
        may objectives: Objectives,
        /// Target share of judged requests on which all objectives hold together. Burn rates and error budgets follow
        /// from it.
        must joint_attainment_target: Located<f64>,
        /// Window of the target, 1h to 366d. Default: 28d.
        may window: Located<Duration>,
        /// The workload that the objectives were written for.
        may workload_assumption: Workload,
        /// Which token ends TTFT. Reasoning is not visible. Default: first_token.
        may ttft_counts: Located<EnumWord<TtftCounts>>,
        /// Effect of the request headers `x-slo-ttft-ms` and `x-slo-tpot-ms`: ignored (`off`), make the request's own
        /// objectives stricter (`tighten`), or also looser (`may_loosen`). Default: off.
        may target_headers: Located<EnumWord<TargetHeaders>>,
        /// Expected output tokens of a request without a cap: the work that it brings to an engine, and the basis of
        /// the estimate when its end would be late. Default: the assumed p95, else 1024.
        may default_output_tokens: Located<u64>,
        /// Gaps between token events above this many seconds are counted as stalls. Default: 1.
        may stall_seconds: Located<f64>,
        /// Whether non-streaming responses are judged. Default: judged.
        may non_streaming: Located<EnumWord<NonStreaming>>,
        /// Whether TTFT and E2E include the time in which the gateway was ready to read the body and the client sent
        /// nothing. Default: excluded.
        may upload: Located<EnumWord<UploadRule>>,
        /// How long the response head of a stream may be held, so that another engine can still be tried. May be 0s.
        /// Default: 10s.
        may hold_head: Located<Duration>,
        /// Seconds between `: keepalive` comments once the head was sent and no token has come. With this key the
        /// gateway sends a 200 after `hold_head` even if no engine has answered yet, also while the request waits in
        /// the gateway's queue; later failures and rejections then arrive as an event. Default: never.
        may keepalive_seconds: Located<f64>,
        /// Time limits. They end requests; objectives do not.
        may timeouts: Timeouts,
        /// How its requests wait for a seat.
        may queue: ClassQueue,
        /// Overload levels, first to last.
        may degrade: NonEmpty<Level>,
    }

    /// One overload level of a class. All up to the current one are in force together.
    Level {
        /// Its action.
        must action: OrBlock<Located<EnumWord<ActionWord>>, CapOutput>,
        /// The level is entered when one of these is exceeded.
        must enter_when: Above,
        /// The level is left when all of these hold. Default: half of what enters it.
        may leave_when: Below,
        /// Shortest time after entering the level, or returning to it, before the next change. Default: 10s.
        may hold: Located<Duration>,
    }

    /// Caps output tokens.
    CapOutput {
        /// Most output tokens per response. A later level must have a lower cap.
        must cap_output: Located<u64>,
    }

    /// Conditions that enter a level.
    Above {
        /// Burn rate of the class in the last minute, above 0: how many times too fast it spent its error budget,
        /// without the requests that were shed. Fewer than ten judged requests burn nothing.
        may burn_rate_above: Located<f64>,
        /// Expected wait of a request of the class for a seat of its first pool.
        may queue_wait_above: Located<Duration>,
        /// Requests of all classes waiting for the class's first pool; of several first pools, the longest queue.
        may queue_depth_above: Located<u64>,
    }

    /// Conditions that leave a level.
    Below {
        /// Burn rate to fall below. Default: half of `burn_rate_above`.
        may burn_rate_below: Located<f64>,
        /// Expected wait to fall below. Default: half of `queue_wait_above`.
        may queue_wait_below: Located<Duration>,
        /// Waiting requests to fall below. Default: half of `queue_depth_above`, at least 1.
        may queue_depth_below: Located<u64>,
    }

    /// Bounds of `max_concurrency_per_engine: auto`.
    SeatRange {
        /// Fewest seats per engine, 1 to 1000000. Default: 1.
        may min: Located<u64>,
        /// Most seats per engine, 1 to 1000000. Default: 1024.
        may max: Located<u64>,
    }

    /// How requests of a class wait for a seat.
    ClassQueue {
        /// Longest wait; then the request is rejected. 0s: a free seat, or rejection. At most `timeouts.total`. The
        /// default is the longest time after which the class can still meet an objective (`ttft_seconds`,
        /// `e2e_seconds`, or what follows from both at the expected length), at least 30s and at most `timeouts.total`.
        /// Default: 30s, or the longest of the class's objectives.
        may max_wait: Located<Duration>,
        /// What happens to a request that can no longer meet its objectives: it queues behind those of its priority
        /// that still can (`demote`), is rejected (`shed`), or keeps its position (`serve`). Default: demote.
        may when_hopeless: Located<EnumWord<WhenHopeless>>,
    }

    /// Objectives of a class. All that are present must hold on the same request.
    Objectives {
        /// Time to first token.
        may ttft_seconds: Objective,
        /// Time per output token.
        may tpot_seconds: Objective,
        /// The largest gap between two token events of one response.
        may itl_seconds: Objective,
        /// End-to-end time, from start to finish: the objective of non-streaming responses.
        may e2e_seconds: Objective,
    }

    /// One objective.
    Objective {
        /// Largest value that holds, in seconds. It is also an edge of the histogram.
        must threshold: Located<f64>,
        /// Share of requests on which this objective alone should hold, for comparison with its own counters
        /// (`goodput_slo_objective_met_total`). Error budgets follow from `joint_attainment_target`.
        must attainment: Located<f64>,
    }

    /// The workload that the objectives were written for.
    Workload {
        /// Prompt tokens.
        may input_tokens: Quantiles,
        /// Output tokens. The p95 is the expected output of a request without a cap.
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
        /// To the first token of a stream: 504, missed(`timeout_first_token`). Default: 120s.
        may first_token: Located<Duration>,
        /// Longest silence of an engine after the first token: missed(`timeout_idle`). Comments count as a sign of
        /// life; empty lines and lone `id` or `retry` lines do not. Default: 120s.
        may idle: Located<Duration>,
        /// To the end of the response: missed(`timeout_total`). Default: 30m.
        may total: Located<Duration>,
        /// To the head of a non-streaming response: 504, missed(`timeout_first_token`). Default: as `total`.
        may response_head: Located<Duration>,
    }

    /// Upper edges of the prompt length buckets, in tokens.
    Buckets {
        /// The longest `short` prompt, in tokens. Default: 1000.
        may short: Located<u64>,
        /// The longest `medium` prompt, in tokens. Default: 8000.
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
        /// The label of the API key.
        may key: OneOrMany<Located<String>>,
        /// Headers by name: a value, a list of values, `{prefix: ...}` or `{present: true}`. Credentials
        /// (`authorization`, `x-api-key`, `api-key`, `cookie`, `proxy-authorization`) cannot be tested.
        may header: Entries<OrBlock<OneOrMany<Located<String>>, HeaderCondition>>,
        /// The exact path.
        may path: OneOrMany<Located<String>>,
        /// The model, as sent or after aliasing; `*` matches any text.
        may model: OneOrMany<Located<String>>,
        /// Whether the request streams.
        may stream: Located<bool>,
        /// Whether the request offers tools.
        may has_tools: Located<bool>,
        /// The stated reasoning setting (`reasoning_effort`, `reasoning.effort`, `thinking.type`); `on` means enabled
        /// without a level.
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
        /// Smallest cap that matches.
        may at_least: Located<u64>,
        /// Largest cap that matches.
        may at_most: Located<u64>,
        /// Whether a cap is stated at all. A request without a cap matches only `stated: false`.
        may stated: Located<bool>,
    }

    /// A range of tokens, both ends included.
    Range {
        /// Lower bound, in tokens.
        may at_least: Located<u64>,
        /// Upper bound, in tokens.
        may at_most: Located<u64>,
    }

    /// A test of a header other than equality.
    HeaderCondition {
        /// The value starts with this.
        may prefix: Located<String>,
        /// Whether the header is present.
        may present: Located<bool>,
    }

    /// A pool of interchangeable engines.
    Pool {
        /// Its name: a metric label, and the response header `x-goodput-pool`.
        must pool: Located<String>,
        /// Its engines, listed.
        may engines: NonEmpty<Engine>,
        /// A DNS name whose addresses are the engines.
        may dns: Dns,
        /// Kind of its engines, and what is sent to them.
        may engine: EngineSort,
        /// Load balancing policy ([routing](routing.md)). `least_work`: the engine with the fewest prompt tokens
        /// outstanding, by the gateway's count and the engine's report, without those that its prefix cache probably
        /// holds; slower engines get less. `prefix_affinity`: equal prompt prefixes go to the same engine, as long as
        /// its load is at most a quarter above the mean. `session_affinity`: the same by a request header.
        /// Default: least_work.
        may balance: Located<EnumWord<BalanceBy>>,
        /// The request header that names a session, only for `session_affinity`. A request without it is balanced by
        /// `least_work`. Default: `x-session-id`.
        may session_header: Located<String>,
        /// Seats: concurrent requests per engine, 1 to 1000000, over all `replicas`. Further requests wait in the queue
        /// of the pool ([admission](admission.md#the-queue-of-a-pool)). `auto` finds the limit at which the pool's
        /// classes still meet TPOT and E2E ([routing](routing.md#auto)); it needs a class with such an objective or
        /// TTFT. A block is `auto` within bounds. Without a limit no request waits here. Default: no limit.
        may max_concurrency_per_engine: OrBlock<Located<ConcurrencyScalar>, SeatRange>,
        /// How requests wait for a seat of this pool.
        may queue: Queue,
        /// Health checks, or `off`.
        may health: OrOff<Health>,
        /// Scraping of the engines' metrics, or `off`. Default: on, but for kind generic.
        may metrics: OrOff<Metrics>,
        /// Time limit of connecting, TLS included. Default: 2s.
        may connect_timeout: Located<Duration>,
        /// Retries before the first byte of a response.
        may retries: Retries,
        /// The circuit breaker of each engine, or `off`.
        may breaker: OrOff<Breaker>,
        /// Cool-down of an engine after push-back or a failed connection: others are preferred meanwhile.
        may cool_down: CoolDown,
        /// Fields that may be injected into requests.
        may inject: Inject,
    }

    /// How requests queue for a pool.
    Queue {
        /// Most waiting requests. 0: a request runs at once or is rejected. A full queue rejects the lowest priority
        /// first. Default: 1000.
        may max_waiting: Located<u64>,
        /// Served tokens by which a tenant may be ahead of the least-served one and still compete by deadline
        /// ([admission](admission.md#the-queue-of-a-pool)). Smaller is fairer; larger meets more deadlines.
        /// Default: 65536.
        may quantum: Located<u64>,
        /// Prompt tokens of requests without a first token that one engine may have, over all `replicas`; a longer
        /// prompt counts as this many. `auto`: prompts are admitted at the pace that the engines can compute without
        /// breaking the promised TPOT, by the [learned](routing.md#what-is-learned) length of their steps; each engine
        /// has at most what it computes in 35 % of the shortest promised TTFT (25 % while the pace is behind), at least
        /// 512 tokens. No limit applies before something is learned, or without objectives. `off`: no limit.
        /// [scheduling.md](scheduling.md) measures the effect. Default: auto.
        may prefill_tokens_per_engine: Located<PromptTokens>,
        /// Guaranteed shares of the priorities.
        may shares: Shares,
    }

    /// Guaranteed shares of the priorities; at most 1 together.
    Shares {
        /// Share of priority critical. Default: 0.5.
        may critical: Located<f64>,
        /// Share of priority high. Default: 0.2.
        may high: Located<f64>,
        /// Share of priority normal. Default: 0.1.
        may normal: Located<f64>,
        /// Share of priority low. Default: 0.05.
        may low: Located<f64>,
        /// Share of priority batch. Default: 0.02.
        may batch: Located<f64>,
    }

    /// One engine.
    Engine {
        /// Its URL: `http://host:port`, or `https`. A path before `/v1` is kept; a trailing slash or `/v1` is ignored.
        /// Not an address of this gateway.
        must url: Located<String>,
    }

    /// A DNS name whose addresses are the engines of a pool.
    Dns {
        /// The name. Certificates of `https` engines must carry it.
        must name: Located<String>,
        /// The port of every engine.
        must port: Located<u64>,
        /// Cleartext or TLS. Default: http.
        may scheme: Located<EnumWord<Scheme>>,
        /// Interval of resolution. Default: 5s.
        may refresh: Located<Duration>,
        /// Which addresses are engines. `auto`: if the name has IPv4 and IPv6 addresses, only those of the family that
        /// answers, because an engine with an address of each is one engine. `both`: each address is an engine of its
        /// own. Default: auto.
        may family: Located<EnumWord<AddressFamily>>,
    }

    /// Kind of a pool's engines, and what is sent to them.
    EngineSort {
        /// The kind. It decides what may be injected, and whether metrics are scraped. Default: vllm.
        may kind: Located<EnumWord<EngineKind>>,
        /// Whether the engines run with priority scheduling (vLLM: `--scheduling-policy priority`). Each request then
        /// carries its priority, 0 for `critical` to 4 for `batch`. Only for kind vllm. The client's own `priority` is
        /// removed in any case. Default: false.
        may priority_scheduling: Located<bool>,
        /// File with a bearer token for the engines. The client's own credential is not sent, unless
        /// `forward_authorization` is set. Default: none.
        may api_key_file: Located<String>,
        /// Headers to set on every request. No message shows their values. Not allowed: `host`, `x-request-id`,
        /// `accept-encoding`, `content-encoding`, `expect` and framing headers; `authorization` not beside
        /// `api_key_file` or `forward_authorization`.
        may headers: Entries<Located<RedactedText>>,
        /// File with PEM root certificates that replace the system's for `https`.
        may ca_file: Located<String>,
        /// Whether the client's own credential is forwarded. Default: false.
        may forward_authorization: Located<bool>,
    }

    /// A health check.
    Health {
        /// Path of the GET. 2xx and 3xx are healthy. Another status or a refused connection ejects the engine at once;
        /// an engine that refuses connections is checked again every 250 ms. Default: /health.
        may path: Located<String>,
        /// Interval. Default: 2s.
        may every: Located<Duration>,
        /// Time limit. Three timeouts in a row eject an engine, unless a request succeeded there meanwhile, because an
        /// engine under load answers late. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// Scraping of the engines' metrics.
    Metrics {
        /// Path of the GET. Names of vLLM, SGLang, llama.cpp and Dynamo are understood. Default: /metrics.
        may path: Located<String>,
        /// Interval. Default: 2s.
        may every: Located<Duration>,
        /// Time limit. Without metrics the gateway relies on its own counts. Default: 2s.
        may timeout: Located<Duration>,
    }

    /// Retries before the first byte of a response.
    Retries {
        /// Retries after a fault (5xx, reset, truncation). Default: 1.
        may after_fault: Located<u64>,
        /// Retries after push-back (429, 503, 529). Default: 3.
        may after_push_back: Located<u64>,
        /// Retry budget as a share of recent requests. May be 0. Default: 0.2.
        may share: Located<f64>,
        /// Retries per 10 s that are always allowed. Default: 10.
        may floor_per_10s: Located<u64>,
    }

    /// The circuit breaker of an engine.
    Breaker {
        /// Faults within `within` that open the breaker. Default: 5.
        may faults: Located<u64>,
        /// Time within which faults are counted. Default: 10s.
        may within: Located<Duration>,
        /// How long an open breaker ejects the engine; then one request probes it. Default: 5s.
        may open: Located<Duration>,
    }

    /// Cool-down of an engine after push-back.
    CoolDown {
        /// Length if the engine sends no `Retry-After`. Default: 1s.
        may default: Located<Duration>,
        /// Longest, whatever the engine asks for. Default: 60s.
        may max: Located<Duration>,
    }

    /// Fields that may be injected into requests.
    Inject {
        /// `stream_options.include_usage` in streaming requests, for exact token counts. Default: true, but for kind
        /// generic.
        may usage: Located<bool>,
        /// vLLM's `continuous_usage_stats`: exact counts for truncated responses, and a TPOT that includes the stop
        /// token ([semantics](semantics.md#2-measures)). Every event is edited. Default: false.
        may continuous_usage: Located<bool>,
    }

    /// One item of `routes`.
    Route {
        /// Models, after aliasing; `*` matches any text.
        must model: OneOrMany<Located<String>>,
        /// Classes. Default: all.
        may class: OneOrMany<Located<String>>,
        /// Pools, in order of preference. The next pool is used if the earlier one has no engine for the request,
        /// cannot be connected to, has pushed back with all engines, or has a queue that is full or too long for the
        /// request ([admission](admission.md#spilling-to-the-next-pool)).
        must pools: OneOrMany<Located<String>>,
    }

    /// Model names.
    Models {
        /// Aliases: clients' names to engines' names. Responses keep the engine's name.
        may aliases: Entries<Located<String>>,
    }

    /// A tenant.
    Tenant {
        /// Its name: a metric label.
        must tenant: Located<String>,
        /// Its API keys as hashes; `goodput key new` creates one.
        may keys: NonEmpty<Key>,
        /// File with one hash per line, followed by an optional label; `#` begins a comment.
        may keys_file: Located<String>,
        /// Classes it may use. Default: all.
        may classes: OneOrMany<Located<String>>,
        /// Its limits. Default: none.
        may limits: Limits,
        /// What happens to requests beyond the limits: a 429 (`reject`), or service behind all others while seats are
        /// free (`demote`). Default: reject.
        may when_over_limit: Located<EnumWord<OverLimit>>,
    }

    /// A store shared by several gateways.
    SharedStore {
        /// Redis or Valkey.
        must redis: Redis,
    }

    /// Redis or Valkey.
    Redis {
        /// Its URL: `redis://HOST:PORT`, with TLS `rediss://HOST:PORT` (the system's roots; `SSL_CERT_FILE` names
        /// others), or `unix:///PATH`. It may contain a user, a database number, and a password if the URL comes from
        /// a variable.
        must url: Located<String>,
        /// File with the password, one line. Read at start.
        may password_file: Located<String>,
        /// What happens while the store is unavailable: this gateway's share of each limit applies (`open`), or
        /// requests get a 503 (`closed`). Default: open.
        may on_failure: Located<EnumWord<OnFailure>>,
        /// Longest time that a request waits for the store, and that a call may take; at most 1s. Default: 50ms.
        may timeout: Located<Duration>,
        /// Prefix of its keys. Gateways with the same prefix in the same database share their limits. Default: goodput.
        may key_prefix: Located<String>,
        /// Whether gateways tell each other through it what they have at the engines and in their queues, so that several
        /// keep one order ([shared-limits.md](shared-limits.md#one-order-over-several-gateways)). `false` if gateways share
        /// limits but have different engines of the same names. Default: true.
        may share_queues: Located<bool>,
    }

    /// An API key.
    Key {
        /// Its label, for rules.
        may label: Located<String>,
        /// BLAKE3 hash of the key, 64 hexadecimal digits. The key itself is stored nowhere.
        must blake3: Located<RedactedText>,
    }

    /// Logs, metrics, traces and the journal.
    Telemetry {
        /// Access log: one JSON line per request on standard output ([fields](operations.md#the-access-line)). Changes
        /// take effect after a restart. Default: stdout.
        may access_log: Located<EnumWord<AccessLog>>,
        /// Labels omitted from request metrics; series that differ only in them are merged
        /// ([number of series](operations.md#how-many-series)). After a reload that changes it, counting continues under
        /// the new labels, and old counts stay under the old ones until a restart: sums stay right. Default: none.
        may drop_labels: OneOrMany<Located<EnumWord<RequestLabel>>>,
        /// Whether histograms have the label `model` too. Default: false.
        may histograms_by_model: Located<bool>,
        /// Whether each engine has series of its own, about 100: `goodput_engine_slo_met_total`,
        /// `goodput_engine_slo_total`, and histograms of TTFT and TPOT. They show which engine misses; the
        /// [status page](status-page.md) shows the last hour of each in any case. Disabling it deletes the counts.
        /// Default: false.
        may series_by_engine: Located<bool>,
        /// The file that keeps the counts of classes over restarts. Changes take effect after a restart.
        /// Default: none; windows begin with the process.
        may slo_state: SloState,
        /// The Prometheus from which budgets of all gateways together are read. Changes take effect after a restart.
        /// Default: none; each gateway shows its own.
        may prometheus: PrometheusSource,
        /// Export of [traces](tracing.md) to a collector, over OTLP in HTTP and protobuf. Changes take effect after a
        /// restart. Default: none.
        may otlp: Otlp,
        /// The [journal](journal.md): one line in a file for each finished request, with lengths and times, without
        /// content. Changes take effect after a restart. Default: none.
        may journal: Journal,
    }

    /// Export of traces.
    Otlp {
        /// The collector: `http://HOST:4318`, or `https`. Spans go to `/v1/traces` below it.
        must endpoint: Located<String>,
        /// File with headers for the collector, `name: value` on each line; `#` begins a comment. Read at start.
        may headers_file: Located<String>,
        /// File with the roots of the collector's certificate, in PEM. Default: the system's.
        may ca_file: Located<String>,
        /// Share of the traces that begin here which are kept, 0 to 1. Misses are always kept. Default: 0.01.
        may ratio: Located<f64>,
        /// Whether a request with a `traceparent` continues that trace and its sampling decision. Default: true.
        may follow_parent: Located<bool>,
        /// Attributes of the resource, beside `service.name`, `service.version` and `service.instance.id`, or in place
        /// of them.
        may resource: Entries<Located<String>>,
    }

    /// The Prometheus from which budgets are read.
    PrometheusSource {
        /// Its URL: `http://HOST:9090`, or `https`, with the path before `/api/v1/query` if there is one.
        must url: Located<String>,
        /// File with a bearer token, one line. Read at start.
        may token_file: Located<String>,
        /// File with headers, `name: value` on each line; `#` begins a comment. Read at start.
        may headers_file: Located<String>,
        /// File with the roots of its certificate, in PEM. Default: the system's.
        may ca_file: Located<String>,
        /// Interval of reads, at least 1s. Default: 1m.
        may every: Located<Duration>,
        /// Time limit of one query. Default: 10s.
        may timeout: Located<Duration>,
        /// Labels that distinguish these gateways from others that it scrapes, like `--select` of `goodput rules`.
        may select: Entries<Located<String>>,
    }

    /// The journal.
    Journal {
        /// The file, relative to the directory of the settings. Rotated files stand beside it. Each gateway needs its
        /// own.
        must path: Located<String>,
        /// File with a secret, one line of at least 16 characters, by which tenants and prompts are hashed. Gateways
        /// with the same secret write the same hashes. Default: a random key per process.
        may hash_key_file: Located<String>,
        /// Size at which the file is rotated. Default: 256MiB.
        may max_size: Located<SizeScalar>,
        /// Age at which the file is rotated, unless it is empty. Default: 1d.
        may max_age: Located<Duration>,
        /// Number of rotated files that are kept; the oldest are deleted. Default: 14.
        may keep: Located<u64>,
        /// Whether rotated files are compressed. Default: true.
        may gzip: Located<bool>,
        /// Longest time before a line is handed to the system, at most 1m. Default: 1s.
        may flush: Located<Duration>,
    }

    /// The file that keeps the counts of classes over restarts.
    SloState {
        /// The file; its directory must exist. Each gateway needs one of its own, on a disk that outlives its container.
        must path: Located<String>,
        /// Interval of saving, at least 1s. It is also saved at shutdown; a crash loses what was counted since the last
        /// save. Default: 1m.
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
                /// Tokens that may come at once: the size of a bucket that refills evenly. Default: one minute's worth.
                may tokens_burst: Located<u64>,
                /// Prompt tokens.
                may input_tokens_per_minute: Located<u64>,
                /// Prompt tokens that may come at once. Default: one minute's worth.
                may input_tokens_burst: Located<u64>,
                /// Output tokens.
                may output_tokens_per_minute: Located<u64>,
                /// Output tokens that may come at once. Default: one minute's worth.
                may output_tokens_burst: Located<u64>,
                /// Requests that reached an engine, however they ended, and lists of models
                /// ([what counts](admission.md#limits-of-a-tenant)).
                may requests_per_minute: Located<u64>,
                /// Requests that may come at once. Default: one minute's worth.
                may requests_burst: Located<u64>,
                /// Concurrent requests.
                may concurrent_requests: Located<u64>,
                $($own)*
            }
        )*}

        $(impl $name {
            /// The keys that limit requests.
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

/// The word of `limits_store` beside a shared store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InProcess;

impl EnumScalar for InProcess {
    const WORDS: &'static [(&'static str, Self)] = &[("memory", InProcess)];
    const BESIDES: &'static [&'static str] = &["{redis: {url: redis://HOST:PORT}}"];
}

impl EnumScalar for OnFailure {
    const WORDS: &'static [(&'static str, Self)] = &[("open", OnFailure::Open), ("closed", OnFailure::Closed)];
}

/// Actions without a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActionWord {
    Defer,
    ShedLower,
    ReasoningOff,
    Spill,
}

impl EnumScalar for ActionWord {
    const WORDS: &'static [(&'static str, Self)] = &[
        (ActionKind::Defer.as_str(), ActionWord::Defer),
        (ActionKind::ShedLower.as_str(), ActionWord::ShedLower),
        (ActionKind::ReasoningOff.as_str(), ActionWord::ReasoningOff),
        (ActionKind::Spill.as_str(), ActionWord::Spill),
    ];
    const BESIDES: &'static [&'static str] = &["{cap_output: N}"];
}

impl EnumScalar for Priority {
    const WORDS: &'static [(&'static str, Self)] = &[
        (Priority::Critical.as_str(), Priority::Critical),
        (Priority::High.as_str(), Priority::High),
        (Priority::Normal.as_str(), Priority::Normal),
        (Priority::Low.as_str(), Priority::Low),
        (Priority::Batch.as_str(), Priority::Batch),
    ];
}

impl EnumScalar for TtftCounts {
    const WORDS: &'static [(&'static str, Self)] =
        &[("first_token", TtftCounts::FirstToken), ("first_visible_token", TtftCounts::FirstVisibleToken)];
}

impl EnumScalar for TargetHeaders {
    const WORDS: &'static [(&'static str, Self)] =
        &[("off", TargetHeaders::Off), ("tighten", TargetHeaders::Tighten), ("may_loosen", TargetHeaders::MayLoosen)];
}

impl EnumScalar for NonStreaming {
    const WORDS: &'static [(&'static str, Self)] =
        &[("judged", NonStreaming::Judged), ("excluded", NonStreaming::Excluded)];
}

impl EnumScalar for UploadRule {
    const WORDS: &'static [(&'static str, Self)] =
        &[("excluded", UploadRule::Excluded), ("counted", UploadRule::Counted)];
}

impl EnumScalar for Reasoning {
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
    const WORDS: &'static [(&'static str, Self)] = &[
        ("least_work", BalanceBy::LeastWork),
        ("round_robin", BalanceBy::RoundRobin),
        ("prefix_affinity", BalanceBy::PrefixAffinity),
        ("session_affinity", BalanceBy::SessionAffinity),
    ];
}

impl EnumScalar for WhenHopeless {
    const WORDS: &'static [(&'static str, Self)] =
        &[("demote", WhenHopeless::Demote), ("shed", WhenHopeless::Shed), ("serve", WhenHopeless::Serve)];
}

impl EnumScalar for OverLimit {
    const WORDS: &'static [(&'static str, Self)] = &[("reject", OverLimit::Reject), ("demote", OverLimit::Demote)];
}

impl EnumScalar for EngineKind {
    const WORDS: &'static [(&'static str, Self)] = EngineKind::ALL;
}

impl EnumScalar for Scheme {
    const WORDS: &'static [(&'static str, Self)] = &[("http", Scheme::Http), ("https", Scheme::Https)];
}

impl EnumScalar for AddressFamily {
    const WORDS: &'static [(&'static str, Self)] = AddressFamily::ALL;
}

impl EnumScalar for RequestLabel {
    const WORDS: &'static [(&'static str, Self)] = &[
        (RequestLabel::Length.as_str(), RequestLabel::Length),
        (RequestLabel::Pool.as_str(), RequestLabel::Pool),
        (RequestLabel::Model.as_str(), RequestLabel::Model),
        (RequestLabel::Tenant.as_str(), RequestLabel::Tenant),
    ];
}

impl EnumScalar for AccessLog {
    const WORDS: &'static [(&'static str, Self)] = &[("stdout", AccessLog::Stdout), ("off", AccessLog::Off)];
}
