//! Groups of linear modules over few rows: what a decoding step multiplies. Kernels: `few_rows.cu`.
//!
//! One launch for the weights of a whole group, as they are stored, with bias, adapters and residual; one more before it where there are
//! adapters. Prologues and the other epilogues are the launches that larger groups have too.
//! Trade-off: no backward follows such a pass, and groups of mixed formats, odd inner widths or 8-bit GEMMs go the way of many rows.

use burn_tensor::{DType, Tensor};
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_cuda::{Arguments, LaunchShape};
use firebrick_precision::QuantFormat;

use super::modules::Routed;
use super::operands::write_out::StoredArgument;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Engine, Launch, MatrixView, ScratchSlot, Source, WeightValues, at, grid, tensor,
};
use crate::backends::planning::route::MAX_MODULES;
use crate::{Epilogue, Group, HeadsEpilogue, Module, Prologue, Weight};

/// The kernel for a number of rows, and its outputs per block.
struct Tile {
    rows: usize,
    name: &'static str,
    outputs: usize,
}

const TILES: [Tile; 4] = [
    Tile { rows: 8, name: "few_rows_8", outputs: 16 },
    Tile { rows: 16, name: "few_rows_16", outputs: 16 },
    Tile { rows: 32, name: "few_rows_32", outputs: 32 },
    Tile { rows: 64, name: "few_rows_64", outputs: 32 },
];

/// A product that the kernels take.
pub(crate) struct FewRows {
    tile: &'static Tile,
    values: WeightValues,
}

/// A module as the kernels take it. What it does not have is null.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct ModuleArgument {
    stored: StoredArgument,
    a: u64,
    b: u64,
    bias: u64,
    rows: i32,
    first_column: i32,
    first_tile: i32,
    rank: i32,
    first_rank: i32,
    bias_is_f32: i32,
    scale: f32,
    unused: i32,
}

/// The modules of a group as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
struct ModulesArgument {
    of: [ModuleArgument; MAX_MODULES],
    count: i32,
    ranks: i32,
}

/// The modules as an argument, and what goes with it.
struct Modules {
    argument: ModulesArgument,
    tiles: usize,
    bytes: usize,
    /// Owners of the memory.
    _held: Vec<MatrixView>,
}

impl Engine {
    /// How the kernels take a product; `None` where they do not.
    pub(super) fn few_rows(rows: usize, group: &Routed<'_>) -> Option<FewRows> {
        let tile = TILES.iter().find(|tile| rows <= tile.rows)?;
        let is_taken = (1..=group.route.few_rows).contains(&rows);
        is_taken.then(|| FewRows { tile, values: values_of(&group.modules[0].weight) })
    }

    /// [`crate::LinearOps::project`] with nothing saved, over few rows.
    pub(super) fn project_few_rows(
        &self,
        product: &FewRows,
        prologue: Prologue<Cuda>,
        group: &Group<Cuda>,
        epilogue: Epilogue<Cuda>,
    ) -> Vec<Tensor<Cuda, 2>> {
        let x = match prologue {
            Prologue::None { x } => self.matrix(x),
            Prologue::Norm { x, norm } => self.rms_norm(&self.flat(x), &norm, 0),
            Prologue::Gated { gate, up, activation } => self.gated(&self.matrix(gate), &self.matrix(up), activation, 0),
        };
        let x = if x.begins_on_vectors() { x } else { self.copied(&x) };
        let (rows, dtype) = (x.rows, x.dtype);
        let output = || self.empty_matrix(rows, group.out_features(), dtype);
        match epilogue {
            Epilogue::None => {
                let y = output();
                self.multiply_few_rows(product, &x, group, None, y.block());
                self.split(&y, &group.parts)
            }
            Epilogue::Residual(residual) => {
                let (y, residual) = (output(), self.matrix_as(residual, dtype));
                self.multiply_few_rows(product, &x, group, Some(residual.block()), y.block());
                vec![tensor(y.tensor)]
            }
            Epilogue::NormResidual { norm, residual } => {
                let raw = output();
                self.multiply_few_rows(product, &x, group, None, raw.block());
                vec![tensor(self.rms_norm_add(&raw, &norm, residual).tensor)]
            }
            Epilogue::Heads(epilogue) => self.few_rows_heads(product, &x, group, &epilogue),
        }
    }

    fn few_rows_heads(
        &self,
        product: &FewRows,
        x: &MatrixView,
        group: &Group<Cuda>,
        epilogue: &HeadsEpilogue<Cuda>,
    ) -> Vec<Tensor<Cuda, 2>> {
        let (joined, _) = self.joined_rows([x.rows, group.out_features()], x.dtype, false);
        self.multiply_few_rows(product, x, group, None, joined);
        // The copies of what was there before are for a backward.
        let _ = self.normalize_projections(joined, &group.parts, epilogue);
        self.heads_forward(joined, &group.parts, epilogue)
    }

    /// All outputs of a group side by side to `out`, plus a residual.
    fn multiply_few_rows(
        &self,
        product: &FewRows,
        x: &MatrixView,
        group: &Group<Cuda>,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        assert_eq!((x.width, out.width), (group.in_features(), group.out_features()), "operands of a group");
        let modules = self.few_rows_modules(product, group);
        let low = self.few_rows_adapters(product, x, &modules);
        let launch = Launch {
            source: Source::FewRows(product.values),
            dtype: x.dtype,
            name: product.tile.name,
            shape: grid(modules.tiles, 256),
            bytes: modules.bytes + x.bytes() + out.bytes(),
        };
        let arguments = Arguments::new()
            .rows(&out)
            .i64(out.stride as i64)
            .rows(x)
            .i64(x.stride as i64)
            .value(&modules.argument)
            .pointer(at(low))
            .pointer(at(residual.map_or(0, |residual| residual.address)))
            .i64(residual.map_or(0, |residual| residual.stride) as i64)
            .i32(x.rows as i32)
            .i32(x.width as i32);
        // SAFETY: x and out are rows of this dtype at their strides, x on 16 bytes, at most as many as the kernel takes; so is the
        // residual; the modules' weights are [rows, inputs] as they are stored, and each has its tiles; low is [n, ranks].
        unsafe { self.launch(launch, &arguments) };
    }

    /// `x Aᵀ` of all adapters in f32, `[n, ranks]` in scratch memory; 0 where there are none.
    fn few_rows_adapters(&self, product: &FewRows, x: &MatrixView, modules: &Modules) -> u64 {
        let ranks = modules.argument.ranks as usize;
        if ranks == 0 {
            return 0;
        }
        let low = self.scratch.take(ScratchSlot::LowRank, x.rows * ranks * 4);
        let launch = Launch {
            source: Source::FewRows(product.values),
            dtype: x.dtype,
            name: "adapter_rows",
            shape: LaunchShape {
                grid: [ranks as u32, x.rows.div_ceil(8) as u32, 1],
                block: [256, 1, 1],
                shared_bytes: 0,
            },
            bytes: ranks * x.width * 4 + x.bytes(),
        };
        let arguments = Arguments::new()
            .pointer(at(low))
            .rows(x)
            .i64(x.stride as i64)
            .value(&modules.argument)
            .i32(x.rows as i32)
            .i32(x.width as i32);
        // SAFETY: low has room for [n, ranks] f32; each A is [rank, inputs] f32 without gaps, and so on 16 bytes.
        unsafe { self.launch(launch, &arguments) };
        low
    }

    fn few_rows_modules(&self, product: &FewRows, group: &Group<Cuda>) -> Modules {
        let mut argument = ModulesArgument::default();
        let mut held = Vec::with_capacity(7 * group.modules.len());
        let (mut tiles, mut ranks, mut bytes) = (0, 0, 0);
        for (to, module) in argument.of.iter_mut().zip(&group.modules) {
            let (stored, weight_bytes) = self.few_rows_weight(&module.weight, &mut held);
            *to = ModuleArgument {
                stored,
                rows: module.columns.len() as i32,
                first_column: module.columns.start as i32,
                first_tile: tiles as i32,
                first_rank: ranks as i32,
                ..self.around_module(module, &mut held)
            };
            tiles += module.columns.len().div_ceil(product.tile.outputs);
            ranks += to.rank as usize;
            bytes += weight_bytes;
        }
        (argument.count, argument.ranks) = (group.modules.len() as i32, ranks as i32);
        Modules { argument, tiles, bytes, _held: held }
    }

    fn few_rows_weight(&self, weight: &Weight<Cuda>, held: &mut Vec<MatrixView>) -> (StoredArgument, usize) {
        match weight {
            Weight::Quantized(weight) => (self.stored_argument(weight, held), weight.bytes()),
            Weight::Dense(values) => {
                let values = self.flat(values.clone());
                let stored = (StoredArgument::dense(values.address), values.bytes());
                held.push(values);
                stored
            }
        }
    }

    /// Bias and adapter of a module.
    fn around_module(&self, module: &Module<Cuda>, held: &mut Vec<MatrixView>) -> ModuleArgument {
        let mut argument = ModuleArgument::default();
        let mut address = |view: MatrixView| {
            held.push(view);
            held.last().map_or(0, |view| view.address)
        };
        if let Some(bias) = &module.bias {
            argument.bias_is_f32 = i32::from(bias.value.dtype() == DType::F32);
            argument.bias = address(self.flat(bias.value.clone()));
        }
        if let Some(adapter) = &module.adapter {
            argument.a = address(self.flat(adapter.a.clone()));
            argument.b = address(self.flat(adapter.b.clone()));
            (argument.rank, argument.scale) = (adapter.a.dims()[0] as i32, adapter.scale as f32);
        }
        argument
    }

    /// A copy without gaps.
    fn copied(&self, x: &MatrixView) -> MatrixView {
        let copy = self.empty_matrix(x.rows, x.width, x.dtype);
        self.copy_rows(x.block(), copy.block());
        copy
    }
}

/// What reads a weight.
fn values_of(weight: &Weight<Cuda>) -> WeightValues {
    match weight {
        Weight::Dense(_) => WeightValues::Dense,
        Weight::Quantized(weight) => match weight.format {
            QuantFormat::Nf4 { .. } => WeightValues::Nf4,
            QuantFormat::Nvfp4 => WeightValues::Nvfp4,
            QuantFormat::Mxfp4 => WeightValues::Mxfp4,
            QuantFormat::Fp8 => WeightValues::Fp8,
        },
    }
}
