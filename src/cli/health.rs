//! `goodput health`: asks a running gateway for its health. The container's health check, because the image
//! has no other HTTP client.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use http::{StatusCode, Uri};

use super::admin_port::{AdminPort, address_to_ask, settings_of};
use super::print;

/// Checks the health of a running gateway: exit code 0 if healthy, 1 if not.
#[derive(Clone, Debug, clap::Args)]
pub struct HealthArgs {
    /// URL to ask: /readyz or /livez of the admin port, or /health of the listener.
    #[arg(long, default_value = "http://127.0.0.1:9090/readyz")]
    pub url: Uri,
    /// Ask the gateway of this settings file: /readyz of its admin port, or with `admin: off` /health of its
    /// listener.
    #[arg(short, long, value_name = "FILE", conflicts_with = "url")]
    pub config: Option<PathBuf>,
    /// Time limit of the response.
    #[arg(long, default_value_t = 3, value_name = "SECONDS")]
    pub timeout_seconds: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl HealthArgs {
    /// Asks, and prints the status. No response means unhealthy.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let whom = self.target().and_then(|url| Ok((AdminPort::of(&url, None)?, url)));
        let (port, url) = match whom {
            Ok(whom) => whom,
            Err(error) if self.json => {
                let told = serde_json::json!({"status": null, "well": false, "error": format!("{error:#}")});
                return print::last(&told.to_string(), ExitCode::from(2));
            }
            Err(error) => {
                eprintln!("goodput health: {error:#}");
                return ExitCode::from(2);
            }
        };
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("goodput health: no runtime: {error}");
                return ExitCode::from(3);
            }
        };
        match runtime.block_on(self.ask_port(&port, &url)) {
            Ok(status) => {
                let told = match self.json {
                    true => serde_json::json!({"status": status.as_u16(), "well": status.is_success()}).to_string(),
                    false => status.to_string(),
                };
                print::last(&told, if status.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
            Err(error) if self.json => {
                let told = serde_json::json!({"status": null, "well": false, "error": format!("{error:#}")});
                print::last(&told.to_string(), ExitCode::FAILURE)
            }
            Err(error) => {
                eprintln!("goodput health: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    /// Returns the status of the response.
    ///
    /// # Errors No response arrived within the limit.
    pub async fn ask(&self) -> anyhow::Result<StatusCode> {
        let url = self.target()?;
        self.ask_port(&AdminPort::of(&url, None)?, &url).await
    }

    async fn ask_port(&self, port: &AdminPort, url: &Uri) -> anyhow::Result<StatusCode> {
        let path = url.path_and_query().map_or("/", |path| path.as_str());
        Ok(port.get(path, Duration::from_secs(self.timeout_seconds)).await?.0)
    }

    /// The URL to ask.
    fn target(&self) -> anyhow::Result<Uri> {
        let Some(file) = &self.config else { return Ok(self.url.clone()) };
        let settings = settings_of(file)?;
        let (address, path) = match &settings.admin {
            Some(admin) => (admin.address, "readyz"),
            None if settings.listen.tls.is_some() => {
                bail!("with `admin: off` and TLS for clients no port answers in cleartext")
            }
            None => (settings.listen.address, "health"),
        };
        let url = format!("http://{}/{path}", address_to_ask(address)?);
        url.parse().with_context(|| format!("{url} is not a URL"))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::cli::command_line::parse;

    fn to(url: &str) -> HealthArgs {
        parse(["health", "--url", url]).unwrap()
    }

    async fn answered(answer: &'static [u8]) -> anyhow::Result<StatusCode> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/readyz", listener.local_addr().unwrap());
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            assert!(head.starts_with(b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1:"), "{head:?}");
            stream.write_all(answer).await.unwrap();
        };
        let health = to(&url);
        tokio::join!(health.ask(), serve).0
    }

    #[tokio::test]
    async fn the_status_decides_and_no_response_is_an_error() {
        let ready = answered(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(ready.unwrap(), StatusCode::OK);
        let leaving = answered(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\nnot ready").await;
        assert_eq!(leaving.unwrap(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answered(b"").await.is_err());
    }

    #[tokio::test]
    async fn an_invalid_url_is_an_error() {
        for url in ["https://127.0.0.1:1/", "/readyz"] {
            assert!(to(url).ask().await.is_err(), "{url}");
            assert_eq!(format!("{:?}", to(url).run()), format!("{:?}", ExitCode::from(2)), "{url}");
        }
    }

    #[test]
    fn the_admin_address_comes_from_a_settings_file() {
        let target = |more: &str| {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("goodput.yaml");
            let yaml = include_str!("../../config/minimal.yaml");
            std::fs::write(&file, format!("{yaml}\n{more}\n")).unwrap();
            let health: HealthArgs = parse(["health", "-c", file.to_str().unwrap()]).unwrap();
            health.target().map(|url| url.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(target("").unwrap(), "http://127.0.0.1:9090/readyz");
        assert_eq!(target("admin: {address: \"0.0.0.0:9191\"}").unwrap(), "http://127.0.0.1:9191/readyz");
        assert_eq!(target("admin: off").unwrap(), "http://127.0.0.1:8080/health");
        assert!(target("admin: {address: \"127.0.0.1:0\"}").unwrap_err().contains("give the URL"));
        assert!(target("admni: off").unwrap_err().contains("admni"), "problems of the file are told");
        let both = parse::<HealthArgs>(["health", "-c", "a.yaml", "--url", "http://127.0.0.1:1/"]);
        assert!(both.is_err_and(|error| error.to_string().contains("cannot be used with")));
    }
}
