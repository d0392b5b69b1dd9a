//! Forward and backward of a model of one layer in two ways: as the step does it (the hand-written backward over flex's own
//! operations), and recorded by Burn's autodiff from the reference bodies.
//!
//! Both compute in f32 on flex, over a dense frozen base (so that neither dequantizes) with the recipe's adapter, and must agree on a
//! gradient before a time is reported.
//! Trade-off: memory, which the hand-written backward exists for, is not measured; only time is.

use burn_autodiff::Autodiff;
use burn_tensor::{DType, Distribution, Tensor};
use firebrick_arch::{EMBEDDING, rope};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{
    Documents, GemmFormat, GradientMap, GradientSink, MemoryOps, NormWeight, Qkv, RotaryTables, Weight, attention,
    linear, norm,
};
use firebrick_model::layer::{Layer, Mlp};
use firebrick_model::linear::Linear;
use firebrick_model::norm::Norm;
use firebrick_model::{BaseStorage, BuildOptions, Decoder, MicroBatch, ModelConfig, PassOptions, Recompute};
use firebrick_precision::Format;
use firebrick_train::bench::{Spread, timed};
use firebrick_trainer::RunError;

use crate::step::{WARM_UP, Workload};

type Recorded = Autodiff<Flex>;

/// Largest difference of the two gradients that counts as rounding, relative to the largest gradient.
const TOLERANCE: f32 = 1e-3;

/// Seconds of one layer, forward and backward.
pub struct BlockTimes {
    /// Through `Decoder::forward` and `Decoder::backward`.
    pub hand_written: Spread,
    /// Through a graph recorded by burn-autodiff.
    pub autodiff: Spread,
}

/// Times both ways, `repetitions` times each, in turn.
///
/// # Errors
/// A LoRA target that the model does not have.
///
/// # Panics
/// If the two gradients disagree: one of the backwards is wrong.
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

/// A model of one layer on the first micro-batch, with a random gradient of its output.
struct Case {
    model: Decoder<Flex>,
    batch: MicroBatch<Flex>,
    /// What the layer reads.
    embedded_nd: Tensor<Flex, 2>,
    documents: Documents<Recorded>,
    rotary: RotaryTables<Recorded>,
    d_hidden_nd: Tensor<Flex, 2>,
}

impl Case {
    fn new(workload: &Workload) -> Result<Self, RunError> {
        let (device, batch) = (Default::default(), &workload.micro_batches[0]);
        let mut config: ModelConfig = workload.prepared.model_config.clone();
        config.spec.layers.truncate(1);
        let plan = &workload.prepared.plan;
        let build = BuildOptions {
            storage: BaseStorage::Frozen(Format::F32),
            lora: plan.lora.value.clone(),
            seed: plan.seed.value,
            compute_dtype: DType::F32,
            gemms: GemmFormat::Compute,
            max_positions: batch.row_len,
            sequence_tokens: batch.row_len,
        };
        // The same seed draws the same embedding for a model that trains, whose weights can be read.
        let trains = BuildOptions { storage: BaseStorage::Trained, lora: None, ..build.clone() };
        let readable = Decoder::<Flex>::random(config.clone(), &trains, &device)?;
        let table = readable.parameters().into_iter().find(|parameter| parameter.name.as_ref() == EMBEDDING);
        let table = table.expect("a model that trains has its embedding among its parameters").matrix();
        let model = Decoder::<Flex>::random(config, &build, &device)?;
        let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;

        let (frequencies, scaling) = model.config.spec.ropes[0].inverse_frequencies(batch.row_len);
        let (cos, sin) = rope::tables(&batch.positions, &frequencies, scaling);
        let shape = [batch.positions.len(), frequencies.len()];
        let table_of = |values: Vec<f32>| Tensor::<Recorded, 1>::from_floats(values.as_slice(), &device).reshape(shape);
        let width = [batch.positions.len(), model.config.spec.hidden_size];
        Ok(Self {
            embedded_nd: table.select(0, on_device.ids_n.clone()),
            batch: on_device,
            documents: Documents::new(&batch.cu_seqlens, &device),
            rotary: RotaryTables { cos: table_of(cos), sin: table_of(sin) },
            d_hidden_nd: Tensor::random(width, Distribution::Normal(0.0, 1.0), &device),
            model,
        })
    }

    fn layer(&self) -> &Layer<Flex> {
        &self.model.layers()[0]
    }

    /// Gradient of the first module's B; those of the others are computed and dropped.
    fn hand_written(&self) -> Tensor<Flex, 2> {
        let mut gradients = GradientMap::default();
        gradients.begin_micro_batch(true);
        let pass = PassOptions { recompute: Recompute::None, ..PassOptions::default() };
        Flex::section(self.model.device(), || {
            let (_, tape) = self.model.forward(&self.batch, pass);
            self.model.backward(tape, self.d_hidden_nd.clone(), &mut gradients);
        });
        let b = &self.layer().qkv.modules[0].lora.as_ref().expect("the recipe adapts every module").b;
        let gradient = gradients.remove(&b.name).expect("an adapter has a gradient");
        gradient.reshape([b.shape[0], b.shape[1]])
    }

    /// The same by autodiff.
    fn recorded(&self) -> Tensor<Flex, 2> {
        let mut first_b = None;
        let embedded_nd = Tensor::from_inner(self.embedded_nd.clone()).require_grad();
        let mut see = |b_or| {
            first_b.get_or_insert(b_or);
        };
        let hidden_nd = self.recorded_forward(embedded_nd, &mut see);
        let gradients = hidden_nd.mul(Tensor::from_inner(self.d_hidden_nd.clone())).sum().backward();
        let first_b: Tensor<Recorded, 2> = first_b.expect("the recipe adapts every module");
        first_b.grad(&gradients).expect("B requires a gradient")
    }

    /// The layer and the final norm in operations that autodiff can record. `see` gets the B of each module.
    fn recorded_forward(
        &self,
        x_nd: Tensor<Recorded, 2>,
        see: &mut dyn FnMut(Tensor<Recorded, 2>),
    ) -> Tensor<Recorded, 2> {
        let layer = self.layer();
        let spec = &layer.spec.attention;
        let Mlp::Gated { gate_up, down } = &layer.mlp else { unreachable!("the case has a dense MLP") };
        let input_nd = rms_norm(layer.before_attention.as_ref(), x_nd.clone());
        let [q, k, v] = [0, 1, 2].map(|index| project(&layer.qkv.modules[index], input_nd.clone(), see));
        let rotate = |x| linear::reference::rotary(x, &self.rotary, spec.head_dim);
        let qkv = Qkv { q: rotate(q), k: rotate(k), v };
        let o = attention::reference::forward(&qkv, spec, &self.documents).o;
        let h_nd = project(&layer.attention_output.modules[0], o, see).add(x_nd);

        let input_nd = rms_norm(layer.before_mlp.as_ref(), h_nd.clone());
        let [gate_nf, up_nf] = [0, 1].map(|index| project(&gate_up.modules[index], input_nd.clone(), see));
        let gated_nf = linear::reference::gated(gate_nf, up_nf, layer.spec.mlp.activation());
        let y_nd = project(&down.modules[0], gated_nf, see).add(h_nd);
        // The weights of the final norm of a random model are ones.
        let ones = Tensor::ones([self.model.config.spec.hidden_size], self.model.device());
        let epsilon = self.model.config.spec.rms_norm_eps;
        norm::reference::forward(y_nd, &NormWeight { weight: ones, offset: 0.0, epsilon, trains: false })
    }
}

fn rms_norm(norm: Option<&Norm<Flex>>, x_nd: Tensor<Recorded, 2>) -> Tensor<Recorded, 2> {
    let norm = norm.expect("the shapes of this benchmark normalize the inputs of attention and MLP");
    let weight = Tensor::from_inner(norm.weight.value.clone());
    norm::reference::forward(x_nd, &NormWeight { weight, offset: norm.offset, epsilon: norm.epsilon, trains: false })
}

/// `x Wᵀ + s (x Aᵀ) Bᵀ` with W frozen, A and B recorded.
fn project(
    linear: &Linear<Flex>,
    x_ni: Tensor<Recorded, 2>,
    see: &mut dyn FnMut(Tensor<Recorded, 2>),
) -> Tensor<Recorded, 2> {
    let Weight::Dense(weight_oi) = linear.base.weight() else { unreachable!("the case is built with a dense base") };
    let y_no = x_ni.clone().matmul(Tensor::from_inner(weight_oi).transpose());
    let Some(lora) = &linear.lora else { return y_no };
    let a_ri = Tensor::<Recorded, 2>::from_inner(lora.a.matrix()).require_grad();
    let b_or = Tensor::<Recorded, 2>::from_inner(lora.b.matrix()).require_grad();
    see(b_or.clone());
    y_no.add(x_ni.matmul(a_ri.transpose()).matmul(b_or.mul_scalar(lora.scale).transpose()))
}

fn assert_close(by_hand: Tensor<Flex, 2>, recorded: Tensor<Flex, 2>) {
    let largest = recorded.clone().abs().max().into_scalar();
    let difference = by_hand.sub(recorded).abs().max().into_scalar();
    assert!(
        difference <= TOLERANCE * largest,
        "the backwards of one layer differ by {difference}, the largest gradient is {largest}"
    );
}
