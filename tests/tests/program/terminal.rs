//! The program `firebrick` as a user meets it in a terminal: printed commands work as printed, signals end a run with the status that shells expect,
//! and mistakes are one error line.
//!
//! Trade-off: whole processes on the tiny model, so only what a test inside one process cannot see is tested here.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebrick_tests::fixtures;
use tempfile::TempDir;

/// Longest wait for a step or an end.
const PATIENCE: Duration = Duration::from_secs(120);
/// More steps than any test waits for.
const STEPS: u64 = 1_000_000;

/// A folder whose name every shell treats specially, with a recipe in it that trains for a long time.
struct Workplace {
    _temporary: TempDir,
    folder: PathBuf,
}

impl Workplace {
    fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("it's $HOME [1]; \"x\"");
        fs::create_dir(&folder).unwrap();
        let recipe = format!(
            "backend: flex\nmodel: {0}/tiny-llama\nmax_seq_len: 64\nlora: {{r: 4}}\ndata:\n  path: {0}/data/chat-tiny.jsonl\n  \
             eval_fraction: 0.2\ntrain:\n  steps: {STEPS}\neval:\n  max_new_tokens: 4\n",
            fixtures().display()
        );
        fs::write(folder.join("my recipe.yaml"), recipe).unwrap();
        Self { _temporary: temporary, folder }
    }

    fn program(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
        command.current_dir(&self.folder).env_remove("FIREBRICK_CALLED_AS").env("HF_HUB_OFFLINE", "1");
        command
    }

    /// Runs the program to its end.
    fn output(&self, arguments: &[&str]) -> Output {
        self.program().args(arguments).output().unwrap()
    }

    /// Runs a line as a user pastes it into a shell.
    fn shell(&self, line: &str) -> Output {
        Command::new("sh")
            .args(["-c", line])
            .current_dir(&self.folder)
            .env_remove("FIREBRICK_CALLED_AS")
            .output()
            .unwrap()
    }

    /// Starts a command whose output goes to the file `log`, waits until `steps` steps are logged, and sends it a signal.
    fn stopped(&self, mut command: Command, run: &str, steps: u64, signal: &str) -> (ExitStatus, String) {
        let log = self.folder.join("log");
        command.current_dir(&self.folder).stdout(File::create(&log).unwrap()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let metrics = self.folder.join("runs").join(run).join("metrics.jsonl");
        wait(&mut child, || {
            fs::read_to_string(&metrics).is_ok_and(|text| text.contains(&format!("\"step\":{steps},")))
        });
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(started.elapsed() < PATIENCE, "the run does not end");
            sleep(Duration::from_millis(20));
        };
        (status, fs::read_to_string(&log).unwrap())
    }
}

fn wait(child: &mut Child, mut is_there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_there() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before");
        assert!(started.elapsed() < PATIENCE, "nothing happens");
        sleep(Duration::from_millis(20));
    }
}

/// Returns the command on the line after the one that contains `before`.
fn printed<'a>(text: &'a str, before: &str) -> &'a str {
    let mut lines = text.lines().skip_while(|line| !line.contains(before)).skip(1);
    lines.next().unwrap_or_else(|| panic!("no command after {before:?} in {text}")).trim()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn printed_commands_work_as_printed_and_a_signal_is_the_exit_status() {
    let here = Workplace::new();
    let mut first = here.program();
    first.args(["train", "my recipe.yaml", "--set", "eval.prompts=['what is \"$2\"?', \"it's\"]"]);
    let (status, log) = here.stopped(first, "my recipe", 2, "-INT");
    assert_eq!(status.code(), Some(130), "{log}");

    let stopped_after = |log: &str| -> u64 {
        log.split("stopped after step ").nth(1).unwrap().split(';').next().unwrap().parse().unwrap()
    };
    let (first_step, resume) = (stopped_after(&log), printed(&log, "Continue with").to_owned());
    let mut second = Command::new("sh");
    second.args(["-c", &format!("exec {resume}")]);
    let (status, log) = here.stopped(second, "my recipe", first_step + 2, "-TERM");
    assert_eq!(status.code(), Some(143), "{log}");
    assert!(log.contains("resumed after step"), "{log}");
    assert_eq!(printed(&log, "Continue with"), resume, "the same command continues again");

    let last = here.shell(&format!("{resume} --set train.steps={}", stopped_after(&log) + 2));
    let (output, errors) = (text(&last.stdout), text(&last.stderr));
    assert!(last.status.success() && output.contains("done: "), "{output}{errors}");
    let generate = here.shell(printed(&output, "next:"));
    assert!(generate.status.success(), "{}", text(&generate.stderr));
    assert!(text(&generate.stdout).starts_with("what is \"$2\"?\n"), "{}", text(&generate.stdout));
    for (command, part) in [(" chat ", ""), (" export --merge --gguf ", "for Ollama: ")] {
        let next = output.split("next:").nth(1).unwrap().lines().find(|line| line.contains(command));
        let shown =
            here.shell(&format!("{} < /dev/null", next.unwrap_or_else(|| panic!("no {command:?} in {output}"))));
        let said = text(&shown.stdout);
        assert!(shown.status.success() && said.contains(part), "{said}{}", text(&shown.stderr));
    }
}

#[test]
fn a_plan_without_weights_ends_with_what_is_missing() {
    let here = Workplace::new();
    let bare = here.folder.join("bare");
    fs::create_dir(&bare).unwrap();
    for entry in fs::read_dir(fixtures().join("tiny-llama")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "safetensors") {
            fs::copy(&path, bare.join(path.file_name().unwrap())).unwrap();
        }
    }
    let output = here.output(&["plan", "my recipe.yaml", "--set", "model=./bare"]);
    let (plan, message) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(plan.contains("plan for my recipe"), "{plan}");
    assert!(message.lines().last().unwrap().starts_with("error: a run will not start: "), "{message}");
}

#[cfg(unix)]
#[test]
fn a_folder_of_runs_that_is_read_only_is_found_by_the_plan() {
    use std::os::unix::fs::PermissionsExt;
    let here = Workplace::new();
    let kept = here.folder.join("kept");
    fs::create_dir(&kept).unwrap();
    fs::set_permissions(&kept, fs::Permissions::from_mode(0o555)).unwrap();
    // The superuser may write everywhere.
    if fs::write(kept.join("x"), "").is_ok() {
        return;
    }
    let output = here.output(&["plan", "my recipe.yaml", "--set", "output_dir=kept/runs"]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("cannot write the run folder kept/runs: permission denied"), "{message}");
}

#[test]
fn words_of_other_programs_are_answered_with_status_2() {
    let here = Workplace::new();
    for (words, part) in [
        (&["finetune", "x.toml"][..], "error: there is no command 'finetune': `firebrick train RECIPE`"),
        (&["train", "my recipe.yaml", "--learning_rate", "1e-4"], "write --set train.learning_rate=1e-4"),
    ] {
        let output = here.output(words);
        let message = text(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(part), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    for (words, part) in [
        (&["plan", "my recipe.yaml", "train.steps=5"][..], "write --set train.steps=5"),
        (&["plan", "my recipe.yaml", "--set", "train.steps", "5"], "write --set train.steps=5"),
    ] {
        let output = here.output(words);
        let message = text(&output.stderr);
        assert!(output.status.code() == Some(1) && message.contains(part), "{message}");
    }
}

#[test]
fn a_recipe_is_a_plain_argument_or_an_option_and_only_one() {
    let here = Workplace::new();
    let plan = |arguments: &[&str]| here.output(&[&["plan"], arguments].concat());
    let of_recipe = |output: Output| {
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).lines().take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    let plain = of_recipe(plan(&["my recipe.yaml"]));
    assert_eq!(of_recipe(plan(&["--config", "my recipe.yaml"])), plain);
    assert_eq!(of_recipe(plan(&["--set", "seed=1", "my recipe.yaml"])), plain, "wherever it stands");
    let refused = [
        (&["my recipe.yaml", "--config", "b.toml"][..], "give one recipe: my recipe.yaml and b.toml were given"),
        (&["a.toml", "b.toml"], "give one recipe: a.toml and b.toml were given"),
        (&[], "give the recipe"),
    ];
    for command in ["train", "plan", "inspect"] {
        for (arguments, expected) in refused {
            let output = here.output(&[&[command], arguments].concat());
            let message = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{message}");
            assert!(message.starts_with(&format!("error: {expected}")), "{command}: {message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
}

#[test]
fn a_closed_terminal_saves_the_run() {
    let here = Workplace::new();
    let mut command = Command::new("sh");
    // A separate shell, which does not ignore hangups even if the tests were started with nohup.
    let line = "trap - HUP; exec \"$0\" train --config 'my recipe.yaml'";
    command.args(["-c", line, env!("CARGO_BIN_EXE_firebrick-under-test")]);
    let ignored = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or("0").trim().to_owned();
    if u64::from_str_radix(&ignored, 16).unwrap_or(0) & 1 != 0 {
        // POSIX shells cannot reset a signal that was ignored when they started: nothing can be tested here.
        return;
    }
    let (status, log) = here.stopped(command, "my recipe", 2, "-HUP");
    assert_eq!(status.code(), Some(129), "{log}");
    assert!(log.contains("everything is saved"), "{log}");
}

#[test]
fn a_mistake_is_one_line_and_ends_with_status_1_before_anything_is_written() {
    let here = Workplace::new();
    let cases = [
        (&["--set", "train.lr=1"][..], "unknown key 'lr' in [train]; here it is 'learning_rate'"),
        (&["--set", "lora.target=['q_prj']"], "q_prj"),
        (&["--set", "mode=full"], "[lora]"),
        (&["--set", "model=owner/absent"], "owner/absent"),
    ];
    for command in ["train", "plan"] {
        for (set, expected) in cases {
            let output = here.output(&[&[command, "--config", "my recipe.yaml"], set].concat());
            let message = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{message}");
            assert!(message.starts_with("error: ") && message.contains(expected), "{command}: {message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    assert!(!here.folder.join("runs").exists());
}

#[test]
fn a_pipe_that_is_closed_early_is_no_panic() {
    let here = Workplace::new();
    let line = format!("{} plan --config 'my recipe.yaml' | head -n 1", env!("CARGO_BIN_EXE_firebrick-under-test"));
    let output = here.shell(&line);
    assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("training data: "), "{}", text(&output.stdout));
}
