"""How much the ranks of a machine read from the disk while they load, and how much memory each takes.

    python benches/results/loading_ranks.py TRAIN MODEL DATA > benches/results/loading-ranks.json
    python benches/results/loading_ranks.py TRAIN MODEL DATA --backend cuda --ranks 1 2 > loading-ranks-cuda.json

TRAIN is the program, MODEL a folder with safetensors on a disk (not in memory: /proc counts what comes from a disk), DATA a file of chats.
The model's pages are dropped from the page cache before each run. A run takes one step of QLoRA, on CUDA with a card per rank. Private memory is
what no file backs; the driver's pinned buffers are in the shared memory of /proc, or in neither, so both are reported, and the pinned ones by VmPin.
Linux only. Trade-off: memory is looked at every 5 ms, so a shorter peak is not seen.
"""

import argparse
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


MEMORY = {"private": "RssAnon", "shared": "RssShmem", "pinned": "VmPin"}


def run(train, model, data, backend, ranks):
    with tempfile.TemporaryDirectory() as folder:
        recipe = os.path.join(folder, "recipe.toml")
        with open(recipe, "w") as file:
            file.write(
                f"name='run'\nbackend='{backend}'\nmodel='{model}'\noutput_dir='{folder}'\nmax_seq_len=128\n[bnb_4bit]\n[lora]\nr=4\n"
                f"[data]\npath='{data}'\n[train]\nsteps=1\nmicro_batch_size=1\n[eval]\nexact_match_prompts=0\n"
            )
        size = dropped(model)
        count = "--gpus" if backend == "cuda" else "--ranks"
        job = subprocess.Popen(
            [train, "train", "--config", recipe, count, str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        largest, read = dict.fromkeys(MEMORY, 0), {}
        while job.poll() is None:
            for pid in children(job.pid) or ([job.pid] if ranks == 1 else []):
                for kind, name in MEMORY.items():
                    largest[kind] = max(largest[kind], field(pid, "status", name) * 1024)
                read[pid] = max(read.get(pid, 0), field(pid, "io", "read_bytes"))
            time.sleep(0.005)
        printed = job.stdout.read().decode()
        if job.returncode != 0:
            sys.exit(printed)
        return {
            "ranks": ranks,
            "file_bytes": size,
            "read_from_disk_bytes": sum(read.values()),
            **{f"largest_{kind}_memory_bytes": size for kind, size in largest.items()},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("train", "model", "data"):
        parser.add_argument(name, type=os.path.abspath)
    parser.add_argument("--backend", default="flex")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    results = [run(asked.train, asked.model, asked.data, asked.backend, ranks) for ranks in asked.ranks]
    answer = {"model": os.path.basename(asked.model), "backend": asked.backend, "base": "nf4_double_quant", "runs": results}
    json.dump(answer, sys.stdout, indent=1)
    print()
