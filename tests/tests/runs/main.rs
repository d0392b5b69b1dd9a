//! Whole runs in this process: what they learn and leave behind, how they go on, what they refuse, how they are timed.
//!
//! Gives up signals and the full disk: `firebrick-train` tests those beside their code.

mod bench;
mod data;
mod folder;
mod learning;
mod refusals;
mod resume;
