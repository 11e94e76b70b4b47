//! Seats and the queue before them, over real sockets: clients that wait, hang up, and come in.

use crate::gateway::{Gateway, Setup, sum, sum_where};
use crate::processes::{CHAT, stream_of};
use crate::running::{Open, Running, get, post, until};

#[test]
fn waiting_requests_get_seats_and_hang_ups_leave_nothing_behind() {
    let engine = Running::engine(&["--speed", "1"]);
    let (pool, chat) = ("max_concurrency_per_engine: 1", "queue: {max_wait: 10m}");
    let gateway = Gateway::start(&Setup { engines: &[&engine], pool, chat, ..Setup::default() });
    let page = || get(&gateway.admin, "/metrics").expect("a page");
    let waiting = |count: f64| {
        until("so many wait", || Some(page()).filter(|page| sum(page, "goodput_queue_depth") == count));
    };
    // Longer than anything that happens meanwhile.
    let mut sitting = Open::post(&gateway.running.url, CHAT, &stream_of(30_000));
    sitting.read_until(r#""content":""#);
    let impatient: Vec<Open> = (0..5).map(|_| Open::post(&gateway.running.url, CHAT, &stream_of(5))).collect();
    let mut patient = Open::post(&gateway.running.url, CHAT, &stream_of(5));
    waiting(6.0);
    assert_eq!((sum(&page(), "goodput_seats"), sum(&page(), "goodput_seats_taken")), (1.0, 1.0));
    drop(impatient);
    waiting(1.0);
    drop(sitting);
    patient.read_to_end();
    assert!(patient.read.contains("[DONE]"), "{}", patient.read);

    // Two hundred clients hang up as soon as they are served; the seat is free again each time.
    for _ in 0..200 {
        let mut cut = Open::post(&gateway.running.url, CHAT, &stream_of(30_000));
        cut.read_until(r#""content":""#);
    }
    let last = post(&gateway.running.url, CHAT, "", &stream_of(3)).expect("a 200");
    assert!(last.contains("[DONE]"), "{last}");
    until("the seat is free", || Some(page()).filter(|page| sum(page, "goodput_seats_taken") == 0.0));
    let page = gateway.adds_up();
    assert_eq!(sum(&page, "goodput_requests_finished_total"), 208.0, "{page}");
    assert_eq!(sum_where(&page, "goodput_slo_excluded_total", "reason=\"client_cancel\""), 206.0, "{page}");
}
