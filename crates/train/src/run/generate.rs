//! `generate`: text from a model folder, with or without an adapter.
//!
//! Trade-off: all prompts run as one batch, so their caches exist at the same time.

use std::path::{Path, PathBuf};

use firebrick_arch::{ModelConfig, generation_eos_token_ids};
use firebrick_data::{Chat, TemplateChoice, TemplateDefaults, Tokenizer};
use firebrick_kernels::{BaseStorage, GemmFormat, Kernels};
use firebrick_model::peft::read_adapter_config;
use firebrick_model::{BuildOptions, CHAT_TEMPLATE_FILE, Decoder, GenerateOptions, HfFolder, Sampler};
use firebrick_precision::Format;

use crate::error::RunError;
use crate::run::chat_settings;
use crate::run::device::dtype_of;

/// A model folder and how it is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Model folder.
    pub model: PathBuf,
    /// PEFT adapter folder.
    pub adapter: Option<PathBuf>,
    /// How the base is stored.
    pub storage: BaseStorage,
    /// Format of activations and GEMMs.
    pub compute: Format,
}

impl LoadOptions {
    /// Loads the model, with rotary tables for `max_positions` positions.
    ///
    /// # Errors
    /// A folder that cannot be read, or an adapter that does not fit the model.
    pub fn load<B: Kernels>(&self, max_positions: usize, device: &B::Device) -> Result<Decoder<B>, RunError> {
        let build = BuildOptions {
            storage: self.storage,
            lora: self.adapter.as_deref().map(read_adapter_config).transpose()?,
            seed: 0,
            compute_dtype: dtype_of(self.compute),
            gemms: GemmFormat::Compute,
            max_positions,
            sequence_tokens: max_positions,
        };
        let mut config = ModelConfig::read(&self.model)?;
        if let Some(adapter) = &self.adapter {
            config.add_eos_token_ids(generation_eos_token_ids(adapter)?);
        }
        let mut model = Decoder::load(&HfFolder::open(&self.model)?, config, &build, device, &mut |_| ())?;
        if let Some(adapter) = &self.adapter {
            model.load_adapter(adapter)?;
        }
        Ok(model)
    }

    /// What the chat template got in the training of the adapter, or of the model if there is none.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn chat_settings(&self) -> Result<TemplateDefaults, RunError> {
        chat_settings::read(self.adapter.as_deref().unwrap_or(&self.model))
    }

    /// The tokenizer of the adapter's folder, where it has one, otherwise the model's; with the adapter's chat template and settings in
    /// both cases.
    ///
    /// # Errors
    /// No tokenizer, one that cannot be read, or one with tokens that the model has no embedding for.
    pub fn tokenizer(&self) -> Result<Tokenizer, RunError> {
        let has = |file: &'static str| move |folder: &&Path| folder.join(file).is_file();
        let adapter = self.adapter.as_deref();
        let folder = adapter.filter(has("tokenizer.json")).unwrap_or(&self.model);
        let mut tokenizer = Tokenizer::from_folder(folder)?;
        if let Some(adapter) = adapter.filter(has(CHAT_TEMPLATE_FILE)).filter(|adapter| *adapter != folder) {
            tokenizer.choose_template(&TemplateChoice::File(adapter.join(CHAT_TEMPLATE_FILE)))?;
        }
        tokenizer.set_template_defaults(self.chat_settings()?);
        let (tokens, rows) = (tokenizer.vocab_size(), ModelConfig::read(&self.model)?.spec.vocab_size);
        if tokens > rows {
            return Err(RunError::VocabularyTooSmall { tokenizer: tokens, model: rows });
        }
        Ok(tokenizer)
    }
}

/// What to generate, and how.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The model.
    pub load: LoadOptions,
    /// One text per prompt.
    pub prompts: Vec<String>,
    /// Whether a prompt is a user's turn, rendered with the chat template, or plain text to continue.
    pub chat: bool,
    /// The system message of a chat, instead of the one of the training; empty: none.
    pub system_prompt: Option<String>,
    /// Maximum new tokens per prompt.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampler: Sampler,
}

impl GenerateRequest {
    /// What the chat template gets in addition to the prompt.
    ///
    /// # Errors
    /// As [`LoadOptions::chat_settings`].
    pub fn template_defaults(&self) -> Result<TemplateDefaults, RunError> {
        let mut defaults = self.load.chat_settings()?;
        if let Some(prompt) = &self.system_prompt {
            defaults.system_prompt = Some(prompt.clone()).filter(|prompt| !prompt.is_empty());
        }
        Ok(defaults)
    }
}

/// Loads the model and continues every prompt.
///
/// # Errors
/// A folder that cannot be read, a tokenizer without a chat template where one is needed, a prompt that is too long.
pub fn generate<B: Kernels>(request: &GenerateRequest, device: &B::Device) -> Result<Vec<String>, RunError> {
    let mut tokenizer = request.load.tokenizer()?;
    tokenizer.set_template_defaults(request.template_defaults()?);
    let prompts: Vec<Vec<u32>> =
        request.prompts.iter().map(|text| encode_prompt(&tokenizer, text, request.chat)).collect::<Result<_, _>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let model = request.load.load::<B>(longest + request.max_new_tokens, device)?;
    continue_prompts(&model, &tokenizer, &prompts, request.max_new_tokens, request.sampler.clone())
}

/// A prompt's token ids: a user's turn through the chat template, or plain text.
///
/// # Errors
/// The tokenizer has no chat template, or the template refuses the message.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str, chat: bool) -> Result<Vec<u32>, RunError> {
    if !chat {
        return Ok(tokenizer.encode(text, true)?);
    }
    let rendered = tokenizer.chat_template()?.render(&Chat::new(&[("user", text)]), true)?;
    Ok(tokenizer.encode(&rendered, false)?)
}

/// Continues token prompts and decodes the new tokens.
///
/// # Errors
/// A prompt that leaves no room, or logits that are not finite.
pub fn continue_prompts<B: Kernels>(
    model: &Decoder<B>,
    tokenizer: &Tokenizer,
    prompts: &[Vec<u32>],
    max_new_tokens: usize,
    sampler: Sampler,
) -> Result<Vec<String>, RunError> {
    let mut stop_tokens = model.config.eos_token_ids.clone();
    stop_tokens.extend(tokenizer.eos_token_id());
    let options = GenerateOptions { max_new_tokens, stop_tokens, sampler };
    let written = model.generate(prompts, &options)?;
    written.iter().map(|tokens| Ok(tokenizer.decode(tokens, true)?)).collect()
}
