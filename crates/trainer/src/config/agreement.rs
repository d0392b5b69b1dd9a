//! `compute` and its older names `train.bf16` and `bnb_4bit.compute_dtype`: what they mean together.
//!
//! Trade-off: the older names stay accepted, so every recipe is checked for contradictions between three keys.

use firebrick_precision::Format;

use crate::config::compute::Compute;
use crate::config::recipe::RunConfig;

/// A statement of the recipe about the compute format.
struct Statement {
    key: &'static str,
    written: String,
    agrees: bool,
}

impl RunConfig {
    /// What the recipe requests to compute in.
    #[must_use]
    pub fn compute(&self) -> Compute {
        let older = self.bnb_4bit.as_ref().and_then(|bnb| bnb.compute_dtype).map(Compute::Plain);
        match (self.compute.or(older), self.train.bf16) {
            (Some(compute), _) => compute,
            (None, Some(false)) => Compute::Plain(Format::F32),
            (None, _) => Compute::Plain(Format::Bf16),
        }
    }

    /// The first two keys that contradict each other about the compute format: the key, what the other one says, the other key.
    pub(super) fn compute_contradiction(&self) -> Option<(&'static str, String, &'static str)> {
        let statements = self.statements();
        let (against, for_it): (Vec<&Statement>, Vec<&Statement>) =
            statements.iter().partition(|statement| !statement.agrees);
        let (wrong, other) = (against.first()?, for_it.first()?);
        Some((wrong.key, other.written.clone(), other.key))
    }

    /// What the recipe says about the format, in the order in which [`RunConfig::compute`] reads it.
    fn statements(&self) -> Vec<Statement> {
        let activations = self.compute().activations();
        let of_format = |key: &'static str, compute: Compute| Statement {
            key,
            written: format!("{key} = \"{compute}\""),
            agrees: compute.activations() == activations,
        };
        let older = self.bnb_4bit.as_ref().and_then(|bnb| bnb.compute_dtype);
        let mut statements: Vec<Statement> =
            self.compute.map(|compute| of_format("compute", compute)).into_iter().collect();
        statements.extend(older.map(|format| of_format("bnb_4bit.compute_dtype", Compute::Plain(format))));
        statements.extend(self.train.bf16.map(|bf16| Statement {
            key: "train.bf16",
            written: format!("train.bf16 = {bf16}"),
            agrees: bf16 == (activations == Format::Bf16),
        }));
        statements
    }
}
