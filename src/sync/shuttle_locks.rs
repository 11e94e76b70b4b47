//! Locks that `shuttle` can schedule in tests, and the runner of such tests.

use std::cell::Cell;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};

thread_local! {
    static WOVEN: Cell<bool> = const { Cell::new(false) };
}

/// Runs per strategy and story.
const RUNS: usize = 400;
/// Priority changes per run of the PCT strategy.
const DEPTH: usize = 3;
/// Stack of a task, bytes; debug builds need this much.
const STACK: usize = 512 * 1024;

/// Runs a story under many interleavings: random ones, and ones with random priorities (PCT), which find
/// bugs that need one task to be slow for long. Fails at the first panic or deadlock and prints how
/// to replay it. Time stands still unless the story advances it.
pub fn tried(story: fn(&Arc<Time>)) {
    run(RandomScheduler::new(RUNS), story);
    run(PctScheduler::new(DEPTH, RUNS), story);
}

fn run(scheduler: impl Scheduler + 'static, story: fn(&Arc<Time>)) {
    let mut config = Config::new();
    config.stack_size = STACK;
    let _over = ResetOnDrop;
    WOVEN.set(true);
    Runner::new(scheduler, config).run(move || {
        let time = Time::stands();
        // One thread runs all tasks of a story, so this covers all of them.
        let _ruled = time.0.enter();
        story(&time);
    });
}

/// Resets the thread's locks however a run ends.
struct ResetOnDrop;

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        WOVEN.set(false);
    }
}

/// The clock of a story.
pub struct Time(tokio::runtime::Runtime);

impl Time {
    fn stands() -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        Arc::new(Time(runtime.expect("a runtime without a driver for sockets")))
    }

    /// Advances time: due timers fire and their tasks become ready.
    pub fn passes(&self, length: Duration) {
        self.0.block_on(tokio::time::advance(length));
    }
}

/// Spawns a task of a story.
pub fn task(work: impl Future<Output = ()> + 'static) -> shuttle::future::JoinHandle<()> {
    shuttle::future::spawn_local(work)
}

/// A point at which other tasks may run.
pub async fn others() {
    shuttle::future::yield_now().await;
}

/// Waits for all tasks.
pub fn all_end(tasks: impl IntoIterator<Item = shuttle::future::JoinHandle<()>>) {
    // All tasks are spawned before the first is awaited.
    for task in tasks.into_iter().collect::<Vec<_>>() {
        shuttle::future::block_on(task).expect("it was not aborted");
    }
}

/// A mutual exclusion lock.
pub enum Mutex<T> {
    Plain(parking_lot::Mutex<T>),
    Woven(shuttle::sync::Mutex<T>),
}

/// A reader-writer lock.
pub enum RwLock<T> {
    Plain(parking_lot::RwLock<T>),
    Woven(shuttle::sync::RwLock<T>),
}

pub enum LockGuard<Plain, Woven> {
    Plain(Plain),
    Woven(Woven),
}

type MutexHeld<'a, T> = LockGuard<parking_lot::MutexGuard<'a, T>, shuttle::sync::MutexGuard<'a, T>>;
type ReadHeld<'a, T> = LockGuard<parking_lot::RwLockReadGuard<'a, T>, shuttle::sync::RwLockReadGuard<'a, T>>;
type WriteHeld<'a, T> = LockGuard<parking_lot::RwLockWriteGuard<'a, T>, shuttle::sync::RwLockWriteGuard<'a, T>>;

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        if WOVEN.get() {
            Mutex::Woven(shuttle::sync::Mutex::new(value))
        } else {
            Mutex::Plain(parking_lot::Mutex::new(value))
        }
    }

    pub fn lock(&self) -> MutexHeld<'_, T> {
        match self {
            Mutex::Plain(plain) => LockGuard::Plain(plain.lock()),
            Mutex::Woven(woven) => LockGuard::Woven(woven.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl<T> RwLock<T> {
    pub fn new(value: T) -> Self {
        if WOVEN.get() {
            RwLock::Woven(shuttle::sync::RwLock::new(value))
        } else {
            RwLock::Plain(parking_lot::RwLock::new(value))
        }
    }

    pub fn read(&self) -> ReadHeld<'_, T> {
        match self {
            RwLock::Plain(plain) => LockGuard::Plain(plain.read()),
            RwLock::Woven(woven) => LockGuard::Woven(woven.read().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    pub fn write(&self) -> WriteHeld<'_, T> {
        match self {
            RwLock::Plain(plain) => LockGuard::Plain(plain.write()),
            RwLock::Woven(woven) => LockGuard::Woven(woven.write().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> Self {
        RwLock::new(T::default())
    }
}

impl<T> std::fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mutex")
    }
}

impl<T> std::fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RwLock")
    }
}

impl<T, Plain: Deref<Target = T>, Woven: Deref<Target = T>> Deref for LockGuard<Plain, Woven> {
    type Target = T;
    fn deref(&self) -> &T {
        match self {
            LockGuard::Plain(plain) => plain,
            LockGuard::Woven(woven) => woven,
        }
    }
}

impl<T, Plain: DerefMut<Target = T>, Woven: DerefMut<Target = T>> DerefMut for LockGuard<Plain, Woven> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            LockGuard::Plain(plain) => plain,
            LockGuard::Woven(woven) => woven,
        }
    }
}
