//! The identity of a preference loss's reference that is computed before training: the model before its first step.
//!
//! Its log-probabilities are stored under this identity, and a resumed run must have the same: after the first step the weights no longer show how
//! they started. The weights of the base are not part of it: wherever it is used, their hash is next to it.
//! Trade-off: it contains settings of the adapter only if the start depends on them, so runs that differ in others share what one of them computed.

use std::fs;
use std::path::Path;

use firebrick_arch::LoraConfig;
use firebrick_kernels::{BaseStorage, GemmFormat};
use firebrick_model::peft::{ADAPTER_WEIGHTS_FILE, read_adapter_config};
use firebrick_precision::FloatType;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::RunError;
use crate::plan::{Plan, PlannedReference};
use crate::state::identity::{Difference, adapter_identity, differences};

/// Everything except the base's weights that the model before the first step depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReferenceIdentity {
    /// Content of the adapter that the run starts from; `None`: it starts from none.
    #[serde(rename = "lora.init_from")]
    pub init_from: Option<String>,
    /// The adapter's settings, if it starts as a part of its base or trains whole modules.
    pub lora: Option<LoraConfig>,
    /// The seed, if the start depends on it.
    pub seed: Option<u64>,
    /// Tokens that were added to the tokenizer: their rows are in the head.
    #[serde(rename = "data.new_tokens")]
    pub new_tokens: Vec<String>,
    /// The longrope factors that max_seq_len selects.
    #[serde(rename = "the longrope factors")]
    pub long_rope: Option<String>,
    /// How the base weights are stored.
    pub base: BaseStorage,
    /// Format of activations and GEMMs.
    pub compute: FloatType,
    /// The format that the GEMMs of the layers multiply.
    pub gemms: GemmFormat,
}

impl ReferenceIdentity {
    /// Returns the reference of a planned run; `None` if it is not computed before training.
    ///
    /// # Errors
    /// The adapter that the run starts from cannot be read.
    pub fn of(plan: &Plan) -> Result<Option<Self>, RunError> {
        if plan.reference.as_ref().map(|reference| reference.value) != Some(PlannedReference::Precomputed) {
            return Ok(None);
        }
        let lora = plan.lora.value.as_ref();
        let divides_base = lora.is_some_and(|lora| !lora.init_lora_weights.is_uniform());
        let trains_modules =
            lora.is_some_and(|lora| lora.modules_to_save.as_ref().is_some_and(|names| !names.is_empty()));
        let new_tokens = plan.new_tokens.as_ref().map(|tokens| tokens.value.clone()).unwrap_or_default();
        Ok(Some(Self {
            init_from: plan.lora_init_from.value.as_deref().map(content).transpose()?,
            lora: lora.filter(|_| divides_base || trains_modules).map(adapter_identity),
            seed: (divides_base || !new_tokens.is_empty()).then_some(plan.seed.value),
            new_tokens,
            long_rope: plan.long_rope.as_ref().map(|factors| factors.value.to_owned()),
            base: plan.base.value,
            compute: plan.compute.value,
            gemms: plan.gemms.value,
        }))
    }

    /// Compares the reference of a checkpoint, if it was computed before training, with that of the run that continues from it.
    ///
    /// # Errors
    /// The first part that differs.
    pub fn check(saved: Option<&Self>, now: Option<&Self>) -> Result<(), RunError> {
        let Some(now) = now else { return Ok(()) };
        let change = match saved.map(|saved| differences(saved, now).into_iter().next()) {
            Some(None) => return Ok(()),
            Some(Some(Difference { key, saved, now })) => format!("has {key} = {saved}, now it is {now}"),
            None => "was not computed before training, now it is".to_owned(),
        };
        Err(RunError::Refused(format!(
            "the reference of the checkpoint's preference loss {change}: the reference is the model before the first step, and a \
             resumed run keeps it. Put back what the run started from, or start a new run under another name"
        )))
    }
}

/// Hashes the matrices of an adapter and the settings that its outputs depend on.
fn content(folder: &Path) -> Result<String, RunError> {
    let path = folder.join(ADAPTER_WEIGHTS_FILE);
    let matrices = fs::read(&path).map_err(|error| {
        RunError::Refused(format!(
            "the reference of this preference loss is the adapter that lora.init_from names, and `{}` cannot be read: \
             {error}. Put the adapter back: a resumed run needs it too",
            path.display()
        ))
    })?;
    let settings = serde_json::to_vec(&adapter_identity(&read_adapter_config(folder)?));
    let settings = settings.expect("settings of plain fields are expressible as JSON");
    Ok(format!("matrices {:016x}, settings {:016x}", xxh3_64(&matrices), xxh3_64(&settings)))
}

#[cfg(test)]
mod tests {
    use firebrick_model::peft::ADAPTER_CONFIG_FILE;
    use firebrick_precision::Format;

    use super::*;

    fn identity() -> ReferenceIdentity {
        ReferenceIdentity {
            init_from: Some("matrices 1, settings 2".to_owned()),
            lora: None,
            seed: None,
            new_tokens: Vec::new(),
            long_rope: None,
            base: BaseStorage::Frozen(Format::Float(FloatType::Bf16)),
            compute: FloatType::F32,
            gemms: GemmFormat::Compute,
        }
    }

    #[test]
    fn only_the_same_reference_continues() {
        let text = serde_json::to_string(&identity()).unwrap();
        let saved: ReferenceIdentity = serde_json::from_str(&text).unwrap();
        ReferenceIdentity::check(Some(&saved), Some(&identity())).unwrap();
        let long = ReferenceIdentity { long_rope: Some("long_factor".to_owned()), ..identity() };
        let message = ReferenceIdentity::check(Some(&saved), Some(&long)).unwrap_err().to_string();
        assert!(message.contains("the longrope factors = nothing, now it is long_factor"), "{message}");
        let other = ReferenceIdentity { init_from: None, ..identity() };
        let message = ReferenceIdentity::check(Some(&saved), Some(&other)).unwrap_err().to_string();
        assert!(message.contains("lora.init_from = matrices 1, settings 2, now it is nothing"), "{message}");
    }

    #[test]
    fn a_reference_that_is_newly_computed_before_training_is_refused() {
        let message = ReferenceIdentity::check(None, Some(&identity())).unwrap_err().to_string();
        assert!(message.contains("was not computed before training, now it is:"), "{message}");
        ReferenceIdentity::check(None, None).unwrap();
    }

    #[test]
    fn an_adapter_that_is_gone_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let message = content(folder.path()).unwrap_err().to_string();
        assert!(message.contains(ADAPTER_WEIGHTS_FILE) && message.contains("lora.init_from"), "{message}");
    }

    #[test]
    fn an_adapter_is_its_matrices_and_settings() {
        let folder = tempfile::tempdir().unwrap();
        let fixture = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama-lora"));
        for name in [ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE] {
            fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
        }
        let before = content(folder.path()).unwrap();
        let settings = folder.path().join(ADAPTER_CONFIG_FILE);
        let text = fs::read_to_string(&settings).unwrap();
        let edited = |from: &str, to: &str| {
            let edited = text.replace(from, to);
            assert_ne!(edited, text);
            fs::write(&settings, edited).unwrap();
            content(folder.path()).unwrap()
        };
        assert_eq!(edited("\"tiny-llama\"", "\"org/llama\""), before, "what it calls its base");
        assert_ne!(edited("\"lora_alpha\": 8", "\"lora_alpha\": 16"), before);
        fs::write(&settings, &text).unwrap();
        let matrices = folder.path().join(ADAPTER_WEIGHTS_FILE);
        let mut bytes = fs::read(&matrices).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&matrices, bytes).unwrap();
        assert_ne!(content(folder.path()).unwrap(), before);
    }
}
