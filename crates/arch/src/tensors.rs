//! Every tensor of a model: name on disk, shape and role, in the order in which the forward pass meets them.
//!
//! This list is the single source for checkpoint contents, the order of loading, parameter counts, memory and the optimizer's groups. Names are
//! Hugging Face's. A second list has the tensors of a run, in which the experts of a module are one tensor: a stack.
//! Trade-off: the list is rebuilt on each call; a model has a few hundred tensors.

use crate::groups::{LayerGroups, MlpGroups};
use crate::modules::{GroupKind, GroupSpec, ModuleSpec, PieceSpec};
use crate::naming::{LayerPath, Naming};
use crate::spec::{ExpertNames, MlpSpec, ModelSpec, NormNames, PerLayerInputs};
use crate::tensor_spec::{Role, TensorSpec};

/// Name of the embedding in a checkpoint.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the table of layers' own inputs in a checkpoint.
pub const PER_LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer.weight";
/// Name of the head in a checkpoint; absent where it is tied to the embedding.
pub const HEAD: &str = "lm_head.weight";

impl GroupKind {
    /// Returns the role of the weights of the group's modules.
    pub fn weight_role(self) -> Role {
        if matches!(self, Self::Router | Self::SharedGate) { Role::Router } else { Role::Projection }
    }
}

/// Returns whether checkpoints hold the tensor of this name in f32, whatever format the others have.
pub fn is_stored_in_f32(name: &str) -> bool {
    ExpertNames::CORRECTIONS.iter().any(|correction| name.ends_with(correction))
}

impl ModelSpec {
    /// Lists every tensor of the model on disk in the order of the forward pass: experts module by module, all experts of a module one after the
    /// other. A tied head is not listed: it is the embedding.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.tensors_in(Form::Stored)
    }

    /// Lists every tensor of the model as a run has it: [`ModelSpec::tensors`] with the experts of a module as one tensor.
    pub fn stacked_tensors(&self) -> Vec<TensorSpec> {
        self.tensors_in(Form::Stacked)
    }

    fn tensors_in(&self, form: Form) -> Vec<TensorSpec> {
        let table = vec![self.vocab_size, self.hidden_size];
        let mut tensors = vec![outside(EMBEDDING, table.clone(), Role::Embedding)];
        tensors.extend(self.per_layer_tensors().into_iter().flatten());
        for layer in 0..self.layers.len() {
            self.add_layer(layer, form, &mut tensors);
        }
        tensors.push(self.final_norm());
        if !self.tie_word_embeddings {
            tensors.push(outside(HEAD, table, Role::Head));
        }
        tensors
    }

    /// Returns the tensor of the final norm.
    pub fn final_norm(&self) -> TensorSpec {
        outside(self.naming.final_norm(), vec![self.hidden_size], Role::Norm)
    }

    /// Returns the tensors that compute the layers' own inputs: the table, the projection of the scaled embedding, and the norm of what that projects
    /// for one layer.
    pub fn per_layer_tensors(&self) -> Option<[TensorSpec; 3]> {
        let PerLayerInputs { width, vocab_size } = self.per_layer_inputs?;
        let all = self.layers.len().saturating_mul(width);
        let projection = "model.per_layer_model_projection.weight";
        Some([
            outside(PER_LAYER_EMBEDDING, vec![vocab_size, all], Role::PerLayerEmbedding),
            outside(projection, vec![all, self.hidden_size], Role::Projection),
            outside("model.per_layer_projection_norm.weight", vec![width], Role::Norm),
        ])
    }

    /// Returns the tensor of the number that a layer's output is multiplied by.
    pub fn layer_scalar(&self, layer: usize) -> Option<TensorSpec> {
        self.layers[layer].has_scalar.then(|| self.path(layer).vector("layer_scalar", 1, Role::LayerScalar))
    }

    /// Returns the tensor of a norm of layer `layer` over the hidden size, by its name in [`LayerNorms::names`](crate::LayerNorms::names).
    pub fn layer_norm(&self, layer: usize, name: &str) -> TensorSpec {
        self.path(layer).vector(&format!("{name}.weight"), self.hidden_size, Role::Norm)
    }

    /// Returns the tensor of the correction of the scores of a layer's router.
    pub fn router_correction(&self, layer: usize) -> Option<TensorSpec> {
        let MlpSpec::Experts { router, names, count, .. } = &self.layers[layer].mlp else { return None };
        let path = format!("{}{}", names.block(), names.correction());
        router.corrects.then(|| self.path(layer).vector(&path, *count, Role::RouterCorrection))
    }

    /// Returns the tensors of the factors of a layer's router: of its input, and of the weights of experts.
    pub fn router_scales(&self, layer: usize) -> Option<[TensorSpec; 2]> {
        let MlpSpec::Experts { router, count, .. } = &self.layers[layer].mlp else { return None };
        let scale = |path, width| self.path(layer).vector(path, width, Role::RouterScale);
        let scales = || [scale("router.scale", self.hidden_size), scale("router.per_expert_scale", *count)];
        router.scaled.then(scales)
    }

    /// Returns the tensors of a layer's mixer besides those of linear modules, in the order in which a folder is read.
    pub fn vectors(&self, layer: usize) -> Vec<TensorSpec> {
        self.layers[layer].mixer.vectors(self.path(layer))
    }

    pub(crate) fn path(&self, layer: usize) -> LayerPath {
        let has_attention = self.layers[layer].mixer.attention().is_some();
        let naming = match self.naming {
            Naming::OlmoHybrid if has_attention => Naming::Llama,
            naming => naming,
        };
        LayerPath { layer, naming }
    }

    fn add_layer(&self, layer: usize, form: Form, tensors: &mut Vec<TensorSpec>) {
        let NormNames { before_mixer, after_mixer, before_mlp, after_mlp } = self.layers[layer].norms.names();
        let norm = |name: Option<&str>| name.map(|name| self.layer_norm(layer, name));
        let LayerGroups { mixer, mlp, per_layer } = self.layer_groups(layer);
        tensors.extend(norm(before_mixer));
        add_group(layer, &mixer.input, form, tensors);
        tensors.extend(self.vectors(layer));
        add_group(layer, &mixer.output, form, tensors);
        tensors.extend(norm(after_mixer).into_iter().chain(norm(before_mlp)));
        self.add_mlp(layer, &mlp, form, tensors);
        tensors.extend(norm(after_mlp));
        if let Some(groups) = per_layer {
            groups.iter().for_each(|group| add_group(layer, group, form, tensors));
            tensors.push(self.layer_norm(layer, "post_per_layer_input_norm"));
        }
        tensors.extend(self.layer_scalar(layer));
    }

    fn add_mlp(&self, layer: usize, groups: &MlpGroups, form: Form, tensors: &mut Vec<TensorSpec>) {
        let (router, experts, shared) = match groups {
            MlpGroups::Gated(groups) => {
                return groups.iter().for_each(|group| add_group(layer, group, form, tensors));
            }
            MlpGroups::Experts { router, experts, shared } => (router, experts, shared),
        };
        let has_norms = self.layers[layer].mlp.shared().is_some_and(|shared| shared.normed);
        let norm = |name| has_norms.then(|| self.layer_norm(layer, name));
        add_group(layer, router, form, tensors);
        tensors.extend(self.router_correction(layer));
        tensors.extend(self.router_scales(layer).into_iter().flatten());
        tensors.extend(norm("pre_feedforward_layernorm_2"));
        experts.iter().for_each(|group| add_group(layer, group, form, tensors));
        tensors.extend(norm("post_feedforward_layernorm_2"));
        if let Some(shared) = shared {
            shared.mlp.iter().chain(&shared.gate).for_each(|group| add_group(layer, group, form, tensors));
        }
        tensors.extend(norm("post_feedforward_layernorm_1"));
    }
}

fn outside(name: &str, shape: Vec<usize>, role: Role) -> TensorSpec {
    TensorSpec { name: name.to_owned(), shape, role, layer: None }
}

/// The form of experts in a list of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A tensor per expert, as a checkpoint has them.
    Stored,
    /// One tensor for all experts, as a run has them.
    Stacked,
}

impl ModuleSpec {
    pub(crate) fn pieces_in(&self, form: Form) -> Vec<PieceSpec> {
        match form {
            Form::Stored => self.pieces.clone(),
            Form::Stacked => vec![PieceSpec { path: self.path.clone(), rows: self.rows() }],
        }
    }
}

fn add_group(layer: usize, group: &GroupSpec, form: Form, tensors: &mut Vec<TensorSpec>) {
    let (inputs, role) = (group.in_features, group.kind.weight_role());
    for module in &group.modules {
        let pieces = module.pieces_in(form);
        tensors.extend(pieces.iter().map(|piece| {
            let (name, shape) = (piece.weight_name(), vec![piece.rows, inputs]);
            TensorSpec { name, shape, role, layer: Some(layer) }
        }));
        if module.bias {
            tensors.extend(pieces.iter().map(|piece| {
                let (name, shape) = (piece.bias_name(), vec![piece.rows]);
                TensorSpec { name, shape, role: Role::Bias, layer: Some(layer) }
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::shapes::qwen3_8b;

    #[test]
    fn names_are_unique() {
        let tensors = qwen3_8b().tensors();
        let names: BTreeSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
        assert_eq!((names.len(), tensors.len()), (399, 399));
    }
}
