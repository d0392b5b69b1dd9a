//! GEMMs of real models, forward and both gradients, over dense and quantized weights.
//!
//! The result is checked in blocks at its corners, which need the whole inner dimension and little else.
//! Trade-off: 8-bit GEMMs are compared with exact results, with a tolerance for the rounding of their codes.

use burn_tensor::{DType, Tensor};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::linear::reference;
use firebrick_kernels::{
    Epilogue, GemmFormat, Group, InputGradient, Keep, Kernels, Module, ProjectSaved, Prologue, Weight, WeightGradient,
};
use firebrick_precision::QuantFormat;

use super::{Scale, Setting, at_edges, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_reference, work};
use crate::models::{GroupShape, LLAMA_1B, Model};

/// Relative error from rounding both operands to 8-bit floats with a scale per row.
const FP8_TOLERANCE: f64 = 0.06;

/// The operands of a GEMM.
#[derive(Clone, Copy)]
struct Operands {
    dtype: DType,
    name: &'static str,
    gemms: GemmFormat,
    base: Option<QuantFormat>,
}

/// The GEMM of a linear layer to time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// `x Wᵀ`.
    Forward,
    /// `dy W`.
    InputGradient,
    /// `dy W` and `dyᵀ x`.
    BothGradients,
}

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::InputGradient => "input_gradient",
            Self::BothGradients => "both_gradients",
        }
    }
}

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let (model, count) = (setting.model(), setting.tokens());
    let dense = |(dtype, name)| Operands { dtype, name, gemms: GemmFormat::Compute, base: None };
    let main = dense(setting.main_format());
    let [_, _, gate_up, down] = model.groups();
    let mut cases = Vec::new();
    let mut add = |model: &Model, group, count, operands, pass| {
        cases.push(case(setting, model, group, count, operands, pass));
    };
    for group in model.groups() {
        add(&model, group, count, main, Pass::Forward);
    }
    add(&model, gate_up, count, main, Pass::InputGradient);
    add(&model, gate_up, count, main, Pass::BothGradients);
    let nf4 = Operands { base: Some(QuantFormat::Nf4 { double_quant: true }), ..main };
    add(&model, down, count, nf4, Pass::Forward);
    for format in setting.formats().into_iter().skip(1) {
        add(&model, gate_up, count, dense(format), Pass::Forward);
    }
    if setting.has_fp8 {
        let fp8 = Operands { gemms: GemmFormat::Fp8, name: "fp8", ..main };
        for group in model.groups() {
            add(&model, group, count, fp8, Pass::Forward);
        }
        add(&model, gate_up, count, fp8, Pass::InputGradient);
    }
    let sweep = match setting.scale {
        Scale::Small => setting.sweep(&[16, 64], &[1, 16, 64, 1024]),
        Scale::Medium => setting.sweep(&[128], &[16, 128, 4096]),
        Scale::Large => setting.sweep(&[128, 1024, 16_384], &[16, 128, 512, 1024, 2048, 16_384]),
    };
    for count in sweep {
        add(&model, gate_up, count, main, Pass::Forward);
    }
    if !setting.quick && model.name() != LLAMA_1B.name() {
        for group in LLAMA_1B.groups() {
            add(&LLAMA_1B, group, count.min(1024), main, Pass::Forward);
        }
    }
    cases
}

fn case<B: Kernels>(
    setting: &Setting<B>,
    model: &Model,
    (group, [inputs, outputs]): GroupShape,
    count: usize,
    operands: Operands,
    pass: Pass,
) -> Case<B> {
    let (value, device) = (operands.dtype.size() as f64, setting.device.clone());
    let product = 2.0 * count as f64 * inputs as f64 * outputs as f64;
    let weight_bytes = operands.base.map_or(value, |format| format.bits_per_value() / 8.0) * (inputs * outputs) as f64;
    let activations = value * (count * (inputs + outputs)) as f64;
    let (flops, bytes) = match pass {
        Pass::Forward | Pass::InputGradient => (product, activations + weight_bytes),
        // The gradient of the weight is f32 and the activations are read again.
        Pass::BothGradients => (2.0 * product, 2.0 * activations + weight_bytes + 4.0 * (inputs * outputs) as f64),
    };
    let what = match operands.base {
        Some(format) => format!("{group} of {} in {}", model.name(), format.name()),
        None => format!("{group} of {}", model.name()),
    };
    let sizes = [("tokens", count), ("in", inputs), ("out", outputs)];
    let is_fp8 = operands.gemms == GemmFormat::Fp8;
    Case {
        key: key("gemm", pass.name(), &what, operands.name, &sizes),
        work: work(count as f64, "tokens", flops, bytes),
        axis: axis("tokens", count).filter(|_| group == "gate_up" && pass == Pass::Forward && operands.base.is_none()),
        tolerance: if is_fp8 { FP8_TOLERANCE } else { tolerance(operands.dtype) },
        set_bytes: activations + weight_bytes,
        prepare: Box::new(move || prepare(&device, [count, inputs, outputs], operands, pass)),
    }
}

fn prepare<B: Kernels>(
    device: &B::Device,
    [count, inputs, outputs]: [usize; 3],
    operands: Operands,
    pass: Pass,
) -> Prepared<B> {
    let dtype = operands.dtype;
    let x = random::<B, 2>([count, inputs], 1.0, dtype, device);
    let values = random::<B, 2>([outputs, inputs], 1.0, dtype, device);
    let weight = match operands.base {
        Some(format) => Weight::Quantized(B::quantize_weight(values, format)),
        None => Weight::Dense(values),
    };
    let group = group(weight.clone(), operands.gemms, pass == Pass::BothGradients);
    let device = device.clone();
    if pass == Pass::Forward {
        let (input, group) = (x.clone(), group);
        let call = move || {
            let prologue = Prologue::None { x: input.clone() };
            let project = || B::project(prologue, &group, Epilogue::None, Keep::Nothing);
            Output::Tensors(B::section(&device, project).0)
        };
        let check = move |output: Output<B>| check_forward(&output.tensors()[0], &x, &dense(&weight));
        return Prepared::new(call, check);
    }
    let dy = random::<B, 2>([count, outputs], 1.0, dtype, &device);
    let forward = || B::project(Prologue::None { x: x.clone() }, &group, Epilogue::None, Keep::Everything);
    let saved = B::section(&device, forward).1.expect("everything was to be saved");
    let gradient = dy.clone();
    let call = move || {
        let work = || B::project_backward((*saved).clone(), group.clone(), vec![gradient.clone()], None);
        let gradients = B::section(&device, work);
        let InputGradient::Plain(dx) = gradients.input else { unreachable!("the prologue was not gated") };
        let weights = gradients.modules.into_iter().filter_map(|module| module.weight);
        Output::Tensors(std::iter::once(dx).chain(weights).collect())
    };
    let check = move |output: Output<B>| check_gradients(&output.tensors(), &x, &dense(&weight), &dy);
    Prepared::new(call, check)
}

/// Builds a group of one module that covers all outputs.
fn group<B: Kernels>(weight: Weight<B>, gemms: GemmFormat, trains: bool) -> Group<B> {
    let outputs = weight.shape()[0];
    let weight_gradient = if trains { WeightGradient::New } else { WeightGradient::Frozen };
    let module = Module { columns: 0..outputs, weight, weight_gradient, bias: None, adapter: None };
    Group { modules: vec![module], parts: vec![outputs], gemms, dropout: None, rows: None }
}

/// Returns the dequantized weight, because quantizing is a separate case.
fn dense<B: Kernels>(weight: &Weight<B>) -> Tensor<B, 2> {
    match weight {
        Weight::Dense(values) => values.clone(),
        Weight::Quantized(weight) => B::dequantize_weight(weight),
    }
}

/// Checks corners of the output by GEMMs of some rows of the input and of the weight.
fn check_forward<B: Kernels>(y: &Tensor<B, 2>, x: &Tensor<B, 2>, weight: &Tensor<B, 2>) -> Vec<Comparison> {
    let weight = Weight::Dense(to_reference(at_edges(weight, 0)));
    let prologue = Prologue::<Flex>::None { x: to_reference(at_edges(x, 0)) };
    let group = group(weight, GemmFormat::Compute, false);
    let (mut expected, _) = reference::project(prologue, &group, Epilogue::None, Keep::Nothing);
    vec![Comparison::of_tensors("output", at_edges(&at_edges(y, 0), 1), expected.remove(0))]
}

/// Checks corners of the gradients: for the input's, some rows of `dy` and some columns of the weight; for the weight's, some columns of `dy` and of
/// `x`.
fn check_gradients<B: Kernels>(
    got: &[Tensor<B, 2>],
    x: &Tensor<B, 2>,
    weight: &Tensor<B, 2>,
    dy: &Tensor<B, 2>,
) -> Vec<Comparison> {
    let corner = |x: Tensor<Flex, 2>, weight: Tensor<Flex, 2>, dy: Tensor<Flex, 2>| {
        let saved = ProjectSaved {
            prologue: Prologue::None { x },
            prologue_output: None,
            low_rank: None,
            unscaled: None,
            heads: None,
            output_norm: None,
        };
        reference::project_backward(saved, group(Weight::Dense(weight), GemmFormat::Compute, true), vec![dy], None)
    };
    let columns = |x: &Tensor<B, 2>| at_edges(x, 1);
    let rows =
        corner(to_reference(columns(&at_edges(x, 0))), to_reference(columns(weight)), to_reference(at_edges(dy, 0)));
    let mut comparisons =
        vec![Comparison::of_tensors("input gradient", columns(&at_edges(&got[0], 0)), rows.input.plain())];
    if let Some(weight_gradient) = got.get(1) {
        let block = to_reference(columns(&at_edges(weight, 0)));
        let mut all = corner(to_reference(columns(x)), block, to_reference(columns(dy)));
        let expected = all.modules.remove(0).weight.expect("the reference's weight trains");
        let got = columns(&at_edges(weight_gradient, 0));
        comparisons.push(Comparison::of_tensors("weight gradient", got, expected));
    }
    comparisons
}
