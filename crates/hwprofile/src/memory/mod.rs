//! Memory that a training run will need, line by line with its reason, before any weight is read.
//!
//! [`estimate`] counts what the step of this project keeps (docs/architecture.md): weights, gradients, optimizer state,
//! what each block stores for the backward, and the working set of the loss or of the one block that is being
//! differentiated, whichever is larger.
//! Two engines are known: the portable bodies, and CUDA's own (`fused`), which holds less and in other places.
//! Gives up: what depends on the machine and not on the run. An allocator's rounding, the optimizer's temporaries and, for the
//! portable bodies, the device's context and libraries come on top: leave a tenth of the memory free.

mod estimate;
mod fused;
mod lora;
mod shape;
mod training;

pub use estimate::{MemoryEstimate, MemoryLine, estimate};
pub use lora::{LinearLayer, LoraShape, UnknownLinear};
pub use shape::ModelShape;
#[cfg(test)]
pub(crate) use shape::llama_3_1_8b;
pub use training::{BaseStorage, Recompute, TrainingShape};

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
    fn bytes_read_in_three_digits() {
        let written: Vec<_> = [0, 999, 1024, 1536 << 20, 80 << 30, 1000 << 30].map(human_bytes).into();
        assert_eq!(written, ["0 B", "999 B", "1.00 KiB", "1.50 GiB", "80.0 GiB", "0.98 TiB"]);
    }
}
