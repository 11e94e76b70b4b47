//! Reads a request body within its limits, and inspects it in the same pass.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http_body::{Body, Frame};

use super::client_wait::ClientWait;
use crate::accept::{BodyError, BoxError};
use crate::clock::Clock;
use crate::inspect::decode::{Coding, DecodeError, Decoder};
use crate::inspect::multipart::FormScanner;
use crate::inspect::{BlockKey, Facts, PromptHashes, Scanner, Unreadable};
use crate::reject::Rejection;
use crate::types::{ApiPath, ClientState, Tick};

/// Shorter frames are copied together, so that a body sent byte by byte does not cost a buffer per byte,
/// and few bytes do not keep a shared buffer of 64 KiB alive (HTTP/2 frames are cut at 16 KiB from the
/// buffer of the whole connection).
const SMALL_FRAME: usize = 32 * 1024;

/// Bytes read (and decoded) before other tasks get their turn.
const SLICE: usize = 64 * 1024;

/// First bytes of each body, refused last, so that ordinary requests continue beside large ones.
const FIRST: u64 = 64 * 1024;

/// The same for its decoder: covers gzip, and zstd without a large window.
const FIRST_OF_DECODER: u64 = 320 * 1024;

/// Memory held by the bodies of all requests and what is derived from them, bytes.
#[derive(Debug, Default)]
pub struct BodyMemory {
    /// The first bytes of each body and decoder.
    firsts: AtomicU64,
    /// The rest of larger ones.
    rests: AtomicU64,
}

/// The share of one body; released when dropped.
#[derive(Debug)]
pub struct BodyMemoryGuard {
    of: Arc<BodyMemory>,
    first: u64,
    rest: u64,
    most: u64,
}

impl BodyMemoryGuard {
    fn of(bodies: Arc<BodyMemory>, most: u64) -> Self {
        BodyMemoryGuard { of: bodies, first: 0, rest: 0, most }
    }

    /// Sets the share of the body and its decoder.
    ///
    /// All shares together are at most `most`, of which the last quarter is reserved for the first bytes of
    /// each. A body that is the only large one is never refused, because its own limit bounds it.
    fn hold(&mut self, bytes: u64, decoder: u64) -> Result<(), Rejection> {
        let first = bytes.min(FIRST) + decoder.min(FIRST_OF_DECODER);
        let rest = bytes.saturating_sub(FIRST) + decoder.saturating_sub(FIRST_OF_DECODER);
        if (first, rest) == (self.first, self.rest) {
            return Ok(());
        }
        let (first_grows, rest_grows) = (first > self.first, rest > self.rest);
        let firsts = change(&self.of.firsts, &mut self.first, first);
        let rests = change(&self.of.rests, &mut self.rest, rest);
        let (is_over, quarter) = (firsts.saturating_add(rests) > self.most, self.most / 4);
        let is_refused = if rest_grows {
            rests > rest && (is_over || rests > self.most - quarter)
        } else {
            first_grows && is_over && firsts > quarter
        };
        if is_refused { Err(Rejection::BodiesFull) } else { Ok(()) }
    }

    /// Reduces the share.
    #[must_use]
    pub fn reduced_to(mut self, bytes: usize) -> Self {
        let bytes = (bytes as u64).min(self.first + self.rest);
        // Shrinking is never refused.
        let _ = self.hold(bytes, 0);
        self
    }
}

/// Sets one body's part of a sum; returns the new sum.
fn change(sum: &AtomicU64, part: &mut u64, to: u64) -> u64 {
    let from = std::mem::replace(part, to);
    match to.cmp(&from) {
        std::cmp::Ordering::Equal => sum.load(Ordering::Relaxed),
        std::cmp::Ordering::Greater => sum.fetch_add(to - from, Ordering::Relaxed) + (to - from),
        std::cmp::Ordering::Less => sum.fetch_sub(from - to, Ordering::Relaxed) - (from - to),
    }
}

impl Drop for BodyMemoryGuard {
    fn drop(&mut self) {
        change(&self.of.firsts, &mut self.first, 0);
        change(&self.of.rests, &mut self.rest, 0);
    }
}

/// A completely received body.
#[derive(Debug)]
pub struct BufferedBody {
    /// The decoded body; large frames are shared with the connection's buffers.
    pub frames: Vec<Bytes>,
    /// Its facts.
    pub facts: Box<Facts>,
    /// Whether its content coding was removed.
    pub was_coded: bool,
    /// Whether it is a multipart form, which must not be edited.
    pub is_form: bool,
    /// When its last byte came.
    pub complete: Tick,
    /// How long the gateway waited for bytes that the client did not send.
    pub client_wait: Duration,
    /// Its share of the memory for bodies.
    pub share: BodyMemoryGuard,
}

impl BufferedBody {
    /// The empty body of a request without one.
    #[must_use]
    pub fn none(complete: Tick) -> Self {
        BufferedBody {
            frames: Vec::new(),
            facts: Box::default(),
            was_coded: false,
            is_form: false,
            complete,
            client_wait: Duration::ZERO,
            share: BodyMemoryGuard::of(Arc::default(), 0),
        }
    }
}

/// Why a body was not read.
#[derive(Debug)]
pub enum BodyReadError {
    /// Rejected by the gateway.
    Refused(Rejection),
    /// The client left before the end.
    Left,
}

impl From<Rejection> for BodyReadError {
    fn from(refusal: Rejection) -> Self {
        BodyReadError::Refused(refusal)
    }
}

/// Limits and options of reading a body.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits<'a> {
    /// Memory held by all bodies.
    pub bodies: &'a Arc<BodyMemory>,
    /// Limit of that memory.
    pub max_bodies: u64,
    /// Largest body, bytes, both as sent and decoded.
    pub max_body: u64,
    /// From arrival to the last byte.
    pub timeout: Duration,
    /// When the request arrived.
    pub arrival: Tick,
    /// When its head was read.
    pub read: Tick,
    /// The hashes of the prompt that something depends on.
    pub prompt_hashes: PromptHashes,
    /// The key of the hashes of its blocks.
    pub block_key: Option<BlockKey>,
    /// It wears a content coding.
    pub is_coded: bool,
}

/// Reads `body` to its end.
///
/// # Errors
/// [`BodyReadError`]: over a limit, not readable, or broken off.
pub async fn read<B>(
    body: B,
    headers: &HeaderMap,
    endpoint: ApiPath,
    terms: BodyLimits<'_>,
    client: &ClientState,
    clock: &Clock,
) -> Result<BufferedBody, BodyReadError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let mut body = pin!(body);
    let mut reading = match begun(body.as_mut(), headers, endpoint, &terms)? {
        StartedBody::Whole(upload) => return Ok(upload),
        StartedBody::Part(reading) => reading,
    };
    let mut wait = ClientWait::new(*clock);
    let mut late = pin!(clock.sleep_until(Some(terms.arrival + terms.timeout)));
    loop {
        while reading.is_over_its_turn() {
            tokio::task::yield_now().await;
            reading.go_on()?;
        }
        let frame = tokio::select! {
            biased;
            frame = poll_fn(|cx| wait.poll(cx, |cx| body.as_mut().poll_frame(cx))) => frame,
            () = client.drain_over() => return Err(Rejection::DrainCut.into()),
            () = &mut late => return Err(Rejection::BodyTimeout { limit: terms.timeout }.into()),
        };
        if !reading.hear(frame)? {
            return Ok(BufferedBody { client_wait: wait.length(), ..reading.finish(clock.now())? });
        }
    }
}

/// A body of which the available part was read.
enum StartedBody {
    /// Complete with its head, as most are: no clock and no wait are needed.
    Whole(BufferedBody),
    /// More is to come.
    Part(Box<BodyReader>),
}

/// Reads the available part of a body.
fn begun<B>(
    mut body: Pin<&mut B>,
    headers: &HeaderMap,
    endpoint: ApiPath,
    terms: &BodyLimits<'_>,
) -> Result<StartedBody, BodyReadError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let share = BodyMemoryGuard::of(Arc::clone(terms.bodies), terms.max_bodies);
    let whole = body.size_hint().exact();
    let mut reading =
        BodyReader::begin(headers, terms.is_coded, endpoint, whole, terms.max_body, terms.prompt_hashes, share)?;
    if let (BodyFormat::Json(scanner), Some(key)) = (&mut reading.reader, terms.block_key) {
        scanner.has_key(key);
    }
    let mut cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(frame) = body.as_mut().poll_frame(&mut cx) {
        let has_ended = !reading.hear(frame)? || (body.is_end_stream() && !reading.has_more());
        if has_ended {
            return Ok(StartedBody::Whole(reading.finish(terms.read)?));
        }
        if reading.is_over_its_turn() {
            break;
        }
    }
    Ok(StartedBody::Part(Box::new(reading)))
}

/// Reads a complete body, as the gateway would.
///
/// # Errors
/// Why it would be rejected.
pub fn read_whole(
    body: Bytes,
    headers: &HeaderMap,
    endpoint: ApiPath,
    max_body: u64,
) -> Result<BufferedBody, Rejection> {
    let share = BodyMemoryGuard::of(Arc::default(), u64::MAX);
    let whole = Some(body.len() as u64);
    let is_coded = headers.contains_key(CONTENT_ENCODING);
    let mut reading = BodyReader::begin(headers, is_coded, endpoint, whole, max_body, PromptHashes::NONE, share)?;
    reading.take(body)?;
    while reading.has_more() {
        reading.go_on()?;
    }
    reading.finish(Tick::ZERO)
}

/// The error of an incomplete body: the client left, or invalid framing.
#[expect(clippy::needless_pass_by_value, reason = "the error ends here")]
fn broken_off(error: BoxError) -> BodyReadError {
    match error.downcast_ref::<BodyError>() {
        Some(BodyError::Framing) => BodyReadError::Refused(Rejection::BodyBroken),
        _ => BodyReadError::Left,
    }
}

/// The parser of the body.
enum BodyFormat {
    Json(Box<Scanner>),
    Form(Box<FormScanner>),
}

struct BodyReader {
    reader: BodyFormat,
    /// Boxed, because few bodies need it and all are moved with its size.
    decoder: Option<Box<Decoder>>,
    /// Bytes received but not read.
    rest: Bytes,
    /// Bytes read in this turn.
    turn: usize,
    frames: Vec<Bytes>,
    small: Vec<u8>,
    length: u64,
    /// The body's length if the source knows it, so that the buffer has the exact size.
    whole: Option<u64>,
    max_body: u64,
    share: BodyMemoryGuard,
}

impl BodyReader {
    fn begin(
        headers: &HeaderMap,
        is_coded: bool,
        endpoint: ApiPath,
        whole: Option<u64>,
        max_body: u64,
        prompt_hashes: PromptHashes,
        share: BodyMemoryGuard,
    ) -> Result<Self, Rejection> {
        let stated = || headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok();
        if whole.or_else(stated).is_some_and(|length| length > max_body) {
            return Err(Rejection::BodyTooLarge { limit: max_body });
        }
        let limit = usize::try_from(max_body).unwrap_or(usize::MAX);
        let coding = if is_coded { coding_of(headers)? } else { None };
        let decoder = coding.map(|coding| Decoder::new(coding, limit)).transpose();
        let decoder = decoder.map_err(|error| undecodable(error, max_body))?.map(Box::new);
        let reader = match form_type(headers, endpoint) {
            Some(form) => BodyFormat::Form(Box::new(FormScanner::new(form).map_err(|_| Rejection::UnreadableForm)?)),
            None => {
                let mut scanner = Scanner::new(endpoint);
                scanner.hash_only(prompt_hashes);
                BodyFormat::Json(scanner)
            }
        };
        let (frames, small) = (Vec::with_capacity(1), Vec::new());
        let rest = Bytes::new();
        Ok(BodyReader { reader, decoder, rest, turn: 0, frames, small, length: 0, whole, max_body, share })
    }

    /// Takes the next frame; `false` at the end.
    fn hear<E: Into<BoxError>>(&mut self, next: Option<Result<Frame<Bytes>, E>>) -> Result<bool, BodyReadError> {
        match next {
            None => return Ok(false),
            Some(Ok(frame)) => frame.into_data().map_or(Ok(()), |bytes| self.take(bytes))?,
            Some(Err(error)) => return Err(broken_off(error.into())),
        }
        Ok(true)
    }

    fn take(&mut self, bytes: Bytes) -> Result<(), Rejection> {
        if self.decoder.is_none() && bytes.len() <= SLICE {
            self.turn += bytes.len();
            return self.keep(bytes);
        }
        self.rest = bytes;
        self.read_slice()
    }

    /// Whether received bytes are unread because the turn was used up.
    fn has_more(&self) -> bool {
        !self.rest.is_empty()
    }

    fn is_over_its_turn(&self) -> bool {
        self.has_more() || self.turn >= SLICE
    }

    /// Begins the next turn.
    fn go_on(&mut self) -> Result<(), Rejection> {
        self.turn = 0;
        if self.has_more() { self.read_slice() } else { Ok(()) }
    }

    fn read_slice(&mut self) -> Result<(), Rejection> {
        let slice = match &mut self.decoder {
            Some(decoder) => {
                let mut left = &self.rest[..];
                let slice = decoder.push(&mut left).map_err(|error| undecodable(error, self.max_body))?;
                let read = self.rest.len() - left.len();
                self.rest.advance(read);
                self.turn += read;
                slice
            }
            None => self.rest.split_to(self.rest.len().min(SLICE)),
        };
        self.turn += slice.len();
        self.keep(slice)
    }

    fn keep(&mut self, bytes: Bytes) -> Result<(), Rejection> {
        self.length = self.length.saturating_add(bytes.len() as u64);
        if self.length > self.max_body {
            return Err(Rejection::BodyTooLarge { limit: self.max_body });
        }
        match &mut self.reader {
            BodyFormat::Json(scanner) => scanner.push(&bytes).map_err(unreadable)?,
            BodyFormat::Form(reader) => reader.push(&bytes).map_err(|_| Rejection::UnreadableForm)?,
        }
        // Most bodies are one small frame in an unshared buffer.
        let is_whole = self.whole == Some(bytes.len() as u64) && bytes.is_unique();
        if bytes.len() < SMALL_FRAME && !is_whole {
            if self.small.len() + bytes.len() > SLICE {
                self.flush();
            }
            self.small.extend_from_slice(&bytes);
        } else {
            self.flush();
            self.frames.push(bytes);
        }
        let decoder = self.decoder.as_ref().map_or(0, |decoder| decoder.held());
        self.share.hold(self.length + self.beside() as u64, decoder as u64)
    }

    /// Memory held beside the body's bytes, except the decoder's.
    fn beside(&self) -> usize {
        let reader = match &self.reader {
            BodyFormat::Json(scanner) => scanner.held(),
            BodyFormat::Form(reader) => reader.held(),
        };
        reader + self.rest.len() + self.small.capacity() - self.small.len()
    }

    fn flush(&mut self) {
        if !self.small.is_empty() {
            self.small.shrink_to_fit();
            self.frames.push(Bytes::from(std::mem::take(&mut self.small)));
        }
    }

    fn finish(mut self, complete: Tick) -> Result<BufferedBody, Rejection> {
        let was_coded = self.decoder.is_some();
        if let Some(decoder) = self.decoder.take() {
            let rest = decoder.finish().map_err(|error| undecodable(error, self.max_body))?;
            self.keep(rest)?;
        }
        self.flush();
        let is_form = matches!(self.reader, BodyFormat::Form(_));
        let facts = match self.reader {
            BodyFormat::Json(scanner) => scanner.finish().map_err(unreadable)?,
            BodyFormat::Form(reader) => reader.finish().map_err(|_| Rejection::UnreadableForm)?,
        };
        self.share.hold(self.length + facts.held() as u64, 0)?;
        Ok(BufferedBody {
            frames: self.frames,
            facts,
            was_coded,
            is_form,
            complete,
            client_wait: Duration::ZERO,
            share: self.share,
        })
    }
}

/// The content type of a form. On other paths a form is rejected, because it is not
/// JSON.
fn form_type(headers: &HeaderMap, endpoint: ApiPath) -> Option<&str> {
    if !endpoint.takes_forms() {
        return None;
    }
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    value.trim_start().to_ascii_lowercase().starts_with("multipart/form-data").then_some(value)
}

fn unreadable(why: Unreadable) -> Rejection {
    Rejection::UnreadableBody { why }
}

fn undecodable(error: DecodeError, limit: u64) -> Rejection {
    match error {
        DecodeError::TooLarge => Rejection::DecodedTooLarge { limit },
        DecodeError::Broken => Rejection::UndecodableBody,
    }
}

/// The coding of a request body: none, a supported one, or a rejection.
fn coding_of(headers: &HeaderMap) -> Result<Option<Coding>, Rejection> {
    let values = headers.get_all(CONTENT_ENCODING).iter();
    let names = values.flat_map(|value| value.to_str().unwrap_or("?").split(',')).map(str::trim);
    let mut codings = names.filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("identity"));
    match (codings.next(), codings.next()) {
        (None, _) => Ok(None),
        (Some(name), None) => Coding::named(name).map(Some).ok_or(Rejection::UnsupportedCoding),
        (Some(_), Some(_)) => Err(Rejection::UnsupportedCoding),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(bodies: &Arc<BodyMemory>, most: u64) -> BodyLimits<'_> {
        BodyLimits {
            bodies,
            max_bodies: most,
            max_body: most,
            timeout: Duration::from_secs(60),
            arrival: Tick::ZERO,
            read: Tick::ZERO,
            prompt_hashes: PromptHashes::NONE,
            block_key: None,
            is_coded: false,
        }
    }

    fn held(bodies: &BodyMemory) -> u64 {
        bodies.firsts.load(Ordering::Relaxed) + bodies.rests.load(Ordering::Relaxed)
    }

    /// Bodies with these shares, one after the other, and which of them were refused.
    fn hold(bodies: &Arc<BodyMemory>, most: u64, wanted: &[u64]) -> (Vec<BodyMemoryGuard>, Vec<usize>) {
        let mut shares: Vec<_> = wanted.iter().map(|_| BodyMemoryGuard::of(Arc::clone(bodies), most)).collect();
        let fits = |(share, bytes): (&mut BodyMemoryGuard, &u64)| share.hold(*bytes, 0).is_ok();
        let fit: Vec<bool> = shares.iter_mut().zip(wanted).map(fits).collect();
        let (mut kept, mut refused) = (Vec::new(), Vec::new());
        for (number, (share, fits)) in shares.into_iter().zip(fit).enumerate() {
            if fits { kept.push(share) } else { refused.push(number) }
        }
        (kept, refused)
    }

    #[test]
    fn c94_short_bodies_count_and_have_a_quarter_for_themselves() {
        let (kib, most) = (1024, 1 << 20);
        let bodies = Arc::new(BodyMemory::default());
        // Short ones take everything, and no more.
        let (shares, refused) = hold(&bodies, most, &[60 * kib; 20]);
        assert_eq!((shares.len(), refused.len(), held(&bodies)), (17, 3, 1020 * kib));
        drop(shares);
        // Long ones leave a quarter.
        let (long, refused) = hold(&bodies, most, &[300 * kib; 4]);
        assert_eq!((long.len(), refused), (3, vec![3]));
        let (short, refused) = hold(&bodies, most, &[60 * kib; 4]);
        assert_eq!((short.len(), refused), (2, vec![2, 3]), "with the first bytes of the long ones");
        assert!(held(&bodies) <= most);
        drop((long, short));
        assert_eq!(held(&bodies), 0);
        // A single long one is bounded by its own limit only, and leaves short ones their quarter.
        let (long, _) = hold(&bodies, most, &[2 * most]);
        let (short, refused) = hold(&bodies, most, &[60 * kib; 4]);
        assert_eq!((long.len(), short.len(), refused), (1, 3, vec![3]));
        let (second, _) = hold(&bodies, most, &[65 * kib]);
        assert!(second.is_empty(), "it is the second long one");
        drop((long, short));
        // A short coded one counts as short, unless its decoder has a large window.
        let (long, _) = hold(&bodies, most, &[300 * kib; 3]);
        let mut coded = BodyMemoryGuard::of(Arc::clone(&bodies), most);
        assert_eq!(
            (coded.hold(20 * kib, 60 * kib), coded.hold(20 * kib, 8 << 20)),
            (Ok(()), Err(Rejection::BodiesFull))
        );
        drop((long, coded));
        let [share] = hold(&bodies, most, &[500 * kib]).0.try_into().unwrap();
        let kept = share.reduced_to(100);
        assert_eq!(held(&bodies), 100);
        drop(kept);
        assert_eq!(held(&bodies), 0);
    }

    /// Reads this body poll by poll: the result, the number of turns given to others, and the most memory it
    /// held.
    fn read_in_turns(
        path: &str,
        headers: &HeaderMap,
        frames: Vec<Bytes>,
        most: u64,
    ) -> (Result<BufferedBody, BodyReadError>, usize, u64) {
        let bodies = Arc::new(BodyMemory::default());
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(
            frames.into_iter().map(|bytes| Ok::<_, BoxError>(Frame::data(bytes))),
        ));
        let endpoint = ApiPath::find("POST", path).unwrap();
        let is_coded = headers.contains_key(CONTENT_ENCODING);
        let terms = BodyLimits { is_coded, max_bodies: u64::MAX, ..terms(&bodies, most) };
        let (client, clock) = (ClientState::default(), Clock::start());
        let mut reading = pin!(read(body, headers, endpoint, terms, &client, &clock));
        let (mut turns, mut highest) = (0, 0);
        loop {
            turns += 1;
            let polled = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            highest = highest.max(held(&bodies));
            if let Poll::Ready(read) = polled {
                return (read, turns, highest);
            }
        }
    }

    fn gzip(body: &[u8]) -> (HeaderMap, Bytes) {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut encoder, body).unwrap();
        let headers = HeaderMap::from_iter([(CONTENT_ENCODING, "gzip".parse().unwrap())]);
        (headers, encoder.finish().unwrap().into())
    }

    #[tokio::test(start_paused = true)]
    async fn c94_a_long_body_lets_others_run_every_64_kib() {
        let text: String = (0..60_000).map(|number| format!("{number:012} ")).collect();
        let body = format!("{{\"model\":\"m\",\"messages\":[{{\"content\":\"{text}\"}}]}}");
        let least = body.len() / SLICE;
        let (none, plain) = (HeaderMap::new(), Bytes::from(body.clone()));
        let (coded, zipped) = gzip(body.as_bytes());
        let cut = |length: usize| body.as_bytes().chunks(length).map(Bytes::copy_from_slice).collect::<Vec<_>>();
        let cases = [
            (&none, vec![plain], 0),
            (&none, cut(1000), 0),
            (&none, cut(SLICE), 0),
            (&coded, vec![zipped.clone()], 200 << 10),
            (&coded, zipped.chunks(100).map(Bytes::copy_from_slice).collect(), 200 << 10),
        ];
        for (number, (headers, frames, beside)) in cases.into_iter().enumerate() {
            let (read, turns, highest) = read_in_turns("/v1/chat/completions", headers, frames, 1 << 20);
            let upload = read.unwrap();
            assert!(upload.frames.concat() == body.as_bytes(), "case {number}");
            assert!(turns >= least, "case {number}: {turns} turns for {least}");
            let most = (body.len() + SLICE + beside) as u64;
            assert!((body.len() as u64..most).contains(&highest), "case {number}: {highest} of {most}");
        }
    }

    /// C94: small on the wire; the derived data is rejected before it has grown.
    #[tokio::test(start_paused = true)]
    async fn c94_what_is_derived_from_a_body_is_counted_and_bounded() {
        let noise = |bytes: usize| -> String {
            let word = |number: usize| format!("{:016x}", number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            (0..bytes / 16).map(word).collect()
        };
        let filled = |head: &str, item: &str, tail: &str, length: usize| {
            format!("{head}{}{tail}", item.repeat(length / item.len()))
        };
        let prompts = filled(
            &format!("{{\"model\":\"m\",\"echo\":true,\"x\":\"{}\",\"prompt\":[\"\"", noise(300_000)),
            ",\"\"",
            "]}",
            4 << 20,
        );
        let template = filled(
            &format!("{{\"model\":\"m\",\"x\":\"{}\",\"chat_template_kwargs\":{{\"y\":1", noise(300_000)),
            ",\"thinking\":true",
            "}}",
            4 << 20,
        );
        for body in [prompts, template] {
            let (headers, zipped) = gzip(body.as_bytes());
            assert!(zipped.len() < 600 << 10, "{} bytes on the wire", zipped.len());
            let (read, _, highest) = read_in_turns("/v1/completions", &headers, vec![zipped], 64 << 20);
            assert!(matches!(
                read,
                Err(BodyReadError::Refused(Rejection::UnreadableBody { why: Unreadable::TooMany { .. } }))
            ));
            assert!(highest < 2 << 20, "{highest}");
        }
        // Prompts that may be echoed are held twice until it is known.
        let long = format!("{{\"prompt\":\"{}\",\"echo\":true}}", noise(1 << 20));
        let (read, _, highest) = read_in_turns("/v1/completions", &HeaderMap::new(), vec![long.into()], 4 << 20);
        assert_eq!(read.unwrap().facts.held_for_answer(), (1 << 20) + size_of::<String>());
        assert!((2 << 20..4 << 20).contains(&highest), "{highest}");
    }

    fn frames_of(body: Bytes) -> Vec<Bytes> {
        let endpoint = ApiPath::find("POST", "/v1/chat/completions").unwrap();
        read_whole(body, &HeaderMap::new(), endpoint, 1024).unwrap().frames
    }

    #[test]
    fn a_small_body_is_kept_where_it_came_unless_others_share_its_buffer() {
        let alone = Bytes::from(br#"{"model":"m"}"#.to_vec());
        let place = alone.as_ptr();
        assert_eq!(frames_of(alone)[0].as_ptr(), place);

        // Framing cut it out of a buffer with spare capacity.
        let mut large = Vec::with_capacity(16 * 1024);
        large.extend_from_slice(br#"{"model":"m"}"#);
        let large = Bytes::from(large);
        let place = large.as_ptr();
        let body = http_body_util::StreamBody::new(futures_util::stream::iter([Ok::<_, BoxError>(Frame::data(large))]));
        let endpoint = ApiPath::find("POST", "/v1/chat/completions").unwrap();
        let headers = HeaderMap::from_iter([(CONTENT_LENGTH, "13".parse().unwrap())]);
        let bodies = Arc::new(BodyMemory::default());
        let terms = terms(&bodies, 1024);
        let Ok(StartedBody::Whole(upload)) = begun(pin!(body), &headers, endpoint, &terms) else {
            panic!("it has come")
        };
        assert!(upload.frames[0].as_ptr() != place && upload.frames.concat() == br#"{"model":"m"}"#);

        let mut shared = Bytes::from(br#"{"model":"m"}{"model":"n"}"#.to_vec());
        let first = shared.split_to(13);
        let place = first.as_ptr();
        let frames = frames_of(first);
        assert!(frames[0].as_ptr() != place && frames.concat() == br#"{"model":"m"}"#);
    }
}
