//! A response as the client got it, with times.

use bytes::Bytes;
use goodput::clock::Clock;
use goodput::forward::ReplyBody;
use goodput::http1::with_fields;
use goodput::types::Tick;
use http::{HeaderMap, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;

/// A response whose body is still to be read. Dropped, the client has left.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// When the head came.
    pub at: Tick,
    clock: Clock,
    body: ReplyBody,
}

/// A body that was read to its end.
#[derive(Clone, Debug)]
pub struct Whole {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// When the head came.
    pub at: Tick,
    pub frames: Vec<(Bytes, Tick)>,
    /// When it ended.
    pub end: Tick,
    /// It ended abnormally: the connection is cut.
    pub is_cut: bool,
}

impl Reply {
    pub fn new(response: Response<ReplyBody>, clock: Clock) -> Self {
        let (head, body) = with_fields(response).into_parts();
        Reply { status: head.status, headers: head.headers, at: clock.now(), clock, body }
    }

    /// The next frame; `None` at the end, whatever kind of end.
    pub async fn frame(&mut self) -> Option<(Bytes, Tick)> {
        let frame = self.body.frame().await?.ok()?;
        Some((frame.into_data().expect("no trailers"), self.clock.now()))
    }

    /// Reads until `count` frames have come.
    pub async fn frames(&mut self, count: usize) -> Vec<(Bytes, Tick)> {
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.push(self.frame().await.expect("another frame"));
        }
        frames
    }

    /// Reads to the end.
    pub async fn whole(mut self) -> Whole {
        let (mut frames, mut is_cut) = (Vec::new(), false);
        loop {
            match self.body.frame().await {
                Some(Ok(frame)) => frames.push((frame.into_data().expect("no trailers"), self.clock.now())),
                Some(Err(_)) => is_cut = true,
                None => break,
            }
        }
        let Reply { status, headers, at, clock, .. } = self;
        Whole { status, headers, at, frames, end: clock.now(), is_cut }
    }
}

impl Whole {
    pub fn bytes(&self) -> Vec<u8> {
        self.frames.iter().flat_map(|(bytes, _)| bytes.to_vec()).collect()
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.bytes()).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes()).expect("JSON")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    /// The data of every event.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(str::to_owned).collect()
    }

    /// The moments at which frames came, in milliseconds, each once.
    pub fn moments(&self) -> Vec<u64> {
        let mut moments: Vec<u64> = self.frames.iter().map(|(_, at)| millis(*at)).collect();
        moments.dedup();
        moments
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().expect("text"))
}

pub fn millis(at: Tick) -> u64 {
    at.as_nanos() / 1_000_000
}
