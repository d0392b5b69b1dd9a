//! Linear modules in groups that share an input, as a layer computes them.
//!
//! Queries, keys and values read the same normalized input, and so do gate and up: a backend multiplies a group at once. A group has parts (q, k, v:
//! what its consumer reads) and modules (what a run has as one weight). A module covers a range of the group's output columns, so a
//! checkpoint with one fused `qkv_proj` is one module over three parts.

use std::ops::Range;

use crate::naming::LayerPath;

/// The purpose of a group in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKind {
    /// What a mixer reads; of attention query, key and value projections, with parts q, k, v.
    MixerInput,
    /// Output projection of a mixer.
    MixerOutput,
    /// Gate and up projections; parts gate, up.
    GateUp,
    /// Down projection.
    Down,
    /// Router of a mixture of experts.
    Router,
    /// Gate and up projections of the experts; parts gate, up.
    ExpertGateUp,
    /// Down projections of the experts.
    ExpertDown,
    /// Gate and up projections of a shared expert; parts gate, up.
    SharedGateUp,
    /// Down projection of a shared expert.
    SharedDown,
    /// Gate of a shared expert's output, from the hidden size to 1.
    SharedGate,
    /// What multiplies a layer's own input, from the hidden size to the width of that (Gemma 4).
    PerLayerGate,
    /// From the product to the hidden size.
    PerLayerProjection,
}

impl GroupKind {
    /// Returns whether the group decides about experts: small, and multiplied in the compute format whatever the others are.
    pub fn decides(self) -> bool {
        matches!(self, Self::Router | Self::SharedGate)
    }
}

/// Modules that share an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Its purpose in the layer.
    pub kind: GroupKind,
    /// Number of matrices below each other in each module, one per expert; `None`: one matrix, which every row is multiplied with.
    pub experts: Option<usize>,
    /// Rows that a token has in its input: one, or one for each of its experts.
    pub rows: usize,
    /// Width of the shared input.
    pub in_features: usize,
    /// Widths of the outputs, side by side; of one expert.
    pub parts: Vec<usize>,
    /// The modules that compute them, in column order.
    pub modules: Vec<ModuleSpec>,
}

/// A linear module: one weight of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSpec {
    /// Hugging Face's module path, e.g. `model.layers.0.self_attn.q_proj`; of a stack without the expert's number, e.g.
    /// `model.layers.0.mlp.experts.gate_proj`.
    pub path: String,
    /// Columns of the group's output that it computes; of one expert.
    pub columns: Range<usize>,
    /// Whether it has a bias.
    pub bias: bool,
    /// What a checkpoint stores the rows of its weight as, in order: itself, or a matrix per expert.
    pub pieces: Vec<PieceSpec>,
    /// Order of its outputs in PEFT's adapter, if LoRA adapts it as one parameter of all experts ([`crate::LoraConfig::target_parameters`]); `None`:
    /// LoRA adapts each piece by itself.
    pub parameter: Option<OutputOrder>,
}

/// Consecutive rows of a module's weight that a checkpoint stores under one name, and the smallest unit that LoRA targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceSpec {
    /// Hugging Face's module path, e.g. `model.layers.0.mlp.experts.3.gate_proj`.
    pub path: String,
    /// Number of rows.
    pub rows: usize,
}

impl PieceSpec {
    /// Returns the name of the weight `[rows, in]` in a checkpoint.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.path)
    }

    /// Returns the name of the bias `[rows]` in a checkpoint.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.path)
    }
}

impl ModuleSpec {
    /// Returns the width of the module's output.
    pub fn out_features(&self) -> usize {
        self.columns.len()
    }

    /// Returns the rows of its weight: the width of its output, times the number of experts of a stack.
    pub fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.rows).sum()
    }

    /// Returns the path by which LoRA's settings name the module: its own, or that of a stack's first matrix. All matrices of a stack have the same
    /// settings ([`crate::LoraConfig::resolve`]).
    ///
    /// # Panics
    /// If the module has no pieces, which no family reads.
    pub fn lora_path(&self) -> &str {
        if self.parameter.is_some() { &self.path } else { &self.pieces.first().expect("a module has rows").path }
    }

    /// Returns the last part of the path, e.g. `q_proj`.
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    /// Returns the last two parts of the path, e.g. `mlp.gate_proj`.
    pub fn name_in_parent(&self) -> &str {
        let start = self.path.rmatch_indices('.').nth(1).map_or(0, |(dot, _)| dot + 1);
        &self.path[start..]
    }

    /// Returns the name of the weight `[rows, in]`; on disk that of its pieces.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.path)
    }

    /// Returns the name of the bias `[rows]`; on disk that of its pieces.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.path)
    }

    /// Returns what LoRA targets: its pieces as modules, or the module itself. Columns are those of the group, and begin again with each expert.
    pub fn single_modules(&self) -> Vec<Self> {
        if self.parameter.is_some() {
            return vec![self.clone()];
        }
        let mut start = 0;
        let single = |piece: &PieceSpec| {
            let first = self.columns.start + start % self.out_features().max(1);
            start += piece.rows;
            let (path, columns, pieces) = (piece.path.clone(), first..first + piece.rows, vec![piece.clone()]);
            Self { path, columns, pieces, ..*self }
        };
        self.pieces.iter().map(single).collect()
    }
}

impl GroupSpec {
    /// Returns the width of all outputs together; of one expert.
    pub fn out_features(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Counts the parameters of the weights of all modules that a row is multiplied with: those of one expert.
    pub fn weight_parameters(&self) -> u64 {
        self.out_features() as u64 * self.in_features as u64
    }

    /// Returns the number of matrices in each module.
    pub fn matrices(&self) -> usize {
        self.experts.unwrap_or(1)
    }
}

/// Builds a group of a layer from modules by name and width, side by side; one module with the name `fused` if that is given.
pub(crate) fn group(
    at: LayerPath,
    kind: GroupKind,
    in_features: usize,
    modules: &[(&str, usize)],
    fused: Option<&str>,
    bias: bool,
) -> GroupSpec {
    let parts: Vec<usize> = modules.iter().map(|(_, width)| *width).collect();
    let all = fused.map(|name| [(name, parts.iter().sum())]);
    let modules = all.as_ref().map_or(modules, |all| &all[..]);
    let mut end = 0;
    let modules = modules
        .iter()
        .map(|(name, width)| {
            let start = end;
            end += width;
            let path = at.name(name);
            let pieces = vec![PieceSpec { path: path.clone(), rows: *width }];
            ModuleSpec { path, columns: start..end, bias, pieces, parameter: None }
        })
        .collect();
    GroupSpec { kind, experts: None, rows: 1, in_features, parts, modules }
}

/// Order of the outputs of a parameter of all experts in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputOrder {
    /// That of the rows of an expert in a run.
    AsInRun,
    /// Gate's and up's in turn (gpt-oss), where the rows of a run are gate's and then up's.
    InTurn,
}

impl OutputOrder {
    /// Returns which of the parameter's outputs a row of an expert's matrix in a run computes.
    pub fn output_of(self, row: usize, rows: usize) -> usize {
        match self {
            Self::AsInRun => row,
            Self::InTurn => 2 * (row % (rows / 2)) + row / (rows / 2),
        }
    }
}
