"""Templates that take messages in different forms, against transformers, and the tokens that end their answers.

The templates are short ones in the style of those of published models. transformers renders messages as they are given, so each
test writes the form that its template takes by hand.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from minirt.errors import TokenizerError
from minirt.text import template_probe
from minirt.text.chat_template import ChatTemplate
from minirt.text.rendering import Renderer

ARGUMENTS = '{"city":  "Ōslo \\"x\\"", "n": [1, null, 2.50]}'  # parsed and written again, it is another text
ID = "call_0123456789abcdef01234567"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "", "parameters": {"type": "object"}}}]


def chat() -> list[dict[str, Any]]:
    """A conversation with a call and its result, as clients of OpenAI's API send it."""
    call = {"id": ID, "type": "function", "function": {"name": "rain", "arguments": ARGUMENTS}}
    return [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": ID, "content": "no"}, {"role": "assistant", "content": "No.", "tool_calls": []},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip


def given(
    *, text=False, null=False, parts=False, named=False, reasoning="reasoning_content", call_id=ID
) -> list[dict[str, Any]]:
    """The conversation in the form that a template takes."""
    messages = chat()
    call = messages[2]["tool_calls"][0]
    call["id"] = messages[3]["tool_call_id"] = call_id
    if not text:
        call["function"]["arguments"] = json.loads(ARGUMENTS)
    messages[2]["content"] = None if null else ""
    if reasoning == "content":
        messages[2]["content"] = [{"type": "thinking", "thinking": messages[2].pop("reasoning")}, {"type": "text", "text": ""}]
    else:
        messages[2][reasoning] = messages[2].pop("reasoning")
    if named:
        messages[3]["name"] = "rain"
    del messages[4]["tool_calls"]
    if parts:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def loop(assistant: str, tool: str = "<tool>{{ m.content }}", other: str = "<{{ m.role }}>{{ m.content }}") -> str:
    """A template with these parts for the messages of the assistant, of tools, and all others."""
    ends = "{% if add_generation_prompt %}<assistant>{% endif %}"
    branches = f"{{% if m.role == 'assistant' %}}{assistant}{{% elif m.role == 'tool' %}}{tool}{{% else %}}{other}{{% endif %}}"
    return "{{ bos_token }}{% for m in messages %}" + branches + "{% endfor %}" + ends


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
TEXT_CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}"
MISTRAL = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[{{ c.function | tojson }}, {{ c.id }}]{% endfor %}"
)
PARTS = "<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
THINKS = "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "objects": (loop("<assistant>{{ m.content }}" + CALLS), {}),
    "texts or objects": (
        loop("{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
             "<call>{{ a if a is string else a | tojson }}{% endfor %}<assistant>{{ m.content }}"),
        {},
    ),
    "walks through objects": (
        loop("<assistant>{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
             "{% for k, v in c.function.arguments.items() %}<k>{{ k }}<v>{{ v | tojson }}{% endfor %}{% endfor %}"),
        {},
    ),
    "DeepSeek-R1: joins texts": (loop("<assistant>{{ m.content or '' }}" + TEXT_CALLS), {"text": True}),
    "writes objects in Python's form": (
        loop("{% for c in m.tool_calls or [] %}{\"a\": {{ c.function.arguments }}}{% endfor %}<assistant>{{ m.content }}"),
        {"text": True},
    ),
    "DeepSeek-V2.5: a call has no content": (
        loop("{% if m.content is none %}" + TEXT_CALLS + "{% else %}<assistant>{{ m.content }}{% endif %}"),
        {"text": True, "null": True},
    ),
    "Functionary: an empty block before a call": (
        loop("{% if m.content is not none %}<all>{{ m.content }}{% endif %}" + CALLS), {"null": True},
    ),
    "GLM: null would be written": (loop("<think></think>{{ m.content }}" + CALLS), {}),
    "Mistral: ids of 9 characters": (loop("<assistant>{{ m.content }}" + MISTRAL, "[{{ m.tool_call_id }}]{{ m.content }}"), {}),
    "Hermes: results have names": (
        loop("<assistant>{{ m.content }}" + CALLS,
             "{% if not m.name %}{{ raise_exception('no name') }}{% endif %}<tool>{{ m.name }} {{ m.content }}"),
        {"named": True},
    ),
    "Kimi: results may have names": (
        loop("<assistant>{{ m.content }}" + CALLS, "<{{ m.name or m.role }}>{{ m.tool_call_id }} {{ m.content }}"), {},
    ),
    "SmolVLM: parts": (loop(PARTS + CALLS, PARTS, PARTS), {"parts": True}),
    "texts or parts": (
        loop("<assistant>{{ m.content }}" + CALLS, other="{% if m.content is string %}{{ m.content }}{% else %}P{% endif %}"), {},
    ),
    "Command A: thinking": (loop(THINKS + CALLS), {"reasoning": "thinking"}),
    "Ministral 3: reasoning is a part of the content": (
        loop("{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'thinking' %}"
             "[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}" + CALLS),
        {"reasoning": "content"},
    ),
    "reasoning_content": (loop("{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}" + CALLS), {}),
    "a call without its arguments": (
        loop("{% if m.tool_calls and m.content is none %}<call>{{ m.tool_calls[0].function.name }}"
             "{% else %}{{ m.content }}{% endif %}"),
        {"null": True},
    ),
    "only the first call, without results": (
        loop("{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}{% endif %}", ""),
        {"text": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_each_template_gets_the_form_that_it_takes(name: str) -> None:
    """Catches one form for all templates: arguments as objects where texts are joined, "" where a call has null, long ids,
    results without names, texts where parts are read, reasoning under another name, and an empty list of tool calls."""
    template, form = STYLES[name]
    sent, own = chat(), ChatTemplate(Path("f"), {"chat_template": template}, SPECIAL)
    before = copy.deepcopy(sent)
    text = own.render(sent, tools=TOOLS)
    if "Mistral" in name:
        (short,) = {part.partition("]")[0] for part in text.split("[")[-1:]}
        assert len(short) == 9
        assert short.isalnum()
        form = form | {"call_id": short}
    expected = render_jinja_template(
        [given(**form)], tools=TOOLS, chat_template=template, add_generation_prompt=True, **SPECIAL
    )[0][0]  # fmt: skip
    assert text == expected
    assert sent == before, "the caller's messages"


def test_ids_of_the_right_length_stay_and_others_differ() -> None:
    """Catches two calls that get one id, and a change of ids that the template takes."""
    own = ChatTemplate(Path("f"), {"chat_template": STYLES["Mistral: ids of 9 characters"][0]}, SPECIAL)

    def rendered(*ids: str) -> str:
        function = {"name": "rain", "arguments": "{}"}
        calls = [{"id": text, "type": "function", "function": function} for text in ids]
        results = [{"role": "tool", "tool_call_id": text, "content": "no"} for text in ids]
        return own.render([{"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": calls}, *results])

    assert rendered("abcDEF123").count("abcDEF123") == 2
    text = rendered("functions.rain:0", "functions.rain:1")
    first, second = (part.partition("]")[0] for part in text.split("[")[-2:])
    assert first != second
    assert text.count(first) == text.count(second) == 2


def test_continuing_a_message_of_parts_and_a_call() -> None:
    """Catches a mark that is added to a list or to null."""
    parts = ChatTemplate(Path("f"), {"chat_template": STYLES["SmolVLM: parts"][0]}, SPECIAL)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No, "}]
    assert parts.render(messages, **options) == "<s><user>Rain?<assistant>No, "
    thinks = ChatTemplate(Path("f"), {"chat_template": STYLES["Ministral 3: reasoning is a part of the content"][0]}, SPECIAL)
    messages[1]["reasoning"] = "Hm."
    assert thinks.render(messages, **options) == "<s><user>Rain?[THINK]Hm.[/THINK]No, "
    null = ChatTemplate(Path("f"), {"chat_template": STYLES["Functionary: an empty block before a call"][0]}, SPECIAL)
    assert null.render(chat()[:3], **options) == "<s><system>Be brief.<user>Rain?<all>"


def test_a_template_is_asked_once_and_not_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a probe for each conversation, and one that grows: a template that shows nothing of calls is asked most."""
    count, render = [], Renderer.render
    monkeypatch.setattr(Renderer, "render", lambda own, names: count.append(1) or render(own, names))
    shows_nothing = loop("{% if m.tool_calls %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thought }}{% endif %}")
    own = ChatTemplate(Path("f"), {"chat_template": shows_nothing}, SPECIAL)
    for _ in range(3):
        own.render(chat())
    assert own.end_of_turn({"<x>"}) is None
    assert len(count) <= 3 + 30


@pytest.mark.parametrize("change", ["seconds", "stopped"])
def test_a_probe_that_takes_too_long_is_told(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a form that is guessed without a word, and a load that waits for each rendering of a hostile template."""
    if change == "seconds":
        monkeypatch.setattr(template_probe, "MAX_SECONDS", -1)
        slow = loop("{{ m.content }}")
    else:  # all texts but that of the user
        slow = "{% if 'user-' in messages[0].content %}{{ 'a' * 10 ** 10 }}{% endif %}" + loop("{{ m.content }}")
    own = ChatTemplate(Path("f"), {"chat_template": slow}, SPECIAL)
    with pytest.warns(UserWarning, match="is not known which form of messages it takes") as seen:
        assert own.end_of_turn({"</s>"}) is None
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own.render([{"role": "user", "content": "Hi"}]) == "<s><user>Hi<assistant>"


def test_a_template_that_leaves_system_messages_out() -> None:
    """Catches a system message that the model never gets, without a word; one that is a template's error is that error."""
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    own = ChatTemplate(Path("f"), {"chat_template": silent}, SPECIAL)
    with pytest.warns(UserWarning, match="leaves out: content of system at the beginning"):
        assert own.render([system, user]) == "Hi"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + silent
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own.render([user]) == "Hi"
        with pytest.raises(TokenizerError, match="no system"):
            ChatTemplate(Path("f"), {"chat_template": refuses}, SPECIAL).render([system, user])
        assert "Be brief." in ChatTemplate(Path("f"), {"chat_template": loop("")}, SPECIAL).render([system, user])


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ENDS: dict[str, tuple[str, str | None]] = {
    "ChatML": (CHATML, "<|im_end|>"),
    "ChatML with a system message of its own": ("<|im_start|>system\nHi<|im_end|>\n" + CHATML, "<|im_end|>"),
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "Phi-3: another token at the end of all": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}", "<|end|>",
    ),
    "Command R7B: two tokens": (
        "{% for m in messages %}<|START|>{{ m.role }}{% if m.role != 'user' %}<|RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
        "{% else %}{{ m.content }}{% endif %}<|END|>{% endfor %}", "<|END|>",
    ),
    "Command A: always the header of an answer": (
        "{{ bos_token }}{% for m in messages %}<|START|>{{ m.role }}{{ m.content }}<|END|>{% endfor %}<|START|>bot", "<|END|>",
    ),
    "OpenChat: roles are texts": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end_of_turn|>{% endfor %}", "<|end_of_turn|>",
    ),
    "gpt-oss: earlier answers end otherwise": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}", None,
    ),
    "the reasoning ends with the same token": (
        "{% for m in messages %}<|begin|>{{ m.role }}{% if m.reasoning_content %}{{ m.reasoning_content }}<|end|><|begin|>"
        "{% endif %}{{ m.content }}<|end|>{% endfor %}", None,
    ),
    "GLM: the next turn ends an answer": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}", None),
    "no token": ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}", None),
    "a text before the token": ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }} END<|end|>{% endfor %}", None),
    "it fails": ("{{ raise_exception('no') }}", None),
}  # fmt: skip
TOKENS = {
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|START|>", "<|RESPONSE|>",
    "<|END_RESPONSE|>", "<|END|>", "<|end_of_turn|>", "<|start|>", "<|message|>", "<|return|>", "<|begin|>", "[INST]", "[/INST]",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_token_at_the_end_of_an_answer(name: str) -> None:
    """Catches a token that opens a turn, that ends only the last message, or that ends a part of an answer: with it as an end,
    answers would be cut off."""
    template, expected = ENDS[name]
    assert ChatTemplate(Path("f"), {"chat_template": template}, SPECIAL).end_of_turn(TOKENS) == expected
    assert ChatTemplate(Path("f"), {"chat_template": template}, SPECIAL).end_of_turn(()) is None
