//! The files of a run on disk: its folder, its checkpoints, and the checks whether a checkpoint can be resumed.

pub mod best;
pub mod checkpoint;
pub mod checkpoint_folder;
pub mod guard;
pub mod identity;
pub mod manifest;
mod optimizer_file;
pub mod reference_identity;
pub mod resume_point;
pub mod run_folder;
