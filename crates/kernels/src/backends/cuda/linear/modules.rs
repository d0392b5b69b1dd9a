//! The adapters of a group: their ranks, whether those are appended to the inner dimension of its GEMM, and all of them as kernels take
//! them, in one argument. The CUDA side is `modules.cu`.
//! Trade-off: room for four modules, which is more than any group has, travels with every launch. Appended, a dense weight is copied next
//! to its adapter, in every pass.

use crate::backends::cuda::engine::{Cuda, Engine, MAX_MODULES, MatrixView};
use crate::backends::planning::rows::appended_ranks;
use crate::{Adapter, GemmFormat, Group};
use bytemuck::{NoUninit, Pod, Zeroable};

/// Parts of a buffer begin on multiples of this many bytes, as GEMMs like them.
pub(super) const PART_ALIGNMENT: usize = 256;

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

/// The adapter of a module as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct ModuleArgument {
    a: u64,
    b: u64,
    first_row: i32,
    rows: i32,
    first_rank: i32,
    rank: i32,
    scale: f32,
    unused: i32,
}

/// The adapters of a group as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
pub(super) struct ModulesArgument {
    of: [ModuleArgument; MAX_MODULES],
    count: i32,
    unused: i32,
}

impl Engine {
    /// The adapters of a group as arguments, and the owners of their memory.
    pub(super) fn modules_argument(&self, group: &Group<Cuda>) -> (ModulesArgument, Vec<MatrixView>) {
        assert!(group.modules.len() <= MAX_MODULES, "{} modules in a group", group.modules.len());
        let (mut modules, mut held, mut first_rank) = (ModulesArgument::default(), Vec::new(), 0);
        for module in &group.modules {
            let Some(adapter) = &module.adapter else { continue };
            let [a, b] = [&adapter.a, &adapter.b].map(|values| self.flat(values.clone()));
            modules.of[modules.count as usize] = ModuleArgument {
                a: a.address,
                b: b.address,
                first_row: module.columns.start as i32,
                rows: module.columns.len() as i32,
                first_rank,
                rank: a.rows as i32,
                scale: adapter.scale as f32,
                unused: 0,
            };
            first_rank += a.rows as i32;
            modules.count += 1;
            held.extend([a, b]);
        }
        (modules, held)
    }
}

impl ModulesArgument {
    /// Ranks of all adapters.
    pub(super) fn ranks(&self) -> usize {
        self.of.iter().map(|module| module.rank as usize).sum()
    }

    /// Values of all A.
    pub(super) fn a_values(&self, inputs: usize) -> usize {
        self.ranks() * inputs
    }

    /// Bytes of all A and B.
    pub(super) fn bytes(&self, inputs: usize) -> usize {
        let b_values: usize = self.of.iter().map(|module| (module.rank * module.rows) as usize).sum();
        (self.a_values(inputs) + b_values) * 4 + 2 * PART_ALIGNMENT
    }
}
