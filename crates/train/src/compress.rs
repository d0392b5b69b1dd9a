//! `compress` and `decompress`: model folders with smaller weight files, which every command reads directly.
//!
//! Trade-off: other programs read such a folder only after `decompress`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use firebrick_model::{Codec, CompressReport, compress_folder, decompress_folder};
use firebrick_trainer::RunError;

/// The options of `compress`.
#[derive(Args, Clone, Debug)]
pub struct CompressOptions {
    /// Model folder.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Folder to write, which must be new or empty.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// zstd files are smaller; LZ4 files are read faster.
    #[arg(long, value_enum, default_value_t = CodecChoice::Zstd)]
    pub codec: CodecChoice,
}

/// The options of `decompress`.
#[derive(Args, Clone, Debug)]
pub struct DecompressOptions {
    /// Folder that `compress` wrote.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Folder to write, which must be new or empty.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// How weights are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CodecChoice {
    /// Zstandard.
    Zstd,
    /// LZ4.
    Lz4,
}

/// Compresses the weights of a folder; returns a text for the user.
///
/// # Errors
/// Folders that cannot be read or written.
pub fn compress(options: &CompressOptions) -> Result<String, RunError> {
    let codec = match options.codec {
        CodecChoice::Zstd => Codec::Zstd,
        CodecChoice::Lz4 => Codec::Lz4,
    };
    Ok(text(&compress_folder(&options.model, &options.out, codec)?))
}

/// Restores the weights of a folder; returns a text for the user.
///
/// # Errors
/// Folders that cannot be read or written, or a damaged block.
pub fn decompress(options: &DecompressOptions) -> Result<String, RunError> {
    Ok(text(&decompress_folder(&options.model, &options.out)?))
}

fn text(report: &CompressReport) -> String {
    let CompressReport { files, read, written, left_out } = report;
    let share = 100.0 * *written as f64 / (*read).max(1) as f64;
    let mut text = format!("{files} weight files: {read} bytes became {written} ({share:.1} %)");
    if !left_out.is_empty() {
        text += &format!("\nnot copied: {}", left_out.join(", "));
    }
    text
}
