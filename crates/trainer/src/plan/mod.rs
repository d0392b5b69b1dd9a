//! The plan: every decision about a run with its reason, printed before the first weight is read and saved as `plan.toml`.
//!
//! The recipe (as typed), the model's config and the size of the data become a wish, which is resolved once; the plan follows from the wish and the
//! hardware profile (as found). The run reads only the plan; the recipe is saved next to it. A decision is one row below: its name in plan.toml, its type, how it is made, whether the terminal shows it,
//! and whether a resumed run must share it.
//! Trade-off: the plan is made after the data has been read, because steps and memory depend on it. It is one flat struct, so that `plan.toml` has
//! one table per decision.

mod adapter;
mod answers;
mod backend;
mod decide;
mod deterministic;
mod disk;
mod display;
mod divided;
#[cfg(all(test, feature = "flex"))]
mod extremes;
mod fit;
#[cfg(test)]
mod fixtures;
mod forecast;
mod fp8;
mod inputs;
mod kept_weights;
#[cfg(test)]
mod measured_steps;
mod memory_choices;
mod micro_batch;
mod paging;
mod schedule;
mod shapes;
pub(crate) mod size;
mod trained_weights;
mod values;
mod warnings;
mod wish;
mod workers;

use std::path::PathBuf;

use firebrick_arch::{LoraConfig, TensorSpec};
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::{MemoryEstimate, MemoryLine};
use firebrick_kernels::{BackendKind, BaseStorage, GemmAlgorithms, GemmFormat, Recompute, TrainingShape};
use firebrick_optim::{OptimizerKind, ScheduleKind, TrainedWeights};
use firebrick_precision::FloatType;
use serde::Serialize;

use crate::chosen::{KeyRow, OnResume};
use crate::config::{BestSection, GrpoSection, Init, PlannedTrain, PreferenceSection, RunConfig, ZeroStage};
use crate::error::RunError;
use crate::metrics::{MlflowSection, WandbSection};
use display::Words;
use wish::Wish;

pub use crate::chosen::Chosen;
pub use adapter::PlannedReference;
pub use answers::MAX_PROMPTS_AT_ONCE;
pub use backend::{choose_backend, command_format, compiled_names, compute_format};
pub(crate) use deterministic::check_ranks;
pub use display::with_grouped_numbers;
pub use divided::weight_owners;
pub use fit::SmallerRun;
pub use forecast::Forecast;
pub use inputs::{DataShape, DecidedMemory, PlanInputs, PlanRequest};
pub use workers::tokenizing;

impl<T: PartialEq> Chosen<T> {
    /// Creates a decision from the value of a key in the recipe and in the recipe with default keys.
    fn of(made: &Made<'_>, key: impl Fn(&RunConfig) -> T) -> Self {
        Self::key(key(made.wish.recipe), &key(&made.default))
    }
}

/// What a plan is built from: its inputs, and the decisions that are made in order.
struct Made<'a> {
    wish: &'a Wish<'a>,
    /// The recipe with default keys.
    default: RunConfig,
    profile: &'a HardwareProfile,
    rows: micro_batch::Rows,
    case: fit::Case<'a>,
    trained: Vec<TensorSpec>,
    training: TrainingShape,
    backend: Chosen<BackendKind>,
    compute: Chosen<FloatType>,
    gemms: Chosen<GemmFormat>,
    base: Chosen<BaseStorage>,
    /// Format of the sums of gradients of parameters in bf16; `None` if there are none.
    gradients: Option<Chosen<FloatType>>,
    router_aux_loss: Option<Chosen<f64>>,
    memory: memory_choices::MemoryChoices,
    steps: Chosen<u64>,
    estimate: MemoryEstimate,
    /// A shortage that the user chose to ignore.
    forced: Option<Chosen<bool>>,
    smaller: SmallerRun,
    forecast: Option<Forecast>,
    /// Bytes of a checkpoint, and of the run folder.
    disk: [Chosen<u64>; 2],
}

/// Defines the struct, its construction, and access to rows by name. A row is `name: type = decision`, optionally followed by `shown` with a label
/// and the function of `display` that puts the value in words, and by the recipe's key of a decision that identifies a run or that may change when it
/// is resumed; or by the section whose keys it takes as they are. Rows that are shown are in the order in which they are shown.
macro_rules! plan {
    ($made:ident; $(
        $(#[$doc:meta])*
        $name:ident: $type:ty = $decision:expr
        $(, shown $label:literal as $words:ident)?
        $(, identifies $identity:literal)?
        $(, may change $setting:literal)?
        $(, keys of $section:ty)?;
    )*) => {
        /// A whole plan. A decision whose name says it all has no doc.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[allow(missing_docs)]
        pub struct Plan {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Plan {
            fn of($made: &Made<'_>) -> Self {
                Self { $($name: $decision,)* }
            }

            /// Name, label and words of each decision that the terminal shows, in their order.
            const SHOWN: &[(&str, &str, Words)] =
                &[$($((stringify!($name), $label, display::$words as Words),)?)*];
            /// Each decision that a resumed run must share with the run that it continues, or that may change.
            const KEYS: &[&[KeyRow]] = &[$(
                $(&[(stringify!($name), $identity, OnResume::Identifies)],)?
                $(&[(stringify!($name), $setting, OnResume::MayChange)],)?
                $(<$section>::KEYS,)?
            )*];
        }
    };
}

plan! {
    made;

    /// Number of processes that train together.
    world_size: Chosen<usize> = decide::ranks(made), shown "ranks" as of_several_ranks, may change "ranks";
    /// What is divided over the processes.
    zero_stage: Chosen<ZeroStage> = decide::zero_stage(made),
        shown "ZeRO stage" as of_several_ranks, may change "train.zero_stage";
    backend: Chosen<BackendKind> = made.backend.clone(), shown "backend" as plain;
    compute: Chosen<FloatType> = made.compute.clone(), shown "compute" as plain, identifies "compute";
    /// What the GEMMs of the layers multiply.
    gemms: Chosen<GemmFormat> = made.gemms.clone(), shown "GEMMs of layers" as other_than_compute, identifies "gemms";
    /// Which share of a step's operations is in which format.
    arithmetic: Chosen<String> = decide::arithmetic(made), shown "arithmetic" as plain;
    /// Which part of the checkpoint is the model; none where it is the whole.
    text_model: Option<Chosen<&'static str>> = decide::text_model(made.wish.model), shown "trained part" as plain;
    base: Chosen<BaseStorage> = made.base.clone(), shown "base" as plain, identifies "base";
    /// How matrices are stored where every weight trains; none where that is in float32.
    trained_weights: Option<Chosen<TrainedWeights>> = trained_weights::weights(made.wish.recipe),
        shown "trained weights" as plain, identifies "train.weights";
    /// Format in which gradients of matrices in bfloat16 are summed; none where there are no such matrices.
    gradient_sums: Option<Chosen<FloatType>> = made.gradients.clone(),
        shown "sums of gradients" as plain, may change "train.gradients";
    trained_parameters: Chosen<u64> = adapter::trained_parameters(made), shown "trained parameters" as plain;
    /// Modules that targets of the adapter name and some layers do not have; none where all have them.
    skipped_modules: Option<Chosen<Vec<String>>> = adapter::skipped_modules(made.wish),
        shown "without adapters" as plain;
    /// Where the table of the layers' own inputs is; none where they have no inputs.
    layer_inputs: Option<Chosen<&'static str>> = adapter::layer_inputs(made.wish.model),
        shown "inputs of layers" as plain;
    /// What layers save for their backward.
    recompute: Chosen<Recompute> = made.memory.recompute.clone(),
        shown "recompute" as plain, may change "train.recompute";
    /// Whether what layers save waits in host memory.
    offload: Chosen<bool> = made.memory.offload.clone(), shown "offload" as on_cuda;
    /// Rule and state format of the optimizer.
    optimizer: Chosen<OptimizerKind> = paging::optimizer(made.wish.recipe.train.optimizer, made.backend.value),
        shown "optimizer" as plain, identifies "train.optimizer";
    /// Bytes of optimizer state that stay on the device.
    resident_state_bytes: Chosen<u64> = made.memory.paging.resident.clone(), shown "state on the device" as paged_bytes;
    /// Tokens per row, padding included.
    row_len: Chosen<usize> = decide::row_len(made), shown "row length" as plain;
    micro_batch_size: Chosen<usize> = made.rows.micro_batch_size.clone(),
        shown "micro-batch" as plain, may change "train.micro_batch_size";
    gradient_accumulation: Chosen<usize> = schedule::accumulation(made),
        shown "accumulation" as plain, may change "train.gradient_accumulation";
    steps: Chosen<u64> = made.steps.clone(), shown "steps" as plain, may change "train.steps";
    /// Hours after which the run saves everything and ends; none without such a limit.
    max_time_hours: Option<Chosen<f64>> = made.wish.recipe.train.max_time_hours.map(Chosen::recipe);
    /// Highest learning rate.
    learning_rate: Chosen<f64> = schedule::learning_rate(made),
        shown "learning rate" as rate, may change "train.learning_rate";
    /// Steps of increasing learning rate.
    warmup_steps: Chosen<u64> = schedule::warmup(made.wish.recipe, made.steps.value),
        shown "warm-up steps" as plain, may change "train.warmup_steps";
    schedule: Chosen<ScheduleKind> = Chosen::of(made, |config| config.train.schedule),
        shown "schedule" as plain, may change "train.schedule";
    /// Learning rate that the decay leads to.
    min_lr: Chosen<f64> = Chosen::of(made, |config| config.train.min_lr),
        shown "lowest rate" as rate, may change "train.min_lr";
    /// Rows of logits that exist at a time.
    loss_chunk_tokens: Chosen<usize> = decide::loss_chunk(made),
        shown "loss chunk" as plain, may change "train.loss_chunk_tokens";
    /// Threads that tokenize, before anything is on the device.
    tokenize_workers: Chosen<usize> = workers::to_tokenize(made.wish.recipe, made.profile);
    /// Threads that build batches while the device trains.
    loader_workers: Chosen<usize> = workers::to_load(made.wish.recipe, made.profile, made.backend.value);
    /// Bytes at the peak of a step, or of an evaluation where that needs more.
    memory_bytes: Chosen<u64> = decide::memory_budget(made), shown "memory" as bytes;
    /// The parts of `memory_bytes`.
    memory: Vec<MemoryLine> = made.estimate.lines.clone();
    /// The adapter folder whose matrices the run starts with.
    lora_init_from: Chosen<Option<PathBuf>> = adapter::init_from(made.wish.recipe), shown "adapter starts from" as start;
    /// Tokens that the tokenizer gets in addition to the model's; none where it gets none.
    new_tokens: Option<Chosen<Vec<String>>> = adapter::new_tokens(made.wish),
        shown "new tokens" as plain, identifies "data.new_tokens";
    /// Probability with which values that adapters read are dropped.
    adapter_dropout: Option<Chosen<f64>> = adapter::dropout(made.wish.recipe, made.backend.value),
        shown "adapter dropout" as plain, may change "lora.dropout";
    /// How many times the learning rate of A that of B is.
    loraplus_lr_ratio: Option<Chosen<f64>> = adapter::loraplus_lr_ratio(made.wish.recipe),
        shown "rate of B" as times, may change "lora.loraplus_lr_ratio";
    /// What pairs of answers are trained for; none where documents are trained on one by one.
    preference: Option<Chosen<PreferenceSection>> = adapter::preference(made.wish.recipe),
        shown "preference" as preference, identifies "preference";
    /// What completions are learned from; none where documents are trained on.
    grpo: Option<Chosen<GrpoSection>> = adapter::grpo(made.wish.recipe, made.gemms.value),
        shown "grpo" as grpo, identifies "grpo";
    /// Where the reference of that loss comes from.
    reference: Option<Chosen<PlannedReference>> = adapter::reference(made.wish.recipe), shown "reference" as plain;
    /// Which kernels compute attention, where that follows from the model alone.
    attention: Option<Chosen<String>> = decide::attention(made), shown "attention kernels" as plain;
    /// How experts are computed; none where the model has none.
    experts: Option<Chosen<String>> = decide::experts(made), shown "experts" as plain;
    /// Which factors of longrope are used; none where the model has none.
    long_rope: Option<Chosen<&'static str>> = decide::long_rope(made.wish.recipe, &made.wish.model.spec),
        shown "longrope" as plain;
    /// Which modules' adapters are part of the base's GEMMs, and which have GEMMs of their own.
    adapter_gemms: Option<Chosen<String>> = adapter::gemms(made.backend.value, &made.wish.model.spec, &made.training),
        shown "adapter GEMMs" as on_cuda;
    /// Bytes of frozen weights that stay on the device as GEMMs read them; none where there are no such weights.
    kept_weights_bytes: Option<Chosen<u64>> = made.memory.kept_weights_bytes.clone(), shown "kept weights" as bytes;
    /// How algorithms of large GEMMs are chosen; `None` where the backend has no choice.
    gemm_algorithms: Option<Chosen<GemmAlgorithms>> =
        fp8::algorithms(made.backend.value, &made.wish.recipe.train, made.forecast.as_ref()),
        shown "GEMM algorithms" as plain;
    /// Whether runs repeat bit by bit; none where the recipe does not ask for it.
    deterministic: Option<Chosen<bool>> = deterministic::decide(made),
        shown "deterministic" as plain, may change "train.deterministic";
    /// Bytes of optimizer state that wait in host memory.
    paged_state_bytes: Chosen<u64> = made.memory.paging.paged.clone(), shown "paged state" as some_bytes;
    /// Bytes of host memory that a run on a device needs in addition.
    host_memory_bytes: Chosen<u64> = decide::host_memory(made), shown "host memory" as some_bytes;
    /// Bytes of host memory in which a checkpoint waits until it is written, while steps go on; 0: steps wait.
    snapshot_bytes: Chosen<u64> = decide::snapshot(made), shown "copy to save" as some_bytes;
    /// Bytes on the card that a checkpoint holds until a thread has copied them, in addition to `memory_bytes`, while steps go on; 0: steps wait for the
    /// copy. None where that is no question.
    held_bytes: Option<Chosen<u64>> = decide::held(made), shown "held to save" as bytes;
    /// Bytes of the run folder at its largest.
    disk_bytes: Chosen<u64> = made.disk[1].clone(), shown "disk" as bytes;

    name: Chosen<String> = Chosen::recipe(made.wish.recipe.name.clone());
    output_dir: Chosen<PathBuf> = Chosen::of(made, |config| PathBuf::from(&config.output_dir));
    model_folder: Chosen<PathBuf> = Chosen::recipe(PathBuf::from(&made.wish.recipe.model));
    init: Chosen<Init> = Chosen::key(made.wish.recipe.init, &Init::default()), identifies "init";
    /// Seed of new weights and of sampling.
    seed: Chosen<u64> = Chosen::of(made, |config| config.seed), identifies "seed";
    /// Seed of the order of rows and of mixtures.
    data_seed: Chosen<u64> = schedule::data_seed(made.wish.recipe), identifies "data.data_seed";
    shuffle: Chosen<bool> = Chosen::of(made, |config| config.data.shuffle), identifies "data.shuffle";
    /// The adapter; without one every weight trains.
    lora: Chosen<Option<LoraConfig>> = adapter::lora(made), identifies "lora";
    /// Weight of the loss that balances the experts; `None` without that loss.
    router_aux_loss: Option<Chosen<f64>> = made.router_aux_loss.clone(), may change "train.router_aux_loss_coef";
    /// The keys of `[train]` that are taken as they are.
    #[serde(flatten)]
    train: PlannedTrain = PlannedTrain::new(&made.wish.recipe.train), keys of PlannedTrain;
    /// Maximum tokens of a document, and of a packed row.
    max_seq_len: Chosen<usize> = Chosen::of(made, |config| config.max_seq_len()), identifies "max_seq_len";
    pack: Chosen<bool> = Chosen::of(made, |config| config.pack), identifies "pack";
    /// Positions that the rotary tables cover.
    max_positions: Chosen<usize> = decide::max_positions(made);
    log_every: Chosen<u64> = schedule::every(made, RunConfig::log_interval), may change "train.log_every";
    /// Steps between two evaluations; 0: only before and after training.
    eval_every_steps: Chosen<u64> = schedule::every(made, RunConfig::eval_interval), may change "eval.every_steps";
    /// Whether there is held-out data, or a prompt to answer.
    #[serde(skip)]
    is_evaluated: bool = made.wish.recipe.has_eval_data() || !made.wish.recipe.eval.prompts.is_empty();
    eval_on_start: Chosen<bool> = Chosen::of(made, |config| config.eval.on_start);
    /// Rows per forward pass of the evaluation.
    eval_micro_batch_size: Chosen<usize> = decide::eval_micro_batch_size(made);
    /// Maximum number of micro-batches of the evaluation loss; 0: all.
    eval_max_batches: Chosen<usize> = Chosen::of(made, |config| config.eval.max_batches);
    /// Number of held-out prompts whose greedy answer is compared with the reference.
    exact_match_prompts: Chosen<usize> = Chosen::of(made, |config| config.eval.exact_match_prompts);
    /// Tokens of the prompts that are answered at a time, and of their answers.
    answer_tokens: Chosen<usize> = made.memory.answer_tokens.clone();
    /// What of an answer is compared with the reference.
    extract: Chosen<String> = Chosen::of(made, |config| config.eval.extract.clone());
    max_new_tokens: Chosen<usize> = Chosen::of(made, |config| config.eval.max_new_tokens);
    /// Prompts whose answers are shown before and after training.
    sample_prompts: Chosen<Vec<String>> = Chosen::of(made, |config| config.eval.prompts.clone());
    /// Whether a sample prompt is a user's turn, rendered with the chat template.
    prompts_are_chats: Chosen<bool> = decide::prompts_are_chats(made);
    /// Steps between two checkpoints; 0: only at the end.
    checkpoint_every_steps: Chosen<u64> = schedule::every(made, RunConfig::checkpoint_interval),
        may change "checkpoint.every_steps";
    checkpoints_kept: Chosen<usize> = Chosen::of(made, |config| config.checkpoint.keep), may change "checkpoint.keep";
    /// What decides which weights are the result, and when a run ends early; none where the last weights are.
    best: Option<Chosen<BestSection>> = made.wish.recipe.best.clone().map(Chosen::recipe),
        shown "best checkpoint" as best, may change "best";
    checkpoint_bytes: Chosen<u64> = made.disk[0].clone();
    /// A shortage of memory that the user chose to ignore, in a sentence.
    forced: Option<Chosen<bool>> = made.forced.clone();
    /// The tracking server that gets parameters and metrics too.
    mlflow: Option<Chosen<MlflowSection>> = made.wish.recipe.mlflow.clone().map(Chosen::recipe);
    /// The run of Weights & Biases that gets the run's numbers too.
    wandb: Option<Chosen<WandbSection>> = made.wish.recipe.wandb.clone().map(Chosen::recipe);
    /// What the run will cost on a known accelerator.
    forecast: Option<Forecast> = made.forecast.clone();
    /// What the recipe says and hardly anybody means, in sentences.
    #[serde(skip)]
    warnings: Vec<String> = warnings::of(made);
    /// How the model is trained, as far as memory and work depend on it.
    #[serde(skip)]
    training: TrainingShape = made.training.clone();
    /// The next smaller run, for the case that the estimate is too low.
    #[serde(skip)]
    smaller: SmallerRun = made.smaller.clone();
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// A backend that cannot be used, a LoRA target that the model does not have, or a run that does not fit into memory (with
    /// the nearest change that does).
    pub fn resolve(inputs: PlanInputs<'_>) -> Result<Self, RunError> {
        let wish = Wish::new(&inputs)?;
        Ok(Self::of(&micro_batch::decide(&wish, inputs.profile, inputs.request)?))
    }

    /// Returns this plan with the folders that its model and the adapter that it starts from were found in: a recipe may name them by ids.
    pub(crate) fn with_folders(mut self, model: PathBuf, adapter: Option<PathBuf>) -> Self {
        self.model_folder.value = model;
        if adapter.is_some() {
            self.lora_init_from.value = adapter;
        }
        self
    }

    /// Returns what a run that goes on with this one keeps where its recipe leaves it open.
    pub fn decided(&self) -> DecidedMemory {
        let kept_weights_bytes = self.kept_weights_bytes.as_ref().map(|kept| kept.value);
        DecidedMemory {
            recompute: self.recompute.value,
            offload: self.offload.value,
            kept_weights_bytes,
            micro_batch_size: self.micro_batch_size.value,
            gradients: self.gradient_sums.as_ref().map(|sums| sums.value),
        }
    }
}
