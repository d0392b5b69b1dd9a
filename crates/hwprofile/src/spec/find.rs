//! The table of accelerators, `accelerators.json`: finding one by the name that a driver reports or that a user types, and comparing rows.
//!
//! Rows with more words in their aliases come before rows with fewer of the same, because the first match of a reported name is taken. A rate on
//! which documents disagree is left out (int8 of the B300). GeForce cards multiply 16-bit and 8-bit floats at half their rate when sums are
//! accumulated in f32, as training needs; those halves are in the table.
//! Trade-off: a name that says "laptop" or "MIG" finds nothing, because such a card is another one.

use std::sync::LazyLock;

use super::types::AcceleratorSpec;

static ACCELERATORS: LazyLock<Vec<AcceleratorSpec>> = LazyLock::new(|| {
    // Invariant: the file is part of the program, and a test reads it.
    serde_json::from_str(include_str!("accelerators.json")).expect("accelerators.json has accelerators")
});

/// A machine that is not in the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no machine called `{name}` is in the table{hint}; known are {known}")]
pub struct UnknownMachine {
    /// The text that the user typed.
    pub name: String,
    /// A suggestion, or nothing.
    hint: String,
    /// All names.
    known: String,
}

/// Words that mean another or a smaller card: a slice, a mobile or a cut-down version.
const ANOTHER_CARD: [&str; 5] = ["mig", "laptop", "mobile", "q", "d"];

/// Brand words that users type and that the table leaves out, in their usual order.
const BRANDS: [&str; 7] = ["nvidia", "geforce", "amd", "instinct", "intel", "apple", "google"];

/// Maximum ratio of the makers' GB to the drivers' GiB: 192 of a B200's 178.35.
const SOLD_AS: f64 = 1.08;

impl AcceleratorSpec {
    /// Iterates over every accelerator in the table.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        ACCELERATORS.iter()
    }

    /// Returns the share of the bf16 peak to expect from a good library, and its basis. Without a measurement of this accelerator: the smallest
    /// measured share of the same maker, else of the whole table.
    pub fn sustained_share(&self) -> (f64, &'static str) {
        if let Some(measured) = self.sustained_bf16 {
            return (measured.value / self.rates.bf16.value, "measured on this accelerator");
        }
        let share = |spec: &Self| spec.sustained_bf16.map(|measured| measured.value / spec.rates.bf16.value);
        let smallest = |same_maker: bool| {
            let shares = Self::all().filter(|spec| !same_maker || spec.maker == self.maker).filter_map(share);
            shares.min_by(f64::total_cmp)
        };
        match (smallest(true), smallest(false)) {
            (Some(share), _) => (share, "not measured here: the smallest share of an accelerator of this maker"),
            (None, Some(share)) => (share, "not measured here: the smallest share of the table"),
            (None, None) => unreachable!("the table has measured rates"),
        }
    }

    /// Returns the accelerator whose words are all in `name`, as reported by NVML, sysfs or a Vulkan or Metal driver. `None` for one not in the
    /// table, and for slices and laptop versions.
    pub fn find(name: &str) -> Option<&'static Self> {
        let lower = name.to_lowercase();
        let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
        if words.iter().any(|word| ANOTHER_CARD.contains(word)) {
            return None;
        }
        let is_named = |spec: &&Self| spec.aliases.iter().any(|alias| alias.iter().all(|word| words.contains(word)));
        Self::all().find(is_named)
    }

    /// Returns the accelerator that a user names on the command line, such as `b200`, `m4-max` or `tpu-v5p`, also as `h100-80gb`, `h100-sxm`, `4090`
    /// or `nvidia-h100`; case and separators do not matter.
    ///
    /// # Errors
    /// [`UnknownMachine`] with the known names, and with advice for planning several accelerators if the name has a count.
    pub fn named(name: &str) -> Result<&'static Self, UnknownMachine> {
        let typed = squeezed(name);
        if let Some(spec) = typed_as(&typed) {
            return Ok(spec);
        }
        let hint = match several(&typed) {
            Some((count, spec)) => {
                format!(": it names one accelerator, and `plan` takes several as `--for {} --ranks {count}`", spec.id)
            }
            None => nearest(&typed).map_or_else(String::new, |near| format!(": did you mean `{near}`?")),
        };
        let known: Vec<&str> = Self::all().map(|spec| spec.id).collect();
        Err(UnknownMachine { name: name.to_owned(), hint, known: known.join(", ") })
    }
}

/// Keeps letters and digits, in lower case; a multiplication sign becomes `x`.
fn squeezed(name: &str) -> String {
    let letters = name.to_lowercase().replace(['*', '×'], "x");
    letters.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// Returns whether squeezed text names an accelerator: its id, also without `rtx` or with its GB of memory, or its printed name.
fn is_name_of(spec: &AcceleratorSpec, typed: &str) -> bool {
    let id = squeezed(spec.id);
    typed == id
        || id.strip_prefix("rtx") == Some(typed)
        || typed == squeezed(spec.name)
        || typed.strip_prefix(id.as_str()).is_some_and(|rest| is_memory_of(spec, rest))
}

/// Returns whether squeezed text is an accelerator's memory size as sold.
fn is_memory_of(spec: &AcceleratorSpec, typed: &str) -> bool {
    let (number, reported) = (typed.strip_suffix("gb").unwrap_or(typed), spec.memory_gib.value);
    let sold = number.parse::<u32>().ok().filter(|_| !number.starts_with('0'));
    sold.is_some_and(|gigabytes| (reported..=SOLD_AS * reported).contains(&f64::from(gigabytes)))
}

/// Returns the accelerator that squeezed text names, with or without its brand.
fn typed_as(typed: &str) -> Option<&'static AcceleratorSpec> {
    let bare = BRANDS.iter().fold(typed, |rest, brand| rest.strip_prefix(*brand).unwrap_or(rest));
    AcceleratorSpec::all().find(|spec| is_name_of(spec, bare))
}

/// Parses a count and an accelerator from squeezed text such as `8xh100`, `8h100` or `h100x8`.
fn several(typed: &str) -> Option<(u32, &'static AcceleratorSpec)> {
    let rest = typed.trim_start_matches(|c: char| c.is_ascii_digit());
    let count_first = (&typed[..typed.len() - rest.len()], rest.strip_prefix('x').unwrap_or(rest));
    let count_last = typed.rsplit_once('x').map(|(one, count)| (count, one));
    let read = |(count, one): (&str, &str)| Some((count.parse::<u32>().ok()?, typed_as(one)?));
    [Some(count_first), count_last].into_iter().flatten().find_map(read)
}

/// Returns the id that contains squeezed text, else the longest id that it starts with.
fn nearest(typed: &str) -> Option<&'static str> {
    let ids = || AcceleratorSpec::all().map(|spec| spec.id);
    let whole = ids().find(|id| typed.len() > 1 && squeezed(id).contains(typed));
    whole.or_else(|| ids().filter(|id| typed.starts_with(&squeezed(id))).max_by_key(|id| id.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Feature, Maker};

    fn found(name: &str) -> Option<&'static str> {
        AcceleratorSpec::find(name).map(|spec| spec.id)
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
            "NVIDIA T4G",
            "NVIDIA GeForce RTX 2080",
            "Tesla V100-SXM2-16GB",
            "Apple M4",
            "llvmpipe (LLVM 17.0.6, 256 bits)",
        ] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn every_row_is_read_and_an_unknown_name_answered_with_the_nearest() {
        assert_eq!(AcceleratorSpec::all().count(), 40);
        let message = AcceleratorSpec::named("v5p").unwrap_err().to_string();
        assert!(message.contains("did you mean `tpu-v5p`?") && message.contains("h100"), "{message}");
    }

    #[test]
    fn names_that_drivers_report_and_users_type_are_those_of_one_row() {
        let rows: [(&str, &[&str], &[&str]); 25] = [
            ("h100", &["NVIDIA H100 80GB HBM3"], &["h100-sxm", "H100-80GB", "nvidia-h100"]),
            ("h100-pcie", &["NVIDIA H100 PCIe"], &[]),
            ("h100-nvl", &["NVIDIA H100 NVL"], &[]),
            ("h200", &["NVIDIA H200"], &[]),
            ("gh200", &["NVIDIA GH200 480GB"], &[]),
            ("b200", &["NVIDIA B200"], &["b200-180gb", "B200 192GB"]),
            ("b300", &["NVIDIA B300 SXM6 AC"], &["b300-288gb"]),
            ("gb200", &["NVIDIA GB200"], &[]),
            ("a100-40", &["NVIDIA A100-SXM4-40GB"], &["A100 40GB"]),
            ("a100", &["NVIDIA A100-SXM4-80GB"], &["a100-80"]),
            ("a100-pcie", &["NVIDIA A100 80GB PCIe"], &[]),
            ("l4", &["NVIDIA L4"], &["l4-24gb"]),
            ("l40s", &["NVIDIA L40S"], &["L40S 48GB"]),
            ("a10", &["NVIDIA A10"], &[]),
            ("t4", &["Tesla T4", "NVIDIA T4"], &["T4 16GB"]),
            ("rtx2080ti", &["NVIDIA GeForce RTX 2080 Ti"], &["2080 Ti"]),
            ("rtx3090ti", &["NVIDIA GeForce RTX 3090 Ti"], &["3090 Ti"]),
            ("rtx4090", &["NVIDIA GeForce RTX 4090"], &["4090", "NVIDIA GeForce RTX 4090"]),
            ("rtx5090", &["NVIDIA GeForce RTX 5090"], &[]),
            ("mi300x", &["AMD Instinct MI300X"], &[]),
            ("m4-max", &["Apple M4 Max"], &["apple m4 max"]),
            ("m3-ultra", &["Apple M3 Ultra"], &[]),
            ("max1550", &["Intel(R) Data Center GPU Max 1550"], &[]),
            ("rtx3090", &[], &["3090"]),
            ("tpu-v5p", &[], &["tpu_v5p"]),
        ];
        for (id, reported, typed) in rows {
            for name in reported {
                assert_eq!(found(name), Some(id), "{name}");
            }
            for name in typed {
                assert_eq!(AcceleratorSpec::named(name).map(|spec| spec.id), Ok(id), "{name}");
            }
        }
        for spec in AcceleratorSpec::all() {
            let with_memory = format!("{}-{}gb", spec.id, spec.memory_gib.value.ceil());
            for name in [spec.id, spec.name, with_memory.as_str()] {
                let named = AcceleratorSpec::all().filter(|other| is_name_of(other, &squeezed(name)));
                assert_eq!(named.map(|other| other.id).collect::<Vec<_>>(), [spec.id], "{name}");
            }
        }
        for typed in ["", "80gb", "rtx", "h100-40gb", "h200-80gb", "a100-24gb", "RTX 4090 Laptop"] {
            assert!(AcceleratorSpec::named(typed).is_err(), "{typed}");
        }
    }

    #[test]
    fn a_number_of_accelerators_is_answered_with_options() {
        let message = |typed: &str| AcceleratorSpec::named(typed).unwrap_err().to_string();
        for (typed, options) in [
            ("8xh100", "`--for h100 --ranks 8`"),
            ("8 x H100 80GB", "`--for h100 --ranks 8`"),
            ("h100x8", "`--for h100 --ranks 8`"),
            ("2*4090", "`--for rtx4090 --ranks 2`"),
            ("mi300x-x8", "`--for mi300x --ranks 8`"),
        ] {
            assert!(message(typed).contains(options), "{typed}: {}", message(typed));
        }
        assert!(message("h100-sxm5").contains("did you mean `h100`?"), "{}", message("h100-sxm5"));
        assert!(!message("8xv100").contains("--ranks"), "{}", message("8xv100"));
    }

    #[test]
    fn only_rates_are_halves_of_what_is_printed_with_sparsity() {
        for spec in AcceleratorSpec::all() {
            let links = [spec.host_link, spec.peer_link].map(|link| link.map(|link| link.gb_s));
            let others = [Some(spec.memory_gib), Some(spec.bandwidth_tb_s), spec.rates.f32, spec.power_w];
            for figure in others.into_iter().chain(links).flatten() {
                assert!(!figure.source().contains("sparsity"), "{}: {}", spec.name, figure.source());
            }
        }
        let l4 = AcceleratorSpec::named("l4").unwrap();
        assert!(l4.rates.bf16.source().ends_with("; halved: printed with sparsity"), "{}", l4.rates.bf16.source());
    }

    #[test]
    fn rates_are_dense_and_grow_as_bits_shrink() {
        for spec in AcceleratorSpec::all() {
            let rates = [Some(spec.rates.bf16), spec.rates.fp8, spec.rates.fp4].map(|rate| rate.map(|rate| rate.value));
            for pair in rates.windows(2) {
                if let [Some(wide), Some(narrow)] = pair {
                    // Gaudi 3 has one rate for both; GeForce cards have full-rate 4-bit and half-rate wider GEMMs: a factor of 4 there.
                    assert!((0.99..4.02).contains(&(narrow / wide)), "{}: {wide} then {narrow}", spec.name);
                }
            }
            // With sparsity printed by mistake, intensity would be twice what any of these accelerators has.
            let intensity = spec.rates.bf16.value / spec.bandwidth_tb_s.value;
            assert!((25.0..600.0).contains(&intensity), "{}", spec.name);
            assert!(spec.memory_gib.value >= 11.0 && spec.bandwidth_tb_s.value > 0.2, "{}", spec.name);
            assert_eq!(spec.has(Feature::UnifiedMemory), spec.maker == Maker::Apple, "{}", spec.name);
        }
    }

    #[test]
    fn features_and_rates_agree() {
        for spec in AcceleratorSpec::all() {
            assert_eq!(spec.has(Feature::Fp8), spec.rates.fp8.is_some(), "{}", spec.name);
            assert_eq!(spec.has(Feature::Fp4), spec.rates.fp4.is_some(), "{}", spec.name);
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
