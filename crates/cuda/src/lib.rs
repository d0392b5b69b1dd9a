#![doc = include_str!("../README.md")]
#![allow(unsafe_code, reason = "every call into CUDA is unsafe; this crate is where those calls are made safe")]
#![deny(clippy::undocumented_unsafe_blocks)]

mod blaslt;
mod context;
mod copy;
pub mod cudnn;
mod driver;
mod error;
mod hand_over;
mod library;
mod memory;
mod module;
mod nvrtc;
mod pointer;
mod stream;

pub use blaslt::{Alignment, BlasLt, ElementType, Epilogue, Matmul, Operand, Plan, Pointers, Scaling, Tuning};
pub use context::{Context, DeviceMemory};
pub use cudnn::Cudnn;
pub use driver::{DeviceInfo, Driver};
pub use error::CudaError;
pub use hand_over::{HandOver, Section};
pub use library::{FoundLibrary, Library, libraries};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Arguments, Kernel, KernelAttributes, LaunchShape, Module};
pub use nvrtc::{Compiler, Image, Program};
pub use pointer::DevicePointer;
pub use stream::{Event, Stream};
