//! A group with its route, which all functions of this folder take, and its adapters as a single kernel argument. The
//! CUDA side of that argument is `modules.cu`.
//! Trade-off: every launch carries room for four modules, more than any group has. If appended, a dense weight is
//! copied next to its adapter in every pass.

use std::collections::BTreeSet;
use std::mem;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use burn_tensor::DType;
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_arch::{GroupSpec, ModelSpec};
use firebrick_precision::{FloatType, Format};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{Cuda, MatrixView};
use crate::backends::planning::route::{GroupShape, MAX_MODULES, ModuleShape, Route, RouteContext};
use crate::{Group, Module, TrainingShape, Weight};

/// The groups of training passes and their routes, in debug builds: what a test compares with the plan.
static ROUTES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns the groups of training passes so far with their routes, and forgets them. Only debug builds keep them.
pub fn take_routes() -> BTreeSet<String> {
    mem::take(&mut ROUTES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the groups of a run as it is planned, with their routes, as [`take_routes`] does.
pub fn planned_routes(model: &ModelSpec, training: &TrainingShape) -> BTreeSet<String> {
    let planned = |group: GroupSpec| {
        in_words(&GroupShape::planned(model, &group, training), &Route::planned(model, &group, training))
    };
    model.all_groups().map(planned).collect()
}

fn in_words(shape: &GroupShape, route: &Route) -> String {
    format!("{shape:?} {route:?}")
}

/// Alignment in bytes of the parts of a buffer, as GEMMs prefer it.
pub(super) const PART_ALIGNMENT: usize = 256;

pub(crate) struct Routed<'a> {
    pub group: &'a Group<Cuda>,
    pub route: Route,
}

impl Deref for Routed<'_> {
    type Target = Group<Cuda>;

    fn deref(&self) -> &Group<Cuda> {
        self.group
    }
}

/// Returns the rank of a module's adapter, of one expert in a stack; 0 without one.
pub(super) fn rank(module: &Module<Cuda>) -> usize {
    module.adapter.as_ref().map_or(0, |adapter| adapter.b.dims()[1])
}

fn shape(group: &Group<Cuda>) -> GroupShape {
    let module = |module: &Module<Cuda>| ModuleShape {
        columns: module.columns.clone(),
        storage: match &module.weight {
            Weight::Dense(values) => Format::Float(float_type(values.dtype())),
            Weight::Quantized(weight) => Format::Quantized(weight.format),
        },
        trains: module.weight_gradient.is_needed(),
        rank: rank(module),
        has_magnitudes: module.magnitude().is_some(),
    };
    GroupShape {
        in_features: group.in_features(),
        modules: group.modules.iter().map(module).collect(),
        has_dropout: group.dropout.is_some(),
        is_stack: group.rows.is_some(),
    }
}

/// Converts Burn's dtype of a compute format.
fn float_type(dtype: DType) -> FloatType {
    match dtype {
        DType::BF16 => FloatType::Bf16,
        DType::F16 => FloatType::F16,
        DType::F32 => FloatType::F32,
        other => unreachable!("activations and dense weights are f32, f16 or bf16, not {other:?}"),
    }
}

impl Device {
    /// Decides the route of a group with activations of this dtype. `forward_rows` has the meaning of [`RouteContext`].
    pub(super) fn route_of(&self, group: &Group<Cuda>, dtype: DType, forward_rows: usize) -> Route {
        let (compute, shared_bytes, has_wgmma) = (float_type(dtype), self.shared_bytes(), self.has_wide_experts());
        let shape = shape(group);
        let (gemms, keeps_weights) = (group.gemms, self.kept.keeps_forward());
        let context = RouteContext { compute, gemms, shared_bytes, has_wgmma, forward_rows, keeps_weights };
        let route = Route::new(&shape, context);
        if cfg!(debug_assertions) && forward_rows == 0 {
            ROUTES.lock().unwrap_or_else(PoisonError::into_inner).insert(in_words(&shape, &route));
        }
        route
    }

    pub(super) fn routed<'a>(&self, group: &'a Group<Cuda>, dtype: DType) -> Routed<'a> {
        Routed { group, route: self.route_of(group, dtype, 0) }
    }
}

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

#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
pub(super) struct ModulesArgument {
    of: [ModuleArgument; MAX_MODULES],
    count: i32,
    unused: i32,
}

impl Device {
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
                rank: rank(module) as i32,
                scale: adapter.scale as f32,
                unused: 0,
            };
            first_rank += rank(module) as i32;
            modules.count += 1;
            held.extend([a, b]);
        }
        (modules, held)
    }
}

impl ModulesArgument {
    pub(super) fn ranks(&self) -> usize {
        self.of.iter().map(|module| module.rank as usize).sum()
    }

    pub(super) fn a_values(&self, inputs: usize) -> usize {
        self.ranks() * inputs
    }

    pub(super) fn bytes(&self, inputs: usize) -> usize {
        let b_values: usize = self.of.iter().map(|module| (module.rank * module.rows) as usize).sum();
        (self.a_values(inputs) + b_values) * 4 + 2 * PART_ALIGNMENT
    }
}
