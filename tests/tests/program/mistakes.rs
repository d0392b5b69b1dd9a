//! What the program answers to mistakes: `tests/mistakes/answers.md` has commands and what they print, which are run and compared again.
//!
//! A case is a line `### name` and lines `$ command`, which `sh` runs in a folder of the case's own: the files of `tests/mistakes/base`, the quickstart's
//! model, and some of its data. `UPDATE_GOLDEN=1 cargo test -p firebrick-tests --test program answers` writes the answers again: read them as a user would.
//! What differs from run to run and from machine to machine is written as `_`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use super::installed::link_program;

/// Lines of an answer that are kept at its begin and at its end.
const MAX_LINES: usize = 5;
/// What follows numbers that vary.
const VARYING: [&str; 4] = [" tokens/s", " s on ", "s left", " GiB"];

#[test]
fn answers_to_mistakes_are_as_recorded() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("mistakes");
    let file = folder.join("answers.md");
    let recorded = fs::read_to_string(&file).unwrap();
    // A line that begins with `#` begins a part: a heading, or a case.
    let parts = format!("\n{recorded}").split("\n#").skip(1).map(|part| format!("#{part}\n")).collect::<Vec<_>>();
    let program = tempfile::tempdir().unwrap();
    link_program(&program.path().join("firebrick"));
    let answers = Mutex::new(vec![None; parts.len()]);
    let waiting = Mutex::new(parts.iter().enumerate());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((at, part)) = { waiting.lock().unwrap().next() } {
                    let answer = answered(program.path(), &folder.join("base"), part);
                    answers.lock().unwrap()[at] = Some(answer);
                }
            });
        }
    });
    let answers: Vec<String> = answers.into_inner().unwrap().into_iter().flatten().collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        return fs::write(file, answers.concat()).unwrap();
    }
    let differ = parts.iter().zip(&answers).filter(|(part, answer)| part.trim_end() != answer.trim_end());
    let differ: Vec<String> = differ.map(|(part, answer)| format!("recorded:\n{part}\nnow:\n{answer}")).collect();
    assert!(differ.is_empty(), "{} of {} answers differ:\n{}", differ.len(), parts.len(), differ.concat());
}

/// Runs the commands of a part of the file, and returns the part with what they print now.
fn answered(program: &Path, base: &Path, part: &str) -> String {
    let mut lines = part.lines();
    let heading = lines.next().expect("a part begins with its heading");
    let commands: Vec<&str> = lines.filter_map(|line| line.strip_prefix("$ ")).collect();
    let needs_no_card = heading.ends_with("without-a-card") && Path::new("/dev/nvidiactl").exists();
    if commands.is_empty() || needs_no_card {
        return format!("{}\n\n", part.trim_end());
    }
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    for folder in ["user", "here"] {
        fs::create_dir(at(folder)).unwrap();
    }
    prepare(base, &at("here"));
    // Commands share a shell; a control character and the status end what each of them printed.
    let script: String =
        commands.iter().fold(String::new(), |script, command| script + command + "\nprintf '\\001%d\\n' $?\n");
    fs::write(at("script"), script).unwrap();
    let output = Command::new("sh")
        .args(["-c", "exec 2>&1; . ../script"])
        .current_dir(at("here"))
        .env_clear()
        .env("PATH", format!("{}:/usr/bin:/bin", program.display()))
        .envs([("HOME", at("user")), ("FIREBRICK_CACHE", at("cache"))])
        .envs([("NO_COLOR", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9"), ("LANG", "C.UTF-8")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).replace(&root.path().display().to_string(), "ROOT");
    let mut pieces = printed.split('\u{1}');
    let mut printed = pieces.next().unwrap_or_default();
    let mut answer = format!("{heading}\n");
    for command in commands {
        // `exit` in a command ends the case.
        let (status, rest) = pieces.next().and_then(|piece| piece.split_once('\n')).unwrap_or(("none", ""));
        _ = write!(answer, "$ {command}\n{}", shortened(printed));
        if status != "0" {
            _ = writeln!(answer, "[status {status}]");
        }
        printed = rest;
    }
    answer + "\n"
}

/// Writes the files that a case begins with: those of `base`, the quickstart's model, 60 of its chats, 40 held-out ones, and rewards.
fn prepare(base: &Path, work: &Path) {
    let quickstart = base.join("../../../assets/quickstart");
    let copy = |from: &Path, to: &Path| {
        fs::create_dir_all(to).unwrap();
        for file in fs::read_dir(from).unwrap().map(|file| file.unwrap().path()) {
            fs::copy(&file, to.join(file.file_name().expect("a file has a name"))).unwrap();
        }
    };
    copy(base, work);
    copy(&quickstart.join("base"), &work.join("model"));
    fs::copy(quickstart.join("rewards.py"), work.join("rewards.py")).unwrap();
    fs::copy(quickstart.join("../reward.py"), work.join("reward.py")).unwrap();
    let first = |name: &str, rows: usize| {
        let text = fs::read_to_string(quickstart.join(name)).unwrap();
        text.split_inclusive('\n').take(rows).collect::<String>()
    };
    fs::write(work.join("chats.jsonl"), first("train.jsonl", 60)).unwrap();
    fs::write(work.join("eval.jsonl"), first("eval.jsonl", 40)).unwrap();
}

/// Returns printed text without the middle of long texts, and with `_` for numbers of this run and machine.
fn shortened(printed: &str) -> String {
    // A blank keeps printed lines apart from headings and commands.
    let apart = |line: String| if line.starts_with(['#', '$']) { format!(" {line}") } else { line };
    let lines: Vec<String> = printed.lines().map(without_numbers_of_the_run).map(apart).collect();
    let (begin, end) = match lines.len() > 2 * MAX_LINES {
        true => (&lines[..MAX_LINES], &lines[lines.len() - MAX_LINES..]),
        false => (&lines[..], &lines[lines.len()..]),
    };
    let left_out = lines.len() - begin.len() - end.len();
    let note = (left_out > 0).then(|| format!("[{left_out} lines]"));
    begin.iter().chain(note.as_ref()).chain(end).fold(String::new(), |text, line| text + line + "\n")
}

/// Returns a line with `_` for the number before each text of [`VARYING`].
fn without_numbers_of_the_run(line: &str) -> String {
    let is_digit = |c: char| c.is_ascii_digit() || ".,".contains(c);
    VARYING.iter().fold(line.to_owned(), |line, unit| {
        let pieces: Vec<&str> = line.split(unit).collect();
        let (last, others) = pieces.split_last().expect("a split has a piece");
        let others = others.iter().map(|piece| match piece.ends_with(is_digit) {
            true => format!("{}_{unit}", piece.trim_end_matches(is_digit)),
            false => format!("{piece}{unit}"),
        });
        others.collect::<String>() + last
    })
}
