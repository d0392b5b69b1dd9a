//! Chooses how answers are sampled: as the user typed, else as the folder's `generation_config.json` says, else greedily.
//!
//! A run and `generate` read the same keys and start with the same seed, and the file travels with the result, so both write the same text.
//! Trade-off: the answers of an evaluation are greedy whatever the folder says, since a measure must not depend on chance.

use std::fmt;
use std::path::Path;

use firebrick_model::{FolderSampling, Sampler, Sampling};

use crate::error::RunError;

/// The seed of samples if none was typed.
pub const SEED: u64 = 0;

/// The chosen sampling, its source, and the settings that were left out.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenSampling {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Seed of the random stream.
    pub seed: u64,
    /// Whether the folder's file sets anything that was not overridden.
    from_folder: bool,
    not_applied: Vec<&'static str>,
}

/// Settings that a user may type to override those of the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TypedSampling {
    /// Overrides `Sampling::temperature`.
    pub temperature: Option<f32>,
    /// Overrides `Sampling::top_p`.
    pub top_p: Option<f32>,
    /// Overrides `Sampling::top_k`.
    pub top_k: Option<usize>,
    /// Overrides `Sampling::min_p`.
    pub min_p: Option<f32>,
    /// Overrides `Sampling::repetition_penalty`.
    pub repetition_penalty: Option<f32>,
    /// Default [`SEED`].
    pub seed: Option<u64>,
}

impl ChosenSampling {
    /// Resolves the sampling of a result: from the adapter's folder if it has the file, otherwise from the model's; typed keys take precedence.
    ///
    /// # Errors
    /// A file that cannot be read or has invalid values; typed values that are invalid, or that greedy decoding ignores.
    pub fn resolve(model: &Path, adapter: Option<&Path>, typed: TypedSampling) -> Result<Self, RunError> {
        let of_adapter = adapter.map(FolderSampling::read).transpose()?.flatten();
        let found = match of_adapter {
            Some(found) => Some(found),
            None => FolderSampling::read(model)?,
        };
        let FolderSampling { sampling, not_applied } =
            found.unwrap_or(FolderSampling { sampling: Sampling::GREEDY, not_applied: Vec::new() });
        let TypedSampling { temperature, top_p, top_k, min_p, repetition_penalty, seed } = typed;
        let chosen = Sampling {
            temperature: temperature.unwrap_or(sampling.temperature),
            top_p: top_p.unwrap_or(sampling.top_p),
            top_k: top_k.unwrap_or(sampling.top_k),
            min_p: min_p.unwrap_or(sampling.min_p),
            repetition_penalty: repetition_penalty.unwrap_or(sampling.repetition_penalty),
        };
        chosen.check()?;
        let ignored = [("top-p", top_p.is_some()), ("top-k", top_k.is_some()), ("min-p", min_p.is_some())];
        if let Some((key, _)) = ignored.into_iter().find(|(_, is_typed)| *is_typed && chosen.temperature == 0.0) {
            return Err(RunError::Refused(format!(
                "--{key} changes nothing: answers are greedy, which takes the most probable token. Type a --temperature above 0 too, such as \
                 --temperature 1"
            )));
        }
        let of_folder = if chosen.temperature == 0.0 { Sampling::GREEDY } else { sampling };
        let penalizes = sampling.repetition_penalty != 1.0 && repetition_penalty.is_none();
        let from_folder = of_folder != Sampling::GREEDY || penalizes;
        Ok(Self { sampling: chosen, seed: seed.unwrap_or(SEED), from_folder, not_applied })
    }

    /// Creates a sampler at the beginning of its random stream.
    pub fn sampler(&self) -> Sampler {
        self.sampler_at(0)
    }

    /// Creates the sampler for a turn of a conversation, counted from 0: each turn has a separate random stream.
    pub fn sampler_at(&self, turn: u64) -> Sampler {
        Sampler::new(self.sampling, self.seed.wrapping_add(turn)).expect("the values were checked")
    }

    /// Returns a sentence about which settings of the folder are applied and which are not; `None` if it sets nothing.
    pub fn note(&self) -> Option<String> {
        let applied = if self.from_folder { ", as generation_config.json says" } else { "" };
        let not_applied = match self.not_applied.as_slice() {
            [] => String::new(),
            keys => format!("; {} of generation_config.json is not applied", keys.join(", ")),
        };
        (self.from_folder || !not_applied.is_empty()).then(|| format!("{self}{applied}{not_applied}"))
    }
}

impl fmt::Display for ChosenSampling {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sampling { temperature, top_p, top_k, min_p, repetition_penalty } = self.sampling;
        let penalty = match repetition_penalty {
            1.0 => String::new(),
            penalty => format!(", repetition_penalty {penalty}"),
        };
        if temperature == 0.0 {
            return write!(formatter, "answers are greedy{penalty}");
        }
        let top_k = if top_k == 0 { "all tokens".to_owned() } else { format!("top_k {top_k}") };
        let min_p = if min_p == 0.0 { String::new() } else { format!(", min_p {min_p}") };
        write!(
            formatter,
            "answers are sampled with temperature {temperature}, top_p {top_p}, {top_k}{min_p}{penalty}, seed {}",
            self.seed
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use tempfile::{TempDir, tempdir};

    use super::*;

    fn folder(text: Option<&str>) -> TempDir {
        let folder = tempdir().unwrap();
        if let Some(text) = text {
            write(folder.path().join("generation_config.json"), text).unwrap();
        }
        folder
    }

    const SAMPLED: &str = r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "typical_p": 0.1}"#;

    #[test]
    fn typed_keys_take_precedence_then_the_adapter_then_the_model() {
        let (model, other) = (folder(Some(SAMPLED)), folder(Some(r#"{"do_sample": true, "top_k": 3}"#)));
        let of = |adapter: Option<&TempDir>, typed| {
            ChosenSampling::resolve(model.path(), adapter.map(TempDir::path), typed).unwrap().sampling
        };
        let sampling = |temperature, top_p, top_k| Sampling { temperature, top_p, top_k, ..Sampling::GREEDY };
        let none = TypedSampling::default();
        assert_eq!(of(None, none), sampling(0.6, 0.9, 20));
        assert_eq!(of(Some(&other), none), sampling(1.0, 1.0, 3));
        assert_eq!(of(Some(&folder(None)), none), sampling(0.6, 0.9, 20), "an adapter of PEFT has no such file");
        assert_eq!(of(Some(&folder(Some("{}"))), none), Sampling::GREEDY);
        assert_eq!(of(None, TypedSampling { top_k: Some(5), ..none }), sampling(0.6, 0.9, 5));
        assert_eq!(of(None, TypedSampling { temperature: Some(0.0), ..none }).temperature, 0.0);
    }

    #[test]
    fn what_the_folder_decides_is_said_with_what_is_not_applied() {
        let note = |text, typed| {
            ChosenSampling::resolve(folder(Some(text)).path(), None, typed).unwrap().note().unwrap_or_default()
        };
        let said = note(SAMPLED, TypedSampling::default());
        for part in ["temperature 0.6, top_p 0.9, top_k 20, seed 0", "as generation_config.json says", "typical_p of"] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(note("{}", TypedSampling::default()), "");
        let greedy = TypedSampling { temperature: Some(0.0), ..TypedSampling::default() };
        assert_eq!(note(r#"{"do_sample": true}"#, greedy), "");
        let penalized = note(r#"{"min_p": 0.1, "repetition_penalty": 1.1}"#, TypedSampling::default());
        assert_eq!(penalized, "answers are greedy, repetition_penalty 1.1, as generation_config.json says");
    }

    #[test]
    fn a_typed_key_that_a_greedy_choice_ignores_is_refused() {
        let typed = TypedSampling { top_k: Some(5), ..TypedSampling::default() };
        let message = ChosenSampling::resolve(folder(None).path(), None, typed).unwrap_err().to_string();
        assert!(message.contains("--top-k") && message.contains("--temperature"), "{message}");
    }
}
