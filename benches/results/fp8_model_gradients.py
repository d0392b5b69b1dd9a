"""How far gradients of a real model turn when its linear modules multiply E4M3 with a scale per row: PyTorch alone, none of our code.

    python fp8_model_gradients.py MODEL_DIR TEXT OUT.json

Four documents of TEXT as in tests/golden/make_model_gradients.py. The expected gradients are those of the model in f32. Compared with them:
the model in bf16, and the model in f32 whose projections round both operands of `y = x W^T` and of `dx = dy W` to E4M3, each row (over the
inner axis) with its own scale; `dW` is of the exact operands, as ours. "folded": the backward multiplies with the codes of the forward and
puts the scales of the rows of W into dy first, as ours; "two scalings": W is rounded again with scales along the other axis.
"""

import json
import sys

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

CUTS = [0, 300, 1100, 1250, 2048]


def rounded(rows):
    """E4M3 with a scale per row: values and scales."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (rows / scale).to(torch.float8_e4m3fn).to(rows.dtype), scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, folded):
        ctx.save_for_backward(x, weight)
        ctx.folded = folded
        (x8, sx), (w8, sw) = rounded(x), rounded(weight)
        return (x8 * sx) @ (w8 * sw).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.folded:
            w8, sw = rounded(weight)
            dy8, sy = rounded(dy * sw.t())
            dx = (dy8 * sy) @ w8
        else:
            (dy8, sy), (w8, sw) = rounded(dy), rounded(weight.t().contiguous())
            dx = (dy8 * sy) @ (w8 * sw).t()
        return dx, dy.flatten(0, -2).t() @ x.flatten(0, -2), None


def gradients(folder, documents, dtype=torch.float32, folded=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").cuda()
    if folded is not None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                module.forward = lambda x, weight=module.weight: Product.apply(x, weight, folded)
    targets = sum(document.shape[1] - 1 for document in documents)
    sums, loss = {}, 0.0
    for document in documents:
        logits = model(document).logits[0, :-1].float()
        part = torch.nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum") / targets
        part.backward()
        loss += part.item()
        for name, value in model.named_parameters():
            sums[name] = sums.get(name, 0) + value.grad.float()
            value.grad = None
    return loss, sums


def compare(expected, found):
    def one(name):
        a, b = expected[name].double().flatten(), found[name].double().flatten()
        return dict(name=name, cosine=(a @ b / (a.norm() * b.norm())).item(), norm_ratio=(b.norm() / a.norm()).item())

    all_of = sorted((one(name) for name in expected), key=lambda each: each["cosine"])
    return dict(
        tensors=len(all_of),
        least_cosine=all_of[0]["cosine"],
        mean_cosine=sum(each["cosine"] for each in all_of) / len(all_of),
        norms_within=max(abs(each["norm_ratio"] - 1) for each in all_of),
        below_0_95=sum(each["cosine"] < 0.95 for each in all_of),
        furthest=all_of[:8],
    )


def main():
    folder, text, out = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    ids = tokenizer.encode(open(text, encoding="utf-8").read(), add_special_tokens=False).ids[: CUTS[-1]]
    documents = [torch.tensor([ids[first:end]], device="cuda") for first, end in zip(CUTS, CUTS[1:])]
    loss, expected = gradients(folder, documents)
    results = dict(made_with=f"torch {torch.__version__}", loss_f32=loss)
    arms = [("bf16", dict(dtype=torch.bfloat16)), ("fp8, folded", dict(folded=True)), ("fp8, two scalings", dict(folded=False))]
    for name, settings in arms:
        loss, found = gradients(folder, documents, **settings)
        results[name] = dict(loss=loss, **compare(expected, found))
        print(name, {key: value for key, value in results[name].items() if key != "furthest"})
        print([(each["name"], round(each["cosine"], 4), round(each["norm_ratio"], 3)) for each in results[name]["furthest"]])
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
