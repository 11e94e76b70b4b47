//! The journal's format: one JSON line per finished request, with lengths and times and without
//! content (`docs/journal.md`).
//!
//! Pure, and readable both ways: the gateway writes [`JournalHeader`] and [`JournalLine`]s, and
//! whoever replays a journal reads them. Tenants and prompt prefixes stand there as hashes that
//! are keyed with a [`HashKey`], so that nobody without the key can try names or prompts.

use serde::{Deserialize, Serialize};

use crate::types::TenantId;

/// The version of the format. A new field does not change it; a field whose meaning changes does.
pub const JOURNAL_VERSION: u32 = 1;

/// The first member of a header, by which a journal is known.
pub const JOURNAL_NAME: &str = "goodput";

/// Bytes of prompt text that one prefix hash covers beyond the one before it.
pub const PREFIX_BLOCK_BYTES: u32 = 512;

/// The first line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHeader {
    /// [`JOURNAL_NAME`].
    pub journal: String,
    /// [`JOURNAL_VERSION`].
    pub version: u32,
    /// The program's version.
    pub written_by: String,
    /// When the file was opened: Unix time in nanoseconds.
    pub opened_unix_ns: u64,
    /// Id of the key: hashes of two files are comparable only if it is equal.
    pub hash_key_id: String,
    /// Source of the key.
    pub hash_key: KeySource,
    /// [`PREFIX_BLOCK_BYTES`].
    pub prefix_block_bytes: u32,
}

impl JournalHeader {
    /// The header of a file that is opened now.
    #[must_use]
    pub fn new(key: &HashKey, opened_unix_ns: u64) -> Self {
        JournalHeader {
            journal: JOURNAL_NAME.to_owned(),
            version: JOURNAL_VERSION,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
            opened_unix_ns,
            hash_key_id: key.id(),
            hash_key: key.source,
            prefix_block_bytes: PREFIX_BLOCK_BYTES,
        }
    }
}

/// One finished request. What is not known is absent. Milliseconds have three decimals.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JournalLine {
    /// Arrival of the head: Unix time in nanoseconds. Inside one file all arrivals come from one
    /// monotonic clock.
    pub arrival_unix_ns: u64,
    /// The path, as the documentation writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Keyed hash of the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The SLO class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The model as the routes name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The pool of the last attempt, else the one in whose queue it waited, else the route's first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The engine of the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// The request asked for a stream.
    #[serde(default)]
    pub stream: bool,
    /// Choices asked for: `n` times prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choices: Option<u64>,
    /// The largest output cap that the request stated, per choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_tokens: Option<u64>,
    /// UTF-8 bytes of the prompt's text; token ids are not in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_bytes: Option<u64>,
    /// Prompt tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// `usage` or `estimate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_source: Option<String>,
    /// Prompt tokens that the engine read from its cache, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Output tokens over all choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    /// `usage`, `events` or `estimate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens_source: Option<String>,
    /// Of the output, reasoning tokens, as the engine reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_tokens: Option<u64>,
    /// Keyed hashes of the prompt's blocks: equal hashes at one place mean equal prompts up to the
    /// end of that block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<String>,
    /// Number of attempts.
    #[serde(default)]
    pub attempts: u32,
    /// The HTTP status that the client received; 499 if it left before.
    #[serde(default)]
    pub status: u16,
    /// From the head to the last byte of the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_ms: Option<f64>,
    /// How much of that the client had sent nothing: objectives do not count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_wait_ms: Option<f64>,
    /// Time in the gateway's queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// Time to first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Time per output token, of the worst choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// The largest gap between token events of one choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_gap_ms: Option<f64>,
    /// From the request's start to its finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2e_ms: Option<f64>,
    /// From arrival to the end, however it ended.
    #[serde(default)]
    pub total_ms: f64,
    /// `met`, `missed` or `excluded`.
    #[serde(default)]
    pub outcome: String,
    /// The reason, if it was not met.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The code of the gateway's own error, if it sent one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// Source of a [`HashKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeySource {
    /// A file that the settings name: hashes are the same over restarts and gateways.
    File,
    /// Chance, at the start of the process.
    Process,
}

/// The key of all hashes in a journal. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct HashKey {
    key: [u8; 32],
    source: KeySource,
}

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HashKey").field("source", &self.source).finish_non_exhaustive()
    }
}

/// Keeps this key apart from whatever else is derived of the same secret.
const CONTEXT: &str = "goodput journal, hashes of tenants and prompt prefixes, v1";

impl HashKey {
    /// Derives the key from a secret of any length.
    #[must_use]
    pub fn from_secret(secret: &[u8]) -> Self {
        HashKey { key: blake3::derive_key(CONTEXT, secret), source: KeySource::File }
    }

    /// A key for this process alone.
    #[must_use]
    pub fn from_chance(key: [u8; 32]) -> Self {
        HashKey { key, source: KeySource::Process }
    }

    /// Its source.
    #[must_use]
    pub fn source(&self) -> KeySource {
        self.source
    }

    /// The hash of a tenant: 16 hexadecimal digits.
    #[must_use]
    pub fn tenant(&self, tenant: &TenantId) -> String {
        self.hex::<8>(b"tenant", tenant.as_str().as_bytes())
    }

    /// The hash of a prompt's block: 12 hexadecimal digits.
    #[must_use]
    pub fn block(&self, block: u64) -> String {
        self.hex::<6>(b"prefix", &block.to_le_bytes())
    }

    /// Seed of the in-memory block hashes, from which the hashes here are derived: equal keys give equal
    /// hashes.
    #[must_use]
    pub fn block_seed(&self) -> u64 {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"blocks");
        u64::from_le_bytes(*hasher.finalize().as_bytes().first_chunk().unwrap_or(&[0; 8]))
    }

    /// Tells it from other keys, and nothing of it: 8 hexadecimal digits.
    #[must_use]
    pub fn id(&self) -> String {
        self.hex::<4>(b"key id", b"")
    }

    /// `kind` keeps the sorts of hashes apart.
    fn hex<const BYTES: usize>(&self, kind: &[u8; 6], of: &[u8]) -> String {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(kind).update(of);
        let hash = hasher.finalize().to_hex();
        hash[..2 * BYTES].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_the_same_for_ever_and_different_under_another_key() {
        let key = HashKey::from_secret(b"a secret");
        assert_eq!(key, HashKey::from_secret(b"a secret"));
        assert_eq!(key.tenant(&TenantId::from("acme")), "a15d4cf3700f7791");
        assert_eq!(key.block(7), "f9ea477f5e44");
        assert_eq!(key.id(), "11bd06a5");
        let other = HashKey::from_secret(b"another");
        assert_ne!(key.tenant(&TenantId::from("acme")), other.tenant(&TenantId::from("acme")));
        assert_ne!(key.block(7), other.block(7));
        assert_ne!(key.id(), other.id());
    }

    #[test]
    fn a_tenant_whose_name_is_a_block_hashes_differently() {
        let key = HashKey::from_chance([3; 32]);
        let name = String::from_utf8(0x6161_6161_6161_6161_u64.to_le_bytes().to_vec()).unwrap();
        assert!(!key.tenant(&TenantId::from(name.as_str())).starts_with(&key.block(0x6161_6161_6161_6161)));
    }

    #[test]
    fn a_key_is_never_shown() {
        let shown = format!("{:?}", HashKey::from_chance([0xAB; 32]));
        assert!(!shown.contains("171") && !shown.to_lowercase().contains("abab"), "{shown}");
    }

    #[test]
    fn a_line_reads_back_and_an_unknown_field_is_passed_over() {
        let line = JournalLine {
            arrival_unix_ns: 1_790_000_000_123_456_789,
            class: Some("chat".to_owned()),
            stream: true,
            prefix: vec!["0123456789ab".to_owned()],
            ttft_ms: Some(12.345),
            total_ms: 20.0,
            outcome: "met".to_owned(),
            ..JournalLine::default()
        };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(serde_json::from_str::<JournalLine>(&text).unwrap(), line);
        let newer = text.replacen('{', "{\"something_new\":[1],", 1);
        assert_eq!(serde_json::from_str::<JournalLine>(&newer).unwrap(), line);
    }
}
