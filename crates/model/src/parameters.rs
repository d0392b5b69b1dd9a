//! The parameters that train, from one list: `parameters` reads and `parameters_mut` updates them in the same order.
//!
//! Trade-off: a macro writes both, because a list of shared references cannot become one of mutable references.

use firebrick_kernels::{Kernels, Parameter};

use crate::decoder::Decoder;
use crate::experts::Experts;
use crate::layer::{Layer, Mlp};
use crate::linear::{Base, Linear, LinearGroup, Lora, LoraMagnitude, ModuleBias};
use crate::mixer::Mixer;
use crate::norm::Norm;
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
                let Self { before_mixer, after_mixer, before_mlp, after_mlp, mixer, mlp, .. } = self;
                let norms = [before_mixer, after_mixer, before_mlp, after_mlp].into_iter().flatten();
                let Mixer { input, kind, output } = mixer;
                let mlp = match mlp {
                    Mlp::Gated { gate_up, down } => vec![gate_up, down],
                    Mlp::Experts(experts) => {
                        let Experts { router, gate_up, down, shared, .. } = &$($mutable)? **experts;
                        let shared = shared.into_iter().flat_map(|SharedExpert { gate_up, down, gate, .. }| {
                            [gate_up, down].into_iter().chain(gate)
                        });
                        [router, gate_up, down].into_iter().chain(shared).collect()
                    }
                };
                let groups = [input, output].into_iter().chain(mlp);
                let linears = groups.flat_map(|LinearGroup { modules, .. }| modules);
                norms.flat_map(Norm::$parameters).chain(kind.$parameters()).chain(linears.flat_map(Linear::$parameters))
            }
        }

        impl<B: Kernels> Decoder<B> {
            /// Lists every trained parameter in the order of the forward pass: `parameters` for reading, `parameters_mut` for updates.
            pub fn $parameters(&$($mutable)? self) -> Vec<&$($mutable)? Parameter<B>> {
                let Self { embed_tokens, embed_rows, layers, norm, lm_head, head_rows, .. } = self;
                let embed_rows = embed_rows.into_iter().map(|TokenRows { parameter, .. }| parameter);
                let layers = layers.into_iter().flat_map(Layer::$parameters);
                let head = lm_head.into_iter().filter_map(Base::$trained);
                let head = head.chain(head_rows.into_iter().map(|TokenRows { parameter, .. }| parameter));
                let embedding = embed_tokens.$trained().into_iter().chain(embed_rows);
                embedding.chain(layers).chain(norm.$parameters()).chain(head).collect()
            }
        }
    };
}

lists!(parameters, trained);
lists!(parameters_mut, trained_mut, mut);
