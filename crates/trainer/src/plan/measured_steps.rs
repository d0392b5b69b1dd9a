//! Compares the forecast with every step of an H100 in `benches/results/`: QLoRA of three models, in bf16 and FP8, uniform and packed rows, layers
//! saved and recomputed, with and without offloading, weights kept and converted again.
//!
//! Trade-off: the forecast is of the accelerator's row in the table, not of the card's own measured peaks, so cards that differ share one range.

use firebrick_arch::ModelConfig;
use serde::Deserialize;
use serde_json::json;

use crate::plan::fixtures::{Example, full_rows, llama};
use crate::plan::{DataShape, Plan};

/// Output of `firebrick bench --json`: the fields that a recipe follows from, and the result.
#[derive(Deserialize)]
struct Report {
    model: String,
    gemms: String,
    recompute: String,
    offload: bool,
    seq: usize,
    micro_batch: usize,
    documents: usize,
    tok_s: f64,
    warmup: usize,
    /// Written by hand if builds were compared.
    build: Option<String>,
    /// Written by hand if it was varied.
    kept_weights: Option<String>,
    #[serde(default)]
    planned: Vec<PlannedLine>,
}

#[derive(Deserialize)]
struct PlannedLine {
    what: String,
    bytes: u64,
}

impl Report {
    /// Returns whether the step is like today's: after a warm-up and, if it waits for the host, of a build whose sections reuse memory.
    fn is_current(&self) -> bool {
        let waits_for_the_host = self.seq * self.micro_batch <= 512;
        self.warmup > 0 && (!waits_for_the_host || self.build.as_deref().is_some_and(|build| build != "before"))
    }

    /// Returns the GiB of converted weights that stayed.
    fn kept_gib(&self) -> f64 {
        match self.kept_weights.as_deref() {
            Some("none") => 0.0,
            Some("all") => 100.0,
            Some(amount) => amount.trim_end_matches(" GiB").parse().expect("an amount in GiB"),
            None => {
                let lines = self.planned.iter().filter(|line| line.what == "converted weights that stay");
                lines.map(|line| line.bytes).sum::<u64>() as f64 / f64::from(1 << 30)
            }
        }
    }

    fn name(&self) -> String {
        let Self { model, gemms, recompute, seq, micro_batch, documents, .. } = self;
        let kept = self.kept_gib();
        format!("{model} {gemms} {recompute} {micro_batch} x {seq}, {documents} documents, {kept:.1} GiB kept")
    }

    fn model_config(&self) -> ModelConfig {
        let changes = match &self.model {
            model if model.contains("8B") => json!({}),
            model if model.contains("1B") => json!({
                "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                "tie_word_embeddings": true,
            }),
            model => {
                assert!(model.contains("0.5B"), "{model}");
                json!({
                    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
                    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                    "num_key_value_heads": 2, "tie_word_embeddings": true,
                })
            }
        };
        llama(&changes)
    }

    fn plan(&self) -> Plan {
        let changes = [
            "train.gradient_accumulation=1".to_owned(),
            "train.grad_checkpointing=".to_owned(),
            format!("compute={}", if self.gemms == "fp8" { "fp8" } else { "bf16" }),
            format!("max_seq_len={}", self.seq),
            format!("train.recompute={}", self.recompute),
            format!("train.offload={}", self.offload),
            format!("train.micro_batch_size={}", self.micro_batch),
            format!("train.kept_weights_gib={}", self.kept_gib()),
        ];
        let recipe = include_str!("../../../../configs/h100.toml");
        let mut example = Example::of(recipe, "h100", &changes.each_ref().map(String::as_str));
        example.model = self.model_config();
        example.data = DataShape {
            longest_document: self.seq.div_ceil(self.documents),
            documents_per_row: self.documents,
            ..full_rows(self.seq)
        };
        example.plan()
    }
}

#[test]
fn every_step_measured_on_an_h100_lies_in_its_range() {
    let files = [
        include_str!("../../../../benches/results/h100-memory-used-again.json"),
        include_str!("../../../../benches/results/h100-kept-weights.json"),
        include_str!("../../../../benches/results/h100-projections.json"),
        include_str!("../../../../benches/results/h100-full-recompute-and-short-rows.json"),
        include_str!("../../../../benches/results/h100-fp8-fused.json"),
        include_str!("../../../../benches/results/h100-fp8.json"),
    ];
    let reports: Vec<Report> = files
        .iter()
        .flat_map(|file| serde_json::from_str::<Vec<Report>>(file).expect("reports of train bench"))
        .filter(Report::is_current)
        .collect();
    let mut outside = Vec::new();
    for report in &reports {
        let range = report.plan().forecast.expect("the peaks are known").tokens_per_second.value;
        if !range.contains(report.tok_s) {
            outside.push(format!("{}: {:.0} outside of {range:?}", report.name(), report.tok_s));
        }
    }
    assert!(outside.is_empty(), "{outside:#?}");
    let has = |what: &dyn Fn(&Report) -> bool| reports.iter().any(what);
    assert!(has(&|report| report.documents > 1 && report.gemms == "fp8") && has(&|report| report.offload));
    assert!(has(&|report| report.seq == 512));
    assert!(has(&|report| report.model.contains("1B")) && has(&|report| report.kept_gib() > 0.0));
}
