//! Who may enter now. Unlimited seats for the time being: `admitted` = `body_complete`.

pub mod queue;
