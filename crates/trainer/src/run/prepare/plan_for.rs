//! Plans for machines that are named, for which neither the model nor the data has to be at hand.
//!
//! A model that cannot be reached is replaced by its config.json in `configs/models/`, data that cannot be read by full rows; both are said.
//! Trade-off: how many rows an epoch of unread data has is a guess, so time and cost are those of [`DataShape::UNREAD_ROWS`] rows.

use std::cmp::Ordering;
use std::path::PathBuf;

use firebrick_arch::ModelConfig;
use firebrick_data::{DataError, SourceError};
use firebrick_hwprofile::human::{human_range, human_seconds};
use firebrick_hwprofile::memory::human_bytes;
use firebrick_hwprofile::spec::Engine;
use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_kernels::BackendKind;

use crate::config::{ConfigError, RunConfig};
use crate::console::{Console, error_message};
use crate::error::RunError;
use crate::hub::Need;
use crate::plan::{DataShape, Plan, PlanInputs, PlanRequest};
use crate::run::prepare::{Data, check_start, now};
use crate::shipped;

/// What plans of one recipe for several machines are made from.
pub struct PlanBasis {
    recipe: RunConfig,
    model: ModelConfig,
    data: DataShape,
    folder: PathBuf,
    adapter: Option<PathBuf>,
    /// Sentences about the data, and about what could not be read.
    pub notes: Vec<String>,
}

impl PlanBasis {
    /// Reads model and data as a run would, as far as they can be reached.
    ///
    /// # Errors
    /// Anything wrong with the recipe or with what can be read; a model that is neither here, nor on the Hub, nor shipped as a config.json.
    pub fn read(recipe: RunConfig, request: &PlanRequest) -> Result<Self, RunError> {
        let read = || Data::read(&recipe, now(), &request.profile(), Need::Description, (1, None));
        match check_start(&recipe).and_then(|()| read()) {
            Ok(Data { model, shape: data, folder, adapter, mut notes, missing, .. }) => {
                notes.extend(missing.map(|error| format!("a run will not start: {error}")));
                Ok(Self { recipe, model, data, folder, adapter, notes })
            }
            Err(error) if is_absent(&error) => Self::of_full_rows(recipe, error),
            Err(error) => Err(error),
        }
    }

    /// Plans with full rows, and with the config.json that is shipped if the model is what cannot be reached.
    fn of_full_rows(recipe: RunConfig, error: RunError) -> Result<Self, RunError> {
        let mut notes = Vec::new();
        let folder = match error {
            // The model was found before its data was missed.
            RunError::Data(_) => recipe.fetch_model(Need::Description, Console::QUIET)?.folder,
            error => {
                let folder = shipped::model(&recipe.model).ok_or(error)?;
                notes.push(format!("{} cannot be reached: planned from {}", recipe.model, folder.display()));
                folder
            }
        };
        let mut model = recipe.read_model(&folder)?;
        let new = recipe.data.new_tokens.len() + recipe.data.new_special_tokens.len();
        let ids: Vec<usize> = (model.spec.vocab_size..model.spec.vocab_size + new).collect();
        model.add_tokens(&ids);
        recipe.adapter_of(&model)?;
        let data = DataShape::of_full_rows(&recipe);
        notes.push(format!("the data was not read: {}", data.report));
        Ok(Self { recipe, model, data, folder, adapter: None, notes })
    }

    /// Returns the plan of a run of `world_size` processes on the machine of `request`.
    pub fn plan(&self, world_size: usize, request: &PlanRequest) -> Result<Plan, RunError> {
        let profile = request.profile();
        let Self { recipe, model, data, .. } = self;
        let inputs = PlanInputs { config: recipe, profile: &profile, model, data, world_size, request };
        Ok(Plan::resolve(inputs)?.with_folders(self.folder.clone(), self.adapter.clone()))
    }

    /// Returns a table of this machine and of all accelerators that are known, the fastest first, and those that were never measured after the
    /// others; what cannot run there, and why, comes last. `price`: what an hour of a machine costs, where that is known.
    pub fn compare(&self, world_size: usize, price: impl Fn(Option<&AcceleratorSpec>) -> Option<f64>) -> String {
        let (mut runs, mut others) = (Vec::new(), Vec::new());
        for machine in std::iter::once(None).chain(AcceleratorSpec::all().map(Some)) {
            let name = machine.map_or("this machine", |machine| machine.name);
            if machine.is_some_and(|machine| machine.kind.engine() == Engine::NoBackend) {
                others.push((name, "no backend runs there".to_owned()));
                continue;
            }
            let request =
                PlanRequest { machine, force: true, price_per_hour: price(machine), ..PlanRequest::default() };
            match self.plan(world_size, &request).map(|plan| row(name, &request.profile(), &plan)) {
                Ok(Ok(run)) => runs.push(run),
                Ok(Err(why)) => others.push((name, why)),
                Err(error) => {
                    let message = error_message(&error);
                    let sentence = message.split(". ").next().unwrap_or_default();
                    others.push((name, sentence.lines().next().unwrap_or_default().to_owned()));
                }
            }
        }
        runs.sort_by(|(left, _), (right, _)| left.partial_cmp(right).unwrap_or(Ordering::Equal));
        let measured = runs.iter().filter(|((is_unmeasured, _), _)| !is_unmeasured).count();
        let header = ["machine", "tokens/s", "time of the run", "memory", "backend", "recompute", "cost"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(runs.into_iter().map(|(_, cells)| cells));
        if rows[1..].iter().all(|cells| cells.last().is_some_and(|cost| cost == NO_PRICE)) {
            rows.iter_mut().for_each(|cells| drop(cells.pop()));
        }
        let mut lines = aligned(&rows);
        if measured + 1 < lines.len() {
            lines.insert(measured + 1, UNMEASURED.to_owned());
        }
        lines.push(String::new());
        others.iter().for_each(|(name, why)| lines.push(format!("{name}: {why}")));
        lines.join("\n")
    }
}

/// The cost where no price was given.
const NO_PRICE: &str = "no price";
/// The line above machines of which no rate was measured.
const UNMEASURED: &str =
    "\nNever measured: peaks times the share of theirs that other machines reach, through wgpu an H200";

/// What ranks a machine: whether no rate of it was measured, and the seconds of the run.
type Rank = (bool, f64);

/// Returns the rank of a machine and the cells of its row, or why the run does not run there.
fn row(name: &str, profile: &HardwareProfile, plan: &Plan) -> Result<(Rank, Vec<String>), String> {
    if let Some(forced) = &plan.forced {
        return Err(format!("does not fit: {}", forced.reason));
    }
    let (memory, backend) = (human_bytes(plan.memory_bytes.value), plan.backend.value);
    let card = profile.cuda_card().or(profile.gpus.first());
    let (Some(forecast), Some(card)) = (&plan.forecast, card) else {
        return Err(format!("its peaks are not known; the run needs {memory} and backend {backend}"));
    };
    let is_of_the_table = backend != BackendKind::Wgpu && card.spec.is_some_and(|spec| spec.sustained_bf16.is_some());
    let is_measured = is_of_the_table || profile.measured_peaks(&backend.to_string(), &card.name).is_some();
    let run = forecast.run_seconds.value;
    let recompute = crate::config::to_name(&plan.recompute.value);
    let offloaded = if plan.offload.value { ", offloaded" } else { "" };
    let cells = vec![
        name.to_owned(),
        human_range(forecast.tokens_per_second.value),
        human_seconds(run),
        format!("{memory} of {}", human_bytes(card.memory_total_bytes)),
        format!("{backend}, {}", plan.compute.value),
        format!("{recompute}{offloaded}"),
        forecast.cost.value.map_or_else(|| NO_PRICE.to_owned(), human_range),
    ];
    Ok(((!is_measured, run.lower + run.upper), cells))
}

/// Writes rows of equal length with columns as wide as their widest cell.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Returns whether a model or data is not here or cannot be reached, in contrast to being wrong.
fn is_absent(error: &RunError) -> bool {
    match error {
        RunError::Hub(_) | RunError::Config(ConfigError::NoModel { what: "model", .. }) => true,
        RunError::Data(DataError::Source(source)) => {
            matches!(source, SourceError::Open { .. } | SourceError::NotFound(_) | SourceError::Hub(_))
        }
        _ => false,
    }
}
