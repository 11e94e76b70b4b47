//! A response in progress: takes tokens, produces events or one body.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::pace::{Delivery, Pace, Run};
use super::speak::{Speak, Talk, Told, Turn};
use super::voice::Voice;

/// One response, token by token.
pub(super) struct Answer {
    pace: Arc<Pace>,
    talk: Talk,
    speak: Box<dyn Speak>,
    voices: Vec<Voice>,
    told: Vec<Told>,
    run: Run,
}

impl Answer {
    pub fn new(pace: Arc<Pace>, talk: Talk, speak: Box<dyn Speak>, voices: Vec<Voice>, run: Run) -> Self {
        let told = vec![Told::default(); voices.len()];
        Answer { pace, talk, speak, voices, told, run }
    }

    /// The complete response as one body.
    pub async fn whole(mut self) -> String {
        while !self.is_complete() {
            let delivery = self.run.next().await;
            self.take(&delivery);
        }
        self.speak.whole(&self.talk, &self.told)
    }

    /// The response as an event stream.
    pub fn stream(mut self) -> EventBody {
        let mut events = Vec::new();
        self.speak.opening(&self.talk, &mut events);
        EventBody { waiting: events.into(), answer: Some(Box::new(self)) }
    }

    fn is_complete(&self) -> bool {
        self.told.iter().all(|told| told.finish.is_some())
    }

    fn take(&mut self, delivery: &Delivery) -> Turn {
        let choice = delivery.choice as usize;
        let (voice, told) = (&self.voices[choice], &mut self.told[choice]);
        let from = told.tokens;
        told.tokens += delivery.tokens;
        told.reasoning_tokens = voice.reasoning(told.tokens);
        for index in from..told.tokens {
            told.take(&voice.piece(index));
        }
        if let Some(life) = &delivery.done {
            let finish = voice.finish();
            told.cached = life.cached;
            told.finish = Some(finish);
            self.pace.look(|_, counts| counts.finished(finish));
        }
        Turn::new(choice, (from..self.told[choice].tokens).map(|index| self.voices[choice].piece(index)))
    }

    fn events(&mut self, delivery: &Delivery, out: &mut Vec<String>) {
        let turn = self.take(delivery);
        self.speak.turn(&self.talk, &self.told, &turn, out);
        if self.is_complete() {
            self.speak.closing(&self.talk, &self.told, out);
        }
    }
}

/// A body of events, one frame each. If dropped early, its request leaves the batch.
pub(super) struct EventBody {
    waiting: VecDeque<String>,
    answer: Option<Box<Answer>>,
}

impl EventBody {
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<String>> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Poll::Ready(Some(event));
            }
            let Some(answer) = &mut self.answer else { return Poll::Ready(None) };
            let delivery = ready!(answer.run.poll_next(cx));
            let mut events = Vec::new();
            answer.events(&delivery, &mut events);
            if answer.is_complete() {
                self.answer = None;
            }
            self.waiting = events.into();
        }
    }
}

/// The body of any response of the simulated engine.
pub(super) enum Reply {
    Whole(Option<Bytes>),
    Events(EventBody),
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match self.get_mut() {
            Reply::Whole(body) => body.take(),
            Reply::Events(events) => ready!(events.poll_event(cx)).map(Bytes::from),
        };
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Whole(body) => body.as_ref().is_none_or(Bytes::is_empty),
            Reply::Events(events) => events.waiting.is_empty() && events.answer.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, Bytes::len) as u64),
            Reply::Events(_) => SizeHint::default(),
        }
    }
}
