"""Lets W&B's own program send our logs to a small server here, and compares what arrives with what was logged.

    pip install wandb; python check_wandb.py [RUN]     (default: the golden run; RUN is a run folder with `wandb/` in it)

`wandb beta sync --live` reads each log while it grows, as in a run: the first half of its bytes is there when the program starts. Printed are the
rows, the config and the exit code that W&B gets; those of the golden run are compared with make_wandb_golden.py's. Logs of one run, as a resumed
run writes them, are sent one after the other, and the server tells the program how many rows it has.
Trade-off: run by hand, since the server imitates only the answers that the program (0.31.0) needs.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from make_wandb_golden import CONFIG, EVAL, TIME, TRAIN

GOLDEN = Path(__file__).parent / "run-golden01.wandb"
RECEIVED = {"rows": [], "config": {}, "exit": [], "project": None, "name": None}


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        if self.path.endswith("/graphql"):
            self.answer(self.graphql(json.loads(body)))
        elif self.path.endswith("/file_stream"):
            self.answer(self.stream(json.loads(body)))
        else:
            self.answer({})

    def stream(self, body):
        history = body.get("files", {}).get("wandb-history.jsonl", {"offset": len(RECEIVED["rows"]), "content": []})
        assert history["offset"] == len(RECEIVED["rows"]), "rows are added after those of earlier logs"
        RECEIVED["rows"] += [json.loads(line) for line in history["content"]]
        RECEIVED["exit"] += [body["exitcode"]] if body.get("complete") else []
        return {"exitcode": None, "limits": {}}

    def graphql(self, body):
        query, variables = body["query"], body["variables"]
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": variables.get("entity")}}
        if "RunResumeStatus" in query:
            rows = RECEIVED["rows"]
            tail = json.dumps([json.dumps(rows[-1])] if rows else [])
            bucket = {"id": "b", "name": variables["name"], "summaryMetrics": "{}", "displayName": "", "logLineCount": 0, "eventsLineCount": 0}
            bucket |= {"historyLineCount": len(rows), "historyTail": tail, "eventsTail": "[]", "config": "{}", "tags": [], "notes": ""}
            bucket["wandbConfig"] = json.dumps({"t": RECEIVED["config"].get("_wandb", {}).get("t")})
            return {"data": {"model": project | {"bucket": bucket if rows else None}}}
        if "upsertBucket" in query:
            RECEIVED["config"] |= {key: entry["value"] for key, entry in json.loads(variables.get("config") or "{}").items()}
            RECEIVED["project"] = variables.get("project")
            RECEIVED["name"] = variables.get("displayName") or RECEIVED["name"]
            bucket = {"id": "b", "name": variables.get("name"), "displayName": variables.get("displayName"), "description": "", "config": "{}"}
            return {"data": {"upsertBucket": {"bucket": bucket | {"sweepName": None, "historyLineCount": 0, "project": project}, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"http://{self.headers['host']}/upload/{name}"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


def send(log, port, home):
    """Sends a log that grows; returns after the program has ended."""
    folder = home / "wandb" / log.parent.name
    (folder / "files").mkdir(parents=True)
    copy, content = folder / log.name, log.read_bytes()
    copy.write_bytes(content[: len(content) // 2])
    variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_RESUME": "allow"}
    program = subprocess.Popen(["wandb", "beta", "sync", "--live", str(folder)], cwd=home, env=os.environ | variables)
    time.sleep(3)
    assert program.poll() is None, "the program waits for the rest of the log"
    with copy.open("ab") as file:
        file.write(content[len(content) // 2 :])
    assert program.wait(120) == 0 and copy.with_suffix(".wandb.synced").exists()


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        if len(sys.argv) > 1:
            logs = sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb"))
        else:
            logs = [Path(home) / "offline-run-20231114_221320-golden01" / GOLDEN.name]
            logs[0].parent.mkdir()
            shutil.copy(GOLDEN, logs[0])
        assert logs, "the run folder has no log"
        for log in logs:
            send(log, server.server_port, Path(home))
    if len(sys.argv) == 1:
        rows = [EVAL | {"_step": 0} | TIME, TRAIN | EVAL | {"_step": 10} | TIME]
        assert RECEIVED["rows"] == rows, RECEIVED["rows"]
        assert {key: RECEIVED["config"].get(key) for key in CONFIG} == CONFIG
        assert (RECEIVED["exit"], RECEIVED["project"], RECEIVED["name"]) == ([255], "bricks", "tiny run")
    steps = [row["_step"] for row in RECEIVED["rows"]]
    assert steps == sorted(steps), "rows are in the order of steps"
    print(f"{len(logs)} logs, {len(steps)} rows, steps {steps[:5]} to {steps[-1]}, {len(RECEIVED['config'])} config keys, exits {RECEIVED['exit']}")


if __name__ == "__main__":
    main()
