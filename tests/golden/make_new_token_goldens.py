"""Compute the golden files of adapters with new tokens, and the adapters: what transformers and PEFT make of them.

    python make_new_token_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

Four tokens are added to the tokenizer of 262. The base has rows for two of them, so its tables grow from 264 to 266 rows, as
`resize_token_embeddings` grows them. README.md describes each file.
"""

import json
import shutil

import torch
from make_llama_goldens import adapter_gradients, forward_tensors, loss_of, maker_from_arguments, random_ids
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from transformers import AutoTokenizer

TOKENS = ["<tool_call>", "</tool_call>", "two words", "<|tool|>"]
CASES = {"tiny-llama-new": ("tiny-llama", 341), "tiny-llama-tied-new": ("tiny-llama-tied", 342)}


def grown(maker, base):
    """The base with rows for the new tokens, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(maker.fixtures / base), maker.base(base)
    plain = [AddedToken(token, normalized=False) for token in TOKENS[:-1]]
    assert tokenizer.add_tokens(plain) == 3 and tokenizer.add_tokens([TOKENS[-1]], special_tokens=True) == 1
    model.resize_token_embeddings(len(tokenizer))
    return tokenizer, model


@torch.no_grad()
def make_adapter(maker, name, base, seed):
    tokenizer, model = grown(maker, base)
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    assert ids == [262, 263, 264, 265]
    rows = ids if model.config.tie_word_embeddings else {"embed_tokens": ids, "lm_head": ids}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", trainable_token_indices=rows)
    start = {key: model.get_parameter(key)[264:].clone() for key in ["model.embed_tokens.weight", "lm_head.weight"]}
    adapted, generator = get_peft_model(model, config), torch.Generator().manual_seed(seed)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key or "trainable_tokens_delta" in key:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    folder = maker.fixtures / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # an empty model card
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    settings["target_modules"].sort()  # a set: its order differs from run to run
    path.write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*"):
        path.chmod(0o644)
    return {f"start.{key}": value for key, value in start.items()}


def main():
    maker = maker_from_arguments("make_new_token_goldens.py", __doc__)
    for name, (base, seed) in CASES.items():
        start = make_adapter(maker, name, base, seed)
        tokenizer, model = grown(maker, base)
        assert len(AutoTokenizer.from_pretrained(maker.fixtures / name)) == len(tokenizer) == 266
        model = PeftModel.from_pretrained(model, maker.fixtures / name, is_trainable=True).eval()
        input_ids = random_ids(seed)
        input_ids[:, [0, 20, 21, 40]] = torch.arange(262, 266)
        loss_of(model, input_ids)[1].backward()
        maker.save(name, {**forward_tensors(model, input_ids), **adapter_gradients(model), **start})


if __name__ == "__main__":
    main()
