//! Questions whose answers can be counted: the prompts and reference answers that held-out conversations hold.
//!
//! Gives up conversations of which everything is trained (nothing tells the answer from the question) and those that
//! were cut before the answer ended.

use crate::cache::DocumentSet;
use crate::dataset::Example;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// A prompt and the answer that is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Everything before the last answer, the assistant's header included: generation goes on from here.
    pub prompt: Vec<u32>,
    /// The last answer as text, without special tokens.
    pub answer: String,
}

impl Question {
    /// The question of an example: its last run of trained tokens is the answer. `None` if there is no prompt (the
    /// first token alone is none) or no special token closes the answer.
    pub fn from_example(example: &Example, tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        let Some(last) = example.trained.iter().rposition(|&trained| trained) else { return Ok(None) };
        let start = example.trained[..last].iter().rposition(|&trained| !trained).map_or(0, |before| before + 1);
        if start < 2 || !tokenizer.is_special(example.tokens[last]) {
            return Ok(None);
        }
        let answer = tokenizer.decode(&example.tokens[start..last], true)?;
        Ok(Some(Self { prompt: example.tokens[..start].to_vec(), answer }))
    }

    /// The first `limit` questions of some documents, in their order.
    ///
    /// Error: the tokenizer cannot turn tokens to text.
    pub fn of_documents(documents: &DocumentSet, tokenizer: &Tokenizer, limit: usize) -> Result<Vec<Self>, DataError> {
        let question = |example| Self::from_example(&example, tokenizer).transpose();
        documents.examples().filter_map(question).take(limit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_template::Message;
    use crate::conversation::encode_chat;
    use crate::dataset::{Dataset, ReadReport};
    use crate::mask::TrainOn;
    use crate::shape::{Chat, Turn};
    use crate::test_tokenizer::TestTokenizer;

    fn encode(tokenizer: &Tokenizer, messages: &[Message], train_on: TrainOn) -> Example {
        let turns = messages.iter().map(|message| Turn::new(&message.role, &message.content)).collect();
        encode_chat(tokenizer, &Chat { turns, ..Chat::default() }, train_on, true).unwrap().example
    }

    fn conversation() -> Vec<Message> {
        let turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four é")];
        turns.map(|(role, content)| Message { role: role.to_owned(), content: content.to_owned() }).to_vec()
    }

    #[test]
    fn prompt_is_what_generation_begins_with_and_answer_what_was_said() {
        let tokenizer = TestTokenizer::default().load();
        let example = encode(&tokenizer, &conversation(), TrainOn::Assistant);
        let prompt = tokenizer.chat_template().unwrap().render(&conversation()[..3], true).unwrap();
        let question = Question::from_example(&example, &tokenizer).unwrap().unwrap();
        assert_eq!(question.prompt, tokenizer.encode(&prompt, false).unwrap());
        assert_eq!(question.answer, "four é");
    }

    #[test]
    fn cut_answers_and_fully_trained_examples_are_no_questions() {
        let tokenizer = TestTokenizer::default().load();
        let whole = encode(&tokenizer, &conversation(), TrainOn::Assistant);
        let mut cut = whole.clone();
        let end = cut.trained.iter().rposition(|&trained| trained).unwrap();
        cut.tokens.truncate(end);
        cut.trained.truncate(end);
        let all = encode(&tokenizer, &conversation(), TrainOn::All);
        let examples = vec![cut, whole.clone(), all, whole];
        let documents = DocumentSet::of_dataset(&Dataset { examples, report: ReadReport::default() });
        let questions = |limit| Question::of_documents(&documents, &tokenizer, limit).unwrap().len();
        assert_eq!((questions(9), questions(1)), (2, 1));
    }
}
