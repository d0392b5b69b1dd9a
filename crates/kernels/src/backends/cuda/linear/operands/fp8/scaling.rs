//! GEMMs of 8-bit codes on every card that has them: how the scales of the rows get into the product.
//!
//! | compute capability | |
//! |---|---|
//! | 8.9 (L4, L40S, RTX 40) | the GEMM multiplies bare codes, and a pass over its result multiplies by the scales |
//! | 9.0 (H100, H200) | cuBLASLt reads one f32 per row |
//! | 10.0 and later (B200, RTX 50) | MXFP8: cuBLASLt reads a power of two for each 32 codes of a row, and has them in hardware |
//!
//! Codes are made by the same kernels everywhere. Under MXFP8 the scale of a row is a power of two, which all blocks of the row share: a
//! block of its own scale would be no more exact where its values are in the normal range of E4M3, which has 15 powers of two, and the
//! backward could not multiply with the transposed codes of the forward.
//!
//! No card other than Hopper's was at hand. The pass over the result, and codes under powers of two, are tested on one; the order of block
//! scales is compared with that of firebrick-precision; the descriptors are tested against the library.
//! Trade-off: on 8.9 results are rounded to the compute format twice, and read and written once more.

use burn_tensor::{DType, Tensor};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Arguments, Scaling};

use super::codes::Codes;
use super::row_scaling::RowScaling;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Engine, Gemm, GemmScales, Launch, ScratchSlot, Source, at, engine, grid, tensor,
};

/// Whether sums of codes may be kept in fewer bits between the steps of a product. cuBLASLt's fast accumulation rounds partial sums to 14
/// bits or so.
const FAST: bool = true;

/// Makes this thread's GEMMs in 8-bit floats on a device take scales in a way that may be another card's, and returns how they did: for tests
/// of those ways. Not while converted weights are kept, whose codes would be those of before.
pub fn scale_rows(device: &CudaDevice, scaling: RowScaling) -> RowScaling {
    let engine = engine(device);
    engine.scratch.forget_contents();
    engine.fp8_scales.clear();
    engine.row_scaling.replace(scaling)
}

/// The scales of blocks that a GEMM reads where rows of `width` codes have these scales: for tests of their order.
pub fn block_scales(scales_n: Tensor<Cuda, 1>, width: usize) -> Vec<u8> {
    let engine = engine(&scales_n.device());
    let rows = scales_n.dims()[0];
    let bytes = Scaling::Blocks32.bytes(rows, width);
    let blocks = engine.section(|| {
        let scales = engine.matrix(scales_n.reshape([1, rows]));
        let address = engine.blocks_of(ScratchSlot::Fp8RowBlocks, scales.address, [rows, width]);
        let out = engine.empty_matrix(1, bytes / 4, DType::F32);
        engine.copy_rows(DeviceBlock::dense(address, [1, bytes / 4], DType::F32), out.block());
        tensor::<2>(out.tensor)
    });
    bytemuck::cast_slice(&blocks.into_data().to_vec::<f32>().expect("it was made in f32")).to_vec()
}

impl Engine {
    /// A GEMM of codes into `d`: `gemm` names the blocks of the codes `a` and `b`.
    pub(super) fn fp8_gemm(&self, gemm: Gemm, [a, b]: [&Codes; 2], d: DeviceBlock) {
        let [rows, columns] = [a.block.rows, b.block.rows];
        match self.row_scaling.get() {
            RowScaling::InGemm { .. } => {
                let scales = Some(GemmScales { a: a.scales, b: b.scales, scaling: Scaling::OuterVector });
                self.gemm(Gemm { scales, is_fast: FAST, ..gemm }, d);
            }
            RowScaling::InBlocks => {
                let width = a.block.stride;
                let a = self.blocks_of(ScratchSlot::Fp8RowBlocks, a.scales, [rows, width]);
                let b = self.blocks_of(ScratchSlot::Fp8WeightBlocks, b.scales, [columns, width]);
                self.gemm(Gemm { scales: Some(GemmScales { a, b, scaling: Scaling::Blocks32 }), ..gemm }, d);
            }
            RowScaling::Afterwards => {
                self.gemm(Gemm { c: None, bias: None, is_fast: FAST, ..gemm }, d);
                self.scale_products(gemm, [a.scales, b.scales], d);
            }
        }
    }

    /// Address of the scales of blocks of rows of `width` codes, from those of the rows, which are powers of two.
    fn blocks_of(&self, slot: ScratchSlot, scales: u64, [rows, width]: [usize; 2]) -> u64 {
        let bytes = Scaling::Blocks32.bytes(rows, width);
        let blocks = self.scratch.take(slot, bytes);
        let arguments =
            Arguments::new().pointer(at(blocks)).pointer(at(scales)).i32(rows as i32).i32(width.div_ceil(128) as i32);
        let launch = Launch {
            source: Source::Fp8,
            dtype: DType::F32,
            name: "block_scales",
            shape: grid(bytes.div_ceil(16 * 256), 256),
            bytes: bytes + rows * 4,
        };
        // SAFETY: there is a scale for each row, and room for tiles of 128 rows by four blocks.
        unsafe { self.launch(launch, &arguments) };
        blocks
    }

    /// Multiplies what a GEMM of bare codes gave by the scales of its rows and columns, and adds what the GEMM was to add.
    fn scale_products(&self, gemm: Gemm, [of_rows, of_columns]: [u64; 2], d: DeviceBlock) {
        assert!(
            d.is_in_vectors() && gemm.c.is_none_or(|c| c.is_in_vectors() && c.stride == d.stride),
            "{}: rows of {d:?}",
            gemm.name
        );
        assert!(gemm.c.is_none_or(|c| c.address != d.address), "{}: what is added is overwritten before", gemm.name);
        assert!(d.dtype != DType::F16, "{}: products of codes are beyond f16", gemm.name);
        let arguments = Arguments::new()
            .rows(&d)
            .i64(d.stride as i64)
            .pointer(at(of_rows))
            .pointer(at(of_columns))
            .pointer(at(gemm.c.map_or(0, |c| c.address)))
            .pointer(at(gemm.bias.unwrap_or(0)))
            .i64(d.rows as i64)
            .i32(d.width as i32);
        let launch = Launch {
            source: Source::Fp8,
            dtype: d.dtype,
            name: "scale_products",
            shape: grid(d.count().div_ceil(2048), 256),
            bytes: 2 * d.bytes() + gemm.c.map_or(0, |c| c.bytes()),
        };
        // SAFETY: d and c are rows of this dtype at one stride; rows and columns have a scale each, and columns a bias where there is one.
        unsafe { self.launch(launch, &arguments) };
    }
}
