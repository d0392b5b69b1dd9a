//! Writing text: prompts are read packed in one pass, then every sequence grows by one token per step over its own KV cache.
//!
//! All running sequences share each step's projections, so a 4-bit base is dequantized once per step, not once per sequence. Finished
//! sequences leave the batch.
//! Trade-off: caches are not paged, which suits evaluation and samples, not serving.

use burn_tensor::Tensor;
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::{Keep, Kernels};

use crate::cache::LayerCache;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::layer::Attend;
use crate::linear::AdapterPass;
use crate::sampling::Sampler;

/// When to stop and how to choose.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Maximum number of tokens to add to a prompt.
    pub max_new_tokens: usize,
    /// Tokens that end a text; they are not part of the result.
    pub stop_tokens: Vec<u32>,
    /// How the next token is chosen. Every prompt gets a copy, so an answer does not depend on the prompts next to it.
    pub sampler: Sampler,
}

/// A sequence that is still being written.
struct Running<B: Kernels> {
    prompt: usize,
    length: usize,
    next: u32,
    sampler: Sampler,
    caches: Vec<LayerCache<B>>,
}

impl<B: Kernels> Decoder<B> {
    /// Continues each prompt; the results are in the order of the prompts and hold new tokens only.
    ///
    /// # Errors
    /// An empty prompt, one that leaves no room within the positions the model was built for, or logits that are not finite.
    pub fn generate(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Vec<Vec<u32>>, ModelError> {
        self.check_prompts(prompts, options)?;
        let mut written = vec![Vec::new(); prompts.len()];
        let mut running: Vec<Running<B>> = prompts
            .iter()
            .enumerate()
            .map(|(prompt, tokens)| Running {
                prompt,
                length: tokens.len(),
                next: 0,
                sampler: options.sampler.clone(),
                caches: self.empty_caches(),
            })
            .collect();
        let mut tokens: Vec<Vec<u32>> = prompts.to_vec();
        for _ in 0..options.max_new_tokens {
            if running.is_empty() {
                break;
            }
            let logits = self.advance(&tokens, &mut running);
            for (sequence, row) in running.iter_mut().zip(logits) {
                sequence.next = sequence.sampler.sample(&row)?;
            }
            running.retain(|sequence| !options.stop_tokens.contains(&sequence.next));
            for sequence in &mut running {
                written[sequence.prompt].push(sequence.next);
                sequence.length += 1;
            }
            tokens = running.iter().map(|sequence| vec![sequence.next]).collect();
        }
        Ok(written)
    }

    fn check_prompts(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<(), ModelError> {
        for tokens in prompts {
            let room = self.max_positions().saturating_sub(options.max_new_tokens);
            if tokens.is_empty() || tokens.len() > room {
                return Err(ModelError::PromptLength { got: tokens.len(), room });
            }
        }
        Ok(())
    }

    /// Logits `[v]` of the last of each sequence's new tokens; the caches take the tokens in.
    fn advance(&self, tokens: &[Vec<u32>], running: &mut [Running<B>]) -> Vec<Vec<f32>> {
        let lengths: Vec<usize> = tokens.iter().map(Vec::len).collect();
        let positions: Vec<u32> = running
            .iter()
            .zip(&lengths)
            .flat_map(|(sequence, &new)| (sequence.length - new) as u32..sequence.length as u32)
            .collect();
        let rotary = self.rotary_at(&positions);
        let mut x_nd = self.embed(self.indices(&tokens.concat()));
        let mut blocks = self.blocks();
        let mut schedule = Schedule::new(&mut blocks, 0..self.layers().len(), 1);
        while let Some((index, layer)) = schedule.next_item() {
            let mut caches: Vec<_> =
                running.iter_mut().map(|sequence| std::mem::take(&mut sequence.caches[index])).collect();
            let attend = Attend::Cached { tokens: &lengths, caches: &mut caches };
            x_nd = layer.forward(x_nd, &rotary, attend, Keep::Nothing, AdapterPass::PLAIN).0;
            for (sequence, cache) in running.iter_mut().zip(caches) {
                sequence.caches[index] = cache;
            }
        }
        let ends = lengths.iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end - 1)
        });
        let last: Tensor<B, 2> = x_nd.select(0, self.indices(&ends.collect::<Vec<_>>()));
        let logits = self.head_logits(self.norm.forward(last)).into_data();
        let values = logits.to_vec::<f32>().expect("logits are cast to f32");
        values.chunks(self.config.spec.vocab_size).map(<[f32]>::to_vec).collect()
    }

    fn empty_caches(&self) -> Vec<LayerCache<B>> {
        self.layers().iter().map(|_| LayerCache::default()).collect()
    }
}
