//! Decides whether the GEMMs of the layers multiply 8-bit floats, and whether the algorithms of large GEMMs are measured before use.
//!
//! Trade-off: on Hopper "auto" takes 8-bit floats only for shapes that were measured to be faster; on other cards it goes by their measured peaks. A
//! run that is planned to be short takes the algorithms that the library proposes first, even if it is repeated often; `train.tune_gemms` measures
//! once for all of them.

use firebrick_hwprofile::spec::{HardwareKind, MathFormat};
use firebrick_kernels::{BackendKind, GemmAlgorithms, GemmFormat, fp8_refusal};
use firebrick_precision::FloatType;

use crate::config::TrainConfig;
use crate::config::compute::Compute;
use crate::error::RunError;
use crate::plan::Chosen;
use crate::plan::fit::Case;
use crate::plan::forecast::Forecast;
use crate::plan::wish::Wish;

/// Minimum width of a model, and minimum width times tokens of a micro-batch, from which 8-bit floats were measured to be faster (docs/roofline.md):
/// 896 wide with 32,768 tokens 1.12 times, 2,048 wide with 4,096 tokens 1.21 times, with 512 tokens 0.95 times.
const MIN_WIDTH: usize = 896;
const MIN_VALUES: u64 = 2048 * 4096;
/// "auto" takes GEMMs in 8-bit floats if they are this many times as fast as in bfloat16. On Hopper they are 1.9 times as fast, and a whole step of
/// the smallest measured shape is 1.12 times as fast: quantization takes time too, which a peak leaves out. So do the passes over results on Ada.
const MIN_RATIO: f64 = 1.75;
/// A run of at least this many seconds earns back the time of measuring.
const LONG_SECONDS: f64 = 600.0;

/// Returns the format that the GEMMs of the layers multiply, for micro-batches of so many tokens.
///
/// # Errors
/// The machine or the model does not allow the 8-bit floats that the recipe asks for.
pub(super) fn gemms(
    wish: &Wish<'_>,
    case: &Case<'_>,
    tokens: u64,
    borrows_weights: bool,
) -> Result<Chosen<GemmFormat>, RunError> {
    if let Some(half) = half(wish, case) {
        return Ok(half);
    }
    let scale = match case.hardware() {
        Some(HardwareKind::Ada) => "with a scale per row, applied to what the GEMM gives,",
        Some(HardwareKind::Blackwell | HardwareKind::BlackwellRtx) => "in blocks (MXFP8) with one power of two per row",
        _ => "with a scale per row",
    };
    let how = format!("E4M3 {scale} computed from the row; adapters, norms, attention, head and loss in bfloat16");
    match (wish.recipe.compute(), refusal(wish, case)) {
        (Compute::Plain(_), _) => Ok(Chosen::new(GemmFormat::Compute, "in the format of activations")),
        (Compute::Fp8, Some(reason)) => {
            let has_bf16 = case.hardware().is_none_or(HardwareKind::has_bf16);
            let instead = if has_bf16 { FloatType::Bf16 } else { FloatType::F16 };
            Err(RunError::Refused(format!("compute = \"fp8\": {reason}. Write compute = \"{instead}\"")))
        }
        (Compute::Fp8, None) => Ok(Chosen::new(GemmFormat::Fp8, format!("the recipe; {how}"))),
        (Compute::Auto, Some(reason)) => Ok(Chosen::new(GemmFormat::Compute, format!("auto: {reason}"))),
        (Compute::Auto, None) => Ok(match slower(case, tokens, borrows_weights) {
            Some(reason) => Chosen::new(GemmFormat::Compute, format!("auto: {reason}")),
            None => Chosen::new(GemmFormat::Fp8, format!("auto: faster here (docs/roofline.md); {how}")),
        }),
    }
}

/// Returns how layers multiply on wgpu: by matrix units, unless the recipe names float32 or the device has none. `None` elsewhere.
pub(super) fn half(wish: &Wish<'_>, case: &Case<'_>) -> Option<Chosen<GemmFormat>> {
    if case.backend != BackendKind::Wgpu || wish.recipe.compute() == Compute::Fp8 {
        return None;
    }
    if wish.recipe.compute() == Compute::Plain(FloatType::F32) {
        return Some(Chosen::new(GemmFormat::Compute, "in the format of activations"));
    }
    // What a machine that is only named offers is not known; none of them has run this.
    let refusal = match case.profile.named {
        Some(_) => Some("only the machine itself can say whether it has matrix units"),
        None => case.backend.half_gemms_refusal(),
    };
    Some(match refusal {
        Some(reason) => Chosen::new(GemmFormat::Compute, format!("auto: in f32, because {reason}")),
        None => {
            let attention = match case.backend.half_attention_refusal() {
                None => "attention as well".to_owned(),
                Some(reason) => format!("attention in f32, because {reason}"),
            };
            let why = format!(
                "auto: by matrix units of 16 x 16, {attention}; each operand divided by a power of two, so outliers do not overflow; activations, \
                 norms and sums in f32. 8-bit formats, experts and DoRA multiply in f32, and so does compute = \"float32\""
            );
            Chosen::new(GemmFormat::F16, why)
        }
    })
}

/// Returns why a run cannot have GEMMs in 8-bit floats; `None` if it can.
fn refusal(wish: &Wish<'_>, case: &Case<'_>) -> Option<String> {
    if case.backend != BackendKind::Cuda {
        return Some(format!("backend {} has no matrix multiplications in 8-bit floats", case.backend));
    }
    if wish.lora.as_ref().is_some_and(|lora| lora.use_dora) {
        return Some("lora.use_dora scales the outputs of GEMMs in the compute format only".to_owned());
    }
    match case.hardware().filter(|kind| !kind.has_fp8()) {
        None => fp8_refusal(case.spec),
        Some(kind) => {
            Some(format!("cards of the kind {kind} have no 8-bit floats, which begin with compute capability 8.9"))
        }
    }
}

/// Returns why 8-bit floats would not be faster than bfloat16, going by measurements; `None` if they would.
fn slower(case: &Case<'_>, tokens: u64, borrows_weights: bool) -> Option<String> {
    let width = case.spec.hidden_size;
    if borrows_weights {
        return Some("what 8-bit floats derive from weights is not kept of weights that other ranks have".to_owned());
    }
    if case.spec.is_mixture() {
        return Some(
            "experts gained 6 to 8 % in the one shape that was measured; compute = \"fp8\" takes them".to_owned(),
        );
    }
    match case.hardware() {
        None => return Some("the card does not say its compute capability".to_owned()),
        Some(HardwareKind::Hopper) => (),
        Some(kind) => {
            if let Some(reason) = slower_peak(case, kind) {
                return Some(reason);
            }
        }
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

/// Returns why the card's own peaks do not speak for 8-bit floats; `None` if they do.
fn slower_peak(case: &Case<'_>, kind: HardwareKind) -> Option<String> {
    let peaks = case.card().and_then(|card| case.profile.measured_peaks("cuda", &card.name));
    let ratio = peaks.and_then(|peaks| Some(peaks.rate(MathFormat::Fp8)? / peaks.rate(MathFormat::Bf16)?));
    match ratio {
        None => Some(format!(
            "8-bit floats were not measured on this card ({kind}): `firebrick profile --measure` does, and compute = \"fp8\" takes them"
        )),
        Some(ratio) if ratio < MIN_RATIO => Some(format!(
            "GEMMs in 8-bit floats were measured to be {ratio:.2} times as fast here, {MIN_RATIO} are enough"
        )),
        Some(_) => None,
    }
}

/// Returns how the algorithms of large GEMMs are chosen; `None` if there is no choice.
pub(super) fn algorithms(
    backend: BackendKind,
    train: &TrainConfig,
    forecast: Option<&Forecast>,
) -> Option<Chosen<GemmAlgorithms>> {
    if backend != BackendKind::Cuda {
        return None;
    }
    let measured =
        "the first step tries what the library proposes, for 5 to 15 s; choices are kept on disk for this card";
    if train.deterministic {
        let why = "train.deterministic: the first that the library proposes, whatever was measured before";
        return Some(Chosen::new(GemmAlgorithms::Library, why));
    }
    Some(match train.tune_gemms {
        Some(true) => Chosen::new(GemmAlgorithms::Measured, format!("train.tune_gemms: {measured}")),
        Some(false) => Chosen::new(GemmAlgorithms::Library, "train.tune_gemms: the first that the library proposes"),
        None if forecast.is_some_and(|forecast| forecast.run_seconds.value.lower >= LONG_SECONDS) => {
            Chosen::new(GemmAlgorithms::Measured, format!("auto, for a run of ten minutes or more: {measured}"))
        }
        None => Chosen::new(
            GemmAlgorithms::Kept,
            "auto, for a short run: what was measured on this card before, else the first that the library proposes",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;

    fn decided(example: &Example) -> Result<Chosen<GemmFormat>, RunError> {
        let tokens = example.config.train.micro_batch_size.given().unwrap() * example.data.row_len;
        gemms(&example.wish(), &example.case(), tokens as u64, false)
    }

    #[test]
    fn what_has_no_8_bit_floats_is_refused_with_the_reason() {
        let example = Example::new(&["compute=fp8"], 80, 512);
        let gemms = |case: &Case<'_>| gemms(&example.wish(), case, 8 * 4096, false);
        let refusal = |backend| gemms(&Case { backend, ..example.case() }).unwrap_err().to_string();
        assert_eq!(
            refusal(BackendKind::Flex),
            "compute = \"fp8\": backend flex has no matrix multiplications in 8-bit floats. Write compute = \"bfloat16\""
        );
        let message = decided(&Example::new(&["compute=fp8", "lora.use_dora=true"], 80, 512)).unwrap_err().to_string();
        assert!(message.contains("compute = \"fp8\": lora.use_dora"), "{message}");
        let mut odd = example.case().spec.clone();
        odd.vocab_size += 1;
        assert_eq!(gemms(&Case { spec: &odd, ..example.case() }).unwrap().value, GemmFormat::Fp8);
        odd.hidden_size = 4104;
        let message = gemms(&Case { spec: &odd, ..example.case() }).unwrap_err().to_string();
        assert!(message.contains("has a width of 4104, and 8-bit floats need multiples of 16"), "{message}");
    }

    #[test]
    fn cards_from_compute_capability_8_9_on_have_8_bit_floats_and_others_are_refused_by_their_kind() {
        let gemms = |machine: &str| {
            let example = Example::on(machine, &["compute=fp8"]);
            decided(&example)
        };
        for (machine, scales) in [
            ("h100", "E4M3 with a scale per row computed"),
            ("l40s", "with a scale per row, applied to what the GEMM gives,"),
            ("b200", "in blocks (MXFP8) with one power of two per row"),
            ("rtx5090", "in blocks (MXFP8)"),
        ] {
            let found = gemms(machine).unwrap();
            assert!(found.value == GemmFormat::Fp8 && found.reason.contains(scales), "{machine}: {}", found.reason);
        }
        let message = gemms("a100").unwrap_err().to_string();
        assert!(message.contains("Ampere") && message.contains("compute capability 8.9"), "{message}");
        assert!(message.ends_with("Write compute = \"bfloat16\""), "{message}");
        let message = gemms("t4").unwrap_err().to_string();
        assert!(message.contains("Turing") && message.ends_with("Write compute = \"float16\""), "{message}");
    }

    #[test]
    fn auto_on_other_cards_than_hopper_s_goes_by_their_measured_peaks() {
        let mut example = Example::on("b200", &["compute=auto"]);
        let mut chosen = |tflops: [f64; 2]| {
            example.measure(&[(MathFormat::Bf16, tflops[0]), (MathFormat::Fp8, tflops[1])], 6.0);
            decided(&example).unwrap()
        };
        assert_eq!(chosen([1500.0, 2800.0]).value, GemmFormat::Fp8);
        let slow = chosen([1500.0, 1800.0]);
        assert!(slow.value == GemmFormat::Compute && slow.reason.contains("1.20 times as fast"), "{}", slow.reason);
    }

    #[test]
    fn auto_takes_8_bit_floats_where_they_are_faster_and_says_why_not_elsewhere() {
        let chosen = |machine: &str, changes: &[&str]| {
            let example = Example::on(machine, &[&["compute=auto"], changes].concat());
            decided(&example).unwrap()
        };
        for machine in ["h100", "h200"] {
            let found = chosen(machine, &["train.micro_batch_size=1"]);
            assert_eq!(found.value, GemmFormat::Fp8, "{machine}: {}", found.reason);
        }
        for (machine, why) in [("a100", "Ampere"), ("l4", "Ada"), ("b200", "Blackwell"), ("rtx5090", "Blackwell RTX")] {
            let found = chosen(machine, &[]);
            assert_eq!(found.value, GemmFormat::Compute, "{machine}");
            assert!(found.reason.starts_with("auto: ") && found.reason.contains(why), "{machine}: {}", found.reason);
        }
        let mut example = Example::on("h100", &["compute=auto", "train.micro_batch_size=1"]);
        example.data.row_len = 512;
        let short = decided(&example).unwrap();
        assert!(short.value == GemmFormat::Compute && short.reason.contains("512 tokens"), "{}", short.reason);
    }

    #[test]
    fn only_cuda_has_a_choice_and_the_recipe_makes_it() {
        let of = |tune_gemms, deterministic| TrainConfig { tune_gemms, deterministic, ..TrainConfig::default() };
        assert_eq!(algorithms(BackendKind::Flex, &of(Some(true), false), None), None);
        let decided = |train: &TrainConfig| algorithms(BackendKind::Cuda, train, None).map(|chosen| chosen.value);
        let chosen = |tune| decided(&of(tune, false));
        assert_eq!(chosen(Some(true)), Some(GemmAlgorithms::Measured));
        assert_eq!(chosen(Some(false)), Some(GemmAlgorithms::Library));
        assert_eq!(chosen(None), Some(GemmAlgorithms::Kept), "how long the run takes is not known");
        assert_eq!(decided(&of(None, true)), Some(GemmAlgorithms::Library), "another run may measure in between");
    }
}
