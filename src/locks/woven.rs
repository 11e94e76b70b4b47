//! Locks whose order a test can take over, and the runs that do.

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

/// Runs of each kind for one story.
const RUNS: usize = 400;
/// Changes of priority in a run of the kind that looks for deep orders.
const DEPTH: usize = 3;
/// What a task of a story may take of stack: ours are those of a debug build.
const STACK: usize = 512 * 1024;

/// Tries a story under many orders of its steps: at random, and by random priorities, which find
/// an order that needs one task to be slow for long. Fails at the first that panics or in which
/// somebody waits for ever, and prints how to repeat it. Time stands still in each of them, but
/// where the story has it pass.
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
        // All tasks of a story run on one thread, so this rules for all.
        let _ruled = time.0.enter();
        story(&time);
    });
}

/// However a run ends, the next test of this thread has its own locks.
struct ResetOnDrop;

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        WOVEN.set(false);
    }
}

/// The time of a story.
pub struct Time(tokio::runtime::Runtime);

impl Time {
    fn stands() -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        Arc::new(Time(runtime.expect("a runtime without a driver for sockets")))
    }

    /// Time passes: alarms ring, and whoever they wake can go on.
    pub fn passes(&self, length: Duration) {
        self.0.block_on(tokio::time::advance(length));
    }
}

/// A task of a story.
pub fn task(work: impl Future<Output = ()> + 'static) -> shuttle::future::JoinHandle<()> {
    shuttle::future::spawn_local(work)
}

/// Others may go on here.
pub async fn others() {
    shuttle::future::yield_now().await;
}

/// Waits for all tasks.
pub fn all_end(tasks: impl IntoIterator<Item = shuttle::future::JoinHandle<()>>) {
    // Begun all of them before the first is waited for.
    for task in tasks.into_iter().collect::<Vec<_>>() {
        shuttle::future::block_on(task).expect("it was not aborted");
    }
}

/// One owner at a time.
pub enum Mutex<T> {
    Plain(parking_lot::Mutex<T>),
    Woven(shuttle::sync::Mutex<T>),
}

/// Many readers, or one writer.
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
