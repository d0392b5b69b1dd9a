//! What a run tells a person beside its progress bar. The only place that prints to standard output.
#![expect(clippy::print_stdout, reason = "this file is the voice of the program")]

use serde::Serialize;

use crate::evaluate::Evaluation;
use crate::plan::Plan;

/// The end of a run in numbers: `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Steps taken over all parts of the run.
    pub steps: u64,
    /// Mean loss of the last tenth of the steps.
    pub train_loss: Option<f64>,
    /// Held-out loss before the first step.
    pub eval_loss_before: Option<f64>,
    /// Held-out loss after the last step.
    pub eval_loss_after: Option<f64>,
    /// Part of the held-out questions answered to the letter before the first step.
    pub exact_match_before: Option<f64>,
    /// The same after the last step.
    pub exact_match_after: Option<f64>,
    /// Trained tokens over the whole run.
    pub trained_tokens: u64,
    /// Input tokens per second of training, padding left out, evaluation left out.
    pub tokens_per_s: f64,
    /// Seconds from start to end, over all resumed parts.
    pub wall_s: f64,
    /// The backend.
    pub backend: String,
    /// Folder of the adapter, or of the model where all of it was trained.
    pub adapter: String,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Every step was taken.
    Finished(Summary),
    /// A signal came; everything is saved.
    Interrupted {
        /// Steps taken.
        step: u64,
        /// The run's name, which `--resume` needs.
        name: String,
    },
}

/// Speaks, or does not (tests).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    /// Print.
    Aloud,
    /// Do not.
    Quiet,
}

impl Voice {
    /// A line of text.
    pub fn say(self, text: &str) {
        if self == Self::Aloud {
            println!("{text}");
        }
    }

    /// The plan under the run's name.
    pub fn plan(self, name: &str, plan: &Plan) {
        self.say(&format!("plan for {name}\n{plan}"));
    }

    /// An evaluation under its title.
    pub fn evaluation(self, title: &str, evaluation: &Evaluation) {
        let loss = evaluation.loss.map(|loss| format!("loss {loss:.4}, perplexity {:.3}", loss.exp()));
        let exact = evaluation.exact_match.map(|part| format!("exact match {:.1} %", 100.0 * part));
        let parts: Vec<String> = loss.into_iter().chain(exact).collect();
        if !parts.is_empty() {
            self.say(&format!("{title}: {}", parts.join(", ")));
        }
    }

    /// Prompts with their answers.
    pub fn samples(self, title: &str, prompts: &[String], answers: &[String]) {
        for (prompt, answer) in prompts.iter().zip(answers) {
            self.say(&format!("{title}: {prompt:?} -> {answer:?}"));
        }
    }

    /// The end of a finished run, and what to try next.
    pub fn summary(self, summary: &Summary, model: &str, prompt: Option<&str>, is_adapter: bool) {
        let change = |before: Option<f64>, after: Option<f64>, show: fn(f64) -> String| match (before, after) {
            (Some(before), Some(after)) => Some(format!("{} -> {}", show(before), show(after))),
            _ => None,
        };
        self.say(&format!(
            "\ndone: {} steps, {} trained tokens, {:.0} tokens/s, {:.0} s on {}",
            summary.steps, summary.trained_tokens, summary.tokens_per_s, summary.wall_s, summary.backend
        ));
        if let Some(loss) = change(summary.eval_loss_before, summary.eval_loss_after, |loss| format!("{loss:.4}")) {
            self.say(&format!("  held-out loss  {loss}"));
        }
        let percent = |part: f64| format!("{:.1} %", 100.0 * part);
        if let Some(exact) = change(summary.exact_match_before, summary.exact_match_after, percent) {
            self.say(&format!("  exact match    {exact}"));
        }
        self.say(&format!("  saved          {}", summary.adapter));
        let weights = if is_adapter {
            format!("--model {model} --adapter {}", summary.adapter)
        } else {
            format!("--model {}", summary.adapter)
        };
        let prompt = prompt.unwrap_or("Hello");
        let chat = if is_adapter { " --chat" } else { "" };
        self.say(&format!("\nnext:\n  cargo xtask generate {weights}{chat} --prompt {prompt:?}"));
        self.say("  tensorboard --logdir runs");
    }
}
