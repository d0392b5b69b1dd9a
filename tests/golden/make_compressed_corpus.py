"""Write the inputs of the fuzz targets `compressed` and `quantized` of firebrick-model, valid ones and damaged ones.

    python make_compressed_corpus.py [--corpus DIR]     (default: ../../crates/model/fuzz/corpus)

The compressed files follow docs/compressed-checkpoints.md and are packed by other libraries than ours: `pip install xxhash lz4 zstandard`.
The quantized ones are small files of the parts that bitsandbytes, DeepSeek and compressed-tensors store.
"""

import argparse
import json
import pathlib
import struct

import lz4.block
import xxhash
import zstandard

CHUNK = 4 << 20


def safetensors_file(tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def pack(codec, plane):
    packed = lz4.block.compress(plane, store_size=False) if codec == 2 else zstandard.compress(plane, 3)
    return packed if len(packed) < len(plane) else plane


def compressed(codec, tensors, change_block=lambda block: block, **changes):
    plain = safetensors_file(tensors)
    prefix = plain[: 8 + struct.unpack("<Q", plain[:8])[0]]
    table, blocks = b"", b""
    for dtype, _, content in tensors.values():
        planes = {"BF16": 2, "F16": 2, "F32": 4}.get(dtype, 1)
        for start in range(0, len(content), CHUNK):
            chunk = content[start : start + CHUNK]
            for plane in range(planes):
                raw = chunk[plane::planes]
                block = change_block(pack(codec, raw))
                table += struct.pack("<QII", xxhash.xxh3_64_intdigest(block), len(block), len(raw))
                blocks += block
    fields = dict(version=1, codec=codec, prefix=len(prefix), data=len(plain) - len(prefix), blocks=len(table) // 16)
    fields.update(changes)
    head = b"SAFETPLN" + struct.pack("<IIQQQ", *fields.values())
    digest = xxhash.xxh3_64_intdigest(head + prefix + table)
    return head + struct.pack("<Q", digest) + prefix + table + blocks


def compressed_inputs():
    weights = {"a": ("BF16", [64, 4], b"\x12\x3f\x99\x3f" * 128), "b": ("F32", [3], bytes(12)), "c": ("U8", [5], b"abcde")}
    good = {codec: compressed(number, weights) for codec, number in [("zstd", 1), ("lz4", 2)]}
    yield from (("good_" + codec, content) for codec, content in good.items())
    yield "no_tensors", compressed(1, {})
    yield "damaged_block", good["lz4"][:-3] + b"xyz"
    yield "cut", good["zstd"][:-1]
    yield "longer", good["zstd"] + b"0"
    yield "bomb", compressed(1, weights, data=1 << 50)
    yield "other_data_length", compressed(1, weights, data=17)
    yield "many_blocks", compressed(2, weights, blocks=1 << 60)
    yield "long_prefix", compressed(2, weights, prefix=1 << 40)
    yield "other_version", compressed(2, weights, version=9)
    # Blocks with right checksums that hold more, or less, than their tensor.
    yield "block_too_long", compressed(1, weights, lambda block: zstandard.compress(bytes(1 << 20), 3))
    yield "block_too_short", compressed(2, weights, lambda block: lz4.block.compress(bytes(3), store_size=False))
    yield "block_of_noise", compressed(2, weights, lambda block: b"\xf0\xff\xff\x10")
    yield "plain_zstd", zstandard.compress(safetensors_file(weights))
    yield "empty", b""


def bnb(kind="nf4", levels=None, **changes):
    levels = levels or [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64], **changes}
    text = json.dumps(state).encode()
    return {
        "a.weight": ("U8", [64, 1], bytes(range(64))),
        "a.weight.absmax": ("F32", [2], struct.pack("<2f", 0.5, 0.25)),
        "a.weight.quant_map": ("F32", [16], struct.pack("<16f", *levels)),
        f"a.weight.quant_state.bitsandbytes__{kind}": ("U8", [len(text)], text),
    }


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


def quantized_inputs():
    twelfths = [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]
    fp8 = {"a.weight": ("F8_E4M3", [3, 130], bytes(range(130)) * 3), "a.weight_scale_inv": ("F32", [1, 2], bytes(8))}
    nvfp4 = {
        "a.weight_packed": ("U8", [2, 16], bytes(range(32))),
        "a.weight_scale": ("F8_E4M3", [2, 2], b"\x30\x31\x7f\xb0"),
        "a.weight_global_scale": ("F32", [1], struct.pack("<f", 100.0)),
        "a.input_global_scale": ("F32", [1], struct.pack("<f", 3.0)),
    }
    power = nvfp4 | {"a.weight_global_scale": ("F32", [1], struct.pack("<f", 64.0))}
    cases = {
        "nf4": bnb(),
        "fp4": bnb("fp4", [level / 12 for level in twelfths]),
        "nf4_other_levels": bnb(levels=[0.0] * 16),
        "nf4_no_absmax": without(bnb(), "a.weight.absmax"),
        "nf4_no_codes": without(bnb(), "a.weight"),
        "nf4_shape_too_large": bnb(shape=[1 << 62, 1 << 62]),
        "nf4_shape_of_zero": bnb(shape=[0, 64]),
        "nf4_not_a_matrix": bnb(shape=[128]),
        "nf4_other_block": bnb(blocksize=128),
        "nf4_block_of_zero": bnb(blocksize=0),
        "other_type": bnb("int4"),
        "fp8": fp8,
        "fp8_scales_of_another_shape": fp8 | {"a.weight_scale_inv": ("F32", [2, 1], bytes(8))},
        "fp8_no_codes": without(fp8, "a.weight"),
        "nvfp4": nvfp4,
        "nvfp4_power_of_two": power,
        "nvfp4_scale_of_zero": nvfp4 | {"a.weight_global_scale": ("F32", [1], bytes(4))},
        "nvfp4_as_plain_too": nvfp4 | {"a.weight": ("F32", [1], bytes(4))},
    }
    for name, tensors in cases.items():
        yield name, safetensors_file(tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = pathlib.Path(__file__).parent
    parser.add_argument("--corpus", type=pathlib.Path, default=here / "../../crates/model/fuzz/corpus")
    corpus = parser.parse_args().corpus
    for target, inputs in [("compressed", compressed_inputs()), ("quantized", quantized_inputs())]:
        (corpus / target).mkdir(exist_ok=True)
        for name, content in inputs:
            (corpus / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
