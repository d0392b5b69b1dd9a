//! Row-wise operations: RMSNorm, rotary embedding and gated activation, forward and backward.
//!
//! Trade-off: operations other than GEMMs are counted by hand (a root or an exponential as one), which places them on the roofline's
//! left side; their bytes decide.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Kernels, NormWeight, RotaryTables, linear, norm};

use super::{Scale, Setting, at_edges, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_reference, work};

const SILU: Activation = Activation::Silu;

/// Inputs of an operation in addition to its rows.
struct Shared<B: Kernels> {
    norm: NormWeight<B>,
    rotary: RotaryTables<B>,
    head_dim: usize,
}

/// Work on inputs of `[tokens, width]`.
type Run<B> = fn(&[Tensor<B, 2>], &Shared<B>) -> Vec<Tensor<B, 2>>;

/// An operation and its reference.
struct Operation<B: Kernels> {
    name: [&'static str; 2],
    /// Operations per value; values read and written per value.
    flops: f64,
    moved: f64,
    inputs: usize,
    run: Run<B>,
    expected: Run<Flex>,
}

fn operations<B: Kernels>() -> [Operation<B>; 6] {
    [
        Operation {
            name: ["norm", "forward"],
            flops: 4.0,
            moved: 2.0,
            inputs: 1,
            run: |x, with| vec![B::rms_norm(x[0].clone(), &with.norm, None)],
            expected: |x, with| vec![norm::reference::forward(x[0].clone(), &with.norm)],
        },
        Operation {
            name: ["norm", "backward"],
            flops: 10.0,
            moved: 3.0,
            inputs: 2,
            run: |x, with| vec![B::rms_norm_backward(x[0].clone(), &with.norm, x[1].clone(), None).0],
            expected: |x, with| vec![norm::reference::backward(x[0].clone(), &with.norm, x[1].clone(), None).0],
        },
        Operation {
            name: ["rotary", "forward"],
            flops: 3.0,
            moved: 2.0,
            inputs: 1,
            run: |x, with| vec![B::rotary(x[0].clone(), &with.rotary, with.head_dim, false)],
            expected: |x, with| vec![linear::reference::rotary(x[0].clone(), &with.rotary, with.head_dim, false)],
        },
        Operation {
            name: ["rotary", "backward"],
            flops: 3.0,
            moved: 2.0,
            inputs: 1,
            run: |x, with| vec![B::rotary(x[0].clone(), &with.rotary, with.head_dim, true)],
            expected: |x, with| vec![linear::reference::rotary(x[0].clone(), &with.rotary, with.head_dim, true)],
        },
        Operation {
            name: ["gated", "forward"],
            flops: 5.0,
            moved: 3.0,
            inputs: 2,
            run: |x, _| vec![B::gated(x[0].clone(), x[1].clone(), SILU)],
            expected: |x, _| vec![linear::reference::gated(x[0].clone(), x[1].clone(), SILU)],
        },
        Operation {
            name: ["gated", "backward"],
            flops: 11.0,
            moved: 5.0,
            inputs: 3,
            run: |x, _| <[_; 2]>::from(B::gated_backward(x[0].clone(), x[1].clone(), SILU, x[2].clone())).into(),
            expected: |x, _| {
                let [x, y, dy] = [0, 1, 2].map(|index: usize| x[index].clone());
                <[_; 2]>::from(linear::reference::gated_backward(x, y, SILU, dy)).into()
            },
        },
    ]
}

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let main = setting.tokens();
    let sweep = match setting.scale {
        Scale::Small => setting.sweep(&[1024], &[64, 1024, 4096]),
        Scale::Medium => setting.sweep(&[4096], &[64, 4096, 16_384]),
        Scale::Large => setting.sweep(&[512, 16_384], &[64, 512, 16_384, 65_536]),
    };
    let of_main = [main].into_iter().chain(sweep).map(|count| (count, setting.main_format()));
    let others = setting.formats().into_iter().skip(1).filter(|_| !setting.quick).map(|format| (main, format));
    let all = of_main.chain(others);
    all.flat_map(|(count, format)| operations().map(|operation| case(setting, operation, count, format))).collect()
}

fn case<B: Kernels>(
    setting: &Setting<B>,
    operation: Operation<B>,
    count: usize,
    (dtype, format): (DType, &'static str),
) -> Case<B> {
    let (model, device) = (setting.model(), setting.device.clone());
    let Operation { name: [subject, pass], flops, moved, inputs, run, expected } = operation;
    let width = match subject {
        "gated" => model.intermediate,
        "rotary" => model.heads * model.head_dim,
        _ => model.hidden,
    };
    let (head_dim, values, bytes) = (model.head_dim, (count * width) as f64, (count * width * dtype.size()) as f64);
    let sizes = [("tokens", count), ("width", width), ("head_dim", head_dim)];
    let sizes = if subject == "rotary" { &sizes[..] } else { &sizes[..2] };
    let prepare = move || {
        let inputs: Vec<_> = (0..inputs).map(|_| random::<B, 2>([count, width], 1.0, dtype, &device)).collect();
        let shared = Shared::<B>::new([count, width], head_dim, &device);
        let (of_check, of_reference, device) = (inputs.clone(), shared.to_reference(), device.clone());
        let call = move || Output::Tensors(B::section(&device, || run(&inputs, &shared)));
        let check = move |output: Output<B>| {
            let ends: Vec<_> = of_check.iter().map(|input| to_reference(at_edges(input, 0))).collect();
            let pairs = output.tensors().into_iter().zip(expected(&ends, &of_reference));
            pairs.map(|(got, expected)| Comparison::of_tensors("result", at_edges(&got, 0), expected)).collect()
        };
        Prepared::new(call, check)
    };
    Case {
        key: key(subject, pass, &format!("of {}", model.name()), format, sizes),
        work: work(count as f64, "tokens", flops * values, moved * bytes),
        axis: axis("tokens", count),
        tolerance: tolerance(dtype),
        set_bytes: inputs as f64 * bytes,
        prepare: Box::new(prepare),
    }
}

impl<B: Kernels> Shared<B> {
    fn new([count, width]: [usize; 2], head_dim: usize, device: &B::Device) -> Self {
        let weight = random::<B, 1>([width], 1.0, DType::F32, device);
        // The cost does not depend on the angles, but the check needs cosines and sines of the same ones.
        let angles = random::<B, 2>([count, head_dim / 2], 3.0, DType::F32, device);
        Self {
            norm: NormWeight { weight, offset: 0.0, epsilon: 1e-5, trains: false },
            rotary: RotaryTables::new(angles.clone().cos(), angles.sin()),
            head_dim,
        }
    }

    /// Copies the shared inputs of the rows at both ends.
    fn to_reference(&self) -> Shared<Flex> {
        let NormWeight { weight, offset, epsilon, trains } = self.norm.clone();
        let norm = NormWeight { weight: to_reference(weight), offset, epsilon, trains };
        let [cos, sin] = [&self.rotary.cos, &self.rotary.sin].map(|table| to_reference(at_edges(table, 0)));
        Shared { norm, rotary: RotaryTables::new(cos, sin), head_dim: self.head_dim }
    }
}
