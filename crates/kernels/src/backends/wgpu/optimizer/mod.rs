//! Sums and AdamW on wgpu, in place where no other tensor has the memory. Kernels: `sums.wgsl`, `adamw.wgsl`, `adamw_8bit.wgsl`.
//!
//! Trade-off: a launch per parameter.

use burn_tensor::{DType, Tensor, TensorData};
use cubecl::wgpu::WgpuDevice;
use firebrick_precision::DynamicMap;
use firebrick_precision::blockwise::BLOCK_SIZE;

use super::engine::{
    Cost, Engine, Kernel, Matrix, Operand, Wgpu, in_a_row, in_section, int_primitive, int_tensor, primitive, tensor,
};
use crate::OptimizerOps;
use crate::optimizer::{AdamW, AdamWState, EightBitMoments, Moments, RangeGradient, reference};

/// Values that one workgroup sums.
const PIECE: usize = 8192;
/// Tensors of one launch of sums: with the result as many operands as every adapter allows, less one.
const MAX_TENSORS: usize = 6;

fn pieces(values: &Matrix) -> usize {
    values.count().div_ceil(PIECE).max(1)
}

impl OptimizerOps for Wgpu {
    /// Four codes per word: WebGPU has no bytes.
    fn packed_codes(codes: Vec<u8>) -> TensorData {
        let words: Vec<i32> = codes.as_chunks::<4>().0.iter().map(|codes| i32::from_le_bytes(*codes)).collect();
        let count = words.len();
        TensorData::new(words, [count])
    }

    fn unpacked_codes(values: TensorData) -> Vec<u8> {
        values.iter::<i32>().flat_map(i32::to_le_bytes).collect()
    }

    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        in_section(|engine| {
            let ([count], [sum, gradient]) = (sum.dims(), [sum, gradient].map(|x| engine.matrix(x)));
            let y = if engine.is_unshared(&sum.tensor) { sum.clone() } else { engine.empty_matrix(1, count) };
            engine.add(&sum, Some(&gradient), &y);
            tensor::<1>(y.tensor).reshape([count])
        })
    }

    fn accumulate_ranges(
        sum: Option<Tensor<Self, 1>>,
        length: usize,
        gradients: Vec<RangeGradient<Self>>,
    ) -> Tensor<Self, 1> {
        in_section(|engine| {
            let total = match sum {
                Some(sum) => engine.owned(primitive(sum)),
                None => engine.empty_matrix(1, length),
            };
            for RangeGradient { start, gradient, is_first } in gradients {
                let gradient = engine.values(gradient);
                let to = total.columns(start, gradient.count());
                engine.add(&gradient, (!is_first).then_some(&to), &to);
            }
            total.into_values()
        })
    }

    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        in_section(|engine| {
            if tensors.iter().any(|tensor| tensor.dtype() != DType::F32) {
                return engine.pause(|| reference::squared_norm(tensors));
            }
            let values: Vec<Matrix> = tensors.iter().map(|tensor| engine.values(tensor.clone())).collect();
            let sums = engine.empty_matrix(1, values.iter().map(pieces).sum());
            let mut at = 0;
            for values in values.chunks(MAX_TENSORS) {
                let to = sums.columns(at, values.iter().map(pieces).sum());
                engine.partial_sums(values, None, ("SQUARE", 1), 1.0, &to);
                at += to.width;
            }
            engine.sum(&sums, None, 1.0).into_vector()
        })
    }

    fn adamw_foreach(
        states: Vec<AdamWState<Self>>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<AdamWState<Self>> {
        assert_eq!(states.len(), gradients.len(), "one gradient per parameter");
        in_section(|engine| {
            let scale = engine.matrix(gradient_scale);
            let has_codes = states.iter().any(|state| matches!(state.moments, Moments::EightBit(_)));
            let maps = has_codes.then(|| engine.matrix(maps()));
            let mut in_8_bits = Vec::new();
            let update = |(AdamWState { parameter, moments }, gradient): (AdamWState<Self>, Tensor<Self, 1>)| {
                let gradient = engine.f32_matrix(gradient);
                match moments {
                    Moments::F32 { first, second } => {
                        engine.adamw([parameter, first, second], &gradient, &scale, hyper)
                    }
                    Moments::EightBit(moments) => {
                        let (operands, state) = engine.operands_in_8_bits(parameter, *moments, gradient);
                        in_8_bits.push(operands);
                        state
                    }
                }
            };
            let states = states.into_iter().zip(gradients).map(update).collect();
            if let Some(maps) = &maps {
                let most = engine.most_operands().saturating_sub(2) / 6;
                in_8_bits.chunks(most.clamp(1, 3)).for_each(|some| engine.adamw_8bit(some, [&scale, maps], hyper));
            }
            states
        })
    }
}

impl Engine {
    /// Sums values, times others if given, and times `sign`: `[1, 1]`.
    pub(super) fn sum(&self, values: &Matrix, times: Option<&Matrix>, sign: f32) -> Matrix {
        let sums = self.empty_matrix(1, pieces(values));
        let mode = if times.is_some() { ("PRODUCT", 1) } else { ("PRODUCT", 0) };
        self.partial_sums(std::slice::from_ref(values), times, mode, sign, &sums);
        if sums.width > 1 { self.sum(&sums, None, 1.0) } else { sums }
    }

    fn partial_sums(
        &self,
        tensors: &[Matrix],
        times: Option<&Matrix>,
        mode: (&'static str, u32),
        sign: f32,
        sums: &Matrix,
    ) {
        let constants = vec![mode, ("PIECE", PIECE as u32), ("TENSORS", tensors.len() as u32)];
        let kernel = Kernel { name: "sum", template: include_str!("sums.wgsl"), constants };
        let mut operands: Vec<_> = tensors.iter().chain(times).map(Operand::Read).collect();
        operands.push(Operand::Write(sums));
        let mut parameters = vec![sums.offset as u32, times.map_or(0, |times| times.offset) as u32, sign.to_bits()];
        parameters.extend(tensors.iter().flat_map(|values| [values.count() as u32, values.offset as u32]));
        let cost = Cost { bytes: tensors.iter().map(Matrix::bytes).sum(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row(sums.width), cost);
    }

    /// Writes `a`, or the sum of both, to `y`, which may be `b`.
    fn add(&self, a: &Matrix, b: Option<&Matrix>, y: &Matrix) {
        let constants = vec![("ADD", 1), ("BOTH", u32::from(b.is_some()))];
        let kernel = Kernel { name: "accumulate", template: include_str!("adamw.wgsl"), constants };
        let mut operands = vec![Operand::Read(a)];
        operands.extend(b.map(Operand::Read));
        operands.push(Operand::Write(y));
        let sizes = [y.count(), a.offset, b.map_or(0, |b| b.offset), y.offset].map(|size| size as u32);
        let cost = Cost { bytes: 3.0 * y.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &sizes, in_a_row(y.count().div_ceil(256)), cost);
    }

    fn adamw(&self, state: [Tensor<Wgpu, 1>; 3], gradient: &Matrix, scale: &Matrix, hyper: &AdamW) -> AdamWState<Wgpu> {
        let state = state.map(|x| self.owned(primitive(x)));
        let count = state[0].count();
        let kernel = Kernel { name: "adamw", template: include_str!("adamw.wgsl"), constants: Vec::new() };
        let operands: Vec<_> = state.iter().map(Operand::Write).chain([gradient, scale].map(Operand::Read)).collect();
        let mut parameters = vec![count as u32];
        parameters.extend(state.iter().chain([gradient, scale]).map(|matrix| matrix.offset as u32));
        let (correction1, correction2) = hyper.corrections();
        parameters.extend(factors(hyper, hyper.epsilon).map(f32::to_bits));
        let rates = [correction2, hyper.learning_rate / correction1, 1.0 - hyper.learning_rate * hyper.weight_decay];
        parameters.extend(rates.map(|rate| (rate as f32).to_bits()));
        let cost = Cost { bytes: 7.0 * gradient.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row(count.div_ceil(256)), cost);
        let [parameter, first, second] = state.map(Matrix::into_values);
        AdamWState { parameter, moments: Moments::F32 { first, second } }
    }

    /// Returns what a step reads and writes in place, and the state that it leaves there.
    fn operands_in_8_bits(
        &self,
        parameter: Tensor<Wgpu, 1>,
        moments: EightBitMoments<Wgpu>,
        gradient: Matrix,
    ) -> ([Matrix; 6], AdamWState<Wgpu>) {
        let EightBitMoments { first_codes, first_absmax, second_codes, second_absmax } = moments;
        let state = [
            primitive(parameter),
            int_primitive(first_codes),
            primitive(first_absmax),
            int_primitive(second_codes),
            primitive(second_absmax),
        ];
        let [parameter, first_codes, first_absmax, second_codes, second_absmax] =
            state.map(|tensor| self.owned(tensor));
        let operands =
            [&parameter, &first_codes, &first_absmax, &second_codes, &second_absmax, &gradient].map(Clone::clone);
        let moments = EightBitMoments {
            first_codes: int_tensor(first_codes.tensor),
            first_absmax: first_absmax.into_values(),
            second_codes: int_tensor(second_codes.tensor),
            second_absmax: second_absmax.into_values(),
        };
        let state = AdamWState { parameter: parameter.into_values(), moments: Moments::EightBit(Box::new(moments)) };
        (operands, state)
    }

    fn adamw_8bit(&self, tensors: &[[Matrix; 6]], shared: [&Matrix; 2], hyper: &AdamW) {
        let constants = vec![("TENSORS", tensors.len() as u32)];
        let kernel = Kernel { name: "adamw_8bit", template: include_str!("adamw_8bit.wgsl"), constants };
        let mut operands = Vec::new();
        let (correction1, correction2) = hyper.corrections();
        let rates = [hyper.learning_rate * correction2 / correction1, 1.0 - hyper.learning_rate * hyper.weight_decay];
        let mut parameters: Vec<u32> = shared.iter().map(|matrix| matrix.offset as u32).collect();
        parameters.extend(factors(hyper, correction2 * hyper.epsilon).map(f32::to_bits));
        parameters.extend(rates.map(|rate| (rate as f32).to_bits()));
        let (mut blocks, mut bytes) = (0, 0.0);
        for [state @ .., gradient] in tensors {
            operands.extend(state.iter().map(Operand::Write));
            operands.push(Operand::Read(gradient));
            parameters.push(state[0].count() as u32);
            parameters.extend(state.iter().chain([gradient]).map(|matrix| matrix.offset as u32));
            blocks += state[0].count().div_ceil(BLOCK_SIZE);
            bytes += 4.0 * gradient.bytes();
        }
        operands.extend(shared.map(Operand::Read));
        self.launch(&kernel, &operands, &parameters, in_a_row(blocks), Cost { bytes, flops: 0.0 });
    }
}

/// The decays, one minus each, and what is added to the root.
fn factors(hyper: &AdamW, epsilon: f64) -> [f32; 5] {
    [hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, 1.0 - hyper.beta2, epsilon].map(|factor| factor as f32)
}

/// Values of the signed and the unsigned map, then their midpoints, 256 each.
fn maps() -> Tensor<Wgpu, 1> {
    let maps = [DynamicMap::signed(), DynamicMap::unsigned()];
    let mut values: Vec<f32> = maps.iter().flat_map(|map| *map.values()).collect();
    for map in maps {
        values.extend(map.midpoints());
        values.push(f32::INFINITY);
    }
    Tensor::from_floats(values.as_slice(), &WgpuDevice::DefaultDevice)
}
