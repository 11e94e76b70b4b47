//! Pictures of sweeps: attainment, throughput and latencies against the offered rate, one below the other. Pure.

use std::ops::Range;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::element::{Circle, Cross, PathElement, Polygon};
use plotters::series::{DashedLineSeries, LineSeries};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, WHITE};

use crate::load::monitor::RunVerdict;
use crate::load::quantiles::{MeasureQuantiles, Percentile};
use crate::load::result::{ClassResult, PointResult};
use crate::load::summary::{ClassSummary, SweepSummary};
use crate::load::sweep::CacheResult;

/// A picture of one class in one cache state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name for a file, without its end.
    pub name: String,
    /// Its title.
    pub title: String,
    /// SVG.
    pub svg: String,
}

/// One line in a panel.
struct Curve {
    label: String,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

/// The part of a sweep that a figure shows.
struct PlottedSweep<'a> {
    label: String,
    color: RGBColor,
    result: &'a CacheResult,
    class: usize,
    promise: &'a ClassSummary,
}

const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
const GREY: RGBColor = RGBColor(110, 110, 110);
const RED: RGBColor = RGBColor(180, 30, 30);

const WIDTH: u32 = 860;
const PANEL: u32 = 230;

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type PlotOutcome = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// The figures of these sweeps: one for each cache state and class of the first, with the same of the others in it.
#[must_use]
pub fn figures(sweeps: &[SweepSummary]) -> Vec<Figure> {
    let Some(first) = sweeps.first() else { return Vec::new() };
    let mut found = Vec::new();
    for result in first.results.iter().filter(|result| !result.points.is_empty()) {
        for promise in &first.workload.classes {
            let shown = shown(sweeps, result, promise);
            let svg = draw(&shown);
            let cache = result.cache.as_str();
            let name = format!("knee-{cache}-{}", file_name(&promise.class));
            found.push(Figure { name, title: format!("{}, {cache} caches", promise.class), svg });
        }
    }
    found
}

fn shown<'a>(sweeps: &'a [SweepSummary], first: &CacheResult, promise: &ClassSummary) -> Vec<PlottedSweep<'a>> {
    let of = |(number, sweep): (usize, &'a SweepSummary)| {
        let result = sweep.results.iter().find(|result| result.cache == first.cache)?;
        let class = sweep.workload.classes.iter().position(|class| class.class == promise.class)?;
        Some(PlottedSweep {
            label: if sweeps.len() > 1 { format!("{}: ", letter(number)) } else { String::new() },
            color: COLORS[number % COLORS.len()],
            result,
            class,
            promise: &sweep.workload.classes[class],
        })
    };
    sweeps.iter().enumerate().filter_map(of).collect()
}

/// The name of a sweep in a comparison: A, B, ...
pub(super) fn letter(number: usize) -> String {
    u8::try_from(number)
        .ok()
        .filter(|number| *number < 26)
        .map_or_else(|| format!("{}", number + 1), |number| char::from(b'A' + number).to_string())
}

fn file_name(class: &str) -> String {
    class.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' }).collect()
}

/// Draws one panel over this range of rates.
type DrawPanel = fn(&Panel<'_>, &[PlottedSweep<'_>], Range<f64>) -> PlotOutcome;

/// A percentile of a measure.
type PercentileOf = fn(&MeasureQuantiles) -> Percentile;

/// Draws into a text. Writing to a text does not fail.
fn draw(shown: &[PlottedSweep<'_>]) -> String {
    let mut svg = String::new();
    let mut panels: Vec<DrawPanel> = vec![attainment, throughput];
    let streams = shown.iter().any(|one| points(one).any(|(_, class)| class.ttft_seconds.p50.seconds().is_some()));
    if streams {
        panels.push(|panel, shown, rates| latency(panel, shown, rates, "TTFT", "ttft", |class| &class.ttft_seconds));
        panels.push(|panel, shown, rates| latency(panel, shown, rates, "TPOT", "tpot", |class| &class.tpot_seconds));
    }
    panels.push(|panel, shown, rates| latency(panel, shown, rates, "E2E", "e2e", |class| &class.e2e_seconds));
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, PANEL * panels.len() as u32)).into_drawing_area();
        let areas = root.split_evenly((panels.len(), 1));
        let rates = rates(shown);
        let mut drawn = root.fill(&WHITE);
        for (panel, area) in panels.iter().zip(&areas) {
            drawn = drawn.and_then(|()| panel(area, shown, rates.clone()));
        }
        debug_assert!(drawn.is_ok(), "a text takes everything: {drawn:?}");
    }
    svg
}

fn points<'a>(shown: &'a PlottedSweep<'_>) -> impl Iterator<Item = (&'a PointResult, &'a ClassResult)> {
    shown.result.points.iter().filter_map(|point| Some((point, point.classes.get(shown.class)?)))
}

/// The x axis is logarithmic: rates of a search are.
fn x(rate: f64) -> f64 {
    rate.log10()
}

fn rates(shown: &[PlottedSweep<'_>]) -> Range<f64> {
    let all = || shown.iter().flat_map(|one| &one.result.points).map(|point| x(point.rate));
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    low - 0.05..high + 0.05
}

fn chart<'a, 'b>(
    panel: &'a Panel<'b>,
    title: &str,
    rates: Range<f64>,
    values: Range<f64>,
    label: &dyn Fn(&f64) -> String,
) -> Result<Chart<'a, 'b>, DrawingAreaErrorKind<std::io::Error>> {
    let mut chart = ChartBuilder::on(panel)
        .margin(8)
        .margin_right(16)
        .caption(title, ("sans-serif", 14).into_font())
        .x_label_area_size(26)
        .y_label_area_size(64)
        .build_cartesian_2d(rates, values)?;
    chart
        .configure_mesh()
        .x_labels(10)
        .y_labels(5)
        .x_desc("offered rate, requests/s")
        .x_label_formatter(&|log| rate_label(*log))
        .y_label_formatter(&|value| label(value))
        .label_style(("sans-serif", 11))
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    Ok(chart)
}

fn rate_label(log: f64) -> String {
    let rate = 10_f64.powf(log);
    let digits = if rate < 1.0 { 2 } else { usize::from(rate < 10.0) };
    format!("{rate:.digits$}")
}

fn draw_curve(chart: &mut Chart<'_, '_>, curve: &Curve) -> PlotOutcome {
    let color = curve.color;
    chart
        .draw_series(LineSeries::new(curve.points.iter().copied(), color.stroke_width(2)))?
        .label(&curve.label)
        .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 14, y)], color.stroke_width(2)));
    chart.draw_series(curve.points.iter().map(|at| Circle::new(*at, 3, color.filled())))?;
    Ok(())
}

fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> PlotOutcome {
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 11))
        .draw()
}

fn dashed(chart: &mut Chart<'_, '_>, line: [(f64, f64); 2], color: RGBColor, label: Option<String>) -> PlotOutcome {
    let style = ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: 1 };
    let series = chart.draw_series(DashedLineSeries::new(line, 5, 4, style))?;
    if let Some(label) = label {
        series.label(label).legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 14, y)], color.stroke_width(1)));
    }
    Ok(())
}

/// Joint attainment, its interval, the target, and the goodput. A rate at which runs did not settle has no attainment: a cross.
fn attainment(panel: &Panel<'_>, shown: &[PlottedSweep<'_>], rates: Range<f64>) -> PlotOutcome {
    let percent = |value: &f64| format!("{:.0} %", value * 100.0);
    let mut chart =
        chart(panel, "joint attainment (cross: the run did not settle)", rates.clone(), 0.0..1.03, &percent)?;
    for one in shown {
        let band: Vec<(f64, f64, f64)> = points(one)
            .filter_map(|(point, class)| class.interval.map(|at| (x(point.rate), at.low, at.high)))
            .collect();
        let outline = band.iter().map(|at| (at.0, at.2)).chain(band.iter().rev().map(|at| (at.0, at.1)));
        chart.draw_series(std::iter::once(Polygon::new(outline.collect::<Vec<_>>(), one.color.mix(0.15))))?;
        let attained = points(one).filter_map(|(point, class)| Some((x(point.rate), class.attainment?)));
        let label = format!("{}attainment", one.label);
        draw_curve(&mut chart, &Curve { label, color: one.color, points: attained.collect() })?;
        let unsteady = points(one).filter(|(point, _)| point.verdict == RunVerdict::Unsteady);
        chart
            .draw_series(unsteady.map(|(point, _)| Cross::new((x(point.rate), 0.03), 5, one.color.stroke_width(2))))?;
        if let Some(goodput) = one.result.goodput.requests_per_second {
            let label = format!("{}goodput {goodput:.2} requests/s", one.label);
            dashed(&mut chart, [(x(goodput), 0.0), (x(goodput), 1.0)], one.color, Some(label))?;
        }
    }
    if let Some(one) = shown.first() {
        let target = one.promise.joint_attainment_target;
        dashed(
            &mut chart,
            [(rates.start, target), (rates.end, target)],
            RED,
            Some(format!("target {}", percent(&target))),
        )?;
    }
    legend(&mut chart)
}

/// Throughput beside goodput.
fn throughput(panel: &Panel<'_>, shown: &[PlottedSweep<'_>], rates: Range<f64>) -> PlotOutcome {
    let mut curves = Vec::new();
    for one in shown {
        let flow = |of: fn(&PointResult) -> f64| points(one).map(|(point, _)| (x(point.rate), of(point))).collect();
        let (all, met) = (format!("{}answers/s", one.label), format!("{}of these met, all classes", one.label));
        let faint = if shown.len() > 1 { one.color } else { GREY };
        curves.push(Curve { label: all, color: faint, points: flow(|point| point.throughput.requests_per_second) });
        curves.push(Curve { label: met, color: one.color, points: flow(|point| point.throughput.met_per_second) });
    }
    let most = curves.iter().flat_map(|curve| &curve.points).map(|at| at.1).fold(1e-9, f64::max);
    let mut chart =
        chart(panel, "throughput: what a benchmark without promises would quote", rates, 0.0..most * 1.08, &|value| {
            format!("{value:.1}")
        })?;
    for curve in &curves {
        draw_curve(&mut chart, curve)?;
    }
    legend(&mut chart)
}

/// Percentiles of a latency on a logarithmic axis, and its threshold. A percentile that was not reached, or rests on too few
/// requests, is not drawn.
fn latency(
    panel: &Panel<'_>,
    shown: &[PlottedSweep<'_>],
    rates: Range<f64>,
    title: &str,
    objective: &str,
    of: fn(&ClassResult) -> &MeasureQuantiles,
) -> PlotOutcome {
    let log = |percentile: Percentile| percentile.seconds().filter(|seconds| *seconds > 0.0).map(f64::log10);
    let kinds: [(&str, PercentileOf); 3] = [("p50", |all| all.p50), ("p95", |all| all.p95), ("p99", |all| all.p99)];
    let mut curves = Vec::new();
    for one in shown {
        for (number, (kind, percentile)) in
            kinds.iter().enumerate().filter(|(number, _)| shown.len() == 1 || *number == 1)
        {
            let color = if shown.len() == 1 { COLORS[number] } else { one.color };
            let seen = points(one).filter_map(|(point, class)| Some((x(point.rate), log(percentile(of(class)))?)));
            curves.push(Curve { label: format!("{}{kind}", one.label), color, points: seen.collect() });
        }
    }
    let threshold = shown.first().and_then(|one| one.promise.objectives.get(objective)).map(|at| at.threshold_seconds);
    let values = || curves.iter().flat_map(|curve| &curve.points).map(|at| at.1).chain(threshold.map(f64::log10));
    let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
    let range = if low.is_finite() { low - 0.15..high + 0.2 } else { -3.0..1.0 };
    let mut chart = chart(panel, title, rates.clone(), range, &|value| duration_label(10_f64.powf(*value)))?;
    for curve in &curves {
        draw_curve(&mut chart, curve)?;
    }
    if let Some(threshold) = threshold {
        let line = [(rates.start, threshold.log10()), (rates.end, threshold.log10())];
        dashed(&mut chart, line, RED, Some(format!("threshold {}", duration_label(threshold))))?;
    }
    legend(&mut chart)
}

fn duration_label(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.001 => format!("{:.0} us", seconds * 1e6),
        _ if seconds < 0.01 => format!("{:.1} ms", seconds * 1e3),
        _ if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}
