//! The status page: rendered here, readable without script, and updated in parts by it.
//!
//! A part is one element with an id. The page consists of parts, and the events of an open page carry the
//! changed ones, so an updated page equals a reloaded one.

mod actions;
mod chart;
mod classes;
mod misses;
mod pools;
mod tenants;
mod text;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use self::text::{length, moment};
use super::assets::BUILD;
use super::status::GatewayStatus;
use crate::record::HistorySpan;

/// The parts of a page, each with the id of its element, in their order.
#[derive(Debug)]
pub(super) struct PageParts(Vec<(&'static str, String)>);

impl PageParts {
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, html)| (*name, html.as_str()))
    }

    pub(super) fn part(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, html)| html)
    }
}

/// The parts of the page for this status. `has_token`: the port asks for one, so that what changes
/// something may be offered.
pub(super) fn parts(status: &GatewayStatus, has_token: bool) -> PageParts {
    let parts: [(&str, Markup); 7] = [
        ("gateway", gateway(status)),
        ("classes", classes::table(status)),
        ("budgets", classes::plots(status)),
        ("pools", pools::section(status)),
        ("tenants", tenants::section(status)),
        ("misses", misses::section(status)),
        ("actions", actions::section(status, has_token)),
    ];
    PageParts(parts.map(|(name, markup)| (name, markup.into_string())).into())
}

/// The whole page.
pub(super) fn document(parts: &PageParts, span: HistorySpan) -> String {
    let (first, rest) = parts.0.split_first().expect("a page has parts");
    let asset = |name: &str| format!("/assets/{name}?{}", *BUILD);
    let page = html! {
        (DOCTYPE)
        html lang="en" data-build=(*BUILD) data-span=(span.as_str()) {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "goodput: status" }
                link rel="icon" href=(asset("icon.svg")) type="image/svg+xml";
                link rel="stylesheet" href=(asset("status.css"));
                script src=(asset("status.js")) defer {}
                noscript { meta http-equiv="refresh" content="10"; }
            }
            body {
                header.top {
                    h1 { "goodput" }
                    (PreEscaped(&first.1))
                    p.live {
                        span id="live" role="status" data-state="still" { "as of the last load" }
                        button id="pause" type="button" hidden { "Pause" }
                    }
                }
                main {
                    @for (_, html) in rest { (PreEscaped(html)) }
                }
                footer {
                    p {
                        "A request is kept if it met every objective of its class. Kept is met by judged over the class's window; "
                        "the budget is the share of misses that the target allows. "
                        a href="/status" { "This page as JSON" } " · " a href="/slo" { "Classes as JSON" } " · "
                        a href="/metrics" { "Metrics" }
                    }
                }
            }
        }
    };
    page.into_string()
}

fn gateway(status: &GatewayStatus) -> Markup {
    let (mark, word) = if status.ready { ("ok", "ready") } else { ("bad", "not ready: starting or leaving") };
    html! {
        p.gateway id="gateway" {
            span class={ "badge " (mark) } { (word) }
            span { "version " (status.version) }
            span { "up " (length(status.uptime_seconds)) }
            @if status.settings_failed {
                span.badge.bad { "settings failed to load: older ones are in force" }
            }
            span { "settings of " (moment(status.settings_loaded_unix_seconds)) }
        }
    }
}

/// A share as a bar beside its text. `warns`: a high share is a warning.
fn bar(share: f64, warns: bool) -> Markup {
    let width = (share.clamp(0.0, 1.0) * 100.0).round();
    let level = if warns && share >= 0.9 { "high" } else { "low" };
    html! {
        svg class={ "bar " (level) } viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true" {
            rect.whole width="100" height="6" {}
            rect.used width=(width) height="6" {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::status::{
        ClassStatus, EngineHourStatus, EngineStatus, HistoryStatus, LimitUse, MissStatus, ObjectiveStatus, PoolStatus,
        ReasonCount, TenantStatus,
    };
    use super::super::{BurnRate, ClassStanding, Degradation};
    use super::*;

    const HOSTILE: &str = "<i>\"a'b&";

    fn class(name: &str) -> ClassStatus {
        let day = 24 * 60 * 60;
        let burn = |window_seconds, covered_seconds, rate| BurnRate { window_seconds, covered_seconds, rate };
        ClassStatus {
            standing: ClassStanding {
                class: name.to_owned(),
                window_seconds: 28 * day,
                covered_seconds: 7300,
                target: 0.92,
                met: 900,
                total: 1000,
                attainment: Some(0.9),
                budget_remaining: Some(-0.25),
                burn_rate: vec![burn(300, 300, 2.5), burn(3600, 3600, 0.0), burn(28 * day, 7300, 1.25)],
                in_flight: 5,
                waiting: 2,
                overdue: 1,
                ..ClassStanding::default()
            },
            priority: "high".to_owned(),
            objectives: vec![ObjectiveStatus { objective: "ttft".to_owned(), threshold_seconds: 1.2 }],
            missed_last_hour: vec![ReasonCount { reason: "ttft".to_owned(), count: 100 }],
            history_seconds: 3600,
            history: vec![HistoryStatus { unix_seconds: 1e9, met: 900, judged: 1000, budget_remaining: Some(-0.25) }],
        }
    }

    fn status() -> GatewayStatus {
        let engine =
            EngineStatus { engine: "gpu-0:8000".to_owned(), state: "up".to_owned(), ..EngineStatus::default() };
        GatewayStatus {
            version: "1".to_owned(),
            ready: true,
            history_span: "hour".to_owned(),
            classes: vec![class("chat")],
            pools: vec![PoolStatus { pool: "main".to_owned(), engines: vec![engine], ..PoolStatus::default() }],
            ..GatewayStatus::default()
        }
    }

    fn page(status: &GatewayStatus) -> String {
        document(&parts(status, true), HistorySpan::Hour)
    }

    #[test]
    fn what_others_named_is_text_and_never_markup() {
        let mut hostile = status();
        let text = || HOSTILE.to_owned();
        hostile.classes = vec![class(HOSTILE)];
        hostile.classes[0].standing.degradation =
            Some(Degradation { levels: 1, actions: vec![text()], ..Default::default() });
        let engine = EngineStatus { engine: text(), state: text(), ..EngineStatus::default() };
        hostile.pools = vec![PoolStatus { pool: text(), engines: vec![engine], ..PoolStatus::default() }];
        let limit = LimitUse { limit: text(), model: Some(text()), most: 5, remaining: 1 };
        hostile.tenants = vec![TenantStatus { tenant: text(), limits: vec![limit], ..TenantStatus::default() }];
        hostile.misses = vec![MissStatus {
            request_id: text(),
            class: text(),
            tenant: Some(text()),
            engine: Some(text()),
            model: Some(text()),
            code: Some(text()),
            ..MissStatus::default()
        }];
        let page = page(&hostile);
        assert!(!page.contains("<i>") && page.contains("&lt;i&gt;"), "{page}");
        for part in page.split('<').filter(|part| part.contains("a'b&amp;")) {
            let tag = part.split('>').next().unwrap();
            assert!(
                !tag.contains("a'b") || tag.contains("=\"&lt;i&gt;&quot;a'b&amp;") || tag.contains("&quot;a'b&amp;"),
                "{tag}"
            );
        }
    }

    #[test]
    fn nothing_is_inline_and_nothing_is_loaded_from_elsewhere() {
        let page = page(&status());
        for inline in ["style=", " onclick", "javascript:", "<style", "<script>", "http://", "https://", "//"] {
            assert!(!page.contains(inline), "{inline}: {page}");
        }
        assert!(page.contains(&format!("/assets/status.js?{}", *BUILD)));
    }

    #[test]
    fn a_class_below_its_target_stands_out_and_one_without_judgement_does_not() {
        let table = |status: &GatewayStatus| classes::table(status).into_string();
        let below = table(&status());
        assert!(
            below.contains("below target") && below.contains("90 %") && below.contains("25 % overdrawn"),
            "{below}"
        );
        let mut quiet = status();
        let standing = &mut quiet.classes[0].standing;
        (standing.attainment, standing.budget_remaining, standing.total) = (None, None, 0);
        let quiet = table(&quiet);
        assert!(!quiet.contains("below target") && quiet.contains("nothing judged"), "{quiet}");
    }

    #[test]
    fn a_window_that_is_not_whole_yet_says_what_is_counted() {
        let table = classes::table(&status()).into_string();
        assert!(table.contains("of the last 2 h (window 28 d)"), "{table}");
        let mut whole = status();
        whole.classes[0].standing.covered_seconds = 28 * 24 * 60 * 60;
        let table = classes::table(&whole).into_string();
        assert!(table.contains("of the last 28 d") && !table.contains("(window"), "{table}");
    }

    #[test]
    fn an_overload_level_says_what_it_does_and_by_whom() {
        let actions = vec!["defer".to_owned(), "cap_output".to_owned()];
        let mut degraded = status();
        let degradation = Degradation { level: 2, levels: 3, actions, forced: true, ..Degradation::default() };
        degraded.classes[0].standing.degradation = Some(degradation);
        let table = classes::table(&degraded).into_string();
        assert!(table.contains("2 of 3, by hand: defer, cap_output"), "{table}");
        degraded.classes[0].standing.degradation.as_mut().unwrap().forced_for_seconds = Some(90);
        let table = classes::table(&degraded).into_string();
        assert!(table.contains("2 of 3, by hand for 90 s more: defer, cap_output"), "{table}");
    }

    #[test]
    fn an_engine_says_that_it_is_drained_beside_what_it_does() {
        let mut drained = status();
        let engine = &mut drained.pools[0].engines[0];
        (engine.drained, engine.drained_for_seconds, engine.in_flight) = (true, Some(120), 3);
        engine.last_hour = EngineHourStatus { met: 9, judged: 10, ttft_p95_seconds: Some(0.4), ..Default::default() };
        let section = pools::section(&drained).into_string();
        assert!(section.contains("drained for 2 min more") && section.contains("up"), "{section}");
        assert!(section.contains("90 %") && section.contains("400 ms"), "{section}");
    }

    #[test]
    fn actions_are_offered_where_a_token_guards_them() {
        let with = actions::section(&status(), true).into_string();
        assert!(with.contains("/-/drain") && with.contains("id=\"token\""), "{with}");
        let without = actions::section(&status(), false).into_string();
        assert!(!without.contains("/-/drain") && without.contains("admin.token_file"), "{without}");
    }

    #[test]
    fn parts_have_the_ids_that_their_events_name() {
        let parts = parts(&status(), true);
        for (name, html) in parts.iter() {
            assert!(html.contains(&format!("id=\"{name}\"")), "{name}: {html}");
            assert_eq!(parts.part(name), Some(html));
        }
        assert_eq!(parts.part("nothing"), None);
    }

    #[test]
    fn what_is_empty_says_so() {
        let page = page(&GatewayStatus::default());
        for words in ["No class", "No pool", "No tenant", "No miss"] {
            assert!(page.contains(words), "{words}: {page}");
        }
        assert!(page.contains("not ready"));
    }
}
