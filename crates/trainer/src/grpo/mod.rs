//! GRPO without a model: advantages of rewards, and the loss of completions from their log-probabilities. All of it is host arithmetic in f64, so that
//! it is the same on every backend; the model's part is `firebrick_model::policy`.
//!
//! Group relative policy optimization: <https://arxiv.org/abs/2402.03300>; DAPO: <https://arxiv.org/abs/2503.14476>; Dr. GRPO:
//! <https://arxiv.org/abs/2503.20783>; GSPO: <https://arxiv.org/abs/2507.18071>. Values and names follow TRL's `GRPOTrainer`.

mod advantage;
mod loss;
pub mod reward;

pub use advantage::{ScaleRewards, Scored, advantages, reward_of};
pub use loss::{Completion, Denominators, ImportanceSampling, LossType, Objective, Sums};
