//! The shapes of whole JSON answers, shared by all answers of a pool's engines.
//!
//! An engine writes the same members around every answer. A body that was read in full leaves
//! its [`Mould`] here and what was found in it; one that fits says the same, but for what
//! stands in its slots. Nothing of a prompt or an answer is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use arc_swap::ArcSwap;

use crate::units::Dialect;

use super::mould::{Fit, Mould, Slots};
use super::sight::Sight;

/// Shapes that are kept per dialect: with text and with tools, with reasoning and without.
const MOST: usize = 4;

/// With all places taken, one in so many bodies that fit none takes a place: a workload of
/// ever new shapes must not pay for moulds that nothing fits.
const ONE_IN: u32 = 16;

/// What whole answers look like.
#[derive(Debug, Default)]
pub struct Moulds {
    chat: Shelf,
    completions: Shelf,
    responses: Shelf,
    messages: Shelf,
}

/// The shapes of one dialect, in the order in which they are tried.
#[derive(Debug, Default)]
struct Shelf {
    shapes: ArcSwap<Vec<Arc<Shape>>>,
    /// Bodies that fitted none of them.
    misses: AtomicU32,
}

/// A mould, and what a body says that fits it.
#[derive(Debug)]
struct Shape {
    mould: Mould,
    /// Of the body that it was made of: what stands in slots is another body's own.
    sight: Sight,
    /// A body has fitted since another shape last lost its place.
    is_used: AtomicBool,
}

impl Moulds {
    /// No shape is known yet.
    #[must_use]
    pub fn new() -> Self {
        Moulds::default()
    }

    /// Whether a whole body has a known shape. If so, `take` is told what bodies of that shape
    /// say, and what stands in the slots of this one.
    pub(super) fn recognise(&self, dialect: Dialect, body: &[u8], take: impl FnOnce(&Sight, &Fit)) -> bool {
        let Some(shelf) = self.shelf(dialect) else { return false };
        let shapes = shelf.shapes.load();
        let fitting = shapes.iter().find_map(|shape| Some((shape, shape.mould.fits_whole(body)?)));
        let Some((shape, fit)) = fitting else { return false };
        if !shape.is_used.load(Relaxed) {
            shape.is_used.store(true, Relaxed);
        }
        take(&shape.sight, &fit);
        true
    }

    /// A whole body had no known shape; read in full, this was in it.
    pub(super) fn learn(&self, dialect: Dialect, body: &[u8], sight: &Sight, slots: &Slots) {
        let Some(shelf) = self.shelf(dialect) else { return };
        let misses = shelf.misses.fetch_add(1, Relaxed);
        if shelf.shapes.load().len() < MOST || misses.is_multiple_of(ONE_IN) {
            // Of two that are learned at once one may be lost; it will come again.
            Shape::of(body, sight, slots).into_iter().for_each(|shape| shelf.take(shape));
        }
    }

    fn shelf(&self, dialect: Dialect) -> Option<&Shelf> {
        match dialect {
            Dialect::Chat => Some(&self.chat),
            Dialect::Completions => Some(&self.completions),
            Dialect::Responses => Some(&self.responses),
            Dialect::Messages => Some(&self.messages),
            Dialect::Plain => None,
        }
    }
}

impl Shelf {
    /// Takes in a shape; if need be in the place of one that nothing has fitted lately.
    fn take(&self, shape: Shape) {
        let mut shapes = Vec::clone(&self.shapes.load());
        if shapes.len() >= MOST {
            let is_idle = |shape: &Arc<Shape>| !shape.is_used.load(Relaxed);
            shapes.remove(shapes.iter().rposition(is_idle).unwrap_or(MOST - 1));
            shapes.iter().for_each(|shape| shape.is_used.store(false, Relaxed));
        }
        shapes.push(Arc::new(shape));
        self.shapes.store(Arc::new(shapes));
    }
}

impl Shape {
    /// The shape of a body, if bodies like it can be told by their bytes: no error, and no more
    /// than one choice.
    fn of(body: &[u8], sight: &Sight, slots: &Slots) -> Option<Shape> {
        if sight.has_error || sight.is_error_object || sight.choices.len() > 1 {
            return None;
        }
        let mould = Mould::of_body(body, slots)?;
        // Not so where a finish reason is empty, or a count no integer.
        mould.fits_whole(body)?;
        Some(Shape { mould, sight: sight.clone(), is_used: AtomicBool::new(true) })
    }
}

#[cfg(test)]
mod tests;
