//! The program `firebrick` as it is installed: started from any folder, with its recipes and assets where an archive or a package puts them.
//!
//! Trade-off: the program is a link to the one under test, in folders that look like an installation; nothing is packed or unpacked.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// An installation, and an empty folder to work in.
struct Installed {
    root: TempDir,
    program: PathBuf,
}

impl Installed {
    /// Installs the program in one folder below the root, and its files in another.
    fn new(program: &str, share: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for folder in [program, share, "work", "cache", "home"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
        for name in ["configs", "assets"] {
            symlink(checkout.join(name), at(share).join(name)).unwrap();
        }
        let program = at(program).join("firebrick");
        link_program(&program);
        Self { root, program }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    /// Creates a command of the program in the empty folder; nothing listens where the Hub would be.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(self.at("work")).env("FIREBRICK_CACHE", self.at("cache"));
        command.env("HOME", self.at("home")).env("HF_ENDPOINT", "http://127.0.0.1:9").env("NO_COLOR", "1");
        for name in ["FIREBRICK_CALLED_AS", "FIREBRICK_SHARE", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs the program to its end.
    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs the program, which must succeed, and returns what it printed.
    fn printed(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

/// Puts the program under test at a path away from its build, next to which it finds recipes and assets.
pub(crate) fn link_program(to: &Path) {
    let built = env!("CARGO_BIN_EXE_firebrick-under-test");
    // A hard link is quick, where both are on one disk; a symbolic one would lead back to the build.
    fs::hard_link(built, to).or_else(|_| fs::copy(built, to).map(drop)).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_shipped_recipe_and_its_files_are_found_from_any_folder() {
    for (program, share) in [("archive", "archive"), ("prefix/bin", "prefix/share/firebrick")] {
        let installed = Installed::new(program, share);
        let plan = |recipe: &str| installed.printed(&["plan", recipe, "--set", "backend=flex"]);
        let by_name = plan("quickstart");
        assert!(by_name.contains("4,000 records") && by_name.contains("plan for quickstart\n"), "{by_name}");
        // A copy of the recipe, as users change it, has the same files.
        fs::copy(installed.at(share).join("configs/quickstart.toml"), installed.at("work/mine.toml")).unwrap();
        assert!(plan("mine.toml").contains("plan for quickstart\n"));
    }
}

#[test]
fn a_shipped_recipe_is_planned_for_a_machine_and_for_all_without_its_model_and_data() {
    let installed = Installed::new("archive", "archive");
    // A model that is not shipped stays an error, and so does a plan for this machine. These wait for a Hub that does not answer, the others do not.
    let refused = [&["plan", "h100.toml"][..], &["plan", "h100.toml", "--for", "b200", "--set", "model=x/y"]];
    let refused = refused
        .map(|arguments| installed.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let printed = |arguments: &[&str]| {
        let output = installed.command(arguments).env("HF_HUB_OFFLINE", "1").output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    for recipe in ["h100.toml", "dpo.toml", "apple.toml"] {
        let plan = printed(&["plan", recipe, "--for", "b200", "--set", "compute=bfloat16"]);
        for part in ["cannot be reached: planned from", "the data was not read: 10,000 full rows", "tokens/s", "B200"] {
            assert!(plan.contains(part), "{recipe}: {part}: {plan}");
        }
    }
    let table = printed(&["plan", "h100.toml", "--for", "all", "--price-per-hour", "h100=2.50"]);
    let line = |name: &str| {
        let found = table.lines().position(|line| line.starts_with(name));
        found.unwrap_or_else(|| panic!("{name}: {table}"))
    };
    assert!(line("H100 SXM") < line("A100 80GB SXM") && line("A100 80GB SXM") < line("Apple M4 Max"), "{table}");
    let never = line("Never measured");
    assert!(line("A100 80GB SXM") < never && never < line("RTX 4090") && never < line("Apple M4 Max"), "{table}");
    assert!(line("Apple M4 Max") < line("T4: compute") && line("T4: compute") < line("Gaudi 3: no backend"), "{table}");
    line("this machine");
    let is_row = |line: &&str| line.contains("cuda, ") && !line.contains(": ");
    let priced: Vec<&str> = table.lines().filter(is_row).filter(|line| !line.contains("no price")).collect();
    assert!(priced.len() == 1 && priced[0].starts_with("H100 SXM"), "{table}");
    let table = printed(&["plan", "h100.toml", "--for", "all"]);
    assert!(table.lines().any(|line| line.starts_with("machine ") && line.ends_with("recompute")), "{table}");
    for mut refused in refused {
        assert_eq!(refused.wait().unwrap().code(), Some(1));
    }
}

#[test]
fn an_adapter_of_another_base_is_refused_by_the_name_of_its_own_and_no_prompt_is_printed() {
    let installed = Installed::new("archive", "archive");
    let fixture = |name: &str| firebrick_tests::fixture(name).display().to_string();
    let (model, adapter) = (fixture("tiny-gemma3"), fixture("tiny-llama-lora"));
    let with = ["--model", &model, "--adapter", &adapter];
    let output = installed.output(&[&["generate", "--backend", "flex", "--prompt", "Say hello"], &with[..]].concat());
    let message = text(&output.stderr);
    assert!(message.contains("The adapter was trained on tiny-llama: give that as the model"), "{message}");
    assert!(!output.status.success() && !text(&output.stdout).contains("Say hello"), "{}", text(&output.stdout));
}

/// Commands in the pages and in the README, with `--help` after them: what is wrong before it is found, and nothing is done.
#[test]
fn every_command_of_the_pages_is_understood() {
    let installed = Installed::new("archive", "archive");
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pages = fs::read_dir(checkout.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut count = 0;
    for page in pages.chain([checkout.join("README.md")]) {
        for line in commands(&fs::read_to_string(&page).unwrap()) {
            let mut words = words(&line);
            words.push("--help");
            let message = text(&installed.output(&words).stderr);
            assert!(message.is_empty(), "{}: {line}: {message}", page.display());
            count += 1;
        }
    }
    assert!(count >= 30, "only {count} commands were found");
}

/// Returns the commands of `firebrick` in the blocks of a page that are for a shell.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or_default().trim());
    let own = ["test", "lint", "tidy", "dist", "site", "bench-matrix", "quickstart-data"];
    let command = |line: &str| {
        let of_firebrick = line.trim_start_matches("./").strip_prefix("firebrick ");
        let of_xtask = line.strip_prefix("cargo xtask ").filter(|rest| !own.iter().any(|own| rest.starts_with(own)));
        of_firebrick.or(of_xtask).map(str::to_owned)
    };
    lines.filter_map(command).collect()
}

/// Splits a command as a shell does, as far as the pages need it.
fn words(line: &str) -> Vec<&str> {
    let quoted = line.split('\'').enumerate();
    quoted
        .flat_map(|(index, part)| if index % 2 == 1 { vec![part] } else { part.split_whitespace().collect() })
        .collect()
}

#[test]
fn a_link_to_the_program_finds_the_files_of_the_program() {
    let mut installed = Installed::new("archive", "archive");
    let link = installed.at("work/firebrick");
    symlink(&installed.program, &link).unwrap();
    installed.program = link;
    let output = installed.output(&["plan", "absent.toml"]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    let configs = installed.at("archive").canonicalize().unwrap().join("configs");
    assert!(message.contains(&format!("recipes in {}: ", configs.display())), "{message}");
    assert!(message.contains("quickstart.toml"), "{message}");
}

#[test]
fn a_file_of_the_current_folder_comes_before_a_shipped_one() {
    let installed = Installed::new("archive", "archive");
    fs::create_dir(installed.at("work/configs")).unwrap();
    fs::write(installed.at("work/configs/cpu.toml"), "lr = 1\n").unwrap();
    let message = text(&installed.output(&["plan", "cpu.toml"]).stderr);
    assert!(message.contains("configs/cpu.toml") && message.contains("unknown key 'lr'"), "{message}");
}

#[test]
fn the_overview_begins_with_train_and_names_what_other_commands_are_for() {
    let installed = Installed::new("archive", "archive");
    let help = installed.printed(&["--help"]);
    let mut commands = help.lines().filter(|line| line.starts_with("  ")).map(str::trim_start);
    assert!(commands.next().unwrap().starts_with("train "), "{help}");
    assert!(help.contains("\nKnow the machine:\n") && !help.contains("  man "), "{help}");
    let train = installed.printed(&["train", "--help"]);
    assert!(train.contains("[RECIPE]") && !train.to_lowercase().contains("others"), "{train}");
}

#[test]
fn completions_are_scripts_that_know_every_command() {
    let installed = Installed::new("archive", "archive");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = installed.printed(&["completions", shell]);
        for word in ["firebrick", "train", "bench-generate", "config"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        let path = installed.at("work").join(shell);
        fs::write(&path, script).unwrap();
        if shell == "bash" {
            let checked = Command::new("bash").arg("-n").arg(&path).output().unwrap();
            assert!(checked.status.success(), "{}", text(&checked.stderr));
        }
    }
    assert_eq!(installed.output(&["completions", "dos"]).status.code(), Some(2));
}

#[test]
fn each_command_has_a_manual_page() {
    let installed = Installed::new("archive", "archive");
    installed.printed(&["man", "pages"]);
    let page = |name: &str| fs::read_to_string(installed.at("work/pages").join(name)).unwrap();
    assert!(page("firebrick.1").contains("generate(1)"), "{}", page("firebrick.1"));
    let train = page("firebrick-train.1");
    assert!(train.contains("RECIPE") && train.contains("resume"), "{train}");
    assert!(!installed.at("work/pages/firebrick-man.1").exists(), "it is not for users");
}

#[test]
fn doctor_has_a_line_for_each_subject_and_an_unreachable_hub_is_a_warning() {
    let installed = Installed::new("archive", "archive");
    let printed = installed.printed(&["doctor"]);
    let line = |subject: &str| {
        let found = printed.lines().find(|line| line.split_whitespace().nth(1) == Some(subject));
        found.unwrap_or_else(|| panic!("no line for {subject}: {printed}")).to_owned()
    };
    for subject in ["program", "driver", "card", "adapter", "auto"] {
        line(subject);
    }
    assert!(line("hub").starts_with("warning") && line("hub").contains("http://127.0.0.1:9"), "{}", line("hub"));
    assert!(line("cache").starts_with("ok") && line("cache").contains(installed.at("cache").to_str().unwrap()));
    assert!(line("program").ends_with("archive") && line("disk").contains("work"), "{printed}");
    assert!(line("kernel").starts_with("ok") && line("kernel").ends_with("FLOP/s"), "{}", line("kernel"));
    let offline = installed.command(&["doctor"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(text(&offline.stdout).contains("offline"), "{}", text(&offline.stdout));
}

#[cfg(target_os = "linux")]
#[test]
fn doctor_fails_in_a_folder_that_no_run_can_write_into() {
    let installed = Installed::new("archive", "archive");
    // The system refuses files there, even those of root.
    let output = installed.command(&["doctor"]).current_dir("/proc").output().unwrap();
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    let failures: Vec<&str> = printed.lines().filter(|line| line.starts_with("FAILURE")).collect();
    assert!(failures.len() == 1 && failures[0].contains("/proc"), "{printed}");
    assert!(printed.contains(" kernel "), "the other checks are made all the same: {printed}");
}

#[test]
fn a_new_recipe_is_written_once_and_plans_as_it_is() {
    let installed = Installed::new("archive", "archive");
    let (model, data) = ("assets/quickstart/base", "assets/quickstart/train.jsonl");
    let printed = installed.printed(&["new", model, data]);
    let train = printed.lines().last().unwrap().trim();
    assert!(printed.starts_with("written to base.toml; ") && printed.lines().count() <= 10, "{printed}");
    for part in ["  rows ", "  step ", "  memory ", "firebrick plan base.toml "] {
        assert!(printed.contains(part), "no {part} in {printed}");
    }
    assert!(train.ends_with("firebrick train base.toml"), "{printed}");
    let recipe = fs::read_to_string(installed.at("work/base.toml")).unwrap();
    for part in ["model = \"assets/quickstart/base\"", "max_seq_len = 256", "format = \"chat\"", "eval_fraction"] {
        assert!(recipe.contains(part), "no {part} in {recipe}");
    }
    assert!(
        !recipe.contains("[bnb_4bit]") && !recipe.contains("chat_template"),
        "it fits and has a template: {recipe}"
    );
    assert!(installed.printed(&["plan", "base.toml"]).contains("plan for base\n"));
    let refused = |out: &[&str], expected: &str| {
        let output = installed.output(&[&["new", model, data], out].concat());
        let message = text(&output.stderr);
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains(expected), "{message}");
    };
    refused(&[], "base.toml exists already: name another file with --out");
    refused(&["--out", "base.yaml"], "base.yaml does not end with .toml");
    assert_eq!(fs::read_to_string(installed.at("work/base.toml")).unwrap(), recipe);
}
