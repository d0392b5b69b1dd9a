//! The part of cuDNN 9's backend interface that attention needs: numbers of `cudnn_graph.h` and functions looked up by name.
//!
//! The numbers are part of cuDNN's binary interface and do not change within a major version. They are listed here, not taken
//! from bindings, so that errors can name them, and so that no binding loads the library implicitly.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::error::CudaError;
use crate::symbols::symbols;

/// `cudnnHandle_t`, `cudnnBackendDescriptor_t` and `cudaStream_t` are all opaque pointers.
pub(super) type Raw = *mut c_void;
/// `cudnnStatus_t`.
pub(super) type Status = c_int;

/// `cudnnBackendDescriptorType_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
}

/// `cudnnBackendAttributeName_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwiseMathPrecision = 1,
    PointwiseAxis = 9,
    EngineHeuristicsMode = 200,
    EngineHeuristicsOperationGraph = 201,
    EngineHeuristicsResults = 202,
    ExecutionPlanHandle = 400,
    ExecutionPlanEngineConfig = 401,
    ExecutionPlanWorkspaceSize = 402,
    OperationPointwiseDescriptor = 750,
    OperationPointwiseX = 751,
    OperationPointwiseB = 752,
    OperationPointwiseY = 753,
    OperationPointwiseT = 758,
    OperationGraphHandle = 800,
    OperationGraphOperations = 801,
    TensorByteAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    TensorRaggedOffset = 913,
    VariantPackUniqueIds = 1000,
    VariantPackDataPointers = 1001,
    VariantPackWorkspace = 1003,
    MatmulComputeType = 1500,
    OperationMatmulA = 1520,
    OperationMatmulB = 1521,
    OperationMatmulC = 1522,
    OperationMatmulDescriptor = 1523,
    OperationMatmulRowsOverride = 1525,
    OperationMatmulColumnsOverride = 1526,
    OperationMatmulInnerOverride = 1527,
    ReductionOperator = 1600,
    ReductionComputeType = 1601,
    OperationReductionX = 1610,
    OperationReductionY = 1611,
    OperationReductionDescriptor = 1612,
    OperationReshapeX = 2200,
    OperationReshapeY = 2201,
}

/// `cudnnBackendAttributeType_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Type {
    Handle = 0,
    Element = 1,
    Boolean = 2,
    Int64 = 3,
    Pointer = 6,
    HeuristicMode = 8,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
}

/// `cudnnDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Data {
    Float = 0,
    Half = 2,
    Int32 = 4,
    Bfloat16 = 9,
    Boolean = 11,
}

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Pointwise {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exponential = 13,
    Logarithm = 15,
    Identity = 21,
    GreaterOrEqual = 303,
    Less = 304,
    And = 400,
    Index = 501,
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Reduction {
    Add = 0,
    Maximum = 3,
}

/// `cudnnBackendHeurMode_t`: A is the best guess, B is slower and has more candidates, the fallback has what works at all.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Heuristic {
    B = 1,
    Fallback = 2,
    A = 3,
}

symbols! {
    /// Functions of cuDNN 9's cudnn_graph.h.
    #[derive(Clone, Copy)]
    pub(super) struct Symbols of CUDNN {
        pub(super) get_version: unsafe extern "C" fn() -> usize = "cudnnGetVersion",
        pub(super) get_error_string: unsafe extern "C" fn(Status) -> *const c_char = "cudnnGetErrorString",
        pub(super) get_last_error_string: unsafe extern "C" fn(*mut c_char, usize) = "cudnnGetLastErrorString",
        pub(super) create: unsafe extern "C" fn(*mut Raw) -> Status = "cudnnCreate",
        pub(super) destroy: unsafe extern "C" fn(Raw) -> Status = "cudnnDestroy",
        pub(super) set_stream: unsafe extern "C" fn(Raw, Raw) -> Status = "cudnnSetStream",
        pub(super) create_descriptor: unsafe extern "C" fn(c_int, *mut Raw) -> Status = "cudnnBackendCreateDescriptor",
        pub(super) destroy_descriptor: unsafe extern "C" fn(Raw) -> Status = "cudnnBackendDestroyDescriptor",
        pub(super) finalize: unsafe extern "C" fn(Raw) -> Status = "cudnnBackendFinalize",
        pub(super) set_attribute: unsafe extern "C" fn(Raw, c_int, c_int, i64, *const c_void) -> Status = "cudnnBackendSetAttribute",
        pub(super) get_attribute: unsafe extern "C" fn(Raw, c_int, c_int, i64, *mut i64, *mut c_void) -> Status = "cudnnBackendGetAttribute",
        pub(super) execute: unsafe extern "C" fn(Raw, Raw, Raw) -> Status = "cudnnBackendExecute",
    }
    optional {}
}

impl Symbols {
    /// Converts `status` to a result; `step` describes the step for errors.
    pub(super) fn check(&self, status: Status, step: impl FnOnce() -> String) -> Result<(), CudaError> {
        if status == 0 { Ok(()) } else { Err(self.error(status, step())) }
    }

    fn error(&self, status: Status, step: String) -> CudaError {
        // SAFETY: takes any number and returns a constant string that lives as long as the library, or null.
        let name = unsafe {
            let text = (self.get_error_string)(status);
            if text.is_null() {
                "unknown status".to_string()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        let mut buffer = [0_u8; 1024];
        // SAFETY: writes at most the given number of bytes, the last of them zero.
        unsafe { (self.get_last_error_string)(buffer.as_mut_ptr().cast(), buffer.len()) };
        let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
        let message = String::from_utf8_lossy(&buffer[..end]).trim().to_string();
        CudaError::Cudnn { step, status, name, message }
    }
}
