//! Every tensor of a model: name on disk, shape and role, in the order in which the forward pass meets them.
//!
//! This list is the single source for checkpoint contents, the order of loading, parameter counts, memory and the optimizer's groups. Names are
//! Hugging Face's. A second list has the tensors of a run, in which the experts of a module are one tensor: a stack.
//! Trade-off: the list is rebuilt on each call; a model has a few hundred tensors.

use crate::modules::{GroupKind, GroupSpec, ModuleSpec, PieceSpec};
use crate::naming::{LayerPath, Naming};
use crate::spec::{ExpertNames, MlpSpec, ModelSpec};
use crate::tensor_spec::{Role, TensorSpec};

/// Name of the embedding in a checkpoint.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
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
        let outside =
            |name: &str, shape: Vec<usize>, role| TensorSpec { name: name.to_owned(), shape, role, layer: None };
        let mut tensors = vec![outside(EMBEDDING, table.clone(), Role::Embedding)];
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
        let (name, shape) = (self.naming.final_norm().to_owned(), vec![self.hidden_size]);
        TensorSpec { name, shape, role: Role::Norm, layer: None }
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

    /// Returns the tensors of a layer's mixer besides those of linear modules, in the order in which a folder is read.
    pub fn vectors(&self, layer: usize) -> Vec<TensorSpec> {
        self.layers[layer].mixer.vectors(self.path(layer))
    }

    /// Returns where the tensors and modules of a layer are.
    pub(crate) fn path(&self, layer: usize) -> LayerPath {
        let has_attention = self.layers[layer].mixer.attention().is_some();
        let naming = match self.naming {
            Naming::OlmoHybrid if has_attention => Naming::Llama,
            naming => naming,
        };
        LayerPath { layer, naming }
    }

    fn add_layer(&self, layer: usize, form: Form, tensors: &mut Vec<TensorSpec>) {
        let names = self.layers[layer].norms.names();
        for group in self.groups(layer) {
            let (before, after) = match group.kind {
                GroupKind::MixerInput => (names.before_mixer, None),
                GroupKind::MixerOutput => (None, names.after_mixer),
                GroupKind::GateUp | GroupKind::Router => (names.before_mlp, None),
                GroupKind::Down => (None, names.after_mlp),
                GroupKind::ExpertGateUp
                | GroupKind::ExpertDown
                | GroupKind::SharedGateUp
                | GroupKind::SharedDown
                | GroupKind::SharedGate => (None, None),
            };
            tensors.extend(before.map(|name| self.layer_norm(layer, name)));
            add_group(layer, &group, form, tensors);
            if group.kind == GroupKind::Router {
                tensors.extend(self.router_correction(layer));
            }
            if group.kind == GroupKind::MixerInput {
                tensors.extend(self.vectors(layer));
            }
            tensors.extend(after.map(|name| self.layer_norm(layer, name)));
        }
    }
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
    /// Returns the tensors that a module's weight is in this form.
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

    use serde_json::json;

    use super::*;
    use crate::config::tests::tiny;
    use crate::shapes::{llama_3_2_1b, qwen3_8b};

    #[test]
    fn names_and_shapes_are_hugging_faces_in_the_order_of_the_forward_pass() {
        let tensors = tiny(&[]).unwrap().spec.tensors();
        assert_eq!(tensors.len(), 1 + 2 * 9 + 1 + 1);
        let at = |index: usize| (tensors[index].name.as_str(), &tensors[index].shape[..], tensors[index].layer);
        assert_eq!(at(0), ("model.embed_tokens.weight", &[11, 8][..], None));
        assert_eq!(at(1), ("model.layers.0.input_layernorm.weight", &[8][..], Some(0)));
        assert_eq!(at(3), ("model.layers.0.self_attn.k_proj.weight", &[4, 8][..], Some(0)));
        assert_eq!(at(6), ("model.layers.0.post_attention_layernorm.weight", &[8][..], Some(0)));
        assert_eq!(at(18), ("model.layers.1.mlp.down_proj.weight", &[8, 12][..], Some(1)));
        assert_eq!(at(19), ("model.norm.weight", &[8][..], None));
        assert_eq!(at(20), ("lm_head.weight", &[11, 8][..], None));
    }

    #[test]
    fn a_bias_follows_its_weight_and_has_its_rows() {
        let biases = [("attention_bias", json!(true)), ("mlp_bias", json!(true))];
        let tensors = tiny(&biases).unwrap().spec.tensors();
        let pairs: Vec<_> = tensors.windows(2).filter(|pair| pair[1].role == Role::Bias).collect();
        assert_eq!(pairs.len(), 14);
        for pair in pairs {
            assert_eq!(pair[0].name.strip_suffix("weight"), pair[1].name.strip_suffix("bias"));
            assert_eq!((pair[0].role, &pair[0].shape[..1]), (Role::Projection, &pair[1].shape[..]));
        }
    }

    #[test]
    fn a_tied_head_is_not_listed_and_names_are_unique() {
        let tied = llama_3_2_1b().tensors();
        assert!(tied.iter().all(|tensor| tensor.role != Role::Head && tensor.name != HEAD));
        let tensors = qwen3_8b().tensors();
        let names: BTreeSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
        assert_eq!((names.len(), tensors.len()), (399, 399));
    }
}
