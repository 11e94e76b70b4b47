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
    format: ResponseFormat,
    status: u16,
    scanner: EventScanner,
    event_reader: EventReader,
    last_activity: Option<Tick>,
    /// Arrival of the last byte.
    last_frame: Option<Tick>,
    /// Parsed content of a JSON body.
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
    parser: EventParser,
}

/// Reads the events of a stream.
#[derive(Debug)]
struct EventReader {
    builder: TimelineBuilder,
    template: Option<SteadyTemplate>,
    /// Templates of other responses.
    cursor: Option<TemplateCursor>,
    oversized: Option<Box<OversizedEvent>>,
    /// The next event is the first of the stream, and may begin with a byte-order mark.
    is_first: bool,
    unparseable: bool,
    uses_shortcut: bool,
}

/// The template of the stream's usual events, and what each of them means.
#[derive(Debug)]
struct SteadyTemplate {
    template: Template,
    index: u64,
    info: PieceInfo,
}

impl Observer {
    /// An observer of a response with this status, whose content type and coding determined `reader`. An
    /// unsuccessful response is only passed through.
    #[must_use]
    pub fn new(expect: ResponseExpectation, format: ResponseFormat, status: u16, watch: ObserverOptions) -> Self {
        let body = if format == ResponseFormat::Json && is_success(status) { Body::Awaited } else { Body::Unread };
        Observer {
            format,
            status,
            scanner: EventScanner::new(),
            event_reader: EventReader::new(TimelineBuilder::new(expect, watch)),
            last_activity: None,
            last_frame: None,
            body,
            is_over: false,
        }
    }

    /// Enables templates of earlier responses.
    #[inline]
    pub fn use_templates(&mut self, templates: &Arc<TemplateCache>) {
        let expect = self.event_reader.builder.expect();
        if expect.dialect.generates() && expect.choices == 1 && expect.echo_prompts.is_empty() {
            self.event_reader.cursor = Some(TemplateCursor::of(templates));
        }
    }

    /// Parses every event in full, for tests that compare with the shortcut.
    #[cfg(test)]
    pub(super) fn without_shortcut(mut self) -> Self {
        self.event_reader.uses_shortcut = false;
        self
    }

    /// Heap memory held, bytes.
    #[cfg(test)]
    pub(super) fn heap(&self) -> usize {
        let template = self.event_reader.template.as_ref().map_or(0, |known| known.template.memory());
        template + self.event_reader.builder.heap() + self.scanner.held()
    }

    /// Events of the stream that matched no template.
    #[cfg(test)]
    pub(super) fn misses(&self) -> u32 {
        self.event_reader.cursor.as_ref().map_or(0, TemplateCursor::misses)
    }

    /// The template of the stream's usual events.
    #[cfg(test)]
    pub(super) fn own_template(&self) -> Option<String> {
        self.event_reader.template.as_ref().map(|known| format!("{known:?}"))
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
        if self.format != ResponseFormat::Events || !self.is_success() {
            self.last_activity = Some(at);
            if !matches!(self.body, Body::Unread) {
                self.body.push(&frame, &self.event_reader);
            }
            if self.format == ResponseFormat::Aside && self.is_success() {
                self.glance(frame.clone(), at);
            }
            return pass(frame, &PieceInfo::default());
        }
        self.events(frame, at, pass);
    }

    /// Reads the events of a frame that was already passed on.
    fn glance(&mut self, mut frame: Bytes, at: Tick) {
        while let Some((cut, piece)) = self.scanner.next(&mut frame) {
            self.event_reader.see(cut, &piece, at);
        }
    }

    fn events(&mut self, mut frame: Bytes, at: Tick, pass: &mut dyn FnMut(Bytes, &PieceInfo)) {
        loop {
            if self.scanner.is_between_events()
                && let Some((length, info)) = self.event_reader.known(&frame, at)
            {
                self.last_activity = Some(at);
                pass(frame.split_to(length), &info);
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
            let info = self.event_reader.see(cut, &piece, at);
            pass(piece, &info);
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
        match self.format {
            ResponseFormat::Events => {
                if let Some((cut, tail)) = self.scanner.finish() {
                    let info = self.event_reader.see(cut, &tail, last_byte);
                    if !tail.is_empty() {
                        pass(tail, &info);
                    }
                }
                if self.event_reader.builder.dialect().generates() {
                    self.event_reader.builder.body_ended(at);
                } else {
                    self.event_reader.builder.ended_whole(last_byte);
                }
            }
            ResponseFormat::Aside => {
                if let Some((cut, tail)) = self.scanner.finish() {
                    self.event_reader.see(cut, &tail, last_byte);
                }
                // An event that was too long to parse does not matter on this path.
                self.event_reader.unparseable = false;
                self.event_reader.builder.ended_whole(last_byte);
            }
            ResponseFormat::Json => {
                let is_read = std::mem::replace(&mut self.body, Body::Unread).end(&mut self.event_reader, last_byte);
                self.event_reader.unparseable |= !is_read;
            }
            // Generating paths respond with JSON or events; anything else cannot be read.
            ResponseFormat::Opaque if self.event_reader.builder.dialect().generates() => {
                self.event_reader.unparseable = true
            }
            ResponseFormat::Opaque => self.event_reader.builder.ended_whole(last_byte),
            ResponseFormat::Coded => self.event_reader.unparseable = true,
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
        self.event_reader.builder.is_finished()
    }

    /// When it finished, while its usage is incomplete.
    #[must_use]
    pub fn finished_without_usage(&self) -> Option<Tick> {
        self.event_reader.builder.finished_without_usage()
    }

    /// When it finished, so far.
    #[must_use]
    pub fn finished_at(&self) -> Option<Tick> {
        self.event_reader.builder.finished_at()
    }

    /// Stops reading: the response is over, and a partial event is discarded.
    pub fn stop(&mut self) {
        self.is_over = true;
    }

    /// Whether a token has come.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.event_reader.builder.has_token()
    }

    /// When a gap between token events first exceeded the ITL threshold, if one has.
    #[must_use]
    pub fn itl_broke(&self) -> Option<Tick> {
        self.event_reader.builder.itl_broke()
    }

    /// The in-band error: the first one, or the first after a token.
    #[must_use]
    pub fn error(&self) -> Option<InBandError> {
        self.event_reader.builder.error()
    }

    /// Sequence number of the last event (Responses).
    #[must_use]
    pub fn last_sequence_number(&self) -> Option<u64> {
        self.event_reader.builder.sequence_number()
    }

    /// Arrival of the last event, comment or piece of a long event; of the last byte for a body without
    /// events. The idle limit runs from here.
    #[must_use]
    pub fn last_activity(&self) -> Option<Tick> {
        self.last_activity
    }

    /// Called when the client has not read since `since` for too long. Gaps are no longer observed, and the
    /// progress so far is saved ([`Timeline::limited`]).
    pub fn limit_gaps(&mut self, since: Tick) {
        self.event_reader.builder.limit(since);
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
        let is_coded = self.format == ResponseFormat::Coded && self.is_success();
        let mut timeline = self.event_reader.builder.timeline(self.format, self.status, ending, at);
        timeline.unparseable = is_coded || self.event_reader.unparseable;
        timeline
    }
}

impl Body {
    fn push(&mut self, frame: &Bytes, event_reader: &EventReader) {
        let expect = event_reader.builder.expect();
        *self = match std::mem::replace(self, Body::Unread) {
            Body::Awaited if event_reader.cursor.is_some() && frame.len() <= HELD => Body::Held(frame.clone()),
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
    fn end(self, event_reader: &mut EventReader, last_byte: Tick) -> bool {
        let EventReader { builder, cursor, .. } = event_reader;
        let templates = cursor.as_ref().map(TemplateCursor::templates);
        let (mut full, whole) = match self {
            Body::Held(frame) => {
                let dialect = builder.dialect();
                let known = |parsed: &ParsedEvent, fit: &TemplateMatch| builder.known_body(parsed, fit, last_byte);
                if templates.is_some_and(|templates| templates.recognise(dialect, &frame, known)) {
                    return true;
                }
                (BodyParser::of(&frame, builder.expect()), Some(frame))
            }
            Body::Passing(full) => (full, None),
            Body::Unread | Body::Awaited => return false,
        };
        let Some((parsed, slots)) = full.finish() else { return false };
        if let (Some(templates), Some(frame)) = (templates, whole) {
            templates.learn(builder.dialect(), &frame, parsed, slots);
        }
        builder.body(parsed, last_byte);
        true
    }
}

impl BodyParser {
    fn of(frame: &[u8], expect: &ResponseExpectation) -> Box<Self> {
        let keep_text = expect.echo_prompts.iter().map(|prompt| prompt.len() + 1).max().unwrap_or(0);
        let parser = EventParser::new(expect.dialect, true, keep_text);
        let mut full = Box::write(Box::new_uninit(), BodyParser { tokenizer: Tokenizer::of_answer(), parser });
        full.push(frame);
        full
    }

    fn push(&mut self, frame: &[u8]) {
        // The tokenizer keeps an error and reports it at the end.
        let _ = self.tokenizer.push(frame, &mut self.parser);
    }

    /// The parsed event and its placeholders, if the body is a JSON object.
    fn finish(&mut self) -> Option<(&mut ParsedEvent, &Placeholders)> {
        self.tokenizer.finish(&mut self.parser).ok()?;
        self.parser.found()
    }
}

impl EventReader {
    fn new(builder: TimelineBuilder) -> Self {
        EventReader {
            builder,
            template: None,
            cursor: None,
            oversized: None,
            is_first: true,
            unparseable: false,
            uses_shortcut: true,
        }
    }

    fn see(&mut self, cut: Cut, piece: &[u8], at: Tick) -> PieceInfo {
        match cut {
            Cut::Blank => PieceInfo { finished: self.builder.is_finished(), ..PieceInfo::default() },
            Cut::Event => self.whole(piece, at),
            Cut::Part => {
                self.part(piece);
                PieceInfo { part: PiecePart::More, finished: self.builder.is_finished(), ..PieceInfo::default() }
            }
            Cut::LastPart => {
                self.part(piece);
                let read = self.oversized.take().filter(|oversized| oversized.length() <= self.builder.max_event());
                let info = match read.map_or(OversizedEventEnd::Nothing, |oversized| oversized.finish()) {
                    OversizedEventEnd::Said(parsed) => self.builder.event(&parsed, at),
                    OversizedEventEnd::Done => {
                        self.builder.done(at);
                        PieceInfo::default()
                    }
                    OversizedEventEnd::Nothing => PieceInfo::default(),
                };
                PieceInfo { part: PiecePart::Last, finished: self.builder.is_finished(), ..info }
            }
        }
    }

    fn part(&mut self, piece: &[u8]) {
        let is_first = std::mem::take(&mut self.is_first);
        let (dialect, keep_text) = (self.builder.dialect(), self.builder.echo_left());
        let oversized = self.oversized.get_or_insert_with(|| Box::new(OversizedEvent::new(dialect, keep_text)));
        let is_readable = oversized.length() <= self.builder.max_event();
        if oversized.length() + piece.len() > self.builder.max_event() {
            self.unparseable = true;
        }
        if is_readable {
            oversized.push(without_mark(piece, is_first));
        }
    }

    fn whole(&mut self, event: &[u8], at: Tick) -> PieceInfo {
        let is_first = std::mem::take(&mut self.is_first);
        if event.len() > self.builder.max_event() {
            self.unparseable = true;
            return PieceInfo { finished: self.builder.is_finished(), ..PieceInfo::default() };
        }
        let event = without_mark(event, is_first);
        self.recognised(event, at)
            .or_else(|| self.read(event, at))
            .unwrap_or_else(|| PieceInfo { finished: self.builder.is_finished(), ..PieceInfo::default() })
    }

    /// Tries the usual template: `bytes` begin with an event like the last parsed one, with other text and
    /// counts.
    fn known(&mut self, bytes: &[u8], at: Tick) -> Option<(usize, PieceInfo)> {
        let known = self.template.as_ref()?;
        let fit = known.template.fits(bytes)?;
        if fit.length > self.builder.max_event() {
            return None;
        }
        self.builder.steady(fit.index.unwrap_or(known.index), &fit, &known.info, at);
        Some((fit.length, known.info))
    }

    /// Tries templates of other streams.
    fn recognised(&mut self, event: &[u8], at: Tick) -> Option<PieceInfo> {
        let EventReader { builder, template, cursor, .. } = self;
        let dialect = builder.dialect();
        cursor.as_mut()?.recognise(dialect, event, |cached_template, fit| {
            let info = builder.known_event(&cached_template.parsed, fit, at);
            if info.token
                && let Some(choice) = cached_template.parsed.goes_on(dialect)
                && let Some(slots) = cached_template.template.slots_in(event)
                && let Some(own) = Template::of(event, 0, &slots, template.is_none())
            {
                *template = Some(SteadyTemplate { template: own, index: fit.index.unwrap_or(choice.index), info });
            }
            info
        })
    }

    fn read(&mut self, event: &[u8], at: Tick) -> Option<PieceInfo> {
        let fields = EventFields::of(event);
        let is_alone = fields.data.is_none();
        if let Some(parsed) = fields.error.and_then(|error| self.failure_in(error, is_alone)) {
            return Some(self.builder.event(&parsed, at));
        }
        let named = EventKind::of(fields.event);
        let nameless_error = || ParsedEvent { kind: named, ..ParsedEvent::default() };
        let Some(data) = fields.data else {
            // Browsers drop it, but it still means that the engine gave up.
            return (named == EventKind::Error).then(|| self.builder.event(&nameless_error(), at));
        };
        if data.starts_with(DONE) {
            self.builder.done(at);
            return None;
        }
        let echo_left = self.builder.echo_left();
        let mut parser = EventParser::new(self.builder.dialect(), false, echo_left);
        let Some((parsed, slots)) = is_read(&data, &mut parser).then(|| parser.found()).flatten() else {
            return (named == EventKind::Error).then(|| self.builder.event(&nameless_error(), at));
        };
        parsed.is_called(named);
        let learnt = fields.data_at.and_then(|start| self.learn(parsed, slots, event, start, echo_left));
        let info = self.builder.event(parsed, at);
        if info.error.is_some() {
            return Some(info);
        }
        if let Some((template, index)) = learnt
            && info.token
        {
            self.template = Some(SteadyTemplate { template, index, info });
        }
        if let Some(cursor) = &mut self.cursor
            && let Some(start) = fields.data_at
        {
            cursor.learn(self.builder.dialect(), event, start..start + data.len(), parsed, slots);
        }
        Some(info)
    }

    /// The error in the field `error` of an event, if it is an object that describes one, or is alone.
    fn failure_in(&self, error: &[u8], is_alone: bool) -> Option<ParsedEvent> {
        let mut parser = EventParser::of_error(self.builder.dialect());
        let mut parsed = is_read(error, &mut parser).then(|| parser.parsed())??;
        parsed.has_error |= is_alone;
        parsed.has_error.then_some(parsed)
    }

    /// Adds a template of this event, if only its text makes it a token event.
    fn learn(
        &self,
        parsed: &ParsedEvent,
        slots: &Placeholders,
        event: &[u8],
        data_at: usize,
        echo_left: usize,
    ) -> Option<(Template, u64)> {
        if !self.uses_shortcut || echo_left > 0 {
            return None;
        }
        let choice = parsed.goes_on(self.builder.dialect())?;
        Some((Template::of(event, data_at, slots, self.template.is_none())?, choice.index))
    }
}

fn without_mark(event: &[u8], is_first: bool) -> &[u8] {
    if is_first { event.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(event) } else { event }
}

/// Parses the data of an event; false if it is not JSON. Invalid UTF-8 is read as the replacement
/// character, as clients do.
fn is_read(data: &[u8], parser: &mut EventParser) -> bool {
    if crate::json::walk_answer(data, parser).is_ok() {
        return true;
    }
    if std::str::from_utf8(data).is_ok() {
        return false;
    }
    *parser = parser.anew();
    let is_read = crate::json::walk_answer(String::from_utf8_lossy(data).as_bytes(), parser).is_ok();
    // Offsets refer to the repaired text, so no template can be made.
    parser.forget_slots();
    is_read
}
