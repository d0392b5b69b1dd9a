//! Constant tables in device memory, uploaded once per device and thread, before the first section needs them.

use std::cell::OnceCell;

use burn_tensor::Tensor;
use cubecl::cuda::CudaDevice;
use firebrick_precision::{DynamicMap, NarrowFloat, QuantFormat, narrow_map};

use super::engine::Cuda;
use crate::weights::reference::byte_table;

#[derive(Default)]
pub(crate) struct Tables(OnceCell<Uploaded>);

struct Uploaded {
    signed: Tensor<Cuda, 1>,
    unsigned: Tensor<Cuda, 1>,
    e8m0: Tensor<Cuda, 1>,
    byte_tables: Vec<(QuantFormat, Tensor<Cuda, 2>)>,
}

impl Tables {
    /// Uploads all tables. Must be called outside sections, because Burn uploads them.
    pub(crate) fn prepare(&self, device: &CudaDevice) {
        self.0.get_or_init(|| Uploaded {
            signed: Tensor::from_floats(DynamicMap::signed().values().as_slice(), device),
            unsigned: Tensor::from_floats(DynamicMap::unsigned().values().as_slice(), device),
            e8m0: Tensor::from_floats(narrow_map(NarrowFloat::E8m0, None), device),
            byte_tables: QuantFormat::ALL.map(|format| (format, byte_table(format, device))).into(),
        });
    }

    fn uploaded(&self) -> &Uploaded {
        self.0.get().expect("tables are prepared with the device")
    }

    /// Returns the signed dynamic map, `[256]` f32.
    pub(crate) fn signed(&self) -> Tensor<Cuda, 1> {
        self.uploaded().signed.clone()
    }

    /// Returns the unsigned dynamic map, `[256]` f32.
    pub(crate) fn unsigned(&self) -> Tensor<Cuda, 1> {
        self.uploaded().unsigned.clone()
    }

    /// Returns the scale of each E8M0 code, `[256]` f32.
    pub(crate) fn e8m0(&self) -> Tensor<Cuda, 1> {
        self.uploaded().e8m0.clone()
    }

    /// Returns the values of each byte of codes, `[256, codes per byte]` f32.
    pub(crate) fn byte_table(&self, format: QuantFormat) -> Tensor<Cuda, 2> {
        let (_, table) =
            self.uploaded().byte_tables.iter().find(|(key, _)| *key == format).expect("every format has a table");
        table.clone()
    }
}
