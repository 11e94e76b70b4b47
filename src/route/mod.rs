//! Which pools, which engine, given health, load and affinity.
