//! GEMMs over the rows of experts: each expert's rows with its own matrix, in one launch. Kernels: `grouped.cu`, `grouped_hopper.cu` for wide
//! matrices on Hopper, and `grouped_fp8.cu` for 8-bit floats there.
//!
//! Group sizes stay on the device, so nothing waits, launches do not depend on them, and sums are in a fixed order. cuBLASLt of CUDA 13.0 takes
//! group sizes from the host only.
//! Trade-off: the grid covers the largest possible number of tiles, one more per expert than the rows need.

use burn_tensor::DType;
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_cuda::{ByteMatrices, LaunchShape, TensorMap};

use crate::ExpertRows;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cost, Cuda, DeviceBlock, Gemm, GemmScales, OfExperts, Primitive, ScratchSlot, Source, WIDE_STAGES,
    arguments, check, expert_stages, grid, grid_of,
};

/// Threads of the kernel that lists tiles, and so the largest number of experts.
const TILE_THREADS: usize = 1024;
/// Rows of a tile, and its columns: at most this many, or as many as the Hopper kernel's.
const EXPERT_TILE: usize = 128;
const WIDE_TILE: usize = 256;
/// Bytes that align dynamic shared memory to the swizzle.
const ALIGNMENT: usize = 1024;
/// Bytes of 64 16-bit values or 128 codes, a row of a tile.
const TILE_ROW: usize = 128;
/// Dynamic shared memory of a block of the Hopper kernels: stages, and 16 rows of 64 results for each of eight warps.
const WIDE_BYTES: usize = WIDE_STAGES * TILE_ROW * (EXPERT_TILE + WIDE_TILE) + 8 * 16 * TILE_ROW + ALIGNMENT;
/// The same for codes, with column scales per stage.
const CODES_BYTES: usize = WIDE_BYTES + WIDE_STAGES * WIDE_TILE * 4;
/// What inner widths in codes are multiples of: the codes of one product.
const CODES_MULTIPLE: usize = 32;

/// Sums over each expert's rows, as the kernel reads them.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct SumsArgument {
    sums: u64,
    left: u64,
    right: u64,
    m: i32,
    alpha: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
struct TwoSumsArgument {
    of: [SumsArgument; 2],
}

/// Returns the dynamic shared memory of a block whose tiles have this many columns: its stages, or its sums.
fn shared_bytes(columns: usize, stages: usize) -> u32 {
    let (of_stages, of_sums) = (stages * TILE_ROW * (EXPERT_TILE + columns), EXPERT_TILE * (4 * columns + 16));
    (of_stages.max(of_sums) + ALIGNMENT) as u32
}

impl Device {
    /// Computes a GEMM into `d`, over the rows of experts or over all rows.
    pub(crate) fn gemm(&self, gemm: Gemm, d: DeviceBlock) {
        match gemm.experts {
            Some(experts) => self.expert_gemm(gemm, experts, d),
            None => self.plain_gemm(gemm, d),
        }
    }

    /// Returns the rows of experts for launches over `rows` rows. The list of tiles is computed when the rows are first used.
    pub(crate) fn of_experts(&self, experts: &ExpertRows<Cuda>, rows: usize, dtype: DType) -> OfExperts {
        let (count, starts) = (experts.experts(), experts.starts.clone().into_primitive());
        assert!(count <= TILE_THREADS, "{count} experts, at most {TILE_THREADS}");
        let tiles = rows.div_ceil(EXPERT_TILE) + count;
        let contents = self.contents(DType::I32, self.source(&starts));
        let (address, is_held) = self.scratch.holding(ScratchSlot::ExpertTiles, tiles * 8, contents);
        let starts = self.address(&starts);
        if !is_held {
            let launch = self.expert_source().launch(dtype, "expert_tiles", grid(1, TILE_THREADS as u32), tiles * 8);
            let arguments = arguments! {
                tiles: address(address), starts: address(starts), experts: int(count), count: int(tiles),
            };
            // SAFETY: there is room for `tiles` pairs of i32, and `starts` has one number more than there are experts.
            unsafe { self.launch(launch, &arguments) };
        }
        OfExperts { count, starts, tiles: [address, tiles as u64], matrix_stride: 0 }
    }

    /// Returns the programs of experts in 16 bits.
    pub(in crate::backends::cuda) fn expert_sources(&self) -> Vec<Source> {
        let wide = Source::WideExperts { stages: expert_stages(self.shared_bytes()) };
        [self.expert_source()].into_iter().chain(self.programs.has_wgmma().then_some(wide)).collect()
    }

    /// Returns whether the card runs the Hopper kernels.
    pub(in crate::backends::cuda) fn has_wide_experts(&self) -> bool {
        self.programs.has_wgmma() && self.shared_bytes() >= CODES_BYTES
    }

    fn expert_source(&self) -> Source {
        Source::Experts { stages: expert_stages(self.shared_bytes()) }
    }

    /// Computes a GEMM of experts into `d`: `a` by each expert's `b`, or the sums over each expert's rows.
    fn expert_gemm(&self, gemm: Gemm, experts: OfExperts, d: DeviceBlock) {
        let blocks = [Some(gemm.a), Some(gemm.b), gemm.c, Some(d)];
        let is_aligned = blocks.into_iter().flatten().all(|block| block.begins_on_vectors());
        assert!(is_aligned, "{}: operands of experts lie on the 16-byte grid", gemm.name);
        match gemm.scales {
            Some(scales) => self.expert_codes(gemm, scales, experts, d),
            None if gemm.a_transposed => self.expert_sums(&[(gemm, d)], experts),
            None => self.expert_rows(gemm, experts, d),
        }
    }

    /// Computes a GEMM of experts whose operands are rows of codes, with an f32 per row of `a` and of every expert's `b`.
    fn expert_codes(&self, gemm: Gemm, scales: GemmScales, experts: OfExperts, d: DeviceBlock) {
        let Gemm { name, a, b, c, bias, .. } = gemm;
        let (n, k) = (d.width, a.width);
        assert!((a.rows, [n, k]) == (d.rows, [b.rows, b.width]), "{name}: shapes of the operands");
        assert!(
            gemm.b_transposed && !gemm.a_transposed && gemm.alpha == 1.0,
            "{name}: codes are multiplied along rows"
        );
        assert!(experts.matrix_stride == b.rows * b.stride, "{name}: matrices without gaps");
        assert!([a.stride, b.stride, k].iter().all(|n| n.is_multiple_of(CODES_MULTIPLE)), "{name}: rows of codes");
        assert!(
            n.is_multiple_of(8) && c.is_none_or(|c| c.stride == d.stride && c.dtype == d.dtype),
            "{name}: what is added is laid out as the result"
        );
        let [tiles, count] = experts.tiles;
        let [of_a, of_b] = [(a, 1, EXPERT_TILE), (b, experts.count, WIDE_TILE)]
            .map(|(codes, matrices, rows)| self.boxes(name, codes, matrices, rows));
        let arguments = arguments! {
            a: value(&of_a), b: value(&of_b), out: rows(&d), c: address(c.map_or(0, |c| c.address)),
            bias: address(bias.unwrap_or(0)), row_scales: address(scales.a), column_scales: address(scales.b),
            starts: address(experts.starts), tiles: address(tiles), out_stride: long(d.stride), n: int(n), k: int(k),
            count: int(count as usize),
        };
        let (source, shape) = self.wide_launch();
        let shape = LaunchShape { shared_bytes: CODES_BYTES as u32, ..shape };
        let launch = source.launch(d.dtype, "expert_codes_wide", shape, 0);
        let bytes = a.bytes() + d.bytes() + experts.count * b.bytes();
        // SAFETY: the rows of experts are those of `a` and `d`, every expert's matrix has the shape of `b` and lies after the one before; rows of all
        // of these have a scale each; a bias has `n` values per expert. Copies end where the maps of `a` and `b` do.
        unsafe { self.launch_with_cost(launch, cost([d.rows, n, k], bytes), &arguments) };
    }

    /// Describes matrices of codes, one after the other, for copies of boxes of so many rows.
    fn boxes(&self, name: &str, codes: DeviceBlock, matrices: usize, box_rows: usize) -> TensorMap {
        self.assert_block_is_live(name, DeviceBlock { rows: matrices * codes.rows, ..codes });
        let DeviceBlock { address, rows, width, stride, .. } = codes;
        let box_rows = box_rows as u32;
        let of = ByteMatrices { address, matrices, rows, width, strides: [stride, rows * stride], box_rows };
        check("multiplying experts in 8-bit floats", self.context.tensor_map(of))
    }

    /// Returns the program of the Hopper kernels, and the shape of their launches.
    fn wide_launch(&self) -> (Source, LaunchShape) {
        let shape = LaunchShape { shared_bytes: WIDE_BYTES as u32, ..grid_of([self.multiprocessors, 1, 1], 384) };
        (Source::WideExperts { stages: expert_stages(self.shared_bytes()) }, shape)
    }

    fn expert_rows(&self, gemm: Gemm, experts: OfExperts, d: DeviceBlock) {
        let Gemm { name, a, b, c, bias, .. } = gemm;
        let (n, k, across) = (d.width, a.width, !gemm.b_transposed);
        let of_b = if across { [b.rows, b.width] } else { [b.width, b.rows] };
        assert!((a.rows, [k, n]) == (d.rows, of_b) && gemm.alpha == 1.0, "{name}: shapes of the operands");
        assert!(
            c.is_none_or(|c| c.stride == d.stride && c.dtype == d.dtype),
            "{name}: what is added is laid out as the result"
        );
        let [tiles, count] = experts.tiles;
        let arguments = arguments! {
            out: rows(&d), a: rows(&a), b: rows(&b), c: address(c.map_or(0, |c| c.address)),
            bias: address(bias.unwrap_or(0)), starts: address(experts.starts), tiles: address(tiles),
            out_stride: long(d.stride), a_stride: long(a.stride), b_stride: long(b.stride),
            b_expert: long(experts.matrix_stride), n: int(n), k: int(k),
        };
        let stages = expert_stages(self.shared_bytes());
        let is_wide = self.has_wide_experts() && n > EXPERT_TILE;
        let columns = if n <= EXPERT_TILE / 2 || stages < 3 { EXPERT_TILE / 2 } else { EXPERT_TILE };
        let (source, kernel, shape) = match (is_wide, across) {
            (true, _) => {
                let kernel = if across { "expert_rows_across_wide" } else { "expert_rows_wide" };
                let (source, shape) = self.wide_launch();
                (source, kernel, shape)
            }
            (false, across) => {
                let kernel = match (across, columns == EXPERT_TILE) {
                    (false, false) => "expert_rows_64",
                    (false, true) => "expert_rows_128",
                    (true, false) => "expert_rows_across_64",
                    (true, true) => "expert_rows_across_128",
                };
                let shape = grid(count as usize * n.div_ceil(columns), 256);
                (self.expert_source(), kernel, LaunchShape { shared_bytes: shared_bytes(columns, stages), ..shape })
            }
        };
        let arguments = if is_wide {
            arguments! { arguments => count: int(count as usize) }
        } else {
            arguments
        };
        let launch = source.launch(d.dtype, kernel, shape, 0);
        let bytes = a.bytes() + d.bytes() + experts.count * b.bytes();
        // SAFETY: the rows of experts are those of `a` and `d`, every expert's matrix has the shape of `b` and lies `matrix_stride` values after
        // the one before; a bias has `n` values per expert. Copies are bounded by rows and columns.
        unsafe { self.launch_with_cost(launch, cost([d.rows, n, k], bytes), &arguments) };
    }

    /// Computes the sums over each expert's rows of one or two GEMMs, whose operands have the same strides and whose right ones the same width.
    pub(in crate::backends::cuda) fn expert_sums(&self, gemms: &[(Gemm, DeviceBlock)], experts: OfExperts) {
        let &[(first, _), ..] = gemms else { return };
        let (rows, n, adds) = (first.a.rows, first.b.width, first.c.is_some());
        let mut two = TwoSumsArgument::default();
        let [mut row_tiles, mut all_m, mut bytes] = [0; 3];
        for (of, &(gemm, d)) in two.of.iter_mut().zip(gemms) {
            let Gemm { name, a, b, c, .. } = gemm;
            assert!(
                !gemm.b_transposed && [a.rows, b.rows] == [rows; 2] && b.width == n,
                "{name}: shapes of the operands"
            );
            assert!([a.stride, b.stride] == [first.a.stride, first.b.stride], "{name}: strides of the operands");
            let shape = [d.rows, d.width, d.stride];
            assert!(shape == [experts.count * a.width, n, n], "{name}: sums of all experts, without gaps");
            assert!(c.is_none_or(|c| c == d) && c.is_some() == adds && d.dtype == DType::F32, "{name}: sums in place");
            [a, b, d].into_iter().for_each(|block| self.assert_block_is_live(name, block));
            let (m, alpha) = (a.width as i32, gemm.alpha as f32);
            *of = SumsArgument { sums: d.address, left: a.address, right: b.address, m, alpha };
            row_tiles += a.width.div_ceil(EXPERT_TILE);
            all_m += a.width;
            bytes += a.bytes() + d.bytes();
        }
        assert!(gemms.len() <= two.of.len(), "{} sums of experts in a launch", gemms.len());
        let [one, other] = two.of;
        let is_joint = other.left == one.left + 2 * one.m as u64 && other.right == one.right;
        let row_tiles = if is_joint { all_m.div_ceil(EXPERT_TILE) } else { row_tiles };
        let stages = expert_stages(self.shared_bytes());
        let columns = if n <= EXPERT_TILE / 2 || stages < 3 { EXPERT_TILE / 2 } else { EXPERT_TILE };
        let kernel = if columns == EXPERT_TILE { "expert_sums_128" } else { "expert_sums_64" };
        let shape = grid(experts.count * row_tiles * n.div_ceil(columns), 256);
        let shape = LaunchShape { shared_bytes: shared_bytes(columns, stages), ..shape };
        let arguments = arguments! {
            two: value(&two), starts: address(experts.starts), left_stride: long(first.a.stride),
            right_stride: long(first.b.stride), n: int(n), add: i32(i32::from(adds)),
        };
        let launch = self.expert_source().launch(first.a.dtype, kernel, shape, 0);
        let cost = cost([all_m, n, rows], bytes + first.b.bytes());
        // SAFETY: all operands have the rows of the experts, and each sum has the width of its left operand in rows per expert.
        unsafe { self.launch_with_cost(launch, cost, &arguments) };
    }

    /// Adds up the columns of each expert's rows, `[e * width]` f32.
    pub(in crate::backends::cuda) fn expert_column_sums(&self, x: DeviceBlock, experts: OfExperts) -> Primitive {
        let sums = self.empty([experts.count * x.width], DType::F32);
        let shape = grid_of([x.width.div_ceil(256), experts.count, 1], 256);
        let launch = self.expert_source().launch(x.dtype, "expert_column_sums", shape, x.bytes());
        let arguments = arguments! {
            sums: address(self.address(&sums)), x: rows(&x), starts: address(experts.starts), stride: long(x.stride),
            d: int(x.width),
        };
        // SAFETY: x has the rows of the experts at the stride given, and the sums one value per expert and column.
        unsafe { self.launch(launch, &arguments) };
        sums
    }
}

fn cost([m, n, k]: [usize; 3], bytes: usize) -> Cost {
    Cost { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: bytes as f64, gemm: Some([m, n, k]) }
}
