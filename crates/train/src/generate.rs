//! `generate`: text from a model folder, with or without an adapter.

use std::path::PathBuf;

use burn_tensor::DType;
use firebrick_data::{Message, Tokenizer};
use firebrick_kernels::Kernels;
use firebrick_model::peft::read_adapter_config;
use firebrick_model::{BaseStorage, BuildOptions, GenerateOptions, HfFolder, Llama, LlamaConfig, Sampler};

use crate::error::RunError;

/// What to write, and how.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Model folder.
    pub model: PathBuf,
    /// PEFT adapter folder.
    pub adapter: Option<PathBuf>,
    /// One text a prompt.
    pub prompts: Vec<String>,
    /// Whether a prompt is a user's turn, rendered by the chat template, or plain text to continue.
    pub chat: bool,
    /// Most new tokens a prompt.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampler: Sampler,
    /// How the base is stored.
    pub storage: BaseStorage,
}

/// Loads the model and continues every prompt.
///
/// # Errors
/// A folder that cannot be read, a tokenizer without a chat template where one is needed, a prompt that is too long.
pub fn generate<B: Kernels>(options: &WriteOptions, device: &B::Device) -> Result<Vec<String>, RunError> {
    let tokenizer = Tokenizer::from_folder(&options.model)?;
    let config = LlamaConfig::read(&options.model)?;
    let prompts: Vec<Vec<u32>> =
        options.prompts.iter().map(|text| encode_prompt(&tokenizer, text, options.chat)).collect::<Result<_, _>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let build = BuildOptions {
        storage: options.storage,
        lora: options.adapter.as_deref().map(read_adapter_config).transpose()?,
        seed: 0,
        compute_dtype: DType::F32,
        max_positions: longest + options.max_new_tokens,
    };
    let mut model = Llama::<B>::load(&HfFolder::open(&options.model)?, config, &build, device, &mut |_| ())?;
    if let Some(adapter) = &options.adapter {
        model.load_adapter(adapter)?;
    }
    continue_prompts(&model, &tokenizer, &prompts, options.max_new_tokens, options.sampler.clone())
}

/// A prompt's token ids: a user's turn by the chat template, or plain text.
///
/// # Errors
/// The tokenizer has no chat template, or the template refuses the message.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str, chat: bool) -> Result<Vec<u32>, RunError> {
    if !chat {
        return Ok(tokenizer.encode(text, true)?);
    }
    let message = Message { role: "user".to_owned(), content: text.to_owned() };
    let rendered = tokenizer.chat_template()?.render(&[message], true)?;
    Ok(tokenizer.encode(&rendered, false)?)
}

/// Continues token prompts and decodes the new tokens.
///
/// # Errors
/// A prompt that leaves no room, or logits that are not finite.
pub fn continue_prompts<B: Kernels>(
    model: &Llama<B>,
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
