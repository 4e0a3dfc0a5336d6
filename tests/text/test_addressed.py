# ruff: noqa: E501  (model outputs stand on one line each)
"""Answers of addressed messages, as Muse-Glimmer writes them, in every possible cut.

Catches headers that leak into the answer, reasoning or calls that are content, text that gets lost between messages, and a grammar
that does not wait for the message to the user.
"""

import json
import random

import pytest
from support.chats import MUSE
from text.test_tool_calls import CODE, TOOLS, cuts

from minirt.text.addressed import ADDRESSED, AddressedParser
from minirt.text.reply import ArgumentsDelta, ContentDelta, ReasoningDelta, collect
from minirt.text.reply_format import ReplyFormat
from minirt.text.tool_calls import FORMATS, detect_format

FORM = ReplyFormat.choose(MUSE)
PROMPT = "<|start|>user<|message|>to=user<|message|>?<|eot|><|start|>assistant"
NEXT = "<|eom|><|start|>assistant"
THINK, TALK, NOW = " to=self<|message|>", " to=user<|message|>", " to=now<|message|>"
OPEN, CLOSE = '<atem:function_calls><atem:invoke name="get_weather">', "</atem:invoke></atem:function_calls>"
CITY = '<atem:parameter name="city">'
OBJECT = '{"a": [1]}'
NOW_CALL = f'<atem:function_calls><atem:invoke name="now">{CLOSE}'


def parameter(name, value):
    return f'<atem:parameter name="{name}">{value}</atem:parameter>'


PATH, CONTENT = parameter("path", " /a b\n"), parameter("content", f"\n{CODE}\n\n")
QUOTES = parameter("city", "a </atem:invoke> b <atem:parameter name=")
PARIS = " to=get_weather<|message|>" + OPEN + parameter("city", "Paris") + parameter("days", 3) + CLOSE
PARIS_CALL = ("get_weather", '{"city": "Paris", "days": 3}')

# text, reasoning, content, calls as (name, arguments)
CASES = [
    (f"{TALK}Hello, é < <|b.\n", "", "Hello, é < <|b.\n", []),
    (f"{THINK}\nHm, é.\n{NEXT}{TALK}Hello.<|eot|>", "Hm, é.", "Hello.", []),
    (f"{THINK}Hm.{NEXT}{TALK}Hello.".strip(), "Hm.", "Hello.", []),  # the tokenizer may have left out the first space
    (f"<|start|>assistant{THINK}Hm.{NEXT}{TALK}Hello.", "Hm.", "Hello.", []),  # or the model repeats the prompt's end
    (f"{THINK}a{NEXT}{THINK}b {NEXT}{TALK}c{NEXT}{TALK}d", "a\n\nb", "c\n\nd", []),
    (f"{THINK}Hm.{NEXT}{PARIS}{NEXT}{NOW}{NOW_CALL}<|eot|>", "Hm.", "", [PARIS_CALL, ("now", "{}")]),
    (f"{PARIS}{NEXT}{THINK}Hm.{NEXT}{TALK}It rains.", "Hm.", "It rains.", [PARIS_CALL]),
    (f"{TALK}I look.{NEXT}{PARIS}\n<|eom|>\n", "", "I look.", [PARIS_CALL]),
    (f"{NOW}\n{NOW_CALL}\n{NOW_CALL}\n", "", "", [("now", "{}"), ("now", "{}")]),  # two in one message
    (f" to=functions.now<|message|>{NOW_CALL}", "", "", [("now", "{}")]),  # the call says which tool it is
    (f"{NOW}{NOW_CALL} done{NEXT}{TALK}a", "", " done\n\na", [("now", "{}")]),
    # values: typed by the schema; texts as they are, with white space at their ends and markers that they quote
    (f" to=x<|message|>{OPEN}{parameter('exact', 'True')}{parameter('at', 'null')}{parameter('o', OBJECT)}{parameter('days', 'x')}{parameter('new', 5)}{CLOSE}",
     "", "", [("get_weather", '{"exact": true, "at": null, "o": {"a": [1]}, "days": "x", "new": "5"}')]),
    (f' to=x<|message|><atem:function_calls>\n<atem:invoke name="write_file">\n{PATH}\n{CONTENT}\n</atem:invoke>\n</atem:function_calls>',
     "", "", [("write_file", json.dumps({"path": " /a b\n", "content": "\n" + CODE + "\n\n"}, ensure_ascii=False))]),
    (f' to=x<|message|>{OPEN}{QUOTES}{CLOSE}', "", "", [("get_weather", '{"city": "a </atem:invoke> b <atem:parameter name="}')]),
    # only a message that is not to the user, nor to self, may have calls
    (f"{THINK}{NOW_CALL}{NEXT}{TALK}{NOW_CALL}", NOW_CALL, NOW_CALL, []),
    # no header
    ("Hello <|b> \n", "", "Hello <|b> \n", []),
    ("to=day is", "", "to=day is", []), ("assistants to=self", "", "assistants to=self", []), (" \n", "", " \n", []), ("", "", "", []),
    (f"So {NOW_CALL}", "", "So", [("now", "{}")]),
    (f"<|message|>a{NEXT}<|message|>b", "", "a\n\nb", []),
    (f"Hello.{NEXT}{THINK}a{NEXT}: b", "a", "Hello.\n\n<|start|>assistant: b", []),
    (f"{TALK}a<|eom|> b", "", "a\n\n b", []),
    # one message that does not end before the next
    (f"{THINK}a<|start|>assistant{TALK}b", "a", "b", []),
    # others
    (f"{TALK}a{NEXT} to=browser.open<|message|>{{\"u\": 1}}", "", 'a\n\nto=browser.open<|message|>{"u": 1}', []),
    (f" to=browser<|message|>{NEXT}{TALK}b", "", "to=browser<|message|>\n\nb", []),
    (" to=" + "x" * 300 + "<|message|>a", "", " to=" + "x" * 300 + "<|message|>a", []),
    # cut off
    (" to=se", "", "", []), (f"{THINK}Hm. <|e", "Hm. <|e", "", []), (f"{THINK}Hm.{NEXT} to=", "Hm.", "", []), (f"{THINK}Hm.<|eom|>", "Hm.", "", []),
    (f"{THINK}Hm.<|eom|><|start|>assis", "Hm.", "", []), (THINK, "", "", []), (" <|sta", "", " <|sta", []),
    (f" to=x<|message|>{OPEN}{CITY}Pa", "", "", [("get_weather", '{"city": "Pa')]),
    (f" to=x<|message|>{OPEN}<atem:parameter", "", f"to=x<|message|>{OPEN}<atem:parameter", []),
    (f"{NOW}{NOW_CALL[:-3]}", "", "", [("now", "{}")]),
    # damaged calls: a parameter that is not closed, at the end or before another; text among parameters; two names
    (f" to=x<|message|>{OPEN}{CITY}Oslo{CLOSE}{NEXT}{TALK}a", "", "a", [("get_weather", '{"city": "Oslo"}')]),
    (f" to=x<|message|>{OPEN}{CITY}Oslo\n{parameter('days', 3)}{CLOSE}", "", "", [("get_weather", '{"city": "Oslo\\n", "days": 3}')]),
    (f" to=x<|message|>{OPEN}{parameter('days', 3)}?{CLOSE}", "", f"?{CLOSE}", [("get_weather", '{"days": 3')]),
    (f' to=x<|message|>{OPEN}{CITY}\n<atem:parameter name="days"">3', "", "", [("get_weather", '{"city": "\\n<atem:parameter name=\\"days\\"\\">3')]),
    ('to=x<|message|><atem:function_calls><atem:invoke name="a" b="c">', "", 'to=x<|message|><atem:function_calls><atem:invoke name="a" b="c">', []),
]  # fmt: skip


def run(parser, pieces):
    reply = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES, ids=range(len(CASES)))
def test_every_cut_gives_the_same_reply(text, reasoning, content, calls):
    """Also catches a tag whose `">` is cut in two."""
    for pieces in cuts(text):
        assert run(FORM.parser(PROMPT, TOOLS), pieces) == (reasoning, content, calls), pieces


def test_random_damage_never_raises_and_loses_nothing():
    """Each word of random pieces of the format is in the result once, however it is cut; only headers go."""
    rng = random.Random(0)
    parts = [THINK, TALK, NOW, NEXT, "<|eom|>", "<|start|>", "assistant", " to=", "<|message|>", OPEN, CLOSE, NOW_CALL, parameter("city", "word"), '">', "\n", " ", "<"]
    for _ in range(600):
        text = "".join(part + (f" w{i}w " if rng.random() < 0.5 else "") for i, part in enumerate(rng.choices(parts, k=rng.randint(1, 10))))
        whole = run(FORM.parser(PROMPT, TOOLS), [text])
        assert run(FORM.parser(PROMPT, TOOLS), list(text)) == whole, text
        assert all(str(whole).count(word) == 1 for word in text.split() if word.startswith("w") and word.endswith("w")), text


def test_nothing_waits_without_need():
    parser = FORM.parser(PROMPT, TOOLS)
    assert parser.feed(THINK) == []
    assert parser.feed("Hm") == [ReasoningDelta("Hm")]
    assert parser.feed(". <") == [ReasoningDelta(".")]
    assert parser.feed(f"b{NEXT}{TALK}a") == [ReasoningDelta(" <b"), ContentDelta("a")]
    assert parser.feed(" b\n") == [ContentDelta(" b\n")]
    start, first = parser.feed(f'{NEXT} to=x<|message|>{OPEN}<atem:parameter name="city">Os')
    assert (start.name, start.index, first) == ("get_weather", 0, ArgumentsDelta(0, '{"city": "Os'))
    assert parser.feed("lo") == [ArgumentsDelta(0, "lo")]
    assert FORM.parser(PROMPT, TOOLS).feed("Hel") == [ContentDelta("Hel")]


def test_what_the_prompt_has_of_the_answer():
    """Catches a continued message whose text is shown again, or whose address is forgotten; earlier messages do not count."""
    def read(begun, text):
        return run(FORM.parser(PROMPT + begun, TOOLS), [text])

    assert read(TALK, f" a{NEXT}{TALK}b") == ("", " a\n\nb", [])
    assert read(f"{TALK}Well", ", a.") == ("", ", a.", [])
    assert read(THINK, f" a{NEXT}{TALK}b") == ("a", "b", [])
    assert read(f"{THINK}Well", f", a{NEXT}{TALK}b") == (", a", "b", [])
    assert read(" to=self", "<|message|>a") == ("a", "", [])
    assert read("<|message|>old<|eot|>", f"{TALK}b") == ("", "b", [])
    assert run(FORM.parser("<|start|>user<|message|>old<|eot|>", TOOLS), ["b"]) == ("", "b", [])
    assert run(FORM.parser("no prompt of this form", TOOLS), [f"{TALK}b"]) == ("", "b", [])


def test_the_form_is_recognised_by_its_template():
    assert detect_format(MUSE) == "muse_glimmer"
    assert (FORM.tool_calls, FORM.reasoning) == ("muse_glimmer", ADDRESSED)
    assert FORM.needs_special_tokens({"<|message|>"})
    assert not FORM.needs_special_tokens({"<think>"})
    without = ReplyFormat.choose("{{ 'to=self<|message|>' ~ m ~ '<|eom|>' }}")
    assert (without.tool_calls, without.reasoning) == (None, ADDRESSED)
    assert ReplyFormat.choose("to=self {{ m }}").reasoning is None
    assert ReplyFormat.choose("{{ m }}", None, "muse_glimmer") == FORM
    assert ReplyFormat.choose(MUSE, None, "none") == without


def test_a_grammar_begins_with_the_message_to_the_user():
    """Catches JSON that is demanded of the reasoning, and one that never comes because the prompt has opened the message."""
    for begun in ("", THINK, " to=", f"{THINK}a", NOW):
        assert FORM.opens_reasoning(PROMPT + begun), begun
    for begun in (TALK, f"{TALK}a", "<|message|>a", TALK.strip()):
        assert not FORM.opens_reasoning(PROMPT + begun), begun
    form = ReplyFormat(reasoning=ADDRESSED)  # that of an answer with a grammar
    assert form.needs_special_tokens({"<|eom|>"})
    text = f"{THINK}Hm.{NEXT}{PARIS}{NEXT}{TALK}"
    aside = f"Hm.\n\n{PARIS.strip()}"  # else the content is no JSON
    assert run(form.parser(PROMPT, TOOLS, "none"), [text + "{}"]) == (aside, "{}", [])
    listed = text + '[{"name": "now", "arguments": {"a": 1}}]'
    assert run(form.parser(PROMPT, TOOLS, "required"), [listed]) == (aside, "", [("now", '{"a": 1}')])


def test_the_choice_of_tools():
    text = f"{THINK}Hm.{NEXT}{PARIS}"
    assert run(FORM.parser(PROMPT, TOOLS, "none"), [text]) == run(FORM.parser(PROMPT, [], "auto"), [text]) == ("Hm.", PARIS.strip(), [])
    named = {"type": "function", "function": {"name": "now"}}
    assert run(FORM.parser(PROMPT, TOOLS, named), [f'{TALK}{{"a": 1}}']) == ("", "", [("now", '{"a": 1}')])


def test_other_formats_of_calls_can_be_addressed():
    parser = AddressedParser("", lambda: FORMATS["hermes"].parser(TOOLS))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert run(parser, [f"{NOW}{call}{NEXT}{NOW}{call}"]) == ("", "", [("now", "{}"), ("now", "{}")])
