"""Write the log of a run of Weights & Biases with W&B's own package: its protobuf classes and its transaction log.

    pip install wandb==0.19.11; python make_wandb_golden.py [OUT]     (default: this folder)

0.19.11 is one of the last versions whose writer of logs is Python; later ones write the same bytes in Go (`check_wandb.py` reads the file with them).
A test of `firebrick-trainer` makes the same run and compares the bytes. README.md describes the file.
"""

import json
import sys
from pathlib import Path

from wandb.proto import wandb_internal_pb2 as pb

CONFIG = {"learning_rate": 0.5, "name": "tiny run", "prompts": ["a", "b"], "text": "x" * 40_000}
EVAL = {"eval/loss": 0.0, "eval/perplexity": 1.0}
TRAIN = {"train/loss": 2.25, "train/lr": 0.5, "train/loss_tokens": 0.0, "train/tokens_per_s": 0.0, "train/ms": 0.0, "train/memory": 0.0}
TIME = {"_timestamp": 1_700_000_000.5, "_runtime": 0.0}


def text(value):
    return json.dumps(value, separators=(",", ":"))


def records():
    yield pb.Record(header=pb.HeaderRecord(version_info=pb.VersionInfo(producer="firebrick")))
    run = pb.RunRecord(run_id="golden01", entity="team", project="bricks", display_name="tiny run")
    for key, value in CONFIG.items():
        run.config.update.add(key=key, value_json=text(value))
    run.start_time.FromMilliseconds(1_700_000_000_500)
    yield pb.Record(run=run)
    for step, values in [(0, EVAL), (10, TRAIN | EVAL)]:
        values = values | {"_step": step} | TIME
        history, summary = pb.HistoryRecord(step=pb.HistoryStep(num=step)), pb.SummaryRecord()
        for key, value in values.items():
            history.item.add(key=key, value_json=text(value))
            summary.update.add(key=key, value_json=text(value))
        yield pb.Record(history=history)
        yield pb.Record(summary=summary)
    yield pb.Record(exit=pb.RunExitRecord(exit_code=255))


def main():
    from wandb.sdk.internal.datastore import DataStore  # not in later versions, which check_wandb.py uses

    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent) / "run-golden01.wandb"
    out.unlink(missing_ok=True)
    log = DataStore()
    log.open_for_write(str(out))
    for number, record in enumerate(records(), 1):
        record.num = number
        log.write(record)
    log.close()


if __name__ == "__main__":
    main()
