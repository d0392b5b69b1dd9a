//! What a checkpoint holds besides tensors, which tensors a model saves, and the matrices of experts as a folder stores them.

pub(crate) mod companions;
pub(crate) mod save;
pub(crate) mod stored_parts;
