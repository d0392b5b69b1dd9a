//! Constant tables in device memory, uploaded once per engine, before the first section needs them.
//! Trade-off: a few KiB per engine, whether they are used or not.

use std::cell::OnceCell;

use burn_tensor::Tensor;
use cubecl::cuda::CudaDevice;
use firebrick_precision::DynamicMap;
use firebrick_precision::nf4::LEVELS;

use super::engine::Cuda;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Tables {
    signed: OnceCell<Tensor<Cuda, 1>>,
    unsigned: OnceCell<Tensor<Cuda, 1>>,
    nf4: OnceCell<Tensor<Cuda, 2>>,
}

impl Tables {
    /// Uploads all of them. Not inside a section: Burn does it.
    pub(super) fn prepare(&self, device: &CudaDevice) {
        self.signed.get_or_init(|| Tensor::from_floats(DynamicMap::signed().values().as_slice(), device));
        self.unsigned.get_or_init(|| Tensor::from_floats(DynamicMap::unsigned().values().as_slice(), device));
        self.nf4.get_or_init(|| {
            let pairs: Vec<f32> =
                (0..=255u8).flat_map(|byte| [byte >> 4, byte & 15]).map(|code| LEVELS[usize::from(code)]).collect();
            Tensor::<Cuda, 1>::from_floats(pairs.as_slice(), device).reshape([256, 2])
        });
    }

    /// The signed dynamic map, `[256]` f32.
    pub(super) fn signed(&self) -> Tensor<Cuda, 1> {
        self.signed.get().expect("tables are prepared with the engine").clone()
    }

    /// The unsigned dynamic map, `[256]` f32.
    pub(super) fn unsigned(&self) -> Tensor<Cuda, 1> {
        self.unsigned.get().expect("tables are prepared with the engine").clone()
    }

    /// The two values of each byte of NF4 codes, `[256, 2]` f32.
    pub(super) fn nf4(&self) -> Tensor<Cuda, 2> {
        self.nf4.get().expect("tables are prepared with the engine").clone()
    }
}
