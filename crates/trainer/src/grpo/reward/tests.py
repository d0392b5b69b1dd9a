"""Functions of TRL for tests.rs."""

import os
import time

print("stdout is not the protocol's")


def count_in_two_processes(prompts, completions, completion_ids, number, log_metric, **kwargs):
    """Waits for the other worker, and adds the number of completions of this one."""
    os.system("echo from a process")
    open(f"worker-{os.getpid()}", "w").close()
    while sum(name.startswith("worker-") for name in os.listdir()) < 2:
        time.sleep(0.01)
    log_metric("completions", len(completions))
    texts = [text if isinstance(prompt, str) else text[0]["content"] for prompt, text in zip(prompts, completions)]
    assert completion_ids == [[len(text)] for text in texts]
    return [{"none": None, "nan": float("nan")}.get(text, n + len(texts)) for text, n in zip(texts, number)]


async def too_few(completions, **kwargs):
    return [1]
