//! Parameters and floating-point operations of a model, derived from its tensors.
//!
//! Trade-off: operations are those that MFU counts by convention. Norms, activations, the softmax, biases and the GEMMs of a LoRA
//! adapter (under 1 %) are left out.

use crate::modules::GroupSpec;
use crate::spec::ModelSpec;
use crate::tensor_spec::{Role, TensorSpec};

impl ModelSpec {
    /// Counts all parameters: 8.03e9 for Llama-3.1-8B. Returns `u64::MAX` for more, which a hostile config.json can describe.
    pub fn parameters(&self) -> u64 {
        total(&self.tensors(), |_| true)
    }

    /// Counts the parameters that train in full fine-tuning.
    pub fn trainable_parameters(&self) -> u64 {
        total(&self.tensors(), TensorSpec::may_train)
    }

    /// Counts the parameters of tensors with this role.
    pub fn parameters_of(&self, role: Role) -> u64 {
        total(&self.tensors(), |tensor| tensor.role == role)
    }

    /// Counts the parameters that a token is multiplied with: the projections and routers of all layers and the head, tied or not. Only a token's
    /// `top_k` experts count.
    pub fn matmul_parameters(&self) -> u64 {
        let head = (self.vocab_size as u64).saturating_mul(self.hidden_size as u64);
        self.active_projections().saturating_add(head)
    }

    /// Counts the parameters of all projections and routers that a token is multiplied with, that of the layers' own inputs among them.
    pub fn active_projections(&self) -> u64 {
        let of_group = |group: GroupSpec| group.weight_parameters().saturating_mul(group.rows as u64);
        let of_inputs = self.per_layer_tensors().map_or(0, |[_, projection, _]| projection.elements() as u64);
        self.all_groups().map(of_group).fold(of_inputs, u64::saturating_add)
    }

    /// Returns the forward FLOPs per token of the mixers of all layers, besides their linear modules, for documents of `document_tokens` tokens.
    pub fn mixer_forward_flops_per_token(&self, document_tokens: f64) -> f64 {
        self.layers.iter().map(|layer| layer.mixer.forward_flops_per_token(document_tokens)).sum()
    }

    /// Returns the FLOPs per token of a training step, the numerator of MFU.
    ///
    /// A matrix of `N` parameters takes `2 N` operations per token forward, `2 N` for the gradient of its input, and `2 N` for the
    /// gradient of itself: `6 N` for full training and `4 N` for LoRA, whose frozen matrices need no gradient of themselves. The backward
    /// of a mixer is twice its forward in both cases. Recomputation is not counted: it is work without progress.
    pub fn model_flops_per_token(&self, lora: bool, document_tokens: f64) -> f64 {
        let passes = if lora { 4.0 } else { 6.0 };
        passes * self.matmul_parameters() as f64 + 3.0 * self.mixer_forward_flops_per_token(document_tokens)
    }
}

fn total(tensors: &[TensorSpec], counts: impl Fn(&TensorSpec) -> bool) -> u64 {
    let counted = tensors.iter().filter(|tensor| counts(tensor));
    counted.fold(0, |total: u64, tensor| total.saturating_add(tensor.elements() as u64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::config::tests::{family_json, parse};
    use crate::shapes::{llama_3_1_8b, llama_3_2_1b, qwen3_8b};
    use crate::tensor_spec::Role;

    #[test]
    fn published_parameter_counts_hold() {
        assert_eq!(llama_3_1_8b().parameters(), 8_030_261_248);
        assert_eq!(llama_3_2_1b().parameters(), 1_235_814_400);
        assert_eq!(qwen3_8b().parameters(), 8_190_735_360);
    }

    #[test]
    fn mixtures_have_their_published_parameter_counts_and_active_parameters() {
        let of = |architecture, model_type, sizes: &[(&'static str, usize)]| {
            let sizes: Vec<_> = sizes.iter().map(|&(key, size)| (key, json!(size))).collect();
            parse(&family_json(architecture, model_type, &sizes)).unwrap().spec
        };
        let mixtral = [
            ("vocab_size", 32_000),
            ("hidden_size", 4096),
            ("intermediate_size", 14_336),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
            ("num_local_experts", 8),
        ];
        let mixtral = of("MixtralForCausalLM", "mixtral", &mixtral);
        assert_eq!((mixtral.parameters(), mixtral.matmul_parameters()), (46_702_792_704, 12_748_587_008));
        assert_eq!(mixtral.parameters_of(Role::Router), 32 * 8 * 4096);
        let qwen = [
            ("vocab_size", 151_936),
            ("hidden_size", 2048),
            ("num_hidden_layers", 48),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 4),
            ("head_dim", 128),
            ("moe_intermediate_size", 768),
            ("num_experts", 128),
            ("num_experts_per_tok", 8),
        ];
        let qwen = of("Qwen3MoeForCausalLM", "qwen3_moe", &qwen);
        assert_eq!((qwen.parameters(), qwen.matmul_parameters()), (30_532_122_624, 3_041_656_832));
    }

    #[test]
    fn matmul_parameters_are_the_projections_and_the_head_tied_or_not() {
        let model = llama_3_1_8b();
        let layer: usize = model.groups(0).iter().map(|group| group.out_features() * group.in_features).sum();
        assert_eq!((layer, model.matmul_parameters()), (218_103_808, 7_504_658_432));
        let tied = llama_3_2_1b();
        assert_eq!(tied.parameters_of(Role::Head), 0);
        assert_eq!(tied.matmul_parameters(), tied.parameters() - tied.parameters_of(Role::Norm));
    }

    #[test]
    fn lora_takes_two_thirds_of_the_gemm_work_of_full_training() {
        let model = llama_3_1_8b();
        let (lora, full) = (model.model_flops_per_token(true, 0.0), model.model_flops_per_token(false, 0.0));
        assert_eq!(lora * 6.0, full * 4.0);
        let attention = model.model_flops_per_token(true, 4096.0) - lora;
        assert_eq!(attention, 3.0 * 2.0 * 4096.0 * 32.0 * 4096.0);
    }

    #[test]
    fn a_window_bounds_the_work_of_attention_and_only_in_longer_documents() {
        let (mut windowed, full) = (llama_3_1_8b(), llama_3_1_8b());
        windowed.attentions_mut().for_each(|attention| attention.window = Some(4096));
        let flops =
            |tokens| (windowed.mixer_forward_flops_per_token(tokens), full.mixer_forward_flops_per_token(tokens));
        let (with, without) = flops(4096.0);
        assert_eq!(with, without);
        // 4096 queries see 2048 keys on average, the other 4096 see 4096: 3072, and without a window 4096.
        let (with, without) = flops(8192.0);
        assert_eq!(with / without, 0.75);
    }
}
