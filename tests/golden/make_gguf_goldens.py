"""Blocks of GGUF's number formats, quantized by the `gguf` package (0.19): gguf-blocks.safetensors.

usage: python make_gguf_goldens.py        (needs numpy, gguf, safetensors)
"""

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
for name in ("q8_0", "q4_0", "bf16", "f16"):
    kind = GGMLQuantizationType[name.upper()]
    tensors[name] = quants.quantize(values, kind).view(np.uint8).reshape(-1)
save_file(tensors, Path(__file__).parent / "gguf-blocks.safetensors")
