//! Commands on recipes that train nothing: plan one, show its data, write a new one, convert another trainer's.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;
use firebrick_hwprofile::AcceleratorSpec;
use firebrick_hwprofile::spec::UnknownMachine;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::{Console, program, shell_quoted};
use firebrick_trainer::new_recipe::{NewRecipe, file_name, new_recipe};
use firebrick_trainer::plan::{Plan, PlanRequest};
use firebrick_trainer::run::plan_for::PlanBasis;
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::run::reading_data;

use super::takes_colors;
use crate::convert::{Converted, Remark, convert};
use crate::inspect::{Style, inspect};

/// The recipe file, as a plain argument or as an option.
#[derive(Args)]
pub(super) struct RecipeFile {
    /// The recipe: a path, or the name of a file in configs/.
    recipe: Option<PathBuf>,
    /// Recipes that are too many: clap would only call them unexpected.
    #[arg(hide = true)]
    others: Vec<PathBuf>,
    /// The same recipe as an option.
    #[arg(long, value_name = "RECIPE")]
    config: Option<PathBuf>,
}

impl RecipeFile {
    /// Returns the recipe; `None` if none was given.
    ///
    /// # Errors
    /// Several were given.
    pub(super) fn given(&self) -> anyhow::Result<Option<&PathBuf>> {
        let mut all = self.recipe.iter().chain(&self.others).chain(&self.config);
        match (all.next(), all.next()) {
            (Some(first), Some(second)) => {
                bail!("give one recipe: {} and {} were given", first.display(), second.display())
            }
            (first, _) => Ok(first),
        }
    }
}

#[derive(Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    recipe: Recipe,
    /// Plan for this machine instead of the one at hand: b200, h100, a100, l4, mi300x, m4-max, tpu-v5p, ...; a wrong name lists all. `all` compares
    /// them in a table. A model that cannot be reached is planned from its shipped config.json, data that is not there as full rows.
    #[arg(long = "for", value_name = "MACHINE", value_parser = machines)]
    machine: Option<Machines>,
    /// Price of the machine per hour, for the cost of the run; of one among many as `h100=2.50`. May be given several times.
    #[arg(long, value_name = "PRICE", value_parser = price)]
    price_per_hour: Vec<Price>,
    /// Print the plan of a run that does not fit into memory, too.
    #[arg(long)]
    force: bool,
    /// Plan for a run of this many ranks, on one machine or many.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: u32,
}

/// The machines of `plan --for`.
#[derive(Clone, Copy)]
enum Machines {
    All,
    One(&'static AcceleratorSpec),
}

fn machines(name: &str) -> Result<Machines, UnknownMachine> {
    if name == "all" { Ok(Machines::All) } else { AcceleratorSpec::named(name).map(Machines::One) }
}

/// A price per hour, of one machine or of any.
#[derive(Clone, Copy)]
struct Price {
    machine: Option<&'static AcceleratorSpec>,
    per_hour: f64,
}

/// Parses a price, a number above 0, with or without a machine before it.
fn price(text: &str) -> Result<Price, String> {
    let (name, number) = text.split_once('=').map_or((None, text), |(name, number)| (Some(name), number));
    let machine = name.map(AcceleratorSpec::named).transpose().map_err(|error| error.to_string())?;
    match number.parse::<f64>() {
        Ok(per_hour) if per_hour > 0.0 && per_hour.is_finite() => Ok(Price { machine, per_hour }),
        _ => Err("expected a price above 0, such as 2.50 or h100=2.50".to_owned()),
    }
}

/// Returns the price of a machine: the one that names it, else the one that names none.
fn price_of(prices: &[Price], machine: Option<&AcceleratorSpec>) -> Option<f64> {
    let is_of = |price: &&Price| price.machine.is_some() && price.machine.map(|of| of.id) == machine.map(|of| of.id);
    let named = prices.iter().find(is_of);
    named.or_else(|| prices.iter().find(|price| price.machine.is_none())).map(|price| price.per_hour)
}

#[derive(Args)]
pub(super) struct Recipe {
    #[command(flatten)]
    file: RecipeFile,
    /// Override a key, e.g. --set train.learning_rate=1e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl Recipe {
    pub(super) fn load(&self) -> anyhow::Result<RunConfig> {
        let file = self.file.given()?.context("give the recipe: a path, or the name of a file in configs/")?;
        Ok(RunConfig::load(file, &self.overrides)?)
    }
}

#[derive(Args)]
pub(crate) struct Inspect {
    #[command(flatten)]
    recipe: Recipe,
    /// Samples of each kind: rows spread evenly; the longest, the shortest and random documents.
    #[arg(long, default_value_t = 3)]
    rows: usize,
}

#[derive(Args)]
pub(crate) struct New {
    /// The model: a folder, or an id of the Hub.
    model: String,
    /// The data: a file, a pattern, a folder, or a Hub dataset.
    data: String,
    /// The recipe to write. Default: the model's name with .toml, in the current folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct Convert {
    /// The configuration: YAML or JSON of axolotl or LLaMA-Factory; of TRL, ms-swift, torchtune and Unsloth the keys whose names are known.
    file: PathBuf,
    /// The recipe to write. Default: the file's name with .toml, in the current folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn plan(arguments: &PlanArguments) -> anyhow::Result<()> {
    let &PlanArguments { machine, ref price_per_hour, force, ranks, .. } = arguments;
    let (recipe, ranks) = (arguments.recipe.load()?, ranks as usize);
    let named = match machine {
        Some(Machines::One(machine)) => Some(machine),
        Some(Machines::All) | None => None,
    };
    let request = PlanRequest {
        machine: named,
        force,
        price_per_hour: price_of(price_per_hour, named),
        ..PlanRequest::default()
    };
    let shown = Console::VERBOSE.activity(reading_data);
    let Some(machines) = machine else {
        let prepared = prepare_for(recipe, ranks, &request)?;
        drop(shown);
        print_plan(&prepared.data_notes, &prepared.plan);
        return Ok(());
    };
    let basis = PlanBasis::read(recipe, &request)?;
    drop(shown);
    match machines {
        Machines::One(_) => print_plan(&basis.notes, &basis.plan(ranks, &request)?),
        Machines::All => {
            basis.notes.iter().for_each(|note| Console::VERBOSE.print(note));
            let table = basis.compare(ranks, |machine| price_of(price_per_hour, Some(machine)));
            Console::VERBOSE.print(&format!("\n{table}"));
        }
    }
    Ok(())
}

fn print_plan(notes: &[String], plan: &Plan) {
    notes.iter().for_each(|note| Console::VERBOSE.print(note));
    Console::VERBOSE.plan(plan);
}

/// Writes a recipe and prints the plan of its run.
pub(crate) fn write_new(New { model, data, out }: New) -> anyhow::Result<()> {
    let file = out.unwrap_or_else(|| file_name(&model));
    let name = file.display();
    ensure!(file.extension().is_some_and(|extension| extension == "toml"), "{name} does not end with .toml");
    ensure!(!file.exists(), "{name} exists already: name another file with --out");
    let NewRecipe { text, prepared } = {
        let _shown = Console::VERBOSE.activity(reading_data);
        new_recipe(&model, &data, &file)?
    };
    let written = fs::File::create_new(&file).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("cannot write {name}"))?;
    print_plan(&prepared.data_notes, &prepared.plan);
    let (program, quoted) = (program(), shell_quoted(&name.to_string()));
    Console::VERBOSE
        .print(&format!("\nwritten to {name}. Read it, change what you like, then\n  {program} train {quoted}"));
    Ok(())
}

/// Writes the recipe that another trainer's configuration becomes.
pub(crate) fn convert_file(Convert { file, out }: &Convert) -> anyhow::Result<()> {
    let read = || format!("cannot read {}", file.display());
    let text = fs::read_to_string(file).with_context(read)?;
    let default = || PathBuf::from(file.file_name().unwrap_or_default()).with_extension("toml");
    let out = out.clone().unwrap_or_else(default);
    let name = out.display();
    ensure!(out.extension().is_some_and(|extension| extension == "toml"), "{name} does not end with .toml");
    let converted = convert(&text, file)?;
    let written = fs::File::create_new(&out).and_then(|mut file| file.write_all(converted.recipe.as_bytes()));
    written.with_context(|| format!("cannot write {name}: name another file with --out"))?;
    let Converted { carried, not_needed, left, problem, .. } = converted;
    let (not_needed, without) = (not_needed.len(), left.len());
    Console::VERBOSE.print(&format!(
        "written to {name}: {carried} keys carried over, {not_needed} need nothing here, {without} have no counterpart"
    ));
    for Remark { line, setting, reason } in &left {
        Console::VERBOSE.print(&format!("  line {line}, {setting}: {reason}"));
    }
    let (program, quoted) = (program(), shell_quoted(&name.to_string()));
    Console::VERBOSE.print(&match problem {
        Some(problem) => format!("the recipe is not complete: {problem}"),
        None => format!(
            "read it, then look at its data and its plan:\n  {program} inspect {quoted}\n  {program} plan {quoted}"
        ),
    });
    Ok(())
}

pub(crate) fn show_data(arguments: &Inspect) -> anyhow::Result<()> {
    let inspection = {
        let _shown = Console::VERBOSE.activity(reading_data);
        inspect(&arguments.recipe.load()?, arguments.rows)?
    };
    let style = if takes_colors(&std::io::stdout()) { Style::Colors } else { Style::Markers };
    Console::VERBOSE.print(inspection.text(style).trim_end_matches('\n'));
    Ok(())
}
