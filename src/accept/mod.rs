//! Listeners, TLS, HTTP/1 and HTTP/2 limits, drain.

pub mod settings;
