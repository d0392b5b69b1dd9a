//! A linear layer: a base weight, frozen (dense or NF4) or trained, with an optional LoRA pair beside it.

use firebrick_kernels::{GradientMap, Kernels, LoraPair, Parameter, Projection, ProjectionGradients, Weight};

/// A weight matrix and whether it trains.
#[derive(Clone, Debug)]
pub enum Base<B: Kernels> {
    /// Read only; as it is stored.
    Frozen(Weight<B>),
    /// Full fine-tuning and pretraining.
    Trained(Parameter<B>),
}

impl<B: Kernels> Base<B> {
    /// The weight as an op takes it; a handle, not a copy.
    pub fn weight(&self) -> Weight<B> {
        match self {
            Self::Frozen(weight) => weight.clone(),
            Self::Trained(parameter) => Weight::Dense(parameter.matrix()),
        }
    }

    /// The parameter, if the base trains.
    pub fn trained(&self) -> Option<&Parameter<B>> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(parameter) => Some(parameter),
        }
    }

    pub(crate) fn trained_mut(&mut self) -> Option<&mut Parameter<B>> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(parameter) => Some(parameter),
        }
    }
}

/// A LoRA pair as it trains: A `[r, in]`, B `[out, r]`.
#[derive(Clone, Debug)]
pub struct Lora<B: Kernels> {
    /// `..lora_A.weight`.
    pub a: Parameter<B>,
    /// `..lora_B.weight`.
    pub b: Parameter<B>,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f64,
}

/// `y = x Wᵀ`, plus the LoRA pair if there is one.
#[derive(Clone, Debug)]
pub struct Linear<B: Kernels> {
    /// Hugging Face module path, e.g. `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// The weight.
    pub base: Base<B>,
    /// The adapter.
    pub lora: Option<Lora<B>>,
}

impl<B: Kernels> Linear<B> {
    /// The layer as an op takes it; handles, not copies.
    pub(crate) fn projection(&self) -> Projection<B> {
        let pair = |lora: &Lora<B>| LoraPair { a: lora.a.matrix(), b: lora.b.matrix(), scale: lora.scale };
        Projection {
            weight: self.base.weight(),
            lora: self.lora.as_ref().map(pair),
            weight_gradient: self.base.trained().is_some(),
        }
    }

    /// Adds what the backward of [`Linear::projection`] found to `gradients`.
    pub(crate) fn add_gradients(&self, found: ProjectionGradients<B>, gradients: &mut GradientMap<B>) {
        if let (Some(parameter), Some(weight)) = (self.base.trained(), found.weight_oi) {
            gradients.add(parameter, weight);
        }
        if let (Some(lora), Some((a, b))) = (&self.lora, found.lora) {
            gradients.add(&lora.a, a);
            gradients.add(&lora.b, b);
        }
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        let lora = self.lora.iter_mut().flat_map(|lora| [&mut lora.a, &mut lora.b]);
        self.base.trained_mut().into_iter().chain(lora)
    }
}
