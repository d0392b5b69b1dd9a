//! The output projection and the loss over chunks of trained positions, loss and gradient in one pass.
//!
//! Logits are f32, as the products leave them before any rounding; the gradient of a chunk's logits takes the place of the
//! logits, in the compute format. Where every token trains, the hidden states are read where they are.

use burn_tensor::{DType, Int, Tensor};

use super::Cuda;
use super::engine::{Engine, engine};
use super::gemm::{Block, Product};
use super::scratch::Purpose;
use super::tensor::{Matrix, tensor};
use crate::{CrossEntropy, CrossEntropyOptions, TrainedPositions, Weight};

/// What all chunks share.
struct Pass<'a> {
    engine: &'a Engine,
    hidden: &'a Matrix,
    head: Block,
    vocabulary: usize,
    scale: Option<f64>,
    /// Gradient of the head, f32, added to by each chunk.
    d_head: Option<&'a Matrix>,
    loss: u64,
}

/// See [`crate::Kernels::linear_cross_entropy`].
pub(super) fn linear_cross_entropy(
    hidden_nd: Tensor<Cuda, 2>,
    head: &Weight<Cuda>,
    trained: &TrainedPositions<Cuda>,
    options: CrossEntropyOptions,
) -> CrossEntropy<Cuda> {
    assert!(options.chunk_tokens > 0, "a chunk of logits needs at least one token");
    let engine = engine(&hidden_nd.device());
    engine.section(|| {
        let hidden = engine.flat(hidden_nd);
        let [vocabulary, width] = head.shape();
        let loss_sum = engine.empty_matrix(1, 1, DType::F32);
        engine.fill(loss_sum.address, 1, 0.0);
        let gradient = options.gradient_scale.is_some();
        let d_head = (options.weight_gradient && gradient).then(|| {
            let d_head = engine.empty_matrix(vocabulary, width, DType::F32);
            engine.fill(d_head.address, vocabulary * width, 0.0);
            d_head
        });
        let pass = Pass {
            engine: &engine,
            hidden: &hidden,
            head: engine.base_weight(head, hidden.dtype),
            vocabulary,
            scale: options.gradient_scale,
            d_head: d_head.as_ref(),
            loss: loss_sum.address,
        };
        let d_hidden = if trained.count == hidden.rows {
            pass.every_token(trained, options.chunk_tokens)
        } else {
            pass.trained_tokens(trained, options.chunk_tokens)
        };
        CrossEntropy {
            loss_sum: tensor::<2>(loss_sum.tensor).reshape([1]),
            d_hidden_nd: d_hidden.map(|matrix| tensor(matrix.tensor)),
            d_weight_vd: d_head.map(|matrix| tensor(matrix.tensor)),
        }
    })
}

impl Pass<'_> {
    /// Chunks of the hidden states where they are.
    fn every_token(&self, trained: &TrainedPositions<Cuda>, chunk: usize) -> Option<Matrix> {
        let targets = self.engine.int_matrix(trained.targets_m.clone());
        let (rows, width) = (self.hidden.rows, self.hidden.width);
        let d_hidden = self.scale.map(|_| self.engine.empty_matrix(rows, width, self.hidden.dtype));
        for start in (0..rows).step_by(chunk) {
            let length = chunk.min(rows - start);
            let hidden = Block::from(self.hidden).at_row(start);
            let out = d_hidden.as_ref().map(|d_hidden| Block::from(d_hidden).at_row(start));
            self.chunk(hidden, targets.address + 4 * start as u64, length, chunk, out);
        }
        d_hidden
    }

    /// Chunks of gathered rows; gradients of the other rows are zero.
    fn trained_tokens(&self, trained: &TrainedPositions<Cuda>, chunk: usize) -> Option<Matrix> {
        let (engine, width, dtype) = (self.engine, self.hidden.width, self.hidden.dtype);
        if trained.count == 0 {
            return self.scale.map(|_| self.no_gradient());
        }
        let targets = engine.int_matrix(trained.targets_m.clone());
        let positions = engine.int_matrix(trained.positions_m.clone());
        let rows =
            Block { address: engine.scratch.take(Purpose::Rows, chunk * width * dtype.size()), stride: width, dtype };
        // Rounded up, so that micro-batches of similar size share one buffer.
        let room = trained.count.next_multiple_of(chunk) * width * dtype.size();
        let gradients = self.scale.map(|_| Block {
            address: engine.scratch.take(Purpose::RowGradients, room),
            stride: width,
            dtype,
        });
        for start in (0..trained.count).step_by(chunk) {
            let length = chunk.min(trained.count - start);
            engine.gather_rows(self.hidden, positions.address + 4 * start as u64, length, rows.address);
            let out = gradients.map(|gradients| gradients.at_row(start));
            self.chunk(rows, targets.address + 4 * start as u64, length, chunk, out);
        }
        gradients.map(|gradients| {
            let d_hidden = engine.empty_matrix(self.hidden.rows, width, dtype);
            engine.scatter_rows(&d_hidden, gradients.address, positions.address, trained.count);
            d_hidden
        })
    }

    fn no_gradient(&self) -> Matrix {
        let d_hidden = self.engine.empty_matrix(self.hidden.rows, self.hidden.width, self.hidden.dtype);
        let bytes = d_hidden.rows * d_hidden.width * d_hidden.element_bytes();
        self.engine.fill_zero(d_hidden.address, bytes);
        d_hidden
    }

    /// Loss of `length` rows, and into `out` the gradient of their hidden states.
    fn chunk(&self, hidden: Block, targets: u64, length: usize, largest: usize, out: Option<Block>) {
        let (engine, vocabulary, width) = (self.engine, self.vocabulary, self.hidden.width);
        let address = engine.scratch.take(Purpose::Logits, largest * vocabulary * 4);
        let logits = Block { address, stride: vocabulary, dtype: DType::F32 };
        let product = Product {
            name: "head",
            m: length,
            n: vocabulary,
            k: width,
            a: hidden,
            a_transposed: false,
            b: self.head,
            b_transposed: true,
            c: None,
            alpha: 1.0,
        };
        engine.gemm(product, logits);
        // A row of gradients begins where its row of logits does.
        let dtype = self.hidden.dtype;
        let d_logits = Block { address, stride: vocabulary * 4 / dtype.size(), dtype };
        let losses = engine.scratch.take(Purpose::Losses, largest * 4);
        engine.cross_entropy(logits, out.map(|_| d_logits), targets, losses, self.scale, [length, vocabulary]);
        engine.sum_losses(self.loss, losses, length);
        let Some(out) = out else { return };
        let back = Product { k: vocabulary, n: width, a: d_logits, b_transposed: false, ..product };
        engine.gemm(back, out);
        if let Some(d_head) = self.d_head {
            let d_head = Block::from(d_head);
            let sum = Product {
                m: vocabulary,
                n: width,
                k: length,
                a: d_logits,
                a_transposed: true,
                b: hidden,
                b_transposed: false,
                c: Some(d_head),
                ..product
            };
            engine.gemm(sum, d_head);
        }
    }
}

/// See [`crate::Kernels::cross_entropy`].
pub(super) fn cross_entropy(
    logits_cv: Tensor<Cuda, 2>,
    targets_c: Tensor<Cuda, 1, Int>,
    gradient_scale: Option<f64>,
) -> (Tensor<Cuda, 1>, Option<Tensor<Cuda, 2>>) {
    let engine = engine(&logits_cv.device());
    engine.section(|| {
        let logits = engine.flat(logits_cv);
        let targets = engine.int_matrix(targets_c);
        let gradient = gradient_scale.map(|_| engine.empty_matrix(logits.rows, logits.width, DType::F32));
        let loss = engine.empty_matrix(1, 1, DType::F32);
        engine.fill(loss.address, 1, 0.0);
        let losses = engine.scratch.take(Purpose::Losses, logits.rows * 4);
        let shape = [logits.rows, logits.width];
        let out = gradient.as_ref().map(Block::from);
        engine.cross_entropy(Block::from(&logits), out, targets.address, losses, gradient_scale, shape);
        engine.sum_losses(loss.address, losses, logits.rows);
        (tensor::<2>(loss.tensor).reshape([1]), gradient.map(|gradient| tensor(gradient.tensor)))
    })
}
