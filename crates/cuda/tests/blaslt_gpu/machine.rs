//! A GPU with cuBLASLt, memory on it, and numbers in the formats of GEMMs.
//!
//! Trade-off: every copy waits for the device, which is slow and simple.

use cudarc::driver::result;
use firebrick_cuda::{BlasLt, Context, CudaError, Driver, ElementType, Matmul, Pointers, Stream};

pub(crate) struct Machine {
    pub(crate) blas: BlasLt,
    pub(crate) stream: Stream,
    context: Context,
}

/// Device memory that lives until it is dropped.
pub(crate) struct Memory {
    pub(crate) address: u64,
    bytes: usize,
    context: Context,
}

impl Machine {
    /// Finds the GPU; `None` without a driver or the libraries; other failures fail the test.
    pub(crate) fn find() -> Option<Self> {
        let driver = Driver::load().ok()?;
        let context = Context::retain(&driver, 0).expect("device 0 of a loaded driver");
        let blas = match BlasLt::new(&context) {
            Err(CudaError::LibrariesNotFound { .. }) => return None,
            created => created.expect("a handle of cuBLASLt"),
        };
        Some(Self { blas, stream: Stream::new(&context).expect("a stream"), context })
    }

    pub(crate) fn compute_capability(&self) -> (u32, u32) {
        self.context.driver().device(self.context.ordinal()).expect("the device").compute_capability
    }

    pub(crate) fn upload(&self, bytes: &[u8]) -> Memory {
        let memory = Memory::new(&self.context, bytes.len());
        let copy = || {
            // SAFETY: the memory was allocated with this length.
            unsafe { result::memcpy_htod_sync(memory.address, bytes) }.expect("copy to the device");
            // A copy from pageable memory returns once it is staged, and the stream of the GEMMs does not wait for it.
            result::ctx::synchronize().expect("the copy");
            Ok(())
        };
        self.context.with_current(copy).expect("context");
        memory
    }

    pub(crate) fn download(&self, memory: &Memory) -> Vec<u8> {
        self.stream.synchronize().expect("the GEMMs of the stream");
        let mut bytes = vec![0; memory.bytes];
        let copy = || {
            // SAFETY: the memory has this length, and no work on it is left.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, memory.address) }.expect("copy to the host");
            Ok(())
        };
        self.context.with_current(copy).expect("context");
        bytes
    }

    pub(crate) fn run(&self, matmul: &Matmul, alpha: f32, beta: f32, pointers: Pointers) -> Result<(), CudaError> {
        // SAFETY: the tests pass memory allocated for the GEMM, and read it, which waits for the stream, before they drop it.
        unsafe { self.blas.run(&self.stream, matmul, alpha, beta, pointers) }
    }
}

impl Memory {
    fn new(context: &Context, bytes: usize) -> Self {
        // SAFETY: freed once, in `drop`.
        let allocate = || Ok(unsafe { result::malloc_sync(bytes) }.expect("device memory"));
        let address = context.with_current(allocate).expect("context");
        Self { address, bytes, context: context.clone() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: allocated by `new` and freed once; cuMemFree waits for work of the device.
            let _ = unsafe { result::free_sync(self.address) };
            Ok(())
        });
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

/// Returns the bits of exponent and mantissa.
fn form(element: ElementType) -> (u32, u32) {
    match element {
        ElementType::F32 => (8, 23),
        ElementType::Bf16 => (8, 7),
        ElementType::F16 => (5, 10),
        ElementType::E4m3 => (4, 3),
        ElementType::E5m2 => (5, 2),
        ElementType::E2m1 => unreachable!("two numbers share a byte, and no card here multiplies them"),
    }
}

/// Encodes numbers, which the format must represent exactly and as normal numbers.
pub(crate) fn encode(element: ElementType, numbers: &[f32]) -> Vec<u8> {
    let (exponent_bits, mantissa_bits) = form(element);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let one = |number: &f32| {
        let bits = number.to_bits();
        let sign = bits >> 31 << (exponent_bits + mantissa_bits);
        let (exponent, mantissa) =
            ((bits >> 23 & 0xFF) as i32 - 127 + bias, (bits & 0x7F_FFFF) >> (23 - mantissa_bits));
        let packed = match *number {
            0.0 => 0,
            _ if number.is_nan() => (1 << (exponent_bits + mantissa_bits)) - 1,
            _ => {
                assert!(exponent > 0 && exponent < 1 << exponent_bits, "{number} is out of range for {element}");
                assert_eq!(mantissa << (23 - mantissa_bits), bits & 0x7F_FFFF, "{element} does not hold {number}");
                sign | (exponent as u32) << mantissa_bits | mantissa
            }
        };
        packed.to_le_bytes().into_iter().take(element.bits() / 8)
    };
    numbers.iter().flat_map(one).collect()
}

/// Decodes numbers: zeros, normal numbers, and NaN for everything with the largest exponent.
pub(crate) fn decode(element: ElementType, bytes: &[u8]) -> Vec<f32> {
    let (exponent_bits, mantissa_bits) = form(element);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let one = |bytes: &[u8]| {
        let bits = bytes.iter().rev().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte));
        let mantissa = bits & ((1 << mantissa_bits) - 1);
        let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
        let sign = if bits >> (exponent_bits + mantissa_bits) & 1 == 1 { -1.0 } else { 1.0 };
        if exponent == (1 << exponent_bits) - 1 {
            return f32::NAN;
        }
        if exponent == 0 && mantissa == 0 {
            return 0.0;
        }
        let magnitude =
            f32::from_bits(((exponent as i32 - bias + 127) as u32) << 23 | mantissa << (23 - mantissa_bits));
        sign * magnitude
    };
    bytes.chunks_exact(element.bits() / 8).map(one).collect()
}

#[test]
fn numbers_survive_encoding_and_decoding() {
    use ElementType::{Bf16, E4m3, E5m2, F16, F32};
    let numbers = [0.0, 1.0, -1.0, 0.5, -24.0, 1.5];
    for element in [F32, Bf16, F16, E4m3, E5m2] {
        assert_eq!(decode(element, &encode(element, &numbers)), numbers, "{element}");
    }
    assert_eq!(encode(Bf16, &[1.0, -2.0]), [0x80, 0x3F, 0x00, 0xC0]);
    assert_eq!(encode(E4m3, &[1.0, -2.0]), [0x38, 0xC0]);
    assert!(decode(F16, &encode(F16, &[f32::NAN]))[0].is_nan());
}
