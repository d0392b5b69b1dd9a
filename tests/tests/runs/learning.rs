//! Tests that every kind of training learns, however a step is cut into micro-batches, and that a whole model reads back as it was saved.

use std::collections::BTreeSet;
use std::fs::read;
use std::path::Path;

use firebrick_kernels::backends::Flex;
use firebrick_model::peft::read_adapter;
use firebrick_model::{HfFolder, ModelConfig};
use firebrick_tests::{
    FAMILIES, FROZEN, MIXTURES, NEW, NEWEST, checkpoint_folder, finish, fixture, load, one_step, recipe,
    relative_difference, some_in_turn, step_losses,
};
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::prepare::prepare_for;
use safetensors::SafeTensors;
use tempfile::tempdir;

/// Evaluates on the training data: the loss must decrease; generalization is not tested.
fn eval_on_the_training_data(file: &str) -> [String; 3] {
    let path = fixture("data").join(file);
    let set = |key: &str| format!("{key}='{}'", path.display());
    [set("data.path"), set("data.eval_path"), "data.eval_fraction=".to_owned()]
}

const TEN_QUICK_STEPS: [&str; 3] = ["train.steps=10", "train.learning_rate=1e-2", "train.gradient_accumulation=1"];

#[test]
fn qlora_lora_full_and_pretraining_runs_lower_the_loss() {
    let kinds: [(&str, &[&str]); 7] = [
        ("chat-tiny.jsonl", &[]),
        ("chat-tiny.jsonl", &["base=nvfp4"]),
        ("chat-tiny.jsonl", &["base=mxfp4"]),
        ("chat-tiny.jsonl", &["base=fp8"]),
        ("chat-tiny.jsonl", &["bnb_4bit="]),
        ("chat-tiny.jsonl", &["bnb_4bit=", "lora=", "mode=full"]),
        ("text-tiny.jsonl", &["bnb_4bit=", "lora=", "mode=full", "init=random"]),
    ];
    for (file, kind) in kinds {
        let output = tempdir().unwrap();
        let data = eval_on_the_training_data(file);
        let data: Vec<&str> = data.iter().map(String::as_str).collect();
        let summary = finish(recipe(output.path(), &[&TEN_QUICK_STEPS, kind, &data].concat()), NEW);
        let (before, after) = (summary.eval_loss_before.unwrap(), summary.eval_loss_after.unwrap());
        assert!(after < 0.9 * before, "{kind:?}: {before} -> {after}");
    }
}

fn tensor_names(path: &Path) -> BTreeSet<String> {
    let bytes = read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("the file has tensors");
    file.names().into_iter().map(str::to_owned).collect()
}

/// QLoRA, LoRA and full fine-tuning, which the families take in turn, use the same recipe with another model folder.
#[test]
fn every_family_trains_from_the_same_recipe() {
    let kinds = [&[][..], &["bnb_4bit="], &["bnb_4bit=", "lora=", "mode=full"]];
    for (turn, family) in FAMILIES.into_iter().enumerate() {
        for kind in some_in_turn(&kinds, 1, turn) {
            let output = tempdir().unwrap();
            let model = format!("model='{}'", fixture(family).display());
            let data = eval_on_the_training_data("chat-tiny.jsonl");
            let data: Vec<&str> = data.iter().map(String::as_str).collect();
            // PEFT has no separate modules for experts, and "all-linear" selects the dense MLPs next to them.
            let mixture = MIXTURES.contains(&family) && !kind.contains(&"mode=full");
            let target: &[&str] = match family {
                "tiny-qwen2-moe" if mixture => {
                    &["lora.target=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'shared_expert_gate']"]
                }
                "tiny-gemma4-moe" if mixture => {
                    &["lora.target=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']"]
                }
                "tiny-lfm2-moe" if mixture => &["lora.target=['q_proj', 'k_proj', 'v_proj', 'in_proj', 'out_proj']"],
                "tiny-qwen3-5-moe" | "tiny-qwen3-next" | "tiny-qwen3-5-moe-vl" if mixture => {
                    &["lora.target='.*(self_attn.*|linear_attn.*|shared_expert_gate)'"]
                }
                _ if mixture => &["lora.target=['q_proj', 'k_proj', 'v_proj', 'o_proj']"],
                _ => &[],
            };
            let changes = [&TEN_QUICK_STEPS, kind, target, &data, &[&model, "train.steps=5"]].concat();
            let summary = finish(recipe(output.path(), &changes), NEW);
            let (before, after) = (summary.eval_loss_before.unwrap(), summary.eval_loss_after.unwrap());
            assert!(after < before, "{family}, {kind:?}: {before} -> {after}");
            let (saved, written_by_others) = if kind.contains(&"mode=full") {
                ("model/model.safetensors", fixture(family).join("model.safetensors"))
            } else {
                (
                    "adapter/adapter_model.safetensors",
                    fixture(&format!("{family}-lora")).join("adapter_model.safetensors"),
                )
            };
            let saved = tensor_names(&output.path().join("run").join(saved));
            assert_eq!(saved, tensor_names(&written_by_others), "{family}, {kind:?}: names of transformers and PEFT");
        }
    }
}

/// One run is interrupted after its first step, and one continues from the adapter of another.
#[test]
fn adapters_of_parameters_of_experts_learn_resume_and_continue() {
    for base in ["tiny-qwen3-moe", "tiny-gpt-oss"] {
        let output = tempdir().unwrap();
        let model = format!("model='{}'", fixture(base).display());
        let parameters = "lora.target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']";
        let data = eval_on_the_training_data("chat-tiny.jsonl");
        let of_run = |name: &str, changes: &[&str]| {
            let data: Vec<&str> = data.iter().map(String::as_str).collect();
            let name = format!("name='{name}'");
            let lora = ["lora.target=[]", parameters, &model, &name];
            recipe(output.path(), &[&TEN_QUICK_STEPS, &data[..], &lora, changes].concat())
        };
        let first = finish(of_run("run", &[]), NEW);
        let (before, after) = (first.eval_loss_before.unwrap(), first.eval_loss_after.unwrap());
        assert!(after < before, "{base}: {before} -> {after}");
        assert_eq!(one_step(of_run("in-two-parts", &[]), NEW), 1);
        assert_eq!(finish(of_run("in-two-parts", &[]), NEWEST).eval_loss_after, Some(after), "{base}");
        let adapter = output.path().join("run/adapter");
        let init = format!("lora.init_from='{}'", adapter.display());
        let next = finish(of_run("next", &[&init, "train.steps=1"]), NEW);
        assert_eq!(next.eval_loss_before, Some(after), "{base}");
    }
}

#[test]
fn a_fully_trained_text_model_is_saved_with_its_tower_and_a_checkpoint_without() {
    for base in ["tiny-mistral3", "tiny-gemma4-vl", "tiny-gemma4-unified-vl"].map(fixture) {
        let output = tempdir().unwrap();
        let model = format!("model='{}'", base.display());
        finish(recipe(output.path(), &["bnb_4bit=", "lora=", "mode=full", &model]), NEW);
        let run = output.path().join("run");
        let [before, after] = [&base, &run.join("model")].map(|folder| HfFolder::open(folder).unwrap());
        assert!(before.other_parts().count() > 0);
        assert_eq!(before.other_parts().collect::<Vec<_>>(), after.other_parts().collect::<Vec<_>>());
        for name in before.other_parts() {
            assert_eq!(before.read(name).unwrap(), after.read(name).unwrap(), "{name}");
        }
        let checkpoint = HfFolder::open(&checkpoint_folder(&run, 6).join("model")).unwrap();
        assert_eq!((checkpoint.other_parts().count(), checkpoint.names().count()), (0, after.names().count()));
        assert_eq!(read(base.join("config.json")).unwrap(), read(run.join("model/config.json")).unwrap());
    }
}

#[test]
fn trained_model_folder_loads_back_to_the_model_that_was_trained() {
    for start in ["init=random", "init=pretrained"] {
        let output = tempdir().unwrap();
        let data = format!("data.path='{}'", fixture("data/text-tiny.jsonl").display());
        let config = recipe(output.path(), &["bnb_4bit=", "lora=", "mode=full", start, &data]);
        let summary = finish(config.clone(), NEW);
        let folder = output.path().join("run/model");
        assert_eq!(summary.weights, folder.display().to_string());
        HfFolder::open(&folder).unwrap().check_complete(&ModelConfig::read(&folder).unwrap()).unwrap();

        // The folder is a model like any other: it has its tokenizer, and can be the next run's `model`.
        let mut next = config;
        next.model = folder.display().to_string();
        let prepared = prepare_for(next, 1, &PlanRequest::default()).unwrap();
        let model = load::<Flex>(folder.to_str().unwrap(), None, FROZEN);
        let again = prepared.evaluation.evaluate(&model, &prepared.tokenizer).unwrap();
        assert_eq!(again.loss, summary.eval_loss_after, "{start}");
    }
}

#[test]
fn the_recompute_policy_changes_no_bit_of_what_is_learned() {
    let run = |recompute: &str| {
        let output = tempdir().unwrap();
        let changes = ["train.steps=3", &format!("train.recompute={recompute}")];
        finish(recipe(output.path(), &changes), NEW);
        let run = output.path().join("run");
        let adapter = read_adapter(&run.join("adapter")).unwrap().1;
        let values: Vec<_> = adapter.into_iter().map(|(name, tensor)| (name, tensor.values)).collect();
        (step_losses(&run), values)
    };
    let none = run("none");
    assert_eq!(none.0.len(), 3);
    for recompute in ["selective", "projections", "full"] {
        assert!(run(recompute) == none, "{recompute} gives other weights, though it computes the same sums");
    }
}

/// Sequences of one chat each, so that micro-batches differ in their loss tokens.
#[test]
fn one_micro_batch_of_8_and_8_of_1_train_the_same_adapter() {
    let adapter_of = |cut: [&str; 2]| {
        let output = tempdir().unwrap();
        let changes = ["pack=false", "train.steps=1"];
        finish(recipe(output.path(), &[&changes[..], &cut].concat()), NEW);
        let run = output.path().join("run");
        (step_losses(&run), read_adapter(&run.join("adapter")).unwrap().1)
    };
    let (loss, at_once) = adapter_of(["train.micro_batch_size=8", "train.gradient_accumulation=1"]);
    let (other_loss, one_by_one) = adapter_of(["train.micro_batch_size=1", "train.gradient_accumulation=8"]);
    assert!((loss[0] - other_loss[0]).abs() < 1e-5 && loss.len() == 1, "{loss:?} {other_loss:?}");
    for (name, tensor) in &at_once {
        // B starts at zero, where the first step of AdamW is the sign of a gradient, or rounding where the gradient is as small as its
        // epsilon (4e-5 without AVX-512); A has a gradient only after it.
        let difference = relative_difference(&one_by_one[name].values, &tensor.values);
        assert!(difference < 1e-4, "{name}: {difference:e}");
    }
}
