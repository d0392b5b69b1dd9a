//! Whether the adapters of a group are appended to the inner dimension of its GEMM, from the group alone.
//! Trade-off: a dense weight is copied next to its adapter, in every pass.

use crate::backends::cuda::engine::Cuda;
use crate::backends::planning::rows::appended_ranks;
use crate::{Adapter, GemmFormat, Group};

/// Ranks of each module of a group, 0 where it has no adapter.
pub(super) fn ranks(group: &Group<Cuda>) -> Vec<usize> {
    let rank = |adapter: &Adapter<Cuda>| adapter.a.dims()[0];
    group.modules.iter().map(|module| module.adapter.as_ref().map_or(0, rank)).collect()
}

/// Columns that are appended to the input of a group's GEMM; 0 where its adapters, if any, are separate.
pub(super) fn appended_columns(group: &Group<Cuda>) -> usize {
    match group.gemms {
        GemmFormat::Compute => appended_ranks(group.in_features(), &ranks(group)),
        // Next to codes, not next to the input.
        GemmFormat::Fp8 => 0,
    }
}
