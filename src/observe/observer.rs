//! [`Observer`]: observes one response from its first frame to its end.

use std::sync::Arc;

use bytes::Bytes;

use crate::json::Tokenizer;
use crate::types::Tick;

use super::event_parser::EventParser;
use super::oversized_event::{DONE, OversizedEvent, OversizedEventEnd};
use super::parsed_event::{EventKind, ParsedEvent};
use super::piece::{PieceInfo, PiecePart, ResponseExpectation};
use super::sse::{Cut, EventFields, EventScanner, HELD, says_something};
use super::template::{Placeholders, Template, TemplateMatch};
use super::template_cache::{TemplateCache, TemplateCursor};
use super::timeline::{Ending, InBandError, ObserverOptions, ResponseFormat, Timeline, is_success};
use super::timeline_builder::TimelineBuilder;

/// Observes one response.
///
/// ```
/// use bytes::Bytes;
/// use goodput::observe::{Ending, ResponseExpectation, Observer, ResponseFormat, ObserverOptions};
/// use goodput::types::{Dialect, Tick};
///
/// let expect = ResponseExpectation::stream(Dialect::Chat, Tick::ZERO);
/// let mut seen = Observer::new(expect, ResponseFormat::Events, 200, ObserverOptions::default());
/// let event = Bytes::from_static(b"data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n");
/// seen.frame(event, Tick::from_millis(740), &mut |piece, note| {
///     assert!(note.token);
///     drop(piece); // to the client
/// });
/// let timeline = seen.end(Ending::Left, Tick::from_millis(800));
/// assert_eq!(timeline.first_token, Some(Tick::from_millis(740)));
/// ```
#[derive(Debug)]
pub struct Observer {
    reader: ResponseFormat,
    status: u16,
    scanner: EventScanner,
    eye: EventReader,
    last_activity: Option<Tick>,
    /// Arrival of the last byte.
    last_frame: Option<Tick>,
    /// What was read of a JSON body.
    body: Body,
    /// Whether the clean end was seen.
    is_over: bool,
}

/// A JSON body.
#[derive(Debug)]
enum Body {
    /// Not read.
    Unread,
    /// Nothing has come yet.
    Awaited,
    /// One frame has come; if it is the whole body, templates are tried first.
    Held(Bytes),
    /// Parsed as it passes.
    Passing(Box<BodyParser>),
}

#[derive(Debug)]
struct BodyParser {
    tokenizer: Tokenizer,
    reading: EventParser,
}

/// Reads the events of a stream.
#[derive(Debug)]
struct EventReader {
    tally: TimelineBuilder,
    mould: Option<SteadyTemplate>,
    /// Templates of other responses.
    course: Option<TemplateCursor>,
    passing: Option<Box<OversizedEvent>>,
    /// The next event is the first of the stream, and may begin with a byte-order mark.
    is_first: bool,
    unparseable: bool,
    uses_shortcut: bool,
}

/// The template of the stream's usual events, and what each of them means.
#[derive(Debug)]
struct SteadyTemplate {
    mould: Template,
    index: u64,
    note: PieceInfo,
}

impl Observer {
    /// An observer of a response with this status, whose content type and coding determined `reader`. An
    /// unsuccessful response is only passed through.
    #[must_use]
    pub fn new(expect: ResponseExpectation, reader: ResponseFormat, status: u16, watch: ObserverOptions) -> Self {
        let body = if reader == ResponseFormat::Json && is_success(status) { Body::Awaited } else { Body::Unread };
        Observer {
            reader,
            status,
            scanner: EventScanner::new(),
            eye: EventReader::new(TimelineBuilder::new(expect, watch)),
            last_activity: None,
            last_frame: None,
            body,
            is_over: false,
        }
    }

    /// Enables templates of earlier responses.
    #[inline]
    pub fn knows(&mut self, moulds: &Arc<TemplateCache>) {
        let expect = self.eye.tally.expect();
        if expect.dialect.generates() && expect.choices == 1 && expect.echo_prompts.is_empty() {
            self.eye.course = Some(TemplateCursor::of(moulds));
        }
    }

    /// Parses every event in full, for tests that compare with the shortcut.
    #[cfg(test)]
    pub(super) fn without_shortcut(mut self) -> Self {
        self.eye.uses_shortcut = false;
        self
    }

    /// Heap memory held, bytes.
    #[cfg(test)]
    pub(super) fn heap(&self) -> usize {
        let mould = self.eye.mould.as_ref().map_or(0, |known| known.mould.memory());
        mould + self.eye.tally.heap() + self.scanner.held()
    }

    /// Events of the stream that matched no template.
    #[cfg(test)]
    pub(super) fn misses(&self) -> u32 {
        self.eye.course.as_ref().map_or(0, TemplateCursor::misses)
    }

    /// The template of the stream's usual events.
    #[cfg(test)]
    pub(super) fn own_mould(&self) -> Option<String> {
        self.eye.mould.as_ref().map(|known| format!("{known:?}"))
    }

    fn is_success(&self) -> bool {
        is_success(self.status)
    }

    /// Takes the next frame of the body, received at `at`. Calls `pass` for every piece that may be
    /// forwarded now, in order: whole events, pieces of an event longer than
    /// [`HELD`](super::sse::HELD), runs of any other body. Concatenated, the pieces are the bytes
    /// received, except the incomplete tail that is held. Pieces are slices of the frame,
    /// unless an event spans frames.
    pub fn frame(&mut self, frame: Bytes, at: Tick, pass: &mut dyn FnMut(Bytes, &PieceInfo)) {
        if frame.is_empty() {
            return;
        }
        self.last_frame = Some(at);
        if self.reader != ResponseFormat::Events || !self.is_success() {
            self.last_activity = Some(at);
            if !matches!(self.body, Body::Unread) {
                self.body.push(&frame, &self.eye);
            }
            if self.reader == ResponseFormat::Aside && self.is_success() {
                self.glance(frame.clone(), at);
            }
            return pass(frame, &PieceInfo::default());
        }
        self.events(frame, at, pass);
    }

    /// Reads the events of a frame that was already passed on.
    fn glance(&mut self, mut frame: Bytes, at: Tick) {
        while let Some((cut, piece)) = self.scanner.next(&mut frame) {
            self.eye.see(cut, &piece, at);
        }
    }

    fn events(&mut self, mut frame: Bytes, at: Tick, pass: &mut dyn FnMut(Bytes, &PieceInfo)) {
        loop {
            if self.scanner.is_between_events()
                && let Some((length, note)) = self.eye.known(&frame, at)
            {
                self.last_activity = Some(at);
                pass(frame.split_to(length), &note);
                continue;
            }
            let Some((cut, piece)) = self.scanner.next(&mut frame) else { break };
            let says = match cut {
                Cut::Blank => false,
                Cut::Event => says_something(&piece),
                Cut::Part | Cut::LastPart => true,
            };
            if says {
                self.last_activity = Some(at);
            }
            let note = self.eye.see(cut, &piece, at);
            pass(piece, &note);
        }
        if self.scanner.saw_line() {
            self.last_activity = Some(at);
        }
    }

    /// The body ended by its framing. An incomplete tail is parsed as an event and passed on
    /// unchanged.
    pub fn clean_end(&mut self, at: Tick, pass: &mut dyn FnMut(Bytes, &PieceInfo)) {
        if std::mem::replace(&mut self.is_over, true) || !self.is_success() {
            return;
        }
        let last_byte = self.last_frame.unwrap_or(at);
        match self.reader {
            ResponseFormat::Events => {
                if let Some((cut, tail)) = self.scanner.finish() {
                    let note = self.eye.see(cut, &tail, last_byte);
                    if !tail.is_empty() {
                        pass(tail, &note);
                    }
                }
                if self.eye.tally.dialect().generates() {
                    self.eye.tally.body_ended(at);
                } else {
                    self.eye.tally.ended_whole(last_byte);
                }
            }
            ResponseFormat::Aside => {
                if let Some((cut, tail)) = self.scanner.finish() {
                    self.eye.see(cut, &tail, last_byte);
                }
                // An event that was too long to parse matters to nobody on this path.
                self.eye.unparseable = false;
                self.eye.tally.ended_whole(last_byte);
            }
            ResponseFormat::Json => {
                let is_read = std::mem::replace(&mut self.body, Body::Unread).end(&mut self.eye, last_byte);
                self.eye.unparseable |= !is_read;
            }
            // Generating paths respond with JSON or events; anything else cannot be read.
            ResponseFormat::Opaque if self.eye.tally.dialect().generates() => self.eye.unparseable = true,
            ResponseFormat::Opaque => self.eye.tally.ended_whole(last_byte),
            ResponseFormat::Coded => self.eye.unparseable = true,
        }
    }

    /// Whether part of a long, incomplete event was passed on, so that an error event written now would be
    /// appended to it.
    #[must_use]
    pub fn long_event_is_out(&self) -> bool {
        self.scanner.long_event_is_out()
    }

    /// Whether the response is finished so far (by its dialect's last event, or as a whole JSON body).
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.eye.tally.is_finished()
    }

    /// When it finished, while its usage is incomplete.
    #[must_use]
    pub fn finished_without_usage(&self) -> Option<Tick> {
        self.eye.tally.finished_without_usage()
    }

    /// When it finished, so far.
    #[must_use]
    pub fn finished_at(&self) -> Option<Tick> {
        self.eye.tally.finished_at()
    }

    /// Stops reading: the response is over, and a partial event is discarded.
    pub fn stop(&mut self) {
        self.is_over = true;
    }

    /// Whether a token has come.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.eye.tally.has_token()
    }

    /// When a gap between token events first exceeded the ITL threshold, if one has.
    #[must_use]
    pub fn itl_broke(&self) -> Option<Tick> {
        self.eye.tally.itl_broke()
    }

    /// The in-band error: the first one, or the first after a token.
    #[must_use]
    pub fn error(&self) -> Option<InBandError> {
        self.eye.tally.error()
    }

    /// Sequence number of the last event (Responses).
    #[must_use]
    pub fn last_sequence_number(&self) -> Option<u64> {
        self.eye.tally.sequence_number()
    }

    /// Arrival of the last event, comment or piece of a long event; of the last byte for a body without
    /// events. The idle limit runs from here.
    #[must_use]
    pub fn last_activity(&self) -> Option<Tick> {
        self.last_activity
    }

    /// The client has not read since `since` for too long: gaps are no longer observed, and the progress so
    /// far is saved ([`Timeline::limited`]).
    pub fn limit_gaps(&mut self, since: Tick) {
        self.eye.tally.limit(since);
    }

    /// The timeline if the client left at `at`.
    #[cfg(test)]
    pub(super) fn so_far(&self, at: Tick) -> Timeline {
        self.timeline(Ending::Left, at)
    }

    /// The response ended or was dropped.
    #[must_use]
    pub fn end(mut self, ending: Ending, at: Tick) -> Timeline {
        self.last_look(ending, at)
    }

    /// The same for an observer dropped in place, because it is large.
    #[must_use]
    pub fn last_look(&mut self, ending: Ending, at: Tick) -> Timeline {
        if ending == Ending::Clean {
            self.clean_end(at, &mut |_, _| {});
        }
        self.timeline(ending, at)
    }

    fn timeline(&self, ending: Ending, at: Tick) -> Timeline {
        let is_coded = self.reader == ResponseFormat::Coded && self.is_success();
        let mut timeline = self.eye.tally.timeline(self.reader, self.status, ending, at);
        timeline.unparseable = is_coded || self.eye.unparseable;
        timeline
    }
}

impl Body {
    fn push(&mut self, frame: &Bytes, eye: &EventReader) {
        let expect = eye.tally.expect();
        *self = match std::mem::replace(self, Body::Unread) {
            Body::Awaited if eye.course.is_some() && frame.len() <= HELD => Body::Held(frame.clone()),
            Body::Awaited => Body::Passing(BodyParser::of(frame, expect)),
            Body::Held(first) => {
                let mut full = BodyParser::of(&first, expect);
                full.push(frame);
                Body::Passing(full)
            }
            Body::Passing(mut full) => {
                full.push(frame);
                Body::Passing(full)
            }
            Body::Unread => Body::Unread,
        }
    }

    /// Ends the body. False if it is not a JSON object.
    fn end(self, eye: &mut EventReader, last_byte: Tick) -> bool {
        let EventReader { tally, course, .. } = eye;
        let moulds = course.as_ref().map(TemplateCursor::moulds);
        let (mut full, whole) = match self {
            Body::Held(frame) => {
                let dialect = tally.dialect();
                let known = |sight: &ParsedEvent, fit: &TemplateMatch| tally.known_body(sight, fit, last_byte);
                if moulds.is_some_and(|moulds| moulds.recognise(dialect, &frame, known)) {
                    return true;
                }
                (BodyParser::of(&frame, tally.expect()), Some(frame))
            }
            Body::Passing(full) => (full, None),
            Body::Unread | Body::Awaited => return false,
        };
        let Some((sight, slots)) = full.finish() else { return false };
        if let (Some(moulds), Some(frame)) = (moulds, whole) {
            moulds.learn(tally.dialect(), &frame, sight, slots);
        }
        tally.body(sight, last_byte);
        true
    }
}

impl BodyParser {
    fn of(frame: &[u8], expect: &ResponseExpectation) -> Box<Self> {
        let keep_text = expect.echo_prompts.iter().map(|prompt| prompt.len() + 1).max().unwrap_or(0);
        let reading = EventParser::new(expect.dialect, true, keep_text);
        let mut full = Box::write(Box::new_uninit(), BodyParser { tokenizer: Tokenizer::of_answer(), reading });
        full.push(frame);
        full
    }

    fn push(&mut self, frame: &[u8]) {
        // The tokenizer keeps an error and reports it at the end.
        let _ = self.tokenizer.push(frame, &mut self.reading);
    }

    /// The parsed event and its placeholders, if the body is a JSON object.
    fn finish(&mut self) -> Option<(&mut ParsedEvent, &Placeholders)> {
        self.tokenizer.finish(&mut self.reading).ok()?;
        self.reading.found()
    }
}

impl EventReader {
    fn new(tally: TimelineBuilder) -> Self {
        EventReader {
            tally,
            mould: None,
            course: None,
            passing: None,
            is_first: true,
            unparseable: false,
            uses_shortcut: true,
        }
    }

    fn see(&mut self, cut: Cut, piece: &[u8], at: Tick) -> PieceInfo {
        match cut {
            Cut::Blank => PieceInfo { finished: self.tally.is_finished(), ..PieceInfo::default() },
            Cut::Event => self.whole(piece, at),
            Cut::Part => {
                self.part(piece);
                PieceInfo { part: PiecePart::More, finished: self.tally.is_finished(), ..PieceInfo::default() }
            }
            Cut::LastPart => {
                self.part(piece);
                let read = self.passing.take().filter(|passing| passing.length() <= self.tally.max_event());
                let note = match read.map_or(OversizedEventEnd::Nothing, |passing| passing.finish()) {
                    OversizedEventEnd::Said(sight) => self.tally.event(&sight, at),
                    OversizedEventEnd::Done => {
                        self.tally.done(at);
                        PieceInfo::default()
                    }
                    OversizedEventEnd::Nothing => PieceInfo::default(),
                };
                PieceInfo { part: PiecePart::Last, finished: self.tally.is_finished(), ..note }
            }
        }
    }

    fn part(&mut self, piece: &[u8]) {
        let is_first = std::mem::take(&mut self.is_first);
        let (dialect, keep_text) = (self.tally.dialect(), self.tally.echo_left());
        let passing = self.passing.get_or_insert_with(|| Box::new(OversizedEvent::new(dialect, keep_text)));
        let is_readable = passing.length() <= self.tally.max_event();
        if passing.length() + piece.len() > self.tally.max_event() {
            self.unparseable = true;
        }
        if is_readable {
            passing.push(without_mark(piece, is_first));
        }
    }

    fn whole(&mut self, event: &[u8], at: Tick) -> PieceInfo {
        let is_first = std::mem::take(&mut self.is_first);
        if event.len() > self.tally.max_event() {
            self.unparseable = true;
            return PieceInfo { finished: self.tally.is_finished(), ..PieceInfo::default() };
        }
        let event = without_mark(event, is_first);
        self.recognised(event, at)
            .or_else(|| self.read(event, at))
            .unwrap_or_else(|| PieceInfo { finished: self.tally.is_finished(), ..PieceInfo::default() })
    }

    /// Tries the usual template: `bytes` begin with an event like the last parsed one, with other text and
    /// counts.
    fn known(&mut self, bytes: &[u8], at: Tick) -> Option<(usize, PieceInfo)> {
        let known = self.mould.as_ref()?;
        let fit = known.mould.fits(bytes)?;
        if fit.length > self.tally.max_event() {
            return None;
        }
        self.tally.steady(fit.index.unwrap_or(known.index), &fit, &known.note, at);
        Some((fit.length, known.note))
    }

    /// Tries templates of other streams.
    fn recognised(&mut self, event: &[u8], at: Tick) -> Option<PieceInfo> {
        let EventReader { tally, mould, course, .. } = self;
        let dialect = tally.dialect();
        course.as_mut()?.recognise(dialect, event, |shape, fit| {
            let note = tally.known_event(&shape.sight, fit, at);
            if note.token
                && let Some(choice) = shape.sight.goes_on(dialect)
                && let Some(slots) = shape.mould.slots_in(event)
                && let Some(own) = Template::of(event, 0, &slots, mould.is_none())
            {
                *mould = Some(SteadyTemplate { mould: own, index: fit.index.unwrap_or(choice.index), note });
            }
            note
        })
    }

    fn read(&mut self, event: &[u8], at: Tick) -> Option<PieceInfo> {
        let fields = EventFields::of(event);
        let is_alone = fields.data.is_none();
        if let Some(sight) = fields.error.and_then(|error| self.failure_in(error, is_alone)) {
            return Some(self.tally.event(&sight, at));
        }
        let named = EventKind::of(fields.event);
        let nameless_error = || ParsedEvent { kind: named, ..ParsedEvent::default() };
        let Some(data) = fields.data else {
            // Browsers drop it, but it still means that the engine gave up.
            return (named == EventKind::Error).then(|| self.tally.event(&nameless_error(), at));
        };
        if data.starts_with(DONE) {
            self.tally.done(at);
            return None;
        }
        let echo_left = self.tally.echo_left();
        let mut reading = EventParser::new(self.tally.dialect(), false, echo_left);
        let Some((sight, slots)) = is_read(&data, &mut reading).then(|| reading.found()).flatten() else {
            return (named == EventKind::Error).then(|| self.tally.event(&nameless_error(), at));
        };
        sight.is_called(named);
        let learnt = fields.data_at.and_then(|start| self.learn(sight, slots, event, start, echo_left));
        let note = self.tally.event(sight, at);
        if note.error.is_some() {
            return Some(note);
        }
        if let Some((mould, index)) = learnt
            && note.token
        {
            self.mould = Some(SteadyTemplate { mould, index, note });
        }
        if let Some(course) = &mut self.course
            && let Some(start) = fields.data_at
        {
            course.learn(self.tally.dialect(), event, start..start + data.len(), sight, slots);
        }
        Some(note)
    }

    /// What the field `error` of an event says, if it is an object that says something, or stands alone.
    fn failure_in(&self, error: &[u8], is_alone: bool) -> Option<ParsedEvent> {
        let mut reading = EventParser::of_error(self.tally.dialect());
        let mut sight = is_read(error, &mut reading).then(|| reading.sight())??;
        sight.has_error |= is_alone;
        sight.has_error.then_some(sight)
    }

    /// Adds a template of this event, if only its text makes it a token event.
    fn learn(
        &self,
        sight: &ParsedEvent,
        slots: &Placeholders,
        event: &[u8],
        data_at: usize,
        echo_left: usize,
    ) -> Option<(Template, u64)> {
        if !self.uses_shortcut || echo_left > 0 {
            return None;
        }
        let choice = sight.goes_on(self.tally.dialect())?;
        Some((Template::of(event, data_at, slots, self.mould.is_none())?, choice.index))
    }
}

fn without_mark(event: &[u8], is_first: bool) -> &[u8] {
    if is_first { event.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(event) } else { event }
}

/// Parses the data of an event; false if it is not JSON. Invalid UTF-8 is read as the replacement
/// character, as clients do.
fn is_read(data: &[u8], reading: &mut EventParser) -> bool {
    if crate::json::walk_answer(data, reading).is_ok() {
        return true;
    }
    if std::str::from_utf8(data).is_ok() {
        return false;
    }
    *reading = reading.anew();
    let is_read = crate::json::walk_answer(String::from_utf8_lossy(data).as_bytes(), reading).is_ok();
    // Offsets refer to the repaired text, so no template can be made.
    reading.forget_slots();
    is_read
}
