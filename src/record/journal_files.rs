//! Files of a journal: the current one, and rotated ones beside it.
//!
//! Blocking, for a dedicated thread. The path of the settings is always the current file; a rotated file has
//! the time of its rotation appended, and `.gz`.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::access::time_of_day;
use super::journal::{JOURNAL_NAME, JOURNAL_VERSION, JournalHeader};

/// More than any header takes.
const LONGEST_HEADER: u64 = 4096;

/// The file that is written. See the module.
#[derive(Debug)]
pub(super) struct JournalFile {
    path: PathBuf,
    open: Option<OpenJournal>,
}

#[derive(Debug)]
struct OpenJournal {
    /// Holds the lock by which no two processes write one journal.
    file: File,
    /// Unix time.
    opened: Duration,
    length: u64,
    /// Headers counted.
    lines: u64,
    /// A write that failed has left half a line.
    is_torn: bool,
    /// Device and inode: a different file under the name means that this one was moved.
    identity: (u64, u64),
}

/// The circumstances of one write.
#[derive(Debug)]
pub(super) struct JournalTurn {
    /// The moment: Unix time.
    pub(super) wall: Duration,
    /// For a file that is opened.
    pub(super) header: JournalHeader,
    /// Size at which a file is rotated, bytes.
    pub(super) max_size: u64,
    /// The open file is rotated for its age.
    pub(super) is_old: bool,
}

/// Result of one write.
#[derive(Debug, Default)]
pub(super) struct JournalWritten {
    /// The lines are in the file: all of them, or none.
    pub(super) is_written: bool,
    /// A file was opened.
    pub(super) is_new: bool,
    /// A file was rotated, or should have been.
    pub(super) has_rotated: bool,
    /// Everything that failed.
    pub(super) failed: Vec<io::Error>,
}

impl JournalFile {
    /// Nothing is opened yet.
    pub(super) fn new(path: PathBuf) -> Self {
        JournalFile { path, open: None }
    }

    /// Appends whole lines. Opens the file if necessary, and rotates it by age and size.
    pub(super) fn write(&mut self, lines: &[u8], turn: &JournalTurn) -> JournalWritten {
        let mut done = JournalWritten::default();
        let rotates = |file: &mut Self, done: &mut JournalWritten| {
            done.has_rotated = true;
            done.failed.extend(file.rotate(turn.wall).err());
        };
        if turn.is_old {
            rotates(self, &mut done);
        }
        let opened = self.open(turn.wall, &turn.header).inspect(|is_new| done.is_new = *is_new);
        let appended = opened.and_then(|_| self.append(lines));
        done.is_written = appended.is_ok();
        done.failed.extend(appended.err());
        if self.length() >= turn.max_size {
            rotates(self, &mut done);
        }
        done
    }

    /// Opens the file if it is not open, or no longer has its name: true if it did. A journal of an earlier
    /// process is continued after a new header.
    ///
    /// # Errors The system's error; [`io::ErrorKind::ResourceBusy`] if another process writes it.
    fn open(&mut self, wall: Duration, header: &JournalHeader) -> io::Result<bool> {
        if self.open.as_ref().is_some_and(|open| open.has_name(&self.path)) {
            return Ok(false);
        }
        self.open = None;
        let mut open = match self.left_behind(wall)? {
            Some(left) => left,
            None => self.create(wall)?,
        };
        let mut line = serde_json::to_vec(header)?;
        line.push(b'\n');
        open.append(&line)?;
        self.open = Some(open);
        Ok(true)
    }

    fn create(&self, wall: Duration) -> io::Result<OpenJournal> {
        let file = OpenOptions::new().append(true).create_new(true).mode(0o640).open(&self.path)?;
        lock(&file)?;
        let identity = identity_of(&file.metadata()?);
        Ok(OpenJournal { file, opened: wall, length: 0, lines: 0, is_torn: false, identity })
    }

    /// The journal that an earlier process left; a file that is none is moved out of the way.
    fn left_behind(&self, wall: Duration) -> io::Result<Option<OpenJournal>> {
        let mut file = match OpenOptions::new().append(true).read(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        lock(&file)?;
        let Some(opened) = first_header(&mut file)? else {
            fs::rename(&self.path, rotated_name(&self.path, wall))?;
            return Ok(None);
        };
        let mut last = [0];
        file.read_exact_at(&mut last, meta.len() - 1)?;
        let (is_torn, identity) = (last != *b"\n", identity_of(&meta));
        Ok(Some(OpenJournal { file, opened, length: meta.len(), lines: 1, is_torn, identity }))
    }

    /// Appends whole lines. A partial write is undone as far as possible.
    ///
    /// # Errors The system's error; then none of the lines is in the file.
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let open = self.open.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        if lines.is_empty() { Ok(()) } else { open.append(lines) }
    }

    /// Bytes written to the open file.
    fn length(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.length)
    }

    /// When the open file was begun: Unix time.
    pub(super) fn opened(&self) -> Option<Duration> {
        self.open.as_ref().map(|open| open.opened)
    }

    /// Renames the open file to a rotated one, if it has lines beside its header.
    ///
    /// # Errors The system's error; the file stays open then.
    fn rotate(&mut self, wall: Duration) -> io::Result<()> {
        let Some(open) = self.open.as_mut() else { return Ok(()) };
        if open.lines <= 1 {
            // Its age counts from here.
            open.opened = wall;
            return Ok(());
        }
        if open.has_name(&self.path) {
            open.file.sync_all()?;
            fs::rename(&self.path, rotated_name(&self.path, wall))?;
        }
        self.open = None;
        Ok(())
    }

    /// Hands everything to the disk.
    ///
    /// # Errors
    /// Whatever the system says.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.open.as_ref().map_or(Ok(()), |open| open.file.sync_all())
    }
}

impl OpenJournal {
    fn has_name(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|meta| identity_of(&meta) == self.identity)
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.is_torn {
            self.file.write_all(b"\n")?;
            (self.is_torn, self.length) = (false, self.length + 1);
        }
        let written = self.file.write_all(lines);
        match &written {
            Ok(()) => (self.length, self.lines) = (self.length + lines.len() as u64, self.lines + 1),
            Err(_) => self.is_torn = self.file.set_len(self.length).is_err(),
        }
        written
    }
}

/// When a journal was begun, by the header on its first line; none if it has no such line.
fn first_header(file: &mut File) -> io::Result<Option<Duration>> {
    let mut start = Vec::new();
    file.take(LONGEST_HEADER).read_to_end(&mut start)?;
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let header = serde_json::from_slice::<JournalHeader>(line).ok();
    let ours = header.filter(|header| header.journal == JOURNAL_NAME && header.version == JOURNAL_VERSION);
    Ok(ours.map(|header| Duration::from_nanos(header.opened_unix_ns)))
}

fn identity_of(meta: &fs::Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// File systems without locks are accepted.
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process writes this journal"))
        }
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// An unused name: `journal.jsonl.20260501T120000.123Z`, with `-1` appended if that exists.
fn rotated_name(path: &Path, wall: Duration) -> PathBuf {
    let moment = time_of_day(wall);
    let moment: String = moment.iter().filter(|byte| !b"-:".contains(byte)).map(|byte| char::from(*byte)).collect();
    let named = |suffix: &str| with_suffix(path, &format!(".{moment}{suffix}"));
    let is_free = |name: &Path| !name.exists() && !with_suffix(name, ".gz").exists();
    let first = Some(named("")).filter(|name| is_free(name));
    first.unwrap_or_else(|| {
        let more = (1..).map(|count: u32| named(&format!("-{count:03}")));
        more.into_iter().find(|name| is_free(name)).expect("there are more numbers than files")
    })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Compresses rotated files if configured, and deletes the oldest beyond `keep`.
///
/// # Errors The first error; the remaining files are processed anyway.
pub(super) fn tidy(path: &Path, keep: usize, gzip: bool) -> io::Result<()> {
    let mut result = Ok(());
    let mut note = |done: io::Result<()>| {
        if let Err(error) = done
            && result.is_ok()
        {
            result = Err(error);
        }
    };
    for file in beside(path, &[".gz.tmp"])? {
        note(fs::remove_file(file));
    }
    // Removed first, because the disk may be full.
    let rotated = beside(path, &["", ".gz"])?;
    let (old, kept) = rotated.split_at(rotated.len().saturating_sub(keep));
    old.iter().for_each(|file| note(fs::remove_file(file)));
    if gzip {
        let plain = kept.iter().filter(|file| file.extension().is_none_or(|end| end != "gz"));
        plain.for_each(|file| note(compress(file)));
    }
    result
}

/// Rotated files of this journal whose names end so, oldest first.
fn beside(path: &Path, ends: &[&str]) -> io::Result<Vec<PathBuf>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let stem = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let is_ours = name.to_str().is_some_and(|name| is_rotated(name, &stem, ends));
        if is_ours {
            found.push(folder.join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a file's name is one of [`rotated_name`], with one of these ends.
fn is_rotated(name: &str, stem: &str, ends: &[&str]) -> bool {
    let Some(rest) = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('.')) else { return false };
    let like = |text: &str, shape: &str| {
        text.len() == shape.len()
            && text.bytes().zip(shape.bytes()).all(|(byte, kind)| match kind {
                b'0' => byte.is_ascii_digit(),
                _ => byte == kind,
            })
    };
    ends.iter().any(|end| {
        rest.strip_suffix(end)
            .is_some_and(|moment| like(moment, "00000000T000000.000Z") || like(moment, "00000000T000000.000Z-000"))
    })
}

fn compress(file: &Path) -> io::Result<()> {
    let (half, whole) = (with_suffix(file, ".gz.tmp"), with_suffix(file, ".gz"));
    let result = write_compressed(file, &half).and_then(|()| fs::rename(&half, whole));
    match result {
        Ok(()) => fs::remove_file(file),
        Err(error) => {
            let _ = fs::remove_file(half);
            Err(error)
        }
    }
}

fn write_compressed(from: &Path, to: &Path) -> io::Result<()> {
    let mut from = BufReader::with_capacity(1 << 16, File::open(from)?);
    let to = OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(to)?;
    let mut encoder = GzEncoder::new(BufWriter::with_capacity(1 << 16, to), Compression::fast());
    io::copy(&mut from, &mut encoder)?;
    encoder.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;

    use super::*;
    use crate::record::journal::HashKey;

    fn header() -> JournalHeader {
        JournalHeader::new(&HashKey::from_chance([7; 32]), at(0).as_nanos() as u64)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1_790_000_000 + seconds)
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The lines of a file, headers as `header`.
    fn lines(text: &str) -> Vec<&str> {
        text.lines().map(|line| if line.starts_with("{\"journal\":\"goodput\",") { "header" } else { line }).collect()
    }

    fn unzipped(path: &Path) -> String {
        let mut text = String::new();
        GzDecoder::new(File::open(path).unwrap()).read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_rotated_file_has_its_moment_in_its_name_and_the_next_one_its_own_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.jsonl");
        let mut file = JournalFile::new(path.clone());
        assert!(file.open(at(0), &header()).unwrap() && !file.open(at(0), &header()).unwrap());
        file.append(b"{\"a\":1}\n").unwrap();
        assert_eq!(file.length(), fs::metadata(&path).unwrap().len());
        file.rotate(at(60)).unwrap();
        file.rotate(at(61)).unwrap();
        assert!(file.open(at(61), &header()).unwrap());
        file.rotate(at(62)).unwrap();
        let rotated = "j.jsonl.20260921T141420.000Z";
        assert_eq!(names(folder.path()), ["j.jsonl", rotated], "without lines nothing is rotated");
        assert_eq!(lines(&fs::read_to_string(&path).unwrap()), ["header"]);
        assert_eq!(lines(&fs::read_to_string(folder.path().join(rotated)).unwrap()), ["header", "{\"a\":1}"]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_journal_of_an_earlier_process_goes_on_behind_a_header_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        let mut first = JournalFile::new(path.clone());
        first.open(at(0), &header()).unwrap();
        first.append(b"{\"a\":1}\n{\"torn").unwrap();
        drop(first);
        let mut second = JournalFile::new(path.clone());
        second.open(at(100), &header()).unwrap();
        second.append(b"{\"b\":1}\n").unwrap();
        assert_eq!(second.opened(), Some(at(0)), "its age is that of the file");
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(lines(&text), ["header", "{\"a\":1}", "{\"torn", "header", "{\"b\":1}"]);
    }

    #[test]
    fn a_file_that_is_no_journal_is_moved_away_and_two_of_one_moment_are_both_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        fs::write(&path, "something else\n").unwrap();
        fs::write(folder.path().join("j.20260921T141320.000Z.gz"), "older").unwrap();
        let mut file = JournalFile::new(path.clone());
        file.open(at(0), &header()).unwrap();
        assert_eq!(names(folder.path()), ["j", "j.20260921T141320.000Z-001", "j.20260921T141320.000Z.gz"]);
        assert_eq!(fs::read(folder.path().join("j.20260921T141320.000Z-001")).unwrap(), b"something else\n");
    }

    #[test]
    fn two_processes_cannot_write_one_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        let (mut first, mut second) = (JournalFile::new(path.clone()), JournalFile::new(path));
        first.open(at(0), &header()).unwrap();
        let error = second.open(at(1), &header()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(names(folder.path()), ["j"], "the first one's file stays where it is");
        drop(first);
        second.open(at(2), &header()).unwrap();
    }

    #[test]
    fn a_file_that_was_moved_away_or_removed_is_opened_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        let mut file = JournalFile::new(path.clone());
        file.open(at(0), &header()).unwrap();
        fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        assert!(file.open(at(1), &header()).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(file.open(at(2), &header()).unwrap());
        file.append(b"{}\n").unwrap();
        assert_eq!(lines(&fs::read_to_string(&path).unwrap()), ["header", "{}"]);
    }

    #[test]
    fn the_oldest_go_the_rest_is_compressed_and_strangers_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j");
        let mut file = JournalFile::new(path.clone());
        for number in 0..5 {
            file.open(at(number), &header()).unwrap();
            file.append(format!("{{\"n\":{number}}}\n").as_bytes()).unwrap();
            file.rotate(at(number)).unwrap();
        }
        let moment = "20260921T141320.000Z";
        for stranger in ["j.notes", &format!("j.{moment}.bak"), &format!("k.{moment}"), &format!("j.{moment}.gz.tmp")] {
            fs::write(folder.path().join(stranger), "x").unwrap();
        }
        tidy(&path, 2, true).unwrap();
        let left = [
            "j.20260921T141320.000Z.bak",
            "j.20260921T141323.000Z.gz",
            "j.20260921T141324.000Z.gz",
            "j.notes",
            "k.20260921T141320.000Z",
        ];
        assert_eq!(names(folder.path()), left);
        assert_eq!(lines(&unzipped(&folder.path().join(left[1]))), ["header", "{\"n\":3}"]);
        tidy(&path, 1, false).unwrap();
        assert_eq!(names(folder.path()).len(), 4);
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_path_that_is_a_folder_are_told_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = JournalFile::new(folder.path().join("nowhere/j"));
        assert_eq!(file.open(at(0), &header()).unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut file = JournalFile::new(folder.path().to_path_buf());
        assert_eq!(file.open(at(0), &header()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }
}
