//! Quantizing and dequantizing a weight in every format.
//!
//! The result of quantizing is dequantized by the reference and compared with what the host's codec makes of the same values.
//! Trade-off: a device that does not quantize itself is timed with the copies to the host and back.

use burn_tensor::DType;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::weights::reference;
use firebrick_kernels::{Kernels, QuantizedWeight};
use firebrick_precision::QuantFormat;

use super::super::case::{Case, Comparison, Output, Prepared, key, to_reference};
use super::super::results::Work;
use super::{Setting, random, tolerance};

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let model = setting.model();
    let [_, (_, [inputs, outputs]), ..] = model.groups();
    let mut cases = Vec::new();
    for format in QuantFormat::ALL {
        for dequantize in [false, true] {
            cases.push(case(setting, format, [outputs, inputs], &model.name(), dequantize));
        }
    }
    cases
}

fn case<B: Kernels>(
    setting: &Setting<B>,
    format: QuantFormat,
    [outputs, inputs]: [usize; 2],
    model: &str,
    dequantize: bool,
) -> Case<B> {
    let device = setting.device.clone();
    let values = (outputs * inputs) as f64;
    let (subject, pass) = if dequantize { ("dequantize", "to_f32") } else { ("quantize", "from_f32") };
    let coded = values * format.bits_per_value() / 8.0;
    let what = format!("o of {model}");
    Case {
        key: key(subject, pass, &what, format.name(), &[("out", outputs), ("in", inputs)]),
        // A multiplication by the scale; finding the nearest code is counted as four more.
        work: Work {
            flops: if dequantize { values } else { 5.0 * values },
            bytes: 4.0 * values + coded,
            units: values,
            unit: "values".to_owned(),
        },
        axis: None,
        tolerance: tolerance(DType::F32),
        set_bytes: if dequantize { coded } else { 4.0 * values },
        prepare: Box::new(move || prepare(&device, format, [outputs, inputs], dequantize)),
    }
}

fn prepare<B: Kernels>(device: &B::Device, format: QuantFormat, shape: [usize; 2], dequantize: bool) -> Prepared<B> {
    let values = random::<B, 2>(shape, 0.2, DType::F32, device);
    let expected = {
        let values = values.clone();
        move || reference::dequantize(&reference::quantize::<Flex>(to_reference(values), format))
    };
    let device = device.clone();
    if dequantize {
        let weight: QuantizedWeight<B> = B::section(&device, || B::quantize_weight(values, format));
        let call = move || Output::Tensors(vec![B::section(&device, || B::dequantize_weight(&weight))]);
        let check =
            move |output: Output<B>| vec![Comparison::of_tensors("values", output.tensors().remove(0), expected())];
        return Prepared { call: Box::new(call), check: Box::new(check) };
    }
    let call = move || Output::Weight(B::section(&device, || B::quantize_weight(values.clone(), format)));
    let check = move |output: Output<B>| {
        vec![Comparison::of_tensors("codes", B::dequantize_weight(&output.weight()), expected())]
    };
    Prepared { call: Box::new(call), check: Box::new(check) }
}
