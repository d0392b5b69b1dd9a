//! Learns a template's skeleton by locating the contents of a synthetic conversation with the same roles.
//!
//! Trade-off: the first conversation of each sequence of roles costs a few more renders.

use std::sync::Arc;

use super::span_finder::SpanFinder;
use crate::chat_template::RenderedChat;
use crate::record_format::{ASSISTANT, Chat, Turn};
use crate::skeleton::{Part, Skeleton};

/// Returns the skeleton of a conversation; `None` if its messages are more than texts, or the template has no skeleton.
pub(super) fn skeleton_of(rendered_chat: &RenderedChat<'_>) -> Option<Arc<Skeleton>> {
    rendered_chat.template.skeletons().get_or_learn(rendered_chat.chat, || learn(rendered_chat))
}

fn learn(rendered_chat: &RenderedChat<'_>) -> Option<Skeleton> {
    let turn = |(index, turn): (usize, &Turn)| Turn::new(turn.role(), &format!("text {index}"));
    let turns = rendered_chat.chat.turns.iter().enumerate().map(turn).collect();
    let chat = Chat { turns, arguments: rendered_chat.chat.arguments.clone(), ..Chat::default() };
    let synthetic = RenderedChat::new(rendered_chat.template, &chat);
    let (text, _) = synthetic.render(&synthetic.plain, false).ok()?;
    let finder = SpanFinder::new(&synthetic, &text);
    let (_, positions, written) = finder.marks.as_ref()?;
    let (mut parts, mut at) = (Vec::new(), 0);
    for (index, position) in positions.iter().enumerate() {
        let Some(content) = position else {
            // Written twice or incompletely, so a comparison cannot locate it.
            if written[index] {
                return None;
            }
            parts.push(None);
            continue;
        };
        let before = text.get(at..content.start)?;
        let next = positions[index + 1..].iter().flatten().next().map_or(text.len(), |next| next.start);
        let answer = (chat.turns[index].role() == ASSISTANT).then(|| finder.assistant(index).ok()).flatten();
        let answer = answer
            .filter(|answer| at <= answer.start && answer.end <= next)
            .and_then(|answer| Some((content.start.checked_sub(answer.start)?, answer.end.checked_sub(content.end)?)));
        parts.push(Some(Part { text: before.to_owned(), answer }));
        at = content.end;
    }
    Some(Skeleton { parts, end: text[at..].to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_template::ChatTemplate;
    use crate::selection::Span;
    use crate::test_tokenizer::{TEMPLATE, TestTokenizer};

    fn template(source: &str) -> ChatTemplate {
        let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), format!("<{name}>")));
        ChatTemplate::new(source, "chat_template.jinja".as_ref(), tokens.into()).unwrap()
    }

    /// Returns the spans found by comparison and those found by marks.
    fn both(template: &ChatTemplate, chat: &Chat) -> (Option<Vec<Span>>, Vec<Span>) {
        let rendered_chat = RenderedChat::new(template, chat);
        let (text, _) = rendered_chat.render(&rendered_chat.plain, false).unwrap();
        let skeleton = skeleton_of(&rendered_chat);
        let spans = skeleton.and_then(|skeleton| skeleton.spans(chat, &text));
        let assistants = (0..chat.turns.len()).filter(|&index| chat.turns[index].role() == ASSISTANT);
        let compared = spans.and_then(|spans| assistants.clone().map(|index| spans[index].clone()).collect());
        let finder = SpanFinder::new(&rendered_chat, &text);
        let span = |index| Span { range: finder.assistant(index).unwrap(), content_end: finder.content_end(index) };
        (compared, assistants.map(span).collect())
    }

    const TURNS: [(&str, &str); 5] =
        [("system", "s"), ("user", " q1\n"), ("assistant", "\n é1 "), ("user", "text 3"), ("assistant", "assistant")];

    #[test]
    fn comparison_and_marks_give_the_same_spans() {
        let trimmed = TEMPLATE.replace("message.content", "message.content | trim");
        assert_ne!(trimmed, TEMPLATE);
        // The header of the last answer differs from that of the others.
        let last = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think>\n\n\
            </think>\n\n{% endif %}{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
        for source in [TEMPLATE, &trimmed, last] {
            let template = template(source);
            for turns in [&TURNS[..], &TURNS[1..], &TURNS[1..3], &TURNS[3..], &TURNS[2..]] {
                let (compared, marked) = both(&template, &Chat::new(turns));
                assert_eq!(compared, Some(marked), "{turns:?}\n{source}");
            }
        }
    }

    #[test]
    fn published_templates_have_skeletons_that_agree_with_marks() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/templates");
        let (mut compared_ones, mut templates) = (0, 0);
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let source = std::fs::read_to_string(&path).unwrap();
            let open = ["{%- generation %}", "{%- endgeneration %}", "{% generation %}", "{% endgeneration %}"];
            let source = open.iter().fold(source, |source, tag| source.replace(tag, ""));
            let template = template(&source);
            templates += 1;
            for turns in [&TURNS[..], &TURNS[1..], &TURNS[1..3]] {
                let chat = Chat::new(turns);
                let rendered_chat = RenderedChat::new(&template, &chat);
                // Some templates refuse a system message.
                if rendered_chat.render(&rendered_chat.plain, false).is_ok() {
                    let (compared, marked) = both(&template, &chat);
                    assert!(compared.as_ref().is_none_or(|compared| *compared == marked), "{}", path.display());
                    compared_ones += usize::from(compared.is_some() && turns.len() == 2);
                }
            }
        }
        assert!(compared_ones * 10 >= templates * 7, "{compared_ones} of {templates}");
    }

    #[test]
    fn text_that_differs_from_the_skeleton_is_left_to_marks() {
        let looks_inside = "{% for m in messages %}<|{{ m.role }}|>{% if 'z' in m.content %}!{% endif %}{{ m.content }}</s>\
            {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let template = template(looks_inside);
        assert!(both(&template, &Chat::new(&[("user", "a"), ("assistant", "b")])).0.is_some());
        let (compared, marked) = both(&template, &Chat::new(&[("user", "z"), ("assistant", "b")]));
        assert_eq!((compared, marked.len()), (None, 1));
    }

    #[test]
    fn messages_that_are_more_than_texts_have_no_skeleton() {
        let template = template(TEMPLATE);
        let plain = Chat::new(&TURNS[1..3]);
        let has_one = |chat: &Chat| skeleton_of(&RenderedChat::new(&template, chat)).is_some();
        assert!(has_one(&plain));
        let more: [fn(&mut Chat); 5] = [
            |chat| chat.tools = Some(Vec::new()),
            |chat| chat.documents = Some(Vec::new()),
            |chat| chat.turns[0].message.insert("name".into(), "n".into()).map_or((), drop),
            |chat| chat.turns[1] = Turn::new("assistant", "<think>t</think>a"),
            |chat| chat.turns[1] = Turn::new("assistant", " "),
        ];
        for change in more {
            let mut chat = plain.clone();
            change(&mut chat);
            assert!(!has_one(&chat));
        }
    }

    #[test]
    fn roles_with_a_line_break_are_not_confused_with_others() {
        let template = template(TEMPLATE);
        let roles = |roles: &[&str]| Chat::new(&roles.iter().map(|&role| (role, "t")).collect::<Vec<_>>());
        for chat in [roles(&["assistant", "user\nsystem"]), roles(&["assistant", "user", "system"])] {
            let (compared, marked) = both(&template, &chat);
            assert_eq!(compared, Some(marked));
        }
    }

    #[test]
    fn skeletons_depend_on_template_variables_and_the_date() {
        let source = "{{ strftime_now('%Y') }}{% for m in messages %}<|{{ m.role }}|>{{ tone }}{{ m.content }}</s>{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{{ tone }}{% endif %}";
        let mut template = template(source);
        let mut chat = Chat::new(&TURNS[1..3]);
        for date in [0, 1 << 30] {
            template.set_date(date);
            for tone in ["", "mild: "] {
                chat.arguments.insert("tone".to_owned(), tone.into());
                let (compared, marked) = both(&template, &chat);
                assert_eq!(compared, Some(marked));
            }
        }
    }

    #[test]
    fn masks_do_not_depend_on_earlier_conversations() {
        let chats = [Chat::new(&TURNS), Chat::new(&TURNS[1..]), Chat::new(&TURNS[1..3])];
        let tokenizer = TestTokenizer::default().load();
        for chat in chats.iter().chain(&chats) {
            let roles = [ASSISTANT.to_owned()];
            let selection = crate::selection::Selection::new(chat, crate::selection::TrainOn::Assistant, &roles);
            let encode =
                |tokenizer| crate::conversation::encode_chat(tokenizer, chat, &selection, true).unwrap().example;
            assert_eq!(encode(&tokenizer), encode(&TestTokenizer::default().load()));
        }
    }
}
