//! The shapes of whole JSON answers and of events, shared by all answers of a pool's engines.
//!
//! An engine writes the same members around every answer, and in every stream the same few
//! kinds of events. A body or event that was read in full leaves its [`Template`] here and what was
//! found in it; one that fits says the same, but for what stands in its slots. Nothing of a
//! prompt or an answer is kept.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use arc_swap::ArcSwap;

use crate::units::Dialect;

use super::mould::{Placeholders, Template, TemplateMatch};
use super::sight::ParsedEvent;

/// Shapes of bodies that are kept per dialect: with text and with tools, with reasoning and
/// without.
const BODIES: usize = 4;

/// Shapes of events that are kept per dialect: the kinds that a stream has, and those of another.
const EVENTS: usize = 16;

/// With all places taken, one in so many that fit none takes a place: a workload of ever new
/// shapes must not pay for moulds that nothing fits.
const ONE_IN: u32 = 16;

/// A stream in which so many events had no known shape is of another kind: it tries no more, and
/// leaves none.
const STRANGERS: u32 = 16;

/// In front of the data of an event that leaves its shape there is no more than this.
const LONGEST_HEAD: usize = 64;

/// What whole answers and events look like.
#[derive(Debug)]
pub struct TemplateCache {
    bodies: TemplateSets,
    events: TemplateSets,
}

#[derive(Debug)]
struct TemplateSets {
    chat: TemplateSet,
    completions: TemplateSet,
    responses: TemplateSet,
    messages: TemplateSet,
}

/// The shapes of one dialect, in the order in which they were learned.
#[derive(Debug)]
struct TemplateSet {
    shapes: ArcSwap<Vec<Arc<CachedTemplate>>>,
    most: usize,
    /// Bodies or events that fitted none of them.
    misses: AtomicU32,
}

/// A mould, and what a body or event says that fits it.
#[derive(Debug)]
pub(super) struct CachedTemplate {
    pub(super) mould: Template,
    /// Of that of which it was made: what stands in slots is another's own.
    pub(super) sight: ParsedEvent,
    /// One has fitted since another shape last lost its place.
    is_used: AtomicBool,
}

/// What one answer knows: whole bodies, and events, as a stream goes through them.
#[derive(Debug)]
pub(super) struct TemplateCursor {
    moulds: Arc<TemplateCache>,
    /// Events come in the order in which the shapes were learned: the next is tried first.
    next: usize,
    /// Events that had no known shape.
    strangers: u32,
}

impl Default for TemplateCache {
    fn default() -> Self {
        TemplateCache::new()
    }
}

impl TemplateCache {
    /// No shape is known yet.
    #[must_use]
    pub fn new() -> Self {
        TemplateCache { bodies: TemplateSets::new(BODIES), events: TemplateSets::new(EVENTS) }
    }

    /// Whether a whole body has a known shape. If so, `take` is told what bodies of that shape
    /// say, and what stands in the slots of this one.
    pub(super) fn recognise(
        &self,
        dialect: Dialect,
        body: &[u8],
        take: impl FnOnce(&ParsedEvent, &TemplateMatch),
    ) -> bool {
        let Some(shelf) = self.bodies.of(dialect) else { return false };
        shelf.find(body, 0, |shape, fit, _| take(&shape.sight, fit)).is_some()
    }

    /// A whole body had no known shape; read in full, this was in it.
    pub(super) fn learn(&self, dialect: Dialect, body: &[u8], sight: &ParsedEvent, slots: &Placeholders) {
        if let Some(shelf) = self.bodies.of(dialect) {
            shelf.learn(|| CachedTemplate::of(body, 0, sight, slots));
        }
    }
}

impl TemplateCursor {
    /// The course of an answer that begins.
    pub(super) fn of(moulds: &Arc<TemplateCache>) -> TemplateCursor {
        TemplateCursor { moulds: Arc::clone(moulds), next: 0, strangers: 0 }
    }

    pub(super) fn moulds(&self) -> &TemplateCache {
        &self.moulds
    }

    #[cfg(test)]
    pub(super) fn strangers(&self) -> u32 {
        self.strangers
    }

    /// Whether a whole event has a known shape. If so, `take` is told which, and what stands in
    /// the slots of this one.
    pub(super) fn recognise<T>(
        &mut self,
        dialect: Dialect,
        event: &[u8],
        take: impl FnOnce(&CachedTemplate, &TemplateMatch) -> T,
    ) -> Option<T> {
        if self.strangers >= STRANGERS {
            return None;
        }
        let shelf = self.moulds.events.of(dialect)?;
        let next = &mut self.next;
        shelf.find(event, *next, |shape, fit, at| {
            *next = at + 1;
            take(shape, fit)
        })
    }

    /// A whole event had no known shape; its data, read in full, said this and was no error.
    pub(super) fn learn(
        &mut self,
        dialect: Dialect,
        event: &[u8],
        data: Range<usize>,
        sight: &ParsedEvent,
        slots: &Placeholders,
    ) {
        if self.strangers >= STRANGERS {
            return;
        }
        self.strangers += 1;
        if let Some(shelf) = self.moulds.events.of(dialect) {
            shelf
                .learn(|| CachedTemplate::of(event, data.start, sight, slots).filter(|_| has_only_a_name(event, data)));
        }
    }
}

/// Whether nothing stands around the data of an event but its name: no comment, no id.
fn has_only_a_name(event: &[u8], data: Range<usize>) -> bool {
    let is_line_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
    let (head, tail) = (&event[..data.start], &event[data.end..]);
    let is_named = |line: &[u8]| line.is_empty() || line.starts_with(b"event:") || line.starts_with(b"data:");
    head.len() <= LONGEST_HEAD && head.split(is_line_end).all(is_named) && tail.iter().all(is_line_end)
}

impl TemplateSets {
    fn new(most: usize) -> Self {
        let [chat, completions, responses, messages] =
            std::array::from_fn(|_| TemplateSet { shapes: ArcSwap::default(), most, misses: AtomicU32::new(0) });
        TemplateSets { chat, completions, responses, messages }
    }

    fn of(&self, dialect: Dialect) -> Option<&TemplateSet> {
        match dialect {
            Dialect::Chat => Some(&self.chat),
            Dialect::Completions => Some(&self.completions),
            Dialect::Responses => Some(&self.responses),
            Dialect::Messages => Some(&self.messages),
            Dialect::Plain => None,
        }
    }
}

impl TemplateSet {
    /// The shape that `whole` has, told to `take`, with what stands in its slots and its place.
    /// That at `first` is tried first, then those behind it.
    fn find<T>(
        &self,
        whole: &[u8],
        first: usize,
        take: impl FnOnce(&CachedTemplate, &TemplateMatch, usize) -> T,
    ) -> Option<T> {
        let shapes = self.shapes.load();
        let first = if first < shapes.len() { first } else { 0 };
        for at in (first..shapes.len()).chain(0..first) {
            let shape = &shapes[at];
            let Some(fit) = shape.mould.fits_whole(whole) else { continue };
            if !shape.is_used.load(Relaxed) {
                shape.is_used.store(true, Relaxed);
            }
            return Some(take(shape, &fit, at));
        }
        None
    }

    /// One had no known shape: its own is taken in.
    fn learn(&self, shape: impl FnOnce() -> Option<CachedTemplate>) {
        let misses = self.misses.fetch_add(1, Relaxed);
        if self.shapes.load().len() < self.most || misses.is_multiple_of(ONE_IN) {
            // Of two that are learned at once one may be lost; it will come again.
            shape().into_iter().for_each(|shape| self.take(shape));
        }
    }

    /// Takes in a shape; if need be in the place of one that nothing has fitted lately.
    fn take(&self, shape: CachedTemplate) {
        let mut shapes = Vec::clone(&self.shapes.load());
        if shapes.iter().any(|known| known.mould == shape.mould) {
            // Learned by two at once.
            return;
        }
        if shapes.len() >= self.most {
            let is_idle = |shape: &Arc<CachedTemplate>| !shape.is_used.load(Relaxed);
            shapes.remove(shapes.iter().rposition(is_idle).unwrap_or(self.most - 1));
            shapes.iter().for_each(|shape| shape.is_used.store(false, Relaxed));
        }
        shapes.push(Arc::new(shape));
        self.shapes.store(Arc::new(shapes));
    }
}

impl CachedTemplate {
    /// The shape of a body or event, if those like it can be told by their bytes: no error, and
    /// no more than one choice.
    fn of(whole: &[u8], data_at: usize, sight: &ParsedEvent, slots: &Placeholders) -> Option<CachedTemplate> {
        if sight.has_error || sight.is_error_object || sight.is_flat_error() || sight.choices.len() > 1 {
            return None;
        }
        let mould = Template::shared(whole, data_at, slots)?;
        // Not so where a finish reason is empty, or a count no integer.
        mould.fits_whole(whole)?;
        Some(CachedTemplate { mould, sight: sight.clone(), is_used: AtomicBool::new(true) })
    }
}

#[cfg(test)]
mod tests;
