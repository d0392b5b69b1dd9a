//! The whole table: finding an accelerator by the name that a driver reports or that a user types, and comparing rows.
//!
//! Trade-off: a name that says "laptop" or "MIG" finds nothing, because such a card is another one.

use super::types::{AcceleratorSpec, Entry};
use super::{amd, nvidia, other_makers, rtx};

/// A machine that is not in the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no machine called `{name}` is in the table{nearest}; known are {known}")]
pub struct UnknownMachine {
    /// What was typed.
    pub name: String,
    /// A suggestion, or nothing.
    nearest: String,
    /// All names.
    known: String,
}

/// Words that say it is another or a smaller card: a slice of a card, a mobile or cut-down version.
const ANOTHER_CARD: [&str; 5] = ["mig", "laptop", "mobile", "q", "d"];

/// The whole table; rows with more words come before rows with fewer of the same.
fn entries() -> impl Iterator<Item = &'static Entry> {
    [nvidia::CARDS, rtx::CARDS, amd::CARDS, other_makers::ENTRIES].into_iter().flatten()
}

impl AcceleratorSpec {
    /// Every accelerator in the table.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        entries().map(|entry| &entry.spec)
    }

    /// Share of the bf16 peak to expect of a good library, and what that rests on. Where there is no measurement of this accelerator: the smallest
    /// share that was measured on any of the same maker, else of the whole table.
    pub fn sustained_share(&self) -> (f64, String) {
        if let Some(measured) = self.sustained_bf16 {
            return (
                measured.value / self.rates.bf16.value,
                format!("measured on this accelerator: {}", measured.source()),
            );
        }
        let share = |spec: &Self| spec.sustained_bf16.map(|measured| measured.value / spec.rates.bf16.value);
        let smallest = |same_maker: bool| {
            let shares = Self::all().filter(|spec| !same_maker || spec.maker == self.maker).filter_map(share);
            shares.min_by(f64::total_cmp)
        };
        match (smallest(true), smallest(false)) {
            (Some(share), _) => {
                (share, "not measured here: the smallest share of an accelerator of this maker".to_owned())
            }
            (None, Some(share)) => (share, "not measured here: the smallest share of the table".to_owned()),
            (None, None) => unreachable!("the table has measured rates"),
        }
    }

    /// The accelerator whose words are all in `name`, as NVML, sysfs or a Vulkan or Metal driver reports it. `None` for one not in the
    /// table, and for slices and laptop versions of those that are.
    pub fn find(name: &str) -> Option<&'static Self> {
        let lower = name.to_lowercase();
        let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
        if words.iter().any(|word| ANOTHER_CARD.contains(word)) {
            return None;
        }
        let is_named = |entry: &&Entry| entry.aliases.iter().any(|alias| alias.iter().all(|word| words.contains(word)));
        entries().find(is_named).map(|entry| &entry.spec)
    }

    /// The accelerator that a user names on the command line, such as `b200`, `m4-max` or `tpu-v5p`; capitals, spaces and underscores
    /// do not matter.
    ///
    /// # Errors
    /// [`UnknownMachine`] with the names that are known.
    pub fn named(name: &str) -> Result<&'static Self, UnknownMachine> {
        let id = name.trim().to_lowercase().replace([' ', '_'], "-");
        let squeezed = id.replace('-', "");
        if let Some(spec) = Self::all().find(|spec| spec.id == id || spec.id.replace('-', "") == squeezed) {
            return Ok(spec);
        }
        let known: Vec<&str> = Self::all().map(|spec| spec.id).collect();
        let nearest = known.iter().find(|known| squeezed.len() > 1 && known.replace('-', "").contains(&squeezed));
        Err(UnknownMachine {
            name: name.to_owned(),
            nearest: nearest.map_or_else(String::new, |near| format!(": did you mean `{near}`?")),
            known: known.join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Feature, Maker, MathFormat};

    fn found(name: &str) -> Option<&'static str> {
        AcceleratorSpec::find(name).map(|spec| spec.id)
    }

    #[test]
    fn names_that_drivers_report_find_their_accelerator() {
        let pairs = [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA H100 NVL", "h100-nvl"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA B300 SXM6 AC", "b300"),
            ("NVIDIA GB200", "gb200"),
            ("NVIDIA A100-SXM4-40GB", "a100-40"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie"),
            ("NVIDIA L4", "l4"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA A10", "a10"),
            ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
            ("NVIDIA GeForce RTX 4090", "rtx4090"),
            ("NVIDIA GeForce RTX 5090", "rtx5090"),
            ("AMD Instinct MI300X", "mi300x"),
            ("Apple M4 Max", "m4-max"),
            ("Apple M3 Ultra", "m3-ultra"),
            ("Intel(R) Data Center GPU Max 1550", "max1550"),
        ];
        for (reported, id) in pairs {
            assert_eq!(found(reported), Some(id), "{reported}");
        }
    }

    #[test]
    fn other_and_smaller_cards_find_nothing() {
        for name in [
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "Quadro RTX 5090 with Max-Q Design",
            "NVIDIA A10G",
            "NVIDIA L40",
            "Tesla T4",
            "Apple M4",
            "llvmpipe (LLVM 17.0.6, 256 bits)",
        ] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn every_row_is_named_by_its_own_id_and_no_other() {
        let ids: Vec<&str> = AcceleratorSpec::all().map(|spec| spec.id).collect();
        for id in &ids {
            assert_eq!(AcceleratorSpec::named(id).unwrap().id, *id);
            assert_eq!(ids.iter().filter(|other| *other == id).count(), 1, "{id}");
        }
        for typed in ["B200", "M4 Max", "tpu_v5p", "rtx-4090", "MI300X", "l4"] {
            assert!(AcceleratorSpec::named(typed).is_ok(), "{typed}");
        }
        let message = AcceleratorSpec::named("v5p").unwrap_err().to_string();
        assert!(message.contains("did you mean `tpu-v5p`?") && message.contains("h100"), "{message}");
    }

    #[test]
    fn the_accelerators_of_the_issue_are_all_there() {
        for id in [
            "a100",
            "a100-40",
            "l4",
            "l40s",
            "h100",
            "h100-pcie",
            "h100-nvl",
            "h200",
            "b100",
            "b200",
            "b300",
            "gb200",
            "rtx3090",
            "rtx4090",
            "rtx5090",
            "mi300x",
            "mi325x",
            "mi355x",
            "gaudi2",
            "gaudi3",
            "max1550",
            "m3-max",
            "m4-max",
            "m3-ultra",
            "tpu-v5e",
            "tpu-v5p",
            "tpu-v6e",
        ] {
            AcceleratorSpec::named(id).unwrap();
        }
    }

    #[test]
    fn rates_are_dense_and_grow_as_bits_shrink() {
        for spec in AcceleratorSpec::all() {
            let rates = [Some(spec.rates.bf16), spec.rates.fp8, spec.rates.fp4].map(|rate| rate.map(|rate| rate.value));
            for pair in rates.windows(2) {
                if let [Some(wide), Some(narrow)] = pair {
                    // Gaudi 3 has one rate for both; GeForce cards have full-rate 4-bit and half-rate wider products: a factor of 4 there.
                    assert!((0.99..4.02).contains(&(narrow / wide)), "{}: {wide} then {narrow}", spec.name);
                }
            }
            // With sparsity printed by mistake, intensity would be twice what any of these accelerators has.
            let intensity = spec.rates.bf16.value / spec.bandwidth_tb_s.value;
            assert!((25.0..600.0).contains(&intensity), "{}", spec.name);
            assert!(spec.memory_gib.value >= 16.0 && spec.bandwidth_tb_s.value > 0.2, "{}", spec.name);
            assert_eq!(spec.has(Feature::UnifiedMemory), spec.maker == Maker::Apple, "{}", spec.name);
        }
    }

    #[test]
    fn features_and_rates_agree() {
        for spec in AcceleratorSpec::all() {
            assert_eq!(spec.has(Feature::Fp8), spec.rate(MathFormat::Fp8).is_some(), "{}", spec.name);
            assert_eq!(spec.has(Feature::Fp4), spec.rate(MathFormat::Fp4).is_some(), "{}", spec.name);
            let best = spec.sustained_bf16.map_or(0.0, |best| best.value);
            assert!(best < spec.rates.bf16.value, "{}: no measurement exceeds the peak", spec.name);
            let (share, why) = spec.sustained_share();
            assert!((0.4..1.0).contains(&share) && !why.is_empty(), "{}: {share}", spec.name);
        }
    }

    #[test]
    fn the_main_rows_rest_on_documents_alone() {
        for id in [
            "a100", "a100-40", "l40s", "h100", "h200", "b200", "b300", "gb200", "rtx4090", "mi300x", "gaudi3",
            "tpu-v5p", "l4", "rtx3090", "rtx5090", "mi325x", "mi355x", "gaudi2", "max1550", "m3-max", "m4-max",
            "tpu-v5e", "tpu-v6e",
        ] {
            let spec = AcceleratorSpec::named(id).unwrap();
            assert_eq!(spec.unverified(), Vec::<&str>::new(), "{id}");
        }
        assert!(AcceleratorSpec::named("a30").unwrap().unverified().contains(&"bf16 rate"));
    }
}
