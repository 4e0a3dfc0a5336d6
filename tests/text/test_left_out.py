"""Nothing of a conversation vanishes without a word: all templates of the tests, with every kind of message at every place.

Catches a part that the model never gets, though the client has sent it: a system message, an answer beside calls, a name, a
call, a result, or reasoning since the last question. Each is in the prompt, or refused by the template, or named by a warning.
"""

import itertools
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.chats import TEMPLATES
from support.qwen3_5 import SMALL_TEMPLATE
from text.test_chat_template import TEMPLATE
from text.test_template_probe import ENDS, SPECIAL, STYLES, TOOLS, loop

from minirt.errors import TokenizerError
from minirt.text import rendering
from minirt.text.chat_template import ChatTemplate
from minirt.text.rendering import Renderer, RenderingError
from minirt.text.template_probe import outline

LOSES: dict[str, str] = {
    "Llama 3.1: calls without their content": loop(
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    ),
    "Mistral 7B: the system message goes into the last question": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' and m.tool_calls %}"
        "[TOOL_CALLS]{{ m.tool_calls | tojson }}{% elif m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "SmolLM3: no calls, and no system message but the first": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{% for m in messages %}"
        "{% if m.role in ('user', 'assistant', 'tool') %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "the last question only": "{{ messages[0].content if messages[0].role == 'system' }}{{ messages[-1].content }}",
    "no tools": loop("{{ m.content }}"),
    "tools": "{{ tools | tojson if tools }}" + loop("{{ m.content }}"),
    "parts as texts": "{# thinking #}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
}
ALL = {
    "Qwen": TEMPLATE, "Qwen3.5, small": SMALL_TEMPLATE, **TEMPLATES, **LOSES,
    **{name: template for name, (template, _) in (STYLES | ENDS).items()},
}
KINDS = ("system", "user", "named", "answer", "thought", "calls", "call", "result")
TURNS: list[tuple[str, ...]] = [("user",), ("named", "answer"), ("user", "thought"), ("user", "call", "result", "answer"),
         ("user", "calls", "result", "result", "call", "result", "thought"), ("user", "calls", "result", "result")]  # fmt: skip


def conversations() -> list[tuple[str, ...]]:
    """All of one and of two messages, and long ones of turns, some with a system message, and some with one message too many."""
    dice, found = random.Random(3), [(kind,) for kind in KINDS] + list(itertools.product(KINDS, repeat=2))
    for _ in range(25):
        own = list(itertools.chain.from_iterable(dice.choices(TURNS, k=dice.randint(1, 5))))
        own[:0] = ["system"] * (dice.random() < 0.6)
        if dice.random() < 0.3:
            own.insert(dice.randint(0, len(own)), dice.choice(KINDS))
        found.append(tuple(own))
    return found


def written(kinds: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """A conversation, and what the model has to get of it: texts that are no part of one another."""
    messages, texts, last = [], [], max((i for i, kind in enumerate(kinds) if kind in ("user", "named")), default=-1)
    for i, kind in enumerate(kinds):
        own: dict[str, Any] = {"role": {"system": "system", "result": "tool"}.get(kind, "assistant"), "content": f"Text{i}."}
        if kind in ("user", "named"):
            own["role"] = "user"
        if kind == "named":
            own["name"] = f"Name{i}."
        if kind == "thought":
            own["reasoning_content"] = f"Thought{i}."
        if kind == "result":
            own |= {"tool_call_id": f"c{i}", "name": "weather"}
        if kind in ("call", "calls"):
            numbers = [f"{i}{letter}" for letter in ("ab" if kind == "calls" else "a")]
            functions = [{"name": f"f{n}", "arguments": f'{{"k{n}": "v{n}"}}'} for n in numbers]
            own["tool_calls"] = [{"id": "c", "type": "function", "function": function} for function in functions]
            texts += [letter + n for letter in "fkv" for n in numbers]
            own["content"] = own["content"] if kind == "call" else None
        texts += [own[key] for key in ("content", "name") if own.get(key) and own[key] != "weather"]
        texts += [own["reasoning_content"]] if kind == "thought" and i > last else []
        messages.append(own)
    return messages, texts


@pytest.fixture
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: dict[str, Any] = {}

    def render(own: Any, names: Any) -> str:
        try:
            source = own._processes._first
            if source not in compiled:
                compiled[source] = rendering.compile_template(source)
            return compiled[source].render(names)
        except Exception as error:
            raise RenderingError(str(error)) from error

    monkeypatch.setattr(Renderer, "render", render)


@pytest.mark.usefixtures("_in_process")
@pytest.mark.parametrize("name", ALL)
def test_every_kind_of_message_at_every_place(name: str) -> None:
    """A warning comes if, and only if, something is not in the prompt."""
    template = ChatTemplate(Path("f"), {"chat_template": ALL[name]}, SPECIAL)
    rendered = 0
    for kinds in conversations():
        messages, texts = written(kinds)
        tools = TOOLS if rendered % 3 else []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                text = template.render(messages, tools=tools)
            except TokenizerError:
                continue
        rendered += 1
        lost = [own for own in [*texts, *(["rain"] if tools else [])] if own not in text]
        said = [str(w.message) for w in seen if "leaves out: " in str(w.message)]
        assert bool(lost) == bool(said), (kinds, lost, said, text)
    assert rendered or name == "it fails"


@pytest.mark.usefixtures("_in_process")
def test_what_is_left_out_is_named() -> None:
    source = LOSES["Mistral 7B: the system message goes into the last question"]
    template = ChatTemplate(Path("f"), {"chat_template": source}, SPECIAL)
    words = "with tool, .* out: content of system at the beginning, content of assistant after user$"
    with pytest.warns(UserWarning, match=words):
        template.render(written(("system", "user", "call", "result"))[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        template.render(written(("system", "user"))[0])
    picky = "{{ 'Text0.' if messages[0].content == 'Text0.' else raise_exception('no') }}"
    with pytest.warns(UserWarning, match="leaves out: it is not known what, since it fails with other texts"):
        ChatTemplate(Path("f"), {"chat_template": picky}, SPECIAL).render(written(("user",))[0])


def test_a_long_conversation_has_a_short_outline() -> None:
    """Catches a check for each request: a conversation that goes on as before has the outline that it had."""
    turn = ("user", "calls", "result", "result", "calls", "result", "result", "answer")

    def roles(kinds: tuple[str, ...]) -> str:
        return " ".join(kind.role[0] for kind in outline(written(kinds)[0]))

    assert roles(("system", *turn * 2)) == roles(("system", *turn * 40)) == "s u a t t a u a t t a"
    assert roles(("user", "answer") * 50 + ("user",)) == "u a u"
    assert roles(("user", *("call", "result") * 50)) == roles(("user", *("call", "result") * 2)) == "u a t a t"
    assert roles(("answer",)) == "a"
