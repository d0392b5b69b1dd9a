//! The attention calls to check.
//!
//! Trade-off: a selection. Each case differs from the others in something that was observed to select another kernel.

use firebrick_cuda::cudnn::{AttentionShape, Element, Layout, RowStrides};

#[derive(Clone)]
pub(crate) struct Case {
    /// Unique, because a process selects its case by name.
    pub(crate) name: String,
    pub(crate) shape: AttentionShape,
    pub(crate) lengths: Vec<usize>,
    pub(crate) clean: Clean,
}

/// The memory that is filled with zeros instead of NaN before a pass.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Clean {
    Nothing,
    Workspace,
    Everything,
}

/// Whether queries, keys and values (and their gradients) are columns of one buffer, or have separate buffers. Joining only the
/// inputs works only for documents of one length: cuDNN computes wrong gradients of packed ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Columns {
    Joined,
    JoinedInputs,
    Separate,
}

/// Query heads, key and value heads, width of a head.
type Heads = (usize, usize, usize);

pub(crate) fn shape(layout: Layout, heads: Heads, columns: Columns) -> AttentionShape {
    let (query_heads, key_value_heads, head_dim) = heads;
    let mut strides = RowStrides::contiguous(query_heads, key_value_heads, head_dim);
    let joined = (query_heads + 2 * key_value_heads) * head_dim;
    if matches!(columns, Columns::Joined | Columns::JoinedInputs) {
        (strides.query, strides.key, strides.value) = (joined, joined, joined);
    }
    if columns == Columns::Joined {
        (strides.query_gradient, strides.key_gradient, strides.value_gradient) = (joined, joined, joined);
    }
    AttentionShape { element: Element::Bf16, layout, query_heads, key_value_heads, head_dim, strides }
}

fn case(name: String, shape: AttentionShape, lengths: Vec<usize>) -> Case {
    Case { name, shape, lengths, clean: Clean::Nothing }
}

fn uniform(name: &str, documents: usize, length: usize, heads: Heads, columns: Columns) -> Case {
    let layout = Layout::Uniform { documents, length };
    case(name.to_string(), shape(layout, heads, columns), vec![length; documents])
}

/// Returns a case whose plan has room for more and longer documents than there are.
fn packed(name: &str, lengths: &[usize], heads: Heads, columns: Columns) -> Case {
    let longest = lengths.iter().max().expect("a document").next_multiple_of(128);
    let tokens = lengths.iter().sum::<usize>() + SPARE;
    let layout = Layout::Packed { documents: (lengths.len() + 3).next_multiple_of(8), longest, tokens };
    case(format!("packed {name}"), shape(layout, heads, columns), lengths.to_vec())
}

/// Rows after the last document.
const SPARE: usize = 37;
/// Documents of which some have a single token.
const WITH_ONES: [usize; 8] = [131, 1, 257, 64, 1, 3, 128, 77];
const WITHOUT_ONES: [usize; 8] = [131, 2, 257, 64, 5, 3, 128, 77];

/// Returns the kinds of calls in training.
pub(crate) fn kinds() -> Vec<Case> {
    use Columns::{Joined, JoinedInputs, Separate};
    let odd = WITH_ONES;
    let mut cases = vec![
        uniform("d64 mha", 2, 256, (4, 4, 64), Separate),
        uniform("d64 mha joined", 2, 256, (4, 4, 64), Joined),
        uniform("d128 mha joined", 2, 384, (4, 4, 128), Joined),
        uniform("d128 gqa4 joined", 2, 256, (8, 2, 128), Joined),
        uniform("d128 gqa8 joined inputs", 2, 256, (8, 1, 128), JoinedInputs),
        uniform("d64 gqa4 odd length", 3, 197, (8, 2, 64), Joined),
        uniform("d128 mha short", 5, 17, (2, 2, 128), Joined),
        uniform("d96 mha", 2, 200, (4, 4, 96), Joined),
        uniform("d80 gqa2", 2, 256, (4, 2, 80), Separate),
        uniform("d256 gqa2", 2, 256, (4, 2, 256), Joined),
        packed("d128 gqa8", &odd, (8, 1, 128), Separate),
        packed("d128 one document", &[512], (4, 4, 128), Joined),
        packed("d128 gqa4 one document", &[512], (8, 2, 128), Joined),
        packed("d128 only single tokens", &[1; 9], (4, 2, 128), Joined),
        packed("d72 gqa2", &odd, (4, 2, 72), Separate),
        packed("d96 gqa2", &odd, (4, 2, 96), Joined),
        packed("d256 gqa2", &odd, (4, 2, 256), Joined),
        // One long document and many short ones: the accumulators are laid out by token, not padded.
        packed("d128 gqa4 many", &[700, 5, 9, 33, 2, 1, 64, 12, 90, 7, 8, 31, 44], (8, 2, 128), Separate),
    ];
    let name = "half d128 gqa4";
    for mut case in [uniform(name, 2, 256, (8, 2, 128), Joined), packed(name, &odd, (8, 2, 128), Separate)] {
        case.shape.element = Element::F16;
        cases.push(case);
    }
    cases
}

/// Returns packed documents in many arrangements, to find the cause of an error.
pub(crate) fn arrangements() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, heads) in [("d64 mha", (4, 4, 64)), ("d64 gqa4", (8, 2, 64)), ("d128 mha", (4, 4, 128)), GROUPED] {
        for columns in [Columns::Separate, Columns::Joined] {
            cases.push(packed(&format!("{kind} {columns:?}"), &WITH_ONES, heads, columns));
        }
    }
    for number in 1..8 {
        let [no_empty, exact, no_ones] = [1, 2, 4].map(|bit| number & bit != 0);
        let words = [(no_empty, "no empty documents"), (exact, "longest as it is"), (no_ones, "no single tokens")];
        let words: Vec<&str> = words.into_iter().filter_map(|(said, word)| said.then_some(word)).collect();
        let lengths = if no_ones { WITHOUT_ONES } else { WITH_ONES };
        cases.push(grouped(&words.join(", "), &lengths, |documents, longest, _| {
            *documents = if no_empty { lengths.len() } else { *documents };
            *longest = if exact { 257 } else { *longest };
        }));
    }
    cases.extend([
        grouped("no rows to spare", &WITH_ONES, |_, _, tokens| *tokens -= SPARE),
        grouped("whole tiles of tokens", &WITH_ONES, |_, _, tokens| *tokens = tokens.next_multiple_of(128)),
        grouped("longest has room for all", &WITH_ONES, |_, longest, tokens| {
            *tokens = tokens.next_multiple_of(128);
            *longest = *tokens;
        }),
        grouped("eleven documents", &WITH_ONES, |documents, _, _| *documents = 11),
        grouped("whole tiles in each document", &[256, 128, 384, 128], |documents, _, _| *documents = 4),
    ]);
    let plain = grouped("", &WITH_ONES, |_, _, _| {});
    for (name, clean) in [("clean workspace", Clean::Workspace), ("clean memory", Clean::Everything)] {
        cases.push(Case { name: format!("packed {} {name}", GROUPED.0), clean, ..plain.clone() });
    }
    cases
}

const GROUPED: (&str, Heads) = ("d128 gqa4", (8, 2, 128));

/// Returns packed documents with grouped heads, where `change` changes the numbers of the layout: documents, longest, tokens.
fn grouped(name: &str, lengths: &[usize], change: impl Fn(&mut usize, &mut usize, &mut usize)) -> Case {
    let mut case = packed(&format!("{} {name}", GROUPED.0), lengths, GROUPED.1, Columns::Separate);
    if let Layout::Packed { documents, longest, tokens } = &mut case.shape.layout {
        change(documents, longest, tokens);
    }
    case
}
