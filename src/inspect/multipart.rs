//! Multipart forms (audio): only `model` is read, and nothing is changed.
//!
//! Parsers disagree about forms as they do about JSON, so this one accepts only what all of them read
//! alike: CRLF line ends, one `Content-Disposition` per part, plain names.

use std::sync::Arc;

use memchr::memmem;

use super::facts::{Facts, Field, PromptSize, Unreadable};
use super::fields;

/// Longest head of a part, bytes.
const LONGEST_HEAD: usize = 8 * 1024;
/// Longest `model`, bytes.
const LONGEST_MODEL: usize = 1024;

/// Reads a form as it arrives, in frames cut anywhere.
#[derive(Debug)]
pub struct FormScanner {
    /// `\r\n--boundary`.
    delimiter: Vec<u8>,
    state: State,
    /// Input that is not complete yet: part of a head or of a delimiter. Starts with an added line end, so
    /// that the first delimiter looks like the others.
    held: Vec<u8>,
    /// How many of those bytes are consumed; removed together at the end of each frame.
    passed: usize,
    /// Offset in the body of the first unconsumed byte, counting the two added ones.
    held_at: usize,
    /// The value of `model` so far.
    value: Vec<u8>,
    value_at: usize,
    model: Option<Field<Arc<str>>>,
    length: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first delimiter.
    Preamble,
    /// After a delimiter: expects a line end, or the two dashes that end the form.
    Delimiter,
    /// In the head of a part.
    Head,
    /// In a part of no interest.
    Part,
    /// In the part named `model`.
    Model,
    /// After the form.
    Epilogue,
}

const OWN: &[u8] = b"\r\n";

fn broken(what: &'static str) -> Unreadable {
    Unreadable::Form { what }
}

impl FormScanner {
    /// A scanner for a body with this `Content-Type`.
    ///
    /// # Errors
    /// [`Unreadable::Form`] if it has no usable boundary.
    pub fn new(content_type: &str) -> Result<Self, Unreadable> {
        let boundary = boundary(content_type).ok_or(broken("its content type names no usable boundary"))?;
        Ok(FormScanner {
            delimiter: [b"\r\n--", boundary.as_bytes()].concat(),
            state: State::Preamble,
            held: OWN.to_vec(),
            passed: 0,
            held_at: 0,
            value: Vec::new(),
            value_at: 0,
            model: None,
            length: 0,
        })
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// [`Unreadable`] for forms that the gateway refuses.
    pub fn push(&mut self, frame: &[u8]) -> Result<(), Unreadable> {
        self.length += frame.len();
        if self.state == State::Epilogue {
            return Ok(());
        }
        self.held.extend_from_slice(frame);
        while self.step()? {}
        self.held.drain(..self.passed);
        self.passed = 0;
        Ok(())
    }

    /// Heap memory held, bytes.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.capacity() + self.value.capacity()
    }

    /// Ends the body.
    ///
    /// # Errors
    /// [`Unreadable`], also if the form has no end.
    pub fn finish(self) -> Result<Box<Facts>, Unreadable> {
        if self.state != State::Epilogue {
            return Err(broken("it ends too early"));
        }
        let prompt = PromptSize { form_bytes: self.length as u64, ..PromptSize::default() };
        let (model, length) = (self.model, self.length);
        Ok(Box::new(Facts { model, n: 1, prompts: 1, prompt, readable: true, length, ..Facts::default() }))
    }

    /// Makes one step with the bytes at hand; false if more are needed.
    fn step(&mut self) -> Result<bool, Unreadable> {
        match self.state {
            State::Preamble | State::Part | State::Model => self.content(),
            State::Delimiter => self.behind_delimiter(),
            State::Head => self.head(),
            State::Epilogue => Ok(false),
        }
    }

    fn drop_held(&mut self, length: usize) {
        self.passed += length;
        self.held_at += length;
    }

    /// The bytes not consumed yet.
    fn rest(&self) -> &[u8] {
        &self.held[self.passed..]
    }

    /// Consumes everything up to the next delimiter, keeping back only the delimiter's length.
    fn content(&mut self) -> Result<bool, Unreadable> {
        let found = memmem::find(self.rest(), &self.delimiter);
        let passed = found.unwrap_or(self.rest().len().saturating_sub(self.delimiter.len() - 1));
        if self.state == State::Model {
            self.value.extend_from_slice(&self.held[self.passed..self.passed + passed]);
            if self.value.len() > LONGEST_MODEL {
                return Err(broken("its model is too long"));
            }
        }
        if found.is_none() {
            self.drop_held(passed);
            return Ok(false);
        }
        if self.state == State::Model {
            let value = String::from_utf8(std::mem::take(&mut self.value));
            let value = value.map_err(|_| broken("its model is not UTF-8"))?;
            self.model = Some(Field { at: self.value_at..self.value_at + value.len(), value: value.into() });
        }
        self.drop_held(passed + self.delimiter.len());
        self.state = State::Delimiter;
        Ok(true)
    }

    fn behind_delimiter(&mut self) -> Result<bool, Unreadable> {
        let padding = self.rest().iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        match (&self.rest()[padding..], padding) {
            ([b'\r', b'\n', ..], _) => {
                // The line end stays, so that a head without lines is found like the others.
                self.drop_held(padding);
                self.state = State::Head;
                Ok(true)
            }
            ([b'-', b'-', ..], 0) => {
                self.state = State::Epilogue;
                (self.held, self.passed) = (Vec::new(), 0);
                Ok(true)
            }
            ([] | [b'\r'], _) | ([b'-'], 0) if padding < 100 => Ok(false),
            _ => Err(broken("a delimiter is followed by something else")),
        }
    }

    fn head(&mut self) -> Result<bool, Unreadable> {
        let Some(end) = memmem::find(self.rest(), b"\r\n\r\n") else {
            let is_short = self.rest().len() <= LONGEST_HEAD;
            return if is_short { Ok(false) } else { Err(broken("the head of a part is too long")) };
        };
        let is_model = is_model(&self.rest()[2.min(end)..end])?;
        self.drop_held(end + 4);
        self.state = if is_model { State::Model } else { State::Part };
        self.value_at = self.held_at - OWN.len();
        if is_model && self.model.is_some() {
            return Err(Unreadable::Repeated { field: "model" });
        }
        Ok(true)
    }
}

/// Whether this is the head of the field `model`.
fn is_model(head: &[u8]) -> Result<bool, Unreadable> {
    let head = std::str::from_utf8(head).map_err(|_| broken("the head of a part is not UTF-8"))?;
    let mut name = None;
    for line in head.split("\r\n") {
        if line.contains(['\r', '\n', '\0']) || line.starts_with([' ', '\t']) {
            return Err(broken("the head of a part has an odd line end"));
        }
        let Some((field, value)) = line.split_once(':') else {
            return Err(broken("the head of a part has a line without a colon"));
        };
        if field.eq_ignore_ascii_case("content-disposition") && name.replace(disposition(value)?).is_some() {
            return Err(broken("a part has two Content-Dispositions"));
        }
    }
    match name {
        Some(Disposition { name, .. }) if fields::folded(name.as_bytes()).as_deref() == Some("model") => {
            Err(Unreadable::Miscased { field: "model".to_owned() })
        }
        Some(Disposition { name, is_file }) if name == "model" => {
            let fault = Unreadable::WrongType { field: "model", expected: "a string" };
            if is_file { Err(fault) } else { Ok(true) }
        }
        Some(_) => Ok(false),
        None => Err(broken("a part has no Content-Disposition")),
    }
}

struct Disposition {
    name: String,
    is_file: bool,
}

fn disposition(value: &str) -> Result<Disposition, Unreadable> {
    let parameters = parameters(value).ok_or(broken("a Content-Disposition is malformed"))?;
    let (mut name, mut is_file) = (None, false);
    for (key, value) in parameters {
        match key.as_str() {
            "name" if name.is_none() => name = Some(value),
            "name" | "name*" => return Err(broken("a part has two names or an encoded one")),
            "filename" | "filename*" => is_file = true,
            _ => {}
        }
    }
    let name = name.ok_or(broken("a part has no name"))?;
    Ok(Disposition { name, is_file })
}

/// The boundary of a content type: exactly one, 1 to 70 characters, no control characters.
fn boundary(content_type: &str) -> Option<String> {
    let mut named = parameters(content_type)?.into_iter().filter(|(key, _)| key == "boundary");
    let (_, boundary) = named.next()?;
    let fits = (1..=70).contains(&boundary.len()) && boundary.bytes().all(|byte| (0x20..0x7F).contains(&byte));
    (named.next().is_none() && fits && !boundary.ends_with(' ')).then_some(boundary)
}

/// The `; key=value` parameters of a header value, keys in lower case.
fn parameters(value: &str) -> Option<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut rest = value.find(';').map_or("", |at| &value[at..]).trim();
    while let Some(behind) = rest.strip_prefix(';') {
        let behind = behind.trim_start();
        if behind.is_empty() {
            break;
        }
        let (key, value) = behind.split_once('=')?;
        let (value, left) = match value.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = value.find(';').unwrap_or(value.len());
                (value[..end].trim_end().to_owned(), &value[end..])
            }
        };
        found.push((key.trim().to_ascii_lowercase(), value));
        rest = left.trim_start();
    }
    rest.is_empty().then_some(found)
}

/// The text up to the closing quote, and the rest. A backslash escapes only a quote or a backslash,
/// because browsers write file names so.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut letters = quoted.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => match letters.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, next)) => text.push(next),
                None => text.push('\\'),
            },
            other => text.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=XX";

    fn read(body: &[u8]) -> Result<Box<Facts>, Unreadable> {
        let mut scanner = FormScanner::new(TYPE)?;
        scanner.push(body)?;
        let whole = scanner.finish();
        for cut in 0..=body.len() {
            let mut scanner = FormScanner::new(TYPE)?;
            let halves = scanner.push(&body[..cut]).and_then(|()| scanner.push(&body[cut..]));
            assert_eq!(halves.and_then(|()| scanner.finish()), whole, "cut at {cut}");
        }
        let mut scanner = FormScanner::new(TYPE)?;
        let bytes = body.chunks(1).try_for_each(|byte| scanner.push(byte));
        assert_eq!(bytes.and_then(|()| scanner.finish()), whole);
        whole
    }

    fn form(parts: &[(&str, &str)]) -> String {
        let part = |(head, value): &(&str, &str)| format!("--XX\r\n{head}\r\n\r\n{value}\r\n");
        parts.iter().map(part).collect::<String>() + "--XX--\r\n"
    }

    const FILE: (&str, &str) = (
        "Content-Disposition: form-data; name=\"file\"; filename=\"a;b\\\".wav\"\r\nContent-Type: audio/wav",
        "RIFF\r\n--X\r\n\r\n--\r\n\0\u{1}",
    );
    const MODEL: (&str, &str) = ("Content-Disposition: form-data; name=\"model\"", "whisper-1");

    #[test]
    fn the_model_is_found_at_any_position() {
        for parts in [&[FILE, MODEL][..], &[MODEL, FILE], &[MODEL]] {
            let body = form(parts);
            let facts = read(body.as_bytes()).unwrap();
            assert_eq!((facts.length, facts.choices(), facts.readable), (body.len(), 1, true));
            let model = facts.model.unwrap();
            assert_eq!((&*model.value, &body[model.at]), ("whisper-1", "whisper-1"));
        }
        assert_eq!(read(form(&[FILE]).as_bytes()).unwrap().model, None);
        let bare = form(&[("content-disposition:form-data;name=model", "m")]);
        assert_eq!(&*read(bare.as_bytes()).unwrap().model.unwrap().value, "m");
        let around = format!("preamble\r\n{}epilogue --XX", form(&[MODEL]));
        assert_eq!(&*read(around.as_bytes()).unwrap().model.unwrap().value, "whisper-1");
    }

    #[test]
    fn two_models_are_refused_and_so_is_a_file_of_that_name() {
        assert_eq!(read(form(&[MODEL, MODEL]).as_bytes()), Err(Unreadable::Repeated { field: "model" }));
        let file = form(&[("Content-Disposition: form-data; name=\"model\"; filename=\"m\"", "x")]);
        assert!(matches!(read(file.as_bytes()), Err(Unreadable::WrongType { field: "model", .. })));
    }

    #[test]
    fn an_empty_part_and_an_empty_model_are_parts() {
        let body = form(&[("Content-Disposition: form-data; name=\"x\"", ""), (MODEL.0, "")]);
        assert_eq!(&*read(body.as_bytes()).unwrap().model.unwrap().value, "");
    }

    #[test]
    fn ambiguous_bodies_are_rejected() {
        let heads = [
            "Content-Disposition: form-data; name=\"model\"; name=\"x\"",
            "Content-Disposition: form-data; name*=utf-8''model",
            "Content-Disposition: form-data",
            "Content-Disposition: form-data; name=\"model",
            "Content-Disposition: form-data;\r\n name=\"model\"",
            "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
            "Content-Disposition: form-data; name=\"x\"\nX: y",
            "Content-Type: text/plain",
            "nonsense",
        ];
        for head in heads {
            assert!(matches!(read(form(&[(head, "v")]).as_bytes()), Err(Unreadable::Form { .. })), "{head}");
        }
        for body in ["", "--XX", "--XX\r\n", "--XXY\r\n\r\n--XX--", "--YY--", "no form", &form(&[MODEL])[..40]] {
            assert!(matches!(read(body.as_bytes()), Err(Unreadable::Form { .. })), "{body}");
        }
        let long = form(&[(MODEL.0, &"m".repeat(2000))]);
        assert!(matches!(read(long.as_bytes()), Err(Unreadable::Form { .. })));
    }

    #[test]
    fn boundaries_are_read_as_they_are_written() {
        for (value, found) in [
            ("multipart/form-data; boundary=abc", Some("abc")),
            ("multipart/form-data; charset=utf-8 ; BOUNDARY=\"a b:c\"", Some("a b:c")),
            ("multipart/form-data;boundary=a;boundary=b", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data; boundary=\"", None),
            ("multipart/form-data", None),
        ] {
            assert_eq!(boundary(value).as_deref(), found, "{value}");
        }
        assert!(FormScanner::new(&format!("multipart/form-data; boundary={}", "a".repeat(71))).is_err());
    }

    #[test]
    fn a_large_file_is_not_held() {
        let mut scanner = FormScanner::new(TYPE).unwrap();
        scanner.push(b"--XX\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n").unwrap();
        for _ in 0..100 {
            scanner.push(&[b'\r'; 64 * 1024]).unwrap();
        }
        assert!(scanner.held.len() < 16 && scanner.held.capacity() <= 256 * 1024);
    }
}
