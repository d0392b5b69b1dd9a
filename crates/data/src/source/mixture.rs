//! Several sources as one stream, in an order that depends only on the recipe and the files.
//!
//! No source is held in memory; the next record is always taken from the head of one of them. Trade-off: the unit of
//! mixing is the record, not the token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::content::ContentKeys;
use super::error::SourceError;
use super::record::Record;
use super::records::{Records, Source};

/// The order in which the records of several sources are mixed. Batches are shuffled in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Mix {
    /// One source after the other, every row once.
    #[default]
    Concatenate,
    /// Every row once, spread evenly: the next row comes from the source of which the smallest share was read.
    Size,
    /// Each row from a source drawn at random, in proportion to the sources' weights.
    Weight,
}

/// When a mixture by weight ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MixUntil {
    /// When a source is drawn that has no more rows. No row comes twice, and rows of the other sources are left out.
    /// This is the default of `datasets.interleave_datasets`.
    #[default]
    First,
    /// When every source has been read to its end at least once. Smaller sources repeat, and no row is left out.
    All,
    /// When every row came once. A source without more rows is no longer drawn, so the weights hold only until then.
    Never,
}

/// Several sources and how they are mixed.
#[derive(Debug, Clone)]
pub struct Mixture {
    sources: Vec<Source>,
    order: Mix,
    until: MixUntil,
    seed: u64,
}

impl Mixture {
    /// Mixes sources. `until` and `seed` matter for `weight` only. Errors: no source; weights with another order, which
    /// would have no effect.
    pub fn new(sources: Vec<Source>, order: Mix, until: MixUntil, seed: u64) -> Result<Self, SourceError> {
        let bad = |key, reason: &str| Err(SourceError::BadSpec { key, reason: reason.to_owned() });
        if sources.is_empty() {
            return bad("sources", "give at least one");
        }
        if u32::try_from(sources.len()).is_err() {
            return bad("sources", "more than 4 billion");
        }
        if order != Mix::Weight && sources.iter().any(|source| source.spec().weight.is_some()) {
            return bad(
                "weight",
                "has an effect only where sources are mixed by weight; remove it, or set mix = \"weight\"",
            );
        }
        Ok(Self { sources, order, until, seed })
    }

    /// Returns the sources.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Returns the size of all files in bytes, before decompression.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(Source::bytes).sum()
    }

    /// Returns [`Source::content_key`] combined with the order, the weights and the seed. Errors: a file cannot be read.
    pub fn content_key(&self, keys: &ContentKeys) -> Result<u128, SourceError> {
        let mut text = match self.order {
            Mix::Weight => format!("weight {:?} {}", self.until, self.seed),
            order => format!("{order:?}"),
        };
        for source in &self.sources {
            text.push_str(&format!(" {:032x} {:?}", source.content_key(keys)?, weight(source)));
        }
        Ok(xxh3_128(text.as_bytes()))
    }

    /// Returns the records, starting with the first.
    pub fn records(&self) -> MixedRecords {
        MixedRecords {
            inputs: self.sources.iter().map(Input::new).collect(),
            order: self.order,
            until: self.until,
            random: ChaCha8Rng::seed_from_u64(self.seed),
            has_ended: false,
        }
    }
}

fn weight(source: &Source) -> f64 {
    source.spec().weight.unwrap_or(1.0)
}

struct Input {
    source: Source,
    records: Records,
    bytes: u64,
    weight: f64,
    /// Whether it was read to its end. With `all` it has then started again.
    is_done: bool,
    /// Whether the current pass gave at least one row.
    has_rows: bool,
}

impl Input {
    fn new(source: &Source) -> Self {
        let (records, bytes, weight) = (source.records(), source.bytes().max(1), weight(source));
        Self { source: source.clone(), records, bytes, weight, is_done: false, has_rows: false }
    }

    /// Returns the share that was read.
    fn share(&self) -> f64 {
        self.records.bytes_read() as f64 / self.bytes as f64
    }
}

/// The records of a mixture; [`Record::source`] gives the source of each.
pub struct MixedRecords {
    inputs: Vec<Input>,
    order: Mix,
    until: MixUntil,
    random: ChaCha8Rng,
    has_ended: bool,
}

impl MixedRecords {
    /// Chooses the source of the next record; `None` if all are done.
    fn choose(&mut self) -> Option<usize> {
        let open = |(_, input): &(usize, &Input)| !input.is_done;
        match self.order {
            Mix::Concatenate => self.inputs.iter().position(|input| !input.is_done),
            Mix::Size => {
                let inputs = self.inputs.iter().enumerate().filter(open);
                inputs.min_by(|(_, one), (_, other)| one.share().total_cmp(&other.share())).map(|(index, _)| index)
            }
            Mix::Weight => self.draw(),
        }
    }

    fn draw(&mut self) -> Option<usize> {
        let repeats = self.until == MixUntil::All;
        if self.inputs.iter().all(|input| input.is_done) {
            return None;
        }
        let weight = |input: &Input| if input.is_done && !repeats { 0.0 } else { input.weight };
        let total: f64 = self.inputs.iter().map(weight).sum();
        // 53 bits give a float between 0 and 1 in equal steps.
        let mut point = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64 * total;
        let mut last = None;
        for (index, input) in self.inputs.iter().enumerate().filter(|(_, input)| weight(input) > 0.0) {
            last = Some(index);
            point -= weight(input);
            if point < 0.0 {
                break;
            }
        }
        last
    }

    /// Handles a source that has no more rows; returns whether the mixture continues.
    fn ran_out(&mut self, index: usize) -> bool {
        let input = &mut self.inputs[index];
        input.is_done = true;
        match (self.order, self.until) {
            (Mix::Weight, MixUntil::First) => false,
            (Mix::Weight, MixUntil::All) => {
                // A source without any row cannot repeat.
                if !input.has_rows {
                    input.weight = 0.0;
                }
                input.records = input.source.records();
                input.has_rows = false;
                true
            }
            _ => true,
        }
    }
}

impl Iterator for MixedRecords {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.has_ended {
            let Some(index) = self.choose() else { break };
            match self.inputs[index].records.next() {
                Some(mut record) => {
                    self.inputs[index].has_rows |= record.is_ok();
                    self.has_ended = self.inputs[index].records.has_failed;
                    let number = u32::try_from(index).expect("Mixture::new bounds the number of sources");
                    match &mut record {
                        Ok(record) => record.source = number,
                        Err(SourceError::BadRecord { origin, .. }) => origin.0 = number,
                        Err(_) => {}
                    }
                    return Some(record);
                }
                None => self.has_ended = !self.ran_out(index),
            }
        }
        self.has_ended = true;
        None
    }
}
