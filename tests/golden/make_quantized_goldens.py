"""Make the fixtures with quantized weights, and what transformers computes with them.

    python make_quantized_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

`quant-source` is a Llama of one layer in bf16. `quant-bnb-*` are what transformers and bitsandbytes save of it on the CPU, `quant-fp8`
has blocks of 128 x 128 as DeepSeek and Qwen3 store them, `quant-fp8-tensor` one scale per matrix and scales of activations as Mistral
does, `quant-fp8-static` the same and `quant-fp8-channel` a scale per row in the names and shapes of compressed-tensors
(`float-quantized`); `quant-nvfp4` is packed by compressed-tensors. `quant-fp8-ministral3` is a Ministral 3 as published: the text model
in FP8 with one scale per matrix, next to a vision tower in bf16. `quant-mxfp4-gpt-oss` is tiny-gpt-oss with experts in MXFP4, as published. The
logits are those of
transformers in f32 over the dequantized weights; each weight is dequantized here by its written formula and compared with what the
library that defines the format gives. The helpers are those of make_llama_goldens.py. Needs `pip install compressed-tensors` (0.20.0).
"""

import json
import shutil

import torch
from bitsandbytes.functional import QuantState, create_dynamic_map, dequantize_4bit
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from make_llama_goldens import forward_tensors, maker_from_arguments, random_ids
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    Mxfp4Config,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

VOCABULARY = 96
GPT_OSS_IDS = 415
STATE = ".quant_state.bitsandbytes__"
FORMATS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]
LEVELS_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SAMPLES = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"]


def model_of(seed, hidden, mlp):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def emptied(folder):
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def bnb_value(tensors, name, state):
    """A weight by the written formula: codes in the high nibble first, blocks of 64, scales in blocks of 256 around an offset."""
    part = lambda suffix: tensors[f"{name}.{suffix}"]
    packed = tensors[name].flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    scales = part("absmax")
    if f"{name}.nested_absmax" in tensors:
        scales = part("nested_quant_map")[scales.long()] * part("nested_absmax").repeat_interleave(256)[: len(scales)]
        scales = scales + torch.tensor(state["nested_offset"], dtype=torch.float32)
    return (part("quant_map")[codes] * scales.repeat_interleave(64)).reshape(state["shape"])


def dequantized_bnb(folder):
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for key in tensors:
        if STATE in key:
            name = key.split(STATE)[0]
            state = json.loads(bytes(tensors[key].tolist()))
            weights[name] = bnb_value(tensors, name, state)
            parts = {part: value for part, value in tensors.items() if part.startswith(name + ".")}
            library = dequantize_4bit(tensors[name], QuantState.from_dict(dict(parts), device=torch.device("cpu")))
            # The library rounds to bf16, and its CPU kernel rounds the levels of fp4 to four digits.
            torch.testing.assert_close(library.float(), weights[name], rtol=2**-8, atol=2e-4)
    return weights


def has_nearest_codes(folder):
    """Whether the coarse table of the CPU kernel gave every scale its nearest code, as the CUDA kernel does."""
    tensors, levels = load_file(folder / "model.safetensors"), create_dynamic_map().double()
    plain = load_file(folder.parent / "quant-bnb-nf4" / "model.safetensors")
    for key, codes in tensors.items():
        if key.endswith(".weight.absmax"):
            name = key.removesuffix(".absmax")
            state = [value for part, value in tensors.items() if part.startswith(name + STATE)][0]
            offset = torch.tensor(json.loads(bytes(state.tolist()))["nested_offset"], dtype=torch.float32)
            scales = (plain[key] - offset) / tensors[f"{name}.nested_absmax"].repeat_interleave(256)[: len(codes)]
            nearest = (scales.double()[:, None] - levels).abs().argmin(dim=1)
            if not torch.equal(nearest, codes.long()):
                return False
    return True


def save_bnb(maker, source, quant_type, double_quant):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    name = f"quant-bnb-{quant_type}" + ("-double-quant" if double_quant else "")
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(emptied(maker.fixtures / name))
    return name


def save_source_and_bnb(maker):
    for seed in range(1, 400):
        source = emptied(maker.fixtures / "quant-source")
        model_of(seed, 64, 128).save_pretrained(source)
        for quant_type, double_quant in [("nf4", False), ("nf4", True)]:
            name = save_bnb(maker, source, quant_type, double_quant)
        if has_nearest_codes(maker.fixtures / name):
            break
    else:
        raise AssertionError("no seed without a scale between two codes")
    for quant_type, double_quant in FORMATS[2:]:
        save_bnb(maker, source, quant_type, double_quant)


def save_quantized(folder, model, quantize, quantization_config, **keys):
    """The weights of the layers through `quantize`, which returns the parts by suffix of the module and the values; `keys` go into
    config.json."""
    tensors, values = {}, {}
    for name, value in model.state_dict().items():
        if "_proj.weight" in name:
            parts, values[name] = quantize(name, value.float())
            tensors.update({name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()})
        else:
            tensors[name] = value.contiguous()
    model.config.save_pretrained(emptied(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    config.update(keys, quantization_config=quantization_config)
    path.write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return values


def fp8_blocks(name, weight):
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].abs().max() / 448
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * spread


def fp8_codes(weight, scales):
    """Codes, and values by the written formula: code times scale in f32."""
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales.float()


def fp8_tensor(name, weight):
    scale = (weight.abs().max() / 448).to(torch.bfloat16)
    codes, values = fp8_codes(weight, scale)
    library = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(library, values), "transformers gives the same values"
    return {".weight": codes, ".weight_scale_inv": scale, ".activation_scale": torch.tensor(0.03).bfloat16()}, values


def compressed_fp8(codes, scales, values, strategy):
    """The library multiplies in the dtype of the scales."""
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    library = dequantize(codes, scales, args=args)
    assert torch.equal(library, values.to(scales.dtype)), "compressed-tensors gives the same values"
    return {".weight": codes, ".weight_scale": scales}


def fp8_static(name, weight):
    scale = (weight.abs().max() / 448).reshape(1)
    codes, values = fp8_codes(weight, scale)
    return {**compressed_fp8(codes, scale, values, "tensor"), ".input_scale": torch.tensor([0.03])}, values


def fp8_channel(name, weight):
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes, values = fp8_codes(weight, scales)
    return compressed_fp8(codes, scales, values, "channel"), values


def nvfp4(name, weight):
    rows, columns = weight.shape
    largest = weight.abs().max()
    # As compressed-tensors chooses it; in one module a power of two, which multiplication divides by exactly.
    global_scale = (448 * 6 / largest).float().reshape(1) if "q_proj" not in name else torch.tensor([2.0**13])
    blocks = weight.reshape(rows, columns // 16, 16).abs().amax(2)
    scales = (blocks / 6 * global_scale).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    packed = quantize_and_pack_fp4(weight, scales.float(), global_scale=global_scale, group_size=16)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).reshape(rows, columns).long()
    values = LEVELS_E2M1[codes] * (scales.float() / global_scale).repeat_interleave(16, 1)
    unpacked = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    library = dequantize(unpacked, scales.float(), args=args, global_scale=global_scale, dtype=torch.float32)
    assert torch.equal(library, values), "compressed-tensors gives the same values"
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": global_scale}, values


def save_golden(maker, name, model, weights, seed):
    # A new model: the rotary frequencies of one in bf16 stay rounded to it.
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    model = fresh.float().eval()
    model.config._attn_implementation = "eager"
    for key, value in weights.items():
        model.get_parameter(key).data = value.clone()
    samples = {f"weight.{key}": weights[key] for key in SAMPLES}
    maker.save(name, {**forward_tensors(model, random_ids(seed, VOCABULARY)), **samples})


MISTRAL = dict(
    activation_scheme="static",
    dequantize=False,
    modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    quant_method="fp8",
    weight_block_size=None,
)


def make_ministral3(maker):
    """The text model of tiny-ministral3 in the place of that of tiny-mistral3."""
    text, around = maker.fixtures / "tiny-ministral3", maker.fixtures / "tiny-mistral3"
    folder = emptied(maker.fixtures / "quant-fp8-ministral3")
    shutil.copytree(around, folder)
    config = json.loads((around / "config.json").read_text())
    config["text_config"] = json.loads((text / "config.json").read_text())
    for key in ["architectures", "transformers_version", "dtype"]:
        config["text_config"].pop(key, None)
    config["quantization_config"] = MISTRAL
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = load_file(around / "model.safetensors")
    prefix = "language_model."
    assert any(name.startswith(prefix) for name in stored)
    tensors = {name: value for name, value in stored.items() if not name.startswith(prefix)}
    model = Ministral3ForCausalLM.from_pretrained(text, dtype=torch.float32)
    values = {}
    for name, value in model.state_dict().items():
        if "_proj.weight" in name:
            parts, values[name] = fp8_tensor(name, value)
            path = prefix + name.removesuffix(".weight")
            tensors.update({path + suffix: part.contiguous() for suffix, part in parts.items()})
        else:
            rounded = value.to(torch.bfloat16)
            tensors[prefix + name], values[name] = rounded.contiguous(), rounded.float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_golden(maker, folder.name, model, values, 350)
    whole = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    own = whole.model.language_model.layers[0].mlp.down_proj.weight
    assert torch.allclose(own, values[SAMPLES[1]], rtol=1e-2), "transformers finds the text model and its scales"


def mxfp4(weight):
    """Blocks of 32 of the inputs of `[experts, in, out]`, the earlier code in the low nibble, and the values by the written formula."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    # Rounded down, so that the largest values of some blocks saturate.
    scales = (blocks.abs().amax(3).log2().floor() - 2).clamp(-127, 127)
    codes = (blocks / torch.exp2(scales)[..., None]).unsqueeze(-1).sub(LEVELS_E2M1).abs().argmin(-1)
    values = (LEVELS_E2M1[codes] * torch.exp2(scales)[..., None]).flatten(2).transpose(1, 2).contiguous()
    codes, scales = codes.to(torch.uint8), (scales + 127).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    library = convert_moe_packed_tensors(packed, scales, dtype=torch.float32)
    assert torch.equal(library, values), "transformers gives the same values"
    return packed.contiguous(), scales.contiguous(), values


def make_gpt_oss(maker):
    source, folder = maker.fixtures / "tiny-gpt-oss", emptied(maker.fixtures / "quant-mxfp4-gpt-oss")
    shutil.copytree(source, folder)
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values[name] = mxfp4(tensors.pop(name).float())
        tensors.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = dict(modules_to_not_convert=dense, quant_method="mxfp4")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = GptOssForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    for name, value in values.items():
        model.get_parameter(name).data = value
    whole = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert all(torch.equal(whole.get_parameter(name).float(), value) for name, value in values.items())
    samples = {}
    for name, matrix in [("gate_up_proj", slice(0, None, 2)), ("down_proj", slice(None))]:
        weight = values[f"model.layers.0.mlp.experts.{name}"][1].T[matrix]
        samples[f"weight.model.layers.0.mlp.experts.1.{name.replace('_up', '')}.weight"] = weight
    maker.save(folder.name, {**forward_tensors(model, random_ids(GPT_OSS_IDS)), **samples})


def make_fp8_with_few_scales(maker):
    """Scales for the matrix as Mistral stores them, then both layouts of compressed-tensors."""
    compressed = lambda strategy: dict(
        config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=8, type="float", strategy=strategy))),
        format="float-quantized",
        ignore=["lm_head"],
        quant_method="compressed-tensors",
        quantization_status="compressed",
    )
    cases = [
        ("quant-fp8-tensor", fp8_tensor, MISTRAL),
        ("quant-fp8-static", fp8_static, compressed("tensor")),
        ("quant-fp8-channel", fp8_channel, compressed("channel")),
    ]
    for seed, (name, quantize, config) in enumerate(cases, start=347):
        model = model_of(seed, 72, 88)
        weights = save_quantized(maker.fixtures / name, model, quantize, config, dtype="bfloat16")
        save_golden(maker, name, model, weights, seed)


def main():
    maker = maker_from_arguments("make_quantized_goldens.py", __doc__)
    save_source_and_bnb(maker)
    for seed, (quant_type, double_quant) in enumerate(FORMATS, start=341):
        name = f"quant-bnb-{quant_type}" + ("-double-quant" if double_quant else "")
        model = LlamaForCausalLM.from_pretrained(
            maker.fixtures / "quant-source", dtype=torch.float32, attn_implementation="eager"
        )
        save_golden(maker, name, model, dequantized_bnb(maker.fixtures / name), seed)
    make_fp8_with_few_scales(maker)
    make_ministral3(maker)
    make_gpt_oss(maker)
    fp8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    packed = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", ignore=["lm_head"])
    for seed, (name, sizes, quantize, config) in enumerate(
        [("quant-fp8", (136, 144), fp8_blocks, fp8), ("quant-nvfp4", (64, 128), nvfp4, packed)], start=345
    ):
        model = model_of(seed, *sizes)
        weights = save_quantized(maker.fixtures / name, model, quantize, config)
        model.config._attn_implementation = "eager"
        save_golden(maker, name, model, weights, seed)
    for folder in maker.fixtures.glob("quant-*"):
        (folder / "generation_config.json").unlink(missing_ok=True)
        for file in folder.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main()
