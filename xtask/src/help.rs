//! What `cargo xtask help` prints, and the guard against misspelt commands. It gives up generated help: the text is
//! written by hand, beside the few options it describes.

use anyhow::{Result, bail};

/// Commands that xtask carries out itself; everything else belongs to the `train` binary.
pub(crate) const OWN_COMMANDS: [&str; 5] = ["test", "lint", "tidy", "dist", "quickstart-data"];

/// Commands of the `train` binary that are worth guarding against misspelling.
const TRAIN_COMMANDS: [&str; 7] = ["train", "plan", "inspect", "bench", "generate", "verify", "schema"];

/// The first page.
pub(crate) const OVERVIEW: &str = "\
cargo xtask <command> [options]

Run (builds the `train` binary with the backends that the recipe needs, then starts it):
  train      --config FILE [--set a.b=c]...   train, and write a run folder
  plan       --config FILE [--set a.b=c]...   print what a run would do, and why
  inspect    --config FILE [--set a.b=c]...   show the data: counts, lengths, packing, sample rows with their masks
  bench      --model DIR ...                  time training steps on made-up tokens
  generate   ...                              sample from a model, with or without an adapter
  verify     ...                              compare a model's logits with golden ones
  <other>    ...                              any other command of the `train` binary

Check:
  test       [--backends LIST] [filter]       the tests of the whole workspace
  lint       [stage]...                       fmt, tidy, typos, deny, clippy, doc: all, or those named
  tidy                                        the house rules: floors, unsafe, headers, file sizes, paths

Ship:
  dist       [--backend NAME]                 one compressed folder for a machine without Rust

Make again:
  quickstart-data                             the quickstart's data, tokenizer and pretraining text

`cargo xtask help <command>` says more. CONTRIBUTING.md has the rules behind `tidy`.
";

const TRAIN: &str = "\
cargo xtask <train | plan | inspect | bench | generate | verify | ...> [options of that command]

Builds `train` (cargo profile `fast`) with the cargo features that the backend needs, and runs it with the same options
in the folder you are in. Its exit code is the exit code. `cargo xtask train --help` asks the binary itself, which is
built first when it is not there yet.

Options read here:
  --config FILE      a bare file name that is not in this folder is looked up in configs/; `.toml` may be left out
  --backend NAME     auto | flex | candle | wgpu | cuda: instead of the recipe's `backend`
  --set backend=NAME the same

Which backend is built: --backend or --set, else the recipe's `backend` key, else the one of the run named by --resume,
else auto. `auto` is cuda where an NVIDIA driver is installed, wgpu on macOS, else flex. `flex` is always built in
beside, so that `auto` can fall back at run time without another build.

inspect --config FILE [--rows N] [--html FILE] shows what will be trained: what was read, dropped and cut with reasons,
lengths, how full rows are, and sample rows with the trained tokens marked; --html writes one page with the same.
bench --model DIR times QLoRA steps of that model on made-up tokens: tokens a second, seconds to load and to the end of the
first step, peak memory, utilisation; --trace adds the time of each operation beside its roof, --json prints one object.
The build is optimised, but not as `cargo xtask dist` ships it: time the latter for numbers worth keeping.
";

const TEST: &str = "\
cargo xtask test [--backends LIST] [--no-nextest] [options and filters for cargo test]

Runs the tests of the whole workspace in one build: every backend is compiled into one set of crates, because Burn
built once per backend would take four times as long. Uses cargo-nextest where it is installed, then the doc tests.

  --backends LIST    a comma-separated part of flex,candle,wgpu,cuda (flex is always in); default: all of them.
                     Lists differ in their cargo features, so changing the list builds Burn again: keep to one
  --no-nextest       use `cargo test` even if cargo-nextest is installed

Vulkan tests use any driver; without a GPU install Mesa's lavapipe (Debian: apt-get install mesa-vulkan-drivers).
";

const LINT: &str = "\
cargo xtask lint [stage]...

Stages, cheap ones first; all of them, or those named. Every stage runs, even after one has failed.
  fmt       cargo fmt --all --check
  tidy      the house rules, as `cargo xtask tidy`
  typos     spelling, where the `typos` tool is installed
  deny      licences, bans and sources, where cargo-deny is installed
  clippy    cargo clippy over every target with all backends compiled in; warnings are errors
  doc       rustdoc over the workspace; broken links are errors
";

const TIDY: &str = "\
cargo xtask tidy

Checks the rules of the house that no compiler checks: which crate may depend on which, where `unsafe`, CubeCL, run
configs and world sizes may be named, file headers and sizes, leftovers, reasons beside dependencies, machine paths.
Each finding says where it is and what to do. Needs cargo and git, no network, no build.
";

const DIST: &str = "\
cargo xtask dist [--backend NAME | --tests]

Builds `train` with cargo profile `dist` and packs it with configs/, assets/, README.md, CHANGELOG.md and the licences
into dist/firebrick-<version>-<target>/ and one .tar.gz beside it. The same inputs give the same archive.

  --backend NAME     flex (default) | candle | wgpu | cuda: built in beside flex
  --tests            the GPU suite instead: test programs, their data and run.sh, for a machine with a GPU and no Rust
";

const QUICKSTART_DATA: &str = "\
cargo xtask quickstart-data [--root DIR]

Writes the quickstart's data and tokenizer to assets/quickstart/, as they are shipped, and the text that its base model
is pretrained on to target/quickstart/. All of it follows from the code: the same bytes each time.
";

/// The page about `command`; the page of the `train` binary's commands for all that xtask does not do itself.
pub(crate) fn of(command: &str) -> &'static str {
    match command {
        "test" => TEST,
        "lint" => LINT,
        "tidy" => TIDY,
        "dist" => DIST,
        "quickstart-data" => QUICKSTART_DATA,
        _ => TRAIN,
    }
}

/// Fails if `command` is one or two letters away from a known command, or is an option: building the `train` binary
/// only to learn that would cost minutes.
pub(crate) fn refuse_misspelling(command: &str) -> Result<()> {
    if command.starts_with('-') {
        bail!("expected a command before the option `{command}`. `cargo xtask help` lists the commands");
    }
    let known = || TRAIN_COMMANDS.iter().chain(&OWN_COMMANDS);
    if known().any(|name| *name == command) {
        return Ok(());
    }
    // Short words are all near each other: two edits count only from five letters on.
    let allowed = if command.chars().count() >= 5 { 2 } else { 1 };
    match known().min_by_key(|name| edit_distance(name, command)) {
        Some(nearest) if edit_distance(nearest, command) <= allowed => {
            bail!("no command `{command}`: did you mean `{nearest}`? `cargo xtask help` lists the commands")
        }
        _ => Ok(()),
    }
}

/// Levenshtein distance: the least number of letters to insert, drop or replace.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_single_letters() {
        assert_eq!(edit_distance("train", "train"), 0);
        assert_eq!(edit_distance("train", "tarin"), 2);
        assert_eq!(edit_distance("plan", "plans"), 1);
        assert_eq!(edit_distance("", "abc"), 3);
    }

    #[test]
    fn a_misspelt_command_names_the_nearest_and_a_new_one_passes() {
        let message = refuse_misspelling("trian").unwrap_err().to_string();
        assert!(message.contains("`train`"), "{message}");
        assert!(refuse_misspelling("--config").is_err());
        for command in ["train", "tidy", "schema", "profile", "bench-matrix"] {
            refuse_misspelling(command).unwrap();
        }
    }

    #[test]
    fn every_own_command_has_its_own_page() {
        for command in OWN_COMMANDS {
            assert!(of(command).starts_with(&format!("cargo xtask {command}")));
        }
    }
}
