"""A step of a mixture of experts in transformers with grouped experts and PEFT, next to `firebrick bench --random-base` of the same shape.

usage: experts.py CONFIG.json ROWS TOKENS attention|experts [STEPS]

The base is random and in bfloat16 (transformers' grouped products read no NF4), LoRA has r = 16 on attention, or on attention and every
expert by PEFT's `target_parameters`; layers are checkpointed, AdamW of the adapters is PyTorch's fused one. One JSON line: tokens per
second by the median step after two, and the largest memory of PyTorch's allocator in GiB.
Trade-off: loss over all tokens as transformers computes it, so rows must fit with their logits.
"""

import json
import statistics
import sys
import time

import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained(sys.argv[1])
rows, tokens, what = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
steps = int(sys.argv[5]) if len(sys.argv) > 5 else 4
config.use_cache = False

torch.manual_seed(0)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
lora = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
if what == "experts":
    lora["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
model = peft.get_peft_model(model, peft.LoraConfig(**lora))
model.gradient_checkpointing_enable({"use_reentrant": False})
model.enable_input_require_grads()
model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

seconds = []
for step in range(steps + 2):
    ids = torch.randint(config.vocab_size, (rows, tokens), device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - started)
step = statistics.median(seconds[2:])
print(
    json.dumps(
        {
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "layers": config.num_hidden_layers,
            "rows": rows,
            "trained": what,
            "tok_s": rows * tokens / step,
            "step_s": step,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
    )
)
