"""What llama.cpp's own conversion makes of the fixtures: gguf-families.json.

usage: python make_gguf_family_goldens.py LLAMA_CPP        (needs torch, transformers, numpy)

LLAMA_CPP is a checkout of ggml-org/llama.cpp with `convert_hf_to_gguf.py`, or the one in the source archive of the PyPI package llama-cpp-python
(0.3.36). Its conversion runs with f32 and without a tokenizer. For each model the file has the changes of its config.json that let llama.cpp compute
it, the metadata that the conversion writes, and of each tensor type, shape (rows first) and a sum of its values, each times its position's
remainder by 97 plus one, so that another order gives another sum. Tensors in MXFP4 have the sum over their bytes.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
# Fixture: what its config.json says otherwise. llama.cpp has one scale of scores in Gemma, rotates three of four layers of SmolLM3, has a mixture
# in every layer of Qwen3-MoE, weights of experts that add up to one, and ends of YaRN's ramp that are whole dimensions.
# It chooses the factors of longrope by the size of its context, which is 256 tokens at least.
# Where a model has fewer layers than the fixture, they are its last ones.
MODELS = {
    "tiny-gemma": {},
    "tiny-gemma2": {"query_pre_attn_scalar": 32},
    "tiny-gemma3": {"query_pre_attn_scalar": 32},
    "tiny-gemma3-vl": {"text_config.query_pre_attn_scalar": 32},
    "tiny-gemma4": {},
    "tiny-gemma4-vl": {},
    "tiny-gemma4-dense": {},
    "tiny-gemma4-moe": {},
    "tiny-gemma4-unified-vl": {},
    "tiny-phi3": {"original_max_position_embeddings": 256, "max_position_embeddings": 512},
    "tiny-smollm3": {"no_rope_layers": [1, 1]},
    "tiny-olmo2": {},
    "tiny-olmo3": {},
    "tiny-granite": {},
    "tiny-mixtral": {},
    "tiny-qwen3-moe": {"num_hidden_layers": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "tiny-gpt-oss": {"rope_scaling.truncate": True},
    "quant-mxfp4-gpt-oss": {"rope_scaling.truncate": True},
    "tiny-llama": {},
    "tiny-llama-tied": {},
    "tiny-llama-sharded": {},
    "tiny-llama-bias": {},
    "saved-model": {},
    "tiny-qwen2": {},
    "tiny-qwen3": {},
}


def changed(folder, changes, to):
    """A copy of a fixture with a changed config.json."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[last] = value
    if config["model_type"].startswith("gemma4"):
        # The conversion asks for a key that models without experts may lack.
        text_config(config).setdefault("moe_intermediate_size", None)
    (to / "config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        if file.name != "config.json":
            (to / file.name).write_bytes(file.read_bytes())
    if "num_hidden_layers" in changes:
        weights = load_file(folder / "model.safetensors")
        first = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")) - changes["num_hidden_layers"]
        save_file({layer_name(name, first): value for name, value in weights.items() if layer_name(name, first)}, to / "model.safetensors")
    return config


def text_config(config):
    return config.get("text_config", config)


def layer_name(name, first):
    """The name of a tensor without the layers before the first; None in one of those."""
    if not name.startswith("model.layers."):
        return name
    number, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"model.layers.{int(number) - first}.{rest}" if int(number) >= first else None


def weighted_sum(values):
    return float((values.astype(np.float64).reshape(-1) * (np.arange(values.size) % 97 + 1)).sum())


def described(path, reader):
    tensors = {}
    for tensor in reader(path).tensors:
        kind, shape, values = tensor.tensor_type.name.lower(), [int(size) for size in tensor.shape[::-1]], np.asarray(tensor.data)
        parts = {tensor.name: (shape, values)}
        if "ffn_gate_up_exps" in tensor.name:
            # llama.cpp reads gate and up of experts in one tensor or in two.
            count, rows, columns = shape
            halves = values.reshape(count, 2, rows // 2, columns)
            parts = {tensor.name.replace("gate_up", name): ([count, rows // 2, columns], halves[:, at]) for at, name in enumerate(["gate", "up"])}
        tensors |= {name: [kind, shape, weighted_sum(values)] for name, (shape, values) in parts.items()}
    return tensors


def metadata_of(path, reader):
    keys = {}
    for name, field in reader(path).fields.items():
        value = field.contents()
        if not name.startswith(("GGUF.", "general.", "tokenizer.")):
            keys[name] = value
    return keys


def main():
    sys.path[:0] = [str(Path(sys.argv[1]) / "gguf-py"), sys.argv[1]]
    import conversion
    import gguf
    from conversion import ModelBase, ModelType

    goldens = {}
    for name, changes in MODELS.items():
        with tempfile.TemporaryDirectory() as work:
            folder, out = Path(work) / "model", Path(work) / "m.gguf"
            folder.mkdir()
            config = changed(HERE.parent / "fixtures" / name, changes, folder)
            # The conversion of Gemma 3 leaves out rows of the embedding without a token.
            vocab = {str(id): id for id in range(text_config(config)["vocab_size"])}
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
            hparams = ModelBase.load_hparams(folder, False)
            architecture = conversion.get_model_architecture(hparams, ModelType.TEXT)
            kind = conversion.get_model_class(architecture)
            kind.set_vocab = lambda self: None
            model = kind(dir_model=folder, ftype=gguf.LlamaFileType.ALL_F32, fname_out=out, is_big_endian=False, use_temp_file=False, eager=True, model_name="m")
            model.write()
            goldens[name] = {"changes": changes, "metadata": metadata_of(out, gguf.GGUFReader), "tensors": described(out, gguf.GGUFReader)}
            print(name, len(goldens[name]["tensors"]), goldens[name]["metadata"], flush=True)
    text = json.dumps(goldens, indent=None, separators=(",", ":")).replace('},"', '},\n"').replace('],"', '],\n"')
    (HERE / "gguf-families.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
