//! One chat of the quickstart: a question and its answer, as a line of JSON.
//!
//! Not supported: more than two messages; the quickstart teaches single answers.

use super::tokenizer::json_string;

/// One question and its answer.
pub(super) struct Chat {
    pub(super) question: String,
    pub(super) answer: String,
}

impl Chat {
    /// The line of a JSONL file, in the `messages` layout.
    pub(super) fn json_line(&self) -> String {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":{}}},{{\"role\":\"assistant\",\"content\":{}}}]}}\n",
            json_string(&self.question),
            json_string(&self.answer)
        )
    }
}
