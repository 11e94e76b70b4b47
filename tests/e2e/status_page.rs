//! The status page in a real Chromium, which Playwright drives (`status_page.py`).

use std::process::Command;

use crate::gateway::{Gateway, Setup};
use crate::parts::{find, parts, python, scripts, with_parts};
use crate::running::{Running, post};

const TOKEN: &str = "a-token-of-the-test";
const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":3,"stream":true}"#;

#[test]
fn the_status_page_in_a_browser() {
    with_parts("status page", || {
        let chromium = find("chromium", "install it: apt-get install chromium")?;
        let axe = parts().join("e2e-node/node_modules/axe-core/axe.min.js");
        let python = python()?;
        if !axe.is_file() {
            return Err("the Node package axe-core is missing; run tests/e2e/prepare.sh".to_owned());
        }
        let engines = [Running::engine(&["--speed", "10"]), Running::engine(&["--speed", "10"])];
        let gateway = Gateway::start(&Setup {
            engines: &engines.each_ref(),
            admin: "token_file: admin.token",
            files: &[("admin.token", TOKEN)],
            chat: "degrade: [{action: defer, enter_when: {queue_wait_above: 1h}}]",
            pool: "max_concurrency_per_engine: 8",
            ..Setup::default()
        });
        let url = &gateway.running.url;
        for class in ["x-slo-class: chat\r\n", "x-slo-class: strict\r\n"] {
            for _ in 0..4 {
                assert!(post(url, CHAT, class, BODY).is_ok_and(|answer| answer.contains("[DONE]")));
            }
        }
        let shots = tempfile::tempdir().expect("a folder for pictures");
        let shots = std::env::var_os("GOODPUT_SHOTS").map_or_else(|| shots.path().to_path_buf(), Into::into);
        let mut script = Command::new(python);
        script
            .arg(scripts().join("status_page.py"))
            .env("GOODPUT_URL", url)
            .env("GOODPUT_ADMIN", &gateway.admin)
            .env("GOODPUT_TOKEN", TOKEN)
            .env("GOODPUT_BROWSER", chromium)
            .env("GOODPUT_AXE", axe)
            .env("GOODPUT_SHOTS", shots)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        for proxy in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            script.env_remove(proxy);
        }
        let done = script.output().expect("the interpreter was found");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{said}\n{}", String::from_utf8_lossy(&done.stderr));
        eprintln!("status page: {}", said.lines().last().unwrap_or_default());
        Ok(())
    });
}
