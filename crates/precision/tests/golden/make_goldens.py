"""Writes the golden files of this folder with bitsandbytes.

    python make_goldens.py cpu    writes nf4_cpu, nf4_large_cpu, dynamic_map        (.safetensors)
    python make_goldens.py cuda   writes nf4_cuda, adamw_8bit_cuda, blockwise_cuda  (needs an NVIDIA GPU)

Needs torch, numpy, safetensors, bitsandbytes; the versions used are in each file's safetensors metadata. All stored
results were computed by bitsandbytes; nothing is reimplemented here. Inputs are not stored: they come from an integer
generator that `tests/common/mod.rs` implements identically, and each case stores a checksum of its input.
"""

import sys

import numpy as np
import torch
import bitsandbytes as bnb
from bitsandbytes import functional as F
from safetensors.torch import save_file

torch.set_num_threads(1)  # with one thread, torch sums in a fixed order, so the offset is reproducible

NF4_VALUES = F.get_4bit_type("nf4", device="cpu").numpy()


# ---- inputs: identical to tests/common/mod.rs ----------------------------------------------------------------------


def mixed_bits(seed, count):
    """SplitMix64 of the counters seed + 1 .. seed + count steps, as u64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform_integers(seed, count):
    """Integers in [-2^23, 2^23)."""
    return (mixed_bits(seed, count) >> np.uint64(40)).astype(np.int64) - (1 << 23)


def uniform(seed, count):
    return (uniform_integers(seed, count).astype(np.float64) / (1 << 23)).astype(np.float32)


def bell(seed, count):
    """The sum of four uniform draws, halved: nearly normal, and exactly reproducible."""
    total = sum(uniform_integers(seed + 1000 * part, count) for part in range(4))
    return (total.astype(np.float64) / (1 << 24)).astype(np.float32)


def heavy_tailed(seed, count):
    draws = bell(seed, count)
    return draws * draws * draws


def with_zero_blocks(seed, count):
    """Block 1 and everything from the last whole multiple of 64 on are zero."""
    values = bell(seed, count)
    values[64:128] = 0
    values[count // 64 * 64 :] = 0
    return values


def around(points, length):
    """Each point and its two neighboring floats, then 1.0, then zeros up to `length`."""
    points = points.astype(np.float32)
    below, above = np.nextafter(points, np.float32(-2)), np.nextafter(points, np.float32(2))
    values = np.stack([points, below, above], axis=1).reshape(-1)
    padded = np.zeros(length, dtype=np.float32)
    padded[: len(values)] = values
    padded[len(values)] = 1.0
    return padded


def nf4_thresholds():
    return around((NF4_VALUES[:-1] + NF4_VALUES[1:]) / np.float32(2), 64)


def input_checksum(values):
    """Sum of the f32 bit patterns, modulo 2^63."""
    return torch.tensor([int(values.astype(np.float32).view(np.uint32).astype(np.uint64).sum()) & (2**63 - 1)])


def scaled(values, scale):
    return values * np.float32(scale)


# name -> (values, torch dtype). Inputs of 16-bit cases are f32 draws rounded to nearest even by torch.
def nf4_cases():
    return {
        "one_value": (bell(1, 1), torch.float32),
        "seven_values": (bell(2, 7), torch.float32),
        "one_block": (bell(3, 64), torch.float32),
        "odd_partial_block": (bell(4, 64 * 3 + 17), torch.float32),
        "two_nested_blocks": (bell(5, 64 * 300 + 1), torch.float32),
        "whole_nested_block": (uniform(6, 64 * 256), torch.float32),
        "heavy_tailed": (heavy_tailed(7, 64 * 40), torch.float32),
        "tiny": (scaled(bell(8, 64 * 10), 1e-30), torch.float32),
        "subnormal": (scaled(bell(9, 64 * 3), 1e-39), torch.float32),
        "zero_blocks": (with_zero_blocks(10, 64 * 9 + 24), torch.float32),
        "all_zero": (np.zeros(64 * 2 + 10, dtype=np.float32), torch.float32),
        "thresholds": (nf4_thresholds(), torch.float32),
        "bf16": (scaled(bell(11, 64 * 513 + 40), 0.02), torch.bfloat16),
        "f16": (scaled(bell(12, 64 * 20 + 6), 0.02), torch.float16),
    }


# ---- goldens ------------------------------------------------------------------------------------------------------


def nf4(device):
    out = {}
    for name, (values, dtype) in nf4_cases().items():
        tensor = torch.from_numpy(values).to(dtype).to(device)
        packed, plain = F.quantize_4bit(tensor, quant_type="nf4", blocksize=64)
        packed_again, nested = F.quantize_4bit(tensor, quant_type="nf4", blocksize=64, compress_statistics=True)
        assert torch.equal(packed, packed_again)
        out[f"{name}.input_checksum"] = input_checksum(tensor.float().cpu().numpy())
        out[f"{name}.packed"] = packed.flatten()
        out[f"{name}.absmax"] = plain.absmax
        out[f"{name}.nested.codes"] = nested.absmax
        out[f"{name}.nested.absmax"] = nested.state2.absmax
        out[f"{name}.nested.offset"] = nested.offset.reshape(1)
        assert nested.state2.blocksize == 256
        if tensor.numel() <= 1000:
            plain.dtype = nested.dtype = torch.float32
            out[f"{name}.values"] = F.dequantize_4bit(packed, plain).flatten()
            out[f"{name}.nested.values"] = F.dequantize_4bit(packed, nested).flatten()
    return out


def weighted_sum(integers):
    """Sum of value times position (from 1), modulo 2^63: any change of any one value changes it."""
    with np.errstate(over="ignore"):
        total = (np.arange(1, len(integers) + 1, dtype=np.uint64) * integers.astype(np.uint64)).sum()
    return torch.tensor([int(total) & (2**63 - 1)])


def nf4_large(device):
    """Counts of blocks at which other orders of summing give another mean; only the offset is kept, and a checksum."""
    values = bell(13, 64 * 70_000)
    out = {"large.input_checksum": input_checksum(values)}
    for blocks in (1000, 2001, 10_007, 20_011, 70_000):
        tensor = torch.from_numpy(values[: 64 * blocks]).to(device)
        packed, state = F.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
        out[f"large{blocks}.packed_checksum"] = weighted_sum(packed.flatten().cpu().numpy())
        out[f"large{blocks}.nested.offset"] = state.offset.reshape(1)
        out[f"large{blocks}.nested.absmax"] = state.state2.absmax[:4]
    return out


def dynamic_map(_device):
    return {"signed": F.create_dynamic_map(signed=True), "unsigned": F.create_dynamic_map(signed=False)}


def blockwise(device):
    out = {}
    for signed in (True, False):
        code = F.create_dynamic_map(signed=signed)
        midpoints = ((code[:-1] + code[1:]) / 2).numpy()
        drawn = bell(20 + signed, 256 * 5 + 33)
        drawn[256:512] = 0
        if not signed:
            drawn = np.abs(drawn)
        cases = {"bell": drawn, "midpoints": np.append(midpoints, np.float32(1.0))}
        for name, values in cases.items():
            codes, state = F.quantize_blockwise(torch.from_numpy(values).to(device), code=code.to(device), blocksize=256)
            prefix = f"{'signed' if signed else 'unsigned'}.{name}"
            out[f"{prefix}.input_checksum"] = input_checksum(values)
            out[f"{prefix}.codes"] = codes
            out[f"{prefix}.absmax"] = state.absmax
            out[f"{prefix}.values"] = F.dequantize_blockwise(codes, state)
    return out


def adamw_8bit(device):
    """Four steps; each stores the state after it. Block 1 never has a gradient; step 2 meets a NaN and an infinity."""
    count, steps = 256 * 3 + 100, 4
    signed, unsigned = F.create_dynamic_map(signed=True).to(device), F.create_dynamic_map(signed=False).to(device)
    parameters = torch.from_numpy(bell(30, count)).to(device)
    blocks = (count + 255) // 256
    state1, state2 = torch.zeros(2, count, dtype=torch.uint8, device=device)
    absmax1, absmax2 = torch.zeros(2, blocks, dtype=torch.float32, device=device)
    out = {}
    for step in range(1, steps + 1):
        gradients = scaled(bell(30 + step, count), 0.01)
        gradients[256:512] = 0
        if step == 2:
            gradients[600], gradients[601] = np.nan, np.inf
        F.optimizer_update_8bit_blockwise(
            "adam", torch.from_numpy(gradients).to(device), parameters, state1, state2,
            0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-3, signed, unsigned, absmax1, absmax2,
            weight_decay=0.01, gnorm_scale=0.5 if step == 3 else 1.0,
        )  # fmt: skip
        names = ("parameters", "codes1", "codes2", "absmax1", "absmax2")
        for name, tensor in zip(names, (parameters, state1, state2, absmax1, absmax2)):
            out[f"step{step}.{name}"] = tensor.clone()
    return out


def main():
    device = sys.argv[1]
    files = {
        "cpu": {"nf4_cpu": nf4, "nf4_large_cpu": nf4_large, "dynamic_map": dynamic_map},
        "cuda": {"nf4_cuda": nf4, "adamw_8bit_cuda": adamw_8bit, "blockwise_cuda": blockwise},
    }[device]
    folder = sys.argv[2] if len(sys.argv) > 2 else "."
    # One key: safetensors writes several in no fixed order, and the files would differ from run to run.
    made_with = f"bitsandbytes {bnb.__version__}, torch {torch.__version__}"
    if device == "cuda":
        made_with += f", {torch.cuda.get_device_name()}"
    for name, make in files.items():
        tensors = {key: value.cpu().contiguous() for key, value in make(device).items()}
        save_file(tensors, f"{folder}/{name}.safetensors", metadata={"made_with": made_with})


main()
