//! Text generation: prompts are read packed in one pass, then every sequence grows by one token per step over caches of keys and values.
//!
//! All running sequences share each step's projections, so weights are read once per step, not once per sequence. A finished sequence makes room for
//! the next prompt, so [`BatchLimits`] bounds memory whatever the number of prompts. Greedy tokens are chosen on the device; only their ids come to
//! the host. Where the host can read without waiting for what was queued since, a step gets the tokens of the one before on the device, and is
//! submitted before they are read.
//! Trade-off: such a step has a row for each sequence that turns out to have ended before it. A new prompt is read in a separate pass, while the
//! running sequences wait.

mod cache;

use std::collections::VecDeque;
use std::ops::ControlFlow;

use burn_tensor::{DType, Int, Tensor};
use firebrick_arch::Rope;
use firebrick_kernels::{CachedTokens, Documents, Keep, Kernels, NewTokens, PAGE_ROWS, Readback, RotaryTables};
use rayon::prelude::*;

use self::cache::{Caches, States};
use crate::decoder::{Decoder, rotary_tables};
use crate::error::ModelError;
use crate::layer_inputs::TokenInputs;
use crate::linear::AdapterPass;
use crate::mixer::Attend;
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

/// A text that a model has written.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// New tokens, with the one that ended the text.
    pub tokens: Vec<u32>,
    /// Logarithm of each token's probability when it was chosen, at the sampler's temperature.
    pub log_probs: Vec<f32>,
    /// Whether the limit of new tokens cut it.
    pub is_truncated: bool,
    /// For each token a number per router, which names the experts that the pass which chose it went through; empty unless the model notes them
    /// ([`Decoder::note_choices`]).
    pub experts: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Chosen<'a> {
    token: u32,
    /// 0 where it was not drawn by its probability.
    log_prob: f32,
    is_end: bool,
    /// As in [`Completion::experts`].
    experts: &'a [u32],
}

/// Receives the tokens of all sequences, each with the index of its prompt, in the order in which they are chosen.
type OnToken<'a> = dyn FnMut(usize, Chosen<'_>) -> ControlFlow<()> + 'a;

struct Running {
    prompt: usize,
    pages: Vec<u32>,
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
    /// Number of the random stream of the first prompt, if each has its own.
    first_stream: Option<u64>,
    /// The prompt that was read last, with the pages that it fills: sequences that begin with it share them.
    shared: Option<(Vec<u32>, Vec<u32>)>,
    /// The experts of the tokens of the last pass that chose a token, one after the other.
    experts: Vec<u32>,
    /// Whether steps may be submitted before the tokens of the step before are read.
    runs_ahead: bool,
    ahead: Option<Step<B>>,
}

/// A pass that was submitted, and whose tokens were not read.
struct Step<B: Kernels> {
    /// Its rows that belong to sequences which still run, in their order; of a step, the first ones.
    rows: Vec<usize>,
    ids_n: Tensor<B, 1, Int>,
    /// Ids, then the logarithms of their probabilities unless the most probable tokens were chosen.
    values: Readback,
}

#[derive(Clone, Copy)]
struct Started {
    count: usize,
    /// Whether they have to be read from their first token on.
    are_whole: bool,
}

/// The inputs of a pass besides the weights.
struct Pass<B: Kernels> {
    ids_n: Tensor<B, 1, Int>,
    layer_inputs: Option<TokenInputs<B>>,
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

impl<B: Kernels> Pass<B> {
    /// Returns the last row of each sequence; `None` if it is the only one of each.
    fn last_rows(&self) -> Option<Vec<u32>> {
        let ends: Vec<u32> = self.tokens.in_pass().map(|(_, range)| range.end as u32 - 1).collect();
        (ends.len() < self.tokens.count()).then_some(ends)
    }
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
        let mut written = |prompt, chosen: Chosen<'_>| {
            if chosen.is_end { ControlFlow::Continue(()) } else { on_token(prompt, chosen.token) }
        };
        self.write_each(prompts, options, None, &mut written)
    }

    /// Continues each prompt as [`Decoder::generate`] does, with a random stream of its own, numbered from `first_stream`; so a completion depends on
    /// its prompt, the seed and its number alone. The results are in the order of the prompts.
    pub fn complete(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        first_stream: u64,
    ) -> Result<Vec<Completion>, ModelError> {
        let empty = Completion { tokens: Vec::new(), log_probs: Vec::new(), is_truncated: true, experts: Vec::new() };
        let mut completions = vec![empty; prompts.len()];
        self.write_each(
            prompts,
            options,
            Some(first_stream),
            &mut |prompt: usize, Chosen { token, log_prob, is_end, experts }| {
                let completion = &mut completions[prompt];
                completion.tokens.push(token);
                completion.log_probs.push(log_prob);
                completion.experts.extend(experts);
                completion.is_truncated = !is_end;
                ControlFlow::Continue(())
            },
        )?;
        Ok(completions)
    }

    fn write_each(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        first_stream: Option<u64>,
        on_token: &mut OnToken<'_>,
    ) -> Result<(), ModelError> {
        prompts.iter().try_for_each(|prompt| self.check_prompt(prompt, options.max_new_tokens))?;
        if options.max_new_tokens == 0 || prompts.is_empty() {
            return Ok(());
        }
        let room = |prompt: &Vec<u32>| prompt.len() + options.max_new_tokens;
        let longest = prompts.iter().map(room).max().unwrap_or(0);
        let pages = |tokens: usize| tokens.div_ceil(PAGE_ROWS);
        // Pages that a prompt shares with the one before it (see `Batch::admit`) are there once.
        let has_states = self.config.spec.layers.iter().any(|layer| layer.mixer.cache().per_sequence > 0);
        let own = |(index, prompt): (usize, &Vec<u32>)| {
            let shares = !has_states && index > 0 && prompts[index - 1] == *prompt;
            pages(room(prompt)) - if shares { (prompt.len() - 1) / PAGE_ROWS } else { 0 }
        };
        let all: usize = prompts.iter().enumerate().map(own).sum();
        let count = all.min(pages(options.limits.tokens)).max(pages(longest));
        let caches = Caches::new(&self.config.spec, count, self.compute_dtype, &self.device);
        let on_device = self.choices.is_none() && self.config.spec.per_layer_inputs.is_none();
        let runs_ahead = on_device && (B::READS_LATER || cfg!(test));
        let mut batch = Batch { first_stream, runs_ahead, ..Batch::new(self, options, caches) };
        let mut waiting: VecDeque<(usize, &Vec<u32>)> = prompts.iter().enumerate().collect();
        B::unchanged(&self.device, || {
            loop {
                let started = batch.admit(&mut waiting);
                if batch.running.is_empty() || batch.pass(started, on_token)?.is_break() {
                    return Ok(());
                }
            }
        })
    }

    /// Creates an empty conversation of at most `rows` tokens.
    pub fn conversation(&self, rows: usize) -> Conversation<B> {
        let caches = Caches::new(&self.config.spec, rows.div_ceil(PAGE_ROWS), self.compute_dtype, &self.device);
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
            pages: conversation.caches.take_all(),
            past,
            new: prompt[past..].to_vec(),
            written: 0,
            sampler: options.sampler.clone().after(prompt),
        };
        let caches = std::mem::take(&mut conversation.caches);
        let mut batch = Batch { running: vec![running], ..Batch::new(self, options, caches) };
        let mut written = Vec::new();
        let mut on_token = |_, Chosen { token, is_end, .. }: Chosen<'_>| {
            if is_end {
                return ControlFlow::Continue(());
            }
            written.push(token);
            on_token(token)
        };
        let result: Result<(), ModelError> = B::unchanged(&self.device, || {
            let first = batch.pass(Started::NONE, &mut on_token);
            conversation.keep(prompt.len(), &batch.caches);
            let mut flow = first?;
            while flow.is_continue() && !batch.running.is_empty() {
                flow = batch.pass(Started::NONE, &mut on_token)?;
            }
            Ok(())
        });
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

impl Started {
    const NONE: Self = Self { count: 0, are_whole: false };
}

impl<'a, B: Kernels> Batch<'a, B> {
    fn new(model: &'a Decoder<B>, options: &'a GenerateOptions, caches: Caches<B>) -> Self {
        let (running, experts, first_stream, shared) = (Vec::new(), Vec::new(), None, None);
        Self { model, options, caches, running, first_stream, shared, experts, runs_ahead: false, ahead: None }
    }

    /// Starts as many of the waiting prompts as fit, in their order: either whole ones, or such as begin with pages that are read already.
    fn admit(&mut self, waiting: &mut VecDeque<(usize, &Vec<u32>)>) -> Started {
        let mut started = Started::NONE;
        while let Some(&(prompt, tokens)) = waiting.front() {
            let pages = self.shared.as_ref().filter(|(shared, _)| shared == tokens).map(|(_, pages)| pages.clone());
            let is_whole = pages.is_none();
            let is_other = started.count > 0 && started.are_whole != is_whole;
            if self.running.len() >= self.options.limits.sequences.max(1) || is_other {
                break;
            }
            if is_whole {
                // Only adjacent prompts share, so the pages of the one before may be taken.
                self.share(None);
            }
            let shared = pages.unwrap_or_default();
            let Some(pages) = self.caches.take(tokens.len() + self.options.max_new_tokens, &shared) else { break };
            waiting.pop_front();
            if is_whole {
                let next = waiting.front().is_some_and(|(_, next)| *next == tokens) && self.shares(tokens);
                self.share(next.then(|| (tokens.clone(), pages[..(tokens.len() - 1) / PAGE_ROWS].to_vec())));
            }
            let past = shared.len() * PAGE_ROWS;
            let sampler = self.options.sampler.clone().after(tokens);
            let sampler = match self.first_stream {
                Some(first) => sampler.in_stream(first + prompt as u64),
                None => sampler,
            };
            self.running.push(Running { prompt, pages, past, new: tokens[past..].to_vec(), written: 0, sampler });
            started = Started { count: started.count + 1, are_whole: is_whole };
            // What the next ones share is read first.
            if is_whole && self.shared.is_some() {
                break;
            }
        }
        started
    }

    /// Returns whether sequences with this prompt share pages: it fills one, and no layer has a state, which is that after the last token alone.
    fn shares(&self, prompt: &[u32]) -> bool {
        prompt.len() > PAGE_ROWS && !self.caches.have_states()
    }

    /// Keeps pages for the sequences that follow, in the place of those that were kept before.
    fn share(&mut self, shared: Option<(Vec<u32>, Vec<u32>)>) {
        if let Some((_, pages)) = self.shared.take() {
            self.caches.give_back(&pages);
        }
        if let Some((_, pages)) = &shared {
            self.caches.hold(pages);
        }
        self.shared = shared;
    }

    /// Runs one pass over the prompts of the last `fresh` sequences, or over the new tokens of all. Chooses a token for each of them.
    fn pass(&mut self, fresh: Started, on_token: &mut OnToken<'_>) -> Result<ControlFlow<()>, ModelError> {
        let first = if fresh.count > 0 { self.running.len() - fresh.count } else { 0 };
        let step = match self.ahead.take_if(|_| fresh.count == 0) {
            None => self.submit(first, fresh.are_whole, None)?,
            ahead => ahead,
        };
        let chosen = match step {
            Some(step) => self.finish(step, first)?,
            None => self.choose_on_host(first, fresh.are_whole)?,
        };
        let mut flow = ControlFlow::Continue(());
        let routers = self.experts.len() / chosen.len().max(1);
        for (index, (sequence, &(token, log_prob))) in self.running[first..].iter_mut().zip(&chosen).enumerate() {
            let experts = &self.experts[index * routers..][..routers];
            sequence.past += sequence.new.len();
            sequence.new = vec![token];
            let is_end = self.options.stop_tokens.contains(&token);
            sequence.written += usize::from(!is_end);
            if on_token(sequence.prompt, Chosen { token, log_prob, is_end, experts }).is_break() {
                flow = ControlFlow::Break(());
            }
            if is_end || sequence.written == self.options.max_new_tokens {
                sequence.new.clear();
            }
        }
        if let Some(step) = &mut self.ahead {
            let mut sequences = self.running.iter();
            step.rows.retain(|_| sequences.next().is_some_and(|sequence| !sequence.new.is_empty()));
        }
        self.ahead.take_if(|step| step.rows.is_empty());
        for ended in self.running.extract_if(.., |sequence| sequence.new.is_empty()) {
            self.caches.give_back(&ended.pages);
        }
        Ok(flow)
    }

    /// Submits a pass over the new tokens of the sequences from `first` on, or over those `chosen` for them on the device after these. `None` if their
    /// tokens are chosen on the host.
    fn submit(
        &mut self,
        first: usize,
        are_prompts: bool,
        chosen: Option<Tensor<B, 1, Int>>,
    ) -> Result<Option<Step<B>>, ModelError> {
        let (model, spec) = (self.model, &self.model.config.spec);
        let running = &mut self.running[first..];
        let is_greedy = running.iter().all(|sequence| sequence.sampler.is_greedy());
        // All sequences have the sampler of the options, each in a state of its own.
        let draw = running.first().and_then(|first| first.sampler.draw(model.logit_scale(), spec.logit_soft_cap));
        if draw.is_none() && !is_greedy {
            return Ok(None);
        }
        let draw = draw.map(|draw| {
            let random: Vec<f32> = running.iter_mut().map(|sequence| sequence.sampler.next_random()).collect();
            (draw, Tensor::<B, 1>::from_data(random.as_slice(), (&model.device, DType::F32)))
        });
        let choose = |last: Tensor<B, 2>| match draw {
            Some((draw, random)) => {
                let drawn = B::draw(model.norm.forward(last), &model.head(), random, draw);
                (drawn.ids_n, Some(drawn.log_probs_n))
            }
            None => (B::most_probable(model.rounded_logits(model.norm.forward(last))), None),
        };
        let pass = self.prepare(first, are_prompts, chosen)?;
        let (ids_n, log_probs) = match pass.last_rows() {
            None => B::section(&model.device, || choose(self.layers(&pass))),
            Some(ends) => {
                let hidden = B::section(&model.device, || self.layers(&pass));
                let last = hidden.select(0, model.indices(&ends));
                B::section(&model.device, || choose(last))
            }
        };
        self.note_experts(&pass);
        // Ids are below 2^24, up to which f32 represents integers.
        let values = [ids_n.clone().float()].into_iter().chain(log_probs).collect();
        Ok(Some(Step { rows: (0..self.running.len() - first).collect(), ids_n, values: B::read_later(values) }))
    }

    /// Returns the tokens of a pass over the sequences from `first` on. If all sequences are in it and none reaches its limit, the next step is
    /// submitted first.
    fn finish(&mut self, step: Step<B>, first: usize) -> Result<Vec<(u32, f32)>, ModelError> {
        let count = step.ids_n.dims()[0];
        let goes_on = |sequence: &Running| sequence.written + 1 < self.options.max_new_tokens;
        let is_whole = step.rows.len() == count && count == self.running.len();
        if self.runs_ahead && is_whole && self.running.iter().all(goes_on) {
            self.ahead = self.submit(0, false, Some(step.ids_n))?;
        }
        let values = step.values.wait();
        let token = |(row, sequence): (usize, &Running)| {
            let id = u32::try_from(values[row] as i64);
            let id = id.map_err(|_| ModelError::LogitsNotFinite { prompt: sequence.prompt })?;
            Ok((id, values.get(count + row).copied().unwrap_or(0.0)))
        };
        step.rows.into_iter().zip(&self.running[first..]).map(token).collect()
    }

    /// Chooses the next token of each sequence from `first` on by its logits, where the choice depends on earlier tokens.
    fn choose_on_host(&mut self, first: usize, are_prompts: bool) -> Result<Vec<(u32, f32)>, ModelError> {
        let model = self.model;
        let pass = self.prepare(first, are_prompts, None)?;
        let hidden = B::section(&model.device, || self.layers(&pass));
        let last = match pass.last_rows() {
            None => hidden,
            Some(ends) => hidden.select(0, model.indices(&ends)),
        };
        self.note_experts(&pass);
        let logits = model.head_logits(model.norm.forward(last)).into_data();
        let values = logits.to_vec::<f32>().expect("logits are cast to f32");
        let rows = values.chunks(model.config.spec.vocab_size);
        let samplers = self.running[first..].iter_mut().map(|sequence| &mut sequence.sampler);
        let rows: Vec<_> = samplers.zip(rows).collect();
        let choose = |(sampler, logits): (&mut Sampler, &[f32])| sampler.sample(logits).map(|token| (token, 0.0));
        let chosen: Vec<_> = rows.into_par_iter().map(choose).collect();
        chosen.into_iter().collect()
    }

    fn note_experts(&mut self, pass: &Pass<B>) {
        if let Some(choices) = &self.model.choices {
            let ends: Vec<usize> = pass.tokens.in_pass().map(|(_, range)| range.end - 1).collect();
            self.experts = choices.take(pass.tokens.count(), &ends);
        }
    }

    /// Uploads the inputs of a pass over the new tokens of the sequences from `first` on, or over those `chosen` for them on the device after these.
    fn prepare(
        &self,
        first: usize,
        are_prompts: bool,
        chosen: Option<Tensor<B, 1, Int>>,
    ) -> Result<Pass<B>, ModelError> {
        let (model, running) = (self.model, &self.running[first..]);
        let ids: Vec<u32> = running.iter().flat_map(|sequence| &sequence.new).copied().collect();
        let place = |sequence: &Running| match chosen {
            Some(_) => (sequence.past + sequence.new.len(), 1),
            None => (sequence.past, sequence.new.len()),
        };
        let positions = |(past, count): (usize, usize)| past as u32..(past + count) as u32;
        let positions: Vec<u32> = running.iter().map(place).flat_map(positions).collect();
        let new = |sequence: &Running| {
            let (past, count) = place(sequence);
            NewTokens { pages: sequence.pages.clone(), past, count }
        };
        let tokens = CachedTokens::new(running.iter().map(new).collect(), &model.device);
        let documents = are_prompts.then(|| {
            let ends = tokens.in_pass().map(|(_, range)| range.end as u32);
            Documents::new(&[0].into_iter().chain(ends).collect::<Vec<_>>(), &model.device)
        });
        Ok(Pass {
            ids_n: chosen.unwrap_or_else(|| model.indices(&ids)),
            layer_inputs: model.token_inputs(&ids)?,
            rotary: model.rotary_at(&positions),
            tokens,
            documents,
        })
    }

    /// Computes the hidden states before the final norm, `[n, d]`, and adds the new tokens to the caches. Runs inside a section.
    fn layers(&mut self, pass: &Pass<B>) -> Tensor<B, 2> {
        let model = self.model;
        let x_nd = model.embed(pass.ids_n.clone());
        let (mut published, _) = model.published(&x_nd, pass.layer_inputs.as_ref(), Keep::Nothing);
        model.each_layer(x_nd, |index, layer, x_nd| {
            let cache = &mut self.caches.layers[layer.spec.mixer.cache_of(index)];
            let attend = Attend::Cached { tokens: &pass.tokens, cache, prompts: pass.documents.as_ref() };
            layer.forward(x_nd, &pass.rotary, attend, &mut published, AdapterPass::PLAIN)
        })
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::BaseStorage;
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::sampling::Sampling;
    use crate::test_config::{build_options, tiny};

    #[test]
    fn completions_that_share_a_prompt_equal_those_of_it_alone() {
        let options = build_options(BaseStorage::Trained, 512);
        let model = Decoder::<Flex>::random(tiny(&[]).unwrap(), &options, None, &Default::default()).unwrap();
        let prompt =
            |length: usize, step: usize| -> Vec<u32> { (0..length).map(|token| (token * step % 11) as u32).collect() };
        // Longer than two pages, exactly a page and one more token, and shorter than a page.
        let kinds = [prompt(150, 3), prompt(65, 5), prompt(9, 7)];
        let prompts: Vec<Vec<u32>> = kinds.iter().flat_map(|prompt| std::iter::repeat_n(prompt.clone(), 3)).collect();
        let sampler = Sampler::new(Sampling { temperature: 1.0, ..Sampling::GREEDY }, 5).unwrap();
        let few = BatchLimits { sequences: 4, tokens: 700 };
        // Pages for the longest prompt alone.
        let fewest = BatchLimits { sequences: 4, tokens: 1 };
        for limits in [BatchLimits::NONE, few, fewest] {
            let options =
                GenerateOptions { max_new_tokens: 70, stop_tokens: vec![2], sampler: sampler.clone(), limits };
            let together = model.complete(&prompts, &options, 40).unwrap();
            for (index, completion) in together.iter().enumerate() {
                let alone = model.complete(&prompts[index..=index], &options, 40 + index as u64).unwrap();
                assert_eq!(completion.tokens, alone[0].tokens, "completion {index}");
                // The end is there if it was chosen, and nothing is added at the limit.
                assert_eq!(completion.is_truncated, completion.tokens.last() != Some(&2));
                assert_eq!(completion.log_probs.len(), completion.tokens.len());
                let count = completion.tokens.len();
                assert!(count == 70 || count < 70 && !completion.is_truncated, "completion {index}");
                let differ = |(one, other): (&f32, &f32)| (one - other).abs() > 1e-4;
                assert!(!completion.log_probs.iter().zip(&alone[0].log_probs).any(differ), "completion {index}");
            }
        }
    }
}
