"""Reasoning at the beginning of a model's text, in every possible cut. Catches markers and thoughts that leak into the answer."""

import itertools
import random

import pytest

from minirt.text.reasoning import BLOCKS, ReasoningParser
from minirt.text.reply import ContentDelta, ReasoningDelta, ReplyParser, collect, parse
from minirt.text.reply_format import ReplyFormat
from minirt.text.tool_calls import FORMATS
from minirt.text.tools import read_tools

# inside at the beginning, text, reasoning, content
CASES = [
    (False, "<think>\nA thought.\n\nAnother < one.\n</think>\n\nThe answer.\n", "A thought.\n\nAnother < one.", "The answer.\n"),
    (True, "\nA thought.\n</think>\n\nThe answer.", "A thought.", "The answer."),
    (True, "<think>A</think>B", "A", "B"),  # some models open the block although the prompt has
    (False, "  \n<think>A</think>B", "A", "B"),
    (False, "<think>\n\n</think>\n\nB", "", "B"),
    (False, "No thought. <think>x</think> y", "", "No thought. <think>x</think> y"),
    (False, " \n text", "", " \n text"),
    (False, "", "", ""),
    (False, "<thi", "", "<thi"),
    (False, "<think>no end \n", "no end", ""),
    (True, "no end </th", "no end </th", ""),
    (True, "  ", "", ""),
    (True, "</think>B </think> C", "", "B </think> C"),
    (False, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
    (False, "<think>é👧\u2028</think>\u3000x", "é👧", "x"),
]


def cuts(text):
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    rng = random.Random(1)
    for _ in range(100):
        ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 8)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_every_cut(inside, text, reasoning, content):
    for pieces in cuts(text):
        parser = ReasoningParser(inside)
        reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert (reply.reasoning, reply.content) == (reasoning, content), pieces


def test_nothing_waits_without_need():
    parser = ReasoningParser()
    assert parser.feed("<think>") == []
    assert parser.feed("\nWe") == [ReasoningDelta("We")]
    assert parser.feed(" ask <") == [ReasoningDelta(" ask")]
    assert parser.feed("/b") == [ReasoningDelta(" </b")]
    assert parser.feed(" \n") == []
    assert parser.feed("x</think>\n\n") == [ReasoningDelta(" \nx")]
    assert parser.feed("Hi") == [ContentDelta("Hi")]
    assert parser.feed(" \n") == [ContentDelta(" \n")]
    assert ReasoningParser().feed("Hi <") == [ContentDelta("Hi <")]


@pytest.mark.parametrize(("prompt", "inside"), [
        ("<|im_start|>assistant\n<think>\n", True), ("<|im_start|>assistant\n<think>", True), ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False), ("user: what is <think>?\nassistant:", False),
        ("<think>old</think>\nassistant\n<think>\n", True), ("", False),
])  # fmt: skip
def test_whether_the_prompt_opens_the_block(prompt, inside):
    assert ReplyFormat(reasoning=BLOCKS[0]).opens_reasoning(prompt) is inside


def test_other_markers():
    parser = ReasoningParser(False, "[THINK]", "[/THINK]")
    reply = parse(parser, "[THINK]<think>a</think>[/THINK]b")
    assert (reply.reasoning, reply.content) == ("<think>a</think>", "b")


def test_reasoning_then_calls_in_every_cut():
    """A call that the model only thinks of is none."""
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>'
    text = f"I could write {call}.\n</think>\n\nSo:\n{call}"
    for pieces in cuts(text):
        parser = ReplyParser(ReasoningParser(True), FORMATS["hermes"].parser(tools))
        reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert (reply.reasoning, reply.content) == (f"I could write {call}.", "So:"), pieces
        assert [(c.name, c.arguments) for c in reply.tool_calls] == [("f", '{"a": "<think>"}')]
    assert parse(ReplyParser(), "<think>x").content == "<think>x"
    assert parse(ReplyParser(None, FORMATS["hermes"].parser(tools)), call).tool_calls[0].name == "f"
    assert parse(ReplyParser(ReasoningParser()), "<think>x</think>" + call).content == call


CODER = ("<tool_call>\n<function=", "<tool_call><function=")


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("Hm.\n\n<tool_call>\n<function=f>", "Hm.", "<tool_call>\n<function=f>"),
    ("<tool_call><function=f>", "", "<tool_call><function=f>"),
    ("A <tool_call> is\n<tool_call>\n{}</think>b", "A <tool_call> is\n<tool_call>\n{}", "b"),
    ("a</think>b<tool_call>\n<function=f>", "a", "b<tool_call>\n<function=f>"),
    ("a <tool_call>\n<func", "a <tool_call>\n<func", ""),
])  # fmt: skip
def test_a_call_ends_reasoning_that_is_not_closed(text, reasoning, content):
    """Only a complete beginning of a call does, and it stays in the content. In every cut."""
    for pieces in cuts(text):
        parser = ReasoningParser(True, ends=CODER)
        reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert (reply.reasoning, reply.content) == (reasoning, content), pieces
