//! Runs the scheduler on the clock, and delivers tokens to requests.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::{EngineCore, Gauges, Job, JobId, QueueFull, SequenceResult};
use super::metrics::SimCounts;
use crate::clock::Clock;
use crate::types::Tick;

/// Tokens for one choice of a request.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    pub choice: u64,
    pub tokens: u64,
    pub done: Option<SequenceResult>,
}

/// A request's undelivered tokens. A slow reader gets several tokens of a choice at once, as with vLLM: at
/// most one entry per choice, so the size is
/// bounded.
#[derive(Default)]
struct Mailbox {
    inside: Mutex<(VecDeque<Delivery>, Option<Waker>)>,
}

impl Mailbox {
    fn put(&self, delivery: Delivery) {
        let waker = {
            let (waiting, waker) = &mut *self.inside.lock();
            match waiting.iter_mut().find(|earlier| earlier.choice == delivery.choice) {
                Some(earlier) => {
                    earlier.tokens += delivery.tokens;
                    earlier.done = delivery.done;
                }
                None => waiting.push_back(delivery),
            }
            waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine on its clock.
pub(super) struct Runner {
    clock: Clock,
    state: Mutex<RunnerState>,
    changed: Notify,
}

struct RunnerState {
    engine: EngineCore,
    recipients: HashMap<JobId, Recipient>,
    counts: SimCounts,
}

struct Recipient {
    mailbox: Arc<Mailbox>,
    choice: u64,
    last: Option<Tick>,
}

impl Runner {
    pub fn new(clock: Clock, engine: EngineCore) -> Arc<Runner> {
        let state = RunnerState { engine, recipients: HashMap::new(), counts: SimCounts::default() };
        Arc::new(Runner { clock, state: Mutex::new(state), changed: Notify::new() })
    }

    /// Submits one job per choice, all or none.
    pub fn submit(self: &Arc<Self>, jobs: Vec<Job>) -> Result<RequestHandle, QueueFull> {
        let mailbox = Arc::new(Mailbox::default());
        let mut run = RequestHandle { runner: Arc::clone(self), mailbox: Arc::clone(&mailbox), jobs: Vec::new() };
        {
            let mut state = self.state.lock();
            if state.engine.is_busy() {
                state.counts.rejected += 1;
                return Err(QueueFull);
            }
            let now = self.clock.now();
            for (choice, job) in (0..).zip(jobs) {
                // Further choices of an admitted request are not subject to the queue's limit.
                let id = state.engine.enqueue(job, now);
                state.recipients.insert(id, Recipient { mailbox: Arc::clone(&mailbox), choice, last: None });
                run.jobs.push(id);
            }
            state.engine.begin(now);
        }
        self.changed.notify_one();
        Ok(run)
    }

    /// Ends steps when due, forever.
    pub async fn run(self: Arc<Self>) {
        let mut gains = Vec::new();
        loop {
            let next = self.state.lock().engine.next_moment();
            tokio::select! {
                () = self.clock.sleep_until(next) => {}
                () = self.changed.notified() => continue,
            }
            let mut state = self.state.lock();
            let state = &mut *state;
            state.engine.advance(self.clock.now(), &mut gains);
            for gain in gains.drain(..) {
                let Some(recipient) = state.recipients.get_mut(&gain.job) else { continue };
                state.counts.gain(recipient.last.replace(gain.at), &gain);
                let delivery = Delivery { choice: recipient.choice, tokens: gain.tokens, done: gain.done };
                recipient.mailbox.put(delivery.clone());
                if delivery.done.is_some() {
                    state.recipients.remove(&gain.job);
                }
            }
        }
    }

    pub fn gauges(&self) -> Gauges {
        self.state.lock().engine.gauges()
    }

    pub fn set_speed(&self, speed: f64) {
        self.state.lock().engine.set_speed(speed);
    }

    /// Gauges and counters for the metrics page.
    pub fn look<T>(&self, see: impl FnOnce(&Gauges, &mut SimCounts) -> T) -> T {
        let mut state = self.state.lock();
        let gauges = state.engine.gauges();
        see(&gauges, &mut state.counts)
    }

    fn cancel(&self, jobs: &[JobId]) {
        let mut state = self.state.lock();
        for job in jobs {
            if state.recipients.remove(job).is_some() {
                state.engine.cancel(*job);
                state.counts.aborted += 1;
            }
        }
    }
}

/// A request in the engine. If dropped before its end, it leaves the batch.
pub(super) struct RequestHandle {
    runner: Arc<Runner>,
    mailbox: Arc<Mailbox>,
    jobs: Vec<JobId>,
}

impl RequestHandle {
    /// The next tokens.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Delivery> {
        let (waiting, waker) = &mut *self.mailbox.inside.lock();
        match waiting.pop_front() {
            Some(delivery) => Poll::Ready(delivery),
            None => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next tokens.
    pub async fn next(&mut self) -> Delivery {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.runner.cancel(&self.jobs);
    }
}
