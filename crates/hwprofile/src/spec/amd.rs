//! AMD's Instinct accelerators.
//!
//! Trade-off: partitions of one card are not rows of their own.

use super::figure::{Figure, Source};
use super::sources::{
    AMD_SPECS, BEST_GEMM, L40S_TABLE, MI300X_CATALOG, MI300X_PAGE, MI325X_PAGE, MI355X_LINKS, MI355X_NOTES, OVERVIEW,
};
use super::types::{AcceleratorSpec, DenseRates, Entry, Feature, HardwareKind, Link, Maker};

const PCIE_5: Option<Link> =
    Some(Link { name: "PCIe 5.0 x16", gb_s: Figure::derived(128.0, &L40S_TABLE, "twice PCIe 4.0's 64 GB/s") });

const CDNA3: DenseRates = DenseRates {
    f32: Some(Figure::of(163.4, &OVERVIEW)),
    tf32: Some(Figure::of(653.7, &OVERVIEW)),
    bf16: Figure::of(1307.4, &MI300X_PAGE),
    fp8: Some(Figure::of(2614.9, &MI300X_PAGE)),
    fp4: None,
    int8: Some(Figure::of(2600.0, &OVERVIEW)),
};
const CDNA4: DenseRates = DenseRates {
    f32: Some(Figure::of(157.3, &OVERVIEW)),
    tf32: None,
    bf16: Figure::derived(
        2516.6,
        &OVERVIEW,
        "1,024 matrix cores x 512 multiply-adds x 2.4 GHz; AMD prints 2.5 PFLOP/s",
    ),
    fp8: Some(Figure::of(5000.0, &OVERVIEW)),
    fp4: Some(Figure::of(10_100.0, &OVERVIEW)),
    int8: Some(Figure::of(5000.0, &OVERVIEW)),
};

struct Card {
    id: &'static str,
    name: &'static str,
    kind: HardwareKind,
    memory_gib: f64,
    bandwidth_tb_s: f64,
    rates: DenseRates,
    sustained: f64,
    peers: Figure,
    power_w: f64,
    power_source: &'static Source,
}

const fn card(aliases: &'static [&'static [&'static str]], card: Card) -> Entry {
    let features: &[Feature] = if card.rates.fp4.is_some() { &[Feature::Fp8, Feature::Fp4] } else { &[Feature::Fp8] };
    Entry {
        aliases,
        spec: AcceleratorSpec {
            id: card.id,
            name: card.name,
            maker: Maker::Amd,
            kind: card.kind,
            memory_gib: Figure::of(card.memory_gib, &AMD_SPECS),
            bandwidth_tb_s: Figure::of(card.bandwidth_tb_s, &OVERVIEW),
            rates: card.rates,
            sustained_bf16: Some(Figure::of(card.sustained, &BEST_GEMM)),
            host_link: PCIE_5,
            peer_link: Some(Link { name: "Infinity Fabric", gb_s: card.peers }),
            power_w: Some(Figure::of(card.power_w, card.power_source)),
            features,
        },
    }
}

#[rustfmt::skip]
pub(super) const CARDS: &[Entry] = &[
    card(&[&["mi355x"]], Card {
        id: "mi355x", name: "MI355X", kind: HardwareKind::Cdna4, memory_gib: 288.0, bandwidth_tb_s: 8.0, rates: CDNA4,
        sustained: 1565.0, peers: Figure::derived(1075.0, &MI355X_LINKS, "seven links of 153.6 GB/s"), power_w: 1400.0, power_source: &MI355X_NOTES,
    }),
    card(&[&["mi325x"]], Card {
        id: "mi325x", name: "MI325X", kind: HardwareKind::Cdna3, memory_gib: 256.0, bandwidth_tb_s: 6.0, rates: CDNA3,
        sustained: 784.9, peers: Figure::derived(896.0, &MI325X_PAGE, "seven links, each as the MI300X's of 128 GB/s"), power_w: 1000.0, power_source: &BEST_GEMM,
    }),
    card(&[&["mi300x"]], Card {
        id: "mi300x", name: "MI300X", kind: HardwareKind::Cdna3, memory_gib: 192.0, bandwidth_tb_s: 5.3, rates: CDNA3,
        sustained: 668.4, peers: Figure::of(896.0, &MI300X_CATALOG), power_w: 750.0, power_source: &MI300X_CATALOG,
    }),
];
