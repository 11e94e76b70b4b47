//! Environment of the settings: variables and files that they refer to.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Largest file that settings may name; secrets and certificates are much smaller.
pub const LONGEST_FILE: u64 = 1 << 20;

/// Resolves `${NAME}` and `..._file` references.
pub trait Environment: Send + Sync {
    /// The value of an environment variable.
    fn variable(&self, name: &str) -> Option<String>;

    /// The contents of a file named in the settings.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::FileTooLarge`] beyond 1 MiB, and [`io::ErrorKind::NotSeekable`] for
    /// anything but a regular file, because reading a pipe may block
    /// forever.
    fn file(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// The contents of the settings file itself, which may be a pipe.
    ///
    /// # Errors
    /// The system's error.
    fn settings(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.file(path)
    }

    /// The same, read again while the gateway runs.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::NotSeekable`] for anything but a regular file: a pipe can be read
    /// only once, and may block forever.
    fn settings_again(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.settings(path)
    }

    /// The path of a file that another component reads later.
    fn place(&self, path: &Path) -> PathBuf {
        path.to_path_buf()
    }
}

/// The process's environment and files.
#[derive(Clone, Debug, Default)]
pub struct ProcessEnvironment {
    /// Directory of the settings file, where relative paths start.
    pub base: PathBuf,
}

impl ProcessEnvironment {
    /// The environment of a settings file.
    #[must_use]
    pub fn of(file: &Path) -> Self {
        ProcessEnvironment { base: file.parent().map(Path::to_path_buf).unwrap_or_default() }
    }
}

impl Environment for ProcessEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let path = self.place(path);
        expect_regular(&path)?;
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(LONGEST_FILE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LONGEST_FILE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(bytes)
    }

    fn settings(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(self.place(path))
    }

    fn settings_again(&self, path: &Path) -> io::Result<Vec<u8>> {
        expect_regular(&self.place(path))?;
        self.settings(path)
    }

    fn place(&self, path: &Path) -> PathBuf {
        self.base.join(path)
    }
}

/// A directory passes: reading it fails with an error of its own.
fn expect_regular(path: &Path) -> io::Result<()> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_file() || kind.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotSeekable.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_file_is_a_regular_one_of_a_mebibyte_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let near = ProcessEnvironment { base: dir.path().to_path_buf() };
        let write = |name: &str, length: u64| std::fs::write(dir.path().join(name), vec![b'a'; length as usize]);
        write("longest", LONGEST_FILE).unwrap();
        write("longer", LONGEST_FILE + 1).unwrap();
        let kind =
            |name: &str| near.file(Path::new(name)).map(|bytes| bytes.len() as u64).map_err(|error| error.kind());
        assert_eq!(kind("longest"), Ok(LONGEST_FILE));
        assert_eq!(kind("longer"), Err(io::ErrorKind::FileTooLarge));
        assert_eq!(kind("nowhere"), Err(io::ErrorKind::NotFound));
        assert_eq!(kind("."), Err(io::ErrorKind::IsADirectory));
        assert_eq!(kind("/dev/zero"), Err(io::ErrorKind::NotSeekable));
        assert_eq!(near.settings(Path::new("longer")).unwrap().len() as u64, LONGEST_FILE + 1);
    }
}
