//! Written down once: metrics, access line, and later journal and span.

pub mod settings;
