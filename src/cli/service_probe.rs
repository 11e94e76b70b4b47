//! Questions to a service at a command's start, and what to do about its answers.

use anyhow::Context;

use crate::load::probe::{ProbeError, ServiceProbe};

/// The model of a service that has one only.
///
/// # Errors
/// It has none or several, or does not answer.
pub(super) async fn only_model(probe: &ServiceProbe) -> anyhow::Result<String> {
    let models = probe.models().await.map_err(explained).context("no model was chosen, and the list of models cannot be read; give --model")?;
    match &models[..] {
        [only] => Ok(only.clone()),
        [] => anyhow::bail!("the service lists no model; give --model"),
        several => anyhow::bail!("the service lists several models; give --model with one of: {}", several.join(", ")),
    }
}

/// The error, with a way out.
pub(super) fn explained(error: ProbeError) -> anyhow::Error {
    let hint = match error.status().map(|status| status.as_u16()) {
        Some(401 | 403) => "; give the key by --api-key-file",
        Some(404) => "; check the URL, --path and --model",
        _ => "",
    };
    anyhow::anyhow!("{error}{hint}")
}
