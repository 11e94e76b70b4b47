//! Events of a chat stream as one-letter functions, so that tests read like the cases they replay.
//!
//! `r` role, `t` text, `g` reasoning, `k` tool call, `f` finish, `u` usage, `d` the end.
//! Each is the data of one event for [`Script::say`](super::Script::say). Model `m1`, id `c1`, created
//! 1700000000, choice 0; see [`of`] and [`with_usage`] for variants.

/// The role event that engines send first; never a token.
#[must_use]
pub fn r() -> String {
    choice(0, r#"{"role":"assistant","content":""}"#, None)
}

/// A content event.
#[must_use]
pub fn t(text: &str) -> String {
    choice(0, &format!(r#"{{"content":{}}}"#, quoted(text)), None)
}

/// A reasoning event, in the spelling `reasoning_content`.
#[must_use]
pub fn g(text: &str) -> String {
    choice(0, &format!(r#"{{"reasoning_content":{}}}"#, quoted(text)), None)
}

/// A reasoning event, in the spelling `reasoning`.
#[must_use]
pub fn g_short(text: &str) -> String {
    choice(0, &format!(r#"{{"reasoning":{}}}"#, quoted(text)), None)
}

/// A tool call event with these arguments.
#[must_use]
pub fn k(arguments: &str) -> String {
    let call = format!(
        r#"{{"tool_calls":[{{"index":0,"id":"k1","type":"function","function":{{"name":"f","arguments":{}}}}}]}}"#,
        quoted(arguments)
    );
    choice(0, &call, None)
}

/// The finish event, with an empty delta.
#[must_use]
pub fn f(reason: &str) -> String {
    choice(0, "{}", Some(reason))
}

/// The usage event, with no choice.
#[must_use]
pub fn u(prompt: u64, completion: u64) -> String {
    format!(r#"{{{HEAD},"choices":[],"usage":{}}}"#, usage(prompt, completion))
}

/// The end of the stream.
#[must_use]
pub fn d() -> String {
    "[DONE]".to_owned()
}

/// An in-band error.
#[must_use]
pub fn error(message: &str, code: u16) -> String {
    format!(r#"{{"error":{{"message":{},"type":"BadRequestError","param":null,"code":{code}}}}}"#, quoted(message))
}

/// The same event for another choice.
#[must_use]
pub fn of(index: u64, event: &str) -> String {
    event.replacen(r#"{"index":0,"#, &format!(r#"{{"index":{index},"#), 1)
}

/// The same event with usage so far beside its choice.
#[must_use]
pub fn with_usage(event: &str, prompt: u64, completion: u64) -> String {
    let open = event.strip_suffix('}').unwrap_or(event);
    format!(r#"{open},"usage":{}}}"#, usage(prompt, completion))
}

/// The same event with `usage: null`.
#[must_use]
pub fn with_null_usage(event: &str) -> String {
    let open = event.strip_suffix('}').unwrap_or(event);
    format!(r#"{open},"usage":null}}"#)
}

/// A non-streaming chat response with this content and usage.
#[must_use]
pub fn whole(text: &str, prompt: u64, completion: u64) -> String {
    format!(
        r#"{{"id":"c1","object":"chat.completion","created":1700000000,"model":"m1","choices":[{{"index":0,"message":{{"role":"assistant","content":{}}},"logprobs":null,"finish_reason":"stop"}}],"usage":{}}}"#,
        quoted(text),
        usage(prompt, completion)
    )
}

const HEAD: &str = r#""id":"c1","object":"chat.completion.chunk","created":1700000000,"model":"m1""#;

fn choice(index: u64, delta: &str, finish: Option<&str>) -> String {
    let finish = finish.map_or_else(|| "null".to_owned(), quoted);
    format!(r#"{{{HEAD},"choices":[{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}"#)
}

fn usage(prompt: u64, completion: u64) -> String {
    let total = prompt.saturating_add(completion);
    format!(r#"{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total}}}"#)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn every_fixture_is_json_of_the_shape_it_names() {
        for data in
            [r(), t("é\"\n"), g("x"), g_short("x"), k("{"), f("stop"), u(5, 2), error("no", 504), whole("a", 1, 2)]
        {
            assert!(serde_json::from_str::<Value>(&data).is_ok(), "{data}");
        }
        let second: Value = serde_json::from_str(&of(3, &t("a"))).unwrap();
        assert_eq!(second["choices"][0]["index"], 3);
        let counted: Value = serde_json::from_str(&with_usage(&t("a"), 100, 2)).unwrap();
        assert_eq!(counted["usage"]["total_tokens"], 102);
        assert_eq!(counted["choices"][0]["delta"]["content"], "a");
    }
}
