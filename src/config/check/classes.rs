//! SLO classes.

use std::sync::Arc;
use std::time::Duration;

use super::{Checker, in_seconds, shown};
use crate::admit::queue::ClassQueue;
use crate::config::ClassSettings;
use crate::config::schema::{self, Root};
use crate::config::walk::{ConfigBlock, Located};
use crate::forward::settings::Timeouts;
use crate::judge::{Assumption, Objective, Objectives, Quantiles};
use crate::types::{ClassId, Tokens};

/// Class names reserved for requests without a class and for drills.
const RESERVED: &[&str] = &["none", "drill"];

/// Message for a non-positive number of seconds.
const NO_TIME: &str = "is not a positive duration";

impl Checker<'_> {
    pub(super) fn classes(&mut self, root: &Root) -> Vec<Arc<ClassSettings>> {
        let Some(all) = &root.slo_classes else { return Vec::new() };
        self.unique("class", all.iter().filter_map(|class| class.slo_class.as_ref()));
        all.iter().filter_map(|raw| self.class(raw)).map(Arc::new).collect()
    }

    fn class(&mut self, raw: &schema::Class) -> Option<ClassSettings> {
        if let Some(name) = &raw.slo_class {
            self.name(name, RESERVED);
        }
        let objectives = self.objectives(raw);
        let timeouts = self.timeouts(raw);
        self.limits_leave_room(raw, &objectives, &timeouts);
        self.keepalive_can_happen(raw, &timeouts);
        let queue = self.class_queue(raw, &objectives, &timeouts);
        let degrade = self.degrade(raw, &objectives);
        Some(ClassSettings {
            id: ClassId::from(raw.slo_class.as_ref()?.value.as_str()),
            priority: raw.priority.as_ref().map_or_else(Default::default, |word| word.value.0),
            objectives,
            target_headers: raw.target_headers.as_ref().map_or_else(Default::default, |word| word.value.0),
            timeouts,
            queue,
            degrade,
        })
    }

    fn class_queue(&mut self, raw: &schema::Class, objectives: &Objectives, limits: &Timeouts) -> ClassQueue {
        let d = ClassQueue::of_promise(objectives.longest());
        let d = ClassQueue { max_wait: d.max_wait.min(limits.total), ..d };
        let Some(raw) = &raw.queue else { return d };
        // Zero is allowed: a free seat or none.
        let max_wait = raw.max_wait.as_ref().map_or(d.max_wait, |at| at.value);
        if let Some(at) = raw.max_wait.as_ref().filter(|_| max_wait > limits.total) {
            let message = format!("max_wait is longer than timeouts.total ({})", in_seconds(limits.total));
            self.problem(&at.place, message, "lower max_wait, or raise timeouts.total");
        }
        let when_hopeless = raw.when_hopeless.as_ref().map_or(d.when_hopeless, |word| word.value.0);
        ClassQueue { max_wait, when_hopeless }
    }

    fn objectives(&mut self, raw: &schema::Class) -> Objectives {
        let d = Objectives::default();
        let of = raw.objectives.as_ref();
        let day = Duration::from_secs(24 * 3600);
        let window = self.time(raw.window.as_ref(), d.window);
        if let Some(at) = raw.window.as_ref().filter(|_| window < day / 24 || window > day * 366) {
            self.problem(&at.place, "the window is out of range", "write a window from 1h to 366d");
        }
        Objectives {
            ttft: of.and_then(|all| self.objective(all.ttft_seconds.as_ref())),
            tpot: of.and_then(|all| self.objective(all.tpot_seconds.as_ref())),
            itl: of.and_then(|all| self.objective(all.itl_seconds.as_ref())),
            e2e: of.and_then(|all| self.objective(all.e2e_seconds.as_ref())),
            ttft_counts: raw.ttft_counts.as_ref().map_or(d.ttft_counts, |word| word.value.0),
            non_streaming: raw.non_streaming.as_ref().map_or(d.non_streaming, |word| word.value.0),
            upload: raw.upload.as_ref().map_or(d.upload, |word| word.value.0),
            stall: raw.stall_seconds.as_ref().and_then(|at| self.seconds(at, NO_TIME)).unwrap_or(d.stall),
            joint_target: raw.joint_attainment_target.as_ref().and_then(|at| self.share(at)).unwrap_or(d.joint_target),
            window,
            assumed: raw.workload_assumption.as_ref().map(|workload| Assumption {
                input_tokens: workload.input_tokens.as_ref().and_then(|raw| self.quantiles(raw)),
                output_tokens: workload.output_tokens.as_ref().and_then(|raw| self.quantiles(raw)),
            }),
            default_output_tokens: raw
                .default_output_tokens
                .as_ref()
                .map(|at| Tokens(self.count(Some(at), 1, 1..=u64::from(u32::MAX)))),
            of_class: None,
        }
    }

    fn objective(&mut self, raw: Option<&schema::Objective>) -> Option<Objective> {
        let raw = raw?;
        let threshold = raw.threshold.as_ref().and_then(|at| self.seconds(at, "can never be met"));
        let attainment = raw.attainment.as_ref().and_then(|at| self.share(at));
        Some(Objective { threshold: threshold?, attainment: attainment? })
    }

    fn quantiles(&mut self, raw: &schema::Quantiles) -> Option<Quantiles> {
        let (p50, p95) = (raw.p50.as_ref()?.value, raw.p95.as_ref()?.value);
        if p50 > p95 {
            self.problem(raw.place(), "p50 is above p95", "exchange the two");
        }
        Some(Quantiles { p50: Tokens(p50), p95: Tokens(p95) })
    }

    fn timeouts(&mut self, raw: &schema::Class) -> Timeouts {
        let mut limits = Timeouts::default();
        if let Some(raw) = &raw.timeouts {
            limits.first_token = self.time(raw.first_token.as_ref(), limits.first_token);
            limits.idle = self.time(raw.idle.as_ref(), limits.idle);
            limits.total = self.time(raw.total.as_ref(), limits.total);
            limits.response_head = self.time(raw.response_head.as_ref(), limits.total);
            let longest = [("first_token", &raw.first_token), ("response_head", &raw.response_head)];
            for (name, at) in longest.into_iter().filter_map(|(name, at)| Some((name, at.as_ref()?))) {
                if at.value > limits.total {
                    let message = format!("{name} is longer than total ({})", in_seconds(limits.total));
                    self.problem(&at.place, message, format!("lower {name}, or raise total"));
                }
            }
        }
        // Zero is allowed: the head is not held, and failures after it are not retried.
        limits.hold_head = raw.hold_head.as_ref().map_or(limits.hold_head, |at| at.value);
        limits.keepalive = raw.keepalive_seconds.as_ref().and_then(|at| self.seconds(at, NO_TIME));
        limits
    }

    /// Time limits must not be below thresholds, because they would cut requests that can still be met.
    fn limits_leave_room(&mut self, raw: &schema::Class, objectives: &Objectives, limits: &Timeouts) {
        let Some(of) = &raw.objectives else { return };
        let first_token = ("timeouts.first_token", limits.first_token);
        let idle = ("timeouts.idle", limits.idle);
        let total = ("timeouts.total", limits.total);
        // Ends a non-streaming response as `total` does.
        let head = ("timeouts.response_head", limits.response_head);
        let whole: &[_] = if objectives.judges_non_streaming() { &[total, head] } else { &[total] };
        let pairs = [
            (&of.ttft_seconds, objectives.ttft, &[first_token, total][..]),
            (&of.tpot_seconds, objectives.tpot, &[idle, total][..]),
            (&of.itl_seconds, objectives.itl, &[idle, total][..]),
            (&of.e2e_seconds, objectives.e2e, whole),
        ];
        let mut has_room = true;
        for (raw, objective, cutting) in pairs {
            let at: Option<&Located<f64>> = raw.as_ref().and_then(|raw| raw.threshold.as_ref());
            let (Some(at), Some(objective)) = (at, objective) else { continue };
            if let Some((name, limit)) = cutting.iter().find(|(_, limit)| objective.threshold > *limit) {
                let message =
                    format!("the threshold is beyond {name} ({}), which cuts the request first", in_seconds(*limit));
                self.problem(&at.place, message, format!("thresholds are in seconds; lower it, or raise {name}"));
                has_room = false;
            }
        }
        if has_room {
            self.limits_leave_room_for_output(raw, objectives, whole);
        }
    }

    /// The same for the longest assumed responses: without an E2E threshold they may take as long as TTFT and
    /// TPOT allow.
    fn limits_leave_room_for_output(
        &mut self,
        raw: &schema::Class,
        objectives: &Objectives,
        whole: &[(&str, Duration)],
    ) {
        let p95 = raw.workload_assumption.as_ref().and_then(|all| all.output_tokens.as_ref()?.p95.as_ref());
        let (Some(at), None) = (p95, objectives.e2e) else { return };
        let Some(budget) = objectives.whole_budget(at.value) else { return };
        if let Some((name, limit)) = whole.iter().find(|(_, limit)| budget > *limit) {
            let message = format!(
                "a response of {} tokens that meets TTFT and TPOT may take {}, but {name} ({}) cuts it first",
                shown(at),
                in_seconds(budget),
                in_seconds(*limit)
            );
            self.problem(&at.place, message, format!("raise {name}, or lower what is assumed"));
        }
    }

    /// A keepalive interval longer than any request is probably a mistake.
    fn keepalive_can_happen(&mut self, raw: &schema::Class, limits: &Timeouts) {
        let (Some(at), Some(every)) = (&raw.keepalive_seconds, limits.keepalive) else { return };
        let waits = limits.first_token.saturating_sub(limits.hold_head);
        if every >= waits && every >= limits.idle {
            let message = format!(
                "no comment is ever sent: first_token ({}) or idle ({}) ends the wait first",
                in_seconds(limits.first_token),
                in_seconds(limits.idle)
            );
            self.note(&at.place, message, "lower keepalive_seconds or hold_head, or remove the key");
        }
    }
}
