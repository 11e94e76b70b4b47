//! Properties of heads that hold in both directions.

use std::fmt::Debug;

use bytes::BytesMut;
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};

use super::*;

const LIMITS: HeadLimits = HeadLimits { head: 400, lines: 100 };

/// Requests or responses.
trait Direction: CacheableHead + Debug {
    /// Start lines, the usual one first.
    const STARTS: &'static [&'static str];
    /// Header lines.
    const LINES: &'static [&'static str];
    /// Longest head.
    const LARGEST: usize;

    /// Takes a head out of the buffer. The number is what the parser keeps of an incomplete head.
    fn take(buffer: &mut BytesMut, kept: &mut usize, known: &mut HeadCache<Self>) -> Result<Option<Self>, String>;

    fn framing(&self) -> &Framing;
    fn headers(&self) -> &http::HeaderMap;
}

impl Direction for RequestHead {
    const STARTS: &'static [&'static str] = &["POST /a HTTP/1.1", "POST /a HTTP/1.0"];
    const LINES: &'static [&'static str] = &[
        "host: g",
        "content-length: 12",
        "x-id: a b",
        "accept: */*",
        "connection: keep-alive",
        "transfer-encoding: chunked",
        "expect: 100-continue",
        "accept: text/plain",
        "x-empty:",
        "content-length: 12",
    ];
    const LARGEST: usize = LIMITS.head;

    fn take(buffer: &mut BytesMut, kept: &mut usize, known: &mut HeadCache<Self>) -> Result<Option<Self>, String> {
        take_request_head(buffer, kept, known, LIMITS).map_err(|error| format!("{error:?}"))
    }

    fn framing(&self) -> &Framing {
        &self.framing
    }

    fn headers(&self) -> &http::HeaderMap {
        &self.head.headers
    }
}

impl Direction for ResponseHead {
    const STARTS: &'static [&'static str] = &[
        "HTTP/1.1 200 OK",
        "HTTP/1.0 200 OK",
        "HTTP/1.1 204 No Content",
        "HTTP/1.1 200 Fine",
        "HTTP/1.1 103 Early Hints",
    ];
    const LINES: &'static [&'static str] = &[
        "date: Mon, 30 Nov 2026 00:00:00 GMT",
        "content-length: 12",
        "server: uvicorn",
        "content-length: 12",
        "connection: keep-alive",
        "transfer-encoding: chunked",
        "set-cookie: a",
        "x-empty:",
        "set-cookie: b",
    ];
    const LARGEST: usize = 64 * 1024;

    fn take(buffer: &mut BytesMut, kept: &mut usize, known: &mut HeadCache<Self>) -> Result<Option<Self>, String> {
        take_response_head(buffer, kept, known).map_err(|error| format!("{error:?}"))
    }

    fn framing(&self) -> &Framing {
        &self.framing
    }

    fn headers(&self) -> &http::HeaderMap {
        &self.parts.headers
    }
}

/// Heads with some of a direction's lines, in order.
fn heads<D: Direction>() -> impl Strategy<Value = String> {
    (select(D::STARTS), subsequence(D::LINES, 0..D::LINES.len())).prop_map(|(start, lines)| {
        lines.iter().fold(format!("{start}\r\n"), |head, line| head + line + "\r\n") + "\r\n"
    })
}

fn taken<D: Direction>(bytes: &[u8], known: &mut HeadCache<D>) -> (String, usize, usize) {
    let (mut buffer, mut kept) = (BytesMut::from(bytes), 0);
    let taken = D::take(&mut buffer, &mut kept, known);
    (format!("{taken:?}"), buffer.len(), kept)
}

/// Whether a mutated head, whole and cut, means the same to a parser with a cached head as to one without.
fn is_read_alike<D: Direction>(head: &str, changes: &Changes) -> Result<(), TestCaseError> {
    let mut known = HeadCache::<D>::default();
    for _ in 0..3 {
        taken(head.as_bytes(), &mut known);
    }
    for next in changes.of(head) {
        let fresh = taken(&next, &mut HeadCache::<D>::default());
        prop_assert_eq!(taken(&next, &mut known), fresh, "{}", next.escape_ascii());
    }
    Ok(())
}

/// A mutation of a head, and a length to cut it to.
#[derive(Clone, Debug)]
struct Changes {
    /// Position, bytes removed, text inserted.
    others: Vec<(Index, usize, &'static str)>,
    cut: Index,
}

/// A few mutations, mostly at delicate places.
fn changes() -> impl Strategy<Value = Changes> {
    let other = select(vec![
        "",
        "1",
        "7",
        " ",
        "\t",
        "\r",
        "\n",
        "\r\n",
        "\r\n\r\n",
        ":",
        "x",
        "\0",
        "\u{e9}",
        "close",
        ", 12",
        "\r\ncontent-length: 12",
    ]);
    let others = prop::collection::vec((any::<Index>(), 0usize..4, other), 0..3);
    (others, any::<Index>()).prop_map(|(others, cut)| Changes { others, cut })
}

impl Changes {
    /// The mutated head with bytes behind it, whole and cut.
    fn of(&self, head: &str) -> [Vec<u8>; 2] {
        let mut next = head.as_bytes().to_vec();
        for (at, length, other) in &self.others {
            let at = at.index(next.len());
            next.splice(at..(at + length).min(next.len()), other.bytes());
        }
        next.extend_from_slice(b"{\"a\": 1}\r\n\r\n");
        let cut = next[..self.cut.index(next.len())].to_vec();
        [next, cut]
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_request_head_is_read_alike_whatever_was_read_before_it(head in heads::<RequestHead>(), changes in changes()) {
        is_read_alike::<RequestHead>(&head, &changes)?;
    }

    #[test]
    fn a_response_head_is_read_alike_whatever_was_read_before_it(head in heads::<ResponseHead>(), changes in changes()) {
        is_read_alike::<ResponseHead>(&head, &changes)?;
    }
}

/// From its third time on a head is recognised, with values and a length of its own; `before` is skipped.
fn is_known_from_the_third_time_on<D: Direction>(before: &str) {
    let mut known = HeadCache::<D>::default();
    for (length, id, is_known) in [("5", "a", false), ("5", "a", false), ("5", "a", true), ("17", "b", true)] {
        let head = format!("{}\r\nhost: g\r\nx-id: {id}\r\ncontent-length: {length}\r\n\r\n", D::STARTS[0]);
        assert_eq!(known.find(head.as_bytes(), D::LARGEST).is_some(), is_known);
        let mut buffer = BytesMut::from(format!("{before}{head}").as_bytes());
        let taken = D::take(&mut buffer, &mut 0, &mut known).unwrap().unwrap();
        assert_eq!(*taken.framing(), Framing::Length(length.parse().unwrap()));
        assert_eq!((taken.headers()["x-id"].as_bytes(), buffer.len()), (id.as_bytes(), 0));
    }
}

#[test]
fn heads_that_repeat_are_known_behind_interim_ones_too() {
    is_known_from_the_third_time_on::<RequestHead>("");
    is_known_from_the_third_time_on::<ResponseHead>("");
    is_known_from_the_third_time_on::<ResponseHead>("HTTP/1.1 103 Early Hints\r\n\r\n");
}

/// A length stated in two ways, or beside a coding, by either side.
#[test]
fn framing_that_two_parsers_could_read_differently_is_refused_in_both_directions() {
    fn framed<D: Direction>(lines: &str) -> Result<Framing, String> {
        let head = format!("{}\r\nhost: g\r\n{lines}\r\n", D::STARTS[0]);
        let taken = D::take(&mut BytesMut::from(head.as_bytes()), &mut 0, &mut HeadCache::default())?;
        Ok(taken.unwrap().framing().clone())
    }
    for lines in [
        "content-length: 1\r\ncontent-length: 2\r\n",
        "content-length: 1, 2\r\n",
        "content-length: +1\r\n",
        "content-length: 0x1\r\n",
        "content-length:\r\n",
        "content-length: 18446744073709551616\r\n",
        "content-length : 1\r\n",
        "content-length: 1\r\n 2\r\n",
        "transfer-encoding : chunked\r\n",
    ] {
        assert!(framed::<RequestHead>(lines).is_err(), "{lines}");
        assert!(framed::<ResponseHead>(lines).is_err(), "{lines}");
    }
    let both = "content-length: 1\r\ntransfer-encoding: chunked\r\n";
    assert_eq!(framed::<RequestHead>(both), Err("TwoFramings".into()));
    assert_eq!(framed::<ResponseHead>(both), Ok(Framing::CHUNKED), "and the connection is not used again");
    let twice = "content-length: 1\r\ncontent-length: 1\r\n";
    assert_eq!(framed::<RequestHead>(twice), Ok(Framing::Length(1)));
    assert_eq!(framed::<ResponseHead>(twice), Ok(Framing::Length(1)));
    let list = "content-length: 1, 1\r\n";
    assert_eq!(framed::<RequestHead>(list), Err("Length".into()));
    assert_eq!(framed::<ResponseHead>(list), Ok(Framing::Length(1)));
    let odd = "transfer-encoding: gzip, chunked\r\n";
    assert_eq!(framed::<RequestHead>(odd), Ok(Framing::EMPTY), "the request rules refuse it");
    assert_eq!(framed::<ResponseHead>(odd), Err("Garbage".into()));
}
