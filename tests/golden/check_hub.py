#!/usr/bin/env python3
"""Compares our Hub client and our imitation of the Hub with huggingface_hub.

    cargo build -p firebrick-hub-imitation --example imitated_hub
    cargo build -p firebrick-train
    python tests/golden/check_hub.py target/debug/examples/imitated_hub MODEL_FOLDER [target/debug/firebrick]

huggingface_hub downloads from and uploads to the imitation, so that the imitation is not tested against our client alone; then each
reads, offline, the cache that the other one filled. Needs huggingface_hub (tried with 2.4).
Trade-off: run by hand, since tests need no Python.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TOKEN = "hf_imitated"


def serve(program, repositories):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([program, address, *repositories], stdout=subprocess.PIPE, text=True)
    return server, server.stdout.readline().strip()


def main():
    program, folder = sys.argv[1], Path(sys.argv[2])
    train = sys.argv[3] if len(sys.argv) > 3 else None
    work = Path(tempfile.mkdtemp())
    server, endpoint = serve(program, [f"org/model={folder}"])
    os.environ.update(HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(work / "theirs"), HF_HUB_DISABLE_XET="1")
    os.environ.update(HF_HOME=str(work / "home"), HF_HUB_DISABLE_TELEMETRY="1")
    try:
        check(train, folder, work)
    finally:
        server.kill()


def check(train, folder, work):
    # Imported here: it reads the environment once.
    from huggingface_hub import HfApi, ModelCard, snapshot_download

    fetched = Path(snapshot_download("org/model"))
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert sorted(path.name for path in fetched.iterdir()) == names, "huggingface_hub fetched other files"
    for name in names:
        assert (fetched / name).read_bytes() == (folder / name).read_bytes(), name
    print(f"huggingface_hub downloads {len(names)} files from the imitation")

    api = HfApi(token=TOKEN)
    api.create_repo("me/pushed", private=True, exist_ok=True)
    commit = api.upload_folder(repo_id="me/pushed", folder_path=folder)
    back = Path(snapshot_download("me/pushed", token=TOKEN))
    for name in names:
        assert (back / name).read_bytes() == (folder / name).read_bytes(), name
    print(f"huggingface_hub uploads them to the imitation and gets them back: {commit.oid}")

    if train is None:
        return
    verify = [train, "plan", "--config", str(work / "recipe.toml"), "--set", "backend=flex"]
    (work / "recipe.toml").write_text(
        "model = 'org/model'\nmax_seq_len = 64\n[lora]\nr = 4\n[data]\n"
        f"path = '{work}/rows.jsonl'\n[train]\nsteps = 1\nmicro_batch_size = 1\n"
    )
    (work / "rows.jsonl").write_text('{"text": "a row of words to train on"}\n' * 8)
    ours = dict(os.environ, HF_HUB_CACHE=str(work / "ours"))
    offline = dict(os.environ, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    subprocess.run(verify, env=offline, check=True, stdout=subprocess.DEVNULL)
    print("Firebrick reads, offline, the cache that huggingface_hub filled")

    run = [train, "train", *verify[2:], "--set", f"output_dir={work}/runs", "--set", "name=hub"]
    subprocess.run(run, env=ours, check=True, stdout=subprocess.DEVNULL)
    reader = (
        "from huggingface_hub import snapshot_download, try_to_load_from_cache as load, scan_cache_dir\n"
        "assert isinstance(load('org/model', 'config.json'), str) and isinstance(load('org/model', 'model.safetensors'), str)\n"
        "folder = snapshot_download('org/model'); info = scan_cache_dir(); assert not info.warnings, info.warnings\n"
        "print(folder)"
    )
    ours_offline = dict(offline, HF_HUB_CACHE=str(work / "ours"))
    found = subprocess.run([sys.executable, "-c", reader], env=ours_offline, check=True, capture_output=True, text=True)
    snapshot = Path(found.stdout.strip())
    for path in snapshot.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path
    print(f"huggingface_hub reads, offline, the cache that a run filled: {sorted(path.name for path in snapshot.iterdir())}")

    adapter = work / "runs" / "hub" / "adapter"
    push = [train, "push", str(adapter), "--to", "me/adapter", "--private"]
    pushed = subprocess.run(push, env=dict(ours, HF_TOKEN=TOKEN), check=True, capture_output=True, text=True)
    print(pushed.stdout.strip())
    back = Path(snapshot_download("me/adapter", token=TOKEN))
    for path in adapter.rglob("*"):
        if path.is_file():
            assert (back / path.relative_to(adapter)).read_bytes() == path.read_bytes(), path
    card = ModelCard.load(back / "README.md")
    assert card.data.base_model == "org/model" and card.data.library_name == "peft", card.data
    assert api.repo_info("me/adapter").private
    print("huggingface_hub gets the adapter that Firebrick pushed, and reads its card")


if __name__ == "__main__":
    main()
