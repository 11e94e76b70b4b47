//! Server-sent events (WHATWG rules), cut without copying.
