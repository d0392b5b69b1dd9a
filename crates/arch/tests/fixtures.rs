//! The checkpoints in `tests/fixtures` against the specs that their config.json parses to: transformers and PEFT wrote the files, so
//! names and shapes in the safetensors headers are the reference.
//!
//! Trade-off: tiny random models only; published parameter counts in `src/counts.rs` cover real sizes.

use std::collections::BTreeMap;
use std::fs::{read, read_to_string};
use std::path::{Path, PathBuf};

use firebrick_arch::{
    Activation, AttentionSpec, ExpertGroups, ExpertNames, KeysAndValues, LayerNorms, LayerSpec, LoraConfig, Mixer,
    MlpSpec, ModelConfig, ModelSpec, Naming, OutputGate, QkNorm, QueryScale, Rope, RopeScaling, RouterScores,
    RouterSpec, SharedExpertSpec, SwigluConstants, TargetModules, TensorSpec, TextLayout, adapter_layout,
    is_other_part, name_in_adapter,
};
use serde_json::{Value, from_slice, from_str};

/// Names and shapes of tensors.
type Shapes = BTreeMap<String, Vec<usize>>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Reads names and shapes from the header of a safetensors file: its length as a little-endian u64, then JSON.
fn header(path: &Path) -> Shapes {
    let bytes = read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let map: BTreeMap<String, Value> = from_slice(&bytes[8..8 + length]).unwrap();
    let size = |size: &Value| size.as_u64().unwrap() as usize;
    let shape = |tensor: &Value| tensor["shape"].as_array().unwrap().iter().map(size).collect();
    map.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, tensor)| (name.clone(), shape(tensor))).collect()
}

fn shapes(tensors: Vec<TensorSpec>) -> Shapes {
    tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

fn spec(name: &str) -> ModelSpec {
    ModelConfig::read(&fixture(name)).unwrap().spec
}

/// Builds the spec that the fixtures share, plain Llama with four heads of 16 columns, with one change.
fn expected(change: impl Fn(&mut AttentionSpec)) -> ModelSpec {
    let mut attention = AttentionSpec {
        keys_and_values: KeysAndValues::Own,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        rope: Some(0),
        qk_norm: QkNorm::None,
        value_norm: false,
        gate: OutputGate::None,
        fused_qkv: false,
        qkv_bias: false,
        output_bias: false,
        window: None,
        scale: 0.25,
        soft_cap: None,
        sinks: false,
    };
    change(&mut attention);
    attention.scale = 1.0 / (attention.head_dim as f64).sqrt();
    let rope = Rope::new(10_000.0, RopeScaling::Default, attention.head_dim);
    let mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: false, bias: false };
    ModelSpec {
        vocab_size: 264,
        hidden_size: 64,
        layers: vec![LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::Pre }; 2],
        ropes: vec![rope],
        rms_norm_eps: 1e-6,
        norm_offset: 0.0,
        naming: Naming::Llama,
        embedding_scale: None,
        rounds_embedding_scale: true,
        logits_scaling: 1.0,
        logit_soft_cap: None,
        tie_word_embeddings: false,
        max_position_embeddings: 256,
        initializer_range: 0.15,
    }
}

#[test]
fn tiny_llama_is_plain() {
    assert_eq!(spec("tiny-llama"), expected(|_| ()));
}

#[test]
fn tiny_llama_bias_has_a_bias_on_all_seven_projections() {
    let mut expected = expected(|attention| (attention.qkv_bias, attention.output_bias) = (true, true));
    expected.rms_norm_eps = 1e-5;
    for layer in &mut expected.layers {
        layer.mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: false, bias: true };
    }
    assert_eq!(spec("tiny-llama-bias"), expected);
}

#[test]
fn tiny_mistral_has_a_window_in_every_layer_and_wide_heads() {
    let mut expected = expected(|attention| (attention.head_dim, attention.window) = (24, Some(12)));
    expected.rms_norm_eps = 1e-5;
    assert_eq!(spec("tiny-mistral"), expected);
}

#[test]
fn tiny_qwen2_has_qkv_biases_a_tied_head_and_an_unused_window() {
    let mut expected = expected(|attention| attention.qkv_bias = true);
    expected.ropes[0].theta = 1_000_000.0;
    expected.tie_word_embeddings = true;
    assert_eq!(spec("tiny-qwen2"), expected);
}

#[test]
fn tiny_qwen3_has_qk_norm_and_its_own_head_width() {
    let mut expected = expected(|attention| (attention.head_dim, attention.qk_norm) = (32, QkNorm::PerHead));
    expected.ropes[0].theta = 1_000_000.0;
    assert_eq!(spec("tiny-qwen3"), expected);
}

#[test]
fn tiny_olmo2_normalizes_outputs_and_whole_projections() {
    let mut expected = expected(|attention| attention.qk_norm = QkNorm::WholeProjection);
    expected.ropes[0].theta = 500_000.0;
    expected.layers.iter_mut().for_each(|layer| layer.norms = LayerNorms::Post);
    assert_eq!(spec("tiny-olmo2"), expected);
}

#[test]
fn tiny_phi3_has_fused_projections_and_rotates_part_of_each_head() {
    let mut expected = expected(|attention| attention.fused_qkv = true);
    for layer in &mut expected.layers {
        layer.mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: true, bias: false };
    }
    (expected.rms_norm_eps, expected.tie_word_embeddings) = (1e-5, true);
    expected.ropes[0].rotary_dim = 12;
    expected.ropes[0].scaling = RopeScaling::LongRope {
        short_factor: vec![1.0, 1.05, 1.1, 1.2, 1.5, 1.9],
        long_factor: vec![1.0, 1.2, 1.6, 2.5, 4.0, 7.0],
        original_max_position_embeddings: 128,
        attention_factor: (1.0 + 2_f64.ln() / 128_f64.ln()).sqrt(),
    };
    assert_eq!(spec("tiny-phi3"), expected);
}

#[test]
fn tiny_smollm3_does_not_rotate_in_its_second_layer() {
    let mut expected = expected(|_| ());
    expected.ropes[0].theta = 2_000_000.0;
    expected.tie_word_embeddings = true;
    expected.attentions_mut().nth(1).unwrap().rope = None;
    assert_eq!(spec("tiny-smollm3"), expected);
}

#[test]
fn tiny_olmo3_has_a_window_in_one_layer_and_a_scaled_rope_in_the_other() {
    let mut expected = expected(|attention| attention.qk_norm = QkNorm::WholeProjection);
    expected.layers.iter_mut().for_each(|layer| layer.norms = LayerNorms::Post);
    let attention = expected.attentions_mut().next().unwrap();
    (attention.window, attention.rope) = (Some(12), Some(1));
    let scaling = RopeScaling::Yarn {
        factor: 8.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 32,
        attention_factor: 1.207_944_154_167_983_6,
        truncate: true,
    };
    expected.ropes = vec![Rope::new(5e5, scaling, 16), Rope::new(5e5, RopeScaling::Default, 16)];
    assert_eq!(spec("tiny-olmo3"), expected);
}

#[test]
fn tiny_granite_has_four_multipliers_and_biases() {
    let mut expected = expected(|attention| (attention.qkv_bias, attention.output_bias) = (true, true));
    expected.attentions_mut().for_each(|attention| attention.scale = 0.15);
    for layer in &mut expected.layers {
        layer.mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: false, bias: true };
    }
    (expected.rms_norm_eps, expected.embedding_scale) = (0.01 / (0.6 * 0.6), Some(1.3 / 0.6));
    (expected.rounds_embedding_scale, expected.logits_scaling) = (false, 0.7);
    expected.tie_word_embeddings = true;
    assert_eq!(spec("tiny-granite"), expected);
}

#[test]
fn tiny_gemma_has_a_scaled_embedding_and_the_tanh_form_of_gelu() {
    let mut expected = expected(|attention| (attention.head_dim, attention.kv_heads) = (32, 1));
    for layer in &mut expected.layers {
        layer.mlp =
            MlpSpec::Gated { intermediate_size: 96, activation: Activation::GeluTanh, fused: false, bias: false };
    }
    (expected.norm_offset, expected.embedding_scale, expected.tie_word_embeddings) = (1.0, Some(8.0), true);
    assert_eq!(spec("tiny-gemma"), expected);
}

#[test]
fn tiny_glm4_rotates_neighbors_in_half_of_each_head_and_has_four_norms() {
    let mut expected = expected(|attention| (attention.head_dim, attention.qkv_bias) = (32, true));
    for layer in &mut expected.layers {
        layer.norms = LayerNorms::PreAndPostGlm;
        layer.mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: true, bias: false };
    }
    expected.rms_norm_eps = 1e-5;
    expected.ropes = vec![Rope { interleaved: true, ..Rope::new(1e4, RopeScaling::Default, 16) }];
    assert_eq!(spec("tiny-glm4"), expected);
}

#[test]
fn tiny_glm_rotates_neighbors_and_has_two_norms() {
    let mut expected = expected(|_| ());
    for layer in &mut expected.layers {
        layer.mlp = MlpSpec::Gated { intermediate_size: 96, activation: Activation::Silu, fused: true, bias: false };
    }
    expected.rms_norm_eps = 1e-5;
    expected.ropes[0].interleaved = true;
    assert_eq!(spec("tiny-glm"), expected);
}

#[test]
fn tiny_ministral3_scales_queries_by_position() {
    let mut expected = expected(|attention| attention.head_dim = 32);
    expected.rms_norm_eps = 1e-5;
    let original_max_position_embeddings = 16;
    let scaling = RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings,
        attention_factor: 1.0,
        truncate: true,
    };
    let query_scale = Some(QueryScale { beta: 0.5, original_max_position_embeddings });
    expected.ropes = vec![Rope { query_scale, ..Rope::new(1e6, scaling, 32) }];
    assert_eq!(spec("tiny-ministral3"), expected);
}

/// Builds the spec that Gemma 2 and 3 share: a window in the first of two layers.
fn expected_gemma() -> ModelSpec {
    let mut expected = expected(|attention| attention.head_dim = 32);
    for layer in &mut expected.layers {
        layer.norms = LayerNorms::PreAndPost;
        layer.mlp =
            MlpSpec::Gated { intermediate_size: 96, activation: Activation::GeluTanh, fused: false, bias: false };
    }
    expected.attentions_mut().next().unwrap().window = Some(12);
    expected.attentions_mut().for_each(|attention| attention.scale = 1.0 / 24_f64.sqrt());
    (expected.norm_offset, expected.embedding_scale, expected.tie_word_embeddings) = (1.0, Some(8.0), true);
    expected
}

#[test]
fn tiny_gemma2_has_soft_caps_and_norms_around_attention_and_mlp() {
    let mut expected = expected_gemma();
    expected.attentions_mut().for_each(|attention| attention.soft_cap = Some(3.0));
    expected.logit_soft_cap = Some(6.0);
    assert_eq!(spec("tiny-gemma2"), expected);
}

#[test]
fn tiny_gemma3_has_a_rope_for_each_type_of_layer_and_norms_of_heads() {
    let mut expected = expected_gemma();
    expected.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::PerHead);
    expected.attentions_mut().next().unwrap().rope = Some(1);
    let scaling = RopeScaling::Linear { factor: 8.0 };
    expected.ropes.insert(0, Rope::new(1e6, scaling, 32));
    assert_eq!(spec("tiny-gemma3"), expected);
}

#[test]
fn tiny_mixtral_and_tiny_qwen3_moe_have_experts() {
    let experts = |count, top_k, intermediate_size, names| MlpSpec::Experts {
        count,
        top_k,
        intermediate_size,
        activation: Activation::Silu,
        router: RouterSpec::softmax(names == ExpertNames::Mixtral),
        shared: None,
        names,
        fused: false,
        bias: false,
        mxfp4: false,
    };
    let mut mixtral = expected(|_| ());
    mixtral.ropes[0].theta = 1e6;
    mixtral.layers.iter_mut().for_each(|layer| layer.mlp = experts(4, 2, 48, ExpertNames::Mixtral));
    assert_eq!(spec("tiny-mixtral"), mixtral);
    let mut qwen3_moe = expected(|attention| {
        attention.head_dim = 32;
        attention.qk_norm = QkNorm::PerHead;
    });
    qwen3_moe.ropes[0].theta = 1e6;
    qwen3_moe.layers[1].mlp = experts(6, 3, 32, ExpertNames::Qwen);
    assert_eq!(spec("tiny-qwen3-moe"), qwen3_moe);
}

#[test]
fn tiny_qwen2_moe_and_tiny_glm4_moe_have_routers_and_shared_experts_of_their_own() {
    let experts = |count, top_k, router, shared, names| MlpSpec::Experts {
        count,
        top_k,
        intermediate_size: 32,
        activation: Activation::Silu,
        router,
        shared: Some(shared),
        names,
        fused: false,
        bias: false,
        mxfp4: false,
    };
    let mut qwen2_moe = expected(|attention| attention.qkv_bias = true);
    qwen2_moe.ropes[0].theta = 1e6;
    let shared = SharedExpertSpec { intermediate_size: 48, gated: true };
    let mlp = experts(5, 2, RouterSpec::softmax(true), shared, ExpertNames::Qwen);
    qwen2_moe.layers.iter_mut().for_each(|layer| layer.mlp = mlp.clone());
    assert_eq!(spec("tiny-qwen2-moe"), qwen2_moe);

    let mut glm4_moe = expected(|attention| {
        (attention.head_dim, attention.qk_norm, attention.qkv_bias) = (32, QkNorm::PerHead, true);
    });
    glm4_moe.ropes[0] = Rope::new(1e6, RopeScaling::Default, 16);
    let router = RouterSpec {
        epsilon: 1e-20,
        scores: RouterScores::Sigmoid,
        normalizes: true,
        scale: 1.5,
        corrects: true,
        bias: false,
        groups: Some(ExpertGroups { count: 4, chosen: 2 }),
    };
    let shared = SharedExpertSpec { intermediate_size: 64, gated: false };
    glm4_moe.layers[1].mlp = experts(8, 3, router, shared, ExpertNames::DeepSeek);
    assert_eq!(spec("tiny-glm4-moe"), glm4_moe);
}

#[test]
fn tiny_gpt_oss_has_sinks_windows_biases_and_experts_with_clamped_gates() {
    let mut expected = expected(|attention| {
        (attention.head_dim, attention.sinks) = (32, true);
        (attention.qkv_bias, attention.output_bias) = (true, true);
    });
    let scaling = RopeScaling::Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 16,
        attention_factor: 0.1 * 32_f64.ln() + 1.0,
        truncate: false,
    };
    (expected.ropes[0], expected.rms_norm_eps) = (Rope::new(150_000.0, scaling, 32), 1e-5);
    expected.attentions_mut().next().unwrap().window = Some(12);
    let mlp = |mxfp4| MlpSpec::Experts {
        count: 6,
        top_k: 2,
        intermediate_size: 32,
        activation: Activation::ClampedSwiglu(SwigluConstants::PUBLISHED),
        router: RouterSpec { bias: true, ..RouterSpec::softmax(true) },
        shared: None,
        names: ExpertNames::GptOss,
        fused: false,
        bias: true,
        mxfp4,
    };
    for (name, mxfp4) in [("tiny-gpt-oss", false), ("quant-mxfp4-gpt-oss", true)] {
        expected.layers.iter_mut().for_each(|layer| layer.mlp = mlp(mxfp4));
        assert_eq!(spec(name), expected, "{name}");
    }
}

#[test]
fn tensors_of_gpt_oss_equal_the_header_but_for_experts_which_have_as_many_values_there() {
    let (tensors, header) =
        (shapes(spec("tiny-gpt-oss").tensors()), header(&fixture("tiny-gpt-oss").join("model.safetensors")));
    let (of_experts, others): (Shapes, Shapes) = tensors.into_iter().partition(|(name, _)| name.contains(".experts."));
    let (fused, other_header): (Shapes, Shapes) = header.into_iter().partition(|(name, _)| name.contains(".experts."));
    assert_eq!(others, other_header);
    let values = |shapes: Shapes| -> usize { shapes.values().map(|shape| shape.iter().product::<usize>()).sum() };
    assert_eq!((fused.len(), values(of_experts)), (8, values(fused)));
}

/// Checkpoints with a vision tower, with the layouts of their tensors.
const WRAPPERS: [(&str, TextLayout); 4] = [
    ("tiny-gemma3-vl", TextLayout::LanguageModelFirst),
    ("tiny-mistral3", TextLayout::LanguageModelFirst),
    ("tiny-qwen2-5-vl", TextLayout::Alone),
    ("tiny-qwen3-vl", TextLayout::ModelFirst),
];

#[test]
fn text_models_of_wrappers_have_the_specs_of_their_families() {
    assert_eq!(spec("tiny-gemma3-vl"), spec("tiny-gemma3"));
    assert_eq!(spec("tiny-mistral3"), expected(|attention| attention.head_dim = 24));
    assert_eq!(spec("tiny-qwen2-5-vl"), spec("tiny-qwen2"));
    assert_eq!(spec("tiny-qwen3-vl"), spec("tiny-qwen3"));
}

#[test]
fn tensors_of_wrappers_equal_the_header_in_their_layout_next_to_a_tower() {
    for (name, layout) in WRAPPERS {
        let header = header(&fixture(name).join("model.safetensors"));
        assert_eq!(TextLayout::of(header.keys().map(String::as_str)), layout, "{name}");
        let all = header.len();
        let text: Shapes = header.into_iter().filter(|(name, _)| !is_other_part(name)).collect();
        let tensors = shapes(spec(name).tensors()).into_iter().map(|(name, shape)| (layout.name_of(&name), shape));
        assert_eq!(tensors.collect::<Shapes>(), text, "{name}");
        assert!(all > text.len(), "{name}");
    }
}

#[test]
fn adapter_tensors_of_wrappers_equal_the_header_in_pefts_names() {
    for (name, _) in WRAPPERS {
        let lora = LoraConfig { r: 4, ..LoraConfig::default() };
        let tensors = shapes(spec(name).adapter_tensors(&lora).unwrap()).into_iter();
        let named: Shapes =
            tensors.map(|(name, shape)| (name_in_adapter(&name, TextLayout::ModelFirst), shape)).collect();
        let header = header(&fixture(&format!("{name}-lora")).join("adapter_model.safetensors"));
        assert_eq!(named, header, "{name}");
        assert_eq!(adapter_layout(header.keys().map(String::as_str)), TextLayout::ModelFirst);
    }
}

#[test]
fn tensors_equal_the_header_of_every_checkpoint() {
    for name in [
        "tiny-gemma",
        "tiny-gemma2",
        "tiny-gemma3",
        "tiny-glm",
        "tiny-glm4",
        "tiny-glm4-moe",
        "tiny-granite",
        "tiny-llama",
        "tiny-llama-bias",
        "tiny-llama-tied",
        "tiny-llama-yarn",
        "tiny-ministral3",
        "tiny-mistral",
        "tiny-mixtral",
        "tiny-olmo2",
        "tiny-olmo3",
        "tiny-phi3",
        "tiny-phi3-long",
        "tiny-qwen2",
        "tiny-qwen2-moe",
        "tiny-qwen3",
        "tiny-qwen3-moe",
        "tiny-smollm3",
    ] {
        assert_eq!(shapes(spec(name).tensors()), header(&fixture(name).join("model.safetensors")), "{name}");
    }
}

#[test]
fn adapter_tensors_equal_the_header_of_every_adapter() {
    let adapters = [
        ("tiny-gemma", "tiny-gemma-lora"),
        ("tiny-gemma2", "tiny-gemma2-lora"),
        ("tiny-gemma3", "tiny-gemma3-lora"),
        ("tiny-glm", "tiny-glm-lora"),
        ("tiny-glm4", "tiny-glm4-lora"),
        ("tiny-glm4-moe", "tiny-glm4-moe-lora"),
        ("tiny-gpt-oss", "tiny-gpt-oss-lora"),
        ("tiny-gpt-oss", "tiny-gpt-oss-parameters"),
        ("tiny-granite", "tiny-granite-lora"),
        ("tiny-llama", "tiny-llama-lora"),
        ("tiny-llama", "tiny-llama-rslora"),
        ("tiny-llama-tied", "tiny-llama-tied-lora"),
        ("tiny-llama-bias", "tiny-llama-bias-lora"),
        ("tiny-ministral3", "tiny-ministral3-lora"),
        ("tiny-mistral", "tiny-mistral-lora"),
        ("tiny-mixtral", "tiny-mixtral-lora"),
        ("tiny-mixtral", "tiny-mixtral-parameters"),
        ("tiny-olmo2", "tiny-olmo2-lora"),
        ("tiny-olmo3", "tiny-olmo3-lora"),
        ("tiny-phi3", "tiny-phi3-lora"),
        ("tiny-qwen2", "tiny-qwen2-lora"),
        ("tiny-qwen2-moe", "tiny-qwen2-moe-lora"),
        ("tiny-qwen3", "tiny-qwen3-lora"),
        ("tiny-qwen3-moe", "tiny-qwen3-moe-lora"),
        ("tiny-qwen3-moe", "tiny-qwen3-moe-parameters"),
        ("tiny-smollm3", "tiny-smollm3-lora"),
    ];
    for (base, adapter) in adapters {
        let text = read_to_string(fixture(adapter).join("adapter_config.json")).unwrap();
        let lora: LoraConfig = from_str(&text).unwrap();
        let model = ModelConfig::read(&fixture(base)).unwrap().for_adapter(Some(&lora));
        let tensors = model.spec.adapter_tensors(&lora).unwrap();
        assert_eq!(shapes(tensors), header(&fixture(adapter).join("adapter_model.safetensors")), "{adapter}");
        if adapter == "tiny-qwen3-lora" {
            assert_eq!(lora.target_modules.resolve(&spec(base)).unwrap(), TargetModules::AllLinear);
        }
    }
}
