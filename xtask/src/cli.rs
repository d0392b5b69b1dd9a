//! The command line of xtask: the commands, their options and their help.
//!
//! Trade-off: commands that start another program (`train`, `plan`, ..., `test`) take their arguments as they are and read
//! the few options they need themselves, so those options are described in prose here. A new command of the `firebrick`
//! binary needs a line here; in return a misspelled one is refused before any build.

use std::path::PathBuf;

use clap::{Arg, FromArgMatches, Subcommand};

use crate::lint::Stage;

/// Help that the commands of the `firebrick` binary share.
const TRAIN_HELP: &str = "\
Builds `firebrick` (cargo profile `fast`) with the cargo features that the backend needs, and runs it with the same
arguments in the current folder. Its exit code is the exit code. `cargo xtask train --help` asks the binary itself, which
is built first if necessary.

Options that xtask reads and passes on:
  RECIPE             as the first argument of train, plan and inspect, or --config RECIPE: a bare file name that is not in
                     the current folder is looked up in configs/; `.toml` may be omitted
  --backend NAME     auto | flex | candle | wgpu | cuda: overrides the recipe's `backend`
  --set backend=NAME the same

The backend comes from --backend or --set, else from the recipe's `backend` key, else from the run that --resume names,
else it is `auto`: cuda if an NVIDIA driver is installed, wgpu on macOS, otherwise flex. `flex` is always compiled in as
well, so that `auto` can fall back at run time without another build. `plan --for MACHINE` needs no backend and builds flex
alone, and so does `report`; `profile` builds wgpu, which finds the GPUs of every maker, unless it is to `--measure`.";

/// Help for the options in which `bench-matrix` differs.
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
  --slow             all cases of tests that take a sample, whole fuzz corpora, and a project that depends on the
                     packaged crates (sets FIREBRICK_SLOW_TESTS), as CI does each night
  --no-nextest       use `cargo test` even if cargo-nextest is installed

What took longest is listed at the end: tests with nextest, test programs without. On Linux the tests write to memory
if /dev/shm has 4 GiB to spare; TMPDIR names another folder.

Other arguments are options and filters for the test runner. The Vulkan tests use any driver; without a GPU install
Mesa's lavapipe (Debian: apt-get install mesa-vulkan-drivers).";

const TIDY_HELP: &str = "\
Checks the project rules that no compiler checks: layers between crates, circles between files, where `unsafe`, sockets
and world sizes may be named, headers and sizes of files, words that are not plain English, CUDA kernels that nothing
launches, ignored tests, reasons for dependencies, machine paths, links of Markdown files.
Each finding says where it is and what to do. Needs cargo and git, no network, no build.";

/// The commands of the `firebrick` binary, with their lines in the overview.
const PASSED_ON: [(&str, &str); 19] = [
    ("train", "Train a recipe and write a run folder: `RECIPE`, `--set a.b=c`"),
    ("plan", "Print what a run would do, and why: `RECIPE`, `--set a.b=c`, `--for b200`"),
    ("new", "Write a commented recipe that plans here: `MODEL DATA`, `--out FILE`"),
    ("convert", "Turn a configuration of axolotl or LLaMA-Factory into a recipe: `FILE`, `--out FILE`"),
    ("doctor", "Check what a run needs on this machine; exit code 1 if one would fail"),
    ("profile", "Print what machine this is: `--json`, `--for b200`, `--measure`"),
    ("inspect", "Show the data: counts, lengths, packing, sample rows with their masks: `RECIPE`"),
    ("reward", "Try the rewards of a recipe without a model: `RECIPE --completions FILE`"),
    ("bench", "Time training steps on synthetic tokens: `--model DIR`"),
    (
        "bench-matrix",
        "Time every operation on every backend that is there, checked against its reference: `--quick`, `--out DIR`",
    ),
    ("bench-generate", "Time the writing of text, on random prompts: `--model DIR`, `--sequences 1,64`"),
    ("generate", "Sample from a model, with or without an adapter"),
    ("chat", "Talk to a model in the terminal, through its chat template: `--model DIR`"),
    ("export", "Merge an adapter into its base: `--merge --model DIR --adapter DIR --out DIR`"),
    ("push", "Send an adapter or a model to the Hugging Face Hub: `runs/my-run/adapter --to OWNER/NAME`"),
    ("verify", "Compare a model's logits with golden ones"),
    ("report", "Write the report of a run folder, one HTML page with plots: `runs/my-run`"),
    ("schema", "Print the JSON schema of recipes"),
    (
        "completions",
        "Print a script that makes a shell complete commands and options of `firebrick`: `bash`, `zsh`, ...",
    ),
];

/// The commands that xtask carries out itself.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the tests of the whole workspace: `--backends LIST`, filters
    #[command(long_about = TEST_HELP)]
    Test {
        /// Arguments, passed on as they are.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        args: Vec<String>,
    },
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
        /// Check the checkout in this folder instead of the one that xtask belongs to.
        #[arg(long, value_name = "PATH")]
        root: Option<PathBuf>,
    },
    /// Write docs/ as a site of web pages that need no network, and check its links: `--out DIR`
    ///
    /// Needs mdBook (`cargo install mdbook --version 0.5.4 --locked`), in PATH or in target/tools/bin.
    Site {
        /// The folder to write to, instead of target/site.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Pack the program into one compressed folder for a machine without Rust
    ///
    /// Builds `firebrick` with cargo profile `dist` and packs it with completions and manual pages, configs/, assets/, README.md, CHANGELOG.md and
    /// the licenses into dist/firebrick-VERSION-TARGET/, and one .tar.gz with its .sha256 next to it. The same inputs give the same archive.
    /// A program for Linux is linked by zig (pip install ziglang==0.17.1) and needs glibc 2.28, which is checked.
    Dist {
        /// System to build for, such as aarch64-unknown-linux-gnu, instead of this one. `rustup target add` installs what Rust needs for it.
        #[arg(long, value_name = "TRIPLE", conflicts_with = "tests")]
        target: Option<String>,
        /// Backend to compile in together with flex: candle, wgpu, cuda, or all of them and `bench-matrix`. Without it flex, wgpu and cuda
        /// are, on macOS flex and wgpu.
        #[arg(long, value_name = "NAME", conflicts_with = "tests")]
        backend: Option<String>,
        /// Pack a Python wheel as well, with maturin (pip install maturin==1.16.0).
        #[arg(long, conflicts_with = "tests")]
        wheel: bool,
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
}

/// The request of the command line.
#[derive(Debug)]
pub(crate) enum Call {
    /// The list of commands.
    Overview,
    /// A command of xtask.
    Own(Command),
    /// A command of the `firebrick` binary, with its arguments.
    PassedOn(String, Vec<String>),
}

impl Call {
    /// Reads the words of the command line, the program's name first.
    ///
    /// # Errors
    /// Errors and requests for help, as clap reports them.
    pub(crate) fn parse(words: Vec<String>) -> Result<Self, clap::Error> {
        let matches = command_line().try_get_matches_from(with_leading_dashes(words))?;
        match matches.subcommand() {
            None => Ok(Self::Overview),
            Some((name, found)) if PASSED_ON.iter().any(|(known, _)| *known == name) => {
                let args = found.get_many("args").into_iter().flatten().cloned().collect();
                Ok(Self::PassedOn(name.to_owned(), args))
            }
            Some(_) => Command::from_arg_matches(&matches).map(Self::Own),
        }
    }
}

/// Describes everything that can be typed, for clap.
pub(crate) fn command_line() -> clap::Command {
    let args = Arg::new("args").help("Arguments, passed on as they are").value_name("ARGUMENTS").num_args(0..);
    let args = args.trailing_var_arg(true).allow_hyphen_values(true);
    let passed_on = PASSED_ON.map(|(name, about)| {
        let help = if name == "bench-matrix" { MATRIX_HELP } else { TRAIN_HELP };
        clap::Command::new(name).about(about).long_about(help).disable_help_flag(true).arg(args.clone())
    });
    let line = clap::Command::new("xtask").bin_name("cargo xtask").subcommands(passed_on);
    Command::augment_subcommands(line)
        .about("The project's own commands")
        .after_help("`cargo xtask help COMMAND` says more")
}

/// Doubles a `--` that directly follows a known command: clap removes the first one, and the commands that start another program pass the second one
/// on.
fn with_leading_dashes(mut words: Vec<String>) -> Vec<String> {
    let is_known = words.get(1).is_some_and(|command| command_line().find_subcommand(command).is_some());
    if is_known && words.get(2).is_some_and(|word| word == "--") {
        words.insert(2, "--".to_owned());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Call, clap::Error> {
        Call::parse(std::iter::once("xtask").chain(line.split_whitespace()).map(str::to_owned).collect())
    }

    #[test]
    fn the_command_line_is_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn arguments_of_other_programs_pass_through_unchanged() {
        for line in [
            "train --config a.toml --set a.b=c",
            "train --help",
            "plan a --config b -h -- --set c",
            "bench -- --config x",
            "bench-matrix --quick --help",
            "verify --model m -- --config x",
            "schema",
            "profile -- -x",
        ] {
            let Call::PassedOn(name, args) = parse(line).unwrap() else { panic!("{line}") };
            assert_eq!([vec![name], args].concat().join(" "), line);
        }
        for line in ["--backends flex resume", "resume --backends flex", "-- --nocapture", "-j2 x -- --nocapture"] {
            let Call::Own(Command::Test { args }) = parse(&format!("test {line}")).unwrap() else { panic!("{line}") };
            assert_eq!(args.join(" "), line);
        }
    }

    #[test]
    fn a_misspelled_command_names_the_nearest_before_any_build() {
        let message = parse("trian --config a").unwrap_err().to_string();
        assert!(message.contains("'train'"), "{message}");
        assert!(parse("--config a.toml").is_err());
        assert!(matches!(parse("").unwrap(), Call::Overview));
    }

    #[test]
    fn every_command_has_its_own_page() {
        for name in ["train", "bench-matrix", "test", "lint", "tidy", "dist", "quickstart-data"] {
            let page = parse(&format!("help {name}")).unwrap_err();
            assert_eq!(page.kind(), clap::error::ErrorKind::DisplayHelp);
            assert!(page.to_string().contains(&format!("Usage: cargo xtask {name}")), "{page}");
        }
        assert!(parse("test --help").unwrap_err().to_string().contains("--backends LIST"));
    }

    #[test]
    fn options_that_do_not_exist_are_refused() {
        let wrong = [
            "quickstart-data --fast",
            "dist cuda",
            "dist --tests --backend cuda",
            "dist --tests --target x",
            "dist --tests --wheel",
            "tidy --fix",
            "lint format",
        ];
        wrong.into_iter().for_each(|line| assert!(parse(line).is_err(), "{line}"));
        let line = "dist --backend=cuda --target aarch64-apple-darwin --wheel";
        let Call::Own(Command::Dist { target, backend, wheel, tests }) = parse(line).unwrap() else { panic!("dist") };
        assert_eq!((target.as_deref(), backend.as_deref()), (Some("aarch64-apple-darwin"), Some("cuda")));
        assert!(wheel && !tests);
    }
}
