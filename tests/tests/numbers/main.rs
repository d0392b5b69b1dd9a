//! Tests that our numbers equal those of transformers, PEFT, torch and bitsandbytes, in f32, on every backend that runs without a card; and that
//! training in float16 follows f32.
//!
//! Trade-off: the models are tiny. `firebrick-kernels` compares large shapes between backends and reference implementations.

mod adapter;
mod backward;
mod division;
mod documents;
mod experts;
mod formats;
mod forward;
mod loss;
mod loss_scaling;
mod new_tokens;
mod nf4;
mod other_loss;
mod pissa;
mod preference;
mod quantized;
mod router_loss;
mod same_experts;
mod saved;
mod sinks;
mod text;
mod training;
