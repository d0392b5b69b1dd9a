//! docs/models.md: the features that work for each model family, derived from the registry of families and from the tests that assert them.
//!
//! A row is a family in `FAMILIES` or a checkpoint in `WRAPPERS` of crates/arch. It has a mark if a test runs over every model of `FAMILIES` in
//! tests/src/lib.rs and the golden file of the test exists. `UPDATE_GOLDEN=1` writes the file.
//! Trade-off: sources are read as text and depend on their formatting; a test that is renamed has to be renamed here.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The feature, file and name of the test that asserts it for every model, and the suffix of the golden file's name.
type Column = [&'static str; 4];

const COLUMNS: [Column; 7] = [
    ["logits", "numbers/forward.rs", "every_family", ""],
    ["LoRA", "numbers/backward.rs", "gradients_of_adapters", "-lora"],
    ["QLoRA", "backends.rs", "three_steps_of_every_family_have_the_same_losses_on_every_backend", ""],
    ["full fine-tuning, pretraining", "numbers/backward.rs", "gradients_of_all_weights", "-full-gradients"],
    ["packed rows", "numbers/documents.rs", "packed_equals_separate", "-packed"],
    ["generation", "numbers/text.rs", "greedy_text", "-generation"],
    ["export --merge", "numbers/saved.rs", "merged_adapters_of_every_family_give_the_logits_of_peft", "-lora"],
];

const HEAD: &str = "# Model families

What works for which family. This file is written by a test from the registry of families (`crates/arch/src/families/mod.rs`) and from
the tests over every family (`tests/tests/`), which compare with transformers, PEFT and torch; the test fails where the file says
something else. To write it again: `UPDATE_GOLDEN=1 cargo test -p xtask models_table`.

A mark means: a test runs for this family, on the backends flex and candle, and on wgpu for nine of them (for all with `cargo xtask test --slow`):
against golden files of the independent implementation, for QLoRA against flex. CUDA is compared with the others per operation and on whole models in the
GPU suite, which runs on a card. The last rows are checkpoints with a vision tower, of which the text model is read.

";

const SIZES: &str = "
## Published models

Models whose config.json a family reads, from `crates/arch/src/families/published.rs`. Base, instruct and derived models of the same shape are the
same to it. They were not all run here: [benches/README.md](../benches/README.md) says which were measured.

";

const TAIL: &str = "
## What the columns mean

- **LoRA**: gradients of adapters on all projections. **QLoRA**: steps over a base in NF4; a base in every other format is trained on one
  family, since how a frozen matrix is stored knows no family.
- **full fine-tuning, pretraining**: gradients of every weight under every recompute policy. Pretraining is the same from random weights
  (`init = \"random\"`).
- **export --merge**: the merged folder, computed by flex, has the logits of PEFT's base and adapter. The command also checks what it wrote
  against base and adapter before it reports success; other kinds of adapters are merged on one family.
- **export --gguf**: families that the writer knows (`crates/model/src/gguf/architecture.rs`), of a checkpoint with a vision tower the text model
  alone. A test compares the files with those of llama.cpp's own conversion; llama.cpp's logits of them are in
  [interoperability.md](interoperability.md). Tokenizers: SentencePiece's BPE (Llama 2, Mistral, Gemma, Phi-3), and byte-level
  BPE whose rule llama.cpp has a name for: Llama 3, SmolLM2, Qwen 2, 2.5 and 3, gpt-oss, tekken; others are refused.
- Every family loads from a folder or from the Hub (`model = \"OWNER/NAME\"`), and adapters and merged models go back with `push`.
";

fn read(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Iterates over the strings between double quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2)
}

/// Reads the model type of every family and its published models.
fn published(root: &Path) -> Vec<(String, String)> {
    let text = read(root, "crates/arch/src/families/published.rs");
    let list = text.split("pub const PUBLISHED").nth(1).and_then(|rest| rest.split("];").next()).expect("a list");
    // A long line goes on after a backslash.
    let list = list.split("\\\n").map(str::trim_start).collect::<String>();
    let texts: Vec<String> = quoted(&list).map(str::to_owned).collect();
    texts.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}

/// Reads the architecture and model type of every family in the registry, then of every checkpoint that has the text model of a family.
fn registry(root: &Path) -> Vec<(String, String)> {
    let names = |call: &str| {
        let call = format!("\"{call}");
        let mut names = quoted(&call).map(str::to_owned);
        (names.next().expect("an architecture"), names.next().expect("a model type"))
    };
    let lists = [("mod.rs", "family(\""), ("wrapper.rs", "wrapper(\"")];
    let calls = lists.map(|(file, call)| {
        let text = read(root, &format!("crates/arch/src/families/{file}"));
        text.split(call).skip(1).map(names).collect::<Vec<_>>()
    });
    calls.concat()
}

/// Reads the names of the test models, and the model type of each: the key at the top of its config.json.
fn test_models(root: &Path) -> Vec<(String, String)> {
    let text = read(root, "tests/src/lib.rs");
    let list = text.split("pub const FAMILIES").nth(1).and_then(|rest| rest.split("];").next()).expect("a list");
    let lines = list.lines().filter_map(|line| line.trim().strip_prefix('"')?.split('"').next());
    let with_kind = |name: &str| {
        let config = read(root, &format!("tests/fixtures/{name}/config.json"));
        let kind =
            config.split("\n  \"model_type\"").nth(1).and_then(|rest| quoted(rest).next()).expect("a model type");
        (name.to_owned(), kind.to_owned())
    };
    lines.map(with_kind).collect()
}

/// Reads the model types that are written as GGUF: the first string of each line of the writer's table; and their wrappers, whose text models are.
fn gguf(root: &Path) -> Vec<String> {
    let text = read(root, "crates/model/src/gguf/architecture.rs");
    let table = text.split("const ARCHITECTURES").nth(1).and_then(|rest| rest.split("\n];").next()).expect("a table");
    let of_line = |line: &str| quoted(line.split_once('(')?.1).next().map(str::to_owned);
    let mut kinds: Vec<String> = table.lines().filter_map(of_line).collect();
    let wrappers = read(root, "crates/arch/src/families/wrapper.rs");
    for wrapper in wrappers.split("wrapper(\"").skip(1) {
        // Architecture and model type of the checkpoint, then the names of its text model: in the wrapper and of the family.
        let names: Vec<&str> = wrapper.splitn(8, '"').step_by(2).collect();
        // A constant may have the names of the text model.
        let family = names.get(3).map_or_else(|| format!("{}_text", names[1]), |family| (*family).to_owned());
        if kinds.contains(&family) {
            kinds.push(names[1].to_owned());
        }
    }
    kinds
}

/// Returns whether the test of a column exists and runs over all models.
fn is_tested([_, file, test, _]: &Column, root: &Path) -> bool {
    let text = read(root, &format!("tests/tests/{file}"));
    let on_each = text.contains(&format!(", {test});")) || text.contains(&format!("\n    {test}\n"));
    let runs = on_each || text.contains(&format!("\n#[test]\nfn {test}()"));
    let start = format!("\nfn {test}");
    let body = text.split(&start).filter_map(|rest| rest.split("\n}\n").next());
    let mut body = body.skip(1).filter(|body| body.starts_with(['<', '(']));
    let over_all = ["family in FAMILIES", "family) in FAMILIES.into_iter().enumerate()", "in families::<B>()"];
    runs && body.any(|body| over_all.iter().any(|way| body.contains(way)))
}

fn table(root: &Path) -> String {
    let (models, gguf) = (test_models(root), gguf(root));
    let mut text = String::from(HEAD);
    let titles = COLUMNS.map(|[title, ..]| title);
    // Writing into a String cannot fail.
    let _ = writeln!(text, "| family | `model_type` | {} | export --gguf | test models |", titles.join(" | "));
    let _ = writeln!(text, "|---|---|{}---|---|", "---|".repeat(COLUMNS.len()));
    for (architecture, kind) in registry(root) {
        let own: Vec<&str> = models.iter().filter(|(_, of)| *of == kind).map(|(name, _)| name.as_str()).collect();
        let mark = |is: bool| if is { "yes" } else { "no" };
        let has = |column: &Column| {
            let golden = |name: &&str| root.join(format!("tests/golden/{name}{}.safetensors", column[3])).is_file();
            !own.is_empty() && is_tested(column, root) && own.iter().all(golden)
        };
        let marks: Vec<&str> = COLUMNS.iter().map(|column| mark(has(column))).collect();
        let (marks, tests) = (marks.join(" | "), own.join(", "));
        let gguf = if gguf.contains(&kind) { "yes" } else { "no" };
        let _ = writeln!(text, "| {architecture} | `{kind}` | {marks} | {gguf} | {tests} |");
    }
    text += SIZES;
    for (kind, models) in published(root) {
        let _ = writeln!(text, "- `{kind}`: {models}");
    }
    text + TAIL
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn the_table_of_models_is_what_registry_and_tests_say() {
    let (root, path) = (root(), root().join("docs/models.md"));
    let expected = table(&root);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &expected).expect("docs can be written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "docs/models.md differs: UPDATE_GOLDEN=1 cargo test -p xtask models_table");
}

#[test]
fn every_family_of_the_registry_has_a_test_model_and_every_column_a_test() {
    let (root, models) = (root(), test_models(&root()));
    for (architecture, kind) in registry(&root) {
        let is_tried = models.iter().any(|(_, of)| *of == kind);
        assert!(is_tried, "{architecture} has no model in FAMILIES of tests/src/lib.rs");
    }
    for column in &COLUMNS {
        assert!(is_tested(column, &root), "no test of {column:?} over FAMILIES");
    }
    assert!(gguf(&root).contains(&"llama".to_owned()));
}
