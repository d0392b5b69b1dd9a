//! Peak rates of the cards that training runs on, from their makers' published figures.
//!
//! All rates are dense: makers print twice as much, with 2:4 sparsity, which training does not use. Where a card has two
//! rates by accumulator, the one with f32 accumulation stands here. A peak is a bound for planning before anything was
//! measured; measured rates are 70 to 80 % of it on a good day.

use serde::Serialize;

/// What the maker says about a card.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GpuSpec {
    /// Name in this table.
    pub name: &'static str,
    /// Memory as sold, in GiB; the driver reports a little less.
    pub memory_gib: f64,
    /// Peak memory bandwidth, 1e12 bytes per second.
    pub memory_bandwidth_tb_s: f64,
    /// Dense bf16 matrix products with f32 accumulation, 1e12 operations per second.
    pub bf16_tflops: f64,
    /// Dense 8-bit float matrix products; `None`: the card has none.
    pub fp8_tflops: Option<f64>,
    /// Dense 4-bit float matrix products; `None`: the card has none.
    pub fp4_tflops: Option<f64>,
    /// Where the figures are from.
    pub source: &'static str,
}

/// One card and the words by which its reported name is known: all words of any one alias.
struct Entry {
    aliases: &'static [&'static [&'static str]],
    spec: GpuSpec,
}

/// Words that say it is another or a smaller card: a slice of a card, a mobile or cut-down version.
const ANOTHER_CARD: [&str; 5] = ["mig", "laptop", "mobile", "max", "d"];

impl GpuSpec {
    /// The card whose words are all in `name`, as NVML or a Vulkan driver reports it. `None` for a card not in the table,
    /// and for slices and laptop versions of those that are.
    pub fn find(name: &str) -> Option<&'static Self> {
        let lower = name.to_lowercase();
        let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
        if words.iter().any(|word| ANOTHER_CARD.contains(word)) {
            return None;
        }
        let is_named = |entry: &&Entry| entry.aliases.iter().any(|alias| alias.iter().all(|word| words.contains(word)));
        TABLE.iter().find(is_named).map(|entry| &entry.spec)
    }

    /// Every card in the table.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        TABLE.iter().map(|entry| &entry.spec)
    }

    /// bf16 operations per byte of memory traffic above which a kernel is bound by arithmetic.
    pub fn bf16_critical_intensity(&self) -> f64 {
        self.bf16_tflops / self.memory_bandwidth_tb_s
    }
}

const A100: &str = "NVIDIA A100 data sheet, 2021";
const H100: &str = "NVIDIA H100 data sheet, 2024 (halved: printed with sparsity)";
const H200: &str = "NVIDIA H200 data sheet, 2024 (halved: printed with sparsity)";
const BLACKWELL: &str = "NVIDIA Blackwell architecture brief and HGX platform page, 2025 (per GPU, dense)";
const AMPERE_RTX: &str = "NVIDIA GA102 architecture paper, 2021";
const ADA_RTX: &str = "NVIDIA Ada architecture paper, 2023";
const BLACKWELL_RTX: &str = "NVIDIA RTX Blackwell architecture paper, 2025";
const ADA_DATA_CENTRE: &str = "NVIDIA L4 and L40S data sheets, 2023";
const AMPERE_DATA_CENTRE: &str = "NVIDIA A10, A30 and A40 data sheets, 2021";
const CDNA3: &str = "AMD Instinct MI300X and MI325X data sheets, 2024";
const CDNA4: &str = "AMD Instinct MI355X data sheet, 2025";

/// More words before fewer: the first entry that fits is taken.
#[rustfmt::skip]
const TABLE: &[Entry] = &[
    //                                        name, GiB, TB/s, bf16, fp8, fp4, source
    entry(&[&["gb200"]],                      "GB200",           186.0, 8.0,   2500.0, Some(5000.0), Some(10_000.0), BLACKWELL),
    entry(&[&["b200"]],                       "B200",            180.0, 7.7,   2250.0, Some(4500.0), Some(9000.0),   BLACKWELL),
    entry(&[&["gh200", "144g"]],              "GH200 144GB",     144.0, 4.9,   989.4,  Some(1978.9), None,           H200),
    entry(&[&["gh200"]],                      "GH200 96GB",      96.0,  4.0,   989.4,  Some(1978.9), None,           H100),
    entry(&[&["h200", "nvl"]],                "H200 NVL",        141.0, 4.8,   835.5,  Some(1671.0), None,           H200),
    entry(&[&["h200"]],                       "H200 SXM",        141.0, 4.8,   989.4,  Some(1978.9), None,           H200),
    entry(&[&["h100", "nvl"]],                "H100 NVL",        94.0,  3.9,   835.5,  Some(1671.0), None,           H100),
    entry(&[&["h100", "pcie"], &["h100", "hbm2e"]], "H100 PCIe", 80.0,  2.0,   756.0,  Some(1513.0), None,           H100),
    entry(&[&["h100"]],                       "H100 SXM",        80.0,  3.35,  989.4,  Some(1978.9), None,           H100),
    entry(&[&["a100", "40gb"]],               "A100 40GB",       40.0,  1.555, 312.0,  None,         None,           A100),
    entry(&[&["a100", "pcie"]],               "A100 80GB PCIe",  80.0,  1.935, 312.0,  None,         None,           A100),
    entry(&[&["a100"]],                       "A100 80GB SXM",   80.0,  2.039, 312.0,  None,         None,           A100),
    entry(&[&["l40s"]],                       "L40S",            48.0,  0.864, 362.05, Some(733.0),  None,           ADA_DATA_CENTRE),
    entry(&[&["l4"]],                         "L4",              24.0,  0.3,   121.0,  Some(242.0),  None,           ADA_DATA_CENTRE),
    entry(&[&["a40"]],                        "A40",             48.0,  0.696, 149.7,  None,         None,           AMPERE_DATA_CENTRE),
    entry(&[&["a30"]],                        "A30",             24.0,  0.933, 165.0,  None,         None,           AMPERE_DATA_CENTRE),
    entry(&[&["a10"]],                        "A10",             24.0,  0.6,   125.0,  None,         None,           AMPERE_DATA_CENTRE),
    entry(&[&["a6000"]],                      "RTX A6000",       48.0,  0.768, 154.8,  None,         None,           AMPERE_RTX),
    entry(&[&["rtx", "3090", "ti"]],          "RTX 3090 Ti",     24.0,  1.008, 80.0,   None,         None,           AMPERE_RTX),
    entry(&[&["rtx", "3090"]],                "RTX 3090",        24.0,  0.936, 71.0,   None,         None,           AMPERE_RTX),
    entry(&[&["rtx", "6000", "ada"]],         "RTX 6000 Ada",    48.0,  0.96,  364.2,  Some(728.5),  None,           ADA_RTX),
    entry(&[&["rtx", "4090"]],                "RTX 4090",        24.0,  1.008, 165.2,  Some(330.3),  None,           ADA_RTX),
    entry(&[&["rtx", "5090"]],                "RTX 5090",        32.0,  1.792, 209.5,  Some(419.0),  Some(1676.0),   BLACKWELL_RTX),
    entry(&[&["rtx", "5080"]],                "RTX 5080",        16.0,  0.96,  112.6,  Some(225.1),  Some(900.4),    BLACKWELL_RTX),
    entry(&[&["mi355x"]],                     "MI355X",          288.0, 8.0,   2516.6, Some(5033.2), Some(10_066.3), CDNA4),
    entry(&[&["mi325x"]],                     "MI325X",          256.0, 6.0,   1307.4, Some(2614.9), None,           CDNA3),
    entry(&[&["mi300x"]],                     "MI300X",          192.0, 5.3,   1307.4, Some(2614.9), None,           CDNA3),
];

#[allow(clippy::too_many_arguments, reason = "one row of a table, in the order of its columns")]
const fn entry(
    aliases: &'static [&'static [&'static str]],
    name: &'static str,
    memory_gib: f64,
    memory_bandwidth_tb_s: f64,
    bf16_tflops: f64,
    fp8_tflops: Option<f64>,
    fp4_tflops: Option<f64>,
    source: &'static str,
) -> Entry {
    let spec = GpuSpec { name, memory_gib, memory_bandwidth_tb_s, bf16_tflops, fp8_tflops, fp4_tflops, source };
    Entry { aliases, spec }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str) -> Option<&'static str> {
        GpuSpec::find(name).map(|spec| spec.name)
    }

    #[test]
    fn names_that_nvml_reports_find_their_card() {
        let pairs = [
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA H100 NVL", "H100 NVL"),
            ("NVIDIA H200", "H200 SXM"),
            ("NVIDIA GH200 480GB", "GH200 96GB"),
            ("NVIDIA B200", "B200"),
            ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
            ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
            ("NVIDIA L4", "L4"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA A10", "A10"),
            ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("NVIDIA GeForce RTX 5090", "RTX 5090"),
            ("AMD Instinct MI300X", "MI300X"),
        ];
        for (reported, card) in pairs {
            assert_eq!(found(reported), Some(card), "{reported}");
        }
    }

    #[test]
    fn other_and_smaller_cards_find_nothing() {
        for name in [
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA A10G",
            "NVIDIA L40",
            "Tesla T4",
            "llvmpipe (LLVM 17.0.6, 256 bits)",
        ] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn rates_are_dense_and_halve_with_the_bits() {
        for spec in GpuSpec::all() {
            let steps = [Some(spec.bf16_tflops), spec.fp8_tflops, spec.fp4_tflops];
            for pair in steps.windows(2) {
                if let [Some(wide), Some(narrow)] = pair {
                    // GeForce cards have full-rate 4-bit and half-rate wider products: a factor of 4 there.
                    assert!((1.99..4.01).contains(&(narrow / wide)), "{}: {wide} then {narrow}", spec.name);
                }
            }
            // With sparsity printed by mistake, intensity would be twice what any of these cards has.
            assert!((70.0..500.0).contains(&spec.bf16_critical_intensity()), "{}", spec.name);
        }
    }
}
