# ruff: noqa: E501  (model outputs stand on one line each)
"""Tool calls in the text of models: hand-written outputs in each format, in every possible cut.

Catches calls that depend on where the text is cut, markers that leak into the content, content that waits without need, and
damaged outputs that raise or vanish.
"""

import itertools
import json
import random

import pytest

from minirt.text.reply import ArgumentsDelta, ContentDelta, ToolCallStart, collect, parse
from minirt.text.tool_calls import FORMATS, CallListParser, NamedCallParser, detect_format
from minirt.text.tools import read_tools

TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
            "at": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "tags": {"type": "array"}, "o": {"type": "object"}}}}},
        {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object", "properties": {
            "path": {"type": "string"}, "content": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "now"}},
    ]
)  # fmt: skip
CODE = 'if a < b and "x" in </p>:\n    print("<param>\\n")\n\treturn {"é": "👧"}'

CODER, CODER_END = "<tool_call>\n<function=get_weather>\n", "\n</function>\n</tool_call>"

# format, model's text, content, calls as (name, arguments)
GOOD = [
    ("hermes", "Just text, with {\"name\": 1} and <tool_cal and <b>.\n\n", None, []),
    ("hermes", "", "", []),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [("get_weather", '{"city": "Paris"}')]),
    ("hermes", 'Let me see.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name":"get_weather","arguments":{"city":"Zürich","days":3}}\n</tool_call>\n',
     "Let me see.", [("now", "{}"), ("get_weather", '{"city":"Zürich","days":3}')]),
    ("hermes", '<tool_call>{"arguments": {"city": "a"}, "name": "get_weather"}</tool_call>', "", [("get_weather", '{"city": "a"}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', " done", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": [1, \\"}\\"]}"}</tool_call>', "", [("now", '{"a": [1, "}"]}')]),
    ("hermes", '<tool_call>{"type": "function", "n": -1.5e3 , "name": "now", "arguments": {"a": {"b": [true, null, "\\u00e9</tool_call>"]}}}</tool_call>',
     "", [("now", '{"a": {"b": [true, null, "\\u00e9</tool_call>"]}}')]),
    ("hermes", '<tool_call>{"name": "write_file", "arguments": {"content": "a\nb\tc"}}</tool_call>', "", [("write_file", '{"content": "a\\nb\\tc"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", "{}")]),  # the model ended without the last marker
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_c', "", [("now", "{}"), ("now", '{"a": 1}')]),
    ("qwen3_coder", "No call: a < b, <tool, <function, </parameter>", None, []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     "", [("get_weather", '{"city": "Paris", "days": 3}')]),
    ("qwen3_coder", "I will.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>\nBye", "I will.\nBye",
     [("now", "{}"), ("now", "{}")]),
    ("qwen3_coder", f"<tool_call>\n<function=write_file>\n<parameter=path>\n/a b\n</parameter>\n<parameter=content>\n{CODE}\n\n</parameter>\n</function>\n</tool_call>",
     "", [("write_file", json.dumps({"path": "/a b", "content": CODE + "\n"}, ensure_ascii=False))]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=exact>True</parameter><parameter=at>None</parameter><parameter=days>x</parameter>"
     '<parameter=tags>\n["a", {"b": 1}]\n</parameter><parameter=o>[1]</parameter><parameter=other>5</parameter><parameter=city></parameter></function></tool_call>',
     "", [("get_weather", '{"exact": true, "at": null, "days": "x", "tags": ["a", {"b": 1}], "o": "[1]", "other": "5", "city": ""}')]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\n\n Rome \n\n</parameter>\n</function>", "", [("get_weather", '{"city": "\\n Rome \\n"}')]),
    ("qwen3_coder", "<tool_call><function=unknown><parameter=a>1</parameter></function></tool_call>", "", [("unknown", '{"a": "1"}')]),
    # the model leaves out <tool_call>, but writes </tool_call>
    ("qwen3_coder", "Sure.\n<function=now>\n</function>\n</tool_call>\n\nBye", "Sure.\n\nBye", [("now", "{}")]),
    ("qwen3_coder", "<function=now></function>\n<function=now></function> </tool_call>", "", [("now", "{}"), ("now", "{}")]),
    # several in one tag
    ("hermes", '<tool_call>\n{"name": "now"}\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> x', " x", [("now", "{}"), ("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"} {"nam": 1}</tool_call>', ' {"nam": 1}</tool_call>', [("now", "{}")]),
    ("qwen3_coder", "<tool_call><function=now></function>\n<function=unknown>\n</function>\n</tool_call>", "", [("now", "{}"), ("unknown", "{}")]),
    # arguments keep their digits and escapes, and are JSON
    ("qwen3_coder", '<tool_call><function=get_weather><parameter=tags>["\\ud83d", 1e999, 12345678901234567890, 0.12345678901234567890]</parameter></function></tool_call>',
     "", [("get_weather", '{"tags": ["\\ud83d", 1e999, 12345678901234567890, 0.12345678901234567890]}')]),
    ("qwen3_coder", '<tool_call><function=get_weather><parameter=o>{"\\udc00": "a\nb"}</parameter><parameter=at>0.12345678901234567890</parameter></function></tool_call>',
     "", [("get_weather", '{"o": {"\\udc00": "a\\nb"}, "at": 0.12345678901234567890}')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=tags>[NaN]</parameter><parameter=o>{'a': True}</parameter></function></tool_call>",
     "", [("get_weather", '{"tags": "[NaN]", "o": "{\'a\': True}"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}</tool_call>', "", [("now", '{"a": "\\ud83d"}')]),
    ("llama3_json", "Hello {\"name\": \"now\", \"parameters\": {}}", None, []),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", [("get_weather", '{"city": "Oslo"}')]),
    ("llama3_json", '\n<|python_tag|>{"name": "now", "parameters": {}}; {"type": "function", "name": "get_weather", "parameters": {"days": 1}}\n', "",
     [("now", "{}"), ("get_weather", '{"days": 1}')]),
    ("llama3_json", 'Sure. <|python_tag|>{"name": "now", "arguments": {}}', "Sure.", [("now", "{}")]),
    ("llama3_json", '{"parameters": {"days": 1}, "name": "get_weather"} and more', " and more", [("get_weather", '{"days": 1}')]),
    # Mistral: version 13 and Ministral 3; version 11, with ids; versions 3 and 7, a list
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [("get_weather", '{"city": "Paris"}')]),
    ("mistral", 'I look.\n[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather [ARGS] {"city": "[TOOL_CALLS]x[ARGS]{}\n"}', "I look.",
     [("now", "{}"), ("get_weather", '{"city": "[TOOL_CALLS]x[ARGS]{}\\n"}')]),
    ("mistral", '[TOOL_CALLS]now[CALL_ID]VvvODy9mT[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]b[ARGS]{}\n', "", [("now", '{"a": 1}'), ("now", "{}")]),
    ("mistral", '[TOOL_CALLS]now{"a": 1} and more', " and more", [("now", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "D681PevKs"}, {"name": "get_weather", "arguments": {"days": 1}}]', "",
     [("now", "{}"), ("get_weather", '{"days": 1}')]),
    ("mistral", "An [INST] and a [TOOL_CALL, [ARGS]{}\n", None, []),
    # a parameter or a function that is not closed
    ("qwen3_coder", CODER + '<parameter=o>\n{"a": true}' + CODER_END, "", [("get_weather", '{"o": {"a": true}}')]),
    ("qwen3_coder", CODER + "<parameter=city>\nRome\n<parameter=days>\n3" + CODER_END + "\n\n" + CODER + "<parameter=city>Oslo</function></tool_call>", "",
     [("get_weather", '{"city": "Rome", "days": 3}'), ("get_weather", '{"city": "Oslo"}')]),
    ("qwen3_coder", CODER + "<parameter=city>\n<parameter=days>\n3\n</parameter>\n</tool_call>\nBye", "\nBye", [("get_weather", '{"city": "", "days": 3}')]),
    ("qwen3_coder", CODER + "<parameter=city>\nRome\n</function>\n</tool_", "", [("get_weather", '{"city": "Rome"}')]),
    # tags that a value quotes
    *(("qwen3_coder", f"{CODER}<parameter=city>\n{value}\n</parameter>{CODER_END}", "", [("get_weather", json.dumps({"city": value}))]) for value in (
        "a </function> b </tool_call> c", "x\n</function>\n</tool_call>", "x\n</function>\n</tool_call>\nthen <tool_call>", "a <parameter=days> b",
        "<parameter=city>\n<parameter=other>\n<parameter=day\n>", "a\n<parameter=\n</function" + "\n" * 120 + "</tool_call>")),
]  # fmt: skip
# What is no call, or damaged: (format, text, content, calls)
BAD = [
    ("hermes", "<tool_call>", None, []),
    ("hermes", '<tool_call>[{"name": "now"}]</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "now", "argu', None, []),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    ("hermes", 'x\n<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>', "x\n<tool_call>", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1, }}</tool_call> x', "}}</tool_call> x", [("now", '{"a": 1, ')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', "1}}</tool_call>", [("now", '{"a": 0')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "", [("now", '{"a": "b')]),  # the text ended too early
    ("hermes", '<tool_call>{"x": ' + "[" * 300, None, []),
    ("qwen3_coder", "<tool_call>\n{\"name\": \"now\"}</tool_call>", None, []),
    ("qwen3_coder", "<tool_call><function=now><parameter=a<b>", None, []),
    ("qwen3_coder", "Write <function=unknown> or <function=nowhere>", None, []),
    ("qwen3_coder", "<tool_call><function=" + "a" * 300, None, []),
    ("qwen3_coder", "<tool_call><function=now><parameter=a>1</parameter>?</function></tool_call>", "?</function></tool_call>", [("now", '{"a": "1"')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Pa", "", [("get_weather", '{"city": "Pa')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>1", "1", [("get_weather", '{"days": ')]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>1</parameter></func", "</func", [("get_weather", '{"days": 1')]),
    ("llama3_json", '{"name": "Bob", "age": 3}', None, []),
    ("llama3_json", '{"name": "now", "parameters": {}', "", [("now", "{}")]),
    ("llama3_json", "<|python_tag|>print(1)", None, []),
    ("llama3_json", '{"name": "now", "parameters": {}} {"name": "Bob"}', ' {"name": "Bob"}', [("now", "{}")]),
    ("llama3_json", " <|python", None, []),
    ("qwen3_coder", CODER + "<parameter=city>\nRome" + CODER_END + "\nBye", "", [("get_weather", '{"city": "Rome\\n</function>\\n</tool_call>\\nBye')]),
    ("mistral", "[TOOL_CALLS]", None, []),
    ("mistral", "[TOOL_CALLS]now[ARGS][1]", None, []),
    ("mistral", "[TOOL_CALLS]now, please", None, []),
    ("mistral", "[TOOL_CALLS]é[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS]now[CALL_ID][ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS]" + "a" * 300 + "[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS][]", None, []),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1, } x', "} x", [("now", '{"a": 1, ')]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, 5]', ", 5]", [("now", "{}")]),
]  # fmt: skip
GOOD = [(form, text, text if content is None else content, calls) for form, text, content, calls in GOOD]
BAD = [(form, text, text if content is None else content, calls) for form, text, content, calls in BAD]


def run(parser, pieces):
    reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
    return reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


def cuts(text, seed=0):
    """All single cuts, one character at a time, and many cuts into several pieces."""
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    rng = random.Random(seed)
    for _ in range(150):
        ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 9)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize(("form", "text", "content", "calls"), [*GOOD, *BAD], ids=lambda value: str(value)[:40] if isinstance(value, str) else "")
def test_every_cut_gives_the_same_calls(form, text, content, calls):
    """Also catches a parameter without its end that takes the rest of the answer, and one that a quoted tag ends."""
    for pieces in cuts(text):
        assert run(FORMATS[form].parser(TOOLS), pieces) == (content, calls), pieces


@pytest.mark.parametrize(("form", "text", "content", "calls"), [case for case in GOOD if case[3]], ids=lambda value: "")
def test_complete_arguments_are_json_objects(form, text, content, calls):
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3_json", "mistral"])
def test_random_damage_never_raises_and_loses_nothing(form):
    """Random pieces of the formats, deleted, doubled and cut: the result never depends on the cut."""
    rng = random.Random(form)
    parts = ["<tool_call>", "</tool_call>", "<function=now>", "<function=", "</function>", "<parameter=city>", "</parameter>", "<parameter=",
             '{"name": "now"', '"arguments": {', '"parameters": ', "{", "}", '"', "\\", ",", ":", "\n", " ", "a", "<", ">", "<|python_tag|>", ";", "1", "null", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "[", "]", "\n<parameter=days>", "<function=get_weather>", "<function=get_weather>",
             "é", '{"name": "now", "arguments": {"a": "b"}}', "get_weather"]  # fmt: skip
    for _ in range(400):
        text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        whole = run(FORMATS[form].parser(TOOLS), [text])
        assert run(FORMATS[form].parser(TOOLS), list(text)) == whole, text
        places = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        assert run(FORMATS[form].parser(TOOLS), pieces) == whole, (text, pieces)
        if not whole[1]:
            assert whole[0] == text


def test_content_waits_only_for_a_possible_marker():
    for form in ("hermes", "qwen3_coder"):
        parser = FORMATS[form].parser(TOOLS)
        assert parser.feed("Hello") == [ContentDelta("Hello")]
        assert parser.feed(" wor") == [ContentDelta(" wor")]
        assert parser.feed("ld <") == [ContentDelta("ld")]
        assert parser.feed("too") == []
        assert parser.feed("k") == [ContentDelta(" <took")]
        assert parser.feed(" a\n") == [ContentDelta(" a")]
        assert parser.feed("b") == [ContentDelta("\nb")]
    parser = FORMATS["llama3_json"].parser(TOOLS)
    assert parser.feed('{"na') == []
    assert parser.feed('me": "n') == []
    assert parser.feed("o") == []
    assert parser.feed("t") == [ContentDelta('{"name": "not')]  # no tool begins so
    assert parser.feed(" {") == [ContentDelta(" {")]
    assert FORMATS["llama3_json"].parser(TOOLS).feed('{"nb') == [ContentDelta('{"nb')]


def test_arguments_are_streamed():
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.feed('<tool_call>{"name": "write_file", "arguments": ') == []
    start, first = parser.feed('{"con')
    assert (start.index, start.name, first) == (0, "write_file", ArgumentsDelta(0, '{"con'))
    assert parser.feed('tent": "li') == [ArgumentsDelta(0, 'tent": "li')]
    assert parser.feed('ne"}') == [ArgumentsDelta(0, 'ne"}')]
    assert parser.feed("}</tool_call>") == []
    assert isinstance(parser.feed('<tool_call>{"name": "now", "arguments": {}}')[0], ToolCallStart)
    parser = FORMATS["qwen3_coder"].parser(TOOLS)
    assert parser.feed("<tool_call>\n<function=write_file>\n<param") == []
    start, first = parser.feed("eter=content>")
    assert (start.name, first) == ("write_file", ArgumentsDelta(0, '{"content": "'))
    assert parser.feed("\nli\tn\n") == [ArgumentsDelta(0, "li\\tn")]
    assert parser.feed("</") == []
    assert parser.feed("b>") == [ArgumentsDelta(0, "\\n</b>")]
    assert parser.feed("\n</parameter>") == [ArgumentsDelta(0, '"')]
    assert parser.feed("</function>") == [ArgumentsDelta(0, "}")]


def test_calls_are_numbered_and_have_ids_of_their_own():
    parser = FORMATS["hermes"].parser(TOOLS)
    events = parser.feed('<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 3)
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1, 2]
    assert len({start.id for start in starts}) == 3
    assert all(start.id.startswith("call_") for start in starts)


# --- tool_choice ---

LISTS = [
    ('[{"name": "now", "arguments": {}}]', "", [("now", "{}")]),
    (' [\n {"name": "now", "arguments": {"a": 1}} , {"name": "get_weather", "arguments": {"days": 2}} ] \n', "",
     [("now", '{"a": 1}'), ("get_weather", '{"days": 2}')]),
    ('[{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [1')]),
    ('[{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    ('[{"name": "now", "arguments": {}}] x y', " x y", [("now", "{}")]),
    ("[]", "[]", []), ("[ ", "[ ", []), ("no", "no", []), (' [ {"name": 1}]', ' [ {"name": 1}]', []), ("", "", []),
    ("[5]", "[5]", []), ('[{"name": "now", "arguments": {}}, 5]', ", 5]", [("now", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), LISTS)
def test_a_list_of_calls(text, content, calls):
    for pieces in cuts(text):
        assert run(CallListParser(TOOLS), pieces) == (content, calls), pieces


@pytest.mark.parametrize(("text", "content", "calls"), [
        (' {"city": "a\nb"}', "", [("f", '{"city": "a\\nb"}')]), ('{"a": {"b": []}}\n', "", [("f", '{"a": {"b": []}}')]),
        ('{"a": 1', "", [("f", '{"a": 1')]), ('{"a": 1}} x', "} x", [("f", '{"a": 1}')]), ("text", "text", []), (" \n", " \n", []),
])  # fmt: skip
def test_the_arguments_of_one_function(text, content, calls):
    for pieces in cuts(text):
        assert run(NamedCallParser("f"), pieces) == (content, calls), pieces


# --- which format ---


def test_formats_are_recognised_by_their_templates():
    assert detect_format('… within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": …}') == "hermes"
    assert detect_format("<tool_call>\n<function=example>\n<parameter=x>") == "qwen3_coder"
    assert detect_format('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.') == "llama3_json"
    assert detect_format("{{ '<|python_tag|>' + tool_call.name }}") == "llama3_json"
    for other in ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", "<tool_calls>\n<tool_call>f\n```json",
                  "<seed:tool_call>\n<function=f>\n<parameter=x>", "<|python_tag|> <function=example_function_name>{{ args }}</function>",
                  "<|start_header_id|>{{ role }}<|end_header_id|>\n\n>>>all\n<|python_tag|>"):  # GLM, Hunyuan, Seed-OSS, Functionary
        assert detect_format(other) is None, other
    assert detect_format("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}") == "mistral"
    assert detect_format("{{ messages }}") is None
    assert detect_format(None) is None
    assert parse(FORMATS["qwen3_xml"].parser(TOOLS), "<tool_call><function=now></function></tool_call>").tool_calls[0].name == "now"
