//! Conversion between Burn tensors on the CPU and slices, without copies for contiguous tensors, and the division of work into tasks.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};

/// Values per task: enough to pay for moving it to another core.
pub(super) const TASK: usize = 16 * 1024;

pub(super) fn rows_per_task(width: usize) -> usize {
    (TASK / width).max(1)
}

pub(super) fn is_f32<const D: usize>(tensor: &Tensor<Flex, D>) -> bool {
    tensor.dtype() == DType::F32
}

/// A contiguous f32 tensor that can be read as a slice.
pub(super) struct Floats(FlexTensor);

impl Floats {
    /// Takes a tensor; copies only if it is a strided view.
    pub(super) fn of<const D: usize>(tensor: Tensor<Flex, D>) -> Self {
        let primitive = tensor.into_primitive().tensor();
        Self(if primitive.as_slice::<f32>().is_some() { primitive } else { primitive.to_contiguous() })
    }

    /// Returns the values, row-major.
    pub(super) fn values(&self) -> &[f32] {
        self.0.as_slice().expect("the tensor is f32 and was made contiguous")
    }
}

/// Creates a tensor of the given values, row-major.
pub(super) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<Flex, D> {
    Tensor::from_primitive(TensorPrimitive::Float(FlexTensor::from_data(TensorData::new(values, shape))))
}

/// Changes the values of a contiguous f32 tensor; copies them first if they are shared.
pub(super) fn in_place<const D: usize>(tensor: Tensor<Flex, D>, work: impl FnOnce(&mut [f32])) -> Tensor<Flex, D> {
    let mut primitive = tensor.into_primitive().tensor();
    assert!(primitive.is_contiguous(), "a tensor that is written in place is contiguous");
    work(primitive.storage_mut::<f32>());
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(super) fn bytes(tensor: &Tensor<Flex, 1, Int>) -> FlexTensor {
    let primitive = tensor.clone().into_primitive();
    if primitive.as_slice::<u8>().is_some() { primitive } else { primitive.to_contiguous() }
}

pub(super) fn indices(tensor: Tensor<Flex, 1, Int>) -> Vec<usize> {
    tensor.into_data().iter::<i64>().map(|index| index as usize).collect()
}
