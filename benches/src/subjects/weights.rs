//! Quantizing and dequantizing a weight in every format.
//!
//! The reference dequantizes the result of quantizing, which is compared with the host codec's result for the same values.
//! Trade-off: a device that does not quantize itself is timed with the copies to the host and back.

use burn_tensor::DType;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::weights::reference;
use firebrick_kernels::{Kernels, QuantizedWeight};
use firebrick_precision::QuantFormat;

use super::{Setting, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, key, to_reference, work};

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let formats = QuantFormat::ALL.into_iter().flat_map(|format| [(format, false), (format, true)]);
    formats.map(|(format, dequantize)| case(setting, format, dequantize)).collect()
}

fn case<B: Kernels>(setting: &Setting<B>, format: QuantFormat, dequantize: bool) -> Case<B> {
    let (model, device) = (setting.model(), setting.device.clone());
    let [_, (_, [inputs, outputs]), ..] = model.groups();
    let values = (outputs * inputs) as f64;
    let coded = values * format.bits_per_value() / 8.0;
    let (subject, pass) = if dequantize { ("dequantize", "to_f32") } else { ("quantize", "from_f32") };
    let sizes = [("out", outputs), ("in", inputs)];
    let prepare = move || {
        let (values, device) = (random::<B, 2>([outputs, inputs], 0.2, DType::F32, &device), device.clone());
        let of_check = values.clone();
        let expected = move || reference::dequantize(&reference::quantize::<Flex>(to_reference(of_check), format));
        if dequantize {
            let weight: QuantizedWeight<B> = B::section(&device, || B::quantize_weight(values, format));
            let call = move || Output::Tensors(vec![B::section(&device, || B::dequantize_weight(&weight))]);
            return Prepared::new(call, move |output: Output<B>| {
                vec![Comparison::of_tensors("values", output.tensors().remove(0), expected())]
            });
        }
        let call = move || Output::Weight(B::section(&device, || B::quantize_weight(values.clone(), format)));
        Prepared::new(call, move |output: Output<B>| {
            vec![Comparison::of_tensors("codes", B::dequantize_weight(&output.weight()), expected())]
        })
    };
    Case {
        key: key(subject, pass, &format!("o of {}", model.name()), format.name(), &sizes),
        // A multiplication by the scale; the search for the nearest code counts as four more.
        work: work(values, "values", if dequantize { values } else { 5.0 * values }, 4.0 * values + coded),
        axis: None,
        tolerance: tolerance(DType::F32),
        set_bytes: if dequantize { coded } else { 4.0 * values },
        prepare: Box::new(prepare),
    }
}
