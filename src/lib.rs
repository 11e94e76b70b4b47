//! Inline SLO-aware gateway for LLM inference engines: judges every request against the objectives
//! of its class, and counts the verdicts. This page is the map of the source; `docs/semantics.md`
//! defines the measures.
//!
//! # Rooms
//!
//! A room is a top-level module, named by what it does. A request passes them in this order:
//!
//! accept → identify → inspect → classify → admit → route → forward → observe → judge → record
//!
//! | layer | room | purpose | main items |
//! | --- | --- | --- | --- |
//! | 0 types | [`types`] | Domain types with their units. | [`types::Tick`], [`types::Tokens`], [`types::ApiPath`] |
//! | | [`clock`] | The only reader of time. | [`clock::Clock`] |
//! | | [`json`] | One push tokenizer for requests, responses and events. | [`json::Tokenizer`] |
//! | | [`http1`] | HTTP/1.1 codec: heads and bodies of both directions, and the rules that reject them. | [`http1::Framing`], [`http1::take_request_head`], [`http1::take_response_head`] |
//! | | `sync` | Lock types: `parking_lot`, in interleaving tests `shuttle`. | |
//! | 1 pure | [`identify`] | API key to tenant. | [`identify::Keyring`] |
//! | | [`inspect`] | Facts of a request body, in one pass. | [`inspect::Scanner`], [`inspect::Facts`] |
//! | | [`classify`] | SLO class of a request, by rules. | [`classify::Rules`] |
//! | | [`admit::overload_control`] | Overload levels of a class, and when they are entered and left. | [`admit::overload_control::OverloadController`], [`admit::overload_control::OverloadLevel`] |
//! | | [`admit::overload`] | Effect of the current levels on a request and its route. | [`admit::overload::OverloadSnapshot`] |
//! | | [`admit::spill`] | When a waiting request spills to the next pool of its route. | [`admit::spill::SpillSearch`] |
//! | | [`route`] | Choice of pool and engine, retry rules, learned latency and concurrency limits. | [`route::Routes`], [`route::Fleet`], [`route::retry`] |
//! | | [`observe`] | Timestamped bytes of a response to a timeline. | [`observe::Observer`], [`observe::Timeline`] |
//! | | [`rewrite`] | Byte splices into bodies; removal of injected events. | [`rewrite::edits`](rewrite::edits()), [`rewrite::EventGate`] |
//! | | [`judge`] | Verdict on a timeline: met, missed or excluded. | [`judge::judge`](judge::judge()), [`judge::Verdict`] |
//! | | [`reject`] | Every early end: the client's message, the log text, the outcome. | [`reject::Rejection`] |
//! | | [`record::burn`] | Windows, attainment, burn rate, error budget. | [`record::burn::Burn`] |
//! | | [`capacity`] | Replicas, memory and cost for a forecast; queueing formulas. | [`capacity::plan`](capacity::plan()), [`capacity::queueing`] |
//! | | [`trace`] | Recorded traffic: readers of journals and public formats, windows and rates. | [`trace::TraceReader`], [`trace::Reshape`] |
//! | | [`mod@record::journal`] | Format of the journal, for reading and writing. | [`record::journal::JournalLine`] |
//! | | [`record::trace`] | Trace context and sampling. | [`record::trace::TraceParent`] |
//! | 2 settings, connections | [`config`] | YAML to checked settings, and reload. | [`config::load`], [`config::Settings`] |
//! | | [`dial`] | Opens a connection to an engine; replaced in tests. | [`dial::Dial`] |
//! | 3 shell | [`accept`] | Listeners, TLS, limits on clients, drain. | [`accept::Listener`], [`accept::Drain`] |
//! | | [`admit::pool_queue`] | Async queue for seats, around the pure `limit` (token buckets) and `queue` (order). | [`admit::pool_queue::PoolQueue`], [`admit::pool_queue::Seat`] |
//! | | [`admit::redis`] | Tenant limits shared by several gateways, in Redis or Valkey. | [`admit::redis::RedisLimiter`] |
//! | | [`route::probe`] | Health checks, engines' metrics, DNS. | [`route::probe::Probes`] |
//! | | [`forward`] | One attempt: head held until the first token, then relay. | [`forward::start`](forward::start()), [`forward::Relay`] |
//! | | [`record`] | One record per request: metrics, access line, journal, spans. | [`record::Recorder`], [`record::ActiveRequest`] |
//! | 4 story | [`gateway`] | The life of a request, in order. | [`gateway::Gateway`] |
//! | | [`admin`] | The admin port. | [`admin::router`] |
//! | 5 tools | [`sim`] | Simulated engines, traffic, the demo, fleets in virtual time. | [`sim::engine::SimEngine`], [`sim::fleet`] |
//! | | [`load`] | Open-loop load generator that judges like the gateway. | [`load::run`](load::run()), [`load::LoadRecord`] |
//! | | [`cli`] | The commands. | [`cli::run`] |
//!
//! A room may use the rooms of lower layers, and shell rooms do not use each other. Pure rooms use no sockets,
//! runtime, files, environment, randomness or clock: these are arguments. Rooms do not use `config`; each owns
//! its settings type, and `config` builds it. Files of a room do not use each other in a circle. `tests/architecture.rs`
//! enforces both.
//!
//! # Glossary
//!
//! One meaning per word, in code, docs, logs and metrics.
//!
//! | word | meaning | in the field |
//! | --- | --- | --- |
//! | class | objectives that must hold together on one request | SLO class |
//! | objective | one threshold with its attainment | SLO objective |
//! | tenant, key | the owner of an API key; requests are accounted to it | LiteLLM team and key |
//! | pool, engine | interchangeable replicas; one of them | Envoy cluster and endpoint |
//! | route | model and class to pools, in order | Envoy route |
//! | priority | critical, high, normal, low or batch | Kubernetes APF priority level |
//! | seat | one concurrent request at an engine | Kubernetes APF seat |
//! | concurrency limit | seats of an engine, fixed or found (`auto`) | adaptive concurrency |
//! | request, attempt, response | a client's request; one try at an engine; its response | hyper, Envoy |
//! | connection, stream | a transport connection; one HTTP/2 stream on it | hyper, h2 |
//! | prompt tokens, prefill, decode, output tokens | an engine's input, its two phases, its output | vLLM |
//! | arrival, start, first token, last token, finish, end | clock points of a request | vLLM, GenAI conventions |
//! | TTFT, TPOT, ITL, E2E | measures between clock points | all of them |
//! | outcome | met, missed or excluded, once per request | good, bad and ignored event |
//! | rejection | an early end that the gateway makes | tower, axum |
//! | degradation, overload level | actions of a class under load | brown-out |
//! | burn rate, budget, window | of an SLO | SRE workbook |
//! | reservation, settle, refund | tokens set aside for a request, and their settlement | token bucket |
//! | lease | tokens that a gateway took from the shared store | |
//! | health, breaker, cool-down, retry budget | of an engine or its pool | Envoy outlier detection |
//! | snapshot | the settings that a request keeps to its end | |
//!
//! # The life of a request
//!
//! `gateway/mod.rs` has the beginning and draws the sequence; `gateway/completion.rs` has the end.
//!
//! 1. `accept` takes the connection and parses the head within its limits. This is *arrival*; the objectives'
//!    clock starts.
//! 2. The request takes one snapshot of the settings and keeps it to its end. `identify` finds the tenant.
//! 3. The body is read frame by frame while `inspect` scans it. It stays a list of frames and never becomes a tree.
//! 4. `classify` finds the class; `route` finds the pools, in order.
//! 5. `admit` reserves from all limits of the tenant together, then waits for a seat if the pool has a concurrency
//!    limit. The reservation is settled when the response ends. A stream that waits long may get its head early
//!    (`gateway/early_head.rs`); the remaining steps then run behind that head.
//! 6. `route` picks an engine, `rewrite` splices changes into the body, and `forward` makes one attempt and holds the
//!    response head until the first token. If the attempt fails before that, [`route::retry`] decides what is next.
//! 7. After the first token no other engine is tried. Whole events are relayed as they arrive, unchanged, and
//!    `observe` builds the timeline.
//! 8. When the response body ends (by its last event, an error or a limit, or because it was dropped: the client
//!    left), `judge` evaluates the timeline and `record` writes one [`record::RequestRecord`]. Every metric and the
//!    access line come from it: `met + missed + excluded = finished`.
//!
//! Ownership frees resources: everything that a request holds lives in its response body and is released with it. No
//! detached task owns a call to an engine.
//!
//! # Where to look
//!
//! | question | answer |
//! | --- | --- |
//! | Where is TTFT judged? | `judge/evaluate.rs` (`stream_states`), on the moments of `observe/timeline_builder.rs` |
//! | Where is a condition of a classification rule? | evaluated in `classify/when.rs`, written in `config/schema.rs`, checked in `config/check/rules.rs` |
//! | Why did a stream count as truncated? | `judge/fault.rs`: it ended before its `finish`, which `observe/timeline_builder.rs` finds |
//! | Where does a metric come from? | `record/`, from the fields of [`record::RequestRecord`] |
//!
//! # Observing and judging without a gateway
//!
//! Both are pure, so load tools judge like the gateway:
//!
//! ```
//! use std::time::Duration;
//!
//! use bytes::Bytes;
//! use goodput::judge::{JudgeContext, Missed, Objective, Objectives, Outcome, judge};
//! use goodput::observe::{Ending, ResponseExpectation, Observer, ResponseFormat, ObserverOptions};
//! use goodput::types::{Dialect, Tick};
//!
//! let mut seen = Observer::new(ResponseExpectation::stream(Dialect::Chat, Tick::ZERO), ResponseFormat::Events, 200, ObserverOptions::default());
//! let mut to_the_client = Vec::new();
//! for (millis, event) in [
//!     (20, "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"}}]}\n\n"), // no token
//!     (740, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hel\"}}]}\n\n"),
//!     (780, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"lo\"},\"finish_reason\":\"stop\"}]}\n\n"),
//!     (781, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2}}\n\n"),
//!     (782, "data: [DONE]\n\n"),
//! ] {
//!     seen.frame(Bytes::from_static(event.as_bytes()), Tick::from_millis(millis), &mut |piece, _| {
//!         to_the_client.push(piece);
//!     });
//! }
//! let timeline = seen.end(Ending::Clean, Tick::from_millis(783));
//! assert_eq!(to_the_client.len(), 5, "every event passes");
//! assert_eq!(timeline.first_token, Some(Tick::from_millis(740)), "a role is no token");
//!
//! let ttft = |millis| Objectives {
//!     ttft: Some(Objective { threshold: Duration::from_millis(millis), attainment: 0.95 }),
//!     ..Objectives::default()
//! };
//! let case = JudgeContext::of(Dialect::Chat);
//! assert_eq!(judge(&timeline, &ttft(1200), &case).outcome, Outcome::Met);
//! assert_eq!(judge(&timeline, &ttft(500), &case).outcome, Outcome::Missed(Missed::Ttft));
//! ```
//!
//! # Deliberately absent
//!
//! Translation between providers, prompt caching, guardrails, money budgets, a database,
//! orchestration of prefill and decode, stored and background responses, CORS and OPTIONS,
//! WebSocket and realtime endpoints, the PROXY protocol and trusted forwarding headers.
//!
//! In the code: JSON trees on the data path, a channel between an engine's reader and a client's writer, a
//! lock per event, a second place that counts requests, `unsafe`.

pub mod accept;
pub mod admin;
pub mod admit;
pub mod alerts;
pub mod capacity;
pub mod classify;
pub mod cli;
pub mod clock;
pub mod config;
pub mod dial;
pub mod forward;
pub mod gateway;
pub mod http1;
pub mod identify;
pub mod inspect;
pub mod json;
pub mod judge;
pub mod load;
pub mod observe;
pub mod record;
pub mod reject;
pub mod rewrite;
pub mod route;
pub mod sim;
mod sync;
pub mod trace;
pub mod types;
