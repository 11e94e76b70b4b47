//! Models of other load balancers and gateways, as far as they decide when a request goes to which engine.
//!
//! Modelled are the choice of an engine, queueing beyond a concurrency limit, order and time limits of the
//! queue, and health checks. Requests given to an engine that is down but not yet detected
//! fail.
//! each engine has so many, who goes first then and for how long, and that they look after
//! engines with checks of their own. One that is not seen to be down yet fails what it is given.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::time::Duration;

use super::effects::{DispatchedRequest, Effects, EngineHold};
use super::mix::{Arrival, MixClass};
use crate::types::{Priority, Tick};

/// Another load balancer or gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    /// Choice among engines with a free seat.
    pub pick: PickRule,
    /// Most concurrent requests per engine; `None` means unlimited.
    pub seats: Option<usize>,
    /// Queue order by [`grade`]: the lower line first, within a line by arrival.
    pub lines: [u8; 4],
    /// Longest wait per grade.
    pub wait: [Duration; 4],
    /// Seats, over all engines, that lower grades leave to this one.
    pub kept: [usize; 4],
    /// Whether a request that an engine did not accept goes to another one; otherwise the same engine is tried
    /// three times in three seconds.
    pub asks_another: bool,
}

/// Load balancing policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickRule {
    /// Round robin.
    InTurns,
    /// Least requests, round robin among equals.
    Fewest,
    /// The engine with the longest prefix sent before, if long enough and loads are similar; else the one with
    /// the least sent.
    LongestPrefix,
}

/// Share of the prompt from which a prefix counts.
const GOOD_PART: f64 = 0.3;
/// Difference and ratio from which loads count as dissimilar.
const FAR_APART: (usize, f64) = (64, 1.5);

/// Grade of a class, as operators would sort them: urgent, interactive, other, deferrable
/// work.
#[must_use]
pub fn grade(class: &MixClass) -> usize {
    match class.priority() {
        rank if rank < Priority::Normal => 0,
        Priority::Normal if class.objectives().ttft.is_some() => 1,
        Priority::Normal => 2,
        _ => 3,
    }
}

impl Peer {
    /// Dispatches everything at once, round robin.
    #[must_use]
    pub const fn round_robin() -> Peer {
        Peer { pick: PickRule::InTurns, ..Peer::least_connections() }
    }

    /// Dispatches everything at once to the engine with the fewest requests.
    #[must_use]
    pub const fn least_connections() -> Peer {
        Peer {
            pick: PickRule::Fewest,
            seats: None,
            lines: [0; 4],
            wait: [NO_END; 4],
            kept: [0; 4],
            asks_another: false,
        }
    }

    /// A router that sends prompts with equal beginnings to the same engine.
    #[must_use]
    pub const fn cache_aware() -> Peer {
        Peer { pick: PickRule::LongestPrefix, asks_another: true, ..Peer::least_connections() }
    }

    /// Least connections with this many per engine, and one queue with three priorities and one time
    /// limit.
    #[must_use]
    pub const fn haproxy(seats: usize, wait: Duration) -> Peer {
        Peer { seats: Some(seats), lines: [0, 1, 1, 2], wait: [wait; 4], ..Peer::least_connections() }
    }

    /// A priority scheduler: four classes with their own queue times, and seats reserved for the upper
    /// two.
    #[must_use]
    pub const fn smg(seats: usize, wait: [Duration; 4]) -> Peer {
        Peer {
            seats: Some(seats),
            lines: [0, 1, 2, 3],
            wait,
            kept: [8, 16, 0, 0],
            asks_another: true,
            ..Peer::least_connections()
        }
    }
}

/// Longer than any wait.
const NO_END: Duration = Duration::from_secs(1_000_000);

/// A running peer.
pub(super) struct PeerBalancer {
    settings: Peer,
    engines: Vec<PeerEngine>,
    turn: usize,
    arrivals: u64,
    waiting: BTreeMap<LinePosition, QueuedAtPeer>,
    places: HashMap<usize, LinePosition>,
    deadlines: BinaryHeap<Reverse<(Tick, usize)>>,
    /// Running requests per grade.
    running: [usize; 4],
    check_at: Tick,
    /// Retries on the same engine, with their times.
    again: Vec<(Tick, DispatchedRequest)>,
}

/// A line, and the position in it.
type LinePosition = (u8, u64);

struct QueuedAtPeer {
    visit: usize,
    grade: usize,
    blocks: Vec<u64>,
}

/// What a peer knows of an engine.
#[derive(Default)]
struct PeerEngine {
    open: usize,
    is_down: bool,
    /// Consecutive checks with the opposite result.
    doubts: u32,
    /// Blocks sent to it.
    sent: HashSet<u64, ahash::RandomState>,
}

/// Most further attempts of a request.
const AGAIN: u32 = 3;
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Interval of health checks, and how many must fail or succeed in a row.
const CHECK_EVERY: Duration = Duration::from_secs(2);
const FALL: u32 = 3;
const RISE: u32 = 2;

impl PeerBalancer {
    pub fn new(settings: Peer, engines: usize, at: Tick) -> PeerBalancer {
        PeerBalancer {
            settings,
            engines: (0..engines).map(|_| PeerEngine::default()).collect(),
            turn: 0,
            arrivals: 0,
            waiting: BTreeMap::new(),
            places: HashMap::new(),
            deadlines: BinaryHeap::new(),
            running: [0; 4],
            check_at: at + CHECK_EVERY,
            again: Vec::new(),
        }
    }

    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, class: &MixClass, effects: &mut Effects) {
        let grade = grade(class);
        let place = (self.settings.lines[grade], self.arrivals);
        self.arrivals += 1;
        let blocks =
            if self.settings.pick == PickRule::LongestPrefix { arrival.blocks_of_prompt() } else { Vec::new() };
        self.waiting.insert(place, QueuedAtPeer { visit, grade, blocks });
        self.places.insert(visit, place);
        self.deadlines.push(Reverse((arrival.at + self.settings.wait[grade], visit)));
        self.fill(arrival.at, effects);
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Seats of all engines.
    pub fn seats(&self) -> Option<usize> {
        self.settings.seats.map(|seats| seats * self.engines.len())
    }

    pub fn withdraw(&mut self, visit: usize, at: Tick, effects: &mut Effects) {
        if let Some(at_place) = self.again.iter().position(|(_, go)| go.visit == visit) {
            let (_, DispatchedRequest { engine, hold, .. }) = self.again.swap_remove(at_place);
            return self.freed(engine, &hold, at, effects);
        }
        if let Some(place) = self.places.remove(&visit) {
            self.waiting.remove(&place);
        }
    }

    pub fn freed(&mut self, engine: usize, hold: &EngineHold, at: Tick, effects: &mut Effects) {
        self.engines[engine].open -= 1;
        self.running[hold.grade] -= 1;
        self.fill(at, effects);
    }

    pub fn next_moment(&self) -> Option<Tick> {
        let deadline = self.deadlines.peek().map(|Reverse((at, _))| *at);
        let again = self.again.iter().map(|(at, _)| *at).min();
        [deadline, again, Some(self.check_at)].into_iter().flatten().min()
    }

    pub fn wake(&mut self, is_up: impl Fn(usize) -> bool, at: Tick, effects: &mut Effects) {
        while let Some(Reverse((_, visit))) = self.deadlines.peek().copied().filter(|Reverse((due, _))| *due <= at) {
            self.deadlines.pop();
            if self.places.contains_key(&visit) {
                self.withdraw(visit, at, effects);
                effects.refused.push(visit);
            }
        }
        while let Some(due) = self.again.iter().position(|(due, _)| *due <= at) {
            effects.go.push(self.again.swap_remove(due).1);
        }
        if at >= self.check_at {
            self.check_at = at + CHECK_EVERY;
            for (number, engine) in self.engines.iter_mut().enumerate() {
                engine.check(is_up(number));
            }
            self.fill(at, effects);
        }
    }

    /// An engine did not accept a request.
    pub fn not_taken(&mut self, visit: usize, engine: usize, mut hold: EngineHold, at: Tick, effects: &mut Effects) {
        hold.attempts += 1;
        if hold.attempts <= AGAIN && !self.settings.asks_another {
            return self.again.push((at + AGAIN_AFTER, DispatchedRequest { visit, engine, hold }));
        }
        let others = (0..self.engines.len()).filter(|other| *other != engine && self.has_seat(*other));
        let fewest = others.min_by_key(|other| self.engines[*other].open);
        let Some(other) = fewest.filter(|_| self.settings.asks_another && hold.attempts <= AGAIN) else {
            effects.lost.push(visit);
            return self.freed(engine, &hold, at, effects);
        };
        self.engines[engine].open -= 1;
        self.engines[other].open += 1;
        effects.go.push(DispatchedRequest { visit, engine: other, hold });
    }

    fn has_seat(&self, engine: usize) -> bool {
        let engine = &self.engines[engine];
        !engine.is_down && self.settings.seats.is_none_or(|seats| engine.open < seats)
    }

    /// Dispatches waiting requests.
    fn fill(&mut self, at: Tick, effects: &mut Effects) {
        while let Some(place) = self.next() {
            let Some(waiter) = self.waiting.get(&place) else { return };
            let Some(engine) = self.pick(&waiter.blocks) else { return };
            let Some(waiter) = self.waiting.remove(&place) else { return };
            self.places.remove(&waiter.visit);
            self.turn = (engine + 1) % self.engines.len();
            self.engines[engine].open += 1;
            self.engines[engine].sent.extend(waiter.blocks);
            self.running[waiter.grade] += 1;
            let hold = EngineHold::of_peer(waiter.grade, at);
            effects.go.push(DispatchedRequest { visit: waiter.visit, engine, hold });
        }
    }

    /// The first waiting request that may take a free seat.
    fn next(&self) -> Option<LinePosition> {
        let free = self.seats().map(|seats| seats - self.running.iter().sum::<usize>().min(seats));
        let may = |grade: usize| {
            let kept: usize =
                (0..grade).map(|above| self.settings.kept[above].saturating_sub(self.running[above])).sum();
            free.is_none_or(|free| free > kept)
        };
        let lines: HashSet<u8> = self.settings.lines.into_iter().collect();
        let heads = lines.into_iter().filter_map(|line| self.waiting.range((line, 0)..=(line, u64::MAX)).next());
        heads.filter(|(_, waiter)| may(waiter.grade)).map(|(place, _)| *place).min()
    }

    fn pick(&self, blocks: &[u64]) -> Option<usize> {
        let count = self.engines.len();
        let fit: Vec<usize> = (0..count).filter(|engine| self.has_seat(*engine)).collect();
        let turn = |engine: usize| (engine + count - self.turn) % count;
        let fewest = |engine: &usize| (self.engines[*engine].open, turn(*engine));
        match self.settings.pick {
            PickRule::InTurns => fit.into_iter().min_by_key(|engine| turn(*engine)),
            PickRule::Fewest => fit.into_iter().min_by_key(fewest),
            PickRule::LongestPrefix => {
                let loads = fit.iter().map(|engine| self.engines[*engine].open);
                let (least, most) = (loads.clone().min()?, loads.max()?);
                let known = |engine: usize| {
                    let sent = &self.engines[engine].sent;
                    blocks.iter().take_while(|block| sent.contains(block)).count()
                };
                let best = fit.iter().copied().max_by_key(|engine| (known(*engine), Reverse(turn(*engine))))?;
                if most - least > FAR_APART.0 && most as f64 > FAR_APART.1 * least as f64 {
                    fit.into_iter().min_by_key(fewest)
                } else if known(best) as f64 > GOOD_PART * blocks.len() as f64 {
                    Some(best)
                } else {
                    fit.into_iter().min_by_key(|engine| (self.engines[*engine].sent.len(), turn(*engine)))
                }
            }
        }
    }
}

impl PeerEngine {
    fn check(&mut self, is_up: bool) {
        let enough = if self.is_down { RISE } else { FALL };
        self.doubts = if is_up == self.is_down { self.doubts + 1 } else { 0 };
        if self.doubts >= enough {
            (self.is_down, self.doubts) = (!self.is_down, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::mix::{Mix, PromptLength, SharedPrefix};
    use super::*;
    use crate::types::TenantId;

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    /// A request of the office mix: flow 0 completion, 1 chat, 2 agent, 3 batch.
    fn of(flow: usize, at: u64, conversation: u64) -> Arrival {
        Arrival {
            at: ms(at),
            flow,
            tenant: TenantId::from("t"),
            prompt: 160,
            shown: PromptLength::Tokens(160),
            cap: None,
            output: 10,
            likeness: SharedPrefix { conversation, ..SharedPrefix::default() },
            recorded: crate::trace::PromptBlocks::default(),
            line: 0,
            model: None,
            route: None,
        }
    }

    /// A peer, and where requests went: (request, engine).
    struct Play {
        mix: Mix,
        balancer: PeerBalancer,
        gone: Vec<(usize, usize)>,
        refused: Vec<usize>,
        holds: Vec<Option<(usize, EngineHold)>>,
    }

    impl Play {
        fn with(peer: Peer, engines: usize) -> Play {
            let balancer = PeerBalancer::new(peer, engines, Tick::ZERO);
            Play { mix: Mix::office(), balancer, gone: Vec::new(), refused: Vec::new(), holds: Vec::new() }
        }

        fn note(&mut self, effects: Effects) {
            self.refused.extend(effects.refused);
            for go in effects.go {
                self.gone.push((go.visit, go.engine));
                self.holds[go.visit] = Some((go.engine, go.hold));
            }
        }

        fn arrives(&mut self, arrival: &Arrival) {
            let mut effects = Effects::default();
            let visit = self.holds.len();
            self.holds.push(None);
            self.balancer.arrive(visit, arrival, self.mix.class_of(arrival.flow), &mut effects);
            self.note(effects);
        }

        fn ends(&mut self, visit: usize, at: u64) {
            let mut effects = Effects::default();
            let (engine, hold) = self.holds[visit].take().unwrap();
            self.balancer.freed(engine, &hold, ms(at), &mut effects);
            self.note(effects);
        }

        fn wakes(&mut self, at: u64, down: Option<usize>) {
            let mut effects = Effects::default();
            self.balancer.wake(|engine| Some(engine) != down, ms(at), &mut effects);
            self.note(effects);
        }
    }

    #[test]
    fn the_engine_with_the_fewest_is_taken_in_turns_among_equals() {
        let mut play = Play::with(Peer::least_connections(), 3);
        (0..4).for_each(|_| play.arrives(&of(1, 0, 1)));
        assert_eq!(play.gone, [(0, 0), (1, 1), (2, 2), (3, 0)]);
        play.ends(1, 5);
        play.arrives(&of(1, 6, 1));
        assert_eq!(play.gone[4], (4, 1));
        let mut play = Play::with(Peer::round_robin(), 2);
        (0..3).for_each(|_| play.arrives(&of(1, 0, 1)));
        assert_eq!(play.gone, [(0, 0), (1, 1), (2, 0)]);
    }

    #[test]
    fn who_waits_for_a_seat_goes_by_line_and_then_by_arrival_and_not_for_ever() {
        let mut play = Play::with(Peer::haproxy(1, Duration::from_secs(2)), 1);
        [1, 3, 2, 1, 0].into_iter().for_each(|flow| play.arrives(&of(flow, 0, 1)));
        assert_eq!((play.gone.len(), play.balancer.waiting()), (1, 4));
        play.ends(0, 10);
        play.ends(4, 20);
        assert_eq!(play.gone, [(0, 0), (4, 0), (2, 0)], "the urgent one, then of two alike the earlier");
        assert_eq!(play.balancer.next_moment(), Some(ms(2000)));
        play.wakes(2000, None);
        assert_eq!((play.refused.clone(), play.balancer.waiting()), (vec![1, 3], 0));
    }

    #[test]
    fn seats_that_are_kept_for_upper_grades_are_not_given_to_lower_ones() {
        let mut play = Play::with(Peer::smg(26, [Duration::from_secs(9); 4]), 1);
        (0..4).for_each(|_| play.arrives(&of(3, 0, 1)));
        assert_eq!(play.gone.len(), 2, "eight and sixteen of 26 are kept");
        (0..20).for_each(|_| play.arrives(&of(1, 1, 1)));
        assert_eq!(play.gone.len(), 18, "chat takes its own sixteen; eight are for what is urgent");
        (0..8).for_each(|_| play.arrives(&of(0, 2, 1)));
        assert_eq!(play.gone.len(), 26);
    }

    #[test]
    fn prompts_that_begin_alike_go_where_they_were_sent_before_while_loads_are_near() {
        let mut play = Play::with(Peer::cache_aware(), 2);
        play.arrives(&of(1, 0, 7));
        play.arrives(&of(1, 1, 8));
        (0..FAR_APART.0).for_each(|_| play.arrives(&of(1, 2, 7)));
        assert_eq!(play.gone[1].1, 1, "the one that was sent less");
        assert!(play.gone[2..].iter().all(|(_, engine)| *engine == 0));
        play.arrives(&of(1, 3, 7));
        play.arrives(&of(1, 3, 7));
        assert_eq!(play.gone.last().map(|(_, engine)| *engine), Some(1), "they are far apart now");
    }

    #[test]
    fn an_engine_is_down_after_three_checks_and_up_after_two() {
        let mut play = Play::with(Peer::least_connections(), 2);
        [2000, 4000].into_iter().for_each(|at| play.wakes(at, Some(0)));
        play.arrives(&of(1, 4001, 1));
        play.wakes(6000, Some(0));
        play.arrives(&of(1, 6001, 1));
        play.arrives(&of(1, 6002, 1));
        [8000, 10_000].into_iter().for_each(|at| play.wakes(at, None));
        play.arrives(&of(1, 10_001, 1));
        play.arrives(&of(1, 10_002, 1));
        let engines: Vec<_> = play.gone.iter().map(|(_, engine)| *engine).collect();
        assert_eq!(engines, [0, 1, 1, 0, 1]);
    }
}
