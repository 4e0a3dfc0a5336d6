"""Tools and reasoning in chats: the front beside a fake engine that sends hand-written answers, read by OpenAI's own client.

Catches calls and reasoning that streams and whole answers show differently, deltas that clients cannot join, a `tool_choice` that
does not reach the engine, and a template or a parser that does not see what the request says.
"""

import json

import openai
import pytest
from support.chats import TEMPLATES, Model
from support.server import answer, answered, message

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"], "additionalProperties": False}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
USER = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
ATEM = (  # Muse-Glimmer's
    '<atem:function_calls><atem:invoke name="weather"><atem:parameter name="city">Zürich</atem:parameter>'
    '<atem:parameter name="days">3</atem:parameter></atem:invoke></atem:function_calls>'
)
ZURICH = ("weather", '{"city": "Zürich", "days": 3}')


class Chats(Model):
    async def complete(self, *texts, reason="stop", together=1, streams=False, **fields):
        """What the client reads, if the model answers with these texts, one for each choice."""
        body = {"model": "fake", "messages": USER, "n": len(texts), "seed": 1, "stream": streams, "timeout": 20} | fields
        return await self.answered(self._read(body, streams), *texts, reason=reason, together=together)

    async def _read(self, body, streams):
        found = await self.client.chat.completions.create(**body)
        return [chunk async for chunk in found] if streams else found

    async def refused(self, **fields):
        """The `param` of the error of a request."""
        with pytest.raises(openai.BadRequestError) as error:
            await self.client.chat.completions.create(**({"model": "fake", "messages": USER, "tools": TOOLS} | fields))
        return error.value.param


run, on_model = Chats.run, Chats.on


def whole(choice):
    """Content, reasoning, calls and the reason of a whole answer."""
    own = choice.message
    reasoning = getattr(own, "reasoning", None)
    assert reasoning == getattr(own, "reasoning_content", None)
    calls = own.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    pairs = [(call.function.name, call.function.arguments) for call in calls]
    return own.content or "", reasoning or "", pairs, choice.finish_reason


def joined(chunks, index=0):
    """The same of a stream, joined as clients do it: calls by their index, texts in order."""
    content, reasoning, calls, reasons = "", "", {}, []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert not reasons
            content += choice.delta.content or ""
            own = getattr(choice.delta, "reasoning", None) or ""
            assert own == (getattr(choice.delta, "reasoning_content", None) or "")
            reasoning += own
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index not in calls
                    assert call.type == "function"
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert list(calls) == list(range(len(calls)))
    return content, reasoning, [tuple(call) for call in calls.values()], reasons[0]


# model, its answer, content, reasoning, calls
ANSWERS = [
    ("hermes", "No call: <tool_cal a < b\n", "No call: <tool_cal a < b\n", "", []),
    ("hermes", f"Let me see.\n\n{CALL}\n{NOW_CALL}", "Let me see.", "", [ZURICH, ("now", "{}")]),
    ("qwen3_coder", "Well:\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>",
     "Well:", "", [("weather", '{"city": "Paris", "days": 3}'), ("now", "{}")]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Oslo"}}', "",
     "", [("now", "{}"), ("weather", '{"city": "Oslo"}')]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', "", []),
    ("thinks", f"<think>\nIt is {NOW_CALL}, no.\n</think>\n\nSo {CALL}", "So ", f"It is {NOW_CALL}, no.", [ZURICH]),
    ("opens", f"Hm, é\n</think>\n{CALL}", "", "Hm, é", [ZURICH]),
    ("special", f"Hm, é\n</think>\n{CALL}", "", "Hm, é", [ZURICH]),
    ("qwen3_5", f"Hm, é\n</think>\n\nWell:\n\n{CODER}\n{CODER}", "Well:", "Hm, é", [ZURICH, ZURICH]),
    ("qwen3_5", f"Hm, é\n\n{CODER}", "", "Hm, é", [ZURICH]),
    ("qwen3_5", "Hm, é\n</think>\n\nNo.", "No.", "Hm, é", []),
    ("mistral", '[THINK]Hm, é[/THINK]Well:[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 3}[TOOL_CALLS]now[ARGS]{}',
     "Well:", "Hm, é", [ZURICH, ("now", "{}")]),
    ("muse_glimmer", f" to=self<|message|>Hm, é<|eom|><|start|>assistant to=weather<|message|>{ATEM}<|eom|><|start|>assistant"
     " to=user<|message|>Well: <b>", "Well: <b>", "Hm, é", [ZURICH]),
    ("muse_glimmer", " to=user<|message|>No.", "No.", "", []),
    ("gemma4", "Well: " + GEMMA_CALL + "<|tool_call>call:now{}<tool_call|>", "Well:", "", [ZURICH, ("now", "{}")]),
    ("gemma4", f"<|channel>thought\nHm, é\n<channel|>{GEMMA_CALL}", "", "Hm, é", [ZURICH]),
    ("harmony", "<|channel|>analysis<|message|>Hm, é<|end|><|start|>assistant<|channel|>commentary<|message|>Well: <b><|end|>"
     '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>'
     '{"city": "Zürich", "days": 3}<|call|>',
     "Well: <b>", "Hm, é", [ZURICH]),
    ("harmony", "<|channel|>final<|message|>No.", "No.", "", []),
    ("declared", '((a b))c CALL{"name": "now", "arguments": {"x": 1}}END', "c", "a b", [("now", '{"x": 1}')]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "text", "content", "reasoning", "calls"), ANSWERS)
def test_streams_and_whole_answers_are_the_same(folders, model, text, content, reasoning, calls):
    opened = {"chat_template_kwargs": {"enable_thinking": True}} if model in ("opens", "special") else {}
    fields = {"tools": TOOLS, "extra_body": opened}

    async def scenario(chats):
        found = whole((await chats.complete(text, **fields)).choices[0])
        assert (found[0].strip(), *found[1:3]) == (content.strip(), reasoning, calls)
        assert found[3] == ("tool_calls" if calls else "stop")
        for together in (1, 2, 7, 1000):
            assert joined(await chats.complete(text, together=together, streams=True, **fields)) == found
        if not calls and not reasoning:
            assert found[0] == content

    run(folders[model], scenario)


@on_model("hermes")
async def test_the_first_events_of_a_call(chats):
    """What OpenAI's stream has: the role, then the name with empty arguments, then their text, then an empty delta."""
    chunks = await chats.complete(f"A{CALL}", streams=True, tools=TOOLS)
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    start = next(delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert start.pop("id").startswith("call_")
    assert start == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert len([delta for delta in deltas if "tool_calls" in delta]) > 5  # arguments do not wait for the end
    assert deltas[-1] == {}
    assert not any("tool_call>" in str(delta) for delta in deltas)


@on_model("hermes")
async def test_several_choices_have_calls_of_their_own(chats):
    texts = (CALL, "Nothing.", NOW_CALL + CALL)
    found = [whole(choice) for choice in (await chats.complete(*texts, tools=TOOLS)).choices]
    assert [own[2:] for own in found] == [([ZURICH], "tool_calls"), ([], "stop"), ([("now", "{}"), ZURICH], "tool_calls")]
    chunks = await chats.complete(*texts, streams=True, tools=TOOLS)
    assert [joined(chunks, index) for index in range(3)] == found


@on_model("hermes")
async def test_one_call_only(chats):
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    found = whole((await chats.complete(f"a{NOW_CALL}{CALL}", **fields)).choices[0])
    assert found == ("a", "", [("now", "{}")], "tool_calls")
    assert joined(await chats.complete(f"a{NOW_CALL}{CALL}", streams=True, **fields)) == found


@on_model("opens")
async def test_an_answer_that_is_cut_off(chats):
    """Within arguments, within a marker, and within the reasoning."""
    opened = {"tools": TOOLS, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    for text, expected in (
        (f"x</think>{CALL.partition('rich')[0]}", ("", "x", [("weather", '{"city": "Zü')], "length")),
        ("x</think>y<tool_c", ("y<tool_c", "x", [], "length")),
        ("x</thi", ("", "x</thi", [], "length")),
    ):
        assert whole((await chats.complete(text, reason="length", **opened)).choices[0]) == expected
        assert joined(await chats.complete(text, reason="length", streams=True, **opened)) == expected


@on_model("hermes")
async def test_every_token_has_its_log_probability(chats):
    text = f"Well {CALL}"
    count = len(chats.tokens(text, "stop"))
    for together in (1, 3):
        chunks = await chats.complete(text, streams=True, together=together, tools=TOOLS, logprobs=True)
        rows = [row.logprob for c in chunks if c.choices and c.choices[0].logprobs for row in c.choices[0].logprobs.content]
        assert rows == [-float(i) for i in range(count)]
        assert joined(chunks)[2] == [ZURICH]
    found = (await chats.complete(text, tools=TOOLS, logprobs=True)).choices[0]
    assert [row.logprob for row in found.logprobs.content] == rows


@on_model("hermes")
async def test_without_tools_or_with_none_there_are_no_calls(chats):
    for fields, has_tools in (({}, False), ({"tools": []}, False), ({"tools": TOOLS, "tool_choice": "none"}, True)):
        found = whole((await chats.complete(CALL, **fields)).choices[0])
        assert found == (CALL, "", [], "stop")
        assert joined(await chats.complete(CALL, streams=True, **fields)) == found
        assert ("weather" in chats.prompt) == has_tools


@on_model("special")
async def test_markers_that_are_special_tokens(chats):
    """The decoder keeps special tokens only in answers that are parsed by them."""
    await chats.complete("a", tools=TOOLS)
    assert chats.last.sampling.skip_special_tokens is False
    chats.front.reply_format = type(chats.front.reply_format)("hermes")
    await chats.complete(f"a{CALL}")
    assert chats.last.sampling.skip_special_tokens is True


@on_model("opens")
async def test_what_reaches_the_template_and_the_parser(chats):
    for thinks, start in ((True, "bot:<think>"), (False, "bot:<think></think>")):
        body = {"chat_template_kwargs": {"enable_thinking": thinks}}
        found = whole((await chats.complete("a", tools=TOOLS, extra_body=body)).choices[0])
        assert found[:2] == (("", "a") if thinks else ("a", ""))
        assert chats.prompt == f"{json.dumps(TOOLS)}\nuser: Weather?\n{start}"
    body = {"add_generation_prompt": False}
    assert whole((await chats.complete("a", extra_body=body)).choices[0])[:2] == ("a", "")
    assert chats.prompt == "user: Weather?\n"
    ends = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "<think>I"}, {"type": "text", "text": "say"}]}]
    body = {"continue_final_message": True}
    found = whole((await chats.complete(" so</think>b", messages=ends, extra_body=body)).choices[0])
    assert found[:2] == ("b", "so")
    assert chats.prompt.endswith("assistant: <think>I\nsay")  # parts of a text are joined as in vLLM
    ends[1]["content"] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body |= {"echo": True}
    found = whole((await chats.complete(" three", messages=ends, extra_body=body)).choices[0])
    assert found[:2] == ("one\ntwo three", "")
    assert joined(await chats.complete(" three", messages=ends, extra_body=body, streams=True)) == found


@on_model("hermes")
async def test_calls_and_their_results_reach_the_template(chats):
    function = {"name": "now", "arguments": '{"a": 1}'}
    history = [
        *USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
    ]  # fmt: skip
    await chats.complete("It is noon.", messages=history, tools=TOOLS)
    assert chats.prompt.endswith("user: Weather?\nassistant: \ntool: noon\n")


@pytest.mark.parametrize("model", ["opens", "qwen3_5"])
def test_calls_that_are_forced(folders, model):
    """By a grammar: a list of calls, or the arguments of the named function. It begins after a block that the prompt opened."""

    async def scenario(chats):
        arguments = '{"city": "Zürich", "days": 3}'
        listed = f'[{{"name": "weather", "arguments": {arguments}}}]'
        named = {"type": "function", "function": {"name": "weather"}}
        for choice, text in (("required", listed), (named, arguments)):
            for thinks, before in ((True, "Hm.</think>"), (False, "")):
                fields = {"tools": TOOLS, "tool_choice": choice}
                fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinks}}
                found = whole((await chats.complete(before + text, **fields)).choices[0])
                assert found == ("", "Hm." if thinks else "", [ZURICH], "tool_calls")
                spec = chats.last.sampling.structured_outputs
                assert spec.reasoning_end == ("</think>" if thinks else None)
                schema = json.loads(spec.json)
                if choice == "required":
                    names = [own["properties"]["name"] for own in schema["items"]["anyOf"]]
                    assert names == [{"const": "weather"}, {"const": "now"}]
                    assert "maxItems" not in schema
                else:
                    assert schema == WEATHER["function"]["parameters"]
                assert joined(await chats.complete(before + text, streams=True, **fields)) == found
        await chats.complete(listed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert json.loads(chats.last.sampling.structured_outputs.json)["maxItems"] == 1
        # A function without a schema takes an object, not any JSON.
        await chats.complete("{}", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
        assert json.loads(chats.last.sampling.structured_outputs.json)["type"] == "object"
        loose = {"type": "function", "function": {"name": "loose", "parameters": {"properties": {"a": {}}}}}
        await chats.complete("{}", tools=[loose], tool_choice={"type": "function", "function": {"name": "loose"}})
        assert json.loads(chats.last.sampling.structured_outputs.json) == {"type": "object", "properties": {"a": {}}}
        # The format of the content says nothing about calls.
        await chats.complete(listed, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
        assert json.loads(chats.last.sampling.structured_outputs.json)["type"] == "array"

    run(folders[model], scenario)


@on_model("qwen3_5")
async def test_qwen3_5_thinks_unless_it_is_told_not_to(chats):
    """By `enable_thinking`, or by a reasoning_effort of none; calls and their reasoning reach the next prompt as they were."""
    for fields in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        found = whole((await chats.complete("Rain.", tools=TOOLS, **fields)).choices[0])
        assert found == ("Rain.", "", [], "stop")
        assert joined(await chats.complete("Rain.", tools=TOOLS, streams=True, **fields)) == found
        assert chats.prompt.endswith("<think>\n\n</think>\n\n")
    text = f"Hm, é\n</think>\n\n{CODER}"
    message = (await chats.complete(text, tools=TOOLS)).choices[0].message
    assert chats.prompt.endswith("<|im_start|>assistant\n<think>\n")
    calls = [call.model_dump() for call in message.tool_calls]
    history = [*USER, {"role": "assistant", "content": message.content, "reasoning": message.reasoning, "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}]
    await chats.complete("</think>ok", messages=history, tools=TOOLS)
    turns = f"<think>\n{text}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    assert chats.prompt.endswith(turns + "<|im_start|>assistant\n<think>\n")


@on_model("muse_glimmer")
async def test_muse_glimmer(chats):
    """Catches an effort that does not reach the prompt, a history that loses its form, and a grammar that holds for reasoning."""
    for fields in ({"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"reasoning_strength": "high"}}}):
        await chats.complete(" to=user<|message|>a", **fields)
        assert chats.prompt.startswith("<|start|>system<|message|>Reasoning strength: high\n")
    answer = f" to=self<|message|>Hm, é<|eom|><|start|>assistant to=weather<|message|>{ATEM}<|eom|>"
    own = (await chats.complete(answer, tools=TOOLS)).choices[0].message
    assert chats.prompt.endswith("<|start|>assistant")
    calls = [call.model_dump() for call in own.tool_calls]
    history = [*USER, {"role": "assistant", "reasoning": own.reasoning, "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}]
    await chats.complete("ok", messages=history, tools=TOOLS)
    assert chats.prompt.endswith(f"<|start|>assistant{answer}<|start|>tool<|message|>rain<|eot|><|start|>assistant")
    text = ' to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>{"a": 1}'
    for streams in (False, True):
        reply = await chats.complete(text, streams=streams, response_format={"type": "json_object"})
        assert (joined(reply) if streams else whole(reply.choices[0])) == ('{"a": 1}', "Hm", [], "stop")
        assert chats.last.sampling.structured_outputs.reasoning_end == "to=user<|message|>"
    listed = text.replace('{"a": 1}', '[{"name": "now", "arguments": {}}]')
    reply = whole((await chats.complete(listed, tools=TOOLS, tool_choice="required")).choices[0])
    assert reply == ("", "Hm", [("now", "{}")], "tool_calls")


@on_model("gemma4")
async def test_gemma4(chats):
    """Catches thinking that is not turned on, a grammar that holds for reasoning or never begins, quotes that end a string,
    nested arguments that are lost, a history that loses its form, and thoughts after a tool's result that are content."""
    off, text = "<|turn>model\n<|channel>thought\n<channel|>", "<|channel>thought\nHm\n<channel|>"
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    grammar = {"response_format": {"type": "json_object"}}
    for streams in (False, True):
        reply = await chats.complete('{"a": 1}', streams=streams, **grammar)
        assert (joined(reply) if streams else whole(reply.choices[0])) == ('{"a": 1}', "", [], "stop")
        assert chats.prompt.endswith(off)
        assert chats.last.sampling.structured_outputs.reasoning_end is None
        reply = await chats.complete(text + '{"a": 1}', streams=streams, **grammar, **thinks)
        assert (joined(reply) if streams else whole(reply.choices[0])) == ('{"a": 1}', "Hm", [], "stop")
        assert "<|think|>" in chats.prompt
        assert chats.prompt.endswith("<|turn>model\n")
        assert chats.last.sampling.structured_outputs.reasoning_end == "<channel|>"
    deep = '<|tool_call>call:weather{city:<|"|>"a", {b:[c]}, é\n<|"|>,more:{k:[1,{x:true,y:null}],z:<|"|><|"|>},days:-2.5}'
    deep += "<tool_call|>"
    own = (await chats.complete(text + deep, tools=TOOLS, **thinks)).choices[0].message
    arguments = {"city": '"a", {b:[c]}, é\n', "more": {"k": [1, {"x": True, "y": None}], "z": ""}, "days": -2.5}
    assert json.loads(own.tool_calls[0].function.arguments) == arguments
    calls = [call.model_dump() for call in own.tool_calls]
    history = [*USER, {"role": "assistant", "reasoning": own.reasoning, "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}]
    after = await chats.complete(text + "Rain.", messages=history, tools=TOOLS, **thinks)
    assert whole(after.choices[0]) == ("Rain.", "Hm", [], "stop")
    result = '<|tool_response>response:unknown{value:<|"|>rain<|"|>}<tool_response|>'
    assert chats.prompt.endswith(f"<|turn>model\n{text}{deep}{result}")
    listed = text + '[{"name": "now", "arguments": {}}]'
    reply = whole((await chats.complete(listed, tools=TOOLS, tool_choice="required", **thinks)).choices[0])
    assert reply == ("", "Hm", [("now", "{}")], "tool_calls")
    broken = '<|tool_call>call:weather{city:<|"|>Par'
    assert whole((await chats.complete(broken, tools=TOOLS)).choices[0])[2] == []


@on_model("harmony")
async def test_harmony(chats):
    """Catches an effort that does not reach the prompt, analysis that is kept after an answer or lost before one, content beside
    reasoning that the template refuses in a message with calls, and a grammar that holds before the final channel."""
    think, final = "<|channel|>analysis<|message|>Hm, é<|end|><|start|>assistant", "<|channel|>final<|message|>"
    await chats.complete(f"{final}a", reasoning_effort="high")
    assert chats.prompt.startswith("<|start|>system<|message|>Reasoning: high\n")
    look = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>'
    own = (await chats.complete(f"{think}{look}{call}", tools=TOOLS)).choices[0].message
    assert (own.content, own.reasoning) == ("I look.", "Hm, é")
    said = {"role": "assistant", "content": own.content, "reasoning": own.reasoning}
    said["tool_calls"] = [one.model_dump() for one in own.tool_calls]
    history = [*USER, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}]
    await chats.complete(f"{final}ok", messages=history, tools=TOOLS)
    kept, result = "<|start|>assistant<|channel|>analysis<|message|>Hm, é\n\nI look.<|end|>", "<|channel|>commentary<|message|>"
    result = f'<|start|>functions.weather to=assistant{result}"rain"<|end|>'
    assert chats.prompt.endswith(f"{kept}<|start|>assistant{call}{result}<|start|>assistant")
    history += [{"role": "assistant", "content": "It rains.", "reasoning": "So"}, *USER]
    await chats.complete(f"{final}ok", messages=history, tools=TOOLS)
    assert "analysis<|message|>" not in chats.prompt
    assert f"{result}<|start|>assistant{final}It rains.<|end|>" in chats.prompt
    for header in (final, "<|channel|>final <|constrain|>json<|message|>"):
        text = f'{think}{look}{header}{{"a": 1}}'
        for streams in (False, True):
            reply = await chats.complete(text, streams=streams, response_format={"type": "json_object"})
            answer = joined(reply) if streams else whole(reply.choices[0])
            assert answer == ('{"a": 1}', "Hm, é\n\nI look.", [], "stop")
        assert chats.last.sampling.structured_outputs.reasoning_end == final
    listed = text.replace('{"a": 1}', '[{"name": "now", "arguments": {}}]')
    reply = whole((await chats.complete(listed, tools=TOOLS, tool_choice="required")).choices[0])
    assert reply == ("", "Hm, é\n\nI look.", [("now", "{}")], "tool_calls")


async def asked_by_chat(chats, history, text, streams, **fields):
    """The messages to send back, calls as (id, name, arguments), and the content."""
    reply = await chats.complete(text, messages=history, tools=TOOLS, streams=streams, **fields)
    content, reasoning, calls, _ = joined(reply) if streams else whole(reply.choices[0])
    calls = [(f"call_{len(history)}", *call) for call in calls]
    said = {"role": "assistant", "content": content or None, "reasoning_content": reasoning}
    functions = [{"id": i, "type": "function", "function": {"name": name, "arguments": text}} for i, name, text in calls]
    return [said | ({"tool_calls": functions} if calls else {})], calls, content


async def asked_by_responses(chats, history, said, streams, together=1, **fields):
    async def read():
        tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
        reply = await chats.client.responses.create(model="fake", input=history, tools=tools, stream=streams, **fields)
        return [event async for event in reply][-1].response if streams else reply

    response = await chats.answered(read(), said, together=together)
    calls = [(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"]
    return [item.to_dict() for item in response.output], calls, response.output_text


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_tool_loop_of_harmony(folders, api, streams):
    """Every prompt is the one before it, the answer as the model wrote it, and the result of its call.

    Catches agents that lose the reasoning before a call, a call whose result has another's name, and prefixes that change.
    """

    async def scenario(chats):
        think = "<|channel|>analysis<|message|>Hm, é {}.<|end|><|start|>assistant"
        call, result = " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>", "<|start|>functions.{} to=assistant"
        result += '<|channel|>commentary<|message|>"{}"<|end|><|start|>assistant'
        asked, history, prompt = {"chat": asked_by_chat, "responses": asked_by_responses}[api], list(USER), None
        for i, (name, arguments) in enumerate([ZURICH, ("now", "{}"), ZURICH]):
            text = think.format(i) + call.format(name, arguments)
            said, calls, content = await asked(chats, history, text, streams)
            assert ([call[1:] for call in calls], content) == ([(name, arguments)], "")
            assert prompt in (None, chats.prompt)
            prompt = chats.prompt + text + result.format(name, f"rain {i}")
            to_chat = {"role": "tool", "tool_call_id": calls[0][0], "content": f"rain {i}"}
            to_responses = {"type": "function_call_output", "call_id": calls[0][0], "output": f"rain {i}"}
            history += [*said, to_chat if api == "chat" else to_responses]
        _, calls, content = await asked(chats, history, f"{think.format(3)}<|channel|>final<|message|>It rains.", streams)
        assert (calls, content, chats.prompt) == ([], "It rains.", prompt)

    run(folders["harmony"], scenario)


FORM = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FORMS = {"chat": {"response_format": {"type": "json_schema", "json_schema": FORM}}, "responses": {"text": {"format": FORM}}}
BEFORE_A_GRAMMAR = {
    "harmony": ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
                f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ZURICH[1]}",
                "<|call|>", "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    "muse_glimmer": (f" to=self<|message|>Hm<|eom|><|start|>assistant to=weather<|message|>{ATEM}", "<|eom|>",
                     "<|eom|><|start|>assistant to=user<|message|>"),
}  # fmt: skip


@pytest.mark.parametrize("api", FORMS)
@pytest.mark.parametrize("name", BEFORE_A_GRAMMAR)
def test_tools_and_a_schema(folders, name, api):
    """A call may come instead of the JSON text, or before it, unless `tool_choice` says otherwise.

    Catches agents with an output schema that never get a call, and a call where none or another form is asked for.
    """
    call, end, answer = BEFORE_A_GRAMMAR[name]

    async def scenario(chats):
        asked = {"chat": asked_by_chat, "responses": asked_by_responses}[api]
        for streams, together in ((False, 1), (True, 1), (True, 2), (True, 7), (True, 500)):
            for text, expected in ((call + end, ""), (f'{call}{answer}{{"a": 1}}', '{"a": 1}')):
                _, calls, content = await asked(chats, USER, text, streams, together=together, **FORMS[api])
                assert ([one[1:] for one in calls], content) == ([ZURICH], expected)
                spec = chats.last.sampling.structured_outputs
                assert (json.loads(spec.json), spec.may_call) == (FORM["schema"], True)
        _, calls, content = await asked(chats, USER, f'{call}{answer}{{"a": 1}}', True, tool_choice="none", **FORMS[api])
        assert (calls, content, chats.last.sampling.structured_outputs.may_call) == ([], '{"a": 1}', False)
        text = f'{call}{answer}[{{"name": "now", "arguments": {{}}}}]'
        _, calls, content = await asked(chats, USER, text, True, tool_choice="required", **FORMS[api])
        spec = chats.last.sampling.structured_outputs
        assert ([one[1:] for one in calls], content, spec.may_call) == ([("now", "{}")], "", False)
        assert json.loads(spec.json)["type"] == "array"

    run(folders[name], scenario)


@on_model("harmony")
async def test_a_stated_end_of_reasoning(chats):
    """Catches a request that says itself when its grammar begins, and gets calls, or cannot have them."""
    call, _, answer = BEFORE_A_GRAMMAR["harmony"]
    form = {"json": FORM["schema"], "reasoning_end": "<|channel|>final<|message|>"}
    for further, calls in (({}, []), ({"may_call": True}, [ZURICH]), ({"may_call": False}, [])):
        reply = await chats.complete(f'{call}{answer}{{"a": 1}}', tools=TOOLS, extra_body={"structured_outputs": form | further})
        assert whole(reply.choices[0])[::2] == ('{"a": 1}', calls)
    body = {"structured_outputs": {"json": FORM["schema"], "may_call": False}}
    reply = await chats.complete(f'{call}{answer}{{"a": 1}}', tools=TOOLS, extra_body=body)
    assert whole(reply.choices[0])[::2] == ('{"a": 1}', [])


EFFORT = "expected low or medium or high"
WRONG = [
    *[({"tool_choice": value}, "tool_choice: no such tool; expected none, auto, required, or .* weather, now; found")
      for value in ("any", "weather", {"type": "tool", "name": "weather"}, {"type": "function", "name": "weather"},
                    {"type": "function", "function": {"name": "functions.weather"}})],
    *[({"reasoning_effort": value}, f"reasoning_effort: not an acceptable value; {EFFORT}; found '{value}'")
      for value in ("extreme", "High", "", "none", "minimal")],
    ({"extra_body": {"reasoning_effort": 3}}, "reasoning_effort: wrong type; expected a string or null; found an integer"),
    ({"extra_body": {"chat_template_kwargs": {"reasoning_effort": 7}}}, f"kwargs.reasoning_effort: .*{EFFORT}; found 7"),
    *[({"tools": [{"type": kind}]}, rf"tools\[0\].type: a tool of another type; expected function; found {kind}")
      for kind in ("browser", "python", "custom", "code_interpreter", "mcp")],
    ({"tools": [], "tool_choice": "required"}, "tool_choice: needs tools; expected none or auto; found required"),
]  # fmt: skip


@on_model("harmony")
async def test_wrong_requests_of_harmony(chats):
    """Catches an effort that the model has never seen and that the template writes, and messages that say too little."""
    for fields, words in WRONG:
        body = {"model": "fake", "messages": USER, "tools": TOOLS, "timeout": 5} | fields
        with pytest.raises(openai.BadRequestError, match=words):
            await chats.client.chat.completions.create(**body)
    for effort in ("extreme", "xhigh"):
        with pytest.raises(openai.BadRequestError, match=f"reasoning.effort: .*; {EFFORT}; found '{effort}'"):
            await chats.client.responses.create(model="fake", input="a", reasoning={"effort": effort}, timeout=5)
    assert not chats.engine.requests
    for fields in ({"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "low"}}}, {}):
        await chats.complete("<|channel|>final<|message|>a", **fields)
        assert chats.prompt.startswith(f"<|start|>system<|message|>Reasoning: {'low' if fields else 'medium'}\n")


@on_model("hermes")
async def test_forced_calls_that_are_cut_off_have_no_content(chats):
    """Wherever: the text before the first call is the grammar's, not the model's."""
    arguments = '{"city": "Zürich", "days": 3}'
    listed = f'[ {{"name": "weather", "arguments": {arguments}}}, {{"name": "now", "arguments": {{}}}}]'
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, text in (("required", listed), (named, arguments)):
        for end in (*range(1, 20), *range(20, len(text), 7)):
            fields = {"tools": TOOLS, "tool_choice": choice, "reason": "length"}
            found = whole((await chats.complete(text[:end], **fields)).choices[0])
            assert (found[0], found[3]) == ("", "length"), text[:end]
            assert all(own[1] in text[:end] for own in found[2])
            assert joined(await chats.complete(text[:end], streams=True, **fields)) == found
    found = whole((await chats.complete("[", tools=TOOLS, tool_choice="required", reason="length")).choices[0])
    assert found == ("", "", [], "length")


# Answers as models write them, some of them wrong.
WRITTEN = [
    ("hermes", f"Well: {CALL}{NOW_CALL}", None), ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
    ("hermes", "<tool_call>{'name': 'now', 'arguments': {'a': 1}}</tool_call>", None),
    ("hermes", '[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}]', "required"),
    ("hermes", '{"city": "Zürich", "days": 3}', {"type": "function", "function": {"name": "weather"}}),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\nx\n</parameter>\n"
     "</function>\n</tool_call>", None),
    ("llama3_json", '{"name": "now", "parameters": "none"}', None), ("thinks", f"<think>\nHm.</think>\nSo {CALL}", None),
    ("qwen3_5", f"Hm, é\n</think>\n\nWell:\n\n{CODER}", None),
    ("declared", '((a b))c CALL{"name": "now", "arguments": {"x": 1}}END', None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "text", "choice"), WRITTEN)
def test_every_answer_goes_back(folders, model, text, choice):
    """What the server has sent, it accepts in the next turn, wherever the answer was cut off, in each of the APIs.

    Catches conversations that end for ever with a call whose arguments are no JSON, with reasoning and no content, or with an
    answer of nothing.
    """

    async def scenario(chats):
        async def asked(path, **fields):
            body = {"model": "fake", "messages": USER, "max_tokens": 99, "tools": TOOLS, "seed": 1} | fields
            body = {name: value for name, value in body.items() if value is not None}
            status, _, content = await answered(chats.ask(message(body, path)))
            assert status == 200, content
            return json.loads(content)

        async def turn(path, end, **fields):
            reason = "length" if 0 < end < len(text) else "stop"
            return await chats.answered(asked(path, **fields), text[:end], reason=reason)

        named = isinstance(choice, dict)
        flat = {"type": "function", "name": "weather"} if named else choice
        kind = {"type": "tool", "name": "weather"} if named else choice and {"type": "any"}
        own_tools = [own["function"] for own in TOOLS]
        typed = {"tools": [{"type": "function"} | own for own in own_tools], "messages": None, "max_tokens": None}
        plain = {"tools": [{"name": own["name"], "input_schema": own.get("parameters", {"type": "object"})} for own in own_tools]}
        for end in (0, *range(1, len(text), 7), len(text)):
            found = await turn("/v1/chat/completions", end, tool_choice=choice)
            own = found["choices"][0]["message"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "wrong"} for call in own.get("tool_calls", ())]
            await turn("/v1/chat/completions", end, messages=[*USER, own, *results, *USER])
            items = (await turn("/v1/responses", end, input=USER, tool_choice=flat, **typed))["output"]
            calls = [own["call_id"] for own in items if own["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call, "output": "wrong"} for call in calls]
            await turn("/v1/responses", end, input=[*USER, *items, *results, *USER], **typed)
            blocks = (await turn("/v1/messages", end, messages=USER, tool_choice=kind, **plain))["content"]
            uses = [own for own in blocks if own["type"] == "tool_use"]
            assert all(isinstance(own["input"], dict) for own in uses)
            results = [{"type": "tool_result", "tool_use_id": own["id"], "content": "wrong"} for own in uses]
            user = {"role": "user", "content": [*results, {"type": "text", "text": "Again."}]}
            await turn("/v1/messages", end, messages=[*USER, {"role": "assistant", "content": blocks}, user], **plain)

    run(folders[model], scenario)


@on_model("hermes")
async def test_null_arguments_are_none(chats):
    """As other servers and frameworks store a call without arguments."""
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": None}}
    history = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "noon"}]
    await chats.complete("It is noon.", messages=history, tools=TOOLS)
    items = [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "x", "name": "now", "arguments": None}]
    blocks = [{"type": "tool_use", "id": "x", "name": "now", "input": None}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "noon"}]}
    for path, body in (
        ("/v1/responses", {"input": [*items, {"type": "function_call_output", "call_id": "x", "output": "noon"}]}),
        ("/v1/messages", {"messages": [*USER, {"role": "assistant", "content": blocks}, result], "max_tokens": 9}),
    ):

        async def asked(path=path, body=body):
            return (await answered(chats.ask(message(body, path))))[0]

        assert await chats.answered(asked(), "It is noon.") == 200


def test_structured_output_is_content(folders):
    """Else JSON after a prompt that opens a block would be reasoning, and JSON with a name a call of Llama's format."""

    async def opened(chats):
        form = {"type": "json_object"}
        body = {"chat_template_kwargs": {"enable_thinking": True}}
        found = whole((await chats.complete('Hm</think>{"a": 1}', response_format=form, extra_body=body)).choices[0])
        assert found == ('{"a": 1}', "Hm", [], "stop")
        assert chats.last.sampling.structured_outputs.reasoning_end == "</think>"
        assert await chats.refused(tools=[], extra_body=body | {"structured_outputs": "x"}) == "structured_outputs"

    async def llama(chats):
        text = '{"name": "now", "parameters": {}}'
        found = whole((await chats.complete(text, tools=TOOLS, response_format={"type": "json_object"})).choices[0])
        assert found == (text, "", [], "stop")
        assert chats.last.sampling.structured_outputs.reasoning_end is None

    run(folders["opens"], opened)
    run(folders["llama3_json"], llama)


def test_what_is_refused(folders):
    async def scenario(chats):
        named = {"type": "function", "function": {"name": "other"}}
        for fields, param in (
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            ({"tools": [NOW, NOW]}, "tools[1].function.name"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tool_choice": named}, "tool_choice"), ({"tool_choice": "any"}, "tool_choice"),
            ({"tools": [], "tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ):  # fmt: skip
            assert await chats.refused(**fields) == param, fields
        assert not chats.engine.requests

    async def long(chats):
        tool = NOW | {"function": {"name": "f", "parameters": {"title": "y" * 300_000}}}
        assert await chats.refused(tool_choice="required", tools=[tool]) == "tools"

    async def unknown(chats):
        assert await chats.refused() == "tools"
        assert whole((await chats.complete(CALL, tools=TOOLS, tool_choice="none")).choices[0])[0] == CALL

    run(folders["hermes"], scenario)
    run(folders["plain"], long)
    run(folders["plain"], unknown)  # the model would not see the tools
    run(folders["unknown"], unknown)  # its calls could not be read
    run(folders["hermes"], unknown, tool_call_parser="none")


def test_a_format_by_its_name(folders):
    async def scenario(chats):
        assert whole((await chats.complete(CALL, tools=TOOLS)).choices[0])[2] == [ZURICH]

    run(folders["unknown"], scenario, tool_call_parser="hermes")
    run(folders["llama3_json"], scenario, tool_call_parser="hermes")


@on_model("hermes")
async def test_the_tools_of_tokenize(chats):
    status, _, body = await answered(chats.ask(message({"messages": USER, "tools": [NOW]}, "/tokenize")))
    assert status == 200
    assert chats.tokenizer.decode(json.loads(body)["tokens"]) == f"{json.dumps([NOW])}\nuser: Weather?\n"


@on_model("hermes")
async def test_what_tokenizer_info_says(chats):
    """lm-eval takes the chat template and the special tokens from it, wherever the model's files have them."""
    status, headers, body = await answered(chats.ask(message(b"", "/tokenizer_info", "GET")))
    assert (status, headers["content-type"]) == (200, "application/json")
    found = json.loads(body)
    assert found["chat_template"] == TEMPLATES["hermes"]
    assert found["eos_token"] == chats.tokenizer.info["eos_token"]
    assert isinstance(found["eos_token"], str)
    reader, _ = await chats.ask(message({"prompt": found["eos_token"], "add_special_tokens": False}, "/tokenize"))
    assert json.loads((await answer(reader))[2])["tokens"] == [chats.tokenizer.eos_token_id]
