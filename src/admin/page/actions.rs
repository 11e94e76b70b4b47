//! What an operator can do. The script sends it with the token as a bearer, which no other site's page can.

use maud::{Markup, html};

use crate::admin::status::GatewayStatus;

const LENGTHS: [(&str, &str); 5] =
    [("", "until taken back"), ("300", "5 minutes"), ("900", "15 minutes"), ("3600", "1 hour"), ("28800", "8 hours")];

/// Forms, as far as the port has a token that guards them.
pub(super) fn section(status: &GatewayStatus, has_token: bool) -> Markup {
    html! {
        section id="actions" aria-labelledby="actions-title" {
            h2 id="actions-title" { "Actions" }
            noscript {
                p {
                    "Without JavaScript this page only shows. Send actions with the token as a bearer, as docs/status-page.md shows: POST "
                    @if has_token { "/-/drain, /-/degrade, " }
                    "/-/reload."
                }
            }
            @if has_token {
                form.field {
                    // Browsers want one beside every password.
                    input type="text" autocomplete="username" value="operator" hidden;
                    label for="token" { "Admin token" }
                    input id="token" type="password" autocomplete="off" spellcheck="false";
                    span.note { "stays in this page; what changes something is sent with it" }
                }
                div.forms {
                    (drain(status))
                    (level(status))
                    (reload())
                }
            } @else {
                p { "To drain engines and to set overload levels here, set " code { "admin.token_file" } " and restart." }
                div.forms { (reload()) }
            }
            p id="told" role="status" aria-live="polite" {}
        }
    }
}

fn drain(status: &GatewayStatus) -> Markup {
    let engines = status.pools.iter().flat_map(|pool| {
        let here = pool.engines.iter().filter(|engine| engine.state != "left");
        here.map(|engine| (pool.pool.as_str(), engine.engine.as_str(), engine.drained))
    });
    html! {
        form data-post="/-/drain" {
            fieldset {
                legend { "Drain an engine" }
                p.field {
                    label for="drain-engine" { "Engine" }
                    select id="drain-engine" name="engine" {
                        @for (pool, engine, drained) in engines {
                            option value=(engine) data-pool=(pool) { (pool) ": " (engine) @if drained { " (drained)" } }
                        }
                    }
                }
                p.field {
                    label for="drain-for" { "For" }
                    select id="drain-for" name="for" { @for (value, words) in LENGTHS { option value=(value) { (words) } } }
                }
                p.field {
                    input id="drain-last" name="last" type="checkbox";
                    label for="drain-last" { "also the last one of its pool" }
                }
                p.buttons {
                    button type="submit" name="drain" value="true" { "Drain" }
                    button type="submit" name="drain" value="false" { "Put back" }
                }
            }
        }
    }
}

fn level(status: &GatewayStatus) -> Markup {
    let levels = status.classes.iter().filter_map(|class| {
        let degradation = class.standing.degradation.as_ref()?;
        Some((class.standing.class.as_str(), degradation.levels))
    });
    let most = levels.clone().map(|(_, levels)| levels).max().unwrap_or(0);
    html! {
        @if most > 0 {
            form data-post="/-/degrade" {
                fieldset {
                    legend { "Set an overload level" }
                    p.field {
                        label for="level-class" { "Class" }
                        select id="level-class" name="class" {
                            @for (class, levels) in levels { option value=(class) { (class) " (" (levels) ")" } }
                        }
                    }
                    p.field {
                        label for="level-level" { "Level" }
                        select id="level-level" name="level" {
                            option value="auto" { "by measures" }
                            @for level in 0..=most { option value=(level) { (level) } }
                        }
                    }
                    p.field {
                        label for="level-for" { "For" }
                        select id="level-for" name="for" { @for (value, words) in LENGTHS { option value=(value) { (words) } } }
                    }
                    p.buttons { button type="submit" { "Set" } }
                }
            }
        }
    }
}

fn reload() -> Markup {
    html! {
        form data-post="/-/reload" {
            fieldset {
                legend { "Read the settings again" }
                p.note { "A file with problems changes nothing, and its problems are told here." }
                p.buttons { button type="submit" { "Reload" } }
            }
        }
    }
}
