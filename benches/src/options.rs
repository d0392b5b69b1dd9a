//! The options of `bench-matrix`.
//!
//! Trade-off: sizes and time limits cannot be typed, so that two runs are comparable.

use std::path::PathBuf;

use clap::Parser;
use firebrick_kernels::BackendKind;

/// Time the operations of training and whole steps on every backend that is there, each checked against its reference.
#[derive(Clone, Debug, Default, Parser)]
#[command(name = "bench-matrix", version)]
pub(crate) struct MatrixOptions {
    /// The short run: fewer sizes, fewer samples, at most 2 minutes. The whole one takes at most 10.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only these backends, separated by commas; otherwise all of this binary that find a device: cuda, flex, candle, wgpu.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) backends: Vec<BackendKind>,
    /// Only these subjects, separated by commas: gemm, attention, step, generation, norm, rotary, gated, cross_entropy, quantize,
    /// dequantize, optimizer, collective, data.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) subjects: Vec<String>,
    /// Write matrix.json, matrix.md, matrix.html and a roofline per backend as SVG into this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Compare with the matrix.json of an earlier run: changes that exceed the noise of both.
    #[arg(long, value_name = "FILE")]
    pub(crate) compare: Option<PathBuf>,
    /// Run the same work through PyTorch, transformers with PEFT, and Unsloth, where Python has them, and print the ratios.
    #[arg(long)]
    pub(crate) peers: bool,
    /// The Python of --peers.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: PathBuf,
}

/// The subjects that `--subjects` can name.
pub(crate) const SUBJECTS: &str =
    "gemm,attention,step,generation,norm,rotary,gated,cross_entropy,quantize,dequantize,optimizer,collective,data";

impl MatrixOptions {
    /// Refuses an unknown subject, and lists the known ones.
    pub(crate) fn refusal(&self) -> Option<String> {
        let unknown = self.subjects.iter().find(|subject| !SUBJECTS.split(',').any(|known| known == *subject))?;
        Some(format!("there is no subject `{unknown}`: expected some of {SUBJECTS}"))
    }

    /// Returns whether a subject is requested.
    pub(crate) fn includes(&self, subject: &str) -> bool {
        self.subjects.is_empty() || self.subjects.iter().any(|named| named == subject)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_that_does_not_exist_is_answered_with_all_that_do() {
        let options = |subject: &str| MatrixOptions { subjects: vec![subject.to_owned()], ..MatrixOptions::default() };
        let message = options("gem").refusal().unwrap();
        assert!(message.contains("`gem`") && message.contains("cross_entropy"), "{message}");
        assert_eq!(options("gemm").refusal(), None);
        assert!(options("gemm").includes("gemm") && !options("gemm").includes("norm"));
        assert!(MatrixOptions::default().includes("norm"));
    }
}
