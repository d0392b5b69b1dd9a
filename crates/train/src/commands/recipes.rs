//! Commands on recipes that train nothing: plan one, show its data, write a new one, convert another trainer's.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use firebrick_arch::counted;
use firebrick_hwprofile::AcceleratorSpec;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::{Console, program, shell_quoted};
use firebrick_trainer::new_recipe::{NewRecipe, file_name, new_recipe};
use firebrick_trainer::plan::{Plan, PlanRequest};
use firebrick_trainer::run::plan_for::PlanBasis;
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::run::reading_data;

use super::machine::machine_ids;
use super::takes_colors;
use crate::convert::{Converted, Remark, convert};
use crate::inspect::{Style, inspect};
use crate::offered::Offered;

/// The recipe file, as a plain argument or as an option, and what is changed in it.
#[derive(Args)]
pub(super) struct Recipe {
    /// The recipe: a path, or the name of a file in configs/.
    recipe: Option<PathBuf>,
    // Recipes that are too many: clap would only call them unexpected. Shells would show a help.
    #[arg(hide = true)]
    others: Vec<PathBuf>,
    /// The same recipe as an option.
    #[arg(long, value_name = "RECIPE")]
    config: Option<PathBuf>,
    /// Override a key, e.g. --set train.learning_rate=1e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

impl Recipe {
    /// Returns the file; `None` if none was given.
    ///
    /// # Errors
    /// Several were given, or overrides without `--set` or `=`.
    pub(super) fn given(&self) -> anyhow::Result<Option<&PathBuf>> {
        let mut all = self.recipe.iter().chain(&self.others).chain(&self.config);
        let words: Vec<String> = all.clone().map(|word| word.display().to_string()).collect();
        if let Some(meant) = misplaced(&words, &self.overrides) {
            bail!("{meant}");
        }
        match (all.next(), all.next()) {
            (Some(first), Some(second)) => {
                bail!("give one recipe: {} and {} were given", first.display(), second.display())
            }
            (first, _) => Ok(first),
        }
    }

    pub(super) fn load(&self) -> anyhow::Result<RunConfig> {
        let file = self.given()?.context("give the recipe: a path, or the name of a file in configs/")?;
        Ok(RunConfig::load(file, &self.overrides)?)
    }
}

/// Returns what was meant by an override without `=`, or by a word that is one without `--set`.
fn misplaced(words: &[String], overrides: &[String]) -> Option<String> {
    let is_file =
        |word: &str| [".toml", ".yaml", ".yml"].iter().any(|end| word.ends_with(end)) || Path::new(word).exists();
    let mut others = words.iter().filter(|word| !is_file(word));
    if let Some(key) = overrides.iter().find(|text| !text.contains('=')) {
        let value = others.next().map_or("VALUE", String::as_str);
        let set = shell_quoted(&format!("{key}={value}"));
        return Some(format!("an override has '=' between its key and its value: write --set {set}"));
    }
    let word = others.find(|word| word.contains('='))?;
    Some(format!("'{word}' is no recipe; if it changes a key, write --set {}", shell_quoted(word)))
}

#[derive(Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    recipe: Recipe,
    /// Plan for this machine instead of the one at hand: b200, h100, a100, l4, mi300x, m4-max, tpu-v5p, ...; a wrong name lists all. `all` compares
    /// them in a table. A model that cannot be reached is planned from its shipped config.json, data that is not there as full rows.
    #[arg(long = "for", value_name = "MACHINE", hide_possible_values = true, value_parser = machines())]
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

#[derive(Clone, Copy)]
enum Machines {
    All,
    One(&'static AcceleratorSpec),
}

fn machines() -> Offered<Machines> {
    Offered {
        values: ["all"].into_iter().chain(machine_ids()).collect(),
        parse: |name| match name {
            "all" => Ok(Machines::All),
            name => AcceleratorSpec::named(name).map(Machines::One).map_err(|error| error.to_string()),
        },
    }
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
    /// The configuration, in YAML or JSON; of Unsloth and other trainers the keys whose names are known.
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
        return match prepared.missing {
            Some(error) => Err(anyhow::Error::from(error).context("a run will not start")),
            None => Ok(()),
        };
    };
    let basis = PlanBasis::read(recipe, &request)?;
    drop(shown);
    match machines {
        Machines::One(_) => print_plan(&basis.notes, &basis.plan(ranks, &request)?),
        Machines::All => {
            basis.notes.iter().for_each(|note| Console::VERBOSE.print(note));
            let table = basis.compare(ranks, |machine| price_of(price_per_hour, machine));
            Console::VERBOSE.print(&format!("\n{table}"));
        }
    }
    Ok(())
}

fn print_plan(notes: &[String], plan: &Plan) {
    notes.iter().for_each(|note| Console::VERBOSE.print(note));
    Console::VERBOSE.plan(plan);
}

/// Writes a recipe and prints what matters of the plan of its run.
pub(crate) fn write_new(New { model, data, out }: New) -> anyhow::Result<()> {
    let file = out.unwrap_or_else(|| file_name(&model));
    let name = file.display();
    ensure!(file.extension().is_some_and(|extension| extension == "toml"), "{name} does not end with .toml");
    ensure!(!file.exists(), "{name} exists already: name another file with --out");
    let swapped = Path::new(&model).is_file() && Path::new(&data).join("config.json").is_file();
    let swapped_back = || format!("{} new {} {}", program(), shell_quoted(&data), shell_quoted(&model));
    ensure!(!swapped, "{model} is a file, and {data} a model: the model comes first: `{}`", swapped_back());
    let NewRecipe { text, prepared } = {
        let _shown = Console::VERBOSE.activity(reading_data);
        new_recipe(&model, &data, &file)?
    };
    let written = fs::File::create_new(&file).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("cannot write {name}"))?;
    Console::VERBOSE.print(&format!("written to {name}; its run here:\n{}", prepared.plan.brief(None)));
    let missing = prepared.missing.iter();
    missing.for_each(|error| Console::VERBOSE.print(&format!("a run will not start: {error}")));
    let (program, quoted) = (program(), shell_quoted(&name.to_string()));
    let next = format!("{program} plan {quoted}    # every decision with its reason\n  {program} train {quoted}");
    Console::VERBOSE.print(&format!("read it, change what you like, then\n  {next}"));
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
    ensure!(!out.exists(), "{name} exists already: name another file with --out");
    let converted = convert(&text, file)?;
    let written = fs::File::create_new(&out).and_then(|mut file| file.write_all(converted.recipe.as_bytes()));
    written.with_context(|| format!("cannot write {name}"))?;
    let Converted { carried, not_needed, left, problem, .. } = converted;
    let (not_needed, without) = (not_needed.len(), left.len());
    Console::VERBOSE.print(&format!(
        "written to {name}: {} carried over; of the others {not_needed} need nothing here, and {without} have no counterpart",
        counted(carried, "key")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_in_the_wrong_place_are_written_out() {
        let said = |words: &str, overrides: &str| {
            let list = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            misplaced(&list(words), &list(overrides)).unwrap_or_default()
        };
        assert!(said("r.toml 5", "train.steps").ends_with("write --set train.steps=5"));
        assert!(said("5 r.toml", "train.steps").ends_with("write --set train.steps=5"));
        assert!(said("r.toml", "train.steps").ends_with("write --set train.steps=VALUE"));
        assert!(said("r.toml train.steps=5", "").ends_with("write --set train.steps=5"));
        assert_eq!(said("r.toml", "train.steps=5"), "");
        assert_eq!(said("a=b.toml", ""), "");
    }
}
