"""Several cards of one machine: what a step gains from each, what faults do, how long a start takes. One step per call, results as JSON.

    python benches/ranks/measure.py STEP --firebrick PROGRAM --model FOLDER --data FILE --work FOLDER --out FILE [--cards 4 --ranks 2,4]

STEP is `scaling` (QLoRA), `full` (every weight, under ZeRO), `large` (a model that two cards divide), `start`, `faults` or `faults-cpu`. MODEL is
a checkpoint of the shape of Llama-3.1-8B for the first four (`large` reads its config.json alone, of a 70B), and a small one for faults.
"Linear" is N ranks over the sum of what the same N cards make in runs of their own, all cards at the same time, which takes out shared power
and host; "the slower" is the slowest of those cards, which N ranks have to wait for. A run is ended by a signal once it has the steps that are
timed, so that nothing large is saved. Linux and NVIDIA cards (`faults-cpu`: no card).
Trade-off: medians of a few tens of steps; what differs by less than 0.3 % is noise.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time

WARMUP = 6


def recipe(args, name, rows, seq, compute="bfloat16", backend="cuda", accumulation=1, steps=1000, mode="qlora", **train):
    keys = {"micro_batch_size": rows, "gradient_accumulation": accumulation, "steps": steps, "learning_rate": 1e-4, **train}
    every = keys.pop("checkpoint_every", 0)
    kind = "[bnb_4bit]\n[lora]\nr = 16\nalpha = 32\n" if mode == "qlora" else ""
    path = os.path.join(args.work, name + ".toml")
    with open(path, "w") as file:
        file.write(
            f'name = "{name}"\nbackend = "{backend}"\nmodel = "{args.model}"\ncompute = "{compute}"\noutput_dir = "{args.work}/runs"\n'
            f"max_seq_len = {seq}\n" + ('mode = "full"\n' if mode == "full" else "") + kind
            + f'[data]\npath = "{args.data}"\n[train]\n'
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            + f"[eval]\nevery_steps = 0\nexact_match_prompts = 0\n[checkpoint]\nevery_steps = {every}\n"
        )
    shutil.rmtree(f"{args.work}/runs/{name}", ignore_errors=True)
    return path


class Run:
    """One `train`, with its own log and the lines of its metrics."""

    def __init__(self, args, name, config, *options, card=None, resumed=False):
        environment = dict(os.environ)
        if card is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(card)
        self.name, self.folder, self.log = name, f"{args.work}/runs/{name}", f"{args.work}/{name}.log"
        self.started = time.monotonic()
        with open(self.log, "a" if resumed else "w") as log:
            command = [args.firebrick, "train", "--config", config, *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def lines(self):
        try:
            with open(f"{self.folder}/metrics.jsonl") as file:
                return [line for line in map(json.loads, file) if "loss" in line and "step" in line]
        except (OSError, ValueError):
            return []

    def wait_for(self, step, limit):
        while not any(line["step"] >= step for line in self.lines()):
            if self.process.poll() is not None or time.monotonic() - self.started > limit:
                return False
            time.sleep(0.05)
        return True

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self, lines=4):
        with open(self.log, errors="replace") as file:
            return [line.rstrip()[:300] for line in file if line.strip()][-lines:]

    def ranks(self):
        """Process ids of the ranks, in rank order."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/environ", "rb") as file:
                    parent, entries = int(stat.read().rsplit(")", 1)[1].split()[1]), file.read().split(b"\0")
            except OSError:
                continue
            rank = next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)
            if parent == self.process.pid and rank is not None:
                found.append((rank, int(pid)))
        return [pid for _, pid in sorted(found)]


def memory():
    """GiB in use on each card."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [round(int(line) / 1024, 2) for line in subprocess.check_output(query, text=True).split()]


def wait_for_cards():
    """Until what an ended run had on the cards is free again."""
    while max(memory()) > 3:
        time.sleep(0.2)


def planned(log):
    with open(log, errors="replace") as file:
        for line in file:
            if " memory " in line and " of " in line and " free" in line:
                return line.split("memory", 1)[1].split(" of ")[0].strip()
    return None


def timed(args, settings, ranks, steps):
    """Runs of one card each at the same time where `ranks` is 1, otherwise one run of so many; its or their numbers."""
    wait_for_cards()
    cards = range(args.cards) if ranks == 1 else [None]
    runs = []
    for card in cards:
        name = f"{settings['name']}-{ranks}" + ("" if card is None else f"-{card}")
        config = recipe(args, **{**settings, "name": name})
        runs.append(Run(args, name, config, *([] if ranks == 1 else ["--gpus", str(ranks)]), card=card))
    runs[0].wait_for(1, 200)
    first_step_s = round(time.monotonic() - runs[0].started, 1)
    ready = all([run.wait_for(WARMUP + steps, 200) for run in runs])
    used = memory()
    for run in runs:
        run.end()
    result = {"ranks": ranks, "used_gib": used, "planned": planned(runs[0].log), "first_step_s": first_step_s}
    if not ready:
        return {**result, "failed": runs[0].tail(3)}
    lines = [[line for line in run.lines() if WARMUP < line["step"] <= WARMUP + steps] for run in runs]
    result["step_ms"] = [round(statistics.median(line["ms"] for line in one), 2) for one in lines]
    if ranks > 1:
        for key in ("own_ms", "collectives_ms", "comm_wait_ms"):
            values = [line["ranks"][key] for line in lines[0]]
            result[key] = [round(statistics.median(column), 2) for column in zip(*values)]
    result["tokens_s"] = round(sum(ranks * settings["rows"] * settings["seq"] / (ms / 1e3) for ms in result["step_ms"]))
    return result


def benched(args, words, ranks, limit=150):
    """The same for `bench`: uniform rows of random tokens."""
    wait_for_cards()
    processes = []
    for card in range(args.cards) if ranks == 1 else [None]:
        environment = dict(os.environ) if card is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(card)}
        more = [] if ranks == 1 else ["--gpus", str(ranks)]
        command = ["timeout", str(limit), args.firebrick, "bench", "--backend", "cuda", "--model", args.model, "--random-base", "--json"]
        processes.append(subprocess.Popen(
            [*command, *words, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    outputs = [process.communicate() for process in processes]
    try:
        reports = [json.loads(next(line for line in out.splitlines()[::-1] if line.startswith("{"))) for out, _ in outputs]
    except StopIteration:
        return {"ranks": ranks, "failed": outputs[0][1].splitlines()[-5:]}
    return {
        "ranks": ranks, "tokens_s": round(sum(report["tok_s"] for report in reports)),
        "step_ms": [round(report["step_s"]["median"] * 1e3, 2) for report in reports],
        "peak_gib": [round(report["peak_gib"], 2) for report in reports], "planned_gib": round(reports[0]["planned_gib"], 2),
        "first_step_s": [round(report["first_step_s"], 2) for report in reports],
    }


def compared(one, together):
    """What each number of ranks in `together` reaches of its cards alone."""
    for many in together:
        if "failed" in one or "failed" in many:
            continue
        alone, step = one["step_ms"][: many["ranks"]], max(many["step_ms"])
        many["of_linear"] = round(many["ranks"] / step / sum(1 / ms for ms in alone), 4)
        many["of_the_slower"] = round(max(alone) / step, 4)
    return {"one_card_each": one, "together": together}


def scaling(args, say):
    shapes = {
        "bf16-selective": (dict(rows=3, seq=4096, recompute="selective"), "--micro-batch 3 --recompute selective"),
        "fp8-offloaded": (
            dict(rows=8, seq=4096, compute="fp8", recompute="projections", offload=True),
            "--micro-batch 8 --recompute projections --offload true --compute fp8"),
        "bf16-offloaded": (
            dict(rows=8, seq=4096, recompute="projections", offload=True), "--micro-batch 8 --recompute projections --offload true"),
    }
    for name, (settings, words) in shapes.items():
        if name in args.skip.split(","):
            continue
        long = "offloaded" in name
        words = (words + (" --steps 8 --warmup 3" if long else " --steps 14 --warmup 4")).split()
        one = benched(args, words, 1)
        say({"setting": name, "rows": "uniform, bench", **compared(one, [benched(args, words, ranks) for ranks in args.ranks])})
        steps = 8 if long else 16
        settings["name"] = name
        # The other way round than above, as cards slow down while they warm up.
        together = [timed(args, settings, ranks, steps) for ranks in args.ranks]
        say({"setting": name, "rows": "packed text, train", **compared(timed(args, settings, 1, steps), together)})


def full(args, say):
    for seq, rows in ((4096, 2), (1024, 8)):
        # Stage 0 is each card alone, what the others are linear to.
        for stage, compute in ((0, "bfloat16"), (3, "bfloat16"), (2, "bfloat16"), (2, "fp8"), (1, "bfloat16"), (1, "fp8")):
            if f"{seq}/{stage}/{compute}" in args.skip.split(","):
                continue
            settings = dict(
                name=f"full-zero{stage}-{compute}-{seq}", rows=rows, seq=seq, compute=compute, mode="full", zero_stage=stage,
                optimizer="paged_adamw_8bit", recompute="full", learning_rate=1e-5)
            for ranks in args.ranks if stage else [1]:
                say({"setting": settings["name"], "rows": rows, **timed(args, settings, ranks, 8)})


def large(args, say):
    words = "--micro-batch 1 --seq 4096 --recompute full --optimizer adamw_8bit --steps 3 --warmup 2".split()
    alone = argparse.Namespace(**{**vars(args), "cards": 1})
    if "one card" not in args.skip.split(","):
        say({"setting": "70B, one card", **benched(alone, words, 1, 250)})
    for ranks in args.ranks:
        say({"setting": "70B, ZeRO 3", **benched(args, [*words, "--zero", "3"], ranks, 250)})


def drop_pages(folder):
    os.sync()
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(args, say):
    """From the process's start to the end of the first step, the files' pages in the page cache; then once more with none of them there."""
    for ranks in (1, *args.ranks):
        for number in ("warm-0", "warm-1", "cold"):
            wait_for_cards()
            if number == "cold":
                drop_pages(args.model)
            name = f"start-{ranks}-{number}"
            config = recipe(args, name, 3, 4096, recompute="selective")
            run = Run(args, name, config, *([] if ranks == 1 else ["--gpus", str(ranks)]))
            ready = run.wait_for(1, 120)
            seconds = time.monotonic() - run.started
            read = {}
            for pid in run.ranks() or [run.process.pid]:
                with open(f"/proc/{pid}/io") as file:
                    read[pid] = next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
            run.end()
            say({"ranks": ranks, "pages": number[:4], "first_step_s": round(seconds, 2),
                 "read_from_disk": list(read.values()), "ready": ready, "log": run.tail(2)})


def fault(args, say, kind, number, options, backend):
    """A fault in one rank at a random step; when the job ended and what it said; the losses after it was continued by one rank."""
    rng = random.Random(f"{kind}{number}")
    name, rank, at = f"{kind.lower()}-{number}", rng.randrange(2), rng.randrange(25, 60)
    settings = dict(rows=args.rows, seq=args.seq, backend=backend, steps=args.steps, compute=args.compute, checkpoint_every=10)
    run = Run(args, name, recipe(args, name, **settings), *options)
    if not run.wait_for(at, 120):
        return say({"fault": kind, "round": number, "failed": run.tail(6)})
    pid, lost = run.ranks()[rank], time.monotonic()
    os.kill(pid, getattr(signal, "SIG" + kind))
    while run.process.poll() is None and time.monotonic() - lost < 60:
        if kind == "STOP" and time.monotonic() - lost > 30:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    seconds, before, said = time.monotonic() - lost, run.lines(), run.tail(5)
    status = run.process.poll()
    run.end()
    again = Run(args, name, os.path.join(args.work, name + ".toml"), "--resume", "--set", "train.gradient_accumulation=2", resumed=True)
    done = again.wait_for(args.steps, 180)
    again.process.wait(60)
    by_step = {line["step"]: line["loss"] for line in before}
    by_step.update({line["step"]: line["loss"] for line in again.lines()})
    reference = {line["step"]: line["loss"] for line in args.reference}
    worst = max((abs(by_step[step] / loss - 1) for step, loss in reference.items() if step in by_step), default=None)
    with open(again.log, errors="replace") as log:
        resumed_from = next((line for line in log if line.startswith("resumed after")), "")
    say({
        "fault": kind, "round": number, "rank": rank, "at_step": at, "last_step_before": before[-1]["step"], "ended_after_s": round(seconds, 1),
        "status": status, "said": said, "resumed": done, "resume_line": resumed_from.strip()[:200],
        "steps": len(by_step), "loss_differs_by": worst})


def faults(args, say, backend="cuda"):
    options = ["--gpus", "2"] if backend == "cuda" else ["--ranks", "2"]
    rounds = args.rounds
    name = "reference"
    settings = dict(rows=args.rows, seq=args.seq, backend=backend, steps=args.steps, compute=args.compute)
    reference = Run(args, name, recipe(args, name, **settings), *options)
    reference.wait_for(args.steps, 240)
    reference.process.wait(60)
    args.reference = reference.lines()
    say({"reference": [line["loss"] for line in args.reference][:: args.steps // 6], "steps": len(args.reference)})
    for number in range(rounds):
        for kind in ("KILL", "STOP", "TERM"):
            fault(args, say, kind, number, options, backend)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["scaling", "full", "large", "start", "faults", "faults-cpu"])
    for name in ("firebrick", "model", "data", "work", "out"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--cards", type=int, default=2, help="of the machine: so many runs of one card each")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], help="numbers of ranks of a run; all cards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--compute", default="bfloat16")
    parser.add_argument("--skip", default="", help="settings of `scaling` or `full` (as SEQ/STAGE/COMPUTE) to leave out, with commas")
    args = parser.parse_args()
    args.ranks = args.ranks or [args.cards]
    os.makedirs(args.work, exist_ok=True)
    with open(args.out, "a") as out:
        def say(result):
            text = json.dumps(result)
            print(text, flush=True)
            out.write(text + "\n")
            out.flush()

        steps = {"scaling": scaling, "full": full, "large": large, "start": start, "faults": faults}
        steps["faults-cpu"] = lambda args, say: faults(args, say, "flex")
        steps[args.step](args, say)


if __name__ == "__main__":
    sys.exit(main())
