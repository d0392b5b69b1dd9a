//! What a template writes between the contents of messages, learned once for each sequence of roles.
//!
//! Most templates put every content, as it is or trimmed, between texts that depend on the roles alone. Those texts, and
//! where in them an answer begins and ends, are found once, by marks on a conversation of our own with the same roles. A
//! conversation of which the rendered text is exactly those texts with its contents between them is then located by
//! comparing, not by rendering it again. Whatever differs by a byte, and every message that is more than a role and a
//! text, is left to the marks. Gives up learning more than [`MOST`] sequences of roles, and
//! long ones.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use super::{Finder, Scene, THOUGHT_END, common_prefix, core};
use crate::chat_template::is_space;
use crate::mask::{ASSISTANT, Span};
use crate::shape::{Chat, Turn};

/// Sequences of roles that are remembered, of so many messages at most: some hundred bytes for each message.
const MOST: usize = 1024;
const MOST_MESSAGES: usize = 64;

/// The skeletons of a template, shared by threads.
#[derive(Debug, Default)]
pub(crate) struct Skeletons(RwLock<HashMap<String, Option<Arc<Skeleton>>>>);

impl Clone for Skeletons {
    /// None yet: a copy of a template may come to see another date.
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// What a template makes of a sequence of roles.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Skeleton {
    /// By message: the text before its content. `None` where the template writes nothing of the message.
    before: Vec<Option<String>>,
    /// The text behind the last content.
    end: String,
    /// By message: where an answer begins and ends. `None` for messages that are not the assistant's, and where it cannot
    /// be told.
    answers: Vec<Option<Range<Edge>>>,
}

/// A place in the text before the content of a message, or behind the last content: bytes from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Edge {
    text: usize,
    offset: usize,
}

impl Skeletons {
    /// The skeleton of a conversation; none if its messages are more than texts, or the template is of another kind.
    pub(super) fn of(&self, scene: &Scene<'_>) -> Option<Arc<Skeleton>> {
        let chat = scene.chat;
        let is_short = chat.turns.len() <= MOST_MESSAGES;
        if !is_short || chat.tools.is_some() || chat.documents.is_some() || !chat.turns.iter().all(is_text) {
            return None;
        }
        let key = key_of(chat);
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(skeleton) = known.get(&key) {
            return skeleton.clone();
        }
        if known.len() >= MOST {
            return None;
        }
        drop(known);
        let skeleton = Skeleton::learn(scene).map(Arc::new);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, skeleton.clone());
        skeleton
    }

    /// Forgets all of them, because what the template sees has changed.
    pub(crate) fn clear(&mut self) {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Roles and variables: all that a skeleton depends on.
fn key_of(chat: &Chat) -> String {
    let mut key = String::with_capacity(16 * chat.turns.len());
    for turn in &chat.turns {
        // With its length: no role can pass for two.
        key.push_str(&turn.role().len().to_string());
        key.push(':');
        key.push_str(turn.role());
    }
    if !chat.arguments.is_empty() {
        key.extend(serde_json::to_string(&chat.arguments));
    }
    key
}

/// Whether a message is a role and a text that no template takes apart.
fn is_text(turn: &Turn) -> bool {
    turn.message.len() == 2
        && turn.message.contains_key("role")
        && turn.content().is_some_and(|content| !content.contains(THOUGHT_END))
        && core(turn).is_some()
}

impl Skeleton {
    fn learn(scene: &Scene<'_>) -> Option<Self> {
        let turn = |(index, turn): (usize, &Turn)| Turn::new(turn.role(), &format!("text {index}"));
        let turns = scene.chat.turns.iter().enumerate().map(turn).collect();
        let chat = Chat { turns, arguments: scene.chat.arguments.clone(), ..Chat::default() };
        let own = Scene::new(scene.template, &chat);
        let (text, _) = own.render(&own.plain, false).ok()?;
        let finder = Finder::new(&own, &text);
        let (_, positions, written) = finder.marks.as_ref()?;
        let mut before = Vec::new();
        let mut texts: Vec<(usize, Range<usize>)> = Vec::new();
        let mut at = 0;
        for (index, position) in positions.iter().enumerate() {
            let Some(content) = position else {
                // Written twice, or not whole: no comparison tells where.
                if written[index] {
                    return None;
                }
                before.push(None);
                continue;
            };
            before.push(Some(text.get(at..content.start)?.to_owned()));
            texts.push((index, at..content.start));
            at = content.end;
        }
        texts.push((chat.turns.len(), at..text.len()));
        let edge = |at: usize| {
            let (index, range) = texts.iter().find(|(_, range)| range.start <= at && at <= range.end)?;
            Some(Edge { text: *index, offset: at - range.start })
        };
        let answer = |index: usize| {
            let range = (chat.turns[index].role() == ASSISTANT).then(|| finder.assistant(index).ok())??;
            Some(edge(range.start)?..edge(range.end)?)
        };
        let answers = (0..chat.turns.len()).map(answer).collect();
        Some(Self { before, end: text[at..].to_owned(), answers })
    }

    /// Whether the conversation has a system message of which the template writes nothing.
    pub(crate) fn leaves_out_system(&self, chat: &Chat) -> bool {
        let system = chat.turns.iter().position(|turn| turn.role() == "system");
        system.is_some_and(|system| self.before[system].is_none())
    }

    /// Where the contents of a conversation's messages stand in its text. `None` if the text is not made of this skeleton.
    pub(crate) fn fit<'a>(&'a self, chat: &Chat, text: &str) -> Option<Fitted<'a>> {
        let mut starts = vec![0; chat.turns.len() + 1];
        let mut contents = vec![None; chat.turns.len()];
        let (mut at, mut space) = (0, "");
        for (index, (turn, before)) in chat.turns.iter().zip(&self.before).enumerate() {
            let Some(before) = before else { continue };
            let content = turn.content()?;
            let core = core(turn)?;
            starts[index] = behind_space(text, at, space, before)?;
            at = starts[index] + before.len();
            let rest = text[at..].trim_start_matches(is_space);
            let kept = &text[at..text.len() - rest.len()];
            if !content[..core.start].ends_with(kept) || !rest.starts_with(&content[core.clone()]) {
                return None;
            }
            at += kept.len();
            contents[index] = Some(at..at + core.len());
            at += core.len();
            space = &content[core.end..];
        }
        let end = behind_space(text, at, space, &self.end)?;
        starts[chat.turns.len()] = end;
        (end + self.end.len() == text.len()).then_some(Fitted { skeleton: self, starts, contents })
    }
}

/// Where `wanted` begins: at `at`, or behind as much of the white space of a content as the template keeps. `None` if
/// nowhere, or if there are several such places.
fn behind_space(text: &str, at: usize, space: &str, wanted: &str) -> Option<usize> {
    let rest = &text[at..];
    let kept = common_prefix(space, rest);
    let ends = space[..kept].char_indices().map(|(end, _)| end).chain([kept]);
    let mut places = ends.filter(|&end| rest[end..].starts_with(wanted));
    let first = places.next()?;
    places.next().is_none().then_some(at + first)
}

/// A skeleton in a text.
pub(crate) struct Fitted<'a> {
    skeleton: &'a Skeleton,
    /// Where the text before each content begins, and that behind the last.
    starts: Vec<usize>,
    contents: Vec<Option<Range<usize>>>,
}

impl Fitted<'_> {
    /// What of a message is trained if it is selected: an answer with the end of its turn, of others the content. `None`
    /// if that cannot be told apart.
    pub(crate) fn span(&self, index: usize, chat: &Chat) -> Option<Span> {
        let content = self.contents[index].clone()?;
        if chat.turns[index].role() != ASSISTANT {
            return Some(content.into());
        }
        let place = |edge: Edge| self.starts[edge.text] + edge.offset;
        let answer = self.skeleton.answers[index].as_ref()?;
        // Before an answer that comes first there is no prompt: it begins with its content, as it does by marks.
        let start = if index == 0 { content.start } else { place(answer.start) };
        Some(Span { range: start..place(answer.end), content_end: Some(content.end) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_template::ChatTemplate;
    use crate::test_tokenizer::{TEMPLATE, TestTokenizer};

    fn chat(turns: &[(&str, &str)]) -> Chat {
        Chat { turns: turns.iter().map(|&(role, content)| Turn::new(role, content)).collect(), ..Chat::default() }
    }

    fn template(source: &str) -> ChatTemplate {
        let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), format!("<{name}>")));
        ChatTemplate::new(source, "chat_template.jinja".as_ref(), tokens.into()).unwrap()
    }

    /// The spans by comparing, and by marks.
    fn both(template: &ChatTemplate, chat: &Chat) -> (Option<Vec<Span>>, Vec<Span>) {
        let scene = Scene::new(template, chat);
        let (text, _) = scene.render(&scene.plain, false).unwrap();
        let skeleton = template.skeletons().of(&scene);
        let fitted = skeleton.as_ref().and_then(|skeleton| skeleton.fit(chat, &text));
        let assistants = (0..chat.turns.len()).filter(|&index| chat.turns[index].role() == ASSISTANT);
        let compared = fitted.and_then(|fitted| assistants.clone().map(|index| fitted.span(index, chat)).collect());
        let finder = Finder::new(&scene, &text);
        let span = |index| Span { range: finder.assistant(index).unwrap(), content_end: finder.content_end(index) };
        (compared, assistants.map(span).collect())
    }

    const TURNS: [(&str, &str); 5] =
        [("system", "s"), ("user", " q1\n"), ("assistant", "\n é1 "), ("user", "text 3"), ("assistant", "assistant")];

    #[test]
    fn comparing_gives_the_spans_that_marks_give() {
        let trimmed = TEMPLATE.replace("message.content", "message.content | trim");
        assert_ne!(trimmed, TEMPLATE);
        // The last answer has another header than the others.
        let last = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think>\n\n\
            </think>\n\n{% endif %}{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
        for source in [TEMPLATE, &trimmed, last] {
            let template = template(source);
            for turns in [&TURNS[..], &TURNS[1..], &TURNS[1..3], &TURNS[3..], &TURNS[2..]] {
                let (compared, marked) = both(&template, &chat(turns));
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
                let chat = chat(turns);
                let scene = Scene::new(&template, &chat);
                // Some refuse a system message.
                if scene.render(&scene.plain, false).is_ok() {
                    let (compared, marked) = both(&template, &chat);
                    assert!(compared.as_ref().is_none_or(|compared| *compared == marked), "{}", path.display());
                    compared_ones += usize::from(compared.is_some() && turns.len() == 2);
                }
            }
        }
        assert!(compared_ones * 10 >= templates * 7, "{compared_ones} of {templates}");
    }

    #[test]
    fn text_that_differs_from_the_skeleton_is_left_to_the_marks() {
        let looks_inside = "{% for m in messages %}<|{{ m.role }}|>{% if 'z' in m.content %}!{% endif %}{{ m.content }}</s>\
            {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let template = template(looks_inside);
        assert!(both(&template, &chat(&[("user", "a"), ("assistant", "b")])).0.is_some());
        let (compared, marked) = both(&template, &chat(&[("user", "z"), ("assistant", "b")]));
        assert_eq!((compared, marked.len()), (None, 1));
    }

    #[test]
    fn messages_that_are_more_than_texts_have_no_skeleton() {
        let template = template(TEMPLATE);
        let plain = chat(&TURNS[1..3]);
        let has_one = |chat: &Chat| template.skeletons().of(&Scene::new(&template, chat)).is_some();
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
    fn roles_with_a_line_end_are_not_taken_for_others() {
        let template = template(TEMPLATE);
        let roles = |roles: &[&str]| chat(&roles.iter().map(|&role| (role, "t")).collect::<Vec<_>>());
        for chat in [roles(&["assistant", "user\nsystem"]), roles(&["assistant", "user", "system"])] {
            let (compared, marked) = both(&template, &chat);
            assert_eq!(compared, Some(marked));
        }
    }

    #[test]
    fn white_space_behind_a_content_costs_no_more_than_its_length() {
        let space = " ".repeat(4 << 20);
        let text = format!("{space}</s>");
        assert_eq!(behind_space(&text, 0, &space, "</s>"), Some(space.len()));
        assert_eq!(behind_space(&text, 0, &space, " "), None);
    }

    #[test]
    fn variables_of_the_template_and_its_date_have_skeletons_of_their_own() {
        let source = "{{ strftime_now('%Y') }}{% for m in messages %}<|{{ m.role }}|>{{ tone }}{{ m.content }}</s>{% endfor %}\
            {% if add_generation_prompt %}<|assistant|>{{ tone }}{% endif %}";
        let mut template = template(source);
        let mut chat = chat(&TURNS[1..3]);
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
    fn masks_of_a_tokenizer_do_not_depend_on_what_it_saw_before() {
        let chats = [chat(&TURNS), chat(&TURNS[1..]), chat(&TURNS[1..3])];
        let tokenizer = TestTokenizer::default().load();
        for chat in chats.iter().chain(&chats) {
            let encode = |tokenizer| {
                crate::conversation::encode_chat(tokenizer, chat, crate::mask::TrainOn::Assistant, true)
                    .unwrap()
                    .example
            };
            assert_eq!(encode(&tokenizer), encode(&TestTokenizer::default().load()));
        }
    }
}
