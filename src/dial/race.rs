//! Connects to one of several addresses (RFC 8305, "Happy Eyeballs"): the next address is tried 250 ms
//! after the previous one, or as soon as that has failed; the first connection wins.

use std::io;
use std::net::IpAddr;

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::{is_lack, is_refusal};
use crate::clock::Clock;

/// Delay before the next address is tried too (RFC 8305 section 5).
pub const NEXT_AFTER: Duration = Duration::from_millis(250);

/// Connects to one of the addresses, in order. The caller limits the total time.
///
/// # Errors
/// No address could be connected to. The error means "refused" only if every address refused.
pub async fn race<T, F>(clock: Clock, addresses: &[IpAddr], connect: impl Fn(IpAddr) -> F) -> io::Result<(IpAddr, T)>
where
    F: Future<Output = io::Result<T>>,
{
    let attempt = async |address: IpAddr| (address, connect(address).await);
    let mut rest = addresses.iter().copied();
    let mut running = FuturesUnordered::new();
    let mut failed: Option<io::Error> = None;
    loop {
        let next = rest.next();
        running.extend(next.map(&attempt));
        let due = (rest.len() > 0).then(|| clock.now() + NEXT_AFTER);
        let ended = tokio::select! {
            ended = running.next() => ended,
            () = clock.sleep_until(due) => continue,
        };
        match ended {
            Some((address, Ok(connection))) => return Ok((address, connection)),
            // The other addresses would fail for the same lack of resources.
            Some((_, Err(error))) if is_lack(&error) => return Err(error),
            Some((_, Err(error))) => {
                failed = Some(match failed {
                    Some(known) if !is_refusal(&known) => known,
                    _ => error,
                });
            }
            None => return Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into())),
        }
    }
}

/// The order of attempts: the address that answered last time, then both families alternately,
/// beginning with the family of the resolver's first address (RFC 8305
/// section 4).
#[must_use]
pub fn in_order(addresses: &[IpAddr], answered: Option<IpAddr>) -> Vec<IpAddr> {
    let first_family = addresses.first().is_some_and(IpAddr::is_ipv6);
    let (same, other): (Vec<_>, Vec<_>) = addresses.iter().partition(|address| address.is_ipv6() == first_family);
    let (mut same, mut other) = (same.into_iter(), other.into_iter());
    let mut order: Vec<IpAddr> = answered.into_iter().filter(|known| addresses.contains(known)).collect();
    for _ in 0..addresses.len() {
        for address in same.next().into_iter().chain(other.next()) {
            if !order.contains(&address) {
                order.push(address);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Tick;

    fn v4(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn v6(last: u16) -> IpAddr {
        IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last])
    }

    /// Behaviour of an address, by its last octet: 1 is silent, 2 refuses, 3 is unreachable, 4 connects
    /// after 100 ms, 5 at once, 6 has no file descriptor left.
    async fn connect(address: IpAddr, clock: Clock) -> io::Result<u8> {
        let IpAddr::V4(address) = address else { panic!("no such address") };
        match address.octets()[3] {
            1 => std::future::pending().await,
            2 => Err(io::ErrorKind::ConnectionRefused.into()),
            3 => Err(io::ErrorKind::HostUnreachable.into()),
            4 => {
                clock.sleep_until(Some(clock.now() + Duration::from_millis(100))).await;
                Ok(4)
            }
            6 => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            other => Ok(other),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_address_is_tried_after_250_ms_or_when_the_last_one_failed() {
        for (addresses, winner, millis) in [
            (&[5][..], 5, 0),
            (&[4, 5], 4, 100),
            (&[1, 5], 5, 250),
            (&[1, 1, 5], 5, 500),
            (&[2, 5], 5, 0),
            (&[3, 1, 4], 4, 350),
            (&[1, 4, 2, 5], 4, 350),
            (&[1, 2, 5], 5, 250),
        ] {
            let clock = Clock::start();
            let all: Vec<_> = addresses.iter().map(|last| v4(*last)).collect();
            let (address, answer) = race(clock, &all, |address| connect(address, clock)).await.unwrap();
            assert_eq!(
                (address, answer, clock.now()),
                (v4(winner), winner, Tick::from_millis(millis)),
                "{addresses:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_listens_only_where_every_address_says_so() {
        for (addresses, kind) in [
            (&[2, 2][..], io::ErrorKind::ConnectionRefused),
            (&[2, 3], io::ErrorKind::HostUnreachable),
            (&[3, 2], io::ErrorKind::HostUnreachable),
            (&[], io::ErrorKind::NotFound),
        ] {
            let clock = Clock::start();
            let all: Vec<_> = addresses.iter().map(|last| v4(*last)).collect();
            let error = race(clock, &all, |address| connect(address, clock)).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{addresses:?}");
        }
        let clock = Clock::start();
        let error = race(clock, &[v4(6), v4(5)], |address| connect(address, clock)).await.unwrap_err();
        assert!(is_lack(&error));
    }

    #[test]
    fn families_take_turns_and_the_address_that_answered_goes_first() {
        let named = [v6(1), v6(2), v6(3), v4(1)];
        assert_eq!(in_order(&named, None), [v6(1), v4(1), v6(2), v6(3)]);
        assert_eq!(in_order(&named, Some(v6(3))), [v6(3), v6(1), v4(1), v6(2)]);
        assert_eq!(in_order(&named, Some(v4(9))), [v6(1), v4(1), v6(2), v6(3)], "one that is gone");
        assert_eq!(in_order(&[v4(1), v6(1)], None), [v4(1), v6(1)]);
        assert!(in_order(&[], Some(v4(1))).is_empty());
    }
}
