//! Every matrix product of a training step, with its sizes and how often it runs.
//!
//! Counted as the backend does it that does least: projections, adapter and head (trained positions only) as the portable
//! bodies of `firebrick_kernels`, attention as flex's own, in blocks of queries that meet no key behind their last one. Gives
//! up: the portable attention, which multiplies the whole square of a document, and so is held against less than it does.

use std::collections::BTreeMap;

use firebrick_data::Batch;
use firebrick_hwprofile::memory::{LinearLayer, LoraShape, ModelShape, Recompute};
use serde::Serialize;

/// Queries that meet the same keys, as in flex's attention: the smaller, the closer to the causal half of the square.
const QUERY_BLOCK: usize = 64;

/// What a product belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The seven linear layers of the blocks.
    Projections,
    /// LoRA's A and B beside them.
    Adapter,
    /// Scores and values of attention.
    Attention,
    /// Logits of the trained positions.
    Head,
}

impl Part {
    /// All of them, in the order of the report.
    pub const ALL: [Self; 4] = [Self::Projections, Self::Adapter, Self::Attention, Self::Head];
}

/// `batch` products of `[m, k]` with `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Gemm {
    /// Products in one call.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
}

impl Gemm {
    /// One product.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { batch: 1, m, n, k }
    }

    /// Operations: a multiplication and an addition for each term.
    pub fn flops(self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// How a step is computed, as far as its products depend on it.
#[derive(Clone, Debug)]
pub struct StepShape {
    /// Sizes of the model.
    pub model: ModelShape,
    /// The adapter; `None`: every weight trains.
    pub lora: Option<LoraShape>,
    /// Whether blocks run forward twice.
    pub recompute: Recompute,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

/// What a micro-batch adds: where its documents end, and how many of its tokens train.
#[derive(Clone, Debug)]
pub struct MicroBatchShape {
    /// Tokens of each document; padding at a row's end is a document too, since the step computes it.
    pub documents: Vec<usize>,
    /// Tokens that count in the loss.
    pub trained: usize,
}

impl MicroBatchShape {
    /// The sizes of a packed batch.
    pub fn of(batch: &Batch) -> Self {
        let documents = batch.cu_seqlens.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
        Self { documents, trained: batch.trained_tokens() }
    }

    /// Tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }
}

/// Products and how often each runs.
#[derive(Clone, Debug, Default)]
pub struct Products {
    counts: BTreeMap<(Part, Gemm), usize>,
}

impl Products {
    /// Everything that one step multiplies.
    pub fn of_step(step: &StepShape, micro_batches: &[MicroBatchShape]) -> Self {
        let mut products = Self::default();
        for micro_batch in micro_batches {
            for layer in LinearLayer::ALL {
                products.linear(step, layer, micro_batch.tokens());
            }
            for &tokens in &micro_batch.documents {
                products.attention(step, tokens);
            }
            products.head(step, micro_batch.trained);
        }
        products
    }

    /// One linear layer in all blocks: `y = x Wᵀ + (x Aᵀ) Bᵀ` and its backward, over `n` tokens.
    fn linear(&mut self, step: &StepShape, layer: LinearLayer, n: usize) {
        let (blocks, forwards) = (step.model.num_hidden_layers, step.forwards_of(layer));
        let [o, i] = step.model.linear_shape(layer);
        self.add(Part::Projections, Gemm::new(n, o, i), blocks * forwards);
        self.add(Part::Projections, Gemm::new(n, i, o), blocks);
        let Some(lora) = &step.lora else {
            self.add(Part::Projections, Gemm::new(o, i, n), blocks);
            return;
        };
        if !lora.targets.contains(&layer) {
            return;
        }
        let r = lora.r;
        self.add(Part::Adapter, Gemm::new(n, r, i), blocks * forwards);
        self.add(Part::Adapter, Gemm::new(n, o, r), blocks * forwards);
        // In this order: dy B, its product with A into dx, dA, dB.
        for gemm in [Gemm::new(n, r, o), Gemm::new(n, i, r), Gemm::new(r, i, n), Gemm::new(o, r, n)] {
            self.add(Part::Adapter, gemm, blocks);
        }
    }

    /// One document of `t` tokens in all blocks. Query heads of a group are stacked, so groups are the batch.
    fn attention(&mut self, step: &StepShape, t: usize) {
        let model = &step.model;
        let (batch, k) = (model.num_key_value_heads, model.head_dim);
        let (blocks, forwards) = (model.num_hidden_layers, step.forwards());
        for start in (0..t).step_by(QUERY_BLOCK) {
            let seen = t.min(start + QUERY_BLOCK);
            let rows = model.num_attention_heads / batch * (seen - start);
            let onto_keys = Gemm { batch, m: rows, n: seen, k };
            let onto_heads = Gemm { batch, m: rows, n: k, k: seen };
            let onto_tokens = Gemm { batch, m: seen, n: k, k: rows };
            // Forward: scores and values. Backward: scores again and dp, then dq, then dk and dv.
            self.add(Part::Attention, onto_keys, blocks * (forwards + 2));
            self.add(Part::Attention, onto_heads, blocks * (forwards + 1));
            self.add(Part::Attention, onto_tokens, blocks * 2);
        }
    }

    /// Logits of the trained positions, chunk by chunk, and their gradients.
    fn head(&mut self, step: &StepShape, trained: usize) {
        let (v, d, chunk) = (step.model.vocab_size, step.model.hidden_size, step.loss_chunk_tokens);
        for start in (0..trained).step_by(chunk) {
            let c = chunk.min(trained - start);
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

    /// Each product of each part, once, with how often it runs.
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

impl StepShape {
    /// How often attention runs forward.
    fn forwards(&self) -> usize {
        match self.recompute {
            Recompute::Full => 2,
            Recompute::Selective | Recompute::None => 1,
        }
    }

    /// How often a linear layer runs forward: a recomputed block stops before its last one.
    fn forwards_of(&self, layer: LinearLayer) -> usize {
        if layer == LinearLayer::DownProj { 1 } else { self.forwards() }
    }
}

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::memory::{BaseStorage, TrainingShape};
    use firebrick_hwprofile::roofline::step_work;

    use super::*;

    const DOCUMENT: usize = QUERY_BLOCK;
    const ROWS: usize = 4;

    fn quickstart() -> ModelShape {
        ModelShape {
            vocab_size: 264,
            hidden_size: 192,
            intermediate_size: 512,
            num_hidden_layers: 4,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            head_dim: 32,
            tie_word_embeddings: true,
        }
    }

    fn step(lora: Option<LoraShape>, recompute: Recompute) -> StepShape {
        StepShape { model: quickstart(), lora, recompute, loss_chunk_tokens: 100 }
    }

    /// Rows of equal documents, every token trained: what hwprofile's formula is about.
    fn equal_documents() -> MicroBatchShape {
        MicroBatchShape { documents: vec![DOCUMENT; 4 * ROWS], trained: 4 * ROWS * DOCUMENT }
    }

    fn training(step: &StepShape) -> TrainingShape {
        TrainingShape {
            base: BaseStorage::F32,
            lora: step.lora.clone(),
            optimizer_bytes_per_parameter: 8.0,
            micro_batch_size: ROWS,
            row_len: 4 * DOCUMENT,
            recompute: step.recompute,
            activation_bytes: 4,
            trainable_bytes: 4,
            loss_chunk_tokens: step.loss_chunk_tokens,
            offload: false,
            fused: false,
            score_tokens: DOCUMENT,
        }
    }

    #[test]
    fn enumerated_products_have_the_operations_that_the_roofline_formula_counts() {
        let some_layers = LoraShape::named(8, &["q_proj", "down_proj"]).expect("both exist");
        for lora in [None, Some(LoraShape::all_linear(16)), Some(some_layers)] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let step = step(lora.clone(), recompute);
                let products = Products::of_step(&step, &[equal_documents(), equal_documents()]);
                let expected = step_work(&step.model, &training(&step), 2, DOCUMENT as f64);
                let attention = products.flops_of(Part::Attention);
                assert_eq!(products.flops() - attention, expected.matmul_flops, "{lora:?} {recompute:?}");
                // The formula counts the causal half of each square; a document of one block of queries is all square.
                assert_eq!(attention, 2.0 * expected.attention_flops, "{lora:?} {recompute:?}");
            }
        }
    }

    #[test]
    fn only_trained_positions_reach_the_head() {
        let step = step(Some(LoraShape::all_linear(16)), Recompute::None);
        let micro_batch = MicroBatchShape { documents: vec![256; 4], trained: 130 };
        let products = Products::of_step(&step, &[micro_batch]);
        let head: Vec<_> = products.iter().filter(|&(part, ..)| part == Part::Head).collect();
        assert_eq!(head.len(), 4, "logits and their gradient, in chunks of 100 and 30: {head:?}");
        assert_eq!(products.flops_of(Part::Head), 2.0 * 2.0 * 130.0 * 264.0 * 192.0);
    }

    #[test]
    fn attention_of_long_documents_is_between_the_causal_half_and_the_square() {
        let step = step(None, Recompute::None);
        let attention = |documents: Vec<usize>| {
            let trained = 1;
            Products::of_step(&step, &[MicroBatchShape { documents, trained }]).flops_of(Part::Attention)
        };
        // Four blocks of queries that meet one to four blocks of keys: 10 of the square's 16.
        assert_eq!(attention(vec![4 * QUERY_BLOCK]), 10.0 * attention(vec![QUERY_BLOCK]));
        assert_eq!(attention(vec![QUERY_BLOCK; 4]), 4.0 * attention(vec![QUERY_BLOCK]));
        assert!(attention(vec![100]) < (100.0f64 / QUERY_BLOCK as f64).powi(2) * attention(vec![QUERY_BLOCK]));
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
        };
        let shape = MicroBatchShape::of(&batch);
        assert_eq!((shape.documents.as_slice(), shape.trained, shape.tokens()), ([2, 3, 1].as_slice(), 3, 6));
    }
}
