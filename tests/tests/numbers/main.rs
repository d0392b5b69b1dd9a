//! Tests that our numbers equal those of transformers, PEFT, torch and bitsandbytes, in f32, on every backend that runs without a card; and that
//! training in float16 follows f32.
//!
//! Trade-off: the models are tiny. `firebrick-kernels` compares large shapes between backends and reference implementations.

mod adapter;
mod backward;
mod curve;
mod division;
mod documents;
mod experts;
mod formats;
mod forward;
mod gemma4;
mod loss;
mod loss_scaling;
mod new_tokens;
mod nf4;
mod other_loss;
mod pissa;
mod policy;
mod preference;
mod quantized;
mod router_loss;
mod same_experts;
mod saved;
mod sinks;
mod text;
mod training;

use firebrick_tests::share_wgpu;

// One for each of two cores.
share_wgpu!(
    logits_losses_and_texts_on_wgpu,
    adapter::a_pass_without_the_adapter_equals_the_base_model_to_the_bit,
    documents::packed_documents_of_every_family_have_the_logits_and_losses_they_have_alone,
    formats::a_base_in_every_format_computes_with_the_values_of_the_host_codec,
    forward::logits_and_losses_of_every_family_equal_those_of_transformers,
    forward::logits_and_losses_of_every_family_with_its_adapter_equal_those_of_peft,
    forward::logits_of_tied_sharded_and_rope_scaled_checkpoints_equal_those_of_transformers,
    forward::the_score_counts_the_targets_that_have_the_highest_logit,
    nf4::logits_over_a_4_bit_base_equal_those_of_bitsandbytes,
    pissa::a_base_and_its_principal_part_are_those_of_peft_and_give_its_logits,
    quantized::logits_of_quantized_folders_equal_those_of_transformers,
    quantized::logits_over_codes_that_are_kept_equal_those_of_transformers,
    text::greedy_text_of_every_family_equals_that_of_transformers,
);

share_wgpu!(
    gradients_and_steps_on_wgpu,
    adapter::a_custom_loss_gives_the_same_gradients_as_on_flex,
    backward::lora_gradients_equal_those_of_peft_under_every_recompute_policy,
    backward::dropout_depends_on_its_seed_and_on_nothing_else,
    backward::gradients_of_all_weights_equal_those_of_torch_under_every_recompute_policy,
    division::weights_that_ranks_divide_give_the_numbers_of_a_whole_model,
    documents::a_document_changes_no_bit_of_its_neighbor,
    documents::documents_of_a_token_train_as_by_themselves,
    experts::gradients_of_adapters_on_experts_follow_from_those_of_the_weights,
    loss::weighted_losses_log_probabilities_and_gradients_equal_those_of_torch,
    loss::the_gradient_scale_scales_gradients_and_not_the_loss,
    loss_scaling::float16_keeps_the_gradients_of_a_large_step_only_with_a_loss_scale,
    loss_scaling::steps_in_float16_follow_those_in_f32_while_the_scale_grows,
    loss_scaling::overflows_are_skipped_until_the_scale_fits_and_leave_no_trace,
    other_loss::the_gradients_of_another_loss_operation_equal_those_of_autodiff,
    policy::log_probabilities_and_gradients_of_completions_equal_those_of_trl,
    policy::sampled_tokens_have_the_log_probabilities_of_training_in_every_family,
    policy::steps_equal_those_of_trl_however_completions_are_divided,
    preference::losses_rewards_and_gradients_of_pairs_equal_those_of_trl,
    router_loss::the_auxiliary_loss_and_all_gradients_equal_those_of_transformers_under_every_policy,
    same_experts::a_router_that_sends_all_tokens_to_the_same_experts_makes_a_dense_mlp,
    sinks::accumulation_and_ranks_give_the_gradients_of_one_large_batch_through_every_sink,
);
