//! The words and phrases that `cargo xtask tidy` refuses, and what to write instead: the only place to add one.
//!
//! Trade-off: only patterns with few false positives are listed; a reader still has to judge the rest.
//!
//! A pattern is a regular expression without regard to case. A blank in it matches any white space, so a phrase is found across a line break, and
//! both ends are word boundaries.

/// Phrases in comments, string literals, Markdown, and names of functions that read as a sentence.
pub(super) const PHRASES: &[(&str, &str)] = &[
    // Units. `UNIT` and `PER` are the lists below.
    (
        "(UNIT|one [a-np-z][a-z]*|one o[a-eg-z][a-z]*) an? (PER)",
        "`... per ...`: bytes per token, one tokenizer per thread",
    ),
    // Idioms.
    ("(gives?|giving|gave|given) up", "`Trade-off: ...` or `Not supported: ...`"),
    ("laws?", "invariant, property or guarantee"),
    ("anew", "again"),
    ("made-up|made up", "synthetic"),
    ("mend(s|ed|ing)?", "fix"),
    ("whoever", "the caller, or the user"),
    ("nobody", "no caller, no user, nothing"),
    ("told apart|(tell|tells|telling) ([a-z]+ ){0,5}apart", "distinguish"),
    ("to the letter", "exactly"),
    ("(house rules?|rules of the house|(of|in|by) the house|the house's)", "project rules; workspace or codebase"),
    ("floors", "layers"),
    (
        "(lowest|lower|upper|highest|bottom|top|next|same|own|its|their|each|every|no|a) floor( (down|up|below|above))?",
        "layer",
    ),
    ("portable (body|bodies)", "reference implementation"),
    ("oracles?", "reference implementation"),
    ("own (fused |fast |cuda )?(kernels?|loops?|routines?)", "custom or hand-written kernels"),
    ("an own", "its own, or custom"),
    (
        "(stream|copy|type|crate|kernel|code|buffer|bug|mistake|mistakes|arena|launch|kernels|programs?) of ours",
        "`our ...`",
    ),
    ("thin products?", "low-rank (LoRA) GEMM"),
    ("feed-forward part", "MLP"),
    ("roofs?", "roofline or peak; `x % of peak`"),
    ("(strictly )?rising", "ascending"),
    ("trained tokens?", "loss tokens"),
    ("merged while written out", "fused dequantize-and-merge"),
    ("hand-overs?", "handoff, or stream synchronization"),
    ("people", "users"),
    ("a person", "the user"),
    ("what is kept", "what is saved (for backward)"),
    ("(is|are|was|were|be|if|as|than|not) wanted", "requested, needed or expected"),
    ("beside", "alongside, next to, or in addition to"),
    (
        "behind (it|them|that|this|its|each|every|the|a (message|text|token|copy|span|name|value|word|turn))",
        "after (in an order), or: inside, through",
    ),
    ("asked for", "requested"),
    ("(is|are|be|was|were) told", "receives, or is given"),
    ("by heart", "memorized"),
    ("at the desk|desks?", "locally, or on a developer's machine"),
    ("is good for naught|for naught", "useless"),
    ("ends? well", "finish cleanly"),
    ("look-ups?", "lookup"),
    // British spellings of words in -ize, -yze, -or, -er and others.
    (
        "(de|re|un|pre)?(quant|token|initial|normal|util|serial|organ|recogn|summar|synchron|vector|parallel|minim|maxim|general|special|character|real|final|visual|standard|random|discret|linear|priorit|emphas|categor|custom|memor|capital|neutral|local|material|author|formal|regular|factor|diagonal|binar|orthogonal|local|central)is(e|es|ed|er|ers|ing|ation|ations|able)",
        "American spelling: -ize",
    ),
    ("optimis(e|es|ed|er|ers|ing|ation|ations)", "American spelling: optimize"),
    ("(mis)?behaviour(s|al)?", "American spelling: behavior"),
    ("(colour|favour|honour|neighbour|flavour|labour)(s|ed|ing|able|ite|hood)?", "American spelling: -or"),
    ("licen[c]es?", "American spelling: license"),
    ("(centre|metre|litre|fibre)s?", "American spelling: -er"),
    ("analys(e|ed|er|ers|ing)", "American spelling: analyze"),
    (
        "(label|model|travel|cancel|signal|channel|level|total|tunnel|marshal|unravel)l(ed|ing|er|ers)",
        "American spelling: one l",
    ),
    ("artefacts?", "artifact"),
    ("(mis)?spelt|learnt|burnt", "spelled, learned, burned"),
    ("whilst|amongst", "while, among"),
    ("judgement", "judgment"),
    ("fulfils?|fulfilment", "fulfill"),
    ("defence|offence|pretence", "American spelling: -se"),
    ("grey", "gray"),
];

/// The quantities of a rate: `UNIT` above.
pub(super) const UNIT: &str = "[0-9]+([.,_][0-9]+)* ?(k|m|g|b|ki|mi|gi)?b?|bytes?|bits|tokens|rows|tokenizers?|values|floats|threads|\
                               sequences|tensors|kernels|layers|lines|launches|GiB|MiB|KiB|GB|MB|ms|FLOPs?|TFLOP/s|seconds";

/// The denominators of a rate: `PER` above.
pub(super) const PER: &str = "token|step|second|thread|row|value|weight|parameter|layer|block|tensor|file|rank|card|line|batch|\
                              column|head|program|launch|document|sequence|sample|message|element|group|warp|iteration|draw|\
                              multiprocessor|micro-batch|name|source|crate";

/// Parts of identifiers that violate the rules above. Matched with regard to case.
pub(super) const IDENTIFIERS: &[(&str, &str)] = &[
    (
        "([Qq]uant|[Tt]oken|[Ii]nitial|[Nn]ormal|[Uu]til|[Ss]erial|[Rr]ecogn|[Ss]ummar|[Ss]ynchron|[Vv]ector|[Pp]arallel|[Mm]inim|[Mm]axim|[Gg]eneral|[Ss]pecial|[Ff]inal|[Rr]andom|[Cc]ustom|[Oo]ptim|[Rr]egular|[Oo]rthogonal)is(e|ed|er|ers|es|ing|ation)",
        "American spelling: -ize",
    ),
    ("([Bb]ehaviour|[Cc]olour|[Nn]eighbour|[Ff]avour|[Hh]onour)", "American spelling: -or"),
    ("([Ll]icence)", "American spelling: license"),
    ("(O|o)racle", "reference"),
    ("(P|p)ortable(_body|_bodies|Body)", "reference"),
    ("(HandOver|hand_over)", "StreamHandoff"),
    ("(TrainedPositions)", "LossTargets"),
    ("(packs_on_device)", "quantizes_on_device"),
    ("(nf4_upload)", "upload_quantized"),
    ("(adamw(_8bit)?_many)", "adamw_foreach, adamw_8bit_foreach"),
    ("(trained_tokens)", "loss_tokens"),
    ("(NEAR_BYTES)", "CONTEXT_BYTES"),
    ("(MOST_[A-Z])", "MAX_..."),
];

/// Files that are not read, each with the reason. A name that ends with `/` is a folder.
pub(super) const EXEMPT: &[(&str, &str)] = &[
    ("CHANGELOG.md", "a history keeps its words"),
    ("LICENSE-APACHE", "a legal text"),
    ("LICENSE-MIT", "a legal text"),
    ("typos.toml", "lists words as data"),
    ("assets/", "data"),
    ("tests/fixtures/", "data"),
    ("tests/golden/", "data"),
    ("crates/data/fuzz/corpus/", "data"),
    ("crates/model/fuzz/corpus/", "data"),
    ("crates/data/tests/golden/make_templates.py", "chats as data"),
    ("xtask/src/tidy/words/", "lists the words as data"),
];
