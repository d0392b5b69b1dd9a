"""Train a Gemma 4 of four layers for 100 steps with transformers and torch, and keep the losses: gemma4-curve.json and .safetensors.

    python make_curve_golden.py [--out DIR] [--wide] [--device DEVICE]     (defaults: this folder, small, cpu)

With --wide the layers have the widths of the 12B, and the files are gemma4-curve-wide: 0.9 billion values and their AdamW state, for a card. Weights
follow from the names of tensors by a rule that the test knows too (`tests/src/curve.rs`), so that none are stored. The .json is the model's config.json;
the other file has `tokens`, the bytes of the documents of all steps, their `lengths`, four documents a step, and the `losses` [100] in f32, each before
its update and the mean over the loss tokens of its step. The class of the whole checkpoint would take means of means.

AdamW has betas of 0.9 and 0.999, an epsilon of 1e-8 and a weight decay of 0.01, of matrices alone; gradients are clipped to a norm of 1. With another
order of sums the losses of the small model differ by less than 1e-5.
"""

import argparse
import json
import os
import pathlib
import random

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy
import torch
import transformers
from safetensors.torch import save_file
from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

STEPS, DOCUMENTS = 100, 4
VOCABULARY = 264
# Rates that are the same in f32 and in f64.
RATES = dict(small=1.25 * 2**-12, wide=2**-15)
SMALL = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    global_head_dim=64,
    sliding_window=16,
)
WIDE = dict(
    hidden_size=3840,
    intermediate_size=15360,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    global_head_dim=512,
    sliding_window=1024,
)
WORDS = [
    ["the kiln", "a brick", "the mason", "an oven", "the clay", "a small fire"],
    ["warms", "holds", "turns to", "waits for", "remembers", "breaks"],
    ["ash", "a wall", "the morning", "red dust", "water", "a long road"],
]


def documents(is_wide):
    """Sentences of few words, in documents of different lengths."""
    generator = random.Random(7)
    sentences = (20, 60) if is_wide else (1, 2)
    for _ in range(STEPS * DOCUMENTS):
        parts = [" ".join(map(generator.choice, WORDS)) for _ in range(generator.randint(*sentences))]
        yield ("; ".join(parts) + ".").encode()


def hashes(name, count):
    """32 bits for each value of a tensor: FNV-1a of its name, and the finalizer of MurmurHash3 over that plus a multiple of the value's index."""
    seed = 0x811C9DC5
    for byte in name.encode():
        seed = (seed ^ byte) * 0x01000193 % 2**32
    bits = numpy.arange(count, dtype=numpy.uint32) * numpy.uint32(0x9E3779B9) + numpy.uint32(seed)
    for shift, factor in [(16, 0x85EBCA6B), (13, 0xC2B2AE35)]:
        bits = (bits ^ (bits >> numpy.uint32(shift))) * numpy.uint32(factor)
    return bits ^ (bits >> numpy.uint32(16))


def values(name, shape):
    """Between -1 and 1, times the root of 3 over the inputs of a matrix; a quarter of them around 1 in a vector, but around the root of 8 over the width
    of a head in norms of queries, for scores that are not too far apart."""
    uniform = (hashes(name, int(numpy.prod(shape))) >> numpy.uint32(8)).astype(numpy.float32) * numpy.float32(2.0**-23)
    uniform = uniform - numpy.float32(1.0)
    if len(shape) == 1:
        uniform = numpy.float32(1.0) + numpy.float32(0.25) * uniform
        if name.endswith("q_norm.weight"):
            uniform = uniform * numpy.sqrt(numpy.float32(8.0) / numpy.float32(shape[0]))
    else:
        uniform = uniform * numpy.sqrt(numpy.float32(3.0) / numpy.float32(shape[1]))
    return torch.from_numpy(uniform.reshape(shape))


def make_model(sizes, device):
    config = Gemma4UnifiedTextConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=30.0,
        max_position_embeddings=4096,
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            full_attention=dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.25),
        ),
        **sizes,
    )
    config._attn_implementation = "eager"
    with torch.device(device):
        model = Gemma4UnifiedForCausalLM(config).float()
    state = {name: values(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, missing
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.train()


def train(model, texts, rate, device):
    decaying = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [dict(params=decaying, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for start in range(0, len(texts), DOCUMENTS):
        batch = [torch.tensor(list(text), device=device) for text in texts[start : start + DOCUMENTS]]
        count, total = sum(len(ids) - 1 for ids in batch), 0.0
        optimizer.zero_grad()
        for ids in batch:
            logits = model(ids[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        print(f"step {len(losses)}: {total:.5f}", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(arguments.device == "cpu")
    name = "gemma4-curve-wide" if arguments.wide else "gemma4-curve"
    texts = list(documents(arguments.wide))
    rate = RATES["wide" if arguments.wide else "small"]
    model = make_model(WIDE if arguments.wide else SMALL, arguments.device)
    config = dict(model.config.to_diff_dict(), architectures=["Gemma4UnifiedForCausalLM"], dtype="float32")
    losses = train(model, texts, rate, arguments.device)
    (arguments.out / f"{name}.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = dict(
        learning_rate=torch.tensor([rate], dtype=torch.float32),
        losses=torch.tensor(losses, dtype=torch.float32),
        lengths=torch.tensor([len(text) for text in texts]),
        tokens=torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8),
    )
    made_with = f"make_curve_golden.py, torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    save_file(tensors, arguments.out / f"{name}.safetensors", metadata={"made_with": made_with})
    (arguments.out / f"{name}.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
