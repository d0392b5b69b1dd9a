//! A model's preferred sampling: the sampling keys of `generation_config.json`, read as transformers reads them.
//!
//! A file without `do_sample` is greedy. With it, absent keys have transformers' defaults, because transformers does not write values that equal
//! them.
//! Trade-off: beams and uncommon filters are only named, not applied; `max_new_tokens` is not read, since it is a limit of a server, not a property
//! of a model's answers.

use std::path::Path;

use firebrick_arch::GENERATION_CONFIG_FILE;
use firebrick_arch::json::{JsonObject, parse_object, read_text};

use super::Sampling;
use crate::error::ModelError;

/// The `top_k` of transformers where sampling is on and the file names none.
const DEFAULT_TOP_K: usize = 50;

/// Keys that change the choice of tokens and are not read, with their neutral values.
const NOT_READ: [(&str, f64); 7] = [
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("num_beams", 1.0),
    ("penalty_alpha", 0.0),
];

/// The sampling settings in a folder's `generation_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderSampling {
    /// The settings.
    pub sampling: Sampling,
    /// Keys of the file that would change them and are not applied.
    pub not_applied: Vec<&'static str>,
}

impl FolderSampling {
    /// Reads the file of a model or adapter folder; `None` if there is none.
    ///
    /// # Errors
    /// A file that cannot be read or is no JSON object; a key of another type, or a value that no sampling can have.
    pub fn read(folder: &Path) -> Result<Option<Self>, ModelError> {
        let path = folder.join(GENERATION_CONFIG_FILE);
        if !path.is_file() {
            return Ok(None);
        }
        let map = parse_object(&read_text(&path)?, &path)?;
        let json = JsonObject::new(&path, &map);
        let mut sampling = if json.bool("do_sample")? == Some(true) { sampling(&json)? } else { Sampling::GREEDY };
        sampling.repetition_penalty = json.f64("repetition_penalty")?.unwrap_or(1.0) as f32;
        if let Some((key, got, expected)) = sampling.problem() {
            return Err(json.bad(key, got, expected).into());
        }
        let mut not_applied = Vec::new();
        for (key, neutral) in NOT_READ {
            if json.f64(key)?.is_some_and(|value| value != neutral) {
                not_applied.push(key);
            }
        }
        Ok(Some(Self { sampling, not_applied }))
    }
}

fn sampling(json: &JsonObject<'_>) -> Result<Sampling, ModelError> {
    let number = |key| Ok::<_, ModelError>(json.f64(key)?.unwrap_or(1.0) as f32);
    let (temperature, top_p) = (number("temperature")?, number("top_p")?);
    if !(temperature.is_finite() && temperature > 0.0) {
        return Err(json.bad("temperature", temperature, "a number above 0, or \"do_sample\": false").into());
    }
    let min_p = json.f64("min_p")?.unwrap_or(0.0) as f32;
    let top_k = json.usize("top_k")?.unwrap_or(DEFAULT_TOP_K);
    Ok(Sampling { temperature, top_p, top_k, min_p, ..Sampling::GREEDY })
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use tempfile::tempdir;

    use super::*;

    fn of(text: &str) -> Result<Option<Sampling>, ModelError> {
        Ok(read(text)?.map(|found| found.sampling))
    }

    fn read(text: &str) -> Result<Option<FolderSampling>, ModelError> {
        let folder = tempdir().unwrap();
        write(folder.path().join(GENERATION_CONFIG_FILE), text).unwrap();
        FolderSampling::read(folder.path())
    }

    #[test]
    fn sampling_defaults_are_those_of_transformers() {
        let sampling = |temperature, top_p, top_k| Some(Sampling { temperature, top_p, top_k, ..Sampling::GREEDY });
        let llama = r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}"#;
        assert_eq!(of(llama).unwrap(), sampling(0.6, 0.9, 50));
        let qwen = r#"{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}"#;
        let penalized = sampling(0.7, 0.8, 20).map(|sampling| Sampling { repetition_penalty: 1.05, ..sampling });
        assert_eq!(of(qwen).unwrap(), penalized);
        let min_p = sampling(1.0, 1.0, 50).map(|sampling| Sampling { min_p: 0.1, ..sampling });
        assert_eq!(of(r#"{"do_sample": true, "min_p": 0.1}"#).unwrap(), min_p);
        assert_eq!(of(r#"{"do_sample": true}"#).unwrap(), sampling(1.0, 1.0, 50));
        assert_eq!(of(r#"{"do_sample": true, "top_k": 0, "top_p": null}"#).unwrap(), sampling(1.0, 1.0, 0));
    }

    #[test]
    fn a_folder_that_does_not_sample_is_greedy() {
        for text in ["{}", r#"{"temperature": 0.6, "top_p": 0.9}"#, r#"{"do_sample": false, "top_k": 5}"#] {
            assert_eq!(of(text).unwrap(), Some(Sampling::GREEDY), "{text}");
        }
        let penalized = Sampling { repetition_penalty: 1.1, ..Sampling::GREEDY };
        assert_eq!(of(r#"{"repetition_penalty": 1.1}"#).unwrap(), Some(penalized), "as in transformers");
        assert_eq!(FolderSampling::read(tempdir().unwrap().path()).unwrap(), None);
    }

    #[test]
    fn keys_that_are_not_applied_are_named() {
        let text = r#"{"do_sample": true, "typical_p": 0.9, "num_beams": 1, "no_repeat_ngram_size": 3}"#;
        assert_eq!(read(text).unwrap().unwrap().not_applied, ["no_repeat_ngram_size", "typical_p"]);
    }

    #[test]
    fn impossible_values_are_refused_by_file_and_key() {
        for (key, named) in [
            (r#""temperature": 0"#, "temperature"),
            (r#""temperature": -1"#, "temperature"),
            (r#""top_p": 0"#, "top_p"),
            (r#""top_p": 2"#, "top_p"),
            (r#""top_k": -1"#, "top_k"),
            (r#""min_p": 2"#, "min_p"),
        ] {
            let message = of(&format!("{{\"do_sample\": true, {key}}}")).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("generation_config.json"), "{key}: {message}");
        }
    }
}
