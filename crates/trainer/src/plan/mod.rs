//! What was decided for a run: every value with its reason, printed before the first weight is read and saved as `plan.toml`.
//!
//! The plan follows from the recipe (what was typed), the hardware profile (what was found), the model's config and the size
//! of the data. The run reads the plan and nothing else; the recipe is only saved next to it.
//! Trade-off: the plan is made after the data has been read, because steps and memory depend on it.

mod adapter;
mod answers;
mod backend;
mod base;
mod chosen;
mod decide;
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
mod gemm_algorithms;
mod kept_weights;
#[cfg(test)]
mod measured_steps;
mod paging;
mod preference;
mod schedule;
mod shapes;
mod values;
mod warnings;
mod workers;

pub use answers::MAX_PROMPTS_AT_ONCE;
pub use backend::{choose_backend, compute_format};
pub use chosen::Chosen;
pub use divided::weight_owners;
pub use fit::SmallerRun;
pub use forecast::Forecast;
pub use preference::PlannedReference;
pub use values::{DataShape, Plan, PlanInputs, PlanRequest};
pub use workers::tokenizing;
