//! `chat/completions`.

use super::super::text::{FinishReason, Fragment};
use super::{
    ChoiceDelta, ChoiceState, Protocol, ResponseMeta, data, quoted, reason, usage_so_far, usage_total, usage_whole,
};

#[derive(Default)]
pub(super) struct Chat {
    has_begun: bool,
}

impl Protocol for Chat {
    fn turn(&mut self, meta: &ResponseMeta, states: &[ChoiceState], turn: &ChoiceDelta, out: &mut Vec<String>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            for index in 0..states.len() {
                out.push(role(meta, index));
            }
        }
        let now = &states[turn.choice];
        // A tool call ends in its own event; otherwise the finish comes with the last text.
        let mut finish = now.finish;
        let ending = finish.take_if(|finish| *finish == FinishReason::Calls);
        let last = turn.pieces.len().saturating_sub(1);
        for (number, piece) in turn.pieces.iter().enumerate() {
            let finish = if number == last { finish } else { None };
            out.push(choice(meta, now, turn.choice, &delta(meta, piece), finish));
        }
        if turn.pieces.is_empty() && ending.is_none() {
            out.push(choice(meta, now, turn.choice, r#"{"content":""}"#, finish));
        }
        if ending.is_some() {
            out.push(choice(meta, now, turn.choice, "{}", ending));
        }
    }

    fn closing(&mut self, meta: &ResponseMeta, states: &[ChoiceState], out: &mut Vec<String>) {
        if meta.ask.include_usage {
            let usage = usage_total(meta, states);
            let fingerprint = quoted(&meta.fingerprint);
            let head = head(meta);
            out.push(data(&format!(r#"{{{head},"choices":[],"usage":{usage},"system_fingerprint":{fingerprint}}}"#)));
        }
        out.push(data("[DONE]"));
    }

    fn whole(&mut self, meta: &ResponseMeta, states: &[ChoiceState]) -> String {
        let choices: Vec<String> =
            states.iter().enumerate().map(|(index, states)| message(meta, index, states)).collect();
        format!(
            r#"{{"id":"chatcmpl-{}","object":"chat.completion","created":{},"model":{},"choices":[{}],"service_tier":null,"system_fingerprint":{},"usage":{},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
            meta.id,
            meta.created,
            quoted(&meta.ask.model),
            choices.join(","),
            quoted(&meta.fingerprint),
            usage_whole(meta, states)
        )
    }
}

fn head(meta: &ResponseMeta) -> String {
    let model = quoted(&meta.ask.model);
    format!(
        r#""id":"chatcmpl-{}","object":"chat.completion.chunk","created":{},"model":{model}"#,
        meta.id, meta.created
    )
}

fn role(meta: &ResponseMeta, index: usize) -> String {
    let usage = continuous(meta, &ChoiceState::default());
    let head = head(meta);
    data(&format!(
        r#"{{{head},"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{usage},"prompt_token_ids":null,"prompt_text":null}}"#
    ))
}

fn continuous(meta: &ResponseMeta, states: &ChoiceState) -> String {
    if meta.ask.continuous_usage { format!(r#","usage":{}"#, usage_so_far(meta, states)) } else { String::new() }
}

fn delta(meta: &ResponseMeta, piece: &Fragment) -> String {
    match piece {
        Fragment::Reasoning(text) => format!(r#"{{"reasoning":{}}}"#, quoted(text)),
        Fragment::Text(text) => format!(r#"{{"content":{}}}"#, quoted(text)),
        Fragment::Call(name) => format!(
            r#"{{"content":null,"tool_calls":[{{"id":"chatcmpl-tool-{}","type":"function","index":0,"function":{{"name":{}}}}}]}}"#,
            meta.id,
            quoted(name)
        ),
        Fragment::Arguments(text) => {
            format!(r#"{{"content":null,"tool_calls":[{{"index":0,"function":{{"arguments":{}}}}}]}}"#, quoted(text))
        }
        Fragment::End => "{}".to_owned(),
    }
}

fn choice(
    meta: &ResponseMeta,
    states: &ChoiceState,
    index: usize,
    delta: &str,
    finish: Option<FinishReason>,
) -> String {
    let (head, usage) = (head(meta), continuous(meta, states));
    let ended = match finish {
        Some(finish) => format!(r#""finish_reason":"{}","stop_reason":null"#, reason(finish)),
        None => r#""finish_reason":null"#.to_owned(),
    };
    let fingerprint = match finish {
        Some(_) if !meta.ask.include_usage => format!(r#","system_fingerprint":{}"#, quoted(&meta.fingerprint)),
        _ => String::new(),
    };
    data(&format!(
        r#"{{{head},"choices":[{{"index":{index},"delta":{delta},"logprobs":null,{ended},"token_ids":null}}]{usage}{fingerprint}}}"#
    ))
}

fn message(meta: &ResponseMeta, index: usize, states: &ChoiceState) -> String {
    let optional = |text: &str| if text.is_empty() { "null".to_owned() } else { quoted(text) };
    let content = if states.call.is_some() { optional(&states.text) } else { quoted(&states.text) };
    let calls = states.call.as_ref().map_or_else(String::new, |name| {
        format!(
            r#","tool_calls":[{{"id":"chatcmpl-tool-{}","type":"function","function":{{"name":{},"arguments":{}}}}}]"#,
            meta.id,
            quoted(name),
            quoted(&states.arguments)
        )
    });
    let reasoning = optional(&states.reasoning);
    let finish = states.finish.map_or("stop", reason);
    format!(
        r#"{{"index":{index},"message":{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,"function_call":null{calls},"reasoning":{reasoning}}},"logprobs":null,"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"routed_experts":null}}"#
    )
}
