//! The types of the rows in the table of accelerators.
//!
//! Trade-off: rates are those of matrix units if there are any; vector units count only in f32.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use super::figure::Figure;

/// Who makes an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Maker {
    /// NVIDIA.
    Nvidia,
    /// AMD.
    Amd,
    /// Intel.
    Intel,
    /// Apple.
    Apple,
    /// Google.
    Google,
    /// None of these.
    Other,
}

/// Kind of hardware for tuning: accelerators of one kind are programmed alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HardwareKind {
    /// Compute capability 10: B100, B200, B300, GB200.
    Blackwell,
    /// Compute capability 12: RTX 50 and RTX PRO Blackwell, without the tensor memory of data-center cards.
    BlackwellRtx,
    /// Compute capability 9: H100, H200, GH200.
    Hopper,
    /// Compute capability 8.9: L4, L40S, RTX 40.
    Ada,
    /// Compute capability 8.0 to 8.7: A100, A10, RTX 30.
    Ampere,
    /// Compute capability 7.5: T4, RTX 20. Its matrix units multiply float16 and no bfloat16.
    Turing,
    /// NVIDIA cards before these.
    OlderNvidia,
    /// AMD CDNA 3: MI300X, MI325X.
    Cdna3,
    /// AMD CDNA 4: MI355X.
    Cdna4,
    /// Intel Gaudi.
    Gaudi,
    /// Intel Data Center GPU Max.
    PonteVecchio,
    /// Apple's M chips.
    AppleSilicon,
    /// Google's TPUs.
    Tpu,
    /// A processor without an accelerator.
    Cpu,
}

impl fmt::Display for HardwareKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Blackwell => "Blackwell",
            Self::BlackwellRtx => "Blackwell RTX",
            Self::Hopper => "Hopper",
            Self::Ada => "Ada",
            Self::Ampere => "Ampere",
            Self::Turing => "Turing",
            Self::OlderNvidia => "NVIDIA before Turing",
            Self::Cdna3 => "CDNA 3",
            Self::Cdna4 => "CDNA 4",
            Self::Gaudi => "Gaudi",
            Self::PonteVecchio => "Ponte Vecchio",
            Self::AppleSilicon => "Apple silicon",
            Self::Tpu => "TPU",
            Self::Cpu => "CPU",
        })
    }
}

impl HardwareKind {
    /// Returns whether its matrix units multiply 8-bit floats; on NVIDIA's cards from compute capability 8.9 on.
    pub fn has_fp8(self) -> bool {
        matches!(
            self,
            Self::Blackwell | Self::BlackwellRtx | Self::Hopper | Self::Ada | Self::Cdna3 | Self::Cdna4 | Self::Gaudi
        )
    }

    /// Returns whether it computes in bfloat16; NVIDIA's cards do from compute capability 8.0 on.
    pub fn has_bf16(self) -> bool {
        !matches!(self, Self::Turing | Self::OlderNvidia)
    }

    /// Returns its 16-bit format: bfloat16, or float16 without it.
    pub fn half(self) -> MathFormat {
        if self.has_bf16() { MathFormat::Bf16 } else { MathFormat::F16 }
    }

    /// Returns the engine that runs there.
    pub fn engine(self) -> Engine {
        match self {
            Self::Blackwell | Self::BlackwellRtx | Self::Hopper | Self::Ada | Self::Ampere | Self::Turing => {
                Engine::Cuda
            }
            // Older cards lack matrix instructions that backend `cuda` needs.
            Self::OlderNvidia | Self::PonteVecchio | Self::AppleSilicon => Engine::Wgpu,
            // CDNA has no Vulkan driver; docs/backends.md says what HIP would take.
            Self::Cdna3 | Self::Cdna4 | Self::Gaudi | Self::Tpu => Engine::NoBackend,
            Self::Cpu => Engine::Cpu,
        }
    }
}

/// The engine for a kind of hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Backend `cuda`.
    Cuda,
    /// Backend `wgpu`.
    Wgpu,
    /// Backend `flex`.
    Cpu,
    /// Burn has no backend for it: it can be planned for but not run on.
    NoBackend,
}

/// A format that a run multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MathFormat {
    /// IEEE 754 binary32, on the vector units if the matrix units lack it.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit floats.
    Fp8,
}

impl MathFormat {
    /// Returns the name to print.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "FP8",
        }
    }
}

/// Dense rates, 1e12 operations per second, accumulated in f32 (i32 for integers). `None`: the accelerator has no such unit, or its maker states no
/// rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseRates {
    /// binary32 on vector units.
    pub f32: Option<Figure>,
    /// 19-bit floats of 32-bit operands.
    pub tf32: Option<Figure>,
    /// binary16 and bfloat16, which have the same rate on every accelerator of the table that has both; binary16 alone if
    /// [`HardwareKind::has_bf16`] is false.
    pub bf16: Figure,
    /// 8-bit floats.
    pub fp8: Option<Figure>,
    /// 4-bit floats.
    pub fp4: Option<Figure>,
    /// 8-bit integers.
    pub int8: Option<Figure>,
}

/// A connection of an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its name, such as `PCIe 5.0 x16`.
    pub name: &'static str,
    /// 1e9 bytes per second, both directions together, as makers print it.
    pub gb_s: Figure,
}

/// A feature that only some accelerators have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    /// 8-bit float matrix products.
    Fp8,
    /// 4-bit float matrix products.
    Fp4,
    /// Bulk copies between memories that the hardware addresses (TMA).
    BulkTensorCopy,
    /// Thread blocks that read each other's shared memory.
    ThreadBlockClusters,
    /// Matrix accumulators in a separate memory.
    TensorMemory,
    /// Hardware that decompresses LZ4, Snappy and Deflate.
    DecompressionEngine,
    /// Processor and accelerator share one memory.
    UnifiedMemory,
    /// The host's memory is addressed coherently over a link faster than PCIe.
    CoherentHostLink,
    /// A matrix unit with this many rows and columns.
    SystolicArray(u16),
    /// Programs are compiled by XLA.
    Xla,
    /// Multi-instance GPU: one card as several.
    Mig,
}

/// The facts about an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceleratorSpec {
    /// Name on the command line, such as `h100`.
    pub id: &'static str,
    /// Name to print.
    pub name: &'static str,
    /// Words that identify its reported name: all words of any one alias.
    #[serde(skip_serializing, deserialize_with = "leaked")]
    pub(super) aliases: &'static [Vec<&'static str>],
    /// Its maker.
    pub maker: Maker,
    /// Its kind for tuning.
    pub kind: HardwareKind,
    /// Memory in GiB, as reported by a driver if known, else as sold (makers write GB), which is a little more. With ECC if the card has it; the
    /// largest configuration if memory is unified.
    pub memory_gib: Figure,
    /// Peak memory bandwidth, 1e12 bytes per second.
    pub bandwidth_tb_s: Figure,
    /// Dense peak rates.
    pub rates: DenseRates,
    /// The best bf16 rate measured with a library, 1e12 operations per second.
    pub sustained_bf16: Option<Figure>,
    /// Link to the host; `None` if memory is unified.
    pub host_link: Option<Link>,
    /// Links to other accelerators, all of one together.
    pub peer_link: Option<Link>,
    /// Board power, W; `None`: the maker states none.
    pub power_w: Option<Figure>,
    /// Its features.
    #[serde(deserialize_with = "leaked")]
    pub features: &'static [Feature],
}

impl AcceleratorSpec {
    /// Returns the dense rate in a format, 1e12 operations per second. `None`: no such unit.
    pub fn rate(&self, format: MathFormat) -> Option<Figure> {
        match format {
            MathFormat::F32 => self.rates.f32,
            MathFormat::F16 => Some(self.rates.bf16),
            MathFormat::Bf16 => Some(self.rates.bf16).filter(|_| self.kind.has_bf16()),
            MathFormat::Fp8 => self.rates.fp8,
        }
    }

    /// Returns its memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        (self.memory_gib.value * (1u64 << 30) as f64) as u64
    }

    /// Returns whether it has a feature.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }

    /// Lists the figures without a document, by name.
    pub fn unverified(&self) -> Vec<&'static str> {
        let figures = [
            ("memory", Some(self.memory_gib)),
            ("bandwidth", Some(self.bandwidth_tb_s)),
            ("f32 rate", self.rates.f32),
            ("tf32 rate", self.rates.tf32),
            ("bf16 rate", Some(self.rates.bf16)),
            ("fp8 rate", self.rates.fp8),
            ("fp4 rate", self.rates.fp4),
            ("int8 rate", self.rates.int8),
            ("host link", self.host_link.map(|link| link.gb_s)),
            ("peer link", self.peer_link.map(|link| link.gb_s)),
            ("power", self.power_w),
        ];
        let missing = figures.into_iter().filter(|(_, figure)| figure.is_some_and(|figure| !figure.is_verified()));
        missing.map(|(name, _)| name).collect()
    }
}

/// Reads a list of the table into static memory, because the table is read once and kept.
fn leaked<'de, D: Deserializer<'de>, T: Deserialize<'de> + 'static>(list: D) -> Result<&'static [T], D::Error> {
    Ok(Vec::<T>::deserialize(list)?.leak())
}
