//! The values of a layer, each stated once: those of a mixer in its file in `mixer/`, all others here.
//!
//! What a layer saves, what is alive at once, and what waits in host memory are sums over this list, which each backend prices in its own rows.
//! Trade-off: each call builds the list.

use crate::modules::GroupKind;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, NormNames, PerLayerInputs};
use crate::values::{Moment, Recompute, Value, ValueKind};

impl Recompute {
    /// Returns whether a group of a layer with these norms runs forward again. A group that only the next half of the
    /// layer reads does not, unless a norm follows it.
    pub fn repeats(self, kind: GroupKind, norms: &NormNames) -> bool {
        match (self, kind) {
            (Self::Full | Self::Projections, GroupKind::Down) => norms.after_mlp.is_some(),
            (Self::Projections, GroupKind::MixerOutput) => norms.after_mixer.is_some(),
            _ => self.repeats_gemms(),
        }
    }
}

impl MlpSpec {
    fn values(&self, hidden: usize) -> Vec<Value> {
        use Recompute::{None as Everything, Selective};
        let (rows, width) = (self.rows_per_token(), self.intermediate_size());
        // As wide as gate and up, or as their product.
        let inner = |kind, width, from| Value { passing: Moment::OF_DOWN, forward: 1, ..Value::new(kind, width, from) };
        let gate_up = Value { rows, alive: Moment::OF_MLP, ..inner(ValueKind::GateUp, 2 * width, Selective) };
        let activated = Value { rows, ..inner(ValueKind::Activated, width, Everything) };
        let mut values = vec![gate_up, activated];
        if let Self::Experts { count, .. } = self {
            // Two f32 per expert, in values of 16 bits.
            values.push(Value::new(ValueKind::Router, hidden + 4 * count, Selective));
            // In the order of tokens and in that of experts.
            for (kind, forward) in [(ValueKind::Dispatched, 2), (ValueKind::Returned, 1)] {
                values.push(Value { rows, alive: Moment::OF_DOWN, forward, ..inner(kind, hidden, Selective) });
            }
        }
        if let Some(shared) = self.shared() {
            let width = shared.intermediate_size;
            values.push(inner(ValueKind::SharedGateUp, 2 * width, Selective));
            values.push(inner(ValueKind::SharedActivated, width, Everything));
            let output = Value { forward: 1, ..Value::new(ValueKind::SharedOutput, hidden, Selective) };
            values.push(Value { saved_from: shared.gated.then_some(Selective), ..output });
            if shared.normed {
                // The input of the experts, and what both give.
                values.push(Value::new(ValueKind::Normed, hidden, Everything));
                values.extend([output_before_norm(hidden, Moment::OF_DOWN); 2]);
            }
        }
        values
    }
}

impl PerLayerInputs {
    /// Lists the values of what follows the MLP, and goes back before it: alive with what that ends and begins with.
    fn values(self, hidden: usize) -> [Value; 4] {
        let of_down = |kind, width, from| Value { alive: Moment::OF_DOWN, forward: 1, ..Value::new(kind, width, from) };
        let gate = of_down(ValueKind::PerLayerGate, self.width, Recompute::Selective);
        let product = of_down(ValueKind::PerLayerProduct, self.width, Recompute::None);
        [
            Value { may_wait: true, ..of_down(ValueKind::Sum, hidden, Recompute::Projections) },
            Value { passing: Moment::OF_DOWN, ..gate },
            Value { passing: Moment::OF_DOWN, ..product },
            output_before_norm(hidden, Moment::OF_DOWN),
        ]
    }
}

/// Describes an output as it was before its norm.
fn output_before_norm(hidden: usize, alive: &'static [Moment]) -> Value {
    Value { alive, ..Value::new(ValueKind::OutputBeforeNorm, hidden, Recompute::Selective) }
}

impl ModelSpec {
    /// Lists the values of layer `layer`.
    pub fn values(&self, layer: usize) -> Vec<Value> {
        let (hidden, LayerSpec { mixer, mlp, norms, .. }) = (self.hidden_size, &self.layers[layer]);
        let NormNames { before_mixer, after_mixer, before_mlp, after_mlp } = norms.names();
        let input = Value { may_wait: true, forward: 2, ..Value::new(ValueKind::Input, hidden, Recompute::Full) };
        let sum = Value::new(ValueKind::Sum, hidden, Recompute::Projections);
        let sum = Value { may_wait: true, alive: Moment::OF_BOTH, forward: 1, ..sum };
        let normed = Value::new(ValueKind::Normed, hidden, Recompute::None);
        let output = output_before_norm(hidden, Moment::OF_BOTH);
        let mut values = [vec![input, sum], mixer.values(), mlp.values(hidden)].concat();
        values.extend([before_mixer, before_mlp].iter().flatten().map(|_| normed));
        values.extend([after_mixer, after_mlp].iter().flatten().map(|_| output));
        values.extend(self.per_layer_inputs.into_iter().flat_map(|inputs| inputs.values(hidden)));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mixer::{AttentionSpec, QkNorm};
    use crate::shapes::{llama_3_1_8b, qwen3_8b};
    use crate::spec::LayerNorms;

    /// Returns the bytes per token of what the first layer saves, in a format of 16 bits.
    fn saved(model: &ModelSpec, recompute: Recompute) -> u64 {
        model.values(0).iter().filter(|value| recompute.saves(value)).map(|value| value.bytes(2)).sum()
    }

    #[test]
    fn norms_save_what_they_read() {
        let selective = saved(&llama_3_1_8b(), Recompute::Selective);
        assert_eq!(selective, 94_336);
        let mut plain = qwen3_8b();
        plain.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::None);
        let both = [qwen3_8b(), plain].map(|model| saved(&model, Recompute::Selective));
        assert_eq!(both[0] - both[1], 2 * (4096 + 1024));
        let mut of_values = llama_3_1_8b();
        of_values.attentions_mut().for_each(|attention| attention.value_norm = true);
        assert_eq!(saved(&of_values, Recompute::Selective) - selective, 2 * 1024);
        let everything = saved(&llama_3_1_8b(), Recompute::None);
        let outputs = 2 * 2 * 4096;
        // Without input norms there are no normalized inputs to save.
        for (norms, more) in [(LayerNorms::Post, 0), (LayerNorms::PreAndPost, outputs)] {
            let mut model = llama_3_1_8b();
            model.layers.iter_mut().for_each(|layer| layer.norms = norms);
            assert_eq!(saved(&model, Recompute::Selective), selective + outputs);
            assert_eq!(saved(&model, Recompute::None), everything + more);
        }
    }

    #[test]
    fn values_that_are_keys_save_what_both_are_made_of() {
        let mut model = qwen3_8b();
        let apart = saved(&model, Recompute::Selective);
        let are_keys = |attention: &mut AttentionSpec| (attention.values_are_keys, attention.value_norm) = (true, true);
        model.attentions_mut().for_each(are_keys);
        assert_eq!(apart - saved(&model, Recompute::Selective), 2 * (1024 + 1024));
    }

    #[test]
    fn inputs_of_layers_save_what_their_gates_read_and_compute() {
        let policies = [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None];
        let mut model = llama_3_1_8b();
        let without = policies.map(|policy| saved(&model, policy));
        model.per_layer_inputs = Some(PerLayerInputs { width: 256, vocab_size: 8 });
        let with = policies.map(|policy| saved(&model, policy));
        let more: Vec<u64> = with.iter().zip(without).map(|(with, without)| with - without).collect();
        assert_eq!(more, [0, 2 * 4096, 2 * (4096 + 256 + 4096), 2 * (4096 + 2 * 256 + 4096)]);
    }

    #[test]
    fn what_a_layer_publishes_is_always_saved() {
        let mut model = llama_3_1_8b();
        let full = saved(&model, Recompute::Full);
        let attention = model.layers[0].mixer.attention_mut().unwrap();
        attention.keys_and_values = crate::mixer::KeysAndValues::Published(0);
        assert_eq!(saved(&model, Recompute::Full) - full, 2 * 2 * 1024);
        assert_eq!(saved(&model, Recompute::Selective), saved(&llama_3_1_8b(), Recompute::Selective));
    }
}
