//! Quantizes one tensor of a checkpoint to NF4 (4-bit NormalFloat) and reports its size and its error.
//!
//! Usage: `quantize_nf4 [<model folder> <tensor name>]`; without arguments, a projection of the quickstart model.
//! Trade-off: the tensor is quantized on the host. A training run quantizes on the device where the backend can.
#![expect(clippy::print_stdout, reason = "the report is the output of this program")]

use std::error::Error;
use std::path::Path;

use firebrick_model::{HfFolder, ModelConfig};
use firebrick_precision::QuantFormat;

const QUICKSTART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/quickstart/base");

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = Path::new(arguments.first().map_or(QUICKSTART, String::as_str));
    let name = arguments.get(1).map_or("model.layers.0.mlp.up_proj.weight", String::as_str);

    // The model's config.json tells which tensors the checkpoint has, and their shapes.
    let tensors = ModelConfig::read(folder)?.spec.tensors();
    let tensor = tensors.iter().find(|tensor| tensor.name == name);
    let shape = &tensor.ok_or_else(|| format!("the model has no tensor `{name}`"))?.shape;
    let values = HfFolder::open(folder)?.read_f32(name, shape)?;
    println!("{name}, shape {shape:?}: {} bytes in f32", 4 * values.len());

    for format in QuantFormat::ALL {
        // Blocks of 64 values share one scale. With double quantization the scales are quantized to 8 bits as well.
        let quantized = format.quantize(&values, shape)?;
        let restored = quantized.dequantize();
        let bits = 8.0 * quantized.bytes() as f64 / values.len() as f64;
        println!(
            "{format}: {} bytes ({bits:.3} bits per value), relative error {:.4}, largest error {:.2e}",
            quantized.bytes(),
            relative_error(&restored, &values),
            restored.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
        );
    }
    Ok(())
}

/// `‖restored − values‖ / ‖values‖`.
fn relative_error(restored: &[f32], values: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let error = squares(&mut restored.iter().zip(values).map(|(a, b)| a - b));
    (error / squares(&mut values.iter().copied())).sqrt()
}
