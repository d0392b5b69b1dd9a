//! The Llama decoder, and the journey of a gradient through it.
//!
//! [`Llama::loss_and_gradients`] is the whole of it: blocks forward, loss, blocks backward. Peak memory is what the recompute
//! policy keeps of each block, plus one block. Parameters carry Hugging Face's names.

use burn_tensor::{DType, Int, Tensor};
use firebrick_kernels::{
    CrossEntropyOptions, Documents, GradientMap, Kernels, Offloaded, Parameter, Projection, RotaryTables,
    TrainedPositions, Weight,
};

use crate::block::{Activations, Block, Context, Norm, Recompute};
use crate::config::LlamaConfig;
use crate::linear::Base;

/// How [`Llama::loss_and_gradients`] goes about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassOptions {
    /// What the forward pass keeps of each block.
    pub recompute: Recompute,
    /// Under [`Recompute::Full`]: whether block inputs wait for the backward in host memory, where the backend can copy them
    /// there and back beside its work.
    pub offload: bool,
    /// One over the trained tokens of the whole step, so that micro-batches add up to the mean.
    pub gradient_scale: f64,
    /// Rows of logits that exist at a time.
    pub chunk_tokens: usize,
}

/// One micro-batch on the device.
#[derive(Clone, Debug)]
pub struct MicroBatch<B: Kernels> {
    ids_n: Tensor<B, 1, Int>,
    context: Context<B>,
    trained: TrainedPositions<B>,
}

/// A decoder of the Llama family.
#[derive(Clone, Debug)]
pub struct Llama<B: Kernels> {
    /// The model's own description.
    pub config: LlamaConfig,
    pub(crate) embed_tokens: Base<B>,
    pub(crate) blocks: Vec<Block<B>>,
    pub(crate) norm: Norm<B>,
    /// Absent where the head is tied to the embedding.
    pub(crate) lm_head: Option<Base<B>>,
    pub(crate) rotary: RotaryTables<B>,
    pub(crate) compute_dtype: DType,
    pub(crate) device: B::Device,
}

/// What is kept of one block.
enum Kept<B: Kernels> {
    Input(Offloaded<B>),
    Activations(Box<Activations<B>>),
}

impl<B: Kernels> Llama<B> {
    /// Uploads a micro-batch: token ids, targets (negative: not trained), positions inside documents, and document
    /// boundaries, all over the flattened rows.
    ///
    /// # Panics
    /// If lengths disagree, or a position lies outside the rotary table: the packer made them.
    pub fn upload(&self, input_ids: &[u32], targets: &[i64], positions: &[u32], cu_seqlens: &[u32]) -> MicroBatch<B> {
        assert!(
            input_ids.len() == targets.len() && input_ids.len() == positions.len(),
            "a micro-batch of {} ids has {} targets and {} positions",
            input_ids.len(),
            targets.len(),
            positions.len()
        );
        let trained: Vec<(i32, i32)> =
            (0..).zip(targets).filter(|&(_, &t)| t >= 0).map(|(i, &t)| (i, t as i32)).collect();
        let (rows, wanted): (Vec<i32>, Vec<i32>) = trained.into_iter().unzip();
        let documents = Documents::new(cu_seqlens, &self.device);
        assert_eq!(documents.tokens(), input_ids.len(), "cu_seqlens must end at the number of tokens");
        MicroBatch {
            ids_n: self.indices(input_ids),
            context: Context { documents, rotary: self.rotary_at(positions) },
            trained: TrainedPositions {
                count: rows.len(),
                positions_m: Tensor::from_ints(rows.as_slice(), &self.device),
                targets_m: Tensor::from_ints(wanted.as_slice(), &self.device),
            },
        }
    }

    /// Sum of the cross entropies of the micro-batch's trained tokens, `[1]`; gradients of that sum times the gradient scale
    /// are added to `gradients`.
    pub fn loss_and_gradients(
        &self,
        batch: &MicroBatch<B>,
        options: PassOptions,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 1> {
        B::section(&self.device, || {
            let (x_nd, kept) = self.forward_blocks(batch, options);
            let (loss_sum, dx_nd) = self.loss_backward(x_nd, batch, options, gradients);
            let dx_nd = self.backward_blocks(kept, batch, dx_nd, gradients);
            if let Some(table) = self.embed_tokens.trained() {
                gradients.add(table, B::embed_backward(batch.ids_n.clone(), dx_nd, self.config.vocab_size));
            }
            loss_sum
        })
    }

    /// The last block's output, and what each block's backward needs.
    fn forward_blocks(&self, batch: &MicroBatch<B>, options: PassOptions) -> (Tensor<B, 2>, Vec<Kept<B>>) {
        let mut x_nd = self.embed(batch.ids_n.clone());
        let mut kept = Vec::with_capacity(self.blocks.len());
        for (layer, block) in self.blocks.iter().enumerate() {
            let (y_nd, activations) = block.forward(x_nd, &batch.context, options.recompute);
            // The last block's backward comes next: its input would only go there and back.
            let offload = options.offload && layer + 1 < self.blocks.len();
            kept.push(match options.recompute {
                Recompute::Full if offload => Kept::Input(B::offload(activations.x_nd)),
                Recompute::Full => Kept::Input(Offloaded::on_device(activations.x_nd)),
                Recompute::Selective | Recompute::None => Kept::Activations(Box::new(activations)),
            });
            x_nd = y_nd;
        }
        (x_nd, kept)
    }

    /// Final norm, head and loss, and their backward: the sum of the losses, and the gradient of the last block's output.
    fn loss_backward(
        &self,
        x_nd: Tensor<B, 2>,
        batch: &MicroBatch<B>,
        options: PassOptions,
        gradients: &mut GradientMap<B>,
    ) -> (Tensor<B, 1>, Tensor<B, 2>) {
        let options = CrossEntropyOptions {
            chunk_tokens: options.chunk_tokens,
            gradient_scale: Some(options.gradient_scale),
            weight_gradient: self.head_parameter().is_some(),
        };
        let loss = B::linear_cross_entropy(self.norm.forward(x_nd.clone()), &self.head(), &batch.trained, options);
        if let (Some(head), Some(d_weight)) = (self.head_parameter(), loss.d_weight_vd) {
            gradients.add(head, d_weight);
        }
        let d_hidden = loss.d_hidden_nd.expect("a gradient scale was given, so the loss returns a gradient");
        (loss.loss_sum, self.norm.backward(x_nd, d_hidden, None, gradients))
    }

    /// From the gradient of the last block's output to that of the first one's input.
    fn backward_blocks(
        &self,
        mut kept: Vec<Kept<B>>,
        batch: &MicroBatch<B>,
        mut dx_nd: Tensor<B, 2>,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 2> {
        for block in self.blocks.iter().rev() {
            let own = kept.pop().expect("each block kept something");
            let activations = match own {
                Kept::Input(input) => {
                    let x_nd = B::restore(input, &self.device);
                    if let Some(Kept::Input(next)) = kept.last_mut() {
                        B::prefetch(next, &self.device);
                    }
                    block.recompute(x_nd, &batch.context)
                }
                Kept::Activations(activations) => *activations,
            };
            dx_nd = block.backward(activations, &batch.context, dx_nd, gradients);
        }
        dx_nd
    }

    /// Sum of the cross entropies of the trained tokens, `[1]`, without gradients.
    pub fn loss(&self, batch: &MicroBatch<B>, chunk_tokens: usize) -> Tensor<B, 1> {
        let options = CrossEntropyOptions { chunk_tokens, gradient_scale: None, weight_gradient: false };
        B::section(&self.device, || {
            B::linear_cross_entropy(self.hidden(batch), &self.head(), &batch.trained, options).loss_sum
        })
    }

    /// Logits of every token, `[n, v]` f32: for verification of small inputs, not for training.
    pub fn logits(&self, batch: &MicroBatch<B>) -> Tensor<B, 2> {
        self.project(self.hidden(batch))
    }

    /// Normed hidden states `[n, d]`.
    fn hidden(&self, batch: &MicroBatch<B>) -> Tensor<B, 2> {
        let embedded = self.embed(batch.ids_n.clone());
        let last =
            self.blocks.iter().fold(embedded, |x_nd, block| block.forward(x_nd, &batch.context, Recompute::Full).0);
        self.norm.forward(last)
    }

    pub(crate) fn embed(&self, ids_n: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        let Weight::Dense(table_vd) = self.embed_tokens.weight() else {
            unreachable!("the embedding is never quantised")
        };
        B::embed(table_vd, ids_n, self.compute_dtype)
    }

    pub(crate) fn project(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let head = Projection { weight: self.head(), lora: None, weight_gradient: false };
        let logits = B::project(hidden_nd, &[head]).pop().expect("one projection has one output");
        if logits.dtype() == DType::F32 { logits } else { logits.cast(DType::F32) }
    }

    fn head(&self) -> Weight<B> {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens).weight()
    }

    fn head_parameter(&self) -> Option<&Parameter<B>> {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens).trained()
    }

    pub(crate) fn indices(&self, ids: &[u32]) -> Tensor<B, 1, Int> {
        let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        Tensor::from_ints(ids.as_slice(), &self.device)
    }

    /// Rotary rows of the given positions.
    pub(crate) fn rotary_at(&self, positions: &[u32]) -> RotaryTables<B> {
        let rows = self.max_positions();
        let highest = positions.iter().copied().max().unwrap_or(0) as usize;
        assert!(highest < rows, "position {highest} lies outside the rotary table of {rows} rows");
        let index = self.indices(positions);
        RotaryTables {
            cos: self.rotary.cos.clone().select(0, index.clone()),
            sin: self.rotary.sin.clone().select(0, index),
        }
    }

    /// Number of positions the rotary table was built for.
    pub fn max_positions(&self) -> usize {
        self.rotary.cos.dims()[0]
    }

    /// Where the model lives.
    pub fn device(&self) -> &B::Device {
        &self.device
    }

    /// The decoder layers.
    pub fn blocks(&self) -> &[Block<B>] {
        &self.blocks
    }

    /// Every parameter that trains, in the order of the forward pass.
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        let mut parameters: Vec<_> = self.embed_tokens.trained_mut().into_iter().collect();
        parameters.extend(self.blocks.iter_mut().flat_map(Block::parameters_mut));
        if self.norm.trained {
            parameters.push(&mut self.norm.weight);
        }
        parameters.extend(self.lm_head.as_mut().and_then(Base::trained_mut));
        parameters
    }
}
