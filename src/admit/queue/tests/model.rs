//! Reference implementation of the same rules: one list of all waiting requests, searched
//! linearly.

use std::collections::BTreeMap;

use super::super::*;

#[derive(Clone, Debug)]
struct Entry {
    ticket: u64,
    ask: Ask,
    row: usize,
    /// Sort key: whether it has no deadline, and the moment.
    due: (bool, Tick),
    late: bool,
    last_call: Option<Tick>,
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
pub type Fate = (Vec<u64>, Vec<(u64, Why)>);

#[derive(Clone, Debug)]
pub struct Slow {
    pub settings: Settings,
    pub seats: usize,
    pub readers: usize,
    pace: Option<PrefillPace>,
    bucket: f64,
    /// The same for requests beyond usual demand.
    spare: f64,
    filled: Tick,
    usual: UsualShares,
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
        (self.row, self.late, self.ask.tenant.clone())
    }

    fn cost(&self) -> u64 {
        self.ask.tokens.0.max(1)
    }

    fn order(&self) -> (bool, Tick, u64) {
        (self.due.0, self.due.1, self.ticket)
    }

    fn end(&self) -> (Tick, Why) {
        let own = self.ask.aim.last_call(self.ask.arrival).map(|last| Tick::from_nanos(last.as_nanos() + 1));
        match own {
            Some(shed) if self.ask.when_hopeless == WhenHopeless::Shed && shed < self.ask.leave_by => {
                (shed, Why::Hopeless)
            }
            _ => (self.ask.leave_by, Why::WaitedTooLong),
        }
    }

    fn steps_behind(&self, now: Tick) -> bool {
        self.ask.when_hopeless == WhenHopeless::Demote && self.last_call.is_some_and(|last| now > last)
    }
}

impl Slow {
    pub fn new(settings: Settings) -> Self {
        Slow {
            settings,
            seats: 0,
            readers: 0,
            pace: None,
            bucket: 0.0,
            spare: 0.0,
            filled: Tick::ZERO,
            usual: UsualShares::default(),
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

    pub fn offer(&mut self, ask: &Ask, at: Tick) -> Fate {
        let mut fate = self.pass(at);
        self.tickets += 1;
        let own = ask.aim.last_call(ask.arrival);
        let (row, due) = (self.classify(ask), self.due(ask));
        let mut entry = Entry { ticket: self.tickets, ask: ask.clone(), row, due, late: false, last_call: own };
        let alike = self
            .waiting
            .iter()
            .filter(|other| (other.row, other.due) == (entry.row, entry.due) && other.ask.tenant == ask.tenant);
        if let (Some(own), Some(before)) = (own, alike.filter_map(|other| other.last_call).min()) {
            entry.last_call = Some(own.min(before));
        }
        entry.late = entry.steps_behind(self.now);
        if !self.waiting.is_empty() || !self.has_room_for(&entry.ask) || self.is_held_back(&entry) {
            let (end, why) = entry.end();
            if end <= self.now {
                fate.1.push((entry.ticket, why));
                return fate;
            }
            if self.waiting.len() >= self.settings.max_waiting || self.is_crowded_with_late_ones(&entry) {
                let Some(victim) = self.victim(&entry) else {
                    fate.1.push((entry.ticket, Why::QueueFull));
                    return fate;
                };
                self.take(victim);
                fate.1.push((victim, Why::PushedOut));
            }
        }
        self.put(entry);
        self.fill(&mut fate);
        fate
    }

    /// 0: within limits and usual demand, 1: within limits, 2: neither.
    fn classify(&mut self, ask: &Ask) -> usize {
        let rank = ask.rank as usize;
        match ask.standing {
            Standing::OverLimit => 10 + rank,
            Standing::WithinLimits if self.usual.takes(&ask.tenant, ask.rank, ask.tokens.0.max(1), self.now) => rank,
            Standing::WithinLimits => 5 + rank,
        }
    }

    /// By deadline, those without behind all others by arrival. With a known pace a second of prefill counts
    /// as thirty of arrival, and one of the deadline as a tenth.
    fn due(&self, ask: &Ask) -> (bool, Tick) {
        let Some(deadline) = ask.aim.deadline(ask.arrival) else { return (true, ask.arrival) };
        let Some(pace) = self.paced().filter(|pace| pace.per_second.is_finite()) else { return (false, deadline) };
        let each = pace.per_second.max(1.0) / self.readers.max(1) as f64;
        let within = deadline.since(ask.arrival).as_secs_f64();
        let behind = 0.1 * within + 30.0 * (ask.prompt.0 as f64 / each);
        (false, ask.arrival + Duration::from_secs_f64(behind.min(3600.0)))
    }

    /// Tries it on a copy: a request that would have to wait, or evict another one, changes nothing.
    pub fn take_free_seat(&mut self, ask: &Ask, at: Tick) -> Option<u64> {
        self.now = self.now.max(at);
        self.gain();
        let mut tried = self.clone();
        let fate = tried.offer(ask, at);
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

    pub fn set_readers(&mut self, readers: usize, at: Tick) -> Fate {
        self.readers = readers;
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
        self.pace.filter(|_| self.settings.reading == Reading::Auto)
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
            Reading::NoLimit => None,
            Reading::Tokens(each) => Some(each),
            Reading::Auto => {
                self.pace.map(|pace| Tokens(if self.bucket > 0.0 { pace.most } else { pace.least }.max(1.0) as u64))
            }
        }
    }

    fn counts_for(&self, ask: &Ask) -> u64 {
        self.each().map_or(0, |each| ask.prompt.0.min(each.0).max(1))
    }

    fn being_read(&self) -> u64 {
        self.running.iter().map(|runs| runs.reading).sum()
    }

    fn has_room_for(&self, ask: &Ask) -> bool {
        let most = self.each().map_or(u64::MAX, |each| each.0 * self.readers as u64);
        self.running.len() < self.seats && self.being_read() + self.counts_for(ask) <= most
    }

    /// Percentage of the prefill budget and of the bucket that it may use.
    fn part(next: &Entry) -> u64 {
        match (next.row, next.late) {
            (_, true) | (5.., _) => 25,
            (rank, _) => [100, 100, 90, 80, 70][rank],
        }
    }

    fn keeps_pace(&self, next: &Entry) -> bool {
        let empty = |pace: PrefillPace| pace.burst - (pace.burst + pace.behind) * Slow::part(next) as f64 / 100.0;
        let is_beyond = (5..10).contains(&next.row);
        self.paced().is_none_or(|pace| self.bucket > empty(pace) && (!is_beyond || self.spare > 0.0))
    }

    fn is_held_back(&self, next: &Entry) -> bool {
        let Some(each) = self.each().filter(|_| self.being_read() > 0) else { return !self.keeps_pace(next) };
        let most = each.0 * self.readers as u64 / 100 * Slow::part(next);
        !self.keeps_pace(next) || self.being_read() + self.counts_for(&next.ask) > most
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
        late.sort_by_key(|entry| (entry.last_call, entry.ticket));
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
        let late = self.waiting.iter().filter(|entry| entry.late && entry.row < 5).count();
        arrival.late && arrival.row < 5 && 2 * late >= self.settings.max_waiting
    }

    fn victim(&self, arrival: &Entry) -> Option<u64> {
        let places = |row: usize| match Priority::ALL.get(row) {
            Some(rank) => self.settings.shares.places(*rank, self.settings.max_waiting),
            None => 0,
        };
        let len = |row: usize| self.waiting.iter().filter(|entry| entry.row == row).count();
        let held = |row: usize, tenant: &TenantId| {
            self.waiting.iter().filter(|entry| entry.row == row && entry.ask.tenant == *tenant).count()
        };
        let from = match arrival.late && arrival.row < 5 {
            true if self.is_crowded_with_late_ones(arrival) => 15,
            true => 5,
            false => arrival.row + 1,
        };
        let lower = (from..15).rev().find(|row| len(*row) > places(*row));
        let row = lower.unwrap_or(arrival.row);
        let inside = self.waiting.iter().filter(|entry| entry.row == row);
        let most = inside.clone().map(|entry| (held(row, &entry.ask.tenant), entry.ask.tenant.clone())).max()?;
        if lower.is_none() && most.0 < held(row, &arrival.ask.tenant) + 2 {
            return None;
        }
        inside
            .filter(|entry| entry.ask.tenant == most.1)
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
        for row in 0..5 {
            if !self.waiting.iter().any(|entry| entry.row == row) {
                self.credit[row] = 0;
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
    fn first(&self, row: usize) -> Option<&Entry> {
        let late = !self.waiting.iter().any(|entry| entry.row == row && !entry.late);
        let line: Vec<_> = self.waiting.iter().filter(|entry| entry.row == row && entry.late == late).collect();
        let least = line.iter().map(|entry| self.served[&entry.key()]).min()?;
        let near = |entry: &&&Entry| self.served[&entry.key()] <= least + self.settings.quantum.0;
        line.iter().filter(near).min_by_key(|entry| entry.order()).copied()
    }

    /// The next request, if it may run now.
    fn next(&self) -> Option<&Entry> {
        let due = (0..5).filter(|row| self.first(*row).is_some_and(|e| self.credit[*row] >= e.cost() * 1000));
        let free = |row: &usize| self.first(*row).is_some_and(|next| !self.is_held_back(next));
        let anybody = |rows: std::ops::Range<usize>| self.waiting.iter().any(|entry| rows.contains(&entry.row));
        let can_be_met = self.waiting.iter().any(|entry| entry.row < 5 && !entry.late);
        let row = due
            .min_by_key(|row| self.last_turn[*row])
            .or_else(|| (0..5).find(free))
            .or_else(|| (5..10).find(free).filter(|_| !can_be_met))
            .or_else(|| (10..15).find(free).filter(|_| !anybody(0..10)))?;
        self.first(row).filter(|next| self.has_room_for(&next.ask) && self.keeps_pace(next))
    }

    fn fill(&mut self, fate: &mut Fate) {
        while self.running.len() < self.seats {
            let Some(next) = self.next() else { return };
            let (ticket, row, key, cost) = (next.ticket, next.row, next.key(), next.cost());
            let (reading, prompt) = (self.counts_for(&next.ask), next.ask.prompt.0);
            let taken = self
                .paced()
                .map_or(0.0, |pace| (prompt as f64).min((pace.burst + pace.behind) / self.readers.max(1) as f64));
            self.bucket -= taken;
            self.spare = (self.spare - taken).max(-self.pace.map_or(0.0, |pace| pace.behind));
            self.turns += 1;
            if row < 5 {
                for (other, rank) in Priority::ALL.iter().enumerate() {
                    if self.first(other).is_some() {
                        self.credit[other] += cost * u64::from(self.settings.shares.of(*rank));
                    }
                }
                self.credit[row] = self.credit[row].saturating_sub(cost * 1000);
                self.last_turn[row] = self.turns;
            }
            *self.served.get_mut(&key).unwrap() += cost;
            self.take(ticket);
            self.running.push(Runs { ticket, key, cost, reading, taken });
            fate.0.push(ticket);
        }
    }
}
