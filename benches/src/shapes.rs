//! Every GEMM of a training step, with its sizes and how often it runs. The modules of a layer come from `ModelSpec::groups`.
//!
//! Counted as the backend does it that does least: projections, adapter and head (positions with a target only) as the reference bodies of
//! `firebrick_kernels`, attention as flex does it, in blocks of queries that meet no later key and none outside the window.
//! Trade-off: reference attention, which multiplies the whole square of a document, is held against less than it does.

use std::collections::BTreeMap;

use firebrick_arch::{AttentionSpec, LoraConfig, ModelSpec, ModuleSpec};
use firebrick_data::Batch;
use firebrick_kernels::Recompute;
use serde::Serialize;

/// Queries that meet the same keys, as in flex's attention: the smaller, the closer to the causal half of the square.
const QUERY_BLOCK: usize = 64;

/// What a GEMM belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The linear modules of the layers.
    Projections,
    /// Their LoRA pairs.
    Adapter,
    /// Scores and values of attention.
    Attention,
    /// Logits of the positions with a target.
    Head,
}

impl Part {
    /// All of them, in the order of the report.
    pub const ALL: [Self; 4] = [Self::Projections, Self::Adapter, Self::Attention, Self::Head];
}

/// `batch` matrix products of `[m, k]` with `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Gemm {
    /// Matrix products in one call.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
}

impl Gemm {
    /// A GEMM that is not batched.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { batch: 1, m, n, k }
    }

    /// Operations: a multiplication and an addition for each term.
    pub fn flops(self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// How a step is computed, as far as its GEMMs depend on it.
#[derive(Clone, Debug)]
pub struct StepShape {
    /// The model.
    pub model: ModelSpec,
    /// The adapter; `None`: every weight trains.
    pub lora: Option<LoraConfig>,
    /// What layers save, and so what runs forward twice.
    pub recompute: Recompute,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

/// What a micro-batch adds: where its documents end, and how many of its tokens count in the loss.
#[derive(Clone, Debug)]
pub struct MicroBatchShape {
    /// Tokens of each document; the padding at the end of a sequence is a document too, since the step computes it.
    pub documents: Vec<usize>,
    /// Targets that count in the loss.
    pub loss_tokens: usize,
}

impl MicroBatchShape {
    /// The sizes of a packed batch.
    pub fn of(batch: &Batch) -> Self {
        let documents = batch.cu_seqlens.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
        Self { documents, loss_tokens: batch.loss_tokens() }
    }

    /// Tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }
}

/// GEMMs and how often each runs.
#[derive(Clone, Debug, Default)]
pub struct Products {
    counts: BTreeMap<(Part, Gemm), usize>,
}

impl Products {
    /// Everything that one step multiplies.
    pub fn of_step(step: &StepShape, micro_batches: &[MicroBatchShape]) -> Self {
        let mut products = Self::default();
        for micro_batch in micro_batches {
            for (index, layer) in step.model.layers.iter().enumerate() {
                for group in step.model.groups(index) {
                    for module in &group.modules {
                        let again = step.recompute.repeats(group.kind, &layer.norms.names());
                        products.linear(step, again, module, group.in_features, micro_batch.tokens());
                    }
                }
                for &tokens in &micro_batch.documents {
                    products.attention(step, &layer.attention, tokens);
                }
            }
            products.head(step, micro_batch.loss_tokens);
        }
        products
    }

    /// One linear module: `y = x Wᵀ + (x Aᵀ) Bᵀ` and its backward, over `n` tokens.
    fn linear(&mut self, step: &StepShape, again: bool, module: &ModuleSpec, i: usize, n: usize) {
        let forwards = 1 + usize::from(again);
        let o = module.out_features();
        self.add(Part::Projections, Gemm::new(n, o, i), forwards);
        self.add(Part::Projections, Gemm::new(n, i, o), 1);
        let Some(lora) = &step.lora else {
            self.add(Part::Projections, Gemm::new(o, i, n), 1);
            return;
        };
        if !lora.adapts(&module.path) {
            return;
        }
        let r = lora.rank_of(&module.path);
        self.add(Part::Adapter, Gemm::new(n, r, i), forwards);
        self.add(Part::Adapter, Gemm::new(n, o, r), forwards);
        // In this order: dy B, its GEMM with A into dx, dA, dB.
        for gemm in [Gemm::new(n, r, o), Gemm::new(n, i, r), Gemm::new(r, i, n), Gemm::new(o, r, n)] {
            self.add(Part::Adapter, gemm, 1);
        }
    }

    /// One document of `t` tokens in one layer. Query heads of a group are stacked, so key/value heads are the batch.
    fn attention(&mut self, step: &StepShape, attention: &AttentionSpec, t: usize) {
        let (batch, k) = (attention.kv_heads, attention.head_dim);
        let forwards = 1 + usize::from(step.recompute == Recompute::Full);
        for start in (0..t).step_by(QUERY_BLOCK) {
            let end = t.min(start + QUERY_BLOCK);
            let first_key = attention.window.map_or(0, |window| (start + 1).saturating_sub(window));
            let keys = end - first_key;
            let rows = attention.heads / batch * (end - start);
            let onto_keys = Gemm { batch, m: rows, n: keys, k };
            let onto_heads = Gemm { batch, m: rows, n: k, k: keys };
            let onto_tokens = Gemm { batch, m: keys, n: k, k: rows };
            // Forward: scores and values. Backward: scores again and dp, then dq, then dk and dv.
            self.add(Part::Attention, onto_keys, forwards + 2);
            self.add(Part::Attention, onto_heads, forwards + 1);
            self.add(Part::Attention, onto_tokens, 2);
        }
    }

    /// Logits of the positions with a target, chunk by chunk, and their gradients.
    fn head(&mut self, step: &StepShape, loss_tokens: usize) {
        let (v, d, chunk) = (step.model.vocab_size, step.model.hidden_size, step.loss_chunk_tokens);
        for start in (0..loss_tokens).step_by(chunk) {
            let c = chunk.min(loss_tokens - start);
            self.add(Part::Head, Gemm::new(c, v, d), 1);
            self.add(Part::Head, Gemm::new(c, d, v), 1);
            if step.lora.is_none() {
                self.add(Part::Head, Gemm::new(v, d, c), 1);
            }
        }
    }

    fn add(&mut self, part: Part, gemm: Gemm, count: usize) {
        *self.counts.entry((part, gemm)).or_default() += count;
    }

    /// Each GEMM of each part, once, with how often it runs.
    pub fn iter(&self) -> impl Iterator<Item = (Part, Gemm, usize)> + '_ {
        self.counts.iter().map(|(&(part, gemm), &count)| (part, gemm, count))
    }

    /// Operations of one part.
    pub fn flops_of(&self, wanted: Part) -> f64 {
        self.iter().filter(|&(part, ..)| part == wanted).map(|(_, gemm, count)| count as f64 * gemm.flops()).sum()
    }

    /// Operations of all parts.
    pub fn flops(&self) -> f64 {
        Part::ALL.into_iter().map(|part| self.flops_of(part)).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_arch::shapes::{llama_3_2_1b, mistral_7b, qwen3_8b};
    use firebrick_arch::{ModelConfig, TargetModules};
    use firebrick_kernels::{BaseStorage, GemmFormat, TrainingShape, step_work};
    use firebrick_precision::Format;

    use super::*;

    const DOCUMENT: usize = QUERY_BLOCK;
    const SEQUENCES: usize = 4;

    fn quickstart() -> ModelSpec {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/quickstart/base");
        ModelConfig::read(&folder).expect("the quickstart has a model").spec
    }

    fn lora(r: usize, target_modules: TargetModules) -> LoraConfig {
        LoraConfig { r, lora_alpha: 16.0, target_modules, ..LoraConfig::default() }
    }

    fn step(model: ModelSpec, lora: Option<LoraConfig>, recompute: Recompute) -> StepShape {
        StepShape { model, lora, recompute, loss_chunk_tokens: 100 }
    }

    /// Equal documents, every token with a target: what the formula of `step_work` is about.
    fn equal_documents() -> MicroBatchShape {
        MicroBatchShape { documents: vec![DOCUMENT; 4 * SEQUENCES], loss_tokens: 4 * SEQUENCES * DOCUMENT }
    }

    fn training(step: &StepShape) -> TrainingShape {
        TrainingShape {
            base: if step.lora.is_some() { BaseStorage::Frozen(Format::F32) } else { BaseStorage::Trained },
            lora: step.lora.clone(),
            compute: Format::F32,
            gemms: GemmFormat::Compute,
            kept_bytes: [0; 2],
            optimizer_bytes: 0,
            paged_bytes: 0,
            paging_bytes: 0,
            micro_batch_size: SEQUENCES,
            row_len: 4 * DOCUMENT,
            longest_document: DOCUMENT,
            documents: 4 * SEQUENCES,
            recompute: step.recompute,
            offload: false,
            loss_tokens_per_row: 4 * DOCUMENT,
            loss_chunk_tokens: step.loss_chunk_tokens,
            evaluation: Default::default(),
            divided: Default::default(),
            pairs: None,
        }
    }

    #[test]
    fn enumerated_gemms_have_the_operations_that_the_roofline_formula_counts() {
        let some = TargetModules::from_names(vec!["q_proj".to_owned(), "down_proj".to_owned()]);
        let adapters = [None, Some(lora(16, TargetModules::AllLinear)), Some(lora(8, some))];
        for model in [quickstart(), llama_3_2_1b(), mistral_7b(), qwen3_8b()] {
            for lora in &adapters {
                for recompute in [Recompute::None, Recompute::Selective, Recompute::Projections, Recompute::Full] {
                    let step = step(model.clone(), lora.clone(), recompute);
                    let products = Products::of_step(&step, &[equal_documents(), equal_documents()]);
                    let expected = step_work(&model, &training(&step), 2, DOCUMENT as f64);
                    let attention = products.flops_of(Part::Attention);
                    let is_same = |ours: f64, expected: f64| (ours / expected - 1.0).abs() < 1e-12;
                    assert!(is_same(products.flops() - attention, expected.matmul_flops), "{lora:?} {recompute:?}");
                    // The formula counts the causal half of each square; a document of one block of queries is all square.
                    assert!(is_same(attention, 2.0 * expected.attention_flops), "{lora:?} {recompute:?}");
                }
            }
        }
    }

    #[test]
    fn only_positions_with_a_target_reach_the_head() {
        let step = step(quickstart(), Some(lora(16, TargetModules::AllLinear)), Recompute::None);
        let micro_batch = MicroBatchShape { documents: vec![256; 4], loss_tokens: 130 };
        let products = Products::of_step(&step, &[micro_batch]);
        let head: Vec<_> = products.iter().filter(|&(part, ..)| part == Part::Head).collect();
        assert_eq!(head.len(), 4, "logits and their gradient, in chunks of 100 and 30: {head:?}");
        assert_eq!(products.flops_of(Part::Head), 2.0 * 2.0 * 130.0 * 264.0 * 192.0);
    }

    #[test]
    fn attention_of_long_documents_is_between_the_causal_half_and_the_square() {
        let attention_within = |window: Option<usize>, documents: Vec<usize>| {
            let mut model = quickstart();
            model.layers.iter_mut().for_each(|layer| layer.attention.window = window);
            let micro_batch = MicroBatchShape { documents, loss_tokens: 1 };
            Products::of_step(&step(model, None, Recompute::None), &[micro_batch]).flops_of(Part::Attention)
        };
        let attention = |documents| attention_within(None, documents);
        // Four blocks of queries that meet one to four blocks of keys: 10 of the square's 16.
        assert_eq!(attention(vec![4 * QUERY_BLOCK]), 10.0 * attention(vec![QUERY_BLOCK]));
        assert_eq!(attention(vec![QUERY_BLOCK; 4]), 4.0 * attention(vec![QUERY_BLOCK]));
        assert!(attention(vec![100]) < (100.0f64 / QUERY_BLOCK as f64).powi(2) * attention(vec![QUERY_BLOCK]));
        // With a window of one key each block of queries meets its own keys only.
        assert_eq!(attention_within(Some(1), vec![4 * QUERY_BLOCK]), attention(vec![QUERY_BLOCK; 4]));
    }

    #[test]
    fn documents_of_a_batch_are_the_gaps_between_its_boundaries() {
        let batch = Batch {
            rows: 1,
            row_len: 6,
            input_ids: vec![0; 6],
            targets: vec![1, -100, 1, 1, -100, -100],
            positions: vec![0, 1, 0, 1, 2, 0],
            cu_seqlens: vec![0, 2, 5, 6],
            padding: 1,
            pairs: None,
        };
        let shape = MicroBatchShape::of(&batch);
        assert_eq!((shape.documents.as_slice(), shape.loss_tokens, shape.tokens()), ([2, 3, 1].as_slice(), 3, 6));
    }
}
