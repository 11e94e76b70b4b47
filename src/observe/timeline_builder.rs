//! Accumulates the events of one response.
//!
//! `TimelineBuilder` keeps moments, gaps, finish and usage by the rules of `docs/semantics.md`
//! (sections 1 to 3) and builds the [`Timeline`]. Decisions that the rules leave open are noted
//! where they are made.

use crate::types::{Dialect, Tick, Tokens};

use super::error_code::UNKNOWN;
use super::parsed_event::{Channel, EventKind, ParsedChoice, ParsedEvent, Reason, Status};
use super::piece::{PieceInfo, ResponseExpectation, UsagePosition};
use super::template::TemplateMatch;
use super::timeline::{
    Choice, ClientLimited, Ending, Gaps, InBandError, ObserverOptions, ResponseFormat, Timeline, TokenSource, Usage,
};
use super::usage::{UsageCounts, UsageTotals};

/// Surplus of tokens over the possible content of the events that shows swallowed tokens. A surplus of one is
/// the stop token, which arrives with the finish reason.
const UNSEEN: f64 = 2.0;

/// Most choices distinguished if fewer were requested.
const UNASKED_CHOICES: usize = 16;

/// One choice as seen so far.
#[derive(Clone, Debug, Default)]
struct ChoiceProgress {
    index: u64,
    first_token: Option<Tick>,
    first_visible: Option<Tick>,
    last_token: Option<Tick>,
    events: u64,
    /// When it last finished.
    finished: Option<Tick>,
    /// Usage beside this choice, and its highest output count.
    usage: UsageCounts,
    highest: u64,
    /// Whether no token came after that usage.
    is_told: bool,
    /// Bytes of the prompt echoed so far; `None` once the text goes beyond.
    echoed: Option<usize>,
}

impl ChoiceProgress {
    /// Whether its usage counts no output although tokens came.
    fn says_nothing(&self) -> bool {
        self.usage.output == Some(0) && self.events > 0
    }

    /// Whether its usage covers all its tokens, or there is none.
    fn is_known(&self) -> bool {
        (self.is_told || self.usage.output.is_none()) && !self.says_nothing()
    }
}

/// The accumulated state of one response.
#[derive(Debug)]
pub(super) struct TimelineBuilder {
    expect: ResponseExpectation,
    watch: ObserverOptions,
    choices: Vec<ChoiceProgress>,
    finish: Option<Tick>,
    gaps: Gaps,
    /// Bucket of the last gap.
    last_bucket: u16,
    /// Set once the client stopped reading; gaps are then ignored.
    limited: Option<ClientLimited>,
    has_visible: bool,
    /// Whether some output does not come token by token: tool calls, audio.
    has_lumps: bool,
    /// Usage of the whole response.
    told: Option<Box<UsageTotals>>,
    /// The choice that finished last.
    last_finished: u64,
    cut_by_length: bool,
    has_finish_reason: bool,
    /// Messages: a stop reason came, and no token after it.
    has_stopped: bool,
    error: Option<InBandError>,
    /// Bytes of visible text of a JSON response.
    visible_bytes: Option<u64>,
    sequence_number: Option<u64>,
}

impl TimelineBuilder {
    pub(super) fn new(expect: ResponseExpectation, watch: ObserverOptions) -> Self {
        TimelineBuilder {
            expect,
            watch,
            choices: Vec::new(),
            finish: None,
            gaps: Gaps::default(),
            last_bucket: 0,
            limited: None,
            has_visible: false,
            has_lumps: false,
            told: None,
            last_finished: 0,
            cut_by_length: false,
            has_finish_reason: false,
            has_stopped: false,
            error: None,
            visible_bytes: None,
            sequence_number: None,
        }
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.expect.dialect
    }

    pub(super) fn expect(&self) -> &ResponseExpectation {
        &self.expect
    }

    pub(super) fn max_event(&self) -> usize {
        self.watch.max_event
    }

    pub(super) fn has_token(&self) -> bool {
        self.choices.iter().any(|choice| choice.events > 0)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.finish.is_some()
    }

    /// None for several choices, because each may have its own usage and none is known to be the last.
    pub(super) fn finished_without_usage(&self) -> Option<Tick> {
        self.finish.filter(|_| self.choices.len() > 1 || self.usage().output.is_none())
    }

    pub(super) fn finished_at(&self) -> Option<Tick> {
        self.finish
    }

    pub(super) fn itl_broke(&self) -> Option<Tick> {
        self.gaps.broke
    }

    pub(super) fn error(&self) -> Option<InBandError> {
        self.error
    }

    pub(super) fn sequence_number(&self) -> Option<u64> {
        self.sequence_number
    }

    /// The client has not read since `since`: saves the progress so far.
    pub(super) fn limit(&mut self, since: Tick) {
        if self.limited.is_none() {
            self.limited = Some(ClientLimited { at: since, choices: self.choices() });
        }
    }

    #[cfg(test)]
    pub(super) fn heap(&self) -> usize {
        self.choices.capacity() * size_of::<ChoiceProgress>() + self.gaps.buckets.capacity() * size_of::<u32>()
    }

    /// Bytes of a completion's text needed to recognise an echo: one more than is left of the longest
    /// prompt; 0 if nothing is echoed (any more).
    pub(super) fn echo_left(&self) -> usize {
        let Some(longest) = self.expect.echo_prompts.iter().map(String::len).max() else { return 0 };
        let all_seen = self.choices.len() as u64 >= self.expect.choices;
        let is_over = all_seen && self.choices.iter().all(|choice| choice.echoed.is_none());
        if is_over { 0 } else { longest + 1 }
    }

    /// Adds a token event of a choice.
    pub(super) fn token(&mut self, index: u64, at: Tick, is_visible: bool) {
        (self.finish, self.has_stopped) = (None, false);
        let slot = self.slot(index);
        self.has_visible |= is_visible;
        let choice = &mut self.choices[slot];
        choice.finished = None;
        choice.is_told = false;
        choice.events += 1;
        choice.first_token.get_or_insert(at);
        if is_visible {
            choice.first_visible.get_or_insert(at);
        }
        let before = choice.last_token.replace(at);
        if let Some(before) = before
            && self.limited.is_none()
        {
            self.gap(before, at);
        }
    }

    /// Adds an event like the previous one, with other text and counts.
    pub(super) fn steady(&mut self, index: u64, fit: &TemplateMatch, info: &PieceInfo, at: Tick) {
        if fit.sequence_number.is_some() {
            self.sequence_number = fit.sequence_number;
        }
        if info.usage == UsagePosition::WithChoice {
            let (slot, counts) = (self.slot(index), fit.counts.possible());
            self.usage_rises(slot, counts, false);
            self.token(index, at, info.visible);
            self.choices[slot].is_told = counts.output.is_some();
            return;
        }
        if fit.counts != UsageCounts::default() {
            self.told().take(fit.counts.possible());
        }
        self.token(index, at, info.visible);
    }

    /// Allocated on first use, because usage comes late or never.
    fn told(&mut self) -> &mut UsageTotals {
        self.told.get_or_insert_default()
    }

    fn gap(&mut self, from: Tick, to: Tick) {
        let gap = to - from;
        let edges = &self.watch.gap_edges;
        let gaps = &mut self.gaps;
        if gaps.buckets.is_empty() {
            gaps.buckets = vec![0; edges.len() + 1];
        }
        // Most gaps fall into the same bucket as the one before.
        let last = usize::from(self.last_bucket);
        let is_like_last =
            edges[..last].last().is_none_or(|edge| *edge < gap) && edges.get(last).is_none_or(|edge| gap <= *edge);
        let bucket = if is_like_last { last } else { edges.partition_point(|edge| *edge < gap) };
        self.last_bucket = bucket as u16;
        gaps.buckets[bucket] = gaps.buckets[bucket].saturating_add(1);
        gaps.sum = gaps.sum.saturating_add(gap);
        gaps.largest = gaps.largest.max(Some(gap));
        gaps.stalls += u32::from(gap > self.watch.stall);
        if let Some(limit) = self.watch.itl
            && gap > limit
        {
            gaps.broke = gaps.broke.min(Some(from + limit)).or(Some(from + limit));
        }
    }

    /// Position of the choice with this index; a new choice revokes the finish. Choices use memory, so those
    /// beyond the expected number share the last position.
    fn slot(&mut self, index: u64) -> usize {
        match self.choices.binary_search_by_key(&index, |choice| choice.index) {
            Ok(slot) => slot,
            Err(_) if self.has_all_choices() => {
                self.finish = None;
                self.choices.len() - 1
            }
            Err(slot) => {
                self.finish = None;
                let echoed = self.prompt_of(index).map(|_| 0);
                // One choice is the rule, so no spare capacity is allocated.
                match self.choices.len() {
                    0 => self.choices = Vec::with_capacity(1),
                    len if len == self.choices.capacity() => self.choices.reserve_exact(len),
                    _ => {}
                }
                self.choices.insert(slot, ChoiceProgress { index, echoed, ..ChoiceProgress::default() });
                slot
            }
        }
    }

    fn has_all_choices(&self) -> bool {
        let expected = usize::try_from(self.expect.choices).unwrap_or(usize::MAX);
        self.choices.len() >= expected.max(UNASKED_CHOICES)
    }

    /// The prompt that a choice may echo.
    fn prompt_of(&self, index: u64) -> Option<&str> {
        if self.expect.echo_prompts.is_empty() {
            return None;
        }
        let prompt = usize::try_from(self.prompt_index(index)).ok()?;
        self.expect.echo_prompts.get(prompt).map(String::as_str)
    }

    fn prompt_index(&self, index: u64) -> u64 {
        let per_prompt = (self.expect.choices / self.expect.prompts.max(1)).max(1);
        index / per_prompt
    }

    /// `[DONE]` finishes the response even if fewer choices than expected have finished.
    pub(super) fn done(&mut self, at: Tick) {
        if matches!(self.dialect(), Dialect::Chat | Dialect::Completions) && self.error.is_none() {
            self.finish.get_or_insert(at);
        }
    }

    /// The body ended cleanly. Without its dialect's last event the response is finished only if at least one
    /// choice has finished and so has every one seen (Messages: a stop reason came). The finish is the end
    /// of the body, because it was not certain before.
    pub(super) fn body_ended(&mut self, at: Tick) {
        let all =
            self.has_stopped || !self.choices.is_empty() && self.choices.iter().all(|choice| choice.finished.is_some());
        if self.finish.is_none() && self.error.is_none() && all {
            self.finish = Some(at);
        }
    }

    /// Adds an event that was parsed in full.
    pub(super) fn event(&mut self, parsed: &ParsedEvent, at: Tick) -> PieceInfo {
        self.sequence_number = parsed.sequence_number.or(self.sequence_number);
        self.event_of(parsed, parsed.all_choices(self.dialect()), parsed.usage, at)
    }

    /// Adds an event that matched a template with this content, with other text and numbers.
    pub(super) fn known_event(&mut self, parsed: &ParsedEvent, fit: &TemplateMatch, at: Tick) -> PieceInfo {
        self.sequence_number = fit.sequence_number.or(self.sequence_number);
        let choice = self.known_choice(parsed, fit);
        self.event_of(parsed, choice.as_slice(), fit.counts, at)
    }

    fn event_of(&mut self, parsed: &ParsedEvent, choices: &[ParsedChoice], usage: UsageCounts, at: Tick) -> PieceInfo {
        let error = self.error_in(parsed, choices);
        // The first error is reported and later events do not improve it, but one that interrupts text takes
        // precedence.
        if self.error.is_none_or(|first| error.is_some_and(|next| next.after_first_token && !first.after_first_token)) {
            self.error = error;
        }
        let usage = usage.possible();
        self.has_lumps |= parsed.comes_in_lumps(choices);
        if parsed.has_usage && matches!(self.dialect(), Dialect::Responses | Dialect::Messages) {
            self.told().take(usage);
        }
        let mut info = match (self.dialect(), choices) {
            (Dialect::Chat | Dialect::Completions, _) => {
                // With several choices in one event it is unclear to which the usage belongs.
                let is_clear = choices.len() < 2 || !parsed.usage_is_of_a_choice;
                self.chunk(choices, (parsed.has_usage && is_clear).then_some(usage), at)
            }
            (Dialect::Responses, [only]) => self.response_event(parsed, only, at),
            (Dialect::Messages, [only]) => self.message_event(parsed, only, at),
            (Dialect::Plain, _) => {
                if let Some(counts) = parsed.plain_usage() {
                    self.told().take(counts.possible());
                }
                PieceInfo::default()
            }
            _ => PieceInfo::default(),
        };
        info.error = error;
        info.finished = self.is_finished();
        info
    }

    /// A reported error, or a finish reason which says that the engine gave up, because such a response must
    /// not look better than one with an explicit error.
    fn error_in(&self, parsed: &ParsedEvent, choices: &[ParsedChoice]) -> Option<InBandError> {
        let is_called = matches!(parsed.kind, EventKind::Error | EventKind::Failed);
        let is_error = parsed.has_error || parsed.is_error_object || is_called || parsed.is_flat_error();
        let mut reasons = choices.iter().filter_map(|choice| choice.finish).chain(parsed.incomplete);
        let failure = reasons.find_map(Reason::failure);
        if !is_error && failure.is_none() {
            return None;
        }
        let code = parsed.error.http().or(parsed.top.http()).or(failure).unwrap_or(UNKNOWN);
        Some(InBandError { code, after_first_token: self.has_token() })
    }

    /// Adds an event of `chat/completions` or `completions`.
    fn chunk(&mut self, choices: &[ParsedChoice], usage: Option<UsageCounts>, at: Tick) -> PieceInfo {
        let mut info = PieceInfo::default();
        let single = choices.len() == 1;
        for choice in choices {
            let slot = self.slot(choice.index);
            // After a finish only text is a token; late usage is no evidence of one.
            let goes_on = self.choices[slot].finished.is_none();
            let rises = match usage {
                Some(usage) if single => self.usage_rises(slot, usage, choice.finish.is_some()),
                _ => false,
            };
            let is_echo = choice.has_text() && self.is_echo(slot, choice);
            let is_token = if choice.has_text() { !is_echo } else { goes_on && (rises || choice.logprobs) };
            if is_token {
                self.token(choice.index, at, choice.visible);
                info.token = true;
                info.visible |= choice.visible;
            }
            self.choices[slot].is_told |= single && usage.is_some_and(|usage| usage.output.is_some());
            if let Some(reason) = choice.finish {
                info.ends_choice = true;
                self.choices[slot].finished = Some(at);
                self.last_finished = choice.index;
                self.reason(reason);
            }
        }
        if let Some(usage) = usage {
            info.usage = if choices.is_empty() { UsagePosition::Alone } else { UsagePosition::WithChoice };
            // Usage beside several choices belongs to none of them.
            if !single {
                self.usage_of_request(usage);
            }
        }
        let finished = self.choices.iter().filter(|choice| choice.finished.is_some()).count();
        let is_whole = finished == self.choices.len() && finished as u64 >= self.expect.choices.max(1);
        if is_whole && self.error.is_none() {
            self.finish.get_or_insert(at);
        }
        info
    }

    fn reason(&mut self, reason: Reason) {
        self.has_finish_reason = true;
        self.cut_by_length |= reason == Reason::Length;
    }

    /// Takes usage beside a choice and returns whether its output rose.
    fn usage_rises(&mut self, slot: usize, usage: UsageCounts, has_finish: bool) -> bool {
        // For a response of one choice the last report counts, wherever it stands.
        if self.choices.len() == 1
            && let Some(told) = &mut self.told
        {
            told.take(usage);
        }
        let choice = &mut self.choices[slot];
        let is_first = choice.usage.output.is_none();
        choice.usage.take(usage);
        let Some(output) = usage.output else { return false };
        let rises = output > choice.highest && !(is_first && has_finish);
        choice.highest = choice.highest.max(output);
        rises
    }

    /// Whether this text only repeats the choice's prompt, or continues to.
    fn is_echo(&mut self, slot: usize, parsed: &ParsedChoice) -> bool {
        let Some(echoed) = self.choices[slot].echoed else { return false };
        let left = self.prompt_of(self.choices[slot].index).and_then(|prompt| prompt.as_bytes().get(echoed..));
        let is_echo = left.is_some_and(|left| left.starts_with(&parsed.text));
        self.choices[slot].echoed = is_echo.then_some(echoed + parsed.text.len());
        is_echo
    }

    /// Takes a usage-only event, or usage beside several choices.
    fn usage_of_request(&mut self, usage: UsageCounts) {
        let finishes = self.choices.iter().filter(|choice| choice.finished.is_some()).count();
        let prompt = self.prompt_index(self.last_finished);
        self.told().behind(usage, finishes, prompt);
    }

    fn response_event(&mut self, parsed: &ParsedEvent, only: &ParsedChoice, at: Tick) -> PieceInfo {
        let channel = match parsed.kind {
            EventKind::Delta(channel) if only.has_text() => Some(channel),
            EventKind::LumpDelta if only.has_text() => Some(Channel::Visible),
            EventKind::ItemAdded if parsed.names_tool => Some(Channel::Visible),
            _ => None,
        };
        let info = self.only_token(channel, at);
        match parsed.kind {
            EventKind::Completed => self.ended_by(Some(Reason::Other), at),
            EventKind::Incomplete => self.ended_by(parsed.incomplete.or(Some(Reason::Length)), at),
            _ => {}
        }
        info
    }

    fn message_event(&mut self, parsed: &ParsedEvent, only: &ParsedChoice, at: Tick) -> PieceInfo {
        let channel = match parsed.kind {
            EventKind::BlockDelta if only.visible => Some(Channel::Visible),
            EventKind::BlockDelta if only.hidden => Some(Channel::Hidden),
            EventKind::BlockStart if parsed.names_tool => Some(Channel::Visible),
            _ => None,
        };
        let info = self.only_token(channel, at);
        if let Some(reason) = only.finish {
            self.reason(reason);
            self.has_stopped = true;
        }
        if parsed.kind == EventKind::Stop {
            self.ended_by(None, at);
        }
        info
    }

    fn only_token(&mut self, channel: Option<Channel>, at: Tick) -> PieceInfo {
        let Some(channel) = channel else { return PieceInfo::default() };
        let visible = channel != Channel::Hidden;
        self.token(0, at, visible);
        PieceInfo { token: true, visible, ..PieceInfo::default() }
    }

    /// Takes the last event of a dialect without choices.
    fn ended_by(&mut self, reason: Option<Reason>, at: Tick) {
        if let Some(reason) = reason {
            self.reason(reason);
        }
        for choice in &mut self.choices {
            choice.finished = Some(at);
        }
        if self.error.is_none() {
            self.finish.get_or_insert(at);
        }
    }

    /// Takes a whole JSON body whose last byte was received at `at`. If a stream was requested, all its
    /// tokens came then.
    pub(super) fn body(&mut self, parsed: &ParsedEvent, at: Tick) {
        self.whole(parsed, parsed.all_choices(self.dialect()), parsed.usage, at);
    }

    /// Takes a body that matched a template with this content, with other text and counts.
    pub(super) fn known_body(&mut self, parsed: &ParsedEvent, fit: &TemplateMatch, at: Tick) {
        let choice = self.known_choice(parsed, fit);
        self.whole(parsed, choice.as_slice(), fit.counts, at);
    }

    /// The choice of a template's content, with the values of its placeholders.
    fn known_choice(&self, parsed: &ParsedEvent, fit: &TemplateMatch) -> Option<ParsedChoice> {
        let choice = parsed.all_choices(self.dialect()).first()?;
        let index = fit.index.unwrap_or(choice.index);
        Some(ParsedChoice { index, bytes: fit.bytes, finish: fit.finish, ..choice.clone() })
    }

    fn whole(&mut self, parsed: &ParsedEvent, choices: &[ParsedChoice], usage: UsageCounts, at: Tick) {
        let status_failed = parsed.status == Some(Status::Failed);
        if let Some(error) = self.error_in(parsed, choices).or(status_failed.then_some(InBandError::UNKNOWN)) {
            self.error = Some(error);
            return;
        }
        let usage = if self.dialect().generates() { parsed.has_usage.then_some(usage) } else { parsed.plain_usage() };
        if let Some(usage) = usage {
            self.told().take(usage.possible());
        }
        if self.dialect().generates() {
            let mut bytes = 0;
            for choice in choices {
                bytes += self.whole_choice(choice, at);
            }
            self.visible_bytes = Some(bytes);
            match parsed.status {
                Some(Status::Completed) => self.reason(Reason::Other),
                Some(Status::Incomplete) => self.reason(parsed.incomplete.unwrap_or(Reason::Length)),
                _ => {}
            }
        }
        self.finish = Some(at);
    }

    /// Adds a choice of a JSON body. Returns its bytes of visible text.
    fn whole_choice(&mut self, parsed: &ParsedChoice, at: Tick) -> u64 {
        let slot = self.slot(parsed.index);
        let prompt = self.prompt_of(parsed.index).map_or(0, str::len);
        let goes_on = self.choices[slot].echoed.is_some()
            && self.prompt_of(parsed.index).is_some_and(|prompt| parsed.text.starts_with(prompt.as_bytes()));
        let is_echo = self.is_echo(slot, parsed);
        if parsed.has_text() && !is_echo || parsed.logprobs && !parsed.has_text() {
            if self.expect.stream_asked {
                self.token(parsed.index, at, parsed.visible);
            } else {
                self.choices[slot].events = 1;
                self.has_visible |= parsed.visible;
            }
        }
        if let Some(reason) = parsed.finish {
            self.choices[slot].finished = Some(at);
            self.reason(reason);
        }
        let echoed = if is_echo {
            parsed.bytes
        } else if goes_on {
            prompt as u64
        } else {
            0
        };
        parsed.bytes.saturating_sub(echoed)
    }

    /// A body that is not read ended completely.
    pub(super) fn ended_whole(&mut self, at: Tick) {
        if self.error.is_none() {
            self.finish = Some(at);
        }
    }

    /// The timeline so far.
    pub(super) fn timeline(&self, format: ResponseFormat, status: u16, ending: Ending, end: Tick) -> Timeline {
        let (usage, output, source) = self.outputs();
        let events: u64 = self.choices.iter().map(|choice| choice.events).sum();
        let first = |moment: fn(&ChoiceProgress) -> Option<Tick>| self.choices.iter().filter_map(moment).min();
        let mut choices = self.choices_of(output, source);
        if source == TokenSource::Usage {
            self.end_with_finish(&mut choices, output);
        }
        Timeline {
            start: self.expect.start,
            streamed: self.dialect().generates() && (self.expect.stream_asked || format == ResponseFormat::Events),
            reader: format,
            first_token: first(|choice| choice.first_token),
            first_visible: first(|choice| choice.first_visible),
            last_token: self.choices.iter().filter_map(|choice| choice.last_token).max(),
            finish: self.finish,
            end,
            choices,
            gaps: self.gaps.clone(),
            usage,
            source,
            output: Tokens(output.ceil() as u64),
            token_events: events,
            cut_by_length: self.cut_by_length,
            has_finish_reason: self.has_finish_reason,
            error: self.error,
            unparseable: false,
            status,
            has_output: events > 0,
            has_visible: self.has_visible,
            has_lumps: self.has_lumps,
            limited: self.limited.clone(),
            ending,
        }
    }

    /// Moves a choice's end to the finish if more tokens came between the last event and the finish than
    /// events can have carried, because a parser swallowed them. If usage does not distinguish choices, they
    /// are assigned to the one that went on longest.
    fn end_with_finish(&self, choices: &mut [Choice], output: f64) {
        let Some(finish) = self.finish else { return };
        let is_short = |tokens: f64, events: u64| tokens - events as f64 * self.ratio() >= UNSEEN;
        let end = |choice: &mut Choice, seen: &ChoiceProgress| {
            choice.last_token = choice.last_token.max(choice.last_token.and(seen.finished.or(Some(finish))));
        };
        if self.each_is_told() && self.choices.iter().all(|choice| choice.usage.output.is_some()) {
            for (choice, seen) in choices.iter_mut().zip(&self.choices) {
                if is_short(choice.tokens, choice.events) {
                    end(choice, seen);
                }
            }
            return;
        }
        let events = self.choices.iter().map(|choice| choice.events).sum();
        let last = choices.iter_mut().zip(&self.choices).max_by_key(|(choice, _)| choice.last_token);
        if let Some((choice, seen)) = last.filter(|_| is_short(output, events)) {
            end(choice, seen);
        }
    }

    /// Usage, and the output that follows from it or from other evidence.
    fn outputs(&self) -> (Usage, f64, TokenSource) {
        let events: u64 = self.choices.iter().map(|choice| choice.events).sum();
        let by_events = events as f64 * self.ratio();
        let usage = self.usage();
        if let Some(Tokens(output)) = usage.output {
            // Usage of an unfinished response with more token events than it counts is only a preliminary report
            // (Messages: `message_start`).
            let is_stale = self.finish.is_none() && output < events;
            if !is_stale {
                return (usage, output as f64, TokenSource::Usage);
            }
            return (usage, by_events.max(output as f64), TokenSource::Events);
        }
        match self.visible_bytes {
            Some(bytes) => (usage, bytes.div_ceil(4) as f64, TokenSource::Estimate),
            None => (usage, by_events, TokenSource::Events),
        }
    }

    fn ratio(&self) -> f64 {
        let ratio = self.expect.tokens_per_event;
        if ratio.is_finite() { ratio.max(1.0) } else { 1.0 }
    }

    /// Usage of the whole response: its own, else the sum over choices, counting each prompt once. Decided per
    /// field, because an engine may report one count for the response and the other beside its
    /// choices.
    fn usage(&self) -> Usage {
        let mut sum = self.told.as_deref().map(UsageTotals::sum).unwrap_or_default();
        let (no_output, no_input) = (sum.output.is_none(), sum.input.is_none());
        let mut prompt = None;
        for choice in self.choices.iter().filter(|choice| choice.usage != UsageCounts::default()) {
            if no_output {
                sum.add_output(choice.usage);
            }
            let its = Some(self.prompt_index(choice.index));
            if no_input && its != prompt {
                sum.add_input(choice.usage);
            }
            prompt = its;
        }
        let mut usage = sum.possible().usage(self.dialect());
        // Engines that have not counted write 0 although tokens came.
        let is_void = usage.output == Some(Tokens::ZERO) && self.has_token();
        if is_void || no_output && self.choices.iter().any(ChoiceProgress::says_nothing) {
            usage.output = None;
        }
        usage
    }

    fn choices(&self) -> Vec<Choice> {
        let (_, output, source) = self.outputs();
        self.choices_of(output, source)
    }

    fn choices_of(&self, output: f64, source: TokenSource) -> Vec<Choice> {
        let events = self.choices.iter().map(|choice| choice.events).sum();
        self.choices.iter().map(|choice| self.choice(choice, output, source, events)).collect()
    }

    /// Whether usage distinguishes several choices. With one choice the total is its count; and if tokens came
    /// after a choice's usage, only the total has them.
    fn each_is_told(&self) -> bool {
        self.choices.len() > 1 && self.choices.iter().all(ChoiceProgress::is_known)
    }

    fn choice(&self, seen: &ChoiceProgress, output: f64, source: TokenSource, events: u64) -> Choice {
        let share = if events == 0 {
            output / self.choices.len().max(1) as f64
        } else {
            output * seen.events as f64 / events as f64
        };
        let own = seen.usage.output.filter(|_| source == TokenSource::Usage && self.each_is_told());
        Choice {
            index: seen.index,
            first_token: seen.first_token,
            first_visible: seen.first_visible,
            last_token: seen.last_token,
            events: seen.events,
            tokens: own.map_or(share, |own| own as f64),
            finished: seen.finished.is_some(),
        }
    }
}

impl InBandError {
    const UNKNOWN: InBandError = InBandError { code: UNKNOWN, after_first_token: false };
}
