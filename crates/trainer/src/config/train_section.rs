//! `[train]`: the training step and the number of steps.

use firebrick_kernels::Recompute;
use firebrick_optim::{OptimizerKind, ScheduleKind, TrainedWeights};
use firebrick_precision::FloatType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::chosen::{Chosen, KeyRow, OnResume};
use crate::config::auto::Auto;
use crate::config::compute::Compute;
use crate::config::section::{
    AboveZero, BelowOne, COUNT, EPOCHS, FACTOR, ROWS, Rule, TOKENS, Whole, ZeroOrMore, rule, rules, section,
};
use crate::config::weights::Mode;
use crate::config::zero_stage::ZeroStage;
use crate::config::{Init, RunConfig, to_name};

const MICRO_BATCHES: u64 = 1 << 20;
const MICRO_BATCH_TOKENS: u64 = 1 << 32;
/// The fraction of a run that warms up if the recipe does not set it and the rate decreases afterwards.
const DEFAULT_WARMUP_RATIO: f64 = 0.03;
/// The default peak learning rate of adapters and of weights drawn from the seed.
const NEW_WEIGHTS_RATE: f64 = 2e-4;
/// The default where every weight of a pretrained model trains, as in TRL. Ten times as much destroys what the model knows.
const PRETRAINED_WEIGHTS_RATE: f64 = 2e-5;
/// The defaults for pairs of answers and for rewards, of adapters and of full training: TRL's advice and defaults.
const PAIRS_RATES: [f64; 2] = [1e-5, 1e-6];

section! {
    /// `[train]`: the training step and the number of steps.
    pub struct TrainConfig in "train.", planned as PlannedTrain {
        /// An older way to write `compute`: true is "bfloat16", false is "float32". It may be written as long as the two agree.
        /// Default: absent.
        bf16: Option<bool> = None;
        /// Save only each layer's input for the backward pass and compute the rest again: less memory for one more forward pass.
        /// Default: what `recompute` says.
        grad_checkpointing: Option<bool> = None;
        /// A finer form of `grad_checkpointing`: "full" (true), "projections" (also true): save attention's output and the inputs of attention
        /// and of the MLP, so that attention and its output projection do not run twice, for three times the memory; "none" (false), or
        /// "selective" (also false): save the outputs of matrix multiplications and attention, compute norms and activation functions again.
        /// "auto": the fastest of these that fits, decided together with `offload` and `kept_weights_gib` where those are left open. The plan says
        /// which, and what the others would cost; a resumed run goes on with it. Default: what `grad_checkpointing` says, else "auto".
        recompute: Option<Auto<Recompute>> = None;
        /// Plan for an accelerator with this many GiB, to share one, or to try what a smaller one would do. Default: all that it has.
        device_memory_gib: Option<f64> = None, AboveZero(FACTOR);
        /// With `recompute = "full"` or `"projections"`: keep what layers save in pinned host memory, copied there and back while other work
        /// runs: tokens x hidden size x 2 bytes for each layer, and under "projections" as much for the sum after attention, and tokens x
        /// width of the queries x 2 bytes for attention's output. Default true on CUDA; the other backends leave it where it is.
        offload: Option<bool> = None;
        /// "adamw" (32-bit state), "adamw_8bit" (block-wise 8-bit state) or "paged_adamw_8bit" (the same,
        /// but on CUDA state beyond `optimizer_device_gib` waits in host memory). Default "adamw".
        optimizer: OptimizerKind = OptimizerKind::AdamW;
        /// With "paged_adamw_8bit" on CUDA: GiB of optimizer state that stay on the device; the rest waits in pinned host memory and
        /// is copied there and back in each step. "auto": as much as fits. Other backends page nothing. Default "auto".
        optimizer_device_gib: Auto<f64> = Auto::Auto;
        /// Where every weight trains, how matrices are stored: "float32", or in half the memory, which GEMMs read as it is. "bfloat16_exact"
        /// keeps the other 16 bits of each weight in the optimizer's state, paged with it, so that updates are those of float32;
        /// "bfloat16_stochastic" keeps nothing more, and rounds each update up or down at random. Norms, biases and routers stay in float32, and
        /// a model that is stored in float32 is rounded once at the start. Default "float32".
        weights: TrainedWeights = TrainedWeights::Float32;
        /// With `weights` in bfloat16, the format in which the gradients of their matrices are summed: "float32", or "bfloat16" in half the
        /// memory, rounded to the nearest in each micro-batch. "auto": float32 where it fits and layers then save as much for their backward;
        /// a resumed run goes on with what was decided. Default "auto".
        gradients: Auto<FloatType> = Auto::Auto;
        /// On CUDA with a quantized base: GiB of weights that stay on the device as GEMMs read them (in the compute format, or in 8 bits with
        /// compute = "fp8") instead of being written again in every pass; all of them take two bytes per parameter of the layers'
        /// projections. A number, or "auto": what fits. Default "auto".
        kept_weights_gib: Auto<f64> = Auto::Auto;
        /// On CUDA: whether the algorithm of each large GEMM is chosen by measuring it, in the first step, which then takes 5 to 15 s longer.
        /// Choices are kept on disk for this card and library, and used whenever this is not false. Default: true where the run is
        /// planned to take ten minutes or more.
        tune_gemms: Option<bool> = None;
        /// Whether two runs of a recipe on the same machine end with the same bytes, and a resumed run with those of one that was not interrupted.
        /// On CUDA sums then have a fixed order, no kernel is chosen by its time, and what depends on memory is decided by what the machine has,
        /// not by what is free. The plan says what that costs; attention to long packed documents most. Refused next to `tune_gemms = true`, and
        /// on more than two ranks unless the environment fixes the order of NCCL's sums. CPUs repeat runs anyway. wgpu's kernels have a fixed order
        /// of sums too, but no two runs were compared. Default false.
        deterministic: bool = false;
        /// On several ranks, what is divided over them instead of being on each (ZeRO): 0 nothing, 1 the optimizer's state, 2 gradients too,
        /// 3 the weights of the layers too, frozen or trained, which then travel in every pass. Each rank updates its share of the parameters
        /// and gives it to the others. Default 0.
        zero_stage: ZeroStage = ZeroStage::NONE;
        /// Rows per forward and backward pass. "auto": the fastest division of a step that the plan says fits, decided together with
        /// `recompute`; nothing is tried. Without `rows_per_step` a step then has 1 to 16 rows by the size of the data, so that an epoch has
        /// about 200 steps where there is enough of it. Default 1.
        micro_batch_size: Auto<usize> = Auto::Given(1), Whole(1, ROWS);
        /// Micro-batches per step. Default: what `rows_per_step` needs, or 1.
        gradient_accumulation: Option<usize> = None, Whole(1, MICRO_BATCHES);
        /// Rows per step over all ranks, instead of `gradient_accumulation`, which follows from it. Default: absent.
        rows_per_step: Option<usize> = None, Whole(1, MICRO_BATCHES);
        /// Highest learning rate of the schedule. Default 2e-4 for adapters and for weights drawn from the seed, 2e-5 where every
        /// weight of a pretrained model trains; with `[preference]` or `[grpo]` 1e-5 and 1e-6.
        learning_rate: Option<f64> = None, AboveZero(1e30);
        /// Learning rate after the warm-up: "constant", or decreasing to `min_lr` as "linear" or "cosine". Default "cosine".
        schedule: ScheduleKind = ScheduleKind::Cosine;
        /// The learning rate that "linear" and "cosine" decrease to (a rate, not a fraction of `learning_rate`). Default 0.
        min_lr: f64 = 0.0, ZeroOrMore(1e30);
        /// Steps in which the learning rate increases from 0. Default: absent.
        warmup_steps: Option<u64> = None, Whole(0, COUNT);
        /// The same as a fraction of the run, 0 or more and below 1, rounded up to whole steps. Default, if `warmup_steps` is absent:
        /// 0.03, and 0 for the schedule "constant".
        warmup_ratio: Option<f64> = None, BelowOne;
        /// Decoupled weight decay. Default 0.
        weight_decay: f64 = 0.0, ZeroOrMore(FACTOR) => MayChange;
        /// Decay of the first moment. Default 0.9.
        adam_beta1: f64 = 0.9, BelowOne => MayChange;
        /// Decay of the second moment. Default 0.999.
        adam_beta2: f64 = 0.999, BelowOne => MayChange;
        /// Added to the root of the second moment. Default 1e-8.
        adam_epsilon: f64 = 1e-8, AboveZero(1.0) => MayChange;
        /// Gradients are scaled down to this global norm; 0 turns it off. Default 1.
        max_grad_norm: f64 = 1.0, ZeroOrMore(1e12) => MayChange;
        /// What happens at a step whose gradients are not finite; it changes neither weights nor optimizer. "stop": the run ends, says where the
        /// first such value comes from, and keeps the step's rows for `--replay`. "skip": it goes on with the next step. Gradients that overflow
        /// in float16 are not meant: they lower the loss scale. A loss that is not finite alone always ends the run. Default "stop".
        on_nonfinite: OnNonfinite = OnNonfinite::Stop => MayChange;
        /// A step whose gradient norm is more than this many times the median of up to 128 steps before is a spike, and is skipped. The last
        /// step does not count, since it may still be running; at least 16 others are needed. 0: no step is a spike. Default 0.
        spike_factor: f64 = 0.0, ZeroOrMore(FACTOR) => MayChange;
        /// So many steps in a row may be skipped; the next such step ends the run as "stop" does. Default 10.
        max_skipped_steps: u64 = 10, Whole(0, COUNT) => MayChange;
        /// Passes over the data; may be a fraction. Default, if `steps` is absent: by the size of the data, from 10 to 1; 1 for pairs, rewards and
        /// new weights.
        epochs: Option<f64> = None, AboveZero(EPOCHS);
        /// Optimizer steps, instead of `epochs`. Default: absent.
        steps: Option<u64> = None, Whole(1, COUNT);
        /// Hours after which the run ends like one that was interrupted: after its step, saved, with the exit status of `timeout` (124), for
        /// machines that are lent for a time. A resumed run counts from its own start. Default: absent, all steps are taken.
        max_time_hours: Option<f64> = None, AboveZero(FACTOR);
        /// Write metrics every this many steps. Default 1 if `log_every_epochs` is absent.
        log_every: Option<u64> = None, Whole(1, COUNT);
        /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
        log_every_epochs: Option<f64> = None, AboveZero(EPOCHS);
        /// Tokens whose logits exist at the same time in the loss; fewer is slower and takes less memory. Default 1024.
        loss_chunk_tokens: usize = 1024, Whole(1, TOKENS);
        /// In a mixture of experts, also train on the auxiliary loss that balances the experts, as transformers does with
        /// `output_router_logits = true`. It counts the choices of a micro-batch's tokens, without padding, over the routers of all layers,
        /// frozen or not; a step takes the mean over its micro-batches on all ranks, so their size changes it a little. Metrics have it without
        /// its weight as `aux_loss`; `loss` is what it is without, and evaluation does not compute it. Default false.
        router_aux_loss: bool = false;
        /// Weight of that loss. Default: `router_aux_loss_coef` of config.json, which is 0.001 if it is not there.
        router_aux_loss_coef: Option<f64> = None, ZeroOrMore(FACTOR);
    }
}

/// `train.on_nonfinite`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNonfinite {
    /// The run ends.
    Stop,
    /// The run goes on with the next step.
    Skip,
}

/// How long the learning rate increases: `train.warmup_steps` or `train.warmup_ratio`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// A fraction of the run.
    Ratio(f64),
}

/// How long a run is, or how often something happens during it; set by a key in steps or one in epochs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Interval {
    /// Optimizer steps; 0 is never.
    Steps(u64),
    /// Passes over the data, or a fraction of one.
    Epochs(f64),
}

impl Interval {
    /// Returns the interval of a pair of keys, of which at most one is given.
    pub(super) fn of(steps: Option<u64>, epochs: Option<f64>, default_steps: u64) -> Self {
        match (steps, epochs) {
            (None, Some(epochs)) => Self::Epochs(epochs),
            (steps, _) => Self::Steps(steps.unwrap_or(default_steps)),
        }
    }

    pub(super) fn keys(self) -> (Option<u64>, Option<f64>) {
        match self {
            Self::Steps(steps) => (Some(steps), None),
            Self::Epochs(epochs) => (None, Some(epochs)),
        }
    }
}

impl RunConfig {
    /// Returns the highest learning rate.
    pub fn learning_rate(&self) -> f64 {
        let is_full = self.mode() == Mode::Full;
        let [pairs_adapters, pairs_full] = PAIRS_RATES;
        self.train.learning_rate.unwrap_or(match (self.preference.is_some() || self.grpo.is_some(), is_full) {
            (true, false) => pairs_adapters,
            (true, true) => pairs_full,
            (false, true) if self.init == Init::Pretrained => PRETRAINED_WEIGHTS_RATE,
            (false, _) => NEW_WEIGHTS_RATE,
        })
    }

    /// Returns how often metrics are written.
    pub fn log_interval(&self) -> Interval {
        Interval::of(self.train.log_every, self.train.log_every_epochs, 1)
    }

    /// Returns how long the run is; `None`: the plan decides it by the size of the data.
    pub fn length(&self) -> Option<Interval> {
        let default = (!self.follows_size()).then_some(1.0);
        let epochs = || self.train.epochs.or(default).map(Interval::Epochs);
        self.train.steps.map(Interval::Steps).or_else(epochs)
    }

    /// Returns whether the run learns from documents one by one, from weights that know something: what its recipe leaves open then follows from
    /// the size of the data.
    pub fn follows_size(&self) -> bool {
        self.init == Init::Pretrained && self.preference.is_none() && self.grpo.is_none()
    }

    /// Returns whether the plan decides the rows per step by the size of the data.
    pub fn leaves_rows_open(&self) -> bool {
        self.train.micro_batch_size == Auto::Auto && self.train.rows_per_step.is_none()
    }

    /// Returns how long the learning rate increases.
    pub fn warmup(&self) -> Warmup {
        match self.train.warmup_steps {
            Some(steps) => Warmup::Steps(steps),
            None => Warmup::Ratio(self.train.warmup_ratio.unwrap_or(match self.train.schedule {
                ScheduleKind::Constant => 0.0,
                ScheduleKind::Linear | ScheduleKind::Cosine => DEFAULT_WARMUP_RATIO,
            })),
        }
    }

    /// Returns what the backward pass of a layer recomputes; `None`: the plan decides.
    pub fn recompute(&self) -> Option<Recompute> {
        match (self.train.recompute, self.train.grad_checkpointing) {
            (Some(choice), _) => choice.given(),
            (None, Some(false)) => Some(Recompute::None),
            (None, Some(true)) => Some(Recompute::Full),
            (None, None) => None,
        }
    }

    /// Returns the rows per step of so many ranks: their effective batch. Panics if [`RunConfig::leaves_rows_open`].
    pub fn rows_per_step(&self, ranks: usize) -> usize {
        self.train.rows_per_step.unwrap_or_else(|| {
            let rows = self.train.micro_batch_size.given().expect("the size of the data does not decide them");
            rows * self.gradient_accumulation() * ranks
        })
    }

    /// Returns the micro-batches per step, where the recipe says them.
    pub fn gradient_accumulation(&self) -> usize {
        self.train.gradient_accumulation.unwrap_or(1)
    }
}

pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let (train, peak, stage) = (&config.train, config.learning_rate(), config.train.zero_stage);
    let weights = train.weights;
    let warmup_fits = train.warmup_steps.zip(train.steps).is_none_or(|(warmup, steps)| warmup <= steps);
    let (warmup, steps) = (train.warmup_steps.unwrap_or(0), train.steps.unwrap_or(0));
    let recompute_agrees = train
        .grad_checkpointing
        .zip(train.recompute)
        .is_none_or(|(checkpointing, choice)| choice.given().is_some_and(|of| of.repeats_gemms() == checkpointing));
    let micro_batch = |key: &'static str, rows: Option<usize>| {
        let rows = rows.unwrap_or_default();
        let tokens = (rows as u64).saturating_mul(config.max_seq_len() as u64);
        let problem = format!("{rows} rows of {} tokens are more than {MICRO_BATCH_TOKENS}", config.max_seq_len());
        rule(tokens <= MICRO_BATCH_TOKENS, key, problem, "write fewer rows, or a smaller max_seq_len")
    };
    let mut rules = vec![
        micro_batch("train.micro_batch_size", train.micro_batch_size.given()),
        micro_batch("eval.micro_batch_size", config.eval_micro_batch_size()),
    ];
    rules.extend(rules! {
        "train.micro_batch_size": !config.leaves_rows_open() || config.follows_size(),
            "is \"auto\", and nothing says how many rows there are per step" =>
            "write train.rows_per_step, such as 64, or a number of rows";
        "train.weights": weights == TrainedWeights::Float32 || config.mode() == Mode::Full,
            format!("is \"{}\", and only where every weight trains are weights stored so", to_name(&weights)) =>
            "remove this key: adapters are small, and train in float32";
        "train.weights": weights == TrainedWeights::Float32 || config.compute() != Compute::Plain(FloatType::F16),
            format!("is \"{}\", and compute = \"float16\" reads no bfloat16", to_name(&weights)) =>
            "write compute = \"bfloat16\" or \"fp8\"";
        "train.gradients": train.gradients != Auto::Given(FloatType::Bf16) || weights != TrainedWeights::Float32,
            "is \"bfloat16\", and gradients of weights in float32 are summed in float32" =>
            "write train.weights = \"bfloat16_exact\" or \"bfloat16_stochastic\" too, or remove this key";
        "train.gradient_accumulation": !config.leaves_rows_open() || train.gradient_accumulation.is_none(),
            "follows from train.micro_batch_size = \"auto\"" =>
            "remove this key, or write a number of rows there";
        "train.zero_stage": stage.exists(),
            format!("is {stage}, and ZeRO has stages 0 to 3") =>
            "write 1 (divides the optimizer's state), 2 (gradients too), 3 (weights too), or 0";
        "train.zero_stage": !stage.divides_weights() || config.compute() != Compute::Fp8,
            "is 3, and compute = \"fp8\" keeps what it derives from weights, which borrowed ones do not allow" =>
            "write 2, or compute = \"bfloat16\"";
        "train.warmup_steps": warmup_fits,
            format!("{warmup} steps of warm-up are longer than the run of {steps}") =>
            "warm up for about 3 % of the steps";
        "train.deterministic": !train.deterministic || train.tune_gemms != Some(true),
            "is true, and train.tune_gemms = true chooses algorithms by their times" =>
            "remove one of the two keys";
        "train.min_lr": train.min_lr <= peak,
            format!("is {:e}, above the highest rate, train.learning_rate = {peak:e}", train.min_lr) =>
            "write a rate such as a tenth of train.learning_rate";
        "train.min_lr": train.min_lr == 0.0 || train.schedule != ScheduleKind::Constant,
            "schedule = \"constant\" never decreases" =>
            "write schedule = \"cosine\" or \"linear\", or remove this key";
        "train.spike_factor": train.spike_factor == 0.0 || train.spike_factor > 1.0,
            format!("is {}, so that a usual step would be a spike", train.spike_factor) =>
            "write a factor such as 10, or 0 for no rule";
        "train.recompute": recompute_agrees,
            format!("contradicts train.grad_checkpointing = {}", train.grad_checkpointing.unwrap_or(true)) =>
            "remove one of the two keys: true is \"full\" or \"projections\", false is \"selective\" or \"none\"";
        "train.router_aux_loss_coef": train.router_aux_loss || train.router_aux_loss_coef.is_none(),
            "is the weight of a loss that this recipe does not train on" =>
            "write train.router_aux_loss = true too, or remove this key";
        "train.offload": train.offload != Some(true) || config.recompute().is_none_or(Recompute::may_offload),
            "layers save too much of their work to be copied to the host and back next to it" =>
            "write train.recompute = \"full\" or \"projections\", or remove this key";
    });
    rules
}
