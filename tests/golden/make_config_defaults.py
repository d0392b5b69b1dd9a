"""Write what transformers' config classes make of few keys: the keys as given, and the whole config.json with the defaults.

    python make_config_defaults.py [--out FILE]     (default: ../../crates/arch/tests/defaults.json)

The given keys are those of transformers 4, and the whole is what transformers 5 writes (`to_diff_dict`, which leaves out
only what every class has). Given keys come with `architectures` alone and the whole with `model_type` alone, since either
is enough. No weights are read or made.
"""

import argparse
import json
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_VISION

# Heads that every default number of key and value heads divides; layers enough to show every pattern.
SIZES = dict(vocab_size=300_000, hidden_size=128, intermediate_size=48, num_hidden_layers=7, num_attention_heads=32)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, attention_factor=1.2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LONG = dict(type="longrope", short_factor=[1.0] * 6, long_factor=[2.0] * 6)
WINDOWS = dict(use_sliding_window=True)
FEW_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)

# By `model_type`, what is given besides the sizes.
FAMILIES = {
    "gemma": [{}, dict(hidden_act="gelu"), dict(hidden_activation="gelu_pytorch_tanh")],
    "gemma2": [{}, dict(attn_logit_softcapping=None, final_logit_softcapping=7.5, query_pre_attn_scalar=144)],
    "gemma3_text": [
        {},
        dict(sliding_window_pattern=2, rope_theta=1e5, rope_local_base_freq=12_345.0),
        dict(rope_scaling=dict(rope_type="linear", factor=8.0)),
    ],
    "gemma4_text": [
        {},
        dict(attention_k_eq_v=True, num_global_key_value_heads=2, hidden_size_per_layer_input=0),
        dict(num_global_key_value_heads=2, global_head_dim=6, head_dim=4, sliding_window=16, final_logit_softcapping=30.0),
        # Ten layers, so that one with full attention is before those that share its keys.
        dict(num_hidden_layers=10, num_kv_shared_layers=3, use_double_wide_mlp=True, vocab_size_per_layer_input=300_000),
        dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=6, hidden_size_per_layer_input=0),
    ],
    "gemma4_unified_text": [{}, dict(attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention=None)],
    "glm": [{}],
    "glm4": [{}, dict(partial_rotary_factor=0.25, attention_bias=False)],
    "glm4_moe": [{}, dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, first_k_dense_replace=2)],
    "gpt_oss": [{}, dict(num_local_experts=4, num_experts_per_tok=2, rope_theta=1e4, rope_scaling=YARN)],
    "granite": [{}, dict(attention_bias=True, mlp_bias=True, logits_scaling=8.0, residual_multiplier=0.25)],
    "lfm2": [{}, dict(block_ff_dim=6656, full_attn_idxs=[1, 4], tie_embedding=False)],
    "lfm2_moe": [dict(layer_types=["conv"] * 6 + ["full_attention"])],
    "lfm3": [{}],
    "llama": [{}, dict(attention_bias=True, mlp_bias=True, rope_theta=5e5, rope_scaling=LLAMA3, torch_dtype="float32")],
    "ministral3": [{}],
    "mistral": [{}, dict(sliding_window=16), dict(sliding_window=None)],
    "mixtral": [{}, dict(num_local_experts=4, sliding_window=16)],
    "olmo2": [{}, dict(attention_bias=True)],
    "olmo3": [{}, dict(rope_scaling=YARN, rope_theta=5e5)],
    # Without rotation as in the published model; the class would rotate by 10,000 if the key were absent.
    "olmo_hybrid": [dict(rope_parameters=dict(rope_type="default", rope_theta=None)), dict(rope_theta=1e4)],
    "phi3": [
        {},
        dict(head_dim=16, partial_rotary_factor=0.75, rope_scaling=LONG, original_max_position_embeddings=32, hidden_size=512),
        dict(sliding_window=7),
    ],
    "qwen2": [{}, dict(WINDOWS, num_hidden_layers=30), dict(WINDOWS, sliding_window=16, max_window_layers=1)],
    "qwen2_moe": [{}, dict(WINDOWS), dict(WINDOWS, max_window_layers=3), dict(FEW_EXPERTS, shared_expert_intermediate_size=10)],
    "qwen3": [{}, dict(head_dim=6), dict(WINDOWS, num_hidden_layers=30)],
    "qwen3_moe": [{}, FEW_EXPERTS, dict(WINDOWS, sliding_window=16)],
    "qwen3_5_text": [{}, dict(full_attention_interval=3)],
    "qwen3_5_moe_text": [{}],
    "qwen3_next": [{}, dict(full_attention_interval=3)],
    "smollm3": [
        {},
        dict(no_rope_layer_interval=2),
        dict(no_rope_layers=[1, 0, 1, 0, 1, 1, 1], **WINDOWS, sliding_window=7),
    ],
}

# Keys of the published models with multimodal positions. Their classes have defaults of their own for some, which are given here.
QWEN2_5_VL = dict(num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1e6)
QWEN2_5_VL |= dict(rope_scaling=dict(type="mrope", mrope_section=[1, 1, 0]))
QWEN3_VL = dict(max_position_embeddings=256, rope_theta=5e6)
QWEN3_VL |= dict(rope_scaling=dict(rope_type="default", mrope_section=[24, 20, 20]))

# Checkpoints with a vision tower, whose settings are left out: what is given for the text model.
WRAPPERS = {
    "gemma3": dict(sliding_window=1024, rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma4": dict(SIZES, num_kv_shared_layers=1),
    "gemma4_unified": dict(SIZES, attention_k_eq_v=True, num_global_key_value_heads=1),
    "mistral3": dict(SIZES, model_type="ministral3"),
    "qwen2_5_vl": SIZES | QWEN2_5_VL,
    "qwen3_vl": SIZES | QWEN3_VL,
    "qwen3_5": SIZES,
    "qwen3_5_moe": SIZES,
}


def row(model_type, given, architecture):
    """The given keys as a config.json, and the whole as transformers writes it."""
    whole = CONFIG_MAPPING[model_type](**json.loads(json.dumps(given))).to_diff_dict()
    for key in ["transformers_version", "vision_config", "audio_config"]:
        whole.pop(key, None)
    assert whole["model_type"] == model_type
    return dict(given=dict(architectures=[architecture], **given), whole=whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "../../crates/arch/tests/defaults.json"
    parser.add_argument("--out", type=Path, default=default)
    rows = [row(name, SIZES | more, TEXT[name]) for name, changes in FAMILIES.items() for more in changes]
    # Without the key, the class of a wrapper ties a head that is not there; it is given here.
    rows += [row(name, dict(text_config=text, tie_word_embeddings=True), WITH_VISION[name]) for name, text in WRAPPERS.items()]
    lines = [f'{{"given": {json.dumps(it["given"])},\n "whole": {json.dumps(it["whole"])}}}' for it in rows]
    version = json.dumps(f"transformers {transformers.__version__}")
    parser.parse_args().out.write_text(f'{{"made_with": {version}, "rows": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
