//! Inline SLO-aware gateway for LLM inference engines: judges every request against what its
//! class was promised, and counts what was kept. This page is the map of the house; what is
//! measured and what counts is `docs/semantics.md`.
//!
//! # Rooms
//!
//! A room is a module that is named by what it does, and the order of the names is the order
//! of the work:
//!
//! accept → identify → inspect → classify → admit → route → forward → observe → judge → record
//!
//! | layer | room | purpose | public face |
//! | --- | --- | --- | --- |
//! | 0 words | [`types`] | The words of the domain, with their units. | [`types::Tick`], [`types::Tokens`], [`types::ApiPath`] |
//! | | [`clock`] | The only reader of time. | [`clock::Clock`] |
//! | | [`json`] | One push tokenizer for requests, answers and events. | [`json::Tokenizer`] |
//! | | [`http1`] | The HTTP/1.1 codec: heads and bodies of both directions, and what is refused of them. | [`http1::Framing`], [`http1::take_request_head`], [`http1::take_response_head`] |
//! | | `sync` | `parking_lot`'s locks; in unit tests also ones whose order of steps is tried. | |
//! | 1 pure | [`identify`] | Who asks: API key to tenant. | [`identify::Keyring`] |
//! | | [`inspect`] | One reading of a request body. | [`inspect::Scanner`], [`inspect::Facts`] |
//! | | [`classify`] | Which promise applies. | [`classify::Rules`] |
//! | | [`admit::overload_control`] | What is given up for a class under load, and from when to when. | [`admit::overload_control::OverloadController`], [`admit::overload_control::OverloadLevel`] |
//! | | [`admit::overload`] | What the levels in force leave of a request's route. | [`admit::overload::OverloadSnapshot`] |
//! | | [`admit::spill`] | When a request that waits goes on to the next pool of its route. | [`admit::spill::SpillSearch`] |
//! | | [`route`] | Which pools, which engine, and what comes after a failure; what engines' answers teach of latency and seats. | [`route::Routes`], [`route::Fleet`], [`route::retry`] |
//! | | [`observe`] | Bytes of an answer with their moments to a timeline. | [`observe::Observer`], [`observe::Timeline`] |
//! | | [`rewrite`] | Byte splices into bodies; removal of events that we caused. | [`rewrite::edits`](rewrite::edits()), [`rewrite::EventGate`] |
//! | | [`judge`] | Did this request keep its promise? | [`judge::judge`](judge::judge()), [`judge::Verdict`] |
//! | | [`reject`] | Every early end: what the client is told, whose fault it is. | [`reject::Rejection`] |
//! | | [`record::burn`] | Windows, attainment, burn rate, budget. | [`record::burn::Burn`] |
//! | | [`capacity`] | Replicas, memory and money for a forecast; waits in queues. | [`capacity::plan`](capacity::plan()), [`capacity::queueing`] |
//! | | [`trace`] | Recorded traffic: readers of journals and public formats, windows and rates. | [`trace::TraceReader`], [`trace::Reshape`] |
//! | | [`mod@record::journal`] | The format of the journal, read and written. | [`record::journal::JournalLine`] |
//! | | [`record::trace`] | Trace context, and which traces are kept. | [`record::trace::TraceParent`] |
//! | 2 settings, lines | [`config`] | YAML to checked settings, and again when it changes. | [`config::load`], [`config::Settings`] |
//! | | [`dial`] | Opens a connection to an engine; the seam that tests replace. | [`dial::Dial`] |
//! | 3 shell | [`accept`] | Listeners, TLS, limits on clients, drain. | [`accept::Listener`], [`accept::Drain`] |
//! | | [`admit::pool_queue`] | Where requests wait for a seat; `limit` (token budgets) and `queue` (the order) are pure. | [`admit::pool_queue::PoolQueue`], [`admit::pool_queue::Seat`] |
//! | | [`admit::redis`] | The tenants' limits where several gateways share them, in Redis or Valkey. | [`admit::redis::RedisLimiter`] |
//! | | [`route::probe`] | Health checks, engines' metrics, DNS. | [`route::probe::Probes`] |
//! | | [`forward`] | One attempt: head held until the first token, then relay. | [`forward::start`](forward::start()), [`forward::Relay`] |
//! | | [`record`] | Written down once: metrics, the access line, the journal, spans. | [`record::Recorder`], [`record::ActiveRequest`] |
//! | 4 story | [`gateway`] | The life of one request, told once. | [`gateway::Gateway`] |
//! | | [`admin`] | The operators' port. | [`admin::router`] |
//! | 5 tools | [`sim`] | Simulated engines, traffic, the demo, a whole fleet in virtual time. | [`sim::engine::SimEngine`], [`sim::fleet`] |
//! | | [`load`] | Load on a service, open loop, and judged. | [`load::run`](load::run()), [`load::LoadRecord`] |
//! | | [`cli`] | The commands. | [`cli::run`] |
//!
//! A room knows what lies below it, and the shell rooms do not know each other. Pure rooms know
//! no sockets, runtime, files, environment, chance or clock: whatever they need is an argument.
//! Rooms do not know `config`; each owns the type of its settings, and `config` builds it.
//! `tests/architecture.rs` says which line strayed.
//!
//! # Glossary
//!
//! One word, one meaning, in code, docs, logs and metrics.
//!
//! | word | meaning | in the field |
//! | --- | --- | --- |
//! | class | objectives that must hold together on one request | SLO class |
//! | objective | one threshold with its attainment | SLO objective |
//! | tenant, key | who sends a request; an API key belongs to a tenant | LiteLLM team and key |
//! | pool, engine | interchangeable replicas; one of them | Envoy cluster and endpoint |
//! | route | model and class to pools, in order | Envoy route |
//! | priority | critical, high, normal, low or batch | Kubernetes APF priority level |
//! | seat | one concurrent request at an engine | Kubernetes APF seat |
//! | concurrency limit | seats of an engine, fixed or found (`auto`) | adaptive concurrency |
//! | request, attempt, response | what a client sends; one try at an engine; what comes back | hyper, Envoy |
//! | connection, stream | a transport connection; one HTTP/2 stream on it | hyper, h2 |
//! | prompt tokens, prefill, decode, output tokens | an engine's input, its two phases, its output | vLLM |
//! | arrival, start, first token, last token, finish, end | clock points of a request | vLLM, GenAI conventions |
//! | TTFT, TPOT, ITL, E2E | measures between clock points | all of them |
//! | outcome | met, missed or excluded, once per request | good, bad and ignored event |
//! | rejection | an early end that the gateway makes | tower, axum |
//! | degradation, overload level | what is given up for a class under load | brown-out |
//! | burn rate, budget, window | of an SLO | SRE workbook |
//! | reservation, settle, refund | tokens set aside for a request, and their settlement | token bucket |
//! | lease | tokens that a gateway took from the shared store | |
//! | health, breaker, cool-down, retry budget | of an engine or its pool | Envoy outlier detection |
//! | snapshot | the settings that a request keeps to its end | |
//!
//! # The life of a request
//!
//! To be read in [`gateway`]: its beginning in `mod.rs`, which also draws the sequence, its end in
//! `completion.rs`.
//!
//! 1. `accept` takes the connection and reads the head within its limits. This is *arrival*:
//!    the clock of every objective starts.
//! 2. The request takes one snapshot of the settings and keeps it to its end. `identify` finds
//!    the tenant.
//! 3. The body is read once, frame by frame, while `inspect` scans it; it stays a list of
//!    frames and never becomes a tree.
//! 4. `classify` finds the class; `route` names the pools, in order.
//! 5. `admit` sets aside what the tenant's limits allow, all of them together, and then waits
//!    for a seat in front of a pool where the settings limit what runs there. What it holds is
//!    settled with the answer's end. A stream that waits long may get its head meanwhile; the rest of
//!    the story is then told behind it.
//! 6. `route` picks an engine, `rewrite` splices what must change, `forward` makes one attempt
//!    and holds the answer's head until the first token. If the attempt fails before that, the
//!    pure rules of [`route::retry`] say what comes next.
//! 7. From the first token on there is no other engine to try. Whole events pass as they
//!    arrive, bytes unchanged, and `observe` watches beside them.
//! 8. Where the answer's body ends (by its last event, an error, a limit, or because it was
//!    dropped: the client left), `judge` weighs the timeline and `record` notes one
//!    [`record::RequestRecord`]. Every metric and the access line are made from it:
//!    `met + missed + excluded = finished`.
//!
//! Freeing is ownership: all that a request holds lives in the body of its answer, and goes
//! with it. No detached task holds a call to an engine.
//!
//! # Watching and judging without a gateway
//!
//! Both are pure, so that load tools judge as the gateway does:
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
//! And in the code: a tree of JSON on the path of a request, a channel between the reader of an
//! engine and the writer to a client, a lock per event, a second place that counts requests,
//! `unsafe`.

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
