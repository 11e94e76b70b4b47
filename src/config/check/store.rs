//! The store of shared limits.

use std::time::Duration;

use super::Checker;
use crate::admit::redis::settings::{LimitsStore, Redis, RedisAddress};
use crate::config::schema::{self, Root};
use crate::config::walk::{ConfigBlock, OrBlock};

/// Longest sensible time limit, because a request waits for the store before its engine.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(1);

impl Checker<'_> {
    pub(super) fn limits_store(&mut self, root: &Root) -> LimitsStore {
        let Some(OrBlock::Block(store)) = &root.limits_store else { return LimitsStore::Memory };
        let redis = store.redis.as_ref().and_then(|redis| self.redis(redis));
        if let Some(store) = &store.redis
            && !root.tenants.iter().flat_map(|all| all.iter()).any(|tenant| tenant.limits.is_some())
        {
            self.note(store.place(), "no tenant has limits", "add `limits` to a tenant, or remove the store");
        }
        redis.map_or(LimitsStore::Memory, |redis| LimitsStore::Redis(Box::new(redis)))
    }

    fn redis(&mut self, raw: &schema::Redis) -> Option<Redis> {
        let defaults = (Redis::TIMEOUT, Redis::KEY_PREFIX.to_owned());
        let timeout = self.time(raw.timeout.as_ref(), defaults.0);
        if let Some(at) = raw.timeout.as_ref().filter(|at| at.value > LONGEST_TIMEOUT) {
            self.problem(&at.place, "every request may have to wait so long", "write 1s or less");
        }
        if let Some(prefix) = &raw.key_prefix {
            self.name(prefix, &[]);
        }
        let password = raw.password_file.as_ref().map(|at| self.secret_file(at));
        let url = raw.url.as_ref()?;
        let address = match RedisAddress::read(&url.value) {
            Ok(address) => address,
            Err(bad) => {
                // Without its text, which may contain a password.
                let (message, way_out) = bad.parts();
                self.problem(&url.place, message, way_out);
                return None;
            }
        };
        if address.has_password() && raw.password_file.is_some() {
            self.problem(&url.place, "the password stands here and in `password_file`", "remove one of the two");
        } else if address.has_password() && !url.hidden {
            let way_out = "write the whole URL as ${NAME}, or put the password into a `password_file`";
            self.problem(&url.place, "contains a password in clear text", way_out);
        }
        let address = match password {
            Some(password) => address.with_password(&password?),
            None => address,
        };
        let on_failure = raw.on_failure.as_ref().map_or_else(Default::default, |word| word.value.0);
        let key_prefix = raw.key_prefix.as_ref().map_or(defaults.1, |at| at.value.clone());
        let share_queues = raw.share_queues.as_ref().is_none_or(|at| at.value);
        Some(Redis { address, on_failure, timeout, key_prefix, share_queues })
    }
}
