//! NVIDIA's GeForce and professional cards.
//!
//! GeForce cards multiply 16-bit and 8-bit floats at half their rate when sums are kept in f32, as training needs; those halves stand here.
//! Trade-off: less common cards keep earlier figures, marked as not verified where no document was read.

use super::figure::Figure;
use super::sources::{
    A10_CATALOG, A10_COMPARED, A40_REPORTED, A40_TABLE, A6000_CATALOG, ADA_PAPER, GA102_PAPER, L40S_TABLE,
    REPORTED_MEMORY, RTX_3090_TABLE, RTX_3090_TI_NEWS, RTX_BLACKWELL_PAPER, RTX_CATALOG, RTX_COMPARED,
};
use super::types::{AcceleratorSpec, DenseRates, Entry, Feature, HardwareKind, Link, Maker};

const PCIE_4: Option<Link> = Some(Link { name: "PCIe 4.0 x16", gb_s: Figure::of(64.0, &L40S_TABLE) });
const PCIE_5: Option<Link> =
    Some(Link { name: "PCIe 5.0 x16", gb_s: Figure::derived(128.0, &L40S_TABLE, "twice PCIe 4.0's 64 GB/s") });
const BRIDGE: Option<Link> = Some(Link { name: "NVLink 3 bridge", gb_s: Figure::of(112.5, &A40_TABLE) });

const NOT_READ: &str = "the maker's paper, from memory";

const fn not_read(value: f64) -> Figure {
    Figure::unverified(value, NOT_READ)
}

/// Rates of a card without 8-bit floats, or with them.
const fn rates(f32: Option<Figure>, bf16: Figure, fp8: Option<Figure>, fp4: Option<Figure>) -> DenseRates {
    DenseRates { f32, tf32: None, bf16, fp8, fp4, int8: None }
}

struct Card {
    id: &'static str,
    name: &'static str,
    kind: HardwareKind,
    memory_gib: Figure,
    bandwidth_tb_s: Figure,
    rates: DenseRates,
    peers: Option<Link>,
    power_w: Figure,
}

const fn card(aliases: &'static [&'static [&'static str]], card: Card) -> Entry {
    let (features, host): (&[Feature], _) = match card.kind {
        HardwareKind::BlackwellRtx => (&[Feature::Fp8, Feature::Fp4, Feature::BulkTensorCopy], PCIE_5),
        HardwareKind::Ada => (&[Feature::Fp8], PCIE_4),
        _ => (&[], PCIE_4),
    };
    Entry {
        aliases,
        spec: AcceleratorSpec {
            id: card.id,
            name: card.name,
            maker: Maker::Nvidia,
            kind: card.kind,
            memory_gib: card.memory_gib,
            bandwidth_tb_s: card.bandwidth_tb_s,
            rates: card.rates,
            sustained_bf16: None,
            host_link: host,
            peer_link: card.peers,
            power_w: Some(card.power_w),
            features,
        },
    }
}

#[rustfmt::skip]
pub(super) const CARDS: &[Entry] = &[
    card(&[&["a40"]], Card {
        id: "a40", name: "A40", kind: HardwareKind::Ampere,
        memory_gib: Figure::derived(45.0, &A40_REPORTED, "46,068 MiB, with ECC"), bandwidth_tb_s: Figure::of(0.696, &A40_TABLE),
        rates: rates(Some(Figure::of(37.4, &A40_TABLE)), Figure::of(149.7, &A40_TABLE), None, None),
        peers: BRIDGE, power_w: Figure::of(300.0, &A40_TABLE),
    }),
    card(&[&["a10"]], Card {
        id: "a10", name: "A10", kind: HardwareKind::Ampere,
        memory_gib: Figure::derived(22.5, &REPORTED_MEMORY, "23,028 MiB, with ECC"), bandwidth_tb_s: Figure::of(0.6, &A10_COMPARED),
        rates: rates(
            Some(Figure::of(31.24, &A10_CATALOG)), Figure::derived(125.0, &A10_CATALOG, "four times the f32 rate, as the A40 of the same chip"),
            None, None,
        ),
        peers: None, power_w: not_read(150.0),
    }),
    card(&[&["a6000"]], Card {
        id: "a6000", name: "RTX A6000", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(48.0, &RTX_CATALOG), bandwidth_tb_s: Figure::of(0.768, &A6000_CATALOG),
        rates: rates(Some(Figure::of(38.71, &RTX_CATALOG)), Figure::of(154.8, &GA102_PAPER), None, None),
        peers: BRIDGE, power_w: Figure::of(300.0, &RTX_CATALOG),
    }),
    card(&[&["rtx", "3090", "ti"]], Card {
        id: "rtx3090ti", name: "RTX 3090 Ti", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(24.0, &RTX_3090_TI_NEWS), bandwidth_tb_s: Figure::of(1.008, &RTX_3090_TI_NEWS),
        rates: rates(
            Some(Figure::of(40.0, &RTX_3090_TI_NEWS)),
            Figure::derived(80.0, &RTX_3090_TI_NEWS, "twice the f32 rate, as GeForce cards with f32 accumulation"), None, None,
        ),
        peers: BRIDGE, power_w: Figure::of(450.0, &RTX_3090_TI_NEWS),
    }),
    card(&[&["rtx", "3090"]], Card {
        id: "rtx3090", name: "RTX 3090", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(24.0, &RTX_CATALOG), bandwidth_tb_s: Figure::of(0.936, &RTX_3090_TABLE),
        rates: rates(
            Some(Figure::of(35.58, &RTX_CATALOG)),
            Figure::derived(71.2, &RTX_CATALOG, "twice the f32 rate, as GeForce cards with f32 accumulation"), None, None,
        ),
        peers: Some(Link { name: "NVLink 3 bridge", gb_s: Figure::of(112.5, &GA102_PAPER) }),
        power_w: Figure::of(350.0, &RTX_CATALOG),
    }),
    card(&[&["rtx", "6000", "ada"]], Card {
        id: "rtx6000-ada", name: "RTX 6000 Ada", kind: HardwareKind::Ada,
        memory_gib: Figure::of(48.0, &RTX_CATALOG), bandwidth_tb_s: not_read(0.96),
        rates: rates(
            Some(Figure::of(91.1, &RTX_CATALOG)), Figure::derived(364.2, &RTX_CATALOG, "four times the f32 rate, as the L40S of the same chip"),
            Some(Figure::derived(728.5, &RTX_CATALOG, "twice the bf16 rate")), None,
        ),
        peers: None, power_w: Figure::of(300.0, &RTX_CATALOG),
    }),
    card(&[&["rtx", "4090"]], Card {
        id: "rtx4090", name: "RTX 4090", kind: HardwareKind::Ada,
        memory_gib: Figure::of(24.0, &RTX_CATALOG), bandwidth_tb_s: Figure::of(1.008, &ADA_PAPER),
        rates: rates(
            Some(Figure::of(82.58, &RTX_CATALOG)), Figure::of(165.2, &ADA_PAPER), Some(Figure::of(330.3, &ADA_PAPER)), None,
        ),
        peers: None, power_w: Figure::of(450.0, &RTX_CATALOG),
    }),
    card(&[&["rtx", "5090"]], Card {
        id: "rtx5090", name: "RTX 5090", kind: HardwareKind::BlackwellRtx,
        memory_gib: Figure::of(32.0, &RTX_COMPARED), bandwidth_tb_s: Figure::derived(1.792, &RTX_COMPARED, "512 bits at 28 Gbit/s"),
        rates: rates(
            Some(Figure::of(104.8, &RTX_COMPARED)), Figure::of(209.5, &RTX_BLACKWELL_PAPER),
            Some(Figure::derived(419.0, &RTX_BLACKWELL_PAPER, "twice the bf16 rate")),
            Some(Figure::derived(1676.0, &RTX_BLACKWELL_PAPER, "half of the 3,352 TFLOP/s printed with sparsity")),
        ),
        peers: None, power_w: Figure::of(575.0, &RTX_COMPARED),
    }),
    card(&[&["rtx", "5080"]], Card {
        id: "rtx5080", name: "RTX 5080", kind: HardwareKind::BlackwellRtx,
        memory_gib: not_read(16.0), bandwidth_tb_s: not_read(0.96),
        rates: rates(None, not_read(112.6), Some(not_read(225.1)), Some(not_read(900.4))),
        peers: None, power_w: not_read(360.0),
    }),
];
