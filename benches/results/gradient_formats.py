"""Which 8-bit format gradients lose less in: E4M3 or E5M2, a scale per row, on the gradients of a real model.

    python gradient_formats.py MODEL_FOLDER CHATS.jsonl > smollm2-gradient-formats.json

MODEL_FOLDER is a Hugging Face model with a chat template, CHATS.jsonl has a `messages` list per line. Every linear layer of the decoder
gives the gradient of its output dy [n, out]; dx = dy W is then computed from codes of dy and of W (E4M3, a scale per input, as
training stores it), and compared with f32. Runs with torch and transformers.

Trade-off: gradients of the model as it comes, not of a model in the middle of training.
"""

import collections
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOP = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(values, format, dim):
    """Values [rows, columns] through codes of `format` with one scale along `dim`."""
    scale = values.abs().amax(dim, keepdim=True).clamp_min(1e-30) / TOP[format]
    return (values / scale).to(format).float() * scale


def compare(found, expected):
    found, expected = found.flatten().double(), expected.flatten().double()
    cosine = torch.dot(found, expected) / (found.norm() * expected.norm()).clamp_min(1e-300)
    return cosine.item(), (found.norm() / expected.norm()).item()


def main(model_folder, chats):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device)
    ids = []
    for line in open(chats):
        ids += tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=False)
        if len(ids) >= 2048:
            break
    ids = torch.tensor([ids[:2048]], device=device)

    gradients = {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_full_backward_hook(
                lambda module, _, dy, name=name: gradients.__setitem__(name, (module.weight.detach(), dy[0][0].detach()))
            )
    model(ids, labels=ids).loss.backward()

    found = collections.defaultdict(list)
    for name, (weight, dy) in gradients.items():
        exact = dy @ weight
        coded_weight = rounded(weight, torch.float8_e4m3fn, 0)
        for label, format in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
            coded = rounded(dy, format, 1)
            zeros = ((coded == 0) & (dy != 0)).double().mean().item()
            alone, norm_alone = compare(coded @ weight, exact)
            both, norm_both = compare(coded @ coded_weight, exact)
            found[name.split(".")[-1], label].append((alone, both, norm_both, zeros))
    report = [
        {
            "projection": projection,
            "gradient": label,
            "layers": len(values),
            "cosine_lowest": min(v[0] for v in values),
            "cosine_mean": sum(v[0] for v in values) / len(values),
            "cosine_with_e4m3_weight_lowest": min(v[1] for v in values),
            "cosine_with_e4m3_weight_mean": sum(v[1] for v in values) / len(values),
            "norm_ratio_furthest": max((v[2] for v in values), key=lambda ratio: abs(ratio - 1)),
            "became_zero": sum(v[3] for v in values) / len(values),
        }
        for (projection, label), values in sorted(found.items())
    ]
    print(json.dumps({"tokens": ids.shape[1], "torch": torch.__version__, "rows": report}, indent=1))


main(*sys.argv[1:])
