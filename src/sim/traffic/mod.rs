//! Open-loop load generator, seeded, which judges the responses it gets.
//!
//! [`TrafficPlan`] says which request is sent when; [`Traffic`] sends them with unlimited concurrency and keeps a
//! [`FlowStats`] per flow. Responses are observed and judged by the gateway's own
//! [`observe`](crate::observe) and [`judge`](crate::judge), from the client's position.

mod plan;
mod send;
mod stats;

pub use plan::{RequestStyle, TrafficFlow, TrafficPlan, TrafficRequest, TrafficRequests};
pub use send::{ByteStream, ConnectFuture, Connector, to};
pub use stats::{FlowStats, RequestResult, Samples};

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;

use self::send::TrafficClient;
use crate::clock::Clock;

/// Most concurrent requests, because an unresponsive service would otherwise fill the memory; skipped
/// requests are counted.
const MOST_IN_FLIGHT: usize = 8192;

/// Running traffic. Dropping it stops at once, and its clients disconnect.
pub struct Traffic {
    counts: Arc<Mutex<TrafficCounts>>,
    maker: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Default)]
struct TrafficCounts {
    flow_stats: Vec<FlowStats>,
    unsent: u64,
    stopped: bool,
}

impl Traffic {
    /// Starts sending on the current runtime.
    #[must_use]
    pub fn start(clock: Clock, open: Connector, plan: TrafficPlan) -> Self {
        let flow_stats =
            plan.flows.iter().map(|flow| FlowStats { name: flow.name.clone(), ..FlowStats::default() }).collect();
        let counts = Arc::new(Mutex::new(TrafficCounts { flow_stats, ..TrafficCounts::default() }));
        let maker = tokio::spawn(make(clock, Arc::new(TrafficClient::new(clock, open)), plan, Arc::clone(&counts)));
        Traffic { counts, maker }
    }

    /// The counts so far, one per flow in the order of the plan.
    #[must_use]
    pub fn flow_stats(&self) -> Vec<FlowStats> {
        self.counts.lock().flow_stats.clone()
    }

    /// Requests that were due but skipped because of the concurrency limit.
    #[must_use]
    pub fn unsent(&self) -> u64 {
        self.counts.lock().unsent
    }

    /// Stops sending, waits for outstanding responses for at most `patience`, and returns the counts. Clients
    /// still waiting then disconnect.
    pub async fn stop(mut self, patience: Duration) -> Vec<FlowStats> {
        self.counts.lock().stopped = true;
        let _ = tokio::time::timeout(patience, &mut self.maker).await;
        self.flow_stats()
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.maker.abort();
    }
}

/// Interval at which the generator checks whether it was stopped.
const GLANCE: Duration = Duration::from_millis(100);

async fn make(clock: Clock, client: Arc<TrafficClient>, plan: TrafficPlan, counts: Arc<Mutex<TrafficCounts>>) {
    let start = clock.now();
    let flows: Vec<Arc<TrafficFlow>> = plan.flows.iter().cloned().map(Arc::new).collect();
    let mut asked = JoinSet::new();
    'shots: for shot in plan.requests() {
        let due = start + shot.at;
        // Yields at least once per round, because a generator that is behind never waits and would occupy its
        // thread until the process ends.
        loop {
            match clock.now() {
                now if now < due => clock.sleep_until(Some(due.min(now + GLANCE))).await,
                _ => tokio::task::yield_now().await,
            }
            if counts.lock().stopped {
                break 'shots;
            }
            if clock.now() >= due {
                break;
            }
        }
        while asked.try_join_next().is_some() {}
        if asked.len() >= MOST_IN_FLIGHT {
            counts.lock().unsent += 1;
            continue;
        }
        {
            let stats = &mut counts.lock().flow_stats[shot.flow];
            stats.sent += 1;
            stats.in_flight += 1;
        }
        let (client, counts, flow) = (Arc::clone(&client), Arc::clone(&counts), Arc::clone(&flows[shot.flow]));
        asked.spawn(async move {
            let seen = client.ask(&flow, &shot).await;
            counts.lock().flow_stats[shot.flow].note(&seen);
        });
    }
    while asked.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests;
