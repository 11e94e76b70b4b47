//! External parts of the tests, and their location.

use std::io::Write;
use std::path::{Path, PathBuf};

/// Why a test cannot run here.
pub type Missing = String;

/// Runs a test that needs a part. In CI every part is required, except those that the gate declared
/// unavailable (`GOODPUT_WAIVED_PART`, names of programs).
pub fn with_parts(name: &str, test: impl FnOnce() -> Result<(), Missing>) {
    if let Err(missing) = test() {
        let waived = std::env::var("GOODPUT_WAIVED_PART").unwrap_or_default();
        let waived = waived.split_whitespace().any(|part| missing.starts_with(part));
        assert!(waived || std::env::var_os("CI").is_none(), "{name}: {missing}");
        // Past the capture of a test's output: nothing is left out in silence.
        let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {missing}");
    }
}

pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e")
}

/// Output folder of `prepare.sh`.
pub fn parts() -> PathBuf {
    let beside = || Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map(Path::to_path_buf).unwrap_or_default();
    std::env::var_os("GOODPUT_E2E_PARTS").map_or_else(beside, PathBuf::from)
}

pub fn python() -> Result<PathBuf, Missing> {
    let python = parts().join("e2e-venv/bin/python");
    if python.is_file() { Ok(python) } else { Err("no Python environment; run tests/e2e/prepare.sh".to_owned()) }
}

/// A program on the path, or among the parts.
pub fn find(name: &str, advice: &str) -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([parts().join("e2e-venv/bin")]);
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| format!("{name} is missing; {advice}"))
}
