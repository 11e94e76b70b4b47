//! Trace context: what came with a request, what goes on to an engine, and which traces are kept.
//!
//! Pure, by W3C Trace Context: `traceparent` is read and written here, `tracestate` passes as it
//! came. Sampling is decided twice. At the head: the parent's decision, else by ratio over the
//! trace id, so that all who sample by ratio keep the same traces; this is what engines are told.
//! At the end: a request that missed is kept whatever was decided before.

use std::sync::Arc;
use std::time::Duration;

use crate::types::decimal::put_hex;

/// The longest `tracestate` that is carried on, in bytes: what others must carry at least.
const LONGEST_STATE: usize = 512;

/// The id of a trace. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

/// The id of a span. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub [u8; 8]);

impl TraceId {
    /// 32 hexadecimal digits.
    #[must_use]
    pub fn hex(self) -> String {
        let mut text = [0; 32];
        put_hex(&mut text, &self.0);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl SpanId {
    /// A span id from chance.
    #[must_use]
    pub fn from_chance(chance: u64) -> Self {
        SpanId(chance.max(1).to_be_bytes())
    }

    /// 16 hexadecimal digits.
    #[must_use]
    pub fn hex(self) -> String {
        let mut text = [0; 16];
        put_hex(&mut text, &self.0);
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// A `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace: TraceId,
    /// The sender's span.
    pub span: SpanId,
    /// The sender keeps the trace.
    pub sampled: bool,
}

/// The length of a `traceparent` of version 00.
const PARENT: usize = 55;

impl TraceParent {
    /// Reads a header's value. Of a version to come only what version 00 has is read.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        let (head, rest) = value.split_at_checked(PARENT)?;
        let version = digits::<1>(head.get(..2)?)?[0];
        let is_longer = version > 0 && rest.first().is_some_and(|byte| *byte == b'-');
        if version == 0xFF || !(rest.is_empty() || is_longer) {
            return None;
        }
        let dashes = [2, 35, 52].iter().all(|at| head[*at] == b'-');
        let trace = digits::<16>(&head[3..35]).filter(|id| *id != [0; 16])?;
        let span = digits::<8>(&head[36..52]).filter(|id| *id != [0; 8])?;
        let flags = digits::<1>(&head[53..55])?[0];
        dashes.then_some(TraceParent { trace: TraceId(trace), span: SpanId(span), sampled: flags & 1 == 1 })
    }

    /// The header's value, of version 00.
    #[must_use]
    pub fn write(self) -> [u8; PARENT] {
        let mut text = *b"00-00000000000000000000000000000000-0000000000000000-00";
        put_hex(&mut text[3..35], &self.trace.0);
        put_hex(&mut text[36..52], &self.span.0);
        text[54] = if self.sampled { b'1' } else { b'0' };
        text
    }
}

/// Lower-case hexadecimal digits, as the specification asks.
fn digits<const BYTES: usize>(text: &[u8]) -> Option<[u8; BYTES]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_chunks::<2>();
    if pairs.len() != BYTES || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

/// Which traces are kept, and whether a client's are gone on with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The share of traces without a parent that are kept.
    pub ratio: f64,
    /// Whether a request with a `traceparent` continues that trace and its decision.
    pub follow_parent: bool,
}

impl Sampling {
    /// Whether a trace that begins here is kept: by the last 56 bits of its id.
    fn keeps(&self, trace: TraceId) -> bool {
        let [.., a, b, c, d, e, f, g] = trace.0;
        let random = u64::from_be_bytes([0, a, b, c, d, e, f, g]);
        let all = (1u64 << 56) as f64;
        random >= ((1.0 - self.ratio.clamp(0.0, 1.0)) * all).round() as u64
    }

    /// The trace of a request that arrives, with these headers if it has them.
    #[must_use]
    pub fn begin(&self, parent: Option<&[u8]>, state: Option<&[u8]>, chance: (u128, u64)) -> TraceContext {
        let came = parent.and_then(TraceParent::read);
        let span = SpanId::from_chance(chance.1);
        match came.filter(|_| self.follow_parent) {
            Some(parent) => TraceContext {
                trace: parent.trace,
                span,
                parent: Some(parent.span),
                link: None,
                sampled: parent.sampled,
                state: state.and_then(carried),
            },
            None => {
                let trace = TraceId(chance.0.max(1).to_be_bytes());
                TraceContext { trace, span, parent: None, link: came, sampled: self.keeps(trace), state: None }
            }
        }
    }
}

/// A `tracestate` that may be carried on.
fn carried(state: &[u8]) -> Option<Arc<str>> {
    let text = std::str::from_utf8(state).ok()?.trim();
    let is_plain = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    (is_plain && !text.is_empty() && text.len() <= LONGEST_STATE).then(|| Arc::from(text))
}

/// The trace of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceContext {
    /// The trace.
    pub trace: TraceId,
    /// The request's own span.
    pub span: SpanId,
    /// The client's span.
    pub parent: Option<SpanId>,
    /// The client's span, if its trace is not continued.
    pub link: Option<TraceParent>,
    /// Decided at the head: the trace is kept.
    pub sampled: bool,
    /// The `tracestate` to forward.
    pub state: Option<Arc<str>>,
}

impl TraceContext {
    /// Trace context for the engine of an attempt with this span.
    #[must_use]
    pub fn outgoing(&self, span: SpanId) -> OutgoingTrace {
        let parent = TraceParent { trace: self.trace, span, sampled: self.sampled };
        OutgoingTrace { parent: parent.write(), state: self.state.clone() }
    }
}

/// What an engine is sent of the trace.
#[derive(Clone, Debug, PartialEq)]
pub struct OutgoingTrace {
    /// The value of `traceparent`.
    pub parent: [u8; PARENT],
    /// The value of `tracestate`.
    pub state: Option<Arc<str>>,
}

/// What the spans of one request are made of, beside its record.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestTrace {
    /// The trace, and the request's place in it.
    pub context: TraceContext,
    /// Arrival: Unix time.
    pub arrival: Duration,
    /// The model as engines know it, once a route was found.
    pub model: Option<Box<str>>,
    /// The kind of the engines of its first pool.
    pub provider: Option<&'static str>,
}

impl RequestTrace {
    /// The trace of a request that arrived at this time of day.
    #[must_use]
    pub fn new(context: TraceContext, arrival: Duration) -> Self {
        RequestTrace { context, arrival, model: None, provider: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn begun(sampling: Sampling, parent: Option<&str>, state: Option<&str>) -> TraceContext {
        sampling.begin(parent.map(str::as_bytes), state.map(str::as_bytes), (7 << 60 | 3, 9))
    }

    const ALL: Sampling = Sampling { ratio: 1.0, follow_parent: true };
    const NONE: Sampling = Sampling { ratio: 0.0, follow_parent: true };

    #[test]
    fn a_parent_is_read_as_the_specification_says() {
        let read = TraceParent::read(PARENT.as_bytes()).unwrap();
        assert_eq!((read.trace.hex().as_str(), read.span.hex().as_str()), (&PARENT[3..35], &PARENT[36..52]));
        assert!(read.sampled);
        assert_eq!(read.write(), PARENT.as_bytes());
        for (good, sampled) in [
            (PARENT.replace("-01", "-00"), false),
            (PARENT.replace("-01", "-03"), true),
            (PARENT.replace("-01", "-fe"), false),
            (PARENT.replacen("00-", "cc-", 1), true),
            (format!("{}-what-the-future-will-be-like", PARENT.replacen("00-", "cc-", 1)), true),
        ] {
            assert_eq!(TraceParent::read(good.as_bytes()).map(|parent| parent.sampled), Some(sampled), "{good}");
        }
    }

    #[test]
    fn what_is_no_parent_is_none() {
        for bad in [
            String::new(),
            PARENT[..54].to_owned(),
            format!("{PARENT}-"),
            format!("{PARENT}0"),
            format!(" {PARENT}"),
            PARENT.replacen("00-", "ff-", 1),
            PARENT.replacen("00-", "0-0", 1),
            format!("{}.what", PARENT.replacen("00-", "cc-", 1)),
            PARENT.to_uppercase(),
            PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            PARENT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            PARENT.replace("-01", "-0x"),
            PARENT.replace('-', "_"),
            "\u{e9}".repeat(28),
        ] {
            assert_eq!(TraceParent::read(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn a_request_goes_on_in_the_trace_of_its_parent_and_by_its_decision() {
        let on = begun(NONE, Some(PARENT), Some("a=1, b=2"));
        assert_eq!((on.trace.hex().as_str(), on.parent.unwrap().hex().as_str()), (&PARENT[3..35], &PARENT[36..52]));
        assert!(on.sampled && on.link.is_none() && on.state.as_deref() == Some("a=1, b=2"));
        assert_ne!(on.span, on.parent.unwrap());
        assert!(!begun(ALL, Some(&PARENT.replace("-01", "-00")), None).sampled);
    }

    #[test]
    fn without_a_parent_a_trace_begins_and_a_state_is_of_none() {
        for parent in [None, Some("00-nonsense")] {
            let on = begun(ALL, parent, Some("a=1"));
            assert!(on.sampled && on.parent.is_none() && on.state.is_none() && on.link.is_none());
        }
        assert!(!begun(NONE, None, None).sampled);
    }

    #[test]
    fn a_parent_that_is_not_followed_is_linked_to() {
        let on = begun(Sampling { follow_parent: false, ..NONE }, Some(PARENT), Some("a=1"));
        assert_ne!(on.trace.hex(), PARENT[3..35]);
        assert_eq!(on.link, TraceParent::read(PARENT.as_bytes()));
        assert!(on.parent.is_none() && on.state.is_none() && !on.sampled, "nor does it decide");
    }

    #[test]
    fn a_state_that_cannot_be_sent_is_left_out() {
        for state in ["", "  ", "a=\u{7f}", "a=\u{e9}", &"a=1,".repeat(200)] {
            assert_eq!(begun(ALL, Some(PARENT), Some(state)).state, None, "{state:?}");
        }
    }

    #[test]
    fn an_engine_is_told_of_the_attempt_that_asks_it() {
        let told = begun(NONE, Some(PARENT), Some("a=1")).outgoing(SpanId::from_chance(18));
        let told = (String::from_utf8(told.parent.to_vec()).unwrap(), told.state);
        let expected = format!("00-{}-{:016x}-01", &PARENT[3..35], 18);
        assert_eq!(told, (expected, Some(Arc::from("a=1"))));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(trace in 1u128.., span in 1u64.., sampled in any::<bool>()) {
            let parent = TraceParent { trace: TraceId(trace.to_be_bytes()), span: SpanId(span.to_be_bytes()), sampled };
            prop_assert_eq!(TraceParent::read(&parent.write()), Some(parent));
        }

        #[test]
        fn no_bytes_break_the_reading(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = TraceParent::read(&bytes);
        }

        /// Whoever keeps more keeps all that others keep, too.
        #[test]
        fn a_higher_ratio_keeps_more(trace in any::<u128>(), low in 0.0f64..=1.0, high in 0.0f64..=1.0) {
            let trace = TraceId(trace.to_be_bytes());
            let keeps = |ratio| Sampling { ratio, follow_parent: true }.keeps(trace);
            prop_assert!(keeps(low.max(high)) >= keeps(low.min(high)));
            prop_assert!(keeps(1.0) && !keeps(0.0));
        }
    }

    #[test]
    fn about_a_quarter_of_all_traces_is_kept_at_a_ratio_of_a_quarter() {
        let sampling = Sampling { ratio: 0.25, follow_parent: true };
        // The golden ratio's multiples are spread evenly.
        let ids = (1..10_000u64).map(|n| u128::from(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        let kept = ids.filter(|id| sampling.keeps(TraceId(id.to_be_bytes()))).count();
        assert!((2450..2550).contains(&kept), "{kept}");
    }
}
