//! Names of the files in a model folder or an adapter folder, as transformers and PEFT write them.

/// The model's settings: [`crate::ModelConfig`].
pub const CONFIG_FILE: &str = "config.json";
/// Settings of generation, which may name further end-of-text tokens.
pub const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// The weights of a model that is not split.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The map from tensors to shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The settings of an adapter: [`crate::LoraConfig`].
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// The matrices of an adapter.
pub const ADAPTER_WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// A tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Settings of the tokenizer; readers that do not know [`CHAT_TEMPLATE_FILE`] find the template here.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// Special tokens of older tokenizers.
pub const SPECIAL_TOKENS_FILE: &str = "special_tokens_map.json";
/// The files of a tokenizer besides its settings.
pub const TOKENIZER_FILES: [&str; 8] = [
    TOKENIZER_FILE,
    SPECIAL_TOKENS_FILE,
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
];
/// The settings of what turns images and sound into inputs.
pub const PREPROCESSOR_FILES: [&str; 3] =
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];
/// A chat template; it takes precedence over the key in [`TOKENIZER_CONFIG_FILE`].
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// An older file of chat templates.
pub const CHAT_TEMPLATE_JSON: &str = "chat_template.json";
/// A folder of further chat templates by name.
pub const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";
/// Our file with the settings of a chat besides its messages: template arguments and system prompt of the training, and the length that chose
/// longrope's factors.
pub const CHAT_SETTINGS_FILE: &str = "chat_settings.json";

/// Returns whether a file states the terms of a model. Most licenses require that they travel with copies and derivatives.
pub fn states_terms(name: &str) -> bool {
    let name = name.to_lowercase();
    ["licen", "notice", "copying", "use_policy", "acceptable_use"].iter().any(|start| name.starts_with(start))
}
