"""Generates templates.json, snippets.json and the two tokenizers: what transformers renders, tokenizes and masks.

Run in this folder: python make_templates.py (generated with transformers 5.23.0, tokenizers 0.23.3, jinja2 3.1.6).

The templates (templates/*.jinja) have the features of well-known families, with generation blocks, from which
transformers computes the assistant mask. The Rust test renders them unchanged, and once without the block tags, which
must give the same mask. Where a template refuses a conversation, "text" is null. snippets.json has single expressions.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

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
    return Tokenizer.from_str(json.dumps(saved))


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


D = {"a": 1, "items": [1, 2.5, None], "s": "it's", "n": {"k": "v"}}
VARIABLES = {
    "d": D,
    "text": "  Héllo wörld, it's\tnice\n",
    "words": ["b", "a", "C"],
    "objects": [{"n": 2, "k": "x"}, {"n": 1, "k": "y"}, {"k": "z"}],
    "none_value": None,
    "number": 7,
}
SNIPPETS = r"""
{{ d }}|{{ d.s }}|{{ d['items'] }}|{{ words }}
{{ d | string }}|{{ [1, 'a', none, true, 1.0] | string }}|{{ [] }}|{{ {} }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for k in d %}{{ k }}{% endfor %}|{% for k in d.keys() %}{{ k }}{% endfor %}|{{ d.values() | list }}
{{ d | items | map('first') | list }}|{{ d | dictsort | map('last') | list }}|{{ d | length }}|{{ 'a' in d }}|{{ 'z' in d }}|{{ d.get('z', 4) }}|{{ d.get('z') }}
{{ text.strip() }}|{{ text | trim }}|{{ text.lstrip() }}|{{ text.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcab'.strip('ba') }}
{{ text.split() }}|{{ 'a,b,,c'.split(',') }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.rsplit(',', 1) }}|{{ 'a b  c'.split(maxsplit=1) }}
{{ 'a\nb\r\nc\n'.splitlines() }}|{{ 'a-b-c'.partition('-') | list }}|{{ 'a-b-c'.rpartition('-') | list }}
{{ text.upper() }}|{{ text.lower() }}|{{ text.title() }}|{{ text.strip().capitalize() }}|{{ 'aBc'.swapcase() }}
{{ text.find('w') }}|{{ text.rfind('l') }}|{{ text.find('zz') }}|{{ text.count('l') }}|{{ text.index('w') }}
{{ 'abc'.startswith('ab') }}|{{ 'abc'.startswith(('x', 'a')) }}|{{ 'abc'.endswith('bc') }}|{{ 'abc'.removeprefix('a') }}|{{ 'abc'.removesuffix('c') }}
{{ 'aaa'.replace('a', 'b', 2) }}|{{ 'aaa' | replace('a', 'b') }}|{{ 'abc'.replace('', '-') }}
{{ ', '.join(words) }}|{{ words | join('-') }}|{{ [1, 2.5, none] | join(',') }}|{{ objects | join('/', attribute='k') }}|{{ words | join }}
{{ 'ab'.ljust(5, '.') }}|{{ 'ab'.rjust(5) }}|{{ 'ab'.center(5, '*') }}|{{ 'abc'.center(6, '*') }}|{{ '7'.zfill(3) }}|{{ '-7'.zfill(4) }}
{{ '12'.isdigit() }}|{{ 'ab1'.isalnum() }}|{{ ''.isalpha() }}|{{ ' \t'.isspace() }}|{{ 'AB1'.isupper() }}|{{ 'ab'.islower() }}|{{ '1'.islower() }}
{{ '{} and {x}'.format(1, x='y') }}|{{ '%s-%d' | format('a', 3) }}
{{ words | sort }}|{{ words | sort(reverse=true) }}|{{ words | reverse | list }}|{{ words | first }}|{{ words | last }}|{{ words | unique | list }}
{{ objects | map(attribute='k') | list }}|{{ objects | selectattr('n', 'defined') | map(attribute='n') | list }}|{{ objects | selectattr('k', 'equalto', 'x') | list }}
{{ objects | rejectattr('n', 'defined') | list }}|{{ words | select('in', ['a', 'b']) | list }}|{{ words | map('upper') | list }}
{{ [3, 1, 2] | sort }}|{{ [3, 1, 2] | max }}|{{ [3, 1, 2] | min }}|{{ [3, 1, 2] | sum }}|{{ -3 | abs }}|{{ 2.567 | round(2) }}|{{ '7' | int + 1 }}|{{ 'x' | int(5) }}|{{ '1.5' | float }}
{{ words[0] }}|{{ words[-1] }}|{{ words[1:] }}|{{ words[::-1] }}|{{ text[2:5] }}|{{ text[::-1] }}|{{ 'héé'[1] }}|{{ words[:2] }}
{{ words + ['d'] }}|{{ [0] * 3 }}|{{ 'ab' * 3 }}|{{ 'a' ~ 1 ~ none_value ~ true }}|{{ 'a' + 'b' }}|{{ 1 + 2 * 3 }}|{{ 7 // 2 }}|{{ -7 // 2 }}|{{ -7 % 3 }}|{{ 2 ** 10 }}|{{ 7 / 2 }}|{{ 6 / 2 }}
{{ undefined_thing }}|{{ undefined_thing is defined }}|{{ undefined_thing | default('x') }}|{{ '' | default('x', true) }}|{{ none_value | default('x') }}|{{ undefined_thing == none }}
{{ none_value is none }}|{{ d.zz is none }}|{{ d.zz is defined }}|{{ d is mapping }}|{{ words is mapping }}|{{ none_value is mapping }}
{{ words is sequence }}|{{ 'a' is sequence }}|{{ d is sequence }}|{{ 1 is sequence }}|{{ words is iterable }}|{{ 'a' is iterable }}|{{ d is iterable }}|{{ 1 is iterable }}|{{ none_value is iterable }}
{{ 1 is number }}|{{ 1.5 is number }}|{{ true is number }}|{{ 1 is integer }}|{{ true is integer }}|{{ 1.5 is float }}|{{ true is boolean }}|{{ 'a' is string }}|{{ none is string }}
{{ 3 is odd }}|{{ 4 is even }}|{{ 6 is divisibleby 3 }}|{{ 1 in [1, 2] }}|{{ 1 not in [1, 2] }}|{{ 'a' is in 'abc' }}|{{ true is true }}|{{ 1 is true }}|{{ 'a' is eq 'a' }}|{{ 'a' is lower }}
{{ 'yes' if words else 'no' }}|{{ 'yes' if undefined_thing }}|{{ words and 'x' }}|{{ '' or 'y' }}|{{ not words }}|{{ 1 < 2 < 3 }}
{% set ns = namespace(n=0, found=false) %}{% for w in words %}{% set ns.n = ns.n + 1 %}{% if w == 'a' %}{% set ns.found = true %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.found }}
{% for w in words %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem | default('-') }}{{ loop.nextitem | default('-') }}{{ loop.cycle('x', 'y') }};{% endfor %}
{% for w in words if w != 'a' %}{{ loop.index }}{{ w }}{% else %}none{% endfor %}|{% for w in [] %}x{% else %}none{% endfor %}
{% set x = 1 %}{% for w in words %}{% set x = 2 %}{% endfor %}{{ x }}|{% set y %}  block {{ x }}{% endset %}{{ y }}|{% set a, b = 1, [2] %}{{ a }}{{ b }}
{% macro greet(name, mark='!') %}Hi {{ name }}{{ mark }}{% endmacro %}{{ greet('you') }}{{ greet('me', mark='?') }}|{{ greet(name='x') | upper }}
{% macro tree(node) %}{{ node.k }}{% if node.n is defined %}({{ tree(node.n) }}){% endif %}{% endmacro %}{{ tree({'k': 'a', 'n': {'k': 'b'}}) }}
{{ d | tojson }}|{{ d | tojson(indent=2) }}|{{ words | tojson(indent=4) }}|{{ 'é<&>\'"' | tojson }}|{{ 'é' | tojson(ensure_ascii=true) }}|{{ d | tojson(separators=(',', ':')) }}|{{ d | tojson(sort_keys=true) }}
{{ 1e-7 | tojson }}|{{ 1e16 | tojson }}|{{ 1.0 | tojson }}|{{ 0.1 }}|{{ 1e22 }}|{{ 100000.0 }}|{{ none | tojson }}|{{ true | tojson }}|{{ [] | tojson(indent=2) }}
{{ range(3) | list }}|{{ range(1, 7, 2) | list }}|{{ range(3, 0, -1) | list }}|{{ dict(a=1, b=2) }}|{{ dict([('x', 1)]) }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\nb' | indent(width=1, first=True) }}|{{ text | length }}|{{ text | upper | trim }}|{{ 'hello world' | title }}|{{ 'hELLO' | capitalize }}
{{ words | batch(2) | list }}|{{ objects | groupby('k') | map('first') | list }}|{{ '<b>' | e }}
{{ 'a' 'b' }}|{{ "\u00e9\t\\" }}|{{ 'it\'s' }}|{{ 1_000 }}|{{ 0x1f }}
{{ (1, 2)[0] }}|{{ (1, 'b') | list }}|{% if (words | length) > 2 and not (d.a == 2) %}ok{% endif %}|{{ words.index('a') }}|{{ words.count('a') }}
{{ none_value.x is defined }}|{{ number.x is defined }}|{{ words.x is defined }}|{{ words[9] is defined }}|{{ 'abc'[9] is defined }}
{{ undefined_thing.x }}
{{ undefined_thing + 'a' }}
{{ 'a' + 1 }}
{{ raise_exception('no: ' ~ number) }}
{{ none_value | length }}
{{ undefined_thing | tojson }}
{{ words | nosuchfilter }}
{% include 'x' %}
{{ words.append('x') }}
{{ ''.__class__ }}
{%- if true -%} a {%+ if true %} b {% endif +%} c {%- endif %}  {#- gone -#}  d {# stays #} e
{% raw %}{{ raw }} {% set x = 1 %}{% endraw %}|{{ '{{' }}|{{ '%}' }}|{% set z = '%}' %}{{ z }}
{% filter upper %}abc{% endfilter %}|{% with v = 3 %}{{ v }}{% endwith %}|{{ v is defined }}
{% call(x) outer() %}{{ x }}{% endcall %}
{% macro outer() %}<{{ caller(5) }}>{% endmacro %}{% call(x) outer() %}{{ x }}{% endcall %}
""".strip().split("\n")


def snippet(source):
    try:
        return {"source": source, "text": _compile_jinja_template(source).render(**VARIABLES)}
    except Exception as error:
        return {"source": source, "text": None, "error": type(error).__name__}


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
    snippets = {"variables": VARIABLES, "snippets": [snippet(source) for source in SNIPPETS]}
    (HERE / "snippets.json").write_text(json.dumps(snippets, indent=1, ensure_ascii=False) + "\n")
    refused = {style: [i for i, c in enumerate(s["cases"]) if c["text"] is None] for style, s in styles.items()}
    print("refused:", refused)


main()
