//! `chat/completions`.

use super::super::voice::{Finish, Piece};
use super::{Speak, Talk, Told, Turn, data, quoted, reason, usage_so_far, usage_total, usage_whole};

#[derive(Default)]
pub(super) struct Chat {
    has_begun: bool,
}

impl Speak for Chat {
    fn turn(&mut self, talk: &Talk, told: &[Told], turn: &Turn, out: &mut Vec<String>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            for index in 0..told.len() {
                out.push(role(talk, index));
            }
        }
        let now = &told[turn.choice];
        // A tool call ends in its own event; otherwise the finish comes with the last text.
        let mut finish = now.finish;
        let ending = finish.take_if(|finish| *finish == Finish::Calls);
        let last = turn.pieces.len().saturating_sub(1);
        for (number, piece) in turn.pieces.iter().enumerate() {
            let finish = if number == last { finish } else { None };
            out.push(choice(talk, now, turn.choice, &delta(talk, piece), finish));
        }
        if turn.pieces.is_empty() && ending.is_none() {
            out.push(choice(talk, now, turn.choice, r#"{"content":""}"#, finish));
        }
        if ending.is_some() {
            out.push(choice(talk, now, turn.choice, "{}", ending));
        }
    }

    fn closing(&mut self, talk: &Talk, told: &[Told], out: &mut Vec<String>) {
        if talk.ask.include_usage {
            let usage = usage_total(talk, told);
            let fingerprint = quoted(&talk.fingerprint);
            let head = head(talk);
            out.push(data(&format!(r#"{{{head},"choices":[],"usage":{usage},"system_fingerprint":{fingerprint}}}"#)));
        }
        out.push(data("[DONE]"));
    }

    fn whole(&mut self, talk: &Talk, told: &[Told]) -> String {
        let choices: Vec<String> = told.iter().enumerate().map(|(index, told)| message(talk, index, told)).collect();
        format!(
            r#"{{"id":"chatcmpl-{}","object":"chat.completion","created":{},"model":{},"choices":[{}],"service_tier":null,"system_fingerprint":{},"usage":{},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
            talk.id,
            talk.created,
            quoted(&talk.ask.model),
            choices.join(","),
            quoted(&talk.fingerprint),
            usage_whole(talk, told)
        )
    }
}

fn head(talk: &Talk) -> String {
    let model = quoted(&talk.ask.model);
    format!(
        r#""id":"chatcmpl-{}","object":"chat.completion.chunk","created":{},"model":{model}"#,
        talk.id, talk.created
    )
}

fn role(talk: &Talk, index: usize) -> String {
    let usage = continuous(talk, &Told::default());
    let head = head(talk);
    data(&format!(
        r#"{{{head},"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{usage},"prompt_token_ids":null,"prompt_text":null}}"#
    ))
}

fn continuous(talk: &Talk, told: &Told) -> String {
    if talk.ask.continuous_usage { format!(r#","usage":{}"#, usage_so_far(talk, told)) } else { String::new() }
}

fn delta(talk: &Talk, piece: &Piece) -> String {
    match piece {
        Piece::Reasoning(text) => format!(r#"{{"reasoning":{}}}"#, quoted(text)),
        Piece::Text(text) => format!(r#"{{"content":{}}}"#, quoted(text)),
        Piece::Call(name) => format!(
            r#"{{"content":null,"tool_calls":[{{"id":"chatcmpl-tool-{}","type":"function","index":0,"function":{{"name":{}}}}}]}}"#,
            talk.id,
            quoted(name)
        ),
        Piece::Arguments(text) => {
            format!(r#"{{"content":null,"tool_calls":[{{"index":0,"function":{{"arguments":{}}}}}]}}"#, quoted(text))
        }
        Piece::End => "{}".to_owned(),
    }
}

fn choice(talk: &Talk, told: &Told, index: usize, delta: &str, finish: Option<Finish>) -> String {
    let (head, usage) = (head(talk), continuous(talk, told));
    let ended = match finish {
        Some(finish) => format!(r#""finish_reason":"{}","stop_reason":null"#, reason(finish)),
        None => r#""finish_reason":null"#.to_owned(),
    };
    let fingerprint = match finish {
        Some(_) if !talk.ask.include_usage => format!(r#","system_fingerprint":{}"#, quoted(&talk.fingerprint)),
        _ => String::new(),
    };
    data(&format!(
        r#"{{{head},"choices":[{{"index":{index},"delta":{delta},"logprobs":null,{ended},"token_ids":null}}]{usage}{fingerprint}}}"#
    ))
}

fn message(talk: &Talk, index: usize, told: &Told) -> String {
    let optional = |text: &str| if text.is_empty() { "null".to_owned() } else { quoted(text) };
    let content = if told.call.is_some() { optional(&told.text) } else { quoted(&told.text) };
    let calls = told.call.as_ref().map_or_else(String::new, |name| {
        format!(
            r#","tool_calls":[{{"id":"chatcmpl-tool-{}","type":"function","function":{{"name":{},"arguments":{}}}}}]"#,
            talk.id,
            quoted(name),
            quoted(&told.arguments)
        )
    });
    let reasoning = optional(&told.reasoning);
    let finish = told.finish.map_or("stop", reason);
    format!(
        r#"{{"index":{index},"message":{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,"function_call":null{calls},"reasoning":{reasoning}}},"logprobs":null,"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"routed_experts":null}}"#
    )
}
