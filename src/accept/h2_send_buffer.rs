//! Buffer between an HTTP/2 response body and the client's window.
//!
//! hyper polls a body only while the window has room. But the body is where a request makes progress:
//! behind an early head it waits for its turn, and queue position, seat and engine are released at its
//! end. So the stream's task also polls while the window is closed and keeps the bytes here, like the
//! socket's buffer with HTTP/1. At [`MOST`] bytes the body waits for the client, and with it the engine.
//!
//! All polls happen in the stream's own task, so no wake-up is needed for
//! new bytes.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use super::body::BoxError;

/// Buffered bytes at which the body is no longer polled while its client does not read. One piece may
/// exceed it, and HTTP/2 buffers some more; the resulting memory is measured in `tests/e2e/memory.rs`
/// and stated in docs/operations.md.
const MOST: usize = 64 * 1024;

/// Most bytes per DATA frame. Longer pieces are split, so that a client that accepts one part after the
/// other, however slowly, counts as reading.
const PART: usize = 16 * 1024;

/// A boxed response body.
pub(super) type BoxResponseBody = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

/// The send buffer of one stream; see the module.
#[derive(Default)]
pub(super) struct H2SendBuffer {
    /// `None` before the response and after its end.
    body: Option<BoxResponseBody>,
    /// The next bytes to send.
    front: Bytes,
    /// Bytes after those, joined, because small pieces would each keep their read buffer
    /// alive.
    behind: BytesMut,
    /// The end after the last byte, if reached: trailers or an error.
    last: Option<Result<HeaderMap, BoxError>>,
    /// Whether hyper may still hold something unwritten: the head at first.
    unwritten: bool,
}

impl H2SendBuffer {
    pub(super) fn of(body: BoxResponseBody) -> Self {
        H2SendBuffer { body: Some(body), unwritten: true, ..H2SendBuffer::default() }
    }

    /// Polls the body up to the limit. Returns whether it has ended.
    pub(super) fn prefetch(&mut self, cx: &mut Context<'_>) -> bool {
        while self.body.is_some() && self.kept() < MOST && self.ask(cx).is_ready() {}
        self.body.is_none()
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(part) = self.next_chunk() {
                self.unwritten = true;
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
            match self.last.take() {
                // A connection writes when a body is pending and discards unwritten frames when one fails; without
                // this step the client would see nothing rather than an aborted response.
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

    /// Polls the body once; dropped after its last frame. Ready if there was one.
    fn ask(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(body) = &mut self.body else { return Poll::Ready(()) };
        let has_ended = match ready!(body.as_mut().poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    let has_ended = body.is_end_stream();
                    self.push(data);
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

    fn push(&mut self, data: Bytes) {
        match self.kept() {
            0 => self.front = data,
            _ => self.behind.extend_from_slice(&data),
        }
    }

    fn next_chunk(&mut self) -> Option<Bytes> {
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

    /// All frames, as lengths of the pieces.
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
                    with_shelf(&mut shelf, H2SendBuffer::prefetch);
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
        assert!(!with_shelf(&mut shelf, H2SendBuffer::prefetch));
        assert!((MOST..MOST + 10_000).contains(&shelf.kept()), "{}", shelf.kept());
        assert!(!with_shelf(&mut shelf, H2SendBuffer::prefetch));
        assert_eq!(shelf.kept(), 70_000);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        with_shelf(&mut shelf, H2SendBuffer::prefetch);
        assert_eq!(shelf.kept(), 70_000);
        assert_eq!(taken(&mut shelf).1.len(), 990_000);
    }

    #[test]
    fn its_length_and_its_end_are_those_of_what_is_left() {
        let whole = http_body_util::Full::new(Bytes::from(vec![b'x'; 20_000])).map_err(|never| match never {});
        let mut shelf = H2SendBuffer::of(Box::pin(whole));
        for left in [20_000, 20_000 - PART as u64] {
            assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(left), false));
            assert!(with_shelf(&mut shelf, H2SendBuffer::prefetch), "a body is not kept beyond its last piece");
            assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(left), false));
            assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        }
        assert_eq!((shelf.size_hint().exact(), shelf.is_end_stream()), (Some(0), true));
        let mut shelf = shelf_of(vec![data("a"), trailers()]);
        assert_eq!(shelf.size_hint().exact(), None);
        with_shelf(&mut shelf, H2SendBuffer::prefetch);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        assert!(!shelf.is_end_stream(), "trailers are to come");
    }

    #[test]
    fn the_connection_can_write_what_it_has_before_it_hears_of_a_fault() {
        let mut shelf = shelf_of(vec![data("a"), Err("gone".into())]);
        with_shelf(&mut shelf, H2SendBuffer::prefetch);
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_ready());
        assert!(with_shelf(&mut shelf, H2SendBuffer::poll_frame).is_pending());
        assert!(matches!(with_shelf(&mut shelf, H2SendBuffer::poll_frame), Poll::Ready(Some(Err(_)))));
    }
}
