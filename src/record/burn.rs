//! Attainment, burn rate and error budget of a class.
//!
//! Pure: outcomes and moments go in, attainment, burn rate and budget come out. Each window is a ring of
//! slots, so memory grows neither with traffic nor with time; a window covers between 119/120 and all of
//! its length.
//!
//! Nothing is known from before the class existed, normally the start of the process. A longer window
//! covers the time since, and each [`WindowCount`] says how much of it that is: `3d` an hour after the
//! start is that hour. Omitting incomplete windows would report nothing for a month after every restart;
//! treating them as complete would extrapolate the first hour to three days.

mod tenants;

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::types::Tick;
use tenants::Tenants;

const SLOTS: usize = 120;
const NANOS: u64 = 1_000_000_000;

/// Windows of every class beside its own, as alert rules use them.
const COMMON: [Duration; 5] = [
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(60 * 60),
    Duration::from_secs(6 * 60 * 60),
    Duration::from_secs(3 * 24 * 60 * 60),
];

/// Index of the window searched for the highest good rate.
const RATE_WINDOW: usize = 2;

/// Window of [`Burn::pressure`], and the fewest judged requests in it that are evidence.
const PRESSURE: Duration = Duration::from_secs(60);
const ENOUGH: u64 = 10;

/// Judged requests of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JudgedCount {
    /// Requests that were met.
    pub met: u64,
    /// Requests that were met or missed.
    pub judged: u64,
}

impl JudgedCount {
    /// Share of met requests; `None` if none was judged.
    #[must_use]
    pub fn attainment(self) -> Option<f64> {
        (self.judged > 0).then(|| self.met as f64 / self.judged as f64)
    }

    fn note(&mut self, met: bool) {
        self.add(JudgedCount { met: u64::from(met), judged: 1 });
    }

    fn add(&mut self, more: JudgedCount) {
        self.met += more.met;
        self.judged += more.judged;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct BurnSlot {
    number: u64,
    count: JudgedCount,
}

/// Counts in a form that outlives the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BurnState {
    /// Each window.
    windows: Vec<WindowState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct WindowState {
    /// Its length in seconds.
    window: u64,
    /// Unix time in seconds from which on it was counted.
    since: u64,
    /// Slots in which anything was judged: number from the epoch, met, judged.
    slots: Vec<(u64, u64, u64)>,
}

#[derive(Debug)]
struct Ring {
    window: Duration,
    /// Unix time at the tick 0, in nanoseconds.
    epoch: u64,
    /// Counting began: nanoseconds since the epoch of the slots' numbers.
    since: u64,
    /// The length of a slot.
    slot_nanos: u64,
    slots: Box<[BurnSlot]>,
    /// The current slot, and the moments that belong to it.
    present: usize,
    span: Range<u64>,
}

impl Ring {
    fn new(window: Duration, since: Tick, epoch: u64) -> Self {
        let slot_nanos = u64::try_from(window.as_nanos() / SLOTS as u128).unwrap_or(u64::MAX).max(1);
        let slots = vec![BurnSlot::default(); SLOTS].into();
        let since_epoch = since.as_nanos().saturating_add(epoch);
        let mut ring = Ring { window, epoch, since: since_epoch, slot_nanos, slots, present: 0, span: 0..0 };
        ring.turn_to(since);
        ring
    }

    /// The number of the slot that this moment belongs into.
    fn number_at(&self, at: Tick) -> u64 {
        at.as_nanos().saturating_add(self.epoch) / self.slot_nanos
    }

    fn state(&self) -> WindowState {
        let counted = self.slots.iter().filter(|slot| slot.count.judged > 0);
        WindowState {
            window: self.window.as_secs(),
            since: self.since / NANOS,
            slots: counted.map(|slot| (slot.number, slot.count.met, slot.count.judged)).collect(),
        }
    }

    /// Restores the counts of a previous process. Numbers outside the window are left out.
    fn restore(&mut self, state: &WindowState, at: Tick) {
        let newest = self.number_at(at);
        for &(number, met, judged) in &state.slots {
            let is_near = number.saturating_add(SLOTS as u64) > newest && number < newest + SLOTS as u64;
            // Counted later than now: a clock that was set back meanwhile undoes nothing.
            let number = number.min(newest);
            let slot = &mut self.slots[(number % SLOTS as u64) as usize];
            let is_sound = met <= judged && judged < u64::MAX / SLOTS as u64;
            if is_sound && is_near && slot.number <= number {
                if slot.number < number {
                    *slot = BurnSlot { number, count: JudgedCount::default() };
                }
                slot.count.add(JudgedCount { met, judged });
            }
        }
        self.since = self.since.min(state.since.saturating_mul(NANOS));
    }

    /// Makes the slot of this moment the current one.
    fn turn_to(&mut self, at: Tick) {
        if self.span.contains(&at.as_nanos()) {
            return;
        }
        let number = self.number_at(at);
        self.present = (number % SLOTS as u64) as usize;
        let begins = number * self.slot_nanos;
        let tick = |nanos: u64| nanos.saturating_sub(self.epoch);
        self.span = tick(begins)..tick(begins.saturating_add(self.slot_nanos));
        let slot = &mut self.slots[self.present];
        if slot.number < number {
            *slot = BurnSlot { number, count: JudgedCount::default() };
        }
    }

    fn present(&mut self) -> &mut JudgedCount {
        &mut self.slots[self.present].count
    }

    /// The slots covered at `at`; `fresh` is part of the current one.
    fn live(&self, fresh: JudgedCount, at: Tick) -> impl Iterator<Item = BurnSlot> {
        let newest = self.number_at(at);
        let slots = self.slots.iter().copied().enumerate().map(move |(place, mut slot)| {
            if place == self.present {
                slot.count.add(fresh);
            }
            slot
        });
        slots.filter(move |slot| slot.number <= newest && slot.number + SLOTS as u64 > newest)
    }

    fn count(&self, fresh: JudgedCount, at: Tick) -> JudgedCount {
        let mut sum = JudgedCount::default();
        self.live(fresh, at).for_each(|slot| sum.add(slot.count));
        sum
    }

    fn span(&self, fresh: JudgedCount, at: Tick) -> WindowCount {
        WindowCount {
            window: self.window,
            covered: Duration::from_nanos((at.as_nanos() + self.epoch).saturating_sub(self.since)).min(self.window),
            count: self.count(fresh, at),
        }
    }
}

/// The count of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCount {
    /// Length of the window.
    pub window: Duration,
    /// How much of the window has been counted; less than its length while the class is younger.
    pub covered: Duration,
    /// The requests.
    pub count: JudgedCount,
}

impl WindowCount {
    /// The window's name: `28d`, `6h`, `30m`, `90s`.
    #[must_use]
    pub fn name(&self) -> String {
        let seconds = self.window.as_secs();
        let units = [(24 * 60 * 60, "d"), (60 * 60, "h"), (60, "m")];
        let whole = units.into_iter().find(|(unit, _)| seconds > 0 && seconds.is_multiple_of(*unit));
        whole.map_or_else(|| format!("{seconds}s"), |(unit, name)| format!("{}{name}", seconds / unit))
    }
}

/// The outcomes of one class in all its windows.
#[derive(Debug)]
pub struct Burn {
    target: f64,
    /// Unix time at the tick 0, in nanoseconds; 0 if counts do not outlive the process.
    epoch: u64,
    rings: Vec<Ring>,
    /// Requests since the last slot change. Added to every ring at the next change, so that a request is
    /// counted once rather than in each ring.
    fresh: JudgedCount,
    stretch: Range<u64>,
    /// The last minute's requests that were not shed.
    served: Ring,
    /// The same by tenant.
    tenants: Tenants,
    summed: Option<SummedCounts>,
}

/// Counts over all gateways, which replace those of this process.
#[derive(Debug)]
struct SummedCounts {
    windows: Vec<WindowCount>,
    /// When they are too old to be used.
    until: Tick,
}

impl Burn {
    /// A class with `target` over `window`, counted from `since`.
    #[must_use]
    pub fn new(target: f64, window: Duration, since: Tick) -> Self {
        Burn::at_epoch(target, window, since, Duration::ZERO)
    }

    /// The same with counts that outlive the process: `epoch` is the Unix time at the tick 0.
    #[must_use]
    pub fn at_epoch(target: f64, window: Duration, since: Tick, epoch: Duration) -> Self {
        let epoch = u64::try_from(epoch.as_nanos()).unwrap_or_default();
        let all = COMMON.into_iter().chain([window]);
        let rings = all.map(|length| Ring::new(length, since, epoch)).collect();
        Burn {
            target,
            epoch,
            rings,
            fresh: JudgedCount::default(),
            stretch: 0..0,
            served: Ring::new(PRESSURE, since, epoch),
            tenants: Tenants::default(),
            summed: None,
        }
    }

    /// Shows these counts, of all gateways, in place of this process' own until then.
    pub fn set_summed(&mut self, windows: Vec<WindowCount>, until: Tick) {
        self.summed = Some(SummedCounts { windows, until });
    }

    /// Whether the counts shown at `at` are those of all gateways.
    #[must_use]
    pub fn is_summed(&self, at: Tick) -> bool {
        self.summed.as_ref().is_some_and(|summed| at < summed.until)
    }

    /// Whether its counts outlive the process.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.epoch > 0
    }

    /// The lengths of all windows.
    pub fn windows(&self) -> impl Iterator<Item = Duration> {
        self.rings.iter().map(|ring| ring.window)
    }

    /// The published counts of a ring's window: the sum over all gateways if known, else the ring's own.
    fn shown(&self, ring: &Ring, at: Tick) -> WindowCount {
        let summed = self.summed.as_ref().filter(|summed| at < summed.until);
        let known = summed.and_then(|summed| summed.windows.iter().find(|count| count.window == ring.window));
        known.copied().unwrap_or_else(|| ring.span(self.fresh, at))
    }

    /// The counts so far, over every window.
    pub fn state(&mut self) -> BurnState {
        self.settle();
        BurnState { windows: self.rings.iter().map(Ring::state).collect() }
    }

    /// Restores the counts of a previous process, for the windows that both have.
    pub fn restore(&mut self, state: &BurnState, at: Tick) {
        self.settle();
        for ring in &mut self.rings {
            let same = state.windows.iter().find(|window| window.window == ring.window.as_secs());
            if let Some(same) = same {
                ring.restore(same, at);
            }
        }
    }

    /// Changes the target. Counts are kept, except for a window of another length.
    pub fn promise(&mut self, target: f64, window: Duration, at: Tick) {
        self.target = target;
        self.settle();
        let own = self.rings.last_mut().expect("a class has its own window");
        if own.window != window {
            *own = Ring::new(window, at, self.epoch);
        }
    }

    /// Records the end of a judged request.
    pub fn note(&mut self, met: bool, at: Tick) {
        if !self.stretch.contains(&at.as_nanos()) {
            self.settle();
            self.rings.iter_mut().for_each(|ring| ring.turn_to(at));
            let spans = self.rings.iter().map(|ring| &ring.span);
            self.stretch = spans.fold(0..u64::MAX, |all, span| all.start.max(span.start)..all.end.min(span.end));
        }
        self.fresh.note(met);
    }

    /// Adds fresh counts to the slots.
    fn settle(&mut self) {
        let fresh = std::mem::take(&mut self.fresh);
        self.rings.iter_mut().for_each(|ring| ring.present().add(fresh));
        self.stretch = 0..0;
    }

    /// Records a request that was not shed, for [`Burn::pressure`].
    pub fn note_served(&mut self, met: bool, at: Tick) {
        self.served.turn_to(at);
        self.served.present().note(met);
    }

    /// The same with its tenant (a hash of the name).
    pub fn note_served_to(&mut self, tenant: u64, met: bool, at: Tick) {
        self.note_served(met, at);
        self.tenants.note(tenant, met, at);
    }

    /// Burn rate of the last minute without shed requests, on which overload levels are based. `None` if too
    /// few requests were judged.
    ///
    /// The lowest of the rates that remain without each tenant in turn, provided others had requests, so
    /// that one tenant's misses alone do not raise it.
    #[must_use]
    pub fn pressure(&self, at: Tick) -> Option<f64> {
        let count = self.served.count(JudgedCount::default(), at);
        if count.judged < ENOUGH {
            return None;
        }
        let without_each = self.tenants.without_each(at).into_iter().map(|rest| self.rate(rest));
        Some(without_each.fold(self.rate(count), f64::min))
    }

    /// The count of each window at `at`. The class's own window comes last, unless it is a common
    /// one.
    pub fn spans(&self, at: Tick) -> impl Iterator<Item = WindowCount> {
        let common = COMMON.contains(&self.own_ring().window);
        let shown = if common { self.rings.len() - 1 } else { self.rings.len() };
        self.rings[..shown].iter().map(move |ring| self.shown(ring, at))
    }

    /// The count of the class's own window at `at`.
    #[must_use]
    pub fn own(&self, at: Tick) -> WindowCount {
        self.shown(self.own_ring(), at)
    }

    fn own_ring(&self) -> &Ring {
        self.rings.last().expect("a class has its own window")
    }

    /// Burn rate: 1 uses up the error budget exactly at the end of the class's window. 0 if nothing was
    /// judged.
    #[must_use]
    pub fn rate(&self, count: JudgedCount) -> f64 {
        let missed = 1.0 - count.attainment().unwrap_or(1.0);
        if missed == 0.0 { 0.0 } else { missed / (1.0 - self.target).max(0.0) }
    }

    /// Remaining share of the error budget in the class's own window; negative if
    /// overspent.
    #[must_use]
    pub fn budget_left(&self, at: Tick) -> f64 {
        1.0 - self.rate(self.own(at).count)
    }

    /// The highest rate of judged requests, per second, among the complete 30-second intervals of the last
    /// hour whose attainment met the target.
    #[must_use]
    pub fn good_rate(&self, at: Tick) -> f64 {
        let ring = &self.rings[RATE_WINDOW];
        let present = ring.number_at(at);
        let seconds = ring.slot_nanos as f64 / 1e9;
        let good = |slot: &BurnSlot| slot.count.attainment().is_some_and(|met| met >= self.target);
        let complete = ring.live(self.fresh, at).filter(|slot| slot.number < present).filter(good);
        complete.map(|slot| slot.count.judged as f64 / seconds).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn seconds(n: u64) -> Tick {
        Tick::from_millis(n * 1000)
    }

    fn count_of(burn: &Burn, window: &str, at: Tick) -> JudgedCount {
        burn.spans(at).find(|span| span.name() == window).unwrap().count
    }

    #[test]
    fn a_class_that_misses_twice_its_budget_burns_at_two() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        for i in 0..100 {
            burn.note(i % 5 != 0, seconds(i));
        }
        let count = count_of(&burn, "5m", seconds(100));
        assert_eq!(count, JudgedCount { met: 80, judged: 100 });
        assert!((burn.rate(count) - 2.0).abs() < 1e-9);
        assert!((burn.budget_left(seconds(100)) + 1.0).abs() < 1e-9);
    }

    #[test]
    fn sums_over_gateways_are_shown_until_they_are_too_old_and_never_saved() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        (0..10).for_each(|second| burn.note(true, seconds(second)));
        let count = JudgedCount { met: 60, judged: 100 };
        let summed = WindowCount { window: 28 * DAY, covered: 2 * DAY, count };
        burn.set_summed(vec![summed], seconds(60));
        assert!(burn.is_summed(seconds(59)) && !burn.is_summed(seconds(60)));
        assert_eq!((burn.own(seconds(59)), burn.own(seconds(60)).count.judged), (summed, 10));
        assert!((burn.budget_left(seconds(59)) + 3.0).abs() < 1e-9);
        assert_eq!(count_of(&burn, "5m", seconds(59)).judged, 10, "a window that was not asked for");
        let mut after = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        after.restore(&burn.state(), seconds(59));
        assert_eq!(after.own(seconds(59)).count, JudgedCount { met: 10, judged: 10 });
    }

    #[test]
    fn pressure_is_of_the_last_minute_and_of_what_was_not_shed() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        for i in 0..9 {
            burn.note_served(i % 2 == 0, seconds(i));
            burn.note(false, seconds(i));
        }
        assert_eq!(burn.pressure(seconds(9)), None, "nine tell nothing");
        burn.note_served(false, seconds(9));
        let pressure = burn.pressure(seconds(9)).expect("ten do");
        assert!((pressure - 5.0).abs() < 1e-9, "{pressure}");
        assert_eq!(burn.pressure(seconds(70)), None, "nothing came any more");
    }

    #[test]
    fn no_tenants_misses_alone_are_pressure() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        for i in 0..30 {
            burn.note_served_to(1, false, seconds(i));
            burn.note_served_to(2, i % 10 != 0, seconds(i));
        }
        let close = |rate: f64| (burn.pressure(seconds(30)).unwrap() - rate).abs() < 1e-9;
        assert!(close(1.0), "what the other one sees: {:?}", burn.pressure(seconds(30)));
        for i in 0..30 {
            burn.note_served_to(3, false, seconds(i));
        }
        let all = burn.pressure(seconds(30)).unwrap();
        assert!((all - 5.5).abs() < 1e-9, "{all}: two of them see it");
        let mut beside = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        (0..30).for_each(|i| beside.note_served_to(1, false, seconds(i)));
        let alone = beside.pressure(seconds(30)).unwrap();
        assert!((alone - 10.0).abs() < 1e-9, "{alone}: nobody else is there");
        beside.note_served_to(2, true, seconds(30));
        assert_eq!(beside.pressure(seconds(30)), Some(0.0), "the other one misses nothing");
        beside.note_served_to(2, false, seconds(30));
        let both = beside.pressure(seconds(30)).unwrap();
        assert!((both - 5.0).abs() < 1e-9, "{both}");
        assert_eq!(burn.pressure(seconds(100)), None, "nothing came any more");
    }

    #[test]
    fn beyond_sixty_four_tenants_the_others_are_nobody_in_particular() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        (0..200).for_each(|tenant| burn.note_served_to(tenant, tenant < 100, seconds(1)));
        let rate = burn.pressure(seconds(2)).unwrap();
        assert!((rate - 5.0).abs() < 0.05, "{rate}");
    }

    #[test]
    fn nothing_judged_burns_nothing_and_has_no_attainment() {
        let burn = Burn::new(0.95, 28 * DAY, Tick::ZERO);
        let at = seconds(1_000_000);
        assert!(burn.spans(at).all(|span| span.count.attainment().is_none() && burn.rate(span.count) == 0.0));
        assert_eq!(burn.budget_left(at), 1.0);
        assert_eq!(burn.good_rate(at), 0.0);
    }

    #[test]
    fn a_short_window_forgets_what_a_long_one_keeps() {
        let mut burn = Burn::new(0.95, 28 * DAY, Tick::ZERO);
        burn.note(false, seconds(10));
        let later = seconds(10 + 5 * 60);
        assert_eq!(count_of(&burn, "5m", later), JudgedCount::default());
        assert_eq!(count_of(&burn, "30m", later), JudgedCount { met: 0, judged: 1 });
        assert_eq!(count_of(&burn, "28d", later), JudgedCount { met: 0, judged: 1 });
    }

    /// A process of which ten minutes were good and ten bad ends; another one begins an hour later.
    #[test]
    fn what_a_process_before_counted_is_restored_where_it_was() {
        let unix = Duration::from_secs(1_800_000_000);
        let mut before = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix);
        (0..20 * 60).for_each(|second| before.note(second < 600, seconds(second)));
        let state = before.state();
        let later = unix + Duration::from_secs(80 * 60);
        let mut after = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, later);
        after.restore(&state, Tick::ZERO);
        let both = JudgedCount { met: 600, judged: 1200 };
        for (window, count) in
            [("5m", JudgedCount::default()), ("1h", JudgedCount::default()), ("6h", both), ("28d", both)]
        {
            assert_eq!(count_of(&after, window, seconds(1)), count, "{window}");
        }
        assert!((after.budget_left(seconds(1)) + 4.0).abs() < 1e-9);
        assert_eq!(after.own(seconds(60)).covered, Duration::from_secs(81 * 60), "since the first of them began");
        after.note(true, seconds(2));
        assert_eq!(count_of(&after, "28d", seconds(3)), JudgedCount { met: 601, judged: 1201 });
        assert_eq!(after.state(), {
            after.restore(&BurnState::default(), seconds(3));
            after.state()
        });
    }

    #[test]
    fn a_restart_within_a_slot_adds_up_and_shifts_nothing() {
        let unix = Duration::from_secs(1_800_000_000);
        let mut state = BurnState::default();
        for process in 0..100 {
            let mut burn = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix + Duration::from_secs(60 * process));
            burn.restore(&state, Tick::ZERO);
            burn.note(true, seconds(1));
            burn.note(false, seconds(2));
            state = burn.state();
        }
        let mut last = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix + Duration::from_secs(6000));
        last.restore(&state, Tick::ZERO);
        assert_eq!(count_of(&last, "28d", Tick::ZERO), JudgedCount { met: 100, judged: 200 });
        assert_eq!(count_of(&last, "5m", Tick::ZERO).judged, 8, "of the last five minutes");
        assert_eq!(last.own(Tick::ZERO).covered, Duration::from_secs(6000));
    }

    #[test]
    fn a_clock_that_was_set_back_before_a_restart_undoes_no_count() {
        let unix = Duration::from_secs(1_800_000_000);
        let mut before = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix);
        (0..20 * 60).for_each(|second| before.note(second < 600, seconds(second)));
        for back in [Duration::from_secs(60 * 60), 10 * DAY] {
            let mut after = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix.saturating_sub(back));
            after.restore(&before.state(), Tick::ZERO);
            let both = JudgedCount { met: 600, judged: 1200 };
            assert_eq!(count_of(&after, "28d", seconds(1)), both, "{back:?}");
            assert_eq!(count_of(&after, "28d", seconds(1) + 27 * DAY), both, "and for its window");
            assert_eq!(count_of(&after, "28d", seconds(1) + 29 * DAY).judged, 0);
        }
    }

    #[test]
    fn counts_that_cannot_be_are_left_out_and_another_window_begins_anew() {
        let unix = Duration::from_secs(1_800_000_000);
        let number = |days: u64| (unix.as_secs() + days * 24 * 60 * 60) * 120 / (28 * 24 * 60 * 60);
        let slots = vec![(number(0), 5, 4), (number(40), 1, 1), (u64::MAX - 200, 1, 1), (number(0) - 500, 1, 1)];
        let state = BurnState { windows: vec![WindowState { window: 28 * 24 * 60 * 60, since: 0, slots }] };
        let mut burn = Burn::at_epoch(0.9, 28 * DAY, Tick::ZERO, unix);
        burn.restore(&state, Tick::ZERO);
        assert_eq!(count_of(&burn, "28d", seconds(1)).judged, 0);
        let mut other = Burn::at_epoch(0.9, 30 * DAY, Tick::ZERO, unix);
        other.restore(&state, Tick::ZERO);
        assert_eq!(other.own(seconds(1)).covered, Duration::from_secs(1));
    }

    #[test]
    fn an_own_window_that_is_a_common_one_is_not_told_twice() {
        let burn = |window| Burn::new(0.95, window, Tick::ZERO);
        assert_eq!(burn(3 * DAY).spans(Tick::ZERO).count(), 5);
        let names: Vec<String> = burn(7 * DAY).spans(Tick::ZERO).map(|span| span.name()).collect();
        assert_eq!(names, ["5m", "30m", "1h", "6h", "3d", "7d"]);
    }

    #[test]
    fn a_window_longer_than_the_class_has_been_here_says_how_much_of_it_is_counted() {
        let mut burn = Burn::new(0.9, 28 * DAY, seconds(100));
        burn.note(false, seconds(110));
        let covered = |burn: &Burn, at| -> Vec<u64> { burn.spans(at).map(|span| span.covered.as_secs()).collect() };
        assert_eq!(covered(&burn, seconds(100)), [0; 6]);
        assert_eq!(covered(&burn, seconds(700)), [300, 600, 600, 600, 600, 600]);
        assert_eq!(covered(&burn, seconds(100) + 3 * DAY)[..5], [300, 1800, 3600, 21_600, 259_200]);
        assert_eq!(burn.own(seconds(100) + 27 * DAY).covered, 27 * DAY);
        assert_eq!(burn.own(seconds(100) + 40 * DAY).covered, 28 * DAY);
        burn.promise(0.9, 7 * DAY, seconds(700));
        assert_eq!(covered(&burn, seconds(760)), [300, 660, 660, 660, 660, 60], "another window begins anew");
    }

    #[test]
    fn the_good_rate_is_that_of_the_best_stretch_that_kept_the_promise() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        for i in 0..300 {
            burn.note(true, Tick::from_millis(i * 100)); // 10 a second, all met
        }
        for i in 0..900 {
            burn.note(i % 2 == 0, Tick::from_millis(30_000 + i * 33)); // 30 a second, half met
        }
        assert_eq!(burn.good_rate(seconds(61)), 10.0);
    }

    #[test]
    fn a_changed_window_begins_anew_and_a_changed_target_does_not() {
        let mut burn = Burn::new(0.9, 28 * DAY, Tick::ZERO);
        burn.note(false, seconds(1));
        burn.promise(0.5, 28 * DAY, seconds(2));
        assert_eq!(burn.budget_left(seconds(2)), -1.0);
        burn.promise(0.5, 7 * DAY, seconds(2));
        assert_eq!(burn.budget_left(seconds(2)), 1.0);
        assert_eq!(count_of(&burn, "5m", seconds(2)).judged, 1);
    }

    proptest! {
        /// A window covers at least its last 119/120 and at most its whole length.
        #[test]
        fn a_window_agrees_with_a_list_of_everything(
            steps in prop::collection::vec((0_u64..4_000, any::<bool>()), 1..200),
            wait in 0_u64..400_000,
        ) {
            let mut burn = Burn::new(0.95, DAY, Tick::ZERO);
            let mut at = 0;
            let mut all = Vec::new();
            for (step, met) in steps {
                at += step;
                burn.note(met, Tick::from_millis(at));
                all.push((at, met));
            }
            let now = at + wait;
            let window = 5 * 60 * 1000;
            let judged = |length: u64| all.iter().filter(|(then, _)| now - then < length).count() as u64;
            let counted = count_of(&burn, "5m", Tick::from_millis(now));
            prop_assert!(counted.met <= counted.judged);
            prop_assert!(judged(window - window / 120) <= counted.judged && counted.judged <= judged(window));
        }
    }
}
