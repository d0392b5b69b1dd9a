"""Rewards of GRPO from a function that was written for TRL: command = ["python", "reward.py", "MODULE:FUNCTION"]."""

import asyncio, importlib, inspect, json, math, os, sys, types

# Standard input and output are those of the protocol; what the function prints goes to standard error.
requests_in, answers_out = open(os.dup(0), encoding="utf-8"), open(os.dup(1), "w", encoding="utf-8")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
module, _, name = sys.argv[1].partition(":")
imported = importlib.import_module(module)
function = getattr(imported, name, None)
if not callable(function):
    there = [key for key, value in vars(imported).items() if inspect.isfunction(value) and value.__module__ == module]
    sys.exit(f"{module} has no function '{name}'; its functions are: {', '.join(there) or 'none'}")
try:
    parameters = inspect.signature(function).parameters
except ValueError:  # It is not written in Python.
    parameters = {}
print('{"firebrick_reward": 1, "batch": true}', file=answers_out, flush=True)
for line in requests_in:
    requests, metrics = json.loads(line)["requests"], {}
    columns = {key: [request["row"].get(key) for request in requests] for key in requests[0]["row"]}
    texts, prompts = [request["completion"] for request in requests], [request["prompt"] for request in requests]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns.update(prompts=prompts, completions=texts if isinstance(prompts[0], str) else chats)
    if "completion_ids" in requests[0]:
        columns.update(completion_ids=[request["completion_ids"] for request in requests])
    columns.update(trainer_state=types.SimpleNamespace(global_step=requests[0]["step"]), log_extra=lambda name, values: None)
    log_metric = lambda name, value: metrics.update({name: float(value)} if math.isfinite(value) else {})
    columns.update(log_metric=log_metric)
    needs = lambda value: value.default is value.empty and value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
    if absent := [key for key, value in parameters.items() if needs(value) and key not in columns]:
        given = ", ".join(requests[0]["row"])
        sys.exit(f"{sys.argv[1]} wants the column {' and '.join(absent)}, which the data does not have; its columns are: {given}")
    rewards = function(**columns)
    rewards = asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards
    if not hasattr(rewards, "__iter__"):
        sys.exit(f"{sys.argv[1]} returned {rewards!r:.60}; it must return a list with one reward for each completion")
    rewards = list(rewards)
    if len(rewards) != len(requests):
        raise ValueError(f"{len(rewards)} rewards for {len(requests)} completions, whose ids begin with {requests[0]['id']}")
    for request, reward in zip(requests, rewards):
        reward = None if reward is None or math.isnan(reward) else float(reward)
        print(json.dumps({"id": request["id"], "reward": reward, "metrics": metrics}), file=answers_out, flush=True)
        metrics = {}  # The mean is over calls.
