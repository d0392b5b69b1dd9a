//! `export`: writes the result of a run for other programs: an adapter merged into its base, a model as one GGUF file, or both in one call.
//!
//! Trade-off: the number format of the base is kept unless another is requested, so rounding may lose a part of a small adapter; the command says how
//! much.

mod gguf;
mod modelfile;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use firebrick_arch::{MlpSpec, counted};
use firebrick_files::AtomicFolder;
use firebrick_model::{
    Bnb4bit, CHAT_TEMPLATE_FILE, Companions, GgufType, Merge, MergeReport, Mxfp4Noise, check_gguf, merge_adapter,
    quantize_folder, read_config,
};
use firebrick_precision::{FloatType, QuantFormat};
use firebrick_trainer::RunError;
use firebrick_trainer::config::compute::parse_format;
use firebrick_trainer::console::{Console, warn};
use firebrick_trainer::hub::{Need, adapter_folder, model_folder, other_base};
use firebrick_trainer::run::chat_settings;
use firebrick_trainer::storage::StorageError;
use serde_json::{Map, Value};

use crate::offered::Offered;

/// Share of the adapter lost to rounding that causes a warning.
const NOTEWORTHY_LOSS: f64 = 0.05;

/// The options of `export`.
#[derive(Args, Clone, Debug)]
pub struct ExportOptions {
    /// Model folder or id of the Hub; with --merge the base that the adapter was trained on.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Adapter folder or id of the Hub, ours or PEFT's.
    #[arg(long, value_name = "DIR", requires = "merge")]
    pub adapter: Option<PathBuf>,
    /// Folder to write, which must be new or empty; or the GGUF file.
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
    /// Merge the adapter into the model and write a model folder, or with --gguf one GGUF file.
    #[arg(long, requires = "adapter", required_unless_present_any = ["gguf", "bnb_4bit"])]
    pub merge: bool,
    /// Write the model as one GGUF file, for llama.cpp and Ollama, with a Modelfile next to it: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0.
    /// With --merge the merged model, whose weights lie next to the file while it is written.
    #[arg(long, value_name = "TYPE", hide_possible_values = true, value_parser = gguf_types())]
    pub gguf: Option<GgufType>,
    /// Write the projections in 4 bits as bitsandbytes does (nf4_double_quant, nf4, fp4_double_quant, fp4): of the merged model with
    /// --merge, otherwise of the model as it is. transformers loads the folder. Mixtures of experts are refused.
    #[arg(long = "bnb-4bit", value_name = "FORMAT", conflicts_with = "gguf")]
    pub bnb_4bit: Option<Bnb4bit>,
    /// Write the experts of a merged gpt-oss in MXFP4 again, as it is published and as vLLM, transformers and llama.cpp read it. Experts without an
    /// adapter keep their bytes; what rounding does to the others is printed. Without it, all experts are written in bfloat16.
    #[arg(long, requires = "merge", conflicts_with = "bnb_4bit")]
    pub mxfp4: bool,
    /// Number format of the merged weights; without it, the base's. With --gguf they are rounded to the type of the file only, and this is the
    /// format that they have before, without it float32.
    #[arg(long, value_name = "FORMAT", requires = "merge", value_parser = parse_format)]
    pub dtype: Option<FloatType>,
    /// Which weights the adapter is added to: "stored", or the base's format in training (nf4_double_quant, nf4, nvfp4, mxfp4, fp8), for
    /// weights that are quantized to it and back. "dequantized" is nf4_double_quant.
    #[arg(long, value_name = "FORMAT", default_value_t = MergeBase(None))]
    pub base: MergeBase,
}

/// The weights that an adapter is added to: those of the model folder, quantized and dequantized again if the base had this format in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeBase(pub Option<QuantFormat>);

impl fmt::Display for MergeBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.map_or("stored", QuantFormat::name))
    }
}

impl FromStr for MergeBase {
    type Err = String;

    /// Parses "stored", the name of a format, or "dequantized", the default of `[bnb_4bit]` in training.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stored" => Ok(Self(None)),
            "dequantized" => Ok(Self(Some(QuantFormat::Nf4 { double_quant: true }))),
            format => format.parse().map(|format| Self(Some(format))).map_err(|_| {
                let formats = QuantFormat::ALL.map(QuantFormat::name).join(", ");
                format!("'{format}' is not one of stored, dequantized, {formats}")
            }),
        }
    }
}

fn gguf_types() -> Offered<GgufType> {
    Offered { values: GgufType::OFFERED.map(GgufType::name).to_vec(), parse: |name| name.parse() }
}

/// Exports as the options request; returns a text for the user.
pub fn export(options: &ExportOptions) -> Result<String, RunError> {
    let console = Console::VERBOSE;
    check_out(&options.out, options.gguf.is_some())?;
    let adapter = |path: &Path| adapter_folder(path, "--adapter", Need::Weights, console);
    let adapter = options.adapter.as_deref().map(adapter).transpose()?;
    let model = model_folder(&options.model, Need::Weights, console)?.folder;
    adapter.iter().filter_map(|adapter| other_base(adapter, &model)).for_each(|note| warn(&note));
    let options = &ExportOptions { model, adapter, ..options.clone() };
    match (options.gguf, &options.adapter) {
        (Some(kind), Some(adapter)) => merge_to_gguf(options, adapter, kind),
        (Some(kind), None) => gguf::write(&options.model, &options.out, kind),
        (None, Some(adapter)) => merge(options, adapter),
        (None, None) => {
            let format = options.bnb_4bit.expect("the command line asks for an adapter or a format");
            let companions = Companions {
                from: options.model.clone(),
                chat_template: None,
                chat_settings: chat_settings_of(&options.model)?,
                tokenizer: BTreeMap::new(),
            };
            let count = quantize_folder(&options.model, &options.out, format, &companions)?;
            Ok(format!("{count} projections written in {format} to {}", options.out.display()))
        }
    }
}

/// Checks, before anything is read, that a file can be written where `--out` says, or a folder.
fn check_out(out: &Path, is_file: bool) -> Result<(), RunError> {
    let name = out.display();
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let message = match (is_file, folder) {
        (true, _) if out.is_dir() => {
            format!("--out {name} is a folder, and GGUF is one file: write --out {name}/model.gguf")
        }
        (true, Some(folder)) if !folder.is_dir() => {
            format!("--out {name}: there is no folder {}: make it first", folder.display())
        }
        (true, _) if out.exists() => format!("--out {name} is there already: name another file, or remove it first"),
        (false, _) if out.is_file() => format!("--out {name} is a file, and a model is a folder: name another one"),
        _ => return Ok(()),
    };
    Err(RunError::Refused(message))
}

fn chat_settings_of(folder: &Path) -> Result<Map<String, Value>, RunError> {
    Ok(chat_settings::to_json(&chat_settings::read(folder)?, chat_settings::read_sequence_tokens(folder)?))
}

/// Merges into a folder next to the file, writes the file from it, and removes the folder. What GGUF cannot describe is refused before the merge, and
/// experts that the base has in MXFP4 stay so.
fn merge_to_gguf(options: &ExportOptions, adapter: &Path, kind: GgufType) -> Result<String, RunError> {
    check_gguf(&options.model)?;
    let out = &options.out;
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".merged");
    let folder =
        AtomicFolder::create(&out.with_file_name(name)).map_err(|error| StorageError::io("create", out, error))?;
    let merged = folder.temporary().join("model");
    let dtype = Some(options.dtype.unwrap_or(FloatType::F32));
    let layers = read_config(&options.model)?.spec.layers;
    let is_mxfp4 = layers.iter().any(|layer| matches!(layer.mlp, MlpSpec::Experts { mxfp4: true, .. }));
    let mxfp4 = options.mxfp4 || is_mxfp4;
    let text = merge(&ExportOptions { out: merged.clone(), dtype, mxfp4, ..options.clone() }, adapter)?;
    Ok(format!("{text}\n{}", gguf::write(&merged, out, kind)?))
}

fn merge(options: &ExportOptions, adapter: &Path) -> Result<String, RunError> {
    let template = adapter.join(CHAT_TEMPLATE_FILE);
    let chat_template = template.is_file().then(|| firebrick_arch::json::read_text(&template)).transpose()?;
    let merge = Merge {
        model: &options.model,
        adapter,
        requantized: options.base.0,
        dtype: options.dtype,
        bnb_4bit: options.bnb_4bit,
        mxfp4: options.mxfp4,
        companions: Companions {
            from: options.model.clone(),
            chat_template,
            chat_settings: chat_settings_of(adapter)?,
            tokenizer: Companions::tokenizer_of(adapter)?,
        },
    };
    let report = merge_adapter(&merge, &options.out)?;
    Ok(text(options, &report))
}

fn text(options: &ExportOptions, report: &MergeReport) -> String {
    let MergeReport { modules, largest_error, lost_of_adapter, dtype, bnb_4bit, mxfp4 } = *report;
    let format = bnb_4bit.map_or(dtype.name(), Bnb4bit::name);
    let place = if options.gguf.is_some() { String::new() } else { format!(" into {}", options.out.display()) };
    let close = if largest_error > 0.0 { format!("within {largest_error:.0e} of") } else { "exactly".to_owned() };
    let mut text = format!(
        "merged {}{place}, {format}{}; read again, its outputs are {close} those of base and adapter",
        counted(modules, "module"),
        if options.mxfp4 { " with experts in mxfp4" } else { "" },
    );
    if lost_of_adapter > NOTEWORTHY_LOSS {
        text += &format!(
            "\nnote: rounding to {format} adds noise of {:.0} % of what the adapter contributes. To keep all of it, use the adapter next to its \
             base, merge with --dtype float32, or merge and write GGUF in one call: --merge --gguf TYPE rounds once, to that type",
            100.0 * lost_of_adapter
        );
    }
    if options.mxfp4 {
        text += &text_of_experts(mxfp4);
    }
    text
}

/// Says what rounding to MXFP4 did to the experts.
fn text_of_experts(noise: Option<Mxfp4Noise>) -> String {
    let Some(noise) = noise else {
        return "\nexperts: none has an adapter; their codes and scales are those of the base, byte for byte"
            .to_owned();
    };
    let Mxfp4Noise { rounding, change } = noise;
    let mut text = format!(
        "\nexperts with an adapter: rounding to mxfp4 changes their weights by {} %, the adapter by {} % (root mean squares, relative to the merged \
         weights)",
        percent(rounding),
        percent(change)
    );
    if noise.is_mostly_lost() {
        text += "\nwarning: most of what the adapter changes in the experts is lost, because it is smaller than the steps of mxfp4. To keep it, use \
                 the adapter next to its base, which is exact, or merge without --mxfp4: bfloat16 has steps of 0.4 % of each weight";
    }
    text
}

/// Prints a share in percent with three digits.
fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    let places = if percent > 0.0 { (2.0 - percent.log10().floor()).clamp(0.0, 9.0) as usize } else { 0 };
    format!("{percent:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_named_by_its_format_in_training() {
        for format in QuantFormat::ALL {
            let base: MergeBase = format.name().parse().unwrap();
            assert_eq!((base, base.to_string()), (MergeBase(Some(format)), format.name().to_owned()));
        }
        assert_eq!("stored".parse(), Ok(MergeBase(None)));
        assert_eq!("dequantized".parse(), Ok(MergeBase(Some(QuantFormat::Nf4 { double_quant: true }))));
        assert!("fp4".parse::<MergeBase>().unwrap_err().contains("stored, dequantized, nf4, nf4_double_quant, nvfp4"));
    }

    #[test]
    fn files_and_folders_do_not_replace_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let refused = |out: &Path, is_file| check_out(out, is_file).map_err(|error| error.to_string());
        assert!(refused(folder.path(), true).unwrap_err().contains("is a folder, and GGUF is one file"));
        assert!(refused(&folder.path().join("no/x.gguf"), true).unwrap_err().contains("there is no folder"));
        assert!(refused(&file, false).unwrap_err().contains("is a file, and a model is a folder"));
        for (out, is_file) in [("x.gguf", true), ("merged", false), ("a/b", false)] {
            assert_eq!(refused(Path::new(out), is_file), Ok(()), "{out}");
        }
        assert!(refused(&file, true).unwrap_err().contains("is there already"));
        assert_eq!(refused(folder.path(), false), Ok(()));
    }

    #[test]
    fn noise_is_printed_next_to_the_change() {
        let printed = |rounding, change| text_of_experts(Some(Mxfp4Noise { rounding, change }));
        let kept = printed(0.1123, 0.5);
        assert!(kept.contains("by 11.2 %, the adapter by 50.0 %") && !kept.contains("lost"), "{kept}");
        let lost = printed(0.001_234, 0.001_25);
        assert!(lost.contains("by 0.123 %, the adapter by 0.125 %") && lost.contains("most of what"), "{lost}");
        assert!(text_of_experts(None).contains("byte for byte"));
        assert_eq!([1.0, 0.0, 0.1].map(percent), ["100", "0", "10.0"]);
    }
}
