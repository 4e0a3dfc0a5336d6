"""Conversations with tools, continued messages and template variables, against transformers; and what is refused by name.

Catches arguments that reach a template as text, a final message that is closed, and fields that vanish without a word.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.tiny import add_tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from minirt.errors import InputError, TokenizerError
from minirt.text.chat_template import ChatTemplate
from minirt.text.messages import checked_messages
from minirt.text.tokenizer import Tokenizer

# In the style of Qwen's: tools in the system message, JSON calls, earlier reasoning left out, a block that can be opened.
TEMPLATE = (Path(__file__).parents[1] / "support" / "templates" / "qwen.jinja").read_text(encoding="utf-8")[:-1]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}}}
]
ARGUMENTS = {"a": [1, None, "<é>"], "b": {"c": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
    {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "4"},
    {"role": "assistant", "content": "  It is", "reasoning": "Hm."},
]


def ours(chat, template=TEMPLATE, **options) -> str:
    return ChatTemplate(Path("folder"), {"chat_template": template}).render(chat, **options)


def theirs(chat, tools=None, template=TEMPLATE, **options) -> str:
    """transformers wants arguments as objects, and an empty content instead of none."""
    plain = json.loads(json.dumps(chat))
    for message in plain:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return render_jinja_template([plain], tools=tools, chat_template=template, **options)[0][0]


def test_tools_and_variables_as_in_transformers() -> None:
    for tools in (None, TOOLS):
        for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            expected = theirs(CHAT, tools, add_generation_prompt=True, **thinking)
            assert ours(CHAT, tools=tools, variables=thinking) == expected
    text = ours(CHAT, tools=TOOLS)
    assert f'"arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}' in text
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert ours(CHAT, add_generation_prompt=False) == theirs(CHAT) == ours(CHAT).removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["It is", "It is ", " a\n\n", "{{ x }} <|im_end|>"])
@pytest.mark.parametrize(
    "template", [TEMPLATE, TEMPLATE.replace("message.content }}\n{%- for", "message.content | trim }}\n{%- for")]
)
def test_a_final_message_is_continued_as_in_transformers(content, template) -> None:
    chat = [*CHAT[:3], {"role": "assistant", "content": content}]
    expected = theirs(chat, template=template, continue_final_message=True)
    text = ours(chat, template, continue_final_message=True, add_generation_prompt=False)
    assert text == expected
    assert text.rstrip().endswith(content.strip())
    assert chat[-1]["content"] == content
    assert "OF_TEXT" not in text


def test_continuing_what_the_template_does_not_write() -> None:
    with pytest.raises(InputError, match="does not show the last message"):
        ours(
            [{"role": "user", "content": "x"}], "{{ messages[0].role }}", continue_final_message=True,
            add_generation_prompt=False,
        )  # fmt: skip
    with pytest.raises(InputError, match="excludes add_generation_prompt"):
        ours(CHAT, continue_final_message=True)


def test_parts_of_type_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb\n"}]
    assert checked_messages([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_reasoning_has_one_name() -> None:
    for name in ("reasoning", "reasoning_content", "thinking"):
        (message,) = checked_messages([{"role": "assistant", "content": "a", name: "b", "name": "n"}])
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "b", "name": "n"}


def call(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL | changes]}


@pytest.mark.parametrize(("message", "where", "word"), [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
            "image_url",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "messages[1].content[1].type",
            "audio",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "NoneType"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]", "str"),
        ({"role": "user", "content": 5}, "messages[1].content", "int"),
        ({"role": "user"}, "messages[1].content", "NoneType"),
        ({"content": "a"}, "messages[1]", "no role"),
        ({"role": ["user"], "content": "a"}, "messages[1].role", "list"),
        ({"role": "user", "content": "a", "contents": "b"}, "messages[1].contents", "unknown"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, "messages[1].audio", "not supported"),
        ({"role": "user", "content": "a", "name": 3}, "messages[1].name", "int"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls", "dict"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls[0]", "not a tool call"),
        (call(type="custom"), "messages[1].tool_calls[0].type", "custom"),
        (call(id=7), "messages[1].tool_calls[0].id", "int"),
    (call(function={"name": "f", "arguments": [1]}), "messages[1].tool_calls[0].function.arguments", "not a JSON object"),
    (call(function={"name": "f", "arguments": {"a": {1, 2}}}), "messages[1].tool_calls[0].function.arguments", "not JSON"),
        (call(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name", "NoneType"),
])  # fmt: skip
def test_what_is_wrong_is_named(message, where, word) -> None:
    with pytest.raises(InputError, match=word) as caught:
        checked_messages([{"role": "user", "content": "Hi"}, message])
    assert caught.value.where == where


def test_arguments_may_be_empty_or_an_object() -> None:
    for arguments, expected in (("", {}), (None, {}), ({"a": 1}, {"a": 1})):
        (message,) = checked_messages([call(function={"name": "f", "arguments": arguments})])
        assert message["tool_calls"][0]["function"]["arguments"] == expected
        assert message["content"] == ""


def test_an_empty_list_of_calls_is_no_call() -> None:
    """Catches an empty list that a template takes for a call."""
    for calls in ([], None):
        (message,) = checked_messages([{"role": "assistant", "content": "a", "tool_calls": calls}])
        assert message == {"role": "assistant", "content": "a"}
    single = "{% if 'tool_calls' in messages[0] and messages[0].tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    assert ours([{"role": "assistant", "content": "b", "tool_calls": []}], single + "{% endif %}{{ messages[0].content }}") == "b"


# In the style of DeepSeek-R1's, Qwen2.5's, and Qwen3-Coder's templates, as code and as filter.
CALLS = "{% for c in messages[0].tool_calls %}{{ c.function.name }}:X{% endfor %}"
SHOWN = "{% for k, v in Y %}{{ k }}={{ v }}{% endfor %}"
STYLES = {
    "text": CALLS.replace("X", "{{ c.function.arguments }}"),
    "tojson": CALLS.replace("X", "{{ c.function.arguments | tojson }}"),
    "items()": CALLS.replace("X", SHOWN.replace("Y", "c.function.arguments.items()")),
    "items": CALLS.replace("X", SHOWN.replace("Y", "c.function.arguments | items")),
}


NO_OBJECTS = ['{"city": "Os', "{'city': 'Oslo'}", "[1]", '"a"', "3", "[" * 99999, "Oslo"]
NOT_SENDABLE = ['{"n": 1e999}', '{"s": "\\ud83d"}']  # JSON that a template could not write again


@pytest.mark.parametrize("text", NO_OBJECTS + NOT_SENDABLE)
def test_arguments_that_are_no_object_stay_texts(text: str) -> None:
    """An answer that was cut off, or whose call is wrong, must not end the conversation: each style shows its text."""
    expected = {"text": text, "tojson": json.dumps(text), "items()": f"arguments={text}", "items": f"arguments={text}"}
    given = [call(function={"name": "f", "arguments": text})]
    for style, template in STYLES.items():
        assert ours(given, template, add_generation_prompt=False) == f"f:{expected[style]}", style


def test_a_template_that_fails_for_another_reason_fails() -> None:
    """The second attempt, with objects, is not a way around the template's own errors."""
    with pytest.raises(TokenizerError, match="no calls, please"):
        ours([call(function={"name": "f", "arguments": "{"})], "{{ raise_exception('no calls, please') }}")


def test_an_answer_of_reasoning_alone_goes_back() -> None:
    """Its content is null: it was cut off before there was any."""
    (message,) = checked_messages([{"role": "assistant", "content": None, "reasoning": "Hm"}])
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Hm"}


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "documents", "bos_token"])
def test_a_request_cannot_replace_what_the_template_gets(name: str) -> None:
    chat = ChatTemplate(Path("f"), {"chat_template": "x"}, {"bos_token": "<s>"})
    with pytest.raises(InputError, match=f"chat_template_kwargs: .* found {name}"):
        chat.render(CHAT, variables={name: "{{ 1 }}"})


def test_values_that_are_no_json_are_named() -> None:
    endless: list = []
    endless.append(endless)
    for value in (object(), endless, {1, 2}):
        with pytest.raises(InputError, match="chat_template_kwargs: not a JSON value"):
            ours(CHAT, variables={"x": value})
    with pytest.raises(InputError, match="tools: not a JSON value"):
        ours(CHAT, tools=[{"a": object()}])


def test_a_template_for_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    for form in (named, {own["name"]: own["template"] for own in named}):
        assert ours(CHAT, form) == ours(CHAT, form, tools=[]) == "plain"
        assert ours(CHAT, form, tools=TOOLS) == "tools 1"
    for wrong in ({"name": "tool_use", "template": 5}, named[0], named[1]):
        with pytest.raises(TokenizerError, match="bad chat_template"):
            ChatTemplate(Path("f"), {"chat_template": [*named, wrong]})


PLACES: dict[str, dict[str, str]] = {
    "only the newer files": {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "B"},
    "the default one among others": {"additional_chat_templates/default.jinja": "A", "additional_chat_templates/rag.jinja": "C"},
    "both names of the default one": {"additional_chat_templates/default.jinja": "A", "chat_template.jinja": "B"},
    "only one for tools": {"additional_chat_templates/tool_use.jinja": "A"},
    "no named one": {"chat_template.jinja": "A", "additional_chat_templates/README.md": "C"},
}
STATED: dict[str, Any] = {
    "nothing": None, "a text": "S", "a list": [{"name": "default", "template": "S"}, {"name": "tool_use", "template": "T"}]
}  # fmt: skip


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("place", PLACES)
def test_templates_in_files_as_in_transformers(place: str, stated: str, tmp_path: Path) -> None:
    """Catches a template for tools that is not read, and one of tokenizer_config.json that is joined with those of files."""
    add_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": STATED[stated]}))
    for name, text in PLACES[place].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        own = Tokenizer.load(tmp_path) or pytest.fail("no tokenizer")
    ignored = [w for w in seen if "its chat template is ignored, since" in str(w.message)]
    assert len(ignored) == (stated != "nothing")
    other = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        try:
            expected = other.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools, tokenize=False)
        except ValueError:  # there is no default one
            with pytest.raises(TokenizerError, match="there is no chat template"):
                own.render_chat([{"role": "user", "content": "Hi"}], tools=tools)
            continue
        assert own.render_chat([{"role": "user", "content": "Hi"}], tools=tools) == expected


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    """Catches a layout of named templates that transformers writes and minirt does not read."""
    other = AutoTokenizer.from_pretrained(add_tokenizer(tmp_path, None))
    content = "{{ messages[0].content }}"
    other.chat_template = {"default": f"plain {content}", "tool_use": "{{ tools | length }} " + content}
    other.save_pretrained(tmp_path / "saved")
    own = Tokenizer.load(tmp_path / "saved") or pytest.fail("no tokenizer")
    for tools in (None, TOOLS):
        expected = other.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools, tokenize=False)
        assert own.render_chat([{"role": "user", "content": "Hi"}], tools=tools) == expected
    assert own.tool_template == other.chat_template["tool_use"]


def test_the_older_file_of_processors_is_the_last_one(tmp_path: Path) -> None:
    """Catches a template that only chat_template.json has, and one that wins over newer files or is ignored without a word."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old {{ messages[0].content }}"}))
    assert ChatTemplate(tmp_path, {}).render(CHAT) == "old Hi"
    with pytest.warns(UserWarning, match=r"chat_template\.json: .* ignored, since tokenizer_config\.json has another one"):
        assert ChatTemplate(tmp_path, {"chat_template": "new"}).render(CHAT) == "new"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatTemplate(tmp_path, {"chat_template": "old {{ messages[0].content }}\n"})
