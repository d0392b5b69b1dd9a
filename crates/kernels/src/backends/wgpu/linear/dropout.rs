//! Dropout on the adapters' input. Kernel: `dropout.wgsl`.
//! Not supported: rows that are sorted by expert.

use crate::Mask;

use super::super::engine::{Cost, Engine, Kernel, Matrix, Operand, Wgpu, in_a_row};

/// Returns whether the kernel knows where each row comes from.
pub(super) fn has_kernel(mask: &Mask<Wgpu>) -> bool {
    mask.choices.is_none() && mask.dropout.place().iter().all(|&place| u32::try_from(place).is_ok())
}

impl Engine {
    /// Returns `x` with dropped values set to zero and the others scaled, plus `add`, which may become the result's memory.
    pub(super) fn dropped(&self, x: &Matrix, mask: &Mask<Wgpu>, add: Option<Matrix>) -> Matrix {
        let y = match &add {
            Some(add) if add.stride == add.width => add.clone(),
            _ => self.empty_matrix(x.rows, x.width),
        };
        let constants = vec![("ADD", u32::from(add.is_some()))];
        let kernel = Kernel { name: "dropout", template: include_str!("dropout.wgsl"), constants };
        let mut operands = vec![Operand::Read(x)];
        operands.extend(add.as_ref().map(Operand::Read));
        operands.push(Operand::Write(&y));
        let dropout = &mask.dropout;
        let [first_token, first_row, row_len] = dropout.place().map(|place| place as u32);
        let mut parameters: Vec<u32> = [x.rows, x.width, x.stride, x.offset].map(|size| size as u32).into();
        parameters.extend([dropout.key() as u32, (dropout.key() >> 32) as u32, first_token, first_row, row_len]);
        parameters.extend([dropout.threshold(), dropout.scale().to_bits()]);
        parameters.extend(add.as_ref().map_or([0; 2], |add| [add.stride as u32, add.offset as u32]));
        let cost = Cost { bytes: 2.0 * x.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row(x.count().div_ceil(256)), cost);
        y
    }
}
