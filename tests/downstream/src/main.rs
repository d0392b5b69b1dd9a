//! A program outside of the workspace that uses each packaged crate once, as somebody else would, and prints what it found.
//!
//! Not supported: a build in the checkout itself, where the crates are not packages.

use std::error::Error;
use std::io::Write;
use std::path::Path;

use firebrick_arch::ModelConfig;
use firebrick_data::{DocumentSet, Example, PackOptions, PackedDataset};
use firebrick_files::AtomicFile;
use firebrick_hub::{HubId, RepoKind};
use firebrick_hwprofile::AcceleratorSpec;
use firebrick_precision::QuantFormat;

const CONFIG: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "rope_theta": 1000000, "max_position_embeddings": 40960, "tie_word_embeddings": true
}"#;

/// The first argument is a folder to write to.
fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("name a folder to write to")?;

    let spec = ModelConfig::parse(CONFIG, Path::new("config.json"))?.spec;
    println!("arch: {} parameters", spec.parameters());

    let weights: Vec<f32> = (0..4096).map(|index| (index as f32 * 0.37).sin()).collect();
    let quantized = QuantFormat::Nf4 { double_quant: true }.quantize(&weights, &[64, 64])?;
    println!("precision: {} bytes", quantized.bytes());

    let id = HubId::parse(RepoKind::Model, "owner/name@main", None).ok_or("no id of the Hub")?;
    println!("hub: {} at {}", id.name, id.revision);

    let example = Example { tokens: vec![1, 2, 3], loss_mask: vec![false, true, true] };
    let rows = PackedDataset::new(DocumentSet::from_examples(&[example]), PackOptions::new(6));
    println!("data: {} tokens in the loss", rows.batch(&[0]).loss_tokens());

    println!("hwprofile: {}", AcceleratorSpec::named("h100")?.id);

    let path = Path::new(&folder).join("files.txt");
    let mut file = AtomicFile::create(&path)?;
    file.write_all(b"complete")?;
    file.commit()?;
    println!("files: {}", std::fs::read_to_string(&path)?);
    Ok(())
}
