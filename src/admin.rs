//! The admin port: metrics, liveness, readiness.
