//! The errors of CUDA and its libraries. Messages tell the user what to do next.

/// An error of CUDA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CudaError {
    #[error(
        "the NVIDIA driver was not found ({}; {}). Install the NVIDIA driver (package \
         nvidia-driver-570 or newer; in a container, start it with --gpus all), or train on the CPU with backend = \"flex\"",
        .searched.join(", "), .where_looked
    )]
    DriverNotFound { searched: Vec<String>, where_looked: String },

    #[error(
        "the NVIDIA driver supports CUDA {}, but CUDA {} or newer is needed: update the driver to 535 or newer, or \
         train on the CPU with backend = \"flex\"",
        dotted(*.found), dotted(*.needed)
    )]
    DriverTooOld {
        /// CUDA version that the driver supports, `1000 * major + 10 * minor`.
        found: u32,
        needed: u32,
    },

    /// A function that every driver has is missing in the library, or fails.
    #[error(
        "{library} is not a working NVIDIA driver: its function {symbol} is missing or fails. Remove CUDA's \
         `stubs` folder from the library path, or reinstall the driver"
    )]
    BrokenDriver { library: String, symbol: &'static str },

    #[error(
        "the NVIDIA driver found no GPU (CUDA_VISIBLE_DEVICES is {visible}): check with nvidia-smi, start a container with \
         --gpus all, or train on the CPU with backend = \"flex\""
    )]
    NoDevice { visible: String },

    #[error("there is no GPU {ordinal}: this machine has {count} GPUs, numbered from 0")]
    NoSuchDevice { ordinal: usize, count: usize },

    #[error("{name} is {value:?}, but {expected} is expected: change it or unset it")]
    InvalidVariable { name: &'static str, value: String, expected: String },

    #[error("{call} was called with handles of different devices (GPU {first} and GPU {second})")]
    DifferentDevices { call: &'static str, first: usize, second: usize },

    /// No place has all libraries that are needed.
    #[error(
        "{needed} of one CUDA version were not found{}. Looked in {}. Install PyTorch or NVIDIA's wheels ({}) in a Python \
         environment, or the CUDA toolkit, or name their folder in FIREBRICK_CUDA; or train through Vulkan with \
         backend = \"wgpu\" or on the CPU with backend = \"flex\"",
        supported(*.cuda_major), .places.join("; "), wheels(*.cuda_major)
    )]
    LibrariesNotFound {
        needed: String,
        /// The places in their order, each with what it lacked.
        places: Vec<String>,
        /// The newest major version of CUDA that the driver supports; `None` without a driver.
        cuda_major: Option<u32>,
    },

    /// Two libraries of the only usable place are of different major versions of CUDA.
    #[error(
        "{first} is of CUDA {first_major} and {second} of CUDA {second_major}, and one process cannot use both: uninstall one \
         of the two versions, or name a place that has one in FIREBRICK_CUDA; or train through Vulkan with \
         backend = \"wgpu\" or on the CPU with backend = \"flex\""
    )]
    MixedMajors { first: String, first_major: u32, second: String, second_major: u32 },

    #[error(
        "{file} is of CUDA {}.{}, and the driver supports CUDA {}.{} at most. Update the driver, or install an NVRTC that is not newer \
         than it: {package}; or train through Vulkan with backend = \"wgpu\" or on the CPU with backend = \"flex\"",
        found.0, found.1, driver.0, driver.1
    )]
    NvrtcTooNew { file: String, found: (u32, u32), driver: (u32, u32), package: &'static str },

    #[error(
        "{file} could not be opened: {reason}. Reinstall it: {package}; or train through Vulkan with backend = \"wgpu\" or on \
         the CPU with backend = \"flex\""
    )]
    LibraryNotOpened { file: String, reason: String, package: &'static str },

    #[error(
        "cuDNN was not found in {place}, where the other CUDA libraries are: {reason}. Install {package}, or attention uses \
         slower kernels"
    )]
    CudnnNotFound { place: String, reason: String, package: &'static str },

    /// A function that every supported version of a library has is missing.
    #[error("{file} is not a working {library}: its function {symbol} is missing. Remove it, or reinstall {versions}")]
    BrokenLibrary { file: String, library: &'static str, symbol: &'static str, versions: &'static str },

    #[error("cuDNN failed while {step}: {name} ({status}): {message}. CUDNN_LOGLEVEL_DBG=3 makes cuDNN print more")]
    Cudnn { step: String, status: i32, name: String, message: String },

    /// cuDNN does not support this attention call; the caller must compute it in another way.
    #[error("cuDNN does not support this attention call: {case}: {reason}")]
    CudnnUnsupported { case: String, reason: String },

    /// An attention call that is invalid for any implementation.
    #[error("this attention call is invalid: {reason}")]
    AttentionShape { reason: String },

    #[error(
        "cuBLASLt call {call} failed with {name} ({code}) for {requested}. CUBLASLT_LOG_LEVEL=5 makes cuBLASLt print more"
    )]
    BlasLt { call: &'static str, code: u32, name: String, requested: String },

    /// A GEMM that is invalid, or that no version of the library supports.
    #[error("this GEMM is invalid: {reason}. Requested: {requested}")]
    InvalidMatmul { requested: String, reason: String },

    #[error("NCCL was not found in {place}, where the other CUDA libraries are: {reason}. Install {package}")]
    NcclNotFound { place: String, reason: String, package: &'static str },

    #[error("NCCL call {call} failed with {name} ({status}): {detail}. NCCL_DEBUG=INFO makes NCCL print more")]
    Nccl { call: &'static str, status: i32, name: String, detail: String },

    #[error("the connection between the devices was ended, because another rank is gone")]
    NcclAborted,

    #[error(
        "this NVRTC does not compile for cards of compute capability {}: it knows {}. Install an older CUDA, or train through \
         Vulkan with backend = \"wgpu\" or on the CPU with backend = \"flex\"",
        tenth(*.number), .known.iter().copied().map(tenth).collect::<Vec<_>>().join(", ")
    )]
    UnknownArchitecture {
        /// `10 * major + minor` of the compute capability.
        number: u32,
        known: Vec<u32>,
    },

    #[error("{program} did not compile: {log}")]
    Compilation { program: String, log: String },

    #[error("{program} has no kernel named {kernel}")]
    NoSuchKernel { kernel: String, program: String },

    #[error("kernel {kernel} expects parameters of {declared:?} bytes, got {given:?}")]
    WrongArguments {
        kernel: String,
        /// Bytes of each declared parameter; 0 if the driver cannot tell.
        declared: Vec<usize>,
        given: Vec<usize>,
    },

    #[error("the GPU is out of memory: {requested_bytes} bytes were requested, {free_bytes} of {total_bytes} are free")]
    OutOfMemory { requested_bytes: u64, free_bytes: u64, total_bytes: u64 },

    #[error("CUDA call {call} failed with {name} ({code}): {description}")]
    Call { call: &'static str, code: u32, name: String, description: String },
}

impl CudaError {
    /// Returns whether memory ran out, either on the device or for pinned pages of the host. A smaller run may then work.
    pub fn is_out_of_memory(&self) -> bool {
        const OUT_OF_MEMORY: u32 = 2;
        matches!(self, Self::OutOfMemory { .. } | Self::Call { code: OUT_OF_MEMORY, .. })
    }
}

fn supported(cuda_major: Option<u32>) -> String {
    cuda_major.map_or_else(String::new, |major| format!(" for this driver, which supports CUDA {major}"))
}

/// Names the wheels of the libraries that a driver of this CUDA version supports.
fn wheels(cuda_major: Option<u32>) -> &'static str {
    match cuda_major {
        Some(12) => "nvidia-cublas-cu12, nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12 and nvidia-cudnn-cu12",
        _ => "nvidia-cublas, nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cudnn-cu13",
    }
}

/// Formats `75` as `7.5`.
fn tenth(number: u32) -> String {
    format!("{}.{}", number / 10, number % 10)
}

/// Formats `12050` as `12.5`.
fn dotted(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_printed_with_a_dot() {
        assert_eq!([dotted(12050), dotted(13000), dotted(11080)], ["12.5", "13.0", "11.8"]);
    }
}
