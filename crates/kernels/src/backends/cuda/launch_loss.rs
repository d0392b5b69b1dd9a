//! Launches of the loss.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape};

use super::engine::Engine;
use super::gemm::Block;
use super::launch::Launch;
use super::launch_rows::{at, grid};
use super::program::Source;

/// Shared memory in which a block of the loss keeps parts of its row comes in tiles of this many bytes.
const TILE_BYTES: usize = 16_384;

impl Engine {
    /// Loss of each of `rows` rows of logits (f32), and the gradient of their sum times `scale` where a place is given: beside
    /// the logits, or on them.
    pub(super) fn cross_entropy(
        &self,
        logits: Block,
        gradient: Option<Block>,
        targets: u64,
        losses: u64,
        scale: Option<f64>,
        [rows, vocabulary]: [usize; 2],
    ) {
        if rows == 0 {
            return;
        }
        assert_eq!((logits.dtype, logits.stride), (DType::F32, vocabulary), "logits are dense f32");
        let dtype = gradient.map_or(DType::F32, |gradient| gradient.dtype);
        // What of a row stays in shared memory is not read a second time.
        let shared = gradient.map_or(0, |_| self.shared_bytes() / TILE_BYTES * TILE_BYTES);
        let bytes = rows * vocabulary * (4 + gradient.map_or(0, |gradient| gradient.dtype.size()));
        let launch = Launch {
            source: Source::CrossEntropy,
            dtype,
            name: "cross_entropy",
            shape: LaunchShape { shared_bytes: shared as u32, ..grid(rows, 1024) },
            bytes,
        };
        let arguments = Arguments::new()
            .pointer(at(logits.address))
            .pointer(at(gradient.map_or(0, |gradient| gradient.address)))
            .i64(gradient.map_or(0, |gradient| gradient.stride) as i64)
            .pointer(at(targets))
            .pointer(at(losses))
            .f32(scale.unwrap_or(0.0) as f32)
            .i32(rows as i32)
            .i64(vocabulary as i64);
        // SAFETY: logits are [rows, vocabulary]; a row of gradients begins where its row of logits does, or overlaps none;
        // targets and losses have one value a row.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Adds the losses of `rows` rows to a sum.
    pub(super) fn sum_losses(&self, sum: u64, losses: u64, rows: usize) {
        if rows == 0 {
            return;
        }
        let launch = Launch {
            source: Source::CrossEntropy,
            dtype: DType::F32,
            name: "sum_losses",
            shape: grid(1, 1024),
            bytes: 4 * rows,
        };
        let arguments = Arguments::new().pointer(at(sum)).pointer(at(losses)).i32(rows as i32);
        // SAFETY: the sum is one f32, and there is one loss a row.
        unsafe { self.launch(launch, &arguments) };
    }
}
