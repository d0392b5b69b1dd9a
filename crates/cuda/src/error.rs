//! What can go wrong with CUDA, each with what to do next.

/// An error of the CUDA driver or of looking for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No file of the driver library could be opened.
    #[error(
        "the NVIDIA driver was not found: none of {} could be opened ({}). Install the NVIDIA driver (package \
         nvidia-driver-570 or newer; in a container, start it with --gpus all), or train on the CPU with backend = \"flex\"",
        .searched.join(", "), .where_looked
    )]
    DriverNotFound {
        /// File names that were tried.
        searched: Vec<String>,
        /// The directories in which the loader looks, in words.
        where_looked: String,
    },

    /// The driver is there but too old for stream ordering with CubeCL.
    #[error(
        "the NVIDIA driver supports CUDA {}, and CUDA {} or newer is needed: update the driver to 555 or newer, or \
         train on the CPU with backend = \"flex\"",
        dotted(*.found), dotted(*.needed)
    )]
    DriverTooOld {
        /// CUDA version that the driver supports, `1000 * major + 10 * minor`.
        found: u32,
        /// The oldest that will do, in the same form.
        needed: u32,
    },

    /// A function that every driver has is missing in the library, or does not answer.
    #[error(
        "{library} is not a working NVIDIA driver: its function {symbol} is missing or does not answer. Remove CUDA's \
         `stubs` folder from the library path, or reinstall the driver"
    )]
    BrokenDriver {
        /// File that was opened.
        library: String,
        /// The function.
        symbol: &'static str,
    },

    /// The driver is there, a device is not.
    #[error(
        "the NVIDIA driver found no GPU (CUDA_VISIBLE_DEVICES is {visible}): check with nvidia-smi, start a container with \
         --gpus all, or train on the CPU with backend = \"flex\""
    )]
    NoDevice {
        /// Value of `CUDA_VISIBLE_DEVICES` in quotes, or `not set`.
        visible: String,
    },

    /// A device number past the last one.
    #[error("there is no GPU {ordinal}: this machine has {count}, numbered from 0")]
    NoSuchDevice {
        /// Number asked for.
        ordinal: usize,
        /// Devices that CUDA sees.
        count: usize,
    },

    /// Two handles that must belong to one device do not.
    #[error("{call} was given handles of different devices (GPU {first} and GPU {second})")]
    DifferentDevices {
        /// The driver function.
        call: &'static str,
        /// Device of the first handle.
        first: usize,
        /// Device of the second.
        second: usize,
    },

    /// No file of cuDNN could be opened.
    #[error(
        "cuDNN was not found: none of {} could be opened. Install {package}, or let attention be computed without it",
        .searched.join(", ")
    )]
    CudnnNotFound {
        /// File names that were tried.
        searched: Vec<String>,
        /// What to install.
        package: &'static str,
    },

    /// A function that every cuDNN 9 has is missing.
    #[error("{file} is not a working cuDNN 9: its function {symbol} is missing. Remove it, or install cuDNN 9 anew")]
    BrokenCudnn {
        /// File that was opened.
        file: String,
        /// The function.
        symbol: &'static str,
    },

    /// cuDNN returned an error code.
    #[error("cuDNN failed when {step}: {name} ({status}): {message}. CUDNN_LOGLEVEL_DBG=3 makes cuDNN say more")]
    Cudnn {
        /// What was being done, with the descriptor and the attribute.
        step: String,
        /// `cudnnStatus_t`.
        status: i32,
        /// Name of the status, such as `CUDNN_STATUS_BAD_PARAM`.
        name: String,
        /// The library's own last message.
        message: String,
    },

    /// cuDNN does not do this attention call: it has to be computed another way.
    #[error("cuDNN does not do this attention: {case}: {reason}")]
    CudnnUnsupported {
        /// The call in words.
        case: String,
        /// Why, in cuDNN's words or ours.
        reason: String,
    },

    /// An attention call that means nothing, whatever computes it.
    #[error("this attention call cannot be: {reason}")]
    AttentionShape {
        /// What is wrong with it, with what was found and what is needed.
        reason: String,
    },

    /// No file of cuBLASLt could be opened.
    #[error(
        "cuBLASLt was not found: none of {} could be opened by a driver of CUDA {cuda_major}. Install {package}",
        .searched.join(", ")
    )]
    BlasLtNotFound {
        /// File names that were tried.
        searched: Vec<String>,
        /// Newest major version of CUDA that the driver can run.
        cuda_major: u32,
        /// What to install.
        package: &'static str,
    },

    /// A function that every cuBLASLt since CUDA 12 has is missing.
    #[error(
        "{file} is not a working cuBLASLt: its function {symbol} is missing. Remove it, or install cuBLAS 12 or 13 anew"
    )]
    BrokenBlasLt {
        /// File that was opened.
        file: String,
        /// The function.
        symbol: &'static str,
    },

    /// cuBLASLt returned an error code.
    #[error(
        "cuBLASLt call {call} failed with {name} ({code}) for {asked}. CUBLASLT_LOG_LEVEL=5 makes cuBLASLt say more"
    )]
    BlasLt {
        /// The library's function.
        call: &'static str,
        /// `cublasStatus_t`.
        code: u32,
        /// Name of the code, such as `CUBLAS_STATUS_NOT_SUPPORTED`.
        name: String,
        /// The product in words.
        asked: String,
    },

    /// A matrix product that means nothing, or that no library can do.
    #[error("this matrix product cannot be: {reason}. Asked for: {asked}")]
    InvalidMatmul {
        /// The product in words.
        asked: String,
        /// What is wrong with it.
        reason: String,
    },

    /// No file of NVRTC could be opened.
    #[error("NVRTC was not found: none of {} could be opened. Install {package}", .searched.join(", "))]
    NvrtcNotFound {
        /// File names that were tried.
        searched: Vec<String>,
        /// What to install.
        package: &'static str,
    },

    /// A function that every NVRTC since CUDA 11.1 has is missing.
    #[error("{file} is not a working NVRTC: its function {symbol} is missing. Remove it, or install NVRTC anew")]
    BrokenNvrtc {
        /// File that was opened.
        file: String,
        /// The function.
        symbol: &'static str,
    },

    /// A source did not compile.
    #[error("{program} did not compile: {log}")]
    Compilation {
        /// The program.
        program: String,
        /// The compiler's own messages.
        log: String,
    },

    /// A module has no kernel of this name.
    #[error("{program} has no kernel named {kernel}")]
    NoSuchKernel {
        /// The name that was looked up.
        kernel: String,
        /// The module's program.
        program: String,
    },

    /// A launch whose arguments are not the kernel's parameters.
    #[error("kernel {kernel} takes parameters of {declared:?} bytes and was given {given:?}")]
    WrongArguments {
        /// The kernel.
        kernel: String,
        /// Bytes of each parameter that it declares.
        declared: Vec<usize>,
        /// Bytes of each argument.
        given: Vec<usize>,
    },

    /// An allocation that the device has no room for.
    #[error("the GPU is full: {asked_bytes} bytes were asked for, {free_bytes} of {total_bytes} are free")]
    OutOfMemory {
        /// Bytes that were asked for.
        asked_bytes: u64,
        /// Bytes that are free now.
        free_bytes: u64,
        /// Bytes that the device has.
        total_bytes: u64,
    },

    /// A driver call returned an error code.
    #[error("CUDA call {call} failed with {name} ({code}): {description}")]
    Call {
        /// The driver function.
        call: &'static str,
        /// `CUresult`.
        code: u32,
        /// Name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's own sentence about it.
        description: String,
    },
}

impl CudaError {
    /// Whether memory ran out, on the device or for pinned pages of the host: a smaller run may work.
    pub fn is_out_of_memory(&self) -> bool {
        const OUT_OF_MEMORY: u32 = 2;
        matches!(self, Self::OutOfMemory { .. } | Self::Call { code: OUT_OF_MEMORY, .. })
    }
}

/// `12050` as `12.5`.
fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!([dotted(12050), dotted(13000), dotted(11080)], ["12.5", "13.0", "11.8"]);
    }
}
