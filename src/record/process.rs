//! Process metrics under the names that all Prometheus clients use.
//!
//! Read from `/proc` at each scrape; absent where `/proc` is missing.

use std::fs;

/// Clock ticks per second in `/proc`: fixed at 100 on Linux, whatever the kernel's own rate.
const TICKS_PER_SECOND: f64 = 100.0;

/// A sample.
#[derive(Debug, Default)]
pub(super) struct ProcessSample {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) virtual_bytes: Option<u64>,
    pub(super) open_fds: Option<u64>,
    pub(super) max_fds: Option<u64>,
    pub(super) threads: Option<u64>,
}

impl ProcessSample {
    pub(super) fn sample() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        ProcessSample {
            cpu_seconds: cpu_seconds(&stat),
            resident_bytes: number_after(&status, "VmRSS:").map(|kib| kib * 1024),
            virtual_bytes: number_after(&status, "VmSize:").map(|kib| kib * 1024),
            open_fds: fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64),
            max_fds: number_after(&limits, "Max open files"),
            threads: number_after(&status, "Threads:"),
        }
    }
}

fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// User and system time: fields 14 and 15, counted after the name, which may contain spaces.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11).map(str::parse::<f64>);
    let (user, system) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some((user + system) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_brackets_does_not_shift_the_fields() {
        let stat = "7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 3 0 99";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds(""), None);
    }

    #[test]
    fn numbers_are_found_behind_their_names() {
        assert_eq!(number_after("VmPeak:\t 9 kB\nVmRSS:\t  1234 kB\n", "VmRSS:"), Some(1234));
        assert_eq!(number_after("Max open files            1024   4096   files", "Max open files"), Some(1024));
        assert_eq!(number_after("Max open files            unlimited", "Max open files"), None);
    }
}
