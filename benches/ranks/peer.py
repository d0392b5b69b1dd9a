"""QLoRA by transformers, PEFT, bitsandbytes and Liger, or by Unsloth, on the cards of one machine, for `measure.py` to be read next to.

    torchrun --standalone --nproc-per-node N benches/ranks/peer.py MODEL ROWS SEQ CHECKPOINTING STEPS [unsloth]

Data parallel by torch's DistributedDataParallel over the adapter; NF4 with double quantization, rank 16 in all linear modules, bf16, rows of
random tokens. Prints one line of JSON on rank 0: milliseconds of the median step, tokens/s of all ranks, GiB of its card.
Trade-off: a loop of its own rather than a trainer, so nothing but the step is timed.
"""

import json
import os
import statistics
import sys
import time

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def unsloth(folder, seq, checkpointing, local):
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=seq, dtype=None, load_in_4bit=True, device_map={"": local})
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, target_modules=MODULES, bias="none",
        use_gradient_checkpointing="unsloth" if checkpointing else False)


def hugging_face(folder, seq, checkpointing, local):
    import torch
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    apply_liger_kernel_to_llama()
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantized, dtype=torch.bfloat16, device_map={"": local}, attn_implementation="sdpa")
    if checkpointing:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=MODULES))


def main():
    folder, rows, seq, checkpointing, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", int(sys.argv[5])
    program = unsloth if "unsloth" in sys.argv[6:] else hugging_face
    if program is unsloth:
        import unsloth as _unsloth  # noqa: F401 (before torch and transformers, parts of which it replaces)
    import torch
    import torch.distributed as dist

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    model = program(folder, seq, checkpointing, local)
    model.config.use_cache = False
    model.train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local]) if world > 1 else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    times = []
    for _ in range(4 + steps):
        ids = torch.randint(0, model.config.vocab_size, (rows, seq), generator=generator, device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    if rank == 0:
        median = statistics.median(times[4:])
        free, total = torch.cuda.mem_get_info()
        print(json.dumps({
            "program": program.__name__, "ranks": world, "rows": rows, "checkpointing": checkpointing, "step_ms": round(median * 1e3, 1),
            "loss": value, "tokens_s": round(world * rows * seq / median), "used_gib": round((total - free) / 2**30, 2)}), flush=True)
    dist.destroy_process_group()


main()
