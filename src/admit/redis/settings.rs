//! Settings of the shared limits store, complete and
//! checked.

use std::fmt;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

/// Store of the tenants' balances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LimitsStore {
    /// In this process: each gateway has its own.
    #[default]
    Memory,
    /// In a store shared by several gateways.
    Redis(Box<Redis>),
}

/// A store in Redis or Valkey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// Address and credentials.
    pub address: RedisAddress,
    /// What happens to requests while it is unavailable.
    pub on_failure: OnFailure,
    /// Time limit of a call, and of a request's wait for it.
    pub timeout: Duration,
    /// Prefix of every key: gateways with the same prefix share their limits.
    pub key_prefix: String,
    /// Whether gateways tell each other through it what they have at the engines and in their queues.
    pub share_queues: bool,
}

impl Redis {
    /// Default time limit of a call.
    pub const TIMEOUT: Duration = Duration::from_millis(50);
    /// Default prefix of keys.
    pub const KEY_PREFIX: &'static str = "goodput";

    /// A store at this address with defaults.
    #[must_use]
    pub fn at(address: RedisAddress) -> Self {
        Redis {
            address,
            on_failure: OnFailure::Open,
            timeout: Self::TIMEOUT,
            key_prefix: Self::KEY_PREFIX.into(),
            share_queues: true,
        }
    }
}

/// What happens to requests while the store is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// This gateway's share applies: the limit divided by `replicas`.
    #[default]
    Open,
    /// They are rejected.
    Closed,
}

/// An address parsed from a URL. Displayed without its password.
#[derive(Clone)]
pub struct RedisAddress(ConnectionInfo);

impl RedisAddress {
    /// Parses `redis://`, `rediss://` (TLS), `valkey://` and `valkeys://` with host, port, user, password and
    /// database number, or `unix://` with a path.
    ///
    /// # Errors
    /// [`InvalidRedisAddress`], which never contains the text, because it may hold a password.
    pub fn read(url: &str) -> Result<Self, InvalidRedisAddress> {
        let info = url.into_connection_info().map_err(|_| InvalidRedisAddress::NoUrl)?;
        if let ConnectionAddr::TcpTls { insecure: true, .. } = info.addr() {
            return Err(InvalidRedisAddress::Insecure);
        }
        Ok(RedisAddress(info))
    }

    /// Whether the URL had a password.
    #[must_use]
    pub fn has_password(&self) -> bool {
        self.0.redis_settings().password().is_some()
    }

    /// Adds a password.
    #[must_use]
    pub fn with_password(self, password: &str) -> Self {
        let settings = self.0.redis_settings().clone().set_password(password);
        RedisAddress(self.0.set_redis_settings(settings))
    }

    pub(super) fn info(&self) -> &ConnectionInfo {
        &self.0
    }
}

/// Host and port only.
impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.addr().fmt(f)
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

impl PartialEq for RedisAddress {
    fn eq(&self, other: &Self) -> bool {
        let entry = |address: &Self| {
            let settings = address.0.redis_settings();
            (settings.db(), settings.username().map(ToOwned::to_owned), settings.password().map(ToOwned::to_owned))
        };
        self.0.addr() == other.0.addr() && entry(self) == entry(other)
    }
}

impl Eq for RedisAddress {}

/// An invalid store address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}; {}", self.parts().0, self.parts().1)]
pub enum InvalidRedisAddress {
    /// Not a URL of a known scheme.
    NoUrl,
    /// `rediss://…/#insecure`.
    Insecure,
}

impl InvalidRedisAddress {
    /// The problem, and how to fix it.
    #[must_use]
    pub const fn parts(self) -> (&'static str, &'static str) {
        match self {
            InvalidRedisAddress::NoUrl => (
                "is not a store URL",
                "write redis://HOST:PORT or, with TLS, rediss://HOST:PORT; a database number may follow: /1",
            ),
            InvalidRedisAddress::Insecure => ("disables verification of the certificate", "remove `#insecure`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_shows_neither_user_nor_password() {
        let address = RedisAddress::read("redis://gateway:s3cret@store:6380/2").unwrap();
        assert_eq!(format!("{address} {address:?}"), "store:6380 Address(store:6380)");
        assert!(!format!("{:?}", Redis::at(address.clone())).contains("s3cret"));
        assert!(address.has_password());
        let with = RedisAddress::read("redis://gateway@store:6380/2").unwrap().with_password("s3cret");
        assert_eq!(with, address);
        assert_ne!(RedisAddress::read("redis://gateway:other@store:6380/2").unwrap(), address);
        assert!(RedisAddress::read("rediss://store").is_ok(), "TLS is built in");
        assert!(RedisAddress::read("valkey://[::1]:6379").is_ok());
        assert!(RedisAddress::read("unix:///run/valkey.sock?db=1").is_ok());
    }

    #[test]
    fn what_is_no_address_is_told_without_the_text() {
        for text in ["", "store:6379", "http://store", "redis://", "redis://:s3cret@store/one", "redis://s3cret@:0x"] {
            let Err(error) = RedisAddress::read(text) else { panic!("{text} was taken") };
            assert_eq!(error, InvalidRedisAddress::NoUrl);
            assert!(!error.to_string().contains("s3cret"));
        }
        assert_eq!(RedisAddress::read("rediss://store/#insecure"), Err(InvalidRedisAddress::Insecure));
    }
}
