//! The linear modules of a layer, in groups that share an input.
//!
//! Queries, keys and values read the same normalized input, and so do gate and up: a backend multiplies a group at once. A group has parts (q, k, v:
//! what its consumer reads) and modules (what a checkpoint stores and LoRA targets). A module covers a range of the group's output columns, so a
//! checkpoint with one fused `qkv_proj` is one module over three parts.
//! Trade-off: a group is rebuilt on each call, strings included; frequent callers should store it.

use std::ops::Range;

use crate::spec::{LayerSpec, MlpSpec, ModelSpec};

/// The purpose of a group in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKind {
    /// Query, key and value projections; parts q, k, v.
    Qkv,
    /// Output projection of attention.
    AttentionOutput,
    /// Gate and up projections; parts gate, up.
    GateUp,
    /// Down projection.
    Down,
    /// Router of a mixture of experts.
    Router,
    /// Gate and up projections of one expert; parts gate, up.
    ExpertGateUp,
    /// Down projection of one expert.
    ExpertDown,
}

/// The groups of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// Query, key and value projections.
    pub qkv: GroupSpec,
    /// Output projection of attention.
    pub attention_output: GroupSpec,
    /// The MLP's.
    pub mlp: MlpGroups,
}

/// The groups of an MLP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MlpGroups {
    /// Gate and up, then down.
    Gated(Box<[GroupSpec; 2]>),
    /// A mixture of experts.
    Experts {
        /// The router, from the hidden size to one value per expert.
        router: Box<GroupSpec>,
        /// Gate and up, then down, of each expert.
        experts: Vec<[GroupSpec; 2]>,
    },
}

impl LayerGroups {
    /// Returns gate and up, then down: of the MLP, or of the first expert, because all experts have the same shapes.
    ///
    /// # Panics
    /// If a mixture has no experts, which no family reads.
    pub fn mlp_shapes(&self) -> &[GroupSpec; 2] {
        match &self.mlp {
            MlpGroups::Gated(groups) => groups,
            MlpGroups::Experts { experts, .. } => experts.first().expect("a mixture has experts"),
        }
    }

    fn into_groups(self) -> Vec<GroupSpec> {
        let mut groups = vec![self.qkv, self.attention_output];
        match self.mlp {
            MlpGroups::Gated(mlp) => groups.extend(*mlp),
            MlpGroups::Experts { router, experts } => {
                groups.push(*router);
                groups.extend(experts.into_iter().flatten());
            }
        }
        groups
    }
}

/// Modules that share an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Its purpose in the layer.
    pub kind: GroupKind,
    /// Width of the shared input.
    pub in_features: usize,
    /// Widths of the outputs, side by side.
    pub parts: Vec<usize>,
    /// The modules that compute them, in column order.
    pub modules: Vec<ModuleSpec>,
}

/// A linear module as a checkpoint stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSpec {
    /// Hugging Face's module path, e.g. `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// Columns of the group's output that it computes.
    pub columns: Range<usize>,
    /// Whether it has a bias.
    pub bias: bool,
}

impl ModuleSpec {
    /// Returns the width of the module's output.
    pub fn out_features(&self) -> usize {
        self.columns.len()
    }

    /// Returns the last part of the path, e.g. `q_proj`.
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    /// Returns the name of the weight `[out, in]` in a checkpoint.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.path)
    }

    /// Returns the name of the bias `[out]` in a checkpoint.
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.path)
    }
}

impl GroupSpec {
    /// Returns the width of all outputs together.
    pub fn out_features(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Counts the parameters of the weights of all modules.
    pub fn weight_parameters(&self) -> u64 {
        self.out_features() as u64 * self.in_features as u64
    }
}

/// Builds a group of layer `layer` from modules by name and width, side by side; one module with the name `fused` if that is given.
fn group(
    layer: usize,
    kind: GroupKind,
    in_features: usize,
    modules: &[(&str, usize)],
    fused: Option<&str>,
    bias: bool,
) -> GroupSpec {
    let parts: Vec<usize> = modules.iter().map(|(_, width)| *width).collect();
    let all = fused.map(|name| [(name, parts.iter().sum())]);
    let modules = all.as_ref().map_or(modules, |all| &all[..]);
    let mut end = 0;
    let modules = modules
        .iter()
        .map(|(name, width)| {
            let start = end;
            end += width;
            ModuleSpec { path: format!("model.layers.{layer}.{name}"), columns: start..end, bias }
        })
        .collect();
    GroupSpec { kind, in_features, parts, modules }
}

impl ModelSpec {
    /// Returns the groups of layer `layer` in the order of the forward pass: four; for a mixture of experts the two of attention, the router, and two
    /// per expert.
    pub fn groups(&self, layer: usize) -> Vec<GroupSpec> {
        self.layer_groups(layer).into_groups()
    }

    /// Returns the groups of all layers, in the order of the forward pass.
    pub fn all_groups(&self) -> impl Iterator<Item = GroupSpec> + '_ {
        (0..self.layers.len()).flat_map(|layer| self.groups(layer))
    }

    /// Returns the groups of layer `layer` by purpose.
    pub fn layer_groups(&self, layer: usize) -> LayerGroups {
        let LayerSpec { attention, .. } = &self.layers[layer];
        let (hidden, query, kv) = (self.hidden_size, attention.query_size(), attention.kv_size());
        let qkv = [("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
        let fused_qkv = attention.fused_qkv.then_some("self_attn.qkv_proj");
        let output = [("self_attn.o_proj", hidden)];
        LayerGroups {
            qkv: group(layer, GroupKind::Qkv, hidden, &qkv, fused_qkv, attention.qkv_bias),
            attention_output: group(layer, GroupKind::AttentionOutput, query, &output, None, attention.output_bias),
            mlp: self.mlp_groups(layer),
        }
    }

    fn mlp_groups(&self, layer: usize) -> MlpGroups {
        let hidden = self.hidden_size;
        match self.layers[layer].mlp {
            MlpSpec::Gated { intermediate_size, fused, bias, .. } => {
                let gate_up = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
                let fused = fused.then_some("mlp.gate_up_proj");
                MlpGroups::Gated(Box::new([
                    group(layer, GroupKind::GateUp, hidden, &gate_up, fused, bias),
                    group(layer, GroupKind::Down, intermediate_size, &[("mlp.down_proj", hidden)], None, bias),
                ]))
            }
            MlpSpec::Experts { count, intermediate_size, names, .. } => {
                let block = names.block();
                let expert = |expert: usize| {
                    let [gate, up, down] = names.projections().map(|name| format!("{block}.experts.{expert}.{name}"));
                    let gate_up = [(gate.as_str(), intermediate_size), (up.as_str(), intermediate_size)];
                    let down = [(down.as_str(), hidden)];
                    [
                        group(layer, GroupKind::ExpertGateUp, hidden, &gate_up, None, false),
                        group(layer, GroupKind::ExpertDown, intermediate_size, &down, None, false),
                    ]
                };
                let router = format!("{block}.gate");
                MlpGroups::Experts {
                    router: Box::new(group(layer, GroupKind::Router, hidden, &[(&router, count)], None, false)),
                    experts: (0..count).map(expert).collect(),
                }
            }
        }
    }

    /// Returns every linear module of every layer, in the order of the forward pass, with the width of its input. Routers are not included: PEFT
    /// adapts none either.
    pub fn modules(&self) -> impl Iterator<Item = (ModuleSpec, usize)> + '_ {
        self.all_groups().filter(|group| group.kind != GroupKind::Router).flat_map(|group| {
            let in_features = group.in_features;
            group.modules.into_iter().map(move |module| (module, in_features))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;
    use crate::shapes::{llama_3_1_8b, qwen3_8b};
    use crate::spec::MlpSpec;

    #[test]
    fn modules_of_a_group_cover_its_columns_without_gaps_in_the_order_of_its_parts() {
        for spec in [llama_3_1_8b(), qwen3_8b()] {
            for group in spec.groups(1) {
                let mut end = 0;
                for (module, part) in group.modules.iter().zip(&group.parts) {
                    assert_eq!((module.columns.start, module.out_features()), (end, *part));
                    end = module.columns.end;
                }
                assert_eq!((end, group.modules.len()), (group.out_features(), group.parts.len()));
            }
        }
    }

    #[test]
    fn a_fused_module_covers_all_parts_of_its_group() {
        let mut spec = llama_3_1_8b();
        for layer in &mut spec.layers {
            layer.attention.fused_qkv = true;
            let MlpSpec::Gated { fused, .. } = &mut layer.mlp else { panic!("a dense MLP") };
            *fused = true;
        }
        let groups = spec.layer_groups(3);
        let (qkv, [gate_up, _]) = (&groups.qkv, groups.mlp_shapes());
        assert_eq!(
            (&qkv.parts[..], qkv.modules.len(), qkv.modules[0].columns.clone()),
            (&[4096, 1024, 1024][..], 1, 0..6144)
        );
        assert_eq!(qkv.modules[0].path, "model.layers.3.self_attn.qkv_proj");
        assert_eq!((gate_up.modules[0].name(), gate_up.modules[0].columns.clone()), ("gate_up_proj", 0..28_672));
        assert_eq!(spec.linear_module_names(), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
        assert_eq!(spec.parameters(), llama_3_1_8b().parameters());
    }

    #[test]
    fn widths_follow_from_heads_and_the_intermediate_size() {
        let groups = llama_3_1_8b().groups(0);
        let [qkv, output, gate_up, down] = groups.as_slice() else { panic!("four groups") };
        assert_eq!((qkv.in_features, &qkv.parts[..]), (4096, &[4096, 1024, 1024][..]));
        assert_eq!((output.in_features, &output.parts[..]), (4096, &[4096][..]));
        assert_eq!((gate_up.in_features, &gate_up.parts[..]), (4096, &[14_336, 14_336][..]));
        assert_eq!((down.in_features, &down.parts[..]), (14_336, &[4096][..]));
        assert_eq!(gate_up.out_features(), 2 * 14_336);
        let kinds = [GroupKind::Qkv, GroupKind::AttentionOutput, GroupKind::GateUp, GroupKind::Down];
        assert_eq!([qkv.kind, output.kind, gate_up.kind, down.kind], kinds);
    }

    #[test]
    fn modules_are_the_seven_projections_of_each_layer_with_hugging_faces_paths() {
        let spec = tiny(&[]).unwrap().spec;
        let modules: Vec<_> = spec.modules().collect();
        assert_eq!(modules.len(), 14);
        let (first, in_features) = &modules[0];
        assert_eq!((first.path.as_str(), first.name(), *in_features), ("model.layers.0.self_attn.q_proj", "q_proj", 8));
        let (last, in_features) = &modules[13];
        assert_eq!((last.weight_name().as_str(), *in_features), ("model.layers.1.mlp.down_proj.weight", 12));
    }
}
