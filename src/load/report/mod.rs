//! Reports of sweeps: pictures, a page that needs nothing else, and comparisons. Pure.

mod compare;
mod figure;
mod page;

pub use compare::{Comparison, GoodputChange, RateChange, compare};
pub use figure::{Figure, figures};
pub use page::html;
