//! A GPU with cuBLASLt, and numbers in the formats of GEMMs.

use firebrick_cuda::{BlasLt, CudaError, ElementType, Matmul, Pointers};
use firebrick_precision::NarrowFloat;
use half::{bf16, f16};

use crate::device::Device;

pub(crate) struct Machine {
    pub(crate) blas: BlasLt,
    pub(crate) device: Device,
}

impl Machine {
    /// Finds the GPU; `None` without a driver or the libraries; other failures fail the test.
    pub(crate) fn find() -> Option<Self> {
        let device = Device::find()?;
        match BlasLt::new(&device.context) {
            Err(CudaError::LibrariesNotFound { .. }) => None,
            created => Some(Self { blas: created.expect("a handle of cuBLASLt"), device }),
        }
    }

    pub(crate) fn compute_capability(&self) -> (u32, u32) {
        let context = &self.device.context;
        context.driver().device(context.ordinal()).expect("the device").compute_capability
    }

    pub(crate) fn run(&self, matmul: &Matmul, alpha: f32, beta: f32, pointers: Pointers) -> Result<(), CudaError> {
        // SAFETY: the tests pass memory allocated for the GEMM, and read it, which waits for the stream, before they drop it.
        let prepared = unsafe { self.blas.prepare(|| &self.device.stream, matmul, alpha, beta, pointers)? };
        // SAFETY: as above.
        prepared.map_or(Ok(()), |prepared| unsafe { prepared.submit(&self.device.stream) })
    }
}

/// Returns numbers of -1, 0 and 1, the same for the same seed.
pub(crate) fn ternary(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        // Xorshift (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        [-1.0, 0.0, 1.0][(state >> 8) as usize % 3]
    };
    (0..count).map(|_| next()).collect()
}

/// Encodes numbers, which the format represents exactly.
pub(crate) fn encode(element: ElementType, numbers: &[f32]) -> Vec<u8> {
    let one = |&number: &f32| match element {
        ElementType::F32 => number.to_le_bytes().to_vec(),
        ElementType::Bf16 => bf16::from_f32(number).to_le_bytes().to_vec(),
        ElementType::F16 => f16::from_f32(number).to_le_bytes().to_vec(),
        ElementType::E4m3 => vec![NarrowFloat::E4m3.encode(number)],
    };
    let bytes: Vec<u8> = numbers.iter().flat_map(one).collect();
    assert!(numbers.iter().zip(decode(element, &bytes)).all(|(a, b)| *a == b || a.is_nan()), "inexact in {element}");
    bytes
}

pub(crate) fn decode(element: ElementType, bytes: &[u8]) -> Vec<f32> {
    match element {
        ElementType::F32 => bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        ElementType::Bf16 => bytes.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        ElementType::F16 => bytes.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        ElementType::E4m3 => bytes.iter().map(|&code| NarrowFloat::E4m3.decode(code)).collect(),
    }
}
