//! Our numbers are those of transformers, PEFT, torch and bitsandbytes, on the CPU in f32.
//!
//! Gives up the other backends: `tests/backends.rs` holds them to this one.

mod backward;
mod documents;
mod forward;
mod nf4;
mod text;
mod training;
