//! Claims about hardware that the documents do not bear out, and what these say instead.
//!
//! Trade-off: only claims that a plan or the tuning would rest on are listed, not every rounding.

use serde::Serialize;

use super::figure::Source;
use super::sources::{APPLE_M4, B200_NOTES, B200_QUERIED, GB200_NOTES, L40S_TABLE, TPU_V6E};

/// A claim, and what a document says instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Correction {
    /// What it is about.
    pub about: &'static str,
    /// What is claimed.
    pub claim: &'static str,
    /// What is right.
    pub instead: &'static str,
    /// Where that is from; `None`: a maker's or author's text without figures, named in `instead`.
    pub source: Option<&'static Source>,
}

/// The corrections, NVIDIA's cards first.
pub static CORRECTIONS: [Correction; 11] = [
    Correction {
        about: "B200 memory",
        claim: "192 GB",
        instead: "192 GB are on the package and 180 GB are sold; the driver reports 178.35 GiB, which the table and plans use",
        source: Some(&B200_QUERIED),
    },
    Correction {
        about: "FP4",
        claim: "a range of about 6 with 2 mantissa bits",
        instead: "E2M1 has 2 exponent bits and 1 mantissa bit; its largest value is 6 (OCP Microscaling Formats 1.0)",
        source: None,
    },
    Correction {
        about: "B100 rates",
        claim: "about 1,800 TFLOP/s in FP16",
        instead: "1,750: half of 3,500 in FP8, which is 56 PFLOP/s with sparsity for 8 cards",
        source: Some(&B200_NOTES),
    },
    Correction {
        about: "Blackwell's decompression engine",
        claim: "LZ4, ZSTD and custom codecs, and twice the effective memory",
        instead: "LZ4, Snappy and Deflate, for data on its way in (NVIDIA); weights in memory are not compressed by it",
        source: None,
    },
    Correction {
        about: "compute capability 12",
        claim: "10.0 and later is B100/B200, with a tile of 512",
        instead: "12.x is RTX Blackwell: no tensor memory and 100 KB of shared memory where B200 has 228; it has a row of its own",
        source: None,
    },
    Correction {
        about: "compute capability 8.9",
        claim: "8.x has no FP8",
        instead: "Ada (8.9: L4, L40S, RTX 40) has FP8 matrix units",
        source: Some(&L40S_TABLE),
    },
    Correction {
        about: "attention on Blackwell",
        claim: "FlashAttention 3",
        instead: "FlashAttention 3 requires H100 or H800; Blackwell has FlashAttention 4 or cuDNN (README of flash-attention)",
        source: None,
    },
    Correction {
        about: "GB200",
        claim: "one Grace and one Blackwell GPU; 546 GB/s of host memory; 900 GB/s against PCIe 5.0's 64 GB/s",
        instead: "one Grace and two GPUs; up to 512 GB/s; 900 GB/s counts both directions, where PCIe 5.0 x16 has 128",
        source: Some(&GB200_NOTES),
    },
    Correction {
        about: "Apple",
        claim: "M3 Max and Ultra: up to 128 GB, 400 GB/s",
        instead: "that is the M3 Max; M3 Ultra has up to 512 GB and 819 GB/s, M4 Max 546 GB/s",
        source: Some(&APPLE_M4),
    },
    Correction {
        about: "TPU v6",
        claim: "4 times v5p",
        instead: "918 TFLOP/s are 2.0 times v5p's 459 and 4.7 times v5e's 197",
        source: Some(&TPU_V6E),
    },
    Correction {
        about: "TPU matrix units",
        claim: "128 x 128",
        instead: "v5e and v5p: 128 x 128; v6e: 256 x 256",
        source: Some(&TPU_V6E),
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::AcceleratorSpec;

    #[test]
    fn corrections_agree_with_the_table() {
        let spec = |id| AcceleratorSpec::named(id).unwrap();
        let stated = |about: &str| CORRECTIONS.iter().find(|correction| correction.about == about).unwrap().instead;
        assert!(stated("B200 memory").contains(&format!("{} GiB", spec("b200").memory_gib.value)));
        assert!(stated("B100 rates").starts_with("1,750") && spec("b100").rates.bf16.value == 1750.0);
        let against_v5p = spec("tpu-v6e").rates.bf16.value / spec("tpu-v5p").rates.bf16.value;
        assert!(stated("TPU v6").contains(&format!("{against_v5p:.1} times v5p")));
        assert!(CORRECTIONS.iter().all(|correction| correction.claim != correction.instead));
    }
}
