//! The CUDA C++ sources of this backend, compiled when the first launch needs them.
//!
//! Each source is compiled once per format of activations (and head width for attention, activation function, and soft cap). NVRTC takes
//! about a second for all that a run needs; the images are kept on disk by `firebrick_cuda::Compiler`.

use std::cell::RefCell;
use std::thread::JoinHandle;

use crate::attention::PAGE_ROWS;
use burn_tensor::DType;
use firebrick_arch::Activation;
use firebrick_cuda::{Compiler, Context, CudaError, Image, Kernel, Module, Program};
use firebrick_precision::linear::{TOP_OF_ROWS, top_of_weight};
use firebrick_precision::{AMAX_FLOOR, QuantFormat};
use rustc_hash::FxHashMap;

use super::constants;
use super::experts::WIDE_STAGES;
use super::failure::check;
use crate::backends::on_cubecl::DeviceFailure;
use crate::backends::planning::flash::FlashTiles;
use crate::backends::planning::passes::GATED_TILE;

const PRELUDE: &str = include_str!("prelude.cu");

/// Lists the paths of files below the backend's folder, with their texts.
macro_rules! sources {
    ($($file:literal),+ $(,)?) => {
        &[$(($file, include_str!(concat!("../", $file)))),+]
    };
}

/// A soft cap with which a source is compiled: the bits of an f32, so that it can be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SoftCap(u32);

impl SoftCap {
    pub(crate) fn new(cap: f64) -> Self {
        Self((cap as f32).to_bits())
    }

    /// Returns the macro definition that sources look for.
    fn define(self) -> String {
        format!("#define SOFT_CAP {:?}f\n", f32::from_bits(self.0))
    }
}

/// Variant of the attention kernels for a model: head width, and soft cap of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlashVariant {
    pub head_dim: usize,
    pub soft_cap: Option<SoftCap>,
}

impl FlashVariant {
    fn define(self) -> String {
        format!("#define HEAD_DIM {}\n{}", self.head_dim, self.soft_cap.map_or_else(String::new, SoftCap::define))
    }
}

/// Weights that the few-row GEMMs read: a struct of `weight_values.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightValues {
    Nf4,
    Nvfp4,
    Mxfp4,
    Fp8,
    /// Weights in the format of activations.
    Dense,
}

impl WeightValues {
    fn define(self) -> String {
        let name = match self {
            Self::Nf4 => "Nf4Values",
            Self::Nvfp4 => "Nvfp4Values",
            Self::Mxfp4 => "Mxfp4Values",
            Self::Fp8 => "Fp8Values",
            Self::Dense => "DenseValues<T>",
        };
        format!("#define WEIGHT_VALUES {name}\n")
    }
}

/// Returns the type of an activation in `gated.cu`.
fn type_of(activation: Activation) -> String {
    match activation {
        Activation::ClampedSwiglu(constants) => {
            let [alpha, limit] = [constants.alpha(), constants.limit()].map(f32::to_bits);
            format!("{}<{alpha}u, {limit}u>", activation.name())
        }
        _ => activation.name().to_owned(),
    }
}

/// Returns the numbers of the FP8 recipe, under the names that `fp8_codes.cu` and `fp8.cu` use.
fn fp8_recipe() -> String {
    let [dense, mxfp4] = [None, Some(QuantFormat::Mxfp4)].map(top_of_weight);
    format!(
        "#define FP8_TOP_OF_ROWS {TOP_OF_ROWS:?}f\n#define FP8_AMAX_FLOOR {AMAX_FLOOR:?}f\n\
         #define FP8_TOP_OF_WEIGHTS {dense:?}f\n#define FP8_TOP_OF_MXFP4 {mxfp4:?}f\n"
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DeltaPart {
    /// What chunks need before their states are known.
    Chunks,
    /// States and outputs.
    Forward,
    /// Gradients of states, and of pairs of tokens.
    Backward,
    /// Gradients of the inputs.
    InputsBackward,
}

/// Widths for which the gated delta rule is compiled: of heads of keys and of values, and the columns of values that a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeltaSizes {
    pub key_dim: usize,
    pub value_dim: usize,
    pub slice: usize,
}

/// A program: files that are concatenated and compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    CachedAttention(FlashVariant),
    Columns,
    /// `width`: tokens that a filter covers.
    Conv {
        width: usize,
        gated: bool,
    },
    /// Soft cap of the logits.
    CrossEntropy(Option<SoftCap>),
    Delta(DeltaPart, DeltaSizes),
    Draw,
    Elementwise,
    Embedding,
    /// `stages`, here and below: tiles in flight.
    Experts {
        stages: usize,
    },
    FewRows(WeightValues),
    FlashForward(FlashVariant, FlashTiles),
    FlashBackward(FlashVariant, FlashTiles),
    FlashF32(FlashVariant),
    Fp8,
    Gated(Activation),
    GatedFp8(Activation),
    /// `pieces`: column pieces per warp.
    GatedLowRank {
        activation: Activation,
        pieces: usize,
        stages: usize,
    },
    Heads,
    /// `ranks`: maximum rank of an adapter.
    LowRank {
        ranks: usize,
        stages: usize,
    },
    /// With a gated activation, or without.
    LowRankRows(Option<Activation>),
    Magnitude,
    Norm,
    NormFp8,
    Optimizer,
    PackedIndex,
    Pairs,
    Quantize,
    Routing,
    Sinks,
    StoreRows,
    WideAttention,
    /// The products of experts on Hopper; `stages` are those of the narrow ones.
    WideExperts {
        stages: usize,
    },
    WriteOut,
}

impl Source {
    /// Returns path and text of its files, in order; the last one names the program.
    pub(super) fn files(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::CachedAttention(_) => sources!("engine/matrix_units.cu", "attention/cached_attention.cu"),
            Self::Columns => sources!("engine/columns.cu"),
            Self::Conv { .. } => sources!("conv/conv.cu"),
            Self::CrossEntropy(_) => sources!("loss/cross_entropy.cu"),
            Self::Delta(DeltaPart::Chunks, _) => {
                sources!("engine/matrix_units.cu", "delta/tiles.cu", "delta/chunks.cu")
            }
            Self::Delta(DeltaPart::Forward, _) => {
                sources!("engine/matrix_units.cu", "delta/tiles.cu", "delta/forward.cu")
            }
            Self::Delta(DeltaPart::Backward, _) => {
                sources!("engine/matrix_units.cu", "delta/tiles.cu", "delta/backward.cu")
            }
            Self::Delta(DeltaPart::InputsBackward, _) => {
                sources!("engine/matrix_units.cu", "delta/tiles.cu", "delta/inputs_backward.cu")
            }
            Self::Elementwise => sources!("engine/elementwise.cu"),
            Self::Draw => sources!("loss/draw.cu"),
            Self::Embedding => sources!("embedding/embedding.cu"),
            Self::Experts { .. } => sources!("engine/matrix_units.cu", "moe/grouped.cu"),
            Self::FewRows(_) => {
                sources!("engine/matrix_units.cu", "linear/operands/weight_values.cu", "linear/few_rows.cu")
            }
            Self::FlashForward(..) => {
                sources!("engine/matrix_units.cu", "attention/flash.cu", "attention/flash_forward.cu")
            }
            Self::FlashBackward(..) => {
                sources!("engine/matrix_units.cu", "attention/flash.cu", "attention/flash_backward.cu")
            }
            Self::FlashF32(_) => sources!("attention/flash_f32.cu"),
            Self::Fp8 => sources!(
                "linear/operands/weight_values.cu",
                "linear/operands/fp8/fp8_codes.cu",
                "linear/modules.cu",
                "linear/operands/fp8/fp8.cu"
            ),
            Self::Gated(_) => sources!("linear/gated.cu"),
            Self::GatedFp8(_) => {
                sources!("linear/operands/fp8/fp8_codes.cu", "linear/gated.cu", "linear/operands/fp8/gated_fp8.cu")
            }
            Self::GatedLowRank { .. } => sources!(
                "engine/matrix_units.cu",
                "linear/gated.cu",
                "linear/adapters/low_rank.cu",
                "linear/adapters/gated_low_rank.cu"
            ),
            Self::Heads => sources!("linear/heads.cu"),
            Self::LowRank { .. } => {
                sources!("engine/matrix_units.cu", "linear/adapters/low_rank.cu", "linear/adapters/adapter_passes.cu")
            }
            Self::LowRankRows(None) => sources!("engine/matrix_units.cu", "linear/adapters/low_rank_rows.cu"),
            Self::LowRankRows(Some(_)) => {
                sources!("engine/matrix_units.cu", "linear/gated.cu", "linear/adapters/low_rank_rows.cu")
            }
            Self::Magnitude => sources!("linear/adapters/magnitude.cu"),
            Self::Norm => sources!("norm/norm.cu"),
            Self::NormFp8 => {
                sources!("linear/operands/fp8/fp8_codes.cu", "norm/norm.cu", "linear/operands/fp8/norm_fp8.cu")
            }
            Self::Optimizer => sources!("optimizer/optimizer.cu"),
            Self::PackedIndex => sources!("attention/packed_index.cu"),
            Self::Pairs => sources!("loss/pairs.cu"),
            Self::Quantize => sources!(
                "linear/operands/weight_values.cu",
                "linear/operands/nf4.cu",
                "linear/operands/scaled_formats.cu"
            ),
            Self::Routing => sources!("moe/routing.cu"),
            Self::Sinks => sources!("attention/sinks.cu"),
            Self::StoreRows => sources!("attention/store_rows.cu"),
            Self::WideAttention => sources!("attention/wide.cu"),
            Self::WideExperts { .. } => {
                sources!("engine/matrix_units.cu", "moe/grouped.cu", "moe/grouped_hopper.cu", "moe/grouped_fp8.cu")
            }
            Self::WriteOut => {
                sources!("linear/operands/weight_values.cu", "linear/modules.cu", "linear/operands/write_out.cu")
            }
        }
    }

    pub(super) fn program(self, dtype: DType) -> Program {
        let format = match dtype {
            DType::BF16 => "T_IS_BF16",
            DType::F16 => "T_IS_F16",
            DType::F32 => "T_IS_F32",
            other => unreachable!("activations are f32, f16 or bf16, not {other:?}"),
        };
        let variant = match self {
            Self::CachedAttention(variant) => {
                let of_blocks = constants::cached_attention(dtype, variant.head_dim);
                format!("{}{of_blocks}#define PAGE_ROWS {PAGE_ROWS}\n", variant.define())
            }
            Self::FlashForward(variant, tiles) | Self::FlashBackward(variant, tiles) => {
                variant.define() + &tiles.define()
            }
            Self::FlashF32(variant) => variant.define(),
            Self::FewRows(values) => values.define(),
            Self::CrossEntropy(soft_cap) => {
                constants::cross_entropy() + &soft_cap.map_or_else(String::new, SoftCap::define)
            }
            Self::Columns => constants::columns(),
            Self::Conv { width, gated } => format!("#define WIDTH {width}\n#define GATED {}\n", u8::from(gated)),
            Self::Delta(_, DeltaSizes { key_dim, value_dim, slice }) => {
                format!("#define KEY_DIM {key_dim}\n#define VALUE_DIM {value_dim}\n#define SLICE {slice}\n")
            }
            Self::Elementwise => constants::elementwise(),
            Self::Optimizer => constants::optimizer(),
            Self::PackedIndex => constants::packed_index(),
            Self::Pairs => constants::pairs(),
            Self::Routing => constants::routing(),
            Self::Experts { stages } => format!("#define EXPERT_STAGES {stages}\n"),
            Self::WideExperts { stages } => {
                format!("#define EXPERT_STAGES {stages}\n#define WIDE_STAGES {WIDE_STAGES}\n")
            }
            Self::LowRank { ranks, stages } => format!("#define RANKS {ranks}\n#define STAGES {stages}\n"),
            Self::GatedLowRank { activation, pieces, stages } => {
                let (name, ranks) = (type_of(activation), GATED_TILE);
                format!(
                    "#define ACTIVATION {name}\n#define RANKS {ranks}\n#define STAGES {stages}\n#define GATED_PIECES {pieces}\n"
                )
            }
            Self::LowRankRows(Some(activation)) | Self::Gated(activation) => {
                format!("#define ACTIVATION {}\n", type_of(activation))
            }
            Self::GatedFp8(activation) => format!("#define ACTIVATION {}\n{}", type_of(activation), fp8_recipe()),
            Self::Fp8 | Self::NormFp8 => fp8_recipe(),
            Self::Draw
            | Self::Embedding
            | Self::Heads
            | Self::LowRankRows(None)
            | Self::Magnitude
            | Self::Norm
            | Self::Quantize
            | Self::Sinks
            | Self::StoreRows
            | Self::WideAttention
            | Self::WriteOut => String::new(),
        };
        let files = self.files();
        let text: String = files.iter().map(|&(_, text)| text).collect();
        let &(path, _) = files.last().expect("every source has a file");
        let name = path.rsplit('/').next().unwrap_or(path);
        let source = format!("#define {format} 1\n{variant}{PRELUDE}\n{text}");
        Program { name: name.to_owned(), source, options: Vec::new() }
    }
}

/// Returns why cards of a compute capability have no kernels for activations of a format; `None` if they have.
pub(super) fn format_refusal(dtype: DType, capability: (u32, u32)) -> Option<String> {
    (dtype == DType::BF16 && capability < (8, 0)).then(|| {
        format!(
            "bfloat16 needs compute capability 8.0, and this card has {}.{}: compute in float16, with which the loss is scaled, or \
             in float32",
            capability.0, capability.1
        )
    })
}

/// A thread that compiles; `None` if it failed.
type Compiling = JoinHandle<Option<Image>>;

pub(crate) struct Programs {
    context: Context,
    compiler: Compiler,
    compute_capability: (u32, u32),
    modules: RefCell<FxHashMap<(Source, DType), Module>>,
    /// Programs that other threads are compiling.
    compiling: RefCell<FxHashMap<(Source, DType), Compiling>>,
    kernels: RefCell<FxHashMap<(Source, DType, &'static str), Kernel>>,
}

impl Programs {
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        let device = context.driver().device(context.ordinal())?;
        Ok(Self {
            context: context.clone(),
            compiler: Compiler::load()?,
            compute_capability: device.compute_capability,
            modules: RefCell::default(),
            compiling: RefCell::default(),
            kernels: RefCell::default(),
        })
    }

    /// Returns whether programs may use Hopper's own products: they are compiled for that card itself, not as PTX for later ones.
    pub(crate) fn has_wgmma(&self) -> bool {
        self.compute_capability == (9, 0) && !self.compiler.is_imitation()
    }

    /// Starts to compile, on all cores, the programs of a run in this format and with this head width; `flash` are those of its
    /// attention with their format, and `in_half` those of 16-bit formats alone. A launch waits only for its own source, so that other work,
    /// such as cuDNN's own compilation, continues meanwhile. The launch that needs a source reports its errors.
    pub(crate) fn prepare(&self, dtype: DType, head_dim: usize, flash: Vec<(Source, DType)>, in_half: Vec<Source>) {
        if format_refusal(dtype, self.compute_capability).is_some() {
            return;
        }
        let mut programs = vec![
            (Source::Columns, dtype),
            (Source::CrossEntropy(None), dtype),
            (Source::Elementwise, dtype),
            (Source::Embedding, dtype),
            (Source::Heads, dtype),
            (Source::Magnitude, dtype),
            (Source::Magnitude, DType::F32),
            (Source::Norm, dtype),
            (Source::PackedIndex, DType::F32),
            (Source::Pairs, DType::F32),
            (Source::Quantize, DType::F32),
            (Source::Routing, dtype),
            (Source::Routing, DType::F32),
            (Source::StoreRows, dtype),
            (Source::WriteOut, dtype),
        ];
        let plain =
            [Source::Columns, Source::CrossEntropy(None), Source::Elementwise, Source::WriteOut, Source::Optimizer];
        programs.extend(plain.map(|source| (source, DType::F32)));
        programs.extend(Activation::NAMED.map(|activation| (Source::Gated(activation), dtype)));
        if dtype != DType::F32 {
            programs.extend(in_half.into_iter().map(|source| (source, dtype)));
        }
        programs.push((Source::CachedAttention(FlashVariant { head_dim, soft_cap: None }), dtype));
        programs.extend(flash);
        // A program that is listed twice is started once.
        for program in programs {
            if !self.modules.borrow().contains_key(&program) {
                self.compiling.borrow_mut().entry(program).or_insert_with(|| self.start(program));
            }
        }
    }

    /// Compiles on a new thread, which returns the image; the engine's thread loads it as a module.
    fn start(&self, (source, dtype): (Source, DType)) -> Compiling {
        let (compiler, capability) = (self.compiler.clone(), self.compute_capability);
        std::thread::spawn(move || compiler.compile(&source.program(dtype), capability).ok())
    }

    /// Waits for programs that [`Programs::prepare`] started and no launch has needed yet.
    pub(crate) fn finish(&self) {
        let compiling: Vec<_> = self.compiling.borrow_mut().drain().collect();
        for (program, image) in compiling {
            if let Some(module) = compiled(image).and_then(|image| Module::load(&self.context, &image).ok()) {
                self.modules.borrow_mut().insert(program, module);
            }
        }
    }

    /// Returns the kernel of this name. A format that the card does not have is a failure before anything is compiled.
    pub(crate) fn kernel(&self, source: Source, dtype: DType, name: &'static str) -> Kernel {
        if let Some(kernel) = self.kernels.borrow().get(&(source, dtype, name)) {
            return kernel.clone();
        }
        let operation = "compiling a kernel";
        if let Some(message) = format_refusal(dtype, self.compute_capability) {
            DeviceFailure { operation, out_of_memory: false, message }.raise();
        }
        let kernel = check(operation, self.load(source, dtype, name));
        self.kernels.borrow_mut().insert((source, dtype, name), kernel.clone());
        kernel
    }

    fn load(&self, source: Source, dtype: DType, name: &'static str) -> Result<Kernel, CudaError> {
        let mut modules = self.modules.borrow_mut();
        let module = match modules.entry((source, dtype)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let prepared = self.compiling.borrow_mut().remove(&(source, dtype)).and_then(compiled);
                let image = match prepared {
                    Some(image) => image,
                    None => self.compiler.compile(&source.program(dtype), self.compute_capability)?,
                };
                entry.insert(Module::load(&self.context, &image)?)
            }
        };
        module.kernel(name)
    }
}

fn compiled(thread: Compiling) -> Option<Image> {
    thread.join().ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_without_bfloat16_refuses_it_and_names_the_formats_that_it_has() {
        let message = format_refusal(DType::BF16, (7, 5)).expect("a T4 has none");
        assert!(["8.0", "7.5", "float16", "float32"].iter().all(|part| message.contains(part)), "{message}");
        for (dtype, capability) in
            [(DType::F16, (7, 5)), (DType::F32, (7, 5)), (DType::BF16, (8, 0)), (DType::BF16, (9, 0))]
        {
            assert_eq!(format_refusal(dtype, capability), None, "{dtype:?} {capability:?}");
        }
    }
}
