//! The limit of open files.

/// Raises the soft limit to the hard one, because each client takes two file descriptors (its own and an
/// engine's) and shells and service managers often start with 1,024.
pub(super) fn raise_limit() {
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
