//! The library's descriptors of one GEMM: the operation, the layouts of its matrices, and the constraints on algorithms.
//!
//! cuBLASLt's kernels are written for column-major matrices. A row-major matrix is, byte for byte, its transpose in column-major
//! order. So the library computes `D^T = op(B)^T op(A)^T`: B comes first, A second, nothing is copied, and an operand that
//! we use untransposed is also untransposed for the library.
//!
//! Trade-off: the heuristic must know alignments in advance, so each alignment has its own plan.

use std::ptr;

use super::matmul::{ElementType, Matmul, Operand, Scaling};
use super::pointers::Alignment;
use super::symbols::{self, Destroy, Opaque, SetAttribute, Status, Symbols, description, preference};
use crate::error::CudaError;

/// The device memory that a call may use as scratch.
#[derive(Clone, Copy)]
pub(super) struct Workspace {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// The arguments of `cublasLtMatrixLayoutCreate` for one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) element: ElementType,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) leading: i64,
}

/// The GEMM in the library's terms: `first` is its A, `second` its B, `output` its C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ColumnMajor {
    pub(super) first: Layout,
    pub(super) first_transposed: bool,
    pub(super) second: Layout,
    pub(super) second_transposed: bool,
    pub(super) output: Layout,
}

impl ColumnMajor {
    pub(super) fn of(matmul: &Matmul) -> Self {
        let (m, n, k) = (matmul.m, matmul.n, matmul.k);
        Self {
            first: stored(matmul.b, k, n),
            first_transposed: matmul.b.transposed,
            second: stored(matmul.a, m, k),
            second_transposed: matmul.a.transposed,
            output: layout(matmul.output, n, m, matmul.c_leading),
        }
    }
}

/// Returns the layout of an operand whose `op` is `rows` x `columns`, row-major.
fn stored(operand: Operand, rows: usize, columns: usize) -> Layout {
    // Row-major [rows, columns] is column-major [columns, rows], and vice versa for an operand that is stored
    // transposed.
    let [rows, columns] = if operand.transposed { [rows, columns] } else { [columns, rows] };
    layout(operand.element, rows, columns, operand.leading)
}

fn layout(element: ElementType, rows: usize, columns: usize, leading: usize) -> Layout {
    // No buffer has 2^63 elements, so the library refuses a leading dimension that wraps here.
    Layout { element, rows: rows as u64, columns: columns as u64, leading: leading as i64 }
}

/// The cache key of a plan: two calls with equal keys may use the same algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) matmul: Matmul,
    pub(super) alignment: Alignment,
}

/// Describes the GEMM for messages, with the rules of 8-bit kernels if they apply.
pub(super) fn requested(matmul: &Matmul) -> String {
    if !matmul.a.element.is_fp8() {
        return matmul.to_string();
    }
    format!("{matmul} (8-bit kernels need A untransposed, B transposed, and n and k to be multiples of 16)")
}

/// Builds the operation's descriptor: compute type, transposes, epilogue, scaling.
pub(super) fn describe(
    symbols: &Symbols,
    key: &Key,
    mapped: &ColumnMajor,
    workspace: Workspace,
) -> Result<Object, CudaError> {
    let matmul = &key.matmul;
    let object = Object::new(symbols.description_destroy, |handle| {
        // SAFETY: the pointer is valid for a write, and the codes are those of cublasComputeType_t and cudaDataType_t.
        let status = unsafe { (symbols.description_create)(handle, symbols::COMPUTE_F32, symbols::TYPE_F32) };
        symbols.checked("cublasLtMatmulDescCreate", status, || requested(matmul))
    })?;
    let operation = |transposed| if transposed { symbols::OPERATION_TRANSPOSE } else { symbols::OPERATION_NONE };
    object.set_description(symbols, matmul, description::TRANSPOSE_A, operation(mapped.first_transposed))?;
    object.set_description(symbols, matmul, description::TRANSPOSE_B, operation(mapped.second_transposed))?;
    if matmul.bias {
        object.set_description(symbols, matmul, description::EPILOGUE, symbols::EPILOGUE_BIAS)?;
        // The heuristic uses only the alignment of this address, so any address with the alignment of the real one will do.
        // The workspace is aligned to at least 256 bytes.
        let step = u64::from(key.alignment.bias) % 256;
        object.set_description(symbols, matmul, description::BIAS_POINTER, workspace.address + step)?;
    }
    if matmul.fast_accumulation && matmul.a.element.is_fp8() {
        object.set_description(symbols, matmul, description::FAST_ACCUMULATION, 1_i8)?;
    }
    if matmul.scaling != Scaling::None {
        // Likewise, this only tells the heuristic that there will be scales.
        object.set_description(symbols, matmul, description::A_SCALE_POINTER, workspace.address)?;
        object.set_description(symbols, matmul, description::B_SCALE_POINTER, workspace.address)?;
    }
    if matmul.scaling.code() != 0 {
        object.set_description(symbols, matmul, description::A_SCALE_MODE, matmul.scaling.code())?;
        object.set_description(symbols, matmul, description::B_SCALE_MODE, matmul.scaling.code())?;
    }
    Ok(object)
}

pub(super) fn lay_out(symbols: &Symbols, matmul: &Matmul, layout: Layout) -> Result<Object, CudaError> {
    Object::new(symbols.layout_destroy, |object| {
        let code = layout.element.code();
        // SAFETY: the pointer is valid for a write, and the code is one of cudaDataType_t.
        let status = unsafe { (symbols.layout_create)(object, code, layout.rows, layout.columns, layout.leading) };
        symbols.checked("cublasLtMatrixLayoutCreate", status, || requested(matmul))
    })
}

/// Returns how partial sums of a split reduction may be stored and added. In bf16 they would lose the precision of accumulation in f32.
fn reduction_schemes(output: ElementType, in_order: bool) -> u32 {
    if output == ElementType::F32 && !in_order { symbols::REDUCTION_ANY } else { symbols::REDUCTION_IN_COMPUTE_TYPE }
}

/// Builds the constraints on algorithms: workspace, alignments, and partial sums of a split reduction.
pub(super) fn prefer(symbols: &Symbols, key: &Key, workspace: Workspace, in_order: bool) -> Result<Object, CudaError> {
    let matmul = &key.matmul;
    let object = Object::new(symbols.preference_destroy, |handle| {
        // SAFETY: the pointer is valid for a write.
        let status = unsafe { (symbols.preference_create)(handle) };
        symbols.checked("cublasLtMatmulPreferenceCreate", status, || requested(matmul))
    })?;
    let set = |attribute, value: u32| object.set_preference(symbols, matmul, attribute, value);
    object.set_preference(symbols, matmul, preference::WORKSPACE_BYTES, workspace.bytes)?;
    set(preference::REDUCTION_SCHEMES, reduction_schemes(matmul.output, in_order))?;
    set(preference::ALIGNMENT_A, key.alignment.b.into())?;
    set(preference::ALIGNMENT_B, key.alignment.a.into())?;
    set(preference::ALIGNMENT_C, key.alignment.c.into())?;
    set(preference::ALIGNMENT_D, key.alignment.d.into())?;
    Ok(object)
}

/// A descriptor, a layout or a preference, destroyed with its owner.
pub(super) struct Object {
    pub(super) handle: Opaque,
    destroy: Destroy,
}

// SAFETY: the objects are plain memory of the library, not tied to a thread; a lock guards writes to a shared one.
unsafe impl Send for Object {}
// SAFETY: as above; the library only reads an object that is passed to a call.
unsafe impl Sync for Object {}

impl Object {
    /// Creates the object whose handle `create` writes.
    fn new(destroy: Destroy, create: impl FnOnce(*mut Opaque) -> Result<(), CudaError>) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        create(&mut handle)?;
        Ok(Self { handle, destroy })
    }

    /// Sets an attribute of this object, which must be an operation descriptor.
    pub(super) fn set_description<T: Copy>(
        &self,
        s: &Symbols,
        m: &Matmul,
        attribute: u32,
        value: T,
    ) -> Result<(), CudaError> {
        let status = self.set(s.description_set, attribute, value);
        s.checked("cublasLtMatmulDescSetAttribute", status, || format!("attribute {attribute} of {}", requested(m)))
    }

    /// Sets an attribute of this object, which must be a preference.
    fn set_preference<T: Copy>(&self, s: &Symbols, m: &Matmul, attribute: u32, value: T) -> Result<(), CudaError> {
        let status = self.set(s.preference_set, attribute, value);
        s.checked("cublasLtMatmulPreferenceSetAttribute", status, || {
            format!("attribute {attribute} of {}", requested(m))
        })
    }

    fn set<T: Copy>(&self, function: SetAttribute, attribute: u32, value: T) -> Status {
        // SAFETY: the object is alive, and of the kind that `function` takes, which all callers of the two methods above
        // ensure. The library copies the value, and refuses one whose size is not that of the attribute.
        unsafe { function(self.handle, attribute, ptr::from_ref(&value).cast(), size_of::<T>()) }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: created by the matching function and destroyed once. It only frees memory, so there is nothing to report.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::ElementType::{Bf16, E4m3, F32};
    use super::*;
    use crate::blaslt::pointers::Pointers;

    /// Returns the index of an element in the library's terms.
    fn column_major_at(layout: Layout, transposed: bool, row: usize, column: usize) -> usize {
        let [row, column] = if transposed { [column, row] } else { [row, column] };
        assert!((row as u64) < layout.rows && (column as u64) < layout.columns, "{layout:?} has no [{row}, {column}]");
        column * layout.leading as usize + row
    }

    fn row_major_at(leading: usize, transposed: bool, row: usize, column: usize) -> usize {
        if transposed { column * leading + row } else { row * leading + column }
    }

    #[test]
    fn column_major_gemms_touch_the_same_elements() {
        let (m, n, k) = (3, 5, 7);
        for (transpose_a, transpose_b, wider) in
            [false, true].into_iter().flat_map(|a| [(a, false, 0), (a, true, 0), (a, false, 4), (a, true, 9)])
        {
            let mut matmul = Matmul::dense([m, n, k], Bf16, [transpose_a, transpose_b], F32);
            matmul.a.leading += wider;
            matmul.b.leading += wider;
            matmul.c_leading += wider;
            let mapped = ColumnMajor::of(&matmul);
            for (row, column, inner) in (0..m).flat_map(|i| (0..n).flat_map(move |j| (0..k).map(move |l| (i, j, l)))) {
                assert_eq!(
                    column_major_at(mapped.second, mapped.second_transposed, inner, row),
                    row_major_at(matmul.a.leading, transpose_a, row, inner),
                    "A of {matmul}"
                );
                assert_eq!(
                    column_major_at(mapped.first, mapped.first_transposed, column, inner),
                    row_major_at(matmul.b.leading, transpose_b, inner, column),
                    "B of {matmul}"
                );
                assert_eq!(
                    column_major_at(mapped.output, false, column, row),
                    row_major_at(matmul.c_leading, false, row, column),
                    "D of {matmul}"
                );
            }
            assert_eq!((mapped.first.element, mapped.output.element), (Bf16, F32));
        }
    }

    #[test]
    fn parts_of_a_sum_are_added_to_an_output_only_in_f32_and_in_no_fixed_order() {
        let (any, apart) = (symbols::REDUCTION_ANY, symbols::REDUCTION_IN_COMPUTE_TYPE);
        assert_eq!([F32, Bf16].map(|output| reduction_schemes(output, false)), [any, apart]);
        assert_eq!([F32, Bf16].map(|output| reduction_schemes(output, true)), [apart, apart]);
    }

    #[test]
    fn keys_differ_where_algorithms_may_differ() {
        let matmul = Matmul::dense([32, 16, 8], Bf16, [false, true], Bf16);
        let key = |matmul, address| Key { matmul, alignment: Alignment::of(&Pointers::new(address, 512, 512, 512)) };
        let base = key(matmul, 4096);
        assert_eq!(base, key(matmul, 8192), "two fresh allocations");
        assert_ne!(base, key(matmul, 4096 + 16));
        assert_ne!(base, key(Matmul { m: 33, ..matmul }, 4096));
        assert_ne!(base, key(Matmul { c_leading: 17, ..matmul }, 4096));
        assert_ne!(base, key(Matmul { bias: true, ..matmul }, 4096));
    }

    /// Needs the library but no GPU; returns early without the library.
    #[test]
    fn the_library_accepts_all_our_descriptors() {
        let Ok(symbols) = Symbols::load_alone() else { return };
        let workspace = Workspace { address: 1 << 20, bytes: 1 << 26 };
        let alignment = Alignment { bias: 16, ..Alignment::BEST };
        let fp8 = Matmul::dense([64, 32, 128], E4m3, [false, true], Bf16);
        let half = Matmul::dense([64, 32, 128], Bf16, [true, false], F32);
        for matmul in [
            half,
            Matmul { bias: true, ..half },
            Matmul::dense([3, 5, 7], F32, [false, false], F32),
            Matmul { fast_accumulation: true, ..fp8 },
            Matmul { scaling: Scaling::OuterVector, ..fp8 },
            Matmul { scaling: Scaling::Blocks32, ..fp8 },
        ] {
            let key = Key { matmul, alignment };
            let mapped = ColumnMajor::of(&matmul);
            describe(symbols, &key, &mapped, workspace).expect("operation");
            for in_order in [false, true] {
                prefer(symbols, &key, workspace, in_order).expect("preference");
            }
            for layout in [mapped.first, mapped.second, mapped.output] {
                lay_out(symbols, &matmul, layout).expect("layout");
            }
        }
    }

    #[test]
    fn a_value_of_wrong_size_is_an_error_by_attribute() {
        let Ok(symbols) = Symbols::load_alone() else { return };
        let matmul = Matmul::dense([3, 5, 7], F32, [false, false], F32);
        let key = Key { matmul, alignment: Alignment::BEST };
        let object = prefer(symbols, &key, Workspace { address: 256, bytes: 0 }, false).expect("preference");
        let error = object.set_preference(symbols, &matmul, preference::WORKSPACE_BYTES, 1_u8).expect_err("8 bytes");
        assert!(error.to_string().contains("attribute 1 of f32 [3, 7]"), "{error}");
    }
}
