//! Loads a model from a Hugging Face folder and continues a text.
//!
//! Usage: `generate [<prompt> [<model folder>]]`; without arguments, a prompt for the quickstart model, which spells invented
//! words backwards and knows their vowels.
//! Trade-off: this program computes in f32 on the CPU. Another backend is another type in place of `Flex`.
#![expect(clippy::print_stdout, reason = "the text is the output of this program")]

use std::error::Error;
use std::path::Path;

use burn_tensor::DType;
use firebrick_data::Tokenizer;
use firebrick_kernels::GemmFormat;
use firebrick_kernels::backends::Flex;
use firebrick_model::{
    BaseStorage, BatchLimits, BuildOptions, Decoder, GenerateOptions, HfFolder, Sampler, read_config,
};
use firebrick_precision::{FloatType, Format};

const QUICKSTART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/quickstart/base");

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let prompt = arguments.first().map_or("rovis backwards is", String::as_str);
    let folder = Path::new(arguments.get(1).map_or(QUICKSTART, String::as_str));

    let options = BuildOptions {
        storage: BaseStorage::Frozen(Format::Float(FloatType::F32)),
        lora: None,
        seed: 0,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: 512,
        sequence_tokens: 512,
    };
    let (config, weights) = (read_config(folder)?, HfFolder::open(folder)?);
    let model = Decoder::<Flex>::load(&weights, config, &options, &Default::default(), &mut |_| ())?;

    let tokenizer = Tokenizer::from_folder(folder)?;
    let prompt_tokens = tokenizer.encode(prompt, true)?;
    let options = GenerateOptions {
        max_new_tokens: 32,
        stop_tokens: model.config.eos_token_ids.clone(),
        sampler: Sampler::greedy(),
        limits: BatchLimits::NONE,
    };
    // Several prompts may be continued at once; here is one.
    let written = model.generate(&[prompt_tokens], &options)?;
    println!("{prompt}{}", tokenizer.decode(&written[0], true)?);
    Ok(())
}
