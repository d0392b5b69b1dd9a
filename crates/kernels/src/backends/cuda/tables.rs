//! Constant tables in device memory, uploaded once per device and thread, before the first section needs them.

use std::cell::OnceCell;

use burn_tensor::Tensor;
use cubecl::cuda::CudaDevice;
use firebrick_precision::{DynamicMap, NarrowFloat, QuantFormat, narrow_map};

use super::engine::Cuda;
use crate::weights::reference::byte_table;

#[derive(Default)]
pub(crate) struct Tables {
    signed: OnceCell<Tensor<Cuda, 1>>,
    unsigned: OnceCell<Tensor<Cuda, 1>>,
    e8m0: OnceCell<Tensor<Cuda, 1>>,
    byte_tables: OnceCell<Vec<(QuantFormat, Tensor<Cuda, 2>)>>,
}

impl Tables {
    /// Uploads all tables. Must be called outside sections, because Burn uploads them.
    pub(crate) fn prepare(&self, device: &CudaDevice) {
        self.signed.get_or_init(|| Tensor::from_floats(DynamicMap::signed().values().as_slice(), device));
        self.unsigned.get_or_init(|| Tensor::from_floats(DynamicMap::unsigned().values().as_slice(), device));
        self.e8m0.get_or_init(|| Tensor::from_floats(narrow_map(NarrowFloat::E8m0, None), device));
        self.byte_tables.get_or_init(|| QuantFormat::ALL.map(|format| (format, byte_table(format, device))).into());
    }

    /// Returns the signed dynamic map, `[256]` f32.
    pub(crate) fn signed(&self) -> Tensor<Cuda, 1> {
        self.signed.get().expect("tables are prepared with the device").clone()
    }

    /// Returns the unsigned dynamic map, `[256]` f32.
    pub(crate) fn unsigned(&self) -> Tensor<Cuda, 1> {
        self.unsigned.get().expect("tables are prepared with the device").clone()
    }

    /// Returns the scale of each E8M0 code, `[256]` f32.
    pub(crate) fn e8m0(&self) -> Tensor<Cuda, 1> {
        self.e8m0.get().expect("tables are prepared with the device").clone()
    }

    /// Returns the values of each byte of codes, `[256, codes per byte]` f32.
    pub(crate) fn byte_table(&self, format: QuantFormat) -> Tensor<Cuda, 2> {
        let tables = self.byte_tables.get().expect("tables are prepared with the device");
        let (_, table) = tables.iter().find(|(key, _)| *key == format).expect("every format has a table");
        table.clone()
    }
}
