//! Runs the scheduler on the clock, and delivers tokens to requests.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::{Busy, Engine, Gauges, Job, JobId, Life};
use super::metrics::Counts;
use crate::clock::Clock;
use crate::units::Tick;

/// Tokens for one choice of a request.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    pub choice: u64,
    pub tokens: u64,
    pub done: Option<Life>,
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
pub(super) struct Pace {
    clock: Clock,
    works: Mutex<Works>,
    changed: Notify,
}

struct Works {
    engine: Engine,
    posts: HashMap<JobId, Post>,
    counts: Counts,
}

struct Post {
    mailbox: Arc<Mailbox>,
    choice: u64,
    last: Option<Tick>,
}

impl Pace {
    pub fn new(clock: Clock, engine: Engine) -> Arc<Pace> {
        let works = Works { engine, posts: HashMap::new(), counts: Counts::default() };
        Arc::new(Pace { clock, works: Mutex::new(works), changed: Notify::new() })
    }

    /// Submits one job per choice, all or none.
    pub fn submit(self: &Arc<Self>, jobs: Vec<Job>) -> Result<Run, Busy> {
        let mailbox = Arc::new(Mailbox::default());
        let mut run = Run { pace: Arc::clone(self), mailbox: Arc::clone(&mailbox), jobs: Vec::new() };
        {
            let mut works = self.works.lock();
            if works.engine.is_busy() {
                works.counts.rejected += 1;
                return Err(Busy);
            }
            let now = self.clock.now();
            for (choice, job) in (0..).zip(jobs) {
                // Further choices of an admitted request are not subject to the queue's limit.
                let id = works.engine.enqueue(job, now);
                works.posts.insert(id, Post { mailbox: Arc::clone(&mailbox), choice, last: None });
                run.jobs.push(id);
            }
            works.engine.begin(now);
        }
        self.changed.notify_one();
        Ok(run)
    }

    /// Ends steps when due, forever.
    pub async fn run(self: Arc<Self>) {
        let mut gains = Vec::new();
        loop {
            let next = self.works.lock().engine.next_moment();
            tokio::select! {
                () = self.clock.sleep_until(next) => {}
                () = self.changed.notified() => continue,
            }
            let mut works = self.works.lock();
            let works = &mut *works;
            works.engine.advance(self.clock.now(), &mut gains);
            for gain in gains.drain(..) {
                let Some(post) = works.posts.get_mut(&gain.job) else { continue };
                works.counts.gain(post.last.replace(gain.at), &gain);
                let delivery = Delivery { choice: post.choice, tokens: gain.tokens, done: gain.done };
                post.mailbox.put(delivery.clone());
                if delivery.done.is_some() {
                    works.posts.remove(&gain.job);
                }
            }
        }
    }

    pub fn gauges(&self) -> Gauges {
        self.works.lock().engine.gauges()
    }

    pub fn set_speed(&self, speed: f64) {
        self.works.lock().engine.set_speed(speed);
    }

    /// Gauges and counters for the metrics page.
    pub fn look<T>(&self, see: impl FnOnce(&Gauges, &mut Counts) -> T) -> T {
        let mut works = self.works.lock();
        let gauges = works.engine.gauges();
        see(&gauges, &mut works.counts)
    }

    fn cancel(&self, jobs: &[JobId]) {
        let mut works = self.works.lock();
        for job in jobs {
            if works.posts.remove(job).is_some() {
                works.engine.cancel(*job);
                works.counts.aborted += 1;
            }
        }
    }
}

/// A request in the engine. If dropped before its end, it leaves the batch.
pub(super) struct Run {
    pace: Arc<Pace>,
    mailbox: Arc<Mailbox>,
    jobs: Vec<JobId>,
}

impl Run {
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

impl Drop for Run {
    fn drop(&mut self) {
        self.pace.cancel(&self.jobs);
    }
}
