//! Shows what a recipe will train on, before anything is trained: counts, lengths, packing, findings, and samples with the loss tokens marked.
//!
//! It reads data and tokenizer as a run does, but none of the model's weights. Not supported: searching for a row.

mod sample;
mod text;

use std::cmp::Reverse;

use firebrick_arch::counted;
use firebrick_data::{
    Chat, ChatTemplate, DataError, FindingCount, FindingKind, PackOptions, PackReport, PackedDataset, Tokenizer,
};
use firebrick_hwprofile::HardwareProfile;
use firebrick_trainer::RunError;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::grouped;
use firebrick_trainer::plan;
use firebrick_trainer::run::data_sets::{self, DataSets, ReadSet, SourceReport, place};
use firebrick_trainer::run::prepare::{self, pack_options};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use sample::{SampleDocument, SampleRow, SampleToken};
pub use text::Style;

/// The inspection of a recipe's data.
#[derive(Debug)]
pub struct Inspection {
    /// The run's name.
    pub name: String,
    /// The model, its tokenizer and template, and the keys that determine tokens and masks; each with its name.
    pub settings: Vec<(&'static str, String)>,
    /// The training data, followed by the held-out data if there is any.
    pub sets: Vec<SetView>,
}

/// The inspection of a set of documents.
#[derive(Debug)]
pub struct SetView {
    /// "training data" or "held-out data".
    pub title: &'static str,
    /// A sentence about where the tokens are.
    pub location: String,
    /// Findings in the sources' records; none if the set is a part of the preceding one.
    pub sources: Vec<SourceReport>,
    /// How documents fill rows.
    pub packing: PackReport,
    /// Tokens of a row.
    pub row_len: usize,
    /// Rows, spread evenly.
    pub rows: Vec<SampleRow>,
    /// The longest, the shortest and random documents, each group with a title.
    pub documents: Vec<(String, Vec<SampleDocument>)>,
}

/// Reads a recipe's data and takes `count` samples of each kind.
///
/// # Errors
/// The recipe's data, its tokenizer, or the model folder cannot be used.
pub fn inspect(config: &RunConfig, count: usize) -> Result<Inspection, RunError> {
    let tokenizer = data_sets::tokenizer(config, &config.model_folder()?, prepare::now())?;
    let data = data_sets::read(config, &tokenizer, plan::tokenizing(config, &HardwareProfile::detect()))?;
    let settings = settings(config, &tokenizer, &data);
    let packing = pack_options(config, &tokenizer, &data, 1);
    let view = |title, set| set_view(config, &tokenizer, &packing, count, (title, set));
    let mut sets = vec![view("training data", data.train)?];
    if let Some(mut set) = data.held_out {
        if !set.sources.is_empty() {
            set.location = "a separate set".to_owned();
        }
        sets.push(view("held-out data", set)?);
    }
    Ok(Inspection { name: config.name.clone(), settings, sets })
}

fn set_view(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    packing: &PackOptions,
    count: usize,
    (title, set): (&'static str, ReadSet),
) -> Result<SetView, RunError> {
    let packed = PackedDataset::new(set.documents, packing.clone());
    let documents = packed.documents();
    let sample = |index: usize| {
        let place = place(&set.inputs, documents.entry(index).origin);
        let place = match (config.preference.is_some(), index.is_multiple_of(2)) {
            (false, _) => place,
            (true, true) => format!("{place} (chosen)"),
            (true, false) => format!("{place} (rejected)"),
        };
        SampleDocument::new(place, &documents.document(index).to_example(), tokenizer)
    };
    let shown = count.min(packed.rows());
    let row = |index: usize| {
        let number = index * packed.rows() / shown;
        let documents = packed.row_documents(number).map(sample).collect::<Result<_, _>>()?;
        Ok(SampleRow { number, documents })
    };
    let rows = (0..shown).map(row).collect::<Result<_, DataError>>()?;
    let seed = config.data_seed();
    let samples = |title: String, key: &dyn Fn(usize) -> u64| {
        let mut all: Vec<usize> = (0..documents.len()).collect();
        all.sort_by_key(|&index| key(index));
        Ok((title, all.into_iter().take(count).map(sample).collect::<Result<_, _>>()?))
    };
    let tokens = |index: usize| u64::from(documents.entry(index).tokens);
    let groups: Result<_, DataError> = [
        samples("Longest documents".to_owned(), &|index| u64::MAX - tokens(index)),
        samples("Shortest documents".to_owned(), &tokens),
        samples(format!("Random documents (data_seed {seed})"), &|index| xxh3_64_with_seed(&index.to_le_bytes(), seed)),
    ]
    .into_iter()
    .collect();
    Ok(SetView {
        title,
        location: set.location,
        sources: set.sources,
        packing: packed.report(),
        row_len: packed.row_len(),
        rows,
        documents: groups?,
    })
}

/// Returns the settings that determine tokens and masks.
fn settings(config: &RunConfig, tokenizer: &Tokenizer, data: &DataSets) -> Vec<(&'static str, String)> {
    let token = |id: Option<u32>| match id {
        Some(id) => format!("{} ({id})", tokenizer.decode(&[id], false).unwrap_or_default()),
        None => "none".to_owned(),
    };
    let (bos, eos, pad) = (tokenizer.bos_token_id(), tokenizer.eos_token_id(), tokenizer.pad_token_id());
    let template = match (&config.data.chat_template, tokenizer.chat_template()) {
        (Some(named), _) => named.clone(),
        (None, Ok(_)) => "the model folder's".to_owned(),
        (None, Err(_)) => "none".to_owned(),
    };
    let mut settings = vec![
        ("model", config.model.clone()),
        ("tokenizer", format!("{} tokens", grouped(tokenizer.vocab_size() as f64))),
        ("special tokens", format!("bos {}, eos {}, pad {}", token(bos), token(eos), token(pad))),
        ("chat template", template),
    ];
    if !config.data.chat_template_kwargs.is_empty() {
        let kwargs = config.data.chat_template_kwargs.iter().map(|(key, value)| format!("{key} = {value}"));
        settings.push(("template variables", kwargs.collect::<Vec<_>>().join(", ")));
    }
    settings.extend(date_note(tokenizer, data).map(|note| ("date", note)));
    settings.extend(config.data.system_prompt.clone().map(|prompt| ("system prompt", prompt)));
    settings.push(("max_seq_len", grouped(config.max_seq_len() as f64)));
    if let Some(preference) = &config.preference {
        settings.push(("preference", firebrick_trainer::config::to_name(&preference.loss)));
    }
    settings.push(("train_on", firebrick_trainer::config::to_name(&config.train_on())));
    settings
}

/// Returns a note on how the chat template uses today's date, and how to fix the date; `None` if that does not matter.
fn date_note(tokenizer: &Tokenizer, data: &DataSets) -> Option<String> {
    let mut sources = data.held_out.iter().chain([&data.train]).flat_map(|set| &set.sources);
    let has_chats = sources.any(|source| source.diagnosis.chats > 0);
    tokenizer.date().filter(|_| has_chats)?;
    let templates: Vec<&ChatTemplate> =
        [false, true].iter().filter_map(|&tools| tokenizer.chat_template_for(tools).ok()).collect();
    let writes = |turns: &[(&str, &str)]| templates.iter().any(|template| template.writes_date(&Chat::new(turns)));
    let plain = writes(&[("user", "q"), ("assistant", "a")]);
    let what = match (plain, writes(&[("system", "s"), ("user", "q"), ("assistant", "a")])) {
        (true, true) => "writes today's date into every conversation",
        (true, false) => "writes today's date into every conversation without a system message",
        (false, true) => "writes today's date into every conversation with a system message",
        (false, false) if data.train.cache.is_some() => "can write today's date",
        (false, false) => return None,
    };
    let again = if data.train.cache.is_some() { ", so cached data is tokenized again each day" } else { "" };
    let has_variable = templates.iter().any(|template| template.source().contains("date_string"));
    let variable = match has_variable && what.starts_with("writes") {
        true => "set data.chat_template_kwargs = { date_string = \"26 Jul 2024\" }, or ",
        false => "",
    };
    Some(format!(
        "the chat template {what} (strftime_now){again}. To fix it, {variable}name a copy of the template with a fixed \
         date in data.chat_template"
    ))
}

impl Inspection {
    /// Formats the inspection for a terminal or a file.
    pub fn text(&self, style: Style) -> String {
        text::render(self, style)
    }
}

impl SetView {
    fn measures(&self) -> Vec<(&'static str, String)> {
        let packing = &self.packing;
        let number = |number: usize| grouped(number as f64);
        vec![
            ("documents", number(packing.documents)),
            ("tokens", number(packing.tokens)),
            ("loss tokens", format!("{} ({:.1} %)", number(packing.loss_tokens), 100.0 * packing.loss_share())),
            ("rows", format!("{} of up to {} tokens", number(packing.rows), number(self.row_len))),
            ("rows filled to", format!("{:.1} %", 100.0 * packing.efficiency)),
            ("shortest document", format!("{} tokens", number(packing.lengths.shortest))),
            ("longest document", format!("{} tokens", number(packing.lengths.longest))),
        ]
    }

    /// Returns the steps of the histogram: tokens from and to, number of documents.
    fn histogram(&self) -> Vec<(usize, usize, usize)> {
        let steps = &self.packing.lengths.steps;
        let from = |index: usize| index.checked_sub(1).map_or(1, |previous| steps[previous].up_to + 1);
        let all = steps.iter().enumerate().map(|(index, step)| (from(index), step.up_to, step.documents));
        all.skip_while(|&(_, _, documents)| documents == 0).collect()
    }

    /// Returns a line for each finding of all sources, most frequent first. The percentage is that of the source's records.
    fn findings(&self) -> Vec<(FindingKind, String)> {
        let of_source = |source: &SourceReport| {
            let rows = source.diagnosis.rows as f64;
            let line = move |(kind, found): (&FindingKind, &FindingCount)| {
                let (count, percent) = (counted(found.count, "record"), 100.0 * found.count as f64 / rows);
                let first = found.first.first().map(|(place, detail)| format!("{place}: {detail}")).unwrap_or_default();
                let text = format!("{count} ({percent:.1} %) {}; first {first}", kind.description());
                (found.count, (*kind, text))
            };
            source.diagnosis.findings.iter().map(line).collect::<Vec<_>>()
        };
        let mut lines: Vec<_> = self.sources.iter().flat_map(of_source).collect();
        lines.sort_by_key(|(count, _)| Reverse(*count));
        lines.into_iter().map(|(_, line)| line).collect()
    }
}

/// Returns notes on a source in addition to its counts, one per line.
fn notes(source: &SourceReport) -> impl Iterator<Item = String> + '_ {
    let remarks = source.remarks.iter().map(|remark| format!("note: {remark}"));
    let warning = source.diagnosis.loss_warning().map(|warning| format!("WARNING: {warning}"));
    remarks.chain(source.diagnosis.unread_line()).chain(warning)
}
