//! The codes of in-band errors (`docs/semantics.md`, section 4).

/// The code of an error without a known code.
pub(super) const UNKNOWN: u16 = 500;

/// The codes found in an error object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorCodes {
    number: Option<u16>,
    status: Option<u16>,
    code: Option<u16>,
    kind: Option<u16>,
}

impl ErrorCodes {
    /// Takes its `code`: a number, also as a string, or a word.
    pub(super) fn code_is(&mut self, text: &[u8]) {
        match number(text) {
            Some(number) => self.number = http_code(number).or(self.number),
            None => self.code = of_word(text),
        }
    }

    /// Takes a status beside it: a number, also as a string.
    pub(super) fn status_is(&mut self, text: &[u8]) {
        self.status = number(text).and_then(http_code).or(self.status);
    }

    /// Takes its `type`.
    pub(super) fn type_is(&mut self, text: &[u8]) {
        self.kind = of_word(text);
    }

    /// Whether it has a numeric status.
    pub(super) fn has_number(self) -> bool {
        self.number.or(self.status).is_some()
    }

    /// The equivalent HTTP status, if known: numbers take precedence over words.
    pub(super) fn http(self) -> Option<u16> {
        self.number.or(self.status).or(self.code).or(self.kind)
    }
}

fn number(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

fn http_code(number: f64) -> Option<u16> {
    (400.0..600.0).contains(&number).then_some(number as u16)
}

fn of_word(word: &[u8]) -> Option<u16> {
    Some(match word {
        b"overloaded_error" => 529,
        b"Service Unavailable" => 503,
        b"rate_limit_error" | b"rate_limit_exceeded" | b"insufficient_quota" => 429,
        b"api_error" | b"server_error" => 500,
        b"request_too_large" => 413,
        b"invalid_request_error" | b"invalid_prompt" => 400,
        b"authentication_error" => 401,
        b"permission_error" => 403,
        b"not_found_error" => 404,
        _ if word.starts_with(b"BadRequest") => 400,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(code: &str, kind: &str) -> Option<u16> {
        let mut codes = ErrorCodes::default();
        codes.code_is(code.as_bytes());
        codes.type_is(kind.as_bytes());
        codes.http()
    }

    #[test]
    fn every_known_word_has_its_code_as_code_and_as_type() {
        let table = [
            ("overloaded_error", 529),
            ("Service Unavailable", 503),
            ("rate_limit_error", 429),
            ("rate_limit_exceeded", 429),
            ("insufficient_quota", 429),
            ("request_too_large", 413),
            ("api_error", 500),
            ("server_error", 500),
            ("invalid_request_error", 400),
            ("invalid_prompt", 400),
            ("BadRequestError", 400),
            ("authentication_error", 401),
            ("permission_error", 403),
            ("not_found_error", 404),
        ];
        for (word, code) in table {
            assert_eq!((http(word, ""), http("", word)), (Some(code), Some(code)), "{word}");
        }
        for word in ["service_unavailable", "Overloaded_error", "badRequest", "timeout", "content_filter"] {
            assert_eq!((http(word, ""), http("", word)), (None, None), "{word}");
        }
        assert_eq!((http("429", ""), http(" 503 ", ""), http("529.0", "")), (Some(429), Some(503), Some(529)));
    }

    #[test]
    fn the_number_outranks_the_words() {
        assert_eq!(http("400", "server_error"), Some(400));
        assert_eq!(http("rate_limit_exceeded", "invalid_request_error"), Some(429));
        assert_eq!(http("stream_incomplete", "overloaded_error"), Some(529));
        assert_eq!(http("0", "BadRequestError"), Some(400));
        assert_eq!(http("", "InternalServerError"), None);
        assert_eq!(http("nan", ""), None);
    }

    #[test]
    fn the_status_replaces_a_code_that_is_not_a_number() {
        let http = |code: &str, kind: &str, status: &str| {
            let mut codes = ErrorCodes::default();
            codes.code_is(code.as_bytes());
            codes.type_is(kind.as_bytes());
            codes.status_is(status.as_bytes());
            codes.http()
        };
        assert_eq!(http("content_filter", "", "400"), Some(400));
        assert_eq!(http("rate_limit_exceeded", "server_error", "503"), Some(503));
        assert_eq!(http("0", "", " 422 "), Some(422));
        assert_eq!(http("429", "", "500"), Some(429));
        for none in ["", "200", "600", "failed", "-429", "4e9"] {
            assert_eq!(http("", "api_error", none), Some(500), "{none}");
            assert_eq!(http("content_filter", "", none), None, "{none}");
        }
    }
}
