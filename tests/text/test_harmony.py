# ruff: noqa: E501  (model outputs stand on one line each)
"""Answers in harmony, as gpt-oss writes them, in every possible cut.

Catches headers that leak into the answer, reasoning or calls that are content, text that is lost or changes its channel between
messages, and a grammar that does not wait for the channel "final".
"""

import itertools
import json
import random
from dataclasses import replace

import pytest
from support.chats import HARMONY as TEMPLATE
from text.test_tool_calls import TOOLS, cuts

from minirt.structured.reasoning_end import Messages, ReasoningEnd
from minirt.text.harmony import HARMONY, HarmonyParser
from minirt.text.reply import ArgumentsDelta, ContentDelta, ReasoningDelta, collect
from minirt.text.reply_format import ReplyFormat
from minirt.text.tool_calls import FORMATS, NamedCallParser, detect_format

FORM = ReplyFormat.choose(TEMPLATE)
PROMPT = "<|start|>user<|message|><|channel|>final<|message|>?<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THINK, FINAL, ASIDE = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
OTHER_NOW = " to=functions.now<|channel|>commentary json<|message|>"  # as the template writes it
CITY = '{"city": "Paris", "days": 3}'

# text, reasoning, content, calls as (name, arguments)
CASES = [
    (f"{FINAL}Hello, é < <|b.\n<|return|>", "", "Hello, é < <|b.\n", []),
    (f"{THINK}\nHm, é.\n{NEXT}{FINAL}Hello.", "Hm, é.", "Hello.", []),
    (f"<|start|>assistant{THINK}Hm.{NEXT}{FINAL}Hello.", "Hm.", "Hello.", []),  # the model repeats the prompt's end
    (f"{THINK}a{NEXT}{THINK}b {NEXT}{FINAL}c{NEXT}{FINAL}d", "a\n\nb", "c\n\nd", []),
    (f"{THINK}Hm.{NEXT}{NOW}{{}}<|call|>", "Hm.", "", [("now", "{}")]),
    (f"{THINK}Hm.{NEXT}{ASIDE}I look.{NEXT}{OTHER_NOW}{CITY}<|call|>", "Hm.", "I look.", [("now", CITY)]),
    (f"{NOW}{{}}<|call|><|start|>assistant{OTHER_NOW}{CITY}\n<|call|><|start|>assistant{THINK}so{NEXT}{FINAL}a", "so", "a", [("now", "{}"), ("now", CITY)]),  # several in a row
    (f"{NOW}{{}}{NEXT}{NOW}{{}}", "", "", [("now", "{}"), ("now", "{}")]),
    ("<|channel|>analysis to=functions.f code<|message|>{}", "", "", [("f", "{}")]),  # a call in another channel
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    (f"{ASIDE}a{NEXT}{FINAL}b", "", "a\n\nb", []),
    # calls in text are none
    (f"{THINK}to=functions.now {{}}{NEXT}{FINAL}{{}}", "to=functions.now {}", "{}", []),
    # no header
    ("Hello <|b> \n", "", "Hello <|b> \n", []), ("assistants to=self", "", "assistants to=self", []), (" \n", "", " \n", []), ("", "", "", []),
    (f"<|message|>a{NEXT}<|message|>b", "", "a\n\nb", []),
    (f"Hello.{NEXT}{THINK}a{NEXT}: b", "a", "Hello.\n\n<|start|>assistant: b", []),
    (f"{FINAL}a<|end|> b", "", "a\n\n b", []),
    (f"<|channel|>{'x' * 300}<|message|>a", "", f"<|channel|>{'x' * 300}<|message|>a", []),
    # one message that does not end before the next
    (f"{THINK}a<|start|>assistant{FINAL}b", "a", "b", []),
    # to others, and what is no call
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "to=python<|message|>1 + 1", "", []),
    ("<|channel|>commentary to=functions.now<|message|>oops<|call|>", "", "to=functions.now<|message|>oops", []),
    # cut off
    ("<|channel|>anal", "", "", []), ("<|channel|>final", "", "", []), ("<|channel|>commentary to=functions.n", "", "", []),
    (f"{THINK}Hm. <|e", "Hm. <|e", "", []), (f"{THINK}Hm.{NEXT}<|channel|>", "Hm.", "", []), (f"{THINK}Hm.<|end|>", "Hm.", "", []),
    (f"{THINK}Hm.<|end|><|start|>assis", "Hm.", "", []), (THINK, "", "", []),
    (f'{NOW}{{"city": "Pa', "", "", [("now", '{"city": "Pa')]), (f"{NOW}{{", "", "", [("now", "{")]),
]  # fmt: skip


def run(parser, pieces):
    reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES, ids=range(len(CASES)))
def test_every_cut_gives_the_same_reply(text, reasoning, content, calls):
    for pieces in cuts(text):
        assert run(FORM.parser(PROMPT, TOOLS), pieces) == (reasoning, content, calls), pieces


def test_random_answers():
    """2,000 answers of random messages, whole, in characters and in random pieces: each text is in its channel, in order."""
    rng = random.Random(0)
    words = ["a", "é", " ", "\n", "<", "|", "<|", "to=", "{", '"', "final", "<|b|>", "assistant", "𝄞"]
    for number in range(2000):
        written, text = {"analysis": [], "final": [], "calls": []}, ""
        for i in range(rng.randint(1, 6)):
            kind = rng.choice(["analysis", "final", "commentary", "call"])
            body = f"w{i}" + "".join(rng.choices(words, k=rng.randint(0, 12))) + f"v{i}"
            text += "<|start|>assistant" if i else ""
            if kind == "call":
                arguments = json.dumps({f"k{i}": body, "n": [i, None]}, ensure_ascii=rng.random() < 0.5)
                channel = rng.choice(["<|channel|>commentary to=functions.f{} <|constrain|>json", " to=functions.f{}<|channel|>commentary json"])
                text += f"{channel.format(i)}<|message|>{arguments}<|call|>"
                written["calls"].append((f"f{i}", arguments))
            else:
                text += f"<|channel|>{kind}<|message|>{body}{rng.choice(['<|end|>', '<|return|>'])}"
                written["analysis" if kind == "analysis" else "final"].append(body)
        cut = [len(text), *sorted(rng.sample(range(len(text) + 1), min(5, len(text))), reverse=True), 0]
        pieces = [text[start:end] for end, start in itertools.pairwise(cut)][::-1]
        expected = "\n\n".join(written["analysis"]), "\n\n".join(written["final"]), written["calls"]
        for one in ([text], list(text), pieces):
            assert run(FORM.parser(PROMPT, TOOLS), one) == expected, (number, text)


def test_random_damage_never_raises_and_loses_nothing():
    """Each word of random pieces of the format is in the result once, however it is cut; only headers go."""
    rng = random.Random(0)
    parts = [THINK, FINAL, ASIDE, NOW, OTHER_NOW, NEXT, "<|end|>", "<|call|>", "<|start|>", "assistant", " to=", "<|message|>", "<|channel|>", "<|constrain|>", "{}", '{"a": "', '"}', "\n", " ", "<"]
    for _ in range(2000):
        text = "".join(part + (f" w{i}w " if rng.random() < 0.5 else "") for i, part in enumerate(rng.choices(parts, k=rng.randint(1, 10))))
        whole = run(FORM.parser(PROMPT, TOOLS), [text])
        assert run(FORM.parser(PROMPT, TOOLS), list(text)) == whole, text
        shown = str(whole)
        for part in text.split("<|message|>")[1:]:  # what is before the first one may be a header
            body = part.partition("<|")[0].split()
            assert all(shown.count(word) == 1 for word in body if word.startswith("w") and word.endswith("w")), text


def test_nothing_waits_without_need():
    parser = FORM.parser(PROMPT, TOOLS)
    assert parser.feed(THINK) == []
    assert parser.feed("Hm") == [ReasoningDelta("Hm")]
    assert parser.feed(". <") == [ReasoningDelta(".")]
    assert parser.feed(f"b{NEXT}{FINAL}a") == [ReasoningDelta(" <b"), ContentDelta("a")]
    assert parser.feed(" b\n") == [ContentDelta(" b\n")]
    start, first = parser.feed(f'{NEXT}{NOW}{{"city": "Os')
    assert (start.name, start.index, first) == ("now", 0, ArgumentsDelta(0, '{"city": "Os'))
    assert parser.feed("lo") == [ArgumentsDelta(0, "lo")]


def test_what_the_prompt_has_of_the_answer():
    """Catches a continued message whose text is shown again, or whose channel is forgotten; earlier messages do not count."""
    def read(begun, text):
        return run(FORM.parser(PROMPT + begun, TOOLS), [text])

    assert read(FINAL, f" a{NEXT}{FINAL}b") == ("", " a\n\nb", [])
    assert read(f"{FINAL}Well", ", a.") == ("", ", a.", [])
    assert read(f"{THINK}Well", f", a{NEXT}{FINAL}b") == (", a", "b", [])
    assert read("<|channel|>analysis", "<|message|>a") == ("a", "", [])
    assert read(f"{FINAL}old<|end|>", f"{FINAL}b") == ("", "b", [])
    assert run(FORM.parser("no prompt of this form", TOOLS), [f"{FINAL}b"]) == ("", "b", [])
    assert FORM.opens_reasoning(PROMPT)
    assert FORM.opens_reasoning(PROMPT + THINK)
    assert not FORM.opens_reasoning(f"{PROMPT}{FINAL}We")


def test_the_form_is_recognised_by_its_template():
    assert detect_format(TEMPLATE) == "harmony"
    assert (FORM.tool_calls, FORM.reasoning) == ("harmony", HARMONY)
    assert FORM.needs_special_tokens({"<|channel|>"})
    assert not FORM.needs_special_tokens({"<think>"})
    assert ReplyFormat.choose("{{ m }}", None, "harmony") == FORM
    without = ReplyFormat.choose(TEMPLATE, None, "none")
    assert (without.tool_calls, without.reasoning) == (None, HARMONY)
    call = run(FORMATS["harmony"].parser(TOOLS), [f"{NOW}{{}}"])
    assert call == ("", "", [("now", "{}")])


def test_only_the_final_channel_is_content_beside_a_grammar():
    """Catches a preamble, or a call that the schema does not allow, in front of the JSON text."""
    form = ReplyFormat(reasoning=HARMONY)
    text = f"{THINK}Hm.{NEXT}{ASIDE}I look.{NEXT}{NOW}{{}}{NEXT}{FINAL}{CITY}"
    assert run(form.parser(PROMPT, (), "none"), [text]) == ("Hm.\n\nI look.\n\nto=functions.now<|message|>{}", CITY, [])


@pytest.mark.parametrize(("text", "reply"), [
    (f"{THINK}Hm.{NEXT}{ASIDE}I look.{NEXT}{NOW}{{}}<|call|>", ("Hm.\n\nI look.", "", [("now", "{}")])),
    (f"{NOW}{{}}{NEXT}{OTHER_NOW}{CITY}{NEXT}{FINAL}{CITY}", ("", CITY, [("now", "{}"), ("now", CITY)])),
    (f"{NOW}oops{NEXT} to=functions.now<|message|>no{NEXT}<|channel|>final json<|message|>{CITY}",
     ("to=functions.now<|message|>oops\n\nto=functions.now<|message|>no", CITY, [])),
    (f"{NOW}{{}} so{NEXT}{FINAL}{CITY}", (" so", CITY, [("now", "{}")])),
])  # fmt: skip
def test_calls_before_a_grammar(text, reply):
    """Catches calls that a schema of the final channel hides, and content that is not the JSON text: preambles and no calls."""
    form = replace(FORM, has_grammar=True)
    for pieces in cuts(text):
        assert run(form.parser(PROMPT, TOOLS), pieces) == reply, pieces


def called(pieces, end=HARMONY[1]):
    messages = Messages(end)
    for piece in pieces:
        messages = messages.after(piece)
    return messages.called


@pytest.mark.parametrize(("text", "expected"), [
    (f"{THINK}Hm.{NEXT}{NOW}", True), (f"{THINK}Hm.{NEXT}{OTHER_NOW}", True), (f"<|start|>assistant{NOW}{{", True),
    (f"{OTHER_NOW}{{}}{NEXT}{THINK}Hm", True), (f"{THINK}é{'é' * 999}{NEXT}{OTHER_NOW}", True),
    (NOW[:-1], False), (f"{THINK}{NOW}", False), (f"{THINK}Hm.{NEXT}{ASIDE}to=functions.now", False),
    ("<|channel|>analysis to=python code<|message|>1", False), (" to=functions.<|message|>1", False),
    (f"assistants{OTHER_NOW}", False), (f"{'x' * 1200}{NOW}", False), (f" to=functions.{'f' * 300}<|message|>", False),
])  # fmt: skip
def test_whether_there_was_a_call(text, expected):
    """Catches an end before the grammar without a call, as after a header that a message quotes, and a call that is not seen."""
    data = text.encode()
    for size in range(1, 30):
        assert called(data[i : i + size] for i in range(0, len(data), size)) == expected, size
    assert called([data]) == expected
    messages = Messages(HARMONY[1])
    for _ in range(9):
        messages = messages.after(data + b"a" * 500)
        assert len(messages.rest) <= 1000, "it does not grow with the text"


def test_a_call_is_one_for_the_parser():
    """Random pieces of the format: what ends the text without an answer is what the parser takes for a message to a function."""
    rng, made = random.Random(0), []
    parts = [THINK, FINAL, ASIDE, NOW, OTHER_NOW, "<|end|>", "<|call|>", "<|end|><|start|>", "assistant", " to=", "functions.f", "<|message|>", "<|channel|>", "<|constrain|>", "{}", "\n", " ", "a"]
    for _ in range(2000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 8)))
        made.clear()
        run(HarmonyParser("", lambda name: made.append(name) or NamedCallParser(name)), [text])
        cut = rng.randint(0, len(text))
        assert called([text[:cut].encode(), text[cut:].encode()]) == bool(made), text


@pytest.mark.parametrize(("text", "ends"), [
    (f"{THINK}a{NEXT}{FINAL}", True), ("<|channel|>final <|constrain|>json<|message|>", True),
    ("<|channel|>final json<|message|>", True), (f"{THINK}final{NEXT}{ASIDE}", False), ("<|channel|>final", False),
    ("<|channel|>final<|channel|>analysis<|message|>", False), (f"<|channel|>final{'x' * 40}<|message|>", False),
])  # fmt: skip
def test_where_a_grammar_begins(text, ends):
    """Catches a grammar that a header with a type keeps waiting for ever, and one that begins in another channel."""
    tokens = sorted((bytes([i]), i) for i in range(256))
    end, tail, ended = ReasoningEnd(HARMONY[1], tokens, 8), b"", False
    for byte in text.encode():
        tail += bytes([byte])
        ended = ended or end.ends(tail)
        tail = end.tail(tail)
    assert ended == ends
