//! The SLO status of each class, the first thing an operator looks at.

use crate::units::ClassId;

use super::Recorder;
use super::burn::WindowCount;

/// The SLO status of one class.
#[derive(Clone, Debug, PartialEq)]
pub struct SloStatus {
    /// The class.
    pub class: ClassId,
    /// Target share of met requests.
    pub target: f64,
    /// Count of the class's own window.
    pub own: WindowCount,
    /// Remaining share of the error budget; negative if overspent. Absent if nothing was
    /// judged.
    pub budget_left: Option<f64>,
    /// Burn rate of each window in which anything was
    /// judged.
    pub burn: Vec<(WindowCount, f64)>,
    /// Requests in flight.
    pub in_flight: u64,
    /// Of these, requests waiting for a seat.
    pub waiting: u64,
    /// Of these, requests with a broken objective.
    pub overdue: u64,
}

impl Recorder {
    /// The status of every class, in the order of the settings.
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
