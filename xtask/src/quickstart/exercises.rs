//! The exercises of the quickstart: six tasks about a word, written as statements (pretraining text) or as a question and an
//! answer (chats). The text holds no question and the chats no statement, so the knowledge and the form of a question
//! are learned separately. The evaluation asks about words that occur nowhere else: no answer can be memorized.
//!
//! Trade-off: two phrasings per task, enough to see that a run learned something.

use std::collections::HashSet;

use super::language::{Random, word};
use super::tokenizer::json_string;

/// One question and its answer.
pub(super) struct Chat {
    pub(super) question: String,
    pub(super) answer: String,
}

impl Chat {
    /// Returns the line of a JSONL file, in the `messages` layout.
    pub(super) fn json_line(&self) -> String {
        let [question, answer] = [&self.question, &self.answer].map(|text| json_string(text));
        let user = format!("{{\"role\":\"user\",\"content\":{question}}}");
        format!("{{\"messages\":[{user},{{\"role\":\"assistant\",\"content\":{answer}}}]}}\n")
    }
}

/// A task about a word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Exercise {
    Backwards,
    Capitals,
    Vowels,
    Count,
    First,
    Last,
}

use Exercise::{Backwards, Capitals, Count, First, Last, Vowels};

/// All of them, once.
const ALL: [Exercise; 6] = [Backwards, Capitals, Vowels, Count, First, Last];
/// The exercises of the chats, in turn: longer answers, which cannot be right by accident, occur more often.
pub(super) const ASKED: [Exercise; 10] =
    [Backwards, Capitals, Backwards, Vowels, Count, Backwards, Capitals, First, Vowels, Last];

impl Exercise {
    /// Returns the correct answer for this word.
    fn answer(self, word: &str) -> String {
        match self {
            Backwards => word.chars().rev().collect(),
            Capitals => word.to_uppercase(),
            Vowels => word.chars().filter(|letter| "aeiou".contains(*letter)).collect(),
            Count => word.len().to_string(),
            First => word[..1].to_owned(),
            Last => word[word.len() - 1..].to_owned(),
        }
    }

    fn statement(self, word: &str, random: &mut Random) -> String {
        let answer = self.answer(word);
        let second = random.below(2) == 1;
        match self {
            Backwards if second => format!("{word} read from the end is {answer}."),
            Backwards => format!("{word} backwards is {answer}."),
            Capitals if second => format!("{word} in large letters is {answer}."),
            Capitals => format!("{word} in capitals is {answer}."),
            Vowels if second => format!("In {word} one hears the vowels {answer}."),
            Vowels => format!("The vowels of {word} are {answer}."),
            Count if second => format!("{word} is {answer} letters long."),
            Count => format!("{word} has {answer} letters."),
            First if second => format!("At the front of {word} stands {answer}."),
            First => format!("{word} begins with {answer}."),
            Last if second => format!("At the back of {word} stands {answer}."),
            Last => format!("{word} ends with {answer}."),
        }
    }

    /// Builds a question about a word and its answer.
    pub(super) fn chat(self, word: &str, random: &mut Random) -> Chat {
        let second = random.below(2) == 1;
        let question = match self {
            Backwards if second => format!("What is {word} backwards?"),
            Backwards => format!("Spell {word} backwards."),
            Capitals if second => format!("What is {word} in capitals?"),
            Capitals => format!("Write {word} in capitals."),
            Vowels if second => format!("Which vowels has {word}?"),
            Vowels => format!("Name the vowels of {word}."),
            Count if second => format!("How many letters has {word}?"),
            Count => format!("Count the letters of {word}."),
            First if second => format!("What does {word} begin with?"),
            First => format!("Name the first letter of {word}."),
            Last if second => format!("What does {word} end with?"),
            Last => format!("Name the last letter of {word}."),
        };
        Chat { question, answer: self.answer(word) }
    }
}

/// Builds one document of the pretraining text: two to four statements about one word.
pub(super) fn document(word: &str, random: &mut Random) -> String {
    let mut exercises = ALL;
    random.shuffle(&mut exercises);
    let count = 2 + random.below(3);
    let statements: Vec<String> = exercises[..count].iter().map(|exercise| exercise.statement(word, random)).collect();
    statements.join(" ")
}

/// The words of the sample prompts in `configs/quickstart.toml`: held out too, so that a run cannot have memorized them.
pub(super) const SAMPLES: [&str; 3] = ["stove", "fire", "stone"];

/// The words that only the evaluation may use.
pub(super) struct HeldOut {
    /// The words in the order of the evaluation.
    pub(super) words: Vec<String>,
    taken: HashSet<String>,
}

impl HeldOut {
    /// Chooses `count` distinct words of at least four letters.
    pub(super) fn new(count: usize) -> Self {
        let mut random = Random::new(12);
        let taken = SAMPLES.map(str::to_owned).into_iter().collect();
        let mut held_out = Self { words: Vec::new(), taken };
        while held_out.words.len() < count {
            let word = word(&mut random);
            if word.len() >= 4 && held_out.taken.insert(word.clone()) {
                held_out.words.push(word);
            }
        }
        held_out
    }

    /// Draws a word that is not held out.
    pub(super) fn free_word(&self, random: &mut Random) -> String {
        loop {
            let word = word(random);
            if !self.taken.contains(&word) {
                return word;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_right() {
        let answers = ALL.map(|exercise| exercise.answer("marlo"));
        assert_eq!(answers, ["olram", "MARLO", "ao", "5", "m", "o"]);
    }

    #[test]
    fn every_exercise_is_asked() {
        assert!(ALL.iter().all(|exercise| ASKED.contains(exercise)));
    }
}
