#![doc = include_str!("../README.md")]
#![allow(unsafe_code, reason = "every call into CUDA is unsafe; this crate is where those calls are made safe")]
#![deny(clippy::undocumented_unsafe_blocks)]

mod context;
mod driver;
mod error;
mod hand_over;
mod library;
mod stream;

pub use context::{Context, DeviceMemory};
pub use driver::{DeviceInfo, Driver};
pub use error::CudaError;
pub use hand_over::{HandOver, Section};
pub use library::{FoundLibrary, Library, libraries};
pub use stream::{Event, Stream};
