//! The connection to the store: one call of the script within its time limit.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, RedisError, RedisResult, Script, ServerErrorKind,
};

use super::settings::Redis;
use super::wire::{Answer, Call, SCRIPT};

/// Time limit of connecting, TLS and authentication included. No request waits for it.
const CONNECTING: Duration = Duration::from_secs(1);

/// A connection. Clones share it, and calls are concurrent.
#[derive(Clone)]
pub struct Line(Way);

#[derive(Clone)]
enum Way {
    Server {
        connection: MultiplexedConnection,
        script: String,
    },
    /// Answered by a test.
    #[cfg(test)]
    ByHand(by_hand::Answers),
}

/// Why there is no result. Never contains the address or a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
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

impl Line {
    /// Connects and loads the script, within the time limit of connecting.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn open(settings: &Redis) -> Result<Self, Failure> {
        #[cfg(test)]
        if let Some(answers) = by_hand::ANSWERS.get() {
            return Ok(Line(Way::ByHand(answers)));
        }
        let client = Client::open(settings.address.info().clone()).map_err(failure)?;
        // Calls are limited by our own clock.
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECTING)).set_response_timeout(None);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(failure)?;
        Ok(Line(Way::Server { connection, script: Script::new(SCRIPT).get_hash().to_owned() }))
    }

    /// Calls the script for one tenant.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn call(&self, call: &Call) -> Result<Answer, Failure> {
        let (connection, script) = match &self.0 {
            Way::Server { connection, script } => (connection, script),
            #[cfg(test)]
            Way::ByHand(answers) => return by_hand::call(*answers, call).await,
        };
        let mut answered = run(connection, "EVALSHA", script, call).await;
        if answered.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answered = run(connection, "EVAL", SCRIPT, call).await;
        }
        let value = answered.map_err(failure)?;
        let numbers = Vec::<i64>::from_redis_value(value).map_err(|_| Failure::Nonsense("no numbers".to_owned()))?;
        call.read(&numbers).ok_or_else(|| Failure::Nonsense("numbers that cannot be".to_owned()))
    }
}

async fn run(
    connection: &MultiplexedConnection,
    command: &str,
    script: &str,
    call: &Call,
) -> RedisResult<redis::Value> {
    let mut all = redis::cmd(command);
    all.arg(script).arg(1).arg(&*call.key).arg(call.arguments());
    all.query_async(&mut connection.clone()).await
}

fn failure(error: RedisError) -> Failure {
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => Failure::Timeout,
        ErrorKind::Server(_) | ErrorKind::Extension => match error.code() {
            // This tenant's key is at fault rather than the server.
            Some(code @ ("GOODPUT" | "WRONGTYPE")) => {
                Failure::Nonsense(format!("{code} {}", error.detail().unwrap_or_default()))
            }
            // Older servers wrap the error of a command inside a script like this.
            _ if error.detail().is_some_and(|detail| detail.contains("WRONGTYPE")) => {
                Failure::Nonsense("WRONGTYPE".to_owned())
            }
            code => Failure::Error(code.unwrap_or("ERR").to_owned()),
        },
        ErrorKind::AuthenticationFailed => Failure::Error("no entry with this user and password".to_owned()),
        _ if error.is_unrecoverable_error() || error.is_io_error() => Failure::Broken(error.category().to_owned()),
        ErrorKind::Parse => Failure::Broken("what it speaks is not RESP".to_owned()),
        _ => Failure::Broken(error.category().to_owned()),
    }
}

/// A store inside a test.
#[cfg(test)]
pub(super) mod by_hand {
    use std::cell::Cell;

    use super::{Answer, Call, Failure};
    use crate::locks::woven::others;

    pub type Answers = fn(&Call) -> Result<Answer, Failure>;

    thread_local! {
        /// Answers connections opened by this thread.
        pub static ANSWERS: Cell<Option<Answers>> = const { Cell::new(None) };
    }

    /// Other tasks may run before the call takes effect, and before its result arrives.
    pub async fn call(answers: Answers, call: &Call) -> Result<Answer, Failure> {
        others().await;
        let answer = answers(call);
        others().await;
        answer
    }
}
