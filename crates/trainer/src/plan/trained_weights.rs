//! Decides how the matrices of a model are stored of which every weight trains, and in which format their gradients are summed.
//!
//! Sums in bf16 are rounded to the nearest by the GEMMs that add to them, once in each micro-batch; rounding at random would need another pass over
//! every sum. So sums in f32 are taken where there is memory for them: where all else that the plan decides by memory stays about as fast.
//! Trade-off: how fast goes by the forecast's model.

use firebrick_arch::{ModelSpec, TensorSpec};
use firebrick_kernels::BackendKind;
use firebrick_optim::TrainedWeights;
use firebrick_precision::FloatType;

use crate::config::{Auto, RunConfig, to_name};
use crate::error::RunError;
use crate::plan::fit::Case;
use crate::plan::shapes::Basis;
use crate::plan::{Chosen, memory_choices};

/// How much longer a micro-batch may take because sums in f32 leave less memory.
const LONGER: f64 = 1.02;

/// Refuses weights in bf16 where nothing computes with them.
pub(super) fn check(
    config: &RunConfig,
    spec: &ModelSpec,
    backend: BackendKind,
    compute: FloatType,
) -> Result<(), RunError> {
    let weights = config.train.weights;
    let is_narrow = config.train.gradients == Auto::Given(FloatType::Bf16);
    let (key, problem) = match backend {
        _ if weights == TrainedWeights::Float32 => return Ok(()),
        BackendKind::Wgpu => ("weights", "backend wgpu has no bfloat16. Write train.weights = \"float32\"".to_owned()),
        BackendKind::Cuda if compute != FloatType::Bf16 => {
            ("weights", format!("GEMMs in {compute} do not read it. Write compute = \"bfloat16\" or \"fp8\""))
        }
        BackendKind::Cuda if is_narrow && spec.is_mixture() => {
            let problem =
                "products of experts are summed in float32. Write train.gradients = \"float32\", or remove the key";
            ("gradients", problem.to_owned())
        }
        BackendKind::Cuda | BackendKind::Flex | BackendKind::Candle => return Ok(()),
    };
    let value = if key == "weights" { to_name(&weights) } else { to_name(&config.train.gradients) };
    Err(RunError::Refused(format!("train.{key} = \"{value}\": {problem}")))
}

/// Says how matrices are stored where every weight trains; `None`: in float32.
pub(super) fn weights(config: &RunConfig) -> Option<Chosen<TrainedWeights>> {
    let why = match config.train.weights {
        TrainedWeights::Float32 => return None,
        TrainedWeights::Bf16Exact => {
            "16 more bits of each weight are in the optimizer's state: updates are those of float32, bit for bit"
        }
        TrainedWeights::Bf16Stochastic => {
            "an update is rounded up or down at random, by a hash of seed, step, parameter and element: right on average"
        }
    };
    Some(Chosen::new(config.train.weights, why))
}

/// Decides the format of sums, and gives it to the basis; `None` where weights are in float32. `trained`: the tensors that train.
pub(super) fn gradients(case: &Case<'_>, basis: &mut Basis<'_>, trained: &[TensorSpec]) -> Option<Chosen<FloatType>> {
    let config = basis.wish.recipe;
    if config.train.weights == TrainedWeights::Float32 {
        return None;
    }
    let chosen = match (basis.wish.gradients, config.train.gradients) {
        (Some(sums), Auto::Given(_)) => Chosen::recipe(sums),
        (Some(sums), Auto::Auto) => Chosen::new(sums, "auto: as in the run that is continued"),
        (None, _) if case.backend == BackendKind::Cuda && case.spec.is_mixture() => {
            Chosen::new(FloatType::F32, "auto: products of experts are summed in float32")
        }
        (None, _) => automatic(case, basis, trained),
    };
    basis.sum_in(chosen.value, trained);
    Some(chosen)
}

fn automatic(case: &Case<'_>, basis: &mut Basis<'_>, trained: &[TensorSpec]) -> Chosen<FloatType> {
    let rounded = "auto: rounded to the nearest in each micro-batch";
    match memory_choices::slowdown_of_f32_sums(case, basis, trained) {
        Some(ratio) if ratio <= LONGER => {
            Chosen::new(FloatType::F32, "auto: they fit, and nothing else has to give way")
        }
        Some(ratio) => {
            let why = format!(
                "{rounded}; float32 leaves less memory for the layers, which would take {ratio:.2} times as long"
            );
            Chosen::new(FloatType::Bf16, why)
        }
        None => Chosen::new(FloatType::Bf16, format!("{rounded}; in float32 the run does not fit")),
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::{TrainingShape, estimate};
    use serde_json::json;

    use super::*;
    use crate::plan::fixtures::{Example, llama};

    const FULL: [&str; 5] =
        ["mode=full", "lora=", "bnb_4bit=", "train.micro_batch_size=1", "train.optimizer=paged_adamw_8bit"];
    const GIB: f64 = (1u64 << 30) as f64;

    /// Decides the sums of an 8B in which every weight trains on an 80 GB card, and returns how it is trained.
    fn decided(changes: &[&str]) -> (Option<Chosen<FloatType>>, TrainingShape) {
        let example = Example::on("h100", &[&FULL, changes].concat());
        let (wish, case) = (example.wish(), example.case());
        let mut basis = example.basis(&wish, &case);
        let sums = gradients(&case, &mut basis, &example.trained());
        let (_, training) = memory_choices::decide(&case, &basis);
        (sums, training)
    }

    fn bytes_of(training: &TrainingShape, what: &str) -> f64 {
        let lines = estimate(BackendKind::Cuda, &llama(&json!({})).spec, training).lines;
        lines.iter().filter(|line| line.what == what).map(|line| line.bytes as f64 / GIB).sum()
    }

    #[test]
    fn an_8b_in_bf16_fits_an_80_gb_card_in_every_form() {
        for weights in ["bfloat16_stochastic", "bfloat16_exact"] {
            let (sums, training) = decided(&[&format!("train.weights={weights}"), "train.gradients=bfloat16"]);
            assert_eq!(sums.unwrap().value, FloatType::Bf16);
            // 8,030,261,248 parameters, of which 266,240 are those of norms.
            for what in ["trained weights", "gradients"] {
                assert!((bytes_of(&training, what) - 14.96).abs() < 0.01, "{what}: {}", bytes_of(&training, what));
            }
            let state = training.optimizer_bytes as f64 / GIB;
            let expected = if weights == "bfloat16_exact" { 33.0 } else { 18.1 };
            assert!((state - expected).abs() < 0.2, "{state}");
            let total = estimate(BackendKind::Cuda, &llama(&json!({})).spec, &training).total_bytes() as f64 / GIB;
            assert!(total < 76.0, "{weights}: {total}");
            assert_eq!(bytes_of(&training, "converted weights"), 0.0, "GEMMs read them as they are");
        }
    }

    #[test]
    fn sums_are_in_f32_where_there_is_memory_and_in_the_format_of_the_recipe() {
        let weights = "train.weights=bfloat16_exact";
        let (sums, training) = decided(&[weights, "train.optimizer=adamw_8bit"]);
        assert!(sums.as_ref().unwrap().reason.ends_with("in float32 the run does not fit"), "{sums:?}");
        assert_eq!((sums.unwrap().value, training.gradients), (FloatType::Bf16, FloatType::Bf16));
        let (sums, _) = decided(&[weights, "train.recompute=full"]);
        assert_eq!(sums.as_ref().unwrap().value, FloatType::F32, "{sums:?}");
        let (sums, training) = decided(&[weights, "train.gradients=float32"]);
        assert_eq!((sums.unwrap().reason.as_str(), training.gradients), ("the recipe", FloatType::F32));
        assert!((bytes_of(&training, "gradients") - 29.92).abs() < 0.01);
        assert_eq!(decided(&[]).0, None);
    }

    #[test]
    fn what_cannot_be_computed_is_refused_with_what_can() {
        let example = Example::new(&[&FULL[..], &["train.weights=bfloat16_exact"]].concat(), 80, 512);
        let refused = |backend, compute| check(&example.config, &example.model.spec, backend, compute);
        for (backend, compute, help) in [
            (BackendKind::Wgpu, FloatType::F32, "train.weights = \"float32\""),
            (BackendKind::Cuda, FloatType::F32, "compute = \"bfloat16\" or \"fp8\""),
        ] {
            let message = refused(backend, compute).unwrap_err().to_string();
            assert!(message.contains("train.weights = \"bfloat16_exact\"") && message.contains(help), "{message}");
        }
        assert!(
            refused(BackendKind::Cuda, FloatType::Bf16).is_ok() && refused(BackendKind::Flex, FloatType::F32).is_ok()
        );
    }
}
