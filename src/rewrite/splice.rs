//! Splices: replace a few bytes of a body and leave all others in place.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

/// Replaces a byte range; an empty range inserts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splice {
    /// The range replaced, from the body's first byte.
    pub at: Range<usize>,
    /// The replacement.
    pub with: Bytes,
}

/// The body with its splices applied, as frames. Splices must be sorted by start and must not overlap.
/// Unchanged bytes are shared with the original frames, never copied; without splices the frames are
/// returned as they are.
#[must_use]
pub fn apply<'a>(frames: &'a [Bytes], splices: &[Splice]) -> Cow<'a, [Bytes]> {
    if splices.is_empty() {
        return Cow::Borrowed(frames);
    }
    let mut out = Vec::with_capacity(frames.len() + 2 * splices.len());
    let mut splices = splices.iter().peekable();
    let (mut frame_at, mut done) = (0, 0);
    for frame in frames {
        let frame_end = frame_at + frame.len();
        let keep = |from: usize, to: usize, out: &mut Vec<Bytes>| {
            let (from, to) = (from.max(frame_at), to.min(frame_end));
            if from < to {
                out.push(frame.slice(from - frame_at..to - frame_at));
            }
        };
        while let Some(splice) = splices.next_if(|splice| splice.at.start < frame_end) {
            keep(done, splice.at.start, &mut out);
            out.extend((!splice.with.is_empty()).then(|| splice.with.clone()));
            done = splice.at.end;
        }
        keep(done, frame_end, &mut out);
        frame_at = frame_end;
        done = done.max(frame_end);
    }
    out.extend(splices.map(|splice| splice.with.clone()));
    Cow::Owned(out)
}

/// The new `Content-Length` of a body of `length` bytes.
#[must_use]
pub fn length_after(length: usize, splices: &[Splice]) -> usize {
    splices.iter().fold(length, |length, splice| length + splice.with.len() - splice.at.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn untouched_frames_are_the_same_memory() {
        let frames = [Bytes::from(vec![b'a'; 100]), Bytes::from(vec![b'b'; 100]), Bytes::from(vec![b'c'; 100])];
        let out = apply(&frames, &[Splice { at: 150..151, with: Bytes::from_static(b"xx") }]);
        assert_eq!(out.len(), 5);
        assert_eq!(out[0].as_ptr(), frames[0].as_ptr());
        assert_eq!(out[3].as_ptr(), frames[1][51..].as_ptr());
        assert_eq!(out[4].as_ptr(), frames[2].as_ptr());
    }

    proptest! {
        #[test]
        fn splicing_frames_equals_splicing_the_whole_body(
            body in proptest::collection::vec(any::<u8>(), 0..60),
            cuts in proptest::collection::vec(0usize..60, 0..5),
            edits in proptest::collection::vec((0usize..12, 0usize..9, "[x-z]{0,4}"), 0..5),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(body.len())).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let frames: Vec<Bytes> = cuts.windows(2).map(|w| Bytes::copy_from_slice(&body[w[0]..w[1]])).collect();
            let (mut at, mut splices) = (0, Vec::new());
            for (skip, length, with) in edits {
                let start = (at + skip).min(body.len());
                at = (start + length).min(body.len());
                splices.push(Splice { at: start..at, with: Bytes::from(with) });
            }
            let mut whole = body.clone();
            for splice in splices.iter().rev() {
                whole.splice(splice.at.clone(), splice.with.iter().copied());
            }
            let spliced = apply(&frames, &splices);
            prop_assert_eq!(length_after(body.len(), &splices), whole.len());
            prop_assert_eq!(spliced.concat(), whole);
        }
    }
}
