//! The values of a layer, each stated once: those of a mixer in its file in `mixer/`, all others here.
//!
//! What a layer saves, what is alive at once, and what waits in host memory are sums over this list, which each backend prices in its own rows.
//! Trade-off: each call builds the list.

use crate::modules::GroupKind;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, NormNames};
use crate::values::{Moment, Recompute, Value, ValueKind};

impl Recompute {
    /// Returns whether a group of a layer with these norms runs forward again. A group that only the next half of the
    /// layer reads does not, unless a norm follows it.
    #[must_use]
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
        }
        values
    }
}

impl ModelSpec {
    /// Lists the values of layer `layer`.
    pub fn values(&self, layer: usize) -> Vec<Value> {
        let (hidden, LayerSpec { mixer, mlp, norms }) = (self.hidden_size, &self.layers[layer]);
        let NormNames { before_mixer, after_mixer, before_mlp, after_mlp } = norms.names();
        let input = Value { may_wait: true, forward: 2, ..Value::new(ValueKind::Input, hidden, Recompute::Full) };
        let sum = Value::new(ValueKind::Sum, hidden, Recompute::Projections);
        let sum = Value { may_wait: true, alive: Moment::OF_BOTH, forward: 1, ..sum };
        let normed = Value::new(ValueKind::Normed, hidden, Recompute::None);
        let output = Value::new(ValueKind::OutputBeforeNorm, hidden, Recompute::Selective);
        let output = Value { alive: Moment::OF_BOTH, ..output };
        let mut values = [vec![input, sum], mixer.values(), mlp.values(hidden)].concat();
        values.extend([before_mixer, before_mlp].iter().flatten().map(|_| normed));
        values.extend([after_mixer, after_mlp].iter().flatten().map(|_| output));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mixer::QkNorm;
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
    fn what_a_layer_publishes_is_always_saved() {
        let mut model = llama_3_1_8b();
        let full = saved(&model, Recompute::Full);
        let attention = model.layers[0].mixer.attention_mut().unwrap();
        attention.keys_and_values = crate::mixer::KeysAndValues::Published(0);
        assert_eq!(saved(&model, Recompute::Full) - full, 2 * 2 * 1024);
        assert_eq!(saved(&model, Recompute::Selective), saved(&llama_3_1_8b(), Recompute::Selective));
    }
}
