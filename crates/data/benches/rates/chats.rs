//! Conversations and a tokenizer: either given on the command line, or generated from the text files of this repository.

use std::fs::{read_dir, read_to_string, write};
use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::json;
use tempfile::TempDir;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// The pattern with which Llama 3's tokenizer splits text into words.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SPECIAL: [&str; 6] =
    ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"];
const VOCABULARY: usize = 32_000;
const ROWS: usize = 6000;

/// A JSONL file of conversations and a tokenizer's folder.
pub(crate) struct Chats {
    pub(crate) rows: PathBuf,
    pub(crate) tokenizer: PathBuf,
    folder: TempDir,
}

impl Chats {
    pub(crate) fn new(rows: Option<&Path>, tokenizer: Option<&Path>) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let texts = if rows.is_some() && tokenizer.is_some() { Vec::new() } else { texts() };
        let rows = rows.map_or_else(
            || {
                let path = folder.path().join("chats.jsonl");
                write(&path, conversations(&texts)).expect("room for the conversations");
                path
            },
            Path::to_owned,
        );
        let tokenizer = tokenizer.map_or_else(|| train(&texts, folder.path()), Path::to_owned);
        Self { rows, tokenizer, folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn texts() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    let mut folders = vec![root];
    while let Some(folder) = folders.pop() {
        for entry in read_dir(&folder).expect("the repository can be read").flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let is_hidden = name.to_string_lossy().starts_with('.');
            let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
            if path.is_dir() && !is_hidden && name != "target" {
                folders.push(path);
            } else if matches!(extension, "rs" | "md" | "py" | "cu" | "toml") {
                files.push(path);
            }
        }
    }
    // Independent of the order of the file system.
    files.sort();
    files.iter().filter_map(|path| read_to_string(path).ok()).collect()
}

/// Conversations of one to five questions with answers of one to four paragraphs, each under a system message.
fn conversations(texts: &[String]) -> String {
    let paragraphs: Vec<&str> = texts.iter().flat_map(|text| text.split("\n\n")).map(str::trim).collect();
    let paragraphs: Vec<&str> =
        paragraphs.into_iter().filter(|paragraph| (20..2000).contains(&paragraph.len())).collect();
    let mut random = ChaCha8Rng::seed_from_u64(0);
    let mut below = |limit: usize| (random.next_u32() as usize) % limit;
    let mut rows = String::new();
    for _ in 0..ROWS {
        let mut messages = vec![json!({ "role": "system", "content": "You are a helpful assistant." })];
        for _ in 0..[1, 1, 1, 2, 3, 5][below(6)] {
            let question: String = paragraphs[below(paragraphs.len())].chars().take(300).collect();
            let answer: Vec<&str> = (0..[1, 2, 4][below(3)]).map(|_| paragraphs[below(paragraphs.len())]).collect();
            messages.push(json!({ "role": "user", "content": question }));
            messages.push(json!({ "role": "assistant", "content": answer.join("\n\n") }));
        }
        rows.push_str(&json!({ "messages": messages }).to_string());
        rows.push('\n');
    }
    rows
}

/// Returns a byte-level BPE tokenizer with a trained vocabulary, in a separate folder.
fn train(texts: &[String], folder: &Path) -> PathBuf {
    let pattern = SplitPattern::Regex(WORDS.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).expect("a pattern that is right");
    let parts = [split.into(), ByteLevel::new(false, true, false).into()];
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(PreTokenizerWrapper::Sequence(Sequence::new(parts.into()))));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, false)));
    let special = SPECIAL.map(|token| AddedToken::from(token, true));
    let trainer = BpeTrainerBuilder::new().vocab_size(VOCABULARY).show_progress(false).special_tokens(special.into());
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let mut trainer: TrainerWrapper = trainer.initial_alphabet(alphabet).build().into();
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str)).expect("text to learn a vocabulary from");
    let folder = folder.join("tokenizer");
    std::fs::create_dir(&folder).expect("a folder of its own");
    tokenizer.save(folder.join("tokenizer.json"), false).expect("room for a vocabulary");
    let config = json!({ "eos_token": "<|im_end|>", "bos_token": "<|begin_of_text|>" });
    write(folder.join("tokenizer_config.json"), config.to_string()).expect("room for a file");
    folder
}
