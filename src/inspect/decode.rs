//! Compressed request bodies: decoded for inspection, forwarded as identity.
//!
//! A decoder has a window of fixed size and refuses a decompression bomb while decoding: at the body
//! limit, and before that at an expansion ratio that no text reaches.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::GzDecoder;
use zstd::zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

/// Largest expansion ratio: text expands three- to thirtyfold, a bomb about a
/// thousandfold.
const STEEPEST: usize = 200;
/// Decoded bytes below which the ratio is not checked, because short bodies may be repetitive.
const HARMLESS: usize = 4 << 20;
/// Base number of gzip members accepted, plus one per KiB of input, because starting a member costs more
/// than decoding many bytes and no encoder makes them smaller.
const MEMBERS: usize = 64;
/// Largest zstd window for HTTP (RFC 9659): 8 MiB.
const ZSTD_WINDOW_LOG: u32 = 23;
/// Decoded bytes after which [`Decoder::push`] returns, so that the caller can count them and yield to
/// other tasks.
const SLICE: usize = 64 * 1024;
/// Heap memory of a gzip decoder: window (32 KiB), output buffer (32 KiB) and tables.
const GZIP_STATE: usize = 80 * 1024;

/// A supported content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// `gzip` (and its old name `x-gzip`).
    Gzip,
    /// `zstd`.
    Zstd,
}

impl Coding {
    /// The coding of a `Content-Encoding` value, if supported. `identity` is none.
    #[must_use]
    pub fn named(value: &str) -> Option<Coding> {
        let value = value.trim();
        let is = |name: &str| value.eq_ignore_ascii_case(name);
        if is("gzip") || is("x-gzip") {
            Some(Coding::Gzip)
        } else if is("zstd") {
            Some(Coding::Zstd)
        } else {
            None
        }
    }
}

/// Why a coded body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It expands beyond the body limit, or as only a bomb does.
    #[error("the decoded body is too large")]
    TooLarge,
    /// Invalid or truncated.
    #[error("the body does not match its content coding")]
    Broken,
}

/// Decodes one body frame by frame.
pub struct Decoder(Inner);

enum Inner {
    Gzip {
        decoder: Box<GzDecoder<DecodedChunk>>,
        members: usize,
    },
    Zstd {
        decoder: DCtx<'static>,
        out: DecodedChunk,
        /// At the end of a zstd frame, where the body may end.
        is_whole: bool,
    },
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Inner::Gzip { .. } => "Decoder(gzip)",
            Inner::Zstd { .. } => "Decoder(zstd)",
        })
    }
}

impl Decoder {
    /// A decoder for a body of at most `limit` decoded bytes.
    ///
    /// # Errors
    /// [`DecodeError::Broken`] if the decoder cannot be created.
    pub fn new(coding: Coding, limit: usize) -> Result<Self, DecodeError> {
        let out = DecodedChunk { limit, ..DecodedChunk::default() };
        Ok(Decoder(match coding {
            Coding::Gzip => Inner::Gzip { decoder: Box::new(GzDecoder::new(out)), members: 1 },
            Coding::Zstd => {
                let mut decoder = DCtx::try_create().ok_or(DecodeError::Broken)?;
                let window = DParameter::WindowLogMax(ZSTD_WINDOW_LOG);
                decoder.set_parameter(window).map_err(|_| DecodeError::Broken)?;
                Inner::Zstd { decoder, out, is_whole: false }
            }
        }))
    }

    /// Decodes from the front of `coded` up to its end, or to one slice of decoded bytes (64 KiB plus one
    /// step of the decoder). Removes consumed bytes from `coded`; the result may be
    /// empty.
    ///
    /// # Errors
    /// [`DecodeError`]; the rest of the body need not be read then.
    pub fn push(&mut self, coded: &mut &[u8]) -> Result<Bytes, DecodeError> {
        match &mut self.0 {
            Inner::Gzip { decoder, members } => {
                gunzip(decoder, coded, members)?;
                Ok(decoder.get_mut().take())
            }
            Inner::Zstd { decoder, out, is_whole } => {
                unfold(decoder, coded, out, is_whole)?;
                Ok(out.take())
            }
        }
    }

    /// Heap memory held, bytes, window included: up to 8 MiB for zstd, however short the
    /// body.
    #[must_use]
    pub fn held(&self) -> usize {
        match &self.0 {
            Inner::Gzip { decoder, .. } => GZIP_STATE + decoder.get_ref().bytes.capacity(),
            Inner::Zstd { decoder, out, .. } => decoder.sizeof() + out.bytes.capacity(),
        }
    }

    /// Ends the body and returns the last decoded bytes.
    ///
    /// # Errors
    /// [`DecodeError`], also if the body ends too early.
    pub fn finish(self) -> Result<Bytes, DecodeError> {
        match self.0 {
            Inner::Gzip { mut decoder, .. } => {
                let is_empty = decoder.get_ref().taken == 0;
                let finished = decoder.try_finish();
                let out = decoder.get_mut();
                finished.map_err(|_| out.fault())?;
                if is_empty { Err(DecodeError::Broken) } else { Ok(out.take()) }
            }
            Inner::Zstd { mut out, is_whole, .. } => {
                if is_whole {
                    Ok(out.take())
                } else {
                    Err(DecodeError::Broken)
                }
            }
        }
    }
}

fn gunzip(decoder: &mut GzDecoder<DecodedChunk>, coded: &mut &[u8], members: &mut usize) -> Result<(), DecodeError> {
    while !coded.is_empty() && !decoder.get_ref().is_slice() {
        // One call produces at most its output buffer, 32 KiB.
        let read = decoder.write(coded).map_err(|_| decoder.get_ref().fault())?;
        decoder.get_mut().advance(coded, read);
        if read > 0 {
            continue;
        }
        // The member ended; the next one follows.
        decoder.try_finish().map_err(|_| decoder.get_ref().fault())?;
        *members += 1;
        if *members > MEMBERS + decoder.get_ref().taken / 1024 {
            return Err(DecodeError::Broken);
        }
        let out = std::mem::take(decoder.get_mut());
        *decoder = GzDecoder::new(out);
    }
    Ok(())
}

fn unfold(
    decoder: &mut DCtx<'static>,
    coded: &mut &[u8],
    out: &mut DecodedChunk,
    is_whole: &mut bool,
) -> Result<(), DecodeError> {
    let mut room = [0; 16 * 1024];
    loop {
        let (mut input, mut output) = (InBuffer::around(coded), OutBuffer::around(&mut room[..]));
        let remaining = decoder.decompress_stream(&mut output, &mut input).map_err(|_| DecodeError::Broken)?;
        let (read, written) = (input.pos(), output.pos());
        out.advance(coded, read);
        out.write_all(&room[..written]).map_err(|_| out.fault())?;
        if read + written > 0 {
            *is_whole = remaining == 0;
        }
        // A full buffer may leave decoded bytes inside the decoder, available without further input.
        let has_more = written == room.len() || !coded.is_empty();
        if !has_more {
            return Ok(());
        }
        if read + written == 0 {
            return Err(DecodeError::Broken);
        }
        if out.is_slice() && !coded.is_empty() {
            return Ok(());
        }
    }
}

/// Decoded bytes not taken yet. Fails writes beyond the limit.
#[derive(Debug, Default)]
struct DecodedChunk {
    /// Reused for each slice, of which an exact copy is returned.
    bytes: Vec<u8>,
    limit: usize,
    taken: usize,
    made: usize,
    is_too_large: bool,
}

impl DecodedChunk {
    fn take(&mut self) -> Bytes {
        let taken = Bytes::copy_from_slice(&self.bytes);
        self.bytes.clear();
        taken
    }

    /// Consumes `read` bytes of the coded body.
    fn advance(&mut self, coded: &mut &[u8], read: usize) {
        *coded = &coded[read..];
        self.taken += read;
    }

    fn is_slice(&self) -> bool {
        self.bytes.len() >= SLICE
    }

    fn fault(&self) -> DecodeError {
        if self.is_too_large { DecodeError::TooLarge } else { DecodeError::Broken }
    }
}

impl Write for DecodedChunk {
    fn write(&mut self, decoded: &[u8]) -> io::Result<usize> {
        self.made += decoded.len();
        let is_bomb = self.made > HARMLESS && self.made / STEEPEST > self.taken;
        if self.made > self.limit || is_bomb {
            self.is_too_large = true;
            return Err(io::Error::other("too large"));
        }
        self.bytes.extend_from_slice(decoded);
        Ok(decoded.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coded(coding: Coding, body: &[u8]) -> Vec<u8> {
        match coding {
            Coding::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                encoder.write_all(body).unwrap();
                encoder.finish().unwrap()
            }
            Coding::Zstd => zstd::stream::encode_all(body, 3).unwrap(),
        }
    }

    /// Decodes one piece, checking that no slice is much longer than [`SLICE`].
    fn push_all(decoder: &mut Decoder, mut piece: &[u8]) -> Result<Vec<u8>, DecodeError> {
        let mut out = Vec::new();
        while !piece.is_empty() {
            let slice = decoder.push(&mut piece)?;
            assert!(slice.len() <= 4 * SLICE, "{} bytes at once", slice.len());
            out.extend_from_slice(&slice);
        }
        Ok(out)
    }

    fn decoded(coding: Coding, pieces: &[&[u8]], limit: usize) -> Result<Vec<u8>, DecodeError> {
        let mut decoder = Decoder::new(coding, limit)?;
        let mut out = Vec::new();
        for piece in pieces {
            out.extend(push_all(&mut decoder, piece)?);
        }
        out.extend_from_slice(&decoder.finish()?);
        Ok(out)
    }

    const BOTH: [Coding; 2] = [Coding::Gzip, Coding::Zstd];

    #[test]
    fn codings_are_known_by_their_names() {
        assert_eq!(Coding::named(" GZIP"), Some(Coding::Gzip));
        assert_eq!(Coding::named("x-gzip"), Some(Coding::Gzip));
        assert_eq!(Coding::named("zstd"), Some(Coding::Zstd));
        for other in ["identity", "br", "deflate", "gzip, gzip", "gzip, identity", ""] {
            assert_eq!(Coding::named(other), None);
        }
    }

    #[test]
    fn a_bomb_is_refused_long_before_it_has_unfolded() {
        for coding in BOTH {
            let bomb = coded(coding, &vec![b' '; 100 << 20]);
            let mut decoder = Decoder::new(coding, 64 << 20).unwrap();
            let mut made = 0;
            let fault = bomb.chunks(512).find_map(|piece| match push_all(&mut decoder, piece) {
                Ok(bytes) => {
                    made += bytes.len();
                    None
                }
                Err(fault) => Some(fault),
            });
            assert_eq!(fault, Some(DecodeError::TooLarge), "{coding:?}");
            assert!(made <= HARMLESS, "{coding:?} gave {made} bytes");
        }
    }

    #[test]
    fn a_long_piece_is_decoded_in_slices() {
        for coding in BOTH {
            let body: Vec<u8> = (0..500_000u32).flat_map(|i| (i % 5000).to_le_bytes()).collect();
            let sent = coded(coding, &body);
            let mut decoder = Decoder::new(coding, body.len()).unwrap();
            let (mut rest, mut slices, mut out) = (&sent[..], 0, Vec::new());
            while !rest.is_empty() {
                out.extend_from_slice(&decoder.push(&mut rest).unwrap());
                slices += 1;
            }
            out.extend_from_slice(&decoder.finish().unwrap());
            assert!(out == body && slices >= body.len() / (4 * SLICE), "{coding:?}: {slices} slices");
        }
    }

    #[test]
    fn a_window_is_counted_as_soon_as_a_frame_asks_for_it() {
        // Frame headers with windows of 8 MiB and of 16 MiB, which is too large.
        let head = |window: u8| [&[0x28, 0xB5, 0x2F, 0xFD, 0x00, window][..], &[0x00; 2]].concat();
        let mut decoder = Decoder::new(Coding::Zstd, 1 << 30).unwrap();
        let before = decoder.held();
        assert_eq!(decoder.push(&mut &head((23 - 10) << 3)[..]), Ok(Bytes::new()));
        assert!(decoder.held() >= before + (8 << 20), "{before} and then {}", decoder.held());
        let mut decoder = Decoder::new(Coding::Zstd, 1 << 30).unwrap();
        assert_eq!(decoder.push(&mut &head((24 - 10) << 3)[..]), Err(DecodeError::Broken));
        assert!(Decoder::new(Coding::Gzip, 1).unwrap().held() >= 64 << 10);
    }

    #[test]
    fn the_limit_is_the_decoded_length() {
        for coding in BOTH {
            let body: Vec<u8> = (0..5000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
            let sent = coded(coding, &body);
            assert_eq!(decoded(coding, &[&sent], body.len()).as_ref(), Ok(&body));
            assert_eq!(decoded(coding, &[&sent], body.len() - 1), Err(DecodeError::TooLarge));
        }
    }

    #[test]
    fn half_a_body_or_another_coding_is_broken() {
        for coding in BOTH {
            let sent = coded(coding, b"{\"model\":\"m\"}");
            for cut in 0..sent.len() {
                assert_eq!(decoded(coding, &[&sent[..cut]], 1000), Err(DecodeError::Broken), "{coding:?} {cut}");
            }
            assert_eq!(decoded(coding, &[b"{\"model\":\"m\"}"], 1000), Err(DecodeError::Broken));
            let mut junk = sent.clone();
            junk.extend_from_slice(b"junk");
            assert_eq!(decoded(coding, &[&junk], 1000), Err(DecodeError::Broken), "{coding:?}");
        }
    }

    #[test]
    fn a_body_of_several_members_is_one_body() {
        for coding in BOTH {
            let sent = [coded(coding, b"{\"a\":"), coded(coding, b"1}")].concat();
            assert_eq!(decoded(coding, &[&sent], 1000).unwrap(), b"{\"a\":1}");
        }
    }

    #[test]
    fn a_body_of_nothing_but_members_is_refused_and_one_of_blocks_is_not() {
        let flood = coded(Coding::Gzip, b"").repeat(1000);
        assert_eq!(decoded(Coding::Gzip, &[&flood], 1000), Err(DecodeError::Broken));
        let noise: Vec<u8> = (0..60_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let blocks = coded(Coding::Gzip, &noise).repeat(100);
        assert_eq!(decoded(Coding::Gzip, &[&blocks], 100 * noise.len()).unwrap().len(), 100 * noise.len());
    }

    proptest! {
        #[test]
        fn a_cut_anywhere_decodes_the_same(body in proptest::collection::vec(0u8..4, 0..3000), cut in any::<proptest::sample::Index>()) {
            for coding in BOTH {
                let sent = coded(coding, &body);
                let cut = cut.index(sent.len());
                prop_assert_eq!(decoded(coding, &[&sent[..cut], &sent[cut..]], 3000).unwrap(), body.clone());
                let bytes: Vec<&[u8]> = sent.chunks(1).collect();
                prop_assert_eq!(decoded(coding, &bytes, 3000).unwrap(), body.clone());
            }
        }
    }
}
