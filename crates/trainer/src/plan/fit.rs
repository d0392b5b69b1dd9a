//! Decides whether a run fits into memory, and finds the nearest change that makes it fit.
//!
//! Two memories count: the one that holds the tensors, and that of the host, where what layers save and optimizer state may wait.
//! Trade-off: a tenth of the free memory is left unplanned for what the estimate cannot see, so a run that would just fit is refused.

use firebrick_arch::ModelSpec;
use firebrick_hwprofile::memory::{MemoryEstimate, MemoryLine, human_bytes};
use firebrick_hwprofile::spec::HardwareKind;
use firebrick_hwprofile::{Gpu, HardwareProfile};
use firebrick_kernels::{
    BackendKind, BaseStorage, EvaluatedRows, PLANNED_SHARED_BYTES, Recompute, TrainingShape, estimate,
};
use firebrick_precision::Format;

use crate::config::to_name;
use crate::error::RunError;
use crate::plan::Chosen;

/// The fraction of the free memory that a plan may use. The estimate leaves out rounding and what a backend reserves for itself.
const USABLE: f64 = 0.9;

/// The fraction of a card that counts where every run has to be decided alike: drivers and displays take some of it.
const FREE_IN_EVERY_RUN: f64 = 0.98;

/// A run counts as smaller if it needs at most this fraction of the failed run's memory: the plan is no more exact than that.
const NOTABLY_LESS: f64 = 0.95;

/// Shared memory of a thread block on cards of compute capability 7.5, in bytes.
const TURING_SHARED_BYTES: usize = 64 << 10;

/// Tokens of the shortest row that is proposed; longer ones are multiples of it.
const SHORTEST_ROW: usize = 256;

/// A model, a backend and a machine to train it on.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) profile: &'a HardwareProfile,
    pub(super) backend: BackendKind,
    pub(super) spec: &'a ModelSpec,
    /// Whether the recipe allows what layers save to wait in host memory if the backend supports that.
    pub(super) may_offload: bool,
    pub(super) ranks: usize,
    /// Bytes of a card that the recipe limits a run to.
    pub(super) limit: Option<u64>,
    /// The memory of a card that counts.
    pub(super) room: UsableMemory,
}

/// What of a card's memory a run may use. Of unified memory and of the host's it is what is free, unless all counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UsableMemory {
    /// All that the card has.
    Whole,
    /// What other programs leave.
    Free,
    /// What the card and the host have, but for a share that is never free: what is decided by that is the same in every run on a machine.
    Total,
}

impl Case<'_> {
    /// Returns the same case by what the card has, whatever is free.
    pub(super) fn whole(&self) -> Self {
        let room = if self.room == UsableMemory::Total { UsableMemory::Total } else { UsableMemory::Whole };
        Self { room, ..*self }
    }

    /// Returns the bytes that a run may use where the backend's tensors live, and the name of that place.
    pub(super) fn available(&self) -> (u64, &'static str) {
        let limited = |bytes: u64| self.limit.map_or(bytes, |limit| limit.min(bytes));
        match (self.card(), self.room) {
            (Some(card), UsableMemory::Total) => {
                (limited((card.memory_total_bytes as f64 * FREE_IN_EVERY_RUN) as u64), "on the card")
            }
            (Some(card), _) if card.unified_memory => {
                (limited(card.memory_free_bytes), "for the GPU in unified memory")
            }
            (Some(card), UsableMemory::Whole) => (limited(card.memory_total_bytes), "on the card"),
            (Some(card), UsableMemory::Free) => (limited(card.memory_free_bytes), "on the card"),
            (None, _) => (self.profile.memory.available_bytes, "in host memory"),
        }
    }

    /// Returns the kind of the accelerator that the run would use; `None` on a processor, and for a card that does not report it.
    pub(super) fn hardware(&self) -> Option<HardwareKind> {
        self.card()?.kind()
    }

    /// Returns the shared memory of a thread block, in bytes, that the run is planned for.
    pub(super) fn shared_bytes(&self) -> usize {
        match self.hardware() {
            Some(HardwareKind::Turing) => TURING_SHARED_BYTES,
            _ => PLANNED_SHARED_BYTES,
        }
    }

    /// Returns whether the card has Hopper's own matrix products.
    pub(super) fn has_wgmma(&self) -> bool {
        self.hardware() == Some(HardwareKind::Hopper)
    }

    /// Returns the accelerator that the backend computes on, if its memory is known.
    pub(super) fn card(&self) -> Option<&Gpu> {
        match self.backend {
            BackendKind::Cuda | BackendKind::Wgpu if self.profile.named.is_some() => self.profile.gpus.first(),
            BackendKind::Cuda => self.profile.cuda_card(),
            // wgpu reports neither which of several it took nor its memory; software devices share the host's.
            BackendKind::Wgpu => match self.profile.gpus.as_slice() {
                [only] => Some(only),
                several => several.iter().find(|gpu| gpu.unified_memory),
            },
            BackendKind::Flex | BackendKind::Candle => None,
        }
    }

    /// Returns the bytes that a run leaves free of those that a plan may use.
    pub(super) fn left(&self, training: &TrainingShape) -> u64 {
        let usable = (self.available().0 as f64 * USABLE) as u64;
        usable.saturating_sub(self.estimate(training).total_bytes())
    }

    /// Returns the bytes of host memory that a run with this estimate leaves free of those that a plan may use.
    pub(super) fn left_on_host(&self, estimate: &MemoryEstimate) -> u64 {
        let usable = (self.profile.memory.available_bytes as f64 * USABLE) as u64;
        // Without a card of known memory, the tensors may be in host memory.
        let is_apart = self.card().is_some_and(|card| !card.unified_memory);
        let tensors = if is_apart { 0 } else { estimate.total_bytes() };
        usable.saturating_sub(tensors.saturating_add(estimate.host_bytes()))
    }

    pub(super) fn fits(&self, training: &TrainingShape) -> bool {
        self.shortage(&self.estimate(training)).is_none()
    }

    /// Returns the peak bytes of a run where the tensors live.
    pub(super) fn bytes(&self, training: &TrainingShape) -> u64 {
        self.estimate(training).total_bytes()
    }

    /// Returns both, from one estimate.
    pub(super) fn bytes_and_fit(&self, training: &TrainingShape) -> (u64, bool) {
        let estimate = self.estimate(training);
        (estimate.total_bytes(), self.shortage(&estimate).is_none())
    }

    pub(super) fn estimate(&self, training: &TrainingShape) -> MemoryEstimate {
        let mut estimate = estimate(self.backend, self.spec, training);
        estimate.lines.extend(self.backend.memory_line_of_ranks(self.ranks));
        estimate
    }

    fn shortage<'e>(&self, estimate: &'e MemoryEstimate) -> Option<Shortage<'e>> {
        let (free, place) = self.available();
        let memory = self.profile.memory;
        let device = Shortage { needed: estimate.total_bytes(), free, place, lines: &estimate.lines };
        let host = Shortage {
            needed: estimate.host_bytes(),
            free: if self.room == UsableMemory::Total { memory.total_bytes } else { memory.available_bytes },
            place: "in host memory",
            lines: &estimate.host_lines,
        };
        [device, host].into_iter().find(|memory| memory.needed as f64 > memory.free as f64 * USABLE)
    }
}

struct Shortage<'e> {
    needed: u64,
    free: u64,
    place: &'static str,
    lines: &'e [MemoryLine],
}

impl Shortage<'_> {
    /// Returns a text about the memory that is free.
    fn room(&self) -> String {
        let (free, usable) = (human_bytes(self.free), human_bytes((self.free as f64 * USABLE) as u64));
        format!("{free} are free {}, of which {usable} may be planned", self.place)
    }
}

/// Returns the estimate of a run that fits, or that is forced although it does not; in that case with the shortage.
///
/// # Errors
/// A run that does not fit, with the table and the nearest change that fits.
pub(super) fn check(
    case: &Case<'_>,
    training: &TrainingShape,
    accumulation: usize,
    force: bool,
) -> Result<(MemoryEstimate, Option<Chosen<bool>>), RunError> {
    let estimate = case.estimate(training);
    let Some(short) = case.shortage(&estimate) else { return Ok((estimate, None)) };
    if force {
        let why =
            format!("--force: this run needs {}, and {}: expect it to fail", human_bytes(short.needed), short.room());
        return Ok((estimate, Some(Chosen::new(true, why))));
    }
    let mut candidates = smaller(case, training, accumulation).into_iter();
    let change = candidates.find(|(_, training)| case.shortage(&case.estimate(training)).is_none());
    let advice = match change {
        Some((settings, training)) => {
            let needed = human_bytes(case.estimate(&training).total_bytes());
            format!("The nearest change that fits needs {needed}: {settings}")
        }
        None => beyond_micro_batches(case, training, accumulation),
    };
    let (needed, available, breakdown) = (human_bytes(short.needed), short.room(), table(short.lines));
    Err(RunError::Refused(format!("this run needs {needed} of memory, and {available}.\n{advice}{breakdown}")))
}

/// Returns the change to make if no micro-batch fits: shorter rows if they do, else what takes less memory for any rows.
fn beyond_micro_batches(case: &Case<'_>, training: &TrainingShape, accumulation: usize) -> String {
    // The longest row, shorter than the run's, that fits alone; memory grows with it.
    let (mut fits, mut is_too_long) = (0_usize, training.row_len.div_ceil(SHORTEST_ROW));
    while is_too_long - fits > 1 {
        let middle = fits.midpoint(is_too_long);
        if case.fits(&of_one_row(case, training, middle * SHORTEST_ROW)) {
            fits = middle;
        } else {
            is_too_long = middle;
        }
    }
    if fits > 0 {
        let length = fits * SHORTEST_ROW;
        let accumulation = accumulation * training.micro_batch_size;
        return format!(
            "No smaller micro-batch fits, but shorter rows do, which cut more documents: --set max_seq_len={length} --set \
             train.micro_batch_size=1 --set train.gradient_accumulation={accumulation} --set train.recompute=full"
        );
    }
    let left = human_bytes(case.bytes(&of_one_row(case, training, SHORTEST_ROW.min(training.row_len))));
    format!(
        "One short row would still need {left}, so the rows are not what is too large: {}",
        other_runs(case, training)
    )
}

/// Returns the run with one row of this length at a time, and with every other setting that takes less of the device.
fn of_one_row(case: &Case<'_>, training: &TrainingShape, row_len: usize) -> TrainingShape {
    let mut next = training.clone();
    (next.micro_batch_size, next.documents, next.row_len) = (1, 1, row_len);
    next.longest_document = next.longest_document.min(row_len);
    next.evaluation.rows = EvaluatedRows::Fixed(1);
    next.recompute = Recompute::Full;
    next.offload = case.backend == BackendKind::Cuda && case.may_offload;
    next
}

/// Returns advice that saves memory whatever the rows are, nearest first.
fn other_runs(case: &Case<'_>, training: &TrainingShape) -> String {
    let mut advice = Vec::new();
    if training.optimizer_bytes > 4 * training.trained_parameters(case.spec) {
        advice.push("train.optimizer = \"adamw_8bit\" keeps a quarter of the optimizer's state");
    }
    if case.ranks == 1 && case.backend == BackendKind::Cuda {
        advice.push("several ranks divide the model with train.zero_stage = 3");
    }
    if training.base == BaseStorage::Trained && case.backend == BackendKind::Cuda {
        advice.push(
            "train.weights = \"bfloat16_exact\" with train.gradients = \"bfloat16\" stores both in half the memory",
        );
    }
    match (&training.lora, training.base) {
        (None, _) => advice.push("[lora] trains adapters alone, and [bnb_4bit] keeps their base in 4 bits"),
        (_, BaseStorage::Frozen(Format::Quantized(_))) => {}
        _ => advice.push("[bnb_4bit] keeps the base in 4 bits"),
    }
    advice.push("else take a smaller model or a larger device");
    advice.join("; ")
}

/// A run that needs less memory than the planned one, in case that one runs out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmallerRun {
    /// The memory that the planned run is expected to need, line by line.
    pub table: String,
    /// The settings to change, and the memory they are expected to need; `None` if nothing is left to change. A checkpoint of the planned run can be
    /// resumed with them.
    pub settings: Option<String>,
}

pub(super) fn next_smaller(case: &Case<'_>, training: &TrainingShape, accumulation: usize) -> SmallerRun {
    let planned = case.estimate(training);
    let next = smaller(case, training, accumulation).into_iter().find_map(|(settings, training)| {
        let needed = case.estimate(&training).total_bytes();
        (needed as f64 <= NOTABLY_LESS * planned.total_bytes() as f64).then_some((settings, needed))
    });
    SmallerRun {
        table: table(&planned.lines),
        settings: next
            .map(|(settings, needed)| format!("{settings}, which is expected to need {}", human_bytes(needed))),
    }
}

fn table(lines: &[MemoryLine]) -> String {
    lines.iter().map(|line| format!("\n  {:<34} {:>10}  {}", line.what, human_bytes(line.bytes), line.why)).collect()
}

/// Returns smaller runs with the same effective batch, nearest first: layers save less, then save it elsewhere, then fewer rows at a time.
fn smaller(case: &Case<'_>, training: &TrainingShape, accumulation: usize) -> Vec<(String, TrainingShape)> {
    let is_cuda = case.backend == BackendKind::Cuda;
    let mut runs = Vec::new();
    let mut next = training.clone();
    let mut settings = String::new();
    if let EvaluatedRows::Fixed(rows) = training.evaluation.rows
        && rows > training.micro_batch_size
    {
        next.evaluation.rows = EvaluatedRows::Fixed(training.micro_batch_size);
        settings = format!("--set eval.micro_batch_size={}", training.micro_batch_size);
        runs.push((settings.clone(), next.clone()));
    }
    let evaluation = settings.clone();
    let ladder = [Recompute::None, Recompute::Selective, Recompute::Projections, Recompute::Full];
    for recompute in ladder.into_iter().skip_while(|&step| step != training.recompute).skip(1) {
        let offload = is_cuda && case.may_offload && recompute.may_offload();
        let less = TrainingShape { recompute, offload, ..next.clone() };
        let words = format!("{evaluation} --set train.recompute={}", to_name(&recompute)).trim_start().to_owned();
        runs.push((words.clone(), less.clone()));
        // Saving less may take more of the card if it is offloaded; then it helps only a host that is short of memory.
        if case.bytes(&less) < case.bytes(&next) {
            (next, settings) = (less, words);
        }
    }
    if training.recompute == Recompute::Full && training.offload {
        let halves = TrainingShape { recompute: Recompute::Projections, ..next.clone() };
        let words = format!("{evaluation} --set train.recompute={}", to_name(&halves.recompute));
        runs.push((words.trim_start().to_owned(), halves));
    }
    if is_cuda {
        // Moves to the host if the device is short of memory, and back if the host is.
        let moved = TrainingShape { offload: !next.offload, ..next.clone() };
        let words = format!("{settings} --set train.offload={}", moved.offload).trim_start().to_owned();
        runs.push((words.clone(), moved.clone()));
        if moved.offload {
            (next, settings) = (moved, words);
        }
    }
    let rows = training.micro_batch_size;
    for fewer in (1..rows).rev().filter(|&fewer| rows.is_multiple_of(fewer)) {
        let passes = rows / fewer;
        next.micro_batch_size = fewer;
        next.documents = training.documents.div_ceil(passes);
        let words = format!(
            "{settings} --set train.micro_batch_size={fewer} --set train.gradient_accumulation={} (the same effective batch)",
            accumulation * passes
        );
        runs.push((words.trim_start().to_owned(), next.clone()));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;

    impl Example {
        fn check(&self, force: bool) -> Result<(MemoryEstimate, Option<Chosen<bool>>), RunError> {
            check(&self.case(), &self.training(), self.config.gradient_accumulation(), force)
        }

        fn refusal(&self) -> String {
            self.check(false).expect_err("it should not fit").to_string()
        }
    }

    #[test]
    fn unified_memory_is_counted_once_and_up_to_what_its_gpu_may_use() {
        let mac = Example::on("m4-max", &[]);
        let case = Case { backend: BackendKind::Wgpu, ..mac.case() };
        let total = mac.profile.memory.total_bytes;
        assert_eq!((total, mac.profile.gpus[0].memory_total_bytes), (128 << 30, 128 << 30), "the same memory");
        let (free, place) = case.available();
        assert_eq!((free, place), (total / 4 * 3, "for the GPU in unified memory"));
        let rows = |rows| TrainingShape { micro_batch_size: rows, ..mac.training() };
        let beyond = (1..400).map(|count| rows(4 * count)).find(|run| case.bytes(run) as f64 > 0.9 * free as f64);
        let beyond = beyond.expect("some number of rows is too much");
        assert!((case.bytes(&beyond) as f64) < 0.9 * total as f64, "the whole memory would do");
        assert!(!case.fits(&beyond), "but not what the GPU may use");
        assert!(case.fits(&rows(beyond.micro_batch_size - 4)));
    }

    #[test]
    fn a_forced_run_is_planned_although_it_does_not_fit_and_says_so() {
        let (estimate, forced) = Example::new(&["train.recompute=none"], 40, 64).check(true).unwrap();
        let forced = forced.expect("it does not fit");
        assert!(forced.value && forced.reason.contains(&human_bytes(estimate.total_bytes())), "{}", forced.reason);
        let room = "40.0 GiB are free on the card, of which 36.0 GiB may be planned";
        assert!(forced.reason.contains(room), "{}", forced.reason);
        assert_eq!(Example::new(&[], 24, 64).check(true).unwrap().1, None, "a run that fits is not forced");
    }

    #[test]
    fn the_advice_is_the_nearest_step_that_fits() {
        let (none, projections) = ("train.recompute=none", "train.recompute=projections");
        let all = "--set train.recompute=full --set train.offload=true --set train.micro_batch_size=";
        for (changes, card_gib, host_gib, parts) in [
            (&[none][..], 40, 64, &["on the card", "saved activations", "--set train.recompute=projections\n"][..]),
            // On the card "full" takes more than "projections", so it is advice only where the host is short.
            (&[projections], 13, 64, &[": --set train.micro_batch_size=4 "]),
            (&[projections], 20, 24, &["--set train.recompute=full\n"]),
            // Three times as much would wait in host memory.
            (&[none], 40, 24, &["--set train.recompute=full\n"]),
            (&["train.offload=false"], 20, 64, &[": --set train.offload=true\n"]),
            (&[none, "train.offload=false"], 12, 64, &[all]),
        ] {
            let message = Example::new(changes, card_gib, host_gib).refusal();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn host_memory_that_is_short_is_refused_and_not_the_card() {
        let message = Example::new(&[], 80, 8).refusal();
        let room = "8.00 GiB are free in host memory, of which 7.20 GiB may be planned";
        assert!(message.contains(room) && message.contains("offloaded activations"), "{message}");
        assert!(message.contains("--set train.offload=false\n"), "{message}");
    }

    #[test]
    fn where_no_micro_batch_fits_shorter_rows_or_another_kind_of_run_are_proposed() {
        let one_row = ["train.micro_batch_size=1", "train.recompute=full", "max_seq_len=131072"];
        let mut long = Example::new(&one_row, 20, 512);
        (long.data.row_len, long.data.longest_document) = (131_072, 131_072);
        let message = long.refusal();
        let fits = message.split("max_seq_len=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        let fits: usize = fits.parse().unwrap();
        let (case, training) = (long.case(), long.training());
        let room = |length| case.fits(&of_one_row(&case, &training, length));
        assert!(room(fits) && !room(fits + 256), "{message}");
        let all = ["bnb_4bit=", "lora=", "mode=full", "train.optimizer=adamw", "train.micro_batch_size=1"];
        let message = Example::new(&all, 80, 512).refusal();
        let advice = message.split("would still need ").nth(1).unwrap();
        assert!(advice.contains("adamw_8bit") && advice.contains("zero_stage = 3"), "{advice}");
        assert!(advice.contains("[bnb_4bit]") && !advice.contains("max_seq_len"), "{advice}");
    }

    #[test]
    fn a_state_in_8_bits_is_proposed() {
        let full = ["mode=full", "lora=", "bnb_4bit=", "train.optimizer=adamw", "train.micro_batch_size=1"];
        let example = Example::new(&full, 80, 512);
        let advice = |backend| {
            let case = Case { backend, ..example.case() };
            other_runs(&case, &example.training_in(&case))
        };
        assert!(BackendKind::ALL.into_iter().all(|backend| advice(backend).contains("adamw_8bit")));
    }

    #[test]
    fn a_run_that_failed_gets_the_next_smaller_one() {
        let of = |changes: &[&str]| {
            let example = Example::new(changes, 80, 64);
            next_smaller(&example.case(), &example.training(), example.config.gradient_accumulation())
        };
        assert!(of(&["train.recompute=none"]).settings.unwrap().starts_with("--set train.recompute=selective,"));
        let halved = of(&["train.gradient_accumulation=3"]);
        let settings = halved.settings.unwrap();
        assert!(
            settings.starts_with("--set train.micro_batch_size=4 --set train.gradient_accumulation=6"),
            "{settings}"
        );
        assert!(halved.table.contains("GiB"), "{}", halved.table);
        let odd = of(&["train.micro_batch_size=15"]).settings.unwrap();
        assert!(odd.starts_with("--set train.micro_batch_size=5 --set train.gradient_accumulation="), "{odd}");
        assert_eq!(of(&["train.micro_batch_size=1"]).settings, None);
    }
}
