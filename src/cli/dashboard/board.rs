//! The dashboard: sections of panels, and how both are written in Grafana's JSON.
//!
//! Rules that all queries keep, and tests hold: counters are summed over replicas and labels before they are
//! divided; histograms are summed by `le` before a quantile is taken, and never over classes, whose edges
//! differ; what is divided by is above zero, so that no traffic is no value, shown as `No traffic`, and not NaN.

use serde_json::{Value, json};

/// Shown where a query has no value.
const NO_TRAFFIC: &str = "No traffic";

/// Columns of Grafana's grid.
const GRID: u32 = 24;

const PROMETHEUS: &str = "${datasource}";

/// One line of a panel.
struct BoardQuery {
    expr: String,
    legend: &'static str,
    /// What is promised: a dashed line without points.
    is_objective: bool,
}

fn query(expr: impl Into<String>, legend: &'static str) -> BoardQuery {
    BoardQuery { expr: expr.into(), legend, is_objective: false }
}

fn objective(expr: impl Into<String>, legend: &'static str) -> BoardQuery {
    BoardQuery { expr: expr.into(), legend, is_objective: true }
}

/// How a panel draws.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Draws {
    Lines,
    Stack,
    Heatmap,
    /// The last values as numbers.
    Numbers,
}

struct BoardPanel {
    title: &'static str,
    /// What it tells, from when to when.
    text: &'static str,
    draws: Draws,
    unit: &'static str,
    width: u32,
    queries: Vec<BoardQuery>,
    /// Values from here on are bad news, or, `below`, up to here.
    bad: Option<Bad>,
    max: Option<f64>,
}

#[derive(Clone, Copy)]
enum Bad {
    Above(f64),
    Below(f64),
}

impl BoardPanel {
    fn new(title: &'static str, unit: &'static str, text: &'static str, queries: Vec<BoardQuery>) -> Self {
        BoardPanel { title, text, draws: Draws::Lines, unit, width: 8, queries, bad: None, max: None }
    }

    fn draws(self, draws: Draws) -> Self {
        BoardPanel { draws, ..self }
    }

    fn width(self, width: u32) -> Self {
        BoardPanel { width, ..self }
    }

    fn bad(self, bad: Bad) -> Self {
        BoardPanel { bad: Some(bad), ..self }
    }

    fn share(self) -> Self {
        BoardPanel { unit: "percentunit", max: Some(1.0), ..self }
    }
}

struct Section {
    title: &'static str,
    panels: Vec<BoardPanel>,
}

/// The share of judged requests that were met, by these labels.
fn attainment(by: &str, window: &str) -> String {
    let labels = "class=~\"$class\",pool=~\"$pool\"";
    format!(
        "sum by ({by}) (rate(slo_met_total{{{labels}}}[{window}])) / (sum by ({by}) (rate(slo_total{{{labels}}}[{window}])) > 0)"
    )
}

/// How many times too fast the budget is used.
fn burn(window: &str) -> String {
    let kept = attainment("class", window);
    format!("(1 - {kept}) / on (class) (1 - max by (class) (goodput_slo_target{{class=~\"$class\"}}))")
}

/// A quantile of a histogram, by class: summed over replicas, pools and models first.
fn quantile(q: &str, histogram: &str) -> String {
    let labels = "class=~\"$class\",pool=~\"$pool\"";
    format!(
        "histogram_quantile({q}, sum by (class, le) (rate({histogram}_bucket{{{labels}}}[$__rate_interval]))) \
         and on (class) (sum by (class) (rate({histogram}_count{{{labels}}}[$__rate_interval])) > 0)"
    )
}

fn threshold(name: &str) -> String {
    format!("max by (class) (goodput_slo_threshold_seconds{{class=~\"$class\",objective=\"{name}\"}})")
}

/// Quantiles of a measure, with its objective.
fn quantiles(title: &'static str, text: &'static str, histogram: &str, promised: Option<&str>) -> BoardPanel {
    let mut queries = vec![
        query(quantile("0.5", histogram), "{{class}} p50"),
        query(quantile("0.95", histogram), "{{class}} p95"),
        query(quantile("0.99", histogram), "{{class}} p99"),
    ];
    queries.extend(promised.map(|name| objective(threshold(name), "{{class}} objective")));
    BoardPanel::new(title, "s", text, queries)
}

/// Of one class: the edges of classes differ, so their buckets do not add up.
fn heatmap(title: &'static str, text: &'static str, histogram: &str) -> BoardPanel {
    let expr = format!(
        "sum by (le) (increase({histogram}_bucket{{class=\"$heatmap_class\",pool=~\"$pool\"}}[$__rate_interval]))"
    );
    BoardPanel::new(title, "s", text, vec![query(expr, "{{le}}")]).draws(Draws::Heatmap)
}

/// The mean of a histogram, over all of it.
fn mean(histogram: &str) -> String {
    let labels = "class=~\"$class\",pool=~\"$pool\"";
    format!(
        "sum by (class) (rate({histogram}_sum{{{labels}}}[$__rate_interval])) \
         / (sum by (class) (rate({histogram}_count{{{labels}}}[$__rate_interval])) > 0)"
    )
}

fn promises() -> Section {
    let burns = [("5m", "{{class}} 5m"), ("1h", "{{class}} 1h"), ("6h", "{{class}} 6h"), ("3d", "{{class}} 3d")];
    let window = attainment("class", "$slo_window");
    let target = "max by (class) (goodput_slo_target{class=~\"$class\"})";
    Section {
        title: "Promises",
        panels: vec![
            BoardPanel::new("Attainment", "", "Judged requests that kept everything they were promised, and the target.", vec![
                query(attainment("class", "$__rate_interval"), "{{class}}"),
                objective(target, "{{class}} objective"),
            ])
            .share()
            .width(12),
            BoardPanel::new("Burn rate", "none", "How many times faster than promised the budget of misses is used, by window. 1 lasts exactly the SLO's window.",
                burns.into_iter().map(|(window, legend)| query(burn(window), legend)).collect())
            .bad(Bad::Above(1.0))
            .width(12),
            BoardPanel::new("Attainment over the SLO's window", "", "Over the window that is chosen above, or as much of it as Prometheus has.", vec![query(window.clone(), "{{class}}")])
                .share()
                .draws(Draws::Numbers)
                .width(8),
            BoardPanel::new("Budget left over the SLO's window", "percentunit", "Share of the misses that the target allows which is left; negative where overdrawn.", vec![
                query(format!("1 - (1 - {window}) / on (class) (1 - {target})"), "{{class}}"),
            ])
            .bad(Bad::Below(0.0))
            .draws(Draws::Numbers)
            .width(8),
            BoardPanel::new("Requests in flight", "short", "Arrived and not ended; of these, those that wait for a seat, and those that have broken an objective already.", vec![
                query("sum by (class) (goodput_in_flight{class=~\"$class\"})", "{{class}} in flight"),
                query("sum by (class) (goodput_queue_depth{class=~\"$class\"})", "{{class}} waiting"),
                query("sum by (class) (goodput_overdue{class=~\"$class\"})", "{{class}} overdue"),
            ]),
            BoardPanel::new("Judged requests", "reqps", "Met and missed, per second.", vec![query("sum by (class) (rate(slo_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval]))", "{{class}}")])
                .draws(Draws::Stack),
            BoardPanel::new("Misses by reason", "reqps", "The service's fault, by the reason that counts.", vec![query("sum by (reason) (rate(goodput_slo_missed_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval]))", "{{reason}}")])
                .draws(Draws::Stack),
            BoardPanel::new("Attainment by prompt length", "", "Are long prompts the trouble?", vec![query(attainment("class, length", "$__rate_interval"), "{{class}} {{length}}")]).share(),
            BoardPanel::new("Attainment by objective", "", "One objective at a time. Requests break different ones, so all of these can be better than the joint figure.", vec![query(
                "sum by (class, objective) (rate(goodput_slo_objective_met_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval])) \
                 / (sum by (class, objective) (rate(goodput_slo_objective_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval])) > 0)",
                "{{class}} {{objective}}",
            )])
            .share()
            .width(12),
            BoardPanel::new("Highest rate that kept its promise", "reqps", "Highest rate of judged requests over 30 s stretches of the last hour with attainment at or above the target, summed over gateways.", vec![query("sum by (class) (goodput_rate{class=~\"$class\"})", "{{class}}")]).width(12),
        ],
    }
}

fn latency() -> Section {
    Section {
        title: "Latency",
        panels: vec![
            quantiles(
                "Time to first token",
                "From the request's start to the first token; queueing, retries and failover are inside.",
                "goodput_time_to_first_token_seconds",
                Some("ttft"),
            ),
            quantiles(
                "Time per output token",
                "Of finished streams, the worst choice of each.",
                "goodput_time_per_output_token_seconds",
                Some("tpot"),
            ),
            quantiles(
                "Gaps between tokens",
                "Gaps between events; an event may carry several tokens. The objective looks at the largest gap of an answer.",
                "goodput_inter_token_gap_seconds",
                Some("itl"),
            ),
            heatmap(
                "Time to first token, one class",
                "Of the class chosen above.",
                "goodput_time_to_first_token_seconds",
            ),
            heatmap(
                "Time per output token, one class",
                "Of the class chosen above.",
                "goodput_time_per_output_token_seconds",
            ),
            heatmap("Gaps between tokens, one class", "Of the class chosen above.", "goodput_inter_token_gap_seconds"),
            quantiles(
                "End to end",
                "From the request's start to the event that ends the answer.",
                "goodput_e2e_seconds",
                Some("e2e"),
            )
            .width(12),
            heatmap("End to end, one class", "Of the class chosen above.", "goodput_e2e_seconds").width(12),
        ],
    }
}

fn where_time_goes() -> Section {
    let (upload, queue) = (mean("goodput_upload_seconds"), mean("goodput_queue_seconds"));
    let (ttft, e2e) = (mean("goodput_time_to_first_token_seconds"), mean("goodput_e2e_seconds"));
    let wait = mean("goodput_client_wait_seconds");
    Section {
        title: "Where time goes",
        panels: vec![
            BoardPanel::new("Mean time of a request, by part", "s", "Upload as the gateway saw it, the queue in front of a pool, the engine until the first token, and from there to the end. Means of all that got so far.", vec![
                query(upload.clone(), "{{class}} upload"),
                query(queue.clone(), "{{class}} queue"),
                query(format!("clamp_min({ttft} - ({queue}) - (({upload}) - ({wait})), 0)"), "{{class}} engine, to the first token"),
                query(format!("clamp_min({e2e} - ({ttft}), 0)"), "{{class}} tokens, to the end"),
            ])
            .draws(Draws::Stack)
            .width(24),
            quantiles("Queue", "From the last byte of the body until it may go to an engine.", "goodput_queue_seconds", None),
            quantiles("Upload", "From the head to the last byte of the body.", "goodput_upload_seconds", None),
            quantiles("Waiting for the client", "Of the upload, what the client did not send while the gateway stood ready. No part of TTFT, unless the class says so.", "goodput_client_wait_seconds", None),
        ],
    }
}

fn pools() -> Section {
    let mut panels = vec![
        BoardPanel::new(
            "Seats",
            "short",
            "Seats that there are, and those taken, summed over gateways. Pools with a limit.",
            vec![
                query("sum by (pool) (goodput_seats_taken{pool=~\"$pool\"})", "{{pool}} taken"),
                query("sum by (pool) (goodput_seats{pool=~\"$pool\"})", "{{pool}} seats"),
            ],
        ),
        BoardPanel::new(
            "Queue of the gateway",
            "short",
            "Requests that wait for a seat of the pool.",
            vec![query("sum by (pool) (goodput_queue_depth{pool=~\"$pool\"})", "{{pool}}")],
        ),
        BoardPanel::new(
            "Engines that take requests",
            "short",
            "Up, and how many there are; drained ones are those that an operator took out.",
            vec![
                query("sum by (pool) (max by (pool, engine) (goodput_engine_up{pool=~\"$pool\"}))", "{{pool}} up"),
                query("count by (pool) (max by (pool, engine) (goodput_engine_up{pool=~\"$pool\"}))", "{{pool}} all"),
                query(
                    "sum by (pool) (max by (pool, engine) (goodput_engine_drained{pool=~\"$pool\"}))",
                    "{{pool}} drained",
                ),
            ],
        ),
    ];
    panels.extend(engines());
    panels.extend([
        BoardPanel::new(
            "Retries",
            "reqps",
            "Further attempts, by what made them necessary.",
            vec![query("sum by (reason) (rate(goodput_retries_total[$__rate_interval]))", "{{reason}}")],
        )
        .draws(Draws::Stack)
        .width(12),
        BoardPanel::new(
            "Error of predictions",
            "percentunit",
            "How far predictions of an engine's latency were off lately, as a share of what was seen.",
            vec![query(
                "max by (pool, engine, quantity) (goodput_prediction_error_ratio{pool=~\"$pool\"})",
                "{{pool}} {{engine}} {{quantity}}",
            )],
        )
        .width(12),
    ]);
    Section { title: "Pools and engines", panels }
}

/// The panels of single engines.
fn engines() -> [BoardPanel; 6] {
    let by_engine = |name: &str| format!("max by (pool, engine) ({name}{{pool=~\"$pool\"}})");
    let engine_quantile = "histogram_quantile(0.95, sum by (pool, engine, le) (rate(goodput_engine_time_to_first_token_seconds_bucket{pool=~\"$pool\"}[$__rate_interval]))) \
         and on (pool, engine) (sum by (pool, engine) (rate(goodput_engine_time_to_first_token_seconds_count{pool=~\"$pool\"}[$__rate_interval])) > 0)";
    [
        BoardPanel::new(
            "Waiting inside engines",
            "short",
            "As engines report.",
            vec![query(by_engine("goodput_engine_waiting"), "{{pool}} {{engine}}")],
        ),
        BoardPanel::new(
            "Running inside engines",
            "short",
            "As engines report.",
            vec![query(by_engine("goodput_engine_running"), "{{pool}} {{engine}}")],
        ),
        BoardPanel::new(
            "KV cache",
            "",
            "Share in use, as engines report.",
            vec![query(by_engine("goodput_engine_kv_usage"), "{{pool}} {{engine}}")],
        )
        .share(),
        BoardPanel::new(
            "Attainment by engine",
            "",
            "Which engine is it? Of the engine of the last attempt. Needs `telemetry.series_by_engine`.",
            vec![query(
                "sum by (pool, engine) (rate(goodput_engine_slo_met_total{pool=~\"$pool\"}[$__rate_interval])) \
                 / (sum by (pool, engine) (rate(goodput_engine_slo_total{pool=~\"$pool\"}[$__rate_interval])) > 0)",
                "{{pool}} {{engine}}",
            )],
        )
        .share(),
        BoardPanel::new(
            "TTFT p95 by engine",
            "s",
            "The queue is in it, as in every TTFT. Needs `telemetry.series_by_engine`.",
            vec![query(engine_quantile, "{{pool}} {{engine}}")],
        ),
        BoardPanel::new(
            "Seats by engine",
            "short",
            "Requests of a gateway that the engine should have at one time.",
            vec![query(by_engine("goodput_engine_seats"), "{{pool}} {{engine}}")],
        ),
    ]
}

fn tenants() -> Section {
    Section {
        title: "Tenants and limits",
        panels: vec![
            BoardPanel::new("Attainment by tenant", "", "Beyond 200 tenants the others are one.", vec![query(
                "sum by (tenant) (rate(goodput_tenant_slo_met_total{class=~\"$class\",tenant=~\"$tenant\"}[$__rate_interval])) \
                 / (sum by (tenant) (rate(goodput_tenant_slo_total{class=~\"$class\",tenant=~\"$tenant\"}[$__rate_interval])) > 0)",
                "{{tenant}}",
            )])
            .share(),
            BoardPanel::new("Tokens", "short", "Tokens per second that engines computed, prompts and answers.", vec![query("sum by (tenant, direction) (rate(goodput_tokens_total{tenant=~\"$tenant\"}[$__rate_interval]))", "{{tenant}} {{direction}}")]).draws(Draws::Stack),
            BoardPanel::new("Refused for a limit, served beyond one", "reqps", "By the limit that refused (429), and what went to an engine all the same.", vec![
                query("sum by (tenant, limit) (rate(goodput_rate_limited_total{tenant=~\"$tenant\"}[$__rate_interval]))", "{{tenant}} {{limit}}"),
                query("sum by (tenant) (rate(goodput_over_limit_total{tenant=~\"$tenant\"}[$__rate_interval]))", "{{tenant}} beyond"),
            ]),
        ],
    }
}

fn limits_store() -> Section {
    let calls = "goodput_limits_store_call_seconds";
    let quantile = |q: &str| {
        format!(
            "histogram_quantile({q}, sum by (le) (rate({calls}_bucket{{job=~\"$job\"}}[$__rate_interval]))) \
             and on () (sum(rate({calls}_count{{job=~\"$job\"}}[$__rate_interval])) > 0)"
        )
    };
    Section {
        title: "Store of shared limits",
        panels: vec![
            BoardPanel::new(
                "Store in use",
                "none",
                "1 where the gateway asks the store; 0 where it has given it up until a trial succeeds, and goes by its own share of each limit or refuses. \
                 Needs `limits_store: {redis: ..}`, as all of this row.",
                vec![query("min by (instance) (goodput_limits_store_up{job=~\"$job\"})", "{{instance}}")],
            )
            .bad(Bad::Below(1.0)),
            BoardPanel::new(
                "Time of a call",
                "s",
                "What a request that needs the store waits for it, at most `timeout`. Most requests are let in by a lease and call nobody.",
                vec![query(quantile("0.5"), "p50"), query(quantile("0.99"), "p99")],
            ),
            BoardPanel::new(
                "Calls by result",
                "reqps",
                "`granted`, `refused` (a limit is used up) and `told` are answers; `timeout`, `broken`, `error` and `nonsense` are none.",
                vec![query(
                    "sum by (result) (rate(goodput_limits_store_calls_total{job=~\"$job\"}[$__rate_interval]))",
                    "{{result}}",
                )],
            )
            .draws(Draws::Stack),
            BoardPanel::new(
                "Calls without an answer",
                "percentunit",
                "Share of all calls that timed out, broke or made no sense, and how often a gateway gave the store up.",
                vec![
                    query(
                        "sum by (instance) (rate(goodput_limits_store_calls_total{job=~\"$job\",result=~\"timeout|broken|error|nonsense\"}[$__rate_interval])) \
                         / (sum by (instance) (rate(goodput_limits_store_calls_total{job=~\"$job\"}[$__rate_interval])) > 0)",
                        "{{instance}} without an answer",
                    ),
                    query(
                        "sum by (instance) (increase(goodput_limits_store_given_up_total{job=~\"$job\"}[$__rate_interval]))",
                        "{{instance}} given up",
                    ),
                ],
            ),
            BoardPanel::new(
                "What let requests in",
                "reqps",
                "A `lease` held here, the `store` asked for this request, this gateway's `share` because the store was away, or `nobody`: refused for that reason.",
                vec![query(
                    "sum by (by) (rate(goodput_limits_store_requests_total{job=~\"$job\"}[$__rate_interval]))",
                    "{{by}}",
                )],
            )
            .draws(Draws::Stack),
            BoardPanel::new(
                "Leased and unused",
                "short",
                "Tokens and requests of limits that are granted to a gateway and used by nobody: what the others could miss.",
                vec![query("sum by (instance) (goodput_limits_store_unspent{job=~\"$job\"})", "{{instance}}")],
            ),
        ],
    }
}

fn degradation() -> Section {
    Section {
        title: "Degradation",
        panels: vec![
            BoardPanel::new("Overload level", "short", "Levels in force, the highest of all gateways; 0 of classes that have none.", vec![
                query("max by (class) (goodput_degrade_level{class=~\"$class\"}) or 0 * max by (class) (goodput_slo_target{class=~\"$class\"})", "{{class}}"),
            ]),
            BoardPanel::new("What levels do", "reqps", "Requests to which an overload level did this.", vec![query("sum by (class, action) (rate(goodput_degraded_total{class=~\"$class\"}[$__rate_interval]))", "{{class}} {{action}}")]).draws(Draws::Stack),
            BoardPanel::new("Refusals by code", "reqps", "Requests that got no answer of an engine, by the error that the gateway made instead: who was shed, and how.", vec![query("sum by (code) (rate(goodput_refused_total[$__rate_interval]))", "{{code}}")]).draws(Draws::Stack),
            BoardPanel::new("Went to a further pool", "reqps", "Because the one before had too long a queue, or no engine.", vec![query("sum by (class, pool) (rate(goodput_spilled_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval]))", "{{class}} to {{pool}}")]).width(24),
        ],
    }
}

fn companions() -> Section {
    let judged = "(sum by (class) (rate(slo_total{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval])) > 0)";
    let share = |name: &str| {
        format!("sum by (class) (rate({name}{{class=~\"$class\",pool=~\"$pool\"}}[$__rate_interval])) / {judged}")
    };
    Section {
        title: "What attainment alone would not show",
        panels: vec![
            BoardPanel::new("Not judged, by reason", "reqps", "An exclusion hides nothing: met + missed + excluded = finished. A share that grows is a reason to look.", vec![query("sum by (reason) (rate(goodput_slo_excluded_total{class=~\"$class|none\"}[$__rate_interval]))", "{{reason}}")]).draws(Draws::Stack),
            BoardPanel::new("Answers cut by a cap", "percentunit", "Of judged requests: cut by the output cap, and by one that an overload level had lowered.", vec![
                query(share("goodput_truncated_answers_total"), "{{class}} cut"),
                query(share("goodput_capped_answers_total"), "{{class}} by a level"),
            ]),
            BoardPanel::new("Stalls per judged request", "none", "Gaps between tokens above the class's `stall_seconds`.", vec![query(share("goodput_stalls_total"), "{{class}}")]),
            BoardPanel::new("Clients that left", "reqps", "Before their answer was whole.", vec![query("sum by (class) (rate(goodput_cancel_seconds_count{class=~\"$class\",pool=~\"$pool\"}[$__rate_interval]))", "{{class}}")]).draws(Draws::Stack),
            BoardPanel::new("Drift of the workload", "none", "Lengths of the last half hour by those that the class assumes. Far from 1 the objectives are for other requests.", vec![
                query("max by (class, direction, percentile) (goodput_workload_drift{class=~\"$class\"})", "{{class}} {{direction}} {{percentile}}"),
            ]),
            BoardPanel::new("Known of each window", "s", "How much of its window a gateway's own burn rate tells of: the least of all gateways.", vec![query("min by (class, window) (goodput_slo_window_covered_seconds{class=~\"$class\"})", "{{class}} {{window}}")]),
        ],
    }
}

fn gateways() -> Section {
    Section {
        title: "Gateways",
        panels: vec![
            BoardPanel::new(
                "CPU",
                "short",
                "Cores in use.",
                vec![query(
                    "sum by (instance) (rate(process_cpu_seconds_total{job=~\"$job\"}[$__rate_interval]))",
                    "{{instance}}",
                )],
            ),
            BoardPanel::new(
                "Memory",
                "bytes",
                "Resident.",
                vec![query("sum by (instance) (process_resident_memory_bytes{job=~\"$job\"})", "{{instance}}")],
            ),
            BoardPanel::new(
                "Open files",
                "short",
                "Descriptors, and how many there may be.",
                vec![
                    query("sum by (instance) (process_open_fds{job=~\"$job\"})", "{{instance}}"),
                    query("sum by (instance) (process_max_fds{job=~\"$job\"})", "{{instance}} at most"),
                ],
            ),
            BoardPanel::new(
                "Settings",
                "none",
                "1 where the last attempt to load settings succeeded.",
                vec![query("min by (instance) (goodput_config_last_reload_successful)", "{{instance}}")],
            )
            .bad(Bad::Below(1.0)),
            BoardPanel::new(
                "Turned away before they were requests",
                "reqps",
                "Malformed heads by reason, and connections beyond an address's share.",
                vec![
                    query("sum by (reason) (rate(goodput_bad_heads_total[$__rate_interval]))", "{{reason}}"),
                    query("sum(rate(goodput_connections_refused_total[$__rate_interval]))", "connections"),
                ],
            ),
            BoardPanel::new(
                "Access lines lost",
                "reqps",
                "Because the output was slower than the traffic, or failed.",
                vec![query(
                    "sum by (instance) (rate(goodput_access_lines_dropped_total[$__rate_interval]))",
                    "{{instance}}",
                )],
            ),
        ],
    }
}

/// The whole dashboard.
pub(super) fn dashboard(title: &str, uid: &str) -> Value {
    let sections = [
        promises(),
        latency(),
        where_time_goes(),
        pools(),
        tenants(),
        limits_store(),
        degradation(),
        companions(),
        gateways(),
    ];
    let (mut panels, mut id, mut y) = (Vec::new(), 0, 0);
    for section in sections {
        id += 1;
        panels.push(json!({
            "type": "row", "id": id, "title": section.title, "collapsed": false, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": GRID, "h": 1},
        }));
        y += 1;
        let mut x = 0;
        for panel in &section.panels {
            if x + panel.width > GRID {
                (x, y) = (0, y + HEIGHT);
            }
            id += 1;
            panels.push(written(panel, id, x, y));
            x += panel.width;
        }
        y += HEIGHT;
    }
    json!({
        "title": title,
        "uid": uid,
        "description": "Classes against their promises, and why they miss. Written by `goodput dashboard`.",
        "tags": ["goodput", "slo", "llm"],
        "editable": true,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 41,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    })
}

/// Rows of a panel's place.
const HEIGHT: u32 = 8;

fn variables() -> Vec<Value> {
    let of_labels = |name: &str, label: &str, metric: &str, of: &str, is_many: bool| {
        let all = if is_many { json!({"selected": true, "text": "All", "value": "$__all"}) } else { json!({}) };
        json!({
            "name": name, "label": label, "type": "query", "datasource": source(),
            "query": {"query": format!("label_values({metric}, {of})"), "refId": name},
            "refresh": 2, "sort": 1, "multi": is_many, "includeAll": is_many, "current": all,
            "allValue": if is_many { json!(".*") } else { Value::Null },
        })
    };
    let windows = ["1h", "1d", "7d", "28d", "30d", "90d"];
    let option = |window: &str| json!({"text": window, "value": window, "selected": window == "28d"});
    vec![
        json!({"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}),
        of_labels("job", "Job", "goodput_build_info", "job", true),
        of_labels("class", "Class", "slo_total", "class", true),
        of_labels("pool", "Pool", "slo_total", "pool", true),
        of_labels("tenant", "Tenant", "goodput_tokens_total", "tenant", true),
        json!({
            "name": "slo_window", "label": "SLO's window", "type": "custom", "query": windows.join(","),
            "options": windows.map(option), "current": option("28d"), "multi": false, "includeAll": false,
        }),
        of_labels("heatmap_class", "Class of the heatmaps", "slo_total", "class", false),
    ]
}

fn source() -> Value {
    json!({"type": "prometheus", "uid": PROMETHEUS})
}

fn written(panel: &BoardPanel, id: u32, x: u32, y: u32) -> Value {
    let letters = ('A'..='Z').map(|letter| letter.to_string());
    let targets: Vec<Value> = panel
        .queries
        .iter()
        .zip(letters)
        .map(|(query, letter)| {
            json!({
                "refId": letter, "datasource": source(), "expr": query.expr, "legendFormat": query.legend,
                "editorMode": "code", "range": true, "instant": false,
                "format": if panel.draws == Draws::Heatmap { "heatmap" } else { "time_series" },
            })
        })
        .collect();
    let (kind, options) = match panel.draws {
        Draws::Heatmap => ("heatmap", heatmap_options()),
        Draws::Numbers => ("stat", number_options()),
        Draws::Lines | Draws::Stack => ("timeseries", line_options()),
    };
    json!({
        "id": id, "type": kind, "title": panel.title, "description": panel.text, "datasource": source(),
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "targets": targets,
        "fieldConfig": {"defaults": defaults(panel), "overrides": overrides(panel)},
        "options": options,
    })
}

fn defaults(panel: &BoardPanel) -> Value {
    let steps = match panel.bad {
        None => json!([{"color": "green", "value": null}]),
        Some(Bad::Above(edge)) => json!([{"color": "green", "value": null}, {"color": "red", "value": edge}]),
        Some(Bad::Below(edge)) => json!([{"color": "red", "value": null}, {"color": "green", "value": edge}]),
    };
    let mut defaults = json!({
        "unit": panel.unit,
        "noValue": NO_TRAFFIC,
        "color": {"mode": if panel.draws == Draws::Numbers { "thresholds" } else { "palette-classic" }},
        "thresholds": {"mode": "absolute", "steps": steps},
    });
    if let Some(max) = panel.max {
        defaults["max"] = json!(max);
    }
    if matches!(panel.draws, Draws::Lines | Draws::Stack) {
        let (mode, fill) = if panel.draws == Draws::Stack { ("normal", 35) } else { ("none", 4) };
        defaults["custom"] = json!({
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": fill, "showPoints": "never", "spanNulls": false,
            "stacking": {"mode": mode, "group": "A"},
            "thresholdsStyle": {"mode": if panel.bad.is_some() { "line" } else { "off" }},
        });
    }
    defaults
}

/// Objectives are dashed lines in the colour of bad news.
fn overrides(panel: &BoardPanel) -> Value {
    if !panel.queries.iter().any(|query| query.is_objective) {
        return json!([]);
    }
    json!([{
        "matcher": {"id": "byRegexp", "options": "/ objective$/"},
        "properties": [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        ],
    }])
}

fn line_options() -> Value {
    json!({
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    })
}

fn number_options() -> Value {
    json!({
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": false},
        "orientation": "auto", "textMode": "auto", "colorMode": "value", "graphMode": "none", "justifyMode": "auto",
        "wideLayout": true, "showPercentChange": false, "percentChangeColorMode": "standard",
    })
}

fn heatmap_options() -> Value {
    json!({
        "calculate": false,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "fill": "blue", "reverse": false},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": true, "showColorScale": false},
        "legend": {"show": true},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "showValue": "never",
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn panels() -> Vec<Value> {
        let board = dashboard("goodput", "goodput");
        let panels = board["panels"].as_array().unwrap().clone();
        panels.into_iter().filter(|panel| panel["type"] != "row").collect()
    }

    fn expressions() -> Vec<String> {
        let targets = panels().into_iter().flat_map(|panel| panel["targets"].as_array().unwrap().clone());
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn quantiles_are_taken_of_sums_and_never_over_classes() {
        let quantiles: Vec<String> =
            expressions().into_iter().filter(|expr| expr.contains("histogram_quantile")).collect();
        assert!(quantiles.len() > 10);
        for expr in quantiles {
            let store = "sum by (le) (rate(goodput_limits_store_call_seconds_bucket";
            let summed = ["sum by (class, le) (rate(", "sum by (pool, engine, le) (rate(", store];
            assert!(summed.iter().any(|start| expr.contains(start)), "{expr}");
            assert!(!expr.contains("avg"), "{expr}");
        }
        for panel in panels().into_iter().filter(|panel| panel["type"] == "heatmap") {
            let expr = panel["targets"][0]["expr"].as_str().unwrap().to_owned();
            assert!(expr.contains("class=\"$heatmap_class\""), "{expr}");
        }
    }

    #[test]
    fn divisors_are_above_zero_and_absent_values_read_no_traffic() {
        for expr in expressions() {
            for rest in expr.split(" / ").skip(1) {
                let is_guarded = rest.starts_with("(sum by") && rest.contains("> 0)");
                assert!(is_guarded || rest.starts_with("on (class) (1 - max by"), "{expr}");
            }
            if expr.contains("histogram_quantile") {
                assert!(expr.contains(" and on (") && expr.ends_with("> 0)"), "{expr}");
            }
        }
        for panel in panels() {
            assert_eq!(panel["fieldConfig"]["defaults"]["noValue"], "No traffic", "{}", panel["title"]);
        }
    }

    #[test]
    fn objectives_are_lines_in_their_panels() {
        let lines: BTreeSet<String> = panels()
            .into_iter()
            .filter(|panel| !panel["fieldConfig"]["overrides"].as_array().unwrap().is_empty())
            .map(|panel| panel["title"].as_str().unwrap().to_owned())
            .collect();
        let expected =
            ["Attainment", "End to end", "Gaps between tokens", "Time per output token", "Time to first token"];
        assert_eq!(lines.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn panels_have_unique_places_and_ids_and_descriptions() {
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in panels() {
            assert!(ids.insert(panel["id"].as_u64().unwrap()));
            let at = |name: &str| panel["gridPos"][name].as_u64().unwrap();
            assert!(at("x") + at("w") <= u64::from(GRID), "{panel}");
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(cells.insert((x, y)), "two panels at {x}, {y}: {}", panel["title"]);
                }
            }
            let text = panel["description"].as_str().unwrap();
            assert!(text.len() > 5 && text.ends_with(['.', '?']), "{}", panel["title"]);
        }
        assert!(ids.len() > 40);
    }

    #[test]
    fn every_variable_of_a_query_is_one_of_the_dashboard() {
        let board = dashboard("goodput", "goodput");
        let known: BTreeSet<String> = board["templating"]["list"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect();
        for expr in expressions() {
            for rest in expr.split('$').skip(1) {
                let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                assert!(known.contains(&name) || name == "__rate_interval", "{name}: {expr}");
            }
        }
    }
}
