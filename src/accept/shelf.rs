//! An answer on HTTP/2, between its body and the client's window.
//!
//! hyper asks a body for more once the window has room for what it gave last. But a body is where
//! a request goes on: behind a head that went ahead it waits for its turn there, and the place in
//! the queue, the seat and the engine are given back at its end. So the stream's task asks for
//! more also while the window is shut, and keeps what comes here: what the socket's buffer is on
//! HTTP/1. Where [`MOST`] is reached the body waits for the client, and with it the engine.
//!
//! Whoever asks, asks in the stream's own task: nobody has to be told that something came.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use super::door::BoxError;

/// From here on an answer's body is not asked for more while its client does not read. One piece
/// goes beyond it, and HTTP/2 itself holds some more: what that comes to in memory is measured in
/// `tests/e2e/memory.rs` and stated in docs/operations.md.
const MOST: usize = 64 * 1024;

/// What HTTP/2 puts into one DATA frame at most. A longer piece is handed to it in parts: a
/// client that takes one part after the other, however slowly, takes bytes.
const PART: usize = 16 * 1024;

/// The body of an answer.
pub(super) type BoxResponseBody = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

/// See the module.
#[derive(Default)]
pub(super) struct H2SendBuffer {
    /// `None` before the answer, and from its end on.
    body: Option<BoxResponseBody>,
    /// What goes next.
    front: Bytes,
    /// What came after it, in one piece: small pieces would each keep alive what they were read
    /// into.
    behind: BytesMut,
    /// What comes after the last byte, if something does.
    last: Option<Result<HeaderMap, BoxError>>,
    /// Something was given that the connection may not have written yet: the head at first.
    unwritten: bool,
}

impl H2SendBuffer {
    pub(super) fn of(body: BoxResponseBody) -> Self {
        H2SendBuffer { body: Some(body), unwritten: true, ..H2SendBuffer::default() }
    }

    /// Asks the body for as much as may be kept. Says whether it has ended.
    pub(super) fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.body.is_some() && self.kept() < MOST && self.ask(cx).is_ready() {}
        self.body.is_none()
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(part) = self.part() {
                self.unwritten = true;
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
            match self.last.take() {
                // A connection writes when a body makes it wait, and drops what is not written
                // when one fails: without this step the client would see nothing instead of a cut answer.
                Some(Err(fault)) if std::mem::take(&mut self.unwritten) => {
                    self.last = Some(Err(fault));
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(last) => return Poll::Ready(Some(last.map(Frame::trailers))),
                None if self.body.is_none() => return Poll::Ready(None),
                None => ready!(self.ask(cx)),
            }
        }
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.kept() == 0 && self.last.is_none() && self.body.as_ref().is_none_or(|body| body.is_end_stream())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let kept = self.kept() as u64;
        let Some(hint) = self.body.as_ref().map(|body| body.size_hint()) else { return SizeHint::with_exact(kept) };
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + kept);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + kept);
        }
        whole
    }

    /// The next step of the body, which is dropped with its last one. Ready when there was one.
    fn ask(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(body) = &mut self.body else { return Poll::Ready(()) };
        let has_ended = match ready!(body.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    let has_ended = body.is_end_stream();
                    self.keep(data);
                    has_ended
                }
                Err(other) => {
                    self.last = other.into_trailers().ok().map(Ok);
                    self.last.is_some()
                }
            },
            Some(Err(fault)) => {
                self.last = Some(Err(fault));
                true
            }
            None => true,
        };
        if has_ended {
            self.body = None;
        }
        Poll::Ready(())
    }

    fn kept(&self) -> usize {
        self.front.len() + self.behind.len()
    }

    fn keep(&mut self, data: Bytes) {
        match self.kept() {
            0 => self.front = data,
            _ => self.behind.extend_from_slice(&data),
        }
    }

    fn part(&mut self) -> Option<Bytes> {
        if self.front.is_empty() {
            self.front = std::mem::take(&mut self.behind).freeze();
        }
        (!self.front.is_empty()).then(|| self.front.split_to(PART.min(self.front.len())))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use futures_util::stream;
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    type Said = Result<Frame<Bytes>, BoxError>;

    fn data(bytes: impl Into<Bytes>) -> Said {
        Ok(Frame::data(bytes.into()))
    }

    fn trailers() -> Said {
        Ok(Frame::trailers(HeaderMap::from_iter([(http::header::ETAG, "x".parse().unwrap())])))
    }

    fn shelf_of(said: Vec<Said>) -> H2SendBuffer {
        H2SendBuffer::of(Box::pin(StreamBody::new(stream::iter(said))))
    }

    fn with_shelf<T>(shelf: &mut H2SendBuffer, ask: impl FnOnce(&mut H2SendBuffer, &mut Context<'_>) -> T) -> T {
        ask(shelf, &mut Context::from_waker(Waker::noop()))
    }

    /// All that it gives, with the lengths of its pieces.
    fn taken(shelf: &mut H2SendBuffer) -> (Vec<usize>, Vec<u8>, &'static str) {
        let (mut lengths, mut all) = (Vec::new(), Vec::new());
        loop {
            match with_shelf(shelf, H2SendBuffer::poll_frame) {
                Poll::Pending => {}
                Poll::Ready(None) => return (lengths, all, "end"),
                Poll::Ready(Some(Err(_))) => return (lengths, all, "error"),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(piece) => {
                        lengths.push(piece.len());
                        all.extend_from_slice(&piece);
                    }
                    Err(_) => return (lengths, all, "trailers"),
                },
            }
        }
    }

    #[test]
    fn what_is_kept_comes_in_order_and_then_how_it_ended() {
        for fills in 0..4 {
            for (last, end) in [(None, "end"), (Some(trailers()), "trailers"), (Some(Err("gone".into())), "error")] {
                let mut said = vec![data("a"), data(""), data("bc"), data(vec![b'd'; 20_000]), data("e")];
                said.extend(last);
                let mut shelf = shelf_of(said);
                let mut start = Vec::new();
                for _ in 0..fills {
                    with_shelf(&mut shelf, H2SendBuffer::fill);
                    if let Poll::Ready(Some(Ok(frame))) = with_shelf(&mut shelf, H2SendBuffer::poll_frame) {
                        start.extend(frame.into_data().unwrap_or_default());
                    }
                }
                let (lengths, rest, how) = taken(&mut shelf);
                let all = [start, rest].concat();
                let whole = [&b"abc"[..], &[b'd'; 20_000], b"e"].concat();
                assert_eq!((all == whole, how), (true, end), "{fills}");
                assert!(lengths.iter().all(|length| (1..=PART).contains(length)), "{lengths:?}");
                assert!(matches!(with_shelf(&mut shelf, H2SendBuffer::poll_frame), Poll::Ready(None)));
            }
        }
    }

    #[test]
    fn a_body_is_asked_until_what_may_be_kept_is_reached_and_again_when_it_was_taken() {
        let mut shelf = shelf_of((0..100).map(|_| data(vec![b'x'; 10_000])).collect());
        assert!(!with_shelf(&mut shelf, H2SendBuffer::fill));
        assert!((MOST..MOST + 10_000).contains(&shelf.kept()), "{}", shelf.kept());
        assert!(!with_shelf(&mut shelf, H2SendBuffer::fill));
        assert_eq!(shelf.kept(), 70_000);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        with_shelf(&mut shelf, H2SendBuffer::fill);
        assert_eq!(shelf.kept(), 70_000);
        assert_eq!(taken(&mut shelf).1.len(), 990_000);
    }

    #[test]
    fn its_length_and_its_end_are_those_of_what_is_left() {
        let whole = http_body_util::Full::new(Bytes::from(vec![b'x'; 20_000])).map_err(|never| match never {});
        let mut shelf = H2SendBuffer::of(Box::pin(whole));
        for left in [20_000, 20_000 - PART as u64] {
            assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(left), false));
            assert!(with_shelf(&mut shelf, H2SendBuffer::fill), "a body is not kept beyond its last piece");
            assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(left), false));
            assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        }
        assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(0), true));
        let mut shelf = shelf_of(vec![data("a"), trailers()]);
        assert_eq!(shelf.size_hint().exact(), None);
        with_shelf(&mut shelf, H2SendBuffer::fill);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        assert!(!shelf.is_end_stream(), "trailers are to come");
    }

    #[test]
    fn the_connection_can_write_what_it_has_before_it_hears_of_a_fault() {
        let mut shelf = shelf_of(vec![data("a"), Err("gone".into())]);
        with_shelf(&mut shelf, H2SendBuffer::fill);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_pending());
        assert!(matches!(with_shelf(&mut shelf, H2SendBuffer::poll_frame), Poll::Ready(Some(Err(_)))));
    }
}
