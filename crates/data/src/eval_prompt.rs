//! Prompts with reference answers, taken from held-out conversations, for evaluation by exact answers.
//!
//! Not supported: conversations in which every token counts in the loss (the answer cannot be distinguished from the
//! prompt), and those that were cut before the answer ended.

use crate::cache::Example;
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// A prompt and its reference answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalPrompt {
    /// Everything before the last answer, including the assistant's header: generation continues from here.
    pub prompt: Vec<u32>,
    /// The last answer as text, without special tokens.
    pub answer: String,
}

impl EvalPrompt {
    /// Takes the prompt of an example; the answer is its last run of loss tokens. `None` if there is no prompt (the first token alone does not count
    /// as one) or no special token ends the answer.
    pub fn from_example(example: &Example, tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        let Some(last) = example.loss_mask.iter().rposition(|&counts| counts) else { return Ok(None) };
        let start = example.loss_mask[..last].iter().rposition(|&counts| !counts).map_or(0, |before| before + 1);
        if start < 2 || !tokenizer.is_special(example.tokens[last]) {
            return Ok(None);
        }
        let answer = tokenizer.decode(&example.tokens[start..last], true)?;
        Ok(Some(Self { prompt: example.tokens[..start].to_vec(), answer }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::encode_chat;
    use crate::record_format::{ASSISTANT, Chat};
    use crate::selection::{Selection, TrainOn};
    use crate::test_tokenizer::TestTokenizer;

    fn encode(tokenizer: &Tokenizer, chat: &Chat, train_on: TrainOn) -> Example {
        let selection = Selection::new(chat, train_on, &[ASSISTANT.to_owned()]);
        encode_chat(tokenizer, chat, &selection, true).unwrap().example
    }

    fn conversation() -> Chat {
        Chat::new(&[("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four é")])
    }

    #[test]
    fn the_prompt_ends_with_the_assistants_header() {
        let tokenizer = TestTokenizer::default().load();
        let example = encode(&tokenizer, &conversation(), TrainOn::Assistant);
        let question = Chat { turns: conversation().turns[..3].to_vec(), ..Chat::default() };
        let prompt = tokenizer.chat_template().unwrap().render(&question, true).unwrap();
        let found = EvalPrompt::from_example(&example, &tokenizer).unwrap().unwrap();
        assert_eq!(found.prompt, tokenizer.encode(&prompt, false).unwrap());
        assert_eq!(found.answer, "four é");
    }

    #[test]
    fn cut_and_fully_trained_examples_have_no_prompt() {
        let tokenizer = TestTokenizer::default().load();
        let whole = encode(&tokenizer, &conversation(), TrainOn::Assistant);
        let mut cut = whole.clone();
        let end = cut.loss_mask.iter().rposition(|&counts| counts).unwrap();
        cut.tokens.truncate(end);
        cut.loss_mask.truncate(end);
        let all = encode(&tokenizer, &conversation(), TrainOn::All);
        let has_prompt =
            [cut, whole, all].map(|example| EvalPrompt::from_example(&example, &tokenizer).unwrap().is_some());
        assert_eq!(has_prompt, [false, true, false]);
    }
}
