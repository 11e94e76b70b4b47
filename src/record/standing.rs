//! How each class stands against its promise at this moment: what an operator looks at first.

use std::time::Duration;

use crate::units::ClassId;

use super::Recorder;
use super::burn::Count;

/// How one class stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The class.
    pub class: ClassId,
    /// The window of its promise.
    pub window: Duration,
    /// The share of judged requests that must be met.
    pub target: f64,
    /// What was counted in the window, since start at most.
    pub count: Count,
    /// The share of the budget of misses that is left; negative where overdrawn. Absent where
    /// nothing was judged.
    pub budget_left: Option<f64>,
    /// How many times too fast the budget is used, over each window in which anything was
    /// judged.
    pub burn: Vec<(Duration, f64)>,
    /// Requests that have arrived and not ended.
    pub in_flight: u64,
    /// Of these, how many wait for a seat.
    pub waiting: u64,
    /// Of those in flight, how many have broken an objective already.
    pub overdue: u64,
}

impl Recorder {
    /// Every class of the settings, in their order.
    #[must_use]
    pub fn standings(&self) -> Vec<Standing> {
        let at = self.now();
        let table = self.0.table.load();
        let places = self.0.open.places(at);
        let stand = |class: &ClassId| {
            let series = table.class(class)?;
            let memory = series.memory.lock();
            let count = memory.burn.own(at);
            let judged = memory.burn.spans(at).filter(|(_, count)| count.judged > 0);
            let here = places.iter().filter(|place| place.class.as_ref() == Some(class));
            Some(Standing {
                class: class.clone(),
                window: series.promise.window,
                target: series.promise.joint_target,
                count,
                budget_left: (count.judged > 0).then(|| memory.burn.budget_left(at)),
                burn: judged.map(|(window, count)| (window, memory.burn.rate(count))).collect(),
                in_flight: here.clone().count() as u64,
                waiting: here.clone().filter(|place| place.waits).count() as u64,
                overdue: here.filter(|place| place.is_overdue).count() as u64,
            })
        };
        table.current.iter().filter_map(stand).collect()
    }
}
