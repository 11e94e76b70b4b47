//! Reads a request's body within its limits, and understands it in the same pass.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http_body::{Body, Frame};

use super::Fault;
use super::client_wait::ClientWait;
use crate::accept::BodyCut;
use crate::clock::Clock;
use crate::inspect::coding::{Coding, Decoder, Undecodable};
use crate::inspect::multipart::FormScanner;
use crate::inspect::{Facts, Scanner, Unreadable};
use crate::refuse::Refusal;
use crate::units::{ClientSide, Endpoint, Tick};

/// Frames shorter than this are copied together: a body sent byte by byte must not cost a
/// buffer a byte, nor may few bytes hold a buffer that others share.
const SMALL_FRAME: usize = 4 * 1024;

/// So much of each body is never counted as memory: ordinary requests go on beside large ones.
const FREE: u64 = 64 * 1024;

/// What the bodies of all requests hold in memory, beyond [`FREE`] of each, in bytes.
#[derive(Debug, Default)]
pub struct Bodies(AtomicU64);

/// What one body holds of it, until it is dropped.
#[derive(Debug)]
struct Share {
    of: Arc<Bodies>,
    bytes: u64,
    most: u64,
}

impl Share {
    fn of(bodies: Arc<Bodies>, most: u64) -> Self {
        Share { of: bodies, bytes: 0, most }
    }

    /// The body has grown to this length.
    fn grow(&mut self, length: u64) -> Result<(), Refusal> {
        let more = length.saturating_sub(FREE).saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let held = self.of.0.fetch_add(more, Ordering::Relaxed);
        self.bytes += more;
        if held.saturating_add(more) > self.most { Err(Refusal::BodiesFull) } else { Ok(()) }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.of.0.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// A body that has been read to its end.
#[derive(Debug)]
pub struct Upload {
    /// The body, decoded, as it came: large frames are shared with the connection's buffers.
    pub frames: Vec<Bytes>,
    /// What it said.
    pub facts: Box<Facts>,
    /// It wore a content coding, which is gone.
    pub was_coded: bool,
    /// It is a multipart form, not JSON: no byte of it may be changed.
    pub is_form: bool,
    /// When its last byte came.
    pub complete: Tick,
    /// For how long the gateway stood ready to read, and the client had sent nothing.
    pub client_wait: Duration,
    _share: Share,
}

impl Upload {
    /// That of a request that has no body.
    #[must_use]
    pub fn none(complete: Tick) -> Self {
        Upload {
            frames: Vec::new(),
            facts: Box::default(),
            was_coded: false,
            is_form: false,
            complete,
            client_wait: Duration::ZERO,
            _share: Share::of(Arc::default(), 0),
        }
    }
}

/// Why there is no [`Upload`].
#[derive(Debug)]
pub enum Unread {
    /// The gateway refuses.
    Refused(Refusal),
    /// The client left before the end of its body.
    Left,
}

impl From<Refusal> for Unread {
    fn from(refusal: Refusal) -> Self {
        Unread::Refused(refusal)
    }
}

/// How a body is read, and its terms.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// What all bodies hold.
    pub bodies: &'a Arc<Bodies>,
    /// What they may hold.
    pub max_bodies: u64,
    /// In bytes, as sent and as decoded.
    pub max_body: u64,
    /// From arrival to the last byte.
    pub timeout: Duration,
    /// The request was there.
    pub arrival: Tick,
    /// Its head had been read.
    pub read: Tick,
    /// Somebody asks for the prefix of the prompt.
    pub with_prefix: bool,
    /// It wears a content coding.
    pub is_coded: bool,
}

/// Reads `body` to its end.
///
/// # Errors
/// [`Unread`]: over a limit, not readable, or broken off.
pub async fn read<B>(
    body: B,
    headers: &HeaderMap,
    endpoint: Endpoint,
    terms: Terms<'_>,
    client: &ClientSide,
    clock: &Clock,
) -> Result<Upload, Unread>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Fault>,
{
    let mut body = pin!(body);
    let mut reading = match begun(body.as_mut(), headers, endpoint, &terms)? {
        Begun::Whole(upload) => return Ok(upload),
        Begun::Part(reading) => reading,
    };
    let mut wait = ClientWait::new(*clock);
    let mut late = pin!(clock.sleep_until(Some(terms.arrival + terms.timeout)));
    loop {
        let frame = tokio::select! {
            biased;
            frame = poll_fn(|cx| wait.poll(cx, |cx| body.as_mut().poll_frame(cx))) => frame,
            () = client.drain_over() => return Err(Refusal::DrainCut.into()),
            () = &mut late => return Err(Refusal::BodyTimeout { limit: terms.timeout }.into()),
        };
        if !reading.hear(frame)? {
            return Ok(Upload { client_wait: wait.length(), ..reading.finish(clock.now())? });
        }
    }
}

/// A body of which has been read what was there.
enum Begun {
    /// It came with its head, as most do: no clock is needed, nor a place to wait.
    Whole(Upload),
    /// More is to come.
    Part(Box<Reading>),
}

/// Reads what has come of a body.
fn begun<B>(mut body: Pin<&mut B>, headers: &HeaderMap, endpoint: Endpoint, terms: &Terms<'_>) -> Result<Begun, Unread>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Fault>,
{
    let share = Share::of(Arc::clone(terms.bodies), terms.max_bodies);
    let whole = body.size_hint().exact();
    let mut reading =
        Reading::begin(headers, terms.is_coded, endpoint, whole, terms.max_body, terms.with_prefix, share)?;
    let mut cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(frame) = body.as_mut().poll_frame(&mut cx) {
        if !reading.hear(frame)? || body.is_end_stream() {
            return Ok(Begun::Whole(reading.finish(terms.read)?));
        }
    }
    Ok(Begun::Part(Box::new(reading)))
}

/// The same for a body that is all here: what the gateway would make of it.
///
/// # Errors
/// Why it would be refused.
pub fn read_whole(body: Bytes, headers: &HeaderMap, endpoint: Endpoint, max_body: u64) -> Result<Upload, Refusal> {
    let share = Share::of(Arc::default(), u64::MAX);
    let whole = Some(body.len() as u64);
    let is_coded = headers.contains_key(CONTENT_ENCODING);
    let mut reading = Reading::begin(headers, is_coded, endpoint, whole, max_body, false, share)?;
    reading.take(body)?;
    reading.finish(Tick::ZERO)
}

/// A body that broke: the client left, or its framing was wrong.
#[expect(clippy::needless_pass_by_value, reason = "the error ends here")]
fn broken_off(error: Fault) -> Unread {
    match error.downcast_ref::<BodyCut>() {
        Some(BodyCut::Framing) => Unread::Refused(Refusal::BodyBroken),
        _ => Unread::Left,
    }
}

/// What understands the body.
enum Reader {
    Json(Box<Scanner>),
    Form(Box<FormScanner>),
}

struct Reading {
    reader: Reader,
    /// In a box: few bodies need one, and all are moved with its room.
    decoder: Option<Box<Decoder>>,
    frames: Vec<Bytes>,
    small: Vec<u8>,
    length: u64,
    /// How long the body is, where whoever brings it knows that: it need not have come in a buffer for more.
    whole: Option<u64>,
    max_body: u64,
    share: Share,
}

impl Reading {
    fn begin(
        headers: &HeaderMap,
        is_coded: bool,
        endpoint: Endpoint,
        whole: Option<u64>,
        max_body: u64,
        with_prefix: bool,
        share: Share,
    ) -> Result<Self, Refusal> {
        let stated = || headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok();
        if whole.or_else(stated).is_some_and(|length| length > max_body) {
            return Err(Refusal::BodyTooLarge { limit: max_body });
        }
        let limit = usize::try_from(max_body).unwrap_or(usize::MAX);
        let coding = if is_coded { coding_of(headers)? } else { None };
        let decoder = coding.map(|coding| Decoder::new(coding, limit)).transpose();
        let decoder = decoder.map_err(|error| undecodable(error, max_body))?.map(Box::new);
        let reader = match form_type(headers, endpoint) {
            Some(form) => Reader::Form(Box::new(FormScanner::new(form).map_err(|_| Refusal::UnreadableForm)?)),
            None => {
                let mut scanner = Scanner::new(endpoint);
                if !with_prefix {
                    scanner.leave_prefix();
                }
                Reader::Json(scanner)
            }
        };
        let (frames, small) = (Vec::with_capacity(1), Vec::new());
        Ok(Reading { reader, decoder, frames, small, length: 0, whole, max_body, share })
    }

    /// Takes what the body says next; `false` at its end.
    fn hear<E: Into<Fault>>(&mut self, next: Option<Result<Frame<Bytes>, E>>) -> Result<bool, Unread> {
        match next {
            None => return Ok(false),
            Some(Ok(frame)) => frame.into_data().map_or(Ok(()), |bytes| self.take(bytes))?,
            Some(Err(error)) => return Err(broken_off(error.into())),
        }
        Ok(true)
    }

    fn take(&mut self, bytes: Bytes) -> Result<(), Refusal> {
        let bytes = match &mut self.decoder {
            Some(decoder) => decoder.push(&bytes).map_err(|error| undecodable(error, self.max_body))?,
            None => bytes,
        };
        self.keep(bytes)
    }

    fn keep(&mut self, bytes: Bytes) -> Result<(), Refusal> {
        self.length = self.length.saturating_add(bytes.len() as u64);
        if self.length > self.max_body {
            return Err(Refusal::BodyTooLarge { limit: self.max_body });
        }
        self.share.grow(self.length)?;
        match &mut self.reader {
            Reader::Json(scanner) => scanner.push(&bytes).map_err(unreadable)?,
            Reader::Form(reader) => reader.push(&bytes).map_err(|_| Refusal::UnreadableForm)?,
        }
        // Most bodies are one small frame, in a buffer that is nobody else's.
        let is_whole = self.whole == Some(bytes.len() as u64) && bytes.is_unique();
        if bytes.len() < SMALL_FRAME && !is_whole {
            self.small.extend_from_slice(&bytes);
            return Ok(());
        }
        self.flush();
        self.frames.push(bytes);
        Ok(())
    }

    fn flush(&mut self) {
        if !self.small.is_empty() {
            self.frames.push(Bytes::from(std::mem::take(&mut self.small)));
        }
    }

    fn finish(mut self, complete: Tick) -> Result<Upload, Refusal> {
        let was_coded = self.decoder.is_some();
        if let Some(decoder) = self.decoder.take() {
            let rest = decoder.finish().map_err(|error| undecodable(error, self.max_body))?;
            self.keep(rest)?;
        }
        self.flush();
        let is_form = matches!(self.reader, Reader::Form(_));
        let facts = match self.reader {
            Reader::Json(scanner) => scanner.finish().map_err(unreadable)?,
            Reader::Form(reader) => reader.finish().map_err(|_| Refusal::UnreadableForm)?,
        };
        Ok(Upload {
            frames: self.frames,
            facts,
            was_coded,
            is_form,
            complete,
            client_wait: Duration::ZERO,
            _share: self.share,
        })
    }
}

/// The content type of a body that is a form. On any other path a form is not JSON: two
/// readings of one body would be a bypass.
fn form_type(headers: &HeaderMap, endpoint: Endpoint) -> Option<&str> {
    if !endpoint.takes_forms() {
        return None;
    }
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    value.trim_start().to_ascii_lowercase().starts_with("multipart/form-data").then_some(value)
}

fn unreadable(why: Unreadable) -> Refusal {
    Refusal::UnreadableBody { why }
}

fn undecodable(error: Undecodable, limit: u64) -> Refusal {
    match error {
        Undecodable::TooLarge => Refusal::DecodedTooLarge { limit },
        Undecodable::Broken => Refusal::UndecodableBody,
    }
}

/// The coding of a request body: none, one that we can undo, or a refusal.
fn coding_of(headers: &HeaderMap) -> Result<Option<Coding>, Refusal> {
    let values = headers.get_all(CONTENT_ENCODING).iter();
    let names = values.flat_map(|value| value.to_str().unwrap_or("?").split(',')).map(str::trim);
    let mut codings = names.filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("identity"));
    match (codings.next(), codings.next()) {
        (None, _) => Ok(None),
        (Some(name), None) => Coding::named(name).map(Some).ok_or(Refusal::UnsupportedCoding),
        (Some(_), Some(_)) => Err(Refusal::UnsupportedCoding),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames_of(body: Bytes) -> Vec<Bytes> {
        let endpoint = Endpoint::find("POST", "/v1/chat/completions").unwrap();
        read_whole(body, &HeaderMap::new(), endpoint, 1024).unwrap().frames
    }

    #[test]
    fn a_small_body_is_kept_where_it_came_unless_others_share_its_buffer() {
        let alone = Bytes::from(br#"{"model":"m"}"#.to_vec());
        let place = alone.as_ptr();
        assert_eq!(frames_of(alone)[0].as_ptr(), place);

        // Its framing cut it out of a buffer that has room for more.
        let mut large = Vec::with_capacity(16 * 1024);
        large.extend_from_slice(br#"{"model":"m"}"#);
        let large = Bytes::from(large);
        let place = large.as_ptr();
        let body = http_body_util::StreamBody::new(futures_util::stream::iter([Ok::<_, Fault>(Frame::data(large))]));
        let endpoint = Endpoint::find("POST", "/v1/chat/completions").unwrap();
        let headers = HeaderMap::from_iter([(CONTENT_LENGTH, "13".parse().unwrap())]);
        let bodies = Arc::new(Bodies::default());
        let terms = Terms {
            bodies: &bodies,
            max_bodies: 1024,
            max_body: 1024,
            timeout: Duration::ZERO,
            arrival: Tick::ZERO,
            read: Tick::ZERO,
            with_prefix: false,
            is_coded: false,
        };
        let Ok(Begun::Whole(upload)) = begun(pin!(body), &headers, endpoint, &terms) else { panic!("it has come") };
        assert!(upload.frames[0].as_ptr() != place && upload.frames.concat() == br#"{"model":"m"}"#);

        let mut shared = Bytes::from(br#"{"model":"m"}{"model":"n"}"#.to_vec());
        let first = shared.split_to(13);
        let place = first.as_ptr();
        let frames = frames_of(first);
        assert!(frames[0].as_ptr() != place && frames.concat() == br#"{"model":"m"}"#);
    }
}
