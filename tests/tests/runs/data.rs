//! A run trains on exactly the data that its recipe describes, whatever form the data has.

use std::fs;
use std::path::Path;

use firebrick_data::Pipeline;
use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, one_step, recipe, refusal, step_losses,
};
use firebrick_train::inspect::{Style, inspect};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::hub::Need;
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::data_sets::{DataSets, read, tokenizer};
use firebrick_trainer::run::prepare::prepare;
use firebrick_trainer::state::manifest::Manifest;
use serde_json::{Value, json};
use tempfile::tempdir;

fn chats() -> String {
    fs::read_to_string(fixture("data/chat-tiny.jsonl")).unwrap()
}

fn read_data(config: &RunConfig) -> DataSets {
    let tokenizer = tokenizer(config, &config.model_folder().unwrap(), 0).unwrap();
    read(config, &tokenizer, Pipeline::default()).unwrap()
}

fn data_of(changes: &[&str]) -> DataSets {
    read_data(&recipe(Path::new("unused"), changes))
}

/// Formats these tables as the recipe's data instead of its path.
fn sources(tables: &[String]) -> String {
    format!("data.sources=[{}]", tables.join(", "))
}

fn table(path: &Path, more: &str) -> String {
    format!("{{path='{}'{more}}}", path.display())
}

/// Builds a recipe with these tables. Its path is cleared first, so that the sources replace it.
fn with_sources(tables: &[String], changes: &[&str]) -> DataSets {
    let sources = sources(tables);
    data_of(&[&["data.path=", sources.as_str()], changes].concat())
}

#[test]
fn sets_with_names_have_the_losses_that_they_have_alone_and_count_together() {
    let folder = tempdir().unwrap();
    let (chat, text) = (fixture("data/chat-tiny.jsonl"), fixture("data/text-tiny.jsonl"));
    let numbers = |tables: &[String]| {
        let output = folder.path().join(tables.len().to_string() + &tables[0].len().to_string());
        let eval = format!("data.eval_sources=[{}]", tables.join(", "));
        let changes = [eval.as_str(), "data.eval_fraction=", "train.steps=2", "eval.every_steps=1"];
        finish(recipe(&output, &changes), NEW);
        let lines = metrics(&output.join("run")).into_iter();
        lines.filter(|line| line.get("eval_loss").is_some()).collect::<Vec<_>>()
    };
    let (chats, texts) = (table(&chat, ", name='chats'"), table(&text, ", name='plain-text', limit=3"));
    let both = numbers(&[chats, texts.clone(), table(&chat, "")]);
    let alone = [table(&chat, ""), texts].map(|of| numbers(&[of]));
    assert_eq!(both.len(), 3, "before training, and after each of two steps");
    for (index, line) in both.iter().enumerate() {
        let [of_chats, of_texts] = [&alone[0][index]["eval_loss"], &alone[1][index]["eval_loss"]];
        assert_eq!([&line["eval_chats_loss"], &line["eval_plain-text_loss"]], [of_chats, of_texts]);
        let bounds = [of_chats, of_texts].map(|loss| loss.as_f64().unwrap());
        let all = line["eval_loss"].as_f64().unwrap();
        assert!(bounds[0].min(bounds[1]) < all && all < bounds[0].max(bounds[1]), "{all} of {bounds:?}");
    }
    assert_eq!(alone[1][0]["eval_plain-text_loss"], alone[1][0]["eval_loss"]);
}

#[test]
fn every_format_of_the_same_chats_gives_the_same_examples() {
    let folder = tempdir().unwrap();
    let rows: Vec<Value> = chats().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sharegpt = rows.iter().map(|row| {
        let turn = |message: &Value| json!({ "from": message["role"], "value": message["content"] });
        let turns: Vec<Value> = row["messages"].as_array().unwrap().iter().map(turn).collect();
        json!({ "talk": turns }).to_string() + "\n"
    });
    let expected: Vec<_> = data_of(&["data.eval_fraction="]).train.documents.examples().collect();
    let files = [
        ("list.json", Value::from(rows.clone()).to_string(), ""),
        ("in_object.json", json!({ "version": 1, "rows": rows }).to_string(), ", field='rows'"),
        ("lines.data", chats(), ", file_format='jsonl'"),
        ("sharegpt.jsonl", sharegpt.collect(), ", format='sharegpt', fields={messages='talk'}"),
    ];
    for (name, content, more) in files {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let found = with_sources(&[table(&path, more)], &["data.eval_fraction="]);
        assert!(found.train.documents.examples().eq(expected.iter().cloned()), "{name}");
    }
}

#[test]
fn a_folder_and_a_pattern_hold_what_their_files_hold() {
    let folder = tempdir().unwrap();
    let text = chats();
    let (first, second) = text.split_at(text.find('\n').unwrap() + 1);
    fs::write(folder.path().join("a.jsonl"), first).unwrap();
    fs::write(folder.path().join("b.jsonl"), second).unwrap();
    let expected: Vec<_> = data_of(&["data.eval_fraction="]).train.documents.examples().collect();
    for path in [folder.path().to_path_buf(), folder.path().join("*.jsonl")] {
        let found = data_of(&[&format!("data.path='{}'", path.display()), "data.eval_fraction="]);
        assert!(found.train.documents.examples().eq(expected.iter().cloned()), "{}", path.display());
    }
}

#[test]
fn sources_are_limited_mixed_and_reported_one_by_one() {
    let (chats, texts) = (fixture("data/chat-tiny.jsonl"), fixture("data/text-tiny.jsonl"));
    let tables = [table(&chats, ", limit=5"), table(&texts, ", limit=3, format='text'")];
    for mix in ["data.mix=concatenate", "data.mix=size"] {
        let data = with_sources(&tables, &[mix, "data.eval_fraction="]);
        let rows: Vec<u64> = data.train.sources.iter().map(|source| source.diagnosis.rows).collect();
        assert_eq!((rows, data.train.documents.len()), (vec![5, 3], 8), "{mix}");
        let notes = data.notes().join("\n");
        assert!(notes.contains("chat-tiny.jsonl (jsonl, chat): 5 records"), "{notes}");
        assert!(notes.contains("text-tiny.jsonl (jsonl, text): 3 records"), "{notes}");
    }
    let weighted = [table(&chats, ", weight=3.0"), table(&texts, ", weight=1.0")];
    let changes = ["data.mix=weight", "data.mix_until=never", "data.eval_fraction="];
    let all = chats_and_texts();
    assert_eq!(with_sources(&weighted, &changes).train.documents.len(), all);
}

fn chats_and_texts() -> usize {
    let lines = |name| fs::read_to_string(fixture(name)).unwrap().lines().count();
    lines("data/chat-tiny.jsonl") + lines("data/text-tiny.jsonl")
}

#[test]
fn cached_tokens_are_found_again_and_never_used_for_a_changed_recipe_or_file() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("rows.jsonl");
    fs::write(&file, chats()).unwrap();
    let (path, cache) =
        (format!("data.path='{}'", file.display()), format!("data.cache='{}'", folder.path().join("cache").display()));
    let read = |changes: &[&str]| data_of(&[&[path.as_str(), cache.as_str()], changes].concat());
    let first = read(&[]);
    assert!(first.train.location.contains("tokenized now"), "{}", first.train.location);
    let second = read(&[]);
    assert!(second.train.location.contains("found in"), "{}", second.train.location);
    assert!(first.train.documents.examples().eq(second.train.documents.examples()));
    assert_eq!(first.train.sources, second.train.sources);
    assert!(first.train.documents.examples().eq(data_of(&[]).train.documents.examples()), "as without a cache");
    for change in ["max_seq_len=32", "data.train_on=last", "data.overflow=split", "data.train_end_of_turn=false"] {
        assert!(read(&[change]).train.location.contains("tokenized now"), "{change}");
    }
    let moved = folder.path().join("moved.jsonl");
    fs::rename(&file, &moved).unwrap();
    let elsewhere = read(&[&format!("data.path='{}'", moved.display())]);
    assert!(elsewhere.train.location.contains("found in"), "{}", elsewhere.train.location);
    assert_eq!(elsewhere.train.sources[0].name, moved.display().to_string());
    fs::write(&file, chats() + chats().lines().next().unwrap()).unwrap();
    let changed = read(&[]);
    assert!(changed.train.location.contains("tokenized now"), "{}", changed.train.location);
    assert_eq!(changed.train.sources[0].diagnosis.rows, first.train.sources[0].diagnosis.rows + 1);
}

#[test]
fn cache_that_cannot_be_written_adds_a_note_and_changes_nothing_else() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let data = data_of(&[&format!("data.cache='{}'", file.join("cache").display())]);
    assert!(data.train.location.contains("kept in memory for this run: cannot"), "{}", data.train.location);
    assert!(data.train.documents.examples().eq(data_of(&[]).train.documents.examples()));
}

#[test]
fn keys_of_masks_and_lengths_change_the_loss_tokens_and_documents_as_documented() {
    let trained = |changes: &[&str]| data_of(&[&["data.eval_fraction="], changes].concat()).train.sources[0].clone();
    let plain = trained(&[]).diagnosis;
    assert!(trained(&["data.train_end_of_turn=false"]).diagnosis.loss_tokens < plain.loss_tokens);
    assert!(trained(&["data.train_on=all"]).diagnosis.loss_tokens > plain.loss_tokens);
    assert!(trained(&["data.train_on=last"]).diagnosis.loss_tokens <= plain.loss_tokens);
    let short = |overflow| trained(&["max_seq_len=24", "data.train_on=all", overflow]).diagnosis;
    let (cut, split, dropped) =
        (short("data.overflow=truncate"), short("data.overflow=split"), short("data.overflow=drop"));
    assert!(cut.tokens_cut > 0 && cut.longest == 24, "{cut}");
    assert!(split.tokens_cut == 0 && split.examples > cut.examples, "{split}");
    assert!(dropped.examples < cut.examples && dropped.to_string().contains("longer than max_seq_len"), "{dropped}");
}

#[test]
fn flags_train_flagged_messages_only_and_a_set_without_flags_is_refused() {
    let output = tempdir().unwrap();
    let message = refusal(recipe(output.path(), &["data.train_on=flags"]), NEW);
    assert!(message.contains("train_on = \"flags\"") && message.contains("\"weight\": 1"), "{message}");
    let file = output.path().join("flagged.jsonl");
    let flag = |line: &str| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        for message in row["messages"].as_array_mut().unwrap() {
            let is_answer = message["role"] == "assistant";
            message["weight"] = i32::from(is_answer).into();
        }
        row.to_string() + "\n"
    };
    fs::write(&file, chats().lines().map(flag).collect::<String>()).unwrap();
    let path = format!("data.path='{}'", file.display());
    let flagged = data_of(&[&path, "data.train_on=flags"]);
    assert!(flagged.train.documents.examples().eq(data_of(&[]).train.documents.examples()), "as the assistant's");
}

#[test]
fn records_without_loss_tokens_are_counted_and_refused_above_the_allowed_share() {
    let output = tempdir().unwrap();
    let file = output.path().join("rows.jsonl");
    fs::write(&file, chats() + &fs::read_to_string(fixture("data/masked.jsonl")).unwrap()).unwrap();
    let path = format!("data.path='{}'", file.display());
    let notes = data_of(&[&path]).notes().join("\n");
    assert!(notes.contains("1 record dropped, nothing to train; first") && notes.contains("rows.jsonl:"), "{notes}");
    let message = refusal(recipe(output.path(), &[&path, "data.max_bad_share=0.0"]), NEW);
    assert!(
        message.contains("1 of 25 records (4.0 %) cannot be trained on") && message.contains("the limit is 0.0 %"),
        "{message}"
    );
}

#[test]
fn keys_that_the_format_does_not_read_are_shown_before_a_run_and_by_inspect_and_images_are_refused() {
    let output = tempdir().unwrap();
    let file = output.path().join("rows.jsonl");
    let with = |key: &str, value: Value| {
        let row = |line: &str| {
            let mut row: Value = serde_json::from_str(line).unwrap();
            row[key] = value.clone();
            row.to_string() + "\n"
        };
        fs::write(&file, chats().lines().map(row).collect::<String>()).unwrap();
    };
    let path = format!("data.path='{}'", file.display());
    with("functions", json!([{ "name": "f" }]));
    let expected = format!("keys not read: functions ({} rows)", chats().lines().count());
    let notes = data_of(&[&path]).notes().join("\n");
    assert!(notes.contains(&expected), "{notes}");
    let seen = inspect(&recipe(Path::new("unused"), &[&path]), 1).unwrap();
    assert!(seen.text(Style::Markers).contains(&expected));
    with("images", json!(["a.jpg"]));
    let message = refusal(recipe(output.path(), &[&path]), NEW);
    assert!(message.contains("rows.jsonl:1: images is not empty, but images"), "{message}");
}

#[test]
fn a_text_that_is_json_is_noted_with_how_to_read_its_records() {
    let output = tempdir().unwrap();
    let file = output.path().join("rows.txt");
    fs::write(&file, chats()).unwrap();
    let notes = data_of(&[&format!("data.path='{}'", file.display()), "data.eval_fraction="]).notes().join("\n");
    assert!(notes.contains("the text is JSON") && notes.contains("data.file_format = \"jsonl\""), "{notes}");
}

#[test]
fn chat_template_of_the_recipe_replaces_that_of_the_model() {
    let output = tempdir().unwrap();
    let template = output.path().join("mine.jinja");
    let text = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}";
    fs::write(&template, text).unwrap();
    let named = format!("data.chat_template='{}'", template.display());
    let changed = data_of(&[&named]);
    assert_ne!(changed.train.documents.document(0).to_example(), data_of(&[]).train.documents.document(0).to_example());
    let message = refusal(recipe(output.path(), &["data.chat_template=unknown"]), NEW);
    assert!(message.contains("no chat template is named \"unknown\"") && message.contains("\"chatml\""), "{message}");
}

#[test]
fn workers_and_held_out_sources_change_no_loss() {
    let output = tempdir().unwrap();
    let losses = |name: &str, changes: &[&str]| {
        let folder = output.path().join(name);
        finish(recipe(&folder, &[&["train.steps=3"], changes].concat()), NEW);
        step_losses(&folder.join("run"))
    };
    let held_out = format!("data.eval_sources=[{}]", table(&fixture("data/chat-tiny.jsonl"), ", limit=4"));
    let expected = losses("one", &["data.eval_fraction="]);
    assert_eq!(losses("three", &["data.eval_fraction=", "data.workers=3"]), expected);
    assert_eq!(losses("held", &[held_out.as_str()]), expected);
}

/// The template writes the date; a run that began yesterday according to its checkpoint is resumed today.
#[test]
fn resumed_run_sees_the_date_of_its_start() {
    let output = tempdir().unwrap();
    let template = output.path().join("dated.jinja");
    let text = "{{ strftime_now('%d %B %Y') }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\
                {{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    fs::write(&template, text).unwrap();
    let named = format!("data.chat_template='{}'", template.display());
    let cache = format!("data.cache='{}'", output.path().join("cache").display());
    let config = recipe(output.path(), &["train.steps=2", &named, &cache]);
    assert_eq!(one_step(config.clone(), NEW), 1);

    let checkpoint = checkpoint_folder(&output.path().join("run"), 1);
    let path = checkpoint.join("state.json");
    let mut state: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let today = state["date"].as_i64().unwrap();
    let rows = |date| {
        let prepared = prepare(config.clone(), date, 1, &PlanRequest::default(), Need::Weights, None).unwrap();
        format!("rows {:016x}", prepared.train.fingerprint())
    };
    let yesterday = today - 86_400;
    assert!(state["identity"]["data"].as_str().unwrap().starts_with(&rows(today)));
    assert_ne!(rows(today), rows(yesterday), "the template writes the date");
    assert_eq!(rows(yesterday), rows(yesterday - yesterday.rem_euclid(86_400)), "only the day matters");

    let save = |state: &Value| {
        fs::write(&path, state.to_string()).unwrap();
        fs::remove_file(checkpoint.join("manifest.json")).unwrap();
        Manifest::of_folder(&checkpoint).unwrap().write(&checkpoint).unwrap();
    };
    state["date"] = yesterday.into();
    save(&state);
    let message = refusal(config.clone(), NEWEST);
    assert!(message.contains("was made with data"), "rows of another day than the run's: {message}");
    state["identity"]["data"] = rows(yesterday).into();
    save(&state);
    assert_eq!(finish(config, NEWEST).steps, 2);
}

#[test]
fn inspection_names_a_template_that_writes_todays_date_and_how_to_fix_it() {
    let output = tempdir().unwrap();
    let template = output.path().join("dated.jinja");
    let text = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}\
                {{ date_string }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\
                {{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    fs::write(&template, text).unwrap();
    let named = format!("data.chat_template='{}'", template.display());
    let cache = format!("data.cache='{}'", output.path().join("cache").display());
    let line = |changes: &[&str]| {
        let seen = inspect(&recipe(Path::new("unused"), changes), 1).unwrap();
        seen.settings.into_iter().find(|(key, _)| *key == "date").map(|(_, note)| note)
    };
    let fixed = "data.chat_template_kwargs={date_string='26 Jul 2024'}";
    assert_eq!((line(&[]), line(&[&named, fixed])), (None, None));
    let note = line(&[&named]).unwrap();
    let words = ["writes today's date into every conversation (strftime_now).", "date_string = ", "data.chat_template"];
    assert!(words.iter().all(|words| note.contains(words)), "{note}");
    let note = line(&[&named, &cache]).unwrap();
    assert!(note.contains("so cached data is tokenized again each day"), "{note}");
    let note = line(&[&named, &cache, fixed]).unwrap();
    assert!(note.contains("can write today's date") && !note.contains("date_string"), "{note}");
}

#[test]
fn inspection_shows_the_rows_that_a_run_trains() {
    let config = recipe(Path::new("unused"), &[]);
    let seen = inspect(&config, 2).unwrap();
    let data = read_data(&config);
    assert_eq!(seen.sets.len(), 2);
    assert_eq!(seen.sets[0].packing.documents, data.train.documents.len());
    assert_eq!(seen.sets[1].packing.documents, data.held_out.unwrap().documents.len());
    let row = &seen.sets[0].rows[0];
    assert!(row.tokens() <= seen.sets[0].row_len && row.documents[0].loss_tokens > 0);
    let text = seen.text(Style::Markers);
    let place = row.documents[0].place.strip_prefix(fixture("data/chat-tiny.jsonl").to_str().unwrap()).unwrap();
    let line: usize = place.strip_prefix(':').unwrap().parse().unwrap();
    let in_loss: String =
        row.documents[0].tokens.iter().filter(|token| token.in_loss).map(|token| &*token.text).collect();
    let record = chats().lines().nth(line - 1).unwrap().to_owned();
    assert!(record.contains(in_loss.split('<').next().unwrap().trim()), "{in_loss:?} is not in {record}");
    assert_eq!(seen.sets[0].documents.len(), 3, "longest, shortest, random");
    assert!(text.contains('⟦') && text.contains("held-out data"), "{text}");
}
