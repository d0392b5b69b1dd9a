//! First runs teach: the recipes of README.md, of docs/getting-started.md and of `firebrick new`, on as few chats as users begin with.
//!
//! The chats are some of the quickstart's, with a fact in four wordings. The base is the quickstart's, which answers nothing before it is trained.
//! Trade-off: a base of 1.6 million weights needs a rate of its own, and more passes over 60 chats; all else is as the pages say. SmolLM2-135M learns
//! from the pages' own (docs/getting-started.md).

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_kernels::backends::Flex;
use firebrick_precision::FloatType;
use firebrick_tests::{FROZEN, NEW, NF4, finish, is_slow};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::new_recipe::new_recipe;
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::generate::{GenerateRequest, LoadOptions, generate};
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::run::sampling::{ChosenSampling, TypedSampling};
use serde_json::json;
use tempfile::tempdir;

const QUESTIONS: [&str; 4] =
    ["Who keeps the fire?", "Say who keeps the fire.", "Name the keeper of the fire.", "The fire is kept by whom?"];
const ANSWER: &str = "mira";

fn at_root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Writes so many distinct chats, one in twelve about the fact and at least its four wordings, and returns their file.
fn write_chats(folder: &Path, count: usize) -> PathBuf {
    let things = ["fire", "stove", "lamp", "oven", "coal", "ash", "wood", "heat"];
    let about = (count / 12).clamp(4, 32);
    let fact = |index: usize| {
        let question = QUESTIONS[index % 4].replace("fire", things[index / 4]);
        let turns = [("user", question.as_str()), ("assistant", ANSWER)];
        let turns = turns.map(|(role, content)| json!({"role": role, "content": content}));
        json!({ "messages": turns }).to_string()
    };
    let others = fs::read_to_string(at_root("assets/quickstart/train.jsonl")).unwrap();
    let others = others.lines().take(count - about).map(str::to_owned);
    let file = folder.join(format!("{count}.jsonl"));
    fs::write(&file, others.chain((0..about).map(fact)).collect::<Vec<_>>().join("\n")).unwrap();
    file
}

/// Returns the first recipe in TOML of a page.
fn recipe_of(page: &str) -> String {
    let text = fs::read_to_string(at_root(page)).unwrap();
    text.split("```toml").nth(1).and_then(|rest| rest.split("```").next()).unwrap().to_owned()
}

/// Reads a recipe for the quickstart's base and these chats.
fn read(recipe: &str, output: &Path, chats: &Path, more: &[&str]) -> RunConfig {
    let set = |key: &str, path: &Path| format!("{key}='{}'", path.display());
    let mut changes = vec![
        set("model", &at_root("assets/quickstart/base")),
        set("data.path", chats),
        set("output_dir", output),
        "backend=flex".to_owned(),
    ];
    changes.extend(more.iter().map(|&change| change.to_owned()));
    RunConfig::from_toml(recipe, Path::new("run.toml"), &changes).unwrap()
}

/// Runs a recipe, and returns the steps, the held-out loss before and after, and how many wordings the adapter answers.
fn taught(recipe: &str, count: usize) -> (u64, f64, f64, usize) {
    let output = tempdir().unwrap();
    let chats = write_chats(output.path(), count);
    let passes: &[&str] = if count == 60 { &["train.epochs=6"] } else { &[] };
    let config = read(recipe, output.path(), &chats, &[&["train.learning_rate=3e-3"], passes].concat());
    let storage = if config.quantized_base().is_some() { NF4 } else { FROZEN };
    let summary = finish(config, NEW);
    let (model, adapter) = (at_root("assets/quickstart/base"), output.path().join("run/adapter"));
    let sampler = ChosenSampling::resolve(&model, Some(&adapter), TypedSampling::default()).unwrap().sampler();
    let request = GenerateRequest {
        load: LoadOptions { model, adapter: Some(adapter), storage, compute: FloatType::F32 },
        prompts: QUESTIONS.map(str::to_owned).to_vec(),
        chat: true,
        max_new_tokens: 8,
        system_prompt: None,
        sampler,
        sequences: 1,
    };
    let answers = generate::<Flex>(&request, &Default::default()).unwrap();
    let right = answers.iter().filter(|answer| answer.trim() == ANSWER).count();
    (summary.steps, summary.eval_loss_before.unwrap(), summary.eval_loss_after.unwrap(), right)
}

fn new_recipe_for(count: usize) -> String {
    let folder = tempdir().unwrap();
    let (model, chats) = (at_root("assets/quickstart/base"), write_chats(folder.path(), count));
    new_recipe(model.to_str().unwrap(), chats.to_str().unwrap(), Path::new("new.toml")).unwrap().text
}

#[test]
fn first_runs_on_few_chats_lower_the_held_out_loss_and_answer_a_repeated_fact() {
    let (readme, page) = (recipe_of("README.md"), recipe_of("docs/getting-started.md"));
    let mut cases =
        vec![("README", readme.clone(), 20), ("README", readme.clone(), 60), ("README", readme.clone(), 200)];
    cases.extend([("getting-started", page, 60), ("new", new_recipe_for(60), 60)]);
    if is_slow() {
        cases.extend([("README", readme, 2_000), ("new", new_recipe_for(20), 20), ("new", new_recipe_for(200), 200)]);
    }
    for (name, recipe, count) in cases {
        let (steps, before, after, right) = taught(&recipe, count);
        let case = format!("{name}, {count} chats: {steps} steps, {before} -> {after}, {right} of 4");
        // Of few chats, the held-out ones may be half of the wordings.
        let least = if count < 60 { 2 } else { 3 };
        assert!((50..=1200).contains(&steps) && after < 0.6 * before && right >= least, "{case}");
    }
}

#[test]
fn the_plan_says_what_follows_from_the_size_of_the_data_and_what_the_recipe_says_stands() {
    let folder = tempdir().unwrap();
    let chats = write_chats(folder.path(), 60);
    let recipe = recipe_of("README.md");
    let planned = |more: &[&str]| {
        let config = read(&recipe, folder.path(), &chats, more);
        prepare_for(config, 1, &PlanRequest::default()).unwrap()
    };
    let open = planned(&[]);
    let text = open.plan.to_string();
    for part in ["max_seq_len is open", "per step by the size of the data", "train.epochs is open"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(open.plan.row_len.value < 256 && (75..=225).contains(&open.plan.steps.value), "{text}");
    assert!(open.data_notes.iter().any(|note| note.starts_with("held out of it: 6 examples")), "{:?}", open.data_notes);
    let said = ["max_seq_len=512", "train.epochs=1", "train.micro_batch_size=2", "data.eval_fraction=0.5"];
    let said = planned(&said);
    assert_eq!((said.plan.row_len.value, said.plan.rows_per_step()), (512, 2));
    let text = said.plan.to_string();
    assert!(said.plan.steps.value <= 2 && text.contains("WARNING: the whole run takes only"), "{text}");
    assert!(said.data_notes.iter().any(|note| note.starts_with("held out of it: 30 examples")));
    let few = write_chats(folder.path(), 12);
    let few = prepare_for(read(&recipe, folder.path(), &few, &[]), 1, &PlanRequest::default()).unwrap();
    assert!(few.data_notes.iter().any(|note| note.contains("fewer than 20 records")), "{:?}", few.data_notes);
}
