//! Everything that can end a run early, in one enum: what, expected, got, where, and what to do next.
//!
//! Errors of the crates below pass through unchanged; `main` prints the chain once. Trade-off: amounts of memory are stored as
//! text, because only messages use them.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use firebrick_kernels::BackendKind;
use firebrick_precision::QuantFormat;

use crate::storage::StorageError;

/// Why a command could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The recipe.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The Hub or its cache.
    #[error(transparent)]
    Hub(#[from] firebrick_hub::HubError),
    /// The data or the tokenizer.
    #[error(transparent)]
    Data(#[from] firebrick_data::DataError),
    /// The model's config, or a LoRA target that it does not have.
    #[error(transparent)]
    Arch(#[from] firebrick_arch::ArchError),
    /// The model folder or an adapter.
    #[error(transparent)]
    Model(#[from] firebrick_model::ModelError),
    /// A saved optimizer state.
    #[error(transparent)]
    Optimizer(#[from] firebrick_optim::OptimError),
    /// The other ranks.
    #[error(transparent)]
    Parallel(#[from] firebrick_parallel::ParallelError),
    /// Another rank ended or failed while this one trained.
    #[error("{lost}. {advice}")]
    RankLost {
        /// What happened to which rank.
        lost: String,
        /// What is saved and how to continue.
        advice: String,
    },
    /// A rank that cannot write its part of a checkpoint where rank 0 writes.
    #[error(
        "rank {rank} does not see the folder {} of rank 0, where with train.zero_stage = {stage} every rank writes its \
         part of a checkpoint: set output_dir to a folder that all machines share under the same path, or \
         train.zero_stage = 0. Nothing was trained", folder.display()
    )]
    NotShared {
        /// The first such rank.
        rank: usize,
        /// The folder.
        folder: PathBuf,
        /// What ranks divide.
        stage: crate::config::ZeroStage,
    },
    /// A rank that sees the folder of rank 0, and cannot write its part of a checkpoint there.
    #[error(
        "rank {rank} sees the folder {} of rank 0 and cannot write to it, although with train.zero_stage = {stage} every \
         rank writes its part of a checkpoint there: give the user of that rank permission to write, or set \
         train.zero_stage = 0. Nothing was trained", folder.display()
    )]
    RankCannotWrite {
        /// The first such rank.
        rank: usize,
        /// The folder.
        folder: PathBuf,
        /// What ranks divide.
        stage: crate::config::ZeroStage,
    },
    /// A rank whose adapter has taken another part out of the base.
    #[error(
        "rank {rank} has taken another part out of the base than rank 0: with lora.init_lora_weights = \"pissa\" every \
         rank decomposes the weights itself, and devices of different kinds round differently. Use devices of one \
         kind, or start on one rank and continue from its checkpoint on all, or remove the key. Nothing was trained"
    )]
    StartDiffers {
        /// The first such rank.
        rank: usize,
    },
    /// More ranks than the machine or the backend can run.
    #[error("{option}: {problem}")]
    Ranks {
        /// The option that requested them.
        option: String,
        /// Why not, and what to do.
        problem: String,
    },
    /// The run folder or a checkpoint folder.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The backend is known, but this binary was built without it.
    #[error(
        "backend `{wanted}` is not in this binary, which contains {compiled}. Use one of these, or build another binary from the \
         sources: `cargo xtask train` builds what the recipe needs; by hand: cargo build -p firebrick-train --features {wanted}"
    )]
    NotCompiled {
        /// The requested backend.
        wanted: BackendKind,
        /// The names of those in the binary.
        compiled: String,
    },
    /// The backend is in the binary, but the machine has no device for it.
    #[error("backend `{wanted}` finds no device here: {looked_for}. {advice}")]
    NoDevice {
        /// The requested backend.
        wanted: BackendKind,
        /// What was looked for, and the library's message.
        looked_for: String,
        /// What would make it work.
        advice: &'static str,
    },
    /// A tracking server that does not take the run.
    #[error(transparent)]
    Mlflow(#[from] crate::metrics::MlflowError),
    /// 8-bit floats where there are none.
    #[error("compute = \"fp8\": {reason}. Write compute = \"bfloat16\"")]
    NoFp8 {
        /// What is in the way.
        reason: String,
    },
    /// A storage format that does not take the model's widths.
    #[error("base = \"{format}\": {module}: {source}")]
    BaseFormat {
        /// The format.
        format: QuantFormat,
        /// The first module that it does not take.
        module: String,
        /// What is wrong with its width.
        source: firebrick_precision::Error,
    },
    /// The plan needs more memory than there is.
    #[error("this run needs {needed} of memory, and {available}{breakdown}\n{advice}")]
    DoesNotFit {
        /// Needed bytes, formatted.
        needed: String,
        /// What is free where, and how much of it may be planned.
        available: String,
        /// The memory table, one line each.
        breakdown: String,
        /// The nearest change that fits.
        advice: String,
    },
    /// A disk on which the run could save nothing.
    #[error(
        "the disk of output_dir = \"{}\" has {free} free, and one checkpoint of this run takes {needed}: it would train and could save \
         nothing. Free some space, or set output_dir to a folder on another disk", folder.display()
    )]
    NoRoom {
        /// The folder.
        folder: PathBuf,
        /// Bytes of a checkpoint, formatted.
        needed: String,
        /// Free bytes, formatted.
        free: String,
    },
    /// A benchmark of documents that have nothing to predict.
    #[error(
        "{documents} documents do not fit into a row of {row_len} tokens: each needs at least two tokens, so that one can be \
         predicted from the other. Lower --documents or raise --seq"
    )]
    BenchDocuments {
        /// Documents per row.
        documents: usize,
        /// Tokens per row.
        row_len: usize,
    },
    /// Answers were to be compared, and the held-out data has none.
    #[error(
        "eval.exact_match_prompts: none of the {records} held-out records has a prompt and a complete answer: {reasons}. Hold out chat \
         records, raise max_seq_len or eval.max_new_tokens, or set the key to 0"
    )]
    NothingToAnswer {
        /// Held-out records.
        records: usize,
        /// Why not, with counts.
        reasons: String,
    },
    /// An operation of the backend computes wrong results.
    #[error(
        "the self-test of backend `{backend}` failed: {problem}. Results of this device cannot be trusted, so nothing was \
         trained. Reinstall the driver and the CUDA libraries in matching versions, and report it with this line; or train on \
         the CPU with backend = \"flex\""
    )]
    SelfTestFailed {
        /// The backend.
        backend: BackendKind,
        /// The operation, and how far it is off.
        problem: String,
    },
    /// The device ran out of memory although the plan expected the run to fit.
    #[error(
        "the device ran out of memory in {operation}: {message}. The plan expected this to fit; another process may be using \
         memory too. Expected was{table}\n{advice}"
    )]
    OutOfDeviceMemory {
        /// The operation that requested it.
        operation: String,
        /// The library's message.
        message: String,
        /// The plan's memory table.
        table: String,
        /// The next smaller run, and how to continue.
        advice: String,
    },
    /// The device failed for another reason.
    #[error(
        "the device failed in {operation}: {message}. {advice} If it fails again, look at the driver's log (`dmesg`, \
         `nvidia-smi -q`), reinstall the driver, or train on the CPU with backend = \"flex\""
    )]
    DeviceFailed {
        /// The operation.
        operation: String,
        /// The library's message.
        message: String,
        /// What is saved and how to continue.
        advice: String,
    },
    /// The loss or the gradient is not a number.
    #[error(
        "step {step}: loss is {loss}, gradient norm is {grad_norm}: training has diverged and was stopped. The last checkpoint \
         is untouched. Lower train.learning_rate, raise train.warmup_steps, or look at the rows of this step"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// Mean loss.
        loss: f32,
        /// Global norm.
        grad_norm: f32,
    },
    /// The trained weights are not numbers, or so large that their norm is none.
    #[error(
        "step {step}: its update left weights whose norm is {norm}: training has diverged and was stopped. Nothing of \
         this step is saved, and earlier checkpoints are untouched. Lower train.learning_rate, or raise \
         train.warmup_steps"
    )]
    WeightsNotFinite {
        /// The step, from 1.
        step: u64,
        /// Global norm of the trained weights.
        norm: f32,
    },
    /// The recipe describes a different run than the one that is resumed.
    #[error(
        "the checkpoint was made with {key} = {saved}, now it is {now}: a resumed run must be the same run. Undo the change, or \
         start a new run under another name, which goes on from this one's adapter with lora.init_from = \"runs/NAME/adapter\""
    )]
    Changed {
        /// The recipe's key.
        key: String,
        /// The checkpoint's value.
        saved: String,
        /// The value now.
        now: String,
    },
    /// A checkpoint of a version that counted other tokens of pairs in the cross entropy.
    #[error(
        "the checkpoint was made by a version that counted in the cross entropy of ORPO what the chat template writes \
         after the chosen answer, which this version leaves out: a resumed run must be the same run. Resume it with the \
         version of Firebrick that saved it, or start a new run under another name, which goes on from this one's \
         adapter with lora.init_from = \"runs/NAME/adapter\""
    )]
    OtherTargets,
    /// A preference run that is resumed would be measured against another model than before.
    #[error(
        "the reference of the checkpoint's preference loss has {key} = {saved}, now it is {now}: the reference is the \
         model before the first step, and a resumed run keeps it. Put back what the run started from, or start a new \
         run under another name"
    )]
    OtherReference {
        /// The part of the reference that differs.
        key: String,
        /// The checkpoint's value.
        saved: String,
        /// The value now.
        now: String,
    },
    /// The adapter that a preference run is measured against is not there.
    #[error(
        "the reference of this preference loss is the adapter that lora.init_from names, and `{}` cannot be read: \
         {source}. Put the adapter back: a resumed run needs it too",
        path.display()
    )]
    NoReference {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The first loss of preference training is not that of a model which is its own reference.
    #[error(
        "the first loss of pairs is {loss:.6}, and it must be ln 2 = 0.693147 within {tolerance:.0e}, because before \
         its first step the model is its own reference: what it was compared with is another model. {advice}"
    )]
    NotItsReference {
        /// The loss, without the cross entropy of the chosen.
        loss: f64,
        /// How far off rounding may be.
        tolerance: f64,
        /// Where the log-probabilities of the reference came from, and what to do.
        advice: String,
    },
    /// The tokenizer has ids that the model has no embedding for.
    #[error(
        "the tokenizer has {tokenizer} tokens, the model's embedding only {model} rows: they do not belong together. Use both \
         from the same folder"
    )]
    VocabularyTooSmall {
        /// Tokens.
        tokenizer: usize,
        /// Rows.
        model: usize,
    },
    /// A prompt is far longer than what the model can read.
    #[error(
        "a prompt has {tokens} tokens (with what the chat template writes, if it is rendered), more than {times} times \
         the {positions} positions of the model (max_position_embeddings): shorten the prompt, or use another template \
         if the prompt itself is short"
    )]
    PromptTooLong {
        /// Tokens.
        tokens: usize,
        /// How many times the positions are read.
        times: usize,
        /// Positions.
        positions: usize,
    },
    /// An adapter to continue from has rows for other tokens.
    #[error(
        "the adapter in {} has {} as {token:?}, which gets id {here} here: write data.new_tokens in the order in which it was \
         trained", adapter.display(), there.map_or("no token".to_owned(), |id| format!("token {id}"))
    )]
    OtherTokens {
        /// The folder.
        adapter: PathBuf,
        /// The token's text.
        token: String,
        /// Its id in this run.
        here: u32,
        /// Its id in the adapter's tokenizer.
        there: Option<u32>,
    },
    /// Messages of a chat cannot be read, or answers not be written.
    #[error("the terminal is gone: {0}")]
    Terminal(io::Error),
    /// A file of prompts that cannot be read as such.
    #[error("`{}`: {problem}", path.display())]
    Prompts {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// A key of sampling was typed, and nothing is sampled.
    #[error(
        "--{key} changes nothing: answers are greedy, which takes the most probable token. Type a --temperature above 0 too, such as \
         --temperature 1"
    )]
    GreedyIgnores {
        /// The key, as it was typed.
        key: &'static str,
    },
    /// A golden file lacks something or does not fit the model.
    #[error("`{}`: {problem}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// `verify` found a difference.
    #[error("logits differ by up to {largest:e}, above the tolerance of {tolerance:e}")]
    VerifyFailed {
        /// Largest absolute difference.
        largest: f32,
        /// What was allowed.
        tolerance: f32,
    },
}

impl RunError {
    /// Whether the numbers of a step are wrong, so that nothing of it may be saved.
    pub fn is_of_numbers(&self) -> bool {
        matches!(self, Self::NotFinite { .. } | Self::WeightsNotFinite { .. } | Self::NotItsReference { .. })
    }

    /// Whether there was no room on a disk for what was to be written.
    pub fn is_disk_full(&self) -> bool {
        if let Self::Storage(StorageError::DiskFull { .. } | StorageError::DiskOfOtherRankFull { .. }) = self {
            return true;
        }
        let mut causes = std::iter::successors(Some(self as &(dyn Error + 'static)), |&error| error.source());
        let is_full = |error: &io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        causes.any(|error| error.downcast_ref::<io::Error>().is_some_and(is_full))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_model::ModelError;

    use super::*;

    #[test]
    fn a_full_disk_is_recognized_in_every_error_and_nothing_else_is_taken_for_one() {
        let path = PathBuf::from("file");
        let errors = |kind: ErrorKind| -> [RunError; 3] {
            let source = || io::Error::from(kind);
            [
                StorageError::writing(Path::new("file"), 9, source()).into(),
                StorageError::io("rename to", Path::new("file"), source()).into(),
                ModelError::Io { action: "write", path: path.clone(), source: source() }.into(),
            ]
        };
        for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded] {
            assert!(errors(kind).iter().all(RunError::is_disk_full), "{kind}");
        }
        assert!(!errors(ErrorKind::PermissionDenied).iter().any(RunError::is_disk_full));
        assert!(RunError::from(StorageError::DiskOfOtherRankFull { path }).is_disk_full());
    }
}
