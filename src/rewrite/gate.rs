//! Filters a response's bytes: what the gateway caused is removed again.
//!
//! The injected usage event is removed, and so are `usage` members of other events if
//! `continuous_usage_stats` was injected. All other bytes pass unchanged.
//!
//! If only `include_usage` was injected, usage on an event *with* a choice stays (some engines write it
//! on their last content or finish event), because clients ignore a member that they do not know, and
//! removing it would edit an event that carries text. An event with an error is never removed.
//!
//! What travels with the usage event stays: engines that are asked for it move fields of their last
//! event there. vLLM does so with `system_fingerprint`, llama.cpp with `timings`; Dynamo and
//! transformers move none. So where the usage event is hidden, an event in which a choice finishes
//! waits for the next one (for how long `forward` keeps: a few milliseconds, longer where the engine
//! is known to move fields), and gets back what only the hidden event has, behind its own members,
//! where those engines write it.
//!
//! An event longer than [`HELD`](crate::observe::sse::HELD) is passed on before its end is known. Its
//! `usage` member is still removed while it passes, although an error may follow, which cannot be known
//! then. A usage event of that length, which no engine writes, stays. Long events never wait.

use bytes::Bytes;

use super::moved::with_members_of;
use super::usage::{OversizedEdit, without_usage};
use crate::observe::{PieceInfo, PiecePart, UsagePosition};

/// Passes the bytes of one response, without the effects of injected fields.
#[derive(Debug)]
pub struct EventGate {
    hide_usage: bool,
    strip_continuous: bool,
    /// The long event in progress.
    long: Option<Box<OversizedEdit>>,
    /// A held event in which a choice finished.
    finish: Option<Bytes>,
    /// The last piece was hidden; line ends after it belong to it.
    has_hidden: bool,
    /// The engine has moved members to the event that was hidden.
    has_moved: bool,
}

impl EventGate {
    /// A gate that removes usage-only events (`hide_usage`: injected, and not requested by the client) and
    /// `usage` members of events with a choice (`strip_continuous`: usage on every event was
    /// injected).
    #[must_use]
    pub const fn new(hide_usage: bool, strip_continuous: bool) -> Self {
        EventGate { hide_usage, strip_continuous, long: None, finish: None, has_hidden: false, has_moved: false }
    }

    /// Passes the permitted bytes of this piece and of a held event.
    #[inline]
    pub fn pass(&mut self, bytes: Bytes, note: &PieceInfo, out: &mut dyn FnMut(Bytes)) {
        if self.finish.is_some() || self.has_hidden {
            return self.behind_one_of_ours(bytes, note, out);
        }
        if note.ends_choice && self.hide_usage && note.part == PiecePart::Whole && note.error.is_none() {
            self.finish = Some(self.stripped(bytes));
            return;
        }
        match self.passed(bytes, note) {
            Some(passed) => out(passed),
            None => self.has_hidden = true,
        }
    }

    /// Whether this piece is hidden completely.
    #[must_use]
    pub fn hides(&self, note: &PieceInfo) -> bool {
        self.hide_usage && note.part == PiecePart::Whole && note.error.is_none() && note.usage == UsagePosition::Alone
    }

    /// Whether a finish event is held.
    #[must_use]
    pub const fn holds_finish(&self) -> bool {
        self.finish.is_some()
    }

    /// Whether members of a hidden event were put back.
    #[must_use]
    pub const fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// The event that waits has waited for long enough.
    pub fn let_finish_go(&mut self) -> Option<Bytes> {
        self.finish.take()
    }

    /// Ends the stream: passes on everything held, including an incomplete long event.
    pub fn rest(&mut self, out: &mut dyn FnMut(Bytes)) {
        let finish = self.finish.take();
        finish.into_iter().chain(self.rest_of_long()).for_each(out);
    }

    /// Handles a piece after a held or hidden event.
    #[cold]
    fn behind_one_of_ours(&mut self, bytes: Bytes, note: &PieceInfo, out: &mut dyn FnMut(Bytes)) {
        let is_blank = bytes.iter().all(|byte| matches!(byte, b'\n' | b'\r'));
        let Some(finish) = self.finish.take() else {
            self.has_hidden &= is_blank;
            if !is_blank {
                self.pass(bytes, note, out);
            }
            return;
        };
        if is_blank {
            // Line ends that belong to the held event.
            self.finish = Some([finish, bytes].concat().into());
        } else if self.hides(note) {
            self.has_hidden = true;
            let length = finish.len();
            let whole = with_members_of(finish, &bytes);
            self.has_moved |= whole.len() > length;
            out(whole);
        } else {
            out(finish);
            self.pass(bytes, note, out);
        }
    }

    fn passed(&mut self, bytes: Bytes, note: &PieceInfo) -> Option<Bytes> {
        if note.part != PiecePart::Whole {
            return Some(if self.strip_continuous { self.pass_part(bytes, note.part) } else { bytes });
        }
        if note.error.is_some() && note.usage != UsagePosition::WithChoice {
            return Some(bytes);
        }
        if note.usage == UsagePosition::Alone {
            return (!self.hide_usage).then_some(bytes);
        }
        Some(self.stripped(bytes))
    }

    fn stripped(&self, event: Bytes) -> Bytes {
        if self.strip_continuous { without_usage(event) } else { event }
    }

    fn pass_part(&mut self, bytes: Bytes, part: PiecePart) -> Bytes {
        let passed = self.long.get_or_insert_default().pass(bytes);
        if part == PiecePart::More {
            return passed;
        }
        match self.rest_of_long() {
            None => passed,
            Some(rest) => [passed, rest].concat().into(),
        }
    }

    fn rest_of_long(&mut self) -> Option<Bytes> {
        let held = self.long.take()?.finish();
        (!held.is_empty()).then_some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::sse::HELD;
    use crate::observe::{Observer, ObserverOptions, ResponseExpectation, ResponseFormat};
    use crate::types::{Dialect, Tick};

    /// The bytes that pass of an observed chat stream.
    fn passed(gate: EventGate, stream: &str) -> String {
        passed_in(gate, &[stream])
    }

    /// The same for a stream in these frames.
    fn passed_in(mut gate: EventGate, frames: &[&str]) -> String {
        let mut out = Vec::new();
        let mut observer = Observer::new(
            ResponseExpectation::stream(Dialect::Chat, Tick::ZERO),
            ResponseFormat::Events,
            200,
            ObserverOptions::default(),
        );
        let mut pass = |piece: Bytes, note: &PieceInfo| gate.pass(piece, note, &mut |passed| out.extend(passed));
        for frame in frames {
            observer.frame(Bytes::copy_from_slice(frame.as_bytes()), Tick::ZERO, &mut pass);
        }
        observer.clean_end(Tick::ZERO, &mut pass);
        gate.rest(&mut |passed| out.extend(passed));
        String::from_utf8(out).unwrap()
    }

    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"usage\"}}]}\n\n";
    const FINISH: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const FINISH_WITH_USAGE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":1}}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn c66_the_injected_usage_event_is_taken_out_and_nothing_else() {
        let stream = [ROLE, TOKEN, FINISH, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), [ROLE, TOKEN, FINISH, DONE].concat());
        assert_eq!(passed(EventGate::new(false, false), &stream), stream);
        let several = [TOKEN, FINISH, USAGE, TOKEN, FINISH, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &several), [TOKEN, FINISH, TOKEN, FINISH, DONE].concat());
        let last = [TOKEN, FINISH, USAGE.trim_end()].concat();
        assert_eq!(passed(EventGate::new(true, false), &last), [TOKEN, FINISH].concat());
    }

    #[test]
    fn c66_usage_on_a_finish_event_stays_where_only_the_usage_event_was_injected() {
        let stream = [TOKEN, FINISH_WITH_USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), stream);
        assert_eq!(passed(EventGate::new(true, true), &stream), [TOKEN, FINISH, DONE].concat());
        assert_eq!(passed(EventGate::new(false, true), &stream), [TOKEN, FINISH, DONE].concat());
    }

    #[test]
    fn c66_a_client_that_asked_for_the_usage_event_keeps_it() {
        let stream = [TOKEN, FINISH_WITH_USAGE, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(false, true), &stream), [TOKEN, FINISH, USAGE, DONE].concat());
    }

    #[test]
    fn events_without_choices_or_with_an_error_are_not_edited() {
        let preamble = "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n";
        let null = "data: {\"choices\":[],\"usage\":null}\n\n";
        let error = "data: {\"error\":{\"code\":500},\"usage\":{\"completion_tokens\":1}}\n\n";
        let stream = [": hi\n\n", preamble, null, error, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), stream);
    }

    #[test]
    fn usage_beside_the_choice_that_an_engine_gave_up_is_taken_out_too() {
        let aborted = FINISH_WITH_USAGE.replace("stop", "abort");
        let bare = FINISH.replace("stop", "abort");
        let stream = [TOKEN, &aborted, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, true), &stream), [TOKEN, &bare, DONE].concat());
        assert_eq!(passed(EventGate::new(true, false), &stream), [TOKEN, &aborted, DONE].concat());
    }

    #[test]
    fn a_usage_member_of_a_long_event_is_taken_out_while_the_event_passes() {
        let long = |usage: &str| {
            let text = "x".repeat(3 * HELD);
            format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]{usage}}}\n\n")
        };
        let (with, without) = (long(",\"usage\":{\"completion_tokens\":1}"), long(""));
        for size in [1000, 4096, HELD, HELD + 1, with.len()] {
            let stream = [ROLE, &with, &with, FINISH_WITH_USAGE, DONE].concat();
            let frames: Vec<&str> =
                stream.as_bytes().chunks(size).map(|frame| std::str::from_utf8(frame).unwrap()).collect();
            let expected = [ROLE, &without, &without, FINISH, DONE].concat();
            assert!(passed_in(EventGate::new(true, true), &frames) == expected, "frames of {size}");
            assert!(passed_in(EventGate::new(true, false), &frames) == stream, "frames of {size}");
            // Truncated or broken, nothing of it is lost.
            for cut in 1..60 {
                let all = with.trim_end();
                let (begun, _) = all.split_at(all.len() - cut);
                let frames: Vec<&str> =
                    begun.as_bytes().chunks(size).map(|frame| std::str::from_utf8(frame).unwrap()).collect();
                let left = passed_in(EventGate::new(true, true), &frames);
                let ends = cut == 1;
                assert!(left == if ends { &without[..without.len() - 3] } else { begun }, "{cut} bytes are missing");
            }
        }
    }

    const VLLM: [&str; 2] = [
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"completion_tokens\":1},\"system_fingerprint\":\"f\"}\n\n",
    ];
    const PUT_BACK: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"system_fingerprint\":\"f\"}\n\n";

    #[test]
    fn c105_members_of_the_removed_event_are_put_back() {
        let [finish, usage] = VLLM;
        let stream = [ROLE, TOKEN, finish, usage, DONE].concat();
        let put_back = [ROLE, TOKEN, PUT_BACK, DONE].concat();
        for size in 1..stream.len() {
            let frames: Vec<&str> =
                stream.as_bytes().chunks(size).map(|frame| std::str::from_utf8(frame).unwrap()).collect();
            assert_eq!(passed_in(EventGate::new(true, false), &frames), put_back, "frames of {size}");
        }
        assert_eq!(passed(EventGate::new(false, false), &stream), stream, "a client that asked for it has it all");
        let crlf = |text: &str| text.replace('\n', "\r\n");
        for size in 1..stream.len() {
            let stream = crlf(&stream);
            let frames: Vec<&str> =
                stream.as_bytes().chunks(size).map(|frame| std::str::from_utf8(frame).unwrap()).collect();
            assert_eq!(passed_in(EventGate::new(true, false), &frames), crlf(&put_back), "frames of {size}");
        }
        // Also if the usage event ends the stream, and if usage is on every event.
        let short = [TOKEN, finish, usage.trim_end()].concat();
        assert_eq!(passed(EventGate::new(true, false), &short), [TOKEN, PUT_BACK].concat());
        let with_usage = finish.replace("}]}", "}],\"usage\":{\"completion_tokens\":1}}");
        let stream = [TOKEN, &with_usage, usage, DONE].concat();
        assert_eq!(passed(EventGate::new(true, true), &stream), [TOKEN, PUT_BACK, DONE].concat());
    }

    #[test]
    fn c105_of_several_finishes_the_last_one_has_it() {
        let [finish, usage] = VLLM;
        let other = finish.replace("\"index\":0", "\"index\":1");
        let stream = [TOKEN, &other, TOKEN, finish, usage, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), [TOKEN, &other, TOKEN, PUT_BACK, DONE].concat());
    }

    #[test]
    fn c105_a_held_event_without_a_successor_is_relayed_unchanged() {
        let [finish, usage] = VLLM;
        let error = "data: {\"error\":{\"code\":500},\"choices\":[],\"usage\":{\"completion_tokens\":1}}\n\n";
        for behind in ["", DONE, ": ping\n\n", TOKEN, error, "data: [1]\n\n"] {
            let stream = [TOKEN, finish, behind].concat();
            assert_eq!(passed(EventGate::new(true, false), &stream), stream, "{behind}");
        }
        // A comment between the two separates them.
        let parted = [finish, ": ping\n\n", usage, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &parted), [finish, ": ping\n\n", DONE].concat());
        let mut gate = EventGate::new(true, false);
        let note = PieceInfo { ends_choice: true, ..PieceInfo::default() };
        gate.pass(Bytes::from_static(b"data: x\n\n"), &note, &mut |_| panic!("it waits"));
        assert!(gate.holds_finish());
        assert_eq!(gate.let_finish_go(), Some(Bytes::from_static(b"data: x\n\n")));
        assert_eq!((gate.holds_finish(), gate.let_finish_go()), (false, None));
    }

    #[test]
    fn c89_usage_is_taken_out_also_beside_numbers_of_python() {
        let with = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"p\":NaN}],\"usage\":{\"completion_tokens\":1}}\n\n";
        let without = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"p\":NaN}]}\n\n";
        assert_eq!(passed(EventGate::new(true, true), with), without);
    }
}
