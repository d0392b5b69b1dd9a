//! The groups of linear modules of each layer (`modules.rs`): of its mixer and of its MLP.
//!
//! The experts of a mixture are stacks: one module has the matrices of all experts below each other, and says what a checkpoint stores each piece of
//! it as. Columns and parts are those of one expert.
//! Trade-off: a group is rebuilt on each call, strings included; frequent callers should store it.

use crate::mixer::MixerGroups;
use crate::modules::{GroupKind, GroupSpec, ModuleSpec, OutputOrder, PieceSpec, group};
use crate::naming::LayerPath;
use crate::router::SharedExpertSpec;
use crate::spec::{ExpertNames, MlpSpec, ModelSpec, PerLayerInputs};

/// The groups of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// The mixer's.
    pub mixer: MixerGroups,
    /// The MLP's.
    pub mlp: MlpGroups,
    /// Those that read the layer's own input, after the MLP: gate, then projection.
    pub per_layer: Option<Box<[GroupSpec; 2]>>,
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
        /// Gate and up, then down, of all experts.
        experts: Box<[GroupSpec; 2]>,
        /// The shared expert.
        shared: Option<Box<SharedGroups>>,
    },
}

/// The groups of a shared expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedGroups {
    /// Gate and up, then down.
    pub mlp: [GroupSpec; 2],
    /// The gate of its output.
    pub gate: Option<GroupSpec>,
}

/// Turns a group over the matrices of one expert into a group of stacks, of which a token reads `rows`, and whose pieces are these modules of each expert in turn, at this path.
fn stacked(
    group: GroupSpec,
    [count, rows]: [usize; 2],
    experts: &str,
    names: &[&str],
    parameter: Option<OutputOrder>,
) -> GroupSpec {
    let width = |module: &ModuleSpec| module.out_features() * group.modules.len() / names.len();
    let of_module = |(index, module): (usize, &ModuleSpec)| {
        let names = if group.modules.len() == names.len() { &names[index..=index] } else { names };
        let piece = |(expert, name)| PieceSpec { path: format!("{experts}.{expert}.{name}"), rows: width(module) };
        let pieces = (0..count).flat_map(|expert| names.iter().map(move |name| (expert, name))).map(piece).collect();
        ModuleSpec { pieces, parameter, ..module.clone() }
    };
    let modules = group.modules.iter().enumerate().map(of_module).collect();
    GroupSpec { experts: Some(count), rows, modules, ..group }
}

fn shared_groups(at: LayerPath, hidden: usize, shared: SharedExpertSpec, names: ExpertNames) -> SharedGroups {
    let (path, width) = (names.path(names.shared()), shared.intermediate_size);
    let [gate, up, down] = names.projections().map(|name| format!("{path}.{name}"));
    let gate_up = [(gate.as_str(), width), (up.as_str(), width)];
    let output_gate = format!("{path}_gate");
    let gated = shared.gated.then_some([(output_gate.as_str(), 1)]);
    SharedGroups {
        mlp: [
            group(at, GroupKind::SharedGateUp, hidden, &gate_up, None, false),
            group(at, GroupKind::SharedDown, width, &[(&down, hidden)], None, false),
        ],
        gate: gated.map(|gate| group(at, GroupKind::SharedGate, hidden, &gate, None, false)),
    }
}

impl ModelSpec {
    /// Returns the groups of layer `layer` in the order of the forward pass: four; for a mixture of experts the two of the mixer, the router, the two
    /// of the experts, and those of a shared expert; then those that read the layer's own input.
    pub fn groups(&self, layer: usize) -> Vec<GroupSpec> {
        let LayerGroups { mixer, mlp, per_layer } = self.layer_groups(layer);
        let mut groups = vec![mixer.input, mixer.output];
        match mlp {
            MlpGroups::Gated(mlp) => groups.extend(*mlp),
            MlpGroups::Experts { router, experts, shared } => {
                groups.push(*router);
                groups.extend(*experts);
                groups.extend(shared.into_iter().flat_map(|shared| shared.mlp.into_iter().chain(shared.gate)));
            }
        }
        groups.extend(per_layer.into_iter().flat_map(|groups| *groups));
        groups
    }

    /// Returns the groups of all layers, in the order of the forward pass.
    pub fn all_groups(&self) -> impl Iterator<Item = GroupSpec> + '_ {
        (0..self.layers.len()).flat_map(|layer| self.groups(layer))
    }

    /// Returns the groups of layer `layer` by purpose.
    pub fn layer_groups(&self, layer: usize) -> LayerGroups {
        let at = self.path(layer);
        let mixer = self.layers[layer].mixer.groups(at, self.hidden_size);
        let per_layer = self.per_layer_inputs.map(|PerLayerInputs { width, .. }| {
            let (gate, projection) = ([("per_layer_input_gate", width)], [("per_layer_projection", self.hidden_size)]);
            Box::new([
                group(at, GroupKind::PerLayerGate, self.hidden_size, &gate, None, false),
                group(at, GroupKind::PerLayerProjection, width, &projection, None, false),
            ])
        });
        LayerGroups { mixer, mlp: self.mlp_groups(at), per_layer }
    }

    fn mlp_groups(&self, at: LayerPath) -> MlpGroups {
        let hidden = self.hidden_size;
        match self.layers[at.layer].mlp {
            MlpSpec::Gated { intermediate_size, fused, bias, .. } => {
                let gate_up = [("mlp.gate_proj", intermediate_size), ("mlp.up_proj", intermediate_size)];
                let fused = fused.then_some("mlp.gate_up_proj");
                MlpGroups::Gated(Box::new([
                    group(at, GroupKind::GateUp, hidden, &gate_up, fused, bias),
                    group(at, GroupKind::Down, intermediate_size, &[("mlp.down_proj", hidden)], None, bias),
                ]))
            }
            MlpSpec::Experts { count, top_k, intermediate_size, router, shared, names, fused, bias, .. } => {
                let [gate, up, down] = names.projections();
                let experts = if fused { names.fused_path("experts") } else { names.path("experts") };
                let path = |name: &str| format!("{experts}.{name}");
                let gate_up_order = fused.then_some(names.gate_up_order());
                let down_order = fused.then_some(OutputOrder::AsInRun);
                let [gate_path, up_path] = [gate, up].map(path);
                let gate_up = [(gate_path.as_str(), intermediate_size), (up_path.as_str(), intermediate_size)];
                let [fused_path, fused_down] = ["gate_up_proj", "down_proj"].map(path);
                let down_path = if fused { fused_down } else { path(down) };
                let fused = fused.then_some(fused_path.as_str());
                let gate_up = group(at, GroupKind::ExpertGateUp, hidden, &gate_up, fused, bias);
                let of_down = [(down_path.as_str(), hidden)];
                let of_down = group(at, GroupKind::ExpertDown, intermediate_size, &of_down, None, bias);
                let (path, experts) = (names.path(names.router()), at.name(&names.path("experts")));
                MlpGroups::Experts {
                    router: Box::new(group(at, GroupKind::Router, hidden, &[(&path, count)], None, router.bias)),
                    experts: Box::new([
                        stacked(gate_up, [count, top_k], &experts, &[gate, up], gate_up_order),
                        stacked(of_down, [count, top_k], &experts, &[down], down_order),
                    ]),
                    shared: shared.map(|shared| Box::new(shared_groups(at, hidden, shared, names))),
                }
            }
        }
    }

    /// Returns every linear module of every layer as a checkpoint has it, each expert's by itself unless they are fused, in the order of
    /// `ModelSpec::tensors`, with the width of its input. Routers are not included: PEFT adapts none either.
    pub fn modules(&self) -> impl Iterator<Item = (ModuleSpec, usize)> + '_ {
        self.all_groups().filter(|group| group.kind != GroupKind::Router).flat_map(|group| {
            let in_features = group.in_features;
            let singles = group.modules.into_iter().flat_map(|module| module.single_modules());
            singles.map(move |module| (module, in_features))
        })
    }

    /// Returns the stacks of all layers: modules with a matrix per expert, and the number of experts.
    pub fn stacks(&self) -> impl Iterator<Item = (ModuleSpec, usize)> + '_ {
        self.all_groups().flat_map(|group| {
            let experts = group.experts;
            group.modules.into_iter().filter_map(move |module| Some((module, experts?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;
    use crate::router::RouterSpec;
    use crate::shapes::{llama_3_1_8b, qwen3_8b};
    use crate::spec::{Activation, ExpertNames, MlpSpec};

    /// Returns gate and up, then down: of the MLP, or of all experts.
    fn mlp(groups: &LayerGroups) -> &[GroupSpec; 2] {
        match &groups.mlp {
            MlpGroups::Gated(groups) | MlpGroups::Experts { experts: groups, .. } => groups,
        }
    }

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
            layer.mixer.attention_mut().unwrap().fused_qkv = true;
            let MlpSpec::Gated { fused, .. } = &mut layer.mlp else { panic!("a dense MLP") };
            *fused = true;
        }
        let groups = spec.layer_groups(3);
        let (qkv, [gate_up, _]) = (&groups.mixer.input, mlp(&groups));
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
    fn stacks_have_the_matrices_of_all_experts_below_each_other_and_fused_ones_gate_before_up() {
        let mut spec = tiny(&[]).unwrap().spec;
        let (sizes, router) = ([3, 2, 6], RouterSpec::softmax(true));
        spec.layers[1].mlp = MlpSpec::experts(ExpertNames::Mixtral, sizes, Activation::Silu, router, None);
        let groups = spec.layer_groups(1);
        let [gate_up, down] = mlp(&groups);
        assert_eq!((gate_up.experts, &gate_up.parts[..], down.in_features), (Some(3), &[6, 6][..], 6));
        let up = &gate_up.modules[1];
        assert_eq!((up.path.as_str(), up.rows()), ("model.layers.1.block_sparse_moe.experts.w3", 18));
        assert_eq!(up.columns, 6..12);
        let paths: Vec<_> =
            up.pieces.iter().map(|piece| (piece.path.rsplit_once("experts.").unwrap().1, piece.rows)).collect();
        assert_eq!(paths, [("0.w3", 6), ("1.w3", 6), ("2.w3", 6)]);
        assert_eq!((down.modules[0].rows(), down.modules[0].pieces.len()), (24, 3));
        let singles: Vec<_> = up.single_modules().into_iter().map(|module| module.columns).collect();
        assert_eq!(singles, [6..12, 6..12, 6..12]);
        let (parameters, tensors) = (spec.parameters(), spec.tensors().len());
        let MlpSpec::Experts { fused, .. } = &mut spec.layers[1].mlp else { panic!("a mixture") };
        *fused = true;
        let groups = spec.layer_groups(1);
        let [gate_up, down] = mlp(&groups);
        let [module] = &gate_up.modules[..] else { panic!("one module") };
        assert_eq!((module.name(), module.columns.clone(), module.rows()), ("gate_up_proj", 0..12, 36));
        let pieces: Vec<_> = module.pieces.iter().map(|piece| piece.path.rsplit('.').next().unwrap()).collect();
        assert_eq!(pieces, ["w1", "w3", "w1", "w3", "w1", "w3"]);
        assert_eq!(module.single_modules(), std::slice::from_ref(module), "one pair for all experts");
        assert_eq!(
            (down.modules[0].name(), down.modules[0].pieces[1].path.rsplit('.').next()),
            ("down_proj", Some("w2"))
        );
        assert_eq!((spec.parameters(), spec.tensors().len()), (parameters, tensors));
    }

    #[test]
    fn rows_of_gate_and_up_take_turns_in_a_parameter_of_gpt_oss_and_keep_their_places_elsewhere() {
        let outputs = |order: OutputOrder| (0..6).map(|row| order.output_of(row, 6)).collect::<Vec<_>>();
        assert_eq!(outputs(ExpertNames::GptOss.gate_up_order()), [0, 2, 4, 1, 3, 5]);
        assert_eq!(outputs(ExpertNames::Qwen.gate_up_order()), [0, 1, 2, 3, 4, 5]);
    }
}
