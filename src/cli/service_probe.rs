//! Probes of a service at the start of a command, and hints for their failures.

use anyhow::Context;

use crate::load::probe::{ProbeError, ServiceProbe};

/// The model of a service with a single one.
///
/// # Errors No model, several models, or no response.
pub(super) async fn only_model(probe: &ServiceProbe) -> anyhow::Result<String> {
    let models = probe.models().await.map_err(explained).context("which model? --model names it")?;
    match &models[..] {
        [only] => Ok(only.clone()),
        [] => anyhow::bail!("the service lists no model; name one by --model"),
        several => anyhow::bail!("the service lists several models; choose one by --model: {}", several.join(", ")),
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
