//! `verify`: compares this model's logits on this backend with those of another implementation.
//!
//! The golden file is a safetensors file with `input_ids` `[B, T]` (i64), `logits` `[B, T, V]` (f32) and optionally `loss` `[1]`, written for
//! instance with transformers (see tests/golden/make_llama_goldens.py).

use std::path::{Path, PathBuf};

use crate::RunError;
use crate::run::text::generate::LoadOptions;
use firebrick_kernels::Kernels;
use firebrick_precision::difference::{is_within, largest_difference, worst};
use safetensors::{Dtype, SafeTensors};

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// The model.
    pub load: LoadOptions,
    /// Golden file.
    pub golden: PathBuf,
    /// Largest absolute difference of a logit, and of the loss, that passes.
    pub tolerance: f64,
}

/// Difference between the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Largest absolute difference of a logit; infinite if one of them is not finite.
    pub largest: f64,
    /// Mean absolute difference.
    pub mean: f64,
    /// Fraction of the positions whose highest logit is the same token.
    pub top1_agreement: f32,
    /// Absolute difference of the mean next-token loss, if the golden file has it.
    pub loss: Option<f64>,
}

impl Difference {
    /// Returns what lies outside the tolerance: `"logits differ by up to 3e-1"`.
    pub fn beyond(&self, tolerance: f64) -> Option<String> {
        let differs = |what: &str, difference: f64| match difference.is_finite() {
            true => format!("{what} by up to {difference:e}"),
            false => format!("{what}: values that are not finite are infinitely far from any others"),
        };
        if !is_within(self.largest, tolerance) {
            return Some(differs("logits differ", self.largest));
        }
        self.loss.filter(|loss| !is_within(*loss, tolerance)).map(|loss| differs("the loss differs", loss))
    }
}

struct Golden {
    rows: usize,
    tokens: usize,
    vocabulary: usize,
    input_ids: Vec<u32>,
    logits: Vec<f32>,
    loss: Option<f32>,
}

/// Computes the golden file's inputs and measures the difference.
///
/// # Errors
/// A model, adapter or golden file that cannot be read, or a golden file that does not fit the model. A difference above the
/// tolerance is not an error here: the caller decides.
pub fn verify<B: Kernels>(options: &VerifyOptions, device: &B::Device) -> Result<Difference, RunError> {
    let golden = read_golden(&options.golden)?;
    let model = options.load.load::<B>(golden.tokens, golden.tokens, device)?;
    if golden.vocabulary != model.config.spec.vocab_size {
        let (path, theirs, ours) = (options.golden.display(), golden.vocabulary, model.config.spec.vocab_size);
        return Err(RunError::Refused(format!("`{path}`: logits of {theirs} tokens, the model has {ours}")));
    }
    let (mut ours, mut loss_sum) = (Vec::with_capacity(golden.logits.len()), 0.0f64);
    for row in golden.input_ids.chunks(golden.tokens) {
        let positions: Vec<u32> = (0..row.len() as u32).collect();
        let targets: Vec<i64> = row.iter().skip(1).map(|&id| i64::from(id)).chain([-100]).collect();
        let batch = model.upload(row, &targets, &positions, &[0, row.len() as u32])?;
        ours.extend(host(model.logits(&batch)));
        loss_sum += f64::from(host(model.loss_only(&batch, row.len()))[0]);
    }
    let loss = (loss_sum / (golden.rows * (golden.tokens - 1)) as f64) as f32;
    Ok(compare(&golden, &ours, loss))
}

fn host<B: Kernels, const D: usize>(tensor: burn_tensor::Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("values were just converted to f32")
}

fn compare(golden: &Golden, ours: &[f32], loss: f32) -> Difference {
    let rows = golden.logits.chunks(golden.vocabulary).zip(ours.chunks(golden.vocabulary));
    let agreeing = rows.filter(|(expected, got)| argmax(expected) == argmax(got)).count();
    let sum: f64 = golden.logits.iter().zip(ours).map(|(a, b)| f64::from((a - b).abs())).sum();
    Difference {
        largest: largest_difference(ours, &golden.logits),
        mean: worst([sum / golden.logits.len() as f64]),
        top1_agreement: agreeing as f32 / (golden.rows * golden.tokens) as f32,
        loss: golden.loss.map(|expected| largest_difference(&[loss], &[expected])),
    }
}

fn argmax(values: &[f32]) -> usize {
    (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap_or(0)
}

fn read_golden(path: &Path) -> Result<Golden, RunError> {
    let wrong = |problem: String| RunError::Refused(format!("`{}`: {problem}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let file =
        SafeTensors::deserialize(&bytes).map_err(|error| wrong(format!("is not a safetensors file: {error}")))?;
    let other = file.names().into_iter().min().unwrap_or("nothing");
    let expected = "--golden takes a safetensors file with input_ids and the logits that a reference implementation computed from them";
    let tensor = |name: &str, dtype: Dtype| {
        let absent = |_| wrong(format!("is no golden file: it has `{other}`, but not `{name}`. {expected}"));
        let view = file.tensor(name).map_err(absent)?;
        if view.dtype() != dtype {
            return Err(wrong(format!("`{name}` is {:?}, expected {dtype:?}", view.dtype())));
        }
        Ok(view)
    };
    let (ids, logits) = (tensor("input_ids", Dtype::I64)?, tensor("logits", Dtype::F32)?);
    let (&[rows, tokens], &[logit_rows, logit_tokens, vocabulary]) = (ids.shape(), logits.shape()) else {
        return Err(wrong(format!(
            "expected input_ids [B, T] and logits [B, T, V], got {:?} and {:?}",
            ids.shape(),
            logits.shape()
        )));
    };
    if (rows, tokens) != (logit_rows, logit_tokens) || tokens < 2 {
        return Err(wrong(format!("input_ids {:?} and logits {:?} do not fit", ids.shape(), logits.shape())));
    }
    let (found, _) = ids.data().as_chunks::<8>();
    let input_ids: Result<Vec<u32>, _> = found.iter().map(|id| u32::try_from(i64::from_le_bytes(*id))).collect();
    let input_ids = input_ids.map_err(|_| wrong("holds a token id that is negative or too large".to_owned()))?;
    if let Some(&highest) = input_ids.iter().max().filter(|&&id| id as usize >= vocabulary) {
        return Err(wrong(format!("holds token id {highest}, its logits only {vocabulary} columns")));
    }
    let loss = tensor("loss", Dtype::F32).ok().map(|view| f32s(view.data())[0]);
    Ok(Golden { rows, tokens, vocabulary, input_ids, logits: f32s(logits.data()), loss })
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(logits: [f32; 4], loss: f32) -> Golden {
        Golden { rows: 1, tokens: 2, vocabulary: 2, input_ids: vec![0, 1], logits: logits.to_vec(), loss: Some(loss) }
    }

    #[test]
    fn logits_and_loss_are_judged_and_what_is_not_finite_is_infinitely_far() {
        let usual = [0.5, 1.0, -2.0, 3.0];
        let beyond = |theirs: [f32; 4], their_loss, ours: [f32; 4], our_loss, tolerance| {
            compare(&golden(theirs, their_loss), &ours, our_loss).beyond(tolerance)
        };
        assert_eq!(beyond(usual, 1.0, usual, 1.0, 0.0), None);
        assert!(beyond(usual, 1.0, usual, 1.1, 1e-3).unwrap().starts_with("the loss differs"));
        assert!(beyond(usual, 1.0, [0.5, 1.0, -2.0, 3.1], 1.0, 1e-3).unwrap().starts_with("logits differ"));
        let wrong = [0.5, 1.0, f32::NAN, 3.0];
        for (theirs, ours) in [(usual, wrong), (wrong, usual), (wrong, wrong)] {
            assert!(beyond(theirs, 1.0, ours, 1.0, 1e9).unwrap().contains("not finite"));
            assert!(beyond(usual, theirs[2], usual, ours[2], 1e9).unwrap().contains("not finite"));
        }
    }
}
