//! The pools of a simulated gateway: a request goes along its route as in the gateway (`gateway::seat`,
//! `gateway::retries`), by the same rules ([`admit::spill`](crate::admit::spill)).
//!
//! A request without a route uses the first pool only, except while a level of its class spills.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::effects::{Effects, EngineHold, GatewayNews, GatewayReplica};
use super::mix::{Arrival, Mix};
use super::overload::FleetOverload;
use super::pool_scheduler::{LeavingRequest, PoolScheduler, RequestTerms};
use super::routed_request::RoutedRequest;
use super::scheduling::GatewayScheduling;
use crate::admit::limit::{LocalLimiter, Output, Used, Wanted};
use crate::admit::overload::Reroute;
use crate::admit::overload_control::{ActiveActions, LoadMeasures};
use crate::admit::queue::{Deadline, LimitState, QueueRequest, RejectReason, Ticket};
use crate::admit::spill::{SpillSearch, TimeLeft};
use crate::judge::Outcome;
use crate::observe::Timeline;
use crate::route::retry::AttemptOutcome;
use crate::sim::engine::Gauges;
use crate::types::{PoolId, Priority, Tick, Tokens};

/// Interval at which a waiting request checks whether it should go on, as in the gateway.
const LOOK: Duration = Duration::from_millis(100);

/// Model of requests that name none.
const MODEL: &str = "sim";

/// The pools, the limits and the overload levels.
pub(super) struct GatewayPools {
    settings: GatewayScheduling,
    overload: FleetOverload,
    limiter: LocalLimiter,
    desks: Vec<PoolScheduler>,
    /// When waiting requests with a later pool check whether to go on: moment, pool, request.
    looks: BinaryHeap<Reverse<(Tick, usize, usize)>>,
}

/// The pool that a request goes on to, by its place in the route.
enum NextPlace {
    /// A free seat, which was taken.
    Free(usize, Ticket),
    /// A queue that is short enough.
    Queue(usize),
}

impl GatewayPools {
    pub fn new(settings: &GatewayScheduling, mix: &Mix, gateway: GatewayReplica, at: Tick) -> GatewayPools {
        let first = std::iter::once((settings.first_pool(), mix.engines));
        let further = settings.further.iter().map(|pool| (pool.settings.clone(), pool.engines));
        let mut from = 0;
        let desks = first.chain(further).enumerate().map(|(number, (pool, engines))| {
            let range = from..from + engines;
            from = range.end;
            PoolScheduler::new(number, pool, settings, mix, range, gateway, at)
        });
        let desks = desks.collect();
        let limiter = LocalLimiter::new();
        limiter.reload(&settings.limits, at);
        let overload = FleetOverload::new(settings, mix, at);
        GatewayPools { settings: settings.clone(), overload, limiter, desks, looks: BinaryHeap::new() }
    }

    /// The pools.
    pub fn desks(&self) -> &[PoolScheduler] {
        &self.desks
    }

    /// The actions in force for requests of a class.
    pub fn in_force(&self, class: &str) -> ActiveActions {
        self.overload.in_force(class)
    }

    /// Records an outcome.
    pub fn judged(&mut self, class: &str, outcome: Outcome, at: Tick) {
        self.overload.note(class, outcome, at);
    }

    /// A request arrived.
    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, effects: &mut Effects) {
        let (flow, class) = (&mix.flows[arrival.flow], mix.class_of(arrival.flow));
        let in_force = self.overload.in_force(&class.class);
        let Some(route) = self.route(arrival, &in_force, class.priority()) else { return effects.refused.push(visit) };
        let home = &self.desks[route[0]];
        let expected = in_force.cap.unwrap_or(Tokens(u64::MAX)).min(class.objectives().default_output());
        let wanted = Wanted {
            input: home.prompt(arrival).0,
            output: arrival.cap.map_or(Output::Assumed(expected), |cap| Output::Stated(Tokens(cap))),
        };
        let model = arrival.model.as_deref().unwrap_or(MODEL);
        let reservation = self.limiter.reserve(&arrival.tenant, model, &wanted, arrival.at).ok();
        if reservation.is_none() && self.settings.rejected.contains(&arrival.tenant) {
            return effects.over_limit.push(visit);
        }
        let is_within = reservation.is_some() && !in_force.defer;
        let terms = RequestTerms {
            in_force,
            queue: self.settings.queue_of(class),
            limit_state: if is_within { LimitState::WithinLimits } else { LimitState::OverLimit },
            class,
            streams: flow.streams,
        };
        let mut request = Box::new(home.request(visit, arrival, &terms));
        request.reservation = reservation;
        request.place = self.begins(&route, arrival.at);
        request.route = route;
        self.offer(request, arrival.at, effects);
        self.settle(arrival.at, effects);
    }

    /// A stream's first token came.
    pub fn answers(&mut self, hold: &mut EngineHold, at: Tick) {
        self.desks[hold.desk].answers(hold, at);
    }

    /// A prompt is prefilled, or estimated to be.
    pub fn read(&mut self, desk: usize, ticket: Ticket, at: Tick, effects: &mut Effects) {
        self.desks[desk].read(ticket, at, effects);
        self.settle(at, effects);
    }

    /// An engine is done with a request.
    pub fn freed(&mut self, hold: EngineHold, answer: Option<&Timeline>, used: Used, at: Tick, effects: &mut Effects) {
        self.desks[hold.desk].freed(hold, answer, used, at, effects);
        self.settle(at, effects);
    }

    /// An engine did not accept a request, or failed before its response.
    pub fn failed(&mut self, visit: usize, hold: EngineHold, how: AttemptOutcome, at: Tick, effects: &mut Effects) {
        self.desks[hold.desk].failed(visit, hold, how, at, effects);
        self.settle(at, effects);
    }

    /// What another gateway told, by pool.
    pub fn hears(
        &mut self,
        from: u64,
        news: &[GatewayNews],
        (made, until): (Tick, Tick),
        at: Tick,
        effects: &mut Effects,
    ) {
        for (desk, news) in self.desks.iter_mut().zip(news) {
            desk.hears(from, news, (made, until), at, effects);
        }
        self.settle(at, effects);
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick) {
        self.desks.iter_mut().for_each(|desk| desk.withdraw(visit, at));
    }

    /// When [`GatewayPools::wake`] must be called.
    pub fn next_moment(&self) -> Option<Tick> {
        let look = self.looks.peek().map(|Reverse((at, ..))| *at);
        let own = [look, self.overload.next_moment()];
        self.desks.iter().map(PoolScheduler::next_moment).chain(own).flatten().min()
    }

    /// Advances time. `gauges` returns an engine's gauges, or none if it is down.
    pub fn wake(&mut self, gauges: &impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
        self.desks.iter_mut().for_each(|desk| desk.wake(gauges, at, effects));
        self.settle(at, effects);
        let desks = &self.desks;
        self.overload.evaluate(at, |first, priority| {
            let of_class = desks.iter().filter(|desk| first.contains(&desk.pool().id));
            of_class.fold(LoadMeasures::default(), |sum, desk| LoadMeasures {
                queue_depth: sum.queue_depth.max(desk.waiting() as u64),
                queue_wait: sum.queue_wait.max(desk.scheduler().expected_wait(priority, at)),
                ..sum
            })
        });
    }

    /// Indices of the pools of a request, after overload actions; `None` if it is shed.
    fn route(&self, arrival: &Arrival, in_force: &ActiveActions, priority: Priority) -> Option<Vec<usize>> {
        let own;
        let pools: &[PoolId] = match &arrival.route {
            Some(route) => route,
            None => {
                own = [self.desks[usize::from(in_force.spill && self.desks.len() > 1)].pool().id.clone()];
                &own
            }
        };
        let number = |pool: &PoolId| self.desks.iter().position(|desk| desk.pool().id == *pool);
        let numbers = |pools: &[PoolId]| pools.iter().filter_map(number).collect::<Vec<usize>>();
        let route = match self.overload.reroute(in_force, priority, pools) {
            Reroute::Unchanged => numbers(pools),
            Reroute::Pools { pools, .. } => numbers(&pools),
            Reroute::Shed { .. } => return None,
        };
        (!route.is_empty()).then_some(route)
    }

    /// The first place of a route with an available engine; 0 if none has.
    fn begins(&self, route: &[usize], at: Tick) -> usize {
        if route.len() == 1 {
            return 0;
        }
        route.iter().position(|desk| self.desks[*desk].available(at) > 0).unwrap_or(0)
    }

    fn offer(&mut self, request: Box<RoutedRequest>, at: Tick, effects: &mut Effects) {
        let (desk, visit, has_further) = (request.desk(), request.visit, request.has_further());
        if self.desks[desk].offer(request, at, effects) && has_further {
            self.looks.push(Reverse((at, desk, visit)));
        }
    }

    /// Moves every request on that its pool does not serve, and those whose wait became too long.
    fn settle(&mut self, at: Tick, effects: &mut Effects) {
        loop {
            if let Some(leaving) = self.desks.iter_mut().find_map(PoolScheduler::next_leaving) {
                self.leave(leaving, at, effects);
            } else if let Some((desk, visit)) = self.due_look(at) {
                self.look(desk, visit, at, effects);
            } else {
                return;
            }
        }
    }

    fn due_look(&mut self, at: Tick) -> Option<(usize, usize)> {
        self.looks.peek().filter(|Reverse((due, ..))| *due <= at)?;
        self.looks.pop().map(|Reverse((_, desk, visit))| (desk, visit))
    }

    fn leave(&mut self, leaving: LeavingRequest, at: Tick, effects: &mut Effects) {
        match leaving {
            LeavingRequest::Refused { request, why, at_once } => {
                let may_go_on = if at_once { why != RejectReason::Hopeless } else { why == RejectReason::PushedOut };
                match self.onward(&request, at).filter(|_| may_go_on) {
                    Some(next) => self.enter(next, request, at, effects),
                    None => effects.refused.push(request.visit),
                }
            }
            LeavingRequest::Stranded(request, ticket) => {
                let desk = request.desk();
                match self.onward(&request, at) {
                    Some(next) => {
                        self.desks[desk].give_back(ticket, at, effects);
                        self.enter(next, request, at, effects);
                    }
                    None => self.desks[desk].seated(request, ticket, at, effects),
                }
            }
            LeavingRequest::Unserved(request, ticket) if request.is_unheard() => {
                let desk = request.desk();
                match self.onward(&request, at) {
                    Some(next) => {
                        self.desks[desk].give_back(ticket, at, effects);
                        self.enter(next, request, at, effects);
                    }
                    None => self.desks[desk].lose(*request, ticket, at, effects),
                }
            }
            LeavingRequest::Unserved(request, ticket) => self.take_spare_seat(request, ticket, at, effects),
        }
    }

    /// Moves a request that an engine has had to a free seat of a later pool; in a pool's queue it would wait behind a
    /// failure.
    fn take_spare_seat(&mut self, mut request: Box<RoutedRequest>, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let here = request.desk();
        for place in request.place + 1..request.route.len() {
            let desk = &mut self.desks[request.route[place]];
            let Some(spare) = desk.free_seat(&request.entry, at) else { continue };
            if request.was_tried() && !desk.grants_retry(at) {
                desk.give_back(spare, at, effects);
                break;
            }
            request.place = place;
            desk.seated(request, spare, at, effects);
            return self.desks[here].give_back(ticket, at, effects);
        }
        self.desks[here].lose(*request, ticket, at, effects);
    }

    fn look(&mut self, desk: usize, visit: usize, at: Tick, effects: &mut Effects) {
        let Some((request, queue)) = self.desks[desk].queue_of(visit, at) else { return };
        let (entry, route, place) = (request.entry.clone(), request.route.clone(), request.place);
        let search = SpillSearch::of_queue(queue, time_left(&entry, at));
        match search.and_then(|search| self.search(search, &entry, &route, place, at)) {
            Some(next) => {
                if let Some(request) = self.desks[desk].take(visit, at) {
                    self.enter(next, request, at, effects);
                }
            }
            None => self.looks.push(Reverse((at + LOOK, desk, visit))),
        }
    }

    fn enter(&mut self, next: NextPlace, mut request: Box<RoutedRequest>, at: Tick, effects: &mut Effects) {
        match next {
            NextPlace::Free(place, ticket) => {
                request.place = place;
                self.desks[request.desk()].seated(request, ticket, at, effects);
            }
            NextPlace::Queue(place) => {
                request.place = place;
                self.offer(request, at, effects);
            }
        }
    }

    /// The next pool with room for a request that can never start where it is.
    fn onward(&mut self, request: &RoutedRequest, at: Tick) -> Option<NextPlace> {
        let search = SpillSearch::stranded(time_left(&request.entry, at));
        self.search(search, &request.entry, &request.route, request.place, at)
    }

    /// Measures the pools after a place, and takes a free seat if one has it.
    fn search(
        &mut self,
        mut search: SpillSearch,
        entry: &QueueRequest,
        route: &[usize],
        from: usize,
        at: Tick,
    ) -> Option<NextPlace> {
        for (place, desk) in route.iter().enumerate().skip(from + 1) {
            let desk = &mut self.desks[*desk];
            if desk.available(at) == 0 {
                continue;
            }
            if let Some(ticket) = desk.free_seat(entry, at) {
                return Some(NextPlace::Free(place, ticket));
            }
            if search.accepts(place, desk.expected_wait_for(entry, at)) {
                return Some(NextPlace::Queue(place));
            }
        }
        search.fallback().map(NextPlace::Queue)
    }
}

/// The rest of a request's time.
fn time_left(entry: &QueueRequest, at: Tick) -> TimeLeft {
    let QueueRequest { deadline, arrival, timeout_at, .. } = entry;
    let latest_start = Deadline::latest_start(*deadline, *arrival).map_or(*timeout_at, |last| last.min(*timeout_at));
    TimeLeft { to_start: latest_start - at, to_leave: *timeout_at - at }
}
