//! What a recipe will train on, to be looked at before anything is trained: counts, lengths, packing, and sample rows with
//! loss tokens marked.
//!
//! Reads data and tokenizer as a run does, and nothing of the model's weights. Not supported: searching for a row; the samples
//! are spread evenly over all rows.

mod page;
mod sample;
mod text;

use firebrick_data::{DocumentSet, PackReport, PackedDataset, Tokenizer};
use firebrick_hwprofile::HardwareProfile;

pub use sample::{Piece, SampleDocument, SampleRow};
pub use text::Style;

use crate::config::RunConfig;
use crate::console::SourceReport;
use crate::error::RunError;
use crate::plan;
use crate::run::data_sets;
use crate::run::prepare::{self, pack_options};

/// Everything that is shown of a recipe's data.
#[derive(Debug)]
pub struct Inspection {
    /// The run's name.
    pub name: String,
    /// The training data, then the held-out data where there is any.
    pub sets: Vec<SetView>,
}

/// What is shown of a set of documents.
#[derive(Debug)]
pub struct SetView {
    /// "training data" or "held-out data".
    pub title: &'static str,
    /// Where the tokens are, in a sentence.
    pub location: String,
    /// What was found in the sources' records; none if the set is a part of the one before.
    pub sources: Vec<SourceReport>,
    /// How documents fill rows.
    pub packing: PackReport,
    /// Tokens of a row.
    pub row_len: usize,
    /// Some rows.
    pub samples: Vec<SampleRow>,
}

/// Reads a recipe's data; `rows` rows of each set are shown.
///
/// # Errors
/// As a run: the recipe's data, its tokenizer, or the model folder cannot be used.
pub fn inspect(config: &RunConfig, rows: usize) -> Result<Inspection, RunError> {
    let tokenizer = data_sets::tokenizer(config, &config.model_folder()?, prepare::now())?;
    let data = data_sets::read(config, &tokenizer, plan::tokenizing(config, &HardwareProfile::detect()))?;
    let view = |title, location, sources, documents: DocumentSet| -> Result<SetView, RunError> {
        set_view(config, &tokenizer, rows, documents).map(|view| SetView { title, location, sources, ..view })
    };
    let mut sets = vec![view("training data", data.train.location, data.train.sources, data.train.documents)?];
    if let Some(documents) = data.held_out {
        let location = match data.held_out_sources.is_empty() {
            true => "held out of the training data by a hash of the content",
            false => "a separate set",
        };
        sets.push(view("held-out data", location.to_owned(), data.held_out_sources, documents)?);
    }
    Ok(Inspection { name: config.name.clone(), sets })
}

fn set_view(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    rows: usize,
    documents: DocumentSet,
) -> Result<SetView, RunError> {
    let packed = PackedDataset::new(documents, pack_options(config, tokenizer));
    let shown = rows.min(packed.rows());
    let samples = (0..shown).map(|index| sample::row(&packed, index * packed.rows() / shown, tokenizer));
    Ok(SetView {
        title: "",
        location: String::new(),
        sources: Vec::new(),
        packing: packed.report(),
        row_len: packed.row_len(),
        samples: samples.collect::<Result<_, _>>()?,
    })
}

impl Inspection {
    /// For a terminal or a file.
    #[must_use]
    pub fn text(&self, style: Style) -> String {
        text::render(self, style)
    }

    /// One self-contained HTML page.
    #[must_use]
    pub fn page(&self) -> String {
        page::render(self)
    }
}

impl SetView {
    /// The measures of the set with their names.
    fn measures(&self) -> Vec<(&'static str, String)> {
        let packing = &self.packing;
        vec![
            ("documents", packing.documents.to_string()),
            ("tokens", packing.tokens.to_string()),
            ("loss tokens", format!("{} ({:.1} %)", packing.loss_tokens, 100.0 * packing.loss_share())),
            ("rows", format!("{} of up to {} tokens", packing.rows, self.row_len)),
            ("rows filled to", format!("{:.1} %", 100.0 * packing.efficiency)),
            ("shortest document", format!("{} tokens", packing.lengths.shortest)),
            ("longest document", format!("{} tokens", packing.lengths.longest)),
        ]
    }

    /// The steps of the histogram: tokens from and to, documents.
    fn histogram(&self) -> Vec<(usize, usize, usize)> {
        let steps = &self.packing.lengths.steps;
        let from = |index: usize| index.checked_sub(1).map_or(1, |previous| steps[previous].up_to + 1);
        let all = steps.iter().enumerate().map(|(index, step)| (from(index), step.up_to, step.documents));
        all.skip_while(|&(_, _, documents)| documents == 0).collect()
    }
}
