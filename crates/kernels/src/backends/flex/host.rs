//! Between Burn tensors on the CPU and slices, without copies where the tensor is contiguous.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Int, Tensor, TensorData, TensorPrimitive};

/// A contiguous f32 tensor that can be read as a slice.
pub(super) struct Floats(FlexTensor);

impl Floats {
    /// Takes a tensor; copies only if it is a strided view.
    pub(super) fn of<const D: usize>(tensor: Tensor<Flex, D>) -> Self {
        let primitive = tensor.into_primitive().tensor();
        Self(if primitive.as_slice::<f32>().is_some() { primitive } else { primitive.to_contiguous() })
    }

    /// The values, row-major.
    pub(super) fn values(&self) -> &[f32] {
        self.0.as_slice().expect("the tensor is f32 and was made contiguous")
    }
}

/// A tensor of the given values, row-major.
pub(super) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<Flex, D> {
    Tensor::from_primitive(TensorPrimitive::Float(FlexTensor::from_data(TensorData::new(values, shape))))
}

/// An 8-bit tensor as bytes.
pub(super) fn bytes(tensor: &Tensor<Flex, 1, Int>) -> FlexTensor {
    tensor.clone().into_primitive()
}

/// Indices as they are counted with.
pub(super) fn indices(tensor: Tensor<Flex, 1, Int>) -> Vec<usize> {
    tensor.into_data().iter::<i64>().map(|index| index as usize).collect()
}
