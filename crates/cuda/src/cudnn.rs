//! Attention by cuDNN 9: forward and backward, causal, with grouped heads, for documents of one length or of many.
//!
//! cuDNN gets a whole attention call as a graph of elementary operations and returns a fused kernel. It is not needed to build;
//! [`Cudnn::load`] finds and loads it.
//!
//! Not supported: dropout, bias, sliding windows, different head widths of keys and values, and elements that are not 16-bit. For a
//! call that cuDNN does not support, the error is [`CudaError::CudnnUnsupported`](crate::CudaError::CudnnUnsupported), so that the
//! caller can compute it in another way.

mod attention;
mod backward;
mod descriptor;
mod forward;
mod graph;
mod library;
mod limits;
mod plan;
mod run;
mod shape;
mod sys;

pub use library::Cudnn;
pub use plan::Plan;
pub use run::{BackwardPointers, ForwardPointers};
pub use shape::{AttentionShape, Element, Layout};
