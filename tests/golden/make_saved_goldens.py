"""Load the folders that Firebrick wrote with transformers and PEFT, and keep what they compute.

    python make_saved_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

`UPDATE_GOLDEN=1 cargo test -p firebrick-tests --test numbers saved` writes the folders first. The helpers and the settings (f32, one CPU
thread, eager attention) are those of make_llama_goldens.py.
"""

import json

import torch
from make_llama_goldens import forward_tensors, maker_from_arguments, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "kiln"}]


def chat(maker, name):
    """What a program that finds the tokenizer in the folder sends to the model, and where it stops."""
    tokenizer = AutoTokenizer.from_pretrained(maker.fixtures / name)
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    inline = json.loads((maker.fixtures / name / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    # Readers that do not know chat_template.jinja take the key.
    assert inline == (maker.fixtures / name / "chat_template.jinja").read_text(encoding="utf-8"), name
    eos = GenerationConfig.from_pretrained(maker.fixtures / name).eos_token_id
    return dict(messages=MESSAGES, rendered=rendered, ids=ids, eos_token_id=eos)


def main():
    maker = maker_from_arguments("make_saved_goldens.py", __doc__)
    adapted = maker.adapted("saved-adapter", maker.base("tiny-llama"))
    active = adapted.peft_config["default"]
    assert active.use_rslora and active.base_model_name_or_path == "tests/tiny-llama", active
    maker.save("saved-adapter", forward_tensors(adapted, random_ids(331)))
    bare = [("saved-dora", "tiny-llama"), ("saved-rows", "tiny-llama-tied"), ("saved-vl", "tiny-gemma3-vl")]
    for seed, (name, base) in enumerate(bare, start=333):
        adapted = maker.adapted(name, maker.base(base))
        assert adapted.peft_config["default"].base_model_name_or_path == f"tests/{base}", name
        maker.save(name, forward_tensors(adapted, random_ids(seed)))
    stored = AutoModelForCausalLM.from_pretrained(maker.fixtures / "saved-model", dtype="auto")
    assert stored.dtype == torch.float16 and stored.generation_config.eos_token_id[-1] == 260, stored.generation_config
    maker.save("saved-model", forward_tensors(maker.base("saved-model"), random_ids(332)))
    maker.save_json("saved-chats", {name: chat(maker, name) for name in ["saved-adapter", "saved-model"]})


if __name__ == "__main__":
    main()
