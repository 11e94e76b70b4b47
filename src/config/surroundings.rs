//! What settings may refer to: variables of the environment, and files beside them.

use std::io;
use std::path::{Path, PathBuf};

/// Answers what a `${NAME}` or a `..._file` in the settings refers to.
pub trait Surroundings: Send + Sync {
    /// The value of a variable.
    fn variable(&self, name: &str) -> Option<String>;

    /// The bytes of a file.
    ///
    /// # Errors
    /// Whatever the system says.
    fn file(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Where a file is that somebody else will read later.
    fn place(&self, path: &Path) -> PathBuf {
        path.to_path_buf()
    }
}

/// The process's own environment and files.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Where relative paths begin: the directory of the settings file.
    pub base: PathBuf,
}

impl Process {
    /// The surroundings of a settings file.
    #[must_use]
    pub fn of(file: &Path) -> Self {
        Process { base: file.parent().map(Path::to_path_buf).unwrap_or_default() }
    }
}

impl Surroundings for Process {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(self.place(path))
    }

    fn place(&self, path: &Path) -> PathBuf {
        self.base.join(path)
    }
}
