//! The sending side of a connection: heads, and framed pieces of bodies.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, Version, response};
use http_body_util::Empty;
use tokio::io::AsyncWrite;

use crate::accept::request_id::{X_GOODPUT_REASON, new_request_id};
use crate::http1::{self, ResponseFraming, ResponseHeaders, ResponseMode, X_REQUEST_ID};
use crate::reject::Rejection;
use crate::types::{ApiPath, InvalidHead};

/// Pieces up to this length are copied together, so that they leave in one plain write.
const SHORT: usize = 16 * 1024;

/// Bytes waiting to be written.
#[derive(Default)]
pub(super) struct WriteBuffer {
    /// Heads, framing and short pieces; written up to `at`.
    bytes: Vec<u8>,
    at: usize,
    /// A long piece after them.
    long: Bytes,
    /// Bytes after the long piece.
    behind: &'static [u8],
    /// Whether a flush is owed: TLS accepts a write whole and sends it when the socket has
    /// room.
    owes_flush: bool,
}

impl WriteBuffer {
    /// Waiting bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.at + self.long.len()
    }

    /// Whether another piece can be appended.
    pub(super) fn takes_more(&self, most: usize) -> bool {
        self.long.is_empty() && self.len() < most
    }

    /// Appends a response head with the headers of its body, which has this length if known. Returns the
    /// body's framing, and whether the connection may be reused.
    pub(super) fn head(
        &mut self,
        head: &response::Parts,
        body: &impl ResponseHeaders,
        length: Option<u64>,
        mode: ResponseMode,
        date: &[u8],
    ) -> (ResponseFraming, bool) {
        http1::put_response_head(self.bytes(), head, body, length, mode, date)
    }

    /// Appends the rejection of an unparsable request, in the format of its path as far as
    /// recognisable.
    pub(super) fn refusal(&mut self, why: InvalidHead, path: &str, date: &[u8]) {
        let refusal = Rejection::BadHead { status: why.status().as_u16(), advice: why.advice() };
        let (shape, id) = (ApiPath::shape_of_unknown(path), new_request_id());
        let body = refusal.body(shape, &id);
        let mut response = Response::new(());
        *response.status_mut() = why.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.extend(HeaderValue::from_str(id.as_str()).ok().map(|id| (X_REQUEST_ID, id)));
        headers.insert(X_GOODPUT_REASON, HeaderValue::from_static(refusal.code()));
        let mode = ResponseMode { version: Version::HTTP_11, is_head: false, keeps: false };
        self.head(&response.into_parts().0, &Empty::new(), Some(body.len() as u64), mode, date);
        self.bytes().extend_from_slice(&body);
    }

    /// Appends `100 Continue`.
    pub(super) fn go_on(&mut self) {
        self.bytes().extend_from_slice(http1::CONTINUE);
    }

    /// Appends a piece of a body. False if the body exceeds its stated length; then only that many bytes are
    /// sent.
    pub(super) fn piece(&mut self, mut piece: Bytes, ending: &mut ResponseFraming) -> bool {
        let mut is_all = true;
        match ending {
            _ if piece.is_empty() => return true,
            ResponseFraming::None => return true,
            ResponseFraming::Length(left) => {
                is_all = piece.len() as u64 <= *left;
                piece.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= piece.len() as u64;
            }
            ResponseFraming::Chunked => {
                http1::put_chunk_size(self.bytes(), piece.len());
                self.behind = http1::CHUNK_END;
            }
            ResponseFraming::ToEnd => {}
        }
        if piece.len() <= SHORT {
            let behind = std::mem::take(&mut self.behind);
            let out = self.bytes();
            out.extend_from_slice(&piece);
            out.extend_from_slice(behind);
        } else {
            self.long = piece;
        }
        is_all
    }

    /// Ends the body. False if it is shorter than its stated length.
    pub(super) fn end(&mut self, ending: ResponseFraming) -> bool {
        match ending {
            ResponseFraming::Chunked if self.long.is_empty() => self.bytes().extend_from_slice(http1::LAST_CHUNK),
            ResponseFraming::Chunked => self.behind = http1::CHUNK_END_AND_LAST,
            ResponseFraming::Length(left) => return left == 0,
            ResponseFraming::None | ResponseFraming::ToEnd => {}
        }
        true
    }

    /// Writes until everything is out.
    pub(super) fn poll<T: AsyncWrite>(&mut self, mut io: Pin<&mut T>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.len() > 0 {
            self.owes_flush = true;
            let short = &self.bytes[self.at..];
            let written = match self.long.is_empty() {
                true => io.as_mut().poll_write(cx, short),
                false => io.as_mut().poll_write_vectored(cx, &[IoSlice::new(short), IoSlice::new(&self.long)]),
            };
            match ready!(written)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.advance(written),
            }
        }
        if self.owes_flush {
            ready!(io.poll_flush(cx))?;
            self.owes_flush = false;
        }
        Poll::Ready(Ok(()))
    }

    /// The buffer to append to.
    fn bytes(&mut self) -> &mut Vec<u8> {
        if self.bytes.capacity() == 0 {
            self.bytes = http1::take_write_buffer();
        }
        &mut self.bytes
    }

    fn advance(&mut self, written: usize) {
        let of_short = written.min(self.bytes.len() - self.at);
        self.at += of_short;
        if self.at == self.bytes.len() {
            http1::return_write_buffer(std::mem::take(&mut self.bytes));
            self.at = 0;
        }
        if written > of_short {
            self.long.advance(written - of_short);
            if self.long.is_empty() {
                self.long = Bytes::new();
                let behind = std::mem::take(&mut self.behind);
                self.bytes().extend_from_slice(behind);
            }
        }
    }
}
