//! What a run leaves on disk: its folder, its checkpoints, and what decides whether a checkpoint can be resumed.
//!
//! Trade-off: one process writes; several ranks share the main rank's folder.

pub mod checkpoint;
pub mod checkpoint_folder;
pub mod identity;
pub mod manifest;
pub mod reference_identity;
pub mod resume_point;
pub mod run_folder;
