//! Engines that an operator drains by hand, and puts back.

use std::time::Duration;

use super::Gateway;
use crate::route::{DrainError, EngineView};
use crate::types::{EngineId, PoolId};

impl Gateway {
    /// Drains an engine for this long (`None`: until it is put back): it gets no new requests and finishes
    /// those it has. `may_empty`: even the last available engine of its pool.
    ///
    /// # Errors [`DrainError`]: no such engine, or the last one.
    pub fn drain_engine(
        &self,
        pool: &PoolId,
        engine: &EngineId,
        length: Option<Duration>,
        may_empty: bool,
    ) -> Result<EngineView, DrainError> {
        let view = self.fleet.drain(pool, engine, length, may_empty, self.clock.now())?;
        self.count_seats();
        let for_s = length.map(|length| length.as_secs());
        tracing::info!(%pool, %engine, for_s, in_flight = view.requests, "an operator drains an engine");
        Ok(view)
    }

    /// Puts a drained engine back.
    ///
    /// # Errors
    /// [`DrainError`]: no such engine.
    pub fn put_back_engine(&self, pool: &PoolId, engine: &EngineId) -> Result<EngineView, DrainError> {
        let view = self.fleet.put_back(pool, engine, self.clock.now())?;
        self.count_seats();
        tracing::info!(%pool, %engine, "an operator puts an engine back");
        Ok(view)
    }
}
