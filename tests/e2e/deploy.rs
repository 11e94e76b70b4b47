//! The files under `deploy` are valid for their programs, and agree with the gateway and with each other.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use goodput::config::{self, Environment};
use serde_json::Value;

use crate::parts::{Missing, find, parts, scripts, with_parts};
use crate::running::{Running, get, until};

/// Groups whose kinds Kubernetes itself does not have.
const CUSTOM: [&str; 2] = ["monitoring.coreos.com/v1", "keda.sh/v1alpha1"];
const KUSTOMIZE: &str = "kustomize.config.k8s.io/";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(path: &Path) -> Value {
    serde_yaml::from_str(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every YAML file below a folder, in order.
fn files(folder: &str) -> Vec<PathBuf> {
    fn walk(path: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(path).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|end| end == "yaml") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), &mut found);
    found.sort();
    found
}

/// The objects of Kubernetes, each with its file; without kustomizations, patches and values.
fn objects() -> Vec<(PathBuf, Value)> {
    let all = files("deploy/kubernetes").into_iter().map(|path| (path.clone(), yaml(&path)));
    let is_object = |(path, object): &(PathBuf, Value)| {
        let version = object["apiVersion"].as_str().unwrap_or_default();
        !version.is_empty()
            && !version.starts_with(KUSTOMIZE)
            && !path.components().any(|part| part.as_os_str() == "overlays")
    };
    all.filter(is_object).collect()
}

fn object(kind: &str, name: &str) -> Value {
    let is_it = |object: &Value| object["kind"] == kind && object["metadata"]["name"] == name;
    let found = objects().into_iter().map(|(_, object)| object).find(is_it);
    found.unwrap_or_else(|| panic!("no {kind} is called {name}"))
}

fn is_custom(object: &Value) -> bool {
    CUSTOM.iter().any(|version| object["apiVersion"] == *version)
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("it was found");
    assert!(output.status.success(), "{command:?}\n{}", told(&output));
    told(&output)
}

/// Runs a program with a text on its input.
fn fed(command: &mut Command, input: &str) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it was found");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_owned();
    let writing = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    let _ = writing.join();
    output
}

fn validated_by_kubernetes(files: &[PathBuf]) -> Result<(), Missing> {
    let validate = find("kubernetes-validate", "run tests/e2e/prepare.sh")?;
    let told = run(Command::new(validate).args(["--strict"]).args(files));
    let passed = told.matches(" passed for resource ").count();
    assert!(passed >= files.len() && !told.contains("WARN"), "{told}");
    Ok(())
}

fn validated_as_custom(objects: &[Value]) -> Result<(), Missing> {
    let node = find("node", "install it: apt-get install nodejs")?;
    let modules = parts().join("e2e-node/node_modules");
    if !modules.join("@kubernetes-models/keda").is_dir() {
        return Err("@kubernetes-models is missing; run tests/e2e/prepare.sh".to_owned());
    }
    // A script finds its packages beside itself.
    let folder = modules.parent().expect("it has one");
    let script = folder.join("custom_resources.mjs");
    std::fs::copy(scripts().join("custom_resources.mjs"), &script).expect("the folder is ours");
    let output = fed(Command::new(node).arg(&script), &Value::from(objects.to_vec()).to_string());
    let told = told(&output);
    assert!(output.status.success() && told.matches("ok   ").count() == objects.len(), "{told}");
    Ok(())
}

#[test]
fn the_manifests_are_valid_kubernetes() {
    with_parts("kubernetes-validate", || {
        let native: Vec<_> =
            objects().into_iter().filter(|(_, object)| !is_custom(object)).map(|(path, _)| path).collect();
        assert!(native.len() > 8, "{native:?}");
        validated_by_kubernetes(&native)?;
        let folder = tempfile::tempdir().expect("a folder");
        let wrong = folder.path().join("wrong.yaml");
        std::fs::write(
            &wrong,
            read(&root().join("deploy/kubernetes/base/service.yaml")).replace("selector:", "seletcor:"),
        )
        .expect("the folder is ours");
        let validate = find("kubernetes-validate", "run tests/e2e/prepare.sh")?;
        let output = Command::new(validate).arg("--strict").arg(&wrong).output().expect("it was found");
        assert!(!output.status.success(), "it would have told: {}", told(&output));
        Ok(())
    });
}

#[test]
fn the_custom_resources_are_valid() {
    with_parts("kubernetes-models", || {
        let custom: Vec<_> = objects().into_iter().map(|(_, object)| object).filter(is_custom).collect();
        let kinds: BTreeSet<_> = custom.iter().filter_map(|object| object["kind"].as_str()).collect();
        assert_eq!(kinds, BTreeSet::from(["PrometheusRule", "ScaledObject", "ServiceMonitor"]));
        validated_as_custom(&custom)
    });
}

/// Every file of a kustomization exists, and every manifest belongs to one, except those of the engines and
/// the values of an adapter.
#[test]
fn kustomizations_lead_to_every_manifest() {
    let mut used = BTreeSet::new();
    for path in files("deploy/kubernetes") {
        if path.file_name().is_none_or(|name| name != "kustomization.yaml") {
            continue;
        }
        let (folder, file) = (path.parent().expect("a folder"), yaml(&path));
        let lists =
            ["resources", "components"].into_iter().flat_map(|key| file[key].as_array().cloned().unwrap_or_default());
        let patches = file["patches"].as_array().cloned().unwrap_or_default();
        let all = lists.chain(patches.into_iter().map(|patch| patch["path"].clone()).filter(|path| !path.is_null()));
        for target in all {
            let target = folder.join(target.as_str().expect("a path"));
            let target = target.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", target.display()));
            used.insert(if target.is_dir() { target.join("kustomization.yaml") } else { target });
        }
    }
    let stands_alone = |path: &PathBuf| {
        let path = path.strip_prefix(root().join("deploy/kubernetes")).expect("it is below it");
        path.starts_with("engines") || path.starts_with("overlays") || path == Path::new("prometheus-adapter.yaml")
    };
    let left: Vec<_> =
        files("deploy/kubernetes").into_iter().filter(|path| !used.contains(path) && !stands_alone(path)).collect();
    assert!(left.is_empty() && used.len() > 15, "{left:?}");
}

#[test]
fn the_overlays_are_rendered_and_valid() {
    with_parts("kustomize", || {
        let kubectl = find("kubectl", "install Kubernetes' own client")?;
        let folder = tempfile::tempdir().expect("a folder");
        for (overlay, kinds) in [("production", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")] {
            let path = root().join("deploy/kubernetes/overlays").join(overlay);
            let rendered = run(Command::new(&kubectl).arg("kustomize").arg(path));
            let objects: Vec<Value> = rendered
                .split("\n---\n")
                .map(|one| serde_yaml::from_str(one).unwrap_or_else(|error| panic!("{error}\n{one}")))
                .collect();
            assert!(objects.iter().any(|object| object["kind"] == kinds), "{rendered}");
            let deployment = objects.iter().find(|object| object["kind"] == "Deployment").expect("there is one");
            let board = objects.iter().find(|object| object["metadata"]["name"] == "goodput-dashboard");
            let board = board.expect("the dashboard is among them");
            assert_eq!(board["metadata"]["labels"]["grafana_dashboard"], "1", "Grafana's sidecar finds it");
            let deployed = read(&root().join("deploy/grafana/goodput.json"));
            assert_eq!(board["data"]["goodput.json"], deployed.as_str());
            assert!(deployment["spec"]["replicas"].is_null(), "the autoscaler says how many");
            let namespaced = objects.iter().filter(|object| object["kind"] != "Namespace");
            assert!(namespaced.clone().all(|object| object["metadata"]["namespace"] == "goodput"));
            let (custom, native): (Vec<_>, Vec<_>) = objects.clone().into_iter().partition(is_custom);
            let native: Vec<_> = native
                .iter()
                .enumerate()
                .map(|(number, object)| {
                    let file = folder.path().join(format!("{overlay}-{number}.yaml"));
                    std::fs::write(&file, object.to_string()).expect("the folder is ours");
                    file
                })
                .collect();
            validated_by_kubernetes(&native)?;
            validated_as_custom(&custom)?;
        }
        Ok(())
    });
}

/// Secrets that settings refer to exist for this purpose.
struct Imagined;

impl Environment for Imagined {
    fn variable(&self, _: &str) -> Option<String> {
        None
    }

    fn file(&self, _: &Path) -> std::io::Result<Vec<u8>> {
        Ok(b"a-secret-from-a-file".to_vec())
    }
}

/// Settings that load, and of which nothing is worth a note.
fn checked(text: &str) -> config::Settings {
    let settings = config::load(text, &Imagined).unwrap_or_else(|problems| panic!("{problems:#?}"));
    assert!(settings.notes.is_empty(), "{:#?}", settings.notes);
    settings
}

fn seconds(text: &str) -> u64 {
    text.trim_end_matches('s').parse().unwrap_or_else(|_| panic!("{text} is no number of seconds"))
}

#[test]
fn the_manifests_agree_with_the_settings_that_they_carry() {
    let map = object("ConfigMap", "goodput");
    let text = map["data"]["goodput.yaml"].as_str().expect("the settings");
    let settings = checked(text);
    let written: Value = serde_yaml::from_str(text).expect("YAML");
    let deployment = object("Deployment", "goodput");
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];

    // The check of the settings compares these with delay, drain and the longest response.
    let shutdown = &written["shutdown"];
    let grace = pod["terminationGracePeriodSeconds"].as_u64().expect("a number");
    assert_eq!(seconds(shutdown["grace_period"].as_str().expect("it is written")), grace);
    let pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().expect("a number");
    assert_eq!(seconds(shutdown["pre_stop"].as_str().expect("it is written")), pre_stop);

    let port = |name: &str| {
        let ports = container["ports"].as_array().expect("a list");
        let port = ports.iter().find(|port| port["name"] == name).unwrap_or_else(|| panic!("no port is called {name}"));
        port["containerPort"].as_u64().expect("a number")
    };
    assert_eq!(port("http"), u64::from(settings.listen.address.port()));
    let admin = settings.admin.as_ref().expect("an admin port");
    assert_eq!(port("admin"), u64::from(admin.address.port()));
    assert!(
        admin.address.ip().is_unspecified() && admin.token.is_some(),
        "the kubelet reaches it, and nobody else changes anything"
    );
    for (probe, path) in [("startupProbe", "/livez"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")] {
        assert_eq!(
            (&container[probe]["httpGet"]["path"], &container[probe]["httpGet"]["port"]),
            (&path.into(), &"admin".into())
        );
    }
    assert_eq!(container["args"], serde_json::json!(["serve", "-c", "/etc/goodput/config/goodput.yaml"]));
    assert_eq!(deployment["spec"]["replicas"].as_u64(), written["replicas"].as_u64());

    // Secrets and the journal are at the paths of the settings.
    let mounts = container["volumeMounts"].as_array().expect("a list");
    let is_mounted = |path: &str| {
        let below = |mount: &&Value| path.starts_with(&format!("{}/", mount["mountPath"].as_str().expect("a path")));
        mounts.iter().find(below).unwrap_or_else(|| panic!("{path} is mounted nowhere"))["readOnly"] == true
    };
    assert!(is_mounted(written["admin"]["token_file"].as_str().expect("it is written")));
    let journal = &written["telemetry"]["journal"];
    assert!(is_mounted(journal["hash_key_file"].as_str().expect("it is written")));
    assert!(!is_mounted(journal["path"].as_str().expect("it is written")), "the journal can be written");
    let held = (settings.journal.as_ref().expect("a journal").keep as u64 + 2)
        * settings.journal.as_ref().expect("a journal").max_size;
    assert!(held <= 1 << 30, "the volume of the journal has 1 GiB, and it may hold {held} bytes");

    // Hardened, and nothing that a restricted namespace refuses.
    let security = &container["securityContext"];
    assert_eq!(
        (&security["readOnlyRootFilesystem"], &security["allowPrivilegeEscalation"]),
        (&true.into(), &false.into())
    );
    assert_eq!(security["capabilities"]["drop"], serde_json::json!(["ALL"]));
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let user = read(&root().join("Dockerfile")).lines().find_map(|line| line.strip_prefix("USER ").map(str::to_owned));
    assert_eq!(user, Some(format!("{0}:{0}", pod["securityContext"]["runAsUser"])), "the image's own user");
    assert_eq!(deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"], 0);
}

#[test]
fn pod_selectors_select_the_gateways() {
    let labels = &object("Deployment", "goodput")["spec"]["template"]["metadata"]["labels"];
    let chosen = |selector: &Value| {
        let wanted = selector.as_object().unwrap_or_else(|| panic!("no selector: {selector}"));
        assert!(
            !wanted.is_empty() && wanted.iter().all(|(key, value)| labels[key] == *value),
            "{selector} against {labels}"
        );
    };
    chosen(&object("Service", "goodput")["spec"]["selector"]);
    chosen(&object("Service", "goodput-admin")["spec"]["selector"]);
    chosen(&object("PodDisruptionBudget", "goodput")["spec"]["selector"]["matchLabels"]);
    chosen(&object("NetworkPolicy", "goodput")["spec"]["podSelector"]["matchLabels"]);
    let (monitor, admin) = (object("ServiceMonitor", "goodput"), object("Service", "goodput-admin"));
    for (key, value) in monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels") {
        assert_eq!(admin["metadata"]["labels"][key], *value);
    }
    assert_eq!(monitor["spec"]["endpoints"][0]["port"], admin["spec"]["ports"][0]["name"]);
    let secret = &object("Deployment", "goodput")["spec"]["template"]["spec"]["volumes"][1]["secret"]["secretName"];
    assert_eq!(monitor["spec"]["endpoints"][0]["authorization"]["credentials"]["name"], *secret);
}

#[test]
fn compose_gives_the_gateway_the_time_that_its_settings_count_on() {
    let compose = yaml(&root().join("deploy/compose/compose.yaml"));
    let text = read(&root().join("deploy/compose/goodput.yaml"));
    checked(&text);
    let settings: Value = serde_yaml::from_str(&text).expect("YAML");
    let given = compose["services"]["gateway"]["stop_grace_period"].as_str().expect("it is written");
    assert_eq!(settings["shutdown"]["grace_period"], given);
}

#[test]
fn promtool_reads_every_rule_of_the_manifest() {
    with_parts("promtool", || {
        let promtool = find("promtool", "install it: apt-get install prometheus")?;
        let rule = object("PrometheusRule", "goodput");
        let groups = rule["spec"]["groups"].as_array().expect("a list");
        let rules: usize = groups.iter().map(|group| group["rules"].as_array().expect("a list").len()).sum();
        assert!(rules > 20, "{rules}");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("rules.yaml");
        std::fs::write(&file, rule["spec"].to_string()).expect("the folder is ours");
        let told = run(Command::new(promtool).args(["check", "rules"]).arg(&file));
        assert!(told.contains(&format!("SUCCESS: {rules} rules found")), "{told}");
        Ok(())
    });
}

#[test]
fn amtool_sends_pages_to_the_people_on_call() {
    with_parts("amtool", || {
        let amtool = find("amtool", "install it: apt-get install prometheus-alertmanager")?;
        let file = root().join("deploy/alertmanager.yml");
        run(Command::new(&amtool).arg("check-config").arg(&file));
        for (severity, receiver) in [("page", "on-call"), ("ticket", "tickets"), ("none", "tickets")] {
            let flag = format!("--config.file={}", file.display());
            let label = format!("severity={severity}");
            let output =
                Command::new(&amtool).args(["config", "routes", "test", &flag, &label]).output().expect("it was found");
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), receiver, "{severity}: {}", told(&output));
        }
        Ok(())
    });
}

/// `kubectl apply` keeps what it applied in an annotation, of which Kubernetes takes 256 KiB.
#[test]
fn the_dashboard_fits_into_a_config_map() {
    let length = std::fs::metadata(root().join("deploy/grafana/goodput.json")).expect("it is there").len();
    assert!((50_000..250_000).contains(&length), "{length} bytes");
}

/// The rules of the manifest are those of the settings that it carries.
#[test]
fn the_manifest_has_the_rules_of_its_settings() {
    let map = object("ConfigMap", "goodput");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("goodput.yaml");
    // Secrets have a place in a pod only.
    let text = map["data"]["goodput.yaml"].as_str().expect("the settings").replace("/etc/goodput/", "");
    for secret in ["secret/admin.token", "secret/journal.key"] {
        let path = folder.path().join(secret);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("the folder is ours");
        std::fs::write(path, "a-secret-of-a-test").expect("the folder is ours");
    }
    std::fs::write(&file, text).expect("the folder is ours");
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.args(["rules", "--format", "prometheus-operator", "--json", "-c"]).arg(&file);
    let printed: Value = serde_json::from_str(&run(&mut command)).expect("JSON");
    assert!(
        object("PrometheusRule", "goodput") == printed,
        "write it anew: goodput rules --format prometheus-operator -c (the settings of deploy/kubernetes/base/configmap.yaml)"
    );
}

/// The words behind a key of the unit, over all lines that have it.
fn unit(key: &str) -> Vec<String> {
    let text = read(&root().join("deploy/systemd/goodput.service"));
    let lines = text.lines().filter_map(|line| line.split_once('=')).filter(|(name, _)| *name == key);
    lines.map(|(_, value)| value.to_owned()).collect()
}

#[test]
fn the_unit_gives_the_default_settings_the_time_that_they_need() {
    let shutdown = goodput::accept::settings::Shutdown::default();
    let needed = (shutdown.delay + shutdown.drain).as_secs() + 5;
    assert_eq!(unit("TimeoutStopSec"), [needed.to_string()]);
    // `@resources` would end the process when it raises its limit of open files.
    assert!(unit("SystemCallFilter").iter().all(|filter| !filter.contains("@resources")));
    assert_eq!(unit("ExecStart"), ["/usr/local/bin/goodput serve -c /etc/goodput/goodput.yaml"]);
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    with_parts("systemd", || {
        let analyze = find("systemd-analyze", "install it: apt-get install systemd")?;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("goodput.service");
        let text = read(&root().join("deploy/systemd/goodput.service"));
        std::fs::write(&file, text.replace("/usr/local/bin/goodput", env!("CARGO_BIN_EXE_goodput")))
            .expect("the folder is ours");
        let told = run(Command::new(&analyze).arg("verify").arg(&file));
        assert!(told.trim().is_empty(), "{told}");
        let told = run(Command::new(&analyze).args(["security", "--offline=true", "--threshold=20"]).arg(&file));
        assert!(told.contains("Overall exposure level"), "{told}");
        Ok(())
    });
}

/// The service as the unit starts it: its own lines and directories, its mask for new files. The paths of the
/// system are moved into a folder.
#[test]
fn the_units_own_lines_check_serve_reload_and_end() {
    let root = tempfile::tempdir().expect("a folder");
    let (etc, state) = (root.path().join("etc/goodput"), root.path().join("var/lib/goodput"));
    for folder in [&etc, &state] {
        std::fs::create_dir_all(folder).expect("the folder is ours");
    }
    let free = crate::prometheus::free_address();
    let settings = read(&self::root().join("config/minimal.yaml"));
    let text = format!(
        "{settings}\nlisten: {{address: \"127.0.0.1:0\"}}\nadmin: {{address: \"{free}\"}}\n\
         telemetry: {{journal: {{path: {0}/journal.jsonl}}, slo_state: {{path: {0}/slo.state}}}}\n",
        state.display()
    );
    std::fs::write(etc.join("goodput.yaml"), text).expect("the folder is ours");
    let line = |line: &str| {
        line.replace("/usr/local/bin/goodput", env!("CARGO_BIN_EXE_goodput"))
            .replace("/etc/goodput", &etc.display().to_string())
    };
    let [check] = &unit("ExecStartPre")[..] else { panic!("one line checks the settings") };
    let [serve] = &unit("ExecStart")[..] else { panic!("one line serves") };
    let mask = unit("UMask").remove(0);
    let shell = |line: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("umask {mask} && cd / && exec {line}")]);
        command
    };
    run(&mut shell(&line(check)));
    // Its first line then says where it listens.
    let mut service = Running::start(shell(&format!("{} --json", line(serve))), "the service");
    let admin = format!("http://{free}");
    until("it is ready", || get(&admin, "/readyz").ok());
    for reload in unit("ExecReload") {
        run(&mut shell(&line(&reload).replace("$MAINPID", &service.id().to_string())));
    }
    until("the settings were read again", || {
        let page = get(&admin, "/metrics").ok()?;
        page.contains("goodput_config_reloads_total{result=\"success\"} 2").then_some(())
    });
    service.signal(unit("KillSignal").remove(0).trim_start_matches("SIG"));
    assert_eq!(service.exit_code(), Some(0));
    let files: BTreeSet<_> = std::fs::read_dir(&state)
        .expect("it is there")
        .map(|entry| {
            use std::os::unix::fs::PermissionsExt as _;
            let entry = entry.expect("an entry");
            let mode = entry.metadata().expect("it is there").permissions().mode();
            assert_eq!(mode & 0o027, 0, "{} is open to others: {mode:o}", entry.path().display());
            entry.file_name()
        })
        .collect();
    assert_eq!(files, BTreeSet::from(["journal.jsonl".into(), "slo.state".into()]));
}
