use proptest::prelude::*;

use super::*;

fn secs(seconds: u64) -> Tick {
    Tick::from_millis(seconds * 1000)
}

fn depth(depth: u64) -> LoadMeasures {
    LoadMeasures { queue_depth: depth, ..LoadMeasures::default() }
}

fn level(action: Action, above: u64, below: u64) -> OverloadLevel {
    let bounds = |depth| LoadBounds { queue_depth: Some(depth), ..LoadBounds::default() };
    OverloadLevel { action, enter: bounds(above), leave: bounds(below), hold: Duration::from_secs(10) }
}

fn three() -> [OverloadLevel; 3] {
    [level(Action::Defer, 10, 5), level(Action::CapOutput(Tokens(256)), 20, 10), level(Action::Spill, 20, 10)]
}

#[test]
fn a_level_is_entered_at_once_and_the_next_when_it_had_its_time() {
    let (levels, mut controller) = (three(), OverloadController::default());
    assert!(!controller.evaluate(&levels, &depth(10), secs(0)), "not above");
    assert!(controller.evaluate(&levels, &depth(30), secs(1)));
    assert!(!controller.evaluate(&levels, &depth(30), secs(10)));
    assert!(controller.evaluate(&levels, &depth(30), secs(11)));
    assert!(controller.evaluate(&levels, &depth(30), secs(21)));
    assert_eq!(controller.level(), 3);
    assert!(!controller.evaluate(&levels, &depth(30), secs(90)), "there is no further one");
}

#[test]
fn a_level_stays_between_its_bounds_and_is_left_below_the_lower_one() {
    let (levels, mut controller) = (three(), OverloadController::default());
    controller.evaluate(&levels, &depth(11), secs(0));
    for (at, waiting) in [(20, 10), (30, 5), (40, 20)] {
        assert!(!controller.evaluate(&levels, &depth(waiting), secs(at)), "{waiting}");
    }
    assert!(controller.evaluate(&levels, &depth(4), secs(50)));
    assert_eq!(controller.level(), 0);
    assert!(controller.evaluate(&levels, &depth(11), secs(50)), "and entered again at any time");
    assert!(!controller.evaluate(&levels, &depth(0), secs(59)), "but then it stands again");
}

#[test]
fn all_levels_are_left_one_by_one_when_nothing_comes_any_more() {
    let (levels, mut controller) = (three(), OverloadController::default());
    (0..3).for_each(|i| assert!(controller.evaluate(&levels, &depth(99), secs(i * 10))));
    let changes: Vec<u64> =
        (21..100).filter(|second| controller.evaluate(&levels, &LoadMeasures::default(), secs(*second))).collect();
    assert_eq!(changes, [30, 40, 50]);
    assert_eq!(controller.level(), 0);
}

#[test]
fn who_is_shed_may_come_again_when_all_levels_above_have_been_left() {
    let levels = [level(Action::Defer, 10, 5), level(Action::ShedLower, 20, 10), level(Action::Spill, 20, 10)];
    let mut controller = OverloadController::default();
    assert_eq!(controller.sheds_until(&levels), Some(Tick::ZERO));
    controller.evaluate(&levels, &depth(99), secs(0));
    assert_eq!(controller.sheds_until(&levels), Some(secs(0)), "nobody is shed yet");
    controller.evaluate(&levels, &depth(99), secs(10));
    assert_eq!(controller.sheds_until(&levels), Some(secs(20)));
    controller.evaluate(&levels, &depth(99), secs(20));
    assert_eq!(controller.sheds_until(&levels), Some(secs(40)));
    (21..40).for_each(|second| assert_eq!(controller.evaluate(&levels, &depth(0), secs(second)), second == 30));
    assert_eq!(controller.sheds_until(&levels), Some(secs(40)));
    assert!(controller.evaluate(&levels, &depth(0), secs(40)));
    assert_eq!(controller.level(), 1, "it sheds no more, at that very moment");
}

#[test]
fn one_measure_is_enough_to_enter_and_all_are_needed_to_leave() {
    let bounds = |burn, wait, depth| LoadBounds {
        burn_rate: Some(burn),
        queue_wait: Some(Duration::from_millis(wait)),
        queue_depth: Some(depth),
    };
    let enter = bounds(2.0, 500, 50);
    let measured = |burn, wait, queue_depth| LoadMeasures {
        burn_rate: burn,
        queue_wait: Some(Duration::from_millis(wait)),
        queue_depth,
    };
    assert!(!enter.is_exceeded(&measured(Some(2.0), 500, 50)));
    for exceeding in [measured(Some(2.1), 0, 0), measured(None, 501, 0), measured(Some(0.0), 0, 51)] {
        assert!(enter.is_exceeded(&exceeding), "{exceeding:?}");
    }
    let leave = bounds(1.0, 100, 10);
    assert!(leave.is_kept(&measured(Some(0.9), 99, 9)));
    assert!(leave.is_kept(&LoadMeasures::default()), "nothing burns, nobody waits");
    for still in [measured(Some(1.0), 0, 0), measured(None, 100, 0), measured(None, 0, 10)] {
        assert!(!leave.is_kept(&still), "{still:?}");
    }
}

#[test]
fn an_operators_level_stands_until_it_is_released_and_is_then_left_as_any_other() {
    let (levels, mut controller) = (three(), OverloadController::default());
    controller.force(2, None, secs(5));
    assert!(controller.is_forced());
    assert!(!controller.evaluate(&levels, &depth(99), secs(100)));
    assert!(!controller.evaluate(&levels, &depth(0), secs(200)));
    controller.release(secs(300));
    assert_eq!((controller.level(), controller.is_forced()), (2, false));
    assert!(!controller.evaluate(&levels, &depth(0), secs(309)));
    assert!(controller.evaluate(&levels, &depth(0), secs(310)));
}

#[test]
fn an_operators_level_with_an_end_is_left_from_there_as_any_other() {
    let levels = [level(Action::ShedLower, 10, 5), level(Action::Spill, 20, 10)];
    let mut controller = OverloadController::default();
    controller.force(2, Some(secs(60)), secs(5));
    assert_eq!((controller.is_forced(), controller.forced_until()), (true, Some(secs(60))));
    assert_eq!(controller.sheds_until(&levels), Some(secs(80)));
    assert!((6..60).all(|second| !controller.evaluate(&levels, &depth(0), secs(second))));
    // Measured late, it ended when it was due.
    assert!(controller.evaluate(&levels, &depth(0), secs(63)), "somebody has to tell");
    assert_eq!((controller.level(), controller.is_forced(), controller.forced_until()), (2, false, None));
    let changes: Vec<u64> = (64..100).filter(|second| controller.evaluate(&levels, &depth(0), secs(*second))).collect();
    assert_eq!((changes, controller.level()), (vec![70, 80], 0));
    controller.force(1, Some(secs(200)), secs(100));
    controller.force(1, None, secs(101));
    assert_eq!(controller.sheds_until(&levels), None, "the last word counts");
    assert!(!controller.evaluate(&levels, &depth(0), secs(300)));
    controller.force(2, Some(secs(400)), secs(300));
    controller.release(secs(310));
    assert!(!controller.is_forced(), "it may be handed back before");
}

#[test]
fn fewer_levels_after_a_reload_are_fewer_in_force() {
    let mut controller = OverloadController::default();
    controller.force(3, None, secs(1));
    controller.fit(1, secs(2));
    assert_eq!(controller.level(), 1);
    assert!(controller.is_forced());
}

#[test]
fn what_is_in_force_is_all_up_to_the_level() {
    let levels = [
        level(Action::CapOutput(Tokens(500)), 1, 1),
        level(Action::CapOutput(Tokens(900)), 1, 1),
        level(Action::ReasoningOff, 1, 1),
        level(Action::ShedLower, 1, 1),
    ];
    assert_eq!(ActiveActions::at(&levels, 0), ActiveActions::default());
    assert_eq!(
        ActiveActions::at(&levels, 2),
        ActiveActions { level: 2, cap: Some(Tokens(500)), ..ActiveActions::default() }
    );
    let all = ActiveActions {
        level: 4,
        cap: Some(Tokens(500)),
        reasoning_off: true,
        shed_lower: true,
        ..ActiveActions::default()
    };
    assert_eq!(ActiveActions::at(&levels, 9), all);
}

#[test]
fn kinds_are_told_in_one_order() {
    let mut kinds = ActionKinds::default();
    assert!(kinds.is_empty());
    kinds.add(ActionKind::Spill);
    kinds.add(ActionKind::Defer);
    assert_eq!(kinds.iter().map(ActionKind::as_str).collect::<Vec<_>>(), ["defer", "spill"]);
    // Clients may rely on this order, and on new words being appended.
    ActionKind::ALL.into_iter().rev().for_each(|kind| kinds.add(kind));
    let all: Vec<_> = kinds.iter().map(ActionKind::as_str).collect();
    assert_eq!(all, ["defer", "shed_lower", "cap_output", "reasoning_off", "spill"]);
}

fn measures() -> impl Strategy<Value = LoadMeasures> {
    (prop::option::of(0.0..5.0), prop::option::of(0_u64..2000), 0_u64..60).prop_map(|(burn_rate, wait, queue_depth)| {
        LoadMeasures { burn_rate, queue_wait: wait.map(Duration::from_millis), queue_depth }
    })
}

fn levels() -> impl Strategy<Value = Vec<OverloadLevel>> {
    let one = (prop::option::of(0.1..4.0), prop::option::of(1_u64..1500), 1_u64..50, 0.1..=1.0, 0_u64..30).prop_map(
        |(burn_rate, wait, depth, share, hold): (Option<f64>, Option<u64>, u64, f64, u64)| {
            let bounds = |share: f64| LoadBounds {
                burn_rate: burn_rate.map(|rate| rate * share),
                queue_wait: wait.map(|wait| Duration::from_millis(wait).mul_f64(share)),
                queue_depth: Some((depth as f64 * share).ceil() as u64),
            };
            let hold = Duration::from_secs(hold);
            OverloadLevel { action: Action::Defer, enter: bounds(1.0), leave: bounds(share), hold }
        },
    );
    prop::collection::vec(one, 0..5)
}

proptest! {
    /// One level at a time, never within the hold of the top one, never without cause.
    #[test]
    fn no_change_without_cause_or_before_its_time(
        levels in levels(),
        history in prop::collection::vec((measures(), 0_u64..8), 1..200),
    ) {
        let (mut controller, mut now) = (OverloadController::default(), 0);
        let mut last = 0;
        for (measured, pause) in history {
            now += pause;
            let before = controller.level();
            let moved = controller.evaluate(&levels, &measured, secs(now));
            prop_assert!(controller.level() <= levels.len());
            prop_assert_eq!(moved, controller.level() != before);
            if moved {
                if before > 0 {
                    prop_assert!(now - last >= levels[before - 1].hold.as_secs());
                }
                if controller.level() > before {
                    prop_assert!(levels[before].enter.is_exceeded(&measured));
                } else {
                    prop_assert!(levels[before - 1].leave.is_kept(&measured));
                }
                prop_assert_eq!(controller.level().abs_diff(before), 1);
                last = now;
            }
        }
    }

    /// With constant measurements the level moves in one direction and settles.
    #[test]
    fn steady_measures_make_no_flapping(levels in levels(), start in 0_usize..5, measured in measures()) {
        let mut controller = OverloadController::default();
        controller.force(start.min(levels.len()), None, secs(0));
        controller.release(secs(0));
        let mut seen = vec![controller.level()];
        for second in 0..400 {
            if controller.evaluate(&levels, &measured, secs(second)) {
                seen.push(controller.level());
            }
        }
        prop_assert!(seen.len() <= levels.len() + 1);
        prop_assert!(seen.is_sorted() || seen.iter().rev().is_sorted(), "{:?}", seen);
    }
}
