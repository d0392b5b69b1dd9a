//! A group of linear modules with all its inputs, on the device under test and on the CPU, and the comparison of all results.
//!
//! Trade-off: weights and gradients are random, so zero gradients and saturated activations are not reached.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;
use firebrick_precision::{BlockScales, QuantFormat};

use super::Reference;
use crate::GemmFormat;
use crate::Kernels;
use crate::conformance::check::{Check, Pair};
use crate::linear::{
    self, Adapter, Bias, Epilogue, ExpertRows, Group, HeadsEpilogue, InputGradient, Keep, LinearOps, Magnitude, Module,
    ModuleGradients, ProjectGradients, ProjectSaved, Prologue, RotaryTables, WeightGradient, into_parts, into_single,
};
use crate::norm::NormWeight;
use crate::weights::{MatrixScales, QuantizedWeight, Weight, matrix_scales};

/// A value on the device under test and its counterpart on the CPU.
pub(super) type Both<A, R> = (A, R);

/// Storage of a weight, and what the backward does about its gradient.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Base {
    Quantized(QuantFormat),
    Dense,
    New,
    AddTo,
    /// In bf16, with a sum in bf16.
    Narrow,
}

impl Base {
    /// The storage of most runs.
    pub(super) const NF4: Self = Self::Quantized(QuantFormat::Nf4 { double_quant: true });
}

/// Parts of a module in addition to its weight.
#[derive(Clone, Copy)]
pub(super) struct Extras {
    pub(super) adapter: bool,
    pub(super) bias: bool,
    pub(super) trained_bias: bool,
    pub(super) magnitude: bool,
}

pub(super) const NOTHING: Extras = Extras { adapter: false, bias: false, trained_bias: false, magnitude: false };
pub(super) const ADAPTER: Extras = Extras { adapter: true, ..NOTHING };
/// With a bias that trains.
pub(super) const BIASED: Extras = Extras { bias: true, trained_bias: true, ..ADAPTER };

/// Builds one module per entry of `widths`, in column order, over `parts`.
pub(super) fn group<B: Kernels>(
    check: &mut Check<'_, B>,
    modules: &[(Base, Extras)],
    widths: &[usize],
    parts: &[usize],
    in_features: usize,
) -> Both<Group<B>, Group<Reference>> {
    let mut end = 0;
    let (modules, expected) = modules
        .iter()
        .zip(widths)
        .map(|(&(base, extras), &width)| {
            end += width;
            module(check, base, extras, end - width..end, in_features, 1)
        })
        .unzip();
    (
        Group { modules, parts: parts.to_vec(), gemms: check.case.gemms, dropout: None, rows: None },
        Group { modules: expected, parts: parts.to_vec(), gemms: GemmFormat::Compute, dropout: None, rows: None },
    )
}

/// Builds stacks of as many matrices as `counts` has experts, one per entry of `widths`, in column order; expert `e` has `counts[e]` rows.
pub(super) fn stacks<B: Kernels>(
    check: &mut Check<'_, B>,
    modules: &[(Base, Extras)],
    widths: &[usize],
    parts: &[usize],
    in_features: usize,
    counts: &[usize],
) -> Both<Group<B>, Group<Reference>> {
    let (mut group, mut expected) = group(check, &[], &[], parts, in_features);
    let mut end = 0;
    for (&(base, extras), &width) in modules.iter().zip(widths) {
        end += width;
        let stack = module(check, base, extras, end - width..end, in_features, counts.len());
        group.modules.push(stack.0);
        expected.modules.push(stack.1);
    }
    // The device reads the counts back from the starts.
    group.rows = Some(ExpertRows::new(ExpertRows::<B>::of_counts(counts.to_vec(), check.device).starts));
    expected.rows = Some(ExpertRows::of_counts(counts.to_vec(), &check.cpu));
    (group, expected)
}

fn module<B: Kernels>(
    check: &mut Check<'_, B>,
    base: Base,
    extras: Extras,
    columns: std::ops::Range<usize>,
    in_features: usize,
    matrices: usize,
) -> Both<Module<B>, Module<Reference>> {
    let shape = [matrices * columns.len(), in_features];
    let (weight, expected_weight) = weight(check, base, shape, matrices);
    let (weight_gradient, expected_gradient) = match base {
        Base::Quantized(_) | Base::Dense => (WeightGradient::Frozen, WeightGradient::Frozen),
        Base::New => (WeightGradient::New, WeightGradient::New),
        Base::AddTo | Base::Narrow => {
            let dtype = if base == Base::Narrow { DType::BF16 } else { DType::F32 };
            let earlier = check.random_in(dtype, shape, 1.0);
            (WeightGradient::AddTo(earlier.0), WeightGradient::AddTo(earlier.1))
        }
    };
    let trains = extras.trained_bias;
    let (bias, expected_bias) = extras
        .bias
        .then(|| {
            let value = if trains { check.random_f32([shape[0]], 1.0) } else { check.random([shape[0]], 1.0) };
            (Bias { value: value.0, trains }, Bias { value: value.1, trains })
        })
        .unzip();
    let (adapter, expected_adapter) = extras
        .adapter
        .then(|| {
            let (rank, scale) = (check.case.rank, 1.5);
            let (a, b) = (check.random_f32([matrices * rank, shape[1]], 0.2), check.random_f32([shape[0], rank], 0.2));
            let (magnitude, expected) = extras.magnitude.then(|| self::magnitude(check, shape[0])).unzip();
            (Adapter { a: a.0, b: b.0, scale, magnitude }, Adapter { a: a.1, b: b.1, scale, magnitude: expected })
        })
        .unzip();
    (
        Module { columns: columns.clone(), weight, weight_gradient, bias, adapter },
        Module {
            columns,
            weight: expected_weight,
            weight_gradient: expected_gradient,
            bias: expected_bias,
            adapter: expected_adapter,
        },
    )
}

/// Returns magnitudes of either sign over norms of order one.
fn magnitude<B: Kernels>(check: &mut Check<'_, B>, width: usize) -> Both<Magnitude<B>, Magnitude<Reference>> {
    let (value, norm) = (check.random_f32([width], 2.0), check.random_within([width], 0.5..1.5));
    (Magnitude { value: value.0, norm: norm.0 }, Magnitude { value: value.1, norm: norm.1 })
}

fn weight<B: Kernels>(
    check: &mut Check<'_, B>,
    base: Base,
    shape: [usize; 2],
    matrices: usize,
) -> Both<Weight<B>, Weight<Reference>> {
    let (weight, expected) = match base {
        Base::Quantized(format) => {
            let (_, values) = check.random_f32(shape, 0.1);
            let host: Vec<f32> = values.into_data().to_vec().expect("the values are f32");
            let mut quantized = format.quantize(&host, &shape).expect("random values can be quantized");
            if matrices > 1 && matrix_scales(format, [shape[0] / matrices, shape[1]]) == MatrixScales::Float {
                quantized.scales.block = BlockScales::Float(quantized.scales.block.values());
            }
            let expected = QuantizedWeight::<Reference>::upload(&quantized, &check.cpu);
            let weight = QuantizedWeight::<B>::upload(&quantized, check.device);
            return (Weight::Quantized(weight), Weight::Quantized(expected));
        }
        Base::Dense => check.random(shape, 0.1),
        Base::New | Base::AddTo => check.random_f32(shape, 0.1),
        Base::Narrow => check.random_in(DType::BF16, shape, 0.1),
    };
    (Weight::Dense(weight), Weight::Dense(expected))
}

/// Builds the prologue of a gated activation.
pub(super) fn gated<B: Kernels>([gate, up]: [Pair<B, 2>; 2]) -> Both<Prologue<B>, Prologue<Reference>> {
    let activation = Activation::Silu;
    (Prologue::Gated { gate: gate.0, up: up.0, activation }, Prologue::Gated { gate: gate.1, up: up.1, activation })
}

pub(super) fn norm<B: Kernels>(
    check: &mut Check<'_, B>,
    width: usize,
    trains: bool,
) -> Both<NormWeight<B>, NormWeight<Reference>> {
    let weight: Pair<B, 1> = check.random_f32([width], 1.0);
    // A trained norm is stored as its difference from 1 here, so that both forms are tested.
    let (epsilon, offset) = (1e-5, if trains { 1.0 } else { 0.0 });
    (NormWeight { weight: weight.0, offset, epsilon, trains }, NormWeight { weight: weight.1, offset, epsilon, trains })
}

/// Returns angles for `rotated` columns of each head.
pub(super) fn tables<B: Kernels>(
    check: &mut Check<'_, B>,
    rotated: usize,
) -> Both<RotaryTables<B>, RotaryTables<Reference>> {
    let shape = [check.case.tokens(), rotated / 2];
    let (cos, sin) = (check.random_f32(shape, 1.0), check.random_f32(shape, 1.0));
    (RotaryTables::new(cos.0, sin.0), RotaryTables::new(cos.1, sin.1))
}

/// Builds a heads epilogue: `norms` are the widths of the query and key norms, `rotated` the rotated columns of each head.
pub(super) fn heads<B: Kernels>(
    check: &mut Check<'_, B>,
    norms: Option<[usize; 2]>,
    rotated: Option<usize>,
) -> Both<HeadsEpilogue<B>, HeadsEpilogue<Reference>> {
    let head_dim = check.case.head_dim;
    let (norms, expected_norms) = norms
        .map(|[q, k]| {
            let (q, k) = (norm(check, q, true), norm(check, k, true));
            ([q.0, k.0], [q.1, k.1])
        })
        .unzip();
    let (rotary, expected_rotary) = rotated.map(|rotated| tables(check, rotated)).unzip();
    (HeadsEpilogue::of_qkv(head_dim, norms, rotary), HeadsEpilogue::of_qkv(head_dim, expected_norms, expected_rotary))
}

/// All inputs of a projection and its backward.
pub(super) struct Scenario<B: Kernels> {
    group: Both<Group<B>, Group<Reference>>,
    prologue: Both<Prologue<B>, Prologue<Reference>>,
    epilogue: Both<Epilogue<B>, Epilogue<Reference>>,
    d_outputs: Vec<Pair<B, 2>>,
    d_residual: Option<Pair<B, 2>>,
}

impl<B: Kernels> Scenario<B> {
    pub(super) fn new(
        check: &mut Check<'_, B>,
        group: Both<Group<B>, Group<Reference>>,
        prologue: Both<Prologue<B>, Prologue<Reference>>,
        epilogue: Both<Epilogue<B>, Epilogue<Reference>>,
    ) -> Self {
        let tokens = check.case.tokens();
        let d_outputs = group.0.parts.iter().map(|&width| check.random([tokens, width], 1.0)).collect();
        Self { group, prologue, epilogue, d_outputs, d_residual: None }
    }

    pub(super) fn with_residual_path(mut self, check: &mut Check<'_, B>) -> Self {
        self.d_residual = Some(check.random([check.case.tokens(), self.group.0.in_features()], 1.0));
        self
    }

    pub(super) fn run(self, check: &mut Check<'_, B>, name: &str, keeps: &[Keep]) {
        for &keep in keeps {
            let (outputs, saved) = B::project(self.prologue.0.clone(), &self.group.0, self.epilogue.0.clone(), keep);
            let (expected, expected_saved) =
                linear::project(self.prologue.1.clone(), &self.group.1, self.epilogue.1.clone(), keep);
            check.same(&format!("project ({name}): number of parts"), outputs.len() == expected.len());
            for (output, expected) in outputs.into_iter().zip(expected) {
                check.same(&format!("project ({name}): format"), output.dtype() == check.case.dtype);
                check.compare(&format!("project ({name})"), output, expected);
            }
            check.same(&format!("project ({name}): what is saved"), saved.is_some() == (keep != Keep::Nothing));
            if let Some((mut saved, mut expected)) = saved.zip(expected_saved) {
                if keep == Keep::LowRank {
                    saved = ProjectSaved::of_inputs(self.prologue.0.clone(), saved.low_rank);
                    expected = ProjectSaved::of_inputs(self.prologue.1.clone(), expected.low_rank);
                }
                let (d_outputs, expected_d_outputs) = self.d_outputs.iter().cloned().unzip();
                let (d_residual, expected_d_residual) = self.d_residual.clone().unzip();
                let mut grads = B::project_backward(*saved, self.group.0.clone(), d_outputs, d_residual);
                for (module, found) in self.group.0.modules.iter().zip(&mut grads.modules) {
                    let WeightGradient::AddTo(sum) = &module.weight_gradient else { continue };
                    let is_like = found.weight.as_ref().is_none_or(|weight| weight.dtype() == sum.dtype());
                    check.same(&format!("project_backward ({name}): format of a sum"), is_like);
                    found.weight = found.weight.take().map(|weight| weight.cast(DType::F32));
                }
                let group = self.group.1.clone();
                let expected = linear::project_backward(*expected, group, expected_d_outputs, expected_d_residual);
                compare(check, &format!("project_backward ({name})"), grads, expected);
            }
        }
        for (d_output, expected) in self.d_outputs {
            check.compare(&format!("project_backward ({name}): a copy of its input"), d_output, expected);
        }
    }
}

/// All inputs of an MLP and its backward.
pub(super) struct Mlp<B: Kernels> {
    pub(super) x: Pair<B, 2>,
    pub(super) norm: Both<NormWeight<B>, NormWeight<Reference>>,
    pub(super) gate_up: Both<Group<B>, Group<Reference>>,
    pub(super) down: Both<Group<B>, Group<Reference>>,
    pub(super) dy: Pair<B, 2>,
    pub(super) activation: Activation,
}

impl<B: Kernels> Mlp<B> {
    pub(super) fn run(self, check: &mut Check<'_, B>, keep: Keep) {
        let Self { x, norm, gate_up, down, dy, activation } = self;
        let device = check.device;
        let (y, of_down, of_gate_up) =
            B::section(device, || run_mlp::<B>((x.0, norm.0), (gate_up.0, down.0), dy.0, activation, keep));
        let (expected_y, expected_down, expected_gate_up) =
            run_mlp::<Reference>((x.1, norm.1), (gate_up.1, down.1), dy.1, activation, keep);
        check.compare("project (mlp)", y, expected_y);
        compare(check, "mlp_backward (gate and up)", of_gate_up, expected_gate_up);
        compare_modules(check, "mlp_backward (down)", of_down, expected_down);
    }
}

/// Returns the output of an MLP, and the gradients of its second and its first group.
fn run_mlp<B: LinearOps>(
    (x, norm): (Tensor<B, 2>, NormWeight<B>),
    (gate_up, down): (Group<B>, Group<B>),
    dy: Tensor<B, 2>,
    activation: Activation,
    keep: Keep,
) -> (Tensor<B, 2>, Vec<ModuleGradients<B>>, ProjectGradients<B>) {
    const KEPT: &str = "something is kept";
    let prologue = Prologue::Norm { x, norm };
    let (parts, of_gate_up) = B::project(prologue, &gate_up, Epilogue::None, keep);
    let [gate, up] = into_parts(parts);
    let (y, of_down) = B::project(Prologue::Gated { gate, up, activation }, &down, Epilogue::None, keep);
    let groups = [(*of_gate_up.expect(KEPT), gate_up), (*of_down.expect(KEPT), down)];
    let mut modules_of_down = Vec::new();
    let of_gate_up = B::mlp_backward(groups, dy.clone(), Some(dy), |modules, output_norm| {
        assert!(output_norm.is_none(), "no norm is after it");
        modules_of_down = modules;
    });
    (into_single(y), modules_of_down, of_gate_up)
}

fn compare<B: Kernels>(
    check: &mut Check<'_, B>,
    what: &str,
    grads: ProjectGradients<B>,
    expected: ProjectGradients<Reference>,
) {
    match (grads.input, expected.input) {
        (InputGradient::Plain(dx), InputGradient::Plain(expected)) => {
            check.compare(&format!("{what}: input"), dx, expected);
        }
        (InputGradient::Gated { d_gate, d_up }, InputGradient::Gated { d_gate: expected_gate, d_up: expected_up }) => {
            check.compare(&format!("{what}: gate"), d_gate, expected_gate);
            check.compare(&format!("{what}: up"), d_up, expected_up);
        }
        _ => check.same(&format!("{what}: which input gradients"), false),
    }
    compare_parameter(check, &format!("{what}: norm"), grads.norm, expected.norm);
    compare_parameter(check, &format!("{what}: norm after"), grads.output_norm, expected.output_norm);
    check.same(&format!("{what}: head norms"), grads.head_norms.len() == expected.head_norms.len());
    for (grad, expected) in grads.head_norms.into_iter().zip(expected.head_norms) {
        compare_parameter(check, &format!("{what}: head norm"), grad, expected);
    }
    compare_modules(check, what, grads.modules, expected.modules);
}

pub(super) fn compare_modules<B: Kernels>(
    check: &mut Check<'_, B>,
    what: &str,
    grads: Vec<ModuleGradients<B>>,
    expected: Vec<ModuleGradients<Reference>>,
) {
    check.same(&format!("{what}: number of modules"), grads.len() == expected.len());
    for (grads, expected) in grads.into_iter().zip(expected) {
        let ModuleGradients { weight, bias, adapter, magnitude } = grads;
        compare_parameter(check, &format!("{what}: weight"), weight, expected.weight);
        compare_parameter(check, &format!("{what}: bias"), bias, expected.bias);
        let ((a, b), (expected_a, expected_b)) = (adapter.unzip(), expected.adapter.unzip());
        compare_parameter(check, &format!("{what}: A"), a, expected_a);
        compare_parameter(check, &format!("{what}: B"), b, expected_b);
        compare_parameter(check, &format!("{what}: magnitudes"), magnitude, expected.magnitude);
    }
}

/// Compares gradients of a parameter, which must be f32, and present exactly where the reference has them.
fn compare_parameter<B: Kernels, const D: usize>(
    check: &mut Check<'_, B>,
    what: &str,
    grad: Option<Tensor<B, D>>,
    expected: Option<Tensor<Reference, D>>,
) {
    check.same(&format!("{what}: whether there is a gradient"), grad.is_some() == expected.is_some());
    if let Some((grad, expected)) = grad.zip(expected) {
        check.same(&format!("{what}: f32"), grad.dtype() == DType::F32);
        check.compare(what, grad, expected);
    }
}
