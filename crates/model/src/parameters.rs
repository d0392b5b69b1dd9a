//! The parameters that train, from one list: `parameters` reads and `parameters_mut` updates them in the same order.
//!
//! Trade-off: a macro writes both, because a list of shared references cannot become one of mutable references.

use firebrick_kernels::{Kernels, Parameter};

use crate::decoder::Decoder;
use crate::experts::{ExpertNorms, Experts};
use crate::layer::{Layer, Mlp};
use crate::layer_inputs::LayerInputs;
use crate::linear::{Base, Linear, LinearGroup, Lora, LoraMagnitude, ModuleBias};
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::per_layer::PerLayer;
use crate::shared_expert::SharedExpert;
use crate::token_rows::TokenRows;

macro_rules! lists {
    ($parameters:ident, $trained:ident $(, $mutable:tt)?) => {
        impl<B: Kernels> Norm<B> {
            pub(crate) fn $parameters(&$($mutable)? self) -> impl Iterator<Item = &$($mutable)? Parameter<B>> {
                self.trains.then_some(&$($mutable)? self.weight).into_iter()
            }
        }

        impl<B: Kernels> Linear<B> {
            pub(crate) fn $parameters(&$($mutable)? self) -> impl Iterator<Item = &$($mutable)? Parameter<B>> {
                let Self { base, bias, lora, .. } = self;
                let bias = bias.into_iter().filter(|bias| bias.trains);
                let bias = bias.map(|ModuleBias { parameter, .. }| parameter);
                let lora = lora.into_iter().flat_map(|Lora { a, b, magnitude, .. }| {
                    [a, b].into_iter().chain(magnitude.into_iter().map(|LoraMagnitude { parameter, .. }| parameter))
                });
                base.$trained().into_iter().chain(bias).chain(lora)
            }
        }

        impl<B: Kernels> Layer<B> {
            /// Iterates over the norms first, then over the mixer's other parameters and the linear modules with the router.
            pub(crate) fn $parameters(&$($mutable)? self) -> impl Iterator<Item = &$($mutable)? Parameter<B>> {
                let Self { before_mixer, after_mixer, before_mlp, after_mlp, mixer, mlp, per_layer, .. } = self;
                let norms = [before_mixer, after_mixer, before_mlp, after_mlp].into_iter().flatten();
                let (own, own_norm) = match per_layer {
                    None => (Vec::new(), None),
                    Some(per_layer) => {
                        let PerLayer { gate, projection, norm, .. } = &$($mutable)? **per_layer;
                        (vec![gate, projection], Some(norm))
                    }
                };
                let Mixer { input, kind, output } = mixer;
                let mut inner_norms: Vec<&$($mutable)? Norm<B>> = Vec::new();
                let mlp = match mlp {
                    Mlp::Gated { gate_up, down } => vec![gate_up, down],
                    Mlp::Experts(experts) => {
                        let Experts { router, gate_up, down, shared, norms, .. } = &$($mutable)? **experts;
                        let own = norms.into_iter().flat_map(|ExpertNorms { before, after, .. }| [before, after]);
                        inner_norms.extend(own);
                        let shared = shared.into_iter().flat_map(|SharedExpert { gate_up, down, after, gate, .. }| {
                            inner_norms.extend(after);
                            [gate_up, down].into_iter().chain(gate)
                        });
                        [router, gate_up, down].into_iter().chain(shared).collect()
                    }
                };
                let norms = norms.chain(inner_norms);
                let groups = [input, output].into_iter().chain(mlp).chain(own);
                let linears = groups.flat_map(|LinearGroup { modules, .. }| modules);
                let norms = norms.chain(own_norm).flat_map(Norm::$parameters);
                norms.chain(kind.$parameters()).chain(linears.flat_map(Linear::$parameters))
            }
        }

        impl<B: Kernels> LayerInputs<B> {
            pub(crate) fn $parameters(&$($mutable)? self) -> impl Iterator<Item = &$($mutable)? Parameter<B>> {
                let Self { projection: LinearGroup { modules, .. }, norm, .. } = self;
                modules.into_iter().flat_map(Linear::$parameters).chain(norm.$parameters())
            }
        }

        impl<B: Kernels> Decoder<B> {
            /// Lists every trained parameter in the order of the forward pass: `parameters` for reading, `parameters_mut` for updates.
            pub fn $parameters(&$($mutable)? self) -> Vec<&$($mutable)? Parameter<B>> {
                let Self { embed_tokens, embed_rows, layer_inputs, layers, norm, lm_head, head_rows, .. } = self;
                let embed_rows = embed_rows.into_iter().map(|TokenRows { parameter, .. }| parameter);
                let layer_inputs = layer_inputs.into_iter().flat_map(LayerInputs::$parameters);
                let layers = layers.into_iter().flat_map(Layer::$parameters);
                let head = lm_head.into_iter().filter_map(Base::$trained);
                let head = head.chain(head_rows.into_iter().map(|TokenRows { parameter, .. }| parameter));
                let embedding = embed_tokens.$trained().into_iter().chain(embed_rows);
                embedding.chain(layer_inputs).chain(layers).chain(norm.$parameters()).chain(head).collect()
            }
        }
    };
}

lists!(parameters, trained);
lists!(parameters_mut, trained_mut, mut);
