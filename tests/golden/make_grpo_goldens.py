"""Compute the goldens of GRPO: what TRL's GRPOTrainer computes from tiny-llama and its adapter on completions and rewards that are given.

    python make_grpo_goldens.py [--out DIR] [--fixtures DIR]     (needs trl in addition to requirements.txt)

The prompts, the completions and the rewards of two functions are fixed; everything after them is TRL's own: advantages, masks, log-probabilities, loss
and gradients. The reference of the KL term is the base without its adapter, whose B is not zero. In the second iteration the adapter's B has changed,
and the log-probabilities before that are the old ones. README.md describes the file.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import itertools
import tempfile
import types

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from make_llama_goldens import adapter_gradients, maker_from_arguments

GROUP = 4
MAX_LENGTH = 8
TEMPERATURE = 0.8
PROMPTS = [5, 9, 2]
# Tokens of each completion with its end; those of MAX_LENGTH without an end are truncated.
LENGTHS = [3, 8, 5, 6, 2, 8, 8, 4, 7, 3, 5, 8]
TRUNCATED = {1, 6, 11}
# None: the function cannot score the completion. The second group has no variance; a completion of the third has no reward at all.
REWARDS = [
    [1.0, 0.0, 0.25, None, 0.5, 0.5, 0.5, 0.5, 1.0, None, -2.0, 0.0],
    [0.5, 2.0, None, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, None, 3.0, 1.0],
]
WEIGHTS = [1.0, 0.5]
DEFAULT = dict(loss_type="dapo", importance_sampling_level="token", scale_rewards="group", beta=0.0)
CASES = {
    **{
        f"{loss}-{level}": dict(loss_type=loss, importance_sampling_level=level)
        for loss, level in itertools.product(["dapo", "dr_grpo", "grpo"], ["token", "sequence"])
    },
    **{f"scale-{scale}": dict(scale_rewards=scale) for scale in ["batch", "none"]},
    **{f"masked-{loss}": dict(loss_type=loss, mask_truncated_completions=True) for loss in ["dapo", "dr_grpo", "grpo"]},
    **{
        f"kl-{loss}-{level}": dict(loss_type=loss, importance_sampling_level=level, beta=0.3, epsilon_high=0.28)
        for loss, level in [("dapo", "token"), ("grpo", "token"), ("grpo", "sequence")]
    },
}


def random_rows():
    generator = torch.Generator().manual_seed(523)
    draw = lambda count: torch.randint(0, 256, (count,), generator=generator).tolist()
    prompts = [draw(length) for length in PROMPTS]
    completions = [draw(length if row in TRUNCATED else length - 1) for row, length in enumerate(LENGTHS)]
    return prompts, completions


def trainer_of(maker, folder, settings):
    model = maker.adapted("tiny-llama-lora", maker.base("tiny-llama"))
    tokenizer = AutoTokenizer.from_pretrained(maker.fixtures / "tiny-llama")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    functions = []
    for number, rewards in enumerate(REWARDS):
        function = lambda prompts, rewards=rewards, **_: list(rewards)
        function.__name__ = f"reward{number}"
        functions.append(function)
    arguments = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, num_generations=GROUP,
        per_device_train_batch_size=len(LENGTHS), max_completion_length=MAX_LENGTH, temperature=TEMPERATURE, reward_weights=WEIGHTS, **settings,
    )
    data = Dataset.from_dict(dict(prompt=["a"] * len(LENGTHS)))
    trainer = GRPOTrainer(model=model, args=arguments, reward_funcs=functions, train_dataset=data, processing_class=tokenizer)
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    for module in model.modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0.0
    return trainer


def with_rows(trainer):
    """Returns what TRL makes of the fixed prompts and completions."""
    prompts, completions = random_rows()
    end = trainer._tokenizer.eos_token_id
    completions = [ids if row in TRUNCATED else ids + [end] for row, ids in enumerate(completions)]
    prompts = [prompts[row // GROUP] for row in range(len(LENGTHS))]
    texts = ["x"] * len(LENGTHS)
    trainer._generate = types.MethodType(lambda self, _: (prompts, completions, None, texts, None, {}, None, None), trainer)
    return trainer._generate_and_score_completions([{"prompt": "a"}] * len(LENGTHS))


def change(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.mul_(1.6)


def flat(values, inputs):
    return values[inputs["completion_mask"].bool()] if values.dim() == 2 else values


def make_case(maker, name, settings):
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(maker, folder, {**DEFAULT, **settings})
        inputs = with_rows(trainer)
        tensors = {"advantages": inputs["advantages"]}
        for iteration in ["first", "second"]:
            trainer.model.zero_grad()
            kept = {}
            compute = trainer._get_per_token_logps_and_entropies

            def keep(*arguments, **named):
                log_probs, entropies, aux = compute(*arguments, **named)
                log_probs.retain_grad()
                kept["log_probs"] = log_probs
                return log_probs, entropies, aux

            trainer._get_per_token_logps_and_entropies = keep
            trainer._metrics["train"].clear()
            loss = trainer._compute_loss(trainer.model, inputs)
            trainer._get_per_token_logps_and_entropies = compute
            loss.backward()
            metrics = trainer._metrics["train"]
            log_probs = kept["log_probs"]
            tensors[f"{iteration}.loss"] = loss.detach().reshape(1)
            tensors[f"{iteration}.log_probs"] = flat(log_probs.detach(), inputs)
            tensors[f"{iteration}.d_log_probs"] = flat(log_probs.grad, inputs)
            of = lambda key: float(metrics[key][-1]) if key in metrics else 0.0
            shown = ["kl", "clip_ratio/low_mean", "clip_ratio/high_mean"]
            tensors[f"{iteration}.metrics"] = torch.tensor([of(key) for key in shown])
            if name in ("dapo-token", "kl-grpo-sequence"):
                gradients = adapter_gradients(trainer.model).items()
                tensors.update({f"{iteration}.{key}": value.clone() for key, value in gradients})
            inputs = {**inputs, "old_per_token_logps": log_probs.detach()}
            change(trainer.model)
        if "ref_per_token_logps" in inputs:
            tensors["ref_log_probs"] = flat(inputs["ref_per_token_logps"], inputs)
    return {f"{name}.{key}": value for key, value in tensors.items()}


def main():
    maker = maker_from_arguments("make_grpo_goldens.py", __doc__)
    print("trl", trl.__version__)
    prompts, completions = random_rows()
    tensors = {f"prompt{number}": torch.tensor(ids) for number, ids in enumerate(prompts)}
    tensors.update({f"completion{number}": torch.tensor(ids) for number, ids in enumerate(completions)})
    none = float("nan")
    tensors["rewards"] = torch.tensor([[none if value is None else value for value in row] for row in REWARDS])
    for name, settings in CASES.items():
        tensors.update(make_case(maker, name, settings))
    maker.save("tiny-llama-grpo", tensors)


if __name__ == "__main__":
    main()
