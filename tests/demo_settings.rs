//! The demo's settings are read by the gateway's own reader.

use goodput::clock::Clock;
use goodput::config::{ProcessEnvironment, load};
use goodput::sim::demo;

#[tokio::test]
async fn the_demos_settings_have_no_problem() {
    let fleet = demo::fleet(Clock::start(), 1).await.unwrap();
    let free = "127.0.0.1:0".parse().unwrap();
    let yaml = demo::settings(&fleet, free, free);
    match load(&yaml, &ProcessEnvironment::default()) {
        Ok(settings) => {
            let classes: Vec<String> = settings.classes.iter().map(|class| class.id.to_string()).collect();
            let flows: Vec<String> = demo::traffic(1, 1.0).flows.into_iter().map(|flow| flow.name).collect();
            assert_eq!(classes, flows);
            for (class, flow) in settings.classes.iter().zip(demo::traffic(1, 1.0).flows) {
                assert_eq!(class.objectives.ttft, flow.objectives.ttft);
                assert_eq!(class.objectives.tpot, flow.objectives.tpot);
                assert_eq!(class.objectives.itl, flow.objectives.itl);
                assert_eq!(class.objectives.e2e, flow.objectives.e2e);
            }
        }
        Err(problems) => panic!("{problems:#?}\n{yaml}"),
    }
}
