//! The output of a run for the user: sentences and tables on standard output, progress on standard error, and messages of failures.

mod activity;
mod download;
mod escape;
mod failure;
mod message;
mod progress;
mod shell;
mod summary;

pub use activity::Activity;
pub use download::Download;
pub use escape::{escaped, is_hidden};
pub use failure::{Failure, FailureReport};
pub use message::error_message;
pub use progress::Progress;
pub use progress::grouped;
pub use shell::{program, shell_quoted};
pub use summary::{Outcome, SampleAnswer, Summary, date_and_time};

use std::io::Write;
use std::path::Path;

use firebrick_kernels::BaseStorage;
use firebrick_model::check_gguf;
use firebrick_precision::{FloatType, Format, QuantFormat};

use crate::config::EvalConfig;
use crate::metrics::Evaluation;
use crate::plan::{Plan, compute_format};

/// Writes a line on standard error.
pub fn warn(text: &str) {
    write_line(&mut std::io::stderr(), text);
}

/// Writes a line. What cannot be written is dropped, since a terminal or pipe that is gone must not end a run.
fn write_line(out: &mut dyn Write, text: &str) {
    let _ = writeln!(out, "{}", escaped(text)).and_then(|()| out.flush());
}

/// Standard output, which a test may turn off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Console {
    /// Whether anything is printed.
    pub verbose: bool,
}

impl Console {
    /// Prints.
    pub const VERBOSE: Self = Self { verbose: true };
    /// Prints nothing.
    pub const QUIET: Self = Self { verbose: false };

    /// Prints a line.
    pub fn print(self, text: &str) {
        if self.verbose {
            write_line(&mut std::io::stdout().lock(), text);
        }
    }

    /// Shows what goes on until the result is dropped.
    pub fn activity(self, describe: impl Fn() -> String + Send + 'static) -> Activity {
        Activity::start(self.verbose, describe)
    }

    /// Prints the command that continues a stopped run. `arguments` are those of this run: the recipe and its overrides.
    pub fn stopped(self, step: u64, arguments: &[String], folder: &Path) {
        let words: String = arguments.iter().map(|word| format!(" {}", shell_quoted(word))).collect();
        let (program, folder) = (program(), shell_quoted(&folder.display().to_string()));
        self.print(&format!(
            "stopped after step {step}; everything is saved. Continue with\n  {program} train{words} --resume {folder}"
        ));
    }

    /// Prints what a run in `folder` is about to do.
    pub fn brief(self, plan: &Plan, folder: &Path) {
        self.print(&format!("plan of {}\n{}", plan.name.value, plan.brief(Some(folder))));
    }

    /// Prints the plan under the run's name.
    pub fn plan(self, plan: &Plan) {
        self.print(&format!("plan for {}\n{plan}", plan.name.value));
    }

    /// Prints an evaluation under its title.
    pub fn evaluation(self, title: &str, evaluation: &Evaluation) {
        let pairs = evaluation.pairs;
        let loss = evaluation.loss.map(|loss| match &pairs {
            None => format!("loss {loss:.4}, perplexity {:.3}", loss.exp()),
            Some(pairs) => {
                format!("loss {loss:.4}, reward margin {:.4}, accuracy {:.1} %", pairs.margin, 100.0 * pairs.accuracy)
            }
        });
        let reward = evaluation.reward.map(|reward| format!("reward {reward:.4}"));
        let tokens = evaluation.token_accuracy.map(|share| format!("token accuracy {:.1} %", 100.0 * share));
        let exact = evaluation.exact_match.map(|share| format!("exact match {:.1} %", 100.0 * share));
        let sets = evaluation.set_losses.iter().map(|(name, loss)| format!("{name} {loss:.4}"));
        let parts: Vec<String> = loss.into_iter().chain(reward).chain(sets).chain(tokens).chain(exact).collect();
        if !parts.is_empty() {
            self.print(&format!("{title}: {}", parts.join(", ")));
        }
    }

    /// Prints prompts with their answers.
    pub fn samples(self, title: &str, prompts: &[String], answers: &[String]) {
        for (prompt, answer) in prompts.iter().zip(answers) {
            self.print(&format!("{title}: {prompt:?} -> {answer:?}"));
        }
    }

    /// Prints the results of a finished run, and what to try next.
    pub fn summary(self, summary: &Summary, plan: &Plan) {
        self.print(&summary.to_string());
        if self.verbose {
            self.print(&format!("\nnext:\n  {}", next_commands(&summary.weights, plan).join("\n  ")));
        }
    }
}

/// Returns commands for what a run made, the folder `weights`: an answer, a chat, one file with the adapter merged for llama.cpp and Ollama, and the
/// curves.
fn next_commands(weights: &str, plan: &Plan) -> Vec<String> {
    let program = program();
    let model = shell_quoted(&plan.model_folder.value.display().to_string());
    let (options, merge) = match plan.lora.value {
        Some(_) => (format!("--model {model} --adapter {}", shell_quoted(weights)), "--merge "),
        None => (format!("--model {}", shell_quoted(weights)), ""),
    };
    let base = match quantized_base(plan) {
        Some(QuantFormat::Nf4 { double_quant: true }) => " --nf4".to_owned(),
        Some(format) => format!(" --base {format}"),
        None => String::new(),
    };
    // Flags that make `generate` compute and stop as the run did, if its defaults differ.
    let compute = plan.compute.value;
    let is_default = compute == compute_format(FloatType::Bf16, plan.backend.value, None).value;
    let dtype = if is_default { String::new() } else { format!(" --dtype {compute}") };
    let limit = plan.max_new_tokens.value;
    let is_default = limit == EvalConfig::default().max_new_tokens;
    let limit = if is_default { String::new() } else { format!(" --max-new-tokens {limit}") };
    let (formats, is_chat) = (format!("{base}{dtype}{limit}"), plan.prompts_are_chats.value);
    let prompt = shell_quoted(plan.sample_prompts.value.first().map_or("Hello", String::as_str));
    let chat = if is_chat { " --chat" } else { "" };
    let mut commands = vec![format!("{program} generate {options}{formats}{chat} --prompt {prompt}")];
    if is_chat {
        commands.push(format!("{program} chat {options}{formats}"));
    }
    if check_gguf(&plan.model_folder.value).is_ok() {
        let base = match (merge, quantized_base(plan)) {
            ("", _) | (_, None) => String::new(),
            (_, Some(format)) => format!(" --base {format}"),
        };
        let file = Path::new(weights).with_file_name("model.gguf");
        let file = shell_quoted(&file.display().to_string());
        commands.push(format!("{program} export {merge}--gguf q8_0 {options}{base} --out {file}"));
    }
    let output_dir = shell_quoted(&plan.output_dir.value.display().to_string());
    commands.push(format!("tensorboard --logdir {output_dir}"));
    commands
}

fn quantized_base(plan: &Plan) -> Option<QuantFormat> {
    match plan.base.value {
        BaseStorage::Frozen(Format::Quantized(format)) => Some(format),
        BaseStorage::Frozen(_) | BaseStorage::Trained | BaseStorage::TrainedBf16 => None,
    }
}
