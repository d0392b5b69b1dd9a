#![doc = include_str!("../README.md")]
#![allow(unsafe_code, reason = "every call into CUDA is unsafe; this crate is where those calls are made safe")]
#![deny(clippy::undocumented_unsafe_blocks)]

mod blaslt;
mod context;
mod copy;
pub mod cudnn;
mod disk_cache;
mod driver;
mod error;
#[doc(hidden)]
pub mod fault;
mod graph;
mod imitation;
mod libraries;
mod library;
mod memory;
mod module;
mod nccl;
mod nvrtc;
pub mod processors;
mod repeats;
mod stream;
mod stream_handoff;
mod symbols;
mod tensor_map;

pub use blaslt::{BlasLt, ElementType, Matmul, Measuring, Operand, Pointers, PreparedMatmul, Scaling};
pub use context::{Context, DeviceMemory};
pub use cudnn::Cudnn;
pub use driver::{DeviceInfo, Driver};
pub use error::CudaError;
pub use libraries::{Libraries, LibraryReport, name_headers};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Arguments, Kernel, LaunchShape, Module};
pub use nccl::{Nccl, NcclCommunicator, NcclId};
pub use nvrtc::{Compiler, Image, Program};
pub use repeats::{FailedLaunch, Repeats};
pub use stream::{Event, Stream};
pub use stream_handoff::StreamHandoff;
pub use tensor_map::{ByteMatrices, TensorMap};
