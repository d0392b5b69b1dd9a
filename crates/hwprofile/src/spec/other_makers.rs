//! Accelerators of Intel, Apple and Google.
//!
//! Trade-off: neither Apple nor Google states the power of a chip alone, so a plan for theirs has no energy or a rough one.

use super::figure::Figure;
use super::sources::{
    APPLE_GPUS, APPLE_M3, APPLE_M3_ULTRA, APPLE_M4, BEST_GEMM, GAUDI_SLIDES, OVERVIEW, PONTE_VECCHIO, TPU_V5E, TPU_V5P,
    TPU_V6E,
};
use super::types::{AcceleratorSpec, DenseRates, Entry, Feature, HardwareKind, Link, Maker};

const UNIFIED: &[Feature] = &[Feature::UnifiedMemory];

/// Rates of an accelerator of which only the bf16 rate, and perhaps that of 8 bits, is stated.
const fn matrix_rates(bf16: Figure, fp8: Option<Figure>, int8: Option<Figure>) -> DenseRates {
    DenseRates { f32: None, tf32: None, bf16, fp8, fp4: None, int8 }
}

/// Apple's GPUs have the same rate in f32 and f16 and no matrix units before the M5.
const fn apple(
    aliases: &'static [&'static [&'static str]],
    id: &'static str,
    name: &'static str,
    memory_gib: Figure,
    bandwidth_tb_s: Figure,
    rate: Figure,
    power_w: Option<Figure>,
) -> Entry {
    Entry {
        aliases,
        spec: AcceleratorSpec {
            id,
            name,
            maker: Maker::Apple,
            kind: HardwareKind::AppleSilicon,
            memory_gib,
            bandwidth_tb_s,
            rates: DenseRates { f32: Some(rate), tf32: None, bf16: rate, fp8: None, fp4: None, int8: None },
            sustained_bf16: None,
            host_link: None,
            peer_link: None,
            power_w,
            features: UNIFIED,
        },
    }
}

const fn tpu(
    aliases: &'static [&'static [&'static str]],
    id: &'static str,
    name: &'static str,
    [memory_gib, bandwidth_tb_s, bf16, int8, between_chips]: [Figure; 5],
    fp8: Option<Figure>,
    features: &'static [Feature],
) -> Entry {
    Entry {
        aliases,
        spec: AcceleratorSpec {
            id,
            name,
            maker: Maker::Google,
            kind: HardwareKind::Tpu,
            memory_gib,
            bandwidth_tb_s,
            rates: matrix_rates(bf16, fp8, Some(int8)),
            sustained_bf16: None,
            host_link: None,
            peer_link: Some(Link { name: "ICI", gb_s: between_chips }),
            power_w: None,
            features,
        },
    }
}

const GAUDI_3: Entry = Entry {
    aliases: &[&["gaudi3"], &["gaudi", "3"]],
    spec: AcceleratorSpec {
        id: "gaudi3",
        name: "Gaudi 3",
        maker: Maker::Intel,
        kind: HardwareKind::Gaudi,
        memory_gib: Figure::of(128.0, &GAUDI_SLIDES),
        bandwidth_tb_s: Figure::of(3.67, &GAUDI_SLIDES),
        rates: matrix_rates(Figure::of(1835.0, &GAUDI_SLIDES), Some(Figure::of(1835.0, &GAUDI_SLIDES)), None),
        sustained_bf16: Some(Figure::of(1243.0, &BEST_GEMM)),
        host_link: Some(Link { name: "PCIe 5.0 x16", gb_s: Figure::of(128.0, &GAUDI_SLIDES) }),
        peer_link: Some(Link { name: "24 x 200 GbE", gb_s: Figure::of(1200.0, &GAUDI_SLIDES) }),
        power_w: Some(Figure::of(900.0, &GAUDI_SLIDES)),
        features: &[Feature::Fp8, Feature::SystolicArray(256)],
    },
};
const GAUDI_2: Entry = Entry {
    aliases: &[&["gaudi2"], &["gaudi", "2"]],
    spec: AcceleratorSpec {
        id: "gaudi2",
        name: "Gaudi 2",
        maker: Maker::Intel,
        kind: HardwareKind::Gaudi,
        memory_gib: Figure::of(96.0, &GAUDI_SLIDES),
        bandwidth_tb_s: Figure::of(2.46, &GAUDI_SLIDES),
        rates: matrix_rates(Figure::of(432.0, &GAUDI_SLIDES), Some(Figure::of(865.0, &OVERVIEW)), None),
        sustained_bf16: Some(Figure::of(418.7, &BEST_GEMM)),
        host_link: Some(Link { name: "PCIe 4.0 x16", gb_s: Figure::of(64.0, &GAUDI_SLIDES) }),
        peer_link: Some(Link {
            name: "24 x 100 GbE",
            gb_s: Figure::derived(600.0, &GAUDI_SLIDES, "4.8 Tbit/s in bytes"),
        }),
        power_w: Some(Figure::of(600.0, &GAUDI_SLIDES)),
        features: &[Feature::Fp8, Feature::SystolicArray(256)],
    },
};
const MAX_1550: Entry = Entry {
    aliases: &[&["max", "1550"]],
    spec: AcceleratorSpec {
        id: "max1550",
        name: "Data Center GPU Max 1550",
        maker: Maker::Intel,
        kind: HardwareKind::PonteVecchio,
        memory_gib: Figure::of(128.0, &PONTE_VECCHIO),
        bandwidth_tb_s: Figure::of(3.2768, &PONTE_VECCHIO),
        rates: DenseRates {
            f32: Some(Figure::derived(52.4, &PONTE_VECCHIO, "1,024 vector engines of 512 bits x 2 x 1.6 GHz")),
            tf32: None,
            bf16: Figure::derived(838.9, &PONTE_VECCHIO, "1,024 matrix engines of 4,096 bits x 2 x 1.6 GHz"),
            fp8: None,
            fp4: None,
            int8: None,
        },
        sustained_bf16: Some(Figure::derived(546.0, &PONTE_VECCHIO, "273 TFLOP/s measured on one of its two stacks")),
        host_link: Some(Link {
            name: "PCIe 5.0 x16",
            gb_s: Figure::derived(128.0, &PONTE_VECCHIO, "16 lanes of PCIe 5.0"),
        }),
        peer_link: None,
        power_w: Some(Figure::of(600.0, &PONTE_VECCHIO)),
        features: &[],
    },
};

#[rustfmt::skip]
pub(super) const ENTRIES: &[Entry] = &[
    GAUDI_3,
    GAUDI_2,
    MAX_1550,
    apple(
        &[&["m3", "ultra"]], "m3-ultra", "Apple M3 Ultra (80 cores)",
        Figure::of(512.0, &APPLE_M3_ULTRA), Figure::of(0.819, &APPLE_M3_ULTRA),
        Figure::derived(28.6, &APPLE_GPUS, "twice the M3 Max of 40 cores"),
        Some(Figure::unverified(480.0, "largest draw of the whole Mac Studio, from a blog")),
    ),
    apple(
        &[&["m4", "max"]], "m4-max", "Apple M4 Max (40 cores)",
        Figure::of(128.0, &APPLE_M4), Figure::of(0.546, &APPLE_M4),
        Figure::derived(17.2, &APPLE_GPUS, "5/4 of the M4 Max of 32 cores"), None,
    ),
    apple(
        &[&["m3", "max"]], "m3-max", "Apple M3 Max (40 cores)",
        Figure::of(128.0, &APPLE_M3), Figure::of(0.4, &APPLE_M4),
        Figure::of(14.32, &APPLE_GPUS), None,
    ),
    tpu(&[&["tpu", "v6e"]], "tpu-v6e", "TPU v6e (Trillium)", [
        Figure::of(32.0, &TPU_V6E), Figure::of(1.638, &TPU_V6E), Figure::of(918.0, &TPU_V6E), Figure::of(1836.0, &TPU_V6E),
        Figure::of(800.0, &TPU_V6E),
    ], None, &[Feature::SystolicArray(256), Feature::Xla]),
    tpu(&[&["tpu", "v5p"]], "tpu-v5p", "TPU v5p", [
        Figure::of(95.0, &TPU_V5P), Figure::of(2.765, &TPU_V5P), Figure::of(459.0, &TPU_V5P), Figure::of(918.0, &OVERVIEW),
        Figure::of(1200.0, &TPU_V5P),
    ], Some(Figure::of(459.0, &TPU_V5P)), &[Feature::Fp8, Feature::SystolicArray(128), Feature::Xla]),
    tpu(&[&["tpu", "v5e"]], "tpu-v5e", "TPU v5e", [
        Figure::of(16.0, &TPU_V5E), Figure::of(0.819, &TPU_V5E), Figure::of(197.0, &TPU_V5E), Figure::of(393.0, &TPU_V5E),
        Figure::of(400.0, &TPU_V5E),
    ], None, &[Feature::SystolicArray(128), Feature::Xla]),
];
