"""Write the inputs of the fuzz target `quantized` of firebrick-model, valid ones and damaged ones.

    python make_quantized_corpus.py [--corpus DIR]     (default: ../../crates/model/fuzz/corpus/quantized)

They are small files of the parts that bitsandbytes, DeepSeek and compressed-tensors store.
"""

import argparse
import json
import pathlib
import struct


def safetensors_file(tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


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
    parser.add_argument("--corpus", type=pathlib.Path, default=here / "../../crates/model/fuzz/corpus/quantized")
    corpus = parser.parse_args().corpus
    for name, content in quantized_inputs():
        (corpus / name).write_bytes(content)


if __name__ == "__main__":
    main()
