//! What every class has counted over its windows, as a file that outlives the process.
//!
//! The first line says what it is: a name, a version, and the BLAKE3 hash of the rest, which is JSON. A file that was
//! torn by a full disk or a power cut does not match its hash; one that somebody else owns has another name, and is
//! never written over. Saving writes a file beside it, syncs it and renames it, so that there is always a whole one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::burn::BurnState;

/// The beginning of the first line.
const NAME: &str = "goodput-slo-state";

/// The only supported version.
const VERSION: u32 = 1;

/// Longest file that is accepted: 50 classes take about 1.5 MB.
const LONGEST: u64 = 64 << 20;

/// All classes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SloState {
    /// Unix time of the saving, in seconds.
    pub(super) saved_at: u64,
    /// Each class, by its name.
    pub(super) classes: BTreeMap<String, ClassCounts>,
}

/// One class: all of it, and by prompt length.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClassCounts {
    pub(super) all: BurnState,
    pub(super) lengths: BTreeMap<String, BurnState>,
}

/// Result of reading a file.
#[derive(Debug)]
pub enum StateLoad {
    /// Here it is.
    Restored(SloState),
    /// There is none yet.
    Absent,
    /// It is ours and not whole; it will be written anew.
    Torn,
    /// It was written by another version, which may still want it.
    OtherVersion,
    /// It is none of ours.
    Foreign,
    /// It cannot be read.
    Unreadable(io::Error),
}

impl StateLoad {
    /// The value of the label `result`.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            StateLoad::Restored(_) => "restored",
            StateLoad::Absent => "absent",
            StateLoad::Torn => "torn",
            StateLoad::OtherVersion => "other_version",
            StateLoad::Foreign => "foreign",
            StateLoad::Unreadable(_) => "unreadable",
        }
    }

    /// All values.
    pub(super) const ALL: [&'static str; 6] = ["restored", "absent", "torn", "other_version", "foreign", "unreadable"];

    /// Whether the file may be written over.
    #[must_use]
    pub const fn may_be_replaced(&self) -> bool {
        matches!(self, StateLoad::Restored(_) | StateLoad::Absent | StateLoad::Torn)
    }
}

/// Result of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSave {
    /// The file is this gateway's, and new.
    Success,
    /// Saved over what another process has saved meanwhile.
    Conflict,
    /// The file is as it was.
    Failure,
}

impl StateSave {
    /// Every result.
    pub(super) const ALL: [StateSave; 3] = [StateSave::Success, StateSave::Conflict, StateSave::Failure];

    /// The value of the label `result`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            StateSave::Success => "success",
            StateSave::Conflict => "conflict",
            StateSave::Failure => "failure",
        }
    }
}

/// The file of the state.
#[derive(Clone, Debug)]
pub struct StateFile {
    path: PathBuf,
}

impl StateFile {
    /// A file at this path; its folder must be there.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        StateFile { path }
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads it. Blocks.
    #[must_use]
    pub fn load(&self) -> StateLoad {
        let mut bytes = Vec::new();
        let read = std::fs::metadata(&self.path).and_then(|found| match found.is_file() || found.is_dir() {
            true => File::open(&self.path)?.take(LONGEST + 1).read_to_end(&mut bytes),
            // To open a pipe may block for ever.
            false => Err(io::Error::new(io::ErrorKind::NotSeekable, "it is no regular file")),
        });
        match read {
            Ok(_) => decode(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => StateLoad::Absent,
            Err(error) => StateLoad::Unreadable(error),
        }
    }

    /// The first line of the file, which no two savings have in common; `None` without a file.
    #[must_use]
    pub fn stamp(&self) -> Option<StateStamp> {
        let mut line = Vec::new();
        let mut file = File::open(&self.path).ok()?.take(STAMP);
        file.read_to_end(&mut line).ok()?;
        Some(StateStamp(line))
    }

    /// Replaces it by this state, whole or not at all; returns the new stamp. Blocks until it is on the disk.
    ///
    /// # Errors
    /// Whatever the system says.
    pub fn save(&self, state: &SloState) -> io::Result<StateStamp> {
        let bytes = encode(state);
        // A unique name, because another gateway may be configured with the same file.
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{:016x}.new", rand::random::<u64>()));
        let beside = self.path.with_file_name(name);
        self.replace(&bytes, &beside).inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
        Ok(StateStamp(bytes[..bytes.len().min(STAMP as usize)].to_vec()))
    }

    fn replace(&self, bytes: &[u8], beside: &Path) -> io::Result<()> {
        let mut file = File::create(beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(beside, &self.path)?;
        // The rename itself is on the disk once its folder is.
        match self.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

/// The beginning of a file, by which a saving of another gateway is noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateStamp(Vec<u8>);

/// Bytes of a stamp: name, version and hash.
const STAMP: u64 = 84;

fn encode(state: &SloState) -> Vec<u8> {
    let body = serde_json::to_vec(state).expect("names and numbers are always JSON");
    let mut bytes = format!("{NAME} {VERSION} {}\n", blake3::hash(&body).to_hex()).into_bytes();
    bytes.extend_from_slice(&body);
    bytes
}

fn decode(bytes: &[u8]) -> StateLoad {
    if bytes.is_empty() {
        return StateLoad::Torn;
    }
    if !bytes.starts_with(NAME.as_bytes()) {
        // Cut so early that only a part of the name is left.
        return if NAME.as_bytes().starts_with(bytes) { StateLoad::Torn } else { StateLoad::Foreign };
    }
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else { return StateLoad::Torn };
    let (line, body) = (String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 1..]);
    let mut words = line.split(' ').skip(1);
    let (version, hash) = (words.next().and_then(|word| word.parse::<u32>().ok()), words.next());
    match version {
        Some(VERSION) if hash == Some(blake3::hash(body).to_hex().as_str()) => {
            serde_json::from_slice(body).map_or(StateLoad::Torn, StateLoad::Restored)
        }
        Some(VERSION) | None => StateLoad::Torn,
        Some(_) => StateLoad::OtherVersion,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::burn::Burn;
    use super::*;
    use crate::types::Tick;

    fn state() -> SloState {
        let unix = Duration::from_secs(1_800_000_000);
        let mut burn = Burn::at_epoch(0.9, Duration::from_secs(28 * 86_400), Tick::ZERO, unix);
        (0..100).for_each(|second| burn.note(second % 9 > 0, Tick::from_millis(second * 1000)));
        let counts = ClassCounts { all: burn.state(), lengths: BTreeMap::from([("short".to_owned(), burn.state())]) };
        SloState { saved_at: unix.as_secs(), classes: BTreeMap::from([("chat".to_owned(), counts)]) }
    }

    #[test]
    fn what_is_saved_is_read_again_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::at(folder.path().join("slo.state"));
        assert!(matches!(file.load(), StateLoad::Absent));
        for _ in 0..2 {
            file.save(&state()).unwrap();
            assert!(matches!(file.load(), StateLoad::Restored(read) if read == state()));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        let full = StateFile::at(folder.path().join("full"));
        std::fs::create_dir(full.path()).unwrap();
        assert!(full.save(&state()).is_err(), "a folder cannot be replaced");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "and nothing is left of the attempt");
        let nowhere = StateFile::at(folder.path().join("nowhere/slo.state"));
        assert!(nowhere.save(&state()).is_err());
        for other in [folder.path(), Path::new("/dev/null")] {
            assert!(matches!(StateFile::at(other.to_owned()).load(), StateLoad::Unreadable(_)), "{}", other.display());
        }
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_torn_and_never_half_read() {
        let whole = encode(&state());
        for length in 0..whole.len() {
            assert!(matches!(decode(&whole[..length]), StateLoad::Torn), "{length}");
        }
    }

    #[test]
    fn a_saving_of_another_gateway_is_told_by_the_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (StateFile::at(folder.path().join("s")), StateFile::at(folder.path().join("s")));
        assert_eq!(one.stamp(), None);
        let saved = one.save(&state()).unwrap();
        assert_eq!(one.stamp(), Some(saved.clone()));
        let theirs = other.save(&SloState { saved_at: 7, ..state() }).unwrap();
        assert_ne!(one.stamp(), Some(saved));
        assert_eq!(one.stamp(), Some(theirs));
    }

    #[test]
    fn what_is_none_of_ours_or_of_another_version_is_not_written_over() {
        let foreign = decode(b"slo_classes:\n");
        assert!(matches!(foreign, StateLoad::Foreign) && !foreign.may_be_replaced());
        let newer = decode(b"goodput-slo-state 2 abc\n{}");
        assert!(matches!(newer, StateLoad::OtherVersion) && !newer.may_be_replaced());
        assert!(decode(b"").may_be_replaced());
    }

    proptest! {
        #[test]
        fn a_flipped_byte_is_noticed(at in 0usize..100_000, with in 1u8..=255) {
            let mut bytes = encode(&state());
            let at = at % bytes.len();
            bytes[at] ^= with;
            prop_assert!(!matches!(decode(&bytes), StateLoad::Restored(read) if read != state()));
        }

        #[test]
        fn no_bytes_break_the_reading(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
