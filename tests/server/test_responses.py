"""/v1/responses: hand-written answers of a fake engine and those of the embedded model, read by OpenAI's own client.

Catches events that the client cannot join or that lack fields of its types, streams that differ from whole answers, items that do
not reach the chat template, and fields that are ignored.
"""

import asyncio
import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from support.chats import Model, model_folders

from minirt import Generator, SamplingParams
from minirt.engine.request import TokenOutput
from minirt.errors import OutOfMemoryError

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"], "additionalProperties": False}}  # fmt: skip
NOW = {"type": "function", "name": "now", "description": "The time."}
TOOLS = [WEATHER, {"type": "web_search"}, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ZURICH = ("function_call", "weather", '{"city": "Zürich", "days": 3}')
NEXT = "<|eom|><|start|>assistant"
NOON = ("function_call", "now", "{}")
OPENED = {"chat_template_kwargs": {"enable_thinking": True}}
HISTORY = (  # a template that shows all that messages have
    "{{ tools | tojson }}\n{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }}={{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{# <tool_call> <think></think> #}bot{{ reasoning_effort }}:"
)
STREAM_EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


class Responses(Model):
    async def respond(self, text, /, reason="stop", **fields):
        """The whole response, if the model answers with this text."""
        return await self.answered(self._create(**fields), text, reason=reason)

    async def events(self, text, /, reason="stop", together=1, **fields):
        """The events of the stream, if the model answers with this text."""

        async def read():
            return [event async for event in await self._create(stream=True, **fields)]

        return await self.answered(read(), text, reason=reason, together=together)

    async def _create(self, **fields):
        return await self.client.responses.create(**({"model": "fake", "input": "Weather?", "timeout": 20} | fields))

    async def refused(self, **fields):
        """The `param` of the error of a request."""
        with pytest.raises(openai.BadRequestError) as error:
            await self._create(**fields)
        return error.value.param


run, on_model = Responses.run, Responses.on


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return model_folders(tmp_path_factory.mktemp("history"), history=HISTORY)["history"]


def shown(item):
    """What an output item says."""
    if item.type == "function_call":
        assert item.call_id.startswith("call_")
        return item.type, item.name, item.arguments
    (part,) = item.content
    assert part.type == {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
    return item.type, part.text


def told(events):
    """The final response of a stream, after checks that every event is well formed and says the same as the response."""
    for number, event in enumerate(events):
        STREAM_EVENT.validate_python(event.to_dict())
        assert event.sequence_number == number
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all((own.response.status, own.response.output, own.response.usage) == ("in_progress", [], None) for own in events[:2])
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    assert len({event.response.id for event in (*events[:2], events[-1])}) == 1
    done, open_id, text = [], None, ""
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert (open_id, event.output_index, event.item.status) == (None, len(done), "in_progress")
            open_id, text, ended = event.item.id, "", []
            continue
        assert event.output_index == len(done)
        if kind == "output_item.done":
            assert event.item.id == open_id
            assert ended == [text] * len(ended)
            assert shown(event.item)[-1] == text
            assert len(ended) == (1 if event.item.type == "function_call" else 2)
            done.append(event.item)
            open_id = None
            continue
        assert event.item_id == open_id
        if kind.endswith(".delta"):
            text += event.delta
        elif kind == "content_part.added":
            assert event.part.text == ""
        elif kind == "content_part.done":
            ended.append(event.part.text)
        else:
            assert kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done")
            ended.append(event.arguments if kind.startswith("function") else event.text)
    assert open_id is None
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.output]
    return last


# model, its answer, the output items
ANSWERS = [
    ("plain", " Hi, é.\n", [("message", " Hi, é.\n")]),
    ("plain", "", [("message", "")]),
    ("hermes", "No call: <tool_cal a < b\n", [("message", "No call: <tool_cal a < b\n")]),
    ("hermes", f"Let me see.\n\n{CALL}\n{NOW_CALL}", [("message", "Let me see."), ZURICH, NOON]),
    ("hermes", f"{NOW_CALL} It is noon. {CALL}", [NOON, ("message", "It is noon."), ZURICH]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
     [("function_call", "weather", '{"city": "Paris"}')]),
    ("thinks", f"<think>\nIt is {NOW_CALL}, no.\n</think>\n\nSo: {CALL}",
     [("reasoning", f"It is {NOW_CALL}, no."), ("message", "So:"), ZURICH]),
    ("opens", f"Hm, é\n</think>\n{CALL}", [("reasoning", "Hm, é"), ZURICH]),
    ("special", "Hm, é\n</think>\nSo.", [("reasoning", "Hm, é"), ("message", "So.")]),
    ("muse_glimmer", f" to=self<|message|>Hm, é{NEXT} to=now<|message|><atem:function_calls>"
     f'<atem:invoke name="now"></atem:invoke></atem:function_calls>{NEXT} to=self<|message|>So{NEXT} to=user<|message|>é',
     [("reasoning", "Hm, é"), NOON, ("reasoning", "So"), ("message", "é")]),
    ("harmony", "<|channel|>analysis<|message|>Hm, é<|end|><|start|>assistant<|channel|>commentary to=functions.now "
     "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>final<|message|>é",
     [("reasoning", "Hm, é"), NOON, ("reasoning", "So"), ("message", "é")]),
    ("declared", '((a b))c CALL{"name": "now", "arguments": {}}END', [("reasoning", "a b"), ("message", "c"), NOON]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "text", "items"), ANSWERS)
def test_streams_and_whole_answers_are_the_same(folders, model, text, items):
    fields = {} if model == "plain" else {"tools": TOOLS}
    if model in ("opens", "special"):
        fields["extra_body"] = OPENED

    def comparable(response):
        own = Response.model_validate(response.to_dict()).to_dict()  # all fields that the client's type needs
        for item in own["output"]:
            assert item.pop("id")
            item.pop("call_id", None)
        return {key: value for key, value in own.items() if key not in ("id", "created_at", "completed_at")}

    async def scenario(model):
        found = await model.respond(text, **fields)
        assert [(own[0], own[1].strip(), *own[2:]) for own in map(shown, found.output)] == [
            (own[0], own[1].strip(), *own[2:]) for own in items
        ]
        assert {item.status for item in found.output} == {"completed"}
        assert (found.status, found.object, found.error, found.incomplete_details) == ("completed", "response", None, None)
        for together in (1, 2, 7, 1000):
            assert comparable(told(await model.events(text, together=together, **fields))) == comparable(found)
        if all(own[0] == "message" for own in items):
            assert found.output_text == text

    run(folders[model], scenario)


@on_model("opens")
async def test_deltas_do_not_wait_for_the_end(model):
    events = await model.events(f"It is so, and not so.</think>So it is so. {CALL}", tools=TOOLS, extra_body=OPENED)
    kinds = [event.type for event in events]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.count(f"response.{kind}.delta") > 2


@on_model("hermes")
async def test_the_stream_helper_of_the_client(model):
    class Place(pydantic.BaseModel):
        city: str
    async def read(**fields):
        async with model.client.responses.stream(model="fake", input="Where?", **fields) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_response()

    kinds, found = await model.answered(read(text_format=Place), '{"city": "Ur"}')
    assert kinds[-1] == "response.completed"
    assert found.output_parsed == Place(city="Ur")
    kinds, found = await model.answered(read(tools=TOOLS), f"So {CALL}")
    assert [item.type for item in found.output] == ["message", "function_call"]
    parsed = await model.answered(model.client.responses.parse(model="fake", input="a", text_format=Place), '{"city": "Ur"}')
    assert parsed.output_parsed == Place(city="Ur")


@on_model("opens")
async def test_the_usage(model):
    """Reasoning ends with the token that completes its text; the marker after it does not count."""
    async def sent(before, after):
        ids = [model.tokenizer.encode_plain(own) for own in (before, f"</think>{after}")]
        asked = asyncio.create_task(model.respond("", extra_body=OPENED))
        count = len(model.engine.requests)
        await model.engine.until(lambda e: len(e.requests) > count)
        model.engine.send(TokenOutput(model.last.id, (*ids[0], *ids[1]), "length", num_cached=3))
        return (await asked).usage, len(ids[0]), len(ids[0] + ids[1])

    for before, after in ((" Hm, é, 京. And so on", "Yes."), (" Hm", "")):
        usage, reasoning, generated = await sent(before, after)
        assert usage.output_tokens_details.reasoning_tokens == reasoning
        assert usage.output_tokens == generated
        assert usage.input_tokens == len(model.last.prompt_token_ids)
        assert usage.input_tokens_details.cached_tokens == 3
        assert usage.total_tokens == usage.input_tokens + generated


@on_model("opens")
async def test_answers_that_are_cut_off(model):
    """Within the text, the arguments, and the reasoning."""
    for text, items in (
        ("x</think>y<tool_c", [("reasoning", "x", "completed"), ("message", "y<tool_c", "incomplete")]),
        (f"</think>{CALL.partition('rich')[0]}", [("function_call", "weather", '{"city": "Zü', "incomplete")]),
        ("x</thi", [("reasoning", "x</thi", "incomplete")]),
    ):
        fields = {"tools": TOOLS, "max_output_tokens": 50, "extra_body": OPENED}
        found = await model.respond(text, reason="length", **fields)
        streamed = told(await model.events(text, reason="length", **fields))
        for own in (found, streamed):
            assert (own.status, own.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert [(*shown(item), item.status) for item in own.output] == items
        assert model.last.sampling.max_tokens == 50


@on_model("hermes")
async def test_what_a_response_repeats(model):
    fields = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.25, "user": "me",
        "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "store": True, "truncation": "disabled",
        "text": {"format": {"type": "json_object"}, "verbosity": "medium"}, "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"}, "background": False, "max_output_tokens": 99, "top_logprobs": 0,
    }  # fmt: skip
    found = await model.respond("{}", **fields)
    assert found.store is False  # pydantic keeps fields that it does not know
    assert (found.instructions, found.metadata, found.temperature, found.top_p, found.user) == (
        "Be brief.", {"a": "b"}, 0.5, 0.25, "me",
    )  # fmt: skip
    assert (found.tool_choice, found.parallel_tool_calls, found.max_output_tokens) == ("none", False, 99)
    assert [(tool.name, tool.parameters) for tool in found.tools] == [("weather", WEATHER["parameters"]), ("now", None)]
    assert found.text.format.type == "json_object"
    assert (found.model, found.truncation, found.previous_response_id) == ("fake", "disabled", None)
    sampling = model.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 99)
    bare = await model.respond("a")
    assert (bare.tools, bare.tool_choice, bare.metadata, bare.text.format.type) == ([], "auto", {}, "text")


def test_items_become_messages(history, capsys):
    """Also catches reasoning that is encrypted, and left out without a word."""
    def said(role, *texts):
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    def called(name, call_id):
        item = {"type": "function_call", "name": name, "call_id": call_id, "arguments": '{"a": 1}'}
        return item | {"id": "fc_1", "status": "completed"}

    def thought(content, summary=()):
        parts = [{"type": "reasoning_text", "text": content}] if content else None
        summaries = [{"type": "summary_text", "text": own} for own in summary]
        return {"type": "reasoning", "id": "rs_1", "summary": summaries, "content": parts, "encrypted_content": "gAAA"}

    result = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    parts = result | {"output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    cases = [
        ("hi", "user: hi\n"),
        ([{"role": "user", "content": "hi"}], "user: hi\n"),
        ([said("developer", "A."), said("system", "B."), said("user", "hi", "ho")], "system: S.\n\nA.\n\nB.\nuser: hi\nho\n"),
        ([said("user", "hi"), said("developer", "A.")], "system: S.\nuser: hi\nsystem: A.\n"),
        ([said("user", "hi"), said("assistant", "1"), said("assistant", "2")], "user: hi\nassistant: 1\nassistant: 2\n"),
        ([said("user", "hi"), called("f", "c"), result], 'user: hi\nassistant:  c=f{"a": 1}\ntool: noon of c\n'),
        ([said("user", "hi"), thought("hm"), said("assistant", "1"), called("f", "c"), called("g", "d"), parts],
         'user: hi\nassistant: (hm) 1 c=f{"a": 1} d=g{"a": 1}\ntool: a\nb of c\n'),
        ([said("user", "hi"), thought("", ["so", "then"]), called("f", "c"), result, thought("x"), called("g", "d")],
         'user: hi\nassistant: (so\nthen)  c=f{"a": 1}\ntool: noon of c\nassistant: (x)  d=g{"a": 1}\n'),
        ([said("user", "hi"), called("f", "c"), said("assistant", "1")],
         'user: hi\nassistant:  c=f{"a": 1}\nassistant: 1\n'),
        ([said("user", "hi"), thought(""), said("assistant", "1")], "user: hi\nassistant: 1\n"),
        ([said("user", "hi"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
         "user: hi\nassistant: no\n"),
    ]  # fmt: skip

    async def scenario(model):
        for given, expected in cases:
            with_system = expected.startswith("system: S.")
            await model.respond("a", input=given, instructions="S." if with_system else None)
            assert model.prompt == f"null\n{expected}bot:", given
        log = capsys.readouterr().err
        assert log.count("unsupported parts of requests are ignored: input[reasoning without a text]") == 1

    run(history, scenario)


def test_answers_go_back_as_they_are(history):
    """Agents append the output items to the input."""

    async def scenario(model):
        given = [{"role": "user", "content": "hi"}]
        found = await model.respond(f"<think>Hm.</think>So {CALL}", input=given, tools=TOOLS)
        call = found.output[-1]
        given += [item.to_dict() for item in found.output]
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "warm"})
        await model.respond("It is warm.", input=given, tools=TOOLS)
        own = '{"city": "Zürich", "days": 3}'
        assert model.prompt.endswith(
            f"user: hi\nassistant: (Hm.) So {call.call_id}=weather{own}\ntool: warm of {call.call_id}\nbot:"
        )
        tools = json.loads(model.prompt.partition("\n")[0])
        assert [tool["type"] for tool in tools] == ["function"] * 2
        assert [tool["function"] for tool in tools] == [
            {key: value for key, value in tool.items() if key != "type"} for tool in (WEATHER, NOW)
        ]

    run(history, scenario)


def test_efforts(folders, history, capfd):
    """Clients send an effort to every model. It goes to a template that uses it; else the log names it, once."""

    async def uses(model):
        for effort in ("low", "none"):
            found = await model.respond("a", reasoning={"effort": effort})
            assert model.prompt.endswith(f"bot{effort}:")
            assert found.reasoning.effort == effort

    async def has_a_switch(model):
        await model.respond("a", reasoning={"effort": "none"}, extra_body=None)
        assert model.prompt.endswith("bot:<think></think>")
        await model.respond("a", reasoning={"effort": "high"})
        assert model.prompt.endswith("bot:<think></think>")

    async def has_none(model):
        for effort in ("none", "low"):
            await model.respond("a", reasoning={"effort": effort}, text={"verbosity": effort})
            assert effort not in model.prompt

    run(history, uses)
    run(folders["opens"], has_a_switch)
    capfd.readouterr()
    for name in ("thinks", "plain"):
        run(folders[name], has_none)
        assert capfd.readouterr().err.count("ignored: reasoning.effort") == 1


@on_model("hermes")
async def test_choices_of_tools(model):
    arguments = '{"city": "Zürich", "days": 3}'
    listed = f'[{{"name": "weather", "arguments": {arguments}}}]'
    for choice, text in (("required", listed), ({"type": "function", "name": "weather"}, arguments)):
        found = await model.respond(text, tools=TOOLS, tool_choice=choice)
        assert [shown(item) for item in found.output] == [ZURICH]
        assert [shown(item) for item in told(await model.events(text, tools=TOOLS, tool_choice=choice)).output] == [ZURICH]
        schema = json.loads(model.last.sampling.structured_outputs.json)
        if choice == "required":
            names = [own["properties"]["name"] for own in schema["items"]["anyOf"]]
            assert names == [{"const": "weather"}, {"const": "now"}]
        else:
            assert schema == WEATHER["parameters"]
    await model.respond(listed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(model.last.sampling.structured_outputs.json)["maxItems"] == 1
    found = await model.respond(NOW_CALL + CALL, tools=TOOLS, parallel_tool_calls=False)
    assert [shown(item) for item in found.output] == [NOON]
    found = await model.respond(CALL, tools=TOOLS, tool_choice="none")
    assert [shown(item) for item in found.output] == [("message", CALL)]
    assert "weather" in model.prompt


def test_tools_that_are_no_functions(folders, capfd):
    """Coding agents send some. Each is named once in the log."""

    async def scenario(model):
        others = [{"type": kind} for kind in ("local_shell", "custom", "web_search", "mcp", "local_shell")]
        for _ in range(2):
            found = await model.respond("a", tools=[*others, NOW])
            assert [tool.name for tool in found.tools] == ["now"]
            assert "local_shell" not in model.prompt
        assert await model.refused(tools=others, tool_choice="required") == "tool_choice"
        assert await model.refused(tools=[*others, {"type": "function", "name": "a b"}]) == "tools[5].name"
        assert await model.refused(tools=[*others, NOW, NOW]) == "tools[6].name"

    run(folders["hermes"], scenario)
    err = capfd.readouterr().err
    assert "tools that are no functions are ignored: local_shell" in err
    assert all(err.count(kind) == 1 for kind in ("local_shell", "custom", "web_search", "mcp"))


@on_model("opens")
async def test_formats_of_the_text(model):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "own", "schema": schema, "strict": True}
    found = await model.respond('Hm</think>{"a": 1}', text={"format": form}, extra_body=OPENED)
    assert [shown(item) for item in found.output] == [("reasoning", "Hm"), ("message", '{"a": 1}')]
    spec = model.last.sampling.structured_outputs
    assert (json.loads(spec.json), spec.reasoning_end) == (schema, "</think>")
    await model.respond("{}", text={"format": {"type": "json_object"}})
    assert model.last.sampling.structured_outputs.json_object
    await model.respond("a", text={"format": {"type": "text"}})
    assert model.last.sampling.structured_outputs is None
    await model.respond("1", extra_body={"structured_outputs": {"regex": "1"}, "seed": 7, "top_k": 3})
    assert (model.last.sampling.structured_outputs.regex, model.last.sampling.seed, model.last.sampling.top_k) == ("1", 7, 3)
    both = {"text": {"format": {"type": "json_object"}}, "extra_body": {"structured_outputs": {"regex": "1"}}}
    assert await model.refused(**both) == "structured_outputs"


@on_model("plain")
async def test_nothing_is_stored(model):
    for ask in (model.client.responses.retrieve, model.client.responses.delete, model.client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored") as error:
            await ask("resp_1")
        assert error.value.param == "store"
    assert await model.refused(previous_response_id="resp_1") == "previous_response_id"


def test_an_error_within_a_stream(folders):
    """The client reads an event with the error, and the response with what came before."""

    async def scenario(model):
        asked = asyncio.create_task(model._create(stream=True))
        await model.engine.until(lambda e: e.requests)
        model.engine.send(TokenOutput(model.last.id, tuple(model.tokenizer.encode_plain("Well")), None))
        events = []
        async for event in await asked:
            events.append(event)
            if event.type == "response.output_text.delta":
                model.engine.send(TokenOutput(model.last.id, (), "error", error=OutOfMemoryError("no memory left")))
        for number, event in enumerate(events):
            STREAM_EVENT.validate_python(event.to_dict())
            assert event.sequence_number == number
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert "no memory left" in events[-2].message
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert [(*shown(item), item.status) for item in failed.output] == [("message", "Well", "incomplete")]

    async def before_the_first_token(model):
        asked = asyncio.create_task(model._create(stream=True))
        await model.engine.until(lambda e: e.requests)
        model.engine.send(TokenOutput(model.last.id, (), "error", error=OutOfMemoryError("no memory left")))
        with pytest.raises(openai.InternalServerError, match="no memory left"):
            await asked

    run(folders["plain"], scenario)
    run(folders["plain"], before_the_first_token)


def test_the_embedded_model(tiny, folder):
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60)
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 23) as generator:
        messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "About a dog."}]
        expected = generator.chat(messages, SamplingParams(max_tokens=16, temperature=0))
    request = {"model": "tiny", "instructions": "Tell a story.", "input": "About a dog."}
    request |= {"max_output_tokens": 16, "temperature": 0}
    found = client.responses.create(**request)
    assert (found.output_text, found.status) == (expected.text, "incomplete")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(expected.prompt_token_ids), 16)
    events = list(client.responses.create(**request, stream=True))
    assert told(events).output_text == expected.text
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "own", "schema": schema, "strict": True}}
    found = client.responses.create(model="tiny", input="hi", text=form, max_output_tokens=300)
    assert json.loads(found.output_text)["n"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="tiny", input="word " * 600)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")
    line = next(own for own in reversed(tiny.lines) if own["path"] == "/v1/responses" and own["status"] == 200)
    assert line["prompt_tokens"] > 0
    assert line["finish"] in ("stop", "length")
