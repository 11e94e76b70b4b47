//! A part of a trace, at another rate.
//!
//! Speed stretches all gaps alike. The rate alone is changed slice by slice: to a share of it, the beginning of each
//! slice is stretched over the whole slice; to a multiple of it, copies of the slice are compressed and played one
//! after the other. Gaps inside a slice keep their proportions and slices keep theirs, so both short bursts and slow
//! swings stay as marked as they were. Leaving requests out by chance, or playing copies on top of each other,
//! would make any traffic look like Poisson's.

use std::collections::VecDeque;
use std::time::Duration;

use super::TraceRequest;
use super::blocks::scrambled;
use super::error::TraceError;

/// What becomes of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reshape {
    /// Requests before this are left out; time begins here.
    pub from: Duration,
    /// Requests from here on are left out.
    pub to: Option<Duration>,
    /// Times as fast: 1.3 is 30 % more requests per second, and a shorter run.
    pub speed: f64,
    /// Times as many requests per second, for as long as before.
    pub rate: f64,
    /// Length of the slices in which the rate is changed, on the trace's own clock.
    pub slice: Duration,
}

impl Default for Reshape {
    /// The trace as it is.
    fn default() -> Self {
        Reshape { from: Duration::ZERO, to: None, speed: 1.0, rate: 1.0, slice: Duration::from_secs(60) }
    }
}

/// A change that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ReshapeError {
    /// A factor that is not positive.
    #[error("the {name} is {value}; give a positive number, 1 for no change")]
    Factor {
        /// Which.
        name: &'static str,
        /// What it is.
        value: f64,
    },
    /// An empty window.
    #[error("the window ends at {to:?}, which is not after its beginning at {from:?}")]
    Window {
        /// Its beginning.
        from: Duration,
        /// Its end.
        to: Duration,
    },
    /// Slices of no length.
    #[error("the slices have no length; give a positive number of seconds")]
    Slice,
}

impl Reshape {
    /// Checks the factors.
    ///
    /// # Errors
    /// The first one that makes no sense.
    pub fn check(&self) -> Result<(), ReshapeError> {
        for (name, value) in [("speed", self.speed), ("rate", self.rate)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(ReshapeError::Factor { name, value });
            }
        }
        if let Some(to) = self.to.filter(|to| *to <= self.from) {
            return Err(ReshapeError::Window { from: self.from, to });
        }
        if self.slice.is_zero() { Err(ReshapeError::Slice) } else { Ok(()) }
    }

    /// The reshaped trace; times stay in order, and no more than a slice is held.
    ///
    /// # Errors
    /// As [`Reshape::check`].
    pub fn apply<I>(self, trace: I) -> Result<Reshaped<I>, ReshapeError>
    where
        I: Iterator<Item = Result<TraceRequest, TraceError>>,
    {
        self.check()?;
        Ok(Reshaped {
            how: self,
            trace,
            slice: 0,
            held: Vec::new(),
            ready: VecDeque::new(),
            ahead: None,
            is_over: false,
        })
    }
}

/// A reshaped trace.
pub struct Reshaped<I> {
    how: Reshape,
    trace: I,
    /// Number of the slice that is held.
    slice: u64,
    held: Vec<TraceRequest>,
    ready: VecDeque<TraceRequest>,
    /// First request of a later slice.
    ahead: Option<TraceRequest>,
    is_over: bool,
}

impl<I: Iterator<Item = Result<TraceRequest, TraceError>>> Reshaped<I> {
    /// The trace below, for what it knows of itself.
    pub const fn trace(&self) -> &I {
        &self.trace
    }

    /// The next request inside the window, on the window's clock.
    fn next_inside(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        if self.is_over {
            return Ok(None);
        }
        for request in self.trace.by_ref() {
            let mut request = request?;
            if self.how.to.is_some_and(|to| request.at >= to) {
                break;
            }
            if request.at >= self.how.from {
                request.at -= self.how.from;
                return Ok(Some(request));
            }
        }
        self.is_over = true;
        Ok(None)
    }

    /// Fills `ready` with the next slice that has requests; `false` at the end.
    fn fill(&mut self) -> Result<bool, TraceError> {
        let length = self.how.slice.as_nanos();
        let slice_of = |request: &TraceRequest| (request.at.as_nanos() / length) as u64;
        while self.ready.is_empty() {
            let first = match self.ahead.take() {
                Some(request) => request,
                None => match self.next_inside()? {
                    Some(request) => request,
                    None => return Ok(false),
                },
            };
            self.slice = slice_of(&first);
            self.held.push(first);
            while let Some(request) = self.next_inside()? {
                if slice_of(&request) != self.slice {
                    self.ahead = Some(request);
                    break;
                }
                self.held.push(request);
            }
            self.stretch();
        }
        Ok(true)
    }

    /// Plays the held slice at the wanted rate.
    fn stretch(&mut self) {
        let (rate, length) = (self.how.rate, self.how.slice.as_secs_f64());
        let begin = self.slice as f64 * length;
        let passes = rate.ceil().max(1.0) as u64;
        for pass in 0..passes {
            for request in &self.held {
                // From 0 to `rate` through the passes of this slice.
                let place = pass as f64 + (request.at.as_secs_f64() - begin).clamp(0.0, length) / length;
                if place >= rate {
                    break;
                }
                let mut copy = request.clone();
                copy.at = Duration::from_secs_f64(begin + length * place / rate);
                if pass > 0 {
                    rename(&mut copy, pass);
                }
                self.ready.push_back(copy);
            }
        }
        self.held.clear();
    }
}

/// Makes a copy somebody else's: its prompt and conversation are its own, its tenant stays.
fn rename(copy: &mut TraceRequest, pass: u64) {
    copy.blocks = copy.blocks.renamed(pass);
    copy.session = copy.session.map(|session| scrambled(session ^ pass));
}

impl<I: Iterator<Item = Result<TraceRequest, TraceError>>> Iterator for Reshaped<I> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let request = if self.how.rate == 1.0 {
            self.next_inside().transpose()?
        } else {
            match self.fill() {
                Ok(true) => Ok(self.ready.pop_front()?),
                Ok(false) => return None,
                Err(error) => {
                    self.is_over = true;
                    Err(error)
                }
            }
        };
        Some(request.map(|mut request| {
            if self.how.speed != 1.0 {
                request.at = request.at.div_f64(self.how.speed);
            }
            request
        }))
    }
}
