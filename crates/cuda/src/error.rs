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
