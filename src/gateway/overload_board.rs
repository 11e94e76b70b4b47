//! Overload levels of all classes, and the snapshot of them that requests read.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use ahash::RandomState;
use arc_swap::ArcSwapOption;
use parking_lot::Mutex;

use crate::admit::overload::OverloadSnapshot;
use crate::admit::overload_control::{LoadMeasures, OverloadController};
use crate::types::{ClassId, Tick};

/// Overload levels of all classes.
#[derive(Debug, Default)]
pub struct OverloadBoard {
    pub(super) controllers: Mutex<OverloadControllers>,
    pub(super) board: ArcSwapOption<OverloadSnapshot>,
    /// Whether a snapshot is published; cheaper than loading it, and almost always false.
    pub(super) is_posted: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct OverloadControllers {
    pub(super) of: HashMap<ClassId, ClassOverload, RandomState>,
    /// Time of the next measurement.
    pub(super) due: Tick,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClassOverload {
    pub(super) controller: OverloadController,
    pub(super) measured: LoadMeasures,
}
