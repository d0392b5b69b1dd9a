//! The library's descriptors of one product: the operation, the layouts of its matrices, and what an algorithm may rely on.

use std::ptr;

use super::column_major::{ColumnMajor, Key, Layout};
use super::matmul::{ElementType, Epilogue, Matmul, Scaling};
use super::plan::Scratch;
use super::symbols::{self, Destroy, Opaque, SetAttribute, Status, Symbols, description, preference};
use crate::CudaError;

/// The product in words, with the rules of 8-bit kernels where they apply.
pub(super) fn asked(matmul: &Matmul) -> String {
    if !matmul.a.element.is_fp8() {
        return matmul.to_string();
    }
    format!("{matmul} (8-bit kernels want A as stored, B transposed, and n and k to be multiples of 16)")
}

/// The operation: compute type, transposes, epilogue, scaling.
pub(super) fn describe(
    symbols: &Symbols,
    key: &Key,
    mapped: &ColumnMajor,
    scratch: Scratch,
) -> Result<Object, CudaError> {
    let matmul = &key.matmul;
    let tf32 = matmul.a.element == ElementType::F32 && matmul.allow_tf32;
    let compute = if tf32 { symbols::COMPUTE_TF32 } else { symbols::COMPUTE_F32 };
    let made = Object::new(symbols.description_destroy, |object| {
        // SAFETY: the pointer is valid for a write, the codes are those of cublasComputeType_t and cudaDataType_t.
        let status = unsafe { (symbols.description_create)(object, compute, symbols::TYPE_F32) };
        symbols.checked("cublasLtMatmulDescCreate", status, || asked(matmul))
    })?;
    let operation = |transposed| if transposed { symbols::OPERATION_TRANSPOSE } else { symbols::OPERATION_NONE };
    made.set_description(symbols, matmul, description::TRANSPOSE_A, operation(mapped.first_transposed))?;
    made.set_description(symbols, matmul, description::TRANSPOSE_B, operation(mapped.second_transposed))?;
    if matmul.epilogue != Epilogue::None {
        made.set_description(symbols, matmul, description::EPILOGUE, matmul.epilogue.code())?;
        // The heuristic reads the alignment of this address and nothing else of it: any address aligned as the real one will
        // do. Scratch is aligned to 256 bytes at least.
        let step = u64::from(key.alignment.bias) % 256;
        made.set_description(symbols, matmul, description::BIAS_POINTER, scratch.address + step)?;
    }
    if matmul.fast_accumulation && matmul.a.element.is_fp8() {
        made.set_description(symbols, matmul, description::FAST_ACCUMULATION, 1_i8)?;
    }
    if matmul.scaling != Scaling::None {
        // Likewise only there to say that there will be scales.
        made.set_description(symbols, matmul, description::A_SCALE_POINTER, scratch.address)?;
        made.set_description(symbols, matmul, description::B_SCALE_POINTER, scratch.address)?;
    }
    if matmul.scaling.code() != 0 {
        made.set_description(symbols, matmul, description::A_SCALE_MODE, matmul.scaling.code())?;
        made.set_description(symbols, matmul, description::B_SCALE_MODE, matmul.scaling.code())?;
    }
    Ok(made)
}

/// One matrix' layout.
pub(super) fn lay_out(symbols: &Symbols, matmul: &Matmul, layout: Layout) -> Result<Object, CudaError> {
    Object::new(symbols.layout_destroy, |object| {
        let code = layout.element.code();
        // SAFETY: the pointer is valid for a write, and the code is one of cudaDataType_t.
        let status = unsafe { (symbols.layout_create)(object, code, layout.rows, layout.columns, layout.leading) };
        symbols.checked("cublasLtMatrixLayoutCreate", status, || asked(matmul))
    })
}

/// What the algorithms may rely on: workspace, alignments, how partial sums of a split reduction are kept.
pub(super) fn prefer(symbols: &Symbols, key: &Key, scratch: Scratch) -> Result<Object, CudaError> {
    let matmul = &key.matmul;
    let made = Object::new(symbols.preference_destroy, |object| {
        // SAFETY: the pointer is valid for a write.
        let status = unsafe { (symbols.preference_create)(object) };
        symbols.checked("cublasLtMatmulPreferenceCreate", status, || asked(matmul))
    })?;
    let set = |attribute, value: u32| made.set_preference(symbols, matmul, attribute, value);
    made.set_preference(symbols, matmul, preference::WORKSPACE_BYTES, scratch.bytes)?;
    // Partial sums in bf16 would lose in the reduction what f32 accumulation has kept before it.
    let exact = matmul.output == ElementType::F32;
    let schemes = if exact { symbols::REDUCTION_ANY } else { symbols::REDUCTION_IN_COMPUTE_TYPE };
    set(preference::REDUCTION_SCHEMES, schemes)?;
    set(preference::ALIGNMENT_A, key.alignment.b.into())?;
    set(preference::ALIGNMENT_B, key.alignment.a.into())?;
    set(preference::ALIGNMENT_C, key.alignment.c.into())?;
    set(preference::ALIGNMENT_D, key.alignment.d.into())?;
    Ok(made)
}

/// A descriptor, a layout or a preference, destroyed with its owner.
pub(super) struct Object {
    pub(super) handle: Opaque,
    destroy: Destroy,
}

// SAFETY: the objects are plain memory of the library, tied to no thread; writes to a shared one are behind a lock.
unsafe impl Send for Object {}
// SAFETY: as above: the library only reads an object that is passed to a call.
unsafe impl Sync for Object {}

impl Object {
    /// What `create` writes.
    fn new(destroy: Destroy, create: impl FnOnce(*mut Opaque) -> Result<(), CudaError>) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        create(&mut handle)?;
        Ok(Self { handle, destroy })
    }

    /// Sets an attribute of this operation descriptor, which must be one.
    pub(super) fn set_description<T: Copy>(
        &self,
        s: &Symbols,
        m: &Matmul,
        attribute: u32,
        value: T,
    ) -> Result<(), CudaError> {
        let status = self.set(s.description_set, attribute, value);
        s.checked("cublasLtMatmulDescSetAttribute", status, || format!("attribute {attribute} of {}", asked(m)))
    }

    /// Sets an attribute of this preference, which must be one.
    fn set_preference<T: Copy>(&self, s: &Symbols, m: &Matmul, attribute: u32, value: T) -> Result<(), CudaError> {
        let status = self.set(s.preference_set, attribute, value);
        s.checked("cublasLtMatmulPreferenceSetAttribute", status, || format!("attribute {attribute} of {}", asked(m)))
    }

    fn set<T: Copy>(&self, function: SetAttribute, attribute: u32, value: T) -> Status {
        // SAFETY: the object is alive, and of the kind that `function` is for, as all callers of the two above see to; the
        // library copies the value, and refuses one whose size is not the attribute's.
        unsafe { function(self.handle, attribute, ptr::from_ref(&value).cast(), size_of::<T>()) }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: made by the matching create function and destroyed once. It only frees memory; there is nothing to report.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blaslt::pointers::Alignment;

    /// Says something only where the library is: descriptors need no GPU.
    #[test]
    fn the_library_accepts_every_descriptor_that_we_make() {
        let Ok(symbols) = Symbols::load_up_to(u32::MAX) else { return };
        let scratch = Scratch { address: 1 << 20, bytes: 1 << 26 };
        let alignment = Alignment { bias: 16, ..Alignment::BEST };
        use ElementType::{Bf16, E4m3, F32};
        let fp8 = Matmul::dense([64, 32, 128], E4m3, [false, true], Bf16);
        let half = Matmul::dense([64, 32, 128], Bf16, [true, false], F32);
        for matmul in [
            half,
            Matmul { epilogue: Epilogue::Bias, ..half },
            Matmul { epilogue: Epilogue::BiasGradient, ..half },
            Matmul { allow_tf32: true, ..Matmul::dense([3, 5, 7], F32, [false, false], F32) },
            Matmul { scaling: Scaling::Tensor, fast_accumulation: true, ..fp8 },
            Matmul { scaling: Scaling::OuterVector, ..fp8 },
        ] {
            let key = Key { matmul, alignment };
            let mapped = ColumnMajor::of(&matmul);
            describe(symbols, &key, &mapped, scratch).expect("operation");
            prefer(symbols, &key, scratch).expect("preference");
            for layout in [mapped.first, mapped.second, mapped.output] {
                lay_out(symbols, &matmul, layout).expect("layout");
            }
        }
    }

    #[test]
    fn a_value_of_the_wrong_size_is_an_error_and_names_the_attribute() {
        let Ok(symbols) = Symbols::load_up_to(u32::MAX) else { return };
        let matmul = Matmul::dense([3, 5, 7], ElementType::F32, [false, false], ElementType::F32);
        let key = Key { matmul, alignment: Alignment::BEST };
        let made = prefer(symbols, &key, Scratch { address: 256, bytes: 0 }).expect("preference");
        let error = made.set_preference(symbols, &matmul, preference::WORKSPACE_BYTES, 1_u8).expect_err("8 bytes");
        assert!(error.to_string().contains("attribute 1 of f32 [3, 7]"), "{error}");
    }
}
