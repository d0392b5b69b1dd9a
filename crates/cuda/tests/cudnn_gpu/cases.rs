//! The attention calls to check.
//!
//! Trade-off: a selection. Each case differs from the others in something that was observed to select another kernel.

use firebrick_cuda::cudnn::{AttentionShape, Element, Layout};

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) shape: AttentionShape,
    pub(crate) lengths: Vec<usize>,
}

/// Query heads, key and value heads, width of a head.
type Heads = (usize, usize, usize);

fn case(name: &str, layout: Layout, heads: Heads, lengths: &[usize]) -> Case {
    let (query_heads, key_value_heads, head_dim) = heads;
    let shape =
        AttentionShape { element: Element::Bf16, layout, query_heads, key_value_heads, head_dim, in_order: false };
    Case { name: name.to_owned(), shape, lengths: lengths.to_vec() }
}

fn uniform(name: &str, documents: usize, length: usize, heads: Heads) -> Case {
    case(name, Layout::Uniform { documents, length }, heads, &vec![length; documents])
}

/// Returns a case whose plan has room for more and longer documents than there are.
fn packed(name: &str, lengths: &[usize], heads: Heads) -> Case {
    let longest = lengths.iter().max().expect("a document").next_multiple_of(128);
    let tokens = lengths.iter().sum::<usize>() + SPARE;
    case(name, Layout::Packed { documents: (lengths.len() + 3).next_multiple_of(8), longest, tokens }, heads, lengths)
}

/// Rows after the last document.
const SPARE: usize = 37;
/// Documents of which some have a single token.
const WITH_ONES: [usize; 8] = [131, 1, 257, 64, 1, 3, 128, 77];
const WITHOUT_ONES: [usize; 8] = [131, 2, 257, 64, 5, 3, 128, 77];
const GROUPED: Heads = (8, 2, 128);

/// Returns the kinds of calls in training, then packed documents in other arrangements, and documents of one length with sums in a fixed order.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = vec![
        uniform("d64 mha", 2, 256, (4, 4, 64)),
        uniform("d128 mha", 2, 384, (4, 4, 128)),
        uniform("d128 gqa4", 2, 256, GROUPED),
        uniform("d128 gqa8", 2, 256, (8, 1, 128)),
        uniform("d64 gqa4 odd length", 3, 197, (8, 2, 64)),
        uniform("d128 mha short", 5, 17, (2, 2, 128)),
        uniform("d96 mha", 2, 200, (4, 4, 96)),
        uniform("d80 gqa2", 2, 256, (4, 2, 80)),
        uniform("d256 gqa2", 2, 256, (4, 2, 256)),
        packed("packed d64 mha", &WITH_ONES, (4, 4, 64)),
        packed("packed d64 gqa4", &WITH_ONES, (8, 2, 64)),
        packed("packed d128 mha", &WITH_ONES, (4, 4, 128)),
        packed("packed d128 gqa4", &WITH_ONES, GROUPED),
        packed("packed d128 gqa8", &WITH_ONES, (8, 1, 128)),
        packed("packed d128 one document", &[512], (4, 4, 128)),
        packed("packed d128 gqa4 one document", &[512], GROUPED),
        packed("packed d128 only single tokens", &[1; 9], (4, 2, 128)),
        packed("packed d72 gqa2", &WITH_ONES, (4, 2, 72)),
        packed("packed d96 gqa2", &WITH_ONES, (4, 2, 96)),
        packed("packed d256 gqa2", &WITH_ONES, (4, 2, 256)),
        // One long document and many short ones: the accumulators are laid out by token, not padded.
        packed("packed d128 gqa4 many", &[700, 5, 9, 33, 2, 1, 64, 12, 90, 7, 8, 31, 44], GROUPED),
        packed("packed d128 gqa4, no single tokens", &WITHOUT_ONES, GROUPED),
    ];
    let in_f16 = [uniform("f16 d128 gqa4", 2, 256, GROUPED), packed("packed f16 d128 gqa4", &WITH_ONES, GROUPED)];
    cases.extend(in_f16.map(|case| Case { shape: AttentionShape { element: Element::F16, ..case.shape }, ..case }));
    // Documents, tokens of the longest, and all tokens that the plan has room for.
    let arrangements: [(&str, &[usize], [usize; 3]); 9] = [
        ("packed, no empty documents", &WITH_ONES, [8, 384, 699]),
        ("packed, eleven documents", &WITH_ONES, [11, 384, 699]),
        ("packed, longest as it is", &WITH_ONES, [16, 257, 699]),
        ("packed, no rows to spare", &WITH_ONES, [16, 384, 662]),
        ("packed, nothing to spare", &WITH_ONES, [8, 257, 662]),
        ("packed, nothing to spare, no single tokens", &WITHOUT_ONES, [8, 257, 667]),
        ("packed, whole tiles of tokens", &WITH_ONES, [16, 384, 768]),
        ("packed, longest has room for all", &WITH_ONES, [16, 768, 768]),
        ("packed, whole tiles in each document", &[256, 128, 384, 128], [4, 384, 933]),
    ];
    for (name, lengths, [documents, longest, tokens]) in arrangements {
        cases.push(case(name, Layout::Packed { documents, longest, tokens }, GROUPED, lengths));
    }
    let uniform: Vec<Case> = cases.iter().filter(|case| !case.shape.is_packed()).cloned().collect();
    cases.extend(uniform.into_iter().map(|mut case| {
        case.name = format!("in order {}", case.name);
        case.shape.in_order = true;
        case
    }));
    cases
}
