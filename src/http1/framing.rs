//! Message body framing of HTTP/1.1 (RFC 9112, sections 6 and 7), for requests and responses: bytes
//! in, body data out, cut anywhere. Also the cache of repeated heads ([`HeadCache`]) and headers that
//! a response body adds ([`ResponseHeaders`]).

use bytes::{Buf, Bytes, BytesMut};

/// Most bytes of chunk extensions and trailer fields in one message.
const MOST_BESIDE: usize = 16 * 1024;

/// Most leading zeros and white space in one chunk-size line.
const MOST_IDLE: usize = 256;

/// How a body ends, and how much of it is still to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Framing {
    /// After this many more bytes.
    Length(u64),
    /// With the last chunk.
    Chunked(ChunkDecoder),
    /// With the connection.
    ToEnd,
}

/// Result of one decoding step.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Bytes of the body.
    Data(Bytes),
    /// More input is needed.
    More,
    /// The body has ended.
    End,
}

/// Invalid framing.
#[derive(Debug, PartialEq, Eq)]
pub struct FramingError;

/// Decoder state of a chunked body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkDecoder {
    at: ChunkState,
    /// Size of the current chunk so far, then the bytes of it still to come.
    left: u64,
    /// Bytes of extensions and trailers so far.
    overhead: usize,
    /// Leading zeros and white space of the current size line.
    padding: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkState {
    /// Before the first digit of a chunk size.
    Size,
    /// After a digit of the size.
    Digits,
    /// In white space after the size.
    Space,
    /// In a chunk extension.
    Extension,
    /// Before the LF of the size line.
    SizeEnd,
    Data,
    /// Before the line end after the data.
    DataReturn,
    DataEnd,
    /// After the last chunk, at the start of a line: a trailer field, or the end.
    TrailerLine,
    /// In the name of a trailer field.
    TrailerName,
    /// After the colon of a trailer field.
    TrailerValue,
    TrailerEnd,
    LastEnd,
    Over,
}

/// A `Content-Length` as RFC 9110 (section 8.6) writes it: decimal digits and nothing else.
#[must_use]
pub fn stated_length(text: &[u8]) -> Option<u64> {
    let behind = |length: u64, digit: &u8| match digit {
        b'0'..=b'9' => length.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    };
    if text.is_empty() { None } else { text.iter().try_fold(0, behind) }
}

/// The elements of a list-valued field (RFC 9110 section 5.6.1).
pub fn elements(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Whether a list-valued field, such as `Connection`, has this element.
#[must_use]
pub fn lists_token(value: &[u8], token: &str) -> bool {
    elements(value).any(|element| element.eq_ignore_ascii_case(token.as_bytes()))
}

impl Framing {
    /// No body.
    pub const EMPTY: Framing = Framing::Length(0);
    /// A chunked body before its first byte.
    pub const CHUNKED: Framing =
        Framing::Chunked(ChunkDecoder { at: ChunkState::Size, left: 0, overhead: 0, padding: 0 });

    /// Whether the whole body was decoded.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Framing::Length(0) | Framing::Chunked(ChunkDecoder { at: ChunkState::Over, .. }))
    }

    /// Decodes the next piece of the body.
    ///
    /// # Errors
    /// [`FramingError`] on invalid chunks.
    pub fn step(&mut self, buffer: &mut BytesMut) -> Result<Decoded, FramingError> {
        let mut endless = u64::MAX;
        let left = match self {
            Framing::Length(0) => return Ok(Decoded::End),
            Framing::Length(left) => left,
            Framing::ToEnd => &mut endless,
            Framing::Chunked(chunks) => {
                chunks.skip(buffer)?;
                match chunks.at {
                    ChunkState::Over => return Ok(Decoded::End),
                    ChunkState::Data => &mut chunks.left,
                    _ => return Ok(Decoded::More),
                }
            }
        };
        if buffer.is_empty() {
            return Ok(Decoded::More);
        }
        let piece = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
        *left -= piece as u64;
        Ok(Decoded::Data(buffer.split_to(piece).freeze()))
    }
}

impl ChunkDecoder {
    /// Consumes framing bytes up to the next data or the end.
    fn skip(&mut self, buffer: &mut BytesMut) -> Result<(), FramingError> {
        if self.at == ChunkState::Data && self.left == 0 {
            self.at = ChunkState::DataReturn;
        }
        let mut read = self.skip_plain(buffer);
        while let Some(byte) = buffer.get(read).filter(|_| !matches!(self.at, ChunkState::Data | ChunkState::Over)) {
            self.at = self.behind(*byte)?;
            read += 1;
        }
        buffer.advance(read);
        Ok(())
    }

    /// Consumes complete line ends and size lines in their usual form and returns how many bytes; the rest is
    /// for [`ChunkDecoder::behind`].
    fn skip_plain(&mut self, buffer: &[u8]) -> usize {
        let mut read = 0;
        if self.at == ChunkState::DataReturn && buffer.starts_with(b"\r\n") {
            (self.at, self.padding) = (ChunkState::Size, 0);
            read = 2;
        }
        if self.at == ChunkState::Size
            && let Some((size, length)) = plain_size(&buffer[read..])
        {
            (self.at, self.left) = (ChunkState::Data, size);
            read += length;
        }
        read
    }

    /// The state after one framing byte.
    fn behind(&mut self, byte: u8) -> Result<ChunkState, FramingError> {
        Ok(match (self.at, byte) {
            (ChunkState::Size | ChunkState::Digits, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
                let larger = self.left.checked_mul(16).and_then(|size| size.checked_add(digit));
                self.left = larger.ok_or(FramingError)?;
                // Leading zeros are limited because they never overflow.
                if self.left == 0 { self.padding(ChunkState::Digits)? } else { ChunkState::Digits }
            }
            (ChunkState::Digits | ChunkState::Space, b' ' | b'\t') => self.padding(ChunkState::Space)?,
            (ChunkState::Digits | ChunkState::Space, b';') => ChunkState::Extension,
            (ChunkState::Digits | ChunkState::Space | ChunkState::Extension, b'\r') => ChunkState::SizeEnd,
            (ChunkState::Extension, byte) if is_field_content(byte) => self.overhead(ChunkState::Extension)?,
            (ChunkState::SizeEnd, b'\n') if self.left == 0 => ChunkState::TrailerLine,
            (ChunkState::SizeEnd, b'\n') => ChunkState::Data,
            (ChunkState::DataReturn, b'\r') => ChunkState::DataEnd,
            (ChunkState::DataEnd, b'\n') => {
                self.padding = 0;
                ChunkState::Size
            }
            (ChunkState::TrailerLine, b'\r') => ChunkState::LastEnd,
            (ChunkState::TrailerLine | ChunkState::TrailerName, byte) if is_token(byte) => {
                self.overhead(ChunkState::TrailerName)?
            }
            (ChunkState::TrailerName, b':') => self.overhead(ChunkState::TrailerValue)?,
            (ChunkState::TrailerValue, byte) if is_field_content(byte) => self.overhead(ChunkState::TrailerValue)?,
            (ChunkState::TrailerValue, b'\r') => ChunkState::TrailerEnd,
            (ChunkState::TrailerEnd, b'\n') => ChunkState::TrailerLine,
            (ChunkState::LastEnd, b'\n') => ChunkState::Over,
            _ => return Err(FramingError),
        })
    }

    fn padding(&mut self, at: ChunkState) -> Result<ChunkState, FramingError> {
        self.padding += 1;
        if self.padding > MOST_IDLE { Err(FramingError) } else { Ok(at) }
    }

    fn overhead(&mut self, at: ChunkState) -> Result<ChunkState, FramingError> {
        self.overhead += 1;
        if self.overhead > MOST_BESIDE { Err(FramingError) } else { Ok(at) }
    }
}

/// Whether the byte may occur in a field name (RFC 9110 section 5.6.2).
const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~'
        )
}

/// Whether the byte may occur in a field value, white space included (RFC 9110 section 5.5).
const fn is_field_content(byte: u8) -> bool {
    byte == b'\t' || byte >= b' ' && byte != 0x7f
}

/// Size and line length of a plain size line: below 16 MiB, not the last chunk, no extension or
/// white space.
fn plain_size(line: &[u8]) -> Option<(u64, usize)> {
    let mut size = 0;
    for (at, byte) in line.iter().enumerate().take(7) {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => return (size > 0 && line[at..].starts_with(b"\r\n")).then_some((size, at + 2)),
        };
        // Leading zeros are counted by `behind`.
        if size == 0 && digit == 0 {
            return None;
        }
        size = size << 4 | u64::from(digit);
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The data decoded from pieces of these lengths, and whether the body ended.
    fn read(mut framing: Framing, bytes: &[u8], cuts: &[usize]) -> Result<(Vec<u8>, bool, usize), FramingError> {
        let mut buffer = BytesMut::new();
        let (mut rest, mut data) = (bytes, Vec::new());
        let mut cuts = cuts.iter().copied().chain(std::iter::repeat(bytes.len().max(1)));
        loop {
            match framing.step(&mut buffer)? {
                Decoded::Data(piece) => data.extend_from_slice(&piece),
                Decoded::End => return Ok((data, true, buffer.len() + rest.len())),
                Decoded::More if rest.is_empty() => return Ok((data, false, buffer.len())),
                Decoded::More => {
                    let (now, later) = rest.split_at(cuts.next().unwrap_or(1).clamp(1, rest.len()));
                    buffer.extend_from_slice(now);
                    rest = later;
                }
            }
        }
    }

    proptest! {
        #[test]
        fn chunks_give_back_what_went_into_them_cut_anywhere(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..8),
            overhead in prop::sample::select(vec!["", ";a=b", " ;x", "\t"]),
            trailer in prop::sample::select(vec!["", "x-sum: 1\r\n", "a: b\r\nc: d\r\n"]),
            cuts in prop::collection::vec(1usize..9, 0..200),
        ) {
            let mut bytes = Vec::new();
            for chunk in &chunks {
                bytes.extend_from_slice(format!("{:x}{overhead}\r\n", chunk.len()).as_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(format!("0\r\n{trailer}\r\nBEHIND").as_bytes());
            prop_assert_eq!(read(Framing::CHUNKED, &bytes, &cuts), Ok((chunks.concat(), true, 6)));
            let half = &bytes[..bytes.len() - 7];
            prop_assert_eq!(read(Framing::CHUNKED, half, &cuts).map(|(data, ended, _)| (data, ended)), Ok((chunks.concat(), false)));
        }

        #[test]
        fn a_stated_length_is_what_is_read(bytes in prop::collection::vec(any::<u8>(), 0..60), length in 0usize..80) {
            let whole = length.min(bytes.len());
            let ended = length <= bytes.len();
            let left = if ended { bytes.len() - length } else { 0 };
            prop_assert_eq!(read(Framing::Length(length as u64), &bytes, &[3, 1, 4]), Ok((bytes[..whole].to_vec(), ended, left)));
            prop_assert_eq!(read(Framing::ToEnd, &bytes, &[3, 1, 4]), Ok((bytes, false, 0)));
        }

        #[test]
        fn any_bytes_come_to_the_same_at_once_and_one_by_one(
            parts in prop::collection::vec(prop::sample::select(vec!["0", "f", "01", "2", "10", ";", "\r\n", "\r", "\n", " ", "x", "xy", "ffffff"]), 0..40),
        ) {
            let bytes = parts.concat();
            let one_by_one = vec![1; bytes.len()];
            prop_assert_eq!(read(Framing::CHUNKED, bytes.as_bytes(), &[]), read(Framing::CHUNKED, bytes.as_bytes(), &one_by_one));
        }
    }

    #[test]
    fn a_length_is_decimal_digits_that_a_number_can_hold() {
        for (text, length) in [("0", 0), ("7", 7), ("0042", 42), ("18446744073709551615", u64::MAX)] {
            assert_eq!(stated_length(text.as_bytes()), Some(length));
        }
        for text in
            ["", "+1", "-1", " 1", "1 ", "1,1", "0x1", "1_0", "\u{661}", "18446744073709551616", "18446744073709551620"]
        {
            assert_eq!(stated_length(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_not_read() {
        for bytes in [
            &b"\r\n"[..],
            b"x\r\n",
            b"-1\r\n",
            b"+1\r\n",
            b" 1\r\n",
            b"0x1\r\n",
            b"1\nx\r\n",
            b"1\r\r\n",
            b"1;a\n",
            b"1 1\r\nx",
            b"1\r\nxy\r\n",
            b"1\r\nx\n",
            b"0\r\n\n",
            b"0\r\na: b\n",
            b"10000000000000000\r\n",
            b"1;a=\0\r\nx\r\n",
            b"1;a=\x7f\r\nx\r\n",
        ] {
            assert_eq!(read(Framing::CHUNKED, bytes, &[]), Err(FramingError), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn c103_a_trailer_is_a_field_line_or_the_message_is_refused() {
        for trailers in ["", "a: b\r\n", "a:\r\n", "a:b \t\r\n", "X-Sum!: \u{e9}, \"x\"\r\nb: c:d\r\n"] {
            let bytes = format!("1\r\nx\r\n0\r\n{trailers}\r\nBEHIND");
            assert_eq!(read(Framing::CHUNKED, bytes.as_bytes(), &[]), Ok((b"x".to_vec(), true, 6)), "{trailers:?}");
        }
        for trailers in [
            "POST /evil HTTP/1.1\r\nHost: x\r\n",
            "GET http://x/ HTTP/1.1\r\n",
            "a\r\n",
            "a: b\r\nc\r\n",
            ": b\r\n",
            "a : b\r\n",
            "a\t: b\r\n",
            " a: b\r\n",
            "a: b\r\n c\r\n",
            "a: b\r\n\tc: d\r\n",
            "a: \0\r\n",
            "a\0: b\r\n",
            "a: b\x7f\r\n",
            "a: b\x0b\r\n",
            "a: b\rc: d\r\n",
            "a(b): c\r\n",
            "\u{e9}: c\r\n",
        ] {
            let bytes = format!("1\r\nx\r\n0\r\n{trailers}\r\n");
            assert_eq!(read(Framing::CHUNKED, bytes.as_bytes(), &[]), Err(FramingError), "{trailers:?}");
        }
    }

    #[test]
    fn extensions_and_trailers_have_an_end() {
        let long = "x".repeat(MOST_BESIDE + 1);
        assert_eq!(read(Framing::CHUNKED, format!("1;{long}").as_bytes(), &[]), Err(FramingError));
        for trailer in
            [format!("0\r\n{long}"), format!("0\r\na: {long}"), format!("0\r\n{}", "a: b\r\n".repeat(MOST_BESIDE))]
        {
            assert_eq!(read(Framing::CHUNKED, trailer.as_bytes(), &[]), Err(FramingError));
        }
        for endless in ["0", "1 "] {
            let endless = format!("{endless}{}", endless.repeat(MOST_BESIDE + 1).replace('1', " "));
            assert_eq!(read(Framing::CHUNKED, endless.as_bytes(), &[]), Err(FramingError));
        }
        let padded = format!("{}1\r\nx\r\n", "0".repeat(MOST_IDLE)).repeat(100);
        assert_eq!(read(Framing::CHUNKED, padded.as_bytes(), &[]).unwrap().0.len(), 100);
        let many = "1;yyyyyyyy\r\nx\r\n".repeat(MOST_BESIDE / 8 + 1);
        assert_eq!(read(Framing::CHUNKED, many.as_bytes(), &[]), Err(FramingError));
    }
}
