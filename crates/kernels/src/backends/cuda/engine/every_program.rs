//! Every program that a run may launch on a card, for the check that all of them compile, which needs no card.
//!
//! Trade-off: of variants that differ in a number, such as a soft cap, those of the supported models are listed, and no others.

use burn_tensor::DType;
use firebrick_arch::Activation;
use firebrick_cuda::Program;

use super::experts::expert_stages;
use super::program::{DeltaPart, DeltaSizes, FlashVariant, SoftCap, Source, WeightValues};
use crate::backends::planning::flash::{FlashTiles, flash_takes_f32};
use crate::backends::planning::passes::{GATED_STAGES, gated_pieces, stages};

/// Head widths, with the soft cap of scores if a model has one: that of Gemma 2.
const ATTENTION: [(usize, Option<f64>); 8] =
    [(32, None), (64, None), (96, None), (128, None), (128, Some(50.0)), (256, None), (256, Some(50.0)), (512, None)];
/// Soft caps of logits: none, and that of Gemma 2.
const LOGITS: [Option<f64>; 2] = [None, Some(30.0)];
/// Widths of filters, and whether gates are around them: LFM2's, LFM3's, and Gated DeltaNet's.
const CONVOLUTIONS: [(usize, bool); 3] = [(3, true), (7, true), (4, false)];
const DELTA_PARTS: [DeltaPart; 4] =
    [DeltaPart::Chunks, DeltaPart::Forward, DeltaPart::Backward, DeltaPart::InputsBackward];
/// The ranks for which adapter passes are compiled.
const RANKS: [usize; 2] = [16, 32];

/// Joins the lists of all sources. No source can be forgotten: the patterns must cover all, and each has a list.
macro_rules! join_all {
    ($($source:pat => $list:expr,)+) => {{
        // Never called: it is compiled only if every source has a row.
        let _ = |source: Source| match source {
            $($source => (),)+
        };
        [$(Vec::from_iter($list)),+].concat()
    }};
}

/// Lists the programs that runs with activations of a format launch on cards of a compute capability, each with a name that says its variant.
pub fn every_program(dtype: DType, capability: (u32, u32)) -> Vec<(String, Program)> {
    let sources = every_source(dtype, capability);
    sources.into_iter().map(|source| (format!("{source:?}"), source.program(dtype))).collect()
}

/// Returns the shared memory of a block, in bytes, on cards of a compute capability, as the CUDA programming guide lists it.
fn block_bytes(capability: (u32, u32)) -> usize {
    match capability {
        (..8, _) => 65_536,
        (8, 0 | 7) => 166_912,
        (8 | 12.., _) => 101_376,
        (9..=11, _) => 232_448,
    }
}

fn every_source(dtype: DType, capability: (u32, u32)) -> Vec<Source> {
    let shared_bytes = block_bytes(capability);
    let is_half = dtype != DType::F32;
    let (has_fp8, has_fp8_rows) = (capability >= (8, 9), capability >= (8, 9) && is_half);
    let heads = || {
        let soft_cap = |cap: Option<f64>| cap.map(SoftCap::new);
        ATTENTION.into_iter().map(move |(head_dim, cap)| FlashVariant { head_dim, soft_cap: soft_cap(cap) })
    };
    let tiled = || {
        let half_heads = heads().filter(move |_| is_half);
        half_heads.filter_map(move |of| Some((of, FlashTiles::of(of.head_dim, shared_bytes)?)))
    };
    let weights = [WeightValues::Nf4, WeightValues::Nvfp4, WeightValues::Mxfp4, WeightValues::Fp8, WeightValues::Dense];
    let gated_low_rank =
        |pieces| Activation::ALL.map(|activation| Source::GatedLowRank { activation, pieces, stages: GATED_STAGES });
    let gated_pieces = gated_pieces(shared_bytes).filter(|_| is_half);
    let low_rank_rows = || {
        let activations = Activation::ALL.into_iter().map(Some).chain([None]);
        activations.filter(|_| is_half).map(Source::LowRankRows)
    };
    let low_rank = |ranks| Some(Source::LowRank { ranks, stages: stages(ranks, shared_bytes)? });
    let stages = expert_stages(shared_bytes);
    // Kernels of the backward at the widths of the published models take more than a block has on some cards.
    let slice = if is_half { if shared_bytes > 150_000 { 64 } else { 32 } } else { 16 };
    let deltas = (is_half || shared_bytes > 150_000) && (capability >= (8, 0));
    let deltas = deltas.then_some(DeltaSizes { key_dim: 128, value_dim: 128, slice });
    let (experts, wide_experts) = (Source::Experts { stages }, Source::WideExperts { stages });
    join_all! {
        Source::CachedAttention(_) => heads().map(Source::CachedAttention),
        Source::Columns => [Source::Columns],
        Source::Conv { .. } => CONVOLUTIONS.map(|(width, gated)| Source::Conv { width, gated }),
        Source::CrossEntropy(_) => LOGITS.map(|cap| Source::CrossEntropy(cap.map(SoftCap::new))),
        Source::Delta(..) => deltas.into_iter().flat_map(|sizes| DELTA_PARTS.map(|part| Source::Delta(part, sizes))),
        Source::Draw => (!is_half).then_some(Source::Draw),
        Source::Elementwise => [Source::Elementwise],
        Source::Embedding => [Source::Embedding],
        Source::Experts { .. } => is_half.then_some(experts),
        Source::FewRows(_) => weights.into_iter().filter(|_| is_half).map(Source::FewRows),
        Source::FlashForward(..) => tiled().map(|(of, tiles)| Source::FlashForward(of, tiles)),
        Source::FlashBackward(..) => tiled().map(|(of, tiles)| Source::FlashBackward(of, tiles)),
        Source::FlashF32(_) => heads().filter(|of| !is_half && flash_takes_f32(of.head_dim)).map(Source::FlashF32),
        Source::Fp8 => has_fp8.then_some(Source::Fp8),
        Source::Gated(_) => Activation::ALL.map(Source::Gated),
        Source::GatedFp8(_) => Activation::ALL.into_iter().filter(|_| has_fp8_rows).map(Source::GatedFp8),
        Source::GatedLowRank { .. } => gated_pieces.into_iter().flat_map(gated_low_rank),
        Source::Heads => [Source::Heads],
        Source::LowRank { .. } => RANKS.into_iter().filter(|_| is_half).filter_map(low_rank),
        Source::LowRankRows(_) => low_rank_rows(),
        Source::Magnitude => [Source::Magnitude],
        Source::Norm => [Source::Norm],
        Source::NormFp8 => has_fp8_rows.then_some(Source::NormFp8),
        // Gradients are f32 or bf16.
        Source::Optimizer => (dtype != DType::F16).then_some(Source::Optimizer),
        Source::PackedIndex => (!is_half).then_some(Source::PackedIndex),
        Source::Pairs => (!is_half).then_some(Source::Pairs),
        Source::Quantize => (!is_half).then_some(Source::Quantize),
        Source::Routing => [Source::Routing],
        Source::Sinks => [Source::Sinks],
        Source::StoreRows => [Source::StoreRows],
        Source::WideAttention => [Source::WideAttention],
        Source::WideExperts { .. } => (is_half && capability == (9, 0)).then_some(wide_experts),
        Source::WriteOut => [Source::WriteOut],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Lists the CUDA sources below a folder, by their paths below `root`.
    fn sources_below(folder: &Path, root: &Path) -> Vec<String> {
        let entries = folder.read_dir().expect("a folder of sources").map(|entry| entry.expect("an entry").path());
        let of_entry = |path: std::path::PathBuf| {
            if path.is_dir() {
                return sources_below(&path, root);
            }
            let is_source = path.extension().is_some_and(|extension| extension == "cu");
            let parts = path.strip_prefix(root).expect("below the root").iter();
            let name = parts.map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/");
            if is_source { vec![name] } else { Vec::new() }
        };
        entries.flat_map(of_entry).collect()
    }

    #[test]
    fn every_cuda_file_is_part_of_a_program() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backends/cuda");
        let mut written: BTreeSet<String> = sources_below(&root, &root).into_iter().collect();
        assert!(written.remove("engine/prelude.cu"), "every program begins with it");
        let sources = [DType::BF16, DType::F32].map(|dtype| every_source(dtype, (9, 0))).concat();
        let files = sources.iter().flat_map(|source| source.files());
        let compiled: BTreeSet<String> = files.map(|(path, _)| (*path).to_owned()).collect();
        assert_eq!(written, compiled);
    }

    #[test]
    fn a_card_has_the_programs_that_it_can_run() {
        let has = |dtype, capability, wanted: fn(&Source) -> bool| every_source(dtype, capability).iter().any(wanted);
        let is_fp8 = |source: &Source| matches!(source, Source::Fp8 | Source::GatedFp8(_) | Source::NormFp8);
        assert!(has(DType::BF16, (8, 9), is_fp8) && !has(DType::BF16, (8, 6), is_fp8));
        let is_pass = |source: &Source| matches!(source, Source::LowRank { .. } | Source::GatedLowRank { .. });
        assert!(has(DType::F16, (8, 6), is_pass) && !has(DType::F16, (7, 5), is_pass));
        let is_widest = |source: &Source| matches!(source, Source::FlashForward(of, _) if of.head_dim == 256);
        assert!(has(DType::F16, (8, 0), is_widest) && !has(DType::F16, (7, 5), is_widest));
        assert!(!has(DType::F32, (9, 0), |source| matches!(source, Source::FlashForward(..) | Source::FewRows(_))));
    }
}
