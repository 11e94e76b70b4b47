//! How each class stands against its promise at this moment: what an operator looks at first.

use crate::units::ClassId;

use super::Recorder;
use super::burn::WindowCount;

/// How one class stands.
#[derive(Clone, Debug, PartialEq)]
pub struct SloStatus {
    /// The class.
    pub class: ClassId,
    /// The share of judged requests that must be met.
    pub target: f64,
    /// What was counted in the window of its promise.
    pub own: WindowCount,
    /// The share of the budget of misses that is left; negative where overdrawn. Absent where
    /// nothing was judged.
    pub budget_left: Option<f64>,
    /// How many times too fast the budget is used, over each window in which anything was
    /// judged.
    pub burn: Vec<(WindowCount, f64)>,
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
    pub fn standings(&self) -> Vec<SloStatus> {
        let at = self.now();
        let table = self.0.table.load();
        let places = self.0.open.places(at);
        let stand = |class: &ClassId| {
            let series = table.class(class)?;
            let memory = series.memory.lock();
            let own = memory.burn.own(at);
            let judged = memory.burn.spans(at).filter(|span| span.count.judged > 0);
            let here = places.iter().filter(|place| place.class.as_ref() == Some(class));
            Some(SloStatus {
                class: class.clone(),
                target: series.promise.joint_target,
                own,
                budget_left: (own.count.judged > 0).then(|| memory.burn.budget_left(at)),
                burn: judged.map(|span| (span, memory.burn.rate(span.count))).collect(),
                in_flight: here.clone().count() as u64,
                waiting: here.clone().filter(|place| place.waits).count() as u64,
                overdue: here.filter(|place| place.is_overdue).count() as u64,
            })
        };
        table.current.iter().filter_map(stand).collect()
    }
}
