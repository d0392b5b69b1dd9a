//! The Modelfile next to a GGUF file: its chat template in Ollama's form, and its stops.
//!
//! Ollama's templates are Go's and not Jinja. One is put together from what the chat template writes around the messages of two conversations, and is
//! written only if it then gives the texts that the chat template gives of others.
//! Trade-off: system, user and assistant with a text each. Tools, and templates that change what a message says, have no form here.

use firebrick_data::{Chat, Tokenizer};

/// Texts that no template contains.
const MARKS: [&str; 4] = ["zqxja", "zqxjb", "zqxjc", "zqxjd"];

/// What stands around the messages of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turns {
    /// The beginning without a system message.
    start: String,
    system: [String; 2],
    user: [String; 2],
    assistant: [String; 2],
    /// The beginning of the answer.
    prompt: String,
}

impl Turns {
    /// Returns the turns of a tokenizer's chat template; `None` if it has none, or one that turns cannot express. A token that the tokenizer puts before
    /// every text is left out.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let bos = tokenizer.token_before_text().ok()?;
        let bos = bos.and_then(|id| tokenizer.decode(&[id], false).ok());
        let template = tokenizer.chat_template().ok()?;
        let render = |messages: &[(&str, &str)], answers: bool| {
            let chat = Chat::new(messages);
            let text = template.render(&chat, answers).ok().filter(|_| !template.writes_date(&chat))?;
            let without = bos.as_deref().and_then(|bos| text.strip_prefix(bos)).map(str::to_owned);
            Some(without.unwrap_or(text))
        };
        let turns = Self::from_renders(render)?;
        turns.give_the_same_as(render).then_some(turns)
    }

    fn from_renders(render: impl Fn(&[(&str, &str)], bool) -> Option<String>) -> Option<Self> {
        let [a, b, c, d] = MARKS;
        let plain = between(&render(&[("user", a), ("assistant", b), ("user", c)], false)?, &[a, b, c])?;
        let with_system =
            between(&render(&[("system", d), ("user", a), ("assistant", b), ("user", c)], false)?, &[d, a, b, c])?;
        let answered = between(&render(&[("user", a)], true)?, &[a])?;
        // The longest text that all of these end in.
        let texts = [&plain[0], &plain[2], &with_system[1]];
        let mut ends = plain[0].char_indices().map(|(at, _)| &plain[0][at..]);
        let before_user = ends.find(|end| texts.iter().all(|text| text.ends_with(end))).unwrap_or_default().to_owned();
        let without = |text: &str| text.strip_suffix(&before_user).map(str::to_owned);
        let after_user = plain[3].clone();
        Some(Self {
            start: without(&plain[0])?,
            system: [with_system[0].clone(), without(&with_system[1])?],
            assistant: [plain[1].strip_prefix(&after_user)?.to_owned(), without(&plain[2])?],
            prompt: answered[1].strip_prefix(&after_user)?.to_owned(),
            user: [before_user, after_user],
        })
    }

    fn give_the_same_as(&self, render: impl Fn(&[(&str, &str)], bool) -> Option<String>) -> bool {
        let (system, ask, answer, next) =
            (("system", "Be brief."), ("user", "Who?"), ("assistant", "I am."), ("user", "Why\nnot"));
        let chats = [
            vec![ask],
            vec![system, next],
            vec![ask, answer, next, answer, ask],
            vec![system, ask, answer, next, answer, ask],
        ];
        chats.iter().all(|messages| render(messages, true).as_ref() == Some(&self.text(messages)))
    }

    /// Writes a conversation as Ollama does with [`Self::template`].
    fn text(&self, messages: &[(&str, &str)]) -> String {
        let mut text = if messages[0].0 == "system" { String::new() } else { self.start.clone() };
        for (role, content) in messages {
            let [before, after] = match *role {
                "system" => &self.system,
                "user" => &self.user,
                _ => &self.assistant,
            };
            text += &[before.as_str(), content, after.as_str()].concat();
        }
        text + &self.prompt
    }

    /// Returns the template in Ollama's form; `None` if a Modelfile cannot quote it.
    pub(super) fn template(&self) -> Option<String> {
        let literal = |text: &String| text.replace("{{", "{{ \"{{\" }}");
        let around = |[before, after]: &[String; 2], value: &str| {
            format!("{}{{{{ {value} }}}}{}", literal(before), literal(after))
        };
        let template = format!(
            "{{{{ if .System }}}}{}{{{{ else }}}}{}{{{{ end }}}}{{{{ range .Messages }}}}{{{{ if eq .Role \"user\" }}}}{}{{{{ else if eq .Role \
             \"assistant\" }}}}{}{{{{ end }}}}{{{{ end }}}}{}",
            around(&self.system, ".System"),
            literal(&self.start),
            around(&self.user, ".Content"),
            around(&self.assistant, ".Content"),
            literal(&self.prompt)
        );
        (!template.contains("\"\"\"") && !template.ends_with('"')).then_some(template)
    }
}

/// Returns what stands before, between and after the marks.
fn between(text: &str, marks: &[&str]) -> Option<Vec<String>> {
    let (mut rest, mut parts) = (text, Vec::new());
    for mark in marks {
        let (before, after) = rest.split_once(mark)?;
        parts.push(before.to_owned());
        rest = after;
    }
    parts.push(rest.to_owned());
    let is_once = MARKS.iter().all(|mark| parts.iter().all(|part| !part.contains(mark)));
    is_once.then_some(parts)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tempfile::tempdir;

    use super::*;

    const CHAT_ML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                           {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn turns(template: &str) -> Option<Turns> {
        let folder = tempdir().unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny-llama");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
        }
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        Turns::of(&Tokenizer::from_folder(folder.path()).unwrap())
    }

    #[test]
    fn a_template_of_turns_has_ollamas_form() {
        let rest = "{{ range .Messages }}{{ if eq .Role \"user\" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ else if eq .Role \"assistant\" }}\
                    <|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}<|im_start|>assistant\n";
        let system = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ else }}{{ end }}";
        assert_eq!(turns(CHAT_ML).unwrap().template().unwrap(), format!("{system}{rest}"));
        assert_eq!(turns(&format!("{{{{ bos_token }}}}{CHAT_ML}")), turns(CHAT_ML));
        let default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}";
        let with_default = turns(&format!("{default}{CHAT_ML}")).unwrap();
        let text = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(with_default.text(&[("user", "Hi")]), text);
        let braces = turns(&CHAT_ML.replace("<|im_end|>", "{{ '{{' }}")).unwrap().template().unwrap();
        assert!(braces.contains("{{ .Content }}{{ \"{{\" }}\n"), "{braces}");
    }

    #[test]
    fn a_template_that_is_more_than_turns_has_no_form() {
        let folded = |place: &str| {
            let question = format!(
                "[INST] {{% if {place} %}}{{{{ messages[0].content }}}}\n{{% endif %}}{{{{ m.content }}}} [/INST]"
            );
            format!(
                "{{% for m in messages %}}{{% if m.role == 'user' %}}{question}{{% elif m.role == 'assistant' %}}{{{{ m.content }}}}{{% endif %}}\
                 {{% endfor %}}"
            )
        };
        let with_system = "messages[0].role == 'system' and ";
        assert_eq!(
            turns(&folded(&format!("{with_system}loop.last"))),
            None,
            "the system message is in the last question"
        );
        assert!(
            turns(&folded(&format!("{with_system}loop.index == 2"))).is_some(),
            "in the first, it stands before all others"
        );
        assert_eq!(turns(&CHAT_ML.replace("m.content", "m.content | upper")), None);
        assert_eq!(turns(&CHAT_ML.replace("m.role }}", "m.role }}{{ loop.index }}")), None, "messages are numbered");
        assert_eq!(turns(&CHAT_ML.replace("<|im_end|>", "'\"\"\"'")).and_then(|turns| turns.template()), None);
    }
}
