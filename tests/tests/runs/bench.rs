//! Tests `firebrick bench` on a real base: every number is there, and they agree with each other.

use std::path::PathBuf;

use firebrick_hwprofile::measure::ProcessClock;
use firebrick_kernels::Recompute;
use firebrick_kernels::backends::BackendKind;
use firebrick_optim::OptimizerKind;
use firebrick_parallel::Ranks;
use firebrick_precision::QuantFormat;
use firebrick_train::bench::{BenchOptions, bench};
use firebrick_trainer::config::BackendChoice;
use serde_json::Value;

use firebrick_tests::{fixture, sample};

fn options(recompute: Recompute) -> BenchOptions {
    BenchOptions {
        model: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/quickstart/base"),
        seq: 64,
        zero: 0,
        random_base: false,
        micro_batch: 2,
        recompute: Some(recompute).into(),
        device_memory_gib: None,
        compute: None,
        base: QuantFormat::Nf4 { double_quant: true },
        steps: 2,
        warmup: 1,
        offload: None,
        kept_weights_gib: None,
        tune_gemms: None,
        target: Vec::new(),
        target_parameters: Vec::new(),
        rank: 8,
        alpha: 16.0,
        optimizer: OptimizerKind::PagedAdamW8bit,
        loss_chunk: 48,
        documents: 3,
        backend: BackendChoice::Given(BackendKind::Flex),
        trace: true,
    }
}

fn report(options: &BenchOptions) -> Value {
    let report =
        bench(options, &Ranks::single(), ProcessClock::start(), &|_| ()).unwrap_or_else(|error| panic!("{error}"));
    serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap()
}

fn number(report: &Value, path: &str) -> f64 {
    report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is not a number in {report}"))
}

#[test]
fn bench_of_the_quickstart_base_reports_every_field() {
    let report = report(&options(Recompute::Full));
    let positive = [
        "/tok_s",
        "/step_s/min",
        "/step_s/median",
        "/step_s/max",
        "/load_s",
        "/first_step_s",
        "/peak_gib",
        "/planned_gib",
        "/mfu/share",
        "/mfu/rate_tflops",
        "/roofline_tok_s",
        "/loss_first",
        "/loss_last",
        "/peaks/gemm_tflops",
        "/peaks/copy_tb_s",
    ];
    for path in positive {
        assert!(number(&report, path) > 0.0, "{path} in {report}");
    }
    let words = [
        ("backend", "flex"),
        ("compute", "float32"),
        ("recompute", "full"),
        ("optimizer", "paged_adamw_8bit"),
        ("peak_source", "process"),
    ];
    for (key, word) in words {
        assert_eq!(report[key], word, "{key}");
    }
    let numbers = [("seq", 64), ("micro_batch", 2), ("documents", 3), ("rank", 8), ("steps", 2), ("warmup", 1)];
    for (key, number) in numbers {
        assert_eq!(report[key], number, "{key}");
    }
    assert_eq!((report["offload"].as_bool(), &report["self_test_s"]), (Some(false), &Value::Null));
    assert_eq!(report["mfu"]["rate_source"], "measured", "no table has rates of processors");
    assert_eq!(report["trace"], serde_json::json!({ "operations": [], "idle": null }));
    assert!(report["planned"].as_array().is_some_and(|lines| lines.len() > 4));

    let median = number(&report, "/step_s/median");
    assert!((number(&report, "/tok_s") * median / 128.0 - 1.0).abs() < 1e-9, "tokens of a step over its median");
    assert!(number(&report, "/step_s/min") <= median && median <= number(&report, "/step_s/max"));
    assert!(number(&report, "/first_step_s") > number(&report, "/load_s"));
}

#[test]
fn bench_computes_the_same_losses_under_every_recompute_policy() {
    let losses = |recompute| {
        let report = report(&options(recompute));
        (number(&report, "/loss_first"), number(&report, "/loss_last"))
    };
    let full = losses(Recompute::Full);
    // `learning` compares whole runs under every policy.
    for recompute in sample([Recompute::Selective, Recompute::Projections, Recompute::None], 3) {
        assert_eq!(full, losses(recompute), "{recompute:?}");
    }
}

#[test]
fn bench_refuses_a_folder_without_a_model() {
    let absent = BenchOptions { model: fixture("data"), ..options(Recompute::Full) };
    let message = bench(&absent, &Ranks::single(), ProcessClock::start(), &|_| ()).unwrap_err().to_string();
    assert!(message.contains("config.json"), "{message}");
}
