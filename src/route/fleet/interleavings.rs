//! The fleet under many interleavings ([`crate::sync`]).

use std::rc::Rc;

use super::tests::{address, ms, pool, tokens};
use super::*;
use crate::route::settings::Concurrency;
use crate::sync::shuttle_locks::{all_end, others, task, tried};

#[test]
fn engines_that_come_and_go_under_running_requests_keep_the_books_of_work_right() {
    tried(|_| {
        let settings =
            PoolSettings { concurrency: Concurrency::Fixed(NonZeroU32::MIN.saturating_add(1)), ..pool(&["a", "b"]) };
        let fleet = Rc::new(Fleet::new(7));
        fleet.apply_settings(&[Arc::new(settings.clone())], Tick::ZERO);
        let id = settings.id.clone();
        let request = |streams: bool| {
            let (fleet, settings, id) = (Rc::clone(&fleet), settings.clone(), id.clone());
            async move {
                let mut attempts = Attempts::new(&settings, ms(60_000));
                let live_pool = fleet.live_pool(&id).expect("the pool is named");
                let chosen = live_pool.choose(&mut attempts, tokens(100, 100).into(), &[], true, ms(1));
                let Some(mut choice) = chosen else { return };
                others().await;
                if streams {
                    choice.work.first_token(ms(1));
                    choice.work.learned(&LatencySample { further: 9, ..LatencySample::default() }, ms(2));
                }
            }
        };
        let changes = |names: &'static [&'static [&'static str]]| {
            let (fleet, id) = (Rc::clone(&fleet), id.clone());
            async move {
                for names in names {
                    fleet.set_engines(&id, names.iter().map(|name| address(name)).collect(), ms(1));
                    others().await;
                }
            }
        };
        let requests = [true, false, true].map(|streams| task(request(streams)));
        let engines = [task(changes(&[&["b"], &["a", "b", "c"]])), task(changes(&[&["a"], &["a", "b", "c"]]))];
        all_end(requests.into_iter().chain(engines));
        let view = fleet.view(ms(3)).remove(0);
        assert_eq!(view.engines.len(), 3);
        assert!(view.engines.iter().all(|engine| engine.requests == 0 && engine.work == Tokens::ZERO), "{view:?}");
        assert_eq!(fleet.available(&id, ms(100_000)), 3);
        assert_eq!(fleet.seats(&id, ms(100_000)), Some(6));
    });
}
