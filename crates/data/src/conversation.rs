//! Turns messages into tokens and their loss mask.
//!
//! The conversation is rendered and tokenized as a whole, as the model will see it. The characters of the selected messages are located in the text
//! (`locate.rs`) and mapped to tokens through the tokenizer's offsets, never by token id, so a padding token that is also the end-of-text token
//! counts in the loss where the assistant wrote it.
//! Trade-off: a token that crosses the edge of a span counts as a whole. Not supported: distinguishing text that spells a special token from the
//! token (as in transformers by default).

use std::ops::Range;

use crate::cache::Example;
use crate::error::DataError;
use crate::finding::{Finding, FindingKind};
use crate::locate::{Located, locate};
use crate::omissions::{omissions, unread_keys};
use crate::record_format::{Chat, Turn};
use crate::selection::{Selection, Span};
use crate::tokenizer::Tokenizer;

/// A tokenized record, not yet cut to length.
#[derive(Debug)]
pub(crate) struct RecordTokens {
    pub(crate) example: Example,
    /// The tokens that end a selected turn, in the loss or not.
    pub(crate) closings: Vec<usize>,
    pub(crate) is_chat: bool,
    /// Parts that the template leaves out, and empty answers.
    pub(crate) findings: Vec<Finding>,
    /// Keys of messages that the template does not write.
    pub(crate) unread_keys: Vec<String>,
}

/// Renders and tokenizes a conversation and computes its loss mask; the first token never counts. Errors: no chat template, a template that refuses
/// the messages or whose text cannot be located, a doubled beginning-of-text token.
pub(crate) fn encode_chat(
    tokenizer: &Tokenizer,
    chat: &Chat,
    selection: &Selection,
    train_end_of_turn: bool,
) -> Result<RecordTokens, DataError> {
    let template = tokenizer.chat_template_for(chat.tools.is_some())?;
    let filled = with_contents(chat);
    let (chat, located) = match (locate(template, chat, selection), &filled) {
        (Err(refused @ DataError::TemplateFailed { .. }), Some(filled)) => {
            let located = locate(template, filled, selection).ok();
            let writes_calls = |located: &Located| {
                let found = omissions(template, filled, selection, located);
                found.iter().all(|finding| finding.kind != FindingKind::ToolCallsIgnored)
            };
            (filled, located.filter(writes_calls).ok_or(refused)?)
        }
        (located, _) => (chat, located?),
    };
    let (tokens, loss_mask, closings) = if located.spans.is_empty() {
        let tokens = tokenizer.encode_plain(&located.text)?;
        let loss_mask = (0..tokens.len()).map(|index| selection.inverted && index > 0).collect();
        (tokens, loss_mask, Vec::new())
    } else {
        let encoding = tokenizer.encode_with_offsets(&located.text)?;
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let tokens = TokenOffsets { tokenizer, text: &located.text, ids, offsets };
        let (loss_mask, closings) = tokens.mask(&located.spans, selection.inverted, train_end_of_turn);
        (ids.to_vec(), loss_mask, closings)
    };
    tokenizer.refuse_doubled_bos(&tokens)?;
    let findings = omissions(template, chat, selection, &located);
    let unread_keys = unread_keys(template, chat, &located.text);
    Ok(RecordTokens { example: Example { tokens, loss_mask }, closings, is_chat: true, findings, unread_keys })
}

/// Returns the conversation with an empty content in each message that contains only tool calls; `None` if there is no such message.
///
/// Some templates refuse a message without a content. Servers pass an empty one to templates, so the model will see that.
fn with_contents(chat: &Chat) -> Option<Chat> {
    let has_calls_alone = |turn: &Turn| turn.message.contains_key("tool_calls") && turn.content().is_none();
    chat.turns.iter().any(has_calls_alone).then(|| {
        let mut filled = chat.clone();
        for turn in filled.turns.iter_mut().filter(|turn| has_calls_alone(turn)) {
            turn.message.insert("content".to_owned(), "".into());
        }
        filled
    })
}

/// A text with its tokens, for mapping characters to tokens.
pub(crate) struct TokenOffsets<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) text: &'a str,
    pub(crate) ids: &'a [u32],
    /// Byte range of each token.
    pub(crate) offsets: &'a [(usize, usize)],
}

impl TokenOffsets<'_> {
    /// Returns the tokens of a span, and the token that ends the turn, if there is one.
    ///
    /// A token that crosses the edge of the span belongs to it. The span ends with the special token that ends the turn: the white space after it
    /// belongs to the template, and an end token directly after the span belongs to the assistant even if the template's block leaves it out.
    pub(crate) fn of_span(&self, span: &Span) -> (Range<usize>, Option<usize>) {
        let range = &span.range;
        let is_special = |&index: &usize| self.tokenizer.is_special(self.ids[index]);
        let mut first = self.offsets.partition_point(|&(_, end)| end <= range.start);
        let last = self.offsets.partition_point(|&(start, _)| start < range.end).max(first);
        // A header's token may include the white space at the start of an answer; it still belongs to the header.
        while first < last && self.offsets[first].0 < range.start && is_special(&first) {
            first += 1;
        }
        let is_blank = |from: usize, to: usize| self.text.get(from..to).is_none_or(|text| text.trim().is_empty());
        if let Some(end) = span.content_end {
            let after = self.offsets.partition_point(|&(start, _)| start < end).max(first);
            let closing = (after..last).find(is_special).filter(|&closing| is_blank(end, self.offsets[closing].0));
            if closing.is_some() {
                return (first..closing.map_or(last, |closing| closing + 1), closing);
            }
        }
        let closing = (first..last).rev().find(is_special);
        if let Some(closing) = closing.filter(|&closing| is_blank(self.offsets[closing].1, range.end)) {
            return (first..closing + 1, Some(closing));
        }
        let closes_after = last < self.ids.len() && is_special(&last);
        if closes_after { (first..last + 1, Some(last)) } else { (first..last, None) }
    }

    /// Computes the loss mask of spans and the tokens that end a selected turn.
    pub(crate) fn mask(&self, spans: &[Span], inverted: bool, end_of_turn: bool) -> (Vec<bool>, Vec<usize>) {
        let mut loss_mask = vec![inverted; self.ids.len()];
        let mut closings = Vec::new();
        for span in spans.iter().filter(|span| !span.range.is_empty()) {
            let (range, closing) = self.of_span(span);
            loss_mask[range].fill(!inverted);
            if let Some(closing) = closing.filter(|_| !inverted) {
                loss_mask[closing] = end_of_turn;
                closings.push(closing);
            }
        }
        if let Some(first) = loss_mask.first_mut() {
            *first = false;
        }
        (loss_mask, closings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record_format::ASSISTANT;
    use crate::selection::TrainOn;
    use crate::test_tokenizer::{TEMPLATE, TestTokenizer};

    fn encode(
        tokenizer: &Tokenizer,
        chat: &Chat,
        train_on: TrainOn,
        end_of_turn: bool,
    ) -> Result<RecordTokens, DataError> {
        encode_chat(tokenizer, chat, &Selection::new(chat, train_on, &[ASSISTANT.to_owned()]), end_of_turn)
    }

    /// Returns the text of the loss tokens, with runs separated by `|`.
    fn loss_text(tokenizer: &Tokenizer, example: &Example) -> String {
        let runs = example.tokens.iter().zip(&example.loss_mask).collect::<Vec<_>>();
        let runs = runs.chunk_by(|left, right| left.1 == right.1).filter(|run| *run[0].1);
        let text = runs.map(|run| {
            let ids = run.iter().map(|(id, _)| **id).collect::<Vec<_>>();
            tokenizer.decode(&ids, false).unwrap()
        });
        text.collect::<Vec<_>>().join("|")
    }

    fn loss_text_with(template: &str, chat: &Chat, train_on: TrainOn, end_of_turn: bool) -> Result<String, DataError> {
        let tokenizer = TestTokenizer { template: Some(template), ..TestTokenizer::default() }.load();
        let encoded = encode(&tokenizer, chat, train_on, end_of_turn)?;
        Ok(loss_text(&tokenizer, &encoded.example))
    }

    fn loss_text_by(template: &str, turns: &[(&str, &str)]) -> Result<String, DataError> {
        loss_text_with(template, &Chat::new(turns), TrainOn::Assistant, true)
    }

    const TWO_TURNS: [(&str, &str); 5] =
        [("system", "s"), ("user", "q1"), ("assistant", "é1 "), ("user", "q2"), ("assistant", "a2")];
    /// The assistant's text in blocks, without its header.
    const BLOCKS: &str = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n\
        {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n\
        {% else %}{{ m.content }}{{ eos_token }}\n{% endif %}\
        {% endfor %}";

    #[test]
    fn only_the_assistants_text_and_its_end_count() {
        let open = BLOCKS.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}");
        for template in [TEMPLATE, BLOCKS, &open] {
            assert_eq!(loss_text_by(template, &TWO_TURNS).unwrap(), "é1 </s>|a2</s>");
        }
    }

    #[test]
    fn messages_are_selected_with_and_without_blocks() {
        let tokenizer = TestTokenizer::default().load();
        let example = encode(&tokenizer, &Chat::new(&TWO_TURNS), TrainOn::All, true).unwrap().example;
        assert!(!example.loss_mask[0] && example.loss_mask[1..].iter().all(|&trained| trained));
        for template in [TEMPLATE, BLOCKS] {
            let mut chat = Chat::new(&TWO_TURNS);
            assert_eq!(loss_text_with(template, &chat, TrainOn::Last, true).unwrap(), "a2</s>");
            assert_eq!(loss_text_with(template, &chat, TrainOn::Last, false).unwrap(), "a2");
            chat.turns[4].train = Some(false);
            assert_eq!(loss_text_with(template, &chat, TrainOn::Assistant, true).unwrap(), "é1 </s>");
            chat.turns[3].train = Some(true);
            assert_eq!(loss_text_with(template, &chat, TrainOn::Assistant, true).unwrap(), "é1 </s>|q2</s>");
            let all = loss_text_with(template, &chat, TrainOn::All, true).unwrap();
            assert!(all.contains("q2</s>") && all.contains("<|user|>") && !all.contains("a2"), "{all}");
        }
    }

    #[test]
    fn a_template_that_rewrites_earlier_turns_is_supported() {
        // The header differs for the last turn, and reasoning is removed from earlier ones.
        let template = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>\n\n\
            </think>{% endif %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let turns = [("user", "q1"), ("assistant", "t</think>a1"), ("user", "q2"), ("assistant", "a2")];
        assert_eq!(loss_text_by(template, &turns).unwrap(), "a1</s>|<think>\n\n</think>a2</s>");
    }

    #[test]
    fn a_template_that_reads_and_rewrites_is_refused() {
        let template = "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}[last]{% endif %}\
            {{ m.content[1:] }}{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let error = loss_text_by(template, &TWO_TURNS).unwrap_err();
        let DataError::MaskNotFound(reason) = error else { panic!("{error}") };
        for words in ["in message 3:", "the messages before it", "{% generation %}"] {
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn tool_calls_count_in_the_loss_up_to_the_end_of_the_turn() {
        let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\
            {% for call in m.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments | tojson }}]{% endfor %}\
            {{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let mut chat = chat_with_call(None);
        chat.turns[1].message.insert("content".to_owned(), "".into());
        let trained = || loss_text_with(template, &chat, TrainOn::Assistant, true).unwrap();
        assert_eq!(trained(), "[f{\"x\": 1}]</s>|It is 18.</s>");
        chat.turns[1].message.remove("content");
        assert_eq!(loss_text_with(template, &chat, TrainOn::Last, true).unwrap(), "[f{\"x\": 1}]</s>|It is 18.</s>");
    }

    /// Returns a question, a message that only calls `f`, its result, and an answer.
    fn chat_with_call(reasoning: Option<&str>) -> Chat {
        let mut chat = Chat::new(&[("user", "q"), ("assistant", ""), ("tool", "18"), ("assistant", "It is 18.")]);
        let call = serde_json::json!([{ "function": { "name": "f", "arguments": { "x": 1 } } }]);
        chat.turns[1].message.shift_remove("content");
        chat.turns[1].message.insert("tool_calls".to_owned(), call);
        chat.turns[1].message.extend(reasoning.map(|text| ("thinking".to_owned(), text.into())));
        chat
    }

    #[test]
    fn calls_get_an_empty_content_only_where_needed() {
        let template = "{% for m in messages %}<|{{ m.role }}|>{{ '' + m.content }}\
            {% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}{{ eos_token }}\n{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let loss = |template: &str| loss_text_with(template, &chat_with_call(None), TrainOn::Assistant, true);
        assert_eq!(loss(template).unwrap(), "[f]</s>|It is 18.</s>");
        let tells = template.replace("{{ '' + m.content }}", "{{ m.content is defined }}");
        assert!(loss(&tells).unwrap().starts_with("False[f]"));
        let ignores = template.replace("[{{ call.function.name }}]", "");
        assert!(matches!(loss(&ignores), Err(DataError::TemplateFailed { .. })));
    }

    #[test]
    fn a_call_with_reasoning_in_its_last_turn_is_located() {
        let template = "{% for m in messages %}<|{{ m.role }}|>\
            {% if m.tool_calls and loop.last and m.thinking %}reason {{ m.thinking }}{{ eos_token }}<|assistant|>{% endif %}\
            {% for call in m.tool_calls or [] %}to {{ call.function.name }}</t>{% else %}{{ m.content }}{{ eos_token }}{% endfor %}\
            {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let loss = loss_text_with(template, &chat_with_call(Some("so")), TrainOn::Assistant, true);
        assert_eq!(loss.unwrap(), "to f</t>|It is 18.</s>");
    }

    #[test]
    fn an_omitted_message_of_any_role_is_reported() {
        let skip = |template: &str, header: &str, role: &str| {
            template.replace(header, &format!("{{% if m.role == '{role}' %}}{{% continue %}}{{% endif %}}{header}"))
        };
        let plain = TEMPLATE.replace("message in", "m in").replace("message.", "m.");
        for template in [&plain, BLOCKS] {
            for (role, omitted) in [("system", 1), ("user", 2), ("none", 0)] {
                let template = skip(template, "<|{{ m.role }}|>", role);
                let tokenizer = TestTokenizer { template: Some(&template), ..TestTokenizer::default() }.load();
                let chat = Chat::new(&TWO_TURNS);
                for train_on in [TrainOn::Assistant, TrainOn::All] {
                    let found = encode(&tokenizer, &chat, train_on, true).unwrap().findings;
                    let kinds: Vec<_> = found.iter().map(|finding| finding.kind).collect();
                    let expected = vec![FindingKind::MessageIgnored; usize::from(omitted > 0)];
                    assert_eq!(kinds, expected, "{train_on:?} {role}\n{template}");
                    assert!(found.iter().all(|finding| finding.detail.contains(&format!("of {omitted} message"))));
                }
            }
        }
    }

    #[test]
    fn a_header_with_the_answers_space_does_not_count() {
        let folder = TestTokenizer { template: Some(TEMPLATE), ..TestTokenizer::default() }.write();
        let path = folder.path().join("tokenizer.json");
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for token in json["added_tokens"].as_array_mut().unwrap() {
            token["rstrip"] = true.into();
        }
        std::fs::write(&path, json.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let chat = Chat::new(&[("user", "q"), ("assistant", "\n Sure")]);
        let encoded = encode(&tokenizer, &chat, TrainOn::Assistant, true).unwrap();
        assert_eq!(loss_text(&tokenizer, &encoded.example), "Sure</s>");
    }
}
