//! What works row by row: RMSNorm, rotary embedding and gated activation, forward and backward.
//!
//! Trade-off: operations other than GEMMs are counted by hand (a root or an exponential as one), which places them on the roofline's
//! left side; their bytes decide.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Kernels, NormWeight, RotaryTables, linear, norm};

use super::super::case::{Case, Comparison, Output, Prepared, key, to_reference, token_axis, tokens};
use super::{Scale, Setting, at_edges, bytes_of, random, tolerance};

const EPSILON: f64 = 1e-5;

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let main = setting.tokens();
    let sweep = match setting.scale {
        Scale::Small => setting.sweep(&[1024], &[64, 1024, 4096]),
        Scale::Medium => setting.sweep(&[4096], &[64, 4096, 16_384]),
        Scale::Large => setting.sweep(&[512, 16_384], &[64, 512, 16_384, 65_536]),
    };
    let mut cases = Vec::new();
    for count in [main].into_iter().chain(sweep) {
        for operation in Operation::ALL {
            cases.push(case(setting, operation, count, setting.main_format()));
        }
    }
    for format in setting.formats().into_iter().skip(1).filter(|_| !setting.quick) {
        for operation in Operation::ALL {
            cases.push(case(setting, operation, main, format));
        }
    }
    cases
}

/// An operation on `[tokens, width]`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Norm,
    NormBackward,
    Rotary,
    RotaryBackward,
    Gated,
    GatedBackward,
}

impl Operation {
    const ALL: [Self; 6] =
        [Self::Norm, Self::NormBackward, Self::Rotary, Self::RotaryBackward, Self::Gated, Self::GatedBackward];

    /// Subject, pass, operations per value, and values read and written per value.
    fn describe(self) -> (&'static str, &'static str, f64, f64) {
        match self {
            Self::Norm => ("norm", "forward", 4.0, 2.0),
            Self::NormBackward => ("norm", "backward", 10.0, 3.0),
            Self::Rotary => ("rotary", "forward", 3.0, 2.0),
            Self::RotaryBackward => ("rotary", "backward", 3.0, 2.0),
            Self::Gated => ("gated", "forward", 5.0, 3.0),
            Self::GatedBackward => ("gated", "backward", 11.0, 5.0),
        }
    }

    /// Inputs of `[tokens, width]`.
    fn inputs(self) -> usize {
        match self {
            Self::Norm | Self::Rotary | Self::RotaryBackward => 1,
            Self::NormBackward | Self::Gated => 2,
            Self::GatedBackward => 3,
        }
    }

    /// The operation itself.
    fn run<B: Kernels>(self, inputs: &[Tensor<B, 2>], shared: &Shared<B>) -> Vec<Tensor<B, 2>> {
        let input = |index: usize| inputs[index].clone();
        let silu = Activation::Silu;
        match self {
            Self::Norm => vec![B::rms_norm(input(0), &shared.norm)],
            Self::NormBackward => vec![B::rms_norm_backward(input(0), &shared.norm, input(1), None).0],
            Self::Rotary => vec![B::rotary(input(0), &shared.rotary, shared.head_dim)],
            Self::RotaryBackward => vec![B::rotary_backward(input(0), &shared.rotary, shared.head_dim)],
            Self::Gated => vec![B::gated(input(0), input(1), silu)],
            Self::GatedBackward => <[_; 2]>::from(B::gated_backward(input(0), input(1), silu, input(2))).into(),
        }
    }

    /// Its reference.
    fn expected(self, inputs: &[Tensor<Flex, 2>], shared: &Shared<Flex>) -> Vec<Tensor<Flex, 2>> {
        let input = |index: usize| inputs[index].clone();
        let silu = Activation::Silu;
        match self {
            Self::Norm => vec![norm::reference::forward(input(0), &shared.norm)],
            Self::NormBackward => vec![norm::reference::backward(input(0), &shared.norm, input(1), None).0],
            Self::Rotary => vec![linear::reference::rotary(input(0), &shared.rotary, shared.head_dim)],
            Self::RotaryBackward => {
                vec![linear::reference::rotary_backward(input(0), &shared.rotary, shared.head_dim)]
            }
            Self::Gated => vec![linear::reference::gated(input(0), input(1), silu)],
            Self::GatedBackward => {
                <[_; 2]>::from(linear::reference::gated_backward(input(0), input(1), silu, input(2))).into()
            }
        }
    }
}

/// What an operation takes in addition to its rows.
struct Shared<B: Kernels> {
    norm: NormWeight<B>,
    rotary: RotaryTables<B>,
    head_dim: usize,
}

impl<B: Kernels> Shared<B> {
    fn new([count, width]: [usize; 2], head_dim: usize, device: &B::Device) -> Self {
        let weight = random::<B, 1>([width], 1.0, DType::F32, device);
        // Rotations by any angles: a table of cosines and one of sines need not belong together for their cost, but for the check.
        let angles = random::<B, 2>([count, head_dim / 2], 3.0, DType::F32, device);
        Self {
            norm: NormWeight { weight, offset: 0.0, epsilon: EPSILON, trains: false },
            rotary: RotaryTables { cos: angles.clone().cos(), sin: angles.sin() },
            head_dim,
        }
    }

    /// The rows at both ends.
    fn to_reference(&self) -> Shared<Flex> {
        let NormWeight { weight, offset, epsilon, trains } = self.norm.clone();
        let norm = NormWeight { weight: to_reference(weight), offset, epsilon, trains };
        let [cos, sin] = [&self.rotary.cos, &self.rotary.sin].map(|table| to_reference(at_edges(table, 0)));
        Shared { norm, rotary: RotaryTables { cos, sin }, head_dim: self.head_dim }
    }
}

fn case<B: Kernels>(
    setting: &Setting<B>,
    operation: Operation,
    count: usize,
    (dtype, name): (DType, &'static str),
) -> Case<B> {
    let (model, device) = (setting.model(), setting.device.clone());
    let (subject, pass, flops, moved) = operation.describe();
    let width = match subject {
        "gated" => model.intermediate,
        "rotary" => model.heads * model.head_dim,
        _ => model.hidden,
    };
    let values = (count * width) as f64;
    let head_dim = model.head_dim;
    let sizes = [("tokens", count), ("width", width), ("head_dim", head_dim)];
    let sizes = if subject == "rotary" { &sizes[..] } else { &sizes[..2] };
    Case {
        key: key(subject, pass, &format!("of {}", model.name()), name, sizes),
        work: tokens(count, flops * values, moved * values * bytes_of(dtype)),
        axis: token_axis(count),
        tolerance: tolerance(dtype),
        set_bytes: operation.inputs() as f64 * values * bytes_of(dtype),
        prepare: Box::new(move || prepare(&device, operation, [count, width], head_dim, dtype)),
    }
}

fn prepare<B: Kernels>(
    device: &B::Device,
    operation: Operation,
    shape: [usize; 2],
    head_dim: usize,
    dtype: DType,
) -> Prepared<B> {
    let inputs: Vec<_> = (0..operation.inputs()).map(|_| random::<B, 2>(shape, 1.0, dtype, device)).collect();
    let shared = Shared::<B>::new(shape, head_dim, device);
    let expected = {
        let (inputs, shared) = (inputs.clone(), shared.to_reference());
        move || {
            let inputs: Vec<_> = inputs.iter().map(|input| to_reference(at_edges(input, 0))).collect();
            operation.expected(&inputs, &shared)
        }
    };
    let device = device.clone();
    let call = move || Output::Tensors(B::section(&device, || operation.run(&inputs, &shared)));
    let check = move |output: Output<B>| {
        let pairs = output.tensors().into_iter().zip(expected());
        pairs.map(|(got, expected)| Comparison::of_tensors("result", at_edges(&got, 0), expected)).collect()
    };
    Prepared { call: Box::new(call), check: Box::new(check) }
}
