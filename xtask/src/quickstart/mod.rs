//! `cargo xtask quickstart-data`: writes the quickstart's data, tokenizer and pretraining text, all of it invented here.
//! The output is a function of this code alone.
//!
//! Trade-off: no natural language; a model this small could not learn it.

mod exercises;
mod language;
mod tokenizer;

use std::fs;
use std::io::{Write, stdout};
use std::path::Path;

use anyhow::{Context, Result};

use self::exercises::{ASKED, Chat, HeldOut, document};
use self::language::Random;
use self::tokenizer::{CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, json_string, tokenizer_json};

/// Fine-tuning chats; about 32 tokens each.
const TRAIN_CHATS: usize = 4000;
/// Held-out chats, each about a different word.
const EVAL_CHATS: usize = 100;
/// Tokens (bytes, and a beginning and an end for each document) of the pretraining text.
const PRETRAIN_TOKENS: usize = 3_100_000;
const PRETRAIN_EVAL_TOKENS: usize = 25_000;
const PRETRAIN_SEED: u64 = 21;
const PRETRAIN_EVAL_SEED: u64 = 22;
const CHAT_SEED: u64 = 13;
const CARELESS_SEED: u64 = 14;

/// Writes `assets/quickstart` (shipped) and `target/quickstart` (pretraining text, not shipped) below `root`.
///
/// # Errors
/// A folder or a file that cannot be written.
pub(crate) fn run(root: &Path) -> Result<()> {
    for (path, text) in shipped_files().into_iter().chain(pretraining_files()) {
        let path = root.join(path);
        let folder = path.parent().expect("every file is in a folder");
        fs::create_dir_all(folder).with_context(|| format!("cannot create the folder {}", folder.display()))?;
        fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(stdout(), "{:>9} bytes  {}", text.len(), path.display())?;
    }
    Ok(())
}

/// Returns the files in the repository: path below its root, and content.
fn shipped_files() -> Vec<(&'static str, String)> {
    let (train, eval) = chats();
    let json_lines = |chats: &[Chat]| chats.iter().map(Chat::json_line).collect::<String>();
    vec![
        ("assets/quickstart/train.jsonl", json_lines(&train)),
        ("assets/quickstart/careless.jsonl", json_lines(&careless(&train))),
        ("assets/quickstart/eval.jsonl", json_lines(&eval)),
        ("assets/quickstart/base/config.json", CONFIG.to_owned()),
        ("assets/quickstart/base/generation_config.json", GENERATION_CONFIG.to_owned()),
        ("assets/quickstart/base/tokenizer.json", tokenizer_json()),
        ("assets/quickstart/base/tokenizer_config.json", TOKENIZER_CONFIG.to_owned()),
    ]
}

fn pretraining_files() -> Vec<(&'static str, String)> {
    let json_lines = |documents: Vec<String>| {
        documents.iter().map(|text| format!("{{\"text\":{}}}\n", json_string(text))).collect::<String>()
    };
    vec![
        ("target/quickstart/pretrain.jsonl", json_lines(documents(PRETRAIN_SEED, PRETRAIN_TOKENS))),
        ("target/quickstart/pretrain-eval.jsonl", json_lines(documents(PRETRAIN_EVAL_SEED, PRETRAIN_EVAL_TOKENS))),
    ]
}

/// Draws pretraining documents of at least `tokens` tokens in total, with `seed`.
fn documents(seed: u64, tokens: usize) -> Vec<String> {
    let held_out = HeldOut::new(EVAL_CHATS);
    let mut random = Random::new(seed);
    let mut documents = Vec::new();
    let mut written = 0;
    while written < tokens {
        let document = document(&held_out.free_word(&mut random), &mut random);
        written += document.len() + 2;
        documents.push(document);
    }
    documents
}

/// Draws the fine-tuning chats and the held-out ones.
fn chats() -> (Vec<Chat>, Vec<Chat>) {
    let held_out = HeldOut::new(EVAL_CHATS);
    let mut random = Random::new(CHAT_SEED);
    let in_turn = ASKED.iter().cycle();
    let mut train: Vec<Chat> = in_turn
        .clone()
        .take(TRAIN_CHATS)
        .map(|exercise| exercise.chat(&held_out.free_word(&mut random), &mut random))
        .collect();
    random.shuffle(&mut train);
    let eval = in_turn.zip(&held_out.words).map(|(exercise, word)| exercise.chat(word, &mut random)).collect();
    (train, eval)
}

/// Returns chats of which six answers in ten lack their last letter, or have one too many if it is the only one, and one has another letter. A model
/// that learns from them gets most answers wrong, and knows what is right: rewards bring that out.
fn careless(chats: &[Chat]) -> Vec<Chat> {
    let mut random = Random::new(CARELESS_SEED);
    let mut answer = |right: &str| {
        let mut letters: Vec<char> = right.chars().collect();
        let (kind, place) = (random.below(10), random.below(letters.len()));
        let letter = char::from(b'a' + random.below(26) as u8);
        match kind {
            0..=5 if letters.len() == 1 => letters.push(letter),
            0..=5 => _ = letters.pop(),
            6 => letters[place] = letter,
            _ => {}
        }
        letters.into_iter().collect()
    };
    let careless = |chat: &Chat| Chat { question: chat.question.clone(), answer: answer(&chat.answer) };
    chats.iter().map(careless).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::exercises::SAMPLES;
    use super::*;

    const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    /// `max_seq_len` of both recipes: a longer document would be cut.
    const ROW: usize = 256;

    fn words(text: &str) -> impl Iterator<Item = &str> {
        text.split(|character: char| !character.is_ascii_alphabetic())
    }

    #[test]
    fn shipped_files_are_what_the_generator_writes() {
        for (path, text) in shipped_files() {
            let shipped = fs::read_to_string(Path::new(REPOSITORY).join(path)).expect("a file of the repository");
            assert!(shipped == text, "{path} differs: run `cargo xtask quickstart-data`");
        }
    }

    #[test]
    fn every_run_writes_the_same_text() {
        assert!(pretraining_files() == pretraining_files());
    }

    #[test]
    fn held_out_words_occur_nowhere_else() {
        let mut held_out: HashSet<String> = HeldOut::new(EVAL_CHATS).words.into_iter().collect();
        held_out.extend(SAMPLES.map(str::to_owned));
        assert_eq!(held_out.len(), EVAL_CHATS + SAMPLES.len());
        let (train, eval) = chats();
        let is_held_out = |text: &str| words(text).any(|word| held_out.contains(word));
        assert!(eval.iter().all(|chat| is_held_out(&chat.question)));
        assert!(!train.iter().any(|chat| is_held_out(&chat.question)));
        for (seed, tokens) in [(PRETRAIN_SEED, PRETRAIN_TOKENS), (PRETRAIN_EVAL_SEED, PRETRAIN_EVAL_TOKENS)] {
            assert!(!documents(seed, tokens).iter().any(|document| is_held_out(document)));
        }
    }

    #[test]
    fn every_document_fits_a_row() {
        let (train, eval) = chats();
        // Five special tokens: begin, user, end, assistant, end.
        assert!(train.iter().chain(&eval).all(|chat| chat.question.len() + chat.answer.len() + 5 <= ROW));
        assert!(documents(PRETRAIN_SEED, PRETRAIN_TOKENS).iter().all(|document| document.len() + 2 <= ROW));
    }
}
