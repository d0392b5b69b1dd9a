//! `generate`: text from a model folder, with or without an adapter.
//!
//! Prompts are answered in a batch of bounded size: a sequence that ends makes room for the next.
//! Trade-off: the room is for the longest prompt, times the number of sequences.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use firebrick_arch::{LongRopeFactors, ModelConfig, ModelSpec, generation_eos_token_ids};
use firebrick_data::{
    Chat, DataError, Fields, FileFormat, Record, RecordFormat, Row, Source, SourceError, TemplateChoice,
    TemplateDefaults, Tokenizer,
};
use firebrick_kernels::{BaseStorage, GemmFormat, Kernels};
use firebrick_model::peft::{grow_for_adapter, read_adapter_config};
use firebrick_model::{
    BatchLimits, BuildOptions, CHAT_TEMPLATE_FILE, Decoder, GenerateOptions, HfFolder, Sampler, read_config,
};
use firebrick_precision::FloatType;

use crate::error::RunError;
use crate::run::device::dtype_of;
use crate::run::text::text_stream::TextStream;
use crate::run::text::{chat_settings, end_of_turn};

/// A prompt may have up to this many times the model's positions; beyond the positions it causes a warning.
const MAX_OF_POSITIONS: usize = 4;

/// A model folder and how it is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Model folder.
    pub model: PathBuf,
    /// PEFT adapter folder.
    pub adapter: Option<PathBuf>,
    /// The storage format of the base.
    pub storage: BaseStorage,
    /// Format of activations and GEMMs.
    pub compute: FloatType,
}

impl LoadOptions {
    /// Loads the model, with rotary tables for `max_positions` positions and longrope's factors for `sequence_tokens` tokens.
    ///
    /// # Errors
    /// A folder that cannot be read, or an adapter that does not fit the model.
    pub fn load<B: Kernels>(
        &self,
        max_positions: usize,
        sequence_tokens: usize,
        device: &B::Device,
    ) -> Result<Decoder<B>, RunError> {
        let build = BuildOptions {
            storage: self.storage,
            lora: self.adapter.as_deref().map(read_adapter_config).transpose()?,
            seed: 0,
            compute_dtype: dtype_of(self.compute),
            gemms: GemmFormat::Compute,
            max_positions,
            sequence_tokens,
        };
        let mut config = self.config()?;
        if let Some(adapter) = &self.adapter {
            config.add_eos_token_ids(generation_eos_token_ids(adapter)?);
        }
        let mut model = Decoder::load(&HfFolder::open(&self.model)?, config, &build, device, &mut |_| ())?;
        if let Some(adapter) = &self.adapter {
            model.load_adapter(adapter)?;
        }
        Ok(model)
    }

    /// Reads the model's config, with rows for the tokens that the adapter has and the model lacks.
    fn config(&self) -> Result<ModelConfig, RunError> {
        let config = read_config(&self.model)?;
        Ok(match &self.adapter {
            Some(adapter) => grow_for_adapter(config, adapter)?,
            None => config,
        })
    }

    /// Returns the tokens by which the training of the adapter, or of the model if there is none, chose longrope's factors; 0 if no file records it.
    /// A longer prompt chooses by its own length, as transformers does when it reads a prompt. So neither its neighbors nor the room for its answer
    /// change a text; transformers changes the factors again when an answer crosses the old context.
    pub fn trained_sequence_tokens(&self) -> Result<usize, RunError> {
        Ok(chat_settings::read_sequence_tokens(self.adapter.as_deref().unwrap_or(&self.model))?.unwrap_or(0))
    }

    /// Returns what the chat template received in the training of the adapter, or of the model if there is none.
    pub fn chat_settings(&self) -> Result<TemplateDefaults, RunError> {
        chat_settings::read(self.adapter.as_deref().unwrap_or(&self.model))
    }

    /// Returns the same with the system prompt that was typed, if any; an empty one means none.
    pub fn template_defaults(&self, system_prompt: Option<&str>) -> Result<TemplateDefaults, RunError> {
        let mut defaults = self.chat_settings()?;
        if let Some(prompt) = system_prompt {
            defaults.system_prompt = Some(prompt.to_owned()).filter(|prompt| !prompt.is_empty());
        }
        Ok(defaults)
    }

    /// Loads the tokenizer of the adapter's folder if it has one, otherwise the model's; with the adapter's chat template and settings in both cases.
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
        check_vocabulary(&tokenizer, tokenizer.vocab_size(), self.config()?.spec.vocab_size)?;
        Ok(tokenizer)
    }
}

/// A request to generate text.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The model.
    pub load: LoadOptions,
    /// One text per prompt.
    pub prompts: Vec<String>,
    /// Whether a prompt is a user's turn, rendered with the chat template, or plain text to continue.
    pub chat: bool,
    /// The system message of a chat, instead of the one from training; empty: none.
    pub system_prompt: Option<String>,
    /// Maximum new tokens per prompt.
    pub max_new_tokens: usize,
    /// The sampler that chooses tokens.
    pub sampler: Sampler,
    /// Maximum number of prompts that are answered at the same time.
    pub sequences: usize,
}

/// Refuses a prompt of far more tokens than the model has positions, before it is read: attention over it takes minutes and gigabytes. Returns a note
/// if it exceeds the positions; a run may have trained beyond them.
pub fn check_positions(tokens: usize, positions: usize) -> Result<Option<String>, RunError> {
    if tokens > MAX_OF_POSITIONS.saturating_mul(positions) {
        return Err(RunError::Refused(format!(
            "a prompt has {tokens} tokens (with what the chat template writes, if it is rendered), more than {MAX_OF_POSITIONS} times \
             the {positions} positions of the model (max_position_embeddings): shorten the prompt, or use another template \
             if the prompt itself is short"
        )));
    }
    Ok((tokens > positions).then(|| {
        format!(
            "a prompt has {tokens} tokens, but the model is made for {positions} (max_position_embeddings in its \
             config.json): beyond them it has learned nothing, unless it was trained on such lengths"
        )
    }))
}

/// Loads the model and continues every prompt.
///
/// # Errors
/// A folder that cannot be read, a tokenizer without a chat template where one is needed, a prompt of far more tokens
/// than the model has positions.
pub fn generate<B: Kernels>(request: &GenerateRequest, device: &B::Device) -> Result<Vec<String>, RunError> {
    generate_streaming::<B>(request, device, &mut |_, _| ())
}

/// Generates as [`generate`] does, and calls back for each piece of text as it is written, with the index of the prompt and the text.
pub fn generate_streaming<B: Kernels>(
    request: &GenerateRequest,
    device: &B::Device,
    on_text: &mut dyn FnMut(usize, &str),
) -> Result<Vec<String>, RunError> {
    let mut tokenizer = request.load.tokenizer()?;
    tokenizer.set_template_defaults(request.load.template_defaults(request.system_prompt.as_deref())?);
    let prompts: Vec<Vec<u32>> =
        request.prompts.iter().map(|text| encode_prompt(&tokenizer, text, request.chat)).collect::<Result<_, _>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if let Some(note) = check_positions(longest, request.load.config()?.spec.max_position_embeddings)? {
        tracing::warn!("{note}");
    }
    let longest = longest + request.max_new_tokens;
    let trained = request.load.trained_sequence_tokens()?;
    let mut model = request.load.load::<B>(longest, trained, device)?;
    let sequences = request.sequences.max(1);
    let options = GenerateOptions {
        max_new_tokens: request.max_new_tokens,
        stop_tokens: stop_tokens(&model, &tokenizer, request.chat)?,
        sampler: request.sampler.clone(),
        limits: BatchLimits { sequences, tokens: sequences.saturating_mul(longest) },
    };
    let mut streams: Vec<TextStream<'_>> = prompts.iter().map(|_| TextStream::new(&tokenizer)).collect();
    for group in groups(&model.config.spec, &prompts, trained) {
        model.choose_rope_factors(trained.max(prompts[group[0]].len()));
        let of_group: Vec<Vec<u32>> = group.iter().map(|&prompt| prompts[prompt].clone()).collect();
        let mut failed = None;
        model.generate_each(&of_group, &options, &mut |index, token| match streams[group[index]].push(token) {
            Ok(text) => {
                on_text(group[index], &text);
                ControlFlow::Continue(())
            }
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
    }
    let finish = |(prompt, stream): (usize, TextStream<'_>)| {
        let (whole, rest) = stream.finish()?;
        on_text(prompt, &rest);
        Ok(whole)
    };
    streams.into_iter().enumerate().map(finish).collect()
}

/// Groups the indices of the prompts by longrope's factors: each chooses by its length, or by that of the training if that is longer.
fn groups(spec: &ModelSpec, prompts: &[Vec<u32>], trained: usize) -> Vec<Vec<usize>> {
    let long = Some(LongRopeFactors::Long);
    let is_long = |&index: &usize| {
        let tokens = trained.max(prompts[index].len());
        spec.ropes.iter().any(|rope| rope.scaling.long_rope_factors(tokens) == long)
    };
    let (long, short): (Vec<usize>, Vec<usize>) = (0..prompts.len()).partition(is_long);
    [short, long].into_iter().filter(|group| !group.is_empty()).collect()
}

/// Refuses a tokenizer with ids that the model has no embedding for.
pub(in crate::run) fn check_vocabulary(tokenizer: &Tokenizer, tokens: usize, rows: usize) -> Result<(), RunError> {
    if tokens <= rows {
        return Ok(());
    }
    let first = tokenizer.decode(&[rows as u32], false)?;
    Err(RunError::Refused(format!(
        "the tokenizer has {tokens} tokens, and the weights have rows for {rows}: none from id {rows} on, which is {first:?}. Take the \
         tokenizer.json that came with the weights; a recipe adds tokens with their rows as data.new_special_tokens or data.new_tokens"
    )))
}

/// Reads the prompts of a file: the `prompt` of each line of a `.jsonl` file; of any other file, each line that is not empty.
///
/// # Errors
/// A file that cannot be read, that has no prompt, or a line that is no object with a `prompt`.
pub fn read_prompts(path: &Path) -> Result<Vec<String>, RunError> {
    let is_json = path.extension().is_some_and(|extension| extension == "jsonl");
    let (format, key) = if is_json { (FileFormat::Jsonl, "prompt") } else { (FileFormat::Text, "text") };
    let names = Fields { text: key.to_owned(), ..Fields::default() };
    let prompt = |record: Result<Record, SourceError>| -> Result<String, RunError> {
        let record = record.map_err(DataError::from)?;
        if is_json && !record.fields.contains_key(key) {
            let keys = record.fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let problem = format!("expected the key \"prompt\", found {keys}: --input takes one prompt per line");
            return Err(RunError::Refused(format!("{}: {problem}", record.place)));
        }
        match RecordFormat::Text.parse(&record.fields, &names, &record.place).map_err(DataError::from)? {
            Row::Text(text) => Ok(text),
            row => unreachable!("a text record is a text, not {row:?}"),
        }
    };
    let prompts: Vec<String> = Source::of_lines(path, format).records().map(prompt).collect::<Result<_, RunError>>()?;
    if prompts.is_empty() {
        return Err(RunError::Refused(format!("`{}`: there is no prompt in it", path.display())));
    }
    Ok(prompts)
}

/// Encodes a prompt: a user's turn through the chat template, or plain text.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str, chat: bool) -> Result<Vec<u32>, RunError> {
    if !chat {
        return Ok(tokenizer.encode(text, true)?);
    }
    let rendered = tokenizer.chat_template()?.render(&Chat::new(&[("user", text)]), true)?;
    Ok(tokenizer.encode(&rendered, false)?)
}

/// Continues tokenized prompts, of chats or of plain text, and decodes the new tokens.
///
/// # Errors
/// A prompt that leaves no room, or logits that are not finite.
pub fn continue_prompts<B: Kernels>(
    model: &Decoder<B>,
    tokenizer: &Tokenizer,
    (prompts, chat): (&[Vec<u32>], bool),
    max_new_tokens: usize,
    sampler: Sampler,
) -> Result<Vec<String>, RunError> {
    let stop_tokens = stop_tokens(model, tokenizer, chat)?;
    let options = GenerateOptions { max_new_tokens, stop_tokens, sampler, limits: BatchLimits::NONE };
    let written = model.generate(prompts, &options)?;
    written.iter().map(|tokens| Ok(tokenizer.decode(tokens, true)?)).collect()
}

/// Returns the tokens that end a text: those of the model's and the adapter's folder, the tokenizer's, and in a chat the one with which the template
/// closes a turn.
pub fn stop_tokens<B: Kernels>(model: &Decoder<B>, tokenizer: &Tokenizer, chat: bool) -> Result<Vec<u32>, RunError> {
    let mut stop_tokens = model.config.eos_token_ids.clone();
    stop_tokens.extend(tokenizer.eos_token_id());
    if chat {
        stop_tokens.extend(end_of_turn::in_template(tokenizer)?);
    }
    Ok(stop_tokens)
}

#[cfg(test)]
mod tests {
    use firebrick_precision::Format;

    use super::*;

    #[test]
    fn a_prompt_beyond_the_positions_is_noted_and_one_far_beyond_is_refused() {
        assert_eq!(check_positions(256, 256).unwrap(), None);
        for tokens in [257, 1024] {
            let note = check_positions(tokens, 256).unwrap().unwrap();
            assert!(note.contains(&format!("{tokens} tokens")) && note.contains("made for 256"), "{note}");
        }
        let message = check_positions(1025, 256).unwrap_err().to_string();
        assert!(message.contains("1025 tokens") && message.contains("4 times the 256 positions"), "{message}");
    }

    #[test]
    fn a_prompt_chooses_longrope_factors_by_the_longer_of_itself_and_what_was_trained() {
        // The model's original context has 128 tokens.
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-phi3"));
        let spec = ModelConfig::read(model).unwrap().spec;
        let prompts = [vec![1; 129], vec![1; 128], vec![1; 200]];
        for (trained, expected) in
            [(0, vec![vec![1], vec![0, 2]]), (64, vec![vec![1], vec![0, 2]]), (256, vec![vec![0, 1, 2]])]
        {
            assert_eq!(groups(&spec, &prompts, trained), expected, "{trained}");
        }
    }

    #[test]
    fn prompts_are_lines_or_objects_and_a_wrong_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            read_prompts(&path).map_err(|error| error.to_string())
        };
        for text in ["one\n\n two \n", "\u{feff}one\r\n \r\n two \r\n", "\u{feff}\none\n two "] {
            assert_eq!(read("a.txt", text).unwrap(), ["one", " two "]);
        }
        assert_eq!(read("a.jsonl", "\u{feff}{\"prompt\": \"a\\nb\"}\r\n\r\n").unwrap(), ["a\nb"]);
        for (name, text, expected) in [
            ("b.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}", "b.jsonl:2"),
            ("c.jsonl", "{\"prompt\"", "c.jsonl:1"),
            ("e.jsonl", "{\"prompt\": NaN}", "e.jsonl:1: prompt must be a string, found the number NaN"),
            ("d.txt", "\n \n", "no prompt"),
        ] {
            let message = read(name, text).unwrap_err();
            assert!(message.contains(expected) && message.contains(name), "{message}");
        }
        assert!(read_prompts(Path::new("nowhere.txt")).unwrap_err().to_string().contains("nowhere.txt"));
    }

    /// Uses a model whose end of turn only the template knows: its settings name another token.
    #[cfg(feature = "flex")]
    #[test]
    fn a_chat_ends_where_its_template_closes_a_turn() {
        let (folder, tiny) = (tempfile::tempdir().unwrap(), "/../../tests/fixtures/tiny-llama/");
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            let from = [env!("CARGO_MANIFEST_DIR"), tiny, file].concat();
            std::fs::copy(from, folder.path().join(file)).unwrap();
        }
        let (model, compute) = (folder.path().to_owned(), FloatType::F32);
        let load = LoadOptions { model, adapter: None, storage: BaseStorage::Frozen(Format::Float(compute)), compute };
        let tokenizer = load.tokenizer().unwrap();
        let model = load.load::<firebrick_kernels::backends::Flex>(8, 8, &Default::default()).unwrap();
        let ends = |chat| stop_tokens(&model, &tokenizer, chat).unwrap();
        assert_eq!((ends(false), ends(true)), (vec![257, 257], vec![257, 257, 261]));
    }
}
