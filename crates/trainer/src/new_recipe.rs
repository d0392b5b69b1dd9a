//! Writes a recipe for a model and data: `firebrick new`. What can be found out is not asked: the form of the data, a chat template, the length of
//! rows, the batch, the passes over the data, and whether the base has to be in 4 bits to fit here.
//!
//! Every guess is checked by a plan, so the recipe plans as it is written.
//! Trade-off: the data is tokenized for each plan, two to five times, which a cache shortens for all but small data. Learning rate and rank are the
//! usual ones for any model: only training shows better ones.

use std::path::{Path, PathBuf};

use firebrick_data::{DataError, Fields, Hub, PackedDataset, RecordFormat, Row, TemplateChoice, Tokenizer};
use firebrick_model::read_config;

use crate::config::{RunConfig, to_name};
use crate::error::RunError;
use crate::plan::{PlanRequest, size};
use crate::run::prepare::{Prepared, prepare_for};

/// Tokens of the longest row that is proposed, and of the shortest where examples are shorter.
const ROW_TOKENS: [usize; 2] = [2048, 256];
/// Rows of a micro-batch, if they fit.
const MICRO_BATCH: usize = 4;
/// Columns of models that learn at the usual rate; narrower ones take more.
const WIDE: usize = 4096;
/// Built-in chat templates, those for certain vocabularies first; the last needs only an end-of-text token.
const TEMPLATES: [&str; 5] = ["chatml", "llama3", "gemma", "phi3", "zephyr"];

/// A recipe, and the plan of its run here.
pub struct NewRecipe {
    /// The recipe, as TOML with comments.
    pub text: String,
    /// The run that it describes.
    pub prepared: Prepared,
}

/// Writes a recipe for a model (a folder, or an id of the Hub) and data (a file, a pattern, a folder, or a Hub dataset) that plans on this machine.
/// `file`: the name that the recipe will have.
///
/// # Errors
/// A model or data that cannot be read, and a run that does not fit even in its smallest form, with the nearest change that does.
pub fn new_recipe(model: &str, data: &str, file: &Path) -> Result<NewRecipe, RunError> {
    let mut draft = Draft::read(model, data, file)?;
    let in_long_rows = draft.prepare(true)?;
    draft.fit_rows(&in_long_rows.train);
    for size in [Size::Stored, Size::FourBits, Size::OneRow] {
        draft.size = size;
        let prepared = draft.prepare(true)?;
        if prepared.plan.forced.is_none() {
            return Ok(NewRecipe { text: draft.text(), prepared });
        }
    }
    Ok(NewRecipe { prepared: draft.prepare(false)?, text: draft.text() })
}

/// Returns the name of a recipe's file for a model: the last part of the model's name.
pub fn file_name(model: &str) -> PathBuf {
    let name = Path::new(model).file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = name.split('@').next().unwrap_or_default();
    PathBuf::from(format!("{}.toml", if name.is_empty() { "recipe" } else { name }))
}

/// How much memory the run takes, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Stored,
    FourBits,
    /// That, and one row at a time.
    OneRow,
}

#[derive(Debug)]
struct Draft<'a> {
    model: &'a str,
    data: &'a str,
    file: &'a Path,
    format: RecordFormat,
    /// The built-in chat template that stands in for the tokenizer's.
    template: Option<&'static str>,
    row_len: usize,
    /// Columns of the model's hidden states.
    width: usize,
    /// Tokens of the longest example.
    longest: usize,
    /// Rows of an epoch.
    rows: usize,
    size: Size,
}

impl<'a> Draft<'a> {
    /// Reads the model's description and the first record.
    fn read(model: &'a str, data: &'a str, file: &'a Path) -> Result<Self, RunError> {
        let mut draft = Self {
            model,
            data,
            file,
            format: RecordFormat::Auto,
            template: None,
            row_len: ROW_TOKENS[0],
            width: WIDE,
            longest: 0,
            rows: 1,
            size: Size::Stored,
        };
        let config = draft.config()?;
        let folder = config.model_folder()?;
        let spec = read_config(&folder)?.spec;
        (draft.row_len, draft.width) = (ROW_TOKENS[0].min(spec.max_position_embeddings).max(2), spec.hidden_size);
        let tokenizer = Tokenizer::from_folder(&folder)?;
        let (format, is_chat) = first_record(&config)?;
        draft.format = format;
        if is_chat && tokenizer.chat_template().is_err() {
            // The first one whose tokens the tokenizer has.
            let choice = |name: &str| TemplateChoice::Named(name.to_owned());
            draft.template =
                TEMPLATES.into_iter().find(|name| tokenizer.clone().choose_template(&choice(name)).is_ok());
        }
        Ok(draft)
    }

    /// Chooses the length of rows, from data in rows of the longest length, and counts them. Both answers of a pair share a row, so rows for pairs
    /// stay long.
    fn fit_rows(&mut self, data: &PackedDataset) {
        let report = data.report();
        (self.longest, self.rows) = (report.lengths.longest, data.rows());
        if self.format != RecordFormat::Preference {
            let most = self.longest.next_power_of_two().clamp(ROW_TOKENS[1].min(self.row_len), self.row_len);
            self.row_len = size::row_len(report.documents, report.tokens, self.longest, most);
            self.rows = report.tokens.div_ceil(self.row_len);
        }
    }

    fn config(&self) -> Result<RunConfig, RunError> {
        Ok(RunConfig::from_toml(&self.text(), self.file, &[])?)
    }

    /// Plans the run. `force`: even if it does not fit.
    fn prepare(&self, force: bool) -> Result<Prepared, RunError> {
        prepare_for(self.config()?, 1, &PlanRequest { force, local_ranks: 1, ..PlanRequest::default() })
    }

    fn text(&self) -> String {
        let is_pairs = self.format == RecordFormat::Preference;
        [self.head(is_pairs), self.method(is_pairs), self.data_section(is_pairs), self.train_section(is_pairs)].concat()
    }

    fn head(&self, is_pairs: bool) -> String {
        let adapter = if self.size == Size::Stored { "LoRA" } else { "QLoRA" };
        let method = if is_pairs { format!("DPO with {adapter}") } else { adapter.to_owned() };
        let (file, longest) = (self.file.display(), self.longest);
        let length = match longest {
            0 => "tokens per row".to_owned(),
            _ => format!("tokens per row; the longest example has {longest}"),
        };
        format!("# {method} of {} on {}\n", self.model, self.data)
            + &format!("#   firebrick plan {file}       what a run would do and why\n")
            + &format!("#   firebrick inspect {file}    what is read, and which tokens count in the loss\n")
            + &format!("#   firebrick train {file}\n")
            + "# Other keys have defaults; `firebrick schema` describes all of them.\n\n"
            + &format!("model = {}\n", quoted(self.model))
            + &line("compute = \"auto\"", "16 bits where the device has them, else float32")
            + &line(&format!("max_seq_len = {}", self.row_len), &length)
    }

    fn method(&self, is_pairs: bool) -> String {
        let preference = match is_pairs {
            true => "\n[preference]\n".to_owned() + &line("loss = \"dpo\"", "or \"orpo\", which needs no reference"),
            false => String::new(),
        };
        let base = match self.size {
            Size::Stored => String::new(),
            _ => {
                "\n".to_owned()
                    + &line("[bnb_4bit]", "the frozen base in 4 bits, because it does not fit here as stored")
            }
        };
        let lora = "\n[lora]\n".to_owned()
            + &line("r = 16", "rank: more learns more and takes more memory")
            + &line("alpha = 32", "scale alpha / r = 2")
            + &line("target = \"all-linear\"", "every matrix of the layers");
        preference + &base + &lora
    }

    fn data_section(&self, is_pairs: bool) -> String {
        let mut section = format!("\n[data]\npath = {}\n", quoted(self.data));
        if !is_pairs && self.format != RecordFormat::Auto {
            section += &line(&format!("format = {}", quoted(&to_name(&self.format))), "as the first record shows");
        }
        if let Some(template) = self.template {
            section += &line(&format!("chat_template = {}", quoted(template)), "built in: the tokenizer has none");
        }
        // The length of rows is found in all of the data.
        if self.longest > 0 {
            section += &line(
                "eval_fraction = \"auto\"",
                "a tenth is held out, at most 200 examples, and none of fewer than 20",
            );
        }
        section
    }

    fn train_section(&self, is_pairs: bool) -> String {
        let rows = size::rows_per_step(self.rows, 1);
        let micro_batch = if self.size == Size::OneRow { 1 } else { MICRO_BATCH.min(rows) };
        let accumulation = rows / micro_batch;
        let (rate, epochs) = match is_pairs {
            true => (1e-5, 1.0),
            false => (adapter_rate(self.width), size::epochs(self.rows, micro_batch * accumulation)),
        };
        "\n[train]\n".to_owned()
            + &line(&format!("micro_batch_size = {micro_batch}"), "rows that are on the device at the same time")
            + &line(
                &format!("gradient_accumulation = {accumulation}"),
                &format!("a step has {micro_batch} x {accumulation} rows"),
            )
            + &line(&format!("learning_rate = {rate:.0e}"), "the usual one for adapters of this width")
            + &line(&format!("epochs = {epochs}"), "passes over the data: several where it is small")
    }
}

/// Returns the learning rate of adapters, to one digit: 2e-4 from `WIDE` columns on. A small run of a model of 576 learned facts at 5e-4 that it did not
/// at 2e-4 and 3e-4, and unlearned the rest at 1e-3.
fn adapter_rate(width: usize) -> f64 {
    2e-4 * (WIDE as f64 / width as f64).sqrt().clamp(1.0, 4.0)
}

/// Returns the format that the first record shows, and whether it is rendered with a chat template, which the tokenizer must have.
fn first_record(config: &RunConfig) -> Result<(RecordFormat, bool), DataError> {
    let source = config.data.training_sources()[0].spec().resolve(&Hub::from_environment())?;
    let Some(record) = source.first_record()? else {
        return Err(DataError::EmptyDataset { path: source.spec().path.clone(), bytes: source.bytes() });
    };
    let (mut pair_names, mut names) = (Fields::default(), Fields::default());
    let pairs = RecordFormat::Preference.resolve(&record.fields, &mut pair_names, &record.place);
    let (format, names) = match pairs {
        Ok(format) => (format, pair_names),
        Err(_) => (RecordFormat::Auto.resolve(&record.fields, &mut names, &record.place)?, names),
    };
    let is_chat = match format.parse(&record.fields, &names, &record.place)? {
        // Without a template these are written with plain headings.
        Row::Chat(_) => format != RecordFormat::Alpaca,
        Row::Prompt(_) => false,
        Row::Pair { chosen, .. } => matches!(*chosen, Row::Chat(_)),
        Row::Text(_) | Row::PromptCompletion { .. } | Row::Pretokenized { .. } => false,
    };
    Ok((format, is_chat))
}

fn line(setting: &str, comment: &str) -> String {
    format!("{setting:<31} # {comment}\n")
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Mode;

    fn draft(format: RecordFormat, size: Size) -> Draft<'static> {
        Draft {
            model: "owner/It's a \"model\"",
            data: "C:\\data\\my file.jsonl",
            file: Path::new("new.toml"),
            format,
            template: Some("zephyr"),
            row_len: 512,
            width: 576,
            longest: 300,
            rows: 3200,
            size,
        }
    }

    #[test]
    fn every_draft_is_a_recipe_that_says_what_was_decided() {
        for format in [RecordFormat::Auto, RecordFormat::Chat, RecordFormat::Text, RecordFormat::Preference] {
            for size in [Size::Stored, Size::FourBits, Size::OneRow] {
                let draft = draft(format, size);
                let config = draft.config().unwrap_or_else(|error| panic!("{error}\n{}", draft.text()));
                assert_eq!((config.model.as_str(), config.data.path.as_str()), (draft.model, draft.data));
                assert_eq!(config.mode(), if size == Size::Stored { Mode::Lora } else { Mode::Qlora });
                assert_eq!(config.preference.is_some(), format == RecordFormat::Preference);
                let rate = if format == RecordFormat::Preference { 1e-5 } else { 5e-4 };
                assert_eq!(config.train.learning_rate, Some(rate));
                assert_eq!(config.rows_per_step(1), 16, "{size:?}");
                assert_eq!((config.name.as_str(), config.max_seq_len()), ("new", 512));
                assert!(draft.text().contains("the longest example has 300"), "{}", draft.text());
            }
        }
    }

    #[test]
    fn a_recipe_is_called_as_its_model() {
        for (model, expected) in [
            ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct.toml"),
            ("owner/name@v1.0", "name.toml"),
            ("models/Tiny/", "tiny.toml"),
            (".", "recipe.toml"),
        ] {
            assert_eq!(file_name(model), Path::new(expected), "{model}");
        }
    }
}
