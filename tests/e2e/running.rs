//! Processes that serve, and how to ask them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

/// A process that serves; it ends with the test. What it wrote is shown if the test fails.
pub struct Running {
    child: Child,
    pub url: String,
    pub first_line: String,
    said: Arc<Mutex<Vec<u8>>>,
    errors: tempfile::NamedTempFile,
    what: &'static str,
}

impl Running {
    /// A simulated engine that serves the model `sim`.
    pub fn engine(more: &[&str]) -> Running {
        Running::engine_on("127.0.0.1:0", more)
    }

    /// The same at this address.
    pub fn engine_on(address: &str, more: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
        command.args(["engine", "--listen", address, "--model", "sim"]).args(more);
        Running::start(command, "the simulated engine")
    }

    /// Starts a process that prints its address on its first line of output.
    pub fn start(mut command: Command, what: &'static str) -> Running {
        let errors = tempfile::NamedTempFile::new().expect("a file for what it says");
        let theirs = errors.reopen().expect("a second handle");
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::from(theirs))
            .spawn()
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut first_line = String::new();
        output.read_line(&mut first_line).expect("text");
        let said = Arc::new(Mutex::new(Vec::new()));
        let keep = Arc::clone(&said);
        // Read on, so that it never blocks on a full pipe.
        std::thread::spawn(move || {
            let mut space = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut space) {
                keep.lock().expect("nobody panics with it").extend_from_slice(&space[..count]);
            }
        });
        let mut running = Running { child, url: String::new(), first_line, said, errors, what };
        let json = serde_json::from_str::<Value>(&running.first_line).ok();
        let told = json.as_ref().and_then(|json| json["listening"].as_str());
        let told = told.or_else(|| running.first_line.trim().strip_prefix("listening on "));
        let told = told.unwrap_or_else(|| panic!("{what} did not say where it listens"));
        running.url = if told.starts_with("http") { told.to_owned() } else { format!("http://{told}") };
        running
    }

    /// Everything it wrote so far.
    pub fn output(&self) -> String {
        let said = self.said.lock().expect("nobody panics with it").clone();
        let errors = std::fs::read(self.errors.path()).expect("the file is ours");
        format!("{}{}{}", self.first_line, String::from_utf8_lossy(&said), String::from_utf8_lossy(&errors))
    }

    /// Ends it at once, in mid-word.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started here");
    }

    /// Sends it a signal: `TERM`, `HUP`.
    pub fn signal(&self, name: &str) {
        let told = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(told.is_ok_and(|status| status.success()), "{} could not be told", self.what);
    }

    /// Its number in the system.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Host and port.
    pub fn address(&self) -> &str {
        authority(&self.url)
    }

    /// Waits until it has ended; its exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        until("the process has ended", || self.child.try_wait().expect("it was started here")).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let output = self.output();
            let from = output.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
            eprintln!("--- {} wrote:\n{}", self.what, &output[from..]);
        }
    }
}

/// A command of ours that ends by itself.
pub struct Ended {
    pub code: Option<i32>,
    pub told: String,
    pub errors: String,
}

/// Runs our binary to its end. One that does not end is killed, and has no code.
pub fn run(arguments: &[&str]) -> Ended {
    let file = || tempfile::NamedTempFile::new().expect("a file for what it says");
    let (told, errors) = (file(), file());
    let mut child = Command::new(env!("CARGO_BIN_EXE_goodput"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::from(told.reopen().expect("a second handle")))
        .stderr(Stdio::from(errors.reopen().expect("a second handle")))
        .spawn()
        .expect("it is ours");
    let status = attempt(|| child.try_wait().expect("it was started here"));
    let _ = child.kill();
    let _ = child.wait();
    let text = |file: &tempfile::NamedTempFile| {
        String::from_utf8_lossy(&std::fs::read(file.path()).expect("the file is ours")).into_owned()
    };
    Ended { code: status.and_then(|status| status.code()), told: text(&told), errors: text(&errors) }
}

/// Tries until the value is there, a bounded number of times with a pause between, because another process
/// cannot wake this one. The bound is reached only on an error, whatever the load of the machine.
pub fn attempt<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..1200 {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::park_timeout(Duration::from_millis(100));
    }
    None
}

pub fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    attempt(look).unwrap_or_else(|| panic!("it never came true that {what}"))
}

pub fn get(url: &str, path: &str) -> Result<String, String> {
    ask(url, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
}

pub fn post(url: &str, path: &str, headers: &str, body: &str) -> Result<String, String> {
    ask(url, &posting(path, headers, body))
}

fn posting(path: &str, headers: &str, body: &str) -> String {
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n");
    format!("{head}{headers}content-length: {}\r\n\r\n{body}", body.len())
}

/// A response that is read in parts.
pub struct Open {
    socket: TcpStream,
    pub read: String,
}

impl Open {
    pub fn post(url: &str, path: &str, body: &str) -> Open {
        let mut socket = connect(url).expect("it listens");
        socket.write_all(posting(path, "", body).as_bytes()).expect("it reads");
        Open { socket, read: String::new() }
    }

    /// Reads until this text has come.
    pub fn read_until(&mut self, text: &str) {
        while !self.read.contains(text) {
            assert!(self.read_some(), "the answer ended before {text:?}: {}", self.read);
        }
    }

    /// Reads to the end.
    pub fn read_to_end(&mut self) {
        while self.read_some() {}
    }

    fn read_some(&mut self) -> bool {
        let mut space = [0; 4096];
        let count = self.socket.read(&mut space).unwrap_or(0);
        self.read.push_str(&String::from_utf8_lossy(&space[..count]));
        count > 0
    }
}

/// Host and port of a URL.
pub fn authority(url: &str) -> &str {
    let after = url.split_once("://").map_or(url, |(_, after)| after);
    after.split('/').next().unwrap_or_default()
}

fn connect(url: &str) -> std::io::Result<TcpStream> {
    let socket = TcpStream::connect(authority(url))?;
    socket.set_read_timeout(Some(Duration::from_secs(120)))?;
    Ok(socket)
}

/// Sends a request and returns the body of a 200. The error is the whole response, or why there is none.
/// Chunk framing is kept, because only the text is examined.
pub fn ask(url: &str, request: &str) -> Result<String, String> {
    let read = || -> std::io::Result<String> {
        let mut socket = connect(url)?;
        socket.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = read().map_err(|error| error.to_string())?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200") || head.starts_with("HTTP/1.0 200") => {
            Ok(body.to_owned())
        }
        _ => Err(answer),
    }
}
