//! `chat`: a conversation with a model in the terminal, through its chat template, token by token.
//!
//! Every turn is rendered from all messages, as in training, and the model reads only the tokens that differ from those it has already read. An
//! answer stops where the model's folder says, and at the token with which the template closes a turn.

use std::io::{BufRead, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use firebrick_data::{Chat, Tokenizer, Turn};
use firebrick_kernels::Kernels;
use firebrick_model::{BatchLimits, Conversation, Decoder, GenerateOptions, Sampler};
use firebrick_trainer::RunError;
use firebrick_trainer::console::escaped;
use firebrick_trainer::run::generate::{LoadOptions, check_positions, stop_tokens};
use firebrick_trainer::run::sampling::ChosenSampling;
use firebrick_trainer::run::text_stream::TextStream;

/// The line that explains the commands of a chat.
pub const HELP: &str = "one line is one message; /reset begins again, /exit or the end of input leaves, /help says this, Ctrl-C ends an answer";

/// A model to talk to, and the settings of the conversation.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// The model.
    pub load: LoadOptions,
    /// The system message, instead of the one from training; empty: none.
    pub system_prompt: Option<String>,
    /// Maximum tokens of an answer.
    pub max_new_tokens: usize,
    /// Maximum tokens of a whole conversation.
    pub context: usize,
    /// How tokens are chosen.
    pub sampling: ChosenSampling,
}

/// The source of messages and the destination of answers.
pub struct ChatTerminal<'a> {
    /// Lines of the user.
    pub input: &'a mut dyn BufRead,
    /// Answers.
    pub output: &'a mut dyn Write,
    /// Whether to write a prompt mark when a message is expected, and answers without what a terminal would obey.
    pub prompts: bool,
    /// Set to end the answer that is being written.
    pub stop: &'a AtomicBool,
    /// Whether nothing is being written.
    pub is_idle: &'a AtomicBool,
}

impl ChatTerminal<'_> {
    fn say(&mut self, text: &str) -> Result<(), RunError> {
        let shown = if self.prompts { escaped(text) } else { text.into() };
        write!(self.output, "{shown}").and_then(|()| self.output.flush()).map_err(RunError::Terminal)
    }
}

/// Loads the model and answers until the input ends.
///
/// # Errors
/// A folder that cannot be read, a tokenizer without a chat template, a template that refuses the messages, logits that are not finite, or a closed
/// terminal.
pub fn chat<B: Kernels>(
    request: &ChatRequest,
    device: &B::Device,
    terminal: &mut ChatTerminal<'_>,
) -> Result<(), RunError> {
    let mut tokenizer = request.load.tokenizer()?;
    tokenizer.set_template_defaults(request.load.template_defaults(request.system_prompt.as_deref())?);
    tokenizer.chat_template()?;
    let trained = request.load.trained_sequence_tokens()?;
    let model = request.load.load::<B>(request.context, trained, device)?;
    let stops = stop_tokens(&model, &tokenizer, true)?;
    let cache = model.conversation(request.context);
    let (chat, is_noted) = (Chat::default(), false);
    let mut talk = Talk { request, model, trained, is_noted, tokenizer: &tokenizer, stops, cache, chat, turns: 0 };
    talk.run(terminal)
}

struct Talk<'a, B: Kernels> {
    request: &'a ChatRequest,
    model: Decoder<B>,
    /// The number of tokens by which training chose longrope's factors.
    trained: usize,
    /// Whether the user was warned that the conversation has more tokens than the model has positions.
    is_noted: bool,
    tokenizer: &'a Tokenizer,
    stops: Vec<u32>,
    cache: Conversation<B>,
    chat: Chat,
    turns: u64,
}

impl<B: Kernels> Talk<'_, B> {
    fn run(&mut self, terminal: &mut ChatTerminal<'_>) -> Result<(), RunError> {
        loop {
            if terminal.prompts {
                terminal.say("> ")?;
            }
            let mut line = String::new();
            if terminal.input.read_line(&mut line).map_err(RunError::Terminal)? == 0 {
                return Ok(());
            }
            match line.trim() {
                "" => {}
                "/exit" | "/quit" => return Ok(()),
                "/reset" => {
                    self.chat.turns.clear();
                    terminal.say("(a new conversation)\n")?;
                }
                "/help" | "/?" => terminal.say(&format!("({HELP})\n"))?,
                word if is_command(word) => terminal.say(&format!("(there is no {word}: {HELP})\n"))?,
                text => {
                    terminal.is_idle.store(false, Ordering::Relaxed);
                    let answered = self.turn(text, terminal);
                    terminal.is_idle.store(true, Ordering::Relaxed);
                    terminal.stop.store(false, Ordering::Relaxed);
                    answered?;
                }
            }
        }
    }

    fn turn(&mut self, text: &str, terminal: &mut ChatTerminal<'_>) -> Result<(), RunError> {
        self.chat.turns.push(Turn::new("user", text));
        let rendered = self.tokenizer.chat_template()?.render(&self.chat, true)?;
        let prompt = self.tokenizer.encode(&rendered, false)?;
        let room = self.request.context.saturating_sub(prompt.len());
        if room == 0 {
            self.chat.turns.pop();
            let (got, context) = (prompt.len(), self.request.context);
            let again = if self.chat.turns.is_empty() { "" } else { "/reset begins again, and " };
            return terminal.say(&format!(
                "(with this message the conversation has {got} tokens, and there is room for {context}: {again}--context gives more room)\n"
            ));
        }
        if self.is_too_long(prompt.len(), terminal)? {
            self.chat.turns.pop();
            return Ok(());
        }
        if self.model.choose_rope_factors(self.trained.max(prompt.len())) {
            self.cache.forget();
        }
        let options = GenerateOptions {
            max_new_tokens: room.min(self.request.max_new_tokens),
            stop_tokens: self.stops.clone(),
            sampler: self.sampler(),
            limits: BatchLimits::NONE,
        };
        let mut stream = TextStream::new(self.tokenizer);
        let mut failed = None;
        self.model.converse(&mut self.cache, &prompt, &options, &mut |token| {
            failed = stream.push(token).map_err(RunError::from).and_then(|part| terminal.say(&part)).err();
            if failed.is_some() || terminal.stop.load(Ordering::Relaxed) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
        failed.map_or(Ok(()), Err)?;
        let (answer, rest) = stream.finish()?;
        terminal.say(&format!("{rest}\n\n"))?;
        self.chat.turns.push(Turn::new("assistant", &answer));
        Ok(())
    }

    /// Returns whether a conversation of this many tokens is too long to be read, and says so. A conversation longer than what the model was made for
    /// is read, with one warning.
    fn is_too_long(&mut self, tokens: usize, terminal: &mut ChatTerminal<'_>) -> Result<bool, RunError> {
        match check_positions(tokens, self.model.config.spec.max_position_embeddings) {
            Err(error) => terminal.say(&format!("({error})\n")).map(|()| true),
            Ok(Some(note)) if !self.is_noted => {
                self.is_noted = true;
                terminal.say(&format!("({note})\n")).map(|()| false)
            }
            Ok(_) => Ok(false),
        }
    }

    /// Creates the sampler of a turn; each turn has a separate random stream.
    fn sampler(&mut self) -> Sampler {
        self.turns += 1;
        self.request.sampling.sampler_at(self.turns - 1)
    }
}

/// Returns whether a line is one word after a slash, which is meant as a command: a path has more slashes.
fn is_command(line: &str) -> bool {
    line.strip_prefix('/')
        .is_some_and(|word| !word.is_empty() && word.chars().all(|letter| letter.is_ascii_lowercase()))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;

    use firebrick_kernels::BaseStorage;
    use firebrick_kernels::backends::Flex;
    use firebrick_precision::{FloatType, Format};
    use firebrick_trainer::run::generate::{GenerateRequest, generate};
    use firebrick_trainer::run::sampling::TypedSampling;

    use super::*;

    fn request(context: usize) -> ChatRequest {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/quickstart/base")).to_path_buf();
        let sampling = ChosenSampling::resolve(&model, None, TypedSampling::default()).unwrap();
        let load = LoadOptions {
            model,
            adapter: None,
            storage: BaseStorage::Frozen(Format::Float(FloatType::F32)),
            compute: FloatType::F32,
        };
        ChatRequest { load, system_prompt: None, max_new_tokens: 12, context, sampling }
    }

    fn say(request: &ChatRequest, input: &str, stop: bool) -> String {
        let (mut input, mut output) = (input.as_bytes(), Vec::new());
        let (stop, is_idle) = (AtomicBool::new(stop), AtomicBool::new(true));
        let mut terminal =
            ChatTerminal { input: &mut input, output: &mut output, prompts: false, stop: &stop, is_idle: &is_idle };
        chat::<Flex>(request, &Default::default(), &mut terminal).unwrap();
        assert!(is_idle.load(Ordering::Relaxed) && !stop.load(Ordering::Relaxed));
        String::from_utf8(output).unwrap()
    }

    fn alone(request: &ChatRequest, prompt: &str) -> String {
        let request = GenerateRequest {
            load: request.load.clone(),
            prompts: vec![prompt.to_owned()],
            chat: true,
            system_prompt: None,
            max_new_tokens: request.max_new_tokens,
            sampler: request.sampling.sampler(),
            sequences: 1,
        };
        generate::<Flex>(&request, &Default::default()).unwrap().remove(0)
    }

    #[test]
    fn a_first_answer_is_that_of_generate() {
        let request = request(256);
        let [first, second] = ["Spell stove backwards.", "Spell rovis backwards."].map(|text| alone(&request, text));
        let said =
            say(&request, "Spell stove backwards.\n/reset\n\nSpell rovis backwards.\n/exit\nnever read\n", false);
        assert_eq!(said, format!("{first}\n\n(a new conversation)\n{second}\n\n"));
    }

    /// Continues in a second turn from what was read in the first one.
    #[test]
    fn a_second_answer_is_that_of_one_conversation() {
        let request = request(256);
        let said = say(&request, "Spell stove backwards.\nSpell rovis backwards.\n", false);
        let (first, second) = said.split_once("\n\n").unwrap();
        let mut tokenizer = request.load.tokenizer().unwrap();
        tokenizer.set_template_defaults(request.load.template_defaults(None).unwrap());
        let turns = [("user", "Spell stove backwards."), ("assistant", first), ("user", "Spell rovis backwards.")];
        let rendered = tokenizer.chat_template().unwrap().render(&Chat::new(&turns), true).unwrap();
        let prompt = tokenizer.encode(&rendered, false).unwrap();
        let model = request.load.load::<Flex>(256, 256, &Default::default()).unwrap();
        let options = GenerateOptions {
            max_new_tokens: 12,
            stop_tokens: stop_tokens(&model, &tokenizer, true).unwrap(),
            sampler: Sampler::greedy(),
            limits: BatchLimits::NONE,
        };
        let expected = tokenizer.decode(&model.generate(&[prompt], &options).unwrap()[0], true).unwrap();
        assert_eq!(second, format!("{expected}\n\n"));
    }

    #[test]
    fn a_long_conversation_is_noted_then_refused() {
        let request = ChatRequest { max_new_tokens: 1, ..request(4096) };
        let [beyond, far_beyond] = [200, 800].map(|words| "ab ".repeat(words));
        let said = say(&request, &format!("{beyond}\nShort.\n{far_beyond}\n"), false);
        assert_eq!(said.matches("made for 512").count(), 1, "{said}");
        assert_eq!(said.matches("4 times the 512 positions").count(), 1, "{said}");
    }

    #[test]
    fn words_after_a_slash_are_commands_and_never_messages() {
        let said = say(&request(256), "/help\n/clear\n", false);
        assert_eq!(said, format!("({HELP})\n(there is no /clear: {HELP})\n"));
        let lines = ["/foo", "/", "/etc/passwd", "/help me", "/Foo", "no"].map(is_command);
        assert_eq!(lines, [true, false, false, false, false, false]);
    }

    #[test]
    fn a_stopped_answer_has_one_token() {
        let stopped = say(&request(256), "Spell stove backwards.\n", true);
        let whole = say(&request(256), "Spell stove backwards.\n", false);
        assert!(stopped.trim_end().len() < whole.trim_end().len() && whole.starts_with(stopped.trim_end()));
        let full = say(&request(8), "Spell stove backwards, and then a lot of other words.\n", false);
        assert!(full.contains("room for 8") && full.contains(": --context"), "{full}");
        let full =
            say(&request(64), "Spell stove backwards.\nSpell stove backwards, and then a lot of other words.\n", false);
        assert!(full.contains("room for 64") && full.contains("/reset"), "{full}");
    }
}
