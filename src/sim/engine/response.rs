//! A response in progress: takes tokens, produces events or one body.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::protocol::{ChoiceDelta, ChoiceState, Protocol, ResponseMeta};
use super::runner::{Delivery, RequestHandle, Runner};
use super::text::TextGenerator;

/// One response, token by token.
pub(super) struct ResponseWriter {
    runner: Arc<Runner>,
    meta: ResponseMeta,
    protocol: Box<dyn Protocol>,
    generators: Vec<TextGenerator>,
    told: Vec<ChoiceState>,
    run: RequestHandle,
}

impl ResponseWriter {
    pub fn new(
        runner: Arc<Runner>,
        meta: ResponseMeta,
        protocol: Box<dyn Protocol>,
        generators: Vec<TextGenerator>,
        run: RequestHandle,
    ) -> Self {
        let told = vec![ChoiceState::default(); generators.len()];
        ResponseWriter { runner, meta, protocol, generators, told, run }
    }

    /// The complete response as one body.
    pub async fn whole(mut self) -> String {
        while !self.is_complete() {
            let delivery = self.run.next().await;
            self.take(&delivery);
        }
        self.protocol.whole(&self.meta, &self.told)
    }

    /// The response as an event stream.
    pub fn stream(mut self) -> EventBody {
        let mut events = Vec::new();
        self.protocol.opening(&self.meta, &mut events);
        EventBody { waiting: events.into(), answer: Some(Box::new(self)) }
    }

    fn is_complete(&self) -> bool {
        self.told.iter().all(|told| told.finish.is_some())
    }

    fn take(&mut self, delivery: &Delivery) -> ChoiceDelta {
        let choice = delivery.choice as usize;
        let (generator, told) = (&self.generators[choice], &mut self.told[choice]);
        let from = told.tokens;
        told.tokens += delivery.tokens;
        told.reasoning_tokens = generator.reasoning(told.tokens);
        for index in from..told.tokens {
            told.take(&generator.piece(index));
        }
        if let Some(life) = &delivery.done {
            let finish = generator.finish();
            told.cached = life.cached;
            told.finish = Some(finish);
            self.runner.look(|_, counts| counts.finished(finish));
        }
        ChoiceDelta::new(choice, (from..self.told[choice].tokens).map(|index| self.generators[choice].piece(index)))
    }

    fn events(&mut self, delivery: &Delivery, out: &mut Vec<String>) {
        let turn = self.take(delivery);
        self.protocol.turn(&self.meta, &self.told, &turn, out);
        if self.is_complete() {
            self.protocol.closing(&self.meta, &self.told, out);
        }
    }
}

/// A body of events, one frame each. If dropped early, its request leaves the batch.
pub(super) struct EventBody {
    waiting: VecDeque<String>,
    answer: Option<Box<ResponseWriter>>,
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
pub(super) enum ResponseBody {
    Whole(Option<Bytes>),
    Events(EventBody),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match self.get_mut() {
            ResponseBody::Whole(body) => body.take(),
            ResponseBody::Events(events) => ready!(events.poll_event(cx)).map(Bytes::from),
        };
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::Whole(body) => body.as_ref().is_none_or(Bytes::is_empty),
            ResponseBody::Events(events) => events.waiting.is_empty() && events.answer.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, Bytes::len) as u64),
            ResponseBody::Events(_) => SizeHint::default(),
        }
    }
}
