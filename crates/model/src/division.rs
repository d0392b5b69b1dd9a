//! Base weights of the layers that are divided over ranks (ZeRO stage 3; Rajbhandari et al., 2020): one rank owns each, and the others have it only
//! while they compute with its layer.
//!
//! A pass walks the layers on the schedule that also brings offloaded inputs back: the weights of the next layer arrive while one layer is computed.
//! Weights travel as they are stored: codes and scales of a quantized base, f32 of trained weights. Embedding, head, norms, biases and adapters are
//! on every rank. All ranks walk the same layers in the same order, so a pass on one rank is a pass on all.
//! Trade-off: whole tensors are assigned, not slices of each. Embedding and head are not divided, since the loss needs the whole head at the moment
//! of peak memory.

use std::collections::BTreeMap;
use std::ops::Deref;

use firebrick_kernels::memory::prefetch::Store;
use firebrick_kernels::{Communicator, Exchange, Kernels, Loan, Parameter, Payload, PayloadLayout, Weight};

use crate::layer::Layer;
use crate::linear::{Base, Linear};

/// The owner of each base weight of the layers.
#[derive(Clone, Debug)]
pub struct Division {
    /// Exchanges weights among the ranks.
    pub communicator: Communicator,
    /// The rank that has each divided tensor, by name; the same on every rank.
    pub owners: BTreeMap<String, usize>,
}

impl Division {
    /// Returns whether a tensor is on another rank.
    pub(crate) fn is_elsewhere(&self, name: &str) -> bool {
        self.owners.get(name).is_some_and(|owner| *owner != self.communicator.rank())
    }

    /// Returns the rank that has the weight of a module; `None` if every rank has it, as the gate of a shared expert.
    fn owner_of<B: Kernels>(&self, linear: &Linear<B>) -> Option<usize> {
        self.owners.get(&format!("{}.weight", linear.path)).copied()
    }
}

/// A layer as a pass reads it.
pub(crate) enum LayerRef<'a, B: Kernels> {
    Resident(&'a Layer<B>),
    /// With weights that other ranks have.
    Gathered(Box<Layer<B>>),
}

impl<B: Kernels> Deref for LayerRef<'_, B> {
    type Target = Layer<B>;

    fn deref(&self) -> &Layer<B> {
        match self {
            Self::Resident(layer) => layer,
            Self::Gathered(layer) => layer,
        }
    }
}

/// The layers of a model, which are gathered where ranks divide them.
pub(crate) struct Blocks<'a, B: Kernels> {
    pub(crate) layers: &'a [Layer<B>],
    pub(crate) division: Option<&'a Division>,
    pub(crate) device: &'a B::Device,
    /// Weights on their way, by layer.
    pub(crate) coming: BTreeMap<usize, Exchange<B>>,
}

impl<'a, B: Kernels> Store for Blocks<'a, B> {
    type Item = LayerRef<'a, B>;

    fn prefetch(&mut self, index: usize) {
        let (Some(division), layer) = (self.division, &self.layers[index]) else { return };
        self.coming.entry(index).or_insert_with(|| {
            let started = division.communicator.start_broadcast(loans(layer, division), self.device);
            started.unwrap_or_else(|error| error.raise())
        });
    }

    fn take(&mut self, index: usize) -> LayerRef<'a, B> {
        self.prefetch(index);
        let layer = &self.layers[index];
        match self.coming.remove(&index) {
            None => LayerRef::Resident(layer),
            Some(exchange) => {
                let division = self.division.expect("only weights that are divided are on their way");
                let (mut layer, mut arrived) = (layer.clone(), exchange.finish().into_iter());
                // In the order of `loans`.
                for linear in layer.linears_mut().filter(|linear| division.owner_of(linear).is_some()) {
                    let count = layouts(&linear.base, linear.shape).len();
                    let parts: Vec<_> = arrived.by_ref().take(count).collect();
                    linear.base = with_parts(&linear.base, linear.shape, parts);
                }
                LayerRef::Gathered(Box::new(layer))
            }
        }
    }

    /// Drops the borrowed weights.
    fn put(&mut self, _index: usize, _layer: LayerRef<'a, B>) {}
}

/// Lists the weights of a layer that ranks exchange, in the order of its modules.
fn loans<B: Kernels>(layer: &Layer<B>, division: &Division) -> Vec<Loan<B>> {
    let mut loans = Vec::new();
    for linear in layer.linears() {
        let Some(root) = division.owner_of(linear) else { continue };
        if root == division.communicator.rank() {
            let parts = parts(&linear.base).into_iter();
            loans.extend(parts.map(|part| Loan::of(part, root)));
        } else {
            let layouts = layouts(&linear.base, linear.shape).into_iter();
            loans.extend(layouts.map(|layout| Loan { root, layout, own: None }));
        }
    }
    loans
}

/// Returns the tensors of a base, as they are sent.
fn parts<B: Kernels>(base: &Base<B>) -> Vec<Payload<B>> {
    match base {
        Base::Trained(parameter) => vec![Payload::Values(parameter.value.clone())],
        Base::Frozen(Weight::Dense(weight)) => {
            let [rows, columns] = weight.dims();
            vec![Payload::Values(weight.clone().reshape([rows * columns]))]
        }
        Base::Frozen(Weight::Quantized(weight)) => weight.parts(),
    }
}

/// Returns the layout of [`parts`] for a base that may be on another rank.
fn layouts<B: Kernels>(base: &Base<B>, shape: [usize; 2]) -> Vec<PayloadLayout> {
    let values = |dtype| vec![PayloadLayout { is_codes: false, dtype, elements: shape[0] * shape[1] }];
    match base {
        Base::Trained(parameter) => values(parameter.value.dtype()),
        Base::Frozen(Weight::Dense(weight)) => values(weight.dtype()),
        Base::Frozen(Weight::Quantized(weight)) => weight.layouts(shape),
    }
}

fn with_parts<B: Kernels>(base: &Base<B>, shape: [usize; 2], parts: Vec<Payload<B>>) -> Base<B> {
    let values = |parts: Vec<Payload<B>>| parts.into_iter().next().expect("a base has a value").into_values();
    match base {
        Base::Trained(parameter) => Base::Trained(Parameter { value: values(parts), ..parameter.clone() }),
        Base::Frozen(Weight::Dense(_)) => Base::Frozen(Weight::Dense(values(parts).reshape(shape))),
        Base::Frozen(Weight::Quantized(weight)) => Base::Frozen(Weight::Quantized(weight.with_parts(shape, parts))),
    }
}
