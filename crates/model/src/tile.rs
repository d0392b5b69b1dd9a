//! A tile of a long pass: consecutive tokens, the documents that they belong to, and what convolutions read of the tokens before.
//!
//! `tiled_layer.rs` runs layers in tiles.
//! Trade-off: a lead is there even where no document goes on from the tile before, so that all tiles have one size.

use std::ops::Range;

use burn_tensor::Tensor;
use firebrick_arch::{Mixer, ModelSpec};
use firebrick_kernels::{Documents, Kernels, memory, tile_rows};

/// The state of a mixer between two tiles, or its gradient; `None` where the next tile begins a document, or the mixer has none.
pub(crate) type Passing<B> = Option<Tensor<B, 3>>;

/// Consecutive tokens of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Tile<B: Kernels> {
    pub(crate) rows: Range<usize>,
    /// Rows before them that convolutions may read.
    pub(crate) lead: usize,
    pub(crate) documents: Documents<B>,
    pub(crate) with_lead: Documents<B>,
}

impl<B: Kernels> Tile<B> {
    pub(crate) fn whole(documents: &Documents<B>) -> Self {
        Self { rows: 0..documents.tokens(), lead: 0, documents: documents.clone(), with_lead: documents.clone() }
    }

    /// Cuts a pass into tiles of at most `tokens` tokens; none if it has less than twice as many, or every layer has attention. Not inside sections.
    pub(crate) fn all(spec: &ModelSpec, documents: &Documents<B>, tokens: usize, device: &B::Device) -> Vec<Self> {
        let reach = spec.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Attention(_) => None,
            Mixer::ShortConv(conv) => Some(conv.width - 1),
            Mixer::DeltaNet(delta) => Some(delta.conv_width - 1),
        });
        let (Some(lead), Some(rows)) = (reach.max(), tile_rows(documents.tokens(), tokens)) else { return Vec::new() };
        let starts: Vec<usize> = documents.ranges().map(|range| range.start).collect();
        let tile = |first: usize| {
            let rows = first..documents.tokens().min(first + rows);
            let [begins_before, goes_on] = [rows.start, rows.end].map(|token| starts.binary_search(&token).is_err());
            let goes_on = goes_on && rows.end < documents.tokens();
            let others = lead - (rows.start - starts[starts.partition_point(|&start| start <= first) - 1]).min(lead);
            let inner = starts.iter().copied().filter(|&start| rows.start < start && start < rows.end);
            let ends: Vec<usize> = inner.chain([rows.end]).map(|end| end - rows.start).collect();
            let boundaries = |first: &[usize], lead: usize| {
                let ends = ends.iter().map(|end| end + lead);
                let all: Vec<u32> = first.iter().copied().chain(ends).map(|boundary| boundary as u32).collect();
                Documents::new(&all, device)
            };
            Self {
                documents: boundaries(&[0], 0).of_tile(begins_before, goes_on),
                // What the first document has no part in is one of its own.
                with_lead: if others == 0 { boundaries(&[0], lead) } else { boundaries(&[0, others], lead) },
                lead,
                rows,
            }
        };
        (0..documents.tokens()).step_by(rows).map(tile).collect()
    }

    /// Returns the rows of a pass for a tile and its lead; zeros before the first.
    pub(crate) fn with_lead(&self, x: &Tensor<B, 2>) -> Tensor<B, 2> {
        match self.rows.start.checked_sub(self.lead) {
            Some(start) => rows_of(x, start..self.rows.end),
            None => self.padded(rows_of(x, self.rows.clone())),
        }
    }

    /// Returns the rows after the lead.
    pub(crate) fn own(&self, x: &Tensor<B, 2>) -> Tensor<B, 2> {
        if self.lead == 0 { x.clone() } else { rows_of(x, self.lead..self.lead + self.rows.len()) }
    }

    /// Returns the rows with zeros for the lead.
    pub(crate) fn padded(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.lead == 0 {
            return x;
        }
        let zeros = B::pause(&x.device(), || Tensor::zeros([self.lead, x.dims()[1]], (&x.device(), x.dtype())));
        B::join_rows(vec![zeros, x])
    }
}

pub(crate) fn rows_of<B: Kernels>(x: &Tensor<B, 2>, rows: Range<usize>) -> Tensor<B, 2> {
    memory::slices(x.clone(), &[(rows.start, rows.len())]).remove(0)
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;
    use serde_json::json;

    use super::*;
    use crate::test_config::tiny;

    #[test]
    fn tiles_have_one_size_and_know_which_documents_they_divide() {
        let device = Default::default();
        let documents = Documents::<Flex>::new(&[0, 3, 4, 39, 60, 80, 120], &device);
        let lfm2 = [("model_type", json!("lfm2")), ("architectures", json!(["Lfm2ForCausalLM"]))];
        let spec = tiny(&[&lfm2[..], &[("full_attn_idxs", json!([1]))]].concat()).unwrap().spec;
        let tiles = Tile::all(&spec, &documents, 45, &device);
        let of = |tile: &Tile<Flex>| {
            let Documents { begins_before, goes_on, .. } = tile.documents;
            let ends = tile.with_lead.ranges().map(|range| range.end).collect::<Vec<_>>();
            (tile.rows.clone(), tile.documents.count(), ends, begins_before, goes_on)
        };
        let expected = [
            (0..40, 4, vec![2, 5, 6, 41, 42], false, true),
            // One of the two rows before belongs to the first document.
            (40..80, 2, vec![1, 22, 42], true, false),
            (80..120, 1, vec![2, 42], false, false),
        ];
        assert_eq!(tiles.iter().map(of).collect::<Vec<_>>(), expected);
        assert!(Tile::all(&spec, &documents, 61, &device).is_empty(), "less than two tiles");
    }
}
