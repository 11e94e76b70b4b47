//! A request body on its way to an engine: the frames as they came, never joined.

use std::convert::Infallible;

use super::*;

/// A list of frames of known length. Clones share the bytes, so that another attempt costs
/// no copy.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    frames: VecDeque<Bytes>,
    left: u64,
    meter: Option<Arc<Meter>>,
}

impl Frames {
    /// Bytes not yet handed over.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The line that sends it wants to know when all has been handed over.
    pub(super) fn tell(&mut self, meter: Arc<Meter>) {
        self.meter = Some(meter);
        self.tell_if_whole();
    }

    fn tell_if_whole(&mut self) {
        if self.frames.is_empty()
            && let Some(meter) = self.meter.take()
        {
            meter.sent_whole.store(true, Ordering::Release);
        }
    }
}

impl FromIterator<Bytes> for Frames {
    fn from_iter<I: IntoIterator<Item = Bytes>>(frames: I) -> Self {
        let frames: VecDeque<_> = frames.into_iter().filter(|frame| !frame.is_empty()).collect();
        let left = frames.iter().map(|frame| frame.len() as u64).sum();
        Frames { frames, left, meter: None }
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.frames.pop_front();
        self.left -= next.as_ref().map_or(0, |frame| frame.len() as u64);
        self.tell_if_whole();
        Poll::Ready(next.map(|frame| Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
