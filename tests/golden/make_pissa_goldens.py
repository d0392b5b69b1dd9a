"""Compute the golden files of PiSSA: what PEFT takes out of a base, and what its converted adapter computes on the original one.

    python make_pissa_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

The adapter is moved away from its start by noise and saved with PEFT's conversion, which doubles its rank. README.md describes each file.
"""

import json
import pathlib
import shutil
import tempfile

import torch
from make_llama_goldens import adapter_gradients, forward_tensors, loss_of, maker_from_arguments, random_ids
from peft import LoraConfig, get_peft_model

NAME, BASE, SEED = "tiny-llama-pissa", "tiny-llama", 351
SAMPLES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@torch.no_grad()
def main():
    maker = maker_from_arguments("make_pissa_goldens.py", __doc__)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights="pissa")
    model = get_peft_model(maker.base(BASE), config).eval()
    tensors = {}
    for name in SAMPLES:
        module = model.get_submodule(f"base_model.model.{name}")
        product = module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
        tensors[f"principal.{name}.weight"] = product
    input_ids = random_ids(SEED)
    start = forward_tensors(model, input_ids)
    torch.testing.assert_close(start["logits"], maker.base(BASE)(input_ids).logits, rtol=1e-4, atol=1e-4)

    folder = maker.fixtures / NAME
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as initial:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(initial)
        model.peft_config["default"].init_lora_weights = "pissa"
        generator = torch.Generator().manual_seed(SEED)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.peft_config["default"].base_model_name_or_path = BASE
        model.save_pretrained(folder, path_initial_model_for_weight_conversion=initial)
    (folder / "README.md").unlink()  # an empty model card
    path = pathlib.Path(folder / "adapter_config.json")
    settings = json.loads(path.read_text())
    assert (settings["r"], settings["lora_alpha"], settings["init_lora_weights"]) == (8, 16, True)
    settings["target_modules"].sort()  # a set: its order differs from run to run
    path.write_text(json.dumps(settings, indent=2) + "\n")
    for file in folder.glob("*"):
        file.chmod(0o644)
    moved = forward_tensors(model, input_ids)
    with torch.enable_grad():
        converted = maker.adapted(NAME, maker.base(BASE))
        loss_of(converted, input_ids)[1].backward()
        tensors.update(adapter_gradients(converted))
    torch.testing.assert_close(converted(input_ids).logits, moved["logits"], rtol=2e-4, atol=2e-4)
    maker.save(NAME, {**tensors, **moved, "start.logits": start["logits"]})


if __name__ == "__main__":
    main()
