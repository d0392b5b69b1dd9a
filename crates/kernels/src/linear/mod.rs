//! Linear layers in groups: what happens before the GEMM (prologue), the GEMM of all modules that share an input, and what
//! happens to its output (epilogue), as one operation with one backward.
//!
//! A transformer layer is four calls of [`LinearOps::project`] and one of attention. A backend fuses what it knows and composes the
//! rest; the reference bodies compose everything. What the backward needs of the forward is in [`ProjectSaved`], and nothing else.
//! Trade-off: a new kind of prologue or epilogue is a variant here and an arm in each backend that overrides `project`.
//!
//! Suffixes: `n` tokens (all packed sequences of the micro-batch, flattened), `d` hidden size, `i`/`o` input and output features,
//! `f` MLP width, `r` LoRA rank, `h`/`g` query and key/value heads, `k` head width.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
mod dropout;
mod fp8_reference;
pub mod magnitude;
pub mod reference;

use std::ops::Range;

use burn_tensor::{DType, Tensor, backend::Backend};
use firebrick_arch::Activation;
use serde::{Deserialize, Serialize};

pub use self::dropout::Dropout;
pub use self::magnitude::Magnitude;
use crate::norm::{NormOps, NormWeight};
use crate::weights::{Weight, WeightOps};

/// The linear modules that share an input, side by side in one output.
#[derive(Clone, Debug)]
pub struct Group<B: Backend> {
    /// The modules, in column order; together they cover all columns once.
    pub modules: Vec<Module<B>>,
    /// Widths of the outputs that the consumer reads, side by side: `[q, k, v]`, `[gate, up]`, or one.
    pub parts: Vec<usize>,
    /// What the GEMMs of the weights multiply.
    pub gemms: GemmFormat,
    /// Dropout of what the adapters read; the weights read everything.
    pub dropout: Option<Dropout>,
}

/// What the GEMMs of a group's weights multiply, forward and for the gradient of the input. Sums are f32, and results have the compute
/// format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmFormat {
    /// Both operands in the compute format.
    #[default]
    Compute,
    /// Both operands in E4M3, each row of weights, activations and gradients with a scale of its own.
    Fp8,
}

impl<B: Backend> Group<B> {
    /// Width of all outputs together.
    pub fn out_features(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Width of the shared input.
    ///
    /// # Panics
    /// If the group has no module.
    pub fn in_features(&self) -> usize {
        self.modules.first().expect("a group has at least one module").weight.shape()[1]
    }
}

/// One linear module: `y = x Wᵀ + bias + scale (x̃ Aᵀ) Bᵀ`, where x̃ is the input after the group's dropout; with magnitudes as
/// [`magnitude`] says.
#[derive(Clone, Debug)]
pub struct Module<B: Backend> {
    /// Columns of the group's output that it computes.
    pub columns: Range<usize>,
    /// The weight `[o, i]`.
    pub weight: Weight<B>,
    /// Whether the weight's gradient is needed, and where it goes.
    pub weight_gradient: WeightGradient<B>,
    /// The bias.
    pub bias: Option<Bias<B>>,
    /// The LoRA pair; its gradients are always needed.
    pub adapter: Option<Adapter<B>>,
}

/// What the backward does about the gradient of a weight.
#[derive(Clone, Debug)]
pub enum WeightGradient<B: Backend> {
    /// The weight is frozen.
    Frozen,
    /// A new tensor.
    New,
    /// Added to this f32 sum `[o, i]` of earlier contributions, in place where the backend can.
    AddTo(Tensor<B, 2>),
}

impl<B: Backend> WeightGradient<B> {
    /// Whether a gradient is needed at all.
    pub fn is_needed(&self) -> bool {
        !matches!(self, Self::Frozen)
    }
}

/// The bias of a module.
#[derive(Clone, Debug)]
pub struct Bias<B: Backend> {
    /// `[o]`, f32 where it trains, else f32 or the compute dtype.
    pub value: Tensor<B, 1>,
    /// Whether its gradient is needed.
    pub trains: bool,
}

/// The low-rank pair of a module (Hu et al., LoRA, 2021).
#[derive(Clone, Debug)]
pub struct Adapter<B: Backend> {
    /// `[r, i]` f32.
    pub a: Tensor<B, 2>,
    /// `[o, r]` f32.
    pub b: Tensor<B, 2>,
    /// `alpha / r`, or `alpha / sqrt(r)` for rank-stabilized LoRA.
    pub scale: f64,
    /// The magnitudes of the module's outputs (DoRA).
    pub magnitude: Option<Magnitude<B>>,
}

/// What happens to the input before the GEMM.
#[derive(Clone, Debug)]
pub enum Prologue<B: Backend> {
    /// Nothing.
    None {
        /// `[n, i]`.
        x: Tensor<B, 2>,
    },
    /// RMSNorm.
    Norm {
        /// `[n, i]`.
        x: Tensor<B, 2>,
        /// Its weight.
        norm: NormWeight<B>,
    },
    /// `activation(gate) * up`.
    Gated {
        /// `[n, i]`.
        gate: Tensor<B, 2>,
        /// `[n, i]`.
        up: Tensor<B, 2>,
        /// Of the gate.
        activation: Activation,
    },
}

/// What happens to the output of the GEMM.
#[derive(Clone, Debug)]
pub enum Epilogue<B: Backend> {
    /// Nothing.
    None,
    /// This `[n, o]` is added. The backward's gradient of it is the gradient of the output.
    Residual(Tensor<B, 2>),
    /// RMSNorm over the whole output, and then the residual is added. Needs a group of one part.
    NormResidual {
        /// The norm, weight `[o]`.
        norm: NormWeight<B>,
        /// `[n, o]`; the backward's gradient of it is the gradient of the output.
        residual: Tensor<B, 2>,
    },
    /// Queries and keys are normalized and rotated.
    Heads(HeadsEpilogue<B>),
}

/// What happens to queries and keys. Needs a group of three parts.
#[derive(Clone, Debug)]
pub struct HeadsEpilogue<B: Backend> {
    /// Width of a head.
    pub head_dim: usize,
    /// Norms of queries and keys, applied before the rotation.
    pub qk_norm: Option<QkNorms<B>>,
    /// Angles of each token; `None`: no rotation.
    pub rotary: Option<RotaryTables<B>>,
}

/// RMSNorms of queries and keys. The width of a weight says over what: `[k]` over each head, `[h * k]` and `[g * k]` over all heads of
/// a token together.
#[derive(Clone, Debug)]
pub struct QkNorms<B: Backend> {
    /// Of queries.
    pub q: NormWeight<B>,
    /// Of keys.
    pub k: NormWeight<B>,
}

/// Cosine and sine of each token's angles, `[n, rotated / 2]` f32 each: the first `rotated` columns of each head are rotated, the others
/// pass through.
#[derive(Clone, Debug)]
pub struct RotaryTables<B: Backend> {
    /// Cosines, times the attention factor of a scaled rope.
    pub cos: Tensor<B, 2>,
    /// Sines, times the attention factor.
    pub sin: Tensor<B, 2>,
}

/// How much of its forward a projection saves for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: there is no backward, or the forward runs again before it.
    Nothing,
    /// [`ProjectSaved::low_rank`], of a forward that does not run again but whose inputs are computed again: the caller lets go of the rest.
    LowRank,
    /// What came in; the prologue's result is computed again.
    Inputs,
    /// What came in and the prologue's result.
    Everything,
}

/// What [`LinearOps::project_backward`] needs of its forward. [`LinearOps::project`] returns it in a box: with a dozen tensors it is
/// kilobytes large, and is handed up through the layer.
#[derive(Clone, Debug)]
pub struct ProjectSaved<B: Backend> {
    /// The prologue with its inputs.
    pub prologue: Prologue<B>,
    /// The prologue's result `[n, i]`, under [`Keep::Everything`].
    pub prologue_output: Option<Tensor<B, 2>>,
    /// `x Aᵀ` of all adapters `[n, ranks]`, where the backend keeps it; computed again otherwise.
    pub low_rank: Option<Tensor<B, 2>>,
    /// The GEMMs' output before magnitudes `[n, o]`, where the group has any and the backend keeps it; computed again otherwise.
    pub unscaled: Option<Tensor<B, 2>>,
    /// The heads epilogue, if that was it.
    pub heads: Option<SavedHeads<B>>,
    /// The norm after the GEMM, if there was one.
    pub output_norm: Option<SavedOutputNorm<B>>,
}

impl<B: Backend> ProjectSaved<B> {
    /// Of a group that does not run again, from its inputs and what it kept under [`Keep::LowRank`]: its backward computes what else it needs.
    /// Only for epilogues whose backward needs nothing.
    #[must_use]
    pub fn of_inputs(prologue: Prologue<B>, low_rank: Option<Tensor<B, 2>>) -> Box<Self> {
        Box::new(Self { prologue, prologue_output: None, low_rank, unscaled: None, heads: None, output_norm: None })
    }
}

/// What the backward of a norm after the GEMM needs.
#[derive(Clone, Debug)]
pub struct SavedOutputNorm<B: Backend> {
    /// The norm itself.
    pub norm: NormWeight<B>,
    /// The GEMM's output before its norm, `[n, o]`.
    pub raw: Tensor<B, 2>,
}

/// What the backward of a heads epilogue needs.
#[derive(Clone, Debug)]
pub struct SavedHeads<B: Backend> {
    /// The epilogue itself.
    pub epilogue: HeadsEpilogue<B>,
    /// Queries and keys before their norm, `[n, h k]` and `[n, g k]`; only where they are normalized.
    pub raw: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
}

/// What [`LinearOps::project_backward`] returns. Gradients of parameters are f32.
#[derive(Clone, Debug)]
pub struct ProjectGradients<B: Backend> {
    /// Gradient of what came into the prologue.
    pub input: InputGradient<B>,
    /// Gradient of the prologue's norm weight, where it trains.
    pub norm: Option<Tensor<B, 1>>,
    /// Gradient of the weight of the norm after the GEMM, where it trains.
    pub output_norm: Option<Tensor<B, 1>>,
    /// Gradients of the q and k norm weights, where they train.
    pub qk_norm: [Option<Tensor<B, 1>>; 2],
    /// In the order of the group's modules.
    pub modules: Vec<ModuleGradients<B>>,
}

/// Gradient of a prologue's input.
#[derive(Clone, Debug)]
pub enum InputGradient<B: Backend> {
    /// Of `x`, `[n, i]`.
    Plain(Tensor<B, 2>),
    /// Of gate and up, `[n, i]` each.
    Gated {
        /// Of the gate.
        d_gate: Tensor<B, 2>,
        /// Of the up projection's output.
        d_up: Tensor<B, 2>,
    },
}

impl<B: Backend> InputGradient<B> {
    /// The gradient of `x`.
    ///
    /// # Panics
    /// If the prologue was gated.
    pub fn plain(self) -> Tensor<B, 2> {
        match self {
            Self::Plain(dx) => dx,
            Self::Gated { .. } => panic!("a gated prologue has two gradients"),
        }
    }

    /// The gradients of gate and up.
    ///
    /// # Panics
    /// If the prologue was not gated.
    pub fn gated(self) -> (Tensor<B, 2>, Tensor<B, 2>) {
        match self {
            Self::Gated { d_gate, d_up } => (d_gate, d_up),
            Self::Plain(_) => panic!("only a gated prologue has gradients of gate and up"),
        }
    }
}

/// Gradients of one [`Module`], f32.
#[derive(Clone, Debug)]
pub struct ModuleGradients<B: Backend> {
    /// Of the weight `[o, i]`; with [`WeightGradient::AddTo`] the new sum.
    pub weight: Option<Tensor<B, 2>>,
    /// Of the bias `[o]`.
    pub bias: Option<Tensor<B, 1>>,
    /// Of A `[r, i]` and B `[o, r]`.
    pub adapter: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
    /// Of the magnitudes `[o]`.
    pub magnitude: Option<Tensor<B, 1>>,
}

/// The tensors of a group, one per part, as an array.
///
/// # Panics
/// If the group has another number of parts, which is a bug of the caller or of a backend.
#[track_caller]
pub fn into_parts<const N: usize, T>(parts: Vec<T>) -> [T; N] {
    let count = parts.len();
    let Ok(parts) = <[T; N]>::try_from(parts) else {
        panic!("expected a group of linear modules with {N} parts, got {count}");
    };
    parts
}

/// The tensor of a group of one part.
///
/// # Panics
/// If the group has another number of parts, which is a bug of the caller or of a backend.
#[track_caller]
pub fn into_single<T>(parts: Vec<T>) -> T {
    let [part] = into_parts(parts);
    part
}

/// Linear layers with what surrounds them.
pub trait LinearOps: NormOps + WeightOps {
    /// Prologue, GEMM of the whole group, epilogue: one `[n, part]` per part of the group, in the compute dtype (the dtype of the
    /// input). `None` is saved under [`Keep::Nothing`].
    fn project(
        prologue: Prologue<Self>,
        group: &Group<Self>,
        epilogue: Epilogue<Self>,
        keep: Keep,
    ) -> (Vec<Tensor<Self, 2>>, Option<Box<ProjectSaved<Self>>>) {
        reference::project(prologue, group, epilogue, keep)
    }

    /// Backward of [`LinearOps::project`] from the gradients of its outputs. `d_residual` is added to the gradient of `x`: what flows
    /// past the norm, or past the whole group where there is no prologue, on the residual path.
    fn project_backward(
        saved: ProjectSaved<Self>,
        group: Group<Self>,
        d_outputs: Vec<Tensor<Self, 2>>,
        d_residual_ni: Option<Tensor<Self, 2>>,
    ) -> ProjectGradients<Self> {
        reference::project_backward(saved, group, d_outputs, d_residual_ni)
    }

    /// Backward of a gated MLP from the gradient of its output: [`LinearOps::project_backward`] of `down`, whose prologue is gated, and then of
    /// `gate_up`, which made what that read. A backend may do parts of the second together with the first. `after_down` takes the gradients
    /// of `down`'s modules and of the norm after it, before the second begins. `d_residual` is as for the second call, whose gradients are
    /// returned.
    fn mlp_backward(
        [gate_up, down]: [(ProjectSaved<Self>, Group<Self>); 2],
        dy_no: Tensor<Self, 2>,
        d_residual_ni: Option<Tensor<Self, 2>>,
        after_down: impl FnOnce(Vec<ModuleGradients<Self>>, Option<Tensor<Self, 1>>),
    ) -> ProjectGradients<Self> {
        reference::mlp_backward([gate_up, down], dy_no, d_residual_ni, after_down)
    }

    /// Squares of the norms of the rows of a weight, `[o]` f32. `dtype` is the compute dtype, to which a backend may round the weight first.
    fn row_squares(weight: &Weight<Self>, dtype: DType) -> Tensor<Self, 1> {
        let _ = dtype;
        magnitude::row_squares(weight)
    }

    /// Norms of the rows of `W + s B A`, `[o]` f32, as DoRA's forward and backward use them as constants. `row_squares_o` is
    /// [`LinearOps::row_squares`] of the weight: with it `|W + s B A|² = |W|² + 2 s <W Aᵀ, B> + s² <B A Aᵀ, B>` row by row, where a backend
    /// computes it that way.
    fn adapted_norms(
        weight: &Weight<Self>,
        row_squares_o: &Tensor<Self, 1>,
        adapter: &Adapter<Self>,
        dtype: DType,
    ) -> Tensor<Self, 1> {
        let _ = (row_squares_o, dtype);
        magnitude::adapted_norms(weight, adapter)
    }

    /// `x` with dropped values at zero and the others scaled, rounded once; it is its own backward.
    fn dropped(x: Tensor<Self, 2>, dropout: Dropout) -> Tensor<Self, 2> {
        reference::dropped(x, dropout)
    }

    /// `activation(gate) * up`, `[n, f]`.
    fn gated(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        reference::gated(gate_nf, up_nf, activation)
    }

    /// Backward of [`LinearOps::gated`]: gradients of gate and up.
    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        reference::gated_backward(gate_nf, up_nf, activation, dy_nf)
    }

    /// Rotary position embedding of `[n, heads * head_dim]` in the rotate-half form that Hugging Face checkpoints are stored for
    /// (Su et al., RoFormer, 2021), over as many columns of each head as the tables have angles for.
    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        reference::rotary(x, tables, head_dim)
    }

    /// Backward of [`LinearOps::rotary`]: the inverse rotation.
    fn rotary_backward(dy: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        reference::rotary_backward(dy, tables, head_dim)
    }
}
