//! The inputs of a plan: the recipe, the machine, the model, the shape of the data, and the command's requests.
//!
//! Trade-off: the data is described by the maxima over all rows, so data with one odd row is planned too large.

use firebrick_arch::ModelConfig;
use firebrick_data::PackedDataset;
use firebrick_hwprofile::human::grouped;
use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_kernels::Recompute;
use firebrick_precision::FloatType;
use serde::{Deserialize, Serialize};

use crate::config::{GrpoSection, RunConfig};

/// The rows that a run trains on, as far as a plan depends on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataShape {
    /// Rows per epoch.
    pub rows: usize,
    /// Tokens per row, padding included.
    pub row_len: usize,
    /// Tokens of the longest document.
    pub longest_document: usize,
    /// Maximum number of documents in a row, the padding at its end included.
    pub documents_per_row: usize,
    /// Maximum number of tokens in a row that count in the loss.
    pub loss_tokens_per_row: usize,
    /// Whether any of the data is rendered with the chat template.
    pub has_chats: bool,
    /// A sentence about how well documents fill the rows.
    pub report: String,
}

impl DataShape {
    /// Returns the shape of packed data. `has_chats`: whether any of it is rendered with the chat template.
    pub fn new(data: &PackedDataset, has_chats: bool) -> Self {
        let report = data.report();
        // The padding at the end of a row is a document too.
        let padding = |row: usize| usize::from(data.row_tokens(row) < data.row_len());
        let documents = |row: usize| data.row_documents(row).count() + padding(row);
        let counted = |document: usize| data.documents().entry(document).loss_tokens as usize;
        let loss_tokens = |row: usize| data.row_documents(row).map(counted).sum::<usize>();
        Self {
            rows: data.rows(),
            row_len: data.row_len(),
            longest_document: report.lengths.longest,
            documents_per_row: (0..data.rows()).map(documents).max().unwrap_or(1),
            // In pairs the tokens of the prompt may count too.
            loss_tokens_per_row: match data.pairs() {
                0 => (0..data.rows()).map(loss_tokens).max().unwrap_or(0),
                _ => data.row_len(),
            },
            has_chats,
            report: report.to_string(),
        }
    }

    /// Returns the shape of the completions of prompts: as many rows as there may be, and as long as they may be.
    pub fn of_completions(self, grpo: &GrpoSection, config: &RunConfig) -> Self {
        let (row_len, generations) = (config.max_seq_len(), grpo.num_generations);
        let report = format!(
            "completions of up to {} tokens, {generations} for each of {}",
            grpo.max_completion_length,
            grouped(&self.rows.to_string()) + " prompts"
        );
        Self {
            rows: self.rows * generations,
            row_len,
            longest_document: (self.longest_document + grpo.max_completion_length).min(row_len),
            documents_per_row: if config.pack { row_len.div_ceil(4) } else { 2 },
            loss_tokens_per_row: row_len,
            report,
            ..self
        }
    }

    /// Rows of an epoch of data that was not read.
    pub const UNREAD_ROWS: usize = 10_000;

    /// Returns the shape of data that was not read: rows without padding, all of which counts in the loss. Packed rows hold documents of up to half
    /// a row.
    pub fn of_full_rows(config: &RunConfig) -> Self {
        let row_len = config.max_seq_len();
        let report = format!(
            "{} full rows of {} tokens are assumed",
            grouped(&Self::UNREAD_ROWS.to_string()),
            grouped(&row_len.to_string())
        );
        Self {
            rows: Self::UNREAD_ROWS,
            row_len,
            longest_document: row_len,
            documents_per_row: if config.pack { 2 } else { 1 },
            loss_tokens_per_row: row_len,
            has_chats: false,
            report,
        }
    }
}

/// The inputs of a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The recipe as typed.
    pub config: &'a RunConfig,
    /// The machine as found.
    pub profile: &'a HardwareProfile,
    /// The model's config.
    pub model: &'a ModelConfig,
    /// The rows to train on.
    pub data: &'a DataShape,
    /// Number of processes that train together.
    pub world_size: usize,
    /// The requests on the command line.
    pub request: &'a PlanRequest,
}

/// A command's requests in addition to the recipe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlanRequest {
    /// The machine to plan for; `None`: this one.
    pub machine: Option<&'static AcceleratorSpec>,
    /// Plan a run that does not fit into memory all the same.
    pub force: bool,
    /// Price of the machine per hour, in any currency.
    pub price_per_hour: Option<f64>,
    /// Processes of the run that share this machine; 0 counts as one.
    pub local_ranks: usize,
    /// What the plan of the run that is continued decided; kept where the recipe leaves it open.
    pub decided: Option<DecidedMemory>,
}

impl PlanRequest {
    /// Returns the machine: the named one, or this one as detected.
    pub fn profile(&self) -> HardwareProfile {
        let mut profile = match self.machine {
            Some(spec) => HardwareProfile::of_machine(spec),
            // Only wgpu knows Metal's GPUs.
            None if cfg!(target_os = "macos") => HardwareProfile::detect_with_adapters(),
            None => HardwareProfile::detect(),
        };
        // Ranks share the cores and the memory of their machine.
        let ranks = self.local_ranks.max(1);
        profile.cpu.logical_cores = (profile.cpu.logical_cores / ranks).max(1);
        profile.memory.available_bytes /= ranks as u64;
        profile.memory.total_bytes /= ranks as u64;
        profile
    }
}

/// What a run saves, copies and keeps converted, as its plan decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecidedMemory {
    /// What the backward of a layer recomputes.
    pub recompute: Recompute,
    /// Whether what layers save waits in host memory.
    pub offload: bool,
    /// Bytes of weights that stay as GEMMs read them; `None` if none are converted.
    pub kept_weights_bytes: Option<u64>,
    /// Rows of a micro-batch.
    pub micro_batch_size: usize,
    /// Format of the sums of gradients of parameters in bf16; `None` if there are no such parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradients: Option<FloatType>,
}
