//! Laws in worlds that were drawn, and in a steady one. `docs/scheduling.md` lists the drawn worlds in which some do not
//! hold.

use std::num::NonZeroU32;
use std::time::Duration;

use super::super::{
    Flood, GatewayLink, GatewayScheduling, Mix, Policy, RunReport, RunSpan, Scenario, capacity, run, run_in,
};
use crate::route::settings::Concurrency;
use crate::types::Tick;

/// Engines, objectives and traffic unlike each other; few requests, so that the runs are short.
const WORLDS: [u64; 6] = [2, 4, 6, 8, 9, 13];

const fn span(warm_up: u64, measured: u64, after: u64) -> RunSpan {
    let seconds = Duration::from_secs;
    RunSpan { warm_up: seconds(warm_up), measured: seconds(measured), after: seconds(after) }
}

const SPAN: RunSpan = span(20, 60, 5);

/// The gateway with all other settings at their defaults.
fn gateway(seats: Concurrency) -> Policy {
    Policy::Scheduled(GatewayScheduling { seats, ..GatewayScheduling::published() })
}

/// Requests per second at a load of 1.
fn one(mix: &Mix) -> f64 {
    capacity(mix, &RunSpan { after: Duration::ZERO, ..SPAN })
}

fn starved(report: &RunReport) -> Vec<String> {
    let tenants = report.tenants.iter().filter(|(_, score)| score.judged() >= 20 && score.dispatched == 0);
    tenants.map(|((flow, tenant), _)| format!("{} of {tenant}", report.flows[*flow])).collect()
}

#[test]
fn in_drawn_worlds_auto_keeps_what_least_connections_and_static_seats_keep_and_starves_nobody() {
    let fixed = |seats| gateway(Concurrency::Fixed(NonZeroU32::new(seats).unwrap()));
    for world in WORLDS {
        let mix = Mix::drawn(world);
        let one = one(&mix);
        let kept = |policy: &Policy, load: f64| run(&mix, policy, load * one, &SPAN).goodput();
        let auto = kept(&gateway(Concurrency::Auto), 0.5);
        let least = kept(&Policy::LeastConnections, 0.5);
        assert!(auto >= 0.97 * least, "world {world} at 0.5: {auto}, least connections {least}");
        let auto = run(&mix, &gateway(Concurrency::Auto), 1.2 * one, &SPAN);
        assert_eq!(starved(&auto), Vec::<String>::new(), "world {world}");
        let others = [(Policy::LeastConnections, 0.97), (fixed(32), 0.95), (fixed(64), 0.95)];
        for (policy, part) in others {
            let (auto, theirs) = (auto.goodput(), kept(&policy, 1.2));
            assert!(auto >= part * theirs, "world {world} at 1.2: {auto}, {policy:?} {theirs}");
        }
    }
}

#[test]
fn in_drawn_worlds_three_gateways_that_hear_of_each_other_keep_what_one_keeps() {
    for world in [4, 8] {
        let mix = Mix::drawn(world);
        let rate = 1.2 * one(&mix);
        let kept = |gateways: u32, exchange| {
            let gateways = NonZeroU32::new(gateways).unwrap();
            let scenario = Scenario { gateways, exchange, ..Scenario::default() };
            let report = run_in(&mix, &gateway(Concurrency::Auto), rate, &SPAN, &scenario);
            assert_eq!(starved(&report), Vec::<String>::new(), "world {world}, {gateways} gateways");
            report.goodput()
        };
        let (alone, together) = (kept(1, None), kept(3, Some(GatewayLink::default())));
        assert!(together >= 0.95 * alone, "world {world}: {together}, one gateway {alone}");
    }
}

/// Seats that do not bind may be any number; what oscillates, if anything, is what runs.
#[test]
fn in_a_steady_world_beyond_capacity_the_running_requests_do_not_oscillate() {
    let mix = Mix::mono();
    let span = span(60, 60, 0);
    let report = run(&mix, &gateway(Concurrency::Auto), 1.2 * mix.load_of_one.unwrap(), &span);
    let (from, until) = (Tick::ZERO + span.warm_up, Tick::ZERO + span.warm_up + span.measured);
    let looks = report.looks.iter().filter(|look| look.at >= from && look.at < until);
    let running: Vec<f64> = looks.map(|look| look.engines.iter().map(|(running, _)| *running as f64).sum()).collect();
    let mean = running.iter().sum::<f64>() / running.len() as f64;
    assert!(running.len() >= 59 && running.iter().all(|now| (now / mean - 1.0).abs() < 0.25), "{mean}: {running:?}");
}

#[test]
fn a_flood_of_thirty_times_costs_the_other_tenants_of_an_office_two_points_on_the_mean_at_most() {
    let span = span(60, 100, 10);
    let flood = Flood { tenant: "web".to_owned(), times: 30.0, from: Duration::from_secs(60) };
    let flooded = Scenario { floods: vec![flood], ..Scenario::default() };
    let mut lost = Vec::new();
    for seed in [1, 2] {
        let mix = Mix { seed, ..Mix::office() };
        let rate = mix.load_of_one.unwrap();
        let [calm, flooded] = [Scenario::default(), flooded.clone()]
            .map(|scenario| run_in(&mix, &gateway(Concurrency::Auto), rate, &span, &scenario));
        let losses = calm.losses(&flooded).into_iter();
        lost.extend(losses.filter(|((_, tenant), _)| tenant.as_str() != "web").map(|(_, points)| points));
    }
    let mean = lost.iter().sum::<f64>() / lost.len() as f64;
    assert!(lost.len() >= 12 && mean <= 2.0, "{mean}: {lost:?}");
}
