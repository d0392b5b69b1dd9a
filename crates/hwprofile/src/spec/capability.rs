//! An NVIDIA card that is not in the table: its features follow from its compute capability, its speed from its clocks.
//!
//! Operations per core and clock are those of the table's cards of the same capability: A100 312 TFLOP/s = 6,912 cores x 1.41 GHz x 32,
//! H100 989.4 = 16,896 x 1.83 x 32, B200 2,250 = 18,944 x 1.855 x 64, A40 149.7 = 10,752 x 1.74 x 8, RTX 4090 165.2 = 16,384 x 2.52 x 4,
//! T4 65.1 = 2,560 x 1.59 x 16, RTX 2080 Ti 53.8 = 4,352 x 1.545 x 8.
//! Trade-off: the largest clock that a driver reports is not always sustained, so the rate is an upper bound.

use serde::{Deserialize, Serialize};

use super::figure::{Figure, Source, Voice};
use super::types::{AcceleratorSpec, DenseRates, Feature, HardwareKind, Maker};

/// The card itself as a source.
static DRIVER: Source =
    Source { title: "this card's clocks, cores and bus, as its driver reports them", url: "NVML", voice: Voice::Maker };

/// The driver's values that determine the speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardClocks {
    /// Largest clock of the multiprocessors, MHz.
    pub sm_mhz: u32,
    /// Largest clock of the memory, MHz; two transfers per clock.
    pub memory_mhz: u32,
    /// CUDA cores.
    pub cores: u32,
    /// Bits of the memory bus.
    pub bus_bits: u32,
}

impl HardwareKind {
    /// Returns the kind of an NVIDIA card of compute capability `(major, minor)`.
    pub fn of_compute_capability(capability: (u32, u32)) -> Self {
        match capability {
            (12.., _) => Self::BlackwellRtx,
            (10 | 11, _) => Self::Blackwell,
            (9, _) => Self::Hopper,
            (8, 9) => Self::Ada,
            (8, _) => Self::Ampere,
            (7, 5) => Self::Turing,
            _ => Self::OlderNvidia,
        }
    }
}

/// Returns 16-bit operations per core and clock, and the features of this capability. `None`: no matmuls that backend `cuda` uses.
fn per_core(capability: (u32, u32), is_geforce: bool) -> Option<(f64, &'static [Feature])> {
    Some(match (HardwareKind::of_compute_capability(capability), capability) {
        (HardwareKind::Blackwell, _) => {
            (64.0, &[Feature::Fp8, Feature::Fp4, Feature::BulkTensorCopy, Feature::TensorMemory])
        }
        (HardwareKind::Hopper, _) => (32.0, &[Feature::Fp8, Feature::BulkTensorCopy, Feature::ThreadBlockClusters]),
        (HardwareKind::Ampere, (8, 0)) => (32.0, &[Feature::Mig]),
        (HardwareKind::BlackwellRtx, _) => {
            (if is_geforce { 4.0 } else { 8.0 }, &[Feature::Fp8, Feature::Fp4, Feature::BulkTensorCopy])
        }
        (HardwareKind::Ada, _) => (if is_geforce { 4.0 } else { 8.0 }, &[Feature::Fp8]),
        (HardwareKind::Ampere, _) => (if is_geforce { 4.0 } else { 8.0 }, &[]),
        (HardwareKind::Turing, _) => (if is_geforce { 8.0 } else { 16.0 }, &[]),
        _ => return None,
    })
}

impl AcceleratorSpec {
    /// Estimates the spec of an NVIDIA card that is not in the table. `None` for cards before compute capability 7.5, or if the driver reports too
    /// little.
    pub fn of_unknown_card(name: &str, capability: (u32, u32), clocks: CardClocks, memory_bytes: u64) -> Option<Self> {
        let is_geforce = name.to_lowercase().contains("geforce");
        let (operations, features) = per_core(capability, is_geforce)?;
        let CardClocks { sm_mhz, memory_mhz, cores, bus_bits } = clocks;
        if sm_mhz == 0 || memory_mhz == 0 || cores == 0 || bus_bits == 0 {
            return None;
        }
        let core_clocks = f64::from(cores) * f64::from(sm_mhz) * 1e6;
        let derived = |value, how| Figure::derived(value, &DRIVER, how);
        let bf16 = core_clocks * operations / 1e12;
        let has = |feature| features.contains(&feature);
        Some(Self {
            id: "unknown",
            name: "NVIDIA card outside of the table",
            aliases: &[],
            maker: Maker::Nvidia,
            kind: HardwareKind::of_compute_capability(capability),
            memory_gib: derived(memory_bytes as f64 / (1u64 << 30) as f64, "reported"),
            bandwidth_tb_s: derived(
                f64::from(memory_mhz) * 1e6 * 2.0 * f64::from(bus_bits) / 8.0 / 1e12,
                "memory clock x 2 x bus width",
            ),
            rates: DenseRates {
                f32: Some(derived(core_clocks * 2.0 / 1e12, "cores x clock x 2")),
                tf32: None,
                bf16: derived(bf16, "cores x clock x operations of its compute capability"),
                fp8: has(Feature::Fp8).then(|| derived(2.0 * bf16, "twice the bf16 rate")),
                fp4: has(Feature::Fp4).then(|| derived(4.0 * bf16, "four times the bf16 rate, or more")),
                int8: None,
            },
            sustained_bf16: None,
            host_link: None,
            peer_link: None,
            power_w: None,
            features,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_and_clocks_give_the_rates_of_the_table() {
        let cards = [
            ("NVIDIA H100 80GB HBM3", (9, 0), [1830, 2619, 16_896, 5120], "h100"),
            ("NVIDIA A100-SXM4-80GB", (8, 0), [1410, 1593, 6912, 5120], "a100"),
            ("NVIDIA GeForce RTX 4090", (8, 9), [2520, 10_501, 16_384, 384], "rtx4090"),
            ("NVIDIA GeForce RTX 5090", (12, 0), [2407, 14_001, 21_760, 512], "rtx5090"),
            ("NVIDIA L40S", (8, 9), [2520, 9001, 18_176, 384], "l40s"),
            ("NVIDIA A40", (8, 6), [1740, 7251, 10_752, 384], "a40"),
            ("Tesla T4", (7, 5), [1590, 5001, 2560, 256], "t4"),
            ("NVIDIA GeForce RTX 2080 Ti", (7, 5), [1545, 7001, 4352, 352], "rtx2080ti"),
        ];
        for (name, capability, [sm_mhz, memory_mhz, cores, bus_bits], id) in cards {
            let clocks = CardClocks { sm_mhz, memory_mhz, cores, bus_bits };
            let derived = AcceleratorSpec::of_unknown_card(name, capability, clocks, 1 << 30).unwrap();
            let row = AcceleratorSpec::named(id).unwrap();
            assert_eq!(derived.kind, row.kind, "{id}");
            for (what, ours, theirs) in [
                ("bf16", derived.rates.bf16.value, row.rates.bf16.value),
                ("TB/s", derived.bandwidth_tb_s.value, row.bandwidth_tb_s.value),
            ] {
                assert!((ours / theirs - 1.0).abs() < 0.03, "{id}: {ours} {what} against {theirs}");
            }
        }
    }

    #[test]
    fn capability_alone_decides_the_kind() {
        let kinds = [
            ((7, 0), HardwareKind::OlderNvidia),
            ((7, 5), HardwareKind::Turing),
            ((8, 6), HardwareKind::Ampere),
            ((10, 3), HardwareKind::Blackwell),
        ];
        for (capability, kind) in kinds {
            assert_eq!(HardwareKind::of_compute_capability(capability), kind);
        }
        let clocks = CardClocks { sm_mhz: 1380, memory_mhz: 877, cores: 5120, bus_bits: 4096 };
        assert_eq!(AcceleratorSpec::of_unknown_card("Tesla V100-SXM2-16GB", (7, 0), clocks, 16 << 30), None);
        let silent = CardClocks { cores: 0, ..clocks };
        assert_eq!(AcceleratorSpec::of_unknown_card("NVIDIA Future", (9, 0), silent, 16 << 30), None);
    }
}
