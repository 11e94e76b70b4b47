//! Reads the settings again when they change.
