//! What mixers have besides linear modules: how it is read from a folder, and which of it trains.

use firebrick_arch::{Mixer as MixerSpec, TensorSpec};
use firebrick_kernels::{Kernels, Parameter};

use super::{Attention, AttentionSinks, DeltaNet, MixerKind, ShortConv};
use crate::error::ModelError;
use crate::load::Builder;
use crate::norm::Norm;

impl<B: Kernels> Builder<'_, '_, B> {
    /// Reads what a mixer has besides linear modules: these vectors.
    pub(crate) fn mixer(&mut self, vectors: Vec<TensorSpec>, spec: &MixerSpec) -> Result<MixerKind<B>, ModelError> {
        let (count, mut vectors) = (vectors.len(), vectors.into_iter());
        let mut next = || vectors.next().expect("a mixer lists its vectors");
        let spec = match spec {
            MixerSpec::Attention(spec) => spec,
            MixerSpec::ShortConv(spec) => {
                let filters = next();
                let (trains, filters) = (self.formats().trains(&filters.name), self.vector(&filters)?);
                return Ok(MixerKind::ShortConv(ShortConv { spec: spec.clone(), filters, trains }));
            }
            MixerSpec::DeltaNet(spec) => {
                let filters: Vec<_> = spec.filters().iter().map(|_| next()).collect();
                let trains = self.formats().trains(&filters[0].name);
                let filters = filters.iter().map(|filters| self.vector(filters)).collect::<Result<_, _>>()?;
                let [dt_bias, a_log] = [self.vector(&next())?, self.vector(&next())?];
                let norm = self.norm_of(&next())?;
                let norm = Norm { epsilon: spec.norm_epsilon.unwrap_or(norm.epsilon), ..norm };
                let delta = DeltaNet { spec: spec.clone(), trains, filters, dt_bias, a_log, norm };
                return Ok(MixerKind::DeltaNet(Box::new(delta)));
            }
        };
        let norms = count - usize::from(spec.sinks);
        let qk_norm = (0..norms).map(|_| self.norm_of(&next())).collect::<Result<_, _>>()?;
        let sinks = if spec.sinks { Some(self.sinks(&next())?) } else { None };
        let value_norm = spec.value_norm.then(|| self.norm_without_weight(spec.head_dim));
        Ok(MixerKind::Attention(Box::new(Attention { spec: spec.clone(), qk_norm, value_norm, sinks })))
    }

    fn sinks(&mut self, tensor: &TensorSpec) -> Result<AttentionSinks<B>, ModelError> {
        Ok(AttentionSinks { logits: self.vector(tensor)?, trains: self.formats().trains(&tensor.name) })
    }
}

macro_rules! lists {
    ($parameters:ident $(, $mutable:tt)?) => {
        impl<B: Kernels> MixerKind<B> {
            pub(crate) fn $parameters(&$($mutable)? self) -> impl Iterator<Item = &$($mutable)? Parameter<B>> {
                let parameters: Vec<&$($mutable)? Parameter<B>> = match self {
                    Self::Attention(attention) => {
                        let Attention { qk_norm, sinks, .. } = &$($mutable)? **attention;
                        let sinks = sinks.into_iter().filter(|sinks| sinks.trains);
                        let logits = sinks.map(|AttentionSinks { logits, .. }| logits);
                        qk_norm.into_iter().flat_map(Norm::$parameters).chain(logits).collect()
                    }
                    Self::ShortConv(ShortConv { filters, trains, .. }) => trains.then_some(filters).into_iter().collect(),
                    Self::DeltaNet(delta) => {
                        let DeltaNet { filters, dt_bias, a_log, norm, trains, .. } = &$($mutable)? **delta;
                        let own = trains.then_some(filters.into_iter().chain([dt_bias, a_log]));
                        own.into_iter().flatten().chain(norm.$parameters()).collect()
                    }
                };
                parameters.into_iter()
            }
        }
    };
}

lists!(parameters);
lists!(parameters_mut, mut);
