//! Rows of embedding or head that train while the rest of the table is frozen.
//!
//! The rows are parameters in f32. The table, in the compute format, holds a rounded copy of them, which is updated after each change, so a forward
//! pass just reads the table. Gradients exist for these rows alone.
//! Trade-off: a pass without adapters reads the rows as they are now, not as they were.

use std::collections::HashMap;
use std::ops::Range;

use burn_tensor::{DType, Int, Tensor};
use firebrick_arch::{LoraConfig, ModelSpec, Role, token_rows_name, token_runs};
use firebrick_kernels::{Kernels, Parameter, Weight};

use crate::linear::Base;

#[derive(Clone, Debug)]
pub(crate) struct TokenRows<B: Kernels> {
    /// `..token_adapter.trainable_tokens_delta`, `[tokens, d]`.
    pub(crate) parameter: Parameter<B>,
    /// The tokens, in the order of the rows.
    ids: Vec<usize>,
}

impl<B: Kernels> TokenRows<B> {
    /// Copies the rows of this table that the settings name; `None` if they name none.
    pub(crate) fn new(name: &str, table: &Base<B>, spec: &ModelSpec, lora: Option<&LoraConfig>) -> Option<Self> {
        let ids = lora?.token_rows(name, spec).to_vec();
        if ids.is_empty() {
            return None;
        }
        let Weight::Dense(table_vd) = table.weight() else { unreachable!("embedding and head are never quantized") };
        let rows = token_runs(&ids).into_iter().map(|run| table_vd.clone().narrow(0, run.start, run.len()));
        let (shape, role) = ([ids.len(), spec.hidden_size], Role::TokenRows);
        let value = Tensor::cat(rows.collect(), 0).cast(DType::F32).reshape([shape[0] * shape[1]]);
        let parameter = Parameter { name: token_rows_name(name).into(), shape: shape.into(), role, value };
        Some(Self { parameter, ids })
    }

    /// Returns the rows as runs of neighbors in the table.
    pub(crate) fn runs(&self) -> Vec<Range<usize>> {
        token_runs(&self.ids)
    }

    /// Returns the row index of each token, -1 if it has none, `[n]`.
    pub(crate) fn slots(&self, ids: &[u32], device: &B::Device) -> Tensor<B, 1, Int> {
        let rows: HashMap<usize, i32> = self.ids.iter().copied().zip(0..).collect();
        let slots: Vec<i32> = ids.iter().map(|id| rows.get(&(*id as usize)).copied().unwrap_or(-1)).collect();
        Tensor::from_ints(slots.as_slice(), device)
    }

    pub(crate) fn write_to(&self, table: &mut Base<B>) {
        let Base::Frozen(Weight::Dense(values)) = table else { unreachable!("a table of which rows train is frozen") };
        let (device, dtype, width) = (values.device(), values.dtype(), values.dims()[1]);
        // The table is written in place only if it has no other handle.
        let mut table_vd = std::mem::replace(values, Tensor::empty([1, 1], (&device, dtype)));
        let (rows, mut first) = (self.parameter.matrix().cast(dtype), 0);
        for run in self.runs() {
            let part = rows.clone().narrow(0, first, run.len());
            first += run.len();
            table_vd = table_vd.slice_assign([run, 0..width], part);
        }
        *values = table_vd;
    }
}
