//! NVIDIA's data-center cards.
//!
//! Trade-off: rows with several form factors in one product page share that page as their source.

use super::figure::{Figure, Source};
use super::sources::{
    A30_CATALOG, A100_FORMS, A100_NOTES, B200_NOTES, B200_QUERIED, B200_SERVER, B300_NOTES, B300_SYSTEM, BEST_GEMM,
    BLACKWELL_HGX, GB200_NOTES, GH200_SHEET, H100_PAGE, H100_PCIE_BRIEF, H200_NOTES, L4_PAGE, L4_SHOP, L40S_TABLE,
    NVLINK_PAGE, OVERVIEW, REPORTED_MEMORY,
};
use super::types::{AcceleratorSpec, DenseRates, Entry, Feature, HardwareKind, Link, Maker};

const PCIE_4: Option<Link> = Some(Link { name: "PCIe 4.0 x16", gb_s: Figure::of(64.0, &L40S_TABLE) });
const PCIE_5: Option<Link> =
    Some(Link { name: "PCIe 5.0 x16", gb_s: Figure::derived(128.0, &L40S_TABLE, "twice PCIe 4.0's 64 GB/s") });
const C2C: Option<Link> = Some(Link { name: "NVLink-C2C", gb_s: Figure::of(900.0, &GB200_NOTES) });

const fn nvlink(name: &'static str, gb_s: f64, source: &'static Source) -> Option<Link> {
    Some(Link { name, gb_s: Figure::of(gb_s, source) })
}

const NOT_READ: &str = "the maker's paper, from memory";

const AMPERE: &[Feature] = &[Feature::Mig];
const ADA: &[Feature] = &[Feature::Fp8];
const HOPPER: &[Feature] = &[Feature::Fp8, Feature::BulkTensorCopy, Feature::ThreadBlockClusters, Feature::Mig];
const BLACKWELL: &[Feature] = &[
    Feature::Fp8,
    Feature::Fp4,
    Feature::BulkTensorCopy,
    Feature::ThreadBlockClusters,
    Feature::TensorMemory,
    Feature::DecompressionEngine,
    Feature::Mig,
];
const GRACE_HOPPER: &[Feature] =
    &[Feature::Fp8, Feature::BulkTensorCopy, Feature::ThreadBlockClusters, Feature::CoherentHostLink, Feature::Mig];
const GRACE_BLACKWELL: &[Feature] = &[
    Feature::Fp8,
    Feature::Fp4,
    Feature::BulkTensorCopy,
    Feature::ThreadBlockClusters,
    Feature::TensorMemory,
    Feature::DecompressionEngine,
    Feature::CoherentHostLink,
    Feature::Mig,
];

const A100_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(19.5, &A100_NOTES)),
    tf32: Some(Figure::of(156.0, &A100_NOTES)),
    bf16: Figure::of(312.0, &A100_NOTES),
    fp8: None,
    fp4: None,
    int8: Some(Figure::of(624.0, &A100_NOTES)),
};
const H100_SXM_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(67.0, &H100_PAGE)),
    tf32: Some(Figure::of(494.5, &OVERVIEW)),
    bf16: Figure::of(989.4, &OVERVIEW),
    fp8: Some(Figure::of(1979.0, &OVERVIEW)),
    fp4: None,
    int8: Some(Figure::of(1979.0, &OVERVIEW)),
};
const H100_NVL_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(60.0, &H100_PAGE)),
    tf32: Some(Figure::halved(417.5, &H100_PAGE)),
    bf16: Figure::halved(835.5, &H100_PAGE),
    fp8: Some(Figure::halved(1670.5, &H100_PAGE)),
    fp4: None,
    int8: Some(Figure::halved(1670.5, &H100_PAGE)),
};
const H100_PCIE_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(51.0, &OVERVIEW)),
    tf32: Some(Figure::of(378.0, &OVERVIEW)),
    bf16: Figure::of(756.0, &OVERVIEW),
    fp8: Some(Figure::of(1513.0, &OVERVIEW)),
    fp4: None,
    int8: Some(Figure::of(1513.0, &OVERVIEW)),
};
const B100_RATES: DenseRates = DenseRates {
    f32: None,
    tf32: Some(Figure::derived(875.0, &BLACKWELL_HGX, "a quarter of the FP8 rate")),
    bf16: Figure::derived(1750.0, &BLACKWELL_HGX, "half the FP8 rate"),
    fp8: Some(Figure::derived(3500.0, &BLACKWELL_HGX, "56 PFLOP/s sparse for 8 cards, halved")),
    fp4: Some(Figure::derived(7000.0, &BLACKWELL_HGX, "112 PFLOP/s sparse for 8 cards, halved")),
    int8: Some(Figure::derived(3500.0, &BLACKWELL_HGX, "56 POP/s sparse for 8 cards, halved")),
};
const B200_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(80.0, &B200_NOTES)),
    tf32: Some(Figure::of(1125.0, &OVERVIEW)),
    bf16: Figure::of(2250.0, &B200_NOTES),
    fp8: Some(Figure::of(4500.0, &B200_NOTES)),
    fp4: Some(Figure::of(9000.0, &B200_NOTES)),
    int8: Some(Figure::of(4500.0, &B200_NOTES)),
};
const B300_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(75.0, &B300_NOTES)),
    tf32: Some(Figure::of(1125.0, &B300_NOTES)),
    bf16: Figure::of(2250.0, &B300_NOTES),
    fp8: Some(Figure::of(4500.0, &B300_NOTES)),
    fp4: Some(Figure::of(13_125.0, &B300_NOTES)),
    // The source prints B200's 4,500 here, another that 8 cards have 2 POP/s sparse: taken as unknown.
    int8: None,
};
const GB200_RATES: DenseRates = DenseRates {
    f32: Some(Figure::of(80.0, &OVERVIEW)),
    tf32: Some(Figure::of(1250.0, &B200_NOTES)),
    bf16: Figure::of(2500.0, &B200_NOTES),
    fp8: Some(Figure::of(5000.0, &B200_NOTES)),
    fp4: Some(Figure::of(10_000.0, &B200_NOTES)),
    int8: Some(Figure::of(5000.0, &B200_NOTES)),
};

/// The fields that differ between cards of one kind.
struct Card {
    id: &'static str,
    name: &'static str,
    kind: HardwareKind,
    memory_gib: Figure,
    bandwidth_tb_s: Figure,
    rates: DenseRates,
    sustained: Option<Figure>,
    host: Option<Link>,
    peers: Option<Link>,
    power_w: Figure,
    features: &'static [Feature],
}

const fn card(aliases: &'static [&'static [&'static str]], card: Card) -> Entry {
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
            sustained_bf16: card.sustained,
            host_link: card.host,
            peer_link: card.peers,
            power_w: Some(card.power_w),
            features: card.features,
        },
    }
}

const fn best(value: f64) -> Option<Figure> {
    Some(Figure::of(value, &BEST_GEMM))
}

/// More words before fewer: the first entry that fits a name is taken.
#[rustfmt::skip]
pub(super) const CARDS: &[Entry] = &[
    card(&[&["gb200"]], Card {
        id: "gb200", name: "GB200 (one of its two GPUs)", kind: HardwareKind::Blackwell,
        memory_gib: Figure::derived(186.0, &GB200_NOTES, "372 GB in two GPUs"), bandwidth_tb_s: Figure::of(8.0, &OVERVIEW),
        rates: GB200_RATES, sustained: best(1822.0), host: C2C, peers: nvlink("NVLink 5", 1800.0, &GB200_NOTES),
        power_w: Figure::of(1200.0, &B200_NOTES), features: GRACE_BLACKWELL,
    }),
    card(&[&["b300"]], Card {
        id: "b300", name: "B300", kind: HardwareKind::Blackwell,
        memory_gib: Figure::derived(268.6, &B300_SYSTEM, "275,040 MiB"), bandwidth_tb_s: Figure::of(8.0, &B300_NOTES),
        rates: B300_RATES, sustained: best(1769.0), host: Some(Link { name: "PCIe 6.0 x16", gb_s: Figure::derived(256.0, &B300_NOTES, "printed as 2 x 256, twice what 16 lanes of PCIe 6.0 carry") }),
        peers: nvlink("NVLink 5", 1800.0, &B300_NOTES), power_w: Figure::of(1400.0, &B300_NOTES), features: BLACKWELL,
    }),
    card(&[&["b200"]], Card {
        id: "b200", name: "B200", kind: HardwareKind::Blackwell,
        memory_gib: Figure::of(178.35, &B200_QUERIED),
        bandwidth_tb_s: Figure::derived(7.672, &B200_QUERIED, "7,680 bits at 3,996 MHz, twice per clock"),
        rates: B200_RATES, sustained: best(1745.0), host: PCIE_5, peers: nvlink("NVLink 5", 1800.0, &B200_SERVER),
        power_w: Figure::of(1000.0, &B200_SERVER), features: BLACKWELL,
    }),
    card(&[&["b100"]], Card {
        id: "b100", name: "B100", kind: HardwareKind::Blackwell,
        memory_gib: Figure::of(192.0, &BLACKWELL_HGX), bandwidth_tb_s: Figure::of(8.0, &BLACKWELL_HGX),
        rates: B100_RATES, sustained: None, host: PCIE_5,
        peers: Some(Link { name: "NVLink 5", gb_s: Figure::unverified(1800.0, "as the B200 on the same board") }),
        power_w: Figure::of(700.0, &B200_NOTES), features: BLACKWELL,
    }),
    card(&[&["gh200", "144g"], &["gh200", "141gb"]], Card {
        id: "gh200-144", name: "GH200 144GB", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(141.0, &OVERVIEW), bandwidth_tb_s: Figure::of(4.9, &GH200_SHEET),
        rates: H100_SXM_RATES, sustained: best(828.6), host: C2C, peers: nvlink("NVLink 4", 900.0, &H100_PAGE),
        power_w: Figure::of(900.0, &BEST_GEMM), features: GRACE_HOPPER,
    }),
    card(&[&["gh200"]], Card {
        id: "gh200", name: "GH200 96GB", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(96.0, &OVERVIEW), bandwidth_tb_s: Figure::of(4.0, &OVERVIEW),
        rates: H100_SXM_RATES, sustained: None, host: C2C, peers: nvlink("NVLink 4", 900.0, &H100_PAGE),
        power_w: Figure::unverified(900.0, "as the GH200 144GB"), features: GRACE_HOPPER,
    }),
    card(&[&["h200", "nvl"]], Card {
        id: "h200-nvl", name: "H200 NVL", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(141.0, &H200_NOTES), bandwidth_tb_s: Figure::of(4.8, &H200_NOTES),
        rates: H100_NVL_RATES, sustained: None, host: PCIE_5,
        peers: Some(Link { name: "NVLink bridge", gb_s: Figure::unverified(900.0, "no document found") }),
        power_w: Figure::unverified(600.0, "a reseller's page"), features: HOPPER,
    }),
    card(&[&["h200"]], Card {
        id: "h200", name: "H200 SXM", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(141.0, &H200_NOTES), bandwidth_tb_s: Figure::of(4.8, &H200_NOTES),
        rates: H100_SXM_RATES, sustained: best(794.5), host: PCIE_5, peers: nvlink("NVLink 4", 900.0, &H100_PAGE),
        power_w: Figure::of(700.0, &H200_NOTES), features: HOPPER,
    }),
    card(&[&["h100", "nvl"]], Card {
        id: "h100-nvl", name: "H100 NVL", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(94.0, &H100_PAGE), bandwidth_tb_s: Figure::of(3.9, &H100_PAGE),
        rates: H100_NVL_RATES, sustained: None, host: PCIE_5, peers: nvlink("NVLink bridge", 600.0, &H100_PAGE),
        power_w: Figure::of(400.0, &H100_PAGE), features: HOPPER,
    }),
    card(&[&["h100", "pcie"], &["h100", "hbm2e"]], Card {
        id: "h100-pcie", name: "H100 PCIe", kind: HardwareKind::Hopper,
        memory_gib: Figure::of(80.0, &OVERVIEW), bandwidth_tb_s: Figure::of(2.0, &H100_PCIE_BRIEF),
        rates: H100_PCIE_RATES, sustained: None, host: PCIE_5,
        peers: Some(Link { name: "NVLink bridge", gb_s: Figure::unverified(600.0, "as the H100 NVL") }),
        power_w: Figure::of(350.0, &H100_PCIE_BRIEF), features: HOPPER,
    }),
    card(&[&["h100"]], Card {
        id: "h100", name: "H100 SXM", kind: HardwareKind::Hopper,
        memory_gib: Figure::derived(79.6, &REPORTED_MEMORY, "81,559 MiB"), bandwidth_tb_s: Figure::of(3.35, &H100_PAGE),
        rates: H100_SXM_RATES, sustained: best(794.5), host: PCIE_5, peers: nvlink("NVLink 4", 900.0, &H100_PAGE),
        power_w: Figure::of(700.0, &H100_PAGE), features: HOPPER,
    }),
    card(&[&["a100", "40gb"]], Card {
        id: "a100-40", name: "A100 40GB", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(40.0, &A100_NOTES), bandwidth_tb_s: Figure::of(1.555, &A100_NOTES),
        rates: A100_RATES, sustained: None, host: PCIE_4, peers: nvlink("NVLink 3", 600.0, &A100_NOTES),
        power_w: Figure::of(400.0, &A100_NOTES), features: AMPERE,
    }),
    card(&[&["a100", "pcie"]], Card {
        id: "a100-pcie", name: "A100 80GB PCIe", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(80.0, &A100_FORMS), bandwidth_tb_s: Figure::of(1.935, &A100_FORMS),
        rates: A100_RATES, sustained: best(252.9), host: PCIE_4,
        peers: Some(Link { name: "NVLink bridge", gb_s: Figure::derived(600.0, &NVLINK_PAGE, "twelve links, in PCIe pairs too") }),
        power_w: Figure::of(300.0, &A100_FORMS), features: AMPERE,
    }),
    card(&[&["a100"]], Card {
        id: "a100", name: "A100 80GB SXM", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(80.0, &A100_NOTES), bandwidth_tb_s: Figure::of(2.039, &A100_NOTES),
        rates: A100_RATES, sustained: best(271.2), host: PCIE_4, peers: nvlink("NVLink 3", 600.0, &A100_NOTES),
        power_w: Figure::of(400.0, &A100_FORMS), features: AMPERE,
    }),
    card(&[&["l40s"]], Card {
        id: "l40s", name: "L40S", kind: HardwareKind::Ada,
        memory_gib: Figure::derived(45.0, &REPORTED_MEMORY, "46,068 MiB, with ECC"), bandwidth_tb_s: Figure::of(0.864, &L40S_TABLE),
        rates: DenseRates {
            f32: Some(Figure::of(91.6, &L40S_TABLE)), tf32: Some(Figure::of(183.0, &L40S_TABLE)),
            bf16: Figure::of(362.05, &L40S_TABLE), fp8: Some(Figure::of(733.0, &L40S_TABLE)), fp4: None,
            int8: Some(Figure::of(733.0, &OVERVIEW)),
        },
        sustained: None, host: PCIE_4, peers: None, power_w: Figure::of(350.0, &L40S_TABLE), features: ADA,
    }),
    card(&[&["l4"]], Card {
        id: "l4", name: "L4", kind: HardwareKind::Ada,
        memory_gib: Figure::derived(22.5, &REPORTED_MEMORY, "23,034 MiB, with ECC"), bandwidth_tb_s: Figure::of(0.3, &L4_PAGE),
        rates: DenseRates {
            f32: Some(Figure::of(30.3, &L4_PAGE)), tf32: Some(Figure::halved(60.0, &L4_SHOP)),
            bf16: Figure::halved(121.0, &L4_PAGE), fp8: Some(Figure::halved(242.5, &L4_PAGE)), fp4: None,
            int8: Some(Figure::halved(242.5, &L4_PAGE)),
        },
        sustained: None, host: PCIE_4, peers: None, power_w: Figure::of(72.0, &L4_PAGE), features: ADA,
    }),
    card(&[&["a30"]], Card {
        id: "a30", name: "A30", kind: HardwareKind::Ampere,
        memory_gib: Figure::of(24.0, &A30_CATALOG), bandwidth_tb_s: Figure::unverified(0.933, NOT_READ),
        rates: DenseRates {
            f32: Some(Figure::of(10.32, &A30_CATALOG)), tf32: None, bf16: Figure::unverified(165.0, NOT_READ), fp8: None,
            fp4: None, int8: None,
        },
        sustained: None, host: PCIE_4, peers: Some(Link { name: "NVLink 3 bridge", gb_s: Figure::unverified(200.0, NOT_READ) }),
        power_w: Figure::of(165.0, &A30_CATALOG), features: AMPERE,
    }),
];
