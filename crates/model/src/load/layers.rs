//! The layers of a decoder, module by module, in the order of `ModelSpec::tensors`.

use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_arch::{
    Activation, EMBEDDING, GroupKind, GroupSpec, HEAD, LayerGroups, LayerSpec, LoraConfig, MlpGroups, MlpSpec,
    ModelSpec, ModuleSpec, PieceSpec, Role, SharedGroups, TensorSpec,
};
use firebrick_kernels::{GemmFormat, Kernels, NormWeight, TILE_TOKENS};

use super::Builder;
use super::on_device::BaseSpec;
use crate::decoder::{Decoder, rotary_tables};
use crate::error::ModelError;
use crate::experts::Experts;
use crate::layer::{Layer, Mlp};
use crate::linear::{Linear, LinearGroup, ModuleBias, ParameterAdapter, Stack};
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::shared_expert::SharedExpert;
use crate::token_rows::TokenRows;

/// Shorthand for a tensor to be read.
fn tensor(name: &str, shape: &[usize], role: Role) -> TensorSpec {
    TensorSpec { name: name.to_owned(), shape: shape.to_vec(), role, layer: None }
}

impl<B: Kernels> Builder<'_, '_, B> {
    pub(super) fn build(mut self) -> Result<Decoder<B>, ModelError> {
        let spec = &self.config.spec;
        if let Some(lora) = &self.options.lora {
            // Refuses a target that the model does not have.
            spec.adapter_tensors(lora)?;
        }
        let table = [spec.vocab_size, spec.hidden_size];
        let embed_tokens = self.base(&tensor(EMBEDDING, &table, Role::Embedding).into())?;
        let layers = (0..spec.layers.len()).map(|index| self.layer(spec, index)).collect::<Result<_, _>>()?;
        let norm = self.norm_of(&spec.final_norm())?;
        let lm_head = if spec.tie_word_embeddings && !self.options.unties(spec) {
            None
        } else {
            Some(self.base(&tensor(HEAD, &table, Role::Head).into())?)
        };
        let lora = self.options.lora.as_ref();
        let embed_rows = TokenRows::new(EMBEDDING, &embed_tokens, spec, lora);
        let head_rows = lm_head.as_ref().and_then(|head| TokenRows::new(HEAD, head, spec, lora));
        let mut decoder = Decoder {
            embed_tokens,
            embed_rows,
            head_rows,
            layers,
            norm,
            lm_head,
            rotary: rotary_tables(spec, self.options.max_positions, self.options.sequence_tokens, self.device),
            max_positions: self.options.max_positions,
            sequence_tokens: self.options.sequence_tokens,
            compute_dtype: self.options.compute_dtype,
            tile_tokens: TILE_TOKENS,
            base_hash: None,
            division: self.division,
            device: self.device.clone(),
            config: self.config.clone(),
        };
        decoder.start_magnitudes();
        Ok(decoder)
    }

    /// Reads a layer's tensors in the order of `ModelSpec::tensors`: each norm where the forward pass meets it.
    fn layer(&mut self, spec: &ModelSpec, index: usize) -> Result<Layer<B>, ModelError> {
        let LayerGroups { mixer, mlp } = spec.layer_groups(index);
        let layer: &LayerSpec = &spec.layers[index];
        let names = layer.norms.names();
        // Fields are read in the order in which they are written.
        Ok(Layer {
            spec: layer.clone(),
            before_mixer: self.layer_norm(spec, index, names.before_mixer)?,
            mixer: Mixer {
                input: self.group(&mixer.input)?,
                kind: self.mixer(spec.vectors(index), &layer.mixer)?,
                output: self.group(&mixer.output)?,
            },
            after_mixer: self.layer_norm(spec, index, names.after_mixer)?,
            before_mlp: self.layer_norm(spec, index, names.before_mlp)?,
            mlp: self.mlp(spec.router_correction(index), &layer.mlp, &mlp)?,
            after_mlp: self.layer_norm(spec, index, names.after_mlp)?,
        })
    }

    fn mlp(
        &mut self,
        correction: Option<TensorSpec>,
        spec: &MlpSpec,
        groups: &MlpGroups,
    ) -> Result<Mlp<B>, ModelError> {
        match (spec, groups) {
            (_, MlpGroups::Gated(groups)) => {
                let [gate_up, down] = groups.as_ref();
                Ok(Mlp::Gated { gate_up: self.group(gate_up)?, down: self.group(down)? })
            }
            (
                &MlpSpec::Experts { top_k, router: router_spec, activation, .. },
                MlpGroups::Experts { router, experts, shared },
            ) => Ok(Mlp::Experts(Box::new(Experts {
                router: self.group(router)?,
                correction: correction.map(|tensor| self.vector(&tensor)).transpose()?,
                gate_up: self.group(&experts[0])?,
                down: self.group(&experts[1])?,
                shared: shared.as_ref().map(|shared| self.shared(shared, activation)).transpose()?,
                top_k,
                router_spec,
                activation,
            }))),
            (MlpSpec::Gated { .. }, MlpGroups::Experts { .. }) => unreachable!("groups follow from the spec"),
        }
    }

    fn shared(&mut self, groups: &SharedGroups, activation: Activation) -> Result<SharedExpert<B>, ModelError> {
        let [gate_up, down] = &groups.mlp;
        Ok(SharedExpert {
            gate_up: self.group(gate_up)?,
            down: self.group(down)?,
            gate: groups.gate.as_ref().map(|gate| self.group(gate)).transpose()?,
            activation,
        })
    }

    fn layer_norm(
        &mut self,
        spec: &ModelSpec,
        layer: usize,
        name: Option<&str>,
    ) -> Result<Option<Norm<B>>, ModelError> {
        name.map(|name| self.norm_of(&spec.layer_norm(layer, name))).transpose()
    }

    fn group(&mut self, group: &GroupSpec) -> Result<LinearGroup<B>, ModelError> {
        let modules = group.modules.iter().map(|module| self.linear(module, group)).collect::<Result<_, _>>()?;
        let dropout = self.options.lora.as_ref().map_or(0.0, |lora| lora.lora_dropout);
        let gemms = if group.kind.decides() { GemmFormat::Compute } else { self.options.gemms };
        Ok(LinearGroup { modules, parts: group.parts.clone(), gemms, dropout })
    }

    fn linear(&mut self, module: &ModuleSpec, group: &GroupSpec) -> Result<Linear<B>, ModelError> {
        let shape = [module.rows(), group.in_features];
        let weight = BaseSpec {
            tensor: tensor(&module.weight_name(), &shape, group.kind.weight_role()),
            pieces: &module.pieces,
            experts: group.experts,
        };
        let adapts = |lora: &&LoraConfig| group.kind != GroupKind::Router && lora.adapts(module.lora_path());
        let (base, lora) = match self.options.lora.as_ref().filter(adapts) {
            Some(lora) if !lora.init_lora_weights.is_uniform() => {
                self.divided_at_its_principal_part(&weight, module, lora)?
            }
            Some(lora) => (self.base(&weight)?, Some(self.lora(module, group, lora))),
            None => (self.base(&weight)?, None),
        };
        let bias = if module.bias { Some(self.bias(module)?) } else { None };
        let adapter = self.options.lora.as_ref().zip(module.parameter).map(|(config, order)| {
            let path = config.parameter_adapter(&module.path);
            ParameterAdapter { path, order }
        });
        let stack = group.experts.map(|experts| Arc::new(Stack { experts, pieces: module.pieces.clone(), adapter }));
        Ok(Linear { path: module.path.clone(), columns: module.columns.clone(), shape, stack, base, bias, lora })
    }

    pub(crate) fn norm_of(&mut self, tensor: &TensorSpec) -> Result<Norm<B>, ModelError> {
        let weight = self.vector(tensor)?;
        let (spec, trains) = (&self.config.spec, self.formats().trains(&tensor.name));
        Ok(Norm { weight, trains, offset: spec.norm_offset_of(tensor), epsilon: spec.rms_norm_eps })
    }

    /// Builds a norm that no checkpoint has a weight of.
    pub(crate) fn norm_without_weight(&self, size: usize) -> NormWeight<B> {
        let (weight, epsilon) = (Tensor::ones([size], self.device), self.config.spec.rms_norm_eps);
        NormWeight { weight, offset: 0.0, epsilon, trains: false }
    }

    fn bias(&mut self, module: &ModuleSpec) -> Result<ModuleBias<B>, ModelError> {
        let name = module.bias_name();
        let piece = |piece: &PieceSpec| tensor(&piece.bias_name(), &[piece.rows], Role::Bias);
        let pieces: Vec<TensorSpec> = module.pieces.iter().map(piece).collect();
        let parameter = self.vector_of(&tensor(&name, &[module.rows()], Role::Bias), &pieces)?;
        Ok(ModuleBias { parameter, trains: self.formats().trains(&name) })
    }
}
