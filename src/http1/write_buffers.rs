//! Unused buffers for writing, one set per thread for both directions.
//!
//! A message that the socket accepts at once needs its buffer only briefly; idle connections keep none.

use std::cell::RefCell;

/// Unused buffers kept per thread.
const SPARE: usize = 16;

/// Larger buffers are let go.
const LARGEST: usize = 32 * 1024;

thread_local! {
    /// Last returned first, because it is still in the processor's caches.
    static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer, which may have a capacity already.
#[must_use]
pub fn take_write_buffer() -> Vec<u8> {
    BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default()
}

/// Keeps a buffer for the thread's next message.
pub fn return_write_buffer(mut buffer: Vec<u8>) {
    if (1..=LARGEST).contains(&buffer.capacity()) {
        buffer.clear();
        // A thread that ends has given its buffers up already.
        let _ = BUFFERS.try_with(|buffers| {
            let mut buffers = buffers.borrow_mut();
            if buffers.len() < SPARE {
                buffers.push(buffer);
            }
        });
    }
}
