//! Groups of linear modules over few rows, as in a decoding step. Kernels: `few_rows.cu`.
//!
//! One launch covers a whole group's weights in their storage format, with bias, adapters and residual; another one
//! precedes it if there are adapters.
//! Trade-off: no backward can follow such a pass, and groups of mixed formats, odd inner widths or 8-bit GEMMs run as with many rows.

use burn_tensor::DType;
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_precision::QuantFormat;

use super::operands::dequantize::StoredArgument;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, ScratchSlot, Source, WeightValues, arguments, grid, grid_of,
};
use crate::backends::planning::route::MAX_MODULES;
use crate::{Group, Module, Weight};

/// The tile for a number of rows, with its outputs per block.
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

struct FewRows {
    tile: &'static Tile,
    values: WeightValues,
}

/// A module, as the kernels read it. Missing parts are null.
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

#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
struct ModulesArgument {
    of: [ModuleArgument; MAX_MODULES],
    count: i32,
    ranks: i32,
}

struct Modules {
    argument: ModulesArgument,
    tiles: usize,
    bytes: usize,
    _held: Vec<MatrixView>,
}

impl Device {
    /// Writes all outputs of a group side by side to `out`, plus a residual.
    pub(super) fn multiply_few_rows(
        &self,
        x: DeviceBlock,
        group: &Group<Cuda>,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        assert_eq!((x.width, out.width), (group.in_features(), group.out_features()), "operands of a group");
        let tile = TILES.iter().find(|tile| x.rows <= tile.rows).expect("a route over more rows is another");
        let product = &FewRows { tile, values: values_of(&group.modules[0].weight) };
        let copy = (!x.begins_on_vectors()).then(|| self.copied(x));
        let x = &copy.as_ref().map_or(x, |copy| copy.block);
        let modules = self.few_rows_modules(product, group);
        let low = self.few_rows_adapters(product, x, &modules);
        let shape = grid(modules.tiles, 256);
        let bytes = modules.bytes + x.bytes() + out.bytes();
        let launch = Source::FewRows(product.values).launch(x.dtype, product.tile.name, shape, bytes);
        let arguments = arguments! {
            y: rows(&out), y_stride: long(out.stride), x: rows(x), x_stride: long(x.stride),
            modules: value(&modules.argument), low: address(low),
            residual: address(residual.map_or(0, |residual| residual.address)),
            residual_stride: long(residual.map_or(0, |residual| residual.stride)), n: int(x.rows), inputs: int(x.width),
        };
        // SAFETY: x and out are rows of this dtype at their strides, x on 16 bytes, at most as many as the kernel takes; so is the
        // residual; the modules' weights are [rows, inputs] as they are stored, and each has its tiles; low is [n, ranks].
        unsafe { self.launch(launch, &arguments) };
    }

    /// Computes `x Aᵀ` of all adapters in f32, `[n, ranks]` in scratch memory; returns 0 if there are none.
    fn few_rows_adapters(&self, product: &FewRows, x: &DeviceBlock, modules: &Modules) -> u64 {
        let ranks = modules.argument.ranks as usize;
        if ranks == 0 {
            return 0;
        }
        let low = self.scratch.take(ScratchSlot::LowRank, x.rows * ranks * 4);
        let shape = grid_of([ranks, x.rows.div_ceil(8), 1], 256);
        let bytes = ranks * x.width * 4 + x.bytes();
        let launch = Source::FewRows(product.values).launch(x.dtype, "adapter_rows", shape, bytes);
        let arguments = arguments! {
            low: address(low), x: rows(x), x_stride: long(x.stride), modules: value(&modules.argument), n: int(x.rows),
            inputs: int(x.width),
        };
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

    fn copied(&self, x: DeviceBlock) -> MatrixView {
        let copy = self.empty_matrix(x.rows, x.width, x.dtype);
        self.copy_rows(x, copy.block);
        copy
    }
}

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
