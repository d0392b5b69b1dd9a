//! Accuracy of an adapter's contribution to a projection's output, on a real device, at the shapes of Llama-3.1-8B.
//!
//! The contribution is the change of an output by the adapter, from two calls whose residual subtracts the base's
//! output, so that rounding of outputs hides nothing. The test compares adapters appended to the inner dimension, on
//! the quantized base and on a dense one of the same values, with weights into which the adapter was merged before
//! rounding to 16 bits, as other trainers do when they merge. Part of the GPU suite; `--nocapture` prints the table.
//! Trade-off: random inputs and factors, 256 tokens; coherent inputs, as after training, have less noise.
#![cfg(feature = "cuda")]

#[allow(dead_code, reason = "each program compiles all of a module of which it needs a part")]
mod card;
mod noise;

use burn_flex::Flex;
use burn_tensor::{DType, Distribution, Tensor, TensorData};
use firebrick_arch::Activation;
use firebrick_kernels::backends::cuda::Cuda;
use firebrick_kernels::linear::reference;
use firebrick_kernels::{
    Adapter, Epilogue, GemmFormat, Group, Keep, LinearOps, Module, NormWeight, Prologue, Session, Weight,
    WeightGradient, WeightOps,
};
use firebrick_precision::QuantFormat;

use card::{Device, device, half, halves};
use noise::{host, random, slope_and_noise};

type Matrix = Tensor<Cuda, 2>;

const TOKENS: usize = 256;
const RANK: usize = 16;

/// Computes `y = x Wᵀ`, plus the adapter's output, plus the residual.
fn project(x: &Matrix, weight: Weight<Cuda>, adapter: Option<Adapter<Cuda>>, residual: Option<&Matrix>) -> Matrix {
    let out = weight.shape()[0];
    let module = Module { columns: 0..out, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter };
    let epilogue = residual.map_or(Epilogue::None, |residual| Epilogue::Residual(residual.clone()));
    let group =
        Group { modules: vec![module], parts: vec![out], gemms: GemmFormat::Compute, dropout: None, rows: None };
    Cuda::project(Prologue::None { x: x.clone() }, &group, epilogue, Keep::Nothing).0.remove(0)
}

struct Base {
    x: Matrix,
    quantized: Weight<Cuda>,
    /// Values of the weight, in f32 and in 16 bits.
    values: Matrix,
    dense: Weight<Cuda>,
}

impl Base {
    fn new([out, inputs]: [usize; 2], device: &Device) -> Self {
        let random = |shape, size| Matrix::random(shape, Distribution::Normal(0.0, size), (device, DType::F32));
        let weight = Cuda::quantize_weight(random([out, inputs], 0.02), QuantFormat::Nf4 { double_quant: true });
        let values = Cuda::dequantize_weight(&weight);
        let dense = Weight::Dense(values.clone().cast(half(device)));
        Self {
            x: random([TOKENS, inputs], 1.0).cast(half(device)),
            quantized: Weight::Quantized(weight),
            values,
            dense,
        }
    }

    /// Returns the output change from `without` to `with`, from outputs from which most of the base's is subtracted.
    fn contribution(&self, without: &Weight<Cuda>, with: Weight<Cuda>, adapter: Option<Adapter<Cuda>>) -> Vec<f64> {
        let away = project(&self.x, without.clone(), None, None).neg();
        let base = host(project(&self.x, without.clone(), None, Some(&away)));
        let adapted = host(project(&self.x, with, adapter, Some(&away)));
        adapted.iter().zip(&base).map(|(adapted, base)| adapted - base).collect()
    }
}

/// Returns an adapter with `‖s B A‖ / ‖W‖ = size`, and the matrix `s B A`.
fn adapter(base: &Base, size: f64, device: &Device) -> (Adapter<Cuda>, Matrix) {
    let [out, inputs] = base.values.dims();
    let random = |shape| Matrix::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F32));
    let (a, b) = (random([RANK, inputs]), random([out, RANK]));
    let length = |values: Matrix| host(values.powf_scalar(2.0).sum().reshape([1, 1]))[0].sqrt();
    let product = b.clone().matmul(a.clone());
    let b = b.mul_scalar(size * length(base.values.clone()) / (2.0 * length(product)));
    (Adapter { a: a.clone(), b: b.clone(), scale: 2.0, magnitude: None }, b.matmul(a).mul_scalar(2.0))
}

#[test]
fn an_appended_adapter_is_exact_at_any_size_on_a_quantized_and_on_a_dense_base() {
    let Some(device) = device() else { return };
    eprintln!("| projection | |BA| / |W| | on NF4: slope, noise | on 16 bits | merged before rounding |");
    let shapes =
        [("q, o", [4096, 4096]), ("k, v", [1024, 4096]), ("gate, up", [14_336, 4096]), ("down", [4096, 14_336])];
    for (name, shape) in shapes {
        let base = Base::new(shape, &device);
        for size in [1e-4, 1e-3, 1e-2] {
            let (adapter, product) = adapter(&base, size, &device);
            let f32_values = |values: &Matrix| Weight::Dense(values.clone().cast(DType::F32));
            let x = base.x.clone().cast(DType::F32);
            let low = project(&x, f32_values(&adapter.a), None, None);
            let expected = host(project(&low, f32_values(&adapter.b), None, None).mul_scalar(adapter.scale));
            let merged = Weight::Dense((base.values.clone() + product).cast(half(&device)));
            let results = [
                base.contribution(&base.quantized, base.quantized.clone(), Some(adapter.clone())),
                base.contribution(&base.dense, base.dense.clone(), Some(adapter)),
                base.contribution(&base.dense, merged, None),
            ]
            .map(|got| slope_and_noise(&got, &expected));
            let [quantized, dense, merged] = results.map(|(slope, noise)| format!("{slope:.3}, {noise:.3}"));
            eprintln!("| {name} | {size:.0e} | {quantized} | {dense} | {merged} |");
            // A GEMM with appended ranks may sum the base's products in another order than one without, which changes
            // the output by about 1e-5 in f32.
            for (slope, noise) in &results[..2] {
                assert!((slope - 1.0).abs() < 2e-2, "{name} at {size:e}: slope {slope}");
                assert!(*noise < 0.01 + 2e-5 / size, "{name} at {size:e}: noise {noise}");
            }
        }
    }
}

/// Tokens and inputs, then width and rank of each module.
type Case = ([usize; 2], &'static [(usize, usize)]);

/// Computes the gradients of the input and of every A and B, in a dense group whose modules have these widths and ranks (0: no adapter).
fn gradients<B: LinearOps>(
    [tokens, inputs]: [usize; 2],
    modules: &[(usize, usize)],
    values: &[TensorData],
    dtype: DType,
    device: &B::Device,
) -> Vec<Vec<f64>> {
    let mut values = values.iter();
    let mut next = |dtype: DType| {
        let values = values.next().expect("a matrix for every operand").clone();
        // Round to bf16 on every backend.
        Tensor::<B, 2>::from_data(values, (device, DType::F32)).cast(DType::BF16).cast(dtype)
    };
    let (x, dy) = (next(dtype), next(dtype));
    let (mut group, mut first) = (Vec::new(), 0);
    for &(width, rank) in modules {
        let weight = Weight::Dense(next(dtype));
        let adapter =
            (rank > 0).then(|| Adapter { a: next(DType::F32), b: next(DType::F32), scale: 2.0, magnitude: None });
        let columns = first..first + width;
        first += width;
        group.push(Module { columns, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter });
    }
    let group = Group { modules: group, parts: vec![first], gemms: GemmFormat::Compute, dropout: None, rows: None };
    assert_eq!((x.dims(), dy.dims()), ([tokens, inputs], [tokens, first]));
    let gradients = B::section(device, || {
        let (_, saved) = B::project(Prologue::None { x }, &group, Epilogue::None, Keep::Inputs);
        B::project_backward(*saved.unwrap(), group, vec![dy], None)
    });
    let factors = gradients.modules.into_iter().filter_map(|module| module.adapter).flat_map(|(a, b)| [a, b]);
    [gradients.input.plain()].into_iter().chain(factors).map(host).collect()
}

/// Tests token counts for two rounds at this width, and a small one. Blocks of cards without bf16 have too little shared memory for one pass.
#[test]
fn an_mlp_goes_back_in_one_pass_as_it_does_in_several() {
    let Some(device) = device().filter(|device| half(device) == DType::BF16) else { return };
    for (tokens, rank) in [(70_000, 16), (50_000, 8), (1000, 8), (3, 16)] {
        let mlp = QloraMlp::new(tokens, [256, 4096], rank, &device);
        let [together, apart] = [true, false].map(|together| mlp.gradients(together, &device));
        // The order of sums differs, so bit-identical gradients would come from the same code path.
        assert!(tokens < 1000 || together[1] != apart[1], "{tokens} tokens, rank {rank}: several passes");
        for (index, (together, apart)) in together.iter().zip(&apart).enumerate() {
            let (slope, noise) = slope_and_noise(together, apart);
            let what = format!("gradient {index}, {tokens} tokens, rank {rank}: slope {slope}, noise {noise}");
            assert!((slope - 1.0).abs() < 2e-3 && noise < 5e-3, "{what}");
        }
    }
}

/// Gate and up, and down, on an NF4 base.
struct QloraMlp {
    x: Matrix,
    dy: Matrix,
    gate_up: Group<Cuda>,
    down: Group<Cuda>,
}

impl QloraMlp {
    fn new(tokens: usize, [hidden, width]: [usize; 2], rank: usize, device: &Device) -> Self {
        let random = |shape, size| Matrix::random(shape, Distribution::Normal(0.0, size), (device, DType::F32));
        let group = |modules: usize, [out, inputs]: [usize; 2]| {
            let module = |index: usize| {
                let values = random([out, inputs], 0.5 / (inputs as f64).sqrt());
                let weight = Weight::Quantized(Cuda::quantize_weight(values, QuantFormat::Nf4 { double_quant: true }));
                let (a, b) = (random([rank, inputs], 0.05), random([out, rank], 0.05));
                let adapter = Some(Adapter { a, b, scale: 2.0, magnitude: None });
                let columns = index * out..(index + 1) * out;
                Module { columns, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter }
            };
            let modules = (0..modules).map(module).collect::<Vec<_>>();
            let parts = vec![out; modules.len()];
            Group { modules, parts, gemms: GemmFormat::Compute, dropout: None, rows: None }
        };
        let [x, dy] = [(); 2].map(|()| random([tokens, hidden], 1.0).cast(DType::BF16));
        Self { x, dy, gate_up: group(2, [width, hidden]), down: group(1, [hidden, width]) }
    }

    /// Computes the gradients of the input, and of A and B of down, gate and up; fused, or one group after the other.
    fn gradients(&self, together: bool, device: &Device) -> Vec<Vec<f64>> {
        let found = Cuda::section(device, || {
            let x = Prologue::None { x: self.x.clone() };
            let (parts, of_gate_up) = Cuda::project(x, &self.gate_up, Epilogue::None, Keep::Inputs);
            let [gate, up]: [_; 2] = parts.try_into().unwrap();
            let gated = Prologue::Gated { gate, up, activation: Activation::Silu };
            let (_, of_down) = Cuda::project(gated, &self.down, Epilogue::None, Keep::Inputs);
            let (of_gate_up, of_down) = (*of_gate_up.unwrap(), *of_down.unwrap());
            let groups = [(of_gate_up, self.gate_up.clone()), (of_down, self.down.clone())];
            let mut down = Vec::new();
            let after_down = |modules, _| down = modules;
            let gate_up = if together {
                Cuda::mlp_backward(groups, self.dy.clone(), None, after_down)
            } else {
                reference::mlp_backward(groups, self.dy.clone(), None, after_down)
            };
            let modules = down.into_iter().chain(gate_up.modules);
            let factors = modules.filter_map(|module| module.adapter).flat_map(|(a, b)| [a, b]);
            [gate_up.input.plain()].into_iter().chain(factors).collect::<Vec<_>>()
        });
        found.into_iter().map(host).collect()
    }
}

#[test]
fn gradients_of_adapters_are_those_of_the_reference_at_every_rank() {
    let Some(device) = device() else { return };
    // Cases with tails of tokens and columns; ranks that fit one pass, and some that do not.
    let cases: [Case; 9] = [
        ([1003, 256], &[(512, 16), (128, 16), (128, 16)]),
        ([257, 512], &[(48, 8)]),
        ([4104, 256], &[(3000, 32), (3000, 32)]),
        ([777, 1024], &[(2056, 24), (1024, 8)]),
        ([900, 512], &[(256, 0), (1032, 16), (64, 0)]),
        ([300, 512], &[(256, 16), (1032, 0), (64, 32)]),
        ([15, 512], &[(256, 16)]),
        ([300, 512], &[(256, 4)]),
        ([300, 1024], &[(256, 64), (256, 16)]),
    ];
    for (size, modules) in cases {
        let [tokens, inputs] = size;
        let outputs = modules.iter().map(|(width, _)| width).sum();
        let mut values = vec![random([tokens, inputs], 1.0), random([tokens, outputs], 1e-2)];
        for &(width, rank) in modules {
            values.push(random([width, inputs], 0.02));
            if rank > 0 {
                values.extend([random([rank, inputs], 0.05), random([width, rank], 0.05)]);
            }
        }
        let got = gradients::<Cuda>(size, modules, &values, half(&device), &device);
        let again = gradients::<Cuda>(size, modules, &values, half(&device), &device);
        assert!(got == again, "{modules:?}: two runs differ");
        let expected = gradients::<Flex>(size, modules, &values, DType::F32, &Default::default());
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (slope, noise) = slope_and_noise(got, expected);
            assert!((slope - 1.0).abs() < 5e-3 && noise < 0.01, "{size:?} {modules:?}, {index}: {slope}, {noise}");
        }
    }
}

/// Computes the output of a group without a backward from given rows, from a norm of them, and from a gated activation, in this order. Weights are
/// stored in f32, so that no number of rows is one for the kernels that read weights as they are stored.
fn outputs<B: LinearOps>(
    modules: &[(usize, usize)],
    values: &[TensorData],
    dtype: DType,
    device: &B::Device,
) -> [Vec<f64>; 3] {
    let mut values = values.iter();
    let mut next = || {
        let values = values.next().expect("a matrix for every operand").clone();
        Tensor::<B, 2>::from_data(values, (device, DType::F32)).cast(DType::BF16).cast(DType::F32)
    };
    let (x, up, norm) = (next().cast(dtype), next().cast(dtype), next());
    let (mut group, mut first) = (Vec::new(), 0);
    for &(width, rank) in modules {
        let weight = Weight::Dense(next());
        let adapter = (rank > 0).then(|| Adapter { a: next(), b: next(), scale: 2.0, magnitude: None });
        let columns = first..first + width;
        first += width;
        group.push(Module { columns, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter });
    }
    let group = Group { modules: group, parts: vec![first], gemms: GemmFormat::Compute, dropout: None, rows: None };
    let weight = norm.clone().reshape([norm.dims()[1]]);
    let norm = NormWeight { weight, offset: 1.0, epsilon: 1e-5, trains: false };
    [
        Prologue::None { x: x.clone() },
        Prologue::Norm { x: x.clone(), norm },
        Prologue::Gated { gate: x, up, activation: Activation::Silu },
    ]
    .map(|prologue| host(B::project(prologue, &group, Epilogue::None, Keep::Nothing).0.remove(0)))
}

#[test]
fn adapters_over_few_rows_are_those_of_the_reference_after_every_prologue() {
    let Some(device) = device() else { return };
    // Tails of rows, ranks and columns; one part of the columns and several; the last case has more rows than these kernels take.
    let cases: [Case; 8] = [
        ([1, 1024], &[(512, 16), (128, 16), (128, 16)]),
        ([8, 2312], &[(48, 3), (64, 0), (64, 5)]),
        ([64, 4096], &[(512, 16), (128, 16), (128, 16)]),
        ([65, 14_336], &[(256, 16)]),
        ([83, 1032], &[(256, 24), (256, 8)]),
        ([256, 4096], &[(256, 1)]),
        ([256, 6144], &[(64, 100), (64, 60)]),
        ([257, 4096], &[(256, 16)]),
    ];
    for ([tokens, inputs], modules) in cases {
        let mut values = vec![random([tokens, inputs], 1.0), random([tokens, inputs], 1.0), random([1, inputs], 0.2)];
        // The adapters' part is about as large as that of the base.
        let size = 1.0 / (inputs as f64).sqrt();
        for &(width, rank) in modules {
            values.push(random([width, inputs], size));
            if rank > 0 {
                values.extend([random([rank, inputs], size), random([width, rank], 0.5 / (rank as f64).sqrt())]);
            }
        }
        let expected = outputs::<Flex>(modules, &values, DType::F32, &Default::default());
        for &dtype in halves(&device) {
            let got = outputs::<Cuda>(modules, &values, dtype, &device);
            let again = outputs::<Cuda>(modules, &values, dtype, &device);
            assert!(got == again, "{modules:?}: two runs differ");
            for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let (slope, noise) = slope_and_noise(got, expected);
                let what = format!("{tokens} rows of {inputs}, {modules:?}, {dtype:?}, prologue {index}");
                assert!((slope - 1.0).abs() < 5e-3 && noise < 0.01, "{what}: slope {slope}, noise {noise}");
            }
        }
    }
}
