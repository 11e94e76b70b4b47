//! Templates of JSON bodies and of events, shared by all responses of a pool's engines.
//!
//! An engine writes the same members around every response, and the same few kinds of events in every
//! stream. A body or event that was parsed in full leaves its [`Template`] and its meaning here; one
//! that matches has the same meaning except for its placeholders. Nothing of a prompt or a response
//! is kept. A whole answer that matches costs some 2,500 instructions instead of 10,000, of 33,000 for a small
//! request.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use arc_swap::ArcSwap;

use crate::types::Dialect;

use super::parsed_event::ParsedEvent;
use super::template::{Placeholders, Template, TemplateMatch};

/// Templates of bodies per dialect: with text and with tools, with reasoning and
/// without.
const BODIES: usize = 4;

/// Templates of events per dialect: the kinds of one stream, and those of another.
const EVENTS: usize = 16;

/// In a full cache one miss in this many replaces a template, because a workload of ever new shapes must
/// not pay for templates that nothing matches.
const REPLACE_EVERY: u32 = 16;

/// Events without a template after which a stream stops looking them up and adds none,
/// because it is of another kind.
const STRANGERS: u32 = 16;

/// Longest prefix before the data of an event that gets a template.
const LONGEST_HEAD: usize = 64;

/// The known templates of bodies and events.
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

/// The templates of one dialect, in the order in which they were added.
#[derive(Debug)]
struct TemplateSet {
    cached_templates: ArcSwap<Vec<Arc<CachedTemplate>>>,
    most: usize,
    /// Bodies or events that matched none.
    misses: AtomicU32,
}

/// A template, and the meaning of a body or event that matches it.
#[derive(Debug)]
pub(super) struct CachedTemplate {
    pub(super) template: Template,
    /// The meaning; values at placeholders are those of the original.
    pub(super) parsed: ParsedEvent,
    /// Whether something matched since a template was last replaced.
    is_used: AtomicBool,
}

/// One response's view: whole bodies, and events in stream order.
#[derive(Debug)]
pub(super) struct TemplateCursor {
    templates: Arc<TemplateCache>,
    /// Index of the template tried first, because events come in the order in which templates were added.
    next: usize,
    /// Events that matched no template.
    misses: u32,
}

impl Default for TemplateCache {
    fn default() -> Self {
        TemplateCache::new()
    }
}

impl TemplateCache {
    /// A cache without templates.
    #[must_use]
    pub fn new() -> Self {
        TemplateCache { bodies: TemplateSets::new(BODIES), events: TemplateSets::new(EVENTS) }
    }

    /// Looks up a whole body. On a match calls `take` with its meaning and placeholder
    /// values.
    pub(super) fn recognise(
        &self,
        dialect: Dialect,
        body: &[u8],
        take: impl FnOnce(&ParsedEvent, &TemplateMatch),
    ) -> bool {
        let Some(set) = self.bodies.of(dialect) else { return false };
        set.find(body, 0, |cached_template, fit, _| take(&cached_template.parsed, fit)).is_some()
    }

    /// Adds the template of a body that was parsed in full.
    pub(super) fn learn(&self, dialect: Dialect, body: &[u8], parsed: &ParsedEvent, slots: &Placeholders) {
        if let Some(set) = self.bodies.of(dialect) {
            set.learn(|| CachedTemplate::of(body, 0, parsed, slots));
        }
    }
}

impl TemplateCursor {
    /// The view of a response that begins.
    pub(super) fn of(templates: &Arc<TemplateCache>) -> TemplateCursor {
        TemplateCursor { templates: Arc::clone(templates), next: 0, misses: 0 }
    }

    pub(super) fn templates(&self) -> &TemplateCache {
        &self.templates
    }

    #[cfg(test)]
    pub(super) fn misses(&self) -> u32 {
        self.misses
    }

    /// Looks up a whole event. On a match calls `take` with its meaning and placeholder
    /// values.
    pub(super) fn recognise<T>(
        &mut self,
        dialect: Dialect,
        event: &[u8],
        take: impl FnOnce(&CachedTemplate, &TemplateMatch) -> T,
    ) -> Option<T> {
        if self.misses >= STRANGERS {
            return None;
        }
        let set = self.templates.events.of(dialect)?;
        let next = &mut self.next;
        set.find(event, *next, |cached_template, fit, at| {
            *next = at + 1;
            take(cached_template, fit)
        })
    }

    /// Adds the template of an event whose data was parsed in full and is not an error.
    pub(super) fn learn(
        &mut self,
        dialect: Dialect,
        event: &[u8],
        data: Range<usize>,
        parsed: &ParsedEvent,
        slots: &Placeholders,
    ) {
        if self.misses >= STRANGERS {
            return;
        }
        self.misses += 1;
        if let Some(set) = self.templates.events.of(dialect) {
            set.learn(|| CachedTemplate::of(event, data.start, parsed, slots).filter(|_| has_only_a_name(event, data)));
        }
    }
}

/// Whether the event has nothing but its name beside its data: no comment, no id.
fn has_only_a_name(event: &[u8], data: Range<usize>) -> bool {
    let is_line_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
    let (head, tail) = (&event[..data.start], &event[data.end..]);
    let is_named = |line: &[u8]| line.is_empty() || line.starts_with(b"event:") || line.starts_with(b"data:");
    head.len() <= LONGEST_HEAD && head.split(is_line_end).all(is_named) && tail.iter().all(is_line_end)
}

impl TemplateSets {
    fn new(most: usize) -> Self {
        let [chat, completions, responses, messages] = std::array::from_fn(|_| TemplateSet {
            cached_templates: ArcSwap::default(),
            most,
            misses: AtomicU32::new(0),
        });
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
    /// Finds the matching template and calls `take` with the values and its index. Tries the one at `first`
    /// first, then those behind it.
    fn find<T>(
        &self,
        whole: &[u8],
        first: usize,
        take: impl FnOnce(&CachedTemplate, &TemplateMatch, usize) -> T,
    ) -> Option<T> {
        let cached_templates = self.cached_templates.load();
        let first = if first < cached_templates.len() { first } else { 0 };
        for at in (first..cached_templates.len()).chain(0..first) {
            let cached_template = &cached_templates[at];
            let Some(fit) = cached_template.template.fits_whole(whole) else { continue };
            if !cached_template.is_used.load(Relaxed) {
                cached_template.is_used.store(true, Relaxed);
            }
            return Some(take(cached_template, &fit, at));
        }
        None
    }

    /// Adds a template after a miss.
    fn learn(&self, cached_template: impl FnOnce() -> Option<CachedTemplate>) {
        let misses = self.misses.fetch_add(1, Relaxed);
        if self.cached_templates.load().len() < self.most || misses.is_multiple_of(REPLACE_EVERY) {
            // Of two threads that add at once one may lose its template; it will be added again.
            cached_template().into_iter().for_each(|cached_template| self.take(cached_template));
        }
    }

    /// Adds a template; a full set drops one without recent matches.
    fn take(&self, cached_template: CachedTemplate) {
        let mut cached_templates = Vec::clone(&self.cached_templates.load());
        if cached_templates.iter().any(|known| known.template == cached_template.template) {
            // Another thread has added it.
            return;
        }
        if cached_templates.len() >= self.most {
            let is_idle = |cached_template: &Arc<CachedTemplate>| !cached_template.is_used.load(Relaxed);
            cached_templates.remove(cached_templates.iter().rposition(is_idle).unwrap_or(self.most - 1));
            cached_templates.iter().for_each(|cached_template| cached_template.is_used.store(false, Relaxed));
        }
        cached_templates.push(Arc::new(cached_template));
        self.cached_templates.store(Arc::new(cached_templates));
    }
}

impl CachedTemplate {
    /// The template of a body or event whose meaning follows from its bytes: no error, and at most one
    /// choice.
    fn of(whole: &[u8], data_at: usize, parsed: &ParsedEvent, slots: &Placeholders) -> Option<CachedTemplate> {
        if parsed.has_error || parsed.is_error_object || parsed.is_flat_error() || parsed.choices.len() > 1 {
            return None;
        }
        let template = Template::shared(whole, data_at, slots)?;
        // Fails for an empty finish reason, or a count that is not an integer.
        template.fits_whole(whole)?;
        Some(CachedTemplate { template, parsed: parsed.clone(), is_used: AtomicBool::new(true) })
    }
}

#[cfg(test)]
mod tests;
