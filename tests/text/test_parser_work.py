# ruff: noqa: E501  (texts stand on one line each)
"""The work of every parser of answers is proportional to the text, fed in one piece or one character at a time.

Catches parsers that look again at what they have seen, copy what they hold, or search the rest of the text for each marker: 40,000
characters of a value once took 7 s of the server's event loop. Characters and bytes are counted, at n and at 2n, not time.
"""

import tracemalloc

import pytest
from text.test_response_template import GEMMA, LINES, LIST, QWEN3, QWEN35, START, TAGS

from minirt.errors import InputError
from minirt.text import json_checker, stream_search, tool_calls, tools
from minirt.text.addressed import AddressedParser
from minirt.text.json_checker import completed, escaped
from minirt.text.reasoning import ReasoningParser
from minirt.text.reply import ReplyParser
from minirt.text.response_template import ResponseTemplate, ResponseTemplateParser
from minirt.text.stream_search import StreamPattern
from minirt.text.tool_calls import FORMATS, CallListParser, NamedCallParser
from minirt.text.tools import read_tools, types

TOOLS = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "s": {"type": "string"}, "a": {"type": "array"}, "i": {"type": "integer"}}}}}])  # fmt: skip


class Counted(str):
    """A text that counts the characters that are copied, searched or looked at."""

    __slots__ = ()
    work = 0

    @staticmethod
    def of(text, work):
        Counted.work += work
        return Counted(text)

    def __getitem__(self, key):
        found = str.__getitem__(self, key)
        return Counted.of(found, len(found)) if isinstance(key, slice) else Counted.of(found, 1)

    def __add__(self, other):
        return Counted.of(str.__add__(self, other), len(self) + len(other))

    def __radd__(self, other):
        return Counted.of(str.__add__(other, self), len(self) + len(other))

    def __iter__(self):
        Counted.work += len(self)
        return str.__iter__(self)

    def find(self, text, start=0, end=None):
        end = len(self) if end is None else min(end, len(self))
        found = str.find(self, text, start, end)
        Counted.work += (end if found < 0 else found) - start
        return found

    def strip(self, *args):
        return Counted.of(str.strip(self, *args), len(self))

    def lstrip(self, *args):
        return Counted.of(str.lstrip(self, *args), len(self))

    def rstrip(self, *args):
        return Counted.of(str.rstrip(self, *args), len(self))

    def removeprefix(self, text):
        return Counted.of(str.removeprefix(self, text), len(self))

    def removesuffix(self, text):
        return Counted.of(str.removesuffix(self, text), len(self))

    def partition(self, text):
        return tuple(Counted.of(part, len(part)) for part in str.partition(self, text))


def template(spec, prompt="<bot>"):
    return lambda: ResponseTemplateParser(ResponseTemplate.read(spec), prompt, TOOLS)


def form(name):
    return lambda: FORMATS[name].parser(TOOLS)


def muse():
    return AddressedParser("", form("muse_glimmer"))


CODER = "<tool_call>\n<function=f>\n"
CASES = [
    *((parser, text) for parser in (form("hermes"), form("qwen3_coder"), form("llama3_json"), form("mistral"), muse, ReasoningParser, template(QWEN3, START), template(LINES)) for text in (
        lambda n: "word " * (n // 5), lambda n: " " * n, lambda n: "a" + "\n" * n + "b", lambda n: "<" * n, lambda n: "</tool_call" * (n // 11),
        lambda n: "<tool_call>" * (n // 11), lambda n: "<think>" * (n // 7),
    )),
    (form("hermes"), lambda n: '<tool_call>{"name": "f", "arguments": {"s": "' + "x" * n + '"}}</tool_call>'),
    (form("hermes"), lambda n: '<tool_call>{"name": "f", "arguments": "' + "x" * n + '"}</tool_call>'),
    (form("hermes"), lambda n: '<tool_call>{"' + "x" * n),
    (form("hermes"), lambda n: '<tool_call>{"arguments": {"s": "' + "x" * n + '"}, "name": "f"}</tool_call>'),
    (form("hermes"), lambda n: '<tool_call>{"name": "f", "arguments": {}}' + " " * n + "</tool_call>"),
    (form("hermes"), lambda n: '<tool_call>{"name": "f"}</tool_call>' * (n // 37)),
    (form("hermes"), lambda n: "<tool_call>" + '{"name": "f"}' * (n // 13)),
    (form("hermes"), lambda n: '<tool_call>{"x": 1}' * (n // 18)),
    (form("qwen3_coder"), lambda n: CODER + "<parameter=s>\n" + "x" * n + "\n</parameter>\n</function>"),
    (form("qwen3_coder"), lambda n: CODER + "<parameter=a>\n[" + "1," * (n // 2) + "1]\n</parameter>\n</function>"),
    (form("qwen3_coder"), lambda n: CODER + "<parameter=i>\n" + "x" * n),
    (form("qwen3_coder"), lambda n: CODER + "<parameter=a>\n" + "\n</parameter" * (n // 12)),
    (form("qwen3_coder"), lambda n: CODER + " " * n + "<parameter=s>"),
    (form("qwen3_coder"), lambda n: "<tool_call>" + " " * n + "<function=f>"),
    (form("qwen3_coder"), lambda n: CODER + "<parameter=i>1</parameter>" * (n // 26)),
    (form("qwen3_coder"), lambda n: "<tool_call><function=" * (n // 21)),
    (form("qwen3_coder"), lambda n: "<function=f" * (n // 11)),
    (form("qwen3_coder"), lambda n: "<function=f></function>" * (n // 23)),
    (form("qwen3_coder"), lambda n: "<tool_call>" + "<function=f></function> " * (n // 23)),
    *((form("qwen3_coder"), lambda n, tag=tag: CODER + "<parameter=a>\n" + tag * (n // len(tag))) for tag in (
        "</function>", "\n</tool_call>\n", "\n<parameter=", "\n<parameter=s", "</function></tool_call>x", "</function>" + " " * 98)),
    *((form("mistral"), lambda n, tag=tag: "[TOOL_CALLS]" + tag * (n // len(tag))) for tag in (
        "[TOOL_CALLS]", "f[ARGS]{}[TOOL_CALLS]", "[ARGS]", "f[ARGS]", "f", " ", '[{"name": "f"}', 'f{"s": "x"}', "f[CALL_ID]")),
    *((muse, lambda n, tag=tag: tag * (n // len(tag))) for tag in (
        "to=self<|message|>a<|eom|><|start|>assistant ", "to=user<|message|>a<|eom|>", "to=x<|message|>", "<|start|>", "assistant",
        "to=", "<|eom|>", "<|start|>assistant to=x<|message|>b")),
    *((muse, lambda n, tag=tag: "to=x<|message|><atem:function_calls>" + tag * (n // len(tag))) for tag in (
        '<atem:invoke name="', '<atem:invoke name="f"></atem:invoke>', '<atem:invoke name="f"><atem:parameter name="s">', "x", " ")),
    (form("llama3_json"), lambda n: '{"name": "f", "id": "' + "x" * n + '", "parameters": {}}'),
    (form("llama3_json"), lambda n: '{"name": "f", "parameters": "' + "x" * n + '"}'),
    (form("llama3_json"), lambda n: '{"' + "\\u0061" * (n // 6)),
    (form("llama3_json"), lambda n: '{"name": "' + "\\u0061" * (n // 6)),
    (form("llama3_json"), lambda n: '{"name": "f"}' + ";" * n),
    (form("llama3_json"), lambda n: '{"name": "f"};' * (n // 14)),
    (form("llama3_json"), lambda n: "x" + "<|python_tag|>" * (n // 14)),
    (lambda: CallListParser(TOOLS), lambda n: "[" + '{"name": "f", "arguments": {}},' * (n // 31)),
    (lambda: CallListParser(TOOLS), lambda n: "[" + " " * n + '{"name": "f", "arguments": {"s": "' + "x" * n),
    (lambda: NamedCallParser("f"), lambda n: " " * n + '{"s": "' + "x" * n + '"}' + " " * n + "y"),
    (lambda: ReasoningParser(inside=True), lambda n: "word " * (n // 5) + " " * n + "</think>" + " " * n + "</think>"),
    (lambda: ReasoningParser(), lambda n: " " * n + "<think>" + "</think" * (n // 7)),
    (lambda: ReasoningParser(True, ends=tool_calls.FORMATS["qwen3_coder"].end_reasoning), lambda n: "<tool_call>\n<func" * (n // 17)),
    (lambda: ReplyParser(ReasoningParser(), FORMATS["hermes"].parser(TOOLS)), lambda n: "<think>a</think>" + "<tool_call> " * (n // 12)),
    (template(QWEN3, START), lambda n: '<tool_call>{"name": "f", "arguments": {"s": "' + "x" * n + '"}}</tool_call>'),
    (template(QWEN3, START), lambda n: '<tool_call>{"name": "f", "arguments": {}}</tool_call> ' * (n // 54)),
    (template(QWEN3, START), lambda n: "a</think>" * (n // 9)),
    (template(QWEN35, START), lambda n: CODER + "<parameter=i>\n1\n</parameter>\n" * (n // 30) + "</function>\n</tool_call>"),
    (template(QWEN35, START), lambda n: "<tool_call>\n<function=" + "x" * n),
    (template(QWEN35, START), lambda n: "<tool_call>\n<function=" * (n // 22)),
    (template(GEMMA, "<|turn>model\n"), lambda n: "<|tool_call>call:f{a:" + '<|"|>' * (n // 5) + "}<tool_call|>"),
    (template(GEMMA, "<|turn>model\n"), lambda n: "<|tool_call>call:f{a:" + '"\\' * (n // 2) + "}<tool_call|>"),
    (template(GEMMA, "<|turn>model\n"), lambda n: "<|tool_call>call:" + "x" * n),
    (template(LINES), lambda n: "call " + "x" * n),
    (template(LINES), lambda n: "call f:\n" + "k=1\n" * (n // 4) + "\n\n"),
    (template(LIST), lambda n: "TOOLS" + "[" * n + "END"),
    (template(LIST), lambda n: "TOOLS[]END " * (n // 11)),
    (template(TAGS), lambda n: "<call f>" + "<a>" * (n // 3) + "</call>"),
    (template(TAGS), lambda n: "<call f>" + "<a>1</a>" * (n // 8) + "</call>"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def counted_search(monkeypatch):
    """A search for markers, which `Counted` does not see, counts, too."""
    original = tool_calls.first_marker

    def first_marker(text, markers, start=0):
        place, marker = original(text, markers, start)
        Counted.work += (place if marker else len(text)) - start
        return place, marker

    monkeypatch.setattr(tool_calls, "first_marker", first_marker)
    monkeypatch.setattr(stream_search, "first_marker", first_marker)


def work(make, text, *, single):
    """The characters that are looked at or copied; of single characters, also the bytes that are allocated for each and freed."""
    parser, Counted.work, allocated = make(), 0, 0
    tracemalloc.start()
    try:
        for piece in text if single else [text]:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            parser.feed(Counted(piece))
            allocated += tracemalloc.get_traced_memory()[1] - before
        parser.finish()
    finally:
        tracemalloc.stop()
    return (Counted.work, allocated) if single else (Counted.work,)


@pytest.mark.parametrize("single", [True, False], ids=["characters", "one piece"])
@pytest.mark.parametrize(("make", "text"), CASES, ids=range(len(CASES)))
def test_twice_the_text_is_twice_the_work(make, text, single):
    size = 800 if single else 3000
    once, twice = (work(make, text(own), single=single) for own in (size, 2 * size))
    for first, second in zip(once, twice, strict=True):
        assert second < 2.4 * first + 2000, (once, twice)


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 190 + "1," * 2000, '{"a": "' + "x" * 4000 + '"}', "{" + '"a": 1, ' * 500, " " * 4000])
def test_json_is_looked_at_once(text, monkeypatch):
    pushed = []
    push = json_checker.JsonChecker.push
    monkeypatch.setattr(json_checker.JsonChecker, "push", lambda self, character: pushed.append(character) or push(self, character))
    for read in (completed, escaped):
        pushed.clear()
        read(text)
        assert len(pushed) <= len(text)


def test_a_pattern_that_reads_ahead_at_each_match_is_given_up():
    """Each "a" would be found only after the rest of the text was looked at."""
    with pytest.raises(InputError, match="too long to search"):
        list(StreamPattern(pattern="a.*b|a").find_all("a" * 3000))
    assert len(list(StreamPattern(pattern="a.*b|a").find_all("a" * 20))) == 20
    spec = {**TAGS, "fields": {**TAGS["fields"], "tool_calls": TAGS["fields"]["tool_calls"] | {
        "content_args": {"tag_pattern": "(?P<key>a).*b|(?P<value>a)"}}}}  # fmt: skip
    text = "<call f>" + "a" * 3000 + "</call>"
    assert "".join(event.text for event in template(spec)().feed(text)) == text


def test_a_match_in_growing_text_is_bounded():
    """Text that could belong to a match without end would be kept, and copied, for ever."""
    parser = template(LINES)()
    text = "call " + "x" * 5000
    assert "".join(event.text for piece in text for event in parser.feed(piece))[:4000] == text[:4000]


def test_each_schema_is_looked_at_once(monkeypatch):
    """References that each lead to two others would be 2^40 paths."""
    looked = []
    find = tools._Types._find
    monkeypatch.setattr(tools._Types, "_find", lambda self, *args: looked.append(1) or find(self, *args))
    schema = {"$ref": "#/$defs/0", "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}}
    schema["$defs"]["40"] = {"type": "array"}
    assert types(schema) == ("array",)
    assert len(looked) <= 200
