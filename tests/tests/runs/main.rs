//! Whole runs in this process: what they learn and leave behind, how they go on, what they refuse.
//!
//! Gives up signals and the full disk: `firebrick-train` tests those beside their code.

mod folder;
mod learning;
mod refusals;
mod resume;
