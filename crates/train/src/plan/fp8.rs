//! Whether the GEMMs of the layers multiply 8-bit floats.
//! Trade-off: "auto" knows the shapes that were measured, and takes the compute format for others.

use firebrick_hwprofile::spec::HardwareKind;
use firebrick_kernels::{BackendKind, GemmFormat, TrainingShape, fp8_refusal};

use crate::config::compute::Compute;
use crate::error::RunError;
use crate::plan::chosen::Chosen;
use crate::plan::fit::Case;

/// From which width of a model, and which width times tokens of a micro-batch, 8-bit floats were measured to be faster
/// (docs/roofline.md): 896 wide with 32,768 tokens 1.12 times, 2,048 wide with 4,096 tokens 1.21 times, with 512 tokens 0.95 times.
const MIN_WIDTH: usize = 896;
const MIN_VALUES: u64 = 2048 * 4096;

/// What the GEMMs of the layers multiply.
///
/// # Errors
/// [`RunError::NoFp8`] where the machine or the model does not allow the 8-bit floats that the recipe asks for.
pub(super) fn gemms(
    requested: Compute,
    case: &Case<'_>,
    training: &TrainingShape,
) -> Result<Chosen<GemmFormat>, RunError> {
    let how = "E4M3 with a scale per row, computed from the row; adapters, norms, attention, head and loss in bfloat16";
    match (requested, refusal(case, training)) {
        (Compute::Plain(_), _) => Ok(Chosen::new(GemmFormat::Compute, "in the format of activations")),
        (Compute::Fp8, Some(reason)) => Err(RunError::NoFp8 { reason }),
        (Compute::Fp8, None) => Ok(Chosen::new(GemmFormat::Fp8, format!("the recipe; {how}"))),
        (Compute::Auto, Some(reason)) => Ok(Chosen::new(GemmFormat::Compute, format!("auto: {reason}"))),
        (Compute::Auto, None) => Ok(match slower(case, training) {
            Some(reason) => Chosen::new(GemmFormat::Compute, format!("auto: {reason}")),
            None => Chosen::new(GemmFormat::Fp8, format!("auto: faster here (docs/roofline.md); {how}")),
        }),
    }
}

/// Why there are no GEMMs in 8-bit floats for a run; `None` if there are.
fn refusal(case: &Case<'_>, training: &TrainingShape) -> Option<String> {
    if case.backend != BackendKind::Cuda {
        return Some(format!("backend {} has no matrix multiplications in 8-bit floats", case.backend));
    }
    if training.lora.as_ref().is_some_and(|lora| lora.use_dora) {
        return Some("lora.use_dora scales the outputs of GEMMs in the compute format only".to_owned());
    }
    match case.hardware() {
        None | Some(HardwareKind::Hopper) => fp8_refusal(case.spec),
        Some(other) => Some(format!(
            "cuBLASLt multiplies 8-bit rows with a scale each on compute capability 9.0 (H100, H200) only, and this card is of the kind \
             {other:?}"
        )),
    }
}

/// Why 8-bit floats would not be faster than bfloat16, by what was measured; `None` if they would.
fn slower(case: &Case<'_>, training: &TrainingShape) -> Option<String> {
    let (width, tokens) = (case.spec.hidden_size, training.tokens());
    if training.divided.weights_elsewhere > 0 {
        return Some("what 8-bit floats derive from weights is not kept of weights that other ranks have".to_owned());
    }
    if case.hardware().is_none() {
        return Some("the card does not say its compute capability".to_owned());
    }
    if width < MIN_WIDTH {
        return Some(format!(
            "for models less than {MIN_WIDTH} wide 8-bit floats were not measured, this one has {width}"
        ));
    }
    let least = MIN_VALUES.div_ceil(width as u64);
    (tokens < least).then(|| {
        format!("{tokens} tokens per micro-batch are too few for 8-bit floats to be faster, {least} are enough")
    })
}

#[cfg(test)]
mod tests {
    use firebrick_arch::LoraConfig;
    use firebrick_precision::Format;

    use super::*;
    use crate::plan::fit::tests::Example;
    use crate::plan::shapes;

    fn shape(example: &Example) -> TrainingShape {
        shapes::training(&example.config, Format::Bf16, BackendKind::Cuda, &example.data, &example.trained())
    }

    #[test]
    fn what_has_no_8_bit_floats_is_refused_with_the_reason() {
        let example = Example::new(&["compute=fp8"], 80, 512);
        let training = shape(&example);
        let gemms = |case: &Case<'_>| gemms(Compute::Fp8, case, &training);
        let refusal = |backend| gemms(&Case { backend, ..example.case() }).unwrap_err().to_string();
        assert_eq!(
            refusal(BackendKind::Flex),
            "compute = \"fp8\": backend flex has no matrix multiplications in 8-bit floats. Write compute = \"bfloat16\""
        );
        let dora =
            TrainingShape { lora: Some(LoraConfig { use_dora: true, ..LoraConfig::default() }), ..shape(&example) };
        let message = super::gemms(Compute::Fp8, &example.case(), &dora).unwrap_err().to_string();
        assert!(message.contains("compute = \"fp8\": lora.use_dora"), "{message}");
        let mut odd = example.case().spec.clone();
        odd.vocab_size += 1;
        assert_eq!(gemms(&Case { spec: &odd, ..example.case() }).unwrap().value, GemmFormat::Fp8);
        odd.hidden_size = 4104;
        let message = gemms(&Case { spec: &odd, ..example.case() }).unwrap_err().to_string();
        assert!(message.contains("has a width of 4104, and 8-bit floats need multiples of 16"), "{message}");
    }

    #[test]
    fn auto_takes_8_bit_floats_where_they_are_faster_and_says_why_not_elsewhere() {
        let chosen = |machine: &str, changes: &[&str]| {
            let example = Example::on(machine, &[&["compute=auto"], changes].concat());
            gemms(Compute::Auto, &example.case(), &shape(&example)).unwrap()
        };
        for machine in ["h100", "h200"] {
            let found = chosen(machine, &["train.micro_batch_size=1"]);
            assert_eq!(found.value, GemmFormat::Fp8, "{machine}: {}", found.reason);
        }
        for (machine, why) in [("a100", "Ampere"), ("l4", "Ada"), ("b200", "Blackwell"), ("rtx5090", "BlackwellRtx")] {
            let found = chosen(machine, &[]);
            assert_eq!(found.value, GemmFormat::Compute, "{machine}");
            assert!(found.reason.starts_with("auto: ") && found.reason.contains(why), "{machine}: {}", found.reason);
        }
        let mut example = Example::on("h100", &["compute=auto", "train.micro_batch_size=1"]);
        example.data.row_len = 512;
        let short = gemms(Compute::Auto, &example.case(), &shape(&example)).unwrap();
        assert!(short.value == GemmFormat::Compute && short.reason.contains("512 tokens"), "{}", short.reason);
    }
}
