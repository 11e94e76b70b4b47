//! Which promise applies to a request.
