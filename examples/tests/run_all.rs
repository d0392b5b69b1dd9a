//! Runs each example as the user does, on the files of this repository, and checks what it prints.
//!
//! Trade-off: `training_loop` takes three steps only.

use std::process::Command;

/// What a program prints.
///
/// # Panics
/// If it fails.
fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{program}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The number after the last `label`.
fn number_after(text: &str, label: &str) -> f64 {
    let (_, rest) = text.rsplit_once(label).unwrap_or_else(|| panic!("`{label}` is not in: {text}"));
    let word = rest.split_whitespace().next().expect("something follows the label").trim_end_matches(',');
    word.parse().unwrap_or_else(|_| panic!("`{word}` after `{label}` is not a number"))
}

#[test]
fn quantize_reports_size_and_error_of_every_format() {
    let text = output(env!("CARGO_BIN_EXE_quantize"), &[]);
    let sizes = ["nf4: ", "nf4_double_quant: ", "nvfp4: ", "mxfp4: ", "fp8: ", "(4.5", "(4.1", "(4.25", "(8."];
    assert!(sizes.iter().all(|part| text.contains(part)), "{text}");
    let error = |format: &str| {
        let line = text.lines().find(|line| line.starts_with(format)).expect("each format has a line");
        number_after(line, "relative error ")
    };
    let [nf4, nvfp4, mxfp4, fp8] = ["nf4:", "nvfp4:", "mxfp4:", "fp8:"].map(error);
    assert!(fp8 < 0.05 && fp8 < nf4 && nf4 < mxfp4 && nvfp4 < mxfp4 && mxfp4 < 0.15, "{text}");
}

#[test]
fn pack_jsonl_fills_sequences_with_whole_documents() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");
    let (data, model) = (format!("{fixtures}/data/chat-tiny.jsonl"), format!("{fixtures}/tiny-llama"));
    let text = output(env!("CARGO_BIN_EXE_pack_jsonl"), &[&data, &model, "64"]);
    assert!(text.contains("24 documents in "), "{text}");
    assert!(text.contains("first micro-batch: 2 x 64 tokens"), "{text}");
    assert!(number_after(&text, "sequences, ") > 50.0, "{text}");
}

#[test]
fn generate_continues_the_prompt_with_what_the_quickstart_model_was_trained_on() {
    let text = output(env!("CARGO_BIN_EXE_generate"), &["rovis backwards is"]);
    assert!(text.starts_with("rovis backwards is sivor"), "{text}");
}

#[test]
fn training_loop_lowers_its_own_loss() {
    let text = output(env!("CARGO_BIN_EXE_training_loop"), &["4"]);
    let losses: Vec<f64> = (1..=4).map(|step| number_after(&text, &format!("step {step}: loss "))).collect();
    assert!(losses[3] < losses[0], "{text}");
}

#[test]
fn custom_op_has_the_gradient_of_its_forward() {
    let text = output(env!("CARGO_BIN_EXE_custom_op"), &[]);
    assert!(text.contains("the backward agrees with the forward"), "{text}");
}
