#![doc = include_str!("../README.md")]

mod adamw;
mod error;
mod schedule;
mod state;

pub use adamw::{AdamWConfig, MomentFormat, Optimizer, SMALLEST_EIGHT_BIT, StepReport};
pub use error::OptimError;
pub use schedule::{Schedule, ScheduleKind};
pub use state::{HostTensor, StateData};
