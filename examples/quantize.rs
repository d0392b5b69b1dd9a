//! Quantizes weights of a checkpoint to every storage format of a frozen base and reports size and error of each.
//!
//! Usage: `quantize [<model folder> [<tensor name>]]`: all projections of the model, or one tensor; without arguments, of the
//! quickstart model.
//! Trade-off: weights are quantized on the host. A training run quantizes on the device where the backend can.
#![expect(clippy::print_stdout, reason = "the report is the output of this program")]

use std::error::Error;
use std::path::Path;

use firebrick_arch::{Role, TensorSpec};
use firebrick_model::{HfFolder, read_config};
use firebrick_precision::QuantFormat;
use firebrick_precision::difference::{largest_difference, worst};

const QUICKSTART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/quickstart/base");

/// Sums over the weights of one format.
#[derive(Clone, Copy, Default)]
struct Sums {
    bytes: usize,
    squared_error: f64,
    largest_error: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = Path::new(arguments.first().map_or(QUICKSTART, String::as_str));

    // The model's config.json tells which tensors the checkpoint has, and their shapes.
    let is_wanted = |tensor: &TensorSpec| match arguments.get(1) {
        Some(name) => tensor.name == *name,
        None => tensor.role == Role::Projection,
    };
    let mut tensors = read_config(folder)?.spec.tensors();
    tensors.retain(is_wanted);
    if tensors.is_empty() {
        return Err(format!("the model has no tensor {:?}", arguments.get(1)).into());
    }

    let weights = HfFolder::open(folder)?;
    let (mut count, mut squares, mut sums) = (0, 0.0, QuantFormat::ALL.map(|_| Sums::default()));
    for tensor in &tensors {
        let values = weights.read_f32(&tensor.name, &tensor.shape)?;
        count += values.len();
        squares += values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>();
        for (format, sums) in QuantFormat::ALL.into_iter().zip(&mut sums) {
            let quantized = format.quantize(&values, &tensor.shape)?;
            sums.bytes += quantized.bytes();
            let restored = quantized.dequantize();
            sums.largest_error = worst([sums.largest_error, largest_difference(&restored, &values)]);
            sums.squared_error +=
                restored.iter().zip(&values).map(|(restored, value)| f64::from(restored - value).powi(2)).sum::<f64>();
        }
    }
    println!("{} tensor(s) of {}: {} bytes in f32", tensors.len(), folder.display(), 4 * count);
    for (format, Sums { bytes, squared_error, largest_error }) in QuantFormat::ALL.into_iter().zip(sums) {
        let (bits, error) = (8.0 * bytes as f64 / count as f64, (squared_error / squares).sqrt());
        println!(
            "{format}: {bytes} bytes ({bits:.3} bits per value), relative error {error:.4}, largest error {largest_error:.2e}"
        );
    }
    Ok(())
}
