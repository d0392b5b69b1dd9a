//! Experts of a gpt-oss that are merged back into MXFP4: written folders against exact merges and the base's bytes.
//!
//! transformers wrote the base, PEFT the adapters.

use std::collections::BTreeMap;
use std::fs::{copy, create_dir_all, read_to_string};
use std::path::{Path, PathBuf};

use firebrick_arch::CONFIG_FILE;
use firebrick_arch::folder::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, WEIGHTS_FILE};
use firebrick_model::checkpoint::TensorBytes;
use firebrick_model::peft::read_adapter;
use firebrick_model::{HfFolder, Merge, MergeReport, ModelConfig, ModelError, merge_adapter};
use firebrick_precision::{FloatType, QuantFormat};
use safetensors::Dtype;
use serde_json::{Value, from_str};
use tempfile::{TempDir, tempdir};

use crate::{fixture, plain_merge, stored, write_stored};

/// A gpt-oss with experts in MXFP4, as published.
const BASE: &str = "quant-mxfp4-gpt-oss";
/// An adapter of v, gate and up of both layers, and down of the first.
const OF_EXPERTS: &str = "tiny-gpt-oss-parameters";
/// The tensors of the base that this adapter changes.
const CHANGED: [&str; 8] = [
    "model.layers.0.mlp.experts.down_proj_blocks",
    "model.layers.0.mlp.experts.down_proj_scales",
    "model.layers.0.mlp.experts.gate_up_proj_blocks",
    "model.layers.0.mlp.experts.gate_up_proj_scales",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.1.mlp.experts.gate_up_proj_blocks",
    "model.layers.1.mlp.experts.gate_up_proj_scales",
    "model.layers.1.self_attn.v_proj.weight",
];

fn merged(
    model: &Path,
    adapter: &Path,
    dtype: Option<FloatType>,
    mxfp4: bool,
    to: &Path,
) -> Result<MergeReport, ModelError> {
    merge_adapter(&Merge { dtype, mxfp4, ..plain_merge(model, adapter) }, to)
}

/// Returns the names of the tensors whose bytes differ; names, formats and shapes have to be equal.
fn changed(folder: &Path) -> Vec<String> {
    let [ours, base] = [folder, &fixture(BASE)].map(|folder| stored(&folder.join(WEIGHTS_FILE)));
    assert!(ours.keys().eq(base.keys()), "{:?}", ours.keys());
    for (name, TensorBytes { dtype, shape, .. }) in &ours {
        assert_eq!((dtype, shape), (&base[name].dtype, &base[name].shape), "{name}");
    }
    ours.into_iter().filter(|(name, tensor)| *tensor != base[name]).map(|(name, _)| name).collect()
}

/// The merged folder in MXFP4 and the same merge in f32, next to the base.
struct Merged {
    _temp: TempDir,
    mxfp4: PathBuf,
    report: MergeReport,
    /// The weights of experts with an adapter: those of the base, exactly merged, and as written.
    experts: BTreeMap<String, [Vec<f32>; 3]>,
}

impl Merged {
    fn new(adapter: &Path) -> Self {
        let temp = tempdir().unwrap();
        let (base, [mxfp4, exact]) = (fixture(BASE), ["mxfp4", "exact"].map(|name| temp.path().join(name)));
        let report = merged(&base, adapter, None, true, &mxfp4).unwrap();
        merged(&base, adapter, Some(FloatType::F32), false, &exact).unwrap();
        let folders = [&base, &exact, &mxfp4].map(|folder| HfFolder::open(folder).unwrap());
        let is_expert = |name: &&str| folders[0].stored_format(name) == Some(QuantFormat::Mxfp4);
        let values = |name: &str| {
            folders.each_ref().map(|folder| folder.read_f32(name, &folder.info(name).unwrap().shape).unwrap())
        };
        let all = folders[0].names().filter(is_expert).map(|name| (name.to_owned(), values(name)));
        let experts = all.filter(|(_, [base, exact, _])| base != exact).collect();
        Self { _temp: temp, mxfp4, report, experts }
    }
}

#[test]
fn a_merge_into_mxfp4_keeps_what_has_no_adapter() {
    let merged = Merged::new(&fixture(OF_EXPERTS));
    assert_eq!(changed(&merged.mxfp4), CHANGED);
    let config = |folder: &Path| from_str::<Value>(&read_to_string(folder.join(CONFIG_FILE)).unwrap()).unwrap();
    assert_eq!(config(&merged.mxfp4), config(&fixture(BASE)));
    let written = HfFolder::open(&merged.mxfp4).unwrap();
    written.check_complete(&ModelConfig::read(&merged.mxfp4).unwrap()).unwrap();
    // Six experts: gate and up of two layers, and down of one.
    assert_eq!((merged.experts.len(), merged.report.modules), (6 * 5, 6 * 5 + 2));
}

/// Returns the least squared error that 32 values can have, by trying each scale.
fn least_error(values: &[f32]) -> f64 {
    let error = |exponent: i32| -> f64 {
        let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].map(|level| level * 2.0_f64.powi(exponent));
        let nearest = |value: &f32| {
            levels.map(|level| (level - f64::from(value.abs())).abs()).into_iter().fold(f64::MAX, f64::min)
        };
        values.iter().map(|value| nearest(value).powi(2)).sum()
    };
    (-40..20).map(error).fold(f64::MAX, f64::min)
}

fn squares(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

#[test]
fn merged_experts_are_the_nearest_that_mxfp4_has() {
    for (name, [base, exact, written]) in &Merged::new(&fixture(OF_EXPERTS)).experts {
        for (exact, written) in exact.chunks(32).zip(written.chunks(32)) {
            let (error, least) = (squares(exact, written), least_error(exact));
            assert!(error <= least * (1.0 + 1e-6), "{name}: {error:e} is possible with {least:e}: {exact:?}");
        }
        assert_ne!(base, written, "{name}");
    }
}

/// Copies an adapter, its B of experts times a factor.
fn scaled(factor: f32) -> TempDir {
    let (temp, from) = (tempdir().unwrap(), fixture(OF_EXPERTS));
    create_dir_all(temp.path()).unwrap();
    copy(from.join(ADAPTER_CONFIG_FILE), temp.path().join(ADAPTER_CONFIG_FILE)).unwrap();
    let mut tensors = stored(&from.join(ADAPTER_WEIGHTS_FILE));
    for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains("experts") && name.contains("lora_B")) {
        assert_eq!(tensor.dtype, Dtype::F32, "{name}");
        for value in tensor.bytes.as_chunks_mut().0 {
            *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
        }
    }
    write_stored(&temp.path().join(ADAPTER_WEIGHTS_FILE), &tensors);
    read_adapter(temp.path()).unwrap();
    temp
}

#[test]
fn the_reported_noise_is_that_of_the_files() {
    for (factor, is_lost) in [(10.0, false), (1.0, false), (0.03, true)] {
        let Merged { report, experts, .. } = Merged::new(scaled(factor).path());
        let mut sums = [0.0; 3];
        for [base, exact, written] in experts.values() {
            let of_weight = [squares(exact, &vec![0.0; exact.len()]), squares(written, exact), squares(exact, base)];
            sums.iter_mut().zip(of_weight).for_each(|(sum, squares)| *sum += squares);
        }
        let ([rounding, change], noise) = ([1, 2].map(|of| (sums[of] / sums[0]).sqrt()), report.mxfp4.unwrap());
        assert!((noise.rounding / rounding - 1.0).abs() < 1e-9, "{noise:?}, computed {rounding}");
        assert!((noise.change / change - 1.0).abs() < 1e-9, "{noise:?}, computed {change}");
        assert_eq!(noise.is_mostly_lost(), is_lost, "{factor}: {noise:?}");
        // The base is on the grid, so rounding never adds more than it takes.
        assert!(noise.rounding < 1.01 * noise.change && noise.rounding < 0.15, "{factor}: {noise:?}");
    }
}

#[test]
fn an_adapter_of_attention_leaves_all_experts() {
    let temp = tempdir().unwrap();
    let to = temp.path().join("merged");
    let report = merged(&fixture(BASE), &fixture("tiny-gpt-oss-lora"), None, true, &to).unwrap();
    assert_eq!(report.mxfp4, None);
    let changed = changed(&to);
    assert!(!changed.is_empty() && changed.iter().all(|name| name.contains("self_attn")), "{changed:?}");
}

#[test]
fn a_base_without_mxfp4_is_refused() {
    let temp = tempdir().unwrap();
    let to = temp.path().join("merged");
    for (base, adapter) in [("tiny-gpt-oss", OF_EXPERTS), ("tiny-llama", "tiny-llama-rslora")] {
        let message = merged(&fixture(base), &fixture(adapter), None, true, &to).unwrap_err().to_string();
        assert!(message.contains("no experts in MXFP4") && message.contains("--mxfp4"), "{message}");
        assert!(!to.exists());
    }
}
