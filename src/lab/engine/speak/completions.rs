//! `completions`.

use super::super::voice::{Finish, Piece};
use super::{Speak, Talk, Told, Turn, data, quoted, reason, usage_so_far, usage_total, usage_whole};

#[derive(Default)]
pub(super) struct Completions {
    /// Choices that have begun, because an echo precedes their first text.
    begun: Vec<usize>,
}

impl Speak for Completions {
    fn turn(&mut self, talk: &Talk, told: &[Told], turn: &Turn, out: &mut Vec<String>) {
        let now = &told[turn.choice];
        let mut text = String::new();
        if !self.begun.contains(&turn.choice) {
            self.begun.push(turn.choice);
            text.push_str(echo(talk, turn.choice));
        }
        for piece in &turn.pieces {
            text.push_str(visible(piece));
        }
        let usage = match talk.ask.continuous_usage {
            true => format!(r#","usage":{}"#, usage_so_far(talk, now)),
            false => String::new(),
        };
        let fingerprint = match now.finish {
            Some(_) if !talk.ask.include_usage => format!(r#","system_fingerprint":{}"#, quoted(&talk.fingerprint)),
            _ => String::new(),
        };
        out.push(data(&format!(
            r#"{{{},"choices":[{{"index":{},"text":{},"logprobs":null,"finish_reason":{},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}]{usage}{fingerprint}}}"#,
            head(talk),
            turn.choice,
            quoted(&text),
            finish(now.finish)
        )));
    }

    fn closing(&mut self, talk: &Talk, told: &[Told], out: &mut Vec<String>) {
        if talk.ask.include_usage {
            let (usage, fingerprint) = (usage_total(talk, told), quoted(&talk.fingerprint));
            let head = head(talk);
            out.push(data(&format!(r#"{{{head},"choices":[],"usage":{usage},"system_fingerprint":{fingerprint}}}"#)));
        }
        out.push(data("[DONE]"));
    }

    fn whole(&mut self, talk: &Talk, told: &[Told]) -> String {
        let choice = |(index, told): (usize, &Told)| {
            let text = [echo(talk, index), &told.reasoning, &told.text, &told.arguments].concat();
            format!(
                r#"{{"index":{index},"text":{},"logprobs":null,"finish_reason":{},"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}}"#,
                quoted(&text),
                finish(told.finish)
            )
        };
        let choices: Vec<String> = told.iter().enumerate().map(choice).collect();
        format!(
            r#"{{{},"choices":[{}],"service_tier":null,"system_fingerprint":{},"usage":{},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
            head(talk),
            choices.join(","),
            quoted(&talk.fingerprint),
            usage_whole(talk, told)
        )
    }
}

fn head(talk: &Talk) -> String {
    let model = quoted(&talk.ask.model);
    format!(r#""id":"cmpl-{}","object":"text_completion","created":{},"model":{model}"#, talk.id, talk.created)
}

/// The prompt of a choice, if the request asks for an echo.
fn echo(talk: &Talk, choice: usize) -> &str {
    let prompt = choice as u64 / talk.ask.n.max(1);
    match talk.ask.prompts.get(prompt as usize) {
        Some(prompt) if talk.ask.echo => &prompt.text,
        _ => "",
    }
}

fn visible(piece: &Piece) -> &str {
    match piece {
        Piece::Reasoning(text) | Piece::Text(text) | Piece::Arguments(text) | Piece::Call(text) => text,
        Piece::End => "",
    }
}

fn finish(finish: Option<Finish>) -> String {
    finish.map_or_else(|| "null".to_owned(), |finish| quoted(reason(finish)))
}
