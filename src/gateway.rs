//! The life of one request, told once, top to bottom.
