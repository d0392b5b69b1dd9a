//! A linear layer: a base weight, frozen (dense or NF4) or trained, with an optional LoRA pair beside it.

use burn_tensor::Tensor;
use firebrick_kernels::{GradientMap, Kernels, LinearOutput, LoraPair, Parameter, Weight};

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
    pub(crate) fn forward(&self, x_ni: Tensor<B, 2>) -> LinearOutput<B> {
        B::lora_linear(x_ni, &self.base.weight(), self.pair().as_ref())
    }

    /// Adds this layer's gradients to `gradients` and returns the gradient of the input, plus `dx_so_far`.
    pub(crate) fn backward(
        &self,
        x_ni: Tensor<B, 2>,
        xa_nr: Option<Tensor<B, 2>>,
        dy_no: Tensor<B, 2>,
        dx_so_far: Option<Tensor<B, 2>>,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 2> {
        let pair = self.pair();
        let lora = pair.as_ref().zip(xa_nr);
        let trained = self.base.trained();
        let found = B::lora_linear_backward(x_ni, &self.base.weight(), lora, dy_no, dx_so_far, trained.is_some());
        if let (Some(parameter), Some(weight)) = (trained, found.weight_oi) {
            gradients.add(parameter, weight);
        }
        if let (Some(lora), Some((a, b))) = (&self.lora, found.lora) {
            gradients.add(&lora.a, a);
            gradients.add(&lora.b, b);
        }
        found.dx_ni
    }

    fn pair(&self) -> Option<LoraPair<B>> {
        let lora = self.lora.as_ref()?;
        Some(LoraPair { a: lora.a.matrix(), b: lora.b.matrix(), scale: lora.scale })
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        let lora = self.lora.iter_mut().flat_map(|lora| [&mut lora.a, &mut lora.b]);
        self.base.trained_mut().into_iter().chain(lora)
    }
}
