"""Compares what llama.cpp makes of our GGUF files with what Firebrick and transformers make of the model folder.

    pip install llama-cpp-python transformers==5.23.0 jinja2
    python check_gguf.py REAL --binary ../../target/fast/firebrick --model SMOLLM2_135M [--tokens 4096] [--only NAME]

REAL is the folder of real tokenizers and data that compare_real_chats.py describes.

    ids     `firebrick export --gguf` writes a small random model with each tokenizer. llama.cpp reads every text of TEXTS with special tokens,
            Firebrick through `firebrick inspect` (the token file that it stores). All ids have to be equal, except for texts that the
            tokenizer normalizes first: llama.cpp has no step for that, so they are compared in the normalized form and counted. Where
            writing the file says that llama.cpp's rule is nearly the same, one text in 100 may differ.
    logits  of the model: `firebrick verify` ties Firebrick on flex to transformers in f32 (2e-4, every logit), then llama.cpp's logits of the
            GGUF file are compared with those: share of positions with the same best token, mean KL divergence. Positions are those of
            real texts with the model's template, in contexts of 256 tokens.

    tiny    the same of fixtures of every family that GGUF files are written of, in f32, against transformers: mean KL <= 1e-10, of Gemma <= 1e-5
            (llama.cpp has a table of its GELU in f16), of experts in MXFP4 <= 1e-2 (their inputs are rounded to 8 bits).

Bars: equal ids, and for each kind the share of equal best tokens and the mean KL in BARS, which are those of SmolLM2-135M and a margin.
Trade-off: run by hand, since llama.cpp is compiled when it is installed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from compare_real_chats import DATA, edge_chats, firebrick, messages_of, more_sets, read_records
from make_gguf_family_goldens import MODELS, changed
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Tokenizer: the family of the small model that carries it.
FAMILIES = {"smollm2": "llama", "llama3_1": "llama", "qwen3": "qwen3", "llama2": "llama", "gemma3": "llama", "gptoss": "llama"}
# llama.cpp's rule is nearly that of these.
NEARLY = ["gptoss"]
# Families whose products llama.cpp rounds, and the mean KL that this may give.
ROUNDED = {"gemma": 1e-5, "quant-mxfp4": 1e-2}
BARS = {"f16": (0.99, 1e-3), "bf16": (0.99, 1e-3), "q8_0": (0.95, 1e-2), "q6_k": (0.93, 2e-2), "q5_k_m": (0.84, 1e-1), "q4_k_m": (0.84, 1e-1), "q4_0": (0.0, np.inf)}
CONTEXT = 256


def export(binary, model, to, kind):
    """What the command says, and whether it succeeded."""
    done = subprocess.run([binary, "export", "--gguf", kind, "--model", model, "--out", to], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def chats_of(real, folder, limit):
    for path in [real / "data" / name for name in DATA] + more_sets(real / "data", folder):
        for record in list(read_records(path).values())[:limit]:
            yield messages_of(record)


def rendered(tokenizer, chats):
    """The chats that the template accepts, as text."""
    for messages, tools in chats:
        try:
            yield tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception:  # The template refuses the chat.
            continue


def texts_of(tokenizer, real, folder, limit):
    """Rendered chats, then texts that have no chat around them, and all tokens that are spelled as special ones are."""
    chats = list(rendered(tokenizer, chats_of(real, folder, limit)))
    plain = [message["content"] for chat in edge_chats(real / "data") for message in chat["messages"]]
    wiki = (real / "data" / "wiki_demo.txt").read_text(encoding="utf-8")
    plain += [wiki[at : at + 700] for at in range(0, min(len(wiki), 700000), 1400)]
    plain += [space + text[:200] for text in plain[:400] for space in (" ", "  ", "\t", "\n", "\n\n ")]
    plain += [text[:200] + space for text in plain[:200] for space in (" ", "   ", "\n", "\r\n", "\t \n ")]
    plain += [chr(code) + "a" + chr(code) * 3 + " 1" + chr(code) for code in character_samples()]
    plain += [f"{number} {number},{number}.{number}" for number in (7, 42, 365, 1024, 65536, 1000000, 12345678901234567890)]
    plain += [f"it's I'M you'LL we'd '{word}" for word in ("sure", "S", "\u017f", "ve", "LL", "\u2019s")]
    # Among ordinary tokens are some that are spelled as special ones are.
    spelled = [token for token in tokenizer.get_vocab() if re.fullmatch(r"[<\[_▁].*[>\]]|\[e~\[", token)]
    plain += [f"before {token} after{token}{token}\n{token} " for token in spelled]
    return [text for text in dict.fromkeys(chats + plain) if text.strip()]


def character_samples():
    """Characters of every block, and all that are white space, format or controls below U+3100."""
    kinds = ("Zs", "Zl", "Zp", "Cf", "Cc")
    few = [code for code in range(1, 0x3100) if unicodedata.category(chr(code)) in kinds]
    every = [code for code in range(0x21, 0x20000, 23) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    return few + every


def normalizer_of(folder):
    """The normalizer that llama.cpp has no step for. That of SentencePiece, which writes spaces in its way, is one that it has."""
    has_bytes = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"].get("byte_fallback")
    return None if has_bytes else Tokenizer.from_file(str(folder / "tokenizer.json")).normalizer


def llama_ids(gguf, texts, bos):
    """A text that begins with the token that begins texts gets no second one, as in Firebrick."""
    model = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=not (bos and text.startswith(bos)), special=True) for text in texts]


def firebrick_ids(binary, model, texts, folder):
    """By `firebrick inspect`: each text as a record, less the token that ends records."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    found = firebrick(binary, model, [path], len(texts), "all", folder)
    return [found[0, line][0] for line in range(1, len(texts) + 1)]


def small_model(name, real, folder):
    """A random model of the family with this tokenizer."""
    model = folder / "model"
    source = real / "tokenizers" / name
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "head_dim": 16}
    config, kind = (Qwen3Config, Qwen3ForCausalLM) if FAMILIES.get(name) == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    kind(config(**sizes, tie_word_embeddings=True)).save_pretrained(model)
    for file in source.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    return model, tokenizer


def check_ids(name, real, binary, limit):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model, tokenizer = small_model(name, real, folder)
        is_written, said = export(binary, model, folder / "m.gguf", "f16")
        if not is_written:
            print(f"ids     {name:12} refused: {said.strip().splitlines()[-1][:300]}")
            return False
        texts = texts_of(tokenizer, real, folder, limit)
        normalizer = normalizer_of(model)
        changed = 0
        if normalizer is not None:
            changed = sum(normalizer.normalize_str(text) != text for text in texts)
            texts = [normalizer.normalize_str(text) for text in texts]
        ours, theirs = firebrick_ids(binary, model, texts, folder), llama_ids(folder / "m.gguf", texts, tokenizer.bos_token)
        ends = tokenizer.eos_token_id
        strip = lambda ids: ids[:-1] if ids and ids[-1] == ends else ids
        different = [(text, a, b) for text, a, b in zip(texts, ours, theirs) if strip(a) != strip(b)]
        for text, a, b in different[:8]:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            around = [tokenizer.decode(ids[max(0, at - 3) : at + 5]) for ids in (a, b)]
            print(f"    ids differ at {at}: {a[at:at + 6]} {around[0]!r}, llama.cpp {b[at:at + 6]} {around[1]!r}")
        tokens = sum(map(len, ours))
        print(f"ids     {name:12} {len(different)} of {len(texts)} texts differ, {tokens} tokens; {changed} texts normalized first", flush=True)
        return len(different) <= (len(texts) // 100 if name in NEARLY else 0)


def references(binary, folder, rows, work):
    """transformers' logits in f32, tied to Firebrick's by `verify`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = torch.cat([model(rows[at : at + 1]).logits.float() for at in range(len(rows))])
    golden = work / "golden.safetensors"
    few = slice(0, 4)
    save_file({"input_ids": rows[few].contiguous(), "logits": logits[few].contiguous()}, golden)
    command = [binary, "verify", "--model", folder, "--backend", "flex", "--golden", golden, "--tol", "2e-4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print("verify ", " ".join((done.stdout + done.stderr).split())[-200:], flush=True)
    return logits, done.returncode == 0


def llama_logits(gguf, rows):
    """The logits of each row [T, V]; keys and values are kept in f32."""
    length = rows.shape[1]
    model = llama_cpp.Llama(
        str(gguf), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )
    for row in rows:
        model.reset()
        model.eval(row.tolist())
        yield torch.from_numpy(np.array(model.scores[: len(row)], dtype=np.float32))


def check_logits(real, binary, folder, kinds, count):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as work:
        work, ids = Path(work), []
        for text in rendered(tokenizer, chats_of(real, work, 12)):
            ids += tokenizer.encode(text, add_special_tokens=False)[: 2 * CONTEXT]
        # Rows from all data sets.
        rows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
        rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), count // CONTEXT)).long()]
        expected, is_fine = references(binary, folder, rows, work)
        for kind in kinds:
            is_fine &= compare(binary, folder, rows, expected, kind, work)
    return is_fine


def check_tiny(binary):
    is_fine = True
    for name, changes in MODELS.items():
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "model"
            folder.mkdir()
            changed(Path(__file__).parent.parent / "fixtures" / name, changes, folder)
            kind = AutoModelForImageTextToText if name.endswith("-vl") else AutoModelForCausalLM
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            rows = torch.randint(0, 250, (3, 48), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                logits = torch.cat([model(row[None]).logits for row in rows])
            bar = next((bar for start, bar in ROUNDED.items() if name.removeprefix("tiny-").startswith(start)), 1e-10)
            print(f"{name:20}", end=" ")
            is_fine &= compare(binary, folder, rows, logits, "f32", Path(work), (0.99, bar))
    return is_fine


def compare(binary, folder, rows, expected, kind, work, bars=None):
    """Of the GGUF file of this kind: whether its logits on the rows [B, T] are the expected ones [B, T, V], within the bars."""
    gguf = work / f"{kind}.gguf"
    is_written, said = export(binary, folder, gguf, kind)
    if not is_written:
        sys.exit(said)
    same, divergence, largest = 0, 0.0, 0.0
    for ours, theirs in zip(expected, llama_logits(gguf, rows)):
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        ours_log, theirs_log = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergence += (ours_log.exp() * (ours_log - theirs_log)).sum().item()
        largest = max(largest, (ours - theirs).abs().max().item())
    gguf.unlink()
    top_1, mean = same / rows.numel(), divergence / rows.numel()
    figures = f"top-1 {100 * top_1:.2f} %, mean KL {mean:.2e}, largest difference {largest:.2e}"
    print(f"logits  {kind:5} {figures}, {rows.numel()} positions", flush=True)
    # In a few positions of a random model, one may be a tie.
    share, divergence = bars or BARS[kind]
    return same >= rows.numel() * share - 1 and mean <= divergence


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", type=Path)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder whose logits are compared")
    parser.add_argument("--records", type=int, default=60, help="of each data set")
    parser.add_argument("--tokens", type=int, default=4096, help="positions whose logits are compared")
    parser.add_argument("--kinds", default="f16,bf16,q8_0,q6_k,q5_k_m,q4_k_m,q4_0")
    parser.add_argument("--only", help="one of the tokenizers, tiny or logits")
    options = parser.parse_args()
    real, binary = options.real.resolve(), options.binary.resolve()
    is_fine = True
    for name in FAMILIES:
        if options.only in (None, name):
            is_fine &= check_ids(name, real, binary, options.records)
    if options.only in (None, "tiny"):
        is_fine &= check_tiny(binary)
    if options.model and options.only in (None, "logits"):
        is_fine &= check_logits(real, binary, options.model.resolve(), options.kinds.split(","), options.tokens)
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
