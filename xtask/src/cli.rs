//! The command line of xtask: the commands, their options and their help, and the guard against misspelled commands.
//!
//! Trade-off: commands that start another program (`train`, `plan`, ..., `test`) take their arguments as they are and read
//! the few options they need themselves, so those options are described in prose here.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::lint::Stage;

/// What the commands of the `firebrick` binary have in common.
const TRAIN_HELP: &str = "\
Builds `firebrick` (cargo profile `fast`) with the cargo features that the backend needs, and runs it with the same
arguments in the current folder. Its exit code is the exit code. `cargo xtask train --help` asks the binary itself, which
is built first if necessary.

Options that xtask reads and passes on:
  --config FILE      a bare file name that is not in the current folder is looked up in configs/; `.toml` may be omitted
  --backend NAME     auto | flex | candle | wgpu | cuda: overrides the recipe's `backend`
  --set backend=NAME the same

The backend comes from --backend or --set, else from the recipe's `backend` key, else from the run that --resume names,
else it is `auto`: cuda if an NVIDIA driver is installed, wgpu on macOS, otherwise flex. `flex` is always compiled in as
well, so that `auto` can fall back at run time without another build. `plan --for MACHINE` needs no backend and builds flex
alone, and so does `report`; `profile` builds wgpu, which finds the GPUs of every maker, unless it is to `--measure`.";

/// What `bench-matrix` does differently.
const MATRIX_HELP: &str = "\
Builds `bench-matrix` of benches/ (cargo profile `fast`) with every backend that can be compiled here and runs it with the
same arguments in the current folder: peaks, operations and training steps on each backend that finds a device, each
result checked against its reference. Exit code 1 if one was wrong or failed. `cargo xtask bench-matrix --help` asks the
binary itself, which is built first if necessary. For a machine without Rust, carry the binary `bench-matrix` that
`cargo xtask dist --backend all` packs next to `firebrick`.";

const TEST_HELP: &str = "\
Runs the tests of the whole workspace in one build: every backend is compiled into one set of crates, because Burn built
once per backend would take four times as long. Uses cargo-nextest if it is installed, then runs the doc tests.

  --backends LIST    a comma-separated part of flex,candle,wgpu,cuda (flex is always included); default: all of them.
                     Lists differ in their cargo features, so another list builds Burn again: keep to one
  --slow             whole fuzz corpora instead of a part (sets FIREBRICK_SLOW_TESTS), as CI does each night
  --no-nextest       use `cargo test` even if cargo-nextest is installed

What took longest is listed at the end: tests with nextest, test programs without. On Linux the tests write to memory
if /dev/shm has 4 GiB to spare; TMPDIR names another folder.

Other arguments are options and filters for the test runner. The Vulkan tests use any driver; without a GPU install
Mesa's lavapipe (Debian: apt-get install mesa-vulkan-drivers).";

const TIDY_HELP: &str = "\
Checks the project rules that no compiler checks: layers between crates, circles between files, where `unsafe`, sockets
and world sizes may be named, headers and sizes of files, words that are not plain English, CUDA kernels that nothing
launches, ignored tests, reasons for dependencies, machine paths.
Each finding says where it is and what to do. Needs cargo and git, no network, no build.";

/// `cargo xtask COMMAND`.
#[derive(Debug, Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", about = "The project's own commands")]
#[command(
    after_help = "`cargo xtask help COMMAND` says more. Any other command is passed on to the `firebrick` binary."
)]
pub(crate) struct Cli {
    /// What to do; `None` prints the overview.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// Arguments for another program, as they were typed.
#[derive(Debug, Args)]
pub(crate) struct PassThrough {
    /// Arguments, passed on as they are.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub(crate) args: Vec<String>,
}

/// The commands; those down to `Schema` belong to the `firebrick` binary.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a recipe and write a run folder: `--config FILE`, `--set a.b=c`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Train(PassThrough),
    /// Print what a run would do, and why: `--config FILE`, `--set a.b=c`, `--for b200`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Plan(PassThrough),
    /// Print what machine this is: `--json`, `--for b200`, `--measure`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Profile(PassThrough),
    /// Show the data: counts, lengths, packing, sample rows with their masks: `--config FILE`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Inspect(PassThrough),
    /// Time training steps on synthetic tokens: `--model DIR`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Bench(PassThrough),
    /// Time every operation on every backend that is there, checked against its reference: `--quick`, `--out DIR`
    #[command(long_about = MATRIX_HELP, disable_help_flag = true)]
    BenchMatrix(PassThrough),
    /// Time the writing of text, on random prompts: `--model DIR`, `--sequences 1,64`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    BenchGenerate(PassThrough),
    /// Sample from a model, with or without an adapter
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Generate(PassThrough),
    /// Talk to a model in the terminal, through its chat template: `--model DIR`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Chat(PassThrough),
    /// Merge an adapter into its base: `--merge --model DIR --adapter DIR --out DIR`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Export(PassThrough),
    /// Send an adapter or a model to the Hugging Face Hub: `runs/my-run/adapter --to OWNER/NAME`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Push(PassThrough),
    /// Write a model folder with compressed weights, which every command reads: `--model DIR --out DIR --codec zstd`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Compress(PassThrough),
    /// Write a compressed model folder as it was: `--model DIR --out DIR`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Decompress(PassThrough),
    /// Compare a model's logits with golden ones
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Verify(PassThrough),
    /// Write the report of a run folder, one HTML page with plots: `runs/my-run`
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Report(PassThrough),
    /// Print the JSON schema of recipes
    #[command(long_about = TRAIN_HELP, disable_help_flag = true)]
    Schema(PassThrough),
    /// Run the tests of the whole workspace: `--backends LIST`, filters
    #[command(long_about = TEST_HELP)]
    Test(PassThrough),
    /// Check the source: fmt, tidy, typos, deny, clippy, doc
    #[command(
        after_help = "Every stage runs, even after one has failed. A stage whose tool is not installed is skipped."
    )]
    Lint {
        /// Stages to run; all of them if none is named.
        stages: Vec<Stage>,
    },
    /// Check the project rules: layers, circles, unsafe, headers, sizes, words
    #[command(long_about = TIDY_HELP)]
    Tidy {
        /// Print the warnings too; they never fail.
        #[arg(long)]
        all: bool,
        /// Check the checkout in this folder instead of the one that xtask belongs to.
        #[arg(long, value_name = "PATH")]
        root: Option<PathBuf>,
    },
    /// Pack the trainer into one compressed folder for a machine without Rust
    ///
    /// Builds `firebrick` and `bench-matrix` with cargo profile `dist` and packs them with configs/, assets/, README.md, CHANGELOG.md and the
    /// licenses into dist/firebrick-VERSION-TARGET/ and one .tar.gz next to it. The same inputs give the same archive.
    Dist {
        /// Backend to compile in together with flex: flex (default), candle, wgpu, cuda, or all of them.
        #[arg(long, value_name = "NAME", conflicts_with = "tests")]
        backend: Option<String>,
        /// Pack the GPU suite instead: test programs, their data and run.sh, for a machine with a GPU and no Rust.
        #[arg(long)]
        tests: bool,
    },
    /// Write the quickstart's data, tokenizer and pretraining text again
    ///
    /// Writes the data and tokenizer to assets/quickstart/, as they are shipped, and the text that the base model is
    /// pretrained on to target/quickstart/. All of it follows from the code: the same bytes each time.
    QuickstartData {
        /// The folder to write to, instead of the checkout that xtask belongs to.
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
    },
    /// A command that only the `firebrick` binary knows, with its arguments.
    #[command(external_subcommand)]
    Other(Vec<String>),
}

impl Command {
    /// Name and arguments of a command of the `firebrick` binary.
    ///
    /// # Errors
    /// A command that xtask does not know and that is nearly the name of one it knows.
    ///
    /// # Panics
    /// For a command that xtask carries out itself: `main` handles those.
    pub(crate) fn into_train_call(self) -> Result<(String, Vec<String>)> {
        let (name, rest) = match self {
            Self::Train(rest) => ("train", rest),
            Self::Plan(rest) => ("plan", rest),
            Self::Profile(rest) => ("profile", rest),
            Self::Inspect(rest) => ("inspect", rest),
            Self::Bench(rest) => ("bench", rest),
            Self::BenchMatrix(rest) => ("bench-matrix", rest),
            Self::BenchGenerate(rest) => ("bench-generate", rest),
            Self::Generate(rest) => ("generate", rest),
            Self::Chat(rest) => ("chat", rest),
            Self::Export(rest) => ("export", rest),
            Self::Push(rest) => ("push", rest),
            Self::Compress(rest) => ("compress", rest),
            Self::Decompress(rest) => ("decompress", rest),
            Self::Verify(rest) => ("verify", rest),
            Self::Report(rest) => ("report", rest),
            Self::Schema(rest) => ("schema", rest),
            Self::Other(mut words) => {
                let name = words.remove(0);
                refuse_misspelling(&name)?;
                return Ok((name, words));
            }
            Self::Test(_) | Self::Lint { .. } | Self::Tidy { .. } | Self::Dist { .. } | Self::QuickstartData { .. } => {
                unreachable!("a command that xtask carries out itself")
            }
        };
        Ok((name.to_owned(), rest.args))
    }
}

/// Prints the list of commands.
pub(crate) fn print_overview() -> Result<ExitCode> {
    Cli::command().print_help()?;
    Ok(ExitCode::SUCCESS)
}

/// The words of the command line, with a `--` that directly follows a known command doubled: clap takes the first one for
/// itself, and the commands that start another program pass the second one on.
pub(crate) fn with_leading_dashes(mut words: Vec<String>) -> Vec<String> {
    let is_known = words.get(1).is_some_and(|command| Cli::command().find_subcommand(command).is_some());
    if is_known && words.get(2).is_some_and(|word| word == "--") {
        words.insert(2, "--".to_owned());
    }
    words
}

/// Fails if `command` is one or two letters away from a known command: building the `firebrick` binary only to learn that
/// would cost minutes.
fn refuse_misspelling(command: &str) -> Result<()> {
    let cli = Cli::command();
    let known = cli.get_subcommands().map(clap::Command::get_name).chain(["help"]);
    // Short words are all near each other: two edits count only from five letters on.
    let allowed = if command.chars().count() >= 5 { 2 } else { 1 };
    match known.map(|name| (strsim::levenshtein(name, command), name)).min() {
        Some((distance, nearest)) if distance <= allowed => {
            bail!("no command `{command}`: did you mean `{nearest}`? `cargo xtask help` lists the commands")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let words = std::iter::once("xtask").chain(line.split_whitespace()).map(str::to_owned).collect();
        Cli::try_parse_from(with_leading_dashes(words)).map(|cli| cli.command.expect("a command"))
    }

    /// Name and arguments that reach the `firebrick` binary.
    fn train_call(line: &str) -> String {
        let (name, args) = parse(line).unwrap().into_train_call().unwrap();
        std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_of_the_train_binary_pass_through_unchanged() {
        for line in [
            "train --config a.toml --set a.b=c",
            "train --help",
            "plan a --config b -h -- --set c",
            "bench -- --config x",
            "bench-matrix --quick --help",
            "verify --model m -- --config x",
            "schema",
            "profile --help --json",
            "profile -- -x",
            "plan --config h100.toml --for b200",
        ] {
            assert_eq!(train_call(line), line);
        }
    }

    #[test]
    fn arguments_of_the_test_runner_pass_through_unchanged() {
        for line in ["--backends flex resume", "resume --backends flex", "-- --nocapture", "-j2 x -- --nocapture"] {
            let Command::Test(request) = parse(&format!("test {line}")).unwrap() else { panic!("{line}") };
            assert_eq!(request.args.join(" "), line);
        }
    }

    #[test]
    fn a_misspelled_command_names_the_nearest_and_a_new_one_passes() {
        let message = parse("trian --config a").unwrap().into_train_call().unwrap_err().to_string();
        assert!(message.contains("`train`"), "{message}");
        parse("convert-model").unwrap().into_train_call().unwrap();
        assert!(parse("--config a.toml").is_err());
    }

    #[test]
    fn every_command_has_its_own_page() {
        let names: Vec<String> =
            Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
        for name in ["train", "test", "lint", "tidy", "dist", "quickstart-data"] {
            assert!(names.iter().any(|known| known == name), "{name}");
            let page = parse(&format!("help {name}")).unwrap_err();
            assert_eq!(page.kind(), clap::error::ErrorKind::DisplayHelp);
            assert!(page.to_string().contains(&format!("Usage: cargo xtask {name}")), "{page}");
        }
        assert!(parse("test --help").unwrap_err().to_string().contains("--backends LIST"));
    }

    #[test]
    fn options_that_do_not_exist_are_refused() {
        for line in ["quickstart-data --fast", "dist cuda", "dist --tests --backend cuda", "tidy --fix", "lint format"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("lint format").unwrap_err().to_string().contains("clippy"));
        assert!(
            matches!(parse("dist --backend=cuda").unwrap(), Command::Dist { backend: Some(name), .. } if name == "cuda")
        );
    }
}
