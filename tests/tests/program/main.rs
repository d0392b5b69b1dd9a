//! The program `firebrick` as users and launchers start it: installed, in a terminal, on several ranks, with a Hub, on disks that are full or slow.
//!
//! Trade-off: one binary for all that start processes, since each links every backend.
#![cfg(all(unix, feature = "flex"))]

#[cfg(target_os = "linux")]
mod full_disk;
mod hub;
mod installed;
mod launchers;
#[cfg(target_os = "linux")]
mod mistakes;
mod ranks;
mod saving;
mod terminal;
