//! Finds the tenant that an API key belongs to.
//!
//! A tenant is identified by its key only; no other header grants rights. The settings hold BLAKE3
//! hashes, never keys, so nothing here can print a key: the presented key is hashed and the hash
//! looked up. The lookup's timing may reveal the position of a *hash*, which says nothing about a
//! key; the final comparison is constant-time.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use subtle::ConstantTimeEq;

use crate::types::TenantId;

/// The alternative header for a key.
const API_KEY: &str = "x-api-key";

/// The caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The tenant.
    pub tenant: TenantId,
    /// The label of the presented key, if it has one.
    pub key_label: Option<Arc<str>>,
}

/// Why no tenant was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No key.
    #[error("the request carries no API key")]
    Missing,
    /// A key of no tenant.
    #[error("the API key belongs to no tenant")]
    Unknown,
    /// Two different keys.
    #[error("the request carries two different API keys")]
    TwoKeys,
}

/// Hash of an API key, as stored in the settings.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Hashes a key.
    #[must_use]
    pub fn of(key: &[u8]) -> Self {
        KeyHash(*blake3::hash(key).as_bytes())
    }

    /// Parses 64 hexadecimal digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(|hash| KeyHash(*hash.as_bytes()))
    }

    /// Formats as 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
}

impl fmt::Debug for KeyHash {
    /// Shortened: the first digits distinguish hashes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// All keys with their tenants.
#[derive(Clone, Debug)]
pub struct Keyring {
    /// `None`: the settings name no tenants, every caller is `anonymous`.
    owners: Option<HashMap<KeyHash, Identity, ahash::RandomState>>,
}

impl Keyring {
    /// The keyring of settings without tenants: every caller is `anonymous`.
    #[must_use]
    pub fn anonymous() -> Self {
        Keyring { owners: None }
    }

    /// The keyring of settings with tenants. The last of duplicate hashes wins; `config` rejects
    /// duplicates before.
    #[must_use]
    pub fn of(keys: impl IntoIterator<Item = (KeyHash, Identity)>) -> Self {
        Keyring { owners: Some(keys.into_iter().collect()) }
    }

    /// Whether requests need a key.
    #[must_use]
    pub fn requires_key(&self) -> bool {
        self.owners.is_some()
    }

    /// Finds the tenant of a request by its `Authorization: Bearer` or `x-api-key` header.
    ///
    /// The same key in several headers counts once. Schemes other than `Bearer` carry no key.
    /// Keys are ignored where the settings name no tenants.
    ///
    /// # Errors
    /// [`AuthError`], which becomes a 401.
    pub fn find(&self, headers: &HeaderMap) -> Result<Identity, AuthError> {
        let Some(owners) = &self.owners else {
            return Ok(Identity { tenant: TenantId::anonymous(), key_label: None });
        };
        let bearers = headers.get_all(AUTHORIZATION).iter().filter_map(|value| bearer(value.as_bytes()));
        let plain = headers.get_all(API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
        let mut shown = bearers.chain(plain).filter(|key| !key.is_empty());
        let first = shown.next().ok_or(AuthError::Missing)?;
        if shown.any(|other| !bool::from(other.ct_eq(first))) {
            return Err(AuthError::TwoKeys);
        }
        let hash = KeyHash::of(first);
        match owners.get_key_value(&hash) {
            Some((known, who)) if bool::from(known.0.ct_eq(&hash.0)) => Ok(who.clone()),
            _ => Err(AuthError::Unknown),
        }
    }
}

/// The key of an `Authorization: Bearer` value; the scheme is case-insensitive.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let value = value.trim_ascii();
    let space = value.iter().position(|byte| byte.is_ascii_whitespace())?;
    let (scheme, key) = value.split_at(space);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn who(tenant: &str, label: Option<&str>) -> Identity {
        Identity { tenant: TenantId::from(tenant), key_label: label.map(Arc::from) }
    }

    fn ring() -> Keyring {
        Keyring::of([(KeyHash::of(b"key-a"), who("acme", Some("prod"))), (KeyHash::of(b"key-b"), who("beta", None))])
    }

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::try_from(*name).unwrap(), HeaderValue::try_from(*value).unwrap());
        }
        map
    }

    #[test]
    fn a_key_is_found_in_either_header() {
        type Lines = &'static [(&'static str, &'static str)];
        let table: &[(Lines, Result<Identity, AuthError>)] = &[
            (&[("authorization", "Bearer key-a")], Ok(who("acme", Some("prod")))),
            (&[("authorization", "bearer key-a")], Ok(who("acme", Some("prod")))),
            (&[("authorization", "BEARER   key-b ")], Ok(who("beta", None))),
            (&[("x-api-key", "key-b")], Ok(who("beta", None))),
            (&[("authorization", "Bearer key-a"), ("x-api-key", "key-a")], Ok(who("acme", Some("prod")))),
            (&[("authorization", "Bearer key-a"), ("authorization", "Bearer key-a")], Ok(who("acme", Some("prod")))),
            (&[("authorization", "Basic a2V5LWE="), ("x-api-key", "key-a")], Ok(who("acme", Some("prod")))),
            (&[("authorization", "Bearer key-a"), ("x-api-key", "key-b")], Err(AuthError::TwoKeys)),
            (&[("authorization", "Bearer key-a"), ("x-api-key", "nobody")], Err(AuthError::TwoKeys)),
            (&[("authorization", "Bearer key-a"), ("authorization", "Bearer key-b")], Err(AuthError::TwoKeys)),
            (&[("x-api-key", "key-a"), ("x-api-key", "key-b")], Err(AuthError::TwoKeys)),
            (&[("authorization", "Bearer nobody")], Err(AuthError::Unknown)),
            (&[("authorization", "Bearer Key-A")], Err(AuthError::Unknown)),
            (&[("authorization", "key-a")], Err(AuthError::Missing)),
            (&[("authorization", "Basic a2V5LWE=")], Err(AuthError::Missing)),
            (&[("authorization", "Bearer ")], Err(AuthError::Missing)),
            (&[("x-api-key", "")], Err(AuthError::Missing)),
            (&[("x-slo-class", "batch")], Err(AuthError::Missing)),
        ];
        for (lines, expected) in table {
            assert_eq!(ring().find(&headers(lines)), *expected, "{lines:?}");
        }
    }

    #[test]
    fn without_tenants_every_caller_is_anonymous() {
        let shown = headers(&[("authorization", "Bearer x"), ("x-api-key", "y")]);
        let found = Keyring::anonymous().find(&shown);
        assert_eq!(found, Ok(Identity { tenant: TenantId::anonymous(), key_label: None }));
    }

    #[test]
    fn a_keyring_without_keys_accepts_no_key() {
        assert_eq!(Keyring::of([]).find(&headers(&[("x-api-key", "key-a")])), Err(AuthError::Unknown));
    }

    #[test]
    fn no_output_contains_a_key_or_a_complete_hash() {
        let hash = KeyHash::of(b"sk-CANARY1");
        let printed = format!("{:?} {:?} {}", Keyring::of([(hash, who("acme", None))]), hash, AuthError::Unknown);
        assert!(!printed.contains("CANARY1") && !printed.contains(&hash.to_hex()), "{printed}");
    }

    #[test]
    fn a_hash_survives_its_spelling() {
        let hash = KeyHash::of(b"key-a");
        assert_eq!(KeyHash::from_hex(&hash.to_hex()), Some(hash));
        assert_eq!(KeyHash::from_hex(&hash.to_hex().to_uppercase()), Some(hash));
        assert_eq!(KeyHash::from_hex("abc"), None);
    }
}
