//! The settings that determine which series exist.

use std::sync::Arc;

use crate::admit::limit::{LimitKind, LimitScope};
use crate::judge::Objectives;
use crate::types::{ClassId, PoolId, TenantId};

use super::settings::MetricLabels;

/// The settings that determine the series.
#[derive(Clone, Debug)]
pub struct SeriesShape {
    /// Every class, with its objectives.
    pub classes: Vec<ClassShape>,
    /// The class in which a miss before classification is counted.
    pub default_class: ClassId,
    /// Every combination of class, pool and model label that the routes allow.
    pub routes: Vec<(ClassId, PoolId, Arc<str>)>,
    /// Every tenant.
    pub tenants: Vec<TenantShape>,
    /// Label settings.
    pub labels: MetricLabels,
}

/// One tenant of a [`SeriesShape`].
#[derive(Clone, Debug)]
pub struct TenantShape {
    /// Its name.
    pub id: TenantId,
    /// The classes it may use; `None` means all.
    pub classes: Option<Vec<ClassId>>,
    /// The limits that may refuse it.
    pub limits: Vec<(LimitKind, LimitScope)>,
}

/// One class of a [`SeriesShape`].
#[derive(Clone, Debug)]
pub struct ClassShape {
    /// Its name.
    pub id: ClassId,
    /// Its objectives.
    pub objectives: Arc<Objectives>,
    /// Whether requests may set targets of their own, so that TTFT and TPOT may be judged in any case.
    pub takes_targets: bool,
}
