//! What keys mean together: pairs of keys that describe one setting, and keys whose default depends on another key.
//!
//! Trade-off: a recipe that is written out has the defaults of its mode as values, so they stay if the mode is changed later.

use std::path::Path;

use firebrick_arch::LoraConfig;
use firebrick_data::{RecordFormat, TrainOn};
use firebrick_kernels::Recompute;
use firebrick_optim::ScheduleKind;
use firebrick_precision::QuantFormat;

use crate::config::base_name::base_name;
use crate::config::recipe::{
    Bnb4bitSection, CheckpointConfig, EvalConfig, Init, Mode, RunConfig, TrainConfig, default_max_seq_len,
    default_output_dir, yes,
};

/// The fraction of a run that warms up if the recipe has no key for it and the rate falls afterwards.
const DEFAULT_WARMUP_RATIO: f64 = 0.03;
/// The highest learning rate if the recipe has no key for it: of adapters, and of weights drawn from the seed.
const NEW_WEIGHTS_RATE: f64 = 2e-4;
/// The same where every weight of a pretrained model trains: TRL's default. Ten times as much destroys what the model knows.
const PRETRAINED_WEIGHTS_RATE: f64 = 2e-5;
/// The same where adapters train on pairs of answers, and where every weight does: TRL's advice and default for DPO.
const PAIRS_RATES: [f64; 2] = [1e-5, 1e-6];
/// Steps between two checkpoints if the recipe has no key for it.
const DEFAULT_CHECKPOINT_STEPS: u64 = 500;

/// How long a run is: `train.steps` or `train.epochs`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunLength {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the data.
    Epochs(f64),
}

/// How long the learning rate increases: `train.warmup_steps` or `train.warmup_ratio`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// A fraction of the run.
    Ratio(f64),
}

/// How often something happens during a run: a key in steps and one in epochs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Interval {
    /// Optimizer steps; 0 is never.
    Steps(u64),
    /// Passes over the data, or a fraction of one.
    Epochs(f64),
}

impl Interval {
    /// The interval of a pair of keys, of which at most one is there.
    fn of(steps: Option<u64>, epochs: Option<f64>, default_steps: u64) -> Self {
        match (steps, epochs) {
            (None, Some(epochs)) => Self::Epochs(epochs),
            (steps, _) => Self::Steps(steps.unwrap_or(default_steps)),
        }
    }

    /// The same as the values of its two keys.
    fn keys(self) -> (Option<u64>, Option<f64>) {
        match self {
            Self::Steps(steps) => (Some(steps), None),
            Self::Epochs(epochs) => (None, Some(epochs)),
        }
    }
}

impl RunConfig {
    /// Which weights train.
    #[must_use]
    pub fn mode(&self) -> Mode {
        match (self.mode, self.quantized_base(), &self.lora) {
            (Some(mode), ..) => mode,
            (None, Some(_), _) => Mode::Qlora,
            (None, None, Some(_)) => Mode::Lora,
            (None, None, None) => Mode::Full,
        }
    }

    /// The format that the frozen base is quantized to, by whichever key says so; `None` where none does.
    #[must_use]
    pub fn quantized_base(&self) -> Option<QuantFormat> {
        self.base.or_else(|| self.bnb_4bit.as_ref().map(Bnb4bitSection::format))
    }

    /// The adapter on the base in the folder `model`, without where it starts and how fast it learns, which are decisions of their own;
    /// `None` where every weight trains.
    #[must_use]
    pub fn adapter(&self, model: &Path) -> Option<LoraConfig> {
        let lora = self.lora.clone()?;
        let base = lora.base_model_name_or_path.unwrap_or_else(|| base_name(model));
        Some(LoraConfig { base_model_name_or_path: Some(base), init_from: None, loraplus_lr_ratio: None, ..lora })
    }

    /// The highest learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        let is_full = self.mode() == Mode::Full;
        let [pairs_adapters, pairs_full] = PAIRS_RATES;
        self.train.learning_rate.unwrap_or(match (self.preference.is_some(), is_full) {
            (true, false) => pairs_adapters,
            (true, true) => pairs_full,
            (false, true) if self.init == Init::Pretrained => PRETRAINED_WEIGHTS_RATE,
            (false, _) => NEW_WEIGHTS_RATE,
        })
    }

    /// How often the held-out data is evaluated.
    #[must_use]
    pub fn eval_interval(&self) -> Interval {
        Interval::of(self.eval.every_steps, self.eval.every_epochs, 0)
    }

    /// How often a checkpoint is saved.
    #[must_use]
    pub fn checkpoint_interval(&self) -> Interval {
        Interval::of(self.checkpoint.every_steps, self.checkpoint.every_epochs, DEFAULT_CHECKPOINT_STEPS)
    }

    /// How often metrics are written.
    #[must_use]
    pub fn log_interval(&self) -> Interval {
        Interval::of(self.train.log_every, self.train.log_every_epochs, 1)
    }

    /// How long the run is.
    #[must_use]
    pub fn length(&self) -> RunLength {
        match self.train.steps {
            Some(steps) => RunLength::Steps(steps),
            None => RunLength::Epochs(self.train.epochs.unwrap_or(1.0)),
        }
    }

    /// How long the learning rate increases.
    #[must_use]
    pub fn warmup(&self) -> Warmup {
        match self.train.warmup_steps {
            Some(steps) => Warmup::Steps(steps),
            None => Warmup::Ratio(self.train.warmup_ratio.unwrap_or(match self.train.schedule {
                ScheduleKind::Constant => 0.0,
                ScheduleKind::Linear | ScheduleKind::Cosine => DEFAULT_WARMUP_RATIO,
            })),
        }
    }

    /// What the backward pass of a layer computes again.
    #[must_use]
    pub fn recompute(&self) -> Recompute {
        match (self.train.recompute, self.train.grad_checkpointing) {
            (Some(recompute), _) => recompute,
            (None, Some(false)) => Recompute::None,
            (None, _) => Recompute::Full,
        }
    }

    /// Which tokens count in the loss.
    #[must_use]
    pub fn train_on(&self) -> TrainOn {
        match (self.data.train_on, self.data.format) {
            (Some(train_on), _) => train_on,
            (None, RecordFormat::Text) => TrainOn::All,
            (None, _) => TrainOn::Assistant,
        }
    }

    /// Whether the reference of a preference loss is not the base without its adapter: the adapter starts from a folder, trains modules or
    /// rows of tokens whole, those of new tokens too, or there is none.
    #[must_use]
    pub fn reference_is_precomputed_always(&self) -> bool {
        if self.data.adds_tokens() {
            return true;
        }
        let keeps_the_base = self.lora.as_ref().is_some_and(|lora| {
            let trains_base = lora.modules_to_save.as_ref().is_some_and(|names| !names.is_empty());
            lora.init_from.is_none()
                && lora.init_lora_weights.is_uniform()
                && !trains_base
                && lora.trainable_token_indices.is_none()
        });
        !(keeps_the_base || self.mode() != Mode::Full && self.lora.is_none())
    }

    /// Seed of the order of rows and of mixtures.
    #[must_use]
    pub fn data_seed(&self) -> u64 {
        self.data.data_seed.unwrap_or(self.seed)
    }

    /// Rows per forward pass of the evaluation.
    #[must_use]
    pub fn eval_micro_batch_size(&self) -> usize {
        self.eval.micro_batch_size.unwrap_or(self.train.micro_batch_size)
    }

    /// Rows per step of one rank: the effective batch.
    #[must_use]
    pub fn rows_per_step(&self) -> usize {
        self.train.micro_batch_size * self.train.gradient_accumulation
    }

    /// What this recipe would be if it said nothing but what it trains: model, data, and which weights in which form.
    #[must_use]
    pub fn with_default_keys(&self) -> RunConfig {
        let mut plain = RunConfig {
            name: String::new(),
            pack: yes(),
            max_seq_len: default_max_seq_len(),
            output_dir: default_output_dir(),
            seed: 0,
            train: TrainConfig::default(),
            eval: EvalConfig::default(),
            checkpoint: CheckpointConfig::default(),
            ..self.clone()
        };
        (plain.data.data_seed, plain.data.shuffle) = (None, true);
        plain
    }

    /// Whether there is anything to evaluate on.
    #[must_use]
    pub fn has_eval_data(&self) -> bool {
        let data = &self.data;
        data.eval_path.is_some() || data.eval_fraction.is_some() || !data.eval_sources.is_empty()
    }

    /// The same recipe with every default that depends on another key filled in, and one name for each setting.
    #[must_use]
    pub(super) fn resolved(&self) -> RunConfig {
        let mut config = self.clone();
        match self.length() {
            RunLength::Steps(steps) => config.train.steps = Some(steps),
            RunLength::Epochs(epochs) => config.train.epochs = Some(epochs),
        }
        match self.warmup() {
            Warmup::Steps(steps) => config.train.warmup_steps = Some(steps),
            Warmup::Ratio(ratio) => config.train.warmup_ratio = Some(ratio),
        }
        config.resolve_mode();
        config.train.learning_rate = Some(self.learning_rate());
        (config.train.log_every, config.train.log_every_epochs) = self.log_interval().keys();
        (config.eval.every_steps, config.eval.every_epochs) = self.eval_interval().keys();
        (config.checkpoint.every_steps, config.checkpoint.every_epochs) = self.checkpoint_interval().keys();
        config.train.recompute = Some(self.recompute());
        config.train.grad_checkpointing = Some(self.recompute().repeats_gemms());
        config.compute = Some(self.compute());
        config.train.bf16 = None;
        if let Some(bnb) = &mut config.bnb_4bit {
            bnb.compute_dtype = None;
        }
        config.data.train_on = Some(self.train_on());
        config.eval.micro_batch_size = Some(self.eval_micro_batch_size());
        config
    }

    /// Gives the mode its sections. A mode that they (or `base`) express is not written a second time, so that removing a section of a
    /// written-out recipe changes the mode.
    fn resolve_mode(&mut self) {
        let mode = self.mode();
        if mode != Mode::Full {
            self.lora.get_or_insert_default();
        }
        if mode == Mode::Qlora && self.base.is_none() {
            self.bnb_4bit.get_or_insert_default();
        }
        self.mode = (mode == Mode::Full).then_some(mode);
    }
}
