//! All errors of model folders, adapter folders and sampling settings, in one enum.
//!
//! Each message says what was expected, what was found, in which file, and what to do next. Messages that wrap another error leave its text to the
//! error chain (`source`), so a report that prints the chain says nothing twice.

use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use firebrick_arch::error::io_advice;
use firebrick_arch::{ArchError, counted};
use firebrick_precision::QuantFormat;
use thiserror::Error;

/// An error while a model or an adapter is read, checked, written or sampled from.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ModelError {
    /// A config.json or adapter_config.json that cannot be used, an adapter that does not fit the model, or an error of the file system.
    #[error(transparent)]
    Arch(#[from] ArchError),

    #[error("`{}` has no {missing}. {advice}", dir.display())]
    NotThere { dir: PathBuf, missing: &'static str, advice: &'static str },

    #[error(
        "no GGUF file can be written of {what}. llama.cpp's convert_hf_to_gguf.py knows more families and tokenizers"
    )]
    NoGguf { what: String },

    #[error(
        "no 4-bit folder can be written of {family}, a mixture of experts: transformers 4 would expect its routers in 4 bits, and transformers \
         5 holds its experts in fused tensors that bitsandbytes does not read. Write it unquantized; [bnb_4bit] of a recipe and `generate \
         --nf4` quantize it while it is read"
    )]
    MixtureIn4Bits { family: String },

    #[error(
        "`{}` has no experts in MXFP4 (quantization_config of its config.json names no mxfp4), so a merged model has none either. Leave \
         --mxfp4 out, or give the base as it is published",
        dir.display()
    )]
    NotMxfp4 { dir: PathBuf },

    #[error("`{name}` cannot be quantized as in training")]
    NotQuantizable { name: String, source: firebrick_precision::Error },

    #[error(
        "`{name}` in `{}` is wrong: its outputs are {error:.1e} away from those of base and adapter, expected at most {bound:.0e}. Delete \
         the folder; merge again, to another disk if that does not help",
        dir.display()
    )]
    MergedWrong {
        dir: PathBuf,
        name: String,
        /// Relative difference of outputs.
        error: f64,
        bound: f64,
    },

    #[error(
        "`{}` lacks {} that its model.safetensors.index.json names: {}. Download the missing files again into this \
         folder",
        dir.display(), counted(shards.len(), "shard"), first_few(shards)
    )]
    MissingShards {
        dir: PathBuf,
        /// One line for each missing shard: its name and the tensors that need it.
        shards: Vec<String>,
    },

    /// The index names a shard that is no plain file name: a file elsewhere would be read as weights.
    #[error(
        "`{}` places `{tensor}` in `{file}`, which is not the name of a file in the same folder. Download the index again, and do \
         not use it if it still says so",
        path.display()
    )]
    OutsideFolder { path: PathBuf, tensor: String, file: String },

    #[error(
        "`{}` should be {expected} bytes by its own header but is {got} bytes: the download or copy did not finish, \
         or the file is damaged. Delete it and download it again",
        path.display()
    )]
    WrongLength { path: PathBuf, expected: u64, got: u64 },

    #[error(
        "`{}` holds weights as earlier builds compressed them, which are no longer read: restore its folder with the command decompress \
         of such a build of 0.1.0",
        path.display()
    )]
    CompressedWeights { path: PathBuf },

    #[error("`{}` is a Git LFS pointer, not the weights: run `git lfs pull` in its folder", path.display())]
    LfsPointer { path: PathBuf },

    #[error("`{}` is not a safetensors file: {reason}. Delete it and download it again", path.display())]
    BadHeader { path: PathBuf, reason: String },

    #[error(
        "`{}` does not hold {} that model.safetensors.index.json places in it: {}. The index and the shards come from \
         different versions of the model: download the folder again",
        path.display(), counted(tensors.len(), "tensor"), first_few(tensors)
    )]
    NotInShard { path: PathBuf, tensors: Vec<String> },

    #[error("no file in `{}` holds a tensor named `{name}`", dir.display())]
    MissingTensor { dir: PathBuf, name: String },

    #[error(
        "`{name}` in `{}` has shape {got:?}, but {keys} in config.json ask for {expected:?}. The weights and \
         config.json do not belong together: download both again from one place",
        path.display()
    )]
    WrongShape { name: String, path: PathBuf, expected: Vec<usize>, got: Vec<usize>, keys: &'static str },

    #[error(
        "`{name}` in `{}` is stored as {got}; supported: F32, BF16, F16. Use a checkpoint saved in one of these",
        path.display()
    )]
    UnsupportedDtype { name: String, path: PathBuf, got: String },

    /// The parts of a quantized weight are missing or do not belong together, or are in a variant that is not read.
    #[error(
        "the quantized weight `{name}` in `{}` cannot be read: {problem}. Download the folder again, or use the unquantized model",
        dir.display()
    )]
    QuantizedWeight { dir: PathBuf, name: String, problem: String },

    /// The operating system refused to read a tensor of a file that was whole when it was opened.
    #[error(
        "cannot read `{name}` from `{}`{}; if the file has been changed or cut short, download it again",
        path.display(), io_advice(source)
    )]
    ReadTensor { name: String, path: PathBuf, source: IoError },

    /// A weight is NaN or infinite, or too large for its number format on the device.
    #[error(
        "value {index} of `{name}` in `{}` is {value:e}, which is no finite number in {format}: the weights are damaged or \
         come from a run that diverged. Download the file again, or go back to an earlier checkpoint",
        path.display()
    )]
    NotFiniteWeight {
        name: String,
        path: PathBuf,
        /// Flat, row-major index of the first such value.
        index: usize,
        value: f32,
        format: String,
    },

    /// A value is not finite in the format in which it is to be written.
    #[error(
        "value {index} of `{name}` is {value:e}, which is no finite number in {format}: nothing is written. {}",
        if value.is_finite() { "Choose a format with a larger range, such as bfloat16 or float32" }
        else { "The weights that it is computed from do not fit together, or come from a run that diverged" }
    )]
    NotWritable {
        name: String,
        /// Flat, row-major index of the first such value.
        index: usize,
        /// The value before it is rounded.
        value: f32,
        format: String,
    },

    #[error(
        "the weights in `{}` do not fit its config.json, {} at fault: {}. Download the weights and config.json \
         again from one place",
        dir.display(), counted(problems.len(), "tensor"), first_few(problems)
    )]
    DoesNotFit { dir: PathBuf, problems: Vec<String> },

    #[error("`{}` already exists and is not empty, and nothing is written over: choose another folder", dir.display())]
    AlreadyExists { dir: PathBuf },

    /// An adapter file holds a tensor that does not belong in a LoRA adapter of this model, or lacks one that does.
    #[error("`{}`: tensor `{name}` {problem}", path.display())]
    AdapterTensor {
        path: PathBuf,
        name: String,
        /// The rest of the sentence.
        problem: String,
    },

    /// An adapter has tensors of layers that the model lacks, counted from 0.
    #[error(
        "the adapter in `{}` goes up to layer {highest}, and the model to layer {last}: it was trained on another base, or the base was \
         changed since. {advice}",
        dir.display()
    )]
    MoreLayers { dir: PathBuf, highest: usize, last: usize, advice: String },

    /// An adapter that a run should continue has other settings.
    #[error(
        "the adapter in `{}` cannot be continued with these settings: it has {}. Write its own settings under [lora]: {settings}",
        dir.display(), differences.join("; ")
    )]
    OtherAdapter {
        dir: PathBuf,
        /// One entry for each setting: the adapter's value, and the requested one.
        differences: Vec<String>,
        /// The adapter's settings, as a recipe writes them.
        settings: String,
    },

    /// PiSSA changes the weights of the base, and those of this folder are quantized.
    #[error(
        "`{name}` is stored quantized, and init_lora_weights = \"pissa\" takes the principal part out of unquantized weights: give the \
         model that the folder was quantized from, and quantize it in the run ([bnb_4bit], base)"
    )]
    PrincipalPartOfCodes { name: String },

    #[error(
        "the experts of `{name}` are matrices {shape:?}, which are not whole blocks of {format}: choose another format in base, or train without \
         [bnb_4bit]"
    )]
    ExpertBlocks {
        name: String,
        /// `[out, in]` of one expert.
        shape: [usize; 2],
        format: QuantFormat,
    },

    #[error(
        "`{first}` and `{other}` are stored in different number formats, but `{name}` is one weight: convert the folder to one format"
    )]
    MixedExperts { name: String, first: String, other: String },

    #[error("`{name}` cannot be stored in 4 bits: the weights are damaged, or train without [bnb_4bit]")]
    Quantize { name: String, source: firebrick_precision::Error },

    #[error("`{key}` is {got}, but must be {expected}")]
    Sampling {
        /// `temperature`, `top_p`, `min_p` or `repetition_penalty`.
        key: &'static str,
        got: f32,
        expected: &'static str,
    },

    #[error(
        "a prompt has {got} tokens, but must have from 1 to {room}: shorten it, ask for fewer new tokens, or raise the \
         longest row of the run"
    )]
    PromptLength { got: usize, room: usize },

    /// Embedding and head have no row for a token.
    #[error(
        "token id {id} is outside the model's vocabulary of {vocabulary} tokens: the tokenizer and the model do not belong together. Take \
         tokenizer.json from the model's own folder; if it is from there, its post_processor may add the token to every text"
    )]
    TokenOutsideVocabulary { id: u64, vocabulary: usize },

    #[error("logit {index} is {value}: the model's output is not finite. Lower the learning rate or check the weights")]
    NotFinite { index: usize, value: f32 },

    /// The same error when tokens are chosen on the device.
    #[error(
        "the logits after prompt {prompt} are not finite (prompts count from 0). Lower the learning rate or check the weights"
    )]
    LogitsNotFinite { prompt: usize },
}

impl ModelError {
    /// Builds the error "cannot `action` `path`": for use in `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(IoError) -> Self {
        move |source| ArchError::io(action, path)(source).into()
    }

    /// Builds the error of a tensor in the adapter file at `path`.
    pub(crate) fn adapter_tensor(path: &Path, name: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::AdapterTensor { path: path.to_path_buf(), name: name.into(), problem: problem.into() }
    }
}

/// Number of entries of a long list that a message shows.
const SHOWN: usize = 5;

/// Joins the first entries of a list, with the number of the others.
pub(crate) fn first_few(items: &[String]) -> String {
    let shown = items.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
    match items.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_shows_five_and_counts_the_rest() {
        let items = (0..7).map(|i| format!("t{i}")).collect::<Vec<_>>();
        assert_eq!(first_few(&items), "t0; t1; t2; t3; t4; and 2 more");
        assert_eq!(first_few(&items[..5]), "t0; t1; t2; t3; t4");
    }
}
