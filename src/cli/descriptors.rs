//! The limit of open files.

/// Raises it as far as the system lets this process: each client that is served holds a file
/// descriptor, and one for its engine, while shells and service managers often begin with 1,024.
pub(super) fn raise_limit() {
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
