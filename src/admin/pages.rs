//! Rendering and delivery of metrics pages: a bounded number at a time, however slowly clients read.
//!
//! A page with many series is large. Pages are rendered one at a time, on a blocking thread, and at most [`MOST`] are
//! in memory. A further request waits until a client has read its page, or has had [`LONGEST`] for it; the page of a
//! slower client is dropped, and its response is truncated.

use std::io::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex as Lock;
use tokio::sync::{Mutex, Notify};

use crate::clock::Clock;
use crate::types::Tick;

/// Most pages that are kept at a time.
const MOST: usize = 4;
/// Longest time that a page is kept for a client that does not read it, if others wait: the default timeout
/// of Prometheus.
const LONGEST: Duration = Duration::from_secs(10);
/// Bytes that leave a page at a time. They are copied: a slice would keep all of it.
const PIECE: usize = 64 * 1024;

/// See the module.
pub(super) struct MetricsPages {
    clock: Clock,
    /// Pages in memory with their creation times, oldest first.
    kept: Mutex<Vec<(Tick, Arc<KeptPage>)>>,
    /// A page has gone.
    gone: Arc<Notify>,
}

/// A page that a client is reading.
#[derive(Default)]
struct KeptPage(Lock<Option<Vec<u8>>>);

impl MetricsPages {
    pub(super) fn new(clock: Clock) -> Self {
        MetricsPages { clock, kept: Mutex::default(), gone: Arc::default() }
    }

    /// Renders a page by `write`, in gzip if `is_coded`. `None` if rendering failed.
    pub(super) async fn make(
        &self,
        write: impl FnOnce() -> String + Send + 'static,
        is_coded: bool,
    ) -> Option<PageBody> {
        // One at a time, in the order in which they were asked for.
        let mut kept = self.kept.lock().await;
        self.has_room(&mut kept).await;
        // The threads that relay have better things to do.
        let made = tokio::task::spawn_blocking(move || {
            let page = write();
            if is_coded { gzipped(&page) } else { page.into_bytes() }
        });
        let page = made.await.ok()?;
        let left = page.len();
        let page = Arc::new(KeptPage(Lock::new(Some(page))));
        kept.push((self.clock.now(), Arc::clone(&page)));
        Some(PageBody { page, at: 0, left, gone: Arc::clone(&self.gone) })
    }

    /// Waits until one more may be kept.
    async fn has_room(&self, kept: &mut Vec<(Tick, Arc<KeptPage>)>) {
        loop {
            let gone = self.gone.notified();
            kept.retain(|(_, page)| page.0.lock().is_some());
            if kept.len() < MOST {
                return;
            }
            let (made, oldest) = &kept[0];
            tokio::select! {
                biased;
                () = gone => {}
                () = self.clock.sleep_until(Some(*made + LONGEST)) => *oldest.0.lock() = None,
            }
        }
    }
}

/// Compresses the page at the fastest level; series are so repetitive that a twentieth remains.
fn gzipped(page: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let written = encoder.write_all(page.as_bytes()).and_then(|()| encoder.finish());
    written.expect("writing into memory cannot fail")
}

/// A page as a body. Dropped or read to its end it is kept no longer.
pub(super) struct PageBody {
    page: Arc<KeptPage>,
    at: usize,
    left: usize,
    gone: Arc<Notify>,
}

/// The page was dropped, because its client did not read it and others waited.
#[derive(Debug, thiserror::Error)]
#[error("the page was not read within {LONGEST:?}")]
pub(super) struct PageTakenAway;

impl PageBody {
    fn is_over(&mut self) {
        *self.page.0.lock() = None;
        self.gone.notify_one();
    }
}

impl Body for PageBody {
    type Data = Bytes;
    type Error = PageTakenAway;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, PageTakenAway>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let length = self.left.min(PIECE);
        let piece = self.page.0.lock().as_ref().map(|page| Bytes::copy_from_slice(&page[self.at..self.at + length]));
        let Some(piece) = piece else { return Poll::Ready(Some(Err(PageTakenAway))) };
        (self.at, self.left) = (self.at + length, self.left - length);
        if self.left == 0 {
            self.is_over();
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left as u64)
    }
}

impl Drop for PageBody {
    fn drop(&mut self) {
        self.is_over();
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    const LONG: usize = 5 * PIECE;

    async fn page(pages: &MetricsPages, length: usize) -> PageBody {
        pages.make(move || "x".repeat(length), false).await.expect("it can be made")
    }

    #[tokio::test]
    async fn a_page_arrives_whole_and_its_length_is_known() {
        let pages = MetricsPages::new(Clock::start());
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, LONG] {
            let body = page(&pages, length).await;
            assert_eq!(body.size_hint().exact(), Some(length as u64));
            assert_eq!(body.collect().await.unwrap().to_bytes().len(), length);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn c115_pages_that_nobody_reads_are_few_and_are_taken_away_where_others_want_one() {
        let clock = Clock::start();
        let pages = MetricsPages::new(clock);
        let mut unread = Vec::new();
        for _ in 0..MOST {
            unread.push(page(&pages, LONG).await);
        }
        assert_eq!(clock.now(), Tick::ZERO);
        let mut first = unread.remove(0);
        assert!(first.frame().await.unwrap().is_ok());
        let next = page(&pages, LONG).await;
        assert_eq!(clock.now(), Tick::ZERO + LONGEST);
        assert!(first.frame().await.unwrap().is_err(), "its page is gone");
        assert_eq!(next.collect().await.unwrap().to_bytes().len(), LONG);
        let kept = async || pages.kept.lock().await.iter().filter(|(_, page)| page.0.lock().is_some()).count();
        assert_eq!(kept().await, MOST - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_that_was_read_or_left_makes_room_at_once() {
        let clock = Clock::start();
        let pages = MetricsPages::new(clock);
        let mut unread = Vec::new();
        for _ in 0..MOST {
            unread.push(page(&pages, LONG).await);
        }
        let (left, read) = (unread.pop().unwrap(), unread.pop().unwrap());
        let leave = async {
            clock.sleep_until(Some(Tick::from_millis(100))).await;
            drop(left);
            clock.sleep_until(Some(Tick::from_millis(200))).await;
            read.collect().await.unwrap();
        };
        let ask = async {
            let first = page(&pages, LONG).await;
            let at = clock.now();
            (first, page(&pages, LONG).await, at, clock.now())
        };
        let (_, (_first, _second, at, later)) = tokio::join!(leave, ask);
        assert_eq!((at, later), (Tick::from_millis(100), Tick::from_millis(200)));
    }
}
