//! Probes of a service at the start of a command, and hints for their failures.

use anyhow::Context;

use crate::load::probe::{ProbeError, ServiceProbe};

/// The model of a service with a single one.
///
/// # Errors No model, several models, or no response.
pub(super) async fn only_model(probe: &ServiceProbe) -> anyhow::Result<String> {
    let models = probe
        .models()
        .await
        .map_err(explained)
        .context("no model was chosen, and the list of models cannot be read; give --model")?;
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
