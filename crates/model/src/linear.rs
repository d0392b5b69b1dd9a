//! Linear modules: a base weight, frozen or trained, with an optional bias and an optional LoRA pair; and groups of them that share
//! an input.
//!
//! A group is what `Kernels::project` multiplies at once. Its backward hands every parameter's gradient to the sink; where the sink
//! lends the running sum of a trained weight, the GEMM adds to it in place.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use firebrick_arch::{OutputOrder, PieceSpec};
use firebrick_kernels::linear::into_single;
use firebrick_kernels::memory::slices;
use firebrick_kernels::{
    Adapter, Bias, Dropout, Epilogue, ExpertRows, GemmFormat, GradientSink, Group, Keep, Kernels, Magnitude, Mask,
    Module, ModuleGradients, Parameter, ProjectGradients, ProjectSaved, Prologue, Weight, WeightGradient, evenly,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::norm::{Norm, add_gradient};

/// A weight matrix and whether it trains.
#[derive(Clone, Debug)]
pub enum Base<B: Kernels> {
    /// Read only; as it is stored.
    Frozen(Weight<B>),
    /// Full fine-tuning and pretraining.
    Trained(Parameter<B>),
}

impl<B: Kernels> Base<B> {
    /// Returns the weight as an operand: a handle, not a copy.
    pub fn weight(&self) -> Weight<B> {
        match self {
            Self::Frozen(weight) => weight.clone(),
            Self::Trained(parameter) => Weight::Dense(parameter.matrix()),
        }
    }

    /// Returns the parameter, if the base trains.
    pub fn trained(&self) -> Option<&Parameter<B>> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(parameter) => Some(parameter),
        }
    }

    pub(crate) fn trained_mut(&mut self) -> Option<&mut Parameter<B>> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(parameter) => Some(parameter),
        }
    }
}

/// The bias `[out]` of a module; of a stack `[e * out]`.
#[derive(Clone, Debug)]
pub struct ModuleBias<B: Kernels> {
    /// `..bias`.
    pub parameter: Parameter<B>,
    /// Whether training changes it.
    pub trains: bool,
}

/// A LoRA pair in training: A `[r, in]`, B `[out, r]`; of a stack those of all experts below each other, A `[e * r, in]`, B `[e * out, r]`.
#[derive(Clone, Debug)]
pub struct Lora<B: Kernels> {
    /// `..lora_A.weight`.
    pub a: Parameter<B>,
    /// `..lora_B.weight`.
    pub b: Parameter<B>,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f64,
    /// The start values of the pair, if the base lost them (PiSSA), one per matrix; else empty.
    pub(crate) starts: Vec<Arc<StartPair>>,
    /// DoRA's magnitudes.
    pub magnitude: Option<LoraMagnitude<B>>,
}

/// A LoRA pair on the host: A `[r, in]`, B `[out, r]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StartPair {
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

/// DoRA's magnitudes of a module's outputs, and the norms in their denominator.
#[derive(Clone, Debug)]
pub struct LoraMagnitude<B: Kernels> {
    /// `..lora_magnitude_vector`, `[out]`.
    pub parameter: Parameter<B>,
    /// The last result of [`Decoder::refresh_adapter`](crate::Decoder::refresh_adapter).
    pub norms: Option<AdaptedNorms<B>>,
}

/// Norms of the rows of an adapted weight.
#[derive(Clone, Debug)]
pub struct AdaptedNorms<B: Kernels> {
    /// Squares of the norms of the rows of the base weight, `[out]` f32: they never change.
    pub(crate) row_squares: Tensor<B, 1>,
    /// Norms of the rows of `W + s B A`, `[out]` f32.
    pub(crate) norm: Tensor<B, 1>,
}

impl<B: Kernels> LoraMagnitude<B> {
    fn operand(&self) -> Magnitude<B> {
        let norms = self.norms.as_ref().expect("norms are computed after every change of an adapter");
        Magnitude { value: self.parameter.value.clone(), norm: norms.norm.clone() }
    }
}

impl<B: Kernels> Lora<B> {
    /// Returns the pair without its magnitudes.
    fn pair(&self) -> Adapter<B> {
        Adapter { a: self.a.matrix(), b: self.b.matrix(), scale: self.scale, magnitude: None }
    }

    fn operand(&self) -> Adapter<B> {
        Adapter { magnitude: self.magnitude.as_ref().map(LoraMagnitude::operand), ..self.pair() }
    }
}

/// The matrices below each other in the weight of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Number of experts.
    pub experts: usize,
    /// The matrices on disk, in order.
    pub pieces: Vec<PieceSpec>,
    /// PEFT's adapter, if LoRA adapts the stack as one parameter.
    pub adapter: Option<ParameterAdapter>,
}

/// What PEFT's adapter of a parameter of all experts is on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterAdapter {
    /// Path of its tensors.
    pub path: String,
    /// Order of its outputs.
    pub order: OutputOrder,
}

/// A linear module: `y = x Wᵀ + bias`, plus the LoRA pair if there is one.
#[derive(Clone, Debug)]
pub struct Linear<B: Kernels> {
    /// Hugging Face module path, e.g. `model.layers.0.self_attn.q_proj`, or of a stack `model.layers.0.mlp.experts.gate_proj`.
    pub path: String,
    /// Columns of the group's output that it computes; of one expert.
    pub columns: Range<usize>,
    /// `[out, in]`; of a stack `[e * out, in]`.
    pub shape: [usize; 2],
    /// The matrices of all experts, if its weight is a stack.
    pub stack: Option<Arc<Stack>>,
    /// The weight. Where ranks divide weights, its tensors are placeholders on all ranks but one.
    pub base: Base<B>,
    /// `[out]`; `None` without one.
    pub bias: Option<ModuleBias<B>>,
    /// LoRA on this module; `None` without an adapter.
    pub lora: Option<Lora<B>>,
}

impl<B: Kernels> Linear<B> {
    /// Returns what the tensors of a stack's parameter are called on disk; `None` if the module is one matrix.
    pub(crate) fn stored_names(&self, parameter: &Parameter<B>) -> Option<Vec<String>> {
        let stack = self.stack.as_ref()?;
        let name = |piece: &PieceSpec| parameter.name.replacen(&self.path, &piece.path, 1);
        Some(stack.pieces.iter().map(name).collect())
    }

    /// Returns the paths by which LoRA's settings and files name the module: its own, or those of a stack's matrices.
    pub(crate) fn lora_paths(&self) -> Vec<&str> {
        match &self.stack {
            None => vec![&self.path],
            Some(stack) if stack.adapter.is_some() => vec![&self.path],
            Some(stack) => stack.pieces.iter().map(|piece| piece.path.as_str()).collect(),
        }
    }

    /// Computes the norms of the rows of the adapted weight as they are now; `None` if the module has no magnitudes.
    pub(crate) fn adapted_norms(&self, compute_dtype: DType) -> Option<AdaptedNorms<B>> {
        let lora = self.lora.as_ref()?;
        let known = lora.magnitude.as_ref()?.norms.as_ref().map(|norms| norms.row_squares.clone());
        let weight = self.base.weight();
        let row_squares = known.unwrap_or_else(|| B::row_squares(&weight, compute_dtype));
        let norm = match self.stack.as_deref() {
            None => B::adapted_norms(&weight, &row_squares, &lora.pair(), compute_dtype),
            // Those of all experts, one after the other.
            Some(Stack { experts, .. }) => {
                let ([all], pair) = (row_squares.dims(), lora.pair());
                let squares = slices(row_squares.clone(), &evenly(all, *experts));
                let [of_a, of_b] = [&pair.a, &pair.b].map(|x| slices(x.clone(), &evenly(x.dims()[0], *experts)));
                let pairs = of_a.into_iter().zip(of_b).map(|(a, b)| Adapter { a, b, ..pair.clone() });
                let each = weight.matrices(*experts).into_iter().zip(squares).zip(pairs);
                let norms = each.map(|((weight, squares), pair)| {
                    B::adapted_norms(&weight, &squares, &pair, compute_dtype).reshape([1, all / experts])
                });
                B::join_rows(norms.collect()).reshape([all])
            }
        };
        Some(AdaptedNorms { row_squares, norm })
    }

    fn module(&self, adapters: bool, weight_gradient: WeightGradient<B>) -> Module<B> {
        Module {
            columns: self.columns.clone(),
            weight: self.base.weight(),
            weight_gradient,
            bias: self.bias.as_ref().map(|bias| Bias { value: bias.parameter.value.clone(), trains: bias.trains }),
            adapter: self.lora.as_ref().filter(|_| adapters).map(Lora::operand),
        }
    }

    fn add_gradients(&self, gradients: ModuleGradients<B>, lent: bool, sink: &mut dyn GradientSink<B>) {
        if let (Some(parameter), Some(weight)) = (self.base.trained(), gradients.weight) {
            add_matrix(parameter, weight, lent, sink);
        }
        if let (Some(bias), Some(gradient)) = (&self.bias, gradients.bias) {
            sink.add(&bias.parameter, gradient);
        }
        if let (Some(lora), Some((a, b))) = (&self.lora, gradients.adapter) {
            sink.add(&lora.a, flat(a));
            sink.add(&lora.b, flat(b));
            if let (Some(magnitude), Some(gradient)) = (&lora.magnitude, gradients.magnitude) {
                sink.add(&magnitude.parameter, gradient);
            }
        }
    }
}

/// Decides how a weight's gradient is computed, and whether the sink lends its running sum for that.
pub(crate) fn weight_gradient<B: Kernels>(
    parameter: Option<&Parameter<B>>,
    sink: &mut dyn GradientSink<B>,
) -> (WeightGradient<B>, bool) {
    let Some(parameter) = parameter else { return (WeightGradient::Frozen, false) };
    match sink.lend(parameter) {
        Some(sum) => (WeightGradient::AddTo(sum.reshape([parameter.shape[0], parameter.shape[1]])), true),
        None => (WeightGradient::New, false),
    }
}

/// Hands a matrix gradient to the sink: as a new contribution, or as the lent sum that already includes it.
pub(crate) fn add_matrix<B: Kernels>(
    parameter: &Parameter<B>,
    gradient: Tensor<B, 2>,
    lent: bool,
    sink: &mut dyn GradientSink<B>,
) {
    let gradient = flat(gradient);
    if lent { sink.give_back(parameter, gradient) } else { sink.add(parameter, gradient) }
}

fn flat<B: Kernels>(matrix: Tensor<B, 2>) -> Tensor<B, 1> {
    let [rows, columns] = matrix.dims();
    matrix.reshape([rows * columns])
}

/// Computes `x Wᵀ` by the backend's own GEMM; the weight has this many rows.
pub(crate) fn times_transposed<B: Kernels>(x: Tensor<B, 2>, weight: Weight<B>, rows: usize) -> Tensor<B, 2> {
    let (columns, weight_gradient) = (0..rows, WeightGradient::Frozen);
    let modules = vec![Module { columns, weight, weight_gradient, bias: None, adapter: None }];
    let group = Group { modules, parts: vec![rows], gemms: GemmFormat::Compute, dropout: None, rows: None };
    into_single(B::project(Prologue::None { x }, &group, Epilogue::None, Keep::Nothing).0)
}

/// The dropout masks of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutMasks {
    /// Seed, the same in all micro-batches of a step.
    pub seed: u64,
    /// Rows of the step before those of this micro-batch.
    pub first_row: u64,
    /// Tokens of a row, padding included.
    pub row_len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdapterPass {
    pub(crate) are_on: bool,
    /// Their dropout masks; `None`: nothing is dropped.
    pub(crate) dropout: Option<DropoutMasks>,
}

impl AdapterPass {
    /// Outside of training.
    pub(crate) const PLAIN: Self = Self { are_on: true, dropout: None };
}

/// Linear modules that share an input.
#[derive(Clone, Debug)]
pub struct LinearGroup<B: Kernels> {
    /// The modules, in column order.
    pub modules: Vec<Linear<B>>,
    /// Widths of the outputs that the consumer reads.
    pub parts: Vec<usize>,
    /// Operand format of its GEMMs.
    pub gemms: GemmFormat,
    /// Probability with which a value that the adapters read is dropped in training.
    pub dropout: f64,
}

impl<B: Kernels> LinearGroup<B> {
    /// Derives the group's mask in a pass from the pass and the path of its first module. Rows sorted by expert have their tokens' places in the step.
    fn mask(&self, adapters: AdapterPass, rows: Option<&ExpertRows<B>>) -> Option<Mask<B>> {
        let DropoutMasks { seed, first_row, row_len } = adapters.dropout?;
        let key = xxh3_64_with_seed(self.modules.first()?.path.as_bytes(), seed);
        let dropout = Dropout::new(self.dropout, key)?.of_rows(first_row, row_len);
        Some(Mask { dropout, choices: rows.and_then(|rows| rows.choices.clone()) })
    }

    /// Builds the operand of the group for a forward, without gradients of its weights.
    pub(crate) fn frozen(&self, adapters: AdapterPass) -> Group<B> {
        let modules =
            self.modules.iter().map(|linear| linear.module(adapters.are_on, WeightGradient::Frozen)).collect();
        Group { modules, parts: self.parts.clone(), gemms: self.gemms, dropout: self.mask(adapters, None), rows: None }
    }

    /// Builds [`Self::frozen`] of a group of stacks over these rows.
    pub(crate) fn frozen_over(&self, rows: ExpertRows<B>, adapters: AdapterPass) -> Group<B> {
        Group { dropout: self.mask(adapters, Some(&rows)), rows: Some(rows), ..self.frozen(adapters) }
    }

    /// Runs the backward of a projection by [`LinearGroup::frozen`]; gradients of the modules go to the sink.
    pub(crate) fn backward(
        &self,
        saved: ProjectSaved<B>,
        d_outputs: Vec<Tensor<B, 2>>,
        d_residual: Option<Tensor<B, 2>>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> ProjectGradients<B> {
        let (group, lent) = self.training(None, adapters, sink);
        let gradients = B::project_backward(saved, group, d_outputs, d_residual);
        self.take_gradients(gradients, lent, sink)
    }

    /// Builds the operand of the group for a backward, with the running sums that the sink lends; also returns which ones it lent.
    fn training(
        &self,
        rows: Option<&ExpertRows<B>>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> (Group<B>, Vec<bool>) {
        let (modules, lent): (Vec<_>, Vec<bool>) = self
            .modules
            .iter()
            .map(|linear| {
                let (weight_gradient, lent) = weight_gradient(linear.base.trained(), sink);
                (linear.module(adapters.are_on, weight_gradient), lent)
            })
            .unzip();
        let (dropout, rows) = (self.mask(adapters, rows), rows.cloned());
        (Group { modules, parts: self.parts.clone(), gemms: self.gemms, dropout, rows }, lent)
    }

    fn take_gradients(
        &self,
        mut gradients: ProjectGradients<B>,
        lent: Vec<bool>,
        sink: &mut dyn GradientSink<B>,
    ) -> ProjectGradients<B> {
        self.add_gradients(std::mem::take(&mut gradients.modules), lent, sink);
        gradients
    }

    fn add_gradients(&self, gradients: Vec<ModuleGradients<B>>, lent: Vec<bool>, sink: &mut dyn GradientSink<B>) {
        for ((linear, gradients), lent) in self.modules.iter().zip(gradients).zip(lent) {
            linear.add_gradients(gradients, lent, sink);
        }
    }
}

/// Runs the backward of a gated MLP from the gradient of its output: of the down projection and the norm after it, then of gate and up, whose result
/// is returned. `rows` are those of experts, if the groups are stacks.
pub(crate) fn mlp_backward<B: Kernels>(
    [(gate_up, saved_gate_up), (down, saved_down)]: [(&LinearGroup<B>, ProjectSaved<B>); 2],
    rows: Option<&ExpertRows<B>>,
    after_mlp: Option<&Norm<B>>,
    dy: Tensor<B, 2>,
    d_residual: Option<Tensor<B, 2>>,
    adapters: AdapterPass,
    sink: &mut dyn GradientSink<B>,
) -> ProjectGradients<B> {
    let (down_group, down_lent) = down.training(rows, adapters, sink);
    let (gate_up_group, lent) = gate_up.training(rows, adapters, sink);
    let groups = [(saved_gate_up, gate_up_group), (saved_down, down_group)];
    let gradients = B::mlp_backward(groups, dy, d_residual, |modules, output_norm| {
        down.add_gradients(modules, down_lent, sink);
        add_gradient(after_mlp, output_norm, sink);
    });
    gate_up.take_gradients(gradients, lent, sink)
}
