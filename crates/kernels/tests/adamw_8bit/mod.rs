//! Compares the 8-bit AdamW training step with results of bitsandbytes' CUDA kernel, for the test programs of all backends.
//!
//! Golden files and the generator of their inputs are those of firebrick-precision (`crates/precision/tests`). Each
//! step starts from the golden state of the preceding one, so that a difference in rounding does not spread.
//! Trade-off: if a value lies between two codes, either is accepted.

#[path = "../../../precision/tests/common/mod.rs"]
#[expect(dead_code, reason = "some generators serve other formats")]
mod common;

use burn_tensor::{Int, IntDType, Tensor};
use common::{bell, relative_difference, scaled};
use firebrick_kernels::{AdamW, AdamWState, EightBitMoments, Kernels, Moments};
use firebrick_precision::{BlockwiseQuantized, DynamicMap, blockwise::BLOCK_SIZE};
use safetensors::SafeTensors;

/// Embedded in the program, so that it runs on machines without the sources.
const GOLDEN: &[u8] = include_bytes!("../../../precision/tests/golden/adamw_8bit_cuda.safetensors");
const GOLDEN_ELEMENTS: usize = 3 * BLOCK_SIZE + 100;
const GOLDEN_STEPS: u32 = 4;
/// Positions of a NaN and an infinity in the gradient of step 2.
const NON_FINITE: std::ops::Range<usize> = 600..602;

struct HostState {
    parameters: Vec<f32>,
    first: BlockwiseQuantized,
    second: BlockwiseQuantized,
}

/// Returns the hyperparameters of `make_goldens.py`, as the f32 that the kernel gets.
fn hyper(step: u32) -> AdamW {
    let [learning_rate, beta1, beta2, epsilon, weight_decay] = [1e-3_f32, 0.9, 0.999, 1e-8, 1e-2].map(f64::from);
    AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step: u64::from(step) }
}

fn upload_f32<B: Kernels>(values: &[f32]) -> Tensor<B, 1> {
    Tensor::from_floats(values, &Default::default())
}

/// Uploads codes, padded to whole blocks with the code of zero.
fn upload_codes<B: Kernels>(codes: &[u8], map: &DynamicMap) -> Tensor<B, 1, Int> {
    let mut codes = codes.to_vec();
    codes.resize(codes.len().next_multiple_of(BLOCK_SIZE), map.nearest(0.0));
    let codes = B::packed_codes(codes);
    let dtype = codes.dtype;
    Tensor::from_data(codes, (&Default::default(), dtype))
}

fn download<B: Kernels>(codes: Tensor<B, 1, Int>, absmax: Tensor<B, 1>, elements: usize) -> BlockwiseQuantized {
    let mut codes = B::unpacked_codes(codes.cast(IntDType::I32).into_data());
    codes.truncate(elements);
    BlockwiseQuantized { codes, absmax: absmax.into_data().to_vec().unwrap() }
}

fn device_step<B: Kernels>(before: &HostState, gradients: &[f32], gradient_scale: f32, step: u32) -> HostState {
    let state = AdamWState {
        parameter: upload_f32(&before.parameters),
        moments: Moments::EightBit(Box::new(EightBitMoments {
            first_codes: upload_codes(&before.first.codes, DynamicMap::signed()),
            first_absmax: upload_f32(&before.first.absmax),
            second_codes: upload_codes(&before.second.codes, DynamicMap::unsigned()),
            second_absmax: upload_f32(&before.second.absmax),
        })),
    };
    let scale = upload_f32::<B>(&[gradient_scale]);
    let mut updated = B::adamw_foreach(vec![state], vec![upload_f32(gradients)], scale, &hyper(step));
    let AdamWState { parameter, moments: Moments::EightBit(moments) } = updated.remove(0) else {
        panic!("moments keep their format")
    };
    let elements = before.parameters.len();
    HostState {
        parameters: parameter.into_data().to_vec().unwrap(),
        first: download(moments.first_codes, moments.first_absmax, elements),
        second: download(moments.second_codes, moments.second_absmax, elements),
    }
}

/// Asserts that two results differ only by rounding, and returns how many codes differ, by one. Codes of zero blocks
/// are not compared, because with a scale of 0 every code means 0.
fn assert_equal_up_to_rounding(got: &HostState, expected: &HostState, case: &str) -> usize {
    assert!(relative_difference(&got.parameters, &expected.parameters) < 3e-7, "{case}: parameters");
    let moments = [(&got.first, &expected.first), (&got.second, &expected.second)];
    let mut different = 0;
    for (got, expected) in moments {
        assert!(relative_difference(&got.absmax, &expected.absmax) < 1e-6, "{case}: scales");
        for (index, (got, code)) in got.codes.iter().zip(&expected.codes).enumerate() {
            if got != code && expected.absmax[index / BLOCK_SIZE] != 0.0 {
                assert_eq!(got.abs_diff(*code), 1, "{case}: code {index} differs by more than a rounding");
                different += 1;
            }
        }
    }
    different
}

fn golden_state(file: &SafeTensors<'_>, step: u32) -> HostState {
    if step == 0 {
        let absmax = vec![0.0; GOLDEN_ELEMENTS.div_ceil(BLOCK_SIZE)];
        let zeros = BlockwiseQuantized { codes: vec![0; GOLDEN_ELEMENTS], absmax };
        return HostState { parameters: bell(30, GOLDEN_ELEMENTS), first: zeros.clone(), second: zeros };
    }
    let bytes = |name: &str| file.tensor(&format!("step{step}.{name}")).unwrap().data().to_vec();
    let floats =
        |name: &str| -> Vec<f32> { bytes(name).as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect() };
    let moment = |codes: &str, absmax: &str| BlockwiseQuantized { codes: bytes(codes), absmax: floats(absmax) };
    let (first, second) = (moment("codes1", "absmax1"), moment("codes2", "absmax2"));
    HostState { parameters: floats("parameters"), first, second }
}

/// Returns the gradients of `make_goldens.py`: block 1 never has one, and those of step 2 include a NaN and an infinity.
fn golden_gradients(step: u32) -> Vec<f32> {
    let mut gradients = scaled(bell(30 + u64::from(step), GOLDEN_ELEMENTS), 0.01);
    gradients[256..512].fill(0.0);
    if step == 2 {
        gradients[NON_FINITE].copy_from_slice(&[f32::NAN, f32::INFINITY]);
    }
    gradients
}

/// Asserts that single steps equal those of bitsandbytes' CUDA kernel, including non-finite gradients.
pub(crate) fn assert_golden_steps<B: Kernels>() {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let mut different = 0;
    for step in 1..=GOLDEN_STEPS {
        let (before, expected) = (golden_state(&file, step - 1), golden_state(&file, step));
        let gradient_scale = if step == 3 { 0.5 } else { 1.0 };
        let got = device_step::<B>(&before, &golden_gradients(step), gradient_scale, step);
        different += assert_equal_up_to_rounding(&got, &expected, &format!("step {step}"));
        if step == 2 {
            let [got_values, expected_values] = [&got, &before].map(|state| &state.parameters[NON_FINITE]);
            assert_eq!(got_values, expected_values, "a non-finite gradient leaves its parameter as it was");
            assert_eq!(got.first.codes[NON_FINITE], expected.first.codes[NON_FINITE]);
            assert_eq!(got.second.codes[NON_FINITE], expected.second.codes[NON_FINITE]);
        }
    }
    let total = GOLDEN_ELEMENTS * 2 * GOLDEN_STEPS as usize;
    assert!(different * 1000 <= total, "{different} of {total} codes differ by one");
}
