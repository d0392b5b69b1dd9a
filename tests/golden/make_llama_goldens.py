"""Compute the golden files of the whole-system tests: what transformers, PEFT, torch and bitsandbytes compute.

    python make_llama_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

make_family_goldens.py computes those of the other model families with the helpers of this script.
Everything is f32 on one CPU thread with eager attention. README.md describes each file.
"""

import argparse
import json
import os
import pathlib
import platform

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import bitsandbytes
import numpy
import peft
import safetensors
import tokenizers
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging

ROWS, TOKENS = 2, 48
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NF4_SAMPLES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]

# Every way to scale rope that Llama checkpoints use, beyond the four that the fixtures cover.
ROPE_CASES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=2.5),
    "llama3-1": dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4096),
    "yarn-attention-factor": dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, attention_factor=1.2, original_max_position_embeddings=4096
    ),
    "yarn-mscale": dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=40.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        original_max_position_embeddings=4096,
    ),
    "yarn-betas-no-truncate": dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=32.0,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
}


class Maker:
    def __init__(self, script, fixtures, out, only):
        self.script, self.fixtures, self.out, self.only = script, fixtures, out, only

    def save(self, name, tensors):
        """One metadata key, because the order of several is not fixed in the file."""
        libraries = [torch, transformers, peft, bitsandbytes, tokenizers, safetensors, numpy]
        versions = [f"{library.__name__} {library.__version__.split('+')[0]}" for library in libraries]
        made_with = ", ".join([self.script, f"python {platform.python_version()}", *versions])
        path = self.out / f"{name}.safetensors"
        tensors = {key: value.detach().contiguous().clone() for key, value in sorted(tensors.items())}
        save_file(tensors, path, metadata={"made_with": made_with})
        path.chmod(0o644)

    def save_json(self, name, cases):
        """An object of cases, one case a line."""
        lines = [f"{json.dumps(key)}: {json.dumps(case, ensure_ascii=False)}" for key, case in cases.items()]
        (self.out / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def base(self, name):
        folder = self.fixtures / name
        has_vision = "vision_config" in json.loads((folder / "config.json").read_text())
        auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def adapted(self, name, base, trainable=True):
        return PeftModel.from_pretrained(base, self.fixtures / name, is_trainable=trainable).eval()


def random_ids(seed, vocabulary=262, shape=(ROWS, TOKENS)):
    """By default the 262 ids of the tokenizer: two rows of the embedding get no gradient from the input side."""
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model, input_ids):
    """Mean cross entropy of every next token, computed by the library and checked against its definition."""
    output = model(input_ids, labels=input_ids)
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, input_ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    return output.logits, output.loss


def forward_tensors(model, input_ids):
    with torch.no_grad():
        logits, loss = loss_of(model, input_ids)
    return dict(input_ids=input_ids, logits=logits, loss=loss.reshape(1))


def name_of_saved(key):
    """The name that PEFT saves a parameter of its model under."""
    key = key.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    key = key.replace(".trainable_tokens_delta.default", ".trainable_tokens_delta")
    return key.replace(".modules_to_save", "").replace(".default.", ".")


def alone(name):
    """The name of a tensor of a text model without the rest of its checkpoint."""
    return name.replace("model.language_model.", "model.")


def adapter_gradients(model):
    """Gradients under the names that PEFT gives the parameters in adapter_model.safetensors."""
    trained = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    names = {name_of_saved(key): parameter for key, parameter in trained}
    assert set(names) == set(get_peft_model_state_dict(model))
    return {f"grad.{alone(key)}": parameter.grad for key, parameter in names.items()}


def make_logits(maker):
    for seed, name in enumerate(["tiny-llama", "tiny-llama-tied", "tiny-llama-sharded", "tiny-llama-yarn"], start=301):
        model = maker.base(name)
        maker.save(name, forward_tensors(model, random_ids(seed, min(262, model.config.vocab_size))))


def make_lora(maker, name, base, seed):
    model, input_ids = maker.adapted(name, maker.base(base)), random_ids(seed)
    loss_of(model, input_ids)[1].backward()
    maker.save(name, {**forward_tensors(model, input_ids), **adapter_gradients(model)})


def make_lora_gradients(maker):
    adapters = [
        ("tiny-llama-lora", "tiny-llama"),
        ("tiny-llama-rslora", "tiny-llama"),
        ("tiny-llama-tied-lora", "tiny-llama-tied"),
        ("tiny-llama-patterns", "tiny-llama"),
        ("tiny-llama-layers", "tiny-llama-tied"),
        ("tiny-llama-dora", "tiny-llama"),
        ("tiny-llama-rows", "tiny-llama"),
        ("tiny-llama-tied-rows", "tiny-llama-tied"),
    ]
    for seed, (name, base) in enumerate(adapters, start=311):
        make_lora(maker, name, base, seed)


# The block that holds the experts on disk, and their matrices, where they are not those of Qwen.
EXPERTS = {"mixtral": ("block_sparse_moe", ["w1", "w3", "w2"]), "lfm2_moe": ("feed_forward", ["w1", "w3", "w2"])}


def gradients_on_disk(model):
    """Gradients under the names that checkpoints have: transformers 5 holds all experts of a layer in one parameter, and saves them one by
    one. Those of gpt-oss are one tensor on disk too, transposed and with gate and up in turn: here they have the names and the shapes that the
    experts of other models have."""
    others = ("vision_tower.", "audio_tower.", "multi_modal_projector.", "visual.", "embed_vision.", "embed_audio.")
    others = tuple(f"model.{part}" for part in others)
    of_text = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(others)]
    gradients = {alone(name): parameter.grad for name, parameter in of_text}
    gradients.pop("model.embed_tokens_per_layer.weight", None)  # we never train it
    if model.config.model_type == "olmo_hybrid":
        norms = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
        for name in [name for name in gradients if name.split(".")[-2] in norms]:
            before, _, last = name.removesuffix(".weight").rpartition(".")
            if f"{before}.linear_attn.A_log" in gradients:
                gradients[f"{before}.{norms[last]}.weight"] = gradients.pop(name)
        for name in [name for name in gradients if "conv1d" in name]:
            of = {part: name.replace("conv1d.weight", f"{part}_proj.weight") for part in "qkv"}
            rows = [len(gradients[of[part]]) for part in "qkv"]
            parts = gradients.pop(name).split(rows)
            gradients |= {name.replace("conv1d", f"{part}_conv1d"): rows for part, rows in zip("qkv", parts)}
    block, names = EXPERTS.get(model.config.model_type, ("mlp", PROJECTIONS[4:]))
    tensors = {}
    for name, gradient in gradients.items():
        path, fused, matrix = name.replace(f".{block}.", ".mlp.").partition(".experts.")
        if not fused:
            tensors[name.replace(".mlp.gate.", f".{block}.gate.")] = gradient
            continue
        is_gate_up, kind = matrix.startswith("gate_up_proj"), "bias" if matrix.endswith("bias") else "weight"
        if model.config.model_type == "gpt_oss":
            gradient = gradient if kind == "bias" else gradient.transpose(1, 2)
            parts = [gradient[:, 0::2], gradient[:, 1::2]] if is_gate_up else [gradient]
        else:
            parts = gradient.chunk(2, dim=1) if is_gate_up else [gradient]
        for part, projection in zip(parts, names if is_gate_up else names[2:]):
            for expert, values in enumerate(part):
                tensors[f"{path.replace('.mlp', f'.{block}')}.experts.{expert}.{projection}.{kind}"] = values
    return tensors


def make_full_gradients(maker, name, seed):
    model, input_ids = maker.base(name), random_ids(seed)
    loss = loss_of(model, input_ids)[1]
    loss.backward()
    gradients = {f"grad.{name}": gradient for name, gradient in gradients_on_disk(model).items()}
    maker.save(f"{name}-full-gradients", dict(input_ids=input_ids, loss=loss.reshape(1), **gradients))


@torch.no_grad()
def make_packed(maker, name, seed):
    """Two documents, each alone. Packed into one sequence they must give the same logits.

    The packed loss is the mean over the loss tokens of both. A pass of transformers over the packed sequence would be no reference: its convolutions
    and recurrent states run across documents."""
    model, ids = maker.base(name), random_ids(seed)[0]
    documents, tensors, loss_sum, count = [ids[:19], ids[19:]], {}, 0.0, 0
    for index, document in enumerate(documents):
        for key, value in forward_tensors(model, document[None]).items():
            tensors[f"doc{index}.{key}"] = value
        loss_sum += tensors[f"doc{index}.loss"] * (len(document) - 1)
        count += len(document) - 1
    tensors["packed.input_ids"] = ids[None]
    tensors["packed.position_ids"] = torch.cat([torch.arange(len(document)) for document in documents])[None]
    tensors["packed.cu_seqlens"] = torch.tensor([0, 19, TOKENS])
    tensors["packed.loss"] = loss_sum / count
    maker.save(f"{name}-packed", tensors)


def train_three_steps(model, input_ids):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, input_ids)[1]
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        losses.append(loss.detach())
    assert max(norms) > 1.0, "the clip must act"
    adapter = {f"adapter.{key}": value for key, value in get_peft_model_state_dict(model).items()}
    return dict(input_ids=input_ids, losses=torch.stack(losses), grad_norms=torch.stack(norms), **adapter)


@torch.no_grad()
def quantize_and_restore(model):
    """Replace the seven projections by what NF4 with double quantization leaves of them; returns a sample of the bytes.

    The matrix is handed over flat. Blocks run through the flat tensor (on CUDA too), but the CPU kernel of bitsandbytes
    0.50.2 looks up the wrong scales for a 2-D tensor whose rows are no multiple of the block: down_proj here, 96 wide.
    """
    sample = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] not in PROJECTIONS:
            continue
        packed, state = quantize_4bit(module.weight.flatten(), blocksize=64, compress_statistics=True, quant_type="nf4")
        restored = dequantize_4bit(packed, state)
        check_restored(packed, state, restored)
        module.weight.copy_(restored.reshape(module.weight.shape))
        if name in NF4_SAMPLES:
            sample[f"nf4.{name}.weight"] = packed.flatten()
            sample[f"nf4.{name}.weight.absmax"] = state.absmax
            sample[f"nf4.{name}.weight.nested_absmax"] = state.state2.absmax
            sample[f"nf4.{name}.weight.offset"] = state.offset.reshape(1)
    return sample


def check_restored(packed, state, restored):
    """The CPU kernel of bitsandbytes must do the documented arithmetic, in f32, with nothing rounded between."""
    high_first = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
    nested = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: state.absmax.numel()]
    absmax = state.state2.code[state.absmax.long()] * nested + state.offset
    expected = state.code[high_first] * absmax.repeat_interleave(state.blocksize)
    torch.testing.assert_close(restored.flatten(), expected, rtol=3e-7, atol=0.0)


def make_training(maker):
    input_ids = random_ids(301)
    model = maker.adapted("tiny-llama-lora", maker.base("tiny-llama"))
    maker.save("tiny-llama-lora-train", train_three_steps(model, input_ids))

    model = maker.adapted("tiny-llama-dora", maker.base("tiny-llama"))
    maker.save("tiny-llama-dora-train", train_three_steps(model, input_ids))

    base = maker.base("tiny-llama")
    quantize_and_restore(base)
    maker.save("tiny-llama-qlora-train", train_three_steps(maker.adapted("tiny-llama-lora", base), input_ids))


def make_nf4(maker):
    model = maker.base("tiny-llama")
    sample = quantize_and_restore(model)
    maker.save("tiny-llama-nf4", {**forward_tensors(model, random_ids(301)), **sample})


@torch.no_grad()
def make_generation(maker, name, prompts):
    """Greedy generation from `prompts`, each of ids [1, T]."""
    model, tensors = maker.base(name), {}
    for index, input_ids in enumerate(prompts):
        mask = torch.ones_like(input_ids)
        output = model.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=16)
        new_ids = output[:, input_ids.shape[1] :]
        # A near tie would make the golden a test of rounding; a stop token would make it shorter than it says.
        values, ids = model(output).logits[0, input_ids.shape[1] - 1 : -1].topk(2)
        gap = (values[:, 0] - values[:, 1]).min()
        assert gap > 0.02 and new_ids.shape == (1, 16), (name, index, gap, new_ids)
        assert torch.equal(ids[:, 0], new_ids[0]), (name, index, "the pass without a cache disagrees")
        tensors[f"prompt{index}.input_ids"] = input_ids
        tensors[f"prompt{index}.new_ids"] = new_ids
    maker.save(f"{name}-generation", tensors)


def make_text_generation(maker):
    tokenizer = AutoTokenizer.from_pretrained(maker.fixtures / "tiny-llama")
    prompts = ["Clay and ash", "<|user|>3+4?<|end|><|assistant|>"]
    make_generation(maker, "tiny-llama", [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts])


def make_loss_weights(maker):
    """Cross entropy with a weight per token, in pieces. Targets of -100 do not count, whatever their weight."""
    generator = torch.Generator().manual_seed(331)
    hidden = torch.randn(12, 8, generator=generator).requires_grad_()
    head = (0.5 * torch.randn(20, 8, generator=generator)).requires_grad_()
    targets = torch.randint(0, 20, (12,), generator=generator)
    weights = 0.25 + 1.5 * torch.rand(12, generator=generator)
    targets[[3, 11]], weights[6] = -100, 0.0
    losses = torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none")
    loss = (weights * losses).sum()
    loss.backward()
    tensors = dict(hidden=hidden, head=head, targets=targets, weights=weights, target_log_probs=-losses)
    gradients = {"grad.hidden": hidden.grad, "grad.head": head.grad}
    maker.save("loss-weights", {**tensors, "loss": loss.reshape(1), **gradients})


def make_rope_tables(maker):
    tensors = {}
    for name, rope in ROPE_CASES.items():
        config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
        rotary = LlamaRotaryEmbedding(config)
        tensors[f"{name}.inv_freq"] = rotary.inv_freq
        tensors[f"{name}.attention_scaling"] = torch.tensor([rotary.attention_scaling], dtype=torch.float32)
    maker.save("rope-tables", tensors)
    maker.save_json("rope-tables", {name: dict(head_dim=64, rope_parameters=rope) for name, rope in ROPE_CASES.items()})


def make_tokenizer(maker):
    tokenizer = AutoTokenizer.from_pretrained(maker.fixtures / "tiny-llama")
    texts = ["", "A brick.", "été 火 🔥", "two\nlines\t ", "<|user|>hi<|end|>"]
    lines = (maker.fixtures / "data" / "chat-tiny.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    chats = [json.loads(line)["messages"] for line in lines]
    render = tokenizer.apply_chat_template
    cases = {}
    for index, text in enumerate(texts):
        bare = tokenizer.encode(text, add_special_tokens=False)
        cases[f"text{index}"] = dict(text=text, ids=tokenizer.encode(text), bare_ids=bare)
    for index, chat in enumerate(chats):
        cases[f"chat{index}"] = dict(
            messages=chat,
            rendered=render(chat, tokenize=False),
            ids=render(chat, return_dict=False),
            prompt_rendered=render(chat[:-1], tokenize=False, add_generation_prompt=True),
        )
    maker.save_json("tiny-llama-tokenizer", cases)


def maker_from_arguments(script, documentation, names=()):
    """With `names`, those of models, there is an option to compute only the golden files of some."""
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=here)
    parser.add_argument("--fixtures", type=pathlib.Path, default=here.parent / "fixtures")
    if names:
        parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Maker(script, arguments.fixtures, arguments.out, arguments.only if names else names)


def main():
    maker = maker_from_arguments("make_llama_goldens.py", __doc__)
    make_logits(maker)
    make_lora_gradients(maker)
    make_full_gradients(maker, "tiny-llama", 301)
    make_packed(maker, "tiny-llama", 321)
    make_training(maker)
    make_nf4(maker)
    make_text_generation(maker)
    make_loss_weights(maker)
    make_rope_tables(maker)
    make_tokenizer(maker)


if __name__ == "__main__":
    main()
