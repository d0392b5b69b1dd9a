//! One block's forward and backward in two ways: as the step does it (the hand-written backward over flex's own ops), and
//! recorded by Burn's autodiff from the decomposed ops.
//!
//! Both compute in f32 on flex, over a dense frozen base (so that neither decodes 4 bits) with the recipe's adapter, and must
//! agree on the gradient of the input before a time is reported. Gives up: memory, which is where the hand-written backward
//! was made to win; only time is measured here.

use burn_autodiff::Autodiff;
use burn_tensor::{DType, Distribution, Tensor};
use firebrick_kernels::backend::Flex;
use firebrick_kernels::{Documents, GradientMap, RotaryTables, Weight, oracle};
use firebrick_model::block::{Block, Context, Norm};
use firebrick_model::linear::Linear;
use firebrick_model::{BaseStorage, BuildOptions, Llama, Recompute, rope};
use firebrick_train::{RunError, assemble};

use crate::spread::{Spread, timed};
use crate::step::{WARM_UP, Workload};

type Recorded = Autodiff<Flex>;

/// Largest difference of the two gradients that counts as rounding, relative to the largest gradient.
const TOLERANCE: f32 = 1e-3;

/// Seconds of one block, forward and backward.
pub struct BlockTimes {
    /// Through `Block::forward` and `Block::backward`.
    pub hand_written: Spread,
    /// Through a graph recorded by burn-autodiff.
    pub autodiff: Spread,
}

/// Times both ways, `repetitions` times each, one after the other in turn.
///
/// # Errors
/// A LoRA target that the model does not have.
///
/// # Panics
/// If the two gradients of the input disagree: one of the backwards is wrong.
pub fn time_block(workload: &Workload, repetitions: usize) -> Result<BlockTimes, RunError> {
    let case = Case::new(workload)?;
    let (mut hand_written, mut autodiff) = (Vec::new(), Vec::new());
    for index in 0..WARM_UP + repetitions {
        let (by_hand_s, by_hand) = timed(|| case.hand_written());
        let (recorded_s, recorded) = timed(|| case.recorded());
        if index == 0 {
            assert_close(by_hand, recorded);
        }
        if index >= WARM_UP {
            hand_written.push(by_hand_s);
            autodiff.push(recorded_s);
        }
    }
    Ok(BlockTimes { hand_written: Spread::of(hand_written), autodiff: Spread::of(autodiff) })
}

/// The first block of the model on the first micro-batch, with a random input and a random gradient of its output.
struct Case {
    block: Block<Flex>,
    context: Context<Flex>,
    recorded_context: (Documents<Recorded>, RotaryTables<Recorded>),
    x_nd: Tensor<Flex, 2>,
    dy_nd: Tensor<Flex, 2>,
}

impl Case {
    fn new(workload: &Workload) -> Result<Self, RunError> {
        let (device, batch) = (Default::default(), &workload.micro_batches[0]);
        let mut config = workload.prepared.model.clone();
        config.num_hidden_layers = 1;
        let build = BuildOptions {
            storage: BaseStorage::Frozen,
            lora: assemble::adapter(&workload.prepared.config)?,
            seed: workload.prepared.config.seed,
            compute_dtype: DType::F32,
            max_positions: batch.row_len,
        };
        let model = Llama::<Flex>::random(config, &build, &device)?;

        let (frequencies, scaling) = rope::inverse_frequencies(&model.config);
        let (cos, sin) = rope::tables(&batch.positions, &frequencies, scaling);
        let shape = [batch.positions.len(), frequencies.len()];
        let table = |values: Vec<f32>| Tensor::<Flex, 1>::from_floats(values.as_slice(), &device).reshape(shape);
        let rotary = RotaryTables { cos: table(cos), sin: table(sin) };
        let recorded_rotary =
            RotaryTables { cos: Tensor::from_inner(rotary.cos.clone()), sin: Tensor::from_inner(rotary.sin.clone()) };

        let width = [batch.positions.len(), model.config.hidden_size];
        let random = || Tensor::random(width, Distribution::Normal(0.0, 1.0), &device);
        Ok(Self {
            block: model.blocks()[0].clone(),
            recorded_context: (Documents::new(&batch.cu_seqlens, &device), recorded_rotary),
            context: Context { documents: Documents::new(&batch.cu_seqlens, &device), rotary },
            x_nd: random(),
            dy_nd: random(),
        })
    }

    /// Gradient of the input; those of the adapter are made and dropped.
    fn hand_written(&self) -> Tensor<Flex, 2> {
        let mut gradients = GradientMap::default();
        let (_, kept) = self.block.forward(self.x_nd.clone(), &self.context, Recompute::None);
        self.block.backward(kept, &self.context, self.dy_nd.clone(), &mut gradients)
    }

    /// The same by autodiff.
    fn recorded(&self) -> Tensor<Flex, 2> {
        let x_nd = Tensor::from_inner(self.x_nd.clone()).require_grad();
        let y_nd = self.recorded_forward(x_nd.clone());
        let gradients = y_nd.mul(Tensor::from_inner(self.dy_nd.clone())).sum().backward();
        x_nd.grad(&gradients).expect("the input requires a gradient")
    }

    /// `Block::forward` in ops that autodiff can record.
    fn recorded_forward(&self, x_nd: Tensor<Recorded, 2>) -> Tensor<Recorded, 2> {
        let (block, (documents, rotary)) = (&self.block, &self.recorded_context);
        let heads = |x: Tensor<Recorded, 2>| {
            let [tokens, width] = x.dims();
            x.reshape([tokens, width / block.head_dim, block.head_dim])
        };
        let input_nd = norm(&block.input_layernorm, x_nd.clone());
        let q_nhk = oracle::rotary::forward(heads(linear(&block.q_proj, input_nd.clone())), rotary);
        let k_ngk = oracle::rotary::forward(heads(linear(&block.k_proj, input_nd.clone())), rotary);
        let v_ngk = heads(linear(&block.v_proj, input_nd));
        let o_nhk = oracle::attention::forward(q_nhk, k_ngk, v_ngk, documents).o_nhk;
        let [tokens, head_count, width] = o_nhk.dims();
        let h_nd = linear(&block.o_proj, o_nhk.reshape([tokens, head_count * width])).add(x_nd);

        let input_nd = norm(&block.post_attention_layernorm, h_nd.clone());
        let (gate_nf, up_nf) = (linear(&block.gate_proj, input_nd.clone()), linear(&block.up_proj, input_nd));
        linear(&block.down_proj, oracle::swiglu::forward(gate_nf, up_nf)).add(h_nd)
    }
}

fn norm(norm: &Norm<Flex>, x_nd: Tensor<Recorded, 2>) -> Tensor<Recorded, 2> {
    oracle::norm::forward(x_nd, Tensor::from_inner(norm.weight.value.clone()), norm.epsilon)
}

/// `x Wᵀ + s (x Aᵀ) Bᵀ` with W frozen, A and B recorded.
fn linear(linear: &Linear<Flex>, x_ni: Tensor<Recorded, 2>) -> Tensor<Recorded, 2> {
    let Weight::Dense(weight_oi) = linear.base.weight() else { unreachable!("the case is built with a dense base") };
    let y_no = x_ni.clone().matmul(Tensor::from_inner(weight_oi).transpose());
    let Some(lora) = &linear.lora else { return y_no };
    let a_ri = Tensor::<Recorded, 2>::from_inner(lora.a.matrix()).require_grad();
    let b_or = Tensor::<Recorded, 2>::from_inner(lora.b.matrix()).require_grad();
    y_no.add(x_ni.matmul(a_ri.transpose()).matmul(b_or.mul_scalar(lora.scale).transpose()))
}

fn assert_close(by_hand: Tensor<Flex, 2>, recorded: Tensor<Flex, 2>) {
    let largest = recorded.clone().abs().max().into_scalar();
    let difference = by_hand.sub(recorded).abs().max().into_scalar();
    assert!(
        difference <= TOLERANCE * largest,
        "the backwards of one block differ by {difference}, the largest gradient is {largest}"
    );
}
