//! Launches that quantize weights, and the names of the kernels of each format. Kernels: `nf4.cu`, `scaled_formats.cu`.
//! Trade-off: while a weight is quantized, both its values and its codes are on the device.

use burn_tensor::{DType, Tensor};
use firebrick_precision::{HostScales, QuantFormat, blockwise, nf4};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, Launch, MatrixView, Primitive, ScratchSlot, Source, arguments, grid, int_tensor, tensor,
};
use crate::weights::reference::scales_by;
use crate::{BlockScales, HostBuffer, QuantizedWeight, Weight};

/// Returns the kernels that read a weight: that of `write_out.cu`, and those of `fp8.cu` for rows and for columns.
pub(super) fn kernels_of(weight: &Weight<Cuda>) -> [&'static str; 3] {
    match weight {
        Weight::Quantized(weight) => names_of(weight.format),
        Weight::Dense(values) => match values.dtype() {
            DType::BF16 => ["dense_write_out_bf16", "bf16_weight_rows", "bf16_weight_columns"],
            DType::F16 => ["dense_write_out_f16", "f16_weight_rows", "f16_weight_columns"],
            _ => ["dense_write_out_f32", "f32_weight_rows", "f32_weight_columns"],
        },
    }
}

/// Returns the line of `QUANTIZED_FORMATS` in `weight_values.cu`.
fn names_of(format: QuantFormat) -> [&'static str; 3] {
    match format {
        QuantFormat::Nf4 { .. } => ["nf4_write_out", "nf4_weight_rows", "nf4_weight_columns"],
        QuantFormat::Nvfp4 => ["nvfp4_write_out", "nvfp4_weight_rows", "nvfp4_weight_columns"],
        QuantFormat::Mxfp4 => ["mxfp4_write_out", "mxfp4_weight_rows", "mxfp4_weight_columns"],
        QuantFormat::Fp8 => ["fp8_write_out", "fp8_weight_rows", "fp8_weight_columns"],
    }
}

/// Describes a launch that does not depend on the format of activations.
fn plain(name: &'static str, blocks: usize, bytes: usize) -> Launch {
    Source::Quantize.launch(DType::F32, name, grid(blocks, 256), bytes)
}

/// Selects the kernel for values of this format, from those for bf16, f16 and f32.
fn of_source(values: &MatrixView, [bf16, f16, f32]: [&'static str; 3]) -> &'static str {
    match values.dtype {
        DType::BF16 => bf16,
        DType::F16 => f16,
        _ => f32,
    }
}

impl Device {
    pub(super) fn upload_codes(
        &self,
        codes: HostBuffer,
        scales: &HostScales,
        format: QuantFormat,
        shape: [usize; 2],
    ) -> QuantizedWeight<Cuda> {
        let codes = int_tensor(self.uploaded(codes.into_memory().expect("a buffer of this backend"), DType::U8));
        let padded = |codes: &[u8], count| {
            let write = |bytes: &mut [u8]| {
                let (given, padding) = bytes.split_at_mut(codes.len());
                given.copy_from_slice(codes);
                padding.fill(0);
            };
            int_tensor(self.written(count, DType::U8, write))
        };
        let scales = scales_by(scales, padded, |values| tensor(self.uploaded_values(values)), || self.tables.signed());
        QuantizedWeight { format, codes, scales, table: self.tables.byte_table(format), shape }
    }

    /// Quantizes a matrix; `table` is the lookup table of the dequantization.
    ///
    /// # Panics
    /// If the format does not support rows of this length; a run's plan and the code that reads weights check this.
    pub(crate) fn quantize(
        &self,
        values: Tensor<Cuda, 2>,
        format: QuantFormat,
        table: Tensor<Cuda, 2>,
    ) -> QuantizedWeight<Cuda> {
        let shape = values.dims();
        format.check_columns(shape[1]).unwrap_or_else(|error| panic!("{error}"));
        let values = self.flat(values);
        let blocks = format.blocks(values.count(), shape[1]);
        let padded = blocks * format.block_size(shape[1]);
        let codes = self.empty([padded / format.packing().codes_per_byte()], DType::U8);
        let scales = match format {
            QuantFormat::Nf4 { double_quant } => self.nf4_codes(&values, &codes, blocks, double_quant),
            QuantFormat::Nvfp4 => self.nvfp4_codes(&values, &codes, blocks),
            QuantFormat::Mxfp4 => self.mxfp4_codes(&values, &codes, blocks),
            QuantFormat::Fp8 => self.fp8_codes(&values, &codes, shape),
        };
        QuantizedWeight { format, codes: int_tensor(codes), scales, table, shape }
    }

    fn nf4_codes(
        &self,
        values: &MatrixView,
        codes: &Primitive,
        blocks: usize,
        double_quant: bool,
    ) -> BlockScales<Cuda> {
        let count = values.count();
        assert_eq!(blocks, count.div_ceil(nf4::BLOCK_SIZE), "blocks of NF4 run across rows");
        let absmax = self.empty([blocks], DType::F32);
        let arguments = arguments! {
            codes: address(self.address(codes)), absmax: address(self.address(&absmax)), w: rows(values),
            n: long(count),
        };
        let name = of_source(values, ["nf4_quantize_bf16", "nf4_quantize_f16", "nf4_quantize_f32"]);
        let launch = plain(name, count.div_ceil(4096), values.bytes() + count / 2);
        // SAFETY: codes hold half a byte and absmax an f32 for every block of 64 of the values, which are dense.
        unsafe { self.launch(launch, &arguments) };
        if double_quant { self.nested_scales(&absmax, blocks) } else { BlockScales::Float(tensor(absmax)) }
    }

    fn nvfp4_codes(&self, values: &MatrixView, codes: &Primitive, blocks: usize) -> BlockScales<Cuda> {
        let count = values.count();
        let (scales, map) = (self.empty([blocks], DType::U8), self.empty([256], DType::F32));
        let parts = count.div_ceil(4096).min(1024);
        let largest = self.scratch.take(ScratchSlot::Partial, 1024 * 8);
        let search = arguments! { largest: address(largest), w: rows(values), n: long(count) };
        let arguments = arguments! {
            codes: address(self.address(codes)), scales: address(self.address(&scales)),
            map: address(self.address(&map)), largest: address(largest), parts: int(parts), w: rows(values),
            n: long(count),
        };
        let names = ["weight_largest_bf16", "weight_largest_f16", "weight_largest_f32"];
        let search_launch = plain(of_source(values, names), parts, values.bytes());
        let names = ["nvfp4_quantize_bf16", "nvfp4_quantize_f16", "nvfp4_quantize_f32"];
        let launch = plain(of_source(values, names), count.div_ceil(4096), values.bytes() + count / 2 + blocks);
        // SAFETY: there is room for 1024 partial maxima; codes hold half a byte for each of the values, which are dense and whole
        // blocks of 16, scales a byte for each block, and the map 256 f32.
        unsafe {
            self.launch(search_launch, &search);
            self.launch(launch, &arguments);
        }
        BlockScales::Narrow { codes: int_tensor(scales), map: tensor(map) }
    }

    fn mxfp4_codes(&self, values: &MatrixView, codes: &Primitive, blocks: usize) -> BlockScales<Cuda> {
        let count = values.count();
        let scales = self.empty([blocks], DType::U8);
        let arguments = arguments! {
            codes: address(self.address(codes)), scales: address(self.address(&scales)), w: rows(values),
            n: long(count),
        };
        let name = of_source(values, ["mxfp4_quantize_bf16", "mxfp4_quantize_f16", "mxfp4_quantize_f32"]);
        let launch = plain(name, count.div_ceil(8192), values.bytes() + count / 2 + blocks);
        // SAFETY: codes hold half a byte for each of the values, which are dense and whole blocks of 32, and scales a byte for each
        // block.
        unsafe { self.launch(launch, &arguments) };
        BlockScales::Narrow { codes: int_tensor(scales), map: self.tables.e8m0() }
    }

    fn fp8_codes(&self, values: &MatrixView, codes: &Primitive, [rows, inputs]: [usize; 2]) -> BlockScales<Cuda> {
        let scales = self.empty([rows], DType::F32);
        let arguments = arguments! {
            codes: address(self.address(codes)), scales: address(self.address(&scales)), w: rows(values),
            inputs: int(inputs),
        };
        let name = of_source(values, ["fp8_quantize_bf16", "fp8_quantize_f16", "fp8_quantize_f32"]);
        // SAFETY: codes hold a byte for each of the values, which are dense, and scales an f32 for each row.
        unsafe { self.launch(plain(name, rows, 2 * values.bytes() + values.count()), &arguments) };
        BlockScales::Float(tensor(scales))
    }

    /// Quantizes block scales to 8 bits around their mean.
    fn nested_scales(&self, absmax: &Primitive, blocks: usize) -> BlockScales<Cuda> {
        let map = self.tables.signed();
        let nested = blocks.div_ceil(blockwise::BLOCK_SIZE);
        let codes = self.empty([nested * blockwise::BLOCK_SIZE], DType::U8);
        let nested_absmax = self.empty([nested], DType::F32);
        let offset = self.empty([1], DType::F32);
        let parts = blocks.div_ceil(4096).min(1024);
        let partial = self.scratch.take(ScratchSlot::Partial, 1024 * 8);
        let (from, mean) = (self.address(absmax), self.address(&offset));
        let sum = arguments! { partial: address(partial), absmax: address(from), blocks: long(blocks) };
        let divide = arguments! {
            mean: address(mean), partial: address(partial), count: int(parts), blocks: long(blocks),
        };
        let map_view = self.flat(map.clone());
        let quantize = arguments! {
            codes: address(self.address(&codes)), nested_absmax: address(self.address(&nested_absmax)),
            absmax: address(from), mean: address(mean), map: rows(&map_view), blocks: long(blocks),
        };
        // SAFETY: the partial sums have room for 1024 f64; one code per block and one f32 per 256; the map has 256 values.
        unsafe {
            self.launch(plain("absmax_sum", parts, blocks * 4), &sum);
            self.launch(plain("absmax_mean", 1, parts * 8), &divide);
            self.launch(plain("absmax_quantize", nested, blocks * 5), &quantize);
        }
        BlockScales::Nested {
            codes: int_tensor(codes),
            absmax: tensor(nested_absmax),
            map,
            offset: tensor(offset),
            blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_its_line_in_the_source_of_values() {
        let source = include_str!("weight_values.cu");
        for format in QuantFormat::ALL {
            assert!(source.contains(&format!("KERNEL_OF({}, ", names_of(format).join(", "))), "{format}");
        }
    }
}
