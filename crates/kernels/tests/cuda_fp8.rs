//! GEMMs in 8-bit floats on a real device: against the reference, which rounds in the same way, against exact results, and the accuracy of an adapter
//! next to codes, from the smallest to the largest in training. Part of the GPU suite; `--nocapture` prints the tables.
//! Trade-off: random inputs; one column 50 times larger than the others represents the outliers of trained models.
#![cfg(feature = "cuda")]

#[allow(dead_code, reason = "each program compiles all of a module of which it needs a part")]
mod card;
mod noise;

use std::cell::RefCell;

use burn_flex::Flex;
use burn_tensor::{DType, Tensor, TensorData};
use firebrick_arch::Activation;
use firebrick_kernels::backends::cuda::{Cuda, RowScaling, block_scales, scale_rows};
use firebrick_kernels::{
    Adapter, Epilogue, ExpertRows, GemmFormat, Group, InputGradient, Keep, LinearOps, MatrixScales, Module, NormOps,
    NormWeight, Prologue, QuantizedWeight, RunShape, Session, Weight, WeightGradient, matrix_scales,
};
use firebrick_precision::QuantFormat;
use firebrick_precision::difference::is_within;

use card::{Device, has_fp8};
use noise::{host, random, slope_and_noise};

type Matrix = Tensor<Cuda, 2>;

const TOKENS: usize = 256;
const RANK: usize = 16;
/// Rows of experts: more than a tile, few, one, and none.
const COUNTS: [usize; 6] = [130, 0, 3, 122, 0, 1];
/// The storage format of most runs.
const NF4: Option<QuantFormat> = Some(QuantFormat::Nf4 { double_quant: true });

/// Returns the device for one test, if it multiplies 8-bit floats.
#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn device() -> Option<Device> {
    let device = card::device()?;
    if let Err(reason) = has_fp8(&device) {
        eprintln!("skipped: {reason}");
        return None;
    }
    Some(device)
}

/// Runs `run` with scales as each generation of cards applies them, as far as this card can.
fn in_every_way(device: &Device, run: impl Fn(RowScaling)) {
    let default_scaling = scale_rows(device, RowScaling::Afterwards);
    run(RowScaling::Afterwards);
    if let RowScaling::InGemm { .. } = default_scaling {
        let powers = RowScaling::InGemm { powers_of_two: true };
        scale_rows(device, powers);
        run(powers);
    }
    scale_rows(device, default_scaling);
    run(default_scaling);
}

#[derive(Clone)]
struct Inputs {
    x: TensorData,
    dy: TensorData,
    weight: TensorData,
    /// A, B and scale of each adapter.
    pairs: Vec<(TensorData, TensorData, f64)>,
    /// Output and input features, of one expert in a stack.
    shape: [usize; 2],
    /// Rows of each expert; empty if the modules are no stacks.
    counts: Vec<usize>,
}

impl Inputs {
    /// Creates modules side by side, `out` wide together, with adapters of `a` and `b` in size; or with `counts`, stacks of experts with these rows.
    fn new(shape: [usize; 2], modules: usize, [a, b]: [f64; 2], scale: f64, counts: &[usize]) -> Self {
        let ([out, inputs], matrices) = (shape, counts.len().max(1));
        let mut x = Tensor::<Flex, 2>::from_data(random([TOKENS, inputs], 1.0), &Default::default());
        let outlier = x.clone().narrow(1, 7, 1).mul_scalar(50.0);
        x = x.slice_assign([0..TOKENS, 7..8], outlier);
        let pair = |_| {
            let [a, b] = [random([matrices * RANK, inputs], a), random([matrices * out / modules, RANK], b)];
            (a, b, scale)
        };
        let pairs = if a > 0.0 { (0..modules).map(pair).collect() } else { Vec::new() };
        let (dy, weight) = (random([TOKENS, out], 1e-3), random([matrices * out, inputs], 0.02));
        Self { x: x.into_data(), dy, weight, pairs, shape, counts: counts.to_vec() }
    }

    /// Builds the group; `base` is the storage format of the weight, `None` for dense.
    fn group<B: LinearOps>(&self, gemms: GemmFormat, base: Option<QuantFormat>, device: &B::Device) -> Group<B> {
        let [out, inputs] = self.shape;
        let modules = self.pairs.len().max(1);
        let (width, matrices) = (out / modules, self.counts.len().max(1));
        let rows = (!self.counts.is_empty()).then(|| ExpertRows::of_counts(self.counts.clone(), device));
        let whole = Tensor::<B, 2>::from_data(self.weight.clone(), (device, DType::F32));
        let module = |index: usize| {
            let all = matrices * width;
            let values = whole.clone().narrow(0, index * all, all);
            let weight = if let Some(format) = base {
                let host: Vec<f32> = values.into_data().to_vec().unwrap();
                let quantized = format.quantize(&host, &[all, inputs]).unwrap();
                Weight::Quantized(QuantizedWeight::<B>::upload(&quantized, device))
            } else {
                Weight::Dense(values)
            };
            let adapter = self.pairs.get(index).map(|(a, b, scale)| {
                let [a, b] = [a, b].map(|values| Tensor::from_data(values.clone(), (device, DType::F32)));
                Adapter { a, b, scale: *scale, magnitude: None }
            });
            let columns = index * width..(index + 1) * width;
            Module { columns, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter }
        };
        Group { modules: (0..modules).map(module).collect(), parts: vec![out], gemms, dropout: None, rows }
    }

    /// Computes the output, the gradient of the input, and the gradients of all factors, from x and dy in `dtype`.
    fn run<B: LinearOps>(
        &self,
        gemms: GemmFormat,
        base: Option<QuantFormat>,
        dtype: DType,
        device: &B::Device,
    ) -> Vec<Vec<f64>> {
        let group = self.group::<B>(gemms, base, device);
        let [x, dy] = [&self.x, &self.dy].map(|values| Tensor::<B, 2>::from_data(values.clone(), (device, DType::F32)));
        // Round to bf16 on every backend.
        let [x, dy] = [x, dy].map(|values| values.cast(DType::BF16).cast(dtype));
        let (mut outputs, saved) = B::project(Prologue::None { x }, &group, Epilogue::None, Keep::Inputs);
        let gradients = B::project_backward(*saved.unwrap(), group, vec![dy], None);
        let InputGradient::Plain(dx) = gradients.input else { unreachable!("the prologue is plain") };
        let factors = gradients.modules.into_iter().filter_map(|module| module.adapter).flat_map(|(a, b)| [a, b]);
        [outputs.remove(0), dx].into_iter().chain(factors).map(host).collect()
    }
}

#[test]
fn products_equal_the_reference_and_are_near_the_exact_ones() {
    let Some(device) = device() else { return };
    eprintln!("| scales | weight | base | what | against the reference: slope, noise | against exact |");
    // Widths with a tail in every tile, and widths of real models.
    for (shape, modules) in [([48, 80], 1), ([144, 272], 3), ([1536, 1024], 3), ([512, 2048], 1)] {
        let stored = QuantFormat::ALL.into_iter().filter(|format| format.check_columns(shape[1]).is_ok());
        for base in stored.map(Some).chain([None]) {
            let adapted = [1.0 / (shape[1] as f64).sqrt(), 0.01];
            products_are_right(&Inputs::new(shape, modules, adapted, 2.0, &[]), base, &device);
        }
    }
    // Without adapters, at a width that is padded.
    products_are_right(&Inputs::new([80, 48], 1, [0.0; 2], 1.0, &[]), None, &device);
}

/// On Hopper all experts are one launch, elsewhere each is a GEMM; the reference computes one after the other.
#[test]
fn products_of_experts_equal_the_reference_and_experts_without_rows_have_no_gradient() {
    let Some(device) = device() else { return };
    // Inner widths of less than a step, of whole steps and with a rest, with tails in every tile; and widths of a real model.
    for (shape, modules) in [([48, 80], 1), ([96, 80], 2), ([384, 256], 2), ([1536, 1024], 2), ([1024, 768], 1)] {
        let matrix = [shape[0] / modules, shape[1]];
        let stored = QuantFormat::ALL.into_iter().filter(|format| {
            format.check_columns(shape[1]).is_ok() && matrix_scales(*format, matrix) == MatrixScales::OfFormat
        });
        for base in stored.map(Some).chain([None]) {
            let adapted = [1.0 / (shape[1] as f64).sqrt(), 0.01];
            let inputs = Inputs::new(shape, modules, adapted, 2.0, &COUNTS);
            products_are_right(&inputs, base, &device);
            let got = inputs.run::<Cuda>(GemmFormat::Fp8, base, DType::BF16, &device);
            for (index, factor) in got[2..].iter().enumerate() {
                let all_zero = |part: &[f64]| part.iter().all(|value| *value == 0.0);
                let of_experts: Vec<bool> = factor.chunks(factor.len() / COUNTS.len()).map(all_zero).collect();
                assert_eq!(of_experts, COUNTS.map(|count| count == 0), "{shape:?} {base:?}: factor {index}");
            }
            let again = inputs.run::<Cuda>(GemmFormat::Fp8, base, DType::BF16, &device);
            assert!(got == again, "{shape:?} {base:?}: two calls gave other bytes");
        }
    }
    products_are_right(&Inputs::new([80, 48], 1, [0.0; 2], 1.0, &COUNTS), None, &device);
}

#[expect(clippy::print_stderr, reason = "the table is what --nocapture is for")]
fn products_are_right(inputs: &Inputs, base: Option<QuantFormat>, device: &Device) {
    let cpu = &Default::default();
    let same = inputs.run::<Flex>(GemmFormat::Fp8, base, DType::F32, cpu);
    let exact = inputs.run::<Flex>(GemmFormat::Compute, base, DType::F32, cpu);
    let (shape, stored) = (inputs.shape, base.map_or("dense", QuantFormat::name));
    in_every_way(device, |way| {
        let got = inputs.run::<Cuda>(GemmFormat::Fp8, base, DType::BF16, device);
        // The scales of the reference are not powers of two, and powers of two give different codes.
        let has_powers = matches!(way, RowScaling::InBlocks | RowScaling::InGemm { powers_of_two: true });
        // Powers of two also round an outlier, which a row's exact scale preserves: half of `y` comes from one column,
        // so its slope varies by about 1 % between draws (0.978 at worst, where NVFP4 alone has 0.990).
        let [most_off, most_noise, far_off] = if has_powers { [0.03, 0.06, 0.03] } else { [0.01, 0.035, 0.02] };
        for ((name, got), (same, exact)) in ["y", "dx", "dA", "dB"].iter().zip(&got).zip(same.iter().zip(&exact)) {
            let [against, to_exact] = [same, exact].map(|other| slope_and_noise(got, other));
            eprintln!("| {way:?} | {shape:?} | {stored} | {name} | {against:.4?} | {to_exact:.4?} |");
            // One difference remains in both: the device quantizes gradients of a group of modules together.
            let is_same = (against.0 - 1.0).abs() < most_off && against.1 < most_noise;
            assert!(is_same, "{way:?} {shape:?} {stored} {name}: {against:?}");
            let is_near = (to_exact.0 - 1.0).abs() < far_off && to_exact.1 < 0.06;
            assert!(is_near, "{way:?} {shape:?} {stored} {name}: {to_exact:?}");
        }
    });
}

/// Tests every power of two that a row may have, a row with a NaN, and partial tiles.
#[test]
fn scales_of_blocks_lie_where_the_layout_has_them() {
    let Some(device) = device() else { return };
    for (rows, width) in [(1, 32), (130, 96), (300, 256), (128, 4224)] {
        let powers = (0..rows).map(|row| if row == 5 { f32::NAN } else { 2.0_f32.powi(row % 200 - 100) });
        let scales: Vec<f32> = powers.collect();
        let on_device = Tensor::from_data(TensorData::new(scales.clone(), [scales.len()]), (&device, DType::F32));
        let got = block_scales(on_device, width);
        // Tiles of 128 rows by four blocks, with rows 16 bytes apart, and rows 32 apart side by side.
        let place = |row: usize, block: usize| {
            let tile = row / 128 * width.div_ceil(128) + block / 4;
            tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
        };
        assert_eq!(got.len(), scales.len().next_multiple_of(128) * width.div_ceil(128) * 4);
        for (row, scale) in scales.iter().enumerate() {
            let expected = if scale.is_nan() { 0xff } else { (row % 200 + 27) as u8 };
            for block in 0..width / 32 {
                assert_eq!(got[place(row, block)], expected, "row {row}, block {block} of {rows} x {width}");
            }
        }
    }
}

#[test]
fn weights_that_stay_on_the_device_change_no_bit() {
    let Some(device) = device() else { return };
    [GemmFormat::Fp8, GemmFormat::Compute].into_iter().for_each(|gemms| kept_weights_change_no_bit(gemms, &device));
}

fn kept_weights_change_no_bit(gemms: GemmFormat, device: &Device) {
    let first = Inputs::new([512, 1024], 2, [0.03, 0.01], 2.0, &[]);
    let other = changed(&first, first.weight.clone(), 0.5);
    let run = |inputs: &Inputs, group: &Group<Cuda>| {
        let x = Matrix::from_data(inputs.x.clone(), (device, DType::BF16));
        let dy = Matrix::from_data(inputs.dy.clone(), (device, DType::BF16));
        let (mut outputs, saved) = Cuda::project(Prologue::None { x }, group, Epilogue::None, Keep::Inputs);
        let gradients = Cuda::project_backward(*saved.unwrap(), group.clone(), vec![dy], None);
        [host(outputs.remove(0)), host(gradients.input.plain())]
    };
    let group = first.group::<Cuda>(gemms, NF4, device);
    // The same weights with another adapter, and without any.
    let mut changed = other.group::<Cuda>(gemms, NF4, device);
    for (module, kept) in changed.modules.iter_mut().zip(&group.modules) {
        module.weight = kept.weight.clone();
    }
    let mut bare = group.clone();
    bare.modules.iter_mut().for_each(|module| module.adapter = None);
    let all = || [run(&first, &group), run(&other, &changed), run(&first, &bare)];
    let without = all();
    Cuda::open(device, &RunShape { kept_bytes: [1 << 30; 2], ..RunShape::default() });
    for _ in 0..2 {
        assert!(without == all(), "{gemms:?}: kept weights gave other results");
    }
    Cuda::release_memory(device);
    Cuda::open(device, &RunShape::default());
    assert!(without == all(), "{gemms:?}: and so after they were released");
}

#[test]
fn operations_that_write_codes_change_no_bit_of_them() {
    let Some(device) = device() else { return };
    // The last row is too wide for a block's registers, and takes the other code path. Wide rows of the norm and of the gated activation are separate
    // cases: weights that are wide both ways have 400 million values, which the host makes and quantizes.
    for (hidden, width) in [(80, 48), (1024, 2816), (8192, 48), (128, 14_336), (128, 16_400)] {
        for base in [NF4, None] {
            let pair = 1.0 / (hidden as f64).sqrt();
            let up = Inputs::new([2 * width, hidden], 2, [pair, 0.01], 2.0, &[]);
            let down = Inputs::new([hidden, width], 1, [pair, 0.01], 2.0, &[]);
            together_is_as_apart(&up, &down, base, &device);
        }
    }
}

#[test]
fn operations_that_write_codes_of_experts_rows_change_no_bit_of_them() {
    let Some(device) = device() else { return };
    for (hidden, width) in [(80, 48), (2048, 768)] {
        let pair = 1.0 / (hidden as f64).sqrt();
        let up = Inputs::new([2 * width, hidden], 2, [pair, 0.01], 2.0, &COUNTS);
        let down = Inputs::new([hidden, width], 1, [pair, 0.01], 2.0, &COUNTS);
        together_is_as_apart(&up, &down, None, &device);
    }
}

fn together_is_as_apart(up: &Inputs, down: &Inputs, base: Option<QuantFormat>, device: &Device) {
    let mlps = [true, false].map(|together| mlp(up, down, base, together, device));
    for (index, (together, apart)) in mlps[0].iter().zip(&mlps[1]).enumerate() {
        let what = format!("result {index}, weights {:?} and {:?}, {base:?}", up.shape, down.shape);
        // The gradients of A of gate and up are sums over the norm's input, and rounded at a different place.
        if [4, 6].contains(&index) {
            let (slope, noise) = slope_and_noise(together, apart);
            assert!((slope - 1.0).abs() < 2e-3 && noise < 5e-3, "{what}: slope {slope}, noise {noise}");
        } else {
            assert!(together == apart, "{what}");
        }
    }
}

/// Computes the output and the gradients of the input and of the factors of norm, gate, up and down, with operations that write codes, or separately.
/// Rows of experts are normalized before they are sorted, so their norm is separate in both.
fn mlp(up: &Inputs, down: &Inputs, base: Option<QuantFormat>, together: bool, device: &Device) -> Vec<Vec<f64>> {
    let [gate_up, down_group] = [up, down].map(|inputs| inputs.group::<Cuda>(GemmFormat::Fp8, base, device));
    let width = down.shape[1];
    let gate_up = Group { parts: vec![width; 2], ..gate_up };
    let half = |values: &TensorData| Matrix::from_data(values.clone(), (device, DType::BF16));
    let (x, dy, activation) = (half(&up.x), half(&down.dy), Activation::Silu);
    let weight = Tensor::<Cuda, 1>::ones([x.dims()[1]], (device, DType::F32));
    let norm = NormWeight { weight, offset: 0.0, epsilon: 1e-5, trains: false };
    let ran = Cuda::section(device, || {
        let has_norm = together && up.counts.is_empty();
        let normed = if has_norm {
            Prologue::Norm { x: x.clone(), norm: norm.clone() }
        } else {
            Prologue::None { x: Cuda::rms_norm(x.clone(), &norm, None) }
        };
        let (parts, up_saved) = Cuda::project(normed, &gate_up, Epilogue::None, Keep::Inputs);
        let [gate, up]: [_; 2] = parts.try_into().unwrap();
        let activated = if together {
            Prologue::Gated { gate: gate.clone(), up: up.clone(), activation }
        } else {
            Prologue::None { x: Cuda::gated(gate.clone(), up.clone(), activation) }
        };
        let (y, saved) = Cuda::project(activated, &down_group, Epilogue::None, Keep::Inputs);

        let (saved, up_saved) = (*saved.unwrap(), *up_saved.unwrap());
        let (of_input, mut modules, of_up);
        if together {
            modules = Vec::new();
            let groups = [(up_saved, gate_up.clone()), (saved, down_group)];
            let gradients = Cuda::mlp_backward(groups, dy, None, |of_down, _| modules = of_down);
            (of_input, of_up) = (gradients.input.plain(), gradients.modules);
        } else {
            let of_down = Cuda::project_backward(saved, down_group, vec![dy], None);
            let (d_gate, d_up) = Cuda::gated_backward(gate, up, activation, of_down.input.plain());
            let gradients = Cuda::project_backward(up_saved, gate_up.clone(), vec![d_gate, d_up], None);
            (of_input, modules, of_up) = (gradients.input.plain(), of_down.modules, gradients.modules);
        }
        let dx = if has_norm { of_input } else { Cuda::rms_norm_backward(x, &norm, of_input, None).0 };
        modules.extend(of_up);
        let factors = modules.into_iter().filter_map(|module| module.adapter).flat_map(|(a, b)| [a, b]);
        y.into_iter().chain([dx]).chain(factors).collect::<Vec<_>>()
    });
    ran.into_iter().map(host).collect()
}

/// Computes the adapter's contribution to the output and to the input gradient: differences between runs from whose
/// results most of the base's is subtracted before they are rounded to bf16.
fn contribution(with: &Inputs, without: &Inputs, device: &Device) -> Vec<Vec<f64>> {
    let run = |inputs: &Inputs, away: Option<[Matrix; 2]>| -> [Matrix; 2] {
        let group = inputs.group::<Cuda>(GemmFormat::Fp8, NF4, device);
        let [x, dy] = [&inputs.x, &inputs.dy].map(|values| Matrix::from_data(values.clone(), (device, DType::BF16)));
        let [y_away, dx_away] = away.map_or([None, None], |pair| pair.map(Some));
        let epilogue = y_away.map_or(Epilogue::None, Epilogue::Residual);
        let (mut outputs, saved) = Cuda::project(Prologue::None { x }, &group, epilogue, Keep::Inputs);
        let gradients = Cuda::project_backward(*saved.unwrap(), group, vec![dy], dx_away);
        [outputs.remove(0), gradients.input.plain()]
    };
    let away = run(without, None).map(|values| values.neg());
    let [base, adapted] = [without, with].map(|inputs| run(inputs, Some(away.clone())).map(host));
    adapted.iter().zip(&base).map(|(with, base)| with.iter().zip(base).map(|(a, b)| a - b).collect()).collect()
}

/// A learning rate of 1e-6 after its first step, some training, and large adapters at alpha / r = 16.
const SIZES: [(f64, f64); 4] = [(1e-6, 2.0), (1e-4, 2.0), (1e-2, 2.0), (5e-2, 16.0)];

/// Returns a square weight with an adapter whose A has its initial values.
fn adapted(b: f64, scale: f64) -> Inputs {
    Inputs::new([4096, 4096], 1, [1.0 / (3.0 * 4096.0_f64).sqrt(), b], scale, &[])
}

/// Returns the inputs with B times a factor, and another weight.
fn changed(inputs: &Inputs, weight: TensorData, b: f64) -> Inputs {
    let pairs = inputs.pairs.iter().map(|(a, of_b, scale)| (a.clone(), times(of_b, b), *scale)).collect();
    Inputs { weight, pairs, counts: Vec::new(), ..inputs.clone() }
}

#[test]
fn adapters_arrive_next_to_the_sums_of_the_base() {
    let Some(device) = device() else { return };
    eprintln!("| B, alpha / r | y: slope, noise of the adapter's part | dx: the same |");
    let wrong = RefCell::new(Vec::new());
    for (b, scale) in SIZES {
        let with = adapted(b, scale);
        let without = changed(&with, with.weight.clone(), 0.0);
        let only = changed(&with, TensorData::zeros::<f32, _>(with.shape), 1.0);
        let exact = only.run::<Flex>(GemmFormat::Compute, None, DType::F32, &Default::default());
        in_every_way(&device, |way| {
            let got = contribution(&with, &without, &device);
            let parts = [0, 1].map(|index| slope_and_noise(&got[index], &exact[index]));
            eprintln!("| {way:?}, {b:e}, {scale} | {:.4?} | {:.4?} |", parts[0], parts[1]);
            // Sums of 8-bit products keep about 14 bits. For values that are small in comparison, that is noise, but no loss.
            let bound = 0.05 + 1e-5 / b;
            let beyond = parts.into_iter().filter(|(slope, _)| !is_within((slope - 1.0).abs(), bound));
            wrong.borrow_mut().extend(beyond.map(|part| (way, b, part)));
        });
    }
    let wrong = wrong.into_inner();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn codes_of_adapters_of_any_size_are_neither_saturated_nor_zero() {
    let Some(device) = device() else { return };
    const BLANK: usize = 64;
    for (b, scale) in SIZES {
        // Tokens whose values meet zeros of the weight: their output is the adapter's alone, under the base's scales.
        let mut inputs = adapted(b, scale);
        let cpu = Default::default();
        let part = |values: &TensorData, first: usize, count: usize| {
            let values = Tensor::<Flex, 2>::from_data(values.clone(), &cpu);
            let rows = values.dims()[0];
            values.slice_assign([0..rows, first..first + count], Tensor::zeros([rows, count], (&cpu, DType::F32)))
        };
        inputs.weight = part(&inputs.weight, 0, BLANK).into_data();
        inputs.x = part(&inputs.x, BLANK, inputs.shape[1] - BLANK).into_data();
        let exact = inputs.run::<Flex>(GemmFormat::Compute, NF4, DType::F32, &cpu);
        in_every_way(&device, |way| {
            let got = inputs.run::<Cuda>(GemmFormat::Fp8, NF4, DType::BF16, &device);
            let (slope, noise) = slope_and_noise(&got[0], &exact[0]);
            eprintln!("{way:?}, B {b:e} at {scale}: slope {slope:.4}, noise {noise:.4}");
            let is_there = (slope - 1.0).abs() < 0.02 && noise < 0.1;
            assert!(is_there, "{way:?}, B {b:e} at {scale}: slope {slope}, noise {noise}");
        });
    }
}

fn times(values: &TensorData, factor: f64) -> TensorData {
    Tensor::<Flex, 2>::from_data(values.clone(), &Default::default()).mul_scalar(factor).into_data()
}
