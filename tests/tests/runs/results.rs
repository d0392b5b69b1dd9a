//! The results of a run for others: template, tokenizer and end of turn travel with its weights, and another run or program continues from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firebrick_arch::generation_eos_token_ids;
use firebrick_data::Tokenizer;
use firebrick_kernels::BaseStorage;
use firebrick_kernels::backends::Flex;
use firebrick_model::peft::read_adapter;
use firebrick_model::{GgufType, HfFolder, ModelConfig};
use firebrick_precision::FloatType;
use firebrick_tests::{NEW, NEWEST, NF4, checkpoint_folder, finish, fixture, one_step, recipe, refusal, snapshot};
use firebrick_train::chat::{ChatRequest, ChatTerminal, chat};
use firebrick_train::export::{ExportOptions, MergeBase, export};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::generate::{GenerateRequest, LoadOptions, generate};
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::run::sampling::{ChosenSampling, TypedSampling};
use firebrick_trainer::state::checkpoint::read_state;
use serde_json::Value;
use tempfile::{TempDir, tempdir};

/// Closes turns with `<|pad|>`, which the model's settings do not name as an end of text.
const TEMPLATE: &str = "{{ style }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|pad|>{% endfor %}\
                        {% if add_generation_prompt %}<|assistant|>{% endif %}";
const PAD: u32 = 258;
const EOS: u32 = 257;
const PROMPT: &str = "2+2?";

/// Creates a folder with a chat template, and a copy of `tiny-llama` with a license and only `<|eos|>` as an end of text.
fn inputs() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempdir().unwrap();
    let (template, model) = (folder.path().join("mine.jinja"), folder.path().join("model"));
    fs::write(&template, TEMPLATE).unwrap();
    fs::create_dir(&model).unwrap();
    for (name, bytes) in snapshot(&fixture("tiny-llama")) {
        fs::write(model.join(name), bytes).unwrap();
    }
    fs::write(model.join("LICENSE"), "terms").unwrap();
    fs::write(model.join("generation_config.json"), format!("{{\"eos_token_id\": {EOS}}}")).unwrap();
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["eos_token_id"] = EOS.into();
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    (folder, template, model)
}

fn recipe_of(output: &Path, changes: &[&str]) -> (TempDir, PathBuf, RunConfig) {
    let (folder, template, model) = inputs();
    let model_key = format!("model='{}'", model.display());
    let template = format!("data.chat_template='{}'", template.display());
    let prompts = format!("eval.prompts=['{PROMPT}']");
    let changes: Vec<&str> =
        [&model_key, &template, &prompts].map(String::as_str).into_iter().chain(changes.iter().copied()).collect();
    (folder, model, recipe(output, &changes))
}

/// Builds the request of `generate` for the prompt of the runs.
fn request(model: &Path, adapter: Option<&Path>, storage: BaseStorage) -> GenerateRequest {
    GenerateRequest {
        load: LoadOptions {
            model: model.to_path_buf(),
            adapter: adapter.map(Path::to_path_buf),
            storage,
            compute: FloatType::F32,
        },
        prompts: vec![PROMPT.to_owned()],
        chat: true,
        max_new_tokens: 8,
        system_prompt: None,
        sampler: ChosenSampling::resolve(model, adapter, TypedSampling::default()).unwrap().sampler(),
        sequences: 1,
    }
}

/// Returns the texts that `generate` prints for the prompt of the runs.
fn texts(model: &Path, adapter: Option<&Path>, storage: BaseStorage) -> Vec<String> {
    generate::<Flex>(&request(model, adapter, storage), &Default::default()).unwrap()
}

fn assert_travels(folder: &Path) {
    assert_eq!(fs::read_to_string(folder.join("chat_template.jinja")).unwrap(), TEMPLATE);
    assert_eq!(fs::read_to_string(folder.join("LICENSE")).unwrap(), "terms");
    assert_eq!(generation_eos_token_ids(folder).unwrap(), [EOS, PAD], "{}", folder.display());
    let tokenizer = Tokenizer::from_folder(folder).unwrap();
    assert_eq!(tokenizer.chat_template().unwrap().source(), TEMPLATE);
}

#[test]
fn template_tokenizer_license_and_end_of_turn_travel_with_adapters_models_and_their_checkpoints() {
    for (kind, name) in [(&[][..], "adapter"), (&["bnb_4bit=", "lora=", "mode=full"], "model")] {
        let output = tempdir().unwrap();
        let (_folder, _, config) = recipe_of(output.path(), kind);
        finish(config, NEW);
        let run = output.path().join("run");
        assert_travels(&run.join(name));
        assert_travels(&checkpoint_folder(&run, 6).join(name));
    }
}

/// A run's samples before its first step are those of the weights that it starts with.
#[test]
fn generate_prints_what_a_run_samples_from_the_same_weights_template_and_ends_of_text() {
    let output = tempdir().unwrap();
    let (_folder, model, config) = recipe_of(output.path(), &["train.learning_rate=2e-2", "train.steps=20"]);
    finish(config, NEW);
    let adapter = output.path().join("run/adapter");
    let init = format!("lora.init_from='{}'", adapter.display());
    let (_other, _, continued) = recipe_of(output.path(), &[&init, "train.steps=1", "name='continued'"]);
    finish(continued, NEW);
    let state = read_state(&checkpoint_folder(&output.path().join("continued"), 1)).unwrap();
    assert_eq!(texts(&model, Some(&adapter), NF4), state.samples_before);
    // Neither the template nor the end of turn is the model's own.
    assert_ne!(texts(&model, None, NF4), state.samples_before);
    // The template shows the end of turn where no settings name it.
    fs::write(adapter.join("generation_config.json"), format!("{{\"eos_token_id\": {EOS}}}")).unwrap();
    assert_eq!(texts(&model, Some(&adapter), NF4), state.samples_before);
}

/// The run has a system prompt, an argument of the template, and a model folder that samples.
#[test]
fn generate_prints_what_a_run_samples_with_its_system_prompt_template_arguments_and_sampling() {
    let output = tempdir().unwrap();
    let chat = ["data.system_prompt='Be brief.'", "data.chat_template_kwargs={style='!'}", "train.learning_rate=2e-2"];
    let samples = r#"{"do_sample": true, "temperature": 2.0, "top_k": 20, "top_p": 0.95, "eos_token_id": 257}"#;
    let run = |changes: &[&str]| {
        let changes = [&chat[..], changes].concat();
        let (folder, model, config) = recipe_of(output.path(), &changes);
        fs::write(model.join("generation_config.json"), samples).unwrap();
        finish(config, NEW);
        (folder, model)
    };
    let (_folder, model) = run(&["train.steps=20"]);
    let adapter = output.path().join("run/adapter");
    let init = format!("lora.init_from='{}'", adapter.display());
    let prompts = format!("eval.prompts=['other', '{PROMPT}']");
    let _other = run(&[&init, &prompts, "train.steps=1", "name='continued'"]);
    let state = read_state(&checkpoint_folder(&output.path().join("continued"), 1)).unwrap();
    let sampled = &state.samples_before[1..];
    assert_eq!(texts(&model, Some(&adapter), NF4), sampled, "alone as next to another prompt");

    // Each of the three counts.
    let settings = adapter.join("chat_settings.json");
    let saved = fs::read_to_string(&settings).unwrap();
    for changed in [saved.replace("Be brief.", "Write in verse, at length."), saved.replace("\"!\"", "\"?\"")] {
        assert_ne!(changed, saved);
        fs::write(&settings, changed).unwrap();
        assert_ne!(texts(&model, Some(&adapter), NF4), sampled);
    }
    fs::write(&settings, saved).unwrap();
    fs::write(adapter.join("generation_config.json"), r#"{"eos_token_id": [257, 258]}"#).unwrap();
    assert_ne!(texts(&model, Some(&adapter), NF4), sampled, "greedy");
}

#[test]
fn a_run_stops_its_answers_at_the_end_of_turn_that_it_trains() {
    let output = tempdir().unwrap();
    let ends = |changes: &[&str]| {
        let (_folder, _, config) = recipe_of(output.path(), changes);
        prepare_for(config, 1, &PlanRequest::default()).unwrap().model_config.eos_token_ids
    };
    assert_eq!(ends(&[]), [EOS, PAD]);
    assert_eq!(ends(&["data.train_on=all"]), [EOS, PAD], "where every token counts, the template shows it");
    assert_eq!(ends(&["data.train_end_of_turn=false"]), [EOS], "nothing is trained to end a turn");
    let texts = format!("data.path='{}'", fixture("data").join("text-tiny.jsonl").display());
    assert_eq!(ends(&[&texts]), [EOS], "plain texts end with the tokenizer's own token");
}

#[test]
fn a_token_of_a_post_processor_that_the_model_lacks_is_refused_by_runs_and_by_generate() {
    let output = tempdir().unwrap();
    let texts = format!("data.path='{}'", fixture("data").join("text-tiny.jsonl").display());
    let (_folder, model, config) = recipe_of(output.path(), &[&texts]);
    let file = model.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    tokenizer["post_processor"]["special_tokens"]["<|bos|>"]["ids"] = serde_json::json!([9999]);
    fs::write(&file, tokenizer.to_string()).unwrap();
    let request = GenerateRequest { chat: false, ..request(&model, None, NF4) };
    let generated = generate::<Flex>(&request, &Default::default()).unwrap_err().to_string();
    for message in [generated, refusal(config, NEW)] {
        assert!(message.contains("its post_processor adds the token 9999"), "{message}");
    }
}

/// Merges into the weights of the folder.
fn merge_options(model: &Path, adapter: &Path, to: &Path) -> ExportOptions {
    ExportOptions {
        merge: true,
        bnb_4bit: None,
        mxfp4: false,
        gguf: None,
        model: model.to_owned(),
        adapter: Some(adapter.to_owned()),
        out: to.to_owned(),
        dtype: None,
        base: MergeBase(None),
    }
}

/// Reads the number after a key of a GGUF file's metadata.
fn gguf_number(file: &[u8], key: &str) -> Option<u32> {
    let at = file.windows(key.len()).position(|bytes| bytes == key.as_bytes())? + key.len();
    let number = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    assert_eq!(number(at), 4, "the type of {key} is u32");
    Some(number(at + 4))
}

#[test]
fn a_gguf_file_and_its_modelfile_have_the_template_and_the_end_of_turn_of_a_run_in_one_call_or_two() {
    let output = tempdir().unwrap();
    let (inputs, model, config) =
        recipe_of(output.path(), &["data.new_special_tokens=['<|stop_here|>']", "train.steps=1"]);
    fs::write(inputs.path().join("mine.jinja"), TEMPLATE.replace("<|pad|>", "<|stop_here|>")).unwrap();
    finish(config, NEW);
    let (merged, gguf) = (output.path().join("merged"), output.path().join("Tiny-1.5B"));
    let merge = merge_options(&model, &output.path().join("run/adapter"), &merged);
    export(&merge).unwrap();
    let kind = Some(GgufType::F16);
    let options =
        ExportOptions { merge: false, gguf: kind, model: merged, adapter: None, out: gguf.clone(), ..merge.clone() };
    export(&options).unwrap();
    let file = fs::read(&gguf).unwrap();
    assert_eq!(gguf_number(&file, "tokenizer.ggml.eos_token_id"), Some(EOS));
    assert_eq!(gguf_number(&file, "tokenizer.ggml.eot_token_id"), Some(262));
    let modelfile = fs::read_to_string(output.path().join("Tiny-1.5B.Modelfile")).unwrap();
    let template = "{{ if .System }}<|system|>{{ .System }}<|stop_here|>{{ else }}{{ end }}{{ range .Messages }}{{ if eq .Role \"user\" }}<|user|>\
                    {{ .Content }}<|stop_here|>{{ else if eq .Role \"assistant\" }}<|assistant|>{{ .Content }}<|stop_here|>{{ end }}{{ end }}<|assistant|>";
    let stops = "PARAMETER stop \"<|eos|>\"\nPARAMETER stop \"<|stop_here|>\"\n";
    assert_eq!(modelfile, format!("FROM ./Tiny-1.5B\nTEMPLATE \"\"\"{template}\"\"\"\n{stops}"));

    let folder = output.path().join("one-call");
    fs::create_dir(&folder).unwrap();
    let said = export(&ExportOptions { gguf: kind, out: folder.join("Tiny-1.5B"), ..merge }).unwrap();
    assert!(said.contains("merged 14 modules, float32; read again") && said.contains("written as f16 to"), "{said}");
    let names = ["Tiny-1.5B", "Tiny-1.5B.Modelfile"].map(PathBuf::from);
    let expected: BTreeMap<PathBuf, Vec<u8>> = names.into_iter().zip([file, modelfile.into_bytes()]).collect();
    assert!(snapshot(&folder) == expected, "the same two files, and no merged weights");
}

/// Returns the answer of `chat` to a line.
fn answer(load: LoadOptions, line: &str, max_new_tokens: usize, context: usize) -> String {
    let sampling = ChosenSampling::resolve(&load.model, load.adapter.as_deref(), TypedSampling::default()).unwrap();
    let request = ChatRequest { load, system_prompt: None, max_new_tokens, context, sampling };
    let line = format!("{line}\n");
    let (mut input, mut output) = (line.as_bytes(), Vec::new());
    let (stop, is_idle) = (AtomicBool::new(false), AtomicBool::new(true));
    let mut terminal =
        ChatTerminal { input: &mut input, output: &mut output, prompts: false, stop: &stop, is_idle: &is_idle };
    chat::<Flex>(&request, &Default::default(), &mut terminal).unwrap();
    String::from_utf8(output).unwrap().strip_suffix("\n\n").unwrap().to_owned()
}

/// The factors of longrope depend on the length of a sequence: 128 tokens is the old context of this model.
#[test]
fn neither_the_room_for_a_text_nor_its_neighbors_change_it_where_rotation_depends_on_length() {
    let output = tempdir().unwrap();
    let model = fixture("tiny-phi3");
    let keys = [format!("model='{}'", model.display()), format!("eval.prompts=['{PROMPT}']")];
    let [model_key, prompts] = keys.each_ref().map(String::as_str);
    // A rate of almost zero: the adapter after the step is the one before it.
    let small = ["max_seq_len=256", "eval.max_new_tokens=12", "train.steps=1", "train.learning_rate=1e-30"];
    finish(recipe(output.path(), &[&[model_key, prompts][..], &small[..]].concat()), NEW);
    let run = output.path().join("run");
    let adapter = run.join("adapter");
    let written = |adapter: Option<&Path>, max_new_tokens: usize, prompts: &[&str]| {
        let prompts: Vec<String> = prompts.iter().map(|&prompt| prompt.to_owned()).collect();
        let sequences = prompts.len();
        let request = GenerateRequest { max_new_tokens, prompts, sequences, ..request(&model, adapter, NF4) };
        generate::<Flex>(&request, &Default::default()).unwrap().remove(0)
    };
    let neighbor = "a long neighbor ".repeat(12);
    let longer = [Some(adapter.as_path()), None].map(|adapter| {
        let (text, longer) = (written(adapter, 12, &[PROMPT]), written(adapter, 110, &[PROMPT]));
        // A character may be cut at the end of the shorter text.
        assert!(longer.starts_with(text.trim_end_matches('\u{FFFD}')), "{text:?} {longer:?}");
        assert_eq!(written(adapter, 12, &[PROMPT, neighbor.as_str()]), text);
        for context in [100, 200] {
            assert_eq!(answer(request(&model, adapter, NF4).load, PROMPT, 12, context), text);
        }
        longer
    });
    let sampled = read_state(&checkpoint_folder(&run, 1)).unwrap().samples_before;
    assert_eq!(written(Some(&adapter), 12, &[PROMPT]), sampled[0], "the run has the long factors");
    assert_ne!(longer[0], longer[1], "the adapter is zero, so only the factors differ");
    let merged = output.path().join("merged");
    export(&merge_options(&model, &adapter, &merged)).unwrap();
    let settings: Value = serde_json::from_slice(&fs::read(merged.join("chat_settings.json")).unwrap()).unwrap();
    assert_eq!(settings, serde_json::json!({"longrope_sequence_tokens": 256}));
}

/// The model counts as trained at half of its old context.
#[test]
fn a_prompt_that_is_longer_than_what_was_trained_chooses_its_own_factors_of_rotation() {
    let original = fixture("tiny-phi3");
    let folder = tempdir().unwrap();
    for (name, bytes) in snapshot(&original) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::write(folder.path().join("chat_settings.json"), r#"{"longrope_sequence_tokens": 64}"#).unwrap();
    let long = "a long prompt,".repeat(11);
    let written = |model: &Path, prompt: &str| {
        let request = GenerateRequest { prompts: vec![prompt.to_owned()], ..request(model, None, NF4) };
        generate::<Flex>(&request, &Default::default()).unwrap().remove(0)
    };
    for prompt in [PROMPT, long.as_str()] {
        let expected = written(&original, prompt);
        assert_eq!(written(folder.path(), prompt), expected);
        assert_eq!(answer(request(folder.path(), None, NF4).load, prompt, 8, 200), expected);
    }
}

#[test]
fn float16_models_are_saved_as_float16() {
    let output = tempdir().unwrap();
    let model = format!("model='{}'", fixture("saved-model").display());
    finish(recipe(output.path(), &[&model, "bnb_4bit=", "lora=", "mode=full", "train.steps=1"]), NEW);
    let saved = output.path().join("run/model");
    assert_eq!(ModelConfig::read(&saved).unwrap().dtype.as_deref(), Some("float16"));
    let folder = HfFolder::open(&saved).unwrap();
    for name in folder.names() {
        assert_eq!(format!("{:?}", folder.info(name).unwrap().dtype), "F16", "{name}");
    }
}

#[test]
fn a_run_continues_from_the_adapter_of_peft_or_of_another_run() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &["name='first'"]), NEW);
    for (name, adapter) in [("peft", fixture("tiny-llama-lora")), ("ours", output.path().join("first/adapter"))] {
        let init = format!("lora.init_from='{}'", adapter.display());
        let name = format!("name='{name}'");
        // A rate of almost zero: the adapter after a step is the adapter before it.
        let config = recipe(output.path(), &[&init, &name, "train.learning_rate=1e-30", "train.steps=1"]);
        let summary = finish(config, NEW);
        let (start, saved) = (read_adapter(&adapter).unwrap(), read_adapter(Path::new(&summary.weights)).unwrap());
        assert!(start.1 == saved.1, "{name}: the matrices are those of the adapter");
        assert_eq!(summary.eval_loss_before, summary.eval_loss_after);
    }
}

/// Returns the output of `plan` for a recipe that it refuses.
fn refused_plan(config: RunConfig) -> String {
    match prepare_for(config, 1, &PlanRequest::default()) {
        Ok(_) => panic!("the plan was to be refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_resumed_run_needs_the_adapter_that_it_started_from_no_more() {
    let output = tempdir().unwrap();
    let adapter = output.path().join("start");
    fs::create_dir(&adapter).unwrap();
    for (name, bytes) in snapshot(&fixture("tiny-llama-lora")) {
        fs::write(adapter.join(name), bytes).unwrap();
    }
    let config = recipe(output.path(), &[&format!("lora.init_from='{}'", adapter.display())]);
    one_step(config.clone(), NEW);
    fs::remove_dir_all(&adapter).unwrap();
    assert_eq!(finish(config.clone(), NEWEST).steps, 6);
    let planned = refused_plan(config.clone());
    let message = refusal(config, NEW);
    assert_eq!(planned, message);
    assert!(message.starts_with("lora.init_from") && message.contains("adapter_config.json"), "{message}");
}

#[test]
fn an_adapter_of_other_settings_or_of_another_model_is_no_start() {
    let output = tempdir().unwrap();
    let refused = |adapter: &str, changes: &[&str]| {
        let init = format!("lora.init_from='{}'", fixture(adapter).display());
        let changes: Vec<&str> = [init.as_str()].into_iter().chain(changes.iter().copied()).collect();
        let config = recipe(output.path(), &changes);
        let planned = refused_plan(config.clone());
        let message = refusal(config, NEW);
        assert_eq!(planned, message);
        message
    };
    let cases: [(&str, &[&str], &[&str]); 4] = [
        ("tiny-llama-lora", &["lora.r=8"], &["r = 4, not 8", "Write its own settings under [lora]: r = 4, alpha = 8"]),
        ("tiny-llama-lora", &["lora.target=['q_proj']"], &["not [\"q_proj\"]", "\"v_proj\""]),
        (
            "tiny-llama-rslora",
            &["lora.r=8"],
            &["use_rslora = true, not false", "target = [\"q_proj\", \"v_proj\"], not"],
        ),
        ("tiny-qwen3-lora", &[], &["has shape", "this model needs"]),
    ];
    for (adapter, changes, parts) in cases {
        let message = refused(adapter, changes);
        for part in parts {
            assert!(message.contains(part), "{adapter} {changes:?}: `{part}` is not in: {message}");
        }
    }
    assert!(!output.path().join("run").exists(), "nothing was written");
}
