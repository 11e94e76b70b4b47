//! Nobody's neighbour (`docs/semantics.md` 4; C94 to C99 of `docs/cases.md`): whatever one tenant
//! sends, learns, withholds or times, another tenant's requests end as they would without it.

use std::sync::Arc;

use crate::support::scripted_engine::{Received, Script, ScriptedEngine, fixtures::*};
use bytes::Bytes;
use futures_util::future::join_all;
use goodput::types::ClientState;
use http::Request;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::admission::by;
use crate::http::slow_body;
use crate::retries::good;
use crate::support::*;

/// The tenant that behaves, and the one that does what it can.
const WELL: &str = "sk-globex";
const ILL: &str = "sk-acme";

/// What one tenant tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    /// C94: a small body that unfolds, a long one that comes slowly, more choices than anybody has.
    Unfolds,
    LongBody,
    ManyChoices,
    /// C95: the mark of its own running request, sent back with nothing, and with other things.
    Mark,
    /// C96: the last byte comes late.
    SlowHands,
    /// C97: what the engine refuses, and answers that are left at every point.
    Refused,
    LeavesBeforeTheHead,
    LeavesMidway,
    LeavesAtTheFinish,
    /// C98: long answers into the class's limits.
    IntoTotal,
    IntoFirstToken,
    IntoIdle,
    /// C99: bytes ahead of their turn, and away.
    SendsAheadAndLeaves,
    /// It does not read.
    Unread,
    /// Requests at which every engine fails.
    Fails,
    FailsInBand,
    Resets,
    /// What the gateway refuses.
    Stored,
    Steers,
    Miscased,
    UnknownModel,
    UnknownPath,
    BadHead,
    BrokenBody,
    UnknownKey,
    /// A stream of HTTP/2 that is reset.
    ResetsItsStream,
}

const MOVES: [Move; 26] = [
    Move::Unfolds,
    Move::LongBody,
    Move::ManyChoices,
    Move::Mark,
    Move::SlowHands,
    Move::Refused,
    Move::LeavesBeforeTheHead,
    Move::LeavesMidway,
    Move::LeavesAtTheFinish,
    Move::IntoTotal,
    Move::IntoFirstToken,
    Move::IntoIdle,
    Move::SendsAheadAndLeaves,
    Move::Unread,
    Move::Fails,
    Move::FailsInBand,
    Move::Resets,
    Move::Stored,
    Move::Steers,
    Move::Miscased,
    Move::UnknownModel,
    Move::UnknownPath,
    Move::BadHead,
    Move::BrokenBody,
    Move::UnknownKey,
    Move::ResetsItsStream,
];

/// Two engines without seats, or with some that either tenant may have half of.
fn yaml(has_seats: bool) -> Yaml {
    let hash = |key: &str| blake3::hash(key.as_bytes()).to_hex().to_string();
    let tenant = |name: &str, key: &str, more: &str| {
        format!("  - {{tenant: {name}, keys: [{{label: {name}, blake3: \"{}\"}}]{more}}}\n", hash(key))
    };
    let limits = ", limits: {concurrent_requests: 12}";
    let tenants = tenant("acme", ILL, if has_seats { limits } else { "" }) + &tenant("globex", WELL, "");
    let levels = "degrade: [{action: {cap_output: 5}, enter_when: {burn_rate_above: 1.5}}, {action: shed_lower, enter_when: {burn_rate_above: 3}}]";
    let yaml = Yaml::default()
        .engines_of_first(&["e1", "e2"])
        .class("timeouts: {first_token: 2s, idle: 1s, total: 3s}")
        .class(levels)
        .with("breaker: {faults: 3, within: 10s, open: 5s}")
        .top("listen: {max_body: 1MiB, max_bodies: 2MiB, body_timeout: 3s}")
        .top(&format!("tenants:\n{tenants}"));
    if has_seats { yaml.with("max_concurrency_per_engine: 12") } else { yaml }
}

/// What an engine makes of a request: it does as that says.
fn plays(request: &Received) -> Script {
    let flows = (1..=600).fold(Script::stream(), |script, n| script.at(n * 50).say(t("a")));
    match request.header("x-plays") {
        None => good(),
        Some("flows") => flows,
        Some("silent") => Script::new().silence(),
        Some("stalls") => Script::stream().at(50).say(t("a")).say(t("b")).silence(),
        Some("finishes") => Script::stream().at(50).say(t("a")).say(f("stop")).at(900).say(u(9, 1)).say(d()).end(),
        Some("resets") => Script::new().at(20).reset(),
        Some("in-band") => Script::stream().at(20).say(error("out of memory", 500)).say(d()).end(),
        Some(code) => Script::json(code.parse().expect("a status"), "{}"),
    }
}

fn ill(body: Value, plays: &str) -> Ask {
    by(ILL, body).header("x-plays", plays)
}

/// Asks, reads `frames` frames of the answer, and leaves after so many milliseconds at the latest.
async fn leaves(house: &House, ask: Ask, frames: usize, patience: u64) {
    let reads = async {
        let mut reply = house.send(ask).await;
        for _ in 0..frames {
            reply.frame().await;
        }
    };
    let _ = tokio::time::timeout(ms(patience), reads).await;
}

async fn all_of(house: &House, ask: Ask) {
    house.send(ask).await.whole().await;
}

fn raw_head(plays: &str, length: usize) -> String {
    format!(
        "POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {ILL}\r\nx-plays: {plays}\r\ncontent-length: {length}\r\n\r\n"
    )
}

fn gzip(body: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, body.as_bytes()).expect("memory");
    encoder.finish().expect("memory")
}

/// Does it, to the end.
async fn tries(house: &House, at_once: Move) {
    let with = |name: &str, value: Value| {
        let mut body = stream();
        body[name] = value;
        body
    };
    match at_once {
        Move::Unfolds => {
            let noise: String = (0..400_u64).map(|n| blake3::hash(&n.to_le_bytes()).to_hex().to_string()).collect();
            let body = format!("{{\"model\":\"m1\",\"x\":\"{noise}\",\"prompt\":[\"\"{}]}}", ",\"\"".repeat(300_000));
            let ask = Ask::raw("/v1/completions", gzip(&body)).header("authorization", &format!("Bearer {ILL}"));
            all_of(house, ask.header("content-encoding", "gzip")).await;
        }
        Move::LongBody => {
            let pieces = (0..10).map(|_| (100, Bytes::from(vec![b' '; 90_000]))).collect();
            let request = Request::post(CHAT).header("host", "g").header("authorization", format!("Bearer {ILL}"));
            let body = slow_body(house, pieces);
            let _ = house.send_body(request.body(body).expect("a request")).await.whole().await;
        }
        Move::ManyChoices => all_of(house, ill(with("n", json!(2_000_000)), "400")).await,
        Move::Mark => {
            let id = "mine";
            let ask = |body: Value, id: &str, plays: &str| ill(body, plays).header("x-request-id", id);
            let first = house.send(ask(stream(), id, "finishes"));
            let replayed = async {
                house.sleep(ms(30)).await;
                // Whatever such a mark looks like: those of others it cannot know.
                for mark in ["mine-0123456789abcdef", "mine", "req-00000000000000000000000000000000"] {
                    all_of(house, ask(json!({}), mark, "400")).await;
                    all_of(house, ask(stream(), mark, "400")).await;
                }
            };
            tokio::join!(async { first.await.whole().await }, replayed);
        }
        Move::SlowHands => {
            let (text, key) = (stream().to_string(), format!("Bearer {ILL}"));
            let (front, back) = text.split_at(20);
            let halves = vec![(0, Bytes::from(front.to_owned())), (1400, Bytes::from(back.to_owned()))];
            let request = Request::post(CHAT).header("host", "g").header("authorization", key);
            house.send_body(request.body(slow_body(house, halves)).expect("a request")).await.whole().await;
        }
        Move::Refused => all_of(house, ill(with("temperature", json!(-1)), "400")).await,
        Move::LeavesBeforeTheHead => leaves(house, ill(stream(), "silent"), 1, 700).await,
        Move::LeavesMidway => leaves(house, ill(stream(), "flows"), 5, 900).await,
        Move::LeavesAtTheFinish => leaves(house, ill(stream(), "finishes"), 1, 500).await,
        Move::IntoTotal => all_of(house, ill(stream(), "flows")).await,
        Move::IntoFirstToken => all_of(house, ill(stream(), "silent")).await,
        Move::IntoIdle => all_of(house, ill(stream(), "stalls")).await,
        Move::SendsAheadAndLeaves => {
            let (mut client, body) = (house.connect(256 * 1024), stream().to_string());
            client.send(raw_head("silent", body.len()) + &body).await;
            client.send(vec![b'G'; 70_000]).await;
            house.sleep(ms(300)).await;
        }
        Move::Unread => {
            let (mut client, body) = (house.connect(512), stream().to_string());
            client.send(raw_head("flows", body.len()) + &body).await;
            house.sleep(ms(2_500)).await;
        }
        Move::Fails => all_of(house, ill(stream(), "500")).await,
        Move::FailsInBand => all_of(house, ill(stream(), "in-band")).await,
        Move::Resets => all_of(house, ill(stream(), "resets")).await,
        Move::Stored => {
            let body = json!({"model": "m1", "input": "hi", "previous_response_id": "resp_x"});
            let ask = Ask::post("/v1/responses", body).header("authorization", &format!("Bearer {ILL}"));
            all_of(house, ask.header("x-plays", "404")).await;
        }
        Move::Steers => all_of(house, ill(with("vllm_xargs", json!({"kv_transfer_params": {}})), "400")).await,
        Move::Miscased => all_of(house, ill(with("Model", json!("m2")), "400")).await,
        Move::UnknownModel => all_of(house, ill(with("model", json!("nobody's")), "404")).await,
        Move::UnknownPath => all_of(house, Ask::post("/v1/nothing", stream())).await,
        Move::BadHead => {
            let mut client = house.connect(64 * 1024);
            client.send(format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\nhost: b\r\nx-plays: 400\r\n\r\n")).await;
            client.read_to_end().await;
        }
        Move::BrokenBody => {
            all_of(house, Ask::raw(CHAT, "{\"model\":").header("authorization", "Bearer sk-acme")).await
        }
        Move::UnknownKey => all_of(house, by("sk-nobody", stream())).await,
        Move::ResetsItsStream => {
            let mut sender = house.connect_h2().await;
            let mut request = h2_post(CHAT, &stream());
            request.headers_mut().insert("authorization", format!("Bearer {ILL}").parse().expect("a key"));
            request.headers_mut().insert("x-plays", "flows".parse().expect("a word"));
            let answer = sender.send_request(request).await;
            house.sleep(ms(200)).await;
            drop(answer);
        }
    }
}

/// How each request of the well-behaved tenant ended: outcome, and times to its first token, of a token,
/// to its end.
type Endings = Vec<(String, Option<f64>, Option<f64>, Option<f64>)>;

/// One request of the well-behaved tenant every 100 ms, beside these moves; what came of them, and of
/// all requests how many were missed.
async fn beside(has_seats: bool, moves: &[(u64, Move)]) -> (Endings, f64) {
    let house = Arc::new(House::new(&yaml(has_seats)));
    for host in ["e1", "e2"] {
        house.network.engine(host, &ScriptedEngine::new(house.clock, plays));
    }
    let well = (0..70_u64).map(|number| {
        let house = &house;
        async move {
            house.clock.sleep_until(Some(at(number * 100))).await;
            let ask = by(WELL, stream_with_usage()).header("x-request-id", &format!("well-{number:03}"));
            house.send(ask.client(&ClientState::default())).await.whole().await;
        }
    });
    let ill = moves.iter().map(|(when, at_once)| {
        let house = &house;
        async move {
            house.clock.sleep_until(Some(at(*when))).await;
            tries(house, *at_once).await;
        }
    });
    let watches = async {
        for step in 0..220_u64 {
            house.clock.sleep_until(Some(at(step * 50))).await;
            assert_eq!(house.states("a"), ["up", "up"], "at {} ms", step * 50);
            let levels = house.gateway.level_views();
            assert!(levels.iter().all(|view| view.level == 0), "at {} ms: {levels:?}", step * 50);
        }
    };
    tokio::join!(join_all(well), join_all(ill), watches);
    // What a client left behind has ended, too.
    house.sleep(ms(5_000)).await;
    let finished = house.page().sum("goodput_requests_finished_total", &[]) as usize;
    let lines = house.lines(finished).await;
    let (mut own, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.text("tenant") == "globex");
    own.sort_by_key(|line| line.text("request_id").to_owned());
    let missed = house.page().sum("goodput_slo_missed_total", &[]);
    let of_others = others.iter().filter(|line| line.outcome() == "missed").count() as f64;
    let endings = own.iter().map(|line| (line.verdict(), line.ttft(), line.tpot(), line.e2e())).collect();
    Arc::into_inner(house).expect("all has ended").end().await;
    (endings, missed - of_others)
}

#[tokio::test(start_paused = true)]
async fn c94_to_c99_each_alone_does_not_change_the_outcomes_of_others() {
    for has_seats in [false, true] {
        let (alone, missed) = beside(has_seats, &[]).await;
        assert_eq!(alone.len(), 70);
        assert!(alone.iter().all(|(verdict, ..)| verdict == "met"), "{alone:?}");
        assert_eq!(missed, 0.0);
        for at_once in MOVES {
            // Fourteen times, as in the cases; one after the other and some of them together.
            let moves: Vec<_> = (0..14).map(|number| (300 + number * 150, at_once)).collect();
            let (endings, missed) = beside(has_seats, &moves).await;
            assert_eq!(endings, alone, "{at_once:?}");
            assert_eq!(missed, 0.0, "{at_once:?} spends the budget of others");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// The same of any mix of them.
    #[test]
    fn no_mix_of_one_tenants_attacks_changes_the_outcomes_of_others(
        moves in prop::collection::vec((0..6000_u64, prop::sample::select(&MOVES[..])), 1..60),
        has_seats in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (alone, _) = runtime.block_on(beside(has_seats, &[]));
        let (endings, missed) = runtime.block_on(beside(has_seats, &moves));
        prop_assert_eq!(endings, alone);
        prop_assert_eq!(missed, 0.0);
    }
}
