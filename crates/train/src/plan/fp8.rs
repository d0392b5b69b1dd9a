//! Whether the GEMMs of the layers multiply 8-bit floats, and how many weights stay on the device in that form.
//!
//! Kept weights of the backward come first: writing them transposed costs more than writing them as they are.
//! Trade-off: with "auto" the memory of a run depends on what is free; its numbers do not.

use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, GemmFormat, TrainingShape, fp8_refusal, fp8_weights_bytes};

use crate::config::compute::Compute;
use crate::config::{DeviceBudget, RunConfig};
use crate::error::RunError;
use crate::plan::chosen::Chosen;
use crate::plan::fit::Case;

/// The major compute capability on which cuBLASLt multiplies 8-bit rows that have a scale each.
const HOPPER: u32 = 9;

/// What the GEMMs of the layers multiply.
///
/// # Errors
/// [`RunError::NoFp8`] where the machine or the model does not allow the 8-bit floats that the recipe asks for.
pub(super) fn gemms(requested: Compute, case: &Case<'_>) -> Result<Chosen<GemmFormat>, RunError> {
    if requested.gemms() == GemmFormat::Compute {
        return Ok(Chosen::new(GemmFormat::Compute, "in the format of activations"));
    }
    let refused = |reason: String| Err(RunError::NoFp8 { reason });
    if case.backend != BackendKind::Cuda {
        return refused(format!("backend {} has no matrix multiplications in 8-bit floats", case.backend));
    }
    if let Some((major, minor)) = case.card().and_then(|card| card.compute_capability)
        && major != HOPPER
    {
        return refused(format!(
            "cuBLASLt multiplies 8-bit rows with a scale each on compute capability 9.0 (H100, H200) only, and this card has \
             {major}.{minor}"
        ));
    }
    if let Some(width) = fp8_refusal(case.spec) {
        return refused(width);
    }
    Ok(Chosen::new(
        GemmFormat::Fp8,
        "the recipe; E4M3 with a scale per row, computed from the row; adapters, norms, attention, head and loss in bfloat16",
    ))
}

/// Decides, and enters it into the shape; `None` where no weights are converted to 8 bits.
pub(super) fn kept_weights(case: &Case<'_>, config: &RunConfig, training: &mut TrainingShape) -> Option<Chosen<u64>> {
    let [forward, backward] = fp8_weights_bytes(case.spec, training);
    let all = forward + backward;
    if case.backend != BackendKind::Cuda || all == 0 {
        return None;
    }
    let (budget, why) = match config.train.fp8_weights_gib {
        DeviceBudget::Gib(gib) => ((gib * (1u64 << 30) as f64) as u64, "train.fp8_weights_gib"),
        DeviceBudget::Auto => (case.left(training), "auto: what fits"),
    };
    let of_backward = budget.min(backward);
    training.kept_bytes = [(budget - of_backward).min(forward), of_backward];
    let kept = training.kept_bytes.iter().sum();
    Some(Chosen::new(kept, format!("{why}, of {} that would be written again in every pass", human_bytes(all))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fit::tests::Example;
    use crate::plan::shapes;

    const GIB: f64 = (1_u64 << 30) as f64;

    /// GiB that stay for the forward and for the backward of an 8B, on a card of this size.
    fn kept(changes: &[&str], card_gib: u64) -> Option<[f64; 2]> {
        let fp8 = ["compute=fp8", "train.recompute=selective", "train.micro_batch_size=3"];
        let example = Example::new(&[&fp8, changes].concat(), card_gib, 512);
        let trained = example.trained();
        let mut training = shapes::training(&example.config, BackendKind::Cuda, &example.data, &trained);
        training.gemms = gemms(example.config.compute(), &example.case()).unwrap().value;
        let chosen = kept_weights(&example.case(), &example.config, &mut training)?;
        assert_eq!(chosen.value, training.kept_bytes.iter().sum::<u64>());
        Some(training.kept_bytes.map(|bytes| bytes as f64 / GIB))
    }

    #[test]
    fn all_weights_stay_where_there_is_room_and_those_of_the_backward_come_first() {
        let [forward, backward] = kept(&[], 80).unwrap();
        assert!((6.5..7.2).contains(&forward) && (6.5..7.2).contains(&backward), "{forward} {backward}");
        let [forward, backward] = kept(&[], 52).unwrap();
        assert!(forward == 0.0 && backward > 1.0 && backward < 6.0, "{forward} {backward}");
        assert_eq!(kept(&["train.fp8_weights_gib=0"], 80), Some([0.0; 2]));
        let [forward, backward] = kept(&["train.fp8_weights_gib=8"], 80).unwrap();
        assert!((forward + backward - 8.0).abs() < 1e-6 && backward > 6.5, "{forward} {backward}");
        assert_eq!(kept(&["compute=bf16"], 80), None);
    }

    #[test]
    fn what_has_no_8_bit_floats_is_refused_with_the_reason() {
        let example = Example::new(&["compute=fp8"], 80, 512);
        let refusal = |backend| gemms(Compute::Fp8, &Case { backend, ..example.case() }).unwrap_err().to_string();
        assert_eq!(
            refusal(BackendKind::Flex),
            "compute = \"fp8\": backend flex has no matrix multiplications in 8-bit floats. Write compute = \"bfloat16\""
        );
        let mut odd = example.case().spec.clone();
        odd.vocab_size += 1;
        assert_eq!(gemms(Compute::Fp8, &Case { spec: &odd, ..example.case() }).unwrap().value, GemmFormat::Fp8);
        odd.hidden_size = 4104;
        let message = gemms(Compute::Fp8, &Case { spec: &odd, ..example.case() }).unwrap_err().to_string();
        assert!(message.contains("has a width of 4104, and 8-bit floats need multiples of 16"), "{message}");
    }
}
