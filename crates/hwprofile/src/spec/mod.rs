//! The makers' figures for accelerators: memory, bandwidth, dense rates per format, links, power, features; each with its source.
//!
//! All rates are dense: makers print twice as much, with 2:4 sparsity, which training does not use. If a card has two rates by accumulator, the table
//! has the one with f32 accumulation.

mod capability;
mod figure;
mod find;
mod types;

pub use capability::CardClocks;
pub use figure::{Figure, Origin, Source, Voice};
pub use find::UnknownMachine;
pub use types::{AcceleratorSpec, DenseRates, Engine, Feature, HardwareKind, Link, Maker, MathFormat};
