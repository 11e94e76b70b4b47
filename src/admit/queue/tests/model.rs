//! Reference implementation of the same rules: one list of all waiting requests, searched
//! linearly.

use std::collections::BTreeMap;

use super::super::*;

#[derive(Clone, Debug)]
struct Entry {
    ticket: u64,
    request: QueueRequest,
    band: usize,
    /// Sort key: whether it has no deadline, and the moment.
    due: (bool, Tick),
    late: bool,
    latest_start: Option<Tick>,
}

#[derive(Clone, Debug)]
struct Runs {
    ticket: u64,
    key: Key,
    cost: u64,
    /// Prompt tokens it counts for until its first token.
    reading: u64,
    /// Tokens it took from the bucket.
    taken: f64,
}

type Key = (usize, bool, TenantId);

/// Results: admitted tickets, and rejected ones with the reason.
pub type Fate = (Vec<u64>, Vec<(u64, RejectReason)>);

#[derive(Clone, Debug)]
pub struct Slow {
    pub settings: QueueSettings,
    pub seats: usize,
    pub prefilling_engines: usize,
    pace: Option<PrefillPace>,
    bucket: f64,
    /// The same for requests beyond usual demand.
    spare: f64,
    filled: Tick,
    usual: SurgeDetector,
    now: Tick,
    tickets: u64,
    turns: u64,
    waiting: Vec<Entry>,
    running: Vec<Runs>,
    served: BTreeMap<Key, u64>,
    floors: BTreeMap<(usize, bool), u64>,
    credit: [u64; 5],
    last_turn: [u64; 5],
}

impl Entry {
    fn key(&self) -> Key {
        (self.band, self.late, self.request.tenant.clone())
    }

    fn cost(&self) -> u64 {
        self.request.tokens.0.max(1)
    }

    fn order(&self) -> (bool, Tick, u64) {
        (self.due.0, self.due.1, self.ticket)
    }

    fn end(&self) -> (Tick, RejectReason) {
        let own =
            self.request.deadline.latest_start(self.request.arrival).map(|last| Tick::from_nanos(last.as_nanos() + 1));
        match own {
            Some(shed) if self.request.when_hopeless == WhenHopeless::Shed && shed < self.request.timeout_at => {
                (shed, RejectReason::Hopeless)
            }
            _ => (self.request.timeout_at, RejectReason::WaitedTooLong),
        }
    }

    fn steps_behind(&self, now: Tick) -> bool {
        self.request.when_hopeless == WhenHopeless::Demote && self.latest_start.is_some_and(|last| now > last)
    }
}

impl Slow {
    pub fn new(settings: QueueSettings) -> Self {
        Slow {
            settings,
            seats: 0,
            prefilling_engines: 0,
            pace: None,
            bucket: 0.0,
            spare: 0.0,
            filled: Tick::ZERO,
            usual: SurgeDetector::default(),
            now: Tick::ZERO,
            tickets: 0,
            turns: 0,
            waiting: vec![],
            running: vec![],
            served: BTreeMap::new(),
            floors: BTreeMap::new(),
            credit: [0; 5],
            last_turn: [0; 5],
        }
    }

    pub fn waiting(&self) -> Vec<u64> {
        self.waiting.iter().map(|entry| entry.ticket).collect()
    }

    pub fn running(&self) -> Vec<u64> {
        self.running.iter().map(|runs| runs.ticket).collect()
    }

    pub fn next_deadline(&self) -> Option<Tick> {
        self.waiting.iter().map(|entry| entry.end().0).min()
    }

    pub fn offer(&mut self, request: &QueueRequest, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        self.tickets += 1;
        let own = request.deadline.latest_start(request.arrival);
        let (band, due) = (self.classify(request), self.due(request));
        let mut entry =
            Entry { ticket: self.tickets, request: request.clone(), band, due, late: false, latest_start: own };
        let alike = self.waiting.iter().filter(|other| {
            (other.band, other.due) == (entry.band, entry.due) && other.request.tenant == request.tenant
        });
        if let (Some(own), Some(before)) = (own, alike.filter_map(|other| other.latest_start).min()) {
            entry.latest_start = Some(own.min(before));
        }
        entry.late = entry.steps_behind(self.now);
        if !self.waiting.is_empty() || !self.has_room_for(&entry.request) || self.is_held_back(&entry) {
            let (end, why) = entry.end();
            if end <= self.now {
                fate.1.push((entry.ticket, why));
                return fate;
            }
            if self.waiting.len() >= self.settings.max_waiting || self.is_crowded_with_late_ones(&entry) {
                let Some(victim) = self.victim(&entry) else {
                    fate.1.push((entry.ticket, RejectReason::QueueFull));
                    return fate;
                };
                self.take(victim);
                fate.1.push((victim, RejectReason::PushedOut));
            }
        }
        self.put(entry);
        self.fill(&mut fate);
        fate
    }

    /// 0: within limits and usual demand, 1: within limits, 2: neither.
    fn classify(&mut self, request: &QueueRequest) -> usize {
        let priority = request.priority as usize;
        match request.limit_state {
            LimitState::OverLimit => 10 + priority,
            LimitState::WithinLimits
                if self.usual.takes(&request.tenant, request.priority, request.tokens.0.max(1), self.now) =>
            {
                priority
            }
            LimitState::WithinLimits => 5 + priority,
        }
    }

    /// By deadline, those without behind all others by arrival. With a known pace a second of prefill counts
    /// as thirty of arrival, and one of the deadline as a tenth.
    fn due(&self, request: &QueueRequest) -> (bool, Tick) {
        let Some(deadline) = request.deadline.deadline(request.arrival) else { return (true, request.arrival) };
        let Some(pace) = self.paced().filter(|pace| pace.per_second.is_finite()) else { return (false, deadline) };
        let each = pace.per_second.max(1.0) / self.prefilling_engines.max(1) as f64;
        let within = deadline.since(request.arrival).as_secs_f64();
        let behind = 0.1 * within + 30.0 * (request.prompt.0 as f64 / each);
        (false, request.arrival + Duration::from_secs_f64(behind.min(3600.0)))
    }

    /// Tries it on a copy: a request that would have to wait, or evict another one, changes nothing.
    pub fn take_free_seat(&mut self, request: &QueueRequest, at: Tick) -> Option<u64> {
        self.now = self.now.max(at);
        self.gain();
        let mut tried = self.clone();
        let fate = tried.offer(request, at);
        let ticket = tried.tickets;
        if !self.waiting.is_empty() || fate != (vec![ticket], vec![]) {
            return None;
        }
        *self = tried;
        Some(ticket)
    }

    pub fn release(&mut self, ticket: u64, used: u64, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        if let Some(found) = self.running.iter().position(|runs| runs.ticket == ticket) {
            let Runs { key, cost, reading, taken, .. } = self.running.remove(found);
            if let Some(pace) = self.pace.filter(|_| reading > 0) {
                self.bucket = (self.bucket + taken).min(pace.burst);
                self.spare = (self.spare + taken).min(pace.burst);
            }
            let floor = self.floor(&key);
            let served = self.served.get(&key).copied().unwrap_or(0).max(floor);
            self.served.insert(key, (served + used.max(1)).saturating_sub(cost).max(floor));
            self.raise_floors();
        }
        self.fill(&mut fate);
        fate
    }

    pub fn read(&mut self, ticket: u64, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        let mut was_reading = false;
        for runs in self.running.iter_mut().filter(|runs| runs.ticket == ticket) {
            was_reading = std::mem::take(&mut runs.reading) > 0;
        }
        if was_reading {
            self.fill(&mut fate);
        }
        fate
    }

    pub fn expire(&mut self, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        self.fill(&mut fate);
        fate
    }

    pub fn set_prefilling_engines(&mut self, prefilling_engines: usize, at: Tick) -> Fate {
        self.prefilling_engines = prefilling_engines;
        self.expire(at)
    }

    pub fn set_pace(&mut self, pace: Option<PrefillPace>, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        self.bucket = match (self.pace, pace) {
            (_, None) => 0.0,
            (None, Some(new)) => new.burst,
            (Some(_), Some(new)) => self.bucket.min(new.burst),
        };
        self.spare = match (self.pace, pace) {
            (_, None) => 0.0,
            (None, Some(new)) => new.burst,
            (Some(_), Some(new)) => self.spare.min(new.burst),
        };
        self.pace = pace;
        self.fill(&mut fate);
        fate
    }

    fn paced(&self) -> Option<PrefillPace> {
        self.pace.filter(|_| self.settings.reading == PrefillBudget::Auto)
    }

    /// Refills the bucket for the elapsed time.
    fn gain(&mut self) {
        if let Some(pace) = self.pace {
            let seconds = self.now.since(self.filled).as_secs_f64();
            let filled = |bucket: f64, rate: f64| match rate.is_finite() {
                true => (bucket + rate * seconds).min(pace.burst),
                false => pace.burst,
            };
            (self.bucket, self.spare) = (filled(self.bucket, pace.per_second), filled(self.spare, pace.spare));
        }
        self.filled = self.now;
    }

    fn each(&self) -> Option<Tokens> {
        match self.settings.reading {
            PrefillBudget::NoLimit => None,
            PrefillBudget::Tokens(each) => Some(each),
            PrefillBudget::Auto => {
                self.pace.map(|pace| Tokens(if self.bucket > 0.0 { pace.most } else { pace.least }.max(1.0) as u64))
            }
        }
    }

    fn counts_for(&self, request: &QueueRequest) -> u64 {
        self.each().map_or(0, |each| request.prompt.0.min(each.0).max(1))
    }

    fn being_read(&self) -> u64 {
        self.running.iter().map(|runs| runs.reading).sum()
    }

    fn has_room_for(&self, request: &QueueRequest) -> bool {
        let most = self.each().map_or(u64::MAX, |each| each.0 * self.prefilling_engines as u64);
        self.running.len() < self.seats && self.being_read() + self.counts_for(request) <= most
    }

    /// Percentage of the prefill budget and of the bucket that it may use.
    fn part(next: &Entry) -> u64 {
        match (next.band, next.late) {
            (_, true) | (5.., _) => 25,
            (priority, _) => [100, 100, 90, 80, 70][priority],
        }
    }

    fn keeps_pace(&self, next: &Entry) -> bool {
        let empty = |pace: PrefillPace| pace.burst - (pace.burst + pace.behind) * Slow::part(next) as f64 / 100.0;
        let is_beyond = (5..10).contains(&next.band);
        self.paced().is_none_or(|pace| self.bucket > empty(pace) && (!is_beyond || self.spare > 0.0))
    }

    fn is_held_back(&self, next: &Entry) -> bool {
        let Some(each) = self.each().filter(|_| self.being_read() > 0) else { return !self.keeps_pace(next) };
        let most = each.0 * self.prefilling_engines as u64 / 100 * Slow::part(next);
        !self.keeps_pace(next) || self.being_read() + self.counts_for(&next.request) > most
    }

    pub fn withdraw(&mut self, ticket: u64, at: Tick) {
        self.now = self.now.max(at);
        self.take(ticket);
    }

    pub fn set_seats(&mut self, seats: usize, at: Tick) -> Fate {
        self.seats = seats;
        let mut fate = self.pass(at);
        self.fill(&mut fate);
        fate
    }

    pub fn pass(&mut self, at: Tick) -> Fate {
        self.now = self.now.max(at);
        self.gain();
        let mut over: Vec<_> = self.waiting.iter().map(|entry| (entry.end(), entry.ticket)).collect();
        over.retain(|((end, _), _)| *end <= self.now);
        over.sort_by_key(|((end, _), ticket)| (*end, *ticket));
        over.iter().for_each(|(_, ticket)| drop(self.take(*ticket)));
        let mut late: Vec<_> =
            self.waiting.iter().filter(|entry| !entry.late && entry.steps_behind(self.now)).collect();
        late.sort_by_key(|entry| (entry.latest_start, entry.ticket));
        for ticket in late.iter().map(|entry| entry.ticket).collect::<Vec<_>>() {
            let found = self.waiting.iter().position(|entry| entry.ticket == ticket).unwrap();
            let mut entry = self.waiting.remove(found);
            self.raise_floors();
            entry.late = true;
            self.put(entry);
        }
        (vec![], over.iter().map(|((_, why), ticket)| (*ticket, *why)).collect())
    }

    /// Requests infeasible at arrival hold at most half of the places.
    fn is_crowded_with_late_ones(&self, arrival: &Entry) -> bool {
        let late = self.waiting.iter().filter(|entry| entry.late && entry.band < 5).count();
        arrival.late && arrival.band < 5 && 2 * late >= self.settings.max_waiting
    }

    fn victim(&self, arrival: &Entry) -> Option<u64> {
        let places = |band: usize| match Priority::ALL.get(band) {
            Some(priority) => self.settings.shares.places(*priority, self.settings.max_waiting),
            None => 0,
        };
        let len = |band: usize| self.waiting.iter().filter(|entry| entry.band == band).count();
        let held = |band: usize, tenant: &TenantId| {
            self.waiting.iter().filter(|entry| entry.band == band && entry.request.tenant == *tenant).count()
        };
        let from = match arrival.late && arrival.band < 5 {
            true if self.is_crowded_with_late_ones(arrival) => 15,
            true => 5,
            false => arrival.band + 1,
        };
        let lower = (from..15).rev().find(|band| len(*band) > places(*band));
        let band = lower.unwrap_or(arrival.band);
        let inside = self.waiting.iter().filter(|entry| entry.band == band);
        let most =
            inside.clone().map(|entry| (held(band, &entry.request.tenant), entry.request.tenant.clone())).max()?;
        if lower.is_none() && most.0 < held(band, &arrival.request.tenant) + 2 {
            return None;
        }
        inside
            .filter(|entry| entry.request.tenant == most.1)
            .max_by_key(|entry| (entry.late, entry.order()))
            .map(|e| e.ticket)
    }

    fn floor(&self, key: &Key) -> u64 {
        self.floors.get(&(key.0, key.1)).copied().unwrap_or(0)
    }

    fn put(&mut self, entry: Entry) {
        let key = entry.key();
        let served = self.served.get(&key).copied().unwrap_or(0).max(self.floor(&key));
        self.served.insert(key, served);
        self.waiting.push(entry);
        self.raise_floors();
    }

    fn take(&mut self, ticket: u64) -> Option<Entry> {
        let found = self.waiting.iter().position(|entry| entry.ticket == ticket)?;
        let entry = self.waiting.remove(found);
        self.forget_credit();
        self.raise_floors();
        Some(entry)
    }

    fn forget_credit(&mut self) {
        for band in 0..5 {
            if !self.waiting.iter().any(|entry| entry.band == band) {
                self.credit[band] = 0;
            }
        }
    }

    fn raise_floors(&mut self) {
        let mut least: BTreeMap<(usize, bool), u64> = BTreeMap::new();
        for entry in &self.waiting {
            let key = entry.key();
            let served = self.served[&key];
            least.entry((key.0, key.1)).and_modify(|least| *least = served.min(*least)).or_insert(served);
        }
        self.floors.extend(least);
    }

    /// The next request of a row.
    fn first(&self, band: usize) -> Option<&Entry> {
        let late = !self.waiting.iter().any(|entry| entry.band == band && !entry.late);
        let line: Vec<_> = self.waiting.iter().filter(|entry| entry.band == band && entry.late == late).collect();
        let least = line.iter().map(|entry| self.served[&entry.key()]).min()?;
        let near = |entry: &&&Entry| self.served[&entry.key()] <= least + self.settings.quantum.0;
        line.iter().filter(near).min_by_key(|entry| entry.order()).copied()
    }

    /// The next request, if it may run now.
    fn next(&self) -> Option<&Entry> {
        let due = (0..5).filter(|band| self.first(*band).is_some_and(|e| self.credit[*band] >= e.cost() * 1000));
        let free = |band: &usize| self.first(*band).is_some_and(|next| !self.is_held_back(next));
        let anybody = |bands: std::ops::Range<usize>| self.waiting.iter().any(|entry| bands.contains(&entry.band));
        let can_be_met = self.waiting.iter().any(|entry| entry.band < 5 && !entry.late);
        let band = due
            .min_by_key(|band| self.last_turn[*band])
            .or_else(|| (0..5).find(free))
            .or_else(|| (5..10).find(free).filter(|_| !can_be_met))
            .or_else(|| (10..15).find(free).filter(|_| !anybody(0..10)))?;
        self.first(band).filter(|next| self.has_room_for(&next.request) && self.keeps_pace(next))
    }

    fn fill(&mut self, fate: &mut Fate) {
        while self.running.len() < self.seats {
            let Some(next) = self.next() else { return };
            let (ticket, band, key, cost) = (next.ticket, next.band, next.key(), next.cost());
            let (reading, prompt) = (self.counts_for(&next.request), next.request.prompt.0);
            let taken = self.paced().map_or(0.0, |pace| {
                (prompt as f64).min((pace.burst + pace.behind) / self.prefilling_engines.max(1) as f64)
            });
            self.bucket -= taken;
            self.spare = (self.spare - taken).max(-self.pace.map_or(0.0, |pace| pace.behind));
            self.turns += 1;
            if band < 5 {
                for (other, priority) in Priority::ALL.iter().enumerate() {
                    if self.first(other).is_some() {
                        self.credit[other] += cost * u64::from(self.settings.shares.of(*priority));
                    }
                }
                self.credit[band] = self.credit[band].saturating_sub(cost * 1000);
                self.last_turn[band] = self.turns;
            }
            *self.served.get_mut(&key).unwrap() += cost;
            self.take(ticket);
            self.running.push(Runs { ticket, key, cost, reading, taken });
            fate.0.push(ticket);
        }
    }
}
