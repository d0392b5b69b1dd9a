//! The memory that a run needs, as lines with reasons.
//!
//! Each backend states its own lines next to the code that allocates (`firebrick-kernels`); here are only the types of a line and an estimate, and
//! the formatting of bytes.

use serde::Serialize;

/// One part of an estimate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryLine {
    /// Name of the allocation.
    pub what: &'static str,
    /// Its size.
    pub bytes: u64,
    /// The arithmetic, in words.
    pub why: String,
}

/// Memory of a run at its peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// The moment of the peak.
    pub peak: &'static str,
    /// Parts that exist at the same time in the memory of the tensors, none of them empty.
    pub lines: Vec<MemoryLine>,
    /// Additional parts in host memory, none of them empty.
    pub host_lines: Vec<MemoryLine>,
}

impl MemoryEstimate {
    /// Returns all lines together, without those in host memory.
    pub fn total_bytes(&self) -> u64 {
        sum(&self.lines)
    }

    /// Sums the parts in host memory.
    pub fn host_bytes(&self) -> u64 {
        sum(&self.host_lines)
    }

    /// Returns the line to shrink first.
    pub fn largest(&self) -> Option<&MemoryLine> {
        self.lines.iter().max_by_key(|line| line.bytes)
    }
}

fn sum(lines: &[MemoryLine]) -> u64 {
    lines.iter().map(|line| line.bytes).sum()
}

/// Formats `1610612736` as `1.50 GiB`: three digits, in the largest unit with at least one before the point.
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
