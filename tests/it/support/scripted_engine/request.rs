//! A request as received by an engine, and enough of HTTP/1.1 to find its end.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use goodput::types::Tick;

/// One request as received.
#[derive(Clone, Debug)]
pub struct Received {
    /// Its number among all requests of the engine, starting at 0.
    pub number: usize,
    /// The number of its connection, starting at 0.
    pub connection: usize,
    /// Its number on its connection, starting at 0.
    pub on_connection: usize,
    /// The method.
    pub method: String,
    /// The raw target: path and query.
    pub target: String,
    /// Headers in order, with names as spelled.
    pub headers: Vec<(String, String)>,
    /// The raw head, blank line included.
    pub head: Bytes,
    /// The decoded body.
    pub body: Bytes,
    /// The raw body, chunk framing included.
    pub raw_body: Bytes,
    /// When the head was complete.
    pub head_at: Tick,
    /// When the body was complete.
    pub body_at: Tick,
}

impl Received {
    /// The first header with this name, ignoring case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body as JSON; `null` if it is not.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(super) fn contains(&self, text: &str) -> bool {
        let holds = |bytes: &[u8]| memmem::find(bytes, text.as_bytes()).is_some();
        holds(&self.head) || holds(&self.raw_body) || holds(&self.body)
    }
}

/// A request head and the framing of its body.
pub(super) struct Head {
    pub method: String,
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub bytes: Bytes,
    pub body: BodyFraming,
}

pub(super) enum BodyFraming {
    Length(usize),
    Chunked,
}

/// Takes a complete head from the front of `inbox`.
pub(super) fn take_head(inbox: &mut BytesMut) -> Option<Head> {
    let end = memmem::find(inbox, b"\r\n\r\n")? + 4;
    let bytes = inbox.split_to(end).freeze();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut lines = text.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let mut word = || first.next().unwrap_or_default().to_owned();
    let (method, target) = (word(), word());
    let pair = |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    let headers: Vec<_> = lines.filter_map(pair).collect();
    let value = |name: &str| headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, v)| v);
    let body = match value("transfer-encoding") {
        Some(_) => BodyFraming::Chunked,
        None => BodyFraming::Length(value("content-length").and_then(|v| v.parse().ok()).unwrap_or(0)),
    };
    Some(Head { method, target, headers, bytes, body })
}

/// Takes a complete body from the front of `inbox`: raw and decoded.
pub(super) fn take_body(framing: &BodyFraming, inbox: &mut BytesMut) -> Option<(Bytes, Bytes)> {
    match *framing {
        BodyFraming::Length(length) => {
            let body = (inbox.len() >= length).then(|| inbox.split_to(length).freeze())?;
            Some((body.clone(), body))
        }
        BodyFraming::Chunked => {
            let (length, content) = unchunk(inbox)?;
            Some((inbox.split_to(length).freeze(), content))
        }
    }
}

/// Raw length and decoded content of the chunked body at the front of `bytes`, without trailers. `None` if
/// incomplete.
fn unchunk(bytes: &[u8]) -> Option<(usize, Bytes)> {
    let mut content = BytesMut::new();
    let mut at = 0;
    loop {
        let line = at + memmem::find(bytes.get(at..)?, b"\r\n")?;
        let digits = bytes[at..line].split(|byte| *byte == b';').next().unwrap_or_default();
        let size = usize::from_str_radix(std::str::from_utf8(digits).ok()?.trim(), 16).ok()?;
        at = line + 2;
        if size == 0 {
            return trailers_end(bytes, at).map(|end| (end, content.freeze()));
        }
        content.extend_from_slice(bytes.get(at..at + size)?);
        at += size + 2;
    }
}

fn trailers_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        let line = at + memmem::find(bytes.get(at..)?, b"\r\n")?;
        let is_blank = line == at;
        at = line + 2;
        if is_blank {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunked_body_is_taken_whole_and_leaves_the_next_request() {
        let wire = b"POST /a?b=%2F HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nt: 1\r\n\r\nGET";
        for cut in 0..wire.len() - 3 {
            let mut inbox = BytesMut::from(&wire[..cut]);
            let whole = take_head(&mut inbox).and_then(|head| take_body(&head.body, &mut inbox));
            assert!(whole.is_none(), "complete at {cut}");
        }
        let mut inbox = BytesMut::from(&wire[..]);
        let head = take_head(&mut inbox).unwrap();
        assert_eq!((head.method.as_str(), head.target.as_str()), ("POST", "/a?b=%2F"));
        assert_eq!(head.headers[0], ("Host".to_owned(), "x".to_owned()));
        let (_, content) = take_body(&head.body, &mut inbox).unwrap();
        assert_eq!((&content[..], &inbox[..]), (&b"abcde"[..], &b"GET"[..]));
    }
}
