//! How events are framed on the wire, and what must come out of it (CASES A).

use goodput::lab::script::{Script, event, fixtures::*};

use crate::support::*;

/// Role, text at 300 ms, finish, usage, end.
fn plain(frame: impl Fn(&str) -> String) -> (Script, String) {
    let events: Vec<String> = [r(), t("ab"), f("stop"), u(5, 2), d()].iter().map(|data| frame(data)).collect();
    let [role, text, finish, usage, done] = [0, 1, 2, 3, 4].map(|i: usize| events[i].clone());
    let script = Script::stream().at(10).put(role).at(300).put(text).at(310).put(finish).put(usage).put(done).end();
    (script, events.concat())
}

async fn comes_out_unchanged(script: Script, body: &str) {
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(answer.text(), body);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens()), ("met".into(), Some(300.0), (Some(5), Some(2))));
    assert_eq!(answer.at, at(300));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c01_crlf_ends_events_as_lf_does() {
    let (script, body) = plain(|data| event(data).replace('\n', "\r\n"));
    comes_out_unchanged(script, &body).await;
}
