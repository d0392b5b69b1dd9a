#![doc = include_str!("../README.md")]

mod config;
mod error;
mod groups;
mod optimizer;
mod rules;
mod schedule;
mod state;

pub use config::{OptimizerConfig, OptimizerKind};
pub use error::OptimError;
pub use optimizer::{Optimizer, StepReport};
pub use rules::Granularity;
pub use rules::adamw::MIN_8BIT_ELEMENTS;
pub use schedule::{Schedule, ScheduleKind};
pub use state::{HostTensor, StateDict};
