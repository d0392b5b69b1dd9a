//! The plan's memory next to what steps allocate: a dense model, a mixture of experts, and those with convolutions and the delta rule under every
//! policy, in uniform and in packed rows and in 8-bit floats, which the policies take in turn.
//!
//! Trade-off: models are shallow, so what does not grow with the tokens outweighs them; it is left out by comparing two sizes of a step.

use std::fs;
use std::path::Path;

use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_kernels::backends::{BackendKind, Cuda};
use firebrick_kernels::{MemoryOps, Session};
use firebrick_parallel::Ranks;
use firebrick_tests::some_in_turn;
use firebrick_train::bench::Synthetic;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::plan::{DataShape, Plan, PlanInputs, PlanRequest};
use firebrick_trainer::run::assemble::{self, WeightSource};
use tempfile::tempdir;

use crate::Counts;

/// Tokens of a row.
const ROW: usize = 4096;
/// Rows of a step, few and many: what does not grow with them, such as pages of pools that are not full, is left out.
const ROWS: [usize; 2] = [4, 12];
/// The same where layers are recomputed, whole and in tiles.
const ROWS_RECOMPUTED: [[usize; 2]; 2] = [[3, 7], [9, 18]];
/// Compute formats, and documents per row.
const ROWS_OF: [(&str, usize); 3] = [("bfloat16", 1), ("bfloat16", 7), ("fp8", 1)];
/// What the plan grows by, over what allocations grow by: at least and at most.
const RATIOS: [f64; 2] = [0.95, 1.06];

const RECIPE: &str = "backend='cuda'\nmax_seq_len=4096\n[bnb_4bit]\n[lora]\n[data]\npath='none'\nformat='text'\n[train]\nsteps=3\n\
     loss_chunk_tokens=1024\noptimizer='adamw_8bit'\n";
const DENSE: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3584,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 8192, "rms_norm_eps": 1e-6}"#;
const MIXTURE: &str = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 1024,
    "moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 6, "norm_topk_prob": true, "head_dim": 128, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 8192, "rms_norm_eps": 1e-6}"#;
const CONVOLUTIONS: &str = r#"{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 1024, "block_ff_dim": 4608,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 8192, "full_attn_idxs": [2, 5]}"#;
const DELTA: &str = r#"{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 4, "vocab_size": 8192, "linear_num_key_heads": 4,
    "linear_num_value_heads": 16}"#;
const EVERY_EXPERT: &str = "lora.target_parameters=['mlp.experts.gate_up_proj','mlp.experts.down_proj']";

pub(super) fn plans_grow_with_tokens_as_allocations_do() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    let (mut wrong, mut turn) = (Vec::new(), 0);
    for (name, config, experts) in [
        ("dense", DENSE, None),
        ("mixture", MIXTURE, Some(EVERY_EXPERT)),
        ("convolutions", CONVOLUTIONS, None),
        ("delta", DELTA, None),
    ] {
        let folder = tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config).unwrap();
        for policy in ["none", "selective", "projections", "full"] {
            turn += 1;
            for (compute, documents) in some_in_turn(&ROWS_OF, 1, turn) {
                let mut changes = vec![format!("train.recompute={policy}"), format!("compute={compute}")];
                changes.extend(experts.map(str::to_owned));
                let mut pairs = vec![ROWS];
                if policy == "projections" || policy == "full" {
                    changes.push("train.offload=false".to_owned());
                    pairs = ROWS_RECOMPUTED.into();
                }
                for pair in pairs {
                    let [few, many] =
                        pair.map(|rows| planned_and_allocated(folder.path(), [rows, documents], &changes));
                    let ratio = (many[0] - few[0]) / (many[1] - few[1]);
                    let [least, most] = RATIOS;
                    if !(least..=most).contains(&ratio) {
                        wrong.push(format!("{name} {policy}, {compute}, {documents} documents, {pair:?}: {ratio:.3}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "growth of the plan over growth of allocations:\n{}", wrong.join("\n"));
}

/// Takes three steps of QLoRA with random weights and so many rows; returns the planned bytes, and those that the driver gave.
fn planned_and_allocated(folder: &Path, [rows, documents]: [usize; 2], changes: &[String]) -> [f64; 2] {
    let recipe = format!("model='{}'\n{RECIPE}micro_batch_size={rows}\n", folder.display());
    let config = RunConfig::from_toml(&recipe, Path::new("run.toml"), changes).unwrap();
    let model = config.read_model(folder).unwrap();
    let data = DataShape {
        rows: 3 * rows,
        row_len: ROW,
        longest_document: ROW.div_ceil(documents),
        documents_per_row: documents,
        loss_tokens_per_row: ROW,
        has_chats: false,
        report: String::new(),
    };
    let profile = HardwareProfile::of_machine(AcceleratorSpec::named("h100").unwrap());
    let request = PlanRequest::default();
    let (config, profile, model) = (&config, &profile, &model);
    let plan = Plan::resolve(PlanInputs { config, profile, model, data: &data, world_size: 1, request: &request });
    let plan = plan.unwrap();

    let device = Cuda::device_of(0);
    Cuda::release_memory(&device);
    let before = Counts::now().bytes;
    let source = WeightSource::Synthetic;
    let mut trainer = assemble::trainer::<Cuda>(&plan, model, source, Ranks::single(), &device, &mut |_| ()).unwrap();
    let mut batches = Synthetic { rows, row_len: ROW, documents, vocab_size: model.spec.vocab_size, seed: 1 };
    for _ in 0..3 {
        trainer.step(&[batches.next_batch()]).unwrap().read();
    }
    let allocated = Counts::now().bytes - before;
    drop(trainer);
    Cuda::release_memory(&device);
    [plan.memory_bytes.value as f64, allocated as f64]
}
