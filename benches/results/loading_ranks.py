"""How much the ranks of a machine read from the disk while they load, and how much memory each takes.

    python benches/results/loading_ranks.py TRAIN MODEL DATA > benches/results/loading-ranks.json

TRAIN is the program, MODEL a folder with safetensors on a disk (not in memory: /proc counts what comes from a disk), DATA a file of chats.
The model's pages are dropped from the page cache before each run. A run takes one step of QLoRA on the CPU backend with 1, 2 and 4 ranks.
Linux only. Trade-off: memory is looked at every 5 ms, so a shorter peak is not seen.
"""

import json
import os
import subprocess
import sys
import tempfile
import time


def dropped(folder):
    size = 0
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                size += os.fstat(file.fileno()).st_size
    return size


def field(pid, file, name):
    try:
        with open(f"/proc/{pid}/{file}") as text:
            for line in text:
                if line.startswith(name + ":"):
                    return int(line.split()[1])
    except (OSError, ProcessLookupError):
        pass
    return 0


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as text:
            return [int(child) for child in text.read().split()]
    except OSError:
        return []


def run(train, model, data, ranks):
    with tempfile.TemporaryDirectory() as folder:
        recipe = os.path.join(folder, "recipe.toml")
        with open(recipe, "w") as file:
            file.write(
                f"name='run'\nbackend='flex'\nmodel='{model}'\noutput_dir='{folder}'\nmax_seq_len=128\n[bnb_4bit]\n[lora]\nr=4\n"
                f"[data]\npath='{data}'\n[train]\nsteps=1\nmicro_batch_size=1\n[eval]\nexact_match_prompts=0\n"
            )
        size = dropped(model)
        job = subprocess.Popen(
            [train, "train", "--config", recipe, "--ranks", str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        own, read = {}, {}
        while job.poll() is None:
            for pid in children(job.pid) or ([job.pid] if ranks == 1 else []):
                own[pid] = max(own.get(pid, 0), field(pid, "status", "RssAnon") * 1024)
                read[pid] = max(read.get(pid, 0), field(pid, "io", "read_bytes"))
            time.sleep(0.005)
        printed = job.stdout.read().decode()
        if job.returncode != 0:
            sys.exit(printed)
        return {
            "ranks": ranks,
            "file_bytes": size,
            "read_from_disk_bytes": sum(read.values()),
            "largest_private_memory_bytes": max(own.values()),
        }


if __name__ == "__main__":
    train, model, data = map(os.path.abspath, sys.argv[1:4])
    results = [run(train, model, data, ranks) for ranks in (1, 2, 4)]
    json.dump({"model": os.path.basename(model), "backend": "flex", "base": "nf4_double_quant", "runs": results}, sys.stdout, indent=1)
    print()
