//! Status of a running gateway for the admin port.

use std::time::Duration;

use super::class_status::standings;
use crate::admin::status::{
    AttemptStatus, ClassStatus, EngineHourStatus, EngineStatus, GatewayStatus, HistoryStatus, LimitUse, MissStatus,
    ObjectiveStatus, PoolStatus, ReasonCount, TenantStatus,
};
use crate::config::{ClassSettings, TenantSettings};
use crate::gateway::Gateway;
use crate::judge::Objective;
use crate::record::{EngineHour, HistorySpan, MissRecord};
use crate::route::{EngineView, PoolView};
use crate::types::{ClassId, PoolId, Tick, seconds_up};

/// Most tenants listed: those nearest to a limit.
const TENANTS: usize = 100;

/// Status of a gateway, with the histories of its classes over this span.
pub(super) fn status(gateway: &Gateway, span: HistorySpan, is_ready: bool) -> GatewayStatus {
    let (recorder, live) = (&gateway.recorder, gateway.live.load_full());
    let (wall, now) = (gateway.clock.wall(), gateway.clock.now());
    let times = Times { wall, now };
    let started = recorder.started_unix_seconds();
    let (loaded, is_loaded) = recorder.settings_loaded();
    let classes = standings(gateway).into_iter().map(|standing| {
        let id = ClassId::from(standing.class.as_str());
        let settings = live.settings.class(&id);
        let (length, history) = recorder.history(&id, span).unwrap_or_default();
        let missed = recorder.missed_last_hour(&id).into_iter();
        ClassStatus {
            standing,
            priority: settings.map(|class| class.priority.as_str().to_owned()).unwrap_or_default(),
            objectives: settings.map(|class| objectives(class)).unwrap_or_default(),
            missed_last_hour: missed.map(|(why, count)| ReasonCount { reason: why.as_str().into(), count }).collect(),
            history_seconds: length.as_secs(),
            history: history
                .into_iter()
                .map(|point| HistoryStatus {
                    unix_seconds: times.unix(point.at),
                    met: point.count.met,
                    judged: point.count.judged,
                    budget_remaining: point.budget_left,
                })
                .collect(),
        }
    });
    let mut tenants: Vec<TenantStatus> =
        live.settings.tenants.iter().map(|tenant| of_tenant(gateway, tenant)).collect();
    let nearest = |tenant: &TenantStatus| tenant.limits.iter().map(LimitUse::used_share).fold(0.0, f64::max);
    tenants
        .sort_by(|a, b| nearest(b).total_cmp(&nearest(a)).then(b.judged.cmp(&a.judged)).then(a.tenant.cmp(&b.tenant)));
    let left_out = tenants.len().saturating_sub(TENANTS);
    tenants.truncate(TENANTS);
    GatewayStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        unix_seconds: wall.as_secs_f64(),
        uptime_seconds: (wall.as_secs_f64() - started).max(0.0) as u64,
        ready: is_ready,
        settings_loaded_unix_seconds: loaded,
        settings_failed: !is_loaded,
        history_span: span.as_str().to_owned(),
        budgets_note: recorder.budgets_in_words(),
        classes: classes.collect(),
        pools: gateway.fleet.view(now).into_iter().map(|pool| of_pool(gateway, pool)).collect(),
        tenants,
        tenants_left_out: left_out as u64,
        misses: recorder.recent_misses().iter().map(|miss| of_miss(miss, &times)).collect(),
    }
}

/// Both clocks at one moment.
struct Times {
    wall: Duration,
    now: Tick,
}

impl Times {
    fn unix(&self, at: Tick) -> f64 {
        self.wall.as_secs_f64() - self.now.since(at).as_secs_f64()
    }
}

fn objectives(class: &ClassSettings) -> Vec<ObjectiveStatus> {
    let of = &class.objectives;
    let all = [("ttft", of.ttft), ("tpot", of.tpot), ("itl", of.itl), ("e2e", of.e2e)];
    let one = |(name, objective): (&str, Option<Objective>)| {
        let threshold_seconds = objective?.threshold.as_secs_f64();
        Some(ObjectiveStatus { objective: name.to_owned(), threshold_seconds })
    };
    all.into_iter().filter_map(one).collect()
}

fn of_pool(gateway: &Gateway, PoolView { pool, engines, .. }: PoolView) -> PoolStatus {
    let queue = gateway.pool_queues.pool_queue(&pool).map(|queue| queue.numbers());
    let limited = queue.filter(|numbers| numbers.seats < usize::MAX);
    PoolStatus {
        pool: pool.to_string(),
        seats: limited.map(|numbers| numbers.seats as u64),
        taken: limited.map_or(0, |numbers| numbers.taken as u64),
        waiting: queue.map_or(0, |numbers| numbers.waiting as u64),
        waiting_elsewhere: queue.and_then(|numbers| numbers.elsewhere),
        engines: engines.iter().map(|engine| of_engine(gateway, &pool, engine)).collect(),
    }
}

/// One engine of a pool.
pub(super) fn of_engine(gateway: &Gateway, pool: &PoolId, view: &EngineView) -> EngineStatus {
    let EngineHour { count, ttft, tpot } = gateway.recorder.engine_hour(pool, &view.engine);
    let seconds = |length: Duration| length.as_secs_f64();
    EngineStatus {
        engine: view.engine.to_string(),
        state: view.state.as_str().to_owned(),
        drained: view.is_drained,
        // Rounded up, so that the drain lasts as long as shown.
        drained_for_seconds: view.drained_for.map(seconds_up),
        in_flight: u64::from(view.requests),
        elsewhere: view.elsewhere.map(|requests| requests as u64),
        seats: view.seats.map(u64::from),
        running: view.running,
        waiting: view.waiting,
        kv_usage: view.kv_usage,
        last_hour: EngineHourStatus {
            met: count.met,
            judged: count.judged,
            ttft_p50_seconds: ttft.map(|(p50, _)| seconds(p50)),
            ttft_p95_seconds: ttft.map(|(_, p95)| seconds(p95)),
            tpot_p50_seconds: tpot.map(|(p50, _)| seconds(p50)),
            tpot_p95_seconds: tpot.map(|(_, p95)| seconds(p95)),
        },
    }
}

fn of_tenant(gateway: &Gateway, tenant: &TenantSettings) -> TenantStatus {
    let scopes = [None].into_iter().chain(tenant.limits.models.keys().map(|model| Some(&**model)));
    let limits = scopes.flat_map(|model| {
        let standings = gateway.limiter.statuses(&tenant.id, model, gateway.clock.now()).into_iter();
        standings.map(move |standing| LimitUse {
            limit: standing.limit.as_str().to_owned(),
            model: model.map(str::to_owned),
            most: standing.most,
            remaining: standing.remaining,
        })
    });
    let totals = gateway.recorder.tenant_totals(&tenant.id);
    TenantStatus {
        tenant: tenant.id.to_string(),
        running: gateway.limiter.running(&tenant.id),
        met: totals.map(|[met, ..]| met),
        judged: totals.map(|[_, judged, ..]| judged),
        limits: limits.collect(),
    }
}

fn of_miss(miss: &MissRecord, times: &Times) -> MissStatus {
    let millis = |length: Duration| length.as_secs_f64() * 1000.0;
    let from_arrival = |at: Tick| millis(at.since(miss.arrival));
    MissStatus {
        unix_seconds: times.unix(miss.end),
        request_id: miss.request_id.to_string(),
        class: miss.class.to_string(),
        reason: miss.reason.as_str().to_owned(),
        broken: miss.broken.iter().map(|objective| (*objective).to_owned()).collect(),
        tenant: miss.tenant.as_ref().map(ToString::to_string),
        model: miss.model.as_deref().map(str::to_owned),
        pool: miss.pool.as_ref().map(ToString::to_string),
        engine: miss.engine.as_ref().map(ToString::to_string),
        status: miss.status,
        code: miss.code.map(str::to_owned),
        level: miss.level as u64,
        prompt_tokens: miss.prompt.0,
        output_tokens: miss.output.map(|output| output.0),
        body_complete_ms: miss.body_complete.map(from_arrival),
        client_wait_ms: miss.client_wait.map(millis),
        admitted_ms: miss.admitted.map(from_arrival),
        attempts: miss
            .attempts
            .iter()
            .map(|attempt| AttemptStatus {
                pool: attempt.pool.to_string(),
                engine: attempt.engine.to_string(),
                begin_ms: from_arrival(attempt.begin),
                failed_ms: attempt.failure.map(|failure| from_arrival(failure.at)),
                failure: attempt.failure.map(|failure| failure.what.to_owned()),
            })
            .collect(),
        first_token_ms: miss.first_token.map(from_arrival),
        last_token_ms: miss.last_token.map(from_arrival),
        end_ms: from_arrival(miss.end),
    }
}
