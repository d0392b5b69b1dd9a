//! Messages to tokens, and which of them the assistant wrote: the loss mask of a chat row.
//!
//! The conversation is rendered and tokenised whole, as the model will meet it; characters of the assistant are found
//! in the text and mapped to tokens through the tokenizer's offsets. A template with `{% generation %}` blocks says
//! itself which text is the assistant's. For others, message `i` is what rendering up to and with it adds to rendering
//! up to it with the generation prompt, and that is checked, not assumed.
//!
//! Gives up templates without such blocks that rewrite earlier turns (dropping earlier reasoning, say): they are
//! refused.

use std::ops::Range;

use crate::chat_template::{ChatTemplate, Message};
use crate::dataset::Example;
use crate::error::DataError;
use crate::read::TrainOn;
use crate::tokenizer::Tokenizer;

/// The role whose text is trained with [`TrainOn::Assistant`].
const ASSISTANT: &str = "assistant";

/// Renders and tokenises a conversation and marks its trained tokens; the first token never is.
///
/// Errors: no chat template, a template that refuses the messages or whose assistant text cannot be located, a doubled
/// beginning-of-text token.
pub(crate) fn encode_conversation(
    tokenizer: &Tokenizer,
    messages: &[Message],
    train_on: TrainOn,
) -> Result<Example, DataError> {
    let template = tokenizer.chat_template()?;
    let (text, spans) = match train_on {
        TrainOn::All => (template.render(messages, false)?, Vec::new()),
        TrainOn::Assistant => assistant_spans(template, messages)?,
    };
    let encoding = tokenizer.encode_with_offsets(&text)?;
    let tokens = encoding.get_ids().to_vec();
    if let (Some(bos), Some(token)) = (tokenizer.bos_token_id(), tokenizer.bos_token())
        && tokens.starts_with(&[bos, bos])
    {
        return Err(DataError::DoubledBos { token: token.to_owned() });
    }
    let mut trained = vec![train_on == TrainOn::All; tokens.len()];
    for span in spans {
        let range = trained_range(tokenizer, &text, &tokens, encoding.get_offsets(), span);
        trained[range].fill(true);
    }
    if let Some(first) = trained.first_mut() {
        *first = false;
    }
    Ok(Example { tokens, trained })
}

/// The rendered conversation and the byte ranges that the assistant wrote, in order.
fn assistant_spans(template: &ChatTemplate, messages: &[Message]) -> Result<(String, Vec<Range<usize>>), DataError> {
    let (text, blocks) = template.render_marked(messages, false)?;
    if template.marks_generation() {
        return Ok((text, blocks));
    }
    let mut spans = Vec::new();
    for (index, _) in messages.iter().enumerate().filter(|(_, message)| message.role == ASSISTANT) {
        let before = template.render(&messages[..index], true)?;
        check_prefix(&before, &text, index, "before it")?;
        let end = if index + 1 == messages.len() {
            text.len()
        } else {
            let with = template.render(&messages[..=index], false)?;
            check_prefix(&with, &text, index, "up to it")?;
            check_prefix(&before, &with, index, "before it")?;
            with.len()
        };
        spans.push(before.len()..end);
    }
    Ok((text, spans))
}

fn check_prefix(prefix: &str, whole: &str, index: usize, name: &'static str) -> Result<(), DataError> {
    if whole.starts_with(prefix) {
        return Ok(());
    }
    let same = prefix.chars().zip(whole.chars()).take_while(|(left, right)| left == right);
    let byte = same.map(|(character, _)| character.len_utf8()).sum();
    let excerpt = |text: &str| text[byte..].chars().take(24).collect();
    Err(DataError::NotAPrefix {
        message: index + 1,
        prefix: name,
        byte,
        found: excerpt(prefix),
        expected: excerpt(whole),
    })
}

/// The tokens of an assistant's span. A token that crosses the edge of the span belongs to it. The span ends with the
/// special token that closes the turn: white space behind it is the template's, nobody has to write it, and a closing
/// token right behind the span is the assistant's to write even where the template's block leaves it out.
fn trained_range(
    tokenizer: &Tokenizer,
    text: &str,
    tokens: &[u32],
    offsets: &[(usize, usize)],
    span: Range<usize>,
) -> Range<usize> {
    let first = offsets.partition_point(|&(_, end)| end <= span.start);
    let last = offsets.partition_point(|&(start, _)| start < span.end).max(first);
    let is_special = |&index: &usize| tokenizer.is_special(tokens[index]);
    let closing = (first..last).rev().find(is_special);
    if let Some(closing) = closing
        && text.get(offsets[closing].1..span.end).is_none_or(|behind| behind.trim().is_empty())
    {
        return first..closing + 1;
    }
    let closes_behind = last < tokens.len() && is_special(&last);
    first..if closes_behind { last + 1 } else { last }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_tokenizer::{TEMPLATE, TestTokenizer};

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        turns.iter().map(|&(role, content)| Message { role: role.to_owned(), content: content.to_owned() }).collect()
    }

    /// The text of the trained tokens, runs separated by `|`.
    fn trained_text(tokenizer: &Tokenizer, example: &Example) -> String {
        let runs = example.tokens.iter().zip(&example.trained).collect::<Vec<_>>();
        let runs = runs.chunk_by(|left, right| left.1 == right.1).filter(|run| *run[0].1);
        let text = runs.map(|run| {
            let ids = run.iter().map(|(id, _)| **id).collect::<Vec<_>>();
            tokenizer.decode(&ids, false).unwrap()
        });
        text.collect::<Vec<_>>().join("|")
    }

    fn trained_by(template: &str, turns: &[(&str, &str)]) -> Result<String, DataError> {
        let tokenizer = TestTokenizer { template: Some(template), ..TestTokenizer::default() }.load();
        let example = encode_conversation(&tokenizer, &messages(turns), TrainOn::Assistant)?;
        Ok(trained_text(&tokenizer, &example))
    }

    const TWO_TURNS: [(&str, &str); 5] =
        [("system", "s"), ("user", "q1"), ("assistant", "é1 "), ("user", "q2"), ("assistant", "a2")];

    #[test]
    fn assistant_text_and_its_closing_token_are_trained_and_nothing_else() {
        assert_eq!(trained_by(TEMPLATE, &TWO_TURNS).unwrap(), "é1 </s>|a2</s>");
    }

    #[test]
    fn generation_blocks_give_the_same_mask_as_prefixes() {
        let template = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n\
            {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n\
            {% else %}{{ m.content }}{{ eos_token }}\n{% endif %}\
            {% endfor %}";
        assert_eq!(trained_by(template, &TWO_TURNS).unwrap(), "é1 </s>|a2</s>");
        let open = template.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}");
        assert_eq!(trained_by(&open, &TWO_TURNS).unwrap(), "é1 </s>|a2</s>");
    }

    #[test]
    fn train_on_all_trains_everything_but_the_first_token() {
        let tokenizer = TestTokenizer::default().load();
        let example = encode_conversation(&tokenizer, &messages(&TWO_TURNS), TrainOn::All).unwrap();
        assert!(!example.trained[0] && example.trained[1..].iter().all(|&trained| trained));
    }

    #[test]
    fn template_that_rewrites_earlier_turns_is_refused() {
        let template = "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}[last]{% endif %}\
            {{ m.content }}{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let error = trained_by(template, &TWO_TURNS).unwrap_err();
        assert!(matches!(error, DataError::NotAPrefix { message: 3, prefix: "before it", .. }), "{error}");
        assert!(error.to_string().contains("{% generation %}"), "{error}");
    }

    #[test]
    fn doubled_bos_is_refused() {
        let template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}");
        let error = trained_by(&template, &TWO_TURNS).unwrap_err();
        assert!(matches!(error, DataError::DoubledBos { .. }), "{error}");
    }

    #[test]
    fn tokenizer_without_template_says_where_it_looked_and_what_to_do() {
        let tokenizer = TestTokenizer { template: None, ..TestTokenizer::default() }.load();
        let error = encode_conversation(&tokenizer, &messages(&TWO_TURNS), TrainOn::All).unwrap_err().to_string();
        for word in ["chat_template.jinja", "tokenizer_config.json", "chat_template.json", "instruction-tuned"] {
            assert!(error.contains(word), "{error}");
        }
    }
}
