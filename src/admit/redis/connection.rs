//! The connection to the store: one call of the script within its time limit.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, RedisError, RedisResult, Script, ServerErrorKind,
};

use super::exchange_call::{EXCHANGE_SCRIPT, ExchangeCall, Heard, HeardRecord, LONGEST_RECORD};
use super::lua_call::{LuaCall, LuaReply, SCRIPT};
use super::settings::Redis;

/// Time limit of connecting, TLS and authentication included. No request waits for it.
const CONNECTING: Duration = Duration::from_secs(1);

/// A connection. Clones share it, and calls are concurrent.
#[derive(Clone)]
pub struct RedisConnection(Backend);

impl std::fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RedisConnection")
    }
}

#[derive(Clone)]
enum Backend {
    Server {
        connection: MultiplexedConnection,
        script: String,
    },
    /// Answered by a test.
    #[cfg(test)]
    Fake(fake::FakeReplies),
}

/// Why there is no result. Never contains the address or a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// Not in time; it may have taken effect, or may still.
    #[error("no answer in time")]
    Timeout,
    /// No connection, or it broke; the call may have taken effect.
    #[error("the connection failed: {0}")]
    Broken(String),
    /// The server reports that nothing was done.
    #[error("the server answered with an error: {0}")]
    Error(String),
    /// The stored state is foreign, or the result is malformed.
    #[error("the server answered with nonsense: {0}")]
    Nonsense(String),
}

impl RedisConnection {
    /// Connects and loads the script, within the time limit of connecting.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn open(settings: &Redis) -> Result<Self, CallError> {
        #[cfg(test)]
        if let Some(answers) = fake::ANSWERS.get() {
            return Ok(RedisConnection(Backend::Fake(answers)));
        }
        let client = Client::open(settings.address.info().clone()).map_err(failure)?;
        // Calls are limited by our own clock.
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECTING)).set_response_timeout(None);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(failure)?;
        Ok(RedisConnection(Backend::Server { connection, script: Script::new(SCRIPT).get_hash().to_owned() }))
    }

    /// Calls the script for one tenant.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(&self, call: &LuaCall) -> Result<LuaReply, CallError> {
        let (connection, script) = match &self.0 {
            Backend::Server { connection, script } => (connection, script),
            #[cfg(test)]
            Backend::Fake(answers) => return fake::call(*answers, call).await,
        };
        let mut answered = run(connection, "EVALSHA", script, call).await;
        if answered.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answered = run(connection, "EVAL", SCRIPT, call).await;
        }
        let value = answered.map_err(failure)?;
        let numbers = Vec::<i64>::from_redis_value(value).map_err(|_| CallError::Nonsense("no numbers".to_owned()))?;
        call.read(&numbers).ok_or_else(|| CallError::Nonsense("numbers that cannot be".to_owned()))
    }

    /// Sends this gateway's report and receives those of the others.
    ///
    /// # Errors
    /// [`CallError`].
    pub(super) async fn exchange(&self, call: &ExchangeCall) -> Result<Heard, CallError> {
        let connection = match &self.0 {
            Backend::Server { connection, .. } => connection,
            #[cfg(test)]
            Backend::Fake(_) => return Ok(Heard::default()),
        };
        let hash = Script::new(EXCHANGE_SCRIPT).get_hash().to_owned();
        let mut answered = run_exchange(connection, "EVALSHA", &hash, call).await;
        if answered.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answered = run_exchange(connection, "EVAL", EXCHANGE_SCRIPT, call).await;
        }
        let value = answered.map_err(failure)?;
        let parts = Vec::<Vec<u8>>::from_redis_value(value).map_err(|_| CallError::Nonsense("no list".to_owned()))?;
        heard(parts).ok_or_else(|| CallError::Nonsense("records that cannot be".to_owned()))
    }
}

/// Parses the script's result. A record of an unknown form is skipped.
fn heard(parts: Vec<Vec<u8>>) -> Option<Heard> {
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(ToOwned::to_owned);
    let mut parts = parts.into_iter();
    let common = text(&parts.next()?)?.parse().ok()?;
    let mut records = Vec::new();
    while let (Some(name), Some(age), Some(record)) = (parts.next(), parts.next(), parts.next()) {
        let gateway = text(&name).and_then(|name| u64::from_str_radix(&name, 16).ok());
        let age = text(&age)?.parse().ok().map(std::time::Duration::from_micros)?;
        if let (Some(gateway), Some(record)) = (gateway, text(&record).filter(|text| text.len() <= LONGEST_RECORD)) {
            records.push(HeardRecord { gateway, age, record });
        }
    }
    Some(Heard { common, records })
}

async fn run_exchange(
    connection: &MultiplexedConnection,
    command: &str,
    script: &str,
    call: &ExchangeCall,
) -> RedisResult<redis::Value> {
    let mut all = redis::cmd(command);
    all.arg(script).arg(1).arg(&*call.key).arg(&*call.gateway).arg(&call.record).arg(call.life).arg(call.random);
    all.query_async(&mut connection.clone()).await
}

async fn run(
    connection: &MultiplexedConnection,
    command: &str,
    script: &str,
    call: &LuaCall,
) -> RedisResult<redis::Value> {
    let mut all = redis::cmd(command);
    all.arg(script).arg(1).arg(&*call.key).arg(call.arguments());
    all.query_async(&mut connection.clone()).await
}

fn failure(error: RedisError) -> CallError {
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => CallError::Timeout,
        ErrorKind::Server(_) | ErrorKind::Extension => match error.code() {
            // This tenant's key is at fault rather than the server.
            Some(code @ ("GOODPUT" | "WRONGTYPE")) => {
                CallError::Nonsense(format!("{code} {}", error.detail().unwrap_or_default()))
            }
            // Older servers wrap the error of a command inside a script like this.
            _ if error.detail().is_some_and(|detail| detail.contains("WRONGTYPE")) => {
                CallError::Nonsense("WRONGTYPE".to_owned())
            }
            code => CallError::Error(code.unwrap_or("ERR").to_owned()),
        },
        ErrorKind::AuthenticationFailed => CallError::Error("no entry with this user and password".to_owned()),
        _ if error.is_unrecoverable_error() || error.is_io_error() => CallError::Broken(error.category().to_owned()),
        ErrorKind::Parse => CallError::Broken("what it speaks is not RESP".to_owned()),
        _ => CallError::Broken(error.category().to_owned()),
    }
}

/// A store inside a test.
#[cfg(test)]
pub(super) mod fake {
    use std::cell::Cell;

    use super::{CallError, LuaCall, LuaReply};
    use crate::sync::shuttle_locks::others;

    pub type FakeReplies = fn(&LuaCall) -> Result<LuaReply, CallError>;

    thread_local! {
        /// Answers connections opened by this thread.
        pub static ANSWERS: Cell<Option<FakeReplies>> = const { Cell::new(None) };
    }

    /// Other tasks may run before the call takes effect, and before its result arrives.
    pub async fn call(answers: FakeReplies, call: &LuaCall) -> Result<LuaReply, CallError> {
        others().await;
        let answer = answers(call);
        others().await;
        answer
    }
}
