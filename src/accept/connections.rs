//! The open connections of a listener: their number per address, and which has been idle longest.
//!
//! If a new connection finds no free slot, the one that has been idle longest is asked to close. If none
//! is idle, the next one to become idle closes.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::peer::ConnState;

/// The open connections of one listener; see the module.
#[derive(Default)]
pub(super) struct Connections {
    /// Keyed by address in memory.
    open: Mutex<HashMap<usize, Arc<ConnState>, ahash::RandomState>>,
    of_address: Mutex<HashMap<IpAddr, usize, ahash::RandomState>>,
    /// Slots wanted for which no idle connection was found.
    unfilled: AtomicUsize,
}

/// An open connection; deregistered on drop.
pub(super) struct Entered<'a> {
    connections: &'a Connections,
    key: usize,
}

/// A slot among the connections of one peer address; released on drop.
pub(super) struct AddressSlot {
    connections: Arc<Connections>,
    address: IpAddr,
}

impl Connections {
    pub(super) fn enter(&self, peer: &Arc<ConnState>) -> Entered<'_> {
        let key = Arc::as_ptr(peer) as usize;
        self.open.lock().insert(key, Arc::clone(peer));
        Entered { connections: self, key }
    }

    /// A slot for a connection from `address`; `None` if it has `most` already.
    pub(super) fn place(self: &Arc<Self>, address: IpAddr, most: usize) -> Option<AddressSlot> {
        let address = host_of(address);
        let mut of_address = self.of_address.lock();
        let count = of_address.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(AddressSlot { connections: Arc::clone(self), address })
    }

    /// Asks the `count` longest idle connections to close.
    pub(super) fn make_room(&self, count: usize) {
        let mut idle: Vec<_> = {
            let open = self.open.lock();
            open.values().filter_map(|peer| Some((peer.idle_since()?, Arc::clone(peer)))).collect()
        };
        let found = count.min(idle.len());
        if (1..idle.len()).contains(&found) {
            idle.select_nth_unstable_by_key(found - 1, |(since, _)| *since);
        }
        idle[..found].iter().for_each(|(_, peer)| peer.ask_to_leave());
        self.unfilled.store(count - found, Ordering::Relaxed);
    }

    /// No new connection waits for a slot any more.
    pub(super) fn has_room(&self) {
        self.unfilled.store(0, Ordering::Relaxed);
    }

    /// Whether an idle connection should close: it was asked to, or it is the first that could.
    pub(super) fn wants_to_end(&self, peer: &ConnState) -> bool {
        peer.is_asked_to_leave() || self.takes_unfilled()
    }

    /// A connection that was asked to close has begun a request; another one is asked instead.
    pub(super) fn cannot_end(&self, peer: &ConnState) {
        if peer.is_asked_to_leave() {
            peer.may_stay();
            self.make_room(1);
        }
    }

    fn takes_unfilled(&self) -> bool {
        self.unfilled.load(Ordering::Relaxed) > 0
            && self.unfilled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.connections.open.lock().remove(&self.key);
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let mut of_address = self.connections.of_address.lock();
        if let Some(count) = of_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                of_address.remove(&self.address);
            }
        }
    }
}

/// The address that identifies a host: for IPv6 its /64 network, all of which one host may use.
fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::units::Tick;

    #[test]
    fn an_address_has_so_many_places_and_a_host_of_ipv6_has_no_more_by_having_many() {
        let connections = Arc::new(Connections::default());
        let place = |address: &str| connections.place(address.parse().unwrap(), 2);
        let first = (place("10.0.0.1").unwrap(), place("::ffff:10.0.0.1").unwrap());
        assert!(place("10.0.0.1").is_none() && place("10.0.0.2").is_some());
        drop(first);
        assert!(place("10.0.0.1").is_some());
        let _wide = (place("2001:db8::1").unwrap(), place("2001:db8::ffff:2").unwrap());
        assert!(place("2001:db8::3").is_none() && place("2001:db8:0:1::3").is_some());
        drop(_wide);
        assert!(connections.of_address.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn c92_those_that_have_been_idle_longest_are_asked_to_end() {
        let clock = Clock::start();
        let connections = Connections::default();
        let peers: Vec<_> = (0..5).map(|_| ConnState::new(clock, None)).collect();
        let _entered: Vec<_> = peers.iter().map(|peer| connections.enter(peer)).collect();
        // The first has had no request yet, the second has an open one, the others are idle.
        let _open = peers[1].greet(false);
        for (number, peer) in peers[2..].iter().enumerate() {
            clock.sleep_until(Some(Tick::from_millis(10 - number as u64))).await;
            drop(peer.greet(false));
        }
        clock.sleep_until(Some(Tick::from_millis(20))).await;
        drop(peers[2].greet(false));
        let asked = || peers.iter().map(|peer| peer.is_asked_to_leave()).collect::<Vec<_>>();
        connections.make_room(1);
        assert_eq!(asked().iter().filter(|asked| **asked).count(), 1);
        assert!(!asked()[2], "it is the last that became idle");
        connections.make_room(4);
        assert_eq!(asked(), [false, false, true, true, true]);
        assert!(connections.wants_to_end(&peers[1]), "the first that becomes idle is the fourth");
        assert!(!connections.wants_to_end(&peers[1]));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_has_begun_a_request_meanwhile_stays_and_another_goes() {
        let clock = Clock::start();
        let connections = Connections::default();
        let peers = [ConnState::new(clock, None), ConnState::new(clock, None)];
        let _entered = [connections.enter(&peers[0]), connections.enter(&peers[1])];
        drop(peers[0].greet(false));
        clock.sleep_until(Some(Tick::from_millis(5))).await;
        drop(peers[1].greet(false));
        connections.make_room(1);
        assert!(peers[0].is_asked_to_leave());
        let _open = peers[0].greet(false);
        connections.cannot_end(&peers[0]);
        assert!(!peers[0].is_asked_to_leave() && peers[1].is_asked_to_leave());
        connections.has_room();
        assert!(!connections.wants_to_end(&peers[0]));
    }
}
