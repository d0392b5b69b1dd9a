//! Token embeddings on CUDA. Kernels: `embedding.cu`.
//! Trade-off: the gradient scans all ids for each token, which is fast for a micro-batch but quadratic in its tokens.

use burn_tensor::{DType, Int, Tensor};

use crate::EmbeddingOps;
use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, MatrixView, Source, arguments, float, grid, tensor, threads_for,
};

impl EmbeddingOps for Cuda {
    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, scale: f32, dtype: DType) -> Tensor<Self, 2> {
        in_section(&table_vd.device(), |device| {
            tensor(device.embed(&device.flat(table_vd), &device.int_matrix(ids_n), scale, dtype).tensor)
        })
    }

    fn embed_backward(
        rows_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
        rows: usize,
        _may_be_none: bool,
    ) -> Tensor<Self, 2> {
        in_section(&dy_nd.device(), |device| {
            let (ids, dy) = (device.int_matrix(rows_n), device.flat(dy_nd));
            let table = device.empty_matrix(rows, dy.width, DType::F32);
            device.fill(table.block, 0.0);
            device.add_embed_backward(&table, &ids, &dy, scale);
            tensor(table.tensor)
        })
    }

    fn add_embed_backward(
        sum_vd: Tensor<Self, 2>,
        ids_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
    ) -> Tensor<Self, 2> {
        in_section(&dy_nd.device(), |device| {
            let sum = device.view_of(device.owned(float(sum_vd)));
            device.add_embed_backward(&sum, &device.int_matrix(ids_n), &device.flat(dy_nd), scale);
            tensor(sum.tensor)
        })
    }
}

impl Device {
    /// Looks up rows of a table, times `scale`, in `dtype`.
    fn embed(&self, table: &MatrixView, ids: &MatrixView, scale: f32, dtype: DType) -> MatrixView {
        let y = self.empty_matrix(ids.width, table.width, dtype);
        let name = if table.dtype == dtype { "embed_from_t" } else { "embed_from_f32" };
        assert!(table.dtype == dtype || table.dtype == DType::F32, "a table of {:?} into {dtype:?}", table.dtype);
        let bytes = ids.width * table.width * (table.dtype.size() + dtype.size());
        let launch = Source::Embedding.launch(dtype, name, grid(ids.width, threads_for(table.width, 256)), bytes);
        let arguments = arguments! {
            y: rows(&y), table: rows(table), ids: rows(ids), n: long(ids.width), d: int(table.width), scale: f32(scale),
        };
        // SAFETY: ids are [n] i32 below the table's rows (the vocabularies of tokenizer and model are compared when a run
        // starts); y is [n, width].
        unsafe { self.launch(launch, &arguments) };
        y
    }

    /// Adds rows of `dy` times `scale` by id to a table, f32 or bf16; skips those with an id below 0.
    fn add_embed_backward(&self, table: &MatrixView, ids: &MatrixView, dy: &MatrixView, scale: f32) {
        assert!(table.width == dy.width && table.is_dense(), "a sum has the rows of the table");
        let name = match table.dtype {
            DType::F32 => "embed_backward",
            DType::BF16 => "embed_backward_to_bf16",
            other => unreachable!("gradients are summed in f32 or bf16, not {other:?}"),
        };
        let bytes = dy.count() * (dy.dtype.size() + table.dtype.size());
        let launch = Source::Embedding.launch(dy.dtype, name, grid(ids.width, 256), bytes);
        let arguments = arguments! {
            dtable: rows(table), ids: rows(ids), dy: rows(dy), n: long(ids.width), d: int(dy.width), scale: f32(scale),
        };
        // SAFETY: as for `embed`; one block per token, and only the first of equal ids writes their row.
        unsafe { self.launch(launch, &arguments) };
    }
}
