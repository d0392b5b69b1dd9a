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
use crate::checkpoint::read::convert::element;
use crate::decoder::{Decoder, rotary_tables};
use crate::error::ModelError;
use crate::experts::{ExpertNorms, Experts, RouterNorm};
use crate::host_table::{HostTable, RowMean};
use crate::layer::{Layer, Mlp};
use crate::layer_inputs::LayerInputs;
use crate::linear::{Linear, LinearGroup, ModuleBias, ParameterAdapter, Stack};
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::per_layer::PerLayer;
use crate::shared_expert::SharedExpert;
use crate::token_rows::TokenRows;

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
        let layer_inputs = self.layer_inputs(spec)?;
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
            layer_inputs,
            layers,
            choices: None,
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
        let LayerGroups { mixer, mlp, per_layer } = spec.layer_groups(index);
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
            mlp: self.mlp(spec, index, &mlp)?,
            after_mlp: self.layer_norm(spec, index, names.after_mlp)?,
            per_layer: per_layer.map(|groups| self.per_layer(spec, index, &groups)).transpose()?,
            scalar: spec.layer_scalar(index).map(|tensor| self.number(&tensor)).transpose()?,
        })
    }

    fn per_layer(
        &mut self,
        spec: &ModelSpec,
        layer: usize,
        [gate, projection]: &[GroupSpec; 2],
    ) -> Result<Box<PerLayer<B>>, ModelError> {
        Ok(Box::new(PerLayer {
            layer,
            activation: spec.layers[layer].mlp.activation(),
            gate: self.group(gate)?,
            projection: self.group(projection)?,
            norm: self.norm_of(&spec.layer_norm(layer, "post_per_layer_input_norm"))?,
        }))
    }

    fn layer_inputs(&mut self, spec: &ModelSpec) -> Result<Option<LayerInputs<B>>, ModelError> {
        let Some((sizes, [table, projection, norm])) = spec.per_layer_inputs.zip(spec.per_layer_tensors()) else {
            return Ok(None);
        };
        let table = Arc::new(self.host_table(&table)?);
        let (rows, path) = (projection.shape[0], projection.name.trim_end_matches(".weight").to_owned());
        let shape = [rows, projection.shape[1]];
        let base = self.base(&projection.into())?;
        let module = Linear { path, columns: 0..rows, shape, stack: None, base, bias: None, lora: None };
        let norm = self.norm_of(&norm)?;
        Ok(Some(LayerInputs {
            table,
            projection: LinearGroup {
                modules: vec![module],
                parts: vec![rows],
                gemms: GemmFormat::Compute,
                dropout: 0.0,
            },
            // Rows that are not multiplied by hidden^-0.5 have a mean square that is larger by the hidden size.
            norm: Norm { epsilon: norm.epsilon * spec.hidden_size as f64, ..norm },
            layers: spec.layers.len(),
            width: sizes.width,
            orders: Arc::default(),
        }))
    }

    /// Takes the table of the layers' own inputs. A folder's is read once: to check and hash it, and for the mean of its rows if tokens were added.
    fn host_table(&mut self, tensor: &TensorSpec) -> Result<HostTable, ModelError> {
        let source = self.table.take().expect("a model whose layers have inputs comes with their table");
        let [rows, width] = [0, 1].map(|axis: usize| tensor.shape[axis]);
        let mut table = HostTable::new(source, rows, width);
        if table.is_stored() {
            let values = (self.read)(tensor)?;
            let dtype = values.dtype;
            let mut mean = (rows > table.stored_rows).then(|| RowMean::new(width));
            for piece in values {
                let piece = piece?;
                if let Some(mean) = &mut mean {
                    mean.add((0..piece.len() / dtype.size()).map(|at| element(&piece, dtype, at)));
                }
            }
            if let Some(mean) = mean {
                table.mean = mean.finish();
            }
        }
        (self.progress)(&tensor.name);
        Ok(table)
    }

    fn number(&mut self, tensor: &TensorSpec) -> Result<f32, ModelError> {
        let values = (self.read)(tensor)?;
        let dtype = values.dtype;
        let buffer = values.into_buffer(&|bytes| B::host_buffer(self.device, bytes))?;
        (self.progress)(&tensor.name);
        Ok(element(&buffer, dtype, 0))
    }

    fn mlp(&mut self, spec: &ModelSpec, index: usize, groups: &MlpGroups) -> Result<Mlp<B>, ModelError> {
        match (&spec.layers[index].mlp, groups) {
            (_, MlpGroups::Gated(groups)) => {
                let [gate_up, down] = groups.as_ref();
                Ok(Mlp::Gated { gate_up: self.group(gate_up)?, down: self.group(down)? })
            }
            (
                &MlpSpec::Experts { top_k, router: router_spec, activation, shared: shared_spec, .. },
                MlpGroups::Experts { router, experts, shared },
            ) => {
                let is_normed = shared_spec.is_some_and(|shared| shared.normed);
                let name = |name| is_normed.then_some(name);
                let router = self.group(router)?;
                let [router_scale, scale] = spec.router_scales(index).map_or([None, None], |scales| scales.map(Some));
                let mut vector = |tensor: Option<TensorSpec>| tensor.map(|tensor| self.vector(&tensor)).transpose();
                let correction = vector(spec.router_correction(index))?;
                let (router_scale, scale) = (vector(router_scale)?, vector(scale)?);
                let before = self.layer_norm(spec, index, name("pre_feedforward_layernorm_2"))?;
                let [gate_up, down] = [self.group(&experts[0])?, self.group(&experts[1])?];
                let after = self.layer_norm(spec, index, name("post_feedforward_layernorm_2"))?;
                let shared = shared.as_ref().map(|shared| self.shared(shared, activation)).transpose()?;
                let after_shared = self.layer_norm(spec, index, name("post_feedforward_layernorm_1"))?;
                let shared = shared.map(|shared| SharedExpert { after: after_shared, ..shared });
                let norms = router_scale.zip(before).zip(after).map(|((scale, before), after)| {
                    let router = RouterNorm::new(scale, spec.rms_norm_eps);
                    ExpertNorms { router, before, after }
                });
                Ok(Mlp::Experts(Box::new(Experts {
                    router,
                    correction,
                    scale,
                    norms,
                    gate_up,
                    down,
                    shared,
                    top_k,
                    router_spec,
                    activation,
                    choices: None,
                })))
            }
            (MlpSpec::Gated { .. }, MlpGroups::Experts { .. }) => unreachable!("groups follow from the spec"),
        }
    }

    /// Reads a shared expert without the norm of its output, which comes later.
    fn shared(&mut self, groups: &SharedGroups, activation: Activation) -> Result<SharedExpert<B>, ModelError> {
        let [gate_up, down] = &groups.mlp;
        Ok(SharedExpert {
            gate_up: self.group(gate_up)?,
            down: self.group(down)?,
            after: None,
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
