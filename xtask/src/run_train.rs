//! `cargo xtask train`, `plan`, `inspect`, `bench` and the others: select the backend, build, run.
//!
//! Trade-off: the options belong to the `firebrick` binary. Only those that decide the build are read here, and they are passed on; the binary
//! reports a mistake in any other option, after the build.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::backend::{Choice, Machine, backend_key, choose, is_yaml};
use crate::build::{BENCH_MATRIX, FIREBRICK, build};
use crate::workspace::{Workspace, forget_cargo_run, shown};

/// The request for the build, and the arguments for the `firebrick` binary.
#[derive(Debug, Default, PartialEq, Eq)]
struct Request {
    /// The recipe, plain or as the value of `--config`, and its index in `args`.
    config: Option<(usize, String)>,
    /// Value of `--resume`.
    resume: Option<String>,
    /// A backend's name, and the option that gave it.
    backend: Option<(String, &'static str)>,
    /// Arguments for the binary, the subcommand first.
    args: Vec<String>,
}

impl Request {
    /// Reads `rest`, the arguments after `subcommand`. A plain recipe has to come first, because which options of the binary take a value is not
    /// known here; the binary reads it anywhere. `--backend X` becomes `--set backend=X` for commands that read a recipe, so that the binary
    /// uses the same backend; the last of several requests wins, as it does there.
    fn parse(subcommand: &str, rest: &[String]) -> Result<Self> {
        let reads_recipe = matches!(subcommand, "train" | "plan" | "inspect" | "reward");
        let mut request = Self { args: vec![subcommand.to_owned()], ..Self::default() };
        let mut words = rest.iter();
        if let Some(recipe) = rest.first().filter(|word| reads_recipe && !word.starts_with('-')) {
            request.args.extend(words.next().cloned());
            request.config = Some((1, recipe.clone()));
        }
        while let Some(word) = words.next() {
            if word == "--" {
                request.args.push(word.clone());
                request.args.extend(words.cloned());
                break;
            }
            let (name, inline) = match word.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value)),
                _ => (word.as_str(), None),
            };
            if !matches!(name, "--config" | "--resume" | "--backend" | "--set") {
                request.args.push(word.clone());
                continue;
            }
            let value = match (name, inline, words.as_slice().first()) {
                (_, Some(value), _) => value.to_owned(),
                // `--resume` alone means "the run of this recipe".
                ("--resume", None, next) if next.is_none_or(|next| next.starts_with("--")) => {
                    request.args.push(word.clone());
                    continue;
                }
                (_, None, Some(_)) => words.next().cloned().unwrap_or_default(),
                (_, None, None) => bail!("{name} needs a value: `cargo xtask help {subcommand}` shows the options"),
            };
            let typed = if inline.is_some() { vec![word.clone()] } else { vec![word.clone(), value.clone()] };
            request.take(name, value, typed, reads_recipe);
        }
        Ok(request)
    }

    /// Records one of the options that decide the build, and passes it on to the binary, as it was `typed` if possible.
    fn take(&mut self, name: &str, value: String, typed: Vec<String>, reads_recipe: bool) {
        self.args.extend(match name {
            "--backend" if reads_recipe => vec!["--set".to_owned(), format!("backend={value}")],
            // A separate word, so that the file's full path can replace it.
            "--config" => vec![name.to_owned(), value.clone()],
            _ => typed,
        });
        match name {
            "--config" => self.config = Some((self.args.len() - 1, value)),
            "--resume" => self.resume = Some(value),
            "--backend" => self.backend = Some((value, "--backend")),
            _ => {
                if let Some(("backend", name)) = value.split_once('=').map(|(key, name)| (key.trim(), name)) {
                    let quotes: &[char] = &['"', '\'', ' '];
                    self.backend = Some((name.trim_matches(quotes).to_owned(), "--set backend"));
                }
            }
        }
    }
}

/// Builds `firebrick` or `bench-matrix` as `rest` requests and runs it. On Unix it replaces this process, so Ctrl-C, SIGTERM and the exit code go
/// directly to and from the binary; elsewhere this process waits for it.
pub(crate) fn run(workspace: &Workspace, subcommand: &str, rest: &[String]) -> Result<ExitCode> {
    let mut request = Request::parse(subcommand, rest)?;
    let here = env::current_dir().context("the current folder does not exist any more")?;
    if let Some((place, name)) = &request.config {
        let path = find_config(name, &here, workspace.root())?;
        request.args[*place] = path.to_string_lossy().into_owned();
    }
    let (program, choice) = if subcommand == "bench-matrix" {
        // A separate program with the name of the subcommand.
        request.args.remove(0);
        (BENCH_MATRIX, Choice::all("bench-matrix times every backend that is there".to_owned()))
    } else {
        (FIREBRICK, choose_backend(&request, &Machine::detect())?)
    };
    let binary = build(workspace, program, "fast", &choice, None)?;
    let mut command = Command::new(binary);
    // The name of `firebrick` in the commands that it prints, and the folder of its recipes and assets, whichever target folder it is in.
    command.args(&request.args).env("FIREBRICK_CALLED_AS", "cargo xtask").env("FIREBRICK_SHARE", workspace.root());
    forget_cargo_run(&mut command);
    become_child(command)
}

/// Chooses the backend for `request`: from the command line, else from its recipe, else from the run it resumes.
fn choose_backend(request: &Request, machine: &Machine) -> Result<Choice> {
    if let Some(choice) = without_a_device(&request.args) {
        return choose(Some(choice), machine);
    }
    if let Some((name, origin)) = &request.backend {
        return choose(Some((name, origin)), machine);
    }
    let recipe = match (&request.config, &request.resume) {
        (Some((place, _)), _) => Some(PathBuf::from(&request.args[*place])),
        (None, Some(resumed)) => config_of_run(Path::new(resumed)),
        (None, None) => None,
    };
    let Some(path) = recipe else { return choose(None, machine) };
    let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    let key = backend_key(&text, &path)?;
    let origin = path.display().to_string();
    choose(key.as_deref().map(|name| (name, origin.as_str())), machine)
}

/// Returns the backend, and the reason, for a command that computes nothing: any binary plans for another machine, and one with wgpu finds the GPUs
/// of every maker.
fn without_a_device(args: &[String]) -> Option<(&'static str, &'static str)> {
    let is_for = |word: &String| word == "--for" || word.starts_with("--for=");
    match args.first().map(String::as_str) {
        Some("plan" | "profile") if args.iter().any(is_for) => Some(("flex", "--for")),
        // The measurement needs the backend of --backend, or the one that a run would use.
        Some("profile") if args.iter().any(|word| word == "--measure") => None,
        Some("profile") => Some(("wgpu", "profile")),
        Some("report") => Some(("flex", "report")),
        Some("completions") => Some(("flex", "completions")),
        _ => None,
    }
}

/// Finds the recipe `name`: a path as it is, or a bare name in the workspace's `configs/`.
fn find_config(name: &str, here: &Path, root: &Path) -> Result<PathBuf> {
    if here.join(name).is_file() {
        return Ok(PathBuf::from(name));
    }
    let bare = Path::new(name).components().count() == 1;
    let folder = root.join("configs");
    let shipped = [folder.join(name), folder.join(format!("{name}.toml"))];
    match shipped.into_iter().find(|path| bare && path.is_file()) {
        Some(path) => Ok(path),
        None if bare => {
            bail!("no recipe `{name}`, neither in {} nor in configs/, which has: {}", here.display(), list(&folder))
        }
        None => bail!("no recipe at {name} (looked from {}). configs/ has: {}", here.display(), list(&folder)),
    }
}

/// Lists the recipes in `folder`, for a message.
fn list(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name.ends_with(".toml") || is_yaml(Path::new(name)));
    names.sort();
    if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
}

/// Returns the `config.toml` of a run, given its folder or one of its checkpoints.
fn config_of_run(resumed: &Path) -> Option<PathBuf> {
    resumed.ancestors().take(3).map(|folder| folder.join("config.toml")).find(|path| path.is_file())
}

#[cfg(unix)]
fn become_child(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    // `exec` returns only if it failed.
    let error = command.exec();
    Err(error).with_context(|| format!("could not start {}", shown(&command)))
}

#[cfg(not(unix))]
fn become_child(mut command: Command) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("could not start {}", shown(&command)))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::words;

    const BARE: Machine = Machine { nvidia_driver: None, macos: false };

    fn request(line: &str) -> Request {
        let (subcommand, rest) = line.split_once(' ').unwrap();
        Request::parse(subcommand, &words(rest)).unwrap()
    }

    fn features(line: &str) -> String {
        choose_backend(&request(line), &BARE).unwrap().features()
    }

    #[test]
    fn options_of_the_binary_pass_through_unchanged() {
        for line in [
            "verify --model m --tol=1e-3 -- --config x",
            "train --config a.toml --set train.lr=1 --set=backend=\"wgpu\"",
            "verify --backend candle",
            "profile --json",
            "train --resume runs/a",
            "train --resume",
            "train a.toml --set train.lr=1 --resume",
            "plan a.toml b.toml --config c.toml",
        ] {
            assert_eq!(request(line).args, words(line));
        }
        assert_eq!(request("verify -- --config x").config, None);
        assert_eq!(request("train --config a.toml --set a.b=1").config, Some((2, "a.toml".to_owned())));
        assert_eq!(request("train a.toml --set a.b=1").config, Some((1, "a.toml".to_owned())));
        assert_eq!(request("report runs/a").config, None, "only some commands read a recipe");
        let train = request("train --set backend=cuda --backend candle");
        assert_eq!(train.args, words("train --set backend=cuda --set backend=candle"), "where a recipe is read");
        let resumed = request("train --resume --config a.toml");
        assert_eq!((resumed.resume, resumed.config), (None, Some((3, "a.toml".to_owned()))));
        assert_eq!(request("train --resume runs/a").resume.as_deref(), Some("runs/a"));
        let error = Request::parse("train", &words("--config")).unwrap_err();
        assert!(error.to_string().contains("--config needs a value"), "{error}");
    }

    #[test]
    fn the_last_request_for_a_backend_decides_the_build() {
        for (line, expected) in [
            ("train --config a.toml --set=backend=\"wgpu\"", "flex,wgpu"),
            ("train --set backend=cuda --backend candle", "flex,candle"),
            ("bench --backend candle", "flex,candle"),
            // The smallest binary makes a plan for another machine.
            ("plan --config a.toml --set backend=cuda --for b200", "flex"),
            ("plan a.toml --for=m4-max", "flex"),
            ("profile --json", "flex,wgpu"),
            ("completions bash", "flex"),
        ] {
            assert_eq!(features(line), expected, "{line}");
        }
    }

    #[test]
    fn a_bare_name_is_looked_up_in_configs_and_a_path_is_not() {
        let root = tempfile::tempdir().unwrap();
        let configs = root.path().join("configs");
        fs::create_dir(&configs).unwrap();
        fs::write(configs.join("small.toml"), "backend = \"candle\"").unwrap();
        let here = tempfile::tempdir().unwrap();
        assert_eq!(find_config("small.toml", here.path(), root.path()).unwrap(), configs.join("small.toml"));
        assert_eq!(find_config("small", here.path(), root.path()).unwrap(), configs.join("small.toml"));
        assert!(find_config("sub/small.toml", here.path(), root.path()).is_err());
        let message = find_config("other.toml", here.path(), root.path()).unwrap_err().to_string();
        assert!(message.contains("small.toml"), "{message}");
        fs::write(here.path().join("small.toml"), "").unwrap();
        assert_eq!(find_config("small.toml", here.path(), root.path()).unwrap(), PathBuf::from("small.toml"));
    }

    #[test]
    fn a_resumed_run_is_built_for_its_own_recipe() {
        let run = tempfile::tempdir().unwrap();
        let checkpoint = run.path().join("checkpoints/step-3");
        fs::create_dir_all(&checkpoint).unwrap();
        fs::write(run.path().join("config.toml"), "backend = \"cuda\"").unwrap();
        assert_eq!(features(&format!("train --resume {}", checkpoint.display())), "flex,cuda");
    }
}
