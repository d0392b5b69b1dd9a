"""Makes chat.json and the two tokenizers beside it: what Hugging Face transformers renders and tokenises.

Run in this folder: python make_chat.py (made with transformers 5.23.0, tokenizers 0.23.3).

Templates are written with generation blocks (`*.jinja` under templates/); transformers' assistant mask comes from those.
The Rust test renders them once as they are and once with the block tags removed, which must give the same mask. The style
`reasoning` rewrites earlier turns, so only its blocks can tell the assistant's text.
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
] * 4

# style: (tokenizer, bos, eos)
STYLES = {
    "chatml": ("byte_level", None, "<|im_end|>"),
    "llama3": ("byte_level", "<|begin_of_text|>", "<|eot_id|>"),
    "zephyr": ("byte_level", "<s>", "</s>"),
    "reasoning": ("byte_level", None, "<|im_end|>"),
    "mistral": ("metaspace", "<s>", "</s>"),
}

CONVERSATIONS = [
    [("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris.")],
    [
        ("system", "You are a helpful assistant.\nAnswer in one line."),
        ("user", "  padded question \n"),
        ("assistant", "Ünïcode 😀 & <tags> 'quoted'"),
        ("user", "two"),
        ("assistant", "def add(a, b):\n    return a + b\n\n"),
        ("user", "three"),
        ("assistant", "数字 one two three"),
    ],
    [("user", "four"), ("assistant", "<think>\nfive and six\n</think>\n\nseven"), ("user", "and?"), ("assistant", "")],
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    special += ["<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace():
    """Like the tokenizers that were converted from SentencePiece: spaces become U+2581, one is put in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special[:5], show_progress=False)
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split()], trainer)
    # The byte tokens are part of the model, not added tokens.
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    for token in special[5:]:
        vocab[token] = len(vocab)
    return Tokenizer.from_str(json.dumps(saved))


def case(tokenizer, template, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    render = lambda **options: tokenizer.apply_chat_template(messages, chat_template=template, **options)
    whole = render(return_dict=True, return_assistant_tokens_mask=True)
    return {
        "messages": messages,
        "text": render(tokenize=False),
        "text_with_prompt": render(tokenize=False, add_generation_prompt=True),
        "ids": list(whole["input_ids"]),
        "assistant_mask": list(whole["assistant_masks"]),
    }


def main():
    for name, make in [("byte_level", byte_level), ("metaspace", metaspace)]:
        (HERE / name).mkdir(exist_ok=True)
        make().save(str(HERE / name / "tokenizer.json"), pretty=False)
    styles = {}
    for style, (name, bos, eos) in STYLES.items():
        tokens = {key: token for key, token in [("bos_token", bos), ("eos_token", eos)] if token}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / name / "tokenizer.json"), **tokens)
        template = (HERE / "templates" / f"{style}.jinja").read_text()
        # Mistral's template knows no system message.
        conversations = [[turn for turn in turns if style != "mistral" or turn[0] != "system"] for turns in CONVERSATIONS]
        cases = [case(tokenizer, template, turns) for turns in conversations]
        styles[style] = {"tokenizer": name, "special_tokens": tokens, "cases": cases}
    (HERE / "chat.json").write_text(json.dumps(styles, indent=1, ensure_ascii=False) + "\n")


main()
