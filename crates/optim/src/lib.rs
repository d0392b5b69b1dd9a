#![doc = include_str!("../README.md")]

mod config;
mod loss_scale;
mod optimizer;
mod paging;
mod rules;
mod schedule;
mod state;

pub use config::{OptimizerConfig, OptimizerKind, TrainedWeights};
pub use loss_scale::{LossScaleState, LossScaling};
pub use optimizer::{Optimizer, StepReport, squared_norm};
pub use rules::PagedBytes;
pub use rules::adamw::MIN_8BIT_ELEMENTS;
pub use schedule::{Schedule, ScheduleKind};
pub use state::{HostTensor, OptimError, SavedTensor, StateDict};
