//! Head and loss over chunks of targets, with loss and gradient in one pass. Kernels: `cross_entropy.cu`.
//!
//! Logits are f32, unrounded from the GEMM; their gradient overwrites them chunk by chunk, in the compute format. If
//! every token has a target, hidden states are read in place; otherwise the rows of a chunk are gathered, and their
//! gradients scattered into the gradient of the hidden states, which is zeroed once.

mod pairs;

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor};
use firebrick_cuda::LaunchShape;

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, CROSS_ENTROPY_THREADS, Cuda, DeviceBlock, Gemm, MatrixView, ScratchSlot, SoftCap, Source,
    arguments, float, grid, int_tensor, tensor,
};
use crate::backends::cuda::linear::operands::ReadyWeight;
use crate::loss::draw::{Draw, Drawn};
use crate::loss::pairs::{PairLogProbs, PairLoss, PairResult, PairTargets, PairWeights};
use crate::{CrossEntropy, CrossEntropyOptions, LossOps, LossTargets, Weight, WeightGradient};

/// Bytes per tile of the shared memory in which a block keeps parts of its row.
const TILE_BYTES: usize = 16 * CROSS_ENTROPY_THREADS;

/// Rows of logits that tokens are drawn from at a time.
const DRAWN_ROWS: usize = 256;

impl LossOps for Cuda {
    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        weights_c: Option<Tensor<Self, 1>>,
        gradient_scale: Option<f64>,
        soft_cap: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        let device = Device::of(&logits_cv.device());
        let of_loss = OfLoss { scale: gradient_scale, soft_cap: soft_cap.map(SoftCap::new) };
        device.section(|| device.cross_entropy(logits_cv, targets_c, weights_c, of_loss))
    }

    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        targets: &LossTargets<Self>,
        options: CrossEntropyOptions<Self>,
    ) -> CrossEntropy<Self> {
        assert!(options.chunk_tokens > 0, "a chunk of logits needs at least one token");
        in_section(&hidden_nd.device(), |device| {
            let pass = Pass::new(device, hidden_nd, head, targets, options);
            pass.run()
        })
    }

    fn document_sums(values_m: Tensor<Self, 1>, targets: &PairTargets<Self>, of_answers: bool) -> Tensor<Self, 1> {
        pairs::document_sums(values_m, targets, of_answers)
    }

    fn pair_loss(
        log_probs: PairLogProbs<Self>,
        targets: &PairTargets<Self>,
        loss: PairLoss,
        weights: PairWeights<Self>,
    ) -> PairResult<Self> {
        let device = log_probs.answers.device();
        in_section(&device, |device| pairs::pair_loss(device, log_probs, targets, loss, weights))
    }

    fn most_probable(logits_nv: Tensor<Self, 2>) -> Tensor<Self, 1, Int> {
        in_section(&logits_nv.device(), |device| device.most_probable(&device.matrix(logits_nv)))
    }

    fn draw(hidden_nd: Tensor<Self, 2>, head: &Weight<Self>, random_n: Tensor<Self, 1>, draw: Draw) -> Drawn<Self> {
        in_section(&hidden_nd.device(), |device| device.draw(hidden_nd, head, random_n, draw))
    }
}

/// The gradient of the head, to which chunks add.
struct HeadGradient {
    sum: MatrixView,
    /// The rows of the head that it covers; `None`: all.
    rows: Option<Vec<Range<usize>>>,
    /// Whether `sum` has been written.
    is_filled: bool,
}

impl HeadGradient {
    fn new(
        device: &Device,
        gradient: WeightGradient<Cuda>,
        rows: Option<Vec<Range<usize>>>,
        [vocabulary, width]: [usize; 2],
    ) -> Option<Self> {
        let count = rows.as_ref().map_or(vocabulary, |rows| rows.iter().map(Range::len).sum());
        match gradient {
            WeightGradient::Frozen => None,
            WeightGradient::New => {
                Some(Self { sum: device.empty_matrix(count, width, DType::F32), rows, is_filled: false })
            }
            WeightGradient::AddTo(sum) => {
                Some(Self { sum: device.view_of(device.owned(float(sum))), rows, is_filled: true })
            }
        }
    }

    fn add(&mut self, device: &Device, d_logits: DeviceBlock, hidden: DeviceBlock) {
        let was_filled = std::mem::replace(&mut self.is_filled, true);
        let add = |d_logits: DeviceBlock, sum: DeviceBlock| {
            let c = was_filled.then_some(sum);
            device.gemm(Gemm { c, ..Gemm::token_sum("head gradient", d_logits, hidden) }, sum);
        };
        let Some(rows) = &self.rows else { return add(d_logits, self.sum.block) };
        // Adjacent rows are adjacent columns of the logits' gradient, without a copy.
        let mut first = 0;
        for run in rows {
            add(d_logits.columns(run.start, run.len()), self.sum.block.rows(first, run.len()));
            first += run.len();
        }
    }

    fn into_tensor(self, device: &Device) -> Tensor<Cuda, 2> {
        if !self.is_filled {
            device.fill(self.sum.block, 0.0);
        }
        tensor(self.sum.tensor)
    }
}

struct Pass<'a> {
    device: &'a Device,
    hidden: MatrixView,
    head: ReadyWeight,
    count: usize,
    chunk_tokens: usize,
    logit_scale: f64,
    /// Of logits times their factor; gradients are those of the GEMM's result.
    of_loss: OfLoss,
    /// `None` if there are no targets.
    targets: Option<MatrixView>,
    /// `None` if every token has a target, or there are no targets.
    positions: Option<MatrixView>,
    weights: Option<MatrixView>,
    d_head: Option<HeadGradient>,
    d_hidden: Option<MatrixView>,
    log_probs: Option<MatrixView>,
    loss_sum: MatrixView,
    /// `None` unless requested.
    correct: Option<MatrixView>,
}

impl<'a> Pass<'a> {
    fn new(
        device: &'a Device,
        hidden_nd: Tensor<Cuda, 2>,
        head: &Weight<Cuda>,
        targets: &LossTargets<Cuda>,
        options: CrossEntropyOptions<Cuda>,
    ) -> Self {
        let hidden = device.flat(hidden_nd);
        let ints = |values: &Tensor<Cuda, 1, Int>| device.int_matrix(values.clone());
        let (is_partial, is_empty) = (targets.count < hidden.rows, targets.count == 0);
        let zero = || {
            let sum = device.view_of(device.empty([1], DType::F32));
            device.fill(sum.block, 0.0);
            sum
        };
        let (gradient, rows) = (options.gradient_scale.map(|_| options.weight_gradient), options.weight_rows);
        let d_hidden = options.gradient_scale.map(|_| device.empty_matrix(hidden.rows, hidden.width, hidden.dtype));
        if let Some(d_hidden) = d_hidden.as_ref().filter(|_| is_partial) {
            device.fill_zero(d_hidden.block);
        }
        Self {
            device,
            head: device.base_weight(head, hidden.dtype),
            count: targets.count,
            chunk_tokens: options.chunk_tokens,
            logit_scale: options.logit_scale,
            of_loss: OfLoss {
                scale: options.gradient_scale.map(|scale| scale * options.logit_scale),
                soft_cap: options.soft_cap.map(SoftCap::new),
            },
            targets: (!is_empty).then(|| ints(&targets.targets_m)),
            positions: (is_partial && !is_empty).then(|| ints(&targets.positions_m)),
            weights: targets.weights_m.clone().filter(|_| !is_empty).map(|weights| device.flat_as(weights, DType::F32)),
            d_head: gradient.and_then(|gradient| HeadGradient::new(device, gradient, rows, head.shape())),
            d_hidden,
            log_probs: options.log_probs.then(|| device.view_of(device.empty([targets.count], DType::F32))),
            loss_sum: zero(),
            correct: options.correct.then(zero),
            hidden,
        }
    }

    fn run(mut self) -> CrossEntropy<Cuda> {
        for start in (0..self.count).step_by(self.chunk_tokens) {
            self.chunk(start, self.chunk_tokens.min(self.count - start));
        }
        let device = self.device;
        CrossEntropy {
            loss_sum: tensor(self.loss_sum.tensor),
            log_probs_m: self.log_probs.map(|values| tensor(values.tensor)),
            correct: self.correct.map(|count| tensor(count.tensor)),
            d_hidden_nd: self.d_hidden.map(|matrix| tensor(matrix.tensor)),
            d_weight_vd: self.d_head.map(|d_head| d_head.into_tensor(device)),
        }
    }

    /// Computes loss and gradients of the targets `start .. start + length`.
    fn chunk(&mut self, start: usize, length: usize) {
        let device = self.device;
        let [vocabulary, width] = [self.head.block.rows, self.hidden.width];
        let dtype = self.hidden.dtype;
        let after = |values: &MatrixView| values.address + 4 * start as u64;
        let hidden = match &self.positions {
            None => self.hidden.block.rows(start, length),
            Some(positions) => {
                let bytes = self.chunk_tokens * width * dtype.size();
                let address = device.scratch.take(ScratchSlot::GatheredRows, bytes);
                let rows = DeviceBlock::dense(address, [length, width], dtype);
                device.gather_rows(self.hidden.block, after(positions), rows);
                rows
            }
        };
        let address = device.scratch.take(ScratchSlot::WideRows, self.chunk_tokens * vocabulary * 4);
        let logits = DeviceBlock::dense(address, [length, vocabulary], DType::F32);
        device.gemm(Gemm { alpha: self.logit_scale, ..Gemm::forward("head", hidden, self.head.block) }, logits);
        // A row of gradients begins at the address of its row of logits.
        let d_logits = DeviceBlock { stride: vocabulary * 4 / dtype.size(), dtype, ..logits };
        // Scratch for unrequested log-probabilities, then one flag per row: is the target the argmax?
        let scratch = device.scratch.take(ScratchSlot::LogProbs, 2 * self.chunk_tokens * 4);
        let is_highest = scratch + 4 * self.chunk_tokens as u64;
        let rows = Rows {
            targets: self.targets.as_ref().map_or(0, after),
            weights: self.weights.as_ref().map_or(0, after),
            log_probs: self.log_probs.as_ref().map_or(scratch, after),
            is_highest: if self.correct.is_some() { is_highest } else { 0 },
        };
        device.cross_entropy_rows(logits, self.d_hidden.as_ref().map(|_| d_logits), &rows, self.of_loss);
        device.add_sum(self.loss_sum.address, -1.0, rows.log_probs, rows.weights, length);
        if let Some(correct) = &self.correct {
            device.add_sum(correct.address, 1.0, is_highest, 0, length);
        }
        let Some(d_hidden) = &self.d_hidden else { return };
        if let Some(d_head) = &mut self.d_head {
            d_head.add(device, d_logits, hidden);
        }
        // This was the last read of the gathered rows, so their gradients overwrite them.
        let out = if self.positions.is_some() { hidden } else { d_hidden.block.rows(start, length) };
        device.gemm(Gemm::input_gradient("head", d_logits, self.head.block), out);
        if let Some(positions) = &self.positions {
            device.scatter_rows(out, after(positions), d_hidden.block);
        }
    }
}

#[derive(Clone, Copy)]
struct OfLoss {
    /// Factor of the gradients; `None`: no gradients.
    scale: Option<f64>,
    soft_cap: Option<SoftCap>,
}

/// Addresses of the values of each row of logits.
struct Rows {
    /// i32 targets.
    targets: u64,
    /// f32 weights; 0: all are 1.
    weights: u64,
    /// f32 log-probabilities, written.
    log_probs: u64,
    /// f32 flags, written: 1 if no logit is higher than the target's, else 0; 0: not requested.
    is_highest: u64,
}

impl Device {
    fn cross_entropy(
        &self,
        logits_cv: Tensor<Cuda, 2>,
        targets_c: Tensor<Cuda, 1, Int>,
        weights_c: Option<Tensor<Cuda, 1>>,
        of_loss: OfLoss,
    ) -> (Tensor<Cuda, 1>, Option<Tensor<Cuda, 2>>) {
        let logits = self.flat(logits_cv);
        let targets = self.int_matrix(targets_c);
        let weights = weights_c.map(|weights| self.flat_as(weights, DType::F32));
        let gradient = of_loss.scale.map(|_| self.empty_matrix(logits.rows, logits.width, DType::F32));
        let losses = self.view_of(self.empty([logits.rows], DType::F32));
        let rows = Rows {
            targets: targets.address,
            weights: weights.as_ref().map_or(0, |weights| weights.address),
            log_probs: losses.address,
            is_highest: 0,
        };
        self.cross_entropy_rows(logits.block, gradient.as_ref().map(|matrix| matrix.block), &rows, of_loss);
        self.cast(losses.block, losses.block, -1.0);
        (tensor(losses.tensor), gradient.map(|gradient| tensor(gradient.tensor)))
    }

    /// Computes the log-probability of each row's target, and the gradient of the weighted loss times `scale` if a
    /// destination is given: separate memory, or the logits' own.
    fn cross_entropy_rows(&self, logits: DeviceBlock, gradient: Option<DeviceBlock>, rows: &Rows, of_loss: OfLoss) {
        if logits.rows == 0 {
            return;
        }
        assert!(logits.dtype == DType::F32 && logits.is_dense(), "logits are dense f32");
        let dtype = gradient.map_or(DType::F32, |gradient| gradient.dtype);
        // The part of a row that stays in shared memory is not read a second time.
        let shared = gradient.map_or(0, |_| self.shared_bytes() / TILE_BYTES * TILE_BYTES);
        let shape = LaunchShape { shared_bytes: shared as u32, ..grid(logits.rows, CROSS_ENTROPY_THREADS as u32) };
        let bytes = logits.bytes() + gradient.map_or(0, |gradient| gradient.bytes());
        let launch = Source::CrossEntropy(of_loss.soft_cap).launch(dtype, "cross_entropy", shape, bytes);
        let arguments = arguments! {
            logits: rows(&logits), dlogits: address(gradient.map_or(0, |gradient| gradient.address)),
            d_stride: long(gradient.map_or(0, |gradient| gradient.stride)), targets: address(rows.targets),
            weights: address(rows.weights), log_prob: address(rows.log_probs), is_highest: address(rows.is_highest),
            scale: float(of_loss.scale.unwrap_or(0.0)), c: int(logits.rows), v: long(logits.width),
        };
        // SAFETY: logits are dense; a row of gradients begins where its row of logits does, or overlaps none; targets, and what of
        // weights, log probabilities and marks is not null, have one value per row.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Implements [`LossOps::draw`] over chunks of rows.
    fn draw(
        &self,
        hidden_nd: Tensor<Cuda, 2>,
        head: &Weight<Cuda>,
        random_n: Tensor<Cuda, 1>,
        draw: Draw,
    ) -> Drawn<Cuda> {
        let (hidden, random) = (self.flat(hidden_nd), self.flat_as(random_n, DType::F32));
        let head = self.base_weight(head, hidden.dtype);
        let vocabulary = head.block.rows;
        let [ids, log_probs] = [DType::I32, DType::F32].map(|dtype| self.empty([hidden.rows], dtype));
        let [to_ids, to_log_probs] = [&ids, &log_probs].map(|tensor| self.address(tensor));
        for start in (0..hidden.rows).step_by(DRAWN_ROWS) {
            let rows = DRAWN_ROWS.min(hidden.rows - start);
            let address = self.scratch.take(ScratchSlot::WideRows, rows * vocabulary * 4);
            let logits = DeviceBlock::dense(address, [rows, vocabulary], DType::F32);
            let product = Gemm::forward("head", hidden.block.rows(start, rows), head.block);
            self.gemm(Gemm { alpha: draw.logit_scale, ..product }, logits);
            let after = |address: u64| address + 4 * start as u64;
            let launch = Source::Draw.launch(DType::F32, "draw_tokens", grid(rows, 1024), 3 * logits.bytes());
            let arguments = arguments! {
                ids: address(after(to_ids)), log_probs: address(after(to_log_probs)), logits: rows(&logits),
                random: address(after(random.address)), width: int(vocabulary),
                cap: float(draw.soft_cap.unwrap_or(0.0)), temperature: f32(draw.temperature), top_p: f32(draw.top_p),
                min_p: f32(draw.min_p),
            };
            // SAFETY: logits are dense, and ids, log-probabilities and random numbers have a value for each of their rows.
            unsafe { self.launch(launch, &arguments) };
        }
        Drawn { ids_n: int_tensor(ids), log_probs_n: tensor(log_probs) }
    }

    /// Adds `factor` times the sum of `count` values, each times its weight unless `weights` is null, to the f32 at `sum`.
    fn add_sum(&self, sum: u64, factor: f32, values: u64, weights: u64, count: usize) {
        let shape = grid(1, CROSS_ENTROPY_THREADS as u32);
        let launch = Source::CrossEntropy(None).launch(DType::F32, "add_sum", shape, 4 * count);
        let arguments = arguments! {
            out: address(sum), factor: f32(factor), values: address(values), weights: address(weights), c: int(count),
        };
        // SAFETY: the sum is one f32, and there is one value and, unless null, one weight per row.
        unsafe { self.launch(launch, &arguments) };
    }
}
