//! Compares the 8-bit AdamW training step with results of bitsandbytes' CUDA kernel and with the reference of
//! firebrick-precision, for the test programs of all backends.
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
use firebrick_precision::{
    AdamW8bit, AdamW8bitState, BlockwiseQuantized, DynamicMap, adamw_8bit_reference, blockwise::BLOCK_SIZE,
};
use safetensors::SafeTensors;

/// Embedded in the program, so that it runs on machines without the sources.
const GOLDEN: &[u8] = include_bytes!("../../../precision/tests/golden/adamw_8bit_cuda.safetensors");
const GOLDEN_ELEMENTS: usize = 3 * BLOCK_SIZE + 100;
const GOLDEN_STEPS: u32 = 4;
/// Positions of a NaN and an infinity in the gradient of step 2.
const NON_FINITE: std::ops::Range<usize> = 600..602;

type HostState = (Vec<f32>, AdamW8bitState);

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

fn device_step<B: Kernels>(
    (parameters, moments): &HostState,
    gradients: &[f32],
    step: u32,
    config: &AdamW8bit,
) -> HostState {
    let (signed, unsigned) = (DynamicMap::signed(), DynamicMap::unsigned());
    let state = AdamWState {
        parameter: upload_f32(parameters),
        moments: Moments::EightBit(Box::new(EightBitMoments {
            first_codes: upload_codes(&moments.first.codes, signed),
            first_absmax: upload_f32(&moments.first.absmax),
            second_codes: upload_codes(&moments.second.codes, unsigned),
            second_absmax: upload_f32(&moments.second.absmax),
        })),
    };
    let hyper = AdamW {
        learning_rate: f64::from(config.learning_rate),
        beta1: f64::from(config.beta1),
        beta2: f64::from(config.beta2),
        epsilon: f64::from(config.eps),
        weight_decay: f64::from(config.weight_decay),
        step: u64::from(step),
    };
    let scale = upload_f32::<B>(&[config.gradient_scale]);
    let mut updated = B::adamw_foreach(vec![state], vec![upload_f32(gradients)], scale, &hyper);
    let AdamWState { parameter, moments: Moments::EightBit(moments) } = updated.remove(0) else {
        panic!("moments keep their format")
    };
    let first = download(moments.first_codes, moments.first_absmax, parameters.len());
    let second = download(moments.second_codes, moments.second_absmax, parameters.len());
    (parameter.into_data().to_vec().unwrap(), AdamW8bitState { first, second })
}

/// Asserts that two results differ only by rounding, and returns how many codes differ, by one. Codes of zero blocks
/// are not compared, because with a scale of 0 every code means 0.
fn assert_equal_up_to_rounding(got: &HostState, expected: &HostState, case: &str) -> usize {
    assert!(relative_difference(&got.0, &expected.0) < 3e-7, "{case}: parameters");
    let moments = [(&got.1.first, &expected.1.first), (&got.1.second, &expected.1.second)];
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
        return (bell(30, GOLDEN_ELEMENTS), AdamW8bitState::zeros(GOLDEN_ELEMENTS));
    }
    let bytes = |name: &str| file.tensor(&format!("step{step}.{name}")).unwrap().data().to_vec();
    let floats =
        |name: &str| -> Vec<f32> { bytes(name).as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect() };
    let moment = |codes: &str, absmax: &str| BlockwiseQuantized { codes: bytes(codes), absmax: floats(absmax) };
    let state = AdamW8bitState { first: moment("codes1", "absmax1"), second: moment("codes2", "absmax2") };
    (floats("parameters"), state)
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
        let config = AdamW8bit { gradient_scale: if step == 3 { 0.5 } else { 1.0 }, ..AdamW8bit::default() };
        let got = device_step::<B>(&before, &golden_gradients(step), step, &config);
        different += assert_equal_up_to_rounding(&got, &expected, &format!("step {step}"));
        if step == 2 {
            assert_eq!(got.0[NON_FINITE], before.0[NON_FINITE], "a non-finite gradient leaves its parameter as it was");
            assert_eq!(got.1.first.codes[NON_FINITE], expected.1.first.codes[NON_FINITE]);
            assert_eq!(got.1.second.codes[NON_FINITE], expected.1.second.codes[NON_FINITE]);
        }
    }
    let total = GOLDEN_ELEMENTS * 2 * GOLDEN_STEPS as usize;
    assert!(different * 1000 <= total, "{different} of {total} codes differ by one");
}

/// Asserts that each of many steps equals that of the reference on the host.
pub(crate) fn assert_many_steps<B: Kernels>() {
    let elements = 20 * BLOCK_SIZE + 33;
    let mut state = (bell(50, elements), AdamW8bitState::zeros(elements));
    let config = AdamW8bit { learning_rate: 1e-2, ..AdamW8bit::default() };
    let mut different = 0;
    for step in 1..=10 {
        let mut gradients = scaled(bell(60 + u64::from(step), elements), 0.1);
        if step == 5 {
            gradients[3000] = f32::NEG_INFINITY;
        }
        let got = device_step::<B>(&state, &gradients, step, &config);
        adamw_8bit_reference(&mut state.0, &gradients, &mut state.1, step, &config);
        different += assert_equal_up_to_rounding(&got, &state, &format!("step {step}"));
    }
    assert!(different * 1000 <= elements * 2 * 10, "{different} codes differ by one");
}
