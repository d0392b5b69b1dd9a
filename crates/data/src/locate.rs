//! Which characters of a rendered conversation come from which message.
//!
//! A template with `{% generation %}` blocks says itself what is the assistant's. For others the text is compared with what
//! the template is known to write between contents (`skeleton.rs`). Where it differs, the conversation is rendered a second
//! time with marks around every content, which must give the same text but for the marks. An assistant's span
//! then begins where the text that a generation prompt puts behind the message before it ends, and goes to where the
//! conversation cut behind it would end. So a template may rewrite earlier turns (dropping their reasoning, say) and is
//! still understood, because only the text between two messages is compared. Where marks change what a template does,
//! whole beginnings are compared instead, and that is checked, not assumed.
//!
//! Gives up templates that do both: look into contents and rewrite earlier turns. They are refused, with advice.

mod skeleton;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use minijinja::Value;
use serde_json::Value as Json;

use crate::chat_template::{ChatTemplate, TemplateInput, Variables, find_mark, is_space, to_value};
use crate::error::DataError;
use crate::mask::{ASSISTANT, Selection, Span};
use crate::shape::{Chat, Turn};

pub(crate) use skeleton::Skeletons;

/// Marks around a content: a kind, the message's number, an end. Code points that Unicode promises never to assign.
const CONTENT_START: char = '\u{FDD2}';
const CONTENT_END: char = '\u{FDD3}';
const MARK_END: char = '\u{FDD5}';
/// Closes the reasoning inside a content. Templates take contents apart there.
const THOUGHT_END: &str = "</think>";
/// Characters that the header of a message ends with.
const HEADER_END: [char; 4] = ['>', ']', ':', '\n'];

/// A rendered conversation and what of it is trained.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Located {
    /// The text.
    pub(crate) text: String,
    /// Where the selected messages stand, in order.
    pub(crate) spans: Vec<Span>,
    /// The template did not write a system message that the conversation has.
    pub(crate) system_ignored: bool,
}

/// Renders a conversation and finds the text of the selected messages.
///
/// Errors: the template refuses the messages, or the text of one cannot be told apart.
pub(crate) fn locate(template: &ChatTemplate, chat: &Chat, selection: &Selection) -> Result<Located, DataError> {
    let scene = Scene::new(template, chat);
    let (text, blocks) = scene.render(&scene.plain, false)?;
    if !selection.turns.contains(&true) {
        let system_ignored = system_ignored(&scene, &text);
        return Ok(Located { text, spans: Vec::new(), system_ignored });
    }
    if template.marks_generation() && selection.is_every_assistant(chat) {
        let spans = blocks.into_iter().map(Span::from).collect();
        let system_ignored = system_ignored(&scene, &text);
        return Ok(Located { text, spans, system_ignored });
    }
    if !template.marks_generation()
        && let Some(located) = by_comparing(&scene, &text, selection)
    {
        return Ok(Located { text, ..located });
    }
    let (spans, system_ignored) = by_marks(&scene, &text, &blocks, selection)?;
    Ok(Located { text, spans, system_ignored })
}

/// Whether the conversation has a system message of which the template writes nothing, where nothing else is looked for.
fn system_ignored(scene: &Scene<'_>, text: &str) -> bool {
    scene.chat.turns.iter().any(|turn| turn.role() == "system")
        && match scene.template.skeletons().of(scene) {
            Some(skeleton) => skeleton.leaves_out_system(scene.chat),
            None => Finder::new(scene, text).system_ignored(),
        }
}

/// By what the template is known to write between contents. The text is left empty.
fn by_comparing(scene: &Scene<'_>, text: &str, selection: &Selection) -> Option<Located> {
    let skeleton = scene.template.skeletons().of(scene)?;
    let fitted = skeleton.fit(scene.chat, text)?;
    let selected = (0..scene.chat.turns.len()).filter(|&index| selection.turns[index]);
    let spans = selected.map(|index| fitted.span(index, scene.chat)).collect::<Option<_>>()?;
    Some(Located { text: String::new(), spans, system_ignored: skeleton.leaves_out_system(scene.chat) })
}

/// By rendering the conversation again, with marks around its contents.
fn by_marks(
    scene: &Scene<'_>,
    text: &str,
    blocks: &[Range<usize>],
    selection: &Selection,
) -> Result<(Vec<Span>, bool), DataError> {
    let (template, chat) = (scene.template, scene.chat);
    let finder = Finder::new(scene, text);
    let assistants: Vec<usize> = (0..chat.turns.len()).filter(|&index| chat.turns[index].role() == ASSISTANT).collect();
    let mut spans = Vec::new();
    for index in (0..chat.turns.len()).filter(|&index| selection.turns[index]) {
        match assistants.binary_search(&index) {
            Err(_) => spans.push(finder.content(index)?.into()),
            Ok(_) if !template.marks_generation() => {
                spans.push(Span { range: finder.assistant(index)?, content_end: finder.content_end(index) });
            }
            Ok(number) if blocks.len() == assistants.len() => spans.push(blocks[number].clone().into()),
            Ok(_) => spans.extend(finder.blocks_of(index, blocks)?.into_iter().map(Span::from)),
        }
    }
    Ok((spans, finder.system_ignored()))
}

/// A conversation as the engine's values.
struct Scene<'a> {
    template: &'a ChatTemplate,
    chat: &'a Chat,
    variables: Variables<'a>,
    plain: Vec<Value>,
}

impl<'a> Scene<'a> {
    fn new(template: &'a ChatTemplate, chat: &'a Chat) -> Self {
        let input = TemplateInput {
            tools: chat.tools.as_deref(),
            documents: chat.documents.as_deref(),
            arguments: Some(&chat.arguments),
            ..TemplateInput::default()
        };
        let plain = chat.turns.iter().map(|turn| to_value(&turn.message, None)).collect();
        Self { template, chat, variables: Variables::new(input), plain }
    }

    fn render(&self, messages: &[Value], prompt: bool) -> Result<(String, Vec<Range<usize>>), DataError> {
        self.template.render_marked(messages, &self.variables, prompt)
    }

    /// The messages with marks around their contents.
    fn marked(&self) -> Vec<Value> {
        let mark = |(index, (turn, plain)): (usize, (&Turn, &Value))| {
            let Some(core) = core(turn) else { return plain.clone() };
            let content = turn.content().unwrap_or_default();
            let (before, said, behind) = (&content[..core.start], &content[core.clone()], &content[core.end..]);
            let marked =
                format!("{before}{CONTENT_START}{index}{MARK_END}{said}{CONTENT_END}{index}{MARK_END}{behind}");
            to_value(&turn.message, Some(&marked))
        };
        self.chat.turns.iter().zip(&self.plain).enumerate().map(mark).collect()
    }
}

/// The part of a content that no template trims or takes apart: without white space at the ends and without reasoning.
/// `None` if nothing is left, or if it holds the marks themselves.
fn core(turn: &Turn) -> Option<Range<usize>> {
    let content = turn.content()?;
    let thought = content.rfind(THOUGHT_END).map_or(0, |thought| thought + THOUGHT_END.len());
    let said = content[thought..].trim_start_matches(is_space);
    let start = content.len() - said.len();
    let end = start + said.trim_end_matches(is_space).len();
    let has_marks = find_mark(content, &[CONTENT_START, CONTENT_END, MARK_END]).is_some();
    (start < end && !has_marks).then_some(start..end)
}

/// Where each message's content stands in a text, where it does.
type Positions = Vec<Option<Range<usize>>>;

/// Removes the marks and gives the byte range between those of each of `turns` messages. A content that is written twice
/// or not whole has none. The last value says which messages are written at all.
fn take_marks(marked: &str, turns: usize) -> (String, Positions, Vec<bool>) {
    let mut text = String::with_capacity(marked.len());
    let (mut starts, mut ends) = (vec![Vec::new(); turns], vec![Vec::new(); turns]);
    let mut rest = marked;
    while let Some(at) = find_mark(rest, &[CONTENT_START, CONTENT_END]) {
        text.push_str(&rest[..at]);
        let is_start = rest[at..].starts_with(CONTENT_START);
        let behind = &rest[at + CONTENT_START.len_utf8()..];
        let Some((number, behind)) = behind.split_once(MARK_END) else {
            rest = behind;
            continue;
        };
        if let Some(index) = number.parse::<usize>().ok().filter(|&index| index < turns) {
            let edges = if is_start { &mut starts } else { &mut ends };
            edges[index].push(text.len());
        }
        rest = behind;
    }
    text.push_str(rest);
    let range = |(starts, ends): (Vec<usize>, Vec<usize>)| match (starts.as_slice(), ends.as_slice()) {
        (&[start], &[end]) if start <= end => Some(start..end),
        _ => None,
    };
    let written = starts.iter().map(|starts| !starts.is_empty()).collect();
    (text, starts.into_iter().zip(ends).map(range).collect(), written)
}

/// Finds the text of messages in a rendered conversation.
struct Finder<'a> {
    scene: &'a Scene<'a>,
    /// The conversation, rendered.
    text: &'a str,
    /// The messages with marks, where their contents stand, and whether they do; `None` where marks change what the
    /// template does.
    marks: Option<(Vec<Value>, Positions, Vec<bool>)>,
    /// What the template writes behind a message of a role and before an answer.
    prompts: RefCell<HashMap<&'a str, String>>,
    /// What it writes behind an answer without calls of tools.
    closing: RefCell<Option<String>>,
}

impl<'a> Finder<'a> {
    fn new(scene: &'a Scene<'a>, text: &'a str) -> Self {
        let marked = scene.marked();
        let marks = scene.render(&marked, false).ok().and_then(|(rendered, _)| {
            let (unmarked, positions, written) = take_marks(&rendered, marked.len());
            (unmarked == text).then_some((marked, positions, written))
        });
        Self { scene, text, marks, prompts: RefCell::default(), closing: RefCell::default() }
    }

    fn position(&self, index: usize) -> Option<Range<usize>> {
        self.marks.as_ref()?.1.get(index)?.clone()
    }

    /// Where the content of an answer ends, if only the end of the turn comes behind it.
    fn content_end(&self, index: usize) -> Option<usize> {
        self.position(index).filter(|_| !self.calls_tools(index)).map(|content| content.end)
    }

    /// Whether the conversation has a system message of which the template writes nothing.
    fn system_ignored(&self) -> bool {
        let is_said = |turn: &Turn| turn.role() == "system" && core(turn).is_some();
        let Some((_, _, written)) = &self.marks else { return false };
        self.scene.chat.turns.iter().position(is_said).is_some_and(|system| !written[system])
    }

    /// What the assistant writes in message `index`: from the end of the generation prompt to the end of its turn.
    fn assistant(&self, index: usize) -> Result<Range<usize>, DataError> {
        let near = match self.start(index)? {
            Some(start) => self.end(index, start)?.filter(|&end| start <= end).map(|end| start..end),
            None => None,
        };
        near.map_or_else(|| self.by_beginnings(index), Ok)
    }

    /// Where the generation prompt behind what comes before message `index` ends.
    fn start(&self, index: usize) -> Result<Option<usize>, DataError> {
        let own = self.position(index);
        if index == 0 {
            return Ok(own.map(|own| own.start));
        }
        let Some((anchor, before)) = self.anchor(index) else { return Ok(None) };
        let limit = own.as_ref().map_or(self.text.len(), |own| own.start);
        let Some(literal) = self.text.get(before.end..limit) else { return Ok(None) };
        let role = self.scene.chat.turns[anchor].role();
        let is_next = anchor + 1 == index;
        if let Some(prompt) = self.prompts.borrow().get(role).filter(|_| is_next)
            && literal.starts_with(prompt.as_str())
        {
            return Ok(Some(before.end + prompt.len()));
        }
        let Some(prompt) = self.behind(index - 1, anchor, true)? else { return Ok(None) };
        let mut common = common_prefix(&prompt, literal);
        if common < prompt.len() {
            // A generation prompt may say more than the header that earlier turns have (an opened <think>, say). What
            // is common must end where a header may end.
            common = literal[..common].rfind(HEADER_END).map_or(0, |end| end + 1);
            return Ok((common > 0).then_some(before.end + common));
        }
        if is_next {
            self.prompts.borrow_mut().insert(role, prompt);
        }
        Ok(Some(before.end + common))
    }

    /// The last message before `index` whose content stands in the text.
    fn anchor(&self, index: usize) -> Option<(usize, Range<usize>)> {
        (0..index).rev().find_map(|before| Some((before, self.position(before)?)))
    }

    /// Where the turn ends: as far as the conversation goes on as it would end behind this message.
    fn end(&self, index: usize, start: usize) -> Result<Option<usize>, DataError> {
        if index + 1 == self.scene.chat.turns.len() {
            return Ok(Some(self.text.len()));
        }
        let own = self.position(index).map(|own| (index, own));
        let is_plain = own.is_some() && !self.calls_tools(index);
        let Some((anchor, content)) = own.or_else(|| self.anchor(index)) else { return Ok(None) };
        let literal = &self.text[content.end..];
        if is_plain
            && let Some(closing) = self.closing.borrow().as_ref()
            && literal.starts_with(closing.as_str())
        {
            return Ok(Some(content.end + closing.len()));
        }
        let Some(closing) = self.behind(index, anchor, false)? else { return Ok(None) };
        let common = common_prefix(&closing, literal);
        if is_plain || common == closing.len() {
            if is_plain && common == closing.len() && common > 0 {
                *self.closing.borrow_mut() = Some(closing);
            }
            return Ok(Some(content.end + common));
        }
        // The last turn is written in another way than this one: what ends a plain answer ends this one too.
        let next = self.position(index + 1).map_or(self.text.len(), |next| next.start);
        let Some(closing) = self.plain_closing()? else { return Ok(None) };
        Ok(self.text.get(start..next).and_then(|turn| Some(start + turn.find(&closing)? + closing.len())))
    }

    /// Whether the message has calls of tools that the template writes, as far as can be seen behind its content.
    fn calls_tools(&self, index: usize) -> bool {
        let Some(calls) = self.scene.chat.turns[index].message.get("tool_calls") else { return false };
        let name =
            calls.get(0).and_then(|call| call.get("function").unwrap_or(call).get("name")).and_then(Json::as_str);
        let next = (index + 1..self.scene.chat.turns.len()).find_map(|later| self.position(later));
        let from = self.position(index).map_or(0, |own| own.end);
        let behind = self.text.get(from..next.map_or(self.text.len(), |next| next.start));
        name.zip(behind).is_none_or(|(name, behind)| behind.contains(name))
    }

    /// What the template writes behind an answer of its own, without white space at the end; `None` if that is nothing.
    fn plain_closing(&self) -> Result<Option<String>, DataError> {
        let turns = [Turn::new("user", "question"), Turn::new("assistant", "answer")];
        let chat = Chat { turns: turns.to_vec(), ..Chat::default() };
        let scene = Scene::new(self.scene.template, &chat);
        let (rendered, _) = scene.render(&scene.marked(), false)?;
        let (text, positions, _) = take_marks(&rendered, chat.turns.len());
        let closing = positions[1].as_ref().map(|answer| text[answer.end..].trim_end().to_owned());
        Ok(closing.filter(|closing| !closing.is_empty()))
    }

    /// What stands behind the content of message `anchor` in the conversation cut behind message `last`.
    fn behind(&self, last: usize, anchor: usize, prompt: bool) -> Result<Option<String>, DataError> {
        let Some((marked, _, _)) = &self.marks else { return Ok(None) };
        // A template may refuse to end there.
        let Ok((rendered, _)) = self.scene.render(&marked[..=last], prompt) else { return Ok(None) };
        let (text, positions, _) = take_marks(&rendered, marked.len());
        Ok(positions[anchor].as_ref().map(|content| text[content.end..].to_owned()))
    }

    /// The span of an answer by whole beginnings: what rendering up to and with it adds to rendering up to it.
    fn by_beginnings(&self, index: usize) -> Result<Range<usize>, DataError> {
        let messages = &self.scene.plain;
        let (before, _) = self.scene.render(&messages[..index], true)?;
        check_prefix(&before, self.text, index, "before it")?;
        if index + 1 == messages.len() {
            return Ok(before.len()..self.text.len());
        }
        let (with, _) = self.scene.render(&messages[..=index], false)?;
        check_prefix(&with, self.text, index, "up to it")?;
        check_prefix(&before, &with, index, "before it")?;
        Ok(before.len()..with.len())
    }

    /// The content of a message that is not the assistant's.
    fn content(&self, index: usize) -> Result<Range<usize>, DataError> {
        self.position(index).ok_or_else(|| not_found(index, self.scene.chat))
    }

    /// The blocks that stand between the messages around an answer.
    fn blocks_of(&self, index: usize, blocks: &[Range<usize>]) -> Result<Vec<Range<usize>>, DataError> {
        let missing = || not_found(index, self.scene.chat);
        let from = if index == 0 { 0 } else { self.position(index - 1).ok_or_else(missing)?.end };
        let to = if index + 1 == self.scene.chat.turns.len() {
            self.text.len()
        } else {
            self.position(index + 1).ok_or_else(missing)?.start
        };
        Ok(blocks.iter().filter(|block| from <= block.start && block.end <= to).cloned().collect())
    }
}

fn not_found(index: usize, chat: &Chat) -> DataError {
    DataError::MessageNotFound { message: index + 1, role: chat.turns[index].role().to_owned() }
}

/// Bytes that two texts have in common at the beginning, whole characters.
fn common_prefix(left: &str, right: &str) -> usize {
    let same = left.chars().zip(right.chars()).take_while(|(left, right)| left == right);
    same.map(|(character, _)| character.len_utf8()).sum()
}

fn check_prefix(prefix: &str, whole: &str, index: usize, name: &'static str) -> Result<(), DataError> {
    if whole.starts_with(prefix) {
        return Ok(());
    }
    let byte = common_prefix(prefix, whole);
    let excerpt = |text: &str| text[byte..].chars().take(24).collect();
    Err(DataError::NotAPrefix {
        message: index + 1,
        prefix: name,
        byte,
        found: excerpt(prefix),
        expected: excerpt(whole),
    })
}
