"""Blocks of GGUF's number formats, quantized by the `gguf` package (0.19): gguf-blocks.safetensors. Blocks of the k-quants, quantized by ggml and
read by the `gguf` package: gguf-k-quants.safetensors.

usage: python make_gguf_goldens.py LIBGGML        (needs numpy, gguf, safetensors)

LIBGGML is libggml-base.so of llama.cpp, which the npm package @node-llama-cpp/linux-x64 (3.22.1) has built. Its quantizer is called without an
importance matrix.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

rng = np.random.default_rng(7)
rows = [rng.normal(0.0, size, 32) for size in (1e-6, 0.02, 0.02, 1.0, 30.0, 3e4)]
rows.append(np.zeros(32))
# Ties of the rounding, and equal largest values of both signs.
rows.append(np.where(np.arange(32) % 2 == 0, 127.0, np.arange(32) - 15.5))
rows.append(np.where(np.arange(32) % 2 == 0, -8.0, 8.0))
rows.append(np.arange(32) - 31.0)
values = np.array(rows, dtype=np.float32)
tensors = {"values": values}
for name in ("q8_0", "q4_0", "q5_0", "q5_1", "bf16", "f16"):
    kind = GGMLQuantizationType[name.upper()]
    tensors[name] = quants.quantize(values, kind).view(np.uint8).reshape(-1)
save_file(tensors, Path(__file__).parent / "gguf-blocks.safetensors")

rows = [rng.normal(0.0, size, 256) for size in (1e-6, 0.02, 0.02, 0.02, 1.0, 3e3)]
rows += [rng.laplace(0.0, 0.02, 256), rng.standard_t(3, 256) * 0.02, rng.uniform(-1.0, 1.0, 256), rng.normal(0.1, 0.02, 256)]
# Nothing, a constant, positive ones only, negative ones only, two values, one far outside, sub-blocks of unequal sizes.
rows += [np.zeros(256), np.full(256, 0.5), rng.uniform(0.5, 1.0, 256), rng.uniform(-1.0, -0.5, 256), np.where(np.arange(256) % 2 == 0, -1.0, 1.0)]
rows += [np.where(np.arange(256) == 77, 5.0, rng.normal(0.0, 0.02, 256)), rng.normal(0.0, 1.0, 256) * np.repeat(2.0 ** -np.arange(8), 32)]
values = np.array(rows, dtype=np.float32)
ggml = ctypes.CDLL(sys.argv[1])
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
tensors = {"values": values}
for name, size in (("q4_k", 144), ("q5_k", 176), ("q6_k", 210)):
    kind = GGMLQuantizationType[name.upper()]
    blocks = np.zeros((len(rows), size), dtype=np.uint8)
    ggml.ggml_quantize_chunk(kind, values.ctypes.data, blocks.ctypes.data, 0, *values.shape, None)
    tensors[name], tensors[f"{name}.values"] = blocks, quants.dequantize(blocks, kind)
save_file(tensors, Path(__file__).parent / "gguf-k-quants.safetensors")
