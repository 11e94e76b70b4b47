//! A real Redis or Valkey on its own socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use goodput::admit::redis::connection::RedisConnection;
use goodput::admit::redis::settings::{OnFailure, Redis, RedisAddress};

use crate::parts::{Missing, find};
use crate::running::until;

/// Which of the two.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Redis,
    Valkey,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Redis => "redis",
            Kind::Valkey => "valkey",
        }
    }

    fn binary(self) -> Result<PathBuf, Missing> {
        match self {
            Kind::Redis => find("redis-server", "install it: apt-get install redis-server"),
            Kind::Valkey => {
                find("valkey-server", "run tests/e2e/prepare.sh, or apt-get install valkey-server (Debian 13 or newer)")
            }
        }
    }
}

/// Whether the server was built with TLS. Without a certificate it exits with a message.
fn has_tls(binary: &Path) -> bool {
    let asked = Command::new(binary).args(["--port", "0", "--tls-port", "1"]).output();
    asked.is_ok_and(|said| !String::from_utf8_lossy(&said.stdout).contains("Failed finding TLS support"))
}

/// Makes each of these functions a test with a Redis, and one with a Valkey.
macro_rules! on_each {
    ($($name:ident,)*) => {
        mod redis {
            $(#[test] fn $name() { super::$name(crate::redis_server::Kind::Redis) })*
        }
        mod valkey {
            $(#[test] fn $name() { super::$name(crate::redis_server::Kind::Valkey) })*
        }
    };
}
pub(crate) use on_each;

/// A server without a memory of the time before its start.
pub struct RedisServer {
    binary: PathBuf,
    folder: tempfile::TempDir,
    more: Vec<String>,
    child: Child,
}

impl RedisServer {
    pub fn start(kind: Kind) -> Result<RedisServer, Missing> {
        RedisServer::with(kind, &[])
    }

    /// One with these lines of settings besides.
    pub fn with(kind: Kind, more: &[&str]) -> Result<RedisServer, Missing> {
        let binary = kind.binary()?;
        if more.iter().any(|line| line.contains("tls-")) && !has_tls(&binary) {
            return Err(format!("{}-server is here without TLS; install one that has it", kind.name()));
        }
        let folder = tempfile::tempdir().expect("a folder for its socket");
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        let child = spawn(&binary, &folder, &more);
        let server = RedisServer { binary, folder, more, child };
        server.until_it_answers();
        Ok(server)
    }

    pub fn url(&self) -> String {
        format!("unix://{}", socket(&self.folder).display())
    }

    /// Settings for a store in it. Timeouts are far longer than in production, so that only the test's
    /// actions on the server count, not the load of the machine.
    pub fn settings(&self, on_failure: OnFailure) -> Redis {
        let address = RedisAddress::read(&self.url()).expect("a URL of ours");
        Redis { on_failure, timeout: Duration::from_secs(60), ..Redis::at(address) }
    }

    pub async fn line(&self) -> RedisConnection {
        RedisConnection::open(&self.settings(OnFailure::Open)).await.expect("it listens")
    }

    /// Ends it at once. All it kept is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started here");
    }

    pub fn restart(&mut self) {
        self.child = spawn(&self.binary, &self.folder, &self.more);
        self.until_it_answers();
    }

    /// `STOP`, `CONT`.
    pub fn signal(&self, name: &str) {
        let told = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(told.is_ok_and(|status| status.success()), "redis-server could not be told");
    }

    /// Sends one command; returns the first bytes of the response.
    pub fn say(&self, words: &[&str]) -> std::io::Result<String> {
        self.write(&resp(words))
    }

    /// Its clock.
    pub fn time(&self) -> Duration {
        let told = self.say(&["TIME"]).expect("it answers");
        let numbers: Vec<u64> = told.lines().filter_map(|line| line.parse().ok()).collect();
        let [seconds, micros] = numbers[..] else { panic!("{told}") };
        Duration::new(seconds, micros as u32 * 1000)
    }

    /// Several commands on one connection, none of which fails.
    pub fn say_all(&self, commands: &[&[&str]]) {
        let answer = self.write(&commands.iter().map(|words| resp(words)).collect::<String>()).expect("an answer");
        assert!(answer.lines().all(|line| line == "+OK"), "{answer}");
    }

    fn write(&self, text: &str) -> std::io::Result<String> {
        let mut socket = UnixStream::connect(socket(&self.folder))?;
        socket.set_read_timeout(Some(Duration::from_secs(120)))?;
        socket.write_all(text.as_bytes())?;
        let mut space = [0; 4096];
        let count = socket.read(&mut space)?;
        Ok(String::from_utf8_lossy(&space[..count]).into_owned())
    }

    fn until_it_answers(&self) {
        until("redis-server answers", || self.say(&["PING"]).ok().filter(|answer| !answer.is_empty()));
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resp(words: &[&str]) -> String {
    let each: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    format!("*{}\r\n{each}", words.len())
}

fn socket(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("redis.sock")
}

fn spawn(binary: &PathBuf, folder: &tempfile::TempDir, more: &[String]) -> Child {
    let _ = std::fs::remove_file(socket(folder));
    Command::new(binary)
        .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
        .arg(socket(folder))
        .arg("--dir")
        .arg(folder.path())
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server starts")
}
