//! Tools that make load and stand in for engines.
