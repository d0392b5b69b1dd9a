//! CPU through burn-flex: the portable bodies as they are.

pub use burn_flex::Flex;

use crate::Kernels;

impl Kernels for Flex {}
