//! Several sources as one stream, in an order that depends on nothing but the recipe.
//!
//! No source is held in memory; the next record is always taken from the head of one of them. Gives up a mixing of
//! single tokens: the unit is the record.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::Record;
use super::content::ContentKeys;
use super::error::SourceError;
use super::records::{Records, Source};

/// In which order the records of several sources follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixOrder {
    /// One source after the other, every row once.
    #[default]
    Concatenate,
    /// Every row once, spread evenly: the next row comes from the source of which the smallest share was read.
    Size,
    /// Each row from a source drawn at random with its `weight`.
    Weight,
}

/// When a mixture by weight ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exhausted {
    /// When a source is drawn that has no more rows: no row comes twice and the weights hold to the end, rows of the
    /// other sources are left out. The default of `datasets.interleave_datasets` and of its users.
    #[default]
    First,
    /// When every source has been read to its end at least once: a smaller one begins again, no row is left out.
    All,
    /// A source without rows is not drawn any more: every row once, the weights hold only until then.
    Never,
}

/// Several sources and how they are mixed.
#[derive(Debug, Clone)]
pub struct Mixture {
    sources: Vec<Source>,
    order: MixOrder,
    exhausted: Exhausted,
    seed: u64,
}

impl Mixture {
    /// Mixes sources. `exhausted` and `seed` matter for [`MixOrder::Weight`] only. Errors: no source; weights with
    /// another order, which would have no effect.
    pub fn new(sources: Vec<Source>, order: MixOrder, exhausted: Exhausted, seed: u64) -> Result<Self, SourceError> {
        let bad = |key, reason: &str| Err(SourceError::BadSpec { key, reason: reason.to_owned() });
        if sources.is_empty() {
            return bad("sources", "name at least one");
        }
        if u32::try_from(sources.len()).is_err() {
            return bad("sources", "more than 4 billion");
        }
        if order != MixOrder::Weight && sources.iter().any(|source| source.spec().weight.is_some()) {
            return bad("weight", "has an effect only where the sources are mixed by weight; remove it, or mix so");
        }
        Ok(Self { sources, order, exhausted, seed })
    }

    /// The sources.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Bytes of all files, packed as they are.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(Source::bytes).sum()
    }

    /// As [`Source::content_key`], with the order, the weights and the seed. Errors: a file cannot be read.
    pub fn content_key(&self, keys: &ContentKeys) -> Result<u128, SourceError> {
        let mut text = match self.order {
            MixOrder::Weight => format!("weight {:?} {}", self.exhausted, self.seed),
            order => format!("{order:?}"),
        };
        for source in &self.sources {
            text.push_str(&format!(" {:032x} {:?}", source.content_key(keys)?, weight(source)));
        }
        Ok(xxh3_128(text.as_bytes()))
    }

    /// The records from the first on.
    pub fn records(&self) -> MixedRecords {
        MixedRecords {
            inputs: self.sources.iter().map(Input::new).collect(),
            order: self.order,
            exhausted: self.exhausted,
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
    /// Read to its end; by [`Exhausted::All`] it has begun again.
    is_done: bool,
    /// The last pass gave at least one row.
    has_rows: bool,
}

impl Input {
    fn new(source: &Source) -> Self {
        let (records, bytes, weight) = (source.records(), source.bytes().max(1), weight(source));
        Self { source: source.clone(), records, bytes, weight, is_done: false, has_rows: false }
    }

    /// The share that was read.
    fn share(&self) -> f64 {
        self.records.bytes_read() as f64 / self.bytes as f64
    }
}

/// The records of a mixture; [`Record::source`] says whose each is.
pub struct MixedRecords {
    inputs: Vec<Input>,
    order: MixOrder,
    exhausted: Exhausted,
    random: ChaCha8Rng,
    has_ended: bool,
}

impl MixedRecords {
    /// How many bytes of the sources' files were read so far (in the current pass of a source that began again).
    pub fn bytes_read(&self) -> u64 {
        self.inputs.iter().map(|input| input.records.bytes_read()).sum()
    }

    /// Which source is next; none if all are done.
    fn choose(&mut self) -> Option<usize> {
        let open = |(_, input): &(usize, &Input)| !input.is_done;
        match self.order {
            MixOrder::Concatenate => self.inputs.iter().position(|input| !input.is_done),
            MixOrder::Size => {
                let inputs = self.inputs.iter().enumerate().filter(open);
                inputs.min_by(|(_, one), (_, other)| one.share().total_cmp(&other.share())).map(|(index, _)| index)
            }
            MixOrder::Weight => self.draw(),
        }
    }

    fn draw(&mut self) -> Option<usize> {
        let repeats = self.exhausted == Exhausted::All;
        if self.inputs.iter().all(|input| input.is_done) {
            return None;
        }
        let weight = |input: &Input| if input.is_done && !repeats { 0.0 } else { input.weight };
        let total: f64 = self.inputs.iter().map(weight).sum();
        // 53 bits: every float between 0 and 1 of equal steps.
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

    /// A source had no more rows when it was asked; whether the mixture goes on.
    fn ran_out(&mut self, index: usize) -> bool {
        let input = &mut self.inputs[index];
        input.is_done = true;
        match (self.order, self.exhausted) {
            (MixOrder::Weight, Exhausted::First) => false,
            (MixOrder::Weight, Exhausted::All) => {
                // A source without any row cannot be repeated.
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
                Some(Ok(mut record)) => {
                    self.inputs[index].has_rows = true;
                    record.source = u32::try_from(index).expect("Mixture::new bounds the number of sources");
                    return Some(Ok(record));
                }
                Some(Err(error)) => {
                    self.has_ended = self.inputs[index].records.has_failed();
                    return Some(Err(error));
                }
                None => self.has_ended = !self.ran_out(index),
            }
        }
        self.has_ended = true;
        None
    }
}
