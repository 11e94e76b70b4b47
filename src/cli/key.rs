//! `goodput key new`: creates an API key and the hash for the settings.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::json;

use super::print;
use crate::identify::KeyHash;

/// API keys of tenants.
#[derive(Clone, Debug, Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum KeyCommand {
    /// Creates a key. It is printed once and stored nowhere; the settings hold its hash.
    New(New),
}

#[derive(Clone, Debug, Args)]
struct New {
    /// Label of the key, for rules.
    #[arg(long)]
    label: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl KeyArgs {
    /// Creates a key and prints it.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let KeyCommand::New(new) = &self.command;
        print::last(&new.told(&made()), ExitCode::SUCCESS)
    }
}

/// Returns a key of 43 letters and digits (256 bits) from the system's random source.
fn made() -> String {
    let letters: String = rand::rng().sample_iter(Alphanumeric).take(43).map(char::from).collect();
    format!("gp-{letters}")
}

impl New {
    fn told(&self, key: &str) -> String {
        let hash = KeyHash::of(key.as_bytes()).to_hex();
        if self.json {
            return json!({"key": key, "blake3": hash, "label": self.label}).to_string();
        }
        let label = self.label.as_ref().map(|label| format!("label: {}, ", in_yaml(label)));
        format!(
            "key, for the client (shown only now):\n  {key}\nhash, for `keys` of the tenant in the settings:\n  - {{{}blake3: \"{hash}\"}}",
            label.unwrap_or_default()
        )
    }
}

/// Quotes a text for YAML.
fn in_yaml(text: &str) -> String {
    let letter = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c == ' ' || c.is_ascii_graphic() || c.is_alphanumeric() => c.to_string(),
        c => format!("\\U{:08X}", u32::from(c)),
    };
    format!("\"{}\"", text.chars().map(letter).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_key_fits_its_hash_and_is_new() {
        let (a, b) = (made(), made());
        assert_ne!(a, b);
        assert!(a.len() == 46 && a.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'));
        let told = New { label: Some("prod".into()), json: true }.told(&a);
        let answer: serde_json::Value = serde_json::from_str(&told).unwrap();
        assert_eq!(answer["key"], a);
        assert_eq!(KeyHash::from_hex(answer["blake3"].as_str().unwrap()), Some(KeyHash::of(a.as_bytes())));
        assert_eq!(answer["label"], "prod");
    }

    #[test]
    fn the_printed_line_can_be_put_into_the_settings() {
        for label in ["prod", "a \"b\" \\ c", "caf\u{e9} \u{1f30d}", "tab\tbell\u{7}", "{x}", "no: #"] {
            put_into_settings(label);
        }
    }

    fn put_into_settings(label: &str) {
        let told = New { label: Some(label.into()), json: false }.told("gp-x");
        let line = told.lines().last().unwrap();
        let text = format!(
            "slo_classes: [{{slo_class: c, joint_attainment_target: 0.9}}]\ndefault_class: c\n\
             pools: [{{pool: p, engines: [{{url: http://e:1}}]}}]\ntenants:\n  - tenant: t\n    keys:\n    {line}\n"
        );
        let settings = crate::config::load(&text, &crate::config::ProcessEnvironment::default()).unwrap();
        let mut headers = http::HeaderMap::new();
        headers.insert("x-api-key", http::HeaderValue::from_static("gp-x"));
        assert_eq!(settings.keyring.find(&headers).unwrap().key_label.as_deref(), Some(label));
    }
}
