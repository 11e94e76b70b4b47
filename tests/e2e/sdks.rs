//! Clients' libraries, each with the script that drives it.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::parts::{Missing, find, parts, python, scripts};

/// A client's library with the script that drives it.
pub struct Sdk {
    program: PathBuf,
    script: PathBuf,
    modules: Option<PathBuf>,
}

impl Sdk {
    pub fn openai_python() -> Result<Sdk, Missing> {
        Sdk::python("openai", "sdk_openai.py")
    }

    pub fn anthropic_python() -> Result<Sdk, Missing> {
        Sdk::python("anthropic", "sdk_anthropic.py")
    }

    pub fn python(package: &str, script: &str) -> Result<Sdk, Missing> {
        let program = python()?;
        let there = Command::new(&program).args(["-c", &format!("import {package}")]).stderr(Stdio::null()).status();
        match there {
            Ok(status) if status.success() => Ok(Sdk { program, script: scripts().join(script), modules: None }),
            _ => Err(format!("the Python package {package} is missing; run tests/e2e/prepare.sh")),
        }
    }

    pub fn openai_node() -> Result<Sdk, Missing> {
        let program = find("node", "install Node")?;
        let modules = parts().join("e2e-node/node_modules");
        if !modules.join("openai").is_dir() {
            return Err("the Node package openai is missing; run tests/e2e/prepare.sh".to_owned());
        }
        Ok(Sdk { program, script: scripts().join("sdk_openai.mjs"), modules: Some(modules) })
    }

    /// Runs the script against a service; every step of it must hold.
    pub fn drive(&self, url: &str, model: &str, lacks: &str) {
        let mut command = Command::new(&self.program);
        command.arg(&self.script).env("GOODPUT_URL", url).env("GOODPUT_MODEL", model).env("GOODPUT_WITHOUT", lacks);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        // Proxies of the machine must not interfere.
        for proxy in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            command.env_remove(proxy);
        }
        if let Some(modules) = &self.modules {
            command.env("GOODPUT_NODE_MODULES", modules);
        }
        let done = command.output().expect("the program was found");
        let said = String::from_utf8_lossy(&done.stdout);
        let script = self.script.display();
        assert!(done.status.success(), "{script}\n{said}\n{}", String::from_utf8_lossy(&done.stderr));
        eprintln!("{script}: {}", said.lines().last().unwrap_or_default());
    }
}
