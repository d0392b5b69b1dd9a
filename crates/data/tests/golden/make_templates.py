"""Generates templates.json and the two tokenizers: what transformers renders, tokenizes and masks.

Run in this folder: python make_templates.py (generated with transformers 5.24.0, tokenizers 0.23.3, jinja2 3.1.6).

The templates (templates/*.jinja) have the features of well-known families, with generation blocks, from which
transformers computes the assistant mask. The Rust test renders them unchanged, and once without the block tags, which
must give the same mask. Where a template refuses a conversation, "text" is null. As Gemma 4's own template, the one here
writes what a message with calls says after the results of the calls.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog answers: what is the time?",
    "What is the capital of France? The capital of France is Paris. Thank you! You are welcome.",
    "system user assistant message answer question number one two three four five six seven",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    '{"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": {"type": "object"}}}',
    '"properties": {"city": {"type": "string"}}, "required": ["city"], "arguments": {"city": "Paris"}\n\n<think>\n</think>',
] * 4

# template: (tokenizer, bos, eos)
STYLES = {
    "chatml": ("byte_level", None, "<|im_end|>"),
    "command_r": ("byte_level", "<s>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("byte_level", "<s>", "<|end▁of▁sentence|>"),
    "gemma": ("metaspace", "<s>", "</s>"),
    "gemma4": ("metaspace", "<s>", "</s>"),
    "llama2": ("metaspace", "<s>", "</s>"),
    "llama3": ("byte_level", "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_tools": ("byte_level", "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("metaspace", "<s>", "</s>"),
    "mistral_tools": ("metaspace", "<s>", "</s>"),
    "olmo": ("byte_level", "<s>", "</s>"),
    "phi3": ("metaspace", "<s>", "</s>"),
    "qwen2_tools": ("byte_level", None, "<|im_end|>"),
    "qwen3": ("byte_level", None, "<|im_end|>"),
    "reasoning": ("byte_level", None, "<|im_end|>"),
    "zephyr": ("byte_level", "<s>", "</s>"),
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather & more, \"now\"",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Wo? In Köln <ok>"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "which"},
                "limit": {"type": "number", "default": 1e-07},
            },
            "required": ["city"],
        },
    },
}


def call(name, arguments, number):
    return {"id": f"callid00{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turns_of(*turns):
    return [{"role": role, "content": content} for role, content in turns]


# Each: messages, tools.
CONVERSATIONS = [
    (turns_of(("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris.")), None),
    (
        turns_of(
            ("system", "You are a helpful assistant.\nAnswer in one line."),
            ("user", "  padded question \n"),
            ("assistant", "Ünïcode 😀 & <tags> 'quoted' \"twice\""),
            ("user", "two"),
            ("assistant", "def add(a, b):\n    return a + b\n\n"),
            ("user", "three"),
            ("assistant", "数字 one two three"),
        ),
        None,
    ),
    (
        turns_of(
            ("user", "four"),
            ("assistant", "<think>\nfive and six\n</think>\n\nseven"),
            ("user", "and?"),
            ("assistant", "<think>\neight\n</think>\n\nnine "),
        ),
        None,
    ),
    (
        turns_of(("system", "Use tools."), ("user", "What is the weather in Köln?"))
        + [{"role": "assistant", "tool_calls": [call("weather", {"city": "Köln", "days": [1, 2]}, 1)]}]
        + [{"role": "tool", "name": "weather", "tool_call_id": "callid001", "content": '{"sky": "blue"}'}]
        + turns_of(("assistant", "It is fair.")),
        [WEATHER],
    ),
    (turns_of(("user", "Hello!"), ("assistant", "Hello to you.")), [WEATHER]),
    (
        turns_of(("user", "Paris and Rome?"))
        + [
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [call("weather", {"city": "Paris"}, 1), call("weather", {"city": "Rome", "limit": 0.5}, 2)],
            }
        ]
        + [{"role": "tool", "tool_call_id": f"callid00{n}", "content": sky} for n, sky in [(1, "rain"), (2, "sun")]]
        + turns_of(("assistant", "Rain there, sun here."), ("user", "Thank you!"), ("assistant", "You are welcome.")),
        [WEATHER, {"type": "function", "function": {"name": "time", "description": "the time", "parameters": {"type": "object", "properties": {}, "required": []}}}],
    ),
    (
        turns_of(("user", "one?"))
        + [{"role": "assistant", "reasoning_content": "\nso one\n", "content": "\n\none"}]
        + turns_of(("user", "two?"))
        + [{"role": "assistant", "thinking": "then two", "content": "two"}],
        None,
    ),
    (
        turns_of(
            ("user", "{{ not a template }} {% if %} \\n \t tab"),
            ("assistant", "<|user|> </s> [INST] </think> <|im_start|>assistant\nspelled"),
            ("user", "\u00a0nbsp\u200b and \u2028 line"),
            ("assistant", "\u3000wide\u3000"),
        ),
        None,
    ),
    (turns_of(("user", "a"), ("assistant", "a"), ("user", "a"), ("assistant", "a"), ("user", "a"), ("assistant", "a")), None),
    (turns_of(("system", "Be brief."), ("user", "Is nobody there?")), None),
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    special += ["<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|User|>", "<|Assistant|>"]
    special += ["<|end▁of▁sentence|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def metaspace():
    """Like the tokenizers that were converted from SentencePiece: spaces become U+2581, one is put in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    special += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split()], trainer)
    # The byte tokens are part of the model, not added tokens.
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    parts = ("turn", "channel", "tool", "tool_call", "tool_response")
    tokenizer.add_special_tokens(["<|\"|>", *(token for part in parts for token in (f"<|{part}>", f"<{part}|>"))])
    return tokenizer


def case(tokenizer, template, messages, tools):
    def render(**options):
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **options)

    try:
        text = render(tokenize=False)
        prompt = render(tokenize=False, add_generation_prompt=True)
        whole = render(return_dict=True, return_assistant_tokens_mask=True)
    except Exception:
        return {"text": None}
    # What the prompt adds, or all of it if it is no addition.
    added = prompt[len(text) :] if prompt.startswith(text) else None
    mask = list(whole["assistant_masks"])
    # Runs of equal bits, beginning with zeros.
    runs, bit = [0], 0
    for value in mask:
        if value != bit:
            runs.append(0)
            bit = value
        runs[-1] += 1
    case = {"text": text, "ids": list(whole["input_ids"]), "mask": runs}
    return case | ({"prompt_adds": added} if added is not None else {"prompt": prompt})


def main():
    for name, make in [("byte_level", byte_level), ("metaspace", metaspace)]:
        (HERE / name).mkdir(exist_ok=True)
        make().save(str(HERE / name / "tokenizer.json"), pretty=False)
    styles = {}
    for style, (name, bos, eos) in STYLES.items():
        tokens = {key: token for key, token in [("bos_token", bos), ("eos_token", eos)] if token}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / name / "tokenizer.json"), **tokens)
        template = (HERE / "templates" / f"{style}.jinja").read_text()
        cases = [case(tokenizer, template, messages, tools) for messages, tools in CONVERSATIONS]
        styles[style] = {"tokenizer": name, "special_tokens": tokens, "cases": cases}
    conversations = [{"messages": messages, "tools": tools} for messages, tools in CONVERSATIONS]
    out = {"conversations": conversations, "styles": styles}
    (HERE / "templates.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")
    refused = {style: [i for i, c in enumerate(s["cases"]) if c["text"] is None] for style, s in styles.items()}
    print("refused:", refused)


main()
