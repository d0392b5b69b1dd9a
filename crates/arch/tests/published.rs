//! Published models are described by their config.json alone: what `bench --random-base` builds has as many parameters as the checkpoint.
//!
//! `published/*.json` have the keys of the config.json at the address of their row that decide shapes and arithmetic; others are left out.
//! Trade-off: a count sees every shape, and no constant such as a rope theta; those are compared with transformers on tiny models.

use std::fs::read_to_string;
use std::path::Path;

use firebrick_arch::ModelConfig;

/// Name of the file, repository on huggingface.co, and parameters of the language model.
type Published = (&'static str, &'static str, u64);

const PUBLISHED: [Published; 12] = [
    // Of vision checkpoints: the parameters of tower and projector, which are not loaded, are subtracted from those of the checkpoint.
    ("gemma-3-4b", "google/gemma-3-4b-it", 4_300_079_472 - (SIGLIP + 1152 * (2560 + 1))),
    ("gemma-3-12b", "google/gemma-3-12b-it", 12_187_325_040 - (SIGLIP + 1152 * (3840 + 1))),
    ("gemma-3-27b", "google/gemma-3-27b-it", 27_432_406_640 - (SIGLIP + 1152 * (5376 + 1))),
    (
        "mistral-small-3.1-24b",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        24_011_361_280 - (PIXTRAL + 1024 * 5120 + 5120 * 5120),
    ),
    ("ministral-3-8b", "mistralai/Ministral-3-8B-Instruct-2512", 8_918_026_240 - (PIXTRAL + 1024 * 4096 + 4096 * 4096)),
    ("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656 - 676_550_144),
    ("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696 - 576_388_336),
    // Nothing but a language model.
    ("gpt-oss-20b", "openai/gpt-oss-20b", 20_914_757_184),
    ("olmo-3-7b", "allenai/Olmo-3-1025-7B", 7_298_011_136),
    ("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", 8_170_864_640),
    ("gemma-7b", "google/gemma-7b", 8_537_680_896),
    ("glm-4-9b-0414", "zai-org/GLM-4-9B-0414", 9_400_279_040),
];
/// Parameters of SigLIP with patches of 14 in images of 896.
const SIGLIP: u64 = 416_866_032;
/// Parameters of Pixtral's tower, of the norm after it, and of the matrix that merges 2 x 2 patches.
const PIXTRAL: u64 = 403_305_472 + 1024 + 4096 * 1024;

#[test]
fn language_models_have_their_published_parameter_counts() {
    for (name, repository, expected) in PUBLISHED {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/published/{name}.json"));
        let config = ModelConfig::parse(&read_to_string(&path).unwrap(), &path);
        let config =
            config.unwrap_or_else(|error| panic!("https://huggingface.co/{repository}/blob/main/config.json: {error}"));
        assert_eq!(config.spec.parameters(), expected, "{repository}");
    }
}
