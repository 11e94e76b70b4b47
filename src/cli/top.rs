//! `goodput top`: how a running gateway stands, in a terminal: classes, seats, queues, engines, tenants.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use http::Uri;
use terminal_size::{Height, Width, terminal_size};

use super::admin_port::{AdminPort, address_to_ask, settings_of, token_of};
use super::signals::ShutdownSignals;
use super::{numbers, print};
use crate::admin::status::{ClassStatus, EngineStatus, GatewayStatus, HistoryStatus, LimitUse, PoolStatus};
use crate::clock::Clock;
use crate::sim::demo::view::{RedrawnTable, aligned, length, percent};

/// Shows how a running gateway stands, again and again until Ctrl-C.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// The admin port of the gateway.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    admin: Uri,
    /// A file with the token of the admin port.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Take address and token from this settings file.
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["admin", "token_file"])]
    config: Option<PathBuf>,
    /// Show it once, and end.
    #[arg(long)]
    once: bool,
    /// Seconds from one look to the next: 0.5 to 3600.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = numbers::within::<500, 3_600_000>)]
    every: f64,
    /// Answer in JSON, as `GET /status` does: one line per look.
    #[arg(long)]
    json: bool,
}

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The widest line: what the narrowest of common terminals shows without a break.
const WIDTH: usize = 80;

/// Tenants that are shown: those that are nearest to a limit.
const TENANTS: usize = 10;

impl TopArgs {
    /// Shows it: 0 when told to end, 1 where the gateway does not answer, 2 for a file that cannot be used.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let port = match self.port() {
            Ok(port) => port,
            Err(error) => {
                eprintln!("goodput top: {error:#}");
                return ExitCode::from(2);
            }
        };
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("goodput top: no runtime: {error}");
                return ExitCode::from(3);
            }
        };
        let shown =
            runtime.block_on(async { if self.once { self.show_once(&port).await } else { self.show(&port).await } });
        match shown {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("goodput top: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    fn port(&self) -> anyhow::Result<AdminPort> {
        let Some(file) = &self.config else {
            return AdminPort::of(&self.admin, self.token_file.as_deref().map(token_of).transpose()?);
        };
        let admin = settings_of(file)?.admin.context("these settings have no admin port (`admin: off`)")?;
        let url = format!("http://{}", address_to_ask(admin.address)?);
        AdminPort::of(&url.parse().with_context(|| format!("{url} is no URL"))?, admin.token)
    }

    async fn show_once(&self, port: &AdminPort) -> anyhow::Result<()> {
        let status = look(port).await?;
        print::line(self.text(&status, usize::MAX)?.trim_end())?;
        Ok(())
    }

    /// The first look must succeed; after that a gateway that does not answer is waited for.
    async fn show(&self, port: &AdminPort) -> anyhow::Result<()> {
        let clock = Clock::start();
        let mut signals = ShutdownSignals::listen();
        let redraws = io::stdout().is_terminal() && !self.json;
        let (mut table, mut out) = (RedrawnTable::default(), io::stdout());
        let mut status = look(port).await?;
        let mut trouble = None;
        loop {
            let (wide, high) = if redraws { room() } else { (usize::MAX, usize::MAX) };
            let mut text = self.text(&status, high)?;
            if let Some(trouble) = &trouble {
                text = format!("{trouble}; trying again\n{text}");
            }
            let written = if redraws {
                table.draw(&mut out, &fitted(&text, wide, high))
            } else {
                writeln!(out, "{}", text.trim_end())
            };
            if let Err(error) = written.and_then(|()| out.flush()) {
                print::or_enough(Err(error))?;
                return Ok(());
            }
            tokio::select! {
                () = clock.sleep_until(Some(clock.now() + Duration::from_secs_f64(self.every))) => {}
                () = signals.next() => return Ok(()),
            }
            match look(port).await {
                Ok(now) => (status, trouble) = (now, None),
                Err(error) => trouble = Some(format!("{error:#}")),
            }
        }
    }

    fn text(&self, status: &GatewayStatus, high: usize) -> anyhow::Result<String> {
        if self.json { Ok(serde_json::to_string(status)?) } else { Ok(page(status, high)) }
    }
}

async fn look(port: &AdminPort) -> anyhow::Result<GatewayStatus> {
    let (status, body) = port.get("/status", PATIENCE).await?;
    let told = || String::from_utf8_lossy(&body).trim().to_owned();
    match status.as_u16() {
        200 => serde_json::from_slice(&body).context("this is no gateway's status: is it another version of goodput?"),
        401 => bail!("the admin port asks for its token: give --token-file, or -c with the settings"),
        404 => bail!("it has no /status: is this the admin port of a gateway?"),
        code => bail!("{code}: {}", told()),
    }
}

/// Columns and lines of the terminal.
fn room() -> (usize, usize) {
    terminal_size().map_or((WIDTH, 24), |(Width(wide), Height(high))| (usize::from(wide), usize::from(high)))
}

/// What of a text fits: a line that breaks, or one that scrolls away, could not be drawn over.
fn fitted(text: &str, wide: usize, high: usize) -> String {
    let line = |line: &str| line.chars().take(wide).chain(['\n']).collect::<String>();
    text.lines().take(high.saturating_sub(1)).map(line).collect()
}

/// Everything, in lines of 80 columns. Where that is higher than the terminal, tenants go first and then
/// engines, those that are up before the others.
fn page(status: &GatewayStatus, high: usize) -> String {
    let head = head(status);
    let classes = classes(status);
    let fixed = head.lines().count() + classes.lines().count() + 2;
    let engines = engines(status, high.saturating_sub(fixed));
    let tenants = tenants(status);
    let text = format!("{head}\n{classes}\n{engines}");
    let has_room = text.lines().count() + tenants.lines().count() < high.saturating_sub(1);
    if has_room && !tenants.is_empty() { format!("{text}\n{tenants}") } else { text }
}

fn head(status: &GatewayStatus) -> String {
    let ready = if status.ready { "ready" } else { "not ready" };
    let settings = if status.settings_failed { "   settings failed to load, older ones hold" } else { "" };
    let up = uptime(status.uptime_seconds);
    let judged = status.classes.iter().map(|class| judged_per_second(&class.history)).sum::<f64>();
    format!("goodput {}, {ready}, up {up}   {judged:.1} judged/s{settings}\n", status.version)
}

fn uptime(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Over the last minute, or what is known of it.
fn judged_per_second(history: &[HistoryStatus]) -> f64 {
    let Some(now) = history.last().map(|point| point.unix_seconds) else { return 0.0 };
    let recent = || history.iter().filter(|point| now - point.unix_seconds < 60.0);
    // A point tells of the time since the one before it.
    let before = history.iter().rev().find(|point| now - point.unix_seconds >= 60.0);
    let since = before.or(recent().next()).map_or(now, |point| point.unix_seconds);
    let counted = recent().filter(|point| point.unix_seconds > since);
    let seconds = now - since;
    if seconds > 0.0 { counted.map(|point| point.judged).sum::<u64>() as f64 / seconds } else { 0.0 }
}

/// The window whose burn is shown: the shortest that there is.
fn burn(class: &ClassStatus) -> String {
    let shortest = class.standing.burn_rate.iter().min_by_key(|burn| burn.window_seconds);
    shortest.map_or_else(|| "-".to_owned(), |burn| format!("{:.2}", burn.rate))
}

fn classes(status: &GatewayStatus) -> String {
    let mut rows =
        vec![["class", "kept", "target", "budget", "burn 5m", "open", "waiting", "overdue", "level"].map(String::from)];
    for class in &status.classes {
        let standing = &class.standing;
        let is_below = standing.attainment.is_some_and(|kept| kept < standing.target);
        let level = standing.degradation.as_ref().map_or_else(
            || "-".to_owned(),
            |now| format!("{}/{}{}", now.level, now.levels, if now.forced { "*" } else { "" }),
        );
        rows.push([
            standing.class.clone(),
            percent(standing.attainment) + if is_below { "!" } else { " " },
            format!("{:.0} %", standing.target * 100.0),
            standing.budget_remaining.map_or_else(|| "-".to_owned(), |left| format!("{:.0} %", left * 100.0)),
            burn(class),
            standing.in_flight.to_string(),
            standing.waiting.to_string(),
            standing.overdue.to_string(),
            level,
        ]);
    }
    let mut text = aligned(&rows, [17, 9, 6, 7, 7, 5, 7, 7, 5]);
    if let Some(note) = &status.budgets_note {
        text.push_str(note);
        text.push('\n');
    }
    let is_forced = |class: &ClassStatus| class.standing.degradation.as_ref().is_some_and(|now| now.forced);
    if text.contains('!') {
        text.push_str("!: below its target\n");
    }
    if status.classes.iter().any(is_forced) {
        text.push_str("*: an operator set the level\n");
    }
    text
}

/// Pools with their engines, in so many lines at most.
fn engines(status: &GatewayStatus, room: usize) -> String {
    let mut text = String::new();
    // Each pool has a line of its own, one for its columns, and one that says what is left out.
    let heads = status.pools.len() * 4;
    let mut left = room.saturating_sub(heads);
    for pool in &status.pools {
        text.push_str(&pool_line(pool));
        let mut rows = vec![
            ["engine", "state", "ours", "runs", "queue", "KV", "kept 1h", "TTFT p95", "TPOT p95"].map(String::from),
        ];
        let mut order: Vec<&EngineStatus> = pool.engines.iter().collect();
        order.sort_by_key(|engine| engine.state == "up" && !engine.drained);
        let shown = order.len().min(left);
        left -= shown;
        rows.extend(order[..shown].iter().map(|engine| engine_row(engine)));
        if shown > 0 {
            text.push_str(&aligned(&rows, [21, 7, 7, 4, 5, 4, 7, 8, 8]));
        }
        if shown < order.len() {
            text.push_str(&format!("and {} more\n", order.len() - shown));
        }
    }
    text
}

fn pool_line(pool: &PoolStatus) -> String {
    let seats =
        pool.seats.map_or_else(|| "no limit on seats".to_owned(), |seats| format!("{}/{seats} seats", pool.taken));
    let here = || pool.engines.iter().filter(|engine| engine.state != "left");
    let up = here().filter(|engine| ["up", "cooling"].contains(&engine.state.as_str()) && !engine.drained).count();
    format!("pool {}: {seats}, {} waiting, {up}/{} engines take requests\n", pool.pool, pool.waiting, here().count())
}

fn engine_row(engine: &EngineStatus) -> [String; 9] {
    let whole = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
    let seconds = |value: Option<f64>| length(value.map(Duration::from_secs_f64));
    let hour = &engine.last_hour;
    let kept = (hour.judged > 0).then(|| hour.met as f64 / hour.judged as f64);
    [
        engine.engine.clone(),
        state_of(engine).to_owned(),
        engine.seats.map_or_else(|| engine.in_flight.to_string(), |seats| format!("{}/{seats}", engine.in_flight)),
        whole(engine.running),
        whole(engine.waiting),
        engine.kv_usage.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", share * 100.0)),
        percent(kept),
        seconds(hour.ttft_p95_seconds),
        seconds(hour.tpot_p95_seconds),
    ]
}

/// In seven letters.
fn state_of(engine: &EngineStatus) -> &str {
    match engine.state.as_str() {
        _ if engine.drained => "drained",
        "breaker_open" => "breaker",
        state => state,
    }
}

fn tenants(status: &GatewayStatus) -> String {
    let mut rows = vec![["tenant", "runs", "kept", "nearest limit", "used"].map(String::from)];
    for tenant in status.tenants.iter().take(TENANTS) {
        let kept = tenant.met.zip(tenant.judged).filter(|(_, judged)| *judged > 0);
        let nearest = tenant.limits.iter().max_by(|a, b| a.used_share().total_cmp(&b.used_share()));
        rows.push([
            tenant.tenant.clone(),
            tenant.running.to_string(),
            percent(kept.map(|(met, judged)| met as f64 / judged as f64)),
            nearest.map_or_else(|| "-".to_owned(), |limit| limit.limit.clone()),
            percent(nearest.map(LimitUse::used_share)),
        ]);
    }
    if rows.len() == 1 {
        return String::new();
    }
    let mut text = aligned(&rows, [21, 7, 8, 24, 8]);
    let rest = status.tenants.len().saturating_sub(TENANTS) as u64 + status.tenants_left_out;
    if rest > 0 {
        text.push_str(&format!("and {rest} more\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::{EngineHourStatus, TenantStatus};
    use crate::admin::{BurnRate, ClassStanding, Degradation};
    use crate::cli::command_line::parse;

    fn class(name: &str, attainment: f64) -> ClassStatus {
        ClassStatus {
            standing: ClassStanding {
                class: name.to_owned(),
                target: 0.95,
                attainment: Some(attainment),
                budget_remaining: Some((attainment - 0.95) / 0.05),
                burn_rate: vec![BurnRate { window_seconds: 300, covered_seconds: 300, rate: 12.5 }],
                in_flight: 9999,
                waiting: 999,
                overdue: 99,
                degradation: Some(Degradation {
                    level: 2,
                    levels: 4,
                    forced: attainment < 0.9,
                    ..Degradation::default()
                }),
                ..ClassStanding::default()
            },
            ..ClassStatus::default()
        }
    }

    fn engine(number: usize, state: &str) -> EngineStatus {
        EngineStatus {
            engine: format!("127.0.0.1:{}", 60_000 + number),
            state: state.to_owned(),
            in_flight: 256,
            seats: Some(256),
            running: Some(9999.0),
            waiting: Some(9999.0),
            kv_usage: Some(1.0),
            last_hour: EngineHourStatus {
                met: 999,
                judged: 1000,
                ttft_p95_seconds: Some(119.99),
                tpot_p95_seconds: Some(0.999),
                ..EngineHourStatus::default()
            },
            ..EngineStatus::default()
        }
    }

    fn busy() -> GatewayStatus {
        let mut engines: Vec<EngineStatus> = (0..40).map(|number| engine(number, "up")).collect();
        engines[30].state = "breaker_open".to_owned();
        engines[31].drained = true;
        let limit = |limit: &str, remaining| LimitUse { limit: limit.to_owned(), model: None, most: 100, remaining };
        let tenant = |name: usize| TenantStatus {
            tenant: format!("tenant-{name}"),
            running: 99_999,
            met: Some(1),
            judged: Some(3),
            limits: vec![limit("requests_per_minute", 99), limit("input_tokens_per_minute", 1)],
        };
        GatewayStatus {
            version: "0.1.0".to_owned(),
            uptime_seconds: 7300,
            ready: true,
            classes: vec![class("inline_completion", 0.85), class("chat_interactive", 0.99)],
            pools: vec![PoolStatus {
                pool: "interactive".to_owned(),
                seats: Some(960),
                taken: 960,
                waiting: 17,
                engines,
                ..PoolStatus::default()
            }],
            tenants: (0..15).map(tenant).collect(),
            tenants_left_out: 3,
            ..GatewayStatus::default()
        }
    }

    #[test]
    fn the_page_fits_a_terminal_of_80_columns() {
        let page = page(&busy(), usize::MAX);
        for line in page.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
        for words in ["85.0 %!", "2/4*", "960/960 seats, 17 waiting, 38/40 engines", "drained", "99.0 %", "and 8 more"]
        {
            assert!(page.contains(words), "{words}: {page}");
        }
    }

    #[test]
    fn a_low_terminal_shows_the_engines_that_do_not_work_first() {
        let page = fitted(&page(&busy(), 24), 80, 24);
        assert!(page.lines().count() < 24, "{page}");
        assert!(page.contains("breaker") && page.contains("drained") && page.contains("more"), "{page}");
        assert!(!page.contains("tenant-1"), "{page}");
        let narrow = fitted("abcdef\nxyz\n", 4, 10);
        assert_eq!(narrow, "abcd\nxyz\n");
    }

    #[test]
    fn a_gateway_that_has_just_started_is_shown_too() {
        let page = page(&GatewayStatus::default(), usize::MAX);
        assert!(page.contains("not ready") && page.contains("0.0 judged/s"), "{page}");
    }

    #[test]
    fn the_pace_is_that_of_the_last_minute() {
        let point = |unix_seconds, judged| HistoryStatus { unix_seconds, judged, ..HistoryStatus::default() };
        let history: Vec<_> = (0..30).map(|step| point(f64::from(step) * 10.0, 20)).collect();
        assert!((judged_per_second(&history) - 2.0).abs() < 1e-9);
        assert!((judged_per_second(&history[..3]) - 2.0).abs() < 1e-9, "of what is known");
        assert_eq!((judged_per_second(&history[..1]), judged_per_second(&[])), (0.0, 0.0));
    }

    #[test]
    fn the_address_comes_from_the_command_line_or_a_settings_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let port = |line: &[&str]| parse::<TopArgs>([&["top"], line].concat()).unwrap().port();
        let (token, empty) = (file("token", "secret\n"), file("empty", "\n"));
        assert!(port(&["--token-file", &token]).is_ok());
        assert!(port(&["--token-file", &empty]).unwrap_err().to_string().contains("is empty"));
        let yaml = include_str!("../../config/minimal.yaml");
        let settings = file("goodput.yaml", &format!("{yaml}\nadmin: {{token_file: token}}\n"));
        let of_file = port(&["-c", &settings]).unwrap();
        assert!(format!("{of_file:?}").contains("127.0.0.1:9090") && !format!("{of_file:?}").contains("secret"));
        let off = file("off.yaml", &format!("{yaml}\nadmin: off\n"));
        assert!(port(&["-c", &off]).unwrap_err().to_string().contains("admin: off"));
        assert!(parse::<TopArgs>(["top", "--every", "0"]).is_err());
        assert!(parse::<TopArgs>(["top", "-c", "a", "--admin", "http://b"]).is_err());
    }
}
