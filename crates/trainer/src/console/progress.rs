//! Progress while a run trains: a bar on a terminal, a line every few seconds in a log file.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use firebrick_arch::counted;
use firebrick_hwprofile::human;
use indicatif::{ProgressBar, ProgressStyle};

use crate::console::{escaped, warn, write_line};
use crate::metrics::{EvalMetrics, MetricSink, PairMetrics, StepMetrics};
use crate::storage::StorageError;

/// Time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Progress on standard error.
pub struct Progress {
    display: Display,
    total_steps: u64,
    /// The first step of this process, and when it had ended.
    first: Option<(u64, Instant)>,
    /// How busy the device was, as last reported.
    usage: String,
    /// The text of the last step.
    last: String,
}

enum Display {
    Bar(ProgressBar),
    Lines(Lines),
}

/// Plain lines, if a bar cannot be drawn.
struct Lines {
    out: Box<dyn Write + Send>,
    last_line: Option<Instant>,
    /// Whether a step has been shown: the first loss is shown at once.
    shows_loss: bool,
}

impl Progress {
    /// Shows the progress of a run of `total_steps`, of which `done_steps` were done before it was resumed.
    pub fn start(total_steps: u64, done_steps: u64) -> Progress {
        if !io::stderr().is_terminal() {
            return Progress::lines(total_steps, Box::new(io::stderr()));
        }
        let bar = ProgressBar::new(total_steps).with_position(done_steps);
        let style = ProgressStyle::with_template("{bar:32} step {pos}/{len}  {msg}");
        // Invariant: the template above is fixed, and it is well formed.
        bar.set_style(style.expect("the template is well formed").progress_chars("█▉▊▋▌▍▎▏ "));
        bar.set_message("starting");
        bar.enable_steady_tick(Duration::from_millis(500));
        Progress::with(Display::Bar(bar), total_steps)
    }

    fn lines(total_steps: u64, out: Box<dyn Write + Send>) -> Progress {
        Progress::with(Display::Lines(Lines { out, last_line: None, shows_loss: false }), total_steps)
    }

    fn with(display: Display, total_steps: u64) -> Progress {
        Progress { display, total_steps, usage: String::new(), last: String::new(), first: None }
    }

    /// Prints a line above the bar.
    pub fn print(&mut self, text: &str) {
        match &mut self.display {
            Display::Bar(bar) => bar.suspend(|| warn(text)),
            Display::Lines(lines) => write_line(&mut lines.out, text),
        }
    }

    /// Leaves the bar with its last step on a line of its own: the run is over, and what it prints next begins a line.
    pub fn finish(&mut self) {
        match &self.display {
            Display::Bar(bar) if !bar.is_finished() => {
                bar.abandon_with_message(self.last.clone());
                warn("");
            }
            Display::Bar(_) | Display::Lines(_) => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // A bar that keeps ticking would overwrite the output that follows it.
        self.finish();
    }
}

impl MetricSink for Progress {
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
        if let Some(words) = metrics.usage.in_words() {
            self.usage = format!("  {words}");
        }
        let pairs = metrics.pairs.map_or_else(String::new, |pairs| rewards(&pairs));
        let rates = match &metrics.policy {
            Some(policy) => {
                let late = match policy.timeouts {
                    0 => String::new(),
                    count => format!("  {} too late", counted(count, "reward")),
                };
                format!(
                    "  reward {:.4}{late}  {} tokens  drift {:.1e}  sampling {} and training {} tokens/s",
                    policy.reward,
                    grouped(policy.mean_length),
                    policy.drift,
                    grouped(policy.sampled_per_s),
                    grouped(policy.trained_per_s)
                )
            }
            None => format!("  {} tokens/s", grouped(metrics.tokens_per_s)),
        };
        let &mut (first, ended) = self.first.get_or_insert_with(|| (metrics.step, Instant::now()));
        // The first step of this process also compiles kernels and measures, so the time is counted from its end.
        let taken = metrics.step.checked_sub(first).filter(|&taken| taken > 0);
        let left = taken.map_or_else(String::new, |taken| {
            let left = self.total_steps.saturating_sub(metrics.step) as f64 / taken as f64;
            format!("  {} left", with_units(ended.elapsed().mul_f64(left)))
        });
        let message = format!("loss {:.4}{pairs}{rates}{}{left}", metrics.loss, self.usage);
        self.last.clone_from(&message);
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_position(metrics.step);
                bar.set_message(message);
            }
            Display::Lines(lines) => lines.step(metrics.step, self.total_steps, &message),
        }
        Ok(())
    }

    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError> {
        let share = |name: &str, part: Option<f64>| match part {
            Some(part) => format!("  {name} {:.1} %", 100.0 * part),
            None => String::new(),
        };
        let of_set = |(name, loss): (&String, &f64)| format!("  {name} {loss:.4}");
        self.print(&format!(
            "step {}: evaluation{}{}{}{}{}{}{}",
            metrics.step,
            metrics.eval_loss.map_or_else(String::new, |loss| format!(" loss {loss:.4}")),
            metrics.eval_reward.map_or_else(String::new, |reward| format!(" reward {reward:.4}")),
            metrics.perplexity.map_or_else(String::new, |perplexity| format!("  perplexity {perplexity:.3}")),
            metrics.sets.iter().map(of_set).collect::<String>(),
            metrics.pairs.map_or_else(String::new, |pairs| rewards(&pairs)),
            share("token accuracy", metrics.token_accuracy),
            share("exact match", metrics.exact_match)
        ));
        Ok(())
    }

    fn activity(&mut self, what: &str) {
        match &mut self.display {
            Display::Bar(bar) => bar.set_message(escaped(what).into_owned()),
            Display::Lines(lines) => lines.activity(what),
        }
    }

    fn notice(&mut self, text: &str) {
        self.print(text);
    }
}

impl Lines {
    /// Writes a line if the last one is some seconds old.
    fn activity(&mut self, what: &str) {
        if self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
            self.last_line = Some(Instant::now());
            write_line(&mut self.out, what);
        }
    }

    /// Writes a line for the first step, the last one, and every few seconds in between.
    fn step(&mut self, step: u64, total_steps: u64, message: &str) {
        let is_due = !self.shows_loss || self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY);
        if !is_due && step < total_steps {
            return;
        }
        (self.last_line, self.shows_loss) = (Some(Instant::now()), true);
        write_line(&mut self.out, &format!("step {step}/{total_steps}  {message}"));
    }
}

/// Formats "  margin 0.1200  accuracy 75.0 %".
fn rewards(pairs: &PairMetrics) -> String {
    format!("  margin {:.4}  accuracy {:.1} %", pairs.margin, 100.0 * pairs.accuracy)
}

/// Formats "12,345".
pub fn grouped(number: f64) -> String {
    human::grouped(&format!("{number:.0}"))
}

/// Formats "2h05m", "3m20s", "45s".
fn with_units(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds:02}s"),
        _ => format!("{hours}h{minutes:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use firebrick_hwprofile::usage::{Gauge, Throttle, Usage};

    use super::*;
    use crate::metrics::{Evaluation, PolicyMetrics};

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn metrics(step: u64) -> StepMetrics {
        StepMetrics { step, loss: 1.25, tokens_per_s: 12345.4, ..StepMetrics::default() }
    }

    #[test]
    fn a_log_has_first_and_last_step_and_evaluations() {
        let written = Written::default();
        let mut progress = Progress::lines(10, Box::new(written.clone()));
        for step in 1..=10 {
            progress.step(&metrics(step)).unwrap();
        }
        let evaluation = Evaluation {
            loss: Some(0.0),
            token_accuracy: Some(0.5),
            exact_match: Some(0.825),
            ..Evaluation::default()
        };
        progress.eval(&EvalMetrics::new(10, &evaluation).unwrap()).unwrap();
        progress.activity("evaluating: the last line is too recent for this one");
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(
            text,
            "step 1/10  loss 1.2500  12,345 tokens/s\nstep 10/10  loss 1.2500  12,345 tokens/s  0s left\n\
             step 10: evaluation loss 0.0000  perplexity 1.000  token accuracy 50.0 %  exact match 82.5 %\n"
        );
    }

    #[test]
    fn the_bar_ends_with_its_last_step() {
        let bar = ProgressBar::hidden();
        let mut progress = Progress::with(Display::Bar(bar.clone()), 2);
        progress.step(&metrics(1)).unwrap();
        progress.activity("writing the results");
        drop(progress);
        assert_eq!((bar.message().as_str(), bar.is_finished()), ("loss 1.2500  12,345 tokens/s", true));
    }

    #[test]
    fn a_line_says_how_busy_the_card_was() {
        let written = Written::default();
        let mut progress = Progress::lines(2, Box::new(written.clone()));
        let usage = Usage::of([(Gauge::GpuUtil, 98.0), (Gauge::PowerW, 650.0)], [Throttle::PowerCap]);
        progress.step(&StepMetrics { usage, ..metrics(1) }).unwrap();
        progress.step(&metrics(2)).unwrap();
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches("12,345 tokens/s  GPU 98 %, 650 W, power cap").count(), 2, "{text}");
    }

    #[test]
    fn a_line_has_reward_and_both_speeds_of_learning_from_rewards() {
        let written = Written::default();
        let mut progress = Progress::lines(1, Box::new(written.clone()));
        let policy = PolicyMetrics {
            reward: 0.5,
            mean_length: 213.6,
            drift: 0.0012,
            sampled_per_s: 5237.2,
            trained_per_s: 23456.0,
            timeouts: 3,
            ..PolicyMetrics::default()
        };
        progress.step(&StepMetrics { policy: Some(policy), ..metrics(1) }).unwrap();
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(
            text,
            "step 1/1  loss 1.2500  reward 0.5000  3 rewards too late  214 tokens  drift 1.2e-3  \
             sampling 5,237 and training 23,456 tokens/s\n"
        );
    }

    #[test]
    fn numbers_are_grouped_and_times_have_units() {
        assert_eq!(
            (grouped(999.6), grouped(1_234_567.0), grouped(12.0)),
            ("1,000".into(), "1,234,567".into(), "12".into())
        );
        let times = [45, 200, 7500].map(|seconds| with_units(Duration::from_secs(seconds)));
        assert_eq!(times, ["45s", "3m20s", "2h05m"]);
    }
}
