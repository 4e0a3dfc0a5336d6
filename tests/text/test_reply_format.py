"""Which parser reads a model's answers. Catches a declaration that is ignored without a word, and calls where none are wanted."""

import pytest

from minirt.errors import InputError, UnsupportedError
from minirt.text.reply import parse
from minirt.text.reply_format import ReplyFormat
from minirt.text.tools import read_tools

TOOLS = read_tools([{"type": "function", "function": {"name": "f"}}])
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
HERMES = "{{ tools }} <tool_call></tool_call> {{ '<think>' ~ x ~ '</think>' }}"
SPEC = {
    "start_anchor": "<bot>",
    "fields": {
        "tool_calls": {"open": "CALL", "close": "END", "content": "json"},
        "content": {},
        "reasoning": {"open": "(", "close": ")"},
    },
}


def read(form: ReplyFormat, text: str, prompt: str = "", tools=TOOLS, choice=None):
    reply = parse(form.parser(prompt, tools, choice), text)
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls]


def test_by_the_chat_template() -> None:
    form = ReplyFormat.choose(HERMES)
    assert (form.tool_calls, form.reasoning, form.response_template) == ("hermes", ("<think>", "</think>"), None)
    assert read(form, f"<think>a</think>b {CALL}") == ("b", "a", [("f", "{}")])
    assert read(form, f"a</think>{CALL}", "x<think>\n") == ("", "a", [("f", "{}")])
    assert ReplyFormat.choose("{{ messages }}") == ReplyFormat.choose(None) == ReplyFormat()
    assert read(ReplyFormat(), f"<think>{CALL}") == (f"<think>{CALL}", "", [])


def test_markers_that_a_decoder_would_leave_out() -> None:
    hermes, llama = ReplyFormat.choose(HERMES), ReplyFormat.choose("<|python_tag|>")
    assert not hermes.needs_special_tokens({"<|im_end|>", "<|python_tag|>"})
    assert hermes.needs_special_tokens({"</think>"})
    assert hermes.needs_special_tokens({"<tool_call>"})
    assert llama.needs_special_tokens({"<|python_tag|>"})
    assert not llama.needs_special_tokens({"<tool_call>", "<think>"})
    assert ReplyFormat.choose(None, SPEC).needs_special_tokens(())
    assert not ReplyFormat().needs_special_tokens({"<tool_call>", "<think>"})
    mistral = ReplyFormat.choose("[TOOL_CALLS][THINK][/THINK]")
    assert all(mistral.needs_special_tokens({marker}) for marker in ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"))


def test_mistral() -> None:
    """Catches reasoning in brackets that is one text with the answer, and an example in the system message that opens it."""
    form, prompt = ReplyFormat.choose("[THINK]{{ t }}[/THINK][TOOL_CALLS]"), "Draft: [THINK]your draft[/THINK]. [INST]Hi[/INST]"
    assert (form.tool_calls, form.reasoning) == ("mistral", ("[THINK]", "[/THINK]"))
    text = "[THINK]<think>a[TOOL_CALLS]f[ARGS]{}[/THINK]b[TOOL_CALLS]f[ARGS]{}"
    assert read(form, text, prompt) == ("b", "<think>a[TOOL_CALLS]f[ARGS]{}", [("f", "{}")])
    assert read(form, "a[/THINK]b", prompt) == ("a[/THINK]b", "", [])
    assert read(form, "a[/THINK]b", prompt + "[THINK]") == ("b", "a", [])


def test_gemma4() -> None:
    """Catches a template that is not recognised, a schema that waits for a channel that is closed already (or does not wait for
    one that comes), and a question about markers that turns thinking on."""
    form = ReplyFormat.choose("{{ '<|channel>thought\\n' }}<channel|> <|tool_call>call:")
    assert form.needs_special_tokens({"<channel|>"})
    assert read(ReplyFormat.choose("<|tool_call>call:", SPEC), "(a)b", "<bot>")[1] == "a", "a declaration comes first"
    on, model, closed = "<bos><|turn>system\n<|think|>\nBe<turn|>\n", "<|turn>model\n", "<|channel>thought\n<channel|>"
    asked = "<bos><|turn>user\nWhat is <|think|>?<turn|>\n" + model
    after = on + model + "<|tool_call>call:f{}<tool_call|><|tool_response>response:f{}<tool_response|>"
    expected = {
        on + model: True, after: True, on + model + "<|channel>thought\n": True, on + model + closed: False,
        "<bos>" + model + closed: False, asked.replace("user\nWhat is", "system\nOff<turn|>\n"): False,
    }  # fmt: skip
    assert {prompt: form.reasons_first(prompt) for prompt in expected} == expected
    assert not form.reasons_first(on + model, "continued")
    call = '<|tool_call>call:f{s:<|"|>"x"<|"|>}<tool_call|>'
    assert read(form, f"<|channel>thought\nHm\n<channel|>So {call}", on + model) == ("So", "Hm", [("f", '{"s": "\\"x\\""}')])
    assert read(ReplyFormat.choose(None, SPEC, "gemma4"), call, on + model)[2] == [("f", '{"s": "\\"x\\""}')]
    assert read(form, f"Hm<channel|>{call}", on + model + "<|channel>thought\n")[1] == "Hm"
    assert read(form, "<|channel>thought\nHm\n<channel|>{}", after, choice="required")[1] == "Hm"


def test_a_continued_message() -> None:
    form = ReplyFormat.choose(HERMES)
    prompt = "what is <think>?<bot><think>I think"
    reply = parse(form.parser(prompt, TOOLS, None, "<think>I think"), " so</think>b")
    assert (reply.reasoning, reply.content) == ("so", "b")
    reply = parse(form.parser(prompt, TOOLS, None, "<think>I</think> b"), " c")
    assert (reply.reasoning, reply.content) == ("", " c")


def test_by_name() -> None:
    assert ReplyFormat.choose(HERMES, SPEC, "qwen3_coder").tool_calls == "qwen3_coder"
    none = ReplyFormat.choose(HERMES, SPEC, "none")
    assert read(none, f"<think>a</think>{CALL}") == (CALL, "a", [])
    with pytest.raises(InputError, match="auto, none, response_template, hermes"):
        ReplyFormat.choose(HERMES, None, "kimi")
    with pytest.raises(UnsupportedError, match="response_template: not an object"):
        ReplyFormat.choose(HERMES, None, "response_template")


def test_the_tokenizers_own_declaration_is_preferred() -> None:
    form = ReplyFormat.choose(HERMES, SPEC)
    text = '(a)b CALL{"name": "f", "arguments": {"x": 1}}END'
    assert read(form, text) == ("b", "a", [("f", '{"x": 1}')])
    assert read(form, text[1:], "<bot>(") == ("b", "a", [("f", '{"x": 1}')])
    damaged = ReplyFormat.choose(HERMES, SPEC | {"version": 9})
    assert damaged.tool_calls == "hermes"
    assert "response_template.version: unknown version" in damaged.notes[0]


def test_the_choice_of_tools() -> None:
    for form in (ReplyFormat.choose(HERMES), ReplyFormat.choose(HERMES, SPEC)):
        own = CALL if form.tool_calls else 'CALL{"name": "f", "arguments": {}}END'
        assert read(form, own)[2] == read(form, own, choice="auto")[2] == [("f", "{}")]
        assert read(form, own, choice="none") == read(form, own, tools=[]) == (own, "", [])
        assert read(form, '[{"name": "f", "arguments": {"a": 1}}]', choice="required") == ("", "", [("f", '{"a": 1}')])
        named = {"type": "function", "function": {"name": "f"}}
        assert read(form, ' {"a": 1}', choice=named) == ("", "", [("f", '{"a": 1}')])
        with pytest.raises(InputError, match="tool_choice: no such tool"):
            form.parser("", TOOLS, {"type": "function", "function": {"name": "g"}})
        with pytest.raises(InputError, match="tool_choice: needs tools"):
            form.parser("", [], "required")
        text = '<think>x</think>[{"name": "f", "arguments": {}}]'
        assert read(form, text, choice="required") == ("", "x", [("f", "{}")])


def test_calls_that_the_model_makes_before_its_reasoning_ends() -> None:
    """Qwen3.5 leaves out `</think>` at times. Not where no calls are looked for, nor in other formats."""
    coder = ReplyFormat.choose(HERMES.replace("<tool_call>", "<tool_call><function=f><parameter=p>"))
    call, prompt = "<tool_call>\n<function=f>\n</function>\n</tool_call>", "<think>\n"
    assert read(coder, f"a\n{call}", prompt) == ("", "a", [("f", "{}")])
    assert read(coder, f"a\n{call}", prompt, choice="none") == ("", f"a\n{call}", [])
    assert read(coder, f"a\n{call}", prompt, tools=[]) == ("", f"a\n{call}", [])
    assert read(ReplyFormat.choose(HERMES), f"a\n{CALL}", prompt) == ("", f"a\n{CALL}", [])
