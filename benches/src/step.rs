//! The training step of a shipped recipe, as the run loop takes it, and how long it takes on a backend.
//!
//! Weights are random: their values do not change the work, and nothing has to be downloaded or trained first. All steps train the same
//! micro-batches, so that the GEMMs of the step are known exactly and what varies is the machine.
//! Trade-off: the loader, the log and the checkpoints are left out; the run loop keeps them off the step's path, or they are rare.

use std::path::{Path, PathBuf};

use firebrick_data::{Batch, Cursor};
use firebrick_kernels::Kernels;
use firebrick_optim::{Schedule, ScheduleKind};
use firebrick_parallel::Ranks;
use firebrick_train::bench::{Spread, timed};
use firebrick_trainer::RunError;
use firebrick_trainer::config::{BackendChoice, RunConfig};
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::assemble::{self, WeightSource};
use firebrick_trainer::run::prepare::{Prepared, prepare_for};
use firebrick_trainer::run::step::StepNumbers;

use crate::rate::wait;
use crate::shapes::{MicroBatchShape, Products, StepShape};

/// Steps before the first one that counts: pools fill, kernels compile, clocks rise.
pub const WARM_UP: usize = 3;

/// A recipe with its data, ready to be stepped on any backend.
pub struct Workload {
    /// The recipe's name.
    pub name: String,
    /// Recipe, plan, model description and packed sequences.
    pub prepared: Prepared,
    /// The micro-batches of every step: the first that the recipe's seed gives.
    pub micro_batches: Vec<Batch>,
}

/// What timing the steps gave.
pub struct StepTimes {
    /// Seconds of a step.
    pub seconds: Spread,
    /// Mean loss of the first step and of the last: falling, or what was timed is no training.
    pub losses: [f32; 2],
}

impl Workload {
    /// Reads `configs/{name}.toml` and its data. `Ok(None)` where the data has not been generated.
    ///
    /// # Errors
    /// Anything that stops a run of the recipe before its weights are read.
    pub fn read(name: &str) -> Result<Option<Self>, RunError> {
        // A bench runs in its own folder, a recipe's paths start at the workspace's.
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let below_root = |path: &str| root.join(path);
        let mut config = RunConfig::load(&below_root(&format!("configs/{name}.toml")), &[])?;
        let data = below_root(&config.data.path);
        if !data.exists() {
            return Ok(None);
        }
        config.data.path = text(data);
        config.data.eval_path = None;
        config.model = text(below_root(&config.model));
        config.backend = BackendChoice::Auto;
        let prepared = prepare_for(config, 1, &PlanRequest::default())?;
        let micro_batches = first_micro_batches(&prepared);
        Ok(Some(Self { name: name.to_owned(), prepared, micro_batches }))
    }

    /// Tokens of a step without padding, as the run loop counts them.
    pub fn tokens(&self) -> usize {
        self.micro_batches.iter().map(Batch::tokens).sum()
    }

    /// The GEMMs of a step.
    pub fn products(&self) -> Products {
        let plan = &self.prepared.plan;
        let step = StepShape {
            model: self.prepared.model_config.spec.clone(),
            lora: plan.lora.value.clone(),
            recompute: plan.recompute.value,
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
        };
        let shapes: Vec<_> = self.micro_batches.iter().map(MicroBatchShape::of).collect();
        Products::of_step(&step, &shapes)
    }

    /// Times `steps` steps after the warm-up. A step has ended when its loss was read and the device is idle.
    ///
    /// # Errors
    /// A LoRA target that the model does not have, or a loss that is not finite.
    pub fn time<B: Kernels>(&self, steps: usize) -> Result<StepTimes, RunError> {
        let device = B::Device::default();
        let Prepared { plan, model_config, .. } = &self.prepared;
        let mut trainer =
            assemble::trainer::<B>(plan, model_config, WeightSource::Seed, Ranks::single(), &device, &mut |_| ())?;
        // Full rate from the first step on: a bench is too short for the recipe's warm-up.
        trainer.schedule = Schedule { kind: ScheduleKind::Constant, warmup_steps: 0, ..trainer.schedule };
        let mut samples = Vec::with_capacity(steps);
        let mut losses = Vec::with_capacity(WARM_UP + steps);
        for index in 0..WARM_UP + steps {
            let (seconds, loss) = timed(|| -> Result<f32, RunError> {
                let outcome = trainer.step(&self.micro_batches)?;
                let step = outcome.step;
                let StepNumbers { loss, grad_norm, .. } = outcome.read();
                wait::<B>(&device);
                if loss.is_finite() && grad_norm.is_finite() {
                    Ok(loss)
                } else {
                    Err(RunError::NotFinite { step, loss, grad_norm })
                }
            });
            losses.push(loss?);
            if index >= WARM_UP {
                samples.push(seconds);
            }
        }
        Ok(StepTimes { seconds: Spread::of(samples), losses: [losses[0], losses[losses.len() - 1]] })
    }
}

fn text(path: PathBuf) -> String {
    path.to_string_lossy().into_owned()
}

fn first_micro_batches(prepared: &Prepared) -> Vec<Batch> {
    let (plan, rows) = (&prepared.plan, prepared.train.clone());
    let mut loader = assemble::loader(plan, rows, &Ranks::single(), Cursor::default());
    let count = plan.gradient_accumulation.value;
    (0..count).map(|_| loader.next_batch().expect("the loader repeats its epochs without end").0).collect()
}
