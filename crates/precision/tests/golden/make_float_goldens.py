"""Writes the golden files of the narrow floating-point formats.

    python make_float_goldens.py ml_dtypes    writes floats_ml_dtypes, weights_ml_dtypes (.safetensors)
    python make_float_goldens.py torch        writes floats_torch

into this folder, or into the one given as second argument.

Needs numpy, safetensors, and ml_dtypes or torch; the versions used are in each file's safetensors metadata.

`floats_*` has, for each format, the value of every code and, but for E8M0, the codes of the same inputs; all conversions are
those of the library. `weights_ml_dtypes` has weights in the storage formats: packed codes, scales, and the values that come
back. Each code and each narrow scale is a conversion by ml_dtypes, and the arithmetic around it is numpy's in f32, written from
the formulas in `src/scaling.rs`. Their values are not stored: they come from an integer generator that `tests/common/mod.rs`
implements identically.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FLOOR = np.float32(2.0**-100)


# ---- inputs -------------------------------------------------------------------------------------------------------


def mixed_bits(seed, count):
    """SplitMix64 of the counters seed + 1 .. seed + count steps, as u64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def bell(seed, count):
    parts = (mixed_bits(seed + 1000 * part, count) >> np.uint64(40) for part in range(4))
    total = sum(part.astype(np.int64) - (1 << 23) for part in parts)
    return (total.astype(np.float64) / (1 << 24)).astype(np.float32)


def around_codes(values):
    """Every finite value, the middle between neighbors and the f32 on both sides of it, with both signs."""
    values = np.unique(np.abs(values[np.isfinite(values)]))
    middles = values[:-1] + (values[1:] - values[:-1]) / np.float32(2)
    low, high = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))
    points = np.concatenate([values, middles, low, high]).astype(np.float32)
    return np.concatenate([points, -points])


def inputs(values):
    any_bits = mixed_bits(1, 1024).astype(np.uint32).view(np.float32)
    special = np.array([np.inf, -np.inf, 449, 463.9, 464, 464.1, 480, 57344, 61439, 61440, 65519, 65520, 3.4e38], np.float32)
    return np.concatenate([around_codes(values), any_bits[~np.isnan(any_bits)], bell(2, 1024) * np.float32(8), special])


# ---- formats ------------------------------------------------------------------------------------------------------


def ml_dtypes_formats():
    import ml_dtypes

    def pair(dtype, bits):
        return (
            bits,
            lambda codes: codes.astype(np.uint8).view(dtype).astype(np.float32),
            lambda values: values.astype(dtype).view(np.uint8),
        )

    formats = {
        "e4m3": pair(ml_dtypes.float8_e4m3fn, 8),
        "e2m1": pair(ml_dtypes.float4_e2m1fn, 4),
        "e8m0": pair(ml_dtypes.float8_e8m0fnu, 8),
    }
    return formats, f"ml_dtypes {ml_dtypes.__version__}, numpy {np.__version__}"


def torch_formats():
    import torch

    def pair(dtype, bits):
        return (
            bits,
            lambda codes: torch.from_numpy(codes.astype(np.int64)).to(torch.uint8).view(dtype).float().numpy(),
            lambda values: torch.from_numpy(values).to(dtype).view(torch.uint8).numpy(),
        )

    formats = {
        "e4m3": pair(torch.float8_e4m3fn, 8),
        "e8m0": pair(torch.float8_e8m0fnu, 8),
    }
    return formats, f"torch {torch.__version__}"


def floats(formats):
    out = {}
    for name, (bits, decode, encode) in formats.items():
        values = decode(np.arange(1 << bits))
        out[f"{name}.values"] = values
        if name == "e8m0":
            continue
        points = inputs(values)
        out[f"{name}.inputs"] = points
        with np.errstate(over="ignore"):
            out[f"{name}.codes"] = encode(points).astype(np.uint16)
    return out


# ---- matrices with scales -----------------------------------------------------------------------------------------


def matrix(rows, columns):
    """Rows of different sizes; row 3 is zero and row 4 tiny; one group is zero, one a millionth of the others."""
    values = bell(rows * columns, rows * columns).reshape(rows, columns)
    values *= np.exp2(np.arange(rows) % 8 - 4).astype(np.float32)[:, None]
    values[3] = 0
    values[4] *= np.float32(1e-37)
    values[5, :32] = 0
    values[6, 32:64] *= np.float32(1e-6)
    return values


def narrow(scaled, dtype, largest):
    return np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)


def scaled(values, width, dtype, largest, kind):
    import ml_dtypes

    largest = np.float32(largest)
    codes = np.zeros(values.shape, np.uint8)
    scales = []
    whole = np.maximum(np.abs(values).max(), FLOOR)
    tensor, tensor_factor = whole / (np.float32(448) * largest), (np.float32(448) * largest) / whole
    rows, columns = values.shape
    for place in ((row, slice(left, left + width)) for row in range(rows) for left in range(0, columns, width)):
        amax = np.abs(values[place]).max()
        floored = np.maximum(amax, FLOOR)
        if kind == "f32":
            scale, factor = floored / largest, largest / floored
        elif kind == "e8m0":
            mantissa, exponent = np.frexp(amax / largest)
            exponent = exponent - 1 if mantissa == 0.5 else exponent
            exponent = -127 if amax == 0 else max(int(exponent), -127)
            scale = np.array([np.exp2(np.float64(exponent))]).astype(np.float32)
            scale = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)[0]
            factor = np.float32(np.exp2(np.float64(-exponent)))
        else:
            scale = np.array([amax * tensor_factor / largest]).astype(ml_dtypes.float8_e4m3fn)
            value = scale.astype(np.float32)[0]
            scale, factor = scale.view(np.uint8)[0], tensor_factor / value if value else np.float32(0)
        scales.append(scale)
        codes[place] = narrow(values[place] * factor, dtype, largest)
    return codes, np.array(scales), np.array([tensor])


# ---- weights in the storage formats -------------------------------------------------------------------------------


def weights():
    import ml_dtypes

    e4m3, e2m1 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float4_e2m1fn, 6)
    cases = {"nvfp4": (16, e2m1, "nvfp4"), "mxfp4": (32, e2m1, "e8m0"), "fp8": (160, e4m3, "f32")}
    out = {}
    for name, (width, (dtype, largest), kind) in cases.items():
        codes, scales, tensor = scaled(matrix(24, 160), width, dtype, largest, kind)
        if kind == "nvfp4":
            out[f"{name}.tensor"] = tensor
            factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor
        else:
            factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32) if kind == "e8m0" else scales
        values = codes.view(dtype).astype(np.float32) * np.repeat(factors.reshape(24, -1), width, axis=1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4 if dtype is ml_dtypes.float4_e2m1fn else codes
        out[f"{name}.codes"], out[f"{name}.scales"], out[f"{name}.values"] = packed, scales, values
    return out


def main():
    library = sys.argv[1]
    folder = sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent
    formats, made_with = {"ml_dtypes": ml_dtypes_formats, "torch": torch_formats}[library]()
    metadata = {"made_with": made_with}
    save_file(floats(formats), f"{folder}/floats_{library}.safetensors", metadata=metadata)
    if library == "ml_dtypes":
        save_file(weights(), f"{folder}/weights_ml_dtypes.safetensors", metadata=metadata)


main()
