"""Compute the golden files of the auxiliary loss that balances the experts of a mixture: transformers with `output_router_logits`.

    python make_router_loss_goldens.py [--out DIR] [--fixtures DIR]     (defaults: this folder, ../fixtures)

The helpers and the settings (f32, one CPU thread, eager attention) are those of make_llama_goldens.py.
"""

import torch
from make_family_goldens import check_routing
from make_llama_goldens import TOKENS, adapter_gradients, gradients_on_disk, maker_from_arguments, random_ids

# Large enough to change gradients by more than a tenth.
COEFFICIENT = 2.0

# Base, adapter, seed of the ids, and the tokens of each sequence; the rest of a sequence is padding.
CASES = {
    "tiny-qwen3-moe-router-loss": ("tiny-qwen3-moe", None, 528, [TOKENS, TOKENS]),
    "tiny-gpt-oss-router-loss": ("tiny-gpt-oss", None, 651, [TOKENS, 29]),
    "tiny-mixtral-lora-router-loss": ("tiny-mixtral", "tiny-mixtral-lora", 520, [31, TOKENS]),
}


def run(model, input_ids, attention_mask, coefficient):
    """Cross entropy, auxiliary loss, and the gradients of the first plus the second times the coefficient."""
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = coefficient
    model.zero_grad()
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    output = model(input_ids, attention_mask=attention_mask, labels=labels, output_router_logits=True)
    output.loss.backward()
    loss = output.loss - coefficient * output.aux_loss
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    return loss, output.aux_loss


def gradients_of(model, adapter):
    if adapter:
        return adapter_gradients(model)
    return {f"grad.{name}": gradient for name, gradient in gradients_on_disk(model).items()}


def check_effect(plain, gradients):
    """The auxiliary loss matters to every router, or where those are frozen to the adapters of attention."""
    routers = [name for name in gradients if name.endswith((".gate.weight", ".router.weight"))]
    others = [name for name in gradients if "q_proj" in name and not name.endswith("bias") and "lora_A" not in name]
    for name in routers or others:
        assert (gradients[name] - plain[name]).norm() > 0.1 * plain[name].norm(), name


def make(maker, name, base, adapter, seed, lengths):
    model, input_ids = maker.base(base), random_ids(seed)
    if adapter:
        model = maker.adapted(adapter, model)
    check_routing(model, input_ids)
    attention_mask = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).long()
    input_ids = input_ids.masked_fill(attention_mask == 0, model.config.pad_token_id)
    run(model, input_ids, attention_mask, 0.0)
    plain = {key: value.clone() for key, value in gradients_of(model, adapter).items()}
    loss, aux_loss = run(model, input_ids, attention_mask, COEFFICIENT)
    gradients = gradients_of(model, adapter)
    check_effect(plain, gradients)
    numbers = dict(loss=loss, aux_loss=aux_loss, coefficient=torch.tensor(COEFFICIENT))
    numbers = {key: value.reshape(1) for key, value in numbers.items()}
    maker.save(name, {**numbers, "input_ids": input_ids, "lengths": torch.tensor(lengths), **gradients})


def main():
    maker = maker_from_arguments("make_router_loss_goldens.py", __doc__)
    for name, case in CASES.items():
        make(maker, name, *case)


if __name__ == "__main__":
    main()
