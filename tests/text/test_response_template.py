"""Declarative response templates: every cut of an answer gives what transformers makes of the whole, and damage is content.

Catches anchors that are missed or found too early where the text is cut, and templates that are half understood.
"""

import itertools
import json
import random
import re

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from minirt.errors import UnsupportedError
from minirt.text.channels import RESPONSE_TEMPLATE as BUILT_IN
from minirt.text.reply import ArgumentsDelta, ContentDelta, ReasoningDelta, collect
from minirt.text.response_template import ResponseTemplate, ResponseTemplateParser
from minirt.text.stream_search import Match, StreamPattern, StreamSearch
from minirt.text.tools import read_tools

QWEN3, QWEN35, GEMMA = (_RESPONSE_TEMPLATE_FALLBACKS[next(k for k in _RESPONSE_TEMPLATE_FALLBACKS if name in k)]
                        for name in ("qwen3", "qwen3_5", "gemma4"))  # fmt: skip
LINES = {
    "start_anchor": ["<bot>", "<bot2>"],
    "fields": {
        "thinking": {"open": "[think]", "close": ["[/think]", "[/think]\n\n"]},
        "tool_calls": {
            "open_pattern": r"call (?P<name>\w+):\n",
            "close": "\n\n",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"close": "<end>"},
    },
}
LIST = {
    "start_anchor_pattern": r"<bot\d?>",
    "fields": {
        "tool_calls": {
            "open": "TOOLS",
            "close": "END",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{call}", "arguments": "{with}"}},
        },
        "content": {},
    },
}
TAGS = {
    "start_anchor": "<bot>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call (?P<name>[a-z_]+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>",
                "value_parser": {"name": "text"},
                "merge_duplicates": True,
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "o": {"type": ["number", "null"]}}},
            },
        }
    ]
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é</b>", "n": "3"}}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=o>\nNone\n</parameter>\n"
CODER += "<parameter=s>\na < b\n</parameter>\n</function>\n</tool_call>"
START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
# template, prompt, text
CASES = [
    (QWEN3, START, "Just text. <tool <think"),
    (QWEN3, START, f"<think>\nHm.\n\nOh.\n</think>\n\n{CALL}\n{CALL}<|im_end|>\n<|endoftext|>"),
    (QWEN3, START + "<think>\n", f"Hm </thin\n</think>\n\n{CALL}"),
    (QWEN3, START + "<think>\n\n</think>\n\n", " Hello \n\n there \n"),
    (QWEN3, "no anchor <think>", "text"),
    (QWEN3, START, ""),
    (QWEN35, START + "<think>\n", f"Thought\n</think>\n\n{CODER}\n{CODER}<|im_end|>"),
    (QWEN35, START, "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    (
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nHm\n<channel|>Text<|tool_call>call:f{a:<|"|>x "y" {,b:<|"|>,n:3,l:[{k:true}]}<tool_call|><turn|>',
    ),
    *((spec, prompt, text) for spec in (GEMMA, BUILT_IN) for prompt, text in (
        ("<|turn>model\n<|channel>thought\n<channel|>", "S <|tool_call>call:f{}<tool_call|><|tool_call>call:f{n:-3}<tool_call|>"),
        ("<|turn>user\n<|channel>thought\n<turn|>\n<|turn>model\n", "No channel, {a:1}<turn|>"),
        ("<|tool_response>response:f{value:1}<tool_response|>", "<|channel>thought\nSo\n<channel|>Yes"),
        ("<|turn>model\n", '<|tool_call>call:f{s:<|"|>it\'s "a:b,c}" \\<|"|>,m:{k:[[],{}],v:<|"|><|"|>}}<tool_call|>'),
    )),
    (LINES, "<bot2>", "[think]a [/think] b[/think]\n\nHi call f:\nn=3\no = x y\nz\n\ncall g:\n<end>"),
    (LINES, "<bot>[think]", "a[/think]\n b"),
    (LIST, "<bot>x<bot7>", 'A TOOLS[{"call": "f", "with": {"n": "7"}}, {"call": "g", "with": {}}]END'),
    (TAGS, "<bot>", "<call f><n> 4 </n><x>a</x><x>b</x><x>c</x></call> <call g></call>"),
]


def cuts(text, count=120):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    rng = random.Random(4)
    for _ in range(count):
        ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 9)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


def run(spec, prompt, pieces):
    parser = ResponseTemplateParser(ResponseTemplate.read(spec), prompt, TOOLS)
    return collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(("spec", "prompt", "text"), CASES, ids=range(len(CASES)))
def test_every_cut_gives_what_transformers_reads(spec, prompt, text):
    whole = parse_response(text, spec, prefix=prompt if "anchor" not in prompt else "", tools=[tool.value for tool in TOOLS])
    calls = [call.get("function", call) for call in whole.get("tool_calls", [])]
    expected = [(call["name"], call["arguments"]) for call in calls]
    for pieces in cuts(text):
        reply = run(spec, prompt, pieces)
        assert reply.content == whole.get("content", ""), pieces
        assert reply.reasoning == whole.get("reasoning_content", whole.get("thinking", "")), pieces
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == expected, pieces


@pytest.mark.parametrize(("spec", "text", "content"), [
        (QWEN3, "<tool_call>{nope}</tool_call>", "<tool_call>{nope}</tool_call>"),
        (QWEN3, "A\n<tool_call>{nope}</tool_call>\nB", "A\n<tool_call>{nope}</tool_call>B"),
        (QWEN3, '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
        (QWEN3, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (QWEN3, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu'),
        (LIST, "TOOLS[1]END x", "TOOLS[1]ENDx"),
        (LIST, 'TOOLS[{"call": "f"}]END', 'TOOLS[{"call": "f"}]END'),
        (LIST, 'TOOLS[{"call": "\\ud83d", "with": {}}]END', 'TOOLS[{"call": "\\ud83d", "with": {}}]END'),
        (LIST, 'TOOLS[{"call": "f", "with": {"a": [1e999]}}]END', 'TOOLS[{"call": "f", "with": {"a": [1e999]}}]END'),
        (LIST, "TOOLS" + "[" * 300 + "]" * 300 + "END", None),
])  # fmt: skip
def test_damage_is_content(spec, text, content):
    for pieces in cuts(text):
        reply = run(spec, START if spec is QWEN3 else "<bot>", pieces)
        assert (reply.content, reply.tool_calls) == (text if content is None else content, ()), pieces


def test_arguments_can_be_sent():
    """A half of a surrogate pair, which JSON may have as an escape, is no text in UTF-8: it stays an escape."""
    (call,) = run(LIST, "<bot>", ['TOOLS[{"call": "g", "with": {"\\ud83d": ["\\udc00é"]}}]END']).tool_calls
    assert call.arguments == '{"\\ud83d": ["\\udc00é"]}'
    (call,) = run(QWEN35, START, [CODER.replace("a < b", '["\\ud83d"]') + "</function>\n</tool_call>"]).tool_calls
    call.arguments.encode()


def test_random_answers_do_not_depend_on_the_cut():
    rng = random.Random(6)
    parts = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "{", "\n", " ", "a", "<|im_end|>", "<", '"name"']
    parts += [CODER, "<function=f>"]
    for spec in (QWEN3, QWEN35):
        for _ in range(40):
            text = "".join(rng.choices(parts, k=rng.randint(1, 8)))
            whole = run(spec, START, [text])
            plain = [(call.name, call.arguments) for call in whole.tool_calls]
            for pieces in (list(text), *itertools.islice(cuts(text, 0), 0, None, 7)):
                reply = run(spec, START, pieces)
                found = [(call.name, call.arguments) for call in reply.tool_calls]
                assert (reply.content, reply.reasoning, found) == (whole.content, whole.reasoning, plain), (text, pieces)


def test_text_is_streamed():
    parser = ResponseTemplateParser(ResponseTemplate.read(QWEN3), START + "<think>\n", TOOLS)
    assert parser.feed("\nI ") == [ReasoningDelta("I")]
    assert parser.feed("see <") == [ReasoningDelta(" see")]
    assert parser.feed("/think>\n\n") == []
    assert parser.feed("Hello") == [ContentDelta("Hello")]
    assert parser.feed(" you <|im_") == [ContentDelta(" you")]
    assert parser.feed("x") == [ContentDelta(" <|im_x")]
    assert parser.feed(CALL[:-1]) == []
    assert parser.feed(">")[1] == ArgumentsDelta(0, '{"a": "é</b>", "n": 3}')


# --- what is refused ---


def changed(field="content", **changes):
    fields = json.loads(json.dumps(QWEN3["fields"]))
    fields[field] = fields.get(field, {}) | changes
    return QWEN3 | {"fields": fields}


@pytest.mark.parametrize(("spec", "where"), [
        (None, ""), ([], ""), (QWEN3 | {"version": 2}, ".version"), (QWEN3 | {"more": 1}, ".more"),
        (QWEN3 | {"fields": {}}, ""), (QWEN3 | {"fields": []}, ".fields"), ({"fields": QWEN3["fields"]}, ""),
        (QWEN3 | {"start_anchor": []}, ".start_anchor"), (QWEN3 | {"start_anchor_pattern": "x"}, ""),
        (changed("citations", open="<c>"), ".fields.citations"), (changed("reasoning", close="x"), ""),
        (changed(more=1), ".fields.content.more"), (changed(content="json"), ".fields.content"),
        (changed(transform="{content}"), ".fields.content"),
        (changed("tool_calls", content="yaml"), ".fields.tool_calls.content"),
        (changed("tool_calls", transform={"a": "x {content}"}), ".fields.tool_calls.transform"),
        (changed("tool_calls", open="x"), ".fields.tool_calls"),
        (changed("tool_calls", open_pattern="(?=a)"), ".fields.tool_calls.open_pattern"),
        (changed("tool_calls", open_pattern="("), ".fields.tool_calls.open_pattern"),
        (changed("tool_calls", open_pattern="a*"), ".fields.tool_calls.open_pattern"),
        (changed("tool_calls", open_pattern="^a"), ".fields.tool_calls.open_pattern"),
        (changed("tool_calls", open_pattern=5), ".fields.tool_calls.open_pattern"),
        (changed("tool_calls", close=""), ".fields.tool_calls.close"),
        (changed("tool_calls", content="xml-inline"), ".fields.tool_calls.content_args.tag_pattern"),
        (changed("tool_calls", content_args={"string_delims": ["a"]}), ".fields.tool_calls.content_args.string_delims"),
        (changed("tool_calls", content="kv-lines", content_args={"kv_sep": ""}), ".fields.tool_calls.content_args"),
        (changed("tool_calls", join=1), ".fields.tool_calls.join"),
        (changed("content", content_args=1), ".fields.content.content_args"),
])  # fmt: skip
def test_what_is_not_understood_is_named(spec, where):
    with pytest.raises(UnsupportedError) as caught:
        ResponseTemplate.read(spec, "tokenizer_config.json")
    assert str(caught.value.where) == "tokenizer_config.json" + where


# --- anchors ---

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\d", "1", r"\s", "(?P<x>a|ab)", "(?P<y>[ab]+?)"]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "??", "{0,2}?"]


def pattern(source, depth=0):
    chance = source.random()
    if depth > 2 or chance < 0.35:
        return source.choice(ATOMS)
    inner = pattern(source, depth + 1)
    if chance < 0.65:
        return inner + pattern(source, depth + 1)
    return f"(?:{inner}|{pattern(source, depth + 1)})" if chance < 0.8 else f"(?:{inner}){source.choice(REPEATS)}"


def test_matches_and_groups_of_re():
    """And what is found, or kept, before the text is complete never has to be taken back."""
    source, checked, found = random.Random(1), 0, 0
    for _ in range(4000):
        rule = pattern(source)
        try:
            expression, anchor = re.compile(rule, re.DOTALL), StreamPattern(pattern=rule)
        except (re.error, UnsupportedError):  # a group twice; what can match nothing
            continue
        text = "".join(source.choice("ab1 \n") for _ in range(source.randrange(9)))
        match = expression.search(text)
        expected = match and Match(match.start(), match.end(), {k: v for k, v in match.groupdict().items() if v is not None})
        assert StreamSearch(anchor).next(text, 0, 0, True)[0] == expected, (rule, text)
        for end in range(len(text)):
            early, kept = StreamSearch(anchor).next(text[:end], 0, 0, False)
            if early is not None:
                assert early == expected, (rule, text, end)
            elif expected is not None:
                assert expected.start >= kept or expected.start >= end, (rule, text, end)
        checked, found = checked + 1, found + (match is not None)
    assert checked > 2500
    assert found > 1000


def test_literals_of_which_one_begins_another():
    anchor = StreamPattern(["<a", "<a>b", "c"])
    assert StreamSearch(anchor).next("x<a", 0, 0, False) == (None, 1)
    assert StreamSearch(anchor).next("x<a", 0, 0, True) == (Match(1, 3, {}), 3)
    assert StreamSearch(anchor).next("x<a>b", 0, 0, False)[0] == Match(1, 5, {})
    assert StreamSearch(anchor).next("x<a>c", 0, 0, False)[0] == Match(1, 3, {})
    assert StreamSearch(anchor).next("xc<", 0, 0, False)[0] == Match(1, 2, {})


@pytest.mark.parametrize("rule", ["(a|a)+$x", "(a+)+x", ".*.*.*.*x", "(?:a|aa|aaa)+x", r"\s*\s*\s*\s*x"])
def test_no_pattern_takes_long(rule):
    """Each takes ages with a matcher that backtracks."""
    assert StreamSearch(StreamPattern(pattern=rule)).next("a " * 1000, 0, 0, True)[0] is None
