"""Compute the goldens of preference training: what TRL's DPOTrainer and ORPOTrainer compute from tiny-llama and its adapter.

    python make_preference_goldens.py [--out DIR] [--fixtures DIR]     (needs trl in addition to requirements.txt)

The reference of DPO is the base without its adapter. The adapter's B is not zero, so that rewards are not. README.md describes each file.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import tempfile

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from make_llama_goldens import adapter_gradients, maker_from_arguments

# Tokens of prompt, chosen and rejected answer of each pair.
LENGTHS = [(9, 7, 12), (1, 15, 3), (14, 1, 6)]
METRICS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]
DPO = {
    "sigmoid": dict(loss_type=["sigmoid"]),
    "hinge": dict(loss_type=["hinge"], beta=0.5),
    "ipo": dict(loss_type=["ipo"]),
    "robust": dict(loss_type=["robust"], label_smoothing=0.1),
    "rpo": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
}


def random_pairs():
    generator = torch.Generator().manual_seed(521)
    draw = lambda count: torch.randint(0, 256, (count,), generator=generator)
    return [(draw(prompt), draw(chosen), draw(rejected)) for prompt, chosen, rejected in LENGTHS]


def padded(rows, value):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def dpo_batch(pairs):
    """Chosen rows, then rejected rows, as TRL's collator has them."""
    rows = [(prompt, chosen) for prompt, chosen, _ in pairs] + [(prompt, rejected) for prompt, _, rejected in pairs]
    ids = [torch.cat(row) for row in rows]
    completion = [torch.cat([torch.zeros_like(prompt), torch.ones_like(answer)]) for prompt, answer in rows]
    return dict(
        input_ids=padded(ids, 0), attention_mask=padded([torch.ones_like(row) for row in ids], 0), completion_mask=padded(completion, 0)
    )


def orpo_batch(pairs):
    batch = {}
    for side, name in [(1, "chosen"), (2, "rejected")]:
        ids = [torch.cat([pair[0], pair[side]]) for pair in pairs]
        labels = [torch.cat([torch.full_like(pair[0], -100), pair[side]]) for pair in pairs]
        batch[f"{name}_input_ids"] = padded(ids, 0)
        batch[f"{name}_attention_mask"] = padded([torch.ones_like(row) for row in ids], 0)
        batch[f"{name}_labels"] = padded(labels, -100)
    return batch


def trainer_of(maker, kind, config, **settings):
    model = maker.adapted("tiny-llama-lora", maker.base("tiny-llama"))
    tokenizer = AutoTokenizer.from_pretrained(maker.fixtures / "tiny-llama")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = Dataset.from_dict(dict(prompt=["a"], chosen=[" b"], rejected=[" c"]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(output_dir=folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **settings)
        trainer = kind(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    trainer.model.train()
    for module in model.modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0.0
    return trainer


def loss_of(trainer, pairs):
    if isinstance(trainer, ORPOTrainer):
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, orpo_batch(pairs))
        return loss, metrics
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, dpo_batch(pairs))
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def make_case(maker, name, trainer, pairs):
    loss, metrics = loss_of(trainer, pairs)
    loss.backward()
    tensors = {"loss": loss.reshape(1), "metrics": torch.tensor([float(metrics[key]) for key in METRICS])}
    return {f"{name}.{key}": value for key, value in {**tensors, **adapter_gradients(trainer.model)}.items()}


def make_steps(maker, trainer, pairs):
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, margins = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss, metrics = loss_of(trainer, pairs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        margins.append(float(metrics["rewards/margins"]))
    return {"steps.losses": torch.stack(losses), "steps.margins": torch.tensor(margins)}


def main():
    maker = maker_from_arguments("make_preference_goldens.py", __doc__)
    print("trl", trl.__version__)
    pairs = random_pairs()
    tensors = {}
    for number, pair in enumerate(pairs):
        tensors.update({f"pair{number}.{name}": ids for name, ids in zip(["prompt", "chosen", "rejected"], pair)})
    for name, settings in DPO.items():
        tensors.update(make_case(maker, name, trainer_of(maker, DPOTrainer, DPOConfig, **settings), pairs))
    # With one pair nothing is sorted: the loss of "aot" is conservative DPO, which has no name of its own.
    trainer = trainer_of(maker, DPOTrainer, DPOConfig, loss_type=["aot"], label_smoothing=0.1)
    tensors.update(make_case(maker, "smoothed", trainer, pairs[:1]))
    tensors.update(make_case(maker, "orpo", trainer_of(maker, ORPOTrainer, ORPOConfig, beta=0.1), pairs))
    tensors.update(make_steps(maker, trainer_of(maker, DPOTrainer, DPOConfig), pairs))
    maker.save("tiny-llama-preference", tensors)


if __name__ == "__main__":
    main()
