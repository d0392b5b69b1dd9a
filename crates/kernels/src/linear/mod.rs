//! Linear layers in groups: the prologue before the GEMM, one GEMM over all modules that share an input, and the
//! epilogue after it, as one operation with one backward.
//!
//! A transformer layer is four calls of [`LinearOps::project`] and one of attention. A backend fuses the combinations it has kernels for and composes
//! the rest; the reference bodies compose everything. [`ProjectSaved`] contains all that the backward needs of the forward.
//! Trade-off: a new kind of prologue or epilogue is a variant here and an arm in each backend that overrides `project`.
//!
//! Suffixes: `n` tokens (all packed sequences of the micro-batch, flattened), `d` hidden size, `i`/`o` input and output features,
//! `f` MLP width, `r` LoRA rank, `h`/`g` query and key/value heads, `k` head width.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub(crate) mod dropout;
mod expert_rows;
mod fp8_reference;
pub mod magnitude;
pub mod product;
pub mod reference;
pub mod stacked;

use std::ops::Range;

use burn_tensor::{DType, Tensor, backend::Backend};
use firebrick_arch::Activation;

pub use self::dropout::{Dropout, Mask, RowChoices};
pub use self::expert_rows::ExpertRows;
pub use self::magnitude::Magnitude;
pub use self::product::{GradientOperands, Product, Side};
pub use crate::gemm_format::GemmFormat;
use crate::norm::{NormOps, NormWeight};
use crate::session::Session;
use crate::weights::{Weight, WeightOps};

/// Linear modules that share an input, with their outputs side by side. Those of experts are stacks: every tensor of a module has the rows of all
/// experts below each other (weight `[e * o, i]`, bias `[e * o]`, A `[e * r, i]`, B `[e * o, r]`), while columns and parts are those of one.
#[derive(Clone, Debug)]
pub struct Group<B: Backend> {
    /// The modules, in column order; together they cover all columns once.
    pub modules: Vec<Module<B>>,
    /// Widths of the output tensors, in column order: `[q, k, v]`, `[gate, up]`, or one.
    pub parts: Vec<usize>,
    /// Operand format of the weight GEMMs.
    pub gemms: GemmFormat,
    /// Dropout on the adapters' input; the weights read the input without dropout. A group of stacks has one mask over all its rows.
    pub dropout: Option<Mask<B>>,
    /// Which rows of the input each expert computes, if the modules are stacks; the input is sorted by expert.
    pub rows: Option<ExpertRows<B>>,
}

impl<B: Backend> Group<B> {
    /// Returns whether a module has magnitudes (DoRA).
    pub fn has_magnitudes(&self) -> bool {
        self.modules.iter().any(|module| module.magnitude().is_some())
    }

    /// Returns the total width of the outputs.
    pub fn out_features(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Returns the width of the shared input.
    ///
    /// # Panics
    /// If the group has no module.
    pub fn in_features(&self) -> usize {
        self.modules.first().expect("a group has at least one module").weight.shape()[1]
    }
}

/// One linear module: `y = x Wᵀ + bias + scale (x̃ Aᵀ) Bᵀ`, where x̃ is the input after the group's dropout.
/// [`magnitude`] describes how magnitudes change it.
#[derive(Clone, Debug)]
pub struct Module<B: Backend> {
    /// The columns of the group's output that this module computes.
    pub columns: Range<usize>,
    /// The weight `[o, i]`.
    pub weight: Weight<B>,
    /// Whether the weight's gradient is needed, and where it goes.
    pub weight_gradient: WeightGradient<B>,
    /// The bias.
    pub bias: Option<Bias<B>>,
    /// The LoRA pair, whose gradients are always computed.
    pub adapter: Option<Adapter<B>>,
}

impl<B: Backend> Module<B> {
    /// Returns the magnitudes of its outputs, if its adapter has any (DoRA).
    pub fn magnitude(&self) -> Option<&Magnitude<B>> {
        self.adapter.as_ref()?.magnitude.as_ref()
    }
}

/// Treatment of a weight's gradient in the backward.
#[derive(Clone, Debug)]
pub enum WeightGradient<B: Backend> {
    /// The weight is frozen.
    Frozen,
    /// The gradient is returned in a new tensor.
    New,
    /// The gradient is added to this sum `[o, i]` of earlier contributions, f32 or bf16, in place where the backend can. In bf16 each sum is rounded to
    /// the nearest.
    AddTo(Tensor<B, 2>),
}

impl<B: Backend> WeightGradient<B> {
    /// Returns whether a gradient is computed.
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

/// The operation on the input before the GEMM.
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
        /// The weight of the norm.
        norm: NormWeight<B>,
    },
    /// `activation(gate) * up`.
    Gated {
        /// `[n, i]`.
        gate: Tensor<B, 2>,
        /// `[n, i]`.
        up: Tensor<B, 2>,
        /// The activation of the gate.
        activation: Activation,
    },
}

impl<B: Backend> Prologue<B> {
    /// Returns the input, or the first of two.
    pub fn first_input(&self) -> &Tensor<B, 2> {
        let (Self::None { x } | Self::Norm { x, .. } | Self::Gated { gate: x, .. }) = self;
        x
    }
}

/// The operation on the GEMM's output.
#[derive(Clone, Debug)]
pub enum Epilogue<B: Backend> {
    /// Nothing.
    None,
    /// Adds this `[n, o]`. Its gradient in the backward equals the gradient of the output.
    Residual(Tensor<B, 2>),
    /// RMSNorm over the whole output, then adds the residual. Requires a group with one part.
    NormResidual {
        /// The norm, with a weight `[o]`.
        norm: NormWeight<B>,
        /// `[n, o]`; its gradient in the backward equals the gradient of the output.
        residual: Tensor<B, 2>,
    },
    /// Normalizes and rotates heads.
    Heads(HeadsEpilogue<B>),
}

/// Norms and rotation of the parts of a group, each of whole heads.
#[derive(Clone, Debug)]
pub struct HeadsEpilogue<B: Backend> {
    /// Width of a head.
    pub head_dim: usize,
    /// What is done to each part of the group, in their order.
    pub parts: Vec<HeadPart<B>>,
    /// Whether the last of these, the gates, are in the first part of the group, each head's after its query.
    pub gates_in_queries: bool,
    /// Angles of each token; `None`: no rotation.
    pub rotary: Option<RotaryTables<B>>,
}

/// What is done to a part of a group.
#[derive(Clone, Debug)]
pub struct HeadPart<B: Backend> {
    /// What its heads are.
    pub role: HeadRole,
    /// RMSNorm before the rotation. The length of its weight determines its extent: `[k]` norms each head, `[h * k]` or `[g * k]` norms all heads of
    /// a token together.
    pub norm: Option<NormWeight<B>>,
}

/// What heads are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRole {
    /// Queries: rotated, and multiplied by the factor of their token if the tables have any.
    Query,
    /// Keys: rotated.
    Key,
    /// Values.
    Value,
    /// Gates, as they are.
    Gate,
}

impl<B: Backend> HeadsEpilogue<B> {
    /// Builds the epilogue of queries, keys and values, with norms of queries and keys.
    pub fn of_qkv(head_dim: usize, norms: Option<[NormWeight<B>; 2]>, rotary: Option<RotaryTables<B>>) -> Self {
        let [q, k] = norms.map_or([None, None], |norms| norms.map(Some));
        let parts = [(HeadRole::Query, q), (HeadRole::Key, k), (HeadRole::Value, None)];
        let parts = parts.map(|(role, norm)| HeadPart { role, norm }).into();
        Self { head_dim, parts, gates_in_queries: false, rotary }
    }
}

/// Cosine and sine of each token's angles, `[n, rotated / 2]` f32 each. The first `rotated` columns of each head are
/// rotated; the others pass through.
#[derive(Clone, Debug)]
pub struct RotaryTables<B: Backend> {
    /// Cosines, times the attention factor of a scaled RoPE.
    pub cos: Tensor<B, 2>,
    /// Sines, times the attention factor.
    pub sin: Tensor<B, 2>,
    /// Whether the pairs are neighboring columns; otherwise a pair is a column of each half of the rotated columns.
    pub interleaved: bool,
    /// Factor of each token's rotated queries, `[n]` f32, which [`Epilogue::Heads`] applies; `None`: 1. Requires that whole heads are rotated.
    pub query_scale: Option<Tensor<B, 1>>,
}

impl<B: Backend> RotaryTables<B> {
    /// Builds the tables of most models: pairs across the halves of the rotated columns, queries rotated like keys.
    pub fn new(cos: Tensor<B, 2>, sin: Tensor<B, 2>) -> Self {
        Self { cos, sin, interleaved: false, query_scale: None }
    }
}

/// The part of its forward that a projection saves for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing, because there is no backward or the forward runs again before it.
    Nothing,
    /// [`ProjectSaved::low_rank`] alone: the forward does not run again, but the caller drops its inputs and recomputes them for the backward.
    LowRank,
    /// The prologue's inputs; its result is recomputed.
    Inputs,
    /// The prologue's inputs and result.
    Everything,
}

/// Values that [`LinearOps::project_backward`] needs of the forward. [`LinearOps::project`] returns them in a box: a
/// dozen tensors make the struct kilobytes large, and it is moved up through the layer.
#[derive(Clone, Debug)]
pub struct ProjectSaved<B: Backend> {
    /// The prologue with its inputs.
    pub prologue: Prologue<B>,
    /// The prologue's result `[n, i]`, under [`Keep::Everything`].
    pub prologue_output: Option<Tensor<B, 2>>,
    /// `x Aᵀ` of all adapters `[n, ranks]`, where the backend saves it; otherwise it is recomputed.
    pub low_rank: Option<Tensor<B, 2>>,
    /// The GEMM's output before magnitudes `[n, o]`, if the group has any and the backend saves it; otherwise it is recomputed.
    pub unscaled: Option<Tensor<B, 2>>,
    /// The heads epilogue, if there was one.
    pub heads: Option<SavedHeads<B>>,
    /// The norm after the GEMM, if there was one.
    pub output_norm: Option<SavedOutputNorm<B>>,
}

impl<B: Backend> ProjectSaved<B> {
    /// Builds the saved values of a group that does not run again from its recomputed inputs and its [`Keep::LowRank`];
    /// the backward recomputes the rest. Only valid for epilogues whose backward needs nothing.
    #[must_use]
    pub fn of_inputs(prologue: Prologue<B>, low_rank: Option<Tensor<B, 2>>) -> Box<Self> {
        Box::new(Self { prologue, prologue_output: None, low_rank, unscaled: None, heads: None, output_norm: None })
    }
}

/// Values that the backward of a norm after the GEMM needs.
#[derive(Clone, Debug)]
pub struct SavedOutputNorm<B: Backend> {
    /// The norm itself.
    pub norm: NormWeight<B>,
    /// The GEMM's output before its norm, `[n, o]`.
    pub raw: Tensor<B, 2>,
}

/// Values that the backward of a heads epilogue needs.
#[derive(Clone, Debug)]
pub struct SavedHeads<B: Backend> {
    /// The epilogue itself.
    pub epilogue: HeadsEpilogue<B>,
    /// Each part before its norm, `[n, part]`, if it is normalized.
    pub raw: Vec<Option<Tensor<B, 2>>>,
}

/// Result of [`LinearOps::project_backward`]. Gradients of parameters are f32.
#[derive(Clone, Debug)]
pub struct ProjectGradients<B: Backend> {
    /// Gradient of the prologue's input.
    pub input: InputGradient<B>,
    /// Gradient of the prologue's norm weight, if it trains.
    pub norm: Option<Tensor<B, 1>>,
    /// Gradient of the weight of the norm after the GEMM, if it trains.
    pub output_norm: Option<Tensor<B, 1>>,
    /// Gradients of the norm weights of a heads epilogue, by part, of those that train.
    pub head_norms: Vec<Option<Tensor<B, 1>>>,
    /// Gradients of the modules, in the group's order.
    pub modules: Vec<ModuleGradients<B>>,
}

/// Gradient of a prologue's input.
#[derive(Clone, Debug)]
pub enum InputGradient<B: Backend> {
    /// Gradient of `x`, `[n, i]`.
    Plain(Tensor<B, 2>),
    /// Gradients of gate and up, `[n, i]` each.
    Gated {
        /// Gradient of the gate.
        d_gate: Tensor<B, 2>,
        /// Gradient of the up projection's output.
        d_up: Tensor<B, 2>,
    },
}

impl<B: Backend> InputGradient<B> {
    /// Returns the gradient of `x`.
    ///
    /// # Panics
    /// If the prologue was gated.
    pub fn plain(self) -> Tensor<B, 2> {
        match self {
            Self::Plain(dx) => dx,
            Self::Gated { .. } => panic!("a gated prologue has two gradients"),
        }
    }

    /// Returns the gradients of gate and up.
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

/// Gradients of one [`Module`], f32; a sum that was given stays in its format.
#[derive(Clone, Debug)]
pub struct ModuleGradients<B: Backend> {
    /// Gradient of the weight `[o, i]`; with [`WeightGradient::AddTo`] the new sum.
    pub weight: Option<Tensor<B, 2>>,
    /// Gradient of the bias `[o]`.
    pub bias: Option<Tensor<B, 1>>,
    /// Gradients of A `[r, i]` and B `[o, r]`.
    pub adapter: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
    /// Gradient of the magnitudes `[o]`.
    pub magnitude: Option<Tensor<B, 1>>,
}

/// Converts a group's tensors, one per part, into an array.
///
/// # Panics
/// If the group has a different number of parts, which is a bug in the caller or a backend.
#[track_caller]
pub fn into_parts<const N: usize, T>(parts: Vec<T>) -> [T; N] {
    let count = parts.len();
    let Ok(parts) = <[T; N]>::try_from(parts) else {
        panic!("expected a group of linear modules with {N} parts, got {count}");
    };
    parts
}

/// Returns the only tensor of a group with one part.
///
/// # Panics
/// If the group has a different number of parts, which is a bug in the caller or a backend.
#[track_caller]
pub fn into_single<T>(parts: Vec<T>) -> T {
    let [part] = into_parts(parts);
    part
}

/// The reference body of [`LinearOps::project`], for a group of one matrix per module or of stacks.
pub(crate) fn project<B: LinearOps>(
    prologue: Prologue<B>,
    group: &Group<B>,
    epilogue: Epilogue<B>,
    keep: Keep,
) -> (Vec<Tensor<B, 2>>, Option<Box<ProjectSaved<B>>>) {
    match group.rows {
        None => reference::project(prologue, group, epilogue, keep),
        Some(_) => stacked::project(prologue, group, epilogue, keep),
    }
}

/// The reference body of [`LinearOps::project_backward`].
pub(crate) fn project_backward<B: LinearOps>(
    saved: ProjectSaved<B>,
    group: Group<B>,
    d_outputs: Vec<Tensor<B, 2>>,
    d_residual_ni: Option<Tensor<B, 2>>,
) -> ProjectGradients<B> {
    match group.rows {
        None => reference::project_backward(saved, group, d_outputs, d_residual_ni),
        Some(_) => stacked::project_backward(saved, group, d_outputs, d_residual_ni),
    }
}

/// Linear layers with their prologues and epilogues.
pub trait LinearOps: NormOps + Session + WeightOps {
    /// Runs prologue, GEMM of the whole group and epilogue; returns one `[n, part]` per part of the group, in the
    /// compute dtype (the dtype of the input). Under [`Keep::Nothing`] the saved value is `None`. A group of stacks has no epilogue and no norm.
    fn project(
        prologue: Prologue<Self>,
        group: &Group<Self>,
        epilogue: Epilogue<Self>,
        keep: Keep,
    ) -> (Vec<Tensor<Self, 2>>, Option<Box<ProjectSaved<Self>>>) {
        Self::pause(&prologue.first_input().device(), || project(prologue, group, epilogue, keep))
    }

    /// Backward of [`LinearOps::project`] from the gradients of its outputs. `d_residual` is added to the gradient of `x`: it is the
    /// gradient on the residual path, which bypasses the norm, or the whole group if there is no prologue.
    fn project_backward(
        saved: ProjectSaved<Self>,
        group: Group<Self>,
        d_outputs: Vec<Tensor<Self, 2>>,
        d_residual_ni: Option<Tensor<Self, 2>>,
    ) -> ProjectGradients<Self> {
        Self::pause(&saved.prologue.first_input().device(), || project_backward(saved, group, d_outputs, d_residual_ni))
    }

    /// Backward of a gated MLP from the gradient of its output: [`LinearOps::project_backward`] of `down`, whose
    /// prologue is gated, then of `gate_up`, which computed that prologue's inputs. A backend may fuse parts of the
    /// second call with the first. `after_down` receives the gradients of `down`'s modules and of the norm after it
    /// before the second call starts. `d_residual` is that of the second call, whose gradients are returned.
    fn mlp_backward(
        [gate_up, down]: [(ProjectSaved<Self>, Group<Self>); 2],
        dy_no: Tensor<Self, 2>,
        d_residual_ni: Option<Tensor<Self, 2>>,
        after_down: impl FnOnce(Vec<ModuleGradients<Self>>, Option<Tensor<Self, 1>>),
    ) -> ProjectGradients<Self> {
        reference::mlp_backward([gate_up, down], dy_no, d_residual_ni, after_down)
    }

    /// Multiplies a group's input or the gradients of its outputs with its weights and adapters, all modules at once. The reference bodies of
    /// [`LinearOps::project`] and its backward compose this operation and the next two, so a backend may override these alone.
    fn product(product: Product<'_, Self>) -> Vec<Tensor<Self, 2>> {
        let first = product.factors.first().or(product.low_rank.as_ref()).expect("a product has operands");
        Self::pause(&first.device(), || product::product(product))
    }

    /// Computes the low-rank operand of [`LinearOps::product`], `[n, ranks]` with the columns of all adapters: `x Aᵀ` of the input, or `s dy B` of
    /// one gradient per module. `None` if the group has no adapter.
    fn low_rank(factors: &[Tensor<Self, 2>], group: &Group<Self>, side: Side) -> Option<Tensor<Self, 2>> {
        let device = factors.first()?.device();
        Self::pause(&device, || product::low_rank(factors, group, side))
    }

    /// Computes the gradients of a group's parameters but for magnitudes, f32.
    fn parameter_gradients(operands: GradientOperands<Self>, group: Group<Self>) -> Vec<ModuleGradients<Self>> {
        Self::pause(&operands.x.device(), || product::parameter_gradients(operands, group))
    }

    /// Computes the squared norm of each row of a weight, `[o]` f32. A backend may first round the weight to `dtype`, the compute dtype.
    fn row_squares(weight: &Weight<Self>, dtype: DType) -> Tensor<Self, 1> {
        let _ = dtype;
        Self::pause(&weight.device(), || magnitude::row_squares(weight))
    }

    /// Computes the norm of each row of `W + s B A`, `[o]` f32; DoRA's forward and backward treat them as constants. `row_squares_o` is the result of
    /// [`LinearOps::row_squares`], for backends that compute `|W + s B A|² = |W|² + 2 s <W Aᵀ, B> + s² <B A Aᵀ, B>` row by row.
    fn adapted_norms(
        weight: &Weight<Self>,
        row_squares_o: &Tensor<Self, 1>,
        adapter: &Adapter<Self>,
        dtype: DType,
    ) -> Tensor<Self, 1> {
        let _ = (row_squares_o, dtype);
        Self::pause(&adapter.b.device(), || magnitude::adapted_norms(weight, adapter))
    }

    /// Returns `x` with dropped values set to zero and the others scaled, rounded once. The same function is its backward.
    fn dropped(x: Tensor<Self, 2>, mask: &Mask<Self>) -> Tensor<Self, 2> {
        Self::pause(&x.device(), || reference::dropped(x, mask))
    }

    /// Computes `x * factor` `[n, d]`, rounded once. The same function is its backward.
    fn scaled(x: Tensor<Self, 2>, factor: f32) -> Tensor<Self, 2> {
        Self::pause(&x.device(), || reference::scaled(x, factor))
    }

    /// Computes `activation(gate) * up`, `[n, f]`.
    fn gated(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        Self::pause(&gate_nf.device(), || reference::gated(gate_nf, up_nf, activation))
    }

    /// Backward of [`LinearOps::gated`]: gradients of gate and up.
    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        Self::pause(&dy_nf.device(), || reference::gated_backward(gate_nf, up_nf, activation, dy_nf))
    }

    /// Applies rotary position embedding (Su et al., RoFormer, 2021) to `[n, heads * head_dim]`, in the rotate-half form of most Hugging Face
    /// checkpoints or of neighboring columns, to as many columns of each head as the tables have angles for. Its backward is the inverse rotation.
    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize, backward: bool) -> Tensor<Self, 2> {
        Self::pause(&x.device(), || reference::rotary(x, tables, head_dim, backward))
    }
}
