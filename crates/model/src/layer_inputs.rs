//! The inputs of layers besides the residual stream (Gemma 4 E2B, E4B): rows of a table by token, plus a projection of the embedding.
//!
//! ```text
//! a = table row * sqrt(p)                       gathered on the host, uploaded with the ids
//! b = norm(projection(embedding) * hidden^-0.5) of each layer's p columns
//! input = (a + b) * 2^-0.5                      reordered by layer: that of a layer is a range of rows
//! ```
//!
//! The factor before the norm is in its epsilon instead. The gradient goes back to projection, norm and embedding if any of these train; the table
//! never does.
//! Trade-off: the inputs of all layers are on the device for a whole pass.

use std::collections::BTreeMap;
use std::f32::consts::FRAC_1_SQRT_2;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Int, Tensor};
use firebrick_kernels::linear::into_single;
use firebrick_kernels::memory::slices;
use firebrick_kernels::{Epilogue, GradientSink, Keep, Kernels, ProjectSaved, Prologue, evenly};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::checkpoint::read::convert::write;
use crate::error::ModelError;
use crate::host_table::HostTable;
use crate::linear::{AdapterPass, LinearGroup};
use crate::norm::Norm;

#[derive(Clone, Debug)]
pub(crate) struct LayerInputs<B: Kernels> {
    pub(crate) table: Arc<HostTable>,
    /// From the embedding to the inputs of all layers, `[layers * p, hidden]`.
    pub(crate) projection: LinearGroup<B>,
    /// `[p]`, with an epsilon for rows that were not multiplied by `hidden^-0.5`.
    pub(crate) norm: Norm<B>,
    pub(crate) layers: usize,
    /// `p`.
    pub(crate) width: usize,
    /// The orders of the last pass.
    pub(crate) orders: Arc<Mutex<Option<Orders<B>>>>,
}

/// For each row by layer its place by token, and the inverse, `[layers * n]` both.
type Orders<B> = [Tensor<B, 1, Int>; 2];

/// What a pass needs of its tokens for them.
#[derive(Clone, Debug)]
pub(crate) struct TokenInputs<B: Kernels> {
    /// Rows of the table, `[n * layers, p]`, by token.
    rows: Tensor<B, 2>,
    orders: Orders<B>,
}

pub(crate) struct SavedInputs<B: Kernels> {
    projection: Box<ProjectSaved<B>>,
    /// The projection's output, `[n * layers, p]`.
    projected: Tensor<B, 2>,
}

impl<B: Kernels> LayerInputs<B> {
    /// Returns whether projection or norm train.
    pub(crate) fn trains(&self) -> bool {
        self.parameters().next().is_some()
    }

    /// Gathers the rows of tokens and uploads them.
    pub(crate) fn upload(&self, ids: &[u32], dtype: DType, device: &B::Device) -> Result<TokenInputs<B>, ModelError> {
        let (layers, tokens) = (self.layers, ids.len());
        let row_bytes = layers * self.width * dtype.size();
        let scale = rounded((self.width as f32).sqrt(), dtype);
        let mut buffer = B::host_buffer(device, tokens * row_bytes);
        let bytes: &mut [u8] = &mut buffer;
        let mut rows: Vec<(u32, &mut [u8])> = ids.iter().copied().zip(bytes.chunks_mut(row_bytes)).collect();
        rows.sort_unstable_by_key(|(id, _)| *id);
        rows.par_chunk_by_mut(|(one, _), (other, _)| one == other).try_for_each(|same| {
            let ((id, first), others) = same.split_first_mut().expect("a token occurs");
            let row = self.table.row(*id as usize)?;
            write(row.into_iter().map(|value| value * scale), dtype, first);
            others.iter_mut().for_each(|(_, out)| out.copy_from_slice(first));
            Ok::<_, ModelError>(())
        })?;
        let rows = B::upload([Ok::<_, ModelError>(buffer)], [tokens * layers, self.width], dtype, device)?;
        Ok(TokenInputs { rows, orders: self.orders(tokens, device) })
    }

    /// Returns the orders of so many tokens, which are those of the last pass if it had as many.
    fn orders(&self, tokens: usize, device: &B::Device) -> Orders<B> {
        let mut last = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last.take().filter(|[by_layer, _]| by_layer.dims() == [self.layers * tokens]);
        let order = |outer: usize, inner: usize| {
            let places = (0..outer).flat_map(|first| (0..inner).map(move |second| (second * outer + first) as i32));
            Tensor::from_ints(places.collect::<Vec<i32>>().as_slice(), device)
        };
        let orders = known.unwrap_or_else(|| [order(self.layers, tokens), order(tokens, self.layers)]);
        last.insert(orders).clone()
    }

    /// Computes the input `[n, p]` of each layer from the scaled embedding `[n, hidden]`.
    pub(crate) fn forward(
        &self,
        h_nd: Tensor<B, 2>,
        tokens: &TokenInputs<B>,
        keep: Keep,
    ) -> (Vec<Tensor<B, 2>>, Option<SavedInputs<B>>) {
        let (rows, dtype, [by_layer, _]) = (h_nd.dims()[0] * self.layers, h_nd.dtype(), &tokens.orders);
        let group = self.projection.frozen(AdapterPass::PLAIN);
        let (projected, saved) = B::project(Prologue::None { x: h_nd }, &group, Epilogue::None, keep);
        let projected = into_single(projected).reshape([rows, self.width]);
        let saved = saved.map(|projection| SavedInputs { projection, projected: projected.clone() });
        // Where nothing is saved, what the projection computed is free from here on.
        let sum = B::rms_norm(projected, &self.norm.operand(), Some(tokens.rows.clone()));
        let inputs = B::embed(sum, by_layer.clone(), FRAC_1_SQRT_2, dtype);
        (slices(inputs, &evenly(rows, self.layers)), saved)
    }

    /// Adds to the gradient of the scaled embedding what comes from those of all layers' inputs; gradients of parameters go to the sink.
    ///
    /// # Panics
    /// If a layer has no gradient.
    pub(crate) fn backward(
        &self,
        saved: SavedInputs<B>,
        tokens: TokenInputs<B>,
        gradients: BTreeMap<usize, Tensor<B, 2>>,
        dh_nd: Tensor<B, 2>,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedInputs { projection, projected } = saved;
        assert_eq!(gradients.len(), self.layers, "each layer has the gradient of its input");
        let ([_, by_token], dtype) = (tokens.orders, projected.dtype());
        let by_layer = B::join_rows(gradients.into_values().collect());
        let d_sum = B::embed(by_layer, by_token, FRAC_1_SQRT_2, dtype);
        let d_projected = self.norm.backward(projected, d_sum, None, sink);
        let d_projected = d_projected.reshape([dh_nd.dims()[0], self.layers * self.width]);
        self.projection.backward(*projection, vec![d_projected], Some(dh_nd), AdapterPass::PLAIN, sink).input.plain()
    }
}

pub(crate) fn rounded(factor: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(factor).to_f32(),
        DType::F16 => f16::from_f32(factor).to_f32(),
        _ => factor,
    }
}
