//! The memory that a run needs, as lines with reasons.
//!
//! Each backend states its own lines next to the code that allocates (`firebrick-kernels`); here is only what a line and an estimate
//! are, and how bytes are written.
//! Trade-off: a line's name is a fixed string, so that plans and tests can ask for it.

use serde::Serialize;

/// One part of an estimate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryLine {
    /// What it is.
    pub what: &'static str,
    /// How much.
    pub bytes: u64,
    /// The arithmetic, in words.
    pub why: String,
}

/// What a run needs at its peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Which moment this is.
    pub peak: &'static str,
    /// Parts that exist at the same time where the tensors live, none of them empty.
    pub lines: Vec<MemoryLine>,
    /// Parts in host memory in addition, none of them empty.
    pub host_lines: Vec<MemoryLine>,
}

impl MemoryEstimate {
    /// All lines together, without those in host memory.
    pub fn total_bytes(&self) -> u64 {
        sum(&self.lines)
    }

    /// What host memory holds in addition to the device.
    pub fn host_bytes(&self) -> u64 {
        sum(&self.host_lines)
    }

    /// The line to shrink first.
    pub fn largest(&self) -> Option<&MemoryLine> {
        self.lines.iter().max_by_key(|line| line.bytes)
    }
}

fn sum(lines: &[MemoryLine]) -> u64 {
    lines.iter().map(|line| line.bytes).sum()
}

/// `1610612736` as `1.50 GiB`: three digits, the largest unit that leaves one before the point.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // 999.5 would print as "1000": the next unit reads better.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_of_host_and_device_are_apart() {
        let line = |what, bytes| MemoryLine { what, bytes, why: String::new() };
        let estimate =
            MemoryEstimate { peak: "now", lines: vec![line("a", 3), line("b", 5)], host_lines: vec![line("c", 7)] };
        assert_eq!((estimate.total_bytes(), estimate.host_bytes()), (8, 7));
        assert_eq!(estimate.largest().map(|line| line.what), Some("b"));
    }

    #[test]
    fn bytes_read_in_three_digits() {
        let written: Vec<_> = [0, 999, 1024, 1536 << 20, 80 << 30, 1000 << 30].map(human_bytes).into();
        assert_eq!(written, ["0 B", "999 B", "1.00 KiB", "1.50 GiB", "80.0 GiB", "0.98 TiB"]);
    }
}
