"""Keep the gradient of every parameter of a real model, for the GPU suite.

    python make_model_gradients.py MODEL_DIR TEXT OUT.safetensors

The test is `gradients_in_bf16_and_fp8_point_where_those_in_f32_point` in tests/gpu/gradients.rs, which finds the folder and the file by
FIREBRICK_TEST_MODEL and FIREBRICK_TEST_GRADIENTS. The documents are its: the first 2,048 tokens of docs/decisions.md, cut into four, each
alone here. f32, eager attention; the loss is the mean over all next tokens inside documents. The file is not kept: it has as many values
as the model.
"""

import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

CUTS = [0, 300, 1100, 1250, 2048]


def main():
    folder, text, out = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    ids = tokenizer.encode(open(text, encoding="utf-8").read(), add_special_tokens=False).ids[: CUTS[-1]]
    documents = [torch.tensor([ids[first:end]], device=device) for first, end in zip(CUTS, CUTS[1:])]
    targets = sum(document.shape[1] - 1 for document in documents)
    loss = 0.0
    for document in documents:
        logits = model(document).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum") / targets
        part.backward()
        loss += part.item()
    gradients = {f"grad.{name}": value.grad.reshape(-1).contiguous() for name, value in model.named_parameters()}
    gradients["input_ids"] = torch.tensor(ids)
    save_file(gradients, out, metadata={"made_with": f"torch {torch.__version__}", "loss": f"{loss:.6f}"})
    print(f"{len(gradients) - 1} gradients on {device}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
