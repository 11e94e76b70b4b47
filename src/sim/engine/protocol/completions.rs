//! `completions`.

use super::super::text::{FinishReason, Fragment};
use super::{
    ChoiceDelta, ChoiceState, Protocol, ResponseMeta, data, quoted, reason, usage_so_far, usage_total, usage_whole,
};

#[derive(Default)]
pub(super) struct Completions {
    /// Choices that have begun, because an echo precedes their first text.
    begun: Vec<usize>,
}

impl Protocol for Completions {
    fn turn(&mut self, meta: &ResponseMeta, states: &[ChoiceState], turn: &ChoiceDelta, out: &mut Vec<String>) {
        let now = &states[turn.choice];
        let mut text = String::new();
        if !self.begun.contains(&turn.choice) {
            self.begun.push(turn.choice);
            text.push_str(echo(meta, turn.choice));
        }
        for piece in &turn.pieces {
            text.push_str(visible(piece));
        }
        let usage = match meta.ask.continuous_usage {
            true => format!(r#","usage":{}"#, usage_so_far(meta, now)),
            false => String::new(),
        };
        let fingerprint = match now.finish {
            Some(_) if !meta.ask.include_usage => format!(r#","system_fingerprint":{}"#, quoted(&meta.fingerprint)),
            _ => String::new(),
        };
        out.push(data(&format!(
            r#"{{{},"choices":[{{"index":{},"text":{},"logprobs":null,"finish_reason":{},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}]{usage}{fingerprint}}}"#,
            head(meta),
            turn.choice,
            quoted(&text),
            finish(now.finish)
        )));
    }

    fn closing(&mut self, meta: &ResponseMeta, states: &[ChoiceState], out: &mut Vec<String>) {
        if meta.ask.include_usage {
            let (usage, fingerprint) = (usage_total(meta, states), quoted(&meta.fingerprint));
            let head = head(meta);
            out.push(data(&format!(r#"{{{head},"choices":[],"usage":{usage},"system_fingerprint":{fingerprint}}}"#)));
        }
        out.push(data("[DONE]"));
    }

    fn whole(&mut self, meta: &ResponseMeta, states: &[ChoiceState]) -> String {
        let choice = |(index, states): (usize, &ChoiceState)| {
            let text = [echo(meta, index), &states.reasoning, &states.text, &states.arguments].concat();
            format!(
                r#"{{"index":{index},"text":{},"logprobs":null,"finish_reason":{},"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}}"#,
                quoted(&text),
                finish(states.finish)
            )
        };
        let choices: Vec<String> = states.iter().enumerate().map(choice).collect();
        format!(
            r#"{{{},"choices":[{}],"service_tier":null,"system_fingerprint":{},"usage":{},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
            head(meta),
            choices.join(","),
            quoted(&meta.fingerprint),
            usage_whole(meta, states)
        )
    }
}

fn head(meta: &ResponseMeta) -> String {
    let model = quoted(&meta.ask.model);
    format!(r#""id":"cmpl-{}","object":"text_completion","created":{},"model":{model}"#, meta.id, meta.created)
}

/// The prompt of a choice, if the request asks for an echo.
fn echo(meta: &ResponseMeta, choice: usize) -> &str {
    let prompt = choice as u64 / meta.ask.n.max(1);
    match meta.ask.prompts.get(prompt as usize) {
        Some(prompt) if meta.ask.echo => &prompt.text,
        _ => "",
    }
}

fn visible(piece: &Fragment) -> &str {
    match piece {
        Fragment::Reasoning(text) | Fragment::Text(text) | Fragment::Arguments(text) | Fragment::Call(text) => text,
        Fragment::End => "",
    }
}

fn finish(finish: Option<FinishReason>) -> String {
    finish.map_or_else(|| "null".to_owned(), |finish| quoted(reason(finish)))
}
