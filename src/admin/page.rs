//! The status page: one table, no scripts, nothing loaded from elsewhere.

use std::fmt::Write;

use super::{ClassStanding, Degradation};

const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
<meta http-equiv=\"refresh\" content=\"5\"><title>goodput</title><style>\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#1d2733}table{border-collapse:collapse}\
th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #d5dbe1}\
th:first-child,td:first-child{text-align:left}.bad{color:#b3261e;font-weight:600}\
</style></head><body><h1>goodput</h1>";

/// The page for these classes.
pub(super) fn render(ready: bool, classes: &[ClassStanding]) -> String {
    let mut page = String::from(HEAD);
    page.push_str(if ready { "<p>ready</p>" } else { "<p class=\"bad\">not ready: starting or leaving</p>" });
    page.push_str(
        "<table><thead><tr><th>class<th>met<th>judged<th>attainment<th>target<th>budget left<th>of the last\
         <th>in flight<th>waiting<th>overdue<th>overload level</tr></thead><tbody>",
    );
    for class in classes {
        row(&mut page, class);
    }
    page.push_str(
        "</tbody></table><p>Attainment is met / judged over the class's window, as far back as this process knows. \
         <a href=\"/slo\">as JSON</a> · <a href=\"/metrics\">metrics</a></p></body></html>\n",
    );
    page
}

fn row(page: &mut String, class: &ClassStanding) {
    let missed = class.attainment.is_some_and(|attainment| attainment < class.target);
    let mark = if missed { " class=\"bad\"" } else { "" };
    page.push_str("<tr><td>");
    escape(page, &class.class);
    let (met, total, target) = (class.met, class.total, percent(Some(class.target)));
    let (attainment, left) = (percent(class.attainment), percent(class.budget_remaining));
    let counted = counted(class.covered_seconds, class.window_seconds);
    let (flying, waiting, overdue) = (class.in_flight, class.waiting, class.overdue);
    write!(
        page,
        "<td>{met}<td>{total}<td{mark}>{attainment}<td>{target}<td>{left}<td>{counted}<td>{flying}<td>{waiting}<td>{overdue}<td>{}</tr>",
        level(class.degradation.as_ref())
    )
    .expect("writing to a string cannot fail");
}

/// How much of the window is counted: all of it, or so much of it as yet.
fn counted(covered: u64, window: u64) -> String {
    let whole = length(window);
    if covered < window { format!("{} (window {whole})", length(covered)) } else { whole }
}

/// A length of time, rounded down to the largest unit of which it has two.
fn length(seconds: u64) -> String {
    let units = [(24 * 60 * 60, "d"), (60 * 60, "h"), (60, "min")];
    let fits = units.into_iter().find(|(unit, _)| seconds >= 2 * unit);
    fits.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

/// Which level, and what it does.
fn level(degradation: Option<&Degradation>) -> String {
    let Some(Degradation { level, levels, actions, forced, forced_for_seconds, .. }) = degradation else {
        return "–".to_owned();
    };
    let by_hand = match forced_for_seconds {
        Some(left) => format!(", by hand for {left} s more"),
        None if *forced => ", by hand".to_owned(),
        None => String::new(),
    };
    let does = if actions.is_empty() { String::new() } else { format!(": {}", actions.join(", ")) };
    format!("{level} of {levels}{by_hand}{does}")
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".to_owned(), |share| format!("{:.2} %", share * 100.0))
}

fn escape(page: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '<' => page.push_str("&lt;"),
            '>' => page.push_str("&gt;"),
            '&' => page.push_str("&amp;"),
            '"' => page.push_str("&quot;"),
            c => page.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_is_not_whole_yet_says_what_is_counted() {
        let class = |covered_seconds| ClassStanding {
            window_seconds: 28 * 24 * 60 * 60,
            covered_seconds,
            ..ClassStanding::default()
        };
        assert!(render(true, &[class(59)]).contains("<td>59 s (window 28 d)<td>"));
        assert!(render(true, &[class(7300)]).contains("<td>2 h (window 28 d)<td>"));
        assert!(render(true, &[class(28 * 24 * 60 * 60)]).contains("<td>28 d<td>"));
    }

    #[test]
    fn a_class_below_its_target_stands_out_and_one_without_judgement_does_not() {
        let below = ClassStanding { target: 0.95, attainment: Some(0.9), ..ClassStanding::default() };
        let none = ClassStanding { target: 0.95, attainment: None, ..ClassStanding::default() };
        assert!(render(true, &[below]).contains("<td class=\"bad\">90.00 %"));
        assert!(!render(true, &[none]).contains("class=\"bad\""));
        assert!(render(false, &[]).contains("not ready"));
        let actions = vec!["defer", "cap_output"];
        let degradation = Some(Degradation { level: 2, levels: 3, actions, forced: true, ..Degradation::default() });
        let mut degraded = ClassStanding { degradation, ..ClassStanding::default() };
        assert!(render(true, &[degraded.clone()]).contains("<td>2 of 3, by hand: defer, cap_output</tr>"));
        degraded.degradation.as_mut().unwrap().forced_for_seconds = Some(90);
        assert!(render(true, &[degraded]).contains("<td>2 of 3, by hand for 90 s more: defer, cap_output</tr>"));
    }
}
