//! Which addresses of a DNS name are engines. An engine with an IPv4 and an IPv6 address is one engine, so
//! only the addresses of one family count, the one that answers.

use std::net::IpAddr;

use super::client::ProbeClient;
use crate::dial::{in_order, race};
use crate::route::settings::{AddressFamily, DnsName, PoolSettings};

/// The chosen family.
#[derive(Debug, Default)]
pub(super) struct ChosenFamily {
    is_ipv6: Option<bool>,
    /// Lookups in a row that found only the other family.
    missed: u32,
}

impl ChosenFamily {
    /// So many such lookups may be failures of one of a name's two queries.
    const MOST_MISSED: u32 = 3;

    /// The addresses that are engines, sorted, without duplicates. A choice is kept while its engines take
    /// requests (`serves`), because engines must not change names at every lookup.
    pub async fn of(
        &mut self,
        mut found: Vec<IpAddr>,
        pool: &PoolSettings,
        dns: &DnsName,
        serves: bool,
        client: &ProbeClient,
    ) -> Vec<IpAddr> {
        // One address in two ways of writing is one.
        found.iter_mut().for_each(|address| *address = address.to_canonical());
        let is_ipv6 = match dns.family {
            AddressFamily::Both => None,
            AddressFamily::Ipv4 => Some(false),
            AddressFamily::Ipv6 => Some(true),
            AddressFamily::Auto => self.that_answers(&found, pool, dns, serves, client).await,
        };
        found.retain(|address| is_ipv6.is_none_or(|is_ipv6| address.is_ipv6() == is_ipv6));
        found.sort_unstable();
        found.dedup();
        found
    }

    async fn that_answers(
        &mut self,
        found: &[IpAddr],
        pool: &PoolSettings,
        dns: &DnsName,
        serves: bool,
        client: &ProbeClient,
    ) -> Option<bool> {
        let (mut found, others): (Vec<IpAddr>, Vec<IpAddr>) = found.iter().partition(|address| address.is_ipv6());
        if found.is_empty() || others.is_empty() {
            let only = Some(others.is_empty());
            if serves && self.is_ipv6.is_some() && self.is_ipv6 != only && self.missed < Self::MOST_MISSED {
                self.missed += 1;
            } else {
                (self.is_ipv6, self.missed) = (only, 0);
            }
            return self.is_ipv6;
        }
        self.missed = 0;
        if self.is_ipv6.is_none() || !serves {
            let connect = async |address: IpAddr| client.dial.dial(&dns.engine_at(address), pool.roots.as_ref()).await;
            // Of two families that answer, the one with more engines.
            let has_more = others.len() > found.len();
            found.splice(if has_more { 0..0 } else { found.len()..found.len() }, others);
            let order = in_order(&found, None);
            let reached = client.within(pool.connect_timeout, race(client.clock, &order, connect)).await;
            if let Some(Ok((address, _))) = reached {
                self.is_ipv6 = Some(address.is_ipv6());
            }
        }
        // If neither answers: IPv4, on which nearly every engine listens.
        Some(self.is_ipv6.unwrap_or(false))
    }
}
