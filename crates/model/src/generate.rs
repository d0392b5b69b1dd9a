//! Text generation: prompts are read packed in one pass, then every sequence grows by one token per step over caches of keys and values.
//!
//! All running sequences share each step's projections, so weights are read once per step, not once per sequence. A finished sequence makes room for
//! the next prompt, so [`BatchLimits`] bounds memory whatever the number of prompts. Greedy tokens are chosen on the device; only their ids come to
//! the host.
//! Trade-off: a new prompt is read in a separate pass, while the running sequences wait.

mod cache;

use std::collections::VecDeque;
use std::ops::ControlFlow;

use burn_tensor::{Int, Tensor};
use firebrick_arch::Rope;
use firebrick_kernels::{CachedTokens, Documents, Kernels, NewTokens, RotaryTables};
use rayon::prelude::*;

use self::cache::{Caches, States};
use crate::decoder::{Decoder, rotary_tables};
use crate::error::ModelError;
use crate::linear::AdapterPass;
use crate::mixer::{Attend, Published};
use crate::sampling::Sampler;

/// When to stop and how to choose.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Maximum number of tokens to add to a prompt.
    pub max_new_tokens: usize,
    /// Tokens that end a text; they are not part of the result.
    pub stop_tokens: Vec<u32>,
    /// Chooses the next token. Every prompt gets a copy, so an answer does not depend on the prompts next to it.
    pub sampler: Sampler,
    /// Bounds of the batch.
    pub limits: BatchLimits,
}

/// Bounds on the memory of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Sequences that are generated at the same time; at least one always is.
    pub sequences: usize,
    /// Total tokens of these sequences, counting the longest possible answers. A prompt that needs more is answered alone.
    pub tokens: usize,
}

impl BatchLimits {
    /// All prompts at the same time.
    pub const NONE: Self = Self { sequences: usize::MAX, tokens: usize::MAX };
}

/// A sequence that is being written.
struct Running {
    prompt: usize,
    first_row: usize,
    /// Rows that are its own.
    room: usize,
    past: usize,
    /// Tokens of the next pass.
    new: Vec<u32>,
    /// New tokens so far.
    written: usize,
    sampler: Sampler,
}

/// The state of a call of [`Decoder::generate`].
struct Batch<'a, B: Kernels> {
    model: &'a Decoder<B>,
    options: &'a GenerateOptions,
    caches: Caches<B>,
    running: Vec<Running>,
}

/// The inputs of a pass besides the weights.
struct Pass<B: Kernels> {
    ids_n: Tensor<B, 1, Int>,
    rotary: Vec<RotaryTables<B>>,
    tokens: CachedTokens<B>,
    /// Boundaries of the prompts, if the pass reads whole prompts.
    documents: Option<Documents<B>>,
}

/// A conversation: its tokens and their cached keys and values, so that a longer prompt with the same beginning is read from there on.
pub struct Conversation<B: Kernels> {
    caches: Caches<B>,
    rows: usize,
    tokens: Vec<u32>,
    /// The states after the latest prompts, each with the number of tokens read; of models whose layers have states.
    snapshots: Vec<(usize, States<B>)>,
}

impl<B: Kernels> Conversation<B> {
    /// Snapshots that are kept: each takes as much memory as a sequence's states.
    const SNAPSHOTS: usize = 4;

    /// Forgets the cached tokens, so that the next prompt is read from its start.
    pub fn forget(&mut self) {
        self.tokens.clear();
        self.snapshots.clear();
    }

    /// Goes back to where the next prompt may be read on, at or before its first `common` tokens; returns the number of tokens read there. Keys and
    /// values are kept by token; a state is that after the last one, or one of a snapshot.
    pub(crate) fn go_back(&mut self, common: usize) -> usize {
        self.snapshots.retain(|(read, _)| *read <= common);
        if common == self.tokens.len() || !self.caches.have_states() {
            return common;
        }
        let Some((read, states)) = self.snapshots.last() else { return 0 };
        self.caches.restore(states);
        *read
    }

    /// Keeps the states of `caches` as they are after so many tokens.
    fn keep(&mut self, read: usize, caches: &Caches<B>) {
        if caches.have_states() {
            self.snapshots.retain(|(other, _)| *other != read);
            self.snapshots.push((read, caches.states()));
            let surplus = self.snapshots.len().saturating_sub(Self::SNAPSHOTS);
            self.snapshots.drain(..surplus);
        }
    }
}

impl<B: Kernels> Decoder<B> {
    /// Selects longrope's factors for a sequence of this many tokens, from now on; other ropes have no choice. Returns whether they changed: then a
    /// conversation has to be read again.
    pub fn choose_rope_factors(&mut self, sequence_tokens: usize) -> bool {
        let spec = &self.config.spec;
        let changes = |rope: &Rope| {
            let [old, new] =
                [self.sequence_tokens, sequence_tokens].map(|tokens| rope.scaling.long_rope_factors(tokens));
            old != new
        };
        if !spec.ropes.iter().any(changes) {
            return false;
        }
        self.rotary = rotary_tables(spec, self.max_positions, sequence_tokens, &self.device);
        self.sequence_tokens = sequence_tokens;
        true
    }

    /// Continues each prompt; the results are in the order of the prompts and contain new tokens only.
    ///
    /// # Errors
    /// An empty prompt, one that leaves no room within the positions the model was built for, a token outside the vocabulary, or logits
    /// that are not finite.
    pub fn generate(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Vec<Vec<u32>>, ModelError> {
        let mut written = vec![Vec::new(); prompts.len()];
        self.generate_each(prompts, options, &mut |prompt, token| {
            written[prompt].push(token);
            ControlFlow::Continue(())
        })?;
        Ok(written)
    }

    /// Generates as [`Decoder::generate`] does, and calls `on_token` for every new token in the order in which they are chosen, with the index of the
    /// prompt and the token. A break ends all texts.
    pub fn generate_each(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<(), ModelError> {
        prompts.iter().try_for_each(|prompt| self.check_prompt(prompt, options.max_new_tokens))?;
        if options.max_new_tokens == 0 || prompts.is_empty() {
            return Ok(());
        }
        let room = |prompt: &Vec<u32>| prompt.len() + options.max_new_tokens;
        let longest = prompts.iter().map(room).max().unwrap_or(0);
        let rows = prompts.iter().map(room).sum::<usize>().min(options.limits.tokens).max(longest);
        let caches = Caches::new(&self.config.spec, rows, self.compute_dtype, &self.device);
        let mut batch = Batch { model: self, options, caches, running: Vec::new() };
        let mut waiting: VecDeque<(usize, &Vec<u32>)> = prompts.iter().enumerate().collect();
        loop {
            let fresh = batch.admit(&mut waiting);
            if batch.running.is_empty() {
                return Ok(());
            }
            if batch.pass(fresh, on_token)?.is_break() {
                return Ok(());
            }
        }
    }

    /// Creates an empty conversation of at most `rows` tokens.
    pub fn conversation(&self, rows: usize) -> Conversation<B> {
        let caches = Caches::new(&self.config.spec, rows, self.compute_dtype, &self.device);
        Conversation { caches, rows, tokens: Vec::new(), snapshots: Vec::new() }
    }

    /// Continues a prompt, reading only the part that the conversation does not begin with; the new tokens become part of it.
    ///
    /// # Errors
    /// Those of [`Decoder::generate`], or a prompt that leaves no room in the conversation.
    pub fn converse(
        &self,
        conversation: &mut Conversation<B>,
        prompt: &[u32],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(), ModelError> {
        self.check_prompt(prompt, options.max_new_tokens)?;
        let room = conversation.rows.saturating_sub(options.max_new_tokens);
        if prompt.len() > room {
            return Err(ModelError::PromptLength { got: prompt.len(), room });
        }
        // The last token is read again in any case: its logits determine the next one.
        let common = prompt.iter().zip(&conversation.tokens).take_while(|(left, right)| left == right).count();
        let past = conversation.go_back(common.min(prompt.len() - 1));
        conversation.tokens.truncate(past);
        let running = Running {
            prompt: 0,
            first_row: 0,
            room: conversation.rows,
            past,
            new: prompt[past..].to_vec(),
            written: 0,
            sampler: options.sampler.clone().after(prompt),
        };
        let caches = std::mem::take(&mut conversation.caches);
        let mut batch = Batch { model: self, options, caches, running: vec![running] };
        let mut written = Vec::new();
        let mut on_token = |_, token| {
            written.push(token);
            on_token(token)
        };
        let first = batch.pass(0, &mut on_token);
        conversation.keep(prompt.len(), &batch.caches);
        let result = first.and_then(|flow| if flow.is_break() { Ok(()) } else { batch.finish(&mut on_token) });
        conversation.caches = batch.caches;
        // The last chosen token was not read.
        conversation.tokens.extend(&prompt[past..]);
        conversation.tokens.extend(&written[..written.len().saturating_sub(1)]);
        result
    }

    fn check_prompt(&self, tokens: &[u32], max_new_tokens: usize) -> Result<(), ModelError> {
        let room = self.max_positions().saturating_sub(max_new_tokens);
        if tokens.is_empty() || tokens.len() > room {
            return Err(ModelError::PromptLength { got: tokens.len(), room });
        }
        self.check_ids(tokens.iter().map(|&id| u64::from(id)))
    }
}

impl<B: Kernels> Batch<'_, B> {
    /// Starts as many of the waiting prompts as fit, in their order; returns their number.
    fn admit(&mut self, waiting: &mut VecDeque<(usize, &Vec<u32>)>) -> usize {
        let before = self.running.len();
        while let Some(&(prompt, tokens)) = waiting.front() {
            let room = tokens.len() + self.options.max_new_tokens;
            if self.running.len() >= self.options.limits.sequences.max(1) {
                break;
            }
            let Some(first_row) = self.caches.take(room) else { break };
            waiting.pop_front();
            let sampler = self.options.sampler.clone().after(tokens);
            self.running.push(Running { prompt, first_row, room, past: 0, new: tokens.clone(), written: 0, sampler });
        }
        self.running.len() - before
    }

    /// Passes until all sequences have ended.
    fn finish(&mut self, on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>) -> Result<(), ModelError> {
        while !self.running.is_empty() {
            if self.pass(0, on_token)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Runs one pass over the prompts of the last `fresh` sequences, or over the new tokens of all. Chooses a token for each of them.
    fn pass(
        &mut self,
        fresh: usize,
        on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, ModelError> {
        let first = if fresh > 0 { self.running.len() - fresh } else { 0 };
        let chosen = self.choose(first, fresh > 0)?;
        let mut flow = ControlFlow::Continue(());
        for (sequence, &token) in self.running[first..].iter_mut().zip(&chosen) {
            sequence.past += sequence.new.len();
            sequence.new = vec![token];
            let is_end = self.options.stop_tokens.contains(&token);
            if !is_end {
                sequence.written += 1;
                if on_token(sequence.prompt, token).is_break() {
                    flow = ControlFlow::Break(());
                }
            }
            if is_end || sequence.written == self.options.max_new_tokens {
                sequence.new.clear();
            }
        }
        for ended in self.running.extract_if(.., |sequence| sequence.new.is_empty()) {
            self.caches.give_back(ended.first_row..ended.first_row + ended.room);
        }
        Ok(flow)
    }

    /// Chooses the next token of each sequence from `first` on.
    fn choose(&mut self, first: usize, are_prompts: bool) -> Result<Vec<u32>, ModelError> {
        let model = self.model;
        let is_greedy = self.running[first..].iter().all(|sequence| sequence.sampler.is_greedy());
        let pass = self.prepare(first, are_prompts);
        let best = |x_nd| B::most_probable(model.rounded_logits(model.norm.forward(x_nd)));
        let ends: Vec<u32> = pass.tokens.in_pass().map(|(_, range)| range.end as u32 - 1).collect();
        let last = if pass.tokens.count() > ends.len() {
            let x_nd = B::section(&model.device, || self.layers(&pass));
            x_nd.select(0, model.indices(&ends))
        } else if is_greedy {
            let ids = B::section(&model.device, || best(self.layers(&pass)));
            return self.tokens_of(first, ids);
        } else {
            B::section(&model.device, || self.layers(&pass))
        };
        if is_greedy {
            let ids = B::section(&model.device, || best(last));
            return self.tokens_of(first, ids);
        }
        let logits = model.head_logits(model.norm.forward(last)).into_data();
        let values = logits.to_vec::<f32>().expect("logits are cast to f32");
        let rows = values.chunks(model.config.spec.vocab_size);
        let samplers = self.running[first..].iter_mut().map(|sequence| &mut sequence.sampler);
        let rows: Vec<_> = samplers.zip(rows).collect();
        let chosen: Vec<_> = rows.into_par_iter().map(|(sampler, logits)| sampler.sample(logits)).collect();
        chosen.into_iter().collect()
    }

    /// Copies to the host what the device chose for each sequence from `first` on.
    fn tokens_of(&self, first: usize, ids: Tensor<B, 1, Int>) -> Result<Vec<u32>, ModelError> {
        let ids = ids.into_data();
        let token = |(id, sequence): (i64, &Running)| {
            u32::try_from(id).map_err(|_| ModelError::LogitsNotFinite { prompt: sequence.prompt })
        };
        ids.iter::<i64>().zip(&self.running[first..]).map(token).collect()
    }

    /// Uploads the inputs of a pass over the new tokens of the sequences from `first` on.
    fn prepare(&self, first: usize, are_prompts: bool) -> Pass<B> {
        let (model, running) = (self.model, &self.running[first..]);
        let ids: Vec<u32> = running.iter().flat_map(|sequence| &sequence.new).copied().collect();
        let positions = |sequence: &Running| sequence.past as u32..(sequence.past + sequence.new.len()) as u32;
        let positions: Vec<u32> = running.iter().flat_map(positions).collect();
        let new = |sequence: &Running| NewTokens {
            first_row: sequence.first_row,
            past: sequence.past,
            count: sequence.new.len(),
        };
        let tokens = CachedTokens::new(running.iter().map(new).collect(), &model.device);
        let documents = are_prompts.then(|| {
            let ends = tokens.in_pass().map(|(_, range)| range.end as u32);
            Documents::new(&[0].into_iter().chain(ends).collect::<Vec<_>>(), &model.device)
        });
        Pass { ids_n: model.indices(&ids), rotary: model.rotary_at(&positions), tokens, documents }
    }

    /// Computes the hidden states before the final norm, `[n, d]`, and adds the new tokens to the caches. Runs inside a section.
    fn layers(&mut self, pass: &Pass<B>) -> Tensor<B, 2> {
        let model = self.model;
        let mut published = Published::default();
        model.each_layer(model.embed(pass.ids_n.clone()), |index, layer, x_nd| {
            let cache = &mut self.caches.layers[layer.spec.mixer.cache_of(index)];
            let attend = Attend::Cached { tokens: &pass.tokens, cache, prompts: pass.documents.as_ref() };
            layer.forward(x_nd, &pass.rotary, attend, &mut published, AdapterPass::PLAIN)
        })
    }
}
